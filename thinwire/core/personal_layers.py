"""Personal layers: the tensors of a model that stay on each client (`[local] personal_layers`).

FedPer keeps the last layers of each client (Arivazhagan et al. 2019, "Federated Learning with Personalization Layers").
FedBN keeps each client's batch normalization (Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization").

A plan names personal tensors by globs. They are in no layout of the run: not in its digest, its vectors, its frames or
its exported model. The rest of Thinwire sees `shared_layout`, so it needs no rule of its own for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

import numpy as np

from thinwire.core.errors import PlanError
from thinwire.core.layout import Layout, Tensor
from thinwire.core.types import Vector

FLOATS = ("float", "bfloat")
MAX_NAMED = 6  # tensors named in one message


@lru_cache(maxsize=64)
def personal_tensors(layout: Layout, patterns: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Return the tensors that these globs make personal: trained ones first, then float buffers, then counters.

    Frozen tensors and fixed buffers never travel, so a glob may match them and changes nothing about them. Raise
    `PlanError` for a glob that matches no other tensor, for one that matches a tied weight under one of its names only,
    and if nothing trained would be left to share.
    """
    if not patterns:
        return ()
    names = {t.name: {t.name} for t in layout.tensors if _travels(t)}
    for other, name in layout.aliases:
        if name in names:
            names[name].add(other)
    for pattern in patterns:
        if not any(fnmatchcase(one, pattern) for tied in names.values() for one in tied):
            raise PlanError(
                f'[local] personal_layers = "{pattern}" matches no tensor that travels',
                why=f"the model sends {_listed(list(names))}",
                hint="thinwire task check shows the names of the model's tensors",
            )
    matched = {name: {one for one in tied if _matches(one, patterns)} for name, tied in names.items()}
    for name, found in matched.items():
        if found and found != names[name]:
            raise PlanError(
                f"[local] personal_layers takes {_listed(sorted(found))} and leaves {_listed(names[name] - found)}",
                why="they are one tied tensor, and a tensor is either personal or shared",
                hint="globs that match all of its names, or none",
            )
    kept = [t for t in layout.tensors if matched.get(t.name)]
    if all(t in kept for t in layout.trained):
        raise PlanError(
            "[local] personal_layers matches every trained tensor",
            why="nothing would be left to train together",
            hint="leave at least one layer shared",
        )
    return tuple(sorted(kept, key=lambda t: (t.role != "trained", not t.dtype.startswith(FLOATS))))


@lru_cache(maxsize=64)
def shared_layout(layout: Layout, patterns: tuple[str, ...]) -> Layout:
    """Return the layout without its personal tensors; the layout itself without globs."""
    kept = {t.name for t in personal_tensors(layout, patterns)}
    if not kept:
        return layout
    tensors = [replace(t, offset=0) for t in layout.tensors if t.name not in kept]
    aliases = [(other, name) for other, name in layout.aliases if name not in kept]
    return Layout.build(tensors, aliases, layout.frozen_digest, layout.frozen_values)


def kept_floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the personal tensors that form one vector of float32: all but counters, in the order of the vector."""
    return [t for t in tensors if t.dtype.startswith(FLOATS)]


def shared_model(
    layout: Layout, patterns: tuple[str, ...], params: Vector, buffers: Vector, counters: Mapping[str, int]
) -> tuple[Layout, Vector, Vector, dict[str, int]]:
    """Return layout, parameters, float buffers and counters of a model without its personal tensors."""
    kept = {t.name for t in personal_tensors(layout, patterns)}
    if not kept:
        return layout, params, buffers, dict(counters)
    floats = [t for t in layout.buffers if t.dtype.startswith(FLOATS)]
    return (
        shared_layout(layout, patterns), _without(params, layout.trained, kept), _without(buffers, floats, kept),
        {name: value for name, value in counters.items() if name not in kept},
    )  # fmt: skip


def _without(vector: Vector, tensors: Sequence[Tensor], kept: set[str]) -> Vector:
    is_shared = [np.full(t.size, t.name not in kept) for t in tensors]
    return vector[np.concatenate(is_shared)] if is_shared else vector


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _travels(t: Tensor) -> bool:
    """Return True for a trained tensor, a float buffer and a counter."""
    if t.role == "buffer":
        return t.dtype.startswith(FLOATS) or (t.size == 1 and not t.dtype.startswith("complex"))
    return t.role == "trained"


def _listed(names: Sequence[str] | set[str]) -> str:
    some = sorted(names) if isinstance(names, set) else list(names)
    more = f" and {len(some) - MAX_NAMED} more" if len(some) > MAX_NAMED else ""
    return ", ".join(some[:MAX_NAMED]) + more
