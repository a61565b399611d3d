"""Heartbeats: which requests are renewed, when, in which messages, and what a dead engine costs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnixl.deadlines import Deadlines
from kvnixl.errors import PeerDisconnectedError
from kvnixl.heartbeat import (
    MAX_HEARTBEAT_BYTES,
    HeartbeatSender,
    HeartbeatTracker,
    RemoteRank,
)
from kvnixl.metadata import HeartbeatInfo, Lease, TransferParams
from kvnixl.wire import Heartbeat, parse_notification

LEASE = 30.0


def params(
    request_id: str = "p-1", *, engine: str = "P", lease: Lease | None = None, **changes: object
) -> TransferParams:
    values: dict[str, Any] = {
        "do_remote_prefill": True,
        "remote_engine_id": engine,
        "remote_request_id": request_id,
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "kvnixl_lease": None if lease is None else str(lease),
    }
    return TransferParams(**(values | changes))


class Outbox:
    """Stands in for the NIXL agent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.broken: set[str] = set()

    def __call__(self, agent: str, message: bytes) -> None:
        if agent in self.broken:
            raise PeerDisconnectedError("send_notif", "gone", peer=agent)
        self.sent.append((agent, message))

    def parsed(self, agent: str) -> list[Heartbeat]:
        parsed = [parse_notification(message) for to, message in self.sent if to == agent]
        assert all(isinstance(heartbeat, Heartbeat) for heartbeat in parsed)
        return parsed  # type: ignore[return-value]


def make_sender(outbox: Outbox, **options: int) -> HeartbeatSender:
    return HeartbeatSender(
        LEASE, outbox, sender=77, next_sequence=itertools.count(1).__next__, **options
    )


# --- which requests, when -----------------------------------------------------------------------


def test_a_request_is_renewed_from_the_moment_it_is_known_once_per_sixth_of_the_lease() -> None:
    tracker = HeartbeatTracker(LEASE)
    assert tracker.interval == 5.0
    assert tracker.take_due(0.0) == {}

    assert tracker.start("d-1", params("p-1"), 0.5)
    due = tracker.take_due(0.5)
    assert due == {"P": HeartbeatInfo({"p-1"}, "10.0.0.1", 5600, tp_size=2)}

    assert tracker.start("d-2", params("p-2"), 0.6)
    assert tracker.take_due(5.4) == {}
    assert tracker.take_due(5.5)["P"].req_ids == {"p-1", "p-2"}
    assert tracker.take_due(5.6) == {}


def test_requests_are_grouped_by_engine() -> None:
    tracker = HeartbeatTracker(LEASE)
    lease = Lease(3, 0xABC)
    tracker.start("d-1", params("p-1", engine="P1", lease=lease, dcp_size=2, pp_size=4), 0.0)
    tracker.start("d-2", params("p-2", engine="P2"), 0.0)
    tracker.start("d-3", params("p-3", engine="P1", dcp_size=2, pp_size=4), 0.0)
    assert tracker.take_due(0.0) == {
        "P1": HeartbeatInfo({"p-1", "p-3"}, "10.0.0.1", 5600, 2, 2, 4, leases={"p-1": lease}),
        "P2": HeartbeatInfo({"p-2"}, "10.0.0.1", 5600, 2),
    }


def test_finish_failure_and_abort_stop_the_renewal_and_leave_nothing_behind() -> None:
    tracker = HeartbeatTracker(LEASE)
    tracker.start("d-1", params("p-1"), 0.0)
    tracker.start("d-2", params("p-2"), 0.0)
    assert tracker.stop("d-1")
    assert not tracker.stop("d-1")
    assert not tracker.stop("never seen")
    assert tracker.take_due(0.0)["P"].req_ids == {"p-2"}
    assert tracker.stop("d-2")
    assert tracker.take_due(100.0) == {}
    assert len(tracker) == 0
    assert "d-2" not in tracker
    assert not tracker._groups


def test_of_several_requests_that_read_the_same_blocks_the_last_one_ends_the_renewal() -> None:
    tracker = HeartbeatTracker(LEASE)
    for sibling in ("d-1", "d-2", "d-3"):
        tracker.start(sibling, params("p-1"), 0.0)
    tracker.stop("d-1")
    tracker.stop("d-3")
    assert tracker.take_due(0.0)["P"].req_ids == {"p-1"}
    tracker.stop("d-2")
    assert tracker.take_due(10.0) == {}


