"""Rules that depend on the workload, and texts in which a name in braces is a setting."""

from pathlib import Path

import pytest

from jobs import HEAD, MLP, load, plan, problems_of
from raybench.errors import JobError
from raybench.job.model import load_job
from raybench.job.plan import (
    make_plan,
    names_in,
    product_of,
    render,
    script_path,
    select_points,
    split_arguments,
)
from raybench.job.point import choose_devices

COLLECTIVE = HEAD + "workload: {kind: collective}\n"


@pytest.mark.parametrize(
    ("rest", "place"),
    [
        ("matrix: {batch_size: [1], world_size: 2}\n", "4:10: matrix.batch_size"),
        ("matrix: {world_size: 2}\nzip: [{batch_size: [1]}]\n", "5:8: zip[0].batch_size"),
        ("matrix: {world_size: 2}\nexclude: [{batch_size: 1}]\n", "5:12: exclude[0].batch_size"),
        ("include: [{world_size: 2, batch_size: 1}]\n", "4:27: include[0].batch_size"),
        ("matrix: {world_size: 2}\nbaseline: {batch_size: 1}\n", "5:12: baseline.batch_size"),
    ],
)
def test_a_workload_without_batches_is_given_no_batch_size(rest, place):
    refused = "workload collective takes no batch size; leave batch_size out"
    assert problems_of(COLLECTIVE + rest) == [f"job.yaml:{place}: {refused}"]
    (line,) = problems_of(COLLECTIVE + rest.replace("batch_size", "global_batch_size"))
    assert line.endswith("takes no batch size; leave global_batch_size out")
    inside = HEAD + "workload: {kind: collective, batch_size: 4}\nmatrix: {world_size: 2}\n"
    assert problems_of(inside) == [f"job.yaml:3:30: workload.batch_size: {refused}"]


