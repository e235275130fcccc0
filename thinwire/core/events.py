"""The facts of a run. What is journalled is what is shown, and what a resume replays.

Each event is a frozen dataclass of plain JSON values; times are wall-clock seconds since 1970 (shown, never
decided by), `elapsed_s` counts on the run's own clock, which stands still while the aggregator is down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

CloseReason = Literal["all", "enough", "deadline", "too-few", "buffer", "stopped"]
DropReason = Literal["late", "stale", "bad-payload", "too-few", "duplicate", "revoked", "stopped"]
RunStatus = Literal["preparing", "queued", "waiting", "running", "done", "failed", "stopped"]
OVER = "over"  # the kind of a failure that is nobody's: the run ended before an answer was taken


@dataclass(frozen=True)
class Event:
    """Something that happened; `at` is when."""

    at: float


@dataclass(frozen=True)
class RunStatusChanged(Event):
    """The run's status, with one sentence that says why ("waiting: 3 of 8 devices (missing pi-04)")."""

    status: RunStatus
    text: str
    exit_code: int = 0


@dataclass(frozen=True)
class RunNoted(Event):
    """A sentence for whoever follows the run: what its plan comes to here, which may not be what was meant."""

    text: str


@dataclass(frozen=True)
class FirstModelAsked(Event):
    """A device is asked for the first model, before the ask leaves: `why` this one, and why it has so long.

    Until it has failed or the model is stored no other device's is taken.
    """

    device: str
    ask_id: str
    why: str
    deadline_s: float
    deadline_reason: str
    elapsed_s: float

    @property
    def text(self) -> str:
        return _of_first_model(self.device, f"{self.why}; it may take {self.deadline_reason}")


@dataclass(frozen=True)
class FirstModelFailed(Event):
    """A device gave no first model that can be used, and is given up: what comes of it later is not taken.

    `said` is a digest of what the device said of itself then: once it says something else, it may be asked again.
    """

    device: str
    ask_id: str
    kind: str
    reason: str
    elapsed_s: float
    said: str = ""

    @property
    def text(self) -> str:
        return _of_first_model(self.device, f"{self.kind}: {self.reason}")


def _of_first_model(device: str, said: str) -> str:
    return f"{device}, asked for the first model: {said}"


@dataclass(frozen=True)
class ModelStored(Event):
    """A model version is durable in `file`, whose `parts` (name, length, SHA-256) are also what devices are sent.

    `digest` is the SHA-256 over its trained float32 bytes; `counters` are its integer buffers; `state` is the SHA-256
    of the file beside it in which the server optimizer's state stands, "" where there is none.
    """

    version: int
    digest: str
    file: str
    parts: list[tuple[str, int, str]] = field(default_factory=list)
    counters: Mapping[str, int] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True)
class ShadowStored(Event):
    """What devices hold of a version, where the downlink is compressed: the shadow, and the change that leads to it.

    `digest` is the SHA-256 over its float32 bytes; `file` and `parts` are the shadow in full, `change` and
    `change_parts` the file of the encoded change. A version without this event is sent as its `ModelStored` says.
    """

    version: int
    digest: str
    file: str
    parts: list[tuple[str, int, str]]
    change: str
    change_parts: list[tuple[str, int, str]]


@dataclass(frozen=True)
class RoundOpened(Event):
    """Everything that was decided about a round, before any ask of it leaves.

    `codec` is what most are asked in; with a ladder each device has its own in `codecs`, and `standings` say how far it
    is on its way to a milder one (server/policy/codec_ladder.py).
    """

    round: int
    elapsed_s: float
    base_version: int
    base_digest: str
    candidates: list[str]
    asks: dict[str, str]  # device -> ask_id, in the order asked
    codec: str
    deadline_s: float
    target: int
    floor: int
    reasons: dict[str, str] = field(default_factory=dict)  # device not asked -> why
    references_from: int = 0  # the round from which what both ends remember counts: ef21, scaffold, feddyn
    deadline_reason: str = ""
    codecs: dict[str, str] = field(default_factory=dict)  # device -> its own, where the plan has a ladder
    codec_reasons: dict[str, str] = field(default_factory=dict)
    standings: dict[str, tuple[str, int]] = field(default_factory=dict)  # device -> (a milder codec, rounds it fitted)
    later: list[str] = field(default_factory=list)  # drawn too, to be asked as places become free
    drawn: str = ""  # how, where not all had the same odds


