"""The picture of a search for the largest batch: peak memory over the batch size, in Vega-Lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.scaling import setting, setting_order
from raybench.errors import UsageError
from raybench.report import wording
from raybench.report.charts import CONFIG, LONE, SCHEMA, Spec, machine_line, told_apart
from raybench.report.largest_batches import label, settings_of_series
from raybench.report.summary import Summary

_GIB = 2**30

Row = Mapping[str, Any]


def has_largest_batches(summary: Summary) -> bool:
    """Whether this is the picture that suits the run."""
    return bool(summary.largest_batches)


def memory_chart(summary: Summary) -> Spec:
    """Peak of the allocated device memory over the batch size, both linear: the slope is what an
    item needs, and the line meets the axis at what model and optimizer need. A dashed line stands
    where memory runs out.

    Raises UsageError where no peak is known, as on CPU workers.
    """
    rows = [{str(k): v for k, v in row.items()} for row in summary.scaling.to_dict("records")]
    names = settings_of_series(rows)
    rows.sort(key=lambda row: [setting_order(setting(row, n)) for n in (*names, "batch_size")])
    values = _values(rows, names, summary.ranks)
    if not values:
        raise UsageError("--chart: draws peak device memory, of which the run knows nothing")
    color, shape = told_apart(list(dict.fromkeys(value["line"] for value in values)))
    y = {"field": "peak_gib", "type": "quantitative", "title": "peak memory, GiB"}
    return {
        "$schema": SCHEMA,
        "background": "white",
        "title": _title(summary),
        "width": LONE[0],
        "height": LONE[1],
        "config": CONFIG | {"legend": {**CONFIG["legend"], "orient": "right", "columns": 1}},
        "encoding": {"x": _x(), "color": color},
        "layer": [
            {
                "data": {"values": _ends(summary)},
                "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5},
            },
            {
                "data": {"values": values},
                "mark": {
                    "type": "line",
                    "strokeWidth": 2,
                    "point": {"filled": True, "size": 55, "opacity": 1},
                },
                "encoding": {"y": y, "shape": shape},
            },
        ],
    }


def _values(rows: Sequence[Row], names: Sequence[str], ranks: str) -> list[dict[str, Any]]:
    return [
        {
            "batch_size": int(row["batch_size"]),
            "peak_gib": round(row["peak_mem_allocated_bytes"] / _GIB, 4),
            "line": label({name: setting(row, name) for name in names}, ranks),
        }
        for row in rows
        if row["status"] == "ok" and wording.known(row["peak_mem_allocated_bytes"])
    ]


def _ends(summary: Summary) -> list[dict[str, Any]]:
    return [
        {"batch_size": one.ran_out, "line": label(one.settings, summary.ranks)}
        for one in summary.largest_batches
    ]


def _title(summary: Summary) -> Spec:
    return {
        "text": f"Memory over batch size ({wording.plain(summary.run.job_name)})",
        "subtitle": [machine_line(summary), "dashed: the smallest batch that runs out of memory"],
        "anchor": "start",
    }


def _x() -> Spec:
    return {
        "field": "batch_size",
        "type": "quantitative",
        "title": "batch size per device",
        "scale": {"zero": True, "nice": False},
    }
