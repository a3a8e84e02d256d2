"""From the axes of a job to its points, their settings, and the memory that they need."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from builders import make_measure, make_point, make_record

from jobs import HEAD, MLP, plan, problems_of
from raybench.job import registry
from raybench.job.model import BatchSearch
from raybench.job.plan import Plan, varying_settings
from raybench.job.point import EXECUTION, OPTIONAL, RUN_SETTINGS, UNEVEN, Point, Precision, SlowBy
from raybench.job.registry import estimate, explain_oom
from raybench.results.tables import TABLES, point_row
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


def test_a_strategy_is_of_all_points_or_an_axis_and_part_of_what_is_timed():
    job = MLP + "matrix: {batch_size: 1, world_size: 2}\nplacement: {strategy: rail}\n"
    rail = plan(job).points
    assert [point.strategy for point in rail] == ["rail"]
    axis = plan(job, "matrix.strategy=pack,spread").points
    assert [point.strategy for point in axis] == ["pack", "spread"]
    assert len({point.point_id for point in (*rail, *axis)}) == 3
    # The usual one has the id that it had before there was a choice.
    assert axis[0].point_id == plan(job, "placement.strategy=pack").points[0].point_id
    assert "rail" in problems_of(job, "matrix.strategy=tree")[0]


def test_a_baseline_that_the_job_gives_must_be_of_a_point():
    text = MLP + "matrix: {world_size: [1, 2], precision: [fp32, bf16], batch_size: 1}\n"
    text += "exclude: [{world_size: 1, precision: bf16}]\n"
    assert plan(text + "baseline: {world_size: 2, precision: bf16}\n").warnings == ()
    (line,) = problems_of(text + "baseline: {world_size: 1, precision: bf16}\n")
    assert line.startswith(
        "job.yaml:6:11: baseline: no point has {world_size: 1, precision: 'bf16'}"
    )
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


def test_each_zip_entry_is_one_axis_that_varies_faster_than_the_matrix():
    made = plan(
        MLP + "matrix: {world_size: [1, 2]}\n"
        "zip: [{batch_size: [8, 16], hidden: [64, 32]}, {layers: [1, 2]}]\n"
    )
    assert columns(made, "world_size", "batch_size", "hidden", "layers") == [
        (ranks, *sizes, layers)
        for ranks in (1, 2)
        for sizes in ((8, 64), (16, 32))
        for layers in (1, 2)
    ]


def test_a_batch_size_is_per_device_and_scaling_is_weak():
    text = "matrix: {batch_size: [8], world_size: [4], grad_accumulation: [2]}\n"
    (point,) = plan(MLP + text).points
    assert (point.batch_size, point.global_batch_size, point.scaling) == (8, 64, "weak")
    assert (point.workload, point.precision, point.cuda_graph) == ("mlp", Precision.FP32, False)
    assert list(point.params) == sorted(point.params)
    assert point.params["hidden"] == 1024


def test_a_global_batch_size_is_shared_out_and_scaling_is_strong():
    text = "matrix: {global_batch_size: [64], world_size: [1, 4], grad_accumulation: [1, 2]}\n"
    made = plan(MLP + text)
    expected = [(size, 64, "strong") for size in (64, 32, 16, 8)]
    assert columns(made, "batch_size", "global_batch_size", "scaling") == expected


def test_a_global_batch_size_that_does_not_divide_is_located_at_its_value():
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


def test_exclude_is_a_partial_match_and_a_list_means_any_of():
    text = "matrix: {world_size: [1, 2], batch_size: [1, 2, 3]}\n"
    made = plan(MLP + text + "exclude: [{world_size: 2, batch_size: [1, 3]}, {hidden: 7}]\n")
    assert columns(made, "world_size", "batch_size") == [(1, 1), (1, 2), (1, 3), (2, 2)]
    assert made.warnings == ("job.yaml:5:48: exclude[1]: matches no point",)


def test_exclude_can_name_a_setting_that_is_no_axis():
    text = MLP + "matrix: {batch_size: [1]}\nexclude:\n  - {hidden: 1024}\n"
    assert problems_of(text) == ["job.yaml:6:3: exclude: leaves no point to run"]


def test_included_points_come_last_and_escape_the_excludes():
    made = plan(
        MLP + "matrix: {batch_size: [1, 2]}\nexclude: [{batch_size: 2}]\n"
        "include: [{batch_size: 2, world_size: 8}]\n"
    )
    assert columns(made, "batch_size", "world_size") == [(1, 1), (2, 8)]


def test_duplicates_are_dropped_with_a_warning():
    made = plan(
        MLP + "matrix: {batch_size: [1, 2, 1]}\ninclude: [{batch_size: 2}, {batch_size: 3}]\n"
    )
    assert columns(made, "batch_size") == [(1,), (2,), (3,)]
    assert made.warnings == (
        "job.yaml:4:9: matrix: 1 duplicate point dropped",
        "job.yaml:5:11: include[0]: 1 duplicate point dropped",
    )


def test_a_budget_that_cannot_be_used_is_a_warning_where_the_job_gives_it():
    text = MLP + "matrix: {batch_size: 1}\n"
    (cut,) = plan(text, "measure.repeats=15").warnings
    assert cut.startswith("--set measure.repeats=15: measure.timeout_s: a slow point is stopped")
    assert plan(text, "measure.repeats=14").warnings == ()
    (more,) = plan(text, "measure.min_seconds=30", "measure.max_seconds=20").warnings
    assert more.startswith(
        "--set measure.min_seconds=30: measure.min_seconds: max_seconds, 20, ends"
    )
    assert plan(text, "measure.max_seconds=1").warnings == ()


def test_a_point_of_a_workload_without_batches_has_none():
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


def test_a_point_that_its_workload_refuses_is_a_mistake_unless_it_is_excluded(module):
    text = module(
        "@classmethod\n    def why_not(cls, settings):\n"
        "        if settings['heads'] % settings['world_size']: return 'heads left over'\n"
        "    def __init__(self, context, *, heads: int = 3): ..."
    )
    text += "matrix: {world_size: [1, 2], batch_size: 1}\n"
    assert problems_of(text) == ["job.yaml:4:9: matrix: heads left over"]
    assert len(plan(text + "exclude: [{world_size: 2}]\n").points) == 1
    assert len(plan(text, "workload.heads=4").points) == 2


@pytest.mark.parametrize(
    ("sizes", "told"),
    [("batch_size: [1, 2]", "batch_size"), ("global_batch_size: [4, 8]", "global_batch_size")],
)
def test_of_the_two_batch_sizes_only_the_one_of_the_job_varies(sizes, told):
    made = plan(MLP + f"matrix: {{world_size: [1, 2], {sizes}}}\n")
    assert varying_settings(made.points) == ["world_size", told]


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
        {"precision": Precision.FP16},
        {"batch_size": 5},
        {"batch_size": None, "global_batch_size": None, "scaling": None},
        {"cuda_graph": True},
    ],
)
def test_a_point_id_tells_points_apart(change):
    assert make_point(**change).point_id != make_point().point_id


def test_a_point_id_is_the_same_for_the_same_work():
    assert make_point(scaling="strong").point_id == make_point().point_id
    assert make_point(params={"b": 1, "a": 2}).point_id == (
        make_point(params={"a": 2, "b": 1}).point_id
    )


def test_the_limit_of_points_is_counted_before_they_are_made():
    axis = ", ".join(map(str, range(1, 1001)))
    text = MLP + f"matrix: {{batch_size: [{axis}], hidden: [1, 2, 3, 4, 5]}}\n"
    more = ", ".join(map(str, range(1, 102)))
    (line,) = problems_of(text, f"matrix.hidden={more}")
    assert line.startswith("job.yaml:4:9: matrix: a job has at most 100,000 points, given 101,000")


def test_a_search_for_the_batch_size_plans_the_first_point_of_each_series():
    text = MLP + "matrix: {world_size: [1, 2], batch_size: {start: 8, max: 99}, hidden: [4, 5]}\n"
    made = plan(text)
    names = ("world_size", "batch_size", "global_batch_size", "hidden")
    assert columns(made, *names) == [(1, 8, 8, 4), (1, 8, 8, 5), (2, 8, 16, 4), (2, 8, 16, 5)]
    assert made.batch_search == BatchSearch(start=8, max=99)
    (first,) = plan(MLP + "matrix: {batch_size: auto}\n").points
    (listed,) = plan(MLP + "matrix: {batch_size: 64}\n").points
    assert first == listed
    assert plan(MLP + "matrix: {batch_size: 64}\n").batch_search is None


def test_ranks_that_share_their_work_have_one_batch_and_scale_strongly(module):
    shared = module("shares_work = True\n    def __init__(self, context): ...")
    for sizes in ("batch_size: 6", "global_batch_size: 6"):
        made = plan(shared + f"matrix: {{{sizes}, world_size: [1, 4]}}\n")
        assert columns(made, "batch_size", "global_batch_size", "scaling") == [(6, 6, "strong")] * 2


def test_a_global_batch_size_beyond_64_bits_is_refused():
    text = "matrix: {batch_size: 2147483647, world_size: 1000000, grad_accumulation: 2147483647}\n"
    assert "does not fit into 64 bits" in problems_of(MLP + text)[0]


def test_a_job_can_consist_of_included_points_alone():
    made = plan(MLP + "include: [{batch_size: 2, hidden: 8}, {batch_size: 4}]\n")
    assert columns(made, "batch_size", "hidden") == [(2, 8), (4, 1024)]


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


def test_run_settings_are_checked_by_what_is_declared_at_the_fields_of_a_point():
    settings = registry.settings(registry.load("mlp"))
    assert list(RUN_SETTINGS) == list(settings)[: len(RUN_SETTINGS)]
    for name, declared in RUN_SETTINGS.items():
        assert settings[name].description == declared.about.text
        assert settings[name].default == declared.default
    assert settings["precision"].type == "'fp32' | 'tf32' | 'fp16' | 'bf16' | 'float8'"
    assert settings["cuda_graph"].type == "boolean"
    assert settings["batch_size"].type == "integer >= 1"


@pytest.mark.parametrize("name", EXECUTION)
def test_how_steps_are_executed_is_told_to_workloads_ids_filters_and_tables(name):
    point = make_point(**{name: OTHER[name]})
    assert name in {field.name for field in fields(Context)}
    assert point.execution[name] == OTHER[name]
    assert point.settings[name] == OTHER[name]
    assert point.point_id != make_point().point_id
    assert name in {column.name for column in TABLES["points"]}
    row = point_row("run", make_record(point), make_measure())
    assert getattr(row, name) == OTHER[name]


def test_an_option_is_named_only_where_it_differs_from_its_default():
    assert make_point().options == {}
    for name in OPTIONAL:
        assert make_point(**{name: OTHER[name]}).options == {name: OTHER[name]}


GIB = 2**30


def point_of(text: str, **settings: object) -> Point:
    matrix = ", ".join(f"{name}: [{value}]" for name, value in settings.items())
    (point,) = plan(f"{HEAD}workload: {text}\nmatrix: {{{matrix}}}").points
    return point


def test_the_largest_batch_that_fits_and_the_first_other_setting_are_named():
    text = "{kind: transformer, preset: 350m, seq_len: 4096}"
    point = point_of(text, batch_size=64, precision="bf16", world_size=1)
    needed = estimate(point)
    found = explain_oom(point, needed, 216 * GIB)
    assert found.startswith("estimated 344 of 216 GiB; what fits by the estimate: batch_size 32 (")
    assert " or activation_checkpointing full (" in found
    tiny = explain_oom(point, needed, GIB)
    assert tiny == "estimated 344 of 1 GiB; by the estimate no single setting makes it fit"
    # Where the estimate said that it fits, something smaller is proposed.
    assert "batch_size 32 (" in explain_oom(point, needed, 1000 * GIB)


def test_a_workload_that_does_not_estimate_or_fails_to_has_none(tmp_path, monkeypatch):
    assert estimate(point_of("{kind: gemm}", m=1024)) is None
    monkeypatch.chdir(tmp_path)
    Path("guessing.py").write_text(
        "class Guess:\n"
        "    def __init__(self, context, *, length: int = 1): ...\n"
        "    def step(self): self.items_per_step = 1\n"
        "    @classmethod\n"
        "    def estimate_memory(cls, settings): return 1 / 0\n"
    )
    assert estimate(point_of('{kind: "guessing:Guess"}', batch_size=1)) is None
