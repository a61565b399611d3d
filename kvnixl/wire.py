"""Bytes in, values out: every message between two engines.

The base messages are those of vLLM's NixlConnector, byte for byte where kvnixl adds nothing:

* side channel: `encode_get_meta` asks, `encode_reply` answers with a handshake payload and the
  server's clock, `open_handshake` opens the answer in two stages;
* notifications to a stock peer: text completions and heartbeats, ``PUSH_REG:`` registrations.

Two kvnixl peers use binary notifications instead (`encode_completion`, `encode_heartbeat`). Their
first byte occurs in no UTF-8 text, so no request id can be mistaken for one.

Decoding trusts nothing: sizes are bounded before anything is built, values are typed and checked,
and whatever the bytes are, only `kvnixl.errors.WireError` or a handshake's own errors come out.
"""

from __future__ import annotations

import enum
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvnixl.compat import CompatibilityCheck, Difference
from kvnixl.errors import (
    EngineIdMismatchError,
    HandshakeRefusedError,
    IncarnationChangedError,
    WireError,
)
from kvnixl.metadata import (
    GET_META_MSG,
    MAX_LEASE_SLOTS,
    MAX_REQUEST_ID_BYTES,
    KvNixlExtension,
    Lease,
    NixlAgentMetadata,
    NixlHandshakePayload,
    PushRegistration,
    format_lease,
    parse_lease,
)

__all__ = [
    "MAX_CONSUMERS",
    "MAX_NOTIFICATION_BYTES",
    "MAX_RANK",
    "MAX_REGISTRATION_BYTES",
    "MAX_REPLY_BYTES",
    "MAX_REQUEST_BYTES",
    "NOTIFICATION_VERSION",
    "Completion",
    "ErrorCode",
    "GetMeta",
    "Heartbeat",
    "Notification",
    "OpenedHandshake",
    "Outcome",
    "PushRegistration",
    "SequenceTracker",
    "decode_agent_metadata",
    "decode_clock",
    "decode_get_meta",
    "decode_handshake_payload",
    "encode_agent_metadata",
    "encode_clock",
    "encode_completion",
    "encode_error_reply",
    "encode_get_meta",
    "encode_handshake_payload",
    "encode_heartbeat",
    "encode_push_registration",
    "encode_reply",
    "encode_text_completion",
    "encode_text_heartbeat",
    "format_lease",
    "open_handshake",
    "parse_lease",
    "parse_notification",
    "peek_extension",
]

MAX_REQUEST_BYTES = 64 * 1024
"""Largest frame that a side-channel server accepts."""
MAX_REPLY_BYTES = 8 << 20
"""Largest frame of a handshake reply that a client opens."""
MAX_NOTIFICATION_BYTES = 1 << 20
"""Largest completion or heartbeat that is parsed."""
MAX_REGISTRATION_BYTES = 4 << 20
"""Largest push registration that is parsed: it carries block ids."""
MAX_CONSUMERS = 1 << 16
MAX_RANK = (1 << 20) - 1
_MAX_REASON_CHARS = 512
_UINT64_MAX = (1 << 64) - 1

_Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
_Word = Annotated[bytes, Meta(max_length=64)]

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


# --- side channel: the question -----------------------------------------------------------------


class GetMeta(NamedTuple):
    """Asks for the metadata of one worker."""

    pp_rank: int
    tp_rank: int


_get_meta_decoder = msgspec.msgpack.Decoder(tuple[_Word, _Rank, _Rank])


def encode_get_meta(pp_rank: int, tp_rank: int) -> bytes:
    """The question for one worker's metadata.

    Exactly three elements: a stock vLLM listener unpacks three and ends its thread on any other
    number, so nothing can be added here for peers whose kind is not yet known.

    Raises:
        ValueError: a rank is negative or above `MAX_RANK`.
    """
    for rank in (pp_rank, tp_rank):
        if not 0 <= rank <= MAX_RANK:
            raise ValueError(f"rank {rank} is not in 0 .. {MAX_RANK}")
    return _encoder.encode((GET_META_MSG, pp_rank, tp_rank))


