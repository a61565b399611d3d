"""What of vLLM the connector refuses, warns about, and translates."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

vllm_world = pytest.importorskip("tests.vllm_world", reason="vLLM is not installed")

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvnixl.errors import ConfigError  # noqa: E402
from kvnixl.vllm import adapter  # noqa: E402
from kvnixl.vllm.adapter import (  # noqa: E402
    EngineFacts,
    GroupFacts,
    KVConnectorRole,
    adopt_vllm_logging,
    cache_layout,
    check_vllm_version,
    required_kvcache_layout,
    transfer_blocks,
    transfer_groups,
)
from kvnixl.vllm.connector import KvNixlConnector  # noqa: E402
from tests.vllm_world import full_attention, joined, make_cache_config, make_config  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def _joined() -> Iterator[None]:
    with joined():
        yield


# --- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev7+gabc", "0.32.0+cpu", None])
def test_the_tested_version_is_taken_without_a_word(
    version: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if version is None and not vllm.__version__.startswith("0.32."):
        pytest.skip(f"vLLM {vllm.__version__} is installed")
    check_vllm_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.33.2+cu130"])
def test_a_version_that_was_only_read_is_warned_about(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_vllm_version(version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert version in record.getMessage()
    assert "only with 0.32" in record.getMessage()


@pytest.mark.parametrize("version", ["0.30.2", "0.3.1", "0.34.0", "1.32.0", "0.320", "dev", ""])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_vllm_version(version)
    for part in (version, "0.31", "0.32", "0.33", "Install"):
        assert part in str(caught.value)


def test_the_connector_asks_for_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    with pytest.raises(ConfigError, match=r"0\.29\.0"):
        KvNixlConnector(make_config(), KVConnectorRole.SCHEDULER, make_cache_config())


# --- configurations -----------------------------------------------------------------------------


def test_what_is_read_of_a_configuration() -> None:
    config = make_config(
        engine_id="e", role="kv_consumer", policy="fail", tp_size=2, kv_lease_duration=3.0
    )
    config.parallel_config.data_parallel_index = 3
    assert EngineFacts.read(config) == EngineFacts(
        engine_id="e",
        produces=False,
        consumes=True,
        recomputes=False,
        tp_size=2,
        dp_index=3,
        extra_config={"kv_lease_duration": 3.0},
    )


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles(role: str, produces: bool, consumes: bool) -> None:
    facts = EngineFacts.read(make_config(role=role))
    assert (facts.produces, facts.consumes) == (produces, consumes)


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("model_config", "enable_sleep_mode", True, "enable_sleep_mode"),
        ("kv_transfer_config", "enable_permute_local_kv", True, "enable_permute_local_kv"),
        ("aux_output_config", "enable_return_routed_experts", True, "does not carry"),
        ("attention_config", "hisparse_config", object(), "host memory"),
    ],
)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_configuration_that_is_not_supported_is_named(
    role: KVConnectorRole, where: str, name: str, value: object, words: str
) -> None:
    config = make_config()
    assert hasattr(getattr(config, where), name), f"vLLM has no {name} any more"
    setattr(getattr(config, where), name, value)
    with pytest.raises(ConfigError) as caught:
        KvNixlConnector(config, role, make_cache_config())
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_a_host_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    config.kv_transfer_config.kv_buffer_device = "cpu"
    EngineFacts.read(config)  # the cache itself is there
    monkeypatch.setattr(adapter, "_device_type", lambda: "cuda")
    with pytest.raises(ConfigError, match="kv_buffer_device 'cpu' on cuda"):
        EngineFacts.read(config)


def test_a_shortened_prefill_is_refused() -> None:
    config = make_config()
    assert hasattr(config, "num_prefill_lookahead_tokens")
    fields = ("kv_transfer_config", "parallel_config", "model_config")
    stub = SimpleNamespace(**{name: getattr(config, name) for name in fields})
    EngineFacts.read(stub)
    stub.num_prefill_lookahead_tokens = 2
    with pytest.raises(ConfigError, match="MTP"):
        EngineFacts.read(stub)


def test_unknown_options_are_refused_on_both_sides() -> None:
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="kv_lease_duration"):
            KvNixlConnector(make_config(kv_lease_durations=3), role, make_cache_config())
    with pytest.raises(ConfigError, match="kv_lease_duration"):
        KvNixlConnector.get_required_kvcache_layout(make_config(kv_lease_durations=3))


def test_the_layout_that_is_asked_for() -> None:
    assert required_kvcache_layout(make_config(), cross_layers=False) == "LBHNC"
    assert required_kvcache_layout(make_config(), cross_layers=True) == "BLHNC"
    config = make_config(enable_cross_layers_blocks=True)
    assert KvNixlConnector.get_required_kvcache_layout(config) == "BLHNC"
    config.model_config.use_mla = True
    assert KvNixlConnector.get_required_kvcache_layout(config) is None
    config.model_config = None
    assert KvNixlConnector.get_required_kvcache_layout(config) is None


def test_vllm_knows_the_layouts_that_are_asked_for() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    for cross_layers in (False, True):
        assert required_kvcache_layout(make_config(), cross_layers) in KVCacheLayout.__members__


# --- cache groups -------------------------------------------------------------------------------


def window(size: int, **more: Any) -> SlidingWindowSpec:
    spec = full_attention(**more)
    return SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        sliding_window=size,
    )


def mla() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)


def config_of(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=list(groups))


def test_groups_are_translated() -> None:
    groups = transfer_groups(
        config_of(
            KVCacheGroupSpec(["a", "b"], full_attention()),
            KVCacheGroupSpec(["c"], window(6)),
            KVCacheGroupSpec(["d"], mla()),
        )
    )
    assert groups == (
        GroupFacts(0, ("a", "b"), 4, 0, frozenset()),
        GroupFacts(1, ("c",), 4, 6, frozenset()),
        GroupFacts(2, ("d",), 4, 0, frozenset({"d"})),
    )


def test_groups_that_take_no_part_are_left_out() -> None:
    config = config_of(
        KVCacheGroupSpec(["a"], full_attention(), enable_kv_transfer=False),
        KVCacheGroupSpec(["b"], full_attention()),
    )
    (group,) = transfer_groups(config)
    assert (group.index, group.layers) == (1, ("b",))
    connector = KvNixlConnector(make_config(), KVConnectorRole.SCHEDULER, config)
    assert connector.get_loaded_kv_cache_group_ids(SimpleNamespace()) == (1,)


def test_layers_of_one_group_are_looked_at_one_by_one() -> None:
    by_layer = {"a": full_attention(), "b": full_attention(head_size=16)}
    spec = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=by_layer)
    (group,) = transfer_groups(config_of(KVCacheGroupSpec(["a", "b"], spec)))
    assert group.layers == ("a", "b")
    by_layer["b"] = window(6)
    with pytest.raises(ConfigError, match="different sliding windows"):
        transfer_groups(config_of(KVCacheGroupSpec(["a", "b"], spec)))


def test_a_kind_of_cache_that_cannot_be_transferred_is_named() -> None:
    spec = full_attention()
    chunked = ChunkedLocalAttentionSpec(
        block_size=4,
        num_kv_heads=spec.num_kv_heads,
        head_size=8,
        dtype=spec.dtype,
        attention_chunk_size=8,
    )
    with pytest.raises(ConfigError) as caught:
        transfer_groups(config_of(KVCacheGroupSpec(["layers.3"], chunked)))
    for part in ("layers.3", "ChunkedLocalAttentionSpec", "FullAttentionSpec"):
        assert part in str(caught.value)


def test_a_cache_in_host_memory_is_refused() -> None:
    group = KVCacheGroupSpec(["layers.3"], full_attention(), host_resident=True)
    assert group.host_resident
    with pytest.raises(ConfigError, match=r"layers\.3"):
        transfer_groups(SimpleNamespace(transfer_group_ids=(0,), kv_cache_groups=[group]))


def test_blocks_that_are_transferred() -> None:
    groups = (GroupFacts(0, (), 4, 0, frozenset()), GroupFacts(2, (), 4, 6, frozenset()))
    lists = ([1, 2, 3, 4, 5], [9], [1, 2, 3, 4, 5])
    assert transfer_blocks(groups, lists) == ([1, 2, 3, 4, 5], [3, 4, 5])
    assert transfer_blocks(groups, ([], [], [])) == ([], [])


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_a_window_touches_one_block_more_than_fit_into_it(size: int, expected: int) -> None:
    assert GroupFacts(0, (), 4, size, frozenset()).max_window_blocks == expected


# --- tensors ------------------------------------------------------------------------------------


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a configuration as the layout needs."""
    monkeypatch.setattr(adapter, "attn_backend_name", lambda _config: "FAKE")
    return SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(name="LBHNC")
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def test_a_layout_of_tensors(config: Any) -> None:
    groups = transfer_groups(make_cache_config())
    caches = {layer: torch.zeros(8, 2, 4, 16) for layer in groups[0].layers}
    shares = {**caches, "layers.9": caches["layers.0"]}  # uses another layer's cache
    layout = cache_layout(config, groups, shares)
    assert layout.num_blocks(0) == 8
    assert sorted(memory.base for memory in layout.memory) == sorted(
        cache.data_ptr() for cache in caches.values()
    )
    # On a CPU, whatever is inside (block, head) is the backend's own business.
    assert not layout.token_granular


