"""Encoding and decoding what crosses between engines, beside the same without any checks.

pytest bench/bench_wire.py        every piece on its own (pytest-benchmark)
python bench/bench_wire.py        medians, both sides alternating in one run
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvnixl import wire
from kvnixl.metadata import (
    KvNixlExtension,
    LeaseSlotRegion,
    NixlAgentMetadata,
    TransferParams,
)

NUM_REGIONS = 160  # 80 layers, K and V
NUM_LEASES = 500  # a full heartbeat message
NUM_BLOCK_IDS = 8192  # 128 Ki tokens in blocks of 16
TARGET_US = 150.0  # encode + decode of the metadata

Function = Callable[[], Any]


def metadata() -> NixlAgentMetadata:
    return NixlAgentMetadata(
        engine_id="0f6c1d0a-6a52-4e0a-9a3f-0d9c1f8c7b11_dp0",
        agent_metadata=bytes(4096),
        kv_caches_base_addr=[0x7F00_0000_0000 + index * (1 << 28) for index in range(NUM_REGIONS)],
        device_id=0,
        num_blocks=4096,
        block_lens=[65536] * NUM_REGIONS,
        block_strides=[65536] * NUM_REGIONS,
        kv_cache_layout="HND",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=[4096] * NUM_REGIONS,
        region_group_ids=[0] * NUM_REGIONS,
        region_names=[f"model.layers.{index}.self_attn.attn" for index in range(NUM_REGIONS)],
        region_mem_types=["VRAM"] * NUM_REGIONS,
        kvnixl=KvNixlExtension(
            incarnation=1, lease_slots=LeaseSlotRegion(0x7F00_1000_0000, 8192), factors="{}"
        ),
    )


def cases() -> dict[str, tuple[Function, Function | None]]:
    """Name -> what kvnixl does, and the same work without bounds and checks."""
    agent = metadata()
    frame = wire.encode_agent_metadata(agent)
    leases = [(index, (1 << 62) + index) for index in range(NUM_LEASES)]
    request_ids = [f"cmpl-{index:032x}-0" for index in range(NUM_LEASES)]
    binary = wire.encode_heartbeat(30.0, sender=1, sequence=1, leases=leases)
    text = wire.encode_text_heartbeat(request_ids)
    completion = wire.encode_completion(
        wire.Outcome.DONE, 1, sender=1, sequence=1, leases=leases[:1]
    )
    text_completion = wire.encode_text_completion(request_ids[0], 1)
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [list(range(NUM_BLOCK_IDS))],
        "remote_engine_id": agent.engine_id,
        "remote_request_id": request_ids[0],
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 8,
        "kvnixl_lease": "3:1122334455667788",
    }

    def both() -> None:
        wire.decode_agent_metadata(wire.encode_agent_metadata(agent))

    def both_unchecked() -> None:
        msgspec.msgpack.decode(msgspec.msgpack.encode(agent))

    return {
        "metadata: encode + decode": (both, both_unchecked),
        "metadata: encode": (
            lambda: wire.encode_agent_metadata(agent),
            lambda: msgspec.msgpack.encode(agent),
        ),
        "metadata: decode": (
            lambda: wire.decode_agent_metadata(frame),
            lambda: msgspec.msgpack.decode(frame),
        ),
        "heartbeat: parse 500 leases": (lambda: wire.parse_notification(binary), None),
        "heartbeat: parse 500 ids (text)": (
            lambda: wire.parse_notification(text),
            lambda: text.decode()[3:].split(","),
        ),
        "heartbeat: encode 500 leases": (
            lambda: wire.encode_heartbeat(30.0, sender=1, sequence=1, leases=leases),
            None,
        ),
        "completion: parse one lease": (lambda: wire.parse_notification(completion), None),
        "completion: parse one id (text)": (
            lambda: wire.parse_notification(text_completion),
            lambda: text_completion.decode().rsplit(":", 1),
        ),
        "parameters: 8192 block ids": (lambda: TransferParams.parse(params, "r").remote("r"), None),
    }


@pytest.mark.parametrize("name", cases())
def test_wire(benchmark: Any, name: str) -> None:
    benchmark(cases()[name][0])


def _median_us(function: Function, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    print(f"{'':34}{'kvnixl':>10}{'unchecked':>12}   us, median")
    for name, (ours, unchecked) in cases().items():
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(5):
            mine.append(_median_us(ours, 200))
            if unchecked is not None:
                theirs.append(_median_us(unchecked, 200))
        beside = f"{statistics.median(theirs):12.1f}" if theirs else f"{'-':>12}"
        print(f"{name:34}{statistics.median(mine):10.1f}{beside}")
    print(f"target: metadata of {NUM_REGIONS} regions, encode + decode under {TARGET_US:.0f} us")


if __name__ == "__main__":
    main()
