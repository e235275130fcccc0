"""Flower's quickstart for Lightning: an autoencoder with the older import name of Lightning, trained by Adam."""

from __future__ import annotations

from typing import Any

import pytorch_lightning
import torch
from shipped_data import images
from torch import nn

from thinwire.client import ClientInfo, Split
from thinwire.client.adapters import lightning as adapter


class Autoencoder(pytorch_lightning.LightningModule):
    """Three numbers for an image of 28 x 28 pixels; nothing in it knows of federated learning."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 784))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.measured(batch, "train")

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.measured(batch, "val")

    def measured(self, batch: dict[str, torch.Tensor], stage: str) -> torch.Tensor:
        pixels = batch["image"].flatten(1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(pixels)), pixels)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        return loss


def read(client: ClientInfo) -> Split:
    x, _, mine = images(client, side=28, channels=1)
    train, test = ([{"image": x[at]} for at in part] for part in (mine.train, mine.test))
    return Split(train, test)


model: Any
model, data, loss, metrics, train = adapter.task(Autoencoder, read)
