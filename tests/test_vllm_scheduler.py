"""The scheduler's half of the vLLM connector: who is read, what is promised, and when that ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

vllm_world = pytest.importorskip("tests.vllm_world", reason="vLLM is not installed")

from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # noqa: E402
from vllm.v1.core.kv_cache_utils import KVCacheBlock  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from kvnixl.metadata import PromptDigest, parse_lease  # noqa: E402
from kvnixl.vllm.adapter import EngineFacts, GroupFacts  # noqa: E402
from kvnixl.vllm.messages import KvNixlConnectorMetadata, KvNixlWorkerMetadata  # noqa: E402
from kvnixl.vllm.options import ConnectorOptions  # noqa: E402
from kvnixl.vllm.scheduler import KvNixlScheduler  # noqa: E402
from tests.vllm_world import Clock, Engine, Net, joined, make_request  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 4
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# What vLLM's own connector emits (the generation since 0.33).
STOCK_KEYS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_registration_generation",
    "transfer_mode",
}


@pytest.fixture(autouse=True, scope="module")
def _joined() -> Iterator[None]:
    with joined():
        yield


def full(index: int = 0, block_size: int = BLOCK_SIZE) -> GroupFacts:
    return GroupFacts(index, (f"layers.{index}",), block_size, 0, frozenset())


def windowed(index: int, window: int, block_size: int = BLOCK_SIZE) -> GroupFacts:
    return GroupFacts(index, (f"layers.{index}",), block_size, window, frozenset())


def make_scheduler(
    groups: tuple[GroupFacts, ...] = (full(),),
    *,
    produces: bool = True,
    consumes: bool = True,
    **options: Any,
) -> KvNixlScheduler:
    facts = EngineFacts(
        engine_id="here",
        produces=produces,
        consumes=consumes,
        recomputes=True,
        tp_size=1,
        dp_index=0,
        extra_config={},
    )
    parsed = ConnectorOptions.parse({"side_channel_host": "127.0.0.1", **options}, {})
    return KvNixlScheduler(facts, groups, parsed, clock=Clock())


def reference(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[7, 8, 9]],
        "remote_engine_id": "there",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 10,
        "kvnixl_lease": "3:abc",
        **changes,
    }


def blocks(*groups: list[int]) -> KVCacheBlocks:
    """Real block lists of vLLM; block 0 is the placeholder."""
    return KVCacheBlocks(
        tuple([KVCacheBlock(i, is_null=i == 0) for i in group] for group in groups)
    )


def output(**changes: Any) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.preempted_req_ids = set()
    for name, value in changes.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def build(scheduler: KvNixlScheduler, **changes: Any) -> KvNixlConnectorMetadata:
    return scheduler.build_connector_meta(output(**changes))


def finish(scheduler: KvNixlScheduler, request: Any, status: str, ids: Any = ([],)) -> Any:
    request.status = RequestStatus[status]
    return scheduler.request_finished(request, ids)


def say(**changes: Any) -> KVConnectorOutput:
    return KVConnectorOutput(**changes)


# --- consumer -----------------------------------------------------------------------------------


def schedule(
    scheduler: KvNixlScheduler, request: Any, allocated: KVCacheBlocks, hit: int = 0
) -> Any:
    """As vLLM does it; what is given to the workers for this request."""
    scheduler.on_new_request(request)
    count = scheduler.num_matched_tokens(request, hit)
    assert count is not None
    scheduler.update_state_after_alloc(request, allocated, count)
    return build(scheduler).reads[request.request_id]


def test_all_blocks_of_the_prompt_are_read() -> None:
    scheduler = make_scheduler()
    read = schedule(scheduler, make_request("d", [1] * 10, reference()), blocks([4, 5, 6]))
    assert read.awaited
    assert not read.refused
    assert read.reference == reference()
    assert read.local_block_ids == ([4, 5, 6],)
    assert read.num_computed_blocks == (0,)
    assert read.num_tokens == 10
    assert build(scheduler).reads == {}  # told once


def test_only_what_the_prefix_cache_misses_is_read() -> None:
    read = schedule(
        make_scheduler(), make_request("d", [1] * 10, reference()), blocks([4, 5, 6]), hit=8
    )
    assert read.local_block_ids == ([6],)
    assert read.num_computed_blocks == (2,)
    assert read.num_tokens == 10


def test_blocks_beyond_the_prompt_are_not_filled() -> None:
    read = schedule(make_scheduler(), make_request("d", [1] * 8, reference()), blocks([4, 5, 6, 7]))
    assert read.local_block_ids == ([4, 5],)


def test_fewer_tokens_than_offered_may_be_taken() -> None:
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference())
    scheduler.on_new_request(request)
    assert scheduler.num_matched_tokens(request, 4) == 6
    scheduler.update_state_after_alloc(request, blocks([4, 5, 6]), 4)
    read = build(scheduler).reads["d"]
    assert not read.refused
    assert read.num_tokens == 8
    assert read.local_block_ids == ([5],)
    assert read.num_computed_blocks == (1,)


def test_each_group_has_its_own_blocks() -> None:
    scheduler = make_scheduler((full(0), windowed(2, 6)))
    request = make_request("d", [1] * 22, reference())
    # Group 1 takes no part. The window touches at most three blocks, one of them has passed.
    allocated = blocks([1, 2, 3, 4, 5, 6], [90], [0, 0, 0, 0, 11, 12])
    read = schedule(scheduler, request, allocated)
    assert not read.refused
    assert read.local_block_ids == ([1, 2, 3, 4, 5, 6], [11, 12])
    assert read.num_tokens == 21  # the last token is computed once more, with its window


def test_a_window_is_clipped_to_the_blocks_that_it_touches() -> None:
    scheduler = make_scheduler((windowed(0, 6),))
    read = schedule(scheduler, make_request("d", [1] * 22, reference()), blocks([*range(1, 7)]))
    assert read.local_block_ids == ([4, 5, 6],)


@pytest.mark.parametrize(
    ("groups", "num_tokens", "pulled"),
    [
        # The last of n tokens attends to token n - 6, which ends a block of 4 if n is 9, 13, ...
        ((windowed(0, 6),), 9, False),
        ((windowed(0, 6),), 10, True),
        ((windowed(0, 6),), 12, True),
        ((full(0), windowed(1, 6)), 13, False),
        # No token has left the window of the one after the prompt.
        ((windowed(0, 6),), 5, True),
        ((windowed(0, 6),), 6, True),
        # A window of less than a block.
        ((windowed(0, 2),), 5, False),
        ((windowed(0, 2),), 6, True),
        ((full(0),), 9, True),
    ],
)
def test_a_prompt_at_the_edge_of_a_window_is_computed_here(
    groups: tuple[GroupFacts, ...], num_tokens: int, pulled: bool
) -> None:
    scheduler = make_scheduler(groups)
    request = make_request("d", [1] * num_tokens, reference())
    allocated = blocks(*([*range(1, 5)] for _ in groups))
    read = schedule(scheduler, request, allocated)
    assert read.awaited is pulled
    if not pulled:  # the producer is told
        assert read.local_block_ids == ()
        stats = scheduler.take_stats()
        assert stats is not None
        assert stats.data["counters"]["pull_decisions_total"] == {"window_edge": 1}


def test_a_window_that_the_producer_has_left_is_not_taken_for_blocks() -> None:
    """A producer that generates tokens itself goes on after the prompt."""
    scheduler = make_scheduler((full(0), windowed(1, 6)))
    params = reference(remote_block_ids=[[0, 7, 8, 9], [0, 0, 18, 19]])
    read = schedule(scheduler, make_request("d", [1] * 10, params), blocks([1, 2, 3], [0, 4, 5]))
    assert read.reference["remote_block_ids"] == [[0, 7, 8, 9], [18, 19]]
    assert params["remote_block_ids"] == [[0, 7, 8, 9], [0, 0, 18, 19]]


def test_a_window_cannot_be_read_up_to_an_earlier_token() -> None:
    scheduler = make_scheduler((full(0), windowed(1, 6)))
    request = make_request("d", [1] * 10, reference())
    scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3], [4, 5, 6]), 8)
    read = build(scheduler).reads["d"]
    assert "8 of 10 tokens" in read.refused
    assert read.awaited
    assert read.local_block_ids == ()


def test_an_unaligned_hit_is_refused() -> None:
    scheduler = make_scheduler((full(0, 4), full(1, 8)))
    request = make_request("d", [1] * 20, reference())
    read = schedule(scheduler, request, blocks([1, 2, 3, 4, 5], [6, 7, 8]), hit=4)
    assert "4 tokens" in read.refused
    assert "blocks of 8" in read.refused
    assert read.awaited


@pytest.mark.parametrize(
    ("hit", "threshold", "expected"),
    [(0, 0, 10), (8, 0, 2), (9, 0, 0), (10, 0, 0), (0, 10, 10), (0, 11, 0), (4, 7, 0)],
)
def test_what_is_pulled(hit: int, threshold: int, expected: int) -> None:
    scheduler = make_scheduler(kv_recompute_threshold=threshold)
    request = make_request("d", [1] * 10, reference())
    scheduler.on_new_request(request)
    for _ in range(3):  # vLLM may ask again and again before it has blocks
        assert scheduler.num_matched_tokens(request, hit) == expected
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), expected)
    read = build(scheduler).reads["d"]
    assert read.awaited is (expected > 0)
    if not expected:  # the producer is told
        assert read.reference == reference()
        assert read.local_block_ids == ()


def test_a_request_is_not_pulled_twice() -> None:
    """After a failed load, or a preemption, vLLM asks again."""
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference())
    schedule(scheduler, request, blocks([1, 2, 3]))
    scheduler.update_connector_output(say(finished_recving={"d"}, failed_recving={"d"}))
    assert scheduler.num_matched_tokens(request, 0) == 0
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
    assert build(scheduler).reads == {}
    assert not scheduler.has_pending_work()
    assert finish(scheduler, request, "FINISHED_STOPPED") == (False, None)
    assert build(scheduler).reads == {}


def test_a_request_without_parameters_is_left_alone() -> None:
    scheduler = make_scheduler()
    for params in (None, {}, {"do_remote_prefill": False}):
        request = make_request("d", [1] * 10, params)
        scheduler.on_new_request(request)
        assert scheduler.num_matched_tokens(request, 0) == 0
        scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
        metadata = build(scheduler, num_scheduled_tokens={"d": 10})
        assert not metadata.reads
        assert not metadata.lease_arms
        assert finish(scheduler, request, "FINISHED_STOPPED") == (False, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": 7},
        {"remote_block_ids": "x"},
        {"remote_port": 10**9},
        {"kvnixl_lease": "nonsense"},
        {"kvnixl_prompt": "nonsense"},
        {"do_remote_prefill": "yes"},
    ],
)
def test_a_reference_that_is_nonsense_is_given_to_the_workers(changes: dict[str, Any]) -> None:
    """They fail it, and vLLM does with that what it was told to."""
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference(**changes))
    read = schedule(scheduler, request, blocks([1, 2, 3]))
    assert read.awaited
    assert read.reference == reference(**changes)


def test_the_workers_get_the_reference_as_it_came() -> None:
    """vLLM's dictionary may change; what is read must not."""
    scheduler = make_scheduler()
    params = reference()
    request = make_request("d", [1] * 10, params)
    scheduler.on_new_request(request)
    params.clear()
    params["do_remote_prefill"] = True
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 10)
    assert build(scheduler).reads["d"].reference == reference()


