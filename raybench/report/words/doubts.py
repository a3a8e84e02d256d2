"""Doubts about numbers, in words: a clause, a mark, and advice for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raybench.analysis.doubts import DoubtGroup
from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import Doubt, DoubtKind
from raybench.report import formatting
from raybench.report.formatting import counted, share_words
from raybench.results.breakdown import write_time
from raybench.results.point_row import PointRow
from raybench.stats.outliers import NEARLY_ALL
from raybench.stats.summary import MIN_LEVEL_STEPS

# The host delays nearly the whole step; the measured gap may even exceed the step.
_NEARLY_WHOLE = 0.95
# Two costs whose ratio is nearer to 1 are written as one.
_NEARLY_EQUAL = 0.995
# Mark in a table -> its word and its meaning, in the order of a table.
MARKS = {
    "u": ("unsteady", "the step time was still changing"),
    "w": ("wide", "the 95 % interval of the step time within one round exceeds ±10 %"),
    "h": ("host-bound", "the device waits for the host"),
    "t": ("throttled", "heat or a fault limited the clock"),
    "s": ("slow rank", "one rank works longer than the others"),
    "c": ("crowded", "CPU workers share cores"),
    "n": ("not alone", "other work used the same devices or nodes"),
    "q": ("quick", "the point was timed for a moment only"),
    "b": ("no breakdown", "the sum of the parts exceeds the step by more than 10 %"),
}
# Kind of doubt -> what its fields value, limit and subject are.
MEANINGS = {
    DoubtKind.IMPOSSIBLE: (
        "a rate, efficiency or count that cannot be; the subject is the figure; limit: the limit"
    ),
    DoubtKind.OTHER_GRADIENTS: (
        "the relative difference to one process; limit: largest difference by rounding"
    ),
    DoubtKind.BATCH_NORM: (
        "BatchNorm normalizes over the samples of each rank alone, which have different counts"
    ),
    DoubtKind.OTHER_PRECISION: "the subject is the arithmetic that was used",
    DoubtKind.EMULATED_PRECISION: "the subject is the device",
    DoubtKind.MISSING_RANKS: "ranks in the process group; limit: ranks of the point",
    DoubtKind.HOST_CLOCK: "steps of a GPU are timed by the host's clock",
    DoubtKind.NOT_ALONE: "the subject is a sweep or process on its devices",
    DoubtKind.BUSY_CORES: (
        "cores that other processes kept busy; the subject is the host; limit: cores"
    ),
    DoubtKind.UNKNOWN_USERS: "the subject is the host",
    DoubtKind.THROTTLED: "share of the samples; the subject is the reasons",
    DoubtKind.CROWDED: "CPU workers; the subject is the host; limit: cores",
    DoubtKind.DRIFT: "relative change of the control; the subject is round and block; limit: 0.01",
    DoubtKind.SHARED_NODE: (
        "the subject is a sweep, point or process on another device of its nodes"
    ),
    DoubtKind.OTHER_CLOCKS: "SM clock over that of the baseline point; limit: 1",
    DoubtKind.OTHER_KERNELS: "the subject is the kernels of both",
    DoubtKind.SLOW_RANK: "what the rank costs at most, of the step; limit: 0.02",
    DoubtKind.LATE_IN_TURN: "cost, of the step; limit: 0.02",
    DoubtKind.HOST_BOUND: "idle time of the device, of the step; limit: 0.05",
    DoubtKind.ALLOCATOR_RETRIES: "retries in the timed steps; limit: 0",
    DoubtKind.DEVICE_ALLOCS: "calls of cudaMalloc in the timed steps; limit: 0",
    DoubtKind.ROUND_FAILED: "the round; the subject is status and reason",
    DoubtKind.SCRIPT_ENDED: "timed iterations; limit: iterations that count as warm-up",
    DoubtKind.NO_THROUGHPUT: "the workload does not set items_per_step",
    DoubtKind.NO_BREAKDOWN: "the parts over the step; limit: 1.1",
    DoubtKind.PARTS_EXCEED: "what the parts exceed the step by, of the step; limit: 0.02",
    DoubtKind.NO_COLLECTIVES: "several ranks, and no collective was seen in a step",
    DoubtKind.CHECK_FAILED: "the subject is the check and its error",
    DoubtKind.NOT_COMPARED_GRADIENTS: "the subject is the class",
    DoubtKind.NOT_PROFILED: "a script is not profiled",
    DoubtKind.LEFT_BEHIND: "the subject is what was left",
    DoubtKind.EMULATED: "speed that emulation left; limit: speed that was asked",
    DoubtKind.QUICK: "seconds timed",
    DoubtKind.SHORT: "seconds timed; limit: seconds asked",
    DoubtKind.FEW_SAMPLES: "iterations timed; limit: iterations wanted",
    DoubtKind.UNSTEADY: "iterations of warm-up",
    DoubtKind.TOO_FEW_STEPS: "iterations timed",
    DoubtKind.STALLS: "mean step over the median, less 1; limit: 0.01",
    DoubtKind.WIDE: "half of the 95 % interval, of the step; limit: 0.1",
    DoubtKind.BASE_UNSTEADY: "the baseline point's iterations of warm-up",
}


def mark_words(mark: str) -> str:
    """Return what a mark means, as `throttled: heat or a fault limited the clock`."""
    return ": ".join(MARKS[mark])


def doubt_words(doubt: Doubt, row: PointRow) -> str:
    """Return a doubt about a point as a clause."""
    return _WORDS[doubt.kind](doubt, row)


def doubt_advice(doubt: Doubt, row: PointRow | None) -> str:
    """Return a sentence on the effect of a doubt, or on what to do; "" if there is none.

    Args:
        doubt: the doubt.
        row: the point that has the doubt; None for a drift.
    """
    if doubt.kind in _OF_SHORT_TIMING and row is not None and _is_ended_script(row):
        # The advice on the end of the script says what to do.
        return ""
    # The advice on unsteady steps is to measure several rounds.
    if doubt.kind is DoubtKind.UNSTEADY and getattr(row, "rounds", 1) > 1:
        return ""
    if doubt.kind is DoubtKind.IMPOSSIBLE:
        return _ADVICE_ON_IMPOSSIBLE[doubt.subject]
    if doubt.kind is DoubtKind.OTHER_CLOCKS:
        return _advice_on_clocks(doubt)
    return _ADVICE.get(doubt.kind, "")


def drift_words(doubt: Doubt, ranks_noun: str) -> str:
    """Return a drift of the machine as a clause; `ranks_noun` is `GPUs` or `workers`."""
    drift = doubt.value or 0.0
    change = "slower" if drift > 0 else "faster"
    return (
        f"the machine became {share_words(abs(drift), digits=1)} {change} while the points of "
        f"{doubt.subject} {ranks_noun} ran"
    )


def busy_words(group: DoubtGroup, points: int) -> str:
    """Return the sentence on a busy machine, which replaces single doubts."""
    doubt = group.worst
    during = f"during {group.count} of {counted(points, 'point')}"
    if doubt.kind is DoubtKind.BUSY_CORES:
        who = f"Other programs used up to {doubt.value:.2g} of {doubt.limit:.0f} cores"
    else:
        who = "Other programs used the same devices"
    return f"{who} {during}; these times are not reliable."


_ADVICE_ON_IMPOSSIBLE = {
    "efficiency": "Measure again: the baseline may be slowed. "
    "If the value stays, check that each timed step runs.",
    "items": "Samples are counted that no iteration finished: check items_per_step.",
    "iterations": "Iterations are counted that did not run.",
    "mfu_pct": "Check flops_per_step and the precision, or the peak is that of another device.",
    "achieved_tflops_per_device": "Check flops_per_step and the precision.",
    "memory_gb_s": "Bytes are counted that stay in a cache.",
    "busbw_gb_s": "Check the size of the message and the factor of the operation.",
}


def _impossible(doubt: Doubt, row: PointRow) -> str:
    """Return which figure, `doubt.subject`, exceeds what is possible."""
    value, limit, model = doubt.value or 0.0, doubt.limit or 0.0, row.device_name
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    iterations = (row.iterations or 0) * (row.inner_iterations or 1)
    speed_up = ""
    if isinstance(row, ScaledRow):
        speed_up = f" (speed-up {formatting.ratio(row.speed_up)} on {row.world_size} devices)"
    texts = {
        "efficiency": f"an efficiency of {share_words(value)}{speed_up}",
        "items": f"{value:,.0f} samples a step with a batch of {limit:,.0f}",
        "iterations": f"{iterations:,.0f} iterations of {step_ms:.3g} ms in {limit:,.0f} s",
        "mfu_pct": f"an MFU of {value:.0f} %",
        "achieved_tflops_per_device": f"{value:,.0f} TFLOP/s, where large {row.precision} products "
        f"reach {limit:,.0f} on {model}",
        "memory_gb_s": f"{value:,.0f} GB/s of memory, where {model} reaches {limit:,.0f}",
        "busbw_gb_s": f"{value:,.0f} GB/s of bus bandwidth, where the links of {model} reach "
        f"{limit:,.0f}",
    }
    return f"{texts[doubt.subject]} cannot be true"


def _other_gradients(doubt: Doubt, _row: PointRow) -> str:
    # The tables hold NaN as null.
    difference = "by NaN" if doubt.value is None else f"by {share_words(doubt.value, digits=1)}"
    return f"the gradients differ {difference} from those of one process"


def _batch_norm(_doubt: Doubt, _row: PointRow) -> str:
    return "BatchNorm sees the samples of its own rank only, so the gradients differ"


def _other_precision(doubt: Doubt, row: PointRow) -> str:
    return f"the job asks for {row.precision}, but fp32 arithmetic was {doubt.subject}"


def _emulated_precision(doubt: Doubt, row: PointRow) -> str:
    if row.precision == "tf32":
        return f"{doubt.subject} has no TF32, so these are the numbers of fp32"
    return f"{doubt.subject} emulates bfloat16"


def _missing_ranks(doubt: Doubt, _row: PointRow) -> str:
    return f"the script's process group has {doubt.value:.0f} of {doubt.limit:.0f} ranks"


def _host_clock(_doubt: Doubt, _row: PointRow) -> str:
    return "the script's parameters are not on a GPU, so the host's clock timed the steps"


def _not_alone(doubt: Doubt, _row: PointRow) -> str:
    return f"other work used the same devices: {doubt.subject}"


def _busy_cores(doubt: Doubt, _row: PointRow) -> str:
    return f"other programs used {doubt.value:.2g} of {doubt.limit:.0f} cores of {doubt.subject}"


def _unknown_users(doubt: Doubt, _row: PointRow) -> str:
    return f"{doubt.subject} did not say who else used its devices"


def _shared_node(doubt: Doubt, _row: PointRow) -> str:
    return f"other work ran on the same nodes: {doubt.subject}"


def _throttled(doubt: Doubt, _row: PointRow) -> str:
    share = "" if doubt.value is None else f" in {share_words(doubt.value)} of the samples"
    return f"the clock was limited{share}: {doubt.subject or 'the reason is unknown'}"


def _crowded(doubt: Doubt, _row: PointRow) -> str:
    cores = counted(round(doubt.limit or 0), "core")
    return f"{doubt.value:.0f} CPU workers share {cores} of {doubt.subject}"


def _other_clocks(doubt: Doubt, _row: PointRow) -> str:
    return f"the SM clock is {formatting.ratio(doubt.value)} times that of the baseline point"


def _advice_on_clocks(doubt: Doubt) -> str:
    """Return how wrong the speed-up may be, because point and baseline had different clocks."""
    clock_over_baseline = doubt.value or 1.0
    error = share_words(abs(clock_over_baseline - 1))
    if clock_over_baseline > 1:
        return f"The power cap slowed the baseline; the speed-up is up to {error} too high."
    return f"The power cap lowered the clock; the speed-up is up to {error} too low."


def _other_kernels(doubt: Doubt, _row: PointRow) -> str:
    return f"the kernel of attention was {doubt.subject}"


def _slow_rank(doubt: Doubt, row: PointRow) -> str:
    """Return how much longer the slow rank works, and what this costs of the step."""
    step_ms, excess_ms = row.step_ms_p50 or 0.0, row.straggler_ms or 0.0
    most_ms = (doubt.value or 0.0) * step_ms
    # Communication that is hidden behind the excess lowers the cost.
    hidden_ms = 0.0
    if row.comm_ms is not None and row.comm_exposed_ms is not None:
        hidden_ms = max(0.0, row.comm_ms - row.comm_exposed_ms)
    least_ms = max(0.0, most_ms - hidden_ms)
    is_range = least_ms <= _NEARLY_EQUAL * most_ms
    cost = write_time(least_ms, most_ms) if is_range else write_time(most_ms)
    others = "the other rank" if row.world_size == 2 else "the other ranks"
    return (
        f"{doubt.subject} needs {write_time(excess_ms)} more {_kind_of_excess(row)} than {others}, "
        f"which costs {cost} of a {write_time(step_ms)} step"
    )


def _kind_of_excess(row: PointRow) -> str:
    """Return whether a slow rank needs more time of its device or of its host."""
    if row.device_type == "cpu":
        return "host time"
    excess_ms, device_ms = row.straggler_ms or 0.0, row.straggler_device_ms
    if device_ms is not None and device_ms >= NEARLY_ALL * excess_ms:
        return "device time"
    if device_ms is not None and excess_ms - device_ms >= NEARLY_ALL * excess_ms:
        return "host time"
    return "time"


def _late_in_turn(doubt: Doubt, row: PointRow) -> str:
    """Return what ranks that are slow in turn cost; `doubt.value` is the share of a step."""
    step_ms = row.step_ms_p50 or 0.0
    cost = write_time((doubt.value or 0.0) * step_ms)
    return (
        f"different ranks are slow at different times, which costs up to {cost} of a "
        f"{write_time(step_ms)} step"
    )


def _host_bound(doubt: Doubt, _row: PointRow) -> str:
    share = doubt.value or 0.0
    if share >= _NEARLY_WHOLE:
        return "the device waits for the host during nearly the whole step"
    return f"the device waits for the host during {share_words(share)} of the step"


def _allocator_retries(doubt: Doubt, _row: PointRow) -> str:
    return f"memory ran short, so the allocator retried {doubt.value:.0f} times in the timed steps"


def _device_allocs(doubt: Doubt, _row: PointRow) -> str:
    return f"the timed steps called cudaMalloc {doubt.value:.0f} times"


def _stalls(doubt: Doubt, _row: PointRow) -> str:
    longer = share_words(doubt.value or 0.0, digits=1)
    return f"a few slow steps make the mean step {longer} longer than the median step"


def _round_failed(doubt: Doubt, _row: PointRow) -> str:
    return f"round {doubt.value:.0f} ended {doubt.subject}"


def _script_ended(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"the script ended early: {doubt.limit:.0f} iterations count as warm-up, and "
        f"{doubt.value:.0f} are timed"
    )


def _no_throughput(_doubt: Doubt, _row: PointRow) -> str:
    return "the throughput is unknown, because the workload does not set items_per_step"


def _no_breakdown(doubt: Doubt, row: PointRow) -> str:
    step_ms = (row.parts_step_ms or row.step_ms_p50) or 0.0
    parts_over_step = doubt.value or 0.0
    parts = write_time(parts_over_step * step_ms)
    return f"the parts add up to {parts}, but the step takes {write_time(step_ms)}"


def _parts_exceed(_doubt: Doubt, row: PointRow) -> str:
    return (
        f"the step takes {write_time(row.local_step_ms or 0.0)} without communication and "
        f"{write_time(row.step_ms_p50 or 0.0)} with communication"
    )


def _no_collectives(_doubt: Doubt, _row: PointRow) -> str:
    return "the step is not divided into parts, because it uses no collective of torch.distributed"


def _check_failed(doubt: Doubt, _row: PointRow) -> str:
    return f"a check after the timed steps failed: {doubt.subject}"


def _not_compared_gradients(doubt: Doubt, _row: PointRow) -> str:
    return f"check_gradients did nothing, because {doubt.subject} cannot compare its gradients"


def _not_profiled(_doubt: Doubt, _row: PointRow) -> str:
    return "a script is not profiled"


def _left_behind(doubt: Doubt, _row: PointRow) -> str:
    return f"the workload left {doubt.subject} behind"


def _emulated(doubt: Doubt, row: PointRow) -> str:
    """Return how a device is slowed, and its speed as a share of full speed."""
    by = "extra compute" if row.slow_by == "compute" else "fewer multiprocessors"
    return (
        f"{doubt.subject} emulates a slower device by {by}: its speed is {doubt.value:.3f}, and "
        f"{doubt.limit:g} was asked"
    )


def _quick(doubt: Doubt, _row: PointRow) -> str:
    seconds = "" if doubt.value is None else f" ({doubt.value:.2g} s)"
    return f"the point was timed for a moment only{seconds}"


def _is_ended_script(row: PointRow) -> bool:
    return any(doubt.kind is DoubtKind.SCRIPT_ENDED for doubt in row.doubts or ())


def _short_timing(doubt: Doubt, row: PointRow) -> str:
    """Return that the point was timed for fewer seconds than the job asks for, and why."""
    # The doubt SCRIPT_ENDED already says that the script has ended.
    if _is_ended_script(row):
        return f"{doubt.value:.2g} s of the {doubt.limit:g} s that the job asks for were timed"
    return (
        f"max_seconds ended the timing after {doubt.value:.2g} s of the {doubt.limit:g} s that the "
        "job asks for"
    )


def _few_samples(doubt: Doubt, row: PointRow) -> str:
    share = f"only {doubt.value:.0f} of {doubt.limit:.0f} planned steps"
    if _is_ended_script(row):
        return f"{share} were timed"
    return f"{share} fitted into the time limit"


def _unsteady(doubt: Doubt, _row: PointRow) -> str:
    after = "" if doubt.value is None else f" after {doubt.value:.0f} iterations of warm-up"
    return f"the step time was still changing{after}"


def _too_few_steps(doubt: Doubt, _row: PointRow) -> str:
    steps = "too few steps" if doubt.value is None else counted(round(doubt.value), "step")
    return f"{steps} are too few to tell whether the step time was still changing"


def _wide(doubt: Doubt, _row: PointRow) -> str:
    half_width = doubt.value or 0.0
    size = formatting.interval_words(half_width)
    return f"the 95 % interval of the step time within one round is {size}"


def _base_unsteady(_doubt: Doubt, _row: PointRow) -> str:
    return "the step time of the baseline point was still changing"


# Doubts that follow from the end of a script.
_OF_SHORT_TIMING = (DoubtKind.SHORT, DoubtKind.FEW_SAMPLES, DoubtKind.TOO_FEW_STEPS)
# Kind of doubt -> sentence on its effect, or on what to do.
_ADVICE: Mapping[DoubtKind, str] = {
    DoubtKind.OTHER_GRADIENTS: "Check how the ranks average gradients; uneven shares multiply the "
    "loss by context.loss_weight.",
    DoubtKind.BATCH_NORM: "Use SyncBatchNorm or GroupNorm.",
    DoubtKind.MISSING_RANKS: "Each rank may have trained alone.",
    DoubtKind.NOT_ALONE: "Measure again when the other work has ended.",
    DoubtKind.BUSY_CORES: "Measure again when the other programs have ended.",
    DoubtKind.THROTTLED: "Check the cooling and the power of the device.",
    DoubtKind.CROWDED: "Use fewer workers.",
    DoubtKind.DRIFT: "Step times are not corrected.",
    DoubtKind.SHARED_NODE: "The nodes share memory and host links.",
    DoubtKind.OTHER_KERNELS: "The speed-up includes the change of kernel.",
    DoubtKind.HOST_BOUND: "CUDA graphs, compilation or larger batches help.",
    DoubtKind.ALLOCATOR_RETRIES: "Use a smaller batch.",
    DoubtKind.DEVICE_ALLOCS: "Memory had not settled: warm up for longer.",
    DoubtKind.STALLS: "The throughput is computed from the mean step.",
    DoubtKind.SCRIPT_ENDED: "Let the script make more steps.",
    DoubtKind.NO_BREAKDOWN: "The parts are not shown.",
    DoubtKind.PARTS_EXCEED: "The parts do not add up.",
    DoubtKind.LEFT_BEHIND: "Release it in close(). The next point began with new processes.",
    DoubtKind.QUICK: "Another run may differ much.",
    DoubtKind.SHORT: "Raise measure.max_seconds.",
    DoubtKind.FEW_SAMPLES: "Raise measure.max_seconds.",
    DoubtKind.UNSTEADY: "Measure several rounds.",
    DoubtKind.TOO_FEW_STEPS: "Raise measure.seconds: "
    f"{MIN_LEVEL_STEPS} steps are needed, warm-up included.",
    DoubtKind.WIDE: "Raise measure.max_seconds.",
}


_WORDS: Mapping[DoubtKind, Callable[[Doubt, PointRow], str]] = {
    DoubtKind.IMPOSSIBLE: _impossible,
    DoubtKind.OTHER_GRADIENTS: _other_gradients,
    DoubtKind.BATCH_NORM: _batch_norm,
    DoubtKind.OTHER_PRECISION: _other_precision,
    DoubtKind.EMULATED_PRECISION: _emulated_precision,
    DoubtKind.MISSING_RANKS: _missing_ranks,
    DoubtKind.HOST_CLOCK: _host_clock,
    DoubtKind.NOT_ALONE: _not_alone,
    DoubtKind.BUSY_CORES: _busy_cores,
    DoubtKind.UNKNOWN_USERS: _unknown_users,
    DoubtKind.SHARED_NODE: _shared_node,
    DoubtKind.THROTTLED: _throttled,
    DoubtKind.CROWDED: _crowded,
    DoubtKind.OTHER_CLOCKS: _other_clocks,
    DoubtKind.OTHER_KERNELS: _other_kernels,
    DoubtKind.SLOW_RANK: _slow_rank,
    DoubtKind.LATE_IN_TURN: _late_in_turn,
    DoubtKind.HOST_BOUND: _host_bound,
    DoubtKind.ALLOCATOR_RETRIES: _allocator_retries,
    DoubtKind.DEVICE_ALLOCS: _device_allocs,
    DoubtKind.STALLS: _stalls,
    DoubtKind.ROUND_FAILED: _round_failed,
    DoubtKind.SCRIPT_ENDED: _script_ended,
    DoubtKind.NO_THROUGHPUT: _no_throughput,
    DoubtKind.NO_BREAKDOWN: _no_breakdown,
    DoubtKind.PARTS_EXCEED: _parts_exceed,
    DoubtKind.NO_COLLECTIVES: _no_collectives,
    DoubtKind.CHECK_FAILED: _check_failed,
    DoubtKind.NOT_COMPARED_GRADIENTS: _not_compared_gradients,
    DoubtKind.NOT_PROFILED: _not_profiled,
    DoubtKind.LEFT_BEHIND: _left_behind,
    DoubtKind.EMULATED: _emulated,
    DoubtKind.QUICK: _quick,
    DoubtKind.SHORT: _short_timing,
    DoubtKind.FEW_SAMPLES: _few_samples,
    DoubtKind.UNSTEADY: _unsteady,
    DoubtKind.TOO_FEW_STEPS: _too_few_steps,
    DoubtKind.WIDE: _wide,
    DoubtKind.BASE_UNSTEADY: _base_unsteady,
}
