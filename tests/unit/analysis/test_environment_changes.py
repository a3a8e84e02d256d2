"""What changed around two runs, as the tables tell it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from builders import START, make_device
from compared import write

from raybench.analysis.environment_changes import changes, facts
from raybench.results import reader


def test_environments_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    newer = [make_device(place, driver_version="590.2") for place in (0, 1)]
    write(tmp_path, "base", [])
    write(tmp_path, "twin", [], started_at=START + timedelta(hours=1))
    write(tmp_path, "new", [], newer, tags={"driver": "590"})
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    found = {name: facts(run, reader.load(tmp_path, "devices", name)) for name, run in runs.items()}
    assert changes(found["base"], found["twin"]) == ()
    assert [(c.name, c.base, c.new) for c in changes(found["base"], found["new"])] == [
        ("driver", "580.1", "590.2")
    ]


def test_variables_and_commits_are_among_what_changed(tmp_path: Path) -> None:
    write(tmp_path, "a", [])
    device = make_device(0, environment={"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"})
    write(tmp_path, "b", [], [device, make_device(1)], git_commit="b" * 40 + "+changes")
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    a, b = (facts(runs[name], reader.load(tmp_path, "devices", name)) for name in ("a", "b"))
    assert [(c.name, c.base, c.new) for c in changes(a, b)] == [
        ("git commit", "a" * 12, "b" * 12 + "+changes"),
        ("variable NCCL_ALGO", "none", "Ring"),
    ]


def test_changed_code_is_named_by_its_file_but_not_where_one_run_tells_of_none(
    tmp_path: Path,
) -> None:
    told = {"raybench_sha256": "a" * 64}
    write(tmp_path, "old", [])
    write(tmp_path, "a", [], **told, workload_files={"net.py": "1" * 64, "loss.py": "3" * 64})
    write(tmp_path, "b", [], **told, workload_files={"net.py": "2" * 64, "loss.py": "3" * 64})
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    old, a, b = (facts(runs[n], reader.load(tmp_path, "devices", n)) for n in ("old", "a", "b"))
    assert [(c.name, c.base, c.new) for c in changes(a, b)] == [("code net.py", "1" * 12, "2" * 12)]
    assert changes(old, a) == ()


@pytest.mark.parametrize(("kind", "told"), [("cuda", ["device UUIDs"]), ("cpu", [])])
def test_another_gpu_is_a_change_and_another_process_on_the_cpu_is_none(
    tmp_path: Path, kind: str, told: list[str]
) -> None:
    for run_id in ("a", "b"):
        write(tmp_path, run_id, [], [make_device(0, kind=kind, uuid=f"of-{run_id}")])
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    a, b = (facts(runs[name], reader.load(tmp_path, "devices", name)) for name in ("a", "b"))
    assert [change.name for change in changes(a, b)] == told
