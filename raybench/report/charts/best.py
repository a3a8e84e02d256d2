"""Which setting is best: bars of the points, the best first, and of speed-ups over the baseline."""

from __future__ import annotations

from raybench.analysis.rows import setting, setting_order, varying
from raybench.report import formatting
from raybench.report.charts.chart import (
    Chart,
    ChartData,
    drawn_of,
    line_name,
    point_name,
    why_not_drawn,
)
from raybench.report.charts.grammar import MOST_LINES, Figure, Mark, axis, bar_panels
from raybench.report.charts.scaling import speed_up_words
from raybench.report.lead import amount, answer_metric, metric_noun

_MOST_RANKED = 12
# A longer name has no room at the line of the baseline; the title has it.
_LONG_NAME = 20


def ranking_figure(data: ChartData) -> Figure | None:
    """Return bars of the points of each case, the best first; None where no case has two."""
    metric = answer_metric(data.summary)
    every = [
        (case, one) for case in data.summary.cases if len(case.ranked) > 1 for one in case.ranked
    ]
    if metric is None or not every:
        return None
    noun, names = metric_noun(data.summary, metric), varying([one.row for _, one in every])
    of_unit, unit = (2**30, "GiB") if metric.format == "gib" else (1, metric.unit)
    along = f"{noun}, {unit}" if unit in ("ms", "GiB") else noun
    bars = []
    for case, one in every[:_MOST_RANKED]:
        tip = f"{point_name(one.row, names, data.ranks)}\n{amount(data.summary, metric, one.value)}"
        text = formatting.metric(metric, one.value)
        ends = {"x": one.value, "low": one.low, "high": one.high}
        mark = {name: end and end / of_unit for name, end in ends.items()}
        bars.append((case.name, one.name, [{**mark, "text": text, "tip": tip}]))
    note = f"The best first, by {noun}. Thin lines: 95 % intervals, where they are known."
    return Figure(
        anchor="ranking",
        title=f"{noun[:1].upper()}{noun[1:]}, the best first",
        note=note + drawn_of(len(bars), len(every)),
        panels=bar_panels(bars, axis(along, format="~s")),
    )


def gains_figure(data: ChartData) -> Figure | None:
    """Return bars of the speed-up over the baseline, by the settings that it names.

    None where numbers of ranks are compared or the largest batch is sought, and where nothing is
    compared.
    """
    baseline, ranks = data.summary.run.baseline, data.ranks
    compared = [row for row in data.rows if row.speed_up is not None and not row.is_baseline]
    if not compared or "world_size" in baseline or data.summary.largest_batches:
        return None
    names, apart = list(baseline), varying(compared, tuple(baseline))
    compared.sort(key=lambda row: [setting_order(setting(row, n)) for n in (*names, *apart)])
    lines = list(dict.fromkeys(line_name(row, apart, ranks) for row in compared))
    drawn, against = lines[:MOST_LINES], formatting.baseline_name(baseline)
    groups: dict[str, list[Mark]] = {}
    for row in compared:
        line, group = line_name(row, apart, ranks), formatting.settings_words(row, names, ranks)
        memory = formatting.percent(row.memory_ratio)
        tip = f"{point_name(row, [*names, *apart], ranks)}\n{speed_up_words(row)} times the "
        tip += f"samples/s\n{memory} of the memory\n" if memory else "samples/s\n"
        tip += f"{formatting.step_time(row)}, {formatting.number(row.throughput)} samples/s"
        ends = {"low": row.speed_up_low, "high": row.speed_up_high}
        mark = {"x": row.speed_up, "text": formatting.ratio(row.speed_up), "tip": tip, **ends}
        if line in drawn:
            groups.setdefault(group, []).append({"line": line, **mark})
    note = (
        f"Samples per second in proportion to {against} with the same other settings. Thin lines: "
        "95 % intervals."
    )
    if len(drawn) < len(lines):
        note += f" {len(drawn)} of {len(lines)} settings are drawn."
    lacking = [
        f"{formatting.settings_words(row, [*names, *apart], ranks)}: {why_not_drawn(row)}"
        for row in data.rows
        if not row.is_baseline and row.speed_up is None
    ]
    if lacking:
        note += f" Not drawn: {'; '.join(lacking)}."
    panels = bar_panels(
        [("", group, marks) for group, marks in groups.items()],
        axis("times the samples/s", format="~g"),
        series=drawn if len(drawn) > 1 else (),
        level=(1.0, against if len(against) <= _LONG_NAME else ""),
    )
    title = f"What is gained over {against}"
    return Figure(anchor="gains", title=title, note=note, panels=panels)


CHARTS = (
    Chart(draw=ranking_figure, place=25, answers=60, is_only_first=True),
    Chart(draw=gains_figure, place=40, answers=40, is_of_ratios=True),
)
