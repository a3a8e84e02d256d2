"""The section of the regions that a step names itself, such as `attention` in a user's class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raybench.report import formatting
from raybench.report.blocks import Column, ColumnOf, Table
from raybench.report.sections import Section
from raybench.report.sections.points import table_of_points

if TYPE_CHECKING:
    from raybench.report.summary import Summary
    from raybench.results.tables import RegionRow

_NAME_CHARS = 20
_NOTE = (
    "Regions: parts that the step names itself, each on the rank where it takes longest, and their "
    "share of the instrumented step in which they were timed."
)


def region_columns(unit: formatting.Unit) -> list[ColumnOf[RegionRow]]:
    """Return the columns of a region: its name, its calls, its time in `unit`, and its share."""
    return [
        (Column(title="region", is_text=True, min_chars=_NAME_CHARS), lambda one: one.region),
        (Column(title="calls"), lambda one: "" if one.calls is None else str(one.calls)),
        (Column(title="time"), lambda one: formatting.part(one.region_ms, unit)),
        (
            Column(title="of step"),
            lambda one: "" if one.share_pct is None else formatting.percent(one.share_pct / 100),
        ),
    ]


def _tables(report: Summary) -> Iterator[Table]:
    """Yield a table with a line for each region of a point."""
    lines = [
        (row, region) for row in report.ordered for region in report.regions.get(row.point_id, ())
    ]
    kind = f"regions of the step, {report.unit.name}"
    yield table_of_points(report, lines, region_columns(report.unit), kind=kind, note=_NOTE)


SECTION = Section(
    anchor="regions",
    title="Regions of the step",
    order=50,
    applies=lambda report: bool(report.regions),
    blocks=_tables,
)
