"""Keeping leases alive: which requests to renew, and the messages that do it.

Two parts, because a scheduler knows the requests and its workers hold the NIXL agents:

* `HeartbeatTracker` (scheduler) knows every request whose blocks a remote engine holds for us, from
  the moment it arrives until it finished, failed or was aborted. Once per interval it hands out
  what to renew, grouped by remote engine.
* `HeartbeatSender` (worker) turns that into notifications, one set per rank of the remote engine.

A renewal carries durations only: the owner adds them to its own clock. Nothing here reads a clock
or starts a thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvnixl.metadata import (
    MAX_REQUEST_ID_BYTES,
    EngineId,
    HeartbeatInfo,
    Lease,
    ReqId,
    TransferParams,
)
from kvnixl.wire import encode_heartbeat, encode_text_heartbeat

__all__ = [
    "HEARTBEATS_PER_LEASE",
    "MAX_HEARTBEAT_BYTES",
    "HeartbeatReport",
    "HeartbeatSender",
    "HeartbeatTracker",
    "RemoteRank",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEATS_PER_LEASE = 6
"""Heartbeats in one lease duration: five may be lost or late before a lease ends."""

MAX_HEARTBEAT_BYTES = 7 * 1024
"""Where a heartbeat is split.

NIXL names no limit for a notification. With NIXL 1.5.1 over UCX (shared memory and TCP) every size
up to 256 MiB arrives, but it is copied and assembled whole: 8 KiB takes the sender 11 us, 32 KiB
already 30-90 us and 1 MiB 2 ms. 8 KiB is also the length of one segment of UCX's TCP transport and
of one fragment of NIXL's libfabric backend. The rest of those 8 KiB is left to their headers and
to the agent's name. A single request id that is longer than this travels alone.
"""

_GIVE_UP_LEASES = 20
_MAX_BACKOFF_INTERVALS = 64
_TEXT_OVERHEAD = len("HB:")
_BINARY_OVERHEAD = 32
_BINARY_LEASE_BYTES = 12
_BINARY_ID_OVERHEAD = 2


class _Address(NamedTuple):
    """Where a request says that its remote engine is, and how that engine is sharded."""

    engine_id: EngineId
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int


class _Tracked(NamedTuple):
    remote_request_id: ReqId
    lease: Lease | None


@dataclass(slots=True)
class _Group:
    """The requests that agree on a remote engine's address."""

    heard_at: float
    requests: dict[ReqId, _Tracked] = field(default_factory=dict)