def decode_get_meta(frame: bytes | memoryview) -> GetMeta:
    """Reads the question.

    Raises:
        WireError: the frame is anything else.
    """
    word, pp_rank, tp_rank = _decode(
        _get_meta_decoder.decode, frame, MAX_REQUEST_BYTES, "side-channel request"
    )
    if word != GET_META_MSG:
        raise WireError(f"unknown side-channel request {word!r}")
    return GetMeta(pp_rank, tp_rank)


# --- side channel: the answer -------------------------------------------------------------------


class ErrorCode(enum.StrEnum):
    """Why a side-channel server refuses a question."""

    BAD_REQUEST = "bad_request"
    UNKNOWN_RANK = "unknown_rank"
    NOT_READY = "not_ready"


class _ErrorReply(Struct):
    kvnixl_error: Annotated[str, Meta(max_length=64)]
    reason: Annotated[str, Meta(max_length=4096)] = ""


_payload_decoder = msgspec.msgpack.Decoder(NixlHandshakePayload)
_metadata_decoder = msgspec.msgpack.Decoder(NixlAgentMetadata)
_clock_decoder = msgspec.msgpack.Decoder(float)
_error_decoder = msgspec.msgpack.Decoder(_ErrorReply)


def encode_agent_metadata(metadata: NixlAgentMetadata) -> bytes:
    """Encodes and checks what a worker exports.

    Raises:
        WireError: `decode_agent_metadata` would refuse the result; says why.
    """
    encoded = _encode(metadata)
    decode_agent_metadata(encoded)
    return encoded


def decode_agent_metadata(data: bytes | memoryview) -> NixlAgentMetadata:
    """Decodes and checks what a worker exports.

    Raises:
        WireError: ill-formed, ill-typed or inconsistent; names the field.
    """
    metadata = _decode(_metadata_decoder.decode, data, MAX_REPLY_BYTES, "agent metadata")
    metadata.check()
    return metadata


def encode_handshake_payload(payload: NixlHandshakePayload) -> bytes:
    """The first frame of a reply."""
    return _encode(payload)


def decode_handshake_payload(frame: bytes | memoryview) -> NixlHandshakePayload:
    """Reads the first frame of a reply; the metadata inside stays encoded.

    Raises:
        WireError: ill-formed or ill-typed.
    """
    return _decode(_payload_decoder.decode, frame, MAX_REPLY_BYTES, "handshake payload")


def encode_clock(seconds: float) -> bytes:
    """The second frame of a reply: the server's clock, in seconds of its own epoch."""
    return _encoder.encode(float(seconds))


def decode_clock(frame: bytes | memoryview) -> float:
    """Reads the second frame of a reply.

    Raises:
        WireError: not a finite number.
    """
    seconds = _decode(_clock_decoder.decode, frame, 64, "clock")
    if not math.isfinite(seconds):
        raise WireError(f"clock: {seconds} is not a time in seconds")
    return seconds


def encode_reply(encoded_payload: bytes, clock: float) -> list[bytes]:
    """The frames that answer a question: an encoded payload and the server's clock."""
    return [encoded_payload, encode_clock(clock)]


def encode_error_reply(code: ErrorCode, reason: str) -> list[bytes]:
    """The single frame that refuses a question.

    A stock client expects two frames and fails the handshake at once, without waiting for its
    timeout.
    """
    text = reason.encode("utf-8", "replace").decode()[:_MAX_REASON_CHARS]
    return [_encode(_ErrorReply(str(code), text))]


class _ExtensionOnly(Struct):
    kvnixl: KvNixlExtension | None = None


_extension_decoder = msgspec.msgpack.Decoder(_ExtensionOnly)


def peek_extension(agent_metadata: bytes) -> KvNixlExtension | None:
    """kvnixl's own part of encoded agent metadata, whatever the rest looks like.

    ``None`` for a stock peer and for anything that cannot be read: it only serves to explain why
    two engines do not fit.
    """
    try:
        return _decode(
            _extension_decoder.decode, agent_metadata, MAX_REPLY_BYTES, "agent metadata"
        ).kvnixl
    except WireError:
        return None


