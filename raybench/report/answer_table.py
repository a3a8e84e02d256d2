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

if TYPE_CHECKING:
    from raybench.analysis.answer import RunAnswer

# More rows, or columns, do not fit the first screen.
MOST_ROWS = 8
_MOST_COLUMNS = 7
# A table with more empty cells than this is shown as a list.
_LEAST_FILLED = 0.75
# Numbers read better from left to right than names do: names must save two rows.
_NAMES_COST = 1.5
# Before a value that is wide.
_WIDE = DoubtKind.WIDE.mark


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerValue:
    """One value of the answer, and the point that has it."""

    row: ScaledRow
    # As it is shown, without its unit.
    text: str
    # Sorts a list: the largest first.
    order: float
    # Half of the 95 % interval as a share of the value; None if unknown.
    half_width: float | None = None
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTable:
    """The table of an answer."""

    table: Table
    # How many values it leaves out.
    left_out: int
    # A value has the mark of wide values.
    has_wide: bool
    # The switches that are off in the rows that are named `plain`.
    plain: tuple[str, ...] = ()


def answer_values(answer: RunAnswer) -> list[AnswerValue]:
    """Return the values that answer the question, each with its point; [] without any."""
    data = answer.data
    match answer.leading:
        case NothingMeasured():
            return []
        case LargestBatches() as largest:
            by_batch = {(str(item.settings), item.batch_size): item for item in largest.batches}
            return [
                AnswerValue(row=item.row, text=f"{item.batch_size:,}", order=item.batch_size)
                for item in by_batch.values()
            ]
        case SpeedUps():
            rows = with_most_ranks(data.rows)
            is_one = len(varying(rows)) == 0
            rows = [row for row in data.ok_rows if row.speed_up is not None] if is_one else rows
            return [_speed_up(row) for row in rows]
        case Gains():
            rows = rows_compared(data.rows)
            if len(varying(rows)) < 2:
                # A single list has room for the baseline, with which other points are compared.
                rows = [row for row in data.ok_rows if row.speed_up is not None]
            return [_speed_up(row) for row in rows]
    if answer.metric is None:
        return []
    unit = formatting.unit_of(data.rows)
    sign = 1 if answer.ranked_by.best == "max" else -1
    values = []
    for candidate in chain.from_iterable(case.ranked for case in answer.cases):
        text = formatting.metric(answer.metric, candidate.value, unit)
        value = AnswerValue(
            row=candidate.row,
            text=text,
            order=sign * candidate.value,
            half_width=candidate.half_width,
        )
        values.append(value)
    return values


def _speed_up(row: ScaledRow) -> AnswerValue:
    return AnswerValue(
        row=row,
        text=formatting.ratio(row.speed_up),
        order=row.speed_up or 0.0,
        half_width=speed_up_half_width(row),
    )


def half_widths_of_answer(answer: RunAnswer) -> list[tuple[float | None, ScaledRow]]:
    """Return half of the 95 % interval of each value as a share of it, and the point of the value.

    A half width is None if it is unknown.
    """
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
    values = _marked(answer, values)
    heading = words.table_heading(answer)
    return _crossed(answer, values, names, heading) or _list(answer, values, names, heading)


