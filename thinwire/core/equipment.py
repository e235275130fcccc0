"""This module defines the equipment that a device reports about itself, and compares it with what a plan requires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.core.formatting import counted

if TYPE_CHECKING:
    from thinwire.core.plan_values import Requires

GIB = 2.0**30
SILENT = "it does not say"


@dataclass(frozen=True)
class Equipment:
    """Holds the equipment that a device reports about itself.

    A value is None if the device cannot measure it and its owner did not configure it: nothing is guessed. `free_bytes`
    is the memory that a task could use. Memory that the client itself uses counts as free.
    """

    cores: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    mains: bool | None = None  # False: on battery
    metered: bool | None = None  # True: its link is paid by volume

    @property
    def sentence(self) -> str:
        """Return the known equipment in words.

        >>> Equipment(4, 2**32, 2**31, mains=True).sentence
        '4 cores, 2.0 of 4.0 GiB free, mains'
        """
        told = {True: ("mains", "metered"), False: ("battery", "unmetered")}
        said = ["1 core" if self.cores == 1 else f"{self.cores} cores"] if self.cores is not None else []
        if self.memory_bytes is not None:
            free = f"{self.free_bytes / GIB:.1f} of " if self.free_bytes is not None else ""
            said.append(f"{free}{self.memory_bytes / GIB:.1f} GiB{' free' if free else ''}")
        said += [told[self.mains][0]] if self.mains is not None else []
        said += [told[self.metered][1]] if self.metered is not None else []
        return ", ".join(said)


NOTHING_SAID = Equipment()


def lacking(requires: Requires, has: Equipment) -> str:
    """Return what the plan requires and the device lacks; "" if the device meets all requirements.

    The device lacks whatever it does not report.

    >>> from thinwire.core.plan_values import Requires
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
