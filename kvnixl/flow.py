"""Flow control of a reader: who may post next within a budget of bytes and descriptors in flight.

Too many transfers at once slow all of them down, and a few large requests in front would let many
small ones wait. So what is in flight is bounded, and the request with the fewest bytes left goes
first. A request that has waited longer than ``patience`` goes before all others, in the order of
arrival, and nothing overtakes it until it was posted: nobody starves.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from kvnixl.errors import ConfigError

__all__ = ["FlowControl"]

K = TypeVar("K", bound=str)


class FlowControl(Generic[K]):
    """The queue of those that have something to post, and the budget of what is in flight.

    Args:
        max_bytes: bytes in flight at most.
        max_descs: descriptors in flight at most, counted after merging.
        patience: seconds after which a waiting key goes before smaller ones.

    Attributes:
        bytes_in_flight, descs_in_flight: what was taken of the budget.

    Raises:
        ConfigError: a bound is not positive, or the patience negative.
    """

    def __init__(self, max_bytes: int, max_descs: int, patience: float) -> None:
        if max_bytes < 1 or max_descs < 1:
            raise ConfigError(
                f"max_inflight_bytes {max_bytes} and max_inflight_descs {max_descs} must be at "
                "least 1"
            )
        if not patience >= 0:
            raise ConfigError(f"patience {patience} is not a number of seconds")
        self.bytes_in_flight = 0
        self.descs_in_flight = 0
        self._max_bytes = max_bytes
        self._max_descs = max_descs
        self._patience = patience
        self._arrivals: dict[K, float] = {}  # in the order of arrival
        self._current: dict[K, tuple[int, int]] = {}  # key -> its one valid entry of the heap
        self._heap: list[tuple[int, int, K]] = []  # (bytes left, sequence, key)
        self._sequence = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._arrivals)

    def add(self, key: K, num_bytes: int, now: float) -> None:
        """Queue a key that has ``num_bytes`` left to post, or tell that this number changed."""
        self._arrivals.setdefault(key, now)
        self._sequence += 1
        self._current[key] = (num_bytes, self._sequence)
        heapq.heappush(self._heap, (num_bytes, self._sequence, key))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(left, seq, key) for key, (left, seq) in self._current.items()]
            heapq.heapify(self._heap)

    def remove(self, key: K) -> None:
        """The key has nothing to post any more. Unknown keys are ignored."""
        self._arrivals.pop(key, None)
        self._current.pop(key, None)

    def next(self, now: float) -> K | None:
        """Who posts next, or ``None`` if nobody waits."""
        if not self._arrivals:
            self._heap.clear()
            return None
        oldest, arrived = next(iter(self._arrivals.items()))
        if now - arrived >= self._patience:
            return oldest
        heap = self._heap
        while True:
            num_bytes, sequence, key = heap[0]
            if self._current.get(key) == (num_bytes, sequence):
                return key
            heapq.heappop(heap)

    def fits(self, num_bytes: int, num_descs: int) -> bool:
        """Whether the budget has room. What is larger than the budget fits when it is alone."""
        if not self.descs_in_flight:
            return True
        return (
            self.bytes_in_flight + num_bytes <= self._max_bytes
            and self.descs_in_flight + num_descs <= self._max_descs
        )

    def take(self, num_bytes: int, num_descs: int) -> None:
        """Something was posted."""
        self.bytes_in_flight += num_bytes
        self.descs_in_flight += num_descs

    def give_back(self, num_bytes: int, num_descs: int) -> None:
        """It is over, or does not count any more."""
        self.bytes_in_flight -= num_bytes
        self.descs_in_flight -= num_descs
