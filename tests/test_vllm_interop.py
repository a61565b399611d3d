"""kvnixl and vLLM's own NixlConnector hand requests to each other, in real engines of vLLM 0.32.

Every test runs in both directions: a stock prefill with a kvnixl decode, and the reverse. An engine
can be either side, so one pair serves both. Prompts are fresh in each test, because a prompt that
an engine has seen before is not transferred.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq

from kvnixl.bench.vllm_engines import Engine, EngineSpec, Pair, Reference, prefill_params
from kvnixl.metadata import LEASE_PARAM, PROMPT_PARAM, PromptDigest
from kvnixl.wire import encode_get_meta
from tests.vllm_pairs import ROOT, SharedEngines, rotate_block_ids

# The first test may have to wait until vLLM is imported.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK_SIZE = 32
MAX_TOKENS = 8
# Longer than any wait here: what becomes free was given back and did not expire.
LEASE_S = 300
# Stock agents spin, and starve others on a small machine; stock renews by two thirds of this only.
SHORT_LEASE_S = 8.0
TIMEOUT_S = 60.0

MakePrompt = Callable[[int], list[int]]


def connector(name: str, policy: str = "recompute", **options: Any) -> dict[str, Any]:
    """A ``kv_transfer_config``."""
    return {
        "kv_connector": {"stock": "NixlConnector", "kvnixl": "KvNixlConnector"}[name],
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, **options},
    }


def counted(engine: Engine) -> Counter[str]:
    """What the connector of an engine counted since the last call.

    kvnixl's counters are named ``name`` or ``name=label``. Stock's statistics are lists of
    observations, which are counted.
    """
    total: Counter[str] = Counter()
    for stats in engine.take_connector_stats():
        for name, by_label in stats.get("counters", {}).items():
            for label, count in by_label.items():
                total[f"{name}={label}" if label else name] += count
        for name, values in stats.items():
            if isinstance(values, list):
                total[name] += len(values)
    return total


def ends_by(prefill: Engine, counts: Mapping[str, int]) -> dict[str, int]:
    """How the requests that a prefill engine held ended, without zeros."""
    if is_stock(prefill):
        # It counts nothing but expiry.
        found = {"expired": counts["num_kv_expired_reqs"]}
    else:
        found = {
            name.removeprefix("leases_ended_total="): count
            for name, count in counts.items()
            if name.startswith("leases_ended_total=")
        }
    return {outcome: count for outcome, count in found.items() if count}


def is_stock(engine: Engine) -> bool:
    assert engine.spec.kv_transfer_config is not None
    return bool(engine.spec.kv_transfer_config["kv_connector"] == "NixlConnector")


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, vllm_engines: SharedEngines
) -> Iterator[dict[str, Engine]]:
    """``stock`` and ``kvnixl``; an indirect parameter gives their lease and engine arguments.

    There is one pair at a time, because a stock engine keeps a core busy while it lives.
    """
    vllm_engines.close_pair()  # it may have stock engines, too
    lease, engine_args = getattr(request, "param", (LEASE_S, {}))
    specs = {
        name: vllm_engines.spec(
            "llama", connector(name, kv_lease_duration=lease), engine_args, name=name
        )
        for name in ("stock", "kvnixl")
    }
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(vllm_engines.template.launch(spec))
            for name, spec in specs.items()
        }
        for engine in started.values():
            engine.wait_ready()
        yield started


@pytest.fixture
def reference(vllm_reference: Callable[..., Reference]) -> Reference:
    return vllm_reference()


@dataclass(frozen=True)
class Direction:
    """Who prefills and who decodes."""

    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.prefill}-{self.decode}"


STOCK_TO_KVNIXL = Direction("stock", "kvnixl")
KVNIXL_TO_STOCK = Direction("kvnixl", "stock")
both_directions = pytest.mark.parametrize("direction", [STOCK_TO_KVNIXL, KVNIXL_TO_STOCK], ids=str)


@pytest.fixture
def pair(direction: Direction, engines: dict[str, Engine]) -> Iterator[Pair]:
    """An idle pair whose counts begin with the test, and whose blocks are free after it."""
    found = Pair(engines[direction.prefill], engines[direction.decode])
    counted(found.prefill)
    counted(found.decode)
    yield found
    for engine in (found.prefill, found.decode):
        engine.wait_blocks_in_use(0)


def assert_read(decode: Engine, count: int = 1) -> None:
    """The decode engine read so many requests, and none failed."""
    counts = counted(decode)
    if is_stock(decode):
        assert counts["transfer_duration"] == count
        assert not sum(count for name, count in counts.items() if name.startswith("num_failed"))
    else:
        assert reads_by_result(counts) == {"unverified": count}


def reads_by_result(counts: Mapping[str, int]) -> dict[str, int]:
    """What kvnixl says about its reads."""
    return {
        name.removeprefix("reads_total="): count
        for name, count in counts.items()
        if name.startswith("reads_total=")
    }


def assert_freed(prefill: Engine, *, read: int = 1) -> None:
    """Every block of the prefill engine is free, and not because a lease ran out."""
    prefill.wait_blocks_in_use(0)
    assert ends_by(prefill, counted(prefill)) == ({} if is_stock(prefill) else {"read": read})


# --- leases that expire ---------------------------------------------------------------------------


# Before the others, whose engines would run beside its own.
def test_the_comparison_of_expired_leases(vllm_engines: SharedEngines) -> None:
    """What the stock connector does then is printed, not judged."""
    vllm_engines.close_pair()  # it has engines of its own, and stock ones keep a core busy
    done = subprocess.run(
        [sys.executable, "scripts/compare_expiry.py", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("NixlConnector ")]) == 2
    ours = [line for line in lines if line.startswith("KvNixlConnector ")]
    assert len(ours) == 2
    assert all(": right tokens (recomputed)" in line for line in ours), done.stdout


# --- tokens ---------------------------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 200, 1900])
def test_decode_continues_from_what_the_other_connector_holds(
    pair: Pair, reference: Reference, make_prompt: MakePrompt, num_tokens: int
) -> None:
    prompt = make_prompt(num_tokens)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == reference.tokens(prompt, MAX_TOKENS)
    assert (answer.num_external_tokens, answer.num_local_tokens) == (num_tokens, 0)
    assert_read(pair.decode)
    assert_freed(pair.prefill)


@both_directions
def test_a_single_token_leaves_no_blocks_behind(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    """Its only token is computed in any case."""
    prompt = make_prompt(1)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == reference.tokens(prompt, MAX_TOKENS)
    assert_freed(pair.prefill)


@both_directions
def test_blocks_in_another_order_give_other_tokens(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    """The comparison of tokens would notice a read of wrong blocks."""
    prompt = make_prompt(200)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS, tamper=rotate_block_ids).decode
    assert len(answer.token_ids) == MAX_TOKENS
    assert answer.token_ids != reference.tokens(prompt, MAX_TOKENS)


@both_directions
def test_requests_at_the_same_time(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompts = [make_prompt(num_tokens) for num_tokens in (40, 500, 64, 300, 100, 33, 700, 250)]
    prefills = [pair.prefill.submit(p, 1, kv_transfer_params=prefill_params()) for p in prompts]
    decodes = [
        pair.decode.submit(
            prompt, MAX_TOKENS, kv_transfer_params=prefill.result().kv_transfer_params
        )
        for prompt, prefill in zip(prompts, prefills, strict=True)
    ]
    for prompt, decode in zip(prompts, decodes, strict=True):
        assert decode.result().token_ids == reference.tokens(prompt, MAX_TOKENS)
    assert_read(pair.decode, len(prompts))
    assert_freed(pair.prefill, read=len(prompts))


# --- what the decode engine need not read ---------------------------------------------------------


@both_directions
def test_only_what_the_local_prefix_cache_lacks_is_read(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(200)
    pair.decode.generate(prompt[: 3 * BLOCK_SIZE], 1)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == reference.tokens(prompt, MAX_TOKENS)
    assert (answer.num_local_tokens, answer.num_external_tokens) == (96, 104)
    assert_read(pair.decode)
    assert_freed(pair.prefill)


@both_directions
def test_a_prompt_that_the_decode_engine_has_cached(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    """All but the last token, which is computed in any case. kvnixl then reads nothing, and says so
    to the prefill engine; stock reads the block of that token."""
    prompt = make_prompt(3 * BLOCK_SIZE + 1)
    pair.decode.generate(prompt, 1)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == reference.tokens(prompt, MAX_TOKENS)
    assert answer.num_local_tokens == 3 * BLOCK_SIZE
    counts = counted(pair.decode)
    if not is_stock(pair.decode):
        assert reads_by_result(counts) == {}
        assert counts["pull_decisions_total=local_hit"] == 1
    assert_freed(pair.prefill)


@both_directions
def test_a_request_that_is_aborted_before_it_is_scheduled(
    pair: Pair, make_prompt: MakePrompt
) -> None:
    prefilled = pair.run_prefill(make_prompt(200))
    assert pair.prefill.blocks_in_use() == 7
    pair.decode.pause()
    waiting = pair.decode.submit(
        make_prompt(200), kv_transfer_params=prefilled.kv_transfer_params, request_id="unwanted"
    )
    assert pair.decode.abort("unwanted")
    pair.decode.resume()
    assert waiting.result().finish_reason == "abort"
    assert_freed(pair.prefill)
    counts = counted(pair.decode)
    assert not counts["transfer_duration"]
    assert reads_by_result(counts) == {}


# --- reads that cannot be verified ----------------------------------------------------------------


@pytest.fixture
def requiring(
    vllm_engines: SharedEngines, start_engine: Callable[[EngineSpec], Engine]
) -> Callable[[str], Engine]:
    """Start a kvnixl engine that declines what it cannot verify, by ``kv_load_failure_policy``."""
    return lambda policy: start_engine(
        vllm_engines.spec(
            "llama", connector("kvnixl", policy, lease_verification="require"), name=policy
        )
    )


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_stock_prefill_is_declined_where_verification_is_required(
    engines: dict[str, Engine],
    requiring: Callable[[str], Engine],
    reference: Reference,
    make_prompt: MakePrompt,
    policy: str,
) -> None:
    pair = Pair(engines["stock"], requiring(policy))
    counted(pair.prefill)
    prompt = make_prompt(200)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
    if policy == "recompute":
        # Nothing was received, so the prompt is computed as by a single engine.
        assert answer.token_ids == reference.tokens(prompt, MAX_TOKENS, decode_last=False)
        assert answer.num_external_tokens == 0
    else:
        assert (answer.finish_reason, answer.token_ids) == ("error", ())
    counts = counted(pair.decode)
    assert reads_by_result(counts) == {"failed": 1}
    assert counts["read_failures_total=no_lease"] == 1
    assert counts["read_bytes_total"] == 0
    assert "lease_verification" in pair.decode.log()  # the warning says what to change
    pair.decode.wait_blocks_in_use(0)
    assert_freed(pair.prefill)

    # It declines a stock prefill, not every prefill.
    verified = Pair(engines["kvnixl"], pair.decode).handoff(prompt := make_prompt(200)).decode
    assert verified.token_ids == reference.tokens(prompt)
    assert reads_by_result(counted(pair.decode)) == {"verified": 1}


# --- what they tell each other --------------------------------------------------------------------


def handshake(engine: Engine) -> tuple[str, dict[str, Any]]:
    """The compatibility hash and the agent metadata that an engine serves, not interpreted."""
    with zmq.Context() as context, context.socket(zmq.REQ) as channel:
        channel.linger = 0
        channel.connect(f"tcp://127.0.0.1:{engine.side_channel_port}")
        channel.send(encode_get_meta(0, 0))
        assert channel.poll(TIMEOUT_S * 1000), f"no reply from {engine.name}"
        payload, _clock = channel.recv_multipart()
    decoded = msgspec.msgpack.decode(payload)
    assert set(decoded) == {"compatibility_hash", "agent_metadata_bytes"}
    return decoded["compatibility_hash"], msgspec.msgpack.decode(decoded["agent_metadata_bytes"])


def test_both_serve_the_same_metadata(engines: dict[str, Engine]) -> None:
    stock_hash, stock = handshake(engines["stock"])
    kvnixl_hash, kvnixl = handshake(engines["kvnixl"])
    assert kvnixl_hash == stock_hash
    assert kvnixl.pop("kvnixl")["protocol"] == 1
    assert list(kvnixl) == list(stock)
    of_an_engine = {"engine_id", "agent_metadata", "kv_caches_base_addr"}
    for name in of_an_engine:
        assert kvnixl.pop(name) != (value := stock.pop(name))
        assert value
    assert kvnixl == stock


def test_both_emit_the_same_parameters(engines: dict[str, Engine], make_prompt: MakePrompt) -> None:
    prompt = make_prompt(200)
    emitted = {
        name: Pair(engine, engine).run_prefill(prompt).kv_transfer_params
        for name, engine in engines.items()
    }
    # As a router passes them on.
    stock, kvnixl = (json.loads(json.dumps(emitted[name])) for name in ("stock", "kvnixl"))
    lease = kvnixl.pop(LEASE_PARAM)
    assert PromptDigest.parse(kvnixl.pop(PROMPT_PARAM)).begins(prompt)
    assert isinstance(lease, str)
    assert kvnixl.pop("remote_registration_generation") > 0  # stock has it from vLLM 0.33 on
    assert list(kvnixl) == list(stock)
    of_an_engine = {"remote_block_ids", "remote_engine_id", "remote_request_id", "remote_port"}
    for name in of_an_engine:
        assert isinstance(kvnixl[name], type(stock[name])), name
    (stock_blocks,), (kvnixl_blocks,) = stock["remote_block_ids"], kvnixl["remote_block_ids"]
    assert len(kvnixl_blocks) == len(stock_blocks) == 7
    assert {k: v for k, v in kvnixl.items() if k not in of_an_engine} == {
        k: v for k, v in stock.items() if k not in of_an_engine
    }
    # Nobody else gives these back.
    for prefill, decode in (("stock", "kvnixl"), ("kvnixl", "stock")):
        engines[decode].generate(prompt, 1, kv_transfer_params=emitted[prefill])
        engines[prefill].wait_blocks_in_use(0)


# --- heartbeats -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engines", [(SHORT_LEASE_S, {"max_num_seqs": 1})], indirect=True, ids=["short-leases"]
)
@both_directions
def test_a_request_may_wait_at_the_decode_engine_for_longer_than_the_lease(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    """Behind others, of which it runs one at a time."""
    queue = [pair.decode.submit(make_prompt(8), 2000) for _ in range(4)]
    prompt = make_prompt(200)
    prefilled = pair.run_prefill(prompt)
    waiting = pair.decode.submit(
        prompt, MAX_TOKENS, kv_transfer_params=prefilled.kv_transfer_params
    )
    until = prefilled.finished_at + 1.5 * SHORT_LEASE_S
    try:
        while time.monotonic() < until:
            assert pair.prefill.blocks_in_use() == 7
            time.sleep(0.05)
        assert not waiting.done()
    finally:
        for request in queue:
            pair.decode.abort(request.request_id)
    answer = waiting.result()
    assert answer.token_ids == reference.tokens(prompt, MAX_TOKENS)
    assert answer.num_external_tokens == 200
    pair.prefill.wait_blocks_in_use(0)
    counts = counted(pair.prefill)
    assert ends_by(pair.prefill, counts) == ({} if is_stock(pair.prefill) else {"read": 1})
    if not is_stock(pair.prefill):
        assert counts["lease_renewals_total"] > 0
