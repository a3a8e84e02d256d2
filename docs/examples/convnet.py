"""A workload of your own: a small convolutional network on random images."""

from __future__ import annotations

from typing import Annotated, Literal, Unpack

from raybench import Context, DdpOptions, Field, PositiveInt, Workload


class ConvNet(Workload):
    """Trains four convolutions and a classifier on random images."""

    def __init__(
        self,
        context: Context,
        *,
        channels: Annotated[PositiveInt, Field(description="Channels of every layer.")] = 64,
        image_size: Annotated[PositiveInt, Field(description="Height and width, pixels.")] = 64,
        memory_format: Literal["contiguous_format", "channels_last"] = "channels_last",
        compile: bool = False,
        **ddp: Unpack[DdpOptions],
    ) -> None:
        import torch  # here, so that `raybench plan` reads the signature without loading torch
        from torch import nn

        device, layout = context.device, getattr(torch, memory_format)
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        self.model = nn.Sequential(*layers).to(device=device, memory_format=layout)
        forward = context.ddp(self.model, **ddp)
        self._forward = torch.compile(forward) if compile else forward

        torch.manual_seed(context.seed + context.rank)  # other images on every rank
        shape = (context.batch_size, 3, image_size, image_size)
        self._images = torch.randn(shape, device=device).to(memory_format=layout)
        self._labels = torch.randint(10, shape[:1], device=device)
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._scaler = context.grad_scaler()
        self._context = context
        self.items_per_step = context.batch_size  # images that this rank finishes in a step

    def step(self) -> None:
        with self._context.autocast():
            loss = self._loss(self._forward(self._images), self._labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
