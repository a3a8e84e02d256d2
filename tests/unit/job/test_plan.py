"""From the axes of a job to its points, the rules of settings, and which points a filter keeps."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from builders import make_measure, make_point, make_record
from commands import refusal_of

from jobs import HEAD, MLP, load, plan, problems_of
from raybench.errors import JobError, UsageError
from raybench.job import registry
from raybench.job.loading import load_job
from raybench.job.memory import estimate, explain_oom
from raybench.job.model import BatchSearch
from raybench.job.plan import Plan, make_plan, script_path, select_points, varying_settings
from raybench.job.point import (
    EXECUTION,
    RUN_SETTINGS,
    UNEVEN,
    Point,
    Precision,
    SlowBy,
    choose_devices,
    fill_in,
    names_in,
    product_of,
    split_arguments,
)
from raybench.job.settings import settings_of_class
from raybench.results.record_rows import point_row
from raybench.results.tables import TABLES
from raybench.workloads.base import Context


def columns(plan: Plan, *names: str) -> list[tuple[object, ...]]:
    return [tuple(point.settings[name] for name in names) for point in plan.points]


def test_the_first_key_of_the_matrix_varies_slowest():
    made = plan(MLP + "matrix: {batch_size: [1, 2], world_size: [4, 8]}\n")
    assert columns(made, "batch_size", "world_size") == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert made.warnings == (
        "job.yaml:1:1: baseline: no point has {world_size: 1}, so there is no speed-up; "
        "the nearest has {world_size: 4}; baseline: {} compares nothing",
    )


def test_given_baseline_must_match_a_point():
    text = MLP + "matrix: {world_size: [1, 2], precision: [fp32, bf16], batch_size: 1}\n"
    text += "exclude: [{world_size: 1, precision: bf16}]\n"
    assert plan(text + "baseline: {world_size: 2, precision: bf16}\n").warnings == ()
    (line,) = problems_of(text + "baseline: {world_size: 1, precision: bf16}\n")
    no_point = "no point has {world_size: 1, precision: 'bf16'}"
    assert line.startswith(f"job.yaml:6:11: baseline: {no_point}")
    assert "the nearest has {world_size: 1, precision: 'fp32'}" in line


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a workload of the user's, and give the beginning of a job of it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planned_workload", raising=False)

    def write(text):
        text = f"from raybench import Workload\nclass Mine(Workload):\n    {text}\n"
        (tmp_path / "planned_workload.py").write_text(text + "    def step(self): ...\n")
        return HEAD + 'workload: {kind: "planned_workload:Mine"}\n'

    return write


def test_zip_varies_faster_than_matrix():
    zipped = "zip: [{batch_size: [8, 16], hidden: [64, 32]}, {layers: [1, 2]}]\n"
    made = plan(MLP + "matrix: {world_size: [1, 2]}\n" + zipped)
    assert columns(made, "world_size", "batch_size", "hidden", "layers") == [
        (ranks, *sizes, layers)
        for ranks in (1, 2)
        for sizes in ((8, 64), (16, 32))
        for layers in (1, 2)
    ]


def test_batch_size_means_weak_scaling():
    text = "matrix: {batch_size: [8], world_size: [4], grad_accumulation: [2]}\n"
    (point,) = plan(MLP + text).points
    assert (point.batch_size, point.global_batch_size, point.scaling) == (8, 64, "weak")
    assert (point.workload, point.precision, point.cuda_graph) == ("mlp", Precision.FP32, False)
    assert list(point.params) == sorted(point.params)
    assert point.params["hidden"] == 1024


def test_global_batch_size_means_strong_scaling():
    text = "matrix: {global_batch_size: [64], world_size: [1, 4], grad_accumulation: [1, 2]}\n"
    made = plan(MLP + text)
    expected = [(size, 64, "strong") for size in (64, 32, 16, 8)]
    assert columns(made, "batch_size", "global_batch_size", "scaling") == expected


def test_indivisible_global_batch_size_is_located():
    text = MLP + "matrix:\n  world_size: [1, 3]\n  global_batch_size: [64, 66, 65]\n"
    assert problems_of(text) == [
        "job.yaml:6:23: matrix.global_batch_size[0]: 64 cannot be divided by world_size 3",
        "job.yaml:6:31: matrix.global_batch_size[2]: 65 cannot be divided by world_size 3",
    ]
    rest = "exclude: [{global_batch_size: [64, 65], world_size: 3}]\n"
    assert len(plan(text + rest).points) == 4
    text = (
        "matrix: {grad_accumulation: [2]}\nzip:\n  - {global_batch_size: [3], world_size: [1]}\n"
        "include:\n  - {grad_accumulation: 1, global_batch_size: 7, world_size: 2}\n"
    )
    assert problems_of(MLP + text) == [
        "job.yaml:6:26: zip[0].global_batch_size[0]: 3 cannot be divided by world_size 1 "
        "x grad_accumulation 2",
        "job.yaml:8:47: include[0].global_batch_size: 7 cannot be divided by world_size 2",
    ]
    text = "matrix: {batch_size: 2147483647, world_size: 1000000, grad_accumulation: 2147483647}\n"
    assert "does not fit into 64 bits" in problems_of(MLP + text)[0]


def test_exclude_matches_partially():
    text = "matrix: {world_size: [1, 2], batch_size: [1, 2, 3]}\n"
    made = plan(MLP + text + "exclude: [{world_size: 2, batch_size: [1, 3]}, {hidden: 7}]\n")
    assert columns(made, "world_size", "batch_size") == [(1, 1), (1, 2), (1, 3), (2, 2)]
    assert made.warnings == ("job.yaml:5:48: exclude[1]: matches no point",)
    # It can name a setting that is no axis.
    text = MLP + "matrix: {batch_size: [1]}\nexclude:\n  - {hidden: 1024}\n"
    assert problems_of(text) == ["job.yaml:6:3: exclude: leaves no point to run"]


def test_included_points_come_last_and_escape_the_excludes():
    made = plan(
        MLP + "matrix: {batch_size: [1, 2]}\nexclude: [{batch_size: 2}]\n"
        "include: [{batch_size: 2, world_size: 8}]\n"
    )
    assert columns(made, "batch_size", "world_size") == [(1, 1), (2, 8)]
    made = plan(MLP + "include: [{batch_size: 2, hidden: 8}, {batch_size: 4}]\n")
    assert columns(made, "batch_size", "hidden") == [(2, 8), (4, 1024)]


def test_duplicates_are_dropped_with_a_warning():
    text = "matrix: {batch_size: [1, 2, 1]}\ninclude: [{batch_size: 2}, {batch_size: 3}]\n"
    made = plan(MLP + text)
    assert columns(made, "batch_size") == [(1,), (2,), (3,)]
    assert made.warnings == (
        "job.yaml:4:9: matrix: 1 duplicate point dropped",
        "job.yaml:5:11: include[0]: 1 duplicate point dropped",
    )


def test_unusable_budget_is_a_warning():
    text = MLP + "matrix: {batch_size: 1}\n"
    (cut,) = plan(text, "measure.repeats=15").warnings
    assert cut.startswith("--set measure.repeats=15: measure.timeout_s: a slow point is stopped")
    assert plan(text, "measure.repeats=14").warnings == ()
    (more,) = plan(text, "measure.seconds=30", "measure.max_seconds=20").warnings
    assert more.startswith(
        "--set measure.seconds=30: measure.seconds: max_seconds, 20, leaves 15 s"
    )
    assert plan(text, "measure.max_seconds=1").warnings == ()
    (heated,) = plan(text, "measure.heat_s=400").warnings
    assert "measure.timeout_s: a point that heats for 400 s is stopped after 300 s" in heated


def test_workload_without_batches_has_no_batch_size():
    text = HEAD + "workload: {kind: collective, size_bytes: 64}\nmatrix: {world_size: [2, 4]}\n"
    made = plan(text + "include: [{world_size: 8}]\nbaseline: {}\n")
    assert made.warnings == ()
    assert [point.world_size for point in made.points] == [2, 4, 8]
    for point in made.points:
        assert (point.batch_size, point.global_batch_size, point.scaling) == (None, None, None)
        assert list(point.settings) == [
            "world_size", "precision", "cuda_graph", *UNEVEN, "devices", "strategy", "dtype",
            "operation", "size_bytes",
        ]  # fmt: skip
    assert varying_settings(made.points) == ["world_size"]
    assert len({point.point_id for point in made.points}) == 3


@pytest.mark.parametrize("answer", ["return 'two'", "raise SystemExit('two')"])
def test_failing_class_method_is_one_line(module, answer):
    text = module(
        f"@classmethod\n    def ranks_per_item(cls, settings): {answer}\n"
        "    def __init__(self, context): ..."
    )
    with pytest.raises(UsageError, match=r"ranks_per_item\(\) of the workload .* '?two"):
        plan(text + "matrix: {world_size: 2, batch_size: 1}\n")


def test_refused_point_is_a_problem_unless_excluded(module):
    text = module(
        "@classmethod\n    def why_not(cls, settings):\n"
        "        if settings['heads'] % settings['world_size']: return 'heads left over'\n"
        "    def __init__(self, context, *, heads: int = 3): ..."
    )
    text += "matrix: {world_size: [1, 2], batch_size: 1}\n"
    assert problems_of(text) == ["job.yaml:4:9: matrix: heads left over"]
    assert len(plan(text + "exclude: [{world_size: 2}]\n").points) == 1
    assert len(plan(text, "workload.heads=4").points) == 2


@pytest.mark.parametrize("name", ["batch_size", "global_batch_size"])
def test_only_the_given_batch_size_varies(name):
    made = plan(MLP + f"matrix: {{world_size: [1, 2], {name}: [4, 8]}}\n")
    assert varying_settings(made.points) == ["world_size", name]


def test_equal_values_of_other_types_vary():
    assert varying_settings([make_point(params={"x": x}) for x in (1, 1.0)]) == ["x"]


def test_a_point_id_never_changes():
    # Stored runs are resumed and compared by it: a new value here breaks them all.
    settings = {"params": {"hidden": 8}, "world_size": 2, "precision": Precision.BF16}
    assert make_point(batch_size=4, **settings).point_id == "1eab94e999f8"


@pytest.mark.parametrize(
    "change",
    [
        {"workload": "x:Y"},
        {"params": {"hidden": 9}},
        {"world_size": 2},
        {"batch_size": 5},
        {"batch_size": None, "global_batch_size": None, "scaling": None},
    ],
)
def test_a_point_id_tells_points_apart(change):
    assert make_point(**change).point_id != make_point().point_id


def test_same_work_has_same_point_id():
    assert make_point(scaling="strong").point_id == make_point().point_id
    first, second = (make_point(params=params) for params in ({"b": 1, "a": 2}, {"a": 2, "b": 1}))
    assert first.point_id == second.point_id


def test_points_are_counted_before_they_are_made():
    axis = ", ".join(map(str, range(1, 1001)))
    text = MLP + f"matrix: {{batch_size: [{axis}], hidden: [1, 2, 3, 4, 5]}}\n"
    more = ", ".join(map(str, range(1, 102)))
    (line,) = problems_of(text, f"matrix.hidden={more}")
    assert line.startswith("job.yaml:4:9: matrix: a job has at most 100,000 points, given 101,000")


def test_batch_search_plans_first_points():
    text = MLP + "matrix: {world_size: [1, 2], batch_size: {start: 8, max: 99}, hidden: [4, 5]}\n"
    made = plan(text)
    names = ("world_size", "batch_size", "global_batch_size", "hidden")
    assert columns(made, *names) == [(1, 8, 8, 4), (1, 8, 8, 5), (2, 8, 16, 4), (2, 8, 16, 5)]
    assert made.batch_search == BatchSearch(start=8, max=99)
    (first,) = plan(MLP + "matrix: {batch_size: auto}\n").points
    (listed,) = plan(MLP + "matrix: {batch_size: 64}\n").points
    assert first == listed
    assert plan(MLP + "matrix: {batch_size: 64}\n").batch_search is None


def test_shared_work_means_strong_scaling(module):
    shared = module("shares_work = True\n    def __init__(self, context): ...")
    for sizes in ("batch_size: 6", "global_batch_size: 6"):
        made = plan(shared + f"matrix: {{{sizes}, world_size: [1, 4]}}\n")
        assert columns(made, "batch_size", "global_batch_size", "scaling") == [(6, 6, "strong")] * 2


# Values that are not the defaults.
OTHER: dict[str, Any] = {
    "precision": Precision.BF16,
    "cuda_graph": True,
    "shares": "by_speed",
    "slow_ratio": 0.5,
    "slow_count": 2,
    "slow_by": SlowBy.SMS,
    "devices": "H200",
    "strategy": "rail",
}


def test_run_settings_follow_fields_of_point():
    settings = settings_of_class(registry.load_workload("mlp"))
    assert list(RUN_SETTINGS) == list(settings)[: len(RUN_SETTINGS)]
    for name, declared in RUN_SETTINGS.items():
        assert settings[name].description == declared.about.text
        assert settings[name].default == declared.default
    assert settings["precision"].type == "'fp32' | 'tf32' | 'fp16' | 'bf16' | 'float8'"
    assert settings["cuda_graph"].type == "boolean"
    assert settings["batch_size"].type == "integer >= 1"


@pytest.mark.parametrize("name", EXECUTION)
def test_execution_reaches_workloads_ids_filters_tables(name):
    point = make_point(**{name: OTHER[name]})
    assert name in {field.name for field in fields(Context)}
    assert point.execution[name] == OTHER[name]
    assert point.settings[name] == OTHER[name]
    assert point.point_id != make_point().point_id
    assert name in {column.name for column in TABLES["points"]}
    row = point_row("run", make_record(point), make_measure())
    assert getattr(row, name) == OTHER[name]


GIB = 2**30


def point_of(text: str, **settings: object) -> Point:
    matrix = ", ".join(f"{name}: [{value}]" for name, value in settings.items())
    (point,) = plan(f"{HEAD}workload: {text}\nmatrix: {{{matrix}}}").points
    return point


def test_oom_advice_names_batch_and_setting():
    text = "{kind: transformer, preset: 350m, seq_len: 4096}"
    point = point_of(text, batch_size=64, precision="bf16", world_size=1)
    needed = estimate(point)
    found = explain_oom(point, needed, 216 * GIB)
    needs = "by an estimate, the point needs 344 GiB and the device has"
    assert found.startswith(f"{needs} 216 GiB; what should fit: batch_size 32 (")
    assert " or activation_checkpointing full (" in found
    tiny = explain_oom(point, needed, GIB)
    assert tiny == f"{needs} 1 GiB; no change of one setting makes the point fit"
    # Where the estimate said that it fits, something smaller is proposed.
    assert " has 1230 GiB; what should fit: b" in explain_oom(point, needed, 1234 * GIB)


@pytest.mark.parametrize("found", ["1 / 0", "float('nan')", "float('inf')"])
def test_missing_or_failing_estimate_is_none(tmp_path, monkeypatch, found):
    assert estimate(point_of("{kind: gemm}", m=1024)) is None
    monkeypatch.chdir(tmp_path)
    Path("guessing.py").write_text(
        "class Guess:\n"
        "    def __init__(self, context, *, length: int = 1): ...\n"
        "    def step(self): self.items_per_step = 1\n"
        "    @classmethod\n"
        f"    def estimate_memory(cls, settings): return {found}\n"
    )
    monkeypatch.delitem(sys.modules, "guessing", raising=False)
    assert estimate(point_of('{kind: "guessing:Guess"}', batch_size=1)) is None


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
def test_batch_size_is_refused_without_batches(rest, place):
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
    assert fill_in("{a} {b} {c} {{}}", settings) == "0.001 true x y {}"
    assert split_arguments(fill_in("--c '{c}' \\\n {c}", settings)) == ["--c", "x y", "x", "y"]


def test_items_are_a_product_of_whole_numbers():
    assert [product_of(text) for text in ("", "64", "8 * 4*2")] == [None, 64, 64]
    for wrong in ("8.5", "8 *", "-1", "8 + 1"):
        with pytest.raises(ValueError, match="must be a whole number"):
            product_of(wrong)


def mlp_job(matrix: str, more: str = "") -> str:
    return f"{MLP}matrix: {{batch_size: 64, {matrix}}}\nbaseline: {{}}\n{more}\n"


MODELS = ["NVIDIA H200", "NVIDIA A100", "NVIDIA H200"]


def test_devices_are_chosen_by_model_or_number():
    assert choose_devices("any", MODELS) == [0, 1, 2]
    assert choose_devices("h200", MODELS) == [0, 2]
    assert choose_devices("2/1", MODELS) == [2, 1]
    assert choose_devices("1/7", MODELS) == [1]
    assert choose_devices("B200", MODELS) == []
    # A choice by number needs a cluster that has them.
    points = plan(mlp_job("world_size: 2, devices: [1/7, H200]")).points
    assert [point.devices_needed for point in points] == [8, 2]


@pytest.mark.parametrize(
    ("name", "usual", "other"), [("devices", "any", "A100"), ("strategy", "pack", "rail")]
)
def test_placement_applies_unless_axis(name, usual, other):
    job = mlp_job("world_size: 1")
    axis = plan(job, f"matrix.{name}={usual},{other}", f"placement.{name}={other}").points
    assert [getattr(point, name) for point in axis] == [usual, other]
    # The usual one has the id that it had before there was a choice.
    for given, point in (((), axis[0]), ((usual,), axis[0]), ((other,), axis[1])):
        chosen = [f"placement.{name}={value}" for value in given]
        assert plan(job, *chosen).points == (point,)
        is_usual = load(job).meaning_sha256 == load(job, *chosen).meaning_sha256
        assert is_usual == (getattr(point, name) == usual)
    assert axis[0].point_id != axis[1].point_id


def test_shares_are_words_or_samples_of_each_rank():
    words = ["equal", "fast", "by_speed", "by_speed_accumulation", "96/32"]
    points = plan(mlp_job(f"world_size: 2, shares: [{', '.join(words)}]")).points
    assert [point.shares for point in points] == words


REFUSED = [
    ("devices: 0/0", "must be any, a model as in H200, or different numbers as in 0/2"),
    ("devices: ' '", "must be any, a model as in H200"),
    ("world_size: 4, devices: 0/2", "devices: 0/2 are 2, world_size is 4"),
    # Uneven shares, and devices that are slowed down.
    (f"shares: {'9' * 5000}/1", "matrix.shares[0]: must be one of equal, fast, by_speed"),
    ("world_size: 2, shares: 96/16/16", "96/16/16 are 3, world_size is 2"),
    ("world_size: 2, shares: 96/16", "96/16 are 112 samples together, a step has 128"),
    ("shares: by_speed, cuda_graph: true", "cuda_graph: true does not go with"),
    ("world_size: 2, shares: fast, slow_ratio: 0.5, slow_count: 2", "leaves no device when slow"),
    ("slow_ratio: 0", "must be greater than 0"),
    ("slow_ratio: 1.5", "must be less than or equal to 1"),
    ("slow_by: clocks", "must be 'compute' or 'sms'"),
    ("strategy: tree", "must be 'pack', 'spread' or 'rail'"),
    ("world_size: 2, shares: 97/159, grad_accumulation: 2", "cannot be divided by grad_accumul"),
]
# Of keys of the job beside its matrix.
REFUSED_KEYS = [
    ("placement: {devices: ''}", "placement.devices: must be any, a model"),
    ("env: {RANK: 1}", "env.RANK: is set by raybench itself; leave it out"),
    ("env: {RAY_ADDRESS: x}", "is set by raybench itself"),
    ("env: {A-B: 1}", "must be the name of a variable"),
    ("env: {precision: 1}", "is the name of a setting"),
    ("env: {A: true}", "must be a text or a number; put true or false in quotes, given true"),
    ("env: {A: '{hiden}'}", "env.A[0]: unknown setting 'hiden'; did you mean 'hidden'?, in braces"),
    ("env: {A: []}", "must not be empty"),
]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((mlp_job(matrix), rule) for matrix, rule in REFUSED),
        *((mlp_job("world_size: 1", key), rule) for key, rule in REFUSED_KEYS),
        *(
            (f"{HEAD}workload: {{kind: {kind}}}\nmatrix: {{precision: bf16}}\n", "means nothing to")
            for kind in ("grouped_collective", "host_copy", "launch", "memory", "pairs")
        ),
        (
            HEAD + "workload: {kind: gemm}\nmatrix: {shares: by_speed}\n",
            "context.loss_weight (weighs_loss = True); leave shar",
        ),
    ],
)
def test_impossible_setting_is_refused(text, rule):
    (line,) = problems_of(text)
    assert rule in line


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


def test_text_may_name_any_axis(load_script):
    job = load_script(
        SCRIPT + '"--batch {batch_size} --lr {lr} {flag}"}\n'
        "matrix: {world_size: [1, 2], batch_size: 8, lr: [0.1, 1e-3], flag: [--a, '--b 1']}\n"
    )
    points = make_plan(job).points
    assert sorted(point.settings["lr"] for point in points) == [1e-3] * 4 + [0.1] * 4
    assert len(select_points(points, "lr < 0.01 and flag == '--a'")) == 2
    assert script_path(job) == Path("jobs/train.py")


def test_a_script_needs_no_batch_size(load_script):
    job = load_script("workload: {kind: script, path: train.py}\nmatrix: {world_size: [1, 2]}\n")
    plan = make_plan(job)
    assert [point.batch_size for point in plan.points] == [None, None]
    assert "gives no items_per_step" in plan.warnings[0]


def test_each_problem_has_place_and_advice(load_script):
    text = SCRIPT + '"{bacth_size} {hiden} {"}\nmatrix: {batch_size: 8, hidden: 1}\n'
    text += "env: {B: x, D: x, A: x, E: x, C: x}\n"
    lines = script_problems(load_script, text)
    assert lines[0].startswith("jobs/job.yaml:3:84: workload.args: a text names a setting as in {")
    assert lines[1].startswith("jobs/job.yaml:4:25: matrix.hidden: unknown axis 'hidden'; known: ")
    assert lines[1].endswith("step_of, B, D, A, E, C; or name {hidden} in args or env")
    lines = script_problems(load_script, text.replace(' {"', '"'))
    assert "unknown setting 'bacth_size'; did you mean 'batch_size'?, in braces" in lines[0]
    text = "workload: {kind: script, path: train.py, args: '{batch_size} {grad_accumulation}'}\n"
    lines = script_problems(load_script, text + "matrix: {grad_accumulation: 0}")
    assert "the job gives no batch size; put batch_size into matrix" in lines[0]
    assert "must be greater than or equal to 1, given 0" in lines[1]
    lines += script_problems(load_script, text + "env: {grad_accumulation: x}")
    assert "env.grad_accumulation: is the name of a setting" in lines[-1]
    for name, told in (("trian.py", "trian.py'; it is not in"), ("x" * 300, "xxx")):
        lines = script_problems(load_script, f"workload: {{kind: script, path: {name}}}")
        assert f"workload.path: no such file, given '{told}" in lines[0]
    assert "a quote is not closed" in script_problems(load_script, SCRIPT + '"it\'s"}')[-1]
    text = "workload: {kind: script, path: train.py, items_per_step: '{x} * 2'}\nmatrix: {x: [a]}"
    with pytest.raises(JobError, match=r"items_per_step: must be a whole number, .*given 'a \* 2'"):
        make_plan(load_script(text))
    axes = "\ninclude: [{lr: 1, batch_size: 4}]\nmatrix: {batch_size: 8}"
    for text in ('"{lr}"}', '""}\nenv: {A: "{lr}"}'):
        with pytest.raises(JobError, match="matrix: lacks lr, which a text has in braces"):
            make_plan(load_script(SCRIPT + text + axes))


def test_variables_vary_slowest_and_name_settings(load_script):
    job = load_script(
        "workload: {kind: mlp, hidden: 8}\nmatrix: {world_size: [1, 2], batch_size: 8}\n"
        "env: {NCCL_ALGO: [Ring, Tree], NCCL_NTHREADS: 2.10, SIZE: '{batch_size}x{hidden}'}\n"
        "exclude: [{NCCL_ALGO: Tree, world_size: 1}]\n"
    )
    points = make_plan(job).points
    told = [(point.env["NCCL_ALGO"], point.world_size) for point in points]
    assert told == [("Ring", 1), ("Ring", 2), ("Tree", 2)]
    assert {point.env["SIZE"] for point in points} == {"8x8"}
    assert {point.env["NCCL_NTHREADS"] for point in points} == {"2.10"}
    assert len({point.point_id for point in points}) == 3
    assert "NCCL_ALGO" not in points[0].params
    assert [p.world_size for p in select_points(points, "NCCL_ALGO == 'Tree'")] == [2]
    without, none, other = (
        load_script(f"workload: {{kind: mlp}}\nmatrix: {{batch_size: 8}}\n{env}").meaning_sha256
        for env in ("", "env: {}", "env: {A: b}")
    )
    assert without == none != other


POINTS = [
    make_point(
        params={"hidden": 8, "optimizer": "adam"},
        world_size=ranks,
        precision=precision,
        batch_size=4,
    )
    for ranks in (1, 2, 4)
    for precision in (Precision.FP32, Precision.BF16)
]


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("world_size == 2", [2, 3]),
        ("world_size > 1 and precision == 'bf16'", [3, 5]),
        ("precision in ['fp16', 'bf16']", [1, 3, 5]),
        ("not world_size in (1, 2)", [4, 5]),
        ("global_batch_size >= 2 * batch_size", [2, 3, 4, 5]),
        ("scaling == 'weak' and optimizer != 'sgd' and hidden == 8", [0, 1, 2, 3, 4, 5]),
        ("True", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_filter_keeps_order_of_points(expression, kept):
    assert select_points(POINTS, expression) == tuple(POINTS[index] for index in kept)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("world_size > 8", "keeps none of the 6 points"),
        ("world_size", "must be true or false, gives 1"),
        ("world_size = 2", "as in world_size > 1 and precision == 'bf16'"),
        ("(" * 400 + "1" + ")" * 400, "not an expression"),
        ("world_size > 'x'", "not supported between"),
        ("world_size / 0 > 1", "division"),
        ("9 ** 9 ** 9 > 1", "Sorry"),
        ("len(precision) > 1", "Function 'len' not defined"),
        ("precision.__class__ == 1", "__class__"),
        ("optimizer[9] == 'a'", "index out of range"),
        ("-" * 900 + "1 > 1", "RecursionError"),
        ("precision == bf16", "a text needs quotes: precision == 'bf16'"),
        ("precision == fp64", "; a text needs quotes: 'fp64'"),
        ("world_siz > 1", "did you mean 'world_size'? A text needs quotes: 'world_siz'"),
        ("world_size >\n", "--filter 'world_size >\\n': not an expression"),
    ],
)
def test_an_expression_that_cannot_select_is_one_line(expression, message):
    told = refusal_of(UsageError, select_points, POINTS, expression)
    assert told.startswith("--filter")
    assert message in told
