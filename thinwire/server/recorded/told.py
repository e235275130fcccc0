"""What devices are told of their updates: a verdict on each, again and again until it is old."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from thinwire.core.types import UpdateId, Verdict


@dataclass
class Told:
    """The last `kept` verdicts on each device's updates, oldest first. Being told one twice does no harm."""

    kept: int
    _verdicts: dict[str, deque[Verdict]] = field(default_factory=dict)
    _count: Counter[str] = field(default_factory=Counter)  # device -> verdicts on it so far
    _when_asked: dict[str, int] = field(default_factory=dict)  # ask_id -> how many there were then

    def dropped(self, update_id: str) -> None:
        self._tell(Verdict(UpdateId.parse(update_id), "dropped"))

    def folded(self, update_id: str, version: int) -> None:
        self._tell(Verdict(UpdateId.parse(update_id), "folded", version))

    def asked(self, device: str, ask_id: str) -> None:
        self._when_asked[ask_id] = self._count[device]

    def forget(self, ask_id: str) -> None:
        """Nobody will send this ask again."""
        self._when_asked.pop(ask_id, None)

    def of(self, device: str, most: int, ask_id: str = "") -> tuple[Verdict, ...]:
        """The device's last `most` verdicts. Those that there were when it was asked `ask_id`, where one is named: an
        ask that is sent again says the same.
        """
        since = self._count[device] - self._when_asked[ask_id] if ask_id in self._when_asked else 0
        told = list(self._verdicts.get(device, ()))
        return tuple(told[: len(told) - since][-most:])

    def _tell(self, verdict: Verdict) -> None:
        device = verdict.update_id.device
        self._count[device] += 1
        self._verdicts.setdefault(device, deque(maxlen=self.kept)).append(verdict)
