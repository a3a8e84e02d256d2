"""Scripts of the real torch, and of what is built on it, unchanged on two gloo ranks."""

import pytest

from raybench.records import Measurement
from tests.real_scripts import SCRIPTS, make_task


def run(cluster, name, world_size, args=""):
    answers = cluster.run(make_task(name, world_size, args), range(world_size))
    assert all(isinstance(answer, Measurement) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, Measurement)]


def test_a_script_of_the_real_torch_gives_samples_and_parts_of_both_ranks(three_workers):
    for measurement in run(three_workers, "ddp.py", 2, "--accumulation 2"):
        (repetition,) = measurement.repetitions
        assert len(repetition.timed.step_ns) == 30
        assert measurement.warnings == ()
        assert measurement.items_per_step == 8
        assert measurement.breakdown is not None
        assert len(measurement.breakdown.comm_ms) == len(measurement.breakdown.hooked_ms) > 2
        assert all(map(len, measurement.breakdown.local_ms))
        assert measurement.breakdown.optimizer_ms is not None


@pytest.mark.long
def test_what_hooks_cannot_tell_is_unknown_with_the_reason(three_workers):
    breakdown = run(three_workers, "fsdp.py", 2)[0].breakdown
    assert breakdown is not None
    assert breakdown.hooked_ms == ()
    assert "no model in DistributedDataParallel" in breakdown.methods["comm_exposed_ms"]


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_measured_unchanged(three_workers, name, world_size):
    for measurement in run(three_workers, name, world_size):
        assert measurement.warnings == ()
        assert min(measurement.repetitions[0].timed.step_ns) > 0


@pytest.mark.long
def test_the_slower_of_two_optimizers_ends_an_iteration(three_workers):
    (both,) = run(three_workers, "gan.py", 1)
    assert both.warnings == ()
