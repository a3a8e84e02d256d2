"""What to do with slow devices: each way to share the work, over their speed."""

from __future__ import annotations

from raybench.analysis.uneven import Fleet
from raybench.report import formatting
from raybench.report.charts.data import ChartData
from raybench.report.charts.grammar import (
    HEIGHT,
    Figure,
    Mark,
    Panel,
    axis,
    legend_height,
    line_chart,
)
from raybench.report.charts.registry import Chart


def uneven_figure(data: ChartData) -> Figure | None:
    """Return lines of samples/s over the speed of the slow devices, one for each way to share.

    None where slow devices of fewer than two speeds were compared.
    """
    fleets = data.summary.fleets
    if len({fleet.probe_ratio for fleet in fleets}) < 2:
        return None
    shares = list(dict.fromkeys(name for fleet in fleets for name in fleet.scenarios))
    groups: dict[str, list[Fleet]] = {}
    for fleet in fleets:
        groups.setdefault(_group(fleet, data.ranks), []).append(fleet)
    panels = [
        Panel(
            title=f"Samples/s with {group}",
            layers=line_chart(
                [mark for fleet in some for mark in _marks(fleet)],
                shares,
                axis(
                    "speed of the slow devices", format="~%", scale={"zero": False, "padding": 14}
                ),
                axis("samples/s", format="~s"),
            ),
            height=HEIGHT + legend_height(shares),
        )
        for group, some in groups.items()
    ]
    return Figure(
        anchor="uneven-speeds",
        title="Ways to share the work, over the speed of the slow devices",
        note="Speeds are those that the probes found, as a share of a fast device's. Thin bars: "
        "95 % intervals.",
        panels=panels,
    )


CHARTS = (Chart(draw=uneven_figure, place=5, answers=5),)


def _group(fleet: Fleet, ranks: str) -> str:
    there_are = formatting.ranks_words(int(fleet.first.world_size), ranks)
    return f"{fleet.slow_count} of {there_are} slow"


def _marks(fleet: Fleet) -> list[Mark]:
    marks = []
    for name, scenario in fleet.scenarios.items():
        value, half = scenario.throughput, scenario.half_width
        step = formatting.step_time(scenario.row)
        tip = f"{name}, slow devices at {fleet.probe_ratio:.0%}\npoint {scenario.row.point_id}\n"
        tip += f"{formatting.number(value)} samples/s, {step}"
        ends = {"low": value * (1 - half), "high": value * (1 + half)} if half else {}
        marks.append({"x": fleet.probe_ratio, "y": value, "line": name, "tip": tip, **ends})
    return marks
