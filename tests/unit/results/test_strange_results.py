"""Results that others have written, or a later version: read as far as they go, and harmless."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import (
    START,
    make_device,
    make_failed,
    make_measure,
    make_point,
    make_record,
    make_run,
)

import raybench
from raybench import cli
from raybench.errors import ResultsError, ResultsWarning
from raybench.records import Status
from raybench.results.reader import latest
from raybench.results.schema import SCHEMA_VERSION
from raybench.results.writer import RunStore

# Escape, NUL, a C1 control, right-to-left override, half of a surrogate pair is not storable.
EVIL = "\x1b[31m\x00\x9b\u202eboo\u2028"
FORBIDDEN = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2028)} - {"\n"}
COMMANDS = {
    "list": ["list"],
    "report": ["report", "run-a"],
    "markdown": ["report", "run-a", "--format", "md"],
    "report as JSON": ["report", "run-a", "--format", "json"],
    "show": ["show", "run-a"],
    "point": ["show", "run-a", "POINT"],
    "csv": ["export", "run-a", "--format", "csv"],
    "junit": ["export", "run-a", "--format", "junit"],
}
SLOWER = {
    "long list": ["list", "--long"],
    "page": ["report", "run-a", "--format", "html"],
    "json": ["export", "run-a", "--format", "json"],
    "history": ["history"],
    "comparison": ["compare", "run-a", "run-b"],
}
_YEAR_12000_US = 316_516_000_000_000_000
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of ok points on 1 to 6 GPUs, and one point that failed."""
    folder = tmp_path_factory.mktemp("sound")
    for run_id in ("run-a", "run-b"):
        store = RunStore.create(folder, make_run(run_id), make_measure())
        store.write_devices([make_device(index) for index in range(2)])
        for index, size in enumerate(range(1, 7)):
            store.write_records([(index, make_record(make_point(world_size=size)))])
        store.write_records([(6, make_failed(make_point(world_size=8), status=Status.ERROR))])
    return folder


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    """A copy of them, to be spoilt: to write them takes ten times as long."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def called(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """A command in this process: its exit code, stdout and stderr."""
    point_id = make_point(world_size=2).point_id

    def call(command: list[str]) -> tuple[object, str, str]:
        words = [point_id if word == "POINT" else word for word in command]
        monkeypatch.setattr(sys, "argv", ["raybench", *words, "--results", str(results)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    return call


def rewrite(path: Path, change: Change, version: str | None = None, **more: str) -> None:
    """Write a part as somebody else might: other values, another version, more columns."""
    part = pq.read_table(path)
    metadata = part.schema.metadata | ({b"schema_version": version.encode()} if version else {})
    rows = [change(row) for row in part.to_pylist()]
    for name in more:
        rows = [row | {name: more[name]} for row in rows]
    fields = [*part.schema, *(pa.field(name, pa.string()) for name in more)]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields, metadata=metadata)), path)


def parts(results: Path, table: str) -> list[Path]:
    return sorted((results / table / "run-a").glob("*.parquet"))


def strange_run(results: Path, **changes: Any) -> None:
    [path] = parts(results, "runs")
    rewrite(path, lambda row: row | changes)


def later_version(results: Path) -> None:
    """Statuses and columns that are not known here, and a clock that was set back."""
    rewrite(parts(results, "points")[1], lambda row: row | {"status": "melted"})
    strange_run(results, status="sideways", finished_at=START - timedelta(days=9000))
    for table in ("points", "runs", "devices"):
        for path in parts(results, table):
            rewrite(path, dict, version="999", of_tomorrow="x", and_after="y")


def impossible_figures(results: Path) -> None:
    steps = ("step_ms_p50", "step_ms_mean", "step_ms_ci_low", "step_ms_ci_high")
    changes: list[dict[str, Any]] = [
        {"step_ms_ci_low": -0.1},
        dict.fromkeys(steps, 0.0),
        {"step_ms_p50": -1.0, "throughput": -5.0},
        dict.fromkeys((*steps, "throughput", "flops_per_step", "energy_j"), 1e308),
        dict.fromkeys((*steps, "throughput", "duration_s"), float("inf")),
        {"throughput": 0.0, "world_size": 0},
        {"started_at": _YEAR_12000_US},
    ]
    for path, change in zip(parts(results, "points"), changes, strict=True):
        rewrite(path, lambda row, change=change: row | change)


def vanishing_figures(results: Path) -> None:
    for path in parts(results, "points"):
        rewrite(path, lambda row: row | {"step_ms_ci_low": 5e-324})


def nothing_but_keys(results: Path) -> None:
    keys = ("run_id", "point_id", "attempt", "status")
    for path in parts(results, "points"):
        rewrite(path, lambda row: {name: row[name] if name in keys else None for name in row})
    for path in parts(results, "devices"):
        rewrite(path, lambda row: {name: row[name] if name == "run_id" else None for name in row})
    kept = ("run_id", "started_at")
    strange_run(results, **{name: None for name in raybench.units("runs") if name not in kept})


def endless_texts(results: Path) -> None:
    texts = {"error_message": "x" * 10**6, "error_type": "y" * 10**6, "warnings": ["z" * 10**6] * 3}
    for path in parts(results, "points"):
        rewrite(path, lambda row: row | texts)


def control_characters(results: Path) -> None:
    """Every text that nothing depends on."""
    keys = ("run_id", "point_id", "status", "scaling", "precision", "device_type")

    def change(row: dict[str, Any]) -> dict[str, Any]:
        texts = {name: EVIL for name, value in row.items() if isinstance(value, str)}
        maps = {name: [(EVIL, EVIL)] for name in ("params", "methods", "tags", "versions")}
        lists = {name: [EVIL] for name in ("warnings", "throttle_reasons", "argv")}
        evil = {name: value for name, value in (texts | maps | lists).items() if name in row}
        return row | {name: value for name, value in evil.items() if name not in keys}

    for table in ("runs", "points", "devices"):
        for path in parts(results, table):
            rewrite(path, change)


def failures_in_part(results: Path) -> None:
    """Points that failed: one out of memory without its batch, one on a host but on no rank."""
    *_, alone, last = parts(results, "points")
    out_of_memory = {"status": "oom", "scaling": "weak", "batch_size": None}
    rewrite(alone, lambda row: row | out_of_memory)
    rewrite(last, lambda row: row | {"error_host": "node7", "error_rank": None})


STRANGE = {
    "failures that lack something": failures_in_part,
    "of a later version": later_version,
    "impossible figures": impossible_figures,
    "vanishing figures": vanishing_figures,
    "nothing but keys": nothing_but_keys,
    "endless texts": endless_texts,
    "control characters": control_characters,
    "a run of the year 12,000": lambda root: strange_run(root, started_at=_YEAR_12000_US),
}
NO_POINT = ("nothing but keys", "point")
SLOWER_CASES = [
    *((kind, name) for kind in list(STRANGE)[:2] for name in SLOWER),
    ("a run of the year 12,000", "comparison"),
]


@pytest.mark.parametrize(
    ("kind", "command"), [*((kind, name) for kind in STRANGE for name in COMMANDS), *SLOWER_CASES]
)
def test_strange_results_are_read_as_far_as_they_go(
    results: Path, called: Any, kind: str, command: str
) -> None:
    STRANGE[kind](results)
    code, out, err = called((COMMANDS | SLOWER)[command])
    has_nothing_to_show = kind == "a run of the year 12,000" or (kind, command) == NO_POINT
    assert code in ((0, 2) if has_nothing_to_show else (0, 1)), err
    assert "Traceback" not in err
    assert err.count("\n") <= 5
    assert not set(out + err) & FORBIDDEN
    assert len(out) < 10**6
    if command == "junit" and code == 0:
        assert len(ElementTree.fromstring(out)) == 1
    if "JSON" in command and code == 0:
        assert json.loads(out)["points"] is not None


def test_what_a_later_version_wrote_is_said_with_what_is_left_out(
    results: Path, called: Any
) -> None:
    later_version(results)
    code, out, err = called(["report", "run-a"])
    assert code == 0
    assert "melted" in out
    told = (
        "written by a later version (schema 999, here "
        f"{SCHEMA_VERSION}); 2 columns are unknown here and left out: of_tomorrow, and_after"
    )
    for table in ("runs", "points", "devices"):
        assert f"{table} of run-a: {told}\n" in err
    assert "run run-a: status 'sideways' is not known here\n" in err
    code, out, _ = called(["list"])
    [line] = [line.split() for line in out.splitlines() if "run-a" in line]
    # Its status, and how long it took: it ended before it started.
    assert line.count("unknown") == 2


def test_load_warns_of_a_later_version_and_resume_needs_it(results: Path) -> None:
    later_version(results)
    with pytest.warns(ResultsWarning, match="points of run-a: written by a later version"):
        points = raybench.load(results, "points", "run-a")
    assert list(points.columns) == list(raybench.units("points"))
    with (
        pytest.warns(ResultsWarning, match="written by a later version"),
        pytest.raises(ResultsError, match="'melted', which this version does not know"),
    ):
        latest(results, "run-a")


def test_columns_of_a_later_version_that_do_not_fit_are_unknown(results: Path) -> None:
    path = parts(results, "points")[0]
    part = pq.read_table(path)
    place = part.schema.get_field_index("energy_j")
    metadata = part.schema.metadata | {b"schema_version": b"999"}
    changed = part.set_column(place, "energy_j", pa.array(["12 J"]))
    pq.write_table(changed.replace_schema_metadata(metadata), path)
    with pytest.warns(ResultsWarning, match="1 column is unknown here and left out: energy_j"):
        points = raybench.load(results, "points", "run-a")
    assert points["energy_j"].isna().all()
    assert len(points) == 7


def test_a_damaged_part_hides_its_run_alone(results: Path) -> None:
    damaged = parts(results, "points")[2]
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.warns(ResultsWarning, match=f"{damaged}: .*; run run-a is left out"):
        points = raybench.load(results, "points")
    assert set(points["run_id"]) == {"run-b"}


def test_impossible_figures_are_unknown_and_said(results: Path, called: Any) -> None:
    impossible_figures(results)
    code, out, err = called(["show", "run-a", "--json"])
    points = json.loads(out)["points"]
    assert [point["step_ms_p50"] for point in points[1:]] == [None] * 4
    assert points[0]["step_ms_p50"] == pytest.approx(8.0, rel=0.01)
    assert points[0]["step_ms_ci_low"] is None
    assert (code, err.splitlines()) == (
        0,
        [
            "points of run-a: 2 rows are left out: a setting is missing or impossible",
            "points of run-a: impossible figures are read as unknown: duration_s, step_ms_mean, "
            "step_ms_p50, step_ms_ci_low, step_ms_ci_high ...",
        ],
    )


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+2", "'=1+2"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\ufffd=1"),
        ("\uff1d1", "'\uff1d1"),
        ("-1.5", "-1.5"),
        ("+1e-3", "+1e-3"),
        ("a=1", "a=1"),
    ],
)
def test_a_cell_that_begins_a_formula_is_quoted_and_a_number_is_not(
    results: Path, called: Any, text: str, cell: str
) -> None:
    for path in parts(results, "points"):
        rewrite(path, lambda row: row | {"error_message": text, "params": [(text, text)]})
    rows = list(csv.DictReader(io.StringIO(called(["export", "run-a", "--format", "csv"])[1])))
    assert rows[0]["error_message"] == cell
    assert rows[0][f"params.{text}".replace("\t", "\ufffd")] == cell
    assert rows[0]["attempt"] == "1"


def test_endless_texts_are_cut_and_said(results: Path, called: Any) -> None:
    endless_texts(results)
    for kind in ("csv", "json", "junit"):
        _, out, err = called(["export", "run-a", "--format", kind])
        assert len(out) < 400_000
        assert err == (
            "points of run-a: texts are cut after 4,000 characters: "
            "error_type, error_message, warnings\n"
        )
