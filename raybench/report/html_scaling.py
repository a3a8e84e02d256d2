"""Speed-up against ideal and scaling efficiency over the ranks, as figures of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.report import wording
from raybench.report.findings import CAUSES, plus_minus
from raybench.report.html_figure import Entry, Figure, Panel, Spec, Value, legend, specification
from raybench.report.html_lines import (
    ideal_layer,
    interval_layer,
    layers,
    linear_axis,
    power_axis,
)
from raybench.report.html_series import Row, Series, arrange, drawn_of, in_order, label, table
from raybench.report.html_series import varying_settings as varying
from raybench.report.summary import Summary

# What tells the lines of one panel from each other.
_LINES = ("batch", "scaling")


def speed_up_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where there is no speed-up over several numbers of ranks."""
    return _figure(
        rows,
        summary,
        name="speed_up",
        title="Speed-up against ideal",
        note="Throughput over that of the baseline point of the same series "
        f"({wording.settings(summary.run.baseline)}). Both axes double from tick to tick. "
        "Bars: 95 % intervals, mostly smaller than the points. Dashed: ideal.",
    )


def efficiency_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where there is no efficiency over several numbers of ranks."""
    return _figure(
        rows,
        summary,
        name="efficiency",
        title="Scaling efficiency",
        note=f"Speed-up over the ratio of {summary.ranks}. Dashed: ideal. The table tells what the "
        "rest of the step is lost to.",
    )


def _figure(
    rows: Sequence[Row], summary: Summary, *, name: str, title: str, note: str
) -> Figure | None:
    known = [row for row in rows if wording.known(row[name]) and row[name] > 0]
    sizes = sorted({row["world_size"] for row in known})
    if "world_size" not in summary.run.baseline or len(sizes) < 2:
        return None
    series = arrange(known, over=("world_size",), lines_by=_LINES, ranks=summary.ranks)
    drawn = [row for members in series.panels.values() for _, row in members]
    x = power_axis("x", summary.ranks, sizes)
    x["axis"] = {"values": sizes, "format": "~g"}
    base = float(summary.run.baseline["world_size"])
    reached = [row["speed_up"] for row in drawn] + [size / base for size in sizes]
    y = power_axis("y", "speed-up", reached) if name == "speed_up" else _percent_axis(drawn)
    ideal = [{"x": s, "y": s / base if name == "speed_up" else 1.0} for s in sizes]
    told = varying(known)
    panels = [
        Panel(title=head, spec=_spec(_values(members, name, told, summary), series, x, y, ideal))
        for head, members in series.panels.items()
    ]
    measured = _COLUMNS if name == "speed_up" else (*_COLUMNS[-1:], *_LOST)
    columns, cells, texts = table(in_order(known, ("world_size",)), summary.ranks, measured)
    return Figure(
        anchor=name.replace("_", "-"),
        title=title,
        note=note + drawn_of(series),
        legend=[*legend(series.lines), Entry(label="ideal", color="var(--axis)", shape="dash")],
        panels=panels,
        columns=columns,
        rows=cells,
        texts=texts,
    )


def _percent_axis(rows: Sequence[Row]) -> Spec:
    highest = max(1.0, *(row["efficiency"] for row in rows)) * 1.05
    return linear_axis(
        "y", "efficiency", scale={"domain": [0, highest], "nice": False}, axis={"format": "~%"}
    )


def _spec(
    values: Sequence[Value], series: Series, x: Spec, y: Spec, ideal: Sequence[dict[str, float]]
) -> Spec:
    return specification(
        values,
        [
            ideal_layer(ideal, x, y),
            *interval_layer(values, series.lines, x, y),
            *layers(series.lines, x, y),
        ],
    )


def _values(
    members: Sequence[tuple[str, Row]], name: str, told: Sequence[str], summary: Summary
) -> list[Value]:
    return [
        {
            "x": int(row["world_size"]),
            "y": float(row[name]),
            "line": line,
            "tip": _tip(row, told, summary.ranks),
            **_interval(row, name),
        }
        for line, row in members
    ]


def _interval(row: Row, name: str) -> dict[str, Any]:
    """The 95 % interval of a figure, where the table has one."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    known = wording.known(low) and wording.known(high)
    return {"low": float(low), "high": float(high)} if known else {}


def _tip(row: Row, told: Sequence[str], ranks: str) -> str:
    return (
        f"{label(row, told, ranks)}\nspeed-up {_ratio(row)}, "
        f"efficiency {wording.percent(row['efficiency'])}\n{wording.step_time(row)}, "
        f"{wording.number(row['throughput'])} samples/s"
    )


def _percent(name: str) -> Callable[[Row], str]:
    return lambda row: wording.percent(row[name])


def _ratio(row: Row) -> str:
    """A speed-up and half of its interval, relative."""
    sure = plus_minus(row)
    told = "" if sure is None or row["is_baseline"] else f" {wording.half_width(sure)}"
    return wording.ratio(row["speed_up"]) + told


_COLUMNS = (
    ("step ms", wording.step_ms),
    ("samples/s", lambda row: wording.number(row["throughput"])),
    ("speed-up", _ratio),
    ("efficiency", lambda row: wording.percent(row["efficiency"])),
)
_LOST = tuple((CAUSES[name], _percent(name)) for name in LOSSES)
