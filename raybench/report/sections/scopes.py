"""The section of a module beside what it is a part of: points of one workload differ in `scope`.

A parameter of that name says how much of the whole a step runs: a block, a forward pass, a loop.
Their steps, cold and warm, and their speed-ups stand beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raybench.analysis.rows import ScaledRow
from raybench.report import formatting
from raybench.report.blocks import MARKS_TITLE, Column, ColumnOf, Table
from raybench.report.messages import marks
from raybench.report.sections import Section
from raybench.report.sections.points import table_of_points

if TYPE_CHECKING:
    from raybench.report.summary import Summary


SCOPE = "scope"
_TITLE = "Module beside end to end"
_NOTE = (
    "Cold: the first step after the workload was built, on the slowest rank; of several rounds the "
    "median. Warm: the step. Gains: how many times as fast as the baseline; cold only where the "
    "processes of both points were new, which measure.fresh_workers makes them: in others "
    "something is loaded already. Exposed comm, host gap: communication that nothing "
    "hides, and what the device is idle because the host is late, as shares of the step."
)


def _workloads(rows: Sequence[ScaledRow]) -> list[list[ScaledRow]]:
    """Return the points of each workload that was measured in several scopes."""
    groups: dict[str, list[ScaledRow]] = {}
    for row in rows:
        if SCOPE in row.params:
            groups.setdefault(row.workload, []).append(row)
    return [group for group in groups.values() if len(_scopes(group)) > 1]


def _scopes(rows: Sequence[ScaledRow]) -> list[str]:
    """Return the scopes that were measured, that with the shortest step first."""
    steps: dict[str, list[float]] = {}
    for row in rows:
        if row.step_ms_p50 is not None:
            steps.setdefault(row.params[SCOPE], []).append(row.step_ms_p50)
    return sorted(steps, key=lambda scope: min(steps[scope]))


def _table(rows: Sequence[ScaledRow], report: Summary) -> Table:
    """Return a line for each ok point of a workload, the scope with the shortest step first."""
    scopes = _scopes(rows)
    lines = sorted(
        ((row, row) for row in report.ordered if row in rows and row.status == "ok"),
        key=lambda line: scopes.index(line[0].params[SCOPE]),
    )
    bases = {row.series: row for row in rows if row.is_baseline and row.status == "ok"}
    unit = formatting.MILLISECONDS
    columns: list[ColumnOf[ScaledRow]] = [
        (Column(title="cold"), lambda row: formatting.time_in(unit, row.first_step_ms)),
        (Column(title="warm"), lambda row: formatting.time_in(unit, row.step_ms_p50)),
        (Column(title=MARKS_TITLE, is_text=True), marks),
        (Column(title="cold gain"), lambda row: formatting.ratio(_cold_gain(row, bases))),
        (Column(title="warm gain"), lambda row: formatting.ratio(row.speed_up)),
        (Column(title="exposed comm"), lambda row: _share_of_step(row, "comm_exposed_ms")),
        (Column(title="host gap", drop=1), lambda row: _share_of_step(row, "host_gap_ms")),
        (
            Column(title="GiB", drop=0),
            lambda row: formatting.gib(row.peak_mem_allocated_bytes),
        ),
    ]
    kind = f"{_TITLE.lower()}, ms"
    return table_of_points(report, lines, columns, kind=kind, note=_NOTE)


def _cold_gain(row: ScaledRow, bases: Mapping[int, ScaledRow]) -> float | None:
    """Return the first step of the baseline over that of the point; None where one is not cold.

    A first step is cold where it found nothing of an earlier point in its processes.
    """
    base = bases.get(row.series)
    if base is None or not (row.new_processes and base.new_processes):
        return None
    if row.first_step_ms is None or base.first_step_ms is None:
        return None
    return base.first_step_ms / row.first_step_ms


def _share_of_step(row: ScaledRow, name: str) -> str:
    part, step = getattr(row, name), row.step_ms_p50
    return formatting.percent(part / step) if part is not None and step else ""


SECTION = Section(
    anchor="scopes",
    title=_TITLE,
    order=40,
    applies=lambda report: bool(_workloads(report.rows)),
    blocks=lambda report: [_table(group, report) for group in _workloads(report.rows)],
)
