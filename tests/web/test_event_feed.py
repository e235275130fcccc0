"""The journal as a live feed: what a reader gets, resumes and misses, and what it must not learn."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.api_answers import DEVICES, Told
from tests.support.browsing import Open, axe, overflow
from tests.support.filled_store import add_devices, new_run
from tests.support.serving import showing
from thinwire.core.errors import NotFound
from thinwire.store import Store
from thinwire.web import connections, event_feed
from thinwire.web.connections import MAX_STRANGERS
from thinwire.web.event_feed import MAX_READERS, READERS_OF_ONE, EventFeeds, RunFeed
from thinwire.web.live import MAX_TABS

PATIENCE_S = 20.0
PRIVACY = '[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\nsampling_rate = 0.5\n'


async def taken(stream: AsyncGenerator[str, None], count: int) -> list[dict[str, str]]:
    """The next messages of a stream, by their fields; comments and `retry` are left out."""
    found: list[dict[str, str]] = []
    while len(found) < count:
        for block in (await asyncio.wait_for(anext(stream), PATIENCE_S)).split("\n\n"):
            said = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith((":", "retry")))
            found += [said] if said else []
    return found


def followed(store: Store, steps):
    """Run `steps` with feeds that look at the store."""

    async def go() -> None:
        over = False
        feeds = EventFeeds(store, lambda: over)
        looking = asyncio.create_task(feeds.run())
        try:
            await steps(feeds)
        finally:
            over = True
            await looking

    asyncio.run(go())


def test_all_readers_get_each_event_once_in_order(store: Store, run: Told):
    async def steps(feeds: EventFeeds) -> None:
        feed = await feeds.of(run.run_id)
        before = feed.count
        streams = [feeds.stream(feed, "", lambda: True) for _ in range(3)]
        for stream in streams:
            await anext(stream)  # `retry`: it is subscribed
        run.status("paused", "paused by a person")
        run.status("running", "goes on")
        for stream in streams:
            first, second = await taken(stream, 2)
            assert [json.loads(one["data"])["fields"]["status"] for one in (first, second)] == ["paused", "running"]
            assert first["id"] == f"{feed.name}-{before + 1}"

    followed(store, steps)


def test_a_reader_that_comes_back_gets_what_it_missed(store: Store, run: Told):
    async def steps(feeds: EventFeeds) -> None:
        feed = await feeds.of(run.run_id)
        stream = feeds.stream(feed, "", lambda: True)
        await anext(stream)
        run.status("paused", "one")
        (first,) = await taken(stream, 1)
        await stream.aclose()
        run.status("running", "two")
        run.status("paused", "three")
        again = feeds.stream(await feeds.of(run.run_id), first["id"], lambda: True)
        assert [json.loads(one["data"])["fields"]["text"] for one in await taken(again, 2)] == ["two", "three"]
        await again.aclose()

    followed(store, steps)


@pytest.mark.parametrize("last", ["0123456789abcdef-3", "x", "-1", "9" * 60, "{name}-999999"])
def test_an_id_that_the_feed_does_not_have_begins_with_reset(store: Store, run: Told, last: str):
    async def steps(feeds: EventFeeds) -> None:
        feed = await feeds.of(run.run_id)
        stream = feeds.stream(feed, last.format(name=feed.name), lambda: True)
        (said,) = await taken(stream, 1)
        assert (said["event"], said["id"]) == ("reset", f"{feed.name}-{feed.count}")
        await stream.aclose()

    followed(store, steps)


def test_a_reader_that_is_too_far_behind_begins_again(store: Store, run: Told, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_feed, "MAX_BEHIND", 3)

    async def steps(feeds: EventFeeds) -> None:
        feed = await feeds.of(run.run_id)
        stream = feeds.stream(feed, "", lambda: True)
        await anext(stream)
        for number in range(5):
            run.status("paused", str(number))
        await feeds._read(feed)
        (said,) = await taken(stream, 1)
        assert said["event"] == "reset"
        await stream.aclose()

    followed(store, steps)


def test_a_stream_ends_with_its_session(store: Store, run: Told, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEARTBEAT_S", 0.05)

    async def steps(feeds: EventFeeds) -> None:
        answers = iter([True, False])
        stream = feeds.stream(await feeds.of(run.run_id), "", lambda: next(answers))
        assert [said async for said in stream] == ["retry: 1000\n\n", ": still here\n\n"]

    followed(store, steps)


def test_a_stream_whose_reader_is_always_woken_ends_with_its_session_too(
    store: Store, run: Told, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def steps(feeds: EventFeeds) -> None:
        feed, known = await feeds.of(run.run_id), [True]
        stream = feeds.stream(feed, "", lambda: known[0])
        await anext(stream)
        for status in ("paused", "running"):
            run.status(status, "busy")  # there is news at every look
            await feeds._read(feed)
            assert len(await taken(stream, 1)) == 1
        known[0], now[0] = False, connections.HEARTBEAT_S
        run.status("paused", "after the logout")
        await feeds._read(feed)
        assert [said async for said in stream if "after the logout" in said] == []

    followed(store, steps)


def test_one_user_takes_a_part_of_the_places_and_all_together_leave_some(store: Store, run: Told):
    assert MAX_READERS + MAX_TABS + MAX_STRANGERS <= connections.MAX_CONNECTIONS * 3 / 4

    async def steps(feeds: EventFeeds) -> None:
        feed = await feeds.of(run.run_id)
        opened = [feeds.stream(feed, "", lambda: True, "eve") for _ in range(READERS_OF_ONE)]
        for stream in opened:
            await anext(stream)
        assert (refused := feeds.places.refusal("eve"))
        assert refused.status_code == 503
        assert [said async for said in feeds.stream(feed, "", lambda: True, "eve")] == [], "it was too late"
        assert feeds.places.refusal("anna") is None
        await opened.pop().aclose()
        assert feeds.places.refusal("eve") is None
        for stream in opened:
            await stream.aclose()
        assert not feed.readers

    followed(store, steps)


def test_only_the_newest_events_are_kept_and_listed(store: Store, monkeypatch: pytest.MonkeyPatch, page: TestClient):
    add_devices(store, DEVICES, time.time())
    run = new_run(store, at=time.time() - 60)
    for number in range(20):
        run.status("paused", str(number))
    monkeypatch.setattr(event_feed, "KEPT", 5)
    listed = page.get(f"/api/v1/runs/{run.run_id}/events").json()
    assert [one["fields"]["text"] for one in listed] == ["15", "16", "17", "18", "19"]
    assert page.get("/api/v1/runs/none/events").status_code == 404


def test_a_run_with_a_secret_sample_shows_neither_its_replies_nor_their_number(store: Store):
    """Two runs of which one had more replies have the same feed, and ids tell nothing of the journal's numbers."""
    add_devices(store, DEVICES, time.time())
    feeds = []
    for replies in (2, 5):
        run = new_run(store, at=time.time() - 60, more=PRIVACY)
        run.open()
        for device in DEVICES[:replies]:
            run.answer(device, 1.0)
        run.close("all", 2.0)
        feed = RunFeed(run.run_id, name="same")
        _, events, _ = EventFeeds(store)._new(feed)
        feed.add(events)
        feeds.append([(one["id"], one["event"]) for one in json.loads(feed.listed())])
    assert feeds[0] == feeds[1]
    assert not {"UpdateAccepted", "ClientSelected"} & {kind for _, kind in feeds[0]}


