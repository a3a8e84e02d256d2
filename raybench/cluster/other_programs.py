"""Which programs use a node beside a point: their names, their users and since when."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

import psutil

from raybench.records.other_program import OtherProgram

# A process that keeps a smaller share of a core busy is ignored.
_MIN_BUSY_CORES = 0.05
# The kernel counts processor time in ticks of 10 ms, so a rate over less time is inexact.
_SHORTEST_S = 0.2
_MOST_PROGRAMS = 5


class _CpuUse(NamedTuple):
    """Processor time of a process so far."""

    process: psutil.Process
    used_s: float


class ProgramWatch:
    """Finds the processes that keep cores busy, from the processor times at two looks."""

    def __init__(self) -> None:
        self._time_s = 0.0
        # (process id, start time) -> use at the last look.
        self._before: Mapping[tuple[int, float], _CpuUse] = {}
        self._busiest: tuple[OtherProgram, ...] = ()

    def look(self, host: str, own_ids: Collection[int]) -> tuple[OtherProgram, ...]:
        """Return the busiest processes since the last look; empty at the first look.

        A look within 0.2 s returns the result of the last look.

        Args:
            own_ids: processes of this sweep, which are left out.
        """
        passed_s = time.monotonic() - self._time_s
        if self._before and passed_s < _SHORTEST_S:
            return self._busiest
        now = dict(_cpu_uses(own_ids))
        busy = []  # (busy cores, process)
        for key, use in now.items():
            before = self._before.get(key)
            # A process that began since the last look used all its time since then.
            used_s = use.used_s - before.used_s if before else use.used_s
            cores = used_s / passed_s
            if self._before and cores >= _MIN_BUSY_CORES:
                busy.append((cores, use.process))
        busy.sort(key=lambda cores_and_process: cores_and_process[0], reverse=True)
        self._busiest = tuple(
            describe(process.pid, host, busy_cores=cores)
            for cores, process in busy[:_MOST_PROGRAMS]
        )
        self._before, self._time_s = now, time.monotonic()
        return self._busiest


def _cpu_uses(own_ids: Collection[int]) -> Iterator[tuple[tuple[int, float], _CpuUse]]:
    """Yield (process id, start time) and the use of each other process."""
    for process in psutil.process_iter():
        if process.pid in own_ids:
            continue
        with suppress(psutil.Error):  # the process has ended
            spent = process.cpu_times()
            key = process.pid, process.create_time()
            yield key, _CpuUse(process, spent.user + spent.system)


def describe(
    process_id: int, host: str, *, device_uuid: str = "", busy_cores: float | None = None
) -> OtherProgram:
    """Return a process of this host; name, user and start are unknown in another container.

    Args:
        device_uuid: UUID of the GPU that the process uses.
        busy_cores: number of cores that the process keeps busy.
    """
    name, user, since = "", "", None
    with suppress(psutil.Error, KeyError):
        process = psutil.Process(process_id)
        with process.oneshot():
            since = datetime.fromtimestamp(process.create_time(), UTC)
            name = "".join(c if c.isprintable() else "?" for c in process.name())
            user = process.username()
    return OtherProgram(
        host=host,
        process_id=process_id,
        name=name,
        user=user,
        since=since,
        device_uuid=device_uuid,
        busy_cores=busy_cores,
    )
