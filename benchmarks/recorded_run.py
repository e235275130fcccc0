"""A long run made from recorded events, and what a restart of the aggregator costs after it.

    python -m benchmarks.recorded_run repeat HOME RUN LONG ROUNDS      record the round ROUNDS times in the home LONG
    python -m benchmarks.recorded_run restart LONG RUN                 rebuild the run's context

Each prints one JSON line. One closed round of a real run is read from its journal. It is recorded again and again, with
other round numbers, ids and times, through the `RunContext` that a driver uses. Nothing is sent and no model is made.
"""

from __future__ import annotations

import gc
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from benchmarks.processes import status_bytes
from thinwire.core.clock import RealClock
from thinwire.core.events import AssignmentDelivered, ClientSelected, Event, RoundClosed, RoundOpened
from thinwire.core.fleet import Fleet
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome
from thinwire.server.context import RunCommands, RunContext
from thinwire.server.leases import DeviceLeases
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.run import mode_of
from thinwire.server.submit import FirstModel, submit
from thinwire.store import Store
from thinwire.store.journal import from_json, to_json

SHARE = 0.25  # of the rounds after which the memory is read for the first time: windows are full by then
NUMBERS = re.compile(
    r'(?P<count>"(?:round|assignment_round|base_version|version)": )(?P<n>\d+)(?![\d.])'
    r'|(?P<moment>"(?:at|elapsed_s|pulled_at|began_at|arrived_at)": )(?P<t>\d+\.\d+)'
    r'|(?P<digest>"sha256": ")(?P<d>[0-9a-f]{64})(?=")'
    r'|(?P<assignment>RUN\.)(?P<r>\d+)(?=\.)|(?P<update>RUN/[^/"]+/)(?P<s>\d+)'
)


class Template:
    """The events of one round, in the transactions in which they become durable, for any later round."""

    def __init__(self, events: list[Event], run_id: str) -> None:
        numbers = re.compile(NUMBERS.pattern.replace("RUN", re.escape(run_id)))
        closed = events[-1]
        self.seconds = max(0.001, closed.at - events[0].at)
        self._pieces = [[self._cut(numbers, json.dumps(to_json(one))) for one in some] for some in _commits(events)]

    @staticmethod
    def _cut(numbers: re.Pattern[str], text: str) -> list[tuple[str, str, float]]:
        """Cut the text into (what stands before a number, its kind, the number). A digest is one too."""
        pieces, end = list[tuple[str, str, float]](), 0
        for found in numbers.finditer(text):
            kind = "moment" if found["moment"] else "digest" if found["digest"] else "count"
            prefix = found["count"] or found["moment"] or found["digest"] or found["assignment"] or found["update"]
            number = found["t"] or found["n"] or found["r"] or found["s"] or len(pieces)
            pieces.append((text[end : found.start()] + prefix, kind, float(number)))
            end = found.end()
        return [*pieces, (text[end:], "", 0.0)]

    def after(self, rounds: int) -> Iterator[list[Event]]:
        """Yield the transactions of the round that comes so many rounds after the recorded one."""
        for some in self._pieces:
            yield [from_json(json.loads("".join(self._words(pieces, rounds)))) for pieces in some]

    def _words(self, pieces: list[tuple[str, str, float]], rounds: int) -> Iterator[str]:
        for text, kind, number in pieces:
            yield text
            if kind == "count":
                yield str(int(number) + rounds)
            elif kind == "moment":
                yield repr(number + rounds * self.seconds)
            elif kind == "digest":  # another one in each update, which cannot be compressed
                yield secrets.token_hex(32)


def _commits(events: list[Event]) -> list[list[Event]]:
    """Return the round's opening, its replies and its end: a driver commits replies as they come, so some at once."""
    opening: list[Event] = [one for one in events if isinstance(one, RoundOpened | ClientSelected)]
    taken: list[Event] = [one for one in events if isinstance(one, AssignmentDelivered)]
    rest = [one for one in events if one not in opening and one not in taken]
    middle = next(at for at, one in enumerate(rest) if type(one).__name__ in ("ModelStored", "RoundClosed"))
    return [opening, [*taken, *rest[:middle]], rest[middle:]]


