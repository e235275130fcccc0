"""Error feedback around a codec: classic error feedback with a residual, and EF21 with a reference.

Classic error feedback (Seide et al. 2014; EF-SGD, Karimireddy et al. 2019) adds the residual, which holds what earlier
updates left out, to the next update:

    r_0 = 0;  p = x + r;  send C(p);  r' = p - decode(C(p))

It needs a contraction. With a stochastic quantizer of omega >= 1 the residual grows without bound (qsgd(2) with L2
norms: 4e6 times after 60 steps), so `require_contraction` refuses such a chain. With momentum m, for gradients of one
step only, it accumulates the velocity u instead of x (momentum correction, "Deep gradient compression", Lin et al.
2018):

    u = m u + x;  p = u + r;  send C(p);  r' = p - decode(C(p));  masked: u = 0 where it was sent

EF21 (Richtarik, Sokolov and Fatkhullin 2021) sends the difference to a reference g that both ends advance:

    g_0 = 0;  send c = C(x - g);  g' = g + decode(c)

EF21 never adds to a later update what an earlier one left out. A residual under classic feedback can grow with the step
size; the difference to g shrinks wherever updates settle. The paper's server keeps one g for each client. Here the
server keeps only their weighted sum (thinwire/server/aggregator.py), which moves by the sum of the decoded differences,
so decoders keep no state. That sum is right while every c counts exactly once with the same weight: the device takes a
dropped one back (`restore_update`).

An unbiased codec without a form of its own for feedback encodes x / (1 + omega) (`shrinkage`).

There are two paths. `Memory.encode_in_steps` compensates, encodes and updates; every codec can do that. A quantizer or
a low rank that has a fused encoder does all of it while a part of the vector is in cache (`Chain.encode_fused`).

Invariant: both paths give the same bits. Frames are those of the inner codec. Residual and reference depend on the
layout only, so they survive a switch of codec between two rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinwire.compression.base import (
    ALL,
    BoundCodec,
    Codec,
    Contractive,
    Encoded,
    ErrorBound,
    Everything,
    NoGuarantee,
    contraction,
    shrinkage,
    shrunk,
)
from thinwire.compression.chain import Chain, SegmentedCodec
from thinwire.compression.native import require_vector, require_writable
from thinwire.compression.vector_ops import AddDecoded, Memory
from thinwire.core.errors import CodecError

if TYPE_CHECKING:
    from thinwire.core.layout import Layout
    from thinwire.core.prng import Key
    from thinwire.core.types import Arrived, Payload, State, Vector


@dataclass(frozen=True)
class CodecWrapper:
    """A bound codec around another one. The inner codec decodes, because a decoder need not know the wrapper."""

    inner: BoundCodec

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        return self.inner.spec

    @property
    def kind(self) -> ErrorBound:
        """Return the kind of the inner codec if it is contractive, else `NoGuarantee`."""
        return self.inner.kind if isinstance(self.inner.kind, Contractive) else NoGuarantee()

    def check(self, payload: Arrived, segment: int = 0) -> None:
        """Raise BadPayload unless the payload is a legal frame of this segment."""
        self.inner.check(payload, segment)

    def decode_add(self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        """Add `weight` times the decoded values in `span` to `into`; see `BoundCodec.decode_add`."""
        self.inner.decode_add(payload, weight, into, span, segment)

    def decode(self, payload: Arrived, segment: int = 0) -> Vector:
        """Return the decoded segment."""
        return self.inner.decode(payload, segment)

    def max_bytes(self, segment: int = 0) -> int:
        """Return the largest size of a legal frame, in bytes."""
        return self.inner.max_bytes(segment)


RESIDUAL = "residual"
MOMENTUM = "momentum"


@dataclass(frozen=True)
class Feedback:
    """A codec whose encoder carries the residual. Its frames are those of the inner codec."""

    inner: Codec
    momentum: float = 0.0
    masked: bool = False

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        return self.inner.spec

    def bind(self, layout: Layout) -> BoundFeedback:
        """Return the bound codec with feedback; raise CodecError if its residual would diverge."""
        bound = inside(self.inner, layout)
        require_contraction(self.spec, bound.kind)
        require_gain(bound)
        return BoundFeedback(bound, layout, self.momentum, self.masked)


def feedback(codec: Codec, momentum: float = 0.0, masked: bool = False) -> Feedback:
    """Return `codec` with error feedback around it.

    `momentum` is for gradients of one step; `masked` clears the momentum of the coordinates that were sent.

    >>> from thinwire.compression import parse
    >>> from thinwire.core import Key, Layout
    >>> bound = feedback(parse("topk(0.5)")).bind(Layout.of({"w": (2,)}))
    >>> bound.encode(np.float32([1, 3]), bound.init(), Key(1)).state["residual"]
    array([1., 0.], dtype=float32)
    """
    if not 0 <= momentum < 1:
        raise CodecError(f"feedback with a momentum of {momentum}", why="it is at least 0 and under 1")
    return Feedback(codec, momentum, masked)


def inside(codec: Codec, layout: Layout) -> SegmentedCodec | OtherCodec:
    """Return a codec as it encodes inside error feedback: in its own form for feedback, else C / (1 + omega)."""
    bound = codec.bind(layout)
    if isinstance(bound, SegmentedCodec):
        return bound.under_feedback()
    return OtherCodec(bound, shrinkage(bound.kind, 0.0))


def require_contraction(spec: str, kind: ErrorBound) -> None:
    """Raise CodecError if a residual around this kind would grow from step to step."""
    if not isinstance(kind, NoGuarantee) and contraction(kind) <= 0:
        raise CodecError(
            f"feedback around {spec!r} would diverge",
            why="it is no contraction: what is left over can be larger than what was given",
            hint='[uplink] feedback = "none", or a codec that contracts: int8',
        )


def require_gain(bound: SegmentedCodec | OtherCodec) -> None:
    """Raise CodecError if a client's residual would lose accuracy around one of the quantizers."""
    for group in (group for groups in getattr(bound, "groups", ()) for group in groups):
        if isinstance(group.chain, Chain) and not group.chain.quantizer.gains_by_residual:
            raise CodecError(
                f"feedback around {group.chain.quantizer.spec!r} loses accuracy",
                why="it is unbiased by itself, and most of an update would wait in the residual for later rounds",
                hint='[uplink] feedback = "none"',
            )


