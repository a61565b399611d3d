"""NIXL's Python API with types, owners and errors: `Agent` keeps NIXL's own call names, and every
handle it gives out is an object with ``close()``.

`Agent.open` starts a real NIXL agent. `Agent(raw)` wraps any object with the calls of NIXL's
``nixl_agent``: a real one, `kvnixl.fake.FakeAgent`, a caller's own.

Three facts about NIXL shape this module. They were observed with NIXL 1.5.1 over UCX:

* Releasing a transfer that is in flight may report success while bytes still land in the local
  memory (over tcp half of 512 MiB landed afterwards), and may leave UCX unable to shut down. So a
  transfer is released only once NIXL has said that it ended; until then it is *quarantined*.
* Invalidating a remote agent makes its running transfers report an error at once, again while bytes
  still land. So `RemoteAgent.close` refuses while a transfer to that agent is in flight.
* The UCX progress thread spins on a core because the Python API configures a poll delay of zero;
  with a delay it sleeps on UCX's event descriptor and still wakes at once.

An agent is used from one thread at a time, like NIXL's own.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import operator
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

import numpy as np

from kvnixl.errors import (
    AgentError,
    ClosedError,
    DescriptorError,
    NixlUnavailableError,
    PeerDisconnectedError,
    RegistrationError,
    ReleaseError,
    TransferError,
)
from kvnixl.loglimit import LogLimiter
from kvnixl.outcomes import Telemetry

if TYPE_CHECKING:
    import numpy.typing as npt

    Descs: TypeAlias = npt.NDArray[np.uint64]
    Indices: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[int]

logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["READ", "WRITE"]
MemType: TypeAlias = Literal["DRAM", "VRAM"]
XferState: TypeAlias = Literal["DONE", "PROC", "PEND", "ERR"]

# NIXL's marker for the local side of a transfer in prep_xfer_dlist.
LOCAL_SIDE = "NIXL_INIT_AGENT"

DEFAULT_POLL_DELAY_US = 1000
# How long close() waits for transfers in flight before it leaves them in quarantine.
DEFAULT_CLOSE_TIMEOUT_S = 2.0

_IN_FLIGHT = ("PROC", "PEND")
_GOOD_STATES = ("DONE", *_IN_FLIGHT)
# What NIXL raises for metadata of an agent whose name it knows already, or is its own.
_NAME_ERRORS = ("nixlNotAllowedError", "nixlInvalidParamError")
_INT32 = np.dtype(np.int32)


class NixlAgentLike(Protocol):
    """The calls of NIXL's ``nixl_agent`` that `Agent` makes."""

    def register_memory(self, reg_list: Any, mem_type: str | None = None) -> Any: ...
    def deregister_memory(self, dereg_list: Any) -> None: ...
    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None
    ) -> Any: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...
    def release_dlist_handle(self, handle: Any) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> Any: ...
    def remove_remote_agent(self, agent: str) -> None: ...


# --- opening --------------------------------------------------------------------------------------

_open_lock = threading.Lock()


class _DelayedBindings:
    """NIXL's binding module with one call changed: agents are made with a poll delay.

    ``nixl_agent.__init__`` sets ``pthrDelay = 0`` on the configuration it builds and offers no
    argument for it, so the value is replaced between that line and the constructor of the binding.
    """

    def __init__(self, bindings: Any, poll_delay_us: int) -> None:
        self._bindings = bindings
        self._poll_delay_us = poll_delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - NIXL's name
        config.pthrDelay = self._poll_delay_us
        return self._bindings.nixlAgent(name, config)


@contextlib.contextmanager
def _poll_delay(api: Any, poll_delay_us: int) -> Iterator[None]:
    bindings = getattr(api, "nixlBind", None)
    if bindings is None or not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        logger.warning(
            "this NIXL version hides its progress thread's poll delay: "
            "an idle agent will keep one core busy (pass progress_thread=False to avoid it)"
        )
        yield
        return
    with _open_lock:
        api.nixlBind = _DelayedBindings(bindings, poll_delay_us)
        try:
            yield
        finally:
            api.nixlBind = bindings


