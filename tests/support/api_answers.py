"""A run on eight devices told to a store event by event, or round by round, as an aggregator would record it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.reasons import noted
from thinwire.core.events import (
    ClientFailed,
    ClientSelected,
    CloseReason,
    DropReason,
    Evaluated,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.fleet import TaskReport
from thinwire.core.formatting import Reasons
from thinwire.core.layout import Layout
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Part, ReplyHeader, Timings, Transfer, UpdateId
from thinwire.store import Store

LAYOUT = Layout.of({"0.weight": (128, 64), "0.bias": (128,), "2.weight": (10, 128), "2.bias": (10,)})
REPORT = TaskReport("digits", "1", "9f" * 32, LAYOUT.digest, ("identity", "topk", "int8"))
DEVICES = [f"pi-{n:02d}" for n in range(1, 9)]
DENSE = LAYOUT.size * 4


@dataclass
class Told:
    """One run being told to the store; `now` is its wall clock."""

    store: Store
    run_id: str
    now: float
    rounds: int
    devices: list[str]
    wire: bool = True
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    elapsed: float = 0.0
    version: int = 0
    sequence: dict[str, int] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    opened_at: float = 0.0
    openings: dict[int, float] = field(default_factory=dict)
    round: int = 0
    assigned_after: dict[str, float] = field(default_factory=dict)  # assignment_id -> seconds into its round
    aggregated: list[str] = field(default_factory=list)
    answered: dict[str, ReplyHeader] = field(default_factory=dict)
    held: list[Event] | None = None

    def say(self, *events: Event) -> None:
        if self.held is None:
            self.store.record(self.run_id, list(events))
        else:
            self.held += events

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is told in this block is recorded at its end in one transaction, as rows of the same order."""
        self.held = []
        yield
        events, self.held = self.held, None
        self.say(*events)

    def status(self, status: str, text: str, exit_code: int = 0) -> None:
        self.say(RunStatusChanged(self.now, status, text, exit_code))  # type: ignore[arg-type]  # tests pass words

    def begin(self) -> None:
        self.status("queued", "queued")
        self.say(ModelStored(self.now, 0, "a1" * 32, "v000000.model", [("full/0", DENSE, "00" * 32)]))

    def open(self, deadline_s: float = 60.0, without: dict[str, str] | None = None, **decided: Any) -> None:
        """A round opens and everybody but `without` is selected; `decided`: further fields of `RoundOpened`."""
        self.round += 1
        self.opened_at = self.openings[self.round] = self.now
        self.aggregated, self.answered = [], {}
        without = without or {}
        assigned = [device for device in self.devices if device not in without]
        self.assignments = {device: f"{self.run_id}.{self.round}.{device}" for device in assigned}
        self.say(
            RunStatusChanged(self.now, "running", f"round {self.round} of {self.rounds}"),
            RoundOpened(
                self.now, self.round, self.elapsed, self.version, f"{self.version:064x}", assigned, self.assignments,
                "topk(0.01) > int8 > zstd", deadline_s, decided.pop("target_updates", len(assigned)),
                math.ceil(len(assigned) / 2),
                {device: noted(why) for device, why in without.items()}, **decided,
            ),
            *(ClientSelected(self.now, self.round, device, assignment_id, DENSE) for device,
                assignment_id in self.assignments.items()),
        )  # fmt: skip

    def assign(self, device: str, after_s: float, why: Reasons, **decided: Any) -> None:
        """A device is selected in the middle of the round."""
        assignment_id = self.assignments[device] = f"{self.run_id}.{self.round}.{device}"
        self.assigned_after[assignment_id] = after_s
        self.say(ClientSelected(self.opened_at + after_s, self.round, device, assignment_id, DENSE, why=why, **decided))

    def header(self, device: str, seconds: float, round_number: int | None = None) -> ReplyHeader:
        """The answer of a device that took `seconds` from being selected to its last byte."""
        number = round_number or self.round
        assigned_at = self.openings[number] + self.assigned_after.get(f"{self.run_id}.{number}.{device}", 0.0)
        self.sequence[device] = self.sequence.get(device, 0) + 1
        shares = {"download_s": 0.07, "queue_s": 0.02, "evaluate_s": 0.1, "train_s": 0.62, "encode_s": 0.05}
        times = {name: share * seconds * self.draw.uniform(0.85, 1.1) for name, share in shares.items()}
        began = assigned_at + seconds * 0.93
        size = 230 + self.draw.randrange(30)
        sent, received = (DENSE + 2100, size + 1650) if self.wire else (None, None)
        quality = 1 - 0.85 * math.exp(-number / 3.5)
        n = 24
        return ReplyHeader(
            f"{self.run_id}.{number}.{device}", UpdateId(self.run_id, device, self.sequence[device]),
            max(0, self.version if number == self.round else self.version - 1),
            examples=144 + 9 * self.devices.index(device), steps=50, a=50.0, norm=self.draw.uniform(0.8, 1.6),
            metrics={
                "eval/accuracy": (n * min(1.0, quality * self.draw.uniform(0.95, 1.04)), n),
                "eval/loss": (n * (0.1 + 2.2 * (1 - quality) * self.draw.uniform(0.9, 1.1)), n),
                "train/loss": (n * (0.08 + 2.1 * (1 - quality)), n),
            },
            timings=Timings(**times), parts=(Part("frame/0", size, "00" * 32),), codec="topk(0.01) > int8 > zstd",
            residual_norm=self.draw.uniform(0.4, 0.9) / 50.0,
            transfer=Transfer(assigned_at + seconds * 0.03, began, assigned_at + seconds, sent, received,
                2 * self.wire),
        )  # fmt: skip

    def answer(self, device: str, seconds: float) -> None:
        """In time: accepted and aggregated."""
        self.fold(self.arrive(device, seconds), late=False, staleness=0)

    def arrive(self, device: str, seconds: float) -> ReplyHeader:
        header = self.answered[device] = self.header(device, seconds)
        return header

    def late(self, device: str, from_round: int, seconds: float) -> None:
        """An answer to an earlier round's assignment is aggregated into the open one."""
        self.fold(self.header(device, seconds, from_round), late=True, staleness=self.round - from_round)

    def accept(self, device: str, seconds: float) -> None:
        """In time: recorded as accepted; that it is aggregated is written with what comes next."""
        self._accept(self.arrive(device, seconds), False, 0)

    def fold(self, header: ReplyHeader, late: bool, staleness: int) -> None:
        assert header.transfer is not None
        self._accept(header, late, staleness)
        self.say(UpdateAggregated(header.transfer.arrived_at, self.round, str(header.update_id), 0.002))
        self.aggregated.append(str(header.update_id))

    def _accept(self, header: ReplyHeader, late: bool, staleness: int) -> None:
        assert header.transfer is not None
        at, assignment_round = header.transfer.arrived_at, int(header.assignment_id.split(".")[1])
        self.say(
            UpdateAccepted(
                at, self.round, assignment_round, header.update_id.device, header.assignment_id,
                str(header.update_id), staleness,
                (1 + staleness) ** -0.5, late, self.elapsed + at - self.opened_at, reply_to_json(header),
            )
        )  # fmt: skip

    def drop(self, device: str, seconds: float, reason: DropReason) -> None:
        header = self.header(device, seconds)
        at = self.opened_at + seconds
        event = UpdateDropped(
            at, self.round, self.round, device, header.assignment_id, str(header.update_id), reason, at
        )
        self.say(event.__class__(**{**event.__dict__, "header": reply_to_json(header)}))

    def fail(self, device: str, seconds: float, kind: str, text: str) -> None:
        self.say(
            ClientFailed(
                self.opened_at + seconds, self.round, device, self.assignments[device], kind, text, self.elapsed
            )
        )

    def close(self, reason: CloseReason, seconds: float, outstanding: list[str] | None = None) -> None:
        """The round ends, and its predecessor's model has been measured in it."""
        self.now, self.elapsed = self.opened_at + seconds, self.elapsed + seconds
        events: list[Event] = []
        if self.answered:
            events.append(self.measured(self.round - 1))
        if reason not in ("too-few", "stopped"):
            self.version += 1
            events.append(ModelStored(self.now, self.version, f"{self.version:064x}", f"v{self.version:06d}.model"))
        last = max(self.answered.values(), key=lambda h: h.transfer.arrived_at if h.transfer else 0, default=None)
        spent, slowest = {"aggregate_s": 0.01, "step_s": 0.004, "store_s": 0.02}, ""
        if last is not None and last.transfer is not None:
            slowest = last.update_id.device
            spent |= {"wait_s": last.transfer.pulled_at - self.opened_at, **last.timings.__dict__}
            spent |= {"upload_s": last.transfer.arrived_at - last.transfer.began_at}
        kept = [] if reason in ("too-few", "stopped") else self.aggregated
        dropped = self.aggregated if reason in ("too-few", "stopped") else []
        loss = 0.08 + 2.1 * 0.85 * math.exp(-self.round / 3.5)
        events.append(
            RoundClosed(
                self.now, self.round, reason, self.version, kept, dropped, outstanding or [], self.elapsed, seconds,
                {"loss": loss}, spent, slowest,
            )
        )  # fmt: skip
        self.say(*events)
        self.now += 0.03

    def measured(self, made_by: int) -> Evaluated:
        quality = 0.97 - 0.87 * math.exp(-made_by / 2.6) + 0.006 * math.sin(made_by * 2.1)
        loss = 0.12 + 2.18 * math.exp(-made_by / 3.0)
        spread = {"accuracy": [quality - 0.09, min(1.0, quality + 0.05)], "loss": [loss * 0.7, loss * 1.35]}
        metrics = {"accuracy": quality, "loss": loss}
        return Evaluated(self.now, made_by, self.version, metrics, spread, 360, len(self.devices), best=True)

    def quiet_round(self, seconds: float = 3.0) -> None:
        """Everybody answers; pi-07 is the slowest."""
        with self.at_once():
            self.open()
            for device in self.assignments:
                share = 1.0 if device == "pi-07" else self.draw.uniform(0.35, 0.7)
                self.answer(device, seconds * share)
            self.close("all", seconds + 0.04)
