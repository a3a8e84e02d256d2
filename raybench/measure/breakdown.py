"""Where a step's time goes: instrumented steps, run after the timed ones.

With events and hooks only. A profiler would tell more, but once CUPTI was in use the later
launches of the process stay slower (pytorch#144455).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from raybench.measure.collectives import LocalCopies, WatchedCopies, add_up, replace_collectives
from raybench.measure.marks import (
    BucketMarks,
    OptimizerMarks,
    RegionMarks,
    comm_ms,
    marker,
    milliseconds,
    region_times,
    tail_ms,
)
from raybench.measure.peak_parts import FROM_GRAPH, peak_parts
from raybench.measure.timing import (
    Step,
    Timer,
    align_ranks,
    loop_step,
    no_garbage_collection,
    on_any_rank,
    slowest_rank_ns,
)
from raybench.records import NO_COLLECTIVES, Breakdown, PeakParts, RegionTime, Traffic, WallTimes
from raybench.records.failure_text import brief
from raybench.stats.stragglers import MARK_ERRORS, MARK_SHARE, median_error
from raybench.workloads.base import Context, Workload

SetHook = Callable[[Any], None]

# Beside the untimed samples before each block.
_WARMUP_STEPS = 1
_LEAD_IN_SAMPLES = 2
# Fewer have no spread.
_LEAST_OF_A_BLOCK = 3
_NS_PER_MS = 1e6
# What a clock of the host says of a step on a GPU, before the device is done and after it.
_WALL_COLUMNS = ("wall_unsynced_ms_by_rank", "wall_synced_ms_by_rank")
_WALL_METHODS = {
    "wall_unsynced_ms_by_rank": "host clock around one step of an idle device, not waited for",
    "wall_synced_ms_by_rank": "host clock around one step of an idle device, waited for",
}
_NO_WALL_TIMES = "none: on a CPU nothing goes on behind the host's clock"
# Steps issued one at a time to an idle device, to learn how long the host needs for one.
_ISSUED_ALONE = 5
# A host that needs less of a step than this stays ahead of the device by itself.
_AHEAD_SHARE = 0.75
# The device is held back for longer than the host needs, which varies.
_HOLD_MARGIN = 1.5
_HOLD_AT_MOST_MS = 1000.0
_CALIBRATION_CYCLES = 10_000_000

ALL_COLUMNS = (
    "local_step_ms",
    "compute_ms",
    "comm_ms",
    "comm_exposed_ms",
    "straggler_ms",
    "wait_ms",
    "optimizer_ms",
    "host_gap_ms",
)
_PEAK = tuple(f"mem_{field.name}" for field in fields(PeakParts))
_WATCHED = "torch's allocator and what modules and optimizers hold, in a step that is watched"
_IS_COMMUNICATION = "none: the step itself is communication"
NO_BUCKETS = "unknown: DistributedDataParallel reduced no gradients"
_ON_CPU = "none: on a CPU the host computes"
_TOO_SLOW = "unknown: the host needs too long to queue a whole step"
_NO_OPTIMIZER = "none: no optimizer of torch.optim stepped"
_NOOP = "step with DDP's noop_hook, and local copies in place of other collectives"
_LOCAL_COPIES = "step with local copies in place of collectives"
_SENT = {
    "local_copy_ms": "around the copies in steps of their own, maximum over ranks",
    **dict.fromkeys(("comm_calls", "comm_bytes"), "counted in a step with local copies"),
}
_ALONE = {
    "comm_ms": "unknown: told for gradients that DistributedDataParallel reduces",
    "comm_exposed_ms": "step less the slowest rank's step with local copies for collectives",
    "straggler_ms": "largest local step of a rank less the lower median of the others'",
    "wait_ms": "unknown: told for gradients that DistributedDataParallel reduces",
    "slowest_rank": "its local step is longer than the others'",
}
REDUCED = {
    "comm_ms": "each bucket of gradients from ready to reduced, minimum over ranks",
    "comm_exposed_ms": "step less the slowest rank's step with DDP's noop_hook",
    "straggler_ms": "largest local step of a rank less the lower median of the others'",
    "wait_ms": "last gradient ready to last one reduced, less the minimum over ranks",
    "slowest_rank": "its local step is longer than the others'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is run for a breakdown.

    steps: timed steps of each kind. most_local_steps: those without communication, which are run
    until the ranks can be told apart. inner: steps in each of them, as in the timed samples.
    """

    steps: int
    most_local_steps: int = 0
    inner: int = 1


