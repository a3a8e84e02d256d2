"""The section of a module beside what it is a part of: points of one workload differ in `scope`.

A parameter of that name says how much of the whole a step runs: a block, a forward pass, a loop.
Their steps, cold and warm, and their speed-ups stand beside each other, and a sentence says what
the whole loses that the module does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raybench.analysis.losses import CAUSES, LOSSES, has_causes
from raybench.analysis.rows import ScaledRow
from raybench.analysis.settings import setting, varying
from raybench.report import formatting
from raybench.report.blocks import MARKS_TITLE, Column, ColumnOf, Listing, Table
from raybench.report.marks import marks
from raybench.report.sections import Section
from raybench.report.tables import table_of_points

if TYPE_CHECKING:
    from raybench.report.summary import Summary


SCOPE = "scope"
_TITLE = "Module beside end to end"
# A cause that takes a smaller share of both steps is not worth a word.
_MIN_SHARE = 0.01
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


def _other_settings(rows: Sequence[ScaledRow]) -> list[str]:
    """Return the settings besides scope and world_size in which the points differ."""
    return varying(rows, (SCOPE, "world_size", "workload"))


def _baselines(rows: Sequence[ScaledRow]) -> dict[int, ScaledRow]:
    """Return the baseline point of each series."""
    return {row.series: row for row in rows if row.is_baseline and row.status == "ok"}


def _table(rows: Sequence[ScaledRow], report: Summary) -> Table:
    scopes = _scopes(rows)
    lines = sorted(
        ((row, row) for row in report.ordered if row in rows and row.status == "ok"),
        key=lambda line: scopes.index(line[0].params[SCOPE]),
    )
    bases = _baselines(rows)
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


def _lines(rows: Sequence[ScaledRow], ranks: str) -> Iterator[tuple[str, str]]:
    """Yield (settings, gains of module and whole) for points on the most ranks."""
    compared = [row.world_size for row in rows if row.speed_up is not None]
    most = max(compared, default=1)
    chosen = [row for row in rows if row.world_size == most and row.status == "ok"]
    names, scopes, bases = _other_settings(chosen), _scopes(rows), _baselines(rows)
    groups: dict[tuple[str, ...], dict[str, ScaledRow]] = {}
    for row in chosen:
        key = tuple(str(setting(row, name)) for name in names)
        groups.setdefault(key, {})[row.params[SCOPE]] = row
    for found in groups.values():
        measured = [found[scope] for scope in scopes if scope in found]
        known = [row for row in measured if row.speed_up is not None]
        if most > 1 and len(known) > 1:
            title = formatting.settings_words(known[0], [*names, "world_size"], ranks)
            yield title, "; ".join(_phrases(known, bases))


def _phrases(known: Sequence[ScaledRow], bases: Mapping[int, ScaledRow]) -> Iterator[str]:
    """Yield the gains of all scopes, what module and whole lose, the cold gain and the memory."""
    module, whole = known[0], known[-1]
    names = [row.params[SCOPE] for row in (module, whole)]
    yield ", ".join(f"{row.params[SCOPE]} {formatting.ratio(row.speed_up)}x" for row in known)
    causes = [
        f"{_percent(getattr(module, cause))} and {_percent(getattr(whole, cause))} to "
        f"{'what is not explained' if cause == 'lost_unexplained' else CAUSES[cause]}"
        for cause in LOSSES
        if any(abs(getattr(row, cause) or 0.0) >= _MIN_SHARE for row in (module, whole))
    ]
    if causes and all(map(has_causes, (module, whole))):
        yield f"of their steps {names[0]} and {names[1]} lose {', '.join(causes)}"
    gain = _cold_gain(whole, bases)
    if gain is not None and whole.first_step_ms and whole.step_ms_p50:
        longer = formatting.ratio(whole.first_step_ms / whole.step_ms_p50)
        yield (
            f"cold, {names[1]} gains {formatting.ratio(gain)}x: its first step takes {longer} "
            "times a later one"
        )
    base = bases.get(whole.series)
    memory = [formatting.gib(row.peak_mem_allocated_bytes) for row in (whole, base) if row]
    if len(memory) == 2 and all(memory):
        yield f"{memory[0]} GiB a device, {memory[1]} at the baseline"


def _percent(share: Any) -> str:
    return formatting.percent(share) or "an unknown share"


def _blocks(report: Summary) -> Iterator[Listing | Table]:
    groups = _workloads(report.rows)
    if lines := [line for group in groups for line in _lines(group, report.ranks)]:
        baseline = formatting.settings(report.run.baseline)
        yield Listing(title=f"{_TITLE}, gains over {baseline}", lines=lines)
    yield from (_table(group, report) for group in groups)


SECTION = Section(
    anchor="scopes",
    title=_TITLE,
    order=40,
    applies=lambda report: bool(_workloads(report.rows)),
    blocks=_blocks,
)
