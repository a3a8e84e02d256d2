"""What ranks answer is checked where the driver takes it in."""

import math
from dataclasses import replace

import pytest
from fakes import make_measurement

from raybench.records import Failure, Measurement, Status
from raybench.records.checked_answers import check_answers


def timed(step_ns, **changes) -> Measurement:
    measurement = make_measurement()
    (repetition,) = measurement.repetitions
    samples = replace(repetition.timed, step_ns=step_ns, host_ns=step_ns, **changes)
    return replace(measurement, repetitions=(replace(repetition, timed=samples),))


def answered(**changes) -> Measurement:
    return replace(make_measurement(), **changes)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (timed((1000, -1000, 1000, 1, 1, 1)), "the clock of this rank gave -1000 ns for step"),
        (timed((2**70,) * 6), f"the clock of this rank gave {2**70} ns for step"),
        (timed((True,) * 6), "the clock of this rank gave True ns for step"),
        (timed((0,) * 6), "the clock stood still: the timed steps took 0 ns"),
        (timed(()), "nothing was timed"),
        (timed((1, 2)), "6 times of start for 2 steps"),
        (timed((1,) * 6, part_ns={"load": (-1,) * 6}), "gave -1 ns for part load"),
        (answered(repetitions=()), "nothing was measured"),
        (answered(setup_s=-1.0), "setup_s is -1.0"),
        (answered(energy_j=math.nan), "energy_j is nan"),
        (answered(peak_mem_allocated_bytes=2**63), f"is {2**63}"),
        (answered(items_per_step=10**400), "items_per_step must be a number from 0 to 1e+30"),
    ],
)
def test_a_measurement_that_is_none_is_a_failure_that_keeps_the_process(answer, reason):
    (failure,) = check_answers([answer])
    assert isinstance(failure, Failure)
    assert (failure.status, failure.error_type) == (Status.ERROR, "InvalidMeasurement")
    assert reason in failure.message
    assert failure.worker_reusable


def test_numbers_come_out_as_plain_ones():
    answer = replace(make_measurement(), flops_per_step=2**60, items_per_step=4)
    (plain,) = check_answers([answer])
    assert isinstance(plain, Measurement)
    assert (type(plain.flops_per_step), type(plain.items_per_step)) == (float, int)


def test_a_rank_that_did_nothing_is_fine_beside_one_that_did():
    idle = replace(timed((0,) * 6), rank=1)
    assert check_answers([make_measurement(), idle]) == (
        replace(make_measurement()),
        replace(idle),
    )


def test_ranks_that_ran_different_steps_have_not_measured_one_point():
    other = make_measurement(1, step_ns=(1_000_000,) * 5)
    told = check_answers([make_measurement(0), other])
    assert [answer.message for answer in told] == [
        "the ranks have not run the same steps: rank 0 timed 6, rank 1 timed 5"
    ] * 2


def test_a_failure_beside_measurements_leaves_them_as_they_are():
    failure = Failure(rank=1, status=Status.ERROR, error_type="E", message="m" * 3000)
    first, second = check_answers([make_measurement(0), failure])
    assert first == make_measurement(0)
    assert isinstance(second, Failure)
    assert len(second.message) == 2000
