"""`kvnixl.leases` piece by piece: descriptors, allocator, producer's slots, verifier."""

from __future__ import annotations

import logging
import mmap
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import kvnixl.leases
from kvnixl._slots import SlotPool
from kvnixl.agent import Agent
from kvnixl.errors import ClosedError
from kvnixl.fake import (
    FakeFabric,
    FakeTransfer,
    Plan,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from kvnixl.leases import (
    LEASE_SLOT_BYTES,
    LeaseSlotAllocator,
    LeaseVerifier,
    ProducerLeaseSlots,
    lease_slot_descs,
)

RELEASED = "engine E rank {} released the KV blocks before the read completed"
UNREADABLE = "the lease slot of engine E rank {} could not be read"


# --- importing ----------------------------------------------------------------------------------


def test_importing_leases_imports_no_torch_nixl_zmq_or_vllm() -> None:
    code = (
        "import sys, kvnixl.leases as l\n"
        "l.ProducerLeaseSlots(4); l.LeaseVerifier(object()); l.LeaseSlotAllocator(4)\n"
        "found = {'torch', 'nixl', 'nixl_cu12', 'zmq', 'vllm'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- descriptors --------------------------------------------------------------------------------


def test_descs_have_one_row_per_slot() -> None:
    descs = lease_slot_descs(4096, 3)
    assert descs.dtype == np.uint64
    assert descs.tolist() == [[4096, 8, 0], [4104, 8, 0], [4112, 8, 0]]
    assert LEASE_SLOT_BYTES == 8
    assert lease_slot_descs(4096, 0).shape == (0, 3)


def test_descs_reach_the_last_address_and_no_further() -> None:
    assert lease_slot_descs(2**64 - 16, 2)[:, 0].tolist() == [2**64 - 16, 2**64 - 8]
    with pytest.raises(ValueError, match="do not fit"):
        lease_slot_descs(2**64 - 16, 3)
    with pytest.raises(ValueError, match="do not fit"):
        lease_slot_descs(-8, 1)
    with pytest.raises(ValueError, match="negative"):
        lease_slot_descs(0, -1)


# --- allocator ----------------------------------------------------------------------------------


def test_a_request_gets_its_lease_once() -> None:
    allocator = LeaseSlotAllocator(4)
    assert allocator.get("a") is None
    lease = allocator.acquire("a")
    assert lease is not None
    assert allocator.acquire("a") == allocator.get("a") == lease
    assert allocator.acquire("b") not in {None, lease}
    assert allocator.num_free == 2


def test_a_freed_slot_is_handed_out_again_last_in_first_out() -> None:
    allocator = LeaseSlotAllocator(4)
    slots = {name: allocator.acquire(name)[0] for name in "abcd"}  # type: ignore[index]
    assert sorted(slots.values()) == [0, 1, 2, 3]
    allocator.release("b", clear=True)
    allocator.release("d", clear=True)
    assert allocator.acquire("e")[0] == slots["d"]  # type: ignore[index]
    assert allocator.acquire("f")[0] == slots["b"]  # type: ignore[index]


def test_out_of_slots_says_so_once_and_names_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocator = LeaseSlotAllocator(1)
    allocator.acquire("a")
    assert allocator.acquire("b") is None
    assert allocator.acquire("c") is None
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "kv_lease_slots" in record.getMessage()
    assert allocator.get("b") is None
    allocator.release("a", clear=True)
    assert allocator.acquire("b") is not None


def test_releasing_an_unknown_request_does_nothing() -> None:
    allocator = LeaseSlotAllocator(2)
    allocator.release("nobody", clear=True)
    assert allocator.take_updates() == ({}, set())
    assert allocator.num_free == 2


def test_a_lease_that_was_never_sent_is_neither_armed_nor_cleared() -> None:
    allocator = LeaseSlotAllocator(2)
    allocator.acquire("a")
    allocator.release("a", clear=True)
    assert allocator.take_updates() == ({}, set())


def test_clear_asks_the_workers_only_when_no_send_record_will() -> None:
    allocator = LeaseSlotAllocator(2)
    leases = {name: allocator.acquire(name) for name in "ab"}
    assert allocator.take_updates() == (leases, set())
    assert allocator.take_updates() == ({}, set())
    allocator.release("a", clear=True)
    allocator.release("b", clear=False)
    assert allocator.take_updates() == ({}, {"a"})


def test_the_caller_owns_the_updates() -> None:
    allocator = LeaseSlotAllocator(2)
    allocator.acquire("a")
    to_arm, to_clear = allocator.take_updates()
    to_arm.clear()
    to_clear.add("x")
    assert allocator.get("a") is not None
    assert allocator.take_updates() == ({}, set())


def test_nonces_are_positive_differ_and_start_where_no_seed_decides() -> None:
    starts = set()
    for _ in range(8):
        random.seed(1)
        np.random.seed(1)
        lease = LeaseSlotAllocator(1).acquire("a")
        assert lease is not None
        assert 0 < lease[1] < 2**63
        starts.add(lease[1])
    assert len(starts) == 8
    allocator = LeaseSlotAllocator(100)
    assert len({allocator.acquire(f"r{i}") for i in range(100)}) == 100


def test_nonces_wrap_past_zero() -> None:
    pool = SlotPool(4, 2**63 - 2)
    assert [pool.acquire(name)[1] for name in "abc"] == [2**63 - 2, 2**63 - 1, 1]  # type: ignore[index]


def test_no_nonce_has_an_empty_low_half() -> None:
    # 0 | 5<<32 is what a NIC could make of an empty word and of a later nonce, read half by half.
    pool = SlotPool(4, (5 << 32) - 1)
    assert [pool.acquire(name)[1] for name in "ab"] == [(5 << 32) - 1, (5 << 32) + 1]  # type: ignore[index]
    assert SlotPool(1, 5 << 32).acquire("a") == (0, (5 << 32) + 1)


def test_slots_that_run_out_again_are_said_again() -> None:
    now = 1000.0
    said: list[float] = []

    class Allocator(LeaseSlotAllocator):
        def when_full(self) -> bool:
            out = super().when_full()
            said.extend([now] if out else [])
            return out

    allocator = Allocator(4, clock=lambda: now)

    def fill() -> None:
        for name in "abcd":
            allocator.acquire(name)
        assert allocator.acquire("e") is None
        assert allocator.acquire("f") is None

    def drain(names: str) -> None:
        for name in names:
            allocator.release(name, clear=True)

    fill()
    drain("abcd")
    fill()  # too soon to say it again
    assert said == [1000.0]
    now += 61
    fill()
    assert said == [1000.0, 1061.0]
    now += 1000
    fill()
    drain("a")  # one slot of four: they are still as good as used up
    fill()
    assert said == [1000.0, 1061.0]
    drain("ab")
    fill()
    assert said == [1000.0, 1061.0, 2061.0]


@pytest.mark.parametrize("num_slots", [0, -1, 2**24 + 1])
def test_the_number_of_slots_has_the_bounds_that_the_message_names(num_slots: int) -> None:
    says = f"kv_lease_slots.* 1 to {2**24}, not {num_slots}"
    with pytest.raises(ValueError, match=says):
        LeaseSlotAllocator(num_slots)


@pytest.mark.parametrize("num_slots", [0, -1])
def test_slots_without_number_are_refused(num_slots: int) -> None:
    for make in (LeaseSlotAllocator, ProducerLeaseSlots):
        with pytest.raises(ValueError, match="num_slots"):
            make(num_slots)


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("was_sent", [True, False])
@pytest.mark.parametrize("other_takes_the_slot", [True, False])
def test_released_and_acquired_again_inside_one_step(
    clear: bool, was_sent: bool, other_takes_the_slot: bool
) -> None:
    allocator, slots = LeaseSlotAllocator(4), ProducerLeaseSlots(4)

    def apply() -> None:
        to_arm, to_clear = allocator.take_updates()
        slots.update(to_clear, to_arm)

    allocator.acquire("a")
    if was_sent:
        apply()
    allocator.release("a", clear=clear)
    other = allocator.acquire("b") if other_takes_the_slot else None
    lease = allocator.acquire("a")
    assert lease is not None
    apply()
    expected = [0, 0, 0, 0]
    for held in (lease, other):
        if held is not None:
            expected[held[0]] = held[1]
    assert slots.words.tolist() == expected
    assert slots.nonce("a") == lease[1]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("ARSU"), st.sampled_from("abcde")), max_size=60))
