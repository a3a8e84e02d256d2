"""Who else used the devices of a point: looked at on each node before it and after it.

Nothing here runs in a rank's process. On CPUs it is the processor time that was taken by processes
which are not of this sweep; on GPUs the processes that NVML names.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from raybench.cluster import reaper
from raybench.cluster.device_locks import CPU, DeviceLocks, Holder
from raybench.records import Device

# Of the processors that the workers can use: a quiet system does less by itself.
_LEAST_SHARE = 0.05
# Processor time is counted in ticks of 10 ms, for each processor and each process.
_LEAST_S = 0.1
# Ray's own processes, also where somebody else has started it.
_OF_RAY = ("gcs_server", "raylet")
# In a line of /proc/stat, behind the name: user, nice, system, irq, softirq.
_BUSY = (1, 2, 3, 6, 7)


class Spent(NamedTuple):
    """Processor time of a process, and of its children that have ended and were waited for."""

    own_s: float
    children_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a node knew at one moment.

    holders: of locks, but for this sweep. processes: on each GPU, by UUID, that are not of this
    sweep; a GPU of which NVML does not tell is left out.
    busy_s: of the processors that this node's processes may use; None where nobody knows.
    own: processes of this sweep, by number and start, where a worker is a CPU's.
    """

    time_s: float
    holders: tuple[Holder, ...] = ()
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    busy_s: float | None = None
    own: Mapping[tuple[int, float], Spent] = field(default_factory=dict)
    processors: int = 0


def lock_name(device: Device) -> str:
    """Name what is locked for a worker: its GPU, or all processors of its host."""
    return device.uuid if device.kind == "cuda" else CPU


def look(devices: Sequence[Device], locks: DeviceLocks, holder: Holder) -> Look:
    """Look around on this node, as a child of its raylet. holder: this sweep."""
    names = list(dict.fromkeys(map(lock_name, devices)))
    claim = locks.others(names, holder.sweep)
    own = _own_processes(holder)
    gpus = [device for device in devices if device.kind == "cuda"]
    processors = os.sched_getaffinity(0)
    counts = len(gpus) < len(devices)
    return Look(
        time_s=time.monotonic(),
        holders=tuple(dict.fromkeys(one for held_by in claim.others.values() for one in held_by)),
        processes={gpu.uuid: found for gpu in gpus if (found := _on_gpu(gpu, own)) is not None},
        busy_s=_busy_s(processors) if counts else None,
        own=_times_spent(own) if counts else {},
        processors=len(processors),
    )


def others_between(before: Look, after: Look, devices: Sequence[Device]) -> Iterator[str]:
    """Who else used these devices of one node, in words. Pure."""
    host = devices[0].host
    yield from (str(one) for one in dict.fromkeys((*before.holders, *after.holders)))
    for device in devices:
        found = (*before.processes.get(device.uuid, ()), *after.processes.get(device.uuid, ()))
        for process in dict.fromkeys(found):
            yield f"{process} on {device.kind}:{device.index} of {host}"
    threads = sum(max(1, device.omp_num_threads) for device in devices if device.kind == "cpu")
    taken = _load_of_others(before, after)
    if taken > _LEAST_SHARE * min(threads, after.processors):
        yield f"other processes kept {taken:.2g} of {after.processors} processors busy on {host}"


def _load_of_others(before: Look, after: Look) -> float:
    """How many processors others have used on average; 0 where nobody knows."""
    if before.busy_s is None or after.busy_s is None:
        return 0.0
    others_s = after.busy_s - before.busy_s - _time_spent_s(before.own, after.own)
    return others_s / (after.time_s - before.time_s) if others_s > _LEAST_S else 0.0


def _time_spent_s(
    before: Mapping[tuple[int, float], Spent], after: Mapping[tuple[int, float], Spent]
) -> float:
    """Add up what these processes have used of processors between two looks."""
    nothing = Spent(0.0, 0.0)
    own_s = sum(now.own_s - before.get(p, nothing).own_s for p, now in after.items())
    children_s = sum(now.children_s - before.get(p, nothing).children_s for p, now in after.items())
    # What has ended meanwhile is its parent's now, with all that it had used before; unless the
    # parent does not wait for its children.
    ended_s = sum(sum(then) for p, then in before.items() if p not in after)
    return own_s + max(0.0, children_s - ended_s)


def _times_spent(processes: Collection[int]) -> dict[tuple[int, float], Spent]:
    found = {}
    for number in processes:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(number)
            times = process.cpu_times()
            spent = Spent(times.user + times.system, times.children_user + times.children_system)
            found[number, process.create_time()] = spent
    return found


def _busy_s(processors: Collection[int]) -> float | None:
    """How long these processors have worked since the host was started; None where nobody knows.

    Not by psutil, which does not say which processor is which where some are off.
    """
    names = {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    busy = [sum(int(line[place]) for place in _BUSY) for line in lines if line[0] in names]
    return sum(busy) / os.sysconf("SC_CLK_TCK") if busy else None


def _own_processes(holder: Holder) -> set[int]:
    """Those of this sweep on this node, and of the Ray that it runs on."""
    living = list(psutil.process_iter(["ppid", "name"]))
    raylet = os.getppid()
    own = {raylet, os.getpid(), *(one.pid for one in living if one.info["name"] in _OF_RAY)}
    if holder.host == socket.gethostname():
        own.add(holder.process_id)
    own &= {one.pid for one in living}
    ours = [one for one in living if one.info["ppid"] != raylet or not _is_foreign(one)]
    while children := {one.pid for one in ours if one.info["ppid"] in own} - own:
        own |= children
    return own


def _is_foreign(process: psutil.Process) -> bool:
    """Whether it is a worker of Ray that no sweep has started."""
    try:
        title = " ".join(process.cmdline())
        is_worker = title.startswith("ray::") or "default_worker.py" in title
        return is_worker and reaper.MARK not in process.environ()
    except psutil.Error:
        return False


def _on_gpu(device: Device, own: set[int]) -> tuple[str, ...] | None:
    """Name the processes of others on the GPU; None where NVML does not name our own either."""
    from raybench.hardware.telemetry import process_ids

    found = process_ids(device.uuid)
    if device.process_id not in found:
        return None
    return tuple(_describe(process) for process in sorted(found - own))


def _describe(process: int) -> str:
    try:
        name = "".join(c if c.isprintable() else "?" for c in psutil.Process(process).name())
    except psutil.Error:
        name = "of another container"
    return f"process {process} ({name})"
