"""What makes the number of a point doubtful, one sentence each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raybench.records import NO_COLLECTIVES
from raybench.stats.stragglers import NEARLY_ALL, borne_out_ms, stands_out

if TYPE_CHECKING:
    from raybench.job.model import Measure
    from raybench.records import Device, Record

Row = Mapping[str, Any]

# A larger share of the step is worth a sentence.
_LEAST_SHARE = 0.02
# A step time that is known worse than this, to either side, is no measure for others.
WIDEST_INTERVAL = 0.10
_ENOUGH_SAMPLES = 10
# The parts come from other steps than the step time: by so much they may exceed it.
_MOST_PARTS = 1.10
# The mean step may be so much longer than the median one without a word.
_RARE_STALLS = 0.01
# A time that is reached but for so much is reached.
_NEARLY = 0.95
# One after the other on the slowest rank; `wait_ms` is time of the others.
_CONSECUTIVE_PARTS = ("compute_ms", "optimizer_ms", "host_gap_ms", "comm_exposed_ms")
# What was got from the instrumented steps; `data_ms` counts as a part of the same picture.
BREAKDOWN = (
    *("local_step_ms", "compute_ms", "comm_ms", "comm_exposed_ms", "wait_ms", "data_ms"),
    *("optimizer_ms", "host_gap_ms", "local_step_ms_by_rank", "device_ms_by_rank"),
    *("straggler_ms", "straggler_error_ms", "straggler_device_ms", "late_in_turn_ms"),
    *("hooked_step_ms", "local_step_drift_ms", "local_copy_ms"),
)
NO_ITEMS = "no throughput: the workload does not set items_per_step"


def quality_warnings(row: Row, record: Record, measure: Measure) -> Iterator[str]:
    """Tell what the reader of an ok point's row must know.

    row: its numbers. measure: what the job asked for, to tell where the measurement falls short.
    """
    if row["batch_size"] is not None and record.measurements[0].items_per_step is None:
        yield NO_ITEMS
    if NO_COLLECTIVES in (row["methods"] or {}).get("comm_exposed_ms", ""):
        yield f"no breakdown on several ranks: {NO_COLLECTIVES}"
    yield from _shortfalls(row, measure)
    yield from _rare_stalls(row)
    yield from _unsteady(row, record, measure)
    if reason := why_no_breakdown(row):
        yield reason
    else:
        yield from _hold_ups(row)
    yield from _allocations(row)
    yield from _throttling(row, record)
    if row["mfu_pct"] is not None and row["mfu_pct"] > 100:
        yield (
            f"{row['mfu_pct']:.0f}% of the device's peak is impossible: the operations or the "
            "peak are counted wrong, or the precision is not what was asked for"
        )


def _allocations(row: Row) -> Iterator[str]:
    """Tell what the allocator did in timed steps that a steady step does without."""
    if retries := value_or_none(row["alloc_retries"]):
        yield (
            f"the timed steps include {retries:.0f} retries of the allocator, which had to give "
            "back what it kept: memory is short, take a smaller batch"
        )
    elif calls := value_or_none(row["device_allocs"]):
        yield (
            f"the timed steps include {calls:.0f} calls of cudaMalloc: memory had not settled, "
            "warm up for longer"
        )


def half_interval(row: Row) -> float | None:
    """Half of the 95 % interval of the step time, over it; None where it is not known."""
    step_ms, low, high = (
        value_or_none(row[f"step_ms_{name}"]) for name in ("p50", "ci_low", "ci_high")
    )
    return None if not step_ms or low is None or high is None else (high - low) / 2 / step_ms


def is_imprecise(row: Row) -> bool:
    """Whether the step time is known too badly to compare others with it, or to call it best."""
    half_width = half_interval(row)
    # Fewer samples have a wide interval though nothing is wrong.
    samples = value_or_none(row.get("iterations"))
    is_enough = samples is None or samples >= _ENOUGH_SAMPLES
    return is_enough and half_width is not None and half_width > WIDEST_INTERVAL


def why_no_breakdown(row: Row) -> str | None:
    """Why the parts of a point's step are none: they exceed it. None where they may be shown.

    The one rule for tables, charts, sentences and shares of losses.
    """
    step_ms = value_or_none(row["step_ms_p50"])
    longest_ms = _parts_ms(row)
    if not step_ms or longest_ms <= _MOST_PARTS * step_ms:
        return None
    return (
        f"no breakdown: the parts come to {longest_ms:.3g} ms, the step takes {step_ms:.3g} ms; "
        "the instrumented steps were slower than the timed ones"
    )


def crowding(devices: Sequence[Device]) -> Iterator[str]:
    """CPU workers are devices only as long as each has a core of its own.

    Nodes of Ray may be of one host: its cores count once.
    """
    hosts: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.kind == "cpu":
            hosts.setdefault((device.host, device.address), []).append(device)
    for (host, _), workers in hosts.items():
        cores = max(worker.cpu_count for worker in workers)
        if len(workers) > cores:
            yield f"{len(workers)} CPU workers share {cores} core{'s' * (cores != 1)} of {host}"


def is_slowed_by_one_rank(row: Row) -> bool:
    """Whether a rank stands out as slower by its own steps.

    False where these are not known: before schema 5 only waits were, which did not tell. Of several
    rounds, where most of them name one rank.
    """
    if value_or_none(row["slowest_rank"]) is None:
        return False
    excess, error, step = (
        value_or_none(row[name]) for name in ("straggler_ms", "straggler_error_ms", "step_ms_p50")
    )
    if excess is None or not step:
        return False
    return stands_out(
        borne_out_ms(excess, value_or_none(row["comm_exposed_ms"])), error or 0.0, step
    )


def straggler_cost_ms(row: Row) -> tuple[float, float]:
    """From how much to how much a slow rank adds to the step of a point that has one.

    Its excess at most. Less where communication that would be exposed without it is hidden behind
    its excess: no more than `comm_ms` could be, and `comm_exposed_ms` of it still is.
    """
    comm_ms, exposed_ms = value_or_none(row["comm_ms"]), value_or_none(row["comm_exposed_ms"])
    excess_ms = borne_out_ms(float(row["straggler_ms"]), exposed_ms)
    if comm_ms is None or exposed_ms is None:
        return excess_ms, excess_ms
    return max(0.0, excess_ms - max(0.0, comm_ms - exposed_ms)), excess_ms


def _shortfalls(row: Row, measure: Measure) -> Iterator[str]:
    """Tell what the job asked for and the measurement did not reach."""
    wanted = measure.iterations.min * measure.repeats
    if row["iterations"] < wanted:
        yield f"time budget: {row['iterations']} of {wanted} iterations"
    timed_s = _phase_s(row)
    if measure.is_quick:
        yield f"quick: {timed_s:.2g} s timed"
    elif not measure.iterations.is_fixed and timed_s < _NEARLY * measure.min_seconds:
        yield f"time budget: {timed_s:.2g} s of {measure.min_seconds:g} s timed"
    half_width = half_interval(row)
    if half_width is not None and half_width > measure.target_ci:
        yield (
            f"step time is known to ±{half_width:.1%} only; "
            f"the job asks for ±{measure.target_ci:.1%}"
        )


def _phase_s(row: Row) -> float:
    """How long the timed phase of a repeat took."""
    steps = row["iterations"] * row["inner_iterations"]
    return float(row["step_ms_mean"] * steps / row["repeats"] / 1000)


def _rare_stalls(row: Row) -> Iterator[str]:
    mean_ms, median_ms = row["step_ms_mean"], row["step_ms_p50"]
    if mean_ms > (1 + _RARE_STALLS) * median_ms:
        yield (
            f"some steps are much longer: the mean of {mean_ms:.4g} ms, which the rates follow, "
            f"is {mean_ms / median_ms - 1:.1%} above the median"
        )


def _unsteady(row: Row, record: Record, measure: Measure) -> Iterator[str]:
    repetitions = [r for m in record.measurements for r in m.repetitions]
    if row["stable"] is False:
        longest = max(len(repetition.warmup.step_ns) for repetition in repetitions)
        yield f"step time changes its level still after {longest} iterations of warm-up"
    elif row["stable"] is None and not measure.iterations.is_fixed:
        yield "too few steps to tell whether their time is steady"


def _throttling(row: Row, record: Record) -> Iterator[str]:
    if row["throttled"]:
        timed = [r.timed.throttled for m in record.measurements for r in m.repetitions]
        marks = [mark for marks in timed for mark in marks]
        reasons = ", ".join(row["throttle_reasons"]) or "reason unknown"
        yield f"clocks were limited in {sum(marks) / len(marks):.0%} of the samples: {reasons}"


def _hold_ups(row: Row) -> Iterator[str]:
    """Tell what made the step slower than the devices can be, by the breakdown."""
    step_ms = row["step_ms_p50"]
    if row["host_bound"]:
        yield f"host-bound: the device idles for {row['host_gap_ms']:.3g} ms of {step_ms:.3g} ms"
    if is_slowed_by_one_rank(row):
        yield _slow_rank(row)
    yield from _late_in_turn(row)
    yield from _negative_communication(row)


def _slow_rank(row: Row) -> str:
    """Which rank is slow, by how much, where, and what that costs the step."""
    least_ms, most_ms = straggler_cost_ms(row)
    cost = f"{most_ms:.3g}" if least_ms > 0.995 * most_ms else f"{least_ms:.3g} to {most_ms:.3g}"
    whose = "the other's" if row["world_size"] == 2 else "the others'"
    return (
        f"rank {row['slowest_rank']} is slower: its own step takes {row['straggler_ms']:.3g} ms "
        f"longer than {whose} ({_slow_part(row)}), "
        f"which costs {cost} ms of {row['step_ms_p50']:.3g} ms"
    )


def _slow_part(row: Row) -> str:
    """Whether the device of a slow rank is slower, or its host late, or both."""
    if row["device_type"] == "cpu":
        return "host"
    device_ms, excess_ms = value_or_none(row["straggler_device_ms"]), float(row["straggler_ms"])
    if device_ms is None:
        return "device or host"
    if device_ms >= NEARLY_ALL * excess_ms:
        return "device"
    if excess_ms - device_ms >= NEARLY_ALL * excess_ms:
        return "host"
    return f"device {device_ms:.3g} ms, host {excess_ms - device_ms:.3g} ms"


def _late_in_turn(row: Row) -> Iterator[str]:
    late_ms, step_ms = row["late_in_turn_ms"], row["step_ms_p50"]
    if late_ms is not None and late_ms > _LEAST_SHARE * step_ms:
        yield f"the ranks are late in turn, which costs up to {late_ms:.3g} ms of {step_ms:.3g} ms"


def _negative_communication(row: Row) -> Iterator[str]:
    exposed_ms, step_ms = row["comm_exposed_ms"], row["step_ms_p50"]
    if exposed_ms is not None and exposed_ms < -_LEAST_SHARE * step_ms:
        yield (
            f"exposed communication is negative, {exposed_ms:.3g} ms: without communication the "
            f"step takes {row['local_step_ms']:.3g} ms, with it {step_ms:.3g} ms"
        )


def _parts_ms(row: Row) -> float:
    """Sum what the parts come to, counting no time twice; 0 where none is known."""
    parts = [value_or_none(row[name]) or 0.0 for name in _CONSECUTIVE_PARTS]
    # On a GPU the host may wait for data while the device computes.
    data_ms = (value_or_none(row["data_ms"]) or 0.0) if row["device_type"] == "cpu" else 0.0
    waits_ms = value_or_none(row["wait_ms"]) or 0.0
    return max(sum(parts) + data_ms, value_or_none(row["local_step_ms"]) or 0.0, waits_ms)


def value_or_none(value: Any) -> float | None:
    """Read a number of a cell; None also for NaN, which pandas makes of null."""
    return None if value is None or value != value else float(value)
