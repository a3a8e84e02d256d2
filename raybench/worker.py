"""The inside of a worker: one process that owns one device for the whole run.

It joins a process group when asked, runs one point and answers with a value. It knows nothing
of Ray, so it can be driven in this process by tests and for debugging.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raybench import registry
from raybench.errors import UsageError
from raybench.measure.identity import describe_device
from raybench.measure.phases import measure
from raybench.measure.timing import align_ranks
from raybench.plan import Precision
from raybench.records import Answer, Device, Failure, Group, Measurement, Place, Status, Task
from raybench.workloads import precision
from raybench.workloads.base import Context, Workload

# The driver's deadline ends a point; torch's own must not come before it, nor never.
_GROUP_TIMEOUT_MARGIN_S = 60.0
_DETAIL_CHARACTERS = 4000


class Worker:
    """Runs points on one device, one at a time."""

    def __init__(self, kind: Literal["cuda", "cpu"], index: int) -> None:
        self._device = torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")
        self._group: Group | None = None
        self._prepare()

    def identity(self, *, node_id: str, address: str) -> Device:
        """What this worker's device is."""
        self._enter_device()
        return describe_device(self._device, node_id=node_id, address=address)

    def run(self, task: Task, place: Place, group: Group | None) -> Answer:
        """Form the group if it is another than the last, run the point, clean up.

        Whatever the workload raises comes back as a Failure.
        """
        try:
            self._enter_device()
            return self._measurement(task, place, group)
        except Exception as error:
            return _failure(error, place)
        finally:
            self._clean_up()

    def leave(self) -> None:
        """Take down the process group. All its members must be alive and idle."""
        if self._group is not None:
            dist.destroy_process_group()
            self._group = None

    def _prepare(self) -> None:
        """Pay once, while all workers start, for what every first point would pay for.

        The first optimizer of a process imports 800 modules of torch, which is 1 to 3 s, and the
        first tensor on a GPU makes its context. What is loaded now never goes away, so it is
        frozen: a collection then looks at the workload alone, 0.1 ms instead of 130.
        """
        self._enter_device()
        torch.zeros(1, device=self._device)
        gc.collect()
        gc.freeze()

    def _enter_device(self) -> None:
        # In every method: an actor may run them on another thread than __init__, and the
        # current CUDA device belongs to the thread.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _measurement(self, task: Task, place: Place, group: Group | None) -> Measurement:
        started_s = time.perf_counter()
        _tell_place(place)
        self._join(task, place, group)
        point = task.point
        precision.apply(point.precision)
        torch.manual_seed(task.seed)
        context = Context(
            device=self._device,
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            batch_size=point.batch_size,
            precision=point.precision,
            seed=task.seed,
        )
        workload_class = registry.load(point.workload)
        setup_s: list[float] = []

        def build() -> Workload:
            workload: Workload = workload_class(context, **point.params)
            return workload

        self._reset_peak_memory()
        done = measure(
            build, context, task.settings, lambda: setup_s.append(time.perf_counter() - started_s)
        )
        self._check_group(point.workload)
        return Measurement(
            rank=place.rank,
            repetitions=done.repetitions,
            items_per_step=done.items_per_step,
            setup_s=setup_s[0],
            warnings=tuple(self._precision_warnings(point.precision)),
            **self._peak_memory(),
        )

    def _join(self, task: Task, place: Place, group: Group | None) -> None:
        if group == self._group:
            return
        if group is None:
            raise AssertionError("the old group must be left before a point runs without one")
        os.environ.update(MASTER_ADDR=group.store_address, MASTER_PORT=str(group.store_port))
        timeout = timedelta(seconds=task.settings.timeout_s + _GROUP_TIMEOUT_MARGIN_S)
        store = TCPStore(group.store_address, group.store_port, is_master=False, timeout=timeout)
        # No device_id: torch then splits communicators, which crashes after a second init
        # (pytorch#192109).
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(group.name, store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        self._group = group
        align_ranks(self._device)

    def _check_group(self, workload: str) -> None:
        """Without the group the ranks measure alone, and so would those of the next points."""
        if self._group is not None and not dist.is_initialized():
            raise UsageError(
                f"workload {workload} destroyed the process group, which is raybench's and kept "
                "for the next points; leave dist.destroy_process_group() out of it"
            )

    def _reset_peak_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak_memory(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        return {
            "peak_mem_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "peak_mem_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }

    def _precision_warnings(self, asked: Precision) -> Iterator[str]:
        """What makes the precision another than the one asked for, read back after the samples."""
        if reason := precision.unsupported(asked, self._device):
            yield reason
        switched = Precision.TF32 if asked is Precision.TF32 else Precision.FP32
        if (got := precision.effective()) != switched:
            yield f"precision {asked} asked, but fp32 arithmetic was {got} after the last step"

    def _clean_up(self) -> None:
        """Give the memory back and forget compiled code, so that the next point starts alike."""
        # Only then: with CUDA the reset itself imports inductor, 600 modules in each process.
        if torch._dynamo.utils.counters["frames"]:
            torch._dynamo.reset()
        if self._group is None and dist.is_initialized():
            # A workload's own, made at world size 1: the next group could not be formed.
            dist.destroy_process_group()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _tell_place(place: Place) -> None:
    """The variables of torchrun, which libraries read."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        GROUP_RANK=str(place.node_rank),
    )


def _failure(error: Exception, place: Place) -> Failure:
    """An exception as data: it may not survive pickling, and its frames hold device memory."""
    status = Status.OOM if _is_out_of_memory(error) else Status.ERROR
    text = str(error).strip() or type(error).__name__
    detail = "".join(traceback.format_exception(error))[-_DETAIL_CHARACTERS:]
    alone = place.world_size == 1
    return Failure(
        rank=place.rank,
        status=status,
        error_type=type(error).__name__,
        message=text.splitlines()[0],
        detail=detail,
        # The others of a group may wait for this rank in a collective for ever.
        keeps_worker=alone and not _is_cuda_error(error),
    )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU allocator, cuBLAS and NCCL have no exception class of their own for it.
    told = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in told)


def _is_cuda_error(error: Exception) -> bool:
    """After an error of the device itself the CUDA context of the process stays broken.

    Not after torch's own allocator has run out: it only asked.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
