"""The side channel against vLLM's own: kvnixl's client reads a stock listener, the stock client
reads kvnixl's server.

vLLM runs in the interpreter that ``KVNIXL_VLLM_PYTHON`` names, by default in this one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import CompatibilityError, EngineIdMismatchError
from kvnixl.handshake import HandshakeClient, HandshakeDone, HandshakeFailed, HandshakeServer
from kvnixl.metadata import KvNixlExtension, NixlAgentMetadata, NixlHandshakePayload
from kvnixl.wire import encode_agent_metadata, encode_handshake_payload
from tests.vllm_python import vllm_python

pytestmark = pytest.mark.vllm

START_TIMEOUT_S = 100.0
REPLY_TIMEOUT_S = 20.0
COMPAT = CompatibilityCheck({"model": "llama", "dtype": "float16"})
RANKS = [(pp, tp) for pp in range(2) for tp in range(2)]
FIELDS: dict[str, Any] = {
    "engine_id": "engine-P",
    "kv_caches_base_addr": [1 << 40, (1 << 64) - (1 << 20)],
    "device_id": 3,
    "num_blocks": 10,
    "block_lens": [4096, 8192],
    "block_strides": [8192, 8192],
    "kv_cache_layout": "LBHNC",
    "block_size": 32,
    "ssm_sizes": (0, 0),
    "attn_backend_name": "FLASH_ATTN",
    "physical_blocks_per_logical_kv_block": 2,
    "region_num_blocks": [10, 10],
    "region_group_ids": [0, 0],
    "region_names": ["layers.0", "layers.1"],
    "region_mem_types": ["DRAM", "VRAM"],
    "dcp_size": 1,
    "pcp_size": 1,
    "ple_block_len": 64,
    "region_members": [["layers.0"], ["layers.1"]],
    "packed_member_layouts": {"layers.0": (0, 4096)},
}


class Stock:
    """vLLM's side channel in a process of its own."""

    def __init__(self, cache: Path) -> None:
        python = vllm_python()
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(cache),
            "VLLM_CONFIG_ROOT": str(cache),
        }
        self._log = (cache / "vllm.log").open("w+")
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("stock_side_channel.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self._replies: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._reply(START_TIMEOUT_S) == "ready"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("REPLY "):
                self._replies.put(json.loads(line.removeprefix("REPLY ")))

    def _reply(self, timeout: float) -> Any:
        try:
            return self._replies.get(timeout=timeout)
        except queue.Empty:
            self._log.seek(0)
            pytest.fail(f"vLLM's process did not answer:\n{self._log.read()[-3000:]}")

    def call(self, name: str, **options: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, options]) + "\n")
        self._process.stdin.flush()
        return self._reply(REPLY_TIMEOUT_S)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    stock = Stock(tmp_path_factory.mktemp("vllm"))
    yield stock
    stock.close()


@pytest.fixture
def stock_port(stock: Stock) -> Iterator[int]:
    port = stock.call("listen", compat_hash=COMPAT.hash, ranks=RANKS, fields=FIELDS)
    yield port
    stock.call("shutdown", port=port)


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with HandshakeServer("127.0.0.1", 0) as server:
        yield server


def exported(rank: tuple[int, int], **changes: Any) -> NixlAgentMetadata:
    return NixlAgentMetadata(**{**FIELDS, "agent_metadata": b"rank %d %d" % rank, **changes})


def payload(metadata: NixlAgentMetadata) -> bytes:
    return encode_handshake_payload(
        NixlHandshakePayload(COMPAT.hash, encode_agent_metadata(metadata))
    )


def handshake(port: int, engine_id: str = "engine-P") -> HandshakeDone | HandshakeFailed:
    with HandshakeClient(COMPAT, timeout=10.0) as client:
        client.start(engine_id, "127.0.0.1", port, RANKS)
        (outcome,) = client.poll(15.0)
    return outcome


def test_the_client_reads_a_stock_listener(stock: Stock, stock_port: int) -> None:
    outcome = handshake(stock_port)
    assert isinstance(outcome, HandshakeDone), outcome
    assert {rank: opened.metadata for rank, opened in outcome.ranks.items()} == {
        rank: exported(rank) for rank in RANKS
    }
    assert outcome.clock is not None
    before = time.perf_counter()
    stock_now = stock.call("clock")
    after = time.perf_counter()
    error = outcome.clock.round_trip / 2
    assert before - error <= outcome.clock.to_local(stock_now) <= after + error


def test_a_stock_peer_of_another_configuration_is_refused_by_its_hash(stock: Stock) -> None:
    port = stock.call("listen", compat_hash="f" * 64, ranks=RANKS, fields=FIELDS)
    outcome = handshake(port)
    stock.call("shutdown", port=port)
    assert isinstance(outcome, HandshakeFailed)
    assert isinstance(outcome.error, CompatibilityError)
    assert outcome.error.remote_hash == "f" * 64
    assert outcome.error.differences == ()


def test_a_stock_peer_with_another_engine_id_is_refused(stock_port: int) -> None:
    outcome = handshake(stock_port, "engine-Q")
    assert isinstance(outcome, HandshakeFailed)
    assert isinstance(outcome.error, EngineIdMismatchError)
    assert outcome.error.actual == "engine-P"


def test_the_stock_client_reads_the_server(stock: Stock, server: HandshakeServer) -> None:
    extension = KvNixlExtension(incarnation=7, factors=COMPAT.factors_text, features=["slots"])
    server.start({rank: payload(exported(rank, kvnixl=extension)) for rank in RANKS})
    answer = stock.call(
        "ask",
        host="127.0.0.1",
        port=server.port,
        compat_hash=COMPAT.hash,
        engine_id="engine-P",
        tp_size=2,
        pp_size=2,
    )
    assert answer.get("error") is None
    assert [tuple(entry) for entry in answer["names"]] == [
        (pp, tp, f"agent {tp}") for pp, tp in RANKS
    ]
    # JSON made lists of the tuples.
    want = json.loads(json.dumps(FIELDS))
    for rank, got in zip(RANKS, answer["exported"], strict=True):
        assert got == {**want, "agent_metadata": (b"rank %d %d" % rank).hex()}
    before = time.perf_counter()
    stock_now = stock.call("clock")
    after = time.perf_counter()
    assert before - 1.0 <= stock_now + answer["offset"] <= after + 1.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"compat_hash": "0" * 64}, "compatibility hash mismatch"),
        ({"engine_id": "engine-Q"}, "engine ID mismatch"),
        ({"tp_size": 3}, "AssertionError"),
    ],
    ids=["another hash", "another engine id", "a rank that is not there"],
)
def test_the_stock_client_is_refused_at_once_and_the_server_goes_on(
    stock: Stock, server: HandshakeServer, changes: dict[str, Any], error: str
) -> None:
    server.start({rank: payload(exported(rank)) for rank in RANKS})
    question = {
        "host": "127.0.0.1",
        "port": server.port,
        "compat_hash": COMPAT.hash,
        "engine_id": "engine-P",
        "tp_size": 2,
        "pp_size": 1,
    }
    assert error in stock.call("ask", **{**question, **changes})["error"]
    assert "error" not in stock.call("ask", **question)


def test_a_server_that_is_bound_by_name_is_found_by_the_stock_client(stock: Stock) -> None:
    with HandshakeServer("localhost", 0) as server:
        server.start({(0, 0): payload(exported((0, 0)))})
        answer = stock.call(
            "ask",
            host="localhost",
            port=server.port,
            compat_hash=COMPAT.hash,
            engine_id="engine-P",
            tp_size=1,
            pp_size=1,
        )
    assert answer.get("error") is None
