"""The points of a run, and everything about one of them, as documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from raybench.analysis.rows import BY_NAME, MAIN_RATES, value_of, workload_metrics
from raybench.analysis.step_times import SlowestRegion
from raybench.records.metric import Metric
from raybench.report import formatting
from raybench.report.blocks import (
    SETTING_CHARS,
    Block,
    Column,
    ColumnOf,
    Line,
    Listing,
    Table,
    make_table,
    metric_column,
)
from raybench.report.documents import Document
from raybench.report.json_text import records as json_records
from raybench.report.plain_text import plain_lines, shorten
from raybench.report.point_settings import setting_columns
from raybench.report.references import Standing
from raybench.report.sections.ranks import ranks_of_point
from raybench.report.sections.regions import share_of_step
from raybench.results.point_row import PointRow

_REASON_CHARS = 80
_MIN_REASON_CHARS = 24
# A model has hundreds of modules; the table `modules` holds the rest.
_MAX_MODULES = 20
_MODULE_CHARS = 20
# The end of a traceback or a log says most; `--json` has all of it.
_DETAIL_LINES = 15
# These have a place of their own.
_APART = ("methods", "error_detail", "workload_metrics", "workload_headings")


@dataclass(frozen=True, slots=True, kw_only=True)
class PointList(Document):
    """The points of one run: a document (see `raybench.report.documents`)."""

    run_id: str
    points: Sequence[PointRow]

    @property
    def title(self) -> str:
        """Return nothing: the table speaks for itself."""
        return ""

    def blocks(self) -> Iterator[Block]:
        """Yield the table: the settings that vary among the points, and what was measured."""
        if not self.points:
            yield Line(text="No point has been finished yet.")
        else:
            yield _points_table(self.points)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object: run_id and points, with all columns."""
        return {"run_id": self.run_id, "points": list(map(vars, self.points))}


def _points_table(rows: Sequence[PointRow]) -> Table:
    """Return the table of the points.

    Where it is too wide, it is shown without further metrics, then without reasons of failures,
    without the rate, and without a status that is ok everywhere.
    """
    unit = formatting.unit_of(rows)
    found = [m for m in MAIN_RATES if any(getattr(row, m.name) is not None for row in rows)]
    rates = [*found, *workload_metrics(rows)]
    extras = [*rates[1:], BY_NAME["step_ms_p99"], BY_NAME["peak_mem_allocated_bytes"]]
    count = len(extras)
    is_all_ok = all(row.status == "ok" for row in rows)

    def of_metric(metric: Metric, drop: int, unit: formatting.Unit) -> ColumnOf[PointRow]:
        column = metric_column(metric, unit, {}, drop)
        return column, lambda row: formatting.metric(metric, value_of(row, metric), unit)

    columns: list[ColumnOf[PointRow]] = [
        (Column(title="point", is_text=True), lambda row: row.point_id),
        *([(Column(title="round", is_text=True), _round)] if _has_rounds(rows) else []),
        *setting_columns(rows),
        (
            Column(title="status", is_text=True, drop=count + 3 if is_all_ok else None),
            lambda row: formatting.STATUS_WORDS[row.status],
        ),
        (Column(title=f"step {unit.name}"), lambda row: formatting.step_in(unit, row)),
        *(of_metric(metric, count + 2, formatting.MILLISECONDS) for metric in rates[:1]),
        *(of_metric(metric, count - place, unit) for place, metric in enumerate(extras)),
        (
            Column(title="reason", is_text=True, min_chars=_MIN_REASON_CHARS, drop=count + 1),
            lambda row: shorten(_reason(row), _REASON_CHARS),
        ),
    ]
    return make_table(rows, columns)


def _has_rounds(rows: Sequence[PointRow]) -> bool:
    return any(row.round is not None and row.round > 1 for row in rows)


def _round(row: PointRow) -> str:
    """Return the number of the round, and whether the point is a control in it."""
    number = f"{row.round:.0f}" if row.round is not None else ""
    return f"{number} control" if row.control_of is not None else number


