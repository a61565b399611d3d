"""The processes behind `kvnixl.bench.vllm_engines`: the template, and the engines forked from it.

Run as ``python -m kvnixl.bench.vllm_child FD``, where FD is the template's control socket. A
message is ``("fork", spec, log path)`` with the engine's end of a pipe as ancillary data, or
``("reap", pid)``; the end of the socket ends everything.

Over its pipe an engine gets ``(number, method, arguments)`` and answers
``(number, "result" | "raised", value)``, for requests also ``(number, "first token", None)``. Its
main thread runs vLLM, as in vLLM's own engine process; another one only receives.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import hashlib
import importlib
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from kvnixl.bench.vllm_engines import (
    ENGINE_ARGUMENTS,
    FORCED_TOKENS,
    EngineSpec,
    Generated,
    JsonObject,
    Remains,
)

# vLLM's engine process sleeps so long after a step that ran no forward pass.
IDLE_STEP_S = 0.001
# How long an engine whose owner is gone may take to end by itself.
ORPHAN_TIMEOUT_S = 5.0
CONNECTOR_STATS_KEPT = 10_000
# A queue between processes is looked at so often; vLLM would spin.
QUEUE_POLL_S = 100e-6
# Threads that were joined leave the kernel's list a little later: what is left must have stayed the
# same for so long, and is looked at for no longer than that.
UNCHANGED_S, UNCHANGED_TIMEOUT_S = 0.2, 5.0

_PR_SET_PDEATHSIG = 1

Message: TypeAlias = tuple[int, str, tuple[Any, ...]]


# --- the template -------------------------------------------------------------------------------


def run_template(control: socket.socket) -> None:
    _import_vllm()
    allow_amx()
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"importing vLLM started {len(threads) - 1} threads; cannot fork safely")
    control.send(pickle.dumps(None))
    children: set[int] = set()
    try:
        while True:
            message, handles, _, _ = socket.recv_fds(control, 1 << 18, 1)
            if not message:
                return
            action, *args = pickle.loads(message)
            if action == "fork":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    spec, log_path = args
                    _run_engine(spec, log_path, Connection(handles[0]))
                children.add(pid)
                os.close(handles[0])
                control.send(pickle.dumps(pid))
            else:
                (pid,) = args
                _, status = os.waitpid(pid, 0)
                children.discard(pid)
                control.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _import_vllm() -> None:
    """Everything that engines of the tiny models import, but not NIXL: loading UCX reads the
    environment, which is each engine's own."""
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import ModelRegistry
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # What vLLM wants to know of an architecture it would otherwise find out in one more process
    # that imports vLLM, for every engine that starts before the first one is through.
    for architecture in (DeepseekV2ForCausalLM, LlamaForCausalLM):
        ModelRegistry.register_model(architecture.__name__, architecture)


# --- an engine's process ------------------------------------------------------------------------


class EngineContext:
    """What functions given to `Engine.call` and `Engine.wait_until` work on.

    Attributes:
        engine: vLLM's ``LLMEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore``."""
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's half of the KV connector; None without one."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The worker's half, if the worker runs in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def kv_caches(self) -> dict[str, Any]:
        """Layer -> its tensor, blocks first, if the worker runs in this process."""
        layers = self.core.vllm_config.compilation_config.static_forward_context
        return {name: layer.kv_cache for name, layer in layers.items()}

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def num_blocks(self) -> int:
        return int(self.block_pool.num_gpu_blocks) - 1  # one stands for "no block"

    @property
    def blocks_in_use(self) -> int:
        return self.num_blocks - int(self.block_pool.get_num_free_blocks())


def holds_blocks(context: EngineContext, blocks: int) -> bool:
    """For `Engine.wait_blocks_in_use`."""
    return context.blocks_in_use == blocks


def request_block_ids(context: EngineContext, request_id: str) -> list[list[int]]:
    """The blocks that a request under way holds, a list for each KV cache group."""
    for internal_id in context.scheduler.requests:
        # vLLM makes ids unique with a suffix.
        if internal_id.rpartition("-")[0] == request_id:
            return [
                list(ids) for ids in context.scheduler.kv_cache_manager.get_block_ids(internal_id)
            ]
    raise KeyError(f"no request {request_id!r}; there are {list(context.scheduler.requests)}")


