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


def has_bandwidths(summary: Summary) -> bool:
    """Whether this is the picture that suits the run."""
    return bool(_rows(summary))


def bandwidth_chart(summary: Summary) -> Spec:
    """Bus bandwidth over message size, a line for each of the other settings that vary.

    Raises UsageError when there are fewer than two sizes.
    """
    rows = _rows(summary)
    sizes = sorted({int(row["params"][_SIZE]) for row in rows})
    if len(sizes) < 2:
        raise UsageError("--chart: draws busbw over size_bytes, of which the run has only one")
    values = [
        {"size": int(row["params"][_SIZE]), "busbw": round(row["busbw_gb_s"], 4), "line": line}
        for row, line in zip(rows, _lines(rows), strict=True)
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
        "mark": {
            "type": "line",
            "strokeWidth": 2,
            "point": {"filled": True, "size": 55, "opacity": 1},
        },
        "encoding": {"x": _x(sizes), "y": _y(), "color": color, "shape": shape},
    }


def _rows(summary: Summary) -> list[dict[str, Any]]:
    frame = summary.scaling[summary.scaling["busbw_gb_s"].notna()]
    rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    sized = [row for row in rows if _SIZE in row["params"]]
    return sorted(sized, key=lambda row: setting_order(row["params"][_SIZE]))


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells the line of each row from the others."""
    params = dict.fromkeys(name for row in rows for name in row["params"] if name != _SIZE)
    names = [n for n in params if len({row["params"].get(n) for row in rows}) > 1]
    several = len({row["world_size"] for row in rows}) > 1
    ranks = ranks_word(dict(row) for row in rows)
    lines = []
    for row in rows:
        parts = [wording.plain(row["params"].get(name)) for name in names]
        count = [f"{row['world_size']} {ranks}"] if several or not parts else []
        lines.append(", ".join([*parts, *count]))
    return lines


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
