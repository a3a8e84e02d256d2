"""What changed around two runs, as the tables tell it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from builders import START, make_device
from compared import write

from raybench.analysis.environment_changes import changes, facts
from raybench.results import reader


def facts_of(root):
    """Run id -> what is known of its environment."""
    runs = reader.read_runs(root)
    return {run.run_id: facts(run, reader.load(root, "devices", run.run_id)) for run in runs}


def told(base, new):
    return [(one.name, one.base, one.new) for one in changes(base, new)]


def test_environments_are_told_apart_by_what_differs(tmp_path):
    newer = [make_device(place, driver_version="590.2") for place in (0, 1)]
    write(tmp_path, "base", [])
    write(tmp_path, "twin", [], started_at=START + timedelta(hours=1))
    write(tmp_path, "new", [], newer, tags={"driver": "590"})
    found = facts_of(tmp_path)
    assert told(found["base"], found["twin"]) == []
    assert told(found["base"], found["new"]) == [("driver", "580.1", "590.2")]


def test_variables_and_commits_are_among_what_changed(tmp_path):
    write(tmp_path, "a", [])
    device = make_device(0, environment={"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"})
    write(tmp_path, "b", [], [device, make_device(1)], git_commit="b" * 40 + "+changes")
    found = facts_of(tmp_path)
    assert told(found["a"], found["b"]) == [
        ("git commit", "a" * 12, "b" * 12 + "+changes"),
        ("variable NCCL_ALGO", "none", "Ring"),
    ]


def test_changed_code_is_named_by_its_file_but_not_where_one_run_tells_of_none(tmp_path):
    known = {"raybench_sha256": "a" * 64}
    write(tmp_path, "old", [])
    write(tmp_path, "a", [], **known, workload_files={"net.py": "1" * 64, "loss.py": "3" * 64})
    write(tmp_path, "b", [], **known, workload_files={"net.py": "2" * 64, "loss.py": "3" * 64})
    found = facts_of(tmp_path)
    assert told(found["a"], found["b"]) == [("code net.py", "1" * 12, "2" * 12)]
    assert told(found["old"], found["a"]) == []


@pytest.mark.parametrize(("kind", "names"), [("cuda", ["device UUIDs"]), ("cpu", [])])
def test_another_gpu_is_a_change_and_another_process_on_the_cpu_is_none(tmp_path, kind, names):
    for run_id in ("a", "b"):
        write(tmp_path, run_id, [], [make_device(0, kind=kind, uuid=f"of-{run_id}")])
    found = facts_of(tmp_path)
    assert [name for name, _, _ in told(found["a"], found["b"])] == names
