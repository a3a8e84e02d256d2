import json
import os
import shutil
import socket
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import (
    START,
    make_device,
    make_failed,
    make_measure,
    make_measurement,
    make_point,
    make_record,
    make_run,
    open_run,
    write_run,
)
from commands import refusal_of, run_python

from raybench.errors import ResultsError
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import ModuleTime, Profile
from raybench.records.record import TrialKey
from raybench.records.status import RunStatus, Status
from raybench.results import reader
from raybench.results.columns import replace_file
from raybench.results.reader import find_run, load_table, read_runs, read_table
from raybench.results.record_rows import point_metrics
from raybench.results.tables import TABLES, schema
from raybench.results.writer import RunStore, check_writable, hold_run


@pytest.fixture
def results(tmp_path):
    """Two runs: run-old with an ok and a failed point, run-new of no job, with a skipped point."""
    root = tmp_path / "results"
    old = [make_record(make_point(world_size=2)), make_failed()]
    write_run(root, "run-old", old, [make_device(0), make_device(1)])
    skipped = make_failed(status=Status.SKIPPED, devices=(), error_type=None)
    write_run(root, "run-new", [skipped], started_at=START + timedelta(1), job_name="")
    return root


def old_run(results):
    return open_run(results, "run-old")


def part_of(results, table, run_id="run-old"):
    return sorted((results / table / run_id).glob("*.parquet"))[0]


@pytest.mark.parametrize("table", ["runs", "points", "samples", "devices"])
def test_pandas_and_load_read_the_same(results, table):
    plain = pd.read_parquet(results / table)
    ours = load_table(results, table)
    scalar = [c.name for c in TABLES[table] if not c.kind.startswith(("map", "list"))]
    names = ("run_id", "point_id", "rank", "is_warmup", "iteration")
    key = [name for name in names if name in plain]
    pd.testing.assert_frame_equal(
        plain[scalar].sort_values(key, ignore_index=True, kind="stable"),
        ours[scalar].sort_values(key, ignore_index=True, kind="stable"),
    )


@pytest.mark.parametrize("table", ["runs", "points", "samples", "devices"])
def test_parts_carry_schema_and_version(results, table):
    for path in (results / table).rglob("*.parquet"):
        found = pq.read_schema(path)
        assert found.equals(schema(table), check_metadata=False)
        assert found.metadata == schema(table).metadata
        assert [f.metadata for f in found] == [f.metadata for f in schema(table)]


def test_run_is_written_first_and_rewritten(tmp_path):
    run = make_run("run-x", status=RunStatus.RUNNING, finished_at=None, points_ok=0)
    written = RunStore.create(tmp_path, run, make_measure())
    assert [known.status for known in read_runs(tmp_path)] == [RunStatus.RUNNING]
    written.write_run(replace(run, status=RunStatus.OK, points_ok=3))
    [found] = read_runs(tmp_path)
    assert (found.status, found.points_ok, found.finished_at) == (RunStatus.OK, 3, None)
    assert found.started_at == run.started_at
    assert dict(found.tags) == {"rack": "7"}


def test_readers_ignore_half_written_files(results):
    before = len(load_table(results, "points"))
    part = part_of(results, "points")
    (part.parent / f".{part.name}.77").write_bytes(part.read_bytes()[:200])
    assert len(load_table(results, "points")) == before
    assert {len(read(results / "points")) for read in (pd.read_parquet, pq.read_table)} == {before}


def test_written_pipe_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_file(tmp_path / "pipe", b"text")
    assert os.read(pipe, 9) == b"text"


def test_kill_before_rename_keeps_old_part(results, monkeypatch):
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        old_run(results).write_run(make_run("run-old", status=RunStatus.INTERRUPTED))
    assert {run.status for run in read_runs(results)} == {RunStatus.OK}
    assert [path.name for path in (results / "runs" / "run-old").iterdir()] == ["run.parquet"]


def test_a_point_that_is_seen_has_its_samples(results, monkeypatch):
    order = []
    rename = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (order.append(Path(to).parts[-3]), rename(self, to))[1]
    )
    old_run(results).write_records([(7, make_record())])
    assert order == ["samples", "points"]


