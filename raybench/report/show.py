"""What `list` and `show` print: runs, the points of a run, and everything about one point.

Importing this module, and lists of runs and points, load no pandas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from raybench.analysis.rows import MAIN_RATES, METRICS_BY_NAME, value_of, workload_metrics
from raybench.records.status import RunStatus
from raybench.report import formatting
from raybench.report.documents import (
    SETTING_CHARS,
    Block,
    ColumnOf,
    Document,
    Legend,
    Line,
    Listing,
    Table,
    column,
    make_table,
    metric_column,
    records,
)
from raybench.report.formatting import cut_end, cut_middle, plain_lines
from raybench.report.point_settings import setting_columns
from raybench.report.words.doubts import doubt_words
from raybench.report.words.failures import failure_of_row
from raybench.report.words.reasons import not_measured_words
from raybench.report.words.references import standing_text
from raybench.results.point_row import are_parts_of_first_round
from raybench.results.tables import Run, column_units

if TYPE_CHECKING:
    import pandas as pd

    from raybench.analysis.references import Standing
    from raybench.records.metrics import Metric
    from raybench.results.point_row import PointRow
    from raybench.results.reader import RankLog
    from raybench.results.tables import RegionRow


# A model has hundreds of modules; the table `modules` has all.
_MAX_MODULES = 20
# The last lines of an error say most; JSON has all.
_MAX_ERROR_LINES = 15
# So much of a SHA-256 identifies a file.
_HASH_CHARS = 12
# Columns of a point that have blocks of their own, or whose text depends on the whole row.
_COLUMNS_SHOWN_OTHERWISE = (
    *("methods", "not_measured", "doubts", "error_detail", "workload_metrics"),
    "workload_headings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList(Document):
    """Runs, the newest last."""

    runs: Sequence[Run]
    # run_id -> devices of the run; runs may be missing.
    machines: Mapping[str, str]
    # run_id -> what the run found, for a paragraph per run; None for a table with a line per run.
    leads: Mapping[str, str] | None = None

    def blocks(self) -> Iterator[Block]:
        """Yield a table, or with `leads` a listing per run."""
        if self.leads is None:
            yield self._table()
            return
        for run in self.runs:
            outcome = run.status.value
            if run.status is not RunStatus.RUNNING:
                counts = f"{run.points_ok} ok, {run.points_failed} failed, {run.points_skipped}"
                outcome += f" after {formatting.run_time(run)}; {counts} skipped"
            phrases = (
                f"{formatting.when(run.started_at)}, {outcome}",
                self.machines.get(run.run_id, ""),
                formatting.settings(run.tags),
                self.leads.get(run.run_id, ""),
            )
            lines = [("", text) for text in phrases if text]
            yield Listing(title=run.run_id, lines=lines, is_quoted=True)

    def _table(self) -> Table:
        """Return the table of runs; a running one has no counts of points."""

        def count_column(title: str, field: str) -> ColumnOf[Run]:
            def count_text(run: Run) -> str:
                return "" if run.status is RunStatus.RUNNING else str(getattr(run, field))

            return column(title, count_text)

        def duration(run: Run) -> str:
            # Without blanks: 80 characters have little room beside the run_id.
            time = formatting.run_time(run)
            return time.replace(" min", "m").replace(" h", "h").replace(" s", "s")

        def machine(run: Run) -> str:
            return self.machines.get(run.run_id, "")

        def tags(run: Run) -> str:
            return cut_end(formatting.settings(run.tags), 30)

        # A table that is too wide loses the column with the lowest `drop` first.
        columns: list[ColumnOf[Run]] = [
            column("run", lambda run: run.run_id, is_text=True, is_setting=True),
            column("started, UTC", lambda run: f"{run.started_at:%F %R}", is_text=True, drop=3),
            column("status", lambda run: run.status.value, is_text=True),
            count_column("ok", "points_ok"),
            count_column("fail", "points_failed"),
            count_column("skip", "points_skipped"),
            column("took", duration, drop=2),
            column("machine", machine, is_text=True, drop=1),
            column("tags", tags, is_text=True, drop=0),
        ]
        return make_table(self.runs, columns)

    def members(self) -> Mapping[str, Any]:
        """Return the runs."""
        return {"runs": self.runs}


@dataclass(frozen=True, slots=True, kw_only=True)
class PointList(Document):
    """The points of a run, with a row for each round and each control."""

    run_id: str
    points: Sequence[PointRow]

    def blocks(self) -> Iterator[Block]:
        """Yield a table of the settings that vary, the step times, rates and failures."""
        if not self.points:
            yield Line(text="No point has been finished yet.")
            return
        rows, unit = self.points, formatting.unit_of(self.points)
        rates = []
        for metric in MAIN_RATES:
            if any(getattr(row, metric.name) is not None for row in rows):
                rates.append(metric)
        rates += workload_metrics(rows)
        main_rates, extras = rates[:1], rates[1:]  # one main rate, if there is any
        extras += [METRICS_BY_NAME["step_ms_p99"], METRICS_BY_NAME["peak_mem_allocated_bytes"]]
        # A table that is too wide first loses the extras, the last one first, and then these.
        drop_reason, drop_rate, drop_status = len(extras) + 1, len(extras) + 2, len(extras) + 3
        is_all_ok = all(row.status == "ok" for row in rows)
        columns: list[ColumnOf[PointRow]] = [
            column("point", lambda row: row.point_id, is_text=True),
            *_round_column(rows),
            *setting_columns(rows),
            column(
                "status",
                lambda row: formatting.STATUS_WORDS[row.status],
                is_text=True,
                drop=drop_status if is_all_ok else None,
            ),
            column(f"step {unit.name}", lambda row: formatting.step_in(unit, row)),
        ]
        for metric in main_rates:
            columns.append(_rate_column(metric, drop_rate, formatting.MILLISECONDS))
        for index, metric in enumerate(extras):
            columns.append(_rate_column(metric, len(extras) - index, unit))
        reason: ColumnOf[PointRow] = column(
            "reason",
            lambda row: cut_middle(failure_of_row(row), 80),
            is_text=True,
            min_chars=24,
            drop=drop_reason,
        )
        yield make_table(rows, [*columns, reason])

    def members(self) -> Mapping[str, Any]:
        """Return the run_id, and the points with all columns."""
        return {"run_id": self.run_id, "points": self.points}


def _rate_column(metric: Metric, drop: int, unit: formatting.Unit) -> ColumnOf[PointRow]:
    """Return the column of a metric; `drop` is as in `ShownColumn`."""
    shown_column = metric_column(metric, unit, {}, drop)
    return shown_column, lambda row: formatting.metric(metric, value_of(row, metric), unit)


def _round_column(rows: Sequence[PointRow]) -> list[ColumnOf[PointRow]]:
    """Return the column of rounds, which also marks controls; [] if there is one round."""

    def round_text(row: PointRow) -> str:
        number = f"{row.round:.0f}" if row.round is not None else ""
        return f"{number} control" if row.control_of is not None else number

    has_rounds = any(row.round is not None and row.round > 1 for row in rows)
    return [column("round", round_text, is_text=True)] if has_rounds else []


@dataclass(frozen=True, slots=True, kw_only=True)
class PointDetails(Document):
    """Everything about a point over all rounds."""

    # The mean over the rounds.
    row: PointRow
    # Number of ok rounds, at least 1.
    rounds: int = 1
    # 95 % intervals over the rounds; None if unknown.
    step_ms_interval: tuple[float | None, float | None] = (None, None)
    throughput_interval: tuple[float | None, float | None] = (None, None)
    # The precision in `row` is meaningless: a script ran, and its job sets no precision.
    is_precision_unknown: bool = False
    # Step times of each rank, by `rank_steps`.
    ranks: pd.DataFrame
    # The slowest modules, by `slowest_modules`; empty if not profiled.
    modules: pd.DataFrame
    # Paths of the traces.
    traces: Sequence[str]
    # Whether `raybench show --logs` has output of the ranks.
    wrote_logs: bool = False
    # All attempts in order, with controls.
    attempts: Sequence[PointRow] = ()
    # The slowest regions; empty if the step names no regions.
    regions: Sequence[RegionRow] = ()
    # The values of the point compared with references.
    standings: Sequence[Standing] = ()

    def members(self) -> Mapping[str, Any]:
        """Return the point, ranks, modules, regions, traces, attempts and references."""
        return {
            "point": self.row,
            "ranks": records(self.ranks),
            "modules": records(self.modules),
            "regions": self.regions,
            "traces": self.traces,
            "attempts": self.attempts,
            "references": [standing.members for standing in self.standings],
        }

    def blocks(self) -> Iterator[Block]:
        """Yield step, columns, error, references, attempts, methods, tables, logs and traces."""
        yield from self._step_lines()
        yield Listing(lines=list(self._fact_lines()), is_quoted=True)
        yield from self._error_lines()
        if self.standings:
            lines = [
                (standing.entry.metric, standing_text(standing)) for standing in self.standings
            ]
            yield Listing(title="Compared with reference values of this device model", lines=lines)
        if len(self.attempts) > 1:
            yield self._table_of_attempts()
        if lines := list(self._method_lines()):
            yield Listing(title="How each was measured", lines=lines, is_quoted=True)
        yield from self._detail_tables()
        yield Legend()
        if self.wrote_logs:
            yield Line(text="What its ranks wrote: the same command with --logs", is_apart=True)
        if self.traces:
            yield Line(text="Traces, for ui.perfetto.dev", tone="strong", is_apart=True)
            yield from (Line(text=path, is_whole=True) for path in self.traces)

    def _step_lines(self) -> Iterator[Line]:
        """Yield sentences on the step time and the rate over several rounds."""
        row, (low, high) = self.row, self.step_ms_interval
        if self.rounds > 1 and row.step_ms_p50:
            text = (
                f"The step took {formatting.number(row.step_ms_p50)} ms over {self.rounds} rounds"
            )
            if low and high:
                ends = f"{formatting.number(low)} to {formatting.number(high)}"
                text += f"; the 95 % interval is {ends} ms"
            yield Line(text=f"{text}.", tone="strong")
        low_rate, high_rate = self.throughput_interval
        if row.throughput and low_rate and high_rate:
            rate = formatting.number(row.throughput)
            ends = f"{formatting.number(low_rate)} to {formatting.number(high_rate)}"
            text = f"The rate was {rate} samples/s; the 95 % interval is {ends}."
            yield Line(text=text, tone="strong")
        if self.rounds > 1 and row.step_ms_p50:
            text = "Each number below covers all rounds."
            if are_parts_of_first_round(row):
                step = formatting.number(row.parts_step_ms)
                text += (
                    " The parts of the step are an exception: they are from round 1, whose step "
                    f"took {step} ms (parts_step_ms)."
                )
            yield Line(text=text)

    def _error_lines(self) -> Iterator[Line]:
        """Yield the last lines of the error."""
        lines = plain_lines(self.row.error_detail or "")
        if not lines:
            return
        shown = lines[-_MAX_ERROR_LINES:]
        which = f", the last {len(shown)} of {len(lines)} lines" if len(lines) > len(shown) else ""
        yield Line(text=f"error_detail{which}", tone="strong", is_apart=True)
        yield from (Line(text=text) for text in shown)

    def _table_of_attempts(self) -> Table:
        unit = formatting.unit_of(self.attempts)
        columns: list[ColumnOf[PointRow]] = [
            column("attempt", lambda row: str(row.attempt), is_text=True),
            *_round_column(self.attempts),
            column("status", lambda row: formatting.STATUS_WORDS[row.status], is_text=True),
            column("started, UTC", lambda row: f"{row.started_at:%F %T}", is_text=True),
            column("took s", lambda row: formatting.number(row.duration_s, 3)),
            column(f"step {unit.name}", lambda row: formatting.step_in(unit, row)),
            column("reason", failure_of_row, is_text=True, min_chars=SETTING_CHARS),
        ]
        return make_table(self.attempts, columns, kind="Attempts")

    def _method_lines(self) -> Iterator[tuple[str, str]]:
        """Yield (column, how the column was measured, or why it was not)."""
        methods = dict(self.row.methods or {})
        for name, why in (self.row.not_measured or {}).items():
            methods[name] = not_measured_words(why)
        previous = ""
        for name, text in methods.items():
            yield name, "the same" if text == previous else text
            previous = text

    def _fact_lines(self) -> Iterator[tuple[str, str]]:
        """Yield (name, value) of columns that have a value, then of metrics of the workload."""
        unit_of_column = column_units("points")
        for name, value in vars(self.row).items():
            text = _value_text(value, unit_of_column.get(name, ""))
            if name == "precision" and self.is_precision_unknown:
                text = "as the script has it"
            if text and name not in _COLUMNS_SHOWN_OTHERWISE:
                yield name, text[:_HASH_CHARS] if name.endswith("_sha256") else text
        if self.row.doubts:
            yield "doubts", "; ".join(doubt_words(doubt, self.row) for doubt in self.row.doubts)
        for metric in workload_metrics([self.row]):
            yield metric.title, formatting.metric(metric, value_of(self.row, metric))

    def _detail_tables(self) -> Iterator[Table]:
        """Yield the tables of ranks, of regions and of modules."""
        from raybench.report.sections import ranks_of_point, region_columns  # loads pandas

        unit = formatting.unit_of([self.row])
        if len(self.ranks):
            yield _table_of_frame(self.ranks, "")
        if table_of_ranks := ranks_of_point(self.row, unit):
            yield table_of_ranks
        if self.regions:
            kind = f"Regions of the step, {unit.name}, after the timed steps"
            yield make_table(self.regions, region_columns(unit), kind=kind)
        if len(self.modules):
            hidden = len(self.modules) - _MAX_MODULES
            note = f"; {hidden} more are in the table `modules`" if hidden > 0 else ""
            shown = self.modules.head(_MAX_MODULES)
            # The root of the tree has no name.
            shown = shown.assign(module=shown["module"].replace("", "(the model)"))
            yield _table_of_frame(shown, f"Modules with their children, per step{note}")


def _table_of_frame(frame: pd.DataFrame, kind: str) -> Table:
    """Return a frame as a table; headings have blanks instead of underscores."""

    def frame_column(name: str) -> ColumnOf[Mapping[Any, Any]]:
        is_text = name in ("module", "kind")
        # The kind of a module is its class.
        title = "class" if name == "kind" else name.replace("_", " ")
        return column(
            title,
            lambda row: _value_text(row[name], unit=""),
            is_text=is_text,
            min_chars=20 if is_text else None,
        )

    return make_table(frame.to_dict("records"), map(frame_column, frame.columns), kind=kind)


def _value_text(value: Any, unit: str) -> str:
    """Return a value with its unit as text; "" for None, NaN, and empty lists and maps."""
    if isinstance(value, Mapping):
        return formatting.settings({name: _with_four_digits(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return "; ".join(str(_with_four_digits(item)) for item in value)
    if not formatting.has_value(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if hasattr(value, "isoformat"):
        return str(value.isoformat(timespec="seconds"))
    if unit == "bytes":
        return formatting.size(value)
    return f"{_with_four_digits(value)} {unit}".rstrip()


def _with_four_digits(value: Any) -> Any:
    """Return a float with four digits, "" for NaN, and any other value unchanged."""
    return formatting.number(value) if isinstance(value, float) else value


def format_logs(logs: Sequence[RankLog]) -> str:
    """Return the output of the ranks of each attempt; ranks with the same output share a heading.

    Args:
        logs: sorted by point and attempt.
    """
    blocks = []
    for (point_id, attempt), group in groupby(logs, lambda log: (log.point_id, log.attempt)):
        ranks_of_text: dict[str, list[int]] = {}
        for log in group:
            ranks_of_text.setdefault(log.text, []).append(log.rank)
        for text, ranks in ranks_of_text.items():
            noun = "rank" if len(ranks) == 1 else "ranks"
            which_ranks = f"{noun} {', '.join(map(str, ranks))}"
            lines = [f"== {point_id}, attempt {attempt}, {which_ranks}", *plain_lines(text), ""]
            blocks.append("\n".join(lines))
    return "\n".join(blocks)
