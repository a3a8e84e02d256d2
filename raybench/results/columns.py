"""Columns of tables from fields of dataclasses, and parts of tables as Parquet files.

A field `power_w: Annotated[float | None, Column("W", "power drawn")]` is a column of doubles. A
field that is a dataclass itself adds the columns of that dataclass. Each part names its table and
the version of the schema; a newer version is refused. A column that a part lacks is null.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)
from typing import get_type_hints as type_hints

from raybench.errors import ResultsError
from raybench.job.point import setting_text
from raybench.records.metrics import Column

if TYPE_CHECKING:
    import pyarrow as pa

_Row = TypeVar("_Row")
# `raybench list` imports these names from here, because `tables` imports the metrics and is slow.
TABLE_NAMES = (
    *("runs", "points", "samples", "devices", "telemetry", "modules", "regions", "health"),
    "summary",
)
SCHEMA_VERSION = 1
# Prefixes of files and folders that are ignored.
HIDDEN = (".", "_")

# Arrow types of Python types; all other types are strings.
_ARROW_KINDS: Mapping[Any, str] = {
    bool: "bool",
    int: "int64",
    float: "double",
    datetime: "timestamp",
}
# Values for null in a field that has no default and cannot be None.
_EMPTY_VALUES: Mapping[Any, Any] = {str: "", int: 0, float: 0.0, bool: False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of a table, declared by a field of a dataclass."""

    name: str
    # Arrow type, such as "double", "timestamp", "list<string>" or "map<string,int64>".
    kind: str
    about: Column
    # Converts a stored value that is not null.
    read: Callable[[Any], Any]
    # Value of the field for null; MISSING if null is not allowed.
    null: Any

    def value_of(self, stored: Any) -> Any:
        """Convert a stored value to the value of the field.

        Raises:
            ResultsError: the value is invalid, or null is not allowed.
        """
        try:
            value = self.null if stored is None else self.read(stored)
        except (ValueError, TypeError, OverflowError) as error:
            why = f"a row with the {self.name} {stored!r}; remove or restore its file"
            raise ResultsError(why) from error
        if value is MISSING:
            raise ResultsError(f"a row without {self.name}; remove or restore its file")
        return value

    @property
    def unit(self) -> str:
        """Unit of the values; empty if they have none."""
        return self.about.unit

    @property
    def description(self) -> str:
        """What the column holds, in a few words."""
        return self.about.description


def columns_of(row_class: type[Any]) -> tuple[TableColumn, ...]:
    """Return the columns that the fields of a dataclass declare, in their order.

    Fields without a `Column` in their type are left out.
    """
    columns: list[TableColumn] = []
    for field_name, column in _columns_by_field(cast("Hashable", row_class)):
        columns += [column] if column else columns_of(type_hints(row_class)[field_name])
    return tuple(columns)


@cache
def _columns_by_field(row_class: Any) -> tuple[tuple[str, TableColumn | None], ...]:
    """Return (field name, column) of the fields that are columns or nested dataclasses (None)."""
    hints = type_hints(row_class, include_extras=True)
    columns: list[tuple[str, TableColumn | None]] = []
    for field in fields(row_class):
        hint = hints[field.name]
        # The hint of a column is Annotated[type, Column].
        notes = getattr(hint, "__metadata__", ())
        about = next((note for note in notes if isinstance(note, Column)), None)
        if is_dataclass(hint):
            columns.append((field.name, None))
        elif about is not None:
            arrow_kind, read = _kind_and_reader(hint)
            # Null becomes the default of the field, or else None or an empty value.
            if field.default is not MISSING:
                null = field.default
            elif field.default_factory is not MISSING:
                null = field.default_factory()
            else:
                annotated_type = get_args(hint)[0]
                is_optional = NoneType in get_args(annotated_type)
                null = None if is_optional else _EMPTY_VALUES.get(_plain_type(hint), MISSING)
            name = about.name or field.name
            column = TableColumn(name=name, kind=arrow_kind, about=about, read=read, null=null)
            columns.append((field.name, column))
    return tuple(columns)


