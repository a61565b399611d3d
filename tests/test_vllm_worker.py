"""Both halves of the vLLM connector under vLLM's real scheduler, and the worker's half by itself.

`World` has a prefill and a decode engine (`tests.vllm_world`) and lets everything happen to their
requests: chunked prefill, preemption, aborts at any point, lost, repeated and tampered parameters,
leases that expire, restarts. The engines judge every step: vLLM asserts that it knows what is
reported, a forward pass checks the KV it reads, and no block is written while a lease promises it.
``KVNIXL_LONG=1`` runs far more.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

vllm_world = pytest.importorskip("tests.vllm_world", reason="vLLM is not installed")

from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

from kvnixl.compat import load_factors  # noqa: E402
from kvnixl.errors import KvNixlError  # noqa: E402
from kvnixl.fake import Plan, nixlBackendError  # noqa: E402
from kvnixl.leases import ProducerLeaseSlots  # noqa: E402
from kvnixl.outcomes import FailureCause, ReadOutcome, Stage  # noqa: E402
from kvnixl.vllm import scheduler as scheduler_module  # noqa: E402
from kvnixl.vllm import worker as worker_module  # noqa: E402
from kvnixl.vllm.messages import KvNixlWorkerMetadata, ReadRequest  # noqa: E402
from kvnixl.vllm.scheduler import KvNixlScheduler  # noqa: E402
from kvnixl.vllm.worker import KvNixlWorker, describe  # noqa: E402
from tests.machines import machine_settings, run_seeds  # noqa: E402
from tests.vllm_world import Engine, Net, joined, make_request  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def _joined() -> Iterator[None]:
    with joined():
        yield


LONG = os.environ.get("KVNIXL_LONG") == "1"
NUM_SEEDS = 400 if LONG else 14
NUM_OPERATIONS = 300
NUM_EXAMPLES = 400 if LONG else 8
STEPS_PER_EXAMPLE = 120 if LONG else 50
TEST_TIMEOUT_S = 3600 if LONG else 120

PRODUCER_PORT, CONSUMER_PORT = 7000, 7001
SECONDS = (0.05, 0.05, 0.5, 0.5, 3.0, 12.0)
OPTIONS = {
    "kv_lease_duration": 10.0,
    "kv_lease_slots": 4,
    "lease_verification": "require",
    "request_timeout": 20.0,
    "read_timeout": 8.0,
    "queue_timeout": 8.0,
    "verify_timeout": 4.0,
    "handshake_timeout": 4.0,
}


class World:
    """One prefill and one decode engine, and what a router does between them.

    Args:
        choose: ``choose(label, n)`` returns a number in ``range(n)``.

    Attributes:
        seen: how often what happened, to tell that a run was worth something.
    """

    def __init__(self, choose: Callable[[str, int], int]) -> None:
        self.choose = lambda label, n: choose(label, n) if n > 1 else 0
        self.net = Net(self.choose)
        self.net.fabric.rule = self.plan_of
        self.settling = False
        self.seen: Counter[str] = Counter()
        self.numbers = 0
        self.prompts: dict[str, list[int]] = {}
        self.references: list[tuple[list[int], dict[str, Any]]] = []
        self.asynchronous = bool(self.choose("async", 2))
        self.policy = ("recompute", "fail")[self.choose("policy", 2)]
        self.tp_sizes = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 1)][self.choose("tp", 5)]
        self.num_blocks = 10 + 4 * self.choose("blocks", 3)
        self.producer = self.start("P")
        self.consumer = self.start("D")

    def start(self, name: str) -> Engine:
        is_producer = name == "P"
        return Engine(
            self.net,
            name,
            PRODUCER_PORT if is_producer else CONSUMER_PORT,
            tp_size=self.tp_sizes[not is_producer],
            asynchronous=self.asynchronous,
            num_blocks=self.num_blocks,
            policy=self.policy,
            options=OPTIONS,
        )

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.producer, self.consumer

    def pick(self, label: str, options: Any) -> Any:
        return options[self.choose(label, len(options))]

    def plan_of(self, transfer: Any) -> Plan:
        del transfer
        if not self.settling and self.choose("fault", 12) == 0:
            return Plan(polls=1, end=nixlBackendError, copied=0.5)
        polls = 1 if self.settling else self.pick("polls", (0, 1, 2, None))
        return Plan(
            polls=polls,
            copy=self.pick("copy", ("spread", "end", "start")),
            piece_bytes=self.pick("piece", (4, None)),
        )

    # --- what may happen ------------------------------------------------------------------------

    def prefill(self) -> None:
        """A request begins at the prefill engine; some prompts begin alike."""
        self.numbers += 1
        shared = list(range(1, 1 + 4 * self.choose("shared", 4)))
        prompt = shared + [1000 + self.numbers] * (1 + self.choose("length", 18))
        req_id = f"p{self.numbers}"
        self.prompts[req_id] = prompt
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        max_tokens = self.pick("max tokens", (1, 1, 1, 4))
        self.producer.add(make_request(req_id, prompt, params, max_tokens))

    def step_producer(self) -> None:
        self.step(self.producer)

    def step_consumer(self) -> None:
        self.step(self.consumer)

    def step(self, engine: Engine) -> None:
        before = engine.num_preempted
        engine.step()
        self.seen["preempted"] += engine.num_preempted - before
        if engine is self.producer:
            for req_id, answer in engine.answers.items():
                self.references.append((self.prompts[req_id], json.loads(json.dumps(answer))))
                self.seen["answers"] += 1
                self.seen["answers without a lease"] += "kvnixl_lease" not in answer
            engine.answers.clear()

    def decode(self) -> None:
        """The router passes on what it has: once, not at all, twice, changed, or mixed up."""
        if not self.references:
            return
        number = self.choose("reference", len(self.references))
        prompt, reference = self.references[number]
        fate = self.choose("fate", 10)
        if fate:
            del self.references[number]
        if fate == 1:
            self.seen["lost"] += 1
            return
        reference = copy.deepcopy(reference)
        if fate == 2:
            self.tamper(reference)
        prompts = [prompt]
        if fate in (3, 4):
            self.seen["mixed up"] += 1
            first = self.choose("first", len(prompt))
            other = prompt[:first] + [2000 + self.numbers] * (1 + self.choose("length", 18))
            # A batch, of which vLLM answers with the first prompt's parameters; or that of another.
            prompts = [prompt, other] if fate == 3 else [other]
        max_tokens = 1 + self.choose("max tokens", 5)
        for prompt in prompts:
            self.numbers += 1
            params = copy.deepcopy(reference)
            self.consumer.add(make_request(f"d{self.numbers}", prompt, params, max_tokens))

    def tamper(self, reference: dict[str, Any]) -> None:
        """What it says is wrong, but not so that other blocks are read in good faith."""
        self.seen["tampered"] += 1
        change, value = self.pick(
            "tamper",
            (
                ("remote_block_ids", [[10**6] * len(reference["remote_block_ids"][0])]),
                ("remote_block_ids", "all"),
                ("remote_block_ids", None),
                ("remote_engine_id", "nobody"),
                ("remote_engine_id", "D"),
                ("remote_engine_id", 7),
                ("remote_port", 9),
                ("remote_port", -1),
                ("remote_host", None),
                ("remote_num_tokens", 1),
                ("remote_request_id", None),
                ("tp_size", 10**9),
                ("pp_size", 2),
                ("kvnixl_lease", "0:1"),
                ("kvnixl_lease", "99:123456"),
                ("kvnixl_lease", None),
                ("do_remote_prefill", "yes"),
            ),
        )
        reference[change] = value

    def plain(self) -> None:
        """A request without parameters, on either side."""
        self.numbers += 1
        prompt = list(range(1, 2 + self.choose("length", 24)))
        engine = self.pick("engine", self.engines)
        engine.add(make_request(f"x{self.numbers}", prompt, None, 1 + self.choose("tokens", 4)))

    def abort(self) -> None:
        engine = self.pick("engine", self.engines)
        requests = sorted(engine.scheduler.requests)
        if requests:
            self.seen["aborts"] += 1
            engine.abort(self.pick("abort", requests), while_running=bool(self.choose("when", 2)))

    def preempt_all(self) -> None:
        engine = self.pick("engine", self.engines)
        if not engine.queue:  # as vLLM's utility calls, between steps
            with suppress(RuntimeError):  # vLLM: other requests hold blocks; these are preempted
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def wait(self) -> None:
        self.net.clock.now += self.pick("seconds", SECONDS)

    def progress(self) -> None:
        self.net.fabric.progress(1 + self.choose("steps", 8))

    def restart_producer(self) -> None:
        if self.choose("really", 3):
            return
        self.seen["restarts"] += 1
        self.producer.kill(self.pick("in flight", ("fail", "hang")))
        self.producer = self.start("P")

    def restart_consumer(self) -> None:
        if self.choose("really", 3):
            return
        self.consumer.kill()
        self.count(self.consumer)
        self.consumer = self.start("D")

    # --- the end --------------------------------------------------------------------------------

    def count(self, engine: Engine) -> None:
        self.seen["received"] += engine.received.total()
        self.seen["failed"] += len(engine.failed)
        self.seen["sent"] += engine.sent.total()

    def finish(self) -> None:
        """No more faults: everything ends by itself and leaves nothing."""
        self.settling = True
        self.net.fabric.clear()
        for _ in range(800):
            if not any(engine.busy for engine in self.engines):
                break
            self.net.clock.now += 0.5
            self.net.fabric.settle()
            for engine in self.engines:
                engine.step()
        for engine in self.engines:
            assert not engine.busy, f"{engine.name} does not come to rest"
            engine.check_empty()
            self.count(engine)
        for engine in reversed(self.engines):
            self.net.fabric.settle()
            engine.shutdown()
        self.net.fabric.assert_clean(*self.producer.agents, *self.consumer.agents)


OPERATIONS: tuple[Callable[[World], None], ...] = (
    *(World.step_producer,) * 16,
    *(World.step_consumer,) * 16,
    *(World.prefill,) * 6,
    *(World.decode,) * 7,
    *(World.progress,) * 4,
    *(World.abort,) * 3,
    *(World.wait,) * 2,
    World.plain,
    World.preempt_all,
    World.restart_producer,
    World.restart_consumer,
)


class ConnectorMachine(RuleBasedStateMachine):
    """One rule: any operation of the world; what an operation leaves open is drawn too."""

    world: World | None = None

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng: random.Random) -> None:
        self.world = World(lambda _label, n: rng.randrange(n))

    @rule(operation=st.sampled_from(OPERATIONS))
    def operate(self, operation: Callable[[World], None]) -> None:
        assert self.world is not None
        operation(self.world)

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish()


@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_the_connector_keeps_its_promises_state_machine() -> None:
    run_state_machine_as_test(
        ConnectorMachine,
        settings=machine_settings(NUM_EXAMPLES, STEPS_PER_EXAMPLE, derandomize=not LONG),
    )


def run(seed: int) -> Counter[str]:
    """One run by seeded dice; what happened in it."""
    rng = random.Random(seed)
    world = World(lambda _label, n: rng.randrange(n))
    for _ in range(NUM_OPERATIONS):
        rng.choice(OPERATIONS)(world)
    world.finish()
    return world.seen


@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_the_connector_keeps_its_promises_long_runs() -> None:
    seen = run_seeds(run, range(NUM_SEEDS))
    assert seen["received"] - seen["failed"] >= NUM_SEEDS, seen
    happened = ("answers", "sent", "failed", "aborts", "preempted", "lost", "tampered", "mixed up")
    for what in happened:
        assert seen[what] >= NUM_SEEDS / 2, f"{what!r} hardly ever happened: {seen}"
    for what in ("restarts", "answers without a lease"):
        assert seen[what], f"{what!r} never happened: {seen}"


# --- broken on purpose --------------------------------------------------------------------------


def forget_to_clear(patch: pytest.MonkeyPatch) -> None:
    """Leases end without their slots being cleared."""
    patch.setattr(ProducerLeaseSlots, "clear", lambda self, req_id: None)
    update = ProducerLeaseSlots.update
    patch.setattr(ProducerLeaseSlots, "update", lambda self, _, arms: update(self, (), arms))


def clear_after_the_forward(patch: pytest.MonkeyPatch) -> None:
    """Clears come with `start_load_kv`, when blocks have been written already."""
    bind, start = KvNixlWorker.bind, KvNixlWorker.start_load

    def start_load(self: KvNixlWorker, metadata: Any) -> None:
        bind(self, metadata)
        start(self, metadata)

    patch.setattr(KvNixlWorker, "bind", lambda self, metadata: None)
    patch.setattr(KvNixlWorker, "start_load", start_load)


def keep_the_lease_of_a_preempted_request(patch: pytest.MonkeyPatch) -> None:
    build = KvNixlScheduler.build_connector_meta

    def without(self: KvNixlScheduler, output: Any) -> Any:
        preempted, output.preempted_req_ids = output.preempted_req_ids, set()
        metadata = build(self, output)
        output.preempted_req_ids = preempted
        return metadata

    patch.setattr(KvNixlScheduler, "build_connector_meta", without)


def forget_aborts(patch: pytest.MonkeyPatch) -> None:
    """What vLLM took back keeps its lease."""
    patch.setattr(scheduler_module, "_HANDED_OVER", ())
    build = KvNixlScheduler.build_connector_meta

    def without(self: KvNixlScheduler, output: Any) -> Any:
        metadata = build(self, output)
        metadata.lease_clears = set()
        metadata.reqs_not_processed = set()
        return metadata

    patch.setattr(KvNixlScheduler, "build_connector_meta", without)


def report_failures_as_success(patch: pytest.MonkeyPatch) -> None:
    finish = KvNixlWorker.finish_step

    def finish_step(self: KvNixlWorker) -> Any:
        results = finish(self)
        results.failed_recving = set()
        return results

    patch.setattr(KvNixlWorker, "finish_step", finish_step)


def report_what_was_aborted_at_once(patch: pytest.MonkeyPatch) -> None:
    """vLLM reuses blocks in which bytes may still land."""
    start = KvNixlWorker.start_load

    def start_load(self: KvNixlWorker, metadata: Any) -> None:
        start(self, metadata)
        self._received |= metadata.reads_to_abort
        self._failed |= metadata.reads_to_abort

    patch.setattr(KvNixlWorker, "start_load", start_load)


def forget_to_release_slots(patch: pytest.MonkeyPatch) -> None:
    update = KvNixlScheduler.update_connector_output

    def without(self: KvNixlScheduler, output: Any) -> None:
        update(self, replace(output, finished_sending=None))

    patch.setattr(KvNixlScheduler, "update_connector_output", without)


def report_the_end_of_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    """As if vLLM held every request that was ever prefilled."""
    finish = KvNixlWorker.finish_step

    def finish_step(self: KvNixlWorker) -> Any:
        gone, self.gone = getattr(self, "gone", set()), set()
        results = finish(self)
        results.finished_sending |= gone
        return results

    start = KvNixlWorker.start_load

    def start_load(self: KvNixlWorker, metadata: Any) -> None:
        start(self, metadata)
        self.gone = set(metadata.reqs_not_processed)

    patch.setattr(KvNixlWorker, "finish_step", finish_step)
    patch.setattr(KvNixlWorker, "start_load", start_load)


def take_the_blocks_of_other_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvnixl.vllm.scheduler._is_other_prompt", lambda *_: False)


@pytest.mark.timeout(TEST_TIMEOUT_S)
@pytest.mark.parametrize(
    "break_it",
    [
        forget_to_clear,
        clear_after_the_forward,
        keep_the_lease_of_a_preempted_request,
        forget_aborts,
        report_failures_as_success,
        report_what_was_aborted_at_once,
        forget_to_release_slots,
        report_the_end_of_what_was_aborted,
        take_the_blocks_of_other_prompts,
    ],
)
def test_a_broken_connector_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(run, range(max(NUM_SEEDS, 40)))


# --- one thing at a time ------------------------------------------------------------------------

PROMPT = [*range(1, 11)]


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def start(net: Net) -> Iterator[Callable[..., Engine]]:
    """Start engines that end with the test."""
    engines: list[Engine] = []

    def make(name: str, port: int, **more: Any) -> Engine:
        engines.append(Engine(net, name, port, **more))
        return engines[-1]

    yield make
    for engine in reversed(engines):
        net.fabric.settle()
        if engine.alive:
            engine.shutdown()
            net.fabric.assert_clean(*engine.agents)


def prefill(engine: Engine, req_id: str = "p", prompt: list[int] = PROMPT) -> dict[str, Any]:
    """The answer of a prefill, as a router passes it on."""
    engine.add(make_request(req_id, prompt, {"do_remote_decode": True}))
    engine.run(until=lambda: req_id in engine.answers)
    answer: dict[str, Any] = json.loads(json.dumps(engine.answers.pop(req_id)))
    return answer


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "kvnixl.vllm.worker" and record.levelno == level
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("remote_tp", "local_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_request_is_read_and_verified(
    start: Callable[..., Engine], remote_tp: int, local_tp: int, asynchronous: bool
) -> None:
    options = {"lease_verification": "require"}
    p = start("P", 7000, tp_size=remote_tp, asynchronous=asynchronous)
    d = start("D", 7001, tp_size=local_tp, asynchronous=asynchronous, options=options)
    d.add(make_request("d", PROMPT, prefill(p), max_tokens=3))
    d.run()
    p.run()
    assert d.finished == {"d": "length"}
    assert d.received == {"d": 1}
    assert not d.failed
    assert p.sent == {"p": 1}
    for rank in d.ranks:
        assert rank.connector._worker._reader.counters.verified == 1
    for engine in (p, d):
        engine.check_empty()


def test_what_the_compatibility_hash_is_made_of_is_logged_once_at_start(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """In the form that ``python -m kvnixl.compat`` reads."""
    caplog.set_level(logging.INFO, "kvnixl.vllm.worker")
    start("P", 7000, tp_size=2)
    lead = "kvnixl compatibility factors: "
    (line,) = [text for text in messages(caplog, logging.INFO) if text.startswith(lead)]
    assert load_factors(line.removeprefix(lead)) == {"model": "m"}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_rejected_read_is_told_in_words(
    start: Callable[..., Engine], net: Net, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    p = start("P", 7000)
    d = start("D", 7001, policy=policy)
    answer = prefill(p)
    net.fabric.rule = lambda _transfer: Plan(polls=None)
    d.add(make_request("d", PROMPT, answer, max_tokens=2))
    for _ in range(4):
        d.step()
    assert d.ranks[0].connector._worker._reader.stage("d") is Stage.READING
    net.clock.now += 35.0  # no heartbeat comes: the decode engine stands still
    for _ in range(3):
        p.step()
    assert p.sent == {"p": 1}
    net.fabric.rule = None
    for transfer in net.fabric.transfers:
        transfer.finish()
    d.run()
    assert d.failed == {"d"}
    assert d.finished == {"d": "length" if policy == "recompute" else "error"}
    (expired,) = [text for text in messages(caplog) if "expired" in text]
    assert "'p'" in expired
    assert "raise kv_lease_duration" in expired
    rejected = [text for text in messages(caplog) if "REJECTED" in text or "not end" in text]
    assert len(rejected) == 1
    assert "request 'd'" in rejected[0]
    assert ("recomputed" if policy == "recompute" else "it fails") in rejected[0]


def test_a_read_whose_lease_is_gone_is_rejected(
    start: Callable[..., Engine], net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    p = start("P", 7000)
    d = start("D", 7001)
    answer = prefill(p)
    net.clock.now += 31.0
    p.run()
    assert p.sent == {"p": 1}
    d.add(make_request("d", PROMPT, answer))
    d.run()
    assert d.failed == {"d"}
    assert d.finished == {"d": "length"}
    (text,) = [text for text in messages(caplog) if "'d'" in text]
    assert text.startswith("request 'd': its KV blocks were read but are REJECTED: ")
    assert "; it is recomputed here. " in text
    assert "raise kv_lease_duration of the prefill engine" in text


def test_warnings_are_rate_limited(
    start: Callable[..., Engine], net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    d = start("D", 7001)
    bad = {"do_remote_prefill": True}
    for number in range(5):
        d.add(make_request(f"d{number}", PROMPT, bad))
        d.run()
    assert len(messages(caplog)) == 1
    assert "remote_block_ids" in messages(caplog)[0]
    net.clock.now += 10.0
    d.add(make_request("last", PROMPT, bad))
    d.run()
    assert len(messages(caplog)) == 2
    assert "(4 more like this since the last such line)" in messages(caplog)[1]
    assert len(d.failed) == 6


def test_one_line_for_each_request_at_debug_level(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = start("P", 7000), start("D", 7001)
    with caplog.at_level(logging.DEBUG, "kvnixl.vllm.worker"):
        for number in range(2):
            prompt = [*PROMPT, number]
            d.add(make_request(f"d{number}", prompt, prefill(p, f"p{number}", prompt)))
            d.run()
            p.run()
    lines = messages(caplog, logging.DEBUG)
    assert lines[1::2] == [f"request 'p{number}': its blocks are free: read" for number in range(2)]
    assert [line.split(":")[0] for line in lines[::2]] == ["request 'd0'", "request 'd1'"]
    for line in lines[::2]:
        assert "read and verified" in line
        for stage in ("handshake", "queued", "reading", "verifying"):
            assert f"{stage} " in line
        assert " bytes in " in line


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (ReadOutcome("r", Stage.DONE, verified=True), "read and verified"),
        (ReadOutcome("r", Stage.DONE), "read, not verified"),
        (ReadOutcome("r", Stage.ABORTED), "aborted"),
        (
            ReadOutcome("r", Stage.FAILED, cause=FailureCause.TIMEOUT, reason="too late"),
            "failed (timeout: too late)",
        ),
    ],
)
def test_outcomes_in_words(outcome: ReadOutcome, words: str) -> None:
    assert words in describe(outcome)


def test_every_cause_of_failure_has_a_hint() -> None:
    for cause in FailureCause:
        if cause is not FailureCause.TOO_MANY_REMOTES:
            assert worker_module._hint(cause), cause


def test_failures_and_ends_of_all_ranks_make_one(start: Callable[..., Engine], net: Net) -> None:
    """One rank of two fails: the request fails, in the snapshot in which it is finished."""
    p = start("P", 7000, tp_size=2)
    d = start("D", 7001, tp_size=2)
    answer = prefill(p)
    failing, _ = d.agents
    net.fabric.rule = lambda transfer: (
        Plan(polls=1, end=nixlBackendError) if transfer.agent.name == failing else Plan(polls=9)
    )
    d.add(make_request("d", PROMPT, answer, max_tokens=2))
    d.run()
    assert d.failed == {"d"}
    assert d.received == {"d": 1}
    assert d.finished == {"d": "length"}
    p.run()
    d.check_empty()
    p.check_empty()


def wait_for_a_run_slot(engine: Engine, answer: dict[str, Any]) -> None:
    """A request to read from a peer waits, and the peer is met ahead of time."""
    for number in range(4):
        engine.add(make_request(f"x{number}", [50 + number] * 5, None, max_tokens=8))
    engine.add(make_request("d", PROMPT, answer))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.requests["d"].status.name == "WAITING"


def test_an_engine_without_requests_comes_to_rest(
    start: Callable[..., Engine], net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps until the producer was told or cannot be, whether there are statistics or not."""
    monkeypatch.setattr(KvNixlWorker, "take_stats", lambda self: None)
    p, d = start("P", 7000), start("D", 7001)
    answer = prefill(p)
    p.kill()
    wait_for_a_run_slot(d, answer)
    for req_id in list(d.scheduler.requests):
        d.abort(req_id)
    for _ in range(5):
        d.step()
    assert d.busy
    net.clock.now += 60.0
    d.run(steps=10)
    d.check_empty()


