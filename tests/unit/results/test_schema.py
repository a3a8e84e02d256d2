from __future__ import annotations

import pyarrow as pa
import pytest

from raybench.results.columns import SCHEMA_VERSION
from raybench.results.tables import TABLES, schema, units

SUFFIXES = {
    "_ms": "ms",
    "_s": "s",
    "_ns": "ns",
    "_bytes": "bytes",
    "_gb_s": "GB/s",
    "_mhz": "MHz",
    "_us": "us",
    "_items_per_s": "items/s",
    "gb_per_s": "GB/s",
}


@pytest.mark.parametrize("table", TABLES)
def test_every_field_carries_a_short_description_and_its_unit(table):
    for column, field in zip(TABLES[table], schema(table), strict=True):
        assert 0 < len(field.metadata[b"description"]) <= 60
        assert field.metadata.get(b"unit", b"").decode() == column.unit == units(table)[field.name]


@pytest.mark.parametrize("table", TABLES)
def test_a_unit_in_a_name_is_the_unit_of_the_column(table):
    for name, unit in units(table).items():
        told = [meant for suffix, meant in SUFFIXES.items() if name.endswith(suffix)]
        assert not told or unit in told, name


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_tells_its_table_and_version_and_has_no_inferred_type(table):
    metadata = schema(table).metadata
    assert metadata[b"table"].decode() == table
    assert metadata[b"schema_version"].decode() == str(SCHEMA_VERSION)
    assert not any(pa.types.is_null(field.type) for field in schema(table))
