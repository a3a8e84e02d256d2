"""What a workload is: a class that is built on a device and does one step at a time.

A workload declares its parameters as keyword-only arguments of `__init__`, with types and
defaults. The job file is checked against them, and `raybench workloads NAME` lists them.
Importing the module must not need torch if `raybench plan` is to stay fast: import torch
where the workload is built.

    from raybench import Context, PositiveInt, Workload

    class Sum(Workload):
        "Adds up a random vector on each device."

        def __init__(self, context: Context, *, length: PositiveInt = 1024) -> None:
            import torch

            self._vector = torch.rand(length, device=context.device)
            self.items_per_step = context.batch_size

        def step(self) -> None:
            self._vector.sum()

`torch.distributed` is set up as under torchrun: when world_size > 1 the default process group
is initialised, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on are in the environment.
TF32 is already switched as the precision asks; autocast and gradient scaling are the workload's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from raybench.job.point import Execution, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup

    from raybench.job.answer import Answer
    from raybench.records.metric import Metric
    from raybench.workloads.replicas import Replicas


# Steps after which a scaler grows: more than its counter, an int32, can hold.
_NEVER_GROWS = 2**31


class WrongResultError(Exception):
    """A step computed something wrong: what, where, and what it should have been."""


class PartTimes:
    """Host time of the current iteration by part of the step, in nanoseconds.

    For what the host waits for, such as the next batch. Work on the device is not timed here.
    """

    def __init__(self) -> None:
        self._spent_ns: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to part `name`."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            spent_ns = time.perf_counter_ns() - start_ns
            self._spent_ns[name] = self._spent_ns.get(name, 0) + spent_ns

    def take(self) -> dict[str, int]:
        """Take what was spent since the last call."""
        spent_ns, self._spent_ns = self._spent_ns, {}
        return spent_ns


class Regions:
    """The parts of a step that are timed on the device, in instrumented steps only.

    are_used: the step has named a region since this was made.
    compiled: names of regions inside code that torch.compile has compiled, which are left out.
    """

    def __init__(self) -> None:
        from torch.compiler import assume_constant_result, is_compiling

        self.are_used = False
        self.compiled = compiled = set[str]()
        self._is_compiling = is_compiling
        # The compiler calls it while it compiles, and compiled code does not.
        self._leave_out = assume_constant_result(  # type: ignore[no-untyped-call]
            lambda name: compiled.add(name)
        )
        self._time: Callable[[str], AbstractContextManager[None]] | None = None

    def region(self, name: str) -> AbstractContextManager[None]:
        """As Context.region."""
        if self._is_compiling():
            self._leave_out(name)
            return _UNTIMED
        if self._time is None:
            self.are_used = True
            return _UNTIMED
        return self._time(name)

    @contextmanager
    def timed_by(self, time: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside the `with` block each region runs in what `time` gives for its name."""
        self._time = time
        try:
            yield
        finally:
            self._time = None


_UNTIMED = nullcontext()


