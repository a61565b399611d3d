"""Engine pairs of real vLLM in normal operation: right tokens, verified reads, nothing left over.

Every pair moves KV over NIXL between two processes. Tokens are compared with those of one engine
without a connector. Leases last longer than any wait here, so blocks that become free were given
back and did not expire. A read that failed would be an error of its request, not a recomputation,
except where a test says otherwise.
"""

from __future__ import annotations

import random
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvnixl.bench.vllm_engines import (
    Engine,
    EngineSpec,
    Generated,
    Generation,
    Handoff,
    JsonObject,
    Pair,
    Reference,
    prefill_params,
)
from tests import vllm_core_probes as probes
from tests.vllm_pairs import SharedEngines

# The first test may have to wait until vLLM is imported.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK = 32  # tokens
BLOCK_BYTES = BLOCK * 4 * 4 * 2 * 64 * 4  # layers, KV heads, K and V, head size, float32
LEASE_S = 300.0
FREED_WITHIN_S = 60.0
MAX_TOKENS = 6

Prompt = list[int]
Counts = dict[str, Counter[str]]


def transfer_config(role: str = "kv_both", policy: str = "fail", **options: Any) -> JsonObject:
    return {
        "kv_connector": "KvNixlConnector",
        "kv_connector_module_path": "kvnixl.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, **options},
    }


def take_counts(engine: Engine) -> Counts:
    """What the connector counted since the last call: metric -> label -> increase."""
    counts: Counts = {}
    for step in engine.take_connector_stats():
        for name, by_label in step["counters"].items():
            counts.setdefault(name, Counter()).update(by_label)
    return counts


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


