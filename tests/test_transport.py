"""`NixlTransport` on the fake agent: faults, cancelling, tearing down, argument checks."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import logging
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvnixl.agent import Agent
from kvnixl.errors import AgentError, ClosedError, NixlUnavailableError, TransportError
from kvnixl.fake import FakeAgent, FakeFabric, Plan, nixlBackendError, nixlNotFoundError
from kvnixl.transport import DataTransport, NixlTransport, PollResult

BLOCKS, BLOCK_LEN = 16, 64
SLOW = Plan(polls=None)  # ends only when the test says so


class Side:
    """A region of blocks and a transport over it, on a fake agent."""

    def __init__(self, fabric: FakeFabric, name: str, fill: int, blocks: int = BLOCKS) -> None:
        self.blocks = np.full((blocks, BLOCK_LEN), fill, np.uint8)
        self.raw = fabric.agent(name)
        self.transport = NixlTransport(name, memoryview(self.blocks), agent=self.raw)

    def add(self, peer_id: str, other: Side) -> None:
        t = other.transport
        self.transport.add_remote_peer(
            peer_id, t.get_agent_metadata(), t.base_addr, t.num_blocks, t.block_len
        )


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric(seed=1)


@pytest.fixture
def sides(fabric: FakeFabric) -> Iterator[tuple[Side, Side]]:
    """D knows P as peer "p"; at the end nothing may be left."""
    producer, reader = Side(fabric, "P", 7), Side(fabric, "D", 0)
    reader.add("p", producer)
    yield reader, producer
    fabric.clear()
    fabric.settle()
    reader.transport.close()
    producer.transport.close()
    fabric.assert_clean()


def drain(transport: NixlTransport, peer_id: str | None = None) -> tuple[list[int], list[int]]:
    done, failed = transport.poll(peer_id)
    return list(done), list(failed)


def desc_count(side: Side, local: list[int], remote: list[int]) -> int:
    """Descriptors that NIXL is left with after merging."""
    transport = side.transport
    transport.read_blocks("p", local, remote)
    (xfer,) = transport.agent._transfers.values()
    telemetry = xfer.telemetry()
    assert telemetry is not None
    transport.poll()
    return telemetry.desc_count


# --- the plain case ---


def test_write_and_read_move_the_named_blocks(sides: tuple[Side, Side]) -> None:
    reader, producer = sides
    for i in range(BLOCKS):
        producer.blocks[i] = 100 + i
        reader.blocks[i] = i
    read = reader.transport.read_blocks("p", [0, 1, 2], [5, 4, 9])
    write = reader.transport.write_blocks("p", [8, 3], [15, 0])
    assert drain(reader.transport) == ([read, write], [])
    assert [int(reader.blocks[i, 0]) for i in (0, 1, 2)] == [105, 104, 109]
    assert (reader.blocks == reader.blocks[:, :1]).all()
    assert [int(producer.blocks[i, 0]) for i in (15, 0)] == [8, 3]
    assert [int(producer.blocks[i, 0]) for i in range(1, 15)] == list(range(101, 115))


def test_ids_are_unique_and_a_transfer_is_reported_once(sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    ids = [reader.transport.read_blocks("p", [i], [i]) for i in range(10)]
    assert len(set(ids)) == 10
    assert sorted(drain(reader.transport)[0]) == ids
    assert drain(reader.transport) == ([], [])
    assert reader.transport.read_blocks("p", [0], [0]) not in ids


def test_starting_never_waits(fabric: FakeFabric, sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    fabric.script(SLOW)
    transfer_id = reader.transport.write_blocks("p", [0], [0])
    assert transfer_id is not None
    assert drain(reader.transport) == ([], [])
    fabric.settle()
    assert drain(reader.transport) == ([transfer_id], [])


def test_a_transfer_of_no_blocks_is_done(sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    first, second = (reader.transport.read_blocks("p", [], []) for _ in range(2))
    assert drain(reader.transport, "someone else") == ([], [])
    assert reader.transport.cancel([second], "wait") == []
    assert drain(reader.transport) == ([first], [])


def test_neighbours_are_merged_whatever_their_order(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    down = list(range(15, -1, -1))
    assert desc_count(reader, down, down) == 1
    assert desc_count(reader, [0, 8, 1, 9, 2, 10], [3, 11, 4, 12, 5, 13]) == 2
    assert desc_count(reader, [0, 1, 2], [4, 3, 2]) == 3


def test_properties(sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    t = reader.transport
    assert isinstance(t, DataTransport)
    assert t.available
    assert (t.num_blocks, t.block_len) == (BLOCKS, BLOCK_LEN)
    assert t.base_addr == reader.blocks.ctypes.data
    assert t.config_fingerprint == ""


def test_the_fingerprint_is_the_digest_of_canonical_json(fabric: FakeFabric) -> None:
    blocks = np.zeros((2, 8), np.uint8)
    fields = {"model": "m", "dtype": "bf16", "tp": 2}
    t = NixlTransport("x", memoryview(blocks), fields, agent=fabric.agent("x"))
    expected = hashlib.sha256(b'{"dtype":"bf16","model":"m","tp":2}').hexdigest()[:16]
    assert t.config_fingerprint == expected
    t.close()


# --- polling ---


def test_an_idle_poll_returns_one_shared_result_and_allocates_nothing(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    t = reader.transport
    empty = t.poll()
    assert empty == PollResult((), ())
    fabric.script(SLOW, times=None)
    for i in range(8):
        t.read_blocks("p", [i], [i])
    assert t.poll() is empty
    assert t.poll("p") is empty
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        for _ in range(100):
            t.poll()
        grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        tracemalloc.stop()
    ours = [s for s in grown if s.traceback[0].filename.endswith(("transport.py", "agent.py"))]
    assert sum(s.size_diff for s in ours) < 1000


def test_a_poll_with_nothing_running_allocates_nothing_at_all(sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    poll = reader.transport.poll
    reader.transport.read_blocks("p", [0], [0])
    poll()
    tracemalloc.start()
    try:
        used = []
        for _ in range(5):  # the first may fill caches of the interpreter, threads may do something
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            poll()
            poll("p")
            _, peak = tracemalloc.get_traced_memory()
            used.append(peak - before)
        assert min(used) <= 32  # the number that the measurement itself made
    finally:
        tracemalloc.stop()


def test_polling_one_peer_leaves_the_others_results(fabric: FakeFabric) -> None:
    reader, p, q = Side(fabric, "D", 0), Side(fabric, "P", 1), Side(fabric, "Q", 2)
    reader.add("p", p)
    reader.add("q", q)
    of_p = reader.transport.read_blocks("p", [0], [0])
    of_q = reader.transport.read_blocks("q", [1], [1])
    assert drain(reader.transport, "q") == ([of_q], [])
    assert drain(reader.transport, "q") == ([], [])
    assert drain(reader.transport) == ([of_p], [])
    for side in (reader, p, q):
        side.transport.close()
    fabric.assert_clean()


@pytest.mark.parametrize("end", ["ERR", nixlBackendError])
def test_a_transfer_that_ends_badly_fails_once(
    fabric: FakeFabric, sides: tuple[Side, Side], end: Any
) -> None:
    reader, _ = sides
    fabric.script(Plan(polls=2, end=end, copied=0.5))
    bad = reader.transport.read_blocks("p", [0], [0])
    good = reader.transport.read_blocks("p", [1], [1])
    seen: tuple[list[int], list[int]] = ([], [])
    for _ in range(4):
        done, failed = drain(reader.transport)
        seen[0].extend(done)
        seen[1].extend(failed)
    assert seen == ([good], [bad])


def test_a_state_check_that_raises_is_a_failure_not_a_retry(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    fabric.script(SLOW)
    transfer_id = reader.transport.read_blocks("p", [0], [0])
    fabric.fail("check_xfer_state", RuntimeError("no such handle"), times=None)
    assert drain(reader.transport) == ([], [transfer_id])
    assert drain(reader.transport) == ([], [])
    fabric.settle()


@pytest.mark.parametrize("error", [RuntimeError("busy"), nixlBackendError, nixlNotFoundError])
def test_a_check_that_raises_once_fails_the_transfer_when_its_bytes_have_stopped(
    fabric: FakeFabric, sides: tuple[Side, Side], error: Any
) -> None:
    reader, _ = sides
    fabric.script(SLOW)
    transfer_id = reader.transport.read_blocks("p", [0], [0])
    fabric.fail("check_xfer_state", error)
    assert drain(reader.transport) == ([], [])
    assert reader.raw.live_transfers == 1
    fabric.settle()
    assert drain(reader.transport) == ([], [transfer_id])
    reader.transport.poll()
    assert reader.raw.live_transfers == 0


def test_a_transfer_that_nixl_forgot_does_not_end_until_it_is_given_up(
    fabric: FakeFabric, sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    reader, _ = sides
    fabric.script(SLOW)
    forgotten = reader.transport.read_blocks("p", [0], [0])
    fabric.fail("check_xfer_state", nixlNotFoundError, times=None)
    assert [drain(reader.transport) for _ in range(20)] == [([], [])] * 20
    assert [f"transfer {forgotten} with peer 'p'" in r.message for r in caplog.records] == [True]
    assert reader.transport.cancel([forgotten]) == []
    assert reader.transport.agent.quarantined == 1  # its bytes may still land
    fabric.clear()
    fabric.settle()
    assert drain(reader.transport) == ([], [])
    assert reader.transport.agent.quarantined == 0


class Wordless:
    """An agent of the caller's own whose posting call returns nothing."""

    def __init__(self, raw: FakeAgent) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def transfer(self, handle: Any) -> None:
        self.raw.transfer(handle)