def block_digests(context: EngineContext, block_ids: list[list[int]]) -> list[list[str]]:
    """A digest of the bytes of each block over all layers of its group.

    Args:
        block_ids: a list for each KV cache group, as in ``remote_block_ids``.

    Returns:
        Digests in the shape of `block_ids`.
    """
    caches = context.kv_caches
    groups = context.scheduler.kv_cache_config.kv_cache_groups
    return [
        [_digest([caches[name][block] for name in group.layer_names]) for block in ids]
        for group, ids in zip(groups, block_ids, strict=True)
    ]


def _digest(tensors: list[Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass
class _Request:
    number: int
    request_id: str
    internal_id: str
    num_prompt_tokens: int
    submitted_at: float
    first_token_at: float | None = None
    token_ids: tuple[int, ...] = ()
    prefill_stats: Any = None

    def result(
        self,
        finish_reason: str | None,
        *,
        error: str | None = None,
        kv_transfer_params: JsonObject | None = None,
    ) -> Generated:
        stats = self.prefill_stats
        return Generated(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=self.token_ids,
            finish_reason=finish_reason,
            error=error,
            kv_transfer_params=kv_transfer_params,
            num_local_tokens=stats and stats.num_local_cached_tokens,
            num_external_tokens=stats and stats.num_external_cached_tokens,
            num_computed_tokens=stats and stats.num_computed_tokens,
            submitted_at=self.submitted_at,
            first_token_at=self.first_token_at,
            finished_at=time.monotonic(),
        )


@dataclass
class _Wait:
    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    until: float


class _EngineLoop:
    """Takes calls and steps the engine, both in the main thread."""

    def __init__(self, spec: EngineSpec, pipe: Connection) -> None:
        self._pipe = pipe
        self._inbox: queue.SimpleQueue[tuple[float, Message | None]] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._waits: list[_Wait] = []
        self._connector_stats: deque[JsonObject] = deque(maxlen=CONNECTOR_STATS_KEPT)
        self._paused = False
        self._ran_forward = False
        threading.Thread(target=self._receive, name="pipe", daemon=True).start()
        self._engine = _make_engine(spec, self._connector_stats)
        self._context = EngineContext(self._engine)
        self._watch_steps()

    def run(self) -> None:
        """Until told to stop, or nobody is there to tell.

        Raises:
            Exception: a step failed, which ends an engine of vLLM's too.
        """
        self._send(0, "result", None)
        while True:
            for received_at, message in self._take():
                if message is None:
                    return
                number, method, args = message
                if method == "stop":
                    self._engine.engine_core.shutdown()
                    self._send(number, "result", _remains())
                    return
                self._answer(number, method, args, received_at)
            if self._has_work():
                self._step()
            self._check_waits()

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def fail_all(self, reason: str) -> None:
        for request in self._requests.values():
            self._send(request.number, "raised", reason)
        for wait in self._waits:
            self._send(wait.number, "raised", reason)

    # --- receiving and answering ---

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._pipe.recv()
                self._inbox.put((time.monotonic(), message))
        self._inbox.put((time.monotonic(), None))
        # The main thread may hang, and nobody is left who would end this process.
        time.sleep(ORPHAN_TIMEOUT_S)
        os._exit(1)

    def _take(self) -> list[tuple[float, Message | None]]:
        """What has arrived; waits for something if there is nothing else to do."""
        timeout: float | None = None
        if self._has_work():
            timeout = 0.0 if self._ran_forward else IDLE_STEP_S
        elif self._waits:
            timeout = max(0.0, min(wait.until for wait in self._waits) - time.monotonic())
        taken = []
        with contextlib.suppress(queue.Empty):
            taken.append(
                self._inbox.get(timeout=timeout) if timeout != 0 else self._inbox.get_nowait()
            )
            while True:
                taken.append(self._inbox.get_nowait())
        return taken

    def _send(self, number: int, kind: str, value: Any) -> None:
        with contextlib.suppress(OSError):  # the receiving thread sees to that
            self._pipe.send((number, kind, value))

    def _answer(self, number: int, method: str, args: tuple[Any, ...], received_at: float) -> None:
        try:
            if method == "generate":
                self._generate(number, received_at, *args)
                return
            if method == "wait_until":
                function, function_args, timeout = args
                until = received_at + timeout
                self._waits.append(_Wait(number, function, function_args, until))
                return
            self._send(number, "result", getattr(self, f"_do_{method}")(*args))
        except Exception:
            self._send(number, "raised", f"{method} failed:\n{traceback.format_exc()}")

    def _do_call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self._context, *args)

    def _do_abort(self, request_id: str) -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._engine.abort_request([request.internal_id], internal=True)
        self._send(request.number, "result", request.result("abort"))
        self._ran_forward = True  # the next step is due now
        return True

    def _do_blocks_in_use(self) -> int:
        return self._context.blocks_in_use

    def _do_num_blocks(self) -> int:
        return self._context.num_blocks

    def _do_pause(self, paused: bool) -> None:
        self._paused = paused

    def _do_reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def _do_take_connector_stats(self) -> list[JsonObject]:
        taken = list(self._connector_stats)
        self._connector_stats.clear()
        return taken

    def _do_metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            name = metric.name
            if labels:
                name += "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}"
            if hasattr(metric, "value"):
                found[name] = metric.value
            elif hasattr(metric, "buckets"):
                found[f"{name}:sum"], found[f"{name}:count"] = metric.sum, metric.count
        return found

    # --- requests and steps ---

    def _generate(
        self,
        number: int,
        received_at: float,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        kv_transfer_params: JsonObject | None,
        sampling: dict[str, Any],
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = _Request(number, request_id, "", len(prompt), received_at)
        if request_id in self._requests:
            self._send(number, "raised", f"request id {request_id!r} is in use")
            return
        if kv_transfer_params is not None:
            extra = sampling.get("extra_args", {}) | {"kv_transfer_params": kv_transfer_params}
            sampling = sampling | {"extra_args": extra}
        defaults = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        try:
            params = SamplingParams(
                **(defaults | sampling),
                max_tokens=max_tokens,
                output_kind=RequestOutputKind.CUMULATIVE,
            )
            request.internal_id = self._engine.add_request(
                request_id, {"prompt_token_ids": prompt}, params
            )
        except Exception as exc:
            self._send(number, "result", request.result(None, error=f"{type(exc).__name__}: {exc}"))
            return
        self._requests[request_id] = request
        self._ran_forward = True  # the next step is due now

    def _watch_steps(self) -> None:
        """Learn from each step what vLLM's front end drops: whether a forward pass was run, and
        where the KV of a request's prompt came from."""
        core, by_internal_id = self._context.core, self._requests_by_internal_id
        step = core.step_fn

        def watched_step() -> Any:
            outputs, self._ran_forward = step()
            for batch in (outputs or {}).values():
                for output in batch.outputs:
                    request = by_internal_id(output.request_id)
                    if output.prefill_stats is not None and request is not None:
                        request.prefill_stats = output.prefill_stats
            return outputs, self._ran_forward

        core.step_fn = watched_step

    def _requests_by_internal_id(self, internal_id: str) -> _Request | None:
        for request in self._requests.values():
            if request.internal_id == internal_id:
                return request
        return None

    def _has_work(self) -> bool:
        core = self._context.core
        return not self._paused and (core.scheduler.has_requests() or bool(core.batch_queue))

    def _step(self) -> None:
        for output in self._engine.step():
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            completion = output.outputs[0]
            request.token_ids = tuple(completion.token_ids)
            if request.token_ids and request.first_token_at is None:
                request.first_token_at = time.monotonic()
                self._send(request.number, "first token", None)
            if output.finished:
                del self._requests[output.request_id]
                result = request.result(
                    completion.finish_reason, kv_transfer_params=output.kv_transfer_params
                )
                self._send(request.number, "result", result)

    def _check_waits(self) -> None:
        waiting = []
        for wait in self._waits:
            try:
                value = wait.function(self._context, *wait.args)
            except Exception:
                self._send(wait.number, "raised", f"the condition:\n{traceback.format_exc()}")
                continue
            now = time.monotonic()
            name = getattr(wait.function, "__name__", repr(wait.function))
            if value:
                self._send(wait.number, "result", (value, now))
            elif now >= wait.until:
                reason = f"{name}{wait.args} was not true in time, at last {value!r}"
                self._send(
                    wait.number, "raised", f"{reason}; {self._context.blocks_in_use} blocks in use"
                )
            else:
                waiting.append(wait)
        self._waits = waiting


def _run_engine(spec: EngineSpec, log_path: str, pipe: Connection) -> NoReturn:
    """The main function of an engine's process."""
    code = 1
    try:
        _set_up_process(spec, log_path)
        code = _serve(spec, pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not the template's clean-up, which is still on the stack.
        os._exit(code)


def _set_up_process(spec: EngineSpec, log_path: str) -> None:
    import ctypes
    import logging

    # Ends with the template, which ends with its owner.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(spec.env)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM's logger was set up by the template.
    if "VLLM_LOGGING_LEVEL" in spec.env:
        logging.getLogger("vllm").setLevel(spec.env["VLLM_LOGGING_LEVEL"])


def _serve(spec: EngineSpec, pipe: Connection) -> int:
    try:
        loop = _EngineLoop(spec, pipe)
    except Exception:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send((0, "raised", f"could not be made:\n{traceback.format_exc()}"))
        return 1
    try:
        loop.run()
    except Exception:
        traceback.print_exc()
        loop.fail_all(f"died in a step:\n{traceback.format_exc()}")
        threading.Timer(ORPHAN_TIMEOUT_S, os._exit, [1]).start()
        loop.close()
        return 1
    return 0


def _make_engine(spec: EngineSpec, connector_stats: deque[JsonObject]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    arguments = dict(ENGINE_ARGUMENTS) | dict(spec.engine_args)
    if spec.ranks > 1:
        sleep_in_queues()
        arguments.setdefault("distributed_executor_backend", "mp")
    if spec.forces_tokens:
        arguments["logits_processors"] = [_token_forcer()]
    if spec.kv_transfer_config is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**spec.kv_transfer_config)
    config = EngineArgs(
        model=str(spec.model), disable_log_stats=False, **arguments
    ).create_engine_config()
    if spec.async_scheduling:
        config.scheduler_config.async_scheduling = True
    return LLMEngine(
        config,
        Executor.get_class(config),
        log_stats=True,
        stat_loggers=[_stats_collector(connector_stats)],
        multiprocess_mode=False,
    )


def _token_forcer() -> Any:
    """A logits processor for requests that say which tokens they start with."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class TokenForcer(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            forced = (params.extra_args or {}).get(FORCED_TOKENS)
            if not forced:
                return None

            def process(output_ids: list[int], logits: Any) -> Any:
                if len(output_ids) < len(forced):
                    wanted = forced[len(output_ids)]
                    logits[wanted] = logits.max() + 1.0
                return logits

            return process

    return TokenForcer


def _stats_collector(collected: deque[JsonObject]) -> Any:
    """A stat logger that keeps what the connector reports."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Collector(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                # vLLM adds later ones to the object itself.
                collected.append(copy.deepcopy(scheduler_stats.kv_connector_stats))

        def log_engine_initialized(self) -> None:
            pass

    return Collector


def _remains() -> Remains:
    gc.collect()
    until = time.monotonic() + UNCHANGED_TIMEOUT_S
    found = _open_now()
    while time.monotonic() < until:
        time.sleep(UNCHANGED_S)
        before, found = found, _open_now()
        if found == before:
            break
    return found


def _open_now() -> Remains:
    threads, children, handles = [], [], []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads.append((task / "comm").read_text().strip())
            children += [int(pid) for pid in (task / "children").read_text().split()]
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            handles.append(os.readlink(handle))
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in maps}
    return Remains(
        threads=tuple(sorted(threads)),
        file_descriptors=tuple(sorted(handles)),
        shared_memory=tuple(sorted(path for path in mapped if path.startswith("/dev/shm/"))),
        children=tuple(children),
    )


def allow_amx() -> None:
    """Ask the kernel for the tile registers, which bf16 attention uses where the CPU has them.

    Without, the first such instruction ends the process. vLLM asks for them only when it binds its
    threads to cores. The permission is inherited by forks, not by new programs.
    """
    import torch

    torch.cpu._init_amx()


def sleep_in_queues() -> None:
    """Have vLLM sleep instead of spin while it waits for another process of the same engine.

    Several spinning processes starve everything else on a machine with few cores.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(QUEUE_POLL_S)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as control:
        run_template(control)


# The workers of an engine with several ranks import the main module under this name.
if __name__ == "__mp_main__":
    allow_amx()
    sleep_in_queues()

if __name__ == "__main__":
    # What is pickled by name must not be this module's under its name of the moment.
    importlib.import_module("kvnixl.bench.vllm_child").main()
