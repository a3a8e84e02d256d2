"""The workloads `mlp`, `linear`, `resnet50` and `smoke`, which train small networks."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field

from raybench.errors import UsageError, brief, how_to_install
from raybench.job.point import Precision
from raybench.records.metrics import Metric
from raybench.workloads.base import Context, DdpOptions, Workload, WrongResultError, apply_precision
from raybench.workloads.training import (
    OUTPUT_ERROR,
    Batch,
    CastWeights,
    Compile,
    GradAccumulation,
    Mode,
    Model,
    Optimizer,
    Recipe,
    StepBytes,
    compute_dtype,
    estimate_step,
    matmul_element_size,
    slices,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


class Mlp(Model):
    """Trains or runs `layers` linear layers of hidden x hidden with ReLU, on random rows."""

    items = "rows"

    # Many parameters, because each setting of a job file is one.
    def __init__(
        self,
        context: Context,
        *,
        hidden: Annotated[int, Field(gt=0, description="Width of every layer.")] = 1024,
        layers: Annotated[int, Field(gt=0, description="Number of linear layers.")] = 4,
        optimizer: Optimizer = "adam",
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        mode: Mode = "train",
        cast_weights: CastWeights = False,
        **ddp: Unpack[DdpOptions],
    ) -> None:
        import torch
        from torch.nn import functional

        shape = (context.batch_size * grad_accumulation, hidden)
        generator = context.generator()
        inputs = torch.randn(shape, generator=generator, device=context.device)
        if cast_weights:
            inputs = inputs.to(compute_dtype(context))
        targets = torch.randn(shape, generator=generator, device=context.device)
        self.build(
            mode,
            context,
            lambda: linear_stack(hidden, layers),
            slices(inputs, targets, context.batch_size),
            Recipe(
                loss=functional.mse_loss,
                optimizer=optimizer,
                grad_accumulation=grad_accumulation,
                compile=compile,
                parallelize=partial(context.ddp, **ddp),
            ),
            cast_weights=cast_weights,
        )

    @classmethod
    def describe(cls, params: Mapping[str, str]) -> str:
        """Return for example "MLP of 4 layers, 1,024 wide"."""
        layers, hidden = int(params["layers"]), int(params["hidden"])
        noun = "layer" if layers == 1 else "layers"
        return f"MLP of {layers} {noun}, {hidden:,} wide"

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return the number of parameters; None if `params` lack hidden or layers."""
        if "hidden" not in params or "layers" not in params:
            return None
        hidden, layers = int(params["hidden"]), int(params["layers"])
        return layers * (hidden * hidden + hidden)

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return a rank's rough peak in bytes; None for inference, CUDA graphs and uneven steps."""
        hidden, layers = settings["hidden"], settings["layers"]
        parameters, rows = layers * (hidden * hidden + hidden), float(settings["batch_size"])
        element_size = matmul_element_size(settings)
        layer_inputs = rows * hidden * element_size * layers
        # Autocast keeps copies of the weights in 16 bits.
        autocast_weights = 2.0 * parameters if element_size == 2 else 0.0
        step = StepBytes(
            saved=layer_inputs + autocast_weights,
            # The outputs in the type of matrix products, and two fp32 tensors of their shape.
            at_loss=rows * hidden * (8 + element_size),
            # Inputs and targets in fp32.
            data=8.0 * rows * hidden * settings["grad_accumulation"],
        )
        return estimate_step(settings, step, parameters=parameters)


def linear_stack(hidden: int, layers: int) -> nn.Module:
    """Return linear layers of hidden x hidden with ReLU between them, on torch's default device."""
    from torch import nn

    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


# Number of inputs of the layer of `Linear`.
FEATURES = 1024


