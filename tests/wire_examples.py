"""One fixed example of every frame: the source of the hex in docs/protocol.md and tests/data/wire.

``python -m tests.wire_examples`` rewrites both from the code. Do that only for an intended change
of the format, together with its version.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvnixl import wire
from kvnixl.metadata import (
    KvNixlExtension,
    LeaseSlotRegion,
    NixlAgentMetadata,
    NixlHandshakePayload,
    PushRegistration,
)

ROOT = Path(__file__).resolve().parent.parent
PROTOCOL_DOC = ROOT / "docs" / "protocol.md"
DATA = Path(__file__).resolve().parent / "data" / "wire"

# ```hex <name>, then lines of hex pairs, then ```
_HEX_BLOCK = re.compile(r"^```hex ([a-z0-9_]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def stock_metadata(*, ple_block_len: int | None = None) -> NixlAgentMetadata:
    """Two regions of one worker; nothing of kvnixl's own."""
    return NixlAgentMetadata(
        engine_id="prefill-0",
        agent_metadata=b"nixl agent",
        kv_caches_base_addr=[0x7F00_0000_0000, 0xFFFF_FFFF_0000_0000],
        device_id=1,
        num_blocks=64,
        block_lens=[4096, 2048],
        block_strides=[4096, 8192],
        kv_cache_layout="HND",
        block_size=32,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=[64, 64],
        region_group_ids=[0, -1],
        region_names=["layers.0", "layers.1"],
        region_mem_types=["VRAM", "DRAM"],
        dcp_size=1,
        pcp_size=1,
        ple_block_len=ple_block_len,
        region_members=[["layers.0"], ["layers.1"]],
        packed_member_layouts={"layers.1": (1024, 512)},
    )


def kvnixl_metadata() -> NixlAgentMetadata:
    """The same with kvnixl's own part."""
    metadata = stock_metadata()
    metadata.kvnixl = KvNixlExtension(
        protocol=1,
        features=["lease_slots"],
        incarnation=0x0123_4567_89AB_CDEF,
        lease_slots=LeaseSlotRegion(base_addr=0x7F00_1000_0000, num_slots=8192, device_id=0),
        factors='{"model": "m"}',
        packing="cpu:vec",
    )
    return metadata


def push_registration() -> PushRegistration:
    return PushRegistration(
        request_id="cmpl-1",
        decode_engine_id="decode-0",
        decode_host="10.0.0.2",
        decode_port=5600,
        decode_tp_size=1,
        local_block_ids=[[1, 2], [300]],
        remote_engine_id="prefill-0",
        remote_host="10.0.0.1",
        remote_port=5600,
        remote_tp_size=1,
    )


SENDER = 0xA1A2_A3A4_A5A6_A7A8


def examples() -> dict[str, bytes]:
    """Name -> frame, in the order of the document."""
    metadata = wire.encode_agent_metadata(kvnixl_metadata())
    payload = NixlHandshakePayload(compatibility_hash="00" * 32, agent_metadata_bytes=b"...")
    return {
        "get_meta": wire.encode_get_meta(0, 1),
        "handshake_payload": wire.encode_handshake_payload(payload),
        "agent_metadata": metadata,
        "clock": wire.encode_clock(1234.5),
        "error_reply": wire.encode_error_reply(wire.ErrorCode.UNKNOWN_RANK, "no rank (0, 9)")[0],
        "text_completion": wire.encode_text_completion("cmpl-1", 2),
        "text_heartbeat": wire.encode_text_heartbeat(["cmpl-1", "cmpl-2"]),
        "push_registration": wire.encode_push_registration(push_registration()),
        "completion_done": wire.encode_completion(
            wire.Outcome.DONE, 2, sender=SENDER, sequence=7, leases=[(3, 0x1122_3344_5566_7788)]
        ),
        "completion_released": wire.encode_completion(
            wire.Outcome.RELEASED, 1, sender=SENDER, sequence=8, request_ids=["cmpl-1"]
        ),
        "completion_failed": wire.encode_completion(
            wire.Outcome.FAILED, 1, sender=SENDER, sequence=9, leases=[(3, 0x1122_3344_5566_7788)]
        ),
        "heartbeat_leases": wire.encode_heartbeat(
            30.0, sender=SENDER, sequence=10, leases=[(3, 0x1122_3344_5566_7788), (4, 1)]
        ),
        "heartbeat_ids": wire.encode_heartbeat(
            30.0, sender=SENDER, sequence=11, request_ids=["cmpl-1", "cmpl-2"]
        ),
    }


def hex_lines(frame: bytes) -> str:
    """16 bytes a line, in pairs of digits."""
    return "".join(f"{frame[at : at + 16].hex(' ')}\n" for at in range(0, len(frame), 16))


def documented(text: str) -> dict[str, bytes]:
    """Name -> bytes of the hex blocks of a document."""
    return {name: bytes.fromhex(block) for name, block in _HEX_BLOCK.findall(text)}


def golden(name: str) -> bytes:
    """The bytes stored in tests/data/wire."""
    return bytes.fromhex((DATA / f"{name}.hex").read_text(encoding="ascii"))


def _rewrite() -> None:
    frames = examples()
    for name, frame in frames.items():
        (DATA / f"{name}.hex").write_text(hex_lines(frame), encoding="ascii")
    text = PROTOCOL_DOC.read_text(encoding="utf-8")
    text = _HEX_BLOCK.sub(
        lambda block: f"```hex {block[1]}\n{hex_lines(frames[block[1]])}```", text
    )
    PROTOCOL_DOC.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _rewrite()
