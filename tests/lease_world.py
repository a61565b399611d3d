"""A small world of lease slots: engines that keep giving blocks away, a reader that reads them, and
a model of which blocks are still promised. Everything that may vary is decided by a chooser.

Engines have a scheduler (the `SlotPool` of a `LeaseSlotAllocator`) and one worker per rank
(`ProducerLeaseSlots`). A worker applies the scheduler's steps later, one by one. What readers see
of its slot words is a copy: a store reaches it at some later moment of the world's choice, at the
latest with the fence that `ProducerLeaseSlots.publish` makes. Blocks are seen at once. That is the
weakest memory order that the protocol has to cope with.

The model: a request's blocks are promised until a worker may write them again. A read is right when
that moment comes after the last byte of its block READs was copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvnixl.leases
from kvnixl._slots import SlotPool
from kvnixl.fake import (
    FakeAgent,
    FakeFabric,
    FakeTransfer,
    Plan,
    nixl_xfer_handle,
    nixlBackendError,
)
from kvnixl.leases import LeaseVerifier, ProducerLeaseSlots, lease_slot_descs

NUM_SLOTS = 3
NUM_BLOCKS = 6
BLOCKS_PER_REQUEST = 2
BLOCK_WORDS = 2
NUM_CELLS = 5
TIMEOUT = 10.0

Chooser = Callable[[str, int], int]
WrapTable = Callable[[Any, npt.NDArray[np.int64]], Any]


class ForeignBytesError(AssertionError):
    """A read was accepted although its blocks were not promised any more."""


@dataclass(eq=False)
class Request:
    """One request of an engine, as the model sees it."""

    req_id: str
    engine: Engine
    blocks: list[int]
    tag: int
    lease: tuple[int, int] | None = None
    written_by: int = 0
    sent_by: set[int] = field(default_factory=set)
    released: bool = False
    free_since: int | None = None  # the first moment at which a worker may write its blocks


class Step(NamedTuple):
    """What a scheduler tells its workers: clears, arms, blocks that are free, new content."""

    to_clear: set[str]
    to_arm: dict[str, tuple[int, int]]
    freed: list[Request]
    writes: list[Request]


class Worker:
    """One rank of an engine."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.agent = world.fabric.agent(name)
        self.slots = ProducerLeaseSlots(NUM_SLOTS)
        self.seen = np.zeros(NUM_SLOTS, np.int64)  # the slot words as readers see them
        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_WORDS), np.int64)
        self.steps: list[Step] = []
        self.agent.register_memory(
            [
                (self.seen.ctypes.data, self.seen.nbytes, 0, ""),
                (self.blocks.ctypes.data, self.blocks.nbytes, 0, ""),
            ],
            "DRAM",
        )

    def drain(self, slot: int) -> None:
        """One slot word becomes visible to readers."""
        self.seen[slot] = self.slots.words[slot]

    def publish(self) -> None:
        self.world.fencing = self
        self.slots.publish()
        self.world.fencing = None

    def run_step(self) -> None:
        if not self.steps:
            return
        step = self.steps.pop(0)
        self.slots.update(step.to_clear, step.to_arm)
        self.publish()
        for request in step.freed:
            self.world.mark_free(request)
        for request in step.writes:
            self.blocks[request.blocks] = request.tag
            request.written_by += 1