def nixl_available() -> bool:
    """True when NIXL's Python package can be imported."""
    try:
        importlib.import_module("nixl._api")
    except ImportError:
        return False
    return True


def _open_nixl(
    name: str,
    backends: Sequence[str],
    num_threads: int,
    progress_thread: bool,
    poll_delay_us: int,
    capture_telemetry: bool,
) -> Any:
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as exc:
        raise NixlUnavailableError(
            f"NIXL cannot be imported ({exc}); install it with `pip install nixl`"
        ) from exc
    config = api.nixl_agent_config(
        enable_prog_thread=progress_thread,
        capture_telemetry=capture_telemetry,
        num_threads=num_threads,
        backends=list(backends),
    )
    try:
        with _poll_delay(api, poll_delay_us):
            raw = api.nixl_agent(name, config)
    except Exception as exc:
        raise AgentError(
            "create_backend",
            f"{exc or type(exc).__name__} (backends {list(backends)}; for UCX check that UCX_TLS, "
            "if set, names transports that exist here and includes tcp or an RDMA one)",
        ) from exc
    missing = [backend for backend in backends if backend not in raw.backends]
    if missing:
        raise NixlUnavailableError(
            f"NIXL has no plugin for the backends {missing}; it offers {raw.get_plugin_list()}"
        )
    return raw


# --- errors ---------------------------------------------------------------------------------------


def _translate(
    operation: str, exc: Exception, peer: str | None, default: type[AgentError]
) -> AgentError:
    """NIXL's exception classes live in a compiled module that differs per CUDA version, so they are
    recognised by name."""
    kind = type(exc).__name__
    try:
        reason = f"{kind}: {exc}" if str(exc) else kind
    except Exception:  # an exception of a caller's own agent may not be printable
        reason = kind
    if kind == "nixlRemoteDisconnectError":
        return PeerDisconnectedError(operation, reason, peer=peer)
    return default(operation, reason, peer=peer)


class _calling:  # noqa: N801 - used like a function
    """Turns what a NIXL call raises into an `AgentError`. A generator would cost more than the
    calls that it is around."""

    __slots__ = ("_default", "_operation", "_peer")

    def __init__(self, operation: str, default: type[AgentError], peer: str | None = None) -> None:
        self._operation = operation
        self._default = default
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, AgentError):
            raise _translate(self._operation, exc, self._peer, self._default) from exc


# --- owners ---------------------------------------------------------------------------------------


class _Owned:
    """Something NIXL gave out that has to be given back.

    ``close()`` never raises: what cannot be given back now goes into the agent's quarantine, whose
    ``retry_releases`` tries again. That NIXL refused it is said once, and not more often than every
    ten seconds. ``closed`` says that the owner is done with the object, ``released`` that NIXL is.
    """

    def __init__(self, agent: Agent, owners: dict[int, Any]) -> None:
        self._agent = agent
        self._owners = owners  # where the agent keeps it while it is open
        owners[id(self)] = self
        self.handle: Any = None  # what NIXL gave out
        self.closed = False
        self.released = False

    def _release(self) -> None:
        """Give it back; raise `AgentError` when that is not possible now."""
        raise NotImplementedError

    def close(self) -> bool:
        """Release it, or leave it to the agent's quarantine. True when it was released."""
        if not self.closed:
            self.closed = True
            self._owners.pop(id(self), None)
            agent = self._agent
            error = self._try_release()
            if error is not None:
                agent._quarantine[id(self)] = self
                if error.__cause__ is not None:  # else it only has to wait for a transfer
                    agent._warnings.warning(
                        "release", "agent %s keeps it and will try again: %s", agent.name, error
                    )
        return self.released

    def _try_release(self) -> AgentError | None:
        """Why it could not be released, or None when it is."""
        if not self.released:
            try:
                self._release()
            except AgentError as exc:
                return exc
            self._mark_released()
        return None

    def _mark_released(self) -> None:
        self.closed = self.released = True
        self.handle = None  # NIXL's handles keep its agent, and so its threads, alive


