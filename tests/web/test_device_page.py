"""The dashboard of devices as a browser shows it."""

from __future__ import annotations

import csv
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browsing import Open, axe, axe_in_both, overflow
from tests.support.filled_fleet import a_fleet, come, fingerprint, hello, many, there
from tests.support.filled_store import twelve_rounds
from tests.support.serving import Shown, showing
from thinwire.core.events import DeviceOffline
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import hold
from thinwire.store import Store

TLS = {"listen": "0.0.0.0:9090", "pin": "ab" * 32, "urls": ["https://agg.example:9090"]}


@pytest.fixture
def open_api(store: Store, tmp_path: Path) -> Iterator[Shown]:
    """The dashboard beside an aggregator whose device API other machines reach."""
    lock = tmp_path / "lock"
    with hold(lock, TLS), showing(store.url, lock) as running:
        yield running


def grouped(name: str) -> str:
    digits = fingerprint(name)
    return " ".join(digits[at : at + 8] for at in range(0, 64, 8))


def test_who_waits_stands_first_and_is_approved_by_its_fingerprint(store: Store, open_api: Shown, look: Open):
    a_fleet(store, time.time())
    page = look(open_api.url, "devices")
    expect(page.locator("main section").first).to_have_attribute("id", "pending")
    expect(page.locator("#pending")).to_contain_text("It joined with invitation 1, which needs approval by hand.")
    expect(page.get_by_role("link", name="Devices")).to_contain_text("2 to be approved")
    page.get_by_role("button", name="Approve ward-4").click()
    dialog = page.get_by_role("dialog", name="Approve ward-4?")
    expect(dialog.get_by_role("group", name="Fingerprint of its key")).to_have_text(grouped("ward-4") + " ")
    expect(page.get_by_role("button", name="Not now")).to_be_focused()
    assert axe(page) == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("button", name="Approve ward-4")).to_be_focused()
    assert {row.name: row.state for row in store.roster.rows()}["ward-4"] == "pending"
    page.get_by_role("button", name="Approve ward-4").click()
    page.get_by_role("button", name="It is the same: approve it").click()
    expect(page.get_by_role("dialog")).to_contain_text("ward-4 is approved: it has access at its next call.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#known")).to_contain_text("ward-4")
    expect(page.locator("#pending .cards li")).to_have_count(1)
    assert store.audit.actions("ward-4")[0].who == "machine"


def test_a_device_is_revoked_and_the_dashboard_says_what_stays(store: Store, open_api: Shown, look: Open):
    run = twelve_rounds(store)
    store.roster.approve("pi-02")
    page = look(open_api.url, "devices/pi-02")
    page.get_by_role("button", name="Revoke…").click()
    dialog = page.get_by_role("dialog", name="Revoke pi-02?")
    expect(dialog).to_contain_text("Its calls end at once")
    expect(dialog).to_contain_text(f"{run.run_id} rounds 1–6, 8, 10–12")
    assert axe(page) == []
    dialog.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_role("dialog")).to_contain_text("The aggregator is clearing what was open")
    (command,) = store.commands.pending()
    store.commands.answer(command.id, {"done": True, "rounds": {run.run_id: [1, 2, 3]}})
    expect(page.get_by_role("dialog")).to_contain_text("what was open is cleared")
    expect(page.get_by_role("dialog")).to_contain_text(f"Its updates stay in: {run.run_id} rounds 1–3.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".sentence")).to_have_text("Revoked by machine.")
    expect(page.locator("#deeds")).to_contain_text("was revoked")
    page.get_by_role("button", name="Approve again…").click()
    dialog = page.get_by_role("dialog", name="Approve pi-02 again?")
    expect(dialog).to_contain_text("Then the same key may take part in runs again.")
    expect(dialog).to_contain_text("If one digit differs, somebody else holds this key: leave it revoked.")
    assert axe(page) == []
    dialog.get_by_role("button", name="It is the same: approve it").click()
    expect(page.get_by_role("dialog")).to_contain_text("pi-02 is approved")


def test_an_aggregator_that_does_not_confirm_is_said_so(store: Store, open_api: Shown, look: Open):
    a_fleet(store, time.time())
    page = look(open_api.url, "devices/cam-01")
    page.get_by_role("button", name="Revoke…").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_role("dialog")).to_contain_text("has not confirmed it within 5 s")
    expect(page.get_by_role("dialog")).to_contain_text("The device API refuses the device all the same.")


def test_a_decision_that_cannot_be_is_refused_in_words(store: Store, open_api: Shown, browser: Browser):
    a_fleet(store, time.time())
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{open_api.url}/login?next=devices&code={store.logins.new_code()}")
        page.get_by_role("button", name="Approve ward-7").click()
        store.roster.rename("ward-7", "ward-8")
        store.roster.enrol("ward-7", fingerprint("another"), b"another key", "manual")
        page.get_by_role("button", name="It is the same: approve it").click()
        said = page.get_by_role("dialog").get_by_role("alert")
        expect(said).to_contain_text("ward-7 has another key than the one that was shown")
        assert {row.name: row.state for row in store.roster.rows()}["ward-7"] == "pending"
        context.set_offline(True)
        page.get_by_role("button", name="It is the same: approve it").click()
        expect(said).to_contain_text("the dashboard's server is not reachable")


