"""These types are shared by aggregator and client: assignments, replies, failures, update ids and equipment.

`Ask` is the assignment, `ReplyHeader` the reply's header, `Verdict` the outcome of an update. An assignment's id has
the form `RUN.ROUND.DEVICE`; `ask_id_of` makes it and the functions beside it read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import BadPayload

PROTOCOL = 1

Vector: TypeAlias = NDArray[np.float32]  # contiguous, 1-D: trained parameters of a segment or a model, or an update
State: TypeAlias = dict[str, NDArray[Any]]  # named arrays that a codec keeps between calls
Fixed: TypeAlias = Mapping[str, NDArray[Any]]  # tensors by name that training never changes, for the exported file
Payload: TypeAlias = bytes  # one encoded frame (compression/frame.py)
Arrived: TypeAlias = bytes | memoryview  # a payload; a view of the spool's file is not read into memory
Metrics: TypeAlias = Mapping[str, tuple[float, float]]  # name -> (sum, count); sum / count is shown
AskKind = Literal["describe", "init", "train", "evaluate", "stop"]

DEVICE_NAME = re.compile(r"[a-z0-9-]{1,63}")


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
class Verdict:
    """Holds the aggregator's decision about an update: folded, dropped or unknown.

    The client forgets a folded update, puts a dropped one back into its residual, and keeps an unknown one to send it
    again. `version` is the first model version that contains a folded update.
    """

    update_id: UpdateId
    outcome: Literal["folded", "dropped", "unknown"]
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
class Ask:
    """Holds one assignment: a request to one client to describe its task, make a first model, train, evaluate or stop.

    `plan` is the resolved plan, or only its digest once the client has the plan.

    `parts` are the frames of the downlink in the order of the body. They are either every segment of the full model
    (`full/SEGMENT`), or the encoded differences of the versions that follow the client's own (`VERSION/SEGMENT`).
    `buffers` come last. `base_digest` is the SHA-256 of the model at `base_version`, after the client has applied the
    parts.
    """

    ask_id: str
    run: str
    task: str
    kind: AskKind
    plan: Mapping[str, Any] | str
    round: int = 0
    base_version: int = 0
    base_digest: str = ""
    layout_digest: str = ""
    codec: str = "identity"
    work: Work = field(default_factory=Work)
    deadline_s: float = 0.0  # seconds from the moment when the client received the assignment
    parts: tuple[Part, ...] = ()
    vectors: tuple[str, ...] = ()  # names of more shared vectors; none yet: control variates follow the model
    verdicts: tuple[Verdict, ...] = ()
    references_from: int = 0  # first round whose state of ef21 or the algorithm counts; older state is reset
    further: bool = False  # follow-up: other random draws, no evaluation
    farewell: bool = False  # a stop for a client that was offline at the run's end and may not know the run
    protocol: int = PROTOCOL
    identity: str = ""  # of the run: separates it from an earlier run with the same id


@dataclass(frozen=True)
class Timings:
    """Holds the seconds that a client spent on each stage of one assignment, by its own clock."""

    download_s: float = 0.0
    queue_s: float = 0.0
    evaluate_s: float = 0.0
    train_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """Holds what the aggregator measured of one exchange: wall-clock seconds since 1970, and bytes on the client's TCP
    socket.

    `sent_bytes` and `received_bytes` are counted at the aggregator: sent to and received from the client. Both are None
    in a simulation, which has no connection.
    """

    pulled_at: float = 0.0  # the client received the assignment
    began_at: float = 0.0  # the first byte of the reply arrived
    arrived_at: float = 0.0  # the last byte of the reply is durable
    sent_bytes: int | None = None
    received_bytes: int | None = None
    requests: int = 0


@dataclass(frozen=True)
class ReplyHeader:
    """Holds the header of a reply: everything but the frames, which follow as `parts` (`frame/SEGMENT` each, then
    `buffers`).

    `a` is the normaliser that the update was divided by (0 for an evaluation). `norm` is the update's L2 norm.
    `counters` are the largest values of integer buffers. `planned` is the number of requested steps if partial work
    made fewer, else 0. `transfer` is filled in by the aggregator.

    `lost` is set if the client started this run again with a residual of zero. It holds the reason: the client's state
    was missing, older than the updates that it had sent, damaged or unsaved.
    """

    ask_id: str
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

    @property
    def payload_bytes(self) -> int:
        """Return the length of all parts together, in bytes."""
        return sum(part.length for part in self.parts)

    def arrived(self, transfer: Transfer) -> ReplyHeader:
        """Return the header with the aggregator's measurements of the exchange."""
        return replace(self, transfer=transfer)


