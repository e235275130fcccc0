"""Which package of Python's standard library does a piece of source belong to? A small BERT, fine-tuned by the Trainer.

The model is made from a config, so nothing is downloaded. With a checkpoint on each client,
`AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=4)` takes the place of the two lines of `made`.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from thinwire.client import ClientInfo, Split, held_out, own_part
from thinwire.client.adapters import transformers as adapter

PACKAGES = ("asyncio", "email", "tkinter", "unittest")
TOKENS, LONGEST, PADDING = 2048, 48, 0
MOST = 400  # pieces of a package


class Pieces(Dataset):
    """Pieces of source of different lengths, as dicts of token numbers and a label."""

    def __init__(self, rows: list[tuple[list[int], int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, label = self.rows[index]
        return {"input_ids": tokens, "labels": label}


@cache  # in a simulation many clients share a process
def read() -> list[tuple[list[int], int]]:
    """Return pieces of up to 48 words, each word as its checksum, with the number of their package."""
    rows = []
    for label, package in enumerate(PACKAGES):
        folder = Path(sysconfig.get_path("stdlib")) / package
        text = "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))
        words = re.findall(r"[A-Za-z_]+", text)
        tokens = [1 + zlib.crc32(word.encode()) % (TOKENS - 1) for word in words]
        starts = range(0, len(tokens) - LONGEST, LONGEST)
        rows += [(tokens[at : at + LONGEST - at % 7], label) for at in starts[:MOST]]
    return rows


def made() -> nn.Module:
    config = BertConfig(
        vocab_size=TOKENS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=LONGEST, num_labels=len(PACKAGES), pad_token_id=PADDING,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def pieces(client: ClientInfo) -> Split:
    """This client's pieces; a fifth of them is kept for measuring."""
    rows = read()
    mine = own_part(np.array([label for _, label in rows]), client)
    train, test = held_out(mine, 0.2, client)
    return Split(Pieces([rows[at] for at in train]), Pieces([rows[at] for at in test]))


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch: what a tokenizer's DataCollatorWithPadding does."""
    longest = max(len(one["input_ids"]) for one in examples)
    tokens = torch.full((len(examples), longest), PADDING)
    for row, one in enumerate(examples):
        tokens[row, : len(one["input_ids"])] = torch.tensor(one["input_ids"])
    labels = torch.tensor([one["labels"] for one in examples])
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}


model, data, loss, metrics, train = adapter.task(
    made, pieces, TrainingArguments(weight_decay=0.01, optim="adamw_torch"), collate=padded
)
