"""Moments inside the steps of a script, in its own process, once its timed steps are over.

Without `from __future__ import annotations`: DDP compares a hook's annotations with its classes.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raybench.measure.marks import BucketMarks, Mark, comm_ms, marker, milliseconds, tail_ms
from raybench.workloads.replicas import COMPILED, count_compiled_frames

_NO_DDP = "unknown: the script has no model in DistributedDataParallel, whose gradients have a hook"
_OWN_HOOK = "unknown: the script has a communication hook of its own"
_OWN_GROUP = "unknown: the script's DistributedDataParallel has a process group of its own"


class ScriptMarks:
    """Has gradients go another way, and notes when buckets and optimizers were at work."""

    def __init__(self, device: torch.device) -> None:
        self._buckets = BucketMarks(device)
        self._mark = marker(device)
        self._models: list[DistributedDataParallel] = []
        self._is_reduced = True
        self._started: list[Mark] = []
        self._spans: list[list[tuple[Mark, Mark]]] = [[]]
        register_optimizer_step_pre_hook(self._begin_optimizer)

    def hook_gradients(self) -> str:
        """Let gradients come through here from now on; why they cannot, else "".

        DDP takes one hook in its life: none of it is taken before all ranks can.
        """
        self._models = [m for m in gc.get_objects() if type(m) is DistributedDataParallel]
        if not self._models:
            return _NO_DDP
        if any(model._comm_hooks for model in self._models):
            return _OWN_HOOK
        if any(model.process_group is not dist.group.WORLD for model in self._models):
            return _OWN_GROUP
        return COMPILED if count_compiled_frames() else ""

    def time_gradients(self) -> None:
        """Reduce gradients as DDP does by itself, and take the time."""
        for model in self._models:
            model.register_comm_hook(None, self._hook)

    def keep_gradients(self) -> None:
        """Leave gradients as each rank has them."""
        self._is_reduced = False

    def end_optimizer(self) -> None:
        """Note that the step of an optimizer has returned."""
        if self._started:
            self._spans[-1].append((self._started.pop(), self._mark()))

    def end_step(self) -> None:
        """Begin the next iteration."""
        self._buckets.end_step()
        self._spans.append([])

    def take(self, steps: int) -> dict[str, Any]:
        """Take what the last steps had, in ms for each; the device must be done with them."""
        spans, self._spans = self._spans[:-1][-steps:], self._spans[-1:]
        buckets = self._buckets.take()[-steps:]
        return {
            "optimizer_ms": [sum(milliseconds(*span) for span in each) for each in spans],
            "comm_ms": [comm_ms(each) for each in buckets if each],
            "tail_ms": [tail_ms(each) for each in buckets if each],
        }

    def _begin_optimizer(self, *_: object) -> None:
        self._started.append(self._mark())

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        hook = self._buckets.hook if self._is_reduced else noop_hook
        future: torch.futures.Future[torch.Tensor] = hook(None, bucket)
        return future
