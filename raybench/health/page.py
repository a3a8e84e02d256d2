"""A health check as a page, and its charts: the map of pairs, and the tests of each device."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING

from raybench.health.report import HealthReport, PairMap, marked, pair_maps, short_names
from raybench.records.health import Finding, Verdict, figure, is_time
from raybench.report import blocks, formatting, plain_text
from raybench.report.blocks import Column, make_table
from raybench.report.charts.grammar import (
    Figure,
    Mark,
    Panel,
    axis,
    by_threshold,
    heat_panel,
    names_axis,
    scatter_panel,
)
from raybench.report.page import device_table, render
from raybench.stats.outliers import BAD_RATIO

if TYPE_CHECKING:
    import pandas as pd

# Each cell is an element of the page.
_MOST_DEVICES_IN_A_MAP, _MOST_MAPS, _MOST_DEVICES = 32, 6, 40
# A map of fewer devices says less than a line of text.
_LEAST_DEVICES_IN_A_MAP = 4
# Values are written into the cells of maps of up to so many devices.
_MOST_WITH_TEXT = 8
# Differences from the median of similar pairs at which the colour of a cell changes.
_STEPS = (-0.2, -0.1, -0.05, 0.05, 0.2, 0.5)
_LIKE_THE_OTHERS = "like the others"
_SHAPES = {
    _LIKE_THE_OTHERS: ("circle", "var(--s1)"),
    "suspect": ("diamond", "var(--s2)"),
    "bad": ("cross", "var(--bad)"),
}
# The axis of times reaches at least from and to these.
_LEAST_DOMAIN = (0.9, 1.1)
_DEVICES_NOTE = (
    "Each mark is a test: the time that the device takes, against the median of the similar "
    "devices, or the fastest of fewer than four. Above 1 is slower."
)


def format_page(report: HealthReport, devices: pd.DataFrame) -> str:
    """Return the page of a check as HTML, complete in one file.

    devices: the table `devices` of its run.
    """
    found = list(report.body())
    run = report.run
    return render(
        "health.html",
        report=report,
        run=run,
        lines=[one.text for one in found if isinstance(one, blocks.Line)],
        cases=[one for one in found if isinstance(one, blocks.Listing)],
        figures=health_figures(report),
        tables=[one for one in found if isinstance(one, blocks.Table)],
        facts=[
            ("run", run.run_id),
            ("started", formatting.when(run.started_at)),
            ("took", formatting.course(run)),
            ("cluster", run.cluster),
            ("command", " ".join(run.argv)),
            ("versions", formatting.versions(run.versions)),
            ("variables", formatting.settings(run.environment)),
        ],
        devices=device_table(devices),
        course=formatting.course(run),
    )


def health_figures(report: HealthReport) -> list[Figure]:
    """Return the chart of pairs, then that of devices; empty where nothing was compared.

    The chart of pairs is left out where fewer than four devices were paired.
    """
    found = (_pair_figure(report), _device_figure(report))
    return [one for one in found if one is not None]


def _pair_figure(report: HealthReport) -> Figure | None:
    """Return a heat map for each `PairMap` of four devices or more; None where there is none."""
    maps = [one for one in pair_maps(report.findings) if len(one.names) >= _LEAST_DEVICES_IN_A_MAP]
    if not maps:
        return None
    note = (
        "From the device of the row to that of the column. Colours: the time against the median "
        "of the similar pairs, those on a node and those between nodes apart. ! bad, ? suspect."
    )
    if len(maps) > _MOST_MAPS:
        note += f" {len(maps) - _MOST_MAPS} more maps are in the table."
    return Figure(
        anchor="pairs",
        title="Pairs",
        note=note,
        panels=[_heat_map(one) for one in maps[:_MOST_MAPS]],
        table=make_table(
            [
                (one.title, *pair, _value(found))
                for one in maps
                for pair, found in one.findings.items()
            ],
            [
                (Column(title=name, is_text=name != "value"), itemgetter(place))
                for place, name in enumerate(("what", "from", "to", "value"))
            ],
        ),
    )


def _heat_map(pairs: PairMap) -> Panel:
    """Return the heat map of one test: a cell for each pair of the first 32 devices.

    Unhealthy pairs are outlined; up to 8 devices the values are written into the cells.
    """
    drawn = pairs.names[:_MOST_DEVICES_IN_A_MAP]
    short = dict(zip(drawn, short_names(drawn), strict=True))
    has_text = len(drawn) <= _MOST_WITH_TEXT
    similar: dict[str, list[float]] = {}
    for one in pairs.findings.values():
        similar.setdefault(one.test, []).append(one.value or 0.0)
    cells: list[Mark] = []
    for (start, end), one in pairs.findings.items():
        if start not in short or end not in short:
            continue
        value, typical = one.value or 0.0, median(similar[one.test])
        ratio = value / typical if is_time(one.unit) else typical / max(value, 1e-300)
        change = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
        cells.append(
            {
                "x": short[end],
                "y": short[start],
                "excess": round(ratio - 1, 4),
                "text": marked(one) if has_text else marked(replace(one, value=None)),
                "is_marked": one.verdict is not Verdict.HEALTHY,
                "tip": f"{start} to {end}\n{figure(value)} {one.unit}, {change} "
                "than the median of similar pairs",
            }
        )
    labels = list(short.values())
    angle = 0 if len(labels) <= 4 else -45
    shown = {"labelOverlap": not has_text}
    return heat_panel(
        cells,
        names_axis(labels, **shown, orient="top", labelAngle=angle) | {"title": "to"},
        names_axis(labels, **shown),
        by_threshold("excess", _STEPS, "time against the median"),
        title=pairs.title,
        height=max(150, min(550, 30 * len(labels) + 80)),
        inverse=f"datum.excess < {_STEPS[0]} || datum.excess >= {_STEPS[-1]}",
    )


def _device_figure(report: HealthReport) -> Figure | None:
    """Return the chart with a mark for each test of each device, by its time against the others.

    None where no devices were compared. Of more than 40 devices it shows 40, unhealthy ones first.
    """
    compared = [
        one for one in report.findings if one.subject.kind == "device" and one.ratio is not None
    ]
    if not compared:
        return None
    names = shown = list(dict.fromkeys(one.subject.name for one in compared))
    if len(names) > _MOST_DEVICES:
        unhealthy = {case.subject.name for case in report.cases}
        shown = sorted(names, key=lambda name: name not in unhealthy)[:_MOST_DEVICES]
    short = dict(zip(shown, short_names(shown), strict=True))
    marks: list[Mark] = [
        {
            "y": short[one.subject.name],
            "x": round(min(one.ratio or 1.0, 100.0), 4),
            "line": one.verdict.value if one.verdict.is_slow else _LIKE_THE_OTHERS,
            "tip": plain_text.plain(f"{one.subject.name}, {one.test}:")
            + f"\n{_value(one)} {one.unit}, {one.ratio:.2f} times the time of similar devices",
        }
        for one in compared
        if one.subject.name in short
    ]
    times = [mark["x"] for mark in marks]
    domain = [min(_LEAST_DOMAIN[0], *times) * 0.99, max(_LEAST_DOMAIN[1], *times) * 1.01]
    ticks = [0.25, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30, 100]
    panel = scatter_panel(
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
        height=max(110, min(900, 22 * len(short) + 60)),
        level=(BAD_RATIO, "bad") if domain[1] > BAD_RATIO else None,
    )
    more = f" The first {len(shown)} of {len(names)}." if len(shown) < len(names) else ""
    return Figure(
        anchor="devices",
        title="Devices",
        note=_DEVICES_NOTE + more,
        panels=[panel],
        table=make_table(
            compared,
            [
                (Column(title="device", is_text=True), lambda one: one.subject.name),
                (Column(title="test", is_text=True), lambda one: one.test),
                (Column(title="value"), lambda one: f"{_value(one)} {one.unit}".strip()),
                (Column(title="time against similar devices"), lambda one: f"{one.ratio:.3f}"),
                (Column(title="verdict"), lambda one: one.verdict.value),
            ],
        ),
    )


def _value(finding: Finding) -> str:
    return "" if finding.value is None else figure(finding.value)
