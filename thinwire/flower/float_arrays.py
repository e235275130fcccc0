"""The float arrays of a Flower message as one vector: what the frames of a compressed app are encoded from.

Both ends make the layout from the records, arrays, types and shapes of the message, in its order. Arrays that are no
floats have no place in the vector and stay in their record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from thinwire.compression import BoundCodec, parse
from thinwire.core.errors import BadPayload
from thinwire.core.layout import Layout
from thinwire.core.types import Vector

from flwr.app import Array, ArrayRecord  # isort: skip

FLOATS: Final = ("float16", "float32", "float64")
Place = tuple[str, str, str, tuple[int, ...]]  # record, array, dtype ("" if it has no place in the vector), shape


@dataclass(frozen=True)
class Floats:
    """The float arrays of some records as one vector of float32, in the order of the records and of their arrays."""

    places: tuple[Place, ...]  # of all arrays

    @classmethod
    def of(cls, records: Mapping[str, ArrayRecord]) -> Floats:
        """Return the places of the arrays of these records."""
        every = ((name, one, array) for name, record in records.items() for one, array in record.items())
        return cls(tuple((n, one, a.dtype if a.dtype in FLOATS else "", tuple(a.shape)) for n, one, a in every))

    @classmethod
    def matching(cls, records: Mapping[str, ArrayRecord], base: Mapping[str, ArrayRecord]) -> Floats:
        """Return the places of these arrays, in the vector only those that `base` has as floats of the same shape.

        Flower's mean makes floats of a count, and the app's model makes a count of it again.
        """
        return cls.of(records).checked(base)

    def checked(self, base: Mapping[str, ArrayRecord]) -> Floats:
        """Return the same places, in the vector only those that `base` has as floats of the same shape."""
        shapes = {(name, one): shape for name, one, dtype, shape in Floats.of(base).places if dtype in FLOATS}
        return Floats(
            tuple((r, a, d if d in FLOATS and shapes.get((r, a)) == s else "", s) for r, a, d, s in self.places)
        )

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Floats:
        """Return the places that a message describes; raise `BadPayload` if it does not."""
        try:
            rows = zip(told["records"], told["arrays"], told["dtypes"], told["shapes"], strict=True)
            places = tuple((r, a, d, tuple(int(n) for n in s.split(",") if n)) for r, a, d, s in rows)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadPayload("a message that does not describe its arrays") from error
        if len({place[:2] for place in places}) < len(places):  # each row would ask for the memory of its array again
            raise BadPayload("a message that describes an array twice")
        if any(size < 0 for *_, shape in places for size in shape):
            raise BadPayload("a message that describes an array of a negative size")
        return cls(places)

    def told(self) -> dict[str, list[str]]:
        """Return the description of the places in a message."""
        shapes = [",".join(map(str, shape)) for *_, shape in self.places]
        records, arrays, dtypes = ([str(place[at]) for place in self.places] for at in range(3))
        return {"records": records, "arrays": arrays, "dtypes": dtypes, "shapes": shapes}

    @property
    def size(self) -> int:
        """Return the number of values in the float arrays."""
        return sum(math.prod(shape) for *_, dtype, shape in self.places if dtype in FLOATS)

    @property
    def layout(self) -> Layout:
        """Return the layout of the float arrays."""
        return _layout(tuple(place for place in self.places if place[2] in FLOATS))

    def vector(self, records: Mapping[str, ArrayRecord]) -> Vector:
        """Return the values of the float arrays, one after the other."""
        parts = [records[name][one].numpy().reshape(-1) for name, one, dtype, _ in self.places if dtype in FLOATS]
        return np.concatenate(parts, dtype=np.float32, casting="same_kind") if parts else np.zeros(0, np.float32)

    def put(self, records: Mapping[str, ArrayRecord], values: Vector) -> dict[str, ArrayRecord]:
        """Return the records with these values as their float arrays, in their own types and order."""
        made: dict[str, dict[str, Array]] = {}
        at = 0
        for name, one, dtype, shape in self.places:
            own = made.setdefault(name, {})
            if dtype not in FLOATS:
                own[one] = records[name][one]
                continue
            size = math.prod(shape)
            own[one] = Array(values[at : at + size].reshape(shape).astype(dtype))
            at += size
        return {name: ArrayRecord(arrays) for name, arrays in made.items()}

    def others(self, name: str, record: ArrayRecord) -> ArrayRecord:
        """Return the arrays of a record that have no place in the vector."""
        inside = {one for of, one, dtype, _ in self.places if of == name and dtype in FLOATS}
        return ArrayRecord({one: array for one, array in record.items() if one not in inside})

    def decode(self, spec: str, frames: list[bytes]) -> Vector:
        """Return the decoded values; raise `BadPayload` for frames that are not those of this layout."""
        codec, segments = bound(spec, self.layout), self.layout.model_segments
        if len(frames) != len(segments):
            raise BadPayload(f"{len(frames)} frames, and the model has {len(segments)} segments")
        for segment, frame in zip(segments, frames, strict=True):
            codec.check(frame, segment.index)  # all of them before the memory that their message asks for
        made = np.zeros(self.layout.size, np.float32)
        for segment, frame in zip(segments, frames, strict=True):
            codec.decode_add(frame, 1.0, made[segment.span], segment=segment.index)
        return made


@lru_cache(maxsize=16)
def _layout(places: tuple[Place, ...]) -> Layout:
    return Layout.of({f"{record}/{one}": shape for record, one, _, shape in places})


@lru_cache(maxsize=16)
def bound(spec: str, layout: Layout) -> BoundCodec:
    """Return the codec for a layout; the last ones are kept, because each node's reply needs the same."""
    return parse(spec).bind(layout)
