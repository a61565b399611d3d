"""Values: what a worker exports and what a client hands over, checked after decoding."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvnixl.errors import TransferParamsError, WireError
from kvnixl.metadata import (
    MAX_BLOCK_IDS,
    MAX_LEASE_SLOTS,
    MAX_REGION_MEMBERS,
    MAX_REQUEST_ID_BYTES,
    HeartbeatInfo,
    KvNixlExtension,
    Lease,
    LeaseSlotRegion,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    PromptDigest,
    RemoteMeta,
    TransferParams,
    format_lease,
    parse_lease,
)
from tests.wire_examples import kvnixl_metadata, stock_metadata

# Other processes may take the CPU for a while: how long a draw takes says nothing here.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOP = 2**64


def params(**changes: Any) -> dict[str, Any]:
    """What a producer's scheduler emits, through a router, with some keys changed."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3], [7]],
        "remote_engine_id": "prefill-0",
        "remote_request_id": "cmpl-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "kvnixl_lease": "3:1f",
        "a_key_of_the_router": {"any": "thing"},
        **changes,
    }


# --- leases -------------------------------------------------------------------------------------


@given(st.integers(0, MAX_LEASE_SLOTS - 1), st.integers(1, 2**63 - 1))
@PATIENT
def test_a_lease_survives_as_a_string(slot: int, nonce: int) -> None:
    text = format_lease(slot, nonce)
    assert parse_lease(text) == Lease(slot, nonce) == (slot, nonce)
    assert str(Lease(slot, nonce)) == text == f"{slot}:{nonce:x}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1",
        "1:",
        ":1",
        "1:0",
        "01:1",
        "1:01",
        "1:0x1",
        "1:F",
        " 1:1",
        "1:1\n",
        "-1:1",
        "1:-1",
        "1:1:1",
        "1_0:1",
        "\u0661:1",
        "1:8000000000000000",
        "1:ffffffffffffffffffff",
        f"{MAX_LEASE_SLOTS}:1",
        "9" * 5000 + ":1",
        None,
        7,
        b"1:1",
        ["1:1"],
    ],
)
def test_anything_but_a_canonical_lease_is_refused(text: object) -> None:
    with pytest.raises(WireError, match="not a lease") as caught:
        parse_lease(text)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("slot", "nonce"), [(-1, 1), (MAX_LEASE_SLOTS, 1), (0, 0), (0, -1), (0, 2**63)]
)
def test_a_lease_out_of_range_is_not_written(slot: int, nonce: int) -> None:
    with pytest.raises(ValueError, match="lease"):
        format_lease(slot, nonce)


# --- prompts ------------------------------------------------------------------------------------

TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


@given(TOKEN_IDS, TOKEN_IDS)
@PATIENT
def test_a_prompt_is_told_from_others(mine: list[int], other: list[int]) -> None:
    prompt = PromptDigest.parse(str(PromptDigest.of(mine)))
    assert prompt.num_tokens == len(mine)
    assert prompt.begins(mine)
    assert prompt.begins(mine + other)
    assert prompt.begins(other) == (other[: len(mine)] == mine)
    assert prompt.begins(np.array(mine, np.int32))


def test_the_form_of_a_prompt_stays_as_it_is() -> None:
    """Engines of several versions have to agree."""
    digest = hashlib.blake2b(b"\1" + bytes(7) + b"\2" + bytes(7), digest_size=16).hexdigest()
    assert str(PromptDigest.of([1, 2])) == f"2:{digest}"


