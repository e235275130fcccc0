"""Encode one bit a value, as GRACE does: a byte each, since torch has no kernel that packs bits."""

from __future__ import annotations

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer


def signsgd(x: torch.Tensor) -> Parts:
    """Bernstein et al. 2018: signs alone."""
    return [(x >= 0).to(torch.uint8)]


def plus_minus(parts: Parts, size: int) -> torch.Tensor:
    del size
    return parts[0].float() * 2 - 1


def efsign(x: torch.Tensor) -> Parts:
    """Karimireddy et al. 2019: signs times the mean magnitude."""
    return [(x >= 0).to(torch.uint8), x.abs().mean()]


def times_mean(parts: Parts, size: int) -> torch.Tensor:
    return plus_minus(parts, size) * parts[1]


def onebit(x: torch.Tensor) -> Parts:
    """Seide et al. 2014: those under 0 and the others, each by their mean."""
    under = x < 0
    below, count = torch.where(under, x, 0).sum(), under.sum()
    above = x.sum() - below
    return [under.to(torch.uint8), below / count.clamp(min=1), above / (x.numel() - count).clamp(min=1)]


def two_means(parts: Parts, size: int) -> torch.Tensor:
    del size
    under, below, above = parts
    return torch.where(under.bool(), below, above)


SIGN = (
    Peer("GRACE signsgd", "Bernstein et al. 2018", signsgd, plus_minus),
    Peer("GRACE efsignsgd", "Karimireddy et al. 2019", efsign, times_mean),
    Peer("GRACE onebit", "Seide et al. 2014", onebit, two_means),
)
