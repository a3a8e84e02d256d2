"""Where the step of a point goes, from the breakdowns of its ranks. Pure.

docs/method.md says what is measured, what follows from it and what checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any

from raybench.records import Breakdown, Measurement
from raybench.stats import summary
from raybench.stats.stragglers import (
    NEARLY_ALL,
    Straggler,
    borne_out_ms,
    find_straggler,
    late_in_turn_ms,
    pace_scatter,
    stands_out,
)

Numbers = dict[str, Any]

_NS_PER_MS = 1e6
# Below this share of a step the device's idle time may be noise.
_HOST_BOUND_SHARE = 0.05
# A step with timed communication that differs by more is another step: its waits are not the
# timed one's.
_SAME_STEP_SHARE = 0.03


def step_parts(measurements: Sequence[Measurement], step_ms: float) -> Numbers:
    """Compute the columns of the breakdown. All parts are those of the rank whose own step is
    longest: on it they follow each other, and with the exposed communication they add up to the
    step.

    step_ms: the point's step time. `data_ms` of the timed steps is not among the columns.
    """
    broken_down = _breakdowns(measurements)
    local_ms = _local_ms(broken_down)
    straggler = find_straggler([b.local_ms for b in broken_down]) if local_ms else None
    slowest = local_ms.index(max(local_ms)) if local_ms else 0
    of_slowest = broken_down[slowest] if broken_down else Breakdown()
    data_ms = data_wait_ms(measurements[slowest : slowest + 1])
    told = _straggler(broken_down, straggler, _pace_scatter_ms(measurements))
    return {
        "local_step_ms": max(local_ms, default=None),
        "compute_ms": _compute_ms(of_slowest, data_ms),
        "optimizer_ms": of_slowest.optimizer_ms,
        "host_gap_ms": _host_gap_ms(of_slowest),
        "host_bound": _host_bound(of_slowest),
        **_by_rank(broken_down),
        **told,
        **_communication(broken_down, step_ms),
        "slowest_rank": (
            _slowest_rank(straggler, told["straggler_error_ms"], step_ms - max(local_ms), step_ms)
            if straggler
            else _slowest_timed(measurements, step_ms)
        ),
        "methods": _methods(broken_down, step_ms),
    }


def data_wait_ms(measurements: Sequence[Measurement]) -> float | None:
    """Median over iterations of the longest wait for data; None where no rank tells of it."""
    told = [
        [ns for samples in timed for ns in samples.part_ns.get("data", (0,) * len(samples.step_ns))]
        for measurement in measurements
        if (timed := [repetition.timed for repetition in measurement.repetitions])
        and any("data" in samples.part_ns for samples in timed)
    ]
    return summary.summarize(summary.per_iteration_max(told)).p50 / _NS_PER_MS if told else None


def _breakdowns(measurements: Sequence[Measurement]) -> list[Breakdown]:
    """Those of all ranks, or none: the longest of some ranks could be the wrong one."""
    known = [m.breakdown for m in measurements if m.breakdown is not None]
    return known if len(known) == len(measurements) else []


def _local_ms(broken_down: Sequence[Breakdown]) -> list[float]:
    """Compute the median local step of each rank; empty where one has none."""
    steps = [list(chain(*b.local_ms)) for b in broken_down]
    return [median(of_rank) for of_rank in steps] if all(steps) else []


def _compute_ms(breakdown: Breakdown, data_ms: float | None) -> float | None:
    """Compute the device's work but for the optimizer's; on a CPU, the local step less waiting for
    data.
    """
    busy_ms = breakdown.device_ms
    if busy_ms is None and breakdown.local_ms:
        busy_ms = median(chain(*breakdown.local_ms)) - (data_ms or 0.0)
    if busy_ms is None:
        return None
    return max(0.0, busy_ms - (breakdown.optimizer_ms or 0.0))


def _host_gap_ms(breakdown: Breakdown) -> float | None:
    if not breakdown.local_ms or breakdown.device_ms is None:
        return None
    return max(0.0, median(chain(*breakdown.local_ms)) - breakdown.device_ms)


def _host_bound(breakdown: Breakdown) -> bool | None:
    """Whether the device waits for the host; None on a CPU and where it cannot be told."""
    gap_ms = _host_gap_ms(breakdown)
    return (
        None if gap_ms is None else gap_ms > _HOST_BOUND_SHARE * median(chain(*breakdown.local_ms))
    )


def _by_rank(broken_down: Sequence[Breakdown]) -> Numbers:
    """List what the other columns can be computed from again."""
    device_ms = [b.device_ms for b in broken_down]
    return {
        "local_step_ms_by_rank": _local_ms(broken_down) or None,
        "device_ms_by_rank": device_ms if device_ms and None not in device_ms else None,
    }


def _pace_scatter_ms(measurements: Sequence[Measurement]) -> float:
    """How far hosts differ by chance, of the timed steps: they last longest, and the pace of the
    step that waits for the latest host wanders with the hosts'."""
    repeats = range(len(measurements[0].repetitions))
    return max(
        pace_scatter(
            summary.step_series([m.repetitions[index].timed.step_ns for m in measurements]).tolist()
        )
        / _NS_PER_MS
        for index in repeats
    )


