"""The section of the regions that a step names itself, such as `attention` in a user's class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raybench.analysis.step_times import SlowestRegion
from raybench.report import formatting
from raybench.report.blocks import Column, ColumnOf, Table
from raybench.report.sections import Section
from raybench.report.tables import table_of_points

if TYPE_CHECKING:
    from raybench.report.summary import Summary

_NOTE = (
    "Regions: parts that the step names itself, each on the rank where it takes longest, and their "
    "share of the instrumented step in which they were timed."
)


def share_of_step(region: SlowestRegion) -> str:
    """Return the share of the step that a region takes, as a percentage; empty where not known."""
    return "" if region.share_pct is None else formatting.percent(region.share_pct / 100)


def _tables(report: Summary) -> Iterator[Table]:
    """Yield a table with a line for each region of a point."""
    unit = report.unit
    columns: list[ColumnOf[SlowestRegion]] = [
        (Column(title="region", is_text=True), lambda region: region.region),
        (Column(title="time"), lambda region: formatting.part(region.region_ms, unit)),
        (Column(title="of step"), share_of_step),
    ]
    lines = [
        (row, region) for row in report.ordered for region in report.regions.get(row.point_id, ())
    ]
    kind = f"regions of the step, {unit.name}"
    yield table_of_points(report, lines, columns, kind=kind, note=_NOTE)


SECTION = Section(
    anchor="regions",
    title="Regions of the step",
    order=50,
    applies=lambda report: bool(report.regions),
    blocks=_tables,
)