@pytest.mark.parametrize("token_ids", [["1"], [1.0], [None], [2**63]])
def test_token_ids_are_integers(token_ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        PromptDigest.of(token_ids)


@pytest.mark.parametrize(
    "text", ["", "1", "01:" + "0" * 32, "1:" + "0" * 31, "1:" + "A" * 32, "-1:" + "0" * 32, None, 7]
)
def test_anything_but_a_canonical_prompt_is_refused(text: object) -> None:
    with pytest.raises(WireError, match="not a prompt"):
        PromptDigest.parse(text)


# --- what a worker exports ----------------------------------------------------------------------


def _set(name: str, value: object) -> Callable[[NixlAgentMetadata], None]:
    return lambda metadata: setattr(metadata, name, value)


def _set_slots(region: LeaseSlotRegion) -> Callable[[NixlAgentMetadata], None]:
    return lambda metadata: setattr(
        metadata, "kvnixl", KvNixlExtension(incarnation=1, lease_slots=region)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("block_lens", [4096]), "block_lens has 1 entries for 2 regions"),
        (_set("block_strides", [4096] * 3), "block_strides has 3 entries for 2 regions"),
        (_set("kv_caches_base_addr", [0]), "entries for 1 regions"),
        (_set("region_num_blocks", []), "region_num_blocks has 0"),
        (_set("region_group_ids", [0]), "region_group_ids has 1"),
        (_set("region_names", ["a"] * 3), "region_names has 3"),
        (_set("region_mem_types", ["DRAM"]), "region_mem_types has 1"),
        (_set("region_mem_types", ["DRAM", "FILE"]), "holds 'FILE'"),
        (_set("region_members", [["layers.0", "layers.1"]]), "region_members has 1 lists"),
        (_set("region_members", [["a"], ["a"]]), "in more than one region"),
        (_set("block_strides", [4095, 8192]), "region 0: block stride 4095 is less than"),
        (_set("kv_caches_base_addr", [TOP - 1, 0]), "region 0: 64 blocks .* pass 2"),
        (_set("block_strides", [4096, 2**62]), "region 1: 64 blocks of stride"),
        (_set("region_num_blocks", [64, 2**63 - 1]), "region 1: 9223372036854775807 blocks"),
        (_set("packed_member_layouts", {"elsewhere": (0, 1)}), "'elsewhere' is in no region"),
        (_set("packed_member_layouts", {"layers.1": (2000, 100)}), "pass the block length 2048"),
        (_set_slots(LeaseSlotRegion(4, 1)), "not aligned"),
        (_set_slots(LeaseSlotRegion(TOP - 8, 2)), "pass 2"),
    ],
)
def test_inconsistent_metadata_is_refused_by_field(
    change: Callable[[NixlAgentMetadata], None], reason: str
) -> None:
    metadata = stock_metadata()
    metadata.check()
    change(metadata)
    with pytest.raises(WireError, match=reason) as caught:
        metadata.check()
    assert "'prefill-0'" in str(caught.value)


def test_the_names_of_all_regions_together_are_bounded_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = stock_metadata()
    metadata.packed_member_layouts = {}
    half = MAX_REGION_MEMBERS // 2
    metadata.region_members = [[f"{r}.{n}" for n in range(half)] for r in range(2)]
    metadata.check()
    metadata.region_members[1].append("one too many")
    monkeypatch.delattr(NixlAgentMetadata, "_check_members")  # it would go through them all
    with pytest.raises(WireError, match="region_members holds 65537 names, more than 65536"):
        metadata.check()


def test_the_last_byte_of_the_address_space_may_be_exported() -> None:
    metadata = stock_metadata()
    metadata.num_blocks = 2
    metadata.region_num_blocks = None
    last_block_ends = 8192 + 2048  # two blocks of region 1: one stride, then one block length
    metadata.kv_caches_base_addr = [0, TOP - last_block_ends]
    metadata.check()
    metadata.kv_caches_base_addr = [0, TOP - last_block_ends + 1]
    with pytest.raises(WireError, match="region 1"):
        metadata.check()
    metadata.kvnixl = KvNixlExtension(incarnation=1, lease_slots=LeaseSlotRegion(TOP - 16, 2))
    metadata.kv_caches_base_addr = [0, 0]
    metadata.check()


@given(
    base=st.integers(0, TOP - 1),
    stride=st.integers(1, 2**63 - 1),
    length=st.integers(1, 2**63 - 1),
    count=st.integers(1, 2**63 - 1),
)
@settings(PATIENT, max_examples=300)
def test_metadata_passes_exactly_if_every_block_lies_in_the_address_space(
    base: int, stride: int, length: int, count: int
) -> None:
    metadata = stock_metadata()
    metadata.packed_member_layouts = {}
    metadata.kv_caches_base_addr = [0, base]
    metadata.block_lens = [1, length]
    metadata.block_strides = [1, stride]
    metadata.region_num_blocks = [1, count]
    fits = stride >= length and base + (count - 1) * stride + length <= TOP
    try:
        metadata.check()
    except WireError:
        assert not fits
    else:
        assert fits


