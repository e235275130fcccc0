"""The routes of runs under /api/v1: rounds, updates and clients, also as CSV, and pause, resume and stop.

Routes of other nouns are in files of their own (`device_routes.py`, `user_routes.py`), and `access.py` has the least
role of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from thinwire.core.statedir import SWEEPS
from thinwire.reports.sweep_results import groups
from thinwire.store import RunCommand
from thinwire.web import round_schemas, schemas
from thinwire.web.access import API, Number, ReaderDep, RunId, SettingsDep, StoreDep, Who
from thinwire.web.client_queries import ShownKey
from thinwire.web.problems import PROBLEMS
from thinwire.web.rows import First, as_csv, next_page, page_of, streamed_csv

Since = Annotated[int, Query(ge=1, le=2**31 - 1, alias="from")]
Last = Annotated[int, Query(ge=1, le=2**31 - 1, alias="to")]
Change = Annotated[int, Query(ge=0, le=2**62)]
Chosen = Annotated[int, Query(ge=0, le=2**31 - 1, alias="round")]
FirstClient = Annotated[int, Query(ge=0, le=2**31 - 1, alias="client")]
AnyClient = Annotated[int | None, Query(ge=0, le=2**31 - 1, alias="client")]
Count = Annotated[int, Query(ge=1, le=1000)]
OfRound = Annotated[int | None, Query(ge=1, le=2**31 - 1, alias="round")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/runs")
def runs(reader: ReaderDep, response: Response, first: First = 0, count: Count = 1000) -> list[schemas.Run]:
    """Return a page of the runs that are not archived, latest first. The header `Link` names the next page, if any."""
    return page_of(reader.runs(first, count + 1), first, count, response)


@router.get("/groups")
def sweep_groups(settings: SettingsDep) -> list[schemas.Group]:
    """Return the groups of runs that sweeps have made."""
    found = groups(settings.lock.parent / SWEEPS) if settings.lock else []
    return [schemas.Group(name=g.name, task=g.task, done=g.done, runs=g.runs, at=g.at) for g in found]


@router.get("/runs/{run_id}")
def run(reader: ReaderDep, run_id: RunId) -> schemas.RunPage:
    """Return a run with its plan, its progress and its figures."""
    return reader.run(run_id)


@router.get("/runs/{run_id}/view", response_model=round_schemas.RunView)
def view(
    reader: ReaderDep, run_id: RunId, since: Change = 0, number: Chosen = 0, held: Change = 0,
    first_client: AnyClient = None, sort: ShownKey = "device", descending: bool = False,
) -> Response:  # fmt: skip
    """Return what the run's page shows, or what has changed of it `since` a change; its clients are sorted."""
    return _once(reader.view(run_id, since, number, held, first_client, sort, descending))


@router.post("/runs/{run_id}/{verb}", status_code=202)
def command_run(store: StoreDep, run_id: RunId, verb: RunCommand, who: Who) -> schemas.LeftCommand:
    """Command the aggregator to pause, resume or stop a run."""
    return schemas.LeftCommand(command=store.command_run(verb, run_id, who))


@router.get("/runs/{run_id}/rounds")
def rounds(reader: ReaderDep, run_id: RunId, response: Response, first: Since = 1) -> list[round_schemas.Round]:
    """Return the rounds of a run from a number on: at most 1000. The header `Link` names the next page, if any."""
    found, after = reader.rounds(run_id, first)
    response.headers.update(next_page(after))
    return found


@router.get("/runs/{run_id}/round-summaries")
def round_summaries(
    reader: ReaderDep, run_id: RunId, first: Since = 1, last: Last = 2**31 - 1
) -> list[round_schemas.RoundSummary]:
    """Return rounds as rows of a table, at most 120."""
    return reader.round_summaries(run_id, first, last)


@router.get("/runs/{run_id}/heat", response_model=round_schemas.Heat)
def heat(reader: ReaderDep, run_id: RunId, first: Since = 1, last: Last = 2**31 - 1) -> Response:
    """Return the outcomes and times of clients in these rounds, at most 60: the newest of them."""
    return _once(reader.heat(run_id, first, last))


@router.get("/runs/{run_id}/clients")
def clients(
    reader: ReaderDep, run_id: RunId, first: FirstClient = 0, count: Count = 50, sort: ShownKey = "device",
    descending: bool = False,
) -> schemas.Clients:  # fmt: skip
    """Return a page of the clients of a run, in this order."""
    return reader.clients(run_id, first, count, sort, descending)


@router.get("/runs/{run_id}/rounds/{number}", response_model=round_schemas.RoundPage)
def one_round(reader: ReaderDep, run_id: RunId, number: Number) -> Response:
    """Return a round with its updates and where its time went."""
    return _once(reader.round(run_id, number))


@router.get("/runs/{run_id}/updates")
def updates(
    reader: ReaderDep, run_id: RunId, response: Response, number: OfRound = None, first: Since = 1
) -> list[round_schemas.Update]:
    """Return the updates of one round, or of the rounds of a run from a number on: at most 5000 of whole rounds.

    The header `Link` names the next page, if there is one.
    """
    found, after = reader.updates(run_id, number, first)
    response.headers.update(next_page(after))
    return found


def _once(found: BaseModel) -> Response:
    """Return a large answer as it is: FastAPI would check it against its schema again, as long as the read takes."""
    return Response(found.model_dump_json(), media_type="application/json")


@router.get("/runs/{run_id}/rounds.csv", response_class=Response, include_in_schema=False)
def rounds_csv(store: StoreDep, reader: ReaderDep, run_id: RunId) -> Response:
    """Return the rounds of a run, all of them."""
    found = store.run(run_id).run_id  # `latest` may be another run before the last page is read

    def pages() -> Iterator[list[round_schemas.Round]]:
        after = 1
        while after:
            page, after = reader.rounds(found, after)
            yield page

    return streamed_csv(pages, round_schemas.Round, f"{run_id}-rounds")


@router.get("/runs/{run_id}/updates.csv", response_class=Response, include_in_schema=False)
def updates_csv(reader: ReaderDep, run_id: RunId, number: OfRound = None, first: Since = 1) -> Response:
    """Return the updates of one round, or of the rounds of a run from a number on, as `updates` does."""
    name = f"{run_id}-updates" if number is None else f"{run_id}-round-{number}"
    found, after = reader.updates(run_id, number, first)
    response = as_csv(found, round_schemas.Update, name)
    response.headers.update(next_page(after))
    return response


@router.get("/runs/{run_id}/clients.csv", response_class=Response, include_in_schema=False)
def clients_csv(reader: ReaderDep, run_id: RunId, sort: ShownKey = "device", descending: bool = False) -> Response:
    """Return the clients of a run, in this order."""
    return as_csv(reader.clients(run_id, sort=sort, descending=descending).clients, schemas.Client, f"{run_id}-clients")
