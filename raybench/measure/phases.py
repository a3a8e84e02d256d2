"""The recipe of a measurement: build, warm up, time, and do it again for each repeat.

The ranks agree before each block on its length: all learn how long the last one took on each rank,
rank 0 decides by the point's step time and tells the others, outside the timed region, so that all
run the same number of collectives.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd import profiler_legacy

from raybench.hardware.counters import (
    Counters,
    Reading,
    energy_j,
    is_held_back,
    open_counters,
    throttle_reasons,
    wait_until_unlimited,
)
from raybench.job.model import Measure
from raybench.job.registry import shares_work
from raybench.measure import profiling, timing
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.collective_times import with_call_times
from raybench.measure.script_breakdown import break_down_script
from raybench.measure.script_timing import ScriptTimer, StepsEndedError
from raybench.measure.shares import is_other_gradient
from raybench.measure.stopping import (
    AGAIN,
    Course,
    breakdown_steps,
    has_settled,
    inner_iterations,
    lead_in,
    most_local_steps,
    next_timed,
    next_warmup,
)
from raybench.measure.timing import (
    Step,
    Timer,
    align_ranks,
    all_ranks_ns,
    as_rank_0_says,
    join_blocks,
    loop_step,
    make_timer,
    no_garbage_collection,
    on_any_rank,
    per_step,
    slowest_rank_ns,
)
from raybench.records import Breakdown, Measurement, Repetition, Samples, SpanNs
from raybench.records.checked_answers import DECLARED, check_declared, check_metric
from raybench.records.failure_text import add_note, brief
from raybench.records.metric import Metric
from raybench.stats.summary import step_series
from raybench.workloads.base import Context, Workload
from raybench.workloads.replicas import count_compiled_frames
from raybench.workloads.scripts.running_script import RunningScript


class AllocatorCalls:
    """What torch's allocator had to do in the timed blocks; None on a CPU.

    retries: allocations that failed until what the allocator kept was given back. device_allocs:
    calls of cudaMalloc. Both stop the device, and a step in a steady state needs neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_counted = device.type == "cuda"
        self.retries: int | None = 0 if is_counted else None
        self.device_allocs: int | None = 0 if is_counted else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add what is done inside the `with` block."""
        before = self._read()
        yield
        after = self._read()
        if before is not None and after is not None:
            self.retries = (self.retries or 0) + after[0] - before[0]
            self.device_allocs = (self.device_allocs or 0) + after[1] - before[1]

    def _read(self) -> tuple[int, int] | None:
        if self._device.type != "cuda":
            return None
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["num_alloc_retries"], stats["num_device_alloc"]


class PeakMemory:
    """Peak memory of torch's allocator in the timed steps, in bytes; None on a CPU.

    allocated_bytes: without what `forget` leaves out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._reset()

    def read(self) -> None:
        """Take in what was used until now."""
        self._read_reserved()
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            self.allocated_bytes = max(allocated, self.allocated_bytes or 0)

    def forget(self) -> None:
        """Leave out what was allocated since the last look; call it when a warm-up is over.

        DDP makes its buckets anew in the second step. NCCL keeps the first ones until its watchdog,
        which looks ten times a second, has seen the end of what used them: gradients count twice
        for some steps, more or fewer of them from start to start.
        """
        self._read_reserved()
        self._reset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is used inside; what stays allocated counts afterwards."""
        self.read()
        yield
        self._reset()

    def _read_reserved(self) -> None:
        if self._device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.reserved_bytes = max(reserved, self.reserved_bytes or 0)

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


# Runs a step, and describes what NCCL ran for its collectives.
NcclChoices = Callable[[Step], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What the repeats of a point share. energies_j: of their timed phases."""

    context: Context
    settings: Measure
    timer: Timer
    counters: Counters
    memory: PeakMemory | ScriptTimer
    allocator: AllocatorCalls
    nccl_choices: NcclChoices
    repetitions: list[Repetition] = field(default_factory=list)
    energies_j: list[float | None] = field(default_factory=list)
    throttle_reasons: dict[str, None] = field(default_factory=dict)
    timed_at_ns: list[SpanNs] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def measure(
    build: Callable[[], Workload],
    context: Context,
    settings: Measure,
    *,
    began_s: float | None = None,
    profile: bool = False,
    rested: Reading | None = None,
    nccl_choices: NcclChoices = lambda _: (),
) -> Measurement:
    """Build, warm up and time the workload `settings.repeats` times.

    began_s: when the set-up began, by `time.perf_counter`; None: when this is called.
    profile: also run the last workload under the profiler, after all else.
    rested: the device's counters when the work before this ended; None: when this is called.
    Raises what the workload raises, and UsageError where a CUDA graph cannot be had.
    """
    began_s = time.perf_counter() if began_s is None else began_s
    timing.check_device(context)
    session = _Session(
        context=context,
        settings=settings,
        timer=make_timer(context.device),
        counters=open_counters(context.device),
        memory=PeakMemory(context.device),
        allocator=AllocatorCalls(context.device),
        nccl_choices=nccl_choices,
    )
    found: dict[str, Any] = {}
    setup_s = 0.0
    for repeat in range(settings.repeats):
        # The workload before this one, cycles included, must be gone: it would count in the peak
        # memory of this one, and may leave no room for it.
        gc.collect()
        context.replicas.forget()
        rested = session.counters.read() if repeat or rested is None else rested
        with timing.own_stream(context), _closing(build()) as workload:
            wait_until_unlimited(session.counters, rested, settings.max_seconds)
            setup_s = setup_s or time.perf_counter() - began_s
            found = _sizes(workload, context)
            session = _with_its_clock(session, workload)
            _repetition(workload, session)
            found["workload_metrics"] = _own_metrics(workload)
            if repeat == settings.repeats - 1:
                # Before the breakdown, after which gradients are not reduced any more.
                found |= _compare_gradients(workload, session)
                with no_garbage_collection():
                    found |= _explanations(workload, session, profile)
        del workload
    return _measurement(session, setup_s, found)


