"""The interface of what shows a sweep to the user."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, Self

from raybench.job.plan import Plan
from raybench.sweep.loop import Event


class ProgressDisplay(Protocol):
    """Shows the events of a sweep as they come."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Show one more event, inside the `with` block."""


class Listener(Protocol):
    """Shows a sweep to the user; the sweep itself prints nothing."""

    def tell(self, line: str) -> None:
        """Show a line that stays visible; any thread may call it."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Show what the user waits for, such as "connecting to Ray", during the context."""

    def progress(self, plan: Plan, trials: int) -> ProgressDisplay:
        """Return the progress display of a sweep.

        Args:
            trials: how many trials the sweep will run, as far as known.
        """

    def show_cursor(self) -> None:
        """Show the cursor, which a spinner hides; called before the process is ended."""
