"""Warnings that peers can cause at will."""

from __future__ import annotations

import logging

import pytest

from kvnixl.loglimit import LogLimiter

logger = logging.getLogger("tests.loglimit")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("burst", [1, 3])
def test_the_next_line_says_how_many_were_left_out(
    burst: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    limiter = LogLimiter(logger, burst=burst, interval=10.0, clock=clock)
    for _ in range(burst + 4):
        limiter.warning("a", "cause %s", "A")
    limiter.warning("b", "cause %s", "100 %")
    clock.now += 9.9
    limiter.warning("a", "cause %s", "A")
    clock.now += 0.1
    for _ in range(2):
        limiter.warning("a", "cause %s", "A")
    assert [record.message for record in caplog.records] == [
        *["cause A"] * burst,
        "cause 100 %",
        "cause A (5 more like this since the last such line)",
        *["cause A"] * (burst > 1),
    ]


def test_a_quiet_interval_gives_the_whole_burst_back(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limiter = LogLimiter(logger, burst=2, interval=10.0, clock=clock)
    for _ in range(3):
        clock.now += 25.0
        for _ in range(2):
            limiter.warning("a", "x")
    assert [record.message for record in caplog.records] == ["x"] * 6