@contextlib.contextmanager
def reader_over(raw: Any, fabric: FakeFabric) -> Iterator[tuple[NixlTransport, np.ndarray]]:
    """A transport over a caller's own agent, the blocks it reads into, and a producer of sevens."""
    producer = Side(fabric, "P", 7)
    blocks = np.zeros((BLOCKS, BLOCK_LEN), np.uint8)
    reader = NixlTransport("D", memoryview(blocks), agent=raw)
    t = producer.transport
    reader.add_remote_peer("p", t.get_agent_metadata(), t.base_addr, t.num_blocks, t.block_len)
    yield reader, blocks
    reader.close()
    producer.transport.close()
    fabric.assert_clean()


@pytest.mark.parametrize("end", ["DONE", "ERR"])
def test_an_agent_that_returns_nothing_from_posting_is_asked_how_it_went(
    fabric: FakeFabric, end: str
) -> None:
    with reader_over(Wordless(fabric.agent("D")), fabric) as (reader, blocks):
        fabric.script(Plan(polls=2, end=end))
        transfer_id = reader.read_blocks("p", [0], [0])
        assert transfer_id is not None
        ends = [drain(reader) for _ in range(4)]
        expected = ([transfer_id], []) if end == "DONE" else ([], [transfer_id])
        assert [some for some in ends if some != ([], [])] == [expected]
        if end == "DONE":
            assert (blocks[0] == 7).all()


