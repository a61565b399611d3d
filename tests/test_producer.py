"""The producer alone: what ends a lease, what does not, and when an end may be reported."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvnixl.leases
from kvnixl.agent import LOCAL_SIDE, Agent, wait_until
from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import (
    BlockListError,
    ClosedError,
    ConfigError,
    KvNixlError,
    RegistrationError,
)
from kvnixl.fake import FakeFabric, Plan, nixlBackendError
from kvnixl.handshake import HandshakeClient, HandshakeDone, HandshakeServer
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.leases import (
    LeaseSlotAllocator,
    LeaseVerifier,
    lease_slot_descs,
)
from kvnixl.metadata import Lease, PromptDigest, PushRegistration, TransferParams
from kvnixl.producer import (
    EmbeddedProducer,
    EndedLease,
    LeaseOutcome,
    Producer,
    ProducerCounters,
)
from kvnixl.topology import consumer_count
from kvnixl.wire import (
    MAX_NOTIFICATION_BYTES,
    Outcome,
    decode_agent_metadata,
    decode_handshake_payload,
    encode_agent_metadata,
    encode_completion,
    encode_heartbeat,
    encode_push_registration,
    encode_text_completion,
    encode_text_heartbeat,
)
from tests.procs import Child

NUM_BLOCKS = 16
BLOCK_BYTES = 64
NUM_SLOTS = 8
LEASE_S = 30.0
PARK_S = 20.0
COMPAT = CompatibilityCheck({"model": "m", "dtype": "float32"})

READ, RELEASED, EXPIRED, ABORTED = LeaseOutcome


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Reader:
    """A reading worker, as far as its notifications go."""

    def __init__(self, fabric: FakeFabric, name: str, sender: int) -> None:
        self.raw = fabric.agent(name)
        self.raw.add_remote_agent(fabric.agents["P"].get_agent_metadata())
        self.sender = sender
        self.sequence = 0

    def send(self, message: bytes) -> None:
        self.raw.send_notif("P", message)

    def completion(
        self,
        outcome: Outcome = Outcome.DONE,
        consumers: int = 1,
        leases: list[tuple[int, int]] | None = None,
        ids: list[str] | None = None,
    ) -> bytes:
        self.sequence += 1
        return encode_completion(
            outcome,
            consumers,
            sender=self.sender,
            sequence=self.sequence,
            leases=leases or (),
            request_ids=ids or (),
        )

    def done(self, *leases: tuple[int, int], consumers: int = 1) -> None:
        self.send(self.completion(consumers=consumers, leases=list(leases)))

    def done_ids(self, *ids: str, consumers: int = 1) -> None:
        self.send(self.completion(consumers=consumers, ids=list(ids)))

    def text(self, req_id: str, consumers: int = 1) -> None:
        self.send(encode_text_completion(req_id, consumers))

    def heartbeat(
        self,
        extension: float = LEASE_S,
        leases: list[tuple[int, int]] | None = None,
        ids: list[str] | None = None,
    ) -> bytes:
        self.sequence += 1
        return encode_heartbeat(
            extension,
            sender=self.sender,
            sequence=self.sequence,
            leases=leases or (),
            request_ids=ids or (),
        )

    def renew(self, *leases: tuple[int, int], extension: float = LEASE_S) -> None:
        self.send(self.heartbeat(extension, leases=list(leases)))


def make_layout(buffer: npt.NDArray[np.uint8]) -> CacheLayout:
    return layout_from_addresses(
        {"layers.0": buffer.ctypes.data},
        block_len=BLOCK_BYTES,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        num_kv_heads=1,
    )


class Rig:
    """One producer on the fake agent ``P``, its readers, and what readers can see of its slots.

    ``published`` is a copy of the slot words made at each fence: a store that was not fenced is not
    in it. Every end is checked against it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.fabric = FakeFabric()
        self.clock = Clock()
        self.buffer = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.layout = make_layout(self.buffer)
        self.agent = Agent(self.fabric.agent("P"))
        self.leases: dict[str, Lease] = {}
        self.reported: list[EndedLease] = []
        self.next_nonce = 100
        self.producer = Producer(
            self.agent,
            self.layout,
            **{
                "engine_id": "prefill",
                "num_lease_slots": NUM_SLOTS,
                "lease_duration": LEASE_S,
                "park_seconds": PARK_S,
                "clock": self.clock,
                **options,
            },
        )
        self.published = np.zeros(NUM_SLOTS, np.int64)
        monkeypatch.setattr(kvnixl.leases, "revoke_fence", self.publish)

    def publish(self) -> None:
        if self.producer._slots is not None:
            self.published[:] = self.producer._slots.words

    def reader(self, name: str, sender: int | None = None) -> Reader:
        return Reader(self.fabric, name, len(self.fabric.agents) if sender is None else sender)

    def arm(self, req_id: str, slot: int) -> Lease:
        self.next_nonce += 1
        lease = self.leases[req_id] = Lease(slot, self.next_nonce)
        self.producer.update((), {req_id: lease})
        return lease

    def hold(
        self, req_id: str, slot: int | None = 0, seconds: float = 10.0, consumers: int = 1
    ) -> Lease:
        """Hold a request under a lease in ``slot``; without one when it is ``None``."""
        lease = Lease(0, 0) if slot is None else self.arm(req_id, slot)
        self.producer.hold(req_id, seconds, consumers)
        return lease

    def step(self) -> dict[str, str]:
        ended = self.producer.step()
        for req_id, _ in ended:
            assert req_id not in self.producer
            lease = self.leases.get(req_id)
            assert lease is None or self.published[lease.slot] != lease.nonce, "not revoked"
        self.reported += ended
        return {req_id: str(outcome) for req_id, outcome in ended}

    @property
    def counters(self) -> ProducerCounters:
        return self.producer.counters

    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.counters.as_dict().items() if count}


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(monkeypatch, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        held = len(rig.producer)
        rig.reported += rig.producer.close()
        counters = rig.counters
        ends = counters.read + counters.released + counters.expired + counters.aborted
        assert counters.held == ends == len(rig.reported), "every lease ends exactly once"
        assert counters.internal_errors == 0
        assert counters.aborted >= held
        if "P" in rig.fabric.agents:
            rig.fabric.agents["P"]._inbox.clear()
            rig.fabric.assert_clean("P")
        assert rig.agent.close() == 0


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


# --- how a lease ends -----------------------------------------------------------------------------


def test_a_reader_that_names_the_lease_ends_it_once(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.hold("a", slot=3)
    assert rig.published[3] == lease.nonce
    assert rig.step() == {}
    reader.done(lease)
    assert rig.step() == {"a": "read"}
    assert rig.step() == {}
    assert rig.counted() == {"held": 1, "read": 1, "completions": 1}


def test_nothing_is_reported_before_its_slot_was_cleared_and_fenced(rig: Rig) -> None:
    reader = rig.reader("D")
    leases = [rig.hold(f"r{slot}", slot, seconds=5.0) for slot in range(4)]
    reader.done(leases[0])
    reader.send(reader.completion(Outcome.FAILED, leases=[leases[1]]))
    rig.producer.abort("r2")
    assert rig.published.tolist()[:4] == [lease.nonce for lease in leases]
    rig.clock.now += 5.0
    assert rig.step() == {"r0": "read", "r1": "released", "r2": "aborted", "r3": "expired"}
    assert not rig.published.any()


def test_a_step_in_which_nothing_ended_makes_no_fence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.hold("a")
    fences: list[None] = []
    monkeypatch.setattr(kvnixl.leases, "revoke_fence", lambda: fences.append(None))
    rig.step()
    assert fences == []


def test_a_lease_of_several_consumers_ends_after_all_of_them(rig: Rig) -> None:
    readers = [rig.reader(f"D{i}") for i in range(3)]
    lease = rig.hold("a", consumers=3)
    for reader in readers[:2]:
        reader.done(lease)
        assert rig.step() == {}
    readers[2].done(lease)
    assert rig.step() == {"a": "read"}


def test_the_same_sender_counts_once(rig: Rig) -> None:
    first, second = rig.reader("D0"), rig.reader("D1")
    lease = rig.hold("a", consumers=2)
    message = first.completion(leases=[lease])
    first.send(message)
    first.send(message)
    first.done(lease)  # another message of the same sender
    assert rig.step() == {}
    assert rig.counters.duplicate_completions == 2
    second.done(lease)
    assert rig.step() == {"a": "read"}


def test_two_workers_with_equal_numbers_on_different_agents_are_two(rig: Rig) -> None:
    lease = rig.hold("a", consumers=2)
    for name in ("D0", "D1"):
        rig.reader(name, sender=7).done(lease)
    assert rig.step() == {"a": "read"}


def test_a_notification_raises_the_number_of_consumers_and_never_lowers_it(rig: Rig) -> None:
    readers = [rig.reader(f"D{i}") for i in range(3)]
    wide, narrow = rig.hold("wide", 0, consumers=1), rig.hold("narrow", 1, consumers=3)
    for reader in readers[:2]:
        reader.done(wide, consumers=3)
        reader.done(narrow, consumers=1)
        assert rig.step() == {}
    readers[2].done(wide, narrow)
    assert rig.step() == {"wide": "read", "narrow": "read"}


def test_two_workers_that_share_an_agent_are_two(rig: Rig) -> None:
    lease = rig.hold("a", consumers=2)
    reader = rig.reader("D", sender=7)
    reader.done(lease)
    assert rig.step() == {}
    reader.sender = 8
    reader.done(lease)
    assert rig.step() == {"a": "read"}


@pytest.mark.parametrize(("tp_producer", "tp_reader"), [(1, 4), (2, 4), (4, 2), (4, 4)])
def test_all_ranks_of_a_reading_engine_have_to_be_through(
    rig: Rig, tp_producer: int, tp_reader: int
) -> None:
    consumers = consumer_count(0, tp_producer, tp_reader)
    lease = rig.hold("a")
    for rank in range(consumers):
        assert rig.step() == {}
        rig.reader(f"D{rank}").done(lease, consumers=consumers)
    assert rig.step() == {"a": "read"}


def test_a_lease_counts_as_read_only_if_every_consumer_read(rig: Rig) -> None:
    outcomes = {
        "both": [Outcome.DONE, Outcome.DONE],
        "one": [Outcome.DONE, Outcome.RELEASED],
        "tried": [Outcome.FAILED, Outcome.DONE],
        "none": [Outcome.RELEASED, Outcome.FAILED],
    }
    readers = [rig.reader(f"D{i}") for i in range(2)]
    for slot, (req_id, parts) in enumerate(outcomes.items()):
        lease = rig.hold(req_id, slot, consumers=2)
        for reader, outcome in zip(readers, parts, strict=True):
            reader.send(reader.completion(outcome, leases=[lease]))
    released = {"one": "released", "tried": "released", "none": "released"}
    assert rig.step() == {"both": "read"} | released
    assert rig.counters.failed_completions == 2


def test_one_notification_ends_several_leases(rig: Rig) -> None:
    leases = [rig.hold(f"r{slot}", slot) for slot in range(3)]
    rig.reader("D").done(*leases)
    assert rig.step() == dict.fromkeys(("r0", "r1", "r2"), "read")


def test_three_siblings_of_one_prompt_each_end_on_their_own(rig: Rig) -> None:
    """Of n siblings only one is ever read: the others end by their deadlines, none hangs."""
    leases = [rig.hold(f"{i}_cmpl-1", i, seconds=10.0) for i in range(3)]
    rig.reader("D").done(leases[1])
    assert rig.step() == {"1_cmpl-1": "read"}
    rig.clock.now += 10.0
    assert rig.step() == {"0_cmpl-1": "expired", "2_cmpl-1": "expired"}


# --- who may end it -------------------------------------------------------------------------------


def test_only_a_peer_that_was_given_the_lease_can_end_it(rig: Rig) -> None:
    stranger = rig.reader("stranger")
    lease = rig.hold("a", slot=3)
    stranger.done((3, lease.nonce + 1))
    stranger.done((4, lease.nonce))
    stranger.done((3, 1))
    stranger.done_ids("a")
    assert rig.step() == {}
    assert rig.counters.refused_completions == 1
    assert rig.counters.completions == 0
    rig.clock.now += 5.0
    assert rig.step() == {}
    assert rig.published[3] == lease.nonce


def test_a_stock_peer_ends_a_request_by_its_id_also_one_with_a_lease(rig: Rig) -> None:
    stock = rig.reader("D")
    rig.hold("leased", slot=0)
    rig.hold("plain", slot=None)
    stock.text("leased")
    stock.text("plain")
    assert rig.step() == {"leased": "read", "plain": "read"}


def test_stock_completions_can_be_refused_for_requests_with_a_lease(make_rig: MakeRig) -> None:
    rig = make_rig(stock_peers=False)
    stock = rig.reader("D")
    rig.hold("leased", slot=0)
    rig.hold("plain", slot=None)
    stock.text("leased")
    stock.text("plain")
    assert rig.step() == {"plain": "read"}
    assert rig.counters.refused_completions == 1


def test_a_stock_engine_with_two_ranks_notifies_twice(rig: Rig) -> None:
    first, second = rig.reader("D0"), rig.reader("D1")
    rig.hold("a")
    first.text("a", 2)
    first.text("a", 2)  # one rank twice is not two ranks
    assert rig.step() == {}
    assert rig.counters.duplicate_completions == 1
    second.text("a", 2)
    assert rig.step() == {"a": "read"}


REQUEST_IDS = st.one_of(
    st.sampled_from(["HB:a", "PUSH_REG:x", "a:1", "a:1:2", "a,b", "a_b", "\xff", ":", "é:💥", " "]),
    st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable() or "\x00" in text),
)


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(REQUEST_IDS, min_size=2, max_size=6, unique=True))
def test_no_request_id_is_mistaken_for_another_request_or_a_command(ids: list[str]) -> None:
    """Ids with ``:``, ``,``, ``_``, ``HB:`` and any Unicode end exactly the request they name."""
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        reader = rig.reader("D")
        for req_id in ids:
            rig.hold(req_id, slot=None)
        for req_id in ids:
            reader.done_ids(req_id)
            assert rig.step() == {req_id: "read"}
        leases = [rig.hold(req_id, slot) for slot, req_id in enumerate(ids)]
        for req_id, lease in zip(ids, leases, strict=True):
            reader.done(lease)
            assert rig.step() == {req_id: "read"}
        assert rig.counters.malformed == 0
        rig.producer.close()


