"""What a figure cannot be read without: the machine, the libraries, the transports."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvnixl.bench.workers import Connected


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """The processor's name, or its architecture."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping; ``None`` when the kernel does not say."""
    try:
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine_facts(met: Connected | None) -> dict[str, Any]:
    """For the JSON document. What is not known is ``None``."""
    return {
        "cores": usable_cores(),
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": package_version("numpy"),
        "nixl": package_version("nixl"),
        "ucx": met.ucx or None if met else None,
        "transports": list(met.transports) or None if met else None,
        "ucx_environment": ucx_environment(),
    }


def ucx_environment() -> dict[str, str]:
    """UCX's settings in the environment; without ``UCX_TLS`` it chooses the transports itself."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}
