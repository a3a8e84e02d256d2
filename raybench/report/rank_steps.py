"""What each rank does in a step, and what a clock of the host says of it, to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raybench.analysis.ranks import (
    MOST_RANKS,
    RankStep,
    WallClock,
    ranks_of_step,
    telling_ranks,
    wall_clock,
)
from raybench.analysis.settings import varying
from raybench.report import formatting
from raybench.results.point_row import PointRow

Row = PointRow

# By its clock alone scripts usually time.
FIRST_RANK = "0*"
COLUMNS = ("rank", "computes", "idle", "waits", "exchange")
MEANING = (
    "Ranks: computes, idle, waits and exchange add up to the step on each. Waits: for the slowest "
    "rank. Exchange: the step beyond the slowest rank's own. *: the rank whose clock scripts "
    "usually read."
)
WALL_COLUMNS = ("not waited", "waited")
WALL_MEANING = (
    "Not waited, waited: what time.time() says of one step that begins on an idle device, until it "
    "is issued, and until the device is done."
)
WALL_TITLE = "What time.time() on rank 0 says of a step"


def rank_name(rank: int) -> str:
    """Write the number of a rank; the first one is marked."""
    return str(rank) if rank else FIRST_RANK


def rank_cells(one: RankStep, unit: formatting.Unit) -> list[str]:
    """Write the cells of COLUMNS."""
    times = (one.computes_ms, one.idle_ms, one.waits_ms, one.exchange_ms)
    return [
        rank_name(one.rank),
        *("" if ms is None else formatting.part(ms, unit) for ms in times),
    ]


def rank_lines(row: Row, unit: formatting.Unit) -> list[list[str]]:
    """Write the cells of the ranks that tell most of a point; none where nobody knows."""
    return [rank_cells(one, unit) for one in telling_ranks(ranks_of_step(row))]


def ranks_of_point(row: Row, unit: formatting.Unit) -> tuple[list[str], list[list[str]], list[str]]:
    """Write heads, lines and legend of a table of one point's ranks; no lines where none is known.

    row: of the table `points`.
    """
    parts = {one.rank: rank_cells(one, unit) for one in telling_ranks(ranks_of_step(row))}
    clocks = _clock_cells(row, unit)
    shown = sorted(parts) or sorted(clocks)[:MOST_RANKS]
    lines = [
        [*parts.get(rank, [rank_name(rank)]), *(clocks[rank] if clocks else ())] for rank in shown
    ]
    heads = [*(COLUMNS if parts else COLUMNS[:1]), *(WALL_COLUMNS if clocks else ())]
    return heads, lines, [MEANING] * bool(parts) + [WALL_MEANING] * bool(clocks)


def _clock_cells(row: Row, unit: formatting.Unit) -> dict[int, list[str]]:
    """Write the cells of WALL_COLUMNS by rank; empty where the host's clocks are not known."""
    known = [row[f"wall_{name}_ms_by_rank"] for name in ("unsynced", "synced")]
    if not all(formatting.has_entries(times) for times in known):
        return {}
    return {
        rank: [formatting.part(ms, unit) for ms in times]
        for rank, times in enumerate(zip(*known, strict=True))
    }


def wall_clock_lines(rows: Sequence[Row], ranks: str) -> tuple[tuple[str, str], ...]:
    """List (how it is used, the step by that clock over the measured one, from least to most)."""
    timed = [(row, wall) for row in rows if row["status"] == "ok" and (wall := wall_clock(row))]
    if not timed:
        return ()
    names = varying([row for row, _ in timed], always=("world_size",))
    ways: tuple[tuple[str, Callable[[WallClock], float]], ...] = (
        ("not waited for", lambda wall: wall.unsynced_ms / wall.step_ms),
        ("waited for in each step", lambda wall: wall.synced_ms / wall.step_ms),
    )
    return tuple((way, _range(timed, share, names, ranks)) for way, share in ways)


def _range(
    timed: Sequence[tuple[Row, WallClock]],
    share: Callable[[WallClock], float],
    names: Sequence[str],
    ranks: str,
) -> str:
    ordered = sorted(timed, key=lambda one: share(one[1]))
    ends = ordered if len(ordered) == 1 else (ordered[0], ordered[-1])
    return " to ".join(
        f"{formatting.ratio(share(wall))}x ({formatting.settings_words(row, names, ranks)})"
        for row, wall in ends
    )
