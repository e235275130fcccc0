"""Define what the benchmark measures of one method of somebody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """`encode` gives the tensors that would be sent, none of them `x` itself; `decode` makes so many values again."""

    name: str
    source: str
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, int], torch.Tensor]


def sent_bytes(parts: Parts) -> int:
    """Return the bytes of the tensors alone, without framing."""
    return sum(part.numel() * part.element_size() for part in parts)
