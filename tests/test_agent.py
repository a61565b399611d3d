"""`Agent`: owners, errors, quarantine (on the fake agent) and opening (on real NIXL)."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvnixl._descs import strided_descs
from kvnixl.agent import LOCAL_SIDE, Agent, PreparedList, RemoteAgent, Transfer
from kvnixl.errors import (
    AgentError,
    ClosedError,
    DescriptorError,
    KvNixlError,
    NixlUnavailableError,
    PeerDisconnectedError,
    RegistrationError,
    ReleaseError,
    TransferError,
)
from kvnixl.fake import (
    FakeFabric,
    Plan,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

BLOCKS, BLOCK_LEN = 8, 32
IDS = np.arange(4, dtype=np.int32)
SLOW = Plan(polls=None)


class World:
    """Reader ``D`` that is ready to read from producer ``P``."""

    def __init__(self) -> None:
        self.fabric = FakeFabric(seed=3)
        self.source = np.full((BLOCKS, BLOCK_LEN), 7, np.uint8)
        self.target = np.zeros((BLOCKS, BLOCK_LEN), np.uint8)
        self.producer = Agent(self.fabric.agent("P"))
        self.producer.register_memory([region(self.source)])
        self.raw = self.fabric.agent("D")
        self.reader = Agent(self.raw)
        self.registration = self.reader.register_memory([region(self.target)])
        self.remote: RemoteAgent = self.reader.add_remote_agent(self.producer.get_agent_metadata())
        self.local: PreparedList = self.reader.prep_xfer_dlist(LOCAL_SIDE, rows(self.target))
        self.theirs: PreparedList = self.reader.prep_xfer_dlist(self.remote, rows(self.source))

    def read(self, plan: Plan | None = None, notif_msg: bytes = b"") -> Transfer:
        if plan is not None:
            self.fabric.script(plan)
        return self.reader.make_prepped_xfer("READ", self.local, IDS, self.theirs, IDS, notif_msg)


def region(array: np.ndarray[Any, Any]) -> tuple[int, int, int]:
    return array.ctypes.data, array.nbytes, 0


def rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return strided_descs([(array.ctypes.data, BLOCK_LEN, BLOCK_LEN, BLOCKS, 0)])


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.fabric.clear()
    made.fabric.settle()
    assert made.reader.close() == 0
    assert made.producer.close() == 0
    made.fabric.assert_clean()


# --- transfers ---


def test_a_transfer_from_posting_to_release(world: World) -> None:
    xfer = world.read(Plan(polls=2), notif_msg=b"over")
    assert xfer.post() == "PROC"
    assert xfer.in_flight
    assert [xfer.state(), xfer.state()] == ["PROC", "DONE"]
    telemetry = xfer.telemetry()
    assert telemetry is not None
    assert (telemetry.desc_count, telemetry.total_bytes) == (1, 4 * BLOCK_LEN)
    assert world.producer.get_new_notifs() == {"D": [b"over"]}
    assert xfer.close()
    assert xfer.close()
    assert xfer.released
    assert (world.target[:4] == 7).all()
    assert (world.target[4:] == 0).all()
    with pytest.raises(ClosedError):
        xfer.post()


def test_nixls_own_call_names_work(world: World) -> None:
    xfer = world.read()
    assert world.reader.transfer(xfer) == "DONE"
    assert world.reader.check_xfer_state(xfer) == "DONE"
    assert world.reader.get_xfer_telemetry(xfer) is not None
    world.reader.release_xfer_handle(xfer)
    world.reader.release_xfer_handle(xfer)
    world.reader.release_dlist_handle(world.local)
    world.reader.remove_remote_agent(world.remote)
    world.reader.deregister_memory(world.registration)
    assert world.raw.registrations == 0


def test_missing_telemetry_is_none_and_changes_no_outcome(world: World) -> None:
    xfer = world.read(Plan(telemetry=False))
    assert xfer.post() == "DONE"
    assert xfer.telemetry() is None
    assert xfer.close()
    assert xfer.telemetry() is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (nixlBackendError, TransferError),
        (nixlRemoteDisconnectError, PeerDisconnectedError),
        (RuntimeError("odd"), TransferError),
    ],
)
@pytest.mark.parametrize("when", ["make_prepped_xfer", "transfer", "check_xfer_state"])
def test_nixls_errors_name_the_peer_and_the_operation(
    world: World, error: Any, kind: type[AgentError], when: str
) -> None:
    def run() -> None:
        xfer = world.read(SLOW)
        try:
            xfer.post()
            xfer.state()
        finally:
            world.fabric.settle()
            xfer.close()

    world.fabric.fail(when, error, agent="D")
    with pytest.raises(kind, match=f"{when} to peer 'P' failed") as caught:
        run()
    assert caught.value.peer == "P"
    assert caught.value.operation == when
    assert isinstance(caught.value, KvNixlError)


def test_an_err_state_from_posting_is_an_error(world: World) -> None:
    xfer = world.read(Plan(post="ERR"))
    with pytest.raises(TransferError, match="'ERR'"):
        xfer.post()
    assert xfer.close()


def test_an_err_state_from_checking_is_a_state(world: World) -> None:
    xfer = world.read(Plan(polls=1, end="ERR"))
    xfer.post()
    assert xfer.state() == "ERR"
    assert xfer.close()


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ([0, 1], [0], "2 local and 1 remote"),
        ([], [], "nothing"),
        ([0.0], [0], "float64"),
        ([True], [0], "bool"),
        ([2**31], [0], str(2**31)),
        (np.array([2**32], np.uint64), [0], str(2**32)),
        ([0], [-1], "-1"),
        ([[0]], [0], "2 dimensions"),
        ([[0], 1], [0], "local indices"),
        ([BLOCKS], [0], "out of range"),
        ([0], [BLOCKS], "out of range"),
    ],
)
def test_bad_indices_are_refused_before_nixl_narrows_them(
    world: World, local: Any, remote: Any, says: str
) -> None:
    with pytest.raises(DescriptorError, match=says):
        world.reader.make_prepped_xfer("READ", world.local, local, world.theirs, remote)
    assert world.raw.live_transfers == 0


def test_wider_integers_and_strides_are_converted(world: World) -> None:
    xfer = world.reader.make_prepped_xfer(
        "READ", world.local, np.array([3, 0, 1, 0], np.int64)[::2], world.theirs, [5, 6]
    )
    world.source[:, 0] = np.arange(BLOCKS)
    xfer.post()
    assert world.target[[3, 1], 0].tolist() == [5, 6]
    xfer.close()


# --- giving back ---


def test_a_transfer_in_flight_is_not_released(world: World) -> None:
    xfer = world.read(SLOW)
    xfer.post()
    with pytest.raises(ReleaseError, match="in flight"):
        world.reader.release_xfer_handle(xfer)
    assert not xfer.closed
    assert xfer.state() == "PROC"
    assert not xfer.close()
    assert world.reader.quarantined == 1
    assert world.reader.retry_releases() == 1
    world.fabric.settle()
    assert world.reader.retry_releases() == 0
    assert xfer.released


def test_a_refused_release_is_retried_until_it_succeeds(world: World) -> None:
    xfer = world.read(Plan(refuse=3))
    xfer.post()
    assert not xfer.close()
    assert [world.reader.retry_releases() for _ in range(3)] == [1, 1, 0]
    assert xfer.released


def test_a_release_that_nixl_refuses_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    refused = [world.read(Plan(refuse=9)) for _ in range(3)]
    waits = world.read(SLOW)
    for xfer in (waits, *refused):
        xfer.post()
        assert not xfer.close()
    for _ in range(5):
        world.reader.retry_releases()
    (record,) = [record for record in caplog.records if record.name == "kvnixl.agent"]
    assert record.levelno == logging.WARNING
    assert "agent D keeps it and will try again" in record.message
    assert "release_xfer_handle to peer 'P' failed: nixl" in record.message


def test_a_post_that_fails_half_way_may_have_left_bytes_moving(world: World) -> None:
    xfer = world.read(SLOW)
    xfer.post()
    xfer.last_state = "ERR"  # as after a posting call that raised
    assert not xfer.close()
    world.fabric.settle()
    assert world.reader.retry_releases() == 0


def test_posting_twice_does_not_hide_that_bytes_may_move(world: World) -> None:
    xfer = world.read(SLOW)
    xfer.post()
    with pytest.raises(TransferError, match="in flight"):
        xfer.post()
    assert not xfer.over()
    assert world.reader.bytes_may_move("P")
    world.fabric.settle()
    assert xfer.over()
    assert xfer.close()


def test_a_transfer_whose_agent_was_forgotten_meanwhile_is_never_called_over(world: World) -> None:
    xfer = world.read(SLOW)
    xfer.post()
    world.fabric.fail("check_xfer_state", nixlNotFoundError, agent="D", times=3)
    with pytest.raises(TransferError):
        xfer.state()
    assert not xfer.over()
    assert not xfer.close()
    world.fabric.settle()
    assert world.reader.retry_releases() == 0


def test_memory_and_peer_stay_while_a_transfer_is_in_flight(world: World) -> None:
    xfer = world.read(SLOW)
    xfer.post()
    with pytest.raises(RegistrationError, match="in flight"):
        world.reader.deregister_memory(world.registration)
    with pytest.raises(ReleaseError, match="in flight"):
        world.reader.remove_remote_agent(world.remote)
    assert not world.remote.close()
    assert not world.registration.close()
    assert not xfer.close()
    assert world.reader.quarantined == 3
    assert world.raw.remote_agents == ("P",)
    world.fabric.settle()
    assert world.reader.retry_releases() == 0
    assert world.raw.remote_agents == ()
    assert world.raw.registrations == 0
    assert not world.fabric.violations


def test_a_remote_agent_added_twice_goes_with_its_last_owner(world: World) -> None:
    again = world.reader.add_remote_agent(world.producer.get_agent_metadata())
    assert again.name == world.remote.name
    world.remote.close()
    assert world.raw.remote_agents == ("P",)
    xfer = world.read()
    assert xfer.post() == "DONE"
    xfer.close()
    again.close()
    assert world.raw.remote_agents == ()


def test_close_waits_for_what_is_in_flight(world: World) -> None:
    xfer = world.read(Plan(polls=5))
    xfer.post()
    assert world.reader.live["transfers"] == 1
    assert world.reader.close() == 0
    assert world.reader.close() == 0
    assert xfer.released
    with pytest.raises(ClosedError):
        world.reader.get_new_notifs()


def test_close_says_what_could_not_be_released(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Agent] = []
    monkeypatch.setattr("kvnixl.agent._undead", kept)
    world.read(SLOW).post()
    with caplog.at_level(logging.ERROR):
        left = world.reader.close(timeout=0.02)
    assert left == 3  # the transfer, and the peer and the memory that wait for it
    assert "3 NIXL objects" in caplog.text
    assert kept == [world.reader]
    world.fabric.settle()
    assert world.reader.retry_releases() == 0


# --- peers, memory, lists ---


def test_registration_errors_say_what_was_asked(world: World) -> None:
    for bad in ([], [(0, 10, 0)], [(4096, 0, 0)], [(2**64 - 8, 16, 0)]):
        with pytest.raises(DescriptorError):
            world.reader.register_memory(bad)
    world.fabric.fail("register_memory", agent="D")
    with pytest.raises(RegistrationError, match=r"1 DRAM regions, 256 bytes.*ulimit"):
        world.reader.register_memory([region(world.source)])


def test_bad_descriptor_lists_are_errors_where_nixl_is_silent(world: World) -> None:
    for bad in (
        np.zeros((1, 4), np.uint64),
        np.zeros((1, 3), np.int64),
        np.zeros((1, 3), ">u8"),
        np.zeros(3, np.uint64),
        np.zeros((0, 3), np.uint64),
    ):
        with pytest.raises(DescriptorError):
            world.reader.prep_xfer_dlist(LOCAL_SIDE, bad)
    for bad_rows in (
        [],
        [(4096, 8)],
        [(4096, 8, 0), (4096, 8, 0, 8, 1)],
        [(4096.0, 8, 0)],
        [(-1, 8, 0)],
        [(2**64, 8, 0)],
        [()],
        4096,
    ):
        with pytest.raises(DescriptorError, match="descriptors must be"):
            world.reader.prep_xfer_dlist(LOCAL_SIDE, bad_rows)  # type: ignore[arg-type]
    with pytest.raises(DescriptorError, match="'nobody'"):
        world.reader.prep_xfer_dlist("nobody", rows(world.source))

    class Silent:
        """NIXL answers some bad input with None and a log line."""

        def prep_xfer_dlist(self, *_: Any, **__: Any) -> None: ...
        def register_memory(self, *_: Any, **__: Any) -> None: ...
        def add_remote_agent(self, _: bytes) -> str:
            return ""

    silent = Agent(Silent())
    with pytest.raises(DescriptorError, match="returned nothing"):
        silent.prep_xfer_dlist(LOCAL_SIDE, rows(world.source))
    with pytest.raises(RegistrationError, match="refused"):
        silent.register_memory([region(world.source)])
    with pytest.raises(AgentError, match="did not accept"):
        silent.add_remote_agent(b"x")


def test_descriptors_may_be_tuples_as_in_nixls_own_call(world: World) -> None:
    def tuples(array: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
        return [(array.ctypes.data + i * BLOCK_LEN, BLOCK_LEN, 0) for i in range(BLOCKS)]

    local = world.reader.prep_xfer_dlist(LOCAL_SIDE, tuples(world.target))
    theirs = world.reader.prep_xfer_dlist(world.remote, tuples(world.source))
    xfer = world.reader.make_prepped_xfer("READ", local, [2], theirs, [5])
    assert xfer.post() == "DONE"
    xfer.close()
    assert np.flatnonzero(world.target.any(axis=1)).tolist() == [2]


def test_an_error_that_cannot_be_printed_is_still_an_agent_error(world: World) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    world.fabric.fail("send_notif", UnprintableError(), agent="D")
    with pytest.raises(AgentError, match="failed: UnprintableError"):
        world.reader.send_notif("P", b"x")


def test_notifications(world: World) -> None:
    world.reader.send_notif(world.remote, b"\xff\x00")
    world.reader.send_notif("P", b"again")
    assert world.producer.get_new_notifs() == {"D": [b"\xff\x00", b"again"]}
    with pytest.raises(AgentError, match="send_notif to peer 'nobody'"):
        world.reader.send_notif("nobody", b"x")


class Garbling:
    """NIXL's binding with a peer whose agent name is not UTF-8."""

    removed: bytes | None = None

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    def add_remote_agent(self, _: bytes) -> bytes:
        return b"\xff\xfe"

    def remove_remote_agent(self, name: bytes) -> None:
        self.removed = name


