"""What a reader pays for the mapping: once per remote engine, and once per request.

pytest bench/bench_topology.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvnixl._descs import RegionIndex, paired_desc_ids
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.topology import ReadPlan, plan_reads

NUM_REGIONS = 160  # 80 layers, K and V
NUM_BLOCKS = 8192
NUM_REQUEST_BLOCKS = 512
BLOCK_SIZE = 16
TOKEN_BYTES = 256  # of one head


def layout(heads: int, block_size: int = BLOCK_SIZE, kv_heads: int = 8) -> CacheLayout:
    block_len = heads * block_size * TOKEN_BYTES
    return layout_from_addresses(
        {f"layers.{i}": (i + 1) << 36 for i in range(NUM_REGIONS)},
        block_len=block_len,
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        num_kv_heads=kv_heads,
    )


def make_plan(tp_size: int, remote_tp_size: int, remote_block_size: int = BLOCK_SIZE) -> ReadPlan:
    remote = layout(8 // remote_tp_size, remote_block_size)
    return plan_reads(
        layout(8 // tp_size),
        dict.fromkeys(range(remote_tp_size), remote),
        tp_rank=0,
        tp_size=tp_size,
        remote_tp_size=remote_tp_size,
    )


@pytest.mark.parametrize(("tp_size", "remote_tp_size"), [(1, 1), (8, 1), (1, 8)])
def test_plan(benchmark: Any, tp_size: int, remote_tp_size: int) -> None:
    """Once per remote engine."""
    plan = benchmark(make_plan, tp_size, remote_tp_size)
    assert sum(len(read.local_rows) for read in plan.reads) == NUM_REGIONS * len(plan.reads)


@pytest.mark.parametrize("remote_block_size", [BLOCK_SIZE, BLOCK_SIZE // 2])
@pytest.mark.parametrize("with_ids", [False, True], ids=["pairs", "pairs and descriptor ids"])
def test_request(benchmark: Any, remote_block_size: int, with_ids: bool) -> None:
    """Once per request: block lists to pairs, and to the index lists of one rank."""
    plan = make_plan(1, 1, remote_block_size)
    (read,) = plan.reads
    local_index = RegionIndex(read.local_rows, read.row_groups)
    remote_index = RegionIndex(read.remote_rows, read.row_groups)
    rng = np.random.default_rng(0)
    local_ids = [rng.permutation(NUM_BLOCKS)[:NUM_REQUEST_BLOCKS].tolist()]
    remote_count = NUM_REQUEST_BLOCKS * BLOCK_SIZE // remote_block_size
    remote_ids = [rng.permutation(NUM_BLOCKS)[:remote_count].tolist()]

    def request() -> int:
        pairs = plan.pair_blocks(
            local_ids,
            remote_ids,
            num_computed_blocks=[0],
            num_tokens=NUM_REQUEST_BLOCKS * BLOCK_SIZE,
        )
        if with_ids:
            mine, theirs = read.select(pairs)
            paired_desc_ids(local_index, mine, remote_index, theirs)
        return sum(ids.size for ids in pairs.local)

    assert benchmark(request) == remote_count
