"""Step times as bars: the picture of a run that has no other."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.report import formatting
from raybench.report.charts.bars import MOST_BARS, bar_panels, first_of
from raybench.report.charts.figure import TOLD, Figure, Spec, Value
from raybench.report.charts.series import Row, in_order, is_other
from raybench.report.summary import Summary


def times_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where no point has a step time."""
    known = [row for row in rows if formatting.has_value(row["step_ms_p50"]) and not is_other(row)]
    known = [row for row in known if row["status"] == "ok"]
    if not known:
        return None
    shown = in_order(known, ("batch", "world_size"))[:MOST_BARS]
    return Figure(
        anchor="times",
        title="Step time",
        note="Median over iterations of the slowest rank's time."
        + first_of(len(shown), len(known)),
        legend=[],
        panels=bar_panels(shown, summary.ranks, _values, _layers),
    )


def _values(row: Row) -> list[Value]:
    return [{"x": float(row["step_ms_p50"]), "tip": formatting.step_time(row)}]


def _layers(y: Spec, _: Sequence[Value]) -> list[Spec]:
    x: Spec = {"field": "x", "type": "quantitative", "title": "ms", "axis": {"tickCount": 5}}
    return [
        {
            "mark": {"type": "bar", "color": "var(--s1)"},
            "encoding": {"x": x, "y": y, "description": TOLD},
        }
    ]
