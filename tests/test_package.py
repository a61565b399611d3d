"""The package as a whole: importing it is cheap and needs nothing, its names resolve."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest

import kvnixl
from kvnixl import _fence

ROOT = Path(__file__).parents[1]
BLOCKED = ("nixl", "zmq", "torch", "vllm")

IMPORT_SCRIPT = """
    import json, sys, time

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked!r}:
                raise ImportError(f"{{name}} is blocked")

    sys.meta_path.insert(0, Blocker())
    started = time.process_time()
    import kvnixl
    seconds = time.process_time() - started
    kvnixl.memory_fence()
    print(json.dumps([seconds, sorted(sys.modules)]))
"""


def import_in_a_fresh_process() -> tuple[float, list[str]]:
    script = textwrap.dedent(IMPORT_SCRIPT).format(blocked=BLOCKED)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    seconds, modules = json.loads(result.stdout)
    return seconds, modules


def test_importing_needs_none_of_the_outside_libraries_and_is_fast() -> None:
    runs = [import_in_a_fresh_process() for _ in range(5)]
    for _, modules in runs:
        assert not {name.partition(".")[0] for name in modules} & {*BLOCKED, "numpy", "msgspec"}
    # CPU seconds, and the best of five, so that only the import itself counts, not what else the
    # machine does.
    assert min(seconds for seconds, _ in runs) < 0.15


@pytest.mark.parametrize("name", kvnixl.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(kvnixl, name) is not None
    assert name in dir(kvnixl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvnixl.nonsense  # noqa: B018


def test_exported_names_are_those_of_their_modules() -> None:
    for name, module in kvnixl._EXPORTS.items():
        assert getattr(kvnixl, name) is getattr(importlib.import_module(module), name)


def test_fences_can_be_called() -> None:
    for fence in ("memory_fence", "publish_fence", "revoke_fence", "observe_fence"):
        assert getattr(_fence, fence)() is None


def test_an_unknown_architecture_does_not_compile(tmp_path: Path) -> None:
    header = ROOT / "csrc" / "kvnixl_fence.h"
    source = tmp_path / "other.c"
    source.write_text(f'#undef __x86_64__\n#undef __aarch64__\n#include "{header}"\n')
    result = subprocess.run(
        ["gcc", "-fsyntax-only", str(source)], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "no memory fence is known" in result.stderr


# The build needs Cython, an sdist only the name of what it calls; without it setuptools takes the
# extensions for C files, which are not there.
CYTHON_STUB = """
def cythonize(extensions, **_):
    return extensions
"""


def test_the_source_distribution_holds_all_that_a_build_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="the environment has no setuptools")
    source, stub = tmp_path / "source", tmp_path / "stub" / "Cython"
    for name in ("kvnixl", "csrc"):
        built = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, source / name, ignore=built)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "Build.py").write_text(CYTHON_STUB)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(stub.parent)},
        check=True,
        capture_output=True,
        timeout=100,
    )
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    needed = {
        str(path.relative_to(ROOT))
        for pattern in ("kvnixl/**/*.py", "kvnixl/*.py[xi]", "kvnixl/py.typed", "csrc/*.[ch]")
        for path in ROOT.glob(pattern)
    }
    assert {"kvnixl/_slots.pyx", "csrc/kvnixl_slots.h", "kvnixl/bench/cli.py"} <= needed
    assert needed <= packed
