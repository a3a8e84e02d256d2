"""Speed-up and memory of a setting over the baseline's, as of a precision over fp32."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.settings import setting, setting_order, varying
from raybench.report import formatting
from raybench.report.charts.figure import (
    MOST_LINES,
    TIP,
    Entry,
    Figure,
    Panel,
    Spec,
    Value,
    by_line,
    legend,
    specification,
)
from raybench.report.charts.lines import level_layer
from raybench.report.charts.scaling import speed_up_words
from raybench.report.charts.series import Row, is_other, line_name, missing, named
from raybench.report.insights import rows_compared
from raybench.report.summary import Summary


def gains_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """Draw what a setting gains over the baseline.

    None where it is the number of ranks that is compared, or the largest batch that is sought, and
    where nothing is compared.
    """
    baseline = summary.run.baseline
    own = [row for row in rows if not is_other(row)]
    compared = rows_compared(own)
    if not compared or "world_size" in baseline or summary.largest_batches:
        return None
    names = tuple(baseline)
    apart = varying(compared, names)
    ordered = sorted(compared, key=lambda row: [setting_order(setting(row, n)) for n in apart])
    lines = list(dict.fromkeys(line_name(row, apart, summary.ranks) for row in ordered))
    shown = [row for row in ordered if line_name(row, apart, summary.ranks) in lines[:MOST_LINES]]
    against = formatting.baseline_name(baseline)
    lacking = [
        (formatting.settings_words(row, [*names, *apart], summary.ranks), row)
        for row in own
        if not row["is_baseline"] and not formatting.has_value(row["speed_up"])
    ]
    text = missing(lacking, lambda _: False, (), summary.ranks)
    used = lines[:MOST_LINES]
    panels = [
        _panel(shown, used, apart, summary, column="speed_up", title=f"Speed-up over {against}"),
        _panel(shown, used, apart, summary, column="memory_ratio", title=f"Memory, of {against}"),
    ]
    drawn = [panel for panel in panels if panel is not None]
    more = f" {len(used)} of {len(lines)} settings are drawn." if len(used) < len(lines) else ""
    return Figure(
        anchor="gains",
        title=f"What is gained over {against}",
        note=f"Samples per second and peak memory in proportion to {against} with the same other "
        f"settings. Dashed: {against}. Thin bars: 95 % intervals.{more}",
        legend=[
            *(legend(used, points=False) if len(used) > 1 else []),
            Entry(label=against, color="var(--axis)", shape="dash"),
        ],
        panels=[
            Panel(title=panel.title, spec=panel.spec, missing=text if place == 0 else "")
            for place, panel in enumerate(drawn)
        ],
    )


def _panel(
    rows: Sequence[Row],
    lines: Sequence[str],
    apart: Sequence[str],
    summary: Summary,
    *,
    column: str,
    title: str,
) -> Panel | None:
    names, against = tuple(summary.run.baseline), formatting.baseline_name(summary.run.baseline)
    known = [row for row in rows if formatting.has_value(row[column])]
    if not known:
        return None
    groups = sorted(known, key=lambda row: [setting_order(setting(row, name)) for name in names])
    order = list(
        dict.fromkeys(formatting.settings_words(row, names, summary.ranks) for row in groups)
    )
    values: list[Value] = []
    for row in known:
        memory = formatting.percent(row["memory_ratio"])
        tip = f"{named(row, [*names, *apart], summary.ranks)}\n{speed_up_words(row)} times the "
        tip += f"samples/s\n{memory} of the memory\n" if memory else "samples/s\n"
        value: Value = {
            "x": formatting.settings_words(row, names, summary.ranks),
            "y": float(row[column]),
            "line": line_name(row, apart, summary.ranks),
            "tip": f"{tip}{formatting.step_time(row)}, "
            f"{formatting.number(row['throughput'])} samples/s",
        }
        if column == "speed_up" and formatting.has_value(row["speed_up_low"]):
            value |= {"low": float(row["speed_up_low"]), "high": float(row["speed_up_high"])}
        values.append(value)
    y: Spec = {
        "field": "y",
        "type": "quantitative",
        "title": f"times the samples/s of {against}" if column == "speed_up" else "share",
        "scale": {"zero": True},
        "axis": {"tickCount": 5, **({} if column == "speed_up" else {"format": "~%"})},
    }
    return Panel(title=title, spec=specification(values, _layers(values, order, lines, y)))


def _layers(
    values: Sequence[Value], order: Sequence[str], lines: Sequence[str], y: Spec
) -> list[Spec]:
    x: Spec = {
        "field": "x",
        "type": "nominal",
        "title": None,
        "sort": list(order),
        "axis": {"labelAngle": 0, "ticks": False, "labelExpr": "split(datum.label, ', ')"},
        "scale": {"paddingInner": 0.25},
    }
    offset: Spec = {"field": "line", "type": "nominal", "sort": list(lines)}
    intervals = [value for value in values if "low" in value]
    whiskers: Spec = {
        "data": {"values": intervals},
        "mark": {"type": "rule", "color": "var(--text)", "strokeWidth": 1.2, "aria": False},
        "encoding": {
            "x": x,
            "xOffset": offset,
            "y": {**y, "field": "low"},
            "y2": {"field": "high"},
        },
    }
    bars: Spec = {
        "mark": {"type": "bar"},
        "encoding": {
            "x": x,
            "xOffset": offset,
            "y": y,
            "color": by_line(lines, "color"),
            "description": TIP,
        },
    }
    return [bars, *([whiskers] if intervals else []), level_layer(1.0, "y", y)]
