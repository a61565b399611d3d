"""The whole pull path on the fake network: producers, readers, and everything that can go wrong.

`World` has one to three `EmbeddedProducer` and one to three `Reader`, and a model of what was
promised and asked for. It judges after every operation. Hypothesis drives it (and shrinks what it
finds), and so do seeded dice, which are faster. ``KVNIXL_LONG=1`` runs far more of both. A seed
repeats its run exactly under the same ``PYTHONHASHSEED``.

Every block that a producer writes is labelled by producer, start, request, generation, block, layer
and word, so that no two contents are ever equal. What a producer reports as ended is overwritten at
once, and what a reader reports is marked at once: a later byte in it is noticed.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvnixl.agent import Agent, Transfer
from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import HandshakeTimeoutError
from kvnixl.fake import (
    FakeFabric,
    FakeNotice,
    FakeTransfer,
    NoticeFate,
    Plan,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from kvnixl.handshake import HandshakeDone, HandshakeFailed, HandshakeOutcome, PeerAddress, Rank
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.leases import ProducerLeaseSlots
from kvnixl.metadata import Lease, NixlAgentMetadata, parse_lease
from kvnixl.producer import EmbeddedProducer, EndedLease, LeaseOutcome, Producer
from kvnixl.reader import FailureCause, LeasePolicy, Reader, ReadOutcome, Stage
from kvnixl.wire import (
    Completion,
    OpenedHandshake,
    Outcome,
    encode_completion,
    encode_heartbeat,
    parse_notification,
)
from tests.machines import machine_settings, run_seeds

LONG = os.environ.get("KVNIXL_LONG") == "1"
NUM_SEEDS = 2000 if LONG else 50
NUM_OPERATIONS = 400
NUM_EXAMPLES = 1000 if LONG else 30
STEPS_PER_EXAMPLE = 150 if LONG else 60
TEST_TIMEOUT_S = 3600 if LONG else 120

LAYERS = 2
BLOCKS = 8
BLOCK_WORDS = 4
BLOCK_SIZE = 4
BLOCKS_PER_REQUEST = 3
REQUEST_IDS = [f"r{i}" for i in range(5)]
MARKER = 2**64 - 1
FORGER = 1  # sender of forged completions; those of readers are larger
NUM_SLOTS = 3  # fewer than requests can be offered at a time

LEASE_S = 10.0
REQUEST_TIMEOUT_S = 15.0
HANDSHAKE_TIMEOUT_S = 4.0
STAGE_TIMEOUT_S = 5.0
VERIFY_TIMEOUT_S = 3.0
SHORTEST_TIMEOUT_S = 3.0
SECONDS = (0.02, 0.02, 0.2, 0.2, 1.0, 1.0, 3.0, 11.0)

EXPECTED_FAILURES = (
    FailureCause.HANDSHAKE,
    FailureCause.NO_LEASE,
    FailureCause.POST,
    FailureCause.TRANSFER,
    FailureCause.DISCONNECTED,
    FailureCause.LEASE_ENDED,
    FailureCause.TIMEOUT,
)

COMPAT = CompatibilityCheck({"model": "m"})

Chooser = Callable[[str, int], int]
Words = npt.NDArray[np.uint64]  # of a cache, shape (layers, blocks, words)
T = TypeVar("T")


class Label(NamedTuple):
    """What a block holds. ``request`` is empty after the request's end."""

    producer: str
    start: int
    request: str
    generation: int
    block: int


def make_cache(content: int) -> tuple[Words, CacheLayout]:
    memory = np.full((LAYERS, BLOCKS, BLOCK_WORDS), content, np.uint64)
    layout = layout_from_addresses(
        {f"layers.{i}": memory[i].ctypes.data for i in range(LAYERS)},
        block_len=memory.itemsize * BLOCK_WORDS,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        attn_backend="X",
    )
    return memory, layout


@dataclass(eq=False)
class Offer:
    """One life of a request at its producer, as the model sees it."""

    engine: Engine
    start: int
    req_id: str
    blocks: list[int]
    content: Words  # what they held when they were offered
    reference: dict[str, Any]
    lease: Lease | None
    consumers: int
    deadline: float  # without heartbeats
    cancelled: bool = False
    outcome: LeaseOutcome | None = None

    @property
    def stands(self) -> bool:
        """The producer has not said, nor died, that the blocks may hold something else."""
        return self.outcome is None and self.start == self.engine.starts and self.engine.alive

    @property
    def key(self) -> tuple[Any, ...]:
        """What its completions name."""
        where = (self.engine.name, self.start)
        return (*where, self.lease) if self.lease is not None else (*where, self.req_id)


