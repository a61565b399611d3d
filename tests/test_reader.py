"""The reader on the fake network: what lands, what is reported, and what a peer cannot do to it."""

from __future__ import annotations

import copy
import json
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvnixl.agent import Agent
from kvnixl.compat import CompatibilityCheck
from kvnixl.deadlines import ClockOffset
from kvnixl.errors import (
    ClosedError,
    ConfigError,
    HandshakeError,
    HandshakeTimeoutError,
    RegistrationError,
    RemoteNotAllowedError,
    RequestInProgressError,
    TopologyError,
    TransferParamsError,
)
from kvnixl.fake import (
    FakeFabric,
    FakeTransfer,
    Plan,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from kvnixl.flow import FlowControl
from kvnixl.handshake import (
    HandshakeClient,
    HandshakeDone,
    HandshakeFailed,
    HandshakeOutcome,
    PeerAddress,
    Rank,
    RemoteAllowList,
)
from kvnixl.heartbeat import RemoteRank
from kvnixl.layout import CacheLayout, layout_from_addresses
from kvnixl.leases import LEASE_SLOT_BYTES, LeaseSlotAllocator, ProducerLeaseSlots
from kvnixl.metadata import (
    KvNixlExtension,
    LeaseSlotRegion,
    NixlAgentMetadata,
    PromptDigest,
    format_lease,
)
from kvnixl.producer import EmbeddedProducer
from kvnixl.reader import FailureCause, Reader, ReadOutcome, Stage
from kvnixl.topology import ReadPlan
from kvnixl.wire import (
    Completion,
    OpenedHandshake,
    Outcome,
    decode_agent_metadata,
    decode_handshake_payload,
    parse_notification,
)

LAYERS = 3
BLOCKS = 12
HEAD_BYTES = 16  # of one head in one block
HEADS = 2
BLOCK_SIZE = 4
MARKER = 0xEE

Bytes = npt.NDArray[np.uint8]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_cache(
    tp_size: int, rng: np.random.Generator | None, layers: int = LAYERS, blocks: int = BLOCKS
) -> tuple[Bytes, CacheLayout]:
    shape = (layers, blocks, HEAD_BYTES * HEADS // tp_size)
    memory = np.zeros(shape, np.uint8) if rng is None else rng.integers(1, 200, shape, np.uint8)
    layout = layout_from_addresses(
        {f"layers.{i}": memory[i].ctypes.data for i in range(layers)},
        block_len=shape[2],
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=HEADS,
        attn_backend="X",
        packing="cpu:vec",
    )
    return memory, layout


class Producer:
    """An engine that offers blocks: real slot words on fake agents, and nothing else."""

    def __init__(
        self,
        fabric: FakeFabric,
        name: str,
        *,
        tp_size: int = 1,
        kvnixl: bool = True,
        slots: int = 64,
        host: str = "10.0.0.1",
        port: int = 5600,
        seed: int = 1,
        blocks: int = BLOCKS,
        layers: int = LAYERS,
    ) -> None:
        self.fabric = fabric
        self.engine_id = name
        self.address = PeerAddress(name, host, port)
        self.tp_size = tp_size
        self.kvnixl = kvnixl
        self.num_slots = slots
        self.blocks = blocks
        self.layers = layers
        self.starts = 0
        self.seed = seed
        self.start()

    def agent_name(self, rank: int) -> str:
        return f"{self.engine_id}-{rank}"

    def start(self) -> None:
        self.starts += 1
        rng = np.random.default_rng(self.seed * 100 + self.starts)
        self.incarnation = 1000 * self.seed + self.starts
        self.allocator = LeaseSlotAllocator(max(self.num_slots, 1))
        self.agents: list[Agent] = []
        self.memory: list[Bytes] = []
        self.slots: list[ProducerLeaseSlots] = []
        self.metadata: dict[Rank, NixlAgentMetadata] = {}
        for rank in range(self.tp_size):
            raw = self.fabric.restart(self.agent_name(rank))
            agent = Agent(raw)
            memory, layout = make_cache(self.tp_size, rng, self.layers, self.blocks)
            agent.register_memory([(memory.ctypes.data, memory.nbytes, 0)])
            extension = None
            if self.kvnixl:
                slots = ProducerLeaseSlots(max(self.num_slots, 1))
                agent.register_memory([(slots.base_addr, slots.words.nbytes, 0)])
                self.slots.append(slots)
                region = (
                    LeaseSlotRegion(slots.base_addr, self.num_slots) if self.num_slots else None
                )
                extension = KvNixlExtension(incarnation=self.incarnation, lease_slots=region)
            self.agents.append(agent)
            self.memory.append(memory)
            self.metadata[0, rank] = NixlAgentMetadata(
                engine_id=self.engine_id,
                agent_metadata=agent.get_agent_metadata(),
                ssm_sizes=(0, 0),
                kvnixl=extension,
                **layout.metadata_fields(),
            )

    def kill(self, *, hang: bool = False) -> None:
        for rank in range(self.tp_size):
            self.fabric.kill(self.agent_name(rank), in_flight="hang" if hang else "fail")

    def offer(self, req_id: str, block_ids: list[int], **changes: Any) -> dict[str, Any]:
        reference: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": req_id,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
            "tp_size": self.tp_size,
        }
        lease = self.allocator.acquire(req_id) if self.kvnixl and self.num_slots else None
        if lease is not None:
            to_arm, to_clear = self.allocator.take_updates()
            for slots in self.slots:
                slots.update(to_clear, to_arm)
                slots.publish()
            reference["kvnixl_lease"] = format_lease(*lease)
        reference.update(changes)
        decoded: dict[str, Any] = json.loads(json.dumps(reference))
        return decoded

    def reuse(self, req_id: str, block_ids: Iterable[int]) -> None:
        """End the lease, then let the blocks be overwritten, as an owner does."""
        self.allocator.release(req_id, clear=True)
        for slots in self.slots:
            slots.clear(req_id)
            slots.publish()
        for memory in self.memory:
            memory[:, list(block_ids)] = MARKER

    def block(self, block_id: int) -> Bytes:
        """The bytes of a block of all ranks together, one row for each layer."""
        return np.concatenate([memory[:, block_id] for memory in self.memory], axis=1)

    def notes(self, rank: int = 0) -> list[Completion]:
        """The completions that have arrived at a rank."""
        found = self.agents[rank].get_new_notifs().values()
        parsed = [parse_notification(message) for messages in found for message in messages]
        assert all(isinstance(note, Completion) for note in parsed)
        return parsed  # type: ignore[return-value]


class Handshakes:
    """Answers like the handshake client, from a script."""

    def __init__(self, clock: Clock, allowed: RemoteAllowList | None = None) -> None:
        self.clock = clock
        self.allowed = allowed
        self.engines: dict[tuple[str, int], Producer] = {}  # by host and port
        self.silent: set[PeerAddress] = set()
        self.errors: dict[PeerAddress, HandshakeError] = {}
        self.held: set[PeerAddress] = set()
        self.pending: dict[PeerAddress, tuple[list[Rank], float]] = {}
        self.started: list[PeerAddress] = []
        self.polls = 0
        # The clocks of the owner and of the handshake client, ahead of the reader's.
        self.owner_ahead: float | None = None
        self.client_ahead = 0.0

    def measured_clock(self) -> ClockOffset | None:
        if self.owner_ahead is None:
            return None
        at = self.clock.now + self.client_ahead
        return ClockOffset(self.owner_ahead - self.client_ahead, 0.0, at)

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
        self.started.append(peer)
        self.pending[peer] = (list(ranks), self.clock.now + (timeout or 5.0))
        return True

    def cancel(self, peer: PeerAddress) -> bool:
        return self.pending.pop(peer, None) is not None

    def poll(self, timeout: float = 0.0) -> list[HandshakeOutcome]:
        self.polls += 1
        outcomes: list[HandshakeOutcome] = []
        for peer, (ranks, deadline) in list(self.pending.items()):
            if peer in self.held:
                continue
            producer = self.engines.get((peer.host, peer.port))
            error: HandshakeError | None = self.errors.get(peer)
            if error is None and (producer is None or peer in self.silent):
                if self.clock.now < deadline:
                    continue
                error = HandshakeTimeoutError(peer.host, peer.port, 5.0, connected=False)
            del self.pending[peer]
            if error is not None:
                outcomes.append(HandshakeFailed(peer, error, 0.0))
                continue
            assert producer is not None
            opened = {r: OpenedHandshake(copy.copy(producer.metadata[r]), 0.0, "h") for r in ranks}
            outcomes.append(HandshakeDone(peer, opened, self.measured_clock(), 0.0))
        return outcomes


class World:
    """One reader, any number of producers."""

    def __init__(
        self,
        fabric: FakeFabric | None = None,
        *,
        allowed: RemoteAllowList | None = None,
        **options: Any,
    ) -> None:
        self.fabric = FakeFabric() if fabric is None else fabric
        self.clock = Clock()
        self.handshakes = Handshakes(self.clock, allowed)
        self.waits: list[Callable[[], None]] = []
        self.raw = self.fabric.agent("D")
        if options.pop("release_is_final", False):
            self.raw.release_is_final = True
        self.agent = Agent(self.raw)
        self.cache, self.layout = make_cache(1, None)
        options = {
            "engine_id": "decode",
            "handshakes": self.handshakes,
            "clock": self.clock,
            "wait": self.wait,
            "patience": 1.0,
            "backoff": (0.1, 1.6),
            "num_cells": 32,
            **options,
        }
        self.reader = Reader(self.agent, self.layout, **options)
        self.outcomes: dict[str, ReadOutcome] = {}

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.waits:
            self.waits.pop(0)()

    def producer(self, name: str = "prefill", **options: Any) -> Producer:
        options.setdefault("port", 5600 + len(self.handshakes.engines))
        producer = Producer(self.fabric, name, **options)
        self.handshakes.engines[producer.address.host, producer.address.port] = producer
        return producer

    def step(self, count: int = 1, *, seconds: float = 0.0) -> list[ReadOutcome]:
        found: list[ReadOutcome] = []
        for _ in range(count):
            self.clock.now += seconds
            for outcome in self.reader.step():
                assert outcome.req_id not in self.outcomes, "a second outcome"
                self.outcomes[outcome.req_id] = outcome
                found.append(outcome)
        return found

    def fetch(
        self,
        producer: Producer,
        req_id: str = "r",
        local: Sequence[int] = (0, 1),
        remote: Sequence[int] = (5, 3),
        *,
        num_computed_blocks: Sequence[int] | None = None,
        num_tokens: int | None = None,
        **changes: Any,
    ) -> None:
        reference = producer.offer(req_id, list(remote), **changes)
        self.reader.fetch(
            req_id,
            reference,
            [list(local)],
            num_computed_blocks=num_computed_blocks,
            num_tokens=num_tokens,
        )

    def holds(self, producer: Producer, local: Sequence[int], remote: Sequence[int]) -> bool:
        return all(
            np.array_equal(self.cache[:, here], producer.block(there))
            for here, there in zip(local, remote, strict=True)
        )

    def close(self) -> None:
        for _ in range(50):
            self.fabric.settle()
            left = self.reader.close(timeout=0)
            for outcome in self.reader.step():
                assert outcome.req_id not in self.outcomes, "a second outcome"
                self.outcomes[outcome.req_id] = outcome
            if not left and not self.agent.retry_releases():
                break
        else:
            raise AssertionError(f"{left} left, {self.agent.quarantined} in quarantine")
        assert self.reader.num_requests == 0
        self.fabric.assert_clean("D")


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def leases_of(notes: list[Completion]) -> list[str]:
    return [format_lease(*lease) for note in notes for lease in note.leases]


# --- one request --------------------------------------------------------------------------------


def test_a_request_lands_byte_for_byte_and_is_verified(world: World) -> None:
    producer = world.producer()
    before = world.cache.copy()
    reference = producer.offer("r", [5, 3, 8])
    world.reader.fetch("r", reference, [[7, 2, 0]])
    assert world.reader.stage("r") is Stage.HANDSHAKE
    world.step(3)
    outcome = world.outcomes["r"]
    assert outcome.done
    assert outcome.verified
    assert outcome.num_bytes == 3 * LAYERS * HEADS * HEAD_BYTES
    assert world.holds(producer, [7, 2, 0], [5, 3, 8])
    untouched = [i for i in range(BLOCKS) if i not in (7, 2, 0)]
    assert np.array_equal(world.cache[:, untouched], before[:, untouched])
    assert world.reader.stage("r") is None
    # One message, and it rode on the READ of the slot.
    (note,) = producer.notes()
    assert note.outcome is Outcome.DONE
    assert note.consumers == 1
    assert note.sender == world.reader.sender
    assert leases_of([note]) == [reference["kvnixl_lease"]]
    assert world.raw.calls["send_notif"] == 0
    assert world.reader.counters.verified == 1


def test_the_notification_leaves_with_the_slot_read_not_with_the_data(world: World) -> None:
    producer = world.producer()
    world.fabric.plan = Plan(polls=1)
    world.fetch(producer)
    world.step()
    (data,) = world.fabric.transfers
    assert data.notif_msg is None
    world.step()
    (slot_read,) = world.fabric.transfers
    assert slot_read.total_bytes == LEASE_SLOT_BYTES
    assert slot_read.notif_msg
    assert world.reader.stage("r") is Stage.VERIFYING
    assert producer.notes() == []
    world.step(2)
    assert world.outcomes["r"].verified
    assert len(producer.notes()) == 1


def test_the_stages_are_named_and_timed(make_world: Callable[..., World]) -> None:
    world = make_world(max_inflight_bytes=1)
    producer = world.producer()
    world.fabric.plan = Plan(polls=None)
    world.handshakes.held.add(producer.address)
    world.fetch(producer, "first", [0, 1], [0, 1])
    world.fetch(producer, "r", [2, 3, 4], [2, 3, 4])
    assert world.reader.stage("r") is Stage.HANDSHAKE
    world.clock.now += 0.5
    world.handshakes.held.clear()
    world.step()
    assert world.reader.stage("first") is Stage.READING
    assert world.reader.stage("r") is Stage.QUEUED
    world.clock.now += 0.25
    world.fabric.settle()
    world.step()
    assert world.reader.stage("r") is Stage.READING
    world.clock.now += 2.0
    (data,) = [t for t in world.fabric.transfers if t.total_bytes > LEASE_SLOT_BYTES]
    data.finish()
    world.step()
    assert world.reader.stage("r") is Stage.VERIFYING
    world.clock.now += 1.0
    world.fabric.settle()
    world.step()
    assert world.outcomes["r"].seconds == {
        Stage.HANDSHAKE: 0.5,
        Stage.QUEUED: 0.25,
        Stage.READING: 2.0,
        Stage.VERIFYING: 1.0,
    }
    assert world.outcomes["r"].ended_in is Stage.VERIFYING


def test_neighbouring_blocks_are_read_as_one_descriptor(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "r", [4, 2, 3, 1], [8, 6, 7, 5])
    world.step(2)
    assert world.outcomes["r"].num_descs == LAYERS
    assert world.holds(producer, [4, 2, 3, 1], [8, 6, 7, 5])


def test_the_prepared_lists_are_strided_and_made_once(world: World) -> None:
    producer = world.producer()
    for i in range(5):
        world.fetch(producer, f"r{i}", [i], [i])
        world.step(2)
    assert len(world.outcomes) == 5
    # Landing cells, local blocks, remote blocks, remote slots.
    assert world.raw.calls["prep_xfer_dlist"] == 4
    assert len(world.handshakes.started) == 1


def test_the_callers_lists_may_change_after_fetch(world: World) -> None:
    producer = world.producer()
    local = [4, 5]
    world.reader.fetch("r", producer.offer("r", [1, 2]), [local])
    local[0] = 9
    world.step(2)
    assert world.holds(producer, [4, 5], [1, 2])
    assert not world.cache[:, 9].any()


def test_block_ids_may_be_numpy_arrays(world: World) -> None:
    producer = world.producer()
    world.reader.fetch("r", producer.offer("r", [1, 2]), [np.array([4, 5], np.int32)])
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.holds(producer, [4, 5], [1, 2])


def test_an_id_can_be_used_again_only_after_its_outcome(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "r")
    with pytest.raises(RequestInProgressError, match="'r'"):
        world.reader.fetch("r", producer.offer("r2", [1]), [[1]])
    world.step(2)
    assert world.outcomes.pop("r").verified
    world.fetch(producer, "r", [6], [7])
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.holds(producer, [6], [7])


# --- prefix hits --------------------------------------------------------------------------------


def test_a_partial_prefix_hit_reads_the_end_of_the_remote_list(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "r", [0, 1], [9, 8, 7, 6], num_computed_blocks=[2])
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.holds(producer, [0, 1], [7, 6])


@pytest.mark.parametrize("changes", [{}, {"remote_num_tokens": 4 * BLOCK_SIZE}])
def test_without_a_prefix_hit_fewer_local_blocks_hold_the_beginning(
    world: World, changes: dict[str, Any]
) -> None:
    """The end of the sequence, taken for its beginning, would be other tokens."""
    producer = world.producer()
    world.fetch(producer, "r", [0, 1], [9, 8, 7, 6], **changes)
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.holds(producer, [0, 1], [9, 8])


@pytest.mark.parametrize(
    ("held", "needed", "reason"),
    [
        (7, 7, ""),
        (7, 8, "8 tokens are needed, but the reference says that its blocks hold 7"),
        (None, 8, ""),
        (None, 9, "9 tokens are needed, but its blocks have room for 8"),
    ],
)
def test_a_reference_to_fewer_tokens_than_are_needed_fails_the_request(
    world: World, held: int | None, needed: int, reason: str
) -> None:
    producer = world.producer()
    changes: dict[str, Any] = {} if held is None else {"remote_num_tokens": held}
    world.fetch(producer, "r", [0, 1], [5, 3], num_tokens=needed, **changes)
    world.fetch(producer, "hit", [], [6], num_tokens=1000)  # nothing of it is needed
    world.step(2)
    assert world.outcomes["hit"].verified
    outcome = world.outcomes["r"]
    assert outcome.verified == (not reason)
    assert outcome.reason == reason
    if reason:
        assert (outcome.cause, outcome.num_bytes) == (FailureCause.BLOCKS, 0)
        assert [note.outcome for note in producer.notes()] == [Outcome.FAILED, Outcome.DONE]


def test_a_negative_number_of_tokens_is_refused_at_once(world: World) -> None:
    with pytest.raises(ValueError, match="num_tokens -1"):
        world.reader.fetch("r", {}, [[0]], num_tokens=-1)
    assert world.reader.num_requests == 0


def test_a_full_prefix_hit_reads_nothing_and_still_releases_the_producer(world: World) -> None:
    producer = world.producer()
    reference = producer.offer("r", [1, 2])
    world.reader.fetch("r", reference, [[]])
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.outcomes["r"].num_bytes == 0
    (note,) = producer.notes()
    assert note.outcome is Outcome.DONE
    assert leases_of([note]) == [reference["kvnixl_lease"]]
    assert world.raw.calls["make_prepped_xfer"] == 0


def test_an_extra_trailing_remote_block_is_ignored(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "r", [0, 1], [4, 5, 6], num_computed_blocks=[0])
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.holds(producer, [0, 1], [4, 5])


# --- references are input from outside ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": [["x"]]}, "remote_block_ids"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": [[2**40]]}, "remote_block_ids"),
        ({"remote_engine_id": 7}, "remote_engine_id"),
        ({"remote_engine_id": "decode"}, "this engine itself"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_host": "a host"}, "remote_host"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": 100_000}, "tensor-parallel size"),
        ({"pp_size": 2}, "pipeline-parallel size"),
        ({"dcp_size": 2}, "decode-context-parallel size"),
        ({"kvnixl_lease": "3:0"}, "kvnixl_lease"),
        ({"kvnixl_lease": 17}, "kvnixl_lease"),
        ({"kvnixl_prompt": "3:x"}, "kvnixl_prompt"),
    ],
)
def test_a_bad_reference_fails_its_request_with_the_key(
    world: World, changes: dict[str, Any], reason: str
) -> None:
    producer = world.producer()
    world.fetch(producer, "bad", **changes)
    world.fetch(producer, "good", [4], [4])
    world.step(3)
    bad = world.outcomes["bad"]
    assert (bad.stage, bad.cause) == (Stage.FAILED, FailureCause.REFERENCE)
    assert reason in bad.reason
    assert world.outcomes["good"].verified


