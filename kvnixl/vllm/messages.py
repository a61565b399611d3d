"""What the scheduler and the workers of one engine tell each other in every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvnixl.metadata import NixlConnectorMetadata, ReqId
from kvnixl.vllm.adapter import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = [
    "KvNixlConnectorMetadata",
    "KvNixlHandshakeMetadata",
    "KvNixlWorkerMetadata",
    "ReadRequest",
]


@dataclass(slots=True)
class ReadRequest:
    """A request whose blocks the workers are to read, or to give back unread.

    The reference goes to the workers as it came, because `kvnixl.reader.Reader` checks it: what is
    wrong with it fails this request and no other.

    Attributes:
        reference: the request's ``kv_transfer_params``.
        local_block_ids: for each cache group the logical blocks to fill; no blocks: nothing is
            read, and the producer is told that its blocks are not needed.
        num_computed_blocks: for each cache group the logical blocks before those.
        num_tokens: tokens that the remote blocks must hold.
        awaited: the scheduler holds the request until it is reported as received.
        refused: why it cannot be read at all; ``""`` if it can.
    """

    reference: Mapping[str, Any]
    local_block_ids: tuple[list[int], ...] = ()
    num_computed_blocks: tuple[int, ...] = ()
    num_tokens: int | None = None
    awaited: bool = False
    refused: str = ""


class KvNixlConnectorMetadata(NixlConnectorMetadata, KVConnectorMetadata):
    """One step of the scheduler, for the workers.

    Attributes:
        reads: request id -> what to read. (``reqs_to_recv`` is not used: see `ReadRequest`.)
        reads_to_abort: requests whose read is not wanted any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[ReqId, ReadRequest] = {}
        self.reads_to_abort: set[ReqId] = set()


@dataclass
class KvNixlWorkerMetadata(KVConnectorWorkerMetadata):
    """One step of a worker, for the scheduler.

    Attributes:
        heard: ids of remote engines that showed that they are alive.
        busy: the worker has work that no request of the scheduler stands for, such as telling an
            engine that is not met yet that its blocks are not needed: the engine must go on
            stepping.
    """

    heard: set[str] = field(default_factory=set)
    busy: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvNixlWorkerMetadata)
        return KvNixlWorkerMetadata(self.heard | other.heard, self.busy or other.busy)


@dataclass
class KvNixlHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What one worker exports: an encoded `kvnixl.metadata.NixlHandshakePayload`."""

    payload: bytes
