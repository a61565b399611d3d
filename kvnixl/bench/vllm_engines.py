"""Real vLLM engines in processes of their own, driven from a process that never imports vLLM.

Importing vLLM takes longer than starting a tiny engine. So one process, the *template*, imports it
once, and each engine is a fork of it::

    with EngineTemplate(work_dir) as template:
        model = make_model(work_dir, TinyModel())  # from kvnixl.bench.vllm_model
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        with template.start(EngineSpec(model, connector, name="p")) as prefill, \\
             template.start(EngineSpec(model, connector, name="d")) as decode:
            answer = Pair(prefill, decode).handoff([1, 2, 3] * 40, max_tokens=8)
            print(answer.decode.token_ids, answer.decode.num_external_tokens)

* `Engine.submit` returns at once, `Engine.generate` waits; several requests may be under way.
  Everything that waits has a deadline, and what it raises shows the end of the engine's log.
* An engine steps exactly while vLLM's own loop would: while it has work, which includes finished
  requests whose blocks a connector still holds. Without work it sleeps, so what an idle process
  costs is the connector's. `pause` holds it between two steps.
* `Engine.call` runs a function of an importable module over there, with an `EngineContext`;
  `Engine.wait_until` runs one after every step until it is true.
* `freeze`, `thaw` and `kill` act on the whole process. To start an engine again under its old
  identity, start its `spec` again: that has the port it was given; put an ``engine_id`` into the
  connector's configuration for the rest.
* Each engine has its side channel on a free port of 127.0.0.1. What it prints is in `log_path`.
* Closing an engine or the template ends the processes, and so does the end of this process,
  however it comes.

Times are `time.monotonic` seconds, which on Linux all processes of a machine share.

With more than one rank, vLLM starts worker processes of its own (TP 2: about 10 s a start); the
rest is the same, but the worker's half of the connector cannot be reached by `call`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from kvnixl.errors import KvNixlError

DEFAULT_TIMEOUT_S = 60.0
# Importing vLLM with cold caches on a busy machine takes most of this; so does starting workers.
TEMPLATE_TIMEOUT_S = 180.0
START_TIMEOUT_S = 180.0
# How long an engine may take to end in good order.
STOP_TIMEOUT_S = 20.0

# A process that closed its end of a pipe may take so long to end.
_LAST_WORDS_S = 5.0
_LOG_TAIL_LINES = 30
_CONTROL_BYTES = 1 << 18
_LOOPBACK = "127.0.0.1"

# The name under which a request says which tokens it starts with.
FORCED_TOKENS = "kvnixl_forced_tokens"

JsonObject: TypeAlias = dict[str, Any]
Prompt: TypeAlias = Sequence[int]

# What vLLM for CPU and its libraries need to run small, offline and alike every time.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": _LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

ENGINE_ARGUMENTS: Mapping[str, Any] = {
    "dtype": "float32",
    "block_size": 32,  # the CPU backend wants a multiple of 32
    "enforce_eager": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 64 * 1024**2,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "seed": 0,
}


class EngineError(KvNixlError):
    """An engine could not be started, ended, failed a call, or did not answer in time."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start an engine.

    Attributes:
        model: directory of a model.
        kv_transfer_config: vLLM's; None for an engine without a connector.
        engine_args: of vLLM's ``EngineArgs``, over `ENGINE_ARGUMENTS`.
        env: environment variables for this engine only.
        async_scheduling: force it on, which the CPU platform would turn off.
        forces_tokens: let requests say which tokens they start with, for `Reference`; costs a
            little in every step.
        name: in messages and of the log file.
    """

    model: Path
    kv_transfer_config: JsonObject | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    async_scheduling: bool = False
    forces_tokens: bool = False
    name: str = "engine"

    @property
    def ranks(self) -> int:
        """Worker processes; with one, the worker runs in the engine's process."""
        tensor = self.engine_args.get("tensor_parallel_size", 1)
        return int(tensor * self.engine_args.get("pipeline_parallel_size", 1))


