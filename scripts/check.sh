#!/usr/bin/env bash
# Formatting, linting and types; all settings are in pyproject.toml. `--fix` formats in place.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-$PWD/.venv/bin}
# Some tools run others by name (cython-lint calls pycodestyle).
export PATH="$bin:$PATH"
sources=(csrc/*.c csrc/*.h)

if [ "${1:-}" = --fix ]; then
    "$bin/ruff" check --fix .
    "$bin/ruff" format .
    "$bin/clang-format" -i "${sources[@]}"
    exit
fi

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/cython-lint" kvnixl/*.pyx
"$bin/clang-format" --dry-run -Werror "${sources[@]}"
"$bin/mypy"
# The stubs of the extensions against what the compiled modules really have.
"$bin/stubtest" $(basename -s .pyx kvnixl/_*.pyx | sed 's/^/kvnixl./')
echo "checks passed"
