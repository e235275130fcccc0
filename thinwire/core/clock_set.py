"""Whether somebody set the wall clock while nobody was there, by a clock of this machine that nobody can set.

The kernel counts seconds since its start, sleep included. That count beside the wall clock's stays as it is until the
wall clock is set; with the next start of the machine it begins anew, and nothing can be said.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.core.absence import SLACK_S
from thinwire.core.errors import ThinwireError
from thinwire.core.home import write_atomically

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Beside:
    """The wall clock less the kernel's, in seconds, and of which start of the machine that is."""

    boot_id: str
    ahead_s: float

    def set_by_s(self, before: Beside | None) -> float:
        """By how much the wall clock was set since `before`, as far as that can be told; 0: by nothing that counts.

        >>> now = Beside("a", 100.0)
        >>> now.set_by_s(Beside("a", 40.0)), now.set_by_s(Beside("a", 99.9)), now.set_by_s(Beside("b", 40.0))
        (60.0, 0.0, 0.0)
        """
        if before is None or before.boot_id != self.boot_id:
            return 0.0
        by = self.ahead_s - before.ahead_s
        return by if abs(by) > SLACK_S else 0.0


def beside() -> Beside | None:
    """Now; None on a system that does not tell."""
    try:
        return Beside(BOOT_ID.read_text().strip(), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, AttributeError):  # CLOCK_BOOTTIME is Linux's
        return None


def kept(file: Path) -> Beside | None:
    """What was written there last; None where that is nothing, or cannot be read."""
    try:
        found = json.loads(file.read_bytes())
        said = Beside(str(found["boot_id"]), float(found["ahead_s"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return said if math.isfinite(said.ahead_s) else None


def keep(file: Path, before: Beside | None) -> Beside | None:
    """Write it there if it is another than `before`, and give what is there. Where a disk takes no more nothing is
    there: what was written for an earlier setting would count that one again.
    """
    now = beside()
    if now is None or (before is not None and now.boot_id == before.boot_id and not now.set_by_s(before)):
        return before
    try:
        write_atomically(file, json.dumps(asdict(now)).encode())
    except ThinwireError:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        return None
    return now


def set_since_s(file: Path) -> float:
    """By how much the wall clock was set since that was written last, as far as that can be told."""
    now = beside()
    return now.set_by_s(kept(file)) if now else 0.0