@pytest.mark.parametrize(
    ("asked", "fits"),
    [([5, 6, 7], True), ([5, 6, 7, 8], True), ([5, 6], False), ([5, 6, 8], False), (None, True)],
)
def test_the_blocks_of_another_prompt_are_not_read(
    world: World, asked: list[int] | None, fits: bool
) -> None:
    producer = world.producer()
    reference = producer.offer("r", [3], kvnixl_prompt=str(PromptDigest.of([5, 6, 7])))
    world.reader.fetch("r", reference, [[0]], prompt_token_ids=asked)
    world.step(3)
    outcome = world.outcomes["r"]
    assert outcome.verified is fits
    if not fits:
        assert outcome.cause is FailureCause.PROMPT
        assert f"another prompt, of 3 tokens; this one has {len(asked or ())}" in outcome.reason
        # They are somebody else's, who may read them still.
        assert not producer.notes()
        world.reader.fetch("its own", reference, [[0]], prompt_token_ids=[5, 6, 7])
        world.step(3)
        assert world.outcomes["its own"].verified


@pytest.mark.parametrize("token_ids", [["x"], [2**64], 7])
def test_token_ids_that_are_none_cost_the_call_only(world: World, token_ids: Any) -> None:
    reference = world.producer().offer("r", [3], kvnixl_prompt=str(PromptDigest.of([5])))
    with pytest.raises((TypeError, ValueError)):
        world.reader.fetch("r", reference, [[0]], prompt_token_ids=token_ids)
    assert world.reader.num_requests == 0
    world.reader.fetch("r", reference, [[0]], prompt_token_ids=[5])
    world.step(3)
    assert world.outcomes["r"].verified


