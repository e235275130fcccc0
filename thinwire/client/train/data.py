"""Batches of a task's data: by index in an order that a key decides, or as the task's own DataLoader gives them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from .errors import BadTask, describe, is_array
from .layout import Key, derive, seed63
from .module import seed_all
from .protocol import Split

if TYPE_CHECKING:
    Fetch = Callable[[torch.Tensor], Any]

DRAWN = 4096  # indices drawn at once at most, unless one pass has more


def as_split(data: Any) -> Split:
    """Return the result of `data(client)` as train and test; raise `BadTask` if it is no data."""
    split = data if isinstance(data, Split) else Split(data)
    for name, part in (("train", split.train), ("test", split.test)):
        if part is None and name == "test":
            continue
        if not _is_data(part):
            where = f" as {name}" if isinstance(data, Split) else ""
            raise BadTask(
                f"data(client) gave {describe(part)}{where}",
                why="it must give a Dataset, a DataLoader, or Split(train, test) of them",
                hint=_instead(part),
            )
    if count(split.train) == 0:
        raise BadTask("data(client) gave no examples to train on", hint="another --partition or --split")
    return Split(split.train) if count(split.test) == 0 else split


def _is_data(part: Any) -> bool:
    """Return True for data: a list of examples counts, a list of data sets or of columns does not."""
    if isinstance(part, (DataLoader, IterableDataset)):
        return True
    if isinstance(part, list) and (_holds_data(part) or _are_columns(part)):
        return False
    if isinstance(part, (tuple, Mapping, str, bytes, type)) or is_array(part) or hasattr(part, "iloc"):
        return False
    return isinstance(part, Sized) and hasattr(part, "__getitem__")


def _holds_data(parts: Sequence[Any]) -> bool:
    return any(isinstance(one, (Dataset, DataLoader, Split)) for one in parts[:2])


def _are_columns(parts: Sequence[Any]) -> bool:
    """Return True for arrays of different shapes, such as inputs and targets, which no batch can stack."""
    return bool(parts) and all(map(is_array, parts)) and len({tuple(one.shape) for one in parts}) > 1


def _instead(part: Any) -> str:
    """Return the code to write in data(client) in place of this value."""
    if part is None:
        return "return Split(train, test) at the end of data(client)"
    if isinstance(part, (tuple, list)) and any(isinstance(one, Split) for one in part):
        return "return the Split alone"
    if isinstance(part, (tuple, list)) and _holds_data(part):
        return "return Split(train, test)"
    if isinstance(part, Mapping):
        return 'return Split(parts["train"], parts["test"])'
    if isinstance(part, str):
        return "read the file in data(client), and return its examples as a Dataset"
    if isinstance(part, Iterator):
        return "a list or a Dataset: each round goes through the data again"
    if isinstance(part, type):
        return f"return {part.__name__}(...), an object of the class"
    return "return TensorDataset(torch.as_tensor(inputs), torch.as_tensor(targets))"


def count(data: Any) -> int | None:
    """Return the number of examples, or None if it is unknown."""
    if isinstance(data, DataLoader):
        return count(data.dataset)
    return len(data) if isinstance(data, Sized) else None


def shuffled(data: Any, batch: int, key: Key) -> Iterator[Any]:
    """Yield batches without end, for training by steps: one permutation after the other, each batch full.

    A DataLoader is iterated again and again, in its own order.
    """
    if isinstance(data, (DataLoader, IterableDataset)):
        for epoch in itertools.count():
            yield from never_empty(one_pass(data, batch, derive(key, epoch)))
    fetch = fetch_of(data)
    for indices in _orders(len(data), min(batch, len(data)), key):
        yield fetch(indices)


def _orders(size: int, batch: int, key: Key) -> Iterator[torch.Tensor]:
    """Yield the indices of one full batch after the other.

    After the first pass indices are drawn for many batches at once. A draw between two steps of a small model costs ten
    times as much as one that follows another draw.
    """
    rest, epoch, passes_at_once = torch.empty(0, dtype=torch.int64), 0, 1
    while True:
        drawn = [_permutation(size, derive(key, "order", epoch + more)) for more in range(passes_at_once)]
        order = torch.cat([rest, *drawn])
        whole = len(order) // batch * batch
        yield from torch.split(order[:whole], batch)
        rest, epoch = order[whole:], epoch + passes_at_once
        passes_at_once = max(1, min(2 * passes_at_once, DRAWN // size))


def one_pass(data: Any, batch: int, key: Key) -> Iterator[Any]:
    """Yield batches with each example once; the last batch may be smaller."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch)
    if isinstance(data, DataLoader):
        seed_all(derive(key, "order"))  # its sampler uses the global generator, or its own
        for owner in (data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed63(derive(key, "order")))
        yield from data
        return
    fetch = fetch_of(data)
    for indices in torch.split(_permutation(len(data), derive(key, "order")), batch):
        yield fetch(indices)


