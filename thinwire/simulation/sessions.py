"""The sessions of many simulated clients in one process: each is made when it is asked, few are kept in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from thinwire.client.answering.bases import Bases
from thinwire.client.bench import Here
from thinwire.client.compute.clock import REAL, Clock
from thinwire.client.compute.site import Site
from thinwire.client.disk.state import RunFolder
from thinwire.client.kept_runs import Reply
from thinwire.client.owner.gate import Gate
from thinwire.client.session import Session
from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Delivery
from thinwire.simulation.held import HeldFolder
from thinwire.simulation.shared import shared_folder

AWAKE_BYTES = 256 << 20  # of residuals and the like that may stay in memory; the rest lies on disk


class Answered(NamedTuple):
    """What a client sends, and how long it worked for it."""

    reply: Reply
    bundle: Path | None
    took_s: float


@dataclass(frozen=True)
class Crowd:
    """What simulated clients have in common: client `index` is `name(index)` with part `index` of `count`.

    `step_s` are seconds that a step takes on each of them, by a script: then all that is measured on a client comes of
    it, and partial work ends where it says. Without it this machine's own speed ends nobody's training.
    """

    folder: Path
    site: Site
    count: int
    debug: bool = False
    step_s: tuple[float, ...] = ()

    def name(self, index: int) -> str:
        return f"sim-{index:0{len(str(self.count - 1))}}"

    def place(self, index: int) -> Site:
        return replace(self.site, name=self.name(index), partition=index, partitions=self.count)


class Sessions:
    """Law: who is put to sleep and woken answers as if it had been awake all the time.

    With `shared` other processes work for the same clients: each commit is on disk at once, whole.
    """

    def __init__(self, crowd: Crowd, bench: Here, shared: bool = False) -> None:
        self.crowd, self.bench, self.shared = crowd, bench, shared
        self._gate, self._bases = Gate(), Bases()  # the plan and the model that is sent are the same for all
        self._awake: OrderedDict[int, tuple[Session, list[RunFolder]]] = OrderedDict()
        self._bytes: dict[int, int] = {}

    def answer(self, index: int, delivery: Delivery) -> Answered:
        began = time.perf_counter()
        session, _ = self._awake.get(index) or self._wake(index)
        script_at = session.clock.now()
        reply, bundle = session.answer(delivery, lambda: False, _nothing)
        took_s = session.clock.now() - script_at if self.crowd.step_s else time.perf_counter() - began
        if bundle is None:  # nothing is lost on the way; parts are read after this
            session.delivered(reply)
        self._awake.move_to_end(index)
        self._bytes[index] = session.held_bytes
        while sum(self._bytes.values()) > AWAKE_BYTES and len(self._awake) > 1:
            self.sleep(next(iter(self._awake)))
        return Answered(reply, bundle, took_s)

    def sleep(self, index: int) -> None:
        """Nothing of a client stays in memory."""
        _, folders = self._awake.pop(index, (None, []))
        self._bytes.pop(index, None)
        for folder in folders:
            if isinstance(folder, HeldFolder):
                folder.put_down()

    def _wake(self, index: int) -> tuple[Session, list[RunFolder]]:
        name, made = self.crowd.name(index), list[RunFolder]()

        def folder_of(own: Path, run: str) -> RunFolder:
            made.append(shared_folder(own, run) if self.shared else HeldFolder(own, run))
            return made[-1]

        scripted = bool(self.crowd.step_s)
        clock, step_s = (_script(), self.crowd.step_s[index]) if scripted else (REAL, 0.0)
        session = Session(
            name, self.bench.at(clock), self.crowd.folder / name, self.crowd.place(index), debug=self.crowd.debug,
            gate=self._gate, folders=folder_of, take_base=self._bases.take, slow_step_s=step_s, clock=clock,
            may_stop=scripted,
        )  # fmt: skip
        self._awake[index] = session, made
        return self._awake[index]


def _script() -> Clock:
    """A clock that moves by what is slept on it."""
    virtual = VirtualClock()
    return Clock(virtual.now, virtual.advance)


def _nothing(line: str) -> None: ...