def test_a_worker_without_regions_is_consistent() -> None:
    metadata = stock_metadata()
    for name in ("kv_caches_base_addr", "block_lens", "block_strides", "region_members"):
        setattr(metadata, name, [])
    for name in ("region_num_blocks", "region_group_ids", "region_names", "region_mem_types"):
        setattr(metadata, name, None)
    metadata.packed_member_layouts = {}
    metadata.check()
    assert metadata.num_regions == 0


def test_values_survive_the_way_to_the_workers() -> None:
    assert pickle.loads(pickle.dumps(kvnixl_metadata())) == kvnixl_metadata()
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_recv("r", [[1]], params())
    assert pickle.loads(pickle.dumps(meta)).reqs_to_recv == meta.reqs_to_recv


# --- what a client hands over -------------------------------------------------------------------


def test_parameters_are_read_and_unknown_keys_ignored() -> None:
    parsed = TransferParams.parse(params(remote_registration_generation=4), "r")
    assert parsed.tp_size == 2
    assert parsed.lease == Lease(3, 0x1F)
    assert parsed.remote("r") == RemoteMeta(
        block_ids=[[1, 2, 3], [7]],
        host="10.0.0.1",
        port=5600,
        engine_id="prefill-0",
        request_id="cmpl-1",
        blocks_expiry_time=None,
        num_tokens=100,
        registration_generation=4,
        lease=Lease(3, 0x1F),
    )


def test_null_is_as_good_as_absent() -> None:
    nothing = TransferParams.parse({}, "r")
    assert nothing == TransferParams.parse(dict.fromkeys(TransferParams.__struct_fields__), "r")
    assert nothing.lease is None
    assert TransferParams.parse(params(remote_block_ids=()), "r").remote("r").block_ids == []


