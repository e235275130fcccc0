"""Values that a test plants in a client's reply, and the search for them in bytes, also deflated or zstd'ed ones."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path

import numpy as np
from backports import zstd
from numpy.typing import NDArray

from thinwire.aggregation.lattice import Lattice
from thinwire.privacy.masks import pack, packed_size
from thinwire.privacy.summed_metrics import UNIT

SIZE, BUFFERS, TESTED = 64, 4, 4  # parameters, values of a buffer, examples that a model is evaluated on
CLIP, WEIGHT_MAX, LOSS_BOUND, MOST = 1.0, 2_000_000, 10.0, 15  # the largest integer that is planted on the lattice
BITS = 8
SECURE = (
    "secure.enabled=true", "secure.max_corrupt=0.25", "secure.max_dropout=0.25",
    f"secure.metrics={{ loss = {LOSS_BOUND} }}", f"secure.weight_max={WEIGHT_MAX}", f"secure.clip={CLIP}",
    "secure.rotate=false", "local.buffers='local'", "cohort.max_weight='none'",
)  # fmt: skip
PLAIN = ("uplink.codec='identity'",)
_PRIVATE = (
    f"privacy.clip={CLIP}", "privacy.noise_multiplier=1.0", "privacy.delta=1e-3", "run.evaluate='off'",
    "local.buffers='local'", "cohort.late='drop'",
)  # fmt: skip
PRIVATE = {  # by the mode
    "central": (*_PRIVATE, "privacy.mode='central'", "uplink.codec='identity'"),
    "distributed": (
        *_PRIVATE, "privacy.mode='distributed'", "secure.enabled=true", "secure.max_corrupt=0.25",
        "secure.max_dropout=0.25", "cohort.clients=3",
    ),
}  # fmt: skip
RUN = slice(8, 16)  # eight coordinates in a row: no other bytes are equal to them by chance
FLOATS = ("<f4", "<f8")
WHOLE = ("<i1", "<i2", "<i4", "<i8")
ZSTD, ZLIB = b"\x28\xb5\x2f\xfd", 0x78  # how a stream begins; zlib's second byte is the level of its compression
LEVELS = np.zeros(256, np.bool_)
LEVELS[[0x01, 0x5E, 0x9C, 0xDA]] = True
PAGE, ENTRY = 4096, 8  # bytes of a page, and of what /proc/PID/pagemap says of it
IN_USE, ONLY_HERE = np.uint64(3 << 62), np.uint64(1 << 56)  # in memory or swapped; mapped in no other process
INFLATED = 1 << 20  # bytes that are inflated of one stream
WORD, LOOK = 4, 1 << 18


@dataclass(frozen=True)
class Planted:
    """What is planted for the client with this number."""

    number: int

    @property
    def weight(self) -> int:
        """The number of examples."""
        return 1_273_849 + 111_757 * self.number

    @property
    def counter(self) -> int:
        """A statistic that is a whole number, as BatchNorm counts its batches."""
        return 80_412_537 + 1_093_871 * self.number

    @property
    def loss(self) -> float:
        """The loss of each example that a model is evaluated on: a float32. No client's is the mean of all."""
        return float(np.float32(2.718281828 + 0.31415926 * self.number**2))

    @property
    def buffer(self) -> NDArray[np.float32]:
        return np.random.default_rng(180_000 + self.number).normal(size=BUFFERS).astype(np.float32)

    @cached_property
    def integers(self) -> NDArray[np.int64]:
        """The lattice points of a secure round whose grid is not rotated."""
        drawn = np.random.default_rng(170_000 + self.number).integers(1, MOST + 1, SIZE)
        signs: NDArray[np.int64] = np.random.default_rng(160_000 + self.number).choice((-1, 1), SIZE)
        return drawn * signs

    @cached_property
    def update(self) -> NDArray[np.float32]:
        """The update that comes to `integers`: the lattice weighs it by weight / WEIGHT_MAX."""
        step = CLIP / ((1 << (BITS - 1)) - 1) * WEIGHT_MAX / self.weight
        return (self.integers * step).astype(np.float32)

    def forms(self, lattice: Lattice | None) -> dict[str, tuple[bytes, ...]]:
        """The bytes by which each planted value would be found; with a lattice also those of its points and scalars."""
        total, norm = self.loss * TESTED, float(np.linalg.norm(self.update.astype(np.float64)))
        found = {
            "weight": (str(self.weight).encode(),),
            "counter": (str(self.counter).encode(),),
            "metric": (*_of(self.loss), *_of(total)),
            "norm": (f"{norm:.17g}"[:9].encode(),),
            "buffer": (*(self.buffer.astype(dtype).tobytes() for dtype in FLOATS), _text(float(self.buffer[0]))),
            "update": tuple(self.update[RUN].astype(dtype).tobytes() for dtype in FLOATS),
        }
        if lattice is not None:
            found |= self._scalars()
            found["lattice"] = (*(self.integers[RUN].astype(dtype).tobytes() for dtype in WHOLE), *self._lanes(lattice))
        return found

    def _scalars(self) -> dict[str, tuple[bytes, ...]]:
        """Two parts of the 64-bit lanes: the check lane, the weight and the rounded loss; the last two and the count.

        Fewer numbers have so many zeros in their lanes that others in a process's memory are equal to them by chance.
        """
        below = math.floor(self.loss / LOSS_BOUND * TESTED * UNIT)
        rounded = below, below + 1
        return {
            "summed weight": tuple(struct.pack("<qqq", 1, self.weight, loss) for loss in rounded),
            "summed loss": tuple(struct.pack("<qqq", self.weight, loss, TESTED) for loss in rounded),
        }

    def _lanes(self, lattice: Lattice) -> tuple[bytes, ...]:
        lanes = np.zeros(lattice.lanes, lattice.dtype)
        lanes[:SIZE] = self.integers & ((1 << lattice.width) - 1)
        packed = np.empty(packed_size(lattice.lanes, lattice.width), np.uint8)
        pack(lanes, lattice.width, packed)
        return lanes[RUN].tobytes(), packed[lattice.width : 2 * lattice.width].tobytes()


