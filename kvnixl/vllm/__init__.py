"""kvnixl as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvNixlConnector",
        "kv_connector_module_path": "kvnixl.vllm", "kv_role": "kv_both"}'

Importing this module is cheap and imports nothing of vLLM: the API server, the engine core and
every worker import it. The classes are loaded when they are first asked for.

* `options`: what ``kv_connector_extra_config`` may hold.
* `adapter`: everything of vLLM that differs between its versions.
* `connector`: the class that vLLM makes; it only forwards.
* `scheduler`, `worker`: vLLM's hooks, translated into leases, references, `kvnixl.producer` and
  `kvnixl.reader`.
* `messages`: what scheduler and workers of one engine tell each other.
* `stats`: counters for vLLM's log line and for Prometheus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvnixl.vllm.connector import KvNixlConnector, NixlConnector
    from kvnixl.vllm.options import ConnectorOptions

__all__ = ["ConnectorOptions", "KvNixlConnector", "NixlConnector", "register"]

_MODULES = {
    "ConnectorOptions": "options",
    "KvNixlConnector": "connector",
    "NixlConnector": "connector",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def register() -> None:
    """Make ``"kv_connector": "KvNixlConnector"`` known to vLLM without a module path.

    vLLM calls this in each of its processes (entry point ``vllm.general_plugins``), perhaps more
    than once.
    """
    from contextlib import suppress

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector("KvNixlConnector", __name__, "KvNixlConnector")
