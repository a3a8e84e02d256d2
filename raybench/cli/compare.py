"""`raybench compare`, `history`, `predict` and `advise`: what runs say when they are compared."""

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
# Runs before the newest one with a tag that are looked at for others with it.
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
    """Tell what changed from BASE to NEW, and whether that is more than chance.

    Each side is one or more runs: RUN as of `raybench report`; several RUNs with commas between
    them; or a tag as in driver=580: its newest run, and those of the 300 runs before that have it
    too, with the same job, software, settings, device models and counts of devices and nodes. A
    verdict needs two runs a side; three are better. --fail-on exits with 2 where device models or
    node counts differ, or no point is ok on both sides and none that is ok in BASE fails in NEW.

    Of health checks the newest of each side is compared (not as html), each figure by the limit of
    its test, or by --threshold where that is more. --fail-on then exits with 1 where a figure is
    slower, or a subject is no longer healthy, else with 2 where no figure was read in both checks.
    """
    source = click.get_current_context().get_parameter_source("blind")
    if source is not ParameterSource.DEFAULT and fail_on != REGRESSION:
        raise UsageError("--blind: goes with --fail-on regression only")
    sides = _find_side(results, base), _find_side(results, new)
    ids = [{(run.root.resolve(), run.run_id) for run in side.runs} for side in sides]
    if both := ids[0] & ids[1]:
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
    words = {"results": str(results), "threshold": f"{100 * threshold:g}%"}
    return [
        word
        for name, text in words.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        for word in (f"--{name}", text)
    ]


def _compare_sides(sides: tuple[_Side, _Side], threshold: float) -> Comparison:
    """Return the comparison of two sides, the base first.

    threshold: the smallest change that counts, as a share. Raises ResultsError where a run cannot
    be read.
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
    points = [[point_rows(run.points(POINT_COLUMNS)) for run in side.runs] for side in sides]
    found = [load_run_data(side.own.root, side.own.run_id) for side in sides]
    rows = [data.rows for data in found]
    return Comparison(
        base=tuple(run.run for run in base.runs),
        new=tuple(run.run for run in new.runs),
        words=(base.words, new.words),
        are_tags=base.is_tag and new.is_tag,
        threshold=threshold,
        points=compare(*points, threshold=threshold),
        changes=changes(base.own.facts, new.own.facts),
        beside=all_point_changes(*rows),
        left_out={
            one.run_id: [change.fact for change in lasting_changes(one.facts, side.own.facts)]
            for side in sides
            for one in side.left_out
        },
        impossible=[
            (f"{name} {row.point_id}", doubt_words(doubt, row))
            for name, of_run in zip(("BASE", "NEW"), rows, strict=True)
            for row in of_run
            for doubt in row.doubts or ()
            if doubt.kind is DoubtKind.IMPOSSIBLE
        ],
        machines=(_machine(found[0]), _machine(found[1])),
        ranks=found[1].ranks,
    )


def _machine(data: RunData) -> str:
    """Return the devices of a run, `4 x NVIDIA H200 on 1 node`; its cluster if unknown."""
    from raybench.report import formatting
    from raybench.report.documents import records

    if data.devices.empty:
        return data.run.cluster
    return formatting.machine(records(data.devices), data.node_counts[0])


def _compare_health(sides: tuple[_Side, _Side], threshold: float) -> HealthComparison | None:
    """Return the comparison of the newest health check of each side; None where no run is one.

    threshold: the smallest change that counts, as a share. Raises UsageError where some of the runs
    are health checks and others are not.
    """
    from raybench.analysis.compare import changes
    from raybench.health.comparison import HealthComparison, trace_figures

    kinds = {load_health(r.root, r.run_id) is not None: r.run_id for s in sides for r in s.runs}
    if len(kinds) == 2:
        check, other = kinds[True], kinds[False]
        raise UsageError(f"{check} is a health check and {other} is none: compare checks alone")
    base, new = (side.own for side in sides)
    before, now = (load_health(found.root, found.run_id) for found in (base, new))
    if before is None or now is None:
        return None
    figures = trace_figures([before.findings, now.findings], 1 + threshold)
    around = changes(base.facts, new.facts)
    return HealthComparison(base=before, new=now, figures=figures, changes=around)


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what was read
class _Found:
    """A run of the results folder `root`, by its whole id; its row and facts are read once."""

    root: Path
    run_id: str

    @cached_property
    def run(self) -> Run:
        """Return the row of the run in `runs`. Raises ResultsError where it cannot be read."""
        from raybench.results import reader

        return reader.read_run(self.root, self.run_id)

    @cached_property
    def facts(self) -> dict[Fact, str]:
        """Return what may change a measured time, as `raybench.analysis.compare.facts` does.

        Raises ResultsError where run or devices cannot be read.
        """
        from raybench.analysis.compare import facts
        from raybench.results import reader

        return facts(self.run, reader.load_table(self.root, "devices", self.run_id))

    def points(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return these columns of the run's `points`, all attempts; raises as `read_table` does."""
        from raybench.results import reader

        read = reader.read_table(self.root, "points", self.run_id, columns)
        frame: pd.DataFrame = read.to_pandas(maps_as_pydicts="strict")
        return frame

    def has_tag(self, name: str, value: str) -> bool:
        """Return whether the run has this tag; False for a run that cannot be read."""
        try:
            return self.run.tags.get(name) == value
        except ResultsError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """BASE or NEW: its newest run, `own`, and the others, the oldest first.

    left_out: runs with its tag that differ from `own` by more than their start, hosts and which
    devices of the model they had, the newest first. Of a tag only the 300 runs before `own` are
    looked at.
    """

    own: _Found
    # How the user named it, and whether that was a tag.
    words: str
    is_tag: bool = False
    others: Sequence[_Found] = ()
    left_out: Sequence[_Found] = ()

    @property
    def runs(self) -> Sequence[_Found]:
        """Return all runs of the side, the newest last."""
        return (*self.others, self.own)


