"""Fixtures that own what tests open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.procs import Child
from tests.vllm_pairs import (  # noqa: F401 (fixtures for all tests)
    make_prompt,
    start_engine,
    vllm_engines,
    vllm_pair,
    vllm_reference,
)


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