def break_down(workload: Workload, timer: Timer, context: Context, extent: Extent) -> Breakdown:
    """Run instrumented steps on all ranks: with timed regions, with timed communication, without.

    On a GPU also with their work queued beforehand; a few more to warm up.
    The workload is used up: its ranks have computed on without each other, and models that the
    context has wrapped reduce no gradients any more. The last step is with the peers where it can
    be, so that a workload which checks its result when it is closed finds theirs in it.
    """
    if context.cuda_graph:
        named = ("regions",) if context.regions.are_used else ()
        columns = (*ALL_COLUMNS, *_WALL_COLUMNS, *named)
        return Breakdown(methods=dict.fromkeys(columns, FROM_GRAPH))
    session = _Session(workload=workload, timer=timer, context=context, extent=extent)
    with no_garbage_collection():
        # First: while the step is the one that was timed.
        regions = _regions(session)
        wall = _wall_times(session)
        peak = peak_parts(workload, context)
        parts = _parts(session)
    known = peak if isinstance(peak, PeakParts) else None
    how = _WATCHED if isinstance(peak, PeakParts) else peak
    timed = _WALL_METHODS if wall else dict.fromkeys(_WALL_COLUMNS, _NO_WALL_TIMES)
    methods = {
        **parts.methods,
        **dict.fromkeys(_PEAK, how),
        **timed,
        **_region_methods(context),
    }
    return replace(parts, regions=regions, wall=wall, peak=known, methods=methods)


def _wall_times(session: _Session) -> WallTimes | None:
    """Time the step as it is by the host's clock; None on a CPU, whose clock that is."""
    device = session.context.device
    if device.type != "cuda":
        return None
    align_ranks(device)
    for _ in range(_WARMUP_STEPS):
        session.workload.step()
    steps = min(session.extent.steps, _ISSUED_ALONE)
    return time_by_wall_clock(session.workload.step, steps, torch.cuda.synchronize)


def _parts(session: _Session) -> Breakdown:
    if session.context.world_size == 1:
        return _local(session, _Communication(), session.workload.step)
    if session.workload.message_bytes is not None:
        return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, _IS_COMMUNICATION))
    return _parts_of_many(session)


def _parts_of_many(session: _Session) -> Breakdown:
    """Take apart the step of several ranks: by a hook of DDP, or by copies for collectives."""
    context, communication = session.context, _Communication(methods=_ALONE)
    set_hook = hook_setter(session.workload, context)
    if not isinstance(set_hook, str):
        communication = _communication(session, set_hook)
    alone = _StepAlone(session)
    traffic, copies_ms = alone.watch()
    if not on_any_rank(bool(traffic or alone.error), context.device):
        return Breakdown(methods=dict.fromkeys(ALL_COLUMNS, f"unknown: {NO_COLLECTIVES}"))
    if not isinstance(set_hook, str):
        set_hook(noop_hook)
    found = _local(replace(session, around=alone.peers_away), communication, alone)
    if on_any_rank(bool(alone.error), context.device):
        reason = f"unknown: without its peers the step failed: {alone.error or 'on another rank'}"
        found = Breakdown(methods=dict.fromkeys(ALL_COLUMNS, reason))
    else:
        session.workload.step()
    methods = {**found.methods, **_SENT}
    return replace(found, copies_ms=copies_ms, traffic=traffic, methods=methods)