@dataclass(frozen=True)
class Generated:
    """What became of a request.

    Attributes:
        token_ids: the new tokens.
        finish_reason: ``length``, ``stop``, ``abort``, ``error``; None if vLLM refused the request.
        error: why vLLM refused the request.
        kv_transfer_params: for the next engine, None if there is nothing to hand over.
        num_local_tokens: prompt tokens found in the engine's own prefix cache.
        num_external_tokens: prompt tokens whose KV the connector brought.
        num_computed_tokens: prompt tokens computed here. None, as the other two, if the request
            ended before its first token.
        submitted_at: when the engine's process received the request.
        first_token_at: when the engine gave out the first token, if it did.
    """

    request_id: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None
    kv_transfer_params: JsonObject | None
    num_local_tokens: int | None
    num_external_tokens: int | None
    num_computed_tokens: int | None
    submitted_at: float
    first_token_at: float | None
    finished_at: float

    @property
    def seconds_to_first_token(self) -> float:
        if self.first_token_at is None:
            raise EngineError(f"request {self.request_id} has no token: {self}")
        return self.first_token_at - self.submitted_at


@dataclass(frozen=True)
class ProcessUsage:
    """What an engine uses, with the processes under it.

    Attributes:
        rss_bytes: resident memory; pages shared with the template count.
        cpu_seconds: of the living processes, user and system.
    """

    processes: int
    threads: int
    file_descriptors: int
    rss_bytes: int
    cpu_seconds: float


@dataclass(frozen=True)
class Remains:
    """What was left in an engine's process after vLLM's shutdown.

    Attributes:
        threads: names of the threads, as the kernel knows them.
        file_descriptors: what each open one leads to.
        shared_memory: mapped files under /dev/shm.
        children: process ids.
    """

    threads: tuple[str, ...]
    file_descriptors: tuple[str, ...]
    shared_memory: tuple[str, ...]
    children: tuple[int, ...]


class Generation:
    """A request under way."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._result: Future[Any] = Future()
        self._first_token = threading.Event()
        self._result.add_done_callback(lambda _: self._first_token.set())

    def result(self, timeout: float = DEFAULT_TIMEOUT_S) -> Generated:
        """
        Raises:
            EngineError: the engine is gone, or did not finish the request in time.
        """
        generated = self._engine._await(self._result, f"request {self.request_id}", timeout)
        assert isinstance(generated, Generated)
        return generated

    def done(self) -> bool:
        return self._result.done()

    def wait_first_token(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the engine gave out a token (or the request ended)."""
        if not self._first_token.wait(timeout):
            raise self._engine._late(f"the first token of {self.request_id}", timeout)


class Condition:
    """A condition that an engine watches."""

    def __init__(self, engine: Engine, result: Future[Any], name: str, timeout: float) -> None:
        self._engine = engine
        self._result = result
        self._name = name
        self._timeout = timeout

    def result(self) -> tuple[Any, float]:
        """What the condition evaluated to, and when it was found true.

        Raises:
            EngineError: it was not true in time, counted from when the engine was told.
        """
        # The engine gives up first, unless it hangs.
        value, found_at = self._engine._await(
            self._result, self._name, self._timeout + STOP_TIMEOUT_S
        )
        return value, found_at


