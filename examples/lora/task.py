"""LoRA on a checkpoint that every client has: 8 ranks on each linear layer travel, the base in bf16 does not.

`LORA_BASE` is the folder of the checkpoint; `make_base.py` makes one.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, TrainingArguments
from two_texts import PROSE, windows

from thinwire.client import ClientInfo, Split, held_out, own_part
from thinwire.client.adapters import transformers as adapter

MOST = 800  # windows of all clients together
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def base() -> nn.Module:
    """Load the checkpoint in the precision in which it was saved."""
    found: nn.Module = AutoModelForCausalLM.from_pretrained(os.environ.get("LORA_BASE", "base"), dtype="auto")
    return found


def adapted() -> nn.Module:
    """Add the trained matrices, in float32; the base stays as it is, and frozen."""
    return get_peft_model(base(), LORA)


class Windows(Dataset):
    """Windows of text as dicts; a causal language model shifts the labels itself."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def read(client: ClientInfo) -> Split:
    """This client's windows of prose; a tenth of them is kept for measuring."""
    rows = windows(PROSE)[:MOST]
    train, test = held_out(own_part(np.zeros(len(rows)), client), 0.1, client)
    return Split(Windows(rows[train]), Windows(rows[test]))


model, data, loss, metrics, train = adapter.task(adapted, read, TrainingArguments(weight_decay=0.0))
