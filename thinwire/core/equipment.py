"""What a device says that it has. What it cannot measure and nobody told it is None: nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class Equipment:
    """`free_bytes` of memory are those that a task could have: what this client itself uses is counted as free."""

    cores: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    mains: bool | None = None  # False: it runs on a battery
    metered: bool | None = None  # whether its link is paid by volume

    @property
    def sentence(self) -> str:
        """What is known of it, in words.

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