def test_each_row_says_who_how_since_when_with_what_and_how_far(store: Store, open_api: Shown, look: Open):
    twelve_rounds(store)
    a_fleet(store, time.time())
    page = look(open_api.url, "devices")
    cam = page.locator("#known").get_by_role("row", name="cam-01")
    for said in ("invitation", "online since", "thinwire 0.1.0", "Python 3.11.2", "torch 2.13.0", "aarch64", "212 ms"):
        expect(cam).to_contain_text(said)
    expect(cam).to_contain_text("its code is not that of digits-1")
    expect(cam).to_contain_text("clock 94 s ahead")
    expect(cam.locator("code").first).to_have_attribute("title", "c4" * 32)
    expect(page.locator("#known").get_by_role("row", name="cam-02")).to_contain_text("offline since")
    expect(page.locator("#known").get_by_role("row", name="jetson-1")).to_contain_text("ModuleNotFoundError")


def test_what_happens_to_devices_is_shown_without_a_reload(store: Store, open_api: Shown, look: Open):
    page = look(open_api.url, "devices")
    expect(page.get_by_role("heading", name="No device yet")).to_be_visible()
    expect(page.locator(".nothing")).to_contain_text("thinwire devices invite")
    assert axe(page) == []
    (invited,) = store.invitations.invite(1, approve_manually=True)
    expect(page.locator("#invitations")).to_contain_text("1 can still be used")
    store.roster.note("join", "203.0.113.9:50000", "unknown", "<img src=x onerror=alert(1)>")
    expect(page.locator("#refusals")).to_contain_text("<img src=x onerror=alert(1)>")
    come(store, "attic", invited)
    expect(page.locator("#pending")).to_contain_text("attic")
    expect(page).to_have_title("(1) Devices · Thinwire")
    store.roster.approve("attic")
    there(store, hello("attic"), time.time())
    expect(page.get_by_role("row", name="attic")).to_contain_text("online since")
    store.record_device(DeviceOffline(time.time(), "attic", "no request for 360 s"))
    expect(page.get_by_role("row", name="attic")).to_contain_text("offline since")
    store.roster.revoke("attic")
    expect(page.locator("#out")).to_contain_text("1 device")
    expect(page.locator("#known")).to_have_count(0)


def test_invitations_are_made_here_and_handed_out_once(store: Store, open_api: Shown, look: Open, tmp_path: Path):
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "invite.json").write_text(json.dumps({"pin": TLS["pin"], "urls": TLS["urls"]}))
    page = look(open_api.url, "devices")
    page.get_by_role("textbox", name="Names").fill("ward-1\nward-2")
    page.get_by_role("button", name="Make", exact=True).click()
    made = page.locator(".notice.made")
    expect(made).to_contain_text("Hand these 2 out now")
    expect(made).to_contain_text("thinwire client join https://agg.example:9090 - --name ward-2")
    assert axe(page) == []
    with page.expect_download() as file:
        made.get_by_role("link", name="2 as CSV").click()
    rows = list(csv.DictReader(file.value.path().open()))
    assert ([row["name"] for row in rows], rows[0]["invitation"][:6]) == (["ward-1", "ward-2"], "tw1.ab")
    made.get_by_role("button", name="I have them").click()
    expect(made).to_have_count(0)
    page.reload()
    expect(page.locator("#invitations")).to_contain_text("2 can still be used")
    assert rows[0]["invitation"] not in page.content()


def test_who_makes_an_invitation_on_loopback_reads_first_that_no_device_elsewhere_can_use_it(
    store: Store, look: Open, tmp_path: Path
):
    a_fleet(store, time.time())
    lock, said = tmp_path / "lock", "for this machine only: no device elsewhere can use an invitation"
    StartOptions({"listen": "127.0.0.1:9191", "san": ["agg one"]}).save(tmp_path)
    option = f" --home {shlex.quote(str(tmp_path.parent))}"
    start = f"thinwire aggregator start --listen 0.0.0.0:9191 --san 'agg one'{option}"
    for about, shown_once in (
        ({"listen": "127.0.0.1:9090"}, 1),
        ({**TLS, "urls": ["https://[::1]:9090"]}, 1),
        (TLS, 0),
    ):
        with hold(lock, about), showing(store.url, lock) as shown:
            page = look(shown.url, "devices")
            page.locator("#invitations summary").last.click()
            expect(page.get_by_role("button", name="Make", exact=True)).to_be_visible()
            expect(page.locator("#invitations p", has_text=said)).to_have_count(shown_once)
            if shown_once:
                expect(page.locator("#invitations")).to_contain_text(f"thinwire aggregator stop{option} && {start}")
                assert axe(page) == []


