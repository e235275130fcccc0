"""One round as a state machine without I/O: what happened goes in, what to do comes out.

It sees heads, never payloads. A head that arrived before the deadline is in time however late its fold ends; a
round closes when all heads that it accepted are folded or refused, for one reason, which everybody who looks at
the round is shown. While fewer answers can still come than it wants, since devices were lost or sent what could not
be folded, or were not asked because no more than `max_concurrency` may be at work at once, others are asked, as long
as there is time for them. The table of states is short:

    open      answers are accepted until `target` of them are here, nobody is outstanding, the deadline passes,
              or a person stops the run
    shut      nothing more is accepted (what comes is deferred to the next round); folds are still running; open
              again when one of them fails in time and another device can be asked
    closed    the reason is fixed
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import islice

from thinwire.core.events import CloseReason
from thinwire.core.types import UpdateId
from thinwire.server.policy.deadlines import listed
from thinwire.server.round_events import (
    Action,
    Asked,
    AskNow,
    AtWork,
    Back,
    Closed,
    Defer,
    Drop,
    Failed,
    Folded,
    FoldUpdate,
    Head,
    Input,
    Joined,
    Left,
    Lose,
    Refused,
    Spare,
    Spares,
    Stop,
    Terms,
    Told,
    ended,
    nobody,
)
from thinwire.server.state.run_state import Past


@dataclass
class Round:
    """See the module. What happens goes in by `on`, what had happened before a restart by `replay`; nothing more
    goes in after `Closed` came out.

    >>> r = Round(Terms(1, 0, {"a": "ask-a"}, target=1, floor=1, opened_s=0, deadline_s=60))
    >>> r.on(Head(UpdateId("run", "a", 1), "ask-a", "a", 0), now=2.0)[0].discount
    1.0
    >>> r.on(Folded(UpdateId("run", "a", 1)), now=2.1)[0].reason
    'all'
    """

    terms: Terms
    asks: dict[str, str] = field(default_factory=dict)  # device -> ask_id: those of the opening, then the others
    instead: dict[str, str] = field(default_factory=dict)  # asked in the middle of the round -> in whose place
    folding: set[UpdateId] = field(default_factory=set)
    folded: list[UpdateId] = field(default_factory=list)
    folded_in_time: int = 0
    dropped: list[UpdateId] = field(default_factory=list)
    answered: dict[str, UpdateId] = field(default_factory=dict)  # ask_id -> the update that answered it
    in_time: set[UpdateId] = field(default_factory=set)  # answers to this round's own asks
    spoiled: list[UpdateId] = field(default_factory=list)  # those of them that could not be folded
    lost: dict[str, str] = field(default_factory=dict)  # device -> kind
    waited_for: set[str] = field(default_factory=set)  # devices asked that have neither answered nor been lost
    shut: CloseReason | None = None
    closed: Closed | None = None

    def __post_init__(self) -> None:
        self.places = Places(self.terms)
        for device, ask_id in self.terms.asks.items():
            self._begin(device, ask_id, self.terms.opened_s)

    @property
    def deadline_at(self) -> float:
        return self.terms.opened_s + self.terms.deadline_s

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Who is waited for, in the order asked."""
        return tuple(device for device in self.asks if device in self.waited_for)

    @property
    def good(self) -> int:
        """Answers in time that are here and good so far."""
        return len(self.in_time) - len(self.spoiled)

    @property
    def possible(self) -> int:
        """Those, and answers that may still come."""
        return self.good + len(self.waited_for)

    def on(self, event: Input, now: float, spares: Spares = nobody) -> list[Action]:
        """Take one event in; `now` is on the run's clock, in seconds. `spares` is asked only where answers lack."""
        if self.closed:
            raise RuntimeError(f"round {self.terms.number} is closed: {event}")
        actions = self._take(event, now)
        if not self.shut and (self.lost or self.spoiled or self.terms.max_concurrency):
            actions += self._fill(now, spares)
        self.shut = self.shut or self._shutting(now)
        if self.shut and not self.folding:
            actions.append(self._close())
        return actions

    def replay(self, told: Told) -> None:
        """Take in what happened before a restart: all that followed from it is told too, but whether the round is over
        for that.
        """
        now = -math.inf
        for event, now in told:
            self._take(event, now)
        if now > -math.inf:
            self.shut = self._shutting(now)
        if self.shut and not self.folding:
            self._close()

    def _take(self, event: Input, now: float) -> list[Action]:
        match event:
            case Asked(device, ask_id, instead_of):
                self.instead[device] = instead_of
                self._begin(device, ask_id, now)
            case Head():
                return self._head(event, now)
            case Folded(update_id):
                self.folding.discard(update_id)
                self.folded.append(update_id)
                self.folded_in_time += update_id in self.in_time
            case Refused(update_id, reason):
                self.folding.discard(update_id)
                if update_id in self.in_time:
                    self.spoiled.append(update_id)
                if self.shut != "stopped" and now < self.deadline_at:
                    self.shut = None  # there is time to ask another one
                return self._drop(update_id, reason)
            case Failed(device, ask_id, kind, text):
                return self._lose(device, ask_id, kind, text)
            case Left(device, why):
                self.places.free(device)
                return self._lose(device, self.asks.get(device, ""), "left", why)
            case Joined(device):
                if self.lost.get(device) == "left" and not self.shut:
                    del self.lost[device]  # it is back in time
                    self._begin(device, self.asks[device], now)
                    return [Back(device, self.asks[device])]
            case Stop():
                self.shut = self.shut or "stopped"
        return []  # a Tick says only that time has passed

    def _head(self, head: Head, now: float) -> list[Action]:
        terms = self.terms
        self.places.free(head.device, head.ask_id)
        if not head.again and (self.shut or now >= self.deadline_at):
            return [Defer(head.update_id)]
        if head.ask_id in self.answered:
            return self._drop(head.update_id, "duplicate")
        in_time = self.asks.get(head.device) == head.ask_id
        staleness = max(0, terms.base_version - head.base_version)
        if not in_time and terms.late == "drop":
            return self._drop(head.update_id, "late")
        if staleness > terms.max_staleness:
            return self._drop(head.update_id, "stale")
        self.answered[head.ask_id] = head.update_id
        self.folding.add(head.update_id)
        if in_time:
            self.lost.pop(head.device, None)
            self.in_time.add(head.update_id)
            self.waited_for.discard(head.device)
        discount = (1.0 + staleness) ** -terms.staleness_exponent
        return [FoldUpdate(head.update_id, staleness, discount, late=not in_time)]

    def _drop(self, update_id: UpdateId, reason: str) -> list[Action]:
        self.dropped.append(update_id)
        return [Drop(update_id, reason)]

    def _lose(self, device: str, ask_id: str, kind: str, text: str) -> list[Action]:
        self.places.free(device, ask_id)
        if self.asks.get(device) != ask_id or ask_id in self.answered or device in self.lost:
            return []
        self.lost[device] = kind
        self.waited_for.discard(device)
        return [Lose(device, ask_id, kind, text)]

    def _begin(self, device: str, ask_id: str, now: float) -> None:
        """It works on this ask from now on."""
        self.asks[device] = ask_id
        self.waited_for.add(device)
        self.places.take(device, ask_id, now)

    def _places(self, now: float) -> tuple[int, str]:
        """(how many are free, what an ask's reason says of them): one, if none is, where nobody works on this round."""
        lacking = self.terms.floor - self.good
        held = self.places.held(now, lacking)
        silent = self.places.silent(self.asks, held)
        said = f"; silent for so long that they hold no place: {listed(silent)}" if silent else ""
        free = self.terms.max_concurrency - len(held)
        if free > 0 or any(self.asks.get(device) == work.ask_id for device, work in held.items()):
            return free, said
        return 1, said + "; no place is free, but nobody is at work on this round"

    def _fill(self, now: float, spares: Spares) -> list[Action]:
        """Ask as many others as answers are missing and places are free, of those that can answer in time."""
        left_s, short, said = self.deadline_at - now, self.terms.target - self.possible, ""
        if short > 0 and self.terms.max_concurrency:
            free, said = self._places(now)
            short = min(short, free)
        if short <= 0 or left_s <= 0:
            return []
        others = (spare for spare in spares(left_s) if spare.device not in self.asks)
        return [self._ask(spare, now, said) for spare in islice(others, short)]

    def _ask(self, spare: Spare, now: float, said: str) -> AskNow:
        left_s = self.deadline_at - now
        why = f"{self.possible} of {self.terms.target} answers could still come, {left_s:.0f} s were left{said}"
        self.instead[spare.device] = instead_of = self._vacant() if self.lost or self.spoiled else ""
        self._begin(spare.device, spare.ask_id, now)
        return AskNow(spare.device, spare.ask_id, self.terms.base_version, left_s, why, instead_of)

    def _vacant(self) -> str:
        """A device that was lost or sent what could not be folded, and in whose place nobody was asked yet."""
        replaced, spoiled = set(self.instead.values()), (update_id.device for update_id in self.spoiled)
        return next((device for device in (*self.lost, *spoiled) if device not in replaced), "")

    def _shutting(self, now: float) -> CloseReason | None:
        """The reason for which no more answers are accepted, or None while the round stays open."""
        if not self.waited_for:
            unasked = self.terms.max_concurrency and self.possible < self.terms.target
            return "enough" if self.lost or unasked else "all"
        if self.folded_in_time >= self.terms.target:
            return "enough"
        if now >= self.deadline_at:
            return "deadline"
        return None

    def _close(self) -> Closed:
        assert self.shut is not None
        self.closed = ended(self.shut, self.folded, self.dropped, self.terms.floor, self.outstanding)
        return self.closed


