"""These types are shared by aggregator and client: assignments, replies, failures and update ids.

`Assignment` is the assignment, `ReplyHeader` the reply's header, `UpdateOutcome` the outcome of an update. An
assignment's id has the form `RUN.ROUND.DEVICE`; `assignment_id_of` makes it and the functions beside it read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from thinwire.core.errors import BadPayload, ThinwireError, UsageError
from thinwire.core.records import replace
from thinwire.core.score_histogram import Histograms

PROTOCOL = 1

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector: TypeAlias = NDArray[np.float32]  # contiguous, 1-D: trained parameters of a segment or a model, or an update
    State: TypeAlias = dict[str, NDArray[Any]]  # named arrays that a codec keeps between calls
    Fixed: TypeAlias = Mapping[str, NDArray[Any]]  # tensors by name that training never changes, for the exported file
else:

    def __getattr__(name):
        """Return a type of arrays; numpy is imported with the first one, and by no command that reads the store."""
        if name not in ("Vector", "State", "Fixed"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy as np
        from numpy.typing import NDArray

        arrays = NDArray[Any]
        made = {"Vector": NDArray[np.float32], "State": dict[str, arrays], "Fixed": Mapping[str, arrays]}
        return globals().setdefault(name, made[name])


Payload: TypeAlias = bytes  # one encoded frame (compression/frame.py)
Arrived: TypeAlias = bytes | memoryview  # a payload; a view of the spool's file is not read into memory
Metrics: TypeAlias = Mapping[str, tuple[float, float]]  # name -> (sum, count); sum / count is shown
AssignmentKind = Literal["describe", "init", "train", "evaluate", "secure", "stop"]
Phase = Literal["advertise", "share", "masked", "agree", "unmask"]  # of a round with secure aggregation, in order
PHASES: tuple[Phase, ...] = ("advertise", "share", "masked", "agree", "unmask")

DEVICE_NAME = re.compile(r"[a-z0-9-]{1,63}")


def require_device_name(name: str, hint: str = "--name ward-3", error: type[ThinwireError] = UsageError) -> str:
    """Return a device's name; raise `error` if it is not valid."""
    if not DEVICE_NAME.fullmatch(name):
        raise error(f"{name[:80]!r} is no name for a device", why="a name has 1 to 63 of a-z, 0-9 and -", hint=hint)
    return name


