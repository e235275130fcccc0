"""Evaluation of a model as sums, counts and histograms, so that the metrics of many clients can be pooled.

Histograms of a binary classifier's scores are for whole-set metrics. AUC and F1 are no means: the mean of ten clients'
AUCs is not the AUC of the ten test sets together. A histogram can be summed. A task's `evaluate(model, data)` returns
one for each score, made by `histogram`, and the aggregator computes AUC and F1 from the sum over the clients. All
clients have the same bins. They are equally wide in asinh(logit(score) / SCALE). So they are narrow around a score of
1/2, where the scores of an untrained model lie, and near 0 and 1 their width is a constant share of the distance to the
end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .data import examples_in, in_order, moved
from .errors import BadTask, Cancelled, describe
from .layout import Key
from .module import as_loss, seeded

if TYPE_CHECKING:
    from .protocol import Sums
    from .task import LoadedTask

BATCH = 512
MAX_METRICS, MAX_METRIC_LETTERS = 64, 64  # an aggregator's limits for one task (core/serialization.py)
IGNORED = -100  # torch's default `ignore_index` of a cross entropy
ROUNDING = 1e-6  # relative; for an accuracy computed from float32 means
BY_BATCH, WHOLE_SET = "metrics(model, batch)", "evaluate(model, data)"  # functions of a task


def never() -> bool:
    """Return False."""
    return False


def evaluate(
    module: nn.Module,
    task: LoadedTask,
    data: Any,
    *,
    device: str = "cpu",
    cancelled: Callable[[], bool] = never,
    most: int | None = None,
) -> Sums:
    """Return {name: (sum, count)} over the data: the task's `metrics`, else loss and, for a classifier, accuracy.

    A loss is the mean of its batch. A metric whose sum is NaN or infinite is left out, since it carries no information.
    `most` is the number of batches to stop after. Invariant: if one batch is not a classifier's, no accuracy is
    reported for the others.
    """
    totals: dict[str, list[float]] = {}
    classifies = True
    with _outputs(module) as output:
        for batch in itertools.islice(in_order(data, BATCH), most):
            if cancelled():
                raise Cancelled
            measured = _measure(module, task, moved(batch, device), output)
            classifies = classifies and "accuracy" in measured
            for name, (value, count) in measured.items():
                entry = totals.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += count
    if not classifies and task.optional("metrics") is None:
        totals.pop("accuracy", None)
    return numbers({name: (total, count) for name, (total, count) in totals.items()})


def numbers(sums: Sums) -> Sums:
    """Return the metrics that are finite: one that is no number on a client's data is left out."""
    return {name: pair for name, pair in sums.items() if all(map(math.isfinite, pair))}


def whole_set(module: nn.Module, task: LoadedTask, data: Any, sums: Sums) -> tuple[Sums, dict[str, list[list[int]]]]:
    """Return the metrics and the histograms of the task's own `evaluate(model, data)`, or none if it has none.

    A metric may be no number (see `numbers`).

    The function gets the test data as `data(client)` gave them, and the model in evaluation mode without gradients. A
    number is a value of the whole set; it counts as much as the client's loss in `sums`. A pair is a sum and a count.
    """
    own = task.optional("evaluate")
    if own is None:
        return {}, {}
    with _outputs(module):
        said = own(module, data)
    if not isinstance(said, Mapping):
        raise _no_sums(describe(said), WHOLE_SET)
    histograms = {str(name): value.to_json() for name, value in said.items() if isinstance(value, Histogram)}
    if len(histograms) > MAX_HISTOGRAMS:
        raise _no_sums(f"{len(histograms)} histograms: more than {MAX_HISTOGRAMS}", WHOLE_SET)
    examples = sums["loss"][1] if "loss" in sums else 1.0
    pairs: dict[str, Any] = {}
    for name, value in said.items():
        if isinstance(value, Histogram):
            pairs.update({f"{name}_auc": (0.0, 1.0), f"{name}_f1": (0.0, 1.0)})  # their names are checked as well
        elif (number := as_number(value)) is not None:
            pairs[str(name)] = (number * examples, examples)
        else:
            pairs[str(name)] = value
    made = {f"{name}_{ending}" for name in histograms for ending in ("auc", "f1")}
    found = {name: pair for name, pair in _checked({**sums, **pairs}, WHOLE_SET).items() if name in pairs}
    return {name: pair for name, pair in found.items() if name not in made}, histograms


def names(module: nn.Module, task: LoadedTask, batch: Any) -> list[str]:
    """Return the names of the metrics of a batch, including those that are not numbers on it."""
    with _outputs(module) as output:
        return sorted(_measure(module, task, batch, output))


def _measure(module: nn.Module, task: LoadedTask, batch: Any, output: list[Any]) -> Sums:
    found: Sums = {}
    own = task.optional("metrics")
    if own is not None:
        found = _checked(own(module, batch))
    if "loss" not in found:
        output.clear()
        examples = examples_in(batch)
        found = {"loss": (float(as_loss(task.module.loss(module, batch))) * examples, float(examples)), **found}
        if own is None and len(output) == 1:  # with several calls, the classifying one is unknown
            found.update(accuracy(output[0], batch))
    return found


