"""Parts that versions 1 to 3 have written, kept here as they are: read, and upgraded."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raybench
from raybench.errors import ResultsError
from raybench.results import reader
from raybench.results.schema import SCHEMA_VERSION, TABLES, schema
from raybench.results.writer import hold_run

OLD = Path(__file__).parent / "old_results"
COMMITTED = Path(__file__).parents[3] / "results" / "examples"
VERSIONS = {
    "ddp_linear-20261120-194439-364b": b"1",
    "gemm-20261121-113145-0e78": b"2",
    "largest_batch-20261121-140535-ca3a": b"3",
}
# Column of `points` -> the version that brought it.
BROUGHT_BY = {"cuda_graph": b"2", "step_ms_repeat_std": b"2", "error_detail": b"3"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return shutil.copytree(OLD, tmp_path / "results")


@pytest.mark.parametrize("run_id", VERSIONS)
def test_each_older_version_is_read_with_nulls(run_id: str) -> None:
    part = next((OLD / "points" / run_id).glob("*.parquet"))
    assert pq.read_schema(part).metadata[b"schema_version"] == VERSIONS[run_id]
    points = raybench.load(OLD, "points", run_id)
    assert list(points.columns) == schema("points").names
    for column, version in BROUGHT_BY.items():
        assert column in pq.read_schema(part).names or version > VERSIONS[run_id]
        assert points[column].isna().all() or version <= VERSIONS[run_id]
    assert points["step_ms_p50"].notna().any()
    assert reader.read_run(OLD, run_id).run_id == run_id


def test_a_folder_of_several_versions_is_read_whole_once_it_is_upgraded(results: Path) -> None:
    before = {table: reader.load(results, table) for table in TABLES}
    with pytest.raises(pl.exceptions.PolarsError):
        pl.read_parquet(results / "points")
    assert len(raybench.upgrade(results)) == len(list(OLD.rglob("*.parquet")))
    for table in ("runs", "points", "samples", "devices"):
        names = schema(table).names
        assert list(pd.read_parquet(results / table).columns) == names
        assert pl.read_parquet(results / table).columns == names
        pattern = str(results / table / "**" / "*.parquet")
        assert pl.read_parquet(pattern).height == len(before[table])
        assert duckdb.read_parquet(pattern).columns == names
        # What was there is as it was.
        pd.testing.assert_frame_equal(reader.load(results, table), before[table])


def test_an_upgraded_part_says_of_which_version_its_values_are(results: Path) -> None:
    raybench.upgrade(results)
    for run_id, version in VERSIONS.items():
        for path in (results / "points" / run_id).glob("*.parquet"):
            metadata = pq.read_schema(path).metadata
            assert metadata[b"written_as_schema"] == version
            assert metadata[b"schema_version"] == str(SCHEMA_VERSION).encode()
    assert raybench.upgrade(results) == []


def test_a_part_that_lacks_a_column_of_its_own_version_gets_it_and_keeps_its_origin(
    results: Path,
) -> None:
    raybench.upgrade(results)
    path = next((results / "points" / "gemm-20261121-113145-0e78").glob("*.parquet"))
    part = pq.read_table(path, partitioning=None)
    pq.write_table(part.drop_columns(["energy_j"]), path)
    assert raybench.upgrade(results) == [path]
    assert pq.read_schema(path).metadata[b"written_as_schema"] == b"2"
    assert pq.read_schema(path).names == schema("points").names


def test_no_value_is_lost_by_an_upgrade(results: Path) -> None:
    path = sorted((results / "points" / "gemm-20261121-113145-0e78").glob("*.parquet"))[0]
    part = pq.read_table(path, partitioning=None)
    with_more = part.append_column("of_yesterday", pa.array(["x"]))
    pq.write_table(with_more.replace_schema_metadata(part.schema.metadata), path)
    content = path.read_bytes()
    with pytest.raises(ResultsError, match=f"{path}: would lose of_yesterday; it was left"):
        raybench.upgrade(results)
    assert path.read_bytes() == content


def test_a_run_that_is_being_written_and_a_later_version_stay_as_they_are(results: Path) -> None:
    later = next((results / "points" / "ddp_linear-20261120-194439-364b").glob("*.parquet"))
    part = pq.read_table(later, partitioning=None)
    metadata = part.schema.metadata | {b"schema_version": b"999"}
    pq.write_table(part.replace_schema_metadata(metadata), later)
    with hold_run(results, "gemm-20261121-113145-0e78"):
        written = raybench.upgrade(results)
    assert later not in written
    assert {path.parent.name for path in written} == set(VERSIONS) - {"gemm-20261121-113145-0e78"}


@pytest.mark.parametrize("table", ["runs", "points", "samples", "devices", "telemetry"])
def test_the_committed_runs_are_read_whole_by_pandas_polars_and_duckdb(table: str) -> None:
    """When this fails: python -c "import raybench; raybench.upgrade('results/examples')"."""
    names = schema(table).names
    plain = pd.read_parquet(COMMITTED / table)
    # Committed runs still have two columns that are gone.
    pattern = str(COMMITTED / table / "**" / "*.parquet")
    for columns in (
        list(plain.columns),
        pl.read_parquet(COMMITTED / table).columns,
        duckdb.read_parquet(pattern).columns,
    ):
        assert [name for name in columns if name not in ("launcher", "trend")] == names
    assert len(plain) == len(reader.load(COMMITTED, table)) == pl.read_parquet(pattern).height


def test_a_committed_run_says_of_which_version_it_is() -> None:
    for run_id, version in VERSIONS.items():
        for path in (COMMITTED / "points" / run_id).glob("*.parquet"):
            assert pq.read_schema(path).metadata[b"written_as_schema"] == version
