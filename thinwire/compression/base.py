"""The interfaces of compression: codecs, the stages of a chain, their error bounds, and the arguments of a stage.

A `Codec` is a parsed spec. `bind` gives a `BoundCodec` for one layout, which encodes and decodes segments. The encoder
may keep state between calls; the decoder keeps none.

A codec declares its error bound as an `ErrorBound`: `Unbiased(omega)`, `Contractive(delta)` or `NoGuarantee`. Error
feedback reads the kind and refuses a codec around which a residual would diverge.

Stages of a chain (`Step`) are `Sparsifier`, `Quantizer`, low rank, and coders; the last one may be a `Compressor`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.native import NUMPY, chosen

if TYPE_CHECKING:
    from decimal import Decimal

    from thinwire.compression.vector_ops import Memory
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


def packed_bytes(items: int, bits: int) -> int:
    """Return the number of bytes of `items` packed symbols."""
    return -(-items * bits // 8)


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


def shrinkage(kind: ErrorBound, least: float = 1.0) -> float:
    """Return the divisor with which an unbiased codec of omega >= `least` contracts, 1 + omega; 1 for any other.

    E||C(x) / (1 + omega) - x||^2 <= omega / (1 + omega) ||x||^2, so delta = 1 / (1 + omega). No decoder needs it.
    >>> shrinkage(Unbiased(63.0)), shrinkage(Unbiased(0.1)), shrinkage(Contractive(0.1))
    (64.0, 1.0, 1.0)
    """
    return 1 + kind.omega if isinstance(kind, Unbiased) and kind.omega >= least else 1.0


def shrunk(kind: ErrorBound, divisor: float) -> ErrorBound:
    """Return the kind of a codec after the division by its `shrinkage`."""
    return kind if divisor == 1 else Contractive(1 / divisor)


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


class Step(ABC):
    """A stage of a chain. The registry, the catalog, the conformance suite and the benchmarks read what it declares.

    `examples` are specs that contain the stage: the conformance suite runs all of them, and the catalog and the
    benchmarks use the first one. A stage that takes an argument has an example with brackets. `is_cast` is True for a
    quantizer that only changes the number format. `rotates` is True for one that rotates at random, which must be
    `seeded`: its error bound is tested only on dense vectors of 1 024 values or more. `leaves_zeros` is True if most
    decoded values may be 0 whatever was encoded: a median of such updates would be 0.
    """

    role: ClassVar[Role]
    examples: ClassVar[tuple[str, ...]]
    paper: ClassVar[str] = ""  # authors and year
    is_cast: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    leaves_zeros: ClassVar[bool] = False

    @property
    @abstractmethod
    def spec(self) -> str:
        """Return the canonical spec of this stage."""

    @classmethod
    def read(cls, argument: str | None) -> Self:
        """Make the stage from the text between its brackets, None without brackets; raise CodecError if invalid.

        The default is a stage without an argument.
        """
        del argument
        return cls()


class Coder(Step):
    """A coder of indices or symbols, which is part of the frame's format, or a `Compressor` of whole streams."""

    role: ClassVar[Role] = "coder"


class Compressor(Coder):
    """A base class for compressors: a subclass is a frozen dataclass with `compress` and `decompress`.

    It is the last stage of a chain and works on each stream of a frame separately, after all other coders. A stream
    that does not become shorter is sent as it is. Invariant: decompress(compress(data), len(data)) == data.
    """

    @abstractmethod
    def compress(self, data: bytes | memoryview) -> bytes:
        """Return the compressed bytes."""

    @abstractmethod
    def decompress(self, data: bytes | memoryview, most: int) -> bytes | memoryview:
        """Return the decompressed bytes; raise ValueError for invalid data.

        It always ends, may stop at `most` bytes, and allocates no more for data that claims to be larger.
        """


# fused(values, memory, word, symbols, scales): see `Quantizer.fused`.
Fused: TypeAlias = Callable[["Vector", "Memory | None", int, NDArray[np.uint8], Scales], None]


