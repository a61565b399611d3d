"""Lease slots against the same protocol in plain Python, and against a bare READ over real NIXL.

pytest bench/bench_leases.py       every piece on its own (pytest-benchmark)
python bench/bench_leases.py       the ratios, both sides alternating in one run
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvnixl._fence import memory_fence
from kvnixl.leases import (
    LEASE_SLOT_BYTES,
    LeaseSlotAllocator,
    LeaseVerifier,
    ProducerLeaseSlots,
    lease_slot_descs,
)

sys.path.insert(0, str(Path(__file__).parent))
from plain_leases import PlainAllocator, PlainSlots, PlainVerifier

Function = Callable[[], Any]
SHAPES = {"256 requests x 8 ranks": (256, 8), "4096 requests x 1 rank": (4096, 1)}
TO_REACH = {"256 requests x 8 ranks": 6.0, "4096 requests x 1 rank": 4.0}
NUM_NIXL_READS = 3000


# --- a whole lease life -------------------------------------------------------------------------


class StubAgent:
    """NIXL's calls at next to no cost: a READ copies the words when its state is asked for."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots
        self.cells: Any = None

    def make_prepped_xfer(
        self, operation: str, local: Any, cells: Any, remote: Any, slots: Any
    ) -> tuple[Any, Any]:
        return cells, slots

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        cells, slots = handle
        self.cells[cells] = self.slots[slots]
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def release_dlist_handle(self, handle: Any) -> None:
        pass


class Life:
    """Acquire, arm, publish, check, verify and release ``num_requests`` leases."""

    def __init__(self, num_requests: int, num_ranks: int, *, plain: bool) -> None:
        self.req_ids = [f"request-{i}" for i in range(num_requests)]
        self.ranks = range(num_ranks)
        num_cells = max(4096, num_requests * num_ranks)
        self.allocator: Any
        self.slots: Any
        self.verifier: Any
        if plain:
            self.allocator, self.slots = PlainAllocator(num_requests), PlainSlots(num_requests)
            stub = StubAgent(self.slots.words)
            self.verifier = PlainVerifier(stub, num_cells)
            self.check = self.check_one_by_one
        else:
            self.allocator = LeaseSlotAllocator(num_requests)
            self.slots = ProducerLeaseSlots(num_requests)
            stub = StubAgent(self.slots.words)
            self.verifier = LeaseVerifier(stub, num_cells)
            self.check = self.check_in_one_call
        stub.cells = self.verifier.words
        for rank in self.ranks:
            self.verifier.add_remote("engine", rank, rank)

    def check_one_by_one(self, leases: dict[str, tuple[int, int]]) -> None:
        for req_id, (slot, nonce) in leases.items():
            for rank in self.ranks:
                self.verifier.add_check(req_id, "engine", rank, slot, nonce)

    def check_in_one_call(self, leases: dict[str, tuple[int, int]]) -> None:
        for req_id, (slot, nonce) in leases.items():
            self.verifier.add_checks(req_id, "engine", self.ranks, slot, nonce)

    def apply(self) -> dict[str, tuple[int, int]]:
        to_arm, to_clear = self.allocator.take_updates()
        self.slots.update(to_clear, to_arm)
        self.slots.publish()
        return to_arm  # type: ignore[no-any-return]

    def __call__(self) -> None:
        for req_id in self.req_ids:
            self.allocator.acquire(req_id)
        self.check(self.apply())
        self.verifier.step(self.req_ids)
        verified, failed = self.verifier.step()
        assert len(verified) == len(self.req_ids)
        assert not failed
        for req_id in self.req_ids:
            self.allocator.release(req_id, clear=True)
        self.apply()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plain", [True, False], ids=["plain Python", "kvnixl"])
def test_lease_life(benchmark: Any, shape: str, plain: bool) -> None:
    benchmark.group = f"a whole lease life, {shape}"
    benchmark(Life(*SHAPES[shape], plain=plain))


# --- idle steps and fences ----------------------------------------------------------------------


def idle_verifier(num_leases: int) -> LeaseVerifier:
    """A verifier with so many requests whose block READs are still under way."""
    verifier = LeaseVerifier(StubAgent(None), 4096)
    verifier.add_remote("engine", 0, 0)
    for i in range(num_leases):
        verifier.add_check(f"request-{i}", "engine", 0, i, 1 + i)
    return verifier


@pytest.mark.parametrize("num_leases", [0, 100_000])
@pytest.mark.benchmark(group="idle step")
def test_idle_step(benchmark: Any, num_leases: int) -> None:
    benchmark(idle_verifier(num_leases).step)


@pytest.mark.benchmark(group="memory_fence")
def test_memory_fence(benchmark: Any) -> None:
    benchmark(memory_fence)


# --- real NIXL ----------------------------------------------------------------------------------