def test_an_agent_name_that_is_not_utf8(caplog: pytest.LogCaptureFixture) -> None:
    raw = Garbling()
    agent = Agent(raw)
    with caplog.at_level(logging.WARNING):
        assert [agent.get_new_notifs() for _ in range(3)] == [{}, {}, {}]
    assert agent.undecodable_notifs == 3
    assert len(caplog.records) == 1
    with pytest.raises(AgentError, match="not UTF-8"):
        agent.add_remote_agent(b"metadata")
    assert raw.removed == b"\xff\xfe"
    assert agent.close() == 0


def test_a_dead_peer(world: World) -> None:
    xfer = world.read(SLOW)
    xfer.post()
    world.fabric.kill("P")
    with pytest.raises(PeerDisconnectedError):
        xfer.state()
    assert xfer.close()
    with pytest.raises(PeerDisconnectedError):
        world.reader.send_notif("P", b"x")
    world.producer.raw = None  # its process is gone
    world.producer.closed = True


# --- real NIXL ---


@pytest.fixture
def opened() -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def open_agent(*args: Any, **kwargs: Any) -> Agent:
        agents.append(Agent.open(*args, **kwargs))
        return agents[-1]

    yield open_agent
    for agent in agents:
        assert agent.close() == 0


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each thread of this process, by its id."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