def test_workers_that_apply_the_updates_hold_the_right_words(ops: list[tuple[str, str]]) -> None:
    """A: acquire, R: release by the scheduler, S: a worker has sent it, U: the workers' step."""
    allocator, slots = LeaseSlotAllocator(3), ProducerLeaseSlots(3)
    live: dict[str, tuple[int, int]] = {}
    for op, req_id in [*ops, ("U", "")]:
        if op == "A":
            lease = allocator.acquire(req_id)
            assert (lease is None) == (len(live) == 3 and req_id not in live)
            if lease is not None:
                assert live.setdefault(req_id, lease) == lease
        elif op == "R":
            allocator.release(req_id, clear=True)
            live.pop(req_id, None)
        elif op == "S" and req_id in live and slots.nonce(req_id) == live[req_id][1]:
            slots.clear(req_id)
            allocator.release(req_id, clear=False)
            del live[req_id]
        elif op == "U":
            to_arm, to_clear = allocator.take_updates()
            slots.update(to_clear, to_arm)
            words = [0, 0, 0]
            for slot, nonce in live.values():
                words[slot] = nonce
            assert slots.words.tolist() == words
            assert {r: slots.nonce(r) for r in live} == {r: n for r, (_, n) in live.items()}
    assert allocator.num_free == 3 - len(live)