def test_a_producer_that_does_not_say_its_prompt_is_read(world: World) -> None:
    world.reader.fetch("r", world.producer().offer("r", [3]), [[0]], prompt_token_ids=[1])
    world.step(3)
    assert world.outcomes["r"].verified


@pytest.mark.parametrize("reference", [None, 3, [], "x", {}])
def test_a_reference_that_is_no_mapping_of_them_fails_its_request(
    world: World, reference: object
) -> None:
    world.reader.fetch("r", reference, [[0]])
    world.step()
    assert world.outcomes["r"].cause is FailureCause.REFERENCE


@pytest.mark.parametrize(
    ("local", "changes", "reason"),
    [
        ([[0]], {"remote_block_ids": [[BLOCKS]]}, f"remote block {BLOCKS}"),
        ([[0]], {"remote_block_ids": [[2**31 - 1]]}, "remote block"),
        ([[0]], {"remote_block_ids": [[1], [2]]}, "2 lists"),
        ([[0], [1]], {"remote_block_ids": [[1]]}, "2 lists"),
        ([[0, 1, 2]], {"remote_block_ids": [[1]]}, "block"),
        ([[BLOCKS]], {"remote_block_ids": [[1]]}, f"local block {BLOCKS}"),
        ([[-1]], {"remote_block_ids": [[1]]}, "local block -1"),
        ([[3, 3]], {"remote_block_ids": [[1, 2]]}, "3"),
        ([["x"]], {"remote_block_ids": [[1]]}, "integer"),
    ],
)
def test_block_lists_that_do_not_fit_fail_their_request_and_move_no_byte(
    world: World, local: list[Any], changes: dict[str, Any], reason: str
) -> None:
    producer = world.producer()
    world.reader.fetch("r", producer.offer("r", [1], **changes), local)
    world.step(3)
    outcome = world.outcomes["r"]
    assert (outcome.stage, outcome.cause) == (Stage.FAILED, FailureCause.BLOCKS)
    assert reason in outcome.reason
    assert not world.cache.any()
    # The owner is told, so that it need not hold the blocks until the deadline.
    assert [note.outcome for note in producer.notes()] == [Outcome.FAILED]


def test_hosts_that_are_not_allowed_are_never_asked(make_world: Callable[..., World]) -> None:
    world = make_world(allowed=RemoteAllowList(["10.0.0.0/8"]))
    inside = world.producer("inside")
    outside = world.producer("outside", host="192.0.2.1")
    world.fetch(inside, "in", [0], [0])
    world.fetch(outside, "out", [1], [1])
    with pytest.raises(RemoteNotAllowedError):
        world.reader.prepare(*outside.address)
    with pytest.raises(RemoteNotAllowedError):
        world.reader.release(outside.offer("other", [1]))
    world.step(3)
    assert world.outcomes["in"].verified
    assert world.outcomes["out"].cause is FailureCause.NOT_ALLOWED
    assert world.handshakes.started == [inside.address]


def test_a_name_whose_address_is_not_allowed_is_never_connected_to() -> None:
    """Names pass until they are resolved; then the client's list decides."""
    looked_up: list[str] = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]

    fabric = FakeFabric()
    _, layout = make_cache(1, None)
    producer = Producer(fabric, "prefill", host="inside.example")
    allowed = RemoteAllowList(["10.0.0.0/8"])
    with HandshakeClient(
        CompatibilityCheck({"model": "m"}), allowed=allowed, resolve=resolve
    ) as handshakes:
        reader = Reader(Agent(fabric.agent("D")), layout, engine_id="d", handshakes=handshakes)
        reader.fetch("literal", producer.offer("l", [1], remote_host="192.0.2.1"), [[0]])
        reader.fetch("name", producer.offer("n", [2]), [[1]])
        outcomes: dict[str, ReadOutcome] = {}
        end = time.monotonic() + 10
        while len(outcomes) < 2 and time.monotonic() < end:
            outcomes |= {outcome.req_id: outcome for outcome in reader.step()}
            time.sleep(0.001)
        assert reader.close() == 0
    assert {o.cause for o in outcomes.values()} == {FailureCause.NOT_ALLOWED}
    assert "'inside.example' (192.0.2.1)" in outcomes["name"].reason
    assert looked_up == ["inside.example"]
    assert handshakes.allowed is allowed


def test_references_to_ever_new_addresses_do_not_grow_memory(
    make_world: Callable[..., World],
) -> None:
    world = make_world(max_remotes=4, handshake_timeout=1.0)
    producer = world.producer()
    for i in range(20):
        world.fetch(producer, f"r{i}", remote_port=6000 + i)
    world.step()
    assert world.reader.num_remotes == 4
    refused = [o for o in world.outcomes.values() if o.cause is FailureCause.TOO_MANY_REMOTES]
    assert len(refused) == 16
    assert "max_remotes" in refused[0].reason
    world.step(3, seconds=1.0)
    assert len(world.outcomes) == 20
    world.fetch(producer, "good")
    world.step(2)
    assert world.outcomes["good"].verified
    assert world.reader.num_remotes <= 4


def test_a_peer_that_claims_blocks_of_thousands_of_kernel_blocks_is_not_met(world: World) -> None:
    """With it a request of a megabyte would stand for 60 GiB of block ids."""
    producer = world.producer(blocks=8192)
    producer.metadata[0, 0].physical_blocks_per_logical_kv_block = 8192
    world.fetch(producer, "r", [0, 1], [0] * 100_000)
    world.step(3)
    assert world.outcomes["r"].cause is FailureCause.HANDSHAKE
    assert "kernel blocks per block: local 1, remote 8192" in world.outcomes["r"].reason


@pytest.mark.parametrize("call", ["pair_blocks", "paired_desc_ids"])
@pytest.mark.parametrize("error", [MemoryError("61 GiB"), KeyError("k"), IndexError("i")])
def test_what_nobody_foresaw_costs_the_request_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    producer = world.producer()
    with monkeypatch.context() as patch:
        if call == "pair_blocks":
            patch.setattr(ReadPlan, call, fail)
        else:
            patch.setattr(f"kvnixl.reader.{call}", fail)
        world.fetch(producer, "at the handshake")
        world.step(2)
        world.fetch(producer, "met")
        world.step(2)
    for req_id in ("at the handshake", "met"):
        assert world.outcomes[req_id].cause is FailureCause.BLOCKS
        assert str(error) in world.outcomes[req_id].reason
    world.fetch(producer, "good")
    world.step(2)
    assert world.outcomes["good"].verified


