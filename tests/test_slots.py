"""The compiled half of `kvnixl.leases`, without any NIXL: growth, bounds, order, cells.

Also run under AddressSanitizer (``make test-asan``), hence the numbers beyond every first capacity
and the runs of the whole world.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvnixl._slots import CheckTable, SlotPool, SlotRead, SlotWriter
from tests import lease_world

MANY = 2**31 - 1


def table(num_cells: int = 8, *, release_is_final: bool = False) -> tuple[CheckTable, np.ndarray]:
    words = np.zeros(num_cells, np.int64)
    return CheckTable(words, release_is_final), words


class Stub:
    """NIXL's two calls that a table makes."""

    def __init__(
        self,
        state: Callable[[Any], str] = lambda _handle: "DONE",
        release: Callable[[Any], None] = lambda _handle: None,
    ) -> None:
        self.check_xfer_state = state
        self.release_xfer_handle = release


def step(
    checks: CheckTable, *reads_done: str, agent: Stub | None = None, now: float = 0.0
) -> tuple[Sequence[SlotRead], set[str], dict[str, str]]:
    verified: set[str] = set()
    failed: dict[str, str] = {}
    reads = checks.step(agent or Stub(), reads_done, now, 10.0, verified, failed)
    return reads, verified, failed


def admit(checks: CheckTable, *reads_done: str) -> Sequence[SlotRead]:
    """Start the requests; the READs that result, outcomes are not expected."""
    reads, verified, failed = step(checks, *reads_done, agent=Stub(lambda _handle: "PROC"))
    assert not verified
    assert not failed
    return reads


def finish(checks: CheckTable) -> tuple[set[str], dict[str, str]]:
    """All READs end well."""
    reads, verified, failed = step(checks)
    assert not reads
    assert checks.take_messages() == []
    return verified, failed


