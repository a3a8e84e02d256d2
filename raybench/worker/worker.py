"""The inside of a worker: one process that owns one device.

It joins a process group when asked, runs one point and answers with a value. It knows nothing
of Ray, so it can be driven in this process by tests and for debugging.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from raybench.errors import (
    UsageError,
    frames_of,
    mentions,
    message_of,
    place_among,
    traceback_of,
)
from raybench.hardware.devices import Counters, DeviceReading, describe_device
from raybench.job import registry
from raybench.job.point import SCRIPT, Point, Precision, Scalar
from raybench.measure import phases
from raybench.measure.profiling import Counted, step_flops, tflops_sustained
from raybench.measure.stopping import load_decisions
from raybench.measure.uneven import GroupProbe, UnevenStep, share_out
from raybench.records.code import Code, code_here, differing, raybench_sha256
from raybench.records.device import Device
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Failure, Measurement, RankAnswer
from raybench.records.status import Cause, Status
from raybench.records.task import GroupSpec, RankInfo, Task
from raybench.worker import state
from raybench.worker.process_group import (
    GroupGoneError,
    ProcessGroup,
    serve_store,
    set_torchrun_variables,
)
from raybench.worker.state import ProcessState
from raybench.workloads.attention import choose_kernel
from raybench.workloads.base import (
    Context,
    Workload,
    apply_precision,
    as_workload,
    effective_precision,
    precision_doubt,
)
from raybench.workloads.script import RunningScript, ScriptFailedError

_STDERR = 2
_TAKE_DOWN_TIMEOUT_S = 2.0
_CHOICES_OF_NCCL = ("NCCL_ALGO", "NCCL_PROTO")


class Worker:
    """Runs points on one device, one at a time.

    index: the device as torch counts it; for CPU workers, the number among those of its node.
    Creating one makes the CUDA context, and takes seconds.
    """

    def __init__(self, kind: Literal["cuda", "cpu"], index: int) -> None:
        self._device = torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")
        self._index = index
        self._group = ProcessGroup(self._device)
        self._flops: dict[object, Counted] = {}
        self._group_probes: dict[object, GroupProbe] = {}
        self._gemm_tflops: dict[Precision, float | None] = {}
        self._rested: DeviceReading | None = None
        self._code: dict[str, Code | None] = {}
        self._address = "127.0.0.1"
        self._is_new = True
        self._script: RunningScript | None = None
        # Ids of the processes of the scripts of a point.
        self._ended: set[int] = set()
        preload()
        self._enter_device()
        torch.zeros(1, device=self._device)
        if kind == "cuda":
            # torch chooses the order of its attention kernels once in a process, and the order is
            # part of the key of compiled code (`attention.use_kernel`).
            tokens = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=self._device)
            choose_kernel("auto", tokens)
        _freeze()
        self._counters = Counters(self._device)
        self._state = ProcessState(self._device)

    def identity(self, *, node_id: str, address: str) -> Device:
        """Return the device of this worker (no `rack`), and facts of process, host and versions.

        node_id, address: those of its node in Ray. Call it before `run`: ranks of scripts meet at
        this address.
        """
        self._enter_device()
        self._address = address
        return describe_device(self._device, self._index, node_id=node_id, address=address)

    def run(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> RankAnswer:
        """Run the point as this rank, clean up, and return the answer.

        All ranks of `group` must call it; None for one rank. Another one than the last point's ends
        that on all its ranks, None too, and is formed. To run in one that ended, also by `leave` or
        a Failure, is a Failure, as is what the workload or a peer raises. Call it no more after an
        answer that is not `worker_reusable`. It goes on beyond the time limit, at which it, or the
        script, writes its stack to stderr.
        """
        faulthandler.dump_traceback_later(task.settings.timeout_s, file=_STDERR)
        self._began_s = time.monotonic()
        self._ended = set()
        try:
            answer = self._run(task, rank_info, group)
            return replace(answer, ended_processes=tuple(sorted(self._ended)))
        finally:
            self._script = None
            faulthandler.cancel_dump_traceback_later()
            self._is_new = False

    def leave(self) -> None:
        """Leave the group, if any; all its members must be alive and idle, and call it too."""
        self._group.leave()

    def _run(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> RankAnswer:
        """Run the point and clean up, as `run`; never raises for what a workload does."""
        answer: RankAnswer
        is_gone = False
        try:
            self._enter_device()
            self._load_workload(task, rank_info)
            self._state.begin()
            if task.precisions is not None:
                # For all precisions of the plan at once: between two points the products would
                # leave the device hot, and its clocks limited in the second.
                asked = dict.fromkeys((*task.precisions, task.point.precision))
                new = [one for one in asked if one not in self._gemm_tflops]
                self._gemm_tflops |= tflops_sustained(self._device, new)
                if new:
                    self._note_rest()
            answer = self._measure(task, rank_info, group)
        except ScriptFailedError as error:
            self._script = None
            answer = _explain_variables(replace(error.failure, rank=rank_info.rank), task.point)
        except BaseException as error:  # whatever the workload raises, whose frames hold it
            answer = _explain_variables(_failure(error, rank_info), task.point)
            is_gone = isinstance(error, GroupGoneError)
        if is_gone or self._group.is_broken(group):
            # Its own answer may be garbage; but a script that has ended may be why others failed.
            cause, message = Cause.PEER_FAILED, "another rank failed"
            if self._script is not None and self._script.has_ended:
                cause, message = Cause.SCRIPT_ENDED, "the script ended by itself before the others"
            rank, reusable = rank_info.rank, answer.worker_reusable
            answer = Failure.of(cause, rank=rank, message=message, worker_reusable=reusable)
        if isinstance(answer, Failure) and not (
            answer.worker_reusable and self._group.take_down(_TAKE_DOWN_TIMEOUT_S)
        ):
            return replace(answer, worker_reusable=False)  # cleaning up may wait for lost peers
        try:
            self._group.drop_others()
            left = self._state.restore()
        except Exception as error:
            return replace(_failure(error, rank_info), worker_reusable=False)
        if not left:
            return answer
        if isinstance(answer, Measurement):
            doubt = Doubt(kind=DoubtKind.LEFT_BEHIND, subject=" and ".join(left))
            answer = replace(answer, doubts=(*answer.doubts, doubt))
        return replace(answer, worker_reusable=False)

    def _enter_device(self) -> None:
        """Make this worker's GPU the current one of this thread."""
        # In each method that uses it: an actor may run it on another thread than __init__, and the
        # current CUDA device belongs to the thread.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _load_workload(self, task: Task, rank_info: RankInfo) -> None:
        """Load the workload's module, and keep the settings that it makes in this process.

        Raises UsageError where this process lacks variables of the point, or has other code.
        """
        workload = task.point.workload
        # A module is executed once in a process: if its settings were undone after its first point,
        # they would be missing in all later ones.
        if workload not in self._code:
            set_torchrun_variables(rank_info, None)
            registry.load_workload(workload)
            self._state = ProcessState(self._device)
            self._state.begin()
            _freeze()
            # Read now: a file that changes later is not the one that this process runs.
            self._code[workload] = code_here(task.code) if task.code else None
        for name, value in task.worker_environment.items():
            if os.environ.get(name) != value:
                raise UsageError(f"env: this process was not started with {name}={value}")
        loaded = self._code[workload]
        if task.code and task.code.script:
            loaded = code_here(task.code)  # each of its processes reads it anew
        if task.code is None or loaded is None or loaded == task.code:
            return
        files = differing(task.code.workload, loaded.workload) or ["raybench's own"]
        raise UsageError(
            f"the code on {socket.gethostname()} is not that of the run: {', '.join(files)} "
            "differs; let all nodes have the same files, and leave them alone while a sweep runs"
        )

    def _measure(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> Measurement:
        """Join the group, build the workload, measure it, and return what this rank measured.

        Raises whatever the workload raises, and GroupGoneError where another rank has failed.
        """
        began_s = time.perf_counter()
        self._group.join(task, rank_info, group)
        point = task.point
        context = Context(
            device=self._device,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            local_rank=rank_info.local_rank,
            batch_size=point.batch_size or 1,
            **point.execution,
            seed=task.seed,
        )
        workload_class: Any = as_workload(registry.load_workload(point.workload))

        def make(context: Context, params: Mapping[str, Scalar]) -> Workload:
            # The same for each repeat.
            apply_precision(point.precision)
            state.seed_all(task.seed)
            if point.workload == SCRIPT:
                self._script = self._start_script(context, task, group)
                return self._script
            workload: Workload = workload_class(context, **params)
            return workload

        part = None
        if point.is_uneven:
            part = share_out(make, context, point, group, self._group_probes)
            context = part.context
        done = phases.measure(
            partial(part.build, make) if part else partial(make, context, point.params),
            context,
            task.settings,
            began_s=began_s,
            profile=task.profile,
            rested=self._rested,
            nccl_choices=self._group.nccl_file.choices,
        )
        self._note_rest()
        doubts = [*(part.doubts if part else ()), *done.doubts]
        if (doubt := precision_doubt(point.precision, self._device)) is not None:
            doubts.append(doubt)
        # The settings of the process, which the workload may have changed.
        got, is_tf32 = effective_precision(), point.precision is Precision.TF32
        if got != (Precision.TF32 if is_tf32 else Precision.FP32):
            doubts.append(Doubt(kind=DoubtKind.OTHER_PRECISION, subject=got))
        self._group.check(point.workload)
        # raybench's own work follows, without the settings of the workload.
        self._group.drop_others()
        self._state.restore()
        self._group.join(task, rank_info, group)
        self._group.free_buffers(self._state.held_bytes)
        apply_precision(point.precision)
        return replace(
            done,
            # In the group of the ranks that have a share of the step the rank is another one.
            rank=rank_info.rank,
            share=part.share if part else done.share,
            # A script has its own, and its first step is part of its set-up.
            is_of_new_process=None if point.workload == SCRIPT else self._is_new,
            **self._flops_fields(done, point, part, context, group),
            doubts=tuple(doubts),
            transports=self._group.nccl_file.routes() if group else (),
            gemm_tflops=self._gemm_tflops.get(point.precision),
            # Launches stay slower after a profiler was in use (pytorch#144455).
            worker_reusable=done.profile is None,
        )

    def _start_script(self, context: Context, task: Task, group: GroupSpec | None) -> RunningScript:
        """Start the script of a point; all ranks must call it. Raises as `RunningScript`."""
        # Its process writes its stack when the time is up; this one only waits for it.
        faulthandler.cancel_dump_traceback_later()
        return RunningScript(
            context,
            task,
            serve_store(self._address) if context.rank == 0 else None,
            is_aborted=lambda: self._group.is_broken(group),
            deadline_s=self._began_s + task.settings.timeout_s,
            ended=self._ended,
        )

    def _flops_fields(
        self,
        done: Measurement,
        point: Point,
        part: UnevenStep | None,
        context: Context,
        group: GroupSpec | None,
    ) -> dict[str, Any]:
        """Return the fields `flops_per_step` and `breakdown` of the measurement.

        flops_per_step: None where it is not known. The breakdown says how it was counted.
        """
        if done.flops_per_step is not None:
            counted = Counted(flops=done.flops_per_step, method="declared by the workload")
        elif done.items_per_step == 0:
            counted = Counted(flops=None, method="none: the rank has no share of the step")
        elif done.message_bytes is not None:
            counted = Counted(flops=None, method="none: a collective is no arithmetic")
        elif point.workload == SCRIPT:
            counted = Counted(flops=None, method="unknown: operations of a script are not counted")
        else:
            # Once for each kind of point. With the group: a workload may communicate while it is
            # counted, so its ranks must either all count or all remember.
            params, shares = (part.params, part.shares) if part else (point.params, None)
            key = (group, point.workload, tuple(params.items()), point.batch_size, shares)
            if key not in self._flops:
                workload_class: Any = as_workload(registry.load_workload(point.workload))
                self._flops[key] = step_flops(workload_class, params, context)
            counted = self._flops[key]
        breakdown = done.breakdown
        if breakdown is not None:
            methods = {**breakdown.methods, "flops_per_step": counted.method}
            breakdown = replace(breakdown, methods=methods)
        return {"flops_per_step": counted.flops, "breakdown": breakdown}

    def _note_rest(self) -> None:
        """Note the last reading of the counters before which the clocks may have been limited."""
        now, last = self._counters.read(), self._rested
        if now is None or last is None or now.limited_s != last.limited_s:
            self._rested = now


def preload() -> None:
    """Load what a Worker needs before it has a device; also called by each Worker.

    Hashes raybench's files, and excludes all objects of now from Python's garbage collections.
    """
    load_decisions()
    # Hashes the files as they are loaded now.
    raybench_sha256()
    _freeze()


def _freeze() -> None:
    """Exclude all objects of now from garbage collections: one takes 0.1 ms then instead of 130."""
    gc.collect()
    gc.freeze()


def _failure(error: BaseException, rank_info: RankInfo) -> Failure:
    """Return the failure of this rank with the text of an exception.

    Not the exception: it may not survive pickling, and its frames hold memory.
    """
    # The CPU allocator, cuBLAS and NCCL have no exception class of their own for it.
    phrases = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    is_out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and mentions(error, *phrases)
    )
    # A module that cannot be imported has a reason of its own.
    cause = error.__cause__ if isinstance(error, UsageError) and error.__cause__ else error
    place = place_among(frames_of(error)) or place_among(frames_of(cause))
    return Failure(
        rank=rank_info.rank,
        status=Status.OOM if is_out_of_memory else Status.ERROR,
        error_type=type(cause).__name__,
        message=message_of(error) + (f", at {place}" if place else ""),
        detail=traceback_of(error),
        # After an error of the device the CUDA context is broken, but not where torch's allocator
        # ran out of memory.
        worker_reusable=isinstance(error, torch.OutOfMemoryError)
        or not (isinstance(error, torch.AcceleratorError) or mentions(error, "CUDA error")),
    )


def _explain_variables(failure: Failure, point: Point) -> Failure:
    """Add to a failure what to do where NCCL cannot do what the job's variables ask for.

    Its error is "invalid usage" then, which may have other reasons, so it is a note.
    """
    asked = [f"{name}={point.env[name]}" for name in _CHOICES_OF_NCCL if name in point.env]
    if not asked or "invalid usage" not in failure.message:
        return failure
    note = (
        f"{' and '.join(asked)} of env may ask for what NCCL does not have here: without the name "
        "of a collective it holds for all of them, and those that gather and broadcast have "
        "fewer algorithms; name it, as in NCCL_ALGO: allreduce:tree"
    )
    return replace(failure, message=f"{failure.message}; {note}")
