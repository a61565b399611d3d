"""KV caches of other shapes than one group of full-attention blocks on one rank.

* hybrid: full attention and a sliding window in turn, two cache groups;
* MLA: one latent vector for all heads;
* tensor parallelism of unequal width, where a rank reads parts of blocks or from several ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvnixl.bench import vllm_child
from kvnixl.bench.vllm_engines import Engine, Pair, Reference, prefill_params
from tests.vllm_pairs import SharedEngines, rotate_block_ids

# The first test may have to wait until vLLM is imported.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK_SIZE = 32
WINDOW = 128
MAX_TOKENS = 8
# Longer than any wait here: what becomes free was given back and did not expire.
OPTIONS = {"kv_connector_extra_config": {"kv_lease_duration": 300}}
KVNIXL: dict[str, Any] = {"kv_connector": "KvNixlConnector", "kv_role": "kv_both", **OPTIONS}
STOCK: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **OPTIONS}
# Keys and values of 4 KV heads with 64 float32 each, of one layer.
BLOCK_BYTES = BLOCK_SIZE * 4 * 2 * 64 * 4

MakePrompt = Callable[[int], list[int]]


def counted(engine: Engine) -> Counter[str]:
    """What a kvnixl connector counted since the last call, as ``name`` or ``name=label``."""
    total: Counter[str] = Counter()
    for stats in engine.take_connector_stats():
        for name, by_label in stats.get("counters", {}).items():
            for label, count in by_label.items():
                total[f"{name}={label}" if label else name] += count
    return total


# --- sliding windows ------------------------------------------------------------------------------


@pytest.fixture
def hybrid(vllm_pair: Callable[..., Pair]) -> Pair:
    pair = vllm_pair(KVNIXL, kind="hybrid")
    for engine in (pair.prefill, pair.decode):
        counted(engine)
    return pair


@pytest.fixture
def hybrid_reference(vllm_reference: Callable[..., Reference]) -> Reference:
    return vllm_reference("hybrid")


def hybrid_bytes(num_tokens: int) -> int:
    """Two layers of each kind; a window of 128 tokens can touch 5 blocks."""
    full = -(-num_tokens // BLOCK_SIZE)
    windowed = min(full, WINDOW // BLOCK_SIZE + 1)
    return 2 * BLOCK_BYTES * (full + windowed)


@pytest.mark.parametrize(
    "num_tokens", [20, 100, WINDOW, WINDOW + 1, WINDOW + BLOCK_SIZE + 1, 200, 1000]
)
def test_only_the_window_is_read_of_windowed_layers(
    hybrid: Pair, hybrid_reference: Reference, make_prompt: MakePrompt, num_tokens: int
) -> None:
    prompt = make_prompt(num_tokens)
    handoff = hybrid.handoff(prompt, max_tokens=MAX_TOKENS)
    assert handoff.decode.token_ids == hybrid_reference.tokens(prompt, MAX_TOKENS)
    assert handoff.decode.num_external_tokens == num_tokens
    counts = counted(hybrid.decode)
    assert counts["reads_total=verified"] == 1
    assert counts["read_bytes_total"] == hybrid_bytes(num_tokens)
    assert sorted(map(len, handoff.params["remote_block_ids"])) == sorted(
        (-(-num_tokens // BLOCK_SIZE), min(-(-num_tokens // BLOCK_SIZE), 5))
    )
    hybrid.prefill.wait_blocks_in_use(0)
    assert counted(hybrid.prefill)["leases_ended_total=read"] == 1


def test_generation_goes_on_past_the_window(
    hybrid: Pair, hybrid_reference: Reference, make_prompt: MakePrompt
) -> None:
    """Blocks that were received leave the window meanwhile."""
    prompt = make_prompt(150)
    answer = hybrid.handoff(prompt, max_tokens=WINDOW + 2 * BLOCK_SIZE).decode
    assert answer.token_ids == hybrid_reference.tokens(prompt, WINDOW + 2 * BLOCK_SIZE)


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_prompts_at_the_edge_of_a_window_are_computed_here(
    hybrid: Pair, hybrid_reference: Reference, make_prompt: MakePrompt, num_blocks: int
) -> None:
    """Their last token attends to a token whose block neither engine keeps."""
    prompt = make_prompt(WINDOW - 1 + num_blocks * BLOCK_SIZE)
    answer = hybrid.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == hybrid_reference.tokens(prompt, MAX_TOKENS)
    assert answer.num_external_tokens == 0
    assert counted(hybrid.decode)["pull_decisions_total=window_edge"] == 1
    hybrid.prefill.wait_blocks_in_use(0)
    assert counted(hybrid.prefill)["leases_ended_total=released"] == 1


def test_a_window_that_has_moved_on_is_not_read(hybrid: Pair, make_prompt: MakePrompt) -> None:
    """P generated tokens itself, and its window has left a block that D needs."""
    prompt = make_prompt(WINDOW + BLOCK_SIZE - 10)
    prefilled = hybrid.prefill.generate(prompt, 11, kv_transfer_params=prefill_params())
    reference = prefilled.kv_transfer_params
    assert reference is not None
    assert 0 in (ids[0] for ids in reference["remote_block_ids"])  # vLLM's placeholder
    hybrid.decode.generate(prompt, MAX_TOKENS, kv_transfer_params=reference)
    counts = counted(hybrid.decode)
    assert counts["reads_total=failed"] == counts["read_failures_total=blocks"] == 1


@pytest.mark.parametrize(
    ("cached", "num_tokens"),
    [
        pytest.param(64, 100, id="inside-the-window"),
        pytest.param(96, 300, id="short-prefix"),
        pytest.param(320, 600, id="prefix-beyond-the-window"),
        pytest.param(320, 330, id="nearly-all"),
    ],
)
def test_windows_with_a_local_prefix(
    hybrid: Pair,
    hybrid_reference: Reference,
    make_prompt: MakePrompt,
    cached: int,
    num_tokens: int,
) -> None:
    prompt = make_prompt(num_tokens)
    hybrid.decode.generate(prompt[:cached], 1)
    counted(hybrid.decode)
    answer = hybrid.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == hybrid_reference.tokens(prompt, MAX_TOKENS)
    # vLLM does not find the last block of a prefix that ends with a window.
    assert answer.num_local_tokens == cached - BLOCK_SIZE
    missing = num_tokens - cached + BLOCK_SIZE
    assert answer.num_external_tokens == missing
    counts = counted(hybrid.decode)
    assert counts["reads_total=verified"] == 1
    assert counts["read_bytes_total"] == hybrid_bytes(missing)


@pytest.mark.parametrize("group", ["full", "windowed"])
def test_blocks_of_either_group_matter(
    hybrid: Pair, hybrid_reference: Reference, make_prompt: MakePrompt, group: str
) -> None:
    """The comparison of tokens would notice wrong blocks of one group."""

    def rotate(params: dict[str, Any]) -> dict[str, Any]:
        rotated = rotate_block_ids(params)["remote_block_ids"]
        chosen = (max if group == "full" else min)(rotated, key=len)
        return params | {
            "remote_block_ids": [
                new if new is chosen else old
                for new, old in zip(rotated, params["remote_block_ids"], strict=True)
            ]
        }

    prompt = make_prompt(400)
    answer = hybrid.handoff(prompt, max_tokens=MAX_TOKENS, tamper=rotate).decode
    assert len(answer.token_ids) == MAX_TOKENS
    assert answer.token_ids != hybrid_reference.tokens(prompt, MAX_TOKENS)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(STOCK, KVNIXL), (KVNIXL, STOCK)], ids=["stock-kvnixl", "kvnixl-stock"]
)
def test_sliding_windows_with_a_stock_peer(
    vllm_pair: Callable[..., Pair],
    hybrid_reference: Reference,
    make_prompt: MakePrompt,
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> None:
    pair = vllm_pair(prefill, decode, kind="hybrid")
    counted(pair.prefill)
    lengths = (100, WINDOW + 1, 400)
    for num_tokens in lengths:
        prompt = make_prompt(num_tokens)
        answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
        assert answer.token_ids == hybrid_reference.tokens(prompt, MAX_TOKENS)
        assert answer.num_external_tokens == num_tokens
    prompt = make_prompt(600)
    pair.decode.generate(prompt[:320], 1)
    answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
    assert answer.token_ids == hybrid_reference.tokens(prompt, MAX_TOKENS)
    assert answer.num_local_tokens == 320 - BLOCK_SIZE
    pair.prefill.wait_blocks_in_use(0)
    if decode is KVNIXL:
        assert counted(pair.decode)["reads_total=unverified"] == len(lengths) + 1
    else:
        assert counted(pair.prefill)["leases_ended_total=read"] == len(lengths) + 1


# --- one latent vector for all heads --------------------------------------------------------------

MLA_BLOCK_SIZE = 16


def digests_at_first_token(context: vllm_child.EngineContext) -> list[str] | None:
    """Of the blocks of the only request under way, in order."""
    for req_id, request in context.scheduler.requests.items():
        if request.num_output_tokens:
            blocks = context.scheduler.kv_cache_manager.get_block_ids(req_id)
            (digests,) = vllm_child.block_digests(context, [list(ids) for ids in blocks])
            return digests
    return None


def test_latent_caches_arrive(vllm_pair: Callable[..., Pair], make_prompt: MakePrompt) -> None:
    """The same bytes in the decode engine, and the tokens of a pair with vLLM's own connector.

    Those of a single engine often differ, with vLLM's own connector as well: its MLA attention for
    the CPU does not give the same log-probabilities in a prefill and in a decode step.
    """
    prompts = [make_prompt(num_tokens) for num_tokens in (15, 16, 17, 200, 1000)]
    stock = vllm_pair(STOCK, kind="mla")
    expected = [stock.handoff(prompt, max_tokens=MAX_TOKENS).decode.token_ids for prompt in prompts]

    pair = vllm_pair(KVNIXL, kind="mla")
    for prompt, tokens in zip(prompts, expected, strict=True):
        params = pair.run_prefill(prompt).kv_transfer_params
        assert params is not None
        (computed,) = pair.prefill.call(vllm_child.block_digests, params["remote_block_ids"])
        found = pair.decode.when(digests_at_first_token)
        answer = pair.decode.generate(prompt, MAX_TOKENS, kv_transfer_params=params)
        received, _ = found.result()
        full = (len(prompt) - 1) // MLA_BLOCK_SIZE  # the last token is computed anew
        assert received[:full] == computed[:full]
        assert answer.token_ids == tokens
        assert answer.num_external_tokens == len(prompt)
    assert counted(pair.decode)["reads_total=verified"] == len(prompts)

    wrong = pair.handoff(prompts[-1], max_tokens=MAX_TOKENS, tamper=rotate_block_ids).decode
    assert wrong.token_ids != expected[-1]


# --- tensor parallelism ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unequal(vllm_engines: SharedEngines) -> Iterator[dict[str, Engine]]:
    """One engine with two ranks, and one with one rank of either connector."""
    vllm_engines.close_pair()  # few cores, and two ranks are busy
    spec = vllm_engines.spec
    specs = {
        "two": spec("llama", KVNIXL, {"tensor_parallel_size": 2}, name="two-ranks"),
        "one": spec("llama", KVNIXL, name="one-rank"),
        "stock": spec("llama", STOCK, name="stock"),
    }
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(vllm_engines.template.launch(spec))
            for name, spec in specs.items()
        }
        for engine in started.values():
            engine.wait_ready()
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("two", "one"), ("one", "two"), ("two", "stock"), ("stock", "two")],
)
def test_heads_find_their_rank(
    unequal: dict[str, Engine],
    vllm_reference: Callable[..., Reference],
    make_prompt: MakePrompt,
    prefill: str,
    decode: str,
) -> None:
    pair = Pair(unequal[prefill], unequal[decode])
    for engine in (pair.prefill, pair.decode):
        counted(engine)
    lengths = (33, 300)
    for num_tokens in lengths:
        prompt = make_prompt(num_tokens)
        answer = pair.handoff(prompt, max_tokens=MAX_TOKENS).decode
        assert answer.token_ids == vllm_reference().tokens(prompt, MAX_TOKENS)
        assert answer.num_external_tokens == num_tokens
        pair.prefill.wait_blocks_in_use(0)
    # Each rank counts.
    ranks = {"one": 1, "two": 2}
    if decode in ranks:
        result = "unverified" if prefill == "stock" else "verified"
        assert counted(pair.decode)[f"reads_total={result}"] == len(lengths) * ranks[decode]
    if prefill in ranks:
        ended = counted(pair.prefill)
        assert ended["leases_ended_total=read"] == len(lengths) * ranks[prefill]
        assert ended["leases_ended_total=expired"] == 0
