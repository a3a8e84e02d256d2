"""Devices as the subjects of a health check, named as people read them. Pure."""

from __future__ import annotations

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
