"""The routes by which a person acts on a run that is over, or puts it in order: tags, archive, more rounds, deletion.

Tags and the archive take effect at once. More rounds and a deletion are commands in the store: the aggregator carries
them out, and `commands/{number}` has the result. (Pause, resume and stop: web/run_routes.py.)
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from thinwire.core.errors import Refused
from thinwire.core.events import ENDED
from thinwire.core.formatting import with_home
from thinwire.store import RunRow, Store
from thinwire.web.access import API, Number, RunId, SettingsDep, StoreDep, Who
from thinwire.web.problems import PROBLEMS
from thinwire.web.schemas import Answer, Body, LeftCommand

MAX_ROUNDS = 1_000_000
Tag = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]
Key = Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z0-9_]+)+$", max_length=64)]


class Tags(Body):
    """Holds tags to add and to remove."""

    add: list[Tag] = Field([], max_length=16)
    remove: list[Tag] = Field([], max_length=16)


class Extension(Body):
    """Holds more rounds, and keys of the plan to change: values in TOML's notation by `section.key`."""

    rounds: int = Field(ge=1, le=MAX_ROUNDS)
    sets: dict[Key, Annotated[str, Field(max_length=200)]] = Field({}, max_length=32)


class Deletion(Body):
    """Holds the id of the run once more, so that nobody deletes a run by a slip."""

    run_id: str = Field(max_length=80)


class Kept(Answer):
    """Holds the tags of a run, and whether it is in the archive."""

    run_id: str
    tags: list[str]
    archived: bool


class CommandProgress(Answer):
    """Holds the progress of a command: `done` is null until it is answered; `run_id` is the run that it made."""

    command: int
    done: bool | None
    run_id: str = ""
    detail: str = ""
    why: str = ""
    hint: str = Field("", alias="try")


router = APIRouter(prefix=API, responses=PROBLEMS)  # its routes come before the one of `/runs/{run_id}/{verb}`


@router.post("/runs/{run_id}/tags")
def tags(store: StoreDep, run_id: RunId, wanted: Tags, who: Who) -> Kept:
    """Add tags to a run and remove others; this takes effect at once."""
    row = store.run(run_id)
    store.tag_run(row.run_id, wanted.add, wanted.remove, who)
    return kept(store.run(row.run_id))


@router.post("/runs/{run_id}/archive")
def archive(store: StoreDep, run_id: RunId, who: Who) -> Kept:
    """Put a run into the archive; lists show it only there."""
    return _archived(store, run_id, True, who)


@router.post("/runs/{run_id}/unarchive")
def unarchive(store: StoreDep, run_id: RunId, who: Who) -> Kept:
    """Take a run out of the archive."""
    return _archived(store, run_id, False, who)


def _archived(store: Store, run_id: str, is_archived: bool, who: str) -> Kept:
    row = store.run(run_id)
    store.archive_run(row.run_id, is_archived, who)
    return kept(store.run(row.run_id))


@router.post("/runs/{run_id}/extend", status_code=202)
def extend(store: StoreDep, run_id: RunId, wanted: Extension, who: Who) -> LeftCommand:
    """Command more rounds of a run that is over."""
    row = ended(store.run(run_id), "gets no more rounds")
    return LeftCommand(command=store.commands.add("extend-run", row.run_id, wanted.model_dump(), who))


@router.post("/runs/{run_id}/delete", status_code=202)
def delete(store: StoreDep, run_id: RunId, wanted: Deletion, who: Who) -> LeftCommand:
    """Delete a run that is over; the body repeats its id."""
    row = ended(store.run(run_id), "is not deleted")
    if wanted.run_id != row.run_id:
        why = f"the body repeats {wanted.run_id!r}"
        raise Refused(f"{row.run_id} is not deleted", why=why, hint=f"repeat its id: {row.run_id}")
    known = store.commands.pending_of("delete-run", row.run_id)
    return LeftCommand(command=known.id if known else store.commands.add("delete-run", row.run_id, who=who))


@router.get("/commands/{number}")
def command_progress(store: StoreDep, settings: SettingsDep, number: Number) -> CommandProgress:
    """Return whether the aggregator has carried out a command, by its number."""
    found = store.commands.result(number)
    if found is None:
        return CommandProgress(command=number, done=None, **{"try": ""})
    keys = {"run_id": "run_id", "detail": "error", "why": "why", "try": "try"}
    said = {name: str(found.get(key, "")) for name, key in keys.items()}
    said["try"] = with_home(said["try"], settings.home_option)
    return CommandProgress(command=number, done=bool(found.get("done")), **said)


def kept(row: RunRow) -> Kept:
    """Return the tags of a run, and whether it is in the archive."""
    return Kept(run_id=row.run_id, tags=row.tags, archived=row.archived_at is not None)


def ended(row: RunRow, what: str) -> RunRow:
    """Return a run that is over; raise `Refused` for any other."""
    if row.status in ENDED:
        return row
    raise Refused(f"{row.run_id} {what}", why=f"it is {row.status}", hint=f"thinwire runs stop {row.run_id}")
