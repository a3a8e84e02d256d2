"""What to do with slow devices: each way to share the work over their speed, and the best one."""

from __future__ import annotations

from raybench.analysis.rows import varying
from raybench.analysis.uneven import gain_over
from raybench.job.point import EQUAL
from raybench.report import formatting
from raybench.report.charts import Chart, ChartData
from raybench.report.charts.grammar import (
    Figure,
    HeatLayout,
    Keys,
    LineLayout,
    Mark,
    axis,
    by_series,
    heat_panel,
    line_panel,
    names_axis,
)
from raybench.report.point_settings import settings_words


def uneven_figure(data: ChartData) -> Figure | None:
    """Return samples/s over the probed speed of slow devices, a line for each way to share.

    The fleets of a panel have the same number of slow devices and differ only in `slow_ratio` or
    `devices`. The last panel maps speed and number of slow devices to the best way. None if all
    fleets have the same `slow_ratio`.
    """
    fleets = data.answer.data.fleets
    if len({fleet.first.slow_ratio for fleet in fleets}) < 2:  # probed speeds differ by noise
        return None
    alike = ("world_size", "devices", "shares", "slow_ratio", "slow_count")
    apart = varying([fleet.first for fleet in fleets], alike)
    shares = list(dict.fromkeys(name for fleet in fleets for name in fleet.scenarios))
    marks: dict[str, list[Mark]] = {}
    cells: list[Mark] = []
    ratios: dict[str, float] = {}
    for fleet in fleets:
        there_are = formatting.ranks_words(int(fleet.first.world_size), data.ranks)
        more = "".join(f", {settings_words(fleet.first, [name], data.ranks)}" for name in apart)
        group, speed = f"{fleet.slow_count} of {there_are} slow", f"{fleet.probe_ratio:.0%}{more}"
        ratios.setdefault(speed, fleet.probe_ratio)
        for name, scenario in fleet.scenarios.items():
            value, half = scenario.throughput, scenario.half_width or 0.0
            tip = f"{name}, slow devices at {speed}\npoint {scenario.row.point_id}\n"
            tip += f"{formatting.number(value)} {data.rate}, {formatting.step_time(scenario.row)}"
            mark = {"x": fleet.probe_ratio, "y": value, "line": name, "tip": tip}
            ends = {"low": value * (1 - half), "high": value * (1 + half)} if half else {}
            marks.setdefault(group + more, []).append(mark | ends)
        best, text = fleet.best, fleet.best.shares
        if EQUAL in fleet.scenarios and best.shares != EQUAL:
            text += f" {gain_over(best, fleet.scenarios[EQUAL]).gain:+.0%}"
        text += "".join(f" or {name}" for name in fleet.as_good())
        tip = f"{group}, at a speed of {speed}\nfastest: {text}"
        cells.append({"x": group, "y": speed, "line": best.shares, "text": text, "tip": tip})
    layout = LineLayout(
        x=axis("speed of the slow devices", format="~%", scale={"zero": False, "padding": 14}),
        y=axis(data.rate, format="~s"),
    )
    panels = [
        line_panel(members, shares, layout, title=f"{data.rate.capitalize()} with {group}")
        for group, members in marks.items()
    ]
    groups = list(dict.fromkeys(cell["x"] for cell in cells))
    speeds = sorted(ratios, key=lambda speed: -ratios[speed])
    best_way = HeatLayout(
        x=names_axis(groups, orient="top", labelAngle=0),
        y=names_axis(speeds) | {"title": "speed"},
        color=by_series(shares, "color", keys=Keys(symbol="square")),
        height=max(80, 34 * len(speeds)),
        inverse="true",
    )
    panels.append(heat_panel(cells, best_way, "Fastest way, and its gain over equal shares"))
    return Figure(
        anchor="uneven-speeds",
        title="Ways to share the work, by the speed of the slow devices",
        note="Probes measured the speeds, in % of a fast device. Thin bars show 95 % intervals. "
        "The map names the fastest way, its gain compared with equal shares, and the ways that "
        "may be as good.",
        panels=panels,
    )


CHARTS = (Chart(draw=uneven_figure, position=5, answers=5),)