@pytest.mark.nixl
def test_an_idle_agent_sleeps(opened: Callable[..., Agent]) -> None:
    def threads_of_a_new_agent(**options: int) -> set[str]:
        before = thread_seconds().keys()
        opened(**options)
        return thread_seconds().keys() - before

    def used_by(threads: set[str]) -> float:
        now = thread_seconds()
        return sum(now[thread] - before[thread] for thread in threads)

    spinning = threads_of_a_new_agent(poll_delay_us=0)
    sleeping = threads_of_a_new_agent()
    before, started = thread_seconds(), time.monotonic()
    # At the same time, so that what else the machine does meets both alike.
    while used_by(spinning) < 0.5 or time.monotonic() < started + 2.0:
        assert time.monotonic() < started + 60
        time.sleep(0.01)
    # Cores. bench/bench_agent.py shows the target of 0.05; a slow machine is given twice that.
    assert used_by(sleeping) < 0.1 * (time.monotonic() - started)
    assert used_by(sleeping) < 0.2 * used_by(spinning)


@pytest.mark.nixl
def test_names_are_random_unless_given(opened: Callable[..., Agent]) -> None:
    a, b, c = opened(), opened(), opened("mine")
    assert a.name != b.name
    assert c.name == "mine"
    assert len(a.get_agent_metadata()) > 0


