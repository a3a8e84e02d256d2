"""The settings that tell points from each other, as columns and as names. Pure.

Points of one workload have a column for each setting that varies. Those of several workloads, as
of a health check, differ in most settings: one column holds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raybench.analysis.settings import HasSettings, setting, varying
from raybench.report import formatting
from raybench.report.blocks import SETTING_CHARS, Column


class _Row(HasSettings, Protocol):
    """A point of a run, or of two runs."""

    @property
    def point_id(self) -> str:
        """Return the id of the point."""
        ...

    @property
    def workload(self) -> str:
        """Return the name or the class of the workload."""
        ...


def setting_columns(rows: Sequence[_Row]) -> list[tuple[Column, list[str]]]:
    """Return a column for each setting that varies, with the text of each point."""
    if not _are_of_several(rows):
        found = {
            formatting.heading(name): [formatting.setting(name, setting(row, name)) for row in rows]
            for name in varying(rows, params_first=True)
        }
    else:
        found = {
            "workload": [str(row.workload) for row in rows],
            "settings": [formatting.settings(own) for own in _own_settings(rows)],
        }
    return [
        (
            Column(
                title=title,
                is_text=True,
                is_setting=True,
                # A workload is never folded.
                min_chars=None if title == "workload" else SETTING_CHARS,
            ),
            cells,
        )
        for title, cells in found.items()
    ]


def point_names(rows: Sequence[_Row]) -> list[str]:
    """Return a name for each point, from the settings that vary, or its id where none does."""
    columns = setting_columns(rows)
    if _are_of_several(rows):
        cells = zip(*(texts for _, texts in columns), strict=True)
        return [" ".join(filter(None, texts)) for texts in cells]
    return [
        formatting.settings({column.title: cells[place] for column, cells in columns})
        or str(row.point_id)
        for place, row in enumerate(rows)
    ]


def _are_of_several(rows: Sequence[_Row]) -> bool:
    return len({row.workload for row in rows}) > 1


def _own_settings(rows: Sequence[_Row]) -> list[dict[str, str]]:
    """Find the settings of each row that vary among those of its workload."""
    names = {
        workload: varying([row for row in rows if row.workload == workload], params_first=True)
        for workload in {row.workload for row in rows}
    }
    return [
        {
            formatting.heading(name): formatting.setting(name, value)
            for name in names[row.workload]
            if (value := setting(row, name)) not in (None, "")
        }
        for row in rows
    ]
