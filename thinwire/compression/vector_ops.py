"""Vector operations that codecs share: blocks, buckets, sums, thresholds, an encoder's memory, and encoding in parts.

Each runs its kernel, or numpy if that is the path; both give the same bits.

A bucket is 4096 values that share a scale; buckets begin again at each segment. A block is 2^16 values, which stay in
cache.

Sums have final bits: float64 in eight partial sums (i mod 8), which are added 0+4, 1+5, 2+6, 3+7 and so on. Each bucket
is summed separately, and the buckets one after the other. A kernel on any instruction set can do the same; numpy's own
`sum` promises no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    ALL,
    BLOCK,
    BUCKET,
    Encoded,
    Everything,
    Scales,
    Support,
    Symbols,
    buckets,
    packed_bytes,
)
from thinwire.compression.native import address, each, kernel, require_kernel, require_vector
from thinwire.core.errors import NonFiniteUpdate

if TYPE_CHECKING:
    from thinwire.compression.base import FusedQuantizer, Indices
    from thinwire.core.types import Vector


def require_finite(x: Vector) -> None:
    """Raise NonFiniteUpdate if `x` holds NaN or infinity."""
    if not finite(x):
        raise NonFiniteUpdate


def add_finite(x: Vector, other: Vector, sign: float = 1.0) -> None:
    """Add `sign` (1 or -1) times `other` to `x` in one pass; raise NonFiniteUpdate for NaN and infinity.

    After the error, `x` may hold a part of the sums.
    """
    require_vector(other, x.size)
    run, to, of = kernel("add_finite"), x.ctypes.data, other.ctypes.data
    if run is None:
        add = np.add if sign > 0 else np.subtract
        with np.errstate(over="ignore", invalid="ignore"):
            for start, stop in blocks(x.size):
                add(x[start:stop], other[start:stop], out=x[start:stop])
                require_finite(x[start:stop])
    elif not all(each(0, x.size, lambda a, b: run(to + 4 * a, of + 4 * a, b - a, sign))):
        raise NonFiniteUpdate


def finite(x: NDArray[Any]) -> bool:
    """Return True if all values are finite. It reads block by block, so that no copy of the vector is made."""
    run = kernel("finite")
    if run is not None and x.dtype == np.float32 and x.flags.c_contiguous and x.flags.aligned:
        at = x.ctypes.data
        return all(each(0, x.size, lambda a, b: run(at + 4 * a, b - a)))
    return all(bool(np.isfinite(x[a:b]).all()) for a, b in blocks(x.size))


def blocks(stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the blocks that cover start .. stop, cut at multiples of BLOCK.

    >>> list(blocks(BLOCK + 1, start=10))
    [(10, 65536), (65536, 65537)]
    """
    while start < stop:
        end = min(start - start % BLOCK + BLOCK, stop)
        yield start, end
        start = end


def spanned(span: slice, size: int) -> tuple[int, int]:
    """Return start and stop of a span with step 1."""
    start, stop, step = span.indices(size)
    if step != 1:
        raise ValueError("a span has no step")
    return start, max(start, stop)


