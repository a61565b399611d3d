"""Faults between real vLLM engines: whatever happens to a peer, a lease or a request costs at most
the requests that it concerns, and no request ever gets a wrong token.

Engines that prefill: ``p_short`` gives leases of a second, ``p_long`` of two minutes. Engines that
decode, from either: ``d_recompute`` and ``d_fail``, by what they do about KV that could not be
loaded. Reads go over TCP, where they take long enough to be interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnixl.bench.vllm_engines import (
    Engine,
    EngineSpec,
    Generated,
    Generation,
    JsonObject,
    Pair,
    Reference,
    prefill_params,
)
from kvnixl.bench.vllm_model import TinyModel
from tests import vllm_fault_hooks as hooks
from tests.vllm_pairs import SharedEngines

# The first test may have to wait until vLLM is imported.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

SHORT_LEASE_S = 1.0
LONG_LEASE_S = 120.0
# That heartbeats keep, also when an engine does not run for some seconds.
RENEWED_LEASE_S = 5.0
# So long that other things are done before it is over, also on a machine that is busy.
HANDSHAKE_TIMEOUT_S = 6.0
# "At once", as opposed to "when the lease ends": well below the long lease, and with room for a
# machine that is busy.
PROMPTLY_S = 30.0
TOKENS = 8
# A request of three blocks, whose last one is not full.
SHORT_PROMPT = 70
# Too long for all of its bytes to fit into the sockets between two engines.
LONG_PROMPT = 1900
SMALL_CACHE = 17 * 2**20  # bytes: little more than one of the longest prompts

_random = random.Random(20_05)


def fresh_prompt(length: int = SHORT_PROMPT) -> list[int]:
    """Tokens that no engine has seen."""
    return [_random.randrange(1, 250) for _ in range(length)]


# --- engines ------------------------------------------------------------------------------------


def spec_of(
    model: Path,
    name: str,
    policy: str = "fail",
    *,
    env: dict[str, str] | None = None,
    engine_args: JsonObject | None = None,
    engine_id: str | None = None,
    **options: Any,
) -> EngineSpec:
    options = {
        "kv_lease_duration": LONG_LEASE_S,
        "handshake_timeout": HANDSHAKE_TIMEOUT_S,
    } | options
    config = {
        "kv_connector": "KvNixlConnector",
        "kv_connector_module_path": "kvnixl.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": options,
    }
    if engine_id is not None:
        config["engine_id"] = engine_id
    return EngineSpec(model, config, name=name, env=env or {}, engine_args=engine_args or {})


@dataclasses.dataclass(frozen=True)
class Engines:
    p_short: Engine
    p_long: Engine
    d_recompute: Engine
    d_fail: Engine
    reference: Reference

    @property
    def all(self) -> list[Engine]:
        return [self.p_short, self.p_long, self.d_recompute, self.d_fail]

    def decoder(self, policy: str) -> Engine:
        return {"recompute": self.d_recompute, "fail": self.d_fail}[policy]


@pytest.fixture(scope="module")
def started_engines(vllm_engines: SharedEngines) -> Iterator[Engines]:
    vllm_engines.close_pair()
    model = vllm_engines.model(TinyModel())
    tcp = {"UCX_TLS": "tcp"}
    small = {"kv_cache_memory_bytes": SMALL_CACHE}
    decoding = {"kv_lease_duration": SHORT_LEASE_S}
    specs = [
        spec_of(model, "p_short", kv_lease_duration=SHORT_LEASE_S, engine_args=small),
        spec_of(model, "p_long"),
        # Two things that must not matter, so that all tests run with both.
        spec_of(model, "d_recompute", "recompute", env=tcp, capture_telemetry=False, **decoding),
        spec_of(model, "d_fail", env=tcp, engine_args={"max_num_seqs": 1}, **decoding),
    ]
    for number in (1, 2):  # p_long and d_recompute; the other two do not look ahead
        specs[number] = dataclasses.replace(specs[number], async_scheduling=True)
    reference = vllm_engines.reference(
        vllm_engines.spec(name="reference-llama", forces_tokens=True)
    )
    with start_all(vllm_engines, specs) as (p_short, p_long, d_recompute, d_fail):
        for decoder in (d_recompute, d_fail):  # everyone has met everyone
            for prefiller in (p_short, p_long):
                Pair(prefiller, decoder).handoff(fresh_prompt(), TOKENS)
        yield Engines(p_short, p_long, d_recompute, d_fail, reference)


@contextlib.contextmanager
def start_all(vllm_engines: SharedEngines, specs: list[EngineSpec]) -> Iterator[list[Engine]]:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(vllm_engines.template.launch(spec)) for spec in specs]
        for engine in engines:
            engine.wait_ready()
            engine.call(hooks.watch_reports)
        yield engines


@pytest.fixture
def engines(started_engines: Engines) -> Iterator[Engines]:
    """The engines; afterwards each must live and have nothing left over."""
    yield started_engines
    for engine in started_engines.all:
        engine.thaw()  # where a test has failed half way
        engine.resume()
    for engine in started_engines.all:
        check_engine(engine)


def check_engine(engine: Engine) -> None:
    engine.wait_until(hooks.idle, timeout=PROMPTLY_S)
    assert engine.blocks_in_use() == 0
    leftovers = engine.call(hooks.leftovers)
    assert not any(leftovers.values()), (engine.name, leftovers)
    for side, reported in engine.call(hooks.reports).items():
        twice = {req_id: count for req_id, count in reported.items() if count != 1}
        assert not twice, f"{engine.name} reported more than once as {side}: {twice}"


def counts(engine: Engine) -> Callable[..., float]:
    """By how much the connector's counters rose since the last call of this for the engine."""
    taken = engine.take_connector_stats()

    def of(metric: str, label: str | None = None) -> float:
        return sum(
            increase
            for stats in taken
            for name, increase in stats["counters"].get(metric, {}).items()
            if label in (None, name)
        )

    return of