@dataclass(frozen=True)
class BoundFeedback(CodecWrapper):
    """A bound codec with classic error feedback; see `BoundCodec`.

    `encode` overwrites `x` with the new residual and does not write to `state`. The inner codec keeps its own state
    beside the residual. Arrays that it does not know are dropped, so that a switch of codec loses only the old codec's
    state.
    """

    inner: SegmentedCodec | OtherCodec
    layout: Layout
    momentum: float = 0.0
    masked: bool = False

    def init(self, segment: int = 0) -> State:
        """Return the first state of a segment: zeros as residual and momentum, and the inner codec's state."""
        size = self.layout.segments[segment].size
        own = [RESIDUAL, MOMENTUM] if self.momentum else [RESIDUAL]
        return {**self.inner.init(segment), **{name: np.zeros(size, np.float32) for name in own}}

    def aged(self, state: State, decay: float, rounds: int) -> State:
        """Return the state `rounds` after its last encode: the residual times decay^rounds, with at least one round."""
        if decay == 1 or RESIDUAL not in state:
            return state
        return {**state, RESIDUAL: state[RESIDUAL] * np.float32(decay ** max(1, rounds))}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode the update plus the residual, and overwrite `x` with the new residual."""
        require_writable(x, self.layout.segments[segment].size)
        kept = {MOMENTUM: self._velocity(x, state)} if self.momentum else {}
        encoded = self.inner.encode_with_memory(
            x, Memory(state[RESIDUAL], 1.0), inner_state(self.inner, state, segment), key, segment
        )
        if self.masked and self.momentum:
            sent = slice(None) if isinstance(encoded.support, Everything) else encoded.support
            kept[MOMENTUM][sent] = 0
        return Encoded(encoded.payload, {**encoded.state, **kept, RESIDUAL: x}, encoded.support)

    def _velocity(self, x: Vector, state: State) -> Vector:
        """Return the velocity u' = m u + x, and write it to `x` too."""
        velocity: Vector = np.zeros_like(x)
        if (held := state.get(MOMENTUM)) is not None:
            require_vector(held, x.size)
            np.multiply(held, np.float32(self.momentum), out=velocity)
        with np.errstate(over="ignore", invalid="ignore"):
            velocity += x
        x[:] = velocity
        return velocity

    def restore_update(self, payload: Payload, state: State, segment: int = 0) -> State:
        """Add an update that was sent but not used back to the residual, and to nothing else."""
        residual = state[RESIDUAL].copy()
        self.inner.decode_add(payload, 1.0, residual, segment=segment)
        return {**state, RESIDUAL: residual}


