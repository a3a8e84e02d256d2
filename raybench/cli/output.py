"""Where results go: stdout."""

from __future__ import annotations

import os
import shutil
import sys

import click

from raybench.errors import ResultsError


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


def color() -> bool:
    """Whether stdout takes colours. It is None where the shell closed it (`>&-`)."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def width() -> int:
    """Tables are made for 80 columns; more than 120 is hard to read."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120)