@dataclass(frozen=True)
class HeadTaken(Event):
    """Where asks go ahead: this round is the first in the line now, and its deadline runs from here."""

    round: int
    elapsed_s: float


@dataclass(frozen=True)
class ClientAsked(Event):
    """An ask, before it leaves: one of those that RoundOpened decided, or, with all that follows, one decided since.

    Such a one asks for an answer within `deadline_s` from `base_version`, `why` says what made it needed, and
    `instead_of` names the device whose place it takes. `steps` of `batch` examples are its own work, where the plan
    leaves that to the device's speed, and `work_reason` says why so much. `codec` is that of one asked since, where the
    plan has a ladder, and `codec_reason` why.
    """

    round: int
    device: str
    ask_id: str
    payload_bytes: int
    elapsed_s: float = 0.0
    base_version: int = 0
    deadline_s: float = 0.0
    why: str = ""
    instead_of: str = ""
    steps: int = 0
    batch: int = 0
    work_reason: str = ""
    codec: str = ""
    codec_reason: str = ""


@dataclass(frozen=True)
class AskTakenUp(Event):
    """An ask was handed to its device, or the device says that it holds it. It decides nothing."""

    round: int
    device: str
    ask_id: str


@dataclass(frozen=True)
class AskedInFull(Event):
    """A device did not hold what the changes of its ask begin with: it got the same ask again with the whole model."""

    round: int
    device: str
    ask_id: str
    payload_bytes: int


@dataclass(frozen=True)
class UpdateAccepted(Event):
    """An answer counts for this round; the order of these is the order of folding. `head` is its JSON.

    Of its metrics `head` holds those that the run records; `ignored` counts the others.
    """

    round: int
    asked_round: int
    device: str
    ask_id: str
    update_id: str
    staleness: int
    discount: float
    late: bool
    elapsed_s: float
    head: dict[str, Any]
    ignored: int = 0


@dataclass(frozen=True)
class StateLost(Event):
    """A device began the run anew: what it had not sent yet is gone, and this update is the first without it.

    `why` is what the device found of its state: missing, older (than what it had sent), damaged, or unsaved (it was
    killed before it made it durable).
    """

    round: int
    device: str
    update_id: str
    why: str


@dataclass(frozen=True)
class UpdateFolded(Event):
    round: int
    update_id: str
    fold_s: float


@dataclass(frozen=True)
class UpdateDropped(Event):
    """An answer does not count; docs/reference/failures.md says what each reason means."""

    round: int
    asked_round: int
    device: str
    ask_id: str
    update_id: str
    reason: str  # a DropReason, behind which may stand a colon and what was found
    elapsed_s: float
    head: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientFailed(Event):
    """An ask of which no answer comes; of the kind OVER it is no failure of its device.

    `said` is the digest of what the device said of itself, where the failure would come again until it says something
    else ("" in older journals, and where it had not said anything yet).
    """

    round: int
    device: str
    ask_id: str
    kind: str
    text: str
    elapsed_s: float
    said: str = ""


@dataclass(frozen=True)
class ClientBack(Event):
    """A device whose ask had failed since it left is back while the round is open: its answer is waited for again."""

    round: int
    device: str
    ask_id: str
    elapsed_s: float


@dataclass(frozen=True)
class RoundTakenUp(Event):
    """The aggregator goes on with a round that was open when it ended: nobody was there from `gone_at` to `at`. Where
    `core.absence` finds no length in these two, the wall clock was set meanwhile.

    `missed_s`: for how long, all in all, the run's clock stood still since the round began to take answers (0 in older
    journals). `set_by_s`: by how much the wall clock is known to have been set between the two.
    """

    round: int
    gone_at: float
    elapsed_s: float
    missed_s: float = 0.0
    set_by_s: float = 0.0