def test_how_far_back_the_events_of_a_sampled_run_go_does_not_tell_how_many_replied(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(event_feed, "KEPT", 4)
    add_devices(store, DEVICES, time.time())
    listed = []
    for replies in (2, 5):
        run = new_run(store, at=time.time() - 60, more=PRIVACY)
        for _ in range(3):
            run.open()
            for device in DEVICES[:replies]:
                run.answer(device, 1.0)
            run.close("all", 2.0)
        _, events, _ = EventFeeds(store)._new(RunFeed(run.run_id))
        listed.append([(type(one).__name__, getattr(one, "round", 0)) for one in events])
    assert listed[0] == listed[1]
    assert len(listed[0]) == 4


def test_a_deleted_run_ends_its_own_streams_and_no_others(store: Store, run: Told, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEARTBEAT_S", 0.05)
    other = new_run(store, at=time.time() - 60)

    async def steps(feeds: EventFeeds) -> None:
        gone, kept = await feeds.of(run.run_id), await feeds.of(other.run_id)
        first = feeds.stream(gone, "", lambda: not gone.is_deleted)
        second = feeds.stream(kept, "", lambda: True)
        await anext(first)
        await anext(second)
        known = store.run

        def look_up(run_id: str) -> object:
            if run_id == run.run_id:
                raise NotFound("no such run")
            return known(run_id)

        monkeypatch.setattr(store, "run", look_up)
        other.status("paused", "paused by a person")
        (said,) = await taken(second, 1)
        assert json.loads(said["data"])["fields"]["status"] == "paused"
        assert {one async for one in first} <= {": still here\n\n"}
        other.status("running", "goes on")
        (said,) = await taken(second, 1)
        assert json.loads(said["data"])["fields"]["status"] == "running"

    followed(store, steps)


def test_the_page_follows_the_journal_and_filters_it(store: Store, run: Told, look: Open):
    with showing(store.url, None) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        page.get_by_text("Every decision of this run").click()
        table = page.get_by_role("table").filter(has_text="Round closed").last
        expect(table).to_contain_text("Round opened")
        run.status("paused", "paused by a person")
        expect(page.locator("#journal")).to_contain_text("paused by a person")
        page.locator("#journal select").select_option("RoundClosed")
        expect(page.locator("#journal tbody tr")).to_have_count(1)
        page.locator("#journal select").select_option("")
        page.locator("#journal input").fill("pi-03")
        expect(page.locator("#journal tbody")).to_contain_text("device pi-03")
        expect(page.locator("#journal tbody")).not_to_contain_text("device pi-04")
        assert axe(page) == []
        page.locator("#journal select").select_option("ClientSelected")
        assert {"journal=open", "event=ClientSelected", "words=pi-03"} <= set(page.url.partition("?")[2].split("&"))
        page.reload()
        expect(page.locator("#journal tbody tr")).to_have_count(1)
        expect(page.locator("#journal tbody")).to_contain_text("device pi-03")
        page.set_viewport_size({"width": 420, "height": 900})
        assert overflow(page) == 0


def test_the_page_follows_the_journal_after_a_refused_stream_and_a_failed_read(store: Store, run: Told, look: Open):
    with showing(store.url, None) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        page.route("**/events/stream", lambda route: route.fulfill(status=204), times=1)
        page.route("**/events", lambda route: route.abort("connectionfailed"), times=1)
        page.get_by_text("Every decision of this run").click()
        journal = page.locator("#journal")
        expect(journal).to_contain_text("Round opened")
        for words in ("first pause", "second pause"):
            run.status("paused", words)
            expect(journal).to_contain_text(words)


def test_eight_tabs_follow_the_journal_over_the_six_connections_of_a_browser(store: Store, run: Told, look: Open):
    with showing(store.url, None) as shown:
        first = look(shown.url, f"runs/{run.run_id}?journal=open")
        tabs = [first, *(first.context.new_page() for _ in range(7))]
        for tab in tabs[1:]:
            tab.goto(f"{shown.url}/runs/{run.run_id}?journal=open")
        for tab in tabs:
            expect(tab.locator("#journal")).to_contain_text("Round opened")
        run.status("paused", "paused by a person")
        for tab in tabs:
            expect(tab.locator("#journal")).to_contain_text("paused by a person")
        for tab in tabs[:-1]:
            tab.close()
        run.status("running", "goes on")
        expect(tabs[-1].locator("#journal")).to_contain_text("goes on")


BY_HAND = """() => {
  window.EventSource = class extends EventTarget {
    constructor() { super(); window.stream = this; setTimeout(() => this.dispatchEvent(new Event("open"))); }
    close() {}
  };
}"""


def test_an_event_that_the_list_and_the_stream_both_have_is_shown_once(store: Store, run: Told, look: Open):
    """The list may have an event whose message is still on its way."""
    with showing(store.url, None) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        page.evaluate(BY_HAND)
        page.get_by_text("Every decision of this run").click()
        rows = page.locator("#journal tbody tr")
        expect(page.locator("#journal")).to_contain_text("Round opened")
        listed = page.request.get(f"{shown.url}/api/v1/runs/{run.run_id}/events").json()
        expect(rows).to_have_count(len(listed))
        later = {**listed[-1], "id": "another", "why": "the one after it"}
        for one in map(json.dumps, (listed[-1], later)):
            page.evaluate("(data) => stream.dispatchEvent(new MessageEvent('journal', { data }))", one)
        expect(page.locator("#journal")).to_contain_text("the one after it")
        expect(rows).to_have_count(len(listed) + 1)