def test_a_peers_lease_slots_cost_no_memory_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may export 2**24 of them."""
    made: list[tuple[int, ...]] = []
    prepare = world.raw.prep_xfer_dlist

    def record(agent: str, descs: Any, mem_type: str | None = None) -> Any:
        made.append(descs.shape)
        return prepare(agent, descs, mem_type=mem_type)

    monkeypatch.setattr(world.raw, "prep_xfer_dlist", record)
    world.fetch(world.producer(slots=4096))
    world.step(2)
    assert world.outcomes["r"].verified
    assert len(made) == 3  # local and remote blocks, and the slots
    assert max(rows for rows, _ in made) <= LAYERS


# --- leases -------------------------------------------------------------------------------------


def test_blocks_that_were_reused_while_they_were_read_fail_the_request(world: World) -> None:
    """The lease ended while the reader was stopped; the owner overwrote the blocks."""
    producer = world.producer()
    world.fabric.plan = Plan(polls=None, piece_bytes=8)
    world.fetch(producer, "r", [0, 1], [5, 3])
    world.step()
    (data,) = world.fabric.transfers
    data.copy(3)
    producer.reuse("r", [5, 3])
    world.fabric.settle()
    world.step(2)
    world.fabric.settle()
    world.step(2)
    outcome = world.outcomes["r"]
    assert (outcome.stage, outcome.cause) == (Stage.FAILED, FailureCause.LEASE_ENDED)
    assert outcome.ended_in is Stage.VERIFYING
    assert (world.cache == MARKER).any()


@pytest.mark.parametrize("lease", ["3:abcdef", f"{2**24 - 1}:1"])
def test_a_made_up_or_stale_lease_fails_the_request(world: World, lease: str) -> None:
    producer = world.producer()
    world.fetch(producer, "r", kvnixl_lease=lease)
    world.fetch(producer, "good", [4], [4])
    world.step(3)
    assert world.outcomes["r"].cause is FailureCause.LEASE_ENDED
    assert world.outcomes["good"].verified


def test_a_reference_that_is_replayed_after_its_blocks_were_reused_fails(world: World) -> None:
    producer = world.producer()
    reference = producer.offer("r", [5])
    world.reader.fetch("one", reference, [[0]])
    world.step(2)
    assert world.outcomes["one"].verified
    producer.reuse("r", [5])
    producer.offer("next", [5])  # the same slot, another nonce
    world.reader.fetch("two", reference, [[1]])
    world.step(2)
    assert world.outcomes["two"].cause is FailureCause.LEASE_ENDED


@pytest.mark.parametrize("kind", ["no lease", "no slots", "stock"])
@pytest.mark.parametrize("policy", ["require", "prefer", "off"])
def test_the_policy_decides_about_blocks_that_cannot_be_checked(
    make_world: Callable[..., World], kind: str, policy: str
) -> None:
    world = make_world(lease_verification=policy)
    producer = world.producer(kvnixl=kind != "stock", slots=0 if kind == "no slots" else 64)
    world.fetch(producer, "r", [0, 1], [5, 3], kvnixl_lease=None)
    world.step(3)
    outcome = world.outcomes["r"]
    (note,) = producer.notes()
    assert note.request_ids == ("r",)
    if policy == "require":
        assert (outcome.stage, outcome.cause) == (Stage.FAILED, FailureCause.NO_LEASE)
        assert "require" in outcome.reason
        assert not world.cache.any()
    else:
        assert outcome.done
        assert not outcome.verified
        assert world.holds(producer, [0, 1], [5, 3])
        assert note.outcome is Outcome.DONE
        assert world.raw.calls["send_notif"] == 0, "it rides on the READ of the data"
        assert world.reader.counters.unverified == 1


def test_with_verification_off_the_message_rides_on_the_data_and_names_the_lease(
    make_world: Callable[..., World],
) -> None:
    world = make_world(lease_verification="off")
    producer = world.producer()
    reference = producer.offer("r", [5])
    world.reader.fetch("r", reference, [[0]])
    world.step(2)
    assert world.outcomes["r"].done
    assert not world.outcomes["r"].verified
    assert leases_of(producer.notes()) == [reference["kvnixl_lease"]]
    assert world.raw.calls["transfer"] == 1
    assert world.raw.calls["send_notif"] == 0


def test_unverified_reads_are_said_once_per_peer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    producer = world.producer(kvnixl=False)
    for i in range(3):
        world.fetch(producer, f"r{i}", [i], [i])
    world.step(2)
    assert len([r for r in caplog.records if "unverified" in r.message]) == 1


# --- several ranks ------------------------------------------------------------------------------


def test_two_remote_ranks_fill_their_halves_of_a_block_and_both_are_checked(world: World) -> None:
    producer = world.producer(tp_size=2)
    reference = producer.offer("r", [5, 3])
    world.reader.fetch("r", reference, [[0, 1]])
    world.step(2)
    assert world.outcomes["r"].verified
    assert world.holds(producer, [0, 1], [5, 3])
    for rank in range(2):
        assert leases_of(producer.notes(rank)) == [reference["kvnixl_lease"]]


def test_a_stock_peer_gets_one_text_per_rank_on_the_data_read(world: World) -> None:
    producer = world.producer(kvnixl=False, tp_size=2)
    world.fetch(producer, "r", [0, 1], [5, 3])
    world.step(2)
    assert world.outcomes["r"].done
    for rank in range(2):
        (note,) = producer.notes(rank)
        assert (note.request_ids, note.consumers, note.sender) == (("r",), 1, None)
    assert world.raw.calls["send_notif"] == 0


def test_the_consumer_count_says_how_many_ranks_of_ours_read_that_rank(
    make_world: Callable[..., World],
) -> None:
    """This rank is the second of two that share one rank of the producer, a head each."""
    fabric = FakeFabric()
    clock = Clock()
    handshakes = Handshakes(clock)
    agent = Agent(fabric.agent("D"))
    cache, layout = make_cache(2, None)
    producer = Producer(fabric, "prefill")
    handshakes.engines[producer.address.host, producer.address.port] = producer
    reader = Reader(
        agent, layout, engine_id="d", handshakes=handshakes, clock=clock, tp_rank=1, tp_size=2
    )
    reader.fetch("r", producer.offer("r", [5]), [[0]])
    outcomes = [outcome for _ in range(3) for outcome in reader.step()]
    assert outcomes[0].verified
    assert np.array_equal(cache[:, 0], producer.block(5)[:, HEAD_BYTES:])
    (note,) = producer.notes()
    assert note.consumers == 2
    assert reader.close() == 0
    fabric.assert_clean("D")


def test_a_failed_part_is_reported_only_when_its_slow_sibling_is_over(world: World) -> None:
    """One rank fails at once, the other still writes: its late bytes must not meet a new owner."""
    producer = world.producer(tp_size=2)
    world.fabric.script(Plan(polls=1, end="ERR"), remote="prefill-0")
    world.fabric.script(Plan(polls=None), remote="prefill-1")
    world.fetch(producer, "r", [0, 1], [5, 3])
    world.step(5)
    assert "r" not in world.outcomes
    assert "rank 0" in world.reader.overdue()["r"]
    (slow,) = world.fabric.writers(world.cache.ctypes.data, world.cache.nbytes)
    assert producer.notes(0) == []
    slow.finish()
    world.step()
    outcome = world.outcomes["r"]
    assert (outcome.stage, outcome.cause) == (Stage.FAILED, FailureCause.TRANSFER)
    assert world.reader.overdue() == {}
    assert not world.fabric.writers(world.cache.ctypes.data, world.cache.nbytes)
    assert [note.outcome for note in producer.notes(0)] == [Outcome.FAILED]
    assert [note.outcome for note in producer.notes(1)] == [Outcome.FAILED]


def test_a_stock_rank_that_was_told_by_its_read_is_not_told_twice(world: World) -> None:
    """Rank 0 is done and was notified; rank 1 fails. A second text would free blocks early."""
    producer = world.producer(kvnixl=False, tp_size=2)
    world.fabric.script(Plan(polls=2, end="ERR"), remote="prefill-1")
    world.fetch(producer, "r")
    world.step(5)
    assert world.outcomes["r"].cause is FailureCause.TRANSFER
    assert len(producer.notes(0)) == 1
    assert len(producer.notes(1)) == 1


def test_the_second_part_cannot_be_posted(world: World) -> None:
    producer = world.producer(tp_size=2)
    world.fabric.script(Plan(polls=None), remote="prefill-1")
    world.fabric.script(Plan(make=nixlBackendError), remote="prefill-0")
    world.fetch(producer, "r")
    world.step(3)
    assert "r" not in world.outcomes
    (running,) = world.fabric.transfers
    running.finish()
    world.step()
    assert world.outcomes["r"].cause is FailureCause.POST
    assert world.reader.bytes_in_flight == 0


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        (Plan(make=nixlBackendError), FailureCause.POST),
        (Plan(post=nixlBackendError), FailureCause.POST),
        (Plan(post="ERR"), FailureCause.POST),
        (Plan(polls=2, end=nixlBackendError, copied=0.5), FailureCause.TRANSFER),
        (Plan(polls=2, end="ERR"), FailureCause.TRANSFER),
    ],
)
def test_a_failing_read_fails_its_request_and_no_other(
    world: World, plan: Plan, cause: FailureCause
) -> None:
    producer, other = world.producer("a"), world.producer("b", seed=2)
    world.fabric.script(plan, remote="a-0")
    world.fetch(producer, "bad", [0, 1], [5, 3])
    world.fetch(other, "good", [4, 5], [1, 2])
    world.step(5)
    bad = world.outcomes["bad"]
    assert (bad.stage, bad.cause) == (Stage.FAILED, cause)
    assert "rank 0" in bad.reason
    assert world.outcomes["good"].verified
    assert world.holds(other, [4, 5], [1, 2])
    # The peer is met anew, and works.
    world.fetch(producer, "again", [7], [7])
    world.step(5, seconds=0.1)
    assert world.outcomes["again"].verified
    assert world.handshakes.started.count(producer.address) == 2


def test_a_handle_that_is_not_released_keeps_the_blocks(world: World) -> None:
    producer = world.producer()
    world.fabric.script(Plan(polls=1, refuse=3))
    world.fetch(producer, "r")
    world.step(3)
    assert "r" not in world.outcomes
    assert world.agent.quarantined == 1
    world.step(4)
    assert world.outcomes["r"].verified
    assert world.agent.quarantined == 0


def test_a_transfer_that_nixl_lost_track_of_keeps_the_blocks(world: World) -> None:
    """NIXL says "not found" of a transfer whose peer was invalidated, while its bytes land."""
    producer = world.producer()
    world.fabric.script(Plan(polls=None))
    world.fetch(producer, "r")
    world.step()
    world.fabric.fail("check_xfer_state", nixlNotFoundError, times=None)
    world.step(20)
    assert "r" not in world.outcomes
    assert "r" in world.reader.overdue()
    (running,) = world.fabric.transfers
    assert not running.released
    world.fabric.clear()
    running.finish()
    world.step(2)
    assert world.outcomes["r"].cause is FailureCause.TRANSFER


def test_an_agent_whose_release_ends_a_transfer_frees_the_blocks_at_once() -> None:
    world = World(release_is_final=True)
    producer = world.producer()
    world.fabric.script(Plan(polls=None, release="cancel"))
    world.fetch(producer, "r")
    world.step()
    world.reader.abort("r")
    world.step()
    assert world.outcomes["r"].stage is Stage.ABORTED
    assert not world.fabric.writers(world.cache.ctypes.data, world.cache.nbytes)
    world.close()


@pytest.mark.parametrize("how", ["abort", "error", "timeout"])
def test_a_request_that_ends_early_leaves_no_check_behind(world: World, how: str) -> None:
    producer = world.producer()
    world.fabric.script(Plan(polls=None))
    world.fetch(producer, "r")
    world.step()
    assert world.reader._verifier is not None
    assert world.reader._verifier.has_checks
    (running,) = world.fabric.transfers
    if how == "abort":
        world.reader.abort("r")
    elif how == "timeout":
        world.step(seconds=1000.0)
    running.fail() if how == "error" else running.finish()
    world.step(2)
    assert not world.outcomes["r"].done
    assert not world.reader._verifier.has_checks


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused_at_once(world: World, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        world.reader.fetch("r", {}, [[]], timeout=timeout)
    assert world.reader.num_requests == 0


# --- abort --------------------------------------------------------------------------------------


def test_an_abort_in_flight_keeps_the_blocks_until_the_last_byte(world: World) -> None:
    producer = world.producer()
    world.fabric.plan = Plan(polls=None, piece_bytes=8)
    world.fetch(producer, "r", [0, 1], [5, 3])
    world.step()
    (data,) = world.fabric.transfers
    data.copy(2)
    assert world.reader.abort("r")
    world.step(5, seconds=100.0)
    assert "r" not in world.outcomes
    assert world.reader.overdue() == {"r": "aborted"}
    assert producer.notes() == []
    assert not data.released
    data.finish()
    world.step()
    assert world.outcomes["r"].stage is Stage.ABORTED
    assert [note.outcome for note in producer.notes()] == [Outcome.RELEASED]
    assert world.reader.counters.aborted == 1


def test_an_abort_before_the_handshake_ends_at_once_and_still_tells_the_owner(
    world: World,
) -> None:
    producer = world.producer()
    world.handshakes.held.add(producer.address)
    reference = producer.offer("r", [1])
    world.reader.fetch("r", reference, [[1]])
    world.step()
    assert world.reader.abort("r")
    world.step()
    assert world.outcomes["r"].stage is Stage.ABORTED
    world.handshakes.held.clear()
    world.step(2)
    (note,) = producer.notes()
    assert note.outcome is Outcome.RELEASED
    assert leases_of([note]) == [reference["kvnixl_lease"]]
    assert not world.cache.any()


def test_an_abort_while_queued_ends_at_once(make_world: Callable[..., World]) -> None:
    world = make_world(max_inflight_bytes=1)
    producer = world.producer()
    world.fabric.script(Plan(polls=None))
    world.fetch(producer, "first", [0], [0])
    world.fetch(producer, "r", [1, 2], [1, 2])
    world.step()
    assert world.reader.stage("r") is Stage.QUEUED
    world.reader.abort("r")
    world.step()
    assert world.outcomes["r"].stage is Stage.ABORTED
    assert [note.outcome for note in producer.notes()] == [Outcome.RELEASED]
    world.fabric.settle()
    world.step(2)
    assert world.outcomes["first"].verified
    assert not world.cache[:, 1:].any()


def test_an_abort_while_verifying_ends_at_once_and_frees_the_id(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "warm", [9], [9])
    world.step(2)
    world.fabric.script(Plan())
    world.fabric.script(Plan(polls=None))
    world.fetch(producer, "r", [0], [5])
    world.step()
    assert world.reader.stage("r") is Stage.VERIFYING
    world.reader.abort("r")
    world.step()
    assert world.outcomes.pop("r").stage is Stage.ABORTED
    world.fetch(producer, "r", [1], [6])
    world.step(2)
    assert world.outcomes["r"].verified


def test_aborts_of_what_is_unknown_or_over_change_nothing(world: World) -> None:
    producer = world.producer()
    assert not world.reader.abort("never")
    world.fetch(producer, "r")

    world.step(2)
    assert not world.reader.abort("r")
    world.step()
    assert world.outcomes["r"].verified
    assert len(world.outcomes) == 1


def test_an_abort_between_the_end_and_its_report_does_not_take_the_outcome_back(
    world: World,
) -> None:
    producer = world.producer()
    world.fetch(producer, "warm", [9], [9])
    world.step(2)
    # A full hit ends inside fetch; its outcome waits for the next step.
    world.reader.fetch("r", producer.offer("r", [1]), [[]])
    assert not world.reader.abort("r")
    world.step()
    assert world.outcomes["r"].done


def test_an_abort_while_the_peer_is_asked_again_tells_the_owner_at_once(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "warm", [9], [9])
    world.step(2)
    producer.notes()
    world.handshakes.held.add(producer.address)
    world.fetch(producer, "r", remote_registration_generation=1)
    world.step(seconds=1.0)
    assert world.reader.stage("r") is Stage.HANDSHAKE
    world.reader.abort("r")
    assert [note.outcome for note in producer.notes()] == [Outcome.RELEASED]
    world.step()
    assert world.outcomes["r"].stage is Stage.ABORTED


def test_releases_for_a_peer_that_cannot_be_met_are_dropped(world: World) -> None:
    producer = world.producer()
    world.handshakes.errors[producer.address] = HandshakeError("refused")
    for i in range(3):
        world.reader.release(producer.offer(f"r{i}", [i]))
    world.step(2)
    world.handshakes.errors.clear()
    started = len(world.handshakes.started)
    world.step(20, seconds=1.0)
    assert len(world.handshakes.started) == started, "nobody wants it any more"
    world.fetch(producer, "r", [5], [5])
    world.step(2, seconds=0.1)
    assert world.outcomes["r"].verified
    assert len(producer.notes()) == 1


def test_a_rejected_request_releases_its_blocks_without_being_read(world: World) -> None:
    """The decode side answers 400 before it ever schedules the request."""
    producer = world.producer()
    reference = producer.offer("r", [1])
    world.reader.release(reference, "r")
    world.step(2)
    (note,) = producer.notes()
    assert note.outcome is Outcome.RELEASED
    assert leases_of([note]) == [reference["kvnixl_lease"]]
    assert world.outcomes == {}
    world.reader.release(producer.offer("r2", [2]), "r2")  # known by now: told at once
    assert len(producer.notes()) == 1
    with pytest.raises(TransferParamsError):
        world.reader.release({}, "r3")


@pytest.mark.parametrize("req_id", ["HB:r", "PUSH_REG:r"])
def test_an_id_that_a_stock_peer_would_misread_is_not_sent(world: World, req_id: str) -> None:
    producer = world.producer(kvnixl=False)
    world.fetch(producer, req_id)
    world.step(3)
    assert world.outcomes[req_id].done
    assert producer.notes() == []
    assert world.reader.counters.notifications_inexpressible >= 1


@pytest.mark.parametrize("req_id", ["a:b", "a,b", "a_b", "\u00fc:1", ":", "HB:x,y"])
def test_odd_request_ids_reach_a_kvnixl_peer_unharmed(world: World, req_id: str) -> None:
    producer = world.producer()
    world.fetch(producer, req_id, kvnixl_lease=None)
    world.step(3)
    (note,) = producer.notes()
    assert note.request_ids == (req_id,)


@pytest.mark.parametrize("fate", ["lose", "duplicate", "hold"])
def test_a_notification_that_is_lost_or_late_does_not_change_the_outcome(
    world: World, fate: Any
) -> None:
    producer = world.producer()
    world.fabric.notice_fate = fate
    world.fetch(producer, "r")
    world.step(2)
    assert world.outcomes["r"].verified
    notes = producer.notes()
    assert len(notes) == {"lose": 0, "duplicate": 2, "hold": 0}[fate]
    assert len({note.sequence for note in notes}) <= 1


def test_a_notification_that_cannot_be_sent_is_counted(world: World) -> None:
    producer = world.producer()
    world.fabric.fail("send_notif")
    world.reader.fetch("r", producer.offer("r", [1]), [[]])
    world.step(3)
    assert world.outcomes["r"].done
    assert world.reader.counters.notifications_failed == 1


# --- meeting peers ------------------------------------------------------------------------------


def test_a_peer_is_met_once_for_all_that_wait(world: World) -> None:
    producer = world.producer()
    for i in range(6):
        world.fetch(producer, f"r{i}", [i], [i])
    world.step(3)
    assert all(outcome.verified for outcome in world.outcomes.values())
    assert len(world.outcomes) == 6
    assert world.handshakes.started == [producer.address]


def test_prepare_connects_and_touches_the_memory_ahead(world: World) -> None:
    producer = world.producer(tp_size=2)
    assert not world.reader.prepare(*producer.address, tp_size=2)
    world.fabric.plan = Plan(polls=1)
    world.step()
    assert world.raw.calls["make_connection"] == 2
    touches = world.fabric.transfers
    assert [t.remote for t in touches] == ["prefill-0", "prefill-1"]
    touched = {int(address) for t in touches for address in t.source}
    assert touched == {m[i].ctypes.data for m in producer.memory for i in range(LAYERS)}
    world.step(2)
    assert world.reader.prepare(*producer.address, tp_size=2)
    assert not world.cache.any()
    started = len(world.handshakes.started)
    world.fetch(producer, "r")
    assert world.reader.stage("r") is Stage.QUEUED
    world.step(5)
    assert world.outcomes["r"].verified
    assert len(world.handshakes.started) == started


def test_a_touch_that_fails_costs_nothing(world: World) -> None:
    producer = world.producer()
    world.fabric.script(Plan(polls=1, end=nixlBackendError))
    world.reader.prepare(*producer.address)
    world.step(3)
    assert world.reader.prepare(*producer.address)
    world.fetch(producer, "r")
    world.step(2)
    assert world.outcomes["r"].verified


def test_a_peer_that_never_answers_does_not_delay_a_good_one(world: World) -> None:
    silent, good = world.producer("silent"), world.producer("good", seed=2)
    world.handshakes.silent.add(silent.address)
    world.fetch(silent, "s", [0], [0])
    world.fetch(good, "g", [1], [1])
    world.step(2)
    assert world.outcomes["g"].verified
    assert "s" not in world.outcomes
    world.step(2, seconds=10.0)
    assert world.outcomes["s"].cause is FailureCause.HANDSHAKE
    assert "no connection" in world.outcomes["s"].reason


def test_a_handshake_that_takes_too_long_is_reported_with_what_it_found_out(world: World) -> None:
    """Also when the first step came a little after the fetch, and so the handshake's time began."""
    producer = world.producer()
    world.handshakes.silent.add(producer.address)
    world.fetch(producer, "r")
    world.step(120, seconds=0.1)
    outcome = world.outcomes["r"]
    assert outcome.cause is FailureCause.HANDSHAKE
    assert "no connection" in outcome.reason
    assert sum(outcome.seconds.values()) == pytest.approx(10.1)


