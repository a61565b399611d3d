"""Block transfers between peers that each expose one contiguous region of equal blocks.

`DataTransport` is the contract of a data plane, `NixlTransport` keeps it over NIXL. A transport
drives everything from its calls: it has no thread, and `NixlTransport.poll` has to be called.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from kvnixl._descs import RegionIndex, paired_desc_ids, strided_descs
from kvnixl.agent import (
    DEFAULT_CLOSE_TIMEOUT_S,
    LOCAL_SIDE,
    Agent,
    Operation,
    PreparedList,
    Registration,
    RemoteAgent,
    Transfer,
    nixl_available,
    wait_until,
)
from kvnixl.errors import AgentError, ClosedError, NixlUnavailableError, TransportError

logger = logging.getLogger(__name__)

CancelMode: TypeAlias = Literal["immediate", "wait"]


class PollResult(NamedTuple):
    """Transfers that ended since the last poll.

    Attributes:
        done: ids whose bytes have all arrived.
        failed: ids that failed or were given up, once none of their bytes can arrive any more.
    """

    done: Sequence[int]
    failed: Sequence[int]


_NOTHING_ENDED = PollResult((), ())


def config_fingerprint(config_fields: Mapping[str, Any] | None) -> str:
    """First 16 hex digits of the SHA-256 of the fields as JSON with sorted keys and no spaces;
    empty when there are none."""
    if not config_fields:
        return ""
    canonical = json.dumps(config_fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class DataTransport(ABC):
    """Moves blocks between this node's region and its peers' regions.

    Args:
        view: writable, C-contiguous, 2-D, bytes: shape ``(blocks, bytes per block)``. It has to
            stay in place until `close` has returned.
        config_fields: what has to be equal on both sides (model, dtype, ...); see
            `config_fingerprint`.
    """

    def __init__(self, view: memoryview, config_fields: Mapping[str, Any] | None = None) -> None:
        _check_view(view)
        assert view.shape is not None
        self._view = view
        self._base_addr = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._num_blocks, self._block_len = view.shape
        self._config_fingerprint = config_fingerprint(config_fields)

    @property
    def base_addr(self) -> int:
        """Address of block 0."""
        return self._base_addr

    @property
    def num_blocks(self) -> int:
        """Blocks in the local region."""
        return self._num_blocks

    @property
    def block_len(self) -> int:
        """Bytes per block."""
        return self._block_len

    @property
    def config_fingerprint(self) -> str:
        """Digest of the configuration; peers with different ones must not exchange blocks."""
        return self._config_fingerprint

    @property
    @abstractmethod
    def available(self) -> bool:
        """Whether transfers are possible here at all."""

    @abstractmethod
    def get_agent_metadata(self) -> bytes:
        """What a peer passes to its `add_remote_peer`."""

    @abstractmethod
    def add_remote_peer(
        self, peer_id: str, agent_metadata: bytes, base_addr: int, num_blocks: int, block_len: int
    ) -> None:
        """Make a peer's region reachable. A known peer is removed first.

        Args:
            peer_id: the caller's name for it.
            agent_metadata: the peer's `get_agent_metadata`.
            base_addr, num_blocks, block_len: the peer's region.

        Raises:
            ValueError: its block length differs from ours, or the region is impossible.
        """

    @abstractmethod
    def remove_remote_peer(self, peer_id: str) -> None:
        """Forget a peer; its transfers fail. Unknown: nothing."""

    @abstractmethod
    def write_blocks(
        self, peer_id: str, local_idxs: Sequence[int], remote_idxs: Sequence[int]
    ) -> int | None:
        """Start writing local blocks into a peer's blocks, pair by pair. Does not block.

        Returns:
            The transfer's id, unique over the transport's life, or None (with one warning) when
            the peer is unknown or the transfer could not be started. One of which only parts could
            be started has an id, and ends as failed.

        Raises:
            ValueError: lists of different length, or an index outside its region.
        """

    @abstractmethod
    def read_blocks(
        self, peer_id: str, local_idxs: Sequence[int], remote_idxs: Sequence[int]
    ) -> int | None:
        """Start reading a peer's blocks into local blocks; otherwise as `write_blocks`."""

    @abstractmethod
    def poll(self, peer_id: str | None = None) -> PollResult:
        """What ended since the last poll (of that peer, if one is given).

        A transfer of which it can never be told whether its bytes have stopped is in neither list
        (NIXL forgets those to a remote agent that somebody else removed from an agent in common).
        The log names it; `cancel` gives it up.
        """

    @abstractmethod
    def cancel(self, ids: Iterable[int], mode: CancelMode = "immediate") -> list[int]:
        """Give transfers up. Unknown ids are ignored.

        Args:
            mode: ``"immediate"``: they never show up again, and nothing tells when their blocks
                are no longer read or written. ``"wait"``: those that cannot be released yet are
                returned and end in a later `poll`; only then their blocks may be reused.

        Returns:
            The ids that are still running; always empty for ``"immediate"``.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel what runs and release everything. Twice is fine; other calls then raise."""


