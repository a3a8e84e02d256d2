"""Writing results to stdout, and messages and progress to stderr.

A fault of stderr never ends a command. It may be full, as the disk below a log is; its reader
may have left (`2>&1 | head`); or the shell has closed it (`2>&-`). A sweep goes on all the same:
its rows are what counts.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.errors import ResultsError, UsageError
from raybench.report.plain_text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from raybench.job.plan import Plan
    from raybench.job.point import Point
    from raybench.report.documents import Document
    from raybench.sweep import Progress

COLUMNS_OF_TABLES = 80
_STDERR = 2
_PROSE = 100
_SUMMARY = "GITHUB_STEP_SUMMARY"
# A longer summary is not shown at all.
# https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits
_MOST_SUMMARY_BYTES = 1024**2


def write_result(text: str) -> None:
    """Write the result to stdout. Raises ResultsError when it cannot be written.

    A reader that has left (`| head`) has what it wanted: the exit code stays that of the command.
    """
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        # What is still buffered must not fail again when the interpreter ends.
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a path
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except OSError as error:
        raise ResultsError(f"stdout: cannot be written: {error.strerror}") from error


def write_file(path: Path, content: bytes) -> None:
    """Write the result to a file. Raises ResultsError when it cannot be written."""
    is_new = not os.path.lexists(path)
    try:
        path.write_bytes(content)
    except OSError as error:
        if is_new:
            # What a full disk left of it would be taken for the whole.
            with suppress(OSError):
                path.unlink()
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error


def write_output(text: str, path: Path | None, kind: str) -> None:
    """Write a report to a file, or to stdout where there is none; say how to look at a page.

    Raises ResultsError when it cannot be written.
    """
    if path is None:
        write_result(text)
        return
    write_file(path, text.encode())
    if kind == "html":
        click.echo(f"{path}: open it in a browser", err=True)


def append_to_github_summary(markdown: str) -> None:
    """Append to the summary of a step of GitHub Actions, the file that GITHUB_STEP_SUMMARY names.

    Raises UsageError when none is named, ResultsError when it cannot be written or becomes longer
    than GitHub shows.
    """
    name = os.environ.get(_SUMMARY)
    if not name:
        raise UsageError(f"--github: {_SUMMARY} is not set; it is in a step of GitHub Actions")
    path, content = Path(name), markdown.encode()
    try:
        already = path.stat().st_size if path.exists() else 0
        if already + len(content) > _MOST_SUMMARY_BYTES:
            raise ResultsError(
                f"{path}: GitHub shows summaries of up to 1 MiB; it has {already} bytes and the "
                f"report {len(content)}; keep the report as a file with -o"
            )
        with path.open("ab") as summary:
            summary.write(content)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error


def color() -> bool:
    """Return whether stdout takes colours. It is None where the shell closed it (`>&-`)."""
    takes_none = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stdout is not None and sys.stdout.isatty() and not takes_none


def width() -> int:
    """Return the width of the terminal, or what COLUMNS says; where output is piped, 80."""
    return shutil.get_terminal_size((COLUMNS_OF_TABLES, 24)).columns


def text_width() -> int:
    """Return the width of a text, which longer lines make hard to read."""
    return min(width(), _PROSE)


def scalar_text(value: object) -> str:
    """Write a value as a job file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else printable(str(value))


def json_text(value: object) -> str:
    """Write an object as JSON, with a line for each of its values."""
    return json.dumps(value, indent=2) + "\n"


def write_document(document: Document, kind: str = "terminal") -> None:
    """Write a document to stdout: for this terminal, as Markdown (md) or as JSON."""
    from raybench.report.documents import format_document

    write_result(format_document(document, kind, width=width(), color=color()))


def table_text(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of text, as wide as the terminal at most, plain where it is piped."""
    from raybench.report.blocks import SETTING_CHARS, Column, Table
    from raybench.report.terminal import render

    columns = (
        Column(
            title=title,
            is_text=True,
            min_chars=None if title in ("parameter", "point_id") else SETTING_CHARS,
        )
        for title in titles
    )
    table = Table(columns=tuple(columns), rows=tuple(map(tuple, rows)))
    return render([table], width=width(), color=color())


def make_console() -> Console:
    """Return a console on stderr, for messages and progress."""
    from rich.console import Console

    return Console(stderr=True)


def say(console: Console, text: str) -> None:
    """Print one line as it is: neither wrapped nor coloured, so that it can be copied."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_phase(console: Console, what: str) -> Iterator[None]:
    """Show `what` while the block runs: a spinner on a terminal, a line elsewhere."""
    if not console.is_interactive:
        say(console, what)
    with console.status(what):
        yield


class ConsoleListener:
    """Shows messages, spinners and progress on a console.

    name_of: returns the name of a point; None: the settings that vary name it.
    """

    def __init__(self, console: Console, name_of: Callable[[Point], str] | None = None) -> None:
        self._console = console
        self._name_of = name_of

    def tell(self, line: str) -> None:
        """Print one line, as it is."""
        say(self._console, line)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Show a spinner."""
        return self._console.status(what)

    def progress(self, plan: Plan, trials: int | None) -> Progress:
        """Return the progress of a sweep of this plan, shown on the console."""
        # Here, so that a sweep that has nothing to do does not wait for it.
        from raybench.cli.progress import PointProgress

        return PointProgress(plan, self._console, trials, self._name_of)

    def show_cursor(self) -> None:
        """Undo what a spinner has hidden."""
        self._console.show_cursor()


class _LossyFile(io.FileIO):
    """Drops what cannot be written; what comes later may have room again."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Return the size of `data`, as if all had been written; drop what cannot be."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[super().write(left) or 0 :]
        except OSError:
            return size
        return size


def keep_stderr_usable() -> None:
    """Replace sys.stderr by a stream that never raises; a stream of somebody else stays."""
    _fill_gaps()
    usual = sys.stderr
    if usual is not sys.__stderr__:
        return
    sys.stderr = io.TextIOWrapper(
        _LossyFile(_STDERR, "wb", closefd=False),
        encoding=usual.encoding if usual else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


def _fill_gaps() -> None:
    """Open what is closed of 0, 1 and 2: the next file opened would be what others write to."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= _STDERR:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
