"""What a reader knows of the engines it reads from: meeting them, keeping them, letting them go.

A `Remote` stands for one engine id at one address, with one tensor-parallel size. `Incarnation`
holds what was loaded of one start of it: NIXL agents, prepared lists, the plan. `Remotes` owns all
of them and is driven by `Remotes.step`:

* A remote is met (side-channel handshake, NIXL metadata, prepared lists) when something needs it,
  once for all that wait. After a failure the next attempt waits, twice as long each time.
* An incarnation that failed or was replaced is *retired*: nothing new uses it, and it is unloaded
  when the last transfer to it is over, because NIXL would report running transfers as failed while
  their bytes still land. Only then is the remote met again: NIXL refuses to load a restarted agent
  of the same name over the old one.
* A remote that nobody used for a while is unloaded. So is the one that was idle for longest when
  there are too many.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvnixl._descs import RegionIndex, strided_descs
from kvnixl.agent import LOCAL_SIDE, Agent, PreparedList, Registration, RemoteAgent, Transfer
from kvnixl.deadlines import ClockOffset
from kvnixl.errors import AgentError, ConfigError, KvNixlError, RemoteNotAllowedError
from kvnixl.handshake import HandshakeFailed
from kvnixl.heartbeat import RemoteRank
from kvnixl.layout import CacheLayout, layout_from_metadata
from kvnixl.leases import LEASE_SLOT_BYTES, LeaseVerifier
from kvnixl.loglimit import LogLimiter
from kvnixl.outcomes import FailureCause, ReaderCounters
from kvnixl.topology import RankRead, ReadPlan, check_parallel_sizes, plan_reads, target_ranks

if TYPE_CHECKING:
    from kvnixl.handshake import HandshakeOutcome, PeerAddress, Rank, RemoteAllowList
    from kvnixl.metadata import Lease, NixlAgentMetadata

__all__ = ["Handshakes", "Incarnation", "Met", "NotMet", "Remote", "RemoteKey", "Remotes"]

logger = logging.getLogger(__name__)

# A handshake under the same address with another tensor-parallel size is waited for.
_ADDRESS_TAKEN_PAUSE_S = 0.01
# Places of each rank's memory that `prepare` reads one byte of.
_MAX_TOUCHES = 512
_MAX_PENDING_RELEASES = 1024
_MAX_GENERATIONS = 64

# Scratch memory that NIXL may still write after its owner was closed.
_undead: list[object] = []


class Handshakes(Protocol):
    """What is used of a `kvnixl.handshake.HandshakeClient`."""

    @property
    def allowed(self) -> RemoteAllowList | None: ...
    def start(
        self,
        engine_id: str,
        host: str,
        port: int,
        ranks: Iterable[Rank] = ...,
        *,
        timeout: float | None = None,
    ) -> bool: ...
    def poll(self, timeout: float = 0.0) -> list[HandshakeOutcome]: ...
    def cancel(self, peer: PeerAddress) -> bool: ...


class RemoteKey(NamedTuple):
    """What tells remotes apart: the same id at another address is another engine."""

    address: PeerAddress
    tp_size: int

    def __str__(self) -> str:
        return str(self.address)


class PendingRelease(NamedTuple):
    """A request that will not be read, to be told to its owner once that is met."""

    remote_request_id: str
    lease: Lease | None


@dataclass(slots=True, eq=False)
class LocalSide:
    """A prepared list of this rank's blocks, shared by all remotes that are cut in the same way."""

    prepared: PreparedList
    index: RegionIndex
    key: tuple[bytes, tuple[int, ...], str]
    users: int = 0


