"""What the reader itself costs: everything but NIXL, which is replaced by calls that only return.

pytest bench/bench_reader.py     each figure (pytest-benchmark)
python bench/bench_reader.py     the figures in one table, with the cost of the empty NIXL calls

A request has 160 regions of 512 blocks: `fetch`, posting, one poll, verification, its outcome.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from kvnixl.agent import Agent
from kvnixl.handshake import HandshakeDone, HandshakeOutcome, PeerAddress, Rank
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.leases import ProducerLeaseSlots
from kvnixl.metadata import KvNixlExtension, LeaseSlotRegion, NixlAgentMetadata, format_lease
from kvnixl.reader import Reader
from kvnixl.wire import OpenedHandshake

NUM_REGIONS = 160
NUM_BLOCKS = 2048
REQUEST_BLOCKS = 512
BLOCK_LEN = 4096
NONCE = 0x1234_5678
LOCAL_BASE, REMOTE_BASE = 1 << 40, 1 << 44


class EmptyNixl:
    """NIXL's calls without NIXL. Only 8-byte READs (lease slots) move anything."""

    name = "bench"
    release_is_final = True

    def __init__(self) -> None:
        self._remotes = 0

    def register_memory(self, reg_list: Any, mem_type: str | None = None) -> Any:
        return reg_list

    def deregister_memory(self, dereg_list: Any) -> None:
        pass

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, mem_type: str | None = None) -> Any:
        return xfer_list

    def release_dlist_handle(self, handle: Any) -> None:
        pass

    def make_prepped_xfer(self, *arguments: Any, notif_msg: bytes = b"") -> Any:
        return arguments

    def transfer(self, handle: Any) -> str:
        _, local, local_ids, remote, remote_ids = handle
        if local.shape[1] != 3:
            return "PROC"
        for to, source in zip(local[local_ids, 0], remote[remote_ids, 0], strict=True):
            ctypes.memmove(int(to), int(source), 8)
        return "DONE"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b""

    def add_remote_agent(self, metadata: bytes) -> str:
        self._remotes += 1
        return f"remote-{self._remotes}"

    def remove_remote_agent(self, agent: str) -> None:
        pass

    def make_connection(self, agent: str) -> None:
        pass

    def send_notif(self, agent: str, message: bytes) -> None:
        pass


class Answers:
    """A handshake client that has every answer at once."""

    allowed = None

    def __init__(self, metadata: Callable[[str], NixlAgentMetadata]) -> None:
        self._metadata = metadata
        self._started: list[HandshakeOutcome] = []

    def start(
        self,
        engine_id: str,
        host: str,
        port: int,
        ranks: Iterable[Rank] = ((0, 0),),
        *,
        timeout: float | None = None,
    ) -> bool:
        opened = {rank: OpenedHandshake(self._metadata(engine_id), 0.0, "") for rank in ranks}
        peer = PeerAddress(engine_id, host, port)
        self._started.append(HandshakeDone(peer, opened, None, 0.0))
        return True

    def poll(self, timeout: float = 0.0) -> list[HandshakeOutcome]:
        done, self._started = self._started, []
        return done

    def cancel(self, peer: PeerAddress) -> bool:
        return False


