"""Cache layouts: how tensors are cut into regions of equal blocks, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvnixl.errors import LayoutError
from kvnixl.layout import (
    CacheGroup,
    CacheLayout,
    MemoryRange,
    PackedMember,
    Region,
    layout_from_addresses,
    layout_from_metadata,
    layout_from_tensors,
    natural_key,
    pages,
)
from kvnixl.metadata import NixlAgentMetadata
from kvnixl.topology import plan_reads
from tests.kv_model import Engine

BLOCKS, HEADS, TOKENS, CONTENT = 6, 4, 8, 16
PAGE = HEADS * TOKENS * CONTENT * 2  # bytes of a block of the caches below
NAMES = [f"layers.{i}" for i in range(11)]


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def hnd() -> torch.Tensor:
    return tensor(BLOCKS, HEADS, TOKENS, CONTENT)


def from_tensors(caches: dict[str, Any], dims: Any = "BHNC", **given: Any) -> CacheLayout:
    return layout_from_tensors(caches, dims=dims, num_kv_heads=given.pop("heads", HEADS), **given)


def only(layout: CacheLayout) -> Region:
    (region,) = layout.regions
    return region


# --- order --------------------------------------------------------------------------------------


def test_layers_are_sorted_by_number():
    caches = {name: hnd() for name in reversed(NAMES)}
    assert [region.name for region in from_tensors(caches).regions] == NAMES


def test_natural_order():
    names = ["b.10.k", "a.2", "a.10", "b.9.v", "a", "b.10.a", "a.02x", "10", "9"]
    assert sorted(names, key=natural_key) == [
        "9",
        "10",
        "a",
        "a.2",
        "a.02x",
        "a.10",
        "b.9.v",
        "b.10.a",
        "b.10.k",
    ]


def test_order_does_not_depend_on_the_order_of_the_dict():
    caches = {name: hnd() for name in NAMES}
    shuffled = dict(sorted(caches.items(), key=lambda item: hash(item[0]) % 7))
    assert from_tensors(caches).regions == from_tensors(shuffled).regions


# --- kinds of tensors ---------------------------------------------------------------------------


def test_torch_numpy_and_buffers_are_cut_alike():
    cache = hnd()
    array = cache.numpy()
    interface = SimpleNamespace(__array_interface__=array.__array_interface__)
    for view in (cache, array, memoryview(array), interface):
        layout = from_tensors({"layers.0": view})
        region = only(layout)
        assert region.row == (cache.data_ptr(), PAGE, PAGE, BLOCKS, 0)
        assert (layout.block_size, layout.kv_layout) == (TOKENS, "HND")
        assert layout.memory == (MemoryRange(cache.data_ptr(), PAGE * BLOCKS, "DRAM", 0),)


def test_object_without_memory():
    with pytest.raises(LayoutError, match=r"layer 'layers.0' is a str, which has neither data_ptr"):
        from_tensors({"layers.0": "cache"})
    with pytest.raises(LayoutError, match=r"has no memory \(device meta\)"):
        from_tensors({"layers.0": torch.empty(2, 4, 8, 16, device="meta")})
    with pytest.raises(LayoutError, match="no cache tensors"):
        from_tensors({})
    with pytest.raises(LayoutError, match="it is empty"):
        from_tensors({"layers.0": np.empty((0, HEADS, TOKENS, CONTENT))})


def test_device_memory():
    """What a CUDA tensor says of itself; there is no device on this machine."""
    cache = SimpleNamespace(
        data_ptr=lambda: 2**40,
        element_size=lambda: 2,
        shape=(BLOCKS, HEADS, TOKENS, CONTENT),
        stride=lambda: hnd().stride(),
        untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: 2**40 - 256, nbytes=lambda: 2**20),
        device=SimpleNamespace(type="cuda", index=3),
    )
    layout = from_tensors({"layers.0": cache})
    assert only(layout).row == (2**40, PAGE, PAGE, BLOCKS, 3)
    assert only(layout).mem_type == "VRAM"
    assert layout.memory == (MemoryRange(2**40 - 256, 2**20, "VRAM", 3),)


def test_view_registers_the_memory_that_it_is_a_view_of():
    whole = np.zeros(2 * BLOCKS * PAGE + 100, np.uint8)
    view = whole[64 : 64 + BLOCKS * PAGE].reshape(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[::1]
    layout = from_tensors({"layers.0": view})
    assert layout.memory == (MemoryRange(whole.ctypes.data, whole.nbytes, "DRAM", 0),)
    assert only(layout).base == whole.ctypes.data + 64


def test_view_of_a_reversed_view_registers_the_same_memory():
    array = np.zeros((BLOCKS, HEADS, TOKENS, CONTENT), np.float16)
    view = np.asarray(memoryview(array[::-1]))[::-1]
    layout = from_tensors({"layers.0": view})
    assert layout.memory == (MemoryRange(array.ctypes.data, array.nbytes, "DRAM", 0),)


def test_memory_ranges_are_joined_only_where_they_overlap():
    buffer = bytearray(8 * 64)
    inner = np.frombuffer(buffer, np.uint8, count=2 * 64, offset=64)
    caches = {"a": np.frombuffer(buffer, np.uint8), "b": inner}
    layout = from_tensors(
        caches,
        "*",
        page_sizes=dict.fromkeys(caches, 64),
        block_size=4,
        groups={"b": 1},
        sliding_windows=(0, 0),
    )
    assert [memory.length for memory in layout.memory] == [8 * 64]
    touching = layout_from_addresses(
        [4096, 4096 + 512], block_len=64, num_blocks=8, block_size=4, num_kv_heads=1
    )
    assert [memory.length for memory in touching.memory] == [512, 512]


def test_layers_of_one_allocation_are_registered_once():
    whole = tensor(2, BLOCKS, HEADS, TOKENS, CONTENT)
    layout = from_tensors({"layers.0": whole[0], "layers.1": whole[1]})
    assert len(layout.regions) == 2
    assert layout.memory == (MemoryRange(whole.data_ptr(), 2 * BLOCKS * PAGE, "DRAM", 0),)


# --- order inside a block -----------------------------------------------------------------------


def test_layout_is_read_from_the_strides():
    nhd = tensor(BLOCKS, TOKENS, HEADS, CONTENT)
    assert from_tensors({"layers.0": nhd}, "BNHC").kv_layout == "NHD"
    # vLLM shows every cache as blocks, heads, tokens, content.
    assert from_tensors({"layers.0": nhd.permute(0, 2, 1, 3)}).kv_layout == "NHD"
    assert from_tensors({"layers.0": hnd()}, kv_layout="LBHNC").kv_layout == "LBHNC"
    with pytest.raises(LayoutError, match=r"kv_layout is 'NHD', but the strides .* say HND"):
        from_tensors({"layers.0": hnd()}, kv_layout="NHD")
    with pytest.raises(LayoutError, match=r"layer 'layers.0' has .* \(HND\), layer 'layers.1'"):
        from_tensors({"layers.0": hnd(), "layers.1": nhd.permute(0, 2, 1, 3)})


def test_layout_that_one_head_leaves_open():
    cache = tensor(BLOCKS, 1, TOKENS, CONTENT)
    assert from_tensors({"layers.0": cache}, heads=1).kv_layout == "HND"
    assert from_tensors({"layers.0": cache}, heads=1, kv_layout="NHD").kv_layout == "NHD"


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC", "hnd", ""])
def test_layouts_that_are_not_supported(name):
    with pytest.raises(LayoutError, match=f"KV cache layout {name!r} is not supported; use one of"):
        from_tensors({"layers.0": hnd()}, kv_layout=name)


def test_k_and_v_as_two_segments():
    cache = tensor(2, BLOCKS, TOKENS, HEADS, CONTENT)
    layout = from_tensors({"layers.0": cache}, "2BNHC")
    half = BLOCKS * PAGE
    assert [region.row for region in layout.regions] == [
        (cache.data_ptr() + i * half, PAGE, PAGE, BLOCKS, 0) for i in range(2)
    ]
    assert [region.layers for region in layout.regions] == [("layers.0",)] * 2


def test_k_and_v_in_one_row_stay_apart():
    """A peer finds a packed page by the layer's name alone."""
    k0, k1, v1, v0 = cross_layer(4).values()
    layout = from_tensors({"layers.0": (k0, v0), "layers.1": (k1, v1)})
    assert [region.base for region in layout.regions] == [c.data_ptr() for c in (k0, v0, k1, v1)]
    assert layout_from_metadata(metadata_of(layout), layout) == replace(layout, memory=())
    layout = from_tensors({"layers.0": k0, "layers.1": (k1, v1)})
    assert [region.base for region in layout.regions] == [c.data_ptr() for c in (k0, k1, v1)]


