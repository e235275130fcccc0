"""Random rounding to few levels, as GRACE has it: QSGD, TernGrad, natural compression. A byte a value."""

from __future__ import annotations

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer

BUCKET = 512  # values that share a norm: what the paper uses
SIGMAS = 2.5
LOWEST = -100  # the exponent that stands for 0


def qsgd(x: torch.Tensor, levels: int) -> Parts:
    """Alistarh et al. 2017: |x| / norm of its bucket in steps of 1 / levels, up or down at random."""
    rows = padded(x).view(-1, BUCKET)
    norms = rows.norm(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    steps = rows.abs().mul_(levels / norms)
    low = steps.floor()
    low += torch.rand_like(steps) < steps - low
    return [low.mul_(rows.sign()).to(torch.int8), norms]


def unqsgd(parts: Parts, size: int, levels: int) -> torch.Tensor:
    symbols, norms = parts
    return (symbols.float() * (norms / levels)).view(-1)[:size]


def padded(x: torch.Tensor) -> torch.Tensor:
    rest = -x.numel() % BUCKET
    return torch.nn.functional.pad(x, (0, rest)) if rest else x


def terngrad(x: torch.Tensor) -> Parts:
    """Wen et al. 2017: sign times the largest, kept with probability |x| / largest, after a clip at 2.5 sigma."""
    bound = SIGMAS * x.std()
    clipped = x.clamp(-bound, bound)
    magnitudes = clipped.abs()
    largest = magnitudes.max()
    kept = torch.rand_like(x) * largest < magnitudes
    return [clipped.sign_().mul_(kept).to(torch.int8), largest]


def ternary(parts: Parts, size: int) -> torch.Tensor:
    del size
    return parts[0].float() * parts[1]


def natural(x: torch.Tensor) -> Parts:
    """Horvath et al. 2019: the power of two below or above at random, so that the mean is exact; sign and exponent."""
    mantissas, exponents = torch.frexp(x)
    magnitudes = mantissas.abs()  # in [1/2, 1): 2 m - 1 is the share of the way from the lower power to the upper one
    down = torch.rand_like(x) >= 2 * magnitudes - 1
    exponents = exponents.sub_(down.int()).clamp_(LOWEST, LOWEST + 127)
    exponents = torch.where(x == 0, LOWEST, exponents).sub_(LOWEST)
    return [(exponents + 128 * (x < 0)).to(torch.uint8)]


def powers(parts: Parts, size: int) -> torch.Tensor:
    codes = parts[0].int()
    exponents = (codes & 127) + LOWEST
    values = torch.where(exponents == LOWEST, 0.0, torch.ldexp(torch.ones(size), exponents))
    return torch.where(codes >= 128, -values, values)


def of_levels(levels: int) -> Peer:
    return Peer(
        f"GRACE qsgd, {levels} levels",
        "Alistarh et al. 2017",
        lambda x: qsgd(x, levels),
        lambda p, n: unqsgd(p, n, levels),
    )


QSGD4, QSGD8 = (of_levels(7),), (of_levels(127),)
TERNARY = (Peer("GRACE terngrad", "Wen et al. 2017", terngrad, ternary),)
NATURAL = (Peer("GRACE natural", "Horvath et al. 2019", natural, powers),)