def test_a_device_is_tagged_found_by_its_tag_and_renamed(store: Store, open_api: Shown, look: Open):
    a_fleet(store, time.time())
    page = look(open_api.url, "devices/cam-01")
    page.get_by_role("button", name="Tags…").click()
    page.get_by_label("Tags, with spaces between them").fill("ward lab")
    page.keyboard.press("Enter")
    expect(page.locator(".head .tag")).to_have_text(["lab", "ward"])
    page.get_by_role("button", name="Rename…").click()
    page.get_by_label("New name").fill("cam-9")
    assert axe(page) == []
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{open_api.url}/devices/cam-9")
    page.goto(f"{open_api.url}/devices")
    page.get_by_role("checkbox", name="ward 1").check(force=True)
    expect(page.locator("#known tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("#known tbody tr")).to_contain_text("cam-9")
    assert "tag=ward" in page.url


def test_an_invitation_is_withdrawn_with_two_clicks(store: Store, open_api: Shown, look: Open):
    a_fleet(store, time.time())
    page = look(open_api.url, "devices")
    page.get_by_role("button", name="Withdraw invitation 8").click()
    page.get_by_role("group", name="Withdraw invitation 8?").get_by_role("button", name="Withdraw").click()
    expect(page.locator("#invitations")).to_contain_text("none can be used")
    assert [row.state for row in store.invitations.all() if row.id == 8] == ["withdrawn"]
    page.locator("#invitations summary").first.click()
    expect(page.get_by_role("row", name="No. 1")).to_contain_text("used by ward-4")


def test_the_operator_reads_why_a_join_was_refused(store: Store, open_api: Shown, look: Open):
    a_fleet(store, time.time())
    row = look(open_api.url, "devices").locator("#refusals").get_by_role("row", name="203.0.113.99:1022")
    expect(row).to_contain_text("invitation used by cam-01 (invitation 3)")
    expect(row).to_contain_text("no invitation that can be used")


def test_hundreds_of_devices_are_searched_and_the_search_survives_a_reload(store: Store, open_api: Shown, look: Open):
    a_fleet(store, time.time())
    many(store, 300, time.time())
    page = look(open_api.url, "devices")
    rows = page.locator("#known tbody tr")
    expect(rows).to_have_count(60)
    page.get_by_role("button", name="Show all 303").click()
    expect(rows).to_have_count(303)
    page.get_by_label("Search devices").fill("meter-17")
    expect(rows).to_have_count(10)
    page.get_by_role("radio", name="Offline 3").check(force=True)
    expect(rows).to_have_count(3)
    assert "q=meter-17" in page.url
    assert "show=offline" in page.url
    page.reload()
    expect(rows).to_have_count(3)
    expect(page.get_by_label("Search devices")).to_have_value("meter-17")
    page.get_by_label("Search devices").fill("nothing like it")
    expect(page.locator("#known")).to_contain_text("none of them is like that")


def test_while_the_aggregator_is_gone_nobody_knows_who_is_online(store: Store, look: Open, tmp_path: Path):
    a_fleet(store, time.time())
    with showing(store.url, tmp_path / "lock") as served_:
        page = look(served_.url, "devices")
        expect(page.get_by_role("alert")).to_contain_text("The aggregator is not running")
        expect(page.locator(".sentence")).to_contain_text("who is online is unknown, aggregator offline")
        expect(page.locator("#known").get_by_role("row", name="cam-01")).to_contain_text("unknown, aggregator offline")
        page.get_by_role("button", name="Revoke cam-01").click()
        page.get_by_role("button", name="Revoke it").click()
        expect(page.get_by_role("dialog")).to_contain_text("the next one applies it before its device API opens")
        assert store.commands.pending() == []


def test_a_device_that_is_not_there_says_so(store: Store, open_api: Shown, browser: Browser):
    with browser.new_context() as context:
        page: Page = context.new_page()
        page.goto(f"{open_api.url}/login?next=devices/pi-99&code={store.logins.new_code()}")
        expect(page.get_by_role("alert")).to_contain_text("no device pi-99")


def test_the_pages_of_devices_are_usable_by_all_and_at_every_width(store: Store, open_api: Shown, look: Open):
    run = twelve_rounds(store)
    a_fleet(store, time.time())
    run.fail("pi-08", 1.0, "declined", "rounds_a_day: 24 of 24 rounds of today are made")
    page = look(open_api.url, "devices")
    for summary in page.locator("main summary").all():
        summary.click()
    assert axe_in_both(page) == []
    for path, waited in (("devices", "#known"), ("devices/pi-08", "#assignments"), ("devices/cam-01", "#deeds")):
        page.goto(f"{open_api.url}/{path}")
        page.wait_for_selector(waited)
        for width in (390, 1000, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert overflow(page) <= 0, (path, width)
            assert width == 1000 or (axe(page) if width == 390 else axe_in_both(page)) == [], (path, width)
