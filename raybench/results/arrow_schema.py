"""The Arrow schemas of the tables, with units and descriptions as metadata of their fields."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from raybench.results.schema import SCHEMA_VERSION, TABLES, Column

if TYPE_CHECKING:
    import pyarrow as pa


@cache
def schema(table: str) -> pa.Schema:
    """Make the Arrow schema of a table; only the columns that identify the row are not nullable."""
    import pyarrow as pa

    required = {"run_id"} if table in ("runs", "devices", "telemetry") else {"run_id", "point_id"}
    fields = [
        pa.field(
            column.name,
            _arrow_type(column.kind),
            nullable=column.name not in required,
            metadata=_metadata(column),
        )
        for column in TABLES[table]
    ]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)})


@cache
def row_type(table: str) -> pa.StructType:
    """Make the type of a whole row of a table."""
    import pyarrow as pa

    return pa.struct(list(schema(table)))


def _metadata(column: Column) -> dict[str, str]:
    description = {"description": column.description}
    return {"unit": column.unit, **description} if column.unit else description


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    special = {
        "timestamp": pa.timestamp("us", tz="UTC"),
        "list<string>": pa.list_(pa.string()),
        "list<double>": pa.list_(pa.float64()),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
        "map<string,double>": pa.map_(pa.string(), pa.float64()),
        "map<string,int64>": pa.map_(pa.string(), pa.int64()),
    }
    return special[kind] if kind in special else pa.type_for_alias(kind)
