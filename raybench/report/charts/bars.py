"""Bars of points: ranking, speed-up, TFLOP/s beside the datasheet, parts of steps, step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
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
    in_order,
    line_name,
    note_on_drawn,
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
from raybench.results.point_row import (
    are_parts_of_first_round,
    is_slowed_by_one_rank,
    step_of_parts,
)

_MOST_RANKED = 12
# A panel whose longest bar is a smaller share of the longest bar of all needs its own scale.
_SHORTEST_SHARE = 0.3
# Longer names of a baseline do not fit beside its line; the title has them.
_LONG_NAME = 20
# Dimensions of a matrix product.
_SHAPE = ("m", "n", "k")
_SUSTAINED, _BURST = "sustained", "first 30 ms"
# Rates of the first 30 ms are drawn if they exceed the sustained rate by more than 1 %.
_LEAST_BURST_RATIO = 1.01
# The excess of a slow rank. It is no column, but is subtracted from other parts.
_SLOW_RANK = "slower_ms"
# Part of the step -> title and colour, in the order of the bars. Computing is blue; lost time
# stands out, communication most.
_PARTS = {
    "compute_ms": ("compute", "var(--s1)"),
    "optimizer_ms": ("update", "var(--s6)"),
    "data_ms": ("data wait", "var(--s3)"),
    "host_gap_ms": ("host gap", "var(--s4)"),
    "comm_exposed_ms": ("exposed communication", "var(--s2)"),
    "unexplained_ms": ("unexplained", "var(--s5)"),
    _SLOW_RANK: ("slow rank", "var(--s7)"),
}


def _ranking_figure(data: ChartData) -> Figure | None:
    """Return bars of at most 12 points, by cases with several points, the best of a case first."""
    answer, metric = data.answer, data.answer.metric
    candidates = [(case, candidate) for case in answer.contested for candidate in case.ranked]
    if metric is None or not candidates:
        return None
    items_noun = answer.asked.items  # such as `tokens`
    noun = metric_noun(metric, items_noun)
    names = varying([candidate.row for _, candidate in candidates])
    divisor, unit = (GIB, "GiB") if metric.format == "gib" else (1, metric.unit)
    x_title = f"{noun}, {unit}" if unit in ("ms", "GiB") else noun
    bars = []
    for case, candidate in candidates[:_MOST_RANKED]:
        first_lines = point_name(candidate.row, names, data.ranks)
        mark: Mark = {
            "x": candidate.value / divisor,
            "low": candidate.low and candidate.low / divisor,
            "high": candidate.high and candidate.high / divisor,
            "text": formatting.metric(metric, candidate.value),
            "tip": f"{first_lines}\n{value_words(metric, candidate.value, items_noun)}",
        }
        name = candidate_name(answer, candidate)
        bars.append(Bar(panel=case_name(answer, case), name=name, marks=[mark]))
    order = "largest" if answer.ranked_by.best == "max" else "smallest"
    note = f"The {order} {noun} first."
    if any(candidate.low is not None for _, candidate in candidates):
        note += " Thin lines: 95 % intervals, where they are known."
    points = sum(len(case.ranked) for case in answer.cases)
    x = axis(x_title, format="~s", scale=_common_scale(bars))
    return Figure(
        anchor="ranking",
        title=f"{noun[:1].upper()}{noun[1:]}, the {order} first",
        note=note + note_on_drawn(len(bars), points),
        panels=bar_panels(bars, BarLayout(x=x)),
    )


def _common_scale(bars: Sequence[Bar]) -> Spec:
    """Return one scale of x for all panels; {} if the bars of a panel would be too short."""
    longest_of_panel: dict[str, float] = {}
    has_intervals = False
    for bar in bars:
        for mark in bar.marks:
            has_intervals = has_intervals or mark["low"] is not None
            end = mark["high"] or mark["x"]
            longest_of_panel[bar.panel] = max(longest_of_panel.get(bar.panel, 0.0), end)
    longest, shortest = max(longest_of_panel.values()), min(longest_of_panel.values())
    if len(longest_of_panel) == 1 or shortest < _SHORTEST_SHARE * longest:
        return {}
    # Texts are written to the right of intervals.
    return {"domain": [0, longest * (1.25 if has_intervals else 1.0)]}


def _gains_figure(data: ChartData) -> Figure | None:
    """Return bars of the speed-up over the baseline, a bar for each value of its settings.

    None in a batch search, if the baseline names a number of ranks, or if no other point has a
    speed-up.
    """
    baseline, ranks_noun = data.answer.data.run.baseline, data.ranks  # setting -> value
    compared = [row for row in data.rows if row.speed_up is not None and not row.is_baseline]
    if not compared or "world_size" in baseline or data.answer.largest_batches:
        return None
    # Other settings than those of the baseline make series: bars side by side.
    bar_settings = list(baseline)
    series_settings = varying(compared, left_out=bar_settings)
    names = [*bar_settings, *series_settings]

    def settings_order(row: ScaledRow) -> list[Any]:
        return [setting_order(setting_of(row, name)) for name in names]

    compared.sort(key=settings_order)
    series_names = [line_name(row, series_settings, ranks_noun) for row in compared]
    all_series = list(dict.fromkeys(series_names))
    drawn = all_series[:MOST_LINES]
    marks_of_bar: dict[str, list[Mark]] = {}
    for row, series in zip(compared, series_names, strict=True):
        if series not in drawn:
            continue
        mark: Mark = {
            "line": series,
            "x": row.speed_up,
            "low": row.speed_up_low,
            "high": row.speed_up_high,
            "text": formatting.ratio(row.speed_up),
            "tip": _gain_tip(data, row, names),
        }
        marks_of_bar.setdefault(settings_words(row, bar_settings, ranks_noun), []).append(mark)
    baseline_name = formatting.words_of_settings(baseline, ranks_noun)
    note = f"The {data.rate}, relative to {baseline_name} with the same other settings."
    if any(row.speed_up_low is not None for row in compared):
        note += " Thin lines: 95 % intervals."
    if len(drawn) < len(all_series):
        note += f" {len(drawn)} of {len(all_series)} settings are drawn."
    missing = [
        f"{settings_words(row, names, ranks_noun)}: {why_not_drawn(row)}"
        for row in data.rows
        if not row.is_baseline and row.speed_up is None
    ]
    if missing:
        note += f" Not drawn: {'; '.join(missing)}."
    label = baseline_name if len(baseline_name) <= _LONG_NAME else ""
    layout = BarLayout(
        x=axis(f"times the {data.rate}", format="~g"),
        series=drawn if len(drawn) > 1 else (),
        level=Level(value=1.0, label=label),
    )
    bars = [Bar(panel="", name=name, marks=marks) for name, marks in marks_of_bar.items()]
    title = f"Speed-up against {baseline_name}"
    return Figure(anchor="gains", title=title, note=note, panels=bar_panels(bars, layout))


def _gain_tip(data: ChartData, row: ScaledRow, names: Sequence[str]) -> str:
    """Return the tooltip of a speed-up over the baseline."""
    lines = [
        point_name(row, names, data.ranks),
        f"{speed_up_words(row)} times the {data.rate}",
    ]
    if memory := formatting.percent(row.memory_ratio):
        lines.append(f"{memory} of the memory")
    step, rate = formatting.step_time(row), formatting.number(row.throughput)
    lines.append(f"{step}, {rate} {data.rate}")
    return "\n".join(lines)


def operations_figure(data: ChartData) -> Figure | None:
    """Return bars of TFLOP/s for points without throughput, with panels for each precision.

    None if no point has TFLOP/s, or if a point has a throughput.
    """
    rated = [row for row in data.measured if row.achieved_tflops_per_device]
    if not rated or any(row.throughput is not None for row in data.rows):
        return None
    is_product = all(is_numeric(rated, name) for name in _SHAPE)  # of matrices

    def largest_and_fastest_first(row: ScaledRow) -> tuple[float, float]:
        size = math.prod(float(row.params[name]) for name in _SHAPE) if is_product else 0.0
        return -size, -(row.achieved_tflops_per_device or 0.0)

    rated.sort(key=largest_and_fastest_first)
    names, shown = distinguishing_settings(rated), rated[:MOST_BARS]
    bar_settings = [name for name in names if name != "precision"]
    has_burst = any(map(_has_burst, shown))
    panels: list[Panel] = []
    for precision in sorted({row.precision for row in shown}, key=setting_order):
        bars, peak = [], None
        for row in shown:
            if row.precision != precision:
                continue
            name = settings_words(row, bar_settings, data.ranks) or row.workload
            if is_product:
                name = " × ".join(str(row.params[dimension]) for dimension in _SHAPE)
            # Any point of the precision gives its peak.
            peak = _datasheet_tflops(row) or peak
            marks = _rate_marks(row, point_name(row, names, data.ranks), has_burst)
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
    note += note_on_drawn(len(shown), len(rated))
    title = "TFLOP/s compared with the datasheet" if has_peak else "TFLOP/s"
    return Figure(anchor="tflops", title=title, note=note, panels=panels)


def _has_burst(row: ScaledRow) -> bool:
    """Return whether a point was faster in its first 30 ms."""
    sustained, burst = row.achieved_tflops_per_device, row.burst_tflops_per_device
    return (burst or 0.0) > _LEAST_BURST_RATIO * (sustained or 0.0)


def _datasheet_tflops(row: ScaledRow) -> float | None:
    """Return the datasheet's peak; None if it is unknown."""
    if not row.mfu_pct:
        return None
    # The MFU is the rate as a share of the peak.
    return (row.achieved_tflops_per_device or 0.0) / (row.mfu_pct / 100)


