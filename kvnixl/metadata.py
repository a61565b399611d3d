"""What two engines, and the scheduler and workers of one engine, tell each other.

Names and field order are those of vLLM's NixlConnector, so that the encoded forms (`kvnixl.wire`)
are interchangeable with a stock vLLM of the same version. kvnixl's own additions sit in one
optional field, `NixlAgentMetadata.kvnixl`, which a stock peer ignores.

Everything that arrives from outside is checked here, after it was decoded: what a peer exports by
`NixlAgentMetadata.check`, the ``kv_transfer_params`` of a client by `TransferParams.parse`.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from msgspec import Meta, Struct

from kvnixl.errors import TransferParamsError, WireError

__all__ = [
    "GET_META_MSG",
    "KVNIXL_PROTOCOL_VERSION",
    "LEASE_PARAM",
    "LEASE_SLOT_BYTES",
    "MAX_BLOCK_IDS",
    "MAX_ENGINE_ID_CHARS",
    "MAX_FACTORS_CHARS",
    "MAX_LEASE_SLOTS",
    "MAX_REGIONS",
    "MAX_REGION_MEMBERS",
    "MAX_REQUEST_ID_BYTES",
    "NIXL_CONNECTOR_VERSION",
    "PROMPT_PARAM",
    "BlockIds",
    "HeartbeatInfo",
    "KvNixlExtension",
    "Lease",
    "LeaseSlotRegion",
    "NixlAgentMetadata",
    "NixlConnectorMetadata",
    "NixlHandshakePayload",
    "PromptDigest",
    "PushRegistration",
    "RemoteMeta",
    "ReqMeta",
    "TransferParams",
    "format_lease",
    "parse_lease",
]

NIXL_CONNECTOR_VERSION = 14
"""The NixlConnector protocol of vLLM 0.32; part of the compatibility hash."""

KVNIXL_PROTOCOL_VERSION = 1
"""Version of everything that kvnixl adds to the base protocol."""

GET_META_MSG = b"get_meta_msg"

LEASE_PARAM = "kvnixl_lease"
"""The key in ``kv_transfer_params`` that carries a lease as a string."""

PROMPT_PARAM = "kvnixl_prompt"
"""The key in ``kv_transfer_params`` that says of which prompt the blocks are."""

LEASE_SLOT_BYTES = 8

MAX_REGIONS = 16_384
MAX_REGION_MEMBERS = 65_536
"""Layer names in ``region_members`` over all regions."""
MAX_LEASE_SLOTS = 1 << 24
MAX_ENGINE_ID_CHARS = 1024
MAX_REQUEST_ID_BYTES = 8192
MAX_BLOCK_IDS = 1 << 20
"""Block ids of one request over all KV-cache groups."""
_MAX_GROUPS = 1024
_MAX_RANKS = 1 << 20
_MAX_NAME_CHARS = 1024
MAX_FACTORS_CHARS = 64 * 1024
_ADDRESS_SPACE = 1 << 64
_INT63 = (1 << 63) - 1

BlockIds = tuple[list[int], ...] | list[list[int]]
"""Block ids per KV-cache group."""

ReqId = str
EngineId = str

_Count = Annotated[int, Meta(ge=0, le=_INT63)]
_GroupId = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]  # -1: shared by several groups
_Positive = Annotated[int, Meta(ge=1, le=_INT63)]
_Address = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
_Ranks = Annotated[int, Meta(ge=1, le=_MAX_RANKS)]
_Device = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_BlockId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # NIXL's indices are int32
_Name = Annotated[str, Meta(max_length=_MAX_NAME_CHARS)]
_EngineIdText = Annotated[str, Meta(min_length=1, max_length=MAX_ENGINE_ID_CHARS)]
_RequestIdText = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_BYTES)]
_Host = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"\A[A-Za-z0-9._:%\[\]-]+\Z")]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Groups = Annotated[list[list[_BlockId]], Meta(max_length=_MAX_GROUPS)]


# --- leases -------------------------------------------------------------------------------------


class Lease(NamedTuple):
    """A producer's promise about a request's blocks: the slot word ``slot`` holds ``nonce``."""

    slot: int
    nonce: int

    def __str__(self) -> str:
        return format_lease(self.slot, self.nonce)


_LEASE = re.compile(r"(0|[1-9][0-9]{0,8}):([1-9a-f][0-9a-f]{0,15})", re.ASCII)


def format_lease(slot: int, nonce: int) -> str:
    """``"<slot>:<nonce in hex>"``, the form that crosses JSON without being rounded.

    Raises:
        ValueError: the slot is not in ``0 .. MAX_LEASE_SLOTS - 1`` or the nonce not in
            ``1 .. 2**63 - 1``.
    """
    if not 0 <= slot < MAX_LEASE_SLOTS:
        raise ValueError(f"lease slot {slot} is not in 0 .. {MAX_LEASE_SLOTS - 1}")
    if not 0 < nonce <= _INT63:
        raise ValueError(f"lease nonce {nonce} is not in 1 .. 2**63 - 1")
    return f"{slot}:{nonce:x}"


def parse_lease(text: object) -> Lease:
    """The inverse of `format_lease`; accepts its canonical form only.

    Raises:
        WireError: anything else.
    """
    match = _LEASE.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        lease = Lease(int(match[1]), int(match[2], 16))
        if lease.slot < MAX_LEASE_SLOTS and lease.nonce <= _INT63:
            return lease
    raise WireError(f"{_shorten(text)} is not a lease (expected '<slot>:<nonce in hex>')")


# --- prompts ------------------------------------------------------------------------------------

_PROMPT = re.compile(r"(0|[1-9][0-9]{0,15}):([0-9a-f]{32})", re.ASCII)


class PromptDigest(NamedTuple):
    """Of which prompt a request's blocks are, without saying the prompt.

    A lease proves that the blocks stayed what they were, not that they belong to the reader's
    prompt: a router may mix references up, or two engines may apply different chat templates.

    Attributes:
        num_tokens: tokens of the prompt.
        digest: BLAKE2b of their ids as little-endian 64-bit integers, 16 bytes in hex.
    """

    num_tokens: int
    digest: str

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> PromptDigest:
        """
        Raises:
            ValueError: an id is no integer of 64 bits.
        """
        try:
            packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
        except struct.error as error:
            raise ValueError(f"token ids must be integers of 64 bits: {error}") from None
        return cls(len(token_ids), hashlib.blake2b(packed, digest_size=16).hexdigest())

    @classmethod
    def parse(cls, text: object) -> PromptDigest:
        """The inverse of ``str``; accepts its canonical form only.

        Raises:
            WireError: anything else.
        """
        match = _PROMPT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise WireError(
                f"{_shorten(text)} is not a prompt (expected '<tokens>:<32 hexadecimal digits>')"
            )
        return cls(int(match[1]), match[2])

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether ``token_ids`` are this prompt, or begin with it."""
        return self == self.of(token_ids[: self.num_tokens])

    def __str__(self) -> str:
        return f"{self.num_tokens}:{self.digest}"


