"""Where the time of a step goes: instrumented steps, run after the timed steps.

`break_down` runs these steps:

1. steps with timed regions (`_time_regions`);
2. on a GPU, steps timed by the host's clock (`time_by_wall_clock`);
3. on a GPU, steps that show what the peak of memory consists of (`marks.watch_peak`);
4. with peers: steps with timed collectives of gradients, by a hook of DDP (`_time_gradients`);
5. with peers: a step whose collectives are counted while local copies replace them;
6. steps without communication, on a GPU also queued beforehand (`_time_local_steps`).

These steps use only events and hooks. A profiler would tell more, but after CUPTI was in use the
process launches kernels more slowly (pytorch#144455).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from raybench.conversion import NS_PER_MS
from raybench.errors import brief
from raybench.measure.collectives import CollectiveCall, LocalCopies, add_up, replace_collectives
from raybench.measure.instruments import (
    Step,
    Timer,
    align_ranks,
    any_rank,
    loop_step,
    max_over_ranks,
    no_garbage_collection,
)
from raybench.measure.marks import (
    BucketMarks,
    OptimizerMarks,
    RegionMarks,
    comm_ms,
    elapsed_ms,
    make_marker,
    tail_ms,
    watch_peak,
)
from raybench.records.doubts import Doubt, DoubtKind, NotMeasured
from raybench.records.measurement import Breakdown, PeakParts, RegionTime
from raybench.stats.outliers import MARK_ERRORS, MARK_SHARE, median_error
from raybench.workloads.base import Context, Workload
from raybench.workloads.wall_clock import time_by_wall_clock

# Sets a communication hook for the models of a workload; None removes the hook.
SetHook = Callable[[Any], None]
# Makes a context in which a block of steps runs.
BlockContext = Callable[[], AbstractContextManager[None]]

# Columns of `points` that come from step times of a `Breakdown`.
_TIME_COLUMNS = (
    "local_step_ms",
    "compute_ms",
    "comm_ms",
    "comm_exposed_ms",
    "unexplained_ms",
    "straggler_ms",
    "wait_ms",
    "optimizer_ms",
    "host_gap_ms",
)
_PEAK_COLUMNS = tuple(f"mem_{field.name}" for field in fields(PeakParts))
# `Breakdown.methods` of columns that need steps with timed reductions of gradients.
REDUCTION_METHODS = {
    "comm_ms": "each bucket of gradients from ready to reduced, minimum over ranks",
    "comm_exposed_ms": "step less the slowest rank's step with DDP's noop_hook, at most comm_ms",
    "straggler_ms": "largest local step of a rank less the lower median of the others'",
    "wait_ms": "last gradient ready to last one reduced, less the minimum over ranks",
    "slowest_rank": "its local step is longer than the others'",
}
# `Breakdown.methods` if no hook of DDP can time the reductions.
_METHODS_WITHOUT_HOOK = {
    **{name: REDUCTION_METHODS[name] for name in ("straggler_ms", "slowest_rank")},
    "comm_exposed_ms": "step less the slowest rank's step with local copies for collectives",
}
_TRAFFIC_METHODS = dict.fromkeys(
    ("comm_calls", "comm_bytes"), "counted in a step with local copies"
)
PLAIN_STEP = "the step as it is"
_UNEXPLAINED_METHOD = {"unexplained_ms": "step less local_step_ms and comm_exposed_ms"}
_QUEUED_METHODS = {
    "compute_ms": "device's time for the local step, queued beforehand, less optimizer_ms",
    "optimizer_ms": "CUDA events around Optimizer.step, queued beforehand",
    "host_gap_ms": "local step less the same step queued beforehand",
}
_PEAK_METHOD = "torch's allocator and what modules and optimizers hold, in a step that is watched"

# Untimed samples before each block.
_LEAD_IN_SAMPLES = 2
# Fewer samples have no spread.
_SHORTEST_BLOCK = 3
# Steps that the host issues one at a time to an idle device, to learn how long it needs for one.
_SINGLE_STEPS = 5
# A host that issues a step in less than this share of its duration stays ahead of the device.
_AHEAD_SHARE = 0.75
# Hold the device back longer than needed, because the time of the host varies.
_HOLD_MARGIN, _LONGEST_HOLD_MS = 1.5, 1000.0
# Cycles of `torch.cuda._sleep`, a few ms, by which to calibrate its clock.
_CALIBRATION_CYCLES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How many samples of each kind of step a breakdown times."""

    # Timed samples of most kinds of steps, at least one.
    samples: int
    # Upper bound for samples without communication, which run until ranks can be distinguished.
    most_local_samples: int = 0
    # Steps in each sample.
    inner: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRunner:
    """Runs instrumented steps of a workload."""

    workload: Workload
    timer: Timer
    context: Context
    extent: Extent

    def time_block(
        self, loop: Step, samples: int, block_context: BlockContext = nullcontext
    ) -> list[float]:
        """Run samples, two untimed samples first, and return their ms per step. Collective."""
        align_ranks(self.context.device)
        with block_context():
            block = self.timer.time_block(
                loop, samples, self.context.parts, lead_in=_LEAD_IN_SAMPLES
            )
        return [ns / self.extent.inner / NS_PER_MS for ns in block.step_ns]

    def time_marked(self, marks: RegionMarks | BucketMarks) -> list[float]:
        """Run `extent.samples` samples and return their ms per step. Collective.

        The marks contain the untimed steps, too; the timed steps are at the end.
        """

        def step() -> None:
            self.workload.step()
            marks.end_step()

        step()  # not timed: the first step with new hooks may take longer
        return self.time_block(loop_step(step, self.extent.inner), self.extent.samples)


