"""The words of doubts, as `raybench.records.doubts` has their kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import Doubt, DoubtKind
from raybench.report import formatting
from raybench.report.formatting import counted
from raybench.results.breakdown import write_time
from raybench.results.tables import PointRow
from raybench.stats.outliers import NEARLY_ALL

# The marks in tables, in their order there, each with its word and its meaning.
MARKS = {
    "u": ("unsteady", "the level of the step time still changes"),
    "w": ("wide", "the samples of a start leave more than ±10 % open"),
    "h": ("host-bound", "the device waits for the host"),
    "t": ("throttled", "the clocks were limited by heat or a fault"),
    "s": ("one rank is slower than the others", ""),
    "c": ("crowded", "CPU workers share cores"),
    "n": ("not alone", "something else used its devices or nodes at the same time"),
    "q": ("quick", "a short look instead of seconds"),
    "b": ("no breakdown", "the parts exceed the step by more than 10 %"),
}
# What value, limit and subject of each kind are.
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
# Doubts that stand in brackets behind a number, in their order there.
_SHORT = {
    DoubtKind.UNSTEADY: "unsteady",
    DoubtKind.WIDE: "wide",
    DoubtKind.THROTTLED: "throttled",
    DoubtKind.CROWDED: "crowded",
    DoubtKind.NOT_ALONE: "not alone",
    DoubtKind.BUSY_CORES: "not alone",
    DoubtKind.SHARED_NODE: "not alone",
    DoubtKind.QUICK: "quick",
}


def mark_words(mark: str) -> str:
    """Return what a mark means, as `wide, the samples of a start leave more than ±10 % open`."""
    return ", ".join(filter(None, MARKS[mark]))


def short_doubts(row: PointRow) -> tuple[str, ...]:
    """Return the doubts about times and rates in a word each, as ("wide", "quick"); () for none.

    "against an unsteady point" is last, unless the point itself is unsteady.
    """
    kinds = {doubt.kind for doubt in row.doubts or ()}
    words = list(dict.fromkeys(word for kind, word in _SHORT.items() if kind in kinds))
    if DoubtKind.BASE_UNSTEADY in kinds and DoubtKind.UNSTEADY not in kinds:
        words.append("against an unsteady point")
    return tuple(words)


def doubt_words(doubt: Doubt, row: PointRow) -> str:
    """Return a doubt about a point as a sentence without a full stop."""
    return _WORDS[doubt.kind](doubt, row)


def drift_words(doubt: Doubt, ranks: str) -> str:
    """Return the sentence on a drift of the machine. ranks: `GPUs` or `workers`."""
    drift = doubt.value or 0.0
    change = "longer" if drift > 0 else "less"
    return (
        f"{doubt.subject} {ranks}: at the end of the block the control took "
        f"{abs(drift):.1%} {change} than at first: the machine drifts; speed-ups are corrected for "
        "it"
    )


def _impossible(doubt: Doubt, row: PointRow) -> str:
    value, limit, model = doubt.value or 0.0, doubt.limit or 0.0, row.device_name
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    count = (row.iterations or 0) * (row.inner_iterations or 1)
    speed_up = ""
    if isinstance(row, ScaledRow):
        speed_up = f"speed-up {formatting.ratio(row.speed_up)} on {row.world_size} devices, "
    texts = {
        "efficiency": f"{speed_up}efficiency {value:.0%}; likeliest the baseline was slowed, or "
        "steps are counted that did not run",
        "items": f"{value:,.0f} samples a step, of a batch of {limit:,.0f}; likeliest samples are "
        "counted that no iteration finished",
        "iterations": f"{count:,.0f} iterations of {step_ms:.3g} ms take {value:,.0f} s, and all "
        f"of it took {limit:,.0f} s; likeliest iterations are counted that did not run",
        "mfu_pct": f"MFU {value:.0f}%; likeliest operations are counted that did not run, or the "
        "peak is that of another device or precision",
        "achieved_tflops_per_device": f"{value:,.0f} TFLOP/s, more than large {row.precision} "
        f"products reach on {model} ({limit:,.0f}); likeliest operations are counted that did not "
        "run, or it ran in another precision",
        "memory_gb_s": f"{value:,.0f} GB/s of memory, more than the triad reaches on {model} "
        f"({limit:,.0f}); likeliest bytes are counted that stay in a cache",
        "busbw_gb_s": f"{value:,.0f} GB/s of bus bandwidth, more than a copy over the links "
        f"reaches on {model} ({limit:,.0f}); likeliest the message or the factor is counted wrong",
    }
    return f"cannot be: {texts[doubt.subject]}"


def _other_gradients(doubt: Doubt, row: PointRow) -> str:
    # The tables hold NaN as null.
    difference = "NaN" if doubt.value is None else f"{doubt.value:.1%}"
    if row.share_by_rank:
        return (
            f"the gradients differ from those of one process by {difference}: is the loss "
            "multiplied by context.loss_weight?"
        )
    return (
        "the gradients differ from those of one process over the samples of all ranks by "
        f"{difference}"
    )


def _batch_norm(_doubt: Doubt, _row: PointRow) -> str:
    return (
        "BatchNorm's statistics are those of each rank's own samples: with shares of different "
        "size the gradients are not those of one process; take SyncBatchNorm or GroupNorm"
    )


def _other_precision(doubt: Doubt, row: PointRow) -> str:
    return (
        f"precision {row.precision} asked, but fp32 arithmetic was {doubt.subject} after the last "
        "step"
    )


def _emulated_precision(doubt: Doubt, row: PointRow) -> str:
    if row.precision == "tf32":
        return f"precision tf32 asked, but {doubt.subject} has no TF32: the numbers are fp32's"
    return f"precision bf16 asked, but {doubt.subject} emulates bfloat16"


def _missing_ranks(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"the script's process group has {doubt.value:.0f} of {doubt.limit:.0f} ranks: each may "
        "have trained alone"
    )


def _host_clock(_doubt: Doubt, _row: PointRow) -> str:
    return (
        "the parameters of the script's optimizer are not on a GPU: steps are timed by the host's "
        "clock"
    )


def _not_alone(doubt: Doubt, _row: PointRow) -> str:
    return f"not alone: {doubt.subject}"


def _busy_cores(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"not alone: other processes kept {doubt.value:.2g} of {doubt.limit:.0f} processors busy "
        f"on {doubt.subject}"
    )


def _unknown_users(doubt: Doubt, _row: PointRow) -> str:
    return f"who else used {doubt.subject} is not known: its agent does not answer"


def _shared_node(doubt: Doubt, _row: PointRow) -> str:
    return f"shared node: {doubt.subject}"


def _throttled(doubt: Doubt, _row: PointRow) -> str:
    reasons = doubt.subject or "reason unknown"
    share = "" if doubt.value is None else f" in {doubt.value:.0%} of the samples"
    return f"clocks were limited{share}: {reasons}"


def _crowded(doubt: Doubt, _row: PointRow) -> str:
    cores = counted(round(doubt.limit or 0), "core")
    return f"{doubt.value:.0f} CPU workers share {cores} of {doubt.subject}"


def _other_clocks(doubt: Doubt, _row: PointRow) -> str:
    part = "is due to them" if (doubt.value or 0.0) > 1 else "is lost by them"
    return (
        f"SM clocks are {formatting.ratio(doubt.value)} times those of the baseline point, by the "
        f"power cap; at most so much of the speed-up {part}"
    )


def _other_kernels(doubt: Doubt, _row: PointRow) -> str:
    return f"attention by {doubt.subject}: speed-ups are of the kernels too"


def _slow_rank(doubt: Doubt, row: PointRow) -> str:
    # Upper bound: the excess of the rank. Communication that runs behind the excess lowers the
    # cost, by the part of `comm_ms` that is not exposed.
    step_ms, exposed_ms = row.step_ms_p50 or 0.0, row.comm_exposed_ms
    excess_ms, device_ms = row.straggler_ms or 0.0, row.straggler_device_ms
    most_ms = (doubt.value or 0.0) * step_ms
    is_known = row.comm_ms is not None and exposed_ms is not None
    hidden_ms = max(0.0, (row.comm_ms or 0.0) - (exposed_ms or 0.0)) if is_known else 0.0
    least_ms = max(0.0, most_ms - hidden_ms)
    cost = write_time(*([] if least_ms > 0.995 * most_ms else [least_ms]), most_ms)
    if row.device_type == "cpu":
        where = "host"
    elif device_ms is None:
        where = "device or host"
    elif device_ms >= NEARLY_ALL * excess_ms:
        where = "device"
    elif excess_ms - device_ms >= NEARLY_ALL * excess_ms:
        where = "host"
    else:
        where = f"device {write_time(device_ms)}, host {write_time(excess_ms - device_ms)}"
    whose = "the other's" if row.world_size == 2 else "the others'"
    return (
        f"{doubt.subject} is slower: its own step takes {write_time(excess_ms)} longer than "
        f"{whose} ({where}), which costs {cost} of {write_time(step_ms)}"
    )


def _late_in_turn(doubt: Doubt, row: PointRow) -> str:
    late = _part_of_step(doubt, row)
    return f"the ranks are late in turn, which costs up to {late}"


def _host_bound(doubt: Doubt, row: PointRow) -> str:
    return f"host-bound: the device idles for {_part_of_step(doubt, row)}"


def _part_of_step(doubt: Doubt, row: PointRow) -> str:
    """Write `0.12 ms of 1.5 ms`: the share of the step that is the value of a doubt."""
    step_ms = row.step_ms_p50 or 0.0
    return f"{write_time((doubt.value or 0.0) * step_ms)} of {write_time(step_ms)}"


def _allocator_retries(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"the timed steps include {doubt.value:.0f} retries of the allocator, which had to give "
        "back what it kept: memory is short, take a smaller batch"
    )


def _device_allocs(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"the timed steps include {doubt.value:.0f} calls of cudaMalloc: memory had not settled, "
        "warm up for longer"
    )


def _stalls(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"some steps are much longer: the mean, which the rates follow, is {doubt.value:.1%} above "
        "the median"
    )


def _round_failed(doubt: Doubt, _row: PointRow) -> str:
    return f"round {doubt.value:.0f} ended {doubt.subject}"


def _script_ended(doubt: Doubt, _row: PointRow) -> str:
    return (
        "the script ended by itself before enough was measured: its last "
        f"{doubt.value:.0f} iterations are timed, and the {doubt.limit:.0f} before them warm-up; "
        "let it make more steps"
    )


def _no_throughput(_doubt: Doubt, _row: PointRow) -> str:
    return "no throughput: the workload does not set items_per_step"


def _no_breakdown(doubt: Doubt, row: PointRow) -> str:
    step_ms = (row.parts_step_ms or row.step_ms_p50) or 0.0
    return (
        f"no breakdown: the parts come to {write_time((doubt.value or 0.0) * step_ms)}, the step "
        f"takes {write_time(step_ms)}; the instrumented steps were slower than the timed ones"
    )


def _parts_exceed(doubt: Doubt, row: PointRow) -> str:
    step_ms = row.step_ms_p50 or 0.0
    return (
        f"the parts exceed the step by {write_time((doubt.value or 0.0) * step_ms)}: without "
        f"communication the step takes {write_time(row.local_step_ms or 0.0)}, with it "
        f"{write_time(step_ms)}"
    )


def _no_collectives(_doubt: Doubt, _row: PointRow) -> str:
    return "no breakdown on several ranks: no collective of torch.distributed was seen in a step"


def _check_failed(doubt: Doubt, _row: PointRow) -> str:
    return f"failed after the timed steps: {doubt.subject}"


def _not_compared_gradients(doubt: Doubt, _row: PointRow) -> str:
    return f"check_gradients: workload {doubt.subject} cannot compare its gradients"


def _not_profiled(_doubt: Doubt, _row: PointRow) -> str:
    return "a script is not profiled"


def _left_behind(doubt: Doubt, _row: PointRow) -> str:
    return (
        f"the workload left {doubt.subject} behind: the next point gets new processes; end or undo "
        "it in close()"
    )


def _emulated(doubt: Doubt, row: PointRow) -> str:
    by = "extra compute" if row.slow_by == "compute" else "fewer multiprocessors"
    return (
        f"{doubt.subject} emulates a slower device by {by}: {doubt.limit:g} of its own speed "
        f"asked, {doubt.value:.3f} measured"
    )


def _quick(doubt: Doubt, _row: PointRow) -> str:
    return "quick" if doubt.value is None else f"quick: {doubt.value:.2g} s timed"


def _short(doubt: Doubt, _row: PointRow) -> str:
    return f"timed for {doubt.value:.2g} s of the requested {doubt.limit:g} s"


def _few_samples(doubt: Doubt, _row: PointRow) -> str:
    return f"{doubt.value:.0f} of {doubt.limit:.0f} iterations timed"


def _unsteady(doubt: Doubt, _row: PointRow) -> str:
    after = "" if doubt.value is None else f" after {doubt.value:.0f} iterations of warm-up"
    return f"step time changes its level still{after}"


def _too_few_steps(_doubt: Doubt, _row: PointRow) -> str:
    return "too few steps to tell whether their time is steady"


def _wide(doubt: Doubt, _row: PointRow) -> str:
    half_width = doubt.value or 0.0
    return f"step time is known to ±{'>100%' if half_width >= 1 else f'{half_width:.1%}'} only"


def _base_unsteady(_doubt: Doubt, _row: PointRow) -> str:
    return "the baseline point is unsteady"


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
    DoubtKind.SHORT: _short,
    DoubtKind.FEW_SAMPLES: _few_samples,
    DoubtKind.UNSTEADY: _unsteady,
    DoubtKind.TOO_FEW_STEPS: _too_few_steps,
    DoubtKind.WIDE: _wide,
    DoubtKind.BASE_UNSTEADY: _base_unsteady,
}
