"""An entropy coder of indices and symbols (`rans`): its first form, which packs; its bits are not final."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import Coder, Indices, Symbols, packed_bytes
from thinwire.compression.codecs.delta_rice import Rice
from thinwire.compression.codecs.pack_zstd import Pack
from thinwire.core.errors import BadPayload


class Rans(Coder):
    """Codes gaps between indices, and symbols, close to their entropy (range asymmetric numeral systems).

    Duda (2013).
    """

    examples: ClassVar[tuple[str, ...]] = ("topk(0.1) > rans", "ternary > rans")
    paper: ClassVar[str] = "Duda 2013"
    spec: ClassVar[str] = "rans"

    def pack_indices(self, indices: Indices) -> bytes:
        """Return the code of strictly rising indices."""
        return Rice().pack_indices(indices)

    def unpack_indices(self, data: bytes | memoryview, items: int, size: int) -> Indices:
        """Return `items` strictly rising indices under `size`; raise BadPayload if the data holds anything else."""
        return Rice().unpack_indices(data, items, size)

    def max_index_bytes(self, items: int, size: int) -> int:
        """Return the most bytes of `items` indices under `size`."""
        return Rice().max_index_bytes(items, size)

    def pack_symbols(self, symbols: Symbols, bits: int) -> bytes:
        """Return the code of signed symbols of `bits` bits."""
        return b"\0" + bytes(Pack().pack(np.ascontiguousarray(symbols, np.int8), bits))

    def unpack_symbols(self, data: bytes | memoryview, items: int, bits: int) -> NDArray[np.int8]:
        """Return `items` signed symbols of `bits` bits; raise BadPayload if the data holds anything else."""
        if len(data) < 1 or data[0]:
            raise BadPayload("symbols of a form that rans never makes")
        read: NDArray[np.int8] = Pack().unpack(memoryview(data)[1:], items, np.dtype(np.int8), bits)
        return read

    def max_symbol_bytes(self, items: int, bits: int) -> int:
        """Return the most bytes of `items` symbols of `bits` bits."""
        return 1 + packed_bytes(items, bits)

    def pack_sparse(self, places: NDArray[np.int64], symbols: Symbols, items: int, bits: int) -> bytes:
        """Return what `pack_symbols` gives for `items` symbols, all 0 but those at the strictly rising `places`."""
        dense = np.zeros(items, np.int8)
        dense[places] = symbols
        return self.pack_symbols(dense, bits)

    def unpack_sparse(
        self, data: bytes | memoryview, items: int, bits: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int8]] | None:
        """Return (places, symbols) of the symbols that are not 0, or None if the stream is not coded by gaps."""
        del data, items, bits
        return None
