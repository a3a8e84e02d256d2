"""Speed-up against ideal, and scaling efficiency, over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raybench.analysis.rows import ScaledRow
from raybench.report import formatting
from raybench.report.charts.chart import Chart, ChartData, line_figure
from raybench.report.charts.grammar import Figure, Mark, axis
from raybench.report.lead import speed_up_half_width

# Room for the numbers beside the last points.
_ROOM = 34


def speed_up_figure(data: ChartData) -> Figure | None:
    """Return the figure of speed-ups over ranks; None where the baseline has no world_size.

    None also where no line has two points, as for efficiencies.
    """
    base = data.summary.run.baseline.get("world_size")
    if base is None:
        return None
    of = formatting.ranks_words(int(base), data.ranks)
    sizes = _sizes(data)
    return _over_ranks(
        data,
        "speed_up",
        title=f"Speed-up over the number of {data.ranks}",
        note=f"Samples per second over those of the same settings on {of}. Both axes are "
        "logarithmic. Thin bars: 95 % intervals.",
        y=axis(f"times the samples/s of {of}", 2, format="~g"),
        ideal=[(size, size / float(base)) for size in sizes],
        number=lambda row: formatting.ratio(row.speed_up),
    )


def efficiency_figure(data: ChartData) -> Figure | None:
    """Return the figure of efficiencies over ranks; None where the baseline has no world_size.

    None also where no line has two points.
    """
    if "world_size" not in data.summary.run.baseline:
        return None
    return _over_ranks(
        data,
        "efficiency",
        title="Scaling efficiency",
        note=f"Speed-up over the ratio of {data.ranks}; 100 % is ideal.",
        y=axis("efficiency", format="~%"),
        ideal=[(size, 1.0) for size in _sizes(data)],
        number=lambda row: f"{row.efficiency:.0%}",
    )


CHARTS = (
    Chart(draw=speed_up_figure, place=20, answers=30, is_of_ratios=True),
    Chart(draw=efficiency_figure, place=30),
)


def speed_up_words(row: ScaledRow) -> str:
    """Return a speed-up as `1.47 ±1.8%`, with half of its 95 % interval where that is known.

    Empty where the point has no speed-up.
    """
    sure = speed_up_half_width(row)
    text = "" if sure is None or row.is_baseline else f" {formatting.half_width(sure)}"
    return formatting.ratio(row.speed_up) + text


def _sizes(data: ChartData) -> list[int]:
    """Return the numbers of ranks of all points with a speed-up, ascending."""
    known = [row for row in data.rows if row.speed_up is not None]
    return sorted({int(row.world_size) for row in known})


def _over_ranks(
    data: ChartData, name: str, *, number: Callable[[ScaledRow], str], **rest: Any
) -> Figure | None:
    """Return a `line_figure` of the column `name` over ranks; None without two points on a line.

    number: returns the text that stands at the end of a line. rest: further arguments of
    `line_figure`.
    """

    def value(row: ScaledRow) -> float | None:
        return getattr(row, name) or None

    def more(row: ScaledRow) -> Mark:
        ends = {"low": getattr(row, f"{name}_low"), "high": getattr(row, f"{name}_high")}
        return {"number": number(row), **ends} if value(row) else {}

    return line_figure(
        data,
        data.rows,
        value,
        anchor=name.replace("_", "-"),
        over=("world_size",),
        lines_by=("batch", "scaling"),
        x=axis(data.ranks, 2, values=_sizes(data), format="~g", scale={"padding": _ROOM}),
        along=lambda row: int(row.world_size),
        more=more,
        tip=lambda row: (
            f"speed-up {speed_up_words(row)}, efficiency {formatting.percent(row.efficiency)}\n"
            f"{formatting.step_time(row)}, {formatting.number(row.throughput)} samples/s"
        ),
        **rest,
    )
