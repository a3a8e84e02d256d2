"""The recipe of a measurement: build, warm up, time, and do it again for each repeat.

The ranks agree before each block on its length: rank 0 decides by the steps of the slowest rank
and tells the others, outside the timed region, so that all run the same number of collectives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from raybench.checked_answers import DECLARED, declared
from raybench.failure_text import add_note, named
from raybench.job import Measure
from raybench.measure import graph, profiling
from raybench.measure.agreement import as_rank_0_says, slowest_rank_ns
from raybench.measure.breakdown import break_down
from raybench.measure.counters import Counters, energy_j, open_counters, throttle_reasons
from raybench.measure.device_memory import PeakMemory
from raybench.measure.stopping import (
    breakdown_steps,
    has_settled,
    inner_iterations,
    next_timed,
    next_warmup,
)
from raybench.measure.timing import (
    Step,
    Timer,
    align_ranks,
    joined,
    looped,
    make_timer,
    no_garbage_collection,
    per_step,
)
from raybench.records import Breakdown, Profile, Repetition, Samples
from raybench.workloads.base import Context, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What measuring found on one rank; the fields are those of `records.Measurement`."""

    repetitions: tuple[Repetition, ...]
    items_per_step: int | None = None
    message_bytes: int | None = None
    busbw_factor: float | None = None
    memory_bytes: int | None = None
    flops_per_step: float | None = None
    peak_mem_allocated_bytes: int | None = None
    peak_mem_reserved_bytes: int | None = None
    energy_j: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    breakdown: Breakdown | None = None
    profile: Profile | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What the repeats of a point share. energies_j: of their timed phases."""

    context: Context
    settings: Measure
    timer: Timer
    counters: Counters
    memory: PeakMemory
    repetitions: list[Repetition] = field(default_factory=list)
    energies_j: list[float | None] = field(default_factory=list)
    throttle_reasons: dict[str, None] = field(default_factory=dict)


def measure(
    build: Callable[[], Workload],
    context: Context,
    settings: Measure,
    built: Callable[[], None],
    profile: bool = False,
) -> Measured:
    """Build, warm up and time the workload `settings.repeats` times.

    built: called after each build, before the first step.
    profile: also run the last workload under the profiler, after all else.
    Raises what the workload raises, and UsageError where a CUDA graph cannot be had.
    """
    graph.check_device(context)
    session = _Session(
        context=context,
        settings=settings,
        timer=make_timer(context.device),
        counters=open_counters(context.device),
        memory=PeakMemory(context.device),
    )
    found: dict[str, Any] = {}
    for repeat in range(settings.repeats):
        # The workload before this one, cycles included, must be gone: it would count in the peak
        # memory of this one, and may leave no room for it.
        gc.collect()
        context.replicas.forget()
        with graph.own_stream(context), _closed_at_the_end(build()) as workload:
            built()
            found = _sizes(workload)
            _repetition(workload, session)
            if repeat == settings.repeats - 1:
                with no_garbage_collection():
                    found |= _explanations(workload, session, profile)
        del workload
    return _measured(session, found)


def _measured(session: _Session, found: dict[str, Any]) -> Measured:
    known = [energy for energy in session.energies_j if energy is not None]
    return Measured(
        repetitions=tuple(session.repetitions),
        peak_mem_allocated_bytes=session.memory.allocated_bytes,
        peak_mem_reserved_bytes=session.memory.reserved_bytes,
        energy_j=sum(known) if len(known) == len(session.repetitions) else None,
        throttle_reasons=tuple(session.throttle_reasons),
        **found,
    )


@contextmanager
def _closed_at_the_end(workload: Workload) -> Iterator[Workload]:
    """Close the workload, if it can be; what it raises then does not hide an earlier error."""
    close = getattr(workload, "close", lambda: None)
    try:
        yield workload
    except BaseException as error:
        try:
            close()
        except Exception as second:
            add_note(error, f"close() then raised {named(second)}")
        raise
    close()


def _repetition(workload: Workload, session: _Session) -> None:
    context, settings = session.context, session.settings
    with no_garbage_collection():
        warmup, warmup_ns = _warm_up(workload, session)
        _check(workload, session)
        inner = _inner_iterations(workload, warmup_ns, session)
        with _timed_step(workload, inner, context) as step:
            timed = _time(step, inner, warmup_ns, session)
            _check(workload, session)
    session.repetitions.append(
        Repetition(
            warmup=warmup,
            timed=timed,
            inner_iterations=inner,
            settled=has_settled(warmup_ns, settings.warmup),
        )
    )


def _warm_up(workload: Workload, session: _Session) -> tuple[Samples, list[int]]:
    """Eager steps, one by one; also the durations on the slowest rank."""
    at_least = graph.EAGER_ITERATIONS if session.context.cuda_graph else 1
    return _blocks(
        lambda step_ns: next_warmup(step_ns, session.settings, at_least=at_least),
        lambda iterations: _block(workload.step, iterations, session),
        session.context,
    )


def _inner_iterations(workload: Workload, warmup_ns: Sequence[int], session: _Session) -> int:
    """Steps in a sample, on all ranks alike; replayed steps may be far shorter than eager ones."""
    context, step_ns = session.context, warmup_ns
    if context.cuda_graph:
        with graph.captured(workload, 1, context) as step:
            replays = _block(step, graph.TRIAL_REPLAYS, session)
        step_ns = slowest_rank_ns(replays.step_ns, context.device)
    return as_rank_0_says(
        lambda: inner_iterations(step_ns, graph=context.cuda_graph), context.device
    )


def _timed_step(workload: Workload, inner: int, context: Context) -> AbstractContextManager[Step]:
    if context.cuda_graph:
        return graph.captured(workload, inner, context)
    return nullcontext(looped(workload.step, inner))


def _time(step: Step, inner: int, warmup_ns: Sequence[int], session: _Session) -> Samples:
    """The timed phase; its energy and the reasons for throttling go to the session."""
    counters = session.counters
    readings = [counters.read()]

    def watched(iterations: int) -> Samples:
        before = counters.read()
        samples = per_step(_block(step, iterations, session), inner)
        after = counters.read()
        readings.append(after)
        if before is None or after is None:
            return samples
        reasons = throttle_reasons(before, after)
        session.throttle_reasons.update(dict.fromkeys(reasons))
        return replace(samples, throttled=(bool(reasons),) * iterations)

    timed, _ = _blocks(
        lambda sample_ns: next_timed(sample_ns, warmup_ns, inner, session.settings),
        watched,
        session.context,
    )
    session.energies_j.append(energy_j(readings[0], readings[-1]))
    return timed


def _blocks(
    next_count: Callable[[Sequence[int]], int],
    block: Callable[[int], Samples],
    context: Context,
) -> tuple[Samples, list[int]]:
    """Blocks until rank 0 says that it is enough; also the durations on the slowest rank.

    next_count: from these durations so far to the length of the next block; 0 ends the phase.
    """
    blocks: list[Samples] = []
    slowest_ns: list[int] = []
    while iterations := as_rank_0_says(lambda: next_count(slowest_ns), context.device):
        blocks.append(block(iterations))
        slowest_ns.extend(slowest_rank_ns(blocks[-1].step_ns, context.device))
    return joined(blocks), slowest_ns


def _block(step: Step, iterations: int, session: _Session) -> Samples:
    align_ranks(session.context.device)
    return session.timer.block(step, iterations, session.context.parts)


def _check(workload: Workload, session: _Session) -> None:
    """Let the workload look at what it computed; its memory for that is none of the step's."""
    with session.memory.paused():
        getattr(workload, "check", lambda: None)()


