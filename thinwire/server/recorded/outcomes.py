"""What comes of an ask, and what of one that nothing came of when its run is over.

Every ask has exactly one outcome once its run is over, which is what the last fact about it says:

    UpdateAccepted   its answer counts; or it is dropped after all, where it cannot be folded or its round made no step
    UpdateDropped    its answer does not count
    ClientFailed     it has no answer

An answer is the first that is decided about: what a device sends for the same ask after it is a duplicate, and no fact
of the ask. Nothing follows these facts but in one case. `left` and `stale` say only that nobody waits for the answer
any more: if the device is back while its round is open, a ClientBack says that it is waited for again, and an answer
that comes after all is taken or dropped by the plan's rules, like any other. An ask of which there is no fact when the
run ends, or only a ClientBack, fails with OVER, in one transaction with the end: no kill comes between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.events import (
    OVER,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Event,
    FirstModelAsked,
    FirstModelFailed,
    ModelStored,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateDropped,
)

UNTAKEN = "no answer was taken before the run's end"


@dataclass
class Outcomes:
    """The asks without an outcome, as a fold over the journal."""

    missing: dict[str, tuple[int, str]] = field(default_factory=dict)  # ask_id -> (round, device), in the order asked
    first: FirstModelAsked | None = None  # the ask for a first model of which nothing came yet

    def apply(self, event: Event) -> None:
        match event:
            case RoundOpened():
                self.missing |= {ask_id: (event.round, device) for device, ask_id in event.asks.items()}
            case ClientAsked() | ClientBack():
                self.missing[event.ask_id] = event.round, event.device
            case UpdateAccepted() | UpdateDropped() | ClientFailed():
                self.missing.pop(event.ask_id, None)
            case FirstModelAsked():
                self.first = event
            case FirstModelFailed() | ModelStored():
                self.first = None

    def with_end(self, end: RunStatusChanged, elapsed_s: float) -> list[Event]:
        """The end of the run, behind the outcomes that it gives to asks."""
        facts: list[Event] = [
            ClientFailed(end.at, number, device, ask_id, OVER, UNTAKEN, elapsed_s)
            for ask_id, (number, device) in self.missing.items()
        ]
        if asked := self.first:
            facts.append(FirstModelFailed(end.at, asked.device, asked.ask_id, OVER, UNTAKEN, elapsed_s))
        return [*facts, end]
