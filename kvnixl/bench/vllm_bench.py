"""The course of ``python -m kvnixl.bench vllm``: vLLM with kvnixl, and with its own connector.

Each connector has a pair of engines (`kvnixl.bench.vllm_engines`), one that computes prompts (P)
and one that continues from them (D). The two pairs take turns with the same prompts, and the one
whose turn it is not stands still, so that it costs the other nothing.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from kvnixl.bench.results import Ratio, ratio_of
from kvnixl.bench.vllm_engines import (
    ENGINE_ARGUMENTS,
    Engine,
    EngineSpec,
    EngineTemplate,
    Generated,
    JsonObject,
    Pair,
    prefill_params,
)
from kvnixl.bench.vllm_model import TinyModel, make_model

Connector: TypeAlias = Literal["kvnixl", "stock"]
Phase: TypeAlias = Literal["warm", "new peer", "churned"]

CONNECTORS: Mapping[Connector, JsonObject] = {
    "kvnixl": {
        "kv_connector": "KvNixlConnector",
        "kv_connector_module_path": "kvnixl.vllm",
        "kv_role": "kv_both",
        # A read that fails must show, not be computed again.
        "kv_load_failure_policy": "fail",
    },
    "stock": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
}

TESTED_VLLM = "0.32.0"
BLOCK_TOKENS = int(ENGINE_ARGUMENTS["block_size"])
MODEL = TinyModel()
PROMPT_TOKENS = (33, 200, 1900)
NEW_PEER_TOKENS = 200
# Before each turn of a pair: what it has in the processor's caches is the other pair's.
WARM_UP_TOKENS = 33
ANSWER_TOKENS = 8
# How many requests are under way at once while block pools are churned.
CONCURRENCY = 8
SETTLE_S = 0.5


@dataclass(frozen=True)
class Course:
    """How much is measured.

    Attributes:
        turns: of each pair with the warm requests; each has one prompt of each length.
        new_peers: pairs that are started for each connector.
        idle_s: seconds for which the CPU time of idle engines is taken.
        churn_requests: requests that churn the block pools.
        churned_turns: as `turns`, after that.
        seed: of all prompts.
    """

    turns: int = 24
    new_peers: int = 6
    idle_s: float = 4.0
    churn_requests: int = 100
    churned_turns: int = 10
    seed: int = 0


QUICK = Course(turns=6, new_peers=2, idle_s=2.0, churn_requests=24, churned_turns=3)


@dataclass(frozen=True)
class Row:
    """Requests of one length: ``warm``; the first one between two new engines; ``churned``: after
    other requests have shuffled the block pools."""

    phase: Phase
    tokens: int

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)

    @property
    def block_pairs(self) -> int:
        """Descriptors before merging: one for each block of each layer."""
        return self.blocks * MODEL.num_layers


@dataclass(frozen=True)
class Reads:
    """What the connector of a decoding engine reported.

    Attributes:
        results: how reads ended -> how many; the stock connector only knows ``unverified`` and
            ``failed``.
        num_bytes, num_descs: of all of them; descriptors after merging.
    """

    results: Mapping[str, int]
    num_bytes: int
    num_descs: int


@dataclass(frozen=True)
class Sample:
    """One request that went from P to D.

    Attributes:
        first_token_s: from D's receiving the request to its first token.
        freed_s: from the same moment until P's request held no block any more.
        token_ids: P's token, then D's.
        from_peer: whether the KV cache of the whole prompt came from P.
        reads: what D's connector did for it.
    """

    first_token_s: float
    freed_s: float
    token_ids: tuple[int, ...]
    from_peer: bool
    reads: Reads


Turn: TypeAlias = dict[Connector, Sample]


@dataclass
class Results:
    """What a run brought.

    Attributes:
        turns: each holds one sample per connector, of the same prompt.
        idle_cores: CPU time of an idle engine by wall-clock time, one for P and one for D.
        results: how all reads of a connector ended, warm-ups and churn included.
        requests: handed over with each connector, all told.
        different: prompts, by their number of tokens, for which the pairs gave other tokens.
        not_from_peer: requests whose prompt D did not read from P, by connector.
    """

    course: Course
    turns: dict[Row, list[Turn]] = field(default_factory=dict)
    idle_cores: dict[Connector, tuple[float, float]] = field(default_factory=dict)
    results: dict[Connector, Counter[str]] = field(
        default_factory=lambda: {connector: Counter() for connector in CONNECTORS}
    )
    requests: Counter[Connector] = field(default_factory=Counter)
    different: list[int] = field(default_factory=list)
    not_from_peer: Counter[Connector] = field(default_factory=Counter)
    seconds: float = 0.0

    def samples(self, row: Row, connector: Connector) -> list[Sample]:
        return [turn[connector] for turn in self.turns[row]]

    def first_token_s(self, row: Row, connector: Connector) -> float:
        """Median."""
        return statistics.median(s.first_token_s for s in self.samples(row, connector))

    def freed_s(self, row: Row, connector: Connector) -> float:
        """Median."""
        return statistics.median(s.freed_s for s in self.samples(row, connector))

    def num_bytes(self, row: Row, connector: Connector) -> float:
        """Of a request, median."""
        return statistics.median(s.reads.num_bytes for s in self.samples(row, connector))

    def num_descs(self, row: Row, connector: Connector) -> float:
        """Of a request, after merging, mean."""
        return statistics.fmean(s.reads.num_descs for s in self.samples(row, connector))

    def first_token_ratio(self, row: Row) -> Ratio:
        """kvnixl's time by stock's."""
        return ratio_of(
            [(t["kvnixl"].first_token_s, t["stock"].first_token_s) for t in self.turns[row]]
        )

    def freed_ratio(self, row: Row) -> Ratio:
        """kvnixl's time by stock's."""
        return ratio_of([(t["kvnixl"].freed_s, t["stock"].freed_s) for t in self.turns[row]])

    @property
    def bytes_equal(self) -> bool:
        """Whether both connectors moved the same bytes for each prompt."""
        return all(
            turn["kvnixl"].reads.num_bytes == turn["stock"].reads.num_bytes
            for turns in self.turns.values()
            for turn in turns
        )

    @property
    def problems(self) -> list[str]:
        """Why the figures must not be believed; nothing of this is about time."""
        found = []
        if self.different:
            found.append(
                f"the two pairs gave different tokens for {len(self.different)} prompts, of "
                f"{sorted(self.different)} tokens"
            )
        for connector, count in self.not_from_peer.items():
            found.append(
                f"{connector}: {count} of {self.requests[connector]} prompts were not read from "
                "the other engine"
            )
        reads, requests = self.results["kvnixl"], self.requests["kvnixl"]
        if reads != Counter(verified=requests):
            found.append(
                f"kvnixl: of {requests} reads {reads['verified']} were verified (reported: "
                f"{dict(reads)})"
            )
        return found


class Listener:
    """What a run tells while it goes on. The methods do nothing."""

    def doing(self, what: str) -> None:
        """What comes next."""


def read_stats(connector: Connector, stats: Iterable[JsonObject]) -> Reads:
    """Add up what a decoding engine's connector reported in several steps."""
    results: Counter[str] = Counter()
    num_bytes = num_descs = 0
    for step in stats:
        if connector == "kvnixl":
            for result, count in step["counters"].get("reads_total", {}).items():
                results[result] += count
            num_bytes += step["counters"].get("read_bytes_total", {}).get("", 0)
            num_descs += int(sum(step["samples"].get("read_descriptors", {}).get("", [])))
        else:
            results["unverified"] += len(step["bytes_transferred"])
            results["failed"] += sum(step["num_failed_transfers"])
            num_bytes += sum(step["bytes_transferred"])
            num_descs += sum(step["num_descriptors"])
    return Reads(+results, num_bytes, num_descs)


