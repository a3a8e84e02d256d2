"""The workload `resnet50`: a residual network of torchvision on random images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, cast

from pydantic import Field

from raybench.errors import UsageError, brief
from raybench.job.point import Precision
from raybench.workloads.base import Context
from raybench.workloads.replicas import DdpOptions
from raybench.workloads.training.model import (
    OUTPUT_ERROR,
    CastWeights,
    Compile,
    GradAccumulation,
    Mode,
    Model,
    Optimizer,
    Recipe,
    compute_dtype,
    estimate_step,
    output_error,
    product_bytes,
    slices,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_CLASSES = 1000
# Parameters, and how many numbers all convolutions make of one image of 224 x 224 pixels.
_SIZES = {"resnet18": (11_689_512, 2_483_712), "resnet50": (25_557_032, 11_113_984)}


class ResNet(Model):
    """Trains or runs a residual network of torchvision on random images; one item is one image.

    Its weights are random, from the seed. What its normalisation layers know of the data is that
    of the first batch, as after training: else the outputs of so many layers would explode.
    """

    items = "images"
    title = "Residual network"
    metrics = (OUTPUT_ERROR,)

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
        recipe = Recipe(
            loss=functional.cross_entropy,
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
            compile=compile,
            divide=partial(context.ddp, **ddp),
        )
        first = images[: context.batch_size]
        self.build(
            mode,
            context,
            recipe,
            lambda: self._make_model(preset, layout, first, context),
            slices(inputs, labels, context.batch_size),
            cast_weights=cast_weights,
        )
        if device.type != "meta":
            with self.inference():
                found = _answer(self.model, inputs[: context.batch_size])
            # How far that is from the answer in fp32, relative to the largest there.
            self.output_error = output_error(found, self.__dict__.pop("_exact"))

    @classmethod
    def estimate_memory(cls, settings: Mapping[str, Any]) -> float | None:
        """Return the estimated bytes of a rank at its peak; None as `estimate_step`."""
        parameters, outputs = _SIZES[settings["preset"]]
        images, size = float(settings["batch_size"]), settings["image_size"]
        return estimate_step(
            settings,
            parameters=parameters,
            # Each convolution's output, and that of the normalisation behind it.
            saved=2.0 * product_bytes(settings) * images * outputs * (size / 224) ** 2,
            data=12.0 * images * size**2 * settings["grad_accumulation"],
        )

    def _make_model(
        self, preset: str, layout: torch.memory_format, images: Tensor, context: Context
    ) -> nn.Module:
        """Return the network; but on meta, set `_exact` to its logits in fp32 for `images`.

        These are made in fp32; afterwards the precision of the process is that of the context.
        """
        from raybench.workloads import precision

        model = _import_models().__dict__[preset]().to(memory_format=layout)
        if images.device.type != "meta":
            precision.apply(Precision.FP32)
            _learn_statistics(model, images)
            self._exact = _answer(model, images)
            precision.apply(context.precision)
        return cast("nn.Module", model)


def _import_models() -> Any:
    """Return the module torchvision.models. Raises UsageError where it cannot be imported."""
    try:
        from torchvision import models
    # One for another torch lacks its operators: a RuntimeError, or an OSError of the loader.
    except (ImportError, RuntimeError, OSError) as error:
        import torch

        raise UsageError(
            f"workload resnet50: torchvision cannot be imported ({brief(error)}); install the one "
            f"for torch {torch.__version__} on every node: pip install 'raybench[vision]'"
        ) from error
    return models


def _learn_statistics(model: nn.Module, images: Tensor) -> None:
    """Set the running statistics of all BatchNorm layers to those of these images, in place.

    Leaves the model in training mode.
    """
    import torch
    from torch import nn

    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the average of all batches: here, of the one
    with torch.no_grad():
        model.train()(images)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum


def _answer(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits in evaluation mode, as float32; restores the mode of the model."""
    import torch

    is_training = model.training
    with torch.inference_mode():
        answer: Tensor = model.eval()(images)
    model.train(is_training)
    return answer.float()
