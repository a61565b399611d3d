"""Warnings that peers and clients can cause at will must not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LogLimiter"]


@dataclass(slots=True)
class _Kind:
    interval_ends: float
    lines: int = 0
    left_out: int = 0


class LogLimiter:
    """Lets a few warnings of a kind through per interval; the next one says how many it left out.

    Args:
        logger: where the warnings go.
        burst: lines of a kind per interval.
        interval: seconds.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        burst: int = 1,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = interval
        self._logger = logger
        self._burst = burst
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def warning(
        self, kind: str, message: str, *args: object, exc_info: BaseException | None = None
    ) -> None:
        """
        Args:
            kind: one of a fixed set, never a text from a peer; each has its own budget.
            message, args, exc_info: as for `logging.Logger.warning`.
        """
        now = self._clock()
        state = self._kinds.get(kind)
        if state is None:
            state = self._kinds[kind] = _Kind(now + self.interval)
        elif now >= state.interval_ends:
            state.interval_ends, state.lines = now + self.interval, 0
        if state.lines >= self._burst:
            state.left_out += 1
            return
        state.lines += 1
        more = ""
        if state.left_out:
            more = f" ({state.left_out} more like this since the last such line)"
            state.left_out = 0
        self._logger.warning(message + "%s", *args, more, exc_info=exc_info)
