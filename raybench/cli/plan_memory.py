"""What `plan` says of memory: estimates of a rank's largest need, against that of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raybench.job.memory import USABLE, MemoryParts, explain_oom, gib
from raybench.job.point import Point

_MOST_EXPLAINED = 3

Estimates = Sequence[MemoryParts | None]


def memory_column(estimates: Estimates) -> list[str]:
    """Write the estimate of each point in GiB; empty where there is none."""
    return [gib(found.total_bytes) if found else "" for found in estimates]


def memory_lines(
    points: Sequence[Point], estimates: Estimates, device_bytes: int | None
) -> Iterator[str]:
    """Say in a sentence how much points need, and of those that do not fit what would."""
    known = [found.total_bytes for found in estimates if found]
    if not known:
        return
    least, most = gib(min(known)), gib(max(known))
    span = most if least == most else f"{least} to {most}"
    text = f"memory: estimated {span} GiB a device"
    if device_bytes is None:
        yield f"{text}; --device-memory SIZE tells which points do not fit"
        return
    room = USABLE * device_bytes
    too_big = [
        (number, point, found)
        for number, (point, found) in enumerate(zip(points, estimates, strict=True), start=1)
        if found and found.total_bytes > room
    ]
    numbers = ", ".join(f"#{number}" for number, *_ in too_big)
    fits = f"do not fit into {gib(device_bytes)} GiB, and run all the same: {numbers}"
    yield f"{text}; {fits if too_big else f'all fit into {gib(device_bytes)} GiB'}"
    for number, point, found in too_big[:_MOST_EXPLAINED]:
        yield f"#{number}: {explain_oom(point, found, device_bytes)}"
