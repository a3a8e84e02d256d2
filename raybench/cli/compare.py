"""`raybench compare`, `history` and `predict`: what several runs, or points, say together."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from raybench.cli.health import load_health
from raybench.cli.shared import (
    chart_option,
    complete_any_point,
    complete_run,
    file_option,
    format_options,
    json_option,
    read_share,
    results_option,
    threshold_option,
    write_document,
    write_file,
)
from raybench.errors import ResultsError, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.compare import Change, Fact, HistoryRow
    from raybench.analysis.run_data import RunData
    from raybench.health.comparison import HealthComparison
    from raybench.job.point import Point
    from raybench.records.devices import Finding
    from raybench.report.comparison import Comparison
    from raybench.results.point_row import PointRow
    from raybench.results.tables import Run

REGRESSION, UNCLEAR = "regression", "unclear"
_IS_REGRESSION, _IS_UNCLEAR = 1, 5  # exit codes
# A tag is looked for in so many runs before the newest run that has it.
_MOST_TAGGED = 300


@click.command("compare")
@click.argument("base", shell_complete=complete_run)
@click.argument("new", shell_complete=complete_run)
@results_option
@threshold_option(
    help="Changes of samples/s (steps/s where a step has no samples) up to this are none."
)
@click.option("--full", is_flag=True, help="On a terminal: all points, differences and legends.")
@click.option(
    "--fail-on",
    type=click.Choice([REGRESSION, UNCLEAR]),
    help="regression: exit with 1 where a point is slower, or fails in more of its rounds; else "
    "with 5 where a side has one run, or where a point may be slower by more than --blind. "
    "unclear: exit with 1 as above, else with 5 where a point is undecided.",
)
@click.option(
    "--blind",
    callback=read_share,
    default="10%",
    show_default=True,
    help="With --fail-on regression: every point must be known to be slower by no more than this.",
)
@format_options(
    ["terminal", "md", "html", "json"],
    "For a terminal, a pull request, a browser (one page, with bars) or another program.",
)
@file_option
def compare_command(
    base: str,
    new: str,
    results: Path,
    threshold: float,
    full: bool,
    fail_on: str | None,
    blind: float,
    kind: str,
    output: Path | None,
) -> int:
    """Tell what changed from BASE to NEW, and whether the change is more than chance.

    Each side is one or more runs: RUN as for `raybench report`, several RUNs separated by commas,
    or a tag such as driver=580. A tag stands for its newest run and for earlier runs with the tag
    (among 300) that have the same job, software, settings, device models and counts of devices and
    nodes. A verdict needs two runs on each side; three are better. --fail-on exits with 2 if device
    models or node counts differ, or if no point is ok on both sides and no point that is ok in BASE
    fails in NEW.

    For health checks, the newest check of each side is compared (not as html): each figure by the
    limit of its test, or by --threshold if that is larger. --fail-on exits with 1 if a figure is
    slower or a subject is no longer healthy, otherwise with 2 if no figure was read in both checks.
    """
    source = click.get_current_context().get_parameter_source("blind")
    if source is not ParameterSource.DEFAULT and fail_on != REGRESSION:
        raise UsageError("--blind: goes with --fail-on regression only")
    sides = _find_side(results, base), _find_side(results, new)
    if both := sides[0].ids & sides[1].ids:
        raise ResultsError(
            f"{min(run_id for _, run_id in both)} is on both sides, {base} and {new}; name "
            "different runs (`raybench list` shows them)"
        )
    if checks := _compare_health(sides, threshold):
        if kind == "html":
            raise UsageError("--format html: health checks are compared as terminal, md or json")
        write_document(checks, kind, output)
        if fail_on and checks.is_regression:
            return _IS_REGRESSION
        if fail_on and not checks.figures:
            raise ResultsError(f"--fail-on {fail_on}: no figure was read in both checks")
        return 0
    comparison = replace(
        _compare_sides(sides, threshold),
        is_short=kind == "terminal" and not full,
        options=_options_to_repeat(results, threshold),
    )

    def make_page() -> str:
        from raybench.report.page import format_comparison

        return format_comparison(comparison)

    write_document(comparison, kind, output, make_page)
    if fail_on is None:
        return 0
    if not comparison.compared and not comparison.broken:
        raise ResultsError(f"--fail-on {fail_on}: no point was measured in both runs")
    if comparison.obstacles:
        from raybench.report.words.compare import not_decided

        why = "; ".join(map(not_decided, comparison.obstacles))
        raise ResultsError(f"--fail-on {fail_on}: not comparable: {why}")
    if comparison.is_regression:
        return _IS_REGRESSION
    if fail_on == UNCLEAR:
        return _IS_UNCLEAR if comparison.verdicts[UNCLEAR] else 0
    return _IS_UNCLEAR if comparison.is_blind(blind) else 0


def _options_to_repeat(results: Path, threshold: float) -> list[str]:
    """Return --results and --threshold as words, where the user gave them."""
    context = click.get_current_context()
    words = []
    for name, text in (("results", str(results)), ("threshold", f"{100 * threshold:g}%")):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            words += [f"--{name}", text]
    return words


def _compare_sides(sides: tuple[_Side, _Side], threshold: float) -> Comparison:
    """Compare two sides, the base first.

    Args:
        sides: BASE and NEW.
        threshold: the smallest change that counts, as a share.
    """
    from raybench.analysis.compare import (
        POINT_COLUMNS,
        all_point_changes,
        changes,
        compare,
        lasting_changes,
    )
    from raybench.analysis.rows import point_rows
    from raybench.analysis.run_data import load_run_data
    from raybench.records.doubts import DoubtKind
    from raybench.report.comparison import Comparison
    from raybench.report.words.doubts import doubt_words

    base, new = sides
    base_points = [point_rows(run.points(POINT_COLUMNS)) for run in base.runs]
    new_points = [point_rows(run.points(POINT_COLUMNS)) for run in new.runs]
    base_data = load_run_data(base.newest.root, base.newest.run_id)
    new_data = load_run_data(new.newest.root, new.newest.run_id)
    left_out = {}
    for side in sides:
        for run in side.left_out:
            differences = lasting_changes(run.facts, side.newest.facts)
            left_out[run.run_id] = [change.fact for change in differences]
    impossible = []
    for name, data in (("BASE", base_data), ("NEW", new_data)):
        for row in data.rows:
            for doubt in row.doubts or ():
                if doubt.kind is DoubtKind.IMPOSSIBLE:
                    impossible.append((f"{name} {row.point_id}", doubt_words(doubt, row)))
    return Comparison(
        base=tuple(run.run for run in base.runs),
        new=tuple(run.run for run in new.runs),
        words=(base.words, new.words),
        are_tags=base.is_tag and new.is_tag,
        threshold=threshold,
        points=compare(base_points, new_points, threshold=threshold),
        changes=changes(base.newest.facts, new.newest.facts),
        beside=all_point_changes(base_data.rows, new_data.rows),
        left_out=left_out,
        impossible=impossible,
        machines=(_machine(base_data), _machine(new_data)),
        ranks=new_data.ranks,
    )


def _machine(data: RunData) -> str:
    """Return the devices of a run, as in `4 x NVIDIA H200 on 1 node`, or else its cluster."""
    from raybench.report import formatting
    from raybench.report.documents import records

    if data.devices.empty:
        return data.run.cluster
    return formatting.machine(records(data.devices), data.node_counts.of_run)


def _compare_health(sides: tuple[_Side, _Side], threshold: float) -> HealthComparison | None:
    """Compare the newest health check of each side; None if no run is a health check.

    Raises:
        UsageError: some of the runs are health checks and others are not.
    """
    from raybench.analysis.compare import changes
    from raybench.health.comparison import HealthComparison, trace_figures

    base, new = sides
    checks: list[str] = []
    others: list[str] = []
    for run in (*base.runs, *new.runs):
        is_check = load_health(run.root, run.run_id) is not None
        (checks if is_check else others).append(run.run_id)
    if checks and others:
        raise UsageError(
            f"{checks[-1]} is a health check and {others[-1]} is none: compare checks alone"
        )
    before = load_health(base.newest.root, base.newest.run_id)
    now = load_health(new.newest.root, new.newest.run_id)
    if before is None or now is None:
        return None
    figures = trace_figures([before.findings, now.findings], 1 + threshold)
    around = changes(base.newest.facts, new.newest.facts)
    return HealthComparison(base=before, new=now, figures=figures, changes=around)


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class _StoredRun:
    """A run of the results folder `root`, whose row and facts are read once."""

    root: Path
    run_id: str

    @cached_property
    def run(self) -> Run:
        """Return the row of the run in `runs`."""
        from raybench.results import reader

        return reader.read_run(self.root, self.run_id)

    @cached_property
    def facts(self) -> dict[Fact, str]:
        """Return what may change a measured time."""
        from raybench.analysis.compare import facts
        from raybench.results import reader

        return facts(self.run, reader.load_table(self.root, "devices", self.run_id))

    def points(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return these columns of the table `points`, with all attempts."""
        from raybench.results import reader

        table = reader.read_table(self.root, "points", self.run_id, columns)
        frame: pd.DataFrame = table.to_pandas(maps_as_pydicts="strict")
        return frame

    def has_tag(self, name: str, value: str) -> bool:
        """Return whether the run has this tag and can be read."""
        try:
            return self.run.tags.get(name) == value
        except ResultsError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """BASE or NEW."""

    newest: _StoredRun
    # How the user named the side.
    words: str
    # Whether `words` is a tag.
    is_tag: bool = False
    # The other runs, the oldest first.
    others: Sequence[_StoredRun] = ()
    # Runs with the tag and other facts than `newest`, the newest first.
    left_out: Sequence[_StoredRun] = ()

    @property
    def runs(self) -> Sequence[_StoredRun]:
        """Return all runs of the side, the newest last."""
        return (*self.others, self.newest)

    @property
    def ids(self) -> set[tuple[Path, str]]:
        """Return folder and id of each run."""
        return {(run.root.resolve(), run.run_id) for run in self.runs}


