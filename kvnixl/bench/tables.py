"""The tables of a run, as plain text or through rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvnixl.bench.overhead import Overhead
from kvnixl.bench.paths import KVNIXL, MEMCPY, PLAIN, PULL, VERIFIED
from kvnixl.bench.plan import Row
from kvnixl.bench.results import Figures, Results
from kvnixl.bench.wording import seconds_text, three_digits, times_text

# What the column titles mean.
LEGEND = {
    "block pairs": "descriptors before merging",
    "descs": "descriptors that NIXL was left with after merging",
    "GB/s": "10^9 bytes per second at the median latency, p50",
    "p99": "the slowest request where there were fewer than 100",
    "plain": "NIXL's Python API: one tuple per block, ids in list order",
    "speed-up": "p50 of plain by p50 of kvnixl; ~: may as well be chance",
}


# Columns of this importance or above say which row it is.
ROW_NAME = 98

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """
    Attributes:
        title: up to two lines.
        importance: columns with the lowest one go first when there is no room.
    """

    title: str
    importance: int
    cell: Callable[[RowT], str]
    right: bool = True


@dataclass
class Table(Generic[RowT]):
    """Text cells, and what to leave out when there is no room for all columns."""

    columns: list[Column[RowT]]
    rows: list[RowT]
    breaks: set[int] = field(default_factory=set)  # rows that a gap precedes

    def fitting(self, width: int) -> tuple[list[Column[RowT]], int]:
        """The columns that fit, and the width that all of them need."""
        columns = list(self.columns)
        needed = self._width(columns)
        while self._width(columns) > width and len(columns) > 1:
            columns.remove(min(columns, key=lambda column: column.importance))
        return columns, needed

    def parts(self, width: int) -> list[list[Column[RowT]]]:
        """All columns as tables that fit, to be shown below each other: the most important ones
        first, and in each table those that name its rows."""
        parts = [self.fitting(width)[0]]
        names = [column for column in self.columns if column.importance >= ROW_NAME]
        left = [column for column in self.columns if column not in parts[0]]
        while left:
            part = Table([*names, *left], self.rows).fitting(width)[0]
            if not set(part) & set(left):
                break  # there is no room beside the names
            parts.append(part)
            left = [column for column in left if column not in part]
        return parts

    def _width(self, columns: list[Column[RowT]]) -> int:
        return sum(self._column_width(column) + 2 for column in columns)

    def _column_width(self, column: Column[RowT]) -> int:
        cells = [*column.title.split("\n"), *(column.cell(row) for row in self.rows)]
        return max(len(cell) for cell in cells)

    def plain(self, columns: list[Column[RowT]]) -> str:
        widths = [self._column_width(column) for column in columns]
        titles = [column.title.rpartition("\n")[::2] for column in columns]

        def line(cells: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(cells, widths, columns, strict=True)
            )
            return "  " + "  ".join(padded).rstrip()

        lines = [
            line([upper for upper, _ in titles]),
            line([lower for _, lower in titles]),
            "  " + "  ".join("-" * width for width in widths),
        ]
        for number, row in enumerate(self.rows):
            if number in self.breaks:
                lines.append("")
            lines.append(line([column.cell(row) for column in columns]))
        return "\n".join(lines)

    def rich(self, columns: list[Column[RowT]]) -> Any:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False
        )
        for column in columns:
            table.add_column(
                column.title, justify="right" if column.right else "left", no_wrap=True
            )
        for number, row in enumerate(self.rows):
            table.add_row(
                *(column.cell(row) for column in columns),
                end_section=number + 1 in self.breaks,
            )
        return table


class _Cells:
    """What stands in the cells of a row."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def figure(self, path: str, text: Callable[[Figures], str]) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            figures = self._results.figures(row, path)
            return text(figures) if figures else "-"

        return cell

    def descs(self, path: str) -> Callable[[Row], str]:
        return self.figure(path, lambda f: f"{f.descs:,}" if f.descs else "-")

    def rate(self, path: str) -> Callable[[Row], str]:
        return self.figure(path, lambda f: three_digits(f.gb_per_s))

    def p50(self, path: str) -> Callable[[Row], str]:
        return self.figure(path, lambda f: seconds_text(f.p50_s))

    def p99(self, path: str) -> Callable[[Row], str]:
        return self.figure(path, lambda f: seconds_text(f.p99_s))

    def ratio(self, path: str, base: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            ratio = self._results.ratio(row, path, base)
            if ratio is None:
                return "-"
            return ("" if ratio.is_clear else "~") + times_text(ratio.of_medians)

        return cell


def main_table(results: Results) -> Table[Row]:
    """kvnixl, the plain API and memcpy, per request length and kind of block list."""
    cells = _Cells(results)
    rows = [row for row, turns in results.turns.items() if turns]
    columns = [
        _order_column(rows),
        Column("\ntokens", 98, lambda row: f"{row.tokens:,}"),
        Column("\nMB", 3, lambda row: three_digits(results.request_bytes(row) / 1e6)),
        Column("\nrequests", 2, cells.figure(KVNIXL, lambda f: f"{f.requests:,}")),
        Column("block\npairs", 80, lambda row: f"{results.descs_before(row):,}"),
        Column("kvnixl\ndescs", 90, cells.descs(KVNIXL)),
        Column("kvnixl\nGB/s", 91, cells.rate(KVNIXL)),
        Column("kvnixl\np50", 92, cells.p50(KVNIXL)),
        Column("kvnixl\np99", 10, cells.p99(KVNIXL)),
        Column("plain\ndescs", 70, cells.descs(PLAIN)),
        Column("plain\nGB/s", 5, cells.rate(PLAIN)),
        Column("plain\np50", 89, cells.p50(PLAIN)),
        Column("plain\np99", 4, cells.p99(PLAIN)),
        Column("memcpy\nGB/s", 60, cells.rate(MEMCPY)),
        Column("speed-\nup", 95, cells.ratio(PLAIN, KVNIXL)),
    ]
    return Table(columns, rows, _breaks(rows))


def _order_column(rows: Sequence[Row]) -> Column[Row]:
    """Names each kind of block list once."""
    first_of_order = {row.order: row for row in reversed(rows)}

    def order(row: Row) -> str:
        return row.order if first_of_order[row.order] is row else ""

    return Column("block\nlists", 99, order, right=False)


def _breaks(rows: Sequence[Row]) -> set[int]:
    """Where another kind of block list begins."""
    return {
        number for number in range(1, len(rows)) if rows[number].order != rows[number - 1].order
    }


def verified_table(results: Results) -> Table[Row]:
    """Requests with and without the proof that their blocks were not reused."""
    cells = _Cells(results)
    columns: list[Column[Row]] = [Column("\ntokens", 99, lambda row: f"{row.tokens:,}")]
    for path, title in ((KVNIXL, "unverified"), (VERIFIED, "verified")):
        columns += [
            Column(f"{title}\nGB/s", 5, cells.rate(path)),
            Column(f"{title}\np50", 90, cells.p50(path)),
            Column(f"{title}\np99", 10, cells.p99(path)),
        ]
    columns.append(Column("verified/\nunverified", 95, cells.ratio(VERIFIED, KVNIXL)))
    return Table(columns, [row for row in results.turns if results.samples(row, VERIFIED)])


def pull_table(results: Results) -> Table[Row]:
    """The whole pull path, and the part of it that `main_table` has."""
    cells = _Cells(results)
    rows = [row for row in results.turns if results.samples(row, PULL)]
    columns = [_order_column(rows), Column("\ntokens", 98, lambda row: f"{row.tokens:,}")]
    for path, title in ((KVNIXL, "block read"), (PULL, "pull path")):
        columns += [
            Column(f"{title}\np50", 90, cells.p50(path)),
            Column(f"{title}\np99", 10, cells.p99(path)),
        ]
    columns.append(Column("pull path/\nblock read", 95, cells.ratio(PULL, KVNIXL)))
    return Table(columns, rows, _breaks(rows))


def overhead_table(results: Results) -> Table[Overhead]:
    """kvnixl's own work."""

    def p99(overhead: Overhead) -> str:
        return "-" if overhead.p99_s is None else seconds_text(overhead.p99_s)

    def target(overhead: Overhead) -> str:
        return "-" if overhead.target_s is None else seconds_text(overhead.target_s)

    columns: list[Column[Overhead]] = [
        Column("\nkvnixl's own work", 99, lambda overhead: overhead.what, right=False),
        Column("\np50", 98, lambda overhead: seconds_text(overhead.p50_s)),
        Column("\np99", 10, p99),
        Column("\ntarget", 90, target),
    ]
    return Table(columns, results.overheads)
