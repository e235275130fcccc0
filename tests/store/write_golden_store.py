"""Write the golden state directory with an open round: `python -m tests.store.write_golden_store`.

A child process drives a run of four rounds on three scripted devices, with a real spool. It sends itself SIGKILL when
it is about to record the second reply of round 2. Then the same run is driven to its end without a kill: its result is
in `expected.json`. A directory that was written is not written again once a version was released: the aggregator of
every later version must be able to resume it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.server_bench import LAYOUT, REPORT, scripted, seed_of, work
from thinwire.compression import feedback, parse
from thinwire.core import Key, RunPlan
from thinwire.core.clock import VirtualClock
from thinwire.core.events import Event, RoundClosed, UpdateAccepted
from thinwire.core.fleet import Hello
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, Vector
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedFleet, SyntheticUpdates
from thinwire.store import FileSpool, Store

GOLDEN = Path(__file__).parents[1] / "golden" / "store" / "open-round"
PLAN = {
    "run": {"task": "toy", "rounds": 4},
    "cohort": {"wait_for": 3, "deadline_s": 30},
    "local": {"lr": 1.0},
    "uplink": {"codec": "topk(0.1) > int8"},
}
SECONDS = {"a": 1.0, "b": 2.0, "c": 3.0}  # until each replies


class AsItWas(SyntheticUpdates):
    """Encodes as the devices did that made the directory."""

    def encoded(self, assignment: Assignment, segment: int, change: Vector) -> bytes:
        codec = feedback(parse(assignment.codec)).bind(LAYOUT)
        return codec.encode(change, codec.init(), Key(seed_of(self.name, assignment))).payload


def begin(folder: Path) -> tuple[Store, AggregatorHome, str]:
    """Enroll three devices and one that waits, and submit the run."""
    home = AggregatorHome.under(folder)
    store = Store.open(home.database, clock=VirtualClock())
    for name in SECONDS:
        key = b"not a key, but of " + name.encode()
        store.roster.enrol(name, hashlib.sha256(key).hexdigest(), key, "loopback")
        store.roster.seen(Hello(name, "p1", (REPORT,), {"thinwire": "0.1.0"}), at=1_700_000_000.0)
    store.roster.enrol("waits", "e" * 64, b"nor this", "manual")
    params = np.linspace(-1, 1, LAYOUT.size, dtype=np.float32)
    run_id = submit(store, home, RunPlan.from_json(PLAN), FirstModel(LAYOUT, REPORT, params, np.zeros(0, np.float32)))
    return store, home, run_id


def go(store: Store, home: AggregatorHome, run_id: str, *, killed: bool) -> None:
    """Drive the run; with `killed` only to its second round."""
    clock = VirtualClock()
    devices = [scripted(name, seconds, work(name, AsItWas)) for name, seconds in SECONDS.items()]
    fleet, record = ScriptedFleet(FileSpool(home.spool), clock, REPORT, devices), store.record

    def dying(to: str, events: list[Event], *more: Any) -> None:
        for event in events:
            if killed and isinstance(event, UpdateAccepted) and (event.round, event.device) == (2, "b"):
                os.kill(os.getpid(), signal.SIGKILL)
        record(to, events, *more)

    store.record = dying  # type: ignore[assignment, method-assign]  # a crash
    drive(run_id, store=store, fleet=fleet, home=home, clock=clock)


def main(target: Path = GOLDEN) -> None:
    """Write the directory."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        child = os.fork()
        if child == 0:
            go(*begin(place / "killed"), killed=True)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        home = AggregatorHome(place / "killed" / "aggregator")
        with contextlib.closing(sqlite3.connect(home.database)) as opened:
            (target / "store.sql").write_text("\n".join(opened.iterdump()) + "\n")
        for part in ("spool", "runs"):
            shutil.copytree(home.root / part, target / part)
        store, home, run_id = begin(place / "undisturbed")
        go(store, home, run_id, killed=False)
        row = store.run(run_id)
        closed = [event for _, event in store.events(run_id) if isinstance(event, RoundClosed)]
        rounds = [[e.round, e.reason, e.version, list(e.aggregated)] for e in closed]
        found = {"run_id": run_id, "status": row.status, "model_digest": row.model_digest, "rounds": rounds}
        (target / "expected.json").write_text(json.dumps(found, indent=1) + "\n")
        (target / "README.md").write_text(README)


README = """# An aggregator's state directory with an open round

`python -m tests.store.write_golden_store` wrote it (protocol 1, tables of revision `0001_initial`).
`tests/store/test_golden_store.py` opens it and drives its run to the end.

| file | content |
|---|---|
| `store.sql` | the database (`sqlite3.Connection.iterdump`): run `toy-1` of four rounds, round 1 closed, round 2 open |
| `runs/toy-1/` | model versions 0 and 1 |
| `spool/toy-1/` | the replies of `a` (accepted in the journal, round not closed) and of `b` (not journalled yet) |
| `expected.json` | the result of the same run without a kill: closing reasons, updates, digest of the model |

The process was killed (SIGKILL) when it was about to record the reply of `b`; device `c` was still at work.
"""

if __name__ == "__main__":
    main()
