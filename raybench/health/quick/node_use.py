"""What other programs did on the node during a quick check. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raybench.health.quick.messages import GpuUse, Surroundings
from raybench.records.node_use import CpuLoad, DeviceUse
from raybench.records.other_program import OtherProgram

# Programs that use a smaller share of a core are not named.
_LEAST_SHARE = 0.05


def device_use(seen: Sequence[GpuUse], own_id: int) -> DeviceUse:
    """Return the use of a GPU by other programs.

    Args:
        seen: the first is from before the check used the GPU, the last from after the tests.
        own_id: process of the check that owns the GPU.
    """
    # In a container NVML may list ids of the host, among which our own process is missing; then
    # only the first list holds no process of the check.
    reliable = [use for use in seen if own_id in use.process_ids] or seen[:1]
    programs: dict[OtherProgram, None] = {}
    for use in reliable:
        programs |= dict.fromkeys(use.programs)
    # The last look still shows the tests of this check.
    shares = [use.utilization_pct for use in seen[:2] if use.utilization_pct is not None]
    # The smaller share counts: a job that has just ended is no neighbour.
    return DeviceUse(programs=tuple(programs), utilization_pct=min(shares, default=None))


def cpu_load(before: Surroundings | None, after: Surroundings | None) -> CpuLoad | None:
    """Return how many cores other programs kept busy between two moments; None if unknown."""
    if before is None or after is None or before.busy_s is None or after.busy_s is None:
        return None
    passed_s = max(0.1, after.time_s - before.time_s)
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    programs = []
    for program, spent_s in after.programs:
        if spent_s / passed_s >= _LEAST_SHARE:
            programs.append(replace(program, busy_cores=spent_s / passed_s))
    return CpuLoad(
        cores=max(0.0, others_s / passed_s),
        processors=after.processors,
        programs=tuple(programs),
    )