def break_down(workload: Workload, timer: Timer, context: Context, extent: Extent) -> Breakdown:
    """Run instrumented steps, and return where time and memory go. Collective.

    Call this after a step, because regions are timed only if a step has entered one. Afterwards the
    weights of the ranks differ, and models with a hook of `hook_setter` reduce no gradients.

    Args:
        extent: how many samples of each kind of step to time.
    """
    device, on_gpu = context.device, context.device.type == "cuda"
    if context.cuda_graph:
        regions_column = ("regions",) if context.regions.are_used else ()
        columns = (*_TIME_COLUMNS, *_PEAK_COLUMNS, *regions_column)
        return all_not_measured(NotMeasured.CUDA_GRAPH, columns)
    runner = _StepRunner(workload=workload, timer=timer, context=context, extent=extent)
    peak = None
    with no_garbage_collection():
        # Time regions first, because later steps differ from the timed steps.
        regions, region_methods = _time_regions(runner)
        if on_gpu:
            peak = watch_peak(workload.step, device)
        times = _time_compute_and_comm(runner)

    # Say how each value was measured, or why it was not.
    methods, not_measured = {**times.methods, **region_methods}, dict(times.not_measured)
    if peak:
        methods |= dict.fromkeys(_PEAK_COLUMNS, _PEAK_METHOD)
    else:
        why = NotMeasured.NO_MODEL if on_gpu else NotMeasured.MEMORY_OF_CPU
        not_measured |= dict.fromkeys(_PEAK_COLUMNS, why)
    return replace(times, regions=regions, peak=peak, methods=methods, not_measured=not_measured)


def all_not_measured(why: NotMeasured, columns: Sequence[str] = _TIME_COLUMNS) -> Breakdown:
    """Return a breakdown in which nothing was measured, for one reason."""
    return Breakdown(not_measured=dict.fromkeys(columns, why))


