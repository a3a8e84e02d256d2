"""A run whose parts are put together: the same rows, also where that was cut short."""

import os
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from builders import START, make_device, make_failed, make_point, make_record, make_run, write_run

from raybench.errors import ResultsError
from raybench.records.devices import DeviceSample
from raybench.records.status import RunStatus
from raybench.results import reader
from raybench.results.columns import write_part
from raybench.results.reader import load_table
from raybench.results.tables import TABLES
from raybench.results.writer import clear_leftovers, compact_points, compact_run, hold_run

RUN = "run-a"
SAMPLE = DeviceSample(node_id="n0", index=0, uuid="GPU-0", time=START, power_w=300.0)


class Killed(BaseException):
    """Ends the test's process as SIGKILL would, where no handler of errors catches it."""


@pytest.fixture
def store(tmp_path):
    """A run with four attempts in three parts, the last two ended together, and new devices."""
    made = write_run(tmp_path, RUN, devices=[make_device(0)])
    made.write_devices([make_device(1)], "devices-1")
    for batch in (
        [(0, make_failed())],
        [(0, make_record(attempt=2))],
        [(1, make_record(make_point(world_size=2))), (2, make_record(make_point(world_size=4)))],
    ):
        made.write_records(batch)
        made.write_telemetry(batch, [SAMPLE])
    return made


def rows(store):
    return {table: reader.load_table(store.root, table, RUN) for table in TABLES}


def assert_same(found, expected):
    for table, frame in expected.items():
        pd.testing.assert_frame_equal(found[table], frame)


def parts(store, table):
    return sorted((store.root / table / RUN).glob("[!.]*.parquet"))


def test_compaction_keeps_rows_and_order(store):
    before = rows(store)
    (store.root / "samples" / RUN / "0-link.parquet").symlink_to("gone")
    done = compact_run(store.root, RUN)
    assert (done.parts_before, done.parts_after) == (1 + 2 + 3 + 3 + 3, 5)
    assert done.bytes_after < done.bytes_before
    assert {len(parts(store, name)) for name in ("runs", "devices", "points", "samples")} == {1}
    assert_same(rows(store), before)
    assert len(pd.read_parquet(store.root / "points")) == len(before["points"]) == 4


def test_points_are_merged_before_other_tables(store):
    before = rows(store)
    with hold_run(store.root, RUN):
        compact_points(store.root, RUN)
    assert [len(parts(store, table)) for table in ("points", "samples", "telemetry")] == [1, 2, 3]
    assert_same(rows(store), before)
    assert compact_run(store.root, RUN).parts_after == 5
    assert_same(rows(store), before)


@pytest.mark.parametrize("of", [(RUN,), ()], ids=["a run", "all runs"])
def test_reader_survives_concurrent_compaction(store, monkeypatch, of):
    before, read_parts = reader.load_table(store.root, "points", *of), reader.read_parts

    def late(*given):
        monkeypatch.undo()
        compact_run(store.root, RUN)
        return read_parts(*given)

    monkeypatch.setattr(reader, "read_parts", late)
    pd.testing.assert_frame_equal(reader.load_table(store.root, "points", *of), before)


def test_the_samples_of_an_attempt_are_found(store):
    last = make_point(world_size=4).point_id
    [before] = reader.rows_of_attempts(store.root, "samples", RUN, [(last, 1)])
    compact_run(store.root, RUN)
    [after] = reader.rows_of_attempts(store.root, "samples", RUN, [(last, 1)])
    assert len(after) == len(before) > 0
    assert [path.name for path in parts(store, "samples")] == [parts(store, "points")[0].name]


def test_resumed_run_is_compacted_again(store):
    compact_run(store.root, RUN)
    clear_leftovers(store.root, RUN)
    store.write_records([(3, make_record(make_point(world_size=8)))])
    before = rows(store)
    assert len(before["points"]) == 5
    compact_run(store.root, RUN)
    assert_same(rows(store), before)
    assert len(parts(store, "samples")) == 1


@pytest.mark.parametrize(
    ("removed", "end", "told"),
    [
        (0, Killed(), Killed),
        (1, Killed(), Killed),
        (0, PermissionError(1, "Not permitted"), ResultsError),
    ],
)
def test_killed_compaction_shows_rows_once(store, monkeypatch, removed, end, told):
    unlink, left = Path.unlink, [removed]

    def killed(path, missing_ok=False):
        if not path.name.startswith("."):
            if not left[0]:
                raise end
            left[0] -= 1
            unlink(path, missing_ok=missing_ok)

    before = rows(store)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(told):
            compact_run(store.root, RUN)
    assert len(parts(store, "samples")) == 3 - removed
    parts(store, "samples")[-1].write_bytes(b"damaged")
    assert_same(rows(store), before)
    compact_run(store.root, RUN)
    assert len(parts(store, "samples")) == 1
    assert_same(rows(store), before)


