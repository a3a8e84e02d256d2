"""Where a step goes: computation, communication, waits.

The parts belong to the rank with the longest local step: on it they are sequential. With exposed
communication and what is unexplained they add up to the step. `comm_ms` and `wait_ms` cover all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Annotated, Any

from raybench.conversion import BYTES_PER_GB, MS_PER_S, NS_PER_MS
from raybench.records.doubts import NotMeasured
from raybench.records.measurement import Breakdown, Measurement, Traffic
from raybench.records.metrics import Column
from raybench.results.metrics import data_wait_ms
from raybench.stats import summary as stats
from raybench.stats.outliers import (
    NEARLY_ALL,
    confirmed_excess_ms,
    find_straggler,
    host_error_ms,
    late_in_turn_ms,
    stands_out,
)

# Smaller shares of idle time may be noise.
HOST_BOUND_SHARE = 0.05
# A step with hooks that differs by more from the timed step also has other waits.
_SAME_STEP_SHARE = 0.03
# The parts of the step, by instrumented steps. `data_ms` is a part too, but comes from timed steps.
BREAKDOWN = (
    *("local_step_ms", "compute_ms", "comm_ms", "comm_exposed_ms", "unexplained_ms", "wait_ms"),
    *("data_ms", "optimizer_ms", "host_gap_ms", "local_step_ms_by_rank", "device_ms_by_rank"),
    *("straggler_ms", "straggler_error_ms", "straggler_device_ms", "late_in_turn_ms"),
)


@dataclass(frozen=True, kw_only=True)
class PartColumns:
    """Where the step goes; all parts but comm_ms and wait_ms belong to the slowest rank."""

    slowest_rank: Annotated[int | None, Column("", "rank that is slower than the others")] = None
    host_bound: Annotated[bool | None, Column("", "the GPU idles because the host is late")] = None
    parts_step_ms: Annotated[
        float | None, Column("ms", "median step of the rounds whose parts follow: the first")
    ] = None
    local_step_ms: Annotated[float | None, Column("ms", "step without communication")] = None
    compute_ms: Annotated[
        float | None,
        Column(
            "ms",
            "forward and backward pass",
            heading="compute",
            meaning="the forward pass, and the backward pass in training",
            format="part",
        ),
    ] = None
    comm_ms: Annotated[float | None, Column("ms", "collectives from start to end")] = None
    comm_exposed_ms: Annotated[
        float | None,
        Column(
            "ms",
            "step minus the slowest rank's local step, at most comm_ms",
            heading="exposed comm",
            meaning="communication that computation does not hide: the step minus the slowest "
            "rank's step without communication",
            format="part",
        ),
    ] = None
    unexplained_ms: Annotated[
        float | None,
        Column(
            "ms",
            "step minus local_step_ms and comm_exposed_ms",
            heading="unexplained",
            meaning="the median step minus its parts. A value below 0 means that the instrumented "
            "steps were slower than the timed steps",
            format="part",
        ),
    ] = None
    straggler_ms: Annotated[
        float | None,
        Column(
            "ms",
            "slowest rank's local step minus the others'",
            heading="slow rank",
            meaning="how much longer the slowest rank works than the others. The other columns "
            "include this time",
            format="part",
        ),
    ] = None
    straggler_error_ms: Annotated[float | None, Column("ms", "standard error of straggler_ms")] = (
        None
    )
    straggler_device_ms: Annotated[
        float | None, Column("ms", "part of straggler_ms on the device")
    ] = None
    late_in_turn_ms: Annotated[
        float | None, Column("ms", "cost of ranks that are late in turn")
    ] = None
    wait_ms: Annotated[float | None, Column("ms", "for the slowest rank")] = None
    optimizer_ms: Annotated[
        float | None, Column("ms", "the call of optimizer.step()", heading="update", format="part")
    ] = None
    host_gap_ms: Annotated[
        float | None,
        Column(
            "ms",
            "the device waits for the host",
            heading="host gap",
            format="part",
        ),
    ] = None
    local_step_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "median local step of ranks with a share, in order")
    ] = None
    device_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "its work on the device, in the same order")
    ] = None
    wall_unsynced_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "time.time() around a step without synchronizing")
    ] = None
    wall_synced_ms_by_rank: Annotated[
        tuple[float, ...] | None, Column("ms", "time.time() around a step with synchronizing")
    ] = None
    comm_calls: Annotated[
        Mapping[str, int] | None, Column("", "collectives a step by kind, largest rank")
    ] = None
    comm_bytes: Annotated[
        Mapping[str, int] | None, Column("bytes", "their messages, as nccl-tests counts")
    ] = None
    comm_busbw_gb_s: Annotated[
        Mapping[str, float] | None, Column("GB/s", "inside the step, by kind")
    ] = None
    methods: Annotated[Mapping[str, str] | None, Column("", "column -> how it was measured")] = None
    not_measured: Annotated[
        Mapping[str, NotMeasured] | None, Column("", "column -> why it is null")
    ] = None


def part_columns(measurements: Sequence[Measurement], step_ms: float) -> PartColumns:
    """Return the columns of `points` on where the step goes.

    If a rank has no breakdown, only `slowest_rank` is known.

    Args:
        measurements: in rank order, without ranks that have no share of the step.
        step_ms: median step of the point.
    """
    broken_down = [m.breakdown for m in measurements if m.breakdown is not None]
    if len(broken_down) < len(measurements):
        return PartColumns(slowest_rank=_slowest_by_timed_steps(measurements, step_ms))
    # Computation and host gap of the rank with the longest local step.
    local_steps = [list(chain(*b.local_ms)) for b in broken_down]
    local_ms = list(map(median, local_steps)) if all(local_steps) else []
    longest_ms = max(local_ms, default=None)
    slowest = 0 if longest_ms is None else local_ms.index(longest_ms)
    slow = broken_down[slowest]
    busy_ms, gap_ms, is_bound = slow.device_ms, None, None
    if longest_ms is not None and slow.device_ms is not None:
        gap_ms = max(0.0, longest_ms - slow.device_ms)
        is_bound = gap_ms > HOST_BOUND_SHARE * longest_ms
    elif longest_ms is not None:
        # A CPU is busy except when it waits for data.
        busy_ms = longest_ms - (data_wait_ms(measurements[slowest : slowest + 1]) or 0.0)
    # Communication: the minimum over ranks, because the last rank does not wait for others.
    comm_ms = stats.median_of_smallest([b.comm_ms for b in broken_down])
    hooked = [b.hooked_ms for b in broken_down]
    hooked_ms = max(map(median, hooked)) if all(hooked) else None
    is_same_step = hooked_ms is not None and abs(hooked_ms - step_ms) <= _SAME_STEP_SHARE * step_ms
    methods, not_measured = dict(broken_down[0].methods), dict(broken_down[0].not_measured)
    if hooked_ms is not None and not is_same_step:
        methods.pop("wait_ms", None)
        not_measured["wait_ms"] = NotMeasured.OTHER_STEP
    # The longest wait of a rank in the last collective. A rank waits at most for the time that its
    # own work and the collective leave of the step.
    wait_ms, tails = None, [b.tail_ms for b in broken_down]
    if is_same_step and len(tails) > 1 and all(tails) and local_ms:
        without_collective_ms = step_ms - (stats.median_of_smallest(tails) or 0.0)
        waits_ms = []
        for tail_ms, own_ms in zip(stats.median_above_smallest(tails), local_ms, strict=True):
            waits_ms.append(max(0.0, min(tail_ms, without_collective_ms - own_ms)))
        wait_ms = max(waits_ms)
    # If only gradients are reduced, `comm_ms` is the time of the all-reduce.
    traffic, bus_gb_s = broken_down[0].traffic if broken_down else (), None
    if comm_ms and [kind_traffic.kind for kind_traffic in traffic] == ["all_reduce"]:
        bus_gb_s = {"all_reduce": traffic[0].bus_bytes / (comm_ms / MS_PER_S) / BYTES_PER_GB}
    calls = _largest(broken_down, lambda traffic: traffic.calls)
    exposed_ms, unexplained_ms = beyond_local_step(
        None if longest_ms is None else step_ms - longest_ms,
        comm_ms,
        has_peers=len(local_ms) > 1,
        is_counted=calls is not None,
    )
    return PartColumns(
        host_bound=is_bound,
        parts_step_ms=step_ms,
        local_step_ms=longest_ms,
        compute_ms=None if busy_ms is None else max(0.0, busy_ms - (slow.optimizer_ms or 0.0)),
        comm_ms=comm_ms,
        comm_exposed_ms=exposed_ms,
        unexplained_ms=unexplained_ms,
        wait_ms=wait_ms,
        optimizer_ms=slow.optimizer_ms,
        host_gap_ms=gap_ms,
        local_step_ms_by_rank=tuple(local_ms) or None,
        device_ms_by_rank=_of_all([b.device_ms for b in broken_down]),
        wall_unsynced_ms_by_rank=_of_all(
            [b.wall.unsynced_ms if b.wall else None for b in broken_down]
        ),
        wall_synced_ms_by_rank=_of_all([b.wall.synced_ms if b.wall else None for b in broken_down]),
        comm_calls=calls,
        comm_bytes=_largest(broken_down, lambda traffic: traffic.message_bytes),
        comm_busbw_gb_s=bus_gb_s,
        methods=methods or None,
        not_measured=not_measured or None,
        **_slowest_rank(measurements, broken_down, local_ms, step_ms),
    )


def beyond_local_step(
    beyond_ms: float | None, comm_ms: float | None, *, has_peers: bool, is_counted: bool
) -> tuple[float | None, float | None]:
    """Return comm_exposed_ms and unexplained_ms.

    Args:
        beyond_ms: the step minus the local step of the slowest rank.
        comm_ms: time in collectives; None if they were not timed.
        has_peers: whether several ranks work on the step.
        is_counted: whether collectives were counted.
    """
    # The local step is the step without its collectives. So collectives that were counted but not
    # timed explain all of `beyond_ms`.
    if beyond_ms is None or not has_peers or (comm_ms is None and not is_counted):
        return None, beyond_ms
    exposed_ms = max(0.0, beyond_ms if comm_ms is None else min(beyond_ms, comm_ms))
    return exposed_ms, beyond_ms - exposed_ms


def _slowest_rank(
    measurements: Sequence[Measurement],
    broken_down: Sequence[Breakdown],
    local_ms: Sequence[float],
    step_ms: float,
) -> dict[str, Any]:
    """Return the columns on stragglers by name."""
    if len(measurements) == 1:
        return {}
    blocks = [b.local_ms for b in broken_down]
    straggler = find_straggler(blocks) if local_ms else None
    if straggler is None:
        return {"slowest_rank": _slowest_by_timed_steps(measurements, step_ms)}
    slow_ms, other_ms = (broken_down[r].device_ms for r in (straggler.rank, straggler.other))
    device_ms = None if slow_ms is None or other_ms is None else slow_ms - other_ms
    error_ms = straggler.error_ms
    if device_ms is None or device_ms < NEARLY_ALL * straggler.excess_ms:
        # If the host is slow, the error is at least the natural scatter of hosts.
        timed_ms = []
        for ranks in zip(*(m.repetitions for m in measurements), strict=True):
            series_ns = stats.step_series([repetition.timed.step_ns for repetition in ranks])
            timed_ms.append((series_ns / NS_PER_MS).tolist())
        error_ms = max(error_ms, host_error_ms(blocks, timed_ms))
    is_slow = stands_out(
        confirmed_excess_ms(straggler.excess_ms, step_ms - max(local_ms)), error_ms, step_ms
    )
    return {
        # Use the number of the rank: ranks without a share are missing here.
        "slowest_rank": measurements[straggler.rank].rank if is_slow else None,
        "straggler_ms": straggler.excess_ms,
        "straggler_error_ms": error_ms,
        "straggler_device_ms": device_ms,
        "late_in_turn_ms": late_in_turn_ms(blocks),
    }


def _of_all(values: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the values; None if a value is missing."""
    present = tuple(value for value in values if value is not None)
    return present if len(present) == len(values) else None


