"""A LightningModule on scikit-learn's digits, as its author trains it: Adam, and an accuracy of torchmetrics."""

from __future__ import annotations

import lightning
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, own_part
from thinwire.client.adapters import lightning as adapter


class Digits(lightning.LightningModule):
    """A perceptron with dropout; nothing in it knows of federated learning."""

    def __init__(self, width: int = 128, lr: float = 0.002) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def read(client: ClientInfo) -> Split:
    """This client's digits; a fifth of them is kept for validation_step."""
    images, labels = load_digits(return_X_y=True)
    pixels, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train, test = held_out(own_part(labels, client), 0.2, client)
    return Split(TensorDataset(pixels[train], digits[train]), TensorDataset(pixels[test], digits[test]))


model, data, loss, metrics, train = adapter.task(Digits, read, trainer={"gradient_clip_val": 1.0})
