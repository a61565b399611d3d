"""Show that the tests of the lease protocol can fail: break the sources, one way at a time.

Each mutation is applied to a copy of the sources, which is built and tested. The check passes when
the untouched copy passes its tests and every mutation makes at least one test fail.

    python scripts/mutation_check.py [--only NAME ...] [--list]

Needs what the build and the tests need (gcc, Cython, pytest, hypothesis); takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_leases.py", "tests/test_leases_world.py", "tests/test_slots.py"]
STATE_MACHINE = "test_leases_world.py::test_no_foreign_lease_is_accepted"
LEASES = "kvnixl/leases.py"
SLOTS = "kvnixl/_slots.pyx"
HEADER = "csrc/kvnixl_slots.h"


class Mutation(NamedTuple):
    name: str
    meaning: str
    edits: tuple[tuple[str, str, str], ...]  # file, text, its replacement


MUTATIONS = (
    Mutation(
        "no-fence",
        "no fence between the clear and the free",
        (
            (
                LEASES,
                "            revoke_fence()\n            self._writer",
                "            self._writer",
            ),
        ),
    ),
    Mutation(
        "no-poison",
        "a landing cell is reused as it is",
        ((HEADER, "kvnixl_word_store(cell, ~nonce);", "(void)cell, (void)nonce;"),),
    ),
    Mutation(
        "zero-poison",
        "a landing cell is filled with 0, which may share a half with the nonce",
        ((HEADER, "kvnixl_word_store(cell, ~nonce);", "kvnixl_word_store(cell, nonce & 0);"),),
    ),
    Mutation(
        "low-half",
        "only the low half of the nonce is compared",
        ((HEADER, "(cell) == nonce;", "(cell) << 32 == nonce << 32;"),),
    ),
    Mutation(
        "slot-with-data",
        "the slots are read together with the blocks; the result waits until those are there",
        (
            (
                LEASES,
                """
        self._table.add_checks(req_id, engine_id, ranks, slot, nonce)
""",
                """
        self._table.add_checks(req_id, engine_id, ranks, slot, nonce)
        self.__dict__.setdefault("_begun", []).append(req_id)
""",
            ),
            (
                SLOTS,
                "        if not reads_done and not self._table.active:\n",
                "        if False:\n",
            ),
            (
                LEASES,
                """
        for read in table.step(self._agent, reads_done, now, self._timeout, verified, failed):
            self._post(read, now, verified, failed)
""",
                """
        early = self.__dict__.setdefault("_early", set())
        done = self.__dict__.setdefault("_done", set())
        done |= set(reads_done)
        begun = [*self.__dict__.pop("_begun", []), *reads_done]
        for read in table.step(self._agent, begun, now, self._timeout, early, failed):
            self._post(read, now, early, failed)
        verified = early & done
        early -= verified
        done -= verified | failed.keys()
""",
            ),
        ),
    ),
    Mutation(
        "arm-then-clear",
        "a worker applies the arms of a step before its clears",
        (
            (
                SLOTS,
                """
        for req_id in to_clear:
            self.clear(req_id)
        for req_id, lease in to_arm.items():
""",
                """
        for req_id, lease in to_arm.items():
""",
            ),
            (
                SLOTS,
                """
    def mark_clean(self) -> None:
""",
                """
        for req_id in to_clear:
            self.clear(req_id)

    def mark_clean(self) -> None:
""",
            ),
        ),
    ),
    Mutation(
        "clear-others",
        "a late clear empties the slot although the next lease has it",
        ((SLOTS, "                del self.leases[holder]\n", "                pass\n"),),
    ),
    Mutation(
        "release-in-flight",
        "a READ that timed out is released while it runs, and its cells are used again",
        ((SLOTS, "        if self.release_is_final:\n", "        if True:\n"),),
    ),
    Mutation(
        "any-rank",
        "a request passes as soon as one of its ranks holds the nonce",
        (
            (
                SLOTS,
                "                elif entry.unread == 0:",
                "                elif entry.unread >= 0:",
            ),
        ),
    ),
    Mutation(
        "clear-without-fence",
        "a clear does not ask for a fence",
        ((SLOTS, ", 0)\n        self.dirty = True\n", ", 0)\n"),),
    ),
    Mutation(
        "empty-low-half",
        "nonces with an empty low half are used",
        ((HEADER, "(nonce & 0xFFFFFFFF) != 0 ? nonce : nonce + 1;", "nonce;"),),
    ),
    Mutation(
        "deaf-to-discard",
        "a discarded request is reported all the same",
        ((SLOTS, "        found = self.index.pop(req_id, None)\n", "        found = None\n"),),
    ),
)

# Shrinking a failure would take minutes and change nothing.
PLUGIN = """
from hypothesis import Phase, settings
settings.register_profile("mutations", phases=[Phase.generate], database=None)
settings.load_profile("mutations")
"""


def copy_sources(target: Path) -> None:
    """The package with its other extensions as built, one extension to build, and the tests."""
    shutil.copytree(
        ROOT / "kvnixl",
        target / "kvnixl",
        ignore=shutil.ignore_patterns("__pycache__", "_slots.*.so", "_descs.pyx", "_fence.pyx"),
    )
    for name in ("csrc", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, target / name)


def apply(mutation: Mutation, target: Path) -> None:
    for name, text, replacement in mutation.edits:
        path = target / name
        source = path.read_text()
        if source.count(text) != 1:
            sys.exit(
                f"{mutation.name}: {name} holds the text to replace {source.count(text)} times"
            )
        path.write_text(source.replace(text, replacement))


def failed_tests(target: Path) -> list[str]:
    """Build and test the copy; the names of the tests that failed."""
    env = {**os.environ, "KVNIXL_NO_OPTIMIZE": "1", "PYTHONPATH": str(target)}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=target,
        env=env,
        check=True,
        capture_output=True,
    )
    where = subprocess.run(
        [sys.executable, "-c", "import kvnixl; print(kvnixl.__file__)"],
        cwd=target,
        env=env,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if not where.startswith(str(target)):
        sys.exit(f"the tests would run against {where.strip()}, which is not the copy")
    # The tests that break the protocol themselves would only repeat what is done here.
    (target / "no_shrinking.py").write_text(PLUGIN)
    options = ["-q", "--tb=no", "-k", "not noticed", "-p", "no:cacheprovider", "-p", "no_shrinking"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        cwd=target,
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(failed):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", choices=names, action="append", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.only or m.name in options.only]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:18} {mutation.meaning}")
        return 0
    survivors = []
    for mutation in (None, *chosen):
        with tempfile.TemporaryDirectory(prefix="kvnixl-mutation-") as directory:
            target = Path(directory).resolve()
            copy_sources(target)
            if mutation is None:
                if failed := failed_tests(target):
                    sys.exit(f"the tests fail without any mutation: {failed}")
                print(f"{'(none)':18} all tests pass", flush=True)
                continue
            apply(mutation, target)
            failed = failed_tests(target)
        by_machine = any(STATE_MACHINE in name for name in failed)
        verdict = f"{len(failed)} tests fail" if failed else "SURVIVED"
        found = ", also the world of requests" if by_machine else ""
        print(f"{mutation.name:18} {verdict}{found} ({mutation.meaning})", flush=True)
        if not failed:
            survivors.append(mutation.name)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
