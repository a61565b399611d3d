"""What becomes of a request that a reader reads: its stages, its outcome, and the counters."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvnixl.topology import UnfilledTokens

__all__ = ["FailureCause", "ReadOutcome", "ReaderCounters", "Stage", "Telemetry"]


class Stage(enum.StrEnum):
    """Where a request is. The last three are ends."""

    HANDSHAKE = "waiting for the handshake"
    QUEUED = "queued"
    READING = "reading"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


class FailureCause(enum.StrEnum):
    """Why a request failed; one counter each."""

    REFERENCE = "bad reference"
    PROMPT = "other prompt"
    NOT_ALLOWED = "remote not allowed"
    TOO_MANY_REMOTES = "too many remotes"
    HANDSHAKE = "handshake"
    BLOCKS = "block lists"
    NO_LEASE = "no lease"
    POST = "posting"
    TRANSFER = "transfer"
    DISCONNECTED = "peer disconnected or restarted"
    LEASE_ENDED = "not verified"
    TIMEOUT = "timeout"


class Telemetry(NamedTuple):
    """What NIXL measured of one transfer.

    Attributes:
        desc_count: descriptors left after merging.
        total_bytes: of the transfer.
        post_us: duration of the posting call, microseconds.
        xfer_us: from posting to completion, microseconds.
    """

    desc_count: int
    total_bytes: int
    post_us: float
    xfer_us: float


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """The end of a request. Its blocks belong to the caller again.

    Attributes:
        req_id: the request.
        stage: `Stage.DONE`, `Stage.FAILED` or `Stage.ABORTED`.
        verified: done, and the blocks were promised from before the first byte was read to after
            the last; also when there was nothing to read.
        cause, reason: why it failed; ``None`` and ``""`` otherwise.
        ended_in: the stage in which it ended.
        num_bytes: bytes that were asked for.
        num_descs: descriptors that were posted for them, after merging.
        num_descs_before: pairs of local and remote pieces that they were merged from.
        transfers: NIXL's figures of the transfers that were done, as far as it measured them.
        seconds: time spent in each stage.
        unfilled: tokens of its blocks that the remote blocks do not have.
    """

    req_id: str
    stage: Stage
    verified: bool = False
    cause: FailureCause | None = None
    reason: str = ""
    ended_in: Stage = Stage.HANDSHAKE
    num_bytes: int = 0
    num_descs: int = 0
    num_descs_before: int = 0
    transfers: tuple[Telemetry, ...] = ()
    seconds: Mapping[Stage, float] = field(default_factory=dict)
    unfilled: tuple[UnfilledTokens, ...] = ()

    @property
    def done(self) -> bool:
        return self.stage is Stage.DONE


@dataclass(slots=True)
class ReaderCounters:
    """What the reader did, one counter per cause.

    Attributes:
        verified, unverified: requests that are done.
        failed: requests that failed, by cause.
        aborted: requests that were aborted.
        bytes_read, descs_posted: of requests that are done, and of all.
        notifications: sent alone.
        notifications_failed: could not be sent alone; the owner's lease ends by its deadline.
        notifications_inexpressible: request ids that a stock peer would misread.
        remotes_met, remotes_not_met: remote engines that were loaded, and attempts that failed.
        remotes_retired: incarnations that were given up, for an error, a restart or idleness.
        remotes_evicted: those of them that were idle.
    """

    verified: int = 0
    unverified: int = 0
    failed: Counter[FailureCause] = field(default_factory=Counter)
    aborted: int = 0
    bytes_read: int = 0
    descs_posted: int = 0
    notifications: int = 0
    notifications_failed: int = 0
    notifications_inexpressible: int = 0
    remotes_met: int = 0
    remotes_not_met: int = 0
    remotes_retired: int = 0
    remotes_evicted: int = 0