def _find_side(results: Path, text: str) -> _Side:
    """Return the side that `text` means.

    text: as RUN of `report`; several of these with commas; or the tag NAME=VALUE, as of
    `_runs_with_tag`. Raises ResultsError where there is none.
    """
    # Path's would raise for a name that no file can have.
    if os.path.exists(text):  # noqa: PTH110
        return _Side(own=_find(results, text), words=text)
    if "=" in text:
        return _runs_with_tag(results, text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        return _Side(own=_find(results, text), words=text)
    found = {one.run_id: one for one in (_find(results, name) for name in names)}
    *others, own = sorted(found.values(), key=lambda one: (one.run.started_at, one.run_id))
    return _Side(own=own, words=text, others=others)


def _find(results: Path, text: str) -> _Found:
    """Return the run that `text` names. Raises ResultsError where there is none."""
    from raybench.results.reader import find_run

    root, run_id = find_run(results, text)
    return _Found(root=root, run_id=run_id)


def _runs_with_tag(results: Path, text: str) -> _Side:
    """Return the newest run with the tag `text`, and the runs with it that are alike.

    Raises ResultsError where no run has the tag.
    """
    from raybench.analysis.compare import lasting_changes
    from raybench.results import reader

    name, _, value = text.partition("=")
    runs = (_Found(root=results, run_id=run_id) for run_id in reversed(reader.run_ids(results)))
    own = next((run for run in runs if run.has_tag(name, value)), None)
    if own is None:
        rows = reader.read_table(results, "runs", None, ("tags",))["tags"]
        tags = [row or {} for row in rows.to_pylist(maps_as_pydicts="strict")]
        known = sorted({f"{key}={tag}" for row in tags for key, tag in row.items()})
        there = f"there are: {', '.join(known[:5])}" if known else "no run has tags"
        raise ResultsError(f"{results}: no run with the tag {text!r}; {there}")
    others = [run for run in islice(runs, _MOST_TAGGED) if run.has_tag(name, value)]
    # Their facts have the job too.
    same = {run.run_id for run in others if not lasting_changes(run.facts, own.facts)}
    return _Side(
        own=own,
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
    """Return the rows of `points` that the options select, without those of health checks.

    prefix: of a point id. Raises ResultsError where none is left, and UsageError for a wrong
    expression.
    """
    from raybench.analysis.compare import HISTORY_COLUMNS
    from raybench.analysis.rows import point_rows
    from raybench.results import reader

    table = reader.read_table(results, "points", None, HISTORY_COLUMNS)
    # Points of a check are short, and of devices that may be shared: their figures have limits.
    runs = reader.read_table(results, "runs", None, ["run_id", "argv"]).to_pylist()
    sweeps = {run["run_id"] for run in runs if (run["argv"] or [])[1:2] != ["health"]}
    found = point_rows(table.to_pandas(maps_as_pydicts="strict"))
    points = [row for row in found if row.run_id in sweeps]
    if not points:
        raise ResultsError(f"{results}: no points to read; `raybench sweep JOB` measures some")
    if prefix is not None:
        ids = list(dict.fromkeys(row.point_id for row in points))
        point_id = reader.pick(prefix, ids, kind="point", where=str(results))
        points = [row for row in points if row.point_id == point_id]
    return points if expression is None else _filter(points, expression)


def _filter(points: list[PointRow], expression: str) -> list[PointRow]:
    """Return the points for which the expression is true; without those that lack a name of it.

    Raises UsageError where none is left.
    """
    from raybench.analysis.scaling import typed_value
    from raybench.job.plan import select_points
    from raybench.job.point import EXECUTION, RUN_SETTINGS, Point

    # By the names of their settings: an expression may name one that only some have.
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
            chosen = set(map(id, select_points([*group.values()], expression)))
        except UsageError as error:
            errors.append(error)
        else:
            kept.update(point_id for point_id, point in group.items() if id(point) in chosen)
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
    known = {
        run.run_id: facts(run, reader.load_table(results, "devices", run.run_id))
        for run in (reader.read_runs(results) if ids else ())
        if run.run_id in ids
    }
    return {
        (row.point_id, row.run_id): changes(known[before], known[row.run_id])
        for row, before in steps
        if before in known and row.run_id in known
    }


def _read_world_sizes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers that --world-size lists, in ascending order. Raises UsageError."""
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
    found, points = (
        reader.read_run(root, run_id),
        point_rows(reader.load_table(root, "points", run_id)),
    )
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
        run=found, predictions=predictions, devices_per_node=devices_per_node, left_out=left_out
    )
    write_document(forecast, kind)


@click.command("advise")
@click.argument("run", default="latest", shell_complete=complete_run)
@results_option
@json_option
def advise_command(run: str, results: Path, as_json: bool) -> None:
    """Advise which shares and settings are best by the points of RUN, or which devices to avoid.

    RUN is as for `raybench report`, or a health check, which advises on devices. Each advice names
    its points or tests; "estimate", "predicted" and "should" are not measured. Needs no cluster.
    """
    from raybench.analysis.answer import decide
    from raybench.analysis.run_data import load_run_data
    from raybench.report.show import AdviceList, advise_run

    if (check := load_health(results, run)) is not None:
        found = AdviceList(run_id=check.run.run_id, advice=check.advice)
    else:
        answer = decide(load_run_data(results, run))
        run_id = answer.data.run.run_id
        found = AdviceList(run_id=run_id, advice=list(advise_run(answer)))
    write_document(found, "json" if as_json else "terminal")
