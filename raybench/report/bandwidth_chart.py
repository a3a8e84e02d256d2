"""The picture of a run of collectives: bus bandwidth over message size, in Vega-Lite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.scaling import setting_order
from raybench.errors import UsageError
from raybench.report import wording
from raybench.report.charts import CONFIG, LONE, SCHEMA, Spec, machine_line, told_apart
from raybench.report.summary import Summary, ranks_word

_SIZE = "size_bytes"
# Sizes of powers of two, a label for each factor of 16: 4 KiB, 64 KiB, 1 MiB.
_LABELLED_POWERS = 4
_DASHES = ([1, 0], [6, 4], [2, 3], [1, 4])


def has_bandwidths(summary: Summary) -> bool:
    """Whether this is the picture that suits the run."""
    return bool(_rows(summary))


def bandwidth_chart(summary: Summary) -> Spec:
    """Bus bandwidth over message size, a line for each of the other settings that vary; dashes tell
    the ranks apart.

    Raises UsageError when there are fewer than two sizes.
    """
    rows = _rows(summary)
    sizes = sorted({int(row["params"][_SIZE]) for row in rows})
    if len(sizes) < 2:
        raise UsageError("--chart: draws busbw over size_bytes, of which the run has only one")
    values = [
        {
            "size": int(row["params"][_SIZE]),
            "busbw": round(row["busbw_gb_s"], 4),
            "line": line,
            "ranks": ranks,
        }
        for row, line, ranks in zip(rows, _lines(rows), _ranks(rows), strict=True)
    ]
    color, shape = told_apart(list(dict.fromkeys(value["line"] for value in values)))
    return {
        "$schema": SCHEMA,
        "background": "white",
        "title": {
            "text": f"Bus bandwidth ({wording.plain(summary.run.job_name)})",
            "subtitle": machine_line(summary),
            "anchor": "start",
        },
        "width": LONE[0],
        "height": LONE[1],
        "config": CONFIG | {"legend": {**CONFIG["legend"], "orient": "right", "columns": 1}},
        "data": {"values": values},
        "encoding": {"x": _x(sizes), "y": _y(), "color": color},
        # Two layers: where lines carry points, the legend of the dashes shows points.
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"strokeDash": _dash(rows)}},
            {
                "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
                "encoding": {"shape": shape},
            },
        ],
    }


def _rows(summary: Summary) -> list[dict[str, Any]]:
    frame = summary.scaling[summary.scaling["busbw_gb_s"].notna()]
    rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    sized = [row for row in rows if _SIZE in row["params"]]
    return sorted(sized, key=lambda row: setting_order(row["params"][_SIZE]))


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell the line of each row from the others, the ranks apart."""
    params = dict.fromkeys(name for row in rows for name in row["params"] if name != _SIZE)
    names = [n for n in params if len({row["params"].get(n) for row in rows}) > 1]
    alike = wording.plain(rows[0]["workload"])
    return [", ".join(wording.plain(row["params"].get(n)) for n in names) or alike for row in rows]


def _ranks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    ranks = ranks_word(dict(row) for row in rows)
    return [f"{row['world_size']} {ranks}" for row in rows]


def _dash(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """Solid for the most ranks, then ever shorter dashes."""
    by_size = sorted(zip((row["world_size"] for row in rows), _ranks(rows), strict=True))
    domain = list(dict.fromkeys(ranks for _, ranks in reversed(by_size)))
    dashes = [_DASHES[min(place, len(_DASHES) - 1)] for place in range(len(domain))]
    return {
        "field": "ranks",
        "type": "nominal",
        "title": None,
        "sort": domain,
        "scale": {"domain": domain, "range": dashes},
        "legend": {"symbolSize": 600},
    }


def _x(sizes: Sequence[int]) -> Spec:
    first, last = math.floor(math.log2(sizes[0])), math.ceil(math.log2(sizes[-1]))
    ticks = [2**power for power in range(first, last + 1) if power % _LABELLED_POWERS == 0]
    # Vega has no binary units: the labels come from us.
    names = ", ".join(f"'{tick}': '{wording.size(tick)}'" for tick in ticks)
    return {
        "field": "size",
        "type": "quantitative",
        "title": "message size",
        "scale": {"type": "log", "base": 2, "nice": False},
        "axis": {"values": ticks, "labelExpr": f"{{{names}}}[datum.value]"},
    }


def _y() -> Spec:
    return {
        "field": "busbw",
        "type": "quantitative",
        "title": "busbw, GB/s",
        "scale": {"zero": True},
    }
