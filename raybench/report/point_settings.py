"""What tells points from each other, as columns and as names. Pure.

Points of one workload have a column for each setting that varies. Those of several workloads, as
of a health check, differ in most of them: they have one column of those that are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raybench.analysis.settings import setting, varying
from raybench.report import formatting

Row = Any


def setting_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Write the settings that vary, a column each by its heading."""
    if not _are_of_several(rows):
        return {
            formatting.heading(name): [formatting.setting(name, setting(row, name)) for row in rows]
            for name in varying(rows, params_first=True)
        }
    return {
        "workload": [formatting.setting("workload", row["workload"]) for row in rows],
        "settings": [formatting.settings(own) for own in _own_settings(rows)],
    }


def point_names(rows: Sequence[Row]) -> list[str]:
    """Name points by the settings that tell them from the others, or else by their ids."""
    columns = setting_columns(rows)
    if _are_of_several(rows):
        cells = zip(*columns.values(), strict=True)
        return [" ".join(filter(None, texts)) for texts in cells]
    return [
        formatting.settings({heading: cells[place] for heading, cells in columns.items()})
        or str(row["point_id"])
        for place, row in enumerate(rows)
    ]


def _are_of_several(rows: Sequence[Row]) -> bool:
    return len({row["workload"] for row in rows}) > 1


def _own_settings(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Find the settings of each row that vary among those of its workload."""
    names = {
        workload: varying([row for row in rows if row["workload"] == workload], params_first=True)
        for workload in {row["workload"] for row in rows}
    }
    return [
        {
            formatting.heading(name): formatting.setting(name, value)
            for name in names[row["workload"]]
            if formatting.has_value(value := setting(row, name)) and value != ""
        }
        for row in rows
    ]
