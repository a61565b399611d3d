"""Standard output: a terminal with colours and a progress bar, or a pipe without them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from types import TracebackType
from typing import Any, Self

from kvnixl.bench.tables import Column, RowT, Table

# Of a table that goes to a file or a pipe, and of text anywhere.
_PIPE_WIDTH = 140
_TEXT_WIDTH = 100
_LABEL_WIDTH = 12


class Page:
    """Lines, facts and tables; as a context, with a progress bar.

    Args:
        first_task: what the progress bar says at first.
    """

    def __init__(self, first_task: str) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._width = shutil.get_terminal_size().columns if self._is_terminal else _PIPE_WIDTH
        self._first_task = first_task
        self._console: Any = None
        self._progress: Any = None
        self._task: Any = None
        if self._is_terminal:
            try:
                from rich.console import Console
            except ImportError:
                print("(pip install rich: colours and a progress bar)\n")
            else:
                self._console = Console(highlight=False)

    def __enter__(self) -> Self:
        if self._console is not None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                BarColumn(30),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task(self._first_task, total=None)
            self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, text: str, *, bold: bool = False, dim: bool = False) -> None:
        if self._console is not None:
            style = "bold" if bold else "dim" if dim else None
            self._console.print(text, style=style, markup=False)
        else:
            print(text)

    def _progress_to(self, what: str, **fields: Any) -> None:
        """Let the progress bar say `what`; with more of the fields that it has."""
        if self._progress is not None:
            self._progress.update(self._task, description=what, **fields)

    def _show_table(self, table: Table[RowT]) -> None:
        shown: set[Column[RowT]] = set()
        for columns in table.parts(self._width):
            if shown:
                self.line("")
            if self._console is not None:
                self._console.print(table.rich(columns))
            else:
                print(table.plain(columns))
            shown |= set(columns)
        left_out = len(table.columns) - len(shown)
        if left_out:
            _, needed = table.fitting(self._width)
            what = "one column is" if left_out == 1 else f"{left_out} columns are"
            self.line(f"({what} left out: all take {needed} characters; --json has them)", dim=True)

    def _fact(self, label: str, text: str, *, dim: bool = False) -> None:
        indent = " " * (_LABEL_WIDTH + 3)
        label = f"  {label:{_LABEL_WIDTH}} "
        for line in self._wrap(label + text, subsequent_indent=indent):
            self.line(line, dim=dim)

    def _sentence(self, text: str) -> None:
        for line in self._wrap(text):
            self.line(line)

    def _wrap(self, text: str, subsequent_indent: str = "") -> list[str]:
        width = min(self._width, _TEXT_WIDTH)
        return textwrap.wrap(
            text,
            width,
            subsequent_indent=subsequent_indent,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _flush(self) -> None:
        sys.stdout.flush()
