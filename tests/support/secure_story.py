"""Runs with secure aggregation as the journal has them: selections, closed phases, drop-outs and sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.store_story import LAYOUT
from thinwire.core.events import (
    ROUND_OVER,
    ClientFailed,
    ClientSelected,
    Evaluated,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RoundResumed,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
)
from thinwire.core.fleet import TaskReport
from thinwire.core.formatting import Reason
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import PHASES, Part, ReplyHeader, Timings, Transfer, UpdateId
from thinwire.store import Store

DEVICES = tuple(f"pi-{number:02}" for number in range(1, 11))
SECURE = """
[run]
task = "digits"
rounds = 6
[cohort]
clients = 10
deadline_s = 60
[local]
lr = 0.5
steps = 20
[secure]
enabled = true
max_corrupt = 0.3
max_dropout = 0.2
metrics = { accuracy = 1.0, loss = 10.0 }
"""
BYTES = {"advertise": 412, "share": 3_310, "masked": 122_000, "agree": 71, "unmask": 340}  # of one message
SECONDS = {"advertise": 0.4, "share": 0.7, "masked": 5.2, "agree": 0.2, "unmask": 0.3}
ABORTED = "the masks do not cancel (a client dealt wrong shares, or a masked vector is damaged)"
REASONS = {
    "advertise": "offline: no request for 60 s",
    "share": "withdrew: policy",
    "masked": "stale: no message in time for the phase masked",
}


@dataclass
class SecureStory:
    """Records the rounds of one run; `at` is the wall clock, `elapsed_s` the run's own one."""

    store: Store
    at: float = 1_700_000_000.0
    plan: str = SECURE
    layout: Layout = LAYOUT
    run_id: str = ""
    round: int = 0
    version: int = 0
    unable: dict[str, str] = field(default_factory=dict)  # device that no round selects -> why
    down_s: float = 0.0  # seconds of the open round without an aggregator
    devices: tuple[str, ...] = DEVICES  # those of the next round
    sequences: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, report = (
            RunPlan.parse(self.plan),
            TaskReport("digits", codecs=("int8",), layout_digest=self.layout.digest),
        )
        self.run_id = self.store.create_run("digits", plan, self.layout, report)
        stored = ModelStored(self.at, 0, "aa", "v0.model", [("full/0", 32, "ff")])
        begun = RunStatusChanged(self.at + 1, "running", "is running")
        self.store.record(self.run_id, [stored, RunStatusChanged(self.at, "queued", "is queued"), begun])

    def play(
        self, gone: Mapping[str, str] | None = None, *, until: str = "unmask", reason: str = "all", least: int = 6,
        down_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Record a round whose devices `gone` drop out in the phase that it names; stop behind the phase `until`.

        For `down_s` no aggregator runs while the phase `masked` is open.
        """
        self.down_s = down_s
        for batch in self._round(dict(gone or {}), until, reason, least):
            self.store.record(self.run_id, batch)
        self.at += 20.0

    def _round(self, gone: dict[str, str], until: str, reason: str, least: int) -> Iterator[list[Event]]:
        self.round += 1
        yield self._opened()
        elapsed_s, there = 0.0, list(self.devices)
        for phase in PHASES[: PHASES.index(until) + 1]:
            if phase == "masked" and self.down_s:
                since, self.at = self.at + elapsed_s, self.at + self.down_s
                yield [RoundResumed(since + self.down_s, self.round, since, elapsed_s, self.down_s)]
            elapsed_s += SECONDS[phase]
            lost = [device for device in there if gone.get(device) == phase]
            there = [device for device in there if device not in lost]
            replies = [self._accepted(device, elapsed_s) for device in there] if phase == "masked" else []
            yield [*(self._failed(device, phase, elapsed_s, reason) for device in lost), *replies]
            if phase == "masked" and len(there) < least:
                yield [self._closed([], "too-few", elapsed_s, there)]
                return
            messages = "" if phase in ("masked", "unmask") else hashlib.sha256(phase.encode()).hexdigest()
            received = {device: BYTES[phase] + place for place, device in enumerate(there)}
            yield [PhaseClosed(self.at + elapsed_s, self.round, phase, elapsed_s, received, lost, messages=messages)]
        if until == "unmask":
            yield from self._ended([d for d in self.devices if gone.get(d) not in PHASES[:3]], reason, elapsed_s)

    def _opened(self) -> list[Event]:
        sent = {device: f"{self.run_id}.{self.round}.{device}" for device in self.devices}
        devices, selected = list(self.devices), len(self.devices)
        opened = RoundOpened(
            self.at, self.round, 0.0, self.version, "aa", devices, sent, "lattice", 60.0, selected, 5,
            {device: [Reason("unable", {"text": why})] for device, why in self.unable.items()},
        )  # fmt: skip
        return [opened, *(ClientSelected(self.at, self.round, device, sent[device], 1000) for device in self.devices)]

    def _failed(self, device: str, phase: str, elapsed_s: float, reason: str) -> ClientFailed:
        said = REASONS.get(phase, "offline: no request for 60 s")
        kind, _, text = (f"stale: {ROUND_OVER}" if (phase, reason) == ("masked", "enough") else said).partition(": ")
        assignment_id = f"{self.run_id}.{self.round}.{device}"
        return ClientFailed(self.at + elapsed_s, self.round, device, assignment_id, kind, text, elapsed_s)

    def _accepted(self, device: str, elapsed_s: float) -> UpdateAccepted:
        self.sequences[device] = self.sequences.get(device, 0) + 1
        update_id, arrived = UpdateId(self.run_id, device, self.sequences[device]), self.at + elapsed_s
        header = ReplyHeader(
            f"{self.run_id}.{self.round}.{device}", update_id, self.version, 0, 0, 0.0, 0.0, {}, Timings(),
            (Part("update", BYTES["masked"] - 16, "ff"), Part("scalars", 16, "ee")),
            transfer=Transfer(self.at + 0.1, arrived - 0.4, arrived, 122_300, 1_200, 6), codec="lattice",
        )  # fmt: skip
        return UpdateAccepted(
            arrived, self.round, self.round, device, header.assignment_id, str(update_id), 0, 1.0, False, elapsed_s,
            reply_to_json(header),
        )  # fmt: skip

    def _ended(self, survivors: list[str], reason: str, elapsed_s: float) -> Iterator[list[Event]]:
        at, updates = self.at + elapsed_s, [f"{self.run_id}/{device}/{self.sequences[device]}" for device in survivors]
        if reason == "aborted":
            yield [self._closed(updates, "aborted", elapsed_s, survivors, ABORTED)]
            return
        self.version += 1
        yield [
            SumUnmasked(at, self.round, len(survivors), len(survivors), 0.75, 2.0, 1.5, elapsed_s, 0.04),
            *(UpdateAggregated(at, self.round, update_id, 0.01) for update_id in updates),
        ]
        yield [ModelStored(at, self.version, "bb", f"v{self.version}.model", [("full/0", 32, "ff")])]
        if self.round > 1:
            metrics = {"accuracy": 0.5 + 0.05 * self.round, "loss": 2.0 / self.round}
            yield [Evaluated(at, self.round - 1, self.version - 1, metrics, {}, len(survivors), len(survivors))]
        yield [self._closed(updates, reason, elapsed_s, survivors)]

    def _closed(
        self, updates: list[str], reason: str, elapsed_s: float, there: list[str], detail: str = ""
    ) -> RoundClosed:
        ours = [f"{self.run_id}/{device}/{self.sequences[device]}" for device in there]
        kept = reason not in ("too-few", "aborted")
        return RoundClosed(
            self.at + elapsed_s, self.round, reason, self.version, updates if kept else [], [] if kept else ours, [],  # type: ignore[arg-type]  # a str
            elapsed_s, elapsed_s + self.down_s, {}, {"wait_s": 0.1, "aggregate_s": 0.02}, there[-1], detail=detail,
        )  # fmt: skip


def four_rounds(store: Store, at: float = 1_700_000_000.0, plan: str = SECURE) -> SecureStory:
    """Record a quiet round, one with three drop-outs, one with too few survivors, and an open one."""
    story = SecureStory(store, at, plan)
    story.play()
    story.play({"pi-03": "share", "pi-07": "masked", "pi-09": "agree"}, reason="enough")
    story.play(dict.fromkeys(DEVICES[:5], "masked"))
    story.play({"pi-02": "advertise"}, until="share")
    return story