class Capped(TypedDict, total=False):
    """Why a client counts less than its reply says: its `examples` or its normaliser `a` were over the cap.

    `counted` of its examples count, where the round's updates have a `median` of so many; `a_counted` and `a_median`
    are the same of the normaliser. What was not over its cap is left out.
    """

    examples: int
    counted: int
    median: float
    a: float
    a_counted: float
    a_median: float


CAPPED = "weight capped"


def capped_text(capped: Capped) -> str:
    """What is said of such a client, in one line that begins with CAPPED.

    >>> capped_text({"examples": 5000, "counted": 1000, "median": 100})
    'weight capped: 1000 of its 5000 examples count, 10 times the median of 100'
    """
    said = list[str]()
    if "examples" in capped:
        times, median = capped["counted"] / capped["median"], capped["median"]
        counted = f"{capped['counted']} of its {capped['examples']} examples count"
        said.append(f"{counted}, {times:.4g} times the median of {median:g}")
    if "a" in capped:
        times, median = capped["a_counted"] / capped["a_median"], capped["a_median"]
        said.append(
            f"its normaliser counts as {capped['a_counted']:.4g}, not {capped['a']:.4g}, "
            f"{times:.4g} times the median of {median:.4g}"
        )
    return f"{CAPPED}: {'; '.join(said)}"


@dataclass(frozen=True)
class RoundClosed(Event):
    """A round's end. `version` is the model after it (unchanged after too-few); `spent` says where the time went.

    `seconds` are all that the round took, those without an aggregator too, which `elapsed_s` does not count. `names`
    are the metrics (with their kind) that at least half of the updates carried; `ignored` counts all others that were
    in its updates. `capped`: the updates that count less than their heads say, by update_id.
    """

    round: int
    reason: CloseReason
    version: int
    folded: list[str]  # update_ids in fold order
    dropped: list[str]
    outstanding: list[str]  # devices that had not answered
    elapsed_s: float
    seconds: float
    metrics: dict[str, float]  # of training: what the devices measured while they trained
    spent: dict[str, float] = field(default_factory=dict)
    slowest: str = ""
    capped: dict[str, Capped] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    ignored: int = 0


@dataclass(frozen=True)
class Evaluated(Event):
    """The model that round `round` made, measured on the clients' test splits: pooled, with the clients' spread.

    The last model is asked for by itself; what that took in bytes stands here, and is 0 for all others. `few`: so
    few clients measured it that it is no best and meets no target.

    `best` and `target` go by robust means (server/evaluation.py): `robust` are those that differ from `metrics`,
    `clipped` are the metrics that were clipped, by the update_id of their reply. `units` and `widths` are what was
    learned for the versions to come.
    """

    round: int
    version: int
    metrics: dict[str, float]
    spread: dict[str, list[float]]  # name -> [least, greatest] over clients
    examples: int
    clients: int
    best: bool = False
    few: bool = False
    payload_bytes: int = 0
    models_sent: int = 0  # in those bytes
    sent_bytes: int | None = None
    received_bytes: int | None = None
    robust: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, list[str]] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)  # metric -> what one example of training counts in it
    widths: dict[str, float] = field(default_factory=dict)  # metric -> how far from the median a value counts

    @property
    def decisive(self) -> dict[str, float]:
        """The metrics that `best` and `target` go by."""
        return {**self.metrics, **self.robust}


@dataclass(frozen=True)
class DeviceTold(Event):
    """A device has heard that the run is over: after a restart it is not told again."""

    device: str


@dataclass(frozen=True)
class DeviceJoined(Event):
    device: str


@dataclass(frozen=True)
class DeviceLeft(Event):
    """A device counts as away from now on; it was last heard of at `heard_at` (0: not said, as in older journals)."""

    device: str
    why: str
    heard_at: float = 0.0


@dataclass(frozen=True)
class AggregatorStarted(Event):
    """A new life of the aggregator; the one before it was last known to be alive at `gone_at`, by its own clock, which
    is known to have been set by `set_by_s` since.
    """

    gone_at: float
    set_by_s: float = 0.0


@dataclass(frozen=True)
class BudgetSpent(Event):
    """Privacy spent so far; nothing is spent without a ledger."""

    round: int
    epsilon: float
    delta: float
