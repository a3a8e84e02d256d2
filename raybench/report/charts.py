"""The picture of a scaling report: speed-up against ideal, as a Vega-Lite specification."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.scaling import setting_order
from raybench.errors import UsageError
from raybench.report import wording
from raybench.report.summary import Summary, ranks_word

Spec = dict[str, Any]

# Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is lost on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_VEGA_LITE = "5.21"
_WIDTH = 800
# What the axis and its title take of the width, and the gap between two panels.
_AXIS, _GAP = 70, 16
_PANELS_A_ROW = 4
# The size of a lone panel; its legend stands beside it.
LONE = (500, 330)
# The share of a doubling by which the axes reach beyond the outermost points.
_MARGIN = 0.12
# Up to so many lines are told apart in one panel.
_LINES = 4
_BATCH = {"weak": "batch {} per device", "strong": "global batch {}"}


def speed_up_chart(summary: Summary) -> Spec:
    """Speed-up over the ranks, both in powers of two, with the ideal as a dashed line.

    One line per combination of settings; many lines are split into panels, a colour then means
    the same batch in each. Raises UsageError when there is no speed-up over world_size to draw.
    """
    rows = _rows(summary)
    ranks = ranks_word(rows)
    labels = _labels(rows)
    values = [
        {
            "world_size": row["world_size"],
            "speed_up": round(row["speed_up"], 4),
            "line": line,
            "panel": panel,
        }
        for row, (panel, line) in zip(rows, labels, strict=True)
    ]
    panels = _in_order(value["panel"] for value in values)
    lines = _in_order(value["line"] for value in values)
    return _specification(summary, values, panels, lines, ranks)


def render(spec: Spec, kind: str) -> bytes:
    """The picture as `svg` or `png`; a PNG has two pixels for each of the layout."""
    import vl_convert

    if kind == "svg":
        return str(vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE)).encode()
    return bytes(vl_convert.vegalite_to_png(spec, vl_version=_VEGA_LITE, scale=2))


def _rows(summary: Summary) -> list[dict[str, Any]]:
    """The points to draw, in the order of their settings."""
    if "world_size" not in summary.run.baseline:
        raise UsageError(
            "--chart: draws speed-up over world_size, which the baseline does not name"
        )
    frame = summary.scaling[summary.scaling["speed_up"].notna()]
    rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    if len({row["world_size"] for row in rows}) < 2:
        reasons = "; ".join(said.text for said in summary.without_speed_up) or "too few points"
        raise UsageError(f"--chart: there is no speed-up to draw: {reasons}")
    names = ("workload", "scaling", "precision", "batch", "world_size")
    return sorted(rows, key=lambda row: [setting_order(row[name]) for name in names])


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Panel and line of each row: the settings that vary; the batch stays on the line."""
    params = _varying_params(rows)
    rest = [
        [row["workload"], row["precision"], *(row["params"].get(n) for n in params)] for row in rows
    ]
    varying = [place for place in range(len(rest[0])) if len({r[place] for r in rest}) > 1]
    names = ["", "", *(f"{name}=" for name in params)]
    panels = [
        ", ".join(wording.plain(f"{names[place]}{values[place]}") for place in varying)
        for values in rest
    ]
    batches = [_BATCH[row["scaling"]].format(row["batch"]) for row in rows]
    if len(set(zip(panels, batches, strict=True))) > _LINES and len(set(batches)) > 1:
        return list(zip(panels, batches, strict=True))
    whole = [", ".join(filter(None, pair)) for pair in zip(panels, batches, strict=True)]
    return [("", line) for line in whole]


def _varying_params(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row["params"])
    return [name for name in names if len({row["params"].get(name) for row in rows}) > 1]


def _in_order(texts: Any) -> list[str]:
    return list(dict.fromkeys(texts))


