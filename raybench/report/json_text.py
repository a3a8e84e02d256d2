"""One JSON object for other programs: no NaN, times in ISO 8601, no rounding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from typing import Any

import pandas as pd

from raybench.results.columns import SCHEMA_VERSION
from raybench.results.tables import TABLES

_INTEGERS = {
    column.name for columns in TABLES.values() for column in columns if column.kind == "int64"
}


def format_object(**members: Any) -> str:
    """Return one object with its schema version. It is ASCII: nothing controls a terminal."""
    content = _jsonable({"schema_version": SCHEMA_VERSION, **members})
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one object per row of a table.

    Integers are integers, also where pandas made floats of them because another row has none.
    """
    return [
        {
            str(name): int(value)
            if name in _INTEGERS and isinstance(value, float) and value == value
            else value
            for name, value in row.items()
        }
        for row in frame.to_dict("records")
    ]


def plain_rows(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the fields of dataclasses as values that JSON can hold: times are ISO 8601."""
    return [_jsonable(vars(row)) for row in rows]


def _jsonable(value: Any) -> Any:
    """Return a value that json can write; NaN, NaT, NA and infinities become null, arrays lists."""
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if value is pd.NaT or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value.isoformat() if isinstance(value, datetime) else value
