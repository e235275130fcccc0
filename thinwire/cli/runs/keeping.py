"""What a person keeps of runs: `thinwire runs tag`, `archive`, `unarchive` and `delete`.

The aggregator carries out a deletion if one is running, because it may hold replies of the run. Without one, this
process does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId

if TYPE_CHECKING:
    from thinwire.store import RunRow, Store

DELETED_S = 60.0  # for the aggregator to delete a run
SETTINGS = {"ignore_unknown_options": True}  # `-old` is a tag to remove, and no option
Tags = Annotated[list[str] | None, typer.Argument(metavar="+TAG | -TAG", help="tags to add (+) and to remove (-)")]
Yes = Annotated[bool, typer.Option("--yes", help="confirm the deletion; also take a queued run out of the queue")]


def tag(run_id: RunId, tags: Tags = None, json: Json = False, home: Home = None) -> None:
    """Add tags to a run and remove them; without tags, show those that it has."""
    from thinwire.cli.local_state import opened, operator
    from thinwire.core.errors import UsageError

    add, remove = list[str](), list[str]()
    for word in tags or []:
        if not word.startswith(("+", "-")):
            why, hint = "a tag is added with + and removed with -", f"thinwire runs tag {run_id} +{word}"
            raise UsageError(f"{word!r} says neither to add nor to remove", why=why, hint=hint)
        (add if word.startswith("+") else remove).append(word[1:])
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
    from thinwire.cli.local_state import alive, end_abandoned, opened, operator
    from thinwire.core.signals import until
    from thinwire.server.run_removal import require_deletable

    end_abandoned(home)
    with opened(home, read_only=False) as store:
        row = store.deleted_run(run_id) or store.run(run_id)
        require_deletable(row, with_queued=yes or sys.stdin.isatty())
        if not yes and row.deleted_at is None:
            _confirm(row)
        known = store.commands.pending_of("delete-run", row.run_id)  # one that was killed
        order = known.id if known else store.commands.add("delete-run", row.run_id, who=operator())
        is_done = bool(alive(home)) and until(lambda: store.commands.result(order) is not None, DELETED_S)
        if not is_done and not alive(home):
            _delete_here(store, home, row.run_id, known.who if known else operator(), order)
        result = store.commands.result(order)
    _tell(row, result, json)


def _confirm(row: RunRow) -> None:
    """Let a person confirm at a terminal that a run is deleted; raise `UsageError` elsewhere, and exit if the answer is no."""
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


def _delete_here(store: Store, home: Path | None, run_id: str, who: str, order: int) -> None:
    """Delete a run in this process, while no aggregator can start on the state directory."""
    from thinwire.cli.local_state import aggregator_home
    from thinwire.core.errors import Refused, ThinwireError
    from thinwire.core.statedir import lock_file
    from thinwire.server.run_removal import delete_run
    from thinwire.server.service import refused

    place = aggregator_home(home)
    with lock_file(place.lock):
        try:
            delete_run(store, place, run_id, who)
        except Refused as error:
            store.commands.answer(order, refused(error))
            raise
        except ThinwireError:
            raise  # the command stays, and the next aggregator tries again
        store.commands.answer(order, {"done": True})


def _tell(row: RunRow, result: dict[str, Any] | None, json: bool) -> None:
    """Print the result of a command to delete a run; raise the refusal of the aggregator."""
    from thinwire.core.errors import Refused

    if result is not None and not result.get("done"):
        raise Refused(str(result.get("error")), why=str(result.get("why")), hint=str(result.get("try")))
    if json:
        console.document({"run_id": row.run_id, "deleted": result is not None})
    elif result is not None:
        console.line(f"{row.run_id} is deleted")
        console.note("its row, the audit log and its entries in the privacy ledger stay")
    else:
        console.line(f"{row.run_id}: its aggregator is still deleting it")