def _time_regions(runner: _StepRunner) -> tuple[tuple[RegionTime, ...], dict[str, str]]:
    """Return the median time of each region, and `Breakdown.methods` for them. Collective."""
    context = runner.context
    times: tuple[RegionTime, ...] = ()
    # If any rank has regions, all ranks run the steps, because steps may communicate.
    if any_rank(context.regions.are_used, context.device):
        marks = RegionMarks(context.device)
        with context.regions.timed_by(marks.region):
            steps_ms = runner.time_marked(marks)
        steps = len(steps_ms) * runner.extent.inner
        times = marks.take(steps, statistics.median(steps_ms))

    # Phrases for the method of column `regions`.
    phrases = []
    if context.regions.are_used:
        clock = "CUDA events" if context.device.type == "cuda" else "host clock"
        phrases.append(
            f"{clock} around the `with` block, in steps that are otherwise as the timed ones"
        )
    if context.regions.compiled:
        names = ", ".join(sorted(map(str, context.regions.compiled)))
        phrases.append(f"unknown where they are inside code for torch.compile: {names}")
    methods = {"regions": "; ".join(phrases)} if phrases else {}
    return times, methods


def _time_compute_and_comm(runner: _StepRunner) -> Breakdown:
    """Return the times of computation and communication. Collective."""
    workload, context = runner.workload, runner.context
    if context.world_size == 1:
        return _time_local_steps(runner, workload.step, PLAIN_STEP)
    if workload.message_bytes is not None:  # the whole step is one collective
        return all_not_measured(NotMeasured.COMMUNICATION)

    # Time the collectives of gradients, if a hook of DDP can see them.
    set_hook = hook_setter(workload, context)
    if set_hook is None:
        unknown = dict.fromkeys(("comm_ms", "wait_ms"), NotMeasured.NOT_ONLY_GRADIENTS)
        hooked = Breakdown(methods=_METHODS_WITHOUT_HOOK, not_measured=unknown)
        local_method = "step with local copies in place of collectives"
    else:
        local_method = "step with DDP's noop_hook, and local copies in place of other collectives"
        hooked = _time_gradients(runner, set_hook)

    errors: list[str] = []

    # Call this function while local copies replace the results of collectives.
    def step_without_peers() -> None:
        # The step may fail, because it lacks the data of the other ranks. Then skip later steps
        # instead of raising, because the other ranks go on and must not wait for this rank.
        if not errors:
            try:
                workload.step()
            except Exception as error:
                errors.append(brief(error))

    # Count the collectives of the second step, because the first step may have additional ones.
    calls: list[CollectiveCall] = []
    align_ranks(context.device)
    with replace_collectives(LocalCopies(calls)):
        step_without_peers()
        calls.clear()
        step_without_peers()
    traffic = () if errors else add_up(calls)
    if not any_rank(bool(traffic or errors), context.device):
        return all_not_measured(NotMeasured.NO_COLLECTIVES)

    # Time steps without communication.
    if set_hook is not None:
        set_hook(noop_hook)
    block_context = partial(replace_collectives, LocalCopies())
    local = _time_local_steps(runner, step_without_peers, local_method, block_context)
    if any_rank(bool(errors), context.device):
        error = errors[0] if errors else "on another rank"
        failed = Doubt(kind=DoubtKind.CHECK_FAILED, subject=f"step without its peers: {error}")
        has_traffic = any_rank(bool(traffic), context.device)
        # If no rank could count collectives, the columns of traffic are not measured either.
        columns = _TIME_COLUMNS if has_traffic else (*_TIME_COLUMNS, *_TRAFFIC_METHODS)
        return replace(
            all_not_measured(NotMeasured.FAILS_ALONE, columns),
            traffic=traffic,
            methods=_TRAFFIC_METHODS if has_traffic else {},
            doubts=(failed,),
        )
    workload.step()
    methods = {**local.methods, **hooked.methods, **_TRAFFIC_METHODS}
    not_measured = {**local.not_measured, **hooked.not_measured}
    return replace(
        hooked,
        local_ms=local.local_ms,
        device_ms=local.device_ms,
        optimizer_ms=local.optimizer_ms,
        traffic=traffic,
        methods=methods,
        not_measured={name: why for name, why in not_measured.items() if name not in methods},
    )


