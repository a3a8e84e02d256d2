"""A module beside what it is a part of: points of one workload that differ in `scope`. Pure.

A parameter of that name says how much of the whole a step runs: a block, a forward pass, a loop.
Their steps, cold and warm, and their speed-ups are read beside each other, and in a sentence what
the whole loses that the module does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.analysis.settings import setting, setting_order, varying
from raybench.report import formatting, plain_text
from raybench.report.document import MARK_COLUMN, Table
from raybench.report.findings import CAUSES, has_causes
from raybench.report.tables import COLD, Layout, marks, without_repeats

Row = Any

SCOPE = "scope"
TITLE = "Module beside end to end"
# Of a step: a cause that takes less in module and whole is not worth a word.
_LEAST_SHARE = 0.01


def scope_tables(rows: Sequence[Row], layout: Layout) -> tuple[Table, ...]:
    """Make a table of each workload whose points differ in scope, from the least scope on."""
    return tuple(_table(group, layout) for group in _workloads(rows))


def scope_findings(rows: Sequence[Row], ranks: str) -> tuple[tuple[str, str], ...]:
    """List (settings, what module and whole gain on the most ranks, and what the whole loses)."""
    return tuple(line for group in _workloads(rows) for line in _findings(group, ranks))


def _workloads(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the points that have a scope by workload, where scopes are to be compared."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if SCOPE in row["params"]:
            groups.setdefault(row["workload"], []).append(row)
    return [group for group in groups.values() if len(_scopes(group)) > 1]


def _scopes(rows: Sequence[Row]) -> list[str]:
    """List the scopes that were measured, from the shortest step on."""
    steps: dict[str, list[float]] = {}
    for row in rows:
        if formatting.has_value(row["step_ms_p50"]):
            steps.setdefault(row["params"][SCOPE], []).append(row["step_ms_p50"])
    return sorted(steps, key=lambda scope: min(steps[scope]))


def _others(rows: Sequence[Row]) -> list[str]:
    """Name the settings besides scope and ranks in which the points differ."""
    return varying(rows, (SCOPE, "world_size", "workload"))


def _bases(rows: Sequence[Row]) -> dict[int, Row]:
    """Find the baseline point of each series."""
    return {row["series"]: row for row in rows if row["is_baseline"] and row["status"] == "ok"}


def _table(rows: Sequence[Row], layout: Layout) -> Table:
    scopes = _scopes(rows)
    # What is compared stands last, as in the other tables.
    others = sorted(_others(rows), key=lambda name: name in layout.compared)
    apart = [name for name in others if name not in layout.compared]
    names = [*apart, SCOPE, "world_size", *others[len(apart) :]]
    measured = [row for row in rows if row["status"] == "ok"]
    ordered = sorted(measured, key=lambda row: [_order(row, name, scopes) for name in names])
    bases = _bases(rows)
    columns = {
        COLD: [_time(row["first_step_ms"]) for row in ordered],
        "warm": [_time(row["step_ms_p50"]) for row in ordered],
        MARK_COLUMN: [marks(row) for row in ordered],
        "cold gain": [formatting.ratio(_cold_gain(row, bases)) for row in ordered],
        "warm gain": [formatting.ratio(row["speed_up"]) for row in ordered],
        "comm": [_share(row, "comm_exposed_ms") for row in ordered],
        "host": [_share(row, "host_gap_ms") for row in ordered],
        "GiB": [formatting.gib(row["peak_mem_allocated_bytes"]) for row in ordered],
    }
    kept = {head: cells for head, cells in columns.items() if any(cells)}
    settings = [[formatting.setting(name, setting(row, name)) for name in names] for row in ordered]
    cells = zip(without_repeats(ordered, settings), *kept.values(), strict=True)
    headings = [layout.ranks if n == "world_size" else formatting.heading(n) for n in names]
    return Table(
        workload=plain_text.plain(rows[0]["workload"]),
        kind=f"{TITLE.lower()}, ms",
        columns=(*headings, *kept),
        settings=len(names),
        rows=tuple((*own, *found) for own, *found in cells),
        optional=("GiB", "host"),
        texts=frozenset({MARK_COLUMN, SCOPE, *headings[: len(apart)]}),
    )


def _order(row: Row, name: str, scopes: Sequence[str]) -> tuple[int, float, str]:
    if name == SCOPE:
        return (0, scopes.index(row["params"][SCOPE]), "")
    return setting_order(setting(row, name))


def _cold_gain(row: Row, bases: Mapping[int, Row]) -> float:
    """Divide the first step of the baseline by that of the point; nan where one is not cold.

    A first step is cold where it found nothing of an earlier point in its processes.
    """
    base = bases.get(row["series"])
    if base is None or not all(
        formatting.has_value(one["first_step_ms"]) and formatting.is_set(one["new_processes"])
        for one in (row, base)
    ):
        return math.nan
    return float(base["first_step_ms"] / row["first_step_ms"])


def _time(time_ms: float) -> str:
    """Write a time in ms: one column holds blocks and loops."""
    return formatting.time_in(formatting.MILLISECONDS, time_ms)


def _share(row: Row, name: str) -> str:
    part, step = row[name], row["step_ms_p50"]
    return formatting.percent(part / step) if formatting.has_value(part) and step else ""


def _findings(rows: Sequence[Row], ranks: str) -> Iterator[tuple[str, str]]:
    """Say it of each group of points that differ in scope alone, on the most ranks."""
    most = max(
        (row["world_size"] for row in rows if formatting.has_value(row["speed_up"])), default=1
    )
    chosen = [row for row in rows if row["world_size"] == most and row["status"] == "ok"]
    names, scopes, bases = _others(chosen), _scopes(rows), _bases(rows)
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in chosen:
        key = tuple(str(setting(row, name)) for name in names)
        groups.setdefault(key, {})[row["params"][SCOPE]] = row
    for found in groups.values():
        measured = [found[scope] for scope in scopes if scope in found]
        known = [row for row in measured if formatting.has_value(row["speed_up"])]
        if most > 1 and len(known) > 1:
            title = formatting.settings_words(known[0], [*names, "world_size"], ranks)
            yield title, "; ".join(_phrases(known, bases))


def _phrases(known: Sequence[Row], bases: Mapping[int, Row]) -> Iterator[str]:
    """Say the gains of all scopes, then what of the step module and whole lose to what."""
    module, whole = known[0], known[-1]
    names = [plain_text.plain(row["params"][SCOPE]) for row in (module, whole)]
    yield ", ".join(
        f"{plain_text.plain(row['params'][SCOPE])} {formatting.ratio(row['speed_up'])}x"
        for row in known
    )
    names_of = CAUSES | {"lost_unexplained": "what is not explained"}
    causes = [
        f"{_percent(module[cause])} and {_percent(whole[cause])} to {names_of[cause]}"
        for cause in LOSSES
        if any(
            formatting.has_value(row[cause]) and abs(row[cause]) >= _LEAST_SHARE
            for row in (module, whole)
        )
    ]
    if causes and all(map(has_causes, (module, whole))):
        yield f"of their steps {names[0]} and {names[1]} lose {', '.join(causes)}"
    if formatting.has_value(gain := _cold_gain(whole, bases)):
        longer = formatting.ratio(whole["first_step_ms"] / whole["step_ms_p50"])
        yield (
            f"cold, {names[1]} gains {formatting.ratio(gain)}x: its first step takes {longer} "
            "times a later one"
        )
    base = bases.get(whole["series"])
    memory = [formatting.gib(row["peak_mem_allocated_bytes"]) for row in (whole, base) if row]
    if len(memory) == 2 and all(memory):
        yield f"{memory[0]} GiB a device, {memory[1]} at the baseline"


def _percent(share: Any) -> str:
    return formatting.percent(share) or "an unknown share"
