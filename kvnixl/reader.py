"""Reading requests' KV blocks from the engines that computed them, from a reference to verified
blocks.

`Reader` is driven by ``step()``; only `Reader.close` waits. `Reader.fetch` takes a request's
*reference*, the JSON values that its producer gave out, and the local blocks to fill. The request
then passes the stages of `Stage` and ends in exactly one `ReadOutcome`::

    reader = Reader(agent, layout, engine_id="decode-0", handshakes=HandshakeClient(compat))
    reader.fetch("r1", reference, [[4, 5, 6]])
    while not (outcomes := reader.step()):
        ...
    assert outcomes[0].done and outcomes[0].verified

A reference is input from outside. Whatever it says and whatever a peer does costs that request, or
the requests to that peer, and never raises out of ``step()``.

The blocks of a request belong to the reader from `fetch` to the outcome, because bytes may land in
them until its last transfer is really over (`kvnixl.agent`). So a failure or an abort is reported
only then. Against a peer that hangs this may take for ever; `Reader.overdue` tells which requests
are past their deadline and only wait for that.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvnixl._descs import paired_desc_ids
from kvnixl.agent import Agent, Registration, Transfer
from kvnixl.completions import Completions
from kvnixl.deadlines import Deadlines
from kvnixl.errors import (
    AgentError,
    BlockListError,
    ClosedError,
    ConfigError,
    DescriptorError,
    HandshakeError,
    KvNixlError,
    PeerDisconnectedError,
    RequestInProgressError,
    TopologyError,
    TransferError,
    WireError,
)
from kvnixl.flow import FlowControl
from kvnixl.handshake import PeerAddress
from kvnixl.layout import CacheLayout
from kvnixl.leases import DEFAULT_NUM_CELLS, LeaseVerifier
from kvnixl.loglimit import LogLimiter
from kvnixl.metadata import Lease, TransferParams
from kvnixl.outcomes import FailureCause, ReaderCounters, ReadOutcome, Stage, Telemetry
from kvnixl.remotes import (
    Handshakes,
    Incarnation,
    LoadedRank,
    Met,
    NotMet,
    PendingRelease,
    Remote,
    RemoteKey,
    Remotes,
)
from kvnixl.topology import BlockPairs, check_parallel_sizes, target_ranks
from kvnixl.wire import Outcome

if TYPE_CHECKING:
    from kvnixl.heartbeat import RemoteRank
    from kvnixl.metadata import RemoteMeta

__all__ = ["FailureCause", "LeasePolicy", "ReadOutcome", "Reader", "ReaderCounters", "Stage"]

logger = logging.getLogger(__name__)

LeasePolicy = Literal["require", "prefer", "off"]
"""What to do about blocks without a lease that can be checked: decline them (``"require"``), or
read them and report them as unverified (``"prefer"``). ``"off"`` checks nothing."""

DEFAULT_MAX_INFLIGHT_BYTES: Final = 1 << 30
DEFAULT_MAX_INFLIGHT_DESCS: Final = 1 << 17

# A handshake that takes too long ends by its own deadline, which knows why. This comes on top of it
# for requests that wait, because its time starts only in the step after `Reader.fetch`.
_HANDSHAKE_GRACE_S: Final = 1.0
_CLOSE_INTERVAL_S: Final = 0.001

_NOTIFIED_AS: Final = {
    Stage.DONE: Outcome.DONE,
    Stage.ABORTED: Outcome.RELEASED,
    Stage.FAILED: Outcome.FAILED,
}

_BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(slots=True, eq=False)
class _Part:
    """What a request reads of one remote rank: one transfer."""

    request: _Request
    tp_rank: int
    rank: LoadedRank
    num_bytes: int
    ids: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None
    num_descs: int = 0
    num_pairs: int = 0
    transfer: Transfer | None = None
    notifies: bool = False
    budgeted: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    req_id: str
    started: float
    deadline: float
    stage: Stage = Stage.HANDSHAKE
    stage_since: float = 0.0
    seconds: dict[Stage, float] = field(default_factory=dict)
    meta: RemoteMeta | None = None
    remote: Remote | None = None
    local_block_ids: Sequence[_BlockIds] = ()
    num_computed_blocks: Sequence[int] = ()
    num_tokens: int | None = None
    incarnation: Incarnation | None = None
    pairs: BlockPairs | None = None
    verify: bool = False
    lease: Lease | None = None
    read_ranks: tuple[int, ...] = ()
    unposted: list[_Part] = field(default_factory=list)
    posted: dict[int, _Part] = field(default_factory=dict)  # by remote rank; NIXL has them
    num_bytes: int = 0
    bytes_left: int = 0  # not posted yet
    num_descs: int = 0
    num_descs_before: int = 0
    transfers: list[Telemetry] = field(default_factory=list)
    notified: set[int] = field(default_factory=set)
    # How it will end once its transfers are over.
    ending: tuple[Stage, FailureCause | None, str] | None = None


class Reader:
    """Reads requests' blocks from remote engines into this rank's KV cache.

    The decode side, complete; `kvnixl.EmbeddedProducer` shows the other one::

        import time
        import numpy as np
        from kvnixl import Agent, CompatibilityCheck, HandshakeClient, Reader, layout_from_tensors
        from kvnixl.handshake import RemoteAllowList

        kv = np.zeros((32, 8, 16, 128), np.float16)
        layout = layout_from_tensors({"layer.0": kv}, num_kv_heads=8)
        compat = CompatibilityCheck({"model": "my-model", "dtype": "fp16"})
        agent = Agent.open()
        handshakes = HandshakeClient(compat, allowed=RemoteAllowList(["127.0.0.1"]))
        reader = Reader(agent, layout, engine_id="decode-0", handshakes=handshakes)

        reader.fetch("req-1", receive(), [[9, 2, 7]], num_tokens=40)
        while not (outcomes := reader.step()):          # in every step of your server
            time.sleep(0.001)
        assert outcomes[0].verified, outcomes[0].reason  # blocks 9, 2 and 7 hold the tokens
        reader.close()
        handshakes.close()
        agent.close()

    Args:
        agent: this worker's NIXL agent. Stays the caller's.
        layout: this rank's KV cache.
        engine_id: this engine's own id; a reference that names it is refused. A server that also
            produces gives the same one to its `kvnixl.EmbeddedProducer`; a server that only reads
            may use any name that no producer has. Whom to read from is said by each reference.
        handshakes: a `kvnixl.handshake.HandshakeClient`, or an object with its calls. Its
            ``allowed`` is the list of hosts that references may name; ``None`` allows all. Stays
            the caller's, but outcomes that its ``poll`` gives out here are not seen by others.
        tp_rank, tp_size: this rank, and how many its engine has.
        register: register ``layout.memory`` with the agent; ``False`` if that was done already.
        clock: seconds, monotonic; only differences count.
        wait: sleeps that many seconds, in `close` only.
        lease_verification: see `LeasePolicy`.
        max_inflight_bytes, max_inflight_descs: what may be in flight at a time, descriptors as
            counted after merging. A larger request goes alone.
        patience: seconds that a request may be overtaken by smaller ones.
        request_timeout: seconds for a whole request.
        handshake_timeout: seconds for one handshake. A request waits a second longer, so that it
            fails with what the handshake found out.
        queue_timeout, read_timeout, verify_timeout: seconds for each of the other stages.
        idle_timeout: seconds after which a remote engine that is not used is unloaded.
        backoff: seconds before a remote engine is tried again after a first failure, and at most.
        max_remotes: how many remote engines are known at a time.
        num_cells: how many leases can be checked at a time, see `LeaseVerifier`.
        sender: tells our notifications from those of other starts of this worker; random by
            default.

    Attributes:
        counters: what was done.
        sender: see above.

    Raises:
        ConfigError: an option is out of range.
        TopologyError: the rank does not exist.
        RegistrationError: the memory cannot be registered.
    """

    def __init__(
        self,
        agent: Agent,
        layout: CacheLayout,
        *,
        engine_id: str,
        handshakes: Handshakes,
        tp_rank: int = 0,
        tp_size: int = 1,
        register: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        lease_verification: LeasePolicy = "prefer",
        max_inflight_bytes: int = DEFAULT_MAX_INFLIGHT_BYTES,
        max_inflight_descs: int = DEFAULT_MAX_INFLIGHT_DESCS,
        patience: float = 0.25,
        request_timeout: float = 60.0,
        handshake_timeout: float = 10.0,
        queue_timeout: float = 30.0,
        read_timeout: float = 30.0,
        verify_timeout: float = 10.0,
        idle_timeout: float = 600.0,
        backoff: tuple[float, float] = (0.1, 10.0),
        max_remotes: int = 4096,
        num_cells: int = DEFAULT_NUM_CELLS,
        sender: int | None = None,
    ) -> None:
        if lease_verification not in ("require", "prefer", "off"):
            raise ConfigError(
                f"lease_verification {lease_verification!r} must be 'require', 'prefer' or 'off'"
            )
        self._stage_timeouts = {
            Stage.HANDSHAKE: handshake_timeout + _HANDSHAKE_GRACE_S,
            Stage.QUEUED: queue_timeout,
            Stage.READING: read_timeout,
            Stage.VERIFYING: verify_timeout,
        }
        for seconds in (request_timeout, handshake_timeout, *self._stage_timeouts.values()):
            if not seconds > 0:
                raise ConfigError(f"a timeout of {seconds} s is not positive")
        target_ranks(tp_rank, tp_size, tp_size)
        self.engine_id = engine_id
        self.counters = ReaderCounters()
        self.sender = secrets.randbits(63) if sender is None else sender
        self.closed = False
        self._agent = agent
        self._tp = (tp_rank, tp_size)
        self._clock = clock
        self._wait = wait
        self._policy = lease_verification
        self._allowed = handshakes.allowed
        self._num_groups = len(layout.groups)
        self._request_timeout = request_timeout
        self._completions = Completions(agent, self.sender, self.counters)
        self._requests: dict[str, _Request] = {}
        self._flow: FlowControl[str] = FlowControl(max_inflight_bytes, max_inflight_descs, patience)
        self._in_flight: dict[int, _Part] = {}
        self._reads_done: list[str] = []
        self._deadlines: Deadlines[str] = Deadlines()
        self._outcomes: list[ReadOutcome] = []
        self._registrations: list[Registration] = []
        self._limiter = LogLimiter(logger, clock=clock)
        self._verifier: LeaseVerifier | None = None
        try:
            if register:
                for memory in layout.memory:
                    region = (memory.base, memory.length, memory.device_id)
                    self._registrations.append(agent.register_memory([region], memory.mem_type))
            if lease_verification != "off":
                self._verifier = LeaseVerifier(
                    agent,
                    num_cells,
                    timeout=verify_timeout,
                    clock=clock,
                    completion_notif=self._slot_read_notification,
                )
            self._remotes = Remotes(
                agent,
                layout,
                self._verifier,
                handshakes,
                tp_rank=tp_rank,
                tp_size=tp_size,
                handshake_timeout=handshake_timeout,
                idle_timeout=idle_timeout,
                backoff=backoff,
                max_remotes=max_remotes,
                counters=self.counters,
                clock=clock,
            )
        except BaseException:
            if self._verifier is not None:
                self._verifier.shutdown()
            for registration in self._registrations:
                registration.close()
            raise

    # --- what a caller does ---------------------------------------------------------------------

    def prepare(
        self, engine_id: str, host: str, port: int, *, tp_size: int = 1, touch: bool = True
    ) -> bool:
        """Meet a remote engine ahead of its first request.

        Does not wait; ``step()`` goes on with it. After a failure, call it again: it will be tried
        once the backoff is over.

        Args:
            engine_id, host, port: the engine, and where its side channel is.
            tp_size: its tensor-parallel size.
            touch: read a byte of each of its regions, so that the first request finds connections
                and pages.

        Returns:
            Whether the engine is met (and touched).

        Raises:
            RemoteNotAllowedError: the host is not in the list of allowed ones.
            TopologyError: ``tp_size`` is out of range.
            ClosedError: the reader was closed.
        """
        self._check_open("prepare")
        if self._allowed is not None:
            self._allowed.check(host)
        target_ranks(*self._tp, tp_size)
        key = RemoteKey(PeerAddress(engine_id, host, port), tp_size)
        remote = self._remotes.get(key, self._clock())
        if remote is None:
            return False
        if remote.current is not None:
            return not remote.current.touches
        remote.wanted = True
        remote.touch |= touch
        self._remotes.meet(remote)
        return False

    def fetch(
        self,
        req_id: str,
        reference: object,
        local_block_ids: Sequence[_BlockIds],
        *,
        num_computed_blocks: Sequence[int] | None = None,
        num_tokens: int | None = None,
        timeout: float | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Read the blocks of a request. What comes of it is an outcome of ``step()``.

        The local blocks are filled from the beginning of the sequence, unless
        ``num_computed_blocks`` says how many blocks of it the local prefix cache holds. (The lists
        of a group with a sliding window hold only the end of the sequence, on both sides.)

        Args:
            req_id: the local id; unique among the requests without an outcome.
            reference: what the producer gave out for the request, a mapping with the keys of
                vLLM's ``kv_transfer_params`` and ``kvnixl_lease``. Its
                ``remote_blocks_expiry_time`` counts only where no lease is checked: unless the
                READs end before the owner's clock is there, the request fails. Heartbeats, which
                extend a lease, do not move that time.
            local_block_ids: for each cache group the logical blocks to fill, in order, without
                those that the local prefix cache holds. No blocks: nothing is read, and the
                producer is told that its blocks are not needed any more.
            num_computed_blocks: for each cache group how many logical blocks of the sequence come
                before those; by default none.
            num_tokens: tokens, from the beginning of the sequence, that are needed. The request
                fails if the remote blocks hold fewer. Not checked by default.
            timeout: seconds for the request, instead of the reader's ``request_timeout``.
            prompt_token_ids: the prompt. If the reference says of which prompt its blocks are, and
                this one neither is that nor begins with it, the request fails, and the producer is
                told nothing: the blocks are another request's. Not checked by default.

        Raises:
            RequestInProgressError: the id has no outcome yet.
            ValueError: the timeout is no positive number of seconds, ``num_tokens`` negative, or a
                token id no integer.
            ClosedError: the reader was closed.
        """
        self._check_open("fetch")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout {timeout} is not a positive number of seconds")
        if num_tokens is not None and num_tokens < 0:
            raise ValueError(f"num_tokens {num_tokens} must not be negative")
        if req_id in self._requests:
            raise RequestInProgressError(req_id)
        now = self._clock()
        request = _Request(
            req_id,
            now,
            now + (self._request_timeout if timeout is None else timeout),
            stage_since=now,
            local_block_ids=tuple(_copied(ids) for ids in local_block_ids),
            num_computed_blocks=(
                (0,) * self._num_groups
                if num_computed_blocks is None
                else tuple(num_computed_blocks)
            ),
            num_tokens=num_tokens,
        )
        self._requests[req_id] = request
        try:
            remote = self._remote_of(request, reference, prompt_token_ids, now)
        except (TypeError, ValueError):  # of the caller's token ids
            del self._requests[req_id]
            raise
        if remote is None:
            return
        meta = request.meta
        assert meta is not None
        incarnation = self._remotes.ready(remote, meta.registration_generation)
        if incarnation is not None:
            self._enqueue(request, incarnation, now)
            return
        self._arm(request, now)
        if remote.error and remote.retry_at > now + self._stage_timeouts[Stage.HANDSHAKE]:
            reason = f"{remote.key} could not be met, and is not tried yet again: {remote.error}"
            self._fail(request, FailureCause.HANDSHAKE, reason, now)
            return
        self._remotes.wait(remote, req_id, meta.registration_generation)

    def release(self, reference: object, req_id: str = "") -> None:
        """Tell the producer that a request will not be read (it was rejected before `fetch`).

        Has no outcome. If the producer was never met, it is met for this; if that fails, its lease
        ends by its deadline.

        Args:
            reference: as for `fetch`.
            req_id: what to call the request in messages.

        Raises:
            WireError, TopologyError, RemoteNotAllowedError: the reference cannot be used.
            ClosedError: the reader was closed.
        """
        self._check_open("release")
        key, meta = self._parse(reference, req_id)
        now = self._clock()
        remote = self._remotes.get(key, now)
        if remote is not None:
            self._release_at(remote, PendingRelease(meta.request_id, meta.lease), now)

    def abort(self, req_id: str) -> bool:
        """Give a request up. Its outcome follows once nothing can land in its blocks any more.

        Returns:
            Whether the request was under way. Otherwise nothing changes: an outcome that is already
            there stays what it is.
        """
        request = self._requests.get(req_id)
        if request is None:
            return False
        self._end(request, (Stage.ABORTED, None, ""), self._clock())
        return True

    def step(self) -> list[ReadOutcome]:
        """Move everything on; what ended since the last call."""
        now = self._clock()
        remotes = self._remotes
        if remotes.busy or now >= remotes.next_eviction:
            self._step_remotes(now)
        if self._in_flight:
            self._poll_reads(now)
        if self._flow:
            self._post_reads(now)
        if self._verifier is not None:
            self._verify(now)
        if self._requests:
            for req_id in self._deadlines.expired(now):
                request = self._requests.get(req_id)
                if request is not None:  # ending one may end others
                    self._expire(request, now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self, timeout: float = 2.0) -> int:
        """Abort everything, and give back what NIXL holds once nothing is in flight any more.

        What was aborted is an outcome of the next ``step()``. While `close` returns more than 0,
        memory that NIXL may still write stays registered, and must stay allocated; `close` can be
        called again.

        Args:
            timeout: seconds to wait at most for transfers in flight; 0 does not wait.

        Returns:
            How much is left: transfers in flight and remote engines that they keep loaded.
        """
        until = self._clock() + timeout
        waited = 0.0
        # The sum of the waits bounds it too, should the clock stand still.
        while (left := self._close_now()) and self._clock() < until and waited < timeout:
            self._wait(_CLOSE_INTERVAL_S)
            waited += _CLOSE_INTERVAL_S
        return left

    def _close_now(self) -> int:
        self.closed = True
        now = self._clock()
        for req_id in list(self._requests):
            request = self._requests.get(req_id)
            if request is not None:  # ending one may end others
                self._end(request, (Stage.ABORTED, None, ""), now)
        if self._in_flight:
            self._poll_reads(now)
        if self._verifier is not None:
            self._verify(now)
        self._agent.retry_releases()
        if not self._remotes.close() or self._in_flight:
            return len(self._in_flight) + self._remotes.closing
        if self._verifier is not None:
            left = self._verifier.shutdown()
            if left:
                return left
            self._verifier = None
        while self._registrations:
            self._registrations.pop().close()
        return 0

    # --- what a caller asks ---------------------------------------------------------------------

    def stage(self, req_id: str) -> Stage | None:
        """Where the request is; ``None`` if it is not under way."""
        request = self._requests.get(req_id)
        return None if request is None else request.stage

    def overdue(self) -> dict[str, str]:
        """Requests that have failed or were aborted, and only wait until their transfers are over,
        with the reason."""
        return {
            part.request.req_id: part.request.ending[2] or "aborted"
            for part in self._in_flight.values()
            if part.request.ending is not None
        }

    def ranks_of(self, engine_id: str) -> list[RemoteRank] | None:
        """The NIXL agents of an engine that was met, for `HeartbeatSender.send`; else ``None``."""
        return self._remotes.ranks_of(engine_id) or None

    def next_sequence(self) -> int:
        """The number of this sender's next notification, for others that send in its name."""
        return self._completions.next_sequence()

    @property
    def num_requests(self) -> int:
        """Requests without an outcome."""
        return len(self._requests)

    @property
    def num_remotes(self) -> int:
        """Remote engines that are known, met or not."""
        return len(self._remotes)

    @property
    def remotes_closing(self) -> int:
        """Incarnations of remote engines that wait for their last transfer."""
        return self._remotes.closing

    @property
    def num_overdue(self) -> int:
        """How many requests `overdue` has; costs nothing while nothing is in flight."""
        return len(self.overdue()) if self._in_flight else 0

    @property
    def busy(self) -> bool:
        """Whether ``step()`` has work that no request stands for: meeting a remote engine ahead of
        time, or to tell it that its blocks are not needed."""
        return self._remotes.meeting

    @property
    def quarantined_cells(self) -> int:
        """Landing cells that are out of use because NIXL may still write them."""
        return 0 if self._verifier is None else self._verifier.quarantined_cells

    @property
    def bytes_in_flight(self) -> int:
        """What counts against ``max_inflight_bytes``."""
        return self._flow.bytes_in_flight

    # --- references -----------------------------------------------------------------------------

    def _parse(self, reference: object, req_id: str) -> tuple[RemoteKey, RemoteMeta]:
        params = TransferParams.parse(reference, req_id)
        meta = params.remote(req_id)
        if meta.engine_id == self.engine_id:
            raise WireError(f"remote_engine_id {meta.engine_id!r} is this engine itself")
        check_parallel_sizes(
            remote_pp_size=params.pp_size or 1, remote_dcp_size=params.dcp_size or 1
        )
        tp_size = params.tp_size or 1
        target_ranks(*self._tp, tp_size)
        if self._allowed is not None:
            self._allowed.check(meta.host)
        return RemoteKey(PeerAddress(meta.engine_id, meta.host, meta.port), tp_size), meta

    def _remote_of(
        self,
        request: _Request,
        reference: object,
        prompt_token_ids: Sequence[int] | None,
        now: float,
    ) -> Remote | None:
        """Whom the request reads; ``None`` if it failed over this."""
        try:
            key, request.meta = self._parse(reference, request.req_id)
        except HandshakeError as error:
            self._fail(request, FailureCause.NOT_ALLOWED, str(error), now)
            return None
        except (WireError, TopologyError) as error:
            self._fail(request, FailureCause.REFERENCE, str(error), now)
            return None
        prompt = request.meta.prompt
        mine = prompt_token_ids
        if prompt is not None and mine is not None and not prompt.begins(mine):
            reason = (
                f"the reference is of another prompt, of {prompt.num_tokens} tokens; this one has "
                f"{len(mine)}"
            )
            self._fail(request, FailureCause.PROMPT, reason, now)
            return None
        request.remote = self._remotes.get(key, now)
        if request.remote is None:
            self._fail(
                request,
                FailureCause.TOO_MANY_REMOTES,
                f"{len(self._remotes)} remote engines are in use: raise max_remotes",
                now,
            )
        return request.remote

    # --- remote engines -------------------------------------------------------------------------

    def _step_remotes(self, now: float) -> None:
        if self._remotes.closing and self._agent.quarantined:
            self._agent.retry_releases()
        for event in self._remotes.step(now):
            if isinstance(event, Met):
                for req_id in event.requests:
                    request = self._requests.get(req_id)
                    if request is not None and request.stage is Stage.HANDSHAKE:
                        self._enqueue(request, event.incarnation, now)
                ranks = event.incarnation.plan.ranks
                for release in event.releases:
                    self._notify(event.incarnation, ranks, Outcome.RELEASED, release, now)
            elif isinstance(event, NotMet):
                for req_id in event.requests:
                    request = self._requests.get(req_id)
                    if request is not None and request.remote is event.remote:
                        self._fail(request, event.cause, event.reason, now)
            else:
                self._fail_users(event.incarnation, event.reason, now)

    def _fail_users(self, incarnation: Incarnation, reason: str, now: float) -> None:
        for req_id in list(incarnation.users):
            request = self._requests.get(req_id)
            if request is not None:  # ending one may end others
                self._fail(request, FailureCause.DISCONNECTED, reason, now)

    def _peer_failed(self, incarnation: Incarnation, error: AgentError, now: float) -> None:
        """A call to the peer failed: drop what is loaded of it, and meet it again when needed.

        A peer that is gone fails all that refers to it. After another error, transfers that are
        under way may still end well.
        """
        gone = isinstance(error, PeerDisconnectedError)
        if not gone:
            self._remotes.retire(incarnation)
        elif not incarnation.gone:
            self._remotes.retire(incarnation, gone=True)
            self._fail_users(incarnation, str(error), now)

    # --- stages ---------------------------------------------------------------------------------

    def _enter(self, request: _Request, stage: Stage, now: float) -> None:
        self._leave_stage(request)
        request.stage = stage
        self._arm(request, now)

    def _leave_stage(self, request: _Request) -> None:
        # Not the time of the step: in one step a request may pass several stages, and NIXL may copy
        # for long inside a call.
        now = self._clock()
        spent = now - request.stage_since
        request.seconds[request.stage] = request.seconds.get(request.stage, 0.0) + spent
        request.stage_since = now

    def _arm(self, request: _Request, now: float) -> None:
        req_id, deadlines = request.req_id, self._deadlines
        deadline = min(request.deadline, now + self._stage_timeouts[request.stage])
        before = deadlines.deadline(req_id)
        if before is not None and before <= deadline:
            deadlines.extend(req_id, deadline)  # cheaper than a new entry
            return
        deadlines.remove(req_id)
        deadlines.add(req_id, deadline)

    def _expire(self, request: _Request, now: float) -> None:
        if now >= request.deadline:
            seconds, what = request.deadline - request.started, "the request"
        else:
            seconds, what = self._stage_timeouts[request.stage], f"stage {request.stage.value!r}"
        reason = f"{what} did not end within {seconds:g} s (it was {request.stage.value})"
        remote = request.remote
        if request.stage is Stage.HANDSHAKE and remote is not None:
            reason += f"; it was to be read from {remote.key}"
            if remote.error:
                reason += f", where the last handshake failed: {remote.error}"
        self._fail(request, FailureCause.TIMEOUT, reason, now)

    def _enqueue(self, request: _Request, incarnation: Incarnation, now: float) -> None:
        """The remote is met: pair the blocks, and queue what is to be read."""
        meta = request.meta
        assert meta is not None
        request.incarnation = incarnation
        request.lease = meta.lease
        incarnation.users.add(request.req_id)
        self._enter(request, Stage.QUEUED, now)
        try:
            if request.num_tokens is not None and any(len(i) for i in request.local_block_ids):
                _check_num_tokens(request.num_tokens, meta, incarnation.plan.remote)
            pairs = request.pairs = incarnation.plan.pair_blocks(
                request.local_block_ids,
                meta.block_ids,
                num_computed_blocks=request.num_computed_blocks,
                num_tokens=meta.num_tokens,
                needed_tokens=request.num_tokens,
            )
        except Exception as error:
            self._blocks_failed(request, error, now)
            return
        for read in incarnation.plan.reads:
            rank = incarnation.ranks[read.remote_rank]
            num_bytes = sum(
                length * pairs.local[i].size
                for i, length in zip(read.block_lists, rank.bytes_per_block, strict=True)
            )
            if num_bytes:
                request.unposted.append(_Part(request, read.remote_rank, rank, num_bytes))
                request.num_bytes += num_bytes
        request.read_ranks = tuple(part.tp_rank for part in request.unposted)
        request.bytes_left = request.num_bytes
        if not request.unposted:
            self._finish(request, (Stage.DONE, None, ""), now, verified=True)
            return
        if not self._decide_verification(request, incarnation, now):
            return
        self._flow.add(request.req_id, request.bytes_left, now)

    def _blocks_failed(self, request: _Request, error: Exception, now: float) -> None:
        """What comes from outside may be wrong in ways that no check foresees."""
        reason = str(error)
        if not isinstance(error, (BlockListError, TypeError, ValueError, LookupError)):
            reason = f"{type(error).__name__}: {error}"
            self._limiter.warning(
                "blocks", "request %r cannot be read: %s", request.req_id, reason, exc_info=error
            )
        self._fail(request, FailureCause.BLOCKS, reason, now)

    def _decide_verification(self, request: _Request, incarnation: Incarnation, now: float) -> bool:
        """Whether the request is read; it failed otherwise."""
        if self._verifier is None:
            return True
        if incarnation.has_slots and request.lease is not None:
            request.verify = True
            self._verifier.discard(request.req_id)
            self._verifier.add_checks(
                request.req_id,
                incarnation.name,
                request.read_ranks,
                *request.lease,
            )
            return True
        key = incarnation.remote.key
        missing = (
            f"{key} gave no lease for it (its slots ran out, or a router dropped the key)"
            if incarnation.has_slots
            else f"{key} exports no lease slots (it is no kvnixl, or has them switched off)"
        )
        if self._policy == "require":
            reason = f"{missing}; lease_verification is 'require'"
            self._fail(request, FailureCause.NO_LEASE, reason, now)
            return False
        if not incarnation.remote.warned:
            incarnation.remote.warned = True
            logger.warning("request %r is read unverified: %s", request.req_id, missing)
        return True

    # --- posting --------------------------------------------------------------------------------

    def _post_reads(self, now: float) -> None:
        flow = self._flow
        while (req_id := flow.next(now)) is not None:
            request = self._requests[req_id]
            if not request.verify and self._has_expired(request, now):
                continue
            part = request.unposted[-1]
            if part.ids is None and not self._build_ids(part, now):
                continue
            if not flow.fits(part.num_bytes, part.num_descs):
                return
            request.unposted.pop()
            request.bytes_left -= part.num_bytes
            if request.unposted:
                flow.add(req_id, request.bytes_left, now)
            else:
                flow.remove(req_id)
            if request.stage is Stage.QUEUED:
                self._enter(request, Stage.READING, now)
            self._post(part, now)

    def _has_expired(self, request: _Request, now: float) -> bool:
        """Whether the owner promised the blocks only until a time that has come; it failed then.

        Asked where no lease is checked. A lease tells better, because heartbeats extend it.
        """
        assert request.meta is not None
        assert request.incarnation is not None
        expiry, clock = request.meta.blocks_expiry_time, request.incarnation.clock
        if expiry is None or clock is None:
            return False
        late = now - clock.local_deadline(expiry)
        if late < 0:
            return False
        reason = (
            f"{request.incarnation.remote.key} promised its blocks until {late:.3g} s ago, and no "
            "lease tells whether they are still there"
        )
        self._fail(request, FailureCause.NO_LEASE, reason, now)
        return True

    def _build_ids(self, part: _Part, now: float) -> bool:
        request, rank = part.request, part.rank
        assert request.pairs is not None
        assert rank.read is not None
        assert rank.local is not None
        assert rank.index is not None
        local_ids, remote_ids = rank.read.select(request.pairs)
        try:
            rank.read.check_num_descs(request.pairs)
            local, remote, part.num_descs = paired_desc_ids(
                rank.local.index, local_ids, rank.index, remote_ids
            )
        except Exception as error:
            self._blocks_failed(request, error, now)
            return False
        part.ids = (local, remote)
        part.num_pairs = len(local)
        return True

    def _post(self, part: _Part, now: float) -> None:
        request, rank = part.request, part.rank
        incarnation = request.incarnation
        assert incarnation is not None
        assert rank.local is not None
        assert rank.prepared is not None
        assert part.ids is not None
        notification = b""
        if not request.verify:
            # The blocks are not checked afterwards, so the owner may reuse them at once.
            assert request.meta is not None
            notification = self._completions.encode(
                incarnation, part.tp_rank, Outcome.DONE, request.lease, request.meta.request_id
            )
            part.notifies = bool(notification)
        local_ids, remote_ids = part.ids
        part.ids = None
        try:
            transfer = part.transfer = self._agent.make_prepped_xfer(
                "READ", rank.local.prepared, local_ids, rank.prepared, remote_ids, notification
            )
        except KvNixlError as error:
            self._read_failed(part, error, now, FailureCause.POST)
            return
        request.posted[part.tp_rank] = part
        self._in_flight[id(part)] = part
        self._flow.take(part.num_bytes, part.num_descs)
        part.budgeted = True
        request.num_descs += part.num_descs
        request.num_descs_before += part.num_pairs
        self.counters.descs_posted += part.num_descs
        try:
            state: str = transfer.post()
        except AgentError as error:
            self._read_failed(part, error, now, FailureCause.POST)
            state = "ERR"
        if state not in ("PROC", "PEND"):
            self._conclude(part, state, now)

    def _read_failed(
        self,
        part: _Part,
        error: KvNixlError,
        now: float,
        cause: FailureCause = FailureCause.TRANSFER,
    ) -> None:
        incarnation = part.request.incarnation
        assert incarnation is not None
        gone = isinstance(error, PeerDisconnectedError)
        if gone:
            cause = FailureCause.DISCONNECTED
        reason = f"READ from rank {part.tp_rank} of {incarnation.remote.key}: {error}"
        if part.request.ending is None:
            self._fail(part.request, cause, reason, now)
        if isinstance(error, AgentError) and not isinstance(error, DescriptorError):
            self._peer_failed(incarnation, error, now)

    # --- reading --------------------------------------------------------------------------------

    def _poll_reads(self, now: float) -> None:
        lingering = False
        for part in list(self._in_flight.values()):
            transfer = part.transfer
            assert transfer is not None
            if transfer.closed:
                lingering = True
                continue
            if part.request.ending is not None and self._agent.release_is_final:
                self._conclude(part, "ERR", now)
                continue
            try:
                state: str = transfer.state()
            except AgentError as error:
                self._read_failed(part, error, now)
                state = "ERR"
            else:
                if state in ("PROC", "PEND"):
                    continue
                if state == "ERR":
                    said = TransferError("check_xfer_state", "NIXL says ERR", peer=transfer.peer)
                    self._read_failed(part, said, now)
            self._conclude(part, state, now)
        if lingering:
            self._agent.retry_releases()
            for part in list(self._in_flight.values()):
                if part.transfer is not None and part.transfer.released:
                    self._part_over(part, now)

    def _conclude(self, part: _Part, state: str, now: float) -> None:
        """NIXL reported an end: give the handle back, and with it the memory."""
        transfer = part.transfer
        assert transfer is not None
        if state == "DONE":
            if part.notifies:
                part.request.notified.add(part.tp_rank)
            telemetry = transfer.telemetry()
            if telemetry is not None:
                part.request.transfers.append(telemetry)
        # What NIXL cannot say the state of is not released, and so keeps the blocks.
        if transfer.close():
            self._part_over(part, now)

    def _part_over(self, part: _Part, now: float) -> None:
        request = part.request
        del self._in_flight[id(part)]
        del request.posted[part.tp_rank]
        self._return_budget(part)
        self._settle(request, now)

    def _return_budget(self, part: _Part) -> None:
        if part.budgeted:
            part.budgeted = False
            self._flow.give_back(part.num_bytes, part.num_descs)

    def _settle(self, request: _Request, now: float) -> None:
        """Go on if none of the request's transfers is left."""
        if request.posted or request.stage is not Stage.READING:
            return
        if request.ending is not None:
            self._finish(request, request.ending, now)
        elif request.unposted:
            return
        elif request.verify:
            self._enter(request, Stage.VERIFYING, now)
            self._reads_done.append(request.req_id)
        elif not self._has_expired(request, now):  # bytes may have come after it
            self._finish(request, (Stage.DONE, None, ""), now)

    # --- verifying ------------------------------------------------------------------------------

    def _verify(self, now: float) -> None:
        verifier = self._verifier
        assert verifier is not None
        reads_done: Iterable[str] = ()
        if self._reads_done:
            reads_done = [req_id for req_id in self._reads_done if req_id in self._requests]
            self._reads_done.clear()
        verified, failed = verifier.step(reads_done)
        for req_id in verified:
            request = self._requests.get(req_id)
            if request is not None and request.stage is Stage.VERIFYING:
                request.notified.update(request.read_ranks)  # the slot READs told them
                self._finish(request, (Stage.DONE, None, ""), now, verified=True)
        for req_id, reason in failed.items():
            request = self._requests.get(req_id)
            if request is not None:
                self._fail(request, FailureCause.LEASE_ENDED, reason, now)

    def _slot_read_notification(self, name: str, tp_rank: int, req_ids: list[str]) -> bytes:
        """What rides on a slot READ: all these requests were read."""
        del name
        requests = [self._requests[req_id] for req_id in req_ids if req_id in self._requests]
        leases = [request.lease for request in requests if request.lease is not None]
        incarnation = requests[0].incarnation if requests else None
        if incarnation is None or not leases:
            return b""
        return self._completions.encode_leases(incarnation, tp_rank, leases)

    # --- ending ---------------------------------------------------------------------------------

    def _fail(self, request: _Request, cause: FailureCause, reason: str, now: float) -> None:
        if request.ending is None:
            self._end(request, (Stage.FAILED, cause, reason), now)

    def _end(
        self, request: _Request, ending: tuple[Stage, FailureCause | None, str], now: float
    ) -> None:
        """End the request so, as soon as nothing can land in its blocks any more."""
        request.ending = ending
        request.unposted.clear()
        self._flow.remove(request.req_id)
        if not request.posted:
            self._finish(request, ending, now)
            return
        self._deadlines.remove(request.req_id)
        for part in request.posted.values():
            # A peer that hangs must not use up the budget of the others.
            self._return_budget(part)

    def _finish(
        self,
        request: _Request,
        ending: tuple[Stage, FailureCause | None, str],
        now: float,
        *,
        verified: bool = False,
    ) -> None:
        req_id = request.req_id
        stage, cause, reason = ending
        self._leave_stage(request)
        del self._requests[req_id]
        self._deadlines.remove(req_id)
        incarnation = request.incarnation
        if incarnation is not None:
            incarnation.users.discard(req_id)
            self._notify_end(request, incarnation, stage, now)
        elif request.remote is not None and request.meta is not None:
            self._leave_remote(request, request.remote, request.meta, now)
        if request.verify and self._verifier is not None:
            self._verifier.discard(req_id)
        counters = self.counters
        if stage is Stage.DONE:
            counters.verified += verified
            counters.unverified += not verified
            counters.bytes_read += request.num_bytes
        elif stage is Stage.ABORTED:
            counters.aborted += 1
        elif cause is not None:
            counters.failed[cause] += 1
        self._outcomes.append(
            ReadOutcome(
                req_id=req_id,
                stage=stage,
                verified=verified,
                cause=cause,
                reason=reason,
                ended_in=request.stage,
                num_bytes=request.num_bytes,
                num_descs=request.num_descs,
                num_descs_before=request.num_descs_before,
                transfers=tuple(request.transfers),
                seconds=request.seconds,
                unfilled=() if request.pairs is None else request.pairs.unfilled,
            )
        )

    def _leave_remote(
        self, request: _Request, remote: Remote, meta: RemoteMeta, now: float
    ) -> None:
        """The request ends before its remote was met: tell the owner once it is, if it will be."""
        if remote.waiting.pop(request.req_id, None) is not None and not self.closed:
            self._release_at(remote, PendingRelease(meta.request_id, meta.lease), now)

    # --- notifications --------------------------------------------------------------------------

    def _notify_end(
        self, request: _Request, incarnation: Incarnation, stage: Stage, now: float
    ) -> None:
        """Tell the ranks that were not told yet that this request needs their blocks no more."""
        assert request.meta is not None
        release = PendingRelease(request.meta.request_id, request.lease)
        if incarnation.gone and stage is not Stage.DONE and not self.closed:
            # If the engine was restarted, it is the new start that holds the blocks.
            self._release_at(incarnation.remote, release, now)
            return
        ranks = [rank for rank in incarnation.plan.ranks if rank not in request.notified]
        self._notify(incarnation, ranks, _NOTIFIED_AS[stage], release, now)

    def _release_at(self, remote: Remote, release: PendingRelease, now: float) -> None:
        current = remote.current
        if current is None:
            self._remotes.release_later(remote, release)
        else:
            self._notify(current, current.plan.ranks, Outcome.RELEASED, release, now)

    def _notify(
        self,
        incarnation: Incarnation,
        tp_ranks: Iterable[int],
        outcome: Outcome,
        release: PendingRelease,
        now: float,
    ) -> None:
        for tp_rank in tp_ranks:
            message = self._completions.encode(
                incarnation, tp_rank, outcome, release.lease, release.remote_request_id
            )
            error = self._completions.send(incarnation, tp_rank, message)
            if error is not None:
                self._peer_failed(incarnation, error, now)

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise ClosedError(f"{call}: the reader was closed")


def _check_num_tokens(needed: int, meta: RemoteMeta, remote: CacheLayout) -> None:
    """Refuse blocks that do not hold the tokens that are needed."""
    held, said = meta.num_tokens, "the reference says that its blocks hold"
    if held is None:
        # Only lists of groups without a window begin with the sequence.
        said = "its blocks have room for"
        held = min(
            (
                len(ids) * group.block_size * remote.kernel_blocks_per_block
                for ids, group in zip(meta.block_ids, remote.groups, strict=False)
                if not group.sliding_window
            ),
            default=needed,
        )
    if held < needed:
        raise BlockListError(f"{needed} tokens are needed, but {said} {held}")


def _copied(ids: _BlockIds) -> _BlockIds:
    """The caller may change its list while the request waits."""
    return np.array(ids) if isinstance(ids, np.ndarray) else list(ids)
