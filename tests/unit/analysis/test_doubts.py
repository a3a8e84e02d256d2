"""Doubts about several points are merged by kind and subject, with the worst of them."""

from collections import Counter

import pytest
from builders import make_row
from commands import EXAMPLES

from raybench.analysis.doubts import busy_group, doubts_of_run, merge_doubts
from raybench.analysis.rounds import Trials
from raybench.analysis.rows import ScaledRow
from raybench.analysis.run_data import load_run_data
from raybench.records.doubts import (
    Doubt,
    DoubtKind,
    Harm,
    NotCompared,
    NotComparedKind,
    worst_of_each,
)
from raybench.report.messages import marks

RUNS = sorted(path.name for path in (EXAMPLES / "points").iterdir())


def rows_of(*doubts_of_points, **changes):
    """Points p0, p1, ... with these doubts."""
    return [
        ScaledRow(**{**vars(make_row(point_id=f"p{place}", doubts=doubts)), **changes})
        for place, doubts in enumerate(doubts_of_points)
    ]


def bound(share):
    return (Doubt(kind=DoubtKind.HOST_BOUND, value=share, limit=0.05),)


def test_doubt_is_reported_once_with_worst_point():
    (group,) = merge_doubts(rows_of(bound(0.1), bound(0.4), (), None, bound(0.2)))
    assert (group.count, group.worst.value, group.row.point_id) == (3, 0.4, "p1")
    assert group.subjects == ()


def test_worst_is_farthest_from_the_limit():
    def timed(seconds):
        return (Doubt(kind=DoubtKind.SHORT, value=seconds, limit=3.0),)

    (group,) = merge_doubts(rows_of(timed(2.0), timed(0.5), timed(1.0)))
    assert (group.worst.value, group.row.point_id) == (0.5, "p1")


def test_no_time_limit_beside_an_ended_script():
    short = Doubt(kind=DoubtKind.SHORT, value=0.02, limit=1.0)
    ended = Doubt(kind=DoubtKind.SCRIPT_ENDED, value=10.0, limit=9.0)
    (group,) = merge_doubts(rows_of((short, ended)))
    assert group.worst == ended


def test_other_subjects_are_other_groups():
    slow = [(Doubt(kind=DoubtKind.SLOW_RANK, value=0.1, subject=f"rank {n}"),) for n in (1, 2, 1)]
    first, second = merge_doubts(rows_of(*slow))
    assert (first.count, first.worst.subject) == (2, "rank 1")
    assert (second.count, second.worst.subject) == (1, "rank 2")


def test_some_kinds_are_one_for_all_subjects():
    beside = [Doubt(kind=DoubtKind.NOT_ALONE, subject=f"run {name}") for name in "abc"]
    (group,) = merge_doubts(rows_of(beside[:2], beside[1:]))
    assert group.count == 2, "points, not doubts"
    assert group.subjects == ("run a", "run b", "run c")


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ((DoubtKind.UNSTEADY, DoubtKind.WIDE), {DoubtKind.UNSTEADY, DoubtKind.WIDE}),
        (
            (DoubtKind.TOO_FEW_STEPS, DoubtKind.WIDE),
            {DoubtKind.TOO_FEW_STEPS, DoubtKind.WIDE},
        ),
        # The baseline point tells that itself.
        ((DoubtKind.UNSTEADY, DoubtKind.BASE_UNSTEADY), {DoubtKind.UNSTEADY}),
    ],
)
def test_only_the_doubt_about_the_baseline_is_hidden(kinds, told):
    groups = merge_doubts(rows_of([Doubt(kind=kind) for kind in kinds]))
    assert {group.worst.kind for group in groups} == told


def test_reason_for_no_comparison_is_not_a_doubt():
    silent = [Doubt(kind=DoubtKind.NO_THROUGHPUT)]
    why = NotCompared(kind=NotComparedKind.NO_THROUGHPUT)
    assert merge_doubts(rows_of(silent, why=why)) == ()
    assert len(merge_doubts(rows_of(silent))) == 1


def test_doubts_are_sorted_by_harm_then_frequency():
    kinds = [DoubtKind.QUICK, DoubtKind.WIDE, DoubtKind.HOST_BOUND, DoubtKind.IMPOSSIBLE]
    doubts = [Doubt(kind=kind, value=1.0) for kind in kinds]
    groups = merge_doubts(rows_of(doubts, doubts[1:2]))
    told = [group.worst.kind for group in groups]
    assert told == [DoubtKind.IMPOSSIBLE, DoubtKind.HOST_BOUND, DoubtKind.WIDE, DoubtKind.QUICK]
    assert min(Harm) is Harm.WRONG


def control(step_ms, number, **changes):
    """A point of 2 devices, or its control, which takes as long as it does if nothing drifts."""
    known = {"step_ms_p50": step_ms, "step_ms_mean": step_ms, "throughput": 64e3 / step_ms}
    return make_row(point_id="two", world_size=1, round=number, **known, **changes)


def test_drifted_controls_are_grouped_under_the_worst():
    rows = []
    for number, moved_ms in enumerate((10.05, 9.0, 10.4), 1):
        rows.append(control(10.0, number, attempt=number))
        rows.append(control(moved_ms, number, attempt=10 + number, control_of=2))
    (group,) = doubts_of_run([], Trials(rows))
    assert (group.count, group.row) == (2, None)
    assert (group.worst.kind, group.worst.subject) == (DoubtKind.DRIFT, "round 2 with 2")
    assert group.worst.value == pytest.approx(-0.1)
    assert doubts_of_run([], Trials(rows[:2])) == ()


def test_worst_doubt_of_each_subject_is_kept():
    of_ranks = [
        Doubt(kind=DoubtKind.OTHER_GRADIENTS, value=0.1, limit=0.01),
        Doubt(kind=DoubtKind.LEFT_BEHIND, subject="1 file"),
        Doubt(kind=DoubtKind.OTHER_GRADIENTS, value=0.3, limit=0.01),
        Doubt(kind=DoubtKind.LEFT_BEHIND, subject="1 thread"),
    ]
    assert worst_of_each(of_ranks) == (of_ranks[2], of_ranks[1], of_ranks[3])


@pytest.mark.parametrize("run", [run for run in RUNS if not run.startswith("health")])
def test_doubts_count_the_points_with_their_mark(run):
    data = load_run_data(EXAMPLES, run)
    marked = Counter(letter for row in data.rows for letter in marks(row))
    told = Counter[str]()
    for group in data.doubts:
        told[group.worst.kind.mark] += group.count
    del told[""]
    assert told == marked


@pytest.mark.parametrize("kind", [DoubtKind.BUSY_CORES, DoubtKind.NOT_ALONE])
@pytest.mark.parametrize(("busy", "is_told"), [(1, False), (2, True), (4, True)])
def test_half_of_the_points_make_a_machine_busy(kind, busy, is_told):
    doubts = [[Doubt(kind=kind, value=1.5, limit=2.0)]] * busy + [[]] * (4 - busy)
    groups = merge_doubts(rows_of(*doubts))
    assert (busy_group(groups, 4) is not None) == is_told


def test_no_other_doubt_makes_a_machine_busy():
    kinds = {*DoubtKind} - {DoubtKind.BUSY_CORES, DoubtKind.NOT_ALONE}
    groups = merge_doubts(rows_of([Doubt(kind=kind, value=1.0) for kind in kinds]))
    assert groups
    assert busy_group(groups, 1) is None