class HeartbeatTracker:
    """Requests whose leases a remote engine holds for this one. Scheduler side.

    Args:
        lease_duration: seconds that the remote engines grant; the interval is a sixth of it.
        give_up_after: seconds without `answered` after which an engine's requests are no longer
            renewed; 20 lease durations by default, ``math.inf`` for never.

    Attributes:
        interval: seconds between two heartbeats.
        given_up: requests that were dropped because their engine never answered.
    """

    def __init__(self, lease_duration: float, *, give_up_after: float | None = None) -> None:
        if not (0 < lease_duration < math.inf):
            raise ValueError(f"lease_duration {lease_duration} is not a positive number of seconds")
        if give_up_after is None:
            give_up_after = _GIVE_UP_LEASES * lease_duration
        if not give_up_after > lease_duration:
            raise ValueError(
                f"give_up_after {give_up_after} is not longer than a lease of {lease_duration} s"
            )
        self.interval = lease_duration / HEARTBEATS_PER_LEASE
        self.given_up = 0
        self._give_up_after = give_up_after
        self._groups: dict[_Address, _Group] = {}
        self._address_of: dict[ReqId, _Address] = {}
        self._next_at = -math.inf

    def __len__(self) -> int:
        """Tracked requests."""
        return len(self._address_of)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._address_of

    def start(self, req_id: ReqId, params: TransferParams, now: float) -> bool:
        """Renew this request's lease from the next heartbeat on. Call it as soon as the request is
        known, not when it is scheduled: a lease runs while the request waits.

        Args:
            req_id: this engine's request id.
            params: the request's transfer parameters.
            now: seconds.

        Returns:
            Whether there is something to renew: the parameters name blocks to read and say where.
        """
        self.stop(req_id)
        if (
            not params.do_remote_prefill
            or params.remote_engine_id is None
            or params.remote_request_id is None
            or params.remote_host is None
            or params.remote_port is None
            or params.tp_size is None
        ):
            return False
        address = _Address(
            params.remote_engine_id,
            params.remote_host,
            params.remote_port,
            params.tp_size,
            params.dcp_size or 1,
            params.pp_size or 1,
        )
        group = self._groups.get(address)
        if group is None:
            group = self._groups[address] = _Group(heard_at=now)
        group.requests[req_id] = _Tracked(params.remote_request_id, params.lease)
        self._address_of[req_id] = address
        return True

    def stop(self, req_id: ReqId) -> bool:
        """The request finished, failed or was aborted. Returns whether it was tracked; unknown ids
        are no error."""
        address = self._address_of.pop(req_id, None)
        if address is None:
            return False
        group = self._groups[address]
        del group.requests[req_id]
        if not group.requests:
            del self._groups[address]
        return True

    def answered(self, engine_id: EngineId, now: float) -> None:
        """The engine showed that it is alive: a handshake or a read from it succeeded."""
        for address, group in self._groups.items():
            if address.engine_id == engine_id:
                group.heard_at = now

    def take_due(self, now: float) -> dict[EngineId, HeartbeatInfo]:
        """What to renew now: once per interval everything, else nothing.

        Where requests disagree about an engine's address, which a client can bring about, all are
        renewed wherever an engine of that id was met. The address that most of them name is the one
        that is given, for an engine that was not met yet.
        """
        if now < self._next_at or not self._groups:
            return {}
        self._next_at = now + self.interval
        self._drop_silent(now)
        chosen: dict[EngineId, _Address] = {}
        requests: dict[EngineId, list[_Tracked]] = {}
        for address, group in self._groups.items():
            requests.setdefault(address.engine_id, []).extend(group.requests.values())
            best = chosen.get(address.engine_id)
            if best is None or len(group.requests) > len(self._groups[best].requests):
                chosen[address.engine_id] = address
        return {
            engine_id: _heartbeat_info(address, requests[engine_id])
            for engine_id, address in chosen.items()
        }

    def _drop_silent(self, now: float) -> None:
        silent = [
            (address, group)
            for address, group in self._groups.items()
            if now - group.heard_at >= self._give_up_after
        ]
        for address, group in silent:
            del self._groups[address]
            for req_id in group.requests:
                del self._address_of[req_id]
            self.given_up += len(group.requests)
            logger.warning(
                "Engine %r at %s:%d has not answered for %.0f s: the leases of %d waiting "
                "request(s) are no longer renewed. Check that it runs, and that its side channel "
                "can be reached from here.",
                address.engine_id,
                address.host,
                address.port,
                now - group.heard_at,
                len(group.requests),
            )


def _heartbeat_info(address: _Address, requests: Iterable[_Tracked]) -> HeartbeatInfo:
    info = HeartbeatInfo(
        req_ids=set(),
        host=address.host,
        port=address.port,
        tp_size=address.tp_size,
        dcp_size=address.dcp_size,
        pp_size=address.pp_size,
    )
    disputed = set()
    for remote_request_id, lease in requests:
        known = remote_request_id in info.req_ids
        if known and info.leases.get(remote_request_id) != lease:
            # Two requests claim different leases for one remote request: its id decides.
            disputed.add(remote_request_id)
        info.req_ids.add(remote_request_id)
        if lease is not None:
            info.leases[remote_request_id] = lease
    for remote_request_id in disputed:
        info.leases.pop(remote_request_id, None)
    return info


class RemoteRank(NamedTuple):
    """One rank of a remote engine that a handshake made known.

    Attributes:
        agent: its NIXL agent's name.
        binary: whether it understands kvnixl's binary notifications; a stock vLLM does not.
    """

    agent: str
    binary: bool


class HeartbeatReport(NamedTuple):
    """What one `HeartbeatSender.send` did.

    Attributes:
        messages: notifications handed to NIXL.
        to_connect: engines without a finished handshake that are worth a try now.
        failed: (engine id, agent name, error) for each rank that NIXL could not notify.
        unsendable: request ids that have no form the receiving rank understands.
    """

    messages: int
    to_connect: list[EngineId]
    failed: list[tuple[EngineId, str, Exception]]
    unsendable: int


_NOTHING = HeartbeatReport(0, [], [], 0)


@dataclass(slots=True)
class _Backoff:
    """Handshake attempts with an engine that has not answered yet."""

    attempts: int
    not_before: float


