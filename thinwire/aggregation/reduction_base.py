"""A reduction turns the decoded updates of one round into one change, where the weighted mean is not robust enough.

The mean is a running sum (`mean.py`); a reduction compares updates, so it needs all of them. `UpdateRows` keeps each
decoded update as a row of float32 in a file without a name, and gives the rows in blocks of coordinates that fit the
second-level cache. Memory therefore holds the change and one segment of one update, for ten clients as for a hundred,
and all clients' buffers where these are averaged.
The price is 4 bytes of disk for each parameter and update until the round closes, which are written once and read once
or twice. Every codec works, also one of another package: no codec has to decode in blocks.

Updates are unweighted. Their number of examples is the client's own claim, and a hostile one would claim many.

Invariant: rows are in the order of their assignment ids. So the change has the same bits in whatever order the updates
arrived, and after a restart on the same processor with as many threads of the linear algebra library.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median_low
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.mean import BufferMean
from thinwire.core.disk_reserve import FREE_BYTES
from thinwire.core.errors import ThinwireError, TooLittleSpace
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.types import Arrived, Vector

CACHED = 1 << 18  # floats of all rows of a block: 1 MiB, which stays in the second-level cache
FEWEST = 64  # coordinates of a block, however many rows there are

Rows = NDArray[np.float32]  # (updates, coordinates)
Distances = NDArray[np.float64]  # squared distances between all pairs of updates


class UpdateRows:
    """Holds the decoded updates of one round in a file without a name, until it is closed.

    Invariant: an update is added completely or not at all, because it counts only once all its parts are written.

    Space that is missing makes this run wait (`TooLittleSpace`). Another failure of the disk is a plain
    `ThinwireError`, which ends this run only. `NotWritten` would pause all runs and then start this one again, which
    would fill the disk again.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.ids: list[str] = []  # assignment ids, in the order of the file
        self._file: Any = None

    @property
    def count(self) -> int:
        """Return the number of updates."""
        return len(self.ids)

    def allocate(self, updates: int) -> None:
        """Take disk space for so many updates; raise `TooLittleSpace` if `FREE_BYTES` would not be left for others.

        Space is taken before it is written, so that two runs never count on the same free space. Raise a plain
        `ThinwireError` if the whole disk is too small, or fails.
        """
        needed = updates * self.size * FLOAT_BYTES + FREE_BYTES
        try:
            disk = shutil.disk_usage(self.folder)
            if disk.free >= needed:
                os.posix_fallocate(self._opened(), 0, needed - FREE_BYTES)
                return
        except OSError as error:
            self.close()
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # another process was faster
            kind = TooLittleSpace if is_full else ThinwireError
            raise self._error(updates, f"{self.folder}: {error.strerror or error}", kind) from error
        waits = disk.total >= needed
        has = "less than that free" if waits else f"{disk.total / 1e9:.2f} GB in all"  # a status: no number that moves
        why = f"the disk of {self.folder} has {has}, and {FREE_BYTES / 1e9:.2f} GB stay for other files"
        raise self._error(updates, why, TooLittleSpace if waits else ThinwireError)

    def _opened(self) -> int:
        """Return the descriptor of the file."""
        self._file = self._file or tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        return int(self._file.fileno())

    def _error(self, updates: int, why: str, kind: type[ThinwireError] = ThinwireError) -> ThinwireError:
        one = self.size * FLOAT_BYTES
        return kind(
            f"[server] reduce keeps {updates} decoded updates of {one / 1e6:.1f} MB: {updates * one / 1e9:.2f} GB",
            why=why,
            hint='a smaller cohort, another disk (--home FOLDER), or [server] reduce = "mean", which keeps none',
        )

    def empty(self) -> None:
        """Forget the updates, and keep the disk space for others in their place."""
        self.ids.clear()

    def close(self) -> None:
        """Free the disk space; the updates are gone."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.empty()

    def add(self, assignment_id: str, parts: Iterable[Vector]) -> None:
        """Write one update, whose parts are all its values in order; raise `ThinwireError` if the disk is full."""
        try:
            file, at = self._opened(), self.count * self.size * FLOAT_BYTES
            for part in parts:
                data = part.data.cast("B")
                while data.nbytes:
                    written = os.pwrite(file, data, at)
                    data, at = data[written:], at + written
        except OSError as error:
            raise self._error(self.count + 1, f"{self.folder}: {error.strerror or error}") from error
        self.ids.append(assignment_id)

    def blocks(self, chosen: Sequence[int] | None = None) -> Iterator[tuple[slice, Rows]]:
        """Yield (coordinates, their values in each row), for all rows or those `chosen`, in the rows' order.

        The array is used again for the next block, and may be overwritten.
        """
        order = sorted(range(self.count), key=self.ids.__getitem__)
        rows = order if chosen is None else [order[index] for index in chosen]
        width = min(self.size, max(FEWEST, CACHED // max(1, len(rows))))
        held = np.empty((len(rows), width), np.float32)
        for start in range(0, self.size, width):
            stop = min(self.size, start + width)
            block = held[:, : stop - start]
            for row, number in zip(block, rows, strict=True):
                self._read(row, (number * self.size + start) * FLOAT_BYTES)
            yield slice(start, stop), block

    def _read(self, into: Vector, at: int) -> None:
        data = into.data.cast("B")
        while data.nbytes:
            try:
                found = os.preadv(self._file.fileno(), [data], at)
            except OSError as error:
                raise self._error(self.count, f"{self.folder}: {error.strerror or error}") from error
            if not found:
                raise self._error(self.count, f"their file in {self.folder} is cut short")
            data, at = data[found:], at + found

    def distances(self) -> Distances:
        """Return the squared distances between all pairs of updates, from one pass over the blocks.

        They follow from inner products in float64: |x - y|^2 = <x, x> - 2 <x, y> + <y, y>. An update of 2^60 does not
        make the distances between others less exact.
        """
        products = np.zeros((self.count, self.count))
        for _, rows in self.blocks():
            wide = rows.astype(np.float64)
            products += wide @ wide.T
        squares = np.diag(products)
        return np.maximum(squares[:, None] - 2 * products + squares[None, :], 0.0)

    def combined(self, weights: NDArray[np.float64]) -> Vector:
        """Return the weighted sum of the rows; rows of weight 0 are not read."""
        counted = np.flatnonzero(weights)
        out, factors = np.zeros(self.size, np.float32), weights[counted]
        for span, rows in self.blocks([int(index) for index in counted]):
            out[span] = factors @ rows.astype(np.float64)
        return out


class Reduction(ABC):
    """Makes one change of the updates of one round; it knows no clients and nothing of earlier rounds.

    `fewest` is the number of updates without which a round closes as `too-few`. `needs_dense` is True for a reduction
    that would give 0 wherever most updates sent nothing; a plan whose codec leaves coordinates out is then refused. A
    reduction that chooses among updates sets `chosen` to their rows, for the journal.
    """

    fewest: int = 2
    needs_dense: ClassVar[bool] = False
    chosen: Sequence[int] = ()

    @abstractmethod
    def reduce(self, updates: UpdateRows) -> Vector:
        """Return the change, float32 of `updates.size`. It must not depend on the order of the rows."""


class CoordinateWise(Reduction):
    """Treats each coordinate by itself."""

    needs_dense: ClassVar[bool] = True

    @abstractmethod
    def of_block(self, rows: Rows) -> Vector:
        """Return one value for each column; `rows` may be overwritten."""

    def reduce(self, updates: UpdateRows) -> Vector:
        """Return the change, one block of coordinates after the other."""
        out = np.empty(updates.size, np.float32)
        for span, rows in updates.blocks():
            out[span] = self.of_block(rows)
        return out


class Combination(Reduction):
    """Makes a weighted sum of the updates, by weights that follow from their distances.

    Weights add up to 1, so the change does not depend on where 0 is, and equal updates give that update.
    """

    chooses: ClassVar[bool] = False  # True: an update of weight 0 was not chosen

    @abstractmethod
    def weights(self, distances: Distances) -> NDArray[np.float64]:
        """Return the weight of each update."""

    def reduce(self, updates: UpdateRows) -> Vector:
        """Return the change, from one pass for the distances and one for the sum."""
        weights = self.weights(updates.distances())
        self.chosen = [int(index) for index in np.flatnonzero(weights)] if self.chooses else ()
        return updates.combined(weights)


def between(rows: Rows, first: int, last: int) -> list[Vector]:
    """Return the values of ranks first .. last - 1 of each column, in rising order; `rows` is overwritten.

    A sorting network compares whole rows, so that the processor handles many columns at once.

    >>> [found.tolist() for found in between(np.float32([[5, 1], [2, 9], [3, 3]]), 1, 2)]
    [[3.0, 3.0]]
    """
    lines, spare = list(rows), np.empty(rows.shape[1], rows.dtype)
    for low, high in _network(len(lines), first, last):
        np.minimum(lines[low], lines[high], out=spare)
        np.maximum(lines[low], lines[high], out=lines[high])
        lines[low], spare = spare, lines[low]
    return lines[first:last]


@lru_cache(maxsize=64)
def _network(count: int, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return the comparisons of Batcher's odd-even merge sort (1968) that ranks first .. last - 1 depend on."""
    found, needed = list[tuple[int, int]](), set(range(first, last))
    for low, high in reversed(list(_merge_sort(count))):
        if {low, high} & needed:
            needed |= {low, high}
            found.append((low, high))
    return tuple(reversed(found))


