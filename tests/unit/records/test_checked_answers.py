"""What ranks answer is checked where the driver takes it in; metrics, statuses and causes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from fakes import make_measurement

from raybench.errors import UsageError
from raybench.records import (
    FAILURES,
    NOT_RUN,
    Cause,
    Failure,
    Measurement,
    Metric,
    Status,
    combine_ranks,
)
from raybench.records.checked_answers import check_answers, check_declared
from raybench.results.metrics import relate_to_step


def timed(step_ns, **changes) -> Measurement:
    measurement = make_measurement()
    (repetition,) = measurement.repetitions
    samples = replace(repetition.timed, step_ns=step_ns, host_ns=step_ns, **changes)
    return replace(measurement, repetitions=(replace(repetition, timed=samples),))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (timed((1000, -1000, 1000, 1, 1, 1)), "the clock of this rank gave -1000 ns for step"),
        (timed((2**70,) * 6), f"the clock of this rank gave {2**70} ns for step"),
        (timed((0,) * 6), "the clock stood still: the timed steps took 0 ns"),
        (timed(()), "nothing was timed"),
        (timed((1, 2)), "6 times of start for 2 steps"),
        (timed((1,) * 6, part_ns={"load": (-1,) * 6}), "gave -1 ns for part load"),
        (replace(make_measurement(), repetitions=()), "nothing was measured"),
    ],
)
def test_a_measurement_that_is_none_is_a_failure_that_keeps_the_process(answer, reason):
    (failure,) = check_answers([answer])
    assert isinstance(failure, Failure)
    assert (failure.status, failure.error_type) == (Status.ERROR, "InvalidMeasurement")
    assert reason in failure.message
    assert failure.worker_reusable


def test_declared_numbers_come_out_as_plain_ones():
    flops, items = (
        check_declared("x", name, 2**60) for name in ("flops_per_step", "items_per_step")
    )
    assert (type(flops), type(items)) == (float, float)
    assert type(check_declared("x", "items_per_step", np.int64(4))) is int


def test_a_rank_that_did_nothing_is_fine_beside_one_that_did():
    idle = replace(timed((0,) * 6), rank=1)
    assert check_answers([make_measurement(), idle]) == (make_measurement(), idle)


def test_ranks_that_ran_different_steps_have_not_measured_one_point():
    other = make_measurement(1, step_ns=(1_000_000,) * 5)
    told = check_answers([make_measurement(0), other])
    assert [answer.message for answer in told] == [
        "the ranks have not run the same steps: rank 0 timed 6, rank 1 timed 5"
    ] * 2


def statuses(fact: str) -> set[str]:
    return {status.value for status in Status if getattr(status, fact)}


def test_the_facts_of_each_status_are_those_that_resume_rounds_and_reports_go_by():
    assert statuses("is_failure") == {"oom", "error", "timeout", "lost"} == FAILURES
    assert statuses("is_retried") == {"lost", "skipped", "cancelled"}
    assert statuses("is_lasting") == {"oom", "error", "timeout", "skipped"}
    assert statuses("is_failure").isdisjoint(NOT_RUN)
    assert {"skipped", "cancelled"} == NOT_RUN
    assert Status.OOM.label == "out of memory"


@pytest.mark.parametrize("cause", Cause)
def test_a_failure_has_the_status_of_its_cause_also_when_it_has_travelled(cause):
    failure = Failure.of(cause, rank=3, message="so it was")
    assert (failure.status, failure.error_type) == (cause.status, cause.value)
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert not failure.worker_reusable


@pytest.mark.parametrize(
    ("how", "value"), [("max", 4), ("min", 1), ("mean", 2.5), ("median", 2.5), ("sum", 10)]
)
def test_the_values_of_ranks_become_one_as_the_metric_says(how, value):
    assert combine_ranks(how, [1, 4, 2, 3]) == value
    # A sum needs all ranks, and the others one that knows its value.
    assert combine_ranks(how, [1.0, None]) == (None if how == "sum" else 1.0)
    assert combine_ranks(how, [None]) is None


@pytest.mark.parametrize(
    ("how", "value"), [(None, 8.0), ("ms_each", 5.0), ("per_second", 160.0), ("seconds", 0.4)]
)
def test_what_a_step_does_becomes_a_time_of_each_a_rate_or_the_time_of_so_many(how, value):
    assert relate_to_step(how, 8.0, typical_ms=40.0, mean_ms=50.0) == value
    assert relate_to_step(how, None, typical_ms=40.0, mean_ms=50.0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "no name"},
        {"name": "loss", "over_ranks": "largest"},
        {"name": "loss", "over_step": "per_hour"},
        {"name": 5},
    ],
)
def test_a_metric_that_cannot_be_kept_is_refused_where_it_is_declared(wrong):
    with pytest.raises(UsageError, match="Metric"):
        Metric(description="d", **wrong)