def test_a_failed_handshake_fails_those_that_wait_and_is_tried_again_with_backoff(
    world: World,
) -> None:
    producer = world.producer()
    world.handshakes.errors[producer.address] = HandshakeError("not compatible: dtype")
    world.fetch(producer, "r0")
    world.step()
    assert world.outcomes["r0"].cause is FailureCause.HANDSHAKE
    assert "dtype" in world.outcomes["r0"].reason
    gaps = []
    for i in range(1, 7):
        world.fetch(producer, f"r{i}")
        started, since = len(world.handshakes.started), world.clock.now
        while f"r{i}" not in world.outcomes:
            world.step(seconds=0.05)
        assert len(world.handshakes.started) == started + 1
        gaps.append(world.clock.now - since)
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 1.6], abs=0.051)
    world.handshakes.errors.clear()
    world.fetch(producer, "ok")
    world.step(40, seconds=0.05)
    assert world.outcomes["ok"].verified


def test_a_request_does_not_wait_for_a_backoff_beyond_its_time(
    make_world: Callable[..., World],
) -> None:
    world = make_world(backoff=(60.0, 60.0))
    producer = world.producer()
    world.handshakes.errors[producer.address] = HandshakeError("refused")
    world.fetch(producer, "r0")
    world.step()
    world.fetch(producer, "r1")
    world.step()
    assert world.outcomes["r1"].cause is FailureCause.HANDSHAKE
    assert "refused" in world.outcomes["r1"].reason


def test_the_same_engine_id_at_another_address_is_another_peer(world: World) -> None:
    one = world.producer("same", seed=1)
    other = Producer(world.fabric, "other-agents", port=9000, seed=2)
    world.handshakes.engines["10.0.0.1", 9000] = other
    world.fetch(one, "r1", [0], [5])
    reference = other.offer("r2", [5], remote_engine_id="same")
    world.reader.fetch("r2", reference, [[1]])
    world.step(3)
    assert world.outcomes["r1"].verified
    assert world.outcomes["r2"].verified
    assert world.holds(one, [0], [5])
    assert world.holds(other, [1], [5])
    assert world.reader.num_remotes == 2
    assert not np.array_equal(world.cache[:, 0], world.cache[:, 1])


def test_two_addresses_of_one_process_share_its_agent(world: World) -> None:
    """Loading an agent again would disturb the transfers that run."""
    producer = world.producer()
    world.handshakes.engines["localhost", producer.address.port] = producer
    world.fabric.plan = Plan(polls=2)
    world.fetch(producer, "r1", [0], [5])
    world.step()
    world.fetch(producer, "r2", [1], [6], remote_host="localhost")
    world.step(8)
    assert world.outcomes["r1"].verified
    assert world.outcomes["r2"].verified
    assert world.raw.calls["add_remote_agent"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"block_lens": [7] * LAYERS},
        {"block_size": 3},
        {"kv_cache_layout": "nonsense"},
        {"attn_backend_name": "Y"},
        {"dcp_size": 2},
        {"ssm_sizes": (1, 1)},
        {"region_names": ["other.0", "other.1", "other.2"]},
        {"agent_metadata": b"rubbish"},
        {"kv_caches_base_addr": [4096] * LAYERS},
    ],
)
def test_a_peer_whose_cache_does_not_fit_fails_when_it_is_met_and_leaves_nothing(
    world: World, change: dict[str, Any]
) -> None:
    producer = world.producer()
    lists, remotes = world.raw.live_lists, world.raw.remote_agents
    for name, value in change.items():
        setattr(producer.metadata[0, 0], name, value)
    world.fetch(producer, "r")
    world.step(4)
    outcome = world.outcomes["r"]
    assert (outcome.stage, outcome.cause) == (Stage.FAILED, FailureCause.HANDSHAKE)
    assert outcome.reason
    assert (world.raw.live_lists, world.raw.remote_agents) == (lists, remotes)


def test_a_peer_that_packs_its_blocks_otherwise_is_refused_by_name(world: World) -> None:
    producer = world.producer()
    extension = producer.metadata[0, 0].kvnixl
    assert extension is not None
    extension.packing = "cpu:amx"
    world.fetch(producer, "r")
    world.step(4)
    outcome = world.outcomes["r"]
    assert outcome.cause is FailureCause.HANDSHAKE
    assert "cpu:vec" in outcome.reason
    assert "cpu:amx" in outcome.reason


def test_an_outcome_says_what_nixl_measured(world: World) -> None:
    world.fetch(world.producer(), local=[0, 1], remote=[5, 3])
    world.step(4)
    outcome = world.outcomes["r"]
    assert outcome.verified
    assert outcome.num_descs_before == 2 * LAYERS
    assert [each.total_bytes for each in outcome.transfers] == [outcome.num_bytes]


