"""The options of the vLLM connector: what a user may write into ``kv_connector_extra_config``.

`ConnectorOptions` is the one declaration of every option: its default, unit, bounds and meaning
stand at the field. Parsing, error messages and the table in ``docs/vllm-options.md`` come from
there. Nothing here imports vLLM.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from kvnixl.errors import ConfigError
from kvnixl.handshake import RemoteAllowList, check_advertised_host
from kvnixl.keys import (
    CurveClientKeys,
    CurveServerKeys,
    load_allowed_clients,
    load_public_key,
    load_secret_key,
)
from kvnixl.metadata import MAX_LEASE_SLOTS

__all__ = ["OPTIONS", "ConnectorOptions", "Option", "options_table"]

HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
ADVERTISED_VARIABLE: Final = "VLLM_HOST_IP"

_Z85_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_SHOWN_CHARS: Final = 120
_MAX_SECONDS: Final = 7 * 24 * 3600.0

_Kind = Literal["bool", "int", "seconds", "str", "path", "strings"]
_KIND_WORDS: Final[dict[_Kind, str]] = {
    "bool": "true or false",
    "int": "a whole number",
    "seconds": "a number",
    "str": "a text",
    "path": "the path of a file or directory",
    "strings": "a list of texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is known of one option.

    Attributes:
        name: its key in ``kv_connector_extra_config``.
        kind: what is accepted.
        default: what holds if it is not given.
        meaning: one or two sentences, in Markdown.
        unit: of the number, or ``""``.
        minimum, maximum: bounds of the number, both included.
        choices: the texts that are accepted; empty if any is.
        nullable: ``null`` is accepted.
        variable: the environment variable that is read if the option is not given.
        alias: another name for it, the one that vLLM's NixlConnector uses.
    """

    name: str
    kind: _Kind
    default: object
    meaning: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    nullable: bool = False
    variable: str = ""
    alias: str = ""

    @property
    def expected(self) -> str:
        """What is accepted, in words, with unit and bounds."""
        if self.choices:
            words = "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        else:
            words = _KIND_WORDS[self.kind]
        if self.unit:
            words += f" of {self.unit}"
        if self.minimum is not None and self.maximum is not None:
            words += f" from {_number(self.minimum)} to {_number(self.maximum)}"
        return words + (", or null" if self.nullable else "")

    def parse(self, value: object, where: str) -> Any:
        """The typed value.

        Args:
            value: from JSON.
            where: what the user wrote it with, for the message.

        Raises:
            ConfigError: it is ill-typed or out of bounds. The message does not repeat the value of
                a path, which may be a key by mistake.
        """
        parsed = self._typed(value)
        if parsed is None and not (value is None and self.nullable):
            shown = "that value" if self.kind == "path" else _show(value)
            hint = "" if value is not None else "; leave it out for the default"
            raise ConfigError(f"{where}: expected {self.expected}, not {shown}{hint}")
        return parsed

    def _typed(self, value: object) -> Any:
        """The value, or ``None`` if it does not fit."""
        match self.kind:
            case "bool":
                if isinstance(value, str):
                    # Examples for vLLM's NixlConnector write "True" in quotes.
                    return {"true": True, "false": False}.get(value.lower())
                return value if isinstance(value, bool) else None
            case "int" | "seconds":
                accepted = int if self.kind == "int" else (int, float)
                if isinstance(value, bool) or not isinstance(value, accepted):
                    return None
                assert self.minimum is not None
                assert self.maximum is not None
                if not self.minimum <= value <= self.maximum:  # also refuses NaN
                    return None
                return value if self.kind == "int" else float(value)
            case "str" | "path":
                if not isinstance(value, str) or not value:
                    return None
                return value if not self.choices or value in self.choices else None
            case "strings":
                if not isinstance(value, list | tuple):
                    return None
                if not all(isinstance(item, str) and item for item in value):
                    return None
                # An empty list of peers allows none; an empty list of anything else is a mistake.
                return tuple(value) if value or self.nullable else None


def _option(kind: _Kind, default: Any, meaning: str, **more: Any) -> Any:
    """A field of `ConnectorOptions`; its name is filled in later."""
    metadata = {"option": {"kind": kind, "default": default, "meaning": meaning, **more}}
    return field(default=default, metadata=metadata)


