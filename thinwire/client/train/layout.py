"""The model's layout (tensors by name, shape and role, and their offsets in flat vectors), and key derivation.

Order and offsets are those of `core/layout.py`, which reads `to_json`. `Key`, `derive` and `seed63` compute the same
values as `core/prng.py`, for an interpreter without `core`. Tests hold both pairs equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

FLOATS, COMPLEX = ("float", "bfloat"), "complex"


class Tensor(NamedTuple):
    """Describes one tensor of the model.

    `role` is trained, buffer, frozen, or fixed: a buffer of floats that are not all finite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    @property
    def size(self) -> int:
        """Return the number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Layout:
    """The layout of a model: all tensors in the module's order. `core/layout.py` has a larger class of this name.

    Tied tensors stand once, their other names in `aliases`. `frozen_digest` covers the values of frozen tensors and
    fixed buffers, which every client makes for itself. `frozen_values` is a checksum of each of them, in this order.
    """

    tensors: tuple[Tensor, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    frozen_digest: str = ""
    frozen_values: tuple[str, ...] = ()

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """Return the trained tensors."""
        return tuple(t for t in self.tensors if t.role == "trained")

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the float buffers (running means and the like), which form one flat vector."""
        return tuple(t for t in self.tensors if t.role == "buffer" and t.dtype.startswith(FLOATS))

    @cached_property
    def counters(self) -> tuple[Tensor, ...]:
        """Return the integer buffers of one element, which are sent as plain numbers."""
        return tuple(t for t in self._others if t.size == 1 and not t.dtype.startswith(COMPLEX))

    @cached_property
    def fixed(self) -> tuple[Tensor, ...]:
        """Return all other buffers (permutations, masks, complex numbers), which training must not change."""
        others = {*self._others} - {*self.counters}
        return tuple(t for t in self.tensors if t.role == "fixed" or t in others)

    @cached_property
    def untrained(self) -> tuple[Tensor, ...]:
        """Return the frozen tensors and fixed buffers, which training must not change."""
        return tuple(t for t in self.tensors if t.role == "frozen") + self.fixed

    def split(self, personal: Collection[str]) -> tuple[Layout, Layout]:
        """Return the layouts of the shared tensors and of the personal ones, which these names list."""
        if not personal:
            return self, Layout(())
        shared = tuple(t for t in self.tensors if t.name not in personal)
        aliases = tuple((other, name) for other, name in self.aliases if name not in personal)
        return replace(self, tensors=shared, aliases=aliases), Layout(
            tuple(t for t in self.tensors if t.name in personal)
        )

    @cached_property
    def _others(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.role == "buffer" and not t.dtype.startswith(FLOATS))

    @cached_property
    def size(self) -> int:
        """Return the number of elements of all trained tensors."""
        return sum(t.size for t in self.trained)

    @cached_property
    def buffer_size(self) -> int:
        """Return the number of elements of all float buffers."""
        return sum(t.size for t in self.buffers)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON; its digest identifies the layout, so the keys stay as they are."""
        rows = [[t.name, list(t.shape), t.dtype, t.role] for t in self.tensors]
        told: dict[str, Any] = {"tensors": rows, "aliases": [list(pair) for pair in self.aliases]}
        told["frozen"] = self.frozen_digest
        if self.frozen_values:
            told["values"] = list(self.frozen_values)
        return told


def slices(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, slice]]:
    """Yield each tensor with its slice of the flat vector, one after the other."""
    at = 0
    for t in tensors:
        yield t, slice(at, at + t.size)
        at += t.size


class Key(NamedTuple):
    """128 bits of public randomness as two unsigned 64-bit words."""

    a: int
    b: int = 0


def derive(key: Key, *labels: str | int) -> Key:
    """Derive a key for one purpose; different labels give independent keys."""
    digest = hashlib.blake2s(struct.pack("<QQ", key.a, key.b), digest_size=16, person=b"tw-drv-1")
    for label in labels:
        kind, raw = (b"i", str(label).encode()) if isinstance(label, int) else (b"s", label.encode())
        digest.update(kind + struct.pack("<I", len(raw)) + raw)
    return Key(*struct.unpack("<QQ", digest.digest()))


def seed63(key: Key) -> int:
    """Return a seed of 63 bits for a library's generator (torch, random)."""
    raw = hashlib.blake2s(struct.pack("<QQ", key.a, key.b), digest_size=8).digest()
    return int(struct.unpack("<Q", raw)[0]) >> 1
