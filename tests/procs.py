"""Child processes for tests: driven over a pipe, always ended in time.

They come from a fork server that has imported what they need but opened no agent: a fresh process
would import for two seconds first.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPLY_TIMEOUT_S = 60.0


_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "numpy",
        "nixl._api",
        "zmq",
        "kvnixl.transport",
        "kvnixl.handshake",
        "kvnixl.producer",
        "kvnixl.reader",
    ]
)


def _serve(
    make: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], pipe: Connection
) -> None:
    """The child's main: make an object, then call its methods as the parent asks."""
    os.environ.update(env)
    try:
        served = make(*args)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, call_args = pipe.recv()
        except EOFError:
            break
        if method is None:
            break
        try:
            pipe.send((True, getattr(served, method)(*call_args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    served.close()
    pipe.send((True, None))


class Child:
    """An object that lives in another process; its methods are called with ``call``."""

    def __init__(
        self, make: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
    ) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(make, args, env or {}, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._reply()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *args: Any) -> Any:
        self.post(method, *args)
        return self._reply()

    def post(self, method: str, *args: Any) -> None:
        """Start a call without waiting for it; ``finish`` brings its result."""
        self._pipe.send((method, args))

    def finish(self) -> Any:
        return self._reply()

    def _reply(self) -> Any:
        if not self._pipe.poll(REPLY_TIMEOUT_S):
            raise TimeoutError(f"child {self.pid} did not answer in {REPLY_TIMEOUT_S} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise AssertionError(f"in child {self.pid}:\n{value}")
        return value

    @property
    def crashed(self) -> bool:
        """Whether it ended with a memory fault, or the C library found its heap damaged."""
        self._process.join(1)
        return self._process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(5)

    def freeze(self) -> None:
        """Stop it; returns once every thread of it stands still, not when the signal was sent."""
        os.kill(self.pid, signal.SIGSTOP)
        until = time.monotonic() + REPLY_TIMEOUT_S
        while not all(state == "T" for state in self._thread_states()):
            if time.monotonic() > until:
                raise TimeoutError(f"child {self.pid} did not stop in {REPLY_TIMEOUT_S} s")
            time.sleep(0.0005)

    def _thread_states(self) -> list[str]:
        states = []
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                # The state follows the name, which is in parentheses and may contain anything.
                states.append(stat.read_text().rpartition(")")[2].split()[0])
        return states

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> int | None:
        """End it in good order; its exit code, or None when it was dead already."""
        if not self._process.is_alive():
            self._process.join(1)
            self._pipe.close()
            return None
        self.post(None)  # type: ignore[arg-type]
        self._reply()
        self._process.join(REPLY_TIMEOUT_S)
        self._pipe.close()
        return self._process.exitcode

    def end(self) -> None:
        """End it in any case (for fixtures)."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self._pipe.close()
