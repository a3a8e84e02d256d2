"""A sweep: the loop of a run, and what it says to the user, with the commands to type."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    # `raybench --help` loads this module.
    from raybench.job.plan import Plan
    from raybench.sweep.loop import Event


class Progress(Protocol):
    """Shows the events of a sweep while they come; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Show one more event."""


class Listener(Protocol):
    """Whoever shows a sweep to the user; the sweep itself prints nothing."""

    def tell(self, line: str) -> None:
        """Show the user one line, which stays visible."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Return a context during which the user is shown that the sweep waits for `what`."""

    def progress(self, plan: Plan, trials: int | None) -> Progress:
        """Return the progress of a sweep. trials: how many points finish; None: each once."""

    def show_cursor(self) -> None:
        """Show the cursor again, which a spinner hides; called before the process ends."""


def program() -> str:
    """Return how this process was called: `raybench` or `python -m raybench`."""
    is_module = bool(sys.argv) and Path(sys.argv[0]).name == "__main__.py"
    return "python -m raybench" if is_module else "raybench"


def name_program(text: str) -> str:
    """Return a message in which each "`raybench " is replaced by how raybench was called."""
    return text.replace("`raybench ", f"`{program()} ")


def command(*words: str) -> str:
    """Return a command of raybench with these words, quoted for a shell.

    Characters that control a terminal become question marks.
    """
    text = f"{program()} {shlex.join(words)}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)
