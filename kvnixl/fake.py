"""An in-process stand-in for NIXL's ``nixl_agent``, joined by a network that a test controls.

`FakeAgent` has the calls, signatures, return values and exception class names of NIXL 1.5's Python
``nixl_agent``. It copies real memory of this process, and only between memory that both sides
registered. `FakeFabric` joins the agents. There is no thread and no clock: a posted transfer moves
on only when its state is checked, or when the test says so, and every random choice comes from one
seeded chooser, so a run can be repeated and shrunk::

    fabric = FakeFabric(seed=1)
    producer, reader = fabric.agent("P"), fabric.agent("D")
    reader_regs = reader.register_memory([(dst.ctypes.data, dst.nbytes, 0, "")], "DRAM")
    producer.register_memory([(src.ctypes.data, src.nbytes, 0, "")], "DRAM")
    peer = reader.add_remote_agent(producer.get_agent_metadata())
    local = reader.prep_xfer_dlist("", strided_rows_of_dst, "DRAM")
    remote = reader.prep_xfer_dlist(peer, strided_rows_of_src, "DRAM")
    fabric.script(Plan(polls=None, piece_bytes=4))  # polls do not move it; words are torn in two
    handle = reader.make_prepped_xfer("READ", local, [0, 1], remote, [7, 3], b"done")
    assert reader.transfer(handle) == "PROC"
    (transfer,) = fabric.transfers
    transfer.copy()  # half a word has arrived; let the producer overwrite its block now
    fabric.settle()  # everything in flight ends, held notifications arrive
    assert reader.check_xfer_state(handle) == "DONE"

Transfers. Every transfer follows a `Plan`, chosen when its handle is made: the first matching
`FakeFabric.script`, else ``FakeFabric.rule(transfer)`` unless that is ``None`` or returns ``None``,
else ``FakeFabric.plan``. `FakeTransfer` shows and steers one transfer (``copy``, ``finish``,
``fail``, ``hold``, ``refuse``); ``FakeFabric.transfers`` lists those in flight, also the ones whose
handle was released while they ran. `FakeFabric.progress` makes random steps, `FakeFabric.settle`
ends everything, ``fabric.rule = fabric.any_plan`` draws a plan for each transfer.
`FakeFabric.writers` and `FakeFabric.readers` tell which transfers may still touch a memory range.

Notifications. Each has a fate, ``"deliver"``, ``"lose"``, ``"duplicate"`` or ``"hold"``: the first
matching `FakeFabric.script_notice`, else ``FakeFabric.notice_rule(notice)``, else
``FakeFabric.notice_fate``. Held ones are in ``FakeFabric.notices`` and arrive in the order in which
the test delivers them. A notification that rides on a transfer sets out when all bytes are copied.

Any call fails with `FakeFabric.fail` (a state check that raises so leaves its transfer running),
peers die with `FakeFabric.kill` and come back with
`FakeFabric.restart`.

What NIXL leaves undefined is recorded in ``FakeFabric.violations``: using a released handle, or
deregistering memory into which one's own transfer still runs. `FakeFabric.assert_clean` fails on
violations and on every handle, prepared list, registration and remote agent that is left.

Where the fake is stricter than NIXL 1.5.1: a strided row whose end wraps past 2**64 is refused, a
truncated metadata blob does no harm, and a transfer from memory that its owner deregistered fails
(as with an RDMA device; through shared memory NIXL still copies).
"""

from __future__ import annotations

import ctypes
import json
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "FakeAgent",
    "FakeFabric",
    "FakeNotice",
    "FakeTransfer",
    "NoticeFate",
    "Plan",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_prepped_dlist_handle",
    "nixl_xfer_handle",
]

logger = logging.getLogger(__name__)

UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Operation = Literal["READ", "WRITE"]
NoticeFate = Literal["deliver", "lose", "duplicate", "hold"]
Failure = Exception | type[Exception]
Chooser = Callable[[str, int], int]

_METADATA_TAG = b"kvnixl-fake-agent\n"
_LOG_LENGTH = 4096


# --- NIXL's exceptions --------------------------------------------------------------------------


class _StatusError(Exception):
    """Carries the status name that NIXL puts into its messages."""

    status = "NIXL_ERR_UNKNOWN"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(self.status if message is None else message)


class nixlBackendError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_BACKEND"


class nixlCancelledError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_CANCELED"


class nixlInvalidParamError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_INVALID_PARAM"


class nixlMismatchError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_MISMATCH"


class nixlNoTelemetryError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_NO_TELEMETRY"


class nixlNotAllowedError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_NOT_ALLOWED"


class nixlNotFoundError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_NOT_FOUND"


class nixlNotPostedError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_NOT_POSTED"


class nixlNotSupportedError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_NOT_SUPPORTED"


class nixlRemoteDisconnectError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_REMOTE_DISCONNECT"


class nixlRepostActiveError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_REPOST_ACTIVE"


class nixlUnknownError(_StatusError):  # noqa: N801
    status = "NIXL_ERR_UNKNOWN"


