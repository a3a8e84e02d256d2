"""Doubts are a column of structs: null where they are unknown, empty where there are none."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_failed, make_point, make_record, make_run, open_run, write_run

import raybench
from raybench.analysis.rows import point_rows
from raybench.analysis.scaling import write_summary
from raybench.records.doubts import Doubt, DoubtKind

NEIGHBOUR = Doubt(kind=DoubtKind.NOT_ALONE, subject="run b")
CROWDED = Doubt(kind=DoubtKind.CROWDED, value=4.0, limit=2.0, subject="alpha")
CLEAN, DOUBTED, UNKNOWN, FAILED = 1, 2, 4, 8


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A clean point, a doubted one, one whose doubts are not known, and one that failed."""
    root = tmp_path_factory.mktemp("results")
    points = {size: make_point(batch_size=size) for size in (CLEAN, DOUBTED, UNKNOWN, FAILED)}
    doubted = make_record(points[DOUBTED], doubts=(NEIGHBOUR, CROWDED))
    records = [make_record(points[CLEAN]), doubted, make_record(points[UNKNOWN])]
    write_run(root, "run-a", [*records, make_failed(points[FAILED])])
    for path in root.glob("points/run-a/*.parquet"):
        part = pq.read_table(path)
        rows = part.to_pylist(maps_as_pydicts="strict")
        for row in rows:
            if row["batch_size"] == UNKNOWN:
                row["doubts"] = None
        pq.write_table(pa.Table.from_pylist(rows, schema=part.schema), path)
    write_summary(open_run(root, "run-a"), make_run("run-a"))
    return root


def of_batch(results, table):
    return raybench.load(results, table).set_index("batch_size")["doubts"]


def test_doubts_come_back_as_they_were_stored(results):
    rows = {row.batch_size: row.doubts for row in point_rows(raybench.load(results, "points"))}
    assert rows == {CLEAN: (), DOUBTED: (NEIGHBOUR, CROWDED), UNKNOWN: None, FAILED: None}
    (path, *_) = results.glob("points/run-a/*.parquet")
    kind = pq.read_schema(path).field("doubts").type.value_type
    assert [field.name for field in kind] == ["kind", "value", "limit", "subject"]


def test_doubt_struct_has_its_fields(results):
    neighbour, crowded = of_batch(results, "points")[DOUBTED]
    told = {"kind": "crowded", "value": 4.0, "limit": 2.0, "subject": "alpha"}
    assert crowded == told
    assert (neighbour["kind"], neighbour["subject"]) == ("not_alone", "run b")
    assert neighbour["value"] is None or math.isnan(neighbour["value"])


@pytest.mark.parametrize("table", ["points", "summary"])
def test_clean_points_are_selected_by_length(results, table):
    df = raybench.load(results, table)
    clean = df[df.doubts.notna() & (df.doubts.str.len() == 0)]
    assert clean["batch_size"].tolist() == [CLEAN]


def test_the_summary_has_the_kinds_as_text(results):
    doubts = of_batch(results, "summary")
    assert list(doubts[CLEAN]) == []
    assert list(doubts[DOUBTED]) == ["not_alone", "crowded"]
    assert doubts[[UNKNOWN, FAILED]].isna().all()
