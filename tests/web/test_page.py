"""The dashboard as a browser shows it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.store.test_cells import cell
from tests.support.api_answers import Told
from tests.support.browsing import Open, axe, axe_in_both, overflow
from tests.support.filled_store import add_devices, finish, new_run, twelve_rounds
from tests.support.reasons import noted
from tests.support.serving import Shown, serving, showing
from thinwire.core.events import AssignmentDelivered, Evaluated, RoundClosed, RoundResumed, RunNoted, RunStatusChanged
from thinwire.core.statedir import hold
from thinwire.reports.sweep_results import TrialStore
from thinwire.store import MeasureRow, Store
from thinwire.store.round_timing import ASSIGNMENT_STAGES, UNACCOUNTED
from thinwire.web.security import STATIC


def test_the_status_stands_there_in_one_sentence_and_moves_with_the_run(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator(".sentence")).to_contain_text("5 of 8 devices have answered")
    expect(page.locator("#rounds h2")).to_have_text("Round 12")
    expect(page.locator(".progress")).to_contain_text(re.compile("about .* left"))
    expect(page.locator("#time .time-bar .train")).to_have_attribute("title", re.compile("train .* s"))
    run.answer("pi-06", 1.2)
    expect(page.locator(".sentence")).to_contain_text("6 of 8 devices have answered")
    expect(page.locator(".gantt li.gantt-row.is-aggregated")).to_have_count(6)
    run.fail("pi-08", 1.0, "task-error", "<img src=x onerror=alert(1)>")
    expect(page.locator(".gantt")).to_contain_text("failed: task-error: <img src=x onerror=alert(1)>")
    run.answer("pi-07", 1.4)
    run.close("enough", 1.5)
    expect(page.locator("#rounds .why")).to_contain_text("Round 12 took 1.5 s: waited 1.")
    run.status("done", "12 rounds")
    expect(page.locator(".sentence")).to_contain_text("Done: 12 rounds")
    expect(page).to_have_title(re.compile("done"))


def test_the_clients_are_read_again_when_the_run_ends_shortly_after_they_were(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    client = look(served.url, f"runs/{run.run_id}").locator("#clients tbody tr", has_text="pi-07")
    expect(client).to_contain_text("in round 12")
    run.answer("pi-07", 1.4)
    run.close("enough", 1.5)
    run.status("done", "12 rounds")
    expect(client).to_contain_text("idle")  # nothing comes after the end


def test_the_list_of_runs_moves_too(store: Store, served: Shown, look: Open):
    page = look(served.url)
    expect(page.get_by_role("heading", name="Nothing yet")).to_be_visible()
    expect(page.locator(".nothing")).to_contain_text("thinwire run plan.toml")
    typed = "thinwire client start --aggregator URL --task NAME=MODULE --name client-1"
    expect(page.locator(".nothing")).to_contain_text(typed)
    assert axe(page) == []
    run = new_run(store)
    expect(page.locator(".run")).to_contain_text("Queued")
    run.quiet_round()
    expect(page.locator(".run")).to_contain_text("Round 1 of 12")
    page.get_by_role("link", name=run.run_id).click()
    expect(page.locator("h1")).to_have_text(run.run_id)


def test_a_waiting_run_says_who_is_missing_and_how_to_add_a_device(store: Store, served: Shown, look: Open):
    run = new_run(store)
    add_devices(store, ["pi-01", "pi-02"], run.now)
    run.status("waiting", "waiting: 2 of 3 devices (missing pi-03)")
    page = look(served.url, f"runs/{run.run_id}", color_scheme="dark")
    expect(page.locator(".sentence")).to_have_text("Waiting: 2 of 3 devices (missing pi-03).")
    expect(page.locator(".nothing")).to_contain_text("--task digits=MODULE")
    expect(page.get_by_role("row", name="pi-02")).to_contain_text("online")
    assert axe(page) == []


def test_a_run_that_waits_between_rounds_says_how_to_add_a_device_unless_another_run_has_the_devices(
    store: Store, tmp_path: Path, look: Open
):
    run, lock = new_run(store), tmp_path / "lock"
    add_devices(store, ["pi-01", "pi-02"], run.now)
    run.quiet_round()
    run.status("waiting", "waiting: 2 of 3 devices")
    with hold(lock, {"listen": "127.0.0.1:9191"}), showing(store.url, lock) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        command = page.locator(".nothing code", has_text="thinwire client start")
        expect(command).to_contain_text("--aggregator http://127.0.0.1:9191 --task digits=MODULE")
        expect(page.get_by_role("row", name="pi-02").first).to_contain_text("online")
        run.status("waiting", "waiting for devices that digits-7 uses: a round needs 1 free device")
        expect(page.locator(".nothing")).to_contain_text("as soon as enough of them are free")
        expect(command).to_have_count(0)


def test_every_page_is_usable_by_all_and_at_every_width(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}")
    for query in ("?round=7", "?learning=table&bytes=table&gantt=table&round=6"):
        page.goto(f"{served.url}/runs/{run.run_id}{query}")
        page.wait_for_selector("#rounds .why")
        assert axe_in_both(page) == [], query
    for width in (400, 1000, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
    page.goto(f"{served.url}/")
    page.wait_for_selector(".run")
    assert axe_in_both(page) == []
    page.set_viewport_size({"width": 400, "height": 900})
    assert overflow(page) <= 0
    for chosen in ("dark", "light"):  # the other theme stays chosen
        page.emulate_media(color_scheme="light" if chosen == "dark" else "dark")
        page.get_by_role("button", name="theme").click()
        page.reload()
        assert page.locator("html").get_attribute("data-theme") == chosen


def test_a_window_made_narrow_has_no_second_scroll_bar_until_its_curves_are_drawn_again(
    store: Store, served: Shown, look: Open
):
    run = twelve_rounds(store)
    page = look(served.url)
    page.add_init_script("window.ResizeObserver = class { observe() {} disconnect() {} }")  # they never are
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{served.url}/runs/{run.run_id}")
    page.wait_for_selector(".curve canvas")
    page.set_viewport_size({"width": 390, "height": 900})
    assert overflow(page) <= 0


def test_a_page_names_the_zone_of_its_times(store: Store, served: Shown, look: Open):
    page = look(served.url, timezone_id="Asia/Tokyo")
    expect(page.get_by_role("contentinfo")).to_have_text("Times are in the time zone of this browser, Asia/Tokyo.")


def test_the_login_says_why_a_code_is_refused(store: Store, served: Shown, browser: Browser):
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{served.url}/login")
        assert axe(page) == []
        page.get_by_label("One-time code").fill("WRONG")
        page.get_by_role("button", name="Use code").click()
        expect(page.get_by_role("alert")).to_contain_text("not valid")
        page.get_by_label("One-time code").fill(store.logins.new_code())
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("Runs")


def test_a_link_whose_code_stands_behind_the_hash_logs_in_and_goes_on(store: Store, served: Shown, browser: Browser):
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{served.url}/login?next=devices#{store.logins.new_code()}")
        expect(page.locator("h1")).to_have_text("Devices")
        assert page.url == f"{served.url}/devices"


def test_what_is_chosen_stands_in_the_address_and_survives_a_reload(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}")
    page.get_by_role("radio", name="bytes").check(force=True)
    page.locator("#bytes").get_by_role("button", name="Table").click()
    page.locator(".strip button[aria-pressed=true]").focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#rounds h2")).to_have_text("Round 7")
    expect(page.locator(".closing")).to_contain_text("too few answered: 3 of at least 4")
    page.reload()
    expect(page.locator("#rounds h2")).to_have_text("Round 7")
    expect(page.get_by_role("radio", name="bytes")).to_be_checked()
    expect(page.locator("#bytes table")).to_be_visible()
    assert "round=7" in page.url
    page.get_by_role("button", name="Newest").click()
    expect(page.locator("#rounds h2")).to_have_text("Round 12")
    assert "round=" not in page.url


@pytest.mark.parametrize("made", [twelve_rounds, new_run], ids=["running", "queued"])
def test_a_person_stops_a_run_with_two_clicks(store: Store, served: Shown, look: Open, made: Callable[[Store], Told]):
    run = made(store)
    page = look(served.url, f"runs/{run.run_id}")
    page.get_by_role("button", name="Stop").click()
    assert store.commands.pending() == []
    page.get_by_role("group", name="Stop this run?").get_by_role("button", name="Stop").click()
    expect(page.get_by_text("command to stop sent")).to_be_visible()
    assert [(command.kind, command.run_id) for command in store.commands.pending()] == [("stop-run", run.run_id)]


def test_a_person_pauses_a_run_and_lets_it_go_on(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    page = look(served.url, f"runs/{run.run_id}")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("command to pause sent")).to_be_visible()
    store.record(run.run_id, [RunStatusChanged(1.0, "paused", "paused by a person after 12 of 20 rounds")])
    expect(page.locator(".head .status")).to_have_text("paused")
    expect(page.get_by_text("Paused by a person after 12 of 20 rounds.")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("command to resume sent")).to_be_visible()
    assert [command.kind for command in store.commands.pending()] == ["pause-run", "resume-run"]


def test_an_aggregator_that_is_gone_is_said_to_be_and_comes_back(store: Store, look: Open, tmp_path: Path):
    run = twelve_rounds(store)
    lock = tmp_path / "lock"
    with serving(store.url, "127.0.0.1:0", "--lock", str(lock)) as served:
        with hold(lock, {"listen": "127.0.0.1:9090"}):
            page = look(served.url, f"runs/{run.run_id}")
            expect(page.locator(".beat")).to_have_text("live")
        expect(page.get_by_role("alert")).to_contain_text("The aggregator is not running")
        os.utime(lock, (run.opened_at + 10.0, run.opened_at + 10.0))
        expect(page.get_by_role("alert")).to_contain_text(re.compile(r"not running since \d\d:\d\d:\d\d\."))
        expect(page.locator(".progress")).to_contain_text("open for 10 s,")
        for action in ("Pause", "Stop"):
            expect(page.get_by_role("button", name=action, exact=True)).to_be_disabled()
        expect(page.locator(".legend")).to_contain_text("the aggregator stopped here")
        assert axe(page) == []
        with hold(lock, {}):
            expect(page.locator(".beat")).to_have_text("live")
            expect(page.get_by_role("alert")).to_have_count(0)
            expect(page.get_by_role("button", name="Pause", exact=True)).to_be_enabled()
    expect(page.get_by_role("alert")).to_contain_text("What you see is as of")
    finish(run)
    with hold(lock, {}), serving(store.url, served.address):
        expect(page.locator(".beat")).to_have_text("live")
        expect(page.locator(".sentence")).to_contain_text("Done")


def test_a_round_shows_who_is_at_work_and_when_no_aggregator_was_there(store: Store, served: Shown, look: Open):
    run = twelve_rounds(store)
    run.say(AssignmentDelivered(run.opened_at + 0.4, 12, "pi-06", run.assignments["pi-06"]))
    run.say(RoundResumed(run.opened_at + 4.0, 12, run.opened_at + 2.0, run.elapsed))
    page = look(served.url, f"runs/{run.run_id}")
    lane = page.locator(".gantt-row", has_text="pi-06")
    expect(lane).to_contain_text("selected, at work")
    expect(lane.locator(".stage.work")).to_have_count(1)
    expect(page.locator(".gantt-row", has_text="pi-07").locator(".stage.work")).to_have_count(0)
    expect(page.locator(".legend")).to_contain_text("delivered, at work")
    expect(page.locator(".legend")).to_contain_text("downtime")
    expect(page.locator(".legend")).not_to_contain_text("not delivered")
    expect(lane.locator(".away")).to_have_count(1)


def test_the_deadline_stands_where_it_passes_also_after_an_absence(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.open(deadline_s=5.0)
    for device in run.devices[:-1]:
        run.answer(device, 2.0)
    run.say(RoundResumed(run.opened_at + 9.0, 1, run.opened_at + 4.0, run.elapsed, 7.0))
    run.close("deadline", 12.0, run.devices[-1:])
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator(".flag.deadline")).to_have_text("deadline 5.0 s + 7.0 s not counted")
    deadline, closed = (page.locator(f".line.{name}").first.bounding_box() for name in ("deadline", "closed"))
    assert deadline is not None
    assert closed is not None
    assert abs(deadline["x"] - closed["x"]) <= 1.0, "it closed when the deadline passed"


def test_a_run_and_a_round_say_where_the_time_went_and_whom_was_waited_for(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.open()
    for device in run.devices[:-1]:
        run.answer(device, 0.5)
    run.fail(run.devices[-1], 6.0, "offline", "no request for 6 s")
    links = [MeasureRow(name, "rtt", "", [[1.0, 0.05]], 0.05, 0.06, 9.0) for name in run.devices]
    store.record(run.run_id, [RunNoted(9.0, noted(""))], links)
    run.close("enough", 6.05)
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator("#rounds .why")).to_have_text("Round 1 took 6.0 s: waited 5.5 s for pi-08, which was lost.")
    expect(page.locator("#rounds .breakdown")).to_contain_text("Round trips within these: 2 requests × 50 ms = 100 ms.")
    expect(page.locator("#rounds .breakdown")).to_contain_text("waiting 5.5 s (for pi-08)")
    expect(page.locator("#time .why")).to_contain_text("1 round took 6.0 s, 91 % of it in the stage waiting")
    expect(page.locator("#time .breakdown")).to_contain_text("waiting 5.5 s")
    expect(page.locator(".legend")).to_contain_text("unaccounted")
    expect(page.locator(".gantt-row.is-aggregated .stage.unaccounted")).to_have_count(7)
    assert axe(page) == []


def test_a_client_whose_metrics_were_clipped_is_named_and_moves_no_curve(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.quiet_round()
    run.open()
    for device in run.assignments:
        run.answer(device, 0.5)
    lie = next(u for u in store.updates(run.run_id, 2) if u.device == "pi-03")
    metrics, clipped = {"loss": 1e89, "accuracy": 0.5}, {lie.update_id: ["loss"]}
    run.say(
        Evaluated(run.now, 1, 1, metrics, {"loss": [0.2, 1e90]}, 360, 8, robust={"loss": 0.3125}, clipped=clipped),
        RoundClosed(run.now, 2, "all", 2, run.aggregated, [], [], run.elapsed, 1.0, {}),
    )
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator("#learning")).to_contain_text("clipped: pi-03")
    expect(page.locator("#learning")).to_contain_text("0.3125")
    expect(page.locator("dl.figures")).to_contain_text("0.3125")
    expect(page.locator("#rounds")).to_contain_text("clipped (loss)")
    expect(page.locator("body")).not_to_contain_text("e+89")
    assert axe(page) == []


def test_fewer_bytes_on_the_wire_than_in_frames_are_said_to_be_a_part(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.open()
    run.answer("pi-01", 1.0)
    page = look(served.url, f"runs/{run.run_id}")
    up, down = (page.locator("#bytes .way").nth(n) for n in (0, 1))
    expect(up).not_to_contain_text("counted")
    expect(down).to_contain_text(re.compile(r"wire\s*[\d.]+ kB counted"))


def test_who_was_never_selected_is_not_counted_as_in_the_run(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.open(without={"pi-99": "it has no task digits"})
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator("#clients .aside")).to_have_text("8 in this run, 1 not selected so far")


def test_groups_of_simulated_runs_are_listed_with_how_many_are_over(store: Store, look: Open, tmp_path: Path):
    cells, done = TrialStore.named(tmp_path / "sweeps", "codecs"), cell()
    cells.request([done.made.digest, "another"])
    cells.keep(done)
    with showing(store.url, tmp_path / "lock") as served:
        page = look(served.url)
        expect(page.get_by_role("list", name="Groups of simulated runs")).to_contain_text("codecs toy: 1 of 2 runs")
        expect(page.locator("#sweeps li")).to_contain_text("; thinwire runs compare --group codecs")
        assert axe(page) == []
        assert overflow(page) <= 0


def test_a_run_that_is_not_there_says_so(store: Store, told: Told, browser: Browser):
    with showing(store.url) as served, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{served.url}/login?next=runs/digits-9&code={store.logins.new_code()}")
        expect(page.get_by_role("alert")).to_contain_text("no run 'digits-9'")
        expect(page.get_by_role("alert")).to_contain_text(told.run_id)
        expect(page.get_by_role("heading", level=1)).to_have_text("digits-9")


def test_the_dashboard_names_the_stages_as_the_command_line_does():
    drawn = re.search(r"STAGES = (\[.*?\])", (STATIC / "gantt.js").read_text())
    assert drawn is not None
    assert set(json.loads(drawn[1])) == {*ASSIGNMENT_STAGES, UNACCOUNTED}


def test_a_run_is_read_once_with_its_page_and_then_only_its_changes(run: Told, served: Shown, look: Open):
    page, reads = look(served.url), list[str]()
    page.on("request", lambda request: reads.append(request.url) if "/view?" in request.url else None)
    page.goto(f"{served.url}/runs/{run.run_id}")
    expect(page.locator("#rounds h2")).to_have_text("Round 1")
    begun = page.locator("link[rel=preload]").get_attribute("href") or ""
    run.quiet_round()
    expect(page.locator("#rounds h2")).to_have_text("Round 2")
    assert [url.removeprefix(served.url) for url in reads[:1]] == [begun.removeprefix("..")]
    assert (len(reads), "since=0" in reads[1]) == (2, False), reads
    page.goto(f"{served.url}/runs/{run.run_id}?round=1")
    expect(page.locator("#rounds h2")).to_have_text("Round 1")
    assert page.locator("link[rel=preload]").count() == 0, "the first read depends on what is chosen"


def test_the_address_of_the_latest_run_shows_nothing_of_the_one_before(run: Told, served: Shown, look: Open):
    for _ in range(2):
        run.quiet_round()
    page = look(served.url, "runs/latest")
    expect(page.locator(".strip button")).to_have_count(3)
    later = new_run(run.store, rounds=7)
    later.quiet_round()
    expect(page.locator("h1")).to_have_text(later.run_id)
    expect(page.locator(".strip button")).to_have_count(1)
    expect(page.get_by_role("progressbar", name="Rounds made")).to_have_attribute("aria-valuemax", "7")
    expect(page.locator("#plan")).to_contain_text("rounds7")
    assert run.run_id not in page.locator("main").inner_text()


@pytest.mark.parametrize(
    "path", ["", "runs/digits-1", "devices", "devices/pi-01", "alerts", "compare?runs=digits-1", "users", "audit"]
)
def test_a_read_that_fails_after_the_first_one_is_told_until_one_succeeds(
    run: Told, served: Shown, look: Open, path: str
):
    page, reads = look(served.url, path), "**/api/v1/**"
    expect(page.locator(".loading:visible")).to_have_count(0)
    page.route(reads, lambda route: route.abort("connectionfailed"))
    run.status("paused", "paused by a person")
    expect(page.get_by_role("alert")).to_contain_text("is not reachable")
    expect(page.get_by_role("alert")).to_contain_text("What you see was read before that.Try: reload this page")
    expect(page.get_by_role("alert")).not_to_contain_text("heard")
    expect(page.locator(".beat")).to_have_text("live")
    page.unroute(reads)
    run.status("running", "goes on")
    expect(page.get_by_role("alert")).to_have_count(0)
