"""What the fault tests run inside an engine's process, with `Engine.call` and its like."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any

from kvnixl.bench.vllm_child import EngineContext

_reported: dict[str, Counter[str]] = {"recving": Counter(), "sending": Counter()}
_states: list[str] = []


def stop_in_next_read(context: EngineContext) -> None:
    """Have the process stop itself (SIGSTOP) as soon as the next READ of blocks was posted."""
    from nixl._api import nixl_agent

    transfer = nixl_agent.transfer

    def transfer_and_stop(self: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
        nixl_agent.transfer = transfer
        state = transfer(self, handle, *args, **kwargs)
        _states.append(state)
        os.kill(os.getpid(), signal.SIGSTOP)
        return state

    nixl_agent.transfer = transfer_and_stop


def stopped_in_state(context: EngineContext) -> str:
    """What NIXL said of the READ after which the process stopped itself."""
    return _states.pop()


def abort_in_next_forward(context: EngineContext) -> None:
    """Have every request of the next forward pass aborted while that runs.

    vLLM takes such aborts from a queue after the pass and before it looks at the tokens.
    """
    core = context.core
    execute_model = core.model_executor.execute_model

    def execute_and_abort(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            core.model_executor.execute_model = execute_model
            core.aborts_queue.put_nowait(list(scheduler_output.num_scheduled_tokens))
        return execute_model(scheduler_output, *args, **kwargs)

    core.model_executor.execute_model = execute_and_abort


def reject(context: EngineContext, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
    """What vLLM's front end does about a request that it refuses to admit."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    extra = {"kv_transfer_params": dict(kv_transfer_params)}
    context.engine.engine_core.add_request(
        EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1, extra_args=extra),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=True,
        )
    )


def watch_reports(context: EngineContext) -> None:
    """Count how often the connector reports each request to vLLM's scheduler."""
    connector = context.connector
    update = connector.update_connector_output

    def watched_update(output: Any) -> None:
        _reported["recving"].update(output.finished_recving or ())
        _reported["sending"].update(output.finished_sending or ())
        update(output)

    connector.update_connector_output = watched_update


def reports(context: EngineContext) -> dict[str, dict[str, int]]:
    """What `watch_reports` counted."""
    return {side: dict(counts) for side, counts in _reported.items()}


def num_requests(context: EngineContext) -> int:
    """Requests that vLLM's scheduler knows, finished ones with blocks included."""
    return len(context.scheduler.requests)


def request_states(context: EngineContext) -> dict[str, str]:
    """Status of each request that vLLM's scheduler knows, by what its id begins with."""
    return {
        req_id.rpartition("-")[0]: request.status.name
        for req_id, request in context.scheduler.requests.items()
    }


def has_status(context: EngineContext, request_id: str, status: str) -> bool:
    return request_states(context).get(request_id) == status


def idle(context: EngineContext) -> bool:
    """Nothing is left to do, also for the connector."""
    return not context.scheduler.has_requests()


def has_renewed(context: EngineContext, count: int) -> bool:
    """Whether so many heartbeats extended leases of this engine."""
    return bool(context.worker_connector._worker._producer.counters.heartbeats >= count)


def reads_in_stage(context: EngineContext, stage: str) -> bool:
    """Whether every request that waits for remote KV is in this stage, and there is one."""
    reader = context.worker_connector._worker._reader
    waiting = [
        req_id
        for req_id, request in context.scheduler.requests.items()
        if request.status.name == "WAITING_FOR_REMOTE_KVS"
    ]
    return bool(waiting) and {reader.stage(req_id) for req_id in waiting} == {stage}


def num_tokens(context: EngineContext, request_id: str) -> int:
    """Tokens that a request has so far, with its prompt."""
    return next(
        request.num_tokens
        for req_id, request in context.scheduler.requests.items()
        if req_id.rpartition("-")[0] == request_id
    )


def has_tokens(context: EngineContext, request_id: str, count: int) -> bool:
    return num_tokens(context, request_id) >= count


def leftovers(context: EngineContext) -> dict[str, int]:
    """What the connector still knows of requests."""
    scheduler, worker = context.connector._scheduler, context.worker_connector._worker
    return {
        "requests to read": len(scheduler._pulls),
        "leases": scheduler._leases.num_slots - scheduler._leases.num_free,
        "held": len(worker._producer),
        "being read": worker._reader.num_requests,
    }
