"""kvnixl moves the KV cache of large language models between inference engines over NVIDIA NIXL
and proves after every read that the blocks were not reused while they were read.

Importing the package is cheap: the names below are resolved on first use, so none of numpy, nixl,
zmq, torch or vllm is imported by ``import kvnixl``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvnixl._fence import memory_fence as memory_fence
    from kvnixl.agent import Agent as Agent
    from kvnixl.compat import CompatibilityCheck as CompatibilityCheck
    from kvnixl.compat import compute_nixl_compatibility_hash as compute_nixl_compatibility_hash
    from kvnixl.deadlines import Deadlines as Deadlines
    from kvnixl.handshake import HandshakeClient as HandshakeClient
    from kvnixl.handshake import HandshakeServer as HandshakeServer
    from kvnixl.heartbeat import HeartbeatSender as HeartbeatSender
    from kvnixl.heartbeat import HeartbeatTracker as HeartbeatTracker
    from kvnixl.layout import CacheGroup as CacheGroup
    from kvnixl.layout import CacheLayout as CacheLayout
    from kvnixl.layout import MemoryRange as MemoryRange
    from kvnixl.layout import PackedMember as PackedMember
    from kvnixl.layout import Region as Region
    from kvnixl.layout import layout_from_addresses as layout_from_addresses
    from kvnixl.layout import layout_from_metadata as layout_from_metadata
    from kvnixl.layout import layout_from_tensors as layout_from_tensors
    from kvnixl.leases import LeaseSlotAllocator as LeaseSlotAllocator
    from kvnixl.leases import LeaseVerifier as LeaseVerifier
    from kvnixl.leases import ProducerLeaseSlots as ProducerLeaseSlots
    from kvnixl.leases import lease_slot_descs as lease_slot_descs
    from kvnixl.metadata import HeartbeatInfo as HeartbeatInfo
    from kvnixl.metadata import KvNixlExtension as KvNixlExtension
    from kvnixl.metadata import Lease as Lease
    from kvnixl.metadata import LeaseSlotRegion as LeaseSlotRegion
    from kvnixl.metadata import NixlAgentMetadata as NixlAgentMetadata
    from kvnixl.metadata import NixlConnectorMetadata as NixlConnectorMetadata
    from kvnixl.metadata import NixlHandshakePayload as NixlHandshakePayload
    from kvnixl.metadata import PushRegistration as PushRegistration
    from kvnixl.metadata import RemoteMeta as RemoteMeta
    from kvnixl.metadata import ReqMeta as ReqMeta
    from kvnixl.metadata import TransferParams as TransferParams
    from kvnixl.outcomes import FailureCause as FailureCause
    from kvnixl.outcomes import ReadOutcome as ReadOutcome
    from kvnixl.outcomes import Stage as Stage
    from kvnixl.producer import EmbeddedProducer as EmbeddedProducer
    from kvnixl.producer import EndedLease as EndedLease
    from kvnixl.producer import LeaseOutcome as LeaseOutcome
    from kvnixl.producer import Producer as Producer
    from kvnixl.producer import transfer_reference as transfer_reference
    from kvnixl.reader import Reader as Reader
    from kvnixl.topology import BlockPairs as BlockPairs
    from kvnixl.topology import RankRead as RankRead
    from kvnixl.topology import ReadPlan as ReadPlan
    from kvnixl.topology import UnfilledTokens as UnfilledTokens
    from kvnixl.topology import check_parallel_sizes as check_parallel_sizes
    from kvnixl.topology import consumer_count as consumer_count
    from kvnixl.topology import heads_of_rank as heads_of_rank
    from kvnixl.topology import plan_reads as plan_reads
    from kvnixl.topology import target_ranks as target_ranks
    from kvnixl.transport import CancelMode as CancelMode
    from kvnixl.transport import DataTransport as DataTransport
    from kvnixl.transport import NixlTransport as NixlTransport
    from kvnixl.transport import PollResult as PollResult

# public name -> module that defines it
_EXPORTS = {
    "memory_fence": "kvnixl._fence",
    "Agent": "kvnixl.agent",
    "CompatibilityCheck": "kvnixl.compat",
    "compute_nixl_compatibility_hash": "kvnixl.compat",
    "Deadlines": "kvnixl.deadlines",
    "HandshakeClient": "kvnixl.handshake",
    "HandshakeServer": "kvnixl.handshake",
    "HeartbeatSender": "kvnixl.heartbeat",
    "HeartbeatTracker": "kvnixl.heartbeat",
    "CacheGroup": "kvnixl.layout",
    "CacheLayout": "kvnixl.layout",
    "MemoryRange": "kvnixl.layout",
    "PackedMember": "kvnixl.layout",
    "Region": "kvnixl.layout",
    "layout_from_addresses": "kvnixl.layout",
    "layout_from_metadata": "kvnixl.layout",
    "layout_from_tensors": "kvnixl.layout",
    "LeaseSlotAllocator": "kvnixl.leases",
    "LeaseVerifier": "kvnixl.leases",
    "ProducerLeaseSlots": "kvnixl.leases",
    "lease_slot_descs": "kvnixl.leases",
    "HeartbeatInfo": "kvnixl.metadata",
    "KvNixlExtension": "kvnixl.metadata",
    "Lease": "kvnixl.metadata",
    "LeaseSlotRegion": "kvnixl.metadata",
    "NixlAgentMetadata": "kvnixl.metadata",
    "NixlConnectorMetadata": "kvnixl.metadata",
    "NixlHandshakePayload": "kvnixl.metadata",
    "PushRegistration": "kvnixl.metadata",
    "RemoteMeta": "kvnixl.metadata",
    "ReqMeta": "kvnixl.metadata",
    "TransferParams": "kvnixl.metadata",
    "FailureCause": "kvnixl.outcomes",
    "ReadOutcome": "kvnixl.outcomes",
    "Stage": "kvnixl.outcomes",
    "EmbeddedProducer": "kvnixl.producer",
    "EndedLease": "kvnixl.producer",
    "LeaseOutcome": "kvnixl.producer",
    "Producer": "kvnixl.producer",
    "transfer_reference": "kvnixl.producer",
    "Reader": "kvnixl.reader",
    "BlockPairs": "kvnixl.topology",
    "RankRead": "kvnixl.topology",
    "ReadPlan": "kvnixl.topology",
    "UnfilledTokens": "kvnixl.topology",
    "check_parallel_sizes": "kvnixl.topology",
    "consumer_count": "kvnixl.topology",
    "heads_of_rank": "kvnixl.topology",
    "plan_reads": "kvnixl.topology",
    "target_ranks": "kvnixl.topology",
    "CancelMode": "kvnixl.transport",
    "DataTransport": "kvnixl.transport",
    "NixlTransport": "kvnixl.transport",
    "PollResult": "kvnixl.transport",
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