def _time_gradients(runner: _StepRunner, set_hook: SetHook) -> Breakdown:
    """Time steps and their reductions of gradients, by a hook of DDP. Collective."""
    marks = BucketMarks(runner.context.device)
    set_hook(marks.hook)
    # Do not align the ranks before each step: their hosts would leave the barrier at different
    # times.
    hooked_ms = runner.time_marked(marks)
    # The timed steps are the last steps.
    timed_steps = len(hooked_ms) * runner.extent.inner
    steps_buckets = marks.take()[-timed_steps:]
    # A step without buckets reduced no gradients.
    if not all(steps_buckets):
        return all_not_measured(NotMeasured.NO_GRADIENTS_REDUCED, tuple(REDUCTION_METHODS))
    return Breakdown(
        hooked_ms=tuple(hooked_ms),
        comm_ms=tuple(comm_ms(buckets) for buckets in steps_buckets),
        # From the last gradient to the end of the last reduction.
        tail_ms=tuple(tail_ms(buckets) for buckets in steps_buckets),
        methods=REDUCTION_METHODS,
    )


def hook_setter(workload: Workload, context: Context) -> SetHook | None:
    """Return the function that sets a communication hook for gradients; None if there is none."""
    if workload.set_comm_hook is not None:
        return workload.set_comm_hook
    return None if context.replicas.why_no_hook() else context.replicas.set_comm_hook


def _time_local_steps(
    runner: _StepRunner, step: Step, local_method: str, block_context: BlockContext = nullcontext
) -> Breakdown:
    """Return a breakdown with local_ms, device_ms and optimizer_ms. Collective.

    Args:
        step: a step without communication inside `block_context`.
        local_method: description of the step, for `methods`.
    """
    context, extent = runner.context, runner.extent
    with block_context():
        step()
    # A sample is one loop of `extent.inner` steps.
    loop = loop_step(step, extent.inner)
    optimizer = OptimizerMarks(context.device)
    device_ms: float | None = None
    methods = {"local_step_ms": local_method, **_UNEXPLAINED_METHOD}
    not_measured: dict[str, NotMeasured] = {}

    # On a GPU also time loops that are queued together: without gaps of the host they take as long
    # as the device works. `time_queued_steps` fills `optimizer`, too. Run half of the local steps
    # before the queued steps and half after them, because the speed of the host may change.
    if context.device.type == "cuda":
        early_ms = _time_until_precise(runner, loop, block_context)
        loop_ms = extent.inner * statistics.median(chain(*early_ms))
        device_ms = time_queued_steps(loop, optimizer, loop_ms, extent.samples, block_context)
        late_ms = [runner.time_block(loop, len(block), block_context) for block in early_ms]
        if device_ms is not None:
            methods |= _QUEUED_METHODS
        else:
            not_measured |= dict.fromkeys(_QUEUED_METHODS, NotMeasured.HOST_TOO_SLOW)
    else:

        def marked_loop() -> None:
            loop()
            optimizer.end_step()

        with optimizer.watching():
            early_ms = _time_until_precise(runner, marked_loop, block_context)
            late_ms = [
                runner.time_block(marked_loop, len(block), block_context) for block in early_ms
            ]
        methods |= {
            "compute_ms": "local step less data_ms and optimizer_ms",
            "optimizer_ms": "host clock around Optimizer.step",
        }
        not_measured["host_gap_ms"] = NotMeasured.GAP_OF_CPU

    # The optimizers' time in each loop, None for a loop without optimizer; empty if no loop was
    # queued, because the host is too slow.
    loops_ms = optimizer.take()
    known_ms = [ms for ms in loops_ms if ms is not None]
    optimizer_ms = statistics.median(known_ms) / extent.inner if known_ms else None
    if loops_ms and optimizer_ms is None:
        methods.pop("optimizer_ms", None)
        not_measured["optimizer_ms"] = NotMeasured.NO_OPTIMIZER
    return Breakdown(
        local_ms=tuple(tuple(block_ms) for block_ms in (*early_ms, *late_ms)),
        device_ms=None if device_ms is None else device_ms / extent.inner,
        optimizer_ms=optimizer_ms,
        methods=methods,
        not_measured=not_measured,
    )