# --- producer -----------------------------------------------------------------------------------


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every full fence."""
    made: list[str] = []
    monkeypatch.setattr(kvnixl.leases, "revoke_fence", lambda: made.append("fence"))
    return made


def test_slots_have_pages_of_their_own_and_start_empty() -> None:
    slots = ProducerLeaseSlots(5)
    assert slots.base_addr % mmap.PAGESIZE == 0
    assert slots.base_addr == slots.words.ctypes.data
    assert slots.words.dtype == np.int64
    assert slots.words.tolist() == [0] * 5
    slots.tensor[2] = 7
    assert slots.words.tolist() == [0, 0, 7, 0, 0]
    assert slots.tensor.data_ptr() == slots.base_addr


def test_clears_come_before_arms() -> None:
    slots = ProducerLeaseSlots(2)
    slots.update((), {"a": (1, 11)})
    slots.update({"a"}, {"b": (1, 12)})
    assert slots.words.tolist() == [0, 12]
    assert slots.nonce("a") is None
    assert slots.nonce("b") == 12


def test_a_late_clear_leaves_the_next_lease_of_the_slot_alone() -> None:
    slots = ProducerLeaseSlots(2)
    slots.update((), {"a": (1, 11)})
    slots.update((), {"b": (1, 12)})
    assert slots.nonce("a") is None
    slots.clear("a")
    assert slots.words.tolist() == [0, 12]
    slots.clear("b")
    assert slots.words.tolist() == [0, 0]


def test_a_new_lease_of_a_request_ends_its_old_one() -> None:
    slots = ProducerLeaseSlots(3)
    slots.update((), {"a": (1, 11)})
    slots.update((), {"a": (2, 12)})
    assert slots.words.tolist() == [0, 0, 12]
    slots.clear("a")
    assert slots.words.tolist() == [0, 0, 0]


def test_publish_fences_once_and_only_after_a_store(fences: list[str]) -> None:
    slots = ProducerLeaseSlots(2)
    slots.publish()
    assert len(fences) == 0
    slots.update((), {"a": (0, 11), "b": (1, 12)})
    slots.publish()
    slots.publish()
    assert len(fences) == 1
    slots.clear("nobody")
    slots.update({"nobody"}, {})
    slots.publish()
    assert len(fences) == 1
    slots.clear("a")
    slots.publish()
    assert len(fences) == 2


def test_slots_that_do_not_exist_and_impossible_nonces_are_refused() -> None:
    slots = ProducerLeaseSlots(2)
    for slot in (2, -1, 2**40, 2**70):
        with pytest.raises(IndexError, match=f"lease slot {slot} "):
            slots.update((), {"a": (slot, 1)})
    for nonce in (0, -1, 2**63, 2**70):
        with pytest.raises(ValueError, match=f"nonce {nonce} "):
            slots.update((), {"a": (1, nonce)})
    with pytest.raises(ValueError, match="unpack"):
        slots.update((), {"a": (1,)})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        slots.update((), {"a": (1.0, 2)})  # type: ignore[dict-item]
    assert slots.words.tolist() == [0, 0]


def test_a_refused_arm_does_not_keep_the_clears_back() -> None:
    slots = ProducerLeaseSlots(2)
    slots.update((), {"a": (1, 11)})
    with pytest.raises(IndexError):
        slots.update({"a"}, {"b": (9, 12)})
    assert slots.words.tolist() == [0, 0]


def test_arms_from_the_wire_may_be_lists_in_any_mapping() -> None:
    from types import MappingProxyType

    slots = ProducerLeaseSlots(2)
    slots.update((), MappingProxyType({"a": [1, 11]}))  # type: ignore[dict-item]
    slots.clear("a")
    assert slots.words.tolist() == [0, 0]


def test_closing_ends_all_leases(fences: list[str]) -> None:
    slots = ProducerLeaseSlots(2)
    slots.update((), {"a": (0, 11)})
    slots.close()
    slots.close()
    assert slots.words.tolist() == [0, 0]
    assert len(fences) == 1
    slots.clear("a")
    slots.update({"a"}, {})
    slots.publish()
    with pytest.raises(ClosedError):
        slots.update((), {"a": (0, 11)})
    assert slots.words.tolist() == [0, 0]


# --- verifier -----------------------------------------------------------------------------------


class Rig:
    """One engine ``E`` with several ranks, a reader, and a clock."""

    NUM_SLOTS = 16

    def __init__(self, num_ranks: int = 1, num_cells: int = 8, **options: Any) -> None:
        self.fabric = FakeFabric(seed=1)
        self.reader = self.fabric.agent("reader")
        self.now = 100.0
        self.wrap = options.pop("wrap", lambda agent: agent)
        self.verifier = LeaseVerifier(
            self.wrap(self.reader), num_cells, timeout=10.0, clock=lambda: self.now, **options
        )
        self.ranks = [ProducerLeaseSlots(self.NUM_SLOTS) for _ in range(num_ranks)]
        self.peers = []
        for rank, slots in enumerate(self.ranks):
            agent = self.fabric.agent(f"E{rank}")
            agent.register_memory([(slots.base_addr, slots.words.nbytes, 0, "")], "DRAM")
            self.peers.append(self.reader.add_remote_agent(agent.get_agent_metadata()))
            self.add_remote(rank)

    def add_remote(self, rank: int, engine_id: str = "E", **options: Any) -> None:
        descs = lease_slot_descs(self.ranks[rank].base_addr, self.NUM_SLOTS)
        prepared = self.reader.prep_xfer_dlist(self.peers[rank], descs, "DRAM")
        self.verifier.add_remote(engine_id, rank, prepared, **options)

    def arm(self, slot: int, nonce: int) -> None:
        for slots in self.ranks:
            slots.words[slot] = nonce

    def lease(
        self, req_id: str, slot: int, nonce: int = 77, ranks: Sequence[int] | None = None
    ) -> None:
        """Arm a lease on all ranks and add its checks, of all ranks or these."""
        self.arm(slot, nonce)
        checked = range(len(self.ranks)) if ranks is None else ranks
        self.verifier.add_checks(req_id, "E", checked, slot, nonce)

    def run(self, *reads_done: str, steps: int = 5) -> tuple[set[str], dict[str, str]]:
        """Step until everything that can end has ended."""
        verified, failed = self.verifier.step(set(reads_done))
        for _ in range(steps):
            more_verified, more_failed = self.verifier.step()
            verified |= more_verified
            failed |= more_failed
        return verified, failed

    def cells(self) -> tuple[int, int]:
        return self.verifier.free_cells, self.verifier.quarantined_cells

    def end(self) -> None:
        self.fabric.settle()
        for _ in range(5):
            self.verifier.step()
        assert self.verifier.shutdown() == 0
        for peer in self.peers:
            self.reader.remove_remote_agent(peer)
        self.fabric.assert_clean("reader")


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Make rigs; in the end nothing may be left with NIXL."""
    rigs: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        rigs.append(Rig(*args, **options))
        return rigs[-1]

    yield make
    for made in rigs:
        made.end()


@pytest.mark.parametrize("polls", [0, 1, 3])
def test_a_request_is_verified_when_every_rank_holds_the_nonce(
    rig: Callable[..., Rig], polls: int
) -> None:
    r = rig(num_ranks=3)
    r.fabric.plan = Plan(polls=polls)
    r.lease("a", 2)
    assert r.verifier.has_checks
    assert r.run("a") == ({"a"}, {})
    assert not r.verifier.has_checks
    assert r.cells() == (8, 0)


def test_one_rank_that_released_the_blocks_fails_the_request(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=3)
    r.lease("a", 2)
    r.lease("b", 3, nonce=78)
    r.ranks[1].words[2] = 0
    assert r.run("a", "b") == ({"b"}, {"a": RELEASED.format(1)})