# --- plans --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to one transfer. The default is a small transfer that NIXL ends while posting.

    Attributes:
        make: raised by ``make_prepped_xfer`` / ``initialize_xfer``.
        post: raised by ``transfer``, or ``"ERR"`` to have it return that.
        waiting: what ``transfer`` and state checks answer while it runs; NIXL only says ``"PROC"``.
        polls: how many state checks it takes to end: 0 ends in ``transfer`` itself, ``k`` in the
            k-th check, ``None`` never by checking, only by `FakeFabric.progress` or the test.
        copy: when polling moves the bytes: all in ``transfer`` (``"start"``), all at the end
            (``"end"``), or a share in every check, in an order that the chooser picks
            (``"spread"``).
        piece_bytes: the longest piece that is copied at one moment; ``None`` for one descriptor.
            4 tears every 8-byte word.
        end: how it ends: ``"DONE"``, ``"ERR"``, or the exception that the state check raises.
        copied: the share of the pieces that has arrived when a transfer ends badly, 0.0 to 1.0.
        hold: neither polls nor `FakeFabric.progress` move it until the test clears
            ``FakeTransfer.hold`` or calls its methods.
        release: what releasing does while it runs: ``"detach"`` succeeds although bytes may still
            land (what NIXL does over UCX), ``"cancel"`` stops it, ``"refuse"`` raises
            ``nixlRepostActiveError`` for as long as it runs.
        refuse: how many releases are refused in any state; ``None`` for all until the test sets
            ``FakeTransfer.refuse`` to 0.
        telemetry: ``False`` makes ``get_xfer_telemetry`` raise ``nixlNoTelemetryError``.
    """

    make: Failure | None = None
    post: Failure | Literal["ERR"] | None = None
    waiting: Literal["PROC", "PEND"] = "PROC"
    polls: int | None = 0
    copy: Literal["start", "end", "spread"] = "end"
    piece_bytes: int | None = None
    end: Failure | Literal["DONE", "ERR"] = "DONE"
    copied: float = 1.0
    hold: bool = False
    release: Literal["detach", "cancel", "refuse"] = "detach"
    refuse: int | None = 0
    telemetry: bool = True

    def __post_init__(self) -> None:
        if self.piece_bytes is not None and self.piece_bytes < 1:
            raise ValueError(f"piece_bytes must be at least 1, not {self.piece_bytes}")
        if not 0.0 <= self.copied <= 1.0:
            raise ValueError(f"copied must be a share from 0.0 to 1.0, not {self.copied}")


_AS_NIXL = Plan()


# --- registered memory --------------------------------------------------------------------------


class _Region(NamedTuple):
    address: int
    length: int
    device: int
    mem_type: str


class _RegionIndex:
    """Registered regions of one agent, searchable by address; one may be in it several times."""

    __slots__ = ("_arrays", "_exact", "regions")

    def __init__(self, regions: Iterable[_Region] = ()) -> None:
        self.regions: list[_Region] = []
        self._exact: frozenset[_Region] = frozenset()
        self._arrays: tuple[UInt64Array, UInt64Array, UInt64Array, list[str]] | None = None
        self.add(regions)

    def add(self, regions: Iterable[_Region]) -> None:
        self.regions = sorted([*self.regions, *regions])
        self._exact = frozenset(self.regions)
        self._arrays = None

    def remove(self, regions: Iterable[_Region]) -> None:
        for region in regions:
            self.regions.remove(region)
        self._exact = frozenset(self.regions)
        self._arrays = None

    def find(
        self, start: UInt64Array, size: UInt64Array, device: UInt64Array, mem_type: str
    ) -> Int64Array | None:
        """Return the index of a region that holds each range, ``None`` if a range has none."""
        if not self.regions:
            return None
        if self._arrays is None:
            self._arrays = (
                np.array([r.address for r in self.regions], np.uint64),
                np.array([r.length for r in self.regions], np.uint64),
                np.array([r.device for r in self.regions], np.uint64),
                [r.mem_type for r in self.regions],
            )
        starts, lengths, devices, mem_types = self._arrays
        last = np.searchsorted(starts, start, side="right") - 1
        found = np.maximum(last, 0).astype(np.int64)
        offset = start - starts[found]
        room = lengths[found] - np.minimum(offset, lengths[found])
        held = (last >= 0) & (offset <= lengths[found]) & (size <= room)
        held &= devices[found] == device
        if any(m != mem_type for m in mem_types):
            held &= np.array([m == mem_type for m in mem_types])[found]
        # The last region that starts before a range nearly always holds it. Overlapping
        # registrations, several devices or memory types need the exact search.
        for k in np.flatnonzero(~held).tolist():
            exact = self._search(_Region(int(start[k]), int(size[k]), int(device[k]), mem_type))
            if exact is None:
                return None
            found[k] = exact
        return found

    def _search(self, wanted: _Region) -> int | None:
        for i, region in enumerate(self.regions):
            if (
                region.device == wanted.device
                and region.mem_type == wanted.mem_type
                and region.address <= wanted.address
                and wanted.address + wanted.length <= region.address + region.length
            ):
                return i
        return None

    def hold(self, regions: Iterable[_Region]) -> bool:
        """Tell whether each of the regions still lies in a registered one."""
        return all(r in self._exact or self._search(r) is not None for r in regions)


# --- descriptor lists ---------------------------------------------------------------------------


class nixlXferDList:  # noqa: N801
    """Transfer descriptors of one memory type, rows ``(address, length, device)``."""

    def __init__(self, mem_type: str, rows: UInt64Array) -> None:
        self.mem_type = mem_type
        self.rows = rows

    def descCount(self) -> int:  # noqa: N802
        return len(self.rows)

    def isEmpty(self) -> bool:  # noqa: N802
        return len(self.rows) == 0

    def getType(self) -> str:  # noqa: N802
        return self.mem_type


class nixlRegDList(nixlXferDList):  # noqa: N801
    """Registration descriptors of one memory type, rows ``(address, length, device)``."""


_MEM_TYPES = {
    "DRAM": "DRAM",
    "VRAM": "VRAM",
    "FILE": "FILE",
    "BLOCK": "BLOCK",
    "OBJ": "OBJ",
    "cpu": "DRAM",
    "cuda": "VRAM",
}


def _rows_of_tuples(descs: Sequence[Any], width: int) -> UInt64Array:
    if any(len(d) != width for d in descs):
        raise ValueError(f"Each descriptor tuple must have exactly {width} elements")
    numbers = [d[:3] for d in descs]
    if not all(isinstance(v, (int, np.integer)) and v >= 0 for d in numbers for v in d):
        raise RuntimeError("Unable to cast Python instance to C++ type")
    return np.array(numbers, np.uint64).reshape(-1, 3)


def _rows_of_array(descs: npt.NDArray[Any], width: int) -> UInt64Array:
    if descs.dtype not in (np.dtype(np.uint64), np.dtype(np.int64)):
        raise ValueError(f"descs must be a Nx{width} numpy array of uint64 or int64")
    if not descs.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")
    return descs.astype(np.uint64)


def _rows_of_tensor(tensor: Any) -> tuple[UInt64Array, str] | None:
    """Duck-typed torch tensor to one row and its memory type; ``None`` if it has gaps."""
    if not tensor.is_contiguous():
        return None
    device = tensor.get_device()
    row = (tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(device, 0))
    return np.array([row], np.uint64), "DRAM" if device == -1 else "VRAM"


def _indices(values: Any) -> Int32Array:
    """Convert indices as NIXL does: arrays are narrowed silently, lists are not."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise ValueError("indices numpy array must be 1D")
        if values.dtype == np.int32:
            return values
        return values.astype(np.int64).astype(np.int32)
    try:
        listed = list(values)
    except TypeError:
        raise RuntimeError("Unable to cast Python instance to C++ type") from None
    if not all(isinstance(v, (int, np.integer)) and -(2**31) <= int(v) < 2**31 for v in listed):
        raise RuntimeError("Unable to cast Python instance to C++ type")
    return np.array(listed, np.int32)