AGGREGATOR_KINDS = ("refused", "stale", "left", "over")  # kinds of failures that only the aggregator reports


@dataclass(frozen=True)
class Failure:
    """Holds the reason why a client did not carry out an assignment: a kind of docs/reference/failures.md, and a text.

    Invariant: the text holds no data of the device. Kinds: task-error, task-missing, task-mismatch, layout-mismatch,
    base-mismatch, non-finite, need-plan, declined, state-lost, protocol, worker, disk. Only the aggregator uses the
    kinds in `AGGREGATOR_KINDS`.
    """

    kind: str
    text: str
    ask_id: str
    device: str = ""
    protocol: int = PROTOCOL
    transfer: Transfer | None = None
    identity: str = ""  # of the run, copied from the assignment


def finite(value: float, what: str) -> float:
    """Return `value`; raise BadPayload if it is NaN or infinite, because a reply's numbers come from a device."""
    if not np.isfinite(value):
        raise BadPayload(f"{what} is {value}", why="a reply's numbers must be finite")
    return float(value)


FURTHER = "+"


def ask_id_of(run_id: str, number: int, device: str, further: bool = False) -> str:
    """Return the id of the assignment of a device in a round; `further` marks the follow-up of a buffered round.

    A follow-up is a device's second assignment in the same round: the round's buffer already holds an update of the
    device.

    >>> ask_id_of("digits-3", 12, "pi-01", further=True)
    'digits-3.12+.pi-01'
    """
    return f"{run_id}.{number}{FURTHER if further else ''}.{device}"


def asked_round(ask_id: str) -> int:
    """Return the round of an assignment's id, RUN.ROUND.DEVICE; 0 if the id names no round.

    >>> asked_round("digits-3.12.pi-01"), asked_round("digits-3.12+.pi-01")
    (12, 12)
    """
    try:
        return int(_named(ask_id).removesuffix(FURTHER))
    except ValueError:
        return 0


def is_further(ask_id: str) -> bool:
    """Return True if the assignment is a follow-up: its device already has an update in the round's buffer."""
    return _named(ask_id).endswith(FURTHER)


def first_of(ask_id: str) -> str:
    """Return the id of the first assignment that the device of a follow-up can have had in the same round.

    >>> first_of("digits-3.12+.pi-01")
    'digits-3.12.pi-01'
    """
    run_id, _, device = ask_id.rsplit(".", 2)
    return ask_id_of(run_id, asked_round(ask_id), device)


def within_run(ask_id: str) -> str:
    """Return an id without the name of its run, for draws that must not depend on that name.

    >>> within_run("digits-3.12+.pi-01")
    '12+.pi-01'
    """
    return ".".join(ask_id.rsplit(".", 2)[-2:])


def _named(ask_id: str) -> str:
    """Return the part of the id between the run and the device; "" if there is none."""
    return ask_id.rsplit(".", 2)[-2] if ask_id.count(".") >= 2 else ""


def measuring_id_of(run_id: str, version: int, device: str) -> str:
    """Return the id of the assignment that evaluates the last model version; it belongs to no round."""
    return f"{run_id}.eval{version}.{device}"


GIB = 2.0**30


@dataclass(frozen=True)
class Equipment:
    """Holds the equipment that a device reports about itself.

    A value is None if the device cannot measure it and its owner did not configure it: nothing is guessed. `free_bytes`
    is the memory that a task could use. Memory that the client itself uses counts as free.
    """

    cores: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    mains: bool | None = None  # False: on battery
    metered: bool | None = None  # True: its link is paid by volume

    @property
    def sentence(self) -> str:
        """Return the known equipment in words.

        >>> Equipment(4, 2**32, 2**31, mains=True).sentence
        '4 cores, 2.0 of 4.0 GiB free, mains'
        """
        told = {True: ("mains", "metered"), False: ("battery", "unmetered")}
        said = ["1 core" if self.cores == 1 else f"{self.cores} cores"] if self.cores is not None else []
        if self.memory_bytes is not None:
            free = f"{self.free_bytes / GIB:.1f} of " if self.free_bytes is not None else ""
            said.append(f"{free}{self.memory_bytes / GIB:.1f} GiB{' free' if free else ''}")
        said += [told[self.mains][0]] if self.mains is not None else []
        said += [told[self.metered][1]] if self.metered is not None else []
        return ", ".join(said)


NOTHING_SAID = Equipment()