def in_order(data: Any, batch: int) -> Iterator[Any]:
    """Yield batches with each example once, in order, for evaluation."""
    if isinstance(data, (DataLoader, IterableDataset)):
        yield from one_pass(data, batch, Key(0))
        return
    fetch = fetch_of(data)
    for indices in torch.split(torch.arange(len(data)), batch):
        yield fetch(indices)


def passes(data: Any, epochs: float, batch: int) -> int | None:
    """Return the number of batches in so many epochs, or None if the data's length is unknown."""
    if isinstance(data, DataLoader):
        try:
            return max(1, round(epochs * len(data)))
        except TypeError:
            return None
    size = count(data)
    return None if size is None else max(1, round(epochs * -(-size // batch)))


def require_countable(data: Any, epochs: float, batch: int) -> None:
    """Raise `BadTask` for a fraction of an epoch over data of unknown length."""
    if epochs != int(epochs) and passes(data, epochs, batch) is None:
        raise BadTask(
            f"[local] epochs = {epochs:g}, and data(client) gave data without a length",
            why="nobody knows where half a pass over an IterableDataset ends",
            hint=f"[local] epochs = {max(1, round(epochs))}, or steps; or give the IterableDataset a __len__()",
        )


def moved(batch: Any, device: str) -> Any:
    """Return the batch with all its tensors on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def examples_in(batch: Any) -> int:
    """Return the length of the first tensor in the batch."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    parts: Iterable[Any] = (
        batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
    )
    return next((examples_in(part) for part in parts if not isinstance(part, (str, bytes))), 1)


def fetch_of(data: Any) -> Fetch:
    """Return a function that gets a batch by indices: tensors in one operation, any other data one by one."""
    if (tensors := _tensors(data)) is not None:
        return lambda indices: [tensor[indices] for tensor in tensors]
    if hasattr(data, "__getitems__"):
        return lambda indices: default_collate(data.__getitems__(indices.tolist()))
    return lambda indices: default_collate([data[i] for i in indices.tolist()])


def _tensors(data: Any) -> tuple[torch.Tensor, ...] | None:
    if type(data) is TensorDataset:
        return data.tensors
    if type(data) is Subset and (inner := _tensors(data.dataset)) is not None:
        return tuple(tensor[torch.as_tensor(data.indices)] for tensor in inner)
    return None


def _permutation(size: int, key: Key) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed63(key)))


def never_empty(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; raise `BadTask` if there are none."""
    empty = True
    for batch in batches:
        empty = False
        yield batch
    if empty:
        raise BadTask(
            "data(client) gave a DataLoader or an IterableDataset without a batch",
            hint="drop_last=False, or a smaller batch",
        )


def held_bytes(data: Any) -> int:
    """Return the bytes of the tensors and arrays that a data set holds itself, and not through another data set."""
    values = [data, *vars(data).values()] if hasattr(data, "__dict__") else [data]
    flat = [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]
    return sum(map(_nbytes, flat))


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.element_size() * value.nelement()
    return int(getattr(value, "nbytes", 0)) or (8 if isinstance(value, int) else 0)
