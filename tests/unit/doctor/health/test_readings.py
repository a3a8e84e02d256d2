"""From the records of a health check to what was read of each device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_device, make_failed, make_measurement, make_record

from raybench.doctor.health.readings import read_record
from raybench.doctor.health.suite import STAGES, Fleet, Probe, probes
from raybench.records import Cause, Record, Status


def fleet_of(count: int = 2, **changes) -> Fleet:
    return Fleet(devices=tuple(make_device(rank, **changes) for rank in range(count)))


def probe_named(name: str, fleet: Fleet) -> Probe:
    [found] = [probe for probe in probes(fleet, STAGES) if probe.test.name == name]
    return found


def record_of(probe: Probe, fleet: Fleet, *steps_ns: int, **changes) -> Record:
    measurements = tuple(
        replace(make_measurement(rank, [[ns] * 5]), **changes) for rank, ns in enumerate(steps_ns)
    )
    return make_record(probe.point, devices=fleet.devices, measurements=measurements)


def test_each_device_has_the_rate_of_its_own_median_step() -> None:
    fleet = fleet_of()
    probe = probe_named("gemm bf16 8192", fleet)
    record = record_of(probe, fleet, 1_000_000, 2_000_000, flops_per_step=8e11)
    readings = read_record(record, probe, fleet)
    assert [one.value for one in readings] == pytest.approx([800.0, 400.0])
    assert [one.subject.name for one in readings] == ["alpha GPU 0", "alpha GPU 1"]
    assert [one.subject.uuids for one in readings] == [("GPU-0",), ("GPU-1",)]
    assert {one.point_id for one in readings} == {probe.point.point_id}


def test_a_point_that_failed_is_read_of_nobody_and_says_who_made_it_fail() -> None:
    fleet = fleet_of()
    probe = probe_named("memory 100 MB", fleet)
    record = make_failed(
        probe.point,
        status=Status.TIMEOUT,
        error_type=Cause.TIMEOUT,
        error_message="rank 1 (alpha, cuda:1): no answer in 30 s",
        error_rank=1,
    )
    innocent, culprit = read_record(record, probe, fleet)
    assert innocent.value is culprit.value is None
    assert innocent.problem == "not read: alpha GPU 1 timed out"
    assert culprit.problem == "timed out: rank 1 (alpha, cuda:1): no answer in 30 s"


def test_a_cpu_worker_stays_the_same_subject_when_its_process_is_replaced() -> None:
    before, after = (
        Fleet(devices=tuple(make_device(0, kind="cpu", uuid=uuid) for uuid in uuids))
        for uuids in (("a/1", "a/2"), ("a/1", "a/3"))
    )
    assert before.subjects == after.subjects
    assert [one.name for one in after.subjects] == ["alpha worker 0", "alpha worker 1"]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_no_two_tests_share_a_name_or_a_point(kind: str) -> None:
    made = probes(fleet_of(4, kind=kind), STAGES)
    assert len({probe.test.name for probe in made}) == len(made)
    assert len({probe.point.point_id for probe in made}) == len(made)