def test_merged_part_is_synced_before_deleting(store, monkeypatch):
    synced, unsynced = set(), []
    fsync, unlink = os.fsync, Path.unlink

    def note_sync(file):
        fsync(file)
        synced.add(os.fstat(file).st_ino)

    def note_unlink(path, missing_ok=False):
        if not path.name.startswith("."):
            [merged] = path.parent.glob("*-and-3-more.parquet")
            unsynced.extend([path] if merged.stat().st_ino not in synced else [])
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    with hold_run(store.root, RUN):
        compact_points(store.root, RUN)
    assert len(parts(store, "points")) == 1
    assert synced
    assert unsynced == []


def test_samples_of_several_attempts_stay_with_one_row(single):
    sizes = (4, 8)
    batch = [(5 + place, make_record(make_point(world_size=n))) for place, n in enumerate(sizes)]
    single.write_records(batch)
    rows_of(single, 5).unlink()
    single.write_records(batch[1:])
    # The part of both attempts has no twin any more; the row of the second is elsewhere.
    own = single.root / "samples" / RUN / rows_of(single, 6).name
    own.unlink()
    clear_leftovers(single.root, RUN)
    assert sampled(single) >= KEPT | {batch[1][1].point.point_id}


def test_a_run_that_is_measured_is_refused(store):
    names = parts(store, "points")
    with (
        hold_run(store.root, RUN),
        pytest.raises(ResultsError, match="is being written by another sweep"),
    ):
        compact_run(store.root, RUN)
    there = make_run(RUN, status=RunStatus.RUNNING, finished_at=None, host="elsewhere")
    store.write_run(there)
    with pytest.raises(ResultsError, match=f"run {RUN} is still running; compact it when"):
        compact_run(store.root, RUN)
    assert parts(store, "points") == names


def test_newer_part_is_not_compacted(store):
    path = parts(store, "samples")[0]
    part = pq.read_table(path, partitioning=None)
    newer = part.schema.metadata | {b"schema_version": b"999"}
    write_part(path, "samples", part.replace_schema_metadata(newer))
    names = parts(store, "samples")
    with pytest.raises(ResultsError, match="written by a newer raybench"):
        compact_run(store.root, RUN)
    assert parts(store, "samples") == names


@pytest.fixture
def single(tmp_path):
    """A run with one point, whose samples are there."""
    return write_run(tmp_path, RUN, [make_record(make_point(world_size=2))])


def sampled(single):
    return set(load_table(single.root, "samples", RUN)["point_id"])


def rows_of(single, index):
    (path,) = (single.root / "points" / RUN).glob(f"{index:05d}-*")
    return path


KEPT = {make_point(world_size=2).point_id}


@pytest.mark.parametrize("sizes", [(4,), (4, 8)], ids=["one", "several"])
def test_samples_of_attempts_without_a_row_are_removed(single, sizes):
    batch = [(5 + place, make_record(make_point(world_size=n))) for place, n in enumerate(sizes)]
    single.write_records(batch)
    clear_leftovers(single.root, RUN)
    assert sampled(single) == KEPT | {record.point.point_id for _, record in batch}
    rows_of(single, 5).unlink()
    clear_leftovers(single.root, RUN)
    assert sampled(single) == KEPT
    single.write_records([(5, make_failed(make_point(world_size=4)))])
    assert sampled(single) == KEPT


@pytest.mark.parametrize("act", [clear_leftovers, compact_run])
def test_unreadable_points_prevent_clearing(single, act):
    folder = single.root / "points" / RUN
    folder.rename(folder.with_name(".aside"))
    with pytest.raises(ResultsError, match=f"{RUN}: cannot be read, put it back"):
        act(single.root, RUN)
    folder.with_name(".aside").rename(folder)
    assert sampled(single) == KEPT


def test_samples_whose_rows_somebody_has_put_elsewhere_stay(single):
    rows = rows_of(single, 0)
    rows.rename(rows.with_name("all.parquet"))
    clear_leftovers(single.root, RUN)
    assert sampled(single) == KEPT


@pytest.mark.parametrize(("of", "suffix"), [("traces", "json.gz"), ("logs", "txt")])
def test_traces_and_logs_without_row_are_removed(single, of, suffix):
    folder = single.root / of / RUN
    folder.mkdir(parents=True)
    kept = f"00000-{make_point(world_size=2).point_id}-1-rank0.{suffix}"
    theirs = ["my-notes-2-ranks.txt", "my-own-note-rank0.txt", "notes.txt"]
    for name in (kept, kept.replace("-1-", "-2-"), *theirs):
        (folder / name).touch()
    clear_leftovers(single.root, RUN)
    assert sorted(path.name for path in folder.iterdir()) == [kept, *theirs]