class OpenedHandshake(NamedTuple):
    """What a handshake reply held.

    Attributes:
        metadata: the peer's export, decoded and checked.
        clock: the peer's clock when it answered, in seconds of its own epoch.
        compatibility_hash: the peer's hash.
        differences: factors that differ although the handshake was allowed.
    """

    metadata: NixlAgentMetadata
    clock: float
    compatibility_hash: str
    differences: tuple[Difference, ...] = ()


def open_handshake(
    reply_frames: Sequence[bytes | memoryview],
    compat: CompatibilityCheck,
    *,
    expected_engine_id: str | None = None,
    expected_incarnation: int | None = None,
    peer: str = "peer",
) -> OpenedHandshake:
    """Opens a reply: the hash first, the metadata only if the engines fit.

    Args:
        reply_frames: the frames after the empty delimiter.
        compat: this engine's factors and policy.
        expected_engine_id: the engine that the request named; ``None`` accepts any.
        expected_incarnation: the start of that engine seen before; ``None`` accepts any.
        peer: what to call the peer in messages.

    Raises:
        WireError: a frame is ill-formed or the metadata is inconsistent.
        HandshakeRefusedError: the peer answered with an error.
        CompatibilityError: the engines do not fit.
        EngineIdMismatchError: another engine answered.
        IncarnationChangedError: not the incarnation that was expected.
    """
    if len(reply_frames) == 1:
        refusal = _decode(
            _error_decoder.decode, reply_frames[0], MAX_REQUEST_BYTES, "handshake reply"
        )
        raise HandshakeRefusedError(refusal.kvnixl_error, refusal.reason[:_MAX_REASON_CHARS])
    if len(reply_frames) != 2:
        raise WireError(f"a handshake reply has 2 frames, got {len(reply_frames)}")
    payload = decode_handshake_payload(reply_frames[0])
    clock = decode_clock(reply_frames[1])
    differences = compat.check(
        payload.compatibility_hash, peek_extension(payload.agent_metadata_bytes), peer=peer
    )
    metadata = decode_agent_metadata(payload.agent_metadata_bytes)
    if expected_engine_id is not None and metadata.engine_id != expected_engine_id:
        raise EngineIdMismatchError(expected_engine_id, metadata.engine_id)
    if expected_incarnation is not None:
        actual = metadata.kvnixl.incarnation if metadata.kvnixl is not None else None
        if actual != expected_incarnation:
            raise IncarnationChangedError(metadata.engine_id, expected_incarnation, actual)
    return OpenedHandshake(metadata, clock, payload.compatibility_hash, differences)


# --- notifications ------------------------------------------------------------------------------

NOTIFICATION_VERSION = 1
_MAGIC = b"\xffKVN"  # 0xff occurs in no UTF-8 text
_PUSH_REG_PREFIX = b"PUSH_REG:"
_HEARTBEAT_PREFIX = b"HB:"

# magic, version, kind, form, zero, sender, sequence, argument, entries
_HEADER = struct.Struct("<4sBBBBQQII")
_LEASE_ENTRY = struct.Struct("<IQ")
_ID_LENGTH = struct.Struct("<H")
_FORM_LEASES = 1
_FORM_REQUEST_IDS = 2
_KIND_HEARTBEAT = 4


class Outcome(enum.IntEnum):
    """How one peer's part of a transfer ended."""

    DONE = 1
    """The transfer is over and the blocks may be freed as far as this peer goes."""
    RELEASED = 2
    """The peer will not transfer (aborted, rejected): as `DONE` for the owner's blocks."""
    FAILED = 3
    """The peer tried and failed; no transfer of its is in flight any more."""


class Completion(NamedTuple):
    """One peer's part of some requests is over.

    Exactly one of ``leases`` and ``request_ids`` is filled: the owner's leases between kvnixl
    peers, else the owner's request ids.

    Attributes:
        outcome: how it ended.
        consumers: how many peers will say so for each of these requests.
        leases: the owner's leases.
        request_ids: the owner's request ids.
        sender: number of the sending worker's start; ``None`` in a text notification.
        sequence: the sender's count of its notifications; ``None`` in a text notification.
    """

    outcome: Outcome
    consumers: int
    leases: tuple[Lease, ...] = ()
    request_ids: tuple[str, ...] = ()
    sender: int | None = None
    sequence: int | None = None


