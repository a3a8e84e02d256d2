"""Where results go: stdout. And values, objects and tables as the text that goes there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from raybench.errors import ResultsError, UsageError

COLUMNS_OF_TABLES = 80
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
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error


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
    from raybench.report.plain_text import printable

    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else printable(str(value))


def json_text(value: object) -> str:
    """Write an object as JSON, with a line for each of its values."""
    return json.dumps(value, indent=2) + "\n"


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out columns of text, as wide as the terminal at most, plain where it is piped."""
    from raybench.report.text.terminal import SETTING_CHARS, Column, grid, render

    whole = ("parameter", "point_id")
    shown = [Column(name, None if name in whole else SETTING_CHARS) for name in columns]
    return render([grid(shown, rows)], width(), color())
