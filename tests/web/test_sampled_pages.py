"""Whoever was sampled, all but the aggregator's operator read the same: dashboard, API, CSV and command line."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from tests.server import test_private_rounds as plain
from tests.server import test_sampled_rounds as sampled
from tests.support.crashes import Fate
from thinwire.cli.main import main
from thinwire.core import RunPlan
from thinwire.core.events import RoundOpened
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

ROUTES = (
    "/api/v1/service", "/api/v1/runs", "/api/v1/groups", "/api/v1/runs/{run_id}", "/api/v1/runs/{run_id}/rounds",
    "/api/v1/runs/{run_id}/rounds/{number}", "/api/v1/runs/{run_id}/updates", "/api/v1/runs/{run_id}/rounds.csv",
    "/api/v1/runs/{run_id}/updates.csv", "/api/v1/runs/{run_id}/clients.csv", "/api/v1/devices",
    "/api/v1/devices/{name}", "/api/v1/devices.csv", "/api/v1/runs/{run_id}/heat",
    "/api/v1/devices/{name}/health?until=1700003600", "/api/v1/devices/{name}/health.csv?until=1700003600",
    "/api/v1/invitations", "/api/v1/refusals",
    "/api/v1/runs/{run_id}/view", "/api/v1/runs/{run_id}/round-summaries", "/api/v1/runs/{run_id}/clients",
    "/api/v1/runs/{run_id}/view?client=0&sort=last_outcome",
    "/api/v1/runs/{run_id}/clients?sort=selected&descending=true",
    "/api/v1/runs/{run_id}/clients.csv?sort=state",
    "/api/v1/runs/{run_id}/models",
    "/api/v1/run-list", "/api/v1/run-list.csv", "/api/v1/compare?runs={run_id}", "/api/v1/compare.csv?runs={run_id}",
)  # fmt: skip
OTHERS = {
    "/api/v1/live", "/api/v1/devices/{name}/revocations/{number}", "/api/v1/session", "/api/v1/users", "/api/v1/tokens",
    "/api/v1/audit", "/api/v1/audit.csv", "/api/v1/alerts", "/api/v1/alerts.csv", "/api/v1/plans/schema",
    "/api/v1/plans/tasks", "/api/v1/commands/{number}", "/api/v1/runs/{run_id}/models/{version}",
    "/api/v1/runs/{run_id}/events", "/api/v1/runs/{run_id}/events/stream",  # tests/web/test_event_feed.py compares them
}  # fmt: skip
"""The stream has the number of `Store.changes`, which has a test of its own; the others tell of no reply of a run."""
COMMANDS = (
    ("runs", "list"), ("runs", "list", "--json"), ("runs", "show"), ("runs", "show", "--json"),
    ("runs", "show", "--why"), ("runs", "show", "--why", "--json"), ("runs", "watch"), ("devices", "list", "--json"),
    ("devices", "show", "a", "--json"), ("privacy", "ledger"), ("privacy", "ledger", "--json"),
    ("privacy", "ledger", "--device", "a", "--json"), ("privacy", "report", "toy-1"),
    ("runs", "compare", "toy-1", "--json"),
)  # fmt: skip
with warnings.catch_warnings():  # it says that it would rather have httpx2
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

MASKED = (
    (r"[0-9a-f]{64}|(?<=digest )[0-9a-f]{16}", "DIGEST"),  # of models, which have other noise
    (r"\b(?!1700000)1[0-9]{9}(\.[0-9]+)?", "TIME"),  # of the wall clock: enrolled, submitted and now
    (r" +[0-9.]+ m?s ago", " AGO"),
    (r"\b(?!2023)20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:]+Z", "TIME"),
    (r'"identity": ?"[^"]*"', "IDENTITY"),
    (r"(seconds|elapsed_s)(\W+)([0-9]+)\.[0-9]+", r"\1\2\3"),
)


def visiting(store: Store) -> TestClient:
    return TestClient(create_app(Settings(store.url, port=8080), store), base_url="http://127.0.0.1:8080")


def shown(home: AggregatorHome) -> dict[str, str]:
    """All that the store of one run shows, by route and command, without what differs between any two runs."""
    with Store.open(home.database) as store, visiting(store) as page:
        page.post("/login", data={"code": store.logins.new_code()})
        found = {}
        for route in ROUTES:
            for name in sampled.NAMES if "{name}" in route else ("",):
                for number in (1, 2, 3) if "{number}" in route else (0,):
                    answer = page.get(address := route.format(run_id="toy-1", number=number, name=name))
                    assert answer.status_code == 200, address
                    found[address] = answer.text
    for words in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            assert main([*words, "--home", str(home.root.parent)]) == 0, out.getvalue()
        found[" ".join(words)] = out.getvalue()
    for pattern, instead in MASKED:
        found = {place: re.sub(pattern, instead, text) for place, text in found.items()}
    return found


Made = Callable[..., tuple[dict[str, str], list[Sequence[str]]]]


@pytest.fixture
def run(tmp_path: Path) -> Made:
    """Runs three rounds with these samples, or without sampling; returns what is shown and who was selected."""

    def made(name: str, *samples: str, plan: RunPlan | None = None) -> tuple[dict[str, str], list[Sequence[str]]]:
        folder = tmp_path / name
        if plan is None:
            with sampled.of_coins(*samples):
                outcome = sampled.World(folder, Fate()).live()
        else:
            outcome = plain.World(folder, Fate(), plan).live()
        assert outcome.status == "done"
        selected: list[Any] = [sorted(event.assignments) for event in outcome.of(RoundOpened)]
        return shown(AggregatorHome.under(folder)), selected

    return made


def test_every_route_shows_the_same_whoever_was_sampled(run: Made) -> None:
    few, of_few = run("few", "", "a", "b")
    many, of_many = run("many", "abcde", "bce", "abce")
    assert (of_few, of_many) == ([[], ["a"], ["b"]], [list("abcde"), list("bce"), list("abce")]), "the journal has it"
    for place, text in few.items():
        assert text == many[place], place
    assert not [place for place, text in many.items() if re.search(r"toy-1\.\d\.[a-e]|toy-1/[a-e]/", text)]
    for place in ("/api/v1/run-list", "/api/v1/compare?runs=toy-1"):
        bytes_of = set(re.findall(r'"(?:payload|dense|wire)_(?:up|down)":(\w+)', few[place]))
        assert bytes_of == {"null"}, "bytes that are not shown are no 0"


def test_the_same_comparison_finds_who_was_selected_without_sampling(run: Made) -> None:
    text = plain.TEXT.replace("clients = 5", "clients = 2").replace("rounds = 3", "rounds = 3\nseed = {}")
    one, of_one = run("one", plan=RunPlan.parse(text.format(1) + "noise_multiplier = 1.0"))
    two, of_two = run("two", plan=RunPlan.parse(text.format(2) + "noise_multiplier = 1.0"))
    assert of_one != of_two
    differing = {place for place, said in one.items() if said != two[place]}
    assert {
        "/api/v1/runs/toy-1", "/api/v1/runs/toy-1/rounds", "/api/v1/runs/toy-1/rounds/1", "/api/v1/runs/toy-1/updates",
        "/api/v1/runs/toy-1/rounds.csv", "/api/v1/runs/toy-1/updates.csv", "/api/v1/runs/toy-1/clients.csv",
        "/api/v1/devices/a", "/api/v1/devices/a/health?until=1700003600", "/api/v1/runs/toy-1/heat", "runs show",
        "runs show --json", "privacy ledger --json",
    } <= differing  # fmt: skip
    assert re.search(r"toy-1\.\d\.[a-e]", one["/api/v1/runs/toy-1/updates"])


def test_no_route_is_left_out(store: Store) -> None:
    app: Any = create_app(Settings(store.url, port=8080), store).app
    described = {path for path, methods in app.openapi()["paths"].items() if "get" in methods}
    files = {one.path for one in app.routes if isinstance(one, Route) and "GET" in (one.methods or ())}
    told = {route.partition("?")[0] for route in ROUTES} | {app.openapi_url}
    assert {path for path in described | files if path.startswith("/api/")} == told | OTHERS


def test_the_number_of_changes_tells_no_number_of_replies(tmp_path: Path) -> None:
    """It is the journal's last number, unless a run is sampled: then it counts what may be shown."""
    numbers = []
    for name, sample in (("few", ""), ("many", "abcde")):
        with sampled.of_coins(*[sample] * 3):
            sampled.World(tmp_path / name, Fate()).live()
        with Store.open(AggregatorHome.under(tmp_path / name).database) as store:
            numbers.append((store.changes(), store.changes(), store.last_seq()))
            store.record_restart(1.0, 0.0)
            assert store.changes() == 2
    assert [one[:2] for one in numbers] == [(1, 1), (1, 1)]
    assert numbers[0][2] < numbers[1][2], "the journal's own number tells it"
    plain.World(tmp_path / "plain", Fate()).live()
    with Store.open(AggregatorHome.under(tmp_path / "plain").database) as store:
        assert store.changes() == store.last_seq()
