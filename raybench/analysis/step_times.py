"""How the step times of one point are spread: over iterations, modules, regions and ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raybench.results.breakdown import why_no_breakdown
from raybench.results.point_row import PointRow
from raybench.results.tables import RegionRow

_NS_PER_MS = 1e6

# What `rank_by_iteration` needs of the table `samples`.
SAMPLE_COLUMNS = ("repeat", "rank", "iteration", "is_warmup", "step_ns")


def join_rounds(rounds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the samples of all rounds of a point; repeats are counted on from round to round.

    rounds: rows of the table `samples`, a frame a round. Raises ValueError for no rounds.
    """
    joined: list[pd.DataFrame] = []
    repeats = 0
    for samples in rounds:
        joined.append(samples.assign(repeat=samples["repeat"] + repeats))
        repeats = joined[-1]["repeat"].max() + 1 if len(samples) else repeats
    return pd.concat(joined, ignore_index=True)


def rank_by_iteration(samples: pd.DataFrame, columns: int) -> pd.DataFrame:
    """Return the timed samples of a point in ms, by rank (index) and iteration (columns).

    samples: rows of the table `samples`; warm-up is left out. Empty without timed ones. columns: at
    most so many. Of more iterations, a column holds for each rank, of several in a row, the one
    farthest from the point's median, and is named by the first, all repeats counted on.
    """
    timed = samples[~samples["is_warmup"].astype(bool)]
    wide = timed.pivot_table(index="rank", columns=["repeat", "iteration"], values="step_ns")
    times_ms = wide.to_numpy(np.float64) / _NS_PER_MS
    if not times_ms.size:
        return pd.DataFrame()
    median = np.nanmedian(times_ms)
    firsts = np.unique(np.linspace(0, times_ms.shape[1], columns, endpoint=False).astype(int))
    bins = np.split(times_ms, firsts[1:], axis=1)
    farthest = [_farthest(part, median) for part in bins]
    return pd.DataFrame(np.column_stack(farthest), index=wide.index, columns=firsts)


def _farthest(times_ms: NDArray[np.float64], middle: float) -> NDArray[np.float64]:
    """Return of each row the value farthest from `middle`; NaN where a row has none."""
    distances = np.nan_to_num(np.abs(times_ms - middle), nan=-1.0)
    places = distances.argmax(axis=1)[:, np.newaxis]
    found: NDArray[np.float64] = np.take_along_axis(times_ms, places, axis=1)[:, 0]
    return found


def rank_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """Return a row a rank of timed samples: iterations, median_ms, min_ms, max_ms, data_ms.

    data_ms: median wait for the next batch; NaN where steps take none.
    samples: rows of the table `samples` of one attempt at one point.
    """
    timed = samples[~samples["is_warmup"].astype(bool)]
    by_rank = timed.groupby("rank")["step_ns"]
    return pd.DataFrame(
        {
            "iterations": by_rank.count(),
            "median_ms": by_rank.median() / _NS_PER_MS,
            "min_ms": by_rank.min() / _NS_PER_MS,
            "max_ms": by_rank.max() / _NS_PER_MS,
            "data_ms": timed.groupby("rank")["data_ns"].median().astype("float64") / _NS_PER_MS,
        }
    ).reset_index()


def slowest_modules(modules: pd.DataFrame) -> pd.DataFrame:
    """Return the longest times of each module over the ranks, in ms, the longest in all first.

    modules: rows of the table `modules` of one attempt at one point. Columns: module, kind, calls,
    forward_ms, backward_ms (null without a backward); each is the largest of any rank.
    """
    by_module = modules.groupby(["module", "kind"], sort=False)
    longest = by_module[["calls", "forward_ms", "backward_ms"]].max().reset_index()
    total = longest["forward_ms"] + longest["backward_ms"].fillna(0.0)
    order = total.sort_values(ascending=False, kind="stable").index
    return longest.loc[order].reset_index(drop=True)


@dataclass(frozen=True, kw_only=True)
class SlowestRegion:
    """A region of the step on the rank where it takes longest. share_pct: of the step."""

    region: str
    calls: int | None
    region_ms: float
    share_pct: float | None


def slowest_regions(regions: Sequence[RegionRow]) -> list[SlowestRegion]:
    """Return the longest time of each region over the ranks, in ms, in the order of the step.

    regions: of one attempt at one point; of none an empty list.
    """
    longest: dict[str, RegionRow] = {}
    for one in regions:
        if one.region not in longest or one.region_ms > longest[one.region].region_ms:
            longest[one.region] = one
    return [
        SlowestRegion(
            region=one.region, calls=one.calls, region_ms=one.region_ms, share_pct=one.share_pct
        )
        for one in longest.values()
    ]


def regions_by_point(regions: Sequence[RegionRow]) -> dict[str, list[SlowestRegion]]:
    """Return point_id -> the regions of its last attempt, as `slowest_regions` has them.

    regions: of one run. A point without regions is not in it.
    """
    last: dict[str, int] = {}
    for one in regions:
        last[one.point_id] = max(one.attempt, last.get(one.point_id, 0))
    return {
        point_id: slowest_regions(
            [one for one in regions if (one.point_id, one.attempt) == (point_id, attempt)]
        )
        for point_id, attempt in last.items()
    }


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
    """Return the ranks to show, in order: all of up to 8, else rank 0, quickest, slowest."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    quickest, slowest = (pick(ranks, key=lambda one: one.own_ms) for pick in (min, max))
    chosen = {one.rank: one for one in (ranks[0], quickest, slowest)}
    return [chosen[rank] for rank in sorted(chosen)]