def test_an_abort_before_it_was_scheduled_tells_the_producer() -> None:
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference())
    scheduler.on_new_request(request)
    assert finish(scheduler, request, "FINISHED_ABORTED") == (False, None)
    assert scheduler.has_pending_work()
    metadata = build(scheduler)
    assert not metadata.reads["d"].awaited
    assert not metadata.reads_to_abort
    assert not scheduler.has_pending_work()


def test_an_abort_while_it_is_read_ends_the_read() -> None:
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference())
    schedule(scheduler, request, blocks([1, 2, 3]))
    assert finish(scheduler, request, "FINISHED_ABORTED") == (False, None)
    assert scheduler.has_pending_work()
    metadata = build(scheduler)
    assert metadata.reads_to_abort == {"d"}
    assert not metadata.reads  # the workers tell the producer
    scheduler.update_connector_output(say(finished_recving={"d"}, failed_recving={"d"}))
    assert not scheduler.has_pending_work()


def test_an_abort_after_it_was_read_has_nothing_to_do() -> None:
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference())
    schedule(scheduler, request, blocks([1, 2, 3]))
    scheduler.update_connector_output(say(finished_recving={"d"}))
    assert finish(scheduler, request, "FINISHED_ABORTED") == (False, None)
    metadata = build(scheduler)
    assert not metadata.reads
    assert not metadata.reads_to_abort