# --- time -----------------------------------------------------------------------------------------


def test_an_expired_lease_ends_in_the_next_step(rig: Rig) -> None:
    rig.hold("a", 0, seconds=10.0)
    rig.clock.now += 9.99
    assert rig.step() == {}
    rig.clock.now += 0.02
    assert rig.step() == {"a": "expired"}


@pytest.mark.parametrize("epoch", [-1e6, 0.0, 1e6, 1e9])
def test_only_what_is_left_of_a_lease_counts_whatever_the_clocks_epoch(
    make_rig: MakeRig, epoch: float
) -> None:
    rig = make_rig(clock=(clock := Clock(epoch)))
    rig.hold("a", 0, seconds=10.0)
    clock.now += 9.0
    assert rig.step() == {}
    clock.now += 1.5
    assert rig.step() == {"a": "expired"}


@pytest.mark.parametrize("remaining", [0.0, -5.0, -math.inf])
def test_a_lease_without_time_left_ends_in_the_next_step(rig: Rig, remaining: float) -> None:
    rig.hold("a", 0, seconds=remaining)
    assert rig.step() == {"a": "expired"}


def test_a_lease_without_limit_is_held_until_its_readers_are_through(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=math.inf)
    rig.clock.now += 1e9
    assert rig.step() == {}
    rig.reader("D").done(lease)
    assert rig.step() == {"a": "read"}


def test_a_completion_that_arrived_is_counted_before_the_deadline_is_judged(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=10.0)
    rig.reader("D").done(lease)
    rig.clock.now += 1000.0
    assert rig.step() == {"a": "read"}


def test_a_heartbeat_that_arrived_is_counted_before_the_deadline_is_judged(rig: Rig) -> None:
    """The owner's own loop may stall for longer than a lease."""
    lease = rig.hold("a", 0, seconds=10.0)
    rig.reader("D").renew(lease)
    rig.clock.now += 1000.0
    assert rig.step() == {}
    rig.clock.now += LEASE_S - 1
    assert rig.step() == {}
    rig.clock.now += 2.0
    assert rig.step() == {"a": "expired"}