class Linear(Model):
    """Trains or runs nn.Linear(1024, 1) on random rows with MSE and Adam: Python and launch cost.

    The published test has batch size 64. data: device: every rank has its own `rows` rows on the
    device, and batches are slices. data: dataloader: a torch DataLoader shuffles `rows` rows in
    host memory; the time spent waiting for it is the part `data`.
    """

    items = "rows"
    metrics = (
        Metric(
            name="epoch_s",
            unit="s",
            description="time for all rows of the data set, at the mean step time",
            over_ranks="max",
            over_step="seconds",
        ),
    )
    title = "Linear layer"
    epoch_s: float | None = None

    # Many parameters, because each setting of a job file is one.
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
        import torch
        from torch import nn
        from torch.nn import functional

        # On the meta device there is nothing to load.
        on_device = data == "device" or context.device.type == "meta"
        if on_device:
            options: Any = {"generator": context.generator(), "device": context.device}
        else:
            # The loaders of all ranks need the same data set, as if they read a file.
            options = {"generator": torch.Generator().manual_seed(context.seed), "device": "cpu"}
        inputs, targets = torch.randn(rows, FEATURES, **options), torch.randn(rows, 1, **options)
        divides_rows = not on_device and distributed_sampler and context.world_size > 1
        rows_per_rank = rows // context.world_size if divides_rows else rows
        if context.batch_size > rows_per_rank:
            why = f"{rows} rows over {context.world_size} ranks" if divides_rows else "all of them"
            raise UsageError(
                f"workload linear: batch_size {context.batch_size} is more than the "
                f"{rows_per_rank} rows that each rank has ({why}); lower batch_size or raise rows"
            )
        if on_device:
            batches = slices(inputs, targets, context.batch_size)
        else:
            batches = load_batches(
                context,
                inputs,
                targets,
                num_workers=num_workers,
                pin_memory=pin_memory,
                distributed_sampler=divides_rows,
            )
        self.build(
            mode,
            context,
            lambda: nn.Linear(FEATURES, 1),
            batches,
            Recipe(loss=functional.mse_loss, grad_accumulation=grad_accumulation, compile=compile),
        )
        if not on_device:
            # Steps per epoch: the metric multiplies this number by the duration of a step. With
            # data: device there is no common data set, so there are no epochs.
            self.epoch_s = rows_per_rank / self.items_per_step

    @classmethod
    def why_not(cls, settings: Mapping[str, Any]) -> str | None:
        """Return why these settings cannot run, in one sentence; None if they can."""
        if settings["data"] == "dataloader" and settings["cuda_graph"]:
            return (
                "cuda_graph: true needs data: device; a graph replays its steps without the "
                "DataLoader"
            )
        loader_defaults = {"num_workers": 0, "pin_memory": False, "distributed_sampler": True}
        for name, default in loader_defaults.items():
            # Without a loader the option would have no effect, and two points would be the same.
            if settings["data"] == "device" and settings[name] != default:
                return f"{name} needs data: dataloader; leave it out where data is device"
        return super().why_not(settings)

    @classmethod
    def parameter_count(cls, params: Mapping[str, str]) -> int | None:
        """Return 1025, the number of parameters of the layer."""
        return FEATURES + 1


def load_batches(
    context: Context,
    inputs: Tensor,
    targets: Tensor,
    *,
    num_workers: int,
    pin_memory: bool,
    distributed_sampler: bool,
) -> Iterator[Batch]:
    """Return an endless iterator over full batches on the device, from a shuffling DataLoader.

    The time spent waiting for a batch adds to the part `data` of `context.parts`.

    Args:
        inputs: rows in host memory, equal on all ranks; at least one batch for each rank.
        distributed_sampler: divide the rows over the ranks; otherwise each rank gets all rows.
    """
    from torch import Generator
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dataset = TensorDataset(inputs, targets)
    sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
    if distributed_sampler:
        sampler = DistributedSampler(
            dataset,
            num_replicas=context.world_size,
            rank=context.rank,
            seed=context.seed,
            drop_last=True,
        )
    processes = None
    if num_workers:
        # A process with threads of CUDA, NCCL and Ray must not fork: a lock that a thread holds
        # would stay locked in the child. Preloading saves each process seconds.
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["torch.utils.data"])
    loader = DataLoader(
        dataset,
        batch_size=context.batch_size,
        sampler=sampler,
        shuffle=sampler is None,
        generator=Generator().manual_seed(context.seed + context.rank),
        drop_last=True,
        num_workers=num_workers,
        # The loader would warn without a GPU.
        pin_memory=pin_memory and context.device.type == "cuda",
        persistent_workers=num_workers > 0,
        multiprocessing_context=processes,
    )
    # Start the processes during the set-up, not in the first step.
    first_epoch = iter(loader)

    def batches(iterator: Iterator[list[Tensor]]) -> Iterator[Batch]:
        epoch, device, is_pinned = 0, context.device, loader.pin_memory
        while True:
            # Time only the loader, not the copy to the device: from pageable memory the copy also
            # waits for earlier work of the device, and from pinned memory it is only queued.
            with context.parts.part("data"):
                batch = next(iterator, None)
                if batch is None:
                    epoch += 1
                    if sampler is not None:
                        sampler.set_epoch(epoch)
                    iterator = iter(loader)
                    batch = next(iterator)
            host_inputs, host_targets = batch
            yield (
                host_inputs.to(device, non_blocking=is_pinned),
                host_targets.to(device, non_blocking=is_pinned),
            )

    return batches(first_epoch)


