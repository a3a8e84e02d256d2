"""`raybench.ab`, the gate in Python, with sweeps that write rows without measuring."""

import json
import math
from dataclasses import replace

import pytest
from fake_sweeps import point_row, starts, write_steps

import raybench
from raybench.errors import JobError, UsageError


def test_slower_point_leads_the_points(repository):
    write_steps(repository, a=10.0, b=23.0, c=30.0)
    result = raybench.ab("ci.yaml", old="main")
    assert (result.outcome, result.exit_code) == ("slower", 1)
    assert result.points["verdict"].to_list() == ["slower", "same", "same"]
    assert result.points["params.layer"][0] == "b"
    assert -0.15 < result.points["change"][0] < -0.11
    assert set(result.points["reason"]) == {""}
    assert "1 of 3 points is slower" in repr(result)
    assert "1 of 3 points is slower" in result._repr_html_()


def test_folder_has_the_reports(repository):
    result = raybench.ab("ci.yaml", old="main", new="main", results=repository / "elsewhere")
    assert result.folder.parent == repository / "elsewhere" / "ab"
    assert json.loads((result.folder / "verdict.json").read_text())["verdict"] == "same"
    for name, format in (("report.md", "md"), ("report.html", "html")):
        assert (result.folder / name).read_text() == result.report(format)
    assert "All 3 points are the same." in result.report()


def test_open_points_have_a_reason(repository):
    result = raybench.ab("ci.yaml", old="main", max_minutes=0.001)
    assert result.outcome == "undecided"
    assert set(result.points["reason"]) == {"the time limit ended the gate"}


def test_gate_without_points_has_all_columns(repository):
    (repository / "broken").write_text("old new")
    open_gate = raybench.ab("ci.yaml")
    (repository / "broken").unlink()
    assert open_gate.outcome == "not_measured"
    measured = raybench.ab("ci.yaml").points
    names = ["change", "low", "high", "verdict", "reason", "pairs"]
    assert open_gate.points[names].dtypes.to_list() == measured[names].dtypes.to_list()


def test_parameters_are_typed_and_hide_no_column(repository, monkeypatch):
    def name_like_a_column(run_id, number, name, step):
        row = point_row(run_id, number, name, step)
        return replace(row, params={"pairs": str(number)})

    monkeypatch.setattr("fake_sweeps.point_row", name_like_a_column)
    points = raybench.ab("ci.yaml").points
    assert sorted(points["params.pairs"]) == [0, 1, 2]
    assert set(points["pairs"]) == {3}


def test_text_of_a_stopped_gate_names_reason_and_log(repository):
    result = raybench.ab("ci.yaml", old="main", new="main", setup="echo 'no compiler?'; exit 3")
    assert repr(result).splitlines()[1:] == [
        "No point was measured. OLD cannot be measured: --setup ended with exit code 3:",
        "no compiler?",
        f"Log of OLD: {result.folder}/logs/setup-old.log",
    ]


def test_options_of_a_side_reach_its_sweeps(repository):
    result = raybench.ab(
        "ci.yaml", new_env={"FAKE_SLOWER": 0.9}, set={"x": [1, 2]}, old_set={"y": "z"}
    )
    assert result.outcome == "faster"
    words = starts(repository)
    assert all("x=[1, 2]" in words_of_start for words_of_start in words)
    assert sum("y=z" in words_of_start for words_of_start in words) == len(words) // 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"threshold": -1}, "threshold: must be above 0 and below 1"),
        ({"threshold": 0}, "threshold: must be above 0 and below 1"),
        ({"threshold": 1.5}, "threshold: must be above 0 and below 1"),
        ({"threshold": "1.5%"}, "threshold: must be a number"),
        ({"max_minutes": 0}, "max_minutes: must be above 0"),
        ({"max_minutes": math.inf}, "max_minutes: must be above 0 and finite"),
        ({"max_minutes": math.nan}, "max_minutes: must be above 0"),
        ({"wait_s": -1}, "wait_s: must be from 0"),
        ({"device": "gpu"}, "device: must be auto, cuda or cpu"),
        ({"old": "no-such"}, "git knows no such revision"),
        ({"set": ["a=1"]}, "^set: must be a dict"),
        ({"old_set": ["a=1"]}, "old_set: must be a dict"),
        ({"new_env": ["A=1"]}, "new_env: must be a dict"),
        ({"results": "s3://bucket/runs"}, "results: must be a path of this machine"),
        ({"old": ""}, "old: must be a git revision, given ''"),
        ({"new": 7}, "new: must be a git revision, given 7"),
        ({"devices": "missing.txt"}, "missing.txt"),
        ({"old_job": {"version": 1}}, "old_job: must be a path"),
    ],
)
def test_wrong_options_are_refused(options, told, repository):
    with pytest.raises(UsageError, match=told):
        raybench.ab("ci.yaml", **options)
    assert not (repository / "results").exists()


def test_option_that_is_none_has_its_default(repository):
    names = ("old_env", "new_set", "python", "setup", "threshold", "max_minutes", "wait_s")
    assert raybench.ab("ci.yaml", **dict.fromkeys(names)).outcome == "same"


def test_unknown_option_is_a_type_error(repository):
    with pytest.raises(TypeError, match="unexpected keyword argument 'treshold'"):
        raybench.ab("ci.yaml", treshold=0.1)


def test_job_without_yaml_makes_no_worktree(repository):
    (repository / "ci.yaml").write_text("version: 1\nmatrix: [\n")
    with pytest.raises(JobError, match=r"ci.yaml:"):
        raybench.ab("ci.yaml", old="HEAD")
    assert not (repository / "results").exists()
