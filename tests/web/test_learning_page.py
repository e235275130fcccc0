"""One metric of a run over the whole width, and what a run was expected to cost beside what it did."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.support.browsing import Open, axe, axe_in_both, overflow
from tests.support.filled_store import finish, twelve_rounds
from tests.support.serving import Shown
from thinwire.store import START_RUN, Store


def test_any_metric_is_smoothed_zoomed_and_put_on_a_log_scale(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator("#learning figcaption b")).to_have_text(["accuracy", "loss", "train/loss"])
    page.locator("#learning").get_by_label("Metric").select_option("loss")
    expect(page.locator("#learning .curve")).to_have_count(0)
    measured = page.locator(".readings b").first.inner_text()
    page.get_by_role("radio", name="much smoothing").check(force=True)
    expect(page.locator(".readings")).to_contain_text("loss, smoothed")
    expect(page.locator(".readings li", has_text="as measured").locator("b")).to_have_text(measured)
    assert float(page.locator(".readings b").first.inner_text()) > float(measured), "the loss falls"
    page.get_by_role("checkbox", name="log scale").check(force=True)
    page.get_by_role("button", name="Zoom in").press("Enter")
    expect(page.locator(".zoom [role=status]")).to_contain_text(" to ")
    page.reload()
    expect(page.get_by_role("radio", name="much smoothing")).to_be_checked()
    expect(page.get_by_role("checkbox", name="log scale")).to_be_checked()
    assert axe_in_both(page) == []
    for width in (400, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
    page.locator("#learning").get_by_label("Metric").select_option("all")
    expect(page.locator("#learning figcaption b")).to_have_text(["accuracy", "loss", "train/loss"])


def test_the_estimate_stands_beside_what_the_run_was(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    expected = {"up_bytes": 2048, "down_bytes": 38440, "round_s": 2.0, "run_s": None}
    command = store.commands.add(START_RUN, args={"plan": {}, "estimate": expected})
    store.commands.answer(command, {"done": True, "run_id": run.run_id}, run.run_id)
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator("#plan")).to_be_visible()
    expect(page.locator("#estimate")).to_have_count(0)
    finish(run)
    table = page.get_by_role("region", name="Estimated and actual cost")
    expect(table.get_by_role("row", name="up, a client and round")).to_contain_text("2.05 kB")
    rounds = store.rounds(run.run_id)  # without the evaluation of the last model, which the run's own sum has
    selected = sum(one.aggregated_count + one.late + one.dropped + one.failed for one in rounds)
    down = sum(one.payload_down for one in rounds) / selected / 1000
    expect(table.get_by_role("row", name="down, a client and round")).to_contain_text(f"{down:.1f} kB")
    expect(table.get_by_role("row").filter(has_text=re.compile("^a round"))).to_contain_text("2.0 s")
    expect(table.get_by_role("row", name="all rounds")).to_contain_text("was not known")
    assert axe(page) == []
