"""What a run answers, as data."""

import math

import pandas as pd
import pytest
from builders import make_failed, make_point, make_run, make_steady, make_summary, with_values

from raybench.analysis.answer import Gains, LargestBatches, MainLoss, Next, SpeedUps, decide
from raybench.analysis.ranking import (
    NothingMeasured,
    Ranking,
    RankingVerdict,
    Values,
    follows_step_time,
    is_speed,
)
from raybench.analysis.run_data import RunData
from raybench.job.point import Precision
from raybench.records.metrics import Metric
from raybench.records.status import RunStatus

ASKED = "answer: {metric: %s, over: [precision]}\nworkload: {kind: mlp}\n"


def answer_of(records, baseline=None, job_text="", **changes):
    run = make_run("run-a", baseline=baseline or {}, job_text=job_text)
    summary = make_summary(records, run)
    points = with_values(summary.points, **changes)
    return decide(RunData(run=run, devices=summary.devices, points=points))


def ran(world_size, step_ms, precision=Precision.FP32, **settings):
    return make_steady(world_size, step_ms, precision=precision, **settings)


def test_scaling_answer_has_speed_ups_and_their_ideal():
    records = [ran(size, ms, p) for p in Precision if p in ("fp32", "bf16")
               for size, ms in ((1, 8.0), (4, 10.0))]  # fmt: skip
    found = answer_of(records, {"world_size": 1}).conclusion
    assert isinstance(found, SpeedUps)
    assert {one.settings["precision"]: one.low for one in found.series} == pytest.approx(
        {"fp32": 3.2, "bf16": 3.2}
    )
    assert (found.ideal, found.world_size, found.has_interval) == (4.0, 4, False)
    loss = found.main_loss
    assert isinstance(loss, MainLoss)
    assert (loss.cause, loss.count, loss.losing, loss.points) == (None, 0, 2, 2)


def test_the_gain_of_each_setting_is_a_range():
    points = [(8.0, 64, "fp32"), (4.0, 64, "bf16"), (8.0, 256, "fp32"), (2.0, 256, "bf16")]
    records = [ran(1, ms, Precision(name), batch_size=batch) for ms, batch, name in points]
    found = answer_of(records, {"precision": "fp32"}).conclusion
    assert isinstance(found, Gains)
    [gain] = found.gains
    assert (gain.settings, gain.low, gain.high) == (
        {"precision": "bf16"}, pytest.approx(2.0), pytest.approx(4.0)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "steps_ms", "verdict"),
    [
        ("throughput", (8.0, 4.0), RankingVerdict.FIRST_IN_THIS_RUN),
        ("throughput", (8.0, 8.0), RankingVerdict.UNDECIDED),
        # Memory is the same in each start.
        ("peak_mem_allocated_bytes", (8.0, 4.0), RankingVerdict.BEST),
    ],
)
def test_a_case_has_a_verdict(metric, steps_ms, verdict):
    records = [ran(1, steps_ms[0]), ran(1, steps_ms[1], Precision.BF16)]
    bytes_of = {"peak_mem_allocated_bytes": [2 * 2**30, 2**30]}
    answer = answer_of(records, job_text=ASKED % metric, **bytes_of)
    assert isinstance(answer.conclusion, Ranking)
    [case] = answer.cases
    assert case.verdict is verdict
    assert answer.conclusion.asks_for_rounds == (verdict is RankingVerdict.UNDECIDED)
    # Memory needs no rounds.
    is_open = verdict is RankingVerdict.UNDECIDED or answer.is_of_memory
    assert answer.single_starts == (0 if is_open else 2)


@pytest.mark.parametrize(
    ("metric", "values", "gain"),
    [
        ("comm_exposed_ms", [0.0, 5.0], math.inf),
        ("busbw_gb_s", [5.0, 0.0], math.inf),
        ("comm_exposed_ms", [0.0, 0.0], 1.0),
        ("comm_exposed_ms", [2.0, 5.0], 2.5),
    ],
)
def test_the_gain_over_a_value_of_0(metric, values, gain):
    records = [ran(2, 8.0), ran(2, 8.0, Precision.BF16)]
    [case] = answer_of(records, job_text=ASKED % metric, **{metric: values}).cases
    assert case.gain == gain


def test_points_that_do_not_compete_are_values():
    answer = answer_of([ran(1, 8.0), ran(2, 8.0)], job_text=ASKED % "throughput")
    assert isinstance(answer.conclusion, Values)
    assert [case.settings for case in answer.cases] == [{"world_size": 1}, {"world_size": 2}]
    assert answer.conclusion.most.best.value == pytest.approx(
        2 * answer.conclusion.least.best.value
    )


def test_search_answer_has_largest_batch_per_series():
    records = [ran(1, 8.0, batch_size=1474), make_failed(make_point(batch_size=1480))]
    found = answer_of(records).conclusion
    assert isinstance(found, LargestBatches)
    assert [(one.batch_size, one.ran_out) for one in found.batches] == [(1474, 1480)]


def test_without_an_ok_point_nothing_is_measured():
    answer = answer_of([make_failed()], {"world_size": 1})
    assert isinstance(answer.conclusion, NothingMeasured)
    assert (answer.uncompared, answer.single_starts, answer.more_rounds) == (None, 0, None)


def test_points_without_their_baseline_are_counted():
    answer = answer_of([make_failed(), ran(2, 8.0)], {"world_size": 1})
    assert (answer.uncompared.count, answer.uncompared.points) == (1, 1)


@pytest.mark.parametrize(
    ("status", "kind", "end"),
    [
        (RunStatus.OK, Next.RESUME, ("--set", "measure.rounds=3")),
        (RunStatus.INTERRUPTED, Next.RESUME, ("--resume", "run-a")),
    ],
)
def test_the_next_command_is_a_value(status, kind, end):
    run = make_run("run-a", status=status)
    found = decide(make_summary([ran(1, 8.0)], run)).next_command
    assert (found.kind, found.words[-2:]) == (kind, end)


@pytest.mark.parametrize(
    ("declared", "is_rate", "is_time"),
    [
        ({"unit": "images/s"}, True, False),
        ({"unit": "tokens", "over_step": "per_second"}, True, False),
        ({"unit": "ms", "over_step": "ms_each"}, True, True),
        ({"unit": "ms"}, False, False),
        # A heading is a text.
        ({"heading": "stalls/second"}, False, False),
    ],
)
def test_a_metric_knows_whether_it_is_a_speed(declared, is_rate, is_time):
    metric = Metric(name="own", description="d", **declared)
    assert (is_speed(metric), follows_step_time(metric)) == (is_rate, is_time)


@pytest.mark.parametrize(
    ("job", "is_unknown"),
    [
        ("zip: [{precision: [bf16], world_size: [1]}]", False),
        ("include: [{precision: bf16}]", False),
        ("exclude: [{precision: bf16}]", True),
        ("question: 'Which precision: bf16 or fp32?'", True),
    ],
)
def test_a_precision_is_set_by_an_axis_alone(job, is_unknown):
    record = ran(1, 8.0)
    points = [p for p in make_summary([record]).points]
    points = with_values(points, workload=["script"])
    data = RunData(run=make_run(job_text=job), devices=pd.DataFrame(), points=points)
    assert data.is_precision_unknown is is_unknown