def _plain_type(hint: Any) -> Any:
    """Return a type without `Annotated` and `| None`; the type of a Literal is str."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    return str if get_origin(hint) is Literal else hint


def _kind_and_reader(hint: Any) -> tuple[str, Callable[[Any], Any]]:
    """Return the Arrow type of a field, and a function that converts its stored values."""
    plain = _plain_type(hint)
    if get_origin(plain) is tuple:
        entry_type = get_args(plain)[0]
        kind, read_entry = _kind_and_reader(entry_type)
        if is_dataclass(entry_type):
            return f"list<{kind}>", lambda entries: tuple(map(read_entry, entries))
        return f"list<{kind}>", _read_tuple
    if isinstance(plain, type) and is_dataclass(plain):
        hints = type_hints(plain)
        kinds, readers = [], {}
        for field in fields(plain):
            kind, readers[field.name] = _kind_and_reader(hints[field.name])
            kinds.append(f"{field.name}:{kind}")
        return f"struct<{','.join(kinds)}>", partial(_read_struct, plain, readers)
    if isinstance(get_origin(plain), type) and issubclass(get_origin(plain), Mapping):
        value_type = get_args(plain)[1]
        if isinstance(value_type, type) and issubclass(value_type, Enum):
            return "map<string,string>", partial(_read_enums, value_type)
        return f"map<string,{_ARROW_KINDS.get(value_type, 'string')}>", dict
    if isinstance(plain, type) and issubclass(plain, Enum):
        return "string", plain
    if plain in (bool, int, float):
        return _ARROW_KINDS[plain], plain
    return _ARROW_KINDS.get(plain, "string"), lambda value: value


def _read_struct(
    row_class: type[_Row],
    readers: Mapping[str, Callable[[Any], Any]],  # field -> converter of its stored value
    struct: Mapping[str, Any],
) -> _Row:
    """Return a dataclass from a stored struct; null becomes None."""
    values: dict[str, Any] = {}
    for name, read in readers.items():
        stored = struct.get(name)
        # pandas reads null numbers as NaN.
        is_null = stored is None or (isinstance(stored, float) and math.isnan(stored))
        values[name] = None if is_null else read(stored)
    return row_class(**values)


def _read_enums(enum_class: type[Enum], stored: Any) -> dict[str, Enum]:
    return {name: enum_class(value) for name, value in dict(stored).items()}


def _read_tuple(stored: Any) -> tuple[Any, ...]:
    """Return a stored list or array as a tuple; NaN becomes None."""
    values = stored.tolist() if hasattr(stored, "tolist") else stored
    # Only NaN differs from itself.
    return tuple(None if value != value else value for value in values)


def to_row(record: Any) -> dict[str, Any]:
    """Return the values of a dataclass by column; nested dataclasses are flattened.

    Enums become their values, and the values of maps of texts become texts.
    """
    row: dict[str, Any] = {}
    for field_name, column in _columns_by_field(cast("Hashable", type(record))):
        value = getattr(record, field_name)
        if column is None:
            row |= to_row(value)
        elif isinstance(value, Enum):
            row[column.name] = value.value
        elif column.kind.startswith("list<struct<") and value is not None:
            row[column.name] = [_struct_of(entry) for entry in value]
        elif column.kind.startswith("struct<") and value is not None:
            row[column.name] = _struct_of(value)
        elif isinstance(value, Mapping) and column.kind == "map<string,string>":
            row[column.name] = {key: setting_text(entry) for key, entry in value.items()}
        else:
            row[column.name] = value
    return row


def _struct_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; enums become their values."""
    struct: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        struct[field.name] = value.value if isinstance(value, Enum) else value
    return struct


