"""Sparsifiers as GRACE has them: values and int64 places of what is kept, 96 bits each."""

from __future__ import annotations

import math

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer

RATIO = 0.01
SAMPLED = 0.01  # of all values, where DGC looks for its threshold
THRESHOLD = 2.6  # root mean squares


def kept(size: int) -> int:
    return max(1, math.ceil(RATIO * size))


def topk(x: torch.Tensor) -> Parts:
    """Aji and Heafield 2017: the largest magnitudes."""
    places = torch.topk(x.abs(), kept(x.numel()), sorted=False).indices
    return [x[places], places]


def dgc(x: torch.Tensor) -> Parts:
    """Lin et al. 2018, section 3: a threshold from a sample; of far too many the largest once more, exactly."""
    magnitudes = x.abs()
    sample = magnitudes[torch.randint(x.numel(), (max(1, int(SAMPLED * x.numel())),))]
    threshold = torch.topk(sample, kept(sample.numel())).values[-1]
    places = (magnitudes >= threshold).nonzero().squeeze(1)
    if places.numel() > 1.3 * kept(x.numel()):
        places = places[torch.topk(magnitudes[places], kept(x.numel()), sorted=False).indices]
    return [x[places], places]


def threshold(x: torch.Tensor) -> Parts:
    """Strom 2015: what is over a threshold."""
    least = THRESHOLD * x.norm() / x.numel() ** 0.5
    places = (x.abs() >= least).nonzero().squeeze(1)
    return [x[places], places]


def scattered(parts: Parts, size: int) -> torch.Tensor:
    values, places = parts
    return torch.zeros(size).index_copy_(0, places, values)


def drawn(size: int) -> torch.Tensor:
    """Draw the same places on both ends: both know the seed."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(1))[: kept(size)]


def randk(x: torch.Tensor) -> Parts:
    """Stich et al. 2018: a share of the places at random; values alone are sent."""
    return [x[drawn(x.numel())]]


def redrawn(parts: Parts, size: int) -> torch.Tensor:
    return torch.zeros(size).index_copy_(0, drawn(size), parts[0])


TOPK = (
    Peer("GRACE topk (torch.topk)", "Aji and Heafield 2017", topk, scattered),
    Peer("GRACE dgc", "Lin et al. 2018", dgc, scattered),
)
RANDK = (Peer("GRACE randk", "Stich et al. 2018", randk, redrawn),)
OVER = (Peer("GRACE threshold", "Strom 2015", threshold, scattered),)
