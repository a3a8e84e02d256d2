"""Speed-up and memory of a setting over the baseline's, as of a precision over fp32."""

from __future__ import annotations

from raybench.analysis.settings import setting, setting_order, varying
from raybench.report import formatting
from raybench.report.charts.data import ChartData, Row, line_name, point_name, why_not_drawn
from raybench.report.charts.grammar import MOST_LINES, Figure, Mark, Panel, axis, bar_panels
from raybench.report.charts.registry import Chart
from raybench.report.charts.scaling import speed_up_words
from raybench.report.findings import rows_compared

# A longer name has no room at the line of the baseline; the title has it.
_LONG_NAME = 20


def gains_figure(data: ChartData) -> Figure | None:
    """Draw what a setting gains over the baseline.

    None where numbers of ranks are compared or the largest batch is sought, and where nothing is
    compared.
    """
    baseline, compared = data.summary.run.baseline, rows_compared(data.rows)
    if not compared or "world_size" in baseline or data.summary.largest_batches:
        return None
    names = tuple(baseline)
    apart = varying(compared, names)
    ordered = sorted(
        compared, key=lambda row: [setting_order(setting(row, n)) for n in (*names, *apart)]
    )
    by_size = sorted(compared, key=lambda row: [setting_order(setting(row, n)) for n in apart])
    every_line = list(dict.fromkeys(line_name(row, apart, data.ranks) for row in by_size))
    lines, against = every_line[:MOST_LINES], formatting.baseline_name(baseline)
    panels: list[Panel] = []
    for column, title, unit in (
        ("speed_up", f"Speed-up over {against}", f"times the samples/s of {against}"),
        ("memory_ratio", f"Memory, of {against}", "share"),
    ):
        groups: dict[str, list[Mark]] = {}
        for row in ordered:
            line = line_name(row, apart, data.ranks)
            if line in lines and formatting.has_value(row[column]):
                group = formatting.settings_words(row, names, data.ranks)
                groups.setdefault(group, []).append(
                    _mark(row, column, line, [*names, *apart], data)
                )
        panels += bar_panels(
            [(title, group, marks) for group, marks in groups.items()],
            axis(unit, format="~g" if column == "speed_up" else "~%"),
            series=lines if len(lines) > 1 else (),
            level=(1.0, against if len(against) <= _LONG_NAME else ""),
        )
    lacking = [
        f"{formatting.settings_words(row, [*names, *apart], data.ranks)}: {why_not_drawn(row)}"
        for row in data.rows
        if not row["is_baseline"] and not formatting.has_value(row["speed_up"])
    ]
    note = (
        f"Samples per second and peak memory in proportion to {against} with the same other "
        "settings. Thin lines: 95 % intervals."
    )
    if len(lines) < len(every_line):
        note += f" {len(lines)} of {len(every_line)} settings are drawn."
    if lacking:
        note += f" Not drawn: {'; '.join(lacking)}."
    return Figure(anchor="gains", title=f"What is gained over {against}", note=note, panels=panels)


CHARTS = (Chart(draw=gains_figure, place=40, answers=40),)


def _mark(row: Row, column: str, line: str, names: list[str], data: ChartData) -> Mark:
    memory = formatting.percent(row["memory_ratio"])
    tip = f"{point_name(row, names, data.ranks)}\n{speed_up_words(row)} times the samples/s\n"
    tip += f"{memory} of the memory\n" if memory else ""
    tip += f"{formatting.step_time(row)}, {formatting.number(row['throughput'])} samples/s"
    is_speed = column == "speed_up"
    text = formatting.ratio(row[column]) if is_speed else formatting.percent(row[column])
    mark: Mark = {"x": float(row[column]), "line": line, "tip": tip, "text": text}
    if is_speed and formatting.has_value(row["speed_up_low"]):
        mark |= {"low": float(row["speed_up_low"]), "high": float(row["speed_up_high"])}
    return mark