def _check_view(view: memoryview) -> None:
    if not isinstance(view, memoryview):
        raise ValueError(f"view must be a memoryview, not {type(view).__name__}")
    if view.ndim != 2 or view.itemsize != 1:
        raise ValueError(
            f"view must be 2-D of bytes (blocks x bytes), not {view.ndim}-D with items of "
            f"{view.itemsize} bytes; cast it with memoryview.cast('B', (blocks, bytes))"
        )
    if view.readonly or not view.c_contiguous:
        raise ValueError("view must be writable and C-contiguous")
    if view.nbytes == 0:
        raise ValueError(f"view must hold at least one byte, its shape is {view.shape}")


class _Peer(NamedTuple):
    peer_id: str
    remote: RemoteAgent
    prepared: PreparedList
    region: RegionIndex


class _Running:
    """A transfer and whose it is; without blocks there is no NIXL transfer, and it is done."""

    __slots__ = ("cancelled", "given_up", "peer_id", "xfer")

    def __init__(self, peer_id: str, xfer: Transfer | None) -> None:
        self.peer_id = peer_id
        self.xfer = xfer
        # It has to end as failed, whatever NIXL says of it.
        self.given_up = False
        # It may end by being released, too.
        self.cancelled = False

    def over(self) -> bool:
        return self.xfer is None or self.xfer.over()

    def close(self) -> None:
        if self.xfer is not None:
            self.xfer.close()