def _find_side(results: Path, text: str) -> _Side:
    """Find the runs that `text` names: a RUN of `report`, several with commas, or a NAME=VALUE tag.

    Raises:
        ResultsError: there is no such run.
    """
    # Path.exists would raise for a name that no file can have.
    if os.path.exists(text):  # noqa: PTH110
        return _Side(newest=_find(results, text), words=text)
    if "=" in text:
        return _runs_with_tag(results, text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        return _Side(newest=_find(results, text), words=text)
    runs = {}
    for name in names:
        run = _find(results, name)
        runs[run.run_id] = run
    *others, newest = sorted(runs.values(), key=lambda run: (run.run.started_at, run.run_id))
    return _Side(newest=newest, words=text, others=others)


def _find(results: Path, text: str) -> _StoredRun:
    from raybench.results.reader import find_run

    root, run_id = find_run(results, text)
    return _StoredRun(root=root, run_id=run_id)


def _runs_with_tag(results: Path, text: str) -> _Side:
    """Find the newest run with the tag `text`, and earlier runs with the tag and the same facts."""
    from raybench.analysis.compare import lasting_changes
    from raybench.results import reader

    name, _, value = text.partition("=")
    runs = (_StoredRun(root=results, run_id=run_id) for run_id in reversed(reader.run_ids(results)))
    newest = next((run for run in runs if run.has_tag(name, value)), None)
    if newest is None:
        rows = reader.read_table(results, "runs", None, ("tags",))["tags"]
        tags = [row or {} for row in rows.to_pylist(maps_as_pydicts="strict")]
        names = sorted({f"{key}={tag}" for row in tags for key, tag in row.items()})
        there = f"there are: {', '.join(names[:5])}" if names else "no run has tags"
        raise ResultsError(f"{results}: no run with the tag {text!r}; {there}")
    others = [run for run in islice(runs, _MOST_TAGGED) if run.has_tag(name, value)]
    same = {run.run_id for run in others if not lasting_changes(run.facts, newest.facts)}
    return _Side(
        newest=newest,
        words=text,
        is_tag=True,
        others=[run for run in reversed(others) if run.run_id in same],
        left_out=[run for run in others if run.run_id not in same],
    )


@click.command("history")
@click.option(
    "--point",
    metavar="POINT_ID",
    shell_complete=complete_any_point,
    help="This point alone; a unique prefix will do.",
)
@click.option("--filter", "expression", metavar="EXPR", help="Only points for which this is true.")
@results_option
@threshold_option(help="Changes of the level up to this count as none.")
@chart_option(help="Also draw the step time over time.")
@click.option(
    "--health",
    "is_health",
    is_flag=True,
    help="The figures of the health checks instead, each by the limit of its test.",
)
@json_option
def history_command(
    point: str | None,
    expression: str | None,
    results: Path,
    threshold: float,
    chart: Path | None,
    is_health: bool,
    as_json: bool,
) -> None:
    """How the step time of each point went over all runs, and where it changed its level.

    Runs on other devices, or on another number of nodes, are apart from each other. A new level has
    at least three runs. Health checks are left out: --health.
    --filter is as for `raybench sweep`; points without a setting that it names are left out.
    """
    from raybench.analysis.compare import history
    from raybench.health.comparison import HealthHistory, trace_figures
    from raybench.health.references import read_findings
    from raybench.report.charts.grammar import draw_figure
    from raybench.report.history import History, history_figure
    from raybench.results import reader

    if is_health:
        if point or expression or chart:
            raise UsageError("--health: goes without --point, --filter and --chart")
        by_run: dict[str, list[Finding]] = {}
        for run_id, finding in read_findings(results):
            by_run.setdefault(run_id, []).append(finding)
        # In order of their starts.
        run_ids = [run.run_id for run in reader.read_runs(results) if run.run_id in by_run]
        if not run_ids:
            raise ResultsError(f"{results}: no health check to read; `raybench health` makes one")
        figures = trace_figures((by_run[run_id] for run_id in run_ids), 1 + threshold)
        document = HealthHistory(figures=figures, run_ids=run_ids)
        write_document(document, "json" if as_json else "terminal")
        return
    rows = history(_points(results, point, expression), threshold=threshold)
    if not rows:
        raise ResultsError(f"{results}: no run has measured such a point")
    if chart is not None:
        figure = history_figure(rows)
        write_file(chart, draw_figure(figure, chart.suffix.lower().removeprefix(".")))
    causes = {} if as_json else _causes(rows, results)
    write_document(History(rows=rows, causes=causes), "json" if as_json else "terminal")


def _points(results: Path, prefix: str | None, expression: str | None) -> list[PointRow]:
    """Return the rows of `points` that the options select, without health checks.

    Args:
        results: the folder of results.
        prefix: of a point id; None for all points.
        expression: as of --filter; None for all points.

    Raises:
        ResultsError: there is no such point.
        UsageError: the expression is wrong, or no point fulfils it.
    """
    from raybench.analysis.compare import HISTORY_COLUMNS
    from raybench.analysis.rows import point_rows
    from raybench.results import reader

    table = reader.read_table(results, "points", None, HISTORY_COLUMNS)
    # Points of a health check are short, and their devices may be shared.
    runs = reader.read_table(results, "runs", None, ["run_id", "argv"]).to_pylist()
    sweeps = {run["run_id"] for run in runs if (run["argv"] or [])[1:2] != ["health"]}
    rows = point_rows(table.to_pandas(maps_as_pydicts="strict"))
    points = [row for row in rows if row.run_id in sweeps]
    if not points:
        raise ResultsError(f"{results}: no points to read; `raybench sweep JOB` measures some")
    if prefix is not None:
        ids = list(dict.fromkeys(row.point_id for row in points))
        point_id = reader.pick(prefix, ids, kind="point", where=str(results))
        points = [row for row in points if row.point_id == point_id]
    return points if expression is None else _filter(points, expression)


def _filter(points: list[PointRow], expression: str) -> list[PointRow]:
    """Return the points for which the expression is true; points without a setting in it go.

    Raises:
        UsageError: the expression is wrong, or no point is left.
    """
    from raybench.analysis.scaling import typed_value
    from raybench.job.plan import select_points
    from raybench.job.point import EXECUTION, RUN_SETTINGS, Point

    # Grouped by the names of their settings: an expression may name a setting of some points only.
    alike: dict[tuple[str, ...], dict[str, Point]] = {}
    for row in points:
        typed = {name: typed_value(text) for name, text in row.params.items()}
        point = Point(
            workload=row.workload,
            params={**typed, **row.env},  # variables are texts, as for `sweep --filter`
            world_size=row.world_size,
            **{name: RUN_SETTINGS[name].restore(getattr(row, name)) for name in EXECUTION},
            batch_size=row.batch_size,
            global_batch_size=row.global_batch_size,
            scaling=row.scaling,
        )
        alike.setdefault(tuple(point.settings), {})[row.point_id] = point
    kept: set[str] = set()
    errors: list[UsageError] = []
    for group in alike.values():
        try:
            chosen = {id(point) for point in select_points([*group.values()], expression)}
        except UsageError as error:
            errors.append(error)
            continue
        for point_id, point in group.items():
            if id(point) in chosen:
                kept.add(point_id)
    if not kept:
        raise errors[0]
    return [row for row in points if row.point_id in kept]


def _causes(rows: Sequence[HistoryRow], results: Path) -> dict[tuple[str, str], Sequence[Change]]:
    """Return the changes since the run before, by (point_id, run_id) of each step."""
    from raybench.analysis.compare import changes, facts
    from raybench.results import reader

    last: dict[tuple[str, int], str] = {}
    steps: list[tuple[HistoryRow, str]] = []
    for row in rows:
        before = last.get((row.point_id, row.machine), "")
        if row.step is not None:
            steps.append((row, before))
        last[row.point_id, row.machine] = row.run_id
    ids = {run_id for row, before in steps for run_id in (row.run_id, before)}
    facts_of = {}
    for run in reader.read_runs(results) if ids else ():
        if run.run_id in ids:
            facts_of[run.run_id] = facts(run, reader.load_table(results, "devices", run.run_id))
    return {
        (row.point_id, row.run_id): changes(facts_of[before], facts_of[row.run_id])
        for row, before in steps
        if before in facts_of and row.run_id in facts_of
    }


def _read_world_sizes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers that --world-size lists, in ascending order."""
    names = [name.strip() for name in text.split(",")]
    if all(re.fullmatch(r"\d{1,7}", name) and 2 <= int(name) <= 1_000_000 for name in names):
        return tuple(sorted(set(map(int, names))))
    rule = "must be numbers from 2 up to 1,000,000, as in 8,64,512"
    raise UsageError(f"--world-size: {rule}, got {text!r}")


@click.command("predict")
@click.argument("run", default="latest", shell_complete=complete_run)
@click.option(
    "--world-size",
    "world_sizes",
    callback=_read_world_sizes,
    required=True,
    metavar="N,N,…",
    help="Numbers of devices, each more than the run measured.",
)
@results_option
@format_options(
    ["terminal", "md", "json"], "For a terminal, for a pull request, or for another program."
)
def predict_command(run: str, world_sizes: tuple[int, ...], results: Path, kind: str) -> None:
    """Predict the data-parallel steps of RUN on more devices than it measured, with intervals.

    RUN is as for `raybench report`, with ok points of two numbers of devices of one node and of one
    batch_size (weak scaling), whose step times have a 95 % interval of at most ±10 %. N is at most
    the number of devices of a node: what several nodes cost depends on their network and on NCCL's
    algorithm. The largest N decides whether a point is predicted at all. Needs no cluster.
    """
    from raybench.analysis.prediction import is_on_one_node, predict
    from raybench.analysis.rows import point_rows
    from raybench.report.prediction import Forecast
    from raybench.report.words.prediction import not_predicted
    from raybench.results import reader

    root, run_id = reader.find_run(results, run)
    points = point_rows(reader.load_table(root, "points", run_id))
    measured = [row.world_size for row in points if row.status == "ok" and is_on_one_node(row)]
    largest = max(measured, default=0)
    if world_sizes[0] <= largest:
        raise UsageError(
            f"--world-size {world_sizes[0]}: must be more than the {largest} that {run_id} measured"
        )
    nodes = reader.read_table(root, "devices", run_id, ("node_id",))["node_id"].to_pylist()
    devices_per_node = max(Counter(nodes).values(), default=1)
    predictions, left_out = predict(points, world_sizes, devices_per_node)
    if not predictions:
        why = not_predicted(left_out[0]) if left_out else "it has no points"
        raise ResultsError(f"{run_id}: cannot predict: {why}")
    forecast = Forecast(
        run=reader.read_run(root, run_id),
        predictions=predictions,
        devices_per_node=devices_per_node,
        left_out=left_out,
    )
    write_document(forecast, kind)