def matching_state(fresh: State, before: State) -> State:
    """Return the state `fresh`, with those arrays of `before` that have the same name, shape and type.

    So a switch of codec loses only the arrays that the new codec cannot use, and these begin again.
    """
    found = {name: before.get(name, array) for name, array in fresh.items()}
    return {n: a if (a.shape, a.dtype) == (fresh[n].shape, fresh[n].dtype) else fresh[n] for n, a in found.items()}


def inner_state(inner: SegmentedCodec | OtherCodec, state: State, segment: int) -> State:
    """Return copies of the inner codec's own arrays in `state`, by name."""
    return {name: array.copy() for name, array in matching_state(inner.init(segment), state).items()}


REFERENCE = "reference"


@dataclass(frozen=True)
class Ef21:
    """A codec that sends differences to a reference. Its frames are those of the inner codec."""

    inner: Codec

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        return self.inner.spec

    def bind(self, layout: Layout) -> BoundEf21:
        """Return the bound codec with EF21; raise CodecError unless each call contracts."""
        bound = inside(self.inner, layout)
        if isinstance(bound.kind, NoGuarantee):
            raise CodecError(
                f"ef21 around {self.spec!r} may not converge",
                why="its codec has to contract at each call, and this one does not guarantee that",
                hint='[uplink] feedback = "classic"',
            )
        require_contraction(self.spec, bound.kind)
        require_gain(bound)
        return BoundEf21(bound, layout)


def ef21(codec: Codec) -> Ef21:
    """Return `codec` with EF21 around it, which sends differences to a reference.

    >>> from thinwire.compression import parse
    >>> from thinwire.core import Key, Layout
    >>> bound = ef21(parse("topk(0.5)")).bind(Layout.of({"w": (2,)}))
    >>> state = bound.encode(np.float32([1, 3]), bound.init(), Key(1)).state
    >>> bound.encode(np.float32([1, 3]), state, Key(2)).state["reference"]
    array([1., 3.], dtype=float32)
    """
    return Ef21(codec)


@dataclass(frozen=True)
class BoundEf21(CodecWrapper):
    """A bound codec with EF21; see `BoundCodec`. A frame decodes to a step of the reference.

    `encode` overwrites `x` with the new reference; `restore_update` takes such a step back.

    Invariant: E||x - g'||^2 <= (1 - delta) ||x - g||^2, over the codec's draws. The reference depends on the layout
    only: it survives a switch of codec.
    """

    inner: SegmentedCodec | OtherCodec
    layout: Layout

    def init(self, segment: int = 0) -> State:
        """Return the first state of a segment: zeros as reference, and the inner codec's state."""
        return {**self.inner.init(segment), REFERENCE: np.zeros(self.layout.segments[segment].size, np.float32)}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode the difference to the reference, and overwrite `x` with the new reference."""
        require_writable(x, self.layout.segments[segment].size)
        encoded = self.inner.encode_with_memory(
            x, Memory(state[REFERENCE], -1.0), inner_state(self.inner, state, segment), key, segment
        )
        return Encoded(encoded.payload, {**encoded.state, REFERENCE: x}, encoded.support)

    def restore_update(self, payload: Payload, state: State, segment: int = 0) -> State:
        """Take back a step of the reference that was not used."""
        reference = state[REFERENCE].copy()
        self.inner.decode_add(payload, -1.0, reference, segment=segment)
        return {**state, REFERENCE: reference}


@dataclass(frozen=True)
class OtherCodec(CodecWrapper):
    """A bound codec that is no chain, inside error feedback: it encodes x / `divisor`, see `shrinkage`."""

    divisor: float

    @property
    def layout(self) -> Layout:
        """Return the layout that the codec is bound to."""
        return self.inner.layout

    @property
    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return shrunk(self.inner.kind, self.divisor)

    def init(self, segment: int = 0) -> State:
        """Return the first state of the inner codec."""
        return self.inner.init(segment)

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode x / `divisor`; `x` is overwritten."""
        require_writable(x, self.layout.segments[segment].size)
        if self.divisor != 1:
            x *= np.float32(1 / self.divisor)
        return self.inner.encode(x, state, key, segment)

    def encode_with_memory(self, x: Vector, memory: Memory, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode a copy of `x` compensated by `memory`, and overwrite `x` with the updated memory."""

        def encode(p: Vector) -> tuple[Encoded, AddDecoded]:
            encoded = self.encode(p.copy(), state, key, segment)
            return encoded, lambda weight, into: self.decode_add(encoded.payload, weight, into, segment=segment)

        return memory.encode_in_steps(x, encode)
