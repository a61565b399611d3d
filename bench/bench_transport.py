"""Block transfers between two processes over real NIXL.

pytest bench/bench_transport.py      every piece on its own (pytest-benchmark)
python bench/bench_transport.py      the ratios, both sides alternating in one run
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import pytest

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from kvnixl._descs import RegionIndex, paired_desc_ids, strided_descs
from kvnixl.agent import LOCAL_SIDE, Agent, Transfer
from kvnixl.bench.processes import Child
from kvnixl.transport import NixlTransport

MIB = 1024 * 1024
PEER = "peer"

Address = tuple[bytes, int, int, int]


class Peer:
    """A transport over blocks of its own, in another process."""

    def __init__(self, check_stop: Callable[[], None]) -> None:
        self.transport: NixlTransport | None = None

    def open(self, num_blocks: int, block_len: int) -> Address:
        self.close()
        self.blocks = np.zeros((num_blocks, block_len), np.uint8)
        self.blocks[:] = np.arange(num_blocks, dtype=np.uint8)[:, None]
        name = f"bench-{os.getpid()}-{num_blocks}-{block_len}"
        self.transport = transport = NixlTransport(name, memoryview(self.blocks))
        return (
            transport.get_agent_metadata(),
            transport.base_addr,
            transport.num_blocks,
            transport.block_len,
        )

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


@contextlib.contextmanager
def peer_process() -> Iterator[Child]:
    child = Child("peer", Peer)
    try:
        child.wait_ready()
        yield child
    finally:
        child.end()


class Pair:
    """This process and a peer, with regions of the same shape, ready to read from it."""

    def __init__(self, child: Child, num_blocks: int, block_len: int) -> None:
        self.agent = Agent.open()
        self.blocks = np.zeros((num_blocks, block_len), np.uint8)
        self.blocks[:] = 255
        self.transport = NixlTransport(self.agent.name, memoryview(self.blocks), agent=self.agent)
        address: Address = child.call("open", num_blocks, block_len)
        self.transport.add_remote_peer(PEER, *address)
        # The same regions once more, for transfers without the transport.
        metadata, self.remote_base, _, _ = address
        own = (int(self.blocks.ctypes.data), block_len, block_len, num_blocks, 0)
        theirs = (self.remote_base, *own[1:])
        self.own, self.theirs = RegionIndex([own]), RegionIndex([theirs])
        self.remote = self.agent.add_remote_agent(metadata)
        self.local_list = self.agent.prep_xfer_dlist(LOCAL_SIDE, strided_descs([own]))
        self.remote_list = self.agent.prep_xfer_dlist(self.remote, strided_descs([theirs]))
        self.read([0], [0])

    def close(self) -> None:
        self.transport.close()
        self.agent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read(self, local: Sequence[int], remote: Sequence[int]) -> None:
        """What a user of the transport calls."""
        transport = self.transport
        transfer_id = transport.read_blocks(PEER, local, remote)
        assert transfer_id is not None
        while True:
            done, failed = transport.poll()
            if done:
                return
            assert not failed

    def read_in_given_order(self, local: Any, remote: Any) -> int:
        """The same without `runs`; how many descriptors NIXL was left with."""
        return self._finish(
            self.agent.make_prepped_xfer("READ", self.local_list, local, self.remote_list, remote)
        )

    def descs_with_runs(self, local: Any, remote: Any) -> int:
        dst, src, computed = paired_desc_ids(self.own, [local], self.theirs, [remote])
        left = self._finish(
            self.agent.make_prepped_xfer("READ", self.local_list, dst, self.remote_list, src)
        )
        assert left == computed
        return left

    def _finish(self, xfer: Transfer) -> int:
        state = xfer.post()
        while state != "DONE":
            assert state != "ERR"
            state = xfer.state()
        telemetry = xfer.telemetry()
        xfer.close()
        assert telemetry is not None
        return telemetry.desc_count

    def direct(self, num_bytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """A transfer of the first bytes as one descriptor, written against NIXL alone, and what
        gives its prepared lists back."""
        nixl = self.agent.raw
        local, remote = (
            nixl.prep_xfer_dlist(name, nixl.get_xfer_descs([(base, num_bytes, 0)], "DRAM"))
            for name, base in (
                ("NIXL_INIT_AGENT", int(self.blocks.ctypes.data)),
                (self.remote.name, self.remote_base),
            )
        )
        index = np.zeros(1, np.int32)

        def run() -> None:
            handle = nixl.make_prepped_xfer("READ", local, index, remote, index)
            state = nixl.transfer(handle)
            while state != "DONE":
                assert state != "ERR"
                state = nixl.check_xfer_state(handle)
            nixl.release_xfer_handle(handle)

        def release() -> None:
            nixl.release_dlist_handle(local)
            nixl.release_dlist_handle(remote)

        return run, release


def orders(num_blocks: int) -> dict[str, Any]:
    """Block lists that a free list gives; the same on both sides, shifted by one block."""
    run = np.arange(num_blocks, dtype=np.int32)
    return {"reversed": run[::-1].copy(), "interleaved": np.r_[run[::2], run[1::2]]}


# --- pytest-benchmark -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with peer_process() as child, Pair(child, 1024, 4096) as opened:
        yield opened


@pytest.mark.nixl
@pytest.mark.parametrize("count", [1, 64, 512])
@pytest.mark.benchmark(group="read ascending blocks of 4 KiB through the transport")
def test_read(benchmark: Any, pair: Pair, count: int) -> None:
    blocks = list(range(count))
    benchmark(pair.read, blocks, blocks)


@pytest.mark.nixl
@pytest.mark.parametrize("with_runs", [True, False])
@pytest.mark.parametrize("order", ["reversed", "interleaved"])
@pytest.mark.benchmark(group="read 512 blocks of 4 KiB that can be merged once ordered")
def test_read_out_of_order(benchmark: Any, pair: Pair, order: str, with_runs: bool) -> None:
    blocks = orders(512)[order]
    benchmark(pair.read if with_runs else pair.read_in_given_order, blocks, blocks + 1)


@pytest.mark.nixl
@pytest.mark.benchmark(group="poll")
def test_poll_of_nothing(benchmark: Any, pair: Pair) -> None:
    benchmark(pair.transport.poll)


# --- ratios ---------------------------------------------------------------------------------------


class Ratio:
    """Two sides that take turns at going first. ``first`` and ``second`` are the medians of their
    seconds, ``value`` is the median over the turns of second by first: what slows the machine down
    for a while slows both sides of a turn."""

    def __init__(self, first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> None:
        sides = (first, second)
        times: tuple[list[float], list[float]] = ([], [])
        for side in sides:
            side()
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                start = time.perf_counter()
                sides[which]()
                times[which].append(time.perf_counter() - start)
        self.first, self.second = (statistics.median(side) for side in times)
        self.value = statistics.median(b / a for a, b in zip(*times, strict=True))


def print_runs(child: Child, rounds: int = 100) -> None:
    print("reading 512 blocks whose list is a run on both sides: with `runs`, and in list order")
    print(
        f"  {'block':>8} {'order':12} {'with':>10} {'without':>10} {'faster':>8}"
        f" {'descriptors':>14}"
    )
    for block_len in (1024, 4096, 16384, 65536):
        with Pair(child, 600, block_len) as pair:
            for order, local in orders(512).items():
                remote = local + 1
                ratio = Ratio(
                    partial(pair.read, local, remote),
                    partial(pair.read_in_given_order, local, remote),
                    rounds,
                )
                before = pair.read_in_given_order(local, remote)
                after = pair.descs_with_runs(local, remote)
                print(
                    f"  {block_len // 1024:4} KiB {order:12} {ratio.first * 1e6:7.0f} us"
                    f" {ratio.second * 1e6:7.0f} us {ratio.value:6.1f} x {before:6} -> {after}"
                )
    print("  to reach: at least 3 times faster, at most a tenth of the descriptors; the larger the")
    print("  blocks, the more of the time is the copy itself, which is the same on both sides\n")


def print_large(child: Child, rounds: int = 100) -> None:
    print(
        "reading ascending blocks of 64 KiB: through the transport, and as one descriptor by NIXL"
    )
    print(f"  {'size':>8} {'transport':>12} {'NIXL alone':>12} {'transport/NIXL':>16}")
    with Pair(child, 256 * MIB // 65536, 65536) as pair:
        for size in (16 * MIB, 64 * MIB, 256 * MIB):
            blocks = list(range(size // 65536))
            direct, release = pair.direct(size)
            through_transport = partial(pair.read, blocks, blocks)
            ratio = Ratio(direct, through_transport, max(30, rounds * 64 * MIB // size))
            release()
            print(
                f"  {size // MIB:4} MiB {ratio.second * 1e3:9.2f} ms {ratio.first * 1e3:9.2f} ms"
                f" {ratio.value:15.3f}"
            )
    print("  to reach: at most 1.05")


if __name__ == "__main__":
    with peer_process() as child:
        print_runs(child)
        print_large(child)
