"""The console on stderr, for messages and progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> Console:
    """Return a console on stderr, for messages and progress."""
    from rich.console import Console

    return Console(stderr=True)


def say(console: Console, text: str) -> None:
    """Print a text as one line, neither wrapped nor coloured, without control characters.

    A command "`raybench ...`" in the text gets the name by which raybench was called.
    """
    from raybench.report.formatting import name_program, printable

    console.out(printable(name_program(text)), highlight=False)  # print draws :100: as an emoji