class NixlTransport(DataTransport):
    """`DataTransport` over NIXL.

    Args:
        agent_name: must differ from every peer's.
        view, config_fields: see `DataTransport`.
        backends: NIXL plugins, default ``["UCX"]``.
        num_threads: UCX worker threads.
        agent: use this agent, any object with the calls of NIXL's ``nixl_agent``, instead of
            opening one. It is not closed here.

    Without NIXL the object can be made, but `available` is False and transfers are refused.

    A transfer that failed or was given up counts as ended only when NIXL says that its bytes have
    stopped, since NIXL may call a running transfer released (see `kvnixl.agent`).
    """

    def __init__(
        self,
        agent_name: str,
        view: memoryview,
        config_fields: Mapping[str, Any] | None = None,
        backends: list[str] | None = None,
        num_threads: int = 4,
        *,
        agent: Any = None,
    ) -> None:
        super().__init__(view, config_fields)
        self._agent_name = agent_name
        region = (self._base_addr, self._block_len, self._block_len, self._num_blocks, 0)
        self._own_region = RegionIndex([region])
        self._closed = False
        self._ids = itertools.count()
        self._running: dict[int, _Running] = {}
        self._peers: dict[str, _Peer] = {}
        # Peers that were removed while a transfer of theirs was in flight.
        self._leaving: list[_Peer] = []
        self._agent: Agent | None = None
        self._registration: Registration | None = None
        self._local: PreparedList | None = None
        self._opened_agent = agent is None
        if agent is not None:
            self._agent = agent if isinstance(agent, Agent) else Agent(agent, name=agent_name)
        elif nixl_available():
            self._agent = Agent.open(
                agent_name, backends=backends or ("UCX",), num_threads=num_threads
            )
        else:
            logger.warning("%s: NIXL is not installed; no transfers are possible", agent_name)
        if self._agent is not None:
            try:
                self._register(self._agent)
            except AgentError:
                self.close()
                raise

    def _register(self, agent: Agent) -> None:
        num_bytes = self._num_blocks * self._block_len
        self._registration = agent.register_memory([(self._base_addr, num_bytes, 0)])
        self._local = agent.prep_xfer_dlist(
            LOCAL_SIDE,
            strided_descs(
                [(self._base_addr, self._block_len, self._block_len, self._num_blocks, 0)]
            ),
        )

    @property
    def available(self) -> bool:
        return self._agent is not None and not self._closed

    @property
    def agent(self) -> Agent:
        """The agent in use.

        Raises:
            ClosedError, NixlUnavailableError: there is none.
        """
        self._check_open("agent")
        if self._agent is None:
            raise NixlUnavailableError(
                f"{self._agent_name}: NIXL is not installed; `pip install nixl`"
            )
        return self._agent

    def get_agent_metadata(self) -> bytes:
        return self.agent.get_agent_metadata()

    # --- peers ---

    def add_remote_peer(
        self, peer_id: str, agent_metadata: bytes, base_addr: int, num_blocks: int, block_len: int
    ) -> None:
        """See `DataTransport.add_remote_peer`.

        Raises:
            ValueError: as there.
            AgentError: NIXL refused the metadata or the region.
            TransportError: the peer is known, and its transfers do not end; poll, then try again.
        """
        agent = self.agent
        if block_len != self._block_len:
            raise ValueError(
                f"peer {peer_id!r} has blocks of {block_len} bytes, ours have {self._block_len}; "
                "both sides need the same"
            )
        region = (base_addr, block_len, block_len, num_blocks, 0)
        descs = strided_descs([region])
        self.remove_remote_peer(peer_id)
        if not wait_until(lambda: self._peer_is_gone(peer_id), DEFAULT_CLOSE_TIMEOUT_S):
            raise TransportError(
                f"peer {peer_id!r} cannot be added again yet: its earlier transfers are still in "
                "flight; poll() until they end, then try again"
            )
        remote = agent.add_remote_agent(agent_metadata, peer=peer_id)
        try:
            prepared = agent.prep_xfer_dlist(remote, descs)
        except AgentError:
            remote.close()
            raise
        self._peers[peer_id] = _Peer(peer_id, remote, prepared, RegionIndex([region]))

    def remove_remote_peer(self, peer_id: str) -> None:
        """See `DataTransport.remove_remote_peer`. The peer's transfers end as failed in `poll`."""
        self._check_open("remove_remote_peer")
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            for running in self._running.values():
                if running.peer_id == peer_id:
                    running.given_up = True
            self._leaving.append(peer)
            self._let_peers_leave()

    def _peer_is_gone(self, peer_id: str) -> bool:
        self._let_peers_leave()
        return all(peer.peer_id != peer_id for peer in self._leaving)

    def _let_peers_leave(self) -> None:
        """Tear down removed peers whose transfers have ended.

        NIXL would report transfers to an invalidated agent as ended while their bytes still land,
        so the agent goes last.
        """
        still_leaving = []
        for peer in self._leaving:
            given_up = [
                running
                for running in self._running.values()
                if running.given_up and running.peer_id == peer.peer_id
            ]
            for running in given_up:
                running.close()
            if all(running.over() for running in given_up) or self.agent.release_is_final:
                peer.prepared.close()
                peer.remote.close()
            else:
                still_leaving.append(peer)
        self._leaving = still_leaving

    # --- transfers ---

    def write_blocks(
        self, peer_id: str, local_idxs: Sequence[int], remote_idxs: Sequence[int]
    ) -> int | None:
        return self._start("WRITE", peer_id, local_idxs, remote_idxs)

    def read_blocks(
        self, peer_id: str, local_idxs: Sequence[int], remote_idxs: Sequence[int]
    ) -> int | None:
        return self._start("READ", peer_id, local_idxs, remote_idxs)

    def _start(
        self,
        operation: Operation,
        peer_id: str,
        local_idxs: Sequence[int],
        remote_idxs: Sequence[int],
    ) -> int | None:
        self._check_open(f"{operation.lower()}_blocks")
        peer = self._peers.get(peer_id)
        if peer is None or self._agent is None or self._local is None:
            logger.warning(
                "%s: %s to %r was not started: %s",
                self._agent_name,
                operation,
                peer_id,
                f"unknown peer (known: {sorted(self._peers)})" if self._agent else "no NIXL",
            )
            return None
        local, remote = self._pair(operation, peer, local_idxs, remote_idxs)
        if len(local) == 0:
            return self._track(peer_id, None)
        xfer: Transfer | None = None
        try:
            xfer = self._agent.make_prepped_xfer(
                operation, self._local, local, peer.prepared, remote
            )
            xfer.post()
        except AgentError as exc:
            logger.warning(
                "%s: %s of %d blocks to peer %r was not started: %s",
                self._agent_name,
                operation,
                len(local),
                peer_id,
                exc,
            )
            if xfer is not None and not xfer.close() and xfer.in_flight:
                # It failed half way: parts of it run, and the caller has to wait for their end.
                transfer_id = self._track(peer_id, xfer)
                self._running[transfer_id].given_up = True
                return transfer_id
            return None
        return self._track(peer_id, xfer)

    def _pair(
        self,
        operation: Operation,
        peer: _Peer,
        local_idxs: Sequence[int],
        remote_idxs: Sequence[int],
    ) -> tuple[Any, Any]:
        """Checked index arrays of both sides, ordered so that NIXL can merge neighbours."""
        try:
            if operation == "WRITE":
                remote, local, _ = paired_desc_ids(
                    peer.region, [remote_idxs], self._own_region, [local_idxs]
                )
            else:
                local, remote, _ = paired_desc_ids(
                    self._own_region, [local_idxs], peer.region, [remote_idxs]
                )
        except (IndexError, TypeError, ValueError) as exc:
            ours, theirs = f"{self._num_blocks} local", f"{peer.region.num_descs} remote"
            source, destination = (ours, theirs) if operation == "WRITE" else (theirs, ours)
            raise ValueError(
                f"{operation} with peer {peer.peer_id!r}: {exc} (the source has {source} blocks, "
                f"the destination {destination} ones)"
            ) from exc
        return local, remote

    def _track(self, peer_id: str, xfer: Transfer | None) -> int:
        transfer_id = next(self._ids)
        self._running[transfer_id] = _Running(peer_id, xfer)
        return transfer_id

    def poll(self, peer_id: str | None = None) -> PollResult:
        self._check_open("poll")
        agent = self._agent
        if agent is None or not (self._running or self._leaving or agent._quarantine):
            return _NOTHING_ENDED
        if agent._quarantine:
            agent.retry_releases()
        if self._leaving:
            self._let_peers_leave()
        done: list[int] | None = None
        failed: list[int] | None = None
        for transfer_id, running in self._running.items():
            if peer_id is not None and running.peer_id != peer_id:
                continue
            state = self._state_of(transfer_id, running)
            if state == "DONE":
                done = [] if done is None else done
                done.append(transfer_id)
            elif state == "ERR":
                failed = [] if failed is None else failed
                failed.append(transfer_id)
        if done is None and failed is None:
            return _NOTHING_ENDED
        for transfer_id in itertools.chain(done or (), failed or ()):
            self._running.pop(transfer_id).close()
        return PollResult(done or (), failed or ())

    def _state_of(self, transfer_id: int, running: _Running) -> str:
        xfer = running.xfer
        if running.given_up:
            return "ERR" if running.over() else "PROC"
        if xfer is None:
            return "DONE"
        try:
            state = xfer.state()
        except AgentError as exc:
            state = "ERR"
            logger.warning(
                "%s: transfer %d with peer %r failed: %s",
                self._agent_name,
                transfer_id,
                running.peer_id,
                exc,
            )
        if state == "ERR":
            # NIXL may have failed to tell rather than the transfer to run: it is asked once more.
            running.given_up = True
            running.close()
            return "ERR" if running.over() else "PROC"
        if running.cancelled and state != "DONE" and self._release(xfer):
            return "ERR"
        return state

    def _release(self, xfer: Transfer) -> bool:
        try:
            self.agent.release_xfer_handle(xfer)
        except AgentError as exc:
            logger.debug("%s: a cancelled transfer is not over: %s", self._agent_name, exc)
            return False
        return True

    def cancel(self, ids: Iterable[int], mode: CancelMode = "immediate") -> list[int]:
        self._check_open("cancel")
        if mode not in ("immediate", "wait"):
            raise ValueError(f"mode must be 'immediate' or 'wait', not {mode!r}")
        still_running = []
        for transfer_id in dict.fromkeys(ids):
            running = self._running.get(transfer_id)
            if running is None:
                continue
            if mode == "wait" and running.xfer is not None:
                if not self._release(running.xfer):
                    running.cancelled = True
                    still_running.append(transfer_id)
                    continue
            else:
                running.close()
            del self._running[transfer_id]
        return still_running

    # --- ending ---

    def close(self) -> None:
        """See `DataTransport.close`. Waits at most two seconds for transfers in flight; what does
        not end by then keeps the agent and the view alive, and is logged."""
        if self._closed:
            return
        self._closed = True
        agent = self._agent
        if agent is None:
            return
        for running in self._running.values():
            running.close()
        self._running.clear()
        for peer in [*self._leaving, *self._peers.values()]:
            peer.prepared.close()
            peer.remote.close()
        self._leaving.clear()
        self._peers.clear()
        if self._local is not None:
            self._local.close()
        if self._registration is not None:
            self._registration.close()
        if self._opened_agent:
            left = agent.close()
        else:
            wait_until(lambda: agent.retry_releases() == 0, DEFAULT_CLOSE_TIMEOUT_S)
            left = agent.quarantined
        if left:
            _kept_views.append(self._view)
        self._agent = None

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation}: the transport {self._agent_name!r} was closed")


# Views that NIXL may still write to after their transport was closed.
_kept_views: list[memoryview] = []
