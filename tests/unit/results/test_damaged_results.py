"""Results that a fault or a newer version has written: one line each, and the rest is read."""

import csv
import io
import json
import shutil
import socket
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_apart, make_device, make_failed, make_point, write_run
from commands import refusal_of

import raybench
from raybench.errors import ResultsError, ResultsWarning
from raybench.records.measurement import RegionTime
from raybench.records.status import Status
from raybench.results.columns import SCHEMA_VERSION
from raybench.results.reader import LOCK

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
Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Two runs of ok points on 1 to 6 GPUs, and one point that failed."""
    folder = tmp_path_factory.mktemp("sound")
    regions = (RegionTime(name="attention", calls=1, ms=4.0, share=0.5),)
    records = [make_apart([8.0] * size, 8.0, regions=regions) for size in range(1, 7)]
    records.append(make_failed(make_point(world_size=8), status=Status.ERROR))
    for run_id in ("run-a", "run-b"):
        write_run(folder, run_id, records, [make_device(index) for index in range(2)])
    return folder


@pytest.fixture
def results(sound, tmp_path):
    """A copy of them, to be spoilt: to write them takes ten times as long."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def called(results, command):
    """Run a command, in which POINT stands for a point's id; its exit code, stdout and stderr."""
    point_id = make_point(world_size=2).point_id
    return lambda words: command(*(point_id if word == "POINT" else word for word in words))


def rewrite(path, change, version=None, **more):
    """Write a part as somebody else might: other values, another version, more columns."""
    part = pq.read_table(path)
    metadata = part.schema.metadata | ({b"schema_version": version.encode()} if version else {})
    rows = [change(row) for row in part.to_pylist()]
    for name in more:
        rows = [row | {name: more[name]} for row in rows]
    fields = [*part.schema, *(pa.field(name, pa.string()) for name in more)]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields, metadata=metadata)), path)


def parts(results, table):
    return sorted((results / table / "run-a").glob("*.parquet"))


def control_characters(results):
    """Every text that nothing depends on."""
    keys = ("run_id", "point_id", "status", "scaling", "precision", "device_type")

    def change(row):
        texts = {name: EVIL for name, value in row.items() if isinstance(value, str)}
        maps = {name: [(EVIL, EVIL)] for name in ("params", "methods", "tags", "versions")}
        lists = {name: [EVIL] for name in ("throttle_reasons", "argv", "neighbours")}
        lists["doubts"] = [{"kind": "not_alone", "value": 1.0, "limit": None, "subject": EVIL}]
        evil = {name: value for name, value in (texts | maps | lists).items() if name in row}
        return row | {name: value for name, value in evil.items() if name not in keys}

    for table in ("runs", "points", "devices", "regions"):
        for path in parts(results, table):
            rewrite(path, change)


def failures_in_part(results):
    """Points that failed: one out of memory without its batch, one on a host but on no rank."""
    *_, alone, last = parts(results, "points")
    out_of_memory = {"status": "oom", "scaling": "weak", "batch_size": None}
    rewrite(alone, lambda row: row | out_of_memory)
    rewrite(last, lambda row: row | {"error_host": "node7", "error_rank": None})


STRANGE = {
    "failures that lack something": failures_in_part,
    "control characters": control_characters,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", COMMANDS)
def test_strange_results_are_shown_without_harm(results, called, kind, name):
    STRANGE[kind](results)
    code, out, err = called(COMMANDS[name])
    assert code in (0, 1), err
    assert "Traceback" not in err
    assert not set(out + err) & FORBIDDEN
    if name == "junit" and code == 0:
        assert len(ElementTree.fromstring(out)) == 1
    if "JSON" in name and code == 0:
        assert json.loads(out)["points"] is not None


@pytest.mark.parametrize("table", ["runs", "points"])
def test_newer_part_hides_only_its_run(results, called, table):
    path = parts(results, table)[0]
    rewrite(path, dict, version="999")
    line = (
        f"{path}: written by a newer raybench (schema version 999, here {SCHEMA_VERSION}); "
        "update raybench to read it"
    )
    assert refusal_of(ResultsError, raybench.load, results, table, "run-a") == line
    with pytest.warns(ResultsWarning) as told:
        found = raybench.load(results, table)
    assert [str(one.message) for one in told] == [f"{line}; run run-a is left out"]
    assert set(found["run_id"]) == {"run-b"}
    code, _, err = called(["report", "run-a"])
    assert (code, err.splitlines()[-1]) == (2, line)


def test_run_with_unknown_status_is_skipped(results, called):
    [path] = parts(results, "runs")
    rewrite(path, lambda row: row | {"status": "sideways"})
    code, out, err = called(["list"])
    assert code == 0
    assert "run-b" in out
    assert "run-a" not in out
    assert err.count("\n") == 1
    assert "run run-a: its row has no start, or no status; run run-a is left out" in err


def folder_in_its_place(path):
    path.unlink()
    path.mkdir()


def link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def folder_that_cannot_be_listed(path):
    shutil.rmtree(path.parent)
    path.parent.symlink_to(path.parent)  # without permission, root could list it


# What can happen to a file of a run, by what it is called.
DAMAGE = {
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "newer version": lambda path: rewrite(path, dict, version="999"),
    "part of another table": lambda path: pq.write_table(pa.table({"run_id": ["run-a"]}), path),
    "strange status": lambda path: rewrite(path, lambda row: row | {"status": "sideways"}),
    "no permission": lambda path: path.chmod(0),
    "folder in its place": folder_in_its_place,
    "link to nothing": link_to_nothing,
    "gone": lambda path: path.unlink(),
    "all of its table gone": lambda path: shutil.rmtree(path.parent),
    "folder that cannot be listed": folder_that_cannot_be_listed,
}


@pytest.mark.parametrize(
    ("table", "is_killed"), [("runs", False), ("points", False), ("points", True)]
)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_spares_other_runs(results, called, table, is_killed, kind):
    if is_killed:  # its points tell how far it came
        running = {"status": "running", "finished_at": None, "host": socket.gethostname()}
        rewrite(parts(results, "runs")[0], lambda row: row | running)
        (results / "runs" / "run-a" / LOCK).touch()
    DAMAGE[kind](parts(results, table)[0])
    for words in (["report", "run-b"], ["report", "latest"], ["list"]):
        code, out, err = called(words)
        assert (code, "run-b" in out) == (0, True), err
        assert not err or (err.count("\n") == 1 and "run-a" in err)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+2", "'=1+2"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "\ufffd=1"),
        ("\uff1d1", "'\uff1d1"),
        ("-1.5", "-1.5"),
        ("+1e-3", "+1e-3"),
        ("a=1", "a=1"),
    ],
)
def test_formula_cells_are_quoted(results, called, text, cell):
    for path in parts(results, "points"):
        rewrite(path, lambda row: row | {"error_message": text, "params": [(text, text)]})
    rows = list(csv.DictReader(io.StringIO(called(["export", "run-a", "--format", "csv"])[1])))
    assert rows[0]["error_message"] == cell
    assert rows[0][f"params.{text}".replace("\t", "\ufffd")] == cell
    assert rows[0]["attempt"] == "1"
