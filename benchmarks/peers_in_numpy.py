"""Encode as a user of plain numpy would write it, in a line or two for each method."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.peers_in_torch.peer import Parts, Peer
from thinwire.core.types import Vector

RATIO = 0.01
BLOCK = 4096


def fp16(x: Vector) -> list[np.ndarray]:
    return [x.astype(np.float16)]


def int8(x: Vector) -> list[np.ndarray]:
    """The largest of each block is 127; the nearest integer."""
    rows = np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scales = np.maximum(np.abs(rows).max(1, keepdims=True), np.finfo(np.float32).tiny) / np.float32(127)
    return [np.rint(rows / scales).astype(np.int8), scales]


def sign(x: Vector) -> list[np.ndarray]:
    return [np.packbits(x >= 0), np.abs(x).mean(keepdims=True)]


def topk(x: Vector) -> list[np.ndarray]:
    places = np.argpartition(np.abs(x), x.size - math.ceil(RATIO * x.size))[x.size - math.ceil(RATIO * x.size) :]
    return [x[places], places.astype(np.int32)]


def peer(name: str, encode: Callable[[Vector], list[np.ndarray]], decode: Callable[[Parts, int], torch.Tensor]) -> Peer:
    return Peer(f"numpy {name}", "numpy", lambda x: [torch.from_numpy(part) for part in encode(x.numpy())], decode)


def signs(parts: Parts, size: int) -> torch.Tensor:
    bits = np.unpackbits(parts[0].numpy(), count=size)
    return (torch.from_numpy(bits).float() * 2 - 1) * parts[1]


def scattered(parts: Parts, size: int) -> torch.Tensor:
    return torch.zeros(size).index_copy_(0, parts[1].long(), parts[0])


FP16 = (peer("astype(float16)", fp16, lambda parts, size: parts[0].float()),)
INT8 = (peer("int8", int8, lambda parts, size: (parts[0].float() * parts[1]).view(-1)[:size]),)
SIGN = (peer("packbits", sign, signs),)
TOPK = (peer("argpartition", topk, scattered),)
