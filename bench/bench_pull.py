"""Many requests at once through producer and reader, between two processes over real NIXL.

pytest bench/bench_pull.py     the rate of each case (pytest-benchmark)
python bench/bench_pull.py     ratios to one plain NIXL transfer of the same bytes

The plain transfer has one descriptor per region, prepared ahead, which is the best that NIXL does.
All sides take turns in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

import numpy as np
import pytest

from kvnixl.agent import Agent, wait_until
from kvnixl.bench.processes import Child
from kvnixl.compat import CompatibilityCheck
from kvnixl.handshake import HandshakeClient, HandshakeServer
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.outcomes import ReadOutcome
from kvnixl.producer import EmbeddedProducer
from kvnixl.reader import Reader

MIB = 1 << 20
REQUESTS = 64
REQUEST_BYTES = 4 * MIB
TIMEOUT_S = 60.0
COMPAT = CompatibilityCheck({"model": "bench"})


class Shape(NamedTuple):
    regions: int
    block_len: int

    @property
    def request_blocks(self) -> int:
        return REQUEST_BYTES // (self.regions * self.block_len)

    @property
    def num_blocks(self) -> int:
        return REQUESTS * self.request_blocks


SHAPES = {
    "32 regions of 16 KiB blocks": Shape(32, 16384),
    "32 regions of 64 KiB blocks": Shape(32, 65536),
    "one region of 512 KiB blocks": Shape(1, 524288),
}
ORDERS = ("ascending", "random")


def allocate(shape: Shape, fill: int) -> tuple[Any, CacheLayout]:
    memory = np.full((shape.regions, shape.num_blocks, shape.block_len), fill, np.uint8)
    base, length = int(memory.ctypes.data), shape.num_blocks * shape.block_len
    layout = layout_from_addresses(
        [base + region * length for region in range(shape.regions)],
        block_len=shape.block_len,
        num_blocks=shape.num_blocks,
        block_size=16,
        num_kv_heads=1,
    )
    return memory, layout


def block_lists(shape: Shape, order: str, seed: int) -> list[list[int]]:
    """The blocks of each request."""
    ids = np.arange(shape.num_blocks)
    if order == "random":
        np.random.default_rng(seed).shuffle(ids)
    lists: list[list[int]] = ids.reshape(REQUESTS, -1).tolist()
    return lists


class PrefillProcess:
    """The producer. Its NIXL thread serves READs; it steps when it is asked to."""

    def __init__(self, check_stop: Callable[[], None]) -> None:
        self.agent: Agent | None = None

    def open(self, shape: Shape) -> tuple[bytes, int]:
        self.close()
        self.agent = Agent.open()
        self.memory, layout = allocate(shape, 7)
        self.producer = EmbeddedProducer(
            self.agent, layout, compat=COMPAT, server=HandshakeServer("127.0.0.1", 0)
        )
        return self.agent.get_agent_metadata(), layout.regions[0].base

    def offer(self, first: int, lists: list[list[int]]) -> list[dict[str, Any]]:
        return [
            self.producer.offer(str(first + i), [ids], num_tokens=16 * len(ids))
            for i, ids in enumerate(lists)
        ]

    def settle(self) -> list[str]:
        """Wait until all offers ended; their outcomes."""
        ended: list[str] = []

        def all_ended() -> bool:
            ended.extend(outcome.value for _, outcome in self.producer.step())
            return not len(self.producer)

        wait_until(all_ended, TIMEOUT_S)
        return ended

    def close(self) -> None:
        if self.agent is not None:
            self.producer.close()
            self.agent.close()
            self.agent = None


class Pair:
    """A reader in this process, and a producer that it has met."""

    def __init__(self, child: Child, shape: Shape) -> None:
        self.child = child
        self.shape = shape
        metadata, remote_base = child.call("open", shape)
        self.agent = Agent.open()
        self.memory, layout = allocate(shape, 0)
        self.handshakes = HandshakeClient(COMPAT)
        self.reader = Reader(
            self.agent,
            layout,
            engine_id="decode",
            handshakes=self.handshakes,
            lease_verification="require",
        )
        self._next = 0
        remote = self.agent.add_remote_agent(metadata)
        self._nixl = self.agent.raw
        bases = {"NIXL_INIT_AGENT": layout.regions[0].base, remote.name: remote_base}
        self._whole = [self._prepare(*side, pieces=1) for side in bases.items()]
        self._cut = [self._prepare(*side, pieces=REQUESTS) for side in bases.items()]
        for order in ORDERS:
            self.requests(order)
            assert (self.memory == 7).all()
            self.memory[:] = 0

    def requests(self, order: str) -> float:
        """Seconds from the first fetch to the last outcome of all requests."""
        first, self._next = self._next, self._next + REQUESTS
        references = self.child.call("offer", first, block_lists(self.shape, order, first))
        local = block_lists(self.shape, order, first + 1)
        outcomes: list[ReadOutcome] = []
        reader = self.reader
        start = time.perf_counter()
        for i, reference in enumerate(references):
            reader.fetch(str(first + i), reference, [local[i]], num_computed_blocks=[0])
        while len(outcomes) < REQUESTS:
            outcomes += reader.step()
        seconds = time.perf_counter() - start
        assert all(outcome.verified for outcome in outcomes), outcomes
        ended = self.child.call("settle")
        assert ended == ["read"] * REQUESTS
        return seconds

    def _prepare(self, agent_name: str, base: int, *, pieces: int) -> Any:
        """A prepared list of every region, in so many pieces."""
        length = self.shape.num_blocks * self.shape.block_len // pieces
        rows = [(base + i * length, length, 0) for i in range(self.shape.regions * pieces)]
        return self._nixl.prep_xfer_dlist(agent_name, self._nixl.get_xfer_descs(rows, "DRAM"))

    def plain(self) -> float:
        """Seconds of one transfer of everything, written against NIXL alone."""
        return self._plain(self._whole, [np.arange(self.shape.regions, dtype=np.int32)])

    def plain_requests(self) -> float:
        """The same in a transfer a request, each with one descriptor per region."""
        firsts = np.arange(self.shape.regions, dtype=np.int32) * REQUESTS
        return self._plain(self._cut, [firsts + i for i in range(REQUESTS)])

    def _plain(self, sides: list[Any], requests: list[Any]) -> float:
        nixl, (local, remote) = self._nixl, sides
        start = time.perf_counter()
        handles = [nixl.make_prepped_xfer("READ", local, ids, remote, ids) for ids in requests]
        states = {handle: nixl.transfer(handle) for handle in handles}
        while states:
            for handle, state in list(states.items()):
                if state == "DONE":
                    del states[handle]
                    nixl.release_xfer_handle(handle)
                else:
                    assert state != "ERR"
                    states[handle] = nixl.check_xfer_state(handle)
        return time.perf_counter() - start

    def close(self) -> None:
        for side in self._whole + self._cut:
            self._nixl.release_dlist_handle(side)
        wait_until(lambda: self.reader.close() == 0, TIMEOUT_S)
        self.handshakes.close()
        self.agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def prefill_process() -> Iterator[Child]:
    child = Child("producer", PrefillProcess)
    try:
        child.wait_ready()
        yield child
    finally:
        child.end()


# --- pytest-benchmark -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with prefill_process() as child, Pair(child, SHAPES[request.param]) as opened:
        yield opened


@pytest.mark.nixl
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.benchmark(group="64 requests of 4 MiB at once")
def test_requests(benchmark: Any, pair: Pair, order: str) -> None:
    benchmark.pedantic(pair.requests, (order,), rounds=5)


@pytest.mark.nixl
@pytest.mark.benchmark(group="64 requests of 4 MiB at once")
def test_plain(benchmark: Any, pair: Pair) -> None:
    benchmark.pedantic(pair.plain, rounds=5)


# --- ratios ---------------------------------------------------------------------------------------


def print_ratios(rounds: int) -> None:
    total = REQUESTS * REQUEST_BYTES
    print(
        f"{REQUESTS} requests of {REQUEST_BYTES // MIB} MiB at once, verified; NIXL alone with all"
    )
    print("their bytes in one transfer, and in one transfer a request; medians")
    print(
        f"  {'cache':30} {'blocks':10} {'requests':>11} {'one':>11} {'one each':>11}"
        f" {'of one':>8} {'of one each':>12}"
    )
    with prefill_process() as child:
        for name, shape in SHAPES.items():
            with Pair(child, shape) as pair:
                for order in ORDERS:
                    sides: list[Callable[[], float]] = [
                        partial(pair.requests, order),
                        pair.plain,
                        pair.plain_requests,
                    ]
                    turns = []
                    for number in range(rounds):
                        seconds = [0.0] * 3
                        for which in ((0, 1, 2), (2, 1, 0), (1, 0, 2))[number % 3]:
                            seconds[which] = sides[which]()
                        turns.append(seconds)
                    rates = [
                        total / statistics.median(side) / 1e9 for side in zip(*turns, strict=True)
                    ]
                    ratios = [
                        statistics.median(turn[i] / turn[0] for turn in turns) for i in (1, 2)
                    ]
                    print(
                        f"  {name:30} {order:10}"
                        + "".join(f" {rate:6.2f} GB/s" for rate in rates)
                        + f" {ratios[0]:8.1%} {ratios[1]:12.1%}"
                    )
    print("  to reach: 95 % of one, where the blocks of a request follow each other")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns per line (%(default)s)")
    print_ratios(parser.parse_args().rounds)
