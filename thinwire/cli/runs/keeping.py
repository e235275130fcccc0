"""Keep or drop runs: `thinwire runs tag`, `archive`, `unarchive`, `delete` and `extend`.

A running aggregator deletes and extends runs, because it may hold replies of them. Without one, this process does. Both
are commands in the store first, so that a crash loses none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId, Sets, Tags, overrides, tag_changes
from thinwire.core.signals import until

if TYPE_CHECKING:
    from thinwire.store import Order, RunRow, Store

CARRIED_OUT_S = 60.0  # for the aggregator to carry a command out
Yes = Annotated[bool, typer.Option("--yes", help="confirm the deletion; also take a queued run out of the queue")]


def tag(run_id: RunId, tags: Tags = None, json: Json = False, home: Home = None) -> None:
    """Add tags to a run and remove them; without tags, show those that it has."""
    from thinwire.cli.local_state import opened, operator

    add, remove = tag_changes(tags, f"thinwire runs tag {run_id}")
    with opened(home, read_only=not (add or remove)) as store:
        row = store.run(run_id)
        found = store.tag_run(row.run_id, add, remove, operator()) if add or remove else row.tags
    if json:
        console.document({"run_id": row.run_id, "tags": found})
    else:
        console.line(f"{row.run_id}  {' '.join(found) or 'no tags'}")


def archive(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Hide a run that is over from lists; it can still be read."""
    _archive(run_id, True, json, home)


def unarchive(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Show an archived run in lists again."""
    _archive(run_id, False, json, home)


def _archive(run_id: str, is_archived: bool, json: bool, home: Path | None) -> None:
    from thinwire.cli.local_state import opened, operator

    with opened(home, read_only=False) as store:
        row = store.run(run_id)
        store.archive_run(row.run_id, is_archived, operator())
    if json:
        console.document({"run_id": row.run_id, "archived": is_archived})
    elif is_archived:
        console.line(f"{row.run_id} is archived")
        console.note("it is in: thinwire runs list --archived")
    else:
        console.line(f"{row.run_id} is in the lists again")


def delete(run_id: RunId, yes: Yes = False, json: Json = False, home: Home = None) -> None:
    """Delete a run that is over: its models, rounds, updates and events.

    Its row, the audit log and all entries of the privacy ledger stay, and its id is never given again.
    """
    from thinwire.cli.local_state import aggregator_home, end_abandoned, opened
    from thinwire.server.ended_runs import delete_run, require_deletable

    end_abandoned(home)
    with opened(home, read_only=False) as store:
        row = store.deleted_run(run_id) or store.run(run_id)
        require_deletable(row, with_queued=yes or sys.stdin.isatty())
        if not yes and row.deleted_at is None:
            _confirm(row)
        place = aggregator_home(home)
        result = carried_out(
            store, home, "delete-run", row.run_id, {}, lambda order: delete_run(store, place, row.run_id, order.who)
        )
    if json:
        console.document({"run_id": row.run_id, "deleted": result is not None})
    elif result is not None:
        console.line(f"{row.run_id} is deleted")
        console.note("its row, the audit log and its entries in the privacy ledger stay")
    else:
        console.line(f"{row.run_id}: its aggregator is still deleting it")


def extend(
    run_id: RunId,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="number of more rounds")],
    sets: Sets = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Give a run that is over more rounds: versions and round numbers go on.

    Devices begin with residual 0; the schedule of the learning rate keeps its number of rounds unless --set.
    """
    from thinwire.cli.local_state import again, aggregator_home, alive, end_abandoned, opened
    from thinwire.server.ended_runs import extend_run

    end_abandoned(home)
    changes = overrides(sets)
    args = {"rounds": rounds, "sets": changes}
    with opened(home, read_only=False) as store:
        row, place = store.run(run_id), aggregator_home(home)

        def here(order: Order) -> None:
            extend_run(store, place, row.run_id, rounds, changes, order.who, order.id)

        result = carried_out(store, home, "extend-run", row.run_id, args, here)
        row = store.run(row.run_id)
    if json:
        console.document({"run_id": row.run_id, "status": row.status, "rounds_total": row.rounds_total})
    elif result is None:
        console.line(f"{row.run_id}: its aggregator has not seen the command yet")
    else:
        console.line(f"{row.run_id} is queued for {rounds} more rounds, to {row.rounds_total} in all")
        console.note("its devices begin with residual 0")
        if alive(home) is None:
            console.note(f"no aggregator is running: {again('aggregator start', home)}")


def carried_out(
    store: Store, home: Path | None, kind: str, run_id: str, args: Mapping[str, Any], here: Callable[[Order], object]
) -> dict[str, Any] | None:
    """Leave a command for the running aggregator, wait for its result, and return it; None if it takes too long.

    Without an aggregator `here` carries the command out, while none can start on the state directory. A command that
    was left by an earlier call, and is the same, is completed instead of another one. A refusal is raised, and so is
    `Unreachable` if the aggregator does not respond.
    """
    from thinwire.cli.local_state import aggregator_home, alive, operator, require_responding
    from thinwire.core.errors import NotWritten, Refused, ThinwireError
    from thinwire.core.statedir import lock_file

    require_responding(home)
    known = store.commands.pending_of(kind, run_id)
    if known is None or known.args != args:
        number = store.commands.add(kind, run_id, args, operator())
        known = next(one for one in store.commands.pending() if one.id == number)
    order = known
    until(lambda: store.commands.result(order.id) is not None or not alive(home), CARRIED_OUT_S)
    if store.commands.result(order.id) is None and not alive(home):
        with lock_file(aggregator_home(home).lock):
            try:
                here(order)
            except NotWritten:
                raise  # the command stays, and the next aggregator tries again
            except ThinwireError as error:
                store.commands.answer(order.id, error.as_result())
                raise
            store.commands.answer(order.id, {"done": True})
    result = store.commands.result(order.id)
    if result is not None and not result.get("done"):
        raise Refused(str(result.get("error")), why=str(result.get("why")), hint=str(result.get("try")))
    return result


def _confirm(row: RunRow) -> None:
    """Let a person confirm at a terminal that a run is deleted, else exit; raise `UsageError` without a terminal."""
    from thinwire.core.errors import UsageError
    from thinwire.core.formatting import counted

    if not sys.stdin.isatty():
        raise UsageError(
            f"{row.run_id} is not deleted without --yes",
            why="nothing brings its models and events back, and there is no terminal to confirm it at",
            hint=f"thinwire runs delete {row.run_id} --yes",
        )
    what = f"its models, {counted(row.rounds_closed, 'round')} and events; nothing brings them back"
    if not typer.confirm(f"Delete {row.run_id} ({row.status}): {what}?"):
        console.line(f"{row.run_id} stays")
        raise typer.Exit(1)