class Registration(_Owned):
    """Memory registered with NIXL."""

    def __init__(self, agent: Agent, descs: Any, num_bytes: int) -> None:
        super().__init__(agent, agent._registrations)
        self.handle = descs
        self.num_bytes = num_bytes

    def _release(self) -> None:
        if self._agent.bytes_may_move():
            raise RegistrationError("deregister_memory", "a transfer is still in flight")
        with _calling("deregister_memory", RegistrationError):
            self._agent.raw.deregister_memory(self.handle)


class PreparedList(_Owned):
    """A prepared descriptor list of one side; transfers name its descriptors by int32 index."""

    def __init__(self, agent: Agent, handle: Any, peer: str | None) -> None:
        super().__init__(agent, agent._lists)
        self.handle = handle
        self.peer = peer

    def _release(self) -> None:
        with _calling("release_dlist_handle", ReleaseError, self.peer):
            self._agent.raw.release_dlist_handle(self.handle)


class RemoteAgent(_Owned):
    """A remote agent whose metadata was loaded. Loading the same agent twice gives two owners; NIXL
    forgets it when the last one closes."""

    def __init__(self, agent: Agent, name: str) -> None:
        super().__init__(agent, agent._remotes)
        self.name = name

    def _release(self) -> None:
        agent = self._agent
        owners = agent._remote_owners
        if owners.get(self.name, 0) > 1:
            owners[self.name] -= 1
            return
        if agent.bytes_may_move(self.name):
            raise ReleaseError(
                "remove_remote_agent", "a transfer to it is still in flight", peer=self.name
            )
        with _calling("remove_remote_agent", ReleaseError, self.name):
            agent.raw.remove_remote_agent(self.name)
        owners.pop(self.name, None)