class HeartbeatSender:
    """Sends the heartbeats of one worker.

    Args:
        lease_duration: seconds by which a renewal asks to extend, from its receipt.
        send_notif: ``send_notif(agent name, message)``; what it raises counts as a failure of
            that rank only.
        sender: number of this worker's start, in binary notifications.
        next_sequence: gives this worker's next notification number.
        max_message_bytes: longest message, except for a single longer request id.
    """

    def __init__(
        self,
        lease_duration: float,
        send_notif: Callable[[str, bytes], object],
        *,
        sender: int,
        next_sequence: Callable[[], int],
        max_message_bytes: int = MAX_HEARTBEAT_BYTES,
    ) -> None:
        if max_message_bytes < 64:
            raise ValueError(f"max_message_bytes {max_message_bytes} is less than 64")
        self._lease_duration = lease_duration
        self._interval = lease_duration / HEARTBEATS_PER_LEASE
        self._send_notif = send_notif
        self._sender = sender
        self._next_sequence = next_sequence
        self._max_message_bytes = max_message_bytes
        self._backoff: dict[EngineId, _Backoff] = {}

    def send(
        self,
        heartbeats: Mapping[EngineId, HeartbeatInfo],
        ranks_of: Callable[[EngineId], Sequence[RemoteRank] | None],
        now: float,
    ) -> HeartbeatReport:
        """Renew what the scheduler handed out.

        Args:
            heartbeats: the outcome of `HeartbeatTracker.take_due`; empty in most steps.
            ranks_of: the ranks of an engine whose handshake is done, else ``None``.
            now: seconds.
        """
        if not heartbeats:
            return _NOTHING
        messages = unsendable = 0
        to_connect: list[EngineId] = []
        failed: list[tuple[EngineId, str, Exception]] = []
        for engine_id in self._backoff.keys() - heartbeats.keys():
            del self._backoff[engine_id]
        for engine_id, info in heartbeats.items():
            ranks = ranks_of(engine_id)
            if ranks is None:
                if self._may_connect(engine_id, now):
                    to_connect.append(engine_id)
                continue
            self._backoff.pop(engine_id, None)
            encoded: dict[bool, list[bytes]] = {}
            for rank in ranks:
                if rank.binary not in encoded:
                    encoded[rank.binary], skipped = self._encode(info, rank.binary)
                    unsendable += skipped
                try:
                    for message in encoded[rank.binary]:
                        self._send_notif(rank.agent, message)
                        messages += 1
                except Exception as error:
                    failed.append((engine_id, rank.agent, error))
        return HeartbeatReport(messages, to_connect, failed, unsendable)

    def _may_connect(self, engine_id: EngineId, now: float) -> bool:
        """At first in every interval, then half as often each time."""
        backoff = self._backoff.setdefault(engine_id, _Backoff(0, now))
        if now < backoff.not_before:
            return False
        intervals = min(2**backoff.attempts, _MAX_BACKOFF_INTERVALS)
        backoff.attempts += 1
        # Half an interval less, so that jitter in the caller's steps does not skip one.
        backoff.not_before = now + (intervals - 0.5) * self._interval
        return True

    def _encode(self, info: HeartbeatInfo, binary: bool) -> tuple[list[bytes], int]:
        """The messages for one rank, and how many ids could not be put into one."""
        if not binary:
            sized = _sized_ids(info.req_ids, forbidden=",")
            room = self._max_message_bytes - _TEXT_OVERHEAD
            texts = [encode_text_heartbeat(part) for part in _split(sized, room, 1)]
            return texts, len(info.req_ids) - len(sized)
        room = self._max_message_bytes - _BINARY_OVERHEAD
        leases = [(lease, _BINARY_LEASE_BYTES) for lease in info.leases.values()]
        messages = [self._encode_part(leases=part) for part in _split(leases, room, 0)]
        unleased = info.req_ids - info.leases.keys()
        sized = _sized_ids(unleased)
        messages += [
            self._encode_part(request_ids=part) for part in _split(sized, room, _BINARY_ID_OVERHEAD)
        ]
        return messages, len(unleased) - len(sized)

    def _encode_part(
        self, leases: Sequence[Lease] = (), request_ids: Sequence[ReqId] = ()
    ) -> bytes:
        return encode_heartbeat(
            self._lease_duration,
            sender=self._sender,
            sequence=self._next_sequence(),
            leases=leases,
            request_ids=request_ids,
        )


def _sized_ids(req_ids: Iterable[ReqId], forbidden: str | None = None) -> list[tuple[ReqId, int]]:
    """The ids that a heartbeat can carry, each with its length in bytes."""
    sized = []
    for req_id in req_ids:
        try:
            length = len(req_id.encode())
        except UnicodeEncodeError:
            continue
        if forbidden is not None and forbidden in req_id:
            continue
        if 1 <= length <= MAX_REQUEST_ID_BYTES:
            sized.append((req_id, length))
    return sized


def _split(items: Iterable[tuple[T, int]], room: int, overhead: int) -> Iterator[list[T]]:
    """Parts whose lengths plus ``overhead`` each sum up to at most ``room``; none is empty."""
    part: list[T] = []
    used = 0
    for item, length in items:
        if part and used + length + overhead > room:
            yield part
            part, used = [], 0
        part.append(item)
        used += length + overhead
    if part:
        yield part
