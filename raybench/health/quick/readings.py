"""The readings of a quick check: what its tests say of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from raybench.health.quick.device_slot import DeviceSlot
from raybench.health.quick.selection import QuickTest
from raybench.health.readings import Reading, read_record, split_by_memory
from raybench.health.suite import Fleet, Probe, device_subjects
from raybench.records.measurement import Failure, Measurement
from raybench.records.record import Record
from raybench.records.status import Status


def split_by_room(
    test: QuickTest, slots: Sequence[DeviceSlot], free_bytes: Mapping[str, int]
) -> tuple[list[DeviceSlot], list[Reading]]:
    """Return the slots whose device has memory for the test, and readings of the others.

    Args:
        free_bytes: uuid of a device -> its free memory.
    """
    probe = Probe(test=test.test, point=test.point)
    with_room: list[DeviceSlot] = []
    readings: list[Reading] = []
    for slot in slots:
        fitting, left_out = split_by_memory([probe], _fleet([slot]), free_bytes)
        readings += left_out
        if fitting:
            with_room.append(slot)
    return with_room, readings


def read_measurements(
    test: QuickTest,
    slots: Sequence[DeviceSlot],
    pass_number: int,
    measurements: Sequence[Measurement],
) -> list[Reading]:
    """Return the readings of measured devices."""
    record = replace(_record(test, slots, pass_number), measurements=tuple(measurements))
    return _read_record(test, slots, record)


def read_failure(
    test: QuickTest, slots: Sequence[DeviceSlot], pass_number: int, failure: Failure
) -> list[Reading]:
    """Return the readings of devices whose test failed."""
    record = replace(
        _record(test, slots, pass_number),
        status=failure.status,
        error_type=failure.error_type,
        error_message=failure.message,
        error_rank=failure.rank,
    )
    return _read_record(test, slots, record)


def _fleet(slots: Sequence[DeviceSlot]) -> Fleet:
    """Return the devices of the slots as a fleet, with their names among all devices."""
    devices = [slot.device for slot in slots if slot.device is not None]
    subjects = []
    for slot, device, subject in zip(slots, devices, device_subjects(devices), strict=True):
        # `device_subjects` numbers the CPU workers of these slots from 0.
        uuids = subject.uuids if device.kind == "cuda" else (f"{device.host}/{slot.index}",)
        subjects.append(replace(subject, name=slot.name, uuids=uuids))
    return Fleet(devices=tuple(devices), known=tuple(subjects))


def _record(test: QuickTest, slots: Sequence[DeviceSlot], pass_number: int) -> Record:
    """Return a record of the test, as a sweep would write it, without measurements."""
    return Record(
        point=test.point,
        attempt=1,
        round=pass_number,
        status=Status.OK,
        started_at=datetime.now(UTC),
        duration_s=0.0,
        devices=tuple(slot.device for slot in slots if slot.device is not None),
    )


def _read_record(test: QuickTest, slots: Sequence[DeviceSlot], record: Record) -> list[Reading]:
    probe = Probe(test=test.test, point=test.point)
    return list(read_record(record, probe, _fleet(slots)))