def test_a_request_that_arrives_again_after_preemption_is_tracked_once() -> None:
    tracker = HeartbeatTracker(LEASE)
    tracker.start("d-1", params("p-1", engine="P1"), 0.0)
    tracker.start("d-1", params("p-9", engine="P2"), 1.0)
    assert len(tracker) == 1
    assert list(tracker.take_due(1.0)) == ["P2"]
    assert not tracker.start("d-1", params("p-9", do_remote_prefill=False), 2.0)
    assert len(tracker) == 0


@pytest.mark.parametrize(
    "missing",
    ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"],
)
def test_without_all_coordinates_there_is_nothing_to_renew(missing: str) -> None:
    tracker = HeartbeatTracker(LEASE)
    assert not tracker.start("d-1", params(**{missing: None}), 0.0)
    assert tracker.take_due(0.0) == {}


def test_what_was_handed_out_does_not_change_when_requests_come_and_go() -> None:
    tracker = HeartbeatTracker(LEASE)
    tracker.start("d-1", params("p-1"), 0.0)
    due = tracker.take_due(0.0)
    tracker.start("d-2", params("p-2"), 0.0)
    tracker.stop("d-1")
    assert due["P"].req_ids == {"p-1"}


def test_an_engine_that_never_answers_is_not_kept_for_ever() -> None:
    tracker = HeartbeatTracker(LEASE, give_up_after=100.0)
    tracker.start("d-1", params("p-1", engine="dead"), 0.0)
    tracker.start("d-2", params("p-2", engine="alive"), 0.0)
    now = 0.0
    while now < 95.0:
        assert set(tracker.take_due(now)) == {"dead", "alive"}
        tracker.answered("alive", now)
        now += tracker.interval
    assert set(tracker.take_due(100.0)) == {"alive"}
    assert tracker.given_up == 1
    assert len(tracker) == 1
    assert not tracker.stop("d-1")

    # A new request gives the engine a new chance.
    tracker.start("d-3", params("p-3", engine="dead"), 101.0)
    assert set(tracker.take_due(105.0)) == {"dead", "alive"}


def test_a_forged_address_for_an_engine_does_not_take_its_heartbeats_away() -> None:
    tracker = HeartbeatTracker(LEASE)
    tracker.start("forged", params("x", remote_host="203.0.113.9"), 0.0)
    tracker.start("d-1", params("p-1", lease=Lease(1, 2)), 0.0)
    tracker.start("d-2", params("p-2"), 0.0)
    (info,) = tracker.take_due(0.0).values()
    assert info.host == "10.0.0.1"
    assert info.req_ids == {"p-1", "p-2", "x"}
    # However many there are: the engine that was met under this id gets all of them.
    for number in range(5):
        tracker.start(f"forged {number}", params("x", remote_host="203.0.113.9"), 0.0)
    (info,) = tracker.take_due(LEASE).values()
    assert info.req_ids == {"p-1", "p-2", "x"}
    assert info.leases == {"p-1": Lease(1, 2)}


def test_two_leases_claimed_for_one_remote_request_are_settled_by_its_id() -> None:
    tracker = HeartbeatTracker(LEASE)
    tracker.start("d-1", params("p-1", lease=Lease(1, 2)), 0.0)
    tracker.start("forged", params("p-1", lease=Lease(9, 9)), 0.0)
    tracker.start("d-2", params("p-2", lease=Lease(1, 3)), 0.0)
    tracker.start("forged too", params("p-2"), 0.0)
    tracker.start("forged first", params("p-4"), 0.0)
    tracker.start("d-4", params("p-4", lease=Lease(1, 5)), 0.0)
    tracker.start("d-3", params("p-3", lease=Lease(1, 4)), 0.0)
    tracker.start("d-3 sibling", params("p-3", lease=Lease(1, 4)), 0.0)
    (info,) = tracker.take_due(0.0).values()
    assert info.req_ids == {"p-1", "p-2", "p-3", "p-4"}
    assert info.leases == {"p-3": Lease(1, 4)}


@pytest.mark.parametrize("lease", [0.0, -1.0, math.inf, math.nan])
def test_a_lease_duration_that_is_no_duration_is_refused(lease: float) -> None:
    with pytest.raises(ValueError, match="lease_duration"):
        HeartbeatTracker(lease)


def test_giving_up_within_a_lease_is_refused() -> None:
    with pytest.raises(ValueError, match="give_up_after"):
        HeartbeatTracker(LEASE, give_up_after=LEASE)


