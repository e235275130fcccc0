"""Rows of a table as a response: a page at a time, and all of them as CSV."""

from __future__ import annotations

import asyncio
import csv
import io
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient

from tests.support.api_answers import DEVICES, Told
from tests.support.filled_store import add_devices, new_run
from thinwire.core.events import Evaluated
from thinwire.store import Store
from thinwire.web import run_queries
from thinwire.web.round_schemas import Round
from thinwire.web.rows import as_csv
from thinwire.web.run_queries import Reader
from thinwire.web.run_routes import rounds_csv


def get(page: TestClient, path: str) -> Any:
    answer = page.get(f"/api/v1/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("noun", "name"), [("runs", "run_id"), ("devices", "device")])
def test_runs_and_devices_are_read_a_page_at_a_time(store: Store, page: TestClient, noun: str, name: str):
    add_devices(store, ["pi-01", "pi-02", "pi-03"], 1000.0)
    for _ in range(3):
        new_run(store)
    every = [row[name] for row in get(page, noun)]
    assert len(every) == 3
    answer = page.get(f"/api/v1/{noun}?count=2")
    assert [row[name] for row in answer.json()] == every[:2]
    assert answer.headers["link"] == '<?first=2&count=2>; rel="next"'
    last = page.get(answer.url.join(answer.links["next"]["url"]))
    assert [row[name] for row in last.json()] == every[2:]
    assert "link" not in last.headers
    assert "link" not in page.get(f"/api/v1/{noun}?count=3").headers
    assert page.get(f"/api/v1/{noun}?count=0").status_code == 422


def test_csv_holds_the_same_rows(page: TestClient, told: Told):
    answer = page.get(f"/api/v1/runs/{told.run_id}/rounds.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == 12
    assert float(rows[0]["metrics.accuracy"]) == get(page, f"runs/{told.run_id}/rounds")[0]["metrics"]["accuracy"]
    updates = list(csv.DictReader(io.StringIO(page.get(f"/api/v1/runs/{told.run_id}/updates.csv?round=4").text)))
    assert [row["device"] for row in updates] == DEVICES
    clients = list(csv.DictReader(io.StringIO(page.get(f"/api/v1/runs/{told.run_id}/clients.csv").text)))
    assert [row["device"] for row in clients] == DEVICES
    assert page.get("/api/v1/devices.csv").text.count("\n") == 9


def test_the_rounds_of_a_long_run_come_a_page_at_a_time_and_as_one_csv(
    page: TestClient, told: Told, monkeypatch: pytest.MonkeyPatch
):
    whole = get(page, f"runs/{told.run_id}/rounds")
    monkeypatch.setattr(run_queries, "MAX_ROUNDS", 5)
    address, numbers = f"/api/v1/runs/{told.run_id}/rounds", list[int]()
    while address:
        answer = page.get(address)
        numbers += [one["round"] for one in answer.json()]
        address = str(answer.url.join(answer.links["next"]["url"])) if answer.links else ""
    assert numbers == [one["round"] for one in whole] == list(range(1, 13))
    rows = list(csv.DictReader(io.StringIO(page.get(f"/api/v1/runs/{told.run_id}/rounds.csv").text)))
    assert [int(row["round"]) for row in rows] == numbers


@pytest.mark.parametrize("kind", ["", ".csv"])
def test_the_updates_of_a_long_run_come_a_page_at_a_time_and_the_answer_names_the_next(
    page: TestClient, told: Told, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(run_queries, "MAX_UPDATES", 20)
    monkeypatch.setattr(run_queries, "ROUNDS_READ", 5)
    address, found, pages = f"/api/v1/runs/{told.run_id}/updates{kind}", list[tuple[int, str]](), list[int]()
    while address:
        answer = page.get(address)
        rows = list(csv.DictReader(io.StringIO(answer.text))) if kind else answer.json()
        found += [(int(row["round"]), row["device"]) for row in rows]
        pages.append(len(rows))
        address = str(answer.url.join(answer.links["next"]["url"])) if "link" in answer.headers else ""
    assert found == [(one.round, one.device) for one in store.updates(told.run_id)]
    assert len(pages) > 3
    assert max(pages) <= 20, "pages have whole rounds"
    monkeypatch.setattr(run_queries, "MAX_UPDATES", 3)
    (first,) = {row["round"] for row in page.get(f"/api/v1/runs/{told.run_id}/updates").json()}
    assert first == 1, "one round at least"
    assert "link" not in page.get(f"/api/v1/runs/{told.run_id}/updates?round=3").headers


def test_the_csv_of_a_long_run_is_read_a_page_at_a_time_and_has_the_columns_of_all_rounds(
    page: TestClient, told: Told, store: Store, monkeypatch: pytest.MonkeyPatch
):
    told.say(Evaluated(told.now, 11, 11, {"loss": 0.5, "f1": 0.25}, {"loss": [0.1, 0.9]}, 9, 1))
    whole = bytes(as_csv(Reader(store).rounds(told.run_id)[0], Round, "").body)
    assert b"metrics.f1" in whole, "which no round of the first page has"
    monkeypatch.setattr(run_queries, "MAX_ROUNDS", 5)
    assert page.get(f"/api/v1/runs/{told.run_id}/rounds.csv").content == whole
    read = list[int]()

    class Pages(Reader):
        def rounds(self, name: str, first: int = 1) -> tuple[list[Round], int]:
            read.append(first)
            return super().rounds(name, first)

    async def received() -> list[str]:
        response = rounds_csv(store, Pages(store), "latest")
        assert isinstance(response, StreamingResponse)
        assert read == [1, 6, 11], "for the columns"
        pieces = list[str]()
        async for piece in response.body_iterator:
            assert read[3:] == [1, 6, 11][: len(pieces) + 1]
            pieces.append(str(piece))
            if len(pieces) == 1:  # it does not become the latest of this response
                new_run(store)
        return pieces

    assert "".join(asyncio.run(received())).encode() == whole
