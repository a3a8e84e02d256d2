"""Where a step goes: computation, communication, waits.

A local step is a step without communication. The parts belong to the rank with the longest local
step. Together with exposed and unexplained time they add up to the step. `comm_ms` and `wait_ms`
cover all ranks.
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
# Hooks measure waits. If they slow the step down by more than 3 %, the waits differ too.
_MAX_COST_OF_HOOKS = 0.03
# The parts of the step, by instrumented steps. `data_ms` is a part too, but comes from timed steps.
BREAKDOWN = (
    *("local_step_ms", "compute_ms", "comm_ms", "comm_exposed_ms", "unexplained_ms", "wait_ms"),
    *("data_ms", "optimizer_ms", "host_gap_ms", "local_step_ms_by_rank", "device_ms_by_rank"),
    *("straggler_ms", "straggler_error_ms", "straggler_device_ms", "late_in_turn_ms"),
)


@dataclass(frozen=True, kw_only=True)
class PartColumns:
    """Where the step goes; the head of the module says to which rank a part belongs."""

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

    If a rank has no breakdown, all columns but `slowest_rank` are None.

    Args:
        measurements: in rank order, without ranks that have no share of the step.
        step_ms: median step of the point.
    """
    breakdowns = [m.breakdown for m in measurements if m.breakdown is not None]
    if len(breakdowns) < len(measurements):
        return PartColumns(slowest_rank=_slowest_by_timed_steps(measurements, step_ms))
    # Take computation and host gap from the rank with the longest local step.
    local_steps = [list(chain(*b.local_ms)) for b in breakdowns]
    local_ms = list(map(median, local_steps)) if all(local_steps) else []
    longest_local_ms = max(local_ms, default=None)
    slowest_index = 0 if longest_local_ms is None else local_ms.index(longest_local_ms)
    slowest = breakdowns[slowest_index]
    # Time in which the device works on a step; `device_ms` is None on a CPU, or if unknown.
    busy_ms, host_gap_ms, is_host_bound = slowest.device_ms, None, None
    if longest_local_ms is not None and slowest.device_ms is not None:
        host_gap_ms = max(0.0, longest_local_ms - slowest.device_ms)
        is_host_bound = host_gap_ms > HOST_BOUND_SHARE * longest_local_ms
    elif longest_local_ms is not None:
        # A CPU is busy except when it waits for data.
        data_ms = data_wait_ms([measurements[slowest_index]])
        busy_ms = longest_local_ms - (data_ms or 0.0)
    # Use the rank with the shortest communication, because it comes last and does not wait.
    comm_ms = stats.median_of_smallest([b.comm_ms for b in breakdowns])
    hooked = [b.hooked_ms for b in breakdowns]
    hooked_ms = max(map(median, hooked)) if all(hooked) else None
    # Steps with hooks on the parts must take as long as timed steps, else their waits do not apply.
    hooked_steps_match = (
        hooked_ms is not None and abs(hooked_ms - step_ms) <= _MAX_COST_OF_HOOKS * step_ms
    )
    methods, not_measured = dict(breakdowns[0].methods), dict(breakdowns[0].not_measured)
    if hooked_ms is not None and not hooked_steps_match:
        methods.pop("wait_ms", None)
        not_measured["wait_ms"] = NotMeasured.OTHER_STEP
    # The tail of a step is its last collective, in which ranks wait for each other.
    wait_ms, tails = None, [b.tail_ms for b in breakdowns]
    if hooked_steps_match and len(tails) > 1 and all(tails) and local_ms:
        wait_ms = _longest_wait_ms(tails, local_ms, step_ms)
    # If only gradients are reduced, `comm_ms` is the time of the all-reduce.
    traffic, bus_gb_s = breakdowns[0].traffic, None
    if comm_ms and [kind_traffic.kind for kind_traffic in traffic] == ["all_reduce"]:
        bus_gb_s = {"all_reduce": traffic[0].bus_bytes / (comm_ms / MS_PER_S) / BYTES_PER_GB}
    calls = _largest_by_kind(breakdowns, lambda traffic: traffic.calls)
    rest_ms = None if longest_local_ms is None else step_ms - longest_local_ms
    exposed_ms, unexplained_ms = split_rest(
        rest_ms,
        comm_ms,
        has_peers=len(local_ms) > 1,
        is_counted=calls is not None,
    )
    return PartColumns(
        host_bound=is_host_bound,
        parts_step_ms=step_ms,
        local_step_ms=longest_local_ms,
        compute_ms=None if busy_ms is None else max(0.0, busy_ms - (slowest.optimizer_ms or 0.0)),
        comm_ms=comm_ms,
        comm_exposed_ms=exposed_ms,
        unexplained_ms=unexplained_ms,
        wait_ms=wait_ms,
        optimizer_ms=slowest.optimizer_ms,
        host_gap_ms=host_gap_ms,
        local_step_ms_by_rank=tuple(local_ms) or None,
        device_ms_by_rank=_complete([b.device_ms for b in breakdowns]),
        comm_calls=calls,
        comm_bytes=_largest_by_kind(breakdowns, lambda traffic: traffic.message_bytes),
        comm_busbw_gb_s=bus_gb_s,
        methods=methods or None,
        not_measured=not_measured or None,
        **_slowest_rank_columns(measurements, breakdowns, local_ms, step_ms),
    )


