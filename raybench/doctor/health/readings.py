"""From the records of a health check to what was read of each subject. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping

from raybench.doctor.health.suite import Fleet, Probe
from raybench.records import Measurement, Record, Status
from raybench.records.health import Reading

_NS_PER_US = 1e3

# What a rank's median step comes to, by the unit of the test.
_VALUES: Mapping[str, Callable[[Measurement, float], float]] = {
    "TFLOP/s": lambda measured, step_ns: (measured.flops_per_step or 0.0) / step_ns / 1e3,
    "GB/s": lambda measured, step_ns: (measured.memory_bytes or 0) / step_ns,
    "µs": lambda _, step_ns: step_ns / _NS_PER_US,
}


def read_record(record: Record, probe: Probe, fleet: Fleet) -> list[Reading]:
    """Read what the record of a probe says of each subject.

    Of a point that failed, each subject has a reading
    without a value, whose problem names the rank that made it fail.
    """
    if record.status is not Status.OK:
        return list(_unread(record, probe, fleet))
    return [
        Reading(
            test=probe.test,
            subject=subject,
            pass_number=record.round,
            value=_VALUES[probe.test.unit](measured, median_step_ns(measured)),
            point_id=record.point.point_id,
        )
        for subject, measured in zip(fleet.subjects, record.measurements, strict=True)
    ]


def median_step_ns(measured: Measurement) -> float:
    """Return the median over the timed samples of a rank."""
    step_ns = [ns for repetition in measured.repetitions for ns in repetition.timed.step_ns]
    return statistics.median(step_ns)


def _unread(record: Record, probe: Probe, fleet: Fleet) -> Iterator[Reading]:
    for rank, subject in enumerate(fleet.subjects):
        yield Reading(
            test=probe.test,
            subject=subject,
            pass_number=record.round,
            value=None,
            problem=_why_unread(record, rank, fleet),
            point_id=record.point.point_id,
        )


def _why_unread(record: Record, rank: int, fleet: Fleet) -> str:
    reason = record.error_message or record.status.clause
    if record.error_rank is None or record.error_rank == rank:
        return f"{record.status.label}: {reason}"
    culprit = fleet.subjects[record.error_rank].name
    return f"not read: {culprit} {record.status.clause}"