def test_missing_telemetry_changes_nothing_else(world: World) -> None:
    world.fabric.plan = Plan(telemetry=False)
    producer = world.producer()
    world.fetch(producer)
    world.step(4)
    outcome = world.outcomes["r"]
    assert outcome.verified
    assert outcome.transfers == ()
    assert world.holds(producer, [0, 1], [5, 3])


def test_stage_times_are_not_rounded_to_steps(world: World) -> None:
    world.fetch(world.producer())
    ticks = iter(range(10**6))
    start = world.clock.now
    world.reader._clock = lambda: start + next(ticks) * 0.001
    world.step(1)
    seconds = world.outcomes["r"].seconds
    assert min(seconds[stage] for stage in (Stage.READING, Stage.VERIFYING)) > 0


def test_heartbeats_learn_the_agents_of_an_engine(world: World) -> None:
    producer = world.producer(tp_size=2)
    assert world.reader.ranks_of("prefill") is None
    world.reader.prepare(*producer.address, tp_size=2)
    world.step(2)
    expected = [RemoteRank("prefill-0", True), RemoteRank("prefill-1", True)]
    assert world.reader.ranks_of("prefill") == expected
    first = world.reader.next_sequence()
    assert world.reader.next_sequence() == first + 1


def test_a_wrong_tensor_parallel_size_in_a_reference_costs_that_request_only(
    world: World,
) -> None:
    producer = world.producer(tp_size=2)
    world.fetch(producer, "wrong", tp_size=1)
    world.fetch(producer, "right")
    world.step(5, seconds=0.1)
    assert world.outcomes["wrong"].cause is FailureCause.HANDSHAKE
    assert world.outcomes["right"].verified


# --- restarts and deaths ------------------------------------------------------------------------


@pytest.mark.parametrize("kvnixl", [True, False])
def test_a_peer_that_restarts_on_the_same_address_is_met_again(world: World, kvnixl: bool) -> None:
    producer = world.producer(kvnixl=kvnixl)
    for start in range(6):
        world.fetch(producer, f"r{start}", [0, 1], [5, 3])
        world.step(3, seconds=0.1)
        assert world.outcomes[f"r{start}"].done
        assert world.holds(producer, [0, 1], [5, 3])
        producer.start()
        world.fetch(producer, f"lost{start}", [2], [2])
        world.step(3, seconds=0.1)
        assert world.outcomes[f"lost{start}"].cause is FailureCause.DISCONNECTED
    assert world.raw.live_lists <= 4
    assert len(world.raw.remote_agents) <= 1


def test_a_peer_that_dies_fails_its_requests_at_every_stage_and_no_other(world: World) -> None:
    dead, alive = world.producer("dead"), world.producer("alive", seed=2)
    world.fabric.plan = Plan(polls=None)
    for i in range(2):
        world.fetch(dead, f"d{i}", [i], [i])
    world.fetch(alive, "a", [5, 6], [5, 6])
    world.step()
    dead.kill()
    world.step(2)
    for i in range(2):
        assert world.outcomes[f"d{i}"].cause is FailureCause.DISCONNECTED
    world.fabric.settle()
    world.step()
    world.fabric.settle()
    world.step()
    assert world.outcomes["a"].verified
    assert world.holds(alive, [5, 6], [5, 6])
    assert world.reader.counters.notifications_failed == 0
    assert world.reader.counters.failed == {FailureCause.DISCONNECTED: 2}
    world.step(2)
    assert world.raw.remote_agents == ("alive-0",)
    assert world.handshakes.started.count(alive.address) == 1


def test_a_dead_peer_is_not_unloaded_while_one_of_its_reads_may_still_land(
    world: World,
) -> None:
    producer = world.producer(tp_size=2)
    world.fabric.script(Plan(polls=None, hold=True), remote="prefill-1")
    world.fabric.script(Plan(post=nixlRemoteDisconnectError), remote="prefill-0")
    world.fetch(producer, "r")
    world.step(3)
    assert world.reader.remotes_closing == 1
    assert set(world.raw.remote_agents) == {"prefill-0", "prefill-1"}
    # It is not met anew before: NIXL would lose track of the transfer.
    world.fetch(producer, "next", [4], [4])
    world.step(5, seconds=0.2)
    assert world.reader.stage("next") is Stage.HANDSHAKE
    assert len(world.handshakes.started) == 1
    (running,) = world.fabric.transfers
    running.hold = False
    running.finish()
    world.step(5, seconds=0.1)
    assert world.outcomes["r"].cause is FailureCause.DISCONNECTED
    assert world.outcomes["next"].verified
    assert world.reader.remotes_closing == 0


def test_a_frozen_peer_costs_neither_the_budget_nor_the_requests_of_others(
    make_world: Callable[..., World],
) -> None:
    world = make_world(max_inflight_bytes=400, read_timeout=5.0)
    frozen, good = world.producer("frozen"), world.producer("good", seed=2)
    world.fabric.script(Plan(polls=None, hold=True), remote="frozen-0")
    world.fetch(frozen, "f", [0, 1, 2, 3], [0, 1, 2, 3])
    world.step()
    world.fetch(good, "g", [4, 5], [4, 5])
    world.step(2)
    assert world.reader.stage("g") is Stage.QUEUED
    world.step(1, seconds=6.0)
    world.step(3)
    assert world.outcomes["g"].verified
    assert "f" not in world.outcomes
    assert "5 s" in world.reader.overdue()["f"]
    assert world.reader.bytes_in_flight == 0
    (running,) = world.fabric.transfers
    running.fail()
    world.step(2)
    assert world.outcomes["f"].cause is FailureCause.TIMEOUT


def test_another_registration_generation_asks_the_peer_again(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "r1", [0], [5], remote_registration_generation=1)
    world.step(3)
    # The engine lives on and has registered other memory.
    producer.start()
    world.fetch(producer, "r2", [1], [6], remote_registration_generation=2)
    world.step(6, seconds=0.1)
    assert world.outcomes["r1"].verified
    assert world.outcomes["r2"].verified
    assert world.holds(producer, [1], [6])


def test_the_first_request_after_a_restart_of_an_embedded_producer_is_read(world: World) -> None:
    """It keeps its id and address, and the reader has not noticed."""
    rng = np.random.default_rng(5)
    starts = []
    for start in range(2):
        memory, layout = make_cache(1, rng)
        producer = EmbeddedProducer(
            Agent(world.fabric.restart("P")),
            layout,
            compat=CompatibilityCheck({"model": "m"}),
            address=("10.0.0.1", 5600),
            engine_id="prefill",
            clock=world.clock,
        )
        starts.append((memory, producer))
        encoded = decode_handshake_payload(producer.payload()).agent_metadata_bytes
        engine = SimpleNamespace(metadata={(0, 0): decode_agent_metadata(encoded)})
        world.handshakes.engines["10.0.0.1", 5600] = cast(Producer, engine)
        reference = producer.offer(f"r{start}", [[5]], BLOCK_SIZE)
        world.reader.fetch(f"r{start}", reference, [[start]])
        world.step(4, seconds=0.2)
        assert world.outcomes[f"r{start}"].verified
        assert np.array_equal(world.cache[:, start], memory[:, 5])
    starts[-1][1].close()


def test_ever_new_generations_do_not_make_it_ask_all_the_time(world: World) -> None:
    producer = world.producer()
    for i in range(30):
        world.fetch(producer, f"r{i}", [0], [5], remote_registration_generation=i)
        world.step(seconds=0.01)
    world.step(20, seconds=0.1)
    assert len(world.outcomes) == 30
    assert len(world.handshakes.started) <= 5


def test_an_answer_that_comes_after_the_peer_died_is_not_loaded_over_it(world: World) -> None:
    producer = world.producer(tp_size=2)
    world.fetch(producer, "warm", [9], [9])
    world.step(2, seconds=0.1)
    world.fabric.script(Plan(polls=None, hold=True), remote="prefill-1")
    world.fabric.script(Plan(post=nixlRemoteDisconnectError), remote="prefill-0")
    world.handshakes.held.add(producer.address)
    world.fetch(producer, "asks", [4], [4], remote_registration_generation=1)
    world.step(seconds=0.2)
    world.fetch(producer, "r")
    world.step(2)
    assert world.reader.remotes_closing == 1
    producer.kill(hang=True)
    producer.start()
    world.handshakes.held.clear()
    loaded = world.raw.calls["add_remote_agent"]
    world.step(3, seconds=0.2)
    assert world.raw.calls["add_remote_agent"] == loaded
    assert world.reader.stage("asks") is Stage.HANDSHAKE
    (running,) = world.fabric.transfers
    running.hold = False
    running.finish()
    world.step(5, seconds=0.2)
    # Met anew, where its lease means nothing any more.
    assert world.outcomes["asks"].cause is FailureCause.LEASE_ENDED
    assert world.outcomes["r"].cause is FailureCause.DISCONNECTED


def test_a_dead_peer_stays_loaded_while_a_slot_read_may_land(
    make_world: Callable[..., World],
) -> None:
    world = make_world(verify_timeout=2.0)
    producer = world.producer()
    world.fabric.script(Plan())
    world.fabric.script(Plan(polls=None, hold=True))
    world.fetch(producer, "r")
    world.step()
    world.step(seconds=3.0)
    assert world.outcomes["r"].stage is Stage.FAILED
    world.fabric.script(Plan(post=nixlBackendError))
    world.fetch(producer, "bad")
    world.step(3)
    assert world.outcomes["bad"].cause is FailureCause.POST
    assert list(world.raw.remote_agents) == ["prefill-0"]
    assert world.reader.remotes_closing == 1
    (slot_read,) = world.fabric.transfers
    slot_read.hold = False
    slot_read.finish()
    world.step(3)
    assert world.raw.remote_agents == ()
    assert world.reader.remotes_closing == 0


def test_a_peer_that_nixl_will_not_let_go_is_not_met_anew_before(world: World) -> None:
    producer = world.producer()
    world.fabric.script(Plan(post=nixlBackendError))
    world.fabric.fail("remove_remote_agent", times=4)
    world.fetch(producer, "bad")
    world.step()
    world.fetch(producer, "next")
    world.step(2, seconds=0.2)
    assert world.raw.calls["add_remote_agent"] == 1
    assert world.reader.stage("next") is Stage.HANDSHAKE
    world.step(5, seconds=0.2)
    assert world.outcomes["next"].verified


def test_a_made_up_generation_disturbs_nobody(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "r1", [0], [5])
    world.step(3)
    world.fabric.plan = Plan(polls=3)
    world.fetch(producer, "r2", [1], [6])
    world.fetch(producer, "odd", [2], [7], remote_registration_generation=2**62)
    world.fetch(producer, "r3", [3], [8])
    world.step(12, seconds=0.1)
    assert all(outcome.verified for outcome in world.outcomes.values())
    assert len(world.outcomes) == 4
    assert world.raw.calls["add_remote_agent"] == 1