@pytest.mark.nixl
def test_real_blocks_with_a_notification_between_two_agents(opened: Callable[..., Agent]) -> None:
    source = np.arange(BLOCKS * BLOCK_LEN, dtype=np.uint8).reshape(BLOCKS, BLOCK_LEN)
    target = np.zeros_like(source)
    producer, reader = opened(), opened()
    producer.register_memory([region(source)])
    reader.register_memory([region(target)])
    remote = reader.add_remote_agent(producer.get_agent_metadata())
    assert remote.name == producer.name
    reader.make_connection(remote)
    local = reader.prep_xfer_dlist(LOCAL_SIDE, rows(target))
    theirs = reader.prep_xfer_dlist(remote, rows(source))
    xfer = reader.make_prepped_xfer("READ", local, [0, 1], theirs, [6, 2], b"\x00over")
    assert xfer.post() in ("DONE", "PROC")
    deadline = time.monotonic() + 10
    while xfer.state() != "DONE":
        assert time.monotonic() < deadline
    assert (target[:2] == source[[6, 2]]).all()
    notifs: dict[str, list[bytes]] = {}
    while not notifs:
        assert time.monotonic() < deadline
        notifs = producer.get_new_notifs()
    assert notifs == {reader.name: [b"\x00over"]}
    telemetry = xfer.telemetry()
    assert telemetry is not None
    assert telemetry.desc_count == 2
    assert telemetry.total_bytes == 2 * BLOCK_LEN


