"""What a doctor found: each thing that has to be right, whether it is, and what to do where it is not."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.cli import console
from thinwire.core.errors import ThinwireError
from thinwire.core.statedir import disk_error

UNSEEN = "could not be looked at"


@dataclass(frozen=True)
class Finding:
    """`ok` None: it could not be looked at, because something before it failed. `try_`: what to do."""

    what: str
    ok: bool | None
    said: str
    try_: str = ""

    @property
    def word(self) -> str:
        return {True: "ok", False: "failed", None: "-"}[self.ok]


def found(what: str, look: Callable[[], Finding | str]) -> Finding:
    """What looking gave; a refusal or the system's own is a finding too."""
    try:
        said = look()
    except ThinwireError as error:
        return Finding(what, False, str(error), error.hint)
    except OSError as error:
        return Finding(what, False, error.strerror or str(error) or type(error).__name__)
    return Finding(what, True, said) if isinstance(said, str) else said


def unseen(what: str, why: str) -> Finding:
    return Finding(what, None, f"{UNSEEN}: {why}")


def tell(findings: Sequence[Finding], json: bool) -> int:
    """All of them, and the exit code: 0 when nothing failed."""
    failed = any(finding.ok is False for finding in findings)
    if json:
        rows = [{name.rstrip("_"): value for name, value in asdict(one).items()} for one in findings]
        console.document({"ok": not failed, "findings": rows})
        return int(failed)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        first, *more = finding.said.splitlines() or [""]
        console.line(f"{finding.word:<6}  {finding.what:<{width}}  {first}")
        for line in more:
            console.line(f"{'':<6}  {'':<{width}}  {line}")
        if finding.try_:
            console.line(f"{'':<6}  {'':<{width}}  try: {finding.try_}")
    if failed:
        print(f"{sum(one.ok is False for one in findings)} of {len(findings)} failed", file=sys.stderr, flush=True)
    return int(failed)


# Whether a state folder can take what will be written: it is ours, closed to others, writable, and has room.


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
            what, False, f"{console.size(free)} free, {console.size(least)} are wanted",
            "free some space, or use another disk: --home FOLDER",
        )  # fmt: skip
    return Finding(what, True, f"{console.size(free)} free, and it can be written")


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


# What a doctor says of the kernels: a slow path is no failure, but whoever wonders sees it here.


def kernels() -> str:
    """The path in use and how many threads; UsageError when the environment forces what cannot be."""
    from thinwire.compression.native import threads
    from thinwire.compression.native.library import NUMPY, VARIABLE, available, chosen

    path, count = chosen(), threads.of_environment()
    said = f"{path}, threads as each plan says"
    if count:
        said = f"{path}, {count} thread{'s' if count > 1 else ''} by {threads.VARIABLE}"
    if path != NUMPY:
        return said
    if len(available()) > 1:
        return f"{said}: forced by {VARIABLE}"
    return f"{said}: {_missing()}; the same bytes, slower; with g++ an installation builds faster ones"


def _missing() -> str:
    """Why there is no path but numpy."""
    from importlib.machinery import EXTENSION_SUFFIXES

    from thinwire.compression import native

    folder = Path(native.__file__).parent
    if any((folder / f"kernels{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return "its kernels are of another version or another processor"
    return "no kernels were built at its installation"
