"""The doubts about the points of a run, merged by kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from raybench.analysis.rounds import LARGEST_DRIFT, Trials
from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import Doubt, DoubtKind, NotComparedKind

# These doubts concern only numbers that are divided by the baseline's.
OF_RATIOS = frozenset(
    {
        DoubtKind.OTHER_CLOCKS,
        DoubtKind.OTHER_KERNELS,
        DoubtKind.DRIFT,
    }
)
# These doubts concern the memory of a point.
OF_MEMORY = frozenset(
    {
        DoubtKind.OTHER_PRECISION,
        DoubtKind.EMULATED_PRECISION,
        DoubtKind.MISSING_RANKS,
        DoubtKind.ALLOCATOR_RETRIES,
        DoubtKind.ROUND_FAILED,
        DoubtKind.LEFT_BEHIND,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtGroup:
    """A doubt that several points have."""

    # How many points, or controls.
    count: int
    worst: Doubt
    # The point that has the worst; None for controls.
    row: ScaledRow | None
    # All subjects, where `DoubtKind.is_one_for_all`.
    subjects: tuple[str, ...] = ()


def merge_doubts(rows: Iterable[ScaledRow]) -> tuple[DoubtGroup, ...]:
    """Return the doubts of points, merged: the most harmful first, then the most frequent.

    Doubts of one kind and subject are one group; of kinds that are `is_one_for_all`, all subjects.
    """
    members: dict[tuple[DoubtKind, str], list[tuple[Doubt, ScaledRow]]] = {}
    for row in rows:
        for doubt in _told(row):
            subject = "" if doubt.kind.is_one_for_all else doubt.subject
            members.setdefault((doubt.kind, subject), []).append((doubt, row))
    groups = []
    for (kind, _), doubts in members.items():
        worst, row = max(doubts, key=lambda pair: pair[0].excess)
        subjects = dict.fromkeys(doubt.subject for doubt, _ in doubts)
        groups.append(
            DoubtGroup(
                count=len({of_point.point_id for _, of_point in doubts}),
                worst=worst,
                row=row,
                subjects=tuple(subjects) if kind.is_one_for_all else (),
            )
        )
    return tuple(sorted(groups, key=_harm_order))


def _harm_order(group: DoubtGroup) -> tuple[int, int]:
    """Return a sort key: the most harmful first, then the most frequent."""
    return group.worst.kind.harm, -group.count


def _told(row: ScaledRow) -> Iterator[Doubt]:
    """Yield the doubts of a point, without duplicates of other messages."""
    told_elsewhere = {DoubtKind.BASE_UNSTEADY}
    if row.why is not None and row.why.kind is NotComparedKind.NO_THROUGHPUT:
        told_elsewhere.add(DoubtKind.NO_THROUGHPUT)
    if row.throughput is None:
        # No table shows the parts of steps that finish no items.
        told_elsewhere.add(DoubtKind.NO_BREAKDOWN)
    for doubt in row.doubts or ():
        if doubt.kind not in told_elsewhere:
            yield doubt


def doubts_of_run(rows: Iterable[ScaledRow], trials: Trials) -> tuple[DoubtGroup, ...]:
    """Return the doubts about a run and its points, the most harmful first."""
    return tuple(sorted([*_drifts(trials), *merge_doubts(rows)], key=_harm_order))


def _drifts(trials: Trials) -> Sequence[DoubtGroup]:
    """Return the doubt about all controls of a run that moved; [] where none has.

    Round and block of the control that moved most are its subject.
    """
    moved = list(trials.drifts())
    if not moved:
        return []
    number, block, drift = max(moved, key=lambda one: abs(one[2]))
    worst = Doubt(
        kind=DoubtKind.DRIFT,
        value=drift,
        limit=LARGEST_DRIFT,
        subject=f"round {number} with {block}",
    )
    return [DoubtGroup(count=len(moved), worst=worst, row=None)]


# Doubts by which no time of a run is reliable where so large a share of its points has them.
_BUSY = (DoubtKind.BUSY_CORES, DoubtKind.NOT_ALONE)
_MOST_BUSY = 0.5


def busy_group(groups: Iterable[DoubtGroup], points: int) -> DoubtGroup | None:
    """Return the doubt that other work ran beside half of the points or more; None without it."""
    busy = (group for group in groups if group.worst.kind in _BUSY)
    return next((group for group in busy if group.count >= _MOST_BUSY * points), None)
