"""The two ends of the benchmark. Each object lives in a process of its own."""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np

from kvnixl.agent import Agent
from kvnixl.bench.cache import Cache, CacheShape
from kvnixl.bench.content import Content, WrongByte
from kvnixl.bench.paths import (
    BURST,
    KVNIXL,
    MEMCPY,
    PLAIN,
    PLAIN_BURST,
    PULL,
    VERIFIED,
    Exported,
    ExportedLeases,
    KvnixlPath,
    MemcpyPath,
    Path,
    PlainBurstPath,
    PlainPath,
    Sample,
    VerifiedPath,
)
from kvnixl.bench.plan import Order, Row, block_lists, burst_of, longest_request, row_rng
from kvnixl.bench.pull import BurstPath, OfferService, PullPath
from kvnixl.compat import CompatibilityCheck
from kvnixl.leases import LEASE_SLOT_BYTES, LeaseSlotAllocator, ProducerLeaseSlots

NUM_LEASES = 64

# How the requests of a row are fetched.
_PATHS: dict[Order, tuple[str, ...]] = {
    "unfragmented": (KVNIXL, PLAIN, MEMCPY, VERIFIED, PULL),
    "reversed": (KVNIXL, PLAIN, MEMCPY),
    "churned": (KVNIXL, PLAIN, MEMCPY),
    "fragmented": (KVNIXL, PLAIN, MEMCPY, PULL),
    "concurrent": (BURST, PLAIN, PLAIN_BURST),
}

Turn: TypeAlias = dict[str, Sample]


@dataclass(frozen=True)
class BytePlace:
    """One byte of the producer's cache."""

    layer: int
    block: int
    offset: int


@dataclass(frozen=True)
class WrongRead:
    """A fetch that brought a wrong byte.

    Attributes:
        request: the request's number in its row, from 1 on.
        path: how it was fetched.
    """

    row: Row
    request: int
    path: str
    byte: WrongByte


@dataclass(frozen=True)
class Connected:
    """What it took to meet the producer.

    Attributes:
        first_s: the first transfer, one block, with the connection set up inside it.
        prepare_s: preparing the descriptor lists of both sides, per path.
        ucx: UCX's version; empty when not known.
        transports: UCX's transports between the two processes; empty when not known.
    """

    first_s: float
    prepare_s: dict[str, float]
    ucx: str
    transports: tuple[str, ...]


def _open_agent() -> Agent:
    # NIXL reads it when it is imported, and would otherwise announce each agent on stdout.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    return Agent.open()


def _compat(shape: CacheShape) -> CompatibilityCheck:
    return CompatibilityCheck({"program": "kvnixl.bench", **asdict(shape)})


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class UcxLog:
    """UCX tells its version and the transports it chose in its log only. The log goes to anonymous
    memory, so that no file is left whatever happens."""

    def __init__(self) -> None:
        self._fd: int | None = None
        if not any(name.startswith("UCX_LOG_") for name in os.environ):
            self._fd = os.memfd_create("ucx-log")
            os.environ["UCX_LOG_LEVEL"] = "info"
            os.environ["UCX_LOG_FILE"] = f"/proc/self/fd/{self._fd}"

    def text(self) -> str:
        if self._fd is None:
            return ""
        ctypes.CDLL(None).fflush(None)  # UCX leaves its lines in C's buffer
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")

    def version(self) -> str:
        found = re.search(r"\bVersion (\S+)", self.text())
        return found.group(1) if found else ""

    def transports(self) -> tuple[str, ...]:
        names: list[str] = []
        for line in self.text().splitlines():
            if " cfg#" in line and " self " not in line:
                for lane in re.findall(r"\(([^)]*)\)", line):
                    names += [device.partition("/")[0] for device in lane.split()]
        return tuple(dict.fromkeys(names))


class Producer:
    """Owns the blocks that are read.

    Args:
        offers: where the reader asks for offers.
    """

    def __init__(
        self, shape: CacheShape, seed: int, offers: Connection, check_stop: Callable[[], None]
    ) -> None:
        self._check_stop = check_stop
        self._log = UcxLog()
        self._cache = Cache(shape)
        self._content = Content(shape, seed)
        self._agent = _open_agent()
        self._agent.register_memory(
            [
                (base, stride * count, device)
                for base, _, stride, count, device in self._cache.regions
            ]
        )
        self._slots = ProducerLeaseSlots(NUM_LEASES)
        self._agent.register_memory([(self._slots.base_addr, NUM_LEASES * LEASE_SLOT_BYTES, 0)])
        # The same memory: an agent of its own, so that none has it registered twice.
        self._offer_agent = _open_agent()
        self._offers = OfferService(self._offer_agent, self._cache, _compat(shape), offers)

    def export(self) -> Exported:
        """Arm the leases; what a reader needs."""
        allocator = LeaseSlotAllocator(NUM_LEASES)
        leases = [allocator.acquire(f"lease-{i}") for i in range(NUM_LEASES)]
        to_arm, to_clear = allocator.take_updates()
        self._slots.update(to_clear, to_arm)
        self._slots.publish()
        nonces = dict(lease for lease in leases if lease is not None)
        return Exported(
            self._agent.get_agent_metadata(),
            self._cache.regions,
            ExportedLeases(self._slots.base_addr, [nonces[i] for i in range(NUM_LEASES)]),
        )

    def fill(self, generation: int, wrong: BytePlace | None = None) -> None:
        """Write a generation into all blocks, with one byte of it wrong on request."""
        self._check_stop()
        self._content.fill(self._cache, generation)
        if wrong is not None:
            self._cache.layers[wrong.layer][wrong.block].view(np.uint8)[wrong.offset] ^= 0xFF

    def peak_memory(self) -> int:
        return peak_memory_bytes()

    def close(self) -> None:
        self._offers.close()
        self._offer_agent.close()
        self._agent.close()
        self._slots.close()