def test_a_peer_that_hangs_does_not_keep_the_engine_busy(
    start: Callable[..., Engine], net: Net
) -> None:
    p, d = start("P", 7000), start("D", 7001)
    answer = prefill(p)
    net.fabric.rule = lambda _transfer: Plan(polls=None)
    wait_for_a_run_slot(d, answer)
    assert net.fabric.transfers  # it touches the memory of the peer
    for req_id in list(d.scheduler.requests):
        d.abort(req_id)
    d.run(steps=10)
    d.check_empty()
    p.run(steps=10)  # it was told
    assert p.sent == {"p": 1}


def test_what_the_scheduler_refused_is_failed_and_given_back(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = start("P", 7000), start("D", 7001)
    make = KvNixlScheduler._read_request

    def refused(self: KvNixlScheduler, *args: Any) -> Any:
        return replace(make(self, *args), refused="it cannot be", local_block_ids=())

    monkeypatch.setattr(KvNixlScheduler, "_read_request", refused)
    d.add(make_request("d", PROMPT, prefill(p), max_tokens=2))
    d.run()
    assert d.failed == {"d"}
    assert d.finished == {"d": "length"}
    assert "it cannot be" in messages(caplog)[0]
    p.run(steps=10)  # well before the lease ends
    assert p.sent == {"p": 1}
    p.check_empty()


def test_a_consumer_only_exports_nothing(start: Callable[..., Engine], net: Net) -> None:
    d = start("D", 7001, limits={"role": "kv_consumer"})
    (rank,) = d.ranks
    assert rank.connector.get_handshake_metadata() is None
    assert rank.slot_words is None
    assert not net.servers
    p = start("P", 7000, limits={"role": "kv_producer"})
    assert p.ranks[0].connector._worker._reader is None
    assert not p.connector.has_pending_push_work()
    d.add(make_request("d", PROMPT, prefill(p)))
    d.run()
    p.run()
    assert d.received == {"d": 1}
    assert not d.failed
    d.check_empty()
    p.check_empty()


def test_reads_go_on_while_the_engine_has_nothing_to_compute(
    start: Callable[..., Engine], net: Net
) -> None:
    """Steps without a forward pass move transfers, too."""
    p, d = start("P", 7000), start("D", 7001)
    net.fabric.rule = lambda _transfer: Plan(polls=5)
    d.add(make_request("d", PROMPT, prefill(p)))
    d.run(steps=40)
    assert d.received == {"d": 1}


def test_a_read_that_ends_between_two_steps_is_verified_during_the_next_one(
    start: Callable[..., Engine], net: Net
) -> None:
    """Its lease slot is read before that step's forward pass, not after it."""
    p, d = start("P", 7000), start("D", 7001)
    d.add(make_request("d0", PROMPT, prefill(p, "p0")))
    d.run()  # they have met
    # In flight at the end of the first step, over at the beginning of the second one, before whose
    # end the slot READ is asked once: one step more than without verification, not two.
    net.fabric.rule = lambda _transfer: Plan(polls=2)
    prompt = [*PROMPT, 20]
    d.add(make_request("d", prompt, prefill(p, "p", prompt)))
    for _ in range(3):
        assert "d" not in d.received
        d.step()
    assert "d" in d.received


def test_a_peer_that_restarted_is_read_again(start: Callable[..., Engine], net: Net) -> None:
    p, d = start("P", 7000), start("D", 7001)
    for number in range(3):
        prompt = [*PROMPT, 20 + number]
        d.add(make_request(f"d{number}", prompt, prefill(p, f"p{number}", prompt)))
        d.run()
        p.kill()
        p = start("P", 7000)
        # Its reference tells that there was a restart.
        d.add(make_request(f"e{number}", [*prompt, 9], prefill(p, f"q{number}", [*prompt, 9])))
        for _ in range(200):
            if not d.busy:
                break
            d.step()
            net.clock.now += 0.01  # or the peer would not be met again so soon
        assert not d.busy
        p.run()
        p.check_empty()  # long before the lease ends: the new start was told
        net.clock.now += 1.0
    assert not d.failed
    assert len(d.finished) == 6
    assert set(d.finished.values()) == {"length"}
    d.check_empty()


def test_what_a_registration_opened_is_closed_when_it_fails(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("no such reader")

    monkeypatch.setattr(worker_module, "Reader", refuse)
    with pytest.raises(ValueError, match="no such reader"):
        Engine(net, "D", 7001)
    net.fabric.assert_clean(*net.agents)


def test_shutdown_revokes_leases_and_may_be_called_twice(start: Callable[..., Engine]) -> None:
    p = start("P", 7000)
    prefill(p)
    (rank,) = p.ranks
    words = rank.slot_words
    assert words is not None
    assert words.any()
    p.shutdown()
    assert not words.any()
    p.shutdown()
    assert not rank.connector.get_transfer_results(set()).finished_sending


def test_shutdown_lets_its_own_reads_end_before_it_deregisters_their_memory(
    start: Callable[..., Engine], net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = start("P", 7000), start("D", 7001)
    net.fabric.rule = lambda _transfer: Plan(polls=20)
    d.add(make_request("d", PROMPT, prefill(p)))
    d.run(until=lambda: d.ranks[0].connector._worker._reader.bytes_in_flight > 0)
    d.shutdown()
    assert not net.fabric.violations
    assert "could not be given back" not in caplog.text


def test_the_older_question_never_passes_a_failed_read_off_as_received(
    start: Callable[..., Engine],
) -> None:
    connector = start("D", 7001).ranks[0].connector
    assert connector.get_finished(set()) == (set(), set())
    connector._worker._start_read(connector._worker._reader, "r", ReadRequest({}, awaited=True))
    with pytest.raises(KvNixlError, match=r"'r'.*get_transfer_results"):
        connector.get_finished(set())


def test_worker_messages_add_up() -> None:
    first = KvNixlWorkerMetadata({"a"}, busy=False)
    both = first.aggregate(KvNixlWorkerMetadata({"b"}, busy=True))
    assert both == KvNixlWorkerMetadata({"a", "b"}, busy=True)
    assert KVConnectorOutput().kv_connector_worker_meta is None
