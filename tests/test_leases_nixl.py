"""Lease slots over real NIXL between real processes, through shared memory and tcp."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lease_peers import NUM_CELLS, SlotOwner, SlotReader
from tests.procs import Child

pytestmark = pytest.mark.nixl

SOAK = Path(__file__).parent.parent / "scripts" / "soak.py"
READ_TIMEOUT_S = 5.0
RELEASED = "engine E rank 0 released the KV blocks before the read completed"
UNREADABLE = "the lease slot of engine {} rank 0 could not be read"


class Peers(NamedTuple):
    owner: Child  # engine E
    reader: Child


def start(*readers_args: object, env: dict[str, str]) -> tuple[Child, Child]:
    owner = Child(SlotOwner, "E", env=env)
    try:
        reader = Child(SlotReader, *readers_args, env=env)
    except BaseException:
        owner.end()
        raise
    reader.call("meet", "E", owner.call("address"))
    return owner, reader


@pytest.fixture(scope="module", params=["sm", "tcp"])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """Shared memory with the project's agent, tcp with NIXL's own."""
    raw = request.param == "tcp"
    owner, reader = start(raw, 20.0, env={"UCX_TLS": "tcp" if raw else "all"})
    yield Peers(owner, reader)
    try:
        assert reader.close() == 0
        assert owner.close() == 0
    finally:
        reader.end()
        owner.end()


def test_leases_that_hold_and_leases_that_ended(peers: Peers) -> None:
    leases = {f"r{i}": (i * 3, 2**62 + i) for i in range(10)}
    peers.owner.call("update", set(), leases)
    asked = {req_id: ("E", *lease) for req_id, lease in leases.items()}
    assert peers.reader.call("verify", asked) == (set(leases), {})
    peers.owner.call("update", {"r1", "r4"}, {"r7": (21, 5)})
    verified, failed = peers.reader.call("verify", asked)
    assert verified == leases.keys() - {"r1", "r4", "r7"}
    assert failed == dict.fromkeys(["r1", "r4", "r7"], RELEASED)
    assert peers.reader.call("cells") == (NUM_CELLS, 0)


def test_a_slot_that_nixl_refuses_fails_its_request_only(peers: Peers) -> None:
    peers.owner.call("update", set(), {"good": (5, 99)})
    asked = {"good": ("E", 5, 99), "bad": ("E", 64, 99), "worse": ("E", 2**31 - 2, 99)}
    verified, failed = peers.reader.call("verify", asked)
    assert verified == {"good"}
    assert failed.keys() == {"bad", "worse"}
    assert peers.reader.call("cells") == (NUM_CELLS, 0)


def test_an_owner_that_stands_still_and_one_that_dies() -> None:
    """Over tcp a READ needs the owner's process. Its cell waits for it as long as it may write."""
    env = {"UCX_TLS": "tcp"}
    children: list[Child] = []
    try:
        owner, reader = start(True, READ_TIMEOUT_S, env=env)
        children += [owner, reader]
        other = Child(SlotOwner, "F", env=env)
        children.append(other)
        reader.call("meet", "F", other.call("address"))
        owner.call("update", set(), {"a": (1, 41), "b": (2, 42)})
        other.call("update", set(), {"c": (3, 43)})
        assert reader.call("verify", {"a": ("E", 1, 41)}) == ({"a"}, {})

        owner.freeze()
        verified, failed = reader.call("verify", {"b": ("E", 2, 42), "c": ("F", 3, 43)})
        assert verified == {"c"}
        assert UNREADABLE.format("E") in failed["b"]
        assert reader.call("cells") == (NUM_CELLS - 1, 1)
        assert 42 not in reader.call("words")
        owner.thaw()
        assert reader.call("wait_for_cells") == (NUM_CELLS, 0)
        # The word landed after all; had its cell been handed out again, it would be there.
        assert 42 in reader.call("words")
        assert reader.call("verify", {"b": ("E", 2, 42)}) == ({"b"}, {})

        owner.kill()
        verified, failed = reader.call("verify", {"b": ("E", 2, 42), "c": ("F", 3, 43)})
        assert verified == {"c"}
        assert UNREADABLE.format("E") in failed["b"]
        assert reader.call("wait_for_cells") == (NUM_CELLS, 0)
        assert reader.close() == 0
        assert other.close() == 0
    finally:
        for child in children:
            child.end()


@pytest.mark.parametrize("transport", ["sm", "tcp"])
def test_soak_short_form(transport: str) -> None:
    """Blocks are given away while they are read; see scripts/soak.py."""
    for seconds in ("2", "15"):  # a busy machine may need longer to catch a race
        status, output = run_soak(seconds, transport)
        numbers = re.search(
            r"accepted (\d+), races caught (\d+).* foreign bytes accepted (\d+), .*left (\d+)",
            output,
        )
        assert numbers is not None, output
        accepted, caught, foreign, left = map(int, numbers.groups())
        assert (foreign, left) == (0, 0), output
        if accepted and caught:
            break
    assert status == 0, output


def test_the_soak_notices_blocks_that_are_free_before_their_slot_is_cleared() -> None:
    for seconds in ("2", "15"):
        status, output = run_soak(seconds, "sm", "--free-first")
        if "foreign bytes accepted 0," not in output:
            break
    assert status == 1, output
    assert re.search(r"foreign bytes accepted [1-9]", output), output


def run_soak(seconds: str, transport: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, str(SOAK), "--seconds", seconds, "--transport", transport, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)
    return process.returncode, output