class _Side:
    """A prepared list: one descriptor per element, each inside one registered region."""

    __slots__ = ("_runs", "address", "length", "owner", "region", "regions", "released")

    def __init__(
        self,
        owner: _Remote | None,
        address: UInt64Array,
        length: UInt64Array,
        region: Int64Array,
        regions: tuple[_Region, ...],
        runs: Int64Array | None,
    ) -> None:
        self.owner = owner  # the remote agent as it was known then; None for the local side
        self.address = address
        self.length = length
        self.region = region  # index into regions, per descriptor
        self.regions = regions
        self.released = False
        self._runs = runs

    @property
    def runs(self) -> Int64Array:
        """The number of the arithmetic run of each descriptor; NIXL merges only inside a run."""
        if self._runs is None:
            self._runs = self._compress()
        return self._runs

    def _compress(self) -> Int64Array:
        """Cut the list greedily into equally spaced runs, as NIXL stores plain lists."""
        n = len(self.address)
        gaps = np.diff(self.address)
        same = (np.diff(self.length) == 0) & (np.diff(self.region) == 0)
        same &= self.address[1:] > self.address[:-1]
        same &= self.length[1:] > 0
        # breaks[i]: descriptor i+2 does not continue the step from i to i+1
        breaks = np.flatnonzero((gaps[1:] != gaps[:-1]) | ~same[1:])
        starts = [0]
        start = 0
        while start < n:
            if start + 1 < n and same[start]:
                k = int(np.searchsorted(breaks, start))
                start = int(breaks[k]) + 2 if k < len(breaks) else n
            else:
                start += 1
            starts.append(start)
        return np.repeat(np.arange(len(starts) - 1), np.diff(starts)).astype(np.int64)


class _Remote:
    """What one agent knows of another since it added its metadata."""

    __slots__ = ("incarnation", "index", "name")

    def __init__(self, name: str, incarnation: int, index: _RegionIndex) -> None:
        self.name = name
        self.incarnation = incarnation
        self.index = index


class nixl_prepped_dlist_handle:  # noqa: N801
    """Handle of a prepared list, from ``prep_xfer_dlist``."""

    __slots__ = ("_agent", "_released", "_side")

    def __init__(self, agent: FakeAgent, side: _Side) -> None:
        self._agent = agent
        self._side = side
        self._released = False

    def __repr__(self) -> str:
        return f"nixl_prepped_dlist_handle(0x{id(self._side):x}, released={self._released})"

    def release(self) -> None:
        if not self._released:
            self._agent._release_side(self._side)
            self._released = True


class nixl_xfer_handle:  # noqa: N801
    """Handle of a transfer; `transfer` is what the test steers."""

    __slots__ = ("_agent", "_released", "transfer")

    def __init__(self, agent: FakeAgent, transfer: FakeTransfer) -> None:
        self._agent = agent
        self.transfer = transfer
        self._released = False

    def __repr__(self) -> str:
        return f"nixl_xfer_handle({self.transfer.id}, released={self._released})"

    def release(self) -> None:
        if not self._released:
            self._agent._release_transfer(self.transfer)
            self._released = True


@dataclass(frozen=True, slots=True)
class nixlXferTelemetry:  # noqa: N801
    """Times in microseconds (here: counts of fabric events), bytes, descriptors after merging."""

    startTime: int  # noqa: N815
    postDuration: int  # noqa: N815
    xferDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


# --- transfers ----------------------------------------------------------------------------------