def _no_replicas() -> Replicas:
    from raybench.workloads.replicas import Replicas

    return Replicas()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Execution):
    """Where and how a workload is to be built.

    batch_size: items per device and forward pass; 1 for a workload that takes no batch size.
    device: already the current device of the process when it is a CUDA device. On the meta device
    the workload is only built to count the operations of one step: there is no data, and neither
    communication nor compiling is wanted (world_size is 1).
    cuda_graph: steps will be captured in a CUDA graph, so a step may not wait for the device, and
    an optimizer must be capturable.
    seed: the same on all ranks; add the rank where ranks must draw different data.
    replicas: the models that `ddp` wrapped.
    loss_weight: what the mean loss of this rank's samples is multiplied by, so that the mean over
    the ranks is that over all samples: world_size times its share of them.
    extra_work: forward and backward work to be done besides, as a share of the step's: this rank
    emulates a slower device. sms: multiprocessors that it may use for the same; None: all.
    process_group: of the ranks that train together; None: of all.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    batch_size: int
    seed: int = 0
    parts: PartTimes = field(default_factory=PartTimes)
    regions: Regions = field(default_factory=Regions)
    replicas: Replicas = field(default_factory=_no_replicas)
    loss_weight: float = 1.0
    extra_work: float = 0.0
    sms: int | None = None
    process_group: ProcessGroup | None = None

    def ddp(self, model: nn.Module, **options: Any) -> nn.Module:
        """Wrap the model by DistributedDataParallel with these options of it; alone, return it.

        A model that is on the device, or has only moved there. Where it is wrapped here, raybench
        can tell what its communication costs.
        """
        return self.replicas.wrap(model, self, options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter what a forward and backward pass runs in whose gradients are not reduced yet.

        model: as `ddp` gave it.
        """
        return self.replicas.no_sync(model)

    def region(self, name: str) -> AbstractContextManager[None]:
        """Time what the `with` block issues to the device, as the part `name` of the step.

        In a few instrumented steps after the timed ones; in all others the block just runs. Times
        of one name add up within a step, and an outer region contains those inside of it.
        """
        return self.regions.region(name)

    def generator(self) -> torch.Generator | None:
        """Make a generator on the device, with other numbers on each rank.

        None on the meta device, which has no numbers.
        """
        import torch

        if self.device.type == "meta":
            return None
        return torch.Generator(self.device).manual_seed(self.seed + self.rank)

    def autocast(self) -> AbstractContextManager[object]:
        """Enter what a forward pass and its loss run in: autocast for fp16 and bf16, else nothing.

        Nothing on the meta device, for which torch has no autocast.
        """
        from raybench.workloads.precision import autocast

        return autocast(self)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Scales the gradients of fp16; in other precisions it passes everything through.

        Enabled, it waits for the device once a step, to learn whether a gradient overflowed: that
        is part of what fp16 training costs. Its scale falls while gradients overflow and never
        grows: every growth, after 2000 steps, would end in a step that overflows and is skipped.
        """
        import torch

        is_fp16 = self.precision is Precision.FP16 and self.device.type != "meta"
        return torch.amp.GradScaler(self.device.type, growth_interval=_NEVER_GROWS, enabled=is_fp16)


class Workload(ABC):
    """One thing to time. The first line of the class docstring says what it is.

    A class that does not inherit from this one is as good, if it has `__init__` and `step`.
    What it may have besides, each optional:

    takes_batch_size: class attribute; False where batch sizes mean nothing to it.
    why_not(settings): class method; why a point with these settings cannot be run, in one sentence
    that says what to do; None where it can. Settings by their names in the job file, those of every
    point included. `plan` asks it, so it must do without torch.
    takes_float8: class attribute; True where precision float8 means something to it.
    weighs_loss: class attribute; True where it multiplies its mean loss by `context.loss_weight`.
    The ranks can then have batches of different size.
    items_per_step: samples (rows, sequences) that this rank finishes in one `step()`. Without it
    there is no throughput.
    shares_work: class attribute; True where all ranks finish the same items together, as when one
    sequence is divided over them. items_per_step is then what they finish together, batch_size is
    that of all, and more ranks are strong scaling without an axis of batch sizes.
    ranks_per_item(settings): class method, for a class whose ranks share their items at some points
    only; how many ranks finish the same items together, of a point with these settings. batch_size
    is then that of each group of so many ranks, and items_per_step a rank's part of it.
    estimate_memory(settings): class method; what the memory of a rank of a point with these
    settings is made of when it is largest, as raybench.MemoryParts; None where nobody knows. `plan`
    asks it, so it must do without torch.
    close(): called after the last step, to end processes and threads.
    check(): called between blocks of steps, outside what is timed; raises WrongResultError when a
    step computed something wrong.
    set_comm_hook(hook): for gradients that are reduced without `Context.ddp`. Called after the
    timed steps; from then on gradients go through `hook(state, bucket)`, a communication hook of
    DistributedDataParallel, instead of all_reduce; with None through all_reduce again. On all
    ranks, several times, world_size above 1 only. May be None where it cannot be had.
    model: the nn.Module that is trained, for times by layer.
    flops_per_step: floating-point operations of one step on this rank, where counting those of
    torch's operators would not find them.
    model_flops_per_step: of a model that trains, the same as papers on MFU count them: per token 6
    for each of its parameters, and attention.
    message_bytes, busbw_factor: of a collective, as nccl-tests counts them.
    memory_bytes: what one step reads from and writes to memory.
    items: class attribute; the name of what items_per_step counts, in the plural; `samples`.
    answers: class attribute; what a run answers whose job does not say it: the first of these that
    names a setting that varies in the run, or no setting at all. Without any, the speed-up.
    metrics: class attribute; numbers of its own that the tables and reports are to have. Each is
    read after the timed steps, on each rank, from the attribute of its name; None: not known.
    """

    takes_batch_size: ClassVar[bool] = True
    shares_work: ClassVar[bool] = False
    weighs_loss: ClassVar[bool] = False
    metrics: ClassVar[tuple[Metric, ...]] = ()
    items: ClassVar[str] = "samples"
    answers: ClassVar[tuple[Answer, ...]] = ()
    items_per_step: float

    @abstractmethod
    def step(self) -> None:
        """Do one iteration: issue all its work; do not synchronise unless the work itself does."""