class Engine:
    """A server that prefills, and gives blocks to the next request as soon as it may."""

    def __init__(self, world: World, number: int, faulty: bool) -> None:
        self.world = world
        self.name = f"P{number}"
        self.engine_id = f"prefill-{number}"
        self.address = ("10.0.0.1", 5600 + number)
        self.faulty = faulty
        self.starts = 0
        self.alive = False
        self.drain_errors = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.alive = True
        self.raw = self.world.fabric.agent(self.name)
        self.memory, layout = make_cache(0)
        self.world.graveyard.append(self.memory)
        self.producer = EmbeddedProducer(
            Agent(self.raw),
            layout,
            compat=COMPAT,
            address=self.address,
            engine_id=self.engine_id,
            num_lease_slots=NUM_SLOTS,
            lease_duration=LEASE_S,
            incarnation=100 + self.starts,
            park_seconds=5.0,
            clock=self.world.clock,
        )
        self.offers: dict[str, Offer] = {}  # under a lease
        self.free = list(range(BLOCKS))
        for block in self.free:
            self.write(block, "")

    def write(self, block: int, request: str) -> None:
        generation = self.world.next_generation()
        label = Label(self.name, self.starts, request, generation, block)
        self.world.labels[generation] = label
        for layer in range(LAYERS):
            first = (generation << 16) + (layer << 8)
            self.memory[layer, block] = np.arange(first, first + BLOCK_WORDS)

    def offer(self) -> Offer | None:
        world = self.world
        ids = [req_id for req_id in REQUEST_IDS if req_id not in self.offers]
        count = 1 + world.choose("blocks", BLOCKS_PER_REQUEST)
        if not ids or len(self.free) < count:
            return None
        req_id = world.pick("id", ids)
        blocks = [self.free.pop(world.choose("block", len(self.free))) for _ in range(count)]
        for block in blocks:
            self.write(block, req_id)
        consumers = 1 + world.choose("consumers", len(world.consumers))
        duration = world.pick("duration", (LEASE_S, LEASE_S, 2.0))
        given = self.producer.offer(
            req_id,
            [blocks],
            num_tokens=count * BLOCK_SIZE,
            consumers=consumers,
            lease_duration=duration,
        )
        reference = json.loads(json.dumps(given))
        lease = parse_lease(reference["kvnixl_lease"]) if "kvnixl_lease" in reference else None
        self.offers[req_id] = Offer(
            self,
            self.starts,
            req_id,
            blocks,
            self.memory[:, blocks].copy(),
            reference,
            lease,
            consumers,
            world.clock.now + duration,
        )
        return self.offers[req_id]

    def step(self) -> None:
        if self.alive:
            self.take(self.producer.step())

    def take(self, ended: list[EndedLease]) -> None:
        """These blocks may be reused, and so they are."""
        for req_id, outcome in ended:
            assert req_id in self.offers, f"{self.name} reports {req_id!r}, which is not offered"
            offer = self.offers.pop(req_id)
            self.world.judge_end(offer, outcome)
            offer.outcome = outcome
            for block in offer.blocks:
                self.write(block, "")
            self.free += offer.blocks

    def close(self) -> None:
        """The server ends in good order; its process, too."""
        self.take(self.producer.close())
        assert not self.offers, "close() did not report all that was offered"
        assert self.raw.registrations == 0
        self.kill(hang=False)

    def kill(self, *, hang: bool) -> None:
        self.world.fabric.kill(self.name, in_flight="hang" if hang else "fail")
        self.alive = False

    def check(self) -> None:
        if not self.alive:
            return
        assert len(self.producer) == len(self.offers)
        counters = self.producer.counters
        ends = counters.read + counters.released + counters.expired + counters.aborted
        assert counters.held == ends + len(self.producer.producer)
        assert counters.internal_errors == 0
        assert counters.drain_errors <= self.drain_errors
        for offer in self.offers.values():
            assert np.array_equal(self.memory[:, offer.blocks], offer.content)


class Pending(NamedTuple):
    ranks: list[Rank]
    deadline: float
    polls: int  # until it is answered
    metadata: NixlAgentMetadata | None  # what was exported when it began; None: nobody answers
    stale: bool  # it answers with that


