"""The lease of one request is never accepted for another, whatever happens when.

`lease_world.World` is driven by hypothesis, which can shrink what it finds, and by seeded dice,
which are faster. The last tests break the protocol on purpose and expect that the world notices;
``scripts/mutation_check.py`` does the same to the sources.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests import lease_world
from tests.lease_world import ForeignBytesError, World

NUM_SEEDS = 100
NUM_OPERATIONS = 300


class LeaseMachine(RuleBasedStateMachine):
    """One rule per operation of the world; what an operation leaves open is drawn too."""

    world: World | None = None

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng: random.Random) -> None:
        self.world = World(lambda _label, n: rng.randrange(n))

    @rule(op=st.sampled_from(lease_world.OPERATIONS))
    def operate(self, op: Callable[[World], None]) -> None:
        assert self.world is not None
        op(self.world)

    def teardown(self) -> None:
        if self.world is not None:
            try:
                self.world.finish()
            finally:
                self.world.close()


def test_no_foreign_lease_is_accepted_state_machine() -> None:
    run_state_machine_as_test(
        LeaseMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def dice(seed: int) -> lease_world.Chooser:
    rng = random.Random(seed)
    return lambda _label, n: rng.randrange(n)


def test_no_foreign_lease_is_accepted_long_runs() -> None:
    accepted = caught = 0
    for seed in range(NUM_SEEDS):
        world = lease_world.run(dice(seed), NUM_OPERATIONS)
        accepted += world.accepted
        caught += world.caught
    assert accepted >= NUM_SEEDS, "hardly any read was accepted: the test proves little"
    assert caught >= NUM_SEEDS, "hardly any race was caught: the test proves little"


# --- broken on purpose --------------------------------------------------------------------------


class Table:
    """A `CheckTable` to be broken."""

    def __init__(self, table: Any, words: npt.NDArray[np.int64]) -> None:
        self.table = table
        self.words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


class UnpoisonedTable(Table):
    def step(self, *args: Any) -> Any:
        before = self.words.copy()
        reads = self.table.step(*args)
        for read in reads:
            self.words[read.cells] = before[read.cells]
        return reads


class HalfTable(Table):
    """Compares the low halves only: the high ones are made equal before."""

    LOW = 2**32 - 1

    def __init__(self, table: Any, words: npt.NDArray[np.int64]) -> None:
        super().__init__(table, words)
        self.expected: dict[int, int] = {}

    def check_xfer_state(self, handle: Any) -> Any:
        state = self.agent.check_xfer_state(handle)
        for cell, nonce in self.expected.items():
            self.words[cell] = int(self.words[cell]) & self.LOW | nonce & ~self.LOW
        return state

    def release_xfer_handle(self, handle: Any) -> None:
        self.agent.release_xfer_handle(handle)

    def step(self, agent: Any, *args: Any) -> Any:
        self.agent = agent
        reads = self.table.step(self, *args)
        for read in reads:
            self.expected |= {int(cell): ~int(self.words[cell]) for cell in read.cells}
        return reads


class EarlyTable(Table):
    """Reads the slots together with the blocks; the results wait until the blocks are there."""

    active = True

    def __init__(self, table: Any, words: npt.NDArray[np.int64]) -> None:
        super().__init__(table, words)
        self.begun: list[str] = []
        self.held: set[str] = set()
        self.done: set[str] = set()

    def add_checks(self, req_id: str, *args: Any) -> None:
        self.table.add_checks(req_id, *args)
        self.begun.append(req_id)

    def discard(self, req_id: str) -> None:
        self.table.discard(req_id)
        self.held.discard(req_id)
        self.done.discard(req_id)

    def step(
        self,
        agent: Any,
        reads_done: Any,
        now: float,
        timeout: float,
        verified: set[str],
        failed: dict[str, str],
    ) -> Any:
        self.done |= set(reads_done)
        reads = self.table.step(agent, self.begun, now, timeout, self.held, failed)
        self.begun = []
        # What fails before its blocks are there is of no interest here.
        for req_id in [r for r in failed if r not in self.done]:
            del failed[req_id]
        verified |= self.held & self.done
        self.held -= verified
        return reads


def no_fence(self: World) -> None:
    """A fence that orders nothing."""


def the_world_notices(wrap_table: lease_world.WrapTable | None = None) -> None:
    for seed in range(10 * NUM_SEEDS):
        try:
            lease_world.run(dice(seed), NUM_OPERATIONS, wrap_table)
        except ForeignBytesError:
            return
        except AssertionError:
            continue  # the broken verifier also loses requests
    pytest.fail("a broken protocol was not noticed")


def test_a_missing_fence_before_the_free_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "fence", no_fence)
    the_world_notices()


@pytest.mark.parametrize("broken", [UnpoisonedTable, HalfTable, EarlyTable])
def test_a_broken_verifier_is_noticed(broken: type[Table]) -> None:
    the_world_notices(broken)
