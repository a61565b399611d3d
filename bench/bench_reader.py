"""What the reader itself costs: everything but NIXL, which is replaced by calls that only return.

pytest bench/bench_reader.py     each figure (pytest-benchmark)
python bench/bench_reader.py     the figures in one table, with the cost of the empty NIXL calls

A request has 160 regions of 512 blocks: `fetch`, posting, one poll, verification, its outcome. The
same figures are rows of ``python -m kvnixl.bench``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvnixl.bench.overhead import EmptyNixl, ReaderSide, block_lists, seconds_of
from kvnixl.bench.plan import FULL_SCALE

NUM_REGIONS, NUM_BLOCKS = FULL_SCALE.regions, FULL_SCALE.num_blocks
REQUEST_BLOCKS = FULL_SCALE.request_blocks


@pytest.mark.parametrize("fragmented", [False, True], ids=["contiguous", "fragmented"])
def test_request(benchmark: Any, fragmented: bool) -> None:
    side = ReaderSide(NUM_REGIONS, NUM_BLOCKS)
    side.meet(1)
    local, remote = block_lists(FULL_SCALE, fragmented=fragmented)
    benchmark(side.read, side.reference(remote), local)
    side.close()


def test_small_request(benchmark: Any) -> None:
    side = ReaderSide(1, NUM_BLOCKS)
    side.meet(1)
    benchmark(side.read, side.reference([7]), [3])
    side.close()


@pytest.mark.parametrize("remotes", [0, 1000])
def test_idle_step(benchmark: Any, remotes: int) -> None:
    side = ReaderSide(4, NUM_BLOCKS)
    side.meet(remotes)
    benchmark(side.reader.step)
    side.close()


def _median_us(call: Callable[[], object], repeat: int, inner: int = 1) -> float:
    return statistics.median(seconds_of(call, repeat, inner)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=300)
    repeat = parser.parse_args().repeat
    side = ReaderSide(NUM_REGIONS, NUM_BLOCKS)
    side.meet(1)
    rows: list[tuple[str, float]] = []
    for fragmented in (False, True):
        local, remote = block_lists(FULL_SCALE, fragmented=fragmented)
        reference = side.reference(remote)
        name = "fragmented" if fragmented else "contiguous"
        cost = _median_us(lambda r=reference, b=local: side.read(r, b), repeat)  # type: ignore[misc]
        rows.append((f"request, {NUM_REGIONS} regions x {REQUEST_BLOCKS} blocks, {name}", cost))
    side.close()
    for remotes in (0, 1000):
        side = ReaderSide(4, NUM_BLOCKS)
        side.meet(remotes)
        cost = _median_us(side.reader.step, repeat, 1000)
        rows.append((f"idle step, {remotes} remote engines", cost))
        side.close()
    ids = np.zeros(1, np.int32)
    raw = EmptyNixl()
    call_cost = _median_us(lambda: raw.check_xfer_state(ids), repeat, 1000)
    rows.append(("(one empty NIXL call)", call_cost))
    for name, cost in rows:
        print(f"{name:55s} {cost:9.2f} us")


if __name__ == "__main__":
    main()