class Engine:
    def __init__(self, world: World, engine_id: str, num_ranks: int) -> None:
        self.world = world
        self.engine_id = engine_id
        self.workers = [Worker(world, f"{engine_id}.{rank}") for rank in range(num_ranks)]
        self.free_blocks = list(range(NUM_BLOCKS))
        self.prefilled: list[Request] = []
        self.requests: list[Request] = []
        self.writes: list[Request] = []
        self.freed: list[Request] = []
        self.allocator = self.new_allocator()

    def new_allocator(self) -> SlotPool:
        """Nonces that differ only in their high halves from those of other lives of the engine,
        near the place where the low half wraps."""
        self.world.lives += 1
        high = 16 * self.world.lives
        low = (1, 2**32 - 3)[self.world.choose("low half", 2)]
        return SlotPool(NUM_SLOTS, (high << 32) + low)

    def offer(self) -> None:
        """A request is computed: its blocks are written in the next step, leased after it."""
        if len(self.free_blocks) < BLOCKS_PER_REQUEST:
            return
        blocks = [
            self.free_blocks.pop(self.world.choose("block", len(self.free_blocks)))
            for _ in range(BLOCKS_PER_REQUEST)
        ]
        tag = self.world.next_tag()
        request = Request(f"{self.engine_id}-{tag}", self, blocks, tag)
        self.writes.append(request)

    def schedule(self) -> None:
        """One scheduler step."""
        for request in self.prefilled:
            request.lease = self.allocator.acquire(request.req_id)
            self.requests.append(request)
        self.prefilled = self.writes
        to_arm, to_clear = self.allocator.take_updates()
        for worker in self.workers:
            worker.steps.append(Step(set(to_clear), dict(to_arm), self.freed, self.writes))
        self.writes, self.freed = [], []

    def abort(self, request: Request) -> None:
        """The scheduler takes the blocks back; the workers clear the slot in their next step."""
        if request.released:
            return
        request.released = True
        self.allocator.release(request.req_id, clear=True)
        self.free_blocks += request.blocks
        self.freed.append(request)

    def sent(self, request: Request, rank: int) -> None:
        """One worker has sent the request; after the last one the scheduler frees the blocks."""
        worker = self.workers[rank]
        if request.released or rank in request.sent_by:
            return
        if worker.slots.nonce(request.req_id) is None:
            return  # the worker has not heard of the lease: a send record comes with or after it
        worker.slots.clear(request.req_id)
        worker.publish()
        request.sent_by.add(rank)
        if len(request.sent_by) == len(self.workers):
            request.released = True
            self.world.mark_free(request)
            self.allocator.release(request.req_id, clear=False)
            self.free_blocks += request.blocks

    def restart(self) -> None:
        """All at once everything is gone, also from the slots. The reader is not told."""
        for worker in self.workers:
            worker.slots.words[:] = 0
            worker.seen[:] = 0
            worker.slots = ProducerLeaseSlots(NUM_SLOTS)
            worker.steps.clear()
        for request in [*self.requests, *self.prefilled, *self.writes]:
            request.released = True
            self.world.mark_free(request)
        self.requests = []
        self.prefilled, self.writes, self.freed = [], [], []
        self.free_blocks = list(range(NUM_BLOCKS))
        self.allocator = self.new_allocator()


@dataclass(eq=False)
class Fetch:
    """One read of a request by the reader."""

    request: Request
    landing: npt.NDArray[np.int64]  # (ranks, blocks, words)
    reads: list[FakeTransfer]
    done_at: int | None = None
    reported: bool = False


class LossyAgent:
    """The reader's agent. Of a slot READ marked in ``losing``, NIXL says that it is done although a
    part of each word has not arrived."""

    def __init__(self, agent: FakeAgent) -> None:
        self.fake = agent
        self.losing: dict[FakeTransfer, slice] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake, name)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        transfer = handle.transfer
        lost = self.losing.pop(transfer, None)
        if lost is None or not transfer.in_flight:
            return self.fake.check_xfer_state(handle)
        cells = [_bytes_at(int(address)) for address in transfer.destination]
        before = [cell.copy() for cell in cells]
        transfer.finish()
        for cell, old in zip(cells, before, strict=True):
            cell[lost] = old[lost]
        return self.fake.check_xfer_state(handle)


def _bytes_at(address: int) -> npt.NDArray[np.uint8]:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * 8).from_address(address), np.uint8)


