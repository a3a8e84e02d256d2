"""The answer of a run as a small table: a sorted list, or settings by settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from raybench.analysis.answer import Gains, LargestBatches, SpeedUps, speed_up_half_width
from raybench.analysis.ranking import NothingMeasured
from raybench.analysis.rows import (
    ScaledRow,
    distinguishing_settings,
    is_numeric,
    rows_compared,
    setting_of,
    setting_order,
    varying,
    with_most_ranks,
)
from raybench.records.doubts import DoubtKind
from raybench.report import formatting
from raybench.report.documents import WIDTH, ShownColumn, Table
from raybench.report.point_settings import setting_cell, short_name
from raybench.report.words import answer as words
from raybench.results.metrics import WIDEST_INTERVAL

if TYPE_CHECKING:
    from raybench.analysis.answer import RunAnswer

# More rows or columns do not fit the first screen.
MOST_ROWS = 8
_MOST_COLUMNS = 7
# A table with a smaller share of filled cells is shown as a list.
_LEAST_FILLED = 0.75
# Rows that a setting of names must save to make columns instead of a setting of numbers, which
# read better from left to right. Between 1 and 2: two rows.
_NAMES_COST = 1.5
# Stands before a value with a wide interval.
_WIDE_MARK = DoubtKind.WIDE.mark


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerValue:
    """One value of the answer, and its point."""

    row: ScaledRow
    # The value without its unit.
    text: str
    # A list begins with the largest sort key.
    sort_key: float
    # Half of the 95 % interval as a share of the value; None if unknown.
    half_width: float | None = None
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTable:
    """The table of an answer."""

    table: Table
    # Number of values that the table leaves out.
    left_out: int
    # Whether a value has the mark of wide values.
    has_wide: bool
    # The switches that are off in rows named `plain`.
    plain: tuple[str, ...] = ()


def answer_values(answer: RunAnswer) -> list[AnswerValue]:
    """Return the values that answer the question of the run."""
    data = answer.data
    match answer.leading:
        case NothingMeasured():
            return []
        case LargestBatches() as largest:
            # List each batch of the same settings once.
            batches = {(str(each.settings), each.batch_size): each for each in largest.batches}
            return [
                AnswerValue(row=batch.row, text=f"{batch.batch_size:,}", sort_key=batch.batch_size)
                for batch in batches.values()
            ]
        case SpeedUps():
            rows = with_most_ranks(data.rows)
            if not varying(rows):
                # Only one point has the most devices, so also show points with fewer devices.
                rows = [row for row in data.ok_rows if row.speed_up is not None]
            return [_speed_up_value(row) for row in rows]
        case Gains():
            rows = rows_compared(data.rows)
            if len(varying(rows)) < 2:
                # The table will be a list, which has room for the baseline, too.
                rows = [row for row in data.ok_rows if row.speed_up is not None]
            return [_speed_up_value(row) for row in rows]
    if answer.metric is None:
        return []
    unit = formatting.unit_of(data.rows)
    # The best value has the largest sort key.
    sign = 1 if answer.ranked_by.best == "max" else -1
    values = []
    for candidate in chain.from_iterable(case.ranked for case in answer.cases):
        text = formatting.metric(answer.metric, candidate.value, unit)
        value = AnswerValue(
            row=candidate.row,
            text=text,
            sort_key=sign * candidate.value,
            half_width=candidate.half_width,
        )
        values.append(value)
    return values


def _speed_up_value(row: ScaledRow) -> AnswerValue:
    return AnswerValue(
        row=row,
        text=formatting.ratio(row.speed_up),
        sort_key=row.speed_up or 0.0,
        half_width=speed_up_half_width(row),
    )


def half_widths_of_answer(answer: RunAnswer) -> list[tuple[float | None, ScaledRow]]:
    """Return half of the 95 % interval of each value, relative to the value, and its point."""
    values = answer_values(answer)
    if isinstance(answer.leading, SpeedUps | Gains):
        # The speed-up of a baseline is 1 by definition and has no interval.
        values = [value for value in values if not value.row.is_baseline] or values
    return [(value.half_width, value.row) for value in values]


def answer_table(answer: RunAnswer) -> AnswerTable | None:
    """Return the answer as a table under a heading; None for fewer than two values."""
    values = answer_values(answer)
    if len(values) < 2:
        return None
    names = distinguishing_settings([value.row for value in values])
    if isinstance(answer.leading, LargestBatches):
        names = [name for name in names if name != "batch"]
    values = _mark_wide_values(answer, values)
    heading = words.table_heading(answer)
    crossed = _cross_table(answer, values, names, heading)
    return crossed or _list_table(answer, values, names, heading)


def _switches(rows: Iterable[ScaledRow], names: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that are true in at least one row."""
    is_switch = dict.fromkeys(names, False)
    for row in rows:
        for name in names:
            is_switch[name] |= str(setting_of(row, name)).lower() == "true"
    return tuple(name for name in names if is_switch[name])