@dataclass
class Rig:
    """A pair, what its tokens must be, and what it did since the last `settle`.

    Attributes:
        prompt: a prompt of so many tokens that no other request begins with.
        sizes: random numbers, the same in each run.
    """

    pair: Pair
    reference: Reference
    prompt: Callable[[int], Prompt]
    sizes: random.Random

    def __post_init__(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.take_connector_stats()

    @property
    def prefill(self) -> Engine:
        return self.pair.prefill

    @property
    def decode(self) -> Engine:
        return self.pair.decode

    def handoff(self, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> Generated:
        """One request through both engines, with the tokens that it must have."""
        return self.check(prompt, self.pair.handoff(prompt, max_tokens))

    def handoffs(self, prompts: Sequence[Prompt], max_tokens: int = MAX_TOKENS) -> list[Generated]:
        """Many requests at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            done = list(pool.map(lambda each: self.pair.handoff(each, max_tokens), prompts))
        return [self.check(*each) for each in zip(prompts, done, strict=True)]

    def check(self, prompt: Prompt, done: Handoff) -> Generated:
        expected = self.expected(prompt, done.decode)
        assert done.decode.token_ids == expected, f"{len(prompt)} tokens: {done}"
        assert done.prefill.token_ids == self.expected(prompt, done.prefill)
        return done.decode

    def expected(self, prompt: Prompt, done: Generated) -> tuple[int, ...]:
        """What one engine answers that computed the last prompt token in the same way: after a
        read in a step of its own."""
        assert done.finish_reason == "length", done
        alone = bool(done.num_external_tokens) or done.num_local_tokens == len(prompt) - 1
        return self.reference.tokens(prompt, len(done.token_ids), decode_last=alone)

    def settle(self) -> tuple[Counts, Counts]:
        """Wait until neither engine holds a block, and look for what else may be left.

        Returns:
            What P and D counted.
        """
        for engine in (self.prefill, self.decode):
            engine.wait_blocks_in_use(0, FREED_WITHIN_S)
            engine.wait_until(probes.nothing_known, timeout=FREED_WITHIN_S)
        return take_counts(self.prefill), take_counts(self.decode)

    def assert_read(self, verified: int, **others: int) -> tuple[Counts, Counts]:
        """`settle`, and compare how D's reads and P's leases ended.

        Args:
            verified: how many reads were verified.
            others: how many ended otherwise; by default none.
        """
        produced, consumed = self.settle()
        assert consumed.get("reads_total", {}) == +Counter(verified=verified, **others)
        ended = produced.get("leases_ended_total", Counter())
        assert set(ended) <= {"read", "released"}, ended
        assert ended["read"] == verified + others.get("unverified", 0)
        return produced, consumed


# --- engines ------------------------------------------------------------------------------------


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(
    vllm_pair: Callable[..., Pair],
    vllm_reference: Callable[..., Reference],
    make_prompt: Callable[[int], Prompt],
) -> MakeRig:
    """``make_rig(**arguments of vllm_pair)``."""

    def make(
        connector: JsonObject | None = None, engine_args: JsonObject | None = None, **fields: Any
    ) -> Rig:
        pair = vllm_pair(connector or transfer_config(), engine_args=engine_args, **fields)
        dtype = {"dtype": engine_args["dtype"]} if engine_args and "dtype" in engine_args else None
        return Rig(pair, vllm_reference(engine_args=dtype), make_prompt, random.Random(0))

    return make


def anonymous_memory(pid: int) -> int:
    """Resident bytes of a process, without the pages of libraries, which it loads as it uses
    them."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 200, 1000, 1900)


def check_sizes(rig: Rig, sizes: Sequence[int]) -> None:
    for size in sizes:
        decoded = rig.handoff(rig.prompt(size))
        pulled = size if size > 1 else 0  # the last token is computed in any case
        assert decoded.num_external_tokens == pulled
        assert decoded.num_local_tokens == 0
        produced, consumed = rig.assert_read(verified=int(size > 1))
        if size > 1:
            assert consumed["read_bytes_total"][""] == num_blocks(size) * BLOCK_BYTES
            assert produced["lease_grants_total"] == {"granted": 1}
            assert consumed["pull_decisions_total"] == {"pull": 1}
        else:
            # P is told that nobody will read.
            assert produced["leases_ended_total"] == {"released": 1}
            assert consumed["pull_decisions_total"] == {"local_hit": 1}


def check_prefix_hits(rig: Rig) -> None:
    """What D's own prefix cache holds is not read, and P gets its blocks back all the same."""
    # A whole number of blocks and one token: the second time nothing is left to read.
    prompt = rig.prompt(6 * BLOCK + 1)
    assert rig.handoff(prompt).num_external_tokens == len(prompt)
    rig.assert_read(verified=1)
    again = rig.handoff(prompt)
    assert (again.num_local_tokens, again.num_external_tokens) == (6 * BLOCK, 0)
    produced, consumed = rig.assert_read(verified=0)
    assert produced["leases_ended_total"] == {"released": 1}
    assert consumed["pull_decisions_total"] == {"local_hit": 1}

    # The same prompt with a suffix: the blocks after the hit are read, and no others.
    longer = prompt + rig.prompt(100)
    decoded = rig.handoff(longer)
    assert (decoded.num_local_tokens, decoded.num_external_tokens) == (6 * BLOCK, 101)
    _, consumed = rig.assert_read(verified=1)
    assert consumed["read_bytes_total"][""] == num_blocks(101) * BLOCK_BYTES

    # Twice the same prompt, which ends inside a block.
    prompt = rig.prompt(200)
    rig.handoff(prompt)
    again = rig.handoff(prompt)
    assert (again.num_local_tokens, again.num_external_tokens) == (192, 8)
    _, consumed = rig.assert_read(verified=2)
    assert consumed["read_bytes_total"][""] == (num_blocks(200) + 1) * BLOCK_BYTES

    # A prefix that D computed itself, and P never saw.
    prompt = rig.prompt(200)
    rig.decode.generate(prompt[: 3 * BLOCK + 5], 1)
    decoded = rig.handoff(prompt)
    assert (decoded.num_local_tokens, decoded.num_external_tokens) == (96, 104)
    _, consumed = rig.assert_read(verified=1)
    assert consumed["read_bytes_total"][""] == (num_blocks(200) - 3) * BLOCK_BYTES


# --- one pair -----------------------------------------------------------------------------------


class TestPlainPair:
    @pytest.fixture
    def plain(self, make_rig: MakeRig) -> Rig:
        return make_rig()

    @pytest.mark.parametrize("size", SIZES)
    def test_tokens_of_one_request(self, plain: Rig, size: int) -> None:
        check_sizes(plain, [size])

    def test_prefix_hits(self, plain: Rig) -> None:
        check_prefix_hits(plain)

    def test_64_requests_at_once(self, plain: Rig) -> None:
        prompts = [plain.prompt(plain.sizes.randrange(33, 300)) for _ in range(64)]
        hits = plain.decode.metrics().get("vllm:external_prefix_cache_hits", 0)
        decoded = plain.handoffs(prompts)
        assert sum(each.num_external_tokens or 0 for each in decoded) == sum(map(len, prompts))
        plain.assert_read(verified=64)
        hits = plain.decode.metrics()["vllm:external_prefix_cache_hits"] - hits
        assert hits == sum(map(len, prompts))

    def test_kv_of_other_blocks_gives_other_tokens(self, plain: Rig) -> None:
        """The comparison of tokens can fail: P's blocks of another request, which are leased too,
        pass for the request's own."""
        pair = plain.pair
        prompt, other = plain.prompt(200), plain.prompt(200)
        wrong = pair.run_prefill(other)
        assert wrong.kv_transfer_params is not None
        blocks = wrong.kv_transfer_params["remote_block_ids"]
        done = pair.handoff(
            prompt, MAX_TOKENS, tamper=lambda params: params | {"remote_block_ids": blocks}
        )
        assert done.decode.num_external_tokens == len(prompt)
        assert done.decode.token_ids != plain.reference.tokens(prompt, MAX_TOKENS)
        # Nobody else takes the other request's lease.
        right = plain.decode.generate(
            other, MAX_TOKENS, kv_transfer_params=wrong.kv_transfer_params
        )
        assert right.token_ids == plain.expected(other, right)
        plain.assert_read(verified=2)


class TestOneReferenceForSeveralRequests:
    """The end of the first read ends the lease, so the others must not ask for the blocks too."""

    @pytest.fixture
    def plain(self, make_rig: MakeRig) -> Rig:
        return make_rig()

    def test_several_samples_of_one_prompt(self, plain: Rig) -> None:
        prompt = plain.prompt(1000)  # so long that D has no room for all of them at a time
        prefilled = plain.pair.run_prefill(prompt)
        plain.decode.call(probes.collect_outputs)
        # Only the most likely token is left to choose from, since greedy requests have one sample.
        plain.decode.generate(
            prompt,
            MAX_TOKENS,
            kv_transfer_params=prefilled.kv_transfer_params,
            sampling={"n": 10, "temperature": 1.0, "top_k": 1},
        )
        samples = plain.decode.call(probes.take_outputs)
        expected = plain.reference.tokens(prompt, MAX_TOKENS)
        assert sorted(samples) == [(index, expected) for index in range(10)]
        _, consumed = plain.assert_read(verified=1)
        assert consumed["pull_decisions_total"] == {"pull": 1, "already_read": 9}

    def submit_two(self, rig: Rig) -> tuple[Prompt, Generation, Generation]:
        prompt = rig.prompt(200)
        params = rig.pair.run_prefill(prompt).kv_transfer_params
        first, second = (
            rig.decode.submit(prompt, MAX_TOKENS, kv_transfer_params=params) for _ in range(2)
        )
        return prompt, first, second

    def test_one_is_aborted_before_it_is_scheduled(self, plain: Rig) -> None:
        """It does not give back what the other one is going to read."""
        plain.decode.pause()
        prompt, first, second = self.submit_two(plain)
        plain.decode.abort(second.request_id)
        plain.decode.resume()
        done = first.result()
        assert done.token_ids == plain.expected(prompt, done)
        assert done.num_external_tokens == len(prompt)
        plain.assert_read(verified=1)

    def test_all_are_aborted_before_they_are_scheduled(self, plain: Rig) -> None:
        plain.decode.pause()
        _, first, second = self.submit_two(plain)
        plain.decode.abort(first.request_id)
        plain.decode.abort(second.request_id)
        plain.decode.resume()
        produced, _ = plain.assert_read(verified=0)
        assert produced["leases_ended_total"] == {"released": 1}

    def test_prompts_that_share_it_by_mistake(self, plain: Rig) -> None:
        """As those of a batch, of which vLLM answers with the parameters of the first."""
        first, second = plain.prompt(2 * BLOCK + 1), plain.prompt(BLOCK + 18)
        plain.handoff(first)  # so that nothing of it is missing
        plain.decode.generate(second[:BLOCK], 1)
        plain.settle()
        params = plain.pair.run_prefill(first).kv_transfer_params
        plain.decode.pause()
        generations = [
            plain.decode.submit(prompt, MAX_TOKENS, kv_transfer_params=params)
            for prompt in (first, second)
        ]
        plain.decode.resume()
        for prompt, generation in zip((first, second), generations, strict=True):
            done = generation.result()
            assert done.token_ids == plain.expected(prompt, done)
            assert done.num_external_tokens == 0
        produced, consumed = plain.assert_read(verified=0)
        assert produced["leases_ended_total"] == {"released": 1}
        assert consumed["pull_decisions_total"] == {"local_hit": 1, "other_prompt": 1}

    def test_the_one_that_reads_is_aborted(self, plain: Rig) -> None:
        """The lease is over then, and the other one is computed."""
        plain.decode.pause()
        prompt, first, second = self.submit_two(plain)
        plain.decode.call(probes.hold_reads)
        plain.decode.resume()
        plain.decode.wait_until(probes.is_reading)
        plain.decode.abort(first.request_id)
        plain.decode.call(probes.let_reads_go)
        done = second.result()
        assert done.token_ids == plain.expected(prompt, done)
        assert done.num_external_tokens == 0
        produced, _ = plain.assert_read(verified=0, aborted=1)
        assert produced["leases_ended_total"] == {"released": 1}


class TestChunkedPrefill:
    """Long prompts take P many steps, and neither engine caches prefixes."""

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        return make_rig(engine_args={"max_num_batched_tokens": 96, "enable_prefix_caching": False})

    def test_tokens(self, rig: Rig) -> None:
        assert rig.prefill.call(probes.tokens_per_step) == 96
        check_sizes(rig, (BLOCK, 97, 200, 1000))

    def test_requests_at_once(self, rig: Rig) -> None:
        prompts = [rig.prompt(rig.sizes.randrange(33, 500)) for _ in range(16)]
        rig.handoffs(prompts)
        rig.assert_read(verified=16)

    def test_the_same_prompt_again_is_read_again(self, rig: Rig) -> None:
        prompt = rig.prompt(6 * BLOCK + 1)
        for _ in range(2):
            decoded = rig.handoff(prompt)
            assert (decoded.num_local_tokens, decoded.num_external_tokens) == (0, len(prompt))
        rig.assert_read(verified=2)


class TestBfloat16:
    def test_tokens(self, make_rig: MakeRig) -> None:
        rig = make_rig(engine_args={"dtype": "bfloat16"})
        for size in (BLOCK + 1, 200, 1000):
            decoded = rig.handoff(rig.prompt(size))
            assert decoded.num_external_tokens == size
            _, consumed = rig.assert_read(verified=1)
            assert consumed["read_bytes_total"][""] == num_blocks(size) * BLOCK_BYTES // 2


class TestSpeculativeDecoding:
    """Draft tokens have blocks too, but nothing of them is handed over."""

    def test_tokens(self, make_rig: MakeRig) -> None:
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
        rig = make_rig(engine_args={"speculative_config": ngram})
        for size in (BLOCK + 1, 2 * BLOCK, 200):
            # Repeats itself, so that there are drafts.
            prompt = (rig.prompt(size // 3 + 1) * 3)[:size]
            decoded = rig.handoff(prompt, 24)
            assert decoded.num_external_tokens == size
            _, consumed = rig.assert_read(verified=1)
            assert consumed["read_bytes_total"][""] == num_blocks(size) * BLOCK_BYTES


class TestAsyncScheduling:
    """vLLM schedules a step before it has seen the results of the one before."""

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        rig = make_rig(async_scheduling=True)
        assert rig.prefill.call(probes.runs_async)
        assert rig.decode.call(probes.runs_async)
        return rig

    def test_tokens(self, rig: Rig) -> None:
        check_sizes(rig, SIZES)

    def test_prefix_hits(self, rig: Rig) -> None:
        check_prefix_hits(rig)

    def test_requests_at_once(self, rig: Rig) -> None:
        prompts = [rig.prompt(rig.sizes.randrange(33, 300)) for _ in range(32)]
        rig.handoffs(prompts)
        rig.assert_read(verified=32)


class TestPreemption:
    """Small caches: vLLM takes the blocks of running requests away and computes them again."""

    ASYNC_SCHEDULING = False

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        # Five blocks a prompt, and a sixth soon: not enough for those that run at first.
        return make_rig(
            engine_args={"num_gpu_blocks_override": 34, "max_model_len": 1024},
            async_scheduling=self.ASYNC_SCHEDULING,
        )

    @contextmanager
    def held(self, engine: Engine, num_requests: int) -> Iterator[None]:
        """Hold an engine until it has so many requests, which then compete for its blocks whatever
        the speed of the machine."""
        engine.pause()
        try:
            yield
            engine.wait_until(probes.knows_requests, num_requests)
        finally:
            engine.resume()

    def test_of_decodes(self, rig: Rig) -> None:
        """A request that was read is read only once."""
        prompts = [rig.prompt(150) for _ in range(8)]
        with ThreadPoolExecutor(1) as pool, self.held(rig.decode, 6):  # as many as P has room for
            done = pool.submit(rig.handoffs, prompts, max_tokens=40)
        done.result()
        assert rig.decode.metrics()["vllm:num_preemptions"] > 0
        rig.assert_read(verified=8)

    def test_of_prefills(self, rig: Rig) -> None:
        """A prefill that goes on for some tokens is preempted after it got its lease: the lease
        ends with its blocks, and it gets another one."""
        prompts = [rig.prompt(150) for _ in range(8)]

        def handoff(prompt: Prompt) -> tuple[Generated, Generated]:
            prefilled = rig.prefill.generate(prompt, 40, kv_transfer_params=prefill_params())
            assert prefilled.kv_transfer_params is not None
            return prefilled, rig.decode.generate(
                prompt, MAX_TOKENS, kv_transfer_params=prefilled.kv_transfer_params
            )

        with ThreadPoolExecutor(len(prompts)) as pool, self.held(rig.prefill, len(prompts)):
            done = pool.map(handoff, prompts)
        for prompt, (prefilled, decoded) in zip(prompts, done, strict=True):
            assert prefilled.token_ids == rig.expected(prompt, prefilled)
            assert decoded.token_ids == rig.expected(prompt, decoded)
            assert decoded.num_external_tokens == len(prompt)
        assert rig.prefill.metrics()["vllm:num_preemptions"] > 0
        rig.assert_read(verified=8)


class TestPreemptionAsync(TestPreemption):
    ASYNC_SCHEDULING = True


class TestRoles:
    """A producer that only produces, and a consumer that only consumes."""

    THRESHOLD = 100

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        return make_rig(
            transfer_config("kv_producer"),
            decode_connector=transfer_config("kv_consumer", kv_recompute_threshold=self.THRESHOLD),
        )

    def test_tokens(self, rig: Rig) -> None:
        check_sizes(rig, (200, 1000))

    def test_a_consumer_exports_nothing(self, rig: Rig) -> None:
        offers = {"handshake": False, "side_channel": False, "leases": False}
        assert rig.decode.call(probes.exports) == offers | {"producer": False, "reader": True}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", rig.decode.side_channel_port), 5).close()
        # The same question to the producer.
        socket.create_connection(("127.0.0.1", rig.prefill.side_channel_port), 5).close()

    def test_a_consumer_asked_for_a_prefill_only_computes_it(self, rig: Rig) -> None:
        prompt = rig.prompt(200)
        done = rig.decode.generate(prompt, 1, kv_transfer_params=prefill_params())
        assert done.kv_transfer_params is None
        assert done.token_ids == rig.expected(prompt, done)
        rig.assert_read(verified=0)
        assert "kv_role is kv_consumer" in rig.decode.log()

    def test_a_producer_asked_for_a_remote_prefill_computes_it(self, rig: Rig) -> None:
        prompt = rig.prompt(200)
        reference = rig.pair.run_prefill(prompt).kv_transfer_params
        # Not even its own cache helps.
        assert rig.prefill.generate(rig.prompt(200), 1).kv_transfer_params is None
        done = rig.prefill.generate(
            prompt, MAX_TOKENS, kv_transfer_params={**(reference or {}), "remote_engine_id": "x"}
        )
        assert done.token_ids == rig.expected(prompt, done)
        assert done.num_external_tokens == 0
        assert "kv_role is kv_producer" in rig.prefill.log()
        rig.decode.generate(prompt, 1, kv_transfer_params=reference)
        rig.assert_read(verified=1)

    def test_a_few_missing_tokens_are_computed(self, rig: Rig) -> None:
        for size, pulled in ((self.THRESHOLD - 1, 0), (self.THRESHOLD, self.THRESHOLD)):
            decoded = rig.handoff(rig.prompt(size))
            assert decoded.num_external_tokens == pulled
            produced, consumed = rig.assert_read(verified=int(pulled > 0))
            decision = "pull" if pulled else "below_threshold"
            assert consumed["pull_decisions_total"] == {decision: 1}
            assert produced["leases_total"][""] == 1

        # What the local cache holds is not missing.
        prompt = rig.prompt(200)
        rig.decode.generate(prompt[: 4 * BLOCK], 1)
        decoded = rig.handoff(prompt)
        assert (decoded.num_local_tokens, decoded.num_external_tokens) == (4 * BLOCK, 0)
        produced, consumed = rig.assert_read(verified=0)
        assert consumed["pull_decisions_total"] == {"below_threshold": 1}
        assert produced["leases_ended_total"] == {"released": 1}


class TestLeaseSlotsRunOut:
    """Eight finished prefills, and two lease slots."""

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls, vllm_engines: SharedEngines) -> Iterator[dict[str, Engine]]:
        configs = {
            "slots": transfer_config(kv_lease_slots=2),
            "prefer": transfer_config(lease_verification="prefer"),
            "require": transfer_config(policy="recompute", lease_verification="require"),
            "fail": transfer_config(policy="fail", lease_verification="require"),
        }
        with ExitStack() as stack:
            engines = {}
            for name, config in configs.items():
                spec = vllm_engines.spec(connector=config, name=name)
                engines[name] = stack.enter_context(vllm_engines.template.launch(spec))
            for engine in engines.values():
                engine.wait_ready()
            yield engines

    @pytest.fixture
    def make(
        self,
        engines: dict[str, Engine],
        vllm_reference: Callable[..., Reference],
        make_prompt: Callable[[int], Prompt],
    ) -> Callable[[str], Rig]:
        return lambda name: Rig(
            Pair(engines["slots"], engines[name]), vllm_reference(), make_prompt, random.Random(0)
        )

    def decode_eight(self, rig: Rig) -> list[tuple[Prompt, JsonObject, Generated]]:
        """Each prompt, its reference, and what D made of it."""
        prompts = [rig.prompt(100) for _ in range(8)]
        prefilled = [rig.pair.run_prefill(prompt).kv_transfer_params for prompt in prompts]
        under_way = [
            rig.decode.submit(prompt, MAX_TOKENS, kv_transfer_params=params)
            for prompt, params in zip(prompts, prefilled, strict=True)
        ]
        done = [each.result() for each in under_way]
        leased = [params for params in prefilled if params and "kvnixl_lease" in params]
        assert len(leased) == 2
        return [*zip(prompts, map(dict, filter(None, prefilled)), done, strict=True)]

    def check_tokens(self, rig: Rig, prompt: Prompt, done: Generated) -> None:
        assert done.token_ids == rig.expected(prompt, done)

    def test_prefer_reads_unverified_and_counts_it(self, make: Callable[[str], Rig]) -> None:
        rig = make("prefer")
        for prompt, _, done in self.decode_eight(rig):
            self.check_tokens(rig, prompt, done)
            assert done.num_external_tokens == len(prompt)
        produced, _ = rig.assert_read(verified=2, unverified=6)
        assert produced["lease_grants_total"] == {"granted": 2, "no_slot": 6}

    def test_require_declines_and_recomputes(self, make: Callable[[str], Rig]) -> None:
        rig = make("require")
        for prompt, _, done in self.decode_eight(rig):
            self.check_tokens(rig, prompt, done)
        produced, consumed = rig.assert_read(verified=2, failed=6)
        assert consumed["read_failures_total"] == {"no_lease": 6}
        assert produced["leases_ended_total"] == {"read": 2, "released": 6}

    def test_require_declines_and_fails(self, make: Callable[[str], Rig]) -> None:
        rig = make("fail")
        for prompt, params, done in self.decode_eight(rig):
            if "kvnixl_lease" in params:
                self.check_tokens(rig, prompt, done)
            else:
                assert (done.finish_reason, done.token_ids) == ("error", ())
        _, consumed = rig.assert_read(verified=2, failed=6)
        assert consumed["read_failures_total"] == {"no_lease": 6}

    def test_the_slots_serve_later_requests(self, make: Callable[[str], Rig]) -> None:
        rig = make("prefer")
        for _ in range(3):
            rig.handoff(rig.prompt(100))
        rig.assert_read(verified=3)


class TestManyRequestsThenShutdown:
    ROUNDS, REQUESTS = 16, 17  # of these, 13 in a round are handed over
    WARM_UP = 6  # rounds
    # Of one engine in a typical round. A block of each request would be 4 MiB; an engine that
    # computes prompts grows by 1 MiB also without a connector.
    MAX_GROWTH = 3 * 2**20  # bytes

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        return make_rig(transfer_config(kv_lease_slots=1000))  # no other test has this pair

    def play_round(self, rig: Rig, beginnings: list[Prompt]) -> None:
        """Requests of all kinds, eight at a time: short and long, new and known, from P and not."""

        def play(number: int) -> None:
            if number % 5:
                rig.pair.handoff(prompts[number], 4)
            else:
                rig.decode.generate(prompts[number], 4)

        prompts = []
        for number in range(self.REQUESTS):
            prompt = rig.prompt(rig.sizes.choice((1, 31, 64, 65, 200, 500)))
            if number % 3 == 0:
                known = rig.sizes.choice(beginnings)
                prompt = known[: BLOCK * rig.sizes.randrange(10)] + prompt
            prompts.append(prompt)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(play, range(self.REQUESTS)))

    def test_nothing_grows_and_nothing_is_left(
        self,
        rig: Rig,
        vllm_engines: SharedEngines,
        start_engine: Callable[[EngineSpec], Engine],
    ) -> None:
        engines = (rig.prefill, rig.decode)
        beginnings = [rig.prompt(300) for _ in range(4)]
        for _ in range(2):  # every block once
            rig.handoffs([rig.prompt(1900) for _ in range(4)], 4)
        rig.assert_read(verified=8)
        reads: Counter[str] = Counter()
        usages, objects, memory = [], [], []
        for number in range(self.ROUNDS):
            self.play_round(rig, beginnings)
            produced, consumed = rig.settle()
            reads.update(consumed["reads_total"])
            assert set(produced["leases_ended_total"]) <= {"read", "released"}
            if number >= self.WARM_UP:
                for engine in engines:
                    engine.call(probes.trim_memory)
                usages.append([engine.usage() for engine in engines])
                memory.append([anonymous_memory(engine.pid) for engine in engines])
                objects.append([engine.call(probes.open_objects) for engine in engines])
        assert set(reads) == {"verified"}
        assert reads["verified"] > self.ROUNDS * self.REQUESTS / 2
        for which, engine in enumerate(engines):
            # Now and then something takes some MiB more; what leaks does so in every round.
            sizes = [each[which] for each in memory]
            growth = statistics.median(after - before for before, after in pairwise(sizes))
            assert growth < self.MAX_GROWTH, f"{engine.name}: {sizes}"
            for resource in ("file_descriptors", "threads", "processes"):
                count = {getattr(usage[which], resource) for usage in usages}
                assert len(count) == 1, f"{engine.name}: {resource} {count}"
            assert all(each == objects[0] for each in objects)
            assert objects[0][which]["transfers"] == objects[0][which]["quarantined"] == 0

        # What an engine without a connector leaves behind is vLLM's.
        plain = start_engine(vllm_engines.spec(name="plain"))
        plain.generate(beginnings[0], 1)
        expected = plain.stop()
        for engine in engines:
            remains = engine.stop()
            log = engine.log()
            assert "at shutdown" not in log  # kvnixl's warnings about what it could not give back
            assert remains.threads == expected.threads
            assert remains.children == ()
            assert len(remains.shared_memory) == len(expected.shared_memory), remains
            assert len(remains.file_descriptors) == len(expected.file_descriptors), remains