class Quantizer(Step):
    """Turns values into small symbols and their scales. `word` is 32 bits of the key.

    `bits` is the size of a packed symbol; symbols of fewer than 8 bits are signed. If `seeded`, the decoder needs the
    word too, and the frame carries it. If `entropy_coded`, symbols have at most 8 bits and always pass through `rans`,
    which the spec leaves out. Unless it `gains_by_residual`, it is refused with feedback on clients. If it
    `rejects_non_finite`, `quantize` raises NonFiniteUpdate for NaN and infinity.
    """

    role: ClassVar[Role] = "quantizer"
    seeded: ClassVar[bool] = False
    entropy_coded: ClassVar[bool] = False
    gains_by_residual: ClassVar[bool] = True
    rejects_non_finite: ClassVar[bool] = False
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")

    def __init_subclass__(cls) -> None:
        if cls.rotates and not cls.seeded:
            raise TypeError(f"{cls.__name__} rotates, so it must be seeded: its decoder needs the word")

    @property
    @abstractmethod
    def bits(self) -> int:
        """Return the bits of a symbol."""

    @abstractmethod
    def kind(self) -> ErrorBound:
        """Return the error bound."""

    def under_feedback(self) -> Self:
        """Return the quantizer that encodes inside error feedback. Its frames have the same format.

        The default is always right: a chain divides an unbiased, not contractive one by 1 + omega (`shrinkage`).
        Override it only for a form with a smaller error, as `qsgd` does.
        """
        return self

    def restart_scales_at(self, starts: tuple[int, ...]) -> Self:
        """Return a quantizer of the same frames that begins its scales again at each of `starts`."""
        del starts
        return self

    @property
    def fused(self) -> Fused | None:
        """Return the fused encoder of the active path, or None if there is none: `quantize` then does the work.

        It quantizes, bit-packs and writes into the frame's memory, `symbols` and `scales`, in one pass. With a memory
        it encodes `values` compensated by it, and overwrites them with the updated memory. It raises NonFiniteUpdate
        for NaN and infinity.
        """
        return None

    @abstractmethod
    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector, finite unless it `rejects_non_finite`, and not overwritten.

        Symbols of b < 8 bits lie in [-2^(b-1), 2^(b-1)). An `entropy_coded` one may return `SparseSymbols`.
        """

    @abstractmethod
    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`; the result may be a view of the symbols."""

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return buckets(size)

    @abstractmethod
    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload if a symbol or scale would decode to a value that is not finite.

        A quantizer that rotates blocks of n values bounds its scales, because a value is a sum of n levels times the
        scale: n * largest level * scale must be below float32's largest value (`MAX_SCALE` in `drive_eden.py`).
        """


class FusedQuantizer(Quantizer):
    """A quantizer with fused kernels for encoding and decoding.

    Symbols of fewer than 8 bits reach it, `check` and `dequantize` as `Packed`, which has a size, a minimum, and slices
    that are arrays; those of an `entropy_coded` one as an array, or as `SparseSymbols`, which has a size and slices.
    """

    @property
    def fused(self) -> Fused | None:
        """Return the fused encoder, or None where numpy does the work."""
        return self._encode if chosen() != NUMPY else None

    @abstractmethod
    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        """Encode by a fused kernel, as `Quantizer.fused` describes."""

    @abstractmethod
    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Write the values in `span` times `factor` to into[0 ..], added to its values if `adds`, else in their place.

        Return False if the active kernels do not include this one: nothing was done, and the caller uses `dequantize`.
        """


class Sparsifier(Step):
    """Selects the coordinates to send.

    The number of indices is `count(n)` if `fixed`, else at most that. If `seeded`, the word alone decides, and frames
    carry it instead of the indices. If `rejects_non_finite`, `select` raises NonFiniteUpdate for NaN and infinity.
    """

    role: ClassVar[Role] = "sparsifier"
    leaves_zeros: ClassVar[bool] = True
    fixed: ClassVar[bool] = True
    seeded: ClassVar[bool] = False
    rejects_non_finite: ClassVar[bool] = False

    @abstractmethod
    def kind(self) -> ErrorBound:
        """Return the error bound."""

    @abstractmethod
    def count(self, size: int) -> int:
        """Return the number of coordinates sent of `size`, or the largest possible number if it is not `fixed`."""

    def with_ratio(self, least: Decimal) -> Self | None:
        """Return the sparsifier that sends at least the share `least`, for a warm-up; None if it has no ratio."""

    @abstractmethod
    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        """Return the sorted indices to send and a copy of their values."""


class SeededSparsifier(Sparsifier):
    """A seeded sparsifier: encoder and decoder derive the same indices from the word."""

    seeded: ClassVar[bool] = True

    @abstractmethod
    def places(self, size: int, word: int) -> Indices:
        """Return the sorted indices that `word` selects among `size` coordinates."""

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        places = self.places(values.size, word)
        return places, values[places]


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
    """A parsed spec: `parse(parse(s).spec) == parse(s)`."""

    @property
    def spec(self) -> str:
        """Return the canonical spec."""

    def bind(self, layout: Layout) -> BoundCodec:
        """Return this codec for the tensors of one layout."""
