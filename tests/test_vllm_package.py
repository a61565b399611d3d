"""`kvnixl.vllm` as a package: cheap to import, found by vLLM by name and by module."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

import kvnixl.vllm

# Run in a process of its own: what is imported, and that nothing else is.
IMPORT = """
import sys
import kvnixl.vllm
heavy = {name.split(".")[0] for name in sys.modules} & {%s}
assert not heavy, f"imports {sorted(heavy)}"
assert "KvNixlConnector" in dir(kvnixl.vllm)
"""
HEAVY = ("vllm", "torch", "nixl", "nixl_cu12", "zmq", "numpy", "msgspec", "prometheus_client")


def test_importing_it_imports_nothing() -> None:
    """The API server, the engine core and every worker do so."""
    code = IMPORT % ", ".join(map(repr, HEAVY))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KvNixlConector'"):
        _ = kvnixl.vllm.KvNixlConector
    assert dir(kvnixl.vllm) == sorted(kvnixl.vllm.__all__)


def test_the_entry_point_is_declared() -> None:
    try:
        points = distribution("kvnixl").entry_points
    except PackageNotFoundError:
        pytest.skip("kvnixl is not installed")
    (point,) = [each for each in points if each.group == "vllm.general_plugins"]
    assert point.value == "kvnixl.vllm:register"
    assert point.load() is kvnixl.vllm.register


@pytest.fixture
def factory() -> object:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    return module.KVConnectorFactory


@pytest.mark.vllm
def test_it_may_be_registered_twice(factory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads its plugins in each process, perhaps more than once."""
    monkeypatch.setattr(factory, "_registry", dict(factory._registry))
    factory._registry.pop("KvNixlConnector", None)
    for _ in range(2):
        kvnixl.vllm.register()
        loaded = factory._registry["KvNixlConnector"]()
        assert loaded is kvnixl.vllm.KvNixlConnector


@pytest.mark.vllm
def test_stock_stays_what_it_is(factory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_registry", dict(factory._registry))
    stock = factory._registry["NixlConnector"]
    kvnixl.vllm.register()
    assert factory._registry["NixlConnector"] is stock


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["KvNixlConnector", "NixlConnector"])
def test_vllm_finds_it_by_its_module_path(factory: object, name: str) -> None:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector=name, kv_connector_module_path="kvnixl.vllm", kv_role="kv_both"
    )
    assert factory.get_connector_class(config) is kvnixl.vllm.KvNixlConnector


@pytest.mark.vllm
def test_it_is_what_vllm_expects_of_a_connector(factory: object) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    kind = kvnixl.vllm.KvNixlConnector
    assert issubclass(kind, KVConnectorBase_V1)
    assert issubclass(kind, SupportsHMA)
    assert not kind.__abstractmethods__
    assert not kind.supports_sleep_mode(None)