def own_slots(pipe: Connection) -> None:
    from kvnixl.agent import Agent

    agent = Agent.open("bench-owner", num_threads=1)
    slots = ProducerLeaseSlots(64)
    agent.register_memory([(slots.base_addr, 64 * LEASE_SLOT_BYTES, 0)])
    slots.update((), {f"r{i}": (i, 1000 + i) for i in range(64)})
    slots.publish()
    pipe.send((agent.get_agent_metadata(), slots.base_addr))
    pipe.recv()
    agent.close()


class NixlPair:
    """An owner process with 64 armed slots, and a reader here with NIXL's own agent."""

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.owner = context.Process(target=own_slots, args=(theirs,), daemon=True)
        self.owner.start()
        if not self.pipe.poll(60):
            self.owner.kill()
            raise TimeoutError("the owner process did not start")
        metadata, base_addr = self.pipe.recv()

        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent("bench-reader", nixl_agent_config(num_threads=1))
        self.peer = self.agent.add_remote_agent(metadata)
        self.agent.make_connection(self.peer)
        descs = lease_slot_descs(base_addr, 64)
        self.remote = self.agent.prep_xfer_dlist(self.peer, descs, "DRAM")
        self.verifier = LeaseVerifier(self.agent, 64)
        self.verifier.add_remote("engine", 0, self.remote, 64)
        self.index = np.array([0], np.int32)
        self.bare()
        self.verify()

    def bare(self) -> None:
        """One 8-byte READ, from making it to releasing it."""
        agent = self.agent
        handle = agent.make_prepped_xfer(
            "READ", self.verifier.local_handle, self.index, self.remote, self.index
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        assert state == "DONE"

    def verify(self) -> None:
        """What verification adds to a request: from its last block READ to the verdict."""
        verifier = self.verifier
        verifier.add_check("r3", "engine", 0, 3, 1003)
        verified, failed = verifier.step(("r3",))
        while not verified:
            assert not failed
            verified, failed = verifier.step()

    def close(self) -> None:
        self.verifier.shutdown()
        self.agent.remove_remote_agent(self.peer)
        self.pipe.send("stop")
        self.owner.join(10)
        if self.owner.is_alive():
            self.owner.kill()


@pytest.fixture(scope="module")
def nixl_pair() -> Iterator[NixlPair]:
    pair = NixlPair()
    yield pair
    pair.close()


@pytest.mark.nixl
@pytest.mark.parametrize("kind", ["bare", "verify"])
@pytest.mark.benchmark(group="one request over NIXL: a bare 8-byte READ, a verification")
def test_one_request(benchmark: Any, nixl_pair: NixlPair, kind: str) -> None:
    benchmark(getattr(nixl_pair, kind))


# --- ratios -------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds per call, of each function called in turn with the others."""

    medians: list[float]
    best: list[float]


def in_turns(*functions: Function, rounds: int, calls: int = 1) -> Times:
    samples: list[list[float]] = [[] for _ in functions]
    gc.collect()
    for _ in range(rounds):
        for times, function in zip(samples, functions, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
    return Times([statistics.median(s) for s in samples], [min(s) for s in samples])


def print_ratios() -> None:
    print(f"{'':42} {'kvnixl':>10} {'baseline':>10} {'ratio':>7}   to reach")
    for shape, (num_requests, num_ranks) in SHAPES.items():
        ours = Life(num_requests, num_ranks, plain=False)
        plain = Life(num_requests, num_ranks, plain=True)
        times = in_turns(ours, plain, rounds=30)
        us = [t / num_requests * 1e6 for t in times.medians]
        print(
            f"{'lease life, ' + shape:42} {us[0]:7.2f} us {us[1]:7.2f} us {us[1] / us[0]:6.1f}x"
            f"   >= {TO_REACH[shape]:.0f}x, plain Python, a request"
        )

    few, many = idle_verifier(0), idle_verifier(100_000)
    times = in_turns(few.step, many.step, memory_fence, rounds=60, calls=5000)
    for i, num_leases in enumerate((0, 100_000)):
        print(
            f"{f'idle step, {num_leases} leases':42} {times.medians[i] * 1e6:7.3f} us"
            f" {'':18}   <= 0.2 us (best {times.best[i] * 1e6:.3f})"
        )
    print(
        f"{'memory_fence()':42} {times.medians[2] * 1e6:7.3f} us {'':18}   <= 0.1 us"
        f" (best {times.best[2] * 1e6:.3f})"
    )

    pair = NixlPair()
    try:
        times = in_turns(pair.verify, pair.bare, rounds=NUM_NIXL_READS)
    finally:
        pair.close()
    us = [t * 1e6 for t in times.medians]
    print(
        f"{'verification over NIXL, one request':42} {us[0]:7.2f} us {us[1]:7.2f} us"
        f" {us[0] / us[1]:6.2f}x   <= 1.5x, a bare 8-byte READ"
    )


if __name__ == "__main__":
    print_ratios()
