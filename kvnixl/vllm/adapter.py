"""Everything of vLLM that differs between its versions, and how its configuration is read.

The rest of the glue takes vLLM's names from here and sees plain values: `EngineFacts` of the
configuration, `GroupFacts` of the cache groups, and a `kvnixl.layout.CacheLayout` of the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvnixl.errors import ConfigError
from kvnixl.layout import CacheLayout, layout_from_tensors

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    CACHE_HIT_SOURCE: Any = CacheHitSource.P2P
except ImportError:  # vLLM 0.31 does not tell sources apart
    CACHE_HIT_SOURCE = None

__all__ = [
    "CACHE_HIT_SOURCE",
    "EngineFacts",
    "GroupFacts",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "adopt_vllm_logging",
    "attn_backend_name",
    "cache_layout",
    "check_vllm_version",
    "required_kvcache_layout",
    "transfer_blocks",
    "transfer_groups",
    "worker_rank",
]

logger = logging.getLogger(__name__)

TESTED = ("0.32",)
"""Run end to end by the test suite."""
READ = ("0.31", "0.33")
"""Their sources were read for differences, but they are not run by the test suite."""

# Kinds of cache whose blocks hold `block_size` tokens each and nothing else.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_REPLICATED = ("MLAAttentionSpec", "SlidingWindowMLASpec")


def check_vllm_version(version: str | None = None) -> None:
    """Refuse a vLLM that this connector does not know.

    Raises:
        ConfigError: the version is neither tested nor read.
    """
    if version is None:
        version = vllm.__version__
    release = ".".join(version.split(".")[:2])
    if release in TESTED:
        return
    if release in READ:
        logger.warning(
            "kvnixl is not tested with vLLM %s, only with %s: compare outputs before you rely on "
            "it.",
            version,
            ", ".join(TESTED),
        )
        return
    raise ConfigError(
        f"kvnixl does not know vLLM {version}; it is tested with {', '.join(TESTED)} and expected "
        f"to work with {', '.join(READ)}. Install one of these, or a kvnixl that knows this vLLM"
    )


# --- configuration ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the connector needs of a ``VllmConfig``.

    Attributes:
        engine_id: this engine's id.
        produces, consumes: what ``kv_role`` allows.
        recomputes: whether vLLM recomputes a request whose KV could not be loaded
            (``kv_load_failure_policy``); it fails otherwise.
        tp_size: tensor-parallel size.
        dp_index: data-parallel index.
        extra_config: ``kv_connector_extra_config``.
    """

    engine_id: str
    produces: bool
    consumes: bool
    recomputes: bool
    tp_size: int
    dp_index: int
    extra_config: Mapping[str, Any]

    @classmethod
    def read(cls, vllm_config: Any) -> EngineFacts:
        """
        Raises:
            ConfigError: the configuration asks for something that the connector does not support;
                the message names it.
        """
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        for name, what in (
            ("pipeline_parallel_size", "pipeline parallelism"),
            ("decode_context_parallel_size", "decode context parallelism"),
            ("prefill_context_parallel_size", "prefill context parallelism"),
        ):
            size = getattr(parallel, name, 1)
            if size > 1:
                raise ConfigError(
                    f"KvNixlConnector does not support {what} ({name}={size}): set it to 1"
                )
        device = _device_type()
        if device != "cpu" and transfer.kv_buffer_device == "cpu":
            raise ConfigError(
                f"kv_buffer_device 'cpu' on {device}: KvNixlConnector reads and writes the KV "
                f"cache where it is and has no host buffer; remove kv_buffer_device"
            )
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise ConfigError(
                "enable_sleep_mode frees the KV cache while peers may read it, which "
                "KvNixlConnector does not support: switch it off"
            )
        if getattr(vllm_config, "num_prefill_lookahead_tokens", 1) > 1:
            raise ConfigError(
                "speculative decoding with several MTP modules needs a shortened prefill, which "
                "KvNixlConnector does not support: use one module"
            )
        # vLLM itself refuses these beside connectors that it knows by name.
        aux_output = getattr(vllm_config, "aux_output_config", None)
        if getattr(aux_output, "enable_return_routed_experts", False):
            raise ConfigError(
                "enable_return_routed_experts wants the experts of tokens that another engine "
                "computed, which KvNixlConnector does not carry: switch it off"
            )
        attention = getattr(vllm_config, "attention_config", None)
        if getattr(attention, "hisparse_config", None) is not None:
            raise ConfigError(
                "hisparse_config keeps KV in host memory, which KvNixlConnector does not read or "
                "write: remove it"
            )
        if transfer.enable_permute_local_kv:
            raise ConfigError(
                "enable_permute_local_kv is not supported by KvNixlConnector: give both engines "
                "the same KV cache layout"
            )
        return cls(
            engine_id=transfer.engine_id,
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            recomputes=transfer.kv_load_failure_policy == "recompute",
            tp_size=parallel.tensor_parallel_size,
            dp_index=parallel.data_parallel_index,
            extra_config=transfer.kv_connector_extra_config,
        )


def _device_type() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def required_kvcache_layout(vllm_config: Any, cross_layers: bool) -> str | None:
    """vLLM's name of the layout to use; ``None`` leaves the choice to vLLM.

    Heads outside tokens, so that a rank's heads are one piece of a block. A replicated cache (MLA)
    has no heads to slice.
    """
    model = vllm_config.model_config
    if model is None or model.use_mla:
        return None
    return "BLHNC" if cross_layers else "LBHNC"


