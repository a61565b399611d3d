"""Frames and notifications: exact bytes, round trips, and that nothing but WireError comes out."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvnixl import wire
from kvnixl.compat import CompatibilityCheck, dump_factors, hash_factors
from kvnixl.errors import (
    CompatibilityError,
    EngineIdMismatchError,
    HandshakeRefusedError,
    IncarnationChangedError,
    WireError,
)
from kvnixl.metadata import (
    MAX_BLOCK_IDS,
    MAX_LEASE_SLOTS,
    MAX_REQUEST_ID_BYTES,
    KvNixlExtension,
    Lease,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from tests import wire_examples

FRAMES = wire_examples.examples()
NOTIFICATIONS = {
    name: frame
    for name, frame in FRAMES.items()
    if name.startswith(("text_", "push_", "completion_", "heartbeat_"))
}
# name of an example -> what reads it
READERS: dict[str, Callable[[bytes], Any]] = {
    "get_meta": wire.decode_get_meta,
    "handshake_payload": wire.decode_handshake_payload,
    "agent_metadata": wire.decode_agent_metadata,
    "clock": wire.decode_clock,
    **dict.fromkeys(NOTIFICATIONS, wire.parse_notification),
}
# Other processes may take the CPU for a while: how long a draw takes says nothing here.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FUZZ = settings(PATIENT, max_examples=150)

# Any tree that msgpack can hold.
objects = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5)
    ),
    max_leaves=20,
)


# --- exact bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_byte_for_byte_what_this_version_always_wrote(name: str) -> None:
    assert FRAMES[name] == wire_examples.golden(name)


def test_the_protocol_document_shows_every_frame_as_the_code_writes_it() -> None:
    text = wire_examples.PROTOCOL_DOC.read_text(encoding="utf-8")
    assert wire_examples.documented(text) == FRAMES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("agent_metadata_v13", wire_examples.stock_metadata()),
        ("agent_metadata_v14", wire_examples.stock_metadata(ple_block_len=1536)),
    ],
)
def test_metadata_of_stock_engines_of_both_protocol_versions_is_read(
    name: str, expected: NixlAgentMetadata
) -> None:
    assert wire.decode_agent_metadata(wire_examples.golden(name)) == expected


def test_without_an_extension_metadata_is_a_stock_peers_plus_one_null_key() -> None:
    ours = msgspec.msgpack.decode(
        wire.encode_agent_metadata(wire_examples.stock_metadata(ple_block_len=1536))
    )
    assert ours.pop("kvnixl") is None
    assert msgspec.msgpack.encode(ours) == wire_examples.golden("agent_metadata_v14")


# --- side channel -------------------------------------------------------------------------------


@given(st.integers(0, wire.MAX_RANK), st.integers(0, wire.MAX_RANK))
@PATIENT
def test_get_meta_round_trip(pp_rank: int, tp_rank: int) -> None:
    frame = wire.encode_get_meta(pp_rank, tp_rank)
    assert wire.decode_get_meta(frame) == wire.GetMeta(pp_rank, tp_rank)
    assert msgspec.msgpack.decode(frame) == [b"get_meta_msg", pp_rank, tp_rank]


@pytest.mark.parametrize("ranks", [(-1, 0), (0, -1), (wire.MAX_RANK + 1, 0), (0, 2**64)])
def test_ranks_out_of_range_are_not_sent(ranks: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        wire.encode_get_meta(*ranks)


@pytest.mark.parametrize(
    "message",
    [
        b"get_meta_msg",
        (b"get_meta_msg", 0),
        (b"get_meta_msg", 0, 0, 0),
        (b"get_meta_msg", "0", 0),
        (b"get_meta_msg", 0, -1),
        (b"get_meta_msg", 0, 2**32),
        (b"get_meta_msg", True, 0),
        (b"get_meta_msg", 0.0, 0),
        (b"another_msg", 0, 0),
        ("get_meta_msg", 0, 0),
        {"get_meta_msg": 0},
        None,
    ],
)
def test_other_questions_are_refused(message: object) -> None:
    with pytest.raises(WireError):
        wire.decode_get_meta(msgspec.msgpack.encode(message))


def test_an_oversized_question_is_refused_unread() -> None:
    with pytest.raises(WireError, match="limit"):
        wire.decode_get_meta(bytes(wire.MAX_REQUEST_BYTES + 1))


def test_clock_round_trip_and_refusals() -> None:
    assert wire.decode_clock(wire.encode_clock(1e6 + 0.25)) == 1e6 + 0.25
    assert wire.decode_clock(wire.encode_clock(7)) == 7.0
    for bad in (math.nan, math.inf, -math.inf, "1", None, [1.0], True):
        with pytest.raises(WireError, match="clock"):
            wire.decode_clock(msgspec.msgpack.encode(bad))


def test_metadata_round_trip_with_every_field_set() -> None:
    for metadata in (wire_examples.kvnixl_metadata(), wire_examples.stock_metadata()):
        assert wire.decode_agent_metadata(wire.encode_agent_metadata(metadata)) == metadata


def test_keys_of_later_versions_are_ignored() -> None:
    tree = msgspec.msgpack.decode(FRAMES["agent_metadata"])
    tree["from_the_future"] = {"any": ["thing", 1]}
    tree["kvnixl"]["from_the_future"] = [1, 2]
    tree["kvnixl"]["features"].append("from_the_future")
    read = wire.decode_agent_metadata(msgspec.msgpack.encode(tree))
    assert read.kvnixl is not None
    assert read.kvnixl.features == ["lease_slots", "from_the_future"]


def test_metadata_that_would_be_refused_is_not_sent() -> None:
    metadata = wire_examples.stock_metadata()
    metadata.block_lens = [4096]
    with pytest.raises(WireError, match="block_lens has 1 entries for 2 regions"):
        wire.encode_agent_metadata(metadata)
    metadata.block_lens = [4096, "x"]  # type: ignore[list-item]
    with pytest.raises(WireError, match="block_lens"):
        wire.encode_agent_metadata(metadata)
    metadata.block_lens = [4096, 2**70]
    with pytest.raises(WireError, match="cannot be encoded"):
        wire.encode_agent_metadata(metadata)
    metadata.block_lens = [4096, 2048]
    metadata.engine_id = "\ud800"
    with pytest.raises(WireError, match="cannot be encoded"):
        wire.encode_agent_metadata(metadata)


def _inflated(kind: bytes) -> bytes:
    """A map whose one value claims 2**32 - 1 elements or bytes."""
    return (
        b"\x81" + msgspec.msgpack.encode("block_lens") + kind + b"\xff\xff\xff\xff" + b"\x01" * 64
    )


@pytest.mark.parametrize(
    "kind", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=["array", "map", "str", "bin"]
)
@pytest.mark.parametrize("read", set(READERS.values()))
def test_lengths_beyond_the_frame_are_refused_without_allocating(
    kind: bytes, read: Callable[[bytes], Any]
) -> None:
    for frame in (_inflated(kind), kind + b"\xff\xff\xff\xff" + b"\x01" * 64):
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                read(frame)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize("read", set(READERS.values()))
def test_nesting_beyond_the_stack_is_refused(read: Callable[[bytes], Any]) -> None:
    deep = b"\x81" + msgspec.msgpack.encode("unknown") + b"\x91" * 50_000 + b"\x01"
    for frame in (deep, b"PUSH_REG:" + deep):
        with pytest.raises(WireError):
            read(frame)


# --- opening a reply ----------------------------------------------------------------------------

FACTORS = {"model": "m", "dtype": "bf16"}


def _reply(factors: dict[str, Any], *, kvnixl: bool = True, clock: float = 5.0) -> list[bytes]:
    metadata = wire_examples.kvnixl_metadata()
    assert metadata.kvnixl is not None
    metadata.kvnixl.factors = dump_factors(factors)
    if not kvnixl:
        metadata.kvnixl = None
    payload = NixlHandshakePayload(hash_factors(factors), wire.encode_agent_metadata(metadata))
    return wire.encode_reply(wire.encode_handshake_payload(payload), clock)


def test_a_fitting_reply_opens() -> None:
    for kvnixl in (True, False):
        opened = wire.open_handshake(
            _reply(FACTORS, kvnixl=kvnixl),
            CompatibilityCheck(FACTORS),
            expected_engine_id="prefill-0",
        )
        assert opened.clock == 5.0
        assert opened.compatibility_hash == hash_factors(FACTORS)
        assert opened.differences == ()
        assert (opened.metadata.kvnixl is not None) is kvnixl


def test_unfitting_metadata_is_never_decoded() -> None:
    payload = NixlHandshakePayload("another hash", b"\xc1 not metadata of this version")
    frames = wire.encode_reply(wire.encode_handshake_payload(payload), 0.0)
    with pytest.raises(CompatibilityError, match="another hash") as caught:
        wire.open_handshake(frames, CompatibilityCheck(FACTORS))
    assert caught.value.differences == ()
    with pytest.raises(WireError):
        wire.open_handshake(frames, CompatibilityCheck(FACTORS, enforce=False))


def test_what_differs_is_named_even_if_the_rest_cannot_be_read() -> None:
    theirs = {**FACTORS, "dtype": "fp16"}
    only_extension = msgspec.msgpack.encode(
        {"engine_id": 7, "kvnixl": KvNixlExtension(incarnation=1, factors=dump_factors(theirs))}
    )
    payload = NixlHandshakePayload(hash_factors(theirs), only_extension)
    frames = wire.encode_reply(wire.encode_handshake_payload(payload), 0.0)
    with pytest.raises(CompatibilityError, match="dtype: local 'bf16', remote 'fp16'"):
        wire.open_handshake(frames, CompatibilityCheck(FACTORS), peer="engine at 10.0.0.1:5600")


def test_another_engine_on_the_port_is_named() -> None:
    with pytest.raises(EngineIdMismatchError, match=r"'decode-9'.*'prefill-0'") as caught:
        wire.open_handshake(
            _reply(FACTORS), CompatibilityCheck(FACTORS), expected_engine_id="decode-9"
        )
    assert (caught.value.expected, caught.value.actual) == ("decode-9", "prefill-0")


def test_a_restarted_engine_with_the_same_id_is_named() -> None:
    mine = CompatibilityCheck(FACTORS)
    incarnation = 0x0123_4567_89AB_CDEF
    wire.open_handshake(_reply(FACTORS), mine, expected_incarnation=incarnation)
    with pytest.raises(IncarnationChangedError, match="restarted") as caught:
        wire.open_handshake(_reply(FACTORS), mine, expected_incarnation=1)
    assert (caught.value.expected, caught.value.actual) == (1, incarnation)
    with pytest.raises(IncarnationChangedError) as caught:
        wire.open_handshake(_reply(FACTORS, kvnixl=False), mine, expected_incarnation=1)
    assert caught.value.actual is None


def test_a_refusal_carries_its_code_and_a_bounded_reason() -> None:
    frames = wire.encode_error_reply(wire.ErrorCode.UNKNOWN_RANK, "no rank \ud800" + "x" * 10_000)
    assert len(frames) == 1  # a stock client asserts two frames, so it fails at once
    with pytest.raises(HandshakeRefusedError, match="unknown_rank") as caught:
        wire.open_handshake(frames, CompatibilityCheck(FACTORS))
    assert caught.value.code == "unknown_rank"
    assert len(caught.value.reason) <= 512
    hostile = msgspec.msgpack.encode({"kvnixl_error": "\x1b[2J\n", "reason": "\n\x1b" * 2000})
    with pytest.raises(HandshakeRefusedError) as caught:
        wire.open_handshake([hostile], CompatibilityCheck(FACTORS))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("count", [0, 3])
def test_a_reply_of_another_number_of_frames_is_refused(count: int) -> None:
    with pytest.raises(WireError, match=f"got {count}"):
        wire.open_handshake([b"x"] * count, CompatibilityCheck(FACTORS))


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_reply_opens_or_gives_a_typed_error(frames: list[bytes]) -> None:
    with pytest.raises((WireError, CompatibilityError, HandshakeRefusedError)):
        wire.open_handshake(frames, CompatibilityCheck(FACTORS))


# --- notifications ------------------------------------------------------------------------------

LEASES = st.tuples(st.integers(0, MAX_LEASE_SLOTS - 1), st.integers(1, 2**63 - 1))
UINT64 = st.integers(0, 2**64 - 1)
REQUEST_IDS = st.one_of(
    st.text(min_size=1, max_size=60),
    st.text("HB:,PUSH_REG0123456789\xff\u0000é", min_size=1, max_size=30),
    st.text(min_size=1, max_size=20).map("HB:{}".format),
    st.text(min_size=1, max_size=20).map("PUSH_REG:{}".format),
    st.text(min_size=1, max_size=20).map("{}:1".format),
)


@FUZZ
@given(
    st.sampled_from(wire.Outcome),
    st.integers(1, wire.MAX_CONSUMERS),
    UINT64,
    UINT64,
    st.lists(LEASES, max_size=20),
    st.lists(REQUEST_IDS, min_size=1, max_size=20),
)
def test_binary_completions_keep_any_lease_and_any_id(
    outcome: wire.Outcome,
    consumers: int,
    sender: int,
    sequence: int,
    leases: list[tuple[int, int]],
    request_ids: list[str],
) -> None:
    origin: dict[str, Any] = {"sender": sender, "sequence": sequence}
    kinds: dict[str, Any] = {"leases": leases} if leases else {"request_ids": request_ids}
    frame = wire.encode_completion(outcome, consumers, **origin, **kinds)
    assert wire.parse_notification(frame) == wire.Completion(
        outcome,
        consumers,
        tuple(Lease(*lease) for lease in leases),
        () if leases else tuple(request_ids),
        sender,
        sequence,
    )


@FUZZ
@given(
    st.integers(1, 2**32 - 1),
    UINT64,
    UINT64,
    st.lists(LEASES, max_size=20),
    st.lists(REQUEST_IDS, min_size=1, max_size=20),
)
def test_binary_heartbeats_keep_any_lease_and_any_id(
    milliseconds: int,
    sender: int,
    sequence: int,
    leases: list[tuple[int, int]],
    request_ids: list[str],
) -> None:
    kinds: dict[str, Any] = {"leases": leases} if leases else {"request_ids": request_ids}
    frame = wire.encode_heartbeat(milliseconds / 1000, sender=sender, sequence=sequence, **kinds)
    read = wire.parse_notification(frame)
    assert isinstance(read, wire.Heartbeat)
    assert read.leases == tuple(leases)
    assert read.request_ids == (() if leases else tuple(request_ids))
    assert read.extension == milliseconds / 1000
    assert (read.sender, read.sequence) == (sender, sequence)


@FUZZ
@given(REQUEST_IDS, st.integers(1, wire.MAX_CONSUMERS))
def test_text_completions_name_the_right_request_or_are_not_sent(
    request_id: str, consumers: int
) -> None:
    try:
        frame = wire.encode_text_completion(request_id, consumers)
    except WireError:
        return
    assert frame == f"{request_id}:{consumers}".encode()
    assert wire.parse_notification(frame) == wire.Completion(
        wire.Outcome.DONE, consumers, request_ids=(request_id,)
    )


def test_ids_that_read_as_commands_to_a_stock_peer_are_not_sent_as_text() -> None:
    for request_id in ("HB:a", "PUSH_REG:a", "", "\ud800", "x" * (MAX_REQUEST_ID_BYTES + 1)):
        with pytest.raises(WireError):
            wire.encode_text_completion(request_id, 1)
    for request_ids in ([], ["a,b"], [""], ["a", "\udfff"]):
        with pytest.raises(WireError):
            wire.encode_text_heartbeat(request_ids)
    assert wire.encode_text_completion("a:HB:b", 3) == b"a:HB:b:3"


@FUZZ
@given(st.lists(REQUEST_IDS, min_size=1, max_size=10))
def test_text_heartbeats_name_the_right_requests_or_are_not_sent(request_ids: list[str]) -> None:
    try:
        frame = wire.encode_text_heartbeat(request_ids)
    except WireError:
        return
    assert wire.parse_notification(frame) == wire.Heartbeat(request_ids=tuple(request_ids))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"cmpl-1",
        b":1",
        b"cmpl-1:",
        b"cmpl-1:0",
        b"cmpl-1:-1",
        b"cmpl-1:+1",
        b"cmpl-1: 1",
        b"cmpl-1:1 ",
        b"cmpl-1:1_0",
        b"cmpl-1:1.0",
        "cmpl-1:\u0661".encode(),  # int() reads Arabic digits
        b"cmpl-1:65537",
        b"cmpl-1:99999999999999999999",
        b"HB:",
        b"HB:,,",
        b"\xfe",
        b"cmpl-\xe9:1",
        b"\xff",
        b"\xffKVN",
        b"PUSH_REG:",
        b"PUSH_REG:\x80",
        b"PUSH_REG:cmpl-1:1",
    ],
)
def test_malformed_notifications_are_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        wire.parse_notification(message)


def test_notifications_over_the_size_limit_are_refused_unread() -> None:
    with pytest.raises(WireError, match="over"):
        wire.parse_notification(b"HB:" + b"a," * (wire.MAX_NOTIFICATION_BYTES // 2))
    with pytest.raises(WireError, match="limit"):
        wire.parse_notification(b"PUSH_REG:" + bytes(wire.MAX_REGISTRATION_BYTES + 1))
    with pytest.raises(WireError, match="split it"):
        wire.encode_heartbeat(1.0, sender=1, sequence=1, leases=[(1, 1)] * 90_000)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"\xfe", "UTF-8"),
        (1, b"X", "header"),
        (4, b"\x02", "version 2"),
        (5, b"\x00", "kind 0"),
        (5, b"\x63", "kind 99"),
        (6, b"\x03", "form 3"),
        (7, b"\x01", "header"),
        (24, bytes(4), "0 consumers"),
        (24, b"\xff" * 4, "consumers"),
        (28, bytes(4), "0 leases"),
        (28, b"\x02\0\0\0", "2 leases"),
        (28, b"\xff" * 4, "leases"),
        (32, b"\xff" * 4, "not a lease"),
        (36, bytes(8), "not a lease"),
        (36, b"\xff" * 8, "not a lease"),
    ],
)
def test_every_field_of_a_binary_completion_is_checked(
    offset: int, value: bytes, reason: str
) -> None:
    frame = bytearray(FRAMES["completion_done"])
    frame[offset : offset + len(value)] = value
    with pytest.raises(WireError, match=reason):
        wire.parse_notification(bytes(frame))


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<H", 0),
        struct.pack("<H", 5) + b"abc",
        struct.pack("<H", 3) + b"ab\xff",
        struct.pack("<H", 3) + b"abc" + b"more",
        struct.pack("<H", MAX_REQUEST_ID_BYTES + 1) + b"a" * (MAX_REQUEST_ID_BYTES + 1),
        b"\x01",
    ],
)
def test_every_field_of_binary_request_ids_is_checked(body: bytes) -> None:
    header = FRAMES["completion_released"][:32]
    with pytest.raises(WireError, match="request id"):
        wire.parse_notification(header + body)


def test_a_heartbeat_extends_by_a_finite_positive_time() -> None:
    for extension in (0.0, -1.0, math.nan, math.inf, 1e9):
        with pytest.raises(WireError, match="extended"):
            wire.encode_heartbeat(extension, sender=1, sequence=1, leases=[(1, 1)])
    frame = bytearray(FRAMES["heartbeat_leases"])
    frame[24:28] = bytes(4)
    with pytest.raises(WireError, match="0 ms"):
        wire.parse_notification(bytes(frame))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"leases": [(1, 1)], "request_ids": ["a"]},
        {"leases": [(MAX_LEASE_SLOTS, 1)]},
        {"leases": [(-1, 1)]},
        {"leases": [(1, 0)]},
        {"leases": [(1, 2**63)]},
        {"request_ids": [""]},
        {"leases": [(1, 1)], "sender": -1},
        {"leases": [(1, 1)], "sequence": 2**64},
        {"leases": [(1, 1)], "consumers": 0},
        {"leases": [(1, 1)], "consumers": wire.MAX_CONSUMERS + 1},
    ],
)
def test_binary_completions_that_would_be_refused_are_not_sent(arguments: dict[str, Any]) -> None:
    arguments = {"sender": 1, "sequence": 1, "consumers": 1, **arguments}
    with pytest.raises(WireError):
        wire.encode_completion(wire.Outcome.DONE, **arguments)


def test_push_registration_round_trip_and_refusals() -> None:
    registration = wire_examples.push_registration()
    assert wire.parse_notification(wire.encode_push_registration(registration)) == registration
    tree = msgspec.msgpack.decode(FRAMES["push_registration"][9:])
    for key, value in {
        "request_id": 7,
        "decode_port": 0,
        "decode_host": "a b",
        "remote_tp_size": 0,
        "local_block_ids": [[-1]],
        "remote_port": 65536,
    }.items():
        with pytest.raises(WireError, match=key):
            wire.parse_notification(b"PUSH_REG:" + msgspec.msgpack.encode({**tree, key: value}))
        without = {name: kept for name, kept in tree.items() if name != key}
        with pytest.raises(WireError, match=key):
            wire.parse_notification(b"PUSH_REG:" + msgspec.msgpack.encode(without))
    tree.pop("remote_pp_size")  # an older stock peer leaves it out
    tree["unknown"] = 1
    assert wire.parse_notification(b"PUSH_REG:" + msgspec.msgpack.encode(tree)) == registration
    half = [1] * (MAX_BLOCK_IDS // 2 + 1)
    with pytest.raises(WireError, match="block ids"):
        wire.parse_notification(
            b"PUSH_REG:" + msgspec.msgpack.encode({**tree, "local_block_ids": [half, half]})
        )


# --- whatever the bytes -------------------------------------------------------------------------


@FUZZ
@given(st.binary(max_size=300))
@example(b"\xff" * 300)
@example(b"\xff\x4b\x56\x4e\x01\x01\x01\x00" + bytes(292))
def test_any_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    for prefix in (b"", b"HB:", b"PUSH_REG:", b"\xffKVN\x01", FRAMES["completion_released"][:32]):
        _value_or_wire_error(wire.parse_notification, prefix + data)
    for read in READERS.values():
        _value_or_wire_error(read, data)
    wire.peek_extension(data)


@FUZZ
@given(objects)
def test_any_tree_is_a_value_or_a_wire_error(tree: object) -> None:
    data = msgspec.msgpack.encode(tree)
    for read in READERS.values():
        _value_or_wire_error(read, data)
    _value_or_wire_error(wire.parse_notification, b"PUSH_REG:" + data)


@FUZZ
@given(
    st.sampled_from(sorted(msgspec.msgpack.decode(FRAMES["agent_metadata"]))),
    objects,
)
def test_metadata_with_one_field_replaced_is_consistent_or_refused(key: str, value: object) -> None:
    tree = msgspec.msgpack.decode(FRAMES["agent_metadata"])
    tree[key] = value
    data = msgspec.msgpack.encode(tree)
    metadata = _value_or_wire_error(wire.decode_agent_metadata, data)
    if metadata is not None:
        metadata.check()
        assert wire.decode_agent_metadata(wire.encode_agent_metadata(metadata)) == metadata
    wire.peek_extension(data)


@pytest.mark.parametrize("name", READERS)
def test_a_truncated_frame_is_refused_wherever_it_is_cut(name: str) -> None:
    frame, read = FRAMES[name], READERS[name]
    read(frame)
    for end in range(len(frame)):
        if name.startswith("text_"):
            _value_or_wire_error(read, frame[:end])
        else:
            with pytest.raises(WireError):
                read(frame[:end])
    if not name.startswith("text_"):
        with pytest.raises(WireError):
            read(frame + b"\x00")


@pytest.mark.parametrize("name", READERS)
@settings(PATIENT, max_examples=40)
@given(data=st.data())
def test_a_mutated_frame_is_a_value_or_a_wire_error(name: str, data: st.DataObject) -> None:
    frame = bytearray(FRAMES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        frame = frame or bytearray(1)
    _value_or_wire_error(READERS[name], bytes(frame))


def _value_or_wire_error(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except WireError as refusal:
        reason = str(refusal)
    assert len(reason) < 2000, "a message must not carry the frame into the log"
    return None


# --- counting once ------------------------------------------------------------------------------


def test_capacities_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_senders"):
        wire.SequenceTracker(0)


@given(st.lists(st.integers(0, 3000), max_size=300), st.integers(0, 2**64 - 4000))
@PATIENT
def test_a_sequence_number_is_accepted_once(numbers: list[int], start: int) -> None:
    tracker = wire.SequenceTracker()
    accepted: set[int] = set()
    for number in numbers:
        sequence = start + number
        recent = not accepted or sequence > max(accepted) - tracker.WINDOW
        assert tracker.accept("d0", sequence) == (recent and sequence not in accepted)
        if recent:
            accepted.add(sequence)


def test_senders_have_their_own_numbers_and_are_bounded() -> None:
    tracker = wire.SequenceTracker(max_senders=2)
    assert tracker.accept("a", 1)
    assert tracker.accept("b", 1)
    assert not tracker.accept("a", 1)
    assert tracker.accept("c", 1)
    assert len(tracker) == 2
    assert not tracker.accept("a", 1), "the least recently heard sender was forgotten, not this one"
    assert tracker.accept("b", 1)
