"""The pages of users, tokens and the audit log, in a browser, as users of different roles see them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browsing import Open, axe, axe_in_both, overflow, pages
from tests.support.filled_fleet import a_fleet
from tests.support.filled_store import twelve_rounds
from tests.support.serving import Shown
from thinwire.store import Store
from thinwire.web.access import RECENT_S

GOOD, OTHER = "an owl in the 7th tower", "a mole under the 8th tree"
HOSTILE = "<img src=x onerror=alert(1)>"
As = Callable[..., Page]
# The placeholders that have not the color of text that is meant to be read.
FAINTER = """(fields) => fields.filter((field) => {
  const text = field.parentElement.appendChild(document.createElement("i"));
  text.style.color = "var(--muted)";
  return getComputedStyle(field, "::placeholder").color !== getComputedStyle(text).color;
}).map((field) => field.name)"""


@pytest.fixture
def as_user(browser: Browser, store: Store, served: Shown) -> Iterator[As]:
    """Opens a page as a user who logs in by name and password; at the end no script may have failed."""
    for name, role in (("anna", "admin"), ("bert", "operator"), ("carla", "viewer")):
        store.users.add(name, role, GOOD, "root")
    with pages(browser, watched=()) as new_page:  # refusals are in the console, and on purpose

        def open_(name: str, path: str, **options: Any) -> Page:
            page = new_page(**options)
            page.goto(f"{served.url}/login?next={path}")
            page.get_by_label("Name").fill(name)
            page.get_by_label("Password").fill(GOOD)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_selector(".head h1")
            return page

        yield open_


def test_two_users_see_what_their_roles_allow_and_each_what_the_other_did(
    store: Store, served: Shown, as_user: As
):  # fmt: skip
    run = twelve_rounds(store)
    anna, bert, carla = (as_user(name, f"runs/{run.run_id}") for name in ("anna", "bert", "carla"))
    expect(carla.get_by_role("button", name="Stop")).to_have_count(0)
    expect(carla.get_by_role("button", name="Pause")).to_have_count(0)
    bert.get_by_role("button", name="Pause").click()
    expect(bert.get_by_role("status").filter(has_text="command to pause sent")).to_be_visible()
    anna.goto(f"{served.url}/audit")
    expect(anna.locator("#log tbody tr").filter(has_text="bert").filter(has_text="pause run")).to_have_count(1)
    carla.goto(f"{served.url}/devices")
    expect(carla.locator(".head h1")).to_be_visible()
    expect(carla.get_by_role("button", name=re.compile("Approve|Revoke|Withdraw"))).to_have_count(0)
    bert.goto(f"{served.url}/users")
    expect(bert.get_by_role("heading", name="Your tokens")).to_be_visible()
    expect(bert.get_by_role("heading", name="Users", exact=True)).to_have_count(0)

    anna.goto(f"{served.url}/users")
    anna.get_by_role("button", name="Disable bert").click()
    anna.get_by_role("button", name="Disable", exact=True).click()
    expect(anna.locator("#users tr").filter(has_text="bert")).to_contain_text("disabled")
    expect(bert).to_have_url(re.compile("/login"))  # an action of anybody is news, and the next read is refused


def test_an_admin_logs_out_another_user_then_all_sessions_by_code_and_the_own_ones(
    store: Store, served: Shown, as_user: As
):  # fmt: skip
    anna, bert = as_user("anna", "users"), as_user("bert", "devices")
    by_code = store.logins.redeem(store.logins.new_code())

    def log_out(name: str) -> None:
        anna.get_by_role("button", name=f"Log out {name} everywhere").click()
        group = anna.get_by_role("group", name=f"Log out {name} everywhere?")
        group.get_by_role("button", name="Log out", exact=True).click()

    log_out("bert")
    expect(anna.locator("#users tr").filter(has_text="bert").get_by_role("status")).to_have_text("logged out")
    expect(bert).to_have_url(re.compile("/login"))
    assert axe(anna) == []
    log_out("machine")
    expect(anna.locator("#users .note").get_by_role("status")).to_have_text("logged out")
    assert by_code is not None
    assert not store.logins.valid(by_code)
    log_out("anna")
    expect(anna).to_have_url(re.compile("/login"))
    assert store.users.log_in("bert", GOOD), "a user who is logged out may log in again"
    done = [(row.who, row.detail) for row in store.audit.rows()[1] if row.what == "log out user"]
    assert done == [("anna", name) for name in ("anna", "machine", "bert")]


def test_an_admin_who_acts_later_gives_the_password_again(store: Store, served: Shown, as_user: As):
    page = as_user("anna", "users")
    with store._database.writing() as connection:
        connection.exec_driver_sql(f"UPDATE sessions SET confirmed_at = confirmed_at - {RECENT_S + 1}")
    page.get_by_text("Add a user").click()
    page.get_by_role("textbox", name="Name").fill("dora")
    page.get_by_label("First password").fill(OTHER)
    page.get_by_role("button", name="Add", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Your password again")
    assert axe(page) == []
    dialog.get_by_label("Password").fill(OTHER)
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog.get_by_role("alert")).to_contain_text("this password is wrong")
    dialog.get_by_label("Password").fill(GOOD)
    dialog.get_by_role("button", name="Go on").click()
    expect(page.get_by_text("dora may log in, with the role viewer.")).to_be_visible()
    expect(page.locator("#users tbody tr").filter(has_text="dora")).to_have_count(1)


def test_an_admin_alone_is_offered_to_approve_a_revoked_device_again(store: Store, served: Shown, as_user: As):
    a_fleet(store, time.time())
    again = {name: as_user(name, "devices/old-box").locator(".head") for name in ("anna", "bert")}
    expect(again["anna"].get_by_role("button", name="Approve again…")).to_be_visible()
    expect(again["anna"]).not_to_contain_text("An admin")
    expect(again["bert"]).to_contain_text("An admin approves it again.")
    expect(again["bert"].get_by_role("button", name="Approve again…")).to_have_count(0)


def test_a_token_is_shown_once_and_its_name_as_text(store: Store, served: Shown, as_user: As):
    page = as_user("bert", "users")
    page.get_by_text("Make a token").click()
    page.get_by_label("What it is for").fill(HOSTILE)
    page.get_by_label("Valid for days").fill("7")
    page.wait_for_timeout(1200)  # the page is drawn again twice a second: what was typed stays
    page.get_by_role("button", name="Make it").click()
    secret = page.locator(".made code").inner_text()
    assert store.tokens.person(secret) is not None
    (token,) = store.tokens.all()
    assert token.expires_at - time.time() < 7.1 * 86400
    expect(page.locator("#tokens tbody tr")).to_contain_text(HOSTILE)
    expect(page.locator("#tokens img")).to_have_count(0)
    page.reload()
    page.wait_for_selector("#tokens tbody tr")
    assert secret not in page.content()
    page.get_by_role("button", name="Revoke token 1").click()
    page.get_by_role("button", name="Revoke", exact=True).click()
    expect(page.locator("#tokens tbody tr")).to_contain_text("none")
    assert store.tokens.person(secret) is None


def test_a_password_is_changed_and_one_logs_out_on_a_phone(store: Store, served: Shown, as_user: As):
    page = as_user("carla", "users", viewport={"width": 400, "height": 800}, has_touch=True)
    page.get_by_label("Present password").fill(GOOD)
    page.get_by_label("New password").fill(OTHER)
    page.get_by_role("button", name="Change it").click()
    expect(page.get_by_text("Your password is changed.")).to_be_visible()
    assert store.users.log_in("carla", OTHER)
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(re.compile("/login$"))
    page.goto(f"{served.url}/users")
    expect(page).to_have_url(re.compile("/login"))


def test_the_new_pages_are_accessible_at_every_width(store: Store, served: Shown, as_user: As):
    store.tokens.make("nightly", "anna", "viewer")
    page = as_user("anna", "users")
    for path in ("users", "audit", "login"):
        page.goto(f"{served.url}/{path}")
        page.wait_for_selector("h1")
        for details in page.locator("details").all():
            details.locator("summary").click()
        assert axe_in_both(page) == [], path
        assert page.locator("[placeholder]").evaluate_all(FAINTER) == [], path
        for width in (400, 1000, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            assert overflow(page) <= 0, (path, width)


def test_a_session_by_code_tells_how_one_gets_a_password(served: Shown, look: Open):
    page = look(served.url, "audit")
    expect(page.locator(".sentence")).to_contain_text("1 action. A command")
    page.goto(f"{served.url}/users")
    expect(page.locator("#own")).to_contain_text("has no password. To log in with one, add a user above")
    expect(page.locator("#own code")).to_contain_text("thinwire aggregator users add NAME --role admin")
