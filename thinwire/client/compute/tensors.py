"""A torch module as one flat vector, and back. Tied weights stand once; frozen ones only in the layout's digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .errors import BadTask
from .places import Places, Tensor, placed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]


def places_of(module: nn.Module) -> Places:
    """Trained tensors are those with `requires_grad`, buffers those that a state dict keeps.

    `BadTask` for a model with nothing to train, or with tensors that no float32 vector can hold.
    """
    first: dict[int, str] = {}
    tensors: list[Tensor] = []
    aliases: list[tuple[str, str]] = []
    frozen = hashlib.sha256()
    for name, tensor, role in _named(module):
        if id(tensor) in first:
            aliases.append((name, first[id(tensor)]))
            continue
        first[id(tensor)] = name
        tensors.append(Tensor(name, tuple(tensor.shape), str(tensor.dtype).split(".")[-1], role))
        if role == "frozen":
            frozen.update(_bytes(tensor))
    if not any(t.role == "trained" and t.size for t in tensors):
        raise BadTask("model() has nothing to train", why="no parameter has requires_grad", hint="unfreeze some")
    digest = frozen.hexdigest() if any(t.role == "frozen" for t in tensors) else ""
    return Places(tuple(tensors), tuple(aliases), digest)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Every name of every tensor, in the module's order, with its role."""
    for name, parameter in _members(module, "_parameters"):
        if nn.parameter.is_lazy(parameter):
            raise BadTask(
                f"model() has a tensor without a shape: {name}",
                why="lazy layers get theirs at the first call",
                hint="call the model once on an example in model(), or give the sizes",
            )
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise BadTask(f"{name} is trained as {parameter.dtype}", why="updates are float32 vectors", hint="float32")
        yield name, parameter, "trained" if parameter.requires_grad else "frozen"
    kept = set(module.state_dict(keep_vars=True))
    for name, buffer in _members(module, "_buffers"):
        if name in kept:
            yield name, buffer, "buffer"


def _members(module: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """What `named_parameters` and `named_buffers` give with every name of a tied one, which only torch 2 can."""
    for place, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in getattr(inner, kind).items():
            if tensor is not None:
                yield (f"{place}.{name}" if place else name), tensor


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(module: nn.Module, places: Places) -> Vector:
    """The trained parameters, one after the other."""
    out: Vector = np.empty(places.size, np.float32)
    named = dict(module.named_parameters())
    for t, span in placed(places.trained):
        out[span] = _flat(named[t.name])
    return out


def write(module: nn.Module, places: Places, vector: Vector) -> None:
    """Set the trained parameters; a gradient that was left over is forgotten."""
    named = dict(module.named_parameters())
    with torch.no_grad():
        for t, span in placed(places.trained):
            named[t.name].copy_(torch.from_numpy(vector[span]).view(t.shape))
            named[t.name].grad = None


def read_buffers(module: nn.Module, places: Places) -> Vector:
    """The buffers of floats (running means and the like) as one vector."""
    named = dict(module.named_buffers())
    parts = [_flat(named[t.name]) for t in places.buffers]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def write_buffers(module: nn.Module, places: Places, vector: Vector) -> None:
    named = dict(module.named_buffers())
    with torch.no_grad():
        for t, span in placed(places.buffers):
            named[t.name].copy_(torch.from_numpy(vector[span]).view(t.shape))


def read_counters(module: nn.Module, places: Places) -> dict[str, int]:
    """The integer buffers of one element."""
    named = dict(module.named_buffers())
    return {t.name: int(named[t.name].item()) for t in places.counters}


def write_counters(module: nn.Module, places: Places, values: Mapping[str, int]) -> None:
    named = dict(module.named_buffers())
    with torch.no_grad():
        for t in places.counters:
            if t.name in values:
                named[t.name].fill_(values[t.name])


def _flat(tensor: torch.Tensor) -> Vector:
    return tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()
