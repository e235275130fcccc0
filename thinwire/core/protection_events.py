"""The facts of protected rounds that the journal keeps: phases and sums of secure rounds, and what privacy is spent.

Of a device they tell that it was there, in which phase it dropped out, how many bytes its messages had, and when.
Nothing else of a single device is in the journal of a secure or private run. They stand apart from `core/events.py`,
whose events every run has.

A round of a secure run has five phases: `advertise`, `share`, `masked`, `agree` and `unmask`. Each is closed once, by
a `PhaseClosed`, and a round that succeeds has one `SumUnmasked` behind the last.

The cost of a noised release is reserved in the transaction that opens its round, before an assignment leaves, and
stays spent whatever becomes of the round: no event takes it back. It is committed in the transaction that closes the
round, with the digest of the released bytes, so that a resume releases the same bytes and never draws noise again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from thinwire.core.events import Event, ModelStored, RoundClosed, RoundOpened, RoundResumed, RunNoted, RunStatusChanged


@dataclass(frozen=True)
class PhaseClosed(Event):
    """Reports that a phase of a secure round was closed; it is journalled before a request of the next phase leaves.

    - `round`: its number, from 1.
    - `phase`: advertise, share, masked, agree or unmask.
    - `elapsed_s`: seconds since the round began.
    - `received`: maps each device whose message counts to the bytes of the message, in the order of arrival.
    - `dropped`: the devices that dropped out in this phase.
    - `reason`: why the phase `masked` ended: all, enough or deadline; it becomes the round's. "" for other phases.
    - `messages`: the SHA-256 of the file that holds the messages, which a resume reads again. It is "" for the masked
      vectors, which lie in the spool, and for `unmask`, whose messages are never stored.
    """

    round: int
    phase: str
    elapsed_s: float
    received: Mapping[str, int]
    dropped: list[str] = field(default_factory=list)
    reason: str = ""
    messages: str = ""


@dataclass(frozen=True)
class SumUnmasked(Event):
    """Reports that the masks were removed from the sum of a round.

    - `round`: its number, from 1.
    - `survivors`: how many clients' updates are in the sum.
    - `weight`: the sum of their weights.
    - `norm`: the L2 norm of the mean update.
    - `clip`: the largest L2 norm that one update may have in this round; a client scales a larger one down to it.
    - `next_clip`: the same of the next round, which differs if the plan says `clip = "auto"`.
    - `elapsed_s`: seconds since the round began.
    - `unmask_s`: the seconds of them in which the masks were computed and removed.
    """

    round: int
    survivors: int
    weight: int
    norm: float
    clip: float
    next_clip: float
    elapsed_s: float
    unmask_s: float = 0.0


@dataclass(frozen=True)
class PrivacyReserved(Event):
    """Reports that a noised release is spent; it is journalled in the transaction that opens its round.

    - `round`: its number, from 1.
    - `population`: the clients of which each one's data is protected; the ledger is kept by it, not by the run.
    - `release`: the JSON of the release. Its text is compared: one release has one text.
    - `devices`: the names of the selected devices. None of them is removed if it drops out. It is empty if each device
      of the population spends the release, as in a round with Poisson sampling.
    - `elapsed_s`: seconds since the run began.

    A round may reserve several releases. Raise ValueError for a reservation of nobody's data, or of nothing.
    """

    round: int
    population: str
    release: str
    devices: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.population or not self.release:
            raise ValueError(f"a reservation names a population and a release: {self.population!r}, {self.release!r}")


@dataclass(frozen=True)
class PrivacyCommitted(Event):
    """Reports that the release of a round is made; it is journalled in the transaction that closes the round.

    - `round`: its number, from 1.
    - `digest`: the SHA-256 of the released bytes.
    - `next_clip`: the largest L2 norm of one update in the next round; None if it stays as it was.
    """

    round: int
    digest: str
    next_clip: float | None = None


def is_sampled(plan: Mapping[str, Any]) -> bool:
    """Return True if the JSON of a plan has Poisson sampling, of which only the aggregator knows the sample."""
    return bool((plan.get("privacy") or {}).get("sampling_rate"))


SHOWN_OF_SAMPLED: Final[tuple[type[Event], ...]] = (
    RunStatusChanged, RunNoted, ModelStored, RoundResumed, PrivacyReserved, PrivacyCommitted, RoundOpened, RoundClosed,
)  # fmt: skip
"""The kinds of events of which anyone may read something in a run with Poisson sampling."""


def without_sample(event: Event) -> Event | None:
    """Return what anyone may read of an event of a run with Poisson sampling; None if that is nothing.

    The amplified epsilon holds against readers who do not know who was sampled. How many they were tells of it too: in
    a round of k of N clients each one is with probability k / N, and all of them are in a round of N. So a round shows
    neither names nor counts, bytes and times of replies. The journal keeps them, for the aggregator alone.

    Invariant: an event of a kind that is not in `SHOWN_OF_SAMPLED` is not shown.
    """
    match event:
        case RoundOpened():  # built anew, so that a field that is added is not shown before someone lists it
            return RoundOpened(
                event.at, event.round, event.elapsed_s, event.base_version, event.base_digest, [], {}, event.codec,
                event.deadline_s, event.target_updates, event.min_updates, deadline_reason=event.deadline_reason,
            )  # fmt: skip
        case RoundClosed():
            return RoundClosed(
                event.at, event.round, event.reason, event.version, [], [], [], event.elapsed_s, event.seconds, {}
            )
    return event if isinstance(event, SHOWN_OF_SAMPLED) else None
