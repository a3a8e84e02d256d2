"""What changed around two runs, and within their points, as the tables tell it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from builders import START, make_device, make_row
from compared import write

from raybench.analysis.compare import PointChange, changes, facts, point_changes
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


def broken_down(step_ms, compute_ms):
    return make_row(step_ms_p50=step_ms, device_type="cuda", compute_ms=compute_ms)


def test_a_part_is_told_unless_the_breakdown_contradicts_its_step():
    base = broken_down(8.0, 7.0)
    [part] = point_changes(base, broken_down(10.0, 9.0))
    assert part == PointChange(name="compute", base=7.0, new=9.0, unit="ms")
    assert point_changes(base, broken_down(10.0, 18.0)) == ()
    assert point_changes(broken_down(8.0, 18.0), broken_down(10.0, 9.0)) == ()


def test_the_part_that_moved_with_the_step_is_named():
    parts = ("compute_ms", "comm_exposed_ms", "straggler_ms", "optimizer_ms", "host_gap_ms")
    known = {
        **dict.fromkeys(parts, 1.0),
        "step_ms_p50": 8.0,
        "throttled": False,
        "sm_clock_mhz_p50": 1980.0,
    }
    base = make_row(device_type="cuda", **known)
    slower = {"step_ms_p50": 9.0, "comm_exposed_ms": 1.9, "compute_ms": 0.5}
    found = point_changes(base, replace(base, **slower, throttled=True, sm_clock_mhz_p50=1410.0))
    assert [one.name for one in found] == ["exposed communication", "throttled", "SM clock"]
    late = point_changes(base, replace(base, step_ms_p50=9.0, straggler_ms=2.0))
    assert [one.name for one in late] == ["one rank slower"]
