"""What the documents say: the code of README.md and the docstrings runs, the layers are kept."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvnixl
from kvnixl.transport import NixlTransport

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DESIGN = ROOT / "docs" / "design.md"

LAYERS = ("extensions", "values", "state machines", "shells")
# What state machines may import from shells.
FROM_SHELLS = {
    "agent": {"Agent", "Transfer", "PreparedList", "RemoteAgent", "Registration", "LOCAL_SIDE"},
    "handshake": {
        "PeerAddress",
        "HandshakeFailed",
        "HandshakeOutcome",
        "Rank",
        "RemoteAllowList",
    },
}

# The caller's channel: a line of JSON on the standard output and input.
CHANNEL = """
import json, sys

def send(reference):
    print(json.dumps(reference), flush=True)

def receive():
    return json.loads(sys.stdin.readline())

"""

CHECK = """
assert (kv[[9, 2, 7]] == 1).all(), "other bytes"
assert kv.sum() == kv[[9, 2, 7]].size, "bytes elsewhere"
print(json.dumps([outcomes[0].num_bytes, kv.nbytes]))
"""


def readme_code(title: str) -> list[str]:
    """The Python code in a section of README.md."""
    section = README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def embedding_code() -> list[str]:
    return readme_code("Embed it")


def docstring_code(documented: object) -> str:
    """The literal block of a docstring."""
    text = inspect.getdoc(documented)
    assert text is not None
    block = re.search(r"::\n\n((?: {4}.*\n|\n)+)", text)
    assert block is not None
    return textwrap.dedent(block[1]).strip() + "\n"


def test_the_docstrings_have_the_same_code() -> None:
    documented = [docstring_code(kvnixl.EmbeddedProducer), docstring_code(kvnixl.Reader)]
    assert documented == embedding_code()


def layers() -> dict[str, int]:
    """Module -> the number of its layer, from the table."""
    numbers: dict[str, int] = {}
    for number, layer in enumerate(LAYERS):
        row = re.search(rf"^\| {layer} \| (.*?) \|", DESIGN.read_text(), re.MULTILINE)
        assert row is not None, layer
        names = re.sub(r"\(.*?\)", "", row[1])
        numbers |= dict.fromkeys(re.findall(r"`(\w+)`", names), number)
    return numbers


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for path in (ROOT / "kvnixl").glob("*.py*")} - {"__init__"}
    assert modules == set(layers())


def test_modules_import_from_their_own_layer_and_those_above() -> None:
    layer_of = layers()
    for path in sorted((ROOT / "kvnixl").glob("[!_]*.py")):
        layer = layer_of[path.stem]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("kvnixl"):
                continue
            module = (node.module or "").partition(".")[2]
            names = {alias.name for alias in node.names}
            if layer_of.get(module, 0) > layer:
                assert LAYERS[layer] == "state machines", (path.name, module)
                assert names <= FROM_SHELLS.get(module, set()), (path.name, module, names)


def test_the_names_that_state_machines_take_from_shells_are_all_documented() -> None:
    text = DESIGN.read_text().partition("The exception:")[2].partition("`import kvnixl`")[0]
    for module, names in FROM_SHELLS.items():
        entry = text.partition(f"* From `{module}`:")[2].partition("\n* ")[0]
        assert names <= set(re.findall(r"`(\w+)`", entry)), module


@pytest.fixture
def peer() -> Iterator[Callable[[str], tuple[NixlTransport, Any]]]:
    """Make transports of 128 blocks of 64 KiB, block ``i`` full of ``i``."""
    made: list[NixlTransport] = []

    def make(name: str) -> tuple[NixlTransport, Any]:
        blocks = np.zeros((128, 65536), np.uint8)
        blocks[:] = np.arange(128, dtype=np.uint8)[:, None]
        made.append(NixlTransport(name, memoryview(blocks)))
        return made[-1], blocks

    yield make
    for transport in made:
        transport.close()


def address_of(transport: NixlTransport) -> tuple[bytes, int, int, int]:
    return (
        transport.get_agent_metadata(),
        transport.base_addr,
        transport.num_blocks,
        transport.block_len,
    )


@pytest.mark.nixl
def test_blocks_move_as_written(peer: Callable[[str], tuple[NixlTransport, Any]]) -> None:
    (code,) = readme_code("Move blocks between two peers")
    theirs, _ = peer("engine-p")
    names: dict[str, Any] = {"address_of_p": address_of(theirs)}
    exec(code, names)
    assert [set(names["blocks"][i]) for i in range(4)] == [{70}, {71}, {72}, {0}]
    assert names["address"][1:] == (names["blocks"].ctypes.data, 1024, 65536)
    assert not names["transport"].available


@pytest.mark.nixl
def test_leases_are_armed_and_verified_as_written(
    peer: Callable[[str], tuple[NixlTransport, Any]],
) -> None:
    producer_code, reader_code = readme_code("Prove that a read was good")
    *until_armed, ending = producer_code.split("\n\n")
    *setting_up, reading = reader_code.split("\n\n")
    theirs, _ = peer("engine-p")
    producer: dict[str, Any] = {"transport": theirs}
    exec("\n".join(until_armed), producer)
    ours, blocks = peer("engine-d")
    ours.add_remote_peer("p", *address_of(theirs))
    reader: dict[str, Any] = {
        "transport": ours,
        "address_of_p": address_of(theirs),
        "slots_of_p": producer["slots"].base_addr,
        "lease": producer["lease"],
    }
    exec("\n".join(setting_up), reader)
    exec(reading, reader)
    assert (reader["verified"], reader["failed"]) == ({"req-1"}, {})
    assert [set(blocks[i]) for i in range(4)] == [{70}, {71}, {72}, {3}]

    exec(ending, producer)
    exec(reading, reader)
    assert reader["verified"] == set()
    assert "released the KV blocks" in reader["failed"]["req-1"]
    assert reader["verifier"].shutdown() == 0


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.nixl
def test_both_sides_run_as_written(processes: list[subprocess.Popen[str]]) -> None:
    prefill_code, decode_code = embedding_code()
    for code in (prefill_code, decode_code + CHECK):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", "-c", CHANNEL + code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    prefill, decode = processes
    assert prefill.stdout is not None
    # NIXL writes lines of its own there.
    reference = next((line for line in prefill.stdout if line.startswith("{")), "")
    output, errors = decode.communicate(reference, timeout=100)
    assert decode.returncode == 0, errors
    num_bytes, cache_bytes = json.loads(output.splitlines()[-1])
    assert num_bytes == 3 * cache_bytes // 32
    output, errors = prefill.communicate(timeout=100)
    assert prefill.returncode == 0, errors
    assert "req-1 read" in output.splitlines()