# For how long a device holds one of the places that `max_concurrency` leaves in rounds.
#
# Until it has answered or is lost; but one that is frozen says nothing, and those who wait for its place are to be
# asked in time. So no longer than its group's share of the round's deadline, or than twice its slowest answer of late
# where that is more, and in no case longer than the deadline: who is known to be slow keeps its place, but one that
# once took hours, since it slept, keeps none for hours. From its share on it keeps none in the time that the fewest
# answers which make a step still need, at a share each: else one frozen device would cost the round.
#
# Once its round is closed, such a device holds a place of the next ones until twice its slowest answer's time has
# passed since it was asked, and at most once more as long as it was given for its answer; one that is not known holds
# none.


PATIENCE = 2.0  # times a device's slowest answer of late, and times what it was given for its last ask


def share_s(deadline_s: float, target: int, most: int) -> float:
    """Seconds of one group, in a round that wants `target` answers of which `most` are made at once.

    >>> share_s(100.0, target=7, most=2)
    25.0
    """
    return deadline_s / max(1, math.ceil(target / most))


def place_s(deadline_s: float, share_s: float, slowest_s: float) -> float:
    """Seconds from its ask on, for a device whose slowest answer of late took so long.

    >>> [place_s(100.0, share_s=25.0, slowest_s=seconds) for seconds in (0.0, 20.0, 28_800.0)]
    [25.0, 40.0, 100.0]
    """
    return min(deadline_s, max(share_s, PATIENCE * slowest_s))


