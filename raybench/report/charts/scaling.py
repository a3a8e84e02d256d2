"""Speed-up against ideal and scaling efficiency over the ranks, as figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raybench.analysis.settings import varying
from raybench.report import formatting
from raybench.report.charts.figure import Entry, Figure, Panel, Value, legend, specification
from raybench.report.charts.lines import (
    OTHER,
    ideal_layer,
    interval_layers,
    layers,
    linear_axis,
    number_layer,
    power_axis,
    reached,
)
from raybench.report.charts.series import (
    Row,
    arrange,
    drawing_note,
    is_other,
    lines_of,
    missing,
    named,
)
from raybench.report.insights import plus_minus
from raybench.report.summary import Summary

# What tells the lines of one panel from each other.
_LINES = ("batch", "scaling")
_IDEAL = Entry(label="ideal", color="var(--axis)", shape="dash")


def speed_up_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where there is no speed-up over several numbers of ranks."""
    return _figure(
        rows,
        summary,
        name="speed_up",
        title=f"Speed-up over the number of {summary.ranks}",
        note=f"Samples per second over those of the same settings on {_base(summary)}. Both axes "
        "double from tick to tick. Bars: 95 % intervals, mostly smaller than the points.",
    )


def efficiency_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where there is no efficiency over several numbers of ranks."""
    return _figure(
        rows,
        summary,
        name="efficiency",
        title="Scaling efficiency",
        note=f"Speed-up over the ratio of {summary.ranks}; 100 % is ideal.",
    )


def _base(summary: Summary) -> str:
    return formatting.ranks_words(int(summary.run.baseline.get("world_size", 1)), summary.ranks)


def _figure(
    rows: Sequence[Row], summary: Summary, *, name: str, title: str, note: str
) -> Figure | None:
    def is_known(row: Row) -> bool:
        return bool(formatting.has_value(row[name]) and row[name] > 0)

    known = [row for row in rows if is_known(row)]
    sizes = sorted({row["world_size"] for row in known})
    if "world_size" not in summary.run.baseline or len(sizes) < 2:
        return None
    series = arrange(rows, over=("world_size",), lines_by=_LINES, ranks=summary.ranks)
    lines = lines_of(series, is_known)
    names = varying(rows)
    values = {
        head: _values([one for one in members if is_known(one[1])], name, names, summary)
        for head, members in series.panels.items()
    }
    x = power_axis("x", summary.ranks, sizes)
    x["axis"] = {"values": sizes, "format": "~g"}
    base = float(summary.run.baseline["world_size"])
    ends = reached([value for found in values.values() for value in found])
    ideal = [{"x": s, "y": s / base if name == "speed_up" else 1.0} for s in sizes]
    ends += [point["y"] for point in ideal]
    # Room for the numbers beside the last points.
    x["scale"]["domain"][1] *= 1.2
    times = f"times the samples/s of {_base(summary)}"
    y = (
        power_axis("y", times, ends)
        if name == "speed_up"
        else linear_axis(
            "y",
            "efficiency",
            scale={"domain": [0, max(1.0, *ends) * 1.05], "nice": False},
            axis={"format": "~%", "tickCount": 5},
        )
    )
    panels = [
        Panel(
            title=head,
            spec=specification(
                values[head],
                [
                    ideal_layer(ideal, x, y),
                    *interval_layers(values[head], lines, x, y),
                    *layers(values[head], lines, x, y),
                    *number_layer(values[head], x, y),
                ],
            ),
            missing=missing(members, is_known, ("world_size",), summary.ranks),
        )
        for head, members in series.panels.items()
    ]
    others = [OTHER] if any(map(is_other, known)) else []
    return Figure(
        anchor=name.replace("_", "-"),
        title=title,
        note=note + drawing_note(series),
        legend=[*legend(lines), _IDEAL, *others],
        panels=panels,
    )


def _values(
    members: Sequence[tuple[str, Row]], name: str, names: Sequence[str], summary: Summary
) -> list[Value]:
    return [
        {
            "x": int(row["world_size"]),
            "y": float(row[name]),
            "line": line,
            "number": formatting.ratio(row[name]) if name == "speed_up" else f"{row[name]:.0%}",
            "other": is_other(row),
            "tip": f"{named(row, names, summary.ranks)}\nspeed-up {speed_up_words(row)}, "
            f"efficiency {formatting.percent(row['efficiency'])}\n{formatting.step_time(row)}, "
            f"{formatting.number(row['throughput'])} samples/s",
            **_interval(row, name),
        }
        for line, row in members
    ]


def _interval(row: Row, name: str) -> dict[str, Any]:
    """Take the 95 % interval of a figure, where the table has one."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    known = formatting.has_value(low) and formatting.has_value(high)
    return {"low": float(low), "high": float(high)} if known else {}


def speed_up_words(row: Row) -> str:
    """Write a speed-up and half of its interval, relative."""
    sure = plus_minus(row)
    text = "" if sure is None or row["is_baseline"] else f" {formatting.half_width(sure)}"
    return formatting.ratio(row["speed_up"]) + text