class World:
    """Engines, one reader, the network between them, and the judge.

    Args:
        choose: ``choose(label, n)`` returns a number in ``range(n)``.
        wrap_table: replaces the verifier's table, to break it on purpose; called with the table and
            the landing cells.

    Attributes:
        accepted, rejected: outcomes so far.
        caught: rejected reads whose bytes were foreign.
    """

    def __init__(self, choose: Chooser, wrap_table: WrapTable | None = None) -> None:
        self.choose = lambda label, n: choose(label, n) if n > 1 else 0
        self.fabric = FakeFabric(chooser=choose)
        self.fabric.rule = self.plan_of
        self.now = 0.0
        self.moment = 0
        self.tags = 0
        self.lives = 0
        self.losing_next = False  # the next slot READ ends without all of its bytes
        self.fencing: Worker | None = None
        self.accepted = self.rejected = self.caught = 0
        self.last_accepted: Request | None = None
        self._fence = kvnixl.leases.revoke_fence
        kvnixl.leases.revoke_fence = self.fence
        self.agent = LossyAgent(self.fabric.agent("reader"))
        self.verifier = LeaseVerifier(
            self.agent, NUM_CELLS, timeout=TIMEOUT, clock=lambda: self.now
        )
        if wrap_table is not None:
            self.verifier._table = wrap_table(self.verifier._table, self.verifier.words)
        self.engines = [Engine(self, "A", 2), Engine(self, "B", 1)]
        self.landing = np.zeros((64, BLOCK_WORDS), np.int64)
        self.agent.register_memory([(self.landing.ctypes.data, self.landing.nbytes, 0, "")], "DRAM")
        self.local_blocks = self.agent.prep_xfer_dlist("", _block_descs(self.landing), "DRAM")
        self.remote_blocks: dict[tuple[str, int], Any] = {}
        self.peers: list[Any] = []
        self.free_landing = list(range(len(self.landing)))
        self.fetches: dict[str, Fetch] = {}
        self.known: list[Request] = []  # leased at some time; the reader may still believe in them
        for engine in self.engines:
            for rank, worker in enumerate(engine.workers):
                peer = self.agent.add_remote_agent(worker.agent.get_agent_metadata())
                self.peers.append(peer)
                self.remote_blocks[engine.engine_id, rank] = self.agent.prep_xfer_dlist(
                    peer, _block_descs(worker.blocks), "DRAM"
                )
            self.connect(engine)

    def close(self) -> None:
        kvnixl.leases.revoke_fence = self._fence

    # the machine

    def fence(self) -> None:
        assert self.fencing is not None, "a fence that nobody asked for"
        for slot in range(NUM_SLOTS):
            self.fencing.drain(slot)

    def next_tag(self) -> int:
        self.tags += 1
        return self.tags

    def mark_free(self, request: Request) -> None:
        self.moment += 1
        if request.free_since is None:
            request.free_since = self.moment

    def plan_of(self, transfer: FakeTransfer) -> Plan:
        """Block READs end well, in pieces; slot READs in every way, mostly well."""
        if transfer.lengths[0] != 8:
            return Plan(polls=None, piece_bytes=8)
        pick = self.choose
        trouble = 1 if self.losing_next else pick("trouble", 16)
        self.losing_next = False
        if trouble in {1, 6}:
            self.agent.losing[transfer] = (slice(0, 8), slice(0, 4), slice(4, 8))[pick("lost", 3)]
        return Plan(
            make=nixlBackendError if trouble == 2 else None,
            post=(nixlBackendError, "ERR")[pick("post", 2)] if trouble == 3 else None,
            polls=(1, 2, None)[pick("polls", 3)],
            copy=("end", "start", "spread")[pick("copy", 3)],
            piece_bytes=4,
            end=(nixlBackendError, "ERR")[pick("end", 2)] if trouble == 4 else "DONE",
            copied=0.5 * pick("copied", 3),
            refuse=pick("refuse", 3) if trouble == 5 else 0,
        )

    # the reader

    def connect(self, engine: Engine) -> None:
        for rank, worker in enumerate(engine.workers):
            peer = self.agent.add_remote_agent(worker.agent.get_agent_metadata())
            descs = lease_slot_descs(worker.seen.ctypes.data, NUM_SLOTS)
            self.verifier.add_remote(
                engine.engine_id, rank, self.agent.prep_xfer_dlist(peer, descs, "DRAM"), NUM_SLOTS
            )

    def disconnect(self, engine: Engine) -> None:
        self.verifier.release_engine(engine.engine_id)

    def fetch(self, request: Request) -> None:
        """Read a request, however old what the reader knows of it may be.

        A reader hears of a request when it is computed; its slots may be armed later.
        """
        engine = request.engine
        if request.req_id in self.fetches or request.lease is None:
            return
        if request.written_by < len(engine.workers):
            return
        count = len(engine.workers) * BLOCKS_PER_REQUEST
        if len(self.free_landing) < count:
            return
        rows = [self.free_landing.pop() for _ in range(count)]
        landing = np.array(rows, np.int32).reshape(len(engine.workers), BLOCKS_PER_REQUEST)
        reads = []
        for rank in range(len(engine.workers)):
            handle = self.agent.make_prepped_xfer(
                "READ",
                self.local_blocks,
                landing[rank],
                self.remote_blocks[engine.engine_id, rank],
                np.array(request.blocks, np.int32),
            )
            assert self.agent.transfer(handle) == "PROC"
            reads.append(handle)
        self.verifier.add_checks(
            request.req_id, engine.engine_id, range(len(engine.workers)), *request.lease
        )
        self.fetches[request.req_id] = Fetch(request, landing, reads)

    def progress(self, steps: int) -> None:
        """Some transfers move on, a piece at a time; stores become visible."""
        for _ in range(steps):
            self.fabric.progress()
            if self.choose("drain", 4) == 1:
                engine = self.engines[self.choose("engine", len(self.engines))]
                worker = engine.workers[self.choose("rank", len(engine.workers))]
                worker.drain(self.choose("slot", NUM_SLOTS))
            self.notice_completions()

    def notice_completions(self) -> None:
        for fetch in self.fetches.values():
            if fetch.done_at is None and not any(h.transfer.in_flight for h in fetch.reads):
                self.moment += 1
                fetch.done_at = self.moment

    def step(self, *, report: bool = True, repeat: bool = False) -> None:
        """One step of the verifier; completions may be reported late or again."""
        done = [
            req_id
            for req_id, fetch in self.fetches.items()
            if fetch.done_at is not None and (repeat or (report and not fetch.reported))
        ]
        for req_id in done:
            self.fetches[req_id].reported = True
        verified, failed = self.verifier.step(done)
        assert not verified & failed.keys(), "two outcomes for one request"
        for req_id in verified:
            self.accept(self.fetches[req_id])
            self.forget(req_id)
        for req_id, reason in failed.items():
            fetch = self.fetches[req_id]
            assert fetch.reported, f"{req_id} failed before its block READs were done: {reason}"
            assert reason
            self.rejected += 1
            self.caught += not self.is_right(fetch)
            self.forget(req_id)
        self.check_cells()

    def is_right(self, fetch: Fetch) -> bool:
        free_since = fetch.request.free_since
        return free_since is None or (fetch.done_at is not None and free_since > fetch.done_at)

    def accept(self, fetch: Fetch) -> None:
        if not fetch.reported or not self.is_right(fetch):
            raise ForeignBytesError(
                f"{fetch.request.req_id}: free since {fetch.request.free_since}, block READs done "
                f"at {fetch.done_at}, reported: {fetch.reported}"
            )
        words = self.landing[fetch.landing.ravel()]
        if not (words == fetch.request.tag).all():
            raise ForeignBytesError(f"{fetch.request.req_id}: {words.tolist()}")
        self.accepted += 1
        self.last_accepted = fetch.request

    def forget(self, req_id: str) -> None:
        """Let go of a fetch. Its block READs are over or end now."""
        fetch = self.fetches.pop(req_id)
        for handle in fetch.reads:
            handle.transfer.finish()
            self.agent.release_xfer_handle(handle)
        self.free_landing += fetch.landing.ravel().tolist()

    def discard(self, req_id: str) -> None:
        self.verifier.discard(req_id)
        self.forget(req_id)

    def check_cells(self) -> None:
        """No two READs may write one cell, and no READ in flight was released."""
        verifier = self.verifier
        low, high = verifier.base_addr, verifier.base_addr + verifier.words.nbytes
        held: list[int] = []
        for transfer in self.agent.fake._transfers:
            held += [int(a) for a in transfer.destination if low <= a < high]
        assert len(held) == len(set(held)), "two READs hold one landing cell"
        assert verifier.free_cells + len(held) == NUM_CELLS, "landing cells got lost"
        for transfer in self.fabric.transfers:
            assert not transfer.released, "a READ in flight was released"
        assert 0 <= verifier.quarantined_cells <= len(held)

    # ending

    def finish(self) -> None:
        """Everything in flight ends; every request has an outcome; nothing is left behind."""
        self.progress(1)
        self.fabric.settle()
        self.notice_completions()
        for _ in range(1000):
            if not self.fetches:
                break
            self.step()
            self.fabric.settle()
        assert not self.fetches, "requests without an outcome"
        assert not self.verifier.has_checks
        for _ in range(10):
            self.step()
            self.fabric.settle()
        assert self.verifier.quarantined_cells == 0
        assert self.verifier.free_cells == NUM_CELLS
        assert self.verifier.busy_engines() == set()
        assert self.verifier.shutdown() == 0
        for prepared in [self.local_blocks, *self.remote_blocks.values()]:
            self.agent.release_dlist_handle(prepared)
        for peer in self.peers:
            self.agent.remove_remote_agent(peer)
        assert self.agent.registrations == 1, "the verifier left its registration"
        assert self.agent.live_lists == 0
        assert self.agent.live_transfers == 0
        assert not self.fabric.violations


