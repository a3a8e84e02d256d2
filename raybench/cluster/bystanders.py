"""Who else used the devices of a point: looked at on each node before it and after it.

Nothing here runs in a rank's process. On CPUs it is the processor time that was taken by processes
which are not of this sweep; on GPUs the processes that NVML names.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raybench.cluster import proc, reaper
from raybench.cluster.device_locks import CPU, DeviceLocks, Holder
from raybench.records import Device

# Of the processors that the workers can use: a quiet system does less by itself.
_LEAST_SHARE = 0.05
# Processor time is counted in ticks of 10 ms, for each processor and each process.
_LEAST_S = 0.1
# Ray's own processes, also where somebody else has started it.
_OF_RAY = ("gcs_server", "raylet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a node knew at one moment.

    holders: of locks, but for this sweep. processes: on each GPU, by UUID, that are not of this
    sweep; a GPU of which NVML does not tell is left out.
    busy_s: of the processors that this node's processes may use; None where nobody knows.
    own: processes of this sweep, where a worker is a CPU's.
    """

    time_s: float
    holders: tuple[Holder, ...] = ()
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    busy_s: float | None = None
    own: Mapping[int, proc.Spent] = field(default_factory=dict)
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
        busy_s=proc.busy_s(processors) if counts else None,
        own={p: spent for p in own if (spent := proc.time_spent(p)) is not None} if counts else {},
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


def _time_spent_s(before: Mapping[int, proc.Spent], after: Mapping[int, proc.Spent]) -> float:
    """Add up what these processes have used of processors between two looks."""
    nothing = proc.Spent(began="", own_s=0.0, children_s=0.0)

    def earlier(process: int, now: proc.Spent) -> proc.Spent:
        then = before.get(process, nothing)
        return then if then.began == now.began else nothing

    own_s = sum(now.own_s - earlier(p, now).own_s for p, now in after.items())
    children_s = sum(now.children_s - earlier(p, now).children_s for p, now in after.items())
    # What has ended meanwhile is its parent's now, with all that it had used before; unless the
    # parent does not wait for its children.
    ended = [then for p, then in before.items() if p not in after or after[p].began != then.began]
    return own_s + max(0.0, children_s - sum(then.own_s + then.children_s for then in ended))


def _own_processes(holder: Holder) -> set[int]:
    """Those of this sweep on this node, and of the Ray that it runs on."""
    parents = proc.parents()
    raylet = os.getppid()
    roots = {raylet, os.getpid(), *(p for p in parents if proc.name(p) in _OF_RAY)}
    if holder.host == socket.gethostname():
        roots.add(holder.process_id)
    foreign = {p for p, parent in parents.items() if parent == raylet and _is_foreign(p)}
    ours = {process: parent for process, parent in parents.items() if process not in foreign}
    return proc.with_descendants(roots & parents.keys(), ours)


def _is_foreign(process: int) -> bool:
    """Whether it is a worker of Ray that no sweep has started."""
    title = proc.read(process, "cmdline")
    is_worker = title.startswith(b"ray::") or b"default_worker.py" in title
    return is_worker and f"{reaper.MARK}=".encode() not in proc.read(process, "environ")


def _on_gpu(device: Device, own: set[int]) -> tuple[str, ...] | None:
    """Name the processes of others on the GPU; None where NVML does not name our own either."""
    from raybench.hardware.telemetry import process_ids

    found = process_ids(device.uuid)
    if device.process_id not in found:
        return None
    return tuple(_describe(process) for process in sorted(found - own))


def _describe(process: int) -> str:
    return f"process {process} ({proc.name(process) or 'of another container'})"