def _reason(row: PointRow) -> str:
    message = row.error_message
    if message is None:
        return ""
    return formatting.failure(row.status, row.error_type, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointDetails(Document):
    """Everything about a point over all rounds: a document (see `raybench.report.documents`).

    row: of `points`, its rounds as one row (`mean_of_rounds`). rounds: how many that are.
    step_ms_interval: the 95 % interval of the step over the rounds; None where it is not known.
    attempts: all of them, in order. ranks, modules, regions: as the functions of
    `raybench.analysis.step_times` give them; empty where modules were not profiled or the step
    names no regions.
    traces: paths. wrote_logs: whether there is text of its ranks. units: of all columns.
    standings: figures of the point beside their references.
    """

    row: PointRow
    rounds: int = 1
    step_ms_interval: tuple[float | None, float | None] = (None, None)
    ranks: pd.DataFrame
    modules: pd.DataFrame
    traces: Sequence[str]
    wrote_logs: bool = False
    attempts: Sequence[PointRow] = ()
    regions: Sequence[SlowestRegion] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    standings: Sequence[Standing] = ()

    @property
    def title(self) -> str:
        """Return nothing: the first line names the point."""
        return ""

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        point, ranks, modules, regions, traces, attempts, references.
        """
        return {
            "point": vars(self.row),
            "ranks": json_records(self.ranks),
            "modules": json_records(self.modules),
            "regions": list(map(vars, self.regions)),
            "traces": list(self.traces),
            "attempts": list(map(vars, self.attempts)),
            "references": [one.members for one in self.standings],
        }

    def blocks(self) -> Iterator[Block]:
        """Yield the step over all rounds, all that is known of the point, and its attempts."""
        low, high = self.step_ms_interval
        if self.rounds > 1 and self.row.step_ms_p50:
            text = f"Step {formatting.number(self.row.step_ms_p50)} ms over {self.rounds} rounds"
            if low and high:
                text += f", {formatting.number(low)} to {formatting.number(high)} ms (95% interval)"
            yield Line(text=f"{text}; each number below is that of all rounds.", tone="strong")
        yield Listing(lines=self._facts(), is_quoted=True)
        yield from self._error_detail()
        if self.standings:
            lines = [(one.entry.metric, one.text) for one in self.standings]
            yield Listing(title="Against the reference", lines=lines)
        if len(self.attempts) > 1:
            yield _attempts(self.attempts)
        methods = self.row.methods
        if isinstance(methods, Mapping) and methods:
            lines = list(_methods(methods))
            yield Listing(title="How each was measured", lines=lines, is_quoted=True)
        tables = (
            _ranks(self.ranks),
            ranks_of_point(self.row, formatting.unit_of([self.row])),
            _regions(self.regions),
            _modules(self.modules),
        )
        for table in tables:
            if table is not None and table.rows:
                yield table
                yield from [Line(text=table.note)] if table.note else []
        if self.wrote_logs:
            text = "What its ranks wrote: the same command with --logs"
            yield Line(text=text, is_apart=True)
        if self.traces:
            yield Line(text="Traces, for ui.perfetto.dev", tone="strong", is_apart=True)
            yield from (Line(text=path, is_whole=True) for path in self.traces)

    def _facts(self) -> list[tuple[str, str]]:
        """Return the columns that hold a value, then the metrics of the workload's own."""
        row = {
            name: value[:12] if name.endswith("_sha256") and isinstance(value, str) else value
            for name, value in vars(self.row).items()
        }
        facts = [
            (name, text)
            for name, value in row.items()
            if name not in _APART and (text := _value(value, self.units.get(name, "")))
        ]
        own = workload_metrics([self.row])
        return facts + [(m.title, formatting.metric(m, value_of(self.row, m))) for m in own]

    def _error_detail(self) -> Iterator[Line]:
        detail = self.row.error_detail
        lines = plain_lines(detail) if detail is not None else []
        if lines:
            last = lines[-_DETAIL_LINES:]
            cut = f", the last {len(last)} of {len(lines)} lines" if len(lines) > len(last) else ""
            yield Line(text=f"error_detail{cut}", tone="strong", is_apart=True)
            yield from (Line(text=text, is_indented=True) for text in last)


def _attempts(attempts: Sequence[PointRow]) -> Table:
    columns: list[ColumnOf[PointRow]] = [
        (Column(title="attempt", is_text=True), lambda row: str(row.attempt)),
        (
            Column(title="round", is_text=True),
            lambda row: _round(row) if _has_rounds(attempts) else "",
        ),
        (
            Column(title="status", is_text=True),
            lambda row: formatting.STATUS_WORDS[row.status],
        ),
        (
            Column(title="started, UTC", is_text=True),
            lambda row: f"{row.started_at:%Y-%m-%d %H:%M:%S}",
        ),
        (Column(title="took s"), lambda row: formatting.number(row.duration_s, 3)),
        (Column(title="step ms"), lambda row: formatting.number(row.step_ms_p50)),
        (Column(title="reason", is_text=True, min_chars=SETTING_CHARS), _reason),
    ]
    return make_table(attempts, columns, kind="Attempts")


def _methods(methods: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each column and how it was measured; `the same` where the one before says it."""
    last = ""
    for name, text in methods.items():
        yield name, "the same" if text == last else text
        last = text


def _value(value: Any, unit: str) -> str:
    """Return a cell and its unit; empty for null and for an empty list or map."""
    if isinstance(value, Mapping):
        return formatting.settings({name: _in_few_digits(one) for name, one in value.items()})
    if isinstance(value, list | tuple):
        return "; ".join(str(_in_few_digits(item)) for item in value)
    if not formatting.has_value(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if hasattr(value, "isoformat"):
        return str(value.isoformat(timespec="seconds"))
    if unit == "bytes":
        return formatting.size(value)
    return f"{_in_few_digits(value)} {unit}".rstrip()


def _in_few_digits(value: Any) -> Any:
    return formatting.number(value) if isinstance(value, float) else value


def _ranks(ranks: pd.DataFrame) -> Table | None:
    if ranks.empty:
        return None
    names = {"median ms": 2, "min ms": 3, "max ms": 4, "data ms": 5}
    columns: list[ColumnOf[tuple[Any, ...]]] = [
        (Column(title="rank"), lambda row: str(row[0])),
        (Column(title="iterations"), lambda row: str(row[1])),
        *(
            (Column(title=name), lambda row, place=place: formatting.number(row[place]))
            for name, place in names.items()
        ),
    ]
    return make_table(list(ranks.itertuples(index=False, name=None)), columns)


def _regions(regions: Sequence[SlowestRegion]) -> Table | None:
    if not regions:
        return None
    columns: list[ColumnOf[SlowestRegion]] = [
        (
            Column(title="region", is_text=True, min_chars=_MODULE_CHARS),
            lambda row: row.region,
        ),
        (Column(title="calls"), lambda row: str(row.calls)),
        (Column(title="ms"), lambda row: formatting.part_ms(row.region_ms)),
        (Column(title="of the step"), share_of_step),
    ]
    kind = "Regions of the step, after the timed steps"
    return make_table(regions, columns, kind=kind)


def _modules(modules: pd.DataFrame) -> Table | None:
    if modules.empty:
        return None
    more = len(modules) - _MAX_MODULES
    hidden = f"; {more} more are in the table `modules`" if more > 0 else ""

    def name(title: str, column: str, otherwise: str = "") -> ColumnOf[Mapping[Any, Any]]:
        shown = Column(title=title, is_text=True, min_chars=_MODULE_CHARS)
        return shown, lambda row: row[column] or otherwise

    columns: list[ColumnOf[Mapping[Any, Any]]] = [
        name("module", "module", "(the model)"),
        name("class", "kind"),
        (Column(title="calls"), lambda row: str(row["calls"])),
        (Column(title="forward ms"), lambda row: formatting.part_ms(row["forward_ms"])),
        (Column(title="backward ms"), lambda row: formatting.part_ms(row["backward_ms"])),
    ]
    kind = f"Modules with their children, per step{hidden}"
    return make_table(modules.head(_MAX_MODULES).to_dict("records"), columns, kind=kind)
