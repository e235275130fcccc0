"""What a codec is: the encoder may remember, the decoder may not.

A `Codec` is a spec; bound to a layout it encodes and decodes segments. Kinds say what error feedback may assume.
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
    """Symbols of fewer than 8 bits, side by side as they stand in a frame."""

    @property
    def data(self) -> NDArray[np.uint8]: ...
    @property
    def size(self) -> int: ...
    @property
    def bits(self) -> int: ...


@dataclass(frozen=True)
class Unbiased:
    """E[C(x)] = x and E||C(x) - x||^2 <= omega ||x||^2."""

    omega: float


@dataclass(frozen=True)
class Contractive:
    """E||C(x) - x||^2 <= (1 - delta) ||x||^2."""

    delta: float


@dataclass(frozen=True)
class ResidualOnly:
    """Nothing is promised for one call; only feedback makes its sum right."""


Kind: TypeAlias = Unbiased | Contractive | ResidualOnly
Role: TypeAlias = Literal["sparsifier", "lowrank", "quantizer", "coder"]


def contraction(kind: Kind) -> float:
    """The delta with which a kind contracts (an unbiased one by 1 - omega); 0 or less where it need not."""
    match kind:
        case Contractive(delta):
            return delta
        case Unbiased(omega):
            return 1 - omega
    return 0.0


def chained(first: Kind, second: Kind) -> Kind:
    """The kind of two codecs one after the other (design, section 4).

    >>> chained(Contractive(0.01), Unbiased(0.05))
    Contractive(delta=0.0095)
    """
    if isinstance(first, ResidualOnly) or isinstance(second, ResidualOnly):
        return ResidualOnly()
    if isinstance(first, Unbiased) and isinstance(second, Unbiased):
        return Unbiased((1 + first.omega) * (1 + second.omega) - 1)
    a, b = contraction(first), contraction(second)
    return Contractive(a * b if a > 0 and b > 0 else min(a, b))  # 0 or less: feedback refuses it


class Everything(enum.Enum):
    """The support of a codec that sends every coordinate."""

    SENT = "all"


Support: TypeAlias = Indices | Literal[Everything.SENT]


@dataclass(frozen=True)
class Encoded:
    """`support`: the sorted indices of what was sent, even where it rounded to 0; or all of them."""

    payload: Payload
    state: State
    support: Support


class Step(Protocol):
    """One name of a chain, as the registry holds it. `examples` are what the conformance suite runs."""

    role: ClassVar[Role]
    examples: ClassVar[tuple[str, ...]]

    @property
    def spec(self) -> str: ...
    @classmethod
    def read(cls, argument: str | None) -> Step: ...  # CodecError; what stands between the brackets


class Quantizer(Step, Protocol):
    """Values to small symbols and their scales. `word` is 32 bits of the key.

    `bits`: of a packed symbol; under 8 they are signed. `seeded`: the decoder needs the word too, and the frame
    carries it. `dequantize` gives the values of the symbols in `span`; it may be a view of them. `under_feedback` is
    how it encodes inside a residual, `over` how it encodes tensors that begin at these places: frames stay the same.
    """

    bits: ClassVar[int]
    seeded: ClassVar[bool]
    symbols_dtype: ClassVar[np.dtype[Any]]
    scales_dtype: ClassVar[np.dtype[Any]]

    def kind(self) -> Kind: ...
    def under_feedback(self) -> Quantizer: ...
    def over(self, starts: tuple[int, ...]) -> Quantizer: ...
    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]: ...
    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector: ...
    def scales_count(self, size: int) -> int: ...
    def check(self, symbols: Symbols, scales: Scales) -> None: ...  # BadPayload when they decode to no finite value


class Sparsifier(Step, Protocol):
    """Which coordinates are sent, as sorted indices: `count(n)` of n, or at most so many where that is not `fixed`.

    `seeded`: the word alone decides (see `Drawn`), and the frame carries it instead of the indices. `select` gives the
    values there too, a copy; where it `looks`, it refuses NaN and infinity with NonFiniteUpdate.
    """

    fixed: ClassVar[bool]
    seeded: ClassVar[bool]
    looks: ClassVar[bool]

    def kind(self) -> Kind: ...
    def count(self, size: int) -> int: ...
    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]: ...


class Drawn(Sparsifier, Protocol):
    """A sparsifier that is seeded: the decoder draws the same places."""

    def places(self, size: int, word: int) -> Indices: ...


class Coder(Protocol):
    """Symbols to fewer bytes, without loss."""

    def pack(self, array: Symbols) -> bytes | memoryview: ...
    def unpack(self, data: bytes | memoryview, items: int, size: int) -> Symbols: ...  # BadPayload before allocation


class BoundCodec(Protocol):
    """A codec whose tensors and sizes are known: one call works on one segment.

    Laws: decode(encode(0)) = 0; NaN or infinity raises NonFiniteUpdate and changes nothing; decode_add over spans
    equals decode times weight; a frame that is not whole and our own raises BadPayload before memory is allocated
    and before `into` is touched. `x` and `state` are donated: they may be overwritten.
    """

    @property
    def spec(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def kind(self) -> Kind: ...
    def init(self, segment: int = 0) -> State: ...
    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded: ...
    def check(self, payload: Arrived, segment: int = 0) -> None: ...
    def decode_add(
        self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0
    ) -> None: ...  # `into` is the whole segment; only `span` of it is touched; O(what was sent)
    def decode(self, payload: Arrived, segment: int = 0) -> Vector: ...
    def max_bytes(self, segment: int = 0) -> int: ...  # of a legal frame


class Codec(Protocol):
    """`parse(spec)` gives one; `parse(parse(s).spec) == parse(s)`."""

    @property
    def spec(self) -> str: ...
    def bind(self, layout: Layout) -> BoundCodec: ...


# What stands between a step's brackets, as exact numbers.


DECIMALS = 9


def read_ratio(name: str, argument: str | None) -> Decimal:
    """A share over 0 and at most 1 as an exact decimal in its shortest form; else CodecError."""
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
    """The share that somebody may have meant by it.

    >>> _as_percent(Decimal("2.5")), _as_percent(Decimal("nan"))
    (Decimal('0.025'), Decimal('0.01'))
    """
    meant = (number / 100).normalize() if number.is_finite() and 1 < number <= 100 else Decimal("0.01")
    return meant if meant == round(meant, DECIMALS) else Decimal("0.01")


def read_number(name: str, argument: str | None, most: Decimal, example: str) -> Decimal:
    """A number over 0 and at most `most` as an exact decimal in its shortest form; else CodecError."""
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
    """A whole number in least..most; else CodecError with the nearest one."""
    said = (argument or "").strip()
    if said.isascii() and said.isdigit() and len(said) < 9:
        if least <= int(said) <= most:
            return int(said)
        example = min(max(int(said), least), most)
    raise CodecError(f"{name}({said}) cannot be", why=f"it takes {least} to {most}", hint=f"{name}({example})")
