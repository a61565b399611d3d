"""`python -m kvnixl.bench`: its parts, and the command as a user runs it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnixl.bench import cli, overhead, plan
from kvnixl.bench.cache import Cache, CacheShape
from kvnixl.bench.content import Content
from kvnixl.bench.models import DTYPE_BYTES, MODELS
from kvnixl.bench.overhead import Overhead, measure_overheads
from kvnixl.bench.page import Page
from kvnixl.bench.paths import (
    BURST,
    KVNIXL,
    MEMCPY,
    PLAIN,
    PLAIN_BURST,
    PULL,
    VERIFIED,
    Sample,
)
from kvnixl.bench.processes import Child, ChildError
from kvnixl.bench.results import Results, percentile
from kvnixl.bench.tables import main_table, overhead_table
from kvnixl.bench.wording import bytes_text, count_text, listed, seconds_text
from kvnixl.errors import KvNixlError

DEADLINE_S = 100.0


# --- contents -------------------------------------------------------------------------------------

SHAPE = CacheShape(layers=3, blocks=12, block_bytes=64, block_size=4)
LOCAL = [5, 0, 11, 2]
REMOTE = [1, 2, 10, 7]


class Sides:
    """A producer's and a reader's cache, and a perfect transfer between them."""

    def __init__(self, shape: CacheShape = SHAPE, seed: int = 7) -> None:
        self.content = Content(shape, seed)
        self.producer, self.reader = Cache(shape), Cache(shape)

    def transfer(self, local: list[int] = LOCAL, remote: list[int] = REMOTE) -> None:
        for mine, theirs in zip(self.reader.layers, self.producer.layers, strict=True):
            mine[local] = theirs[remote]


@pytest.fixture
def sides() -> Sides:
    made = Sides()
    made.content.fill(made.producer, 1)
    return made


def test_a_right_transfer_passes(sides: Sides) -> None:
    sides.transfer()
    assert sides.content.check(sides.reader, LOCAL, REMOTE, 1) is None


def test_every_single_wrong_byte_is_found_and_located(sides: Sides) -> None:
    sides.transfer()
    rng = random.Random(1)
    for _ in range(50):
        layer, position, offset = rng.randrange(3), rng.randrange(4), rng.randrange(64)
        block = sides.reader.layers[layer][LOCAL[position]].view(np.uint8)
        block[offset] ^= 1 << rng.randrange(8)
        wrong = sides.content.check(sides.reader, LOCAL, REMOTE, 1)
        assert wrong is not None
        assert (wrong.layer, wrong.local_block, wrong.remote_block, wrong.offset, wrong.count) == (
            layer,
            LOCAL[position],
            REMOTE[position],
            offset,
            1,
        )
        assert wrong.found == block[offset] != wrong.expected
        block[offset] = wrong.expected


def test_spoiled_blocks_hold_no_byte_that_is_right(sides: Sides) -> None:
    sides.transfer()
    sides.content.spoil(sides.reader, LOCAL, REMOTE, 1)
    wrong = sides.content.check(sides.reader, LOCAL, REMOTE, 1)
    assert wrong is not None
    assert wrong.count == len(LOCAL) * SHAPE.layers * SHAPE.block_bytes


def test_spoiling_leaves_other_blocks_alone(sides: Sides) -> None:
    sides.transfer()
    sides.content.spoil(sides.reader, LOCAL[:1], REMOTE[:1], 1)
    assert sides.content.check(sides.reader, LOCAL[1:], REMOTE[1:], 1) is None


def test_stale_misplaced_and_shifted_blocks_are_wrong(sides: Sides) -> None:
    content, reader = sides.content, sides.reader
    sides.transfer()
    assert content.check(reader, LOCAL, REMOTE, 2) is not None, "content of an earlier round"
    assert content.check(reader, LOCAL, REMOTE[::-1], 1) is not None, "blocks in another order"
    reader.layers[0], reader.layers[1] = reader.layers[1], reader.layers[0]
    assert content.check(reader, LOCAL, REMOTE, 1) is not None, "layers exchanged"
    reader.layers[0], reader.layers[1] = reader.layers[1], reader.layers[0]
    reader.layers[2][LOCAL[0]] = np.roll(reader.layers[2][LOCAL[0]], 1)
    wrong = content.check(reader, LOCAL, REMOTE, 1)
    assert wrong is not None, "a block shifted by a word"
    assert (wrong.layer, wrong.local_block) == (2, LOCAL[0])


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 3),
    blocks=st.integers(4, 9),
    words=st.sampled_from([1, 3, 32, 40_000]),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_any_one_byte_is_found_in_any_shape(
    layers: int, blocks: int, words: int, seed: int, data: st.DataObject
) -> None:
    """Also when a block is larger than the groups in which blocks are checked."""
    made = Sides(CacheShape(layers, blocks, words * 8, 1), seed)
    made.content.fill(made.producer, 0)
    remote = data.draw(st.permutations(range(blocks)))[: blocks - 1]
    local = data.draw(st.permutations(range(blocks)))[: blocks - 1]
    made.transfer(local, remote)
    assert made.content.check(made.reader, local, remote, 0) is None
    layer = data.draw(st.integers(0, layers - 1))
    position = data.draw(st.integers(0, blocks - 2))
    offset = data.draw(st.integers(0, words * 8 - 1))
    made.reader.layers[layer][local[position]].view(np.uint8)[offset] ^= 0x80
    wrong = made.content.check(made.reader, local, remote, 0)
    assert wrong is not None
    assert (wrong.layer, wrong.remote_block, wrong.offset) == (layer, remote[position], offset)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("llama-3.1-8b", 128 * 1024),
        ("llama-3.1-70b", 320 * 1024 // 8),
        ("qwen3-8b", 144 * 1024),
        ("qwen3-32b", 256 * 1024),
        ("deepseek-v3", 70_272),
        ("mistral-7b", 128 * 1024),
        ("gpt-oss-20b", 48 * 1024),
        ("gpt-oss-120b", 72 * 1024),
    ],
)
def test_cache_bytes_per_token_of_known_models(model: str, bytes_per_token: int) -> None:
    shape = MODELS[model]
    assert shape.layers * shape.token_bytes == bytes_per_token


@pytest.mark.parametrize("model", MODELS)
def test_by_default_every_model_stays_below_the_memory_and_has_long_requests(model: str) -> None:
    blocks = plan.default_blocks(MODELS[model], 16, plan.DEFAULT_TOKENS, cli.CACHE_MEMORY_BYTES)
    assert blocks * plan.bytes_per_block(MODELS[model], 16) <= cli.CACHE_MEMORY_BYTES
    assert plan.longest_request(blocks) * 16 >= 512


def test_request_lengths_are_rounded_up_and_cut_to_what_fits() -> None:
    shape = CacheShape(layers=1, blocks=40, block_bytes=64, block_size=16)
    assert plan.request_lengths(shape, [1, 128, 8000, 9000]) == ([16, 128, 480], [8000, 9000])
    assert plan.request_lengths(shape, [100, 100]) == ([100], [])


@pytest.mark.parametrize("order", plan.ORDERS)
def test_block_lists_are_distinct_blocks_of_the_cache(order: plan.Order) -> None:
    for pool, blocks in [(4, 3), (40, 30), (1000, 750), (1000, 2)]:
        row = plan.Row(blocks * 16, blocks, order)
        local, remote = plan.block_lists(row, pool, plan.row_rng(3, row))
        for side in (local, remote):
            assert len(set(side)) == len(side) == blocks
            assert set(side) <= set(range(pool))
        assert (local, remote) == plan.block_lists(row, pool, plan.row_rng(3, row))
        if order in ("unfragmented", "reversed"):
            step = 1 if order == "unfragmented" else -1
            assert set(np.diff(local)) == set(np.diff(remote)) == {step}


def test_churned_lists_are_between_one_run_and_none() -> None:
    row = plan.Row(8000, 500, "churned")
    for side in plan.block_lists(row, 1000, random.Random(1)):
        neighbours = np.count_nonzero(np.abs(np.diff(side)) == 1)
        assert 100 < neighbours < 499


def test_one_block_has_no_order() -> None:
    shape = CacheShape(layers=1, blocks=40, block_bytes=64, block_size=16)
    assert [str(row) for row in plan.rows(shape, [16, 32])] == [
        "16 tokens, unfragmented",
        "32 tokens, unfragmented",
        "32 tokens, reversed",
        "32 tokens, churned",
        "32 tokens, fragmented",
    ]


def test_a_burst_has_64_requests_of_4_mib_or_what_fits() -> None:
    def burst(blocks: int, block_mib: float) -> tuple[int, int, int]:
        made = plan.burst_of(CacheShape(1, blocks, int(block_mib * 1024**2), 16))
        return made.requests, made.request_blocks, made.row.blocks

    assert burst(200, 2) == (64, 2, 128)
    assert burst(100, 2) == (50, 2, 100)
    assert burst(200, 3) == (64, 1, 64)
    assert burst(40, 16) == (40, 1, 40)
    assert burst(128, 1 / 64) == (8, 16, 128)
    assert burst(4, 1 / 64) == (4, 1, 4)


# --- the figures ----------------------------------------------------------------------------------


def results_of(kvnixl_s: list[float], plain_s: list[float]) -> tuple[Results, plan.Row]:
    model = MODELS["mistral-7b"]
    shape = CacheShape(model.layers, 40, model.token_bytes * 16, 16)
    row = plan.Row(160, 10, "reversed")
    results = Results(plan.Plan(model, shape, [row], [], 1.0, None, 0))
    results.turns[row] = [
        {KVNIXL: Sample(ours, 32), PLAIN: Sample(theirs, 320), MEMCPY: Sample(0.001, 0)}
        for ours, theirs in zip(kvnixl_s, plain_s, strict=True)
    ]
    return results, row


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 201)]
    assert percentile(values, 99) == 198
    assert percentile(values[:99], 99) == 99
    assert percentile([3.0], 99) == 3
    assert percentile([2.0, 1.0], 50) == 1


def test_figures_of_a_row() -> None:
    results, row = results_of([0.001, 0.003, 0.002], [0.004, 0.004, 0.004])
    figures = results.figures(row, KVNIXL)
    assert figures is not None
    assert figures.p50_s == 0.002
    assert figures.p99_s == 0.003
    assert figures.bytes == 10 * 32 * 2 * 8 * 128 * 2 * 16
    assert figures.gb_per_s == pytest.approx(figures.bytes / 0.002 / 1e9)
    assert results.descs_before(row) == 320
    assert results.checked == (6, 6 * figures.bytes)
    assert results.figures(row, VERIFIED) is None


@pytest.mark.parametrize(
    ("kvnixl_s", "plain_s", "clear"),
    [
        ([1.0] * 20, [2.0] * 20, True),
        ([2.0] * 20, [1.0] * 20, True),
        ([1.0] * 20, [1.04] * 20, False),  # always, but hardly
        ([1.0] * 5, [9.0] * 5, False),  # too few turns
        ([1.0] * 20, [2.0] * 12 + [0.5] * 8, False),  # not often enough
        ([1.0] * 20, [2.0] * 16 + [0.5] * 4, True),
    ],
)
def test_a_ratio_is_clear_only_when_turns_agree(
    kvnixl_s: list[float], plain_s: list[float], clear: bool
) -> None:
    results, row = results_of(kvnixl_s, plain_s)
    ratio = results.ratio(row, PLAIN, KVNIXL)
    assert ratio is not None
    assert ratio.is_clear is clear
    cell = main_table(results).columns[-1].cell(row)
    assert cell.startswith("~") is not clear


def test_a_narrow_table_loses_columns_and_keeps_the_comparison() -> None:
    results, _ = results_of([0.001] * 8, [0.002] * 8)
    table = main_table(results)
    columns, needed = table.fitting(80)
    assert needed > 80
    assert max(len(line) for line in table.plain(columns).splitlines()) <= 80
    titles = [column.title for column in columns]
    assert {"kvnixl\np50", "plain\np50", "speed-\nup"} <= set(titles)
    assert table.fitting(1000)[0] == table.columns


def test_a_table_that_is_too_wide_is_shown_in_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results, _ = results_of([0.001] * 8, [0.002] * 8)
    table = main_table(results)
    parts = table.parts(80)
    assert len(parts) == 2
    titles = [{column.title for column in part} for part in parts]
    assert set.union(*titles) == {column.title for column in table.columns}
    assert set.intersection(*titles) == {"block\nlists", "\ntokens"}
    assert {"\nrequests", "\nMB", "kvnixl\np99"} <= titles[1]
    assert table.parts(1000) == [table.columns]
    assert len(table.parts(1)) == 1

    page = Page("")
    for width, note in ((80, False), (1, True)):
        page._width = width
        page._show_table(table)
        printed = capsys.readouterr().out
        assert ("left out" in printed) is note
        if not note:
            assert max(map(len, printed.splitlines())) <= 80
            assert "requests" in printed


def test_numbers_in_words() -> None:
    assert bytes_text(64 * 1024) == "64 KiB"
    assert bytes_text(1.5 * 1024**3) == "1.50 GiB"
    assert bytes_text(12) == "12 bytes"
    assert count_text(1, "token") == "1 token"
    assert count_text(2048, "token") == "2,048 tokens"
    assert seconds_text(7.1e-6) == "7.10 us"
    assert seconds_text(0.0999) == "99.9 ms"
    assert seconds_text(0.9999) == "1.00 s"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


# --- kvnixl's own work ----------------------------------------------------------------------------

TINY_SCALE = plan.OverheadScale(regions=2, request_blocks=6, leases=20, peers=3, samples=20)


def test_own_work_is_measured_for_both_kinds_of_lists_and_both_idle_sides() -> None:
    figures = measure_overheads(TINY_SCALE)
    assert [figure.what for figure in figures] == [
        "request, 2 regions x 6 blocks, contiguous",
        "request, 2 regions x 6 blocks, fragmented",
        "idle step of a producer, 20 leases, 3 peers",
        "idle step of a reader, 3 peers",
    ]
    for request in figures[:2]:
        assert request.samples == 20
        assert request.p99_s is not None
        assert 0 < request.p50_s <= request.p99_s
    for idle in figures[2:]:
        assert idle.p50_s > 0
        assert idle.p99_s is None, "too short to be timed one by one"


def test_own_work_has_targets_at_the_full_scale_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [figure.target_s for figure in measure_overheads(TINY_SCALE)] == [None] * 4
    monkeypatch.setattr(overhead, "FULL_SCALE", TINY_SCALE)
    targets = [figure.target_s for figure in measure_overheads(TINY_SCALE)]
    assert targets == [400e-6, 2e-3, 2e-6, 2e-6]


def test_the_full_scale_is_what_the_targets_are_for() -> None:
    full = plan.FULL_SCALE
    assert (full.regions, full.request_blocks, full.leases, full.peers) == (160, 512, 100_000, 1000)


def test_only_a_quick_run_measures_own_work_at_a_smaller_scale() -> None:
    parser = cli._parser()
    assert cli._make_plan(parser.parse_args([]), parser).overhead == plan.FULL_SCALE
    quick = cli._make_plan(parser.parse_args(["--quick"]), parser).overhead
    assert quick == plan.QUICK_SCALE
    assert quick.regions * quick.request_blocks < 160 * 512
    assert quick.leases < 100_000


@pytest.mark.parametrize("scale", [TINY_SCALE, plan.QUICK_SCALE, plan.FULL_SCALE])
def test_fragmented_requests_have_no_neighbours_and_contiguous_ones_only_neighbours(
    scale: plan.OverheadScale,
) -> None:
    for side in overhead.block_lists(scale, fragmented=False):
        assert len(side) == scale.request_blocks
        assert set(np.diff(side)) == {1}
        assert set(side) <= set(range(scale.num_blocks))
    for side in overhead.block_lists(scale, fragmented=True):
        assert len(side) == scale.request_blocks
        assert np.diff(sorted(side)).min() > 1
        assert set(side) <= set(range(scale.num_blocks))


def test_the_table_of_own_work_shows_targets_where_there_are_any() -> None:
    results, _ = results_of([0.001], [0.002])
    results.overheads = [
        Overhead("a request", 200, 190e-6, 250e-6, 400e-6),
        Overhead("an idle step", 20_000, 0.5e-6, None, None),
    ]
    table = overhead_table(results)
    assert [[column.cell(row) for column in table.columns] for row in table.rows] == [
        ["a request", "190 us", "250 us", "400 us"],
        ["an idle step", "0.50 us", "-", "-"],
    ]


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama3-8b"], "the nearest is 'llama-3.1-8b'"),
        (["--model", "Qwen-3-32B"], "the nearest is 'qwen3-32b'"),
        (["--dtype", "bf16"], "the nearest is 'bfloat16'"),
        (["--blocks", "0"], "the nearest is 4"),
        (["--blocks", "1000000"], "the nearest that fits is "),
        (["--layers", "5000"], "the nearest is 1024"),
        (["--layers", "many"], "'many' is not a whole number from 1 to 1024"),
        (["--seconds", "0"], "the nearest is 0.1"),
        (["--seconds", "nan"], "'nan' is not a number of seconds"),
        (["--tokens", "16,-3"], "-3 is outside 1 to 10000000; the nearest is 1"),
        (["--tokens", "16,,3"], "'' is not a whole number"),
        (["--requests", "0"], "the nearest is 1"),
        (
            ["--kv-heads", "1", "--head-size", "3", "--dtype", "fp8", "--block-size", "3"],
            "a block of 18 bytes is no multiple of 8; the nearest is 4",
        ),
        (["--block-size", "4096"], "the nearest that fits is "),
        (["--layers", "1024", "--kv-heads", "1024", "--head-size", "8192"], "lower --layers"),
        (["--json", "/no/such/folder/x.json"], "no directory '/no/such/folder'"),
        (["--sead", "3"], "there is no argument '--sead'; the nearest is '--seed'"),
        (["model"], "there is no argument 'model'; the nearest is '--model'"),
    ],
)
def test_bad_arguments_end_with_2_and_name_the_nearest_valid_value(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_the_nearest_value_that_an_error_names_is_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = cli._parser()
    for arguments in (["--block-size", "4096"], ["--blocks", "1000000"]):
        with pytest.raises(SystemExit):
            cli._make_plan(parser.parse_args(arguments), parser)
        nearest = re.findall(r"nearest that fits is (\d+)", capsys.readouterr().err)[0]
        cli._make_plan(parser.parse_args([arguments[0], nearest]), parser)


def test_listed_models_are_all_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list-models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MODELS)
    assert all(any(dtype in line for dtype in DTYPE_BYTES) for line in lines)


# --- processes ------------------------------------------------------------------------------------


class Busy:
    """Works without end; tells in a file whether it was closed in good order."""

    def __init__(self, told: Path, check_stop: Callable[[], None]) -> None:
        self._told = told
        self._check_stop = check_stop

    def work(self) -> None:
        while True:
            self._check_stop()
            time.sleep(0.001)

    def fail(self) -> None:
        raise KvNixlError("nothing to be done")

    def close(self) -> None:
        self._told.write_text("closed")


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[Child, Path]]:
    told = tmp_path / "told"
    child = Child("busy", functools.partial(Busy, told))
    child.wait_ready()
    yield child, told
    child.end()


def test_a_process_in_the_middle_of_its_work_ends_in_good_order(busy: tuple[Child, Path]) -> None:
    child, told = busy
    child._pipe.send(("work", ()))
    child.end()
    assert told.read_text() == "closed"
    assert not _is_alive(child.pid)


def test_an_error_over_there_is_reported_with_the_process_and_the_reason(
    busy: tuple[Child, Path],
) -> None:
    child, told = busy
    with pytest.raises(ChildError, match=r"^the busy process failed: nothing to be done$"):
        child.call("fail")
    child.end()
    assert told.read_text() == "closed"


# --- the command ----------------------------------------------------------------------------------

SMALL = [
    "--layers=4",
    "--kv-heads=2",
    "--head-size=32",
    "--blocks=128",
    "--tokens=1,400,1500",
]
COMMAND = [sys.executable, "-m", "kvnixl.bench", *SMALL]


def environment(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return {**clean, **extra}


def orphaned_shared_memory() -> set[str]:
    """Shared memory, POSIX and System V, that no living process has mapped or open."""
    # First, so that what is made meanwhile does not count.
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    in_use = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            in_use.update(re.findall(r"/dev/shm/(\S+)", (entry / "maps").read_text()))
            in_use.update(Path(os.readlink(fd)).name for fd in (entry / "fd").iterdir())
    orphans = names - in_use
    segments = Path("/proc/sysvipc/shm")
    if segments.exists():
        header, *lines = segments.read_text().splitlines()
        attached = header.split().index("nattch")
        orphans |= {
            f"System V {line.split()[1]}" for line in lines if line.split()[attached] == "0"
        }
    return orphans


def assert_no_more_orphans(before: set[str]) -> None:
    """Other processes of this machine may let go of theirs a moment before they remove it."""
    deadline = time.monotonic() + 10
    while more := orphaned_shared_memory() - before:
        assert time.monotonic() < deadline, more
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    """All living processes that were started by ``pid``, directly or not."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found


