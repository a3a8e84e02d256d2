"""The parts of tables, read as Arrow with the columns of today's schema.

Rows of `points` and `devices` may be written by others, or by a fault. Reports divide by step times
and take logarithms: what they cannot work with is taken out here, once for all, and said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.errors import ResultsError, ResultsWarning
from raybench.records.failure_text import DETAIL_CHARACTERS
from raybench.results.schema import SCHEMA_VERSION, schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# In the metadata of a part: the names of those whose rows it has, "/" between them.
MERGED = b"merged_parts"
_READERS = 4  # threads
_BATCH = 100  # parts
_MOST_NAMED = 5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UnreadablePartsError(ResultsError):
    """Parts that cannot be read; the text is about the first. reasons: of each, by its path."""

    def __init__(self, text: str, reasons: Mapping[Path, str] | None = None) -> None:
        super().__init__(text)
        self.reasons = dict(reasons or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What was read of a file.

    later: what a later version of raybench has put there, in words.
    merged: the parts whose rows it has; what ended `raybench compact` may have left some of them.
    """

    path: Path
    rows: pa.Table
    later: str = ""
    merged: frozenset[Path] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """What was read of some files. unreadable, later: in words, by the path."""

    rows: pa.Table
    unreadable: Mapping[Path, str]
    later: Mapping[Path, str]
    merged: frozenset[Path]


