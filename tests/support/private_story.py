"""Runs with central differential privacy as the journal has them, and the same run without it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.store_story import LAYOUT
from thinwire.core.events import (
    ClientSelected,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
)
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.protocol import without_facts
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Part, ReplyHeader, Timings, Transfer, UpdateId
from thinwire.privacy.noise_plan import noise_plan
from thinwire.store import Store

DEVICES = ("pi-01", "pi-02", "pi-03")
PLAIN = """
[run]
task = "digits"
rounds = 6
evaluate = "off"
[cohort]
clients = 3
deadline_s = 60
late = "drop"
[local]
lr = 0.5
steps = 20
buffers = "local"
[uplink]
codec = "eden(4)"
"""
PRIVATE = (
    PLAIN
    + """
[privacy]
mode = "central"
clip = 0.5
noise_multiplier = 2.0
delta = 1e-3
budget = 6.0
"""
)


@dataclass(frozen=True)
class Facts:
    """What one client's reply tells beside its update, where it tells anything."""

    examples: int = 40
    loss: float = 3.0
    norm: float = 1.5
    train_s: float = 2.25


@dataclass
class PrivateStory:
    """Records the rounds of one run, which spends only if its plan is private."""

    store: Store
    at: float = 1_700_000_000.0
    plan: str = PRIVATE
    facts: Facts = field(default_factory=Facts)
    source: str = "devices"
    layout: Layout = LAYOUT
    run_id: str = ""
    round: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.parsed = RunPlan.parse(self.plan)
        report = TaskReport("digits", codecs=("eden",), layout_digest=self.layout.digest)
        self.run_id = self.store.create_run("digits", self.parsed, self.layout, report, source=self.source)  # type: ignore[arg-type]  # a str
        stored = ModelStored(self.at, 0, "aa", "v0.model", [("full/0", 32, "ff")])
        begun = RunStatusChanged(self.at + 1, "running", "is running")
        self.store.record(self.run_id, [stored, RunStatusChanged(self.at, "queued", "is queued"), begun])

    @property
    def is_private(self) -> bool:
        return self.parsed.privacy.mode != "off"

    def play(self, devices: tuple[str, ...] = DEVICES, *, released: bool = True, closes: bool = True) -> None:
        """Record a round; with `released` = False it closes without a step."""
        self.round += 1
        sent = {device: f"{self.run_id}.{self.round}.{device}" for device in devices}
        opened: list[Event] = [
            RoundOpened(
                self.at, self.round, 0.0, self.version, "aa", list(devices), sent, "eden(4)", 60.0, len(sent), 1
            ),
            *(ClientSelected(self.at, self.round, device, sent[device], 1000) for device in devices),
        ]
        if self.is_private:
            release = noise_plan(self.parsed, self.layout.model_size, len(devices)).release.to_json()
            opened.append(PrivacyReserved(self.at, self.round, self.population, release, list(devices)))
        self.store.record(self.run_id, opened)
        if closes:
            self._close(devices, released)
        self.at += 20.0

    @property
    def population(self) -> str:
        return f"simulation of {self.run_id}" if self.source == "sim" else "digits"

    def _close(self, devices: tuple[str, ...], released: bool) -> None:
        replies = [self._reply(device, place) for place, device in enumerate(devices)]
        self.store.record(self.run_id, [self._accepted(one) for one in replies])
        updates = [str(one.update_id) for one in replies]
        close: list[Event] = []
        if released:
            self.version += 1
            digest = f"{self.version:064x}"
            close = [UpdateAggregated(self.at + 6, self.round, update, 0.01) for update in updates]
            close.append(ModelStored(self.at + 7, self.version, digest, f"v{self.version}.model", [("f", 32, "ff")]))
            close += [PrivacyCommitted(self.at + 7, self.round, digest)] if self.is_private else []
        close.append(
            RoundClosed(
                self.at + 7, self.round, "all" if released else "too-few", self.version, updates if released else [],
                [] if released else updates, [], 7.0, 7.0, {}, {}, devices[-1],
            )
        )  # fmt: skip
        self.store.record(self.run_id, close)

    def _reply(self, device: str, place: int) -> ReplyHeader:
        facts, arrived = self.facts, self.at + 5 + place / 4
        transfer = Transfer(self.at + 0.2, arrived - 0.5, arrived, 510, 620, 3)
        said = ReplyHeader(
            f"{self.run_id}.{self.round}.{device}", UpdateId(self.run_id, device, self.round), self.version,
            facts.examples, 20, 20.0, facts.norm, {"train/loss": (facts.loss * facts.examples, float(facts.examples))},
            Timings(0.1, 0.2, 0.0, facts.train_s, 0.3), (Part("frame/0", 200, "ff"),), residual_norm=facts.norm / 3,
            transfer=transfer, codec="eden(4)",
        )  # fmt: skip
        return without_facts(said) if self.is_private else said

    def _accepted(self, reply: ReplyHeader) -> UpdateAccepted:
        return UpdateAccepted(
            self.at + 6, self.round, self.round, reply.update_id.device, reply.assignment_id, str(reply.update_id), 0,
            1.0, False, 6.0, reply_to_json(reply),
        )  # fmt: skip

    def end(self, status: str = "done", text: str = "6 rounds", exit_code: int = 0) -> None:
        """Record the end of the run."""
        self.store.record(self.run_id, [RunStatusChanged(self.at, status, text, exit_code)])  # type: ignore[arg-type]  # a str
