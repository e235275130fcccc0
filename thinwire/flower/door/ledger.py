"""Counts that outlive their process: six numbers a device in a mapped file, which the system keeps however we end.

Not so a power cut, after which up to half a minute of counting is missing, and a backup does not hold them.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

NAME_BYTES = 64
NUMBERS = 6
RECORD_BYTES = NAME_BYTES + 8 * NUMBERS
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY  # they are mapped one by one, so that the file can grow
RECORDS = PAGE_BYTES // RECORD_BYTES

log = logging.getLogger("thinwire.door")


class Counts(Protocol):
    """Numbers by place: a list, or a part of the file."""

    def __getitem__(self, place: int, /) -> int: ...
    def __setitem__(self, place: int, number: int, /) -> None: ...


class Ledger:
    """The numbers by name, all 0 at first; `path` None: they are in memory alone. Belongs to the door's loop."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._known = path, dict[str, Counts]()
        self._free = iter(tuple[memoryview, ...]())
        try:
            for page in self._pages():
                self._read(page)
        except OSError as error:
            self._give_up(error)

    def of(self, name: str) -> Counts:
        """The numbers of a device; what is set in them is kept."""
        if name not in self._known:
            self._known[name] = self._new(name)
        return self._known[name]

    def _read(self, page: memoryview) -> None:
        free = list[memoryview]()
        for at in range(0, RECORDS * RECORD_BYTES, RECORD_BYTES):
            record = page[at : at + RECORD_BYTES]
            if name := bytes(record[:NAME_BYTES]).rstrip(b"\0").decode("ascii", "replace"):
                self._known[name] = record[NAME_BYTES:].cast("Q")
            else:
                free.append(record)
        self._free = iter((*self._free, *free))

    def _new(self, name: str) -> Counts:
        called = name.encode()
        if self._path is None or len(called) > NAME_BYTES:
            return [0] * NUMBERS
        try:
            record = next(self._free, None)
            if record is None:
                self._read(self._page(self._path.stat().st_size // PAGE_BYTES))
                record = next(self._free)
        except OSError as error:
            self._give_up(error)
            return [0] * NUMBERS
        record[: len(called)] = called
        return record[NAME_BYTES:].cast("Q")

    def _pages(self) -> Iterator[memoryview]:
        if self._path is not None:
            self._path.touch(mode=0o600)
            for number in range(self._path.stat().st_size // PAGE_BYTES):
                yield self._page(number)

    def _page(self, number: int) -> memoryview:
        """A page of the file, which is made where it is not there: written first, for a disk that is full says so then
        and ends us later.
        """
        assert self._path is not None
        with open(self._path, "r+b") as file:
            if os.fstat(file.fileno()).st_size < (number + 1) * PAGE_BYTES:
                os.pwrite(file.fileno(), bytes(PAGE_BYTES), number * PAGE_BYTES)
            return memoryview(mmap.mmap(file.fileno(), PAGE_BYTES, offset=number * PAGE_BYTES))

    def _give_up(self, error: OSError) -> None:
        log.warning("bytes on the wire are not counted over a restart: %s", error)
        self._path = None