def _with_its_clock(session: _Session, workload: Workload) -> _Session:
    """Have a script's own process time it: the steps are not of this one."""
    if not isinstance(workload, RunningScript):
        return session
    session.warnings.extend(workload.warnings(session.context))
    timer = ScriptTimer(workload.process, session.context.device)
    nothing = AllocatorCalls(torch.device("cpu"))  # that of this process does nothing for it
    return replace(session, timer=timer, memory=timer, allocator=nothing)


def _measurement(session: _Session, setup_s: float, found: dict[str, Any]) -> Measurement:
    warnings = (*session.warnings, *found.pop("warnings", ()))
    known = [energy for energy in session.energies_j if energy is not None]
    return Measurement(
        rank=session.context.rank,
        setup_s=setup_s,
        repetitions=tuple(session.repetitions),
        peak_mem_allocated_bytes=session.memory.allocated_bytes,
        peak_mem_reserved_bytes=session.memory.reserved_bytes,
        alloc_retries=session.allocator.retries,
        device_allocs=session.allocator.device_allocs,
        energy_j=sum(known) if len(known) == len(session.repetitions) else None,
        throttle_reasons=tuple(session.throttle_reasons),
        timed_at_ns=tuple(session.timed_at_ns),
        warnings=warnings,
        **found,
    )


@contextmanager
def _closing(workload: Workload) -> Iterator[Workload]:
    """Close the workload, if it can be; what it raises then does not hide an earlier error."""
    close = getattr(workload, "close", lambda: None)
    try:
        yield workload
    except BaseException as error:
        try:
            close()
        except Exception as second:
            add_note(error, f"close() then raised {brief(second)}")
        raise
    close()