def from_row(row_class: type[_Row], row: Mapping[str, Any]) -> _Row:
    """Return a row as a dataclass; null and missing columns become the default of the field.

    Raises:
        ResultsError: a value is invalid, or a column without default is null.
    """
    values: dict[str, Any] = {}
    for field_name, column in _columns_by_field(cast("Hashable", row_class)):
        if column is None:  # a nested dataclass, whose columns are in the same row
            values[field_name] = from_row(type_hints(row_class)[field_name], row)
        else:
            values[field_name] = column.value_of(row.get(column.name))
    return row_class(**values)


def _arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a `TableColumn.kind`, such as "double" or "struct<x:int64>"."""
    import pyarrow as pa

    if kind == "timestamp":
        return pa.timestamp("us", tz="UTC")
    if kind.startswith("list<"):
        return pa.list_(_arrow_type(kind.removeprefix("list<").removesuffix(">")))
    if kind.startswith("struct<"):
        fields_text = kind.removeprefix("struct<").removesuffix(">")
        pairs = (pair.split(":") for pair in fields_text.split(","))
        return pa.struct([(name, _arrow_type(field_kind)) for name, field_kind in pairs])
    if kind.startswith("map<string,"):
        value_kind = kind.removeprefix("map<string,").removesuffix(">")
        return pa.map_(pa.string(), _arrow_type(value_kind))
    return pa.type_for_alias(kind)


def arrow_schema(
    table: str, columns: Sequence[TableColumn], required: Collection[str] = ("run_id",)
) -> pa.Schema:
    """Return the Arrow schema of a table; only the required columns must not be null."""
    import pyarrow as pa

    schema_fields = []
    for column in columns:
        metadata = {"unit": column.unit} if column.unit else {}
        metadata["description"] = column.description
        is_nullable = column.name not in required
        schema_fields.append(
            pa.field(column.name, _arrow_type(column.kind), is_nullable, metadata=metadata)
        )
    return pa.schema(
        schema_fields, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)}
    )


# Metadata key of a merged part: the names of the parts that it replaces, joined by "/".
MERGED = b"merged_parts"
_READER_THREADS = 4
_PARTS_PER_BATCH = 100
_MAX_VERSION_DIGITS = 9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class UnreadablePartsError(ResultsError):
    """Some parts cannot be read; the text names the first."""

    def __init__(self, text: str, reasons: Mapping[Path, str] | None = None) -> None:
        super().__init__(text)
        # Path of each unreadable part -> why it cannot be read.
        self.reasons = dict(reasons or {})


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder sorted by name, without hidden entries; [] without a folder.

    Raises:
        ResultsError: the folder cannot be listed.
    """
    with os_errors_in_one_line(folder, "read", "make it readable, or move it elsewhere"):
        try:
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(HIDDEN)]
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted(visible, key=lambda entry: entry.name)


def parts_of(root: Path, table: str, run_id: str) -> list[Path]:
    """Return the parts of a run in a table, sorted by name.

    Args:
        run_id: the whole id.

    Raises:
        ResultsError: the folder cannot be listed.
    """
    entries = entries_of(root / table / run_id)
    files = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return [Path(entry.path) for entry in files if entry.name.endswith(".parquet")]