@pytest.mark.parametrize("pack_layers", [False, True])
def test_k_and_v_as_two_tensors(pack_layers):
    """K comes first wherever it lies: the peer's K may lie behind its V."""
    whole = tensor(2, BLOCKS, HEADS, TOKENS, CONTENT)
    for k, v in ((whole[0], whole[1]), (whole[1], whole[0])):
        caches = {"layers.1": (k, v), "layers.0": hnd()}
        layout = from_tensors(caches, pack_layers=pack_layers)
        assert [region.base for region in layout.regions[1:]] == [k.data_ptr(), v.data_ptr()]


def test_k_and_then_v_in_one_block():
    region = only(from_tensors({"layers.0": tensor(BLOCKS, 2, HEADS, TOKENS, CONTENT)}, "B2HNC"))
    assert (region.block_len, region.planes) == (2 * PAGE, 2)


def test_one_tensor_for_all_layers():
    inside = tensor(BLOCKS, 3, 2, HEADS, TOKENS, CONTENT)
    region = only(from_tensors({"layers": inside}, "BL2HNC"))
    assert (region.block_len, region.planes) == (6 * PAGE, 6)
    around = tensor(3, BLOCKS, HEADS, TOKENS, CONTENT)
    assert len(from_tensors({"layers": around}, "LBHNC").regions) == 3


