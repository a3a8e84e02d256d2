"""Bars of points: which setting is best, what is reached of the datasheet, where the step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    Figure,
    Mark,
    Panel,
    Spec,
    axis,
    bar_panels,
)
from raybench.report.charts.lines import speed_up_words, time_figure
from raybench.report.documents import ColumnOf, TableColumn, make_table
from raybench.report.formatting import counted
from raybench.report.point_settings import settings_words
from raybench.report.words.answer import (
    amount,
    candidate_name,
    case_name,
    metric_noun,
    unknown_losses,
)
from raybench.report.words.causes import CAUSES
from raybench.results.point_row import is_of_first_round, is_slowed_by_one_rank, step_of_parts

_MOST_RANKED = 12
# Panels have scales of their own where the longest bar of one would be shorter, of all bars.
_SHORT = 0.3
# A longer name has no room at the line of the baseline; the title has it.
_LONG_NAME = 20
# As the formula of a product names its dimensions.
_SHAPE = ("m", "n", "k")
_SUSTAINED, _BURST = "sustained", "first 30 ms"
# A burst that is faster by less is no other figure.
_UNSURE = 1.01
# What one slow rank takes longer than the others; it is no column, but a share of other parts.
_SLOWER = "slower_ms"
# What follows each other on the slowest rank, in the order of the bars, and the colours.
# Computing is blue; what is lost stands out from it, communication most.
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
    """Return bars of the points of each `RunAnswer.cases` with two or more, the best first.

    The first 12 of all cases are drawn. None if no case has two measured points.
    """
    answer, metric = data.answer, data.answer.metric
    every = [(case, one) for case in answer.contested for one in case.ranked]
    if metric is None or not every:
        return None
    items = answer.asked.items
    noun, names = metric_noun(metric, items), varying([one.row for _, one in every])
    of_unit, unit = (GIB, "GiB") if metric.format == "gib" else (1, metric.unit)
    along = f"{noun}, {unit}" if unit in ("ms", "GiB") else noun
    bars = []
    for case, one in every[:_MOST_RANKED]:
        tip = f"{point_name(one.row, names, data.ranks)}\n{amount(metric, one.value, items)}"
        text = formatting.metric(metric, one.value)
        ends = {"x": one.value, "low": one.low, "high": one.high}
        mark = {name: end and end / of_unit for name, end in ends.items()}
        names_of_bar = case_name(answer, case), candidate_name(answer, one)
        bars.append((*names_of_bar, [{**mark, "text": text, "tip": tip}]))
    order = "largest" if answer.ranked_by.best == "max" else "smallest"
    note = f"The {order} {noun} first."
    if any(one.low is not None for _, one in every):
        note += " Thin lines: 95 % intervals, where they are known."
    points = sum(len(case.ranked) for case in answer.cases)
    return Figure(
        anchor="ranking",
        title=f"{noun[:1].upper()}{noun[1:]}, the {order} first",
        note=note + drawn_of(len(bars), points),
        panels=bar_panels(bars, axis(along, format="~s", scale=_one_scale(bars))),
    )


def _one_scale(bars: Sequence[tuple[str, str, Sequence[Mark]]]) -> Spec:
    """Return the scale that all panels share; {} where bars of a panel would be too short on it."""
    ends: dict[str, float] = {}
    has_ranges = False
    for title, _, marks in bars:
        for mark in marks:
            has_ranges = has_ranges or mark["low"] is not None
            ends[title] = max(ends.get(title, 0.0), mark["high"] or mark["x"])
    longest = max(ends.values())
    if len(ends) == 1 or min(ends.values()) < _SHORT * longest:
        return {}
    # Texts stand beyond intervals.
    return {"domain": [0, longest * (1.25 if has_ranges else 1.0)]}


def _gains_figure(data: ChartData) -> Figure | None:
    """Return bars of the speed-up over the baseline, by the settings that the baseline names.

    None if only baseline points have a speed-up, if the baseline names a number of ranks, or if the
    largest batch is known. Of other settings 7 are drawn. The note names points without a speed-up.
    """
    baseline, ranks = data.answer.data.run.baseline, data.ranks
    compared = [row for row in data.rows if row.speed_up is not None and not row.is_baseline]
    if not compared or "world_size" in baseline or data.answer.largest_batches:
        return None
    names, apart = list(baseline), varying(compared, tuple(baseline))
    compared.sort(key=lambda row: [setting_order(setting_of(row, n)) for n in (*names, *apart)])
    lines = list(dict.fromkeys(line_name(row, apart, ranks) for row in compared))
    drawn = lines[:MOST_LINES]
    against = formatting.words_of_settings(baseline, ranks)
    groups: dict[str, list[Mark]] = {}
    for row in compared:
        line, group = line_name(row, apart, ranks), settings_words(row, names, ranks)
        memory = formatting.percent(row.memory_ratio)
        tip = f"{point_name(row, [*names, *apart], ranks)}\n{speed_up_words(row)} times the "
        tip += f"{data.rate}\n{memory} of the memory\n" if memory else f"{data.rate}\n"
        tip += f"{formatting.step_time(row)}, {formatting.number(row.throughput)} {data.rate}"
        ends = {"low": row.speed_up_low, "high": row.speed_up_high}
        mark = {"x": row.speed_up, "text": formatting.ratio(row.speed_up), "tip": tip, **ends}
        if line in drawn:
            groups.setdefault(group, []).append({"line": line, **mark})
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
    panels = bar_panels(
        [("", group, marks) for group, marks in groups.items()],
        axis(f"times the {data.rate}", format="~g"),
        series=drawn if len(drawn) > 1 else (),
        level=(1.0, against if len(against) <= _LONG_NAME else ""),
    )
    title = f"Speed-up against {against}"
    return Figure(anchor="gains", title=title, note=note, panels=panels)


def operations_figure(data: ChartData) -> Figure | None:
    """Return bars of TFLOP/s, the largest products first, with panels for each precision.

    None if no ok point has TFLOP/s, or if any point has a throughput. The first 72 are drawn. If
    any is over 1 % faster in its first 30 ms, each whose rate in them is known has a second bar for
    it. If not all have numbers m, n and k, they are sorted by TFLOP/s, the most first.
    """
    known = [row for row in data.measured if row.achieved_tflops_per_device]
    if not known or any(row.throughput is not None for row in data.rows):
        return None
    is_product = all(is_numeric(known, name) for name in _SHAPE)

    def size(row: ScaledRow) -> float:
        return math.prod(float(row.params[name]) for name in _SHAPE) if is_product else 0.0

    known.sort(key=lambda row: (-size(row), -(row.achieved_tflops_per_device or 0.0)))
    names, shown = distinguishing_settings(known), known[:MOST_BARS]
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
                name = " × ".join(str(row.params[one]) for one in _SHAPE)
            reached, burst = row.achieved_tflops_per_device or 0.0, row.burst_tflops_per_device
            begin, text = point_name(row, names, data.ranks), formatting.number(reached)
            tip = f"{begin}\n{text} TFLOP/s"
            if row.mfu_pct:
                # The datasheet's, from the share of it that was reached.
                peak = reached / (row.mfu_pct / 100)
                tip += f", {reached / peak:.1%} of the datasheet's {peak:,.1f}"
                text += f" · {reached / peak:.0%}"
            tip += f"\n{formatting.step_time(row)}"
            marks: list[Mark] = [{"x": reached, "line": _SUSTAINED, "text": text, "tip": tip}]
            if burst and has_burst:
                text = formatting.number(burst)
                tip = f"{begin}\n{text} TFLOP/s in its first 30 ms"
                marks.append({"x": burst, "line": _BURST, "text": text, "tip": tip})
            bars.append((precision if "precision" in names else "", name, marks))
        panels += bar_panels(
            bars,
            axis("TFLOP/s"),
            series=(_SUSTAINED, _BURST) if has_burst else (),
            colors=("var(--s1)", "var(--s6)"),
            level=(peak, f"datasheet {peak:,.0f}") if peak else None,
        )
    note = "TFLOP/s of one device" + ("; products are m × n × k." if is_product else ".")
    has_peak = any(row.mfu_pct for row in shown)
    if not has_peak:
        note += " raybench does not know the peak of this device."
    note += drawn_of(len(shown), len(known))
    title = "TFLOP/s compared with the datasheet" if has_peak else "TFLOP/s"
    return Figure(anchor="tflops", title=title, note=note, panels=panels)


def parts_figure(data: ChartData) -> Figure | None:
    """Return stacked bars of points with a breakdown: their parts above 0 as shares of the step.

    The first 72 are drawn; the table has all. None if no point with a breakdown has a throughput.
    """
    known = in_order([row for row in data.rows if _shares(row)], ("batch", "world_size"))
    if not any(row.throughput is not None for row in known):
        return None
    used = [name for name in _PARTS if any(name in _shares(row) for row in known)]
    has_rounds = any(is_of_first_round(row) for row in known)
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
    names = distinguishing_settings(known)

    def part(row: ScaledRow, name: str) -> str:
        ms = _parts_ms(row)[name]
        if formatting.is_short(step_of_parts(row)):
            return formatting.number(ms, 3)
        return formatting.part(ms, formatting.MILLISECONDS)

    columns: list[ColumnOf[ScaledRow]] = [
        (TableColumn(title="point", is_text=True), lambda row: str(row.point_id)),
        (
            TableColumn(title="settings", is_text=True),
            lambda row: settings_words(row, names, data.ranks),
        ),
        (
            TableColumn(title="step of round 1 ms" if has_rounds else "step ms"),
            lambda row: formatting.number(step_of_parts(row)),
        ),
        *(
            (TableColumn(title=f"{title} ms"), lambda row, name=name: part(row, name))
            for name, (title, _) in _PARTS.items()
        ),
        # Against perfect scaling.
        *(
            (
                TableColumn(title=f"lost: {CAUSES[name]}"),
                lambda row, name=name: formatting.percent(getattr(row, name)),
            )
            for name in LOSSES
        ),
    ]

    def marks(row: ScaledRow, name: str) -> list[Mark]:
        """Return the marks of the parts of a step, one after the other along x, as shares of it."""
        found: list[Mark] = []
        start = 0.0
        for part, share in _shares(row).items():
            title, ms = _PARTS[part][0], _parts_ms(row)[part] or 0.0
            of_step = f"{formatting.duration(ms)}, {formatting.percent(share)} of the step"
            tip = f"{name}\n{title}: {of_step}"
            found.append({"x": start, "x2": start + share, "line": title, "tip": tip})
            start += share
        return found

    longest = max(1.0, *(sum(_shares(row).values()) for row in known))
    return bar_figure(
        data,
        known,
        marks,
        axis("share of the step", format="~%", scale={"domain": [0, longest], "nice": False}),
        anchor="parts",
        title="Where the step goes",
        note=note,
        table=make_table(known, columns),
        series=[_PARTS[name][0] for name in used],
        colors=[_PARTS[name][1] for name in used],
        is_stacked=True,
    )


def _times_figure(data: ChartData) -> Figure | None:
    """Return bars of median steps in ms; None if nothing was measured, or `time_figure` applies."""

    def marks(row: ScaledRow, name: str) -> list[Mark]:
        """Return the bar of a median step, with a line from the least to the 95th percentile."""
        median = row.step_ms_p50 or 0.0
        low, high = row.step_ms_min or median, row.step_ms_p95 or median
        spread = f"shortest {formatting.duration(low)}, p95 {formatting.duration(high)}"
        tip = f"{name}\n{formatting.step_time(row)}\n{spread}"
        text = formatting.duration(median)
        return [{"x": median, "low": low, "high": high, "tip": tip, "text": text}]

    known = in_order(data.measured, ("batch", "world_size"))
    if not known or time_figure(data):
        return None
    note = "Bars show the median step time. Thin lines reach from the shortest step to the "
    note += "95th percentile."
    return bar_figure(data, known, marks, axis("ms"), anchor="times", title="Step times", note=note)


def _shares(row: ScaledRow) -> dict[str, float]:
    """Return the parts above 0 as shares of the step, by name; {} where they are not known."""
    step_ms = step_of_parts(row)
    if step_ms is None:
        return {}
    return {name: ms / step_ms for name, ms in _parts_ms(row).items() if ms and ms > 0}


def _parts_ms(row: ScaledRow) -> dict[str, float | None]:
    """Return the parts of the step in ms, by name; None where a part is unknown.

    What one slow rank takes longer is a part of its own, without which the others are. It is None
    where no single rank slows the others down.
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
    Chart(draw=_ranking_figure, place=25, answers=60, is_only_first=True),
    Chart(draw=_gains_figure, place=40, answers=40, is_of_ratios=True),
    Chart(draw=operations_figure, place=45, answers=50),
    Chart(draw=parts_figure, place=35),
    Chart(draw=_times_figure, place=80, answers=80),
)