def _largest(
    broken_down: Sequence[Breakdown], amount: Callable[[Traffic], int]
) -> dict[str, int] | None:
    """Return the largest amount of any rank for each kind of collective; None without collectives.

    If the group of a kind is smaller than all ranks, the name has its size, such as `send of 2`.
    """
    largest: dict[str, int] = {}
    for traffic in chain(*(b.traffic for b in broken_down)):
        name = traffic.kind
        if traffic.ranks != len(broken_down):
            name = f"{traffic.kind} of {traffic.ranks}"
        largest[name] = max(amount(traffic), largest.get(name, 0))
    return largest or None


def _slowest_by_timed_steps(measurements: Sequence[Measurement], step_ms: float) -> int | None:
    """Return the slowest rank by the timed steps; None if no rank stands out."""
    steps_ms: list[list[list[float]]] = []
    for measurement in measurements:
        blocks = []
        for repetition in measurement.repetitions:
            blocks.append([ns / NS_PER_MS for ns in repetition.timed.step_ns])
        steps_ms.append(blocks)
    straggler = find_straggler(steps_ms)
    if straggler is None or not stands_out(straggler.excess_ms, straggler.error_ms, step_ms):
        return None
    return measurements[straggler.rank].rank


def write_time(*times_ms: float, digits: int = 3) -> str:
    """Return one or more times as text: `1.2 ms`, `1.2 to 3.4 ms`, from 999.5 ms on `7.44 s`.

    The longest time decides the unit.

    Args:
        digits: significant digits.
    """
    unit, in_unit = ("s", 1000.0) if max(map(abs, times_ms)) >= 999.5 else ("ms", 1.0)
    times = (time / in_unit for time in times_ms)
    texts = (f"{t:,.0f}" if abs(t) >= 999.5 else f"{t:.{digits}g}" for t in times)
    return " to ".join(texts) + f" {unit}"