_CLASSES = 1000
# Number of parameters, and number of outputs of all convolutions for an image of 224 x 224 pixels.
_SIZES = {"resnet18": (11_689_512, 2_483_712), "resnet50": (25_557_032, 11_113_984)}


class ResNet(Model):
    """Trains or runs a residual network of torchvision on random images; one item is one image.

    The weights are random. Normalisation layers get the statistics of the first batch, because
    without statistics the outputs of so many layers would explode.
    """

    items = "images"
    title = "Residual network"
    packages = {"torchvision": how_to_install("vision")}
    metrics = (OUTPUT_ERROR,)

    # Many parameters, because each setting of a job file is one.
    def __init__(
        self,
        context: Context,
        *,
        preset: Annotated[
            Literal["resnet18", "resnet50"], Field(description="Network, by its number of layers.")
        ] = "resnet50",
        image_size: Annotated[int, Field(ge=32, description="Height and width, pixels.")] = 224,
        channels_last: Annotated[
            bool, Field(description="Keep images and weights with the channels last in memory.")
        ] = False,
        optimizer: Optimizer = "sgd",
        grad_accumulation: GradAccumulation = 1,
        compile: Compile = False,
        mode: Mode = "train",
        cast_weights: CastWeights = False,
        **ddp: Unpack[DdpOptions],
    ) -> None:
        import torch
        from torch.nn import functional

        layout = torch.channels_last if channels_last else torch.contiguous_format
        shape = (context.batch_size * grad_accumulation, 3, image_size, image_size)
        generator, device = context.generator(), context.device
        images = torch.randn(shape, generator=generator, device=device).to(memory_format=layout)
        labels = torch.randint(_CLASSES, shape[:1], generator=generator, device=device)
        inputs = images.to(compute_dtype(context)) if cast_weights else images
        first_batch = images[: context.batch_size]
        fp32_logits: Tensor

        def make_model() -> nn.Module:
            # `build` calls this, and may then cast or compile the model. So compute the logits for
            # `output_error` here.
            nonlocal fp32_logits
            network: Any = self._load_network(preset)
            model: nn.Module = network.to(memory_format=layout)
            if device.type != "meta":
                apply_precision(Precision.FP32)
                _set_norm_statistics(model, first_batch)
                fp32_logits = _logits(model, first_batch)
                apply_precision(context.precision)
            return model

        self.build(
            mode,
            context,
            make_model,
            slices(inputs, labels, context.batch_size),
            Recipe(
                loss=functional.cross_entropy,
                optimizer=optimizer,
                grad_accumulation=grad_accumulation,
                compile=compile,
                parallelize=partial(context.ddp, **ddp),
            ),
            cast_weights=cast_weights,
        )
        if device.type != "meta":
            with self.inference():
                logits = _logits(self.model, inputs[: context.batch_size])
            error = (logits - fp32_logits).abs().max() / fp32_logits.abs().max()
            self.output_error = float(error)

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return a rank's rough peak in bytes; None for inference, CUDA graphs and uneven steps."""
        parameters, outputs_at_224_pixels = _SIZES[settings["preset"]]
        images, size = float(settings["batch_size"]), settings["image_size"]
        # The outputs of each convolution and of its normalisation.
        saved_at_224_pixels = 2.0 * matmul_element_size(settings) * images * outputs_at_224_pixels
        step = StepBytes(
            saved=saved_at_224_pixels * (size / 224) ** 2,
            # Three channels in fp32.
            data=3 * 4.0 * images * size**2 * settings["grad_accumulation"],
        )
        return estimate_step(settings, step, parameters=parameters)

    def _load_network(self, preset: str) -> nn.Module:
        """Return torchvision's network with random weights; UsageError if it is missing."""
        import torch

        try:
            from torchvision import models
        # A torchvision for another torch raises RuntimeError or OSError.
        except (ImportError, RuntimeError, OSError) as error:
            raise UsageError(
                f"workload resnet50: torchvision cannot be imported ({brief(error)}); install the "
                f"one for torch {torch.__version__} on every node; {self.packages['torchvision']}"
            ) from error
        model: nn.Module = getattr(models, preset)()
        return model


