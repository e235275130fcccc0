"""This module defines the equipment that a device reports about itself: cores, memory, power and link."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


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
