"""Whether a state folder can take what will be written: it is ours, closed to others, writable, and has room."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from thinwire.cli import say
from thinwire.cli.doctor.findings import Finding
from thinwire.core.home import disk_error

LEAST_BYTES = 200_000_000  # a model of 25 million parameters down and up: less is full before anybody looks again


def room(what: str, folder: Path, least: int = LEAST_BYTES) -> Finding:
    """Free space, and whether a file can be written there at this moment."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        refusal = disk_error(error, folder)
        return Finding(what, False, str(refusal), refusal.hint)
    free = shutil.disk_usage(folder).free
    if free < least:
        return Finding(
            what, False, f"{say.size(free)} free, {say.size(least)} are wanted",
            "free some space, or use another disk: --home FOLDER",
        )  # fmt: skip
    return Finding(what, True, f"{say.size(free)} free, and it can be written")


def private(what: str, folder: Path) -> Finding:
    """A folder with keys in it is its owner's alone."""
    if not folder.is_dir():
        return Finding(
            what, False, f"{folder} is not there", "nothing was started here; or name another: --home FOLDER"
        )
    found = folder.stat()
    if found.st_uid != os.geteuid():
        return Finding(what, False, f"{folder} belongs to another user", "run as its owner")
    if found.st_mode & 0o077:
        return Finding(what, False, f"other users can look into {folder}", f"chmod 700 {folder}")
    return Finding(what, True, f"{folder}, for its owner alone")