def read_parts(paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Read the rows of all these parts, in their order.

    Raises UnreadablePartsError where files are damaged or not parts of the table. Warns of parts
    that a later version of raybench has written: of these the known columns are read.
    """
    import pyarrow as pa

    # A part takes longer to open than to read, so they are read side by side; and a table of one
    # row takes a hundred times the memory of the row, so they are put together early.
    batches = [paths[first : first + _BATCH] for first in range(0, len(paths), _BATCH)]
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda some: _read_batch(some, table, wanted), batches))
    if unreadable := {path: text for one in found for path, text in one.unreadable.items()}:
        raise UnreadablePartsError(next(iter(unreadable.values())), unreadable)
    if (merged := frozenset[Path]().union(*(one.merged for one in found))) & set(paths):
        return read_parts([path for path in paths if path not in merged], table, wanted)
    _warn_of_later(table, {path: text for one in found for path, text in one.later.items()})
    return pa.concat_tables([_no_rows(wanted), *(one.rows for one in found)]).combine_chunks()


def _read_batch(some: Sequence[Path], table: str, wanted: pa.Schema) -> _Batch:
    import pyarrow as pa

    unreadable: dict[Path, str] = {}
    parts: list[_Part] = []
    for path in some:
        try:
            parts.append(_read_part(path, table, wanted))
        except ResultsError as error:
            unreadable[path] = str(error)
    return _Batch(
        rows=pa.concat_tables([_no_rows(wanted), *(part.rows for part in parts)]).combine_chunks(),
        unreadable=unreadable,
        later={part.path: part.later for part in parts if part.later},
        merged=frozenset[Path]().union(*(part.merged for part in parts)),
    )


def _warn_of_later(table: str, later: Mapping[Path, str]) -> None:
    """Say once what several runs have in common."""
    runs: dict[str, list[str]] = {}
    for path, text in later.items():
        runs.setdefault(text, []).append(path.parent.name)
    for text, names in runs.items():
        more = len(set(names)) - 1
        which = f"{names[0]} and {more} more" if more else names[0]
        warnings.warn(f"{table} of {which}: {text}", ResultsWarning, stacklevel=2)


def plain_rows(found: pa.Table) -> list[dict[str, Any]]:
    """Each row as a dict, times as datetimes; a time beyond the calendar is None.

    As numbers first: pyarrow imports pandas to make a datetime, and pyarrow.compute to cast, and
    `list` shall not wait for either.
    """
    import pyarrow as pa

    times = [field.name for field in found.schema if pa.types.is_timestamp(field.type)]
    for name in times:
        numbers = found[name].combine_chunks().view(pa.int64())
        found = found.set_column(found.column_names.index(name), name, numbers)
    rows: list[dict[str, Any]] = found.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        row |= {name: _datetime(row[name]) for name in times if row[name] is not None}
    return rows


def _datetime(microseconds: int) -> datetime | None:
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return None


def attempts_in(paths: Sequence[Path], table: str) -> frozenset[tuple[str, int]]:
    """List the attempts (point_id, attempt) that these parts have. Raises as `read_parts`."""
    import pyarrow as pa

    names = ["point_id", "attempt"]
    wanted = pa.schema([schema(table).field(name) for name in names])
    found = read_parts(paths, table, wanted).group_by(names).aggregate([])
    return frozenset(zip(*(found[name].to_pylist() for name in names), strict=True))


def _read_part(path: Path, table: str, wanted: pa.Schema) -> _Part:
    """Read the rows of one part, with the columns that are wanted; none of one that is gone.

    Raises ResultsError for a file that is damaged or not a part of the table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            # Not schema_arrow, which makes the schema anew.
            metadata = file.metadata.metadata or {}
            version = version_of(metadata, table)
            part = file.read(columns=wanted.names, use_threads=False) if version else None
            unknown = _foreign_columns(file, table) if (version or 0) > SCHEMA_VERSION else []
    except FileNotFoundError:
        # Removed since the folder was listed: a driver drops what a killed one left.
        return _Part(path=path, rows=_no_rows(wanted))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: {_unreadable(error)}; remove or restore it") from error
    if version is None or part is None:
        raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
    rows, unfit = as_today(part, wanted)
    for field in wanted:
        if not field.nullable and rows[field.name].null_count:
            raise ResultsError(f"{path}: a row without {field.name}; remove or restore it")
    if version > SCHEMA_VERSION:
        later = _later(version, [*unknown, *unfit])
        return _Part(path=path, rows=rows, later=later, merged=sources_of(path, metadata))
    if unfit:
        name, reason = next(iter(unfit.items()))
        raise ResultsError(f"{path}: its columns are not those of {table}: {name}: {reason}")
    return _Part(path=path, rows=rows, merged=sources_of(path, metadata))


def sources_of(path: Path, metadata: Mapping[bytes, bytes]) -> frozenset[Path]:
    """Name the parts whose rows a part has, by its metadata."""
    names = metadata.get(MERGED, b"").decode("utf-8", "replace").split("/")
    return frozenset(path.with_name(name) for name in names if name)


def version_of(metadata: Mapping[bytes, bytes], table: str) -> int | None:
    """Read the version of a part's schema; None where it is not a part of the table."""
    text = metadata.get(b"schema_version", b"")
    is_part = metadata.get(b"table") == table.encode() and text.isdigit() and len(text) < 10
    return int(text) if is_part else None


def _foreign_columns(file: pq.ParquetFile, table: str) -> list[str]:
    return [name for name in file.schema_arrow.names if name not in schema(table).names]


def _later(version: int, left_out: Sequence[str]) -> str:
    """Say what a later version has written in a part. left_out: names of its columns."""
    names = ", ".join(left_out[:_MOST_NAMED]) + (" ..." if len(left_out) > _MOST_NAMED else "")
    count = f"{len(left_out)} column{'s are' if len(left_out) > 1 else ' is'}"
    text = f"; {count} unknown here and left out: {names}" if left_out else ""
    return f"written by a later version (schema {version}, here {SCHEMA_VERSION}){text}"


def _no_rows(wanted: pa.Schema) -> pa.Table:
    """Make a table of these columns without rows."""
    import pyarrow as pa

    # Not empty_table, which imports pandas: `list` shall not wait for that.
    return pa.Table.from_batches([], schema=wanted)


def _unreadable(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return "not a Parquet file, or a damaged one"


def as_today(part: pa.Table, wanted: pa.Schema) -> tuple[pa.Table, dict[str, str]]:
    """Give a part today's columns, units and descriptions apart; also why some do not fit.

    A column is null where the part lacks it, as older ones do, and where it does not fit.
    """
    import pyarrow as pa

    if part.schema.equals(wanted, check_metadata=False):
        return part, {}
    columns, unfit = [], {}
    for field in wanted:
        column = pa.nulls(part.num_rows, field.type)
        if field.name in part.column_names:
            try:
                column = part[field.name].cast(field.type)
            except pa.ArrowException as error:
                unfit[field.name] = " ".join(str(error).split())
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=wanted), unfit


# Without these nothing can be said of a row.
_REQUIRED = ("attempt", "status", "started_at", "workload", "params", "world_size", "precision")
_OF_DEVICE = ("kind", "node_id", "host", "address", "index", "name", "cpu_count", "versions")
_COUNTS = ("attempt", "world_size")
_YEARS_1_TO_9999_US = (-62_135_596_800_000_000, 253_402_300_800_000_000)
# Larger than any figure, small enough to be squared and multiplied. So is the inverse of any.
_MOST = 1e100
_MOST_S = 1e9
# Of one value there is no deviation: 0 is one.
_POSITIVE = (*(f"step_ms_{name}" for name in ("m", "p", "ci_")), "throughput")
# As long as the end of a log that raybench keeps.
_MOST_CHARACTERS = DETAIL_CHARACTERS


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
    notes: list[str] = []
    kept = _with_settings(found)
    if lacking := found.num_rows - kept.num_rows:
        notes.append(f"{_rows_are(lacking)} left out: a setting is missing or impossible")
    kept, impossible = _change(kept, _possible)
    if impossible:
        notes.append(f"impossible figures are read as unknown: {_some(impossible)}")
    kept, longer = _change(kept, _short)
    if longer:
        notes.append(f"texts are cut after {_MOST_CHARACTERS:,} characters: {_some(longer)}")
    return kept, notes


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
        is_possible = pc.and_(is_possible, pc.greater(column, 1 / _MOST))
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
