"""What `raybench history` draws and says of its steps."""

from __future__ import annotations

from datetime import timedelta

import pytest
from builders import START, make_row

from raybench.analysis.environment_changes import Change
from raybench.analysis.history import history
from raybench.report.charts.history import history_figure
from raybench.report.comparison import before_and_now


def runs(points, count=6, apart=timedelta(days=1)):
    """Step times of `points` points; the last one is slower from the fourth run on."""
    rows = [
        make_row(
            run_id=f"run{run}",
            point_id=f"p{point}",
            started_at=START + run * apart,
            params={"hidden": str(point)},
            **{"workload": "mlp", "scaling": "weak", "precision": "bf16", "batch_size": 1},
            **{"device_type": "cuda", "device_name": "H200", "node_count": 1},
            step_ms_p50=8.0 * (1.1 if point == points - 1 and run >= 3 else 1.0),
            **{"step_ms_ci_low": 7.99, "step_ms_ci_high": 8.01},
        )
        for run in range(count)
        for point in range(points)
    ]
    return history(rows)


def test_up_to_seven_points_share_a_panel_and_more_have_one_each():
    few = history_figure(runs(7))
    assert len(few.panels) == 1
    many = history_figure(runs(12))
    assert len(many.panels) == 12
    assert many.panels[0].title == "hidden=11"


@pytest.mark.parametrize(
    ("base", "new"),
    [
        ("a" * 40, "a" * 40 + "+changes"),
        ("GPU-4e6e0602-4757-def4", "GPU-4e6e0602-4757-abcd"),
        ("x" * 100 + "1" + "y" * 50, "x" * 100 + "2" + "y" * 50),
    ],
)
def test_values_are_shortened_so_that_their_difference_is_seen(base, new):
    before, now = before_and_now(Change(name="fact", base=base, new=new), 20).split(" -> ")
    assert before != now
    assert max(len(before), len(now)) <= 20
    assert before_and_now(Change(name="fact", base="580.1", new="590.2"), 20) == "580.1 -> 590.2"
