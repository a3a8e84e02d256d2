"""Where messages and progress go: stderr."""

from __future__ import annotations

from rich.console import Console

from raybench.report.formatting import printable


def make_console() -> Console:
    """The console of a command that says what it does."""
    return Console(stderr=True)


def say(console: Console, text: str) -> None:
    """One line as it is: neither wrapped nor coloured, so that it can be copied."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