@dataclass(slots=True)
class _Phase:
    """What was taken so far: this rank's samples, and how long each took on each rank, in ns.

    compiling_steps: until torch.compile was last seen to compile, here.
    """

    blocks: list[Samples] = field(default_factory=list)
    ranks_ns: list[list[int]] = field(default_factory=list)
    compiling_steps: int = 0

    def add(self, block: Samples, device: torch.device) -> None:
        """Take a block on, as all ranks do at this point, outside of what is timed."""
        self.blocks.append(block)
        self.extend(all_ranks_ns(block.step_ns, device))

    def extend(self, ranks_ns: Sequence[Sequence[int]]) -> None:
        self.ranks_ns = self.ranks_ns or [[] for _ in ranks_ns]
        for known_ns, more_ns in zip(self.ranks_ns, ranks_ns, strict=True):
            known_ns.extend(more_ns)

    def point_ns(self) -> Sequence[float]:
        """Return the point's step times."""
        return step_series(self.ranks_ns).tolist() if self.ranks_ns else ()

    def move_to(self, other: _Phase) -> None:
        other.blocks += self.blocks
        other.extend(self.ranks_ns)
        self.blocks, self.ranks_ns = [], []


def _repetition(workload: Workload, session: _Session) -> None:
    try:
        session.repetitions.append(_take_repetition(workload, session))
    except StepsEndedError as ended:
        session.repetitions.append(ended.repetition)
        session.energies_j.append(None)
        session.warnings.append(ended.warning)


def _take_repetition(workload: Workload, session: _Session) -> Repetition:
    context, settings = session.context, session.settings
    with no_garbage_collection():
        warmup = _warm_up(workload, session)
        session.memory.forget()
        _check(workload, session)
        inner = _inner_iterations(workload, warmup, session)
        with _make_timed_step(workload, inner, context) as step:
            timed_phase = _Timing(
                step=step, inner=inner, warmup_ns=warmup.point_ns(), session=session
            )
            timed_phase.run()
            _check(workload, session)
    return Repetition(
        warmup=join_blocks([*warmup.blocks, *timed_phase.drifted.blocks]),
        timed=join_blocks(timed_phase.timed.blocks),
        inner_iterations=inner,
        compiling_steps=warmup.compiling_steps,
        settled=has_settled(timed_phase.course(), settings),
    )


def _warm_up(workload: Workload, session: _Session) -> _Phase:
    """Eager steps, one by one, until they are steady and no rank's clocks are held back."""
    context, phase, is_limited = session.context, _Phase(), False
    at_least = timing.EAGER_ITERATIONS if context.cuda_graph else 1

    def wanted() -> int:
        return next_warmup(
            phase.point_ns(), session.settings, at_least=at_least, is_limited=is_limited
        )

    while iterations := as_rank_0_says(wanted, context.device):
        before, compiled = session.counters.read(), count_compiled_frames()
        phase.add(_block(workload.step, iterations, session), context.device)
        if count_compiled_frames() > compiled:
            phase.compiling_steps = sum(len(block.step_ns) for block in phase.blocks)
        is_limited = on_any_rank(is_held_back(before, session.counters.read()), context.device)
    return phase


def _inner_iterations(workload: Workload, warmup: _Phase, session: _Session) -> int:
    """Agree on the steps in a sample; replayed steps may be far shorter than eager ones."""
    context, step_ns = session.context, warmup.point_ns()
    if isinstance(session.timer, ScriptTimer):
        return 1  # it has no loop of ours
    if context.cuda_graph:
        replays = _Phase()
        with timing.capture(workload, 1, context) as step:
            replays.add(_block(step, timing.TRIAL_REPLAYS, session), context.device)
        step_ns = replays.point_ns()
    return as_rank_0_says(
        lambda: inner_iterations(step_ns, graph=context.cuda_graph), context.device
    )


def _make_timed_step(
    workload: Workload, inner: int, context: Context
) -> AbstractContextManager[Step]:
    if context.cuda_graph:
        return timing.capture(workload, inner, context)
    return nullcontext(loop_step(workload.step, inner))


