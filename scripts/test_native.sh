#!/usr/bin/env bash
# Builds csrc/slot_stress.c, the lease-slot protocol between threads, and runs it plainly, under
# ThreadSanitizer and under valgrind memcheck. Orders that are broken on purpose must be noticed.
#
#   scripts/test_native.sh
#
#   CC              the compiler (default: gcc)
#   SECONDS_EACH    how long each run takes (default: 3)
#   CROSS           a compiler for aarch64 (default: aarch64-linux-gnu-gcc), used if it is there;
#                   what it made runs if qemu-aarch64-static is there
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=${CC:-gcc}
seconds=${SECONDS_EACH:-3}
build=build/native
flags=(-std=gnu11 -Wall -Wextra -Werror -pthread -Icsrc)

if ! command -v valgrind >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        # The package lists of a fresh machine are empty or old.
        { apt-get update -qq && apt-get install -y -qq valgrind; } >/dev/null || true
    fi
    if ! command -v valgrind >/dev/null; then
        echo "valgrind is missing; install it (Debian, Ubuntu: sudo apt-get install valgrind)" >&2
        exit 1
    fi
fi

mkdir -p "$build"
"$compiler" "${flags[@]}" -O2 csrc/slot_stress.c -o "$build/slot_stress"
"$compiler" "${flags[@]}" -O1 -g -fsanitize=thread csrc/slot_stress.c -o "$build/slot_stress_tsan"
"$compiler" "${flags[@]}" -O1 -g csrc/slot_stress.c -o "$build/slot_stress_valgrind"

echo "== plain"
"$build/slot_stress" --seconds "$seconds"

for order in free-first slot-first; do
    echo "== broken on purpose: $order"
    status=0
    "$build/slot_stress" --seconds "$seconds" --broken "$order" || status=$?
    if [ "$status" -ne 1 ]; then
        echo "the broken order was not noticed (exit status $status)" >&2
        exit 1
    fi
done

echo "== ThreadSanitizer"
# Its fixed address layout does not suit every setting of the kernel's randomisation.
fixed_layout=()
if setarch "$(uname -m)" -R true 2>/dev/null; then
    fixed_layout=(setarch "$(uname -m)" -R)
fi
TSAN_OPTIONS=halt_on_error=1 "${fixed_layout[@]}" "$build/slot_stress_tsan" --seconds "$seconds"

echo "== valgrind memcheck"
valgrind -q --error-exitcode=9 --leak-check=full --fair-sched=yes \
    "$build/slot_stress_valgrind" --seconds "$seconds"

cross=${CROSS:-aarch64-linux-gnu-gcc}
if command -v "$cross" >/dev/null; then
    echo "== aarch64"
    "$cross" "${flags[@]}" -static -O2 csrc/slot_stress.c -o "$build/slot_stress_aarch64"
    if command -v qemu-aarch64-static >/dev/null; then
        qemu-aarch64-static "$build/slot_stress_aarch64" --seconds "$seconds"
    else
        echo "compiled, not run: qemu-aarch64-static is missing"
    fi
else
    echo "== aarch64: left out, $cross is missing"
fi

echo "native tests passed"
