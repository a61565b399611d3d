"""Whether two engines fit: the compatibility hash, and the reasons when they do not.

The hash is that of vLLM's NixlConnector: SHA-256 over the JSON text (sorted keys) of the factors.
Parallel sizes, block size and layout are not in it; they are compared field by field when peers
meet. kvnixl peers also send the factors themselves, so that a mismatch names what differs.

``python -m kvnixl.compat A.json B.json`` compares two dumps of factors: the text of `dump_factors`
or ``CompatibilityCheck.factors_text``, which the vLLM connector logs at start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvnixl.errors import CompatibilityError, ConfigError, WireError
from kvnixl.metadata import MAX_FACTORS_CHARS, NIXL_CONNECTOR_VERSION, KvNixlExtension

__all__ = [
    "ABSENT",
    "CompatibilityCheck",
    "Difference",
    "compatibility_factors",
    "compute_nixl_compatibility_hash",
    "dump_factors",
    "explain",
    "hash_factors",
    "load_factors",
]

logger = logging.getLogger(__name__)

ABSENT = "(absent)"
"""Stands in a `Difference` for a factor that one side does not have."""

# Known to kvnixl only: compared when both sides know them, outside the hash.
_UNHASHED = ("model_revision", "model_commit")
_MAX_REMEMBERED_WARNINGS = 1024
_MAX_SHOWN_DIFFERENCES = 16
_CONNECTOR_VERSIONS = {"0.31": 13, "0.32": NIXL_CONNECTOR_VERSION, "0.33": 15}


class Difference(NamedTuple):
    """One factor that differs. ``name`` is dotted for nested factors."""

    name: str
    local: Any
    remote: Any

    def __str__(self) -> str:
        # A peer chooses its factors' names: one that could disturb a log is quoted.
        plain = self.name.isprintable() and self.name.isascii() and len(self.name) <= 100
        name = self.name if plain else _show(self.name)
        return f"{name}: local {_show(self.local)}, remote {_show(self.remote)}"


def compatibility_factors(
    config: Any,
    attn_backend_name: str,
    transfer_mode: str = "pull",
    *,
    vllm_version: str | None = None,
    connector_version: int | None = None,
) -> dict[str, Any]:
    """What decides whether two engines can exchange KV cache.

    Args:
        config: a ``VllmConfig``, or any object with the same attributes.
        attn_backend_name: the attention backend that writes the cache.
        transfer_mode: ``"pull"`` or ``"push"``; the two do not mix.
        vllm_version: defaults to the version of the imported vLLM.
        connector_version: the NixlConnector protocol of that vLLM; known for 0.31 to 0.33.

    Returns:
        The hashed factors, and ``model_revision`` and ``model_commit``, which are not hashed.

    Raises:
        ConfigError: a version is not known and was not given, or a factor has no JSON form.
    """
    if vllm_version is None:
        vllm_version = _imported_vllm_version()
    if connector_version is None:
        connector_version = _connector_version(vllm_version)
    model = config.model_config
    cache = config.cache_config
    hf_config = getattr(model, "hf_config", None)
    factors = {
        "vllm_version": vllm_version,
        "nixl_connector_version": connector_version,
        "model": model.model,
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        "attn_backend_name": attn_backend_name,
        "cache_dtype": str(cache.cache_dtype),
        "is_hma_enabled": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "speculative_config": _speculative_factors(config),
        "transfer_mode": transfer_mode,
        "model_revision": getattr(model, "revision", None),
        "model_commit": getattr(hf_config, "_commit_hash", None),
    }
    dump_factors(factors)
    return factors


def _speculative_factors(config: Any) -> dict[str, Any] | None:
    """Only speculators that read the target's hidden states have a KV cache that must fit too."""
    speculative = config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return None
    draft = speculative.draft_model_config
    layer_ids = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    # None inherits the target's dtype; asking for that dtype by name must give the same hash.
    kv_cache_dtype = speculative.kv_cache_dtype or config.cache_config.cache_dtype
    return {
        "method": speculative.method,
        "model": draft.model,
        "revision": draft.revision,
        "code_revision": draft.code_revision,
        "parallel_drafting": speculative.parallel_drafting,
        "kv_cache_dtype": str(kv_cache_dtype),
        "auxiliary_layer_ids": list(layer_ids) if layer_ids is not None else None,
    }


