"""Where messages and progress go: stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from raybench.report.plain_text import printable

if TYPE_CHECKING:
    from raybench.job.plan import Plan
    from raybench.job.point import Point
    from raybench.sweep.listener import Progress


def make_console() -> Console:
    """Make the console of a command that says what it does."""
    return Console(stderr=True)


def say(console: Console, text: str) -> None:
    """Print one line as it is: neither wrapped nor coloured, so that it can be copied."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_phase(console: Console, what: str) -> Iterator[None]:
    """Show what is going on: a spinner on a terminal, a line elsewhere."""
    if not console.is_interactive:
        say(console, what)
    with console.status(what):
        yield


class ConsoleListener:
    """Shows lines, what is waited for, and progress on a console.

    name_of: how a point is called, as `make_progress` takes it.
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
        """Make the kind of progress that suits the stream."""
        # Here, so that a sweep that has nothing to do does not wait for it.
        from raybench.cli.progress import make_progress

        return make_progress(plan, self._console, trials, self._name_of)

    def show_cursor(self) -> None:
        """Undo what a spinner has hidden."""
        self._console.show_cursor()
