"""The same values, frames and hashes as vLLM 0.32's own NixlConnector.

One process with vLLM (`tests/stock_values.py`) answers all questions of this file. Its interpreter
is named by KVNIXL_VLLM_PYTHON, by default the running one.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvnixl import wire
from kvnixl.metadata import (
    GET_META_MSG,
    NIXL_CONNECTOR_VERSION,
    HeartbeatInfo,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
    RemoteMeta,
    ReqMeta,
)
from tests import wire_examples
from tests.stock_values import CASES
from tests.vllm_python import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(330)]

HASH = "ab" * 32


def _fields(metadata: NixlAgentMetadata) -> dict[str, Any]:
    """Stock's fields, as JSON can carry them."""
    fields = msgspec.to_builtins(metadata, builtin_types=(bytes,))
    assert fields.pop("kvnixl", None) is None or metadata.kvnixl is not None
    fields["agent_metadata"] = metadata.agent_metadata.hex()
    fields["ssm_sizes"] = list(fields["ssm_sizes"])
    fields["packed_member_layouts"] = {
        name: list(layout) for name, layout in fields["packed_member_layouts"].items()
    }
    return fields


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    ours = wire.encode_agent_metadata(wire_examples.kvnixl_metadata())
    request = {
        "metadata": _fields(wire_examples.stock_metadata(ple_block_len=1536)),
        "payload_hash": HASH,
        "ours": {
            "metadata": ours.hex(),
            "payload": wire.encode_handshake_payload(NixlHandshakePayload(HASH, ours)).hex(),
            "get_meta": wire.encode_get_meta(3, 5).hex(),
            "clock": wire.encode_clock(1234.5).hex(),
        },
        "notifications": [
            message.hex()
            for message in (
                wire.encode_text_completion("cmpl-1", 1),
                wire.encode_text_completion("a:b", 2),
                wire.encode_text_heartbeat(["cmpl-2"]),
            )
        ],
        "registration": {
            "fields": msgspec.to_builtins(wire_examples.push_registration()),
            "ours": wire.encode_push_registration(wire_examples.push_registration()).hex(),
        },
        "heartbeat_ids": ["cmpl-1", "a:b"],
    }
    done = subprocess.run(
        [vllm_python(), str(Path(__file__).parent / "stock_values.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_reference_is_the_version_this_protocol_was_written_for(stock: dict[str, Any]) -> None:
    assert stock["version"].startswith("0.32.")
    protocol = stock["protocol"]
    assert protocol["connector_version"] == NIXL_CONNECTOR_VERSION
    assert protocol["get_meta_msg"].encode() == GET_META_MSG
    registration = wire.encode_push_registration(wire_examples.push_registration())
    assert registration.startswith(protocol["push_prefix"].encode())


def test_values_have_stocks_fields_in_stocks_order_and_only_named_additions(
    stock: dict[str, Any],
) -> None:
    theirs = stock["protocol"]["fields"]
    assert [*theirs["NixlAgentMetadata"], "kvnixl"] == list(NixlAgentMetadata.__struct_fields__)
    assert theirs["NixlHandshakePayload"] == list(NixlHandshakePayload.__struct_fields__)
    additions: dict[Any, list[str]] = {
        HeartbeatInfo: ["leases"],
        RemoteMeta: ["registration_generation", "lease", "prompt"],
        ReqMeta: [],
    }
    for value_class, added in additions.items():
        ours = [field.name for field in dataclasses.fields(value_class)]
        assert ours == [*theirs[value_class.__name__], *added]
    assert list(vars(NixlConnectorMetadata())) == [
        *stock["protocol"]["connector_metadata"],
        "lease_arms",
        "lease_clears",
    ]


def test_stocks_bytes_are_ours(stock: dict[str, Any]) -> None:
    encoded = {name: bytes.fromhex(text) for name, text in stock["encoded"].items()}
    assert encoded["metadata"] == wire_examples.golden("agent_metadata_v14")
    expected = wire_examples.stock_metadata(ple_block_len=1536)
    assert wire.decode_agent_metadata(encoded["metadata"]) == expected
    payload = NixlHandshakePayload(HASH, encoded["metadata"])
    assert wire.decode_handshake_payload(encoded["payload"]) == payload
    assert wire.encode_handshake_payload(payload) == encoded["payload"]
    assert wire.decode_get_meta(encoded["get_meta"]) == wire.GetMeta(3, 5)
    assert wire.encode_get_meta(3, 5) == encoded["get_meta"]
    assert wire.decode_clock(encoded["clock"]) == 1234.5
    assert wire.encode_clock(1234.5) == encoded["clock"]


def test_stock_decodes_our_bytes_and_ignores_what_we_add(stock: dict[str, Any]) -> None:
    decoded = stock["decoded"]
    assert decoded["metadata"] == _fields(wire_examples.kvnixl_metadata())
    ours = wire.encode_agent_metadata(wire_examples.kvnixl_metadata())
    assert decoded["payload"] == [HASH, ours.hex()]
    assert decoded["get_meta"] == ["get_meta_msg", 3, 5]
    assert decoded["clock"] == 1234.5


def test_a_stock_worker_reads_our_text_notifications(stock: dict[str, Any]) -> None:
    assert stock["notifications"] == {
        "finished": ["cmpl-1"],
        "extended": ["cmpl-2"],
        "counted": {"a:b": 1},
    }


def test_a_stock_workers_heartbeat_is_read(stock: dict[str, Any]) -> None:
    read = wire.parse_notification(bytes.fromhex(stock["heartbeat"]))
    assert isinstance(read, wire.Heartbeat)
    assert set(read.request_ids) == {"cmpl-1", "a:b"}


def test_push_registrations_pass_in_both_directions(stock: dict[str, Any]) -> None:
    registration = wire_examples.push_registration()
    sent = bytes.fromhex(stock["registration"]["sent"])
    assert wire.parse_notification(sent) == registration
    assert wire.encode_push_registration(registration) == sent
    assert stock["registration"]["read"] == {
        registration.request_id: msgspec.to_builtins(registration)
    }


@pytest.mark.parametrize("case", CASES)
def test_the_hash_of_a_real_configuration_is_stocks(stock: dict[str, Any], case: str) -> None:
    result = stock["hashes"][case]
    assert result["kvnixl"] == result["stock"]


def test_the_real_configurations_really_differ(stock: dict[str, Any]) -> None:
    hashes = {case: result["stock"] for case, result in stock["hashes"].items()}
    same = ("revision", "another block size", "two ranks", "n-gram")
    assert {hashes[case] for case in same} == {hashes["dense"]}
    assert len(set(hashes.values())) == len(hashes) - len(same)
    speculative = stock["hashes"]["EAGLE-3 with layers, fp8"]["factors"]["speculative_config"]
    assert speculative["auxiliary_layer_ids"] == [1, 2, 3]
    assert speculative["kv_cache_dtype"] == "fp8"
    assert stock["hashes"]["revision"]["factors"]["model_revision"] == "abc"
