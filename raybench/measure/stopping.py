"""How many iterations to run next: the decision that one rank takes between blocks. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has been done of a phase (warm-up or measuring).

    step_s: the expected time of the next iteration; None before there is any.
    left_s: what remains of the time budget.
    """

    done: int
    wanted: int
    step_s: float | None
    left_s: float


def next_block(progress: Progress) -> int:
    """Iterations of the next block; 0 ends the phase.

    A phase does at least one iteration, whatever the budget; the rest is cut to what fits.
    The first block is a single iteration while nothing is known of the step time.
    """
    missing = progress.wanted - progress.done
    if missing <= 0:
        return 0
    at_least = 1 if progress.done == 0 else 0
    if progress.step_s is None:
        return at_least
    fits = int(progress.left_s / progress.step_s) if progress.step_s > 0 else missing
    return min(missing, max(fits, at_least))
