"""Objects in processes of their own, called over a pipe.

The pipe is also the lifeline. A child ends when the pipe's other end is closed, so it ends with its
parent, however that ends; a parent that is interrupted closes it and waits for no answer.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from kvnixl.errors import KvNixlError

# How long a child may take to end in good order once its pipe is closed.
_END_TIMEOUT_S = 5.0


class ChildError(KvNixlError):
    """A child process failed or ended."""


class StopRequested(BaseException):
    """Raised in a child whose parent has let go of it."""


class Closeable(Protocol):
    def close(self) -> None: ...


# Makes the object; takes a function that raises `StopRequested` when it is time to stop.
Factory = Callable[[Callable[[], None]], Closeable]


# --- in the parent ------------------------------------------------------------------------------


class Child:
    """An object that lives in another process.

    Args:
        role: the process's name in messages.
        factory: makes the object over there; must be picklable.
    """

    def __init__(self, role: str, factory: Factory) -> None:
        context = mp.get_context("spawn")
        self.role = role
        self._ready = False
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(factory, theirs), name=f"kvnixl-bench-{role}", daemon=True
        )
        # Starting the tracker would let interrupts in again.
        resource_tracker.ensure_running()
        with interrupts_held():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the object is made.

        Raises:
            ChildError: it could not be made.
        """
        self._reply()
        self._ready = True

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and wait for its result.

        Raises:
            ChildError: the method raised, or the process is gone.
        """
        try:
            self._pipe.send((method, args))
        except OSError:
            raise self._gone() from None
        return self._reply()

    def _reply(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not ok:
            raise ChildError(f"the {self.role} process failed: {value}")
        return value

    def _gone(self) -> ChildError:
        self._process.join(_END_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended unexpectedly (exit code {code})"
        return ChildError(f"the {self.role} process {how}")

    def end(self) -> None:
        """Let it end in good order, and force it when that takes too long."""
        self._pipe.close()
        if self._ready:
            self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """A process started meanwhile never gets SIGINT: Ctrl-C goes to the whole process group, and
    only the parent is to act on it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the child -------------------------------------------------------------------------------


def _serve(factory: Factory, pipe: Connection) -> None:
    ready = threading.Event()
    threading.Thread(target=_end_with_parent, args=(ready,), daemon=True).start()

    def check_stop() -> None:
        # Nobody sends anything during a call, so what can be read is the end of the pipe.
        if pipe.poll():
            raise StopRequested

    served: Closeable | None = None
    try:
        served = factory(check_stop)
        ready.set()
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            pipe.send((True, getattr(served, method)(*args)))
    except (StopRequested, EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as exc:
        with contextlib.suppress(OSError):
            pipe.send((False, _explain(exc)))
    finally:
        if served is not None:
            served.close()


def _explain(exc: Exception) -> str:
    if isinstance(exc, KvNixlError):
        return str(exc)
    return "".join(traceback.format_exception(exc)).rstrip()


def _end_with_parent(ready: threading.Event) -> None:
    """End a process whose parent was killed while the main thread cannot look at the pipe, because
    it still imports or because it hangs."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        if ready.is_set():
            time.sleep(_END_TIMEOUT_S)
        os._exit(1)
