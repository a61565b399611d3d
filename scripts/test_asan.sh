#!/usr/bin/env bash
# Builds the extensions with AddressSanitizer and UndefinedBehaviorSanitizer into build/asan (the
# normal build stays as it is) and runs the tests that need nothing but the extensions.
#
#   scripts/test_asan.sh [TEST_FILE | PYTEST_OPTION]...
#
#   PYTHON   the interpreter, with kvnixl's test dependencies (default: python3)
#   CC       the compiler (default: gcc); its libasan and libubsan are preloaded
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
compiler=${CC:-gcc}
library_dir=build/asan

names_tests=false
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || names_tests=true
done
if [ "$names_tests" = false ]; then
    # Real NIXL is left out below: it is not built with the sanitizers.
    for extension in kvnixl/_*.pyx; do
        test_file=tests/test_$(basename "$extension" .pyx | cut -c 2-).py
        [ ! -e "$test_file" ] || set -- "$@" "$test_file"
    done
fi

# An environment that pip made has no build tools: pip builds in one of its own.
if ! "$python" -c 'import Cython, setuptools' 2>/dev/null; then
    "$python" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")' |
        "$python" -m pip install --quiet --upgrade --target "$library_dir-tools" -r /dev/stdin
fi

rm -rf "$library_dir"
KVNIXL_SANITIZE=1 CC=$compiler PYTHONPATH="$PWD/$library_dir-tools" "$python" setup.py -q build \
    --build-lib "$library_dir" --build-temp "$library_dir-tmp"

# The Python interpreter is not instrumented, so the runtime has to be there before it starts, and
# small objects have to come from malloc to be watched. What the interpreter leaks is not ours.
#
# pytest puts the checkout in front of sys.path; kvnixl is imported before, from the build.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
    PYTHONMALLOC=malloc \
    PYTHONPATH="$PWD/$library_dir" \
    "$python" -P -c '
import os
import sys

import kvnixl
import pytest

directory = os.path.dirname(kvnixl.__file__)
if directory != os.path.join(sys.argv.pop(1), "kvnixl"):
    sys.exit(f"the tests would run against {directory}, which is not the sanitized build")
sys.exit(pytest.main(sys.argv[1:]))
' "$PWD/$library_dir" -m "not nixl" --capture=sys -p no:cacheprovider "$@"