class Reader:
    """Fetches blocks and checks them.

    Args:
        offers: where the producer answers with offers.
    """

    def __init__(
        self, shape: CacheShape, seed: int, offers: Connection, check_stop: Callable[[], None]
    ) -> None:
        self._log = UcxLog()
        self._shape = shape
        self._seed = seed
        self._check_stop = check_stop
        self._cache = Cache(shape)
        self._content = Content(shape, seed)
        self._agent = _open_agent()
        self._agent.register_memory(
            [
                (base, stride * count, device)
                for base, _, stride, count, device in self._cache.regions
            ]
        )
        self._pull = PullPath(self._agent, self._cache, _compat(shape), offers)
        self._paths: dict[str, Path] = {}
        self._rngs: dict[Row, random.Random] = {}
        self._requests: dict[Row, int] = {}

    def connect(self, exported: Exported, generation: int) -> Connected | WrongRead:
        """Meet the producer: the first transfer, and a long one that touches everything once."""
        agent, cache = self._agent, self._cache
        remote = agent.add_remote_agent(exported.metadata)
        kvnixl = KvnixlPath(agent, cache, remote, exported.regions)
        plain = PlainPath(agent, cache, remote, exported.regions)
        request_blocks = burst_of(self._shape).request_blocks
        self._paths = {
            KVNIXL: kvnixl,
            PLAIN: plain,
            VERIFIED: VerifiedPath(kvnixl, agent, remote, exported.leases),
            PULL: self._pull,
            BURST: BurstPath(self._pull, request_blocks),
            PLAIN_BURST: PlainBurstPath(plain, request_blocks),
            MEMCPY: MemcpyPath(cache),
        }
        first: Sample | None = None
        longest = longest_request(self._shape.blocks)
        for blocks in (1, longest):
            row = Row(blocks * self._shape.block_size, blocks, "unfragmented")
            ids = list(range(blocks))
            for name in (KVNIXL, PULL):
                sample = self._fetch(row, name, ids, ids, generation)
                if isinstance(sample, WrongRead):
                    return sample
                first = first or sample
        assert first is not None
        return Connected(
            first.seconds,
            {KVNIXL: kvnixl.prepare_seconds, PLAIN: plain.prepare_seconds},
            self._log.version(),
            self._log.transports(),
        )

    def measure(
        self, row: Row, generation: int, seconds: float, max_requests: int | None
    ) -> list[Turn] | WrongRead:
        """Fetch requests of a row, each on every path in a random order, for so many seconds, at
        least one. Every byte is checked after every fetch."""
        rng = self._rngs.setdefault(row, row_rng(self._seed, row))
        names = list(_PATHS[row.order])
        turns: list[Turn] = []
        end = time.monotonic() + seconds
        while True:
            self._requests[row] = self._requests.get(row, 0) + 1
            local, remote = block_lists(row, self._shape.blocks, rng)
            rng.shuffle(names)
            turn: Turn = {}
            for name in names:
                sample = self._fetch(row, name, local, remote, generation)
                if isinstance(sample, WrongRead):
                    return sample
                turn[name] = sample
            turns.append(turn)
            if time.monotonic() >= end or len(turns) == max_requests:
                return turns

    def _fetch(
        self, row: Row, name: str, local: list[int], remote: list[int], generation: int
    ) -> Sample | WrongRead:
        self._check_stop()
        if name == MEMCPY:
            return self._paths[name].fetch(local, remote)
        self._content.spoil(self._cache, local, remote, generation)
        sample = self._paths[name].fetch(local, remote)
        wrong = self._content.check(self._cache, local, remote, generation)
        if wrong is not None:
            return WrongRead(row, self._requests.get(row, 0), name, wrong)
        return sample

    def peak_memory(self) -> int:
        return peak_memory_bytes()

    def close(self) -> None:
        for path in reversed({PULL: self._pull, **self._paths}.values()):
            path.close()
        self._agent.close()
