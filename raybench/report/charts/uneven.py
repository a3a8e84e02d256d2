"""Ways to share the work over the speed of slow devices, and the fastest way."""

from __future__ import annotations

from raybench.analysis.rows import varying
from raybench.analysis.uneven import UnevenFleet, gain_over
from raybench.job.point import EQUAL
from raybench.report import formatting
from raybench.report.charts import Chart, ChartData
from raybench.report.charts.grammar import (
    Figure,
    HeatLayout,
    LegendLayout,
    LineLayout,
    Mark,
    axis,
    by_series,
    heat_panel,
    line_panel,
    names_axis,
)
from raybench.report.point_settings import settings_words

# Settings in which the fleets of a panel may differ.
_SETTINGS_OF_A_PANEL = ("world_size", "devices", "shares", "slow_ratio", "slow_count")


def uneven_figure(data: ChartData) -> Figure | None:
    """Return samples/s over the speed of slow devices, a line for each way to share, and a map.

    The fleets of a panel have the same number of slow devices. The map shows the fastest way for
    each speed and number. None if all fleets have the same `slow_ratio`.
    """
    fleets = data.answer.data.fleets
    if len({fleet.first.slow_ratio for fleet in fleets}) < 2:  # probed speeds differ by noise
        return None
    names = varying([fleet.first for fleet in fleets], left_out=_SETTINGS_OF_A_PANEL)
    # Ways to share the work; a scenario is the point of one way.
    ways = list(dict.fromkeys(way for fleet in fleets for way in fleet.scenarios))
    marks_of_panel: dict[str, list[Mark]] = {}
    cells: list[Mark] = []
    ratio_of_speed: dict[str, float] = {}  # words of a speed -> speed
    for fleet in fleets:
        devices = formatting.ranks_words(int(fleet.first.world_size), data.ranks)
        # The column of the map.
        slow = f"{fleet.slow_count} of {devices} slow"
        settings = ""
        for name in names:
            settings += f", {settings_words(fleet.first, [name], data.ranks)}"
        # The row of the map.
        speed = f"{fleet.probe_ratio:.0%}{settings}"
        ratio_of_speed.setdefault(speed, fleet.probe_ratio)
        marks_of_panel.setdefault(slow + settings, []).extend(_marks(fleet, speed, data.rate))
        cells.append(_cell(fleet, slow, speed))
    layout = LineLayout(
        x=axis("speed of the slow devices", format="~%", scale={"zero": False, "padding": 14}),
        y=axis(data.rate, format="~s"),
    )
    panels = [
        line_panel(marks, ways, layout, title=f"{data.rate.capitalize()} with {slow_and_settings}")
        for slow_and_settings, marks in marks_of_panel.items()
    ]
    columns = list(dict.fromkeys(cell["x"] for cell in cells))
    # The highest speed comes first.
    speeds = sorted(ratio_of_speed, key=lambda speed: -ratio_of_speed[speed])
    map_layout = HeatLayout(
        x=names_axis(columns, orient="top", labelAngle=0),
        y=names_axis(speeds) | {"title": "speed"},
        color=by_series(ways, "color", layout=LegendLayout(symbol="square")),
        height=max(80, 34 * len(speeds)),
        inverse="true",
    )
    panels.append(heat_panel(cells, map_layout, "Fastest way, and its gain over equal shares"))
    return Figure(
        anchor="uneven-speeds",
        title="Ways to share the work, by the speed of the slow devices",
        note="Probes measured the speeds, in % of a fast device. Thin bars show 95 % intervals. "
        "The map names the fastest way, its gain compared with equal shares, and the ways that "
        "may be as good.",
        panels=panels,
    )


def _marks(fleet: UnevenFleet, speed: str, rate: str) -> list[Mark]:
    """Return a mark for each way to share the work.

    Args:
        speed: speed of the slow devices, in words.
        rate: unit of the throughput, such as `samples/s`.
    """
    marks = []
    for way, scenario in fleet.scenarios.items():
        throughput, half_width = scenario.throughput, scenario.half_width
        tip = f"{way}, slow devices at {speed}\npoint {scenario.row.point_id}\n"
        tip += f"{formatting.number(throughput)} {rate}, {formatting.step_time(scenario.row)}"
        mark: Mark = {"x": fleet.probe_ratio, "y": throughput, "line": way, "tip": tip}
        if half_width:  # as a share of the throughput
            mark["low"] = throughput * (1 - half_width)
            mark["high"] = throughput * (1 + half_width)
        marks.append(mark)
    return marks


def _cell(fleet: UnevenFleet, slow: str, speed: str) -> Mark:
    """Return the cell of the map: the fastest way, its gain, and ways that may be as good.

    Args:
        slow: column of the cell: number of slow devices, in words.
        speed: row of the cell: speed of the slow devices, in words.
    """
    best = fleet.best
    text = best.shares  # the name of the way
    if EQUAL in fleet.scenarios and best.shares != EQUAL:
        text += f" {gain_over(best, fleet.scenarios[EQUAL]).gain:+.0%}"
    text += "".join(f" or {name}" for name in fleet.tied_shares())
    tip = f"{slow}, at a speed of {speed}\nfastest: {text}"
    return {"x": slow, "y": speed, "line": best.shares, "text": text, "tip": tip}


CHARTS = (Chart(draw=uneven_figure, position=5, answer_order=5),)
