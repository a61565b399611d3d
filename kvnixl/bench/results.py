"""The figures of a run, and the JSON document of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import kvnixl
from kvnixl.bench.machine import machine_facts
from kvnixl.bench.overhead import Overhead
from kvnixl.bench.paths import (
    BURST,
    KVNIXL,
    MEMCPY,
    PLAIN,
    PLAIN_BURST,
    PULL,
    VERIFIED,
    Sample,
)
from kvnixl.bench.plan import ORDERS, Plan, Row
from kvnixl.bench.workers import Connected, Turn, WrongRead


@dataclass(frozen=True)
class Figures:
    """One row on one path.

    Attributes:
        gb_per_s: bytes of a request by the median latency; 1 GB is 10**9 bytes.
        p99_s: with fewer than 100 requests, the slowest one.
        descs: descriptors after merging, median; 0: not known.
    """

    requests: int
    bytes: int
    gb_per_s: float
    p50_s: float
    p99_s: float
    descs: int


@dataclass(frozen=True)
class Ratio:
    """How many times as long one path takes as another.

    Attributes:
        of_medians: the ratio of the median latencies.
        low, high: quartiles of the ratios inside the single turns.
        turns: how many there were.
        longer: in how many of them the first path took longer.
    """

    of_medians: float
    low: float
    high: float
    turns: int
    longer: int

    @property
    def is_clear(self) -> bool:
        """Whether the run tells which path is faster: by 5 % at least, and in so many turns that a
        fair coin would agree as often in less than one run of twenty (sign test)."""
        if self.of_medians > 1.05:
            agreeing = self.longer
        elif self.of_medians < 0.95:
            agreeing = self.turns - self.longer
        else:
            return False
        # The normal approximation with its continuity correction; never true below six turns.
        return agreeing - 0.5 - self.turns / 2 > 1.96 * math.sqrt(self.turns) / 2


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio of the first seconds to the second ones, of which each turn has a pair."""
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    return Ratio(
        statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs),
        ratios[quarter],
        ratios[-1 - quarter],
        turns=len(ratios),
        longer=sum(ratio > 1 for ratio in ratios),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below ``percent`` per cent of them."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


class Results:
    """What a run brought.

    Attributes:
        turns: per row what was measured; each turn holds one sample per path.
        burst_turns: the same of the requests at once.
        overheads: kvnixl's own work.
        connected: how the processes met; ``None`` when it did not come to that.
        wrong: the first wrong byte. There are no figures to trust then.
        seconds: how long the measurement took.
        peak_memory: the largest resident size of each process, bytes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.turns: dict[Row, list[Turn]] = {row: [] for row in plan.rows}
        self.burst_turns: list[Turn] = []
        self.overheads: list[Overhead] = []
        self.connected: Connected | None = None
        self.wrong: WrongRead | None = None
        self.seconds = 0.0
        self.peak_memory: dict[str, int] = {}

    def turns_of(self, row: Row) -> list[Turn]:
        """What was measured of a row, or of the burst's."""
        return self.burst_turns if row == self.plan.burst.row else self.turns[row]

    def request_bytes(self, row: Row) -> int:
        return row.blocks * self.plan.shape.request_block_bytes

    def descs_before(self, row: Row) -> int:
        """Block pairs of a request: one descriptor each before merging."""
        return row.blocks * self.plan.shape.layers

    def samples(self, row: Row, path: str) -> list[Sample]:
        return [turn[path] for turn in self.turns_of(row) if path in turn]

    def figures(self, row: Row, path: str) -> Figures | None:
        """``None`` when the row was not measured on that path."""
        samples = self.samples(row, path)
        if not samples:
            return None
        latencies = [sample.seconds for sample in samples]
        median = statistics.median(latencies)
        num_bytes = self.request_bytes(row)
        return Figures(
            requests=len(samples),
            bytes=num_bytes,
            gb_per_s=num_bytes / median / 1e9,
            p50_s=median,
            p99_s=percentile(latencies, 99),
            descs=int(statistics.median(sample.descs for sample in samples)),
        )

    def ratio(self, row: Row, path: str, base: str) -> Ratio | None:
        """How many times as long ``path`` takes as ``base``."""
        pairs = [
            (turn[path].seconds, turn[base].seconds)
            for turn in self.turns_of(row)
            if path in turn and base in turn
        ]
        return ratio_of(pairs) if pairs else None

    @property
    def checked(self) -> tuple[int, int]:
        """Transfers and bytes that were checked, without those of the start."""
        transfers = num_bytes = 0
        for row in (*self.turns, self.plan.burst.row):
            turns = self.turns_of(row)
            count = sum(len(turn) - (MEMCPY in turn) for turn in turns)
            transfers += count
            num_bytes += count * self.request_bytes(row)
        return transfers, num_bytes


