"""The child process that looks at the node: `python -m raybench.health.quick.node_process`.

Questions to NVML and to /proc run here, because a driver call may never return. It loads neither
torch nor Ray.

    node_process DESCRIPTOR
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pynvml

from raybench.cluster.other_programs import describe
from raybench.errors import message_of
from raybench.hardware import nvml
from raybench.hardware.devices import FactReader
from raybench.hardware.gpu_presence import visible_gpus
from raybench.hardware.hosts import read_host
from raybench.health.quick.messages import (
    CountGpus,
    GpuUse,
    LookAround,
    NoGpus,
    Surroundings,
    receive,
    send,
)
from raybench.records.device import Device
from raybench.records.other_program import OtherProgram

# Columns of the first line of /proc/stat: user, nice, system, irq, softirq.
_BUSY_COLUMNS = (1, 2, 3, 6, 7)
# Describing a process takes longer than reading its time, and a node may have thousands.
_MOST_PROGRAMS = 3

# A program, and its processor time in s.
_Used = tuple[OtherProgram, float]


def main(descriptor: int) -> None:
    """Answer questions until the check ends."""
    channel = socket.socket(fileno=descriptor)
    observer = _Observer()
    while True:
        try:
            request = receive(channel)
        except EOFError:
            return
        match request:
            case CountGpus():
                send(channel, _count_gpus())
            case LookAround(devices=devices):
                send(channel, observer.look_around(devices))


def _count_gpus() -> int | NoGpus:
    try:
        return visible_gpus()
    except Exception as error:
        return NoGpus(message=message_of(error))


class _Observer:
    """Looks at the node again and again, and compares each look with the last one."""

    def __init__(self) -> None:
        self._reader = FactReader()
        # Load average before the processes of the devices start.
        self._load_before = psutil.getloadavg()[0]
        # (process id, start) -> processor time of each other process at the last look.
        self._spent_s: dict[tuple[int, float], float] = {}

    def look_around(self, devices: Sequence[Device]) -> Surroundings:
        """Return who uses the node now, and the facts of these devices."""
        own_ids = _own_process_ids()
        own_s = 0.0
        spent_s: dict[tuple[int, float], float] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                if process.pid not in own_ids:
                    spent_s[process.pid, process.create_time()] = times.user + times.system
                    continue
                own_s += times.user + times.system
                if process.pid == os.getppid():
                    # Children of the check that have ended.
                    own_s += times.children_user + times.children_system
        busiest = tuple(self._busiest(spent_s))
        host = read_host(self._load_before)
        self._spent_s = spent_s
        return Surroundings(
            time_s=time.monotonic(),
            busy_s=_busy_s(),
            processors=os.cpu_count() or 1,
            own_s=own_s,
            programs=busiest,
            facts=tuple(replace(facts, host=host) for facts in self._reader.read(devices)),
            gpus=tuple(_use_of(nvml.uuid_of(index), own_ids) for index in range(_gpu_count())),
        )

    def _busiest(self, spent_s: Mapping[tuple[int, float], float]) -> Iterator[_Used]:
        """Yield the programs that have used most since the last look."""
        used_s = {key: total_s - self._spent_s.get(key, 0.0) for key, total_s in spent_s.items()}
        for key in sorted(used_s, key=lambda key: -used_s[key])[:_MOST_PROGRAMS]:
            yield describe(key[0], socket.gethostname()), used_s[key]


def _gpu_count() -> int:
    count = _count_gpus()
    return 0 if isinstance(count, NoGpus) else count


def _own_process_ids() -> set[int]:
    """Return the ids of the check and of its descendants."""
    check = psutil.Process(os.getppid())
    return {check.pid, *(child.pid for child in check.children(recursive=True))}


def _use_of(uuid: str | None, own_ids: Collection[int]) -> GpuUse:
    """Return what other programs do on a GPU."""
    handle = nvml.device(uuid or "")
    if handle is None:
        return GpuUse()
    programs = []
    process_ids = nvml.compute_process_ids(handle)
    for process_id in sorted(process_ids - set(own_ids)):
        programs.append(describe(process_id, socket.gethostname(), device_uuid=uuid or ""))
    used = nvml.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = nvml.memory(handle)
    return GpuUse(
        process_ids=tuple(sorted(process_ids)),
        programs=tuple(programs),
        utilization_pct=None if used is None else used.gpu,
        memory_free_bytes=None if memory is None else memory.free,
        memory_total_bytes=None if memory is None else memory.total,
    )


def _busy_s() -> float | None:
    """Return the busy time of all processors since the host started; None if unknown."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:
        return None
    return sum(int(line[column]) for column in _BUSY_COLUMNS) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(int(sys.argv[1]))
