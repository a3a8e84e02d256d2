"""Where the step goes: a bar of parts for each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raybench.analysis.losses import CAUSES, LOSSES
from raybench.report import formatting
from raybench.report.charts.data import (
    ChartData,
    Row,
    in_order,
    point_name,
)
from raybench.report.charts.grammar import MOST_BARS, Figure, Mark, Table, axis, bar_panels
from raybench.report.charts.ranking import bar_names
from raybench.report.charts.registry import Chart
from raybench.report.point_settings import distinguishing_settings
from raybench.results.metrics.parts import is_slowed_by_one_rank

# What one slow rank takes longer than the others; it is no column, but a share of other parts.
_SLOWER = "slower_ms"
# What follows each other on the slowest rank, in the order of the bars, and the colours.
# Computing is blue; what is lost stands out from it, communication most.
_PARTS = {
    "compute_ms": ("compute", "var(--s1)"),
    "optimizer_ms": ("optimizer", "var(--s6)"),
    "data_ms": ("waiting for data", "var(--s3)"),
    "host_gap_ms": ("waiting for the host", "var(--s4)"),
    "comm_exposed_ms": ("exposed communication", "var(--s2)"),
    _SLOWER: ("one rank slower", "var(--s7)"),
}


def parts_figure(data: ChartData) -> Figure | None:
    """Draw the parts of each step; None where none was broken down, or steps finish no samples."""
    known = in_order([row for row in data.rows if _parts(row)], ("batch", "world_size"))
    if not any(row.throughput is not None for row in known):
        return None
    used = [name for name in _PARTS if any(name in _parts(row) for row in known)]
    shown, names = known[:MOST_BARS], distinguishing_settings(known)
    places = bar_names(shown, data)
    bars = [
        (panel, name, _marks(row, names, data.ranks))
        for row, (panel, name) in zip(shown, places, strict=True)
    ]
    note = (
        "Shares of the step time. The parts come from instrumented steps after the timed ones, on "
        "the slowest rank, so they need not add up to 100 %."
    )
    count = sum(row.why_no_breakdown is not None for row in data.rows)
    if count:
        points = "1 point is" if count == 1 else f"{count} points are"
        note += (
            f" {points} not drawn: their parts exceed the step by more than 10 %, so they are no "
            "breakdown of it."
        )
    if len(shown) < len(known):
        note += f" {len(shown)} of {len(known)} points are drawn; the table has all."
    longest = max(1.0, *(sum(_parts(row).values()) for row in shown))
    scale = {"domain": [0, longest], "nice": False}
    return Figure(
        anchor="parts",
        title="Where the step goes",
        note=note,
        panels=bar_panels(
            bars,
            axis("share of the step", format="~%", scale=scale),
            series=[_PARTS[name][0] for name in used],
            colors=[_PARTS[name][1] for name in used],
            is_stacked=True,
        ),
        table=_table(known, names, data.ranks),
    )


CHARTS = (Chart(draw=parts_figure, place=35),)


def _parts(row: Row) -> dict[str, float]:
    """Return the parts above 0 as shares of the step; empty where they are not known."""
    if row.step_ms_p50 is None:
        return {}
    known = {name: _part_ms(row, name) or 0.0 for name in _PARTS}
    return {name: ms / row.step_ms_p50 for name, ms in known.items() if ms > 0}


def _part_ms(row: Row, name: str) -> float | None:
    """Return a part without what a slow rank takes longer, which is a part of its own."""
    slower_ms = row.straggler_ms or 0.0
    if name == _SLOWER:
        return slower_ms if is_slowed_by_one_rank(row) else None
    value: float | None = getattr(row, name)
    if value is None or not is_slowed_by_one_rank(row):
        return value
    device_ms = slower_ms if row.straggler_device_ms is None else row.straggler_device_ms
    in_part = {"compute_ms": device_ms, "host_gap_ms": slower_ms - device_ms}
    return value - in_part.get(name, 0.0)


def _marks(row: Row, names: Sequence[str], ranks: str) -> list[Mark]:
    marks: list[Mark] = []
    start = 0.0
    for name, share in _parts(row).items():
        part = formatting.duration(_part_ms(row, name) or 0.0)
        tip = f"{point_name(row, names, ranks)}\n{_PARTS[name][0]}: {part}, "
        tip += f"{formatting.percent(share)} of the step"
        marks.append({"x": start, "x2": start + share, "line": _PARTS[name][0], "tip": tip})
        start += share
    return marks


def _table(rows: Sequence[Row], names: Sequence[str], ranks: str) -> Table:
    """List the parts in milliseconds, and what the step loses against perfect scaling."""
    measured: list[tuple[str, Callable[[Row], str]]] = [
        ("step ms", lambda row: formatting.number(row.step_ms_p50)),
        *(
            (
                f"{title} ms",
                lambda row, name=name: formatting.part_ms(_part_ms(row, name), row.step_ms_p50),
            )
            for name, (title, _) in _PARTS.items()
        ),
        *(
            (f"lost: {CAUSES[name]}", lambda row, name=name: formatting.percent(getattr(row, name)))
            for name in LOSSES
        ),
    ]
    cells = [(title, [cell(row) for row in rows]) for title, cell in measured]
    kept = [(title, found) for title, found in cells if any(found)]
    points = [[str(row.point_id), formatting.settings_words(row, names, ranks)] for row in rows]
    return Table(
        columns=["point", "settings", *(title for title, _ in kept)],
        rows=[[*head, *(found[place] for _, found in kept)] for place, head in enumerate(points)],
        texts=2,
    )
