"""The recipe of a measurement: build, warm up, time, and repeat.

Before each block the ranks agree on its length, outside the timed region: each rank learns all
durations of the previous block, rank 0 decides by the point's step time and broadcasts its
decision. So all ranks run the same number of collectives.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from raybench.conversion import NS_PER_S
from raybench.errors import add_note, brief
from raybench.hardware.devices import (
    Counters,
    DeviceReading,
    ReadingSpan,
    energy_j,
    is_limited_by_heat,
    seconds_between,
    throttle_reasons,
    wait_until_unlimited,
)
from raybench.job.declarations import shares_work
from raybench.job.model import Measure
from raybench.measure import profiling
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.instruments import (
    EAGER_ITERATIONS,
    TRIAL_REPLAYS,
    InBlock,
    MemoryUse,
    Step,
    Timer,
    align_ranks,
    any_rank,
    broadcast_from_rank_0,
    capture_graph,
    gather_durations,
    join_blocks,
    loop_step,
    max_over_ranks,
    no_garbage_collection,
    per_step,
    workload_stream,
)
from raybench.measure.scripts import ScriptTimer, StepsEndedError, break_down_script
from raybench.measure.stopping import RESTART, StoppingPolicy, TimingProgress
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Breakdown, Measurement, Repetition, Samples, SpanNs
from raybench.stats.summary import step_series
from raybench.workloads.base import (
    Context,
    Workload,
    count_compiled_frames,
    declared_of_step,
    own_metrics,
)
from raybench.workloads.scripts.running import RunningScript
from raybench.workloads.training import gradient_doubt
from raybench.workloads.uneven import Idle

T = TypeVar("T")
# Limits of one block of steps that heat the device.
_HEATING_BLOCK_NS, _MOST_HEATING_STEPS = NS_PER_S, 1000
# Runs a step, and describes which algorithms NCCL chose for its collectives.
NcclChoices = Callable[[Step], tuple[str, ...]]


class _Block(NamedTuple):
    """A block of iterations."""

    # Samples of this rank.
    samples: Samples
    # Durations in ns of each rank, in rank order.
    ranks_ns: list[list[int]]


@dataclass(slots=True, kw_only=True)
class _PointRun:
    """Instruments of a point, and the results of its repeats so far."""

    context: Context
    policy: StoppingPolicy
    timer: Timer | ScriptTimer
    counters: Counters
    memory: MemoryUse
    nccl_choices: NcclChoices
    # Whether this rank has no share of the step.
    is_idle: bool = False
    repetitions: list[Repetition] = field(default_factory=list)
    # Energy of each repeat's timed samples; None: unknown.
    energies_j: list[float | None] = field(default_factory=list)
    # Peaks of allocated and reserved memory in each repeat.
    peaks_bytes: list[tuple[int | None, int | None]] = field(default_factory=list)
    throttle_reasons: dict[str, None] = field(default_factory=dict)
    # Begin and end of each timed block by `time.monotonic_ns`.
    timed_at_ns: list[SpanNs] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    # Other fields of the Measurement, by name.
    fields: dict[str, Any] = field(default_factory=dict)

    def agree(self, decide: Callable[[], int]) -> int:
        """Run `decide` on rank 0 and broadcast the result. Collective."""
        return broadcast_from_rank_0(decide, self.context.device)

    def time_block(self, step: Step, iterations: int, *, lead_in: int = 0) -> Samples:
        """Time a block of iterations on this rank. Collective: all ranks start together.

        Raises:
            StepsEndedError: a script has ended in the block.
        """
        align_ranks(self.context.device)
        return self.timer.time_block(step, iterations, self.context.parts, lead_in=lead_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStart:
    """What the worker knows when a point begins."""

    # Begin of the set-up, by `time.perf_counter`.
    began_s: float
    # A reading since which nothing has limited the device's clocks; None: read the counters now.
    unlimited_since: DeviceReading | None = None
    # Makes a context that surrounds each block of steps.
    in_block: InBlock = nullcontext
    # Runs before each sample and is not timed; a sample is then a single step. On GPUs only.
    flush: Callable[[], None] | None = None


def measure(
    build: Callable[[], Workload],
    context: Context,
    settings: Measure,
    *,
    start: PointStart | None = None,
    profile: bool = False,
    nccl_choices: NcclChoices = lambda _: (),
) -> Measurement:
    """Build, warm up and time the workload for each repeat. Collective.

    Args:
        build: makes a new workload for each repeat; `measure` closes the workload.
        context: the context of the workload.
        settings: section `measure` of the job.
        start: default: the point begins now.
        profile: run the last workload under the profiler, too.
        nccl_choices: runs a step and describes the algorithms that NCCL chose.

    Returns:
        The measurement of this rank. If the gradient check, the breakdown or the profile fails with
        one rank, the measurement has a doubt; with several ranks the error is raised.
    """
    start = start or PointStart(began_s=time.perf_counter())
    run = _PointRun(
        context=context,
        policy=StoppingPolicy(settings=settings),
        timer=Timer(context.device, start.in_block, start.flush),
        counters=Counters(context.device),
        memory=MemoryUse(context.device),
        nccl_choices=nccl_choices,
    )
    setup_s = 0.0
    for repeat in range(settings.repeats):
        # Free the previous workload, cycles included, because it would count in the peak memory of
        # this workload.
        gc.collect()
        context.replicas.forget()
        unlimited_since = start.unlimited_since
        # The caller's reading is from before the point, so only the first repeat uses it.
        if repeat > 0 or unlimited_since is None:
            unlimited_since = run.counters.read(with_energy=False)
        with workload_stream(context), _closing(build()) as workload:
            wait_until_unlimited(run.counters, unlimited_since, settings.max_seconds)
            if repeat == 0:
                setup_s = time.perf_counter() - start.began_s
            _time_repeat(workload, run)
            if repeat == settings.repeats - 1:
                # Check gradients first, because the breakdown stops their reduction.
                _check_gradients(workload, run)
                with no_garbage_collection():
                    _add_breakdown_and_profile(workload, run, profile)
        del workload
    energies_j = [energy for energy in run.energies_j if energy is not None]
    allocated_peaks = [allocated for allocated, _ in run.peaks_bytes]
    reserved_peaks = [reserved for _, reserved in run.peaks_bytes]
    return Measurement(
        rank=context.rank,
        setup_s=setup_s,
        repetitions=tuple(run.repetitions),
        peak_mem_allocated_bytes=_largest_known(allocated_peaks),
        peak_mem_reserved_bytes=_largest_known(reserved_peaks),
        alloc_retries=run.memory.retries,
        device_allocs=run.memory.device_allocs,
        # Unknown if the energy of one repeat is unknown.
        energy_j=sum(energies_j) if len(energies_j) == len(run.repetitions) else None,
        throttle_reasons=tuple(run.throttle_reasons),
        temperature_c=run.counters.temperature_c() if run.throttle_reasons else None,
        timed_at_ns=tuple(run.timed_at_ns),
        doubts=tuple(run.doubts),
        **run.fields,
    )


def _largest_known(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _time_repeat(workload: Workload, run: _PointRun) -> None:
    """Time one repeat; add its results and fields of the Measurement to the run. Collective."""
    context = run.context
    run.fields |= declared_of_step(workload)
    if shares_work(type(workload)) and run.fields["items_per_step"] is not None:
        # All ranks finish these items together, so give each rank an equal part.
        run.fields["items_per_step"] /= context.world_size
    if isinstance(workload, RunningScript):
        # The script's own process runs and times the steps, and reads its memory.
        run.doubts.extend(workload.doubts(context))
        block_context = run.timer.in_block
        run.timer = run.memory = ScriptTimer(workload, context.device, block_context)
    try:
        # This also adds the energy of the repeat to the run.
        run.repetitions.append(_warm_up_and_time(workload, run))
    except StepsEndedError as error:
        repetition = _repetition_of_ended_script(error, run.policy)
        run.repetitions.append(repetition)
        run.energies_j.append(None)
        timed, warmup = len(repetition.timed.step_ns), len(repetition.warmup.step_ns)
        # This kind of doubt stores the number of warm-up iterations as its limit.
        run.doubts.append(Doubt(kind=DoubtKind.SCRIPT_ENDED, value=timed, limit=warmup))
    run.peaks_bytes.append((run.memory.allocated_bytes, run.memory.reserved_bytes))
    run.fields["workload_metrics"] = own_metrics(workload)


@contextmanager
def _closing(workload: Workload) -> Iterator[Workload]:
    """Yield the workload and close it; an error of the block wins over an error of `close`."""
    try:
        yield workload
    except BaseException as error:
        try:
            workload.close()
        except Exception as close_error:
            add_note(error, f"close() then raised {brief(close_error)}")
        raise
    workload.close()


def _warm_up_and_time(workload: Workload, run: _PointRun) -> Repetition:
    """Return the warm-up samples and timed samples of one repeat. Collective."""
    context, policy = run.context, run.policy
    run.is_idle = isinstance(workload, Idle)
    with no_garbage_collection():
        warmup, compiling_steps = _warm_up(workload, run)
        warmup_ns = _combine_ranks_ns(warmup)
        run.memory.restart()
        with run.memory.paused():
            workload.check()

        # Decide how many steps make a sample.
        if isinstance(run.timer, ScriptTimer):
            inner = 1  # a script runs its own loop
        elif run.timer.flush is not None:
            inner = 1  # a loop would find in the cache what its last step left there
        elif context.cuda_graph:
            # Time replays of one captured step, because they may be far shorter than eager steps.
            with capture_graph(workload, 1, context) as step:
                replays = run.time_block(step, TRIAL_REPLAYS)
                ranks_ns = gather_durations(replays.step_ns, context.device)
            replay_ns = _combine_ranks_ns([_Block(replays, ranks_ns)])
            inner = run.agree(lambda: policy.inner_iterations(replay_ns, graph=True))
        else:
            inner = run.agree(lambda: policy.inner_iterations(warmup_ns, graph=False))

        loop = nullcontext(loop_step(workload.step, inner))
        with capture_graph(workload, inner, context) if context.cuda_graph else loop as step:
            drifted, timed, progress = _time_samples(step, inner, warmup_ns, run)
            with run.memory.paused():
                workload.check()
    return Repetition(
        warmup=join_blocks([block.samples for block in (*warmup, *drifted)]),
        timed=join_blocks([block.samples for block in timed]),
        inner_iterations=inner,
        compiling_steps=compiling_steps,
        settled=policy.has_settled(progress),
    )


def _repetition_of_ended_script(error: StepsEndedError, policy: StoppingPolicy) -> Repetition:
    """Return the steps that a script ran before it ended, and whether their time had settled."""
    repetition = error.repetition
    progress = TimingProgress(
        warmup_ns=repetition.warmup.step_ns, sample_ns=repetition.timed.step_ns
    )
    return replace(repetition, settled=policy.has_settled(progress))


def _warm_up(workload: Workload, run: _PointRun) -> tuple[list[_Block], int]:
    """Return the warm-up blocks, and the number of steps until the last compilation. Collective."""
    context, compiling_steps = run.context, 0
    # Whether heat limited the clocks of any device in the last block.
    is_limited = False
    blocks: list[_Block] = []
    # torch can capture a CUDA graph only after some eager iterations.
    at_least = EAGER_ITERATIONS if context.cuda_graph else 1

    def next_iterations() -> int:
        return run.policy.next_warmup(
            _combine_ranks_ns(blocks), at_least=at_least, is_limited=is_limited
        )

    before = run.counters.read(with_energy=False)
    while iterations := run.agree(next_iterations):
        frames_before = count_compiled_frames()
        samples = run.time_block(workload.step, iterations)
        blocks.append(_Block(samples, gather_durations(samples.step_ns, context.device)))
        if count_compiled_frames() > frames_before:
            compiling_steps = sum(len(block.samples.step_ns) for block in blocks)
        after = run.counters.read(with_energy=False)
        is_limited = any_rank(is_limited_by_heat(before, after), context.device)
        before = after
        # Heat the device once, after the first step of the first repeat.
        if len(blocks) == 1 and not run.repetitions and run.policy.settings.heat_s:
            _heat(workload.step, run)
            before = run.counters.read(with_energy=False)
    return blocks, compiling_steps


def _heat(step: Step, run: _PointRun) -> None:
    """Run untimed steps for `heat_s`. Collective."""
    began_s = time.monotonic()
    step_ns: Sequence[int] = ()

    def next_steps() -> int:
        remaining_ns = NS_PER_S * (run.policy.settings.heat_s + began_s - time.monotonic())
        if remaining_ns <= 0:
            return 0
        if not step_ns:
            return 1  # the first block shows how long a step takes
        # Limit the block, because ranks meet only between blocks, and each step needs a CUDA event.
        block_ns = min(remaining_ns, _HEATING_BLOCK_NS)
        typical_ns = max(1.0, statistics.median(step_ns))
        return min(_MOST_HEATING_STEPS, math.ceil(block_ns / typical_ns))

    while count := run.agree(next_steps):
        step_ns = max_over_ranks(run.time_block(step, count).step_ns, run.context.device)
    run.fields["heated_s"] = time.monotonic() - began_s


def _time_samples(
    step: Step, inner: int, warmup_ns: Sequence[float], run: _PointRun
) -> tuple[list[_Block], list[_Block], TimingProgress]:
    """Return drifted blocks, timed blocks and the last progress. Collective.

    A call of `step` runs `inner` steps, whose mean is a sample. If the timed samples drift, they
    become warm-up, and timing begins again.
    """
    policy, device = run.policy, run.context.device
    drifted: list[_Block] = []
    timed: list[_Block] = []
    # Counts before timing; drifted blocks do not count.
    retries, device_allocs = run.memory.retries, run.memory.device_allocs
    # One entry for each timed block.
    readings: list[ReadingSpan] = []  # the device's counters before and after
    lead_ins: list[int] = []  # number of untimed samples before the timed samples
    spans_ns: list[SpanNs] = []  # begin and end by `time.monotonic_ns`

    def progress() -> TimingProgress:
        return TimingProgress(
            warmup_ns=warmup_ns,
            drifted_ns=_combine_ranks_ns(drifted),
            sample_ns=_combine_ranks_ns(timed),
            inner=inner,
            is_graph=run.context.cuda_graph,
        )

    while count := run.agree(lambda: policy.next_timed(progress())):
        if count == RESTART:
            drifted += timed
            timed.clear()
            readings.clear()
            lead_ins.clear()
            spans_ns.clear()
            run.memory.retries, run.memory.device_allocs = retries, device_allocs
            run.memory.restart()
            continue

        lead_in = policy.lead_in(progress())
        before = run.counters.read()
        begin_ns = time.monotonic_ns()
        with run.memory.counting():
            block = run.time_block(step, count, lead_in=lead_in)
        spans_ns.append((begin_ns, time.monotonic_ns()))
        # A rank without work sleeps, because waiting in NCCL would use energy. Without counters no
        # energy is measured.
        if run.is_idle and before is not None:
            _sleep_while_others_run(lead_in + count, progress().expected_ns, policy.max_block_s)
        samples = per_step(block, inner)
        after = run.counters.read()
        readings.append((before, after))
        lead_ins.append(lead_in)
        # Mark the samples if the device can tell whether its clocks were limited.
        if before and after and after.limited_s:
            is_throttled = bool(throttle_reasons(before, after))
            samples = replace(samples, throttled=(is_throttled,) * count)
        timed.append(_Block(samples, gather_durations(samples.step_ns, device)))

    run.timed_at_ns.extend(spans_ns)
    energy = _energy_of_samples(readings, sum(lead_ins), progress(), is_idle=run.is_idle)
    run.energies_j.append(energy)
    for before, after in readings:
        run.throttle_reasons.update(dict.fromkeys(throttle_reasons(before, after)))
    return drifted, timed, progress()


def _sleep_while_others_run(samples: int, expected_ns: Sequence[float], longest_s: float) -> None:
    """Sleep for the time that the other ranks need for their samples, at most `longest_s`."""
    # Without the sleep NCCL would spin on this device in the next collective, and use energy.
    if expected_ns:
        time.sleep(min(longest_s, samples * statistics.median(expected_ns) / NS_PER_S))


def _energy_of_samples(
    readings: Sequence[ReadingSpan],
    lead_in_samples: int,
    progress: TimingProgress,
    *,
    is_idle: bool,
) -> float | None:
    """Return the joules of the timed samples, without lead-in samples and pauses."""
    total_j = energy_j(readings)
    if total_j is None:
        return None
    if is_idle:
        # Mean power x time of the point's timed samples, because this rank's samples take no time.
        return total_j * progress.timed_s / seconds_between(readings)
    timed_samples = len(progress.sample_ns)
    return total_j * timed_samples / (timed_samples + lead_in_samples)


def _combine_ranks_ns(blocks: Sequence[_Block]) -> Sequence[float]:
    """Return one step time in ns per iteration, from the times of all ranks."""
    if not blocks:
        return ()
    # (ranks, iterations)
    ranks_ns = np.concatenate([block.ranks_ns for block in blocks], axis=1)
    step_ns: list[float] = step_series(list(ranks_ns)).tolist()
    return step_ns


def _check_gradients(workload: Workload, run: _PointRun) -> None:
    """Compare a step's gradients with a single process, if the job asks for it. Collective."""
    if not run.policy.settings.check_gradients:
        return
    if workload.gradient_error is None:
        name = type(workload).__name__
        run.doubts.append(Doubt(kind=DoubtKind.NOT_COMPARED_GRADIENTS, subject=name))
        return
    disabled_by = "measure.check_gradients: false"
    error = _try_check("gradient_error", workload.gradient_error, run, disabled_by)
    run.fields["gradient_error"] = error
    doubt = gradient_doubt(error, run.context.precision)
    if doubt is not None:
        run.doubts.append(doubt)


