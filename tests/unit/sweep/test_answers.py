"""What ranks answer is checked where the driver takes it in."""

from dataclasses import replace

import pytest
from fakes import make_measurement

from raybench.records.measurement import Failure, Measurement
from raybench.records.status import Status
from raybench.sweep.point_record import check_answers


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
def test_impossible_times_fail_and_keep_the_process(answer, reason):
    (failure,) = check_answers([answer])
    assert isinstance(failure, Failure)
    assert (failure.status, failure.error_type) == (Status.ERROR, "InvalidMeasurement")
    assert reason in failure.message
    assert failure.worker_reusable


def test_a_rank_may_idle_beside_a_busy_rank():
    idle = replace(timed((0,) * 6), rank=1)
    assert check_answers([make_measurement(), idle]) == (make_measurement(), idle)


def test_different_step_counts_on_ranks_are_an_error():
    other = make_measurement(1, step_ns=(1_000_000,) * 5)
    told = check_answers([make_measurement(0), other])
    assert [answer.message for answer in told] == [
        "the ranks have not run the same steps: rank 0 timed 6, rank 1 timed 5"
    ] * 2
