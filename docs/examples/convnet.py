"""A workload of your own: a small convolutional network on random images."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raybench.workloads.base import Context


class ConvNet:
    """Trains four convolutions and a classifier on random images."""

    def __init__(
        self,
        context: Context,
        *,
        channels: Annotated[int, Field(gt=0, description="Channels of every layer.")] = 64,
        image_size: Annotated[int, Field(gt=0, description="Height and width, pixels.")] = 64,
        memory_format: Annotated[
            Literal["contiguous", "channels_last"],
            Field(description="Layout of the images in memory."),
        ] = "channels_last",
    ) -> None:
        # Imported here, so that `raybench plan` can read the signature without loading torch.
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from raybench.point import Precision
        from raybench.workloads.precision import autocast

        channels_last = memory_format == "channels_last"
        layout = torch.channels_last if channels_last else torch.contiguous_format
        device = context.device
        torch.manual_seed(context.seed)  # the same parameters on every rank
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        model: nn.Module = nn.Sequential(*layers)
        model.to(device=device, memory_format=layout)
        if context.world_size > 1:
            # The process group is up, as under torchrun.
            on_gpu = device.type == "cuda"
            model = DistributedDataParallel(model, device_ids=[device] if on_gpu else None)

        torch.manual_seed(context.seed + context.rank)  # other images on every rank
        shape = (context.batch_size, 3, image_size, image_size)
        images = torch.randn(shape, device=device)
        self._images = images.to(memory_format=layout)
        self._labels = torch.randint(10, shape[:1], device=device)
        self._model = model
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._scaler = torch.amp.GradScaler(
            device.type, enabled=context.precision is Precision.FP16
        )
        self._autocast = lambda: autocast(context)  # float16, bfloat16, or nothing
        self.items_per_step = context.batch_size  # images that this rank finishes in a step

    def step(self) -> None:
        with self._autocast():
            loss = self._loss(self._model(self._images), self._labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
