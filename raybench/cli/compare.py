"""`raybench compare`: what changed between two runs, and whether that is more than chance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.cli.completion import complete_run
from raybench.cli.options import results_option
from raybench.cli.output import color, width, write_result
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.compare import Measured
    from raybench.report.comparison import Comparison
    from raybench.run import Run

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*%?")
_MOST = 1.0


def share(_: click.Context, option: click.Parameter, text: str) -> float:
    """The value of an option such as 5% or 0.05, as a share."""
    if _NUMBER.fullmatch(text.strip()):
        value = float(text.rstrip("% ")) / (100 if "%" in text else 1)
        if value < _MOST:
            return value
    raise UsageError(
        f"{option.opts[0]}: must be from 0% up to 100%, as in 5% or 0.05, got {text!r}"
    )


@click.command("compare", short_help="Compare two runs, point by point.")
@click.argument("base", shell_complete=complete_run)
@click.argument("new", shell_complete=complete_run)
@results_option
@click.option(
    "--threshold",
    callback=share,
    default="1.5%",
    show_default=True,
    help="Changes of the step time up to this are none.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["regression"]),
    help="Exit with 1 where a point is slower, or was measured and fails now.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "md", "json"]),
    default="terminal",
    show_default=True,
    help="For a terminal, for a pull request, or for another program.",
)
def compare_command(
    base: str, new: str, results: Path, threshold: float, fail_on: str | None, kind: str
) -> int:
    """What changed from the run BASE to the run NEW, and whether that is more than chance.

    BASE and NEW are as RUN of `raybench report`, or a tag as in driver=580: the newest run that
    has it. Other runs of the same job in the same environment (and with that tag) tell how much
    starts differ, and are compared too.
    """
    comparison = load_comparison(results, base, new, threshold)
    write_result(_format(comparison, kind))
    if fail_on is None:
        return 0
    if not comparison.compared and not comparison.broken:
        raise ResultsError("--fail-on regression: no point was measured in both runs")
    if comparison.obstacles:
        why = "; ".join(comparison.obstacles)
        raise ResultsError(f"--fail-on regression: the runs are not comparable: {why}")
    return 1 if comparison.is_regression else 0


def load_comparison(results: Path, base: str, new: str, threshold: float) -> Comparison:
    """Read both runs and compare them. Raises ResultsError where one is not there."""
    from raybench.analysis.compare import compare
    from raybench.analysis.environment_changes import changes
    from raybench.analysis.point_changes import all_point_changes
    from raybench.report.comparison import Comparison

    places = [find_tagged(results, text) for text in (base, new)]
    if len({(root.resolve(), run_id) for root, run_id in places}) == 1:
        raise ResultsError(f"{base} and {new} are the same run: {places[0][1]}")
    taken = {run_id for _, run_id in places}
    read = [
        _Side(root, run_id, taken, _tag(text))
        for text, (root, run_id) in zip((base, new), places, strict=True)
    ]
    sides = [side.measured() for side in read]
    return Comparison(
        base=read[0].run,
        new=read[1].run,
        threshold=threshold,
        frame=compare(sides[0], sides[1], threshold=threshold),
        changes=changes(read[0].facts, read[1].facts),
        beside=all_point_changes(sides[0].points, sides[1].points),
        again=(len(read[0].again), len(read[1].again)),
    )


def find_tagged(results: Path, text: str) -> tuple[Path, str]:
    """The results folder and run_id of a run, or of the newest run with a tag NAME=VALUE."""
    from raybench import tables

    tag = _tag(text)
    if tag is None:
        return tables.find_run(results, text)
    runs = tables.read_runs(results)
    tagged = [run.run_id for run in runs if tag in run.tags.items()]
    if not tagged:
        known = sorted({f"{k}={v}" for run in runs for k, v in run.tags.items()})
        there = f"there are: {', '.join(known[:5])}" if known else "no run has tags"
        raise ResultsError(f"{results}: no run with the tag {text!r}; {there}")
    return results, tagged[-1]


def _tag(text: str) -> tuple[str, str] | None:
    name, equals, value = text.partition("=")
    return (name, value) if equals and not Path(text).exists() else None


class _Side:
    """One of the two runs, read. again: the runs that differ from it in nothing but their start.

    tag: by which it was chosen, if any. It may stand for what the tables do not tell, so the others
    must have it too.
    """

    def __init__(
        self, root: Path, run_id: str, taken: set[str], tag: tuple[str, str] | None
    ) -> None:
        from raybench import tables
        from raybench.analysis.environment_changes import facts

        runs = {run.run_id: run for run in tables.read_runs(root)}
        self.root, self.run = root, runs[run_id]
        self.facts = facts(self.run, tables.load(root, "devices", run_id))
        alike = [
            run
            for run in runs.values()
            if run.run_id not in taken
            and run.job_sha256 == self.run.job_sha256
            and (tag is None or tag in run.tags.items())
        ]
        self.again = [run for run in alike if self._is_alike(run)]

    def _is_alike(self, run: Run) -> bool:
        from raybench import tables
        from raybench.analysis.environment_changes import facts

        return facts(run, tables.load(self.root, "devices", run.run_id)) == self.facts

    def measured(self) -> Measured:
        from raybench.analysis import compare, point_changes
        from raybench.analysis.ratios import STEP_COLUMNS

        columns = dict.fromkeys((*compare.POINT_COLUMNS, *point_changes.POINT_COLUMNS))
        points = self._read("points", self.run, tuple(columns))
        telemetry = self._read("telemetry", self.run, point_changes.CLOCK_COLUMNS)
        return compare.Measured(
            points=point_changes.with_clocks(points, telemetry),
            samples=self._read("samples", self.run, STEP_COLUMNS),
            again=[self._read("points", run, compare.POINT_COLUMNS) for run in self.again],
        )

    def _read(self, table: str, run: Run, columns: Sequence[str]) -> pd.DataFrame:
        from raybench import tables

        read = tables.read_table(self.root, table, run.run_id, columns)
        frame: pd.DataFrame = read.to_pandas(maps_as_pydicts="strict")
        return frame


def _format(comparison: Comparison, kind: str) -> str:
    from raybench.report import compare_text

    if kind == "md":
        return compare_text.format_markdown(comparison)
    if kind == "json":
        return compare_text.format_json(comparison)
    return compare_text.format_terminal(comparison, width=width(), color=color())