def _merge_sort(count: int) -> Iterator[tuple[int, int]]:
    run = 1
    while run < count:
        step = run
        while step:
            for start in range(step % run, count - step, 2 * step):
                for low in range(start, min(start + step, count - step)):
                    if low // (2 * run) == (low + step) // (2 * run):
                        yield low, low + step
            step //= 2
        run *= 2


class BufferMedian(BufferMean):
    """Takes the coordinate-wise median of clients' buffers, and of their counters the lower one in the middle.

    One hostile client would move a mean of buffers anywhere, whatever becomes of its update. The spread between clients
    is not added to a variance, as `BufferMean` does it. Memory: the buffers of all clients.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.rows = list[Vector]()
        self.seen = dict[str, list[int]]()

    def fold(self, payload: Arrived, weight: float) -> None:
        """Keep buffers that `check` accepted."""
        self.rows.append(self.codec.decode(payload))

    def count(self, seen: Mapping[str, int]) -> None:
        """Keep the value of each integer buffer; names that the model does not have are ignored."""
        for name, value in seen.items():
            if name in self.counted:
                self.seen.setdefault(name, []).append(value)
                self.counters[name] = median_low(self.seen[name])

    def close(self, before: Vector) -> Vector:
        """Return the median, or `before` if there were no buffers."""
        return np.median(np.stack(self.rows), axis=0).astype(np.float32) if self.rows else before