def run(course: Course, listener: Listener) -> Results:
    """Measure.

    Raises:
        EngineError: an engine could not be started, failed, or did not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="kvnixl-bench-") as work:
        listener.doing("importing vLLM")
        with EngineTemplate(Path(work)) as template:
            model = make_model(Path(work), MODEL)
            return Session(course, listener, template, model).run()


class Session:
    """One run, with engines that are forks of `template`."""

    def __init__(
        self, course: Course, listener: Listener, template: EngineTemplate, model: Path
    ) -> None:
        self._course = course
        self._listener = listener
        self._template = template
        self._model = model
        self._random = random.Random(course.seed)
        self._pairs: dict[Connector, Pair] = {}
        self._results = Results(course)

    def run(self) -> Results:
        """Measure.

        Raises:
            EngineError: see `run`.
        """
        started = time.monotonic()
        course = self._course
        try:
            self._meet_new_peers()
            self._take_turns("warm", course.turns)
            self._rest()
            self._churn()
            self._take_turns("churned", course.churned_turns)
        finally:
            for pair in self._pairs.values():
                _close(pair)
        self._results.seconds = time.monotonic() - started
        return self._results

    # --- phases ---

    def _meet_new_peers(self) -> None:
        row = Row("new peer", NEW_PEER_TOKENS)
        self._results.turns[row] = []
        for number in range(self._course.new_peers):
            self._listener.doing(f"new peers: {number + 1} of {self._course.new_peers}")
            prompt = self._prompt(row.tokens)
            turn: Turn = {}
            for connector in self._order(number):
                pair = self._start_pair(connector)
                turn[connector] = self._measure(connector, pair, prompt)
                if number + 1 < self._course.new_peers:
                    _close(pair)
                else:
                    self._pairs[connector] = pair
                    _freeze(pair)
            self._add(row, turn)

    def _start_pair(self, connector: Connector) -> Pair:
        """Two engines that have computed something, but have not met."""
        engines = [
            self._template.launch(
                EngineSpec(self._model, dict(CONNECTORS[connector]), name=f"{connector}-{role}")
            )
            for role in ("p", "d")
        ]
        for engine in engines:
            engine.wait_ready()
        warm_up = self._prompt(NEW_PEER_TOKENS)
        for engine in engines:
            engine.generate(warm_up, ANSWER_TOKENS)
            engine.wait_blocks_in_use(0)
        time.sleep(SETTLE_S)
        return Pair(*engines)

    def _take_turns(self, phase: Phase, turns: int) -> None:
        rows = [Row(phase, tokens) for tokens in PROMPT_TOKENS]
        for row in rows:
            self._results.turns[row] = []
        for number in range(turns):
            self._listener.doing(f"{phase} requests: turn {number + 1} of {turns}")
            prompts = {
                row: self._prompt(row.tokens) for row in self._random.sample(rows, len(rows))
            }
            warm_up = self._prompt(WARM_UP_TOKENS)
            made: dict[Row, Turn] = {row: {} for row in rows}
            for connector in self._order(number):
                with self._awake(connector) as pair:
                    self._measure(connector, pair, warm_up)
                    for row, prompt in prompts.items():
                        made[row][connector] = self._measure(connector, pair, prompt)
            for row, turn in made.items():
                self._add(row, turn)

    def _rest(self) -> None:
        for connector in CONNECTORS:
            self._listener.doing(f"CPU time of idle engines: {connector}")
            with self._awake(connector) as pair:
                time.sleep(SETTLE_S)
                engines = (pair.prefill, pair.decode)
                before, started = [_cpu_s(engine) for engine in engines], time.monotonic()
                time.sleep(self._course.idle_s)
                wall = time.monotonic() - started
                p, d = ((_cpu_s(e) - b) / wall for e, b in zip(engines, before, strict=True))
                self._results.idle_cores[connector] = (p, d)

    def _churn(self) -> None:
        """Requests of mixed lengths, several at once, of which some last longer than others."""
        count = self._course.churn_requests
        mixed = [
            # As many short ones as long ones.
            self._prompt(round(2 ** self._random.uniform(5.1, 10.9)))
            for _ in range(count)
        ]
        lengths = [self._random.randrange(2, 3 * ANSWER_TOKENS) for _ in mixed]
        answers: dict[Connector, list[tuple[int, ...]]] = {}
        for connector in CONNECTORS:
            self._listener.doing(f"{count} mixed requests: {connector}")
            answers[connector] = []
            with self._awake(connector) as pair:
                for start in range(0, count, CONCURRENCY):
                    batch = slice(start, start + CONCURRENCY)
                    answers[connector] += self._hand_over_at_once(
                        connector, pair, mixed[batch], lengths[batch]
                    )
                pair.prefill.wait_blocks_in_use(0)
                self._count(connector, read_stats(connector, pair.decode.take_connector_stats()))
        self._results.different += [
            len(prompt)
            for prompt, ours, theirs in zip(mixed, answers["kvnixl"], answers["stock"], strict=True)
            if ours != theirs
        ]

    def _hand_over_at_once(
        self, connector: Connector, pair: Pair, prompts: list[list[int]], lengths: list[int]
    ) -> list[tuple[int, ...]]:
        prefills = [pair.prefill.submit(p, 1, kv_transfer_params=prefill_params()) for p in prompts]
        decodes = [
            pair.decode.submit(
                prompt, length, kv_transfer_params=prefill.result().kv_transfer_params
            )
            for prompt, length, prefill in zip(prompts, lengths, prefills, strict=True)
        ]
        decoded = [decode.result() for decode in decodes]
        for each in decoded:
            self._check_source(connector, each)
        return [each.token_ids for each in decoded]

    # --- one request ---

    def _measure(self, connector: Connector, pair: Pair, prompt: Sequence[int]) -> Sample:
        prefilled = pair.run_prefill(prompt)
        freed = pair.prefill.when_blocks_in_use(0)
        decoded = pair.decode.generate(
            prompt, ANSWER_TOKENS, kv_transfer_params=prefilled.kv_transfer_params
        )
        _, freed_at = freed.result()
        pair.decode.wait_blocks_in_use(0)
        reads = read_stats(connector, pair.decode.take_connector_stats())
        self._count(connector, reads)
        return Sample(
            first_token_s=decoded.seconds_to_first_token,
            freed_s=freed_at - decoded.submitted_at,
            token_ids=(*prefilled.token_ids, *decoded.token_ids),
            from_peer=self._check_source(connector, decoded),
            reads=reads,
        )

    def _check_source(self, connector: Connector, decoded: Generated) -> bool:
        """Whether the KV of the prompt came from the other engine."""
        self._results.requests[connector] += 1
        from_peer = decoded.num_external_tokens == decoded.num_prompt_tokens
        if not from_peer:
            self._results.not_from_peer[connector] += 1
        return from_peer

    def _count(self, connector: Connector, reads: Reads) -> None:
        self._results.results[connector].update(reads.results)

    def _add(self, row: Row, turn: Turn) -> None:
        if turn["kvnixl"].token_ids != turn["stock"].token_ids:
            self._results.different.append(row.tokens)
        self._results.turns[row].append(turn)

    # --- helpers ---

    def _prompt(self, tokens: int) -> list[int]:
        """Another one with each call, so that no prefix cache hides a transfer."""
        return [self._random.randrange(256) for _ in range(tokens)]

    def _order(self, number: int) -> list[Connector]:
        """Each is first in every other turn."""
        order: list[Connector] = list(CONNECTORS)
        return order if number % 2 else order[::-1]

    @contextmanager
    def _awake(self, connector: Connector) -> Iterator[Pair]:
        pair = self._pairs[connector]
        for engine in (pair.prefill, pair.decode):
            engine.thaw()
        yield pair
        _freeze(pair)


def _freeze(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.freeze()


def _close(pair: Pair) -> None:
    pair.prefill.close()
    pair.decode.close()


def _cpu_s(engine: Engine) -> float:
    return engine.usage().cpu_seconds
