"""The interfaces of compression: codecs, the stages of a chain, their error bounds, and the arguments of a stage.

A `Codec` is a parsed spec. `bind` gives a `BoundCodec` for one layout, which encodes and decodes segments. The encoder
may keep state between calls; the decoder keeps none.

A codec declares its error bound as an `ErrorBound`: `Unbiased(omega)`, `Contractive(delta)` or `NoGuarantee`. Error
feedback reads the kind and refuses a codec around which a residual would diverge.

Stages of a chain (`Step`) are `Sparsifier`, `Quantizer`, low rank, and coders. `read_ratio`, `read_number` and
`read_whole` parse the argument between the brackets of a stage, as exact numbers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import CodecError, NonFiniteUpdate
from thinwire.core.layout import Layout
from thinwire.core.prng import Key
from thinwire.core.types import Arrived, Payload, State, Vector

Indices: TypeAlias = NDArray[np.int64]
Symbols: TypeAlias = NDArray[Any]
Scales: TypeAlias = NDArray[Any]

ALL = slice(None)
BLOCK = 1 << 16  # elements: a block stays in the second-level cache while it is worked on
BUCKET = 4096  # elements that share a scale; the first bucket of each segment begins at its first element
assert BLOCK % BUCKET == 0, "a block must hold whole buckets"


def buckets(size: int) -> int:
    """Return how many buckets hold `size` elements."""
    return -(-size // BUCKET)


def not_finite() -> NonFiniteUpdate:
    """Return the error for an update that holds NaN or infinity."""
    return NonFiniteUpdate(
        "the update holds NaN or infinity",
        why="training diverged on this device",
        hint="a smaller [local] lr, or [local] clip_grad = 1.0",
    )


class PackedSymbols(Protocol):
    """Symbols of fewer than 8 bits, bit-packed as in a frame."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """Return the packed bytes."""

    @property
    def size(self) -> int:
        """Return the number of symbols."""

    @property
    def bits(self) -> int:
        """Return the bits of one symbol."""


@dataclass(frozen=True)
class Unbiased:
    """The error bound of an unbiased codec: E[C(x)] = x and E||C(x) - x||^2 <= omega ||x||^2."""

    omega: float


@dataclass(frozen=True)
class Contractive:
    """The error bound of a contraction: E||C(x) - x||^2 <= (1 - delta) ||x||^2."""

    delta: float


@dataclass(frozen=True)
class NoGuarantee:
    """The kind of a codec without a bound for a single call; only error feedback makes the sum of its updates right."""


ErrorBound: TypeAlias = Unbiased | Contractive | NoGuarantee
Role: TypeAlias = Literal["sparsifier", "lowrank", "quantizer", "coder"]


def contraction(kind: ErrorBound) -> float:
    """Return the contraction factor delta of a kind: 1 - omega for an unbiased one, 0 or less for no contraction."""
    match kind:
        case Contractive(delta):
            return delta
        case Unbiased(omega):
            return 1 - omega
    return 0.0


def chained(first: ErrorBound, second: ErrorBound) -> ErrorBound:
    """Return the kind of two codecs applied one after the other.

    Deltas multiply, 1 + omega multiplies. A delta of 0 or less means that error feedback refuses the chain.

    >>> chained(Contractive(0.01), Unbiased(0.05))
    Contractive(delta=0.0095)
    """
    if isinstance(first, NoGuarantee) or isinstance(second, NoGuarantee):
        return NoGuarantee()
    if isinstance(first, Unbiased) and isinstance(second, Unbiased):
        return Unbiased((1 + first.omega) * (1 + second.omega) - 1)
    a, b = contraction(first), contraction(second)
    return Contractive(a * b if a > 0 and b > 0 else min(a, b))


class Everything(enum.Enum):
    """The support of a codec that sends every coordinate."""

    SENT = "all"


Support: TypeAlias = Indices | Literal[Everything.SENT]


@dataclass(frozen=True)
class Encoded:
    """An encoded segment: the frame, the encoder's next state, and the support.

    `support` holds the sorted indices of the coordinates that were sent, even those that rounded to 0. It is
    `Everything.SENT` if all were sent.
    """

    payload: Payload
    state: State
    support: Support


class Step(Protocol):
    """A stage of a chain, as the registry holds it. The conformance suite runs its `examples`."""

    role: ClassVar[Role]
    examples: ClassVar[tuple[str, ...]]

    @property
    def spec(self) -> str:
        """Return the canonical spec of this stage."""

    @classmethod
    def read(cls, argument: str | None) -> Step:
        """Make the stage from the text between its brackets, None without brackets; raise CodecError if invalid."""


class Quantizer(Step, Protocol):
    """Turns values into small symbols and their scales. `word` is 32 bits of the key.

    `bits` is the size of a packed symbol; symbols of fewer than 8 bits are signed. If `seeded`, the decoder needs the
    word too, and the frame carries it.
    """

    bits: ClassVar[int]
    seeded: ClassVar[bool]
    symbols_dtype: ClassVar[np.dtype[Any]]
    scales_dtype: ClassVar[np.dtype[Any]]

    def kind(self) -> ErrorBound:
        """Return the error bound."""

    def under_feedback(self) -> Quantizer:
        """Return the quantizer that encodes inside error feedback. Its frames have the same format."""

    def over(self, starts: tuple[int, ...]) -> Quantizer:
        """Return a quantizer that begins its scales again at each of `starts`, the offsets of tensors.

        Its frames have the same format.
        """

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`; the result may be a view of the symbols."""

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload if a symbol or scale would decode to a value that is not finite."""


class Sparsifier(Step, Protocol):
    """Selects the coordinates to send.

    The number of indices is `count(n)` if `fixed`, else at most that. If `seeded`, the word alone decides (see
    `SeededSparsifier`), and the frame carries the word instead of the indices. If `looks`, `select` raises
    NonFiniteUpdate for NaN and infinity.
    """

    fixed: ClassVar[bool]
    seeded: ClassVar[bool]
    looks: ClassVar[bool]

    def kind(self) -> ErrorBound:
        """Return the error bound."""

    def count(self, size: int) -> int:
        """Return the number of coordinates sent of `size`, or the largest possible number if it is not `fixed`."""

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        """Return the sorted indices to send and a copy of their values."""


class SeededSparsifier(Sparsifier, Protocol):
    """A seeded sparsifier: encoder and decoder derive the same indices from the word."""

    def places(self, size: int, word: int) -> Indices:
        """Return the sorted indices that `word` selects among `size` coordinates."""


class Coder(Protocol):
    """Encodes symbols in fewer bytes, without loss."""

    def pack(self, array: Symbols) -> bytes | memoryview:
        """Return the encoded bytes of an array."""

    def unpack(self, data: bytes | memoryview, items: int, size: int) -> Symbols:
        """Return `items` decoded symbols; raise BadPayload before any allocation."""


class BoundCodec(Protocol):
    """A codec bound to a layout: one call encodes or decodes one segment.

    `x` and `state` are donated to `encode`: it may overwrite them.

    Invariant: decode(encode(0)) = 0. NaN or infinity raises NonFiniteUpdate and changes nothing. `decode_add` over
    spans equals `decode` times weight. Any bytes but a whole frame of this codec, layout and segment raise BadPayload,
    before memory is allocated and before `into` changes.
    """

    @property
    def spec(self) -> str:
        """Return the canonical spec."""

    @property
    def layout(self) -> Layout:
        """Return the layout that the codec is bound to."""

    @property
    def kind(self) -> ErrorBound:
        """Return the error bound of one call."""

    def init(self, segment: int = 0) -> State:
        """Return the encoder's first state for a segment."""

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode a float32 vector; raise NonFiniteUpdate for NaN or infinity."""

    def check(self, payload: Arrived, segment: int = 0) -> None:
        """Raise BadPayload unless the payload is a legal frame of this segment."""

    def decode_add(self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        """Add `weight` times the decoded values in `span` to `into`, a vector of the whole segment.

        The work is proportional to the number of values sent; values outside `span` stay as they are.
        """

    def decode(self, payload: Arrived, segment: int = 0) -> Vector:
        """Return the decoded segment."""

    def max_bytes(self, segment: int = 0) -> int:
        """Return the largest size of a legal frame, in bytes."""


class Codec(Protocol):
    """A parsed spec.

    Invariant: `parse(parse(s).spec) == parse(s)`.
    """

    @property
    def spec(self) -> str:
        """Return the canonical spec."""

    def bind(self, layout: Layout) -> BoundCodec:
        """Return this codec for the tensors of one layout."""


DECIMALS = 9


def read_ratio(name: str, argument: str | None) -> Decimal:
    """Return a share over 0 and at most 1 as an exact decimal in its shortest form, or raise CodecError."""
    said = (argument or "").strip()
    try:
        ratio = Decimal(said).normalize()
    except InvalidOperation:
        raise CodecError(
            f"{name}({said}) has no ratio", why="it says which share is sent", hint=f"{name}(0.01)"
        ) from None
    exponent = ratio.as_tuple().exponent
    if not (isinstance(exponent, int) and exponent >= -DECIMALS and 0 < ratio <= 1):
        why = f"a ratio is a share over 0 and at most 1, of at most {DECIMALS} decimals"
        raise CodecError(f"{name}({said}) cannot be", why=why, hint=f"{name}({_as_percent(ratio):f})")
    return ratio


def _as_percent(number: Decimal) -> Decimal:
    """Return the share that the user may have meant by a percentage.

    >>> _as_percent(Decimal("2.5")), _as_percent(Decimal("nan"))
    (Decimal('0.025'), Decimal('0.01'))
    """
    meant = (number / 100).normalize() if number.is_finite() and 1 < number <= 100 else Decimal("0.01")
    return meant if meant == round(meant, DECIMALS) else Decimal("0.01")


def read_number(name: str, argument: str | None, most: Decimal, example: str) -> Decimal:
    """Return a number over 0 and at most `most` as an exact decimal in its shortest form, or raise CodecError."""
    said = (argument or "").strip()
    try:
        number = Decimal(said).normalize()
    except InvalidOperation:
        raise CodecError(f"{name}({said}) has no number", why="it takes one", hint=f"{name}({example})") from None
    exponent = number.as_tuple().exponent
    if not (isinstance(exponent, int) and exponent >= -DECIMALS and 0 < number <= most):
        why = f"its number is over 0 and at most {most}, of at most {DECIMALS} decimals"
        nearest = f"{most:f}" if number.is_finite() and number > most else example
        raise CodecError(f"{name}({said}) cannot be", why=why, hint=f"{name}({nearest})")
    return number


def read_whole(name: str, argument: str | None, least: int, most: int, example: int) -> int:
    """Return a whole number from `least` to `most`, or raise CodecError with the nearest one."""
    said = (argument or "").strip()
    if said.isascii() and said.isdigit() and len(said) < 9:
        if least <= int(said) <= most:
            return int(said)
        example = min(max(int(said), least), most)
    raise CodecError(f"{name}({said}) cannot be", why=f"it takes {least} to {most}", hint=f"{name}({example})")