def _rate_marks(row: ScaledRow, first_lines: str, has_burst: bool) -> list[Mark]:
    """Return marks for the sustained rate, and with `has_burst` for the rate of the first 30 ms.

    Args:
        first_lines: first lines of each tooltip.
        has_burst: whether the figure has bars for the first 30 ms.
    """
    sustained, burst = row.achieved_tflops_per_device or 0.0, row.burst_tflops_per_device
    text = formatting.number(sustained)
    tip = f"{first_lines}\n{text} TFLOP/s"
    peak = _datasheet_tflops(row)
    if peak is not None:
        tip += f", {sustained / peak:.1%} of the datasheet's {peak:,.1f}"
        text += f" · {sustained / peak:.0%}"
    tip += f"\n{formatting.step_time(row)}"
    marks: list[Mark] = [{"x": sustained, "line": _SUSTAINED, "text": text, "tip": tip}]
    if burst and has_burst:
        text = formatting.number(burst)
        tip = f"{first_lines}\n{text} TFLOP/s in its first 30 ms"
        marks.append({"x": burst, "line": _BURST, "text": text, "tip": tip})
    return marks


def parts_figure(data: ChartData) -> Figure | None:
    """Return the parts of steps as stacked bars; None if no point has parts and a throughput."""
    rows = in_order([row for row in data.rows if _part_shares(row)], ("batch", "world_size"))
    if not any(row.throughput is not None for row in rows):
        return None
    has_rounds = any(are_parts_of_first_round(row) for row in rows)
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
    drawn_parts = {part for row in rows for part in _part_shares(row)}
    titles_and_colors = [
        title_and_color for part, title_and_color in _PARTS.items() if part in drawn_parts
    ]
    # The parts may add up to more than the step.
    longest_bar = max(1.0, *(sum(_part_shares(row).values()) for row in rows))
    scale = {"domain": [0, longest_bar], "nice": False}
    figure = BarFigure(
        anchor="parts",
        title="Where the step goes",
        note=note,
        table=_parts_table(rows, data.ranks, has_rounds),
        layout=BarLayout(
            x=axis("share of the step", format="~%", scale=scale),
            series=[title for title, _ in titles_and_colors],
            colors=[color for _, color in titles_and_colors],
            is_stacked=True,
        ),
    )
    return bar_figure(data, figure, [(row, _part_marks(row)) for row in rows])


