"""A health check as pictures: the map of all pairs, and a strip of tests for each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from raybench.health.report import UNHEALTHY, HealthReport
from raybench.health.tables import ends_of, link_sets, marks_of_links, short_names
from raybench.records.health import Finding, Link, Verdict, figure
from raybench.report import formatting, plain_text
from raybench.report.charts.figure import (
    TIP,
    Entry,
    Figure,
    Panel,
    Spec,
    Table,
    Value,
    specification,
)
from raybench.report.charts.lines import level_layer
from raybench.stats.fleet import BAD_RATIO

# Each cell is an element of the page.
_MOST_ENDS, _MOST_MAPS, _MOST_STRIPS = 32, 6, 40
# Figures stand in the cells of maps of up to so many ends.
_MOST_WITH_TEXT = 8
# Differences from the median of pairs alike at which the colour changes, and the colours.
_STEPS = (-0.2, -0.1, -0.05, 0.05, 0.2, 0.5)
_HEAT = tuple(f"var(--h{place})" for place in range(1, len(_STEPS) + 2))
_HEAT_WORDS = (
    "20 % faster or more",
    "10 to 20 % faster",
    "5 to 10 % faster",
    "within 5 %",
    "5 to 20 % slower",
    "20 to 50 % slower",
    "50 % slower or more",
)
_STRONG = (_STEPS[0], _STEPS[-1])
_SHAPES = {
    "as those alike": ("circle", "var(--s1)"),
    "suspect": ("diamond", "var(--s2)"),
    "bad": ("cross", "var(--bad)"),
}
_LEAST_REACH = 0.1


def health_figures(report: HealthReport) -> list[Figure]:
    """Draw the pairs, and the tests of each device; those without data are left out."""
    found = (_pair_figure(report), _strip_figure(report))
    return [one for one in found if one is not None]


def _pair_figure(report: HealthReport) -> Figure | None:
    """Draw a map of each way to send, from and to; None where nothing was sent."""
    panels: list[Panel] = []
    cells: list[list[str]] = []
    for (kind, message_bytes), links in link_sets(report).items():
        for unit, values in (
            ("GB/s", _values(links, "gb_per_s")),
            ("µs", _values(links, "latency_us")),
        ):
            names = ends_of(links)
            if len(values) < 2 or "host" in names:
                continue
            title = f"{kind} of {formatting.size(message_bytes)}, {unit}"
            marks = marks_of_links(report, kind, unit)
            panels.append(Panel(title=title, spec=_map(values, names, unit, marks)))
            cells += [
                [title, names[first], names[second], figure(value)]
                for (first, second), value in values.items()
            ]
    if not panels:
        return None
    left_out = len(panels) - _MOST_MAPS
    return Figure(
        anchor="pairs",
        title="Pairs",
        note="From the device of the row to that of the column. Colours: the time against the "
        "median of the pairs alike, those on a node and those between nodes apart. ! bad, "
        f"? suspect.{f' {left_out} more maps are in the table.' if left_out > 0 else ''}",
        legend=[
            Entry(label=word, color=color) for word, color in zip(_HEAT_WORDS, _HEAT, strict=True)
        ],
        panels=panels[:_MOST_MAPS],
        table=Table(columns=["what", "from", "to", "value"], rows=cells, texts=3),
        is_wide=True,
    )


def _values(links: Sequence[Link], field: str) -> dict[tuple[str, str], float]:
    return {
        (link.from_uuid, link.to_uuid): value
        for link in links
        if (value := getattr(link, field)) is not None
    }


def _map(
    values: Mapping[tuple[str, str], float],
    names: Mapping[str, str],
    unit: str,
    marks: Mapping[tuple[str, str], str],
) -> Spec:
    drawn = dict(list(names.items())[:_MOST_ENDS])
    short = dict(zip(drawn, short_names(list(drawn.values())), strict=True))
    typical = _typical(values, names)
    has_figures = len(drawn) <= _MOST_WITH_TEXT
    cells: list[Value] = []
    for (first, second), value in values.items():
        if first not in drawn or second not in drawn:
            continue
        middle = typical[_is_inside(first, second, names)]
        excess = (value / middle if unit == "µs" else middle / max(value, 1e-300)) - 1
        mark = marks.get((first, second), "")
        words = f"{figure(value)} {unit}, {abs(excess):.0%} {'slower' if excess > 0 else 'faster'}"
        cells.append(
            {
                "from": short[first],
                "to": short[second],
                "excess": round(excess, 4),
                "text": f"{mark} {figure(value)}".strip() if has_figures else mark,
                "tip": f"{names[first]} to {names[second]}\n{words} than the median alike",
            }
        )
    labels = [short[uuid] for uuid in drawn]
    height = max(120, min(520, 30 * len(labels) + 40))
    return specification(cells, _map_layers(labels), height=height)


def _is_inside(first: str, second: str, names: Mapping[str, str]) -> bool:
    return names[first].partition(" ")[0] == names[second].partition(" ")[0]


def _typical(
    values: Mapping[tuple[str, str], float], names: Mapping[str, str]
) -> dict[bool, float]:
    """Take the medians of the pairs on a node and of those between nodes."""
    found: dict[bool, list[float]] = {}
    for (first, second), value in values.items():
        found.setdefault(_is_inside(first, second, names), []).append(value)
    return {is_inside: median(some) for is_inside, some in found.items()}


def _map_layers(labels: Sequence[str]) -> list[Spec]:
    axis = {"ticks": False, "domain": False, "labelOverlap": len(labels) > _MOST_WITH_TEXT}
    place: Spec = {
        "x": {
            "field": "to",
            "type": "nominal",
            "sort": list(labels),
            "title": "to",
            "axis": {**axis, "orient": "top", "labelAngle": 0 if len(labels) <= 4 else -45},
        },
        "y": {
            "field": "from",
            "type": "nominal",
            "sort": list(labels),
            "title": None,
            "axis": axis,
        },
    }
    color = {
        "field": "excess",
        "type": "quantitative",
        "scale": {"type": "threshold", "domain": list(_STEPS), "range": list(_HEAT)},
        "legend": None,
    }
    rects: Spec = {
        "mark": {"type": "rect", "stroke": "var(--page)", "strokeWidth": 2},
        "encoding": {**place, "color": color, "description": TIP},
    }
    low, high = _STRONG
    strong = f"datum.excess < {low} || datum.excess >= {high}"
    texts: Spec = {
        "mark": {"type": "text", "fontSize": 12, "aria": False},
        "encoding": {
            **place,
            "text": {"field": "text", "type": "nominal"},
            "color": {
                "condition": {"test": strong, "value": "var(--page)"},
                "value": "var(--text)",
            },
        },
    }
    return [rects, texts]


def _strip_figure(report: HealthReport) -> Figure | None:
    """Draw the time of each test against those alike; None where nothing was compared."""
    compared = [
        one for one in report.findings if one.subject.kind == "device" and one.ratio is not None
    ]
    order = [case.subject.name for case in report.cases if case.subject.kind == "device"]
    names = list(dict.fromkeys([*order, *(one.subject.name for one in compared)]))
    names = [name for name in names if any(one.subject.name == name for one in compared)]
    if not compared:
        return None
    shown = names[:_MOST_STRIPS]
    if len(names) <= _MOST_STRIPS:
        shown = [device.name for device in report.devices if device.name in names]
    short = dict(zip(shown, short_names(shown), strict=True))
    values = [_strip_value(one, short) for one in compared if one.subject.name in short]
    level = " The dashed line is where it is bad." if _reach(values) > BAD_RATIO else ""
    left_out = f" The first {len(shown)} of {len(names)}." if len(shown) < len(names) else ""
    return Figure(
        anchor="devices",
        title="Devices",
        note="Each mark is a test: the time that the device takes, against the median of those "
        f"alike, or the fastest of fewer than four. Above 1 is slower.{level}{left_out}",
        legend=[
            Entry(label=word, color=color, shape=shape) for word, (shape, color) in _SHAPES.items()
        ],
        panels=[Panel(title="", spec=_strips(values, list(short.values())))],
        table=Table(
            columns=["device", "test", "value", "unit", "time against those alike", "verdict"],
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


def _strip_value(one: Finding, short: Mapping[str, str]) -> Value:
    words = {Verdict.BAD: "bad", Verdict.SUSPECT: "suspect"}
    value = "" if one.value is None else f"{figure(one.value)} {one.unit}"
    return {
        "device": short[one.subject.name],
        "ratio": round(min(one.ratio or 1.0, 100.0), 4),
        "is": words.get(one.verdict, "as those alike"),
        "first": one.verdict in UNHEALTHY,
        "tip": plain_text.plain(f"{one.subject.name}, {one.test}:")
        + f"\n{value}, {one.ratio:.2f} times the time of those alike",
    }


def _reach(values: Sequence[Value]) -> float:
    """Find the slowest time, at least as much above 1 as the axis reaches anyhow."""
    return max(1 + _LEAST_REACH, *(float(value["ratio"]) for value in values))


def _strips(values: Sequence[Value], labels: Sequence[str]) -> Spec:
    least = min(1 - _LEAST_REACH, *(value["ratio"] for value in values))
    domain = [least * 0.99, _reach(values) * 1.01]
    ticks = [0.25, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30, 100]
    x: Spec = {
        "field": "ratio",
        "type": "quantitative",
        "title": "time against those alike",
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {"values": [t for t in ticks if domain[0] <= t <= domain[1]], "format": "~g"},
    }
    y: Spec = {
        "field": "device",
        "type": "nominal",
        "sort": list(labels),
        "title": None,
        "axis": {"ticks": False, "domain": False, "grid": True},
    }
    words = list(_SHAPES)

    def by(place: int) -> Spec:
        found = [_SHAPES[word][place] for word in words]
        return {
            "field": "is",
            "type": "nominal",
            "scale": {"domain": words, "range": found},
            "legend": None,
        }

    marks: Spec = {
        "mark": {"type": "point", "filled": True, "size": 55, "opacity": 0.85},
        "encoding": {"x": x, "y": y, "shape": by(0), "color": by(1), "description": TIP},
    }
    layers = [level_layer(BAD_RATIO, "x", x), marks] if _reach(values) > BAD_RATIO else [marks]
    return specification(values, layers, height=max(110, min(900, 22 * len(labels) + 60)))
