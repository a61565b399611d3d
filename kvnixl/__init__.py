"""kvnixl moves the KV cache of large language models between inference engines over NVIDIA NIXL
and proves after every read that the blocks were not reused while they were read.

Importing the package is cheap: the names below are resolved on first use, so none of numpy, nixl,
zmq, torch or vllm is imported by ``import kvnixl``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvnixl._fence import memory_fence as memory_fence
    from kvnixl.agent import Agent as Agent
    from kvnixl.transport import CancelMode as CancelMode
    from kvnixl.transport import DataTransport as DataTransport
    from kvnixl.transport import NixlTransport as NixlTransport
    from kvnixl.transport import PollResult as PollResult

# public name -> module that defines it
_EXPORTS = {
    "memory_fence": "kvnixl._fence",
    "Agent": "kvnixl.agent",
    "CancelMode": "kvnixl.transport",
    "DataTransport": "kvnixl.transport",
    "NixlTransport": "kvnixl.transport",
    "PollResult": "kvnixl.transport",
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
