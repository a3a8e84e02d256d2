"""Models that DistributedDataParallel keeps alike on all ranks, and how their gradients travel."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from raybench.workloads.training.trained import ddp_defaults

if TYPE_CHECKING:
    from raybench.workloads.base import Context

CommHook = Callable[[Any, GradBucket], Future[Tensor]]

_NOT_WRAPPED = "unknown: no model was wrapped by context.ddp(), and there is no set_comm_hook"
COMPILED = "unknown: a compiled model would be compiled anew for another way of reducing"
_OWN_HOOK = "unknown: the workload has a communication hook of its own"


@dataclass(slots=True, kw_only=True)
class _Wrapped:
    """How a model was wrapped.

    has_begun: a pass has reduced its gradients since. hooks: how many were given by us.
    """

    options: Mapping[str, Any]
    has_begun: bool = False
    hooks: int = 0


class Replicas:
    """The models of one workload that were wrapped, as long as the workload has them."""

    def __init__(self) -> None:
        self._wrapped: WeakKeyDictionary[DistributedDataParallel, _Wrapped] = WeakKeyDictionary()
        self._compiled_before = count_compiled_frames()

    def wrap(self, model: nn.Module, context: Context, options: Mapping[str, Any]) -> nn.Module:
        """As Context.ddp."""
        if context.world_size == 1 or context.device.type == "meta":
            return model
        on_gpu = context.device.type == "cuda"
        # A default is not given: where torch is given `bucket_cap_mb`, it is that of the first
        # bucket too, which has 1 MiB else.
        usual = ddp_defaults().items()
        chosen = {name: value for name, value in options.items() if (name, value) not in usual}
        settings = {
            "device_ids": [context.device] if on_gpu else None,
            "process_group": context.process_group,
            **chosen,
        }
        ddp = DistributedDataParallel(model, **settings)
        self._wrapped[ddp] = _Wrapped(options=settings)
        return ddp

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """As Context.no_sync."""
        # By its method: to import FSDP's class takes half a second, and most points have none.
        if hasattr(model, "set_requires_gradient_sync"):
            return _no_reduction(model)
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        wrapped = self._wrapped.get(model)
        # With static_graph the very first backward pass records the graph and must reduce: under
        # no_sync it fails or, worse, later passes reduce nothing (pytorch#143580, pytorch#187732).
        if wrapped is not None and wrapped.options.get("static_graph") and not wrapped.has_begun:
            wrapped.has_begun = True
            return nullcontext()
        return model.no_sync()

    def why_no_hook(self) -> str | None:
        """Why `set_comm_hook` must not be called; None where it may be."""
        if not self._wrapped:
            return _NOT_WRAPPED
        if count_compiled_frames() > self._compiled_before:
            return COMPILED
        if any(len(ddp._comm_hooks) > wrapped.hooks for ddp, wrapped in self._wrapped.items()):
            return _OWN_HOOK
        return None

    def set_comm_hook(self, hook: CommHook | None) -> None:
        """Let gradients go through the hook from now on; None: as DDP reduces them by itself.

        On all ranks. DDP takes one hook in its life, so it begins another one.
        """
        for ddp, wrapped in list(self._wrapped.items()):
            _wrap_anew(ddp, wrapped.options)
            wrapped.has_begun, wrapped.hooks = False, int(hook is not None)
            if hook is not None:
                ddp.register_comm_hook(wrapped.options["process_group"], hook)

    def forget(self) -> None:
        """Forget what was wrapped: what follows is another workload's."""
        self._wrapped.clear()
        self._compiled_before = count_compiled_frames()


@contextmanager
def _no_reduction(model: Any) -> Iterator[None]:
    """Let FSDP2 add up gradients as they are, until those of a later pass are reduced."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _wrap_anew(ddp: DistributedDataParallel, options: Mapping[str, Any]) -> None:
    """Make the same object anew: whoever holds it goes on with it."""
    model, is_training = ddp.module, ddp.training
    # All that it had must be gone first, cycles included: its buckets take as much memory as the
    # gradients, which may lie in them, and its hooks on the parameters would reduce them too.
    ddp.__dict__.clear()
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    DistributedDataParallel.__init__(ddp, model, **options)
    ddp.training = is_training


def count_compiled_frames() -> int:
    """How much torch.compile has compiled in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())
