"""What an agent costs while nothing happens, and what its calls cost.

pytest bench/bench_agent.py      the calls (pytest-benchmark)
python bench/bench_agent.py      idle cost in cores and READ latency, poll delay off and on
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from kvnixl._descs import strided_descs
from kvnixl.agent import DEFAULT_POLL_DELAY_US, LOCAL_SIDE, Agent
from kvnixl.bench.processes import Child

NUM_BLOCKS = 64
BLOCK_LEN = 8

Address = tuple[bytes, int]


class Node:
    """An agent with a few blocks. Made here or in a process of its own."""

    def __init__(self, poll_delay_us: int, check_stop: Callable[[], None] | None = None) -> None:
        self.agent = Agent.open(poll_delay_us=poll_delay_us)
        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_LEN), np.uint8)
        self.agent.register_memory([(self.base, self.blocks.nbytes, 0)])
        self.local_list = self.agent.prep_xfer_dlist(LOCAL_SIDE, self.descs(self.base))

    @property
    def base(self) -> int:
        return int(self.blocks.ctypes.data)

    @staticmethod
    def descs(base: int) -> Any:
        return strided_descs([(base, BLOCK_LEN, BLOCK_LEN, NUM_BLOCKS, 0)])

    def address(self) -> Address:
        return self.agent.get_agent_metadata(), self.base

    def connect(self, address: Address) -> None:
        metadata, base = address
        remote = self.agent.add_remote_agent(metadata)
        self.remote_list = self.agent.prep_xfer_dlist(remote, self.descs(base))
        self.read()

    def read(self) -> None:
        """One READ of 8 bytes."""
        index = np.zeros(1, np.int32)
        xfer = self.agent.make_prepped_xfer("READ", self.local_list, index, self.remote_list, index)
        state = xfer.post()
        while state != "DONE":
            assert state != "ERR"
            state = xfer.state()
        xfer.close()

    def latency(self, count: int) -> float:
        """Median seconds of a READ, with a pause before each so that the peer has gone to sleep."""
        samples = []
        for _ in range(count):
            time.sleep(0.005)
            start = time.perf_counter()
            self.read()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    def idle_cores(self, seconds: float) -> float:
        """Processor time that this process uses while it does nothing, in cores."""
        before, start = _processor_seconds(), time.monotonic()
        time.sleep(seconds)
        return (_processor_seconds() - before) / (time.monotonic() - start)

    def close(self) -> None:
        self.agent.close()


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def node_process(poll_delay_us: int) -> Iterator[Child]:
    child = Child("peer", partial(Node, poll_delay_us))
    try:
        child.wait_ready()
        yield child
    finally:
        child.end()


# --- pytest-benchmark -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    opened = Node(DEFAULT_POLL_DELAY_US)
    with node_process(DEFAULT_POLL_DELAY_US) as peer:
        opened.connect(peer.call("address"))
        yield opened
        opened.close()


@pytest.mark.nixl
@pytest.mark.benchmark(group="agent calls")
def test_make_and_close(benchmark: Any, node: Node) -> None:
    index = np.arange(NUM_BLOCKS, dtype=np.int32)

    def run() -> None:
        node.agent.make_prepped_xfer(
            "READ", node.local_list, index, node.remote_list, index
        ).close()

    benchmark(run)


@pytest.mark.nixl
@pytest.mark.benchmark(group="agent calls")
def test_make_and_close_without_the_agent(benchmark: Any, node: Node) -> None:
    index = np.arange(NUM_BLOCKS, dtype=np.int32)
    nixl, local, remote = node.agent.raw, node.local_list.handle, node.remote_list.handle
    benchmark(
        lambda: nixl.release_xfer_handle(
            nixl.make_prepped_xfer("READ", local, index, remote, index)
        )
    )


@pytest.mark.nixl
@pytest.mark.benchmark(group="agent calls")
def test_read_8_bytes(benchmark: Any, node: Node) -> None:
    benchmark(node.read)


@pytest.mark.nixl
@pytest.mark.benchmark(group="agent calls")
def test_new_notifications(benchmark: Any, node: Node) -> None:
    benchmark(node.agent.get_new_notifs)


# --- ratios ---------------------------------------------------------------------------------------


def print_idle_cost(rounds: int = 3, seconds: float = 2.0, reads: int = 100) -> None:
    """Both agents of a pair live in processes of their own."""
    print(f"{'poll delay':>12} {'idle cost of one agent':>24} {'READ of 8 bytes, peer idle':>28}")
    for delay in (0, DEFAULT_POLL_DELAY_US):
        with node_process(delay) as owner, node_process(delay) as reader:
            reader.call("connect", owner.call("address"))
            cores = statistics.median(owner.call("idle_cores", seconds) for _ in range(rounds))
            latency = statistics.median(reader.call("latency", reads) for _ in range(rounds))
        print(f"{delay:9} us {cores:18.3f} cores {latency * 1e6:25.0f} us")
    print(
        "to reach: under 0.05 cores with the delay, which is the default; without it the progress"
    )
    print("thread spins and takes what other processes leave of a core")


if __name__ == "__main__":
    print_idle_cost()
