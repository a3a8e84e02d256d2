"""The two sides of a comparison: find their runs and compare them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.api.stored_runs import StoredRun, find_stored, load_health
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from raybench.analysis.run_data import RunData
    from raybench.health.comparison import HealthComparison
    from raybench.report.comparison import Comparison

# Number of runs before the newest tagged run in which the tag is searched.
_MOST_TAGGED = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """One side of a comparison, BASE or NEW."""

    newest: StoredRun
    # How the user named the side.
    words: str
    # Whether `words` is a tag.
    is_tag: bool = False
    # The other runs, the oldest first.
    others: Sequence[StoredRun] = ()
    # Runs that have the tag but are not compared, because hardware or software differs from
    # `newest`. The newest first.
    left_out: Sequence[StoredRun] = ()

    @property
    def runs(self) -> Sequence[StoredRun]:
        """Return all runs of the side, the newest last."""
        return (*self.others, self.newest)

    @property
    def ids(self) -> set[tuple[Path, str]]:
        """Return folder and id of each run."""
        return {(run.root.resolve(), run.run_id) for run in self.runs}


def find_side(results: Path, text: str) -> ComparedSide:
    """Find the runs that `text` names: one run, several with commas, or a tag NAME=VALUE.

    Raises:
        ResultsError: there is no such run.
    """
    # Path.exists would raise if `text` is no valid file name.
    if os.path.exists(text):  # noqa: PTH110
        return ComparedSide(newest=find_stored(results, text), words=text)
    if "=" in text:
        return _runs_with_tag(results, text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        return ComparedSide(newest=find_stored(results, text), words=text)
    return side_of([find_stored(results, name) for name in names], text)


def side_of(runs: Sequence[StoredRun], words: str = "") -> ComparedSide:
    """Make a side of runs; duplicates are dropped.

    Args:
        runs: at least one run.
        words: how the user named the side; by default the ids of the runs.
    """
    by_id = {run.run_id: run for run in runs}
    *others, newest = sorted(by_id.values(), key=lambda run: (run.run.started_at, run.run_id))
    return ComparedSide(newest=newest, words=words or ",".join(by_id), others=others)


def _runs_with_tag(results: Path, text: str) -> ComparedSide:
    """Find the newest run with a tag, and earlier runs with the tag, hardware and software."""
    from raybench.analysis.compare import lasting_changes
    from raybench.results import reader

    name, _, value = text.partition("=")
    # The newest run first. This iterator is shared: the search for `others` goes on after `newest`.
    runs = (StoredRun(root=results, run_id=run_id) for run_id in reversed(reader.run_ids(results)))
    newest = next((run for run in runs if run.has_tag(name, value)), None)
    if newest is None:
        column = reader.read_table(results, "runs", None, ("tags",))["tags"]
        known_tags: set[str] = set()
        for tags_of_run in column.to_pylist(maps_as_pydicts="strict"):
            known_tags |= {f"{key}={tag}" for key, tag in (tags_of_run or {}).items()}
        names = sorted(known_tags)
        hint = f"there are: {', '.join(names[:5])}" if names else "no run has tags"
        raise ResultsError(f"{results}: no run with the tag {text!r}; {hint}")
    others = [run for run in islice(runs, _MOST_TAGGED) if run.has_tag(name, value)]
    # Compare only runs with the hardware and software of the newest run.
    comparable_ids = {run.run_id for run in others if not lasting_changes(run.facts, newest.facts)}
    return ComparedSide(
        newest=newest,
        words=text,
        is_tag=True,
        others=[run for run in reversed(others) if run.run_id in comparable_ids],
        left_out=[run for run in others if run.run_id not in comparable_ids],
    )


def check_apart(base: ComparedSide, new: ComparedSide) -> None:
    """Raise ResultsError if a run is on both sides."""
    if runs_on_both := base.ids & new.ids:
        first_id = min(run_id for _folder, run_id in runs_on_both)
        raise ResultsError(
            f"{first_id} is on both sides, {base.words} and {new.words}; "
            "name different runs (`raybench list` shows them)"
        )


def compare_sides(sides: tuple[ComparedSide, ComparedSide], threshold: float) -> Comparison:
    """Compare two sides.

    Args:
        sides: BASE and NEW, in this order.
        threshold: the smallest change that counts, as a share.

    Raises:
        ResultsError: only some of the runs used the section `cpu` of their job.
    """
    from raybench.analysis.compare import (
        POINT_COLUMNS,
        all_point_changes,
        changes,
        check_same_cpu_section,
        compare,
        lasting_changes,
    )
    from raybench.analysis.rows import point_rows
    from raybench.analysis.run_data import load_run_data
    from raybench.records.doubts import DoubtKind
    from raybench.report.comparison import Comparison
    from raybench.report.words.doubts import doubt_words

    base, new = sides
    check_same_cpu_section(run.run for run in (*base.runs, *new.runs))
    base_points = [point_rows(run.points(POINT_COLUMNS)) for run in base.runs]
    new_points = [point_rows(run.points(POINT_COLUMNS)) for run in new.runs]
    base_data = load_run_data(base.newest.root, base.newest.run_id)
    new_data = load_run_data(new.newest.root, new.newest.run_id)
    # run_id -> hardware and software that differs from the newest run of the side.
    left_out = {}
    for side in sides:
        for run in side.left_out:
            differences = lasting_changes(run.facts, side.newest.facts)
            left_out[run.run_id] = [change.fact for change in differences]
    # ("BASE" or "NEW" and point_id, the doubt in words).
    impossible = []
    for name, data in (("BASE", base_data), ("NEW", new_data)):
        for row in data.rows:
            for doubt in row.doubts or ():
                if doubt.kind is DoubtKind.IMPOSSIBLE:
                    impossible.append((f"{name} {row.point_id}", doubt_words(doubt, row)))
    return Comparison(
        base=tuple(run.run for run in base.runs),
        new=tuple(run.run for run in new.runs),
        side_names=(base.words, new.words),
        are_tags=base.is_tag and new.is_tag,
        threshold=threshold,
        points=compare(base_points, new_points, threshold=threshold),
        changes=changes(base.newest.facts, new.newest.facts),
        point_changes=all_point_changes(base_data.rows, new_data.rows),
        left_out=left_out,
        impossible=impossible,
        machines=(_machine(base_data), _machine(new_data)),
        # The noun "GPUs" or "workers".
        ranks=new_data.ranks,
    )


def _machine(data: RunData) -> str:
    """Return the devices of a run, as in `4 x NVIDIA H200 on 1 node`; if unknown, its cluster."""
    from raybench.report import formatting
    from raybench.report.documents import records

    if data.devices.empty:
        return data.run.cluster
    return formatting.machine(records(data.devices), data.node_counts.of_run)


def compare_health(
    sides: tuple[ComparedSide, ComparedSide], threshold: float
) -> HealthComparison | None:
    """Compare the newest health check of each side; None if no run is a health check.

    Raises:
        UsageError: some of the runs are health checks and others are not.
    """
    from raybench.analysis.compare import changes
    from raybench.health.comparison import HealthComparison, trace_figures

    base, new = sides
    # Ids of the runs.
    checks: list[str] = []
    others: list[str] = []
    for run in (*base.runs, *new.runs):
        if load_health(run.root, run.run_id) is None:
            others.append(run.run_id)
        else:
            checks.append(run.run_id)
    if checks and others:
        raise UsageError(
            f"{checks[-1]} is a health check and {others[-1]} is none: compare checks alone"
        )
    base_check = load_health(base.newest.root, base.newest.run_id)
    new_check = load_health(new.newest.root, new.newest.run_id)
    if base_check is None or new_check is None:
        return None
    return HealthComparison(
        base=base_check,
        new=new_check,
        figures=trace_figures([base_check.findings, new_check.findings], 1 + threshold),
        changes=changes(base.newest.facts, new.newest.facts),
    )