def test_a_reference_that_came_twice_is_read_once() -> None:
    """Its producer frees the blocks after the first read."""
    scheduler = make_scheduler()
    first = make_request("a", [1] * 10, reference())
    second = make_request("b", [1] * 10, reference())
    for request in (first, second):
        scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(first, blocks([1, 2, 3]), 10)
    assert scheduler.num_matched_tokens(second, 0) is None  # asked again later
    assert build(scheduler).reads.keys() == {"a"}
    scheduler.update_connector_output(say(finished_recving={"a"}))
    assert scheduler.num_matched_tokens(second, 8) == 0  # or finds them in the prefix cache
    scheduler.update_state_after_alloc(second, blocks([1, 2, 4]), 0)
    assert not build(scheduler).reads  # the producer knows
    for request in (first, second):
        finish(scheduler, request, "FINISHED_STOPPED")
    assert not build(scheduler).reads


def test_blocks_are_given_back_when_nobody_wants_them_any_more() -> None:
    scheduler = make_scheduler()
    requests = [make_request(name, [1] * 10, reference()) for name in "ab"]
    for request in requests:
        scheduler.on_new_request(request)
    finish(scheduler, requests[0], "FINISHED_ABORTED")
    assert not build(scheduler).reads
    assert scheduler.num_matched_tokens(requests[1], 0) == 10
    finish(scheduler, requests[1], "FINISHED_ABORTED")
    assert build(scheduler).reads.keys() == {"b"}


