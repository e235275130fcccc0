"""torch's PowerSGD hook up to its two all-reduces: matrices as P Q^T, warm from the last call, without feedback."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer
from thinwire.core.layout import Slice

RANK, MIN_RATE = 4, 2.0  # MIN_RATE: the hook's own, what a matrix has to save to be sent as two


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """By QR, as the hook does where the rank is over 2."""
    factor: torch.Tensor = torch.linalg.qr(matrices).Q
    return factor


class PowerSgd:
    """Vogels et al. 2019 for one segment. Matrices of one shape go through one batched product, as in the hook."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.batches: dict[tuple[int, int], list[int]] = {}  # shape -> where its matrices begin
        self.dense: list[tuple[int, int]] = []
        for piece in slices:
            cols = piece.tensor.row if len(piece.tensor.shape) > 1 else piece.size
            shape = (piece.size // cols, cols)
            if len(piece.tensor.shape) > 1 and sum(shape) * RANK * MIN_RATE < piece.size:
                self.batches.setdefault(shape, []).append(piece.at)
            else:
                self.dense.append((piece.at, piece.at + piece.size))
        draw = torch.Generator().manual_seed(1)
        self.qs = [torch.randn(len(at), cols, RANK, generator=draw) for (_, cols), at in self.batches.items()]

    def encode(self, x: torch.Tensor) -> Parts:
        ps = []
        for number, ((rows, cols), starts) in enumerate(self.batches.items()):
            matrices = torch.stack([x[at : at + rows * cols].view(rows, cols) for at in starts])
            p = orthogonal(torch.bmm(matrices, orthogonal(self.qs[number])))
            ps.append(p)
            self.qs[number] = torch.bmm(matrices.transpose(1, 2), p)
        return [*ps, *self.qs, *(x[a:b].clone() for a, b in self.dense)]

    def decode(self, parts: Parts, size: int) -> torch.Tensor:
        out, rest = torch.zeros(size), iter(parts[2 * len(self.batches) :])
        for number, ((rows, cols), starts) in enumerate(self.batches.items()):
            matrices = torch.bmm(parts[number], parts[number + len(self.batches)].transpose(1, 2))
            for at, matrix in zip(starts, matrices, strict=True):
                out[at : at + rows * cols] = matrix.reshape(-1)
        for a, b in self.dense:
            out[a:b] = next(rest)
        return out


def hook(slices: Sequence[Slice]) -> Peer:
    own = PowerSgd(slices)
    return Peer("torch DDP PowerSGD hook", "Vogels et al. 2019", own.encode, own.decode)
