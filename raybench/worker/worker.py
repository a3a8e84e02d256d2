"""A worker: one process that owns one device, runs points and returns values.

It does not know Ray, so tests can run it in their own process.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import time
from dataclasses import replace
from typing import Any, Literal

import torch

from raybench.errors import UsageError
from raybench.hangs import responder
from raybench.hardware.devices import Counters, DeviceReading, describe_device
from raybench.job import registry
from raybench.job.point import Point, Precision
from raybench.measure import phases
from raybench.measure.profiling import FlopCount, step_flops, tflops_sustained
from raybench.measure.stopping import import_scipy
from raybench.measure.uneven import GroupProbe, share_out
from raybench.records.code import Code, code_here, differing_files, raybench_sha256
from raybench.records.device import Device
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Breakdown, Failure, Measurement, RankAnswer
from raybench.records.status import Cause
from raybench.records.task import GroupSpec, RankInfo, Task
from raybench.worker import state
from raybench.worker.failures import failure_of
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
    precision_doubts,
)
from raybench.workloads.part import (
    Parameters,
    Part,
    PartFailedError,
    StepKind,
    WorkloadPart,
)
from raybench.workloads.scripts.running import ScriptPart

_STDERR = 2
_TAKE_DOWN_TIMEOUT_S = 2.0
_NCCL_CHOICE_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO")


class Worker:
    """Runs points on one device, one at a time."""

    def __init__(self, kind: Literal["cuda", "cpu"], index: int) -> None:
        """Take the device; this makes the CUDA context and takes seconds.

        Args:
            kind: kind of the device.
            index: index of the device in torch; for a CPU worker its number on the node.
        """
        self._device = torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")
        self._index = index
        self._group = ProcessGroup(self._device)
        # Operations of a step, by process group and kind of step.
        self._flops: dict[object, FlopCount] = {}
        # Speeds of the devices for uneven steps; `share_out` chooses the keys.
        self._group_probes: dict[object, GroupProbe] = {}
        self._gemm_tflops: dict[Precision, float | None] = {}
        # A reading of the device's counters since which nothing has limited its clocks.
        self._unlimited_since: DeviceReading | None = None
        # Workload -> code that was loaded for it.
        self._code: dict[str, Code | None] = {}
        self._address = "127.0.0.1"
        # Whether this process has run no point.
        self._is_new = True
        self._part: Part | None = None
        preload()
        # The thread sleeps until the node's agent asks which rank hangs.
        self._responder = responder.of_this_process()
        self._responder.serve()
        self._enter_device()
        torch.zeros(1, device=self._device)
        if kind == "cuda":
            # torch orders its attention kernels once in a process, and compiled code depends on the
            # order, so this must happen before any compilation.
            tokens = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=self._device)
            choose_kernel("auto", tokens)
        _freeze_live_objects()
        self._counters = Counters(self._device)
        self._state = ProcessState(self._device)

    def identity(self, *, node_id: str, address: str) -> Device:
        """Return the device of this worker with its host and versions; call it before `run`.

        Args:
            address: IP address of the node in Ray; scripts listen on it.
        """
        self._enter_device()
        self._address = address
        return describe_device(self._device, self._index, node_id=node_id, address=address)

    def run(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> RankAnswer:
        """Run the point as this rank, clean up and return the answer. Collective.

        At the time limit the stack is written to stderr, and the point goes on.

        Args:
            group: process group to use; None for a point of one rank.

        Returns:
            A Failure for any error of the workload or of another rank. Unless `worker_reusable`,
                the worker must not run again.
        """
        faulthandler.dump_traceback_later(task.settings.timeout_s, file=_STDERR)
        self._began_s = time.monotonic()
        self._part = None
        self._responder.watch_this_thread()
        # Count the finished blocks of steps from zero.
        self._responder.blocks.restart()
        try:
            answer, part = self._run(task, rank_info, group), self._part
            ended = part.ended_processes if part else ()
            return replace(answer, ended_processes=tuple(sorted(ended)))
        finally:
            self._part = None
            self._responder.blocks.restart()
            faulthandler.cancel_dump_traceback_later()
            self._is_new = False

    def leave(self) -> None:
        """Leave the process group. Collective: all its ranks must be alive and idle."""
        self._group.leave()

    def _run(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> RankAnswer:
        """Run the point and clean up; any exception becomes a Failure."""
        answer: RankAnswer
        is_group_gone = has_script_ended = False
        try:
            self._enter_device()
            self._load_workload(task, rank_info)
            self._state.begin()
            self._time_matrix_products(task)
            answer = self._measure(task, rank_info, group)
            has_script_ended = self._has_script_ended()
        except PartFailedError as error:
            answer = _explain_nccl_choice(replace(error.failure, rank=rank_info.rank), task.point)
        except BaseException as error:  # a workload may raise anything
            answer = _explain_nccl_choice(failure_of(error, rank_info), task.point)
            is_group_gone = isinstance(error, GroupGoneError)
            has_script_ended = self._has_script_ended()
        if is_group_gone or self._group.is_broken(group):
            # Replace the answer: after another rank has failed, this rank may measure garbage.
            cause, message = Cause.PEER_FAILED, "another rank failed"
            # The other ranks may have failed because this rank's script ended.
            if has_script_ended:
                cause, message = Cause.SCRIPT_ENDED, "the script ended by itself before the others"
            rank, reusable = rank_info.rank, answer.worker_reusable
            answer = Failure.of(cause, rank=rank, message=message, worker_reusable=reusable)
        if isinstance(answer, Failure):
            is_reusable = answer.worker_reusable and self._group.take_down(_TAKE_DOWN_TIMEOUT_S)
            if not is_reusable:
                # Do not clean up: cleaning up may wait for lost ranks.
                return replace(answer, worker_reusable=False)
        return self._clean_up(answer, rank_info)

    def _has_script_ended(self) -> bool:
        return self._part is not None and self._part.has_ended

    def _clean_up(self, answer: RankAnswer, rank_info: RankInfo) -> RankAnswer:
        """Restore the process and return the answer, with what the workload left behind."""
        try:
            self._group.destroy_extra_groups()
            leftovers = self._state.restore()
        except Exception as error:
            return replace(failure_of(error, rank_info), worker_reusable=False)
        if not leftovers:
            return answer
        if isinstance(answer, Measurement):
            doubt = Doubt(kind=DoubtKind.LEFT_BEHIND, subject=" and ".join(leftovers))
            answer = replace(answer, doubts=(*answer.doubts, doubt))
        return replace(answer, worker_reusable=False)

    def _time_matrix_products(self, task: Task) -> None:
        """Time large matrix products in each precision that this process has not timed yet."""
        if task.precisions is None:
            return
        # Time all precisions before the first point, because the products heat the device.
        precisions = dict.fromkeys((*task.precisions, task.point.precision))
        untimed = [precision for precision in precisions if precision not in self._gemm_tflops]
        self._gemm_tflops |= tflops_sustained(self._device, untimed)
        if untimed:
            # The heat may have limited the clocks: note since when the clocks are unlimited.
            self._update_unlimited_since()

    def _enter_device(self) -> None:
        # The current CUDA device belongs to the thread, and an actor may change its thread.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _load_workload(self, task: Task, rank_info: RankInfo) -> None:
        """Load the workload; raise UsageError if variables or code differ from the driver's."""
        workload = task.point.workload
        # Settings that a module makes on import must outlast the point, because the module is
        # executed only once. So take them into the state that is restored after each point.
        if workload not in self._code:
            set_torchrun_variables(rank_info, None)
            registry.load_workload(workload)
            self._state = ProcessState(self._device)
            self._state.begin()
            _freeze_live_objects()
            # Hash now: the file may change after it is loaded.
            self._code[workload] = code_here(task.code) if task.code else None
        for name, value in task.worker_environment.items():
            if os.environ.get(name) != value:
                raise UsageError(f"env: this process was not started with {name}={value}")
        loaded_code = self._code[workload]
        if task.code and task.code.script:
            loaded_code = code_here(task.code)  # each point reads its script from the file
        if task.code is None or loaded_code is None or loaded_code == task.code:
            return
        # If the files of the workload are equal, the files of raybench differ.
        files = differing_files(task.code.workload, loaded_code.workload) or ["raybench's own"]
        raise UsageError(
            f"the code on {socket.gethostname()} is not that of the run: {', '.join(files)} "
            "differs; let all nodes have the same files, and leave them alone while a sweep runs"
        )

    def _measure(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> Measurement:
        """Join the group and measure this rank's part of the step."""
        began_s = time.perf_counter()
        self._group.join(task, rank_info, group)
        point = task.point
        part = self._part = self._make_part(task, rank_info, group)
        measurement = phases.measure(
            part.build,
            part.context,
            task.settings,
            start=phases.PointStart(
                began_s=began_s,
                # The clocks have not been limited since this reading of the device's counters.
                unlimited_since=self._unlimited_since,
                in_block=self._responder.blocks.running,
            ),
            profile=task.profile,
            nccl_choices=self._group.nccl_log.choices,
        )
        self._update_unlimited_since()
        # Read the doubts before the workload's settings are undone.
        doubts = (*part.doubts, *measurement.doubts)
        doubts += tuple(precision_doubts(point.precision, self._device))
        self._group.check_is_intact(point.workload)
        # Undo these settings before operations are counted.
        self._group.destroy_extra_groups()
        self._state.restore()
        # Set torchrun's variables again, which `restore` has removed.
        self._group.join(task, rank_info, group)
        self._group.wait_for_free_buffers(self._state.held_bytes)
        apply_precision(point.precision)
        counted = self._count_flops(measurement, part, group)
        return replace(
            measurement,
            # In an uneven step, the workload may run as another rank.
            rank=rank_info.rank,
            share=part.share,
            # A script runs in a process of its own, whose cold start belongs to its set-up.
            is_of_new_process=None if part.has_own_process else self._is_new,
            flops_per_step=counted.flops,
            breakdown=_with_flops_method(measurement.breakdown, counted.method),
            doubts=doubts,
            transports=self._group.nccl_log.routes() if group else (),
            gemm_tflops=self._gemm_tflops.get(point.precision),
            # Launches stay slower after a profiler was in use (pytorch#144455).
            worker_reusable=measurement.profile is None,
        )

    def _make_part(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> Part:
        """Return this rank's part of the step, for a script, an uneven step or an even step."""
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
        if task.code is not None and task.code.functions:
            workload_class = workload_class.of_pickled(task.code.functions)

        def make_workload(context: Context, params: Parameters) -> Workload:
            apply_precision(point.precision)
            state.seed_all(task.seed)
            workload: Workload = workload_class(context, **params)
            return workload

        if task.is_script:
            apply_precision(point.precision)
            # The process of the script writes its own stack at the time limit.
            faulthandler.cancel_dump_traceback_later()
            return ScriptPart(
                context,
                task,
                serve_store=lambda: serve_store(self._address),
                is_aborted=lambda: self._group.is_broken(group),
                deadline_s=self._began_s + task.settings.timeout_s,
            )
        if point.is_uneven:
            return share_out(make_workload, context, point, group, self._group_probes)
        params = tuple(point.params.items())
        kind = StepKind(workload=point.workload, params=params, batch_size=point.batch_size)
        return WorkloadPart(make=make_workload, context=context, kind=kind)

    def _count_flops(
        self, measurement: Measurement, part: Part, group: GroupSpec | None
    ) -> FlopCount:
        """Return the floating-point operations of a step, and how they were counted."""
        if measurement.flops_per_step is not None:
            return FlopCount(flops=measurement.flops_per_step, method="declared by the workload")
        if measurement.items_per_step == 0:
            return FlopCount(flops=None, method="none: the rank has no share of the step")
        if measurement.message_bytes is not None:
            return FlopCount(flops=None, method="none: a collective is no arithmetic")
        if part.kind is None:
            return FlopCount(flops=None, method="unknown: operations of a script are not counted")
        # Counting may communicate, so either all ranks must count or all must use an earlier count.
        # Therefore the group belongs to the key.
        key = (group, part.kind)
        if key not in self._flops:
            workload_class = as_workload(registry.load_workload(part.kind.workload))
            self._flops[key] = step_flops(workload_class, dict(part.kind.params), part.context)
        return self._flops[key]

    def _update_unlimited_since(self) -> None:
        """Read the counters; keep the stored reading if no clock was limited since."""
        reading = self._counters.read(with_energy=False)
        stored = self._unlimited_since
        # The seconds `limited_s` grow only while a clock is limited.
        if reading is None or stored is None or reading.limited_s != stored.limited_s:
            self._unlimited_since = reading


def preload() -> None:
    """Load the modules and hashes that every Worker needs; this needs no device."""
    import_scipy()
    # Hash now: the files may change after they are loaded.
    raybench_sha256()
    _freeze_live_objects()


def _freeze_live_objects() -> None:
    # Later garbage collections skip these objects, and take 0.1 ms instead of 130 ms.
    gc.collect()
    gc.freeze()


def _with_flops_method(breakdown: Breakdown | None, method: str) -> Breakdown | None:
    """Return the breakdown with the method by which floating-point operations were counted."""
    if breakdown is None:
        return None
    return replace(breakdown, methods={**breakdown.methods, "flops_per_step": method})


def _explain_nccl_choice(failure: Failure, point: Point) -> Failure:
    """Add a hint if NCCL seems to reject an algorithm or a protocol that the job selects."""
    chosen = [f"{name}={point.env[name]}" for name in _NCCL_CHOICE_VARIABLES if name in point.env]
    if not chosen or "invalid usage" not in failure.message:
        return failure
    note = (
        f"{' and '.join(chosen)} of env may ask for what NCCL does not have here: without the name "
        "of a collective it holds for all of them, and those that gather and broadcast have "
        "fewer algorithms; name it, as in NCCL_ALGO: allreduce:tree"
    )
    return replace(failure, message=f"{failure.message}; {note}")