def expected_tokens(engines: Engines, prompt: list[int], answer: Generated) -> tuple[int, ...]:
    """What a single engine answers. How it computed the last prompt token differs by whether the
    others came from another engine."""
    return engines.reference.tokens(prompt, TOKENS, decode_last=bool(answer.num_external_tokens))


def assert_transferred(engines: Engines, prompt: list[int], answer: Generated) -> None:
    assert answer.num_external_tokens == len(prompt), answer
    assert answer.token_ids == engines.reference.tokens(prompt, TOKENS)


def assert_not_loaded(engines: Engines, policy: str, prompt: list[int], answer: Generated) -> None:
    """The KV could not be loaded, and vLLM did what its policy is."""
    assert not answer.num_external_tokens, answer
    if policy == "recompute":
        assert answer.finish_reason == "length", answer
        assert answer.token_ids == engines.reference.tokens(prompt, TOKENS, decode_last=False)
    else:
        assert (answer.finish_reason, answer.token_ids) == ("error", ()), answer


def decode(
    engine: Engine, prompt: list[int], params: JsonObject | None, timeout: float = 60.0
) -> Generated:
    return engine.generate(prompt, TOKENS, kv_transfer_params=params, timeout=timeout)


def prefill(engine: Engine, prompt: list[int]) -> JsonObject:
    params = Pair(engine, engine).run_prefill(prompt).kv_transfer_params
    assert params is not None
    return params


def assert_serves(engines: Engines, prefiller: Engine, decoder: Engine) -> None:
    prompt = fresh_prompt()
    assert_transferred(engines, prompt, decode(decoder, prompt, prefill(prefiller, prompt)))


def overwrite_blocks(prefiller: Engine) -> None:
    """Have other prompts write into all free blocks of an engine with a small cache."""
    for _ in range(2):
        prefiller.generate(fresh_prompt(LONG_PROMPT), 1)


