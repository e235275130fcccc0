"""Kill the processes of three runs that go on at once, and count what was lost or counted twice.

    python -m benchmarks.several_kills [--preset tiny|small|full] --json

The aggregator and the clients are real processes. Again and again one of them, drawn by a seed, gets SIGKILL at a
moment that nothing was told of, and is started again. When all runs are over, the journal is read.

| figure | meaning |
|---|---|
| `lost_updates` | updates that were accepted, and neither aggregated nor dropped for a stated reason |
| `double_counts` | updates that were aggregated more than once, and second ones of a device assigned in one round |
| `runs_done` | runs that made all their steps |
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import note
from benchmarks.entry import Measured, run_in_folder
from tests.support.processes import Site, kill
from thinwire.core.events import Event, RoundClosed, RoundResumed, UpdateAccepted, UpdateAggregated, UpdateDropped

RUNS, CLIENTS, SEED = 3, 3, 23
LONGEST_S = 1.0  # between the end of a round and the kill: longer than a round takes


@dataclass(frozen=True)
class Preset:
    """Sets how many processes are killed, and how many rounds each run has."""

    kills: int
    rounds: int


PRESETS = {"tiny": Preset(2, 15), "small": Preset(6, 20), "full": Preset(20, 60)}


def measure(preset: Preset, folder: Path) -> Measured:
    """Kill and restart until all kills are done, then read the journals."""
    draw, site = random.Random(SEED), Site(folder / "home")
    rows: list[dict[str, Any]] = []
    try:
        site.start_aggregator()
        names = [f"pi-{number}" for number in range(CLIENTS)]
        clients = {name: _client(site, number, name) for number, name in enumerate(names)}
        site.until(lambda: len(site.online()) == CLIENTS, "all clients are online")
        runs = [site.begin(f"run.rounds={preset.rounds}") for _ in range(RUNS)]
        for _ in range(preset.kills):
            before = _closed(site, runs)
            site.until(lambda before=before: _closed(site, runs) > before, "a round closes")  # type: ignore[misc]
            wait_s = draw.uniform(0.0, LONGEST_S)
            time.sleep(wait_s)
            victim = draw.choice(["aggregator", "aggregator", *names])
            if victim == "aggregator":
                assert site.aggregator is not None
                kill(site.aggregator)
                site.start_aggregator()
            else:
                kill(clients[victim])
                clients[victim] = _client(site, names.index(victim), victim)
            rows.append({"victim": victim, "after_s": wait_s, "closed": _closed(site, runs)})
            note(f"killed {victim} {wait_s:.2f} s after a round closed; {rows[-1]['closed']} rounds are closed")
        over = [site.until_done(run_id) for run_id in runs]
        counts = [judged(site.events(run_id)) for run_id in runs]
    finally:
        site.close()
    figures: dict[str, float] = {"runs_done": sum(row.status == "done" for row in over)}
    for name in ("lost_updates", "double_counts"):
        figures[name] = sum(one[name] for one in counts)
    return rows, figures


def _client(site: Site, number: int, name: str) -> Any:
    return site.start_client(name, number, CLIENTS, "--threads", "1")


def _closed(site: Site, runs: Sequence[str]) -> int:
    return sum(site.run(run_id).rounds_closed for run_id in runs)


def judged(events: Sequence[Event]) -> dict[str, int]:
    """Return what was lost and what was counted twice in the journal of one run.

    >>> judged([])
    {'lost_updates': 0, 'double_counts': 0}
    """
    accepted = {one.update_id: (one.assignment_round, one.device) for one in events if isinstance(one, UpdateAccepted)}
    sums = dict[int, Counter[str]]()
    for one in events:
        if isinstance(one, RoundResumed):
            sums.pop(one.round, None)  # the sum died with its process, and is made again from the spool
        elif isinstance(one, UpdateAggregated):
            sums.setdefault(one.round, Counter())[one.update_id] += 1
    aggregated = sum(sums.values(), Counter[str]())
    dropped = {one.update_id for one in events if isinstance(one, UpdateDropped)}
    closed = [one for one in events if isinstance(one, RoundClosed)]
    dropped |= {update_id for one in closed for update_id in one.dropped}
    twice = sum(count - 1 for count in aggregated.values())
    devices = Counter(accepted[update_id] for update_id in aggregated if update_id in accepted)
    twice += sum(count - 1 for count in devices.values())
    return {"lost_updates": len(accepted.keys() - aggregated.keys() - dropped), "double_counts": twice}


if __name__ == "__main__":
    run_in_folder("several_kills", __doc__, PRESETS, measure)
