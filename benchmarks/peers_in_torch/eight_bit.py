"""hivemind's eight bits: uniform, by quantiles, and blockwise (bitsandbytes' dynamic map)."""

from __future__ import annotations

import torch

from benchmarks.peers_in_torch.peer import Parts, Peer

CODES = 256
SIGMAS = 6  # the range of the uniform codes
CHUNK = 100_000  # values whose quantiles are looked for together
BLOCK = 4096


def uniform(x: torch.Tensor) -> Parts:
    """Equal steps over six deviations around the mean; a code's value is the mean of what got it."""
    mean = x.mean()
    step = SIGMAS * (x - mean).norm() / x.numel() ** 0.5 / CODES
    codes = ((x - mean) / step.clamp(min=1e-30)).round_().add_(CODES // 2).clamp_(0, CODES - 1).to(torch.uint8)
    return [codes, means(x, codes)]


def means(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    places = codes.long()
    sums = torch.bincount(places, weights=x, minlength=CODES)
    return (sums / torch.bincount(places, minlength=CODES).clamp(min=1)).float()


def looked_up(parts: Parts, size: int) -> torch.Tensor:
    del size
    codes, values = parts
    return values[codes.long()]


def quantile(x: torch.Tensor) -> Parts:
    """Codes that about equally many values get: borders are the mean of the quantiles of chunks."""
    chunks = x[: x.numel() // CHUNK * CHUNK].view(-1, CHUNK) if x.numel() >= CHUNK else x.view(1, -1)
    borders = torch.quantile(chunks, torch.arange(1, CODES) / CODES, dim=1).mean(1)
    codes = torch.bucketize(x, borders).to(torch.uint8)
    return [codes, means(x, codes)]


def dynamic_map() -> torch.Tensor:
    """Dettmers et al. 2022, section 2: seven decades, and the more linear steps in one the larger its values are."""
    positive = [1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2**decade + 1)
        positive += (((ends[1:] + ends[:-1]) / 2) * 10.0 ** (decade - 6)).tolist()
    return torch.tensor(sorted([0.0, *positive, *(-value for value in positive if value != 1.0)]))


MAP = dynamic_map()
BORDERS = (MAP[1:] + MAP[:-1]) / 2


def blockwise(x: torch.Tensor) -> Parts:
    """The nearest of the map's values times the block's largest magnitude."""
    rest = -x.numel() % BLOCK
    rows = (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, BLOCK)
    largest = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30)
    return [torch.bucketize(rows / largest, BORDERS).to(torch.uint8), largest]


def unblocked(parts: Parts, size: int) -> torch.Tensor:
    codes, largest = parts
    return (MAP[codes.long()] * largest).view(-1)[:size]


INT8 = (
    Peer("hivemind uniform 8-bit", "hivemind", uniform, looked_up),
    Peer("hivemind quantile 8-bit", "hivemind", quantile, looked_up),
    Peer("hivemind blockwise 8-bit", "Dettmers et al. 2022", blockwise, unblocked),
)
