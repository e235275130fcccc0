"""What a plan requires of a device, held against what the device says that it has."""

from __future__ import annotations

from thinwire.core.equipment import GIB, Equipment
from thinwire.core.sections import Requires
from thinwire.core.texts import counted

SILENT = "it does not say"


def lacking(requires: Requires, has: Equipment) -> str:
    """What keeps a device from being asked, or "" when nothing does. What it does not say, it does not have.

    >>> lacking(Requires(memory_gb=4, mains=True), Equipment(free_bytes=2 * 2**30))
    'lacks 4 GiB of free memory (it has 2.0) and mains power (it does not say)'
    """
    lacks = []
    if requires.cores > (has.cores or 0):
        lacks.append(f"{counted(requires.cores, 'core')} ({SILENT if has.cores is None else f'it has {has.cores}'})")
    if requires.memory_gb:
        if has.free_bytes is None:
            lacks.append(f"{requires.memory_gb:g} GiB of free memory ({SILENT})")
        elif has.free_bytes < requires.memory_gb * GIB:
            lacks.append(f"{requires.memory_gb:g} GiB of free memory (it has {has.free_bytes / GIB:.1f})")
    if requires.mains and not has.mains:
        lacks.append(f"mains power ({SILENT if has.mains is None else 'it runs on a battery'})")
    if requires.unmetered and has.metered is not False:
        lacks.append(f"an unmetered link ({SILENT if has.metered is None else 'its link is metered'})")
    return f"lacks {' and '.join(lacks)}" if lacks else ""