def decisions(scheduler: KvNixlScheduler) -> dict[str, int]:
    stats = scheduler.take_stats()
    assert stats is not None
    found: dict[str, int] = stats.data["counters"]["pull_decisions_total"]
    return found


@pytest.mark.parametrize("said", [True, False], ids=["kvnixl", "stock"])
def test_the_blocks_of_another_prompt_are_neither_read_nor_given_back(
    said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM gives all prompts of a batch the parameters of the first."""
    scheduler = make_scheduler()
    mine, other = [1] * 10, [1] * 7 + [2] * 3
    changes = {"kvnixl_prompt": str(PromptDigest.of(mine))} if said else {}
    first, *others = (
        make_request(name, tokens, reference(**changes))
        for name, tokens in (("a", mine), ("b", other), ("c", other[:7]))
    )
    scheduler.on_new_request(first)
    for request in others:
        scheduler.on_new_request(request)
    # Nothing is missing of the first: its blocks are given back, not passed on to the next.
    assert scheduler.num_matched_tokens(first, 9) == 0
    scheduler.update_state_after_alloc(first, blocks([1, 2, 3]), 0)
    for request in others:
        assert scheduler.num_matched_tokens(request, 0) == 0
        scheduler.update_state_after_alloc(request, blocks([4, 5, 6]), 0)
    assert build(scheduler).reads.keys() == {"a"}
    for request in (first, *others):
        finish(scheduler, request, "FINISHED_STOPPED")
    assert not build(scheduler).reads
    assert decisions(scheduler) == {"local_hit": 1, "other_prompt": 2}
    assert len([r for r in caplog.records if "of another prompt" in r.getMessage()]) == 1
    assert not scheduler._shared


def test_parameters_that_a_router_mixed_up_are_left_to_their_owner() -> None:
    scheduler = make_scheduler(kv_lease_duration=6.0)
    params = reference(kvnixl_prompt=str(PromptDigest.of([1] * 10)))
    wrong, right = (make_request(f"d{t}", [t] * 10, dict(params)) for t in (2, 1))
    scheduler.on_new_request(wrong)
    finish(scheduler, wrong, "FINISHED_ABORTED")
    scheduler._clock.now += 3.0
    metadata = build(scheduler)
    assert not metadata.reads
    assert not metadata.heartbeat_by_engine
    assert schedule(scheduler, right, blocks([1, 2, 3])).awaited


def test_what_the_front_end_refused_is_given_back() -> None:
    """vLLM sends another prompt in its stead, and aborts it at once."""
    scheduler = make_scheduler()
    params = reference(kvnixl_prompt=str(PromptDigest.of([1] * 10)))
    request = make_request("d", [0], params)
    request.abort_immediately = True
    scheduler.on_new_request(request)
    finish(scheduler, request, "FINISHED_ABORTED")
    assert build(scheduler).reads.keys() == {"d"}


def test_a_prompt_that_came_as_embeddings_is_not_compared() -> None:
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference(kvnixl_prompt=str(PromptDigest.of([2]))))
    request.prompt_token_ids = None
    assert schedule(scheduler, request, blocks([1, 2, 3])).awaited


def test_what_another_connector_loaded_says_nothing_of_our_blocks() -> None:
    """Beside others in a MultiConnector."""
    scheduler = make_scheduler()
    first, second = (make_request(name, [1] * 10, reference()) for name in "ab")
    for request in (first, second):
        scheduler.on_new_request(request)
    scheduler.update_connector_output(say(finished_recving={"a"}))
    assert scheduler.num_matched_tokens(second, 0) == 10
    scheduler.update_state_after_alloc(second, blocks([1, 2, 3]), 10)
    assert build(scheduler).reads.keys() == {"b"}


def test_an_offer_that_is_not_taken_is_told_from_a_small_one() -> None:
    scheduler = make_scheduler()
    request = make_request("d", [1] * 10, reference())
    scheduler.on_new_request(request)
    assert scheduler.num_matched_tokens(request, 0) == 10
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
    assert build(scheduler).reads.keys() == {"d"}
    assert decisions(scheduler) == {"not_taken": 1}


def test_who_waits_for_a_read_that_failed_computes() -> None:
    scheduler = make_scheduler()
    requests = [make_request(name, [1] * 10, reference()) for name in "ab"]
    for request in requests:
        scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(requests[0], blocks([1, 2, 3]), 10)
    finish(scheduler, requests[0], "FINISHED_ABORTED")
    assert scheduler.num_matched_tokens(requests[1], 0) == 0


def test_leases_are_renewed_from_arrival_to_the_end_of_the_read() -> None:
    scheduler = make_scheduler(kv_lease_duration=6.0)
    clock = scheduler._clock
    request = make_request("d", [1] * 10, reference())
    assert not build(scheduler).heartbeat_by_engine
    scheduler.on_new_request(request)  # waits, not scheduled
    for _ in range(3):
        heartbeats = build(scheduler).heartbeat_by_engine
        assert heartbeats["there"].req_ids == {"r"}
        assert heartbeats["there"].leases == {"r": parse_lease("3:abc")}
        assert not build(scheduler).heartbeat_by_engine  # not in every step
        clock.now += 1.0
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 10)
    assert build(scheduler).heartbeat_by_engine
    clock.now += 1.0
    scheduler.update_connector_output(say(finished_recving={"d"}))
    assert not build(scheduler).heartbeat_by_engine


def test_a_producer_only_reads_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(consumes=False)
    for number in range(2):
        request = make_request(f"d{number}", [1] * 10, reference())
        scheduler.on_new_request(request)
        assert scheduler.num_matched_tokens(request, 0) == 0
        scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
    metadata = build(scheduler)
    assert not metadata.reads
    assert not metadata.heartbeat_by_engine
    (record,) = [r for r in caplog.records if r.name == "kvnixl.vllm.scheduler"]  # said once
    assert record.levelno == logging.WARNING
    assert "kv_role is kv_producer" in record.getMessage()
    assert "kv_consumer or kv_both" in record.getMessage()


# --- producer -----------------------------------------------------------------------------------


def prefilled(scheduler: KvNixlScheduler, num_tokens: int = 10) -> Any:
    """A request whose whole prompt was computed in one step."""
    request = make_request("p", [1] * num_tokens, dict(PREFILL))
    scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
    metadata = build(scheduler, num_scheduled_tokens={"p": num_tokens})
    assert metadata.lease_arms.keys() == {"p"}
    request.num_computed_tokens = num_tokens
    return request


def test_the_lease_begins_in_the_step_that_computes_the_end_of_the_prompt() -> None:
    net = Net()
    engine = Engine(net, "P", 7000, limits={"max_num_batched_tokens": 8})
    engine.add(make_request("p", [1] * 20, dict(PREFILL), max_tokens=3))
    arms = []
    while engine.busy and "p" not in engine.answers:
        engine.step()
        arms.append(dict(engine.metadata.lease_arms))
        if arms[-1]:
            (words,) = [rank.slot_words for rank in engine.ranks]
            slot, nonce = arms[-1]["p"]
            assert words[slot] == nonce
    assert [len(step) for step in arms] == [0, 0, 1, 0, 0]  # 8, 8, 4 tokens; then two more answers
    assert engine.answers["p"]["kvnixl_lease"] == "{}:{:x}".format(*arms[2]["p"])
    net.clock.now += 100.0
    engine.run()
    engine.check_empty()
    engine.shutdown()


def test_a_preemption_takes_the_lease_back_in_the_same_step() -> None:
    net = Net()
    engine = Engine(net, "P", 7000)
    engine.add(make_request("p", [1] * 10, dict(PREFILL), max_tokens=4))
    engine.step()
    first = engine.metadata.lease_arms["p"]
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert engine.num_preempted == 1
    assert engine.metadata.lease_clears == {"p"}
    (words,) = [rank.slot_words for rank in engine.ranks]
    # vLLM resumes it in the same step, and it computes the end of its prompt once more.
    second = engine.metadata.lease_arms["p"]
    assert second[1] != first[1]
    assert words[words != 0].tolist() == [second[1]]
    engine.run(until=lambda: "p" in engine.answers)
    assert engine.answers["p"]["kvnixl_lease"] == "{}:{:x}".format(*second)
    net.clock.now += 100.0
    engine.run()
    engine.check_empty()
    engine.shutdown()


def test_a_preempted_request_that_waits_has_no_lease() -> None:
    scheduler = make_scheduler()
    request = prefilled(scheduler)
    metadata = build(scheduler, preempted_req_ids={"p"})
    request.num_computed_tokens = 0
    assert metadata.lease_clears == {"p"}
    assert not metadata.lease_arms
    assert not build(scheduler, num_scheduled_tokens={"p": 9}).lease_arms
    request.num_computed_tokens = 9
    assert build(scheduler, num_scheduled_tokens={"p": 1}).lease_arms.keys() == {"p"}


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_what_did_not_finish_well_is_not_offered(status: str) -> None:
    scheduler = make_scheduler()
    request = prefilled(scheduler)
    assert finish(scheduler, request, status, ([1, 2, 3],)) == (False, None)
    metadata = build(scheduler)
    assert metadata.lease_clears == {"p"}  # before the forward pass that may write its blocks
    assert metadata.reqs_not_processed == {"p"}
    assert not metadata.reqs_to_send


def test_an_abort_between_chunks_has_no_lease_to_take_back() -> None:
    scheduler = make_scheduler()
    request = make_request("p", [1] * 10, dict(PREFILL))
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
    assert not build(scheduler, num_scheduled_tokens={"p": 9}).lease_arms
    finish(scheduler, request, "FINISHED_ABORTED", ([1, 2, 3],))
    metadata = build(scheduler)
    assert not metadata.lease_clears
    assert not metadata.lease_arms


def test_an_abort_before_it_was_scheduled_needs_no_blocks() -> None:
    scheduler = make_scheduler()
    request = make_request("p", [1] * 10, dict(PREFILL))
    scheduler.on_new_request(request)
    assert finish(scheduler, request, "FINISHED_ABORTED") == (False, None)


@pytest.mark.parametrize("status", ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"])
def test_the_offer_has_the_keys_of_stock_and_the_lease(status: str) -> None:
    scheduler = make_scheduler(side_channel_port=6000)
    request = prefilled(scheduler)
    keep, params = finish(scheduler, request, status, ([1, 2, 3],))
    assert keep
    assert params.keys() == STOCK_KEYS | {"kvnixl_lease", "kvnixl_prompt"}
    assert json.loads(json.dumps(params)) == params
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "here",
        "remote_request_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 6000,
        "remote_num_tokens": 10,
        "transfer_mode": "pull",
        "remote_blocks_expiry_time": None,
        "tp_size": 1,
    }
    assert {key: params[key] for key in expected} == expected
    metadata = build(scheduler)
    assert metadata.reqs_to_send == {"p": 1000.0 + 30.0}
    assert metadata.scheduler_clock == 1000.0
    assert not metadata.lease_arms
    assert not metadata.lease_clears


def test_an_offer_without_lease_slots_is_a_stock_one() -> None:
    scheduler = make_scheduler(kv_lease_slots=0)
    request = make_request("p", [1] * 10, dict(PREFILL))
    scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
    assert not build(scheduler, num_scheduled_tokens={"p": 10}).lease_arms
    keep, params = finish(scheduler, request, "FINISHED_STOPPED", ([1, 2, 3],))
    assert keep
    assert params.keys() == STOCK_KEYS | {"kvnixl_prompt"}


def test_a_prefill_that_left_no_blocks_is_not_kept() -> None:
    scheduler = make_scheduler()
    request = prefilled(scheduler)
    keep, params = finish(scheduler, request, "FINISHED_STOPPED", ([],))
    assert not keep
    assert params["remote_block_ids"] == [[]]
    assert params["remote_num_tokens"] == 0
    assert "kvnixl_lease" not in params
    assert build(scheduler).lease_clears == {"p"}


def test_the_offer_of_a_window_is_clipped() -> None:
    scheduler = make_scheduler((full(0), windowed(2, 6)))
    request = prefilled(scheduler)
    _, params = finish(scheduler, request, "FINISHED_STOPPED", ([1, 2, 3, 4], [90], [0, 5, 6, 7]))
    assert params["remote_block_ids"] == [[1, 2, 3, 4], [5, 6, 7]]


def test_a_slot_is_free_again_once_the_workers_reported_it() -> None:
    scheduler = make_scheduler(kv_lease_slots=1)
    request = prefilled(scheduler)
    finish(scheduler, request, "FINISHED_STOPPED", ([1, 2, 3],))
    build(scheduler)
    assert scheduler._leases.num_free == 0
    scheduler.update_connector_output(say(finished_sending={"p"}))
    assert scheduler._leases.num_free == 1
    assert not build(scheduler).lease_clears  # they cleared it themselves


def test_a_consumer_only_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(produces=False)
    for number in range(2):
        request = make_request(f"p{number}", [1] * 10, dict(PREFILL))
        scheduler.update_state_after_alloc(request, blocks([1, 2, 3]), 0)
        assert not build(scheduler, num_scheduled_tokens={f"p{number}": 10}).lease_arms
        assert finish(scheduler, request, "FINISHED_STOPPED", ([1, 2, 3],)) == (False, None)
    scheduler.set_handshake_metadata({(0, 0): SimpleNamespace(payload=b"x")})
    assert not Net().servers
    (record,) = [r for r in caplog.records if r.name == "kvnixl.vllm.scheduler"]
    assert "kv_role is kv_consumer" in record.getMessage()


# --- both ---------------------------------------------------------------------------------------


def test_work_of_the_workers_keeps_the_engine_stepping() -> None:
    scheduler = make_scheduler()
    scheduler.update_connector_output(say(kv_connector_worker_meta=KvNixlWorkerMetadata(busy=True)))
    assert scheduler.has_pending_work()
    scheduler.update_connector_output(say(kv_connector_worker_meta=KvNixlWorkerMetadata()))
    assert not scheduler.has_pending_work()


def test_handshakes_can_be_published_again() -> None:
    """vLLM 0.33 does so after it woke up."""
    net = Net()
    scheduler = make_scheduler(side_channel_port=7000)
    scheduler.set_handshake_metadata({(0, 0): SimpleNamespace(payload=b"first")})
    scheduler.set_handshake_metadata({(0, 0): SimpleNamespace(payload=b"second")})
    (server,) = net.servers.values()
    assert server.payloads == {(0, 0): b"second"}
    scheduler.shutdown()
    scheduler.shutdown()
    assert not net.servers