def test_blocks_that_hold_all_layers_are_one_descriptor_each(config: Any) -> None:
    """What vLLM allocates for ``enable_cross_layers_blocks``."""
    from vllm.v1.kv_cache_interface import KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    name = required_kvcache_layout(make_config(), cross_layers=True)
    config.cache_config.get_resolved_kv_cache_layout = lambda: SimpleNamespace(name=name)
    cache_config = make_cache_config(num_blocks=8)
    (group,) = cache_config.kv_cache_groups
    page, count = group.kv_cache_spec.page_size_bytes, len(group.layer_names)
    cache_config.kv_cache_tensors.append(
        KVCacheTensor(8 * count * page, group.layer_names, page, count * page)
    )
    caches = allocate_kv_cache(cache_config, torch.device("cpu"), KVCacheLayout[name])
    layout = cache_layout(config, transfer_groups(cache_config), caches)
    (region,) = layout.regions
    assert (region.num_blocks, region.block_len) == (8, count * page)
    assert [member.layer for member in region.packed] == list(group.layer_names)
    for member in region.packed:
        for block in range(8):
            address = region.base + block * region.block_stride + member.offset
            assert address == caches[member.layer][block].data_ptr()
    assert layout.kv_layout == name


def test_kernel_blocks_are_counted(config: Any) -> None:
    groups = transfer_groups(make_cache_config())
    caches = {layer: torch.zeros(16, 2, 2, 16) for layer in groups[0].layers}
    assert cache_layout(config, groups, caches).kernel_blocks_per_block == 2


