"""The model on its way to the devices: versions of a shadow that every device can hold bit for bit.

The server trains x and keeps one shadow x^. After a step it encodes c = C(x - x^), advances x^ by what c decodes
to, and logs c under the version that it makes. A device at version v applies v+1, v+2, .. in order, or takes the full
x^ where that is shorter, where the log has been cut, or where it holds none. What C leaves out stays in x - x^ and
goes with a later version: the shadow is error feedback on the server's side. With `identity` the shadow is x itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from thinwire.aggregation.codec import contraction
from thinwire.aggregation.model_file import FULL, digest
from thinwire.aggregation.parse import parse
from thinwire.core.errors import BadPayload, CodecError
from thinwire.core.keys import Key, derive
from thinwire.core.layout import Layout
from thinwire.core.types import Payload, Vector

Named = tuple[str, Payload]  # "full/SEGMENT" or "VERSION/SEGMENT", and its frame


@dataclass(frozen=True)
class Announcement:
    """A version of the shadow, the SHA-256 of its float32 bytes, and the change that leads to it (empty: full only)."""

    version: int
    digest: str
    changes: tuple[Payload, ...]


class Downlink:
    """The server's end. `keep` versions of changes are logged; law: all devices at a version hold the shadow's bits."""

    def __init__(
        self, layout: Layout, spec: str, params: Vector, version: int = 0, keep: int = 20, seed: int = 0
    ) -> None:
        self.layout, self.version, self.keep = layout, version, keep
        self.codec, self.full = parse(spec).bind(layout), parse("identity").bind(layout)
        if contraction(self.codec.kind) <= 0:
            raise CodecError(
                f"{spec!r} cannot carry the downlink", why="its errors would add up", hint="topk(0.05) > int8"
            )
        self.exact = self.codec.spec == "identity"
        self.shadow = params if self.exact else params.copy()
        self.key = derive(Key(seed), "downlink")
        self.log: dict[int, tuple[Payload, ...]] = {}  # version -> the change that leads to it

    def publish(self, params: Vector) -> Announcement:
        """Announce the next version of the model; `params` is x after the server's step."""
        self.version += 1
        changes: tuple[Payload, ...] = ()
        if self.exact:
            self.shadow = params
        else:
            changes = tuple(self._change(params, segment.index) for segment in self.layout.segments)
            self.log[self.version] = changes
            self.log.pop(self.version - self.keep, None)
        return Announcement(self.version, digest(self.shadow), changes)

    def _change(self, params: Vector, index: int) -> Payload:
        span = self.layout.segments[index].span
        key = derive(self.key, self.version)
        payload = self.codec.encode(params[span] - self.shadow[span], self.codec.init(index), key, index).payload
        self.codec.decode_add(payload, 1.0, self.shadow[span], segment=index)
        return payload

    def frames_for(self, held: int | None) -> list[Named]:
        """What brings a device that holds version `held` (None: nothing) to the newest: the shorter of both ways."""
        versions = range(held + 1, self.version + 1) if held is not None else range(0)
        if versions and all(v in self.log for v in versions):
            changes = [(f"{v}/{i}", c) for v in versions for i, c in enumerate(self.log[v])]
            if sum(len(c) for _, c in changes) < 4 * self.layout.size:
                return changes
        if held == self.version:
            return []
        return [
            (f"{FULL}/{s.index}", self.full.encode(self.shadow[s.span], {}, Key(0), s.index).payload)
            for s in self.layout.segments
        ]


class Shadow:
    """The device's end: the model at the version it last applied."""

    def __init__(self, layout: Layout, spec: str) -> None:
        self.layout = layout
        self.codec, self.full = parse(spec).bind(layout), parse("identity").bind(layout)
        self.params: Vector = np.zeros(layout.size, np.float32)
        self.version: int | None = None

    def apply(self, frames: Iterable[Named], version: int, expected_digest: str) -> Vector:
        """Come to `version`; BadPayload when the frames do not lead there. A failed change leaves no version held."""
        held, self.version = self.version, None
        for name, payload in frames:
            way, _, index = name.partition("/")
            if not (index.isdecimal() and int(index) < len(self.layout.segments)):
                raise BadPayload(f"a part called {name!r}", why="it is full/SEGMENT or VERSION/SEGMENT")
            segment = self.layout.segments[int(index)]
            into = self.params[segment.span]
            if way == FULL:
                into[:] = self.full.decode(payload, segment.index)
            elif held is not None:
                self.codec.decode_add(payload, 1.0, into, segment=segment.index)
            else:
                raise BadPayload("changes to a model that is not held")
        if digest(self.params) != expected_digest:
            raise BadPayload(f"the model is not version {version}", why="its digest differs", hint="ask for it in full")
        self.version = version
        return self.params