def test_requests_under_way_fail_when_the_peer_turns_out_to_be_another(world: World) -> None:
    producer = world.producer(kvnixl=False)
    world.fetch(producer, "r1", [0], [5])
    world.step(2)
    world.fabric.script(Plan(polls=None))
    world.fetch(producer, "running", [1], [6])
    world.step()
    producer.metadata[0, 0].block_strides = [s * 2 for s in producer.metadata[0, 0].block_strides]
    producer.metadata[0, 0].region_num_blocks = [BLOCKS // 2] * LAYERS
    world.fetch(producer, "new", [2], [1], remote_registration_generation=1)
    world.step(2, seconds=0.1)
    assert "running" not in world.outcomes
    (transfer,) = world.fabric.transfers
    transfer.finish()
    world.step(4, seconds=0.1)
    assert world.outcomes["running"].cause is FailureCause.DISCONNECTED
    assert "registered anew" in world.outcomes["running"].reason
    assert world.outcomes["new"].done
    expected = [producer.memory[0][i, 2] for i in range(LAYERS)]
    assert np.array_equal(world.cache[:, 2], expected)


def test_an_idle_peer_is_unloaded_after_a_while(make_world: Callable[..., World]) -> None:
    world = make_world(idle_timeout=60.0)
    idle, used = world.producer("idle"), world.producer("used", seed=2)
    world.fetch(idle, "i", [0], [0])
    world.fetch(used, "u0", [1], [1])
    world.step(3)
    for i in range(1, 8):
        world.fetch(used, f"u{i}", [i], [i])
        world.step(3, seconds=5.0)
    assert world.reader.num_remotes == 1
    assert world.raw.remote_agents == ("used-0",)
    assert world.handshakes.started.count(used.address) == 1
    world.fetch(idle, "again", [0], [4])
    world.step(3)
    assert world.outcomes["again"].verified


def test_a_peer_with_a_read_in_flight_is_never_idle(make_world: Callable[..., World]) -> None:
    world = make_world(idle_timeout=10.0, read_timeout=1e6, request_timeout=1e6)
    producer = world.producer()
    world.fabric.script(Plan(polls=None))
    world.fetch(producer, "r")
    world.step(5, seconds=50.0)
    assert world.reader.num_remotes == 1
    world.fabric.settle()
    world.step(2)
    assert world.outcomes["r"].verified
    world.step(3, seconds=50.0)
    assert world.reader.num_remotes == 0
    assert world.raw.remote_agents == ()


# --- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "option"),
    [
        (Stage.HANDSHAKE, "handshake_timeout"),
        (Stage.QUEUED, "queue_timeout"),
        (Stage.READING, "read_timeout"),
        (Stage.VERIFYING, "verify_timeout"),
        (Stage.HANDSHAKE, "request_timeout"),
        (Stage.READING, "request_timeout"),
    ],
)
def test_every_stage_has_a_deadline(
    make_world: Callable[..., World], stage: Stage, option: str
) -> None:
    world = make_world(max_inflight_bytes=1, **{option: 3.0})
    producer = world.producer()
    if stage is Stage.HANDSHAKE:
        world.handshakes.held.add(producer.address)
    elif stage is Stage.QUEUED:
        world.fabric.script(Plan(polls=None))
        world.fetch(producer, "first", [9], [9])
        world.step()
    elif stage is Stage.READING:
        world.fabric.script(Plan(polls=None))
    else:
        world.fabric.script(Plan())
        world.fabric.script(Plan(polls=None))
    world.fetch(producer, "r", [0, 1], [5, 3])
    world.step()
    assert world.reader.stage("r") is stage
    # The handshake client's own deadline comes first, if it keeps it.
    grace = 1.0 if option == "handshake_timeout" else 0.0
    world.step(seconds=2.9 + grace)
    assert world.reader.stage("r") is stage
    assert not world.reader.overdue()
    world.step(seconds=0.2)
    if stage is Stage.READING:
        assert "r" in world.reader.overdue()
        world.fabric.settle()
        world.step()
    outcome = world.outcomes["r"]
    assert outcome.stage is Stage.FAILED
    assert outcome.cause in (FailureCause.TIMEOUT, FailureCause.LEASE_ENDED)
    assert outcome.ended_in is stage
    assert f"{3 + grace:g} s" in outcome.reason or "in time" in outcome.reason
    if stage is Stage.HANDSHAKE:
        assert str(producer.address) in outcome.reason


def test_a_read_that_ended_before_its_deadline_is_not_called_late(world: World) -> None:
    """The reader was stopped for an hour; meanwhile everything had arrived."""
    producer = world.producer()
    world.fabric.script(Plan(polls=1))
    world.fetch(producer, "r")
    world.step()
    assert world.reader.stage("r") is Stage.READING
    world.step(seconds=3600.0)
    assert world.outcomes["r"].verified


CLOCKS = [(0.0, 1e6, -5e5), (1e6, -1e6, 0.0), (-1e6, 3.0, 1e6)]  # ours, and who is ahead of it


@pytest.mark.parametrize("policy", ["prefer", "off"])
@pytest.mark.parametrize(("ours", "owner", "client"), CLOCKS)
def test_what_no_lease_protects_is_not_read_after_the_owners_promise(
    make_world: Callable[..., World], policy: str, ours: float, owner: float, client: float
) -> None:
    world = make_world(lease_verification=policy, max_inflight_bytes=100)
    world.clock.now = ours
    world.handshakes.owner_ahead, world.handshakes.client_ahead = owner, client
    producer = world.producer(kvnixl=False)
    expiry = ours + owner + 10.0
    for i, changes in enumerate([{"remote_blocks_expiry_time": expiry}, {}]):
        world.fetch(producer, f"early {i}", [i], [i], **changes)
        world.step(2)
        assert world.outcomes[f"early {i}"].done
    world.fabric.script(Plan(polls=2))
    world.fetch(producer, "ahead", [2], [2])
    world.fetch(producer, "queued", [3], [3], remote_blocks_expiry_time=expiry)
    world.step()
    assert world.reader.stage("queued") is Stage.QUEUED
    world.step(seconds=10.5)
    world.fetch(producer, "late", [4], [4], remote_blocks_expiry_time=expiry)
    world.fetch(producer, "unlimited", [5], [5], remote_blocks_expiry_time=None)
    world.step(4)
    for req_id in ("queued", "late"):
        assert world.outcomes[req_id].cause is FailureCause.NO_LEASE
        assert "promised its blocks until 0.5 s ago" in world.outcomes[req_id].reason
    assert world.outcomes["ahead"].done
    assert world.outcomes["unlimited"].done
    assert not world.cache[:, 3:5].any()


def test_a_promise_that_ends_during_the_read_is_not_believed(world: World) -> None:
    world.handshakes.owner_ahead = 50.0
    producer = world.producer(kvnixl=False)
    world.fabric.script(Plan(polls=2))
    expiry = world.clock.now + 60.0
    world.fetch(producer, "r", remote_blocks_expiry_time=expiry)
    world.step()
    assert world.reader.stage("r") is Stage.READING
    world.step(3, seconds=10.5)
    outcome = world.outcomes["r"]
    assert (outcome.ended_in, outcome.cause) == (Stage.READING, FailureCause.NO_LEASE)


def test_a_lease_is_believed_whatever_the_reference_says_of_its_end(world: World) -> None:
    """Heartbeats extend it; the reference was written before."""
    world.handshakes.owner_ahead = 1e6
    world.fetch(world.producer(), "r", remote_blocks_expiry_time=1.0)
    world.step(2)
    assert world.outcomes["r"].verified


def test_the_owners_clock_is_measured_anew_when_it_is_asked_again(world: World) -> None:
    world.handshakes.owner_ahead = 50.0
    producer = world.producer(kvnixl=False)
    world.fetch(producer, "warm", [0], [0])
    world.step(2)
    world.handshakes.owner_ahead = 60.0
    expiry = world.clock.now + 55.0
    world.fetch(producer, "before", [1], [1], remote_blocks_expiry_time=expiry)
    world.step(2, seconds=0.2)
    changes = {"remote_blocks_expiry_time": expiry, "remote_registration_generation": 1}
    world.fetch(producer, "after", [2], [2], **changes)
    world.step(2)
    assert world.outcomes["before"].done
    assert world.outcomes["after"].cause is FailureCause.NO_LEASE


@pytest.mark.parametrize(
    "options",
    [
        {"lease_verification": "maybe"},
        {"read_timeout": 0.0},
        {"request_timeout": -1.0},
        {"max_inflight_bytes": 0},
        {"max_inflight_descs": 0},
        {"patience": -1.0},
        {"backoff": (0.0, 1.0)},
        {"backoff": (2.0, 1.0)},
        {"max_remotes": 0},
        {"idle_timeout": 0.0},
    ],
)
def test_bad_options_are_refused_and_leave_nothing(options: dict[str, Any]) -> None:
    fabric = FakeFabric()
    agent = Agent(fabric.agent("D"))
    _, layout = make_cache(1, None)
    clock = Clock()
    with pytest.raises(ConfigError):
        Reader(agent, layout, engine_id="d", handshakes=Handshakes(clock), clock=clock, **options)
    fabric.assert_clean("D")


def test_a_rank_that_does_not_exist_or_memory_that_cannot_be_registered_is_refused() -> None:
    fabric = FakeFabric()
    agent = Agent(fabric.agent("D"))
    _, layout = make_cache(1, None)
    handshakes = Handshakes(Clock())
    with pytest.raises(TopologyError):
        Reader(agent, layout, engine_id="d", handshakes=handshakes, tp_rank=2, tp_size=2)
    fabric.fail("register_memory")
    with pytest.raises(RegistrationError):
        Reader(agent, layout, engine_id="d", handshakes=handshakes)
    fabric.assert_clean("D")


# --- flow control -------------------------------------------------------------------------------


def test_no_more_than_the_budget_is_in_flight_and_small_requests_go_first(
    make_world: Callable[..., World],
) -> None:
    block = LAYERS * HEADS * HEAD_BYTES
    world = make_world(max_inflight_bytes=4 * block)
    producer = world.producer()
    world.fabric.plan = Plan(polls=None)
    sizes = {"large": 5, "three": 3, "one": 1, "two": 2}
    for req_id, size in sizes.items():
        world.fetch(producer, req_id, list(range(size)), list(range(size)))
    world.step()

    def reading() -> set[str]:
        return {r for r in sizes if world.reader.stage(r) is Stage.READING}

    assert reading() == {"one", "two"}
    assert world.reader.bytes_in_flight == 3 * block
    world.fabric.settle()
    world.step()
    assert reading() == {"three"}
    world.fabric.settle()
    world.step()
    assert reading() == {"large"}, "what is larger than the budget goes alone"
    for _ in range(3):
        world.fabric.settle()
        world.step()
    assert len([o for o in world.outcomes.values() if o.verified]) == 4
    assert world.reader.bytes_in_flight == 0


def test_descriptors_count_too(make_world: Callable[..., World]) -> None:
    world = make_world(max_inflight_descs=2 * LAYERS)
    producer = world.producer()
    world.fabric.plan = Plan(polls=None)
    world.fetch(producer, "merged", [0, 1, 2], [0, 1, 2])  # LAYERS descriptors
    world.fetch(producer, "scattered", [3, 5, 7, 9], [3, 5, 7, 9])  # 4 * LAYERS
    world.step()
    assert world.reader.stage("merged") is Stage.READING
    assert world.reader.stage("scattered") is Stage.QUEUED


