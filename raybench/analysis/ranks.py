"""What each rank does in a step: its own work, the wait for the slowest rank, the exchange. Pure.

On each rank the parts add up to the step: computes + idle + waits + exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raybench.results.breakdown import why_no_breakdown
from raybench.results.point_row import PointRow

# Of more ranks those that tell most are shown: rank 0, the quickest and the slowest.
MOST_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part of a step, in ms.

    computes: its device, or its process on a CPU. idle: its device waits for its host; None on a
    CPU and where nobody knows. waits: for the slowest rank. exchange: the step beyond the slowest
    rank's own, the same on all ranks; less than 0 where the instrumented steps were slower.
    """

    rank: int
    computes_ms: float
    idle_ms: float | None
    waits_ms: float
    exchange_ms: float

    @property
    def own_ms(self) -> float:
        """Return the time that the rank's own step takes without its peers."""
        return self.computes_ms + (self.idle_ms or 0.0)


def ranks_of_step(row: PointRow) -> tuple[RankStep, ...]:
    """Return the ranks of a point, in their order, but for those without a share of the step.

    Empty where it has one rank, or its steps were not taken apart.
    """
    own, device = row.local_step_ms_by_rank or (), row.device_ms_by_rank
    if len(own) < 2 or row.step_ms_p50 is None or why_no_breakdown(row):
        return ()
    shares = row.share_by_rank or own
    working = [rank for rank, share in enumerate(shares) if share]
    exchange_ms = row.step_ms_p50 - max(own)
    return tuple(
        RankStep(
            rank=rank,
            # Queued beforehand, the device's work may come out longer than the whole step.
            computes_ms=min(device[place], own_ms) if device else own_ms,
            idle_ms=max(0.0, own_ms - device[place]) if device else None,
            waits_ms=max(own) - own_ms,
            exchange_ms=exchange_ms,
        )
        for place, (rank, own_ms) in enumerate(zip(working, own, strict=True))
    )


def telling_ranks(ranks: Sequence[RankStep]) -> list[RankStep]:
    """Return the ranks to show: all of few, else rank 0, the quickest and the slowest."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    quickest, slowest = (pick(ranks, key=lambda one: one.own_ms) for pick in (min, max))
    chosen = {one.rank: one for one in (ranks[0], quickest, slowest)}
    return [chosen[rank] for rank in sorted(chosen)]