def test_words_must_be_writable_int64() -> None:
    for make in (SlotWriter, lambda words: CheckTable(words, False)):
        with pytest.raises(ValueError, match="mismatch"):
            make(np.zeros(4, np.int32))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dimensions"):
            make(np.zeros((2, 2), np.int64))
        with pytest.raises(ValueError, match=r"contiguous|strides"):
            make(np.zeros(8, np.int64)[::2])
        readonly = np.zeros(4, np.int64)
        readonly.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            make(readonly)
        with pytest.raises(TypeError):
            make(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_cells"):
        CheckTable(np.zeros(0, np.int64), False)


def test_a_pool_needs_slots_and_a_nonce() -> None:
    with pytest.raises(ValueError, match="num_slots"):
        SlotPool(0, 1)
    for nonce in (0, -1):
        with pytest.raises(ValueError, match="first_nonce"):
            SlotPool(1, nonce)


def test_a_pool_reports_when_it_is_full() -> None:
    class Pool(SlotPool):
        full = 0
        said = False

        def when_full(self) -> bool:
            self.full += 1
            return self.said

    pool = Pool(3, 5)
    for name in "abc":
        pool.acquire(name)
    assert pool.acquire("a") == (0, 5)
    assert pool.full == 0
    assert [pool.acquire(name) for name in "de"] == [None, None]
    assert pool.full == 2  # it was not said yet
    pool.said = True
    assert [pool.acquire(name) for name in "fgh"] == [None, None, None]
    assert pool.full == 3
    pool.release("a", clear=True)
    pool.acquire("d")
    assert pool.acquire("e") is None
    assert pool.full == 3  # less than half of the slots were free meanwhile
    for name in "bc":
        pool.release(name, clear=True)
    for name in "bc":
        pool.acquire(name)
    assert pool.acquire("e") is None
    assert pool.full == 4


def test_cells_are_poisoned_with_the_complement_of_the_nonce() -> None:
    checks, words = table(4)
    checks.add_remote("E", 0, "list", MANY)
    for i, nonce in enumerate([1, 77, 2**63 - 1]):
        checks.add_checks(f"r{i}", "E", [0], i, nonce)
    (read,) = admit(checks, "r0", "r1", "r2")
    assert words[read.cells].tolist() == [~1, ~77, ~(2**63 - 1)]
    checks.track(read, 1)
    verified, failed = finish(checks)
    assert verified == set()
    assert failed.keys() == {"r0", "r1", "r2"}


def test_reads_carry_their_indices_as_int32_arrays() -> None:
    checks, _ = table(4)
    checks.add_remote("E", 3, "list", MANY)
    checks.add_checks("a", "E", [3], 5, 77)
    checks.add_checks("b", "E", [3], 2, 78)
    (read,) = admit(checks, "a", "b")
    assert (read.engine_id, read.remote_rank, read.remote_handle) == ("E", 3, "list")
    assert len(read) == 2
    for indices in (read.cells, read.slots):
        assert indices.dtype == np.int32
        assert indices.flags.c_contiguous
    assert read.slots.tolist() == [2, 5]
    assert read.cells.tolist() == [0, 1]
    assert sorted(checks.requests_of(read)) == ["a", "b"]


@pytest.mark.parametrize("slot", [0, 3, 4, 2**20])
def test_indices_stay_what_they_were(slot: int) -> None:
    """NIXL copies them, but an agent may also keep the arrays themselves."""
    checks, _ = table(4)
    checks.add_remote("E", 0, "list", MANY)
    kept = []
    for i in range(3):
        checks.add_checks(f"r{i}", "E", [0], slot, 77)
        (read,) = admit(checks, f"r{i}")
        checks.track(read, i)
        kept.append((read.cells, read.slots))
        assert not read.cells.flags.writeable  # shared with later READs
    for i, (cells, slots) in enumerate(kept):
        assert cells.dtype == slots.dtype == np.int32
        assert cells.tolist() == [i]
        assert slots.tolist() == [slot]


def test_reads_are_made_in_the_order_of_the_checks() -> None:
    checks, _ = table(8)
    for rank in range(4):
        checks.add_remote("E", rank, rank, MANY)
    checks.add_checks("a", "E", [2, 0], 1, 77)
    checks.add_checks("b", "E", [3, 2], 1, 77)
    assert [read.remote_rank for read in admit(checks, "a", "b")] == [2, 0, 3]


def test_every_slot_number_up_to_the_limit() -> None:
    checks, words = table(2)
    checks.add_remote("E", 0, "list", MANY)
    checks.add_checks("a", "E", [0], MANY - 1, 77)
    (read,) = admit(checks, "a")
    assert read.slots.tolist() == [MANY - 1]
    checks.track(read, 1)
    words[read.cells] = 77
    assert finish(checks) == ({"a"}, {})


def test_thousands_of_requests_and_hundreds_of_remotes() -> None:
    checks, words = table(5000)
    num_engines, num_requests = 200, 3000
    for i in range(num_engines):
        checks.add_remote(f"E{i}", 0, i, MANY)
        checks.add_remote(f"E{i}", 1, -i, MANY)
    rng = random.Random(1)
    expected = {}
    for i in range(num_requests):
        slot = rng.randrange(10000)
        expected[f"r{i}"] = slot
        checks.add_checks(
            f"r{i}", f"E{rng.randrange(num_engines)}", [rng.randrange(2)], slot, 7 + i
        )
    reads = admit(checks, *expected)
    cells: set[int] = set()
    for read in reads:
        assert (np.diff(read.slots) >= 0).all()
        assert (np.diff(read.cells) == 1).all()
        cells |= set(read.cells.tolist())
        words[read.cells] = ~words[read.cells]  # as if every nonce were there
        checks.track(read, read.remote_handle)
    assert len(cells) == num_requests
    assert checks.num_free_cells == 5000 - num_requests
    assert finish(checks) == (set(expected), {})
    assert checks.num_free_cells == 5000
    assert not checks.active
    assert not checks.has_checks


def test_cells_come_back_in_order_after_being_mixed_up() -> None:
    checks, _ = table(6)
    for rank in range(3):
        checks.add_remote("E", rank, rank, MANY)
    checks.add_checks("a", "E", range(3), 1, 77)
    checks.add_checks("b", "E", range(3), 2, 78)
    for read in admit(checks, "a", "b"):
        checks.track(read, read.remote_rank)
    # They end in another order than they began.
    for last in (1, 2, 0):
        step(checks, agent=Stub(lambda h, last=last: "DONE" if h == last else "PROC"))
    checks.add_checks("c", "E", [0, 0, 0], 1, 77)
    (read,) = admit(checks, "c")
    assert read.cells.tolist() == [0, 1, 2]


def test_fragmented_cells_are_used_in_ascending_order() -> None:
    checks, _ = table(8)
    for rank in range(8):
        checks.add_remote("E", rank, rank, MANY)
    checks.add_checks("a", "E", range(8), 1, 77)
    for read in admit(checks, "a"):
        checks.track(read, read.remote_rank)
    for gone in (5, 0, 3):
        step(checks, agent=Stub(lambda h, gone=gone: "DONE" if h == gone else "PROC"))
    checks.add_checks("b", "E", [0, 0, 0], 1, 77)
    (read,) = admit(checks, "b")
    assert read.cells.tolist() == [0, 3, 5]


def test_a_read_without_a_handle_can_be_split_and_dropped() -> None:
    checks, words = table(4)
    checks.add_remote("E", 0, "list", MANY)
    for name in "abc":
        checks.add_checks(name, "E", [0], ord(name), 77)
    (read,) = admit(checks, *"abc")
    first, rest = checks.split(read)
    assert len(read) == 0
    parts = [first, *checks.split(rest)]
    assert [part.slots.tolist() for part in parts] == [[ord(name)] for name in "abc"]
    failed: dict[str, str] = {}
    checks.drop(parts[1], "refused", failed)
    assert failed.keys() == {"b"}
    for part in (parts[0], parts[2]):
        words[part.cells] = 77
        checks.track(part, 1)
    assert finish(checks) == ({"a", "c"}, {})
    assert checks.num_free_cells == 4
    checks.close_engine("E")
    assert checks.take_closed_handles() == ["list"]


def test_reads_are_used_once_and_by_their_table() -> None:
    with pytest.raises(TypeError, match="CheckTable"):
        SlotRead()
    checks, _ = table(4)
    other, _ = table(4)
    checks.add_remote("E", 0, "list", MANY)
    for name in "ab":
        checks.add_checks(name, "E", [0], 1, 77)
    (read,) = admit(checks, "a")
    with pytest.raises(ValueError, match="another table"):
        other.drop(read, "", {})
    with pytest.raises(ValueError, match="not tracked"):
        checks.posted(read, "DONE", None, Stub(), 0.0, set(), {})
    checks.drop(read, "", {})
    for use in (checks.split, lambda r: checks.track(r, 1), lambda r: checks.drop(r, "", {})):
        with pytest.raises(ValueError, match="dropped"):
            use(read)
    assert checks.num_free_cells == 4


def test_leases_that_nobody_clears_do_not_pile_up() -> None:
    writer = SlotWriter(np.zeros(2, np.int64))
    for i in range(100):
        writer.update((), {f"r{i}": (i % 2, 1 + i)})
    assert len(writer) == 2
    assert writer.nonce("r98") == 99
    assert writer.nonce("r96") is None


def test_a_prepared_list_is_given_back_after_its_last_read() -> None:
    checks, _ = table(4)
    checks.add_remote("E", 0, "list", MANY)
    checks.add_checks("a", "E", [0], 1, 77)
    (read,) = admit(checks, "a")
    checks.track(read, 1)
    checks.close_engine("E")
    assert checks.take_closed_handles() == []
    assert checks.quarantined_cells == 1
    finish(checks)
    assert checks.take_closed_handles() == ["list"]
    assert checks.take_closed_handles() == []
    assert checks.quarantined_cells == 0


def test_a_final_release_needs_no_end_of_the_read() -> None:
    checks, _ = table(4, release_is_final=True)
    checks.add_remote("E", 0, "list", MANY)
    checks.add_checks("a", "E", [0], 1, 77)
    (read,) = admit(checks, "a")
    checks.track(read, 1)
    released: list[Any] = []
    _, _, failed = step(checks, agent=Stub(lambda _handle: "PROC", released.append), now=10.0)
    assert failed.keys() == {"a"}
    assert released == [1]
    assert checks.num_free_cells == 4


def test_an_interrupted_poll_neither_loses_nor_repeats_anything() -> None:
    checks, words = table(4)
    for rank in range(3):
        checks.add_remote("E", rank, rank, MANY)
        checks.add_checks(f"r{rank}", "E", [rank], 1, 77)
    for read in admit(checks, "r0", "r1", "r2"):
        words[read.cells] = 77
        checks.track(read, read.remote_rank)

    def interrupt(handle: int) -> None:
        if handle == 1:
            raise KeyboardInterrupt

    verified: set[str] = set()
    with pytest.raises(KeyboardInterrupt):
        checks.step(Stub(release=interrupt), (), 0.0, 10.0, verified, {})
    more, failed = finish(checks)
    assert verified | more == {"r0", "r1", "r2"}
    assert not verified & more
    assert failed == {}
    assert checks.num_free_cells == 4


@pytest.mark.parametrize("seed", range(10))
def test_the_world(seed: int) -> None:
    rng = random.Random(1000 + seed)
    lease_world.run(lambda _label, n: rng.randrange(n), 300)
