"""The step of each point: where it goes, as a bar of parts, and its time with its spread."""

from __future__ import annotations

from raybench.analysis.rows import ScaledRow
from raybench.analysis.scaling import CAUSES, LOSSES
from raybench.report import formatting
from raybench.report.blocks import Column, ColumnOf, Table, make_table
from raybench.report.charts.chart import Chart, ChartData, bar_figure, in_order
from raybench.report.charts.grammar import Figure, Mark, axis
from raybench.report.charts.rates import time_figure
from raybench.report.plain_text import counted
from raybench.report.point_settings import distinguishing_settings
from raybench.results.breakdown import is_slowed_by_one_rank

# What one slow rank takes longer than the others; it is no column, but a share of other parts.
_SLOWER = "slower_ms"
# What follows each other on the slowest rank, in the order of the bars, and the colours.
# Computing is blue; what is lost stands out from it, communication most.
_PARTS = {
    "compute_ms": ("compute", "var(--s1)"),
    "optimizer_ms": ("optimizer", "var(--s6)"),
    "data_ms": ("waiting for data", "var(--s3)"),
    "host_gap_ms": ("waiting for the host", "var(--s4)"),
    "comm_exposed_ms": ("exposed communication", "var(--s2)"),
    _SLOWER: ("one rank slower", "var(--s7)"),
}


def parts_figure(data: ChartData) -> Figure | None:
    """Return bars of the parts of each step.

    None where no parts are known, or where steps finish no samples.
    """
    known = in_order([row for row in data.rows if _shares(row)], ("batch", "world_size"))
    if not any(row.throughput is not None for row in known):
        return None
    used = [name for name in _PARTS if any(name in _shares(row) for row in known)]
    note = (
        "Shares of the step time. The parts come from instrumented steps after the timed ones, on "
        "the slowest rank, so they need not add up to 100 %."
    )
    if count := sum(row.why_no_breakdown is not None for row in data.rows):
        note += (
            f" Not drawn: {counted(count, 'point')} whose parts exceed the step by more than 10 %, "
            "so that they are no breakdown of it."
        )
    longest = max(1.0, *(sum(_shares(row).values()) for row in known))
    return bar_figure(
        data,
        known,
        _marks,
        axis("share of the step", format="~%", scale={"domain": [0, longest], "nice": False}),
        anchor="parts",
        title="Where the step goes",
        note=note,
        table=_table(known, data.ranks),
        series=[_PARTS[name][0] for name in used],
        colors=[_PARTS[name][1] for name in used],
        is_stacked=True,
    )


def times_figure(data: ChartData) -> Figure | None:
    """Return bars of the median steps; None if nothing was measured, or `time_figure` applies."""

    def marks(row: ScaledRow, name: str) -> list[Mark]:
        """Return the bar of a median step, with a line from the least to the 95th percentile."""
        median = row.step_ms_p50 or 0.0
        low, high = row.step_ms_min or median, row.step_ms_p95 or median
        spread = f"least {formatting.duration(low)}, p95 {formatting.duration(high)}"
        tip = f"{name}\n{formatting.step_time(row)}\n{spread}"
        text = formatting.duration(median)
        return [{"x": median, "low": low, "high": high, "tip": tip, "text": text}]

    known = in_order(data.measured, ("batch", "world_size"))
    if not known or time_figure(data):
        return None
    note = "Bars: the median of the steps; thin lines: from the least to the 95th percentile."
    return bar_figure(data, known, marks, axis("ms"), anchor="times", title="Step times", note=note)


CHARTS = (
    Chart(draw=parts_figure, place=35),
    Chart(draw=times_figure, place=80, answers=80),
)


def _shares(row: ScaledRow) -> dict[str, float]:
    """Return the parts above 0 as shares of the step, by name; {} where they are not known."""
    if row.step_ms_p50 is None:
        return {}
    known = {name: _part_ms(row, name) or 0.0 for name in _PARTS}
    return {name: ms / row.step_ms_p50 for name, ms in known.items() if ms > 0}


def _part_ms(row: ScaledRow, name: str) -> float | None:
    """Return a part of the step in ms, without what one slow rank adds; None where unknown.

    That is the part `slower_ms`; it is None where no single rank slows the others down.
    """
    slower_ms = row.straggler_ms or 0.0
    if name == _SLOWER:
        return slower_ms if is_slowed_by_one_rank(row) else None
    value: float | None = getattr(row, name)
    if value is None or not is_slowed_by_one_rank(row):
        return value
    device_ms = slower_ms if row.straggler_device_ms is None else row.straggler_device_ms
    in_part = {"compute_ms": device_ms, "host_gap_ms": slower_ms - device_ms}
    return value - in_part.get(name, 0.0)


def _marks(row: ScaledRow, name: str) -> list[Mark]:
    """Return the marks of the parts of a step, one after the other along x, as shares of it."""
    marks: list[Mark] = []
    start = 0.0
    for part, share in _shares(row).items():
        title, time = _PARTS[part][0], formatting.duration(_part_ms(row, part) or 0.0)
        tip = f"{name}\n{title}: {time}, {formatting.percent(share)} of the step"
        marks.append({"x": start, "x2": start + share, "line": title, "tip": tip})
        start += share
    return marks


def _table(rows: list[ScaledRow], ranks: str) -> Table:
    """Return the parts in ms, and the shares of the step lost against perfect scaling, by cause."""
    names = distinguishing_settings(rows)
    columns: list[ColumnOf[ScaledRow]] = [
        (Column(title="point", is_text=True), lambda row: str(row.point_id)),
        (
            Column(title="settings", is_text=True),
            lambda row: formatting.settings_words(row, names, ranks),
        ),
        (Column(title="step ms"), lambda row: formatting.number(row.step_ms_p50)),
    ]
    columns += [_part_column(name, title) for name, (title, _) in _PARTS.items()]
    columns += [_loss_column(name) for name in LOSSES]
    return make_table(rows, columns)


def _part_column(name: str, title: str) -> ColumnOf[ScaledRow]:
    """Return the column of a part of _PARTS, in ms."""
    return (
        Column(title=f"{title} ms"),
        lambda row: formatting.part_ms(_part_ms(row, name), row.step_ms_p50),
    )


def _loss_column(name: str) -> ColumnOf[ScaledRow]:
    return Column(title=f"lost: {CAUSES[name]}"), lambda row: formatting.percent(getattr(row, name))
