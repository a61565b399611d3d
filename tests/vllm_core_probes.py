"""Functions for `Engine.call`: they run inside an engine's process, between two steps."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from kvnixl.bench.vllm_child import EngineContext

# Tables that are not about requests.
_LASTING = ("_said", "_kv_caches")


def runs_async(context: EngineContext) -> bool:
    """Whether vLLM schedules a step before it has seen the results of the one before."""
    return context.core.batch_queue is not None and bool(
        context.scheduler.vllm_config.scheduler_config.async_scheduling
    )


def tokens_per_step(context: EngineContext) -> int:
    """How many tokens vLLM computes in a step at most."""
    return int(context.scheduler.max_num_scheduled_tokens)


def open_objects(context: EngineContext) -> dict[str, int]:
    """What this engine's worker holds of NIXL, by kind, and what it could not give back."""
    agent = context.worker_connector._worker._agent
    return {**agent.live, "quarantined": agent.quarantined}


def bookkeeping(context: EngineContext) -> dict[str, int]:
    """How many requests each table of the connector still knows, by name."""
    scheduler, worker = context.connector._scheduler, context.worker_connector._worker
    counts = {
        f"{type(half).__name__}.{name}": len(table)
        for half in (scheduler, worker)
        for name, table in vars(half).items()
        if isinstance(table, dict | set) and name not in _LASTING
    }
    if scheduler._leases is not None:
        counts["leases"] = scheduler._leases.num_slots - scheduler._leases.num_free
    if worker._producer is not None:
        counts["held"] = len(worker._producer)
    if worker._reader is not None:
        counts["reading"] = worker._reader.num_requests
    return counts


def exports(context: EngineContext) -> dict[str, Any]:
    """What this engine offers to readers."""
    scheduler, worker = context.connector._scheduler, context.worker_connector._worker
    return {
        "handshake": worker.handshake_metadata() is not None,
        "side_channel": scheduler._server is not None,
        "leases": scheduler._leases is not None,
        "producer": worker._producer is not None,
        "reader": worker._reader is not None,
    }


def knows_requests(context: EngineContext, count: int) -> bool:
    """Whether so many requests are under way, waiting ones included."""
    return len(context.scheduler.requests) >= count


def collect_outputs(context: EngineContext) -> None:
    """Collect every completion of every request from here on; see `take_outputs`."""
    step, kept = context.engine.step, []
    context.engine.kvnixl_outputs = kept

    def watched() -> Any:
        outputs = step()
        for output in outputs:
            for completion in output.outputs:
                if completion.finish_reason is not None:
                    kept.append((completion.index, tuple(completion.token_ids)))
        return outputs

    context.engine.step = watched


def take_outputs(context: EngineContext) -> list[tuple[int, tuple[int, ...]]]:
    """Index within its request, and tokens, of every completion that ended; ends the collecting."""
    del context.engine.step  # the class's own again
    return list(context.engine.__dict__.pop("kvnixl_outputs"))


def nothing_known(context: EngineContext) -> bool:
    """Whether the connector has forgotten every request."""
    return not any(bookkeeping(context).values())


def is_reading(context: EngineContext) -> bool:
    """Whether this engine's worker reads from another one."""
    return bool(bookkeeping(context).get("reading"))


def hold_reads(context: EngineContext) -> None:
    """Let no read move on until `let_reads_go`."""
    context.worker_connector._worker._reader.step = list


def let_reads_go(context: EngineContext) -> None:
    del context.worker_connector._worker._reader.step


def trim_memory(context: EngineContext) -> None:
    """Give back what this process has freed, so that what it holds can be measured."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
