"""Deadlines of leases, and how a time crosses from one process's clock to another's.

Nothing here reads a clock: every call takes ``now``. All times are seconds as floats, of one
monotonic clock (`time.perf_counter` unless the owner injects another).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Below this many heap entries nothing is gained by rebuilding the heap.
_MIN_COMPACT = 64


class _Lease(Generic[K]):
    """One key's deadline. After `Deadlines.remove` it stays in the heap until it surfaces, marked
    as not live."""

    __slots__ = ("deadline", "key", "live")

    def __init__(self, key: K, deadline: float) -> None:
        self.key = key
        self.deadline = deadline
        self.live = True


class Deadlines(Generic[K]):
    """Keys with deadlines, in a heap with lazy re-keying.

    The heap holds one entry per live key, filed under a time that is never later than the key's
    deadline. `extend` changes only the deadline; `expired` files an entry again when it surfaces
    too early. So extending is O(1), a renewed key in front never hides an expired one behind it,
    durations may be mixed, and a step in which nothing is due costs one comparison whatever the
    number of keys.

    Keys are any hashable value. Deadlines may be infinite (never due) but not NaN. Not thread-safe.
    """

    __slots__ = ("_heap", "_leases", "_sequence")

    def __init__(self) -> None:
        self._leases: dict[K, _Lease[K]] = {}
        # (time, sequence number, lease); the number keeps comparisons away from the leases.
        self._heap: list[tuple[float, int, _Lease[K]]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: object) -> bool:
        return key in self._leases

    def deadline(self, key: K) -> float | None:
        """The key's deadline in seconds, or ``None`` for an unknown key."""
        lease = self._leases.get(key)
        return None if lease is None else lease.deadline

    def add(self, key: K, deadline: float) -> None:
        """Start watching ``key``. Raises `ValueError` for a key that is watched already (use
        `extend`, or `remove` it first) and for a NaN deadline."""
        if key in self._leases:
            raise ValueError(f"{key!r} already has a deadline: extend it, or remove it first")
        _check(deadline)
        lease = self._leases[key] = _Lease(key, deadline)
        self._sequence += 1
        heapq.heappush(self._heap, (deadline, self._sequence, lease))

    def extend(self, key: K, deadline: float) -> bool:
        """Move the key's deadline to ``deadline`` if that is later; it is never shortened.

        Returns:
            Whether the key is known. An unknown key is left unknown: a late renewal must not
            bring back what has ended. Raises `ValueError` for a NaN deadline.
        """
        _check(deadline)
        lease = self._leases.get(key)
        if lease is None:
            return False
        lease.deadline = max(lease.deadline, deadline)
        return True

    def remove(self, key: K) -> bool:
        """Stop watching ``key``. Returns whether it was known."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return False
        lease.live = False
        if len(self._heap) > 2 * len(self._leases) + _MIN_COMPACT:
            self._compact()
        return True

    def expired(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline is at or before ``now``, earliest first."""
        heap = self._heap
        if not heap or heap[0][0] > now:
            return []
        due: list[_Lease[K]] = []
        refiled = 0
        while heap and heap[0][0] <= now:
            _, sequence, lease = heap[0]
            if lease.live and lease.deadline > now:
                refiled += 1
                if refiled > _MIN_COMPACT and refiled > len(heap) // 8:
                    # Many were extended since they were filed: one rebuild is cheaper.
                    heap = self._compact()
                    refiled = 0
                else:
                    heapq.heapreplace(heap, (lease.deadline, sequence, lease))
                continue
            heapq.heappop(heap)
            if lease.live:
                del self._leases[lease.key]
                due.append(lease)
        # Entries surface in the order they were filed under, which extensions may have changed.
        due.sort(key=lambda lease: lease.deadline)
        return [lease.key for lease in due]

    def next_check(self) -> float | None:
        """A time at or before the earliest deadline: nothing is due earlier. ``None`` if empty.

        For a caller that sleeps between steps; it may wake once too often after an extension.
        """
        heap = self._heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def clear(self) -> None:
        """Forget every key."""
        self._leases.clear()
        self._heap.clear()

    def _compact(self) -> list[tuple[float, int, _Lease[K]]]:
        """Rebuild the heap from the live keys, filed under their present deadlines; return it."""
        self._heap = [
            (lease.deadline, number, lease) for number, lease in enumerate(self._leases.values())
        ]
        self._sequence = len(self._heap)
        heapq.heapify(self._heap)
        return self._heap


def rebase_deadline(deadline: float, *, sender_now: float, now: float) -> float:
    """A deadline on this process's clock, from one on the sender's clock.

    Only what is left of it crosses, so the two clocks may have unrelated epochs. The time the
    message travelled is counted as if it had not passed: the result is late by that much, never
    early. Where late would be unsafe, use a `ClockOffset`.

    Args:
        deadline: the deadline on the sender's clock, seconds.
        sender_now: the sender's clock when it sent the message, seconds.
        now: this process's clock when the message arrived, seconds.
    """
    return now + (deadline - sender_now)


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a peer's clock is ahead of ours, from the round trip that told best.

    Attributes:
        offset: seconds that the peer's clock is ahead (negative: behind).
        round_trip: seconds the round trip took; the true offset lies within half of it.
        measured_at: when it was measured, on our clock. The clocks of two machines drift apart
            (tens of microseconds a second is usual), so an estimate ages.
    """

    offset: float
    round_trip: float
    measured_at: float

    @classmethod
    def measure(cls, *, sent: float, received: float, peer_clock: float) -> ClockOffset | None:
        """From one round trip: our clock when the request left and when the reply came, and the
        peer's clock in between. ``None`` if the values cannot be right (not finite, or a reply
        before the request)."""
        round_trip = received - sent
        offset = peer_clock - (sent + received) / 2
        if not (math.isfinite(offset) and math.isfinite(round_trip) and round_trip >= 0):
            return None
        return cls(offset, round_trip, received)

    def better(self, other: ClockOffset | None) -> ClockOffset:
        """The estimate with the shorter round trip; the other one on a tie is ignored."""
        return self if other is None or self.round_trip <= other.round_trip else other

    def to_local(self, peer_time: float) -> float:
        """A time on the peer's clock as a time on ours: the best guess."""
        return peer_time - self.offset

    def local_deadline(self, peer_deadline: float) -> float:
        """A deadline on the peer's clock as one on ours, never later than the true one (clock
        drift since ``measured_at`` aside)."""
        return peer_deadline - self.offset - self.round_trip / 2


def _check(deadline: float) -> None:
    if math.isnan(deadline):
        raise ValueError("deadline is NaN: give seconds, or math.inf for none")