class _StepAlone:
    """The step with local copies in place of its collectives; once it has failed, nothing.

    The ranks go on together: one that fails among them does not keep the others waiting.
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._copies = LocalCopies()
        self.error = ""

    def __call__(self) -> None:
        """Do one iteration, with the peers away."""
        if self.error:
            return
        try:
            self._session.workload.step()
        except Exception as error:
            # What it computes of the copies may be what no step can go on with.
            self.error = brief(error)

    def peers_away(self) -> AbstractContextManager[None]:
        """Let collectives be copies inside the `with` block. The ranks must not agree in it."""
        return replace_collectives(self._copies)

    def watch(self) -> tuple[tuple[Traffic, ...], float]:
        """Run some steps; what one of them sends, and how long its copies take, in ms."""
        device = self._session.context.device
        copies = WatchedCopies(device)
        align_ranks(device)
        with replace_collectives(copies):
            began_ns = time.perf_counter_ns()
            self()
            copies.end_step()
            issue_ms = (time.perf_counter_ns() - began_ns) / _NS_PER_MS
            for _ in range(_half(self._session.extent.steps)):
                if device.type == "cuda":
                    # Else a copy would take as long as the host does to launch it.
                    _hold_back(min(_HOLD_MARGIN * issue_ms, _HOLD_AT_MOST_MS))
                self()
                copies.end_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        steps = copies.take()[1:]
        # A step that has failed has not sent all.
        traffic = () if self.error else add_up(steps[-1][0])
        return traffic, statistics.median(ms for _, ms in steps)


def hook_setter(workload: Workload, context: Context) -> SetHook | str:
    """Return what lets gradients go another way, else why there is none.

    The workload's own, or that of the models that the context has wrapped.
    """
    own: SetHook | None = workload.set_comm_hook
    return own or context.replicas.why_no_hook() or context.replicas.set_comm_hook


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """around: what blocks of steps run in, between which the ranks agree."""

    workload: Workload
    timer: Timer
    context: Context
    extent: Extent
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def _regions(session: _Session) -> tuple[RegionTime, ...]:
    """Time the regions of the step, in steps that are as the timed ones else."""
    context, inner = session.context, session.extent.inner
    if not on_any_rank(context.regions.are_used, context.device):
        return ()
    marks = RegionMarks(context.device)

    def step() -> None:
        session.workload.step()
        marks.end_step()

    with context.regions.timed_by(marks.region):
        for _ in range(_WARMUP_STEPS):
            step()
        steps_ms = _block_ms(loop_step(step, inner), session.extent.steps, session)
    return region_times(marks.take()[-len(steps_ms) * inner :], statistics.median(steps_ms))


def _region_methods(context: Context) -> dict[str, str]:
    """Tell how regions were timed, and which are left out because they are compiled."""
    methods = []
    if context.regions.are_used:
        clock = "CUDA events" if context.device.type == "cuda" else "host clock"
        methods.append(
            f"{clock} around the `with` block, in steps that are otherwise as the timed ones"
        )
    if context.regions.compiled:
        names = ", ".join(sorted(map(str, context.regions.compiled)))
        methods.append(f"unknown where they are inside code for torch.compile: {names}")
    return {"regions": "; ".join(methods)} if methods else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Communication:
    """An entry per step; empty where there was none.

    is_hooked: it is of gradients that a hook of DDP gets.
    """

    is_hooked: bool = False
    hooked_ms: tuple[float, ...] = ()
    comm_ms: tuple[float, ...] = ()
    tail_ms: tuple[float, ...] = ()
    methods: Mapping[str, str] = field(default_factory=dict)


def _communication(session: _Session, set_hook: SetHook) -> _Communication:
    """Run steps whose buckets are timed, one after the other as the timed ones.

    Ranks that are brought together before each step would differ by the jitter of their hosts.
    """
    marks = BucketMarks(session.context.device)
    set_hook(marks.hook)
    for _ in range(_WARMUP_STEPS):
        session.workload.step()

    def step() -> None:
        session.workload.step()
        marks.end_step()

    hooked_ms = _block_ms(loop_step(step, session.extent.inner), session.extent.steps, session)
    timed = marks.take()[-len(hooked_ms) * session.extent.inner :]
    if not all(timed):
        return _Communication(is_hooked=True, methods=dict.fromkeys(REDUCED, NO_BUCKETS))
    return _Communication(
        is_hooked=True,
        hooked_ms=hooked_ms,
        comm_ms=tuple(comm_ms(buckets) for buckets in timed),
        tail_ms=tuple(tail_ms(buckets) for buckets in timed),
        methods=REDUCED,
    )


def _local(session: _Session, communication: _Communication, one: Step) -> Breakdown:
    """Time steps without communication, and the device's work for them."""
    context, inner = session.context, session.extent.inner
    with session.around():
        for _ in range(_WARMUP_STEPS):
            one()
    local_step = loop_step(one, inner)
    optimizer = OptimizerMarks(context.device)
    if context.device.type == "cuda":
        first = _first_pass(local_step, session)
        typical_ms = statistics.median(chain(*first))
        device_ms = time_queued_steps(
            local_step, optimizer, inner * typical_ms, session.extent.steps, session.around
        )
        second = _same_again(local_step, first, session)
    else:
        with optimizer.watching():
            step = optimizer.watched(local_step)
            first = _first_pass(step, session)
            second = _same_again(step, first, session)
        device_ms = None
    optimizer_ms = optimizer.median_ms()
    return Breakdown(
        local_ms=(*first, *second),
        device_ms=None if device_ms is None else device_ms / inner,
        optimizer_ms=None if optimizer_ms is None else optimizer_ms / inner,
        hooked_ms=communication.hooked_ms,
        comm_ms=communication.comm_ms,
        tail_ms=communication.tail_ms,
        methods={
            **_local_methods(context, communication, queued=device_ms is not None),
            **({} if optimizer_ms is not None else {"optimizer_ms": _NO_OPTIMIZER}),
            **communication.methods,
        },
    )