def test_a_large_request_is_not_overtaken_for_ever(make_world: Callable[..., World]) -> None:
    block = LAYERS * HEADS * HEAD_BYTES
    world = make_world(max_inflight_bytes=4 * block, patience=1.0)
    producer = world.producer()
    world.fabric.plan = Plan(polls=3)
    world.fetch(producer, "large", [0, 1, 2, 3], [0, 1, 2, 3])
    served_at = None
    for i in range(60):
        world.fetch(producer, f"s{i}", [4 + i % 8], [4], kvnixl_lease=None)
        world.step(seconds=0.1)
        if world.reader.stage("large") is not Stage.QUEUED and served_at is None and i > 0:
            served_at = i
    assert served_at is not None
    assert served_at < 20
    world.step(200)
    assert len(world.outcomes) == 61


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(1, 3)),
        min_size=1,
        max_size=25,
    ),
    max_bytes=st.integers(1, 60),
)
@hypothesis_settings(deadline=None, max_examples=150)
def test_the_queue_serves_everyone_within_the_budget(
    arrivals: list[tuple[int, int, int]], max_bytes: int
) -> None:
    """Each arrival: its size, the time after the one before it, how long it runs."""
    patience = 3.0
    flow: FlowControl[str] = FlowControl(max_bytes, 10, patience)
    size = {f"k{i}": arrival[0] for i, arrival in enumerate(arrivals)}
    duration = {f"k{i}": arrival[2] for i, arrival in enumerate(arrivals)}
    times = np.cumsum([arrival[1] for arrival in arrivals]).tolist()
    to_add = dict(zip(size, times, strict=True))
    waiting: dict[str, float] = {}
    ends: dict[str, float] = {}
    now = 0.0
    while to_add or waiting or ends:
        assert now < 1000, "somebody starves"
        for key in [k for k, at in to_add.items() if at <= now]:
            del to_add[key]
            waiting[key] = now
            flow.add(key, size[key], now)
        for key in [k for k, end in ends.items() if end <= now]:
            del ends[key]
            flow.give_back(size[key], 1)
        while (chosen := flow.next(now)) is not None:
            impatient = [k for k, since in waiting.items() if now - since >= patience]
            if impatient:
                assert chosen == impatient[0]
            else:
                assert size[chosen] == min(size[k] for k in waiting)
            if not flow.fits(size[chosen], 1):
                assert ends
                break
            alone = not ends
            flow.take(size[chosen], 1)
            assert alone or (flow.bytes_in_flight <= max_bytes and flow.descs_in_flight <= 10)
            ends[chosen] = now + duration[chosen]
            flow.remove(chosen)
            del waiting[chosen]
        assert len(flow) == len(waiting)
        now += 1.0
    assert (flow.bytes_in_flight, flow.descs_in_flight, len(flow)) == (0, 0, 0)


# --- idle, closing ------------------------------------------------------------------------------


def test_an_idle_step_asks_nobody_anything(world: World) -> None:
    producers = [world.producer(f"p{i}", seed=i + 1) for i in range(5)]
    for producer in producers:
        world.reader.prepare(*producer.address)
    world.step(3)
    assert world.reader.num_remotes == 5
    calls, polls = sum(world.raw.calls.values()), world.handshakes.polls
    world.step(100)
    assert sum(world.raw.calls.values()) == calls
    assert world.handshakes.polls == polls


def test_close_waits_for_what_may_still_land_and_gives_everything_back(world: World) -> None:
    producer = world.producer()
    world.fabric.plan = Plan(polls=None, hold=True)
    world.fetch(producer, "flying", [0], [0])
    world.step()
    world.handshakes.held.add(PeerAddress("nobody", "10.9.9.9", 1))
    world.fetch(
        producer, "waiting", [1], [1], remote_host="10.9.9.9", remote_port=1, remote_engine_id="n"
    )
    world.step()
    before = world.clock.now
    assert world.reader.close(timeout=0) > 0
    assert world.clock.now == before
    assert world.reader.close() > 0
    assert 2.0 <= world.clock.now - before < 2.1
    world.step()
    assert world.outcomes["waiting"].stage is Stage.ABORTED
    assert "flying" not in world.outcomes
    assert world.raw.registrations > 0
    with pytest.raises(ClosedError):
        world.reader.fetch("r", {}, [[]])
    with pytest.raises(ClosedError):
        world.reader.prepare("e", "10.0.0.1", 1)
    with pytest.raises(ClosedError):
        world.reader.release({})
    (transfer,) = world.fabric.transfers
    transfer.hold = False
    before = world.clock.now
    world.waits = [lambda: None, transfer.finish]
    assert world.reader.close(timeout=1.0) == 0
    assert 0 < world.clock.now - before < 0.1
    world.step()
    assert world.outcomes["flying"].stage is Stage.ABORTED
    assert world.reader.close() == 0
    world.fabric.assert_clean("D")
    assert world.handshakes.pending == {}


def test_close_ends_although_the_clock_stands_still(make_world: Callable[..., World]) -> None:
    slept: list[float] = []
    world = make_world(wait=slept.append)
    world.fabric.plan = Plan(polls=None, hold=True)
    world.fetch(world.producer(), "flying")
    world.step()
    assert world.reader.close(timeout=0.5) > 0
    assert sum(slept) == pytest.approx(0.5, abs=0.01)
    for transfer in world.fabric.transfers:
        transfer.hold = False


def test_close_ends_requests_whose_peer_is_found_dead_while_it_tells_it(world: World) -> None:
    producer = world.producer()
    world.fetch(producer, "met")
    world.step(3)
    world.fabric.plan = Plan(polls=None)
    for i in range(3):
        world.fetch(producer, f"r{i}", [3 * i], [i])
    producer.kill(hang=True)
    for i in range(3, 6):
        world.fetch(producer, f"r{i}", [i], [i])
    world.reader.close()
    world.fabric.settle()
    world.step()
    assert world.outcomes.keys() == {"met", *(f"r{i}" for i in range(6))}
    assert not any(world.outcomes[f"r{i}"].done for i in range(6))


def test_close_ends_in_time_although_every_wait_takes_longer_than_asked(world: World) -> None:
    world.fabric.plan = Plan(polls=None, hold=True)
    world.fetch(world.producer(), "flying")
    world.step()
    started = world.clock.now

    def oversleep() -> None:
        world.clock.now += 0.5

    world.waits = [oversleep] * 100
    assert world.reader.close(timeout=1.0) > 0
    assert world.clock.now - started < 1.6
    world.waits.clear()
    for transfer in world.fabric.transfers:
        transfer.hold = False


def test_memory_that_the_caller_registered_is_left_alone() -> None:
    fabric = FakeFabric()
    agent = Agent(fabric.agent("D"))
    _, layout = make_cache(1, None)
    for memory in layout.memory:
        agent.register_memory([(memory.base, memory.length, 0)])
    before = fabric.agents["D"].registrations
    clock = Clock()
    reader = Reader(
        agent, layout, engine_id="d", handshakes=Handshakes(clock), clock=clock, register=False
    )
    assert reader.close() == 0
    assert fabric.agents["D"].registrations == before


# --- everything at once -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_random_faults_never_let_wrong_bytes_pass_or_free_blocks_early(seed: int) -> None:
    """Producers that overwrite, die and restart, a network that tears, fails and refuses, aborts
    and passing time: every request ends once, what counts as verified is right, and no outcome
    leaves a transfer that may still write its blocks."""
    rng = random.Random(seed)
    fabric = FakeFabric(seed)
    world = World(
        fabric,
        max_inflight_bytes=rng.choice([1, 500, 1 << 20]),
        num_cells=rng.choice([2, 8, 32]),
        lease_verification=rng.choice(["require", "prefer"]),
        read_timeout=5.0,
        handshake_timeout=2.0,
        verify_timeout=2.0,
        request_timeout=12.0,
        idle_timeout=4.0,
    )
    producers = [
        world.producer("p0", seed=1),
        world.producer("p1", seed=2, tp_size=2),
        world.producer("p2", seed=3, slots=2),
    ]

    def rule(transfer: FakeTransfer) -> Plan:
        if rng.random() < 0.25:
            return fabric.any_plan(transfer)
        return Plan(polls=rng.choice([0, 1, 3]), copy="spread", piece_bytes=8)

    fabric.rule = rule
    fabric.notice_rule = fabric.any_fate
    free = set(range(BLOCKS))
    running: dict[str, tuple[Producer, int, list[int], list[int], list[Bytes], bool]] = {}
    started = 0
    owner: dict[tuple[str, int], str] = {}

    def owns(producer: Producer, block: int, req_id: str) -> bool:
        return owner.get((producer.engine_id, block)) == req_id

    def collect() -> None:
        for outcome in world.step():
            producer, start, local, remote, expected, leased = running.pop(outcome.req_id)
            for block in local:
                for layer in range(LAYERS):
                    place = world.cache[layer, block].ctypes.data
                    assert not fabric.writers(place, world.cache.shape[2]), "bytes still land"
            if outcome.verified:
                assert leased
                for block, content in zip(local, expected, strict=True):
                    assert np.array_equal(world.cache[:, block], content)
            free.update(local)
            world.cache[:, local] = 0
            if producer.starts == start:
                producer.reuse(
                    outcome.req_id, [b for b in remote if owns(producer, b, outcome.req_id)]
                )

    for _ in range(300):
        action = rng.random()
        if action < 0.35 and len(free) >= 3:
            producer = rng.choice(producers)
            local = rng.sample(sorted(free), rng.randint(1, 3))
            remote = rng.sample(range(BLOCKS), len(local))
            req_id = f"r{started}"
            for block in remote:
                # An owner gives a block to the next request only after the last one's lease.
                last = owner.get((producer.engine_id, block))
                if last is not None:
                    producer.reuse(last, [b for b in remote if owns(producer, b, last)])
                owner[producer.engine_id, block] = req_id
            for memory in producer.memory:
                fresh = np.random.default_rng(started)
                memory[:, remote] = fresh.integers(1, 200, memory[:, remote].shape, np.uint8)
            started += 1
            reference = producer.offer(req_id, remote)
            expected = [producer.block(i).copy() for i in remote]
            free -= set(local)
            leased = "kvnixl_lease" in reference
            running[req_id] = (producer, producer.starts, local, remote, expected, leased)
            world.reader.fetch(req_id, reference, [local])
        elif action < 0.42 and running:
            world.reader.abort(rng.choice(sorted(running)))
        elif action < 0.5 and running:
            req_id = rng.choice(sorted(running))
            producer, start, _, remote, _, _ = running[req_id]
            if producer.starts == start:
                producer.reuse(req_id, [b for b in remote if owns(producer, b, req_id)])
        elif action < 0.52:
            rng.choice(producers).start()
        elif action < 0.6:
            world.clock.now += rng.choice([0.1, 1.0, 3.0])
        elif action < 0.75:
            fabric.progress(rng.randint(1, 6))
        collect()
    fabric.rule = None
    for _ in range(200):
        if not running:
            break
        fabric.settle()
        world.clock.now += 0.5
        collect()
    assert not running
    assert started > 20
    assert set(world.outcomes) == {f"r{i}" for i in range(started)}
    world.close()
