"""Which points of both sides belong together, and what their pairs are."""

import math
from datetime import UTC, datetime

import pytest

from raybench.ab.plan import Side
from raybench.ab.starts import PairedStarts, Start
from raybench.records.status import RunStatus, Status
from raybench.results.point_row import PointRow
from raybench.results.tables import Run


def row(point_id, step_ms=10.0, status=Status.OK, throughput=None, **params):
    return PointRow(
        run_id="r",
        point_id=point_id,
        attempt=1,
        status=status,
        started_at=datetime.now(UTC),
        workload="mlp",
        params=params,
        step_ms_mean=step_ms,
        throughput=throughput,
    )


def start(side, pair, *rows):
    now = datetime.now(UTC)
    run = Run(
        run_id=f"{side}-{pair}",
        job_name="ci",
        job_text="",
        job_sha256="",
        argv=(),
        status=RunStatus.OK,
        started_at=now,
        finished_at=now,
        points_total=len(rows),
        cluster="",
        host="",
    )
    return Start(side=Side(side), pair=pair, run=run, rows={row.point_id: row for row in rows})


def ids(pairs):
    return [dict(point.ids) for point in pairs.points]


def test_same_ids_are_the_same_point():
    pairs = PairedStarts(starts=[start("old", 1, row("a"), row("b")), start("new", 1, row("b"))])
    assert ids(pairs) == [{"old": "b", "new": "b"}, {"old": "a"}]


def test_setting_of_one_side_keeps_points_together():
    old = [row(f"old{n}", n=n, compile="false") for n in ("1", "2")]
    new = [row(f"new{n}", n=n, compile="true") for n in ("2", "1")]
    pairs = PairedStarts(starts=[start("old", 1, *old), start("new", 1, *new)])
    assert ids(pairs) == [{"old": "old2", "new": "new2"}, {"old": "old1", "new": "new1"}]


def test_axis_of_one_side_leaves_points_alone():
    old = [row("old1", n="1")]
    new = [row("new1", n="1", mode="x"), row("new2", n="1", mode="y")]
    pairs = PairedStarts(starts=[start("old", 1, *old), start("new", 1, *new)])
    assert [len(point) for point in ids(pairs)] == [1, 1, 1]


def test_ratio_is_that_of_rates():
    old, new = row("a", step_ms=10.0), row("a", step_ms=12.5)
    pairs = PairedStarts(starts=[start("old", 1, old), start("new", 1, new)])
    assert pairs.log_ratios.tolist() == [[pytest.approx(math.log(0.8))]]
    old, new = row("a", throughput=100.0), row("a", throughput=90.0)
    pairs = PairedStarts(starts=[start("old", 1, old), start("new", 1, new)])
    assert pairs.log_ratios.tolist() == [[pytest.approx(math.log(0.9))]]


def test_incomplete_pairs_have_no_ratio():
    failed = row("a", status=Status.ERROR)
    starts = [
        start("old", 1, row("a")),
        start("new", 1, failed),
        start("new", 2, row("a")),
        start("old", 2, row("a")),
        start("old", 3, row("a")),
    ]
    pairs = PairedStarts(starts=starts)
    assert pairs.log_ratios.shape == (1, 2)
    assert math.isnan(pairs.log_ratios[0, 0])
    [point] = pairs.points
    assert pairs.can_be_measured(point)
    assert len(pairs.failures(point, Side.NEW)) == 1


def test_point_that_failed_twice_is_not_measured_again():
    failed = row("a", status=Status.OOM)
    starts = [start("old", 1, failed), start("new", 1, row("a"))]
    starts += [start("old", 2, failed), start("new", 2, row("a"))]
    pairs = PairedStarts(starts=starts)
    assert not pairs.can_be_measured(pairs.points[0])
