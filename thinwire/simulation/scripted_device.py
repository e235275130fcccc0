"""A device of a scripted fleet: who it is, what it knows, and what it keeps through its deaths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from thinwire.core.fleet import Delivery
from thinwire.core.plan import digest_of
from thinwire.core.types import Ask, ReplyHead, UpdateId, Verdict
from thinwire.simulation.local import LocalLink
from thinwire.simulation.made_up import Work
from thinwire.simulation.turns import Script, Turn


@dataclass
class Kept:
    """An answer that a device has made, until a verdict on it comes."""

    delivery: Delivery
    turn: Turn
    head: ReplyHead
    body: bytes
    more: list[tuple[ReplyHead, bytes]] = field(default_factory=list)  # what is sent beside it
    pushed: bool = False

    @property
    def ask_id(self) -> str:
        return self.delivery.ask.ask_id

    @property
    def upload_s(self) -> float:
        return self.turn.sending_s(len(self.body))


@dataclass
class ScriptedDevice:
    """A device that does `work` as its `script` says, one ask after the other, and is `away` from and until such times.

    It comes at the first poll, or, where it is away from 0 on, later. What it has made it keeps through a death, as a
    device's outbox does; what it was working on begins anew. `told` is every verdict that it heard. One that `overlaps`
    works on its next ask while it sends; answers leave one after the other.
    """

    name: str
    work: Work
    script: Script = field(default=lambda ask: Turn())
    away: Sequence[tuple[float, float]] = ()
    overlaps: bool = False
    told: dict[UpdateId, Verdict] = field(default_factory=dict)
    outbox: dict[str, Kept] = field(default_factory=dict)  # by ask_id
    plans: set[str] = field(default_factory=set)  # digests of those that it holds
    life: int = 0  # what was scheduled in an earlier one does not happen
    link: LocalLink | None = None  # while it is there
    busy: bool = False
    sent_by: float = 0.0  # when what it is sending has all left
    _taken_up: set[str] = field(default_factory=set)

    def turn(self, ask: Ask) -> Turn:
        """What the script says; what is lost is lost once, since it is there again when the device is."""
        again = ask.ask_id in self._taken_up
        self._taken_up.add(ask.ask_id)
        turn = self.script(ask)
        return replace(turn, lost="") if again else turn

    def hear(self, ask: Ask) -> bool:
        """Verdicts and the plan of an ask; False when the plan is only named and not here."""
        for verdict in ask.verdicts:
            self.told[verdict.update_id] = verdict
        settled = {update_id for update_id, verdict in self.told.items() if verdict.outcome != "unknown"}
        self.outbox = {a: kept for a, kept in self.outbox.items() if kept.head.update_id not in settled}
        if isinstance(ask.plan, str):
            return ask.plan in self.plans
        self.plans.add(digest_of(ask.plan))
        return True
