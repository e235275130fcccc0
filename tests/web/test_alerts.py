"""Alerts: what is decided from a store, what is sent where, and what the page shows."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.api_answers import DEVICES, Told
from tests.support.browsing import Open, axe, overflow
from tests.support.filled_store import new_run
from tests.support.serving import showing
from thinwire.core.clock import DOWN_SINCE
from thinwire.core.owner_file import AlertSettings, aggregator_file
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import hold
from thinwire.reports.alerting import AlertContext, conditions, divergence
from thinwire.store import Condition, Store
from thinwire.web.alerts import AlertWatch

DEFAULT = AlertSettings()
MINUTE_S, DAY_S = 60.0, 86_400.0


def kinds(store: Store, **around: Any) -> list[str]:
    found, _ = conditions(store, AlertContext(**{"now": time.time(), **around}), DEFAULT)
    return [one.kind for one in found]


def diverge(run: Told) -> None:
    run.open()
    for device in DEVICES[:3]:
        run.fail(device, 1.0, "non-finite", "the loss became NaN or infinity")
    for device in DEVICES[3:]:
        run.answer(device, 1.5)
    run.close("enough", 2.0)
    run.open()


def test_a_run_that_goes_on_has_no_alert(store: Store, run: Told):
    assert kinds(store, now=run.now + 29 * MINUTE_S, free_bytes=5 * 10**9) == []


def test_a_run_without_a_closed_round_for_half_an_hour_has_one(store: Store, run: Told):
    ((one,), unknown) = conditions(store, AlertContext(run.now + 31 * MINUTE_S), DEFAULT)
    assert (one.kind, one.subject, unknown) == ("no-progress", run.run_id, frozenset())
    assert "no round has closed for 31 min" in one.sentence
    run.status("paused", "paused by a person")  # nobody expects progress then
    assert kinds(store, now=run.now + 31 * MINUTE_S) == []


def test_a_run_that_goes_on_after_a_pause_is_quiet_since_then(store: Store, run: Told):
    run.status("paused", "paused by a person")
    run.now += 60 * MINUTE_S
    run.status("running", "")
    run.open()
    assert kinds(store, now=run.now + 29 * MINUTE_S) == []
    assert kinds(store, now=run.now + 31 * MINUTE_S) == ["no-progress"]


def test_a_run_that_waits_for_devices_or_closes_rounds_as_too_few_has_one(store: Store, run: Told):
    for _ in range(3):
        assert kinds(store, now=run.now) == []
        run.open()
        run.close("too-few", 2.6)
    assert kinds(store, now=run.now) == ["too-few-clients"]
    run.quiet_round()
    assert kinds(store, now=run.now) == []
    run.status("waiting", "waiting: 3 of 8 devices")
    assert kinds(store, now=run.now + 9 * MINUTE_S) == []
    assert kinds(store, now=run.now + 11 * MINUTE_S) == ["too-few-clients"]


def test_updates_that_are_not_finite_have_one_with_what_to_try(store: Store, run: Told):
    diverge(run)
    ((one,), _) = conditions(store, AlertContext(run.now), DEFAULT)
    assert (one.kind, one.subject) == ("not-finite", run.run_id)
    assert "3 updates of the last 2 rounds held NaN or infinity" in one.sentence
    assert "[local] lr" in one.hint


def test_a_first_round_that_is_not_finite_is_told_as_the_last_one(store: Store):
    run = new_run(store)
    diverge(run)
    assert "3 updates of the last round held NaN or infinity" in divergence(store, store.run(run.run_id))


def test_disk_certificate_and_aggregator_are_judged_by_their_numbers(store: Store):
    now = time.time()
    assert kinds(store, free_bytes=999 * 10**6) == ["disk"]
    assert kinds(store, certificate_until=now + 13 * DAY_S) == ["certificate"]
    assert kinds(store, certificate_until=now + 15 * DAY_S) == []
    assert kinds(store, down_since=now - 1 * MINUTE_S) == []
    assert kinds(store, down_since=now - 3 * MINUTE_S) == ["aggregator-offline"]


def test_while_the_aggregator_is_down_nobody_judges_its_runs(store: Store, run: Told):
    found, unknown = conditions(store, AlertContext(run.now + 60 * MINUTE_S, down_since=run.now), DEFAULT)
    assert [one.kind for one in found] == ["aggregator-offline"]
    assert unknown == {"no-progress", "too-few-clients", "not-finite"}


@contextmanager
def target(status: int = 204, **headers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook on this machine, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *said: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", got
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The lock of an aggregator that runs; its settings are in HOME, above its folder."""
    folder = tmp_path / "aggregator"
    folder.mkdir()
    with hold(folder / "lock", {"listen": "127.0.0.1:9090"}):
        yield folder / "lock"


def settings(place: Path, text: str) -> None:
    (place.parent.parent / "aggregator.toml").write_text(f"[alerts]\n{text}\n")


