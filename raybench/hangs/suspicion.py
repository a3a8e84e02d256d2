"""Decides when to look at a running point whose ranks make no progress. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A look is due after three of the longest blocks without progress, and not before 10 s.
_MIN_STALL_S = 10.0
_STALL_BLOCKS = 3
# A rank counts as waiting if it has waited for half of that time. Healthy ranks wait for less.
_WAIT_SHARE = 0.5
# Evidence is collected again after at least this time, to see whether a rank has moved.
_MIN_CONFIRM_S = 2.0
# Each look without a verdict doubles the time until the next look.
_BACKOFF = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far a rank is in the point."""

    # Number of finished blocks of steps, warm-up included.
    blocks: int
    # When its last block began or ended, on the driver's monotonic clock.
    last_s: float
    longest_block_s: float
    # Whether the rank runs steps now. Between blocks, ranks may build, check or compile for long.
    is_in_block: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """When and how to look at a point for a rank that hangs."""

    # On the driver's monotonic clock.
    due_s: float
    # A rank that has been in a collective for a shorter time does not count as waiting.
    min_wait_s: float
    # Time from the first to the last collection of evidence.
    confirm_after_s: float


def next_look(ranks: Sequence[RankProgress], looks: int) -> Look | None:
    """Return when to look at the point; None before the first step and between blocks.

    Args:
        ranks: progress of the ranks that have not ended the point.
        looks: number of looks since any rank has made progress.
    """
    are_between_blocks = not any(rank.is_in_block for rank in ranks)
    # The first step may compile or load data for minutes.
    is_before_first_step = any(rank.blocks == 0 for rank in ranks)
    if are_between_blocks or is_before_first_step:
        return None
    longest_s = max(rank.longest_block_s for rank in ranks)
    # So long without progress is suspicious; each look without a verdict doubles this time.
    stall_s = max(_MIN_STALL_S, _STALL_BLOCKS * longest_s)
    earliest_progress_s = min(rank.last_s for rank in ranks)
    return Look(
        due_s=earliest_progress_s + stall_s * _BACKOFF**looks,
        # Healthy ranks wait in a collective for less than this time.
        min_wait_s=_WAIT_SHARE * stall_s,
        confirm_after_s=max(_MIN_CONFIRM_S, longest_s),
    )