# --- what a worker exports ----------------------------------------------------------------------


class LeaseSlotRegion(Struct, frozen=True):
    """A producer's lease-slot words: ``num_slots`` times `LEASE_SLOT_BYTES` of DRAM."""

    base_addr: _Address
    num_slots: Annotated[int, Meta(ge=1, le=MAX_LEASE_SLOTS)]
    device_id: _Device = 0


class KvNixlExtension(Struct, kw_only=True):
    """kvnixl's own part of `NixlAgentMetadata`. Later versions only add optional fields.

    Attributes:
        protocol: `KVNIXL_PROTOCOL_VERSION` of the sender.
        features: names of optional abilities; unknown ones are ignored.
        incarnation: a random number drawn at each start of the engine, 0 < n < 2**63.
        lease_slots: the lease-slot words of this worker, or ``None`` if it exports none.
        factors: the JSON text of the sender's compatibility factors (`kvnixl.compat`).
        packing: how the sender's attention backend packs a block (`CacheLayout.packing`), where
            that differs between machines.
    """

    protocol: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] = KVNIXL_PROTOCOL_VERSION
    features: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=256)] = (
        msgspec.field(default_factory=list)
    )
    incarnation: _Positive
    lease_slots: LeaseSlotRegion | None = None
    factors: Annotated[str, Meta(max_length=MAX_FACTORS_CHARS)] | None = None
    packing: Annotated[str, Meta(max_length=64)] = ""


