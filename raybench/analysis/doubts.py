"""The doubts about the points of a run, merged by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from raybench.analysis.rounds import LARGEST_DRIFT, Trials
from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import Doubt, DoubtKind, NotComparedKind

# Doubts that concern only ratios to the baseline.
RATIO_DOUBTS = frozenset(
    {
        DoubtKind.OTHER_CLOCKS,
        DoubtKind.OTHER_KERNELS,
        DoubtKind.DRIFT,
    }
)
# Doubts that concern the memory of a point.
MEMORY_DOUBTS = frozenset(
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

    # Number of points that have the doubt; for DRIFT the number of controls.
    count: int
    worst: Doubt
    # The point with the worst doubt; None for DRIFT.
    row: ScaledRow | None
    # All subjects, if the kind merges all subjects (`merges_subjects`).
    subjects: tuple[str, ...] = ()


def merge_doubts(rows: Iterable[ScaledRow]) -> tuple[DoubtGroup, ...]:
    """Merge the doubts of points by kind and subject, the most harmful and frequent first.

    Some kinds (`merges_subjects`) are merged over all subjects.
    """
    doubts_by_group: dict[tuple[DoubtKind, str], list[tuple[Doubt, ScaledRow]]] = {}
    for row in rows:
        for doubt in _shown_doubts(row):
            subject = "" if doubt.kind.merges_subjects else doubt.subject
            doubts_by_group.setdefault((doubt.kind, subject), []).append((doubt, row))
    groups = []
    for (kind, _), doubts in doubts_by_group.items():
        worst, row_of_worst = max(doubts, key=lambda pair: pair[0].excess)
        subjects = dict.fromkeys(doubt.subject for doubt, _ in doubts)
        groups.append(
            DoubtGroup(
                count=len({row.point_id for _, row in doubts}),
                worst=worst,
                row=row_of_worst,
                subjects=tuple(subjects) if kind.merges_subjects else (),
            )
        )
    return tuple(sorted(groups, key=_most_harmful_first))


def _most_harmful_first(group: DoubtGroup) -> tuple[int, int]:
    # Kinds with a smaller `harm` are more harmful.
    return group.worst.kind.harm, -group.count


def _shown_doubts(row: ScaledRow) -> Iterator[Doubt]:
    """Yield the doubts of a point, without doubts that say nothing new in a report."""
    # The baseline point has the doubt UNSTEADY itself.
    hidden_kinds = {DoubtKind.BASE_UNSTEADY}
    if row.why is not None and row.why.kind is NotComparedKind.NO_THROUGHPUT:
        hidden_kinds.add(DoubtKind.NO_THROUGHPUT)
    if row.throughput is None:
        # No table shows the parts of such steps.
        hidden_kinds.add(DoubtKind.NO_BREAKDOWN)
    if any(doubt.kind is DoubtKind.SCRIPT_ENDED for doubt in row.doubts or ()):
        # The end of the script, and no time limit, ended the timing.
        hidden_kinds |= {DoubtKind.SHORT, DoubtKind.FEW_SAMPLES}
    for doubt in row.doubts or ():
        if doubt.kind not in hidden_kinds:
            yield doubt


def doubts_of_run(rows: Iterable[ScaledRow], trials: Trials) -> tuple[DoubtGroup, ...]:
    """Return the doubts about a run and its points, the most harmful first."""
    groups = [*_drift_of_controls(trials), *merge_doubts(rows)]
    return tuple(sorted(groups, key=_most_harmful_first))


def _drift_of_controls(trials: Trials) -> Sequence[DoubtGroup]:
    """Return one doubt about all controls that drifted; [] if no control drifted.

    A control is the baseline point, repeated at the end of a block of points.
    """
    drifts = list(trials.drifts())
    if not drifts:
        return []
    largest = max(drifts, key=lambda drift: abs(drift.change))
    worst = Doubt(
        kind=DoubtKind.DRIFT,
        value=largest.change,
        limit=LARGEST_DRIFT,
        subject=f"round {largest.round} with {largest.world_size}",
    )
    return [DoubtGroup(count=len(drifts), worst=worst, row=None)]


# Doubts that other work ran beside a point.
_OTHER_WORK = (DoubtKind.BUSY_CORES, DoubtKind.NOT_ALONE)
# If half of the points have such a doubt, no time of the run is reliable.
_BUSY_SHARE = 0.5


def busy_group(groups: Iterable[DoubtGroup], points: int) -> DoubtGroup | None:
    """Return the doubt that other work ran beside at least half of the points; None without it."""
    for group in groups:
        if group.worst.kind in _OTHER_WORK and group.count >= _BUSY_SHARE * points:
            return group
    return None
