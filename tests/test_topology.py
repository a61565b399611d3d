"""Who reads which bytes of whom: plans are applied with plain copies to caches in which every byte
is labelled, and compared with what a naive model says (`tests.kv_model`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnixl._descs import RegionIndex, paired_desc_ids, strided_descs
from kvnixl.errors import BlockListError, TopologyError
from kvnixl.layout import CacheGroup, CacheLayout, layout_from_addresses
from kvnixl.topology import (
    MAX_BLOCK_RATIO,
    MAX_KERNEL_IDS,
    MAX_PIECES,
    MAX_REQUEST_DESCS,
    MAX_TARGET_RANKS,
    MAX_TP_SIZE,
    BlockPairs,
    ReadPlan,
    UnfilledTokens,
    check_parallel_sizes,
    consumer_count,
    heads_of_rank,
    plan_reads,
    target_ranks,
)
from tests.kv_model import Engine, apply

TP_SIZES = range(1, 9)


def make_plan(local: Engine, remote: Engine, rank: int = 0) -> ReadPlan:
    layouts = {r: remote.layout(r) for r in target_ranks(rank, local.tp_size, remote.tp_size)}
    return plan_reads(
        local.layout(rank),
        layouts,
        tp_rank=rank,
        tp_size=local.tp_size,
        remote_tp_size=remote.tp_size,
    )


def check_bytes(
    plan: ReadPlan,
    pairs: BlockPairs,
    local: Engine,
    remote: Engine,
    rank: int,
    local_ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_tokens: int,
    needed_from: Sequence[int] = (),
) -> None:
    """Read into stale memory and look at every byte of it.

    ``starts``: position of the first local token of each group; ``needed_from``: the first that
    must be there (a window may begin later).
    """
    before = local.arenas[rank].copy()
    apply(plan, pairs, local.arenas[rank], remote.arenas)
    unfilled = {
        (part.group, part.block_id, slot)
        for part in pairs.unfilled
        for slot in range(part.start, part.stop)
    }
    for group in range(len(local.windows)):
        first = needed_from[group] if needed_from else 0
        for position, block, slot in local.slots(local_ids[group], starts[group]):
            missing = (group, block, slot) in unfilled
            assert not (missing and first <= position < num_tokens), "a token is not read"
    expected = local.like()
    expected.arenas[rank][:] = before
    expected.fill_rank(rank, local_ids, starts, leave=unfilled)
    np.testing.assert_array_equal(local.arenas[rank], expected.arenas[rank])
    local.arenas[rank][:] = before


# --- ranks --------------------------------------------------------------------------------------


def test_equal_sizes_read_the_same_rank():
    assert [list(target_ranks(r, 4, 4)) for r in range(4)] == [[0], [1], [2], [3]]
    assert [consumer_count(r, 4, 4) for r in range(4)] == [1, 1, 1, 1]


def test_more_readers_share_a_rank():
    assert [list(target_ranks(r, 4, 2)) for r in range(4)] == [[0], [0], [1], [1]]
    assert [consumer_count(r, 2, 4) for r in range(2)] == [2, 2]


def test_fewer_readers_deal_with_several_ranks():
    assert [list(target_ranks(r, 2, 4)) for r in range(2)] == [[0, 1], [2, 3]]
    assert [consumer_count(r, 4, 2) for r in range(4)] == [1, 1, 1, 1]


def test_sizes_that_do_not_divide_one_another():
    assert [list(target_ranks(r, 3, 2)) for r in range(3)] == [[0], [0, 1], [1]]
    assert [consumer_count(r, 2, 3) for r in range(2)] == [2, 2]
    assert [consumer_count(r, 3, 2) for r in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("remote", TP_SIZES)
def test_every_rank_hears_from_as_many_readers_as_it_is_told(tp_size, remote):
    heard = [0] * remote
    for rank in range(tp_size):
        for target in target_ranks(rank, tp_size, remote):
            heard[target] += 1
    assert min(heard) >= 1
    assert heard == [consumer_count(rank, remote, tp_size) for rank in range(remote)]


@pytest.mark.parametrize("size", [0, -1, MAX_TP_SIZE + 1, 10**15])
def test_absurd_tensor_parallel_size_from_a_client_is_refused(size):
    with pytest.raises(TopologyError, match=f"tensor-parallel size {size} is outside"):
        target_ranks(0, 1, size)


def test_more_ranks_than_anybody_has_are_refused():
    """Each would be met and loaded because a request's parameters say so."""
    assert len(target_ranks(1, 2, 2 * MAX_TARGET_RANKS)) == MAX_TARGET_RANKS
    with pytest.raises(TopologyError, match=r"sizes 1 and 129: rank 0 would deal with 129 ranks"):
        target_ranks(0, 1, MAX_TARGET_RANKS + 1)


def test_rank_outside_its_engine_is_refused():
    with pytest.raises(TopologyError, match="rank 2 does not exist with tensor-parallel size 2"):
        target_ranks(2, 2, 1)


def test_heads_that_cannot_be_spread_over_the_ranks():
    with pytest.raises(TopologyError, match="6 KV heads cannot be spread over 4 ranks"):
        heads_of_rank(6, 0, 4)
    assert [list(heads_of_rank(2, r, 4)) for r in range(4)] == [[0], [0], [1], [1]]
    assert [list(heads_of_rank(6, r, 3)) for r in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["pp_size", "remote_pp_size", "remote_dcp_size", "pcp_size"])
def test_other_parallelism_is_refused_with_both_values(name):
    check_parallel_sizes()
    expected = "local 1, remote 2" if name.startswith("remote") else "local 2, remote 1"
    with pytest.raises(TopologyError, match=expected):
        check_parallel_sizes(**{name: 2})