class NixlAgentMetadata(Struct):
    """What one worker exports: its NIXL agent and its KV-cache regions.

    ``R`` is the number of regions. Lengths and strides are in bytes, addresses are virtual
    addresses of the exporting process.

    Attributes:
        engine_id: id of the engine the worker belongs to.
        agent_metadata: NIXL's own serialized agent metadata.
        kv_caches_base_addr: first byte of each region, ``R`` addresses.
        device_id: device of the regions (0 for DRAM).
        num_blocks: blocks in each region.
        block_lens: bytes of one block, ``R`` values.
        block_strides: bytes from one block to the next, ``R`` values, each >= its block length.
        kv_cache_layout: order of the dimensions inside a block (``"HND"``, ``"NHD"``).
        block_size: tokens per block.
        ssm_sizes: bytes of the (conv, SSM) state, ``(0, 0)`` without one.
        attn_backend_name: attention backend that wrote the cache.
        physical_blocks_per_logical_kv_block: kernel blocks per block of the scheduler.
        region_num_blocks: blocks per region where they differ, ``R`` values.
        region_group_ids: KV-cache group per region, -1 for a region of several, ``R`` values.
        region_names: name per region, ``R`` values.
        region_mem_types: ``"DRAM"`` or ``"VRAM"`` per region, ``R`` values.
        dcp_size: ranks of decode context parallelism.
        pcp_size: ranks of prefill context parallelism.
        ple_block_len: bytes of one short-conv state page, ``None`` if the model has none
            (since protocol version 14).
        region_members: layer names that share each region, empty or ``R`` lists of at most
            `MAX_REGION_MEMBERS` names together.
        packed_member_layouts: member -> (byte offset in its region's block, bytes per page).
        kvnixl: kvnixl's own part; ``None`` from a stock peer.
    """

    engine_id: _EngineIdText
    agent_metadata: bytes
    kv_caches_base_addr: Annotated[list[_Address], Meta(max_length=MAX_REGIONS)]
    device_id: _Device
    num_blocks: _Positive
    block_lens: Annotated[list[_Positive], Meta(max_length=MAX_REGIONS)]
    block_strides: Annotated[list[_Positive], Meta(max_length=MAX_REGIONS)]
    kv_cache_layout: _Name
    block_size: _Positive
    ssm_sizes: tuple[_Count, _Count]
    attn_backend_name: _Name
    physical_blocks_per_logical_kv_block: _Positive
    region_num_blocks: Annotated[list[_Positive], Meta(max_length=MAX_REGIONS)] | None = None
    region_group_ids: Annotated[list[_GroupId], Meta(max_length=MAX_REGIONS)] | None = None
    region_names: Annotated[list[_Name], Meta(max_length=MAX_REGIONS)] | None = None
    region_mem_types: Annotated[list[_Name], Meta(max_length=MAX_REGIONS)] | None = None
    dcp_size: _Ranks = 1
    pcp_size: _Ranks = 1
    ple_block_len: _Positive | None = None
    region_members: Annotated[
        list[Annotated[list[_Name], Meta(max_length=MAX_REGIONS)]], Meta(max_length=MAX_REGIONS)
    ] = msgspec.field(default_factory=list)
    packed_member_layouts: Annotated[
        dict[_Name, tuple[_Count, _Positive]], Meta(max_length=MAX_REGIONS)
    ] = msgspec.field(default_factory=dict)
    kvnixl: KvNixlExtension | None = None

    @property
    def num_regions(self) -> int:
        return len(self.kv_caches_base_addr)

    def check(self) -> None:
        """Proves what types alone cannot: counts agree and every block lies below 2**64.

        Raises:
            WireError: names the field, the values and the engine.
        """
        regions = self.num_regions
        for name in (
            "block_lens",
            "block_strides",
            "region_num_blocks",
            "region_group_ids",
            "region_names",
            "region_mem_types",
        ):
            values = getattr(self, name)
            if values is not None and len(values) != regions:
                self._refuse(f"{name} has {len(values)} entries for {regions} regions")
        if self.region_members and len(self.region_members) != regions:
            self._refuse(
                f"region_members has {len(self.region_members)} lists for {regions} regions"
            )
        members = sum(map(len, self.region_members))
        if members > MAX_REGION_MEMBERS:
            self._refuse(f"region_members holds {members} names, more than {MAX_REGION_MEMBERS}")
        unknown = set(self.region_mem_types or ()) - {"DRAM", "VRAM"}
        if unknown:
            self._refuse(f"region_mem_types holds {_shorten(min(unknown))}, not 'DRAM' or 'VRAM'")
        self._check_extents()
        self._check_members()
        slots = self.kvnixl.lease_slots if self.kvnixl is not None else None
        if slots is not None and (
            slots.base_addr % LEASE_SLOT_BYTES
            or slots.base_addr + slots.num_slots * LEASE_SLOT_BYTES > _ADDRESS_SPACE
        ):
            self._refuse(
                f"lease_slots: {slots.num_slots} slots from {slots.base_addr:#x} are not aligned "
                f"to {LEASE_SLOT_BYTES} bytes or pass 2**64"
            )

    def _check_extents(self) -> None:
        bases, lengths, strides = self.kv_caches_base_addr, self.block_lens, self.block_strides
        counts = self.region_num_blocks or [self.num_blocks] * self.num_regions
        # The extremes prove all regions at once; only where they do not, each is looked at.
        if (
            max(bases, default=0) + max(counts, default=0) * max(strides, default=0)
            <= _ADDRESS_SPACE
        ) and all(map(operator.le, lengths, strides)):
            return
        for index, (base, length, stride, count) in enumerate(
            zip(bases, lengths, strides, counts, strict=True)
        ):
            if stride < length:
                self._refuse(
                    f"region {index}: block stride {stride} is less than block length {length}"
                )
            if base + (count - 1) * stride + length > _ADDRESS_SPACE:
                self._refuse(
                    f"region {index}: {count} blocks of stride {stride} from {base:#x} pass 2**64"
                )

    def _check_members(self) -> None:
        region_of: dict[str, int] = {}
        for index, members in enumerate(self.region_members):
            for member in members:
                if region_of.setdefault(member, index) != index:
                    self._refuse(f"member {_shorten(member)} is in more than one region")
        for member, (offset, page_bytes) in self.packed_member_layouts.items():
            region = region_of.get(member)
            if region is None:
                self._refuse(f"packed member {_shorten(member)} is in no region")
            elif offset + page_bytes > self.block_lens[region]:
                self._refuse(
                    f"packed member {_shorten(member)}: {page_bytes} bytes from {offset} pass the "
                    f"block length {self.block_lens[region]} of region {region}"
                )

    def _refuse(self, reason: str) -> NoReturn:
        raise WireError(f"agent metadata of engine {_shorten(self.engine_id)}: {reason}")