def test_single_block_with_planes_around_it():
    """With one block, memory alone does not tell segments from planes; the strides do."""
    assert len(from_tensors({"a": tensor(2, 1, HEADS, TOKENS, CONTENT)}, "2BHNC").regions) == 2
    assert only(from_tensors({"a": tensor(1, 2, HEADS, TOKENS, CONTENT)}, "B2HNC")).planes == 2
    # The stride of an axis of length 1 can be anything.
    odd = torch.as_strided(hnd(), (1, HEADS, TOKENS, CONTENT), (1, TOKENS * CONTENT, CONTENT, 1))
    assert only(from_tensors({"a": odd})).row == (odd.data_ptr(), PAGE, PAGE, 1, 0)


@pytest.mark.parametrize(
    ("dims", "shape", "granular"),
    [
        ("BHNC", (BLOCKS, HEADS, TOKENS, CONTENT), True),
        ("BHN2C", (BLOCKS, HEADS, TOKENS, 2, CONTENT), True),
        ("BN2HC", (BLOCKS, TOKENS, 2, HEADS, CONTENT), True),
        ("B2NHC", (BLOCKS, 2, TOKENS, HEADS, CONTENT), True),
        ("BNC", (BLOCKS, TOKENS, CONTENT), True),
        ("BH2NC", (BLOCKS, HEADS, 2, TOKENS, CONTENT), False),
        ("BHCN", (BLOCKS, HEADS, CONTENT, TOKENS), False),
        ("BHNCC", (BLOCKS, HEADS, TOKENS, CONTENT, 4), True),
    ],
)
def test_whether_a_block_can_be_cut_between_tokens(dims, shape, granular):
    layout = from_tensors({"layers.0": tensor(*shape)}, dims)
    assert layout.token_granular is granular
    assert layout.block_size == TOKENS
    packed = from_tensors({"layers.0": tensor(*shape)}, dims, token_granular=False)
    assert packed.token_granular is False


# --- storage ------------------------------------------------------------------------------------


