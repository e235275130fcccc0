"""The recorded runs whose page is measured, written through `Store.record` as an aggregator would.

A run is filled once for each content of this file and of the modules that write its tables, and kept in a folder of
the system's temporary ones; each measurement gets a copy.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from thinwire.core.events import (
    ClientFailed,
    ClientSelected,
    DeviceOnline,
    Evaluated,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
)
from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.formatting import Reason, Reasons
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Part, ReplyHeader, Timings, Transfer, UpdateId
from thinwire.store import Store, explaining, journal, projection, round_explanation, round_timing, tables, write_batch

LAYOUT: Final = Layout.of({"0.weight": (128, 64), "0.bias": (128,), "2.weight": (10, 128), "2.bias": (10,)})
REPORT: Final = TaskReport("digits", "1", "9f" * 32, LAYOUT.digest, ("identity", "topk", "int8"))
DENSE: Final = LAYOUT.size * 4
CODEC: Final = "topk(0.01) > int8 > zstd"
BEGAN: Final = 1_790_000_000.0  # wall clock of the run's start
LATE_SHARE, FAILED_SHARE = 0.02, 0.01  # of a round's clients


@dataclass(frozen=True)
class Recipe:
    """The size of a recorded run: `rounds` closed ones, each with `selected` of the `known` clients."""

    name: str
    rounds: int
    known: int
    selected: int


LONG: Final = Recipe("long", 10_000, 1_000, 20)
WIDE: Final = Recipe("wide", 800, 200, 200)
SMALL: Final = (Recipe("long", 120, 60, 10), Recipe("wide", 12, 40, 40))


def filled(recipe: Recipe, path: Path) -> Path:
    """Make a database at `path` with the recipe's run, whose newest round is open: a copy of the kept one."""
    kept = Path(tempfile.gettempdir()) / f"thinwire-page-{os.getuid()}" / f"{recipe.name}-{_digest(recipe)}.sqlite3"
    if not kept.exists():
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        with Store.open(draft, durable=False) as store:
            fill(store, recipe)
        draft.rename(kept)
    shutil.copy(kept, path)
    return path


