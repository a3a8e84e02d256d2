"""What a health check says, in words: one function for each kind of statement."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.records.devices import DevicePlace


def device_name(place: DevicePlace) -> str:
    """Return the name of a device: "node7 GPU 3", "node7 worker 3"."""
    return f"{place.host} {short_device_name(place)}"


def short_device_name(place: DevicePlace) -> str:
    """Return the name of a device on its host: "GPU 3", "worker 3"."""
    return f"{'GPU' if place.kind == 'cuda' else 'worker'} {place.number}"


def path_name(start: str, end: str) -> str:
    """Return the name of a pair, or of the path between two nodes, from the names of its ends."""
    return f"{start} to {end}"


def short_names(subjects: Sequence[Sequence[DevicePlace]]) -> list[str] | None:
    """Return the names of devices and pairs without their host, if several share one host.

    None where they do not. subjects: of each the one device, or both ends.
    """
    if len(subjects) < 2 or len({place.host for places in subjects for place in places}) != 1:
        return None
    return [" to ".join(map(short_device_name, places)) for places in subjects]