class Setup:
    """A reader, and the metadata and references of the engines that it reads."""

    def __init__(self, num_regions: int = NUM_REGIONS) -> None:
        self.slots = ProducerLeaseSlots(16)
        self.slots.update((), {"r": (0, NONCE)})
        self.slots.publish()
        self._remote = self._layout(REMOTE_BASE, num_regions).metadata_fields()
        self.reader = Reader(
            Agent(EmptyNixl()),
            self._layout(LOCAL_BASE, num_regions),
            engine_id="bench",
            handshakes=Answers(self._metadata),
            idle_timeout=1e6,
        )

    @staticmethod
    def _layout(base: int, num_regions: int) -> CacheLayout:
        region = 2 * NUM_BLOCKS * BLOCK_LEN  # with gaps, so that regions stay apart
        return layout_from_addresses(
            {f"layers.{i}": base + i * region for i in range(num_regions)},
            block_len=BLOCK_LEN,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            num_kv_heads=8,
        )

    def _metadata(self, engine_id: str) -> NixlAgentMetadata:
        region = LeaseSlotRegion(self.slots.base_addr, self.slots.num_slots)
        return NixlAgentMetadata(
            engine_id=engine_id,
            agent_metadata=engine_id.encode(),
            ssm_sizes=(0, 0),
            kvnixl=KvNixlExtension(incarnation=1, lease_slots=region),
            **self._remote,
        )

    def meet(self, count: int) -> None:
        for i in range(count):
            self.reader.prepare(f"engine-{i}", "10.0.0.1", 1024 + i, touch=False)
        self.reader.step()
        assert self.reader.num_remotes == count

    @staticmethod
    def reference(block_ids: list[int]) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "remote_block_ids": [block_ids],
            "remote_engine_id": "engine-0",
            "remote_request_id": "r",
            "remote_host": "10.0.0.1",
            "remote_port": 1024,
            "tp_size": 1,
            "kvnixl_lease": format_lease(0, NONCE),
        }

    def read(self, reference: dict[str, Any], local: list[int]) -> None:
        """One request from `fetch` to its outcome: posted in one step, done in the next."""
        reader = self.reader
        reader.fetch("r", reference, [local])
        assert not reader.step()
        (outcome,) = reader.step()
        assert outcome.verified


def block_lists(fragmented: bool) -> tuple[list[int], list[int]]:
    """Local and remote block ids of one request."""
    if not fragmented:
        return list(range(100, 100 + REQUEST_BLOCKS)), list(range(700, 700 + REQUEST_BLOCKS))
    rng = random.Random(1)
    local = rng.sample(range(0, NUM_BLOCKS, 2), REQUEST_BLOCKS)
    return local, rng.sample(range(0, NUM_BLOCKS, 2), REQUEST_BLOCKS)


@pytest.mark.parametrize("fragmented", [False, True], ids=["contiguous", "fragmented"])
def test_request(benchmark: Any, fragmented: bool) -> None:
    setup = Setup()
    setup.meet(1)
    local, remote = block_lists(fragmented)
    benchmark(setup.read, setup.reference(remote), local)
    assert setup.reader.close() == 0


def test_small_request(benchmark: Any) -> None:
    setup = Setup(num_regions=1)
    setup.meet(1)
    benchmark(setup.read, setup.reference([7]), [3])
    assert setup.reader.close() == 0


@pytest.mark.parametrize("remotes", [0, 1000])
def test_idle_step(benchmark: Any, remotes: int) -> None:
    setup = Setup(num_regions=4)
    setup.meet(remotes)
    benchmark(setup.reader.step)
    assert setup.reader.close() == 0


def _median_us(call: Callable[[], object], repeat: int, inner: int = 1) -> float:
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter() - start) / inner)
    return statistics.median(samples) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=300)
    repeat = parser.parse_args().repeat
    setup = Setup()
    setup.meet(1)
    rows: list[tuple[str, float]] = []
    for fragmented in (False, True):
        local, remote = block_lists(fragmented)
        reference = setup.reference(remote)
        name = "fragmented" if fragmented else "contiguous"
        cost = _median_us(lambda r=reference, b=local: setup.read(r, b), repeat)  # type: ignore[misc]
        rows.append((f"request, {NUM_REGIONS} regions x {REQUEST_BLOCKS} blocks, {name}", cost))
    setup.reader.close()
    for remotes in (0, 1000):
        setup = Setup(num_regions=4)
        setup.meet(remotes)
        cost = _median_us(setup.reader.step, repeat, 1000)
        rows.append((f"idle step, {remotes} remote engines", cost))
        setup.reader.close()
    ids = np.zeros(1, np.int32)
    raw = EmptyNixl()
    rows.append(("(one empty NIXL call)", _median_us(lambda: raw.check_xfer_state(ids), repeat)))
    for name, cost in rows:
        print(f"{name:55s} {cost:9.2f} us")


if __name__ == "__main__":
    main()
