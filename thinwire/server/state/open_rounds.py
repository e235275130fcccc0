"""The rounds that are open, as the journal says: the head, whose answers are folded, and those that wait behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.events import (
    ClientAsked,
    ClientBack,
    ClientFailed,
    HeadTaken,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
    UpdateDropped,
)

Since = ClientAsked | UpdateAccepted | UpdateDropped | ClientFailed | ClientBack


@dataclass
class OpenNow:
    """What came of the head so far."""

    since: list[Since] = field(default_factory=list)  # all that was decided after its opening, in the journal's order
    accepted: list[UpdateAccepted] = field(default_factory=list)  # of that: in fold order
    folded: set[str] = field(default_factory=set)  # of their update_ids
    slowest_s: float = 0.0  # of the answers in time
    missed_s: float = 0.0  # of the round's time, what the run's clock did not count: without an aggregator, and before


@dataclass
class Line:
    """One round at a time, or with `goes_ahead` several: they close in the order in which they opened."""

    goes_ahead: bool = False
    head: RoundOpened | None = None
    head_since_s: float = 0.0  # since when its time runs, elapsed_s
    head_taken: int = 0  # the last round whose answers were taken
    now: OpenNow = field(default_factory=OpenNow)
    ahead: list[RoundOpened] = field(default_factory=list)  # opened after it, in order: they wait to be the head
    lost_ahead: dict[int, list[Since]] = field(default_factory=dict)  # of those: who will not answer

    @property
    def rounds(self) -> list[RoundOpened]:
        """All that are open, the head first."""
        return [self.head, *self.ahead] if self.head else []

    @property
    def taken(self) -> bool:
        """Whether the answers to the head are taken: it may have to wait for devices first."""
        return self.head is not None and (not self.goes_ahead or self.head.round == self.head_taken)

    def of(self, number: int) -> RoundOpened | None:
        """The round of this number, if it is open."""
        return next((opened for opened in self.rounds if opened.round == number), None)

    def open(self, event: RoundOpened) -> None:
        if self.head is None:
            self.head, self.head_since_s = event, event.elapsed_s
        else:
            self.ahead.append(event)

    def take(self, event: HeadTaken) -> None:
        self.head_taken, self.head_since_s = event.round, event.elapsed_s

    def accept(self, event: UpdateAccepted) -> None:
        self.now.accepted.append(event)
        self.now.since.append(event)
        self.head_taken = event.round  # in a journal of before HeadTaken, this says it

    def lose(self, event: ClientFailed, number: int) -> None:
        """What failed was asked in this round; of one that is closed nothing follows here."""
        if self.head and number == self.head.round:
            self.now.since.append(event)
        elif self.of(number):
            self.lost_ahead.setdefault(number, []).append(event)

    def close(self, event: RoundClosed) -> None:
        """The next one is the head."""
        self.head, self.now = None, OpenNow()
        if self.ahead:
            self.head, self.head_since_s = self.ahead.pop(0), event.elapsed_s
            self.now.since = self.lost_ahead.pop(self.head.round, [])