def _first_pass(step: Step, session: _Session) -> list[tuple[float, ...]]:
    """Time a block of local steps, and more while a rank cannot be told from another one.

    As many follow after the queued steps, for a host that is late now may not be later.
    """
    blocks = [_block_ms(step, _half(session.extent.steps), session)]
    most = _half(session.extent.most_local_steps) if session.context.world_size > 1 else 0
    done_ms = [*blocks[0]]
    while len(done_ms) < most and on_any_rank(_is_unsure(done_ms), session.context.device):
        blocks.append(_block_ms(step, _half(session.extent.steps), session))
        done_ms.extend(blocks[-1])
    return blocks


def _same_again(
    step: Step, blocks: Sequence[tuple[float, ...]], session: _Session
) -> list[tuple[float, ...]]:
    return [_block_ms(step, len(block), session) for block in blocks]


def _half(steps: int) -> int:
    return max(_LEAST_OF_A_BLOCK, -(-steps // 2))


def _is_unsure(local_ms: Sequence[float]) -> bool:
    """Whether two ranks like this one would have to differ by more than is worth half a mark.

    Half, as they may differ by their blocks too.
    """
    three_errors = MARK_ERRORS * math.sqrt(2) * median_error(local_ms)
    return three_errors > MARK_SHARE / 2 * statistics.median(local_ms)


def _block_ms(step: Step, steps: int, session: _Session) -> tuple[float, ...]:
    """Durations of `steps` samples in ms, each the mean of its inner steps.

    The ranks start together. Two samples before are not timed: the device's queue is empty then.
    """
    align_ranks(session.context.device)
    with session.around():
        samples = session.timer.block(step, steps, session.context.parts, lead_in=_LEAD_IN_SAMPLES)
    return tuple(ns / session.extent.inner / _NS_PER_MS for ns in samples.step_ns)


def _local_methods(
    context: Context, communication: _Communication, *, queued: bool
) -> dict[str, str]:
    local = "the step as it is"
    if context.world_size > 1:
        local = _NOOP if communication.is_hooked else _LOCAL_COPIES
    if context.device.type != "cuda":
        return {
            "local_step_ms": local,
            "compute_ms": "local step less data_ms and optimizer_ms",
            "optimizer_ms": "host clock around Optimizer.step",
            "host_gap_ms": _ON_CPU,
        }
    if not queued:
        return {
            "local_step_ms": local,
            **dict.fromkeys(("compute_ms", "optimizer_ms", "host_gap_ms"), _TOO_SLOW),
        }
    return {
        "local_step_ms": local,
        "compute_ms": "device's time for the local step, queued beforehand, less optimizer_ms",
        "optimizer_ms": "CUDA events around Optimizer.step, queued beforehand",
        "host_gap_ms": "local step less the same step queued beforehand",
    }


def time_queued_steps(
    step: Step,
    optimizer: OptimizerMarks,
    local_ms: float,
    steps: int,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> float | None:
    """Median time in ms of a step on the GPU, the gaps left by a slow host taken out.

    A host that is much faster than the device, whose step takes local_ms, leaves none. Otherwise
    the device is held back before each step for longer than the host needs to issue it. None
    on all ranks where that is longer than a second on one of them. All ranks must call it.

    A step that waits for the device keeps the gap behind its wait, and one with more launches
    than the driver queues (about 1000) some of its gaps.
    """
    device = torch.device("cuda")
    with around():
        issue_ms = _issue_ms(step)
    # Not always: an idling device cools, and would then compute faster than in the timed steps.
    hold_ms = 0.0 if issue_ms < _AHEAD_SHARE * local_ms else _HOLD_MARGIN * issue_ms
    # Of all ranks: a step may communicate in its own way, so all run equally many.
    (longest_ns,) = slowest_rank_ns([round(hold_ms * _NS_PER_MS)], device)
    if longest_ns > _HOLD_AT_MOST_MS * _NS_PER_MS:
        return None
    mark, spans = marker(device), []
    step_apart = optimizer.watched(step)
    with around(), optimizer.watching():
        for _ in range(steps):
            if hold_ms:
                _hold_back(hold_ms)
            start = mark()
            step_apart()
            spans.append((start, mark()))
    torch.cuda.synchronize()
    return statistics.median(milliseconds(start, end) for start, end in spans)


def _issue_ms(step: Step) -> float:
    """Median time in ms that the host needs to issue a step while the device is idle."""
    wait = torch.cuda.synchronize
    return time_by_wall_clock(step, _ISSUED_ALONE, wait).unsynced_ms


def _hold_back(ms: float) -> None:
    """Keep the device's stream busy for so long; the host goes on."""
    _spin(round(ms * _cycles_per_ms()))


@cache
def _cycles_per_ms() -> float:
    """How far the clock of torch's spin kernel counts in a millisecond, by running it."""
    mark = marker(torch.device("cuda"))
    # The first launch of a kernel loads it.
    _spin(1)
    start = mark()
    _spin(_CALIBRATION_CYCLES)
    end = mark()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / milliseconds(start, end)


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def time_by_wall_clock(step: Step, steps: int, wait: Callable[[], None]) -> WallTimes:
    """Time steps one at a time, as a script does that has no events.

    wait: for the device. It is idle before each step.
    """
    issued_ns, done_ns = [], []
    for _ in range(steps):
        wait()
        start_ns = time.perf_counter_ns()
        step()
        issued_ns.append(time.perf_counter_ns() - start_ns)
        wait()
        done_ns.append(time.perf_counter_ns() - start_ns)
    return WallTimes(
        unsynced_ms=statistics.median(issued_ns) / _NS_PER_MS,
        synced_ms=statistics.median(done_ns) / _NS_PER_MS,
    )
