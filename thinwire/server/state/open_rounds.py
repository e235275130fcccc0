"""Holds the open rounds of a run, rebuilt from the journal: the current round, and the pipelined rounds that wait for
it.

Only the current round aggregates updates.
"""

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
class RoundProgress:
    """Holds everything that has happened in the current round so far."""

    since: list[Since] = field(default_factory=list)  # all decisions since its opening, in the journal's order
    accepted: list[UpdateAccepted] = field(default_factory=list)  # the accepted updates, in the order of aggregation
    folded: set[str] = field(default_factory=set)  # ids of the updates that were aggregated
    slowest_s: float = 0.0  # duration of the slowest reply in time
    missed_s: float = 0.0  # of its time, not on the run's clock: from the last event until a restart


@dataclass
class OpenRounds:
    """Holds the open rounds, which close in the order in which they opened.

    Without `goes_ahead`, at most one round is open. With it, rounds are pipelined: further rounds open before the
    current one closes.
    """

    goes_ahead: bool = False
    head: RoundOpened | None = None  # the current round
    head_since_s: float = 0.0  # when its deadline began to run, elapsed_s
    head_taken: int = 0  # the last round that accepted replies
    now: RoundProgress = field(default_factory=RoundProgress)
    ahead: list[RoundOpened] = field(default_factory=list)  # pipelined rounds, in the order of opening
    lost_ahead: dict[int, list[Since]] = field(default_factory=dict)  # pipelined round -> its failed assignments

    @property
    def rounds(self) -> list[RoundOpened]:
        """Return all open rounds, the current one first."""
        return [self.head, *self.ahead] if self.head else []

    @property
    def taken(self) -> bool:
        """Return True if the current round accepts replies. A pipelined round may have to wait for devices before it
        does.
        """
        return self.head is not None and (not self.goes_ahead or self.head.round == self.head_taken)

    def of(self, number: int) -> RoundOpened | None:
        """Return the open round of this number; None if no such round is open."""
        return next((opened for opened in self.rounds if opened.round == number), None)

    def open(self, event: RoundOpened) -> None:
        """Add a round that has opened: as the current one if there is none, else after the rounds that wait."""
        if self.head is None:
            self.head, self.head_since_s = event, event.elapsed_s
        else:
            self.ahead.append(event)

    def take(self, event: HeadTaken) -> None:
        """Record that the current round accepts replies from now on; its deadline begins to run."""
        self.head_taken, self.head_since_s = event.round, event.elapsed_s

    def accept(self, event: UpdateAccepted) -> None:
        """Record an update that the current round has accepted."""
        self.now.accepted.append(event)
        self.now.since.append(event)
        self.head_taken = event.round  # journals from before HeadTaken say it only here

    def lose(self, event: ClientFailed, number: int) -> None:
        """Record a failed assignment of round `number`; it is ignored if that round is closed."""
        if self.head and number == self.head.round:
            self.now.since.append(event)
        elif self.of(number):
            self.lost_ahead.setdefault(number, []).append(event)

    def close(self, event: RoundClosed) -> None:
        """Close the current round, so that the next pipelined round becomes the current one."""
        self.head, self.now = None, RoundProgress()
        if self.ahead:
            self.head, self.head_since_s = self.ahead.pop(0), event.elapsed_s
            self.now.since = self.lost_ahead.pop(self.head.round, [])
