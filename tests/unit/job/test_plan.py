"""From the axes of a job to its points."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.model import load_job
from raybench.job.plan import Plan, make_plan, varying_settings
from raybench.job.point import UNEVEN, Point, Precision
from raybench.job.sections import BatchSearch

HEAD = "version: 1\nname: test\n"
MLP = HEAD + "workload: {kind: mlp}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(text: str, *overrides: str) -> Plan:
    Path("job.yaml").write_text(text)
    return make_plan(load_job(Path("job.yaml"), overrides))


def columns(plan: Plan, *names: str) -> list[tuple[object, ...]]:
    return [tuple(point.settings[name] for name in names) for point in plan.points]


def test_the_first_key_of_the_matrix_varies_slowest() -> None:
    made = plan(MLP + "matrix: {batch_size: [1, 2], world_size: [4, 8]}\n")
    assert columns(made, "batch_size", "world_size") == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert made.warnings == (
        "job.yaml:1:1: baseline: no point has {world_size: 1}, so there is no speed-up; "
        "the nearest has {world_size: 4}; baseline: {} compares nothing",
    )


def test_a_strategy_is_of_all_points_or_an_axis_and_part_of_what_is_timed() -> None:
    job = MLP + "matrix: {batch_size: 1, world_size: 2}\nplacement: {strategy: rail}\n"
    rail = plan(job).points
    assert [point.strategy for point in rail] == ["rail"]
    axis = plan(job, "matrix.strategy=pack,spread").points
    assert [point.strategy for point in axis] == ["pack", "spread"]
    assert len({point.point_id for point in (*rail, *axis)}) == 3
    # The usual one has the id that it had before there was a choice.
    assert axis[0].point_id == plan(job, "placement.strategy=pack").points[0].point_id
    with pytest.raises(JobError, match="rail"):
        plan(job, "matrix.strategy=tree")


def test_a_baseline_that_the_job_gives_must_be_of_a_point() -> None:
    text = MLP + "matrix: {world_size: [1, 2], precision: [fp32, bf16], batch_size: 1}\n"
    text += "exclude: [{world_size: 1, precision: bf16}]\n"
    assert plan(text + "baseline: {world_size: 2, precision: bf16}\n").warnings == ()
    with pytest.raises(JobError) as caught:
        plan(text + "baseline: {world_size: 1, precision: bf16}\n")
    assert str(caught.value) == (
        "job.yaml:6:11: baseline: no point has {world_size: 1, precision: 'bf16'}, so there is no "
        "speed-up; the nearest has {world_size: 1, precision: 'fp32'}; baseline: {} compares "
        "nothing"
    )


def test_the_precisions_of_a_plan_are_those_of_its_points() -> None:
    made = plan(MLP + "matrix: {precision: [bf16, fp32], batch_size: [1, 2]}\n")
    assert made.precisions == (Precision.BF16, Precision.FP32)


def test_two_points_of_a_series_that_match_the_baseline_are_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = """
        from raybench import Workload


        class Named(Workload):
            def __init__(self, context, *, size: str = "8"): ...

            def step(self): ...
    """
    (tmp_path / "tied_baseline.py").write_text(textwrap.dedent(module))
    monkeypatch.syspath_prepend(str(tmp_path))
    text = HEAD + 'workload: {kind: "tied_baseline:Named"}\n'
    text += 'matrix: {size: ["8", "08", "9"], batch_size: 1}\nbaseline: {size: "8"}\n'
    with pytest.raises(JobError) as caught:
        plan(text)
    assert str(caught.value) == (
        "job.yaml:5:11: baseline: two points of one series match, {size: '8'} and {size: '08'}; "
        "exclude one of them, or write their values so that they differ as numbers"
    )
    assert len(plan(text + "exclude: [{size: '08'}]\n").points) == 2


def test_each_zip_entry_is_one_axis_that_varies_faster_than_the_matrix() -> None:
    made = plan(
        MLP + "matrix: {world_size: [1, 2]}\n"
        "zip: [{batch_size: [8, 16], hidden: [64, 32]}, {layers: [1, 2]}]\n"
    )
    assert columns(made, "world_size", "batch_size", "hidden", "layers") == [
        (1, 8, 64, 1),
        (1, 8, 64, 2),
        (1, 16, 32, 1),
        (1, 16, 32, 2),
        (2, 8, 64, 1),
        (2, 8, 64, 2),
        (2, 16, 32, 1),
        (2, 16, 32, 2),
    ]


def test_a_point_has_all_parameters_with_their_defaults_in_the_order_of_their_names() -> None:
    (point,) = plan(HEAD + "workload: {kind: mlp, layers: 9}\nmatrix: {batch_size: 8}\n").points
    assert point.workload == "mlp"
    assert list(point.params) == sorted(point.params)
    assert (point.params["layers"], point.params["hidden"]) == (9, 1024)
    assert (point.world_size, point.precision, point.batch_size) == (1, Precision.FP32, 8)


def test_a_batch_size_is_per_device_and_scaling_is_weak() -> None:
    text = "matrix: {batch_size: [8], world_size: [4], grad_accumulation: [2]}\n"
    (point,) = plan(MLP + text).points
    assert (point.batch_size, point.global_batch_size, point.scaling) == (8, 64, "weak")


def test_a_global_batch_size_is_shared_out_and_scaling_is_strong() -> None:
    text = "matrix: {global_batch_size: [64], world_size: [1, 4], grad_accumulation: [1, 2]}\n"
    made = plan(MLP + text)
    assert columns(made, "batch_size", "global_batch_size", "scaling") == [
        (64, 64, "strong"),
        (32, 64, "strong"),
        (16, 64, "strong"),
        (8, 64, "strong"),
    ]


def test_a_global_batch_size_that_does_not_divide_is_located_at_its_value() -> None:
    text = "matrix:\n  world_size: [1, 3]\n  global_batch_size: [64, 66, 65]\n"
    with pytest.raises(JobError) as caught:
        plan(MLP + text)
    assert str(caught.value).splitlines() == [
        "job.yaml:6:23: matrix.global_batch_size[0]: 64 cannot be divided by world_size 3",
        "job.yaml:6:31: matrix.global_batch_size[2]: 65 cannot be divided by world_size 3",
    ]
    rest = "exclude: [{global_batch_size: [64, 65], world_size: 3}]\n"
    assert len(plan(MLP + text + rest).points) == 4


def test_a_global_batch_size_of_zip_and_include_is_located_too() -> None:
    text = (
        "matrix: {grad_accumulation: [2]}\nzip:\n  - {global_batch_size: [3], world_size: [1]}\n"
        "include:\n  - {grad_accumulation: 1, global_batch_size: 7, world_size: 2}\n"
    )
    with pytest.raises(JobError) as caught:
        plan(MLP + text)
    assert str(caught.value).splitlines() == [
        "job.yaml:6:26: zip[0].global_batch_size[0]: 3 cannot be divided by world_size 1 "
        "x grad_accumulation 2",
        "job.yaml:8:47: include[0].global_batch_size: 7 cannot be divided by world_size 2",
    ]


def test_a_global_batch_size_beyond_64_bits_is_refused() -> None:
    text = (
        "matrix: {batch_size: [2147483647], world_size: 1000000, grad_accumulation: 2147483647}\n"
    )
    with pytest.raises(JobError, match="does not fit into 64 bits"):
        plan(MLP + text)


def test_exclude_is_a_partial_match_and_a_list_means_any_of() -> None:
    text = "matrix: {world_size: [1, 2], batch_size: [1, 2, 3]}\n"
    made = plan(MLP + text + "exclude: [{world_size: 2, batch_size: [1, 3]}, {hidden: 7}]\n")
    assert columns(made, "world_size", "batch_size") == [(1, 1), (1, 2), (1, 3), (2, 2)]
    assert made.warnings == ("job.yaml:5:48: exclude[1]: matches no point",)


def test_exclude_can_name_a_setting_that_is_no_axis() -> None:
    with pytest.raises(JobError) as caught:
        plan(MLP + "matrix: {batch_size: [1]}\nexclude:\n  - {hidden: 1024}\n")
    assert str(caught.value) == "job.yaml:6:3: exclude: leaves no point to run"


def test_included_points_come_last_and_escape_the_excludes() -> None:
    made = plan(
        MLP + "matrix: {batch_size: [1, 2]}\nexclude: [{batch_size: 2}]\n"
        "include: [{batch_size: 2, world_size: 8}]\n"
    )
    assert columns(made, "batch_size", "world_size") == [(1, 1), (2, 8)]


def test_a_job_can_consist_of_included_points_alone() -> None:
    made = plan(MLP + "include: [{batch_size: 2, hidden: 8}, {batch_size: 4}]\n")
    assert columns(made, "batch_size", "hidden") == [(2, 8), (4, 1024)]


def test_duplicates_are_dropped_with_a_warning() -> None:
    made = plan(
        MLP + "matrix: {batch_size: [1, 2, 1]}\ninclude: [{batch_size: 2}, {batch_size: 3}]\n"
    )
    assert columns(made, "batch_size") == [(1,), (2,), (3,)]
    assert made.warnings == (
        "job.yaml:4:9: matrix: 1 duplicate point dropped",
        "job.yaml:5:11: include[0]: 1 duplicate point dropped",
    )


def test_a_timeout_that_cuts_the_budget_is_a_warning() -> None:
    made = plan(MLP + "matrix: {batch_size: 1}\n", "measure.repeats=15")
    assert made.warnings == (
        "--set measure.repeats=15: measure.timeout_s: a slow point is stopped before its budget of "
        "300 s is used",
    )
    assert plan(MLP + "matrix: {batch_size: 1}\n", "measure.repeats=14").warnings == ()


def test_seconds_at_least_that_are_more_than_at_most_are_a_warning_where_the_job_gives_them() -> (
    None
):
    text = MLP + "matrix: {batch_size: 1}\n"
    made = plan(text, "measure.min_seconds=30", "measure.max_seconds=20")
    assert made.warnings == (
        "--set measure.min_seconds=30: measure.min_seconds: max_seconds, 20, ends a repeat before; "
        "raise it",
    )
    assert plan(text, "measure.max_seconds=1").warnings == ()


def test_a_point_of_a_workload_without_batches_has_none() -> None:
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


def test_a_job_without_axes_is_one_point_where_no_batch_size_is_needed() -> None:
    (point,) = plan(HEAD + "workload: {kind: gemm, m: 64}\n").points
    assert (point.world_size, point.precision, point.params["m"]) == (1, Precision.FP32, 64)
    (included,) = plan(HEAD + "workload: {kind: gemm}\ninclude: [{m: 32}]\n").points
    assert included.params["m"] == 32


def test_a_cuda_graph_is_off_unless_asked_for_and_can_be_an_axis() -> None:
    text = "matrix: {batch_size: [1], cuda_graph: [false, true]}\n"
    off, on = plan(MLP + text).points
    assert (off.cuda_graph, on.cuda_graph) == (False, True)
    assert varying_settings([off, on]) == ["cuda_graph"]
    (plain,) = plan(MLP + "matrix: {batch_size: 1}\n").points
    assert plain == off
    (fixed,) = plan(MLP + "matrix: {batch_size: 1, cuda_graph: true}\n").points
    assert fixed == on
    (kept,) = plan(MLP + text + "exclude: [{cuda_graph: true}]\n").points
    assert kept == off


PICKY = """
    from raybench import Workload


    class Picky(Workload):
        def __init__(self, context, *, heads: int = 3): ...

        def step(self): ...

        @classmethod
        def why_not(cls, settings):
            if settings["heads"] % settings["world_size"]:
                return f"world_size {settings['world_size']} does not divide {settings['heads']}"