def _imported_vllm_version() -> str:
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    if not isinstance(version, str):
        raise ConfigError("vLLM is not imported: pass its version as vllm_version")
    return version


def _connector_version(vllm_version: str) -> int:
    release = ".".join(vllm_version.split(".")[:2])
    try:
        return _CONNECTOR_VERSIONS[release]
    except KeyError:
        raise ConfigError(
            f"the NixlConnector protocol of vLLM {vllm_version} is not known (known: "
            f"{', '.join(_CONNECTOR_VERSIONS)}): pass it as connector_version"
        ) from None


def hash_factors(factors: Mapping[str, Any]) -> str:
    """SHA-256 (64 hexadecimal digits) of the hashed factors' JSON text."""
    hashed = {name: value for name, value in factors.items() if name not in _UNHASHED}
    return hashlib.sha256(dump_factors(hashed).encode()).hexdigest()


def compute_nixl_compatibility_hash(
    config: Any,
    attn_backend_name: str,
    transfer_mode: str = "pull",
    *,
    vllm_version: str | None = None,
    connector_version: int | None = None,
) -> str:
    """The hash that a stock vLLM of the same version computes; see `compatibility_factors`."""
    return hash_factors(
        compatibility_factors(
            config,
            attn_backend_name,
            transfer_mode,
            vllm_version=vllm_version,
            connector_version=connector_version,
        )
    )


def dump_factors(factors: Mapping[str, Any]) -> str:
    """The JSON text of factors, keys sorted.

    Raises:
        ConfigError: names the first factor that has no JSON form.
    """
    try:
        text = json.dumps(dict(factors), sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        for name, value in factors.items():
            try:
                json.dumps(value, sort_keys=True)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"compatibility factor {name!r}: {error}") from None
        raise ConfigError("compatibility factors: a name is not a string") from None
    if len(text) > MAX_FACTORS_CHARS:
        raise ConfigError(f"compatibility factors of {len(text)} characters: too long to send")
    return text


def load_factors(text: str) -> dict[str, Any]:
    """The inverse of `dump_factors`, for text from outside.

    Raises:
        WireError: not a JSON object, or too long.
    """
    if len(text) > MAX_FACTORS_CHARS:
        raise WireError(f"compatibility factors of {len(text)} characters: too long")
    try:
        factors = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"compatibility factors are not JSON: {error}") from None
    if not isinstance(factors, dict):
        raise WireError("compatibility factors are not a JSON object")
    return factors


def explain(
    local: Mapping[str, Any], remote: Mapping[str, Any], *, allow_model_path: bool = False
) -> list[Difference]:
    """Every factor that differs, with both values; empty if the engines fit.

    ``model_commit`` is compared when both sides know it, else ``model_revision`` when both know
    that.

    Args:
        local: this engine's factors.
        remote: the peer's.
        allow_model_path: the same weights may lie under another path or name, for the model and
            for the draft model; nothing then proves that they are the same.
    """
    differences: list[Difference] = []
    _compare("", _hashed(local), _hashed(remote), differences)
    if allow_model_path:
        differences = [
            difference
            for difference in differences
            if difference.name not in ("model", "speculative_config.model")
        ]
    if local.get("model") == remote.get("model"):
        for name in reversed(_UNHASHED):  # the commit says more than the name that was asked for
            ours, theirs = local.get(name), remote.get(name)
            if ours and theirs:
                if ours != theirs:
                    differences.append(Difference(name, ours, theirs))
                break
    return differences


def _hashed(factors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in factors.items() if name not in _UNHASHED}


def _compare(
    prefix: str, local: Mapping[str, Any], remote: Mapping[str, Any], found: list[Difference]
) -> None:
    for name in sorted({*local, *remote}):
        ours, theirs = local.get(name, ABSENT), remote.get(name, ABSENT)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            _compare(f"{prefix}{name}.", ours, theirs, found)
        elif (name in local) != (name in remote) or not _same(ours, theirs):
            found.append(Difference(prefix + name, ours, theirs))


