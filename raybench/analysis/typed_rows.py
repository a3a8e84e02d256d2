"""Rows of the tables as dataclasses: None for what is not known, integers as int."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import pandas as pd

from raybench.results.point_row import PointRow

_Row = TypeVar("_Row")


def point_rows(frame: pd.DataFrame) -> list[PointRow]:
    """Return the rows of the table `points`, or of some of its columns."""
    return typed_rows(frame, PointRow)


def typed_rows(frame: pd.DataFrame, kind: type[_Row]) -> list[_Row]:
    """Return the rows of a frame as dataclasses of this kind.

    A column that the frame lacks, and null, become the default of the field. Columns without a
    field are left out.
    """
    columns = {
        name: _column(frame[name], read, default)
        for name, (read, default) in _fields(kind).items()  # type: ignore[arg-type]
        if name in frame
    }
    names = tuple(columns)
    return [
        kind(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)
    ]


def _column(values: pd.Series, read: Callable[[Any], Any], default: Any) -> list[Any]:
    unknown = values.isna()
    return [
        default if is_unknown else read(value)
        for value, is_unknown in zip(values.tolist(), unknown.tolist(), strict=True)
    ]


@cache
def _fields(kind: type) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """Return how the value of each field is read from a frame, and the value of null."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: (_reader(hints[one.name]), _default(one)) for one in fields(kind)}


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()


def _reader(hint: Any) -> Callable[[Any], Any]:
    while get_origin(hint) in (Annotated, UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        return _tuple
    if isinstance(hint, type) and issubclass(hint, int | float | Enum):
        return hint
    return _same


def _same(value: Any) -> Any:
    return value


def _tuple(values: Any) -> tuple[Any, ...]:
    found = values.tolist() if hasattr(values, "tolist") else values
    return tuple(None if value != value else value for value in found)