class Heartbeat(NamedTuple):
    """The sender still wants these requests.

    Attributes:
        leases: the owner's leases.
        request_ids: the owner's request ids.
        extension: seconds from receipt that are asked for, for the owner to bound; ``None`` leaves
            it to the owner altogether.
        sender: number of the sending worker's start; ``None`` in a text notification.
        sequence: the sender's count of its notifications; ``None`` in a text notification.
    """

    leases: tuple[Lease, ...] = ()
    request_ids: tuple[str, ...] = ()
    extension: float | None = None
    sender: int | None = None
    sequence: int | None = None


Notification = Completion | Heartbeat | PushRegistration

_registration_decoder = msgspec.msgpack.Decoder(PushRegistration)


def encode_text_completion(request_id: str, consumers: int) -> bytes:
    """A stock peer's ``"<request id>:<consumers>"``: a transfer is over.

    Raises:
        WireError: the id cannot be told apart from another message in this form.
    """
    if not 1 <= consumers <= MAX_CONSUMERS:
        raise WireError(f"{consumers} consumers are not in 1 .. {MAX_CONSUMERS}")
    text = _id_bytes(request_id)
    if text.startswith((_HEARTBEAT_PREFIX, _PUSH_REG_PREFIX)):
        raise WireError(f"request id {request_id!r} reads as another message to a stock peer")
    return b"%b:%d" % (text, consumers)


def encode_text_heartbeat(request_ids: Iterable[str]) -> bytes:
    """A stock peer's ``"HB:<id>,<id>"``.

    Raises:
        WireError: no id, or one that holds a comma.
    """
    texts = []
    for request_id in request_ids:
        text = _id_bytes(request_id)
        if b"," in text:
            raise WireError(f"request id {request_id!r} holds a comma")
        texts.append(text)
    if not texts:
        raise WireError("a heartbeat names at least one request")
    return _HEARTBEAT_PREFIX + b",".join(texts)


def encode_push_registration(registration: PushRegistration) -> bytes:
    """``b"PUSH_REG:"`` and the msgpack of the registration.

    Raises:
        WireError: `parse_notification` would refuse the result; says why.
    """
    encoded = _PUSH_REG_PREFIX + _encode(registration)
    parse_notification(encoded)
    return encoded


def encode_completion(
    outcome: Outcome,
    consumers: int,
    *,
    sender: int,
    sequence: int,
    leases: Sequence[tuple[int, int]] = (),
    request_ids: Sequence[str] = (),
) -> bytes:
    """The binary form of `Completion`, for kvnixl peers.

    Raises:
        WireError: a number is out of range, or not exactly one of leases and request ids is given.
    """
    if not 1 <= consumers <= MAX_CONSUMERS:
        raise WireError(f"{consumers} consumers are not in 1 .. {MAX_CONSUMERS}")
    kind = Outcome(outcome)
    return _encode_binary(kind, consumers, (sender, sequence), leases, request_ids)


def encode_heartbeat(
    extension: float,
    *,
    sender: int,
    sequence: int,
    leases: Sequence[tuple[int, int]] = (),
    request_ids: Sequence[str] = (),
) -> bytes:
    """The binary form of `Heartbeat`, for kvnixl peers; ``extension`` in seconds, kept to 1 ms.

    Raises:
        WireError: a number is out of range, or not exactly one of leases and request ids is given.
    """
    milliseconds = round(extension * 1000) if math.isfinite(extension) else -1
    if not 0 < milliseconds < 1 << 32:
        raise WireError(f"a lease cannot be extended by {extension} s")
    origin = (sender, sequence)
    return _encode_binary(_KIND_HEARTBEAT, milliseconds, origin, leases, request_ids)


