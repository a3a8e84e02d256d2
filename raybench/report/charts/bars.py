"""Bars of points: which setting is best, what is reached of the datasheet, where the step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from raybench.analysis.rows import (
    ScaledRow,
    distinguishing_settings,
    is_numeric,
    setting_of,
    setting_order,
    varying,
)
from raybench.analysis.scaling import LOSSES
from raybench.conversion import GIB
from raybench.report import formatting
from raybench.report.charts import (
    BarFigure,
    Chart,
    ChartData,
    bar_figure,
    drawn_of,
    in_order,
    line_name,
    point_name,
    why_not_drawn,
)
from raybench.report.charts.grammar import (
    MOST_BARS,
    MOST_LINES,
    Bar,
    BarLayout,
    Figure,
    Level,
    Mark,
    Panel,
    Spec,
    axis,
    bar_panels,
)
from raybench.report.charts.lines import speed_up_words, time_figure
from raybench.report.documents import ColumnOf, ShownColumn, Table, make_table
from raybench.report.formatting import counted
from raybench.report.point_settings import settings_words
from raybench.report.words.answer import (
    candidate_name,
    case_name,
    metric_noun,
    unknown_losses,
    value_words,
)
from raybench.report.words.causes import CAUSES
from raybench.results.point_row import is_of_first_round, is_slowed_by_one_rank, step_of_parts

_MOST_RANKED = 12
# Panels have separate scales where the longest bar of a panel is a smaller share of all bars.
_SHORT = 0.3
# The line of the baseline has no room for a longer name; the title has it.
_LONG_NAME = 20
# Dimensions of a matrix product.
_SHAPE = ("m", "n", "k")
_SUSTAINED, _BURST = "sustained", "first 30 ms"
# A burst within 1 % of the sustained rate is not drawn.
_UNSURE = 1.01
# How much longer a slow rank takes than the others; not a column, but a share of other parts.
_SLOWER = "slower_ms"
# Parts of the step in the order of the bars, with their colours. Computing is blue; lost time
# stands out from it, communication most.
_PARTS = {
    "compute_ms": ("compute", "var(--s1)"),
    "optimizer_ms": ("update", "var(--s6)"),
    "data_ms": ("data wait", "var(--s3)"),
    "host_gap_ms": ("host gap", "var(--s4)"),
    "comm_exposed_ms": ("exposed communication", "var(--s2)"),
    "unexplained_ms": ("unexplained", "var(--s5)"),
    _SLOWER: ("slow rank", "var(--s7)"),
}


def _ranking_figure(data: ChartData) -> Figure | None:
    """Return bars of the points of each contested case, the best first; None without such cases.

    The first 12 points of all cases are drawn.
    """
    answer, metric = data.answer, data.answer.metric
    every = [(case, candidate) for case in answer.contested for candidate in case.ranked]
    if metric is None or not every:
        return None
    items = answer.asked.items
    noun, names = metric_noun(metric, items), varying([candidate.row for _, candidate in every])
    of_unit, unit = (GIB, "GiB") if metric.format == "gib" else (1, metric.unit)
    along = f"{noun}, {unit}" if unit in ("ms", "GiB") else noun
    bars = []
    for case, candidate in every[:_MOST_RANKED]:
        begin = point_name(candidate.row, names, data.ranks)
        mark: Mark = {
            "x": candidate.value / of_unit,
            "low": candidate.low and candidate.low / of_unit,
            "high": candidate.high and candidate.high / of_unit,
            "text": formatting.metric(metric, candidate.value),
            "tip": f"{begin}\n{value_words(metric, candidate.value, items)}",
        }
        name = candidate_name(answer, candidate)
        bars.append(Bar(panel=case_name(answer, case), name=name, marks=[mark]))
    order = "largest" if answer.ranked_by.best == "max" else "smallest"
    note = f"The {order} {noun} first."
    if any(candidate.low is not None for _, candidate in every):
        note += " Thin lines: 95 % intervals, where they are known."
    points = sum(len(case.ranked) for case in answer.cases)
    x = axis(along, format="~s", scale=_one_scale(bars))
    return Figure(
        anchor="ranking",
        title=f"{noun[:1].upper()}{noun[1:]}, the {order} first",
        note=note + drawn_of(len(bars), points),
        panels=bar_panels(bars, BarLayout(x=x)),
    )


def _one_scale(bars: Sequence[Bar]) -> Spec:
    """Return the scale of all panels; {} where the bars of a panel would be too short on it."""
    ends: dict[str, float] = {}
    has_ranges = False
    for bar in bars:
        for mark in bar.marks:
            has_ranges = has_ranges or mark["low"] is not None
            ends[bar.panel] = max(ends.get(bar.panel, 0.0), mark["high"] or mark["x"])
    longest = max(ends.values())
    if len(ends) == 1 or min(ends.values()) < _SHORT * longest:
        return {}
    # Texts are written beyond intervals.
    return {"domain": [0, longest * (1.25 if has_ranges else 1.0)]}


def _gains_figure(data: ChartData) -> Figure | None:
    """Return bars of the speed-up over the baseline, by the settings that the baseline names.

    At most 7 combinations of other settings are drawn. None if only baseline points have a
    speed-up, if the baseline names a number of ranks, or if the largest batch is known.
    """
    baseline, ranks = data.answer.data.run.baseline, data.ranks
    compared = [row for row in data.rows if row.speed_up is not None and not row.is_baseline]
    if not compared or "world_size" in baseline or data.answer.largest_batches:
        return None
    names, apart = list(baseline), varying(compared, tuple(baseline))

    def order(row: ScaledRow) -> list[Any]:
        return [setting_order(setting_of(row, name)) for name in (*names, *apart)]

    compared.sort(key=order)
    lines = list(dict.fromkeys(line_name(row, apart, ranks) for row in compared))
    drawn = lines[:MOST_LINES]
    against = formatting.words_of_settings(baseline, ranks)
    marks_of: dict[str, list[Mark]] = {}
    for row in compared:
        line = line_name(row, apart, ranks)
        if line not in drawn:
            continue
        memory = formatting.percent(row.memory_ratio)
        tip = f"{point_name(row, [*names, *apart], ranks)}\n{speed_up_words(row)} times the "
        tip += f"{data.rate}\n{memory} of the memory\n" if memory else f"{data.rate}\n"
        tip += f"{formatting.step_time(row)}, {formatting.number(row.throughput)} {data.rate}"
        text = formatting.ratio(row.speed_up)
        mark: Mark = {"line": line, "x": row.speed_up, "text": text, "tip": tip}
        ends = {"low": row.speed_up_low, "high": row.speed_up_high}
        marks_of.setdefault(settings_words(row, names, ranks), []).append(mark | ends)
    note = f"The {data.rate}, relative to {against} with the same other settings."
    if any(row.speed_up_low is not None for row in compared):
        note += " Thin lines: 95 % intervals."
    if len(drawn) < len(lines):
        note += f" {len(drawn)} of {len(lines)} settings are drawn."
    lacking = [
        f"{settings_words(row, [*names, *apart], ranks)}: {why_not_drawn(row)}"
        for row in data.rows
        if not row.is_baseline and row.speed_up is None
    ]
    if lacking:
        note += f" Not drawn: {'; '.join(lacking)}."
    layout = BarLayout(
        x=axis(f"times the {data.rate}", format="~g"),
        series=drawn if len(drawn) > 1 else (),
        level=Level(value=1.0, label=against if len(against) <= _LONG_NAME else ""),
    )
    bars = [Bar(panel="", name=name, marks=marks) for name, marks in marks_of.items()]
    title = f"Speed-up against {against}"
    return Figure(anchor="gains", title=title, note=note, panels=bar_panels(bars, layout))


def operations_figure(data: ChartData) -> Figure | None:
    """Return bars of TFLOP/s, the largest products first, with panels for each precision.

    The first 72 points are drawn; points that are no products are sorted by TFLOP/s. Where any
    point is over 1 % faster in its first 30 ms, a second bar shows that rate. None if no ok point
    has TFLOP/s, or if any point has a throughput.
    """
    rated = [row for row in data.measured if row.achieved_tflops_per_device]
    if not rated or any(row.throughput is not None for row in data.rows):
        return None
    is_product = all(is_numeric(rated, name) for name in _SHAPE)

    def size(row: ScaledRow) -> float:
        return math.prod(float(row.params[name]) for name in _SHAPE) if is_product else 0.0

    rated.sort(key=lambda row: (-size(row), -(row.achieved_tflops_per_device or 0.0)))
    names, shown = distinguishing_settings(rated), rated[:MOST_BARS]
    rest = [name for name in names if name != "precision"]
    has_burst = any(
        (row.burst_tflops_per_device or 0.0) > _UNSURE * (row.achieved_tflops_per_device or 0.0)
        for row in shown
    )
    panels: list[Panel] = []
    for precision in sorted({row.precision for row in shown}, key=setting_order):
        bars, peak = [], None
        for row in (row for row in shown if row.precision == precision):
            name = settings_words(row, rest, data.ranks) or row.workload
            if is_product:
                name = " × ".join(str(row.params[dimension]) for dimension in _SHAPE)
            peak = _datasheet_tflops(row) or peak
            begin = point_name(row, names, data.ranks)
            marks = _rate_marks(row, begin, has_burst)
            title = precision if "precision" in names else ""
            bars.append(Bar(panel=title, name=name, marks=marks))
        layout = BarLayout(
            x=axis("TFLOP/s"),
            series=(_SUSTAINED, _BURST) if has_burst else (),
            colors=("var(--s1)", "var(--s6)"),
            level=Level(value=peak, label=f"datasheet {peak:,.0f}") if peak else None,
        )
        panels += bar_panels(bars, layout)
    note = "TFLOP/s of one device" + ("; products are m × n × k." if is_product else ".")
    has_peak = any(row.mfu_pct for row in shown)
    if not has_peak:
        note += " raybench does not know the peak of this device."
    note += drawn_of(len(shown), len(rated))
    title = "TFLOP/s compared with the datasheet" if has_peak else "TFLOP/s"
    return Figure(anchor="tflops", title=title, note=note, panels=panels)


def _datasheet_tflops(row: ScaledRow) -> float | None:
    """Return the peak by the datasheet, computed from the share of it that the point reached."""
    if not row.mfu_pct:
        return None
    return (row.achieved_tflops_per_device or 0.0) / (row.mfu_pct / 100)


def _rate_marks(row: ScaledRow, begin: str, has_burst: bool) -> list[Mark]:
    """Return the sustained rate of a point, and with `has_burst` the rate of its first 30 ms."""
    reached, burst = row.achieved_tflops_per_device or 0.0, row.burst_tflops_per_device
    text = formatting.number(reached)
    tip = f"{begin}\n{text} TFLOP/s"
    peak = _datasheet_tflops(row)
    if peak is not None:
        tip += f", {reached / peak:.1%} of the datasheet's {peak:,.1f}"
        text += f" · {reached / peak:.0%}"
    tip += f"\n{formatting.step_time(row)}"
    marks: list[Mark] = [{"x": reached, "line": _SUSTAINED, "text": text, "tip": tip}]
    if burst and has_burst:
        text = formatting.number(burst)
        tip = f"{begin}\n{text} TFLOP/s in its first 30 ms"
        marks.append({"x": burst, "line": _BURST, "text": text, "tip": tip})
    return marks


def parts_figure(data: ChartData) -> Figure | None:
    """Return stacked bars of points with a breakdown: their parts above 0 as shares of the step.

    The first 72 are drawn; the table has all. None if no point with a breakdown has a throughput.
    """
    rows = in_order([row for row in data.rows if _shares(row)], ("batch", "world_size"))
    if not any(row.throughput is not None for row in rows):
        return None
    has_rounds = any(is_of_first_round(row) for row in rows)
    note = "Bars show the parts as shares of the step time"
    note += " of round 1, the only round that measures them. " if has_rounds else ". "
    note += "They come from instrumented steps after the timed ones, on the slowest rank. Update "
    note += "is optimizer.step()."
    if count := sum(row.why_no_breakdown is not None for row in data.rows):
        note += (
            f" Not drawn: {counted(count, 'point')} whose parts add up to more than 110 % of the "
            "step."
        )
    note = " ".join([note, *unknown_losses(data.rows)])
    drawn_parts = {part for row in rows for part in _shares(row)}
    parts = [part for part in _PARTS if part in drawn_parts]
    longest = max(1.0, *(sum(_shares(row).values()) for row in rows))
    scale = {"domain": [0, longest], "nice": False}
    figure = BarFigure(
        anchor="parts",
        title="Where the step goes",
        note=note,
        table=_parts_table(rows, data.ranks, has_rounds),
        layout=BarLayout(
            x=axis("share of the step", format="~%", scale=scale),
            series=[_PARTS[part][0] for part in parts],
            colors=[_PARTS[part][1] for part in parts],
            is_stacked=True,
        ),
    )
    return bar_figure(data, figure, [(row, _part_marks(row)) for row in rows])


def _part_marks(row: ScaledRow) -> list[Mark]:
    """Return the parts of a step, one after the other along x, as shares of the step."""
    marks: list[Mark] = []
    start = 0.0
    for part, share in _shares(row).items():
        title, ms = _PARTS[part][0], _parts_ms(row)[part] or 0.0
        of_step = f"{formatting.duration(ms)}, {formatting.percent(share)} of the step"
        mark: Mark = {"x": start, "x2": start + share, "line": title}
        marks.append(mark | {"tip": f"{title}: {of_step}"})
        start += share
    return marks


def _parts_table(rows: Sequence[ScaledRow], ranks: str, has_rounds: bool) -> Table:
    """Return the parts of each step in ms, and its losses against perfect scaling."""
    names = distinguishing_settings(rows)

    def part(row: ScaledRow, name: str) -> str:
        ms = _parts_ms(row)[name]
        if formatting.is_short(step_of_parts(row)):
            return formatting.number(ms, 3)
        return formatting.part(ms, formatting.MILLISECONDS)

    step = "step of round 1 ms" if has_rounds else "step ms"
    columns: list[ColumnOf[ScaledRow]] = [
        (ShownColumn(title="point", is_text=True), lambda row: str(row.point_id)),
        (
            ShownColumn(title="settings", is_text=True),
            lambda row: settings_words(row, names, ranks),
        ),
        (ShownColumn(title=step), lambda row: formatting.number(step_of_parts(row))),
        *(
            (ShownColumn(title=f"{title} ms"), lambda row, name=name: part(row, name))
            for name, (title, _) in _PARTS.items()
        ),
        *(
            (
                ShownColumn(title=f"lost: {CAUSES[name]}"),
                lambda row, name=name: formatting.percent(getattr(row, name)),
            )
            for name in LOSSES
        ),
    ]
    return make_table(rows, columns)


def _times_figure(data: ChartData) -> Figure | None:
    """Return bars of median steps in ms; None if nothing was measured, or `time_figure` applies."""
    rows = in_order(data.measured, ("batch", "world_size"))
    if not rows or time_figure(data):
        return None
    note = "Bars show the median step time. Thin lines reach from the shortest step to the "
    note += "95th percentile."
    layout = BarLayout(x=axis("ms"))
    figure = BarFigure(anchor="times", title="Step times", note=note, layout=layout)
    return bar_figure(data, figure, [(row, [_time_mark(row)]) for row in rows])


def _time_mark(row: ScaledRow) -> Mark:
    """Return the bar of a median step, with a line from the shortest to the 95th percentile."""
    median = row.step_ms_p50 or 0.0
    low, high = row.step_ms_min or median, row.step_ms_p95 or median
    spread = f"shortest {formatting.duration(low)}, p95 {formatting.duration(high)}"
    tip = f"{formatting.step_time(row)}\n{spread}"
    return {
        "x": median,
        "low": low,
        "high": high,
        "tip": tip,
        "text": formatting.duration(median),
    }


def _shares(row: ScaledRow) -> dict[str, float]:
    """Return the parts above 0 as shares of the step, by name; {} without a breakdown."""
    step_ms = step_of_parts(row)
    if step_ms is None:
        return {}
    return {name: ms / step_ms for name, ms in _parts_ms(row).items() if ms and ms > 0}


def _parts_ms(row: ScaledRow) -> dict[str, float | None]:
    """Return the parts of the step in ms, by name.

    The delay of a single slow rank is a separate part: it is subtracted from computing and from
    the host gap.
    """
    parts: dict[str, float | None] = {name: getattr(row, name, None) for name in _PARTS}
    if is_slowed_by_one_rank(row):
        slower_ms = parts[_SLOWER] = row.straggler_ms or 0.0
        device_ms = slower_ms if row.straggler_device_ms is None else row.straggler_device_ms
        for name, ms in (("compute_ms", device_ms), ("host_gap_ms", slower_ms - device_ms)):
            value = parts[name]
            parts[name] = None if value is None else value - ms
    return parts


CHARTS = (
    Chart(draw=_ranking_figure, position=25, answers=60, is_only_first=True),
    Chart(draw=_gains_figure, position=40, answers=40, is_of_ratios=True),
    Chart(draw=operations_figure, position=45, answers=50),
    Chart(draw=parts_figure, position=35),
    Chart(draw=_times_figure, position=80, answers=80),
)
