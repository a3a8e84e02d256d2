"""Steps that are shared out unevenly, through Ray and gloo to the rows of their points."""

from dataclasses import replace

import pytest

from raybench.analysis.own_speeds import OwnSpeeds, probe_speeds
from raybench.job.model import Measure
from raybench.job.point import Point
from raybench.records import Failure, Task
from tests.measured_points import measure_row

POINT = Point(
    workload="mlp",
    params={"grad_accumulation": 2, "hidden": 128, "layers": 2},
    world_size=3,
    batch_size=16,
    global_batch_size=96,
    scaling="weak",
    slow_ratio=0.4,
)


def measured(cluster, **settings):
    """The row of a point of three ranks, the last of which is slow."""
    point = replace(POINT, **settings)
    measure = Measure(warmup=3, iterations=15)
    return measure_row(cluster, Task(point=point, settings=measure))


@pytest.mark.parametrize(
    "shares", ["by_speed", pytest.param("by_speed_accumulation", marks=pytest.mark.long)]
)
def test_all_samples_of_a_step_are_done_with_the_gradients_of_one_process(three_workers, shares):
    row = measured(three_workers, shares=shares)
    assert sum(row["share_by_rank"]) == 96
    assert row["gradient_error"] < 1e-5
    step_s = row["step_ms_mean"] / 1000
    assert row["throughput"] * step_s == pytest.approx(96)
    # Held against itself without emulation: here ranks share cores, and differ by what else runs.
    *fast_ratios, slow_ratio = row["slow_ratio_by_rank"]
    assert fast_ratios == [None, None]
    assert slow_ratio < 0.8
    assert [text for text in row["warnings"] if text.startswith("rank 2 emulates a slower")]
    # Efficiency is held against the sum of what each does alone.
    assert len(set(row["models_by_rank"])) == 1
    assert OwnSpeeds([row]).together(row) == pytest.approx(sum(probe_speeds(row)))


def test_the_fast_ranks_train_alone_and_the_slow_one_is_no_part_of_the_figures(three_workers):
    row = measured(three_workers, shares="fast")
    assert row["share_by_rank"] == [48, 48, 0]
    assert len(row["local_step_ms_by_rank"]) == 2
    assert row["own_step_ms_by_rank"][2] is None
    assert row["gradient_error"] < 1e-5
    assert row["comm_ms"] > 0


def test_workers_are_as_before_after_an_uneven_point(three_workers):
    measured(three_workers, shares="64/20/12")
    point = replace(POINT, slow_ratio=1.0)
    task = Task(point=point, settings=Measure(warmup=3, iterations=15))
    for answer in three_workers.run(task, (0, 1, 2)):
        assert not isinstance(answer, Failure), answer
        assert answer.share is None
        assert answer.items_per_step == 32
