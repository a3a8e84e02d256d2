"""Jobs whose texts name settings: scripts, and variables of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.filter import select_points
from raybench.job.model import load_job
from raybench.job.plan import make_plan
from raybench.job.rules import script_path

SCRIPT = 'workload: {kind: script, path: train.py, items_per_step: "{batch_size} * 2", args: '


@pytest.fixture
def load(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def load(text: str):
        path = Path("jobs/job.yaml")
        path.write_text(f"version: 1\nname: mine\n{text}", encoding="utf-8")
        return load_job(path)

    return load


def problems(load, text: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(text)
    return str(caught.value).splitlines()


def test_any_axis_that_a_text_names_is_one_of_the_job(load):
    job = load(
        SCRIPT + '"--batch {batch_size} --lr {lr} {flag}"}\n'
        "matrix: {world_size: [1, 2], batch_size: 8, lr: [0.1, 1e-3], flag: [--a, '--b 1']}\n"
    )
    points = make_plan(job).points
    assert len(points) == 8
    assert {point.settings["lr"] for point in points} == {0.1, 1e-3}
    assert len(select_points(points, "lr < 0.01 and flag == '--a'")) == 2
    assert script_path(job) == Path("jobs/train.py")


def test_a_script_needs_no_batch_size(load):
    job = load("workload: {kind: script, path: train.py}\nmatrix: {world_size: [1, 2]}\n")
    points = make_plan(job).points
    assert [point.batch_size for point in points] == [None, None]
    (remark,) = job.remarks
    assert "gives no items_per_step" in remark.message


def test_each_mistake_is_a_line_with_its_place_and_what_to_do(load):
    text = SCRIPT + '"{bacth_size} {hiden} {"}\nmatrix: {batch_size: 8, hidden: 1}\n'
    lines = problems(load, text)
    assert lines[0].startswith("jobs/job.yaml:3:84: workload.args: a text names a setting as in {")
    assert lines[1].startswith("jobs/job.yaml:4:25: matrix.hidden: unknown axis 'hidden'; known: ")
    assert lines[1].endswith("step_of; or name {hidden} in args or env")
    lines = problems(load, text.replace(' {"', '"'))
    assert "unknown setting 'bacth_size'; did you mean 'batch_size'?, in braces" in lines[0]
    lines = problems(load, "workload: {kind: script, path: train.py, args: '{batch_size}'}")
    assert "the job gives no batch size; put batch_size into matrix" in lines[0]
    lines = problems(load, "workload: {kind: script, path: trian.py}")
    assert "workload.path: no such file, given 'trian.py'; it is not in" in lines[0]
    lines = problems(load, SCRIPT + '"it\'s"}\nmatrix: {batch_size: 8}')
    assert "a quote is not closed" in lines[0]
    text = "workload: {kind: script, path: train.py, items_per_step: '{x} * 2'}\nmatrix: {x: [a]}"
    with pytest.raises(JobError, match=r"items_per_step: must be a whole number, .*given 'a \* 2'"):
        make_plan(load(text))


def test_variables_are_axes_which_vary_slowest_and_may_name_settings(load):
    job = load(
        "workload: {kind: mlp, hidden: 8}\nmatrix: {world_size: [1, 2], batch_size: 8}\n"
        "env: {NCCL_ALGO: [Ring, Tree], NCCL_NTHREADS: 256, SIZE: '{batch_size}x{hidden}'}\n"
        "exclude: [{NCCL_ALGO: Tree, world_size: 1}]\n"
    )
    points = make_plan(job).points
    told = [(point.env["NCCL_ALGO"], point.world_size) for point in points]
    assert told == [("Ring", 1), ("Ring", 2), ("Tree", 2)]
    assert {point.env["SIZE"] for point in points} == {"8x8"}
    assert {point.env["NCCL_NTHREADS"] for point in points} == {"256"}
    assert len({point.point_id for point in points}) == 3
    assert "NCCL_ALGO" not in points[0].params
    assert [p.world_size for p in select_points(points, "NCCL_ALGO == 'Tree'")] == [2]
    without, none, other = (
        load(f"workload: {{kind: mlp}}\nmatrix: {{batch_size: 8}}\n{env}").meaning_sha256
        for env in ("", "env: {}", "env: {A: b}")
    )
    assert without == none != other


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("{RANK: 1}", "env.RANK: is set by raybench itself; leave it out"),
        ("{RAY_ADDRESS: x}", "is set by raybench itself"),
        ("{A-B: 1}", "must be the name of a variable"),
        ("{precision: 1}", "is the name of a setting"),
        ("{A: true}", "must be a text or a number; put true or false in quotes, given true"),
        ("{A: '{hiden}'}", "env.A[0]: unknown setting 'hiden'; did you mean 'hidden'?, in braces"),
        ("{A: []}", "must not be empty"),
    ],
)
def test_a_variable_that_cannot_be_set_is_refused(load, env, message):
    (line,) = problems(load, f"workload: {{kind: mlp}}\nmatrix: {{batch_size: 8}}\nenv: {env}\n")
    assert message in line
