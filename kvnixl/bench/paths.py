"""The ways in which the reader gets the blocks of a request.

Each takes the block ids of both sides as a scheduler has them, lists of integers, and is timed from
there until the bytes are in place. What is prepared once per peer is not part of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvnixl._descs import RegionIndex, paired_desc_ids, strided_descs
from kvnixl.agent import LOCAL_SIDE, Agent, PreparedList, RemoteAgent
from kvnixl.bench.cache import Cache, Region, allocate
from kvnixl.errors import TransferError
from kvnixl.leases import LeaseVerifier, lease_slot_descs

TRANSFER_TIMEOUT_S = 60.0

KVNIXL = "kvnixl"
PLAIN = "plain"
VERIFIED = "verified"
PULL = "pull"
BURST = "burst"
PLAIN_BURST = "plain burst"
MEMCPY = "memcpy"


class Sample(NamedTuple):
    """One fetch.

    Attributes:
        seconds: from the block ids to the last byte.
        descs: descriptors after merging, as NIXL counted them, else as computed; 0: not known.
    """

    seconds: float
    descs: int


class Path(Protocol):
    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample: ...
    def close(self) -> None: ...


class ExportedLeases(NamedTuple):
    """Lease slots that a producer has armed: the first slots hold the nonces."""

    base_addr: int
    nonces: list[int]


class Exported(NamedTuple):
    """What a reader has to know of a producer."""

    metadata: bytes
    regions: list[Region]
    leases: ExportedLeases


def _wait(state: Callable[[], str], first: str) -> None:
    """Ask until it is done. Without a pause: a sleeping poller would measure its own sleep."""
    deadline = time.monotonic() + TRANSFER_TIMEOUT_S
    current = first
    while current != "DONE":
        if current == "ERR":
            raise TransferError("check_xfer_state", "NIXL reported the state 'ERR'")
        if time.monotonic() > deadline:
            raise TransferError("check_xfer_state", f"not done after {TRANSFER_TIMEOUT_S:g} s")
        current = state()


class KvnixlPath:
    """Strided prepared lists; index pairs ordered into runs."""

    def __init__(
        self, agent: Agent, cache: Cache, remote: RemoteAgent, regions: Sequence[Region]
    ) -> None:
        start = time.perf_counter()
        self._agent = agent
        self._dst = RegionIndex(cache.regions)
        self._src = RegionIndex(regions)
        self._local = agent.prep_xfer_dlist(LOCAL_SIDE, strided_descs(cache.regions))
        self._remote = agent.prep_xfer_dlist(remote, strided_descs(regions))
        self.prepare_seconds = time.perf_counter() - start

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        start = time.perf_counter()
        dst, src, computed = paired_desc_ids(self._dst, [local], self._src, [remote])
        xfer = self._agent.make_prepped_xfer("READ", self._local, dst, self._remote, src)
        try:
            _wait(xfer.state, xfer.post())
            seconds = time.perf_counter() - start
            telemetry = xfer.telemetry()
        finally:
            xfer.close()
        return Sample(seconds, telemetry.desc_count if telemetry else computed)

    def close(self) -> None:
        self._local.close()
        self._remote.close()


class PlainPath:
    """NIXL's own Python API as engines use it today: one tuple per block, wrapped and prepared
    once; per request the descriptor ids by NumPy broadcasting, in the order of the block lists."""

    def __init__(
        self, agent: Agent, cache: Cache, remote: RemoteAgent, regions: Sequence[Region]
    ) -> None:
        start = time.perf_counter()
        self.nixl = agent.raw
        self._local = self._prepare("NIXL_INIT_AGENT", cache.regions)
        self._remote = self._prepare(remote.name, regions)
        self._first_ids = np.arange(len(regions), dtype=np.int32)[:, None] * cache.shape.blocks
        self.prepare_seconds = time.perf_counter() - start

    def _prepare(self, agent_name: str, regions: Sequence[Region]) -> Any:
        tuples = [
            (base + block * length, length, device)
            for base, length, _stride, count, device in regions
            for block in range(count)
        ]
        return self.nixl.prep_xfer_dlist(agent_name, self.nixl.get_xfer_descs(tuples, "DRAM"))

    def _ids(self, blocks: Sequence[int]) -> Any:
        return (self._first_ids + np.asarray(blocks, np.int32)).ravel()

    def make(self, local: Sequence[int], remote: Sequence[int]) -> Any:
        """NIXL's handle of a transfer of these blocks."""
        return self.nixl.make_prepped_xfer(
            "READ", self._local, self._ids(local), self._remote, self._ids(remote)
        )

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        nixl = self.nixl
        start = time.perf_counter()
        handle = self.make(local, remote)
        # After an error the handle is left to the end of the process, which then follows.
        _wait(lambda: str(nixl.check_xfer_state(handle)), nixl.transfer(handle))
        seconds = time.perf_counter() - start
        descs = _desc_count(nixl, handle)
        nixl.release_xfer_handle(handle)
        return Sample(seconds, descs)

    def close(self) -> None:
        self.nixl.release_dlist_handle(self._local)
        self.nixl.release_dlist_handle(self._remote)


