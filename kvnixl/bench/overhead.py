"""What kvnixl itself costs: NIXL is replaced by calls that only return.

A request is timed from `Reader.fetch` to its outcome: parsing the reference, pairing the blocks,
building the index lists, making and posting the READ, one poll, verification. All figures are the
thread's CPU time, so that what else runs on the machine is in none of them.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnixl.agent import Agent
from kvnixl.bench.plan import FULL_SCALE, OverheadScale
from kvnixl.handshake import HandshakeDone, HandshakeOutcome, PeerAddress, Rank
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.leases import ProducerLeaseSlots
from kvnixl.metadata import KvNixlExtension, LeaseSlotRegion, NixlAgentMetadata, format_lease
from kvnixl.producer import Producer
from kvnixl.reader import Reader
from kvnixl.wire import OpenedHandshake, Outcome, encode_completion

# What a request and an idle step of the full scale may cost, seconds.
CONTIGUOUS_TARGET_S = 400e-6
FRAGMENTED_TARGET_S = 2e-3
IDLE_STEP_TARGET_S = 2e-6

_BLOCK_LEN = 4096
_NONCE = 0x1234_5678
_LOCAL_BASE, _REMOTE_BASE = 1 << 40, 1 << 44
_IDLE_CALLS = 1000


@dataclass(frozen=True)
class Overhead:
    """One figure.

    Attributes:
        what: what was measured, in words.
        samples: how often.
        p50_s: median seconds.
        p99_s: ``None`` for what is too short to be timed one by one.
        target_s: what it may take; ``None`` for a scale without a target.
    """

    what: str
    samples: int
    p50_s: float
    p99_s: float | None
    target_s: float | None


# --- NIXL, replaced -------------------------------------------------------------------------------


class EmptyNixl:
    """NIXL's calls without NIXL. Only 8-byte READs (lease slots) move anything.

    Attributes:
        inbox: the notifications that the next `get_new_notifs` gives out.
    """

    name = "bench"
    release_is_final = True

    def __init__(self) -> None:
        self.inbox: dict[str, list[bytes]] = {}
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

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived, self.inbox = self.inbox, {}
        return arrived


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


# --- the two sides --------------------------------------------------------------------------------


class ReaderSide:
    """A reader, and the metadata and references of the engines that it reads."""

    def __init__(self, num_regions: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.slots = ProducerLeaseSlots(16)
        self.slots.update((), {"r": (0, _NONCE)})
        self.slots.publish()
        self._remote = self._layout(_REMOTE_BASE, num_regions).metadata_fields()
        self._agent = Agent(EmptyNixl())
        self.reader = Reader(
            self._agent,
            self._layout(_LOCAL_BASE, num_regions),
            engine_id="bench",
            handshakes=Answers(self._metadata),
            idle_timeout=1e6,
        )

    def _layout(self, base: int, num_regions: int) -> CacheLayout:
        region = 2 * self._num_blocks * _BLOCK_LEN  # with gaps, so that regions stay apart
        return layout_from_addresses(
            {f"layers.{i}": base + i * region for i in range(num_regions)},
            block_len=_BLOCK_LEN,
            num_blocks=self._num_blocks,
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
            "kvnixl_lease": format_lease(0, _NONCE),
        }

    def read(self, reference: dict[str, Any], local: list[int]) -> None:
        """One request from `fetch` to its outcome: posted in one step, done in the next."""
        reader = self.reader
        reader.fetch("r", reference, [local])
        assert not reader.step()
        (outcome,) = reader.step()
        assert outcome.verified

    def close(self) -> None:
        left = self.reader.close()
        assert left == 0
        self._agent.close()
        self.slots.close()


class ProducerSide:
    """A producer that holds ``leases`` requests under a lease and has heard ``peers`` peers.

    Args:
        spare: lease slots that it has beside those.
    """

    def __init__(self, leases: int, peers: int, spare: int = 0) -> None:
        self.raw = EmptyNixl()
        self.agent = Agent(self.raw)
        self._memory = np.zeros(4096, np.uint8)
        layout = layout_from_addresses(
            [self._memory.ctypes.data], block_len=64, num_blocks=64, block_size=16, num_kv_heads=1
        )
        self.producer = Producer(
            self.agent, layout, engine_id="prefill", num_lease_slots=leases + max(spare, 1)
        )
        self._nonce = 0
        for slot in range(leases):
            self.hold(f"held-{slot}", slot, 1e6)
        for peer in range(peers):
            self.producer.hold(f"read-by-{peer}", 1e6)
            done = encode_completion(
                Outcome.DONE, 1, sender=peer, sequence=1, request_ids=[f"read-by-{peer}"]
            )
            self.raw.inbox[f"D{peer}"] = [done]
        assert len(self.producer.step()) == peers
        assert len(self.producer) == leases

    def hold(self, req_id: str, slot: int, seconds: float) -> tuple[int, int]:
        self._nonce += 1
        self.producer.hold(req_id, seconds, lease=(slot, self._nonce))
        return slot, self._nonce

    def close(self) -> None:
        self.producer.close()
        self.agent.close()


def block_lists(scale: OverheadScale, *, fragmented: bool) -> tuple[list[int], list[int]]:
    """Local and remote block ids of one request. Fragmented ones have no two neighbours."""
    count = scale.request_blocks
    if not fragmented:
        return list(range(count)), list(range(count // 2, count // 2 + count))
    rng = random.Random(1)
    every_other = range(0, scale.num_blocks, 2)
    return rng.sample(every_other, count), rng.sample(every_other, count)


# --- measuring ------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], samples: int, calls: int = 1) -> list[float]:
    """CPU seconds of one call, ``samples`` times the mean of so many calls."""
    result = []
    for _ in range(samples):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        result.append((time.thread_time_ns() - start) / calls / 1e9)
    return result


def measure_overheads(scale: OverheadScale) -> list[Overhead]:
    """All figures, at the given scale."""
    has_targets = scale == FULL_SCALE
    return [
        *_requests(scale, has_targets),
        _idle_step_of_producer(scale, has_targets),
        _idle_step_of_reader(scale, has_targets),
    ]


def _requests(scale: OverheadScale, has_targets: bool) -> Iterable[Overhead]:
    side = ReaderSide(scale.regions, scale.num_blocks)
    try:
        side.meet(1)
        for fragmented, target in ((False, CONTIGUOUS_TARGET_S), (True, FRAGMENTED_TARGET_S)):
            local, remote = block_lists(scale, fragmented=fragmented)
            reference = side.reference(remote)
            read = _bound_read(side, reference, local)
            read()  # the first one allocates
            seconds = sorted(seconds_of(read, scale.samples))
            yield Overhead(
                f"request, {scale.regions} regions x {scale.request_blocks} blocks, "
                f"{'fragmented' if fragmented else 'contiguous'}",
                scale.samples,
                statistics.median(seconds),
                seconds[-1 - len(seconds) // 100],
                target if has_targets else None,
            )
    finally:
        side.close()


def _bound_read(
    side: ReaderSide, reference: dict[str, Any], local: list[int]
) -> Callable[[], None]:
    return lambda: side.read(reference, local)


def _idle_step_of_producer(scale: OverheadScale, has_targets: bool) -> Overhead:
    side = ProducerSide(scale.leases, scale.peers)
    try:
        return _idle_step(
            f"idle step of a producer, {len(side.producer):,} leases, {scale.peers:,} peers",
            side.producer.step,
            scale,
            has_targets,
        )
    finally:
        side.close()


def _idle_step_of_reader(scale: OverheadScale, has_targets: bool) -> Overhead:
    side = ReaderSide(1, scale.num_blocks)
    try:
        side.meet(scale.peers)
        return _idle_step(
            f"idle step of a reader, {side.reader.num_remotes:,} peers",
            side.reader.step,
            scale,
            has_targets,
        )
    finally:
        side.close()


def _idle_step(
    what: str, step: Callable[[], object], scale: OverheadScale, has_targets: bool
) -> Overhead:
    seconds = seconds_of(step, scale.samples // 10, _IDLE_CALLS)
    return Overhead(
        what,
        len(seconds) * _IDLE_CALLS,
        statistics.median(seconds),
        None,
        IDLE_STEP_TARGET_S if has_targets else None,
    )