# --- the messages -------------------------------------------------------------------------------


def test_each_rank_gets_one_message_in_the_form_that_it_understands() -> None:
    outbox = Outbox()
    info = HeartbeatInfo({"p-1"}, "h", 1, 2, leases={"p-1": Lease(5, 6)})
    ranks = [RemoteRank("P-0", True), RemoteRank("P-1", True), RemoteRank("stock", False)]
    report = make_sender(outbox).send({"P": info}, lambda _: ranks, 0.0)
    assert report == (3, [], [], 0)
    for agent in ("P-0", "P-1"):
        (heartbeat,) = outbox.parsed(agent)
        assert heartbeat == Heartbeat((Lease(5, 6),), (), LEASE, 77, 1)
    assert [message for agent, message in outbox.sent if agent == "stock"] == [b"HB:p-1"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("leased", [True, False])
def test_ten_thousand_requests_are_split_below_the_limit_and_none_is_lost(
    binary: bool, leased: bool
) -> None:
    ids = {f"cmpl-{i:032x}-0-{i:08x}" for i in range(10_000)}
    leases = {req_id: Lease(i, i + 1) for i, req_id in enumerate(ids)} if leased else {}
    outbox = Outbox()
    report = make_sender(outbox).send(
        {"P": HeartbeatInfo(ids, "h", 1, 1, leases=leases)},
        lambda _: [RemoteRank("P-0", binary)],
        0.0,
    )
    assert report.messages == len(outbox.sent)
    sizes = [len(message) for _, message in outbox.sent]
    assert max(sizes) <= MAX_HEARTBEAT_BYTES
    assert sum(sizes[:-1]) > 0.95 * MAX_HEARTBEAT_BYTES * (len(sizes) - 1)  # well filled
    heartbeats = outbox.parsed("P-0")
    if binary and leased:
        named = [lease for heartbeat in heartbeats for lease in heartbeat.leases]
        assert sorted(named) == sorted(leases.values())
    else:
        texts = [req_id for heartbeat in heartbeats for req_id in heartbeat.request_ids]
        assert sorted(texts) == sorted(ids)
    if binary:
        assert [heartbeat.sequence for heartbeat in heartbeats] == list(
            range(1, len(heartbeats) + 1)
        )


@settings(deadline=None, max_examples=200)
@given(
    ids=st.sets(st.text(st.characters(), min_size=0, max_size=90), max_size=30),
    leased=st.integers(0, 30),
    binary=st.booleans(),
    limit=st.integers(64, 300),
)
def test_whatever_the_ids_every_sendable_one_arrives_and_messages_stay_below_the_limit(
    ids: set[str], leased: int, binary: bool, limit: int
) -> None:
    def sendable(req_id: str) -> bool:
        try:
            return bool(req_id.encode()) and (binary or "," not in req_id)
        except UnicodeEncodeError:
            return False

    leases = {req_id: Lease(i, i + 1) for i, req_id in enumerate(sorted(ids)[:leased])}
    outbox = Outbox()
    report = make_sender(outbox, max_message_bytes=limit).send(
        {"P": HeartbeatInfo(ids, "h", 1, 1, leases=leases)},
        lambda _: [RemoteRank("P-0", binary)],
        0.0,
    )
    heartbeats = outbox.parsed("P-0")
    named = {req_id for heartbeat in heartbeats for req_id in heartbeat.request_ids}
    want = {req_id for req_id in ids if sendable(req_id)}
    if binary:
        assert {lease for h in heartbeats for lease in h.leases} == set(leases.values())
        want -= leases.keys()
        assert report.unsendable == len(ids - leases.keys()) - len(want)
    else:
        assert report.unsendable == len(ids) - len(want)
    assert named == want
    for _, message in outbox.sent:
        (heartbeat,) = [parse_notification(message)]
        assert isinstance(heartbeat, Heartbeat)
        assert len(message) <= limit or len(heartbeat.request_ids) == 1


def test_a_dead_rank_costs_the_others_nothing() -> None:
    outbox = Outbox()
    outbox.broken = {"P1-0"}
    infos = {
        "P1": HeartbeatInfo({"a"}, "h", 1, 2),
        "P2": HeartbeatInfo({"b"}, "h", 2, 1),
    }
    ranks = {
        "P1": [RemoteRank("P1-0", True), RemoteRank("P1-1", True)],
        "P2": [RemoteRank("P2-0", True)],
    }
    report = make_sender(outbox).send(infos, ranks.get, 0.0)
    assert [agent for agent, _ in outbox.sent] == ["P1-1", "P2-0"]
    assert report.messages == 2
    ((engine, agent, error),) = report.failed
    assert (engine, agent) == ("P1", "P1-0")
    assert isinstance(error, PeerDisconnectedError)


def test_an_engine_without_a_handshake_is_tried_ever_less_often() -> None:
    sender = make_sender(Outbox())
    heartbeats = {"P": HeartbeatInfo({"a"}, "h", 1, 1)}
    tries = [
        interval
        for interval in range(400)
        if sender.send(heartbeats, lambda _: None, interval * 5.0).to_connect
    ]
    assert tries == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255, 319, 383]

    # Once it answered, the next loss is tried at once again.
    sender.send(heartbeats, lambda _: [RemoteRank("P-0", True)], 2000.0)
    assert sender.send(heartbeats, lambda _: None, 2005.0).to_connect == ["P"]


