"""The lease protocol of `kvnixl.leases` in plain Python: the baseline of ``bench_leases.py``.

Dictionaries, named tuples and NumPy elements, one object per check: what one would write first.
The protocol is complete (poisoned cells, one READ per remote rank, timeouts, quarantine, waiting
for cells in order): the comparison is about how it is written, not about what it leaves out.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnixl._fence import memory_fence


class PlainAllocator:
    def __init__(self, num_slots: int) -> None:
        self.free = list(range(num_slots - 1, -1, -1))
        self.leases: dict[str, tuple[int, int]] = {}
        self.to_arm: dict[str, tuple[int, int]] = {}
        self.to_clear: set[str] = set()
        self.next_nonce = 1 + secrets.randbelow(2**63 - 1)

    def acquire(self, req_id: str) -> tuple[int, int] | None:
        if req_id in self.leases:
            return self.leases[req_id]
        if not self.free:
            return None
        lease = (self.free.pop(), self.next_nonce)
        self.next_nonce = self.next_nonce + 1 if self.next_nonce + 1 < 2**63 else 1
        self.leases[req_id] = lease
        self.to_arm[req_id] = lease
        return lease

    def release(self, req_id: str, *, clear: bool) -> None:
        lease = self.leases.pop(req_id, None)
        if lease is None:
            return
        self.free.append(lease[0])
        if req_id in self.to_arm:
            del self.to_arm[req_id]
        elif clear:
            self.to_clear.add(req_id)

    def take_updates(self) -> tuple[dict[str, tuple[int, int]], set[str]]:
        updates = self.to_arm, self.to_clear
        self.to_arm, self.to_clear = {}, set()
        return updates


class PlainSlots:
    def __init__(self, num_slots: int) -> None:
        self.words = np.zeros(num_slots, dtype=np.int64)
        self.leases: dict[str, tuple[int, int]] = {}
        self.dirty = False

    def update(self, to_clear: Iterable[str], to_arm: dict[str, tuple[int, int]]) -> None:
        for req_id in to_clear:
            self.clear(req_id)
        for req_id, (slot, nonce) in to_arm.items():
            self.clear(req_id)
            self.words[slot] = nonce
            self.leases[req_id] = (slot, nonce)
            self.dirty = True

    def clear(self, req_id: str) -> None:
        lease = self.leases.pop(req_id, None)
        if lease is not None and self.words[lease[0]] == lease[1]:
            self.words[lease[0]] = 0
            self.dirty = True

    def publish(self) -> None:
        if self.dirty:
            memory_fence()
            self.dirty = False


class PlainCheck(NamedTuple):
    engine_id: str
    rank: int
    slot: int
    nonce: int


class PlainCell(NamedTuple):
    request: PlainRequest
    check: PlainCheck
    cell: int


@dataclass(eq=False)
class PlainRequest:
    req_id: str
    checks: list[PlainCheck] = field(default_factory=list)
    unread: int = 0
    ended: bool = False
    deadline: float = 0.0


@dataclass(eq=False)
class PlainRead:
    handle: Any
    cells: list[PlainCell]
    deadline: float
    over: bool = False
    judged: bool = False


class PlainVerifier:
    def __init__(
        self,
        nixl_agent: Any,
        num_cells: int = 4096,
        *,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.agent = nixl_agent
        self.words: npt.NDArray[np.int64] = np.zeros(num_cells, dtype=np.int64)
        self.local_handle: Any = None
        self.timeout = timeout
        self.clock = clock
        self.free = list(range(num_cells - 1, -1, -1))
        self.remotes: dict[tuple[str, int], Any] = {}
        self.requests: dict[str, PlainRequest] = {}
        self.waiting: deque[PlainRequest] = deque()
        self.reads: list[PlainRead] = []

    def add_remote(self, engine_id: str, rank: int, handle: Any) -> None:
        self.remotes[(engine_id, rank)] = handle

    def add_check(self, req_id: str, engine_id: str, rank: int, slot: int, nonce: int) -> None:
        request = self.requests.get(req_id)
        if request is None:
            request = self.requests[req_id] = PlainRequest(req_id)
        request.checks.append(PlainCheck(engine_id, rank, slot, nonce))

    def step(self, reads_done: Iterable[str] = ()) -> tuple[set[str], dict[str, str]]:
        verified: set[str] = set()
        failed: dict[str, str] = {}
        if not (reads_done or self.reads or self.waiting):
            return verified, failed
        now = self.clock()
        self._poll(now, verified, failed)
        for req_id in reads_done:
            request = self.requests.get(req_id)
            if request is None:
                failed[req_id] = f"no lease is known for {req_id}"
                continue
            if len(request.checks) > len(self.words):
                self._fail(request, "not enough cells", failed)
                continue
            request.deadline = now + self.timeout
            self.waiting.append(request)
        groups: dict[tuple[str, int], list[PlainCell]] = {}
        while self.waiting:
            request = self.waiting[0]
            if request.deadline <= now:
                self._fail(request, "no cell in time", failed)
            if not request.ended and len(request.checks) > len(self.free):
                break
            self.waiting.popleft()
            if request.ended:
                continue
            request.unread = len(request.checks)
            for check in request.checks:
                cell = self.free.pop()
                self.words[cell] = ~check.nonce
                key = (check.engine_id, check.rank)
                groups.setdefault(key, []).append(PlainCell(request, check, cell))
        for key, cells in groups.items():
            self._post(key, cells, now, verified, failed)
        return verified, failed

    def _post(
        self,
        key: tuple[str, int],
        cells: list[PlainCell],
        now: float,
        verified: set[str],
        failed: dict[str, str],
    ) -> None:
        cells.sort(key=lambda c: c.check.slot)
        read = PlainRead(None, cells, now + self.timeout)
        try:
            read.handle = self.agent.make_prepped_xfer(
                "READ",
                self.local_handle,
                np.array([c.cell for c in cells], dtype=np.int32),
                self.remotes[key],
                np.array([c.check.slot for c in cells], dtype=np.int32),
            )
        except Exception as exc:
            self._unreadable(read, str(exc), failed)
            self.free.extend(c.cell for c in cells)
            return
        try:
            state = self.agent.transfer(read.handle)
        except Exception:
            state = "ERR"
        if not self._advance(read, state, now, verified, failed):
            self.reads.append(read)

    def _poll(self, now: float, verified: set[str], failed: dict[str, str]) -> None:
        kept = []
        for read in self.reads:
            state = "DONE"
            if not read.over:
                try:
                    state = self.agent.check_xfer_state(read.handle)
                except Exception:
                    state = "ERR"
            if not self._advance(read, state, now, verified, failed):
                kept.append(read)
        self.reads = kept

    def _advance(
        self, read: PlainRead, state: str, now: float, verified: set[str], failed: dict[str, str]
    ) -> bool:
        if state == "PROC":
            if not read.judged and now >= read.deadline:
                self._unreadable(read, "timeout", failed)
            return False
        if not read.judged:
            if state == "DONE":
                self._judge(read, verified, failed)
            else:
                self._unreadable(read, state, failed)
        read.over = True
        try:
            self.agent.release_xfer_handle(read.handle)
        except Exception:
            return False
        self.free.extend(c.cell for c in read.cells)
        return True

    def _judge(self, read: PlainRead, verified: set[str], failed: dict[str, str]) -> None:
        read.judged = True
        memory_fence()
        for request, check, cell in read.cells:
            if request.ended:
                continue
            if self.words[cell] != check.nonce:
                reason = f"engine {check.engine_id} rank {check.rank} released the KV blocks"
                self._fail(request, reason, failed)
                continue
            request.unread -= 1
            if request.unread == 0:
                request.ended = True
                del self.requests[request.req_id]
                verified.add(request.req_id)

    def _unreadable(self, read: PlainRead, cause: str, failed: dict[str, str]) -> None:
        read.judged = True
        for request, check, _cell in read.cells:
            if not request.ended:
                reason = f"slot of engine {check.engine_id} rank {check.rank}: {cause}"
                self._fail(request, reason, failed)

    def _fail(self, request: PlainRequest, reason: str, failed: dict[str, str]) -> None:
        request.ended = True
        del self.requests[request.req_id]
        failed[request.req_id] = reason