def recorded_round(store: Store, run_id: str) -> list[Event]:
    """Return the events of the last round but one: from its opening until its end."""
    events = [event for _, event in store.events(run_id)]
    ends = [at for at, one in enumerate(events) if isinstance(one, RoundClosed)]
    first = next(at for at in range(ends[-3], len(events)) if isinstance(events[at], RoundOpened))
    return [one for one in events[first : ends[-2] + 1] if type(one).__name__ != "RunStatusChanged"]


def repeat(source: Path, run_id: str, target: Path, rounds: int) -> dict[str, Any]:
    """Record so many rounds; return the sizes a client-round."""
    with Store.open(AggregatorHome.under(source).database, read_only=True) as recorded:
        events, row = recorded_round(recorded, run_id), recorded.run(run_id)
    template = Template(events, run_id)
    clients = sum(type(one).__name__ == "UpdateAccepted" for one in events)
    number = next(one.round for one in events if isinstance(one, RoundOpened))
    home = AggregatorHome.under(target, durable=False)
    raw: dict[str, Any] = dict(row.plan)
    plan = RunPlan.from_json({**raw, "run": {**raw["run"], "rounds": rounds + 1}})
    layout = Layout.from_json(row.layout)
    with Store.open(home.database, durable=False) as store:
        import numpy as np

        nothing = np.zeros(0, np.float32)
        made = submit(
            store, home, plan, FirstModel(layout, row.task_report, np.zeros(layout.size, np.float32), nothing)
        )
        if made != run_id:
            raise RuntimeError(f"the repeated run is {made}, the recorded one {run_id}")
        shutil.copytree(AggregatorHome.under(source).run(run_id), home.run(run_id), dirs_exist_ok=True)
        running = context(store, home, run_id)
        sizes, began = list[int](), time.process_time()
        size0 = store_bytes(home)
        for turn in range(1, rounds + 1):
            for some in template.after(turn - number):
                running.record(*some)
            if turn in (round(SHARE * rounds), rounds):
                gc.collect()
                sizes.append(status_bytes(os.getpid(), "VmRSS"))
        seconds = time.process_time() - began
    total = rounds * clients
    return {
        "client_rounds": total, "clients": clients, "rounds": rounds, "record_cpu_ms": 1000 * seconds / total,
        "store_bytes": (store_bytes(home) - size0) / total,
        "rss_bytes": max(0, sizes[1] - sizes[0]) / (total * (1 - SHARE)),
    }  # fmt: skip


def context(store: Store, home: AggregatorHome, run_id: str) -> RunContext:
    """Return the context of a run whose fleet is never called."""
    return RunContext(
        run_id,
        store,
        cast(Fleet, None),
        home,
        RealClock(),
        ConnectedDevices(),
        DeviceLeases(),
        RunCommands(),
        lambda event: None,
        mode_of,
    )


def store_bytes(home: AggregatorHome) -> int:
    """Return the size of the database's files."""
    return sum(path.stat().st_size for path in home.database.parent.glob(home.database.name + "*"))


def restart(target: Path, run_id: str) -> dict[str, Any]:
    """Rebuild the context of a run; return the seconds, and the memory that it took at most."""
    home = AggregatorHome.under(target, durable=False)
    with Store.open(home.database) as store:
        store.run(run_id)
        gc.collect()
        before, began, spent = status_bytes(os.getpid(), "VmRSS"), time.perf_counter(), time.process_time()
        running = context(store, home, run_id)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - spent
        peak = status_bytes(os.getpid(), "VmHWM")
        if running.run_state.version < 1:
            raise RuntimeError(f"{run_id} was not rebuilt: it has version {running.run_state.version}")
    return {"restart_s": seconds, "restart_cpu_s": cpu_s, "restart_mb": max(0, peak - before) / 1e6}


def main() -> None:
    """Run one of the two commands."""
    what, *words = sys.argv[1:]
    if what == "repeat":
        print(json.dumps(repeat(Path(words[0]), words[1], Path(words[2]), int(words[3]))))
    else:
        print(json.dumps(restart(Path(words[0]), words[1])))


if __name__ == "__main__":
    main()
