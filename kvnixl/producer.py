"""The side that computed the blocks: what it promises, to whom, and when a promise ends.

* `Producer` belongs to one worker. It registers the worker's memory, exports what readers need
  (`Producer.metadata`), holds requests until all readers said that they are through, and reports
  every request that ended exactly once, after its lease slot was cleared and fenced. From then on
  the request's blocks may be reused.
* `EmbeddedProducer` adds the scheduler's half for a server that has both in one process: it hands
  out leases and turns a finished prefill into a *reference*, a dictionary of JSON values that is
  everything a reader needs.

Who may end a lease. A notification between kvnixl peers names the lease, slot and nonce, so that
only a reader that was given the lease can end it. A stock vLLM knows request ids only; its text
notifications are believed unless ``stock_peers`` is off. Notifications may come early, late, twice,
in any order, or be nonsense: each of those is counted on its own and frees nothing.

Nothing here starts a thread or reads the environment. An object is used from one thread at a time.
"""

from __future__ import annotations

import enum
import logging
import math
import operator
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from kvnixl.deadlines import Deadlines
from kvnixl.errors import BlockListError, ClosedError, ConfigError, WireError
from kvnixl.leases import LEASE_SLOT_BYTES, LeaseSlotAllocator, ProducerLeaseSlots
from kvnixl.metadata import (
    LEASE_PARAM,
    MAX_BLOCK_IDS,
    MAX_LEASE_SLOTS,
    MAX_REQUEST_ID_BYTES,
    PROMPT_PARAM,
    KvNixlExtension,
    Lease,
    LeaseSlotRegion,
    NixlAgentMetadata,
    NixlHandshakePayload,
    PromptDigest,
    format_lease,
)
from kvnixl.wire import (
    MAX_CONSUMERS,
    Completion,
    Heartbeat,
    Outcome,
    SequenceTracker,
    encode_agent_metadata,
    encode_handshake_payload,
    parse_notification,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvnixl.compat import CompatibilityCheck
    from kvnixl.layout import CacheLayout

    BlockIdList: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

__all__ = [
    "DEFAULT_LEASE_DURATION_S",
    "DEFAULT_MAX_PARKED",
    "DEFAULT_NUM_LEASE_SLOTS",
    "DEFAULT_PARK_S",
    "LEASE_SLOTS_FEATURE",
    "EmbeddedProducer",
    "EndedLease",
    "LeaseOutcome",
    "Producer",
    "ProducerAgent",
    "ProducerCounters",
    "SideChannel",
    "transfer_reference",
]

logger = logging.getLogger(__name__)

DEFAULT_LEASE_DURATION_S = 30.0
DEFAULT_NUM_LEASE_SLOTS = 4096
DEFAULT_PARK_S = 30.0
DEFAULT_MAX_PARKED = 4096
LEASE_SLOTS_FEATURE = "lease_slots"

# Ended leases and request ids that are remembered, to tell late notifications from early ones.
_MAX_REMEMBERED = 1 << 16
_DRAIN_INTERVAL_S = 0.001


class LeaseOutcome(enum.StrEnum):
    """How a lease ended."""

    READ = "read"
    """Every consumer has read the blocks."""
    RELEASED = "released"
    """Every consumer is through, and at least one of them without having read the blocks."""
    EXPIRED = "expired"
    """The deadline passed."""
    ABORTED = "aborted"
    """The owner took the promise back."""


class EndedLease(NamedTuple):
    """A request whose blocks may be reused."""

    req_id: str
    outcome: LeaseOutcome


@dataclass(slots=True)
class ProducerCounters:
    """What happened since the producer was made, one counter per cause.

    ``held`` is the sum of ``read``, ``released``, ``expired``, ``aborted`` and the requests that
    are held now. A completion is counted once for each lease or request id that it names.

    Attributes:
        held: requests that were held.
        read, released, expired, aborted: requests that ended, by `LeaseOutcome`.
        completions: completions that counted for a request.
        failed_completions: those of them whose reader tried and failed.
        early_completions: those of them that came before the request was held.
        duplicate_completions: from a sender that counted for the request before.
        late_completions: of a lease or request that has ended.
        unknown_completions: set aside, but the request was not held in time.
        dropped_completions: set aside, but more came than are kept.
        refused_completions: by request id, for a request with a lease (see ``stock_peers``).
        heartbeats: renewals, one for each request.
        unknown_heartbeats: renewals of what is not held.
        malformed: notifications that cannot be read.
        push_registrations: registrations of push mode, which this producer does not serve.
        drain_errors: NIXL could not say what arrived.
        internal_errors: unexpected exceptions; each also logged.
    """

    held: int = 0
    read: int = 0
    released: int = 0
    expired: int = 0
    aborted: int = 0
    completions: int = 0
    failed_completions: int = 0
    early_completions: int = 0
    duplicate_completions: int = 0
    late_completions: int = 0
    unknown_completions: int = 0
    dropped_completions: int = 0
    refused_completions: int = 0
    heartbeats: int = 0
    unknown_heartbeats: int = 0
    malformed: int = 0
    push_registrations: int = 0
    drain_errors: int = 0
    internal_errors: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class _Registration(Protocol):
    def close(self) -> bool: ...


class ProducerAgent(Protocol):
    """The calls of `kvnixl.agent.Agent` that a producer makes."""

    def register_memory(
        self, regions: Sequence[tuple[int, int, int]], mem_type: Literal["DRAM", "VRAM"] = "DRAM"
    ) -> _Registration: ...
    def get_agent_metadata(self) -> bytes: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


_Sender = tuple[str, int | None]  # NIXL agent name, number of the worker's start if it said one
_Key = Lease | str  # what a completion names


class _Held:
    """One request whose blocks must stay put."""

    __slots__ = ("all_read", "consumers", "lease", "req_id", "senders")

    def __init__(self, req_id: str, consumers: int) -> None:
        self.req_id = req_id
        self.consumers = consumers
        self.lease: Lease | None = None
        self.senders: set[_Sender] | None = None  # made when the first of several consumers is done
        self.all_read = True


class _Part(NamedTuple):
    """One sender's completion of one key."""

    sender: _Sender
    outcome: Outcome
    consumers: int


@dataclass(slots=True)
class _Parked:
    """Completions of something that is not held yet."""

    until: float
    parts: dict[_Sender, _Part] = field(default_factory=dict)


class Producer:
    """Holds the requests of one worker until their readers are through.

    In every step of the worker, before any block that was released may be written again::

        producer.update(lease_clears, lease_arms)  # what the scheduler decided
        producer.hold(req_id, remaining_seconds)   # for each request that finished its prefill
        for ended in producer.step():
            ...  # the blocks of ended.req_id may be reused

    Readers and this worker never compare clocks: a deadline is this clock plus what was left, and
    only this clock judges it. A step first counts what has arrived, then lets leases expire.

    Args:
        agent: the worker's NIXL agent. The producer takes all its notifications.
        layout: the worker's KV cache, with ``layout.memory``.
        engine_id: id of the engine that the worker belongs to.
        num_lease_slots: lease slots to export; 0 exports none, and no read can be verified.
        factors: JSON text of the compatibility factors (``CompatibilityCheck.factors_text``).
        incarnation: number of this start of the engine, the same for all its workers; by default a
            random one.
        lease_duration: seconds that a heartbeat extends to, from its receipt. A reader may ask for
            less, not for more.
        stock_peers: believe a stock vLLM's completions, which name only a request id, also for
            requests with a lease. With ``False`` only a reader that knows the lease can end it.
        park_seconds: how long a completion of an unknown request is kept.
        max_parked: how many of them are kept; the oldest are dropped.
        clock: seconds, monotonic; only differences count.

    Attributes:
        counters: what happened, per cause.
        incarnation: see above.
        closed: whether `close` was called.

    Raises:
        ConfigError: a number is out of range, or the layout describes no memory of this process.
        RegistrationError: NIXL refused the memory; nothing stays registered.
    """

    def __init__(
        self,
        agent: ProducerAgent,
        layout: CacheLayout,
        *,
        engine_id: str,
        num_lease_slots: int = DEFAULT_NUM_LEASE_SLOTS,
        factors: str | None = None,
        incarnation: int | None = None,
        lease_duration: float = DEFAULT_LEASE_DURATION_S,
        stock_peers: bool = True,
        park_seconds: float = DEFAULT_PARK_S,
        max_parked: int = DEFAULT_MAX_PARKED,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not lease_duration > 0:
            raise ConfigError(f"lease_duration must be above 0 seconds, not {lease_duration}")
        if not park_seconds >= 0 or max_parked < 0:
            raise ConfigError(
                f"park_seconds {park_seconds} and max_parked {max_parked} must not be negative"
            )
        if not 0 <= num_lease_slots <= MAX_LEASE_SLOTS:
            raise ConfigError(f"num_lease_slots {num_lease_slots} is not in 0 .. {MAX_LEASE_SLOTS}")
        if incarnation is not None and not 0 < incarnation < 1 << 63:
            raise ConfigError(f"incarnation {incarnation} is not in 1 .. 2**63 - 1")
        if not layout.memory:
            raise ConfigError(
                "the layout names no memory to register: build it from this worker's own tensors "
                "or addresses, not from a peer's metadata"
            )
        self.counters = ProducerCounters()
        self.incarnation = 1 + secrets.randbelow(2**63 - 1) if incarnation is None else incarnation
        self.closed = False
        self._agent = agent
        self._layout = layout
        self._engine_id = engine_id
        self._factors = factors
        self._lease_duration = lease_duration
        self._stock_peers = stock_peers
        self._park_seconds = park_seconds
        self._max_parked = max_parked
        self._clock = clock
        self._slots = ProducerLeaseSlots(num_lease_slots) if num_lease_slots else None
        self._held: dict[str, _Held] = {}
        self._by_lease: dict[Lease, _Held] = {}
        self._armed: dict[str, Lease] = {}  # leases of requests that are not held yet
        self._deadlines: Deadlines[str] = Deadlines()
        self._ended: dict[str, LeaseOutcome] = {}  # not reported yet
        self._remembered: OrderedDict[_Key, None] = OrderedDict()
        self._parked: OrderedDict[_Key, _Parked] = OrderedDict()
        self._num_parked = 0
        self._sequences = SequenceTracker()
        self._notifs_fail = False
        self._registrations: list[_Registration] = []
        try:
            self._register()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        kinds: dict[Literal["DRAM", "VRAM"], list[tuple[int, int, int]]] = {}
        for memory in self._layout.memory:
            row = (memory.base, memory.length, memory.device_id)
            kinds.setdefault(memory.mem_type, []).append(row)
        for mem_type, rows in kinds.items():
            self._registrations.append(self._agent.register_memory(rows, mem_type))
        if self._slots is not None:
            row = (self._slots.base_addr, self._slots.num_slots * LEASE_SLOT_BYTES, 0)
            self._registrations.append(self._agent.register_memory([row], "DRAM"))

    # --- what readers need ---

    def metadata(self) -> NixlAgentMetadata:
        """What this worker exports in a handshake."""
        slots = None
        if self._slots is not None:
            slots = LeaseSlotRegion(self._slots.base_addr, self._slots.num_slots)
        return NixlAgentMetadata(
            engine_id=self._engine_id,
            agent_metadata=self._agent.get_agent_metadata(),
            ssm_sizes=(0, 0),
            kvnixl=KvNixlExtension(
                features=[] if slots is None else [LEASE_SLOTS_FEATURE],
                incarnation=self.incarnation,
                lease_slots=slots,
                factors=self._factors,
                packing=self._layout.packing,
            ),
            **self._layout.metadata_fields(),
        )

    # --- what the scheduler decides ---

    def update(
        self, lease_clears: Collection[str], lease_arms: Mapping[str, tuple[int, int]]
    ) -> None:
        """Apply one step of the scheduler: clears first, then arms; both are visible on return.

        The scheduler's `LeaseSlotAllocator` gives them out the other way round::

            arms, clears = allocator.take_updates()
            producer.update(clears, arms)

        Blocks that the scheduler freed together with a clear may be written from here on. A clear
        of a held request revokes its lease only: the request stays held until `abort` or its end.

        Args:
            lease_clears: request ids; unknown ones are ignored.
            lease_arms: request id -> ``(slot, nonce)``. A request that holds a lease loses it.

        Raises:
            TypeError: ``lease_arms`` is no mapping, as when both are swapped; nothing changed.
            IndexError, ValueError: a slot or a nonce is out of range.
            ConfigError: there are arms, but this worker exports no slots.
            ClosedError: after `close`, when there is something to arm.
        """
        if not isinstance(lease_arms, Mapping):
            raise TypeError(
                f"lease_arms must be a mapping, not {type(lease_arms).__name__}: after `arms, "
                "clears = allocator.take_updates()` call update(clears, arms)"
            )
        slots = self._slots
        if slots is None:
            if lease_arms:
                raise ConfigError(
                    "the scheduler leases slots, but this worker exports none: give both the same "
                    "kv_lease_slots"
                )
            return
        slots.update(lease_clears, lease_arms)
        slots.publish()
        for req_id in lease_clears:
            self._armed.pop(req_id, None)
        for req_id, (slot, nonce) in lease_arms.items():
            held = self._held.get(req_id)
            if held is None:
                self._armed[req_id] = Lease(slot, nonce)
            else:
                self._give(held, Lease(slot, nonce))

    def hold(
        self,
        req_id: str,
        remaining_seconds: float,
        consumers: int = 1,
        lease: tuple[int, int] | None = None,
    ) -> None:
        """Keep the request's blocks until its readers are through, or the time is over.

        Args:
            req_id: the request.
            remaining_seconds: what is left of the lease, from now; not a time. 0 or less ends it in
                the next step, unless its readers are through by then; ``math.inf`` never.
            consumers: how many senders have to say that they are through. A notification that
                names more raises the number, none lowers it.
            lease: ``(slot, nonce)``, if it was not armed with `update`.

        Raises:
            ValueError: the request is held already or its end was not reported yet, or a number is
                out of range; nothing changed.
            ClosedError: after `close`.
            ConfigError, IndexError: see `update`.
        """
        if self.closed:
            raise ClosedError("hold: the producer was closed")
        if req_id in self._held:
            raise ValueError(f"request {req_id!r} is held already: abort it first")
        if req_id in self._ended:
            raise ValueError(f"request {req_id!r} ended, but was not reported yet: step first")
        if not 1 <= consumers <= MAX_CONSUMERS:
            raise ValueError(f"{consumers} consumers are not in 1 .. {MAX_CONSUMERS}")
        if math.isnan(remaining_seconds):
            raise ValueError("remaining_seconds is NaN: give seconds, or math.inf for no limit")
        if lease is not None:
            self.update((), {req_id: lease})
        held = self._held[req_id] = _Held(req_id, consumers)
        self._deadlines.add(req_id, self._clock() + remaining_seconds)
        self.counters.held += 1
        armed = self._armed.pop(req_id, None)
        if armed is not None:
            self._give(held, armed)
        self._take_parked(held, req_id)

    def abort(self, req_id: str) -> bool:
        """Take the promise back. The next `step` reports the request, unless it ended before.

        Returns:
            Whether the request was held. An unknown or ended one is no error.
        """
        held = self._held.get(req_id)
        if held is not None:
            self._end(held, LeaseOutcome.ABORTED)
            return True
        if self._armed.pop(req_id, None) is not None and self._slots is not None:
            self._slots.clear(req_id)
        return False

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._held

    def held_requests(self) -> list[str]:
        """The requests that are held."""
        return list(self._held)

    def next_check(self) -> float | None:
        """A time on ``clock`` before which nothing expires; ``None`` if nothing is held. For a
        caller that sleeps between steps."""
        return self._deadlines.next_check()

    # --- a step ---

    def step(self) -> list[EndedLease]:
        """Count what arrived, let leases expire, and report what ended since the last step.

        Nothing that a peer sent raises.

        Returns:
            Each request once, after its slot was cleared and every reader can see that: its blocks
            may be reused.
        """
        if not self.closed:
            self._receive_all()
            now = self._clock()
            for req_id in self._deadlines.expired(now):
                self._end(self._held[req_id], LeaseOutcome.EXPIRED)
            if self._parked:
                self._give_up_parked(now)
            if self._slots is not None:
                self._slots.publish()
        return self._take_ended() if self._ended else []

    def close(self) -> list[EndedLease]:
        """Revoke every lease, fence, and deregister the memory. The agent stays the caller's.

        Closing again gives back what NIXL refused to take before.

        Returns:
            What ended and was not reported yet; requests that were held have been aborted.
        """
        self.closed = True
        for held in list(self._held.values()):
            self._end(held, LeaseOutcome.ABORTED)
        if self._slots is not None:
            self._slots.close()
        self._armed.clear()
        self._parked.clear()
        self._num_parked = 0
        self._registrations = [reg for reg in self._registrations if not reg.close()]
        if self._registrations:
            # NIXL may still serve reads of the slots, so their memory has to outlive this object.
            if self not in _unfinished:
                _unfinished.append(self)
            logger.error(
                "%d registrations of engine %r could not be given back to NIXL; their memory must "
                "stay allocated",
                len(self._registrations),
                self._engine_id,
            )
        elif self in _unfinished:
            _unfinished.remove(self)
        return self._take_ended()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- leases ---

    def _give(self, held: _Held, lease: Lease) -> None:
        self._forget_lease(held)
        held.lease = lease
        self._by_lease[lease] = held
        self._take_parked(held, lease)

    def _forget_lease(self, held: _Held) -> None:
        if held.lease is not None:
            if self._by_lease.get(held.lease) is held:
                del self._by_lease[held.lease]
            self._remember(held.lease)

    def _end(self, held: _Held, outcome: LeaseOutcome) -> None:
        req_id = held.req_id
        del self._held[req_id]
        self._deadlines.remove(req_id)
        self._forget_lease(held)
        if self._slots is not None:
            self._slots.clear(req_id)
        self._remember(req_id)
        counters = self.counters
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        self._ended[req_id] = outcome

    def _take_ended(self) -> list[EndedLease]:
        ended, self._ended = self._ended, {}
        return [EndedLease(req_id, outcome) for req_id, outcome in ended.items()]

    def _remember(self, key: _Key) -> None:
        self._remembered[key] = None
        self._remembered.move_to_end(key)
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    # --- notifications ---

    def _receive_all(self) -> None:
        try:
            arrived = self._agent.get_new_notifs()
            if not arrived:
                return
            now = self._clock()
            for agent_name, messages in arrived.items():
                for message in messages:
                    self._receive(agent_name, message, now)
        except Exception as error:
            self.counters.drain_errors += 1
            if not self._notifs_fail:
                logger.warning(
                    "notifications of engine %r cannot be read: %s", self._engine_id, error
                )
            self._notifs_fail = True
        else:
            self._notifs_fail = False

    def _receive(self, agent_name: str, message: bytes, now: float) -> None:
        try:
            notification = parse_notification(message)
            if isinstance(notification, Completion):
                self._complete(agent_name, notification, now)
            elif isinstance(notification, Heartbeat):
                self._renew(notification, now)
            else:
                self.counters.push_registrations += 1
        except WireError as error:
            self.counters.malformed += 1
            logger.debug("notification from %r ignored: %s", agent_name, error)
        except Exception:
            self.counters.internal_errors += 1
            logger.exception("a notification from %r could not be handled", agent_name)

    def _complete(self, agent_name: str, completion: Completion, now: float) -> None:
        sender = (agent_name, completion.sender)
        part = _Part(sender, completion.outcome, completion.consumers)
        for lease in completion.leases:
            held = self._by_lease.get(lease)
            if held is None:
                self._park(lease, part, now)
            else:
                self._count(held, part)
        if not completion.request_ids:
            return
        # A request id may be used again, a lease never is. So only here a repeated message could
        # end a later request, and sequence numbers have to keep it out.
        if completion.sequence is not None and not self._sequences.accept(
            sender, completion.sequence
        ):
            self.counters.duplicate_completions += len(completion.request_ids)
            return
        for req_id in completion.request_ids:
            held = self._held.get(req_id)
            if held is None:
                self._park(req_id, part, now)
            else:
                self._count_by_id(held, part)

    def _count_by_id(self, held: _Held, part: _Part) -> None:
        """A kvnixl peer that was given the lease names it; only a stock peer cannot."""
        is_stock = part.sender[1] is None
        if held.lease is not None and not (is_stock and self._stock_peers):
            self.counters.refused_completions += 1
        else:
            self._count(held, part)

    def _count(self, held: _Held, part: _Part) -> None:
        counters = self.counters
        if held.senders is not None and part.sender in held.senders:
            counters.duplicate_completions += 1
            return
        counters.completions += 1
        if part.outcome is not Outcome.DONE:
            held.all_read = False
            counters.failed_completions += part.outcome is Outcome.FAILED
        held.consumers = max(held.consumers, part.consumers)
        if held.consumers > 1:
            if held.senders is None:
                held.senders = set()
            held.senders.add(part.sender)
            if len(held.senders) < held.consumers:
                return
        self._end(held, LeaseOutcome.READ if held.all_read else LeaseOutcome.RELEASED)

    def _renew(self, heartbeat: Heartbeat, now: float) -> None:
        seconds = self._lease_duration
        if heartbeat.extension is not None:
            seconds = min(seconds, heartbeat.extension)
        named = [self._by_lease.get(lease) for lease in heartbeat.leases]
        named += [self._held.get(req_id) for req_id in heartbeat.request_ids]
        for held in named:
            if held is None:
                self.counters.unknown_heartbeats += 1
            else:
                self._deadlines.extend(held.req_id, now + seconds)
                self.counters.heartbeats += 1

    # --- completions before their time ---

    def _park(self, key: _Key, part: _Part, now: float) -> None:
        if key in self._remembered:
            self.counters.late_completions += 1
            return
        parked = self._parked.get(key)
        if parked is None:
            parked = self._parked[key] = _Parked(now + self._park_seconds)
        elif part.sender in parked.parts:
            self.counters.duplicate_completions += 1
            return
        parked.parts[part.sender] = part
        self._num_parked += 1
        while self._num_parked > self._max_parked:
            _, oldest = self._parked.popitem(last=False)
            self._num_parked -= len(oldest.parts)
            self.counters.dropped_completions += len(oldest.parts)

    def _take_parked(self, held: _Held, key: _Key) -> None:
        parked = self._parked.pop(key, None)
        if parked is None:
            return
        self._num_parked -= len(parked.parts)
        for part in parked.parts.values():
            if held.req_id not in self._held:
                self.counters.late_completions += 1
                continue
            before = self.counters.completions
            if isinstance(key, str):
                self._count_by_id(held, part)
            else:
                self._count(held, part)
            self.counters.early_completions += self.counters.completions - before

    def _give_up_parked(self, now: float) -> None:
        while self._parked:
            key, parked = next(iter(self._parked.items()))
            if parked.until > now:
                return
            del self._parked[key]
            self._num_parked -= len(parked.parts)
            self.counters.unknown_completions += len(parked.parts)


# Closed producers whose memory NIXL still has registered.
_unfinished: list[Producer] = []


# --- scheduler and worker in one process ----------------------------------------------------------


def transfer_reference(
    *,
    engine_id: str,
    req_id: str,
    block_ids: Sequence[BlockIdList],
    num_tokens: int,
    address: tuple[str, int],
    expires_at: float | None,
    lease: tuple[int, int] | None = None,
    tp_size: int = 1,
    dcp_size: int = 1,
    pp_size: int = 1,
    registration_generation: int | None = None,
    prompt: PromptDigest | None = None,
) -> dict[str, Any]:
    """Everything a reader needs to fetch a request, as JSON values.

    The keys are those of vLLM's ``kv_transfer_params``, and ``kvnixl_lease`` if there is a lease,
    ``kvnixl_prompt`` if the prompt is known.

    Args:
        engine_id: the engine that holds the blocks.
        req_id: its id of the request.
        block_ids: logical block ids per cache group.
        num_tokens: tokens whose KV the blocks hold.
        address: (host, port) of its side channel.
        expires_at: when the lease ends, on the clock that the side channel sends; ``None`` if it
            is kept alive by heartbeats and no reader should decide by it.
        lease: ``(slot, nonce)``.
        tp_size, dcp_size, pp_size: how the engine is sharded.
        registration_generation: another number for each start of an engine that keeps its id and
            address, so that a reader that knows an earlier start meets the engine again; below
            2**53, which JSON carries everywhere.
        prompt: of which prompt the blocks are, so that a reader of another one can tell.
    """
    reference: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[int(block) for block in group] for group in block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": req_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": tp_size,
        "dcp_size": dcp_size,
        "pp_size": pp_size,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": expires_at,
        "transfer_mode": "pull",
    }
    if registration_generation is not None:
        reference["remote_registration_generation"] = registration_generation
    if lease is not None:
        reference[LEASE_PARAM] = format_lease(*lease)
    if prompt is not None:
        reference[PROMPT_PARAM] = str(prompt)
    return reference


class SideChannel(Protocol):
    """What `EmbeddedProducer` uses of a `kvnixl.handshake.HandshakeServer`."""

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def running(self) -> bool: ...
    def publish(self, payloads: Mapping[tuple[int, int], bytes]) -> None: ...
    def start(self, payloads: Mapping[tuple[int, int], bytes] | None = None) -> None: ...
    def close(self) -> None: ...


class EmbeddedProducer:
    """The whole producing side of a server whose scheduler and only worker share a process.

    The prefill side, complete; `kvnixl.Reader` shows the other one::

        import time
        import numpy as np
        from kvnixl import Agent, CompatibilityCheck, EmbeddedProducer, HandshakeServer
        from kvnixl import layout_from_tensors

        kv = np.zeros((64, 8, 16, 128), np.float16)     # blocks, KV heads, tokens, head size
        layout = layout_from_tensors({"layer.0": kv}, num_kv_heads=8)
        compat = CompatibilityCheck({"model": "my-model", "dtype": "fp16"})  # equal on both sides
        agent = Agent.open()
        server = HandshakeServer("127.0.0.1", 0)        # the address that readers are told
        producer = EmbeddedProducer(agent, layout, compat=compat, server=server)

        kv[[3, 4, 5]] = 1                               # the prefill
        send(producer.offer("req-1", [[3, 4, 5]], num_tokens=40))  # JSON for the decode side
        while len(producer):
            time.sleep(0.001)
            for ended in producer.step():               # in every step of your server
                print(ended.req_id, ended.outcome)      # its blocks may be reused
        producer.close()
        agent.close()

    A server with several workers has a `LeaseSlotAllocator` in its scheduler and one `Producer` in
    each worker instead, and builds references with `transfer_reference`.

    Args:
        agent: the NIXL agent, not closed by this class.
        layout: the KV cache, with ``layout.memory``.
        compat: the factors that a reader's `kvnixl.compat.CompatibilityCheck` must have too
            (model, dtype, ...), or its handshake fails.
        server: a `kvnixl.HandshakeServer` on the address that readers are told, port 0 for a free
            one. Serves the handshake payload; started here unless it runs, and closed by `close`.
        address: (host, port) that readers are told instead, when the caller serves `payload`
            itself.
        engine_id: what readers know this start of the engine by; every reference names it, and the
            handshake must confirm it. By default a random one, so that a restarted engine is not
            taken for the one before. A server that also reads gives the same one to its `Reader`.
        num_lease_slots: requests that can be under a lease at once. More are offered without one,
            and their readers decide whether to read unverified.
        lease_duration: seconds that an offer holds, and that a heartbeat extends to.
        clock: seconds, monotonic; the clock that the side channel sends.
        wait: sleeps that many seconds, in `drain` only.
        options: further arguments of `Producer`.

    Attributes:
        producer: the worker's half.
        engine_id: see above.

    Raises:
        ConfigError: a number is out of range, or not exactly one of server and address is given.
        RegistrationError, SideChannelBindError: nothing stays registered or bound.
    """

    def __init__(
        self,
        agent: ProducerAgent,
        layout: CacheLayout,
        *,
        compat: CompatibilityCheck,
        server: SideChannel | None = None,
        address: tuple[str, int] | None = None,
        engine_id: str | None = None,
        num_lease_slots: int = DEFAULT_NUM_LEASE_SLOTS,
        lease_duration: float = DEFAULT_LEASE_DURATION_S,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], object] = time.sleep,
        **options: Any,
    ) -> None:
        if (server is None) == (address is None):
            raise ConfigError("give either a server or the address of one that serves payload()")
        self.engine_id = str(uuid.uuid4()) if engine_id is None else engine_id
        self._layout = layout
        self._compat = compat
        self._server = server
        self._lease_duration = lease_duration
        self._clock = clock
        self._wait = wait
        self._draining = False
        self._offered: set[str] = set()  # and not reported as ended yet
        self._generation = time.time_ns() // 1000  # another one for each start
        self._allocator: LeaseSlotAllocator | None = None
        self.producer = Producer(
            agent,
            layout,
            engine_id=self.engine_id,
            num_lease_slots=num_lease_slots,
            factors=compat.factors_text,
            lease_duration=lease_duration,
            clock=clock,
            **options,
        )
        if num_lease_slots:
            self._allocator = LeaseSlotAllocator(num_lease_slots)
        try:
            if server is not None:
                self._serve(server)
                address = server.address
        except BaseException:
            self.close()
            raise
        assert address is not None
        self._address = address

    def _serve(self, server: SideChannel) -> None:
        payloads = {(0, 0): self.payload()}
        if server.running:
            server.publish(payloads)
        else:
            server.start(payloads)

    def payload(self) -> bytes:
        """The handshake payload, encoded, of rank (0, 0)."""
        return encode_handshake_payload(
            NixlHandshakePayload(self._compat.hash, encode_agent_metadata(self.producer.metadata()))
        )

    @property
    def counters(self) -> ProducerCounters:
        """What happened, per cause."""
        return self.producer.counters

    def __len__(self) -> int:
        """Requests whose blocks must stay put."""
        return len(self._offered)

    def offer(
        self,
        req_id: str,
        block_ids: Sequence[BlockIdList],
        num_tokens: int,
        consumers: int = 1,
        lease_duration: float | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Promise the blocks of a finished prefill to its readers.

        Args:
            req_id: the request, unique until it was reported as ended.
            block_ids: logical block ids per cache group.
            num_tokens: tokens whose KV the blocks hold.
            consumers: how many readers will fetch it; the lease ends after all of them.
            lease_duration: seconds, instead of the usual ones. Heartbeats extend the lease, but not
                what a reader that cannot check it is told (``remote_blocks_expiry_time``).
            prompt_token_ids: the prompt; readers that say theirs are then refused the blocks of
                another one. Only a digest is given out.

        Returns:
            The reference for the readers: see `transfer_reference`. Without ``kvnixl_lease`` when
            all slots are in use.

        Raises:
            ValueError: the request was offered already, or an argument is out of range.
            BlockListError: the lists do not fit the layout.
            ClosedError: after `drain` or `close`.
        """
        if self._draining or self.producer.closed:
            raise ClosedError(f"offer of {req_id!r}: the producer is closing down")
        if req_id in self._offered:
            raise ValueError(f"request {req_id!r} was offered already and has not ended")
        if not 1 <= len(req_id.encode()) <= MAX_REQUEST_ID_BYTES:
            raise ValueError(f"a request id has 1 .. {MAX_REQUEST_ID_BYTES} bytes of UTF-8")
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, not {num_tokens}")
        if not 1 <= consumers <= MAX_CONSUMERS:
            raise ValueError(f"{consumers} consumers are not in 1 .. {MAX_CONSUMERS}")
        duration = self._lease_duration if lease_duration is None else lease_duration
        if not 0 < duration < math.inf:
            raise ValueError(f"lease_duration must be a positive number of seconds, not {duration}")
        blocks = self._checked_blocks(req_id, block_ids)
        prompt = None if prompt_token_ids is None else PromptDigest.of(prompt_token_ids)
        lease = None
        if self._allocator is not None:
            lease = self._allocator.acquire(req_id)
            arms, clears = self._allocator.take_updates()
            self.producer.update(clears, arms)
        # Read before the lease starts: a reader must not believe that it lasts longer.
        expires_at = self._clock() + duration
        self._offered.add(req_id)
        self.producer.hold(req_id, duration, consumers)
        return transfer_reference(
            engine_id=self.engine_id,
            req_id=req_id,
            block_ids=blocks,
            num_tokens=num_tokens,
            address=self._address,
            expires_at=expires_at,
            lease=lease,
            registration_generation=self._generation,
            prompt=prompt,
        )

    def _checked_blocks(self, req_id: str, block_ids: Sequence[BlockIdList]) -> list[list[int]]:
        groups = len(self._layout.groups)
        if len(block_ids) != groups:
            raise BlockListError(
                f"request {req_id!r}: {len(block_ids)} block lists for {groups} cache groups"
            )
        try:
            blocks = [[operator.index(block) for block in group] for group in block_ids]
        except TypeError:
            raise BlockListError(
                f"request {req_id!r}: block_ids are lists of integers, one list per cache group"
            ) from None
        if sum(map(len, blocks)) > MAX_BLOCK_IDS:
            raise BlockListError(f"request {req_id!r}: more than {MAX_BLOCK_IDS} block ids")
        for number, group in enumerate(blocks):
            limit = self._layout.num_blocks(number)
            for block in group:
                if not 0 <= block < limit:
                    raise BlockListError(
                        f"request {req_id!r}: block {block} of cache group {number} is not in "
                        f"0 .. {limit - 1}"
                    )
        return blocks

    def step(self) -> list[EndedLease]:
        """What ended since the last step; those blocks may be reused. See `Producer.step`."""
        return self._reported(self.producer.step())

    def cancel(self, req_id: str) -> bool:
        """Take an offer back. The next `step` reports it, unless it ended before.

        Returns:
            Whether the request was held. An unknown or ended one is no error.
        """
        return self.producer.abort(req_id)

    def drain(self, timeout: float) -> list[EndedLease]:
        """Take no more offers and step until every lease ended; then revoke what is left.

        Waits between the steps. A server with a loop of its own calls `stop_offers` and goes on
        stepping until the producer is empty.

        Args:
            timeout: seconds from now, after which the rest is aborted; 0 does so at once.

        Returns:
            What ended.
        """
        self.stop_offers()
        until = self._clock() + timeout
        ended = self.step()
        while len(self.producer) and self._clock() < until:
            self._wait(_DRAIN_INTERVAL_S)
            ended += self.step()
        for req_id in self.producer.held_requests():
            self.producer.abort(req_id)
        return ended + self.step()

    def stop_offers(self) -> None:
        """From now on `offer` raises `ClosedError`."""
        self._draining = True

    def close(self) -> list[EndedLease]:
        """Stop the side channel, revoke every lease, fence, and deregister the memory.

        Closing twice is fine. `drain` first lets readers finish.

        Returns:
            What ended and was not reported yet.
        """
        self._draining = True
        if self._server is not None:
            self._server.close()
        return self._reported(self.producer.close())

    def _reported(self, ended: list[EndedLease]) -> list[EndedLease]:
        for req_id, _ in ended:
            self._offered.discard(req_id)
            if self._allocator is not None:
                # The worker cleared the word; the slot may be armed again.
                self._allocator.release(req_id, clear=False)
        return ended

    def __enter__(self) -> EmbeddedProducer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