def test_heartbeats_extend_by_lease_by_id_and_as_text(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.hold("lease", 0, seconds=10.0)
    for slot, req_id in enumerate(["id", "text", "other"], 1):
        rig.hold(req_id, slot, seconds=10.0)
    rig.clock.now += 9.0
    reader.renew(lease)
    reader.send(reader.heartbeat(ids=["id"]))
    reader.send(encode_text_heartbeat(["text", "nobody"]))
    assert rig.step() == {}
    rig.clock.now += 2.0
    assert rig.step() == {"other": "expired"}
    rig.clock.now += LEASE_S - 2.5
    assert rig.step() == {}
    rig.clock.now += 1.0
    assert rig.step() == dict.fromkeys(("lease", "id", "text"), "expired")
    assert rig.counters.heartbeats == 3
    assert rig.counters.unknown_heartbeats == 1


def test_a_heartbeat_never_shortens_a_lease(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=100.0)
    rig.reader("D").renew(lease, extension=0.001)
    rig.step()
    rig.clock.now += 99.0
    assert rig.step() == {}


def test_a_reader_may_ask_for_less_than_the_owner_grants_but_not_for_more(rig: Rig) -> None:
    reader = rig.reader("D")
    modest, greedy = rig.hold("modest", 0, seconds=1.0), rig.hold("greedy", 1, seconds=1.0)
    reader.renew(modest, extension=5.0)
    reader.renew(greedy, extension=4e6)
    assert rig.step() == {}
    rig.clock.now += 5.5
    assert rig.step() == {"modest": "expired"}
    rig.clock.now += LEASE_S
    assert rig.step() == {"greedy": "expired"}


def test_a_late_heartbeat_brings_nothing_back(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.hold("a", 0, seconds=10.0)
    rig.clock.now += 10.0
    assert rig.step() == {"a": "expired"}
    reader.renew(lease)
    reader.send(encode_text_heartbeat(["a"]))
    assert rig.step() == {}
    assert len(rig.producer) == 0
    assert rig.counters.unknown_heartbeats == 2


def test_a_heartbeat_needs_the_lease_itself(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=10.0)
    rig.reader("D").renew((lease.slot, lease.nonce + 1))
    rig.clock.now += 10.0
    assert rig.step() == {"a": "expired"}


def test_one_renewed_lease_in_front_hides_none_of_many_expired_ones(make_rig: MakeRig) -> None:
    rig = make_rig(num_lease_slots=0)
    rig.hold("renewed", None, seconds=1.0)
    for i in range(2_000):
        rig.hold(f"r{i}", None, seconds=2.0 + i % 2)
    reader = rig.reader("D")
    reader.send(reader.heartbeat(ids=["renewed"]))
    assert rig.step() == {}
    rig.clock.now += 2.5
    assert len(rig.step()) == 1_000
    rig.clock.now += 1.0
    assert len(rig.step()) == 1_000
    assert rig.producer.held_requests() == ["renewed"]


def test_a_dead_reader_costs_its_own_leases_only_and_only_until_they_expire(rig: Rig) -> None:
    dead, alive = rig.reader("dead"), rig.reader("alive")
    lost, read = rig.hold("lost", 0, seconds=10.0), rig.hold("read", 1, seconds=10.0)
    dead.renew(lost)
    rig.fabric.kill("dead")
    alive.done(read)
    assert rig.step() == {"read": "read"}
    rig.clock.now += LEASE_S
    assert rig.step() == {"lost": "expired"}


def test_next_check_tells_how_long_nothing_expires(rig: Rig) -> None:
    assert rig.producer.next_check() is None
    rig.hold("a", 0, seconds=10.0)
    assert rig.producer.next_check() == rig.clock.now + 10.0


# --- early, late, repeated ------------------------------------------------------------------------


def test_a_completion_that_comes_before_its_request_is_held_counts(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.arm("by lease", 0)
    reader.done(lease)
    reader.text("by id")
    reader.done_ids("unleased")
    assert rig.step() == {}
    rig.clock.now += PARK_S - 1
    assert rig.step() == {}
    for req_id in ("by lease", "by id", "unleased"):
        rig.producer.hold(req_id, 10.0)
    assert rig.step() == dict.fromkeys(("by lease", "by id", "unleased"), "read")
    assert rig.counters.early_completions == 3


def test_early_completions_of_some_of_the_consumers_count(rig: Rig) -> None:
    readers = [rig.reader(f"D{i}") for i in range(3)]
    lease = rig.arm("a", 0)
    readers[0].done(lease)
    readers[1].done(lease)
    readers[1].done(lease)
    assert rig.step() == {}
    rig.producer.hold("a", 10.0, consumers=3)
    assert rig.step() == {}
    readers[2].done(lease)
    assert rig.step() == {"a": "read"}
    assert rig.counters.duplicate_completions == 1


def test_more_early_completions_than_consumers_end_the_request_once(rig: Rig) -> None:
    lease = rig.arm("a", 0)
    for i in range(3):
        rig.reader(f"D{i}").done(lease)
    assert rig.step() == {}
    rig.producer.hold("a", 10.0)
    assert rig.step() == {"a": "read"}
    assert rig.counted() == {
        "held": 1,
        "read": 1,
        "completions": 1,
        "early_completions": 1,
        "late_completions": 2,
    }


def test_an_early_completion_by_id_does_not_end_a_request_with_a_lease(rig: Rig) -> None:
    rig.reader("D").done_ids("a")
    assert rig.step() == {}
    rig.hold("a", 0)
    assert rig.step() == {}
    assert rig.counters.refused_completions == 1


def test_early_completions_are_kept_for_a_bounded_time(rig: Rig) -> None:
    rig.reader("D").text("a")
    assert rig.step() == {}
    rig.clock.now += PARK_S
    assert rig.step() == {}
    assert rig.counters.unknown_completions == 1
    assert rig.producer._num_parked == 0
    rig.hold("a", 0)
    assert rig.step() == {}


def test_early_completions_are_kept_in_bounded_number(make_rig: MakeRig) -> None:
    rig = make_rig(max_parked=3)
    reader = rig.reader("D")
    for i in range(10):
        reader.text(f"r{i}")
    assert rig.step() == {}
    assert rig.counters.dropped_completions == 7
    assert rig.producer._num_parked == 3
    for i in range(10):
        rig.hold(f"r{i}", None)
    assert rig.step() == dict.fromkeys(("r7", "r8", "r9"), "read")
    assert rig.producer._num_parked == 0


@pytest.mark.parametrize("end", ["read", "expired", "aborted"])
def test_a_late_completion_frees_nothing_not_even_a_new_request_of_that_id(
    rig: Rig, end: str
) -> None:
    late, other = rig.reader("D0"), rig.reader("D1")
    lease = rig.hold("a", 0, seconds=10.0)
    if end == "read":
        other.done(lease)
    elif end == "expired":
        rig.clock.now += 10.0
    else:
        rig.producer.abort("a")
    assert rig.step() == {"a": end}
    late.done(lease)
    late.text("a")
    assert rig.step() == {}
    assert rig.counters.late_completions == 2
    rig.hold("a", 1)
    assert rig.step() == {}
    late.done(lease)
    assert rig.step() == {}
    assert rig.counters.late_completions == 3


def test_a_repeated_message_does_not_end_a_later_request_of_the_same_id(rig: Rig) -> None:
    """Requests without a lease: the id alone does not tell the two apart."""
    reader = rig.reader("D")
    message = reader.completion(ids=["a"])
    rig.hold("a", None)
    reader.send(message)
    assert rig.step() == {"a": "read"}
    rig.hold("a", None)
    reader.send(message)
    assert rig.step() == {}
    reader.done_ids("a")
    assert rig.step() == {"a": "read"}


def test_completions_out_of_order_by_more_than_any_window_still_count(rig: Rig) -> None:
    """A message waits in its READ while the sender numbers thousands of others."""
    reader = rig.reader("D")
    lease, other = rig.hold("slow", 0), rig.hold("fast", 1)
    slow = reader.completion(leases=[lease])
    reader.sequence += 100_000
    reader.done(other)
    assert rig.step() == {"fast": "read"}
    reader.send(slow)
    assert rig.step() == {"slow": "read"}


def test_a_lost_completion_costs_the_rest_of_the_lease_only(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=10.0)
    rig.fabric.script_notice("lose")
    rig.reader("D").done(lease)
    assert rig.step() == {}
    rig.clock.now += 10.0
    assert rig.step() == {"a": "expired"}


# --- abort ----------------------------------------------------------------------------------------


def test_an_abort_of_what_was_never_held_is_no_error(rig: Rig) -> None:
    assert not rig.producer.abort("nobody")
    assert rig.step() == {}
    lease = rig.arm("armed", 2)
    assert not rig.producer.abort("armed")
    assert rig.step() == {}
    assert rig.published[2] == 0
    rig.reader("D").done(lease)
    assert rig.step() == {}
    rig.producer.hold("armed", 10.0)  # without the lease that was taken back
    assert rig.step() == {}


def test_an_abort_after_the_prefill_finished_frees_the_blocks_at_once(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=1e6)
    assert rig.producer.abort("a")
    assert "a" not in rig.producer
    assert not rig.producer.abort("a")
    rig.reader("D").done(lease)
    assert rig.step() == {"a": "aborted"}
    assert rig.counters.late_completions == 1


def test_an_abort_that_comes_after_the_reader_was_through_changes_nothing(rig: Rig) -> None:
    lease = rig.hold("a", 0)
    rig.reader("D").done(lease)
    assert rig.step() == {"a": "read"}
    assert not rig.producer.abort("a")
    assert rig.step() == {}


def test_a_reader_that_will_not_read_says_so_and_the_blocks_are_free(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.hold("a", 0)
    reader.send(reader.completion(Outcome.RELEASED, leases=[lease]))
    assert rig.step() == {"a": "released"}


# --- the scheduler's side -------------------------------------------------------------------------


def test_a_request_is_held_once(rig: Rig) -> None:
    rig.hold("a", 0)
    with pytest.raises(ValueError, match="'a' is held already"):
        rig.producer.hold("a", 10.0)
    rig.producer.abort("a")
    # The report that is still to come must not free the blocks of a second request.
    with pytest.raises(ValueError, match="not reported yet"):
        rig.producer.hold("a", 10.0)
    assert rig.step() == {"a": "aborted"}
    rig.hold("a", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((math.nan,), "NaN"), ((10.0, 0), "0 consumers"), ((10.0, 1 << 17), "131072 consumers")],
)
def test_a_bad_argument_holds_nothing(rig: Rig, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rig.producer.hold("a", *arguments)
    assert len(rig.producer) == 0
    assert rig.counters.held == 0


def test_a_lease_can_be_given_with_the_hold(rig: Rig) -> None:
    rig.producer.hold("a", 10.0, lease=(5, 77))
    assert rig.published[5] == 77
    rig.reader("D").done((5, 77))
    assert rig.step() == {"a": "read"}


def test_a_lease_can_be_armed_after_the_hold_even_if_its_reader_was_faster(rig: Rig) -> None:
    rig.hold("a", None)
    rig.reader("D").done((4, 99))
    assert rig.step() == {}
    rig.producer.update((), {"a": (4, 99)})
    assert rig.step() == {"a": "read"}


def test_a_clear_revokes_the_lease_at_once_and_leaves_the_request_held(rig: Rig) -> None:
    lease = rig.hold("a", 0, seconds=10.0)
    rig.producer.update({"a", "nobody"}, {})
    assert rig.published[0] == 0
    assert rig.step() == {}
    assert "a" in rig.producer
    reader = rig.reader("D")
    reader.send(reader.completion(Outcome.FAILED, leases=[lease]))
    assert rig.step() == {"a": "released"}


def test_a_lease_that_was_cleared_before_the_hold_ends_nothing(rig: Rig) -> None:
    lease = rig.arm("a", 0)
    rig.producer.update({"a"}, {})
    rig.producer.hold("a", 10.0)
    rig.reader("D").done(lease)
    assert rig.step() == {}
    assert rig.counters.completions == 0


def test_a_new_lease_takes_the_place_of_the_old_one(rig: Rig) -> None:
    reader = rig.reader("D")
    old = rig.hold("a", 0)
    new = rig.arm("a", 1)
    assert rig.published.tolist()[:2] == [0, new.nonce]
    reader.done(old)
    assert rig.step() == {}
    assert rig.counters.late_completions == 1
    reader.done(new)
    assert rig.step() == {"a": "read"}


def test_a_slot_that_was_armed_again_keeps_its_new_word_when_the_old_lease_ends(rig: Rig) -> None:
    rig.hold("a", 0, seconds=10.0)
    rig.producer.update({"a"}, {})
    later = rig.hold("b", 0, seconds=100.0)
    rig.clock.now += 10.0
    assert rig.step() == {"a": "expired"}
    assert rig.published[0] == later.nonce


def test_the_same_lease_for_two_requests_does_not_raise_out_of_a_step(rig: Rig) -> None:
    rig.producer.hold("a", 10.0, lease=(0, 5))
    rig.producer.hold("b", 10.0, lease=(0, 5))
    rig.clock.now += 10.0
    assert rig.step() == {"a": "expired", "b": "expired"}


def test_a_worker_without_slots_serves_requests_without_leases(make_rig: MakeRig) -> None:
    rig = make_rig(num_lease_slots=0)
    extension = rig.producer.metadata().kvnixl
    assert extension is not None
    assert extension.lease_slots is None
    rig.producer.update({"a"}, {})
    with pytest.raises(ConfigError, match="kv_lease_slots"):
        rig.producer.hold("a", 10.0, lease=(0, 1))
    rig.hold("a", None)
    rig.producer.abort("nobody")
    rig.reader("D").done_ids("a")
    assert rig.step() == {"a": "read"}


# --- nonsense -------------------------------------------------------------------------------------


def test_malformed_notifications_are_counted_and_free_nothing(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.hold("a", 0)
    good = reader.completion(leases=[lease])
    messages = [
        b"",
        b"a",
        b":1",
        b"a:",
        b"a:0",
        b"a:-1",
        b"a:1.0",
        b"HB:",
        b"HB:,,",
        b"\xff",
        b"\xff\xfe\xfd",
        b"PUSH_REG:",
        b"PUSH_REG:\xc1",
        good[:-1],
        good + b"\x00",
        good[:4] + b"\x09" + good[5:],
        b"x" * (MAX_NOTIFICATION_BYTES + 1),
    ]
    for message in messages:
        reader.send(message)
    assert rig.step() == {}
    assert rig.counters.malformed == len(messages)
    reader.done(lease)
    assert rig.step() == {"a": "read"}


@settings(deadline=None, max_examples=150)
@given(
    data=st.data(),
    garbage=st.binary(max_size=80),
    flip=st.integers(0, 100),
    with_byte=st.integers(0, 255),
)
def test_no_bytes_raise_out_of_a_step_or_end_a_lease(
    data: st.DataObject, garbage: bytes, flip: int, with_byte: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        reader = rig.reader("D")
        lease = rig.hold("a-request-of-ours", 3)
        # All that a peer without the nonce can know, damaged in one place.
        other = Lease(lease.slot, lease.nonce ^ (1 << data.draw(st.integers(0, 61))))
        framed = bytearray(
            data.draw(
                st.sampled_from(
                    [
                        reader.completion(leases=[other]),
                        reader.completion(ids=["a-request-of-ours"]),
                        b"\xffKVN" + garbage,
                        b"PUSH_REG:" + garbage,
                        b"HB:" + garbage,
                        garbage,
                    ]
                )
            )
        )
        if framed and flip < len(framed) - 12:
            framed[flip] = with_byte
        message = bytes(framed)
        reader.send(message)
        assert rig.step() == {}
        assert rig.producer.held_requests() == ["a-request-of-ours"]
        assert rig.counters.internal_errors == 0
        rig.producer.close()


def test_push_registrations_are_counted(rig: Rig) -> None:
    registration = PushRegistration(
        request_id="a",
        decode_engine_id="decode",
        decode_host="10.0.0.2",
        decode_port=5000,
        decode_tp_size=1,
        local_block_ids=[[1]],
        remote_engine_id="prefill",
        remote_host="10.0.0.1",
        remote_port=5001,
        remote_tp_size=1,
    )
    rig.reader("D").send(encode_push_registration(registration))
    assert rig.step() == {}
    assert rig.counted() == {"push_registrations": 1}


def test_nixl_failing_to_say_what_arrived_is_counted_and_deadlines_go_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    reader = rig.reader("D")
    rig.hold("a", 0, seconds=10.0)
    lease = rig.hold("b", 1, seconds=50.0)
    reader.done(lease)
    rig.fabric.fail("get_new_notifs", nixlBackendError, agent="P", times=3)
    for _ in range(2):
        assert rig.step() == {}
    rig.clock.now += 10.0
    assert rig.step() == {"a": "expired"}
    assert rig.counters.drain_errors == 3
    assert caplog.text.count("cannot be read") == 1
    assert rig.step() == {"b": "read"}


@pytest.mark.parametrize("arrived", [{"D": [7]}, {"D": None}, [b"a:1"], {"D": ["a:1"]}])
def test_an_agent_that_answers_nonsense_does_not_raise_out_of_a_step(
    make_rig: MakeRig, arrived: Any
) -> None:
    rig = make_rig()
    rig.hold("a", 0)
    rig.agent.get_new_notifs = lambda: arrived  # type: ignore[method-assign]
    assert rig.step() == {}
    assert rig.counters.internal_errors + rig.counters.drain_errors == 1
    rig.counters.internal_errors = 0


# --- start and end --------------------------------------------------------------------------------


def test_the_metadata_is_what_the_layout_and_the_slots_are(rig: Rig) -> None:
    metadata = decode_agent_metadata(encode_agent_metadata(rig.producer.metadata()))
    assert metadata.engine_id == "prefill"
    assert metadata.kv_caches_base_addr == [rig.buffer.ctypes.data]
    assert metadata.block_lens == [BLOCK_BYTES]
    assert metadata.num_blocks == NUM_BLOCKS
    extension = metadata.kvnixl
    assert extension is not None
    assert extension.incarnation == rig.producer.incarnation
    assert extension.features == ["lease_slots"]
    assert extension.lease_slots is not None
    assert extension.lease_slots.num_slots == NUM_SLOTS
    reader = rig.fabric.agent("D")
    assert reader.add_remote_agent(metadata.agent_metadata) == b"P"


def test_every_start_is_another_incarnation(make_rig: MakeRig) -> None:
    assert make_rig().producer.incarnation != make_rig().producer.incarnation
    assert make_rig(incarnation=5).producer.incarnation == 5


def test_what_was_said_to_an_earlier_start_frees_nothing(make_rig: MakeRig) -> None:
    before = make_rig()
    lease = before.hold("a", 0)
    message = before.reader("D").completion(leases=[lease])
    after = make_rig()
    after.next_nonce = 10**6  # an allocator starts at a random nonce
    after.hold("a", 0)
    after.reader("D").send(message)
    assert after.step() == {}


def test_closing_revokes_reports_and_deregisters(rig: Rig) -> None:
    reader = rig.reader("D")
    lease = rig.hold("a", 0)
    rig.hold("b", 1)
    rig.producer.abort("b")
    assert rig.fabric.agents["P"].registrations == 2
    reader.done(lease)
    ended = rig.producer.close()
    rig.reported += ended
    assert ended == [EndedLease("b", ABORTED), EndedLease("a", ABORTED)]
    assert not rig.published.any()
    assert rig.fabric.agents["P"].registrations == 0
    assert rig.producer.close() == []
    assert rig.producer.step() == []
    assert not rig.producer.abort("a")
    with pytest.raises(ClosedError):
        rig.producer.hold("c", 10.0)


def test_the_slots_are_revoked_before_their_memory_is_given_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.hold("a", 0)
    order: list[str] = []
    deregister = rig.fabric.agents["P"].deregister_memory

    def note(descs: Any) -> None:
        order.append("deregister")
        assert not rig.published.any()
        deregister(descs)

    monkeypatch.setattr(rig.fabric.agents["P"], "deregister_memory", note)
    rig.reported += rig.producer.close()
    assert order == ["deregister", "deregister"]


def test_memory_that_nixl_does_not_take_back_is_tried_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.fabric.fail("deregister_memory", agent="P", times=2)
    rig.producer.close()
    assert "2 registrations" in caplog.text
    assert kvnixl.producer._unfinished == [rig.producer]  # its slots stay allocated
    rig.agent.retry_releases()
    rig.producer.close()
    assert kvnixl.producer._unfinished == []
    assert rig.fabric.agents["P"].registrations == 0


def test_a_refused_registration_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = FakeFabric()
    raw = fabric.agent("P")
    buffer = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
    calls = 0
    register = raw.register_memory

    def refuse_second(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise nixlBackendError
        return register(*args, **kwargs)

    monkeypatch.setattr(raw, "register_memory", refuse_second)
    with pytest.raises(RegistrationError):
        Producer(Agent(raw), make_layout(buffer), engine_id="prefill")
    assert raw.registrations == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease_duration": 0.0}, "lease_duration"),
        ({"lease_duration": math.nan}, "lease_duration"),
        ({"park_seconds": -1.0}, "park_seconds"),
        ({"max_parked": -1}, "max_parked"),
        ({"num_lease_slots": -1}, "num_lease_slots"),
        ({"num_lease_slots": (1 << 24) + 1}, "num_lease_slots"),
        ({"incarnation": 0}, "incarnation"),
        ({"incarnation": 1 << 63}, "incarnation"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    raw = FakeFabric().agent("P")
    buffer = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
    with pytest.raises(ConfigError, match=message):
        Producer(Agent(raw), make_layout(buffer), engine_id="prefill", **options)
    assert raw.registrations == 0


def test_a_layout_of_remote_memory_is_refused() -> None:
    layout = make_layout(np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8))
    remote = CacheLayout(regions=layout.regions, groups=layout.groups)
    with pytest.raises(ConfigError, match="no memory to register"):
        Producer(Agent(FakeFabric().agent("P")), remote, engine_id="prefill")


def test_memory_does_not_grow_with_ended_requests(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvnixl.producer, "_MAX_REMEMBERED", 10)
    rig = make_rig()
    reader = rig.reader("D")
    for i in range(200):
        lease = rig.hold(f"r{i}", i % NUM_SLOTS)
        reader.done(lease)
        assert rig.step() == {f"r{i}": "read"}
    producer = rig.producer
    assert len(producer._remembered) == 10
    for kept in (producer._held, producer._by_lease, producer._armed, producer._parked):
        assert len(kept) == 0
    assert len(producer._deadlines) == 0


def test_the_requests_that_ended_last_are_remembered(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvnixl.producer, "_MAX_REMEMBERED", 3)
    rig = make_rig(num_lease_slots=0)
    for req_id in ("a", "b", "c", "a", "d"):
        rig.hold(req_id, None, seconds=0.0)
        assert rig.step() == {req_id: "expired"}
    assert list(rig.producer._remembered) == ["c", "a", "d"]


def test_arms_and_clears_that_were_swapped_are_refused_before_anything_changes(rig: Rig) -> None:
    allocator = LeaseSlotAllocator(4)
    lease = allocator.acquire("a")
    assert lease is not None
    arms, clears = allocator.take_updates()
    rig.producer.update(clears, arms)
    with pytest.raises(TypeError, match=r"update\(clears, arms\)"):
        rig.producer.update({"a": lease}, set())  # type: ignore[arg-type]
    slots = rig.producer._slots
    assert slots is not None
    assert slots.nonce("a") == lease[1]


# --- the embedded facade --------------------------------------------------------------------------


class FakeServer:
    """A side channel that serves nobody."""

    def __init__(self, running: bool = False) -> None:
        self.running = running
        self.address = ("10.0.0.5", 4711)
        self.served: list[tuple[str, Any]] = []
        self.closed = 0
        self.error: Exception | None = None

    def publish(self, payloads: Any) -> None:
        self.served.append(("publish", payloads))

    def start(self, payloads: Any = None) -> None:
        if self.error is not None:
            raise self.error
        self.served.append(("start", payloads))
        self.running = True

    def close(self) -> None:
        self.closed += 1


class Embedded:
    """An `EmbeddedProducer` on the fake agent ``P``."""

    def __init__(self, **options: Any) -> None:
        self.fabric = FakeFabric()
        self.clock = Clock()
        self.buffer = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.layout = make_layout(self.buffer)
        self.agent = Agent(self.fabric.agent("P"))
        self.server = FakeServer()
        self.waits: list[Callable[[], None]] = []
        self.producer = EmbeddedProducer(
            self.agent,
            self.layout,
            **{
                "compat": COMPAT,
                "server": self.server,
                "num_lease_slots": 2,
                "lease_duration": LEASE_S,
                "clock": self.clock,
                "wait": self.wait,
                **options,
            },
        )

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.waits:
            self.waits.pop(0)()

    def step(self) -> dict[str, str]:
        return {req_id: str(outcome) for req_id, outcome in self.producer.step()}

    def word(self, slot: int) -> int:
        slots = self.producer.producer._slots
        assert slots is not None
        return int(slots.words[slot])

    def reader(self, name: str = "D") -> Reader:
        return Reader(self.fabric, name, 7)


@pytest.fixture
def make_embedded() -> Iterator[Callable[..., Embedded]]:
    made: list[Embedded] = []

    def make(**options: Any) -> Embedded:
        made.append(Embedded(**options))
        return made[-1]

    yield make
    for embedded in made:
        embedded.producer.close()
        assert len(embedded.producer) == 0
        embedded.fabric.assert_clean("P")
        assert embedded.agent.close() == 0


@pytest.fixture
def embedded(make_embedded: Callable[..., Embedded]) -> Embedded:
    return make_embedded()


def lease_of(reference: dict[str, Any]) -> Lease:
    lease = TransferParams.parse(reference, "D's id").lease
    assert lease is not None
    return lease


def test_a_reference_is_everything_a_reader_needs_in_json(embedded: Embedded) -> None:
    producer = embedded.producer
    reference = producer.offer("a", [np.array([3, 5])], 30, consumers=2, lease_duration=12.5)
    assert json.loads(json.dumps(reference)) == reference
    varying = ("kvnixl_lease", "remote_registration_generation")
    assert {key: value for key, value in reference.items() if key not in varying} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[3, 5]],
        "remote_engine_id": producer.engine_id,
        "remote_request_id": "a",
        "remote_host": "10.0.0.5",
        "remote_port": 4711,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 30,
        "remote_blocks_expiry_time": embedded.clock.now + 12.5,
        "transfer_mode": "pull",
    }
    lease = lease_of(reference)
    assert embedded.word(lease.slot) == lease.nonce
    remote = TransferParams.parse(reference, "D's id").remote("D's id")
    assert remote.lease == lease
    # JSON numbers are doubles to some routers.
    assert 0 < remote.registration_generation < 2**53


def test_all_offers_of_a_start_name_the_same_generation(
    make_embedded: Callable[..., Embedded],
) -> None:
    first, again = make_embedded(), make_embedded()
    generations = [
        embedded.producer.offer(req_id, [[0]], 1)["remote_registration_generation"]
        for embedded in (first, again)
        for req_id in ("a", "b")
    ]
    assert generations[0] == generations[1] != generations[2] == generations[3]


def test_an_offer_says_of_which_prompt_its_blocks_are(embedded: Embedded) -> None:
    reference = embedded.producer.offer("a", [[0]], 3, prompt_token_ids=[7, 8, 9])
    prompt = TransferParams.parse(json.loads(json.dumps(reference)), "D's id").prompt
    assert prompt == PromptDigest.of([7, 8, 9])
    with pytest.raises(ValueError, match="token ids"):
        embedded.producer.offer("b", [[1]], 3, prompt_token_ids=["x"])  # type: ignore[list-item]
    assert len(embedded.producer) == 1
    embedded.producer.offer("b", [[1]], 3, prompt_token_ids=[1])


def test_the_lease_of_an_offer_lasts_as_long_as_its_reference_says(embedded: Embedded) -> None:
    reference = embedded.producer.offer("a", [[0]], 1, lease_duration=12.5)
    embedded.clock.now = reference["remote_blocks_expiry_time"] - 0.01
    assert embedded.step() == {}
    embedded.clock.now += 0.02
    assert embedded.step() == {"a": "expired"}


def test_an_offer_to_several_readers_ends_after_all_of_them(embedded: Embedded) -> None:
    lease = lease_of(embedded.producer.offer("a", [[0]], 1, consumers=2))
    embedded.reader("D0").done(lease)
    assert embedded.step() == {}
    embedded.reader("D1").done(lease)
    assert embedded.step() == {"a": "read"}


def test_slots_are_used_again_for_ever_and_nonces_never(embedded: Embedded) -> None:
    reader = embedded.reader()
    seen: set[Lease] = set()
    for i in range(300):
        lease = lease_of(embedded.producer.offer(f"r{i}", [[0]], 1))
        assert lease not in seen
        seen.add(lease)
        if i % 3 == 0:
            reader.done(lease)
        elif i % 3 == 1:
            assert embedded.producer.cancel(f"r{i}")
        else:
            embedded.clock.now += LEASE_S
        assert embedded.step() == {f"r{i}": ("read", "aborted", "expired")[i % 3]}
    assert {lease.slot for lease in seen} <= {0, 1}


def test_without_a_free_slot_a_request_is_offered_without_a_lease(embedded: Embedded) -> None:
    producer, reader = embedded.producer, embedded.reader()
    leases = [lease_of(producer.offer(f"r{i}", [[i]], 1)) for i in range(2)]
    reference = producer.offer("unleased", [[2]], 1)
    assert "kvnixl_lease" not in reference
    assert TransferParams.parse(reference, "D's id").lease is None
    reader.done_ids("unleased")
    reader.done(leases[0])
    assert embedded.step() == {"unleased": "read", "r0": "read"}
    assert lease_of(producer.offer("again", [[0]], 1)).slot == leases[0].slot


def test_offers_without_any_slots(make_embedded: Callable[..., Embedded]) -> None:
    embedded = make_embedded(num_lease_slots=0)
    assert "kvnixl_lease" not in embedded.producer.offer("a", [[0]], 1)
    embedded.reader().text("a")
    assert embedded.step() == {"a": "read"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("b", [[NUM_BLOCKS]], 1), BlockListError, "block 16 of cache group 0 is not in 0 .. 15"),
        (("b", [[-1]], 1), BlockListError, "block -1"),
        (("b", [[0], [1]], 1), BlockListError, "2 block lists for 1 cache groups"),
        (("b", [], 1), BlockListError, "0 block lists"),
        (("b", [0], 1), BlockListError, "lists of integers"),
        (("b", [[0.5]], 1), BlockListError, "lists of integers"),
        (("b", [["0"]], 1), BlockListError, "lists of integers"),
        (("", [[0]], 1), ValueError, "request id"),
        (("x" * 9000, [[0]], 1), ValueError, "request id"),
        (("\ud800", [[0]], 1), ValueError, "surrogates"),
        (("b", [[0]], -1), ValueError, "num_tokens"),
        (("b", [[0]], 1, 0), ValueError, "0 consumers"),
        (("b", [[0]], 1, 1, 0.0), ValueError, "lease_duration"),
        (("b", [[0]], 1, 1, math.inf), ValueError, "lease_duration"),
        (("b", [[0]], 1, 1, math.nan), ValueError, "lease_duration"),
        (("a", [[0]], 1), ValueError, "'a' was offered already"),
    ],
)
def test_a_bad_offer_costs_itself_only(
    embedded: Embedded, arguments: Any, error: type[Exception], message: str
) -> None:
    producer = embedded.producer
    producer.offer("a", [[0]], 1)
    with pytest.raises(error, match=message):
        producer.offer(*arguments)
    assert len(producer) == 1
    assert producer.counters.held == 1
    lease_of(producer.offer("b", [[1]], 1))  # the second of two slots is still free


def test_an_id_can_be_offered_again_only_after_its_end_was_reported(embedded: Embedded) -> None:
    producer = embedded.producer
    producer.offer("a", [[0]], 1)
    assert producer.cancel("a")
    assert not producer.cancel("a")
    with pytest.raises(ValueError, match="offered already"):
        producer.offer("a", [[1]], 1)
    assert embedded.step() == {"a": "aborted"}
    producer.offer("a", [[1]], 1)


def test_an_empty_block_list_can_be_offered(embedded: Embedded) -> None:
    lease = lease_of(embedded.producer.offer("a", [[]], 0))
    embedded.reader().done(lease)
    assert embedded.step() == {"a": "read"}


def test_draining_takes_no_offers_and_lets_readers_finish(embedded: Embedded) -> None:
    producer, reader = embedded.producer, embedded.reader()
    lease = lease_of(producer.offer("a", [[0]], 1))

    def finish() -> None:
        with pytest.raises(ClosedError, match="closing down"):
            producer.offer("late", [[1]], 1)
        reader.done(lease)

    embedded.waits = [lambda: None, finish]
    started = embedded.clock.now
    assert producer.drain(10.0) == [EndedLease("a", READ)]
    assert embedded.clock.now - started < 0.1
    assert producer.drain(10.0) == []


def test_draining_revokes_at_its_deadline_what_is_left(embedded: Embedded) -> None:
    producer, reader = embedded.producer, embedded.reader()
    leases = [lease_of(producer.offer(req_id, [[0]], 1)) for req_id in ("read", "stuck")]
    # A reader that renews for ever does not hold the shutdown up.
    embedded.waits = [lambda: reader.done(leases[0])]
    embedded.waits += [lambda: reader.renew(leases[1])] * 3
    started = embedded.clock.now
    assert producer.drain(timeout=2.0) == [EndedLease("read", READ), EndedLease("stuck", ABORTED)]
    assert 2.0 <= embedded.clock.now - started < 2.1
    assert embedded.word(leases[1].slot) == 0


def test_draining_with_no_time_revokes_at_once(embedded: Embedded) -> None:
    embedded.producer.offer("a", [[0]], 1)
    started = embedded.clock.now
    assert embedded.producer.drain(0.0) == [EndedLease("a", ABORTED)]
    assert embedded.clock.now == started


def test_a_server_with_its_own_loop_stops_offers_and_goes_on_stepping(embedded: Embedded) -> None:
    lease = lease_of(embedded.producer.offer("a", [[0]], 1))
    embedded.producer.stop_offers()
    with pytest.raises(ClosedError):
        embedded.producer.offer("b", [[0]], 1)
    assert embedded.step() == {}
    embedded.reader().done(lease)
    assert embedded.step() == {"a": "read"}
    assert len(embedded.producer) == 0


def test_closing_the_facade_twice_is_fine(embedded: Embedded) -> None:
    lease = lease_of(embedded.producer.offer("a", [[0]], 1))
    assert embedded.producer.close() == [EndedLease("a", ABORTED)]
    assert embedded.word(lease.slot) == 0
    assert embedded.producer.close() == []
    assert embedded.server.closed
    assert embedded.step() == {}
    assert not embedded.producer.cancel("a")
    with pytest.raises(ClosedError):
        embedded.producer.offer("b", [[0]], 1)


def test_the_facade_closes_with_its_block() -> None:
    embedded = Embedded()
    with embedded.producer as producer:
        producer.offer("a", [[0]], 1)
    assert embedded.server.closed == 1
    embedded.fabric.assert_clean("P")


def test_a_server_is_started_unless_it_runs(make_embedded: Callable[..., Embedded]) -> None:
    idle = make_embedded()
    assert idle.server.served == [("start", {(0, 0): idle.producer.payload()})]
    running = FakeServer(running=True)
    embedded = make_embedded(server=running)
    assert running.served == [("publish", {(0, 0): embedded.producer.payload()})]


def test_a_server_that_does_not_start_leaves_nothing_registered() -> None:
    fabric = FakeFabric()
    server = FakeServer()
    server.error = KvNixlError("port in use")
    layout = make_layout(np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8))
    with pytest.raises(KvNixlError, match="port in use"):
        EmbeddedProducer(Agent(fabric.agent("P")), layout, compat=COMPAT, server=server)
    fabric.assert_clean("P")


def test_the_caller_may_serve_the_payload_itself(make_embedded: Callable[..., Embedded]) -> None:
    embedded = make_embedded(server=None, address=("10.0.0.9", 80), engine_id="prefill-3")
    reference = embedded.producer.offer("a", [[0]], 1)
    assert (reference["remote_host"], reference["remote_port"]) == ("10.0.0.9", 80)
    payload = decode_handshake_payload(embedded.producer.payload())
    assert payload.compatibility_hash == COMPAT.hash
    metadata = decode_agent_metadata(payload.agent_metadata_bytes)
    assert metadata.engine_id == reference["remote_engine_id"] == "prefill-3"
    assert metadata.kvnixl is not None
    assert metadata.kvnixl.factors == COMPAT.factors_text


@pytest.mark.parametrize("options", [{"server": None}, {"address": ("h", 1)}])
def test_exactly_one_of_server_and_address_is_needed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either a server or the address"):
        Embedded(**options)


def test_a_reader_meets_the_producer_through_a_real_side_channel(
    make_embedded: Callable[..., Embedded],
) -> None:
    embedded = make_embedded(server=HandshakeServer("127.0.0.1", 0))
    reference = embedded.producer.offer("a", [[0]], 1)
    with HandshakeClient(COMPAT) as client:
        client.start(
            reference["remote_engine_id"],
            reference["remote_host"],
            reference["remote_port"],
            [(0, 0)],
        )
        outcomes = []
        while len(client):
            outcomes += client.poll(0.1)
    (outcome,) = outcomes
    assert isinstance(outcome, HandshakeDone)
    metadata = outcome.ranks[0, 0].metadata
    assert metadata.kv_caches_base_addr == [embedded.buffer.ctypes.data]


# --- a whole read ---------------------------------------------------------------------------------


class PullingReader:
    """Reads blocks and then their slot, with the completion on the slot READ."""

    def __init__(self, agent: Agent, payload: bytes) -> None:
        metadata = decode_agent_metadata(decode_handshake_payload(payload).agent_metadata_bytes)
        self.agent = agent
        self.buffer = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.leases: dict[str, Lease] = {}
        self.sequence = 0
        self.agent.register_memory([(self.buffer.ctypes.data, self.buffer.nbytes, 0)])
        self.peer = self.agent.add_remote_agent(metadata.agent_metadata)
        self.local = self.agent.prep_xfer_dlist(LOCAL_SIDE, self.rows(self.buffer.ctypes.data))
        self.remote = self.agent.prep_xfer_dlist(
            self.peer, self.rows(metadata.kv_caches_base_addr[0])
        )
        self.verifier = LeaseVerifier(self.agent, 8, completion_notif=self.notification)
        assert metadata.kvnixl is not None
        slots = metadata.kvnixl.lease_slots
        assert slots is not None
        descs = lease_slot_descs(slots.base_addr, slots.num_slots)
        self.verifier.add_remote("P", 0, self.agent.prep_xfer_dlist(self.peer, descs))

    @staticmethod
    def rows(base: int) -> npt.NDArray[np.uint64]:
        return np.array([[base, BLOCK_BYTES, 0, BLOCK_BYTES, NUM_BLOCKS]], np.uint64)

    def notification(self, _engine_id: str, _rank: int, req_ids: list[str]) -> bytes:
        self.sequence += 1
        return encode_completion(
            Outcome.DONE,
            1,
            sender=9,
            sequence=self.sequence,
            leases=[self.leases[req_id] for req_id in req_ids],
        )

    def read(self, reference: dict[str, Any]) -> None:
        """Start the READ of the request's blocks into the blocks of the same number."""
        req_id = reference["remote_request_id"]
        self.leases[req_id] = lease_of(reference)
        self.verifier.add_check(req_id, "P", 0, *self.leases[req_id])
        blocks = reference["remote_block_ids"][0]
        self.xfer = self.agent.make_prepped_xfer("READ", self.local, blocks, self.remote, blocks)
        self.xfer.post()

    def finish(self, req_id: str) -> tuple[set[str], dict[str, str]]:
        """Wait for the READ, then check the lease: verified and failed requests."""
        assert wait_until(self.xfer.over, 20.0)
        self.xfer.close()
        verified, failed = self.verifier.step({req_id})

        def checked() -> bool:
            more_verified, more_failed = self.verifier.step()
            verified.update(more_verified)
            failed.update(more_failed)
            return not self.verifier.has_checks

        assert wait_until(checked, 20.0)
        return verified, failed

    def fetch(self, reference: dict[str, Any]) -> tuple[set[str], dict[str, str], bytes]:
        """`read` and `finish`, and the bytes of the request's first block."""
        self.read(reference)
        verified, failed = self.finish(reference["remote_request_id"])
        block = reference["remote_block_ids"][0][0]
        return verified, failed, self.block(block)

    def block(self, block: int) -> bytes:
        return self.buffer[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].tobytes()

    def text(self, req_id: str) -> None:
        self.agent.send_notif(self.peer, encode_text_completion(req_id, 1))

    def close(self) -> None:
        assert self.verifier.shutdown() == 0
        assert self.agent.close() == 0


@pytest.fixture
def pulling(embedded: Embedded) -> Iterator[PullingReader]:
    reader = PullingReader(Agent(embedded.fabric.agent("D")), embedded.producer.payload())
    yield reader
    reader.close()


def test_a_read_under_a_lease_is_verified_and_ends_it(
    embedded: Embedded, pulling: PullingReader
) -> None:
    embedded.buffer[:] = np.arange(embedded.buffer.size) % 251
    pulling.read(embedded.producer.offer("a", [[2, 9]], 32))
    assert embedded.step() == {}
    assert pulling.finish("a") == ({"a"}, {})
    assert embedded.step() == {"a": "read"}
    got = pulling.buffer.reshape(NUM_BLOCKS, BLOCK_BYTES)[[2, 9]]
    assert (got == embedded.buffer.reshape(NUM_BLOCKS, BLOCK_BYTES)[[2, 9]]).all()


@pytest.mark.parametrize("how", ["expired", "aborted"])
def test_a_read_that_outlives_its_lease_is_not_accepted(
    embedded: Embedded, pulling: PullingReader, how: str
) -> None:
    """The reader is stopped for longer than the lease; the owner reuses the blocks meanwhile."""
    embedded.fabric.script(Plan(polls=None, piece_bytes=16), operation="READ")
    pulling.read(embedded.producer.offer("a", [[2]], 16))
    (transfer,) = embedded.fabric.transfers
    transfer.copy()
    if how == "expired":
        embedded.clock.now += LEASE_S
    else:
        embedded.producer.cancel("a")
    assert embedded.step() == {"a": how}
    embedded.buffer[:] = 0xEE
    transfer.finish()
    verified, failed = pulling.finish("a")
    assert verified == set()
    assert set(failed) == {"a"}
    assert embedded.step() == {}
    assert embedded.producer.counters.late_completions == 1


def test_shutting_down_during_a_pull_fails_the_read_and_nothing_else(
    embedded: Embedded, pulling: PullingReader
) -> None:
    embedded.fabric.script(Plan(polls=None, piece_bytes=16), operation="READ")
    pulling.read(embedded.producer.offer("a", [[2]], 16))
    (transfer,) = embedded.fabric.transfers
    transfer.copy()
    assert embedded.producer.drain(1.0) == [EndedLease("a", ABORTED)]
    embedded.producer.close()
    embedded.fabric.settle()
    verified, failed = pulling.finish("a")
    assert verified == set()
    assert set(failed) == {"a"}


class NixlProducer:
    """An embedded producer over real NIXL, for a process of its own."""

    def __init__(self) -> None:
        self.agent = Agent.open("P")
        self.buffer = np.repeat(np.arange(NUM_BLOCKS, dtype=np.uint8), BLOCK_BYTES)
        self.producer = EmbeddedProducer(
            self.agent,
            make_layout(self.buffer),
            compat=COMPAT,
            address=("127.0.0.1", 1),
            num_lease_slots=2,
        )

    def payload(self) -> bytes:
        return self.producer.payload()

    def offer(self, req_id: str, block: int) -> dict[str, Any]:
        return self.producer.offer(req_id, [[block]], 16)

    def cancel_and_reuse(self, req_id: str, block: int) -> list[EndedLease]:
        self.producer.cancel(req_id)
        ended = self.producer.step()
        self.buffer[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = 0xEE
        return ended

    def wait_for_end(self) -> list[EndedLease]:
        ended: list[EndedLease] = []

        def stepped() -> bool:
            ended.extend(self.producer.step())
            return bool(ended)

        assert wait_until(stepped, 20.0), self.producer.counters
        return ended

    def close(self) -> None:
        assert self.producer.close() == []
        assert self.agent.close() == 0


def open_nixl_reader(payload: bytes) -> PullingReader:
    return PullingReader(Agent.open("D"), payload)


@pytest.mark.nixl
def test_leases_of_real_reads_between_real_processes(spawn: Callable[..., Child]) -> None:
    owner = spawn(NixlProducer)
    reader = spawn(open_nixl_reader, owner.call("payload"))
    for i in range(6):
        verified, failed, content = reader.call("fetch", owner.call("offer", f"r{i}", i))
        assert (verified, failed) == ({f"r{i}"}, {})
        assert content == bytes([i]) * BLOCK_BYTES
        assert owner.call("wait_for_end") == [EndedLease(f"r{i}", READ)]
    reference = owner.call("offer", "gone", 7)
    assert owner.call("cancel_and_reuse", "gone", 7) == [EndedLease("gone", ABORTED)]
    verified, failed, _ = reader.call("fetch", reference)
    assert (verified, set(failed)) == (set(), {"gone"})
    owner.call("offer", "stock", 8)
    reader.call("text", "stock")
    assert owner.call("wait_for_end") == [EndedLease("stock", READ)]
    assert reader.close() == 0
    assert owner.close() == 0


# --- any interleaving -----------------------------------------------------------------------------

IDS = ("a", "b")


class ModelHold:
    def __init__(self, lease: Lease | None, consumers: int, deadline: float) -> None:
        self.lease = lease
        self.consumers = consumers
        self.deadline = deadline
        self.done: dict[tuple[str, int | None], Outcome] = {}


class ProducerMachine(RuleBasedStateMachine):
    """Random interleavings of holds, notifications (early, late, twice, forged), heartbeats,
    aborts, expiry and restarts, against a model that keeps everything and looks at all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.starts = 0

    @initialize(stock_peers=st.booleans())
    def start(self, stock_peers: bool) -> None:
        self.stock_peers = stock_peers
        self.begin()

    def begin(self) -> None:
        self.starts += 1
        self.rig = Rig(self.patch, stock_peers=self.stock_peers, num_lease_slots=NUM_SLOTS)
        self.readers = [self.rig.reader(f"D{i}", sender=50 + i) for i in range(3)]
        for reader in self.readers:
            reader.sequence = 1000 * self.starts
        self.allocator = LeaseSlotAllocator(NUM_SLOTS)
        self.armed: dict[str, Lease] = {}
        self.held: dict[str, ModelHold] = {}
        self.ending: dict[str, str] = {}
        self.queue: dict[str, list[tuple[Any, ...]]] = {}  # by agent, as NIXL hands them out
        self.parked: dict[Any, tuple[float, dict[Any, tuple[Outcome, int, bool]]]] = {}
        self.known: set[Any] = set()  # leases and ids that ended
        self.numbers: set[tuple[int, int]] = set()
        self.leases: list[tuple[Lease, str]] = []  # every lease that was given, and to whom
        self.sent: list[tuple[int, bytes, tuple[Any, ...]]] = []
        self.lives = 0
        self.ends = 0
        self.counted = 0

    def teardown(self) -> None:
        if self.starts:
            self.finish()
        self.patch.undo()

    def finish(self) -> None:
        left = {f"{req_id}": "aborted" for req_id in self.held} | self.ending
        ended = self.rig.producer.close()
        assert {req_id: str(outcome) for req_id, outcome in ended} == left
        self.ends += len(ended)
        assert self.ends == self.lives == self.rig.counters.held
        assert not self.rig.published.any()
        assert self.rig.counters.internal_errors == 0

    # the scheduler

    @rule(req_id=st.sampled_from(IDS))
    def arm_early(self, req_id: str) -> None:
        """A reader may know the lease before the worker holds the request."""
        self.arm(req_id)

    def arm(self, req_id: str) -> None:
        if req_id in self.held or req_id in self.armed or req_id in self.ending:
            return
        lease = self.allocator.acquire(req_id)
        assert lease is not None
        arms, clears = self.allocator.take_updates()
        self.rig.producer.update(clears, arms)
        self.armed[req_id] = Lease(*lease)
        self.rig.leases[req_id] = Lease(*lease)
        self.leases.append((Lease(*lease), req_id))

    @rule(
        req_id=st.sampled_from(IDS),
        seconds=st.sampled_from([10.0, 25.0, 0.0]),
        consumers=st.integers(1, 3),
        leased=st.booleans(),
    )
    def hold(self, req_id: str, seconds: float, consumers: int, leased: bool) -> None:
        if leased:
            self.arm(req_id)
        if req_id in self.held or req_id in self.ending:
            with pytest.raises(ValueError, match=r"held already|not reported"):
                self.rig.producer.hold(req_id, seconds, consumers)
            return
        self.rig.producer.hold(req_id, seconds, consumers)
        lease = self.armed.pop(req_id, None)
        if lease is None:
            self.rig.leases.pop(req_id, None)
        held = ModelHold(lease, consumers, self.rig.clock.now + seconds)
        self.held[req_id] = held
        self.lives += 1
        self.known.discard(req_id)
        for key in (lease, req_id):
            _, parts = self.parked.pop(key, (0.0, {}))
            for sender, (outcome, number, is_id) in parts.items():
                if self.held.get(req_id) is held and (not is_id or self.believed(held, sender)):
                    self.count(req_id, sender, outcome, number)

    @rule(req_id=st.sampled_from(IDS))
    def abort(self, req_id: str) -> None:
        assert self.rig.producer.abort(req_id) == (req_id in self.held)
        if req_id in self.held:
            self.end(req_id, "aborted")
        elif self.armed.pop(req_id, None) is not None:
            self.allocator.release(req_id, clear=False)

    @rule(req_id=st.sampled_from(IDS))
    def revoke(self, req_id: str) -> None:
        """The scheduler takes the lease back, the request stays."""
        if req_id in self.armed:
            self.allocator.release(req_id, clear=True)
            arms, clears = self.allocator.take_updates()
            self.rig.producer.update(clears, arms)
            del self.armed[req_id]

    # the readers

    @rule(
        reader=st.integers(0, 2),
        data=st.data(),
        outcome=st.sampled_from(list(Outcome)),
        consumers=st.integers(1, 3),
        form=st.sampled_from(["lease", "id", "text", "forged"]),
        then_step=st.booleans(),
    )
    def notify(
        self,
        reader: int,
        data: st.DataObject,
        outcome: Outcome,
        consumers: int,
        form: str,
        then_step: bool,
    ) -> None:
        sending = self.readers[reader]
        agent = sending.raw.name
        event: tuple[Any, ...]
        if form in ("lease", "forged"):
            if not self.leases:
                return
            lease, _ = data.draw(st.sampled_from(self.leases[-3:]))
            if form == "forged":
                lease = Lease(lease.slot, lease.nonce ^ (1 << 40))
            message = sending.completion(outcome, consumers, leases=[lease])
            event = ("done", (agent, sending.sender), outcome, consumers, lease, None)
        elif form == "id":
            req_id = data.draw(st.sampled_from(IDS))
            message = sending.completion(outcome, consumers, ids=[req_id])
            number = (reader, sending.sequence)
            event = ("done", (agent, sending.sender), outcome, consumers, req_id, number)
        else:
            req_id = data.draw(st.sampled_from(IDS))
            message = encode_text_completion(req_id, consumers)
            event = ("done", (agent, None), Outcome.DONE, consumers, req_id, None)
        self.sent.append((reader, message, event))
        self.send(reader, message, event)
        if then_step:
            self.step()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), then_step=st.booleans())
    def repeat(self, data: st.DataObject, then_step: bool) -> None:
        reader, message, event = data.draw(st.sampled_from(self.sent[-6:]))
        self.send(reader, message, event)
        if then_step:
            self.step()

    @rule(
        reader=st.integers(0, 2),
        data=st.data(),
        extension=st.sampled_from([1.0, 20.0, 1e6]),
        form=st.sampled_from(["lease", "id", "text"]),
    )
    def heartbeat(self, reader: int, data: st.DataObject, extension: float, form: str) -> None:
        sending = self.readers[reader]
        if form == "lease":
            if not self.leases:
                return
            lease, _ = data.draw(st.sampled_from(self.leases[-3:]))
            message = sending.heartbeat(extension, leases=[lease])
            self.send(reader, message, ("renew", lease, extension))
            return
        req_id = data.draw(st.sampled_from(IDS))
        if form == "id":
            message = sending.heartbeat(extension, ids=[req_id])
        else:
            message, extension = encode_text_heartbeat([req_id]), LEASE_S
        self.send(reader, message, ("renew", req_id, extension))

    @rule(reader=st.integers(0, 2), garbage=st.binary(max_size=12))
    def babble(self, reader: int, garbage: bytes) -> None:
        self.send(reader, b"\xff" + garbage, ("nothing",))

    def send(self, reader: int, message: bytes, event: tuple[Any, ...]) -> None:
        self.readers[reader].send(message)
        self.queue.setdefault(self.readers[reader].raw.name, []).append(event)

    @rule(seconds=st.sampled_from([1.0, 6.0, PARK_S]))
    def advance(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule()
    def fail_to_drain(self) -> None:
        """NIXL does not say what arrived; it arrives in a later step."""
        self.rig.fabric.fail("get_new_notifs", nixlBackendError, agent="P")
        waiting, self.queue = self.queue, {}
        self.step()
        self.queue = waiting

    @rule()
    def step(self) -> None:
        now = self.rig.clock.now
        for event in itertools.chain(*self.queue.values()):
            if event[0] == "renew":
                held = self.find(event[1])
                if held is not None:
                    until = now + min(event[2], LEASE_S)
                    self.held[held].deadline = max(self.held[held].deadline, until)
            elif event[0] == "done":
                self.complete(now, *event[1:])
        self.queue = {}
        for req_id in [r for r, held in self.held.items() if held.deadline <= now]:
            self.end(req_id, "expired")
        self.parked = {key: value for key, value in self.parked.items() if value[0] > now}
        assert self.rig.step() == self.ending
        assert self.rig.counters.completions == self.counted
        for req_id in self.ending:
            self.allocator.release(req_id, clear=False)
        self.ends += len(self.ending)
        self.ending = {}

    @precondition(lambda self: self.ends > 5)
    @rule()
    def restart(self) -> None:
        self.finish()
        self.begin()

    # the model

    def find(self, key: Any) -> str | None:
        if isinstance(key, str):
            return key if key in self.held else None
        return next((r for r, held in self.held.items() if held.lease == key), None)

    def believed(self, held: ModelHold, sender: tuple[str, int | None]) -> bool:
        return held.lease is None or (sender[1] is None and self.stock_peers)

    def complete(
        self,
        now: float,
        sender: tuple[str, int | None],
        outcome: Outcome,
        consumers: int,
        key: Any,
        number: tuple[int, int] | None,
    ) -> None:
        if number is not None:
            if number in self.numbers:
                return
            self.numbers.add(number)
        req_id = self.find(key)
        is_id = isinstance(key, str)
        if req_id is None:
            if key not in self.known:
                _, parts = self.parked.setdefault(key, (now + PARK_S, {}))
                parts.setdefault(sender, (outcome, consumers, is_id))
        elif not is_id or self.believed(self.held[req_id], sender):
            self.count(req_id, sender, outcome, consumers)

    def count(
        self, req_id: str, sender: tuple[str, int | None], outcome: Outcome, consumers: int
    ) -> None:
        held = self.held[req_id]
        if sender in held.done:
            return
        held.done[sender] = outcome
        self.counted += 1
        held.consumers = max(held.consumers, consumers)
        if len(held.done) >= held.consumers:
            all_read = set(held.done.values()) == {Outcome.DONE}
            self.end(req_id, "read" if all_read else "released")

    def end(self, req_id: str, outcome: str) -> None:
        held = self.held.pop(req_id)
        assert req_id not in self.ending
        self.ending[req_id] = outcome
        self.known |= {req_id, held.lease}

    @invariant()
    def promises_stand(self) -> None:
        """A reader sees the nonce of every lease that holds, and of no other."""
        if not self.starts:
            return
        assert set(self.rig.producer.held_requests()) == set(self.held)
        held = {req_id: held.lease for req_id, held in self.held.items() if held.lease}
        for lease in [*held.values(), *self.armed.values()]:
            assert self.rig.published[lease.slot] == lease.nonce
        unreported = {self.rig.leases.get(req_id) for req_id in self.ending}
        for lease, _ in self.leases:
            if lease not in held.values() and lease not in self.armed.values():
                revoked = self.rig.published[lease.slot] != lease.nonce
                assert revoked or lease in unreported or self.aborted_unheld(lease)

    def aborted_unheld(self, lease: Lease) -> bool:
        """Of an abort before the hold, nobody waits for a report: the next step revokes it."""
        slots = self.rig.producer._slots
        assert slots is not None
        return int(slots.words[lease.slot]) == 0


def test_any_interleaving_ends_every_lease_exactly_once() -> None:
    run_state_machine_as_test(
        ProducerMachine,
        settings=settings(deadline=None, max_examples=120, stateful_step_count=50),
    )