class NixlHandshakePayload(Struct):
    """The first frame of a handshake reply, opened in two stages.

    Attributes:
        compatibility_hash: 64 hexadecimal digits; compared before anything else is decoded.
        agent_metadata_bytes: an encoded `NixlAgentMetadata`.
    """

    compatibility_hash: Annotated[str, Meta(max_length=256)]
    agent_metadata_bytes: bytes


# --- what a client hands over -------------------------------------------------------------------


# A lone surrogate, which JSON can spell, is a UnicodeError.
_CONVERSION_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeError, OverflowError)


class TransferParams(Struct):
    """The ``kv_transfer_params`` of one request, typed. Keys that were absent or null are ``None``.

    These come from a client through a router: use `parse`, never the raw dictionary.
    """

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_block_ids: _Groups | None = None
    remote_engine_id: _EngineIdText | None = None
    remote_request_id: _RequestIdText | None = None
    remote_host: _Host | None = None
    remote_port: _Port | None = None
    tp_size: _Ranks | None = None
    dcp_size: _Ranks | None = None
    pp_size: _Ranks | None = None
    remote_block_size: _Positive | None = None
    remote_num_tokens: _Count | None = None
    remote_blocks_expiry_time: float | None = None
    remote_registration_generation: _Count | None = None
    transfer_mode: Annotated[str, Meta(max_length=64)] | None = None
    kvnixl_lease: str | None = None
    kvnixl_prompt: str | None = None

    @classmethod
    def parse(cls, params: object, request_id: ReqId) -> TransferParams:
        """Reads the keys that kvnixl knows and ignores the others.

        Raises:
            TransferParamsError: names the key and the request.
        """
        if not isinstance(params, Mapping):
            raise TransferParamsError(
                request_id, None, f"expected an object, got {type(params).__name__}"
            )
        known = {name: params[name] for name in cls.__struct_fields__ if name in params}
        try:
            parsed = msgspec.convert(known, cls)
        except _CONVERSION_ERRORS as error:
            key, reason = _split_validation_error(error)
            if key is None:  # only msgspec's own errors name it
                key = cls._first_bad_key(known)
            raise TransferParamsError(request_id, key, reason) from None
        parsed._check(request_id)
        return parsed

    @classmethod
    def _first_bad_key(cls, known: Mapping[str, Any]) -> str | None:
        for key, value in known.items():
            try:
                msgspec.convert({key: value}, cls)
            except _CONVERSION_ERRORS:
                return key
        return None

    def _check(self, request_id: ReqId) -> None:
        if sum(map(len, self.remote_block_ids or ())) > MAX_BLOCK_IDS:
            raise TransferParamsError(
                request_id, "remote_block_ids", f"more than {MAX_BLOCK_IDS} block ids"
            )
        expiry = self.remote_blocks_expiry_time
        if expiry is not None and not math.isfinite(expiry):
            raise TransferParamsError(
                request_id, "remote_blocks_expiry_time", f"{expiry} is not a time in seconds"
            )
        for key in ("remote_engine_id", "remote_request_id", "transfer_mode"):
            text = getattr(self, key)
            if text is not None and not _fits_utf8(text):
                reason = f"{_shorten(text)} is not Unicode of at most {MAX_REQUEST_ID_BYTES} bytes"
                raise TransferParamsError(request_id, key, reason)
        if self.kvnixl_lease is not None:
            try:
                parse_lease(self.kvnixl_lease)
            except WireError as error:
                raise TransferParamsError(request_id, LEASE_PARAM, str(error)) from None
        if self.kvnixl_prompt is not None:
            try:
                PromptDigest.parse(self.kvnixl_prompt)
            except WireError as error:
                raise TransferParamsError(request_id, PROMPT_PARAM, str(error)) from None

    @property
    def lease(self) -> Lease | None:
        return None if self.kvnixl_lease is None else parse_lease(self.kvnixl_lease)

    @property
    def prompt(self) -> PromptDigest | None:
        return None if self.kvnixl_prompt is None else PromptDigest.parse(self.kvnixl_prompt)

    def remote(self, request_id: ReqId) -> RemoteMeta:
        """Where the request's blocks are.

        Raises:
            TransferParamsError: a key that a transfer needs is missing.
        """
        for key in _REMOTE_KEYS:
            if getattr(self, key) is None:
                raise TransferParamsError(request_id, key, "missing")
        assert self.remote_block_ids is not None
        assert self.remote_host is not None
        assert self.remote_port is not None
        assert self.remote_engine_id is not None
        assert self.remote_request_id is not None
        return RemoteMeta(
            block_ids=self.remote_block_ids,
            host=self.remote_host,
            port=self.remote_port,
            engine_id=self.remote_engine_id,
            request_id=self.remote_request_id,
            blocks_expiry_time=self.remote_blocks_expiry_time,
            num_tokens=self.remote_num_tokens,
            registration_generation=self.remote_registration_generation or 0,
            lease=self.lease,
            prompt=self.prompt,
        )