class Transfer(_Owned):
    """One READ or WRITE between prepared lists.

    ``post()`` starts it, ``state()`` says how far it is, ``close()`` gives the handle back once the
    transfer has ended. The local memory may be reused when ``released`` is true, not before.
    """

    def __init__(self, agent: Agent, handle: Any, operation: str, peer: str | None) -> None:
        super().__init__(agent, agent._transfers)
        self.handle = handle
        self.operation = operation
        self.peer = peer
        # The last state NIXL reported; None before the transfer was posted.
        self.last_state: str | None = None

    def post(self) -> XferState:
        """Start it.

        Returns:
            ``"DONE"`` (small transfers end inside the call), ``"PROC"`` or ``"PEND"``. An agent
            that says nothing is taken to have started it: `state` tells.

        Raises:
            PeerDisconnectedError, TransferError: it failed. Parts of it may have been started
                before that; `over` tells.
        """
        self._check_open("transfer")
        if self.last_state in _IN_FLIGHT:
            raise TransferError("transfer", "it was posted and is in flight", peer=self.peer)
        self.last_state = "ERR"
        try:
            with _calling("transfer", TransferError, self.peer):
                state = self._agent.raw.transfer(self.handle)
                if state is None:
                    state = "PROC"
                if state not in _GOOD_STATES:
                    raise TransferError(
                        "transfer", f"NIXL reported the state {state!r}", peer=self.peer
                    )
        except AgentError:
            if not self._agent.release_is_final:
                with contextlib.suppress(AgentError):
                    self._ask_state()
            raise
        self.last_state = state
        return cast(XferState, state)

    def state(self) -> XferState:
        """Ask NIXL for the state; ``"ERR"`` when NIXL reports one.

        Raises:
            PeerDisconnectedError, TransferError: the transfer failed.
        """
        self._check_open("check_xfer_state")
        return self._ask_state()

    def _ask_state(self) -> XferState:
        # Asked in every poll: `_calling` would make an object each time.
        try:
            state = self._agent.raw.check_xfer_state(self.handle)
        except Exception as exc:
            # "Not found" is said of a transfer whose remote agent was invalidated or loaded again
            # meanwhile, and then tells nothing about its bytes: it counts as in flight for ever.
            cause = exc.__cause__ if isinstance(exc, AgentError) else exc
            if type(cause).__name__ != "nixlNotFoundError":
                self.last_state = "ERR"
            if cause is not exc:
                raise
            raise _translate("check_xfer_state", exc, self.peer, TransferError) from exc
        self.last_state = state if state in _GOOD_STATES else "ERR"
        return cast(XferState, self.last_state)

    @property
    def in_flight(self) -> bool:
        """True while NIXL may still move bytes of this transfer, as far as was last asked."""
        return not self.released and self.last_state in _IN_FLIGHT

    def over(self) -> bool:
        """Ask whether it has ended, well or not, also when it was closed."""
        if not self.released and self.last_state in _IN_FLIGHT:
            with contextlib.suppress(AgentError):
                self._ask_state()
        return not self.in_flight

    def telemetry(self) -> Telemetry | None:
        """NIXL's figures of this transfer, or None when it has none."""
        if self.released:
            return None
        try:
            raw = self._agent.raw.get_xfer_telemetry(self.handle)
            return Telemetry(
                int(raw.descCount),
                int(raw.totalBytes),
                float(raw.postDuration),
                float(raw.xferDuration),
            )
        except Exception:  # telemetry never decides an outcome
            return None

    def _check_open(self, operation: str) -> None:
        if self.released or self.closed:
            raise ClosedError(f"{operation}: this transfer was closed")

    def _release(self) -> None:
        # Also after an error: a post that failed half way may have left parts of it running.
        if self.last_state not in {None, "DONE"} and not self._agent.release_is_final:
            with contextlib.suppress(AgentError):
                self._ask_state()
            if self.last_state in _IN_FLIGHT:
                raise ReleaseError(
                    "release_xfer_handle",
                    "the transfer is in flight, and NIXL would report it released while bytes "
                    "still land; poll it to its end first",
                    peer=self.peer,
                )
        with _calling("release_xfer_handle", ReleaseError, self.peer):
            self._agent.raw.release_xfer_handle(self.handle)


# --- the agent ------------------------------------------------------------------------------------


def _release_is_final(raw: Any) -> bool:
    """Whether a successful release means that no more bytes land.

    NIXL does not promise that (see the module docstring). Another object may say so with a
    ``release_is_final`` attribute; one that is not built on NIXL and says nothing answers for its
    own release call.
    """
    declared = getattr(raw, "release_is_final", None)
    if isinstance(declared, bool):
        return declared
    classes = [*type(raw).__mro__, *type(getattr(raw, "agent", None)).__mro__]
    return not any(cls.__module__.split(".")[0].startswith("nixl") for cls in classes)