def _specification(
    summary: Summary,
    values: Sequence[Mapping[str, Any]],
    panels: Sequence[str],
    lines: Sequence[str],
    ranks: str,
) -> Spec:
    columns = min(len(panels), _PANELS_A_ROW)
    width = (_WIDTH - _AXIS - _GAP * (columns - 1)) // columns
    layers = {"layer": _layers(summary, values, lines, ranks)}
    common = {
        "$schema": SCHEMA,
        "background": "white",
        "title": _title(summary),
        "data": {"values": list(values)},
        "config": CONFIG,
    }
    if len(panels) == 1:
        legend = {"legend": {**CONFIG["legend"], "orient": "right", "columns": 1}}
        lone = {"width": LONE[0], "height": LONE[1], "config": CONFIG | legend}
        return common | lone | layers
    header = {"title": None, "labelFontSize": 13, "labelFontWeight": "bold", "labelPadding": 4}
    return common | {
        "facet": {"field": "panel", "type": "nominal", "sort": list(panels), "header": header},
        "columns": columns,
        "spacing": _GAP,
        "spec": {"width": width, "height": max(180, round(width * 0.9)), **layers},
    }


def _layers(
    summary: Summary, values: Sequence[Mapping[str, Any]], lines: Sequence[str], ranks: str
) -> list[Spec]:
    sizes = sorted({value["world_size"] for value in values})
    base = float(summary.run.baseline["world_size"])
    ideal = [{"world_size": size, "speed_up": size / base} for size in sizes]
    speed_ups = [value["speed_up"] for value in [*values, *ideal]]
    against = wording.settings(summary.run.baseline)
    x = _axis("world_size", ranks, sizes, sizes)
    y = _axis("speed_up", f"speed-up over {against}", _powers_of_two(speed_ups), speed_ups)
    color, shape = told_apart(lines)
    return [
        {
            "data": {"values": ideal},
            "mark": {"type": "line", "color": "#8a8a8a", "strokeDash": [5, 4], "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y},
        },
        {
            "mark": {
                "type": "line",
                "strokeWidth": 2,
                "point": {"filled": True, "size": 55, "opacity": 1},
            },
            "encoding": {
                "x": x,
                "y": y,
                "color": color,
                "shape": shape,
            },
        },
    ]


def told_apart(lines: Sequence[str]) -> tuple[Spec, Spec]:
    """Colour and shape of each line."""
    common = {"field": "line", "type": "nominal", "sort": list(lines), "title": None}
    colors = {"domain": list(lines), "range": _cycled(COLORS, len(lines))}
    shapes = {"domain": list(lines), "range": _cycled(_SHAPES, len(lines))}
    return {**common, "scale": colors}, {**common, "scale": shapes}


def _axis(field: str, title: str, ticks: Sequence[float], reached: Sequence[float]) -> Spec:
    domain = [min(reached) / 2**_MARGIN, max(reached) * 2**_MARGIN]
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "base": 2, "domain": domain, "nice": False},
        "axis": {"values": list(ticks), "format": "~g"},
    }


def _powers_of_two(reached: Sequence[float]) -> list[float]:
    first, last = math.floor(math.log2(min(reached))), math.ceil(math.log2(max(reached)))
    return [2.0**power for power in range(first, last + 1)]


def _cycled(values: Sequence[str], count: int) -> list[str]:
    return [values[place % len(values)] for place in range(count)]


def _title(summary: Summary) -> Spec:
    workloads = ", ".join(_in_order(table.workload for table in summary.tables))
    return {
        "text": f"Speed-up of {workloads} ({wording.plain(summary.run.job_name)})",
        "subtitle": [machine_line(summary), "dashed: ideal" + _missing(summary)],
        "anchor": "start",
    }


def machine_line(summary: Summary) -> str:
    """Machine, versions and run."""
    run, found = summary.run, summary.versions
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "nccl") if name in found)
    return "; ".join(filter(None, (summary.machine, versions, wording.plain(run.run_id))))


def _missing(summary: Summary) -> str:
    ended = Counter(status for status in summary.scaling["status"] if status != "ok")
    words = ", ".join(f"{count} {wording.STATUS_WORDS[status]}" for status, count in ended.items())
    return f"; points not shown: {words}" if words else ""


CONFIG: Spec = {
    "font": "sans-serif",
    "title": {"fontSize": 16, "subtitleFontSize": 12, "subtitleColor": "#444444", "offset": 12},
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridColor": "#e4e4e4",
        "domainColor": "#8a8a8a",
        "tickColor": "#8a8a8a",
    },
    "legend": {
        "orient": "top",
        "labelFontSize": 12,
        "symbolSize": 90,
        "labelLimit": 400,
        "columns": 4,
    },
    "view": {"stroke": "#d0d0d0"},
}