class Handshakes:
    """Answers like the handshake client, sooner or later, or not."""

    allowed = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.pending: dict[PeerAddress, Pending] = {}

    def start(
        self,
        engine_id: str,
        host: str,
        port: int,
        ranks: Iterable[Rank] = ((0, 0),),
        *,
        timeout: float | None = None,
    ) -> bool:
        peer = PeerAddress(engine_id, host, port)
        if peer in self.pending:
            return False
        world = self.world
        engine = world.engine_at(peer)
        fault = world.choose("handshake", 6) if engine.faulty and not world.settling else 5
        metadata = self.exported(engine) if fault > 0 else None
        polls = world.choose("polls", 4)
        deadline = world.clock.now + (HANDSHAKE_TIMEOUT_S if timeout is None else timeout)
        self.pending[peer] = Pending(list(ranks), deadline, polls, metadata, fault == 1)
        return True

    @staticmethod
    def exported(engine: Engine) -> NixlAgentMetadata | None:
        return copy.copy(engine.producer.producer.metadata()) if engine.alive else None

    def cancel(self, peer: PeerAddress) -> bool:
        return self.pending.pop(peer, None) is not None

    def poll(self, timeout: float = 0.0) -> list[HandshakeOutcome]:
        outcomes: list[HandshakeOutcome] = []
        for peer, pending in list(self.pending.items()):
            metadata = pending.metadata
            if metadata is not None and not pending.stale:
                metadata = self.exported(self.world.engine_at(peer))
            late = self.world.clock.now >= pending.deadline
            if not late and (pending.polls or metadata is None):
                self.pending[peer] = pending._replace(polls=max(pending.polls - 1, 0))
                continue
            if metadata is None:
                error = HandshakeTimeoutError(peer.host, peer.port, 5.0, connected=False)
                outcomes.append(HandshakeFailed(peer, error, 0.0))
            else:
                opened = {rank: OpenedHandshake(metadata, 0.0, "h") for rank in pending.ranks}
                outcomes.append(HandshakeDone(peer, opened, None, 0.0))
            del self.pending[peer]
        return outcomes


@dataclass(eq=False)
class Fetch:
    """One request of a reader."""

    req_id: str
    offer: Offer
    local: list[int]
    expected: Words
    started: float
    aborted: bool = False


