"""Whom a sweep tells what it does: the command line shows it, a test may keep it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    # `raybench --help` loads this module.
    from raybench.job.plan import Plan
    from raybench.sweep.loop import Event


class Progress(Protocol):
    """Shows the events of a sweep while they come; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None:
        """Take in what happened."""


class Listener(Protocol):
    """What a sweep needs of whoever watches it; it prints nothing itself."""

    def tell(self, line: str) -> None:
        """Take one line, which is to stay."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Show what is waited for, as long as the block lasts."""

    def progress(self, plan: Plan, trials: int | None) -> Progress:
        """Make the progress of a sweep over the points of this plan."""

    def show_cursor(self) -> None:
        """Give back the cursor that a spinner has hidden: the process ends."""
