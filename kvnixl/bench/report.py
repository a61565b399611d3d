"""What people read: first what runs, then the tables, then what they say."""

from __future__ import annotations

import os
from collections.abc import Sequence

import kvnixl
from kvnixl.bench.machine import cpu_name, package_version, usable_cores
from kvnixl.bench.page import Page
from kvnixl.bench.paths import BURST, KVNIXL, MEMCPY, PLAIN, PLAIN_BURST, VERIFIED
from kvnixl.bench.plan import ORDERS, Plan, Row
from kvnixl.bench.results import Results
from kvnixl.bench.session import Listener
from kvnixl.bench.tables import (
    LEGEND,
    main_table,
    overhead_table,
    pull_table,
    verified_table,
)
from kvnixl.bench.wording import (
    bytes_text,
    count_text,
    listed,
    seconds_text,
    three_digits,
    times_text,
)
from kvnixl.bench.workers import Connected


def conclusions(results: Results) -> list[str]:
    """What the figures say, and nothing that they do not."""
    transfers, num_bytes = results.checked
    checked = (
        f"All {transfers:,} transfers ({num_bytes / 1e9:,.1f} GB) were checked: every byte was the "
        "one that the producer had written."
    )
    sentences = [
        checked,
        _comparison(results),
        *_memcpy(results),
        *_lease_check(results),
    ]
    met = results.connected
    if met is not None:
        sentences.append(
            "The first transfer, one block with the connection set up inside it, took "
            f"{seconds_text(met.first_s)}; it is in no other figure. Preparing the descriptor "
            f"lists, once per peer, took {seconds_text(met.prepare_s[KVNIXL])}, with a tuple per "
            f"block {seconds_text(met.prepare_s[PLAIN])}."
        )
    return sentences


def _comparison(results: Results) -> str:
    """kvnixl against the plain API: the rows of which the run tells something."""
    clear: dict[bool, dict[str, list[tuple[Row, float]]]] = {True: {}, False: {}}
    for row in results.turns:
        ratio = results.ratio(row, PLAIN, KVNIXL)
        if ratio is not None and ratio.is_clear:
            faster = ratio.of_medians > 1
            clear[faster].setdefault(row.order, []).append((row, ratio.of_medians))
    sentences = []
    for faster, comparison in ((True, "faster"), (False, "slower")):
        lists = [_clear_rows(order, rows) for order, rows in clear[faster].items()]
        if lists:
            sentences.append(f"kvnixl was {comparison} than NIXL's plain API on {listed(lists)}.")
    unclear = len(results.turns) - sum(
        len(rows) for orders in clear.values() for rows in orders.values()
    )
    if unclear:
        sentences.append(
            f"{unclear} of {count_text(len(results.turns), 'row')} show no clear difference "
            "between kvnixl and NIXL's plain API (~)."
        )
    return " ".join(sentences)


def _clear_rows(order: str, rows: list[tuple[Row, float]]) -> str:
    """``"reversed lists of 128 and 1,000 tokens (1.25x to 2.50x)"``."""
    lengths = listed([f"{row.tokens:,}" for row, _ in rows])
    low, high = min(ratio for _, ratio in rows), max(ratio for _, ratio in rows)
    ratios = times_text(low) if len(rows) == 1 else f"{times_text(low)} to {times_text(high)}"
    return f"{order} lists of {lengths} tokens ({ratios})"


def _memcpy(results: Results) -> list[str]:
    rows = [row for row, turns in results.turns.items() if turns and row.order == "unfragmented"]
    for row in reversed(rows):
        ours, memcpy = results.figures(row, KVNIXL), results.figures(row, MEMCPY)
        if ours and memcpy:
            return [
                (
                    f"Unfragmented requests of {count_text(row.tokens, 'token')} moved at "
                    f"{ours.gb_per_s:.1f} GB/s; one core copies as much at "
                    f"{memcpy.gb_per_s:.1f} GB/s."
                )
            ]
    return []


def _lease_check(results: Results) -> list[str]:
    """At the shortest requests, which feel it most."""
    for row in results.turns:
        ratio = results.ratio(row, VERIFIED, KVNIXL)
        verified, bare = results.figures(row, VERIFIED), results.figures(row, KVNIXL)
        if ratio is None or verified is None or bare is None:
            continue
        if not ratio.is_clear or ratio.of_medians < 1:
            break
        added = seconds_text(verified.p50_s - bare.p50_s)
        return [
            (
                f"Proving that no block was reused while it was read added {added} to the "
                f"{seconds_text(bare.p50_s)} of a request of {count_text(row.tokens, 'token')}."
            )
        ]
    return []