def _text(value: float) -> bytes:
    return repr(value)[:12].encode()


def _of(value: float) -> tuple[bytes, ...]:
    return _text(value), np.float64(value).tobytes()


@dataclass(frozen=True)
class Search:
    """Looks for the planted values of some clients. `found` gives for each place what was found there."""

    forms: Mapping[str, tuple[bytes, ...]]  # "client 2 metric" -> its forms

    @classmethod
    def of(cls, clients: int, lattice: Lattice | None = None) -> Search:
        return cls({f"client {n} {name}": f for n in range(clients) for name, f in Planted(n).forms(lattice).items()})

    def found(self, places: Mapping[str, Iterable[bytes]]) -> dict[str, set[str]]:
        return {place: {name for blob in blobs for name in self.in_blob(blob)} for place, blobs in places.items()}

    def in_blob(self, blob: bytes) -> set[str]:
        """The names of what is in these bytes, or in a stream within them that is deflated or zstd'ed."""
        return {name for data in (blob, *_streams(blob)) for name in self._in(data)}

    @cached_property
    def _by_word(self) -> dict[int, list[tuple[str, bytes, int]]]:
        """The forms by one of the words within, and where that stands: the word with the most different bytes, which is
        the rarest by chance.
        """
        found: dict[int, list[tuple[str, bytes, int]]] = {}
        for name, forms in self.forms.items():
            for form in forms:
                at = max(range(len(form) - WORD + 1), key=lambda at: len(set(form[at : at + WORD])))
                found.setdefault(int.from_bytes(form[at : at + WORD], "little"), []).append((name, form, at))
        return found

    @cached_property
    def _table(self) -> NDArray[np.bool_]:
        """Whether a word of this hash is one of `_by_word`."""
        table = np.zeros(1 << 16, np.bool_)
        table[_hashed(np.array(list(self._by_word), np.uint32))] = True
        return table

    def _in(self, data: bytes) -> Iterator[str]:
        """What is in these bytes: one look at 100 MB for the words of all forms, and not one for each form."""
        for begin in range(0, len(data), LOOK):  # what numpy makes of a look stays in the cache
            for at in range(begin, min(begin + WORD, len(data) - WORD + 1)):
                words = np.frombuffer(data, "<u4", min(LOOK, len(data) - at) // WORD, at)
                for place in np.flatnonzero(self._table[_hashed(words)]).tolist():
                    for name, form, within in self._by_word.get(int(words[place]), ()):
                        first = at + place * WORD - within
                        if first >= 0 and data[first : first + len(form)] == form:
                            yield name


def _hashed(words: NDArray[np.uint32]) -> NDArray[np.uint16]:
    return ((words * np.uint32(0x9E3779B1)) >> np.uint32(16)).astype(np.uint16)


def _streams(blob: bytes) -> Iterator[bytes]:
    data, at = np.frombuffer(blob, np.uint8), blob.find(ZSTD)
    while at >= 0:
        with contextlib.suppress(zstd.ZstdError, MemoryError):
            yield zstd.ZstdDecompressor().decompress(memoryview(blob)[at : at + INFLATED])
        at = blob.find(ZSTD, at + 1)
    begins = np.flatnonzero(data[:-1] == ZLIB)
    for at in begins[LEVELS[data[begins + 1]]].tolist():
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj().decompress(memoryview(blob)[at : at + INFLATED], INFLATED)


def files_of(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.read_bytes()


def memory_of(pid: int) -> Iterator[bytes]:
    """The writable memory of a process of this user that a server has forked, a mapping at a time (proc(5)).

    Pages that it has never written are left out: they are mapped in the server too, and no server has seen a client.
    """
    with open(f"/proc/{pid}/maps") as maps, _opened(pid, "pagemap") as table, _opened(pid, "mem") as memory:
        for line in maps.read().splitlines():
            span, access, *_ = line.split()
            if not access.startswith("rw") or "[v" in line:
                continue
            begin, end = (int(edge, 16) for edge in span.split("-"))
            try:
                pages = np.frombuffer(_read(table, begin // PAGE * ENTRY, end // PAGE * ENTRY), np.uint64)
                its_own = (pages & IN_USE != 0) & ((pages & ONLY_HERE != 0) | access.endswith("s"))
                edges = begin + PAGE * np.flatnonzero(np.diff(its_own, prepend=False, append=False))
                yield b"".join(_read(memory, *run) for run in edges.reshape(-1, 2).tolist())
            except OSError:
                continue  # it was given back meanwhile


def _opened(pid: int, what: str) -> FileIO:
    return FileIO(f"/proc/{pid}/{what}")


def _read(file: FileIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
