"""The routes of a run under /api/v1: its rounds, updates and clients, also as CSV, and pause, resume and stop.

The status of the aggregator and live events are here, too. Routes of other nouns are in files of their own
(`device_routes.py`, `user_routes.py`), and `access.py` has the least role of each.

One pattern for each kind of name in an address serves HTML pages and API alike. `Live` sends server-sent events to
browser tabs: the store is read four times a second, however many tabs are open. A tab receives only the latest status
and never a backlog. A slow tab misses what lies between, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

import thinwire
from thinwire.core.errors import ThinwireError
from thinwire.core.formatting import csv_cell
from thinwire.core.statedir import SWEEPS
from thinwire.reports.sweep_results import groups
from thinwire.store import RunCommand
from thinwire.web import round_schemas, schemas
from thinwire.web.access import API, ReaderDep, SettingsDep, StoreDep, Who, from_state, visitor
from thinwire.web.client_queries import ShownKey
from thinwire.web.connections import STILL_HERE, Places, Watch
from thinwire.web.problems import PROBLEMS
from thinwire.web.settings import aggregator

TICK_S = 0.25
MAX_TABS = 64
TABS_OF_ONE = 8  # browsers of a user: all tabs of one share a stream


@dataclass(frozen=True)
class News:
    """Holds the status of the aggregator and the store: `seq` changes with what may be shown.

    `aggregator` is running, gone or unknown. `down_since` is the moment when an aggregator that is down was last alive,
    wall clock; 0 if unknown. `store` is the error if the store could not be read. `acts` rises with changes outside the
    journal: approvals, refusals, tags. `pending` devices wait for approval. `heard` is the moment when the last
    contacts of all devices were last written. `alerts` are open, and nobody has acknowledged `unseen` of them;
    `alert_changes` rises with each change of one.
    `disk` says since when and why all runs are paused, if the disk is full.
    """

    seq: int = 0
    aggregator: str = "unknown"
    down_since: float = 0.0
    store: str = ""
    acts: int = 0
    pending: int = 0
    heard: float = 0.0
    alerts: int = 0
    unseen: int = 0
    alert_changes: int = 0
    disk: str = ""


class Live:
    """Keeps the event streams of all tabs. `look` is called in a thread; `closing` is True once the server ends."""

    def __init__(self, look: Callable[[], News], closing: Callable[[], bool] = lambda: False) -> None:
        self.look, self.closing = look, closing
        self.news, self.closed = News(), False
        self.tabs: set[asyncio.Event] = set()
        self.places = Places(MAX_TABS, TABS_OF_ONE)

    async def run(self) -> None:
        """Poll until the server ends, then end all streams."""
        while not self.closing():
            if self.tabs:
                await self._refresh()
            await asyncio.sleep(TICK_S)
        self.close()

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._wake()

    def told(self) -> dict[str, Any]:
        """Return the status now, with the server's time, as a page and its stream have it."""
        return {**asdict(self._read()), "now": time.time()}

    def _read(self) -> News:
        """Read the status; an error of the store becomes part of it."""
        try:
            return self.look()
        except ThinwireError as error:
            return replace(self.news, store=str(error))

    async def _refresh(self) -> None:
        """Read the status and wake the tabs if it changed."""
        news = await run_in_threadpool(self._read)
        if news != self.news:
            self.news = news
            self._wake()

    def _wake(self) -> None:
        """Wake the streams of all tabs."""
        for tab in self.tabs:
            tab.set()

    async def stream(self, still_known: Callable[[], bool], user: str = "") -> AsyncGenerator[str, None]:
        """Yield server-sent events: the status now, then each change.

        At each heartbeat `still_known` checks the session, and the stream ends if the session has.
        """
        tab, session = asyncio.Event(), Watch(still_known)
        with self.places.taken(user) as found:
            if not found:
                return
            self.tabs.add(tab)
            try:
                await self._refresh()
                tab.clear()  # before the message is made, so that a change during it is not lost
                yield "retry: 1000\n\n" + self._message()
                while not self.closed and await session.wait(tab):
                    changed = tab.is_set()
                    tab.clear()
                    if not self.closed:
                        yield self._message() if changed else STILL_HERE
            finally:
                self.tabs.discard(tab)

    def _message(self) -> str:
        """Return the status as a server-sent event."""
        said = {**asdict(self.news), "now": time.time()}
        return f"id: {self.news.seq}\nevent: news\ndata: {json.dumps(said)}\n\n"


STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not buffer the events


RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,80}$", description="an id, its unique beginning, or latest")]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
Since = Annotated[int, Query(ge=1, le=2**31 - 1, alias="from")]
Last = Annotated[int, Query(ge=1, le=2**31 - 1, alias="to")]
Change = Annotated[int, Query(ge=0, le=2**62)]
Chosen = Annotated[int, Query(ge=0, le=2**31 - 1, alias="round")]
First = Annotated[int, Query(ge=0, le=2**31 - 1)]
FirstClient = Annotated[int, Query(ge=0, le=2**31 - 1, alias="client")]
AnyClient = Annotated[int | None, Query(ge=0, le=2**31 - 1, alias="client")]
Count = Annotated[int, Query(ge=1, le=1000)]
OfRound = Annotated[int | None, Query(ge=1, le=2**31 - 1, alias="round")]
LiveDep = Annotated[Live, from_state("live")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/service")
def service(store: StoreDep, settings: SettingsDep) -> schemas.Service:
    """Return whether the aggregator is running, and where it listens."""
    state, about = aggregator(settings.lock)
    return schemas.Service(
        aggregator=state, listen=str(about.get("listen", "")), urls=[str(url) for url in about.get("urls") or ()],
        tls=bool(about.get("pin")), version=thinwire.__version__, seq=store.changes(), now=time.time(),
    )  # fmt: skip


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


@router.get("/live", response_class=StreamingResponse)
async def news(request: Request, live: LiveDep) -> Response:
    """Stream the status of aggregator and store: now, then each change."""
    seen = visitor(request)
    if refused := live.places.refusal(seen.person.user):
        return refused
    stream = live.stream(seen.still_known, seen.person.user)
    return StreamingResponse(stream, media_type="text/event-stream", headers=STREAM)


@router.get("/runs/{run_id}/rounds")
def rounds(reader: ReaderDep, run_id: RunId, response: Response, first: Since = 1) -> list[round_schemas.Round]:
    """Return the rounds of a run from a number on: at most 1000. The header `Link` names the next page, if any."""
    found, after = reader.rounds(run_id, first)
    response.headers.update(_next(after))
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
    response.headers.update(_next(after))
    return found


Row = TypeVar("Row")


def page_of(found: list[Row], first: int, count: int, response: Response) -> list[Row]:
    """Return `count` rows of `found`, which has one more if there is a next page; the header `Link` names that page."""
    if len(found) > count:
        response.headers["Link"] = f'<?first={first + count}&count={count}>; rel="next"'
    return found[:count]


def _next(after: int) -> dict[str, str]:
    """Return the header that names the next page, with the rounds from `after` on; none for 0.

    The address is relative to that of the request (RFC 3986, section 5.2), so that any prefix of a proxy works.
    """
    return {"Link": f'<?from={after}>; rel="next"'} if after else {}


def _once(found: BaseModel) -> Response:
    """Return a large answer as it is: FastAPI would check it against its schema again, as long as the read takes."""
    return Response(found.model_dump_json(), media_type="application/json")


@router.get("/runs/{run_id}/rounds.csv", response_class=Response, include_in_schema=False)
def rounds_csv(reader: ReaderDep, run_id: RunId) -> Response:
    """Return the rounds of a run, all of them."""
    found, after = reader.rounds(run_id)
    while after:
        more, after = reader.rounds(run_id, after)
        found += more
    return as_csv(found, round_schemas.Round, f"{run_id}-rounds")


@router.get("/runs/{run_id}/updates.csv", response_class=Response, include_in_schema=False)
def updates_csv(reader: ReaderDep, run_id: RunId, number: OfRound = None, first: Since = 1) -> Response:
    """Return the updates of one round, or of the rounds of a run from a number on, as `updates` does."""
    name = f"{run_id}-updates" if number is None else f"{run_id}-round-{number}"
    found, after = reader.updates(run_id, number, first)
    response = as_csv(found, round_schemas.Update, name)
    response.headers.update(_next(after))
    return response


@router.get("/runs/{run_id}/clients.csv", response_class=Response, include_in_schema=False)
def clients_csv(reader: ReaderDep, run_id: RunId, sort: ShownKey = "device", descending: bool = False) -> Response:
    """Return the clients of a run, in this order."""
    return as_csv(reader.clients(run_id, sort=sort, descending=descending).clients, schemas.Client, f"{run_id}-clients")


def as_csv(rows: Sequence[BaseModel], kind: type[BaseModel], name: str) -> Response:
    """Return rows as a CSV response with a column for each field.

    Dictionaries of numbers become a column for each key; other structures stay JSON.
    """
    return text_of([row.model_dump(mode="json") for row in rows], list(kind.model_fields), name)


def text_of(rows: Sequence[dict[str, object]], columns: Sequence[str], name: str) -> Response:
    """Return rows of JSON values as a CSV response; `columns` are those without any row."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row)) or list(columns)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in flat)
    said = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return Response(out.getvalue(), media_type="text/csv; charset=utf-8", headers=said)


def _flat(row: dict[str, object]) -> dict[str, object]:
    """Return a row with its dictionaries of numbers flattened."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict) and all(isinstance(v, int | float | None) for v in value.values()):
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, dict | list) else value
    return flat
