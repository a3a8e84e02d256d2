"""The points of a run as CSV, for spreadsheets and for what reads nothing better."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from raybench.analysis.rows import ScaledRow
from raybench.report.export.points import exported_points
from raybench.report.plain_text import printable
from raybench.report.summary import Summary

# These have a column for each of their keys.
_MAPS = ("params", "workload_metrics")
_PREFIXES = tuple(f"{name}." for name in _MAPS)
_HEADINGS = "workload_headings"
# What a spreadsheet takes for a formula, unless a quote is before it; a number is none.
# https://owasp.org/www-community/attacks/CSV_Injection
_BEGINS_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def export(summary: Summary) -> str:
    """Return a line per point: the columns of `points` and what the report derives.

    A parameter of the workload is a column `params.NAME`, a metric of its own a column
    `workload_metrics.NAME`, `methods` is JSON, a list is joined by "; ", null is empty. UTF-8, a
    comma between cells, a full stop in numbers. A text that a spreadsheet would take for a formula
    begins with a quote.
    """
    rows = [
        point.row
        # In place of `params`, and so for each of _MAPS.
        | {
            f"{one}.{name}": value
            for one in _MAPS
            for name, value in (point.row[one] or {}).items()
        }
        for point in exported_points(summary)
    ]
    names = [field.name for field in fields(ScaledRow) if field.name not in (*_MAPS, _HEADINGS)]
    more = sorted({name for row in rows for name in row if name.startswith(_PREFIXES)})
    return write([*names, *more], rows)


def write(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return these columns of some rows, below a line of their names."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(map(_cell, names))
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return target.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as a cell that no spreadsheet takes for a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    text = "; ".join(map(str, value)) if isinstance(value, list) else value
    if not isinstance(text, str):
        return text
    # Somebody will look at it in a terminal.
    lines = "\n".join(map(printable, text.splitlines()))
    is_formula = text.startswith(_BEGINS_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{lines}" if is_formula else lines
