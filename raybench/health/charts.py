"""A health check as pictures: the map of all pairs, and a strip of tests for each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from raybench.health.report import HealthReport
from raybench.health.tables import ends_of, link_sets, marks_of_links, short_names
from raybench.records.health import Finding, Link, Verdict, figure
from raybench.report import formatting, plain_text
from raybench.report.charts.grammar import (
    Figure,
    Mark,
    Panel,
    Table,
    axis,
    by_threshold,
    heat_map,
    legend_height,
    names_axis,
    scatter_chart,
)
from raybench.stats.fleet import BAD_RATIO

# Each cell is an element of the page.
_MOST_ENDS, _MOST_MAPS, _MOST_STRIPS = 32, 6, 40
# A map of fewer devices says less than a line of text.
_LEAST_ENDS = 4
# Figures stand in the cells of maps of up to so many ends.
_MOST_WITH_TEXT = 8
# Differences from the median of similar pairs at which the colour of a cell changes.
_STEPS = (-0.2, -0.1, -0.05, 0.05, 0.2, 0.5)
_LIKE_THE_OTHERS = "like the others"
_SHAPES = {
    _LIKE_THE_OTHERS: ("circle", "var(--s1)"),
    "suspect": ("diamond", "var(--s2)"),
    "bad": ("cross", "var(--bad)"),
}
_WORDS = {Verdict.BAD: "bad", Verdict.SUSPECT: "suspect"}
# The axis of times reaches at least so far to both sides of 1.
_LEAST_REACH = 0.1


def health_figures(report: HealthReport) -> list[Figure]:
    """Return the map of pairs, from four devices on, and the tests of each device, where read."""
    found = (_pair_figure(report), _device_figure(report))
    return [one for one in found if one is not None]


def _pair_figure(report: HealthReport) -> Figure | None:
    """Return a map for each way to send; None where nothing was sent, or by fewer than four."""
    panels: list[Panel] = []
    cells: list[list[str]] = []
    for (kind, message_bytes), links in link_sets(report).items():
        for unit, field in (("GB/s", "gb_per_s"), ("µs", "latency_us")):
            values = _values(links, field)
            names = ends_of(links)
            if not values or len(names) < _LEAST_ENDS or "host" in names:
                continue
            title = f"{kind} of {formatting.size(message_bytes)}, {unit}"
            marks = marks_of_links(report, kind, unit)
            panels.append(_map(title, values, names, unit, marks))
            cells += [
                [title, names[first], names[second], figure(value)]
                for (first, second), value in values.items()
            ]
    if not panels:
        return None
    note = (
        "From the device of the row to that of the column. Colours: the time against the median "
        "of the similar pairs, those on a node and those between nodes apart. ! bad, ? suspect."
    )
    if len(panels) > _MOST_MAPS:
        note += f" {len(panels) - _MOST_MAPS} more maps are in the table."
    return Figure(
        anchor="pairs",
        title="Pairs",
        note=note,
        panels=panels[:_MOST_MAPS],
        table=Table(columns=["what", "from", "to", "value"], rows=cells, texts=3),
    )


def _values(links: Sequence[Link], field: str) -> dict[tuple[str, str], float]:
    return {
        (link.from_uuid, link.to_uuid): value
        for link in links
        if (value := getattr(link, field)) is not None
    }


def _map(
    title: str,
    values: Mapping[tuple[str, str], float],
    names: Mapping[str, str],
    unit: str,
    marks: Mapping[tuple[str, str], str],
) -> Panel:
    drawn = dict(list(names.items())[:_MOST_ENDS])
    short = dict(zip(drawn, short_names(list(drawn.values())), strict=True))
    has_text = len(drawn) <= _MOST_WITH_TEXT

    def is_on_a_node(first: str, second: str) -> bool:
        return names[first].partition(" ")[0] == names[second].partition(" ")[0]

    similar: dict[bool, list[float]] = {}
    for (first, second), value in values.items():
        similar.setdefault(is_on_a_node(first, second), []).append(value)
    cells: list[Mark] = []
    for (first, second), value in values.items():
        if first not in drawn or second not in drawn:
            continue
        typical = median(similar[is_on_a_node(first, second)])
        excess = (value / typical if unit == "µs" else typical / max(value, 1e-300)) - 1
        mark = marks.get((first, second), "")
        words = f"{figure(value)} {unit}, {abs(excess):.0%} {'slower' if excess > 0 else 'faster'}"
        cells.append(
            {
                "x": short[second],
                "y": short[first],
                "excess": round(excess, 4),
                "text": f"{mark} {figure(value)}".strip() if has_text else mark,
                "is_marked": bool(mark),
                "tip": f"{names[first]} to {names[second]}\n{words} than the median of similar "
                "pairs",
            }
        )
    labels = list(short.values())
    angle = 0 if len(labels) <= 4 else -45
    shown = {"labelOverlap": not has_text}
    layers = heat_map(
        cells,
        names_axis(labels, **shown, orient="top", labelAngle=angle) | {"title": "to"},
        names_axis(labels, **shown),
        by_threshold("excess", _STEPS, "time against the median"),
        inverse=f"datum.excess < {_STEPS[0]} || datum.excess >= {_STEPS[-1]}",
    )
    return Panel(title=title, layers=layers, height=max(150, min(550, 30 * len(labels) + 80)))


def _device_figure(report: HealthReport) -> Figure | None:
    """Return the time of each test against similar devices; None where nothing was compared."""
    compared = [
        one for one in report.findings if one.subject.kind == "device" and one.ratio is not None
    ]
    if not compared:
        return None
    found = dict.fromkeys(one.subject.name for one in compared)
    suspected = [case.subject.name for case in report.cases if case.subject.kind == "device"]
    names = [name for name in dict.fromkeys((*suspected, *found)) if name in found]
    shown = names[:_MOST_STRIPS]
    if len(names) <= _MOST_STRIPS:
        shown = [device.name for device in report.devices if device.name in found]
    short = dict(zip(shown, short_names(shown), strict=True))
    marks = [_mark(one, short) for one in compared if one.subject.name in short]
    reach = max(1 + _LEAST_REACH, *(mark["x"] for mark in marks))
    domain = [min(1 - _LEAST_REACH, *(mark["x"] for mark in marks)) * 0.99, reach * 1.01]
    ticks = [0.25, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30, 100]
    layers = scatter_chart(
        marks,
        axis(
            "time against similar devices",
            10,
            values=[tick for tick in ticks if domain[0] <= tick <= domain[1]],
            format="~g",
            scale={"domain": domain, "padding": 0},
        ),
        names_axis(list(short.values()), grid=True),
        _SHAPES,
        level=(BAD_RATIO, "bad") if reach > BAD_RATIO else None,
    )
    height = max(110, min(900, 22 * len(short) + 60)) + legend_height(list(_SHAPES))
    note = (
        "Each mark is a test: the time that the device takes, against the median of the similar "
        "devices, or the fastest of fewer than four. Above 1 is slower."
    )
    if len(shown) < len(names):
        note += f" The first {len(shown)} of {len(names)}."
    return Figure(
        anchor="devices",
        title="Devices",
        note=note,
        panels=[Panel(layers=layers, height=height)],
        table=Table(
            columns=["device", "test", "value", "unit", "time against similar devices", "verdict"],
            rows=[
                [
                    one.subject.name,
                    one.test,
                    "" if one.value is None else figure(one.value),
                    one.unit,
                    f"{one.ratio:.3f}",
                    one.verdict.value,
                ]
                for one in compared
            ],
            texts=2,
        ),
    )


def _mark(one: Finding, short: Mapping[str, str]) -> Mark:
    value = "" if one.value is None else f"{figure(one.value)} {one.unit}"
    return {
        "y": short[one.subject.name],
        "x": round(min(one.ratio or 1.0, 100.0), 4),
        "line": _WORDS.get(one.verdict, _LIKE_THE_OTHERS),
        "tip": plain_text.plain(f"{one.subject.name}, {one.test}:")
        + f"\n{value}, {one.ratio:.2f} times the time of similar devices",
    }