def test_a_slot_that_was_armed_again_fails_the_request(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.lease("a", 2, nonce=77)
    r.arm(2, 78)
    assert r.run("a") == (set(), {"a": RELEASED.format(0)})


@pytest.mark.parametrize("other", [77 + 2**32, 77 + 2**62, 78, 77 ^ 2**31])
def test_all_bits_of_the_nonce_count(rig: Callable[..., Rig], other: int) -> None:
    r = rig()
    r.verifier.add_check("a", "E", 0, 2, 77)
    r.arm(2, other)
    assert r.run("a") == (set(), {"a": RELEASED.format(0)})


def test_nothing_starts_before_the_block_reads_are_done(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.fabric.plan = Plan(polls=None)
    r.lease("a", 2)
    assert r.verifier.step() == (set(), {})
    assert r.fabric.transfers == []
    # The blocks are given away while they are read; only a slot READ that starts later sees it.
    r.arm(2, 0)
    assert r.verifier.step({"a"}) == (set(), {})
    r.fabric.settle()
    assert r.verifier.step() == (set(), {"a": RELEASED.format(0)})


def test_one_read_per_rank_for_all_requests_of_a_step(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=2, num_cells=16)
    r.fabric.plan = Plan(polls=1)
    for i, slot in enumerate([5, 3, 9, 4]):
        r.lease(f"r{i}", slot, nonce=100 + i)
    r.verifier.step({"r0", "r1", "r2", "r3"})
    assert [t.remote for t in r.fabric.transfers] == ["E0", "E1"]
    for transfer, slots in zip(r.fabric.transfers, r.ranks, strict=True):
        # Ascending on both sides, so that NIXL merges neighbours.
        assert ((transfer.source - slots.base_addr) // 8).tolist() == [3, 4, 5, 9]
        assert np.all(np.diff(transfer.destination.astype(np.int64)) == 8)
    assert r.run() == ({"r0", "r1", "r2", "r3"}, {})


def test_requests_of_several_engines_and_ranks(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=3)
    for rank in range(3):
        r.add_remote(rank, "F")
    r.arm(1, 71)
    r.arm(2, 72)
    r.verifier.add_checks("a", "E", [0, 2], 1, 71)
    r.verifier.add_check("a", "F", 1, 2, 72)
    assert r.verifier.can_verify("E", (0, 1, 2))
    assert r.verifier.can_verify("F", [])
    assert not r.verifier.can_verify("E", [0, 3])
    assert not r.verifier.can_verify("G", [0])
    assert r.run("a") == ({"a"}, {})


def test_results_come_once(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.lease("a", 2)
    assert r.run("a") == ({"a"}, {})
    assert r.run() == (set(), {})


def test_a_repeated_completion_changes_nothing(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.fabric.plan = Plan(polls=2)
    r.lease("a", 2)
    assert r.verifier.step({"a"}) == (set(), {})
    assert r.verifier.step(["a", "a"]) == (set(), {})
    # The check ends in the very step that reports the completion again.
    assert r.verifier.step({"a"}) == ({"a"}, {})


# fail closed


def test_a_request_without_a_check_fails(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.lease("a", 2)
    r.verifier.add_checks("none", "E", [], 2, 77)
    verified, failed = r.run("a", "stranger", "none")
    assert verified == {"a"}
    assert failed.keys() == {"stranger", "none"}
    assert "no lease is known" in failed["stranger"]


@pytest.mark.parametrize("nonce", [0, -1, 2**63, 2**64 + 77, -(2**63)])
def test_an_impossible_nonce_fails_its_request_only(rig: Callable[..., Rig], nonce: int) -> None:
    r = rig()
    r.lease("a", 2)
    r.verifier.add_check("b", "E", 0, 3, nonce)  # the slot is empty: its word is 0
    verified, failed = r.run("a", "b")
    assert verified == {"a"}
    assert UNREADABLE.format(0) in failed["b"]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("slot", [16, -1, 2**31, 2**32 + 2, 2**70])
def test_a_slot_that_does_not_exist_fails_its_request_only(
    rig: Callable[..., Rig], slot: int, known: bool
) -> None:
    r = rig(num_ranks=2)
    if known:
        r.add_remote(1, num_slots=16)
    r.lease("a", 2)
    r.lease("c", 5)
    r.verifier.add_checks("b", "E", [0, 1], slot, 77)
    verified, failed = r.run("a", "b", "c")
    assert verified == {"a", "c"}
    assert failed.keys() == {"b"}
    assert "could not be read" in failed["b"]
    assert r.cells() == (8, 0)


def test_a_rank_that_is_not_known_fails_its_request_only(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.lease("a", 2)
    r.verifier.add_checks("b", "E", [0, 1], 2, 77)
    r.verifier.add_checks("c", "G", [0], 2, 77)
    verified, failed = r.run("a", "b", "c")
    assert verified == {"a"}
    assert failed.keys() == {"b", "c"}
    assert UNREADABLE.format(1) in failed["b"]
    assert "engine G rank 0" in failed["c"]


def test_checks_that_could_not_all_be_added_prove_nothing(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=2)
    r.arm(2, 77)

    def ranks() -> Iterator[int]:
        yield 0
        raise RuntimeError("the second rank is lost")

    with pytest.raises(RuntimeError, match="lost"):
        r.verifier.add_checks("a", "E", ranks(), 2, 77)
    r.verifier.add_check("b", "E", 0, 2, 77)
    with pytest.raises(TypeError):
        r.verifier.add_check("b", "E", 1, 2, "77")  # type: ignore[arg-type]
    verified, failed = r.run("a", "b")
    assert verified == set()
    assert failed.keys() == {"a", "b"}


FAULTS = {
    "make raises": Plan(make=nixlBackendError),
    "post raises": Plan(post=nixlRemoteDisconnectError),
    "post returns ERR": Plan(post="ERR"),
    "state check raises": Plan(polls=1, end=nixlRemoteDisconnectError),
    "state check says ERR": Plan(polls=1, end="ERR"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_fails_fails_its_requests_only(rig: Callable[..., Rig], fault: str) -> None:
    r = rig(num_ranks=2)
    r.arm(2, 77)
    r.verifier.add_checks("both", "E", [0, 1], 2, 77)
    r.verifier.add_checks("other", "E", [1], 2, 77)
    r.fabric.script(FAULTS[fault], remote="E0")
    verified, failed = r.run("both", "other")
    assert verified == {"other"}
    assert UNREADABLE.format(0) in failed["both"]
    assert r.cells() == (8, 0)
    assert r.reader.live_transfers == 0


def test_a_dead_engine_fails_all_its_requests(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=2)
    r.lease("a", 2)
    r.lease("b", 3)
    r.fabric.kill("E0")
    verified, failed = r.run("a", "b")
    assert verified == set()
    assert failed.keys() == {"a", "b"}
    assert r.cells() == (8, 0)


def test_a_refused_make_is_tried_in_halves_until_what_is_refused_stands_alone(
    rig: Callable[..., Rig],
) -> None:
    r = rig()
    for i in range(4):
        r.lease(f"r{i}", i)
    r.fabric.fail("make_prepped_xfer", times=3)  # the READ of all, its first half, one check
    verified, failed = r.run(*[f"r{i}" for i in range(4)])
    assert len(verified) == 3
    assert len(failed) == 1
    assert r.cells() == (8, 0)


def test_a_peer_that_is_gone_is_not_asked_check_by_check(rig: Callable[..., Rig]) -> None:
    r = rig()
    for i in range(4):
        r.lease(f"r{i}", i)
    r.fabric.fail("make_prepped_xfer", nixlRemoteDisconnectError)
    verified, failed = r.run(*[f"r{i}" for i in range(4)])
    assert verified == set()
    assert len(failed) == 4
    assert r.reader.calls["make_prepped_xfer"] == 1


def test_a_check_that_finds_the_agent_removed_keeps_the_cells(rig: Callable[..., Rig]) -> None:
    """NIXL says "not found" of a READ whose remote agent was removed, while its word may land."""
    r = rig(num_cells=2)
    r.fabric.script(Plan(polls=None))
    r.lease("a", 1)
    r.verifier.step({"a"})
    r.fabric.fail("check_xfer_state", nixlNotFoundError, times=3)
    _, failed = r.verifier.step()
    assert "nixlNotFoundError" in failed["a"]
    assert r.cells() == (1, 1)
    assert r.verifier.step() == (set(), {})
    assert r.cells() == (1, 1)
    r.verifier.step()
    r.fabric.settle()
    r.verifier.step()
    assert r.cells() == (2, 0)


def test_a_prepared_list_that_is_refused_is_said_once(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    r = rig()
    r.fabric.fail("release_dlist_handle", agent="reader", times=20)
    with caplog.at_level(logging.WARNING):
        r.verifier.release_engine("E")
        for _ in range(19):
            r.verifier.step()
    assert sum("prepared list" in record.message for record in caplog.records) == 1
    r.verifier.step()
    assert r.reader.live_lists == 1


def test_a_large_request_in_front_takes_nobody_down_with_it(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=4, num_cells=4)
    r.fabric.script(Plan(polls=None))
    r.lease("stuck", 1, ranks=[0])
    r.verifier.step({"stuck"})
    r.now += 11
    r.verifier.step()
    assert r.cells() == (3, 1)
    r.lease("big", 2)
    r.lease("small", 3, ranks=[0])
    assert r.verifier.step(["big", "small"]) == (set(), {})
    r.now += 11
    verified, failed = r.run()
    assert failed.keys() == {"big"}
    assert "4 needed, 1 of 4 in quarantine" in failed["big"]
    assert verified == {"small"}


def test_a_handle_that_is_none_fails_the_request(rig: Callable[..., Rig]) -> None:
    class Silent:
        def __init__(self, agent: Any) -> None:
            self.agent = agent

        def __getattr__(self, name: str) -> Any:
            return getattr(self.agent, name)

        def make_prepped_xfer(self, *args: Any) -> None:
            return None

    r = rig(wrap=Silent)
    r.lease("a", 2)
    _, failed = r.run("a")
    assert UNREADABLE.format(0) in failed["a"]


@pytest.mark.parametrize("end", ["DONE", "ERR", None])
def test_an_agent_that_returns_nothing_from_posting_is_asked_how_it_went(
    rig: Callable[..., Rig], end: str | None
) -> None:
    class Wordless:
        def __init__(self, agent: Any) -> None:
            self.agent = agent

        def __getattr__(self, name: str) -> Any:
            return getattr(self.agent, name)

        def transfer(self, handle: Any) -> None:
            self.agent.transfer(handle)

    r = rig(wrap=Wordless)
    r.fabric.script(Plan(polls=None) if end is None else Plan(polls=2, end=end))
    r.lease("a", 2)
    assert r.verifier.step({"a"}) == (set(), {})
    r.now += 11 if end is None else 0
    verified, failed = r.run()
    assert verified == ({"a"} if end == "DONE" else set())
    assert failed.keys() == ({"a"} - verified)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("call", ["make_prepped_xfer", "transfer", "check_xfer_state"])
def test_an_error_that_cannot_be_printed_does_not_raise_out_of_a_step(
    rig: Callable[..., Rig], call: str
) -> None:
    r = rig()
    r.fabric.plan = Plan(polls=1)
    r.fabric.fail(call, UnprintableError(), agent="reader")
    r.lease("a", 2)
    verified, failed = r.run("a")
    assert verified == set()
    assert failed == {"a": f"{UNREADABLE.format(0)}: UnprintableError"}


def test_a_refused_release_whose_reason_cannot_be_printed_is_retried(
    rig: Callable[..., Rig],
) -> None:
    r = rig()
    r.fabric.fail("release_xfer_handle", UnprintableError(), agent="reader")
    r.fabric.fail("release_dlist_handle", UnprintableError(), agent="reader")
    r.lease("a", 2)
    assert r.run("a") == ({"a"}, {})
    r.verifier.release_engine("E")
    r.verifier.step()


def test_words_that_did_not_arrive_prove_nothing(rig: Callable[..., Rig]) -> None:
    """NIXL says that the READ is done, but the cell still holds what an earlier READ brought."""

    class Idle:
        idle = False

        def __init__(self, agent: Any) -> None:
            self.agent = agent

        def __getattr__(self, name: str) -> Any:
            return getattr(self.agent, name)

        def transfer(self, handle: Any) -> str:
            return "DONE" if self.idle else str(self.agent.transfer(handle))

    r = rig(wrap=Idle)
    r.lease("a", 2)
    assert r.run("a") == ({"a"}, {})
    r.verifier._agent.idle = True  # type: ignore[attr-defined]
    r.lease("a", 2)
    assert r.run("a") == (set(), {"a": RELEASED.format(0)})


@pytest.mark.parametrize("missing", [slice(0, 4), slice(4, 8), slice(7, 8)])
@pytest.mark.parametrize("nonce", [77, 1, 2**63 - 1, 2**62, 2**32 + 1])
def test_a_word_that_arrived_in_part_proves_nothing(
    rig: Callable[..., Rig], nonce: int, missing: slice
) -> None:
    r = rig()
    r.fabric.plan = Plan(polls=None, hold=True)
    r.lease("a", 2, nonce)
    r.verifier.step({"a"})
    (transfer,) = r.fabric.transfers
    before = r.verifier.words.copy()
    transfer.finish()
    r.verifier.words.view(np.uint8)[missing] = before.view(np.uint8)[missing]
    assert r.verifier.step() == (set(), {"a": RELEASED.format(0)})


# time


def test_a_read_that_never_ends_times_out_and_keeps_its_cell(rig: Callable[..., Rig]) -> None:
    r = rig(num_cells=2)
    r.fabric.script(Plan(polls=None))
    r.lease("slow", 2)
    assert r.verifier.step({"slow"}) == (set(), {})
    r.now += 9.9
    assert r.verifier.step() == (set(), {})
    r.now += 0.1
    verified, failed = r.verifier.step()
    assert verified == set()
    assert UNREADABLE.format(0) in failed["slow"]
    assert "in time" in failed["slow"]
    assert r.cells() == (1, 1)
    assert r.verifier.busy_engines() == {"E"}
    assert not r.verifier.has_checks
    # Not released while it runs: NIXL would say yes and still write the cell.
    (transfer,) = r.fabric.transfers
    r.verifier.step()
    assert not transfer.released
    # The other cell goes on working, and the late word ends nowhere.
    r.lease("next", 3)
    assert r.run("next") == ({"next"}, {})
    transfer.finish()
    assert r.verifier.step() == (set(), {})
    assert r.cells() == (2, 0)
    assert transfer.released
    assert r.verifier.busy_engines() == set()


def test_a_late_word_is_not_taken_for_the_answer_to_a_second_try(rig: Callable[..., Rig]) -> None:
    r = rig(num_cells=2)
    r.fabric.script(Plan(polls=None))
    r.lease("a", 2)
    r.verifier.step({"a"})
    r.now += 10
    assert "a" in r.verifier.step()[1]
    (late,) = r.fabric.transfers
    late.copy()  # it fetched the nonce while the lease held
    r.fabric.script(Plan(polls=None))
    r.verifier.add_check("a", "E", 0, 2, 77)
    r.arm(2, 0)
    r.verifier.step({"a"})
    late.finish()
    r.fabric.settle()
    assert r.run() == (set(), {"a": RELEASED.format(0)})


def test_an_agent_whose_release_is_final_gets_its_cells_back_at_once() -> None:
    class Stub:
        """Not NIXL: handles are plain numbers, READs never end, releasing works in the end."""

        def __init__(self) -> None:
            self.refuse = True
            self.released: list[int] = []
            self.lists: list[Any] = []

        def make_prepped_xfer(self, *args: Any) -> int:
            return 7

        def transfer(self, handle: int) -> str:
            return "PEND"

        def check_xfer_state(self, handle: int) -> str:
            return "PROC"

        def release_xfer_handle(self, handle: int) -> None:
            if self.refuse:
                raise RuntimeError("busy")
            self.released.append(handle)

        def release_dlist_handle(self, handle: Any) -> None:
            self.lists.append(handle)

    now = 0.0
    stub = Stub()
    verifier = LeaseVerifier(stub, 2, timeout=1.0, clock=lambda: now)
    verifier.local_handle = 1
    verifier.add_remote("E", 0, 2)
    verifier.add_check("a", "E", 0, 0, 9)
    assert verifier.step({"a"}) == (set(), {})
    now = 1.0
    assert verifier.step()[1].keys() == {"a"}
    assert verifier.quarantined_cells == 1
    verifier.step()
    assert verifier.quarantined_cells == 1
    stub.refuse = False
    verifier.step()
    assert verifier.quarantined_cells == 0
    assert verifier.free_cells == 2
    assert stub.released == [7]
    assert verifier.shutdown() == 0
    assert stub.lists == [2, 1]


def test_a_timeout_has_to_be_positive() -> None:
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            LeaseVerifier(FakeFabric().agent("x"), timeout=timeout)


# cells


def test_a_request_that_needs_more_cells_than_exist_fails_at_once(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=3, num_cells=2)
    r.lease("big", 2)
    r.verifier.add_check("small", "E", 0, 2, 77)
    verified, failed = r.verifier.step(["big", "small"])
    assert verified == {"small"}
    assert "3 landing cells" in failed["big"]
    assert "only 2 exist" in failed["big"]


def test_requests_that_wait_for_cells_are_served_in_order(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=3, num_cells=4)
    r.fabric.plan = Plan(polls=None)
    r.lease("first", 1)
    r.lease("big", 2)
    for i in range(4):
        r.verifier.add_check(f"small{i}", "E", 0, 2, 77)
    order: list[str] = []
    r.verifier.step({"first"})
    r.verifier.step({"big"})
    for i in range(4):
        r.verifier.step({f"small{i}"})
        # A stream of small ones does not pass the big one, though there is a cell for each of them.
        assert r.verifier.free_cells == 1
    for _ in range(20):
        r.fabric.settle()
        order += sorted(r.verifier.step()[0])
    assert order == ["first", "big", *[f"small{i}" for i in range(4)]]
    assert r.cells() == (4, 0)


def test_waiting_for_a_cell_ends_in_time(rig: Callable[..., Rig]) -> None:
    r = rig(num_cells=1)
    r.fabric.script(Plan(polls=None))
    r.lease("stuck", 1)
    r.lease("waits", 2)
    r.verifier.step({"stuck"})
    r.now += 5
    r.verifier.step({"waits"})
    r.now += 5
    assert r.verifier.step()[1].keys() == {"stuck"}
    r.now += 5
    verified, failed = r.verifier.step()
    assert verified == set()
    assert failed.keys() == {"waits"}
    assert "landing cells for the lease slots" in failed["waits"]
    assert "1 of 1 in quarantine" in failed["waits"]


def test_a_refused_release_keeps_the_cell_out_of_use_until_it_succeeds(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    r = rig(num_cells=2)
    r.fabric.script(Plan(refuse=3))
    r.lease("a", 2)
    r.lease("b", 3)
    assert r.verifier.step({"a"}) == ({"a"}, {})  # the lease is proven all the same
    assert r.cells() == (1, 1)
    assert r.verifier.step({"b"}) == ({"b"}, {})
    assert r.cells() == (1, 1)
    r.verifier.step()
    assert r.cells() == (1, 1)
    r.verifier.step()
    assert r.cells() == (2, 0)
    assert len(caplog.records) == 1  # said once, not in every step


def test_a_quarantined_cell_is_not_handed_out(rig: Callable[..., Rig]) -> None:
    r = rig(num_cells=3)
    r.fabric.script(Plan(refuse=None))
    r.lease("a", 1)
    r.verifier.step({"a"})
    (kept,) = [int(t.destination[0]) for t in r.reader._transfers]
    r.fabric.plan = Plan(polls=None)
    for i in range(2):
        r.verifier.add_check(f"r{i}", "E", 0, 1, 77)
    r.verifier.step({"r0", "r1"})
    used = [int(a) for t in r.fabric.transfers for a in t.destination]
    assert len(set(used)) == 2
    assert kept not in used


def test_many_cells_survive_being_mixed_up(rig: Callable[..., Rig]) -> None:
    r = rig(num_ranks=2, num_cells=64)
    rng = random.Random(3)
    r.fabric.rule = lambda _t: Plan(polls=rng.choice([0, 1, 2, 5]), refuse=rng.choice([0, 0, 1]))
    for slot in range(16):
        r.arm(slot, 1000 + slot)
    verified: set[str] = set()
    for i in range(300):
        slot = rng.randrange(16)
        r.verifier.add_checks(
            f"r{i}", "E", rng.sample([0, 1], rng.choice([1, 2])), slot, 1000 + slot
        )
        verified |= r.verifier.step({f"r{i}"})[0]
    for _ in range(20):
        verified |= r.verifier.step()[0]
    assert len(verified) == 300
    assert r.cells() == (64, 0)


# discarding


@pytest.mark.parametrize("stage", ["added", "waiting", "reading"])
def test_a_discarded_request_is_not_reported(rig: Callable[..., Rig], stage: str) -> None:
    r = rig(num_cells=1)
    r.fabric.plan = Plan(polls=None)
    if stage == "waiting":
        r.lease("blocker", 1)
        r.verifier.step({"blocker"})
    r.lease("a", 2)
    if stage != "added":
        r.verifier.step({"a"})
    r.verifier.discard("a")
    r.verifier.discard("a")
    r.verifier.discard("never seen")
    assert r.verifier.has_checks == (stage == "waiting")
    if stage == "reading":
        assert r.cells() == (0, 0)  # the cell stays with the READ
    r.fabric.settle()
    verified, failed = r.run()
    assert verified == ({"blocker"} if stage == "waiting" else set())
    assert failed == {}
    assert r.cells() == (1, 0)


@pytest.mark.parametrize("stage", ["added", "waiting", "reading"])
def test_an_id_that_was_discarded_is_not_confused_with_its_next_use(
    rig: Callable[..., Rig], stage: str
) -> None:
    r = rig(num_cells=2)
    r.fabric.plan = Plan(polls=None)
    if stage == "waiting":
        r.verifier.add_checks("blocker", "E", [0, 0], 1, 77)
        r.verifier.step({"blocker"})
        r.verifier.discard("blocker")
    r.lease("a", 2, nonce=77)
    if stage != "added":
        r.verifier.step({"a"})
    old = r.fabric.transfers
    r.verifier.discard("a")
    r.lease("a", 3, nonce=88)
    r.arm(3, 0)
    # The old READ ends well, but it is not the answer for the new one.
    for transfer in old:
        transfer.finish()
    assert r.verifier.step() == (set(), {})
    r.verifier.step({"a"})
    r.fabric.settle()
    assert r.run() == (set(), {"a": RELEASED.format(0)})


def test_adding_to_a_request_that_is_being_verified_is_refused(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.fabric.plan = Plan(polls=1)
    r.lease("a", 2)
    r.verifier.step({"a"})
    with pytest.raises(ValueError, match="'a' is being verified; discard it"):
        r.verifier.add_check("a", "E", 0, 3, 78)
    assert r.run() == ({"a"}, {})


# engines


@pytest.mark.parametrize("stage", ["added", "waiting", "reading"])
def test_releasing_an_engine_fails_its_requests_only(rig: Callable[..., Rig], stage: str) -> None:
    r = rig(num_ranks=2, num_cells=2)
    r.add_remote(0, "F")
    r.fabric.plan = Plan(polls=None)
    if stage == "waiting":
        r.verifier.add_checks("blocker", "F", [0, 0], 1, 77)
        r.arm(1, 77)
        r.verifier.step({"blocker"})
    r.lease("a", 2)
    r.verifier.add_check("f", "F", 0, 2, 77)
    if stage != "added":
        r.verifier.step({"a"})
    assert "E" in r.verifier.busy_engines()
    lists = r.reader.live_lists
    r.verifier.release_engine("E")
    r.verifier.release_engine("E")
    r.verifier.release_engine("never seen")
    assert not r.verifier.can_verify("E", [0])
    # The prepared lists stay as long as a READ uses them.
    assert r.reader.live_lists == lists - (0 if stage == "reading" else 2)
    for rank in range(2):
        r.add_remote(rank)  # the engine is met again: its old requests fail all the same
    if stage != "added":
        with pytest.raises(ValueError, match="'a'"):
            r.verifier.add_check("a", "E", 0, 3, 78)
    verified, failed = r.verifier.step({"a", "f"} if stage == "added" else {"f"})
    assert verified == set()
    assert failed.keys() == {"a"}
    assert "could not be read" in failed["a"]
    assert "released" in failed["a"]
    assert r.cells()[1] == (2 if stage == "reading" else 0)
    for _ in range(3):
        r.fabric.settle()
        verified |= r.verifier.step()[0]
    assert verified == {"f"} | ({"blocker"} if stage == "waiting" else set())
    assert r.verifier.busy_engines() == set()
    assert r.reader.live_lists == 1 + 1 + 2  # cells, F, and E as it was met again
    assert r.cells() == (2, 0)


def test_a_discarded_failure_is_not_reported(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.fabric.plan = Plan(polls=None)
    r.lease("a", 2)
    r.verifier.step({"a"})
    r.verifier.release_engine("E")
    assert r.verifier.has_checks
    r.verifier.discard("a")
    assert not r.verifier.has_checks
    assert r.run() == (set(), {})


def test_meeting_a_rank_again_releases_its_old_list(rig: Callable[..., Rig]) -> None:
    r = rig()
    assert r.reader.live_lists == 2
    r.lease("old", 2)
    r.add_remote(0)
    assert r.reader.live_lists == 2
    r.lease("new", 3)
    verified, failed = r.run("old", "new")
    assert verified == {"new"}
    assert failed.keys() == {"old"}


def test_a_prepared_list_that_could_not_be_released_is_tried_again(
    rig: Callable[..., Rig],
) -> None:
    r = rig()
    r.fabric.fail("release_dlist_handle", times=2)
    r.verifier.release_engine("E")
    assert r.reader.live_lists == 2
    r.verifier.step()
    assert r.reader.live_lists == 2
    r.verifier.step()
    assert r.reader.live_lists == 1


def test_busy_engines_are_those_that_must_not_be_torn_down(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.add_remote(0, "F")
    assert r.verifier.busy_engines() == set()
    r.fabric.plan = Plan(polls=None)
    r.lease("a", 2)
    assert r.verifier.busy_engines() == {"E"}
    r.verifier.step({"a"})
    assert r.verifier.busy_engines() == {"E"}
    r.verifier.discard("a")
    assert r.verifier.busy_engines() == {"E"}
    r.fabric.settle()
    r.verifier.step()
    assert r.verifier.busy_engines() == set()


def test_many_engines_come_and_go(rig: Callable[..., Rig]) -> None:
    r = rig(num_cells=4)
    for i in range(50):
        r.add_remote(0, f"engine{i}")
    for i in range(50):
        r.arm(1, 77)
        r.verifier.add_check(f"r{i}", f"engine{i}", 0, 1, 77)
        assert r.run(f"r{i}") == ({f"r{i}"}, {})
        r.verifier.release_engine(f"engine{i}")
        r.add_remote(0, f"engine{i}b")
    assert r.reader.live_lists == 2 + 50


# notifications


def test_the_completion_notification_rides_on_the_slot_read() -> None:
    asked: list[tuple[str, int, list[str]]] = []

    def notif(engine_id: str, rank: int, req_ids: list[str]) -> bytes:
        asked.append((engine_id, rank, sorted(req_ids)))
        return b"" if rank else b"read: " + ",".join(sorted(req_ids)).encode()

    r = Rig(num_ranks=2, completion_notif=notif)
    r.fabric.plan = Plan(polls=2)
    r.lease("a", 2)
    r.lease("b", 3)
    r.verifier.step({"a", "b"})
    assert r.fabric.agents["E0"].get_new_notifs() == {}
    assert r.run() == ({"a", "b"}, {})
    assert r.fabric.agents["E0"].get_new_notifs() == {"reader": [b"read: a,b"]}
    assert r.fabric.agents["E1"].get_new_notifs() == {}
    assert asked == [("E", 0, ["a", "b"]), ("E", 1, ["a", "b"])]
    r.end()


def test_a_notification_that_cannot_be_made_fails_the_request_only() -> None:
    def notif(engine_id: str, rank: int, req_ids: list[str]) -> bytes:
        if "bad" in req_ids:
            raise RuntimeError("no such lease")
        return b"done"

    r = Rig(completion_notif=notif)
    r.lease("a", 2)
    r.lease("bad", 3)
    verified, failed = r.run("a", "bad")
    assert verified == {"a"}
    assert "no such lease" in failed["bad"]
    r.end()


# set-up and shutdown


def test_the_landing_cells_have_pages_of_their_own() -> None:
    verifier = LeaseVerifier(object(), 5)  # type: ignore[arg-type]
    assert verifier.base_addr % mmap.PAGESIZE == 0
    assert verifier.words.shape == (5,)
    verifier.words[3] = 9
    assert verifier.tensor.tolist() == [0, 0, 0, 9, 0]
    assert verifier.local_handle is None
    for num_cells in (0, -1, 2**31):
        with pytest.raises(ValueError, match="num_cells"):
            LeaseVerifier(object(), num_cells)  # type: ignore[arg-type]


def test_a_constructor_that_fails_leaves_nothing_registered() -> None:
    fabric = FakeFabric()
    agent = fabric.agent("reader")
    for call in ("register_memory", "prep_xfer_dlist"):
        fabric.fail(call)
        with pytest.raises(nixlBackendError):
            LeaseVerifier(agent, 4)
    fabric.assert_clean()


def test_a_caller_may_register_the_cells_itself() -> None:
    fabric = FakeFabric()
    agent = fabric.agent("reader")
    verifier = LeaseVerifier(agent, 4, register=False)
    assert agent.registrations == 0
    regs = agent.register_memory(verifier.tensor)
    verifier.local_handle = agent.prep_xfer_dlist(
        "NIXL_INIT_AGENT", lease_slot_descs(verifier.base_addr, 4), "DRAM"
    )
    assert verifier.shutdown() == 0
    assert agent.live_lists == 0
    assert agent.registrations == 1
    agent.deregister_memory(regs)
    fabric.assert_clean()


def test_it_works_with_the_projects_own_agent() -> None:
    fabric = FakeFabric()
    agent, owner = Agent(fabric.agent("reader")), Agent(fabric.agent("E"))
    slots = ProducerLeaseSlots(4)
    owner.register_memory([(slots.base_addr, slots.words.nbytes, 0)])
    verifier = LeaseVerifier(agent, 4)
    peer = agent.add_remote_agent(owner.get_agent_metadata())
    descs = lease_slot_descs(slots.base_addr, 4)
    verifier.add_remote("E", 0, agent.prep_xfer_dlist(peer, descs))
    slots.update((), {"a": (1, 77)})
    fabric.plan = Plan(polls=1)
    verifier.add_check("a", "E", 0, 1, 77)
    assert verifier.step({"a"}) == (set(), {})
    assert verifier.step() == ({"a"}, {})
    assert verifier.shutdown() == 0
    assert agent.close() == 0
    owner.close()
    fabric.assert_clean()


def test_shutdown_leaves_what_nixl_may_still_write_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    r = Rig(num_ranks=2)
    r.fabric.plan = Plan(polls=None)
    r.lease("a", 2)
    r.lease("b", 3)
    r.verifier.step({"a", "b"})
    assert r.verifier.shutdown() == 4
    assert "4 landing cells" in caplog.text
    assert r.reader.registrations == 1
    assert not r.fabric.violations
    assert r.verifier.shutdown() == 4
    assert r.verifier in kvnixl.leases._unfinished
    r.fabric.settle()
    assert r.verifier.shutdown() == 0
    assert r.verifier not in kvnixl.leases._unfinished
    r.end()


def test_after_shutdown_nothing_is_verified() -> None:
    r = Rig()
    r.lease("a", 2)
    assert r.verifier.shutdown() == 0
    assert r.verifier.shutdown() == 0
    with pytest.raises(ClosedError):
        r.add_remote(0)
    r.verifier.add_check("b", "E", 0, 2, 77)
    verified, failed = r.run("a", "b")
    assert verified == set()
    assert failed.keys() == {"a", "b"}
    for prepared in list(r.reader._sides):
        r.reader._sides.discard(prepared)
    r.end()


def test_shutdown_tries_again_what_nixl_refused() -> None:
    r = Rig()
    r.fabric.fail("release_dlist_handle", times=2)
    r.fabric.fail("deregister_memory", times=1)
    left = [r.verifier.shutdown() for _ in range(4)]
    assert left[0] > 0, "what is left was not told"
    assert left[-1] == 0
    r.end()


def test_the_clock_is_not_asked_when_there_is_nothing_to_do() -> None:
    def clock() -> float:
        raise AssertionError("an idle step asked for the time")

    verifier = LeaseVerifier(FakeFabric().agent("reader"), 4, clock=clock)
    verifier.add_check("a", "E", 0, 1, 77)
    assert verifier.step() == (set(), {})
    assert verifier.step(()) == (set(), {})


def test_idle_steps_return_values_of_the_callers_own() -> None:
    verifier = LeaseVerifier(FakeFabric().agent("reader"), 4)
    verified, failed = verifier.step()
    verified.add("x")
    failed["y"] = "z"
    assert verifier.step() == (set(), {})


def test_state_words_of_other_agents() -> None:
    """PEND is in flight as PROC is; a word that nobody knows is a failure."""

    def transfer_plan(_t: FakeTransfer) -> Plan:
        return Plan(polls=1)

    class Odd:
        def __init__(self, agent: Any) -> None:
            self.agent = agent
            self.states = ["PEND", "PEND", "WEIRD"]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.agent, name)

        def check_xfer_state(self, handle: Any) -> str:
            handle.transfer.finish()
            return self.states.pop(0)

    r = Rig(wrap=Odd)
    r.fabric.rule = transfer_plan
    r.lease("a", 2)
    assert r.verifier.step({"a"}) == (set(), {})
    assert r.verifier.step() == (set(), {})
    assert r.verifier.step() == (set(), {})
    verified, failed = r.verifier.step()
    assert verified == set()
    assert "WEIRD" in failed["a"]
    r.end()
