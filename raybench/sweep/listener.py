"""The interface through which a sweep shows its progress to the user."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, Self

from raybench.job.plan import Plan
from raybench.sweep.loop import Event


class ProgressDisplay(Protocol):
    """Shows the events of a sweep, inside its `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Show one event."""


class Listener(Protocol):
    """Shows a sweep to the user; the sweep itself prints nothing."""

    def tell(self, line: str) -> None:
        """Print a line; thread-safe."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Show a spinner with this text, such as "connecting to Ray", during the context."""

    def progress(self, plan: Plan, trials: int) -> ProgressDisplay:
        """Return the progress display of a sweep of about so many trials."""

    def show_cursor(self) -> None:
        """Show the cursor again before the process is ended; a spinner hides it."""
