"""The course of a run, seen from the process that coordinates it."""

from __future__ import annotations

import functools
import multiprocessing as mp
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvnixl.bench.overhead import measure_overheads
from kvnixl.bench.plan import Plan, Row, block_lists, row_rng
from kvnixl.bench.processes import Child, Factory, interrupts_held
from kvnixl.bench.results import Results
from kvnixl.bench.workers import BytePlace, Connected, Producer, Reader, WrongRead

# A row is visited at least so often, unless the requests are too slow for that, so that what
# disturbs the machine for a while disturbs all rows.
VISITS_PER_ROW = 5
# A visit of the requests at once takes as long as so many others: a turn of theirs is a long one.
BURST_SHARE = 3


class Listener:
    """What a run tells while it goes on. The methods do nothing."""

    def connected(self, connected: Connected) -> None:
        """The two processes have met."""

    def measuring(self, done: float, row: Row) -> None:
        """How much is done, 0 to 1, and what comes next."""

    def measuring_overhead(self) -> None:
        """The two processes have ended; kvnixl's own work comes next."""


@contextmanager
def _children(plan: Plan) -> Iterator[tuple[Child, Child]]:
    children: list[Child] = []
    ends = mp.get_context("spawn").Pipe()
    try:
        factories: list[tuple[str, Factory]] = [
            ("producer", functools.partial(Producer, plan.shape, plan.seed, ends[0])),
            ("reader", functools.partial(Reader, plan.shape, plan.seed, ends[1])),
        ]
        for role, factory in factories:
            children.append(Child(role, factory))
        for end in ends:
            end.close()  # only the children have them, so that they end with the children
        for child in children:
            child.wait_ready()
        yield children[0], children[1]
    finally:
        with interrupts_held():
            # The reader first: it may be in the middle of reading the other one's memory.
            for child in reversed(children):
                child.end()


def run(plan: Plan, listener: Listener) -> Results:
    """Measure.

    Raises:
        ChildError: one of the processes failed or is gone.
    """
    results = Results(plan)
    with _children(plan) as (producer, reader):
        producer.call("fill", 0)
        met: Connected | WrongRead = reader.call("connect", producer.call("export"), 0)
        if isinstance(met, WrongRead):
            results.wrong = met
            return results
        results.connected = met
        listener.connected(met)
        _measure(plan, producer, reader, results, listener.measuring)
        results.peak_memory = {
            child.role: int(child.call("peak_memory")) for child in (producer, reader)
        }
    if results.wrong is None:
        listener.measuring_overhead()
        results.overheads = measure_overheads(plan.overhead)
    return results


def _measure(
    plan: Plan,
    producer: Child,
    reader: Child,
    results: Results,
    progress: Callable[[float, Row], None],
) -> None:
    started = time.monotonic()
    visit_seconds = plan.seconds / (len(plan.rows) + BURST_SHARE) / VISITS_PER_ROW
    burst = plan.burst.row
    limit = plan.requests
    round_number = 0
    unfinished: list[Row] = [*plan.rows, burst]
    while unfinished:
        round_number += 1
        # Every round has a content of its own.
        wrong = _place_for_wrong_byte(plan) if plan.inject_wrong_byte else None
        producer.call("fill", round_number, wrong)
        for row in unfinished:
            elapsed = time.monotonic() - started
            if round_number > 1 and elapsed >= plan.seconds:
                return
            progress(_share_done(plan, results, elapsed), row)
            turns_before = results.turns_of(row)
            wanted = None if limit is None else limit - len(turns_before)
            seconds = visit_seconds * (BURST_SHARE if row == burst else 1)
            turns = reader.call("measure", row, round_number, seconds, wanted)
            results.seconds = time.monotonic() - started
            if isinstance(turns, WrongRead):
                results.wrong = turns
                return
            turns_before += turns
        unfinished = [
            row for row in unfinished if limit is None or len(results.turns_of(row)) < limit
        ]


def _share_done(plan: Plan, results: Results, elapsed: float) -> float:
    share = elapsed / plan.seconds
    if plan.requests is not None:
        wanted = [*plan.rows, plan.burst.row]
        done = sum(len(results.turns_of(row)) for row in wanted)
        share = max(share, done / (plan.requests * len(wanted)))
    return min(share, 1.0)


def _place_for_wrong_byte(plan: Plan) -> BytePlace:
    """A byte that the first request will read."""
    row = plan.rows[0]
    _, remote = block_lists(row, plan.shape.blocks, row_rng(plan.seed, row))
    rng = random.Random(plan.seed)
    return BytePlace(
        rng.randrange(plan.shape.layers),
        rng.choice(remote),
        rng.randrange(plan.shape.block_bytes),
    )