@pytest.mark.parametrize(
    "key",
    ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"],
)
@pytest.mark.parametrize("null", [True, False])
def test_a_missing_key_is_named_with_its_request(key: str, null: bool) -> None:
    incomplete = params(**{key: None})
    if not null:
        del incomplete[key]
    meta = NixlConnectorMetadata()
    with pytest.raises(TransferParamsError, match=rf"request 'my-req'.*'{key}'.*missing") as caught:
        meta.add_new_req_to_recv("my-req", [[1]], incomplete)
    assert (caught.value.request_id, caught.value.key) == ("my-req", key)
    assert not meta.reqs_to_recv


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_remote_prefill", "yes"),
        ("do_remote_decode", 1),
        ("remote_block_ids", "1,2"),
        ("remote_block_ids", [1, 2]),
        ("remote_block_ids", [[1, -1]]),
        ("remote_block_ids", [[2**31]]),
        ("remote_block_ids", [[10**30]]),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [["1"]]),
        ("remote_block_ids", [[True]]),
        ("remote_block_ids", [[None]]),
        ("remote_block_ids", [[]] * 5000),
        ("remote_block_ids", [[1] * (MAX_BLOCK_IDS // 2 + 1)] * 2),
        ("remote_engine_id", ""),
        ("remote_engine_id", 7),
        ("remote_engine_id", "x" * 5000),
        ("remote_engine_id", "\ud800"),
        ("remote_request_id", ["cmpl-1"]),
        ("remote_request_id", "x" * (MAX_REQUEST_ID_BYTES + 1)),
        ("remote_request_id", "é" * (MAX_REQUEST_ID_BYTES // 2 + 1)),
        ("remote_request_id", "\udfff"),
        ("remote_host", "\ud800"),
        ("transfer_mode", "\ud800"),
        ("kvnixl_lease", "\udfff"),
        ("remote_block_ids", "\ud800"),
        ("tp_size", "\ud800"),
        ("remote_host", ""),
        ("remote_host", "tcp://10.0.0.1"),
        ("remote_host", "10.0.0.1 "),
        ("remote_host", "10.0.0.1\n"),
        ("remote_host", "a" * 256),
        ("remote_port", "5600"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", -1),
        ("remote_port", 5600.5),
        ("tp_size", 0),
        ("tp_size", 2**40),
        ("dcp_size", -1),
        ("pp_size", "1"),
        ("remote_block_size", 0),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", 10**30),
        ("remote_blocks_expiry_time", "soon"),
        ("remote_blocks_expiry_time", math.nan),
        ("remote_blocks_expiry_time", math.inf),
        ("remote_registration_generation", -1),
        ("transfer_mode", 1),
        ("kvnixl_lease", 3.5e18),
        ("kvnixl_lease", "3:0"),
        ("kvnixl_lease", "not a lease"),
    ],
)
def test_an_ill_typed_or_oversized_key_is_named_with_its_request(key: str, value: object) -> None:
    with pytest.raises(TransferParamsError, match=rf"request 'my-req'.*'{key}'") as caught:
        TransferParams.parse(params(**{key: value}), "my-req")
    assert (caught.value.request_id, caught.value.key) == ("my-req", key)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1.example", "node_1", "::1", "[fe80::1%eth0]"])
def test_hosts_of_every_form_are_accepted(host: str) -> None:
    assert TransferParams.parse(params(remote_host=host), "r").remote("r").host == host


@pytest.mark.parametrize("value", [None, 7, "params", [("remote_port", 1)]])
def test_parameters_that_are_no_object_are_refused(value: object) -> None:
    with pytest.raises(TransferParamsError, match="expected an object") as caught:
        TransferParams.parse(value, "r")
    assert caught.value.key is None


# What JSON can spell, lone surrogates included.
JSON_TEXT = st.text() | st.text(st.characters(categories=["Cs", "Lu"]), min_size=1)


@given(
    st.dictionaries(
        st.sampled_from(TransferParams.__struct_fields__) | JSON_TEXT | st.integers(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | JSON_TEXT | st.binary(),
            lambda inner: st.lists(inner) | st.dictionaries(JSON_TEXT, inner),
            max_leaves=8,
        ),
    )
)
@PATIENT
def test_any_object_of_a_client_gives_values_or_a_named_error(client: dict[Any, Any]) -> None:
    meta = NixlConnectorMetadata()
    for add in (meta.add_new_req_to_recv, meta.add_new_req_to_save):
        try:
            add("r", [[1]], client)
        except TransferParamsError as refusal:
            key = refusal.key
        else:
            continue
        assert key in TransferParams.__struct_fields__


def test_a_key_nested_too_deep_is_named() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    try:
        with pytest.raises(TransferParamsError) as caught:
            TransferParams.parse(params(tp_size=1, remote_block_ids=nested), "r")
        assert caught.value.key == "remote_block_ids"
    finally:
        while nested:  # freeing it in one go would recurse
            nested = nested.pop()


def test_a_very_long_request_id_does_not_flood_the_log() -> None:
    with pytest.raises(TransferParamsError) as caught:
        TransferParams.parse(params(remote_port=0), "x" * 100_000)
    assert len(str(caught.value)) < 1000
    assert len(caught.value.request_id) == 100_000


# --- from the scheduler to the workers ----------------------------------------------------------


def test_a_receive_carries_everything_the_worker_needs() -> None:
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_recv(
        "r",
        ([4, 5], [6]),
        params(remote_block_size=16, pp_size=3, dcp_size=2),
        local_num_computed_blocks=(1, 0),
        awaiting_kvs=True,
    )
    request = meta.reqs_to_recv["r"]
    assert request.local_block_ids == ([4, 5], [6]) == request.local_physical_block_ids
    assert (request.tp_size, request.dcp_size, request.pp_size) == (2, 2, 3)
    assert request.local_num_computed_blocks == (1, 0)
    assert request.remote_block_size == 16
    assert request.awaiting_kvs
    assert request.region_blocks_to_zero is None
    assert request.remote == TransferParams.parse(params(), "r").remote("r")


def test_a_save_needs_no_remote() -> None:
    meta = NixlConnectorMetadata()
    meta.add_new_req_to_save("r", [[1]], {"do_remote_decode": True})
    request = meta.reqs_to_save["r"]
    assert request.remote is None
    assert (request.tp_size, request.dcp_size, request.pp_size) == (1, 1, 1)
    assert not request.awaiting_kvs


def test_metadata_of_a_step_starts_empty_and_owns_its_containers() -> None:
    first, second = NixlConnectorMetadata(), NixlConnectorMetadata()
    assert vars(first) == vars(second)
    assert all(not value for value in vars(first).values())
    for name, value in vars(first).items():
        assert isinstance(value, float) or value is not getattr(second, name)
    one, other = (HeartbeatInfo({"r"}, "h", 1, 1) for _ in range(2))
    assert one.leases is not other.leases