def _mark_wide_values(answer: RunAnswer, values: Sequence[AnswerValue]) -> list[AnswerValue]:
    """Return the values; a mark precedes each value with a wide interval."""
    # Memory has no interval over steps.
    if answer.is_of_memory:
        return list(values)
    is_ratio = isinstance(answer.leading, SpeedUps | Gains)
    baseline_of_series = {row.series: row for row in answer.data.rows if row.is_baseline}
    marked = []
    for value in values:
        base = baseline_of_series.get(value.row.series) if is_ratio else None
        if is_ratio and value.row.is_baseline:
            # The speed-up of a baseline is 1 by definition.
            is_wide = False
        elif value.half_width is not None:
            is_wide = value.half_width > WIDEST_INTERVAL
        else:
            # The interval over the rounds is unknown: use the steps within one round.
            is_wide = _has_wide_doubt(value.row) or (base is not None and _has_wide_doubt(base))
        text = f"{_WIDE_MARK} {value.text}" if is_wide else value.text
        marked.append(replace(value, text=text, is_wide=is_wide))
    return marked


def _has_wide_doubt(row: ScaledRow) -> bool:
    return any(doubt.kind is DoubtKind.WIDE for doubt in row.doubts or ())


def _list_table(
    answer: RunAnswer, values: Sequence[AnswerValue], names: Sequence[str], heading: str
) -> AnswerTable:
    """Return the values as a sorted list, each with its interval and its step time."""
    ranks_noun, unit = answer.data.ranks, formatting.unit_of(answer.data.rows)
    shown = sorted(values, key=lambda value: -value.sort_key)[:MOST_ROWS]
    columns = [
        ShownColumn(title="", is_text=True),
        ShownColumn(title=words.value_name(answer)),
        ShownColumn(title="±"),
        ShownColumn(title=f"step {unit.name}"),
        ShownColumn(title=f"{answer.asked.items}/s"),
    ]
    rows = []
    for value in shown:
        half = "" if value.half_width is None else formatting.half_width(value.half_width)
        step = formatting.time_in(unit, value.row.step_ms_p50)
        rate = formatting.number(value.row.throughput)
        rows.append((short_name(value.row, names, ranks_noun), value.text, half, step, rate))
    # Columns without a value, and a second column with the same title, are left out.
    index_of_title: dict[str, int] = {}
    for index, column in enumerate(columns):
        if any(row[index] for row in rows):
            index_of_title.setdefault(column.title, index)
    indexes = list(index_of_title.values())
    shown_cells = []
    for row in rows:
        shown_cells.append(tuple(row[index] for index in indexes))
    table = Table(
        columns=tuple(columns[index] for index in indexes),
        rows=tuple(shown_cells),
        kind=heading,
    )
    shown_rows = [value.row for value in shown]
    # The report says that these switches are off in rows named `plain`.
    has_plain = any(short_name(row, names, ranks_noun) == "plain" for row in shown_rows)
    switches_off = _switches(shown_rows, names) if has_plain else ()
    return AnswerTable(
        table=table,
        left_out=len(values) - len(shown),
        has_wide=any(value.is_wide for value in shown),
        plain=switches_off,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossLayout:
    """A table whose columns are the values of one setting, and whose rows are other settings."""

    column_setting: str
    row_settings: tuple[str, ...]
    # Values of `row_settings` -> value of `column_setting` -> cell.
    cells: dict[tuple[str, ...], dict[str, AnswerValue]]
    # Values of `column_setting` in order.
    column_values: tuple[str, ...]

    @property
    def filled(self) -> float:
        """Return the share of cells that have a value."""
        filled_count = sum(len(cells_of_row) for cells_of_row in self.cells.values())
        return filled_count / (len(self.cells) * len(self.column_values))


def _cross_table(
    answer: RunAnswer, values: Sequence[AnswerValue], names: Sequence[str], heading: str
) -> AnswerTable | None:
    """Return a table with one setting as columns; None if no setting fits."""
    if len(names) < 2:
        return None
    rows = [value.row for value in values]
    has_wide_marks = any(value.is_wide for value in values)
    candidates = []
    for name in names:
        layout = _cross_layout(values, name, [other for other in names if other != name])
        table = _table_of_layout(answer, layout, heading)
        # Marks before values may fill one of the two blanks between columns.
        min_chars = _table_chars(table) - (len(layout.column_values) if has_wide_marks else 0)
        if (
            2 <= len(layout.column_values) <= _MOST_COLUMNS
            and len(layout.cells) <= MOST_ROWS
            and layout.filled >= _LEAST_FILLED
            and min_chars <= WIDTH
        ):
            cost = len(layout.cells) + (0 if is_numeric(rows, name) else _NAMES_COST)
            candidates.append((cost, table, layout.row_settings))
    if not candidates:
        return None
    # The table with the fewest rows.
    _, table, row_settings = min(candidates, key=lambda candidate: candidate[0])
    # The report says that these switches are off in rows labelled `plain`.
    switches_off = _plain_switches(rows, row_settings, answer.data.ranks)
    return AnswerTable(table=table, left_out=0, has_wide=has_wide_marks, plain=switches_off)


def _plain_switches(
    rows: Sequence[ScaledRow], names: Sequence[str], ranks_noun: str
) -> tuple[str, ...]:
    """Return the switches among these settings; () if no row is named `plain`."""
    has_plain = any(_is_plain(row, names, ranks_noun) for row in rows)
    return _switches(rows, names) if has_plain else ()


def _is_plain(row: ScaledRow, names: Sequence[str], ranks_noun: str) -> bool:
    """Return whether all switches among the settings are off in a row."""
    texts = {str(setting_of(row, name)).lower() for name in names}
    switch_values = texts & {"true", "false"}
    return switch_values == {"false"} or short_name(row, names, ranks_noun) == "plain"


def _cross_layout(
    values: Sequence[AnswerValue], column_setting: str, row_settings: Sequence[str]
) -> _CrossLayout:
    """Return the values as cells, sorted by the settings of rows and of columns."""
    cells: dict[tuple[str, ...], dict[str, AnswerValue]] = {}

    def row_order(value: AnswerValue) -> list[object]:
        return [setting_order(setting_of(value.row, name)) for name in row_settings]

    for value in sorted(values, key=row_order):
        row_values = tuple(str(setting_of(value.row, name)) for name in row_settings)
        column_value = str(setting_of(value.row, column_setting))
        cells.setdefault(row_values, {})[column_value] = value
    column_values = dict.fromkeys(str(setting_of(value.row, column_setting)) for value in values)
    return _CrossLayout(
        column_setting=column_setting,
        row_settings=tuple(row_settings),
        cells=cells,
        column_values=tuple(sorted(column_values, key=setting_order)),
    )


def _table_of_layout(answer: RunAnswer, layout: _CrossLayout, heading: str) -> Table:
    """Return the table of a layout; any value of a row or column gives its label."""
    ranks_noun = answer.data.ranks
    columns = [ShownColumn(title="", is_text=True)]
    for column_value in layout.column_values:
        cells_of_rows = layout.cells.values()
        in_column = [cells[column_value] for cells in cells_of_rows if column_value in cells]
        title = _column_head(in_column[0].row, layout.column_setting, ranks_noun)
        columns.append(ShownColumn(title=title))
    rows = []
    for cells in layout.cells.values():
        first, *_ = cells.values()
        label = _row_label(first.row, layout.row_settings, ranks_noun)
        texts = [cells[value].text if value in cells else "" for value in layout.column_values]
        rows.append((label, *texts))
    return Table(columns=tuple(columns), rows=tuple(rows), kind=heading)


def _row_label(row: ScaledRow, names: Sequence[str], ranks_noun: str) -> str:
    """Return the settings of a row, with `plain` if all its switches are off."""
    label = short_name(row, names, ranks_noun)
    return f"{label}, plain" if _is_plain(row, names, ranks_noun) and label != "plain" else label


def _column_head(row: ScaledRow, name: str, ranks_noun: str) -> str:
    """Return the value of a setting as a heading; a number needs the name of its setting."""
    value = setting_of(row, name)
    if str(value).lower() in ("true", "false"):
        return f"{formatting.heading(name)}={str(value).lower()}"
    is_word = isinstance(value, str) and not is_numeric([row], name)
    return setting_cell(row, name) if is_word else short_name(row, [name], ranks_noun)


def _table_chars(table: Table) -> int:
    """Return the width of a table in characters."""
    lines = [table.titles, *table.texts]
    widths = [max(map(len, texts_of_column)) for texts_of_column in zip(*lines, strict=True)]
    gaps = 2 * (len(widths) - 1)
    return sum(widths) + gaps
