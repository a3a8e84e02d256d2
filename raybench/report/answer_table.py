"""The one table of a short report: the points in the order of the answer, the best first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raybench.analysis import rows as metrics
from raybench.analysis.rows import ScaledRow, value_of, workload_metrics
from raybench.analysis.settings import setting, setting_order
from raybench.job.answer import Answer
from raybench.records.metric import Metric
from raybench.report import formatting
from raybench.report.answers import RATIOS, find_metric, settings_of_cases
from raybench.report.blocks import Column, ColumnOf, Table, make_table
from raybench.report.point_settings import DEGREES, distinguishing_settings, short_name
from raybench.report.tables import Layout, marks, metric_columns, setting_column, step_cell

MOST_ROWS = 16


def in_order_of_answer(rows: Sequence[ScaledRow], answer: Answer) -> list[ScaledRow]:
    """Return the points, case by case; in each the best first, and those without a value last.

    Points that are told by a ratio to their baseline stand in the order of their settings.
    """
    cases, metric = settings_of_cases(rows, answer), find_metric(rows, answer.metric)
    names = sorted(distinguishing_settings(rows), key=lambda name: name not in cases)
    if metric is None or answer.metric in RATIOS:
        return sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])
    sign = -1 if answer.best == "max" else 1

    def place(row: ScaledRow) -> tuple[object, ...]:
        value = value_of(row, metric) if row.status == "ok" else None
        case = [setting_order(setting(row, name)) for name in cases]
        return (case, value is None, sign * (value or 0.0))

    return sorted(rows, key=place)


def answer_table(rows: Sequence[ScaledRow], layout: Layout, answer: Answer) -> tuple[Table, int]:
    """Return the table, and how many points it leaves out to stay short.

    Of more than 16 points it shows those that finished on the most devices; where these are more
    than 16, the first of each case before the second of any.
    """
    ordered = in_order_of_answer(rows, answer)
    cases = settings_of_cases(rows, answer)
    shown = ordered
    if len(ordered) > MOST_ROWS:
        finished = [row for row in ordered if row.status == "ok"] or ordered
        most = max(row.world_size for row in finished)
        shown = _first_of_each_case([row for row in finished if row.world_size == most], cases)
    names = sorted(distinguishing_settings(rows), key=lambda name: name not in cases)
    names = names or ["precision"]
    if any(name in DEGREES for name in names):
        words = Column(title="layout", is_text=True, is_setting=True, min_chars=20)
        settings: list[ColumnOf[ScaledRow]] = [
            (words, lambda row: short_name(row, names, layout.ranks))
        ]
    else:
        settings = [
            (
                setting_column(rows, name, layout.ranks),
                lambda row, name=name: formatting.setting(name, _known(setting(row, name))),  # type: ignore[misc]
            )
            for name in names
        ]
    unit = layout.unit
    metric = find_metric(rows, answer.metric)
    shows = metrics.SCALING if layout.has_throughput else metrics.RATES
    # Parts of steps that finish no samples are not shown, so none is missed.
    no_parts = not layout.has_throughput
    own = [one for one in workload_metrics(rows) if one != metric]
    others = [one for one in metric_columns(shows, layout, own) if not _is_of(one, metric, layout)]
    step = Column(title=f"step {unit.name}")
    columns: list[ColumnOf[ScaledRow]] = [
        *settings,
        (step, lambda row: step_cell(row, unit)),
        (layout.marks_column, lambda row: marks(row).replace("b", "" if no_parts else "b")),
    ]
    if metric is not None and metric.name != "step_ms_p50":
        is_rate = metric.name == "throughput"
        title = f"{layout.items}/s" if is_rate else formatting.metric_heading(metric, unit)
        head = Column(title=title)
        columns.append((head, lambda row: formatting.metric(metric, value_of(row, metric), unit)))
    table = make_table(shown, [*columns, *others], subject=", ".join(_workloads(rows)))
    return table, len(rows) - len(shown)


def _first_of_each_case(rows: Sequence[ScaledRow], cases: Sequence[str]) -> list[ScaledRow]:
    """Return 16 of the rows in their order: the first of each case, then the second, and so on."""
    met: Counter[tuple[str, ...]] = Counter()
    places = []
    for index, row in enumerate(rows):
        case = tuple(str(setting(row, name)) for name in cases)
        places.append((met[case], index))
        met[case] += 1
    return [rows[index] for index in sorted(index for _, index in sorted(places)[:MOST_ROWS])]


def _known(value: object) -> object:
    return "" if value is None else value


def _is_of(column: ColumnOf[ScaledRow], metric: Metric | None, layout: Layout) -> bool:
    return metric is not None and column[0].title in (
        formatting.metric_heading(metric, layout.unit),
        f"{layout.items}/s" if metric.name == "throughput" else "",
    )


def _workloads(rows: Iterable[ScaledRow]) -> list[str]:
    return list(dict.fromkeys(str(row.workload) for row in rows))
