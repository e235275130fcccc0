"""A simulation that outlives its process: after `kill -9` the same call goes on, to the same bits as if never killed.

The aggregator's part is its ordinary restart: it replays the journal and sends outstanding assignments again
(server/run.py). The clients' part is that of a device which was killed: each commit of its run state is on disk, and an
assignment that it has answered already gets the same reply (client/outbox.py). This module has the rest: it finds the
unfinished run with which a call goes on, the time on the run's clock, and the client that replied last.

A simulation with secure aggregation keeps secrets in memory only. Its open round is aborted, and the run goes on with
the next one.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from thinwire.core.clock import VirtualClock
from thinwire.core.errors import Refused
from thinwire.core.events import ENDED, ClientFailed, Event, UpdateAccepted, UpdateDropped
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome, dead_owner, private_folder, write_atomically
from thinwire.store import FileSpool, Store


@dataclass(frozen=True)
class KeptSimulation:
    """Holds the folder of a simulation in a state directory, and the run in it that is not finished, if there is one.

    `about` is what else than the plan decides the result: the clients and their data, the split, the seed, the seconds
    of a step, and the layout of the task's model. Nobody compares the task's code: a notebook changes it all the time.
    """

    home: AggregatorHome
    about: Mapping[str, Any]
    unfinished: str = ""  # id of the run

    @classmethod
    def find(cls, store: Store, home: AggregatorHome, plan: RunPlan, about: Mapping[str, Any]) -> Self:
        """Return the simulation of this plan and description; raise `Refused` if another process runs it.

        The search removes the folders of simulations that have ended, which their processes may have left.
        """
        for row in reversed(list(store.runs())):
            if row.source == "sim" and row.status in ENDED:  # its process may have been killed just after its end
                shutil.rmtree(home.simulation(row.run_id).parent, ignore_errors=True)
            if row.source != "sim" or row.status in (*ENDED, "preparing"):
                continue
            if dict(row.plan) != plan.to_json() or _read(home, row.run_id) != about:
                continue
            if dead_owner(home.owner(row.run_id)) is None:
                raise Refused(
                    f"another process runs {row.run_id} in {home.root.parent}",
                    why="two processes cannot go on with one run",
                    hint="wait for it, or give this one another home",
                )
            return cls(home, about, row.run_id)
        return cls(home, about)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run's clients and spool; create it with its description if it is missing."""
        about = self.home.simulation(run_id)
        private_folder(about.parent)
        if not about.exists():
            write_atomically(about, json.dumps(dict(self.about)).encode())
        return about.parent

    def spool(self, run_id: str) -> FileSpool:
        """Return the spool, with the replies that are not aggregated yet."""
        return FileSpool(self.folder(run_id) / "spool", self.home.durable)


def _read(home: AggregatorHome, run_id: str) -> Any:
    try:
        return json.loads(home.simulation(run_id).read_bytes())
    except (OSError, ValueError):
        return None


def where_it_stood(store: Store, spool: FileSpool, run_id: str) -> tuple[VirtualClock, str]:
    """Return the clock with which a run goes on, and the client that replied last; "" if none has.

    The clock begins now, or after the last event, which may lie in the future. It begins at a whole second, because
    fractions would round times differently in each process. The client is that of the newest reply which the journal
    has not decided about, else that of the last decision.
    """
    decided, last, last_at = set[str](), "", 0.0
    for _, event in store.events(run_id):
        last_at = max(last_at, event.at)
        if device := _replied(event):
            last = device
            decided.add(getattr(event, "update_id", ""))
    waiting = [
        header for header in spool.headers() if header.update_id.run == run_id and str(header.update_id) not in decided
    ]
    newest = max(waiting, key=lambda header: header.transfer.arrived_at if header.transfer else 0.0, default=None)
    clock = VirtualClock(origin=float(max(int(time.time()), math.ceil(last_at))))
    return clock, newest.update_id.device if newest else last


def _replied(event: Event) -> str:
    """Return the client whose reply an event decides about, "" for other events."""
    return event.device if isinstance(event, UpdateAccepted | UpdateDropped | ClientFailed) else ""