def _same(ours: Any, theirs: Any) -> bool:
    """As the hash sees it: ``1``, ``1.0`` and ``True`` are three values."""
    return json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)


class CompatibilityCheck:
    """This engine's factors, and what to do about a peer whose factors differ.

    Attributes:
        factors: this engine's factors.
        hash: their hash.
    """

    def __init__(
        self, factors: Mapping[str, Any], *, enforce: bool = True, allow_model_path: bool = False
    ) -> None:
        """
        Args:
            factors: from `compatibility_factors`.
            enforce: ``False`` (option ``enforce_handshake_compat``) only warns, once per peer hash.
            allow_model_path: see `explain`; works between kvnixl peers only, since a stock peer
                compares nothing but the hash.
        """
        self.factors = dict(factors)
        self.hash = hash_factors(factors)
        self.factors_text = dump_factors(factors)
        self._enforce = enforce
        self._allow_model_path = allow_model_path
        self._warned: set[str] = set()

    def check(
        self, remote_hash: str, remote: KvNixlExtension | None = None, *, peer: str = "peer"
    ) -> tuple[Difference, ...]:
        """Compares a peer with this engine.

        Args:
            remote_hash: the peer's hash.
            remote: kvnixl's part of the peer's metadata, if it sent one.
            peer: what to call the peer.

        Returns:
            The differences of a peer that is accepted in spite of them.

        Raises:
            CompatibilityError: the peer does not fit and this is enforced.
        """
        remote_factors = _trusted_factors(remote_hash, remote)
        if remote_factors is None:
            if remote_hash == self.hash:
                return ()
            differences: list[Difference] = []
            reason = (
                "it does not say what differs: compare the vLLM version, model, dtype, attention "
                "backend, KV cache dtype, hybrid-allocator and speculative options of both"
            )
        else:
            differences = explain(
                self.factors, remote_factors, allow_model_path=self._allow_model_path
            )
            if not differences:
                return tuple(explain(self.factors, remote_factors))
            reason = _join(differences)
        message = (
            f"{peer} is not compatible with this engine (hash {_show(remote_hash)}, "
            f"local {self.hash!r}): {reason}"
        )
        if self._enforce:
            raise CompatibilityError(
                f"{message}. Start both with the same configuration, or set "
                f"enforce_handshake_compat to false to transfer regardless",
                local_hash=self.hash,
                remote_hash=remote_hash,
                differences=differences,
            )
        if remote_hash not in self._warned:
            if len(self._warned) >= _MAX_REMEMBERED_WARNINGS:
                self._warned.clear()
            self._warned.add(remote_hash)
            logger.warning("%s. Transferring regardless: enforce_handshake_compat is off", message)
        return tuple(differences)


def _trusted_factors(remote_hash: str, remote: KvNixlExtension | None) -> dict[str, Any] | None:
    """The peer's factors, if it sent some and they give the hash that it claims."""
    if remote is None or remote.factors is None:
        return None
    try:
        factors = load_factors(remote.factors)
        return factors if hash_factors(factors) == remote_hash else None
    except (WireError, ConfigError):
        return None


def _join(differences: Sequence[Difference]) -> str:
    shown = [str(difference) for difference in differences[:_MAX_SHOWN_DIFFERENCES]]
    if len(shown) < len(differences):
        shown.append(f"and {len(differences) - len(shown)} more")
    return "; ".join(shown)


def _show(value: Any, limit: int = 200) -> str:
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares two dumps; 0 if they fit, 1 if they differ, 2 if one cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m kvnixl.compat",
        description="Compares the compatibility factors of two engines.",
    )
    parser.add_argument("local", type=Path, help="JSON dump of one engine's factors")
    parser.add_argument("remote", type=Path, help="JSON dump of the other's")
    parser.add_argument(
        "--allow-model-path",
        action="store_true",
        help="the same weights may lie under another path",
    )
    options = parser.parse_args(arguments)
    dumps = []
    for path in (options.local, options.remote):
        try:
            factors = load_factors(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, WireError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        print(f"{path}: {hash_factors(factors)}")
        dumps.append(factors)
    differences = explain(*dumps, allow_model_path=options.allow_model_path)
    for difference in differences:
        print(f"  {difference}")
    print("the engines do not fit" if differences else "the engines fit")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
