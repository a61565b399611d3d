"""The vLLM engines that other tests stand on, with vLLM's own NixlConnector."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvnixl.bench import vllm_child
from kvnixl.bench.vllm_engines import (
    Engine,
    EngineError,
    EngineSpec,
    EngineTemplate,
    Pair,
    Reference,
)
from kvnixl.bench.vllm_model import TinyModel, make_model
from tests.vllm_pairs import ROOT, STOCK, SharedEngines, rotate_block_ids

# The first test of a session also pays for importing vLLM.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK = 32
MakePrompt = Callable[[int], list[int]]


@pytest.fixture
def pair(vllm_pair: Callable[..., Pair]) -> Pair:
    return vllm_pair(STOCK)


@pytest.fixture
def reference(vllm_reference: Callable[..., Reference]) -> Reference:
    return vllm_reference()


# --- functions for the engines' processes -------------------------------------------------------


def fail(_: vllm_child.EngineContext) -> None:
    raise ValueError("failed on purpose")


def never(_: vllm_child.EngineContext) -> bool:
    return False


def connector_name(context: vllm_child.EngineContext) -> str:
    return type(context.connector).__name__


def schedules_ahead(context: vllm_child.EngineContext) -> bool:
    return context.core.batch_queue is not None


def break_next_step(context: vllm_child.EngineContext) -> None:
    def step() -> None:
        raise RuntimeError("broken on purpose")

    context.core.step_fn = step


# --- models -------------------------------------------------------------------------------------


def test_a_model_depends_on_its_seed_only(tmp_path: Path) -> None:
    made = [make_model(tmp_path / str(n), TinyModel(seed=seed)) for n, seed in enumerate([0, 0, 1])]
    first, again, other = [(path / "model.safetensors").read_bytes() for path in made]
    assert first == again != other
    assert made[0].name == made[1].name != made[2].name


def test_a_model_is_made_once(tmp_path: Path) -> None:
    made = make_model(tmp_path, TinyModel())
    before = (made / "config.json").stat()
    assert make_model(tmp_path, TinyModel()) == made
    assert (made / "config.json").stat().st_mtime_ns == before.st_mtime_ns
    assert list(tmp_path.iterdir()) == [made], "left-over work"


def test_an_unknown_kind_of_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"'moe' is not one of llama, hybrid, mla"):
        TinyModel("moe")  # type: ignore[arg-type]


# --- handing over -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 200])
def test_a_handoff_gives_the_tokens_of_one_engine(
    pair: Pair, reference: Reference, make_prompt: MakePrompt, tokens: int
) -> None:
    prompt = make_prompt(tokens)
    answer = pair.handoff(prompt, 8)
    # A prompt of one token holds no KV that the decoding engine would not compute anyway.
    transferred = 0 if tokens == 1 else tokens
    assert answer.decode.token_ids == reference.tokens(prompt, 8)
    assert answer.decode.token_ids[:1] == answer.prefill.token_ids
    assert answer.decode.finish_reason == "length"
    assert answer.decode.num_external_tokens == transferred
    assert answer.decode.num_local_tokens == 0
    assert answer.prefill.num_computed_tokens == tokens
    assert answer.decode.seconds_to_first_token > 0


def test_the_counters_say_what_was_transferred(pair: Pair, make_prompt: MakePrompt) -> None:
    external = "vllm:external_prefix_cache_hits"
    by_source = "vllm:prompt_tokens_by_source{source=external_kv_transfer}"
    pair.handoff(make_prompt(BLOCK), 2)  # so that all counters exist
    pair.decode.take_connector_stats()
    before = pair.decode.metrics()
    pair.handoff(make_prompt(100), 2)
    after = pair.decode.metrics()
    assert after[external] - before[external] == 100
    assert after[by_source] - before[by_source] == 100
    (stats,) = pair.decode.take_connector_stats()
    # Four blocks of 32 tokens; K and V of four layers with four heads of 64 floats.
    assert stats["bytes_transferred"] == [4 * 32 * 2 * 4 * 4 * 64 * 4]
    assert not pair.decode.take_connector_stats()


def test_other_remote_blocks_give_other_tokens(
    pair: Pair, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(200)
    answer = pair.handoff(prompt, 8, tamper=rotate_block_ids)
    assert answer.decode.num_external_tokens == 200
    assert answer.decode.token_ids != reference.tokens(prompt, 8)


def test_the_bytes_of_both_sides_can_be_compared(pair: Pair, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(5 * BLOCK + 1)
    prefilled = pair.run_prefill(prompt)
    params = prefilled.kv_transfer_params
    assert params is not None
    (sent,) = pair.prefill.call(vllm_child.block_digests, params["remote_block_ids"])
    generation = pair.decode.submit(prompt, 1500, kv_transfer_params=params)
    generation.wait_first_token()
    (received,) = pair.decode.call(_digests_of_request, generation.request_id)
    assert pair.decode.abort(generation.request_id)
    # The last token is computed by both.
    assert received[:5] == sent[:5]
    assert len(set(sent)) == len(sent)


def _digests_of_request(context: vllm_child.EngineContext, request_id: str) -> list[list[str]]:
    return vllm_child.block_digests(context, vllm_child.request_block_ids(context, request_id))


def test_sliding_windows_make_two_groups(
    vllm_pair: Callable[..., Pair],
    vllm_reference: Callable[..., Reference],
    make_prompt: MakePrompt,
) -> None:
    pair = vllm_pair(STOCK, kind="hybrid")
    prompt = make_prompt(300)
    answer = pair.handoff(prompt, 8)
    # A window of 128 tokens touches five blocks; the other group has all ten.
    assert sorted(map(len, answer.params["remote_block_ids"])) == [5, 10]
    assert answer.decode.num_external_tokens == 300
    assert answer.decode.token_ids == vllm_reference("hybrid").tokens(prompt, 8)


def test_async_scheduling_can_be_forced_on(
    vllm_engines: SharedEngines,
    start_engine: Callable[[EngineSpec], Engine],
    reference: Reference,
    make_prompt: MakePrompt,
) -> None:
    engine = start_engine(vllm_engines.spec(async_scheduling=True))
    prompt = make_prompt(40)
    assert engine.call(schedules_ahead)
    assert not reference.engine.call(schedules_ahead)
    assert engine.generate(prompt, 4).token_ids == reference.tokens(prompt, 4)


# --- requests -----------------------------------------------------------------------------------


def test_several_requests_are_under_way(reference: Reference, make_prompt: MakePrompt) -> None:
    engine = reference.engine
    prompts = [make_prompt(40) for _ in range(5)]
    generations = [engine.submit(prompt, 4) for prompt in prompts]
    together = [generation.result().token_ids for generation in generations]
    assert together == [reference.tokens(prompt, 4, decode_last=False) for prompt in prompts]


def test_an_abort_gives_back_the_blocks(reference: Reference, make_prompt: MakePrompt) -> None:
    engine = reference.engine
    generation = engine.submit(make_prompt(100), 1500)
    generation.wait_first_token()
    assert engine.blocks_in_use() >= 4
    assert not generation.done()
    assert engine.abort(generation.request_id)
    engine.wait_blocks_in_use(0)
    aborted = generation.result()
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 1500
    assert not engine.abort(generation.request_id)


def test_a_prefill_holds_its_blocks_until_they_are_read(
    pair: Pair, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(100)
    prefilled = pair.run_prefill(prompt)
    assert pair.prefill.blocks_in_use() == 4
    freed = pair.prefill.when_blocks_in_use(0)
    decoded = pair.decode.generate(prompt, 2, kv_transfer_params=prefilled.kv_transfer_params)
    assert freed.result()[1] > decoded.submitted_at


def test_a_paused_engine_makes_no_step(reference: Reference, make_prompt: MakePrompt) -> None:
    engine = reference.engine
    engine.pause()
    generation = engine.submit(make_prompt(10), 1)
    with pytest.raises(EngineError, match=r"holds_blocks\(1,\) was not true in time"):
        engine.wait_blocks_in_use(1, timeout=0.2)
    assert not generation.done()
    engine.resume()
    assert generation.result().finish_reason == "length"


def test_a_refused_request_says_why(reference: Reference, make_prompt: MakePrompt) -> None:
    refused = reference.engine.generate(make_prompt(3000), 1)
    assert refused.finish_reason is None
    assert "2048" in str(refused.error)
    assert refused.num_external_tokens is None
    with pytest.raises(EngineError, match="has no token"):
        _ = refused.seconds_to_first_token


def test_a_request_id_is_used_once_at_a_time(reference: Reference, make_prompt: MakePrompt) -> None:
    engine = reference.engine
    first = engine.submit(make_prompt(10), 1500, request_id="same")
    with pytest.raises(EngineError, match="'same' is in use"):
        engine.generate(make_prompt(10), 1, request_id="same")
    assert engine.abort("same")
    assert first.result().finish_reason == "abort"


# --- looking inside -----------------------------------------------------------------------------


def test_functions_run_inside(pair: Pair) -> None:
    assert pair.prefill.call(connector_name) == "NixlPullConnector"
    with pytest.raises(EngineError, match="ValueError: failed on purpose"):
        pair.prefill.call(fail)
    with pytest.raises(EngineError, match=r"never\(\) was not true in time, at last False"):
        pair.prefill.wait_until(never, timeout=0.1)
    assert pair.prefill.num_blocks() == 255


# --- processes ----------------------------------------------------------------------------------


def test_a_killed_prefill_leaves_a_decode_that_answers(
    vllm_engines: SharedEngines,
    start_engine: Callable[[EngineSpec], Engine],
    reference: Reference,
    make_prompt: MakePrompt,
) -> None:
    prefill, decode = [
        start_engine(vllm_engines.spec("llama", STOCK, name=name)) for name in ("p", "d")
    ]
    pair = Pair(prefill, decode)
    pair.handoff(make_prompt(BLOCK), 1)

    def kill(_: Any) -> None:
        prefill.kill()

    answer = pair.handoff(make_prompt(100), 8, between=kill)
    assert prefill.exit_code == -signal.SIGKILL
    assert not prefill.alive
    assert answer.decode.finish_reason == "error"
    with pytest.raises(EngineError, match=r"engine p \(process \d+\) is gone; the end of"):
        prefill.blocks_in_use()
    prompt = make_prompt(50)
    assert decode.generate(prompt, 4).token_ids == reference.tokens(prompt, 4)

    # The same engine again, with the same port.
    again = start_engine(prefill.spec)
    assert again.side_channel_port == prefill.side_channel_port
    prompt = make_prompt(100)
    assert Pair(again, decode).handoff(prompt, 4).decode.token_ids == reference.tokens(prompt, 4)


def test_a_frozen_engine_is_late(
    vllm_engines: SharedEngines, start_engine: Callable[[EngineSpec], Engine]
) -> None:
    engine = start_engine(vllm_engines.spec())
    engine.freeze()
    with pytest.raises(EngineError, match=r"\(it is frozen\) did not bring call within 0\.2 s"):
        engine.call(connector_name, timeout=0.2)
    frozen = engine.usage()
    assert frozen.processes == 1
    assert frozen.threads >= 2
    assert frozen.rss_bytes > 2**20
    assert frozen.file_descriptors > 2
    assert engine.usage().cpu_seconds == frozen.cpu_seconds
    engine.thaw()
    assert engine.call(connector_name) == "NoneType"

    remains = engine.stop()
    assert engine.exit_code == 0
    assert not remains.children
    assert not [path for path in remains.shared_memory if "(deleted)" not in path]
    assert str(engine.log_path) in remains.file_descriptors


def test_a_broken_step_ends_the_engine(
    vllm_engines: SharedEngines,
    start_engine: Callable[[EngineSpec], Engine],
    make_prompt: MakePrompt,
) -> None:
    engine = start_engine(vllm_engines.spec())
    generation = engine.submit(make_prompt(10), 1500)
    generation.wait_first_token()
    engine.call(break_next_step)
    with pytest.raises(EngineError, match="RuntimeError: broken on purpose"):
        generation.result()
    with pytest.raises(EngineError, match="is gone"):
        engine.generate([1], 1)
    engine.kill()  # it has ended by itself
    assert engine.exit_code == 1
    assert "broken on purpose" in engine.log()


def test_an_engine_that_cannot_be_made_says_why(vllm_engines: SharedEngines) -> None:
    spec = vllm_engines.spec("llama", {"kv_connector": "NoSuch", "kv_role": "kv_both"})
    with pytest.raises(EngineError, match=r"(?s)could not be made:.*NoSuch"):
        vllm_engines.template.start(spec)


@pytest.mark.parametrize("socket_ends", ["with the process", "before its last words"])
def test_an_interpreter_without_vllm_says_so(tmp_path: Path, socket_ends: str) -> None:
    source = "raise ImportError('no vLLM here')"
    if socket_ends == "before its last words":
        source = f"import os, sys, time; os.close(int(sys.argv[1])); time.sleep(0.3); {source}"
    # A directory that hides the real vLLM.
    (tmp_path / "vllm.py").write_text(source)
    with pytest.raises(EngineError, match="ImportError: no vLLM here"):
        EngineTemplate(tmp_path / "work", import_paths=[tmp_path])


OWNER = """
import sys, time
from pathlib import Path
from kvnixl.bench.vllm_engines import EngineSpec, EngineTemplate
from kvnixl.bench.vllm_model import TinyModel, make_model

work = Path(sys.argv[1])
template = EngineTemplate(work)
engine = template.launch(EngineSpec(make_model(work, TinyModel())))
print(template._process.pid, engine.pid, flush=True)
time.sleep(600)
"""


def test_everything_ends_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    with owner:
        assert owner.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    try:
        assert len(handles) == 2
        for handle in handles:
            assert select.select([handle], [], [], 20)[0], "still there"
    finally:
        for handle in handles:
            os.close(handle)