def test_each_change_is_sent_once_to_the_webhook(store: Store, run: Told, place: Path):
    watch = AlertWatch(store, place)
    with target() as (url, got):
        settings(place, f'webhook = "{url}"\nno_progress_min = 1e-6\nmin_free_disk_mb = 0')
        watch.look()
        watch.look()
        run.status("done", "12 rounds")
        watch.look()
        watch.look()
    assert [(said["kind"], said["change"], said["run_id"]) for said in got] == [
        ("no-progress", "opened", run.run_id), ("no-progress", "closed", run.run_id),
    ]  # fmt: skip


def test_what_to_try_names_the_state_directory_and_how_the_aggregator_was_started(store: Store, run: Told, place: Path):
    home = place.parent.parent
    settings(place, "no_progress_min = 1e-6\nmin_free_disk_mb = 0")
    AlertWatch(store, place).look()
    (row,) = store.alerts.open()
    assert row.hint == f"thinwire runs show --home {home} {run.run_id} --why; thinwire aggregator logs --home {home}"
    down = home / "down" / "aggregator" / "lock"
    down.parent.mkdir(parents=True)
    down.write_text(json.dumps({DOWN_SINCE: time.time() - 3 * MINUTE_S}))
    StartOptions({"listen": "0.0.0.0:9443"}).save(down.parent)
    settings(down, "min_free_disk_mb = 0")
    AlertWatch(store, down).look()
    (row,) = [one for one in store.alerts.open() if one.kind == "aggregator-offline"]
    assert row.hint == f"thinwire aggregator start --home {home}/down --listen 0.0.0.0:9443; runs go on then"


def test_a_webhook_that_fails_or_redirects_is_tried_again_and_says_why(store: Store, place: Path):
    watch = AlertWatch(store, place)
    with target(302, Location="http://127.0.0.1:1/other") as (url, got):
        settings(place, f'webhook = "{url}"\nmin_free_disk_mb = 1000000000')
        watch.look()
        assert len(got) == 1
    (row,) = store.alerts.open()
    assert (row.failures, row.opening_sent_at) == (1, None)
    assert "302" in row.failure


def test_a_target_that_answers_something_else_than_http_does_not_end_the_alerts(store: Store, place: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"garbage not http\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        settings(place, f'webhook = "http://127.0.0.1:{server.getsockname()[1]}/"\nmin_free_disk_mb = 1000000000')
        AlertWatch(store, place).look()
        thread.join(20)
    assert "BadStatusLine" in store.alerts.open()[0].failure


def test_a_target_that_has_the_message_does_not_get_it_again_while_another_fails(store: Store, place: Path):
    tries, broken = list[str](), True

    def send(target: str, wanted: AlertSettings, said: dict[str, Any]) -> None:
        tries.append(f"{target} {said['change']}")
        if target == "email" and broken:
            raise http.client.IncompleteRead(b"")

    settings(place, 'webhook = "http://x/"\nemail_to = ["a@example.org"]\nmin_free_disk_mb = 1000000000')
    watch, clock = AlertWatch(store, place, send), store.alerts._clock
    watch.look()
    (row,) = store.alerts.open()
    assert (row.failures, row.sent_to, row.opening_sent_at) == (1, "webhook", None)
    broken = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(clock), "wall", lambda _: time.time() + 60)
        watch.look()
    settings(place, 'webhook = "http://x/"\nemail_to = ["a@example.org"]\nmin_free_disk_mb = 0')
    watch.look()
    assert tries == ["webhook opened", "email opened", "email opened", "webhook closed", "email closed"]


def test_a_target_that_does_not_answer_is_tried_once_in_a_look(store: Store, place: Path, monkeypatch):
    tries = list[str]()

    def send(target: str, _wanted: AlertSettings, said: dict[str, Any]) -> None:
        tries.append(f"{target} {said['sentence']}")
        assert target == "email", "the webhook does not answer"

    monkeypatch.setattr("thinwire.web.alerts.conditions", lambda *_: ([Condition("disk", n, n) for n in "12"], {}))
    settings(place, 'webhook = "http://x/"\nemail_to = ["a@example.org"]')
    AlertWatch(store, place, send).look()
    assert tries == ["webhook 1", "email 1", "email 2"]


def test_without_a_target_nothing_is_owed(store: Store, place: Path):
    settings(place, "min_free_disk_mb = 1000000000")
    AlertWatch(store, place).look()
    (row,) = store.alerts.open()
    assert (row.due, row.failures) == (None, 0)


def test_a_file_that_is_wrong_changes_nothing(store: Store, place: Path):
    watch = AlertWatch(store, place)
    settings(place, "min_free_disk_mb = 1000000000")
    watch.look()
    settings(place, 'min_free_disk_mb = "much"')
    watch.look()
    assert [one.kind for one in store.alerts.open()] == ["disk"]