def test_attempts_of_one_batch_share_parts(results):
    sizes = (4, 1, 8)
    records = [make_record(make_point(world_size=size)) for size in sizes]
    batch = [(5, records[0]), (6, make_failed(make_point(world_size=16))), (9, records[1])]
    store = old_run(results)
    store.write_records(batch)
    store.write_records([(7, records[2])])
    name = f"00005-{records[0].point.point_id}-1-and-2-more.parquet"
    for table, attempts in (("points", 3), ("samples", 2)):
        part = pq.read_table(results / table / "run-old" / name)
        assert len(set(part["point_id"].to_pylist())) == attempts
    asked = [(record.point.point_id, 1) for record in reversed(records)]
    each = reader.rows_of_attempts(results, "samples", "run-old", asked, ["rank", "point_id"])
    for (point_id, _), size, found in zip(asked, reversed(sizes), each, strict=True):
        assert set(found["point_id"]) == {point_id}
        assert sorted(found["rank"].unique()) == list(range(size))


def test_full_disk_leaves_no_partial_file(results):
    code = (
        "import resource, sys\n"
        "from builders import make_failed, open_run\n"
        "from pathlib import Path\n"
        "from raybench.errors import ResultsError\n"
        "store = open_run(Path(sys.argv[1]), 'run-old')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    store.write_records([(7, make_failed())])\n"
        "except ResultsError as error:\n"
        "    print(error)\n"
    )
    before = sorted((results / "points").rglob("*"))
    done = run_python(code, results, cwd=Path(__file__).parents[1])
    assert "cannot be written: File too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert sorted((results / "points").rglob("*")) == before


def test_vanishing_part_is_no_error(results, monkeypatch):
    listed = part_of(results, "samples")
    monkeypatch.setattr(reader, "parts_of", lambda *_: [listed])
    listed.unlink()
    assert load_table(results, "samples").empty


def test_some_columns_of_a_table_are_read_alone(results):
    found = read_table(results, "points", "run-new", ["status", "run_id"]).to_pylist()
    assert found == [{"status": "skipped", "run_id": "run-new"}]


def test_a_hundred_parts_stay_below_six_megabytes(tmp_path):
    write_run(tmp_path, "run-x", [make_record(make_point(world_size=4), count=50)])
    assert part_of(tmp_path, "points", "run-x").stat().st_size < 50_000
    assert part_of(tmp_path, "samples", "run-x").stat().st_size < 7_500


@pytest.mark.parametrize(
    "run_id", ["../evil", "a/b", "..", ".hidden", "", "12345", "latest", "a\\b", "run\n"]
)
def test_invalid_run_id_is_refused(tmp_path, run_id):
    with pytest.raises(ResultsError, match=r"run_id: must be .* begin with a letter or a digit"):
        RunStore.create(tmp_path / "results", make_run(run_id), make_measure())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_of_a_removed_run(results):
    store = old_run(results)
    for table in TABLES:
        shutil.rmtree(results / table / "run-old", ignore_errors=True)
    profile = Profile(trace=b"trace")
    profiled = replace(make_measurement(0, [(1, 2)]), profile=profile)
    record = make_record(make_point(batch_size=3), measurements=(profiled,), outputs=("printed",))
    with pytest.raises(ResultsError, match="the folders of run run-old are gone"):
        store.write_records([(7, record)])
    assert list(results.glob("*/run-old")) == []


def test_the_latest_attempt_counts_whatever_its_part(results):
    store = old_run(results)
    point = make_point(batch_size=3)
    # By name, the part of the second attempt comes first.
    store.write_records([(3, make_record(point, attempt=2))])
    store.write_records([(7, make_failed(point, attempt=1))])
    last = reader.latest(results, "run-old")[TrialKey(point.point_id)]
    assert (last.attempt, last.status) == (2, Status.OK)


def test_run_is_never_overwritten(results):
    store = old_run(results)
    with pytest.raises(ResultsError, match="run run-old is already there"):
        RunStore.create(results, make_run("run-old"), make_measure())
    results.rename(results.with_name("elsewhere"))
    told = refusal_of(ResultsError, store.write_records, [(2, make_record())])
    assert "the folders of run run-old are gone" in told
    assert not results.exists()


def test_unwritable_part_is_one_line(results):
    shutil.rmtree(results / "points" / "run-old")
    (results / "points" / "run-old").write_text("a file")
    with pytest.raises(ResultsError, match=r"points/run-old/.*cannot be written: File exists"):
        old_run(results).write_records([(0, make_failed())])