@dataclass(slots=True, kw_only=True)
class _Timing:
    """The timed phase. What drifts turns out to be warm-up, and timing begins anew."""

    step: Step
    inner: int
    warmup_ns: Sequence[float]
    session: _Session
    drifted: _Phase = field(default_factory=_Phase)
    timed: _Phase = field(default_factory=_Phase)
    readings: list[Reading | None] = field(default_factory=list)
    timed_at_ns: list[SpanNs] = field(default_factory=list)

    def run(self) -> None:
        """Time until it is enough; energy, when, and what limited the clocks go to the session."""
        device = self.session.context.device
        while count := as_rank_0_says(
            lambda: next_timed(self.course(), self.session.settings), device
        ):
            if count == AGAIN:
                self.timed.move_to(self.drifted)
                self.readings.clear()
                self.timed_at_ns.clear()
                self.session.memory.forget()
            else:
                self.timed.add(self._block(count), device)
        self.session.timed_at_ns.extend(self.timed_at_ns)
        self.session.energies_j.append(energy_j(self.readings[0], self.readings[-1]))
        for before, after in zip(self.readings[::2], self.readings[1::2], strict=True):
            if before is not None and after is not None:
                reasons = throttle_reasons(before, after)
                self.session.throttle_reasons.update(dict.fromkeys(reasons))

    def course(self) -> Course:
        return Course(
            warmup_ns=self.warmup_ns,
            drifted_ns=self.drifted.point_ns(),
            sample_ns=self.timed.point_ns(),
            inner=self.inner,
            is_graph=self.session.context.cuda_graph,
        )

    def _block(self, iterations: int) -> Samples:
        before = self.session.counters.read()
        begin_ns = time.monotonic_ns()
        with self.session.allocator.counting():
            block = _block(self.step, iterations, self.session, lead_in=lead_in(self.course()))
        self.timed_at_ns.append((begin_ns, time.monotonic_ns()))
        samples, after = per_step(block, self.inner), self.session.counters.read()
        self.readings += [before, after]
        if before is None or after is None:
            return samples
        return replace(samples, throttled=(bool(throttle_reasons(before, after)),) * iterations)


def _block(step: Step, iterations: int, session: _Session, *, lead_in: int = 0) -> Samples:
    align_ranks(session.context.device)
    return session.timer.block(step, iterations, session.context.parts, lead_in=lead_in)


def _check(workload: Workload, session: _Session) -> None:
    """Let the workload look at what it computed; its memory for that is none of the step's."""
    if isinstance(session.memory, ScriptTimer):
        return  # nobody here can look
    with session.memory.paused():
        getattr(workload, "check", lambda: None)()


def _compare_gradients(workload: Workload, session: _Session) -> dict[str, Any]:
    """Compare a step's gradients with those of one process, where that is asked for."""
    context = session.context
    if not session.settings.check_gradients:
        return {}
    compare = getattr(workload, "gradient_error", None)
    if compare is None:
        name = type(workload).__name__
        session.warnings.append(f"check_gradients: workload {name} cannot compare its gradients")
        return {}
    found = _explain("gradient_error", compare, context, without="measure.check_gradients: false")
    session.warnings.extend(found.pop("warnings", ()))
    if is_other_gradient(found.get("gradient_error"), context.precision):
        session.warnings.append(
            "the gradients differ from those of one process over the samples of all ranks by "
            f"{found['gradient_error']:.1%}"
        )
    return found


def _explanations(workload: Workload, session: _Session, profile: bool) -> dict[str, Any]:
    """Where the time goes, from steps that are neither timed nor in the peak memory."""
    context, settings = session.context, session.settings
    timed_ns = session.repetitions[-1].timed.step_ns
    slowest_ns = slowest_rank_ns(timed_ns, context.device)
    steps = as_rank_0_says(lambda: breakdown_steps(slowest_ns, settings), context.device)
    most_local = as_rank_0_says(lambda: most_local_steps(slowest_ns, settings), context.device)
    extent = Extent(
        steps=steps,
        most_local_steps=most_local,
        inner=session.repetitions[-1].inner_iterations,
    )
    found: dict[str, Any] = {}

    def take_apart() -> Breakdown:
        # First, before gradients go other ways than in a timed step.
        found.update(_choices_seen(workload, session))
        return _take_apart(workload, session, extent)

    if settings.breakdown:
        found |= _explain("breakdown", take_apart, context, without="measure.breakdown: false")
    if profile and isinstance(workload, RunningScript):
        session.warnings.append("a script is not profiled")
    elif profile:
        again = _explain(
            "profile",
            lambda: profiling.profile(workload, context, steps),
            context,
            without="no --profile",
        )
        if "breakdown" in found and "profile" in again:
            found["breakdown"] = with_call_times(
                found["breakdown"], again["profile"].trace, steps, context.world_size
            )
        found |= again | {"warnings": (*found.get("warnings", ()), *again.get("warnings", ()))}
    return found


