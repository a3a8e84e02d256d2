"""A LightningModule trained by the Trainer of PyTorch Lightning, below torchrun."""

import os
import tempfile

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_index):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=10_000,
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
        logger=False,
    )
    dataset = TensorDataset(torch.randn(4096, 16), torch.randint(4, (4096,)))
    trainer.fit(Classifier(), DataLoader(dataset, batch_size=8))


if __name__ == "__main__":
    main()