@pytest.mark.parametrize(
    "damaged",
    [
        lambda _: b"",
        lambda _: b"PAR1 but not more PAR1",
        lambda whole: whole[: len(whole) // 3],
        lambda whole: whole[:-9],
        lambda whole: whole.replace(b"iteration", b"iterati\xaan"),
    ],
    ids=["empty", "no footer", "a third", "almost whole", "a column name that is no text"],
)
def test_a_damaged_part_is_named_in_one_line(results, damaged):
    path = part_of(results, "samples")
    path.write_bytes(damaged(path.read_bytes()))
    told = refusal_of(ResultsError, load_table, results, "samples", "run-old")
    assert told.startswith(f"{path}: not a Parquet file, or a damaged one")


def test_a_foreign_parquet_file_is_named(results):
    path = results / "points" / "run-old" / "foreign.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ResultsError, match=r"foreign\.parquet: not a part of the table points"):
        load_table(results, "points", "run-old")
    shutil.copy(part_of(results, "samples"), path)
    with pytest.raises(ResultsError, match="not a part of the table points"):
        load_table(results, "points", "run-old")


def test_missing_columns_are_null_and_extra_dropped(results):
    path = part_of(results, "points")
    part = pq.read_table(path)
    older = part.drop_columns(["energy_j", "scaling"])
    newer = older.append_column("of_tomorrow", pa.array(["x"]))
    pq.write_table(newer.replace_schema_metadata(part.schema.metadata), path)
    points = load_table(results, "points", "run-old")
    assert list(points.columns) == schema("points").names
    assert points["scaling"].isna().sum() == 1


def test_misfit_column_names_its_file(results):
    path = part_of(results, "points")
    part = pq.read_table(path)
    place = part.schema.get_field_index("world_size")
    wrong = part.set_column(place, "world_size", pa.array(["many"]))
    pq.write_table(wrong.replace_schema_metadata(part.schema.metadata), path)
    with pytest.raises(ResultsError, match="its column world_size does not fit"):
        load_table(results, "points", "run-old")


def test_unknown_table_or_folder_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for message, call, *given in (
        ("got 'point'; did you mean 'points'?", load_table, tmp_path, "point"),
        ("no runs yet; `raybench sweep JOB` makes one", find_run, tmp_path, "latest"),
        ("no such folder of results", load_table, tmp_path / "nowhere", "points"),
        ("File name too long", read_runs, Path("x" * 5000)),
        ("file: a file, not a folder of results", load_table, tmp_path / "file", "points"),
    ):
        told = refusal_of(ResultsError, call, *given)
        assert message in told
        assert len(told) < 300


@pytest.mark.parametrize(
    ("text", "run_id"), [("run-old", "run-old"), ("run-o", "run-old"), ("latest", "run-new")]
)
def test_run_is_found_by_prefix_or_latest(results, text, run_id):
    assert find_run(results, text) == (results, run_id)
    assert set(load_table(results, "points", text)["run_id"]) == {run_id}


@pytest.mark.parametrize("path", ["runs/run-old", "points/run-old/", "runs/run-old/run.parquet"])
def test_path_finds_run_in_any_folder(results, path):
    for root in (results, results / "nowhere"):
        assert find_run(root, f"{results}/{path}") == (results, "run-old")
    assert set(load_table(results, "points", f"{results}/{path}")["run_id"]) == {"run-old"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run", "run 'run' is ambiguous: run-old, run-new"),
        ("run-odl", "no run 'run-odl'; did you mean 'run-old'?"),
        ("ddp_scalin", "no run 'ddp_scalin'; did you mean 'ddp_scaling'?"),
        ("xyz", "no run 'xyz'; there are: run-old, run-new"),
        ("", "no run ''; there are: run-old, run-new"),
        ("../run-old", "not a run of"),
        ("/etc/passwd", "not a run of"),
        ("a/" + "9" * 5000, "not a run of"),
    ],
)
def test_ambiguous_run_names_candidates(results, text, message, monkeypatch):
    # Where the folder above the working directory has no results.
    monkeypatch.chdir(results)
    assert message in refusal_of(ResultsError, find_run, results, text)


def test_unwritable_folder_is_refused_early(tmp_path, monkeypatch):
    check_writable(tmp_path / "new" / "results")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "file" / "results", tmp_path / "link"):
        assert "is not a folder; choose another" in refusal_of(ResultsError, check_writable, path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ResultsError, match=f"no permission to write to {tmp_path}; choose"):
        check_writable(tmp_path / "results")


def unfinished(root, host, **changes):
    running = {"status": RunStatus.RUNNING, "finished_at": None, "points_ok": 0, **changes}
    write_run(root, "run-b", [make_record()], host=host, **running)


