"""Tables that are wider than a phone: that they go on is seen, and a keyboard gets there."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browsing import Open, axe, overflow
from tests.support.filled_store import twelve_rounds
from tests.support.serving import Shown, showing
from thinwire.store import Condition, Store

PIXEL = """async ([png, x, y]) => {
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  const canvas = new OffscreenCanvas(1, 1).getContext("2d");
  canvas.drawImage(await createImageBitmap(new Blob([bytes], { type: "image/png" })), -x, -y);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}"""
TOP = "(e) => e.querySelector('tbody tr').getBoundingClientRect().top - e.getBoundingClientRect().top"
STEP_PX = 20  # an arrow scrolls at least so far
ABOVE_TEXT = 2  # pixels below a row's top: within its padding


def colour(page: Page, region: Locator, x: float) -> list[int]:
    """What is seen at the top of a table's first row, `x` pixels from the left."""
    top = region.evaluate(TOP)  # both at one moment: what stands above may still be growing
    png = base64.b64encode(region.screenshot()).decode()
    return list(page.evaluate(PIXEL, [png, int(x), int(top) + ABOVE_TEXT]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_goes_on_beyond_the_edge_is_shaded_there_and_scrolled_by_keys(
    store: Store, served: Shown, look: Open, scheme: Any
):
    run = twelve_rounds(store)
    page = look(served.url, "devices/pi-08", color_scheme=scheme, viewport={"width": 390, "height": 844})
    region = page.get_by_role("region", name="Its last assignments")
    row = region.get_by_role("rowheader", name=f"{run.run_id}, 12")
    expect(row).to_be_visible()
    width = region.evaluate("(e) => e.clientWidth")
    plain = colour(page, region, width / 2)
    assert colour(page, region, width - 2) != plain
    region.focus()
    for _ in range(region.evaluate("(e) => e.scrollWidth - e.clientWidth") // STEP_PX + 1):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("(e) => e.scrollLeft + e.clientWidth >= e.scrollWidth - 1", arg=region.element_handle())
    assert colour(page, region, width - 2) == plain, "there is no more"
    expect(row).to_be_in_viewport(ratio=1.0)
    assert (axe(page), overflow(page)) == ([], 0)


def test_a_phone_shows_each_client_as_a_block_and_sorts_them_by_a_list(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}", viewport={"width": 390, "height": 844})
    region = page.get_by_role("region", name="Table of clients")
    expect(region.get_by_role("rowheader").first).to_have_text("pi-01")
    assert region.evaluate("(e) => e.scrollWidth <= e.clientWidth"), "nothing is cut off"
    assert region.evaluate("(e) => e.scrollHeight <= e.clientHeight"), "eight clients need no box that scrolls"
    section = page.locator("#clients")
    section.get_by_label("Sort by").select_option("Failed")
    expect(section.get_by_role("button", name="sorted from the highest")).to_be_visible()
    section.get_by_label("Sort by").select_option("Client")
    section.get_by_role("button", name="sorted from the lowest").click()
    expect(region.get_by_role("rowheader").first).to_have_text("pi-08")
    assert (axe(page), overflow(page)) == ([], 0)


def test_a_table_that_fits_has_no_shade(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}", viewport={"width": 1400, "height": 844})
    region = page.get_by_role("region", name="Table of clients")
    expect(region.get_by_role("rowheader", name="pi-08")).to_be_visible()
    width = region.evaluate("(e) => e.clientWidth")
    assert colour(page, region, 1) == colour(page, region, width / 2) == colour(page, region, width - 2)


@pytest.mark.parametrize("width", [420, 360])
def test_one_can_log_out_on_a_phone(store: Store, served: Shown, look: Open, width: int):
    store.roster.enrol("cam-01", "0" * 64, b"key", "manual")  # the badge of a pending device needs room too
    page = look(served.url, "devices", viewport={"width": width, "height": 844})
    expect(page.locator(".badge")).to_be_visible()
    leave = page.get_by_role("button", name="Log out")
    expect(leave).to_be_in_viewport(ratio=1.0)
    expect(page.get_by_role("link", name="Audit")).to_be_in_viewport(ratio=1.0)
    assert (axe(page), overflow(page)) == ([], 0)
    leave.click()
    expect(page.get_by_label("Code")).to_be_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_lines_of_an_alert_break_at_spaces_and_a_message_is_shown_until_it_is_sent(
    store: Store, look: Open, width: int
):
    hint = "thinwire aggregator start --listen 0.0.0.0:9090 --host fl.example.org --certificate /etc/thinwire/cert.pem"
    ends = Condition("certificate", "", "the certificate of the device API ends in 9 days, on the 9th of June", hint)
    store.alerts.update([ends, Condition("no-progress", "digits-1", "digits-1: no round has closed for 40 min")])
    store.alerts.update([ends])
    store.alerts.not_sent(store.alerts.all()[0], "webhook: no answer")
    with showing(store.url, None) as shown:
        page = look(shown.url, "alerts", viewport={"width": width, "height": 900})
        row = page.locator("#open-alerts tbody tr")
        expect(row.locator(".word")).to_have_text(hint.split(" "))
        for one in row.locator(".word, .tight").all():
            assert one.evaluate("(e) => e.offsetHeight") < 30, one.inner_text()
        expect(row).to_contain_text("being sent")
        expect(page.locator("#closed-alerts tbody")).to_contain_text("not sent: webhook: no answer")
        assert (axe(page), overflow(page)) == ([], 0)
        store.alerts.sent(store.alerts.open()[0], "opened")
        expect(page.locator("#open-alerts")).not_to_contain_text("Message")