def accuracy(output: Any, batch: Any) -> Sums:
    """Count the correct predictions of a classifier; return {} if the batch does not look like a classifier's.

    The output must be logits (N, C), the batch two entries, the second one N integers from 0 to C - 1. An `IGNORED`
    target is not counted.
    """
    targets = batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None
    if not (isinstance(output, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return {}
    fits = output.dim() == 2 and output.shape[1] > 1 and output.is_floating_point()
    if not (fits and targets.dtype == torch.int64 and targets.shape == output.shape[:1]):
        return {}
    counted = targets != IGNORED
    if bool((counted & ((targets < 0) | (targets >= output.shape[1]))).any()):
        return {}
    return {"accuracy": (float((output.argmax(1) == targets).sum()), float(counted.sum()))}


def _checked(metrics: Any, by: str = BY_BATCH) -> Sums:
    """Return the result of the function `by`; raise `BadTask` if it is not a sum and a count by name."""
    if not isinstance(metrics, Mapping):
        raise _no_sums(describe(metrics), by)
    found = {}
    for name, value in metrics.items():
        pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else (None, None)
        total, count = map(as_number, pair)
        if total is None or count is None:
            raise _no_sums(f"{describe(value)} as {str(name)[:MAX_METRIC_LETTERS]!r}", by)
        if count < 0:
            raise _no_sums(f"a negative count as {str(name)[:MAX_METRIC_LETTERS]!r}", by)
        found[str(name)] = (total, count)
    impossible = [name for name in found if len(name) > MAX_METRIC_LETTERS or not name.isprintable()]
    if len(found) > MAX_METRICS or impossible:
        gave = f"the name {impossible[0][:80]!r}" if impossible else f"{len(found)} metrics"
        raise BadTask(
            f"{by} gave {gave}",
            why=f"an aggregator takes {MAX_METRICS} of at most {MAX_METRIC_LETTERS} printable letters",
            hint="return fewer, with shorter names",
        )
    right, count = found.get("accuracy", (0.0, 0.0))
    if right < 0 or right > count * (1 + ROUNDING):
        raise BadTask(
            f"{by} gave an accuracy of {right:g} right of {count:g}",
            why="accuracy is a sum and a count: how many were right, and of how many",
            hint='return {"accuracy": (correct, len(targets))}, or another name for another figure',
        )
    return found


def as_number(value: Any) -> float | None:
    """Return a number, or a tensor or array with one element, as a float; None for all else and for text."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several numbers
        return None


def _no_sums(said: str, by: str) -> BadTask:
    if by == WHOLE_SET:
        return BadTask(
            f"{by} gave {said}",
            why=f"by name it gives a number of the whole set, a sum and a count, or one of {MAX_HISTOGRAMS} histograms",
            hint='return {"sick": histogram(scores, labels)}, after from thinwire.client import histogram',
        )
    return BadTask(
        f"{by} gave {said}",
        why="it must give sums and counts by name: clients' figures are pooled as sum / count",
        hint='return {"accuracy": (correct, len(targets))}',
    )


@contextlib.contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Any]]:
    """Evaluate in this block: the module in evaluation mode, seeded and without gradients.

    It yields the module's outputs, so that the forward pass of the loss also serves the accuracy.
    """
    seen: list[Any] = []
    was_training = module.training
    module.eval()
    handle = module.register_forward_hook(lambda _module, _given, output: seen.append(output))
    try:
        with seeded(Key(0)), torch.no_grad():
            yield seen
    finally:
        handle.remove()
        module.train(was_training)


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
    even number of at most 512. Raise `BadTask` for anything else. A NaN, which a model that diverged gives, counts as
    0: a failure would tell an aggregator that sent such a model whose data drove it there.

    >>> histogram([0.1, 0.4, 0.6, 0.9], [0, 1, 0, 1], bins=2)
    Histogram(negatives=(1, 1), positives=(1, 1))
    """
    found, wanted = np.nan_to_num(_flat(scores).astype(np.float64), posinf=np.inf, neginf=-np.inf), _flat(labels)
    if bins not in range(2, BINS + 1, 2):
        raise _bad(f"bins = {bins!r}", f"an even number from 2 to {BINS}", "leave bins out")
    if found.shape != wanted.shape:
        raise _bad(
            f"{found.size} scores and {wanted.size} labels", "each score has a label", "scores of the positive class"
        )
    if found.size and (found.min() < 0 or found.max() > 1):
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
        raise _bad(describe(values), "scores and labels are numbers", "torch.cat(scores)") from None


def _bad(what: str, why: str, hint: str) -> BadTask:
    return BadTask(f"histogram(scores, labels) got {what}", why=why, hint=hint)
