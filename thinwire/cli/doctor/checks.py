"""The findings of both doctors, how they are printed, and the checks that both share.

A finding says the subject, the result, and the next step after a failure. Shared checks: a state directory is
private, writable and has room; the compression kernels were built.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.cli import console
from thinwire.core import formatting
from thinwire.core.errors import ThinwireError
from thinwire.core.statedir import disk_error

UNSEEN = "could not be looked at"


@dataclass(frozen=True)
class Finding:
    """Holds a check and its result. `ok` is None if an earlier failure prevented the check; `try_` says what to do."""

    what: str
    ok: bool | None
    said: str
    try_: str = ""

    @property
    def word(self) -> str:
        """Return the result as one word: ok, failed, or "-" for an unchecked item."""
        return {True: "ok", False: "failed", None: "-"}[self.ok]


def found(what: str, look: Callable[[], Finding | str]) -> Finding:
    """Run one check and return its finding; a `ThinwireError` or `OSError` becomes a failed finding.

    A check that returns a string passed, and the string describes what it saw.
    """
    try:
        said = look()
    except ThinwireError as error:
        return Finding(what, False, str(error), error.hint)
    except OSError as error:
        return Finding(what, False, error.strerror or str(error) or type(error).__name__)
    return Finding(what, True, said) if isinstance(said, str) else said


def unseen(what: str, why: str) -> Finding:
    """Return the finding of a check that could not run because of `why`."""
    return Finding(what, None, f"{UNSEEN}: {why}")


def tell(findings: Sequence[Finding], json: bool) -> int:
    """Print all findings and return the exit code: 0 if none failed, else 1."""
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


LEAST_BYTES = 200_000_000  # a model of 25 million parameters down and up: less is full before anybody notices


def room(what: str, folder: Path, least: int = LEAST_BYTES) -> Finding:
    """Check that `folder` has `least` free bytes and that a file can be written there now."""
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
            what, False, f"{formatting.size(free)} free, {formatting.size(least)} are wanted",
            "free some space, or use another disk: --home FOLDER",
        )  # fmt: skip
    return Finding(what, True, f"{formatting.size(free)} free, and it can be written")


def private(what: str, folder: Path) -> Finding:
    """Check that a folder with keys belongs to this user and is closed to all others."""
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


def kernels() -> str:
    """Return the compression backend in use and its thread count, as a sentence.

    A slow backend is no failure, but whoever wonders about speed reads it here. `UsageError` if the environment forces
    a backend that is not available.
    """
    from thinwire.compression import native
    from thinwire.compression.native import NUMPY, VARIABLE, available

    path, count = native.chosen(), native.of_environment()
    said = f"{path}, threads as each plan says"
    if count:
        said = f"{path}, {count} thread{'s' if count > 1 else ''} by {native.THREADS_VARIABLE}"
    if path != NUMPY:
        return said
    if len(available()) > 1:
        return f"{said}: forced by {VARIABLE}"
    return (
        f"{said}: no kernels were built at its installation, or not for this version and processor; the same bytes, "
        "slower; with g++ an installation builds faster ones"
    )
