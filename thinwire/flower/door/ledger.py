"""Counts that outlive their process: six numbers a device, each device's in a record of its own in a file.

They are written where they changed, when `keep` is called, into the system's memory: a kill loses what was counted
since, a power cut up to half a minute. A backup does not hold them. What does not verify counts as nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME_BYTES = 64
NUMBERS = 6  # sent, received, requests, and what of each was told
MOST = 2**53  # a number is less, or damaged
FIELDS = struct.Struct(f"<{NAME_BYTES}s{NUMBERS}Q")  # and their CRC-32 behind them
RECORD_BYTES = 128  # with zeros to the end: no record lies in two blocks of a disk
HEAD = b"thinwire: bytes on the wire, version 1\n".ljust(RECORD_BYTES, b"\0")  # in the place of the first record

log = logging.getLogger("thinwire.door")


class Ledger:
    """The numbers by name, all 0 at first. They are in memory alone where `path` is None, and from the first error of
    the disk on, which is logged. Belongs to the door's loop.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._numbers, self._written = dict[str, list[int]](), dict[str, list[int]]()
        self._places = dict[str, int]()
        self._free: Iterator[int] = itertools.count(1)
        if path is not None:
            try:
                self._read(path)
            except OSError as error:
                self._give_up(error)

    def of(self, name: str) -> list[int]:
        """The numbers of a device, to be changed in place."""
        return self._numbers.setdefault(name, [0] * NUMBERS)

    def keep(self, name: str | None = None) -> None:
        """Write what has changed since it was written: of this device, or of all."""
        names = self._numbers if name is None else (name,)
        changed = [one for one in names if self._numbers[one] != self._written.get(one)]
        if self._path is None or not changed:
            return
        try:
            with _opened(self._path, os.O_WRONLY) as file:
                for one in changed:
                    self._write(file, one)
        except OSError as error:
            with suppress(OSError):
                self._path.unlink()  # its numbers grow old, and would be told twice
            self._give_up(error)

    def _write(self, file: int, name: str) -> None:
        if len(called := name.encode()) > NAME_BYTES:
            return  # no device's is
        if name not in self._places:
            self._places[name] = next(self._free)
        numbers = self._numbers[name]
        fields = FIELDS.pack(called, *numbers)
        record = fields + zlib.crc32(fields).to_bytes(4, "little")
        _put(file, record.ljust(RECORD_BYTES, b"\0"), self._places[name] * RECORD_BYTES)
        self._written[name] = list(numbers)

    def _read(self, path: Path) -> None:
        try:
            held = path.read_bytes()
        except FileNotFoundError:
            held = b""
        if not HEAD.startswith(held[:RECORD_BYTES]):
            _put_aside(path)
            held = b""
        if len(held) < RECORD_BYTES:
            with _opened(path, os.O_WRONLY | os.O_CREAT) as file:
                _put(file, HEAD, 0)
        free, places = list[int](), max(1, len(held) // RECORD_BYTES)
        for place in range(1, places):
            name, numbers = _verified(held[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
            if name and name not in self._places:
                self._places[name], self._numbers[name], self._written[name] = place, numbers, list(numbers)
            else:
                free.append(place)
        self._free = itertools.chain(free, itertools.count(places))

    def _give_up(self, error: OSError) -> None:
        log.warning("bytes on the wire are not counted over a restart: %s", error)
        self._path = None


def _verified(record: bytes) -> tuple[str, list[int]]:
    """Name and numbers of a record; no name where it is damaged, zeros where they cannot be."""
    fields = record[: FIELDS.size]
    called, *numbers = FIELDS.unpack(fields)
    if record[FIELDS.size : FIELDS.size + 4] != zlib.crc32(fields).to_bytes(4, "little"):
        return "", []
    possible = all(told <= count < MOST for count, told in zip(numbers[:3], numbers[3:], strict=True))
    return called.rstrip(b"\0").decode("utf-8", "replace"), numbers if possible else [0] * NUMBERS


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _put(file: int, record: bytes, at: int) -> None:
    if (length := os.pwrite(file, record, at)) < len(record):
        raise OSError(f"{length} of {len(record)} bytes could be written")


def _put_aside(path: Path) -> None:
    """Keep a file that is not ours, or is of another version, under a name that is free."""
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    log.warning("%s holds no counts of this version: it is kept as %s", path, aside.name)
