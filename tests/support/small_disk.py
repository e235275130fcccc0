"""A folder on a disk of its own that is small enough to be filled: `with small_disk(folder) as disk`."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SIZE = "8m"
PIECE = bytes(4096)


def why_not(folder: Path) -> str:
    """Why no disk can be mounted here; empty where one can."""
    if shutil.which("mount") is None:
        return "there is no mount command"
    folder.mkdir(parents=True, exist_ok=True)
    made = _mounted(folder)
    if made.returncode:
        return f"mounting a tmpfs is not allowed here: {made.stderr.strip()}"
    subprocess.run(["umount", str(folder)], check=True)
    return ""


@dataclass(frozen=True)
class Disk:
    folder: Path

    def fill(self) -> None:
        """Until not one more byte fits."""
        with open(self._filler, "ab", buffering=0) as file:
            for piece in (PIECE, PIECE[:1]):
                try:
                    while True:
                        file.write(piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        os.unlink(self._filler)

    @property
    def _filler(self) -> Path:
        return self.folder / ".filler"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A tmpfs mounted at the folder; it goes with the block, as soon as no process is in it."""
    folder.mkdir(mode=0o700, parents=True)
    made = _mounted(folder)
    if made.returncode:
        raise RuntimeError(made.stderr)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _mounted(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "thinwire-test", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