@dataclass
class Places:
    """Who has a place in one round; nobody where the plan leaves as many as are wanted."""

    terms: Terms
    _working: dict[str, AtWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._working |= self.terms.earlier

    @property
    def _share_s(self) -> float:
        return share_s(self.terms.deadline_s, self.terms.target, self.terms.max_concurrency)

    def take(self, device: str, ask_id: str, now: float) -> None:
        """It has been asked."""
        if self.terms.max_concurrency:
            until_s = now + place_s(self.terms.deadline_s, self._share_s, self.terms.slowest_s(device))
            self._working[device] = AtWork(ask_id, until_s, now + self._share_s)

    def free(self, device: str, ask_id: str = "") -> None:
        """It works on this no more; on nothing, where no ask is named."""
        if device in self._working and ask_id in ("", self._working[device].ask_id):
            del self._working[device]

    def silent(self, asks: Mapping[str, str], held: Container[str]) -> list[str]:
        """Who works on one of these asks, and has none of the places that are `held`."""
        working = self._working.items()
        return [device for device, work in working if device not in held and asks.get(device) == work.ask_id]

    def held(self, now: float, lacking: int) -> dict[str, AtWork]:
        """Who has one; `lacking`: answers without which the round makes no step, and of which those may come that were
        asked no longer than a share ago.
        """
        left_s = self.terms.opened_s + self.terms.deadline_s - now
        lacking -= sum(now < work.yields_s < math.inf for work in self._working.values())
        scarce = lacking > 0 and left_s <= self._share_s * math.ceil(lacking / self.terms.max_concurrency)
        return {
            device: work
            for device, work in self._working.items()
            if now < (min(work.until_s, work.yields_s) if scarce else work.until_s)
        }


def slowest_s(past: Past, device: str) -> float:
    """The slowest of a device's last answers; 0 where it has given none."""
    return max(past.took.get(device, ()), default=0.0)


def at_work_before(past: Past, number: int) -> Mapping[str, AtWork]:
    """Who is busy with a round before this one, and until when it holds a place."""
    return {
        device: AtWork(
            ask_id,
            past.owed.asked_at(device) + PATIENCE * min(slowest_s(past, device), past.owed.had_s(device)),
        )
        for device, (ask_id, asked) in past.owed.busy.items()
        if asked != number
    }
