"""`raybench compare`: what changed between two runs, and whether that is more than chance."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raybench.cli.compared_runs import Found, Side, alike, find_side
from raybench.cli.completion import complete_run
from raybench.cli.health_results import compare_health, format_health_comparison
from raybench.cli.options import (
    format_asked,
    json_format_option,
    results_option,
    text_format_option,
)
from raybench.cli.output import color, width, write_result
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.measured_runs import Measured, Other
    from raybench.report.comparison import Comparison, LeftOut
    from raybench.report.health_comparison import HealthComparison

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*%?")
_MOST = 1.0
REGRESSION, UNCLEAR = "regression", "unclear"
_IS_REGRESSION, _IS_UNCLEAR = 1, 5  # exit codes


def share(_: click.Context, option: click.Parameter, text: str) -> float:
    """Read the value of an option such as 5% or 0.05, as a share."""
    if _NUMBER.fullmatch(text.strip()):
        value = float(text.rstrip("% ")) / (100 if "%" in text else 1)
        if value < _MOST:
            return value
    raise UsageError(
        f"{option.opts[0]}: must be from 0% up to 100%, as in 5% or 0.05, got {text!r}"
    )


@click.command("compare")
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
    type=click.Choice([REGRESSION, UNCLEAR]),
    help="regression: exit with 1 where a point is slower, or was measured and fails now. unclear: "
    "exit with 5 also where none is, but one is unclear.",
)
@text_format_option
@json_format_option
def compare_command(
    base: str,
    new: str,
    results: Path,
    threshold: float,
    fail_on: str | None,
    kind: str | None,
    as_json: bool,
) -> int:
    """Tell what changed from the run BASE to the run NEW, and whether that is more than chance.

    BASE and NEW are as RUN of `raybench report`; or a tag as in driver=580, the newest run that has
    it; or several runs with commas between them, of which the newest is BASE or NEW. The others
    with the tag, or in the list, are its repeats: means are compared. Where neither is given, runs
    of the same job in the same environment are repeats if no step lies between them.

    Two health checks are compared figure by figure, each by the limit of its test.
    """
    kind = format_asked(kind, as_json) or "terminal"
    sides = find_sides(results, base, new)
    if checks := compare_health(sides[0].own, sides[1].own, threshold):
        write_result(format_health_comparison(checks, kind))
        return 0 if fail_on is None else _gate_of_checks(checks, fail_on)
    comparison = compare_sides(sides, threshold)
    write_result(_format(comparison, kind))
    return 0 if fail_on is None else _gate(comparison, fail_on)


def _gate_of_checks(comparison: HealthComparison, fail_on: str) -> int:
    """Return the exit code. Raises ResultsError where there is nothing to judge."""
    if not comparison.figures:
        raise ResultsError(f"--fail-on {fail_on}: no figure was read in both checks")
    return _IS_REGRESSION if comparison.is_regression else 0


def _gate(comparison: Comparison, fail_on: str) -> int:
    """Return the exit code. Raises ResultsError where there is nothing to judge."""
    if not comparison.compared and not comparison.broken:
        raise ResultsError(f"--fail-on {fail_on}: no point was measured in both runs")
    if comparison.obstacles:
        why = "; ".join(comparison.obstacles)
        raise ResultsError(f"--fail-on {fail_on}: the runs are not comparable: {why}")
    if comparison.is_regression:
        return _IS_REGRESSION
    return _IS_UNCLEAR if fail_on == UNCLEAR and comparison.verdicts[UNCLEAR] else 0


def find_sides(results: Path, base: str, new: str) -> tuple[Side, Side]:
    """Find both runs, and their repeats. Raises ResultsError where one is not there."""
    sides = find_side(results, base), find_side(results, new)
    if len({(side.own.root.resolve(), side.own.run_id) for side in sides}) == 1:
        raise ResultsError(
            f"{base} and {new} are the same run, {sides[0].own.run_id}; `raybench list` has others"
        )
    return sides


def load_comparison(results: Path, base: str, new: str, threshold: float) -> Comparison:
    """Read both runs and compare them. Raises ResultsError where one is not there."""
    return compare_sides(find_sides(results, base, new), threshold)


def compare_sides(sides: tuple[Side, Side], threshold: float) -> Comparison:
    """Read both sides and compare them. Raises ResultsError where one cannot be read."""
    from raybench.analysis.compare import compare
    from raybench.analysis.environment_changes import changes, lasting_changes
    from raybench.analysis.point_changes import all_point_changes
    from raybench.report.comparison import Comparison

    own = [side.own for side in sides]
    is_one_world = not lasting_changes(own[0].facts, own[1].facts)
    of_base = [_other(one) for one in alike(*sides)]
    of_new = of_base if is_one_world else [_other(one) for one in alike(*sides[::-1])]
    measured = [_as_measured(*pair) for pair in zip(sides, (of_base, of_new), strict=True)]
    return Comparison(
        base=own[0].run,
        new=own[1].run,
        threshold=threshold,
        frame=compare(*measured, is_one_world=is_one_world, threshold=threshold),
        changes=changes(own[0].facts, own[1].facts),
        beside=all_point_changes(measured[0].points, measured[1].points),
        left_out=tuple(run for side in sides for run in _runs_left_out(side)),
    )


def _runs_left_out(side: Side) -> Iterator[LeftOut]:
    """List the runs that were named with `side`'s and differ from it by more than their start."""
    from raybench.analysis.environment_changes import lasting_changes
    from raybench.report.comparison import LeftOut

    for one in side.left_out:
        differing = lasting_changes(one.facts, side.own.facts)
        yield LeftOut(run_id=one.run_id, differs_in=tuple(change.name for change in differing))


def _as_measured(side: Side, others: Sequence[Other]) -> Measured:
    from raybench.analysis import measured_runs, point_changes

    columns = dict.fromkeys((*measured_runs.POINT_COLUMNS, *point_changes.POINT_COLUMNS))
    points = _read(side.own, "points", tuple(columns))
    telemetry = _read(side.own, "telemetry", point_changes.CLOCK_COLUMNS)
    return measured_runs.Measured(
        points=point_changes.with_clocks(points, telemetry),
        samples=_read(side.own, "samples", measured_runs.STEP_COLUMNS),
        node=side.own.node,
        named=None if side.named is None else [_other(one) for one in side.named],
        alike=others,
    )


def _other(found: Found) -> Other:
    from raybench.analysis import measured_runs

    points = _read(found, "points", measured_runs.POINT_COLUMNS)
    return measured_runs.Other(points=points, node=found.node)


def _read(found: Found, table: str, columns: Sequence[str]) -> pd.DataFrame:
    from raybench.results import reader

    read = reader.read_table(found.root, table, found.run_id, columns)
    frame: pd.DataFrame = read.to_pandas(maps_as_pydicts="strict")
    return frame


def _format(comparison: Comparison, kind: str) -> str:
    from raybench.report.text import compare as compare_text

    if kind == "md":
        return compare_text.format_markdown(comparison)
    if kind == "json":
        return compare_text.format_json(comparison)
    return compare_text.format_terminal(comparison, width=width(), color=color())