def reader_of(pid: int) -> int:
    """The process id of the reader: of the two workers, the one that was started later."""
    workers = [
        child
        for child in descendants(pid)
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(workers) == 2

    def started(pid: int) -> tuple[int, int]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]), pid  # process ids may begin anew

    return max(workers, key=started)


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 20
    while left := {pid for pid in pids if _is_alive(pid)}:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Takes the terminal over and becomes the command. Ctrl-C works as in a shell, also when the tests
# run in the background, where it would be ignored.
_IN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """The command in a terminal of its own, in which it is the foreground process."""

    def __init__(self, *arguments: str) -> None:
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(TERM="xterm", COLUMNS="100", LINES="30"),
            start_new_session=True,
        )
        os.close(theirs)
        self.pid = self._process.pid
        self.text = ""

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.text:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text!r}"
            assert self._read(1.0) is not False, f"it ended without {text!r}: {self.text!r}"

    def _read(self, timeout: float) -> bool | None:
        """False at the end, None when nothing came."""
        if not select.select([self._fd], [], [], timeout)[0]:
            return None
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux reports the end of a terminal in this way
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def exit_code(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self._read(0.2) is not False:
            assert time.monotonic() < deadline
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


class Piped:
    """The command with its output in pipes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"it ended without {text!r}: {self.process.communicate()}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    started = Terminal("--seconds=60")
    yield started
    started.close()


@pytest.fixture
def piped() -> Iterator[Piped]:
    started = Piped("--seconds=60")
    yield started
    started.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, dict[str, Any]]:
    """A short run into a pipe: exit code, output, errors, JSON."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    before = orphaned_shared_memory()
    run = Piped("--quick", "--requests=20", "--seed=3", f"--json={path}")
    try:
        code, out, err = run.end()
    finally:
        run.close()
    assert_no_more_orphans(before)
    return code, out, err, json.loads(path.read_text())


@pytest.mark.nixl
def test_a_run_says_what_it_does_and_what_it_found(
    finished: tuple[int, str, str, dict[str, Any]],
) -> None:
    code, out, err, figures = finished
    assert code == 0, err
    assert err == ""
    head, _, rest = out.partition("speed-")
    assert "by hand: 4 layers, 2 KV heads of 32, bfloat16" in head
    assert "128 blocks of 16 tokens" in head
    assert re.search(r"transport +NIXL \S+, UCX \S+ over .*UCX's choice", head)
    assert "every byte was the one that the producer had written" in rest
    assert f"All {figures['checked_transfers']:,} transfers" in rest
    assert "first transfer" in rest
    assert "pull path/" in rest
    assert re.search(
        r"8 requests of 256 KiB at once, [a-z ]+: [\d.]+ GB/s, ~?\d+% of one transfer of the same "
        r"bytes with NIXL's plain API \([\d.]+ GB/s\)\. With a transfer for each request, "
        r"unverified, the plain API moves [\d.]+ GB/s\.",
        rest.replace("\n", " "),
    )
    own_work = rest.partition("What kvnixl itself costs")[2].splitlines()
    for what in (
        "request, 16 regions x 64 blocks, contiguous",
        "request, 16 regions x 64 blocks, fragmented",
        "idle step of a producer, 1,000 leases, 50 peers",
        "idle step of a reader, 50 peers",
    ):
        (line,) = [line for line in own_work if what in line]
        assert re.search(r" [\d.,]+ (us|ms) ", line), line


@pytest.mark.nixl
def test_a_pipe_gets_no_progress_bar_and_no_escape_codes(
    finished: tuple[int, str, str, dict[str, Any]],
) -> None:
    _, out, _, _ = finished
    assert out.isascii()
    assert "\x1b" not in out
    assert "\r" not in out
    assert "measuring" not in out


@pytest.mark.nixl
def test_the_json_document_has_all_figures_and_what_they_depend_on(
    finished: tuple[int, str, str, dict[str, Any]],
) -> None:
    *_, figures = finished
    assert figures["every_byte_right"] is True
    assert figures["wrong_byte"] is None
    assert figures["machine"]["cores"] >= 1
    assert figures["machine"]["nixl"]
    assert figures["machine"]["ucx"]
    assert figures["machine"]["transports"]
    assert figures["machine"]["ucx_environment"] == {}
    assert figures["seed"] == 3
    assert figures["cache"]["block_bytes"] == 2 * 2 * 32 * 2 * 16
    assert figures["cache"]["side_bytes"] == 128 * 4 * figures["cache"]["block_bytes"]
    assert figures["first_transfer_s"] > 0
    assert set(figures["prepare_s"]) == {KVNIXL, PLAIN}
    assert figures["units"]["*_s"] == "seconds"
    rows = {(row["tokens"], row["order"]): row for row in figures["rows"]}
    assert len(rows) == 1 + 2 * len(plan.ORDERS)
    for (_, order), row in rows.items():
        paths = {KVNIXL, PLAIN, MEMCPY}
        paths |= {"unfragmented": {VERIFIED, PULL}, "fragmented": {PULL}}.get(order, set())
        assert set(row["paths"]) == paths
        if PULL in paths:
            assert row["ratios"][f"{PULL}/{KVNIXL}"]["turns"] == row["paths"][PULL]["requests"]
            assert row["paths"][PULL]["descs"] == row["paths"][KVNIXL]["descs"]
        for path in row["paths"].values():
            assert 1 <= path["requests"] <= 20
            assert 0 < path["p50_s"] <= path["p99_s"]
            assert path["gb_per_s"] == pytest.approx(row["request_bytes"] / path["p50_s"] / 1e9)
        assert row["descs_before"] == row["blocks"] * 4
        assert row["paths"][PLAIN]["descs"] <= row["descs_before"]
    burst = figures["burst"]
    assert (burst["requests"], burst["blocks_per_request"], burst["blocks"]) == (8, 16, 128)
    assert set(burst["paths"]) == {BURST, PLAIN, PLAIN_BURST}
    assert burst["paths"][PLAIN]["descs"] == 4, "one transfer: a descriptor per region"
    assert burst["paths"][PLAIN_BURST]["descs"] == 8 * 4, "a transfer for each request"
    assert burst["paths"][BURST]["descs"] == 8 * 4, "a descriptor per request and region"
    for base in (PLAIN, PLAIN_BURST):
        assert 1 <= burst["ratios"][f"{BURST}/{base}"]["turns"] <= 20
    assert len(figures["overheads"]) == 4
    for own_work in figures["overheads"]:
        assert own_work["samples"] >= 30
        assert own_work["p50_s"] > 0
        assert own_work["target_s"] is None, "a quick run has no targets"
    assert figures["checked_transfers"] == sum(
        path["requests"]
        for row in [*figures["rows"], burst]
        for name, path in row["paths"].items()
        if name != MEMCPY
    )


@pytest.mark.nixl
def test_nixl_counts_the_descriptors_that_runs_leave(
    finished: tuple[int, str, str, dict[str, Any]],
) -> None:
    *_, figures = finished
    descs = {
        (row["tokens"], row["order"]): {
            name: path["descs"] for name, path in row["paths"].items() if "descs" in path
        }
        for row in figures["rows"]
    }
    for tokens, blocks in ((400, 25), (1500, 94)):
        assert descs[tokens, "unfragmented"][KVNIXL] == 4
        assert descs[tokens, "reversed"] == {KVNIXL: 4, PLAIN: 4 * blocks}
        assert descs[tokens, "churned"][KVNIXL] < descs[tokens, "churned"][PLAIN]
        assert descs[tokens, "fragmented"][KVNIXL] > 2 * blocks


@pytest.mark.nixl
def test_a_wrong_byte_ends_with_1_and_a_sentence_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run = Piped("--seconds=60", "--inject-wrong-byte", f"--json={path}")
    try:
        code, out, err = run.end()
    finally:
        run.close()
    assert code == 1
    said = re.search(
        r"WRONG BYTE in request (\d+) of [\d,]+ tokens \(\w+\), fetched with .*: layer (\d+), the "
        r"producer's block (\d+), the reader's block (\d+), byte (\d+) of the block is 0x(..) "
        r"instead of 0x(..)",
        err.replace("\n", " "),
    )
    assert said is not None, err
    assert int(said[6], 16) ^ int(said[7], 16) == 0xFF
    figures = json.loads(path.read_text())
    assert figures["every_byte_right"] is False
    byte = figures["wrong_byte"]["byte"]
    assert [byte["layer"], byte["remote_block"], byte["local_block"], byte["offset"]] == [
        int(said[i]) for i in range(2, 6)
    ]
    assert "GB/s" not in out, "figures of wrong transfers"


@pytest.mark.nixl
def test_ctrl_c_in_a_terminal_ends_everything(terminal: Terminal) -> None:
    before = orphaned_shared_memory()
    terminal.read_until("starting")
    assert "\x1b[" in terminal.text, "a terminal gets a progress bar"
    terminal.read_until("measuring")
    processes = descendants(terminal.pid)
    assert len(processes) >= 2
    terminal.type(b"\x03")
    assert terminal.exit_code() == 130
    assert "interrupted" in terminal.text
    assert "Traceback" not in terminal.text
    wait_until_gone(processes)
    assert_no_more_orphans(before)


@pytest.mark.nixl
def test_the_processes_end_when_the_command_is_killed(piped: Piped) -> None:
    before = orphaned_shared_memory()
    piped.wait_for("transport")
    processes = descendants(piped.process.pid)
    assert len(processes) >= 2
    piped.process.kill()
    wait_until_gone(processes)
    assert_no_more_orphans(before)


@pytest.mark.nixl
def test_a_process_that_dies_ends_the_run_with_a_clear_error(piped: Piped) -> None:
    piped.wait_for("transport")
    processes = descendants(piped.process.pid)
    os.kill(reader_of(piped.process.pid), signal.SIGKILL)
    code, _, err = piped.end()
    assert code == 3
    assert "the reader process was ended by SIGKILL" in err
    assert "Traceback" not in err
    wait_until_gone(processes)


def test_a_machine_without_nixl_gets_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("raise ImportError('not here')\n")
    run = subprocess.run(
        [*COMMAND, "--quick"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(PYTHONPATH=str(tmp_path)),
        check=False,
    )
    assert run.returncode == 3
    assert "pip install nixl" in run.stderr
    assert "Traceback" not in run.stderr
