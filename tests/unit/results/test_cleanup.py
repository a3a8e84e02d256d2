from __future__ import annotations

import pytest
from builders import make_failed, make_measure, make_point, make_record, make_run

from raybench.results.reader import load
from raybench.results.writer import RunStore, clear_leftovers

RUN = "run-a"


@pytest.fixture
def store(tmp_path):
    """A run with one point, whose samples are there."""
    made = RunStore.create(tmp_path, make_run(RUN), make_measure())
    made.write_records([(0, make_record(make_point(world_size=2)))])
    return made


def sampled(store):
    return set(load(store.root, "samples", RUN)["point_id"])


def rows_of(store, index):
    (path,) = (store.root / "points" / RUN).glob(f"{index:05d}-*")
    return path


KEPT = {make_point(world_size=2).point_id}


def test_halves_of_parts_are_removed_and_other_files_stay(store):
    folder = store.root / "samples" / RUN
    (folder / ".00001-0123456789ab-1.parquet.4711").write_bytes(b"PAR1")
    (folder / ".theirs").touch()
    clear_leftovers(store.root, RUN)
    assert [path.name for path in folder.glob(".*")] == [".theirs"]


@pytest.mark.parametrize("sizes", [(4,), (4, 8)], ids=["one", "several"])
def test_samples_of_attempts_without_a_row_are_removed(store, sizes):
    batch = [(5 + place, make_record(make_point(world_size=n))) for place, n in enumerate(sizes)]
    store.write_records(batch)
    clear_leftovers(store.root, RUN)
    assert sampled(store) == KEPT | {record.point.point_id for _, record in batch}
    rows_of(store, 5).unlink()
    clear_leftovers(store.root, RUN)
    assert sampled(store) == KEPT
    store.write_records([(5, make_failed(make_point(world_size=4)))])
    assert sampled(store) == KEPT


def test_samples_whose_rows_somebody_has_put_elsewhere_stay(store):
    rows = rows_of(store, 0)
    rows.rename(rows.with_name("all.parquet"))
    clear_leftovers(store.root, RUN)
    assert sampled(store) == KEPT


@pytest.mark.parametrize(("of", "suffix"), [("traces", "json.gz"), ("logs", "txt")])
def test_traces_and_logs_of_attempts_without_a_row_are_removed(store, of, suffix):
    folder = store.root / of / RUN
    folder.mkdir(parents=True)
    kept = f"00000-{make_point(world_size=2).point_id}-1-rank0.{suffix}"
    for name in (kept, kept.replace("-1-", "-2-"), "notes.txt"):
        (folder / name).touch()
    clear_leftovers(store.root, RUN)
    assert sorted(path.name for path in folder.iterdir()) == [kept, "notes.txt"]