class Consumer:
    """A server that reads, and gives blocks to something else as soon as it has an outcome."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"D{number}"
        self.engine_id = f"decode-{number}"
        self.starts = 0
        self.requests = 0
        self.policy: LeasePolicy = world.pick("policy", ("prefer", "require", "prefer", "off"))
        self.max_bytes = world.pick("budget", (1 << 20, 200, 1))
        self.num_cells = world.pick("cells", (16, 2, 1))
        self.start()

    def start(self) -> None:
        world = self.world
        self.starts += 1
        self.raw = world.fabric.restart(self.name)
        self.agent = Agent(self.raw)
        self.cache, layout = make_cache(MARKER)
        world.graveyard.append(self.cache)
        self.handshakes = Handshakes(world)
        self.reader = Reader(
            self.agent,
            layout,
            engine_id=self.engine_id,
            handshakes=self.handshakes,
            clock=world.clock,
            lease_verification=self.policy,
            max_inflight_bytes=self.max_bytes,
            patience=1.0,
            request_timeout=REQUEST_TIMEOUT_S,
            handshake_timeout=HANDSHAKE_TIMEOUT_S,
            queue_timeout=STAGE_TIMEOUT_S,
            read_timeout=STAGE_TIMEOUT_S,
            verify_timeout=VERIFY_TIMEOUT_S,
            idle_timeout=8.0,
            backoff=(0.1, 1.6),
            num_cells=self.num_cells,
            sender=1 + world.next_generation(),
        )
        world.graveyard.append(self.reader)
        self.fetches: dict[str, Fetch] = {}
        self.free = set(range(BLOCKS))
        self.ends: Counter[Stage] = Counter()
        self.asked: Counter[Lease | None] = Counter()

    def fetch(self, offer: Offer) -> None:
        """Read a part of it: without what the prefix cache has, and perhaps without its end."""
        world = self.world
        total = len(offer.blocks)
        cached = world.choose("prefix hit", total + 1) if world.choose("hit", 3) == 0 else 0
        cut = world.choose("end", total - cached + 1) if world.choose("cut", 4) == 0 else 0
        end = total - cut
        if self.reader.closed or len(self.free) < end - cached:
            return
        local: list[int] = []
        while len(local) < end - cached:
            local.append(world.pick("local", sorted(self.free.difference(local))))
        self.free.difference_update(local)
        self.asked[offer.lease] += 1
        self.requests += 1
        req_id = f"{self.name}.{self.requests}"
        self.fetches[req_id] = Fetch(
            req_id,
            offer,
            local,
            offer.content[:, cached:end],
            world.clock.now,
        )
        self.reader.fetch(
            req_id,
            offer.reference,
            [local],
            num_computed_blocks=[cached] if cached or world.choose("say so", 2) else None,
            num_tokens=world.pick("tokens", (end * BLOCK_SIZE, None)),
        )

    def abort(self) -> None:
        req_id = self.world.pick("abort", sorted(self.fetches))
        if self.reader.abort(req_id):
            self.fetches[req_id].aborted = True

    def step(self) -> None:
        for outcome in self.reader.step():
            self.take(outcome)
        overdue = self.reader.overdue()
        for fetch in self.fetches.values():
            late = self.world.clock.now >= fetch.started + REQUEST_TIMEOUT_S
            assert not late or fetch.req_id in overdue, f"{fetch.req_id} has no answer in time"
        if self.reader.closed:
            self.close()

    def take(self, outcome: ReadOutcome) -> None:
        fetch = self.fetches.pop(outcome.req_id, None)
        assert fetch is not None, f"{outcome.req_id} has a second outcome, or was never asked for"
        self.ends[outcome.stage] += 1
        for block in fetch.local:
            for layer in range(LAYERS):
                row = self.cache[layer, block]
                writers = self.world.fabric.writers(row.ctypes.data, row.nbytes)
                assert not writers, f"{outcome.req_id} is reported, but {writers} write its blocks"
        self.world.judge_outcome(self, fetch, outcome)
        self.cache[:, fetch.local] = MARKER
        self.free.update(fetch.local)

    def close(self) -> None:
        """Begin to close, or go on with it; a reader that is through is replaced."""
        if self.reader.close(timeout=0) or self.agent.retry_releases():
            return
        for outcome in self.reader.step():
            self.take(outcome)
        assert not self.fetches, f"closed without an outcome for {list(self.fetches)}"
        assert self.reader.num_requests == self.reader.num_remotes == 0
        assert self.agent.live == dict.fromkeys(self.agent.live, 0)
        assert self.raw.live_transfers == self.raw.live_lists == self.raw.registrations == 0
        assert not self.raw.remote_agents
        assert not self.handshakes.pending
        if not self.world.settling:
            self.start()

    def check(self) -> None:
        assert self.reader.num_requests <= len(self.fetches)
        assert self.reader.bytes_in_flight >= 0
        counters = self.reader.counters
        ends = counters.verified + counters.unverified + counters.aborted + counters.failed.total()
        # What has ended but was not reported yet is in both.
        assert ends + self.reader.num_requests == self.ends.total() + len(self.fetches)
        if not self.reader.num_requests:
            verifier = self.reader._verifier
            assert verifier is None or not verifier.has_checks
            assert self.reader.bytes_in_flight == 0
        free = sorted(self.free)
        assert np.all(self.cache[:, free] == MARKER), "bytes landed in blocks that were given back"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Told:
    """Who has told a producer what about one of its requests: agents and their starts."""

    done: set[tuple[str, int | None]] = field(default_factory=set)
    other: set[tuple[str, int | None]] = field(default_factory=set)


class World:
    """Producers, readers, the network between them, and the judge.

    Args:
        choose: ``choose(label, n)`` returns a number in ``range(n)``.

    Attributes:
        seen: how often what happened, to tell that a run was worth something.
    """

    def __init__(self, choose: Chooser) -> None:
        self.choose: Chooser = lambda label, n: choose(label, n) if n > 1 else 0
        self.clock = Clock()
        self.fabric = FakeFabric(chooser=choose)
        self.fabric.rule = self.plan_of
        self.fabric.notice_rule = self.fate_of
        self.settling = False
        self.generations = 0
        self.labels: dict[int, Label] = {}
        self.told: dict[tuple[Any, ...], Told] = {}
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        self.offers: list[Offer] = []  # the last ones
        self.graveyard: list[object] = []  # memory that transfers of the dead may name
        self.consumers: list[Consumer] = []
        self.engines: list[Engine] = []
        for number in range(1 + self.choose("producers", 3)):
            self.engines.append(Engine(self, number, faulty=self.choose("faulty", 3) > 0))
        for number in range(1 + self.choose("readers", 3)):
            self.consumers.append(Consumer(self, number))

    def pick(self, label: str, options: Sequence[T]) -> T:
        return options[self.choose(label, len(options))]

    def next_generation(self) -> int:
        self.generations += 1
        return self.generations

    def engine_at(self, peer: PeerAddress) -> Engine:
        (engine,) = [e for e in self.engines if (e.engine_id, *e.address) == tuple(peer)]
        return engine

    def engine_of(self, agent_name: str) -> Engine:
        (engine,) = [engine for engine in self.engines if engine.name == agent_name]
        return engine

    # the network

    def plan_of(self, transfer: FakeTransfer) -> Plan:
        if self.engine_of(transfer.remote).faulty and self.choose("fault", 5) == 0:
            return self.fabric.any_plan(transfer)
        return Plan(
            polls=self.pick("polls", (0, 1, 3, None)),
            copy=self.pick("copy", ("spread", "end", "start")),
            piece_bytes=self.pick("piece", (8, 4, None)),
        )

    def fate_of(self, notice: FakeNotice) -> NoticeFate:
        engine = self.engine_of(notice.target)
        note = parse_notification(notice.message)
        if isinstance(note, Completion):
            for key in (*note.leases, *note.request_ids):
                told = self.told.setdefault((engine.name, engine.starts, key), Told())
                sender = (notice.source, note.sender)
                (told.done if note.outcome is Outcome.DONE else told.other).add(sender)
            self.judge_completion(notice, note)
        if self.settling:
            return "deliver"
        return self.pick("fate", ("deliver", "deliver", "hold", "hold", "duplicate", "lose"))

    # what may happen

    def offer(self) -> None:
        engine = self.pick("engine", self.engines)
        if engine.alive:
            offer = engine.offer()
            if offer is not None:
                self.seen["offered without a lease"] += offer.lease is None
                self.offers = [*self.offers[-9:], offer]

    def fetch(self) -> None:
        if not self.offers:
            return
        standing = [offer for offer in self.offers if offer.stands]
        offers = standing if standing and self.choose("any", 5) else self.offers
        consumer = self.pick("consumer", self.consumers)
        consumer.fetch(self.pick("offer", offers))

    def offer_and_fetch(self) -> None:
        self.offer()
        self.fetch()

    def step_all(self) -> None:
        for consumer in self.consumers:
            consumer.step()
        for engine in self.engines:
            engine.step()

    def step_reader(self) -> None:
        self.pick("consumer", self.consumers).step()

    def step_producer(self) -> None:
        self.pick("engine", self.engines).step()

    def progress(self) -> None:
        self.fabric.progress(1 + self.choose("steps", 8))

    def deliver(self) -> None:
        if self.fabric.notices:
            self.pick("notice", self.fabric.notices).deliver(self.choose("copies", 3))

    def wait(self) -> None:
        self.clock.now += self.pick("seconds", SECONDS)

    def abort(self) -> None:
        consumer = self.pick("consumer", self.consumers)
        if consumer.fetches:
            consumer.abort()

    def cancel(self) -> None:
        """The producer takes an offer back, rather one that is being read."""
        read = [f.offer for c in self.consumers for f in c.fetches.values() if f.offer.stands]
        offers = read or [offer for offer in self.offers if offer.stands]
        if not offers:
            return
        offer = self.pick("offer", offers)
        offer.cancelled |= offer.engine.producer.cancel(offer.req_id)
        if self.choose("at once", 2):
            offer.engine.step()

    def reject(self) -> None:
        """A reader's server rejects a request before it fetches it."""
        consumer = self.pick("consumer", self.consumers)
        if self.offers and not consumer.reader.closed:
            consumer.reader.release(self.pick("offer", self.offers).reference)

    def prepare(self) -> None:
        consumer, engine = self.pick("consumer", self.consumers), self.pick("engine", self.engines)
        if not consumer.reader.closed:
            consumer.reader.prepare(engine.engine_id, *engine.address)

    def heartbeat(self) -> None:
        consumer, engine = self.pick("consumer", self.consumers), self.pick("engine", self.engines)
        offers = [f.offer for f in consumer.fetches.values() if f.offer.engine is engine]
        leases = {offer.lease for offer in offers if offer.lease is not None}
        ids = {offer.req_id for offer in offers if offer.lease is None}
        reader = consumer.reader
        for rank in reader.ranks_of(engine.engine_id) or ():
            for names in ({"leases": sorted(leases)}, {"request_ids": sorted(ids)}):
                if any(names.values()):
                    number = reader.next_sequence()
                    message = encode_heartbeat(
                        LEASE_S,
                        sender=reader.sender,
                        sequence=number,
                        **names,
                    )
                    self.send(consumer, rank.agent, message)

    def forge(self) -> None:
        """A completion of somebody who knows a request id, or guesses a lease."""
        consumer = self.pick("consumer", self.consumers)
        leased = [offer for offer in self.offers if offer.lease is not None]
        if not leased:
            return
        offer = self.pick("offer", leased)
        assert offer.lease is not None
        slot, nonce = offer.lease
        guesses = [(slot, nonce + 2**32), ((slot + 1) % NUM_SLOTS, nonce)]
        names: dict[str, Any] = self.pick(
            "forged", ({"request_ids": [offer.req_id]}, {"leases": guesses})
        )
        message = encode_completion(
            Outcome.DONE, 1, sender=FORGER, sequence=self.next_generation(), **names
        )
        for rank in consumer.reader.ranks_of(offer.engine.engine_id) or ():
            self.send(consumer, rank.agent, message)

    def send(self, consumer: Consumer, agent_name: str, message: bytes) -> None:
        try:
            consumer.raw.send_notif(agent_name, message)
        except Exception as error:
            assert type(error).__name__.startswith("nixl"), error  # noqa: PT017

    def fail_a_call(self) -> None:
        engine = self.pick("engine", self.engines)
        if not engine.faulty:
            return
        if self.choose("which side", 6) == 0:
            engine.drain_errors += 1
            self.fabric.fail("get_new_notifs", agent=engine.name)
            return
        consumer = self.pick("consumer", self.consumers)
        if self.choose("end", 6) == 0:
            plan = Plan(polls=1, end=nixlRemoteDisconnectError, copied=0.5)
            self.fabric.script(plan, agent=consumer.name, remote=engine.name)
            return
        # A state check that raises leaves the transfer running. Only with "not found" may NIXL do
        # that again and again.
        error: type[Exception]
        operation, error = self.pick(
            "call",
            (
                ("make_prepped_xfer", nixlBackendError),
                ("make_prepped_xfer", nixlRemoteDisconnectError),
                ("transfer", nixlBackendError),
                ("check_xfer_state", nixlNotFoundError),
                ("release_xfer_handle", nixlBackendError),
                ("release_dlist_handle", nixlBackendError),
                ("prep_xfer_dlist", nixlNotFoundError),
                ("make_connection", nixlRemoteDisconnectError),
                ("remove_remote_agent", nixlBackendError),
                ("send_notif", nixlBackendError),
                ("send_notif", nixlRemoteDisconnectError),
            ),
        )
        times = 1 + self.choose("times", 3)
        self.fabric.fail(operation, error, agent=consumer.name, remote=engine.name, times=times)

    def end_a_producer(self) -> None:
        """It dies or shuts down, and mostly is back at once, with the same id and address."""
        engine = self.pick("engine", self.engines)
        if not engine.faulty:
            return
        if engine.alive:
            self.seen["producers ended"] += 1
            how = self.choose("how", 3)
            if how == 0:
                engine.close()
            else:
                engine.kill(hang=how == 1)
        if self.choose("back", 4):
            engine.start()

    def end_a_reader(self) -> None:
        consumer = self.pick("consumer", self.consumers)
        self.seen["readers ended"] += 1
        if self.choose("how", 2):
            consumer.start()
        elif not consumer.reader.closed:
            consumer.close()

    # the judge

    def judge_completion(self, notice: FakeNotice, note: Completion) -> None:
        """What is to be verified is not said to be read before its slot was fetched."""
        (consumer,) = [consumer for consumer in self.consumers if consumer.name == notice.source]
        reader = consumer.reader
        if note.sender != reader.sender or note.outcome is not Outcome.DONE:
            return
        for lease in note.leases if consumer.policy != "off" else ():
            fetches = [f for f in consumer.fetches.values() if f.offer.lease == lease]
            stages = {reader.stage(fetch.req_id) for fetch in fetches}
            once = consumer.asked[lease] == 1
            if once and stages and stages <= {Stage.HANDSHAKE, Stage.QUEUED, Stage.READING}:
                # Raised here, it would look like an error of NIXL.
                self.problems.append(f"{notice.source} says early that it has read {lease}")

    def judge_end(self, offer: Offer, outcome: LeaseOutcome) -> None:
        """A lease ended: once, and for a reason."""
        assert offer.outcome is None
        self.seen[f"lease {outcome}"] += 1
        told = self.told.get(offer.key, Told())
        if outcome is LeaseOutcome.READ:
            assert len(told.done) >= offer.consumers, f"{offer} was not read by all: {told}"
        elif outcome is LeaseOutcome.RELEASED:
            assert len(told.done | told.other) >= offer.consumers, f"{offer} ended early: {told}"
        elif outcome is LeaseOutcome.EXPIRED:
            assert self.clock.now >= offer.deadline
        else:
            assert offer.cancelled or offer.engine.producer.producer.closed
        assert not offer.cancelled or outcome is LeaseOutcome.ABORTED

    def judge_outcome(self, consumer: Consumer, fetch: Fetch, outcome: ReadOutcome) -> None:
        offer = fetch.offer
        here = consumer.cache[:, fetch.local]
        right = np.array_equal(here, fetch.expected)
        kind = outcome.stage.value + (" verified" if outcome.verified else "")
        self.seen[kind] += 1
        if outcome.stage is Stage.ABORTED:
            assert fetch.aborted or consumer.reader.closed
        else:
            assert not fetch.aborted
        if not offer.engine.faulty and outcome.ended_in is not Stage.HANDSHAKE:
            told = self.told.get(offer.key, Told())
            sender = (consumer.name, consumer.reader.sender)
            assert sender in told.done | told.other, f"{offer.engine.name} was not told"
            unread = not outcome.done and outcome.ended_in is not Stage.VERIFYING
            if unread and offer.lease is not None and consumer.policy != "off":
                assert sender in told.other, f"{offer.engine.name} was told that it was read"
        if outcome.done:
            if outcome.verified:
                assert right, f"{outcome} of {offer} holds {self.names(here)}"
                assert offer.lease is not None or not fetch.local
            else:
                assert consumer.policy != "require"
                assert consumer.policy == "off" or offer.lease is None
            assert right or not offer.stands, f"{outcome} of {offer} holds {self.names(here)}"
        elif outcome.stage is Stage.FAILED:
            assert outcome.cause is not None
            self.judge_failure(consumer, fetch, outcome.cause, outcome.reason)
            if outcome.cause is FailureCause.LEASE_ENDED:
                self.seen["caught"] += outcome.ended_in is Stage.VERIFYING and not right

    def judge_failure(
        self, consumer: Consumer, fetch: Fetch, cause: FailureCause, reason: str
    ) -> None:
        """A peer that is well fails no request but by a lease that ended or time that passed."""
        offer = fetch.offer
        self.seen[f"failed: {cause}"] += 1
        if cause is FailureCause.TIMEOUT:
            assert self.clock.now >= fetch.started + SHORTEST_TIMEOUT_S
        elif cause is FailureCause.NO_LEASE:
            assert consumer.policy == "require"
            assert offer.lease is None
        elif cause is FailureCause.LEASE_ENDED:
            # A lease ends a little before the producer's step that reports it.
            held = offer.stands and offer.req_id in offer.engine.producer.producer
            excused = offer.engine.faulty or not held
            assert excused or self.clock.now >= fetch.started + VERIFY_TIMEOUT_S, reason
        elif cause is FailureCause.HANDSHAKE:
            assert offer.engine.faulty, f"{cause} of an engine that is well: {reason}"
        else:
            assert cause in (
                FailureCause.POST,
                FailureCause.TRANSFER,
                FailureCause.DISCONNECTED,
            ), reason
            assert offer.engine.faulty, f"{cause} of an engine that is well: {reason}"

    def names(self, words: Words) -> list[Label | None]:
        """What is in some blocks, word by word."""
        return sorted(
            {self.labels.get(int(word) >> 16) for word in words.flat},
            key=lambda label: label or (),
        )

    def check(self) -> None:
        assert not self.fabric.violations
        assert not self.problems
        for engine in self.engines:
            engine.check()
        for consumer in self.consumers:
            consumer.check()

    def finish(self) -> None:
        """No more faults: everything ends by itself, then closes and leaves nothing."""
        self.settling = True
        self.fabric.clear()
        self.fabric.rule = None
        for engine in self.engines:
            if not engine.alive:
                engine.start()
        started = self.clock.now
        while any(c.fetches for c in self.consumers) or any(e.offers for e in self.engines):
            assert self.clock.now < started + 40.0, "not everything ends"
            self.clock.now += 0.5
            self.fabric.settle()
            self.step_all()
            self.check()
        for _ in range(20):
            self.fabric.settle()
            for consumer in self.consumers:
                consumer.close()
        for engine in self.engines:
            assert engine.producer.close() == []
        assert not self.fabric.notices
        self.fabric.assert_clean()