_REMOTE_KEYS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)


class PushRegistration(Struct, frozen=True):
    """Push mode: a consumer's blocks, to be written by the producer.

    Attributes:
        request_id: the consumer's request id.
        decode_engine_id: the consumer's engine id.
        decode_host: its side-channel host.
        decode_port: its side-channel port.
        decode_tp_size: its tensor-parallel size.
        local_block_ids: its block ids per KV-cache group.
        remote_engine_id: the producer's engine id.
        remote_host: the producer's side-channel host.
        remote_port: the producer's side-channel port.
        remote_tp_size: the producer's tensor-parallel size.
        remote_pp_size: the producer's pipeline-parallel size.
    """

    request_id: _RequestIdText
    decode_engine_id: _EngineIdText
    decode_host: _Host
    decode_port: _Port
    decode_tp_size: _Ranks
    local_block_ids: _Groups
    remote_engine_id: _EngineIdText
    remote_host: _Host
    remote_port: _Port
    remote_tp_size: _Ranks
    remote_pp_size: _Ranks = 1

    def check(self) -> None:
        """Proves what types alone cannot.

        Raises:
            WireError: the id or the block ids are too long.
        """
        if not _fits_utf8(self.request_id):
            raise WireError(f"push registration: request id over {MAX_REQUEST_ID_BYTES} bytes")
        if sum(map(len, self.local_block_ids)) > MAX_BLOCK_IDS:
            raise WireError(f"push registration: more than {MAX_BLOCK_IDS} block ids")


