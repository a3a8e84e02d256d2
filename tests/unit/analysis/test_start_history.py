"""Other runs of the same job tell how far starts scatter on these devices."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import START, make_measure, make_point, make_record, make_run

import raybench
from raybench.analysis.start_noise import RUNS, TIGHT_KIND, known_starts, prior_of
from raybench.cli.results import load_summary
from raybench.results.reader import read_run
from raybench.results.writer import RunStore


def keep(root: Path, number: int, step_ms: float, **changes: Any) -> str:
    run_id = f"job-20261122-00000{number}-abcd"
    settings = {"job_name": "job", "started_at": START + timedelta(hours=number)} | changes
    run = make_run(run_id, baseline={"world_size": 1}, **settings)
    store = RunStore.create(root, run, make_measure())
    for index, world_size in enumerate((1, 2)):
        record = make_record(make_point(world_size=world_size), step_ms=step_ms, count=100)
        store.write_records([(index, record)])
    store.write_devices(record.devices)
    return run_id


def test_the_scatter_of_other_runs_of_the_same_is_drawn_towards_what_is_documented(
    tmp_path: Path,
) -> None:
    ids = [keep(tmp_path, number, ms) for number, ms in enumerate((10.0, 10.5, 9.6, 10.2))]
    found = known_starts(tmp_path, read_run(tmp_path, ids[1]))
    assert set(found) == {TIGHT_KIND}
    assert found[TIGHT_KIND].source == RUNS
    # Six degrees of freedom of 3.7 %, three of what is documented.
    assert found[TIGHT_KIND].degrees == prior_of(TIGHT_KIND).degrees + 6
    assert found[TIGHT_KIND].sd == pytest.approx(0.037 * (6 / 9) ** 0.5, rel=0.05)


def test_the_report_and_the_table_of_a_run_use_it_and_the_report_says_so(tmp_path: Path) -> None:
    ids = [keep(tmp_path, number, ms) for number, ms in enumerate((10.0, 10.5, 9.6))]
    summary = load_summary(tmp_path, ids[0])
    assert summary.plus_minus == "± holds over starts of the processes, as other runs here show."
    loaded = raybench.load(tmp_path, "scaling", ids[0])
    assert loaded["speed_up_high"].tolist() == summary.scaling["speed_up_high"].tolist()


@pytest.mark.parametrize("changes", [{"job_sha256": "other"}, {"git_commit": "other"}])
def test_runs_of_something_else_tell_nothing(tmp_path: Path, changes: dict[str, str]) -> None:
    run_id = keep(tmp_path, 0, 10.0)
    keep(tmp_path, 1, 11.0, **changes)
    assert known_starts(tmp_path, read_run(tmp_path, run_id)) == {}
    assert "documented" in load_summary(tmp_path, run_id).plus_minus
