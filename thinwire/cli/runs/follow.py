"""Following a run by its journal: lines to stderr as rounds close, with a live sentence below where a terminal is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.interrupts import remembered
from thinwire.cli.places import absent, alive, end_abandoned, way_back
from thinwire.cli.runs.rounds import Teller
from thinwire.store.queue import behind

if TYPE_CHECKING:
    from collections.abc import Callable

    from thinwire.store import Store

LOOK_S = 0.2
ALIVE_S = 3.0  # how often it is looked whether the aggregator lives


def follow(store: Store, run_id: str, home: Path | None = None, watch_aggregator: bool = True) -> int:
    """Tell a run until it is over; gives its exit code. KeyboardInterrupt leaves the run as it is."""
    teller, seen, looked, gone = Teller(), 0, float("-inf"), ""
    with screen() as (tell, show), remembered() as look:
        while True:
            look()
            for seq, event in store.events(run_id, after=seen):
                seen = seq
                for line in teller.hear(event):
                    tell(line)
            if teller.over:
                break
            if not watch_aggregator and time.monotonic() - looked > ALIVE_S:
                looked = time.monotonic()
                end_abandoned(home)
            if watch_aggregator and time.monotonic() - looked > ALIVE_S:
                was_gone, looked = gone, time.monotonic()
                gone = "" if alive(home) else was_gone or absent(home)
                if gone and not was_gone:
                    tell(f"{gone}; the run goes on when one does: {way_back(home)}")
                elif was_gone and not gone:
                    tell("an aggregator is running again")
            waits = behind(store.run(run_id), store.line()) if teller.status == "queued" else ""
            show(f"{run_id}: {gone or waits or teller.now}")
            time.sleep(LOOK_S)
        tell(f"{run_id} {teller.status}: {teller.text}")
    return teller.exit_code


@contextmanager
def screen() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(tell, show): `tell` adds a line for good, `show` replaces the live sentence; without a terminal only changes."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, highlight=False)
        with console.status("") as status:
            yield (lambda text: console.print(text, markup=False)), (lambda text: status.update(Text(text)))
        return
    shown = [""]

    def show(text: str) -> None:
        if "waiting" in text and text != shown[0]:  # a log is told why nothing happens, and not each reply
            print(text, file=sys.stderr, flush=True)
        shown[0] = text

    yield (lambda text: print(text, file=sys.stderr, flush=True)), show