def parse_notification(message: bytes) -> Notification:
    """Reads one notification of any form.

    Raises:
        WireError: the bytes are none of them. Nothing else is raised, whatever the bytes.
    """
    if message.startswith(_PUSH_REG_PREFIX):
        registration = _decode(
            _registration_decoder.decode,
            memoryview(message)[len(_PUSH_REG_PREFIX) :],
            MAX_REGISTRATION_BYTES,
            "push registration",
        )
        registration.check()
        return registration
    if len(message) > MAX_NOTIFICATION_BYTES:
        raise WireError(f"notification of {len(message)} bytes, over {MAX_NOTIFICATION_BYTES}")
    if message.startswith(_MAGIC[:1]):
        return _parse_binary(message)
    try:
        text = message.decode()
    except UnicodeDecodeError:
        raise WireError("notification is neither binary nor UTF-8 text") from None
    if text.startswith("HB:"):
        request_ids = tuple(filter(None, text[3:].split(",")))
        if not request_ids:
            raise WireError("heartbeat that names no request")
        return Heartbeat(request_ids=request_ids)
    request_id, colon, count = text.rpartition(":")
    if not colon or not request_id:
        raise WireError("text notification is not '<request id>:<consumers>'")
    if not (count.isascii() and count.isdecimal() and len(count) <= 5):
        raise WireError(f"text notification: {count[:16]!r} is not a count of consumers")
    consumers = int(count)
    if not 1 <= consumers <= MAX_CONSUMERS:
        raise WireError(f"text notification: {consumers} consumers")
    return Completion(Outcome.DONE, consumers, request_ids=(request_id,))


def _encode_binary(
    kind: int,
    argument: int,
    origin: tuple[int, int],
    leases: Sequence[tuple[int, int]],
    request_ids: Sequence[str],
) -> bytes:
    if bool(leases) == bool(request_ids):
        raise WireError("a notification names either leases or request ids")
    for name, number in zip(("sender", "sequence"), origin, strict=True):
        if not 0 <= number <= _UINT64_MAX:
            raise WireError(f"{name} {number} is not in 0 .. 2**64 - 1")
    if leases:
        form, count = _FORM_LEASES, len(leases)
        _check_leases(leases)
        body = b"".join([_LEASE_ENTRY.pack(slot, nonce) for slot, nonce in leases])
    else:
        form, count = _FORM_REQUEST_IDS, len(request_ids)
        texts = [_id_bytes(request_id) for request_id in request_ids]
        body = b"".join([_ID_LENGTH.pack(len(text)) + text for text in texts])
    header = _HEADER.pack(_MAGIC, NOTIFICATION_VERSION, kind, form, 0, *origin, argument, count)
    message = header + body
    if len(message) > MAX_NOTIFICATION_BYTES:
        raise WireError(
            f"notification of {len(message)} bytes, over {MAX_NOTIFICATION_BYTES}: split it"
        )
    return message


def _parse_binary(message: bytes) -> Completion | Heartbeat:
    if len(message) < _HEADER.size:
        raise WireError(f"binary notification of {len(message)} bytes is shorter than its header")
    magic, version, kind, form, zero, sender, sequence, argument, count = _HEADER.unpack_from(
        message
    )
    if magic != _MAGIC or zero != 0:
        raise WireError("binary notification without kvnixl's header")
    if version != NOTIFICATION_VERSION:
        raise WireError(f"notification version {version}, only {NOTIFICATION_VERSION} is known")
    leases: tuple[Lease, ...] = ()
    request_ids: tuple[str, ...] = ()
    if form == _FORM_LEASES:
        leases = _parse_leases(message, count)
    elif form == _FORM_REQUEST_IDS:
        request_ids = _parse_ids(message, count)
    else:
        raise WireError(f"unknown notification form {form}")
    if kind == _KIND_HEARTBEAT:
        if argument == 0:
            raise WireError("heartbeat that extends by 0 ms")
        return Heartbeat(leases, request_ids, argument / 1000, sender, sequence)
    try:
        outcome = Outcome(kind)
    except ValueError:
        raise WireError(f"unknown notification kind {kind}") from None
    if not 1 <= argument <= MAX_CONSUMERS:
        raise WireError(f"notification names {argument} consumers")
    return Completion(outcome, argument, leases, request_ids, sender, sequence)