class PlainBurstPath:
    """The plain path with a transfer for every request of so many blocks: all are made, then posted
    one after the other, then polled. What requests at once can reach with NIXL.

    Args:
        path: has the prepared lists.
    """

    def __init__(self, path: PlainPath, request_blocks: int) -> None:
        self._path = path
        self._request_blocks = request_blocks

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        length = self._request_blocks
        path, nixl = self._path, self._path.nixl
        start = time.perf_counter()
        handles = [
            path.make(local[first : first + length], remote[first : first + length])
            for first in range(0, len(local), length)
        ]
        states = [nixl.transfer(handle) for handle in handles]
        for handle, state in zip(handles, states, strict=True):
            _wait(functools.partial(nixl.check_xfer_state, handle), state)
        seconds = time.perf_counter() - start
        descs = sum(_desc_count(nixl, handle) for handle in handles)
        for handle in handles:
            nixl.release_xfer_handle(handle)
        return Sample(seconds, descs)

    def close(self) -> None:
        pass  # the lists are the other path's


def _desc_count(nixl: Any, handle: Any) -> int:
    try:
        return int(nixl.get_xfer_telemetry(handle).descCount)
    except Exception:  # figures that are missing fail no transfer
        return 0


class VerifiedPath:
    """The kvnixl path, followed by the proof that the producer's lease still held after it."""

    ENGINE = "producer"

    def __init__(
        self, path: KvnixlPath, agent: Agent, remote: RemoteAgent, leases: ExportedLeases
    ) -> None:
        self._path = path
        self._nonces = leases.nonces
        self._fetched = 0
        self._verifier = LeaseVerifier(agent, num_cells=64)
        num_slots = len(leases.nonces)
        slots: PreparedList = agent.prep_xfer_dlist(
            remote, lease_slot_descs(leases.base_addr, num_slots)
        )
        self._verifier.add_remote(self.ENGINE, 0, slots, num_slots)

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        slot = self._fetched % len(self._nonces)
        req_id = f"request-{self._fetched}"
        self._fetched += 1
        verifier = self._verifier
        start = time.perf_counter()
        verifier.add_checks(req_id, self.ENGINE, (0,), slot, self._nonces[slot])
        sample = self._path.fetch(local, remote)
        verified, failed = verifier.step({req_id})
        while not (verified or failed):
            verified, failed = verifier.step()
        seconds = time.perf_counter() - start
        if failed:
            raise TransferError("READ of a lease slot", failed[req_id])
        return Sample(seconds, sample.descs)

    def close(self) -> None:
        self._verifier.shutdown()


class MemcpyPath:
    """As many bytes as the request has, copied by this processor core from one region of the
    reader's memory to the next: the machine's own rate."""

    def __init__(self, cache: Cache) -> None:
        self._targets = cache.layers
        self._sources = [*cache.layers[1:], allocate(cache.shape)]

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        count = len(local)
        start = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            np.copyto(target[:count], source[:count])
        return Sample(time.perf_counter() - start, 0)

    def close(self) -> None:
        pass