# What vLLM's own NixlConnector (0.32) decides for the same sizes: (KV heads, reader TP, producer
# TP) -> for each reader rank (ranks read, first of the remote rank's heads that is read).
STOCK = {
    (8, 2, 2): [([0], 0), ([1], 0)],
    (8, 4, 2): [([0], 0), ([0], 2), ([1], 0), ([1], 2)],
    (8, 2, 4): [([0, 1], 0), ([2, 3], 0)],
    (2, 8, 4): [([r // 2], 0) for r in range(8)],
    (2, 8, 1): [([0], 0)] * 4 + [([0], 1)] * 4,
    (4, 8, 2): [([0], 0), ([0], 0), ([0], 1), ([0], 1), ([1], 0), ([1], 0), ([1], 1), ([1], 1)],
    (2, 1, 4): [([0, 2], 0)],
    (2, 2, 8): [([0], 0), ([4], 0)],
    (1, 2, 4): [([0], 0), ([2], 0)],
    (1, 4, 2): [([0], 0), ([0], 0), ([1], 0), ([1], 0)],
}


@pytest.mark.parametrize(("sizes", "stock"), list(STOCK.items()))
def test_same_ranks_and_heads_as_stock_vllm(sizes, stock):
    kv_heads, tp_size, remote_tp_size = sizes
    remote = Engine(tp_size=remote_tp_size, kv_heads=kv_heads)
    local = Engine(tp_size=tp_size, kv_heads=kv_heads)
    head_bytes = 4 * 2 * local.block_size
    for rank, (ranks, first_head) in enumerate(stock):
        plan = make_plan(local, remote, rank)
        assert [read.remote_rank for read in plan.reads] == ranks
        first_base = remote.layout(ranks[0]).regions[0].base
        assert int(plan.reads[0].remote_rows[0, 0]) - first_base == first_head * head_bytes
        assert plan.ranks == tuple(target_ranks(rank, tp_size, remote_tp_size))


# --- the golden matrix --------------------------------------------------------------------------


def heads_fit(kv_heads: int, tp_size: int) -> bool:
    return kv_heads % tp_size == 0 or tp_size % kv_heads == 0


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize(("local_block", "remote_block"), [(4, 4), (8, 2), (2, 4)])
@pytest.mark.parametrize("kv_heads", range(1, 17))
def test_every_byte_arrives_where_it_belongs(kv_heads, local_block, remote_block, kv_layout):
    """TP 1-8 x TP 1-8, a sequence of 11 tokens with 4 of them cached locally."""
    num_tokens = 11
    fragmented = np.random.default_rng(kv_heads).permutation(12).tolist()
    remote_ids = fragmented[: -(-num_tokens // remote_block)]
    computed = 4 // local_block
    local_ids = fragmented[::-1][computed : -(-num_tokens // local_block)]
    sizes = [tp_size for tp_size in TP_SIZES if heads_fit(kv_heads, tp_size)]
    remotes = {}
    for tp_size in sizes:
        remotes[tp_size] = Engine(tp_size, kv_heads, remote_block, kv_layout=kv_layout)
        remotes[tp_size].fill([remote_ids], [0])
    for tp_size in TP_SIZES:
        if tp_size not in sizes:
            with pytest.raises(TopologyError, match=f"{kv_heads} KV heads"):
                heads_of_rank(kv_heads, 0, tp_size)
            continue
        local = Engine(tp_size, kv_heads, local_block, kv_layout=kv_layout)
        for remote, rank in itertools.product(remotes.values(), range(tp_size)):
            same_heads = len(local.heads(0)) == len(remote.heads(0))
            if kv_layout == "NHD" and not same_heads:
                message = f"tensor-parallel size: local {tp_size}, remote {remote.tp_size}.*NHD"
                with pytest.raises(TopologyError, match=message):
                    make_plan(local, remote, rank)
                continue
            plan = make_plan(local, remote, rank)
            pairs = plan.pair_blocks(
                [local_ids], [remote_ids], num_computed_blocks=[computed], num_tokens=num_tokens
            )
            check_bytes(
                plan,
                pairs,
                local,
                remote,
                rank,
                [local_ids],
                [computed * local_block],
                num_tokens,
            )


STORAGE_PAIRS = [
    ("apart", "apart"),
    ("rows", "rows"),
    ("rows", "apart"),
    ("apart", "padded rows"),
    ("padded", "apart"),
    ("padded rows", "padded"),
    ("segments", "segments"),
]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize(("local_block", "remote_block"), [(4, 4), (8, 4), (2, 8)])
@pytest.mark.parametrize(("mine", "theirs"), STORAGE_PAIRS)
def test_storage_may_differ(mine, theirs, local_block, remote_block, kv_layout, planes):
    """Blocks apart, padded, of all layers in one row; K and V in one block or two segments."""
    sizes = [(1, 1), (2, 1), (1, 2), (4, 2)] if kv_layout == "HND" else [(1, 1), (4, 4)]
    for tp_size, remote_tp_size in sizes:
        local = Engine(
            tp_size,
            4,
            local_block,
            kv_layout=kv_layout,
            layers=3,
            planes=planes,
            storage=mine,
        )
        remote = Engine(
            remote_tp_size,
            4,
            remote_block,
            kv_layout=kv_layout,
            layers=3,
            planes=planes,
            storage=theirs,
        )
        remote_ids = [5, 6, 2, 9, 8, 0, 1, 3][: -(-16 // remote_block)]
        local_ids = [7, 3, 4, 1, 10, 11, 0, 2][: -(-16 // local_block)]
        remote.fill([remote_ids], [0])
        for rank in range(tp_size):
            plan = make_plan(local, remote, rank)
            pairs = plan.pair_blocks([local_ids], [remote_ids])
            assert pairs.unfilled == ()
            check_bytes(plan, pairs, local, remote, rank, [local_ids], [0], 16)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_request_reads_the_right_bytes(data):
    """Windows, prefix hits, extra blocks, kernel blocks, replication: whatever is accepted must be
    right, and what is well formed must be accepted."""
    draw = data.draw
    replicated = draw(st.booleans())
    kv_heads = draw(st.sampled_from([1, 2, 4, 6]))
    sizes = st.sampled_from([t for t in (1, 2, 3, 4) if heads_fit(kv_heads, t)])
    tp_size, remote_tp_size = draw(sizes), draw(sizes)
    blocks = draw(st.sampled_from([(4, 4), (8, 4), (4, 8), (2, 8)]))
    windows = draw(st.sampled_from([(0,), (0, 5), (9, 0), (0, 0), (6,)]))
    layers = len(windows) + 1
    common = {
        "kv_heads": kv_heads,
        "replicated": replicated,
        "planes": draw(st.sampled_from([1, 2])),
        "layers": layers,
        "groups": [i % len(windows) for i in range(layers)],
        "windows": windows,
        "num_blocks": 24,
    }
    local, remote = (
        Engine(
            size,
            block_size=block,
            kernel_blocks=draw(st.sampled_from([1, 2, 3])),
            storage=draw(st.sampled_from(["apart", "rows", "padded"])),
            **common,
        )
        for size, block in zip((tp_size, remote_tp_size), blocks, strict=True)
    )
    num_tokens = draw(st.integers(1, 40))
    total = -(-num_tokens // local.tokens_per_block)
    computed = draw(st.integers(0, total - 1))
    extra = draw(st.sampled_from([0, 0, 1]))
    tell_computed, tell_tokens = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    has_full = 0 in windows
    if extra and not (has_full and tell_computed):
        extra = 0  # nobody could tell
    if not has_full:
        tell_tokens = True

    def clipped(engine: Engine, count: int, window: int) -> int:
        """How many of the blocks a windowed group keeps."""
        keep = -(-window // engine.tokens_per_block) + 1 if window else count
        return min(count, keep)

    remote_count = -(-num_tokens // remote.tokens_per_block) + extra
    remote_ids, remote_starts = [], []
    local_ids, local_starts, needed_from = [], [], []
    for window in windows:
        kept = clipped(remote, remote_count, window + extra * remote.tokens_per_block)
        kept = kept if window else remote_count
        ids = rng.permutation(24)[:kept].tolist()
        remote_ids.append(ids)
        remote_starts.append((remote_count - kept) * remote.tokens_per_block)
        kept = min(total - computed, clipped(local, total, window))
        local_ids.append(rng.permutation(24)[:kept].tolist())
        local_starts.append((total - kept) * local.tokens_per_block)
        needed_from.append(max(0, num_tokens - window + 1) if window else 0)
    remote.fill(remote_ids, remote_starts)
    for rank in range(tp_size):
        plan = make_plan(local, remote, rank)
        pairs = plan.pair_blocks(
            local_ids,
            remote_ids,
            num_computed_blocks=[computed] * len(windows) if tell_computed else None,
            num_tokens=num_tokens if tell_tokens else None,
        )
        check_bytes(
            plan, pairs, local, remote, rank, local_ids, local_starts, num_tokens, needed_from
        )


# --- replicated caches --------------------------------------------------------------------------


def test_replicated_cache_has_one_source_and_the_others_are_only_notified():
    local, remote = (Engine(tp_size, replicated=True) for tp_size in (2, 8))
    plans = [make_plan(local, remote, rank) for rank in range(2)]
    assert [[read.remote_rank for read in plan.reads] for plan in plans] == [[0], [4]]
    assert [plan.notify_ranks for plan in plans] == [(1, 2, 3), (5, 6, 7)]
    assert [plan.ranks for plan in plans] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(set(plan.consumers.values()) == {1} for plan in plans)


def test_readers_of_a_replicated_cache_spread_over_the_ranks():
    local, remote = (Engine(tp_size, replicated=True) for tp_size in (4, 2))
    plans = [make_plan(local, remote, rank) for rank in range(4)]
    assert [[read.remote_rank for read in plan.reads] for plan in plans] == [[0], [0], [1], [1]]
    assert [dict(plan.consumers) for plan in plans] == [{0: 2}, {0: 2}, {1: 2}, {1: 2}]


def test_replicated_heads_are_read_once():
    """2 KV heads on 8 ranks: each head is on four of them."""
    plan = make_plan(Engine(1, kv_heads=2), Engine(8, kv_heads=2))
    assert [read.remote_rank for read in plan.reads] == [0, 4]
    assert plan.notify_ranks == (1, 2, 3, 5, 6, 7)


# --- descriptors --------------------------------------------------------------------------------


def test_one_descriptor_for_a_block_of_all_layers():
    for pack_layers in (False, True):
        local, remote = (
            Engine(layers=5, storage="rows", pack_layers=packed) for packed in (True, pack_layers)
        )
        (read,) = make_plan(local, remote).reads
        assert len(read.local_rows) == 1
        assert read.local_rows[0, 1] == read.local_rows[0, 2] == 5 * 4 * 4 * 2 * 4


def test_touching_buffers_are_not_taken_for_one():
    """Two allocations that happen to follow each other: of one block each, and of several."""
    single = {"block_len": 64, "block_stride": 128, "num_blocks": 1}
    several = {"block_len": 64, "block_stride": 64, "num_blocks": 2}
    for shape in (single, several):
        layout = flat([4096, 4096 + 64], **single)
        first, second = (replace(region, **shape) for region in layout.regions)
        touching = replace(layout, regions=(first, second))
        (read,) = plan_reads(touching, {0: touching}, tp_rank=0, tp_size=1, remote_tp_size=1).reads
        assert read.local_rows[:, 1].tolist() == [64, 64]


@pytest.mark.parametrize(("local_block", "remote_block"), [(8, 2), (2, 8)])
def test_parts_of_token_major_blocks_are_numbered_through(local_block, remote_block):
    """Blocks of different sizes still merge into few descriptors where memory allows it."""
    local, remote = (
        Engine(block_size=size, kv_layout="NHD", num_blocks=12)
        for size in (local_block, remote_block)
    )
    plan = make_plan(local, remote)
    (read,) = plan.reads
    assert len(read.local_rows) == local.layers
    local_ids, remote_ids = ([list(range(1, 1 + 16 // e.block_size))] for e in (local, remote))
    pairs = plan.pair_blocks(local_ids, remote_ids)
    local_index = RegionIndex(read.local_rows, read.row_groups)
    remote_index = RegionIndex(read.remote_rows, read.row_groups)
    mine, theirs = read.select(pairs)
    *_, num_descs = paired_desc_ids(local_index, mine, remote_index, theirs)
    assert num_descs == local.layers
    assert read.num_descs(pairs) == local.layers * 8
    assert read.num_bytes(pairs) == plan.num_bytes(pairs) == local.layers * 16 * 4 * 2 * 4


@pytest.mark.parametrize(("tp_size", "remote_tp_size"), [(1, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize(("local_block", "remote_block"), [(4, 4), (8, 4), (4, 8)])
def test_tables_suit_the_descriptor_extension(tp_size, remote_tp_size, local_block, remote_block):
    """The index lists of `paired_desc_ids` name the same bytes as the plan itself."""
    local = Engine(tp_size, block_size=local_block)
    remote = Engine(remote_tp_size, block_size=remote_block)
    local_ids, remote_ids = ([[9, 8, 7, 1, 2][: 16 // e.block_size]] for e in (local, remote))
    remote.fill(remote_ids, [0])
    plan = make_plan(local, remote, rank=tp_size - 1)
    pairs = plan.pair_blocks(local_ids, remote_ids)
    expected = {
        (int(mine[0] + i * mine[2]), int(theirs[0] + j * theirs[2]), int(mine[1]))
        for read in plan.reads
        for mine, theirs, number in zip(
            read.local_rows, read.remote_rows, read.row_groups, strict=True
        )
        for i, j in zip(*(lists[number] for lists in read.select(pairs)), strict=True)
    }
    found = set()
    for read in plan.reads:
        mine, theirs = read.select(pairs)
        local_desc_ids, remote_desc_ids, _ = paired_desc_ids(
            RegionIndex(read.local_rows, read.row_groups),
            mine,
            RegionIndex(read.remote_rows, read.row_groups),
            theirs,
        )
        assert len(local_desc_ids) == read.num_descs(pairs)
        local_descs, remote_descs = (
            every_descriptor(strided_descs(rows)) for rows in (read.local_rows, read.remote_rows)
        )
        for i, j in zip(local_desc_ids, remote_desc_ids, strict=True):
            assert local_descs[i][1] == remote_descs[j][1]
            found.add((local_descs[i][0], remote_descs[j][0], local_descs[i][1]))
    assert found == expected


def every_descriptor(table: np.ndarray) -> list[tuple[int, int]]:
    return [
        (address + i * stride, length)
        for address, length, _, stride, count in table.tolist()
        for i in range(count)
    ]


def test_addresses_up_to_the_end_of_64_bits():
    """Address arithmetic is exact, also where it would overflow a signed type."""
    high = 2**64 - 8 * 64
    layouts = [
        layout_from_addresses([base], block_len=64, num_blocks=8, block_size=4, num_kv_heads=heads)
        for base, heads in ((4096, 2), (high, 2))
    ]
    half = replace(layouts[0].regions[0], block_len=32, block_stride=32)
    plan = plan_reads(
        replace(layouts[0], regions=(half,)),
        {0: layouts[1]},
        tp_rank=1,
        tp_size=2,
        remote_tp_size=1,
    )
    assert plan.reads[0].remote_rows.tolist() == [[high + 32, 32, 64, 8, 0]]


# --- positions of the block lists ---------------------------------------------------------------


def paired(
    local_ids: Any,
    remote_ids: Any,
    *,
    local: Engine | None = None,
    remote: Engine | None = None,
    **known: Any,
) -> list[list[tuple[int, int]]]:
    plan = make_plan(local or Engine(), remote or Engine())
    pairs = plan.pair_blocks(local_ids, remote_ids, **known)
    return [
        list(zip(mine.tolist(), theirs.tolist(), strict=True))
        for mine, theirs in zip(pairs.local, pairs.remote, strict=True)
    ]


def test_partial_prefix_hit_pairs_with_the_tail_of_the_remote_list():
    for known in ({}, {"num_tokens": 15}, {"num_computed_blocks": [2]}):
        assert paired([[7, 8]], [[1, 2, 3, 4]], **known) == [[(7, 3), (8, 4)]]


@pytest.mark.parametrize("nothing", [[], (), [[]], ([],)])
def test_full_prefix_hit_reads_nothing(nothing):
    plan = make_plan(Engine(2), Engine(4))
    pairs = plan.pair_blocks(nothing, [[1, 2]])
    assert pairs.empty
    assert plan.num_bytes(pairs) == 0
    assert plan.ranks == (0, 1)  # and these are notified


def test_extra_trailing_remote_block_is_not_read():
    """A producer with room for the next token lists a block more than the tokens need."""
    for known in ({"num_tokens": 8}, {"num_computed_blocks": [1]}):
        assert paired([[5]], [[1, 2, 3]], **known) == [[(5, 2)]]


def test_extra_trailing_remote_block_that_the_local_block_has_room_for():
    local, remote = Engine(block_size=16, kv_heads=1), Engine(block_size=4, kv_heads=1)
    plan = make_plan(local, remote)
    pairs = plan.pair_blocks([[2]], [[5, 6, 7]], num_tokens=5)
    assert pairs.remote[0].tolist() == [5, 6]
    assert pairs.unfilled == (UnfilledTokens(0, 2, 8, 16),)


def test_more_local_blocks_than_the_producer_has_is_an_error_of_the_request():
    """The reader's prompt is a token longer than what the producer computed."""
    for known in ({}, {"num_tokens": 8}, {"num_computed_blocks": [0]}):
        with pytest.raises(BlockListError, match=r"3 local blocks of 4 tokens.*8 tokens"):
            paired([[5, 6, 7]], [[1, 2]], **known)
    with pytest.raises(BlockListError, match="ask only for blocks that it has"):
        paired([[5]], [[1, 2]], num_computed_blocks=[2])


def test_remote_list_that_does_not_hold_the_tokens_it_claims():
    with pytest.raises(BlockListError, match="lists 1 blocks of 4 tokens, which end at token 4"):
        paired([[5, 6, 7]], [[1]], num_tokens=12)
    with pytest.raises(BlockListError, match="the local blocks are to hold 12"):
        paired([[5, 6, 7]], [[]], num_tokens=12)


def test_reader_that_wants_only_the_beginning():
    assert paired([[5]], [[1, 2, 3]], num_computed_blocks=[0], num_tokens=12) == [[(5, 1)]]


def test_prefix_hit_with_smaller_remote_blocks():
    """One local block of 16 tokens is cached, the second is to hold the fifth block of 4."""
    local, remote = Engine(block_size=16, kv_heads=1), Engine(block_size=4, kv_heads=1)
    remote_ids = [[1, 2, 3, 4, 5]]
    for known in ({"num_tokens": 18}, {"num_computed_blocks": [1]}):
        assert paired([[7]], remote_ids, local=local, remote=remote, **known) == [[(4 * 7, 5)]]
    with pytest.raises(BlockListError, match="pass num_tokens or num_computed_blocks"):
        paired([[7]], remote_ids, local=local, remote=remote)
    # Without a prefix hit there is only one way to pair them.
    assert paired([[6, 7]], remote_ids, local=local, remote=remote) == [
        [(24, 1), (25, 2), (26, 3), (27, 4), (28, 5)]
    ]


def test_unfilled_tokens_are_reported():
    plan = make_plan(Engine(block_size=16), Engine(block_size=4))
    pairs = plan.pair_blocks([[6, 7]], [[1, 2, 3, 4, 5]])
    assert pairs.unfilled == (UnfilledTokens(0, 7, 4, 16),)
    plan = make_plan(Engine(block_size=4, kernel_blocks=4), Engine(block_size=4))
    pairs = plan.pair_blocks([[6, 7]], [[1, 2, 3, 4, 5]])
    assert pairs.unfilled == tuple(UnfilledTokens(0, block, 0, 4) for block in (29, 30, 31))


def test_different_numbers_of_kernel_blocks():
    """640 tokens are one logical block there and two here."""
    local = Engine(block_size=4, kernel_blocks=2, kv_heads=1)
    remote = Engine(block_size=4, kernel_blocks=3, kv_heads=1)
    assert paired([[1, 0]], [[5]], local=local, remote=remote, num_tokens=10) == [
        [(2, 15), (3, 16), (0, 17)]
    ]


def windowed() -> Engine:
    return Engine(windows=(0, 6), groups=(0, 1))


def test_windowed_group_pairs_from_the_end():
    """Full attention reads the uncached tail, the window its last blocks."""
    for known in ({}, {"num_tokens": 19}, {"num_computed_blocks": [3, 0]}):
        assert paired(
            [[1, 2], [6, 7]],
            [[1, 2, 3, 4, 5], [7, 8, 9]],
            local=windowed(),
            remote=windowed(),
            **known,
        ) == [[(1, 4), (2, 5)], [(6, 8), (7, 9)]]


def test_windowed_group_with_an_extra_trailing_block():
    """The full group's list shows that the window's list also ends one block too late."""
    assert paired(
        [[1, 2, 3], [6, 7]],
        [[1, 2, 3, 4], [8, 9, 10]],
        local=windowed(),
        remote=windowed(),
        num_computed_blocks=[0, 0],
        num_tokens=12,
    ) == [[(1, 1), (2, 2), (3, 3)], [(6, 8), (7, 9)]]


def test_window_that_the_remote_list_does_not_cover():
    with pytest.raises(BlockListError, match=r"from token 16 on.* need token 14 of a window of 6"):
        paired(
            [[1], [5, 6, 7]],
            [[1, 2, 3, 4, 5], [9]],
            local=windowed(),
            remote=windowed(),
            num_tokens=19,
        )


def test_remote_window_that_has_moved_on():
    """The remote engine went on after the tokens that are needed, and let go of some of them."""
    engine = Engine(windows=(0, 5), groups=(0, 1))
    plan = make_plan(engine, engine)
    lists = [[1, 2, 3, 4, 5], [6, 7]], [[1, 2, 3, 4, 5, 6], [8, 9]]
    known = {"num_computed_blocks": [0, 0], "num_tokens": 23}
    assert plan.pair_blocks(*lists, **known).local[1].tolist() == [7]
    assert plan.pair_blocks(*lists, **known, needed_tokens=20).local[1].tolist() == [7]
    with pytest.raises(BlockListError, match=r"from token 16 on.* need token 13 of a window of 5"):
        plan.pair_blocks(*lists, **known, needed_tokens=17)


def test_windowed_blocks_before_the_window_may_be_missing():
    plan = make_plan(windowed(), windowed())
    pairs = plan.pair_blocks([[1], [4, 5, 6, 7]], [[1, 2, 3, 4, 5], [8, 9]], num_tokens=19)
    assert pairs.local[1].tolist() == [6, 7]
    assert pairs.unfilled == (UnfilledTokens(1, 4, 0, 4), UnfilledTokens(1, 5, 0, 4))


def test_short_sequence_of_a_model_with_windows_only():
    only = {"windows": (6,)}
    assert paired([[5]], [[1, 2]], local=Engine(**only), remote=Engine(**only), num_tokens=3) == [
        [(5, 1)]
    ]


def test_cache_groups_may_be_numbered_differently():
    local = Engine(windows=(0, 6), groups=(0, 1))
    remote = Engine(windows=(6, 0), groups=(1, 0))
    local_ids, remote_ids = [[1, 2], [3, 4]], [[9, 8], [7, 6]]
    remote.fill(remote_ids, [0, 0])
    plan = make_plan(local, remote)
    pairs = plan.pair_blocks(local_ids, remote_ids, num_tokens=7)
    check_bytes(plan, pairs, local, remote, 0, local_ids, [0, 0], 7)


def test_buffer_shared_by_cache_groups_takes_the_blocks_of_these_groups_only():
    """The third group has blocks and a buffer of its own; its ids mean nothing in the first."""
    base = flat({"layers.0": 4096, "layers.2": 8192}, num_blocks=12)
    shared, own = base.regions
    layout = replace(
        base,
        regions=(
            replace(shared, groups=(0, 1), layers=("layers.0", "layers.1")),
            replace(own, groups=(2,)),
        ),
        groups=(CacheGroup(4), CacheGroup(4, sliding_window=6), CacheGroup(4)),
    )
    plan = plan_reads(layout, {0: layout}, tp_rank=0, tp_size=1, remote_tp_size=1)
    pairs = plan.pair_blocks([[1, 2], [3], [9, 8]], [[4, 5, 6], [7, 8], [1, 2, 3]])
    assert [ids.tolist() for ids in pairs.local] == [[1, 2, 3], [9, 8]]
    assert [ids.tolist() for ids in pairs.remote] == [[5, 6, 8], [2, 3]]
    apart = replace(layout, regions=(replace(shared, layers=("layers.0",)), own))
    refuse(layout, apart, "number of cache groups in it: local 2, remote 1")


@pytest.mark.parametrize(
    ("remote_ids", "message"),
    [
        ([[1, 12]], "remote block 12 of group 0 does not exist; the remote cache has 12 blocks"),
        ([[-1, 1]], "remote block -1"),
        ([[2**31, 1]], "remote block 2147483648"),
        ([[2**70, 1]], "no list of integers"),
        ([[1.0, 2.0]], "no list of integers"),
        ([["1", "2"]], "no list of integers"),
        ([[None]], "no list of integers"),
        ([[[1], [2]]], "no list of integers"),
        ([(2**63, 2**63)], "remote block 9223372036854775808"),
        ([(1.0, 2.0)], "must be a list of integers, not 1-dimensional float64"),
        ([(True, False)], "must be a list of integers"),
        ([((1,), (2,))], "must be a list of integers, not 2-dimensional"),
        ([((1,), (2, 3))], "no list of integers"),
        ([{1: 2, 3: 4}], "must be a list of integers"),
        (["12"], "must be a list of integers"),
        ([1, 2], "one list for each cache group"),
        (None, "one list for each cache group, not None"),
        ([[1, 2], [3]], "remote block ids are 2 lists, but the remote cache has 1 groups"),
        ([], "remote block ids are 0 lists"),
    ],
)
def test_malformed_block_lists_are_errors_of_the_request(remote_ids, message):
    with pytest.raises(BlockListError, match=message):
        paired([[0, 1]], remote_ids)


def test_wrong_local_lists():
    with pytest.raises(BlockListError, match="local block 12 of group 0 does not exist"):
        paired([[12]], [[1]])
    with pytest.raises(BlockListError, match=r"num_computed_blocks \(1, 2\)"):
        paired([[1]], [[1]], num_computed_blocks=[1, 2])
    with pytest.raises(BlockListError, match="num_tokens -1"):
        paired([[1]], [[1]], num_tokens=-1)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(remote_ids=junk, num_tokens=st.none() | st.integers(0, 2**64))
@settings(deadline=None)
def test_nothing_that_a_client_sends_raises_anything_else(remote_ids, num_tokens):
    plan = make_plan(Engine(), Engine())
    try:
        pairs = plan.pair_blocks([[0, 1]], remote_ids, num_tokens=num_tokens)
    except BlockListError:
        return
    assert all(
        mine.size == theirs.size for mine, theirs in zip(pairs.local, pairs.remote, strict=True)
    )


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (
            {"kv_layout": "HND"},
            {"kv_layout": "NHD"},
            r"KV cache layout: local HND, remote NHD \(rank 0\); use the same",
        ),
        (
            {"attn_backend": "FLASHINFER"},
            {"attn_backend": "CPU_ATTN"},
            "attention backend: local 'FLASHINFER', remote 'CPU_ATTN'",
        ),
        ({"block_size": 6}, {"block_size": 4}, "tokens per block: local 6, remote 4; use equal"),
        (
            {"block_size": 8, "attn_backend": "CPU_ATTN", "token_granular": False},
            {"block_size": 4, "attn_backend": "CPU_ATTN", "token_granular": False},
            "tokens per block: local 8, remote 4; attention backend CPU_ATTN packs the tokens",
        ),
        ({"layers": 2}, {"layers": 3}, r"regions: local 2, remote 3.*'layers.2' is on one side"),
        (
            {"planes": 2},
            {"planes": 2, "storage": "segments"},
            "number of KV cache regions: local 2, remote 4",
        ),
        ({"kv_heads": 4}, {"kv_heads": 8}, "KV heads of the model: local 4, remote 8"),
        ({"replicated": True}, {}, "replicated on every rank: local True, remote False"),
        ({"windows": (6,)}, {"windows": (8,)}, r"sliding windows.*: local \[6\], remote \[8\]"),
    ],
)
def test_caches_that_cannot_be_mapped_are_refused(mine, theirs, message):
    with pytest.raises(TopologyError, match=message):
        make_plan(Engine(**mine), Engine(**theirs))


def test_packed_tokens_may_still_be_read_by_block_and_by_head():
    """A CPU engine: K transposed inside (block, head), so tokens cannot be told apart."""
    for tp_size, remote_tp_size in [(1, 1), (2, 1), (1, 2)]:
        local, remote = (
            Engine(size, token_granular=False, kernel_blocks=kernel_blocks)
            for size, kernel_blocks in ((tp_size, 2), (remote_tp_size, 1))
        )
        remote.fill([[3, 4]], [0])
        plan = make_plan(local, remote)
        pairs = plan.pair_blocks([[5]], [[3, 4]], num_tokens=8)
        check_bytes(plan, pairs, local, remote, 0, [[5]], [0], 8)


def test_another_cpu_packs_differently():
    layout = Engine(token_granular=False).layout(0)
    mine, theirs = replace(layout, packing="avx512"), replace(layout, packing="amx")
    with pytest.raises(TopologyError, match="local 'avx512', remote 'amx'"):
        plan_reads(mine, {0: theirs}, tp_rank=0, tp_size=1, remote_tp_size=1)
    plan_reads(mine, {0: layout}, tp_rank=0, tp_size=1, remote_tp_size=1)  # a peer that is silent


def test_layout_name_does_not_matter_for_replicated_caches():
    local, remote = (Engine(replicated=True, kv_layout=name) for name in ("HND", "NHD"))
    assert make_plan(local, remote).reads


def refuse(local: CacheLayout, remote: CacheLayout, message: str, tp_size: int = 1) -> None:
    with pytest.raises(TopologyError, match=message):
        plan_reads(local, {0: remote}, tp_rank=0, tp_size=tp_size, remote_tp_size=1)


def flat(bases: Any = (4096,), **given: Any) -> CacheLayout:
    common = {"block_len": 64, "num_blocks": 8, "block_size": 4, "num_kv_heads": 2}
    return layout_from_addresses(bases, **{**common, **given})


def test_block_lengths_that_do_not_fit_are_refused():
    """Another KV cache dtype, or slices mapped onto the wrong model."""
    refuse(flat(), flat(block_len=128), "bytes per block: local 64 for 2 heads of 4 tokens, remote")
    refuse(flat(), flat(), "local 64 for 1 heads of 4 tokens, remote 64 for 2 heads", tp_size=2)


def test_blocks_that_cannot_be_cut_evenly_are_refused():
    refuse(
        flat(block_len=33, block_size=4),
        flat(block_len=66, block_size=8),
        "local block of 33 bytes cannot be cut into 8 equal parts",
    )


def test_layers_that_differ_by_name():
    refuse(
        flat({"layers.0": 4096, "layers.1": 8192}),
        flat({"layers.0": 4096, "layers.2": 8192}),
        r"layer 'layers.1' .*\(rank 0\)",
    )


def test_planes_that_differ():
    refuse(flat(planes=2), flat(), "planes in a block: local 2, remote 1")


def test_memory_of_two_kinds_on_one_side():
    layout = flat([4096, 8192])
    first, second = layout.regions
    mixed = replace(layout, regions=(first, replace(second, mem_type="VRAM")))
    refuse(mixed, layout, r"different kinds of memory.*\('DRAM', 'DRAM'\), \('VRAM', 'DRAM'\)")


def test_memory_of_another_kind_on_the_other_side():
    local, remote = flat(mem_type="VRAM", device_id=3), flat()
    (read,) = plan_reads(local, {0: remote}, tp_rank=0, tp_size=1, remote_tp_size=1).reads
    assert (read.local_mem_type, read.remote_mem_type) == ("VRAM", "DRAM")
    assert (read.local_rows[0, 4], read.remote_rows[0, 4]) == (3, 0)


# What a peer says of its blocks must not cost more than a refusal.


def test_blocks_of_too_many_kernel_blocks_are_refused():
    few, many = (
        replace(flat(num_blocks=8192), kernel_blocks_per_block=count)
        for count in (MAX_BLOCK_RATIO, MAX_BLOCK_RATIO + 1)
    )
    plan_reads(flat(), {0: few}, tp_rank=0, tp_size=1, remote_tp_size=1)
    refuse(flat(), many, "kernel blocks per block: local 1, remote 1025")
    refuse(many, flat(), "kernel blocks per block: local 1025, remote 1")


def test_a_request_that_stands_for_too_many_kernel_blocks_is_refused():
    remote = replace(flat(num_blocks=8192), kernel_blocks_per_block=MAX_BLOCK_RATIO)
    plan = plan_reads(flat(), {0: remote}, tp_rank=0, tp_size=1, remote_tp_size=1)
    most = MAX_KERNEL_IDS // MAX_BLOCK_RATIO
    plan.pair_blocks([[0]], [[0] * most], num_computed_blocks=[0])
    with pytest.raises(BlockListError, match="remote block ids are 4097 blocks of 1024 kernel"):
        plan.pair_blocks([[0]], [[0] * (most + 1)], num_computed_blocks=[0])


def test_block_sizes_that_are_too_far_apart_are_refused():
    def sized(ratio: int) -> CacheLayout:
        return flat(block_len=64 * ratio, block_size=4 * ratio)

    plan_reads(flat(), {0: sized(MAX_BLOCK_RATIO)}, tp_rank=0, tp_size=1, remote_tp_size=1)
    message = "tokens per block: local {}, remote {}; one may be at most 1024 times the other"
    refuse(flat(), sized(2048), message.format(4, 8192))
    refuse(sized(2048), flat(), message.format(8192, 4))


def test_blocks_that_are_cut_into_too_many_pieces_are_refused():
    """Gaps between a peer's blocks give each part of a block a row of its own."""
    length = 64 * MAX_BLOCK_RATIO
    changes = {"block_len": length, "block_stride": length + 64, "block_size": 4 * MAX_BLOCK_RATIO}
    bases = [i << 32 for i in range(1, MAX_PIECES // MAX_BLOCK_RATIO + 2)]
    local, remote = (flat(bases, num_kv_heads=1, **given) for given in ({}, changes))
    refuse(local, remote, "blocks of 4 tokens here and 4096 there.* more than 65536 pieces")
    local, remote = (replace(layout, regions=layout.regions[1:]) for layout in (local, remote))
    plan = plan_reads(local, {0: remote}, tp_rank=0, tp_size=1, remote_tp_size=1)
    assert len(plan.reads[0].local_rows) == MAX_PIECES


def test_a_request_of_too_many_descriptors_is_refused():
    (read,) = make_plan(Engine(layers=2), Engine(layers=2)).reads
    for blocks in (MAX_REQUEST_DESCS // 2, MAX_REQUEST_DESCS // 2 + 1):
        ids = (np.broadcast_to(np.int32(0), blocks),)
        pairs = BlockPairs(ids, ids)
        if blocks * 2 <= MAX_REQUEST_DESCS:
            read.check_num_descs(pairs)
            continue
        with pytest.raises(BlockListError, match=r"cut into 16777218 pieces \(rank 0\)"):
            read.check_num_descs(pairs)


def test_more_pieces_than_nixl_can_number():
    refuse(
        flat(num_blocks=2**31), flat(num_blocks=8), "local blocks are cut into 2147483648 pieces"
    )


def test_remote_rank_without_a_layout():
    local = Engine(1)
    with pytest.raises(TopologyError, match=r"rank 0 of 1 reads ranks \[0, 1\] of 2.*rank 1"):
        plan_reads(
            local.layout(0), {0: Engine(2).layout(0)}, tp_rank=0, tp_size=1, remote_tp_size=2
        )


def test_ranks_of_one_engine_that_differ():
    remote = Engine(2)
    odd = replace(remote.layout(1), kernel_blocks_per_block=2)
    with pytest.raises(TopologyError, match="rank 0 has 1, rank 1 has 2"):
        plan_reads(
            Engine(1).layout(0),
            {0: remote.layout(0), 1: odd},
            tp_rank=0,
            tp_size=1,
            remote_tp_size=2,
        )


def test_ranks_with_thousands_of_cache_groups_do_not_fill_the_log():
    remote = Engine(2).layout(0)
    many = replace(remote, groups=remote.groups + (CacheGroup(4),) * 10_000)
    with pytest.raises(TopologyError, match="differ in cache groups") as caught:
        plan_reads(
            Engine(1).layout(0), {0: remote, 1: many}, tp_rank=0, tp_size=1, remote_tp_size=2
        )
    assert len(str(caught.value)) < 1000


def test_fewer_blocks_on_one_remote_rank_bound_the_block_ids():
    remote = Engine(2)
    few = replace(
        remote.layout(1),
        regions=tuple(replace(r, num_blocks=5) for r in remote.layout(1).regions),
    )
    plan = plan_reads(
        Engine(1).layout(0), {0: remote.layout(0), 1: few}, tp_rank=0, tp_size=1, remote_tp_size=2
    )
    with pytest.raises(BlockListError, match=r"remote block 5 .* has 5 blocks"):
        plan.pair_blocks([[0]], [[5]])


def test_plan_can_be_read():
    plan = make_plan(Engine(1, kv_heads=2), Engine(4, kv_heads=2))
    lines = str(plan).splitlines()
    assert lines[0].split() == ["rank", "pieces", "piece", "bytes", "consumers"]
    assert lines[1].split() == ["0", "2", "32", "1"]
    assert lines[2].split() == ["1", "-", "only", "notified", "1"]