def maxima(values: Vector) -> Vector:
    """Return the largest magnitude of each bucket."""
    found = np.empty(buckets(values.size), np.float32)
    run, x, to = _of_vectors("maxima", values), values.ctypes.data, found.ctypes.data
    if run is not None:
        each(0, values.size, lambda a, b: run(x + 4 * a, b - a, to + a // BUCKET * 4))
        return found
    for start, stop in blocks(values.size):
        magnitudes = np.abs(values[start:stop])
        whole, first = magnitudes.size // BUCKET, start // BUCKET
        magnitudes[: whole * BUCKET].reshape(whole, BUCKET).max(axis=1, out=found[first : first + whole])
        if whole * BUCKET < magnitudes.size:
            found[-1] = magnitudes[whole * BUCKET :].max()
    return found


def _of_vectors(name: str, values: Vector) -> Callable[..., Any] | None:
    """Return this kernel if there is one and `values` is a contiguous vector of float32."""
    return kernel(name) if values.dtype == np.float32 and values.flags.c_contiguous else None


def scaled(values: NDArray[Any], scales: Vector, start: int) -> Vector:
    """Return a float32 copy of the values at `start` and after, each times the scale of its bucket."""
    out: Vector = values.astype(np.float32)
    ahead = min(-start % BUCKET, out.size)  # the rest of the bucket that began before `start`
    whole = (out.size - ahead) // BUCKET
    first, behind = buckets(start), ahead + whole * BUCKET
    if ahead:
        out[:ahead] *= scales[start // BUCKET]
    out[ahead:behind].reshape(whole, BUCKET)[...] *= scales[first : first + whole, None]
    if behind < out.size:
        out[behind:] *= scales[first + whole]
    return out


PARTIALS = 8


def bucket_sums(values: Vector, power: int = 1) -> NDArray[np.float64]:
    """Return the sum of |x|^power of each bucket, power 1 or 2; squares of float32 are exact in float64."""
    found = np.zeros(buckets(values.size))
    run, x, to = _of_vectors("bucket_sums", values), values.ctypes.data, found.ctypes.data
    if run is not None:
        each(0, values.size, lambda a, b: run(x + 4 * a, b - a, power == 2, to + a // BUCKET * 8))
        return found
    for start, stop in blocks(values.size):
        magnitudes = np.abs(values[start:stop]).astype(np.float64)
        found[start // BUCKET : buckets(stop)] = partial_sums(magnitudes if power == 1 else magnitudes * magnitudes)
    return found


def partial_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each bucket of 4096 values, in eight partial sums."""
    rows = buckets(values.size)
    if values.size < rows * BUCKET:
        values = np.concatenate([values, np.zeros(rows * BUCKET - values.size)])
    of_eight = values.reshape(rows, BUCKET // PARTIALS, PARTIALS)
    partials = np.add.reduce(of_eight, axis=1)  # adds rows of eight one after the other
    width = PARTIALS
    while width > 1:
        width //= 2
        partials = partials[:, :width] + partials[:, width:]
    sums: NDArray[np.float64] = partials[:, 0]
    return sums


def in_order(sums: NDArray[np.float64]) -> float:
    """Return the sum of the buckets' sums, added one after the other.

    >>> in_order(np.array([1e16, 1.0, -1e16]))
    0.0
    """
    return float(np.add.accumulate(sums)[-1]) if sums.size else 0.0


def rms(values: Vector) -> float:
    """Return the root of the mean square."""
    return root_of(bucket_sums(values, 2), values.size)


def root_of(squares: NDArray[np.float64], size: int) -> float:
    """Return the root of the mean square from the buckets' sums of squares."""
    return float(np.sqrt(in_order(squares) / max(1, size)))


MAGNITUDE = np.uint32(0x7FFFFFFF)  # all bits except the sign


MARGIN = 4096  # room for more indices than expected
AHEAD = 16  # the kernel writes sixteen before it knows how many of them count
Found: TypeAlias = tuple[NDArray[np.integer[Any]], NDArray[np.uint32]]


def reaching(values: Vector, least: np.uint32, share: float) -> Found:
    """Return indices and bits of all values whose magnitude is at least that of the float with the bits `least`.

    `share` is the expected share of such values. As integers, magnitudes of floats sort like the floats. This pass over
    all values serves both `topk` and `threshold`.

    >>> places, bits = reaching(np.float32([1, -3, 2]), np.float32(2).view(np.uint32), 1.0)
    >>> places.tolist(), bits.view(np.float32).tolist()
    ([1, 2], [-3.0, 2.0])
    """
    run = kernel("reaching")
    if run is None:
        magnitudes = values.view(np.uint32)
        found = np.flatnonzero(magnitudes & MAGNITUDE >= least)
        return found, magnitudes[found]
    x = values.ctypes.data

    def part(a: int, b: int) -> Found:
        room = min(b - a, int(1.2 * share * (b - a)) + MARGIN) + AHEAD
        while True:
            places, bits = np.empty(room, np.int32), np.empty(room, np.uint32)
            count = run(x + 4 * a, b - a, least, a, room, places.ctypes.data, bits.ctypes.data)
            if count + AHEAD <= room:
                return places[:count], bits[:count]
            room = count + AHEAD

    parts = each(0, values.size, part)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([places for places, _ in parts]), np.concatenate([bits for _, bits in parts])


def sparse_add(places: Indices, values: Vector, factor: np.float32, shift: int, adds: bool, into: Vector) -> None:
    """Write values * factor to into[places - shift], added if `adds`, else in place of its values.

    The places strictly rise.
    """
    run = kernel("sparse_add")
    if run is not None:
        values = np.require(values, np.float32, ["C", "A"])  # values in a frame may begin at any byte
        run(address(places), values.ctypes.data, places.size, factor, shift, adds, into.ctypes.data)
    else:
        write_scaled(values, factor, adds, into, places - shift)


def write_scaled(values: Vector, factor: np.float32, adds: bool, into: Vector, places: slice | Indices) -> None:
    """Write values * factor to into[places], added if `adds`, else in place of its values."""
    scaled = values if factor == 1 else values * factor
    if adds:
        into[places] += scaled
    else:
        into[places] = scaled


AddDecoded = Callable[[float, "Vector"], None]


@dataclass(frozen=True)
class Memory:
    """The memory of an encoder, which is only read. `sign` is 1 for a residual and -1 for a reference.

    The memory goes into an encode, and the updated memory replaces the vector that was given.
    """

    vector: Vector
    sign: float

    @property
    def weight(self) -> float:
        """Return the weight with which the decoded values are added to the updated memory."""
        return -self.sign

    def compensate(self, x: Vector, span: slice = ALL) -> None:
        """Replace `x` by p, the vector that is encoded; raise NonFiniteUpdate if p holds NaN or infinity."""
        add_finite(x[span], self.vector[span], self.sign)

    def restart(self, x: Vector, span: slice = ALL) -> None:
        """Replace p by the vector to which the decoded values are added."""
        if self.sign < 0:
            x[span] = self.vector[span]

    def require_finite(self, x: Vector, span: slice | Support = ALL) -> None:
        """Raise NonFiniteUpdate if the updated memory overflowed, which can happen near float32's largest value.

        A device that kept such a memory could never encode again.
        """
        require_finite(x if isinstance(span, Everything) else x[span])

    def update(self, x: Vector, add: AddDecoded, span: slice | Support = ALL) -> None:
        """Replace p by the updated memory; `add(weight, into)` adds the decoded values, which lie in `span`."""
        self.restart(x)
        add(self.weight, x)
        self.require_finite(x, span)

    def encode_in_steps(self, x: Vector, encode: Callable[[Vector], tuple[Encoded, AddDecoded]]) -> Encoded:
        """Encode `x` compensated by the memory, and overwrite `x` with the updated memory.

        This is the oracle of every fused path.
        """
        self.compensate(x)
        encoded, add = encode(x)
        self.update(x, add, encoded.support)
        return encoded


Own = Callable[[int], tuple[Any, ...]]  # a kernel's own arguments for the part that begins at this value


def write_in_parts(name: str, values: Vector, memory: Memory | None, own: Own) -> None:
    """Run encode kernel `name` on each thread's part; raise NonFiniteUpdate for NaN and infinity.

    With a memory, the kernel encodes the values compensated by it, and overwrites them with the updated memory.
    """
    x = values.ctypes.data
    if memory is None:
        run = require_kernel(f"{name}_encode")
        done = each(0, values.size, lambda a, b: run(x + 4 * a, b - a, *own(a)))
    else:
        run, r, sign = require_kernel(f"{name}_compensate"), memory.vector.ctypes.data, memory.sign
        done = each(0, values.size, lambda a, b: run(x + 4 * a, r + 4 * a, sign, b - a, *own(a)))
    if not all(done):
        raise NonFiniteUpdate


CACHED = 1 << 18  # elements: of three passes over these, the last two find them in the second- or third-level cache
WritePart = Callable[["Vector", NDArray[np.uint8], Scales, int], Symbols]


def encode_in_parts(
    quantizer: FusedQuantizer,
    write: WritePart,
    values: Vector,
    memory: Memory,
    symbols: NDArray[np.uint8],
    scales: Scales,
) -> None:
    """Encode `values` compensated by `memory` in parts that stay in cache, and overwrite them with the updated memory.

    `write(part, packed, scales, first)` runs a kernel that has no form with memory; it returns the symbols for
    `FusedQuantizer.add`. `first` is the index of the part's first value.
    """

    def encode(start: int, stop: int) -> None:
        for a in range(start, stop, CACHED):
            b = min(a + CACHED, stop)
            here = slice(a, b)
            memory.compensate(values, here)
            packed = symbols[packed_bytes(a, quantizer.bits) : packed_bytes(b, quantizer.bits)]
            own = scales[quantizer.scales_count(a) : quantizer.scales_count(b)]
            found = write(values[here], packed, own, a)
            memory.restart(values, here)
            quantizer.add(found, own, slice(0, b - a), 0, np.float32(memory.weight), True, values[here])
            memory.require_finite(values, here)

    each(0, values.size, encode)
