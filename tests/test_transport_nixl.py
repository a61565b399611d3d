"""`NixlTransport` over real NIXL between real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.blocks import BlockPeer
from tests.procs import Child

pytestmark = pytest.mark.nixl

Pair = tuple[Child, Child]

# What UCX chooses on one machine, whatever the user's own environment says.
SHARED_MEMORY = {"UCX_TLS": "all"}
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture(params=[SHARED_MEMORY, TCP], ids=["sm", "tcp"])
def ucx(request: pytest.FixtureRequest) -> dict[str, str]:
    env: dict[str, str] = request.param
    return env


def meet(a: Child, b: Child) -> None:
    a.call("add", "b", b.call("address"))
    b.call("add", "a", a.call("address"))


@pytest.fixture
def pair(spawn: Callable[..., Child], ucx: dict[str, str]) -> Iterator[Pair]:
    a = spawn(BlockPeer, "A", 256, 4096, 0, env=ucx)
    b = spawn(BlockPeer, "B", 256, 4096, 0, env=ucx)
    meet(a, b)
    yield a, b
    assert a.close() == 0
    assert b.close() == 0


def test_blocks_move_in_both_directions(pair: Pair) -> None:
    a, b = pair
    rng = np.random.default_rng(5)
    for seed, (me, other, name) in enumerate([(a, b, "b"), (b, a, "a")]):
        other.call("label", seed)
        here, there = (rng.permutation(256)[:100].tolist() for _ in range(2))
        transfer_id = me.call("read", name, here, there)
        assert me.call("wait", transfer_id) == "done"
        assert me.call("digest_matches", here, seed, there)
        me.call("label", 10 + seed)
        transfer_id = me.call("write", name, here, there)
        assert me.call("wait", transfer_id) == "done"
        assert other.call("digest_matches", there, 10 + seed, here)


def test_writes_touch_only_the_named_blocks(pair: Pair) -> None:
    a, b = pair
    a.call("label", 1)
    b.call("label", 2)
    transfer_id = a.call("write", "b", [5, 6, 7, 100], [250, 249, 0, 100])
    assert a.call("wait", transfer_id) == "done"
    untouched = [i for i in range(256) if i not in (250, 249, 0, 100)]
    assert b.call("digest_matches", untouched, 2, untouched)


def test_a_thousand_transfers_leave_nothing_behind(pair: Pair) -> None:
    a, b = pair
    b.call("label", 3)
    files = a.call("open_files")
    for i in range(1000):
        block = i % 256
        assert a.call("wait", a.call("read", "b", [block], [255 - block])) == "done"
    everything = list(range(256))
    assert a.call("digest_matches", everything, 3, everything[::-1])
    assert a.call("leftovers") == {
        "transfers": 0,
        "prepared_lists": 2,
        "registrations": 1,
        "remote_agents": 1,
        "quarantined": 0,
    }
    assert a.call("open_files") <= files + 2


def test_a_removed_peer_can_be_added_again(pair: Pair) -> None:
    a, b = pair
    for seed in range(3):
        b.call("label", seed)
        assert a.call("wait", a.call("read", "b", [1], [2])) == "done"
        assert a.call("digest_matches", [1], seed, [2])
        a.call("remove", "b")
        assert a.call("read", "b", [1], [2]) is None
        a.call("add", "b", b.call("address"))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_killing_the_peer_in_the_middle_fails_the_transfers_and_leaks_nothing(
    spawn: Callable[..., Child], ucx: dict[str, str], operation: str
) -> None:
    # 256 MiB in descending and unmergeable pairs: the transfer is under way when the peer dies.
    blocks, block_len = 16384, 16384
    survivor = spawn(BlockPeer, "A", blocks, block_len, 0, env=ucx)
    bystander = spawn(BlockPeer, "C", 64, block_len, 0, env=ucx)
    victim = spawn(BlockPeer, "B", blocks, block_len, 7, env=ucx)
    survivor.call("add", "b", victim.call("address"))
    survivor.call("add", "c", bystander.call("address"))
    bystander.call("label", 4)
    assert survivor.call("wait", survivor.call(operation, "b", [0], [0])) == "done"

    here = list(range(blocks))
    there = np.random.default_rng(1).permutation(blocks).tolist()
    first = survivor.call(operation, "b", here, there)
    # The first one stands still where it is, the second cannot end without its peer.
    victim.freeze()
    second = survivor.call(operation, "b", here, there)
    assert None not in (first, second)
    victim.kill()
    deadline = time.monotonic() + 10.0
    ends = [
        survivor.call("wait", transfer_id, max(0.0, deadline - time.monotonic()))
        for transfer_id in (first, second)
    ]
    assert set(ends) <= {"failed", "done"}
    if ucx == TCP:  # where memory is shared, bytes do not need the peer's process
        assert ends[1] == "failed"
    for transfer_id, end in zip((first, second), ends, strict=True):
        says = f"transfer {transfer_id} with peer 'b' failed: NIXL check_xfer_state to peer 'B'"
        assert any(says in line for line in survivor.call("logged")) == (end == "failed")
    # No new transfer starts, the others go on, and nothing is left of the dead peer.
    started = survivor.call("read", "b", [0], [0])
    if started is not None:  # what has ended just before could not show that the peer is dead
        assert "failed" not in ends
        assert survivor.call("wait", started) == "failed"
    assert survivor.call("wait", survivor.call("read", "c", [9], [11])) == "done"
    survivor.call("remove", "b")
    left = {
        "transfers": 0,
        "prepared_lists": 2,
        "registrations": 1,
        "remote_agents": 1,
        "quarantined": 0,
    }
    assert survivor.call("leftovers_as", left) == left
    assert survivor.close() == 0
    assert bystander.close() == 0


def test_a_peer_that_restarts_under_its_name_is_met_again(
    spawn: Callable[..., Child], ucx: dict[str, str]
) -> None:
    survivor = spawn(BlockPeer, "A", 64, 4096, 0, env=ucx)
    for seed in range(5):
        peer = spawn(BlockPeer, "B", 64, 4096, 0, env=ucx)
        peer.call("label", seed)
        survivor.call("add", "b", peer.call("address"))
        assert survivor.call("wait", survivor.call("read", "b", [1, 2], [4, 3])) == "done"
        assert survivor.call("digest_matches", [1, 2], seed, [4, 3])
        peer.kill()
    assert survivor.close() == 0


def test_cancelled_and_removed_transfers_write_nothing_after_they_are_over(
    spawn: Callable[..., Child],
) -> None:
    """NIXL calls a running transfer released while its bytes still land; the transport must not."""
    blocks, block_len = 4096, 16384
    reader = spawn(BlockPeer, "A", blocks, block_len, 0, env=TCP)
    peer = spawn(BlockPeer, "B", blocks, block_len, 7, env=TCP)
    reader.call("add", "b", peer.call("address"))
    everything = list(range(blocks))
    for how in ("cancel", "remove"):
        assert reader.call("late_bytes", how, "b", everything) == 0
        reader.call("add", "b", peer.call("address"))
    assert reader.close() == 0
    assert peer.close() == 0


def test_no_thread_and_no_shared_memory_is_left(spawn: Callable[..., Child]) -> None:
    a = spawn(BlockPeer, "A", 16, 4096, 0)
    b = spawn(BlockPeer, "B", 16, 4096, 0)
    meet(a, b)
    assert a.call("wait", a.call("read", "b", [0], [1])) == "done"
    before = a.call("threads")
    a.call("close_transport")
    assert a.call("threads") < before
    assert a.close() == 0
    assert b.close() == 0
