"""Where the step goes: a bar of parts for each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raybench.report import wording
from raybench.report.html_bars import MOST_BARS, bar_panels, first_of
from raybench.report.html_figure import TOLD, Entry, Figure, Spec, Value, series_color
from raybench.report.html_series import Row, in_order, table
from raybench.report.summary import Summary

# What is not hidden by something else; the order of the bars.
_PARTS = {
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "data_ms": "waiting for data",
    "host_gap_ms": "waiting for the host",
    "comm_exposed_ms": "exposed communication",
    "wait_ms": "waiting for a rank",
}
_COLORS = {name: series_color(place) for place, name in enumerate(_PARTS)}


def parts_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where nothing was broken down."""
    known = [row for row in rows if any(_share(row, name) > 0 for name in _PARTS)]
    known = in_order(known, ("batch", "world_size"))
    if not known:
        return None
    used = [name for name in _PARTS if any(_share(row, name) > 0 for row in known)]
    shown = known[:MOST_BARS]
    highest = max(1.0, *(sum(_share(row, name) for name in used) for row in shown))
    measured = [(f"{_PARTS[name]} ms", _milliseconds(name)) for name in used]
    columns, cells, texts = table(known, summary.ranks, [("step ms", wording.step_ms), *measured])
    return Figure(
        anchor="parts",
        title="Where the step goes",
        note="Shares of the step time. The parts come from instrumented steps after the timed "
        "ones, each from the rank where it is longest, so they need not add up to 100 %."
        + first_of(len(shown), len(known)),
        legend=[Entry(label=_PARTS[name], color=_COLORS[name]) for name in used],
        panels=bar_panels(shown, summary.ranks, _values, lambda y: [_layer(used, highest, y)]),
        columns=columns,
        rows=cells,
        texts=texts,
    )


def _share(row: Row, name: str) -> float:
    known = wording.known(row[name]) and wording.known(row["step_ms_p50"])
    return float(row[name] / row["step_ms_p50"]) if known else 0.0


def _milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: wording.part_ms(row[name], row["step_ms_p50"])


def _values(row: Row) -> list[Value]:
    values: list[Value] = []
    start = 0.0
    for name, told in _PARTS.items():
        share = _share(row, name)
        if share > 0:
            tip = f"{told}: {wording.duration(row[name])}, {wording.percent(share)} of the step"
            values.append({"part": name, "low": start, "high": start + share, "tip": tip})
        start += share
    return values


def _layer(used: Sequence[str], highest: float, y: Spec) -> Spec:
    return {
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "low",
                "type": "quantitative",
                "title": "share of the step",
                "scale": {"domain": [0, highest], "nice": False},
                "axis": {"format": "~%", "tickCount": 5},
            },
            "x2": {"field": "high"},
            "y": y,
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": list(used), "range": [_COLORS[name] for name in used]},
                "legend": None,
            },
            "description": TOLD,
        },
    }