def _part_marks(row: ScaledRow) -> list[Mark]:
    """Return a mark for each part of a step, one after the other, as shares of the step."""
    marks: list[Mark] = []
    start = 0.0
    parts_ms = _parts_ms(row)
    for part, share in _part_shares(row).items():
        title, _ = _PARTS[part]
        time = formatting.duration(parts_ms[part] or 0.0)
        tip = f"{title}: {time}, {formatting.percent(share)} of the step"
        marks.append({"x": start, "x2": start + share, "line": title, "tip": tip})
        start += share
    return marks


def _parts_table(rows: Sequence[ScaledRow], ranks_noun: str, has_rounds: bool) -> Table:
    """Return a table of the parts of each step in ms, and of the losses against ideal scaling."""
    names = distinguishing_settings(rows)

    def part_text(name: str, row: ScaledRow) -> str:
        part_ms = _parts_ms(row)[name]
        # `formatting.part` would write parts of a short step with too few digits.
        if formatting.is_short(step_of_parts(row)):
            return formatting.number(part_ms, 3)
        return formatting.part(part_ms, formatting.MILLISECONDS)

    def loss_text(name: str, row: ScaledRow) -> str:
        return formatting.percent(getattr(row, name))

    step = "step of round 1 ms" if has_rounds else "step ms"
    columns: list[ColumnOf[ScaledRow]] = [
        (ShownColumn(title="point", is_text=True), lambda row: str(row.point_id)),
        (
            ShownColumn(title="settings", is_text=True),
            lambda row: settings_words(row, names, ranks_noun),
        ),
        (ShownColumn(title=step), lambda row: formatting.number(step_of_parts(row))),
    ]
    for name, (title, _) in _PARTS.items():
        columns.append((ShownColumn(title=f"{title} ms"), partial(part_text, name)))
    for name in LOSSES:
        columns.append((ShownColumn(title=f"lost: {CAUSES[name]}"), partial(loss_text, name)))
    return make_table(rows, columns)