"""


def test_a_point_that_its_workload_refuses_is_a_mistake_unless_it_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "picky_workload.py").write_text(textwrap.dedent(PICKY))
    monkeypatch.syspath_prepend(str(tmp_path))
    text = HEAD + 'workload: {kind: "picky_workload:Picky"}\n'
    text += "matrix: {world_size: [1, 2], batch_size: 1}\n"
    with pytest.raises(JobError) as caught:
        plan(text)
    assert str(caught.value) == "job.yaml:4:9: matrix: world_size 2 does not divide 3"
    assert len(plan(text + "exclude: [{world_size: 2}]\n").points) == 1
    assert len(plan(text, "workload.heads=4").points) == 2


@pytest.mark.parametrize(
    ("sizes", "told"),
    [("batch_size: [1, 2]", "batch_size"), ("global_batch_size: [4, 8]", "global_batch_size")],
)
def test_of_the_two_batch_sizes_only_the_one_of_the_job_varies(sizes: str, told: str) -> None:
    made = plan(MLP + f"matrix: {{world_size: [1, 2], {sizes}}}\n")
    assert varying_settings(made.points) == ["world_size", told]


def make_point(**changes: object) -> Point:
    settings: dict[str, object] = {
        "workload": "mlp",
        "params": {"hidden": 8},
        "world_size": 2,
        "precision": Precision.BF16,
        "batch_size": 4,
        "global_batch_size": 8,
        "scaling": "weak",
        **changes,
    }
    return Point(**settings)  # type: ignore[arg-type]


def test_a_point_id_never_changes() -> None:
    # Stored runs are resumed and compared by it: a new value here breaks them all.
    assert make_point().point_id == "1eab94e999f8"


def test_a_parameter_that_came_later_leaves_ids_as_they_were() -> None:
    with_mode = {"hidden": 8, "mode": "train"}
    assert make_point(params=with_mode).point_id == make_point().point_id
    answering = make_point(params={"hidden": 8, "mode": "inference"})
    assert answering.point_id != make_point().point_id
    # Of a user's own class a parameter of that name may always have been there.
    own, plain = (make_point(workload="x:Y", params=p) for p in (with_mode, {"hidden": 8}))
    assert own.point_id != plain.point_id


@pytest.mark.parametrize(
    "change",
    [
        {"workload": "x:Y"},
        {"params": {"hidden": 9}},
        {"world_size": 1},
        {"precision": Precision.FP16},
        {"batch_size": 5},
        {"batch_size": None, "global_batch_size": None, "scaling": None},
        {"cuda_graph": True},
    ],
)
def test_a_point_id_tells_points_apart(change: dict[str, object]) -> None:
    assert make_point(**change).point_id != make_point().point_id


def test_a_point_id_is_the_same_for_the_same_work() -> None:
    assert make_point(scaling="strong").point_id == make_point().point_id
    assert make_point(params={"b": 1, "a": 2}).point_id == (
        make_point(params={"a": 2, "b": 1}).point_id
    )


def test_the_limit_of_points_is_counted_before_they_are_made() -> None:
    axis = ", ".join(map(str, range(1, 1001)))
    text = MLP + f"matrix: {{batch_size: [{axis}], hidden: [1, 2, 3, 4, 5]}}\n"
    assert len(plan(text).points) == 5000
    more = ", ".join(map(str, range(1, 102)))
    with pytest.raises(JobError, match="at most 100,000 points, given 101,000"):
        plan(text, f"matrix.hidden={more}")


def test_a_search_for_the_batch_size_plans_the_first_point_of_each_series() -> None:
    text = MLP + "matrix: {world_size: [1, 2], batch_size: {start: 8, max: 99}, hidden: [4, 5]}\n"
    made = plan(text)
    names = ("world_size", "batch_size", "global_batch_size", "hidden")
    assert columns(made, *names) == [(1, 8, 8, 4), (1, 8, 8, 5), (2, 8, 16, 4), (2, 8, 16, 5)]
    assert made.batch_search == BatchSearch(start=8, max=99)
    (first,) = plan(MLP + "matrix: {batch_size: auto}\n").points
    (listed,) = plan(MLP + "matrix: {batch_size: 64}\n").points
    assert first == listed
    assert plan(MLP + "matrix: {batch_size: 64}\n").batch_search is None


SHARED = """
class Shared:
    shares_work = True

    def __init__(self, context):
        self.items_per_step = 1

    def step(self): ...
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job file's beginning, with a workload whose ranks do the items of a step together."""
    monkeypatch.delitem(sys.modules, "shared_work", raising=False)
    (tmp_path / "shared_work.py").write_text(SHARED)
    return HEAD + "workload: {kind: 'shared_work:Shared'}\n"


def test_ranks_that_share_their_work_have_one_batch_and_scale_strongly(shared: str) -> None:
    made = plan(shared + "matrix: {batch_size: 6, world_size: [1, 4]}\n")
    assert columns(made, "batch_size", "global_batch_size", "scaling") == [(6, 6, "strong")] * 2
    made = plan(shared + "matrix: {global_batch_size: 6, world_size: [1, 4]}\n")
    assert columns(made, "batch_size", "global_batch_size", "scaling") == [(6, 6, "strong")] * 2
