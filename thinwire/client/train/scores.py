"""Histograms of a binary classifier's scores, from which whole-set metrics of many clients are pooled.

AUC and F1 are no means: the mean of ten clients' AUCs is not the AUC of the ten test sets together. A histogram can be
summed. A task's `evaluate(model, data)` returns one for each score, made by `histogram`, and the aggregator computes
AUC and F1 from the sum over the clients.

All clients have the same bins. They are equally wide in asinh(logit(score) / SCALE). So they are narrow around a score
of 1/2, where the scores of an untrained model lie, and near 0 and 1 their width is a constant share of the distance to
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadTask, given

BINS = 512
SCALE = 0.05  # in units of the logit: below it bins are equally wide in the score
REACH = 16.0  # the logit of the outermost bins' edges: a float32 score of 1 - 1e-7
MAX_HISTOGRAMS = 4  # an aggregator's limit for one reply (core/score_histogram.py)


@dataclass(frozen=True)
class Histogram:
    """Holds the number of negative and of positive examples in each bin, by rising score.

    A score of 1/2 is in the first bin of the upper half, so F1 at the threshold 1/2 follows without an error.
    """

    negatives: tuple[int, ...]
    positives: tuple[int, ...]

    def to_json(self) -> list[list[int]]:
        """Return the counts as JSON: of the negatives, then of the positives."""
        return [list(self.negatives), list(self.positives)]


def histogram(scores: Any, labels: Any, bins: int = BINS) -> Histogram:
    """Return the histogram of scores from 0 to 1, such as probabilities of the positive class, by their labels.

    `scores` and `labels` are tensors, arrays or lists of the same size; a label is 0 or 1, False or True. `bins` is an
    even number of at most 512. Raise `BadTask` for anything else.

    >>> histogram([0.1, 0.4, 0.6, 0.9], [0, 1, 0, 1], bins=2)
    Histogram(negatives=(1, 1), positives=(1, 1))
    """
    found, wanted = _flat(scores).astype(np.float64), _flat(labels)
    if bins not in range(2, BINS + 1, 2):
        raise _bad(f"bins = {bins!r}", f"an even number from 2 to {BINS}", "leave bins out")
    if found.shape != wanted.shape:
        raise _bad(
            f"{found.size} scores and {wanted.size} labels", "each score has a label", "scores of the positive class"
        )
    if not np.isfinite(found).all() or (found.size and (found.min() < 0 or found.max() > 1)):
        raise _bad("scores that are not all from 0 to 1", "bins are the same on every client", "torch.sigmoid(outputs)")
    if not np.isin(wanted, (0, 1)).all():
        raise _bad("labels other than 0 and 1", "a histogram is of two classes", "labels == 1, one histogram a class")
    at, positive = _bins(found, bins), wanted.astype(bool)
    counts = [np.bincount(at[chosen], minlength=bins) for chosen in (~positive, positive)]
    return Histogram(tuple(counts[0].tolist()), tuple(counts[1].tolist()))


def _bins(scores: Any, bins: int) -> Any:
    """Return the bin of each score."""
    with np.errstate(divide="ignore"):
        logits = np.log(scores) - np.log1p(-scores)
    reach = np.arcsinh(REACH / SCALE)
    place = np.floor(bins / 2 * (1.0 + np.arcsinh(logits / SCALE) / reach))
    return np.clip(place, 0, bins - 1).astype(np.int64)


def _flat(values: Any) -> Any:
    """Return a tensor, an array or a list as a flat array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        return np.asarray(values).reshape(-1)
    except (TypeError, ValueError):
        raise _bad(given(values), "scores and labels are numbers", "torch.cat(scores)") from None


def _bad(what: str, why: str, hint: str) -> BadTask:
    return BadTask(f"histogram(scores, labels) got {what}", why=why, hint=hint)
