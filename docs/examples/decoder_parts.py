"""A workload whose step names its parts: attention, mlp and the backward pass."""

from raybench import Context, PositiveInt, Workload


class DecoderParts(Workload):
    """Trains `layers` blocks of attention and MLP on random vectors."""

    def __init__(
        self,
        context: Context,
        *,
        width: PositiveInt = 256,
        layers: PositiveInt = 4,
        seq_len: PositiveInt = 128,
    ) -> None:
        import torch
        from torch import nn

        self.context, self.layers = context, layers
        self.model = nn.ModuleDict(
            {
                "attention": nn.MultiheadAttention(width, 4, batch_first=True),
                "mlp": nn.Sequential(
                    nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                ),
            }
        ).to(context.device)
        self.vectors = torch.randn(context.batch_size, seq_len, width, device=context.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-12)
        self.items_per_step = context.batch_size

    def step(self) -> None:
        region, hidden = self.context.region, self.vectors
        with region("forward"), self.context.autocast():
            for _ in range(self.layers):
                with region("attention"):
                    hidden = hidden + self.model["attention"](hidden, hidden, hidden)[0]
                with region("mlp"):
                    hidden = hidden + self.model["mlp"](hidden)
            loss = hidden.square().mean()
        with region("backward"):
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