# --- from the scheduler to the workers of one engine --------------------------------------------


@dataclass(slots=True)
class HeartbeatInfo:
    """The requests of one remote engine whose leases this engine keeps alive.

    Attributes:
        req_ids: the remote engine's request ids.
        host: its side-channel host.
        port: its side-channel port.
        tp_size: its tensor-parallel size.
        dcp_size: its decode-context-parallel size.
        pp_size: its pipeline-parallel size.
        leases: request id -> lease, for those that came with one.
    """

    req_ids: set[ReqId]
    host: str
    port: int
    tp_size: int
    dcp_size: int = 1
    pp_size: int = 1
    leases: dict[ReqId, Lease] = field(default_factory=dict)


@dataclass(slots=True)
class RemoteMeta:
    """Where the blocks of a request are and what the owner calls it.

    Attributes:
        block_ids: the owner's block ids per KV-cache group.
        host: side-channel host of the owner.
        port: side-channel port of the owner.
        engine_id: the owner's engine id.
        request_id: the owner's request id.
        blocks_expiry_time: seconds on the *owner's* clock, ``None`` if it did not say.
        num_tokens: tokens whose KV the blocks hold, ``None`` if unknown.
        registration_generation: grows when the owner registers its KV cache anew (since protocol
            version 15); 0 if it did not say.
        lease: the owner's promise, ``None`` if it gave none.
        prompt: of which prompt the blocks are, ``None`` if the owner did not say.
    """

    block_ids: BlockIds
    host: str
    port: int
    engine_id: str
    request_id: str
    blocks_expiry_time: float | None = None
    num_tokens: int | None = None
    registration_generation: int = 0
    lease: Lease | None = None
    prompt: PromptDigest | None = None


@dataclass(slots=True)
class ReqMeta:
    """One request for the workers of this engine.

    Attributes:
        local_block_ids: logical block ids per KV-cache group.
        local_physical_block_ids: the same in kernel blocks, where the two sizes differ.
        tp_size: the remote engine's tensor-parallel size.
        dcp_size: the remote engine's decode-context-parallel size.
        local_num_computed_blocks: per group, the logical blocks that the local prefix cache holds.
        remote: where to read from, ``None`` for a save.
        remote_block_size: tokens per block of the remote engine, once known.
        pp_size: the remote engine's pipeline-parallel size.
        awaiting_kvs: the scheduler holds the request until it is reported as received.
        region_blocks_to_zero: per region, the physical pages to zero after the read; ``None``
            leaves that to the KV-cache groups.
    """

    local_block_ids: BlockIds
    local_physical_block_ids: BlockIds
    tp_size: int
    dcp_size: int = 1
    local_num_computed_blocks: tuple[int, ...] = ()
    remote: RemoteMeta | None = None
    remote_block_size: int | None = None
    pp_size: int = 1
    awaiting_kvs: bool = False
    region_blocks_to_zero: BlockIds | None = None


