"""A worker that times kernels, copies and collectives, in a process that soon ends.

Its process does not import the compiler, and so starts twice as fast as the process of a `Worker`.
It restores nothing after a point, so it runs built-in workloads only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from raybench.hardware.devices import describe_device
from raybench.job import registry
from raybench.measure import phases
from raybench.records.device import Device, DeviceKind
from raybench.records.measurement import Measurement, RankAnswer
from raybench.records.task import GroupSpec, RankInfo, Task
from raybench.worker.failures import failure_of
from raybench.worker.process_group import ProcessGroup
from raybench.workloads.base import Context, Regions, Workload, apply_precision, as_workload

_TAKE_DOWN_TIMEOUT_S = 2.0


class KernelWorker:
    """Runs points of built-in workloads on one device, one at a time."""

    def __init__(self, kind: DeviceKind, index: int) -> None:
        """Take the device; this makes the CUDA context.

        Args:
            kind: kind of the device.
            index: index of the device in torch; for a CPU worker its number on the node.
        """
        self._device = torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")
        self._index = index
        if kind == "cuda":
            torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)
        self._group = ProcessGroup(self._device)

    def identity(self, *, node_id: str, address: str) -> Device:
        """Return the device of this worker with its host and versions."""
        return describe_device(self._device, self._index, node_id=node_id, address=address)

    def run(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> RankAnswer:
        """Run the point as this rank and return the answer. Collective.

        Args:
            group: process group to use; None for a point of one rank.

        Returns:
            A Failure for any error. Unless `worker_reusable`, the worker must not run again.
        """
        try:
            return self._measure(task, rank_info, group)
        except Exception as error:
            failure = failure_of(error, rank_info)
        is_reusable = failure.worker_reusable and self._group.take_down(_TAKE_DOWN_TIMEOUT_S)
        return replace(failure, worker_reusable=is_reusable)

    def _measure(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> Measurement:
        """Join the group, build the workload and time it."""
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
            regions=Regions(may_compile=False),
        )
        workload_class: Any = as_workload(registry.load_workload(point.workload))

        def build() -> Workload:
            apply_precision(point.precision)
            workload: Workload = workload_class(context, **point.params)
            return workload

        measurement = phases.measure(build, context, task.settings)
        transports = self._group.nccl_log.routes() if group else ()
        return replace(measurement, rank=rank_info.rank, transports=transports)
