"""Who is online on the pages, for how long nobody was heard, and commands that find the state directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from starlette.testclient import TestClient

from tests.support.browsing import Open, axe, overflow, pages
from tests.support.filled_fleet import a_fleet
from tests.support.filled_store import new_run, twelve_rounds
from tests.support.serving import showing
from thinwire.core.clock import HEARD, write_heard
from thinwire.core.start_options import FILE
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.reports.alerting import CERTIFICATE, OFFLINE
from thinwire.store import MACHINE, ROLES, Condition, Store
from thinwire.web.alerts import STARTED_BY


@pytest.fixture
def place(tmp_path: Path) -> AggregatorHome:
    return AggregatorHome.under(tmp_path / "state of mine")


@pytest.fixture
def store(place: AggregatorHome) -> Iterator[Store]:
    with Store.open(place.database) as opened:
        yield opened


@pytest.fixture
def held(place: AggregatorHome) -> Iterator[None]:
    with hold(place.lock, {"listen": "192.0.2.1:9090", "pin": "ab" * 32}):
        yield


def test_pages_say_who_was_heard_when_and_nothing_of_a_dead_aggregator(
    store: Store, place: AggregatorHome, held: None, look: Open
):
    twelve_rounds(store)
    a_fleet(store, time.time() - 900)
    online = [info.row.name for info in store.devices() if info.online]
    (place.root / FILE).write_text(json.dumps({"options": {"listen": "0.0.0.0:9090"}, "folder": "/"}))
    with showing(store.url, place.lock) as shown:
        page = look(shown.url, "devices")
        write_heard(place.lock.with_name(HEARD), dict.fromkeys(online, time.time() - 187))
        row = page.locator("#known").get_by_role("row", name=online[0])
        expect(row).to_contain_text("last seen 3 min")
        expect(row).to_contain_text("suspect: it has missed a call")
        write_heard(place.lock.with_name(HEARD), dict.fromkeys(online, time.time() - 4))
        expect(row).not_to_contain_text("suspect")
        write_heard(place.lock.with_name(HEARD), dict.fromkeys(online, time.time() - 187))
        expect(row).to_contain_text("suspect")
        assert axe(page) == []
        runs = look(shown.url)
        seen = runs.locator("#devices").get_by_role("row", name=online[0]).locator("[data-label=Seen]")
        expect(seen).to_have_text(re.compile(r"^\s*3 min( \d+ s)? ago"))
        approved = [info for info in store.devices() if info.row.standing(True) == "approved"]
        assert len(approved) < len(store.devices())
        expect(runs.locator(".head")).to_contain_text(f" of {len(approved)} devices online")
        for path in ("devices", ""):
            assert overflow(look(shown.url, path, viewport={"width": 390, "height": 900})) == 0
    for gone in (page, runs):  # the dashboard's process ends with its aggregator
        expect(gone.get_by_role("alert")).to_contain_text("gone")
        expect(gone.locator("main")).to_contain_text("unknown, aggregator offline")
        assert " online" not in gone.locator("main").inner_text().replace("who is online is unknown", "")
        command = f"thinwire aggregator start --listen 0.0.0.0:9090 --home {shlex.quote(str(place.root.parent))}"
        expect(gone.get_by_role("alert")).to_contain_text(command)


def test_a_viewer_is_not_shown_the_paths_of_the_start_command(store: Store, place: AggregatorHome, browser: Browser):
    place.lock.touch()
    options = {"certificate": "/etc/own/cert.pem", "key": "/etc/own/key.pem"}
    (place.root / FILE).write_text(json.dumps({"options": options, "folder": "/"}))
    password = "an owl in the 7th tower"
    for name, role in (("bert", "operator"), ("carla", "viewer")):
        store.users.add(name, role, password, "root")
    run = twelve_rounds(store)
    with showing(store.url, place.lock) as shown, pages(browser) as new_page:
        for name, starts in (("bert", True), ("carla", False)):
            page = new_page()
            page.goto(f"{shown.url}/login")
            page.get_by_label("Name").fill(name)
            page.get_by_label("Password").fill(password)
            page.get_by_role("button", name="Log in").click()
            page.goto(f"{shown.url}/runs/{run.run_id}")
            told = (
                "thinwire aggregator start --certificate" if starts else "An operator starts it again, on its machine."
            )
            expect(page.get_by_role("alert")).to_contain_text(told)
            assert ("key.pem" in page.content()) == starts


def test_commands_name_the_state_directory_where_a_terminal_would_look_elsewhere(
    store: Store, place: AggregatorHome, held: None, look: Open, monkeypatch: pytest.MonkeyPatch
):
    option = f"--home {shlex.quote(str(place.root.parent))}"
    with showing(store.url, place.lock) as shown:
        page = look(shown.url)
        expect(page.locator(".nothing")).to_contain_text(f"thinwire run plan.toml {option}")
        page.goto(f"{shown.url}/login")
        expect(page.locator("pre")).to_have_text(f"thinwire aggregator status --login {option}")
    (place.root.parent.parent / "thinwire").symlink_to(place.root.parent)
    monkeypatch.setenv("XDG_STATE_HOME", str(place.root.parent.parent))
    usual = place.root.parent.parent / "thinwire" / "aggregator" / "lock"
    with showing(store.url, usual) as shown:
        page = look(shown.url)
        expect(page.locator(".nothing")).to_contain_text("thinwire run plan.toml")
        assert "--home" not in page.locator("main").inner_text()


def test_the_time_of_a_simulation_goes_on_without_an_aggregator(store: Store, place: AggregatorHome, look: Open):
    run = new_run(store, source="sim", at=time.time() - 60)
    run.quiet_round()
    run.open()
    place.lock.touch()
    os.utime(place.lock, (run.now - 3600, run.now - 3600))
    with showing(store.url, place.lock) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        expect(page.locator(".beat")).to_have_text("aggregator gone")
        expect(page.locator(".figures")).to_contain_text(re.compile(r"since its start\s*\d+ (s|min)"))
        expect(page.locator(".progress")).to_contain_text(re.compile(r"open for [1-9]"))
        expect(page.locator("#rounds .legend")).to_contain_text("now")
        assert re.search(r"(?<!\w)-\d", page.locator("main").inner_text()) is None


def test_a_viewer_is_told_who_starts_the_aggregator_and_not_how(
    store: Store, place: AggregatorHome, visit: Callable[..., TestClient]
):
    starts = "thinwire aggregator start --key /etc/own/key.pem"
    store.alerts.update([Condition(kind, "", f"{kind} is wrong", starts) for kind in (OFFLINE, CERTIFICATE)])
    for role in ROLES:
        token = {"Authorization": f"Bearer {store.tokens.make('a program', MACHINE, role).secret}"}
        for path in ("alerts", "alerts.csv"):
            said = visit().get(f"/api/v1/{path}", headers=token).text
            assert (starts in said, said.count(STARTED_BY)) == ((False, 2) if role == "viewer" else (True, 0)), path
