"""The model on its way to the devices: versions of a shadow that every device can hold bit for bit.

c_v = C(x_{v+1} - x^_v);  x^_{v+1} = x^_v + D(c_v)

The server trains x and keeps one shadow x^, which is what devices train from. After a step it sends not the model but
the encoded difference to the shadow, and both ends add what that decodes to. What C leaves out stays in x - x^ and
goes with a later version: the shadow is error feedback on the server's side (EF21-P, Gruntkowska, Tyurin and Richtarik
2023). With `identity` the shadow is x itself and there are no changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thinwire.aggregation.codec import BoundCodec, ResidualOnly, contraction
from thinwire.aggregation.feedback import inside
from thinwire.aggregation.layers import chains
from thinwire.aggregation.lowrank import LowRank
from thinwire.aggregation.model_file import FULL, digest
from thinwire.aggregation.parse import parse
from thinwire.core.errors import BadPayload, CodecError
from thinwire.core.keys import Key, derive
from thinwire.core.layout import Layout
from thinwire.core.types import Payload, Vector

DIGITS = 18  # of a version or a segment at the most

Named = tuple[str, Payload]  # "full/SEGMENT" or "VERSION/SEGMENT", and its frame


def require_downlink(spec: str) -> None:
    """CodecError for a codec that cannot carry the downlink, with the reason: whatever tensors its rules are for."""
    for chain in chains(parse(spec)):
        kind = chain.under_feedback().kind
        if isinstance(chain, LowRank):
            why = "it multiplies matrices, and another BLAS rounds another way: devices would not hold the same bits"
        elif isinstance(kind, ResidualOnly):
            why = "nothing is promised of one change, and the shadow could move away from the model"
        elif contraction(kind) <= 0:
            why = "it is no contraction: the shadow would move away from the model from change to change"
        else:
            continue
        raise CodecError(f"{chain.spec!r} cannot carry the downlink", why=why, hint="topk(0.05) > int8")


@dataclass(frozen=True)
class Announcement:
    """A version of the shadow, the SHA-256 of its float32 bytes, and the change that leads to it (empty: full only)."""

    version: int
    digest: str
    changes: tuple[Payload, ...]


class Downlink:
    """The server's end. Law: whoever applies the changes in order, or takes the shadow, holds the shadow's bits."""

    def __init__(self, layout: Layout, spec: str, shadow: Vector, version: int = 0, seed: int = 0) -> None:
        self.layout, self.version = layout, version
        require_downlink(spec)
        self.codec = inside(parse(spec), layout)  # qsgd and ternary round to nearest there, randk is not scaled up
        self.exact = self.codec.spec == "identity"
        self.shadow = shadow if self.exact else shadow.copy()
        self.key = derive(Key(seed), "downlink")

    def publish(self, params: Vector, full: bool = False) -> Announcement:
        """Announce the next version; `params` is x after the server's step. `full`: the shadow becomes x itself."""
        self.version += 1
        changes: tuple[Payload, ...] = ()
        if self.exact:
            self.shadow = params
        elif full:
            self.shadow = params.copy()
        else:
            changes = tuple(self._change(params, segment.index) for segment in self.layout.segments)
        return Announcement(self.version, digest(self.shadow), changes)

    def _change(self, params: Vector, index: int) -> Payload:
        span = self.layout.segments[index].span
        key = derive(self.key, self.version)
        payload = self.codec.encode(params[span] - self.shadow[span], self.codec.init(index), key, index).payload
        self.codec.decode_add(payload, 1.0, self.shadow[span], segment=index)
        return payload


def way(held: int | None, newest: int, sizes: Mapping[int, int], full: int) -> range | None:
    """The versions whose changes lead from `held` to `newest`; None: the model in full, the shorter or only way.

    `sizes` are the bytes of each version's change as far as they are logged, `full` those of the model.

    >>> way(3, 5, {4: 10, 5: 10}, full=100), way(2, 5, {4: 10, 5: 10}, full=100), way(3, 5, {4: 10, 5: 90}, full=100)
    (range(4, 6), None, None)
    """
    if held is None or held > newest:
        return None
    versions = range(held + 1, newest + 1)
    if any(version not in sizes for version in versions) or sum(sizes[version] for version in versions) >= full:
        return None
    return versions


class Shadow:
    """The device's end: the model at the version that it holds, None where it holds none."""

    def __init__(self, layout: Layout, spec: str, params: Vector | None = None, version: int | None = None) -> None:
        self.layout, self.spec = layout, spec
        self.params: Vector = np.zeros(layout.size, np.float32) if params is None else params
        self.version = version if params is not None else None

    @cached_property
    def codec(self) -> BoundCodec:
        return parse(self.spec).bind(self.layout)

    @cached_property
    def full(self) -> BoundCodec:
        return parse("identity").bind(self.layout)

    def apply(self, frames: Iterable[Named], version: int, expected_digest: str) -> Vector:
        """Come to `version`; BadPayload when the frames do not lead there. `params` is a new vector then, or as before.

        Changes up to the version that is held were applied before: they are passed over.
        """
        made, held = None, self.version
        for name, payload in frames:
            way, _, index = name.partition("/")
            if not (is_number(index) and int(index) < len(self.layout.segments) and (way == FULL or is_number(way))):
                raise BadPayload(f"a part called {name!r}", why="it is full/SEGMENT or VERSION/SEGMENT")
            segment = self.layout.segments[int(index)]
            if way == FULL:
                made = np.zeros(self.layout.size, np.float32) if made is None else made
                made[segment.span] = self.full.decode(payload, segment.index)
            elif held is None:
                raise BadPayload("changes to a model that is not held")
            elif int(way) > held:
                made = self.params.copy() if made is None else made
                self.codec.decode_add(payload, 1.0, made[segment.span], segment=segment.index)
        made = self.params if made is None else made
        if digest(made) != expected_digest:
            raise BadPayload(f"the model is not version {version}", why="its digest differs", hint="ask for it in full")
        self.params, self.version = made, version
        return made


def is_number(text: str) -> bool:
    """Whether it is one, of at most as many digits as a version or a segment may have."""
    return text.isascii() and text.isdecimal() and len(text) <= DIGITS