@pytest.mark.parametrize("text", ["{", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a:3}", "{a!r}"])
def test_other_braces_are_refused_with_what_to_write(text):
    with pytest.raises(ValueError, match=r"write \{\{ and \}\} for braces themselves"):
        names_in(text)


def test_values_are_written_as_on_a_command_line():
    settings = {"a": 1e-3, "b": True, "c": "x y", "unused": 0}
    assert render("{a} {b} {c} {{}}", settings) == "0.001 true x y {}"
    assert split_arguments(render("--c '{c}' {c}", settings)) == ["--c", "x y", "x", "y"]


def test_items_are_a_product_of_whole_numbers():
    assert [product_of(text) for text in ("", "64", "8 * 4*2")] == [None, 64, 64]
    for wrong in ("8.5", "8 *", "-1", "8 + 1"):
        with pytest.raises(ValueError, match="must be a whole number"):
            product_of(wrong)


def mlp_job(matrix: str, more: str = "") -> str:
    return f"{MLP}matrix: {{batch_size: 64, {matrix}}}\nbaseline: {{}}\n{more}"


MODELS = ["NVIDIA H200", "NVIDIA A100", "NVIDIA H200"]
A100 = "placement: {devices: A100}\n"


def test_devices_are_chosen_by_a_part_of_their_models_name_or_by_number():
    assert choose_devices("any", MODELS) == [0, 1, 2]
    assert choose_devices("h200", MODELS) == [0, 2]
    assert choose_devices("2/1", MODELS) == [2, 1]
    assert choose_devices("1/7", MODELS) == [1]
    assert choose_devices("B200", MODELS) == []
    # A choice by number needs a cluster that has them.
    points = plan(mlp_job("world_size: 2, devices: [1/7, H200]")).points
    assert [point.devices_needed for point in points] == [8, 2]


def test_devices_are_an_axis_or_the_choice_of_the_placement():
    points = plan(mlp_job("world_size: [1, 2], devices: [H200, A100, any]")).points
    assert [point.devices for point in points] == ["H200", "A100", "any"] * 2
    assert len({point.point_id for point in points}) == 6
    assert plan(mlp_job("world_size: 1", A100)).points[0].devices == "A100"
    assert plan(mlp_job("world_size: 1, devices: H200", A100)).points[0].devices == "H200"


def test_any_device_is_the_choice_of_a_job_without_one():
    plain = mlp_job("world_size: 1")
    given = mlp_job("world_size: 1", "placement: {devices: any}\n")
    assert load(plain).meaning_sha256 == load(given).meaning_sha256
    assert load(plain).meaning_sha256 != load(mlp_job("world_size: 1", A100)).meaning_sha256
    (point,) = plan(given).points
    assert point.point_id == plan(plain).points[0].point_id
    assert "devices" not in point.options


def test_shares_are_words_or_samples_of_each_rank():
    words = ["equal", "fast", "by_speed", "by_speed_accumulation", "96/32"]
    points = plan(mlp_job(f"world_size: 2, shares: [{', '.join(words)}]")).points
    assert [point.shares for point in points] == words


REFUSED = [
    ("devices: 0/0", "", "must be any, a model as in H200, or different numbers as in 0/2"),
    ("devices: ' '", "", "must be any, a model as in H200"),
    ("world_size: 2", "placement: {devices: ''}\n", "placement.devices: must be any, a model"),
    ("world_size: 4, devices: 0/2", "", "devices: 0/2 are 2, world_size is 4"),
    # Uneven shares, and devices that are slowed down.
    ("shares: by_sped", "", "matrix.shares[0]: must be one of equal, fast, by_speed"),
    ("world_size: 2, shares: 96/16/16", "", "96/16/16 are 3, world_size is 2"),
    ("world_size: 2, shares: 96/16", "", "96/16 are 112 samples together, a step has 128"),
    ("shares: by_speed, cuda_graph: true", "", "cuda_graph: true does not go with"),
    (
        "world_size: 2, shares: fast, slow_ratio: 0.5, slow_count: 2",
        "",
        "leaves no device when slow_count 2",
    ),
    ("slow_ratio: 0", "", "must be greater than 0"),
    ("slow_ratio: 1.5", "", "must be less than or equal to 1"),
    ("slow_by: clocks", "", "must be 'compute' or 'sms'"),
    (
        "world_size: 2, shares: 97/159, grad_accumulation: 2",
        "",
        "97/159 cannot be divided by grad_accumulation",
    ),
    # Variables of the environment.
    ("world_size: 1", "env: {RANK: 1}\n", "env.RANK: is set by raybench itself; leave it out"),
    ("world_size: 1", "env: {RAY_ADDRESS: x}\n", "is set by raybench itself"),
    ("world_size: 1", "env: {A-B: 1}\n", "must be the name of a variable"),
    ("world_size: 1", "env: {precision: 1}\n", "is the name of a setting"),
    (
        "world_size: 1",
        "env: {A: true}\n",
        "must be a text or a number; put true or false in quotes, given true",
    ),
    (
        "world_size: 1",
        "env: {A: '{hiden}'}\n",
        "env.A[0]: unknown setting 'hiden'; did you mean 'hidden'?, in braces",
    ),
    ("world_size: 1", "env: {A: []}\n", "must not be empty"),
]


@pytest.mark.parametrize(("matrix", "more", "rule"), REFUSED)
def test_a_setting_that_no_point_can_have_is_refused_before_anything_runs(matrix, more, rule):
    (line,) = problems_of(mlp_job(matrix, more))
    assert rule in line


def test_a_workload_that_does_not_weigh_its_loss_has_no_shares():
    text = HEAD + "workload: {kind: gemm}\nmatrix: {shares: by_speed}\n"
    (line,) = problems_of(text)
    assert "context.loss_weight (weighs_loss = True); leave shar" in line


SCRIPT = 'workload: {kind: script, path: train.py, items_per_step: "{batch_size} * 2", args: '


@pytest.fixture
def load_script(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def load(text: str):
        path = Path("jobs/job.yaml")
        path.write_text(f"version: 1\nname: mine\n{text}", encoding="utf-8")
        return load_job(path)

    return load


def script_problems(load, text: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(text)
    return str(caught.value).splitlines()


def test_any_axis_that_a_text_names_is_one_of_the_job(load_script):
    job = load_script(
        SCRIPT + '"--batch {batch_size} --lr {lr} {flag}"}\n'
        "matrix: {world_size: [1, 2], batch_size: 8, lr: [0.1, 1e-3], flag: [--a, '--b 1']}\n"
    )
    points = make_plan(job).points
    assert len(points) == 8
    assert {point.settings["lr"] for point in points} == {0.1, 1e-3}
    assert len(select_points(points, "lr < 0.01 and flag == '--a'")) == 2
    assert script_path(job) == Path("jobs/train.py")


def test_a_script_needs_no_batch_size(load_script):
    job = load_script("workload: {kind: script, path: train.py}\nmatrix: {world_size: [1, 2]}\n")
    plan = make_plan(job)
    assert [point.batch_size for point in plan.points] == [None, None]
    assert "gives no items_per_step" in plan.warnings[0]


def test_each_mistake_is_a_line_with_its_place_and_what_to_do(load_script):
    text = SCRIPT + '"{bacth_size} {hiden} {"}\nmatrix: {batch_size: 8, hidden: 1}\n'
    lines = script_problems(load_script, text)
    assert lines[0].startswith("jobs/job.yaml:3:84: workload.args: a text names a setting as in {")
    assert lines[1].startswith("jobs/job.yaml:4:25: matrix.hidden: unknown axis 'hidden'; known: ")
    assert lines[1].endswith("step_of; or name {hidden} in args or env")
    lines = script_problems(load_script, text.replace(' {"', '"'))
    assert "unknown setting 'bacth_size'; did you mean 'batch_size'?, in braces" in lines[0]
    lines = script_problems(
        load_script, "workload: {kind: script, path: train.py, args: '{batch_size}'}"
    )
    assert "the job gives no batch size; put batch_size into matrix" in lines[0]
    lines = script_problems(load_script, "workload: {kind: script, path: trian.py}")
    assert "workload.path: no such file, given 'trian.py'; it is not in" in lines[0]
    lines = script_problems(load_script, SCRIPT + '"it\'s"}\nmatrix: {batch_size: 8}')
    assert "a quote is not closed" in lines[0]
    text = "workload: {kind: script, path: train.py, items_per_step: '{x} * 2'}\nmatrix: {x: [a]}"
    with pytest.raises(JobError, match=r"items_per_step: must be a whole number, .*given 'a \* 2'"):
        make_plan(load_script(text))


def test_variables_are_axes_which_vary_slowest_and_may_name_settings(load_script):
    job = load_script(
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
        load_script(f"workload: {{kind: mlp}}\nmatrix: {{batch_size: 8}}\n{env}").meaning_sha256
        for env in ("", "env: {}", "env: {A: b}")
    )
    assert without == none != other