def _explanations(workload: Workload, session: _Session, profile: bool) -> dict[str, Any]:
    """Where the time goes, from steps that are neither timed nor in the peak memory."""
    context, settings = session.context, session.settings
    timed_ns = session.repetitions[-1].timed.step_ns
    slowest_ns = slowest_rank_ns(timed_ns, context.device)
    steps = as_rank_0_says(lambda: breakdown_steps(slowest_ns, settings), context.device)
    found: dict[str, Any] = {}
    if settings.breakdown:
        found |= _explained(
            "breakdown",
            lambda: break_down(workload, session.timer, context, steps),
            context,
            without="measure.breakdown: false",
        )
    if profile:
        again = _explained(
            "profile",
            lambda: profiling.profile(workload, context, steps),
            context,
            without="no --profile",
        )
        found |= again | {"warnings": (*found.get("warnings", ()), *again.get("warnings", ()))}
    return found


def _explained(
    name: str, explain: Callable[[], Any], context: Context, *, without: str
) -> dict[str, Any]:
    """What `explain` finds, or a warning in its place: the samples are there already.

    Not with peers, which may wait in a collective: then the point is lost.
    """
    try:
        return {name: explain()}
    except Exception as error:
        if context.world_size > 1:
            add_note(error, f"in the {name}, after the timed steps; {without} leaves it out")
            raise
        return {"warnings": (f"the {name} failed: {named(error)}",)}


def _sizes(workload: Workload) -> dict[str, Any]:
    """What a step finishes, moves and computes, as the workload declares it."""
    owner = f"workload {type(workload).__name__}"
    return {name: declared(owner, name, getattr(workload, name, None)) for name in DECLARED}
