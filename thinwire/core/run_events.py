"""Events that most runs do not have; `core/events.py` has those of every run.

About a run as a whole: a device makes the first model, more rounds, a deletion, a full disk.

About protected rounds: phases and sums of secure rounds, and what privacy is spent. They name a device, the phase in
which it dropped out, the bytes of its messages, and times. What else the journal of a protected run tells about a
single device is listed in docs/explain/private-outputs.md.

A round of a secure run has five phases: `advertise`, `share`, `masked`, `agree` and `unmask`. Each is closed once, by
a `PhaseClosed`, and a round that succeeds has one `SumUnmasked` behind the last.

The cost of a noised release is reserved in the transaction that opens its round, before an assignment leaves, and
stays spent whatever becomes of the round: no event takes it back. It is committed in the transaction that closes the
round, with the digest of the released bytes, so that a resume releases the same bytes and never draws noise again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from thinwire.core.events import Event, ModelStored, RoundClosed, RoundOpened, RoundResumed, RunNoted, RunStatusChanged
from thinwire.core.formatting import Reason, Reasons
from thinwire.core.records import replace


@dataclass(frozen=True)
class FirstModelAssigned(Event):
    """Reports that a device is selected to make the first model; journalled before its assignment leaves.

    `why` is the reason for this device. Invariant: no other device's first model is accepted until this device has
    failed or its model is stored.
    """

    device: str
    assignment_id: str
    why: Reasons
    deadline_s: float
    deadline_reason: Reasons
    elapsed_s: float

    @property
    def note(self) -> Reasons:
        """Return the event as a note for the operator."""
        by, within = Reason("first-model", {"device": self.device}), Reason("within", {"seconds": self.deadline_s})
        return [by, *self.why, within, *self.deadline_reason]


@dataclass(frozen=True)
class FirstModelFailed(Event):
    """Reports that a device gave no usable first model; a model that it sends later is not accepted.

    `report_digest` is a digest of the device's report about itself: once that changes, the aggregator may select it
    again.
    """

    device: str
    assignment_id: str
    kind: str
    reason: str
    elapsed_s: float
    report_digest: str = ""

    @property
    def note(self) -> Reasons:
        """Return the event as a note for the operator."""
        return [Reason("first-model-failed", {"device": self.device, "kind": self.kind, "text": self.reason})]


@dataclass(frozen=True)
class RunExtended(Event):
    """Reports that a run that was over gets more rounds, so that it is queued again.

    `rounds` is the new total of rounds and `was` the total before; `version` is the model version from which the run
    goes on. `plan` is the resolved plan that holds from now on. `sets` are the keys that the person changed, in TOML's
    notation. `before` has the keys of the old plan whose values differ, as `section.key`.

    `command_id` is the number of the person's command. A command that was carried out and not answered before a crash
    is not carried out again.

    Invariant: the devices begin again with residual 0. `first_round` is the first round whose state on devices counts.
    Devices drop older state when they get an assignment of it, and the aggregator drops updates of earlier rounds.
    """

    rounds: int
    was: int
    version: int
    first_round: int
    plan: Mapping[str, Any]
    sets: Mapping[str, str] = field(default_factory=dict)
    who: str = ""
    command_id: int = 0
    before: Mapping[str, Any] = field(default_factory=dict)

    @property
    def note(self) -> Reasons:
        """Return the event as a note for the operator; `plan_of_start` reads `before` in it."""
        before = {key: value for key, value in self.before.items() if key != "run.rounds"}
        return [
            Reason("extended", {
                "who": self.who or "a person", "was": self.was, "rounds": self.rounds, "first": self.first_round,
                "before": json.dumps(before) if before else SAME,
            }),
        ]  # fmt: skip


SAME: Final = "the same"  # what a note says of a plan of which an extension changed the rounds alone


def plan_of_start(plan: Mapping[str, Any], notes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the plan that a run was started with: its plan of now, without what the extensions in its notes changed.

    >>> plan_of_start({"local": {"lr": 0.1}, "run": {"rounds": 9}}, [[("extended", {"was": 4, "before": SAME})]])
    {'local': {'lr': 0.1}, 'run': {'rounds': 4}}
    """
    found = {name: dict(table) if isinstance(table, Mapping) else table for name, table in plan.items()}
    for numbers in (numbers for note in reversed(notes) for code, numbers in note if code == "extended"):
        before = {} if numbers["before"] == SAME else json.loads(str(numbers["before"]))
        for key, value in {"run.rounds": numbers["was"], **before}.items():
            section, _, name = key.partition(".")
            found[section][name] = value
    return found


@dataclass(frozen=True)
class RunDeleted(Event):
    """Reports that a run was deleted: its models, rounds and events; its row and its ledger entries stay.

    `who` is the person, or `keep_days` if the setting of that name did it.

    The event belongs to no run, so it outlives the run's own events. Its number in the journal is above theirs: no
    number is given twice.
    """

    run_id: str
    who: str


@dataclass(frozen=True)
class DiskFilled(Event):
    """Reports that the aggregator paused all runs, because its disk takes no writes; `why` is what the disk said."""

    why: str


@dataclass(frozen=True)
class DiskFreed(Event):
    """Reports that the disk has space again, so that all runs go on after `seconds`."""

    seconds: float


@dataclass(frozen=True)
class DeletionPostponed(Event):
    """Reports that the aggregator deletes nothing by age for an hour, because its clock is `ahead_s` further than the
    last time that it believed: the clock may be wrong.
    """

    ahead_s: float


@dataclass(frozen=True)
class ClockBelieved(Event):
    """Reports that the aggregator took `at` as the right time when it looked for what is too old; the journal has the
    latest one only.
    """


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


FIGURES_OF_SAMPLE: Final = (
    "aggregated_count", "late", "dropped", "failed", "payload_up", "payload_down", "wire_up", "wire_down", "dense_up",
    "dense_down",
)  # fmt: skip
"""The figures of a run and of its rounds that are None, and not 0, in a run with Poisson sampling."""

SHOWN_OF_SAMPLED: Final[tuple[type[Event], ...]] = (
    RunStatusChanged, RunNoted, RunExtended, ModelStored, RoundResumed, PrivacyReserved, PrivacyCommitted, RoundOpened,
    RoundClosed,
)  # fmt: skip
"""The kinds of events of which anyone may read something in a run with Poisson sampling."""


def without_sample(event: Event) -> Event | None:
    """Return what anyone may read of an event of a run with Poisson sampling; None if that is nothing.

    The amplified epsilon holds against readers who do not know who was sampled. How many they were tells of it too: in
    a round of k of N clients each one is with probability k / N, and all of them are in a round of N. So a round shows
    neither names nor counts, bytes and times of replies, and its own times in whole seconds: what follows its end takes
    longer for more replies. The journal keeps them, for the aggregator alone.

    Invariant: an event of a kind that is not in `SHOWN_OF_SAMPLED` is not shown.
    """
    match event:
        case RoundOpened():  # built anew, so that a field that is added is not shown before someone lists it
            return RoundOpened(
                round(event.at), event.round, round(event.elapsed_s), event.base_version, event.base_digest, [], {},
                event.codec, event.deadline_s, event.target_updates, event.min_updates,
                deadline_reason=event.deadline_reason,
            )  # fmt: skip
        case RoundClosed():
            return RoundClosed(
                round(event.at), event.round, event.reason, event.version, [], [], [], round(event.elapsed_s),
                round(event.seconds), {},
            )  # fmt: skip
    return replace(event, at=round(event.at)) if isinstance(event, SHOWN_OF_SAMPLED) else None
