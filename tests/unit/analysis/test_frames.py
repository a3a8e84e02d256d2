"""`raybench.load` as scripts use it: types, parameters, derived speed-ups."""

import json
from datetime import timedelta
from functools import partial

import pandas as pd
import pytest
from builders import (
    START,
    make_device,
    make_failed,
    make_measurement,
    make_point,
    make_record,
    make_run,
    open_run,
    write_run,
)
from commands import refusal_of

import raybench
from raybench.analysis.rounds import rank_steps
from raybench.analysis.scaling import write_summary
from raybench.errors import ResultsError, ResultsWarning
from raybench.records.hang import HangCause, HangVerdict
from raybench.results.record_rows import sample_columns
from raybench.results.tables import TABLES

PARAMS = {"hidden": 4096, "dropout": 0.1, "compile": True, "data": "synthetic", "flag": "none"}
DEPTH = 2**53 + 1  # no float has it


@pytest.fixture
def results(tmp_path):
    """A run whose first point failed at first, and one of a job with another baseline."""
    one, two, four = (make_point(params=PARAMS, world_size=size) for size in (1, 2, 4))
    ended = [make_failed(one), make_record(two, step_ms=10.0), make_failed(four)]
    store = write_run(tmp_path, "run-a", ended, [make_device()])
    store.write_records([(0, make_record(one, attempt=2))])
    others = [make_record(make_point(params={"depth": DEPTH}, world_size=size)) for size in (1, 2)]
    changes = {"started_at": START + timedelta(days=1), "baseline": {"world_size": 2}}
    write_run(tmp_path, "run-b", others, **changes)
    return tmp_path


@pytest.mark.parametrize("table", [*(name for name in TABLES if name != "summary"), "scaling"])
def test_column_types_are_nullable_and_independent_of_content(results, tmp_path, table):
    empty = tmp_path / "empty"
    empty.mkdir()
    frames = [raybench.load(results, table), raybench.load(empty, table)]
    kinds = {str(name): str(kind) for name, kind in frames[0].dtypes.items()}
    assert kinds == {str(name): str(kind) for name, kind in frames[1].dtypes.items()}
    plain = {"Int64", "boolean", "string", "float64", "datetime64[us, UTC]", "object"}
    assert set(kinds.values()) <= plain
    nested = {c.name for c in TABLES.get(table, ()) if c.kind.startswith(("map", "list", "struct"))}
    assert {name for name, kind in kinds.items() if kind == "object"} <= nested | {"params"}
    assert list(raybench.units(table)) == list(frames[0].columns)


def test_missing_integer_does_not_turn_column_into_floats(results):
    points = raybench.load(results, "points", "run-a").set_index("world_size")
    assert str(points.loc[2, "peak_mem_allocated_bytes"]) == str(2**30 + 1)
    assert points.loc[4, "peak_mem_allocated_bytes"] is pd.NA
    assert points.loc[2, "params"]["hidden"] == "4096"


def test_integers_of_a_hang_stay_integers(tmp_path):
    verdict = HangVerdict(cause=HangCause.SLEEPS, rank=1, pid=4711, waiting_ranks=(0,))
    hung = make_failed(make_point(world_size=2), hang=verdict)
    write_run(tmp_path, "run-a", [make_record(make_point()), hung])
    hang = raybench.load(tmp_path, "points").set_index("world_size").loc[2, "hang"]
    assert f"{hang['rank']} {hang['pid']} {hang['waiting_ranks']}" == "1 4711 [0]"


def test_scaling_lists_each_point_once_with_speed_up(results):
    frame = raybench.load(results, "scaling", "run-a").set_index("world_size")
    assert list(frame["attempt"]) == [2, 1, 1]
    assert frame.loc[2, "speed_up"] == pytest.approx(1.6, rel=0.01)
    assert frame.loc[2, "efficiency"] == pytest.approx(0.8, rel=0.01)
    assert pd.isna(frame.loc[2, "speed_up_low"])  # one round
    assert set(frame["baseline_point_id"]) == {frame.loc[1, "point_id"]}
    assert frame.loc[4, "why_not"] is pd.NA
    assert pd.isna(frame.loc[4, "speed_up"])