def _time_until_precise(
    runner: _StepRunner, loop: Step, block_context: BlockContext
) -> list[list[float]]:
    """Return the ms per step of each sample (one call of `loop`), by block. Collective.

    With several ranks blocks follow until each rank's median is precise enough to find a slow rank.
    """
    context, extent = runner.context, runner.extent
    # Time half of the samples; the caller times the other half later.
    block_samples = max(_SHORTEST_BLOCK, math.ceil(extent.samples / 2))
    most_samples = math.ceil(extent.most_local_samples / 2) if context.world_size > 1 else 0
    blocks = [runner.time_block(loop, block_samples, block_context)]
    while sum(map(len, blocks)) < most_samples:
        steps_ms = list(chain(*blocks))
        # The smallest difference between two ranks that such medians can show.
        detectable_ms = MARK_ERRORS * math.sqrt(2) * median_error(steps_ms)
        # A slow rank's step is longer by more than this.
        threshold_ms = MARK_SHARE * statistics.median(steps_ms)
        # Half of the threshold, because blocks of one rank may differ, too.
        is_imprecise = detectable_ms > threshold_ms / 2
        if not any_rank(is_imprecise, context.device):
            break
        blocks.append(runner.time_block(loop, block_samples, block_context))
    return blocks


def time_queued_steps(
    step: Step,
    optimizer: OptimizerMarks,
    local_ms: float,
    steps: int,
    block_context: BlockContext = nullcontext,
) -> float | None:
    """Return the median ms of a step on the GPU, without gaps of a slow host. Collective.

    Some gaps stay: after a wait for the device inside a step, and after about 1000 launches, which
    fill the driver's queue.

    Args:
        optimizer: marks each of the `steps`.
        local_ms: duration of a step with the gaps of the host.
        steps: number of steps, above 0.

    Returns:
        None on all ranks if the device of a rank must be held back for more than a second.
    """
    device = torch.device("cuda")
    with block_context():
        # How long the host needs to issue a step while the device is idle.
        issue_ms = time_by_wall_clock(step, _SINGLE_STEPS, torch.cuda.synchronize).unsynced_ms
    # A kernel holds back the device until the host has queued the step. Do this only if needed,
    # because a device that does nothing cools, and then computes faster than in the timed steps.
    hold_ms = 0.0 if issue_ms < _AHEAD_SHARE * local_ms else _HOLD_MARGIN * issue_ms
    # A step may communicate, so all ranks must run the same number of steps.
    (longest_ns,) = max_over_ranks([round(hold_ms * NS_PER_MS)], device)
    if longest_ns > _LONGEST_HOLD_MS * NS_PER_MS:
        return None
    mark, spans = make_marker(device), []
    with block_context(), optimizer.watching():
        for _ in range(steps):
            if hold_ms:
                torch.cuda._sleep(round(hold_ms * cycles_per_ms()))  # type: ignore[no-untyped-call]
            start = mark()
            step()
            spans.append((start, mark()))
            optimizer.end_step()
    torch.cuda.synchronize()
    return statistics.median(elapsed_ms(start, end) for start, end in spans)


@cache
def cycles_per_ms() -> float:
    """Return how many cycles `torch.cuda._sleep` counts in a ms, measured once in a process."""
    mark = make_marker(torch.device("cuda"))
    # The first launch of a kernel loads it.
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    start = mark()
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
    end = mark()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / elapsed_ms(start, end)
