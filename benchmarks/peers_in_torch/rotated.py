"""DRIVE and EDEN in plain torch: a random rotation, then signs or the nearest of a few levels. A byte a value.

Written from Vargaftik et al. 2021 and 2022. Blocks of 4096 favour them: their Hadamard transform is two small matrix
products, where that of a whole vector takes a pass over the memory for each doubling; and all blocks share their signs.
"""

from __future__ import annotations

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer
from thinwire.compression.normal_values import LEVELS

SIDE = 64
BLOCK = SIDE * SIDE


def hadamard(side: int) -> torch.Tensor:
    """Sylvester's matrix, not scaled."""
    matrix, twice = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while matrix.shape[0] < side:
        matrix = torch.kron(matrix, twice)
    return matrix


MATRIX = hadamard(SIDE)


def signs() -> torch.Tensor:
    """Both ends know the seed."""
    return torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(1)).float() * 2 - 1


def rotated(rows: torch.Tensor) -> torch.Tensor:
    """H of each row: the transform of 64 x 64 values is that of their columns and of their rows."""
    return (MATRIX @ (rows.view(-1, SIDE, SIDE) @ MATRIX)).view(-1, BLOCK)


def blocks(x: torch.Tensor) -> torch.Tensor:
    rest = -x.numel() % BLOCK
    return (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, BLOCK)


def drive(x: torch.Tensor) -> Parts:
    """Vargaftik et al. 2021, section 4: the rotated signs, and ||x||^2 / ||R x||_1, which makes the mean exact."""
    rows = blocks(x)
    turned = rotated(rows * signs())
    scales = rows.square().sum(1) / turned.abs().sum(1).clamp_(min=1e-30)
    return [(turned >= 0).to(torch.uint8), scales]


def undrive(parts: Parts, size: int) -> torch.Tensor:
    bits, scales = parts
    return back(bits.float() * 2 - 1, scales, size)


def eden(x: torch.Tensor, bits: int) -> Parts:
    """Vargaftik et al. 2022: the nearest level for normal values, and ||x||^2 / <R x, levels>."""
    rows, levels = blocks(x), table(bits)
    turned = rotated(rows * signs())
    squares = rows.square().sum(1)
    codes = torch.bucketize(turned / squares.sqrt().clamp_(min=1e-30).unsqueeze(1), (levels[1:] + levels[:-1]) / 2)
    along = (turned * levels[codes]).sum(1)
    return [codes.to(torch.uint8), squares / along.clamp_(min=1e-30)]


def uneden(parts: Parts, size: int, bits: int) -> torch.Tensor:
    codes, scales = parts
    return back(table(bits)[codes.long()], scales, size)


def table(bits: int) -> torch.Tensor:
    half = torch.tensor(LEVELS[bits])
    return torch.cat((-half.flip(0), half))


def back(levels: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    return (rotated(levels) * signs() * scales.unsqueeze(1)).view(-1)[:size]


def of_bits(bits: int) -> Peer:
    return Peer(
        f"EDEN in torch, {bits} bits", "Vargaftik et al. 2022", lambda x: eden(x, bits), lambda p, n: uneden(p, n, bits)
    )


DRIVE = (Peer("DRIVE in torch", "Vargaftik et al. 2021", drive, undrive),)
EDEN2, EDEN4 = (of_bits(2),), (of_bits(4),)
