"""The section of all points: step times, where the step goes, memory and traffic."""

from __future__ import annotations

from raybench.report.sections import Section
from raybench.report.tables import point_tables

SECTION = Section(
    anchor="points",
    title="All points",
    order=20,
    applies=lambda report: bool(report.rows),
    blocks=lambda report: point_tables(report),
)