def test_scaling_uses_the_baseline_of_each_run(results):
    frame = raybench.load(results, "scaling", "").set_index(["run_id", "world_size"])
    assert frame.loc[("run-a", 1), "speed_up"] == 1.0
    assert frame.loc[("run-b", 2), "speed_up"] == 1.0
    assert frame.loc[("run-b", 1), "speed_up"] == pytest.approx(0.5, rel=0.01)


def test_summary_has_typed_parameters_that_pandas_reads(results):
    frame = raybench.load(results, "summary", "run-a").set_index("world_size")
    assert list(frame["status"]) == ["ok", "ok", "oom"]
    assert frame.loc[2, "speed_up"] == pytest.approx(1.6, rel=0.01)
    assert frame.loc[2, "peak_memory_bytes"] == 2**30 + 1
    kinds = {name: str(kind) for name, kind in frame.dtypes.items()}
    assert (kinds["params.hidden"], kinds["params.compile"]) == ("Int64", "boolean")
    assert kinds["peak_memory_bytes"] == "Int64"
    run = make_run("run-a", baseline={"world_size": 1})
    write_summary(open_run(results, "run-a"), run)
    stored = pd.read_parquet(results / "summary").set_index("world_size")
    assert list(stored["speed_up"])[:2] == list(frame["speed_up"])[:2]
    assert json.loads(stored.loc[2, "params_json"]) == PARAMS


def test_summary_holds_no_points_of_health_checks(results):
    argv = ("raybench", "health", "--only", "alone")
    store = write_run(results, "checked", argv=argv)
    store.write_records([(0, make_record())])
    write_summary(store, make_run("checked", argv=argv))
    assert "checked" not in set(raybench.load(results, "summary")["run_id"])
    assert raybench.load(results, "summary", "checked").empty
    assert not (results / "summary" / "checked").exists()
    assert "checked" in set(raybench.load(results, "points")["run_id"])


@pytest.mark.parametrize("table", ["summary", "scaling"])
@pytest.mark.parametrize("damaged", ["points", "runs"])
def test_damaged_run_is_left_out_with_a_warning(results, table, damaged):
    next((results / damaged / "run-a").iterdir()).write_bytes(b"no parquet")
    with pytest.warns(ResultsWarning, match="run run-a is left out"):
        frame = raybench.load(results, table)
    assert set(frame["run_id"]) == {"run-b"}


def test_parameters_become_columns_that_can_be_filtered(results):
    points = raybench.load(results, "points", params="columns")
    assert "params" not in points
    kinds = {name: str(points[f"params.{name}"].dtype) for name in (*PARAMS, "depth")}
    assert kinds == {
        "hidden": "Int64",
        "dropout": "float64",
        "compile": "boolean",
        "data": "string",
        "flag": "string",
        "depth": "Int64",
    }
    assert len(points[points["params.hidden"] == 4096]) == 4
    assert len(points[points["params.depth"] == DEPTH]) == 2
    scaling = raybench.load(results, "scaling", "run-b", params="columns")
    assert list(scaling["params.depth"]) == [DEPTH, DEPTH]
    summary = raybench.load(results, "summary")["params.depth"]
    assert (str(summary.dtype), set(summary.dropna())) == ("Int64", {DEPTH})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scalings",), "got 'scalings'; did you mean 'scaling'?"),
        (("samples",), "params='columns': points and scaling have parameters, samples has not"),
    ],
)
def test_a_mistake_is_one_line(results, arguments, message):
    load = partial(raybench.load, params="columns")
    assert message in refusal_of(ResultsError, load, results, *arguments)


def test_rank_steps_are_in_milliseconds_without_warm_up():
    steps_ns = ([1_000_000, 3_000_000, 2_000_000], [4_000_000] * 3)
    measurements = tuple(make_measurement(rank, [ns]) for rank, ns in enumerate(steps_ns))
    record = make_record(make_point(world_size=2), measurements=measurements)
    found = rank_steps(pd.DataFrame(sample_columns("run-a", record)))
    assert found.pop("data_ms").isna().all()
    assert found.to_dict("list") == {
        "rank": [0, 1],
        "iterations": [3, 3],
        "median_ms": [2.0, 4.0],
        "min_ms": [1.0, 4.0],
        "max_ms": [3.0, 4.0],
    }
