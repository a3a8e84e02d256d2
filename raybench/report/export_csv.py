"""The points of a run as CSV, for spreadsheets and for what reads nothing better."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from raybench.report import wording
from raybench.report.export_rows import point_rows
from raybench.report.summary import Summary


def export_csv(summary: Summary) -> str:
    """A line per point, the latest attempt: the columns of `points` and what the report derives.

    A parameter of the workload is a column `params.NAME`, `methods` is JSON, a list is joined by
    "; ", null is empty. UTF-8, a comma between cells, a full stop in numbers.
    """
    rows = point_rows(summary)
    names = [str(name) for name in summary.scaling.columns if name != "params"]
    params = sorted({name for row in rows for name in row["params"]})
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow([*names, *(f"params.{name}" for name in params)])
    for row in rows:
        cells = [row[name] for name in names] + [row["params"].get(name) for name in params]
        writer.writerow([_cell(value) for value in cells])
    return target.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    text = "; ".join(map(str, value)) if isinstance(value, list) else value
    if not isinstance(text, str):
        return text
    # Somebody will look at it in a terminal.
    return "\n".join(map(wording.printable, text.splitlines()))