def _burst(results: Results) -> list[str]:
    """Requests at once against one transfer of all their bytes."""
    burst = results.plan.burst
    ratio = results.ratio(burst.row, PLAIN, BURST)
    ours, plain = results.figures(burst.row, BURST), results.figures(burst.row, PLAIN)
    each = results.figures(burst.row, PLAIN_BURST)
    if ratio is None or ours is None or plain is None or each is None:
        return []
    size = burst.request_blocks * results.plan.shape.request_block_bytes
    return [
        (
            f"{count_text(burst.requests, 'request')} of {bytes_text(size)} at once, from the "
            f"first fetch to the last verified outcome: {three_digits(ours.gb_per_s)} GB/s, "
            f"{'' if ratio.is_clear else '~'}{ratio.of_medians:.0%} of one transfer of the same "
            f"bytes with NIXL's plain API ({three_digits(plain.gb_per_s)} GB/s). With a transfer "
            f"for each request, unverified, the plain API moves {three_digits(each.gb_per_s)} GB/s."
        )
    ]


class Screen(Page, Listener):
    """What a run looks like."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("starting the two processes")
        self._plan = plan

    def start(self) -> None:
        """Say what is about to run."""
        plan, shape = self._plan, self._plan.shape
        self.line(
            f"kvnixl {kvnixl.__version__}: one process reads KV blocks of another through NIXL",
            bold=True,
        )
        self.line("")
        model = f"{plan.model.name}: {plan.model.describe()}"
        self._fact("model", model + (f" ({plan.model.note})" if plan.model.note else ""))
        self._fact(
            "cache",
            f"{shape.blocks:,} blocks of {count_text(shape.block_size, 'token')} on each side, "
            f"{bytes_text(shape.bytes_per_side)}; a block takes {bytes_text(shape.block_bytes)} "
            f"x {count_text(plan.model.layers, 'layer')}",
        )
        lengths = sorted({row.tokens for row in plan.rows})
        requests = f"{_counts(lengths)} tokens"
        if plan.too_long:
            requests += f"; too long for this cache: {_counts(plan.too_long)} (--blocks N)"
        self._fact("requests", requests)
        self._fact(
            "compared",
            f"kvnixl, NIXL's plain API and memcpy, taking turns for {plan.seconds:g} s; every byte "
            "is checked",
        )
        self._fact("machine", f"{count_text(usable_cores(), 'core')}, {cpu_name()}")
        self._flush()

    def connected(self, connected: Connected) -> None:
        ucx = f"UCX {connected.ucx}" if connected.ucx else "UCX"
        over = f" over {listed(connected.transports)}" if connected.transports else ""
        setting = os.environ.get("UCX_TLS")
        chosen = f"UCX_TLS={setting}" if setting else "UCX's choice: UCX_TLS is not set"
        nixl = package_version("nixl") or ""
        self._fact("transport", f"NIXL {nixl}, {ucx}{over} ({chosen})")
        self.line("")
        self._flush()

    def measuring(self, done: float, row: Row) -> None:
        self._progress_to(f"measuring: {row}", total=1.0, completed=done)

    def measuring_overhead(self) -> None:
        self._progress_to("measuring: kvnixl's own work")

    def show(self, results: Results) -> None:
        """The tables and what they say."""
        self._show_table(main_table(results))
        self.line("")
        for order, meaning in ORDERS.items():
            if any(row.order == order for row in self._plan.rows):
                self._fact(order, meaning, dim=True)
        for label, meaning in LEGEND.items():
            self._fact(label, meaning, dim=True)
        self.line("")
        verified = verified_table(results)
        if verified.rows:
            self.line("Unfragmented requests, without and with the proof that no block was reused:")
            self.line("")
            self._show_table(verified)
            self.line("")
        pulled = pull_table(results)
        if pulled.rows:
            self.line("The whole pull path, from the offer to the verified outcome:")
            self.line("")
            self._show_table(pulled)
            self.line("")
            self._fact("block read", "kvnixl in the first table", dim=True)
            self._fact(
                "pull path",
                "EmbeddedProducer.offer, and Reader.fetch to the verified outcome; how the "
                "reference gets from one to the other is the server's matter and not in it",
                dim=True,
            )
            self.line("")
        for sentence in _burst(results):
            for line in self._wrap(sentence):
                self.line(line)
            self.line("")
        overheads = overhead_table(results)
        if overheads.rows:
            self.line("What kvnixl itself costs, with NIXL's calls replaced by empty ones:")
            self.line("")
            self._show_table(overheads)
            self.line("")
            self._fact("request", "Reader.fetch to the verified outcome, CPU time", dim=True)
            self._fact("idle step", "step() with nothing to do, CPU time", dim=True)
            self.line("")
        for sentence in conclusions(results):
            for line in self._wrap(sentence):
                self.line(line)
        self._flush()


def _counts(values: Sequence[int]) -> str:
    return listed([f"{value:,}" for value in values])