def test_run_without_driver_is_interrupted(tmp_path):
    with hold_run(tmp_path, "run-b"):
        unfinished(tmp_path, socket.gethostname())
        assert [run.status for run in read_runs(tmp_path)] == [RunStatus.RUNNING]
    for path in (tmp_path / "points").rglob("*.parquet"):
        os.utime(path, (2e9, 2e9))  # as where the folder was copied
    (run,) = read_runs(tmp_path)
    assert run.status is RunStatus.INTERRUPTED
    assert run.finished_at - run.started_at < timedelta(hours=1)
    assert (run.points_ok, run.points_failed) == (1, 0)
    assert run.finished_at >= run.started_at
    assert list(pd.read_parquet(tmp_path / "runs")["run_id"]) == ["run-b"]
    with hold_run(tmp_path, "run-b"):
        pass  # readers do not keep it out


def test_a_killed_resumed_run_ended_after_its_pause(tmp_path, command):
    with hold_run(tmp_path, "run-b"):
        unfinished(tmp_path, socket.gethostname(), paused_s=3600.0)
    went_on = START + timedelta(hours=2)
    row = part_of(tmp_path, "runs", "run-b")
    os.utime(row, (went_on.timestamp(), went_on.timestamp()))
    [run] = json.loads(command("list", "--json", results=tmp_path).out)["runs"]
    assert run["status"] == "interrupted"
    assert datetime.fromisoformat(run["finished_at"]) == went_on


@pytest.mark.parametrize("is_held_once", [True, False])
def test_unknown_driver_is_not_interrupted(tmp_path, is_held_once):
    host = "another-host" if is_held_once else socket.gethostname()
    unfinished(tmp_path, host)
    if is_held_once:
        with hold_run(tmp_path, "run-b"):
            pass
    assert [run.status for run in read_runs(tmp_path)] == [RunStatus.RUNNING]


def test_unwritable_attempt_spares_others(tmp_path, monkeypatch):
    def broken(record):
        if record.point.batch_size == 1:
            raise ArithmeticError("a bug of ours")
        return point_metrics(record)

    monkeypatch.setattr("raybench.results.record_rows.point_metrics", broken)
    store = write_run(tmp_path, "run-a")
    bad, good = (make_record(make_point(batch_size=size)) for size in (1, 2))
    kept = store.write_records([(0, bad), (1, good)])
    assert [record.status for record in kept] == [Status.ERROR, Status.OK]
    points = load_table(tmp_path, "points").set_index("batch_size")
    assert points["status"].tolist() == ["error", "ok"]
    assert points.loc[1, "error_type"] == "ArithmeticError"
    assert "which is its bug: ArithmeticError: a bug of ours" in points.loc[1, "error_message"]
    assert set(load_table(tmp_path, "samples")["point_id"]) == {good.point.point_id}


def test_invalid_utf8_is_kept_with_replacement(tmp_path):
    module = ModuleTime(name="a\ud800", kind="B", calls=1, forward_ms=1.0, backward_ms=None)
    record = make_record()
    (measurement,) = record.measurements
    profiled = replace(measurement, profile=Profile(trace=b"", modules=(module,)))
    told = dict.fromkeys(("error_type", "error_message", "error_detail"), "bad \udc80 text")
    failed = make_failed(make_point(world_size=2), **told)
    doubt = Doubt(kind=DoubtKind.CHECK_FAILED, subject="bad \udc80 text")
    records = [replace(record, measurements=(profiled,), doubts=(doubt,)), failed]
    devices = [make_device(0, environment={"\udcff": "1"})]
    write_run(tmp_path, "run-a", records, devices, environment={"A": "\udcff"})
    assert load_table(tmp_path, "modules")["module"].tolist() == ["a?"]
    assert dict(load_table(tmp_path, "runs")["environment"].iloc[0]) == {"A": "?"}
    points = load_table(tmp_path, "points").set_index("world_size")
    assert points.loc[2, [*told]].tolist() == ["bad ? text"] * 3
    assert [one["subject"] for one in points.loc[1, "doubts"]] == ["bad ? text"]


@pytest.mark.parametrize(("table", "name"), [("points", "point_id"), ("runs", "run_id")])
def test_row_without_key_names_its_part(results, table, name):
    path = part_of(results, table)
    rows = pq.read_table(path)
    place = rows.column_names.index(name)
    key = rows.schema.field(place).with_nullable(True)
    pq.write_table(rows.set_column(place, key, pa.nulls(rows.num_rows, key.type)), path)
    with pytest.raises(ResultsError, match=f"{path.name}: a row without {name}; remove or"):
        read_table(results, table, "run-old")
