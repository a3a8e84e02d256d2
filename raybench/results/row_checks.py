"""Rows of `points` and `devices` that others have written, or a fault.

Reports divide by step times and take logarithms. What a report cannot work with is taken out where
rows are read, once for all of them, and said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raybench.records.failure_text import DETAIL_CHARACTERS

if TYPE_CHECKING:
    import pyarrow as pa

# Without these nothing can be said of a row.
_REQUIRED = ("attempt", "status", "started_at", "workload", "params", "world_size", "precision")
_OF_DEVICE = ("kind", "node_id", "host", "address", "index", "name", "cpu_count", "versions")
_COUNTS = ("attempt", "world_size")
_YEARS_1_TO_9999_US = (-62_135_596_800_000_000, 253_402_300_800_000_000)
# Larger than any figure, small enough to be squared and multiplied.
_MOST = 1e100
_MOST_S = 1e9
# Of one value there is no deviation: 0 is one.
_POSITIVE = (*(f"step_ms_{name}" for name in ("m", "p", "ci_")), "throughput")
# As long as the end of a log that raybench keeps.
_MOST_CHARACTERS = DETAIL_CHARACTERS
_MOST_NAMED = 5


def drop_unidentified_devices(found: pa.Table) -> tuple[pa.Table, list[str]]:
    """Take out rows of `devices` that do not say which device they are of; says how many."""
    lacking = [name for name in found.column_names if name in _OF_DEVICE and found[name].null_count]
    if not lacking:
        # Without pyarrow.compute, for which `list` shall not wait.
        return found, []
    kept = _without_null(found, lacking)
    count = found.num_rows - kept.num_rows
    return kept, [f"{_rows_are(count)} left out: {_some(lacking)} missing"]


def sound_points(found: pa.Table) -> tuple[pa.Table, list[str]]:
    """Take out rows that lack a setting, figures that are impossible and the ends of long texts.

    found: rows of `points`, of any columns. Also says what was taken out.
    """
    said: list[str] = []
    kept = _with_settings(found)
    if lacking := found.num_rows - kept.num_rows:
        said.append(f"{_rows_are(lacking)} left out: a setting is missing or impossible")
    kept, impossible = _change(kept, _possible)
    if impossible:
        said.append(f"impossible figures are read as unknown: {_some(impossible)}")
    kept, longer = _change(kept, _short)
    if longer:
        said.append(f"texts are cut after {_MOST_CHARACTERS:,} characters: {_some(longer)}")
    return kept, said


def _rows_are(count: int) -> str:
    return f"{count} row is" if count == 1 else f"{count} rows are"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (" ..." if len(names) > _MOST_NAMED else "")


def _without_null(found: pa.Table, names: list[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    is_whole = pa.array([True] * found.num_rows, pa.bool_())
    for name in names:
        is_whole = pc.and_(is_whole, found[name].is_valid())
    return found.filter(is_whole)


def _with_settings(found: pa.Table) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    found = _without_null(found, [name for name in _REQUIRED if name in found.column_names])
    for name in [name for name in _COUNTS if name in found.column_names]:
        found = found.filter(pc.greater(found[name], 0))
    if "started_at" in found.column_names:
        number, (first, end) = found["started_at"].cast(pa.int64()), _YEARS_1_TO_9999_US
        found = found.filter(pc.and_(pc.greater_equal(number, first), pc.less(number, end)))
    return found


def _change(
    found: pa.Table, change: Callable[[pa.ChunkedArray, str], pa.ChunkedArray]
) -> tuple[pa.Table, list[str]]:
    """Change the columns of a table; also name those that differ."""
    names = []
    for place, field in enumerate(found.schema):
        before = found[field.name]
        column = change(before, field.name)
        if column is not before:
            names.append(field.name)
            found = found.set_column(place, field, column)
    return found, names


def _possible(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Put null in place of what cannot be."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_floating(column.type):
        return column
    is_possible = pc.less(pc.abs(column), _MOST)
    if name.startswith(_POSITIVE):
        is_possible = pc.and_(is_possible, pc.greater(column, 0))
    elif name == "duration_s":
        is_possible = pc.and_(pc.greater_equal(column, 0), pc.less(column, _MOST_S))
    if pc.all(is_possible).as_py() is not False:
        return column
    return pc.if_else(is_possible, column, pa.scalar(None, column.type))


def _short(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Cut the long texts of a column; the texts in lists too."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.type == pa.string():
        texts = column
    elif column.type == pa.list_(pa.string()):
        texts = pc.list_flatten(column)
    else:
        return column
    longest = pc.max(pc.utf8_length(texts)).as_py()
    if longest is None or longest <= _MOST_CHARACTERS:
        return column
    if column.type == pa.string():
        return pa.chunked_array([[_shorten(text) for text in column.to_pylist()]], column.type)
    lists = [
        None if texts is None else [_shorten(t) for t in texts] for texts in column.to_pylist()
    ]
    return pa.chunked_array([lists], column.type)


def _shorten(text: str | None) -> str | None:
    if text is None or len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