def read_parts(paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of these parts, in order, with the columns of `wanted`.

    Missing files are skipped. Parts that another part replaces are skipped too; a killed `raybench
    compact` leaves such parts.

    Raises:
        UnreadablePartsError: parts are damaged, of a newer raybench, or do not fit `wanted`.
    """
    import pyarrow as pa

    # A table of one row takes a hundred times the memory of the row, so each batch is joined.
    batches = [
        paths[first : first + _PARTS_PER_BATCH] for first in range(0, len(paths), _PARTS_PER_BATCH)
    ]
    # Opening a part takes longer than reading it, so threads help from the second batch on.
    if len(batches) <= 1:
        read_batches = [_read_batch(batch, table, wanted) for batch in batches]
    else:
        with ThreadPoolExecutor(_READER_THREADS) as threads:
            read_batches = list(
                threads.map(lambda batch: _read_batch(batch, table, wanted), batches)
            )
    replaced: set[Path] = set()
    for batch in read_batches:
        replaced.update(batch.replaced)
    # A replaced part is not needed, so it may be damaged.
    reasons: dict[Path, str] = {}
    for batch in read_batches:
        reasons |= {path: why for path, why in batch.unreadable.items() if path not in replaced}
    if reasons:
        first_reason, *_ = reasons.values()
        raise UnreadablePartsError(first_reason, reasons)
    # The rows of a replaced part were read twice, so read again without these parts.
    if not replaced.isdisjoint(paths):
        return read_parts([path for path in paths if path not in replaced], table, wanted)
    rows = [batch.rows for batch in read_batches]
    return pa.concat_tables([_no_rows(wanted), *rows]).combine_chunks()


class _Batch(NamedTuple):
    """Parts of a table that were read together."""

    rows: pa.Table
    # Why each unreadable part cannot be read.
    unreadable: dict[Path, str]
    # Parts that parts of this batch replace.
    replaced: list[Path]


def _read_batch(paths: Sequence[Path], table: str, wanted: pa.Schema) -> _Batch:
    """Read parts, and collect the errors of unreadable parts instead of raising the first."""
    import pyarrow as pa

    tables = [_no_rows(wanted)]
    unreadable: dict[Path, str] = {}
    # Older parts whose rows are also in a part that was read.
    replaced: list[Path] = []
    for path in paths:
        try:
            rows, replaced_by_part = _read_part(path, table, wanted)
        except ResultsError as error:
            unreadable[path] = str(error)
        else:
            tables.append(rows)
            replaced += replaced_by_part
    return _Batch(pa.concat_tables(tables).combine_chunks(), unreadable, replaced)


def _read_part(path: Path, table: str, wanted: pa.Schema) -> tuple[pa.Table, list[Path]]:
    """Return the rows of one part with all wanted columns, and the parts that it replaces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Open the file here: Arrow would parse a relative path with a colon as a URI.
        with path.open("rb") as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
            # Read the metadata directly, because schema_arrow would rebuild the schema.
            metadata = file.metadata.metadata or {}
            version = metadata.get(b"schema_version", b"").decode("ascii", "replace")
            is_part = metadata.get(b"table") == table.encode() and version.isdecimal()
            # A longer version is no number that raybench wrote, and slow to parse.
            if not is_part or len(version) > _MAX_VERSION_DIGITS:
                raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
            if int(version) > SCHEMA_VERSION:
                raise ResultsError(
                    f"{path}: written by a newer raybench (schema version {version}, here "
                    f"{SCHEMA_VERSION}); update raybench to read it"
                )
            part = file.read(columns=wanted.names, use_threads=False)
    except FileNotFoundError:
        # A driver that resumes the run has deleted this leftover meanwhile.
        return _no_rows(wanted), []
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        why = f"cannot be read: {reason}" if reason else "not a Parquet file, or a damaged one"
        raise ResultsError(f"{path}: {why}; remove or restore it") from error
    # An older raybench wrote fewer columns, or columns of other types.
    if not part.schema.equals(wanted, check_metadata=False):
        columns = []
        for field in wanted:
            if field.name not in part.column_names:
                column = pa.nulls(part.num_rows, field.type)
            else:
                try:
                    column = part[field.name].cast(field.type)
                except pa.ArrowException as error:
                    why = " ".join(str(error).split())
                    message = f"{path}: its column {field.name} does not fit: {why}"
                    raise ResultsError(message) from error
            if not field.nullable and column.null_count:
                raise ResultsError(f"{path}: a row without {field.name}; remove or restore it")
            columns.append(column)
        part = pa.Table.from_arrays(columns, schema=wanted)
    names = metadata.get(MERGED, b"").decode("utf-8", "replace").split("/")
    return part, [path.with_name(name) for name in names if name]


def _no_rows(wanted: pa.Schema) -> pa.Table:
    import pyarrow as pa

    # empty_table would import pandas, and slow `raybench list` down.
    return pa.Table.from_batches([], schema=wanted)


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return each row as a dict, with maps as dicts and times as datetimes in UTC.

    Args:
        table: its times must be in microseconds, and not inside lists or maps.
    """
    import pyarrow as pa

    # Convert times as numbers, because pyarrow would import pandas for datetimes, which is slow.
    time_columns = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    for name in time_columns:
        microseconds = table[name].combine_chunks().view(pa.int64())
        table = table.set_column(table.column_names.index(name), name, microseconds)
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        for name in time_columns:
            if row[name] is not None:
                row[name] = _EPOCH + timedelta(microseconds=row[name])
    return rows


def attempts_in(paths: Sequence[Path], table: str) -> frozenset[tuple[str, int]]:
    """Return (point_id, attempt) of all attempts in these parts.

    Raises:
        UnreadablePartsError: parts are damaged, or of a newer raybench.
    """
    import pyarrow as pa

    names = ["point_id", "attempt"]
    wanted = pa.schema([pa.field("point_id", pa.string(), nullable=False), ("attempt", pa.int64())])
    # Grouping without an aggregate leaves each distinct attempt once.
    attempts = read_parts(paths, table, wanted).group_by(names).aggregate([])
    point_ids, numbers = (attempts[name].to_pylist() for name in names)
    return frozenset(zip(point_ids, numbers, strict=True))


def write_part(path: Path, table: str, rows: pa.Table) -> None:
    """Write rows as a part of a table.

    Args:
        rows: their schema is that of `tables.schema`, metadata included.

    Raises:
        ResultsError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    # A single row is too short to be worth a compression.
    if table in ("points", "runs") and rows.num_rows == 1:
        options["compression"] = "none"
    else:
        options |= {"compression": "zstd", "compression_level": 9}
    # Similar numbers compress better with these encodings.
    if table == "samples":
        times = ("start_ns", "step_ns", "host_ns", "data_ns")
        split = dict.fromkeys(times, "BYTE_STREAM_SPLIT")
        options["column_encoding"] = {"iteration": "DELTA_BINARY_PACKED", **split}
    # Write to memory first: Arrow makes many small writes, and wraps OS errors.
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, **options)
    replace_file(path, sink.getvalue())


