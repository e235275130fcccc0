"""What a device keeps of downloads that were cut."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import contextmanager

import pytest

from thinwire.core.errors import NotWritten
from thinwire.core.types import Part
from thinwire.transport.device.transfers import KEPT, Incoming


def parts_of(body: bytes) -> tuple[Part, ...]:
    return (Part("full/0", len(body), hashlib.sha256(body).hexdigest()),)


class Response:
    """The bytes from `start` on, cut after `most`."""

    status = 206

    def __init__(self, body: bytes, start: int, most: int) -> None:
        self._left = body[start : start + most]

    def read1(self, count: int) -> bytes:
        found, self._left = self._left[:count], self._left[count:]
        return found


def fetch(incoming: Incoming, body: bytes, most: int = 1 << 20):
    @contextmanager
    def get(start: int, tag: str):
        yield Response(body, start, most)

    return incoming.fetch(parts_of(body), get)


def test_a_download_that_was_cut_goes_on_where_it_was(tmp_path):
    incoming, body = Incoming(tmp_path), b"a model" * 9
    with pytest.raises(Exception, match="IncompleteRead"):
        fetch(incoming, body, most=10)
    assert incoming.size(parts_of(body)) == 10
    assert fetch(incoming, body).read_bytes() == body


def test_only_the_latest_downloads_that_were_cut_are_kept(tmp_path):
    incoming = Incoming(tmp_path)
    bodies = [bytes([number]) * 50 for number in range(KEPT + 3)]
    for body in bodies:
        with pytest.raises(Exception, match="IncompleteRead"):
            fetch(incoming, body, most=10)
    kept = [incoming.size(parts_of(body)) for body in bodies]
    assert kept == [0, 0] + [10] * (KEPT + 1), "one more than are kept when the next download begins"
    fetch(incoming, b"another model")
    assert sum(path.stat().st_size == 10 for path in tmp_path.iterdir()) == KEPT


def test_an_error_of_the_disk_is_none_of_the_network(tmp_path, monkeypatch):
    incoming, body = Incoming(tmp_path), b"a model" * 9

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(NotWritten, match="cannot write"):
        fetch(incoming, body)


def test_a_clock_that_was_set_back_does_not_end_a_download_each_time(tmp_path):
    """A Pi without a clock begins in the past: files of before its last start look newer than what is fetched now."""
    incoming, body = Incoming(tmp_path), b"a model" * 9
    for number in range(KEPT + 2):
        with pytest.raises(Exception, match="IncompleteRead"):
            fetch(incoming, bytes([number]) * 50, most=10)
    for path in tmp_path.iterdir():
        os.utime(path, (4e9, 4e9))
    for most in (10, 20):
        with pytest.raises(Exception, match="IncompleteRead"):
            fetch(incoming, body, most=most)
    assert incoming.size(parts_of(body)) == 30