def _set_norm_statistics(model: nn.Module, images: Tensor) -> None:
    """Give each BatchNorm layer the mean and variance of its inputs for these images."""
    import torch

    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # take the statistics of this batch, not a moving average
    with torch.no_grad():
        model.train()(images)
    for norm in norms:
        norm.momentum = 0.1  # torch's default


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits in evaluation mode, as float32."""
    import torch

    is_training = model.training
    with torch.inference_mode():
        logits: Tensor = model.eval()(images)
    model.train(is_training)
    return logits.float()


class NoMajorityError(WrongResultError):
    """Results of several ranks differ, and it is unknown which of them are wrong."""


class Smoke(Workload):
    """Trains a classifier of 784-256-10 by DistributedDataParallel, and checks the result.

    Gradients must be equal on all ranks to the last bit, and the loss must fall. Each rank has
    `rows` random rows of its own.
    """

    items = "rows"
    takes_batch_size = False
    model: nn.Module

    def __init__(
        self,
        context: Context,
        *,
        rows: Annotated[int, Field(gt=0, description="Rows of a step on each rank.")] = 64,
    ) -> None:
        import torch
        from torch import nn

        generator, device = context.generator(), context.device
        torch.manual_seed(context.seed)
        with device:
            self.model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        self._replica = context.ddp(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._inputs = torch.randn(rows, 784, generator=generator, device=device)
        self._labels = torch.randint(10, (rows,), generator=generator, device=device)
        self._loss = nn.functional.cross_entropy
        # Losses of the first step and of the last step.
        self._losses: tuple[Tensor, ...] = ()
        self._context = context
        self.items_per_step = rows

    def step(self) -> None:
        """Do one training step. Collective."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._context.autocast():
            loss = self._loss(self._replica(self._inputs), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        # Keep the first loss, and replace the last loss.
        self._losses = (*self._losses[:1], loss.detach())

    def check(self) -> None:
        """Raise WrongResultError if the last step's gradients differ from most ranks' gradients.

        If no more than half of the ranks agree, all ranks raise NoMajorityError. A loss that has
        not fallen since the first step also raises WrongResultError. Collective.
        """
        import torch
        import torch.distributed as dist

        from raybench.workloads.kernels import digest_of

        rank, world_size = self._context.rank, self._context.world_size
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        digest = digest_of(torch.cat(gradients))
        digests = [digest] * world_size
        if world_size > 1:
            dist.all_gather_object(digests, digest)
        common_digest, count = Counter(digests).most_common(1)[0]
        has_majority = 2 * count > world_size
        if digest != common_digest or not has_majority:
            error_class = WrongResultError if has_majority else NoMajorityError
            raise error_class(
                f"rank {rank}: its gradients differ from those of "
                f"{world_size - digests.count(digest)} other ranks after the same step"
            )
        first, last = float(self._losses[0]), float(self._losses[-1])
        if len(self._losses) > 1 and not last < first:
            raise WrongResultError(f"rank {rank}: the loss went from {first:g} to {last:g}")

    def close(self) -> None:
        """Free the model and its data by deleting all attributes."""
        self.__dict__.clear()