def adopt_vllm_logging() -> None:
    """Let kvnixl's log lines go where vLLM's go, at vLLM's level."""
    ours, theirs = logging.getLogger("kvnixl"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


# --- cache groups -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One cache group that takes part in transfers.

    Attributes:
        index: its position among all of vLLM's cache groups.
        layers: names of its layers.
        block_size: tokens of a logical block.
        sliding_window: tokens, 0 for full attention.
        replicated: layers whose cache is the same on every rank (MLA).
    """

    index: int
    layers: tuple[str, ...]
    block_size: int
    sliding_window: int
    replicated: frozenset[str]

    @property
    def max_window_blocks(self) -> int:
        """Logical blocks that a window can touch; 0 for full attention.

        One more than fit into it, because it need not begin where a block does. Both sides of a
        transfer clip their lists to this, also a stock vLLM.
        """
        return -(-self.sliding_window // self.block_size) + 1 if self.sliding_window else 0

    def clip(self, blocks: list[int]) -> list[int]:
        """The blocks at the end of the sequence that a window can touch."""
        count = self.max_window_blocks
        return blocks[-count:] if count else blocks


def transfer_groups(kv_cache_config: Any) -> tuple[GroupFacts, ...]:
    """The cache groups that take part in transfers.

    Raises:
        ConfigError: a group's cache cannot be transferred; names the kind and a layer.
    """
    groups = []
    for index in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        windows = set()
        for layer, layer_spec in by_layer.items():
            kind = type(layer_spec).__name__
            if (
                kind not in (*_FULL, *_WINDOWED)
                or group.host_resident
                or getattr(layer_spec, "tokens_per_state", 1) > 1
                or getattr(layer_spec, "prefix_replay_tokens", 0) > 0
            ):
                raise ConfigError(
                    f"the KV cache of layer {layer!r} is of kind {kind}, which KvNixlConnector "
                    f"cannot transfer (it can: {', '.join((*_FULL, *_WINDOWED))})"
                )
            windows.add(layer_spec.sliding_window if kind in _WINDOWED else 0)
        if len(windows) != 1:
            raise ConfigError(
                f"cache group {index} has layers with different sliding windows {sorted(windows)}"
            )
        groups.append(
            GroupFacts(
                index=index,
                layers=tuple(by_layer),
                block_size=spec.block_size,
                sliding_window=windows.pop(),
                replicated=frozenset(
                    layer for layer, s in by_layer.items() if type(s).__name__ in _REPLICATED
                ),
            )
        )
    return tuple(groups)


def transfer_blocks(
    groups: Sequence[GroupFacts], block_ids: Sequence[list[int]]
) -> tuple[list[int], ...]:
    """Of the block lists of all cache groups those that are transferred, windows clipped."""
    return tuple(group.clip(list(block_ids[group.index])) for group in groups)


# --- the worker's tensors -----------------------------------------------------------------------


def worker_rank() -> int:
    """This worker's tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def attn_backend_name(vllm_config: Any) -> str:
    """The name that a stock vLLM puts into its handshake: that of the first layer's backend."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return str(get_current_attn_backends(vllm_config)[0].get_name())


def cache_layout(
    vllm_config: Any, groups: Sequence[GroupFacts], kv_caches: Mapping[str, Any]
) -> CacheLayout:
    """The layout of vLLM's cache tensors, each of shape ``[blocks, KV heads, tokens, content]``.

    Raises:
        LayoutError, ConfigError: a tensor cannot be cut into blocks.
    """
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    # Layers that share another one's cache have no group.
    caches = {layer: cache for layer, cache in kv_caches.items() if layer in group_of}
    ratios = set()
    for layer, cache in caches.items():
        if cache.dim() != 4:
            raise ConfigError(
                f"the cache of layer {layer!r} has the shape {tuple(cache.shape)}; expected "
                "[blocks, KV heads, tokens, content]"
            )
        ratio, rest = divmod(groups[group_of[layer]].block_size, cache.shape[2])
        if rest:
            raise ConfigError(
                f"the cache of layer {layer!r} has kernel blocks of {cache.shape[2]} tokens, of "
                f"which no whole number makes a block of {groups[group_of[layer]].block_size}"
            )
        ratios.add(ratio)
    if len(ratios) != 1:
        raise ConfigError(f"cache groups with different kernel blocks per block: {sorted(ratios)}")
    on_cpu = _device_type() == "cpu"
    return layout_from_tensors(
        caches,
        num_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        dims="BHNC",
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        replicated=[layer for group in groups for layer in group.replicated if layer in caches],
        groups={layer: group_of[layer] for layer in caches},
        sliding_windows=[group.sliding_window for group in groups],
        kv_layout=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        kernel_blocks_per_block=ratios.pop(),
        attn_backend=attn_backend_name(vllm_config),
        # vLLM's CPU backend stores K transposed inside (block, head), whatever the shape says.
        token_granular=not on_cpu,
        packing=_cpu_packing(vllm_config, caches) if on_cpu else "",
    )


def _cpu_packing(vllm_config: Any, layers: Iterable[str]) -> str:
    """How the CPU backend packs a block: this depends on the instruction set that it picked."""
    context = vllm_config.compilation_config.static_forward_context
    kinds = {str(getattr(context.get(layer), "isa", "")) for layer in layers} - {""}
    return "cpu:" + ",".join(sorted(kinds)) if kinds else ""
