"""What to do with slow devices: each way to share the work over their speed, and the best one."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.uneven import Fleet, gain_over
from raybench.job.point import EQUAL
from raybench.report import formatting
from raybench.report.charts import Chart, ChartData
from raybench.report.charts.grammar import (
    Figure,
    Mark,
    Panel,
    axis,
    by_series,
    heat_panel,
    line_panel,
    names_axis,
)


def uneven_figure(data: ChartData) -> Figure | None:
    """Return lines of samples/s over the speed of the slow devices, one for each way to share.

    The last panel is a map of the best way. None where slow devices of fewer than two speeds were
    compared.
    """
    fleets = data.summary.fleets
    if len({fleet.probe_ratio for fleet in fleets}) < 2:
        return None
    shares = list(dict.fromkeys(name for fleet in fleets for name in fleet.scenarios))
    groups: dict[str, list[Fleet]] = {}
    for fleet in fleets:
        groups.setdefault(_group(fleet, data.ranks), []).append(fleet)
    panels = [
        line_panel(
            [mark for fleet in some for mark in _marks(fleet)],
            shares,
            axis("speed of the slow devices", format="~%", scale={"zero": False, "padding": 14}),
            axis("samples/s", format="~s"),
            title=f"Samples/s with {group}",
        )
        for group, some in groups.items()
    ]
    panels.append(_map(fleets, list(groups), shares, data.ranks))
    return Figure(
        anchor="uneven-speeds",
        title="Ways to share the work, over the speed of the slow devices",
        note="Speeds are those that the probes found, as a share of a fast device's. Thin bars: "
        "95 % intervals. The map names the fastest way, its gain over equal shares, and the ways "
        "that may be as good.",
        panels=panels,
    )


CHARTS = (Chart(draw=uneven_figure, place=5, answers=5),)


def _group(fleet: Fleet, ranks: str) -> str:
    """Return `1 of 4 GPUs slow`."""
    there_are = formatting.ranks_words(int(fleet.first.world_size), ranks)
    return f"{fleet.slow_count} of {there_are} slow"


def _marks(fleet: Fleet) -> list[Mark]:
    """Return a mark for each way to share the work of these devices, with intervals if known."""
    marks = []
    for name, scenario in fleet.scenarios.items():
        value, half = scenario.throughput, scenario.half_width
        step = formatting.step_time(scenario.row)
        tip = f"{name}, slow devices at {fleet.probe_ratio:.0%}\npoint {scenario.row.point_id}\n"
        tip += f"{formatting.number(value)} samples/s, {step}"
        ends = {"low": value * (1 - half), "high": value * (1 + half)} if half else {}
        marks.append({"x": fleet.probe_ratio, "y": value, "line": name, "tip": tip, **ends})
    return marks


def _map(fleets: Sequence[Fleet], groups: list[str], shares: list[str], ranks: str) -> Panel:
    """Return a map of the best way to share, by the speed of the slow devices and their number."""
    cells = []
    for fleet in fleets:
        best, text = fleet.best, fleet.best.shares
        if EQUAL in fleet.scenarios and best.shares != EQUAL:
            text += f" {gain_over(best, fleet.scenarios[EQUAL]).gain:+.0%}"
        rivals = "".join(f" or {name}" for name in fleet.as_good())
        speed, group = f"{fleet.probe_ratio:.0%}", _group(fleet, ranks)
        tip = f"{group}, at {speed} of the speed\nbest: {text}{rivals}"
        cell = {"x": group, "y": speed, "line": best.shares, "text": text + rivals, "tip": tip}
        cells.append(cell)
    speeds = sorted({cell["y"] for cell in cells}, key=lambda text: -float(text.rstrip("%")))
    return heat_panel(
        cells,
        names_axis(groups, orient="top", labelAngle=0),
        names_axis(speeds) | {"title": "speed"},
        by_series(shares, "color", symbol="square"),
        title="The best way",
        height=max(80, 34 * len(speeds)),
        inverse="true",
    )