def _add_breakdown_and_profile(workload: Workload, run: _PointRun, profile: bool) -> None:
    """Add breakdown and profile to the run; the workload cannot be timed afterwards. Collective."""
    # All ranks must run the same number of samples, so decide by the slowest rank. A sample is a
    # step, or a loop of short steps.
    context, last = run.context, run.repetitions[-1]
    slowest_ns = max_over_ranks(last.timed.step_ns, context.device)
    count = run.agree(lambda: run.policy.breakdown_steps(slowest_ns))
    # Local steps run without communication.
    most_local = run.agree(lambda: run.policy.most_local_steps(slowest_ns))
    sample_counts = Extent(
        samples=count, most_local_samples=most_local, inner=last.inner_iterations
    )

    def make_breakdown() -> Breakdown:
        if isinstance(run.timer, ScriptTimer):
            return break_down_script(run.timer, context, sample_counts)
        # Run these steps first, because `break_down` changes how gradients are reduced.
        if context.world_size > 1:
            run.fields["nccl_choices"] = run.nccl_choices(workload.step)
        run.fields["attention_kernels"] = profiling.attention_kernels(workload.step)
        return break_down(workload, run.timer, context, sample_counts)

    breakdown: Breakdown | None = None
    if run.policy.settings.breakdown:
        breakdown = _try_check("breakdown", make_breakdown, run, "measure.breakdown: false")
        run.doubts.extend(breakdown.doubts if breakdown else ())
    if profile and isinstance(workload, RunningScript):
        run.doubts.append(Doubt(kind=DoubtKind.NOT_PROFILED))
    elif profile:
        run.fields["profile"] = _try_check(
            "profile", lambda: profiling.profile(workload, context, count), run, "no --profile"
        )
    run.fields["breakdown"] = breakdown


def _try_check(name: str, check: Callable[[], T], run: _PointRun, disabled_by: str) -> T | None:
    """Return the result of a check after the timed steps; if the check fails, add a doubt.

    Args:
        disabled_by: the setting or option that leaves the check out, for the error message.
    """
    try:
        return check()
    except Exception as error:
        # With several ranks the point fails, because other ranks may wait in a collective.
        if run.context.world_size > 1:
            add_note(error, f"in the {name}, after the timed steps; {disabled_by} leaves it out")
            raise
        failed = Doubt(kind=DoubtKind.CHECK_FAILED, subject=f"{name}: {brief(error)}")
        run.doubts.append(failed)
        return None