@pytest.mark.nixl
def test_real_errors_are_translated(opened: Callable[..., Agent]) -> None:
    agent = opened()
    with pytest.raises(AgentError, match="add_remote_agent"):
        agent.add_remote_agent(b"garbage")
    with pytest.raises(DescriptorError, match="prep_xfer_dlist to peer 'nobody'"):
        agent.prep_xfer_dlist("nobody", strided_descs([(4096, 8, 8, 1, 0)]))
    with pytest.raises(AgentError, match="send_notif to peer 'nobody'"):
        agent.send_notif("nobody", b"x")
    with pytest.raises(NixlUnavailableError, match="NOSUCH"):
        Agent.open(backends=("UCX", "NOSUCH"))


@pytest.mark.nixl
def test_a_transport_that_ucx_cannot_use_is_a_clear_error() -> None:
    script = (
        "from kvnixl.agent import Agent\n"
        "from kvnixl.errors import AgentError\n"
        "try:\n"
        "    Agent.open().close()\n"
        "except AgentError as exc:\n"
        "    print('REFUSED', exc)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "UCX_TLS": "nosuchtransport"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "REFUSED" in result.stdout, result.stderr
    assert "UCX_TLS" in result.stdout


@pytest.mark.nixl
def test_an_agent_that_nobody_closed_is_reported() -> None:
    def open_and_drop() -> None:
        Agent.open()
        gc.collect()

    with pytest.warns(ResourceWarning, match="was not closed"):
        open_and_drop()


@pytest.mark.nixl
def test_ten_thousand_transfers_leave_memory_flat(opened: Callable[..., Agent]) -> None:
    agent, peer = opened(), opened()
    memory = np.zeros((BLOCKS, BLOCK_LEN), np.uint8)
    for owner in (agent, peer):
        owner.register_memory([region(memory)])
    local = agent.prep_xfer_dlist(LOCAL_SIDE, rows(memory))
    remote = agent.add_remote_agent(peer.get_agent_metadata())
    theirs = agent.prep_xfer_dlist(remote, rows(memory))

    def loop(times: int) -> int:
        for _ in range(times):
            xfer = agent.make_prepped_xfer("READ", local, [0], theirs, [1])
            xfer.post()
            deadline = time.monotonic() + 10
            while xfer.state() != "DONE":
                assert time.monotonic() < deadline
            assert xfer.close()
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = loop(1000)
    assert loop(10_000) - before < 2048  # KiB
    assert agent.live["transfers"] == 0
