"""Casts: torch's DDP hooks fp16 and bf16, and hivemind's float16, plain and scaled."""

from __future__ import annotations

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer

WORLD = 8  # the hooks divide before they sum, by the number of processes
LARGEST = torch.finfo(torch.float16).max


def hook(x: torch.Tensor, dtype: torch.dtype) -> Parts:
    """`ddp_comm_hooks.default_hooks.fp16_compress_hook` up to its all-reduce."""
    return [x.to(dtype).div_(WORLD)]


def unhook(parts: Parts, size: int) -> torch.Tensor:
    del size
    return parts[0].float() * WORLD


def clamped(x: torch.Tensor) -> Parts:
    """hivemind's FLOAT16: what is too large for a half becomes the largest one."""
    return [x.clamp(-LARGEST, LARGEST).to(torch.float16)]


def plain(parts: Parts, size: int) -> torch.Tensor:
    del size
    return parts[0].float()


def scaled(x: torch.Tensor) -> Parts:
    """hivemind's MEANSTD_16BIT: less the mean and over the deviation, so that no value leaves half's range."""
    mean = x.mean()
    centred = x - mean
    deviation = centred.norm() / x.numel() ** 0.5
    return [centred.div_(deviation).clamp_(-LARGEST, LARGEST).to(torch.float16), mean, deviation]


def unscaled(parts: Parts, size: int) -> torch.Tensor:
    del size
    halves, mean, deviation = parts
    return halves.float().mul_(deviation).add_(mean)


FP16 = (
    Peer(
        "torch DDP fp16 hook", "torch.distributed.algorithms.ddp_comm_hooks", lambda x: hook(x, torch.float16), unhook
    ),
    Peer("hivemind float16", "hivemind", clamped, plain),
    Peer("hivemind scaled float16", "hivemind", scaled, unscaled),
)
BF16 = (
    Peer(
        "torch DDP bf16 hook", "torch.distributed.algorithms.ddp_comm_hooks", lambda x: hook(x, torch.bfloat16), unhook
    ),
)
