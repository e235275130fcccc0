"""Train a small Llama on Python source and save it in bf16, as the checkpoint that LoRA starts from.

python examples/lora/make_base.py base
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from two_texts import CODE, CONTEXT, SYMBOLS, windows

STEPS, BATCH = 80, 16

torch.manual_seed(1)
net = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
)  # fmt: skip
rows, optimizer = windows(CODE), torch.optim.AdamW(net.parameters(), lr=0.003)
for step in range(1, STEPS + 1):
    batch = rows[torch.randint(len(rows), (BATCH,))]
    loss = net(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} of {STEPS}: loss {loss.item():.3f}")
net.to(torch.bfloat16).save_pretrained(sys.argv[1])
