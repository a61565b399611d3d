"""Fixtures that own what tests open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.procs import Child
from tests.vllm_pairs import (  # noqa: F401 (fixtures for all tests)
    make_prompt,
    start_engine,
    vllm_engines,
    vllm_pair,
    vllm_reference,
)

# Every run tries the same examples, whatever the machine does meanwhile: what fails, fails always.
# ``KVNIXL_LONG=1`` looks for new ones.
settings.register_profile(
    "kvnixl",
    deadline=None,
    derandomize=os.environ.get("KVNIXL_LONG") != "1",
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvnixl")


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Start child processes that end with the test."""
    children: list[Child] = []

    def start(make: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Child:
        child = Child(make, *args, env=env)
        children.append(child)
        return child

    yield start
    for child in children:
        child.end()
