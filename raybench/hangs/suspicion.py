"""When a running point is worth a look: a rank has made no progress for long. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_S = 10.0
_BLOCKS = 3
# A rank counts as waiting after this share of the time without progress. Ranks that merely take
# turns in being late wait for less.
_WAITED = 0.5
# Until a look is confirmed by a second one, in which nothing may have moved.
_CONFIRM_S = 2.0
# Each look without a verdict makes the next one so much later.
_LATER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What a rank has told of its progress in the point."""

    # Blocks of steps that it has finished; the warm-up counts.
    blocks: int
    # When its last block began or ended, by a clock of the driver.
    last_s: float
    longest_block_s: float
    # Whether it runs steps now. Between two blocks ranks may build, check or compile for long.
    is_in_block: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A look that is due."""

    # By the clock of `RankProgress.last_s`.
    due_s: float
    # A shorter wait in a collective says nothing.
    least_wait_s: float
    # Between the two looks whose evidence `verdict.judge` compares.
    confirm_after_s: float


def next_look(ranks: Sequence[RankProgress], looks: int) -> Look | None:
    """Return when to look at the point; None while only the limits of set-up count.

    Args:
        ranks: ranks that have not answered.
        looks: number of looks since the last progress of any rank.
    """
    # A first step may compile or load data for minutes.
    if not any(rank.is_in_block for rank in ranks) or any(rank.blocks == 0 for rank in ranks):
        return None
    longest_s = max(rank.longest_block_s for rank in ranks)
    limit_s = max(_LEAST_S, _BLOCKS * longest_s)
    return Look(
        due_s=min(rank.last_s for rank in ranks) + limit_s * _LATER**looks,
        least_wait_s=_WAITED * limit_s,
        confirm_after_s=max(_CONFIRM_S, longest_s),
    )