def test_padding_between_blocks():
    padded = torch.as_strided(
        tensor(BLOCKS * (PAGE // 2 + 24)),
        (BLOCKS, HEADS, TOKENS, CONTENT),
        (PAGE // 2 + 24, TOKENS * CONTENT, CONTENT, 1),
    )
    region = only(from_tensors({"layers.0": padded}))
    assert (region.block_len, region.block_stride) == (PAGE, PAGE + 48)


def test_padding_after_the_last_block():
    flat = torch.zeros(BLOCKS * PAGE + 96, dtype=torch.uint8)
    layout = from_tensors({"layers.0": flat}, "*", page_sizes={"layers.0": PAGE}, block_size=TOKENS)
    assert only(layout).row == (flat.data_ptr(), PAGE, PAGE, BLOCKS, 0)
    assert layout.memory[0].length == BLOCKS * PAGE + 96


def cross_layer(layers: int = 3, pad: int = 0) -> dict[str, torch.Tensor]:
    """All layers of a block together, with padding after them."""
    row = layers * PAGE // 2 + pad
    whole = tensor(BLOCKS * row)
    return {
        f"layers.{i}": torch.as_strided(
            whole,
            (BLOCKS, HEADS, TOKENS, CONTENT),
            (row, TOKENS * CONTENT, CONTENT, 1),
            i * PAGE // 2,
        )
        for i in range(layers)
    }


@pytest.mark.parametrize("pad", [0, 8])
def test_blocks_of_all_layers_become_one_piece(pad):
    caches = cross_layer(3, pad)
    layout = from_tensors(caches)
    region = only(layout)
    assert region.row == (caches["layers.0"].data_ptr(), 3 * PAGE, 3 * PAGE + 2 * pad, BLOCKS, 0)
    assert region.layers == tuple(caches)
    assert region.packed == tuple(PackedMember(f"layers.{i}", i * PAGE, PAGE) for i in range(3))
    assert [(name, page.base) for name, page in pages(layout)] == [
        (name, cache.data_ptr()) for name, cache in caches.items()
    ]
    apart = from_tensors(caches, pack_layers=False)
    assert [region.base for region in apart.regions] == [c.data_ptr() for c in caches.values()]
    assert list(pages(apart)) == list(pages(layout))


def test_single_blocks_are_not_packed():
    """Whether they are one allocation cannot be seen."""
    caches = {name: cache[:1] for name, cache in cross_layer(2).items()}
    assert len(from_tensors(caches).regions) == 2


def test_layers_that_share_their_pages_are_not_packed():
    """A packed page has one name; the other layers would get lost."""
    a, b = cross_layer(2).values()
    layout = from_tensors({"layers.0": a, "layers.1": b, "layers.2": b})
    assert [region.layers for region in layout.regions] == [
        ("layers.0",),
        ("layers.1", "layers.2"),
    ]


def test_layers_of_different_groups_or_kinds_are_not_packed():
    caches = cross_layer(3)
    layout = from_tensors(caches, groups={"layers.1": 1}, sliding_windows=(0, 32))
    assert [region.groups for region in layout.regions] == [(0,), (1,), (0,)]
    layout = from_tensors(caches, replicated=["layers.2"])
    assert [region.layers for region in layout.regions] == [
        ("layers.0", "layers.1"),
        ("layers.2",),
    ]


def test_layers_that_share_a_buffer():
    """vLLM's hybrid allocator: layers of different groups in the same blocks."""
    cache = hnd()
    caches = {"layers.0": cache, "layers.1": cache, "layers.2": cache}
    layout = from_tensors(caches, groups={"layers.1": 1}, sliding_windows=(0, 32))
    region = only(layout)
    assert (region.groups, region.layers) == ((0, 1), tuple(caches))
    assert layout.num_blocks(0) == layout.num_blocks(1) == BLOCKS
    assert layout.block_bytes(1) == PAGE
    assert only(from_tensors(caches)).groups == (0,)


def test_groups_with_different_pages_may_use_the_same_memory():
    whole = torch.zeros(BLOCKS * PAGE, dtype=torch.uint8)
    caches = {"layers.0": whole, "layers.1": whole}
    layout = from_tensors(
        caches,
        "*",
        page_sizes={"layers.0": PAGE, "layers.1": PAGE // 2},
        block_size=TOKENS,
        groups={"layers.1": 1},
        sliding_windows=(0, 0),
    )
    assert [(r.groups, r.num_blocks) for r in layout.regions] == [
        ((0,), BLOCKS),
        ((1,), 2 * BLOCKS),
    ]


def test_layers_that_overlap_are_refused():
    whole = tensor(BLOCKS + 1, HEADS, TOKENS, CONTENT)
    with pytest.raises(LayoutError, match=r"region 'layers.0' .* and region 'layers.1' .* overlap"):
        from_tensors({"layers.0": whole[:-1], "layers.1": whole[1:]})
    bases = [4096, 4096 + 32]
    with pytest.raises(LayoutError, match="overlap"):
        layout_from_addresses(bases, block_len=64, num_blocks=2, block_size=4, num_kv_heads=1)
    bytes_ = torch.zeros(256, dtype=torch.uint8)
    first = torch.as_strided(bytes_, (2, 32), (64, 1))
    second = torch.as_strided(bytes_, (2, 48), (64, 1), 32)  # runs into first's second block
    with pytest.raises(LayoutError, match=r"region 'a' .* and region 'b' .* overlap"):
        from_tensors({"a": first, "b": second}, "BC", block_size=4)
    layout_from_addresses(
        bases, block_len=32, block_stride=64, num_blocks=2, block_size=4, num_kv_heads=1
    )


# --- tensors that cannot be cut -----------------------------------------------------------------


def test_refusal_names_layer_shape_and_strides():
    cache = hnd()[:, ::2]
    with pytest.raises(LayoutError) as caught:
        from_tensors({"model.layers.7.attn": cache}, heads=2)
    message = str(caught.value)
    assert "layer 'model.layers.7.attn' cannot be cut into equal blocks" in message
    assert f"shape {tuple(cache.shape)}" in message
    assert f"strides {tuple(2 * stride for stride in cache.stride())} bytes" in message


@pytest.mark.parametrize(
    ("cache", "dims", "message"),
    [
        (tensor(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., :CONTENT], "BHNC", "not contiguous"),
        (tensor(HEADS, BLOCKS, TOKENS, CONTENT), "HBNC", "axis 'H' .* stands around the blocks"),
        (tensor(CONTENT, BLOCKS, HEADS, TOKENS), "CBHN", "axis 'C' .* stands around the blocks"),
        (tensor(BLOCKS, CONTENT, HEADS, TOKENS), "BCHN", "axis 'C' stands around the heads"),
        (tensor(1, HEADS, TOKENS, CONTENT).expand(4, -1, -1, -1), "BHNC", "repeats itself"),
        (hnd().numpy()[::-1], "BHNC", "runs backwards"),
        (hnd(), "BHN", "must name its 4 axes"),
        (hnd(), "HHNC", "exactly one of them B"),
        (hnd(), "BHNX", "with the letters B, H, N, C, 2, L"),
        (hnd(), "BHHN", "several axes of heads or of tokens"),
        (torch.as_strided(tensor(64), (3, 2, 2, 4), (8, 8, 4, 1)), "BHNC", "stands around"),
        (torch.as_strided(tensor(64), (3, 2, 4), (6, 4, 1)), "BNC", "so they overlap"),
    ],
)
def test_tensors_that_cannot_be_cut(cache, dims, message):
    with pytest.raises(LayoutError, match=f"cannot be cut into equal blocks: .*{message}"):
        from_tensors({"layers.0": cache}, dims)


def test_tensors_that_contradict_the_arguments():
    with pytest.raises(LayoutError, match="has 6 blocks where 7 were expected"):
        from_tensors({"layers.0": hnd()}, num_blocks=7)
    with pytest.raises(LayoutError, match=f"a block has {PAGE} bytes where 100 were expected"):
        from_tensors({"layers.0": hnd()}, page_sizes={"layers.0": 100})
    with pytest.raises(LayoutError, match="has 4 heads where 8 KV heads over 4 ranks leave 2"):
        from_tensors({"layers.0": hnd()}, heads=8, tp_size=4)
    with pytest.raises(LayoutError, match="block_size is 16, but the tensors have 8 tokens"):
        from_tensors({"layers.0": hnd()}, block_size=16)
    with pytest.raises(LayoutError, match=r"cache group 0 has blocks of \[8, 16\] tokens"):
        from_tensors({"a": hnd(), "b": tensor(BLOCKS, HEADS, 16, CONTENT)})
    with pytest.raises(LayoutError, match="no tensor of cache group 0 has an axis of tokens"):
        from_tensors({"a": tensor(BLOCKS, 64)}, "BC")
    with pytest.raises(LayoutError, match="replicated names layer 'b', which has no cache tensor"):
        from_tensors({"a": hnd()}, replicated=["b"])
    with pytest.raises(LayoutError, match="layer 'a': cache group 1 does not exist"):
        from_tensors({"a": hnd()}, groups={"a": 1})
    with pytest.raises(LayoutError, match="dims does not say what the axes of layer 'b' are"):
        from_tensors({"a": hnd(), "b": hnd()}, {"a": "BHNC"})


def test_flat_memory_that_cannot_be_cut():
    flat = torch.zeros(BLOCKS * PAGE, dtype=torch.uint8)
    for given, message in (
        ({}, "page_sizes has no bytes per block for 'a'"),
        ({"page_sizes": {"a": PAGE}, "num_blocks": BLOCKS - 1}, "are 6 blocks of"),
        ({"page_sizes": {"a": PAGE}, "num_blocks": BLOCKS + 1}, "not 7 blocks"),
        ({"page_sizes": {"a": PAGE * 100}}, "are 0 blocks of"),
    ):
        with pytest.raises(LayoutError, match=message):
            from_tensors({"a": flat}, "*", block_size=TOKENS, **given)
    with pytest.raises(LayoutError, match="needs contiguous memory"):
        from_tensors({"a": flat[::2]}, "*", block_size=TOKENS, page_sizes={"a": PAGE})


def test_heads_of_a_rank_are_checked_but_not_of_replicated_layers():
    assert only(from_tensors({"a": hnd()}, heads=8, tp_size=2)).num_kv_heads == 8
    assert only(from_tensors({"a": hnd()}, heads=9, replicated=["a"])).distinct_heads == 1


# --- values -------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"base": 4096, "block_len": 64, "block_stride": 64, "num_blocks": 8}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_len": 0}, "block_len 0"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"block_stride": 63}, "block_stride 63 is smaller than block_len 64"),
        ({"base": -1}, "64-bit address space"),
        ({"base": 2**64 - 511}, "64-bit address space"),
        ({"num_blocks": 2**60}, "64-bit address space"),
        ({"num_kv_heads": 0}, "num_kv_heads 0"),
        ({"planes": 3}, "cannot be cut into 3 planes"),
        ({"mem_type": "FILE"}, "mem_type 'FILE'"),
        ({"device_id": -1}, "device_id -1"),
        ({"groups": ()}, r"groups \(\) must be"),
        ({"groups": (-1,)}, r"groups \(-1,\)"),
        ({"groups": (1, 0)}, r"groups \(1, 0\)"),
        ({"groups": (1, 1)}, r"groups \(1, 1\)"),
        ({"packed": (PackedMember("a", 0, 65),)}, "packed member 'a'"),
        ({"packed": (PackedMember("a", 0, 32), PackedMember("b", 16, 32))}, "packed member 'b'"),
    ],
)
def test_regions_out_of_range(wrong, message):
    with pytest.raises(LayoutError, match=message):
        Region(**{**GOOD, **wrong})


def test_region_may_end_with_the_address_space():
    assert Region(**{**GOOD, "base": 2**64 - 512}).end == 2**64


def test_values_out_of_range():
    for make, message in (
        (lambda: PackedMember("a", -1, 4), "offset -1"),
        (lambda: PackedMember("a", 0, 5, planes=2), "5 bytes cannot be cut into 2 planes"),
        (lambda: CacheGroup(0), "block_size 0"),
        (lambda: CacheGroup(4, -1), "sliding_window -1"),
        (lambda: CacheLayout(regions=(), groups=(CacheGroup(4),)), "at least one region"),
        (lambda: CacheLayout(regions=(Region(**GOOD),), groups=()), "at least one cache group"),
        (
            lambda: CacheLayout(
                regions=(Region(**GOOD, packed=(PackedMember("a", 0, 4),)),) * 2,
                groups=(CacheGroup(4),),
            ),
            "layer 'a' is packed into 2 places",
        ),
        (
            lambda: CacheLayout(
                regions=(Region(**GOOD),), groups=(CacheGroup(4),), kernel_blocks_per_block=9
            ),
            "8 kernel blocks make no logical block of 9",
        ),
        (
            lambda: CacheLayout(
                regions=(Region(**GOOD),), groups=(CacheGroup(4),), kernel_blocks_per_block=0
            ),
            "kernel_blocks_per_block 0",
        ),
    ):
        with pytest.raises(LayoutError, match=message):
            make()


def test_layout_from_raw_addresses():
    bases = {"layers.10": 2**64 - 4096, "layers.2": 2**63}
    layout = layout_from_addresses(
        bases, block_len=512, block_stride=1024, num_blocks=4, block_size=16, num_kv_heads=8
    )
    assert [region.name for region in layout.regions] == ["layers.2", "layers.10"]
    rows = layout.region_rows()
    assert rows.dtype == np.uint64
    assert rows.tolist() == [[2**63, 512, 1024, 4, 0], [2**64 - 4096, 512, 1024, 4, 0]]
    assert layout.memory[0] == MemoryRange(2**63, 3 * 1024 + 512, "DRAM", 0)
    assert (layout.num_blocks(), layout.block_bytes()) == (4, 1024)


def test_logical_blocks():
    layout = from_tensors({"a": hnd()}, kernel_blocks_per_block=2)
    assert (layout.num_blocks(), layout.block_bytes()) == (3, 2 * PAGE)


def test_table():
    caches = {f"layers.{i}": hnd() for i in range(12)}
    caches["layers.12"] = tensor(BLOCKS, HEADS, TOKENS, 2 * CONTENT)
    layout = from_tensors(
        caches,
        attn_backend="FLASH_ATTN",
        groups={"layers.12": 1},
        sliding_windows=(0, 128),
        kernel_blocks_per_block=2,
    )
    title, head, first, second = str(layout).splitlines()
    assert title == (
        "KV cache: 13 regions, blocks of 8 / 8 tokens, HND, backend FLASH_ATTN, 2 kernel blocks "
        "per block, group 1 has a window of 128 tokens"
    )
    assert " ".join(head.split()) == ("regions layers first base block stride blocks memory group")
    base = f"{layout.regions[0].base:#x}"
    assert " ".join(first.split()) == (
        f"0-11 layers.0 .. layers.11 {base} 1 KiB 1 KiB 6 DRAM:0 0 4 KV heads in all"
    )
    assert second.split()[:2] == ["12", "layers.12"]
    assert "2 KiB" in second
    widths = [line.index("DRAM:0") for line in (first, second)]
    assert widths[0] == widths[1] == head.index("memory")


def test_table_of_packed_tokens_and_layers():
    layout = replace(
        from_tensors(cross_layer(), token_granular=False, packing="avx512"), attn_backend="CPU_ATTN"
    )
    text = str(layout)
    assert "backend CPU_ATTN, tokens packed (avx512)" in text
    assert "layers.0 .. layers.2" in text
    assert "3 layers packed" in text


# --- metadata -----------------------------------------------------------------------------------


def metadata_of(layout: CacheLayout, **changed: Any) -> NixlAgentMetadata:
    fields = {
        "engine_id": "prefill-0",
        "agent_metadata": b"",
        "ssm_sizes": (0, 0),
        **layout.metadata_fields(),
    }
    return NixlAgentMetadata(**{**fields, **changed})


@pytest.mark.parametrize("storage", ["apart", "rows", "segments", "padded rows"])
@pytest.mark.parametrize("replicated", [False, True])
def test_peer_rebuilds_the_layout_from_its_metadata(storage, replicated):
    engine = Engine(
        planes=2,
        storage=storage,
        replicated=replicated,
        layers=3,
        windows=(0, 6),
        groups=(0, 0, 1),
        kernel_blocks=2,
        attn_backend="FLASH_ATTN",
    )
    layout = engine.layout(0)
    rebuilt = layout_from_metadata(metadata_of(layout), engine.like().layout(0))
    assert rebuilt == replace(layout, memory=())
    plan_reads(engine.like().layout(0), {0: rebuilt}, tp_rank=0, tp_size=1, remote_tp_size=1)


def test_metadata_of_a_peer_with_other_sizes():
    """Half the block size and twice the ranks of ours, with cache groups in another order."""
    ours = Engine(1, block_size=8, windows=(0, 6), groups=(0, 1)).layout(0)
    theirs = Engine(2, block_size=4, windows=(6, 0), groups=(1, 0)).layout(1)
    rebuilt = layout_from_metadata(metadata_of(theirs), ours)
    assert rebuilt == replace(theirs, memory=())


def test_metadata_of_regions_that_groups_share():
    """vLLM says only that several groups share a region; which ones is as on our side."""
    shared, own = hnd(), hnd()
    caches = {"layers.0": shared, "layers.1": shared, "layers.2": own}
    layout = from_tensors(caches, groups={"layers.1": 1, "layers.2": 2}, sliding_windows=(0, 16, 0))
    metadata = metadata_of(layout)
    assert metadata.region_group_ids == [-1, 2]
    assert metadata.region_members == [["layers.0", "layers.1"], ["layers.2"]]
    assert layout_from_metadata(metadata, layout) == replace(layout, memory=())
    caches.pop("layers.2")
    layout = from_tensors(caches, groups={"layers.1": 1}, sliding_windows=(0, 16))
    assert layout_from_metadata(metadata_of(layout), layout) == replace(layout, memory=())
    apart = from_tensors(
        {"layers.0": hnd(), "layers.1": hnd()}, groups={"layers.1": 1}, sliding_windows=(0, 16)
    )
    theirs = metadata_of(apart, region_group_ids=[-1, 1])
    assert layout_from_metadata(theirs, apart).regions[0].groups == (0, 1)


def test_metadata_of_a_stock_peer():
    """Only the fields that every version has: the rest is as on our side."""
    ours = from_tensors({"layers.0": hnd(), "layers.1": hnd()}, attn_backend="FLASH_ATTN")
    stock = metadata_of(
        ours,
        region_names=None,
        region_group_ids=None,
        region_num_blocks=None,
        region_mem_types=None,
        region_members=[],
        num_blocks=9,
    )
    rebuilt = layout_from_metadata(stock, ours)
    assert [region.num_blocks for region in rebuilt.regions] == [9, 9]
    assert [region.base for region in rebuilt.regions] == [region.base for region in ours.regions]
    assert [region.layers for region in rebuilt.regions] == [(), ()]
    plan_reads(ours, {0: rebuilt}, tp_rank=0, tp_size=1, remote_tp_size=1)


def test_device_of_a_peers_regions():
    """Host memory has no device, also at an engine whose device has a number."""
    ours = from_tensors({"layers.0": hnd(), "layers.1": hnd()})
    theirs = metadata_of(ours, device_id=3, region_mem_types=["DRAM", "VRAM"])
    assert [region.device_id for region in layout_from_metadata(theirs, ours).regions] == [0, 3]


def test_row_of_layers_and_layers_apart_are_mapped_by_name():
    rows = from_tensors(cross_layer(3))
    apart = from_tensors({f"layers.{i}": hnd() for i in range(3)})
    for ours, theirs in ((rows, apart), (apart, rows)):
        rebuilt = layout_from_metadata(metadata_of(theirs), ours)
        assert rebuilt == replace(theirs, memory=())
        (read,) = plan_reads(ours, {0: rebuilt}, tp_rank=0, tp_size=1, remote_tp_size=1).reads
        assert read.local_rows[:, 0].tolist() == [page.base for _, page in pages(ours)]
        assert read.remote_rows[:, 0].tolist() == [page.base for _, page in pages(theirs)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_caches_base_addr": []}, "exports no KV cache regions"),
        ({"block_lens": [PAGE]}, "block_lens has 1 entries for 2 regions"),
        ({"block_strides": [PAGE] * 3}, "block_strides has 3 entries for 2 regions"),
        ({"region_names": ["layers.0"]}, "region_names has 1 entries"),
        ({"region_members": [["layers.0"]]}, "region_members has 1 entries"),
        ({"region_group_ids": [0, 2]}, r"region_group_ids \[0, 2\] with 2 regions"),
        ({"region_group_ids": [0, -2]}, r"region_group_ids \[0, -2\]"),
        ({"region_mem_types": ["DRAM", "TAPE"]}, "mem_type 'TAPE'"),
        ({"region_names": ["layers.0", "mtp.0"]}, "exports layer 'mtp.0', which this engine does"),
        ({"ssm_sizes": (16, 32)}, r"state-space states of \(16, 32\) bytes"),
        ({"kv_cache_layout": "LHBNC"}, "layout 'LHBNC' is not supported"),
        ({"block_strides": [PAGE, 1]}, "block_stride 1 is smaller than block_len"),
        ({"kv_caches_base_addr": [4096, 2**64 - 1]}, "64-bit address space"),
    ],
)
def test_metadata_that_contradicts_itself_or_us(changed, message):
    ours = from_tensors({"layers.0": hnd(), "layers.1": hnd()})
    with pytest.raises(LayoutError, match=message):
        layout_from_metadata(metadata_of(ours, **changed), ours)


def test_unnamed_metadata_of_another_number_of_layers():
    ours = from_tensors({"layers.0": hnd(), "layers.1": hnd()})
    theirs = layout_from_addresses([4096], block_len=64, num_blocks=2, block_size=4, num_kv_heads=4)
    with pytest.raises(LayoutError, match="exports 1 KV cache regions without layer names, this"):
        layout_from_metadata(metadata_of(theirs), ours)


def test_group_block_sizes_that_have_no_counterpart():
    ours = replace(
        from_tensors(
            {"a": hnd(), "b": tensor(BLOCKS, HEADS, 12, CONTENT)},
            groups={"b": 1},
            sliding_windows=(0, 8),
        )
    )
    with pytest.raises(LayoutError, match="cache group of 12 tokens per block has no counterpart"):
        layout_from_metadata(metadata_of(ours, block_size=2 * TOKENS // 3), ours)


# --- imports ------------------------------------------------------------------------------------


def test_layout_and_topology_need_no_torch():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'nixl', 'zmq', 'vllm']))\n"
        "import kvnixl.layout, kvnixl.topology"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
