"""Disk space that is held back, so that an aggregator whose disk is full can still record that it is.

`HOME/aggregator/.reserve` is a file of `RESERVE_BYTES`, or of an eighth of what is free on a small disk. It is deleted
for a moment to record something on a full disk, and then allocated again, so that uploads do not take its place. The
file `.disk-full` says that all runs are paused, since when and why: other processes read it. Both are in no backup,
because their names begin with a dot.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from thinwire.core.errors import Refused

RESERVE_BYTES: Final = 64 * 2**20
FREE_BYTES: Final = 256 * 2**20  # that an upload or a new run leaves free, for the journal and models of others
SMALL: Final = 8  # of a small disk the eighth part is held back
SPARE: Final = 2  # the disk has space again once half as much as is held back is free besides
RESERVE, FLAG = ".reserve", ".disk-full"


class Reserve(Protocol):
    """Space that is held back, and what other processes see of a full disk."""

    def fill(self) -> bool:
        """Hold the space back; return False if it is not there."""

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Give the space back while the block records something."""

    def has_space(self) -> bool:
        """Return True if the disk has space again, with the reserve held back."""

    def mark(self, why: str) -> None:
        """Show to other processes that the disk is full."""

    def unmark(self) -> None:
        """Show to other processes that the disk has space."""


@dataclass
class DiskReserve:
    """The reserve in a folder."""

    folder: Path
    size: int = 0  # 0 before the first `fill`

    @property
    def path(self) -> Path:
        """Return the file that takes the space."""
        return self.folder / RESERVE

    def fill(self) -> bool:
        """Hold the space back; return False if it is not there."""
        with contextlib.suppress(OSError):
            self.size = self.size or min(RESERVE_BYTES, shutil.disk_usage(self.folder).free // SMALL)
            if self.path.exists() and self.path.stat().st_size >= self.size:
                return True
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(1, self.size))
                return True
            except OSError:
                self._remove()
            finally:
                os.close(descriptor)
        return False

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the space back while the block records something."""
        self._remove()
        try:
            yield
        finally:
            self.fill()

    def has_space(self) -> bool:
        """Return True if the disk has space again, with the reserve held back."""
        try:
            return self.fill() and shutil.disk_usage(self.folder).free >= self.size // SPARE
        except OSError:
            return False

    def mark(self, why: str) -> None:
        """Show to other processes that the disk is full."""
        with contextlib.suppress(OSError):
            (self.folder / FLAG).write_text(json.dumps({"since": time.time(), "why": why}))

    def unmark(self) -> None:
        """Show to other processes that the disk has space."""
        with contextlib.suppress(OSError):
            (self.folder / FLAG).unlink(missing_ok=True)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def require_space(folder: Path, more: int) -> None:
    """Raise `Refused` unless the folder's disk has space for `more` bytes, and `FREE_BYTES` besides."""
    if shutil.disk_usage(folder).free < more + FREE_BYTES:
        raise Refused("the disk has too little space", f"{more / 1e6:.0f} MB more would fill it", "free some")


def disk_full_text(folder: Path) -> str:
    """Return a sentence that the aggregator of this folder has paused all runs for a full disk; "" if it has not."""
    try:
        said = json.loads((folder / FLAG).read_bytes())
        since, why = time.strftime("%H:%M", time.localtime(float(said["since"]))), str(said["why"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        since, why = "some time", "the disk is full"
    return f"all runs are paused since {since}: {why}; they go on when there is space"