def _switches(rows: Iterable[ScaledRow], names: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that are true in some rows."""
    switches = dict.fromkeys(names, False)
    for row in rows:
        for name in names:
            switches[name] |= str(setting_of(row, name)).lower() == "true"
    return tuple(name for name, is_true in switches.items() if is_true)


def _marked(answer: RunAnswer, values: Sequence[AnswerValue]) -> list[AnswerValue]:
    """Return the values, the wide ones with their mark before the text.

    A value is wide by its interval over the rounds; without one, by the interval of its step time
    within one round. A speed-up depends on the step time of its baseline point too.
    """
    if answer.is_of_memory:
        return list(values)
    is_ratio = isinstance(answer.leading, SpeedUps | Gains)
    bases = {row.series: row for row in answer.data.rows if row.is_baseline}
    marked = []
    for value in values:
        rows = [value.row]
        if is_ratio and value.row.series in bases:
            rows.append(bases[value.row.series])
        is_wide = any(_is_wide(row) for row in rows)
        if value.half_width is not None:
            is_wide = value.half_width >= words.WIDE
        if is_ratio and value.row.is_baseline:
            is_wide = False
        text = f"{_WIDE} {value.text}" if is_wide else value.text
        marked.append(replace(value, text=text, is_wide=is_wide))
    return marked


def _is_wide(row: ScaledRow) -> bool:
    return any(doubt.kind is DoubtKind.WIDE for doubt in row.doubts or ())


def _list(
    answer: RunAnswer, values: Sequence[AnswerValue], names: Sequence[str], heading: str
) -> AnswerTable:
    """Return the values as a list, sorted, each with its interval and its step time."""
    ranks, unit = answer.data.ranks, formatting.unit_of(answer.data.rows)
    shown = sorted(values, key=lambda value: -value.order)[:MOST_ROWS]
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
        rows.append((short_name(value.row, names, ranks), value.text, half, step, rate))
    # Columns without a value, and a second column with the same title, are left out.
    kept: dict[str, int] = {}
    for index, column in enumerate(columns):
        if any(row[index] for row in rows):
            kept.setdefault(column.title, index)
    cells = []
    for row in rows:
        cells.append(tuple(row[index] for index in kept.values()))
    table = Table(
        columns=tuple(columns[index] for index in kept.values()), rows=tuple(cells), kind=heading
    )
    has_plain = any(short_name(value.row, names, ranks) == "plain" for value in shown)
    return AnswerTable(
        table=table,
        left_out=len(values) - len(shown),
        has_wide=any(value.is_wide for value in shown),
        plain=_plain([value.row for value in shown], names, ranks) if has_plain else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """One setting as columns, all others as rows."""

    column: str
    others: tuple[str, ...]
    cells: dict[tuple[str, ...], dict[str, AnswerValue]]
    heads: tuple[str, ...]

    @property
    def filled(self) -> float:
        """Return the share of cells that have a value."""
        count = sum(len(cells) for cells in self.cells.values())
        return count / (len(self.cells) * len(self.heads))


def _crossed(
    answer: RunAnswer, values: Sequence[AnswerValue], names: Sequence[str], heading: str
) -> AnswerTable | None:
    """Return a table with one setting as columns; None if no setting fits."""
    if len(names) < 2:
        return None
    rows = [value.row for value in values]
    # Columns may stand closer together where marks need the room.
    has_wide = any(value.is_wide for value in values)
    layouts = []
    for name in names:
        layout = _layout(values, name, [other for other in names if other != name])
        table = _table(answer, layout, heading)
        if (
            2 <= len(layout.heads) <= _MOST_COLUMNS
            and len(layout.cells) <= MOST_ROWS
            and layout.filled >= _LEAST_FILLED
            and _width(table) - has_wide * len(layout.heads) <= WIDTH
        ):
            cost = len(layout.cells) + (0 if is_numeric(rows, name) else _NAMES_COST)
            layouts.append((cost, table, layout.others))
    if not layouts:
        return None
    _, table, others = min(layouts, key=lambda layout: layout[0])
    plain = _plain(rows, others, answer.data.ranks)
    return AnswerTable(table=table, left_out=0, has_wide=has_wide, plain=plain)


def _plain(rows: Sequence[ScaledRow], names: Sequence[str], ranks: str) -> tuple[str, ...]:
    """Return the switches among these settings if a row is called `plain`, else nothing."""
    is_any = any(_is_plain(row, names, ranks) for row in rows)
    return _switches(rows, names) if is_any else ()


def _is_plain(row: ScaledRow, names: Sequence[str], ranks: str) -> bool:
    """Return whether all switches among the settings are off in a row."""
    switches = {str(setting_of(row, name)).lower() for name in names} & {"true", "false"}
    return switches == {"false"} or short_name(row, names, ranks) == "plain"


def _layout(values: Sequence[AnswerValue], name: str, others: Sequence[str]) -> _Layout:
    cells: dict[tuple[str, ...], dict[str, AnswerValue]] = {}

    def order(value: AnswerValue) -> list[object]:
        return [setting_order(setting_of(value.row, other)) for other in others]

    for value in sorted(values, key=order):
        key = tuple(str(setting_of(value.row, other)) for other in others)
        cells.setdefault(key, {})[str(setting_of(value.row, name))] = value
    heads = dict.fromkeys(str(setting_of(value.row, name)) for value in values)
    ordered = tuple(sorted(heads, key=setting_order))
    return _Layout(column=name, others=tuple(others), cells=cells, heads=ordered)


def _table(answer: RunAnswer, layout: _Layout, heading: str) -> Table:
    ranks = answer.data.ranks
    heads = []
    for text in layout.heads:
        first = next(cells[text] for cells in layout.cells.values() if text in cells)
        heads.append(_head(first.row, layout.column, ranks))
    rows = []
    for cells in layout.cells.values():
        first = next(iter(cells.values()))
        texts = [cells[text].text if text in cells else "" for text in layout.heads]
        rows.append((_label(first.row, layout.others, ranks), *texts))
    columns = [ShownColumn(title="", is_text=True), *(ShownColumn(title=head) for head in heads)]
    return Table(columns=tuple(columns), rows=tuple(rows), kind=heading)


def _label(row: ScaledRow, names: Sequence[str], ranks: str) -> str:
    """Return the settings of a row; `plain` tells that all its switches are off."""
    label = short_name(row, names, ranks)
    return f"{label}, plain" if _is_plain(row, names, ranks) and label != "plain" else label


def _head(row: ScaledRow, name: str, ranks: str) -> str:
    """Return a value as the head of a column; a number needs the name of its setting."""
    value = setting_of(row, name)
    if str(value).lower() in ("true", "false"):
        return f"{formatting.heading(name)}={str(value).lower()}"
    is_word = isinstance(value, str) and not is_numeric([row], name)
    return setting_cell(row, name) if is_word else short_name(row, [name], ranks)


def _width(table: Table) -> int:
    lines = [table.titles, *table.texts]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    return sum(widths) + 2 * (len(widths) - 1)
