"""This module defines a model's layout: the place of each tensor in one flat vector, and the vector's segments."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

Role = Literal["trained", "buffer", "frozen", "fixed"]  # fixed: a buffer of floats that are not all finite

MAX_NAMED = 5  # differences in one sentence
MAX_LETTERS = 60  # of a tensor's name, shape or type in one sentence
MAX_ELEMENTS = 2**53  # along one dimension: JSON has no larger exact integers
CONTROL = "control"  # prefix of the names of control variates
FLOAT_BYTES = 4  # of a trained value
SEGMENT_FLOATS = 64 * 2**20 // FLOAT_BYTES  # a segment holds at most 64 MiB of float32


@dataclass(frozen=True)
class Tensor:
    """Describes one tensor of the model; `offset` (in elements) is its place among the tensors of its role."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: Role = "trained"
    offset: int = 0

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Return the number of elements in one row, the smallest unit that a slice keeps whole."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Slice:
    """Describes elements `start` to `stop` of one tensor, which lie at `at` in their segment."""

    tensor: Tensor
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """Describes a sequence of whole tensors of at most 64 MiB, or a slice of at most 64 MiB of one larger tensor.

    Invariant: one segment is one Vector, one State, one Payload and one frame; it holds trained elements `start` to
    `stop`.
    """

    index: int
    start: int
    stop: int
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """Return the segment's range in the whole vector."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Layout:
    """Holds all tensors of a model in order; tied weights are listed once, their other names in `aliases`.

    >>> layout = Layout.of({"w": (3, 2), "b": (2,)})
    >>> layout.size, [(t.name, t.offset) for t in layout.trained]
    (8, [('w', 0), ('b', 6)])
    """

    tensors: tuple[Tensor, ...]
    aliases: tuple[tuple[str, str], ...] = ()  # (other name, name in `tensors`)
    frozen_digest: str = ""  # SHA-256 over the frozen tensors' bytes: they are never sent
    frozen_values: tuple[str, ...] = ()  # a checksum of each, to name the one that differs; not in the digest
    control_from: int = 0  # the first trained tensor that is a control variate; 0: there are none

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """Return a layout of trained float32 tensors, for tests and examples."""
        return cls.build([Tensor(name, tuple(shape)) for name, shape in shapes.items()])

    @classmethod
    def build(
        cls,
        tensors: Sequence[Tensor],
        aliases: Sequence[tuple[str, str]] = (),
        frozen_digest: str = "",
        frozen_values: Sequence[str] = (),
    ) -> Layout:
        """Place tensors one after the other within their roles; raise ValueError for a name that occurs twice."""
        ends: dict[str, int] = {}
        placed = []
        for t in tensors:
            at = ends.get(t.role, 0)
            placed.append(Tensor(t.name, tuple(int(n) for n in t.shape), t.dtype, t.role, at))
            ends[t.role] = at + t.size
        names = [t.name for t in placed] + [other for other, _ in aliases]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tensor names stand twice in the layout: {', '.join(sorted(twice))}")
        return cls(tuple(placed), tuple(aliases), frozen_digest, tuple(frozen_values))

    @cached_property
    def with_control(self) -> Layout:
        """Return the layout of a SCAFFOLD run: the model, then a control variate of each tensor in segments of their
        own.

        >>> [t.name for t in Layout.of({"w": (2,)}).with_control.trained]
        ['w', 'control/w']
        """
        beside = [Tensor(f"{CONTROL}/{t.name}", t.shape, t.dtype) for t in self.trained]
        made = Layout.build([*self.tensors, *beside], self.aliases, self.frozen_digest, self.frozen_values)
        return replace(made, control_from=len(self.trained))

    def of_role(self, role: Role) -> tuple[Tensor, ...]:
        """Return the tensors of a role, in order."""
        return tuple(t for t in self.tensors if t.role == role)

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """Return the trained tensors, in order."""
        return self.of_role("trained")

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers, in order."""
        return self.of_role("buffer")

    @cached_property
    def size(self) -> int:
        """Return the number of trained elements: the length of the whole vector."""
        return sum(t.size for t in self.trained)

    @property
    def model_size(self) -> int:
        """Return the number of trained elements of the model itself, which precede the control variates."""
        return self.size // 2 if self.control_from else self.size

    @property
    def model_tensors(self) -> tuple[slice, ...]:
        """Return the range of each trained tensor of the model itself in the whole vector.

        >>> Layout.of({"w": (3, 2), "b": (2,)}).model_tensors
        (slice(0, 6, None), slice(6, 8, None))
        """
        return tuple(slice(t.offset, t.offset + t.size) for t in self.trained[: self.control_from or None] if t.size)

    @property
    def model_segments(self) -> tuple[Segment, ...]:
        """Return the segments of the model itself, without control variates."""
        return self.segments[: len(self.segments) // 2] if self.control_from else self.segments

    @property
    def control_segments(self) -> tuple[Segment, ...]:
        """Return the segments of the control variates; none without SCAFFOLD."""
        return self.segments[len(self.segments) // 2 :] if self.control_from else ()

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of the trained vector, in order, without gap or overlap."""
        cuts: list[Segment] = []
        run: list[Slice] = []

        def close() -> None:
            if run:
                start = run[0].tensor.offset + run[0].start
                cuts.append(Segment(len(cuts), start, start + sum(s.size for s in run), tuple(run)))
                run.clear()

        for place, t in enumerate(self.trained):
            if place == self.control_from:
                close()
            if t.size > SEGMENT_FLOATS:
                close()
                whole_rows = SEGMENT_FLOATS // t.row * t.row
                step = whole_rows or SEGMENT_FLOATS  # one row alone may be larger than a segment
                for start in range(0, t.size, step):
                    run.append(Slice(t, start, min(start + step, t.size), 0))
                    close()
                continue
            if sum(s.size for s in run) + t.size > SEGMENT_FLOATS:
                close()
            run.append(Slice(t, 0, t.size, sum(s.size for s in run)))
        close()
        return tuple(cuts)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 in hex over names, shapes, dtypes, roles, aliases and the frozen tensors' digest."""
        return hashlib.sha256(json.dumps(self._hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __hash__(self) -> int:
        """Return the hash of the digest: the tensors of a large model are hashed once."""
        return hash(self.digest)

    @property
    def _hashed(self) -> dict[str, Any]:
        rows = [[t.name, list(t.shape), t.dtype, t.role] for t in self.tensors]
        return {"tensors": rows, "aliases": [list(pair) for pair in self.aliases], "frozen": self.frozen_digest}

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values, from which `from_json` reads it."""
        return {**self._hashed, **({"values": list(self.frozen_values)} if self.frozen_values else {})}

    @property
    def text(self) -> str:
        """Return the layout's JSON as a client's hello carries it."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Layout:
        """Read a layout from JSON values; raise ValueError or TypeError if they are not valid, because a hello may
        bring them.
        """
        tensors = [
            Tensor(str(name), _dims(shape), str(dtype), _role(role)) for name, shape, dtype, role in raw["tensors"]
        ]
        values = [str(value) for value in raw.get("values", ())]
        return cls.build(tensors, [(a, b) for a, b in raw["aliases"]], raw["frozen"], values)


def _dims(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return the dimensions; raise ValueError unless all are integers, because a float such as 1e308 would have 309
    digits.
    """
    if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape):
        raise ValueError(f"a shape's dimensions are whole numbers of at most {MAX_ELEMENTS}")
    return tuple(shape)


def _role(role: Any) -> Role:
    if role not in get_args(Role):
        raise ValueError(f"{str(role)[:80]!r} is no role of a tensor")
    return role  # type: ignore[no-any-return]  # it is one of them


def differences(own: Layout, expected: Layout) -> str:
    """Name the first tensors by which a layout differs from the expected one; return "" if their digests agree.

    >>> differences(Layout.of({"w": (2, 3), "c": (1,)}), Layout.of({"w": (2, 4), "b": (2,)}))
    'w is 2x3 instead of 2x4; b is missing; c is added'
    """
    if own.digest == expected.digest:
        return ""
    mine, theirs = ({t.name: t for t in layout.tensors} for layout in (own, expected))
    found = [_changed(mine[t.name], t) for t in expected.tensors if t.name in mine and _kind(mine[t.name]) != _kind(t)]
    found += [f"{_short(name)} is missing" for name in theirs if name not in mine]
    found += [f"{_short(name)} is added" for name in mine if name not in theirs]
    if not found and list(mine) != list(theirs):
        found.append("the tensors stand in another order")
    if dict(own.aliases) != dict(expected.aliases):
        pairs = sorted({*own.aliases} ^ {*expected.aliases})
        found.append(f"tied otherwise: {_listed([name for name, _ in pairs])}")
    if not found or (own.frozen_digest != expected.frozen_digest and own.frozen_digest and expected.frozen_digest):
        found += _other_values(own, expected)
    more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return "; ".join(found[:MAX_NAMED]) + more


def _other_values(own: Layout, expected: Layout) -> list[str]:
    """Name the tensors with other values that training never changes; name all of them if a side has no checksums."""
    mine, theirs = _valued(own), _valued(expected)
    if mine and theirs:
        told = {(t.name, _kind(t)): value for t, value in mine}
        if others := [t.name for t, value in theirs if told.get((t.name, _kind(t)), value) != value]:
            return [f"{_short(name)} has other values" for name in others]
    fixed = [t.name for t in expected.tensors if _is_fixed(t)]
    return [f"values that training leaves alone differ in one or more of {_listed(fixed)}"]


def _valued(layout: Layout) -> list[tuple[Tensor, str]]:
    """Return each tensor of `frozen_digest` with its checksum; return none unless each tensor has one."""
    fixed = [t for t in layout.tensors if _is_fixed(t)]
    return list(zip(fixed, layout.frozen_values, strict=True)) if len(fixed) == len(layout.frozen_values) else []


def _is_fixed(t: Tensor) -> bool:
    """Return True if `frozen_digest` covers the tensor: a frozen tensor, or a buffer of neither finite floats nor
    counts.
    """
    counts = t.size == 1 and not t.dtype.startswith("complex")
    return t.role in ("frozen", "fixed") or (
        t.role == "buffer" and not t.dtype.startswith(("float", "bfloat")) and not counts
    )


def _kind(t: Tensor) -> tuple[tuple[int, ...], str, Role]:
    return t.shape, t.dtype, t.role


def _changed(own: Tensor, expected: Tensor) -> str:
    pairs = [(_shape(own), _shape(expected)), (_short(own.dtype), _short(expected.dtype)), (own.role, expected.role)]
    said = [f"{a} instead of {b}" for a, b in pairs if a != b]
    return f"{_short(own.name)} is {', '.join(said)}"


def _shape(t: Tensor) -> str:
    return _short("x".join(map(str, t.shape))) or "one number"


def _short(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else f"{name[:MAX_LETTERS]}.."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(_short(name) for name in names[:MAX_NAMED]) + more