class Engine:
    """A handle of an engine; made by `EngineTemplate.start`.

    Attributes:
        spec: as started, with the port of the side channel in ``env``.
    """

    def __init__(
        self, template: EngineTemplate, spec: EngineSpec, log_path: Path, pid: int, pipe: Connection
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self.pid = pid
        self._template = template
        self._pidfd = os.pidfd_open(pid)
        self._pipe = pipe
        self._send_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[Future[Any], threading.Event | None]] = {}
        self._calls_lock = threading.Lock()
        self._gone = False
        self._frozen = False
        self._closed = False
        self._exit_code: int | None = None
        self._worker_memory: set[Path] = set()
        self._ready: Future[Any] = Future()
        self._calls[0] = (self._ready, None)
        self._reader = threading.Thread(target=self._read, name=f"{spec.name}-pipe", daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def side_channel_port(self) -> int:
        return int(self.spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until the engine can take requests.

        Raises:
            EngineError: it could not be made; the message has vLLM's traceback.
        """
        self._await(self._ready, "its start", timeout)

    # --- requests ---

    def submit(
        self,
        prompt: Prompt,
        max_tokens: int = 16,
        *,
        kv_transfer_params: JsonObject | None = None,
        request_id: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Start a greedy request.

        Args:
            prompt: token ids.
            sampling: further arguments of vLLM's ``SamplingParams``.
        """
        number = next(self._numbers)
        request_id = request_id or f"{self.name}-{number}"
        generation = Generation(self, request_id)
        arguments = (request_id, list(prompt), max_tokens, kv_transfer_params, dict(sampling or {}))
        self._post(number, "generate", arguments, generation._result, generation._first_token)
        return generation

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 16,
        *,
        kv_transfer_params: JsonObject | None = None,
        request_id: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Generated:
        """`submit`, and wait for the result."""
        return self.submit(
            prompt,
            max_tokens,
            kv_transfer_params=kv_transfer_params,
            request_id=request_id,
            sampling=sampling,
        ).result(timeout)

    def abort(self, request_id: str) -> bool:
        """Whether there was such a request; its result then has ``abort`` as its reason."""
        return bool(self._call("abort", request_id))

    # --- looking inside ---

    def call(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S
    ) -> Any:
        """``function(context, *args)`` over there, between two steps.

        Args:
            function: of a module that the template can import; see `EngineTemplate`. Its
                arguments and result are pickled.
            timeout: seconds.

        Raises:
            EngineError: it raised; the message has the traceback.
        """
        return self._call("call", function, args, timeout=timeout)

    def wait_until(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Any, float]:
        """Evaluate ``function(context, *args)`` at once and after every step until it is true.

        Returns:
            Its value, and when it was found true.
        """
        return self.when(function, *args, timeout=timeout).result()

    def when(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT_S
    ) -> Condition:
        """`wait_until` without the waiting: evaluated from now on, asked for later."""
        future: Future[Any] = Future()
        self._post(next(self._numbers), "wait_until", (function, args, timeout), future, None)
        name = getattr(function, "__name__", repr(function))
        return Condition(self, future, f"{name}{args}", timeout)

    def blocks_in_use(self) -> int:
        """KV cache blocks that requests hold, in use or promised to another engine."""
        return int(self._call("blocks_in_use"))

    def num_blocks(self) -> int:
        """KV cache blocks that requests can have."""
        return int(self._call("num_blocks"))

    def wait_blocks_in_use(self, blocks: int = 0, timeout: float = DEFAULT_TIMEOUT_S) -> float:
        """Wait until requests hold exactly so many blocks; when that was found."""
        return self.when_blocks_in_use(blocks, timeout).result()[1]

    def when_blocks_in_use(self, blocks: int = 0, timeout: float = DEFAULT_TIMEOUT_S) -> Condition:
        """`wait_blocks_in_use` without the waiting."""
        from kvnixl.bench import vllm_child

        return self.when(vllm_child.holds_blocks, blocks, timeout=timeout)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, the sums and counts of its histograms as
        ``name:sum`` and ``name:count``.

        Labels follow the name if there are others than the model's and the engine's:
        ``vllm:prompt_tokens_by_source{source=external_kv_transfer}``.
        """
        found: dict[str, float] = self._call("metrics")
        return found

    def take_connector_stats(self) -> list[JsonObject]:
        """What the connector reported in each step since the last call, oldest first."""
        found: list[JsonObject] = self._call("take_connector_stats")
        return found

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False when blocks are in use."""
        return bool(self._call("reset_prefix_cache"))

    def pause(self) -> None:
        """Make no more steps until `resume`; calls are answered meanwhile."""
        self._call("pause", True)

    def resume(self) -> None:
        self._call("pause", False)

    def log(self) -> str:
        """All that the engine and its workers printed so far."""
        return self.log_path.read_text(errors="replace")

    # --- the process ---

    @property
    def alive(self) -> bool:
        return not self._closed and not select.select([self._pidfd], [], [], 0)[0]

    def usage(self) -> ProcessUsage:
        """Works on a frozen engine too."""
        return _usage(self.pid)

    def freeze(self) -> None:
        """Stop all its threads and workers where they are; they stand still on return."""
        self._frozen = True
        pids = [self.pid, *_descendants(self.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + STOP_TIMEOUT_S
        while any(state not in "TtZX" for pid in pids for state in _thread_states(pid)):
            if time.monotonic() > until:
                raise self._late("its stop", STOP_TIMEOUT_S)
            time.sleep(0.0005)

    def thaw(self) -> None:
        for pid in [self.pid, *_descendants(self.pid)]:
            os.kill(pid, signal.SIGCONT)
        self._frozen = False

    def kill(self) -> None:
        """SIGKILL to the engine and its workers; they are gone on return."""
        if self.alive:
            self._note_worker_memory()
            for pid in [*_descendants(self.pid), self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._wait_end(STOP_TIMEOUT_S)
        self._reap()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> Remains:
        """vLLM's shutdown, then the end of the process.

        Raises:
            EngineError: it did not end in time, or not with exit code 0.
        """
        self._note_worker_memory()
        remains = self._call("stop", timeout=timeout)
        if not self._wait_end(timeout):
            raise self._late("its end", timeout)
        self._reap()
        if self._exit_code != 0:
            raise EngineError(f"engine {self.name} ended with exit code {self._exit_code}")
        assert isinstance(remains, Remains)
        return remains

    @property
    def exit_code(self) -> int | None:
        """After `kill` or `stop`; negative: the signal that ended it."""
        return self._exit_code

    def close(self) -> None:
        """End it; nothing is raised.

        With one rank nothing outlives a killed process but files in the template's `work_dir`, so
        it is not given the seconds that vLLM's shutdown takes; `stop` does that.
        """
        if self._closed:
            return
        if self.spec.ranks > 1 and self.alive and not self._frozen:
            with contextlib.suppress(EngineError):
                self.stop()
        self.kill()
        self._closed = True
        self._reader.join(STOP_TIMEOUT_S)
        self._pipe.close()
        os.close(self._pidfd)
        self._template._forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- calls ---

    def _call(self, method: str, *args: Any, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
        future: Future[Any] = Future()
        self._post(next(self._numbers), method, args, future, None)
        return self._await(future, method, timeout)

    def _post(
        self,
        number: int,
        method: str,
        args: tuple[Any, ...],
        future: Future[Any],
        first_token: threading.Event | None,
    ) -> None:
        with self._calls_lock:
            gone = self._gone
            if not gone:
                self._calls[number] = (future, first_token)
        if gone:
            raise self._gone_error()
        try:
            with self._send_lock:
                self._pipe.send((number, method, args))
        except OSError:
            # The reading thread finds the same, and fails the call.
            pass
        except BaseException:
            with self._calls_lock:
                self._calls.pop(number, None)
            raise

    def _await(self, future: Future[Any], what: str, timeout: float) -> Any:
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            raise self._late(what, timeout) from None

    def _read(self) -> None:
        """The thread that receives what the engine sends."""
        while True:
            try:
                number, kind, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            with self._calls_lock:
                if kind == "first token":
                    first_token = self._calls[number][1]
                else:
                    future, first_token = self._calls.pop(number)
            if kind == "first token":
                if first_token is not None:
                    first_token.set()
            elif kind == "result":
                future.set_result(value)
            else:
                future.set_exception(EngineError(f"engine {self.name}: {value}"))
        with self._calls_lock:
            self._gone = True
            calls = list(self._calls.values())
            self._calls.clear()
        reason = str(self._gone_error()) if calls else ""
        for future, _ in calls:
            future.set_exception(EngineError(reason))

    def _gone_error(self) -> EngineError:
        # A dying process closes its pipe before it writes why it died.
        if not self._closed:
            self._wait_end(_LAST_WORDS_S)
        return EngineError(f"engine {self.name} (process {self.pid}) is gone{self._log_tail()}")

    def _late(self, what: str, timeout: float) -> EngineError:
        if self.alive and not self._frozen:
            # The engine then writes into its log where its threads are.
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        frozen = " (it is frozen)" if self._frozen else ""
        return EngineError(
            f"engine {self.name} (process {self.pid}){frozen} did not bring {what} within "
            f"{timeout:g} s{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = self.log().splitlines()[-_LOG_TAIL_LINES:]
        return f"; the end of {self.log_path}:" + "".join(f"\n    {line}" for line in lines)

    def _wait_end(self, timeout: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout)[0])

    def _reap(self) -> None:
        if self._exit_code is None:
            self._exit_code = self._template._reap(self.pid)
        for path in self._worker_memory:
            path.unlink(missing_ok=True)

    def _note_worker_memory(self) -> None:
        """vLLM's workers leave the files through which they talk in /dev/shm."""
        for pid in _descendants(self.pid):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    path = line.split(maxsplit=5)[-1]
                    if path.startswith("/dev/shm/vllm_dist_"):
                        self._worker_memory.add(Path(path))


class EngineTemplate:
    """The process that has imported vLLM, and of which engines are forks.

    Args:
        work_dir: for logs and caches.
        python: the interpreter that has vLLM, and kvnixl's dependencies.
        import_paths: directories from which functions for `Engine.call` may be imported, besides
            the one that kvnixl is in.
        env: environment variables for all engines, over this process's and `ENVIRONMENT`.

    Raises:
        EngineError: vLLM cannot be imported there; the message says why.
    """

    def __init__(
        self,
        work_dir: Path,
        *,
        python: str = sys.executable,
        import_paths: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._work_dir = work_dir
        work_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = work_dir / "template.log"
        self._engines: list[Engine] = []
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [Path(__file__).parents[2], *import_paths]
        temporary = work_dir / "tmp"
        temporary.mkdir(exist_ok=True)
        python_path = [str(path) for path in paths] + [os.environ.get("PYTHONPATH", "")]
        environment = os.environ | ENVIRONMENT
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            "VLLM_CACHE_ROOT": str(work_dir / "vllm-cache"),
            "VLLM_CONFIG_ROOT": str(work_dir / "vllm-config"),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": _LOOPBACK,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(temporary),
        }
        environment |= env or {}
        with theirs, self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "kvnixl.bench.vllm_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for this process, which then ends the others.
                start_new_session=True,
            )
        try:
            self._receive(TEMPLATE_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def start(self, spec: EngineSpec, timeout: float = START_TIMEOUT_S) -> Engine:
        """Start an engine and wait until it is ready."""
        engine = self.launch(spec)
        try:
            engine.wait_ready(timeout)
        except BaseException:
            engine.close()
            raise
        return engine

    def launch(self, spec: EngineSpec) -> Engine:
        """Start an engine; `Engine.wait_ready` waits for it. Several can start at once."""
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        spec = dataclasses.replace(spec, env=port | dict(spec.env))
        handle, name = tempfile.mkstemp(".log", f"{spec.name}-", self._work_dir)
        os.close(handle)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._request(("fork", spec, name), [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        engine = Engine(self, spec, Path(name), pid, Connection(ours.detach()))
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in list(self._engines):
            engine.close()
        self._control.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _forget(self, engine: Engine) -> None:
        self._engines.remove(engine)

    def _reap(self, pid: int) -> int:
        return int(self._request(("reap", pid), []))

    def _request(self, message: tuple[Any, ...], handles: list[int]) -> Any:
        with self._lock:
            try:
                socket.send_fds(self._control, [pickle.dumps(message)], handles)
            except OSError:
                raise self._gone_error() from None
            return self._receive(DEFAULT_TIMEOUT_S)

    def _receive(self, timeout: float) -> Any:
        self._control.settimeout(timeout)
        try:
            answer = self._control.recv(_CONTROL_BYTES)
        except TimeoutError:
            raise EngineError(f"the process with vLLM gave no answer in {timeout:g} s") from None
        except OSError:
            answer = b""
        if not answer:
            raise self._gone_error()
        return pickle.loads(answer)

    def _gone_error(self) -> EngineError:
        # A dying process closes its socket before it writes why it died.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        log = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return EngineError("the process with vLLM is gone; its log ends with\n" + "\n".join(log))


@dataclass(frozen=True)
class Handoff:
    """
    Attributes:
        params: what the decoding engine was given.
    """

    prefill: Generated
    params: JsonObject
    decode: Generated


@dataclass(frozen=True)
class Pair:
    """An engine that computes prompts, and one that continues from the KV cache of the first."""

    prefill: Engine
    decode: Engine

    def run_prefill(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Generated:
        """The first half of a handoff.

        Raises:
            EngineError: there is nothing to hand over.
        """
        prefilled = self.prefill.generate(
            prompt, 1, kv_transfer_params=prefill_params(), request_id=request_id, timeout=timeout
        )
        if prefilled.kv_transfer_params is None:
            raise EngineError(f"engine {self.prefill.name} has nothing to hand over: {prefilled}")
        return prefilled

    def handoff(
        self,
        prompt: Prompt,
        max_tokens: int = 16,
        *,
        tamper: Callable[[JsonObject], JsonObject] | None = None,
        between: Callable[[Generated], None] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Handoff:
        """Compute the prompt in one engine and continue in the other.

        Args:
            max_tokens: of the decoding engine, which repeats the first token.
            tamper: makes other parameters for the decoding engine; it may change its argument.
            between: runs when the first half is done.
            timeout: seconds for each half.
        """
        prefilled = self.run_prefill(prompt, timeout=timeout)
        assert prefilled.kv_transfer_params is not None
        params = prefilled.kv_transfer_params
        if tamper is not None:
            params = tamper(pickle.loads(pickle.dumps(params)))
        if between is not None:
            between(prefilled)
        decoded = self.decode.generate(
            prompt, max_tokens, kv_transfer_params=params, timeout=timeout
        )
        return Handoff(prefilled, params, decoded)


class Reference:
    """Tokens as one engine without a connector computes them, each prompt once.

    Args:
        engine: started with ``forces_tokens``.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: dict[tuple[tuple[int, ...], int, bool], tuple[int, ...]] = {}

    def tokens(
        self, prompt: Prompt, max_tokens: int = 16, *, decode_last: bool = True
    ) -> tuple[int, ...]:
        """
        Args:
            decode_last: compute the last token of the prompt as a decoding engine does after it
                received the others, in a step of its own. Attention kernels for a prompt and for
                single tokens may round differently, and then choose other tokens.
        """
        key = (tuple(prompt), max_tokens, decode_last)
        if key not in self._known:
            self._known[key] = self._compute(list(prompt), max_tokens, decode_last)
        return self._known[key]

    def _compute(self, prompt: list[int], max_tokens: int, decode_last: bool) -> tuple[int, ...]:
        forced = [prompt.pop()] if decode_last and len(prompt) > 1 else []
        generated = self.engine.generate(
            prompt, len(forced) + max_tokens, sampling={"extra_args": {FORCED_TOKENS: forced}}
        )
        tokens = generated.token_ids
        if generated.finish_reason != "length" or list(tokens[: len(forced)]) != forced:
            raise EngineError(f"engine {self.engine.name} gave no reference: {generated}")
        return tokens[len(forced) :]


def prefill_params() -> JsonObject:
    """The ``kv_transfer_params`` of a request whose KV cache is for another engine."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


_given_ports: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on and that was not given out before.

    It lies outside the range from which the kernel takes ports for those who do not care, such as
    UCX: one of those could get it before its owner listens on it.
    """
    low, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    below = range(max(1024, low - 12_000), low)
    candidates = random.SystemRandom().sample(below, len(below)) or [0]
    for candidate in candidates:
        if candidate in _given_ports:
            continue
        with contextlib.suppress(OSError), socket.create_server((_LOOPBACK, candidate)) as server:
            port = int(server.getsockname()[1])
            _given_ports.add(port)
            return port
    raise EngineError(f"no free port among {len(candidates)} of {_LOOPBACK}")


# --- what the kernel knows of a process ---------------------------------------------------------


def _usage(pid: int) -> ProcessUsage:
    pids = [pid, *_descendants(pid)]
    page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    threads = rss = handles = 0
    cpu = 0.0
    for one in pids:
        fields = _stat_fields(Path(f"/proc/{one}/stat"))
        cpu += (int(fields[11]) + int(fields[12])) / tick
        threads += int(fields[17])
        rss += int(fields[21]) * page
        handles += len(os.listdir(f"/proc/{one}/fd"))
    return ProcessUsage(len(pids), threads, handles, rss, cpu)


def _stat_fields(stat: Path) -> list[str]:
    """The fields of proc_pid_stat(5) from the third, the state, on.

    They follow the name, which is in parentheses and may contain any character.
    """
    return stat.read_text().rpartition(")")[2].split()


def _thread_states(pid: int) -> Iterator[str]:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield _stat_fields(stat)[0]


def _descendants(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in children.read_text().split()]
    return found + [below for child in found for below in _descendants(child)]
