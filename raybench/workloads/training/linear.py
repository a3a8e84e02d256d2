"""The workload `linear`: the small DDP test that PyTorch's tutorials use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.memory import MemoryParts
from raybench.records.metric import Metric
from raybench.workloads.base import Context
from raybench.workloads.training.inference import Mode, Model
from raybench.workloads.training.memory_estimate import estimate_rows
from raybench.workloads.training.model_sizes import LINEAR_FEATURES
from raybench.workloads.training.trained import Compile, GradAccumulation, Recipe, slices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raybench.workloads.training.data import LoaderBatches
    from raybench.workloads.training.trained import Batch


class Linear(Model):
    """Trains or runs nn.Linear(1024, 1) on random rows with MSE and Adam: Python and launch cost.

    Its batch size in the published test is 64. data: device: every rank has `rows` rows of its
    own on the device, and batches are slices. data: dataloader: `rows` rows in host memory, in
    shuffled order, through a torch DataLoader; the time spent waiting for it is the part `data`.
    """

    items = "rows"
    metrics = (
        Metric(
            name="epoch_s",
            unit="s",
            description="all rows of the data set once, at the mean step",
            over_ranks="max",
            over_step="seconds",
        ),
    )
    epoch_s: float | None = None

    def __init__(
        self,
        context: Context,
        *,
        data: Annotated[
            Literal["device", "dataloader"], Field(description="Where the rows come from.")
        ] = "device",
        rows: Annotated[
            int, Field(gt=0, description="Rows of the data set; with data: device, of each rank.")
        ] = 10_000,
        num_workers: Annotated[
            int, Field(ge=0, description="Loader: number of its processes; 0 loads in the step.")
        ] = 0,
        pin_memory: Annotated[
            bool, Field(description="Loader: batches in pinned memory; no effect on a CPU.")
        ] = False,
        distributed_sampler: Annotated[
            bool, Field(description="Loader: the ranks share the rows out, else each reads all.")
        ] = True,
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        mode: Mode = "train",
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        from torch import nn
        from torch.nn import functional

        self._loader: LoaderBatches | None = None
        if data == "device" and (num_workers or pin_memory):
            # Such a point would be a repeat of another under a wrong name.
            raise UsageError(
                f"workload linear: num_workers ({num_workers}) and pin_memory ({pin_memory}) need "
                "data: dataloader; leave them out where data is device"
            )
        if data != "device" and context.cuda_graph:
            raise UsageError(
                "workload linear: cuda_graph: true needs data: device; a graph replays its steps "
                "without the DataLoader"
            )
        # On the meta device there is nothing to load.
        if data == "device" or context.device.type == "meta":
            batches = _device_batches(context, rows)
        else:
            batches = self._loader = _loader_batches(
                context, rows, num_workers, pin_memory, distributed_sampler
            )
        recipe = Recipe(
            loss=functional.mse_loss,
            optimizer="adam",
            grad_accumulation=grad_accumulation,
            compile=compile,
        )
        self.build(mode, context, recipe, lambda: nn.Linear(LINEAR_FEATURES, 1), batches)
        if self._loader is not None:
            # Rows on the device are each rank's own, no data set that they go through together.
            self.epoch_s = self._loader.rows / self.items_per_step

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> MemoryParts | None:
        """Estimate the memory of a rank with these settings; None where nothing is trained."""
        return estimate_rows(settings, LINEAR_FEATURES)

    def close(self) -> None:
        """Free the model and the data, and end the loader's processes."""
        loader = self._loader
        super().close()
        if loader is not None:
            loader.close()


def _device_batches(context: Context, rows: int) -> Iterator[Batch]:
    import torch

    from raybench.workloads.training.data import check_batch_size

    check_batch_size(context, rows, "all of them")
    generator = context.generator()
    inputs = torch.randn(rows, LINEAR_FEATURES, generator=generator, device=context.device)
    targets = torch.randn(rows, 1, generator=generator, device=context.device)
    return slices(inputs, targets, context.batch_size)


def _loader_batches(
    context: Context, rows: int, num_workers: int, pin_memory: bool, distributed_sampler: bool
) -> LoaderBatches:
    import torch

    from raybench.workloads.training.data import loader_batches

    # One data set for all ranks, as a file would be: the sampler shares it out.
    generator = torch.Generator().manual_seed(context.seed)
    return loader_batches(
        context,
        torch.randn(rows, LINEAR_FEATURES, generator=generator),
        torch.randn(rows, 1, generator=generator),
        num_workers=num_workers,
        pin_memory=pin_memory,
        distributed_sampler=distributed_sampler,
    )
