"""Commands that a person gives about a run: stop, pause and resume. The aggregator carries them out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId
from thinwire.cli.runs.render import standing
from thinwire.core.events import ENDED

if TYPE_CHECKING:
    from thinwire.store import RunOrder, RunRow, Store

WAIT_S = 30.0  # for the aggregator to carry out a command


def stop(
    run_id: RunId,
    after_round: Annotated[bool, typer.Option("--after-round", help="let the open round end first")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Stop a run for good, now or after its open round; its models stay."""
    from thinwire.cli.local_state import end_abandoned, opened, operator
    from thinwire.core.signals import until

    end_abandoned(home)
    with opened(home, read_only=False) as store:
        row = store.run(run_id)
        if row.status not in ENDED:
            store.order("stop-after-round" if after_round else "stop", row.run_id, operator())
            is_over = until(lambda: store.run(row.run_id).status in ENDED, WAIT_S)
            if not is_over and _nobody_serves(row) and not after_round:
                _stop_here(store, row.run_id)
        row = store.run(row.run_id)
    if json:
        console.document({"run_id": row.run_id, "status": row.status})
    elif row.status in ENDED:
        console.line(f"{row.run_id} {standing(row)}")
    elif after_round:
        console.line(f"{row.run_id} {row.status}: it will stop when its open round closes")
    else:
        console.line(f"{row.run_id} will stop as soon as its aggregator runs and sees the command")


def pause(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Pause a run when its open round closes: no device gets an assignment of it until it is resumed."""
    _order("pause", run_id, json, home)


def resume(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Let a paused run go on."""
    _order("resume", run_id, json, home)


def _order(verb: RunOrder, run_id: str, json: bool, home: Path | None) -> None:
    """Leave a command about a run for the aggregator, and wait until it has carried the command out."""
    from thinwire.cli.local_state import opened
    from thinwire.core.signals import until

    with opened(home, read_only=False) as store:
        run_id = store.run(run_id).run_id
        store.order(verb, run_id)
        is_done = until(lambda: (store.run(run_id).status == "paused") == (verb == "pause"), WAIT_S)
        row = store.run(run_id)
    if json:
        console.document({"run_id": row.run_id, "status": row.status})
    elif is_done:
        console.line(f"{row.run_id} {standing(row)}")
    else:
        when = " when its open round closes" if verb == "pause" else ""
        console.line(f"{row.run_id} {row.status}: its aggregator will {verb} it{when}")


def _nobody_serves(row: RunRow) -> bool:
    """Return True if no aggregator will ever carry out a command about this run."""
    return row.source == "sim" or row.status == "preparing"


def _stop_here(store: Store, run_id: str) -> None:
    """Close a run by the order of a person: its own process does not respond and may have died elsewhere."""
    import time

    from thinwire.core.events import RunStatusChanged
    from thinwire.server.command_queue import CommandQueue
    from thinwire.server.run_end import close_undriven

    said = "stopped by a person; the process that simulated it or handed it over did not answer"
    close_undriven(store, run_id, RunStatusChanged(time.time(), "stopped", said, 10))
    CommandQueue(store.commands).answer("stop-run", run_id)