@pytest.mark.parametrize(
    ("shape", "words"),
    [((8, 2, 4), r"layers\.\d.*\(8, 2, 4\)"), ((8, 2, 3, 16), "kernel blocks of 3 tokens")],
)
def test_tensors_that_cannot_be_cut_are_refused(
    config: Any, shape: tuple[int, ...], words: str
) -> None:
    groups = transfer_groups(make_cache_config())
    caches = {layer: torch.zeros(shape) for layer in groups[0].layers}
    with pytest.raises(ConfigError, match=words):
        cache_layout(config, groups, caches)


# --- logging ------------------------------------------------------------------------------------


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> tuple[logging.Logger, logging.Logger]:
    """Loggers in the place of vLLM's and kvnixl's."""
    made = {name: logging.Logger(name) for name in ("vllm", "kvnixl")}
    stub = SimpleNamespace(getLogger=lambda name: made[name])
    monkeypatch.setattr(adapter, "logging", stub)
    return made["vllm"], made["kvnixl"]


def test_logging_goes_where_that_of_vllm_goes(
    loggers: tuple[logging.Logger, logging.Logger],
) -> None:
    theirs, ours = loggers
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    theirs.setLevel(logging.DEBUG)
    theirs.propagate = False
    for _ in range(2):  # scheduler and worker may share a process
        adopt_vllm_logging()
        assert ours.handlers == [handler]
    assert ours.level == logging.DEBUG
    assert not ours.propagate


def test_logging_that_the_user_set_up_is_left_alone(
    loggers: tuple[logging.Logger, logging.Logger],
) -> None:
    theirs, ours = loggers
    adopt_vllm_logging()  # vLLM has none
    assert not ours.handlers
    mine = logging.NullHandler()
    ours.addHandler(mine)
    theirs.addHandler(logging.NullHandler())
    adopt_vllm_logging()
    assert ours.handlers == [mine]
