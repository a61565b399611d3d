"""How numbers and findings are put into words."""

from __future__ import annotations

from collections.abc import Sequence

from kvnixl.bench.models import MODELS
from kvnixl.bench.paths import BURST, KVNIXL, MEMCPY, PLAIN, PLAIN_BURST, PULL, VERIFIED
from kvnixl.bench.workers import WrongRead

PATH_TITLES = {
    KVNIXL: "kvnixl",
    PLAIN: "NIXL's plain API",
    VERIFIED: "kvnixl and a lease check",
    PULL: "kvnixl's producer and reader",
    BURST: "kvnixl's producer and reader, with others at once",
    PLAIN_BURST: "NIXL's plain API, with others at once",
    MEMCPY: "memcpy",
}


def three_digits(value: float) -> str:
    """``"1,234"``, ``"12.3"``, ``"1.23"``, ``"0.0123"``."""
    if value >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.0995 else f"{value:.4f}"


def count_text(count: int, noun: str) -> str:
    """``"1 token"``, ``"1,000 tokens"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_text(count: float) -> str:
    """``"64 KiB"``, ``"1.50 GiB"``."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1023.5:
            return f"{three_digits(count)} {unit}"
        count /= 1024
    return f"{three_digits(count)} GiB"


def seconds_text(seconds: float) -> str:
    """``"7.10 us"``, ``"123 ms"``."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def times_text(ratio: float) -> str:
    """``"1.25x"``."""
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.0f}x"


def listed(items: Sequence[str]) -> str:
    """``"a, b and c"``."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def models_table() -> str:
    """The known shapes, for ``--list-models``."""
    width = max(len(name) for name in MODELS)
    return "\n".join(
        f"{name:{width}}  {shape.describe()}" + (f" ({shape.note})" if shape.note else "")
        for name, shape in MODELS.items()
    )


def wrong_byte_text(wrong: WrongRead) -> str:
    byte, row = wrong.byte, wrong.row
    if wrong.request:
        request = f"request {wrong.request} of {count_text(row.tokens, 'token')} ({row.order})"
    else:
        request = f"the warm-up request of {count_text(row.tokens, 'token')}"
    return (
        f"WRONG BYTE in {request}, fetched with {PATH_TITLES[wrong.path]}: layer {byte.layer}, "
        f"the producer's block {byte.remote_block}, the reader's block {byte.local_block}, byte "
        f"{byte.offset} of the block is {byte.found:#04x} instead of {byte.expected:#04x}. Wrong "
        f"bytes in this request: {byte.count:,}."
    )