def _longest_wait_ms(
    tails: Sequence[Sequence[float]],  # rank -> ms in the last collective of each step
    local_ms: Sequence[float],  # rank -> ms of its step without communication
    step_ms: float,
) -> float:
    """Return the longest wait of a rank in the last collective of a step."""
    transfer_ms = stats.median_of_smallest(tails) or 0.0
    waits_ms = []
    for wait_ms, work_ms in zip(stats.median_above_smallest(tails), local_ms, strict=True):
        # A rank cannot wait while it works, or while the collective transfers data.
        upper_bound_ms = step_ms - transfer_ms - work_ms
        waits_ms.append(max(0.0, min(wait_ms, upper_bound_ms)))
    return max(waits_ms)


def split_rest(
    rest_ms: float | None, comm_ms: float | None, *, has_peers: bool, is_counted: bool
) -> tuple[float | None, float | None]:
    """Split the rest of a step into (comm_exposed_ms, unexplained_ms).

    Args:
        rest_ms: the step minus the local step of the slowest rank; None if unknown.
        comm_ms: time in collectives; None if they were not timed.
        has_peers: whether several ranks work on the step.
        is_counted: whether collectives were counted.
    """
    if rest_ms is None or not has_peers or (comm_ms is None and not is_counted):
        return None, rest_ms
    # Collectives that were counted but not timed explain all of the rest, because only they are
    # missing in the local step.
    exposed_ms = max(0.0, rest_ms if comm_ms is None else min(rest_ms, comm_ms))
    return exposed_ms, rest_ms - exposed_ms


def _slowest_rank_columns(
    measurements: Sequence[Measurement],
    breakdowns: Sequence[Breakdown],
    local_ms: Sequence[float],  # rank -> median step without communication; empty if unknown
    step_ms: float,
) -> dict[str, Any]:
    """Return column -> value, for the columns on the slowest rank."""
    if len(measurements) == 1:
        return {}
    local_blocks = [b.local_ms for b in breakdowns]
    straggler = find_straggler(local_blocks) if local_ms else None
    if straggler is None:
        return {"slowest_rank": _slowest_by_timed_steps(measurements, step_ms)}
    slow_device_ms = breakdowns[straggler.rank].device_ms
    typical_device_ms = breakdowns[straggler.other].device_ms
    device_excess_ms = None
    if slow_device_ms is not None and typical_device_ms is not None:
        device_excess_ms = slow_device_ms - typical_device_ms
    error_ms = straggler.error_ms
    if device_excess_ms is None or device_excess_ms < NEARLY_ALL * straggler.excess_ms:
        # The device does not explain the excess, so the host may be slow. Hosts differ more than
        # devices, so the error is larger.
        step_series_ms = []
        for repetitions in zip(*(m.repetitions for m in measurements), strict=True):
            series_ns = stats.step_series([repetition.timed.step_ns for repetition in repetitions])
            step_series_ms.append((series_ns / NS_PER_MS).tolist())
        error_ms = max(error_ms, host_error_ms(local_blocks, step_series_ms))
    # Negative if the local step took longer than the timed step; then the excess is too large.
    rest_ms = step_ms - max(local_ms)
    confirmed_ms = confirmed_excess_ms(straggler.excess_ms, rest_ms)
    is_slow = stands_out(confirmed_ms, error_ms, step_ms)
    return {
        # The index is not the rank, because ranks without a share are left out.
        "slowest_rank": measurements[straggler.rank].rank if is_slow else None,
        "straggler_ms": straggler.excess_ms,
        "straggler_error_ms": error_ms,
        "straggler_device_ms": device_excess_ms,
        # The cost of ranks that are late at different times.
        "late_in_turn_ms": late_in_turn_ms(local_blocks),
    }


def _complete(values: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the values as a tuple; None if a value is missing."""
    present = tuple(value for value in values if value is not None)
    return present if len(present) == len(values) else None


def _largest_by_kind(
    breakdowns: Sequence[Breakdown], amount: Callable[[Traffic], int]
) -> dict[str, int] | None:
    """Return the largest amount of any rank by kind of collective; None without collectives."""
    largest: dict[str, int] = {}
    for traffic in chain(*(b.traffic for b in breakdowns)):
        kind = traffic.kind
        # Name the size of a group that is smaller than all ranks, such as `send of 2`.
        if traffic.ranks != len(breakdowns):
            kind = f"{traffic.kind} of {traffic.ranks}"
        largest[kind] = max(amount(traffic), largest.get(kind, 0))
    return largest or None


def _slowest_by_timed_steps(measurements: Sequence[Measurement], step_ms: float) -> int | None:
    """Return the slowest rank by the timed steps; None if no rank stands out."""
    blocks_by_rank: list[list[list[float]]] = []
    for measurement in measurements:
        blocks = []
        for repetition in measurement.repetitions:
            blocks.append([ns / NS_PER_MS for ns in repetition.timed.step_ns])
        blocks_by_rank.append(blocks)
    straggler = find_straggler(blocks_by_rank)
    if straggler is None or not stands_out(straggler.excess_ms, straggler.error_ms, step_ms):
        return None
    return measurements[straggler.rank].rank


def write_time(*times_ms: float) -> str:
    """Return one or more times as text: `1.2 ms`, `1.2 to 3.4 ms`, `7.44 s`.

    The longest time decides the unit.
    """
    # A time of 999.5 ms and more rounds to four digits.
    least_of_four_digits = 999.5
    is_in_s = max(map(abs, times_ms)) >= least_of_four_digits
    texts = []
    for time_ms in times_ms:
        time = time_ms / MS_PER_S if is_in_s else time_ms
        texts.append(f"{time:,.0f}" if abs(time) >= least_of_four_digits else f"{time:.3g}")
    return " to ".join(texts) + (" s" if is_in_s else " ms")