def _block_descs(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    size = blocks[0].nbytes
    return np.array([[blocks.ctypes.data, size, 0, size, len(blocks)]], np.uint64)


# --- operations, chosen by weight ---------------------------------------------------------------


def _requests(world: World) -> list[Request]:
    return [request for engine in world.engines for request in engine.requests]


def _pick(world: World, label: str, items: Iterable[Any]) -> Any:
    options = list(items)
    return options[world.choose(label, len(options))] if options else None


def op_offer(world: World) -> None:
    _pick(world, "engine", world.engines).offer()


def op_schedule(world: World) -> None:
    engine = _pick(world, "engine", world.engines)
    before = len(engine.requests)
    engine.schedule()
    world.known = [*world.known, *engine.requests[before:]][-6:]


def op_work(world: World) -> None:
    _pick(world, "worker", [w for e in world.engines for w in e.workers]).run_step()


def op_serve(world: World) -> None:
    """A request goes all the way to a lease that every worker has armed."""
    engine = _pick(world, "engine", world.engines)
    engine.offer()
    before = len(engine.requests)
    for _ in range(2):
        engine.schedule()
    world.known = [*world.known, *engine.requests[before:]][-6:]
    for worker in engine.workers:
        while worker.steps:
            worker.run_step()


def op_abort(world: World) -> None:
    request = _pick(world, "request", _requests(world))
    if request is not None:
        request.engine.abort(request)


def op_sent(world: World) -> None:
    request = _pick(world, "request", _requests(world))
    if request is not None:
        request.engine.sent(request, world.choose("rank", len(request.engine.workers)))


def op_restart(world: World) -> None:
    _pick(world, "engine", world.engines).restart()


def op_fetch(world: World) -> None:
    request = _pick(world, "request", world.known)
    if request is not None:
        world.fetch(request)


def op_fetch_after_the_end(world: World) -> None:
    """What was read well is given away, and read once more with the old lease."""
    request = world.last_accepted
    if request is not None:
        request.engine.abort(request)
        request.engine.schedule()
        for worker in request.engine.workers:
            while worker.steps:
                worker.run_step()
        world.fetch(request)
        world.losing_next = world.choose("lose", 2) == 1


def op_progress(world: World) -> None:
    world.progress(1 + world.choose("pieces", 12))


def op_step(world: World) -> None:
    world.step()


def op_step_without_news(world: World) -> None:
    world.step(report=False)


def op_repeat(world: World) -> None:
    world.step(repeat=True)


def op_discard(world: World) -> None:
    req_id = _pick(world, "fetch", world.fetches)
    if req_id is not None:
        world.discard(req_id)


def op_wait(world: World) -> None:
    world.now += (0.1, 6.0)[world.choose("wait", 2)]


def op_connect(world: World) -> None:
    """The reader meets an engine that it let go, or meets it once more."""
    away = [e for e in world.engines if not world.verifier.can_verify(e.engine_id, (0,))]
    if away or world.choose("again", 16) == 1:
        world.connect(_pick(world, "engine", away or world.engines))


def op_disconnect(world: World) -> None:
    if world.choose("really", 4) == 1:
        world.disconnect(_pick(world, "engine", world.engines))


WEIGHTS: dict[Callable[[World], None], int] = {
    op_offer: 2,
    op_schedule: 3,
    op_work: 5,
    op_serve: 5,
    op_abort: 2,
    op_sent: 2,
    op_restart: 1,
    op_fetch: 8,
    op_fetch_after_the_end: 3,
    op_progress: 10,
    op_step: 8,
    op_step_without_news: 2,
    op_repeat: 1,
    op_discard: 1,
    op_wait: 2,
    op_connect: 6,
    op_disconnect: 1,
}
OPERATIONS = [op for op, weight in WEIGHTS.items() for _ in range(weight)]


def run(choose: Chooser, num_operations: int, wrap_table: WrapTable | None = None) -> World:
    """Run a world for a number of operations, then to its end."""
    world = World(choose, wrap_table)
    try:
        for _ in range(num_operations):
            OPERATIONS[world.choose("operation", len(OPERATIONS))](world)
        world.finish()
    finally:
        world.close()
    return world