class NixlConnectorMetadata:
    """What the scheduler tells its workers in one step.

    Attributes:
        reqs_to_recv: requests to read from a remote engine.
        reqs_to_save: requests whose blocks go to the host buffer first.
        reqs_to_send: request id -> deadline on the *scheduler's* clock; a worker keeps what is
            left of it, ``deadline - scheduler_clock``, and adds that to its own clock.
        scheduler_clock: the scheduler's clock when this was built; 0.0 if unset.
        reqs_in_batch: requests scheduled in this step whose blocks will be read by a peer.
        reqs_not_processed: requests that will not be read after all (aborted).
        heartbeat_by_engine: remote engine id -> leases to renew.
        push_registrations: push mode, consumer: request id -> registration to send.
        push_finished_blocks: push mode, producer: request id -> blocks that can be written.
        lease_arms: request id -> (slot, nonce) to arm in this step.
        lease_clears: requests whose slots to clear in this step, before any arm.
    """

    def __init__(self) -> None:
        self.reqs_to_recv: dict[ReqId, ReqMeta] = {}
        self.reqs_to_save: dict[ReqId, ReqMeta] = {}
        self.reqs_to_send: dict[ReqId, float] = {}
        self.scheduler_clock: float = 0.0
        self.reqs_in_batch: set[ReqId] = set()
        self.reqs_not_processed: set[ReqId] = set()
        self.heartbeat_by_engine: dict[EngineId, HeartbeatInfo] = {}
        self.push_registrations: dict[ReqId, PushRegistration] = {}
        self.push_finished_blocks: dict[ReqId, BlockIds] = {}
        self.lease_arms: dict[ReqId, tuple[int, int]] = {}
        self.lease_clears: set[ReqId] = set()

    def add_new_req_to_save(
        self,
        request_id: ReqId,
        local_block_ids: BlockIds,
        kv_transfer_params: Mapping[str, Any],
    ) -> None:
        """Adds a request whose blocks go to the host buffer.

        Raises:
            TransferParamsError: a parameter is ill-typed; nothing was added.
        """
        params = TransferParams.parse(kv_transfer_params, request_id)
        self.reqs_to_save[request_id] = _req_meta(params, local_block_ids, (), False)

    def add_new_req_to_recv(
        self,
        request_id: ReqId,
        local_block_ids: BlockIds,
        kv_transfer_params: Mapping[str, Any],
        local_num_computed_blocks: tuple[int, ...] = (),
        awaiting_kvs: bool = False,
    ) -> None:
        """Adds a request to read from a remote engine.

        Raises:
            TransferParamsError: a parameter is missing or ill-typed; nothing was added.
        """
        params = TransferParams.parse(kv_transfer_params, request_id)
        remote = params.remote(request_id)
        meta = _req_meta(params, local_block_ids, local_num_computed_blocks, awaiting_kvs)
        meta.remote = remote
        self.reqs_to_recv[request_id] = meta


def _req_meta(
    params: TransferParams,
    local_block_ids: BlockIds,
    local_num_computed_blocks: tuple[int, ...],
    awaiting_kvs: bool,
) -> ReqMeta:
    return ReqMeta(
        local_block_ids=local_block_ids,
        local_physical_block_ids=local_block_ids,
        tp_size=params.tp_size or 1,
        dcp_size=params.dcp_size or 1,
        local_num_computed_blocks=local_num_computed_blocks,
        remote_block_size=params.remote_block_size,
        pp_size=params.pp_size or 1,
        awaiting_kvs=awaiting_kvs,
    )


# --- messages -----------------------------------------------------------------------------------

_VALIDATION_PATH = re.compile(r" - at `(?:key in `)?\$\.([A-Za-z_0-9]+)")


def _split_validation_error(error: Exception) -> tuple[str | None, str]:
    """msgspec says ``reason - at `$.key[3]```; gives ``("key", "reason - at `$.key[3]`")``."""
    message = str(error)
    match = _VALIDATION_PATH.search(message)
    return (match[1] if match else None), message


def _fits_utf8(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_REQUEST_ID_BYTES
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        return False


def _shorten(value: object, limit: int = 80) -> str:
    text = ascii(value[:limit] if isinstance(value, (str, bytes)) else type(value).__name__)
    return text + "..." if isinstance(value, Sequence) and len(value) > limit else text