OPERATIONS: tuple[Callable[[World], None], ...] = (
    *(World.step_reader,) * 12,
    *(World.step_all,) * 8,
    *(World.progress,) * 8,
    *(World.offer_and_fetch,) * 8,
    *(World.fetch,) * 5,
    *(World.step_producer,) * 4,
    *(World.wait,) * 3,
    *(World.deliver,) * 2,
    *(World.cancel,) * 2,
    *(World.fail_a_call,) * 2,
    World.offer,
    World.abort,
    World.heartbeat,
    World.reject,
    World.prepare,
    World.forge,
    World.end_a_producer,
    World.end_a_reader,
)


class PullMachine(RuleBasedStateMachine):
    """One rule: any operation of the world; what an operation leaves open is drawn too."""

    world: World | None = None

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng: random.Random) -> None:
        self.world = World(lambda _label, n: rng.randrange(n))

    @rule(operation=st.sampled_from(OPERATIONS))
    def operate(self, operation: Callable[[World], None]) -> None:
        assert self.world is not None
        operation(self.world)
        self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()


@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_the_pull_path_keeps_its_promises_state_machine() -> None:
    run_state_machine_as_test(
        PullMachine,
        settings=machine_settings(NUM_EXAMPLES, STEPS_PER_EXAMPLE, derandomize=not LONG),
    )