def _seconds(default: float, meaning: str, **more: Any) -> Any:
    bounds = {"unit": "seconds", "minimum": 0.01, "maximum": _MAX_SECONDS, **more}
    return _option("seconds", default, meaning, **bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """All options of the connector, typed and within bounds.

    Made by `parse`. The fields that say how the side channel was configured (``*_source``) are no
    options.
    """

    kv_lease_duration: float = _seconds(
        30.0,
        "How long a finished prefill keeps its blocks for a reader, and how far each heartbeat "
        "extends that. Readers send a heartbeat every sixth of their own: give all engines the "
        "same.",
        minimum=0.1,
    )
    kv_lease_slots: int = _option(
        "int",
        4096,
        "Lease slots of a producer: requests that may hold a lease at a time. Requests beyond that "
        "go without one and cannot be verified. 0 exports none. 8 bytes each.",
        minimum=0,
        maximum=MAX_LEASE_SLOTS,
    )
    lease_verification: Literal["prefer", "require", "off"] = _option(
        "str",
        "prefer",
        '`"prefer"`: verify every read whose producer gives a lease, count the others as '
        'unverified. `"require"`: decline the others. `"off"`: verify nothing.',
        choices=("prefer", "require", "off"),
    )
    kv_recompute_threshold: int = _option(
        "int",
        0,
        "A request that misses fewer tokens than this is computed locally instead of being "
        "pulled. 0 pulls every request. (vLLM's NixlConnector applies it, with a default of 64, "
        "to reads from a decode engine only.)",
        unit="tokens",
        minimum=0,
        maximum=1 << 31,
    )
    backends: tuple[str, ...] = _option("strings", ("UCX",), "NIXL backends to start.")
    num_threads: int = _option(
        "int",
        1,
        "UCX worker threads of a NIXL agent. (vLLM's NixlConnector: 4.)",
        minimum=1,
        maximum=256,
    )
    capture_telemetry: bool = _option(
        "bool",
        True,
        "Let NIXL measure each transfer. Without it the metrics of post and transfer times stay "
        "empty; nothing else changes.",
    )
    handshake_timeout: float = _seconds(10.0, "For the handshake with a peer.")
    request_timeout: float = _seconds(60.0, "For a whole read, from its arrival at the worker.")
    queue_timeout: float = _seconds(30.0, "For waiting until other reads leave room.")
    read_timeout: float = _seconds(30.0, "For the READs of a request.")
    verify_timeout: float = _seconds(10.0, "For verifying a request.")
    idle_timeout: float = _seconds(
        600.0,
        "A peer that was not used for so long is unloaded; the next request meets it again. "
        "(vLLM's NixlConnector: 3600 s.)",
        alias="engine_ttl",
    )
    max_inflight_bytes: int = _option(
        "int",
        1 << 30,
        "What one rank reads at a time. A larger request goes alone.",
        unit="bytes",
        minimum=1,
        maximum=1 << 50,
    )
    max_inflight_descs: int = _option(
        "int",
        1 << 17,
        "Descriptors, after merging, that one rank reads at a time.",
        minimum=1,
        maximum=1 << 31,
    )
    enforce_handshake_compat: bool = _option(
        "bool",
        True,
        "Refuse a peer whose vLLM version, model, dtype, attention backend or cache layout differ. "
        "`false` only warns, and wrong tokens are then possible.",
    )
    allow_model_path: bool = _option(
        "bool",
        False,
        "Accept a kvnixl peer that names the model or draft model differently, as when the same "
        "weights lie under another path. Nothing proves then that they are the same.",
    )
    enable_cross_layers_blocks: bool = _option(
        "bool",
        False,
        "Ask vLLM for one KV-cache tensor with the layers of a block side by side, where attention "
        "backend and layout allow it: fewer and longer descriptors.",
    )
    stock_peers: bool = _option(
        "bool",
        True,
        "Let a reader that runs vLLM's own NixlConnector end a lease by naming the request. "
        "`false`: only a reader that was given the lease can end it.",
    )
    allowed_peers: tuple[str, ...] | None = _option(
        "strings",
        None,
        "Hosts that a request may name as its remote engine: addresses, networks (`10.0.0.0/8`), "
        "names, `*.domain`. `null` allows all, an empty list none; see [security](security.md).",
        nullable=True,
    )
    side_channel_host: str = _option(
        "str",
        "localhost",
        "Address that the side channel listens on and, unless the next option says otherwise, that "
        "peers are told. `0.0.0.0`, `::` and `*` listen on all interfaces.",
        variable=HOST_VARIABLE,
    )
    side_channel_advertised_host: str | None = _option(
        "str",
        None,
        "Address that peers are told to connect to. `null`: `side_channel_host`; if that stands "
        "for all interfaces, `VLLM_HOST_IP`, and without it the engine does not start.",
        nullable=True,
    )
    side_channel_port: int = _option(
        "int",
        5600,
        "Port of the side channel of the first data-parallel rank; rank *i* takes the *i*-th port "
        "after it. 0 takes a free port.",
        minimum=0,
        maximum=65535,
        variable=PORT_VARIABLE,
    )
    curve_server_secret_key: str | None = _option(
        "path",
        None,
        "The `.key_secret` file of a server pair: encrypts the side channel of an engine that is "
        "read from. See [security](security.md).",
        nullable=True,
    )
    curve_allowed_clients: str | None = _option(
        "path",
        None,
        "A directory with the `.key` files of the clients that may ask. `null`: every client that "
        "knows the server's public key.",
        nullable=True,
    )
    curve_server_key: str | None = _option(
        "path",
        None,
        "The `.key` file of the servers that this engine asks.",
        nullable=True,
    )
    curve_client_secret_key: str | None = _option(
        "path",
        None,
        "The `.key_secret` file that this engine asks with.",
        nullable=True,
    )

    # No options: what the user sets host and port with, for messages of the side channel.
    side_channel_host_source: str = "side_channel_host in kv_connector_extra_config"
    side_channel_port_source: str = "side_channel_port in kv_connector_extra_config"

    @classmethod
    def parse(
        cls,
        extra_config: Mapping[str, Any] | None,
        environ: Mapping[str, str] = os.environ,
        dp_index: int = 0,
    ) -> ConnectorOptions:
        """Read ``kv_connector_extra_config`` and, where it is silent, the environment.

        Args:
            extra_config: ``vllm_config.kv_transfer_config.kv_connector_extra_config``.
            environ: environment variables.
            dp_index: ``parallel_config.data_parallel_index``, added to the port wherever it came
                from, unless it is 0.

        Raises:
            ConfigError: an option is unknown, ill-typed, out of bounds, or does not fit another
                one. The message names the option, what is expected and the remedy.
        """
        given = _rename(extra_config)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for option in OPTIONS.values():
            source = f"{option.name} in kv_connector_extra_config"
            if option.name in given:
                values[option.name] = option.parse(given[option.name], source)
            elif option.variable:
                source = option.variable
                if text := environ.get(source, "").strip():
                    raw: object = text
                    if option.kind == "int" and re.fullmatch(r"[0-9]{1,9}", text):
                        raw = int(text)
                    values[option.name] = option.parse(raw, f"environment variable {source}")
            sources[option.name] = source
        options = cls(
            **values,
            side_channel_host_source=sources["side_channel_host"],
            side_channel_port_source=sources["side_channel_port"],
        )
        if options.allowed_peers is not None:
            try:
                RemoteAllowList(options.allowed_peers)
            except ConfigError as error:
                raise ConfigError(f"allowed_peers in kv_connector_extra_config: {error}") from None
        options._check_keys()
        return replace(
            options,
            side_channel_port=options._port_of(dp_index),
            side_channel_advertised_host=options._advertised_host(environ),
        )

    def _port_of(self, dp_index: int) -> int:
        if self.side_channel_port == 0:
            return 0
        port = self.side_channel_port + dp_index
        if port > 65535:
            raise ConfigError(
                f"{self.side_channel_port_source}: port {self.side_channel_port} plus "
                f"data-parallel rank {dp_index} is above 65535; choose a lower port"
            )
        return port

    def _advertised_host(self, environ: Mapping[str, str]) -> str:
        host = self.side_channel_host
        advertised = self.side_channel_advertised_host
        if advertised is not None:
            source = "side_channel_advertised_host in kv_connector_extra_config"
            return check_advertised_host(advertised, option=source)
        if not _listens_everywhere(host):
            return check_advertised_host(host, option=self.side_channel_host_source)
        if advertised := environ.get(ADVERTISED_VARIABLE, "").strip():
            return check_advertised_host(advertised, option=ADVERTISED_VARIABLE)
        raise ConfigError(
            f"{self.side_channel_host_source}: {host!r} listens on all interfaces, but is no "
            f"address that peers can connect to; set side_channel_advertised_host or "
            f"{ADVERTISED_VARIABLE} to the address of this machine that they reach"
        )

    def _check_keys(self) -> None:
        for option in OPTIONS.values():
            path = getattr(self, option.name)
            if option.kind == "path" and path is not None and _is_key(path):
                raise ConfigError(
                    f"{option.name} in kv_connector_extra_config is a key, not a path: write it to "
                    "a file (python -m kvnixl.keys DIR makes such files) and name that"
                )
        if self.curve_allowed_clients is not None and self.curve_server_secret_key is None:
            raise ConfigError(
                "curve_allowed_clients is set without curve_server_secret_key: the list of clients "
                "would do nothing; set both or neither"
            )
        if (self.curve_server_key is None) != (self.curve_client_secret_key is None):
            missing = [
                name
                for name in ("curve_server_key", "curve_client_secret_key")
                if getattr(self, name) is None
            ]
            raise ConfigError(
                f"{missing[0]} is missing: an engine that asks encrypted side channels needs both "
                "curve_server_key and curve_client_secret_key"
            )

    # --- what the parts of kvnixl are made with ---------------------------------------------------

    @property
    def advertised_host(self) -> str:
        """What peers are told to connect to."""
        return self.side_channel_advertised_host or self.side_channel_host

    def agent_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `kvnixl.agent.Agent.open`."""
        return {
            "backends": self.backends,
            "num_threads": self.num_threads,
            "capture_telemetry": self.capture_telemetry,
        }

    def producer_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `kvnixl.producer.Producer`."""
        return {
            "num_lease_slots": self.kv_lease_slots,
            "lease_duration": self.kv_lease_duration,
            "stock_peers": self.stock_peers,
        }

    def reader_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `kvnixl.reader.Reader`."""
        return {
            "lease_verification": self.lease_verification,
            "max_inflight_bytes": self.max_inflight_bytes,
            "max_inflight_descs": self.max_inflight_descs,
            "handshake_timeout": self.handshake_timeout,
            "request_timeout": self.request_timeout,
            "queue_timeout": self.queue_timeout,
            "read_timeout": self.read_timeout,
            "verify_timeout": self.verify_timeout,
            "idle_timeout": self.idle_timeout,
        }

    def compat_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `kvnixl.compat.CompatibilityCheck`."""
        return {
            "enforce": self.enforce_handshake_compat,
            "allow_model_path": self.allow_model_path,
        }

    def server_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `kvnixl.handshake.HandshakeServer`, keys loaded.

        Raises:
            ConfigError: a key file cannot be read or holds no key.
        """
        return {
            "host": self.side_channel_host,
            "port": self.side_channel_port,
            "advertised_host": self.advertised_host,
            "curve": self.load_server_keys(),
            "host_option": self.side_channel_host_source,
            "port_option": self.side_channel_port_source,
        }

    def client_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `kvnixl.handshake.HandshakeClient`, keys loaded.

        Raises:
            ConfigError: a key file cannot be read or holds no key.
        """
        return {
            "timeout": self.handshake_timeout,
            "allowed": None if self.allowed_peers is None else RemoteAllowList(self.allowed_peers),
            "curve": self.load_client_keys(),
        }

    def load_server_keys(self) -> CurveServerKeys | None:
        """Keys of the side channel that this engine serves; ``None`` leaves it unencrypted."""
        if self.curve_server_secret_key is None:
            return None
        clients = self.curve_allowed_clients
        return CurveServerKeys(
            pair=load_secret_key(self.curve_server_secret_key),
            allowed_clients=None if clients is None else load_allowed_clients(clients),
        )

    def load_client_keys(self) -> CurveClientKeys | None:
        """Keys to ask peers' side channels with; ``None`` asks unencrypted."""
        if self.curve_client_secret_key is None or self.curve_server_key is None:
            return None
        return CurveClientKeys(
            pair=load_secret_key(self.curve_client_secret_key),
            server_public=load_public_key(self.curve_server_key),
        )


OPTIONS: Final[dict[str, Option]] = {
    each.name: Option(name=each.name, **each.metadata["option"])
    for each in fields(ConnectorOptions)
    if "option" in each.metadata
}
"""Every option by name, in the order of the documentation."""

# What vLLM's NixlConnector reads from the same place and this connector does not have.
_NOT_OFFERED: Final = {
    "bidirectional_kv_xfer": "kvnixl does not read from decode engines; remove it or set it to "
    "false",
    "decoder_kv_blocks_ttl": "it belongs to bidirectional_kv_xfer, which kvnixl does not have; "
    "remove it. For how long a producer keeps blocks, set kv_lease_duration",
    "push_registration_timeout": "it belongs to push mode, which kvnixl does not have; remove it",
}
# Fields of vLLM's KVTransferConfig that are easily written one level too deep.
_OF_TRANSFER_CONFIG: Final = frozenset(
    {
        "kv_connector",
        "engine_id",
        "kv_buffer_device",
        "kv_role",
        "kv_port",
        "kv_connector_module_path",
        "enable_permute_local_kv",
        "kv_load_failure_policy",
    }
)


def _rename(extra_config: object) -> dict[str, Any]:
    """The options that were given, under their own names.

    Raises:
        ConfigError: one is unknown, or an option is given under two names.
    """
    if extra_config is None:
        return {}
    if not isinstance(extra_config, Mapping):
        raise ConfigError(
            f"kv_connector_extra_config: expected a JSON object, not {_show(extra_config)}"
        )
    aliases = {option.alias: option.name for option in OPTIONS.values() if option.alias}
    given: dict[str, Any] = {}
    for key, value in extra_config.items():
        if key == "bidirectional_kv_xfer" and value is False:
            continue  # the stock connector's default, which is what kvnixl does
        name = aliases.get(key, key)
        if name not in OPTIONS:
            raise ConfigError(_unknown(key))
        if name in given:
            alias = OPTIONS[name].alias
            raise ConfigError(
                f"kv_connector_extra_config: {alias} is another name for {name}; give one of them"
            )
        given[name] = value
    return given


def _unknown(key: object) -> str:
    start = f"kv_connector_extra_config: {_show(key)}"
    if not isinstance(key, str):
        return f"{start} is no name of an option"
    if key in _NOT_OFFERED:
        return f"{start} is an option of vLLM's NixlConnector: {_NOT_OFFERED[key]}"
    if key in _OF_TRANSFER_CONFIG:
        return (
            f"{start} belongs one level up, beside kv_connector in --kv-transfer-config, not in "
            "kv_connector_extra_config"
        )
    nearest = difflib.get_close_matches(key.lower(), OPTIONS, n=1, cutoff=0.5)
    if nearest:
        return f"{start} is not an option; did you mean {nearest[0]!r}?"
    return f"{start} is not an option; the options are {', '.join(OPTIONS)}"


def _listens_everywhere(host: str) -> bool:
    """Whether it is an address to bind on all interfaces."""
    if host == "*":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_key(text: str) -> bool:
    return _Z85_KEY.fullmatch(text) is not None and not os.path.exists(text)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _show(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def options_table() -> str:
    """The options as a Markdown table."""
    rows = ["| option | default | unit | accepts | meaning |", "|---|---|---|---|---|"]
    for option in OPTIONS.values():
        name = f"`{option.name}`"
        if option.alias:
            name += f", also `{option.alias}`"
        if option.variable:
            name += f"; else `{option.variable}`"
        cells = [name, _show_default(option), option.unit or "-", _accepts(option), option.meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _show_default(option: Option) -> str:
    default = option.default
    if default is None or isinstance(default, bool):
        return f"`{str(default).lower().replace('none', 'null')}`"
    if isinstance(default, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in default) + "]`"
    if isinstance(default, str):
        return f'`"{default}"`'
    assert isinstance(default, int | float)
    return _number(default)


def _accepts(option: Option) -> str:
    """As `Option.expected`, without the unit, which has a column of its own."""
    return option.expected.replace(f" of {option.unit}", "") if option.unit else option.expected
