"""Models that DistributedDataParallel keeps alike on all ranks, and how their gradients travel.

Loads no torch at import: `plan` and reports read the options.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import Field

from raybench.job.point import Scalar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

# A communication hook of DistributedDataParallel.
CommHook: TypeAlias = "Callable[[Any, GradBucket], Future[Tensor]]"

_NOT_WRAPPED = "unknown: no model was wrapped by context.ddp(), and there is no set_comm_hook"
COMPILED = "unknown: a compiled model would be compiled anew for another way of reducing"
_OWN_HOOK = "unknown: the workload has a communication hook of its own"


class DdpOptions(TypedDict, total=False):
    """Options of DistributedDataParallel as parameters: `**ddp: Unpack[DdpOptions]`.

    A field that is added here becomes a setting of each workload that takes them, and an argument
    of torch's class; nothing else knows their names. They have no effect when world_size is 1.
    Their defaults are torch's.
    """

    bucket_cap_mb: Annotated[
        int,
        Field(
            default=25,
            gt=0,
            description="DDP: bucket size, MiB; 25 is torch's default, which begins with 1 MiB.",
        ),
    ]
    gradient_as_bucket_view: Annotated[
        bool,
        Field(
            default=False,
            description="DDP: gradients are views of the buckets, which saves a copy.",
        ),
    ]
    static_graph: Annotated[
        bool,
        Field(default=False, description="DDP: promise that the graph is the same in every step."),
    ]


@cache
def option_defaults(options: type) -> Mapping[str, Scalar | None]:
    """Return the default of each option by its name; options: DdpOptions or a subclass of it."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0].default for name, hint in hints.items()}


@dataclass(slots=True, kw_only=True)
class _Wrapped:
    """State of a wrapped model.

    options: as DistributedDataParallel was given them. has_begun: a backward pass has reduced its
    gradients. has_our_hook: `set_comm_hook` registered a hook.
    """

    options: Mapping[str, Any]
    has_begun: bool = False
    has_our_hook: bool = False


class Replicas:
    """The models that one workload has wrapped by DistributedDataParallel and still holds."""

    def __init__(self) -> None:
        self._wrapped: WeakKeyDictionary[DistributedDataParallel, _Wrapped] = WeakKeyDictionary()
        self._compiled_before = count_compiled_frames()

    def wrap(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        *,
        device: torch.device,
        process_group: ProcessGroup | None,
    ) -> nn.Module:
        """Return the model under DistributedDataParallel, and keep it; see Context.ddp.

        options: arguments of DistributedDataParallel. process_group: None for all ranks.
        """
        from torch.nn.parallel import DistributedDataParallel

        # A default is not given: where torch is given `bucket_cap_mb`, it is that of the first
        # bucket too, which has 1 MiB else.
        usual = option_defaults(DdpOptions).items()
        chosen = {name: value for name, value in options.items() if (name, value) not in usual}
        settings = {
            "device_ids": [device] if device.type == "cuda" else None,
            "process_group": process_group,
            **chosen,
        }
        ddp = DistributedDataParallel(model, **settings)
        self._wrapped[ddp] = _Wrapped(options=settings)
        return ddp

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not reduce gradients; see Context.no_sync.

        With static_graph the very first pass reduces all the same.
        """
        from torch.nn.parallel import DistributedDataParallel

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
        """Return why `set_comm_hook` must not be called, in the words of a report; None: it may be.

        Where no model was wrapped, code was compiled since, or a model has a hook of the workload.
        """
        if not self._wrapped:
            return _NOT_WRAPPED
        if count_compiled_frames() > self._compiled_before:
            return COMPILED
        if any(len(ddp._comm_hooks) > one.has_our_hook for ddp, one in self._wrapped.items()):
            return _OWN_HOOK
        return None

    def set_comm_hook(self, hook: CommHook | None) -> None:
        """Let gradients of all wrapped models go through the hook; None: as DDP reduces by itself.

        All ranks must call it together. DDP takes one hook only, so each DDP object is initialised
        anew in place, and the gradients that are there are dropped.
        """
        for ddp, wrapped in list(self._wrapped.items()):
            model, is_training = ddp.module, ddp.training
            # All that it had must be gone first, cycles included: its buckets take as much memory
            # as the gradients, which may lie in them, and its hooks on the parameters would reduce
            # them too.
            ddp.__dict__.clear()
            for parameter in model.parameters():
                parameter.grad = None
            gc.collect()
            type(ddp).__init__(ddp, model, **wrapped.options)
            ddp.training = is_training
            wrapped.has_begun, wrapped.has_our_hook = False, hook is not None
            if hook is not None:
                ddp.register_comm_hook(wrapped.options["process_group"], hook)

    def forget(self) -> None:
        """Forget the wrapped models, before another workload uses this object."""
        self._wrapped.clear()
        self._compiled_before = count_compiled_frames()


@contextmanager
def _no_reduction(model: Any) -> Iterator[None]:
    """Return a context in which FSDP2 adds up gradients of `model` without reducing them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def count_compiled_frames() -> int:
    """Return how many code frames torch.compile has processed in this process, so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())