def _take_apart(workload: Workload, session: _Session, extent: Extent) -> Breakdown:
    if isinstance(workload, RunningScript) and isinstance(session.timer, ScriptTimer):
        return break_down_script(workload, session.timer, session.context, extent)
    return break_down(workload, session.timer, session.context, extent)


def _choices_seen(workload: Workload, session: _Session) -> dict[str, Any]:
    """See what NCCL and torch choose, in one more step each; of a script's nothing is seen."""
    if isinstance(workload, RunningScript):
        return {}
    found: dict[str, Any] = {}
    if session.context.world_size > 1:
        found["nccl_choices"] = session.nccl_choices(workload.step)
    return found | {"attention_kernels": attention_kernels(workload.step)}


def _explain(
    name: str, explain: Callable[[], Any], context: Context, *, without: str
) -> dict[str, Any]:
    """Return what `explain` finds, or a warning in its place: the samples are there already.

    Not with peers, which may wait in a collective: then the point is lost.
    """
    try:
        return {name: explain()}
    except Exception as error:
        if context.world_size > 1:
            add_note(error, f"in the {name}, after the timed steps; {without} leaves it out")
            raise
        return {"warnings": (f"the {name} failed: {brief(error)}",)}


def _sizes(workload: Workload, context: Context) -> dict[str, Any]:
    """Read what a step finishes, moves and computes, as the workload declares it."""
    owner = f"workload {type(workload).__name__}"
    found: dict[str, Any] = {
        name: check_declared(owner, name, getattr(workload, name, None)) for name in DECLARED
    }
    if shares_work(type(workload)) and found["items_per_step"] is not None:
        # This rank's part of what all finish together.
        found["items_per_step"] /= context.world_size
    return found


def _own_metrics(workload: Workload) -> dict[Metric, float]:
    """Read the metrics that the workload declares itself, after its timed steps.

    A class may have had `metrics` of another meaning: what is no Metric is passed over.
    """
    owner, declared = f"workload {type(workload).__name__}", getattr(type(workload), "metrics", ())
    metrics = declared if isinstance(declared, tuple | list) else (declared,)
    values = {
        metric: getattr(workload, metric.name, None)
        for metric in metrics
        if isinstance(metric, Metric)
    }
    return {
        one: check_metric(owner, one, value) for one, value in values.items() if value is not None
    }


_autograd: Any = torch._C._autograd  # much of it is missing from torch's types
_NAMES = {
    "flash": (
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "efficient": (
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_efficient_attention",
    ),
    "cudnn": ("aten::_cudnn_attention_forward", "aten::_scaled_dot_product_cudnn_attention"),
    "math": ("aten::_scaled_dot_product_attention_math",),
}


def attention_kernels(step: Step) -> tuple[str, ...]:
    """Run a step, and name the kernels of attention in it; empty where none was seen.

    Torch chooses by device, shapes, mask and its own settings, so that the same job may run another
    kernel elsewhere. Seen is what the step calls: also from compiled code, from operators of one's
    own, and in the backward pass. Not seen is what is made of other operators: FlexAttention, and
    `math` where torch.compile takes it apart.
    By the profiler that notes operators on the host alone: once CUPTI was in use, later launches of
    the process stay slower (pytorch#144455).
    """
    _autograd._enable_profiler_legacy(profiler_legacy.profile().config())  # type: ignore[no-untyped-call]
    try:
        step()
    finally:
        threads = _autograd._disable_profiler_legacy()
    called = {event.name() for events in threads for event in events}
    return tuple(kernel for kernel, names in _NAMES.items() if not called.isdisjoint(names))
