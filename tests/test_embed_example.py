"""The example of an embedding server: its model, the demonstration, and its roles run by hand."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

EXAMPLES = Path(__file__).parents[1] / "examples"
SERVER = EXAMPLES / "embed_server.py"
TIMEOUT_S = 100.0


@pytest.fixture(scope="module")
def llm() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("tiny_llm")


@pytest.fixture(scope="module")
def model(llm: ModuleType) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield llm.Transformer(llm.ModelConfig())
    torch.set_num_threads(threads)


# --- the model ------------------------------------------------------------------------------------


def plain_logits(llm: ModuleType, model: Any, tokens: list[int]) -> torch.Tensor:
    """The same model without a cache: all tokens at once, PyTorch's own attention."""
    positions = torch.arange(len(tokens))
    hidden = model.embedding[tokens]
    for layer in model.layers:
        query, key, value = model.project(layer, hidden)
        attention = functional.scaled_dot_product_attention(
            model.rotate(query, positions)[None],
            model.rotate(key, positions)[None],
            value[None],
            is_causal=True,
            enable_gqa=True,
        )
        hidden = model.finish_layer(layer, hidden, attention[0])
    return model.head @ llm.rms_norm(hidden[-1])


@settings(deadline=None, max_examples=15)
@given(
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_paged_attention_equals_plain_attention(
    llm: ModuleType, model: Any, chunks: list[int], order: Any
) -> None:
    cache = llm.PagedCache(model.config, num_blocks=8)
    block_ids = list(range(8))
    order.shuffle(block_ids)
    tokens = [order.randrange(256) for _ in range(sum(chunks))]
    start = 0
    for chunk in chunks:
        end = start + chunk
        logits = model.forward(tokens[start:end], start, cache, block_ids)
        torch.testing.assert_close(
            logits, plain_logits(llm, model, tokens[:end]), rtol=1e-3, atol=1e-3
        )
        start = end


@pytest.mark.parametrize("length", [32, 33, 47])
def test_blocks_in_the_wrong_order_give_other_logits(
    llm: ModuleType, model: Any, length: int
) -> None:
    cache = llm.PagedCache(model.config, num_blocks=4)
    tokens = list(range(length))
    model.forward(tokens, 0, cache, [0, 1, 2, 3])
    right = model.forward([7], length, cache, [0, 1, 2, 3])
    wrong = model.forward([7], length, cache, [1, 0, 2, 3])
    assert (right - wrong).abs().max() > 0.1


def test_the_allocator_hands_out_scattered_blocks_once(llm: ModuleType) -> None:
    blocks = llm.BlockAllocator(64, seed=1)
    first, second = blocks.allocate(20), blocks.allocate(44)
    assert sorted(first + second) == list(range(64))
    assert sum(b == a + 1 for a, b in itertools.pairwise(first)) < 5
    assert blocks.allocate(1) is None
    assert blocks.num_free == 0
    blocks.free(first)
    assert blocks.allocate(21) is None
    assert sorted(blocks.allocate(20)) == sorted(first)


# --- the processes --------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::ResourceWarning"}


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the script; what it started is killed with the test."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        kill(children(process))
        process.kill()
        process.communicate(timeout=10)


def children(process: subprocess.Popen[str]) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return []


def loads_torch(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], what: str, timeout: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    output = ""
    while not (found := re.search(r"listens on http://(\S+)\n", output)):
        assert select.select([process.stdout], [], [], TIMEOUT_S)[0], f"not ready: {output}"
        part = os.read(process.stdout.fileno(), 4096)
        assert part, f"it ended: {output}"
        output += part.decode()
    return found[1]


def post(address: str, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.nixl
@pytest.mark.slow
def test_two_processes_answer_like_a_single_one(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("--max-tokens", "24")
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output + errors
    assert errors == ""
    lengths = {int(line.split()[0]) for line in output.splitlines() if "equal to" in line}
    assert lengths >= {15, 16, 17, 31, 32, 33}
    assert "DIFFERENT" not in output
    assert "FAILED" not in output
    assert output.count("\nok: ") == 5


@pytest.mark.nixl
@pytest.mark.slow
def test_blocks_read_in_the_wrong_order_are_noticed(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("--max-tokens", "8", "--rotate-blocks")
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output + errors
    assert "FAILED: every answer equals the single process's" in output
    # One block has only one order.
    for line in output.splitlines():
        if "the single process's" in line and line[0] == " ":
            assert ("DIFFERENT" in line) == (int(line.split()[1]) > 1), line


@pytest.mark.nixl
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_servers_end_with_the_process_that_started_them(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start()
    # When they load their libraries, the process that started them has got on.
    wait_for(lambda: [loads_torch(pid) for pid in children(process)] == [True] * 2, "two servers")
    servers = children(process)
    try:
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        wait_for(lambda: not any(map(is_running, servers)), "the end of both servers")
    finally:
        kill(servers)
    if number == signal.SIGINT:
        assert process.returncode == 130, errors
        assert errors == ""


@pytest.mark.nixl
@pytest.mark.slow
def test_the_roles_run_by_hand(
    llm: ModuleType, model: Any, start: Callable[..., subprocess.Popen[str]]
) -> None:
    prefill, decode = start("--serve", "prefill"), start("--serve", "decode")
    prefill_url, decode_url = url_of(prefill), url_of(decode)
    prompt, max_tokens = "The decode engine goes on where the prefill engine stopped.", 8
    body = {"prompt": prompt, "max_tokens": max_tokens}
    expected = llm.generate(model, prompt.encode(), max_tokens)

    calls: list[tuple[str, bytes | dict[str, Any], int]] = [
        ("/prefill", b"", 400),
        ("/prefill", b"[]", 400),
        ("/prefill", {"prompt": ""}, 400),
        ("/prefill", {"prompt": "x" * 5000}, 400),
        ("/prefill", b"[" * 100_000, 400),
        ("/cancel", {"req_id": "no such request"}, 400),
        ("/cancel", {"req_id": []}, 400),
        ("/generate", body, 404),
    ]
    for path, bad, status in calls:
        answered, answer = post(prefill_url, path, bad)
        assert answered == status, (path, bad)
        assert answer["error"]

    status, kv = post(prefill_url, "/prefill", body)
    assert status == 200
    status, answer = post(decode_url, "/generate", kv)
    assert (status, answer["kv"], answer["tokens"]) == (200, "verified", expected)

    # The blocks of another prompt are not used, and left to whom they belong.
    _, kv = post(prefill_url, "/prefill", body)
    status, answer = post(decode_url, "/generate", {**kv, "prompt": "another"})
    assert status == 200
    assert "of another prompt" in answer["kv"]
    assert answer["tokens"] == llm.generate(model, b"another", max_tokens)
    status, answer = post(decode_url, "/generate", kv)
    assert (status, answer["kv"], answer["tokens"]) == (200, "verified", expected)

    # One that is longer, by a token that has room in the last block, is computed again.
    _, kv = post(prefill_url, "/prefill", body)
    status, answer = post(decode_url, "/generate", {**kv, "prompt": prompt + "!"})
    assert status == 200
    assert f"{len(prompt) + 1} tokens are needed" in answer["kv"]
    longer = llm.generate(model, (prompt + "!").encode(), max_tokens)
    assert answer["tokens"] == longer

    # What the decode engine refuses is given back to the prefill engine.
    _, kv = post(prefill_url, "/prefill", body)
    assert post(decode_url, "/generate", {**kv, "max_tokens": 0})[0] == 400
    wait_for(lambda: post(prefill_url, "/stats", {})[1].get("leases_released") == 2, "a release")
    assert post(prefill_url, "/stats", {})[1]["used_blocks"] == 0

    # A reference that makes no sense, or names a host that is not allowed, costs a prefill.
    for changes, reason in [
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": [[0, 1, 2, 10**6]]}, "1000000"),
        ({"remote_host": "127.0.0.2"}, "not in the list of allowed"),
    ]:
        _, kv = post(prefill_url, "/prefill", body)
        kv["reference"] |= changes
        status, answer = post(decode_url, "/generate", kv)
        assert (status, answer["tokens"]) == (200, expected)
        assert answer["kv"].startswith("computed again")
        assert reason in answer["kv"]

    # So does an engine that died with the blocks.
    _, kv = post(prefill_url, "/prefill", body)
    prefill.kill()
    prefill.wait(10)
    status, answer = post(decode_url, "/generate", kv)
    assert (status, answer["tokens"]) == (200, expected)
    assert answer["kv"].startswith("computed again")
    assert post(decode_url, "/stats", {})[1]["used_blocks"] == 0

    decode.send_signal(signal.SIGTERM)
    _, errors = decode.communicate(timeout=TIMEOUT_S)
    assert decode.returncode == 0, errors
    assert "Traceback" not in errors