@dataclass(slots=True, eq=False)
class LoadedRank:
    """One loaded rank of a remote.

    Attributes:
        agent: its NIXL agent.
        binary: it understands kvnixl's notifications.
        read: what is read of it; ``None`` if it is only notified, as are the following.
        local, prepared, index: both sides of the reads.
        bytes_per_block: for each of its block lists.
    """

    agent: RemoteAgent
    binary: bool
    read: RankRead | None = None
    local: LocalSide | None = None
    prepared: PreparedList | None = None
    index: RegionIndex | None = None
    bytes_per_block: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Incarnation:
    """One start of a remote engine, loaded.

    Attributes:
        name: its name for the lease verifier, never used twice.
        remote: whose incarnation it is.
        metadata: what each rank exports.
        plan: what this rank reads of it.
        ranks: all target ranks.
        has_slots: every rank that is read exports lease slots, and they are watched.
        clock: its owner's clock against the reader's, ``None`` if it was not measured.
        generations: registration generations that requests named and that were confirmed.
        users: ids of the requests that refer to it.
        retired: nothing new may use it.
        gone: its process is known to be dead; nothing can be sent to it.
        touches: READs of `Remotes.prepare`.
    """

    name: str
    remote: Remote
    metadata: dict[int, NixlAgentMetadata]
    plan: ReadPlan
    ranks: dict[int, LoadedRank] = field(default_factory=dict)
    has_slots: bool = False
    clock: ClockOffset | None = None
    generations: set[int] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    retired: bool = False
    gone: bool = False
    touches: list[tuple[Transfer, PreparedList]] = field(default_factory=list)
    agents: list[bytes] = field(default_factory=list)
    slots_forgotten: bool = False


@dataclass(slots=True, eq=False)
class Remote:
    """One engine at one address.

    Attributes:
        key: which.
        current: the incarnation that new requests use.
        closing: one that waits for its last transfer.
        waiting: ids of the requests that wait until it is met, and the registration generation
            that each names.
        meeting: a handshake is under way.
        retry_at: no handshake before this time.
        failures: attempts that failed since the last one that did not.
        error: why the last attempt failed.
        wanted: meet it although no request waits.
        touch: read a little of its memory once it is met.
        releases: to be sent once it is met.
        warned: what was said once.
    """

    key: RemoteKey
    used: float
    current: Incarnation | None = None
    closing: Incarnation | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    meeting: bool = False
    retry_at: float = -math.inf
    failures: int = 0
    error: str = ""
    wanted: bool = False
    touch: bool = False
    releases: list[PendingRelease] = field(default_factory=list)
    warned: bool = False

    @property
    def idle(self) -> bool:
        """Nothing would be lost by forgetting it."""
        current = self.current
        return not (
            self.waiting
            or self.meeting
            or self.wanted
            or self.releases
            or self.closing is not None
            or (current is not None and (current.users or current.touches))
        )


class Met(NamedTuple):
    """A remote is ready for these requests, and may be told of these releases."""

    incarnation: Incarnation
    requests: list[str]
    releases: list[PendingRelease]


class NotMet(NamedTuple):
    """A remote could not be met; the requests that waited for it."""

    remote: Remote
    requests: list[str]
    reason: str
    cause: FailureCause


class Replaced(NamedTuple):
    """An incarnation was found to be replaced by another: what refers to it has failed."""

    incarnation: Incarnation
    reason: str


def _rebased(clock: ClockOffset | None, now: float) -> ClockOffset | None:
    """The offset from our clock, which need not be the one that the handshakes are timed with.

    What passed since the measurement is taken to be nothing, so that deadlines come that much late.
    """
    if clock is None:
        return None
    return replace(clock, offset=clock.offset + clock.measured_at - now, measured_at=now)


