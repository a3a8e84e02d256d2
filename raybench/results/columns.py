"""Tables from dataclasses: Arrow schema, rows and dataclasses again, by the fields' annotations.

A field `power_w: Annotated[float | None, Column("W", "power drawn")]` is a column of doubles, a
field that is a dataclass itself stands for the columns of that one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache
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
from raybench.records import Column

if TYPE_CHECKING:
    import pyarrow as pa

_Row = TypeVar("_Row")
# Here and not beside their columns, so that `raybench list` need not load what computes metrics.
TABLE_NAMES = (
    *("runs", "points", "samples", "devices", "telemetry", "modules", "regions", "health"),
    "summary",
)
SCHEMA_VERSION = 1

_KINDS: Mapping[Any, str] = {bool: "bool", int: "int64", float: "double", datetime: "timestamp"}
# What stands for null in a field that cannot be None and has no default.
_EMPTY: Mapping[Any, Any] = {str: "", int: 0, float: 0.0, bool: False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of a table, as a field of a dataclass declares it.

    kind: its Arrow type, as in "double", "list<string>", "map<string,int64>". about: as declared.
    read: makes the value of the field from that of the table, which is not null.
    null: the value of the field where the table has null; `MISSING` where it must not.
    """

    name: str
    kind: str
    about: Column
    read: Callable[[Any], Any]
    null: Any

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

    A field that is a dataclass itself gives its columns in its place; one without a Column none.
    """
    return tuple(
        column
        for name, own in _own_columns(kind)
        for column in ([own] if own else columns_of(type_hints(kind)[name]))
    )


_OwnColumns = tuple[tuple[str, TableColumn | None], ...]


def _own_columns(kind: type[Any]) -> _OwnColumns:
    """Return the name and the column of each field; None for one that is a dataclass itself."""
    return _read_columns(cast("Hashable", kind))


@cache
def _read_columns(kind: Any) -> _OwnColumns:
    """Return what `_own_columns` does: `cache` wants an argument that mypy knows as hashable."""
    hints = type_hints(kind, include_extras=True)
    found: list[tuple[str, TableColumn | None]] = []
    for field in fields(kind):
        hint = hints[field.name]
        notes = getattr(hint, "__metadata__", ())
        about = next((note for note in notes if isinstance(note, Column)), None)
        if is_dataclass(hint):
            found.append((field.name, None))
        elif about is not None:
            found.append((field.name, _column(field, hint, about)))
    return tuple(found)


def _column(field: Any, hint: Any, about: Column) -> TableColumn:
    """Return the column of a field of a dataclass, by its annotated type and its default."""
    kind, read = _convert(hint)
    if field.default is not MISSING:
        null = field.default
    elif field.default_factory is not MISSING:
        null = field.default_factory()
    else:
        is_optional = NoneType in get_args(get_args(hint)[0])
        null = None if is_optional else _EMPTY.get(_plain_type(hint), MISSING)
    return TableColumn(name=about.name or field.name, kind=kind, about=about, read=read, null=null)


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
        return f"list<{_convert(get_args(plain)[0])[0]}>", _tuple
    if isinstance(get_origin(plain), type) and issubclass(get_origin(plain), Mapping):
        values = _KINDS.get(get_args(plain)[1], "string")
        return f"map<string,{values}>", dict
    if isinstance(plain, type) and issubclass(plain, Enum):
        return "string", plain
    if plain in (bool, int, float):
        return _KINDS[plain], plain
    return _KINDS.get(plain, "string"), _same


def _tuple(values: Any) -> tuple[Any, ...]:
    found = values.tolist() if hasattr(values, "tolist") else values
    return tuple(None if value != value else value for value in found)


def _same(value: Any) -> Any:
    return value


def to_row(record: Any) -> dict[str, Any]:
    """Return column -> plain value of a dataclass, with the columns of dataclasses that it holds.

    An enum is its value as text, a mapping of settings a dict of texts. Fields that declare no
    column are left out.
    """
    row: dict[str, Any] = {}
    for name, column in _own_columns(type(record)):
        value = getattr(record, name)
        if column is None:
            row |= to_row(value)
        elif isinstance(value, Enum):
            row[column.name] = value.value
        elif isinstance(value, Mapping) and column.kind == "map<string,string>":
            row[column.name] = {key: setting_text(one) for key, one in value.items()}
        else:
            row[column.name] = value
    return row


def from_row(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
    """Return the dataclass of a row, with its default for each column that is null or missing.

    Raises ResultsError where the row lacks a value that the dataclass must have, or has a member
    that an enum does not know.
    """
    values: dict[str, Any] = {}
    for name, column in _own_columns(kind):
        if column is None:
            values[name] = from_row(type_hints(kind)[name], row)
            continue
        value = row.get(column.name)
        try:
            values[name] = column.null if value is None else column.read(value)
        except ValueError as error:
            raise ResultsError(f"a row with the {column.name} {value!r}") from error
        if values[name] is MISSING:
            raise ResultsError(f"a row without {column.name}")
    return kind(**values)


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a column. kind: as of a `TableColumn`, such as "list<string>"."""
    import pyarrow as pa

    if kind == "timestamp":
        return pa.timestamp("us", tz="UTC")
    if kind.startswith("list<"):
        return pa.list_(arrow_type(kind[5:-1]))
    if kind.startswith("map<string,"):
        return pa.map_(pa.string(), arrow_type(kind[11:-1]))
    return pa.type_for_alias(kind)


def arrow_schema(
    table: str, columns: Sequence[TableColumn], required: Collection[str] = ("run_id",)
) -> pa.Schema:
    """Return the Arrow schema of a table; all columns but the required ones can be null."""
    import pyarrow as pa

    fields_of_table = [
        pa.field(
            column.name,
            arrow_type(column.kind),
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