class Agent:
    """A NIXL agent that owns what it hands out.

    Args:
        raw: an object with the calls of NIXL's ``nixl_agent`` (see `NixlAgentLike`). Not closed by
            this class: NIXL agents end when the last reference goes.
        name: the agent's name; default ``raw.name``.
    """

    def __init__(self, raw: Any, *, name: str | None = None) -> None:
        self.raw = raw
        self.name = name if name is not None else str(getattr(raw, "name", "agent"))
        self.closed = False
        self.undecodable_notifs = 0
        self._opened_here = False
        self.release_is_final = _release_is_final(raw)
        self._transfers: dict[int, Transfer] = {}
        self._lists: dict[int, PreparedList] = {}
        self._registrations: dict[int, Registration] = {}
        self._remotes: dict[int, RemoteAgent] = {}
        self._remote_owners: dict[str, int] = {}
        self._quarantine: dict[int, _Owned] = {}
        self._warnings = LogLimiter(logger)

    @classmethod
    def open(
        cls,
        name: str | None = None,
        *,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 1,
        progress_thread: bool = True,
        poll_delay_us: int = DEFAULT_POLL_DELAY_US,
        capture_telemetry: bool = True,
    ) -> Agent:
        """Start a NIXL agent.

        Args:
            name: default is a random one: names must differ between all agents that meet, and an
                address or a rank does not guarantee that.
            backends: NIXL plugins to start.
            num_threads: UCX worker threads.
            progress_thread: let a thread answer peers; without it they wait for our next call.
            poll_delay_us: how long that thread may sleep, microseconds. It wakes on events anyway.
            capture_telemetry: keep figures per transfer (`Transfer.telemetry`).

        Raises:
            NixlUnavailableError: NIXL or one of the backends is missing.
            AgentError: NIXL could not start.
        """
        if name is None:
            name = f"kvnixl-{uuid.uuid4()}"
        raw = _open_nixl(
            name, backends, num_threads, progress_thread, poll_delay_us, capture_telemetry
        )
        agent = cls(raw, name=name)
        agent._opened_here = True
        return agent

    # memory

    def register_memory(
        self,
        regions: Sequence[tuple[int, int, int] | tuple[int, int, int, str]] | Descs,
        mem_type: MemType = "DRAM",
    ) -> Registration:
        """Register ``(address, length in bytes, device)`` regions with NIXL (as there, a fourth
        element may follow; it is not used).

        Raises:
            RegistrationError: NIXL refused; the message says what to check.
        """
        self._check_open("register_memory")
        rows = [(int(addr), int(length), int(dev), "") for addr, length, dev, *_ in regions]
        if not rows:
            raise DescriptorError("register_memory", "the list of regions is empty")
        for addr, length, _dev, _meta in rows:
            if addr <= 0 or length <= 0 or addr + length > 2**64:
                raise DescriptorError(
                    "register_memory", f"no memory at address {addr:#x} with length {length}"
                )
        total = sum(row[1] for row in rows)
        with _calling("register_memory", RegistrationError):
            try:
                descs = self.raw.register_memory(rows, mem_type=mem_type)
            except Exception as exc:
                raise RegistrationError(
                    "register_memory",
                    f"{type(exc).__name__}: {exc} ({len(rows)} {mem_type} regions, {total} bytes; "
                    "for RDMA check `ulimit -l`, and that the memory exists)",
                ) from exc
            if descs is None:
                raise RegistrationError("register_memory", f"NIXL refused {len(rows)} regions")
        return Registration(self, descs, total)

    def deregister_memory(self, registration: Registration) -> None:
        """NIXL's name for ``registration.close()``, but raises when that is not possible now."""
        self._close_or_raise(registration)

    def prep_xfer_dlist(
        self,
        agent_name: str | RemoteAgent,
        descs: Descs | Sequence[tuple[int, ...]],
        mem_type: MemType = "DRAM",
    ) -> PreparedList:
        """Prepare a descriptor list.

        Args:
            agent_name: `LOCAL_SIDE` or ``""`` for the local side, else the remote agent.
            descs: uint64, shape ``(R, 5)`` rows ``(address, length, device, stride, count)``, or
                shape ``(N, 3)`` rows ``(address, length, device)``; or such rows as tuples.

        Raises:
            DescriptorError: this is no descriptor list, or NIXL knows no such agent or no
                registered memory there.
        """
        self._check_open("prep_xfer_dlist")
        name = agent_name.name if isinstance(agent_name, RemoteAgent) else agent_name
        peer = None if name in (LOCAL_SIDE, "") else name
        if not isinstance(descs, np.ndarray):
            descs = _as_descs(descs, peer)
        if descs.ndim != 2 or descs.shape[1] not in (3, 5) or descs.dtype != np.uint64:
            raise DescriptorError(
                "prep_xfer_dlist",
                f"descriptors must be uint64 of shape (R, 5) or (N, 3), not {descs.dtype} of "
                f"shape {descs.shape}",
                peer=peer,
            )
        if descs.shape[0] == 0:
            raise DescriptorError("prep_xfer_dlist", "the descriptor list is empty", peer=peer)
        with _calling("prep_xfer_dlist", DescriptorError, peer):
            handle = self.raw.prep_xfer_dlist(name, descs, mem_type=mem_type)
            if handle is None:
                raise DescriptorError("prep_xfer_dlist", "NIXL returned nothing", peer=peer)
        return PreparedList(self, handle, peer)

    def release_dlist_handle(self, prepared: PreparedList) -> None:
        """NIXL's name for ``prepared.close()``, but raises when that is not possible now."""
        self._close_or_raise(prepared)

    # transfers

    def make_prepped_xfer(
        self,
        operation: Operation,
        local: PreparedList,
        local_indices: Indices,
        remote: PreparedList,
        remote_indices: Indices,
        notif_msg: bytes = b"",
    ) -> Transfer:
        """Make a transfer of ``local[i]`` and ``remote[j]`` for each pair ``(i, j)``; see `post`.

        Args:
            local_indices, remote_indices: descriptor indices of equal length, int32. Other integer
                types are checked and converted; NIXL itself would narrow them silently.
            notif_msg: sent to the remote agent after the data, when not empty.

        Raises:
            DescriptorError: empty, unequal, out of range or not integers.
            PeerDisconnectedError, TransferError: NIXL refused.
        """
        self._check_open("make_prepped_xfer")
        for side in (local, remote):
            if side.closed:
                raise ClosedError("make_prepped_xfer: a prepared list was closed")
        peer = remote.peer
        left = _as_indices(local_indices, "local", peer)
        right = _as_indices(remote_indices, "remote", peer)
        if len(left) != len(right):
            raise DescriptorError(
                "make_prepped_xfer",
                f"{len(left)} local and {len(right)} remote indices do not pair",
                peer=peer,
            )
        if len(left) == 0:
            raise DescriptorError("make_prepped_xfer", "there is nothing to transfer", peer=peer)
        # Passed only when used, so that a caller's own agent need not know notifications.
        notif = {"notif_msg": notif_msg} if notif_msg else {}
        try:
            with _calling("make_prepped_xfer", TransferError, peer):
                handle = self.raw.make_prepped_xfer(
                    operation, local.handle, left, remote.handle, right, **notif
                )
        except TransferError as exc:
            if type(exc.__cause__).__name__ == "nixlInvalidParamError":
                raise DescriptorError(
                    "make_prepped_xfer", f"an index is out of range ({exc.__cause__})", peer=peer
                ) from exc.__cause__
            raise
        if handle is None:
            raise TransferError("make_prepped_xfer", "NIXL returned nothing", peer=peer)
        return Transfer(self, handle, operation, peer)

    def transfer(self, xfer: Transfer) -> XferState:
        """NIXL's name for `Transfer.post`."""
        return xfer.post()

    def check_xfer_state(self, xfer: Transfer) -> XferState:
        """NIXL's name for `Transfer.state`."""
        return xfer.state()

    def get_xfer_telemetry(self, xfer: Transfer) -> Telemetry | None:
        """NIXL's name for `Transfer.telemetry`."""
        return xfer.telemetry()

    def release_xfer_handle(self, xfer: Transfer) -> None:
        """Release a transfer, or raise `ReleaseError` and leave it with the caller to try again.

        A transfer in flight cannot be released (see the module docstring).
        """
        self._close_or_raise(xfer)

    # peers

    def get_agent_metadata(self) -> bytes:
        """What a peer needs for its ``add_remote_agent``."""
        self._check_open("get_agent_metadata")
        with _calling("get_agent_metadata", AgentError):
            return bytes(self.raw.get_agent_metadata())

    def add_remote_agent(self, metadata: bytes, *, peer: str | None = None) -> RemoteAgent:
        """Load a peer's metadata.

        Args:
            metadata: the peer's `get_agent_metadata`.
            peer: what to call the peer in an error.

        Raises:
            AgentError: the bytes are no NIXL metadata or of an incompatible NIXL, or the agent's
                name is ours, another known agent's, or not UTF-8.
        """
        self._check_open("add_remote_agent")
        try:
            with _calling("add_remote_agent", AgentError, peer):
                name = self.raw.add_remote_agent(metadata)
        except AgentError as exc:
            if type(exc.__cause__).__name__ in _NAME_ERRORS:
                raise AgentError(
                    "add_remote_agent",
                    f"{exc.__cause__} (agent names have to differ between all agents that meet; "
                    "one that restarted under its name has to be removed first)",
                    peer=peer,
                ) from exc.__cause__
            raise
        if isinstance(name, bytes):
            try:
                name = name.decode()
            except UnicodeDecodeError:
                with _calling("remove_remote_agent", AgentError, peer):
                    self.raw.remove_remote_agent(name)
                raise AgentError(
                    "add_remote_agent", f"the agent's name {name!r} is not UTF-8", peer=peer
                ) from None
        if not name:
            raise AgentError("add_remote_agent", "NIXL did not accept the metadata", peer=peer)
        remote = RemoteAgent(self, str(name))
        self._remote_owners[remote.name] = self._remote_owners.get(remote.name, 0) + 1
        return remote

    def remove_remote_agent(self, remote: RemoteAgent) -> None:
        """NIXL's name for ``remote.close()``, but raises when that is not possible now."""
        self._close_or_raise(remote)

    def make_connection(self, remote: RemoteAgent) -> None:
        """Connect now rather than in the first transfer."""
        self._check_open("make_connection")
        with _calling("make_connection", AgentError, remote.name):
            self.raw.make_connection(remote.name)

    def send_notif(self, remote: RemoteAgent | str, message: bytes) -> None:
        """Send a notification that belongs to no transfer."""
        self._check_open("send_notif")
        name = remote.name if isinstance(remote, RemoteAgent) else remote
        with _calling("send_notif", AgentError, name):
            self.raw.send_notif(name, message)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Notifications that arrived since the last call, by the sender's agent name.

        A sender whose agent name is not UTF-8 makes NIXL's binding lose all that it had collected;
        `undecodable_notifs` counts how often that happened.
        """
        self._check_open("get_new_notifs")
        # Called in every step, nearly always for nothing: `_calling` would be most of its cost.
        try:
            return dict(self.raw.get_new_notifs())
        except UnicodeDecodeError as exc:
            self.undecodable_notifs += 1
            if self.undecodable_notifs == 1:
                logger.warning(
                    "agent %s: a peer whose agent name is not UTF-8 sent a notification; NIXL lost "
                    "those that had arrived with it: %s",
                    self.name,
                    exc,
                )
            return {}
        except Exception as exc:
            raise _translate("get_new_notifs", exc, None, AgentError) from exc

    # ending

    def bytes_may_move(self, peer: str | None = None) -> bool:
        """Whether a transfer (to ``peer``) may still move bytes, as far as was last asked.

        Always False for an agent that answers for its own release call.
        """
        if self.release_is_final:
            return False
        quarantined = (owned for owned in self._quarantine.values() if isinstance(owned, Transfer))
        return any(
            xfer.in_flight and (peer is None or xfer.peer == peer)
            for xfer in itertools.chain(self._transfers.values(), quarantined)
        )

    @property
    def quarantined(self) -> int:
        """How many closed objects NIXL could not take back yet."""
        return len(self._quarantine)

    @property
    def live(self) -> dict[str, int]:
        """How many objects are open, by kind."""
        return {
            "transfers": len(self._transfers),
            "prepared_lists": len(self._lists),
            "registrations": len(self._registrations),
            "remote_agents": len(self._remotes),
        }

    def retry_releases(self) -> int:
        """Try again to give back what is in quarantine; how much is left.

        Transfers come first: the other kinds wait for them.
        """
        if self._quarantine:
            waiting = list(self._quarantine.items())
            waiting.sort(key=lambda item: not isinstance(item[1], Transfer))
            for key, owned in waiting:
                if owned._try_release() is None:
                    del self._quarantine[key]
        return len(self._quarantine)

    def close(self, timeout: float = DEFAULT_CLOSE_TIMEOUT_S) -> int:
        """Release everything and let go of the NIXL agent. Closing twice is fine.

        Args:
            timeout: seconds to wait for transfers in flight.

        Returns:
            How many objects NIXL would not take back. When there are any, the NIXL agent is kept
            alive on purpose, since its memory may still be written; the caller has to keep the
            registered memory alive too.
        """
        if self.closed:
            return len(self._quarantine)
        for owned in itertools.chain(
            list(self._transfers.values()),
            list(self._lists.values()),
            list(self._remotes.values()),
            list(self._registrations.values()),
        ):
            owned.close()
        wait_until(lambda: self.retry_releases() == 0, timeout)
        self.closed = True
        left = len(self._quarantine)
        if left:
            _undead.append(self)
            logger.error(
                "agent %s: %d NIXL objects could not be released within %g s; the agent and its "
                "registered memory stay until the process ends",
                self.name,
                left,
                timeout,
            )
        else:
            self.raw = None
        return left

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_opened_here", False) and not self.closed:
            warnings.warn(f"agent {self.name!r} was not closed", ResourceWarning, stacklevel=1)

    def _check_open(self, operation: str) -> None:
        if self.closed:
            raise ClosedError(f"{operation}: the agent {self.name!r} was closed")

    def _close_or_raise(self, owned: _Owned) -> None:
        if owned.released:
            return
        owned._release()
        owned._mark_released()
        owned._owners.pop(id(owned), None)
        self._quarantine.pop(id(owned), None)


# Agents whose memory may still be written when they were closed.
_undead: list[Agent] = []


def _as_descs(rows: Iterable[Iterable[int]], peer: str | None) -> Descs:
    try:
        checked = [[operator.index(value) for value in row] for row in rows]
        for row in checked:
            if min(row) < 0 or len(row) != len(checked[0]):
                raise ValueError(f"the row {tuple(row)} does not fit")
        return np.array(checked, np.uint64)
    except (TypeError, ValueError, OverflowError) as exc:
        raise DescriptorError(
            "prep_xfer_dlist",
            "descriptors must be a uint64 array, or a list of tuples (address, length, device) of "
            f"integers from 0 to 2**64-1: {exc}",
            peer=peer,
        ) from exc


def _as_indices(indices: Indices, side: str, peer: str | None) -> npt.NDArray[np.int32]:
    try:
        array = np.asarray(indices)
    except ValueError as exc:
        raise DescriptorError("make_prepped_xfer", f"{side} indices: {exc}", peer=peer) from exc
    if array.dtype == _INT32 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1:
        raise DescriptorError(
            "make_prepped_xfer", f"{side} indices have {array.ndim} dimensions, not 1", peer=peer
        )
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise DescriptorError(
            "make_prepped_xfer",
            f"{side} indices must be integers, not {array.dtype} (first: {array[0]!r})",
            peer=peer,
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise DescriptorError(
            "make_prepped_xfer",
            f"{side} index {low if low < 0 else high} is outside 0 to 2**31-1",
            peer=peer,
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = 0.0005) -> bool:
    """Poll ``condition`` until it is true or ``timeout`` seconds are over; its last answer."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True
