"""Tables: their columns by the fields of dataclasses, and their parts, Parquet files.

A field `power_w: Annotated[float | None, Column("W", "power drawn")]` is a column of doubles, a
field that is a dataclass itself stands for the columns of that one. A part is written whole or not
at all. It says of which table it is and in which version; one of a newer version is refused. A
column that a part lacks is null.
"""

from __future__ import annotations

import errno
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
# Here and not beside their columns, so that `raybench list` need not load what computes metrics.
TABLE_NAMES = (
    *("runs", "points", "samples", "devices", "telemetry", "modules", "regions", "health"),
    "summary",
)
SCHEMA_VERSION = 1
# Files and folders that begin so are not ours to read.
HIDDEN = (".", "_")

_KINDS: Mapping[Any, str] = {bool: "bool", int: "int64", float: "double", datetime: "timestamp"}
# What stands for null in a field that cannot be None and has no default.
_EMPTY: Mapping[Any, Any] = {str: "", int: 0, float: 0.0, bool: False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of a table, as a field of a dataclass declares it.

    kind: its type, as in "double", "timestamp", "list<string>", "map<string,int64>". about: as
    declared. read: makes the value of the field from one that is not null; NaN in a list is None.
    null: the value of the field where the table has null; `MISSING` where it must not.
    """

    name: str
    kind: str
    about: Column
    read: Callable[[Any], Any]
    null: Any

    def value_of(self, stored: Any) -> Any:
        """Return the value of the field for that of the table; None is null, NaN alone is not.

        Raises ResultsError for null where `null` is MISSING, and if `read` refuses the value.
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
        """The unit of the values; empty where they have none."""
        return self.about.unit

    @property
    def description(self) -> str:
        """What the column holds, in a few words."""
        return self.about.description


def columns_of(kind: type[Any]) -> tuple[TableColumn, ...]:
    """Return the columns that the fields of a dataclass declare, in their order.

    A field that is a dataclass itself gives all its columns; a field without a Column gives none.
    """
    return tuple(
        column
        for name, own in _own_columns(cast("Hashable", kind))
        for column in ([own] if own else columns_of(type_hints(kind)[name]))
    )


@cache
def _own_columns(kind: Any) -> tuple[tuple[str, TableColumn | None], ...]:
    """Return the name and the column of each field; None for one that is a dataclass itself."""
    hints = type_hints(kind, include_extras=True)
    found: list[tuple[str, TableColumn | None]] = []
    for field in fields(kind):
        hint = hints[field.name]
        notes = getattr(hint, "__metadata__", ())
        about = next((note for note in notes if isinstance(note, Column)), None)
        if is_dataclass(hint):
            found.append((field.name, None))
        elif about is not None:
            arrow_kind, read = _convert(hint)
            if field.default is not MISSING:
                null = field.default
            elif field.default_factory is not MISSING:
                null = field.default_factory()
            else:
                is_optional = NoneType in get_args(get_args(hint)[0])
                null = None if is_optional else _EMPTY.get(_plain_type(hint), MISSING)
            name = about.name or field.name
            column = TableColumn(name=name, kind=arrow_kind, about=about, read=read, null=null)
            found.append((field.name, column))
    return tuple(found)


def _plain_type(hint: Any) -> Any:
    """Return a type without its annotation, and without None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    return str if get_origin(hint) is Literal else hint


def _convert(hint: Any) -> tuple[str, Callable[[Any], Any]]:
    """Return the Arrow type of a field, and what makes its values from those of a table."""
    plain = _plain_type(hint)
    if get_origin(plain) is tuple:
        kind, read = _convert(get_args(plain)[0])
        if is_dataclass(get_args(plain)[0]):
            return f"list<{kind}>", lambda values: tuple(map(read, values))
        return f"list<{kind}>", _tuple
    if isinstance(plain, type) and is_dataclass(plain):
        hints = type_hints(plain)
        readers = {field.name: _convert(hints[field.name]) for field in fields(plain)}
        kinds = ",".join(f"{name}:{kind}" for name, (kind, _) in readers.items())
        return f"struct<{kinds}>", partial(_read_struct, plain, readers)
    if isinstance(get_origin(plain), type) and issubclass(get_origin(plain), Mapping):
        of_value = get_args(plain)[1]
        if isinstance(of_value, type) and issubclass(of_value, Enum):
            return "map<string,string>", partial(_read_enums, of_value)
        return f"map<string,{_KINDS.get(of_value, 'string')}>", dict
    if isinstance(plain, type) and issubclass(plain, Enum):
        return "string", plain
    if plain in (bool, int, float):
        return _KINDS[plain], plain
    return _KINDS.get(plain, "string"), lambda value: value


def _read_struct(
    kind: type[_Row],
    readers: Mapping[str, tuple[str, Callable[[Any], Any]]],
    values: Mapping[str, Any],
) -> _Row:
    """Return a dataclass from a struct of a table; null is None."""
    read = {
        name: None if (value := values[name]) is None or value != value else of(value)
        for name, (_, of) in readers.items()
    }
    return kind(**read)


def _read_enums(kind: type[Enum], values: Any) -> dict[str, Enum]:
    return {name: kind(value) for name, value in dict(values).items()}


def _tuple(values: Any) -> tuple[Any, ...]:
    found = values.tolist() if hasattr(values, "tolist") else values
    return tuple(None if value != value else value for value in found)


def to_row(record: Any) -> dict[str, Any]:
    """Return column -> plain value of a dataclass, and of the dataclasses in its fields.

    An enum becomes its value; a mapping, unless to numbers or booleans, a dict of `setting_text`;
    others stay as they are. Fields that declare no column are left out.
    """
    row: dict[str, Any] = {}
    for name, column in _own_columns(cast("Hashable", type(record))):
        value = getattr(record, name)
        if column is None:
            row |= to_row(value)
        elif isinstance(value, Enum):
            row[column.name] = value.value
        elif column.kind.startswith("list<struct<") and value is not None:
            row[column.name] = [_plain_struct(item) for item in value]
        elif isinstance(value, Mapping) and column.kind == "map<string,string>":
            row[column.name] = {key: setting_text(one) for key, one in value.items()}
        else:
            row[column.name] = value
    return row


def _plain_struct(record: Any) -> dict[str, Any]:
    """Return name -> value of the fields of a dataclass; an enum as its value."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: v.value if isinstance(v, Enum) else v for name, v in values.items()}


def from_row(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
    """Return a row as a dataclass; a column that is null or missing gets the default of its field.

    Without a default it is None where the field may be that, else "", 0 or False by its type.
    Other columns of the row are ignored; fields without a Column must have defaults, which they
    get. Raises ResultsError for null in a field of another type, else as `TableColumn.value_of`.
    """
    values: dict[str, Any] = {}
    for name, column in _own_columns(cast("Hashable", kind)):
        if column is None:
            values[name] = from_row(type_hints(kind)[name], row)
            continue
        values[name] = column.value_of(row.get(column.name))
    return kind(**values)


def _arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a `kind` of a `TableColumn`. Raises ValueError if unknown."""
    import pyarrow as pa

    if kind == "timestamp":
        return pa.timestamp("us", tz="UTC")
    if kind.startswith("list<"):
        return pa.list_(_arrow_type(kind[5:-1]))
    if kind.startswith("struct<"):
        pairs = (pair.split(":") for pair in kind[7:-1].split(","))
        return pa.struct([(name, _arrow_type(of_field)) for name, of_field in pairs])
    if kind.startswith("map<string,"):
        return pa.map_(pa.string(), _arrow_type(kind[11:-1]))
    return pa.type_for_alias(kind)


def arrow_schema(
    table: str, columns: Sequence[TableColumn], required: Collection[str] = ("run_id",)
) -> pa.Schema:
    """Return the Arrow schema of a table; all columns but the required ones can be null."""
    import pyarrow as pa

    fields_of_table = [
        pa.field(
            column.name,
            _arrow_type(column.kind),
            nullable=column.name not in required,
            metadata={
                **({"unit": column.unit} if column.unit else {}),
                "description": column.description,
            },
        )
        for column in columns
    ]
    return pa.schema(
        fields_of_table, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)}
    )


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


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return what a folder holds, but for names that begin as `HIDDEN`; [] where it is no folder.

    Sorted by name. Raises ResultsError where it cannot be listed.
    """
    with os_errors_in_one_line(folder, "read", "make it readable, or move it elsewhere"):
        try:
            with os.scandir(folder) as entries:
                found = [entry for entry in entries if not entry.name.startswith(HIDDEN)]
        except (FileNotFoundError, NotADirectoryError):  # as of a run that was removed meanwhile
            return []
    return sorted(found, key=lambda entry: entry.name)


def parts_of(root: Path, table: str, run_id: str) -> list[Path]:
    """Return the parts of a run in a table, sorted by name, without hidden ones; [] for none.

    run_id: the whole id. Raises ResultsError where the folder cannot be listed.
    """
    found = entries_of(root / table / run_id)
    files = [entry for entry in found if not entry.is_dir(follow_symlinks=False)]
    return [Path(entry.path) for entry in files if entry.name.endswith(".parquet")]


def read_parts(paths: Sequence[Path], table: str, wanted: pa.Schema) -> pa.Table:
    """Return the rows of all these parts, in order, with the columns of `wanted`, null if lacking.

    A part that is gone is left out, and one that is merged into another of them, as a killed
    `raybench compact` leaves it. Raises UnreadablePartsError where files cannot be read, are not
    parts of the table, do not fit `wanted`, lack a required value, or are of a newer raybench.
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
    merged = {path for *_, sources in found for path in sources}
    if reasons := {p: y for _, unread, _ in found for p, y in unread.items() if p not in merged}:
        raise UnreadablePartsError(next(iter(reasons.values())), reasons)
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
        # Arrow takes a relative path with a colon, such as h200:baseline/points, for a URI.
        with path.open("rb") as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
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
    """Return a table of these columns without rows."""
    import pyarrow as pa

    # Not empty_table, which imports pandas: `list` shall not wait for that.
    return pa.Table.from_batches([], schema=wanted)


def plain_rows(found: pa.Table) -> list[dict[str, Any]]:
    """Return each row as column -> value, with maps as dicts and times as datetimes in UTC.

    Times must be in microseconds, as in `arrow_schema`, and not inside lists or maps.
    """
    # Neither pandas, which pyarrow takes for datetimes, nor pyarrow.compute: `list` must be quick.
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
    """Return (point_id, attempt) of all attempts in these parts. table: one with these columns.

    Raises UnreadablePartsError, a ResultsError, where `read_parts` does.
    """
    import pyarrow as pa

    names = ["point_id", "attempt"]
    wanted = pa.schema([pa.field("point_id", pa.string(), nullable=False), ("attempt", pa.int64())])
    found = read_parts(paths, table, wanted).group_by(names).aggregate([])
    return frozenset(zip(*(found[name].to_pylist() for name in names), strict=True))


def write_part(path: Path, table: str, whole: pa.Table) -> None:
    """Write rows as a part of a table; replaces and raises as `replace_file` does.

    whole: with the schema of `tables.schema`, its metadata too. Dictionaries and statistics cost a
    part more than they save, as does compressing one row.
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
    replace_file(path, sink.getvalue())


def replace_file(path: Path, content: pa.Buffer | bytes) -> None:
    """Write a file whole, in place of an older one: no reader sees half of it. Does not sync it.

    A link to a file is replaced. Written to are a device, a pipe or a link to one, and whatever is
    in /dev, as /dev/stdout. Makes its folder. Raises ResultsError where it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os_errors_in_one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (path.parent == Path("/dev") or not path.is_file()):
            path.write_bytes(content)
            return
        try:
            aside.unlink(missing_ok=True)  # a link there would lead elsewhere
            aside.write_bytes(content)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def delete_file(path: Path) -> None:
    """Delete a file, if it is there. Raises ResultsError where it cannot be deleted."""
    with os_errors_in_one_line(path, "deleted", "delete it yourself"):
        path.unlink(missing_ok=True)


@contextmanager
def os_errors_in_one_line(
    path: Path, done: str = "written", remedy: str = "choose another folder"
) -> Iterator[None]:
    """Raise ResultsError, in one line that names `path`, for an OSError inside the block.

    Text: "PATH: cannot be DONE: reason; REMEDY", with "make room there" for a full disk or quota.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or next(iter(str(error).splitlines()), "OSError")
        way_out = "make room there" if error.errno in _FULL else remedy
        raise ResultsError(f"{path}: cannot be {done}: {reason}; {way_out}") from error