def _step_times_figure(data: ChartData) -> Figure | None:
    """Return bars of median steps; None if steps are lines over sizes, or were not measured."""
    rows = in_order(data.measured, ("batch", "world_size"))
    if not rows or time_figure(data):
        return None
    note = "Bars show the median step time. Thin lines reach from the shortest step to the "
    note += "95th percentile."
    layout = BarLayout(x=axis("ms"))
    figure = BarFigure(anchor="times", title="Step times", note=note, layout=layout)
    return bar_figure(data, figure, [(row, [_time_mark(row)]) for row in rows])


def _time_mark(row: ScaledRow) -> Mark:
    """Return the mark of a median step, with a line from the shortest to the 95th percentile."""
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


def _part_shares(row: ScaledRow) -> dict[str, float]:
    """Return part -> share of the step, for parts above 0; {} without a breakdown."""
    step_ms = step_of_parts(row)
    if step_ms is None:
        return {}
    return {name: ms / step_ms for name, ms in _parts_ms(row).items() if ms and ms > 0}


def _parts_ms(row: ScaledRow) -> dict[str, float | None]:
    """Return part -> time in ms; the excess of a slow rank is a part of its own."""
    parts_ms: dict[str, float | None] = {name: getattr(row, name, None) for name in _PARTS}
    if is_slowed_by_one_rank(row):
        excess_ms = row.straggler_ms or 0.0
        # Without other knowledge, the device of the slow rank is slow, not the host.
        device_ms = excess_ms if row.straggler_device_ms is None else row.straggler_device_ms
        parts_ms[_SLOW_RANK] = excess_ms
        # The measured parts include the excess.
        excess_of_part = {"compute_ms": device_ms, "host_gap_ms": excess_ms - device_ms}
        for name, included_ms in excess_of_part.items():
            part_ms = parts_ms[name]
            parts_ms[name] = None if part_ms is None else part_ms - included_ms
    return parts_ms


CHARTS = (
    Chart(draw=_ranking_figure, position=25, answer_order=60, is_only_first=True),
    Chart(draw=_gains_figure, position=40, answer_order=40, is_of_ratios=True),
    Chart(draw=operations_figure, position=45, answer_order=50),
    Chart(draw=parts_figure, position=35),
    Chart(draw=_step_times_figure, position=80, answer_order=80),
)
