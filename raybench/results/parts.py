"""Parts of tables: Parquet files, written whole or not at all, read with the wanted columns.

A part says of which table it is and in which version; one of a newer version is refused. A column
that a part lacks is null.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
_FULL = (errno.ENOSPC, errno.EDQUOT)


class UnreadablePartsError(ResultsError):
    """Some parts cannot be read; the text names the first. reasons: why, by the path of each."""

    def __init__(self, text: str, reasons: Mapping[Path, str] | None = None) -> None:
        super().__init__(text)
        self.reasons = dict(reasons or {})


def parts_of(root: Path, table: str, run_id: str) -> list[Path]:
    """Return the paths of the parts of a run by name, as they are read; empty without any."""
    return sorted((root / table / run_id).glob("[!._]*.parquet"))


def read_parts(paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of all these parts, in their order, with the columns of `wanted`.

    A part whose rows another one has is left out: `raybench compact` was killed before it removed
    it. So is one that is gone. Raises UnreadablePartsError where files are damaged, not parts of
    the table, lack a value that `wanted` needs, or were written by a newer version of raybench.
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
    if reasons := {path: reason for _, unread, _ in found for path, reason in unread.items()}:
        raise UnreadablePartsError(next(iter(reasons.values())), reasons)
    merged = {path for *_, sources in found for path in sources}
    if not merged.isdisjoint(paths):
        return read_parts([path for path in paths if path not in merged], table, wanted)
    return pa.concat_tables([_no_rows(wanted), *(rows for rows, *_ in found)]).combine_chunks()


def _read_batch(
    some: Sequence[Path], table: str, wanted: pa.Schema
) -> tuple[pa.Table, dict[Path, str], list[Path]]:
    """Return the rows of some parts, why others cannot be read, and the parts merged into them."""
    import pyarrow as pa

    parts, unreadable, merged = [_no_rows(wanted)], dict[Path, str](), list[Path]()
    for path in some:
        try:
            rows, sources = _read_part(path, table, wanted)
        except ResultsError as error:
            unreadable[path] = str(error)
        else:
            parts.append(rows)
            merged += sources
    return pa.concat_tables(parts).combine_chunks(), unreadable, merged


def _read_part(path: Path, table: str, wanted: pa.Schema) -> tuple[pa.Table, list[Path]]:
    """Return one part with all wanted columns, and the paths of parts that are merged into it.

    A column that the part lacks is null; no rows where the file is gone. Raises ResultsError for a
    file that is damaged, not a part of the table, of a newer version, or whose values do not fit
    `wanted`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            # Not schema_arrow, which makes the schema anew.
            metadata = file.metadata.metadata or {}
            version = metadata.get(b"schema_version", b"").decode("ascii", "replace")
            is_part = metadata.get(b"table") == table.encode() and version.isdecimal()
            if not is_part or len(version) > 9:
                raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
            if int(version) > SCHEMA_VERSION:
                raise ResultsError(
                    f"{path}: written by a newer raybench (schema version {version}, here "
                    f"{SCHEMA_VERSION}); update raybench to read it"
                )
            part = file.read(columns=wanted.names, use_threads=False)
    except FileNotFoundError:
        # Removed since the folder was listed: a driver drops what a killed one left.
        return _no_rows(wanted), []
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else None
        why = f"cannot be read: {told}" if told else "not a Parquet file, or a damaged one"
        raise ResultsError(f"{path}: {why}; remove or restore it") from error
    names = metadata.get(MERGED, b"").decode("utf-8", "replace").split("/")
    return _with_columns(path, part, wanted), [path.with_name(name) for name in names if name]


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


def _no_rows(wanted: pa.Schema) -> pa.Table:
    """Return a table of these columns without rows."""
    import pyarrow as pa

    # Not empty_table, which imports pandas: `list` shall not wait for that.
    return pa.Table.from_batches([], schema=wanted)


def plain_rows(found: pa.Table) -> list[dict[str, Any]]:
    """Return each row as a dict by column, with maps as dicts and times as datetimes in UTC.

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


def write_part(path: Path, table: str, whole: pa.Table) -> None:
    """Write a part of a table, in place of what was there. Raises ResultsError where it cannot.

    Dictionaries and statistics cost a part more than they save. Compressing one row of `points` or
    `runs`, values of a few bytes, makes them longer, and reading them again takes twice as long.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    if table in ("points", "runs") and whole.num_rows == 1:
        options["compression"] = "none"
    else:
        options |= {"compression": "zstd", "compression_level": 9}
    if table == "samples":
        times = ("start_ns", "step_ns", "host_ns", "data_ns")
        split = dict.fromkeys(times, "BYTE_STREAM_SPLIT")
        options["column_encoding"] = {"iteration": "DELTA_BINARY_PACKED", **split}
    # In memory: to a file, Arrow makes many small writes, and it wraps the errors.
    sink = pa.BufferOutputStream()
    pq.write_table(whole, sink, **options)
    write_file(path, sink.getvalue())


def write_file(path: Path, content: pa.Buffer | bytes) -> None:
    """Write a file aside and rename it, so that no reader sees half of one; makes its folder.

    Raises ResultsError where that is impossible.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.unlink(missing_ok=True)  # a link there would lead elsewhere
            aside.write_bytes(content)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


@contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Raise ResultsError, in one line that names `path`, for an OSError inside the block."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        remedy = "make room there" if error.errno in _FULL else "choose another folder"
        raise ResultsError(f"{path}: cannot be written: {reason}; {remedy}") from error
