"""Devices as the subjects of a health check, named as people read them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from raybench.records import Device
from raybench.records.health import Subject


def device_subject(device: Device) -> Subject:
    """Make the subject of one device: "node7 GPU 3", or of a CPU "node7 worker 3"."""
    noun = "GPU" if device.kind == "cuda" else "worker"
    return Subject(
        kind="device",
        uuids=(device.uuid,),
        name=f"{device.host} {noun} {device.index}",
        model=device.name,
    )


def device_subjects(devices: Sequence[Device]) -> tuple[Subject, ...]:
    """Make the subjects of all devices of a check.

    A CPU worker is known by its place among those of its host: its process may be replaced, and
    Ray names the node anew in each run.
    """
    places = Counter[str]()
    found = []
    for device in devices:
        place = places[device.host]
        places[device.host] += 1
        found.append(device_subject(device) if device.kind == "cuda" else _at(device, place))
    return tuple(found)


def _at(device: Device, place: int) -> Subject:
    return device_subject(replace(device, index=place, uuid=f"{device.host}/{place}"))