@pytest.mark.parametrize(
    "wrong",
    [
        'smtp_user = "u"\nsmtp = "mail.example.org:25"',
        'webhook = "http://x:0/"',
        'webhook = "http://x:99999/"',
        'webhook = "http://x:abc/"',
        'webhook = "file:///etc/passwd"',
        'webhook = "gopher://x"',
        'smtp = "mail"',
        "x = 1",
    ],
)
def test_a_target_that_is_none_is_refused_with_the_file(tmp_path: Path, wrong: str):
    (tmp_path / "aggregator.toml").write_text(f"[alerts]\n{wrong}\n")
    with pytest.raises(Exception, match="aggregator.toml"):
        aggregator_file(tmp_path)


def test_alerts_are_read_and_acknowledged_through_the_api(page: TestClient, store: Store):
    store.alerts.update([Condition("disk", "", "the disk has 3 MB free")])
    assert [one["kind"] for one in page.get("/api/v1/alerts").json()] == ["disk"]
    origin = {"Origin": "http://127.0.0.1:8080"}
    assert page.post("/api/v1/alerts/1/acknowledge", headers=origin).json()["acknowledged_by"]
    assert page.post("/api/v1/alerts/9/acknowledge", headers=origin).status_code == 404
    assert page.get("/api/v1/alerts.csv").text.splitlines()[1].startswith("1,disk,")


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (420, "dark")])
def test_the_page_shows_what_is_wrong_and_takes_an_acknowledgement(store: Store, look: Open, width: int, scheme: Any):
    disk = Condition("disk", "", "the disk of the state directory has 3 MB free, which is little", "free some space")
    quiet = Condition("no-progress", "digits-1", "digits-1: no round has closed for 40 min", "runs show --why")
    for found in ([disk], [disk, quiet], [disk]):
        store.alerts.update(found)
    with showing(store.url, None) as shown:
        page = look(shown.url, "alerts", viewport={"width": width, "height": 900}, color_scheme=scheme)
        expect(page.get_by_role("link", name="Alerts")).to_contain_text("1 not acknowledged")
        expect(page.locator("#closed-alerts")).to_contain_text("digits-1")
        assert axe(page) == []
        assert overflow(page) == 0
        assert page.locator("#open-alerts .scroll").evaluate("(e) => e.scrollWidth - e.clientWidth") == 0
        page.get_by_role("button", name="Acknowledge: the disk").click()
        expect(page.locator("#open-alerts")).to_contain_text("machine")
        expect(page.get_by_role("link", name="Alerts")).not_to_contain_text("not acknowledged")
    assert store.alerts.counts()[:2] == (1, 0)


def test_a_message_is_being_sent_on_the_page_until_it_is_sent(store: Store, look: Open):
    store.alerts.update([Condition("disk", "", "the disk is full")])
    with showing(store.url, None) as shown:
        row = look(shown.url, "alerts").locator("#open-alerts tbody tr")
        expect(row).to_contain_text("being sent")
        store.alerts.not_sent(store.alerts.open()[0], "webhook: no answer", "")
        expect(row).to_contain_text("not sent: webhook: no answer")
        store.alerts.sent(store.alerts.open()[0], "opened")
        expect(row).not_to_contain_text("sent")


def test_the_headline_of_a_run_whose_training_diverges_says_so_with_what_to_try(store: Store, run: Told, look: Open):
    wanted = "Training diverges: 3 updates of the last 2 rounds held NaN or infinity; try a smaller [local] lr"
    diverge(run)
    with showing(store.url, None) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        expect(page.locator(".notice").first).to_contain_text(wanted)
        assert axe(page) == []
    run.status("done", "12 rounds")
    assert divergence(store, store.run(run.run_id)) == ""
    run.status("failed", "4 rounds in a row had too few replies", 6)
    assert divergence(store, store.run(run.run_id)).startswith(wanted.replace("diverges", "diverged"))


def test_a_loss_that_stays_over_that_of_the_first_model_is_told_with_what_to_try(store: Store, run: Told, monkeypatch):
    measured = run.measured
    losses = [2.3, 1.1, 2.0, 0.9, 1.0, 1.5, 1.4, 1.3]  # of the models 0 to 7
    monkeypatch.setattr(run, "measured", lambda version: replace(measured(version), metrics={"loss": losses[version]}))
    said = list[str]()
    for _ in losses[1:]:
        run.open()
        run.answer(DEVICES[0], 1.0)
        run.close("enough", 2.0)
        said.append(divergence(store, store.run(run.run_id)))
    assert said[:-1] == [""] * 6
    wanted = "Training diverges: the loss was 1.1000 after round 1, and is 1.3000 after round 7; try a smaller [local]"
    assert said[-1].startswith(wanted)
    monkeypatch.setattr(run, "measured", lambda version: replace(measured(version), metrics={}))
    for _ in range(3):  # with pipelined rounds the latest models are not evaluated yet
        run.open()
        run.answer(DEVICES[0], 1.0)
        run.close("enough", 2.0)
    assert divergence(store, store.run(run.run_id)).startswith(wanted)