class Remotes:
    """All remotes of one reader.

    Args:
        agent: this worker's NIXL agent.
        layout: this rank's KV cache, whose memory is registered.
        verifier: watches lease slots; ``None`` without verification.
        handshakes: asks for metadata; stays the caller's.
        tp_rank, tp_size: this rank, and how many its engine has.
        handshake_timeout: seconds for one handshake.
        idle_timeout: seconds after which a remote that nobody used is unloaded.
        backoff: seconds before the second attempt to meet a remote, and at most between two.
        max_remotes: how many are kept.
        counters: where it is counted what became of remotes.

    Attributes:
        next_eviction: when `step` looks for idle remotes again.
    """

    def __init__(
        self,
        agent: Agent,
        layout: CacheLayout,
        verifier: LeaseVerifier | None,
        handshakes: Handshakes,
        *,
        tp_rank: int,
        tp_size: int,
        handshake_timeout: float,
        idle_timeout: float,
        backoff: tuple[float, float],
        max_remotes: int,
        counters: ReaderCounters,
        clock: Callable[[], float],
    ) -> None:
        if not 0 < backoff[0] <= backoff[1] < math.inf:
            raise ConfigError(f"backoff {backoff} is not (shortest, longest) in seconds")
        if max_remotes < 1:
            raise ConfigError(f"max_remotes {max_remotes} must be at least 1")
        if not idle_timeout > 0:
            raise ConfigError(f"idle_timeout {idle_timeout} is not a positive number of seconds")
        self._counters = counters
        # References name whatever remotes they like.
        self._limiter = LogLimiter(logger, burst=10, clock=clock)
        self._agent = agent
        self._layout = layout
        self._verifier = verifier
        self._handshakes = handshakes
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._handshake_timeout = handshake_timeout
        self._idle_timeout = idle_timeout
        self._backoff = backoff
        self._max_remotes = max_remotes
        self._remotes: OrderedDict[RemoteKey, Remote] = OrderedDict()  # least recently used first
        self._by_engine: dict[str, list[Incarnation]] = {}
        self._to_meet: dict[RemoteKey, Remote] = {}
        self._meeting: dict[PeerAddress, Remote] = {}
        self._closing: list[Incarnation] = []
        self._touching: list[Incarnation] = []
        self._replaced: list[Replaced] = []
        self._local_sides: dict[tuple[bytes, tuple[int, ...], str], LocalSide] = {}
        self._agents: dict[bytes, tuple[RemoteAgent, int]] = {}
        self._scratch: tuple[mmap.mmap, Registration, PreparedList] | None = None
        self._numbers = itertools.count()
        self.next_eviction = math.inf

    def __len__(self) -> int:
        return len(self._remotes)

    @property
    def closing(self) -> int:
        """Incarnations that wait for their last transfer."""
        return len(self._closing)

    # asking for one

    def get(self, key: RemoteKey, now: float) -> Remote | None:
        """The remote of that key, new if need be; ``None`` when there are too many in use."""
        remote = self._remotes.get(key)
        if remote is None:
            if len(self._remotes) >= self._max_remotes and not self._evict_oldest_idle(now):
                return None
            remote = self._remotes[key] = Remote(key, now)
            self.next_eviction = min(self.next_eviction, now + self._idle_timeout)
            return remote
        remote.used = now
        self._remotes.move_to_end(key)
        return remote

    def ready(self, remote: Remote, generation: int) -> Incarnation | None:
        """What a request that names this registration generation may use at once."""
        current = remote.current
        if current is None:
            return None
        if not current.generations:  # met before any request named one
            current.generations.add(generation)
        return current if generation in current.generations else None

    def wait(self, remote: Remote, req_id: str, generation: int) -> None:
        """Have the request reported by `step` when the remote was met, or could not be."""
        remote.waiting[req_id] = generation
        self.meet(remote)

    def meet(self, remote: Remote) -> None:
        """Begin a handshake, as soon as the last one and the backoff allow it."""
        if not remote.meeting:
            self._to_meet[remote.key] = remote

    def release_later(self, remote: Remote, release: PendingRelease) -> None:
        """Have the release sent once the remote was met; dropped if it cannot be."""
        if len(remote.releases) < _MAX_PENDING_RELEASES:
            remote.releases.append(release)
        self.meet(remote)

    def ranks_of(self, engine_id: str) -> list[RemoteRank]:
        """The loaded ranks of all remotes of that id."""
        return [
            RemoteRank(rank.agent.name, rank.binary)
            for incarnation in self._by_engine.get(engine_id, ())
            for rank in incarnation.ranks.values()
        ]

    # driving

    @property
    def busy(self) -> bool:
        """Whether `step` has more to do than to look at the time."""
        return bool(
            self._to_meet or self._meeting or self._closing or self._touching or self._replaced
        )

    @property
    def meeting(self) -> bool:
        """Whether a handshake is under way or due.

        Not what waits for transfers in flight: a peer that hangs never ends those, and a caller
        that steps for as long as this holds would do so for ever.
        """
        return bool(self._meeting) or any(r.closing is None for r in self._to_meet.values())

    def step(self, now: float) -> list[Met | NotMet | Replaced]:
        """Move everything on."""
        events: list[Met | NotMet | Replaced] = []
        if self._touching:
            self._poll_touches()
        if self._closing:
            self._closing = [i for i in self._closing if not self._unload(i)]
        if self._to_meet:
            self._start_handshakes(now, events)
        if self._meeting:
            for outcome in self._handshakes.poll(0.0):
                self._take_outcome(outcome, now, events)
        if self._replaced:
            events.extend(self._replaced)
            self._replaced.clear()
        if now >= self.next_eviction:
            self._evict(now)
        return events

    def _start_handshakes(self, now: float, events: list[Met | NotMet | Replaced]) -> None:
        for key, remote in list(self._to_meet.items()):
            if not (remote.waiting or remote.releases or remote.wanted):
                del self._to_meet[key]  # nobody wants it any more
                continue
            if remote.closing is not None or now < remote.retry_at or key.address in self._meeting:
                continue
            del self._to_meet[key]
            engine_id, host, port = key.address
            try:
                ranks = target_ranks(self._tp_rank, self._tp_size, key.tp_size)
                started = self._handshakes.start(
                    engine_id,
                    host,
                    port,
                    [(0, rank) for rank in ranks],
                    timeout=self._handshake_timeout,
                )
            except (KvNixlError, ValueError) as error:
                self._failed(remote, str(error), now, events)
                continue
            if not started:  # the caller uses the client too
                remote.retry_at = now + _ADDRESS_TAKEN_PAUSE_S
                self._to_meet[key] = remote
                continue
            remote.meeting = True
            self._meeting[key.address] = remote

    def _take_outcome(
        self, outcome: HandshakeOutcome, now: float, events: list[Met | NotMet | Replaced]
    ) -> None:
        remote = self._meeting.pop(outcome.peer, None)
        if remote is None:
            return
        remote.meeting = False
        if remote.closing is not None:  # retired meanwhile: what is loaded must go first
            self.meet(remote)
            return
        if isinstance(outcome, HandshakeFailed):
            not_allowed = isinstance(outcome.error, RemoteNotAllowedError)
            cause = FailureCause.NOT_ALLOWED if not_allowed else FailureCause.HANDSHAKE
            self._failed(remote, str(outcome.error), now, events, cause)
            return
        metadata = {tp_rank: opened.metadata for (_, tp_rank), opened in outcome.ranks.items()}
        if remote.current is not None:
            # Asked again because a request names another registration generation.
            if remote.current.metadata != metadata:
                self.retire(remote.current, f"{remote.key} was restarted or registered anew")
                self.meet(remote)
                return
            remote.current.clock = _rebased(outcome.clock, now) or remote.current.clock
            self._succeeded(remote, remote.current, now, events)
            return
        try:
            incarnation = self._load(remote, metadata)
        except Exception as failure:
            # What a peer exports may be wrong in ways that only NIXL finds.
            reason = str(failure)
            if not isinstance(failure, KvNixlError):
                reason = f"{type(failure).__name__}: {failure}"
                logger.exception("%s could not be loaded", remote.key)
            self._failed(remote, reason, now, events)
            return
        incarnation.clock = _rebased(outcome.clock, now)
        remote.current = incarnation
        self._by_engine.setdefault(remote.key.address.engine_id, []).append(incarnation)
        self._counters.remotes_met += 1
        self._succeeded(remote, incarnation, now, events)
        if remote.touch:
            self._touch(incarnation)
            remote.touch = False

    def _succeeded(
        self,
        remote: Remote,
        incarnation: Incarnation,
        now: float,
        events: list[Met | NotMet | Replaced],
    ) -> None:
        waiting, remote.waiting = remote.waiting, {}
        releases, remote.releases = remote.releases, []
        if len(incarnation.generations) + len(waiting) > _MAX_GENERATIONS:
            incarnation.generations.clear()
        incarnation.generations.update(waiting.values())
        remote.wanted = False
        remote.used = now
        self._remotes.move_to_end(remote.key)
        remote.failures = 0
        remote.error = ""
        # Requests that name ever other generations do not make it ask all the time.
        remote.retry_at = now + self._backoff[0]
        events.append(Met(incarnation, list(waiting), releases))

    def _failed(
        self,
        remote: Remote,
        reason: str,
        now: float,
        events: list[Met | NotMet | Replaced],
        cause: FailureCause = FailureCause.HANDSHAKE,
    ) -> None:
        first, longest = self._backoff
        remote.retry_at = now + min(first * 2.0 ** min(remote.failures, 60), longest)
        remote.failures += 1
        remote.error = reason
        remote.wanted = remote.touch = False
        remote.releases.clear()
        waiting, remote.waiting = remote.waiting, {}
        self._counters.remotes_not_met += 1
        self._limiter.warning("not met", "%s could not be met: %s", remote.key, reason)
        events.append(NotMet(remote, list(waiting), reason, cause))

    # loading

    def _load(self, remote: Remote, metadata: dict[int, NixlAgentMetadata]) -> Incarnation:
        layouts = {
            rank: layout_from_metadata(
                m, self._layout, packing="" if m.kvnixl is None else m.kvnixl.packing
            )
            for rank, m in metadata.items()
        }
        for exported in metadata.values():
            check_parallel_sizes(
                remote_dcp_size=exported.dcp_size, remote_pcp_size=exported.pcp_size
            )
        plan = plan_reads(
            self._layout,
            layouts,
            tp_rank=self._tp_rank,
            tp_size=self._tp_size,
            remote_tp_size=remote.key.tp_size,
        )
        name = f"{remote.key.address.engine_id}#{next(self._numbers)}"
        incarnation = Incarnation(name, remote, metadata, plan)
        try:
            reads = {read.remote_rank: read for read in plan.reads}
            for rank in plan.ranks:
                self._load_rank(incarnation, rank, reads.get(rank))
            if self._verifier is not None:
                self._watch_slots(incarnation, self._verifier)
        except BaseException:
            incarnation.retired = True
            remote.closing = incarnation
            self._closing.append(incarnation)
            raise
        return incarnation

    def _load_rank(self, incarnation: Incarnation, rank: int, read: RankRead | None) -> None:
        exported = incarnation.metadata[rank]
        agent = self._share_agent(incarnation, exported.agent_metadata)
        loaded = LoadedRank(agent, binary=exported.kvnixl is not None)
        incarnation.ranks[rank] = loaded
        self._agent.make_connection(agent)
        if read is None:
            return
        loaded.local = self._share_local_side(read)
        loaded.prepared = self._agent.prep_xfer_dlist(
            agent, strided_descs(read.remote_rows), read.remote_mem_type
        )
        loaded.index = RegionIndex(read.remote_rows, list(read.row_groups))
        bytes_per_block = [0] * len(read.block_lists)
        for length, number in zip(read.local_rows[:, 1].tolist(), read.row_groups, strict=True):
            bytes_per_block[number] += length
        loaded.bytes_per_block = tuple(bytes_per_block)
        loaded.read = read

    def _share_agent(self, incarnation: Incarnation, metadata: bytes) -> RemoteAgent:
        """Load an agent, unless it is loaded: loading it again would disturb its transfers."""
        agent, owners = self._agents.get(metadata, (None, 0))
        if agent is None:
            agent = self._agent.add_remote_agent(metadata)
        self._agents[metadata] = (agent, owners + 1)
        incarnation.agents.append(metadata)
        return agent

    def _share_local_side(self, read: RankRead) -> LocalSide:
        key = (read.local_rows.tobytes(), read.row_groups, read.local_mem_type)
        side = self._local_sides.get(key)
        if side is None:
            prepared = self._agent.prep_xfer_dlist(
                LOCAL_SIDE, strided_descs(read.local_rows), read.local_mem_type
            )
            side = LocalSide(prepared, RegionIndex(read.local_rows, list(read.row_groups)), key)
            self._local_sides[key] = side
        side.users += 1
        return side

    def _watch_slots(self, incarnation: Incarnation, verifier: LeaseVerifier) -> None:
        read_ranks = [rank for rank in incarnation.ranks.values() if rank.read is not None]
        exported = [incarnation.metadata[rank.read.remote_rank] for rank in read_ranks if rank.read]
        slots = [m.kvnixl.lease_slots if m.kvnixl is not None else None for m in exported]
        if any(region is None for region in slots):
            return
        for rank, region in zip(read_ranks, slots, strict=True):
            assert rank.read is not None
            assert region is not None
            # One strided row: a peer may export millions of slots.
            words = (region.base_addr, LEASE_SLOT_BYTES, LEASE_SLOT_BYTES, region.num_slots, 0)
            prepared = self._agent.prep_xfer_dlist(rank.agent, strided_descs([words]))
            verifier.add_remote(incarnation.name, rank.read.remote_rank, prepared, region.num_slots)
        incarnation.has_slots = True

    # touching

    def _touch(self, incarnation: Incarnation) -> None:
        """Read a byte of each region, so that connections and pages are there when it counts."""
        try:
            scratch = self._scratch_list()
            for rank in incarnation.ranks.values():
                if rank.read is None:
                    continue
                rows = rank.read.remote_rows
                step = -(-len(rows) // _MAX_TOUCHES)
                rows = rows[::step]
                descs = np.ascontiguousarray(
                    np.stack([rows[:, 0], np.ones(len(rows), np.uint64), rows[:, 4]], axis=1)
                )
                prepared = self._agent.prep_xfer_dlist(rank.agent, descs, rank.read.remote_mem_type)
                ids = np.arange(len(rows), dtype=np.int32)
                try:
                    transfer = self._agent.make_prepped_xfer("READ", scratch, ids, prepared, ids)
                except AgentError:
                    prepared.close()
                    raise
                incarnation.touches.append((transfer, prepared))
                transfer.post()
        except AgentError as error:
            logger.info("%s could not be touched: %s", incarnation.remote.key, error)
        if incarnation.touches:
            self._touching.append(incarnation)

    def _scratch_list(self) -> PreparedList:
        if self._scratch is None:
            memory = mmap.mmap(-1, mmap.PAGESIZE)
            base = np.frombuffer(memory, np.uint8).ctypes.data
            registration = self._agent.register_memory([(base, _MAX_TOUCHES, 0)])
            descs = np.zeros((_MAX_TOUCHES, 3), np.uint64)
            descs[:, 0] = np.uint64(base) + np.arange(_MAX_TOUCHES, dtype=np.uint64)
            descs[:, 1] = 1
            try:
                prepared = self._agent.prep_xfer_dlist(LOCAL_SIDE, descs)
            except AgentError:
                registration.close()
                raise
            self._scratch = (memory, registration, prepared)
        return self._scratch[2]

    def _poll_touches(self) -> None:
        for incarnation in list(self._touching):
            left = []
            for transfer, prepared in incarnation.touches:
                if (transfer.closed or transfer.over()) and transfer.close():
                    prepared.close()
                else:
                    left.append((transfer, prepared))
            incarnation.touches = left
            if not left:
                self._touching.remove(incarnation)

    # letting go

    def retire(self, incarnation: Incarnation, reason: str = "", *, gone: bool = False) -> None:
        """Let nothing new use it, and unload it when nothing refers to it any more.

        With a reason, what refers to it is reported as failed by the next `step`.
        """
        incarnation.gone |= gone
        if reason and incarnation.users:
            self._replaced.append(Replaced(incarnation, reason))
        if incarnation.retired:
            return
        incarnation.retired = True
        self._counters.remotes_retired += 1
        remote = incarnation.remote
        remote.current = None
        remote.closing = incarnation
        same_id = self._by_engine[remote.key.address.engine_id]
        same_id.remove(incarnation)
        if not same_id:
            del self._by_engine[remote.key.address.engine_id]
        self._closing.append(incarnation)

    def _unload(self, incarnation: Incarnation) -> bool:
        """Give back what is loaded of it, as far as that is possible now; whether all is."""
        if incarnation.users or incarnation.touches:
            return False
        if self._verifier is not None:
            if not incarnation.slots_forgotten:
                incarnation.slots_forgotten = True
                self._verifier.release_engine(incarnation.name)
            if incarnation.name in self._verifier.busy_engines():
                return False
        for rank in incarnation.ranks.values():
            if rank.prepared is not None:
                rank.prepared.close()
            if rank.local is not None:
                rank.local.users -= 1
                if not rank.local.users:
                    rank.local.prepared.close()
                    del self._local_sides[rank.local.key]
                rank.local = None
        while incarnation.agents:
            metadata = incarnation.agents.pop()
            agent, owners = self._agents.pop(metadata)
            if owners > 1:
                self._agents[metadata] = (agent, owners - 1)
            else:
                agent.close()
        # A remote agent that NIXL has not let go would be in the way of its successor.
        for rank in incarnation.ranks.values():
            if rank.agent.closed and not rank.agent.released:
                return False
        if incarnation.remote.closing is incarnation:
            incarnation.remote.closing = None
        return True

    def _evict(self, now: float) -> None:
        """Unload what was not used for a while: the least recently used come first."""
        self.next_eviction = math.inf
        while self._remotes:
            remote = next(iter(self._remotes.values()))
            if remote.used + self._idle_timeout > now:
                self.next_eviction = remote.used + self._idle_timeout
                return
            if remote.idle:
                self._forget(remote, now)
            else:
                remote.used = now
                self._remotes.move_to_end(remote.key)

    def _evict_oldest_idle(self, now: float) -> bool:
        # Bounded, so that a flood of new addresses does not search through all that are in use.
        for remote in list(itertools.islice(self._remotes.values(), 64)):
            if remote.idle:
                self._forget(remote, now)
                return len(self._remotes) < self._max_remotes
            remote.used = now
            self._remotes.move_to_end(remote.key)
        return False

    def _forget(self, remote: Remote, now: float) -> None:
        current = remote.current
        if current is not None:
            self._counters.remotes_evicted += 1
            self.retire(current)
            if not self._unload(current):
                # Kept until it is unloaded, so that it is not met again before.
                remote.used = now
                self._remotes.move_to_end(remote.key)
                return
            self._closing.remove(current)
        del self._remotes[remote.key]
        self._to_meet.pop(remote.key, None)

    def close(self) -> bool:
        """Let all go. True once nothing is left; call it again after more steps otherwise."""
        for address, remote in self._meeting.items():
            self._handshakes.cancel(address)
            remote.meeting = False
        self._meeting.clear()
        self._to_meet.clear()
        for remote in list(self._remotes.values()):
            remote.releases.clear()
            remote.waiting.clear()
            if remote.current is not None:
                self.retire(remote.current)
        self._remotes.clear()
        if self._touching:
            self._poll_touches()
        self._closing = [i for i in self._closing if not self._unload(i)]
        if self._closing:
            return False
        if self._scratch is not None:
            memory, registration, prepared = self._scratch
            self._scratch = None
            prepared.close()
            if not registration.close():
                _undead.append(memory)
        return True
