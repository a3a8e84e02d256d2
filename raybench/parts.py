"""The parts of tables, read as Arrow with the columns of today's schema."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.arrow_schemas import schema
from raybench.errors import ResultsError

if TYPE_CHECKING:
    import pyarrow as pa

_READERS = 4  # threads
_BATCH = 100  # parts


def read_parts(paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """The rows of all these parts, in their order. Raises ResultsError as `read_part` does."""
    import pyarrow as pa

    def read(some: Sequence[Path]) -> pa.Table:
        parts = [read_part(path, table, wanted) for path in some]
        return pa.concat_tables([_no_rows(wanted), *parts]).combine_chunks()

    # A part takes longer to open than to read, so they are read side by side; and a table of one
    # row takes a hundred times the memory of the row, so they are put together early.
    batches = [paths[first : first + _BATCH] for first in range(0, len(paths), _BATCH)]
    with ThreadPoolExecutor(_READERS) as readers:
        whole = list(readers.map(read, batches))
    return pa.concat_tables([_no_rows(wanted), *whole]).combine_chunks()


def attempts_in(paths: Sequence[Path], table: str) -> frozenset[tuple[str, int]]:
    """The attempts (point_id, attempt) that these parts have rows of; errors as `read_part`'s."""
    import pyarrow as pa

    names = ["point_id", "attempt"]
    wanted = pa.schema([schema(table).field(name) for name in names])
    found = read_parts(paths, table, wanted).group_by(names).aggregate([])
    return frozenset(zip(*(found[name].to_pylist() for name in names), strict=True))


def read_part(path: Path, table: str, wanted: pa.Schema) -> pa.Table:
    """The rows of one part, with the columns that are wanted; none of one that is gone.

    Raises ResultsError for a file that is damaged or not a part of the table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            # Not schema_arrow, which makes the schema anew.
            metadata = file.metadata.metadata or {}
            is_ours = metadata.get(b"table") == table.encode() and b"schema_version" in metadata
            part = file.read(columns=wanted.names, use_threads=False) if is_ours else None
    except FileNotFoundError:
        # Removed since the folder was listed: a driver drops what a killed one left.
        return _no_rows(wanted)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: {_unreadable(error)}; remove or restore it") from error
    if part is None:
        raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
    return _as_today(part, path, table, wanted)


def _no_rows(wanted: pa.Schema) -> pa.Table:
    """A table of these columns without rows."""
    import pyarrow as pa

    # Not empty_table, which imports pandas: `list` shall not wait for that.
    return pa.Table.from_batches([], schema=wanted)


def _unreadable(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return "not a Parquet file, or a damaged one"


def _as_today(part: pa.Table, path: Path, table: str, wanted: pa.Schema) -> pa.Table:
    """The part with today's columns, units and descriptions apart: older parts lack some."""
    import pyarrow as pa

    if part.schema.equals(wanted, check_metadata=False):
        return part
    try:
        columns = [
            part[field.name].cast(field.type)
            if field.name in part.column_names
            else pa.nulls(part.num_rows, field.type)
            for field in wanted
        ]
    except pa.ArrowException as error:
        raise ResultsError(f"{path}: its columns are not those of {table}: {error}") from error
    return pa.Table.from_arrays(columns, schema=wanted)
