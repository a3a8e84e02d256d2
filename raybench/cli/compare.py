"""`raybench compare`: what changed between two runs, and whether that is more than chance."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.cli.health import load_health
from raybench.cli.options import (
    complete_run,
    file_option,
    format_asked,
    json_format_option,
    read_share,
    results_option,
    threshold_option,
)
from raybench.cli.output import color, width, write_output
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from raybench.health.comparison import HealthComparison
    from raybench.report.comparison import Comparison, LeftOut
    from raybench.report.documents import Document
    from raybench.results.reader import Run

REGRESSION, UNCLEAR = "regression", "unclear"
_IS_REGRESSION, _IS_UNCLEAR = 1, 5  # exit codes
# Runs before the newest one with a tag that are looked at for others with it.
_MOST_TAGGED = 300


@click.command("compare")
@click.argument("base", shell_complete=complete_run)
@click.argument("new", shell_complete=complete_run)
@results_option
@threshold_option("Changes of the step time, or of samples/s, up to this are none.")
@click.option(
    "--fail-on",
    type=click.Choice([REGRESSION, UNCLEAR]),
    help="regression: exit with 1 where a point is slower, or was measured and fails now; else "
    "with 5 where a side has one run, or where a point may be slower by more than --blind. "
    "unclear: exit with 1 as above, else with 5 where a point is unclear.",
)
@click.option(
    "--blind",
    callback=read_share,
    default="10%",
    show_default=True,
    help="With --fail-on regression: every point must be known to be slower by no more than this.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "md", "html", "json"]),
    show_default="terminal",
    help="For a terminal, a pull request, a browser (one page, with bars) or another program.",
)
@json_format_option
@file_option
def compare_command(
    base: str,
    new: str,
    results: Path,
    threshold: float,
    fail_on: str | None,
    blind: float,
    kind: str | None,
    as_json: bool,
    output: Path | None,
) -> int:
    """Tell what changed from BASE to NEW, and whether that is more than chance.

    Each side is one or more runs: RUN as of `raybench report`; several RUNs with commas between
    them; or a tag as in driver=580, for all runs that have it. A verdict needs two runs a side,
    and three are better: runs of the same thing differ, and one run does not tell by how much.

    Two health checks are compared figure by figure, each by the limit of its test.
    """
    kind = format_asked(kind, as_json) or "terminal"
    sides = find_sides(results, base, new)
    if checks := compare_health(sides[0].own, sides[1].own, threshold):
        if kind == "html":
            raise UsageError("--format html: health checks are compared as terminal, md or json")
        write_output(_formatted(checks, kind, output), output, kind)
        if fail_on and not checks.figures:
            raise ResultsError(f"--fail-on {fail_on}: no figure was read in both checks")
        return _IS_REGRESSION if fail_on and checks.is_regression else 0
    comparison = compare_sides(sides, threshold)
    if kind == "html":
        from raybench.report.page import format_comparison

        text = format_comparison(comparison)
    else:
        text = _formatted(comparison, kind, output)
    write_output(text, output, kind)
    return 0 if fail_on is None else _gate(comparison, fail_on, blind)


def _formatted(document: Document, kind: str, output: Path | None) -> str:
    from raybench.report.documents import format_document

    return format_document(document, kind, width=width(), color=output is None and color())


def _gate(comparison: Comparison, fail_on: str, blind: float) -> int:
    """Return the exit code. Raises ResultsError where there is nothing to judge."""
    if not comparison.compared and not comparison.broken:
        raise ResultsError(f"--fail-on {fail_on}: no point was measured in both runs")
    if comparison.obstacles:
        why = "; ".join(comparison.obstacles)
        raise ResultsError(f"--fail-on {fail_on}: the runs are not comparable: {why}")
    if comparison.is_regression:
        return _IS_REGRESSION
    if fail_on == UNCLEAR:
        return _IS_UNCLEAR if comparison.verdicts[UNCLEAR] else 0
    return _IS_UNCLEAR if comparison.is_blind(blind) else 0


def find_sides(results: Path, base: str, new: str) -> tuple[Side, Side]:
    """Return both sides, BASE first. Raises ResultsError for a missing run, or one on both."""
    sides = find_side(results, base), find_side(results, new)
    ids = [{(run.root.resolve(), run.run_id) for run in side.runs} for side in sides]
    if both := ids[0] & ids[1]:
        raise ResultsError(
            f"{min(run_id for _, run_id in both)} is of both sides, {base} and {new}; name other "
            "runs (`raybench list` has them)"
        )
    return sides


def compare_sides(sides: tuple[Side, Side], threshold: float) -> Comparison:
    """Return the comparison of two sides, the base first.

    threshold: the smallest change that counts, as a share. Raises ResultsError where a run cannot
    be read.
    """
    from raybench.analysis.compare import POINT_COLUMNS, all_point_changes, changes, compare
    from raybench.analysis.references import impossible_among
    from raybench.analysis.rows import point_rows
    from raybench.cli.results import load_summary
    from raybench.report.comparison import Comparison

    base, new = sides
    points = [
        [point_rows(_read(run, "points", POINT_COLUMNS)) for run in side.runs] for side in sides
    ]
    rows = [load_summary(side.own.root, side.own.run_id).rows for side in sides]
    return Comparison(
        base=tuple(run.run for run in base.runs),
        new=tuple(run.run for run in new.runs),
        words=(base.words, new.words),
        threshold=threshold,
        points=compare(*points, threshold=threshold),
        changes=changes(base.own.facts, new.own.facts),
        beside=all_point_changes(*rows),
        left_out=tuple(run for side in sides for run in _runs_left_out(side)),
        impossible=[
            (f"{name} {row.point_id}", text)
            for name, of_run in zip(("base", "new"), rows, strict=True)
            for row in of_run
            for text in impossible_among(row.warnings)
        ],
    )


def _runs_left_out(side: Side) -> Iterator[LeftOut]:
    """Yield the runs that have the tag of a side and differ from it by more than their start."""
    from raybench.analysis.compare import lasting_changes
    from raybench.report.comparison import LeftOut

    for one in side.left_out:
        differing = lasting_changes(one.facts, side.own.facts)
        yield LeftOut(run_id=one.run_id, differs_in=tuple(change.name for change in differing))


def _read(found: Found, table: str, columns: Sequence[str]) -> pd.DataFrame:
    """Return these columns of a table of one run."""
    from raybench.results import reader

    read = reader.read_table(found.root, table, found.run_id, columns)
    frame: pd.DataFrame = read.to_pandas(maps_as_pydicts="strict")
    return frame


def compare_health(base: Found, new: Found, threshold: float) -> HealthComparison | None:
    """Return the comparison of two health checks; None where neither run is a health check.

    threshold: the smallest change that counts, as a share. Raises UsageError where one of the runs
    is a health check and the other is not.
    """
    from raybench.analysis.compare import changes
    from raybench.health.comparison import HealthComparison, trace_figures

    before, now = (load_health(found.root, found.run_id) for found in (base, new))
    if before is None or now is None:
        if before or now:
            check, other = (base, new) if before else (new, base)
            raise UsageError(
                f"{check.run_id} is a health check and {other.run_id} is none: compare it with "
                "another check"
            )
        return None
    figures = trace_figures([before.findings, now.findings], now.kinds, 1 + threshold)
    around = changes(base.facts, new.facts)
    return HealthComparison(base=before, new=now, figures=figures, changes=around)


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what was read
class Found:
    """A run in a results folder; its row and its facts are read once, when they are needed."""

    root: Path
    run_id: str

    @cached_property
    def run(self) -> Run:
        """Return the row of the run in `runs`. Raises ResultsError where it cannot be read."""
        from raybench.results import reader

        return reader.read_run(self.root, self.run_id)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Return the facts that may change a measurement by name: versions, variables, devices."""
        from raybench.analysis.compare import facts
        from raybench.results import reader

        return facts(self.run, reader.load(self.root, "devices", self.run_id))

    def has_tag(self, name: str, value: str) -> bool:
        """Return whether the run has this tag; False for a run that cannot be read."""
        try:
            return self.run.tags.get(name) == value
        except ResultsError:
            return False

    def is_alike(self, other: Found) -> bool:
        """Return whether the runs differ only by their start and by devices of one model."""
        from raybench.analysis.compare import lasting_changes

        is_job = self.run.job_sha256 == other.run.job_sha256
        return is_job and not lasting_changes(self.facts, other.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """BASE or NEW: the newest of its runs and the others, the oldest first.

    words: how the user named it. left_out: runs with its tag that differ from it by more than
    their start.
    """

    own: Found
    words: str
    others: Sequence[Found] = ()
    left_out: Sequence[Found] = ()

    @property
    def runs(self) -> Sequence[Found]:
        """Return all runs of the side, the newest last."""
        return (*self.others, self.own)


def find_side(results: Path, text: str) -> Side:
    """Return the side that `text` means.

    text: as RUN of `report`; several of these with commas; or NAME=VALUE, the newest run with that
    tag and those with the tag that differ from it by nothing but their start. Raises ResultsError
    where there is none.
    """
    # Path's would raise for a name that no file can have.
    if os.path.exists(text):  # noqa: PTH110
        return Side(own=_find(results, text), words=text)
    if "=" in text:
        return _runs_with_tag(results, text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        return Side(own=_find(results, text), words=text)
    found = {one.run_id: one for one in (_find(results, name) for name in names)}
    *others, own = sorted(found.values(), key=lambda one: (one.run.started_at, one.run_id))
    return Side(own=own, words=text, others=others)


def _find(results: Path, text: str) -> Found:
    """Return the run that `text` names. Raises ResultsError where there is none."""
    from raybench.results.reader import find_run

    root, run_id = find_run(results, text)
    return Found(root=root, run_id=run_id)


def _runs_with_tag(results: Path, text: str) -> Side:
    """Return the newest run with the tag `text`, and the runs with it that are alike."""
    from raybench.results.reader import run_ids

    name, _, value = text.partition("=")
    runs = (Found(root=results, run_id=run_id) for run_id in reversed(run_ids(results)))
    own = next((run for run in runs if run.has_tag(name, value)), None)
    if own is None:
        raise ResultsError(f"{results}: no run with the tag {text!r}; {_tags(results)}")
    others = [run for run in islice(runs, _MOST_TAGGED) if run.has_tag(name, value)]
    same = {run.run_id for run in others if run.is_alike(own)}
    return Side(
        own=own,
        words=text,
        others=[run for run in reversed(others) if run.run_id in same],
        left_out=[run for run in others if run.run_id not in same],
    )


def _tags(results: Path) -> str:
    """Return a few words with the first five tags of the results, for an error message."""
    from raybench.results import reader

    tags = reader.read_table(results, "runs", None, ("tags",)).to_pylist(maps_as_pydicts="strict")
    known = sorted(
        {f"{name}={value}" for row in tags for name, value in (row["tags"] or {}).items()}
    )
    return f"there are: {', '.join(known[:5])}" if known else "no run has tags"