class FakeTransfer:
    """One transfer, as the test sees and steers it.

    Attributes:
        id: counts up over the fabric's life.
        agent: the agent that made it.
        remote: name of the other agent.
        operation: ``"READ"`` or ``"WRITE"``.
        source, destination: uint64 addresses per descriptor.
        lengths: uint64 bytes per descriptor.
        total_bytes: their sum.
        notif_msg: rides on the transfer; ``None`` for none.
        plan: what happens to it; may be replaced before it is posted.
        state: ``"IDLE"``, ``"PROC"``, ``"DONE"`` or ``"ERR"``.
        error: what the state check raises in ``"ERR"``; ``None`` returns ``"ERR"``.
        hold: neither polls nor `FakeFabric.progress` move it.
        refuse: how many more releases are refused; ``None`` for all.
        released: the handle was released.
    """

    __slots__ = (
        "_checked",
        "_ended",
        "_merged",
        "_peer",
        "_pieces",
        "_pieces_total",
        "_polls_left",
        "_started",
        "_used",
        "agent",
        "destination",
        "error",
        "hold",
        "id",
        "lengths",
        "notif_msg",
        "operation",
        "plan",
        "refuse",
        "released",
        "remote",
        "source",
        "state",
        "total_bytes",
    )

    def __init__(
        self,
        agent: FakeAgent,
        peer: _Remote,
        operation: Operation,
        sides: tuple[UInt64Array, UInt64Array, UInt64Array],
        used: tuple[tuple[_Region, ...], tuple[_Region, ...]],
        merged: Callable[[], int],
        notif_msg: bytes | None,
    ) -> None:
        local, remote, self.lengths = sides
        self.id = agent._fabric._next_id()
        self.agent = agent
        self.remote = peer.name
        self.operation = operation
        self.destination, self.source = (local, remote) if operation == "READ" else (remote, local)
        self.total_bytes = int(self.lengths.sum())
        self.notif_msg = notif_msg
        self.plan = _AS_NIXL
        self.state: Literal["IDLE", "PROC", "DONE", "ERR"] = "IDLE"
        self.error: Exception | None = None
        self.hold = False
        self.refuse: int | None = 0
        self.released = False
        self._peer = peer
        self._used = used
        self._merged: Callable[[], int] | int = merged
        self._pieces: list[tuple[int, int, int]] | None = None
        self._pieces_total = 0
        self._polls_left: int | None = 0
        self._checked = (-1, -1)
        self._started = self._ended = 0

    def __repr__(self) -> str:
        return (
            f"<FakeTransfer {self.id} {self.agent.name} {self.operation} {self.remote}"
            f" {self.state}{' released' if self.released else ''}>"
        )

    @property
    def in_flight(self) -> bool:
        """Posted and not over: bytes may still land."""
        return self.state == "PROC"

    @property
    def pieces_left(self) -> int:
        """Pieces that were not copied yet; 0 unless in flight."""
        return len(self._cut_pieces()) if self.in_flight else 0

    def writes(self, address: int, length: int) -> bool:
        """Tell whether it may still write into ``[address, address + length)``."""
        return self.in_flight and _overlaps(self.destination, self.lengths, address, length)

    def reads(self, address: int, length: int) -> bool:
        """Tell whether it may still read from ``[address, address + length)``."""
        return self.in_flight and _overlaps(self.source, self.lengths, address, length)

    def copy(self, pieces: int = 1, *, index: int | None = None) -> int:
        """Copy pieces, the chooser's picks or the one at ``index``; return how many are left."""
        left = self._cut_pieces() if self.in_flight and self._reachable() else []
        for _ in range(min(pieces, len(left))):
            k = self.agent._fabric.choose("piece", len(left)) if index is None else index
            left[k], left[-1] = left[-1], left[k]
            ctypes.memmove(*left.pop())
        return len(left)

    def finish(self) -> None:
        """End it well, whatever its plan says: copy the rest, then send its notification."""
        if self.in_flight and self._reachable():
            self._complete()

    def fail(self, error: Failure | Literal["ERR"] = nixlBackendError) -> None:
        """End it badly; pieces that were not copied never are."""
        if self.in_flight:
            self._set_error(error)

    # NIXL's side: called by FakeAgent and FakeFabric

    def _post(self) -> None:
        plan = self.plan
        self.state = "PROC"
        self.error = None
        self.hold = plan.hold
        self._pieces = None
        self._polls_left = plan.polls
        self._started = self.agent._fabric._next_event()
        self.agent._fabric._in_flight[self.id] = self
        if not self._reachable() or self.hold:
            return
        if plan.copy == "start":
            self._copy_rest()
        if plan.polls == 0:
            self._end()

    def _poll(self) -> None:
        if self.hold or self._polls_left is None or not self._reachable():
            return
        self._polls_left -= 1
        if self._polls_left <= 0:
            self._end()
        elif self.plan.copy == "spread":
            self.copy(-(-self._owed() // (self._polls_left + 1)))

    def _step(self) -> None:
        if self._reachable():
            if self._owed():
                self.copy()
            else:
                self._end()

    def _end(self) -> None:
        if self.plan.end == "DONE":
            self._complete()
            return
        self.copy(self._owed())
        self._set_error(self.plan.end)

    def _owed(self) -> int:
        """Pieces to copy before it ends: all, or up to ``plan.copied`` if it ends badly."""
        left = len(self._cut_pieces())
        if self.plan.end == "DONE":
            return left
        return max(left - int(self._pieces_total * (1.0 - self.plan.copied)), 0)

    def _complete(self) -> None:
        self._copy_rest()
        self._leave("DONE")
        if self.notif_msg is not None and not self.released:
            self.agent._fabric._send(self.agent, self._peer, self.notif_msg)

    def _set_error(self, error: Failure | Literal["ERR"]) -> None:
        if error == "ERR":
            self.error = None
        else:
            assert not isinstance(error, str)
            self.error = error() if isinstance(error, type) else error
        self._leave("ERR")

    def _leave(self, state: Literal["DONE", "ERR"]) -> None:
        self.state = state
        self._pieces = None
        self._ended = self.agent._fabric._next_event()
        self.agent._fabric._in_flight.pop(self.id, None)

    def _reachable(self) -> bool:
        """Fail, and return ``False``, unless both sides' memory is still registered."""
        target = self.agent._fabric._by_incarnation.get(self._peer.incarnation)
        if target is None:
            if not self.hold:
                self._set_error(nixlRemoteDisconnectError)
            return False
        now = (self.agent._generation, target._generation)
        if now == self._checked:
            return True
        local, remote = self._used
        if not (self.agent._memory.hold(local) and target._memory.hold(remote)):
            self._set_error(nixlBackendError("memory of the transfer was deregistered"))
            return False
        self._checked = now
        return True

    def _cut_pieces(self) -> list[tuple[int, int, int]]:
        if self._pieces is None:
            whole = zip(
                self.destination.tolist(),
                self.source.tolist(),
                self.lengths.tolist(),
                strict=True,
            )
            limit = self.plan.piece_bytes
            if limit is None:
                self._pieces = list(whole)
            else:
                self._pieces = [
                    (dst + at, src + at, min(limit, length - at))
                    for dst, src, length in whole
                    for at in range(0, length, limit)
                ]
            self._pieces_total = len(self._pieces)
        return self._pieces

    def _copy_rest(self) -> None:
        if self._pieces is None:
            _copy(self.destination, self.source, self.lengths)
            self._pieces = []
        else:
            for piece in self._pieces:
                ctypes.memmove(*piece)
            self._pieces.clear()

    def _desc_count(self) -> int:
        if not isinstance(self._merged, int):
            self._merged = self._merged()
        return self._merged


def _overlaps(starts: UInt64Array, lengths: UInt64Array, address: int, length: int) -> bool:
    """Tell whether one of the ranges shares a byte with ``[address, address + length)``."""
    if length <= 0:
        return False
    last = np.uint64(address + length - 1)
    return bool(np.any((lengths > 0) & (starts <= last) & (starts + lengths > np.uint64(address))))


def _copy(destination: UInt64Array, source: UInt64Array, lengths: UInt64Array) -> None:
    """Copy all descriptors, neighbours on both sides in one piece."""
    if len(lengths) == 1:
        ctypes.memmove(int(destination[0]), int(source[0]), int(lengths[0]))
        return
    apart = destination[1:] != destination[:-1] + lengths[:-1]
    apart |= source[1:] != source[:-1] + lengths[:-1]
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    sizes = np.add.reduceat(lengths, first)
    memmove = ctypes.memmove
    for piece in zip(
        destination[first].tolist(), source[first].tolist(), sizes.tolist(), strict=True
    ):
        memmove(*piece)


# --- notifications ------------------------------------------------------------------------------


class FakeNotice:
    """A notification on its way, or one that a rule looks at.

    Attributes:
        source, target: names of the agents.
        message: the bytes.
    """

    __slots__ = ("_fabric", "_incarnation", "message", "source", "target")

    def __init__(
        self, fabric: FakeFabric, source: str, target: str, incarnation: int, message: bytes
    ) -> None:
        self._fabric = fabric
        self._incarnation = incarnation
        self.source = source
        self.target = target
        self.message = message

    def __repr__(self) -> str:
        return f"<FakeNotice {self.source}->{self.target} {self.message!r}>"

    def deliver(self, copies: int = 1) -> None:
        """Let it arrive ``copies`` times; 0 loses it. A held one leaves ``FakeFabric.notices``."""
        if self in self._fabric.notices:
            self._fabric.notices.remove(self)
        target = self._fabric._by_incarnation.get(self._incarnation)
        if target is not None:
            for _ in range(copies):
                target._inbox.append((self.source, self.message))

    def drop(self) -> None:
        """Lose it."""
        self.deliver(copies=0)


# --- the network --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Script:
    """A fault for the next ``left`` events that match; ``None`` matches everything, or always."""

    what: Any
    operation: str | None
    agent: str | None
    remote: str | None
    left: int | None

    def take(self, operation: str, agent: str, remote: str | None) -> bool:
        if (
            self.left == 0
            or (self.operation is not None and self.operation != operation)
            or (self.agent is not None and self.agent != agent)
            or (self.remote is not None and self.remote != remote)
        ):
            return False
        if self.left is not None:
            self.left -= 1
        return True


def _take(scripts: list[_Script], operation: str, agent: str, remote: str | None) -> Any:
    for script in scripts:
        if script.take(operation, agent, remote):
            if script.left == 0:
                scripts.remove(script)
            return script.what
    return None


class FakeFabric:
    """The network between `FakeAgent` objects, and the test's controls of it.

    Args:
        seed: of the default chooser.
        chooser: called as ``chooser(label, n)``, returns the choice in ``range(n)``; for hypothesis
            ``lambda label, n: data.draw(st.integers(0, n - 1), label=label)``.
        plan: of a transfer that no script and no rule cares about.

    Attributes:
        plan: see above; may be replaced at any time.
        rule: called with each new `FakeTransfer`; returns its `Plan`, or ``None`` for ``plan``.
        notice_fate: of a notification that no script and no rule cares about.
        notice_rule: called with each `FakeNotice`; returns its fate, or ``None``.
        agents: living agents by name.
        notices: notifications that are held.
        violations: sentences about calls whose effect NIXL leaves undefined.
        log: the last calls ``(agent, call, peer)``, without state checks and notification polls.
    """

    def __init__(
        self, seed: int = 0, *, chooser: Chooser | None = None, plan: Plan | None = None
    ) -> None:
        rng = random.Random(seed)
        self._chooser: Chooser = chooser or (lambda _label, n: rng.randrange(n))
        self.plan = plan or _AS_NIXL
        self.rule: Callable[[FakeTransfer], Plan | None] | None = None
        self.notice_fate: NoticeFate = "deliver"
        self.notice_rule: Callable[[FakeNotice], NoticeFate | None] | None = None
        self.agents: dict[str, FakeAgent] = {}
        self.notices: list[FakeNotice] = []
        self.violations: list[str] = []
        self.log: deque[tuple[str, str, str | None]] = deque(maxlen=_LOG_LENGTH)
        self._by_incarnation: dict[int, FakeAgent] = {}
        self._in_flight: dict[int, FakeTransfer] = {}
        self._plans: list[_Script] = []
        self._fates: list[_Script] = []
        self._failures: list[_Script] = []
        self._incarnations = 0
        self._ids = 0
        self._events = 0

    # agents

    def agent(self, name: str, *, capture_telemetry: bool = True) -> FakeAgent:
        """Start an agent. `ValueError` if one of that name lives."""
        if name in self.agents:
            raise ValueError(f"agent {name!r} lives; kill or restart it")
        self._incarnations += 1
        agent = FakeAgent(self, name, self._incarnations, capture_telemetry=capture_telemetry)
        self.agents[name] = agent
        self._by_incarnation[agent.incarnation] = agent
        return agent

    def kill(self, name: str, *, in_flight: Literal["fail", "hang"] = "fail") -> None:
        """End an agent as SIGKILL does. Its memory is not touched any more.

        Its own transfers stop. Transfers of others with it fail with
        ``nixlRemoteDisconnectError``, or stay ``"PROC"`` (until `settle`) with ``"hang"``. Later
        posts and notifications to it raise ``nixlRemoteDisconnectError``.
        """
        dead = self.agents.pop(name)
        del self._by_incarnation[dead.incarnation]
        dead.alive = False
        for transfer in self.transfers:
            if transfer.agent is dead:
                transfer._set_error(nixlCancelledError)
            elif transfer._peer.incarnation == dead.incarnation:
                if in_flight == "hang":
                    transfer.hold = True
                else:
                    transfer._set_error(nixlRemoteDisconnectError)
        for notice in [n for n in self.notices if n._incarnation == dead.incarnation]:
            notice.drop()
        dead._forget()

    def restart(self, name: str, *, in_flight: Literal["fail", "hang"] = "fail") -> FakeAgent:
        """Kill the agent if it lives, then start another incarnation of the same name."""
        capture = True
        if name in self.agents:
            capture = self.agents[name].capture_telemetry
            self.kill(name, in_flight=in_flight)
        return self.agent(name, capture_telemetry=capture)

    # faults

    def script(
        self,
        plan: Plan,
        *,
        agent: str | None = None,
        remote: str | None = None,
        operation: Operation | None = None,
        times: int | None = 1,
    ) -> None:
        """Give ``plan`` to the next ``times`` matching transfers (``None``: until `clear`)."""
        self._plans.append(_Script(plan, operation, agent, remote, times))

    def script_notice(
        self,
        fate: NoticeFate,
        *,
        source: str | None = None,
        target: str | None = None,
        times: int | None = 1,
    ) -> None:
        """Give ``fate`` to the next ``times`` matching notifications (``None``: until `clear`)."""
        self._fates.append(_Script(fate, None, source, target, times))

    def fail(
        self,
        operation: str,
        error: Failure = nixlBackendError,
        *,
        agent: str | None = None,
        remote: str | None = None,
        times: int | None = 1,
    ) -> None:
        """Make the next ``times`` calls of the method ``operation`` raise (``None``: all).

        ``remote`` matches calls that name a peer: those with a remote agent's name, and those on
        transfers. ``"release_xfer_handle"`` and ``"release_dlist_handle"`` include ``release()``
        of the handles.
        """
        if operation.startswith("_") or not callable(getattr(FakeAgent, operation, None)):
            raise ValueError(f"FakeAgent has no call {operation!r}")
        self._failures.append(_Script(error, operation, agent, remote, times))

    def any_plan(self, transfer: FakeTransfer) -> Plan:
        """Let the chooser pick a plan: ``fabric.rule = fabric.any_plan``. Choice 0 is harmless."""
        del transfer
        return Plan(
            make=self._pick("make", (None, None, None, None, nixlBackendError)),
            post=self._pick("post", (None, None, None, nixlRemoteDisconnectError, "ERR")),
            polls=self._pick("polls", (0, 1, 3, None)),
            copy=self._pick("copy", ("end", "start", "spread")),
            piece_bytes=self._pick("piece", (None, 4)),
            end=self._pick("end", ("DONE", "DONE", "DONE", nixlBackendError, "ERR")),
            copied=self._pick("copied", (1.0, 0.5, 0.0)),
            release=self._pick("release", ("detach", "refuse", "cancel")),
            refuse=self._pick("refuse", (0, 0, 1, 3)),
            telemetry=self._pick("telemetry", (True, False)),
        )

    def any_fate(self, notice: FakeNotice) -> NoticeFate:
        """Let the chooser pick: ``fabric.notice_rule = fabric.any_fate``. Choice 0 delivers."""
        del notice
        fate: NoticeFate = self._pick("fate", ("deliver", "hold", "duplicate", "lose"))
        return fate

    def clear(self) -> None:
        """Forget all scripts and failures; `rule`, `plan` and what is in flight stay."""
        self._plans.clear()
        self._fates.clear()
        self._failures.clear()

    # time

    @property
    def transfers(self) -> list[FakeTransfer]:
        """Transfers in flight, in the order of posting, also those whose handle was released."""
        return list(self._in_flight.values())

    def choose(self, label: str, n: int) -> int:
        """Return the chooser's pick from ``range(n)``."""
        return self._chooser(label, n) if n > 1 else 0

    def progress(self, steps: int = 1) -> int:
        """Make up to ``steps`` random steps; return how many transfers and notices can move on.

        A step copies one piece of a transfer, or ends one whose pieces are all copied, or delivers
        one held notification. Transfers with ``hold`` are left alone.
        """
        for _ in range(steps):
            movable = [t for t in self._in_flight.values() if not t.hold]
            n = len(movable) + len(self.notices)
            if n == 0:
                break
            k = self.choose("step", n)
            if k < len(movable):
                movable[k]._step()
            else:
                self.notices[k - len(movable)].deliver()
        return sum(not t.hold for t in self._in_flight.values()) + len(self.notices)

    def settle(self) -> None:
        """End all transfers as planned, held ones too, deliver all notices, allow all releases."""
        for transfer in self.transfers:
            transfer.hold = False
            if transfer._reachable():
                transfer._end()
        for notice in list(self.notices):
            notice.deliver()
        for agent in self.agents.values():
            for transfer in agent._transfers:
                transfer.refuse = 0

    # observation

    def writers(self, address: int, length: int) -> list[FakeTransfer]:
        """Return the transfers that may still write into ``[address, address + length)``."""
        return [t for t in self._in_flight.values() if t.writes(address, length)]

    def readers(self, address: int, length: int) -> list[FakeTransfer]:
        """Return the transfers that may still read from ``[address, address + length)``."""
        return [t for t in self._in_flight.values() if t.reads(address, length)]

    def assert_clean(self, *agents: str) -> None:
        """Raise `AssertionError` with everything that living agents (or these) still hold.

        Violations and transfers in flight count whatever agents are named.
        """
        found = list(self.violations)
        found += [f"in flight: {t!r}" for t in self.transfers]
        for name in agents or self.agents:
            agent = self.agents[name]
            found += [f"transfer handle not released: {t!r}" for t in agent._transfers]
            if agent.live_lists:
                found.append(f"{name}: {agent.live_lists} prepared lists not released")
            if agent.registrations:
                found.append(f"{name}: {agent.registrations} registrations left")
            if agent.remote_agents:
                found.append(f"{name}: remote agents not removed: {agent.remote_agents}")
        if found:
            raise AssertionError("; ".join(found))

    # the agents' side

    def _pick(self, label: str, options: Sequence[Any]) -> Any:
        return options[self.choose(label, len(options))]

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _next_event(self) -> int:
        self._events += 1
        return self._events

    def _plan_of(self, transfer: FakeTransfer) -> Plan:
        plan: Plan | None = None
        if self._plans:
            plan = _take(self._plans, transfer.operation, transfer.agent.name, transfer.remote)
        if plan is None and self.rule is not None:
            plan = self.rule(transfer)
        return plan or self.plan

    def _send(self, source: FakeAgent, peer: _Remote, message: bytes) -> None:
        notice = FakeNotice(self, source.name, peer.name, peer.incarnation, message)
        fate: NoticeFate | None = None
        if self._fates:
            fate = _take(self._fates, "", source.name, peer.name)
        if fate is None and self.notice_rule is not None:
            fate = self.notice_rule(notice)
        fate = fate or self.notice_fate
        if fate == "hold":
            self.notices.append(notice)
        else:
            notice.deliver({"deliver": 1, "lose": 0, "duplicate": 2}[fate])


# --- the agent ----------------------------------------------------------------------------------


class FakeAgent:
    """NIXL's ``nixl_agent``, call by call, on a `FakeFabric` (which makes it: `FakeFabric.agent`).

    Attributes:
        name: the agent's name.
        incarnation: a number of its own for every agent that the fabric ever started.
        alive: ``False`` once killed; every call then raises, except releases.
        calls: how often each call was made, by name.
        capture_telemetry: as in ``nixl_agent_config``.
        release_is_final: ``False``, as for NIXL: bytes may land after a release that succeeded.
    """

    release_is_final = False

    def __init__(
        self, fabric: FakeFabric, name: str, incarnation: int, *, capture_telemetry: bool
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.calls: Counter[str] = Counter()
        self.capture_telemetry = capture_telemetry
        self.backends: dict[str, int] = {"UCX": 1}
        self.notifs: dict[str, list[bytes]] = {}
        self._fabric = fabric
        self._memory = _RegionIndex()
        self._generation = 0  # counts changes of the registered memory
        self._remotes: dict[str, _Remote] = {}
        self._self_remote = _Remote(name, incarnation, self._memory)
        self._sides: set[_Side] = set()
        self._transfers: dict[FakeTransfer, None] = {}
        self._inbox: list[tuple[str, bytes]] = []

    def __repr__(self) -> str:
        return f"<FakeAgent {self.name!r} incarnation {self.incarnation}>"

    # counters for leak checks

    @property
    def live_transfers(self) -> int:
        """Transfer handles that were made and not released."""
        return len(self._transfers)

    @property
    def live_lists(self) -> int:
        """Prepared lists that were made and not released."""
        return len(self._sides)

    @property
    def registrations(self) -> int:
        """Registered memory regions."""
        return len(self._memory.regions)

    @property
    def remote_agents(self) -> tuple[str, ...]:
        """Names of the remote agents that are known."""
        return tuple(self._remotes)

    # memory

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        if isinstance(descs, nixlRegDList):
            logger.error("a registration list is no transfer list")
            return None
        if isinstance(descs, nixlXferDList):
            return descs
        rows = _rows(descs, mem_type, 3)
        return None if rows is None else nixlXferDList(rows[1], rows[0])

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        if isinstance(descs, nixlRegDList):
            return descs
        if isinstance(descs, nixlXferDList):
            logger.error("a transfer list is no registration list")
            return None
        rows = _rows(descs, mem_type, 4)
        return None if rows is None else nixlRegDList(rows[1], rows[0])

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixlRegDList:
        self._enter("register_memory")
        descs = self.get_reg_descs(reg_list, mem_type)
        self._check_backends(backends)
        if descs is None:
            raise TypeError("registerMem(): incompatible function arguments")
        if bool(np.any((descs.rows[:, 0] == 0) & (descs.rows[:, 1] > 0))):
            raise nixlBackendError
        self._memory.add(_regions(descs))
        self._generation += 1
        return descs

    def deregister_memory(self, dereg_list: Any, backends: Sequence[str] = ()) -> None:
        self._enter("deregister_memory")
        self._check_backends(backends)
        if not isinstance(dereg_list, nixlRegDList):
            raise TypeError("deregisterMem(): incompatible function arguments")
        regions = _regions(dereg_list)
        missing = Counter(regions) - Counter(self._memory.regions)
        if missing:
            raise nixlNotFoundError
        self._memory.remove(regions)
        self._generation += 1
        for transfer in self._fabric.transfers:
            if transfer.agent is self and not self._memory.hold(transfer._used[0]):
                self._fabric.violations.append(
                    f"{self.name} deregistered memory of its own {transfer!r}"
                )
                transfer._set_error(nixlBackendError)

    # peers

    def get_agent_metadata(self) -> bytes:
        self._enter("get_agent_metadata")
        fields = [self.name, self.incarnation, self._memory.regions]
        return _METADATA_TAG + json.dumps(fields).encode()

    def add_remote_agent(self, metadata: bytes | str) -> bytes:
        self._enter("add_remote_agent")
        blob = metadata.encode() if isinstance(metadata, str) else metadata
        if not blob.startswith(_METADATA_TAG):
            raise nixlMismatchError
        try:
            name, incarnation, listed = json.loads(blob.removeprefix(_METADATA_TAG))
            regions = {_Region(int(at), int(n), int(dev), str(mem)) for at, n, dev, mem in listed}
        except (ValueError, TypeError):
            raise nixlNotFoundError from None
        if name == self.name:
            raise nixlInvalidParamError
        known = self._remotes.get(name)
        if known is not None and known.incarnation != incarnation:
            raise nixlNotAllowedError
        if known is None:
            known = self._remotes[name] = _Remote(name, incarnation, _RegionIndex())
        # NIXL only ever adds: memory that left the metadata stays known until the peer is removed.
        known.index.add(regions.difference(known.index.regions))
        return str(name).encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        name = _text(agent)
        self._enter("remove_remote_agent", name)
        self._remotes.pop(name, None)

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        name = _text(agent)
        self._enter("check_remote_metadata", name)
        remote = self._lookup(name)
        if remote is None:
            return False
        if descs is None or len(descs.rows) == 0:
            return True
        address, length, device = _columns(descs.rows)
        return remote.index.find(address, length, device, descs.mem_type) is not None

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        name = _text(remote_agent)
        self._enter("make_connection", name)
        self._check_backends(backends)
        self._target(self._remotes.get(name))

    # prepared lists

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        name = _text(agent_name)
        local = name in ("", "NIXL_INIT_AGENT")
        self._enter("prep_xfer_dlist", None if local else name)
        self._check_backends(backends)
        strided = isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2
        if strided and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("Please specify a mem type for strided descriptors")
            rows, kind = _rows_of_array(xfer_list, 5), _MEM_TYPES[mem_type]
        else:
            descs = self.get_xfer_descs(xfer_list, mem_type)
            if descs is None:
                raise TypeError("prepXferDlist(): incompatible function arguments")
            rows, kind = descs.rows, descs.mem_type
        side = self._side(None if local else self._lookup_or_raise(name), rows, kind)
        self._sides.add(side)
        return nixl_prepped_dlist_handle(self, side)

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # transfers

    def make_prepped_xfer(
        self,
        operation: Operation,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        if operation not in ("READ", "WRITE"):
            raise KeyError(operation)
        local, remote = local_xfer_side._side, remote_xfer_side._side
        self._enter("make_prepped_xfer", None if remote.owner is None else remote.owner.name)
        self._check_backends(backends)
        li, ri = _indices(local_indices), _indices(remote_indices)
        for side in (local, remote):
            if side.released:
                self._violation("used a prepared list that was released")
                raise nixlInvalidParamError
            if side not in self._sides:
                self._violation("used a prepared list of another agent")
                raise nixlInvalidParamError
        if local.owner is not None or remote.owner is None:
            raise nixlInvalidParamError
        if self._lookup(remote.owner.name) is not remote.owner:
            raise nixlNotFoundError
        if len(li) == 0 or len(li) != len(ri):
            raise nixlInvalidParamError
        for side, index in ((local, li), (remote, ri)):
            if int(index.view(np.uint32).max()) >= len(side.address):  # negative ones look huge
                raise nixlInvalidParamError
        lengths = local.length[li]
        if bool(np.any(lengths != remote.length[ri])):
            raise nixlInvalidParamError
        addresses = (local.address[li], remote.address[ri])
        return self._make(
            operation,
            remote.owner,
            (*addresses, lengths),
            (_used(local, li), _used(remote, ri)),
            lambda: len(li) if skip_desc_merge else _merged(local, li, remote, ri),
            notif_msg,
        )

    def initialize_xfer(
        self,
        operation: Operation,
        local_descs: nixlXferDList | None,
        remote_descs: nixlXferDList | None,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        if operation not in ("READ", "WRITE"):
            raise KeyError(operation)
        name = _text(remote_agent)
        self._enter("initialize_xfer", name)
        self._check_backends(backends)
        if local_descs is None or remote_descs is None:
            raise TypeError("createXferReq(): incompatible function arguments")
        peer = self._lookup_or_raise(name)
        count = local_descs.descCount()
        if count != remote_descs.descCount() or bool(
            np.any(local_descs.rows[:, 1] != remote_descs.rows[:, 1])
        ):
            raise nixlInvalidParamError
        local = self._side(None, local_descs.rows, local_descs.mem_type)
        remote = self._side(peer, remote_descs.rows, remote_descs.mem_type)
        every = np.arange(count)
        return self._make(
            operation,
            peer,
            (local.address, remote.address, local.length),
            (_used(local, every), _used(remote, every)),
            lambda: count,
            notif_msg,
        )

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        transfer = handle.transfer
        self._enter("transfer", transfer.remote)
        self._check_handle(transfer)
        if transfer.state == "PROC":
            raise nixlRepostActiveError
        self._check_peer(transfer)
        if notif_msg:
            transfer.notif_msg = _bytes(notif_msg)
        failure = transfer.plan.post
        if failure is None and transfer._peer.incarnation not in self._fabric._by_incarnation:
            failure = nixlRemoteDisconnectError
        if failure is not None:
            transfer._set_error(failure)
        else:
            transfer._post()
        return self._answer(transfer)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        transfer = handle.transfer
        self._enter("check_xfer_state", transfer.remote)
        self._check_handle(transfer)
        if transfer.state == "IDLE":
            raise nixlNotPostedError
        if transfer.state == "PROC":
            self._check_peer(transfer)
            transfer._poll()
        return self._answer(transfer)

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        transfer = handle.transfer
        self._enter("get_xfer_telemetry", transfer.remote)
        self._check_handle(transfer)
        if not (self.capture_telemetry and transfer.plan.telemetry):
            raise nixlNoTelemetryError
        if transfer.state == "IDLE":
            raise nixlNotPostedError
        started = transfer._started
        took = max(transfer._ended - started, 1)
        return nixlXferTelemetry(started, 1, took, transfer.total_bytes, transfer._desc_count())

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        self._enter("query_xfer_backend", handle.transfer.remote)
        self._check_handle(handle.transfer)
        return "UCX"

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        self._enter("estimate_xfer_cost", req_handle.transfer.remote)
        self._check_handle(req_handle.transfer)
        return 0, 0, "UNKNOWN"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    # notifications

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None
    ) -> None:
        name = _text(remote_agent_name)
        self._enter("send_notif", name)
        self._check_backends(() if backend is None else (backend,))
        remote = self._target(self._lookup(name))
        self._fabric._send(self, remote, _bytes(notif_msg))

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        self._enter("get_new_notifs")
        self._check_backends(backends)
        found: dict[str, list[bytes]] = {}
        if self._inbox:
            for source, message in self._inbox:
                found.setdefault(source, []).append(message)
            self._inbox.clear()
        return found

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        for source, messages in self.get_new_notifs(backends).items():
            self.notifs.setdefault(source, []).extend(messages)
        return self.notifs

    # inside

    def _enter(self, operation: str, peer: str | None = None) -> None:
        """Count and log a call; raise what the test scripted for it."""
        self.calls[operation] += 1
        fabric = self._fabric
        if operation not in ("check_xfer_state", "get_new_notifs"):
            fabric.log.append((self.name, operation, peer))
        if not self.alive:
            raise nixlBackendError(f"agent {self.name!r} was killed")
        if fabric._failures:
            failure = _take(fabric._failures, operation, self.name, peer)
            if failure is not None:
                raise failure

    def _violation(self, what: str) -> None:
        self._fabric.violations.append(f"{self.name} {what}")

    def _check_backends(self, backends: Sequence[str]) -> None:
        for backend in backends:
            if backend not in self.backends:
                raise KeyError(backend)

    def _check_handle(self, transfer: FakeTransfer) -> None:
        if transfer.released:
            self._violation(f"used the released handle of {transfer!r}")
            raise nixlInvalidParamError

    def _check_peer(self, transfer: FakeTransfer) -> None:
        if self._lookup(transfer.remote) is not transfer._peer:
            raise nixlNotFoundError

    def _lookup(self, name: str) -> _Remote | None:
        return self._self_remote if name == self.name else self._remotes.get(name)

    def _lookup_or_raise(self, name: str) -> _Remote:
        remote = self._lookup(name)
        if remote is None:
            raise nixlNotFoundError
        return remote

    def _target(self, remote: _Remote | None) -> _Remote:
        if remote is None:
            raise nixlNotFoundError
        if remote.incarnation not in self._fabric._by_incarnation:
            raise nixlRemoteDisconnectError
        return remote

    def _side(self, owner: _Remote | None, rows: UInt64Array, mem_type: str) -> _Side:
        """Check descriptor rows, Nx3 or strided Nx5, against the registered memory."""
        index = self._memory if owner is None else owner.index
        if len(rows) == 0:
            raise nixlNotFoundError
        address, length, device = _columns(rows)
        if rows.shape[1] == 3:
            region = index.find(address, length, device, mem_type)
            if region is None:
                raise nixlNotFoundError
            runs = None
        else:
            spans = [_span(*row) for row in rows[:, [1, 3, 4]].tolist()]
            if not all(0 < span < 2**64 for span in spans):
                raise nixlNotFoundError
            region = index.find(address, np.array(spans, np.uint64), device, mem_type)
            if region is None:
                raise nixlNotFoundError
            counts = rows[:, 4].astype(np.int64)
            run_of = np.repeat(np.arange(len(rows)), counts)
            nth = np.arange(len(run_of)) - np.repeat(np.cumsum(counts) - counts, counts)
            address = address[run_of] + nth.astype(np.uint64) * rows[run_of, 3]
            length, region, runs = length[run_of], region[run_of], run_of
        regions = index.regions
        used, region = np.unique(region, return_inverse=True)
        return _Side(owner, address, length, region, tuple(regions[i] for i in used), runs)

    def _make(
        self,
        operation: Operation,
        peer: _Remote,
        sides: tuple[UInt64Array, UInt64Array, UInt64Array],
        used: tuple[tuple[_Region, ...], tuple[_Region, ...]],
        merged: Callable[[], int],
        notif_msg: bytes | str,
    ) -> nixl_xfer_handle:
        message = _bytes(notif_msg) if notif_msg else None
        transfer = FakeTransfer(self, peer, operation, sides, used, merged, message)
        transfer.plan = self._fabric._plan_of(transfer)
        if transfer.plan.make is not None:
            raise transfer.plan.make
        transfer.refuse = transfer.plan.refuse
        self._transfers[transfer] = None
        return nixl_xfer_handle(self, transfer)

    def _answer(self, transfer: FakeTransfer) -> str:
        if transfer.state == "ERR" and transfer.error is not None:
            raise transfer.error
        return transfer.plan.waiting if transfer.in_flight else transfer.state

    def _release_side(self, side: _Side) -> None:
        if self.alive:
            self._enter("release_dlist_handle", None if side.owner is None else side.owner.name)
        side.released = True
        self._sides.discard(side)

    def _release_transfer(self, transfer: FakeTransfer) -> None:
        if self.alive:
            self._enter("release_xfer_handle", transfer.remote)
            if transfer.refuse is None or transfer.refuse > 0:
                if transfer.refuse is not None:
                    transfer.refuse -= 1
                raise nixlRepostActiveError
            if transfer.in_flight:
                if transfer.plan.release == "refuse":
                    raise nixlRepostActiveError
                if transfer.plan.release == "cancel":
                    transfer._set_error(nixlCancelledError)
        transfer.released = True
        self._transfers.pop(transfer, None)

    def _forget(self) -> None:
        self._memory = _RegionIndex()
        self._generation += 1
        self._remotes.clear()
        self._sides.clear()
        self._transfers.clear()
        self._inbox.clear()


def _rows(descs: Any, mem_type: str | None, width: int) -> tuple[UInt64Array, str] | None:
    """Normalise descriptors; ``None`` where NIXL logs a line and returns ``None``."""
    if hasattr(descs, "data_ptr"):
        return _rows_of_tensor(descs)
    first = descs[0]
    if isinstance(first, tuple):
        if mem_type is None or len(first) != width:
            logger.error("%d-tuples and a memory type are needed", width)
            return None
        return _rows_of_tuples(descs, width), _MEM_TYPES[mem_type]
    if isinstance(descs, np.ndarray):
        if mem_type is None or descs.ndim != 2 or descs.shape[1] != 3:
            logger.error("an Nx3 array and a memory type are needed")
            return None
        return _rows_of_array(descs, 3), _MEM_TYPES[mem_type]
    if hasattr(first, "data_ptr"):
        parts = [_rows_of_tensor(tensor) for tensor in descs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({kind for _, kind in known}) != 1:
            logger.error("contiguous tensors on one device are needed")
            return None
        return np.concatenate([row for row, _ in known]), known[0][1]
    return None


def _columns(rows: UInt64Array) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _regions(descs: nixlRegDList) -> list[_Region]:
    return [
        _Region(address, length, device, descs.mem_type)
        for address, length, device in descs.rows.tolist()
    ]


def _span(length: int, stride: int, count: int) -> int:
    """Return the bytes from the first to the last of a strided row; 0 if NIXL refuses the row."""
    if length == 0 or count == 0 or stride < length:
        return 0
    return stride * (count - 1) + length


def _used(side: _Side, index: npt.NDArray[np.integer[Any]]) -> tuple[_Region, ...]:
    if len(side.regions) == 1:
        return side.regions
    return tuple(side.regions[i] for i in np.unique(side.region[index]).tolist())


def _merged(local: _Side, li: Int32Array, remote: _Side, ri: Int32Array) -> int:
    """Count the descriptors that are left after NIXL merged consecutive neighbours."""
    joined = np.ones(len(li) - 1, bool)
    for side, index in ((local, li), (remote, ri)):
        address, length, runs = side.address[index], side.length[index], side.runs[index]
        joined &= address[1:] == address[:-1] + length[:-1]
        joined &= runs[1:] == runs[:-1]
    return len(li) - int(joined.sum())


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _bytes(message: bytes | str) -> bytes:
    return message.encode() if isinstance(message, str) else bytes(message)
