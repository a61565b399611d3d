"""Descriptor tables, descriptor ids and runs against what people do today.

pytest bench/bench_descs.py        every piece on its own (pytest-benchmark)
python bench/bench_descs.py        the ratios, both sides alternating in one run
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvnixl._descs import RegionIndex, dense_descs, paired_desc_ids, runs, strided_descs

NUM_REGIONS = 64  # 32 layers, K and V
NUM_BLOCKS = 2048  # per region
NUM_REQUEST_BLOCKS = 512
BLOCK_LEN = 16  # small, so that the registered buffer stays small; no cost here depends on it

Function = Callable[[], Any]


# --- building and wrapping tables ---------------------------------------------------------------


class Nixl:
    """One agent with one registered buffer of NUM_REGIONS * NUM_BLOCKS blocks."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent("bench-descs", nixl_agent_config(enable_prog_thread=False))
        self.buffer = np.zeros(NUM_REGIONS * NUM_BLOCKS * BLOCK_LEN, np.uint8)
        self.registration = self.agent.register_memory(
            [(self.buffer.ctypes.data, self.buffer.nbytes, 0, "")], "DRAM"
        )
        self.bases = [
            self.buffer.ctypes.data + r * NUM_BLOCKS * BLOCK_LEN for r in range(NUM_REGIONS)
        ]
        self.regions = [(base, BLOCK_LEN, BLOCK_LEN, NUM_BLOCKS, 0) for base in self.bases]

    def close(self) -> None:
        self.agent.deregister_memory(self.registration)

    def tuples(self) -> list[tuple[int, int, int]]:
        return [
            (base + b * BLOCK_LEN, BLOCK_LEN, 0) for base in self.bases for b in range(NUM_BLOCKS)
        ]

    def array(self) -> Any:
        table = np.empty((NUM_REGIONS, NUM_BLOCKS, 3), np.uint64)
        offsets = np.arange(NUM_BLOCKS, dtype=np.uint64) * np.uint64(BLOCK_LEN)
        table[:, :, 0] = np.array(self.bases, np.uint64)[:, None] + offsets
        table[:, :, 1] = BLOCK_LEN
        table[:, :, 2] = 0
        return table.reshape(-1, 3)

    def wrap(self, table: Any) -> Any:
        return self.agent.get_xfer_descs(table, "DRAM")

    def prepare(self, table: Any) -> None:
        self.agent.release_dlist_handle(
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, "DRAM")
        )

    # A strided table goes to prep_xfer_dlist as it is; there is nothing to wrap.
    def wrapping(self) -> dict[str, Function]:
        return {
            "tuples": lambda: self.wrap(self.tuples()),
            "Nx3 array": lambda: self.wrap(self.array()),
            "dense_descs": lambda: self.wrap(dense_descs(self.regions)),
            "strided_descs": lambda: strided_descs(self.regions),
        }

    def preparing(self) -> dict[str, Function]:
        return {
            "tuples": lambda: self.prepare(self.tuples()),
            "Nx3 array": lambda: self.prepare(self.array()),
            "dense_descs": lambda: self.prepare(dense_descs(self.regions)),
            "strided_descs": lambda: self.prepare(strided_descs(self.regions)),
        }


TABLES = ("tuples", "Nx3 array", "dense_descs", "strided_descs")


@pytest.fixture(scope="module")
def nixl() -> Iterator[Nixl]:
    opened = Nixl()
    yield opened
    opened.close()


@pytest.mark.nixl
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.benchmark(group="build and wrap 131072 blocks")
def test_build_and_wrap(benchmark: Any, nixl: Nixl, kind: str) -> None:
    benchmark(nixl.wrapping()[kind])


@pytest.mark.nixl
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.benchmark(group="build and prepare 131072 blocks")
def test_build_and_prepare(benchmark: Any, nixl: Nixl, kind: str) -> None:
    benchmark(nixl.preparing()[kind])


# --- descriptor ids and runs --------------------------------------------------------------------

_RNG = np.random.default_rng(1)
_RUN = np.arange(700, 700 + NUM_REQUEST_BLOCKS)
_SHUFFLED = _RNG.permutation(NUM_BLOCKS)[:NUM_REQUEST_BLOCKS]

# Destination and source block ids of a request.
ORDERS = {
    "ascending": (_RUN, _RUN + 100),
    "reversed": (_RUN[::-1], _RUN[::-1] + 100),
    "interleaved": (np.r_[_RUN[::2], _RUN[1::2]], np.r_[_RUN[::2], _RUN[1::2]] + 100),
    "shuffled": (_SHUFFLED, _RNG.permutation(_SHUFFLED)),
}

CARRIERS: dict[str, Callable[[Any], Any]] = {
    "int32 array": lambda ids: np.ascontiguousarray(ids, np.int32),
    "int64 array": lambda ids: np.ascontiguousarray(ids, np.int64),
    "list": lambda ids: ids.tolist(),
}


