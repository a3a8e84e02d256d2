"""Where results go: stdout. And values, objects and tables as the text that goes there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from raybench.errors import ResultsError

COLUMNS_OF_TABLES = 80
_PROSE = 100


def write_result(text: str) -> None:
    """The result on stdout. Raises ResultsError when it cannot be written.

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
    """The result in a file. Raises ResultsError when it cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error


def color() -> bool:
    """Whether stdout takes colours. It is None where the shell closed it (`>&-`)."""
    takes_none = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stdout is not None and sys.stdout.isatty() and not takes_none


def width() -> int:
    """That of the terminal, or what COLUMNS says; where output is piped, 80."""
    return shutil.get_terminal_size((COLUMNS_OF_TABLES, 24)).columns


def text_width() -> int:
    """Of a text, which longer lines make hard to read."""
    return min(width(), _PROSE)


def scalar_text(value: object) -> str:
    """A value as a job file writes it."""
    from raybench.report.formatting import printable

    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else printable(str(value))


def json_text(value: object) -> str:
    """An object as JSON, with a line for each of its values."""
    return json.dumps(value, indent=2) + "\n"


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, as wide as the terminal at most, plain where it is piped."""
    from raybench.report.text.console import SETTING_CHARS, Column, grid, render

    whole = ("parameter", "point_id")
    shown = [Column(name, None if name in whole else SETTING_CHARS) for name in columns]
    return render([grid(shown, rows)], width(), color())
