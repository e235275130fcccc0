"""Files that hold the parts of a message one after the other, each checked against its digest.

`PartFile` is the file of a transfer that may be cut. Both ends use it: the device for what it downloads, the aggregator
for what devices upload. `damaged_part` checks parts that are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from thinwire.core.types import Part

PIECE_BYTES = 256 * 2**10  # read at a time


def damaged_part(source: BinaryIO, parts: Iterable[Part]) -> Part | None:
    """Return the first part that does not fit its digest, None if all fit; read the source in pieces, part by part."""
    for part in parts:
        digest, left = hashlib.sha256(), part.length
        while left and (data := source.read(min(PIECE_BYTES, left))):
            digest.update(data)
            left -= len(data)
        if left or digest.hexdigest() != part.sha256:
            return part
    return None


class DamagedPart(Exception):
    """Raised when a complete part does not fit its digest. Only the parts before it are kept."""


class PartFile:
    """A file to which parts are appended one after the other, each checked against its digest.

    `size` is how many bytes are accepted so far. Bytes of the file behind them do not count, and are cut off.

    Invariant: a part that was accepted as a whole fits its digest.
    """

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self.path, self._parts = path, parts
        self.starts = list(itertools.accumulate((part.length for part in parts), initial=0))
        self.restart()

    def restart(self) -> None:
        """Begin again with the first part."""
        self.size, self._index, self._digest = 0, 0, hashlib.sha256()

    @property
    def left(self) -> int:
        """Return the missing bytes of the current part, skipping empty parts; 0 when all parts are complete."""
        while self._index < len(self._parts) and not self._parts[self._index].length:
            self._index += 1
        return self.starts[self._index + 1] - self.size if self._index < len(self._parts) else 0

    def offset(self, index: int) -> int:
        """Return how many bytes of one part are here."""
        return min(max(0, self.size - self.starts[index]), self._parts[index].length)

    def check(self) -> None:
        """Accept what the file contains, as far as the digests fit, and cut off the rest; the file may be missing."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "r+b", buffering=0) as file:
            with contextlib.suppress(DamagedPart):
                while (left := self.left) and (data := file.read(min(PIECE_BYTES, left))):
                    self._took(data)
            self._cut_back(file)

    def open(self, create: bool = False) -> BinaryIO:
        """Open the file where the accepted bytes end."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        file = open(os.open(self.path, flags, 0o600), "r+b", buffering=0)  # noqa: SIM115  # the caller closes it
        self._cut_back(file)
        return file

    def append(self, file: BinaryIO, data: bytes) -> None:
        """Write bytes of the current part; raise `DamagedPart`, and cut the part off, if it ends and does not fit."""
        view = memoryview(data)
        try:
            while view:
                written = file.write(view)
                self._took(view[:written])
                view = view[written:]
        except DamagedPart:
            self._cut_back(file)
            raise

    def _cut_back(self, file: BinaryIO) -> None:
        file.truncate(self.size)
        file.seek(self.size)

    def _took(self, data: bytes | memoryview) -> None:
        left, part = self.left, self._parts[self._index]
        self._digest.update(data)
        self.size += len(data)
        if len(data) < left:
            return
        fits, self._digest = self._digest.hexdigest() == part.sha256, hashlib.sha256()
        if not fits:
            self.size = self.starts[self._index]
            raise DamagedPart(f"part {part.name!r}")
        self._index += 1
