"""Flower's quickstart for transformers: a tiny BERT that classifies texts, trained by AdamW."""

from __future__ import annotations

from shipped_data import PACKAGES, TOKENS, WORDS, pieces
from transformers import AutoModelForSequenceClassification, BertConfig, TrainingArguments

from thinwire.client.adapters import transformers as adapter

CONFIG = BertConfig(
    vocab_size=TOKENS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
    max_position_embeddings=WORDS, num_labels=len(PACKAGES),
)  # fmt: skip
model, data, loss, metrics, train = adapter.task(
    lambda: AutoModelForSequenceClassification.from_config(CONFIG), pieces, TrainingArguments(optim="adamw_torch")
)
