"""The parts of tables, read as Arrow with the columns of the schema; a missing one is null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.errors import ResultsError
from raybench.results.columns import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa

# In the metadata of a part: the names of those whose rows it has, "/" between them.
MERGED = b"merged_parts"
_READERS = 4  # threads
_BATCH = 100  # parts
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UnreadablePartsError(ResultsError):
    """Some parts cannot be read; the text names the first. reasons: why, by the path of each."""

    def __init__(self, text: str, reasons: Mapping[Path, str] | None = None) -> None:
        super().__init__(text)
        self.reasons = dict(reasons or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """What was read of some files.

    unreadable: why a file could not be read, by its path. merged: parts whose rows
    `raybench compact` has put into these files.
    """

    rows: pa.Table
    unreadable: Mapping[Path, str]
    merged: frozenset[Path]


def read_parts(paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Read the rows of all these parts, in their order.

    A part whose rows another one has is left out: `raybench compact` was killed before it removed
    it. Raises UnreadablePartsError where files are damaged, not parts of the table, or written by a
    newer version of raybench.
    """
    import pyarrow as pa

    # A part takes longer to open than to read, so they are read side by side; and a table of one
    # row takes a hundred times the memory of the row, so they are put together early.
    batches = [paths[first : first + _BATCH] for first in range(0, len(paths), _BATCH)]
    if len(batches) <= 1:  # a thread takes longer to start than one part to read
        found = [_read_batch(some, table, wanted) for some in batches]
    else:
        with ThreadPoolExecutor(_READERS) as readers:
            found = list(readers.map(lambda some: _read_batch(some, table, wanted), batches))
    if unreadable := {path: text for one in found for path, text in one.unreadable.items()}:
        raise UnreadablePartsError(next(iter(unreadable.values())), unreadable)
    if (merged := frozenset[Path]().union(*(one.merged for one in found))) & set(paths):
        return read_parts([path for path in paths if path not in merged], table, wanted)
    return pa.concat_tables([_no_rows(wanted), *(one.rows for one in found)]).combine_chunks()


def _read_batch(some: Sequence[Path], table: str, wanted: pa.Schema) -> _Batch:
    import pyarrow as pa

    unreadable: dict[Path, str] = {}
    parts, merged = [_no_rows(wanted)], frozenset[Path]()
    for path in some:
        try:
            rows, sources = _read_part(path, table, wanted)
        except ResultsError as error:
            unreadable[path] = str(error)
        else:
            parts.append(rows)
            merged |= sources
    whole = pa.concat_tables(parts).combine_chunks()
    return _Batch(rows=whole, unreadable=unreadable, merged=merged)


def plain_rows(found: pa.Table) -> list[dict[str, Any]]:
    """Return each row as a dict, with times as datetimes.

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
        for name in times:
            if (microseconds := row[name]) is not None:
                row[name] = _EPOCH + timedelta(microseconds=microseconds)
    return rows


def attempts_in(paths: Sequence[Path], table: str) -> frozenset[tuple[str, int]]:
    """Return the attempts (point_id, attempt) in these parts. Raises as `read_parts`."""
    import pyarrow as pa

    names = ["point_id", "attempt"]
    id_type, number = pa.string(), pa.int64()
    wanted = pa.schema([pa.field("point_id", id_type, nullable=False), ("attempt", number)])
    found = read_parts(paths, table, wanted).group_by(names).aggregate([])
    return frozenset(zip(*(found[name].to_pylist() for name in names), strict=True))


def _read_part(path: Path, table: str, wanted: pa.Schema) -> tuple[pa.Table, frozenset[Path]]:
    """Return the wanted columns of one part, and the paths of parts whose rows are merged into it.

    No rows where the file is gone.

    Raises ResultsError for a file that is damaged, not a part of the table, or of a newer version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            # Not schema_arrow, which makes the schema anew.
            metadata = file.metadata.metadata or {}
            _check_version(path, metadata, table)
            part = file.read(columns=wanted.names, use_threads=False)
    except FileNotFoundError:
        # Removed since the folder was listed: a driver drops what a killed one left.
        return _no_rows(wanted), frozenset()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: {_unreadable(error)}; remove or restore it") from error
    rows = _with_columns(path, part, wanted)
    names = metadata.get(MERGED, b"").decode("utf-8", "replace").split("/")
    return rows, frozenset(path.with_name(name) for name in names if name)


def _check_version(path: Path, metadata: Mapping[bytes, bytes], table: str) -> None:
    version = metadata.get(b"schema_version", b"").decode("ascii", "replace")
    if metadata.get(b"table") != table.encode() or not (version.isdecimal() and len(version) < 10):
        raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
    if int(version) > SCHEMA_VERSION:
        raise ResultsError(
            f"{path}: written by a newer raybench (schema version {version}, here "
            f"{SCHEMA_VERSION}); update raybench to read it"
        )


def _no_rows(wanted: pa.Schema) -> pa.Table:
    """Return a table of these columns without rows."""
    import pyarrow as pa

    # Not empty_table, which imports pandas: `list` shall not wait for that.
    return pa.Table.from_batches([], schema=wanted)


def _unreadable(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return "not a Parquet file, or a damaged one"


def _with_columns(path: Path, part: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Return a part with these columns, null where it lacks one.

    Raises ResultsError where a column has another type, or lacks a value that it must have.
    """
    import pyarrow as pa

    if part.schema.equals(wanted, check_metadata=False):
        return part
    columns = []
    for field in wanted:
        if field.name not in part.column_names:
            column = pa.nulls(part.num_rows, field.type)
        else:
            try:
                column = part[field.name].cast(field.type)
            except pa.ArrowException as error:
                reason = " ".join(str(error).split())
                raise ResultsError(
                    f"{path}: its column {field.name} does not fit: {reason}"
                ) from error
        if not field.nullable and column.null_count:
            raise ResultsError(f"{path}: a row without {field.name}; remove or restore it")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=wanted)