_UNITS = {
    "*_s": "seconds",
    "*_bytes": "bytes",
    "gb_per_s": "10**9 bytes per second, at the median latency",
    "ratio.of_medians": "median latency of the first path divided by that of the second",
    "ratio.low, ratio.high": "quartiles of that ratio inside the single turns",
}


def document(results: Results, started: str) -> dict[str, Any]:
    """Everything that was measured, with units and the facts of the machine.

    Args:
        started: when the run began, ISO 8601.
    """
    plan, met = results.plan, results.connected
    transfers, num_bytes = results.checked
    return {
        "kvnixl": kvnixl.__version__,
        "started": started,
        "units": _UNITS,
        "machine": machine_facts(met),
        "cache": {
            "model": asdict(plan.model),
            "layers": plan.shape.layers,
            "block_size_tokens": plan.shape.block_size,
            "blocks": plan.shape.blocks,
            "block_bytes": plan.shape.block_bytes,
            "block_of_all_layers_bytes": plan.shape.request_block_bytes,
            "side_bytes": plan.shape.bytes_per_side,
        },
        "seed": plan.seed,
        "wanted_s": plan.seconds,
        "measured_s": results.seconds,
        "tokens_that_do_not_fit": plan.too_long,
        "peak_memory_bytes": results.peak_memory,
        "every_byte_right": results.wrong is None,
        "wrong_byte": None if results.wrong is None else asdict(results.wrong),
        "checked_transfers": transfers,
        "checked_bytes": num_bytes,
        "first_transfer_s": None if met is None else met.first_s,
        "prepare_s": None if met is None else met.prepare_s,
        "orders": ORDERS,
        "rows": [_row_document(results, row) for row in plan.rows],
        "burst": {
            "requests": plan.burst.requests,
            "blocks_per_request": plan.burst.request_blocks,
            **_row_document(results, plan.burst.row),
        },
        "overheads": [asdict(overhead) for overhead in results.overheads],
    }


_COMPARED = (
    (PLAIN, KVNIXL),
    (VERIFIED, KVNIXL),
    (PULL, KVNIXL),
    (BURST, PLAIN),
    (BURST, PLAIN_BURST),
    (KVNIXL, MEMCPY),
)


def _row_document(results: Results, row: Row) -> dict[str, Any]:
    paths = {}
    for path in (KVNIXL, PLAIN, VERIFIED, PULL, BURST, PLAIN_BURST, MEMCPY):
        figures = results.figures(row, path)
        if figures is not None:
            paths[path] = asdict(figures)
            del paths[path]["bytes"]
            if path == MEMCPY:
                del paths[path]["descs"]
    ratios = {}
    for path, base in _COMPARED:
        ratio = results.ratio(row, path, base)
        if ratio is not None:
            ratios[f"{path}/{base}"] = asdict(ratio)
    return {
        **asdict(row),
        "request_bytes": results.request_bytes(row),
        "descs_before": results.descs_before(row),
        "paths": paths,
        "ratios": ratios,
    }
