"""Who else used the devices of a point: each node is looked at before the point and after it.

On CPUs it is the processor time of processes that are not of this sweep; on GPUs the processes
that NVML names. Nothing here runs in the process of a rank.
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
from raybench.cluster.device_reservation import DeviceLocks, Holder, lock_name
from raybench.records import Device

# Share of the processors of the workers below which a load is ignored: an idle system has some.
_LEAST_SHARE = 0.05
# Processor time is counted in ticks of 10 ms, for each processor and each process.
_LEAST_S = 0.1
# Ray's own processes count as ours, also where somebody else has started them.
_RAY_PROGRAMS = ("gcs_server", "raylet")
# Columns of a line of /proc/stat behind the name: user, nice, system, irq, softirq.
_BUSY_COLUMNS = (1, 2, 3, 6, 7)


class CpuTime(NamedTuple):
    """Processor time of a process, and of its children that have ended and were waited for."""

    own_s: float
    children_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Who used a node at one moment.

    holders: other sweeps that have locked the devices. processes: GPU UUID -> processes of others,
    in words; a GPU whose processes NVML does not name is left out. busy_s: processor time since
    the host started of the `processors` that this node may use; None where it cannot be read.
    own: (process id, start time) -> processor time of each process of this sweep. Without CPU
    workers there is neither.
    """

    time_s: float
    holders: tuple[Holder, ...] = ()
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    busy_s: float | None = None
    own: Mapping[tuple[int, float], CpuTime] = field(default_factory=dict)
    processors: int = 0


def read_node_use(devices: Sequence[Device], locks: DeviceLocks, holder: Holder) -> NodeUse:
    """Return who uses these devices of this node now. holder: this sweep.

    Must be called in a child of the node's raylet, by which it knows the processes of the sweep.
    """
    names = list(dict.fromkeys(map(lock_name, devices)))
    locked = locks.other_users(names, holder.sweep)
    own = _own_processes(holder)
    gpus = [device for device in devices if device.kind == "cuda"]
    processors = os.sched_getaffinity(0)
    has_cpu_workers = len(gpus) < len(devices)
    return NodeUse(
        time_s=time.monotonic(),
        holders=tuple(dict.fromkeys(one for held_by in locked.others.values() for one in held_by)),
        processes={gpu.uuid: found for gpu in gpus if (found := _on_gpu(gpu, own)) is not None},
        busy_s=_busy_s(processors) if has_cpu_workers else None,
        own=_cpu_times(own) if has_cpu_workers else {},
        processors=len(processors),
    )


def other_users(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> Iterator[str]:
    """Yield in a few words each sweep and process that used devices of this node beside ours.

    before, after: two looks at the node, between which the devices were used.
    """
    host = devices[0].host
    yield from (str(one) for one in dict.fromkeys((*before.holders, *after.holders)))
    for device in devices:
        found = (*before.processes.get(device.uuid, ()), *after.processes.get(device.uuid, ()))
        for process in dict.fromkeys(found):
            yield f"{process} on {device.kind}:{device.index} of {host}"
    if before.busy_s is None or after.busy_s is None:
        return
    threads = sum(max(1, device.omp_num_threads) for device in devices if device.kind == "cpu")
    others_s = after.busy_s - before.busy_s - _own_cpu_time_s(before.own, after.own)
    taken = others_s / (after.time_s - before.time_s) if others_s > _LEAST_S else 0.0
    if taken > _LEAST_SHARE * min(threads, after.processors):
        yield f"other processes kept {taken:.2g} of {after.processors} processors busy on {host}"


def _own_cpu_time_s(
    before: Mapping[tuple[int, float], CpuTime], after: Mapping[tuple[int, float], CpuTime]
) -> float:
    """Return the processor time that the sweep's own processes used between two looks."""
    nothing = CpuTime(0.0, 0.0)
    own_s = sum(now.own_s - before.get(p, nothing).own_s for p, now in after.items())
    children_s = sum(now.children_s - before.get(p, nothing).children_s for p, now in after.items())
    # When a process exits, its time moves to the children_* counters of its parent, if that waits
    # for it: subtract what was already counted.
    ended_s = sum(sum(then) for p, then in before.items() if p not in after)
    return own_s + max(0.0, children_s - ended_s)


def _cpu_times(processes: Collection[int]) -> dict[tuple[int, float], CpuTime]:
    """Return the processor time of each process by id and start time, without ended ones."""
    found = {}
    for number in processes:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(number)
            times = process.cpu_times()
            spent = CpuTime(times.user + times.system, times.children_user + times.children_system)
            found[number, process.create_time()] = spent
    return found


def _busy_s(processors: Collection[int]) -> float | None:
    """Return the busy time of these processors since the host started; None without /proc/stat.

    Not by psutil, which does not say which processor is which where some are switched off.
    """
    names = {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    busy = [sum(int(line[place]) for place in _BUSY_COLUMNS) for line in lines if line[0] in names]
    return sum(busy) / os.sysconf("SC_CLK_TCK") if busy else None


def _own_processes(holder: Holder) -> set[int]:
    """Return the ids of this sweep's processes on this node, and of the Ray that it runs on."""
    living = list(psutil.process_iter(["ppid", "name"]))
    raylet = os.getppid()
    own = {raylet, os.getpid(), *(one.pid for one in living if one.info["name"] in _RAY_PROGRAMS)}
    if holder.host == socket.gethostname():
        own.add(holder.process_id)
    own &= {one.pid for one in living}
    ours = [one for one in living if one.info["ppid"] != raylet or not _is_foreign(one)]
    while children := {one.pid for one in ours if one.info["ppid"] in own} - own:
        own |= children
    return own


def _is_foreign(process: psutil.Process) -> bool:
    """Return whether it is a Ray worker of another program, not of raybench."""
    try:
        title = " ".join(process.cmdline())
        is_worker = title.startswith("ray::") or "default_worker.py" in title
        return is_worker and reaper.MARK not in process.environ()
    except psutil.Error:
        return False


def _on_gpu(device: Device, own: set[int]) -> tuple[str, ...] | None:
    """Name other processes on the GPU; None where NVML does not even name the worker's."""
    from raybench.hardware import nvml

    handle = nvml.device(device.uuid)
    found = set() if handle is None else nvml.process_ids(handle)
    if device.process_id not in found:
        return None
    named = []
    for process in sorted(found - own):
        try:
            name = psutil.Process(process).name()
        except psutil.Error:
            name = "of another container"
        named.append(f"process {process} ({''.join(c if c.isprintable() else '?' for c in name)})")
    return tuple(named)
