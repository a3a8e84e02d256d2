"""What a sweep tells, on the terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rich.console import Console

from raybench.cli.stderr import say
from raybench.job.plan import Plan
from raybench.sweep.listener import Progress


class ConsoleListener:
    """Shows lines, what is waited for, and progress on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

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

        return make_progress(plan, self._console, trials)

    def show_cursor(self) -> None:
        """Undo what a spinner has hidden."""
        self._console.show_cursor()