def replace_file(path: Path, content: pa.Buffer | bytes, mode: int | None = None) -> None:
    """Write a file atomically, without fsync, and create its folder.

    A link is replaced, and its target stays. Devices and pipes, and anything in /dev, are written
    to directly.

    Args:
        path: the file.
        content: the new content.
        mode: permissions, such as 0o600; None: the default of the process.

    Raises:
        ResultsError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os_errors_in_one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (path.parent == Path("/dev") or not path.is_file()):
            path.write_bytes(content)
            return
        try:
            # Delete a leftover first: if it is a link, write_bytes would write to its target.
            temporary.unlink(missing_ok=True)
            temporary.write_bytes(content)
            if mode is not None:
                temporary.chmod(mode)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def delete_file(path: Path) -> None:
    """Delete a file, if it exists.

    Raises:
        ResultsError: the file cannot be deleted.
    """
    with os_errors_in_one_line(path, "deleted", "delete it yourself"):
        path.unlink(missing_ok=True)


@contextmanager
def os_errors_in_one_line(
    path: Path, action: str = "written", remedy: str = "choose another folder"
) -> Iterator[None]:
    """Turn an OSError inside the `with` block into a ResultsError of one line that names `path`.

    Args:
        action: completes "cannot be ..." in the message.
        remedy: what the user can do, unless the disk is full.
    """
    try:
        yield
    except OSError as error:
        lines = str(error).splitlines() or ["OSError"]
        reason = error.strerror or lines[0]
        way_out = "make room there" if error.errno in _DISK_FULL else remedy
        raise ResultsError(f"{path}: cannot be {action}: {reason}; {way_out}") from error
