"""Deadlines: the heap against a naive model, renewals, garbage, and times that cross clocks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnixl.deadlines import ClockOffset, Deadlines, rebase_deadline

TIMES = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False) | st.sampled_from(
    [0.0, 1.0, 2.0, 3.0, math.inf]
)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 20), TIMES),
    st.tuples(st.just("extend"), st.integers(0, 20), TIMES),
    st.tuples(st.just("remove"), st.integers(0, 20), st.just(0.0)),
    st.tuples(st.just("expired"), st.just(0), st.integers(-3, 10).map(float) | TIMES),
)


class NaiveDeadlines:
    """The same contract with a dict and a full scan."""

    def __init__(self) -> None:
        self.deadlines: dict[int, float] = {}

    def expired(self, now: float) -> list[int]:
        due = sorted((t, key) for key, t in self.deadlines.items() if t <= now)
        for _, key in due:
            del self.deadlines[key]
        return [key for _, key in due]


@settings(deadline=None, max_examples=300)
@given(st.lists(OPERATIONS, max_size=120))
def test_behaves_like_a_scan_over_all_keys(operations: list[tuple[str, int, float]]) -> None:
    real: Deadlines[int] = Deadlines()
    model = NaiveDeadlines()
    for operation, key, time in operations:
        known = key in model.deadlines
        if operation == "add":
            if known:
                with pytest.raises(ValueError, match="already has a deadline"):
                    real.add(key, time)
            else:
                real.add(key, time)
                model.deadlines[key] = time
        elif operation == "extend":
            assert real.extend(key, time) is known
            if known:
                model.deadlines[key] = max(model.deadlines[key], time)
        elif operation == "remove":
            assert real.remove(key) is known
            model.deadlines.pop(key, None)
        else:
            got = real.expired(time)
            times = dict(model.deadlines)
            want = model.expired(time)
            assert sorted(got) == sorted(want)
            assert [times[key] for key in got] == sorted(times[key] for key in got)
        assert len(real) == len(model.deadlines)
        for known_key, deadline in model.deadlines.items():
            assert known_key in real
            assert real.deadline(known_key) == deadline
        check = real.next_check()
        if model.deadlines:
            assert check is not None
            assert check <= min(model.deadlines.values())
        else:
            assert check is None


def test_a_renewed_head_hides_none_of_the_ten_thousand_expired_behind_it() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("renewed", 1.0)
    for i in range(10_000):
        # Two classes of lease durations in one heap.
        deadlines.add(f"short {i}", 2.0 + i * 1e-4)
        deadlines.add(f"long {i}", 480.0)
    deadlines.extend("renewed", 100.0)

    due = deadlines.expired(3.5)

    assert due == [f"short {i}" for i in range(10_000)]
    assert len(deadlines) == 10_001
    assert deadlines.expired(99.9) == []
    assert deadlines.expired(100.0) == ["renewed"]
    assert len(deadlines.expired(480.0)) == 10_000
    assert len(deadlines) == 0


def test_when_most_leases_were_renewed_the_expired_ones_among_them_still_surface() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for i in range(5_000):
        deadlines.add(i, 10.0 + i * 1e-3)
    for i in range(5_000):
        if i % 100:
            deadlines.extend(i, 50.0 - i * 1e-3)

    assert deadlines.expired(20.0) == list(range(0, 5_000, 100))
    assert deadlines.expired(45.0 + 1.5e-3) == [4999]
    assert len(deadlines) == 4_949


def test_keys_come_out_by_deadline_also_when_an_extension_changed_their_order() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.add("b", 3.0)
    deadlines.extend("a", 5.0)
    assert deadlines.expired(6.0) == ["b", "a"]


def test_extend_never_shortens() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("a", 10.0)
    assert deadlines.extend("a", 5.0)
    assert deadlines.deadline("a") == 10.0
    assert deadlines.expired(9.9) == []


def test_a_renewal_does_not_bring_back_what_has_ended() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.add("b", 1.0)
    deadlines.remove("a")
    assert deadlines.expired(1.0) == ["b"]
    assert not deadlines.extend("a", 9.0)
    assert not deadlines.extend("b", 9.0)
    assert deadlines.expired(10.0) == []


def test_a_key_that_was_removed_may_be_added_again_with_a_later_deadline() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.remove("a")
    deadlines.add("a", 5.0)
    assert deadlines.expired(2.0) == []
    assert deadlines.expired(5.0) == ["a"]
    assert deadlines.expired(6.0) == []


def test_endless_renewals_and_turnover_leave_bounded_garbage() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for i in range(100):
        deadlines.add(i, 10.0)
    for i in range(20_000):
        deadlines.extend(i % 100, 10.0 + i)
    assert len(deadlines._heap) == 100

    for i in range(100, 20_000):
        deadlines.remove(i - 100)
        deadlines.add(i, 1e9)
        assert len(deadlines._heap) <= 2 * len(deadlines) + 65
    assert len(deadlines) == 100


def test_an_idle_call_does_not_look_beyond_the_head() -> None:
    class Counted(list[object]):
        reads = 0

        def __getitem__(self, index: object) -> object:
            Counted.reads += 1
            return super().__getitem__(index)  # type: ignore[index]

    deadlines: Deadlines[int] = Deadlines()
    for i in range(1_000):
        deadlines.add(i, 100.0 + i)
    deadlines._heap = Counted(deadlines._heap)  # type: ignore[assignment]
    for _ in range(10):
        assert deadlines.expired(1.0) == []
    assert Counted.reads == 10


def test_clear_forgets_everything() -> None:
    deadlines: Deadlines[int] = Deadlines()
    deadlines.add(1, 1.0)
    deadlines.clear()
    assert len(deadlines) == 0
    assert deadlines.expired(math.inf) == []
    deadlines.add(1, 2.0)
    assert deadlines.expired(2.0) == [1]


def test_nan_is_refused_because_it_would_break_the_order() -> None:
    deadlines: Deadlines[str] = Deadlines()
    with pytest.raises(ValueError, match="NaN"):
        deadlines.add("a", math.nan)
    assert len(deadlines) == 0
    deadlines.add("a", 1.0)
    with pytest.raises(ValueError, match="NaN"):
        deadlines.extend("a", math.nan)
    assert deadlines.expired(1.0) == ["a"]


@pytest.mark.parametrize("epoch", [-1e6, 0.0, 1e6])
def test_a_deadline_is_rebased_across_clocks_a_million_seconds_apart(epoch: float) -> None:
    scheduler_now = 5.0
    worker_now = scheduler_now + epoch + 0.25  # a quarter of a second in transit
    deadline = rebase_deadline(scheduler_now + 30.0, sender_now=scheduler_now, now=worker_now)

    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("request", deadline)
    assert deadlines.expired(worker_now) == []
    assert deadlines.expired(worker_now + 29.9) == []
    assert deadlines.expired(worker_now + 30.0 + 1e-6) == ["request"]


def test_a_deadline_that_had_passed_when_it_was_sent_stays_passed() -> None:
    assert rebase_deadline(99.0, sender_now=100.0, now=1e6) == 1e6 - 1.0


@settings(deadline=None)
@given(
    epoch=st.sampled_from([-1e6, -1.0, 0.0, 1e6]),
    out=st.floats(0.0, 0.5),
    back=st.floats(0.0, 0.5),
    left=st.floats(0.0, 500.0),
)
def test_a_local_deadline_is_never_later_than_the_peers_true_one(
    epoch: float, out: float, back: float, left: float
) -> None:
    sent = 1000.0
    peer_clock = sent + out + epoch
    clock = ClockOffset.measure(sent=sent, received=sent + out + back, peer_clock=peer_clock)
    assert clock is not None
    assert abs(clock.offset - epoch) <= clock.round_trip / 2 + 1e-6

    true_deadline = sent + left
    local = clock.local_deadline(true_deadline + epoch)
    assert true_deadline - clock.round_trip - 1e-6 <= local <= true_deadline + 1e-6
    assert abs(clock.to_local(true_deadline + epoch) - true_deadline) <= clock.round_trip / 2 + 1e-6


def test_the_shortest_round_trip_tells_the_offset() -> None:
    slow = ClockOffset.measure(sent=0.0, received=1.0, peer_clock=100.9)
    fast = ClockOffset.measure(sent=2.0, received=2.01, peer_clock=102.005)
    assert slow is not None
    assert fast is not None
    assert fast.better(slow) is fast
    assert slow.better(fast) is fast
    assert slow.better(None) is slow
    assert fast.offset == pytest.approx(100.0)


@pytest.mark.parametrize("peer_clock", [math.nan, math.inf, -math.inf])
def test_a_peer_clock_that_is_no_time_gives_no_offset(peer_clock: float) -> None:
    assert ClockOffset.measure(sent=0.0, received=1.0, peer_clock=peer_clock) is None


def test_a_reply_before_its_request_gives_no_offset() -> None:
    assert ClockOffset.measure(sent=1.0, received=0.5, peer_clock=0.0) is None