@dataclass(frozen=True, order=True)
class UpdateId:
    """Identifies the `sequence`-th update that a device made for a run.

    Invariant: an update id is aggregated at most once.

    >>> UpdateId.parse("digits-1/pi-03/7").sequence
    7
    """

    run: str
    device: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.run}/{self.device}/{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> UpdateId:
        """Read the id from the text `RUN/DEVICE/SEQUENCE`; raise ValueError for any other text."""
        run, device, sequence = text.split("/")
        return cls(run, device, int(sequence))


@dataclass(frozen=True)
class Part:
    """Describes one piece of a message's body: `length` bytes with this SHA-256 (hex), sent from byte `offset` on."""

    name: str
    length: int
    sha256: str
    offset: int = 0


@dataclass(frozen=True)
class UpdateOutcome:
    """Holds the aggregator's decision about an update: aggregated, dropped or unknown.

    The client forgets an aggregated update and keeps an unknown one to send it again. With error feedback and without
    masks it adds a dropped one to its residual again. `version` is the first model version that contains an aggregated
    update.
    """

    update_id: UpdateId
    outcome: Literal["aggregated", "dropped", "unknown"]
    version: int = -1


@dataclass(frozen=True)
class Work:
    """Holds how much a client should train in one assignment; 0 means that the plan decides (`epochs`, `clip_grad`).

    `clip` is the largest L2 norm of a step's gradient in this round.
    """

    steps: int = 0
    batch: int = 32
    clip: float = 0.0


@dataclass(frozen=True)
class SecureWork:
    """Holds what an aggregator tells all clients of a secure round alike."""

    selected: int = 0  # clients in the round
    window: int = 0  # of the support
    clip: float = 1.0  # largest L2 norm of an update


@dataclass(frozen=True)
class Assignment:
    """Holds one assignment: a request to one client to describe its task, make a first model, train, evaluate or stop.

    An assignment of kind `secure` is the request of a later phase of a secure round; its part `request` has the bytes.

    `plan` is the resolved plan, or only its digest once the client has the plan.

    `parts` are the frames of the downlink in the order of the body. They are either every segment of the full model
    (`full/SEGMENT`), or the encoded differences of the versions that follow the client's own (`VERSION/SEGMENT`).
    `buffers` come last. `base_digest` is the SHA-256 of the model at `base_version`, after the client has applied the
    parts.
    """

    assignment_id: str
    run: str
    task: str
    kind: AssignmentKind
    plan: Mapping[str, Any] | str
    round: int = 0
    base_version: int = 0
    base_digest: str = ""
    layout_digest: str = ""
    codec: str = "identity"
    work: Work = field(default_factory=Work)
    deadline_s: float = 0.0  # seconds from the moment when the client received the assignment
    parts: tuple[Part, ...] = ()
    outcomes: tuple[UpdateOutcome, ...] = ()
    references_from: int = 0  # first round whose state of ef21 or the algorithm counts; older state is reset
    is_follow_up: bool = False  # second assignment in a buffered round: other random draws, no evaluation
    protocol: int = PROTOCOL
    identity: str = ""  # of the run: separates it from an earlier run with the same id
    secure: SecureWork | None = None  # of a training assignment whose update is sent under masks
    evaluates: bool = True  # False: another share of the round's clients evaluates the model


@dataclass(frozen=True)
class Timings:
    """Holds the seconds that a client spent on each stage of one assignment, by its own clock.

    `load_s` is the time until evaluation or training begins: admission, reading the state and the model, starting the
    worker, sending vectors to it, and making data and model there. `commit_s` is the time until the reply is durable.
    """

    download_s: float = 0.0
    queue_s: float = 0.0
    evaluate_s: float = 0.0
    train_s: float = 0.0
    encode_s: float = 0.0
    load_s: float = 0.0
    commit_s: float = field(default=0.0, compare=False)  # only the first transmission of a reply knows it


@dataclass(frozen=True)
class Transfer:
    """Holds what the aggregator measured of one exchange: wall-clock seconds since 1970, bytes on the client's socket.

    `sent_bytes` and `received_bytes` are counted at the aggregator: sent to and received from the client. Both are None
    in a simulation, which has no connection.
    """

    pulled_at: float = 0.0  # the client received the assignment; 0 if that is not known, as of a masked update
    began_at: float = 0.0  # the first byte of the reply arrived
    arrived_at: float = 0.0  # the last byte of the reply is durable
    sent_bytes: int | None = None
    received_bytes: int | None = None
    requests: int = 0


@dataclass(frozen=True)
class ReplyHeader:
    """Holds the header of a reply: everything but the frames, which follow as `parts` (`frame/SEGMENT` each, then
    `buffers`).

    `a` is the normaliser that the update was divided by (0 for an evaluation). `norm` is the L2 norm of the update
    before that. `residual_norm` is that of the residual after encoding, in units of the divided update; it is 0 without
    classic error feedback, also with EF21, which keeps a reference and no residual.
    `counters` are the largest values of integer buffers. `planned` is the number of requested steps if partial work
    made fewer, else 0. `transfer` is filled in by the aggregator.

    `lost` is set if the client started this run again with a residual of zero. It holds the reason: the client's state
    was missing, older than its updates, damaged or unsaved; or its personal layers alone were of another shape.
    """

    assignment_id: str
    update_id: UpdateId
    base_version: int
    examples: int
    steps: int = 0
    a: float = 0.0
    norm: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    parts: tuple[Part, ...] = ()
    codec: str = "identity"
    counters: Mapping[str, int] = field(default_factory=dict)
    residual_norm: float = 0.0
    protocol: int = PROTOCOL
    transfer: Transfer | None = None
    planned: int = 0
    lost: str = ""
    identity: str = ""  # of the run, copied from the assignment
    histograms: Histograms = field(default_factory=dict)  # of scores, for whole-set metrics (score_histogram.py)

    @property
    def payload_bytes(self) -> int:
        """Return the length of all parts together, in bytes."""
        return sum(part.length for part in self.parts)

    def arrived(self, transfer: Transfer) -> ReplyHeader:
        """Return the header with the aggregator's measurements of the exchange."""
        return replace(self, transfer=transfer)


@dataclass(frozen=True)
class PhaseReply:
    """Holds a client's message in one phase of a secure round, in base64. It tells nothing else of the client."""

    assignment_id: str
    message: str
    device: str = ""
    protocol: int = PROTOCOL
    identity: str = ""  # of the run, copied from the assignment


AGGREGATOR_KINDS = ("refused", "stale", "offline", "over")  # kinds of failures that only the aggregator reports


@dataclass(frozen=True)
class Failure:
    """Holds the reason why a client did not carry out an assignment: a kind of docs/reference/failures.md, and a text.

    Invariant: the text holds no data of the device. Kinds: task-error, task-missing, task-mismatch, layout-mismatch,
    base-mismatch, non-finite, need-plan, declined, state-lost, protocol, worker, disk, failed. Only the aggregator uses
    the kinds in `AGGREGATOR_KINDS`. In a secure round, `failed` replaces each kind that tells something of the device.
    """

    kind: str
    text: str
    assignment_id: str
    device: str = ""
    protocol: int = PROTOCOL
    transfer: Transfer | None = None
    identity: str = ""  # of the run, copied from the assignment


Reply: TypeAlias = ReplyHeader | Failure | PhaseReply


def finite(value: float, what: str) -> float:
    """Return `value`; raise BadPayload if it is NaN or infinite, because a reply's numbers come from a device."""
    if not math.isfinite(value):
        raise BadPayload(f"{what} is {value}", why="a reply's numbers must be finite")
    return float(value)


FOLLOW_UP, PHASE = "+", "~"


def assignment_id_of(run_id: str, number: int, device: str, follow_up: bool = False) -> str:
    """Return the id of the assignment of a device in a round; `follow_up` marks the follow-up of a buffered round.

    A follow-up is a device's second assignment in the same round: the round's buffer already holds an update of the
    device.

    >>> assignment_id_of("digits-3", 12, "pi-01", follow_up=True)
    'digits-3.12+.pi-01'
    """
    return f"{run_id}.{number}{FOLLOW_UP if follow_up else ''}.{device}"


def assignment_round(assignment_id: str) -> int:
    """Return the round of an assignment's id, RUN.ROUND.DEVICE; 0 if the id names no round.

    >>> assignment_round("digits-3.12.pi-01"), assignment_round("digits-3.12+.pi-01")
    (12, 12)
    """
    try:
        return int(_named(assignment_id).partition(PHASE)[0].removesuffix(FOLLOW_UP))
    except ValueError:
        return 0


def is_follow_up(assignment_id: str) -> bool:
    """Return True if the assignment is a follow-up: its device already has an update in the round's buffer."""
    return _named(assignment_id).endswith(FOLLOW_UP)


def first_of(assignment_id: str) -> str:
    """Return the id of the first assignment that the device of a follow-up can have had in the same round.

    >>> first_of("digits-3.12+.pi-01")
    'digits-3.12.pi-01'
    """
    run_id, _, device = assignment_id.rsplit(".", 2)
    return assignment_id_of(run_id, assignment_round(assignment_id), device)


def phase_id(assignment_id: str, phase: str) -> str:
    """Return the id of the assignment of a later phase of a secure round, from that of the training assignment.

    >>> phase_id("digits-3.12.pi-01", "share")
    'digits-3.12~share.pi-01'
    """
    run_id, number, device = assignment_id.rsplit(".", 2)
    return f"{run_id}.{number}{PHASE}{phase}.{device}"


def training_id(assignment_id: str) -> str:
    """Return the id of the training assignment to which a phase belongs; another id is returned as it is.

    >>> training_id("digits-3.12~share.pi-01"), training_id("digits-3.12.pi-01")
    ('digits-3.12.pi-01', 'digits-3.12.pi-01')
    """
    if not (phase := phase_of(assignment_id)):
        return assignment_id
    run_id, number, device = assignment_id.rsplit(".", 2)
    return f"{run_id}.{number.removesuffix(PHASE + phase)}.{device}"


def phase_of(assignment_id: str) -> str:
    """Return the phase of a secure round that the assignment belongs to; "" for the training assignment and others."""
    return _named(assignment_id).partition(PHASE)[2]


def within_run(assignment_id: str) -> str:
    """Return an id without the name of its run, for draws that must not depend on that name.

    >>> within_run("digits-3.12+.pi-01")
    '12+.pi-01'
    """
    return ".".join(assignment_id.rsplit(".", 2)[-2:])


def _named(assignment_id: str) -> str:
    """Return the part of the id between the run and the device; "" if there is none."""
    return assignment_id.rsplit(".", 2)[-2] if assignment_id.count(".") >= 2 else ""


def evaluation_id_of(run_id: str, version: int, device: str) -> str:
    """Return the id of the assignment that evaluates the last model version; it belongs to no round."""
    return f"{run_id}.eval{version}.{device}"