def _parse_leases(message: bytes, count: int) -> tuple[Lease, ...]:
    size = _HEADER.size + count * _LEASE_ENTRY.size
    if count == 0 or len(message) != size:
        raise WireError(f"notification of {len(message)} bytes does not hold {count} leases")
    body = memoryview(message)[_HEADER.size :]
    leases = tuple(map(Lease._make, _LEASE_ENTRY.iter_unpack(body)))
    _check_leases(leases)
    return leases


def _parse_ids(message: bytes, count: int) -> tuple[str, ...]:
    # An entry takes at least 3 bytes: a count beyond that is refused before the loop.
    if not 1 <= count <= (len(message) - _HEADER.size) // 3:
        raise WireError(f"notification of {len(message)} bytes does not hold {count} request ids")
    request_ids = []
    offset = _HEADER.size
    try:
        for _ in range(count):
            (length,) = _ID_LENGTH.unpack_from(message, offset)
            start = offset + _ID_LENGTH.size
            offset = start + length
            if not 1 <= length <= MAX_REQUEST_ID_BYTES or offset > len(message):
                raise WireError(f"notification: request id of {length} bytes")
            request_ids.append(message[start:offset].decode())
    except (struct.error, UnicodeDecodeError):
        raise WireError("notification: request ids are cut off or not UTF-8") from None
    if offset != len(message):
        raise WireError(f"notification: {len(message) - offset} bytes after the last request id")
    return tuple(request_ids)


def _check_leases(leases: Iterable[tuple[int, int]]) -> None:
    for slot, nonce in leases:
        if not (0 <= slot < MAX_LEASE_SLOTS and 0 < nonce < 1 << 63):
            raise WireError(f"notification: slot {slot} with nonce {nonce:#x} is not a lease")


def _id_bytes(request_id: str) -> bytes:
    try:
        text = request_id.encode()
    except UnicodeEncodeError:
        raise WireError(f"request id {request_id!a} is not valid Unicode") from None
    if not 1 <= len(text) <= MAX_REQUEST_ID_BYTES:
        raise WireError(f"request id of {len(text)} bytes, not 1 .. {MAX_REQUEST_ID_BYTES}")
    return text


# --- counting once ------------------------------------------------------------------------------


class SequenceTracker:
    """Recognises repeated notifications by their sequence numbers, per sender.

    Numbers may arrive in any order within a window of 1024; older ones count as repeated. The
    least recently heard sender is forgotten beyond ``max_senders``. Let a sender be the pair of
    NIXL agent name and the number in the message, so that no peer can use up another's numbers.
    """

    WINDOW = 1024

    def __init__(self, max_senders: int = 4096) -> None:
        if max_senders < 1:
            raise ValueError(f"max_senders {max_senders} is not positive")
        self._max_senders = max_senders
        # sender -> (highest number, bit i set: highest - i was seen)
        self._seen: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def accept(self, sender: Hashable, sequence: int) -> bool:
        """``True`` the first time that this number of this sender arrives."""
        highest, seen = self._seen.get(sender, (sequence - 1, 0))
        ahead = sequence - highest
        if ahead > 0:
            shifted = seen << ahead if ahead < self.WINDOW else 0
            seen = (shifted & ((1 << self.WINDOW) - 1)) | 1
            highest = sequence
        elif -ahead >= self.WINDOW or seen >> -ahead & 1:
            self._seen.move_to_end(sender)
            return False
        else:
            seen |= 1 << -ahead
        self._seen[sender] = (highest, seen)
        self._seen.move_to_end(sender)
        if len(self._seen) > self._max_senders:
            self._seen.popitem(last=False)
        return True


# --- msgpack ------------------------------------------------------------------------------------


def _decode(
    decode: Callable[[bytes | memoryview], T], data: bytes | memoryview, limit: int, what: str
) -> T:
    if len(data) > limit:
        raise WireError(f"{what} of {len(data)} bytes, over the limit of {limit}")
    try:
        return decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, OverflowError) as error:
        _refuse(what, error)


def _refuse(what: str, error: Exception) -> NoReturn:
    raise WireError(f"{what}: {error}") from None


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError, UnicodeError, msgspec.MsgspecError) as error:
        raise WireError(f"{type(value).__name__} cannot be encoded: {error}") from None
