"""Parts of the spool that are large are read where they lie; a file that was cut, or cannot be mapped, is read."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from thinwire.store.spool import MIN_MAPPED_BYTES, map_file

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a page is not readable")
BYTES = bytes(range(251)) * (2 * MIN_MAPPED_BYTES // 251 + 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "parts"
    found.write_bytes(BYTES)
    return found


@linux
@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 100_000])
def test_a_part_may_begin_at_any_byte(path: Path, at: int) -> None:
    with path.open("rb") as file:
        view = map_file(file.fileno(), at, MIN_MAPPED_BYTES)
    assert view is not None
    assert view == BYTES[at : at + MIN_MAPPED_BYTES]
    assert view.readonly


@linux
def test_a_view_outlives_its_file(path: Path) -> None:
    with path.open("rb") as file:
        view = map_file(file.fileno(), 7, MIN_MAPPED_BYTES)
    path.unlink()
    assert view is not None
    assert view == BYTES[7 : 7 + MIN_MAPPED_BYTES]


def test_what_is_not_wholly_there_is_not_mapped(path: Path) -> None:
    with path.open("rb") as file:
        assert map_file(file.fileno(), len(BYTES) - MIN_MAPPED_BYTES + 1, MIN_MAPPED_BYTES) is None


def test_a_short_part_is_not_worth_a_mapping(path: Path) -> None:
    with path.open("rb") as file:
        assert map_file(file.fileno(), 0, MIN_MAPPED_BYTES - 1) is None


@linux
def test_pages_that_are_not_readable_are_not_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(14, "Bad address")

    monkeypatch.setattr("thinwire.store.spool.mmap.mmap", Broken)
    with path.open("rb") as file:
        assert map_file(file.fileno(), 0, MIN_MAPPED_BYTES) is None
