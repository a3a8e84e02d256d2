"""Points on which a rank hangs, in a real `raybench sweep` on CPU workers."""

import pytest

from tests.hang_runs import Case, results, run, write_job
from tests.hang_workloads import KINDS, ONLY_NCCL

ON_GLOO = [kind for kind in KINDS if kind not in ONLY_NCCL]


@pytest.mark.long
def test_a_hang_ends_its_point_soon(tmp_path):
    cases = [Case(kind="sleep")]
    write_job(tmp_path, cases, world_size=2)
    printed = run(tmp_path, "cpu", 240)
    (result,) = results(tmp_path, cases)
    assert result.is_rank_right
    assert result.is_cause_right
    assert (result.row["error_type"], result.hang["recorder"]) == ("Hang", "on")
    assert "sleeps at hang_workloads.py:" in printed


# Half of the kinds at a time, because a busy host needs 40 s for a point.
@pytest.mark.long
@pytest.mark.parametrize("kinds", [ON_GLOO[::2], ON_GLOO[1::2]], ids=" ".join)
@pytest.mark.parametrize("is_script", [False, True], ids=["class", "script"])
def test_each_way_to_hang_is_told(tmp_path, is_script, kinds):
    cases = [Case(kind=kind, rank=number % 4) for number, kind in enumerate(kinds)]
    write_job(tmp_path, cases, world_size=4, is_script=is_script)
    printed = run(tmp_path, "cpu", 280)
    found = results(tmp_path, cases)
    print(printed, *found, sep="\n")
    assert [result.is_rank_right for result in found] == [True] * len(cases)
    assert [result.is_cause_right for result in found] == [True] * len(cases)


@pytest.mark.long
def test_healthy_points_blame_nobody(tmp_path):
    cases = [Case(kind="none"), Case(kind="none", pause_s=0.2), Case(kind="evaluate", pause_s=25)]
    write_job(tmp_path, cases, world_size=4)
    printed = run(tmp_path, "cpu", 280)
    assert "hangs    " not in printed
    assert [result.row["status"] for result in results(tmp_path, cases)] == ["ok"] * 3
