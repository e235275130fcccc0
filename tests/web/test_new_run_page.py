"""The page of a new run in the browser: a plan from a form, a file or a clone is checked as one types, and started."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.support.browsing import Open, axe_in_both, overflow
from tests.support.filled_store import finish, new_run, twelve_rounds
from tests.support.serving import Shown, serving
from tests.web.test_new_run import TEXT
from thinwire.core.events import RunStatusChanged
from thinwire.core.plan import RunPlan
from thinwire.core.run_events import RunExtended
from thinwire.core.statedir import hold
from thinwire.store import CommandRow, Store


@pytest.fixture
def running(store: Store, tmp_path: Path) -> Any:
    """The dashboard beside an aggregator's lock that is held."""
    lock = tmp_path / "aggregator" / "lock"
    lock.parent.mkdir()
    with hold(lock, {}), serving(store.url, "127.0.0.1:0", "--lock", str(lock)) as served:
        yield served


def toml(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Plan as TOML")


def started(page: Page, store: Store) -> CommandRow:
    """The command that a click on the button leaves."""
    with page.expect_response(re.compile(r"/commands/\d+$")):
        page.get_by_role("button", name="Start the run").click()
    [command] = store.commands.pending()
    return command


def fill(page: Page, place: str, value: str) -> None:
    page.locator(f"#f-{place.replace('.', '-')}").fill(value)


def test_a_person_makes_a_plan_in_the_form_and_starts_it(store: Store, running: Shown, look: Open):
    twelve_rounds(store)
    page = look(running.url, "new")
    expect(page.locator(".plan-state")).to_contain_text("The plan still needs:")
    expect(page.get_by_role("button", name="Start the run")).to_be_disabled()
    expect(page.locator("#f-local-lr-wrong-0")).to_contain_text("Every plan needs it. Try: [local] lr = 0.1")
    assert page.locator("#f-local-lr").get_attribute("aria-invalid") != "true", "nothing was filled in wrong"
    fill(page, "local.lr", "much")
    expect(page.locator(".plan-state")).to_contain_text("1 problem: this plan cannot run.")
    assert page.locator("#f-local-lr").get_attribute("aria-invalid") == "true"
    fill(page, "local.lr", "0.")
    fill(page, "local.lr", "0.5")
    fill(page, "run.rounds", "3")
    expect(page.locator(".plan-state")).to_contain_text("This plan can run.")
    expect(toml(page)).to_have_value('[run]\ntask = "digits"\nrounds = 3\n\n[local]\nlr = 0.5\n')
    expect(page.locator("#cost")).to_contain_text("1.26 kB a client and round")
    expect(page.locator("#cost")).to_contain_text("not known yet")
    command = started(page, store)
    run = new_run(store)
    store.commands.answer(command.id, {"done": True, "run_id": run.run_id}, run.run_id)
    expect(page.locator("h1")).to_have_text(run.run_id)


def test_a_refusal_of_the_aggregator_is_shown(store: Store, running: Shown, look: Open):
    page = look(running.url, "new")
    fill(page, "run.task", "digits")
    fill(page, "local.lr", "0.5")
    command = started(page, store)
    refusal = {"done": False, "error": "nothing is known", "why": "no device", "try": "connect one"}
    store.commands.answer(command.id, refusal)
    expect(page.get_by_role("alert")).to_contain_text("Try: connect one")


def test_the_form_and_the_text_are_two_views_of_one_plan(store: Store, served: Shown, look: Open):
    twelve_rounds(store)
    page = look(served.url, "new")
    text = toml(page)
    text.fill(TEXT + '\n[uplink]\ncodec = "int8"\nlayers = {"*.bias" = "fp16"}\n')
    expect(page.locator("#f-run-rounds")).to_have_value("3")
    page.locator("#s-uplink > summary").click()
    expect(page.locator("#f-uplink-codec")).to_have_value("int8")
    expect(page.locator("#f-uplink-layers")).to_have_value("*.bias = fp16")
    fill(page, "uplink.codec", "topk(0.1)")
    expect(text).to_have_value(TEXT + '\n[uplink]\ncodec = "topk(0.1)"\nlayers = { "*.bias" = "fp16" }\n')
    fill(page, "uplink.codec", "")
    expect(text).to_have_value(TEXT + '\n[uplink]\nlayers = { "*.bias" = "fp16" }\n')
    text.fill("[run")
    expect(page.locator(".plan-state")).to_contain_text("the plan is not TOML")
    expect(page.locator("#f-run-rounds")).to_have_value("3")  # what is no TOML empties no form


DROPPED = """(text) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], "dropped.toml"));
    const dropped = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
    document.querySelector(".drop").dispatchEvent(dropped);
}"""


def test_a_plan_file_is_read_in_the_browser(store: Store, served: Shown, look: Open, tmp_path: Path):
    file = tmp_path / "plan.toml"
    file.write_text(TEXT)
    page = look(served.url, "new")
    page.locator(".drop input").set_input_files(file)
    expect(page.locator("#f-run-rounds")).to_have_value("3")
    expect(page.locator(".plan-state")).to_contain_text("This plan can run")
    expect(page.locator(".drop [role=status]")).to_have_text("plan.toml was read")
    toml(page).fill("")
    page.evaluate(DROPPED, TEXT)
    expect(page.locator(".drop [role=status]")).to_have_text("dropped.toml was read")
    expect(page.locator("#f-run-rounds")).to_have_value("3")


def test_a_clone_begins_with_the_plan_of_its_run(store: Store, served: Shown, look: Open):
    run = new_run(store, more='[uplink]\ncodec = "fp16"\n')
    run.quiet_round()
    finish(run)
    page = look(served.url, f"runs/{run.run_id}")
    page.get_by_role("link", name="Clone").click()
    expect(page.locator(".head")).to_contain_text(f"A clone of {run.run_id}")
    expect(toml(page)).to_have_value(
        f'[run]\ntask = "digits"\nrounds = 12\ninit = "run:{run.run_id}@0"\n\n'
        '[local]\nlr = 0.5\nsteps = 50\n\n[uplink]\ncodec = "fp16"\n'
    )
    expect(page.locator(".plan-state")).to_contain_text(f"First model: model 0 of {run.run_id}.")
    fill(page, "run.init", f"run:{run.run_id}")
    expect(page.locator(".plan-state")).to_contain_text(f"First model: the last model of {run.run_id}.")


def test_a_clone_of_an_extended_run_has_the_plan_of_its_start_and_says_so(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.quiet_round()
    finish(run)
    row, now = store.run(run.run_id), time.time()
    plan = {**row.plan, "run": {**row.plan["run"], "rounds": 40}, "local": {**row.plan["local"], "lr": 0.1}}
    before = {"run.rounds": 12, "local.lr": 0.5}
    more = RunExtended(now, 40, 12, row.version, row.rounds_closed + 1, plan, before=before)
    store.record(run.run_id, [more, RunStatusChanged(now, "queued", ""), RunStatusChanged(now, "done", "40 rounds")])
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator(".sentence")).to_contain_text("from its first start to its last end")
    expect(page.locator(".figures")).to_contain_text("first start to last end")
    page.get_by_role("link", name="Clone").click()
    expect(page.locator(".head")).to_contain_text("what its extension changed is left out")
    expect(toml(page)).to_have_value(re.compile(r"rounds = 12\n.*lr = 0\.5\n", re.DOTALL))


def show_all(page: Page) -> None:
    more = page.get_by_role("button", name=re.compile("more keys?$"))
    for left in range(more.count(), 0, -1):
        expect(more).to_have_count(left)
        more.first.click()


def test_the_form_is_usable_by_all_and_at_every_width(store: Store, served: Shown, look: Open):
    twelve_rounds(store)
    page = look(served.url, "new")
    expect(page.locator(".plan-state")).to_contain_text("The plan still needs:")
    for section in ("cohort", "uplink", "downlink", "server", "secure", "privacy"):
        page.locator(f"#s-{section} > summary").focus()
        page.keyboard.press("Enter")
    show_all(page)
    assert axe_in_both(page) == []
    for width in (400, 1000, 1300, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
        told = page.locator("#s-privacy > summary")
        heading, about = (told.locator(part).bounding_box() for part in ("h2", ".faint"))
        assert heading and about
        assert abs(heading["y"] - about["y"]) < 10, f"the heading's text stands beside it at {width}"
    page.locator(".wrongs a").click()
    expect(page.locator("#f-local-lr")).to_be_focused()


def test_every_key_of_a_plan_has_a_field(store: Store, served: Shown, look: Open):
    page = look(served.url, "new")
    assert page.request.get(f"{served.url}/api/v1/plans/schema").json() == RunPlan.model_json_schema()
    for section in ("cohort", "uplink", "downlink", "server", "secure", "privacy"):
        page.locator(f"#s-{section} > summary").click()
    show_all(page)
    missing = page.evaluate(
        """(keys) => keys.filter((id) => !document.getElementById(id))""",
        [f"f-{section}-{key}" for section, table in RunPlan.parse(TEXT).to_json().items() if isinstance(table, dict)
         for key in table],
    )  # fmt: skip
    assert missing == []


def test_a_dashboard_that_is_away_for_a_moment_starts_no_second_run(store: Store, running: Shown, look: Open):
    """What the aggregator made of a command is asked for again; the button stays disabled meanwhile."""
    run = twelve_rounds(store)
    page, cut = look(running.url, "new"), 0
    fill(page, "run.task", "digits")
    fill(page, "local.lr", "0.5")

    def away(route: Route) -> None:
        nonlocal cut
        cut += 1
        route.abort("connectionfailed") if cut == 1 else route.fallback()

    page.route(re.compile(r"/commands/\d+$"), away)
    command = started(page, store)
    expect(page.get_by_role("button", name="Starting…")).to_be_disabled()
    store.commands.answer(command.id, {"done": True, "run_id": run.run_id})
    expect(page).to_have_url(re.compile(f"/runs/{run.run_id}$"))
    assert cut > 1
    assert len(store.commands.pending()) == 0


def test_a_seed_of_63_bits_stays_what_it_is(store: Store, running: Shown, look: Open):
    page = look(running.url, "new")
    seed = 2**53 + 1
    toml(page).fill(TEXT.replace("[run]", f"[run]\nseed = {seed}", 1))
    expect(page.locator(".plan-state")).to_contain_text("This plan can run")
    assert started(page, store).args["plan"]["run"]["seed"] in (seed, str(seed))
