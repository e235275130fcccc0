"""A run over a real device API, plain or TLS, whose devices answer what a test gives them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.support.fleet_words import hello
from tests.support.transport_doubles import Place
from tests.system.attacks.places import attacked
from thinwire.aggregation import BufferMean
from thinwire.core import Layout, RunPlan
from thinwire.core.clock import RealClock
from thinwire.core.events import Event
from thinwire.core.fleet import Delivery, Link, TaskReport
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import ReplyHeader
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, SyntheticUpdates
from thinwire.store import RunRow, Store

T = TypeVar("T", bound=Event)
PULL_S = 0.2


@dataclass
class Acted:
    """What came of a run."""

    row: RunRow
    events: list[Event]
    home: AggregatorHome

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]


def acted(
    folder: Path,
    layout: Layout,
    devices: Mapping[str, SyntheticUpdates],
    *,
    tls: bool,
    begun: Callable[[Place], None] = lambda here: None,
    **sections: Any,
) -> Acted:
    """Drive a run to its end; each device is a thread with a link of its own. `begun` is called before the run is."""
    home = AggregatorHome.under(folder)
    with attacked(home.root, tls=tls) as here, Store.open(home.database) as store:
        report = TaskReport("toy", layout_digest=layout.digest)
        own = {"run": {"task": "toy", **sections.pop("run", {})}, "local": {"lr": 1.0}}
        cohort = {"cohort": {"wait_for": len(devices), **sections.pop("cohort", {})}}
        plan = RunPlan.from_json({**own, **cohort, "uplink": {"codec": "identity", "feedback": "none"}, **sections})
        params, buffers = np.zeros(layout.size, np.float32), np.zeros(BufferMean(layout).layout.size, np.float32)
        run_id = submit(store, home, plan, FirstModel(layout, report, params, buffers))
        over, links = threading.Event(), {name: here.link(name) for name in devices}
        threads = [
            threading.Thread(target=_act, args=(links[name], name, report, made, folder, over))
            for name, made in devices.items()
        ]
        try:
            begun(here)
            for thread in threads:
                thread.start()
            row = drive(run_id, store=store, fleet=here.fleet, home=home, clock=RealClock())
        finally:
            over.set()
            for thread in threads:
                thread.join()
        return Acted(row, [event for _, event in store.events(run_id)], home)


def _act(
    link: Link, name: str, report: TaskReport, made: SyntheticUpdates, folder: Path, over: threading.Event
) -> None:
    """Answer one assignment after the other."""
    link.hello(replace(hello(name), tasks=(report,)))
    while not over.is_set():
        delivery = link.pull(PULL_S)
        if delivery is None or delivery.assignment.kind not in ("train", "evaluate"):
            continue
        _answer(link, delivery, made, folder / f"{name}.sent")


def _answer(link: Link, delivery: Delivery, made: SyntheticUpdates, bundle: Path) -> None:
    reply, body = made.finish(delivery, Behavior())
    bundle.write_bytes(body)
    link.push(reply, bundle if isinstance(reply, ReplyHeader) and body else None)
