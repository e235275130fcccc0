"""What devices were asked and have not answered."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Owed:
    """`ahead`: whether a device is asked for the next round before it has answered for this one."""

    ahead: bool = False
    busy: dict[str, tuple[str, int]] = field(default_factory=dict)  # device -> (ask_id, round), the first it owes
    due: dict[str, float] = field(default_factory=dict)  # device -> when its last ask should be answered, elapsed_s
    _queued: dict[str, dict[str, int]] = field(default_factory=dict)  # device -> ask_id -> round: those after the first
    _last: dict[str, tuple[str, float]] = field(default_factory=dict)  # device -> its last ask, and when

    def of(self, device: str) -> dict[str, int]:
        """ask_id -> round of what a device has not answered, in the order asked."""
        if device not in self.busy:
            return {}
        first, number = self.busy[device]
        return {first: number, **self._queued.get(device, {})}

    def asked_at(self, device: str) -> float:
        """When the device was asked last, elapsed_s."""
        return self._last[device][1]

    def had_s(self, device: str) -> float:
        """How long the device was given for its last ask."""
        return self.due[device] - self.asked_at(device)

    def took_s(self, device: str, ask_id: str, elapsed_s: float) -> float | None:
        """How long its last ask took it, answered now; None for another one."""
        last, asked_s = self._last.get(device, ("", 0.0))
        return elapsed_s - asked_s if last == ask_id else None

    def ask(self, number: int, device: str, ask_id: str, elapsed_s: float, deadline_s: float) -> None:
        if self.ahead and device in self.busy:
            self._queued.setdefault(device, {})[ask_id] = number
        else:
            self.busy[device] = ask_id, number
        self._last[device] = ask_id, elapsed_s
        self.due[device] = elapsed_s + deadline_s

    def back(self, number: int, device: str, ask_id: str) -> None:
        """It is waited for again, before what the device was asked since."""
        since = {id_: of for id_, of in self.of(device).items() if id_ != ask_id}
        self.busy[device] = ask_id, number
        if since:
            self._queued[device] = since

    def release(self, device: str, ask_id: str) -> None:
        """Nothing more is waited for from this ask: the device is busy with what it was asked next, if anything."""
        queued = self._queued.get(device, {})
        queued.pop(ask_id, None)
        if self.busy.get(device, ("", 0))[0] == ask_id:
            del self.busy[device]
            if queued:
                following = next(iter(queued))
                self.busy[device] = following, queued.pop(following)
