"""Where the step goes: a bar of parts for each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.report import formatting
from raybench.report.charts.bars import MOST_BARS, bar_panels, first_of
from raybench.report.charts.figure import TIP, Entry, Figure, Spec, Table, Value
from raybench.report.charts.series import Row, in_order, is_other, telling_settings
from raybench.report.findings import CAUSES
from raybench.report.summary import Summary
from raybench.report.tables import has_no_breakdown
from raybench.results.metrics.parts import is_slowed_by_one_rank

# What a rank that stands out takes longer than the others: no column, it is in other parts.
_SLOWER = "slower_ms"
# What follows each other on the slowest rank; the order of the bars.
_PARTS = {
    "compute_ms": "compute",
    "optimizer_ms": "optimizer",
    "data_ms": "waiting for data",
    "host_gap_ms": "waiting for the host",
    "comm_exposed_ms": "exposed communication",
    _SLOWER: "one rank slower",
}
# Computing is blue; what is lost stands out from it, communication most.
_COLORS = dict(zip(_PARTS, (f"var(--s{place})" for place in (1, 6, 3, 4, 2, 7)), strict=True))


def parts_figure(rows: Sequence[Row], summary: Summary) -> Figure | None:
    """None where nothing was broken down, and where a step finishes no samples: it has no parts."""
    known = [row for row in rows if _whole(row) > 0 and not is_other(row)]
    known = in_order(known, ("batch", "world_size"))
    used = [name for name in _PARTS if any(_share(row, name) > 0 for row in known)]
    if not any(formatting.has_value(row["throughput"]) for row in known):
        return None
    shown = known[:MOST_BARS]
    highest = max(1.0, *map(_whole, shown))
    return Figure(
        anchor="parts",
        title="Where the step goes",
        note="Shares of the step time. The parts come from instrumented steps after the timed "
        "ones, on the slowest rank, so they need not add up to 100 %."
        + _omission(rows)
        + first_of(len(shown), len(known)),
        legend=[Entry(label=_PARTS[name], color=_COLORS[name]) for name in used],
        panels=bar_panels(shown, summary.ranks, _values, lambda y, _: [_layer(used, highest, y)]),
        table=_table(known, summary.ranks),
    )


def _omission(rows: Sequence[Row]) -> str:
    count = sum(has_no_breakdown(row) and not is_other(row) for row in rows)
    if not count:
        return ""
    points = "1 point is" if count == 1 else f"{count} points are"
    return (
        f" {points} not drawn: their parts exceed the step by more than 10 %, so they are no "
        "breakdown of it."
    )


def _table(rows: Sequence[Row], ranks: str) -> Table:
    """List the parts in milliseconds, and what the step loses against perfect scaling."""
    names = telling_settings(rows)
    measured: list[tuple[str, Callable[[Row], str]]] = [
        ("step ms", lambda row: formatting.number(row["step_ms_p50"])),
        *(
            (
                f"{_PARTS[name]} ms",
                lambda row, name=name: formatting.part_ms(_part_ms(row, name), row["step_ms_p50"]),
            )
            for name in _PARTS
        ),
        *(
            (f"lost: {CAUSES[name]}", lambda row, name=name: formatting.percent(row[name]))
            for name in LOSSES
        ),
    ]
    cells = [(title, [cell(row) for row in rows]) for title, cell in measured]
    kept = [(title, found) for title, found in cells if any(found)]
    points = [[str(row["point_id"]), formatting.settings_words(row, names, ranks)] for row in rows]
    return Table(
        columns=["point", "settings", *(title for title, _ in kept)],
        rows=[[*head, *(found[place] for _, found in kept)] for place, head in enumerate(points)],
        texts=2,
    )


def _share(row: Row, name: str) -> float:
    """As it is drawn: nothing of what is negative."""
    part_ms = _part_ms(row, name)
    known = formatting.has_value(part_ms) and formatting.has_value(row["step_ms_p50"])
    return max(0.0, float(part_ms / row["step_ms_p50"])) if known else 0.0


def _part_ms(row: Row, name: str) -> Any:
    """Take a part, without what a rank that stands out takes longer, which is one of its own."""
    is_slowed = is_slowed_by_one_rank(row)
    if name == _SLOWER:
        return row["straggler_ms"] if is_slowed else None
    if not is_slowed or not formatting.has_value(row[name]):
        return row[name]
    device_ms = row["straggler_device_ms"]
    in_compute = device_ms if formatting.has_value(device_ms) else row["straggler_ms"]
    if name == "compute_ms":
        return row[name] - in_compute
    return row[name] - (row["straggler_ms"] - in_compute) if name == "host_gap_ms" else row[name]


def _whole(row: Row) -> float:
    return sum(_share(row, name) for name in _PARTS)


def _values(row: Row) -> list[Value]:
    values: list[Value] = []
    start = 0.0
    for name, text in _PARTS.items():
        share = _share(row, name)
        if share > 0:
            part = formatting.duration(_part_ms(row, name))
            tip = f"{text}: {part}, {formatting.percent(share)} of the step"
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
            "description": TIP,
        },
    }
