"""A device's weight in means over all devices: its number of examples when first counted, fixed from then on.

Law: a device's weight never changes, else a mean that is moved on by differences would not be the mean any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Weights:
    """The devices' weights as one round counts them. `known` are the weights of devices of earlier rounds."""

    known: Mapping[str, int]
    new: dict[str, int] = field(default_factory=dict)

    def of(self, device: str, examples: int) -> int:
        """A device's weight: its examples when it was counted first."""
        return self.known.get(device) or self.new.get(device) or examples

    def count(self, device: str, examples: int) -> None:
        self.new.setdefault(device, self.of(device, examples))

    @property
    def before(self) -> int:
        """All devices of earlier rounds; 0 where all begin anew."""
        return sum(self.known.values())

    @property
    def everyone(self) -> int:
        return sum({**self.known, **self.new}.values())