def _straggler(
    broken_down: Sequence[Breakdown], straggler: Straggler | None, scatter_ms: float
) -> Numbers:
    """scatter_ms: by how much more hosts may differ by chance than their local steps show."""
    blocks = [b.local_ms for b in broken_down]
    if straggler is None:
        names = ("straggler_ms", "straggler_error_ms", "straggler_device_ms", "late_in_turn_ms")
        return {**dict.fromkeys(names), "local_step_drift_ms": _drift_ms(blocks)}
    device_ms = _device_excess_ms(broken_down, straggler)
    is_device = device_ms is not None and device_ms >= NEARLY_ALL * straggler.excess_ms
    return {
        "straggler_ms": straggler.excess_ms,
        "straggler_error_ms": max(straggler.error_ms, 0.0 if is_device else scatter_ms),
        "straggler_device_ms": device_ms,
        "late_in_turn_ms": late_in_turn_ms(blocks),
        "local_step_drift_ms": _drift_ms(blocks),
    }


def _device_excess_ms(broken_down: Sequence[Breakdown], straggler: Straggler) -> float | None:
    """How much longer the slowest rank's device works than that of the rank it is compared with."""
    slow_ms, other_ms = (broken_down[r].device_ms for r in (straggler.rank, straggler.other))
    return None if slow_ms is None or other_ms is None else slow_ms - other_ms


def _drift_ms(blocks: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Largest change of a rank's local step from the first to the second half of its blocks."""
    if not blocks or any(len(of_rank) < 2 for of_rank in blocks):
        return None
    middle = len(blocks[0]) // 2
    changes = [median(chain(*b[middle:])) - median(chain(*b[:middle])) for b in blocks]
    return max(changes, key=abs)


def _communication(broken_down: Sequence[Breakdown], step_ms: float) -> Numbers:
    """Communication is the shortest over ranks: the rank that comes last does not wait in it."""
    local_ms, comm_ms = _local_ms(broken_down), [b.comm_ms for b in broken_down]
    has_peers = len(broken_down) > 1
    return {
        "comm_ms": summary.median_of_smallest(comm_ms) if comm_ms else None,
        "comm_exposed_ms": step_ms - max(local_ms) if has_peers and local_ms else None,
        "hooked_step_ms": _hook_ms(broken_down),
        "wait_ms": _wait_ms(broken_down, step_ms),
    }


def _hook_ms(broken_down: Sequence[Breakdown]) -> float | None:
    """Median of the steps with timed communication, of the rank that took longest."""
    hooked = [b.hooked_ms for b in broken_down]
    return max(median(steps) for steps in hooked) if hooked and all(hooked) else None


def _is_same_step(hooked_ms: float | None, step_ms: float) -> bool:
    return hooked_ms is not None and abs(hooked_ms - step_ms) <= _SAME_STEP_SHARE * step_ms


def _wait_ms(broken_down: Sequence[Breakdown], step_ms: float) -> float | None:
    """Compute the longest that a rank waits in the last collective, no longer than its step leaves
    beside its own work and that collective; None where the instrumented steps were other steps.
    """
    tails, local_ms = [b.tail_ms for b in broken_down], _local_ms(broken_down)
    if len(tails) < 2 or not all(tails) or not local_ms:
        return None
    if not _is_same_step(_hook_ms(broken_down), step_ms):
        return None
    shortest_ms = summary.median_of_smallest(tails) or 0.0
    waits_ms = zip(summary.median_above_smallest(tails), local_ms, strict=True)
    return max(max(0.0, min(wait, step_ms - own - shortest_ms)) for wait, own in waits_ms)


def _slowest_rank(
    found: Straggler, error_ms: float, exposed_ms: float, step_ms: float
) -> int | None:
    """Find the slowest rank, if it stands out."""
    excess_ms = borne_out_ms(found.excess_ms, exposed_ms)
    return found.rank if stands_out(excess_ms, error_ms, step_ms) else None


def _slowest_timed(measurements: Sequence[Measurement], step_ms: float) -> int | None:
    """Find the same by the timed steps, where there are no local ones."""
    found = find_straggler(
        [[[ns / _NS_PER_MS for ns in r.timed.step_ns] for r in m.repetitions] for m in measurements]
    )
    return None if found is None else _slowest_rank(found, found.error_ms, 0.0, step_ms)


def _methods(broken_down: Sequence[Breakdown], step_ms: float) -> dict[str, str] | None:
    if not broken_down or not broken_down[0].methods:
        return None
    hooked_ms = _hook_ms(broken_down)
    if hooked_ms is None or _is_same_step(hooked_ms, step_ms):
        return dict(broken_down[0].methods)
    reason = f"unknown: the instrumented step took {hooked_ms:.3g} ms, the timed {step_ms:.3g} ms"
    return {**broken_down[0].methods, "wait_ms": reason}
