"""Where messages and progress go: stderr."""

from __future__ import annotations

import os

from rich.console import Console

from raybench.report.wording import printable


class _Stderr(Console):
    """A reader that has left (`2>&1 | head`) does not end a sweep: the rows are what counts."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a path
            os.dup2(nowhere.fileno(), self.file.fileno())


def make_console() -> Console:
    """The console of a command that says what it does."""
    return _Stderr(stderr=True)


def say(console: Console, text: str) -> None:
    """One line as it is: neither wrapped nor coloured, so that it can be copied."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
