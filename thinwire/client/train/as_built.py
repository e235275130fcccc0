"""Restoring a module to the state in which `model()` built it, before every request.

Several simulated clients share one module, and a device builds its module again whenever its worker restarts. So a
result must not depend on the changes that task code made during earlier requests. Tensors that are sent are set from
outside (`module.py`). Frozen tensors and fixed buffers are compared with their original values. Everything else is
restored here.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from . import module as tensors
from .layout import FLOATS

if TYPE_CHECKING:
    from .layout import Places

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # copying objects of other classes is not safe
MAX_NAMED = 3  # changed tensors named in one message


class Registered(NamedTuple):
    """A parameter or buffer with all its state except its values."""

    tensor: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    hooks: dict[int, Any]


class AsBuilt:
    """Holds the state of a freshly built module except the values of tensors that are sent.

    `restore` resets attributes, submodules, hooks, the mode of each layer, `requires_grad`, tensors that no state dict
    keeps, generators, and lists, dicts and sets in attributes. It does not look into objects of other classes.
    """

    def __init__(self, module: nn.Module, places: Places) -> None:
        self.module, self.places = module, places
        self._containers = _copies(module)
        self._registered = [
            Registered(t, t.shape, t.dtype, t.device, t.requires_grad, dict(t._backward_hooks or {}))
            for kind in ("_parameters", "_buffers")
            for _, t in tensors.members(module, kind)
        ]
        known = {id(tensors.member(module, t.name)) for t in places.tensors}
        held = {id(value): value for container, _ in self._containers for value in _values(container)}.values()
        self._own = [
            (t, t.detach().clone())
            for t in held
            if isinstance(t, torch.Tensor) and id(t) not in known and t.is_leaf and t.layout == torch.strided
        ]
        self._generators = [(g, g.get_state()) for g in held if isinstance(g, torch.Generator)]
        self._digests = {t.name: _digest(tensors.member(module, t.name)) for t in places.untrained}

    def restore(self) -> nn.Module:
        """Restore the module and return it; the caller then sets the values of the tensors that are sent."""
        for container, copy in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(copy)
        for t, shape, dtype, device, requires_grad, hooks in self._registered:
            if t.shape != shape:
                t.data = torch.empty(shape, dtype=dtype, device=device)
            elif t.dtype != dtype or t.device != device:
                t.data = t.data.to(device, dtype)
            if t.grad_fn is not None:  # task code changed it in place within a graph
                t.detach_()
            if t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
            t.grad = None
            if t._backward_hooks is not None:
                t._backward_hooks.clear()
                t._backward_hooks.update(hooks)
        for t, values in self._own:
            if t.grad_fn is not None:
                t.detach_()
            if t.shape != values.shape or t.dtype != values.dtype or t.device != values.device:
                t.data = values.clone()
            elif not torch.equal(t.detach(), values):
                with torch.no_grad():
                    t.copy_(values)
        for generator, state in self._generators:
            generator.set_state(state)
        return self.module

    def changed(self) -> str:
        """Describe the frozen tensors and fixed buffers that have changed; return "" if none has."""
        found = [
            f"frozen tensor {t.name}" if t.role == "frozen" else f"{_kind(t.dtype)} buffer {t.name}"
            for t in self.places.untrained
            if _digest(tensors.member(self.module, t.name)) != self._digests[t.name]
        ]
        more = [f"{len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
        *first, last = [*found[:MAX_NAMED], *more] or [""]
        return f"{', '.join(first)} and {last} were changed" if first else last and f"{last} was changed"


def _copies(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return each container that can be reached from the module's attributes, with a shallow copy of it."""
    found: dict[int, tuple[Any, Any]] = {}
    left: list[Any] = [module]
    while left:
        value = left.pop()
        container = value.__dict__ if isinstance(value, nn.Module) else value
        if id(container) in found or not (isinstance(value, nn.Module) or type(value) in CONTAINERS):
            continue
        found[id(container)] = container, container.copy()
        left += _values(container)
    return list(found.values())


def _values(container: Any) -> Iterator[Any]:
    yield from container.values() if isinstance(container, dict) else container


def _digest(tensor: torch.Tensor | None) -> str:
    """Return the digest of a tensor's type, shape and values; "" for None."""
    if tensor is None:
        return ""
    whole = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    tensors.hash_values(tensor, whole)
    return whole.hexdigest()


def _kind(dtype: str) -> str:
    if dtype.startswith(FLOATS):
        return "float"
    return dtype if dtype == "bool" else "complex" if dtype.startswith("complex") else "integer"