def numpy_ids(block_ids: Any, dtype: Any) -> Any:
    """The ids of one side by broadcasting, in no particular order."""
    region_ids = np.arange(NUM_REGIONS, dtype=dtype)
    block_ids = np.asarray(block_ids, dtype)
    return (region_ids[:, None] * dtype(NUM_BLOCKS) + block_ids[None, :]).ravel()


def region_indexes() -> tuple[RegionIndex, RegionIndex]:
    regions = [
        (r * NUM_BLOCKS * BLOCK_LEN, BLOCK_LEN, BLOCK_LEN, NUM_BLOCKS, 0)
        for r in range(NUM_REGIONS)
    ]
    return RegionIndex(regions), RegionIndex(regions)


def id_functions(order: str, carrier: str) -> dict[str, Function]:
    """Both sides' ids; ours also ordered and counted."""
    dst, src = region_indexes()
    dst_blocks, src_blocks = (CARRIERS[carrier](ids) for ids in ORDERS[order])
    return {
        "NumPy int64": lambda: (numpy_ids(dst_blocks, np.int64), numpy_ids(src_blocks, np.int64)),
        "NumPy int32": lambda: (numpy_ids(dst_blocks, np.int32), numpy_ids(src_blocks, np.int32)),
        "paired_desc_ids": lambda: paired_desc_ids(dst, [dst_blocks], src, [src_blocks]),
    }


@pytest.mark.parametrize("kind", ["NumPy int64", "NumPy int32", "paired_desc_ids"])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("order", ORDERS)
def test_ids(benchmark: Any, order: str, carrier: str, kind: str) -> None:
    benchmark.group = f"ids of 512 blocks x 64 regions: {order}, {carrier}"
    benchmark(id_functions(order, carrier)[kind])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.benchmark(group="runs over 32768 index pairs")
def test_runs(benchmark: Any, order: str) -> None:
    dst, src = (numpy_ids(ids, np.int32) for ids in ORDERS[order])
    benchmark(runs, dst, src)


@pytest.mark.parametrize("size", [32, 512])
@pytest.mark.benchmark(group="desc_ids, one side, 64 regions")
def test_desc_ids(benchmark: Any, size: int) -> None:
    index, _ = region_indexes()
    block_ids = [ORDERS["ascending"][0][:size].astype(np.int32)]
    benchmark(index.desc_ids, block_ids)


# --- ratios -------------------------------------------------------------------------------------


def median_seconds(functions: Sequence[Function], *, rounds: int, calls: int) -> list[float]:
    """The median time per call of each, measured in turns."""
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for times, function in zip(samples, functions, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
    return [statistics.median(times) for times in samples]


def table_ratios(functions: dict[str, Function], *, rounds: int = 7) -> dict[str, float]:
    """Seconds per kind of table."""
    return dict(
        zip(
            functions, median_seconds(list(functions.values()), rounds=rounds, calls=1), strict=True
        )
    )


def print_ratios() -> None:
    """Prints how many times faster kvnixl is, with the figure to reach beside it."""
    nixl = Nixl()
    try:
        for title, functions in (
            ("build and wrap", nixl.wrapping()),
            ("build and prepare", nixl.preparing()),
        ):
            seconds = table_ratios(functions)
            ours = seconds["strided_descs"]
            print(f"{title} {NUM_REGIONS * NUM_BLOCKS} blocks in {NUM_REGIONS} regions")
            for kind, spent in seconds.items():
                print(f"  {kind:15} {spent * 1e6:10.1f} us   {spent / ours:8.1f} x strided_descs")
    finally:
        nixl.close()
    print("  to reach, build and wrap: tuples >= 50 x, Nx3 array >= 3 x\n")

    print(f"ids of {NUM_REQUEST_BLOCKS} blocks x {NUM_REGIONS} regions, both sides; ours with runs")
    print(
        f"  {'order':12} {'given as':12} {'ours':>9} {'NumPy int32':>12} {'NumPy int64':>12}"
        f" {'ratios':>12}  descriptors"
    )
    for order in ORDERS:
        for carrier in CARRIERS:
            functions = id_functions(order, carrier)
            int64, int32, ours = median_seconds(list(functions.values()), rounds=15, calls=100)
            before = runs_in_given_order(order) * NUM_REGIONS
            after = functions["paired_desc_ids"]()[2]
            print(
                f"  {order:12} {carrier:12} {ours * 1e6:6.1f} us {int32 * 1e6:9.1f} us"
                f" {int64 * 1e6:9.1f} us {int32 / ours:6.2f}{int64 / ours:6.2f}"
                f"  {before} -> {after}"
            )
    print("  to reach: ratios >= 1; reversed and interleaved: a tenth of the descriptors")


def runs_in_given_order(order: str) -> int:
    dst, src = ORDERS[order]
    return 1 + int(np.count_nonzero((np.diff(dst) != 1) | (np.diff(src) != 1)))


if __name__ == "__main__":
    print_ratios()