def run(seed: int) -> Counter[str]:
    """One run by seeded dice; what happened in it."""
    rng = random.Random(seed)
    world = World(lambda _label, n: rng.randrange(n))
    for _ in range(NUM_OPERATIONS):
        rng.choice(OPERATIONS)(world)
        world.check()
    world.finish()
    return world.seen


@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_the_pull_path_keeps_its_promises_long_runs() -> None:
    seen = run_seeds(run, range(NUM_SEEDS))
    for what in (
        "done verified",
        "done",
        "aborted",
        "caught",
        "offered without a lease",
        "producers ended",
        "readers ended",
        *(f"lease {outcome}" for outcome in LeaseOutcome),
        *(f"failed: {cause}" for cause in EXPECTED_FAILURES),
    ):
        assert seen[what] >= NUM_SEEDS / 5, f"{what!r} hardly ever happened: {seen}"


# --- broken on purpose --------------------------------------------------------------------------


def forget_to_clear(patch: pytest.MonkeyPatch) -> None:
    """Leases end without their slots being cleared."""
    patch.setattr(ProducerLeaseSlots, "clear", lambda self, req_id: None)


def skip_the_check(patch: pytest.MonkeyPatch) -> None:
    """The reader reports what it has read as verified without asking."""

    def settle(self: Reader, request: Any, now: float) -> None:
        if not request.posted and request.verify and request.ending is None:
            self._finish(request, (Stage.DONE, None, ""), now, verified=True)
        else:
            original(self, request, now)

    original = Reader._settle
    patch.setattr(Reader, "_settle", settle)


def report_early(patch: pytest.MonkeyPatch) -> None:
    """The reader takes every transfer that it closed for over."""
    original = Transfer.close

    def close(self: Transfer) -> bool:
        original(self)
        return True

    patch.setattr(Transfer, "close", close)


def count_senders_twice(patch: pytest.MonkeyPatch) -> None:
    """A completion that arrives twice counts for two readers."""
    original = Producer._count
    numbers = itertools.count()

    def count(self: Producer, held: Any, part: Any) -> None:
        original(self, held, part._replace(sender=(part.sender[0], next(numbers))))

    patch.setattr(Producer, "_count", count)


@pytest.mark.parametrize(
    "break_it", [forget_to_clear, skip_the_check, report_early, count_senders_twice]
)
def test_a_broken_pull_path_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(run, range(NUM_SEEDS))