def fill(store: Store, recipe: Recipe, at: float = BEGAN) -> Teller:
    """Record the recipe's run, which begins at this wall clock."""
    run = Teller.begin(store, recipe, at)
    while run.round < recipe.rounds:
        run.whole_round()
    run.open()
    run.answer(run.assigned[: len(run.assigned) // 2])
    return run


@dataclass
class Teller:
    """Tells a store what an aggregator would, round by round; `now` is the run's wall clock."""

    store: Store
    recipe: Recipe
    run_id: str
    names: Sequence[str]
    now: float = BEGAN
    round: int = 0
    elapsed: float = 0.0
    opened_at: float = 0.0
    assigned: list[str] = field(default_factory=list)
    aggregated: list[str] = field(default_factory=list)
    replied: dict[str, ReplyHeader] = field(default_factory=dict)  # of the open round
    owed: dict[str, str] = field(default_factory=dict)  # device -> assignment that comes late, in the next round
    sequences: dict[str, int] = field(default_factory=dict)
    draw: random.Random = field(default_factory=lambda: random.Random(21))

    @classmethod
    def begin(cls, store: Store, recipe: Recipe, at: float = BEGAN) -> Teller:
        """Enrol the clients and start the run."""
        names = [f"pi-{number:04d}" for number in range(1, recipe.known + 1)]
        for name in names:
            key = hashlib.sha256(name.encode()).hexdigest()
            store.roster.enrol(name, key, b"key of " + name.encode(), "loopback")
            store.roster.seen(Hello(name, "p1", (REPORT,), {"thinwire": "0.1.0", "python": "3.11.2"}), at)
        text = f'[run]\ntask = "digits"\nrounds = {recipe.rounds + 4000}\n[local]\nlr = 0.5\nsteps = 50\n'
        run_id = store.create_run("digits", RunPlan.parse(text), LAYOUT, REPORT)
        run = cls(store, recipe, run_id, names, at)
        model = ModelStored(at, 0, "a1" * 32, "v000000.model", [("full/0", DENSE, "00" * 32)])
        status = RunStatusChanged(at, "queued", "queued")
        store.record(run_id, [status, model, RunStatusChanged(at, "running", "round 1")])
        return run

    @classmethod
    def resume(cls, store: Store, recipe: Recipe) -> Teller:
        """Go on with the run of a filled database: close its round, and open one now that has half of its replies."""
        row = store.run("latest")
        opened, _ = store.round_count(row.run_id)
        (found,) = store.rounds(row.run_id, opened)
        run = cls(store, recipe, row.run_id, [one.device for one in store.clients(row.run_id)])
        run.round, run.opened_at, run.assigned, run.now = opened, found.opened_at, found.selected, found.opened_at
        run.sequences = {one.device: one.sequence for one in store.clients(row.run_id)}
        run.aggregated = [one.update_id for one in store.updates(row.run_id, opened, outcomes=("aggregated",))]
        run.answer(run.assigned[len(run.assigned) // 2 :])
        run.close()
        run.now = time.time()
        for name in run.names:
            store.record_device(DeviceOnline(run.now, name))
        run.open()
        run.answer(run.assigned[: len(run.assigned) // 2])
        return run

    def whole_round(self) -> None:
        """Open a round, let all its clients reply but those that are late or fail, and close it."""
        self.open()
        self.answer(self.assigned)
        self.close()

    def open(self) -> None:
        """Open a round with clients drawn from those that owe no reply, and record the late replies of the last one."""
        owed, self.owed = self.owed, {}
        self.round, self.opened_at = self.round + 1, self.now
        self.aggregated, self.replied = [], {}
        free = [name for name in self.names if name not in owed]
        self.assigned = self.draw.sample(free, min(self.recipe.selected, len(free)))
        ids = {name: f"{self.run_id}.{self.round}.{name}" for name in self.assigned}
        reasons: dict[str, Reasons] = {name: [Reason("busy", {"round": self.round - 1})] for name in owed}
        opened = RoundOpened(
            self.now, self.round, self.elapsed, self.round - 1, f"{self.round - 1:064x}", [], ids, CODEC, 8.0,
            len(ids), math.ceil(len(ids) / 2), reasons, deadline_reason=[Reason("planned", {})],
            considered=self.recipe.known,
        )  # fmt: skip
        events: list[Event] = [ClientSelected(self.now, self.round, name, ids[name], DENSE) for name in self.assigned]
        for name, assignment_id in owed.items():
            events += self._accepted(name, assignment_id, self.now - 7.0, 9.0, late=True)
        self.store.record(self.run_id, [opened, *events])

    def answer(self, names: Sequence[str]) -> None:
        """Record the replies of these clients in one transaction; a few fail, or will reply in the next round."""
        events = list[Event]()
        for place, name in enumerate(names):
            assignment_id, luck = f"{self.run_id}.{self.round}.{name}", self.draw.random()
            if place and luck < LATE_SHARE:
                self.owed[name] = assignment_id
            elif place and luck < LATE_SHARE + FAILED_SHARE:
                at = self.opened_at + self.draw.uniform(0.5, 2.0)
                events.append(ClientFailed(at, self.round, name, assignment_id, "offline", "no request", 0.0))
            else:
                events += self._accepted(name, assignment_id, self.opened_at, self.draw.uniform(1.0, 5.5))
        self.store.record(self.run_id, events)

    def close(self) -> None:
        """Close the round: by its deadline if a client owes its reply, else because all have replied."""
        took = 8.0 if self.owed else max(h.transfer.arrived_at for h in self.replied.values() if h.transfer)
        took = took if self.owed else took - self.opened_at + 0.04
        self.now, self.elapsed = self.opened_at + took, self.elapsed + took
        last = max(self.replied.values(), key=lambda header: header.transfer.arrived_at if header.transfer else 0.0)
        quality = 0.97 - 0.87 * math.exp(-self.round / 40) + 0.004 * math.sin(self.round * 2.1)
        metrics = {"accuracy": quality, "loss": 0.1 + 2.2 * (1 - quality)}
        spread = {"accuracy": [quality - 0.09, quality + 0.02], "loss": [metrics["loss"] * 0.7, metrics["loss"] * 1.3]}
        spent = {"aggregate_s": 0.01, "step_s": 0.004, "store_s": 0.02, **last.timings.__dict__}
        closed = RoundClosed(
            self.now, self.round, "deadline" if self.owed else "all", self.round, self.aggregated, [],
            list(self.owed), self.elapsed, took, {"loss": 1 - quality}, spent, last.update_id.device,
        )  # fmt: skip
        self.store.record(self.run_id, [
            ModelStored(self.now, self.round, f"{self.round:064x}", f"v{self.round:06d}.model"), closed,
            Evaluated(self.now, self.round, self.round, metrics, spread, 360, len(self.replied), best=True),
        ])  # fmt: skip
        self.now += 0.03

    def _accepted(
        self, name: str, assignment_id: str, since: float, seconds: float, *, late: bool = False
    ) -> list[Event]:
        """Return the events of a reply that came `seconds` after its selection at `since`."""
        number = self.sequences[name] = self.sequences.get(name, 0) + 1
        times = Timings(
            **{stage: share * seconds for stage, share in (("download_s", 0.07), ("train_s", 0.7), ("encode_s", 0.05))}
        )
        arrived, size = since + seconds, 230 + self.draw.randrange(30)
        header = ReplyHeader(
            assignment_id, UpdateId(self.run_id, name, number), self.round - 1, examples=200, steps=50, a=50.0,
            norm=1.1, metrics={"eval/accuracy": (20.0, 24), "eval/loss": (7.0, 24), "train/loss": (9.0, 24)},
            timings=times, parts=(Part("frame/0", size, "00" * 32),), codec=CODEC, residual_norm=0.01,
            transfer=Transfer(since + 0.03 * seconds, since + 0.93 * seconds, arrived, DENSE + 2100, size + 1650, 2),
        )  # fmt: skip
        update_id, body = str(header.update_id), reply_to_json(header)
        if not late:
            self.replied[name] = header
        self.aggregated.append(update_id)
        accepted = UpdateAccepted(
            arrived, self.round, int(assignment_id.split(".")[1]), name, assignment_id, update_id, int(late), 1.0, late,
            self.elapsed, body,
        )  # fmt: skip
        return [accepted, UpdateAggregated(arrived, self.round, update_id, 0.002)]


def _digest(recipe: Recipe) -> str:
    """Return a digest of what decides the content of the filled database."""
    found = hashlib.sha256(repr(recipe).encode())
    writing = (explaining, journal, projection, round_explanation, round_timing, tables, write_batch)
    for path in (__file__, *(module.__file__ for module in writing)):
        found.update(Path(path or "").read_bytes())
    return found.hexdigest()[:16]