class HalfPosting:
    """An agent whose posting call raises although the transfer runs."""

    def __init__(self, raw: FakeAgent) -> None:
        self.raw = raw
        self.release_is_final = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def transfer(self, handle: Any) -> str:
        self.raw.transfer(handle)
        raise nixlBackendError


def test_a_post_that_fails_half_way_has_an_id_that_ends_when_its_bytes_have_stopped(
    fabric: FakeFabric,
) -> None:
    with reader_over(HalfPosting(fabric.agent("D")), fabric) as (reader, _):
        fabric.script(SLOW)
        transfer_id = reader.read_blocks("p", [0], [0])
        assert transfer_id is not None
        assert drain(reader) == ([], [])
        fabric.settle()
        assert drain(reader) == ([], [transfer_id])


def test_a_handle_whose_release_fails_is_retried(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    fabric.script(Plan(refuse=3))
    transfer_id = reader.transport.read_blocks("p", [0], [0])
    assert drain(reader.transport) == ([transfer_id], [])
    assert reader.raw.live_transfers == 1
    for _ in range(3):
        assert drain(reader.transport) == ([], [])
    assert reader.raw.live_transfers == 0
    assert reader.transport.agent.quarantined == 0


# --- what cannot be started ---


@pytest.mark.parametrize(
    "plan", [Plan(make=nixlBackendError), Plan(post=nixlBackendError), Plan(post="ERR")]
)
def test_a_transfer_that_nixl_refuses_is_none_and_one_warning(
    fabric: FakeFabric,
    sides: tuple[Side, Side],
    plan: Plan,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader, _ = sides
    fabric.script(plan)
    with caplog.at_level(logging.WARNING):
        assert reader.transport.write_blocks("p", [0], [0]) is None
    assert len(caplog.records) == 1
    assert "'p'" in caplog.text
    assert reader.raw.live_transfers == 0
    assert drain(reader.transport) == ([], [])
    assert reader.transport.write_blocks("p", [0], [0]) is not None


def test_an_unknown_peer_is_none_and_one_warning(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    reader, _ = sides
    with caplog.at_level(logging.WARNING):
        assert reader.transport.read_blocks("nobody", [0], [0]) is None
    assert len(caplog.records) == 1
    assert "'nobody'" in caplog.text
    assert "'p'" in caplog.text


@pytest.mark.parametrize(
    ("local", "remote", "names"),
    [
        ([0, 1], [0], "2 destination and 1 source|1 destination and 2 source"),
        ([BLOCKS], [0], f": {BLOCKS} at position 0"),
        ([0, 0], [1, BLOCKS], f": {BLOCKS} at position 1"),
        ([-1], [0], ": -1 at position 0"),
        ([0], [-2], ": -2 at position 0"),
        ([2**32], [0], f": {2**32} at position 0"),
        ([0.5], [0], ": 0.5 at position 0"),
        ([0], [True], ": True at position 0"),
    ],
)
@pytest.mark.parametrize("call", ["read_blocks", "write_blocks"])
def test_bad_index_lists_are_refused_and_nothing_is_submitted(
    fabric: FakeFabric, sides: tuple[Side, Side], call: str, local: Any, remote: Any, names: str
) -> None:
    reader, _ = sides
    before = reader.raw.calls["make_prepped_xfer"]
    with pytest.raises(ValueError, match=names):
        getattr(reader.transport, call)("p", local, remote)
    assert reader.raw.calls["make_prepped_xfer"] == before


def test_a_smaller_remote_region_is_checked_against_its_own_size(fabric: FakeFabric) -> None:
    reader, small = Side(fabric, "D", 0), Side(fabric, "P", 1, blocks=4)
    reader.add("p", small)
    with pytest.raises(ValueError, match=r": 4 at position 0 is outside 0 \.\. 3"):
        reader.transport.read_blocks("p", [4], [4])
    assert reader.transport.read_blocks("p", [4], [3]) is not None
    reader.transport.poll()
    reader.transport.close()
    small.transport.close()
    fabric.assert_clean()


# --- cancelling ---


def test_cancel_immediate_forgets_the_ids(fabric: FakeFabric, sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    fabric.script(SLOW, times=None)
    ids = [reader.transport.read_blocks("p", [i], [i]) for i in range(3)]
    assert reader.transport.cancel([ids[0], ids[2], 12345]) == []
    # The bytes of a cancelled transfer still land, so its handle is kept until they have.
    assert reader.raw.live_transfers == 3
    fabric.settle()
    assert drain(reader.transport) == ([ids[1]], [])
    assert reader.raw.live_transfers == 0


def test_cancel_wait_returns_what_still_runs_and_it_ends_in_a_later_poll(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    finished = reader.transport.read_blocks("p", [0], [0])
    fabric.script(SLOW)
    running = reader.transport.read_blocks("p", [1], [1])
    assert reader.transport.cancel([finished, running, 999], "wait") == [running]
    assert drain(reader.transport) == ([], [])
    assert reader.transport.cancel([running], "wait") == [running]
    fabric.settle()
    assert drain(reader.transport) == ([running], [])


def test_cancel_with_an_agent_that_answers_for_its_own_release(fabric: FakeFabric) -> None:
    """A caller's agent may really stop a transfer; then a cancelled one is over at once."""
    producer, reader = Side(fabric, "P", 7), None
    raw = fabric.agent("D")
    raw.release_is_final = True
    blocks = np.zeros((BLOCKS, BLOCK_LEN), np.uint8)
    reader = NixlTransport("D", memoryview(blocks), agent=raw)
    t = producer.transport
    reader.add_remote_peer("p", t.get_agent_metadata(), t.base_addr, t.num_blocks, t.block_len)
    fabric.script(Plan(polls=None, release="cancel"))
    first = reader.read_blocks("p", [0], [0])
    assert reader.cancel([first], "wait") == []
    fabric.script(Plan(polls=None, release="refuse"))
    second = reader.read_blocks("p", [0], [0])
    assert reader.cancel([second], "wait") == [second]
    fabric.settle()
    assert drain(reader) == ([second], [])
    reader.close()
    producer.transport.close()
    fabric.assert_clean()


def test_a_cancelled_transfer_surfaces_once_its_release_succeeds(fabric: FakeFabric) -> None:
    """It may never end by itself: the agent can only be asked again to release it."""
    producer = Side(fabric, "P", 7)
    raw = fabric.agent("D")
    raw.release_is_final = True
    blocks = np.zeros((BLOCKS, BLOCK_LEN), np.uint8)
    reader = NixlTransport("D", memoryview(blocks), agent=raw)
    t = producer.transport
    reader.add_remote_peer("p", t.get_agent_metadata(), t.base_addr, t.num_blocks, t.block_len)
    fabric.script(Plan(polls=None, hold=True, refuse=2, release="cancel"))
    transfer_id = reader.read_blocks("p", [0], [0])
    assert reader.cancel([transfer_id], "wait") == [transfer_id]
    assert [drain(reader) for _ in range(3)] == [([], []), ([], [transfer_id]), ([], [])]
    reader.close()
    producer.transport.close()
    fabric.assert_clean()


def test_an_id_that_is_cancelled_twice_in_one_call_is_returned_once(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    fabric.script(SLOW)
    running = reader.transport.read_blocks("p", [1], [1])
    assert reader.transport.cancel([running, 7, running], "wait") == [running]
    fabric.settle()
    assert drain(reader.transport) == ([running], [])


def test_an_unknown_cancel_mode_is_refused(sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    with pytest.raises(ValueError, match="'later'"):
        reader.transport.cancel([], "later")  # type: ignore[arg-type]


# --- peers come and go ---


def test_a_different_block_length_is_refused_with_both_values(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, producer = sides
    t = producer.transport
    with pytest.raises(ValueError, match=r"128.*64"):
        reader.transport.add_remote_peer("x", t.get_agent_metadata(), t.base_addr, 4, 128)
    assert reader.transport.read_blocks("p", [0], [0]) is not None
    reader.transport.poll()


def test_metadata_that_nixl_refuses_leaves_no_peer(sides: tuple[Side, Side]) -> None:
    reader, producer = sides
    t = producer.transport
    with pytest.raises(AgentError, match="to peer 'x'"):
        reader.transport.add_remote_peer("x", b"garbage", t.base_addr, 4, BLOCK_LEN)
    with pytest.raises(AgentError, match="names have to differ"):
        reader.transport.add_remote_peer(
            "x", reader.transport.get_agent_metadata(), t.base_addr, 4, BLOCK_LEN
        )
    with pytest.raises(AgentError):  # memory that the peer never registered
        reader.transport.add_remote_peer("x", t.get_agent_metadata(), 4096, 4, BLOCK_LEN)
    assert reader.transport.read_blocks("x", [0], [0]) is None
    assert reader.raw.live_lists == 2
    assert reader.transport.read_blocks("p", [0], [0]) is not None
    reader.transport.poll()


def test_removing_a_peer_fails_its_transfers_and_leaves_the_siblings(fabric: FakeFabric) -> None:
    reader, p, q = Side(fabric, "D", 0), Side(fabric, "P", 1), Side(fabric, "Q", 2)
    reader.add("p", p)
    reader.add("q", q)
    fabric.script(SLOW, times=None)
    of_p = [reader.transport.read_blocks("p", [i], [i]) for i in range(2)]
    of_q = reader.transport.read_blocks("q", [5], [5])
    reader.transport.remove_remote_peer("p")
    assert reader.transport.read_blocks("p", [0], [0]) is None
    # Bytes may still land: neither ended nor torn down.
    assert drain(reader.transport) == ([], [])
    assert "P" in reader.raw.remote_agents
    fabric.settle()
    done, failed = drain(reader.transport)
    assert (done, sorted(failed)) == ([of_q], of_p)
    reader.transport.poll()
    assert reader.raw.remote_agents == ("Q",)
    assert reader.raw.live_lists == 2
    reader.transport.remove_remote_peer("nobody")
    for side in (reader, p, q):
        side.transport.close()
    fabric.assert_clean()


def test_a_dead_peer_fails_its_transfers(fabric: FakeFabric, sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    fabric.script(SLOW, times=None)
    transfer_id = reader.transport.read_blocks("p", [0], [0])
    fabric.kill("P")
    assert drain(reader.transport) == ([], [transfer_id])
    assert reader.transport.read_blocks("p", [0], [0]) is None
    reader.transport.remove_remote_peer("p")
    assert reader.raw.remote_agents == ()


def test_a_restarted_peer_is_added_again_and_its_old_state_goes_first(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, _ = sides
    fabric.script(SLOW)
    old = reader.transport.read_blocks("p", [0], [0])
    fabric.kill("P")
    again = Side(fabric, "P", 9)
    reader.add("p", again)
    assert drain(reader.transport) == ([], [old])
    assert reader.raw.live_lists == 2
    new = reader.transport.read_blocks("p", [3], [3])
    assert drain(reader.transport) == ([new], [])
    assert (reader.blocks[3] == 9).all()
    again.transport.close()


def test_adding_a_peer_again_while_its_transfers_hang_is_refused(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, producer = sides
    fabric.script(SLOW)
    hanging = reader.transport.read_blocks("p", [0], [0])
    with pytest.raises(TransportError, match="still in flight"):
        reader.add("p", producer)
    fabric.settle()
    reader.add("p", producer)
    assert drain(reader.transport) == ([], [hanging])


@pytest.mark.parametrize(
    "failing", ["release_xfer_handle", "release_dlist_handle", "remove_remote_agent"]
)
def test_a_failing_step_of_tearing_down_never_skips_the_next(
    fabric: FakeFabric, sides: tuple[Side, Side], failing: str
) -> None:
    reader, _ = sides
    transfer_id = reader.transport.read_blocks("p", [0], [0])
    fabric.fail(failing, nixlBackendError, agent="D", times=2)
    steps = ("release_xfer_handle", "release_dlist_handle", "remove_remote_agent")
    assert not reader.raw.calls.keys() & set(steps)
    reader.transport.remove_remote_peer("p")
    assert {step: reader.raw.calls[step] for step in steps} == dict.fromkeys(steps, 1)
    assert drain(reader.transport)[1] == [transfer_id]
    for _ in range(3):
        reader.transport.poll()
    assert reader.raw.live_transfers == 0
    assert reader.raw.live_lists == 1
    assert reader.raw.remote_agents == ()
    assert reader.transport.agent.quarantined == 0


def test_two_peers_on_one_agent_do_not_tear_each_other_down(
    fabric: FakeFabric, sides: tuple[Side, Side]
) -> None:
    reader, producer = sides
    reader.add("same agent", producer)
    reader.transport.remove_remote_peer("p")
    assert reader.transport.read_blocks("same agent", [0], [0]) is not None
    assert len(drain(reader.transport)[0]) == 1
    reader.transport.remove_remote_peer("same agent")
    assert reader.raw.remote_agents == ()


# --- the end ---


def test_close_cancels_what_runs_and_releases_everything(fabric: FakeFabric) -> None:
    producer, reader = Side(fabric, "P", 7), Side(fabric, "D", 0)
    reader.add("p", producer)
    fabric.script(Plan(polls=3), times=None)
    for i in range(4):
        reader.transport.read_blocks("p", [i], [i])
    reader.transport.close()
    reader.transport.close()
    producer.transport.close()
    fabric.assert_clean()


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("poll", ()),
        ("cancel", ([],)),
        ("read_blocks", ("p", [0], [0])),
        ("write_blocks", ("p", [0], [0])),
        ("get_agent_metadata", ()),
        ("add_remote_peer", ("p", b"", 0, 1, BLOCK_LEN)),
        ("remove_remote_peer", ("p",)),
    ],
)
def test_every_call_after_close_raises(fabric: FakeFabric, call: str, args: Any) -> None:
    side = Side(fabric, "D", 0)
    side.transport.close()
    assert not side.transport.available
    with pytest.raises(ClosedError, match="'D' was closed"):
        getattr(side.transport, call)(*args)


def test_close_keeps_the_memory_of_a_transfer_that_does_not_end(
    fabric: FakeFabric, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvnixl import transport as module

    monkeypatch.setattr(module, "DEFAULT_CLOSE_TIMEOUT_S", 0.05)
    producer, reader = Side(fabric, "P", 7), Side(fabric, "D", 0)
    reader.add("p", producer)
    fabric.script(SLOW)
    reader.transport.read_blocks("p", [0], [0])
    kept = len(module._kept_views)
    reader.transport.close()
    assert reader.raw.registrations == 1
    assert len(module._kept_views) == kept + 1
    assert not fabric.violations
    del module._kept_views[kept:]
    fabric.settle()


def test_without_nixl_the_object_exists_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_import = builtins.__import__

    def no_nixl(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "nixl":
            raise ImportError("blocked by the test")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", no_nixl)
    t = NixlTransport("x", memoryview(np.zeros((2, 8), np.uint8)))
    assert not t.available
    assert t.num_blocks == 2
    assert t.read_blocks("p", [0], [0]) is None
    assert t.poll() == PollResult((), ())
    with pytest.raises(NixlUnavailableError, match="pip install nixl"):
        t.get_agent_metadata()
    t.close()


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (memoryview(bytearray(8)), "1-D"),
        (memoryview(np.zeros((2, 8), np.uint16)), "2 bytes"),
        (memoryview(np.zeros((2, 8), np.uint8)).toreadonly(), "writable"),
        (memoryview(np.zeros((4, 8), np.uint8)[::2]), "contiguous"),
        (memoryview(np.zeros((0, 8), np.uint8)), "at least one byte"),
        (b"bytes", "memoryview"),
    ],
)
def test_a_view_of_the_wrong_form_is_refused(fabric: FakeFabric, view: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NixlTransport("x", view, agent=fabric.agent("x"))


def test_a_registration_that_fails_leaves_nothing(fabric: FakeFabric) -> None:
    raw = fabric.agent("x")
    fabric.fail("prep_xfer_dlist", agent="x")
    with pytest.raises(AgentError):
        NixlTransport("x", memoryview(np.zeros((2, 8), np.uint8)), agent=raw)
    fabric.assert_clean()


def test_an_agent_of_ours_may_be_passed(fabric: FakeFabric) -> None:
    raw: FakeAgent = fabric.agent("x")
    agent = Agent(raw)
    t = NixlTransport("x", memoryview(np.zeros((2, 8), np.uint8)), agent=agent)
    assert t.agent is agent
    t.close()
    assert not agent.closed
    fabric.assert_clean()