def stop_while_reading(p: Engine, d: Engine, prompt: list[int], params: JsonObject) -> Generation:
    """Submit a request to ``d``; both engines stand still after its READ was posted."""
    p.freeze()  # or the READ could be over before the other stands still
    d.call(hooks.stop_in_next_read)
    generation = d.submit(prompt, TOKENS, kv_transfer_params=params)
    until = time.monotonic() + PROMPTLY_S
    stat = Path(f"/proc/{d.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until, f"{d.name} did not stop itself"
        time.sleep(0.001)
    d.freeze()  # all of its threads stand still on return
    return generation


# --- leases that expire -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_lease_expires_before_the_read(engines: Engines, policy: str) -> None:
    p, d = engines.p_short, engines.decoder(policy)
    prompt = fresh_prompt(LONG_PROMPT)
    params = prefill(p, prompt)
    counts(d)
    d.pause()
    generation = d.submit(prompt, TOKENS, kv_transfer_params=params)
    assert d.call(hooks.num_requests) == 1  # it knows the request, and would send heartbeats
    d.freeze()
    p.wait_blocks_in_use(0)
    overwrite_blocks(p)
    d.thaw()
    d.resume()
    assert_not_loaded(engines, policy, prompt, generation.result())
    assert counts(d)("read_failures_total", "verification") == 1
    assert "KV blocks were read but are REJECTED" in d.log()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_lease_expires_during_the_read(engines: Engines, policy: str) -> None:
    """The first bytes that arrive are the request's, the last are somebody else's."""
    p, d = engines.p_short, engines.decoder(policy)
    prompt = fresh_prompt(LONG_PROMPT)
    params = prefill(p, prompt)
    counts(d)
    generation = stop_while_reading(p, d, prompt, params)
    p.thaw()
    p.wait_blocks_in_use(0)
    overwrite_blocks(p)
    d.thaw()
    assert_not_loaded(engines, policy, prompt, generation.result())
    assert d.call(hooks.stopped_in_state) == "PROC"
    assert counts(d)("read_failures_total", "verification") == 1


# --- requests that are given up -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Given:
    """A prefill that ``p_long`` holds for two minutes, and what its end is checked with."""

    engines: Engines
    prompt: list[int]
    params: JsonObject

    def assert_released(self, decoder: Engine) -> None:
        p = self.engines.p_long
        p.wait_blocks_in_use(0, PROMPTLY_S)
        decoder.wait_blocks_in_use(0, PROMPTLY_S)
        ended = counts(p)
        assert ended("leases_ended_total", "released") == 1
        assert ended("leases_ended_total") == 1


@pytest.fixture
def given(engines: Engines) -> Given:
    counts(engines.p_long)
    prompt = fresh_prompt()
    return Given(engines, prompt, prefill(engines.p_long, prompt))


def test_abort_before_a_step_has_seen_the_request(engines: Engines, given: Given) -> None:
    d = engines.d_recompute
    d.pause()
    generation = d.submit(given.prompt, TOKENS, kv_transfer_params=given.params)
    assert d.abort(generation.request_id)
    d.resume()
    given.assert_released(d)


def test_abort_while_queued(engines: Engines, given: Given) -> None:
    d = engines.d_fail  # runs one request at a time
    running = d.submit(fresh_prompt(), LONG_PROMPT)
    running.wait_first_token()
    queued = d.submit(given.prompt, TOKENS, kv_transfer_params=given.params)
    d.wait_until(hooks.has_status, queued.request_id, "WAITING")
    steps = d.call(hooks.num_tokens, running.request_id)
    d.wait_until(hooks.has_tokens, running.request_id, steps + 2)
    assert d.abort(queued.request_id)
    engines.p_long.wait_blocks_in_use(0, PROMPTLY_S)
    assert d.abort(running.request_id)
    given.assert_released(d)


def test_abort_while_the_handshake_hangs(
    engines: Engines, given: Given, held_proxy: HeldProxy
) -> None:
    d = engines.d_recompute
    params = given.params | {"remote_port": held_proxy.port}
    generation = d.submit(given.prompt, TOKENS, kv_transfer_params=params)
    d.wait_until(hooks.reads_in_stage, "waiting for the handshake")
    assert d.abort(generation.request_id)
    d.wait_blocks_in_use(0, PROMPTLY_S)
    assert engines.p_long.blocks_in_use()  # nobody could tell it
    held_proxy.let_through()
    given.assert_released(d)


def test_abort_while_the_read_hangs(engines: Engines, given: Given) -> None:
    p, d = engines.p_long, engines.d_recompute
    p.freeze()
    generation = d.submit(given.prompt, TOKENS, kv_transfer_params=given.params)
    d.wait_until(hooks.reads_in_stage, "reading")
    assert d.abort(generation.request_id)
    assert d.blocks_in_use()  # bytes may still land in them
    p.thaw()
    given.assert_released(d)


def test_abort_in_the_step_in_which_the_prefill_ends(engines: Engines) -> None:
    p = engines.p_long
    p.call(hooks.abort_in_next_forward)
    generation = p.submit(fresh_prompt(), 1, kv_transfer_params=prefill_params())
    p.wait_until(hooks.idle, timeout=PROMPTLY_S)
    assert p.blocks_in_use() == 0
    assert not generation.done()  # the front end has heard of no end
    p.abort(generation.request_id)
    assert generation.result().kv_transfer_params is None
    assert_serves(engines, p, engines.d_fail)


def test_abort_before_the_prefill_is_scheduled(engines: Engines) -> None:
    p = engines.p_long
    p.pause()
    generation = p.submit(fresh_prompt(), 1, kv_transfer_params=prefill_params())
    p.abort(generation.request_id)
    p.resume()
    p.wait_until(hooks.idle, timeout=PROMPTLY_S)
    assert p.blocks_in_use() == 0


@pytest.mark.parametrize("met", [True, False])
def test_rejected_by_the_front_end(
    engines: Engines, given: Given, held_proxy: HeldProxy, met: bool
) -> None:
    """The decoding engine has no other request whose steps could carry the message."""
    d = engines.d_recompute
    held_proxy.let_through()
    port = given.params["remote_port"] if met else held_proxy.port
    d.call(hooks.reject, "rejected", given.params | {"remote_port": port})
    given.assert_released(d)


# --- processes that die -------------------------------------------------------------------------


def test_decoding_engine_dies(vllm_engines: SharedEngines) -> None:
    """Its heartbeats keep the lease while its request waits, and nothing keeps it afterwards."""
    model = vllm_engines.model(TinyModel())
    lease = {"kv_lease_duration": RENEWED_LEASE_S}
    one_at_a_time = {"max_num_seqs": 1}
    specs = [
        spec_of(model, "survivor", **lease),
        spec_of(model, "victim", engine_args=one_at_a_time, **lease),
    ]
    with start_all(vllm_engines, specs) as (p, d):
        for _ in range(8):  # which takes a fast machine longer than the renewals
            d.submit(fresh_prompt(), LONG_PROMPT)
        prompt = fresh_prompt()
        waiting = d.submit(prompt, TOKENS, kv_transfer_params=prefill(p, prompt))
        # Six in a lease: without them it would have ended by now.
        p.wait_until(hooks.has_renewed, 9)
        assert p.blocks_in_use()
        assert not waiting.done()
        d.kill()
        p.wait_blocks_in_use(0, PROMPTLY_S)
        assert counts(p)("leases_ended_total", "expired") == 1
        check_engine(p)


RESTARTS = 10


def test_prefilling_engine_dies_and_comes_back(
    engines: Engines, start_engine: Callable[[EngineSpec], Engine]
) -> None:
    """Ten times under the same id and port, killed at different moments."""
    spec = spec_of(engines.p_long.spec.model, "restarted", engine_id="restarted")
    for number in range(RESTARTS):
        p = start_engine(spec)
        spec = p.spec  # with its port
        for policy in ("recompute", "fail"):
            assert_meets_successor(engines, p, policy, is_first=number == 0)
        policy = ("recompute", "fail")[number % 2]
        d = engines.decoder(policy)
        moment = ("before the read", "during the read", "idle")[number % 3]
        if moment == "idle":
            p.kill()
            continue
        prompt = fresh_prompt(LONG_PROMPT)
        params = prefill(p, prompt)
        if moment == "before the read":
            p.kill()
            generation = d.submit(prompt, TOKENS, kv_transfer_params=params)
        else:
            generation = stop_while_reading(p, d, prompt, params)
            p.kill()
            d.thaw()
        assert_not_loaded(engines, policy, prompt, generation.result())
        assert moment == "before the read" or d.call(hooks.stopped_in_state) == "PROC"


def assert_meets_successor(engines: Engines, p: Engine, policy: str, *, is_first: bool) -> None:
    """Whoever still knows the one before may find out with a request, but with no second one."""
    d = engines.decoder(policy)
    prompt = fresh_prompt()
    answer = decode(d, prompt, prefill(p, prompt))
    if not is_first and not answer.num_external_tokens:
        assert_not_loaded(engines, policy, prompt, answer)
        prompt = fresh_prompt()
        answer = decode(d, prompt, prefill(p, prompt))
    assert_transferred(engines, prompt, answer)


# --- references that are wrong ------------------------------------------------------------------

REFUSED, SERVED, LOCAL, WHATEVER, NEVER_SEEN = "refused", "served", "local", "whatever", "never"
Tamper = Callable[[JsonObject], Any]


def _set(**values: Any) -> Tamper:
    return lambda params: params | values


def _blocks(change: Callable[[list[int]], Any]) -> Tamper:
    return lambda params: params | {"remote_block_ids": change(list(params["remote_block_ids"][0]))}


def _without(key: str) -> Tamper:
    return lambda params: {name: value for name, value in params.items() if name != key}


def _lease(change: Callable[[str, str], str]) -> Tamper:
    return lambda params: params | {"kvnixl_lease": change(*params["kvnixl_lease"].split(":"))}


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


_CLOSED_PORT = 1  # nobody listens there

FORGED: dict[str, tuple[Tamper, str]] = {
    "unknown engine": (_set(remote_engine_id="nobody"), REFUSED),
    "engine id of another type": (_set(remote_engine_id=7), REFUSED),
    "empty engine id": (_set(remote_engine_id=""), REFUSED),
    "lone surrogate": (_set(remote_engine_id="\ud800"), REFUSED),
    "host that does not answer": (_set(remote_host="127.0.0.9"), REFUSED),
    "host that does not exist": (_set(remote_host="no-such-host.invalid"), REFUSED),
    "host with a path": (_set(remote_host="127.0.0.1/../x"), REFUSED),
    "port that nobody listens on": (_set(remote_port=_CLOSED_PORT), REFUSED),
    "port as text": (_set(remote_port="5600"), REFUSED),
    "port 2**63": (_set(remote_port=2**63), REFUSED),
    "port 0": (_set(remote_port=0), REFUSED),
    **{
        f"no {key}": (_without(key), REFUSED)
        for key in (
            "remote_engine_id",
            "remote_block_ids",
            "remote_request_id",
            "remote_host",
            "remote_port",
        )
    },
    "no tp_size": (_without("tp_size"), SERVED),
    "no remote_num_tokens": (_without("remote_num_tokens"), SERVED),
    "no lease": (_without("kvnixl_lease"), SERVED),
    "more keys": (_set(more={"a": [1, None]}), SERVED),
    "no do_remote_prefill": (_without("do_remote_prefill"), LOCAL),
    "do_remote_prefill null": (_set(do_remote_prefill=None), LOCAL),
    "do_remote_prefill as text": (_set(do_remote_prefill="true"), REFUSED),
    "do_remote_prefill as another text": (_set(do_remote_prefill="false"), REFUSED),
    "do_remote_prefill NaN": (_set(do_remote_prefill=math.nan), REFUSED),
    "no blocks": (_set(remote_block_ids=[]), REFUSED),
    "no blocks in the group": (_blocks(lambda ids: [[]]), REFUSED),
    "blocks null": (_set(remote_block_ids=None), REFUSED),
    "blocks as text": (_set(remote_block_ids="0,1,2"), REFUSED),
    "blocks without groups": (_blocks(lambda ids: ids), REFUSED),
    "a block less": (_blocks(lambda ids: [ids[:-1]]), REFUSED),
    "a group more": (_blocks(lambda ids: [ids, ids]), REFUSED),
    "block out of range": (_blocks(lambda ids: [[*ids[:-1], 100_000]]), REFUSED),
    "block -1": (_blocks(lambda ids: [[-1, *ids[1:]]]), REFUSED),
    "block 2**31": (_blocks(lambda ids: [[2**31, *ids[1:]]]), REFUSED),
    "block 2**32": (_blocks(lambda ids: [[2**32, *ids[1:]]]), REFUSED),
    "block 2**64 - 1": (_blocks(lambda ids: [[2**64 - 1, *ids[1:]]]), REFUSED),
    "block 0.5": (_blocks(lambda ids: [[0.5, *ids[1:]]]), REFUSED),
    "block NaN": (_blocks(lambda ids: [[math.nan, *ids[1:]]]), REFUSED),
    "blocks nested deeply": (_set(remote_block_ids=_nested(100)), REFUSED),
    "a million blocks": (_blocks(lambda ids: [ids * 400_000]), REFUSED),
    # A reference that names other blocks of the same engine, or claims more tokens than were
    # computed, cannot be told from a true one: whoever forges it spoils his own request.
    "2**62 tokens": (_set(remote_num_tokens=2**62), WHATEVER),
    "blocks of somebody": (_blocks(lambda ids: [[i % 200 + 1 for i in ids]]), WHATEVER),
    "a block more": (_blocks(lambda ids: [[*ids, ids[0]]]), WHATEVER),
    "a block twice": (_blocks(lambda ids: [[ids[0]] * len(ids)]), WHATEVER),
    "tp_size 0": (_set(tp_size=0), REFUSED),
    "tp_size -1": (_set(tp_size=-1), REFUSED),
    "tp_size 2": (_set(tp_size=2), REFUSED),
    "tp_size 2**20": (_set(tp_size=2**20), REFUSED),
    "tp_size 10**9": (_set(tp_size=10**9), REFUSED),
    "tp_size NaN": (_set(tp_size=math.nan), REFUSED),
    "tp_size as text": (_set(tp_size="1"), REFUSED),
    "pp_size 2": (_set(pp_size=2), REFUSED),
    "dcp_size 2": (_set(dcp_size=2), REFUSED),
    "too few tokens": (_set(remote_num_tokens=SHORT_PROMPT - 40), REFUSED),
    "no tokens": (_set(remote_num_tokens=0), REFUSED),
    "-1 tokens": (_set(remote_num_tokens=-1), REFUSED),
    "2**64 - 1 tokens": (_set(remote_num_tokens=2**64 - 1), REFUSED),
    "NaN tokens": (_set(remote_num_tokens=math.nan), REFUSED),
    "expiry NaN": (_set(remote_blocks_expiry_time=math.nan), REFUSED),
    "expiry long ago": (_set(remote_blocks_expiry_time=-1e300), SERVED),
    "generation 10**9": (_set(remote_registration_generation=10**9), SERVED),
    "generation -1": (_set(remote_registration_generation=-1), REFUSED),
    "huge request id": (_set(remote_request_id="x" * 100_000), REFUSED),
    "lease garbage": (_set(kvnixl_lease="garbage"), REFUSED),
    "lease as a number": (_set(kvnixl_lease=17), REFUSED),
    "lease of another slot": (_lease(lambda slot, nonce: f"{int(slot) + 1}:{nonce}"), REFUSED),
    "lease out of range": (_lease(lambda slot, nonce: f"{2**24 - 1}:{nonce}"), REFUSED),
    "lease of another nonce": (
        _lease(lambda slot, nonce: f"{slot}:{int(nonce, 16) ^ 2:x}"),
        REFUSED,
    ),
    "lease of slot 10**30": (_lease(lambda slot, nonce: f"{10**30}:{nonce}"), REFUSED),
    "push mode": (_set(transfer_mode="push"), WHATEVER),
    # vLLM's front end refuses them by itself.
    "a text": (lambda params: "true", NEVER_SEEN),
    "a list": (lambda params: [params], NEVER_SEEN),
    "a number": (lambda params: 1, NEVER_SEEN),
}


BATCH = 8


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("batch", range(-(-len(FORGED) // BATCH)))
def test_forged_parameters(engines: Engines, batch: int, policy: str) -> None:
    """Several at once, and good ones among them."""
    p, d = engines.p_long, engines.decoder(policy)
    cases = list(FORGED.items())[batch * BATCH :][:BATCH]
    cases += [("good", (lambda params: params, SERVED))]
    cases.insert(0, cases[-1])
    prompts = [fresh_prompt() for _ in cases]
    prefills = [p.submit(prompt, 1, kv_transfer_params=prefill_params()) for prompt in prompts]
    params = [prefilled.result().kv_transfer_params for prefilled in prefills]
    submitted = [
        d.submit(prompt, TOKENS, kv_transfer_params=tamper(dict(given)))
        for prompt, given, (_, (tamper, _)) in zip(prompts, params, cases, strict=True)
    ]
    for prompt, generation, (case, (_, expected)) in zip(prompts, submitted, cases, strict=True):
        answer = generation.result()
        print(case, answer)  # shown if this fails
        if expected == REFUSED:
            assert_not_loaded(engines, policy, prompt, answer)
        elif expected == SERVED:
            assert_transferred(engines, prompt, answer)
        elif expected == LOCAL:
            assert_not_loaded(engines, "recompute", prompt, answer)
        elif expected == NEVER_SEEN:
            assert answer.error
    for number, given in enumerate(params):
        d.call(hooks.reject, f"cleaner-{number}", given)
    assert_serves(engines, p, d)


def test_parameters_used_twice(engines: Engines) -> None:
    p = engines.p_long
    prompt = fresh_prompt()
    params = prefill(p, prompt)
    assert_transferred(engines, prompt, decode(engines.d_recompute, prompt, params))
    p.wait_blocks_in_use(0)
    engines.d_recompute.reset_prefix_cache()
    for policy in ("recompute", "fail"):
        d = engines.decoder(policy)
        counts(d)
        assert_not_loaded(engines, policy, prompt, decode(d, prompt, params))
        assert counts(d)("read_failures_total", "verification") == 1


def test_parameters_used_twice_at_once(engines: Engines) -> None:
    """The first that is through ends the lease: the others are served or not, never wrongly."""
    d = engines.d_recompute
    prompt = fresh_prompt(LONG_PROMPT)
    params = prefill(engines.p_long, prompt)
    answers = [d.submit(prompt, TOKENS, kv_transfer_params=params) for _ in range(3)]
    answers.append(engines.d_fail.submit(prompt, TOKENS, kv_transfer_params=params))
    *recomputed, failed = [answer.result() for answer in answers]
    for answer in recomputed:
        assert answer.token_ids == expected_tokens(engines, prompt, answer)
    if failed.finish_reason != "error":
        assert_transferred(engines, prompt, failed)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_lease_of_another_request(engines: Engines, policy: str) -> None:
    """Whoever has the reference of a request can end its lease; its true reader notices."""
    p, d = engines.p_long, engines.decoder(policy)
    first, second = fresh_prompt(), fresh_prompt()
    params, others = prefill(p, first), prefill(p, second)
    forged = params | {"kvnixl_lease": others["kvnixl_lease"]}
    assert_transferred(engines, first, decode(d, first, forged))
    assert_not_loaded(engines, policy, second, decode(d, second, others))
    d.call(hooks.reject, "cleaner", params)
    engines.p_long.wait_blocks_in_use(0, PROMPTLY_S)


def test_wrong_engine_answers(engines: Engines) -> None:
    p, d = engines.p_long, engines.d_fail
    prompt = fresh_prompt()
    params = prefill(p, prompt)
    forged = params | {"remote_port": engines.p_short.side_channel_port}
    assert_not_loaded(engines, "fail", prompt, decode(d, prompt, forged))
    other = prefill(engines.p_short, fresh_prompt())["remote_engine_id"]
    assert any(
        other in line and params["remote_engine_id"] in line for line in d.log().splitlines()
    )
    d.call(hooks.reject, "cleaner", params)


# --- engines that do not fit --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Strangers:
    """Engines with other blocks, and with another model, than all the others have."""

    blocks_64: Engine
    two_layers: Engine


@pytest.fixture(scope="module")
def strangers(vllm_engines: SharedEngines) -> Iterator[Strangers]:
    model, small = (vllm_engines.model(TinyModel(num_layers=layers)) for layers in (4, 2))
    specs = [
        spec_of(model, "blocks_64", "recompute", engine_args={"block_size": 64}),
        spec_of(small, "two_layers", "recompute"),
    ]
    with start_all(vllm_engines, specs) as engines:
        yield Strangers(*engines)


def test_unequal_block_sizes(engines: Engines, strangers: Strangers) -> None:
    for p, d, sizes in (
        (engines.p_long, strangers.blocks_64, (32, 64)),
        (strangers.blocks_64, engines.d_recompute, (64, 32)),
    ):
        prompt = fresh_prompt()
        params = prefill(p, prompt)
        assert_not_loaded(engines, "recompute", prompt, decode(d, prompt, params))
        refusals = [line for line in d.log().splitlines() if "could not be met" in line]
        assert any(all(str(size) in line for size in sizes) for line in refusals), refusals
        if p is engines.p_long:  # which could not be told
            engines.d_fail.call(hooks.reject, "cleaner", params)


def test_different_models(engines: Engines, strangers: Strangers) -> None:
    p = strangers.two_layers
    for policy in ("recompute", "fail"):
        d = engines.decoder(policy)
        prompt = fresh_prompt()
        assert_not_loaded(engines, policy, prompt, decode(d, prompt, prefill(p, prompt)))
        refusals = [line for line in d.log().splitlines() if "could not be met" in line]
        assert any("num_hidden_layers" in line for line in refusals), refusals


# --- side channels that hang --------------------------------------------------------------------


class HeldProxy:
    """Stands before a side channel: accepts, and passes nothing on until it is told to."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def let_through(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        waiting: list[socket.socket] = []
        pairs: dict[socket.socket, socket.socket] = {}
        while not self._closed.is_set():
            readable, _, _ = select.select([self._server, *pairs], [], [], 0.01)
            for ready in readable:
                if ready is self._server:
                    accepted, _ = self._server.accept()
                    self._sockets.append(accepted)
                    waiting.append(accepted)
                elif ready in pairs:  # not closed with the other one just now
                    self._pass_on(ready, pairs)
            while waiting and self._open.is_set():
                theirs, ours = waiting.pop(), socket.create_connection(self._target)
                self._sockets.append(ours)
                pairs |= {theirs: ours, ours: theirs}

    def _pass_on(self, source: socket.socket, pairs: dict[socket.socket, socket.socket]) -> None:
        try:
            if data := source.recv(1 << 16):
                pairs[source].sendall(data)
                return
        except OSError:  # one of them is gone: a client that is tired of waiting tries again
            pass
        other = pairs.pop(source)
        del pairs[other]
        source.close()
        other.close()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for one in (self._server, *self._sockets):
            one.close()


@pytest.fixture
def held_proxy(engines: Engines) -> Iterator[HeldProxy]:
    proxy = HeldProxy(engines.p_long.side_channel_port)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_side_channel_never_answers(engines: Engines, held_proxy: HeldProxy, policy: str) -> None:
    p, d = engines.p_long, engines.decoder(policy)
    prompt, other = fresh_prompt(), fresh_prompt()
    params = prefill(p, prompt)
    hanging = d.submit(prompt, TOKENS, kv_transfer_params=params | {"remote_port": held_proxy.port})
    d.wait_until(hooks.reads_in_stage, "waiting for the handshake")
    served = decode(d, other, prefill(p, other))
    assert_transferred(engines, other, served)
    answer = hanging.result()
    assert_not_loaded(engines, policy, prompt, answer)
    assert served.finished_at < answer.finished_at
    d.call(hooks.reject, "cleaner", params)


# --- metrics ------------------------------------------------------------------------------------


def test_telemetry_decides_nothing(engines: Engines) -> None:
    """``d_recompute`` runs without, in all tests of this module."""
    seen = []
    for d in (engines.d_fail, engines.d_recompute):
        counts(d)
        assert_serves(engines, engines.p_long, d)
        counted = counts(d)
        assert counted("reads_total", "verified") == 1
        seen.append([counted("reads_total"), counted("read_bytes_total")])
    assert seen[0] == seen[1]
