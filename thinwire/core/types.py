"""The central types: what an aggregator asks, what a device answers, what both of them count by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import BadPayload

PROTOCOL = 1

Vector: TypeAlias = NDArray[np.float32]  # contiguous, 1-D: trained parameters of a segment or a model, or their change
State: TypeAlias = dict[str, NDArray[Any]]  # named arrays that a step carries from call to call
Fixed: TypeAlias = Mapping[str, NDArray[Any]]  # tensors that no training changes and the exported file needs, by name
Payload: TypeAlias = bytes  # what an encoder made: one binary frame (compression/frame.py)
Arrived: TypeAlias = bytes | memoryview  # a payload as it lies in the spool, which need not be read into memory
Metrics: TypeAlias = Mapping[str, tuple[float, float]]  # name -> (sum, count); the value shown is sum / count
AskKind = Literal["describe", "init", "train", "evaluate", "stop"]

DEVICE_NAME = re.compile(r"[a-z0-9-]{1,63}")


@dataclass(frozen=True, order=True)
class UpdateId:
    """The key of exactly-once: the `sequence`-th update that a device made for a run.

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
        run, device, sequence = text.split("/")
        return cls(run, device, int(sequence))


@dataclass(frozen=True)
class Part:
    """One piece of a message's body: `length` bytes with this SHA-256 (hex), sent from byte `offset` on."""

    name: str
    length: int
    sha256: str
    offset: int = 0


@dataclass(frozen=True)
class Verdict:
    """What became of an update: folded (forget it), dropped (give it back), unknown (keep it and send it again).

    `version` is the first model version that contains it, when folded.
    """

    update_id: UpdateId
    outcome: Literal["folded", "dropped", "unknown"]
    version: int = -1


@dataclass(frozen=True)
class Work:
    """How much a device is asked to do; 0 means that the plan decides (`epochs`, `clip_grad`).

    `clip` is the largest L2 norm of a step's gradient in this round.
    """

    steps: int = 0
    batch: int = 32
    clip: float = 0.0


@dataclass(frozen=True)
class Ask:
    """One request to one device. `plan` is the resolved plan, or its digest once the device holds it.

    `parts` are the frames of the downlink, in the order in which they stand in the body: either every segment of
    the full model (`full/SEGMENT`), or the versions' changes after the device's own (`VERSION/SEGMENT`), then
    `buffers`. `base_digest` is the SHA-256 of the model at `base_version` after they are applied.
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
    deadline_s: float = 0.0  # runs on the device from taking the ask up
    parts: tuple[Part, ...] = ()
    vectors: tuple[str, ...] = ()  # names of further shared vectors; none yet: control variates stand behind the model
    verdicts: tuple[Verdict, ...] = ()
    references_from: int = 0  # the round from which what ef21 and algorithms remember counts; older: begin anew
    further: bool = False  # after the device has answered another ask of this round: other draws, nothing to measure
    farewell: bool = False  # a stop for who was away when the run ended: it may know nothing of that run
    protocol: int = PROTOCOL
    identity: str = ""  # of the run: what a device keeps or sends of another run with the same id is not of this one


@dataclass(frozen=True)
class Timings:
    """Seconds that a device spent on one ask, by its own clock."""

    download_s: float = 0.0
    queue_s: float = 0.0
    evaluate_s: float = 0.0
    train_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """What the aggregator saw of one exchange. Wall-clock seconds since 1970; bytes on the device's TCP socket.

    `sent_bytes` and `received_bytes` are the aggregator's: down to and up from the device. None where no wire is.
    """

    pulled_at: float = 0.0  # the ask was handed to the device
    began_at: float = 0.0  # the first byte of the answer
    arrived_at: float = 0.0  # the last byte of the answer is durable
    sent_bytes: int | None = None
    received_bytes: int | None = None
    requests: int = 0


@dataclass(frozen=True)
class ReplyHead:
    """All of an answer but its frames, which follow in `parts` (`frame/SEGMENT` each, then `buffers`).

    `a` is the normaliser that the change was divided by (0 for an evaluation); `norm` the L2 norm of the change;
    `counters` the largest values of integer buffers. `planned` are the steps that were asked for, where partial work
    made fewer; else 0. `transfer` is filled in where the answer arrives. `lost` says that the device began this run
    anew, with a residual of zero, and why: what it knew was missing, older than what it had sent, damaged or unsaved.
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
    identity: str = ""  # of the run, as the ask said it

    @property
    def payload_bytes(self) -> int:
        return sum(part.length for part in self.parts)

    def arrived(self, transfer: Transfer) -> ReplyHead:
        return replace(self, transfer=transfer)


AGGREGATOR_KINDS = ("refused", "stale", "left", "over")  # of a failure: no device says them


@dataclass(frozen=True)
class Failure:
    """Why a device did not answer an ask: a kind of docs/reference/failures.md, and a text that holds no data.

    Kinds: task-error, task-missing, task-mismatch, layout-mismatch, base-mismatch, non-finite, need-plan, declined,
    state-lost, protocol, worker, disk. The aggregator alone says AGGREGATOR_KINDS.
    """

    kind: str
    text: str
    ask_id: str
    device: str = ""
    protocol: int = PROTOCOL
    transfer: Transfer | None = None
    identity: str = ""  # of the run, as the ask said it


def finite(value: float, what: str) -> float:
    """`value`, or BadPayload when it is NaN or infinite: heads come from strangers."""
    if not np.isfinite(value):
        raise BadPayload(f"{what} is {value}", why="a reply's numbers must be finite")
    return float(value)


# The id of an ask says for which run, round and device it is.


FURTHER = "+"


def ask_id_of(run_id: str, number: int, device: str, further: bool = False) -> str:
    """The id of what a device is asked in a round; `further`: while an update of it stood in the round's buffer.

    >>> ask_id_of("digits-3", 12, "pi-01", further=True)
    'digits-3.12+.pi-01'
    """
    return f"{run_id}.{number}{FURTHER if further else ''}.{device}"


def asked_round(ask_id: str) -> int:
    """The round that an ask belonged to stands in its id, RUN.ROUND.DEVICE; 0 where none does.

    >>> asked_round("digits-3.12.pi-01"), asked_round("digits-3.12+.pi-01")
    (12, 12)
    """
    try:
        return int(_named(ask_id).removesuffix(FURTHER))
    except ValueError:
        return 0


def is_further(ask_id: str) -> bool:
    """Whether it was asked for the buffer after its round's, in which an update of its device stood."""
    return _named(ask_id).endswith(FURTHER)


def first_of(ask_id: str) -> str:
    """The id of what the device of a further ask was asked first in the same round, if it was.

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
    """What stands between the run and the device."""
    return ask_id.rsplit(".", 2)[-2] if ask_id.count(".") >= 2 else ""


def measuring_id_of(run_id: str, version: int, device: str) -> str:
    """The id under which a device is asked to measure the last version: no round's."""
    return f"{run_id}.eval{version}.{device}"


# What a device says that it has. What it cannot measure and nobody told it is None: nothing is guessed.


GIB = 2.0**30


@dataclass(frozen=True)
class Equipment:
    """`free_bytes` of memory are those that a task could have: what this client itself uses is counted as free."""

    cores: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    mains: bool | None = None  # False: it runs on a battery
    metered: bool | None = None  # whether its link is paid by volume

    @property
    def sentence(self) -> str:
        """What is known of it, in words.

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
