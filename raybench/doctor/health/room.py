"""Which tests a device has memory for, beside what others hold of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from raybench.doctor.health.suite import Fleet, Probe
from raybench.job.point import Point
from raybench.records.health import NOT_READ, Reading

_GIB = 2**30
# Beside the data of a test: libraries' buffers, and what torch keeps for the next one.
_BESIDE_BYTES = _GIB
_FP32_BYTES = 4


def split_by_room(
    probes: tuple[Probe, ...], fleet: Fleet, free_bytes: Mapping[str, int]
) -> tuple[tuple[Probe, ...], tuple[Reading, ...]]:
    """Leave out what a device has no room for; of these each device has a reading without a value.

    free_bytes: of devices by their uuids; of others it is not known, and taken for enough.
    """
    fitting, left_out = [], []
    for probe in probes:
        needed = bytes_needed(probe.point)
        lacking = {
            rank: free_bytes[device.uuid]
            for rank, device in enumerate(fleet.devices)
            if free_bytes.get(device.uuid, needed) < needed
        }
        if lacking:
            left_out += _unread(probe, fleet, lacking, needed)
        else:
            fitting.append(probe)
    return tuple(fitting), tuple(left_out)


def bytes_needed(point: Point) -> int:
    """Estimate the memory of a device that a point takes."""
    params = point.params
    size_bytes = int(params.get("size_bytes", 0))
    matrix = int(params.get("m", params.get("size", 0))) ** 2 * _FP32_BYTES
    arrays = {"memory": 3, "host_copy": 4, "pairs": 5}.get(point.workload, 1)
    return _BESIDE_BYTES + arrays * size_bytes + 4 * matrix


def _unread(probe: Probe, fleet: Fleet, lacking: Mapping[int, int], needed: int) -> list[Reading]:
    names = ", ".join(fleet.subjects[rank].name for rank in lacking)
    return [
        Reading(
            test=probe.test,
            subject=subject,
            pass_number=1,
            value=None,
            problem=f"no room: {lacking[rank] / _GIB:.1f} GiB of its memory are free, the test "
            f"needs {needed / _GIB:.1f}"
            if rank in lacking
            else f"{NOT_READ}{names} has no room",
        )
        for rank, subject in enumerate(fleet.subjects)
    ]