def test_engines_that_nobody_waits_for_are_forgotten() -> None:
    sender = make_sender(Outbox())
    for i in range(100):
        sender.send({f"P{i}": HeartbeatInfo({"a"}, "h", 1, 1)}, lambda _: None, float(i))
    assert len(sender._backoff) == 1


def test_a_step_with_nothing_due_does_nothing() -> None:
    def unexpected(_: str) -> None:
        raise AssertionError

    assert make_sender(Outbox()).send({}, unexpected, 0.0) == (0, [], [], 0)


@pytest.mark.parametrize("owner_epoch", [-1e6, 0.0, 1e6])
def test_a_lease_lives_on_an_owner_whose_clock_is_a_million_seconds_off(owner_epoch: float) -> None:
    """The consumer's steps block for 10 s at a time, and every second message is lost."""
    tracker = HeartbeatTracker(LEASE, give_up_after=math.inf)
    outbox = Outbox()
    sender = make_sender(outbox)
    owner: Deadlines[Lease] = Deadlines()
    lease = Lease(1, 2)
    owner.add(lease, owner_epoch + LEASE)
    tracker.start("d-1", params("p-1", lease=lease), 0.0)

    now = 0.0
    for step in range(100):
        sender.send(tracker.take_due(now), lambda _: [RemoteRank("P-0", True)], now)
        for heartbeat in outbox.parsed("P-0") if step % 2 else []:
            assert heartbeat.extension is not None
            for renewed in heartbeat.leases:
                owner.extend(renewed, owner_epoch + now + min(heartbeat.extension, LEASE))
        outbox.sent.clear()
        now += 10.0
        assert owner.expired(owner_epoch + now) == []

    tracker.stop("d-1")
    sender.send(tracker.take_due(now), lambda _: [RemoteRank("P-0", True)], now)
    assert outbox.sent == []
    assert owner.expired(owner_epoch + now + LEASE) == [lease]


# --- with real NIXL -----------------------------------------------------------------------------


@pytest.fixture
def agents() -> Iterator[tuple[Any, Any]]:
    import nixl._api as api

    owner, consumer = (
        api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"])) for name in ("P", "D")
    )
    consumer.add_remote_agent(owner.get_agent_metadata())
    owner.add_remote_agent(consumer.get_agent_metadata())
    yield owner, consumer
    consumer.remove_remote_agent("P")
    owner.remove_remote_agent("D")


@pytest.mark.nixl
@pytest.mark.parametrize("binary", [True, False])
def test_nixl_delivers_the_heartbeats_of_ten_thousand_requests(
    agents: tuple[Any, Any], binary: bool
) -> None:
    owner, consumer = agents
    ids = {f"cmpl-{i:032x}-0-{i:08x}" for i in range(10_000)}
    sender = HeartbeatSender(
        LEASE, consumer.send_notif, sender=1, next_sequence=itertools.count(1).__next__
    )
    report = sender.send(
        {"P": HeartbeatInfo(ids, "h", 1, 1)}, lambda _: [RemoteRank("P", binary)], 0.0
    )
    assert report.failed == []
    received: list[bytes] = []
    end = time.monotonic() + 20
    while len(received) < report.messages and time.monotonic() < end:
        received += owner.get_new_notifs().get("D", [])
    named: list[str] = []
    for message in received:
        heartbeat = parse_notification(message)
        assert isinstance(heartbeat, Heartbeat)
        named += heartbeat.request_ids
    assert sorted(named) == sorted(ids)
