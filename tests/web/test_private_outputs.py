"""docs/explain/private-outputs.md has every output of the aggregator, and in none is a fact of one client's data."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from tests.support.listed_files import unlisted
from tests.web.test_typed import words_of
from thinwire.cli.main import main, program
from thinwire.store import Store
from thinwire.web.app import create_app
from thinwire.web.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explain" / "private-outputs.md").read_text()
PLAN = (ROOT / "examples" / "digits" / "private.toml").read_text()
PLANS = {  # by [privacy] mode
    "central": PLAN,
    "local": PLAN.replace('mode = "central"', 'mode = "local"'),
    "example": PLAN.replace('mode = "central"', 'mode = "example"\nrecords = 400').replace("1e-3", "1e-4"),
    "distributed": (ROOT / "examples" / "digits" / "private-secure.toml").read_text().replace(
        "clients = 20", "clients = 3"
    ),
}  # fmt: skip
CLIENT = "sim-1"
HOST = "http://127.0.0.1:8080"
READING = {  # each command of the tables that reads the store of a run, as it is typed
    "runs list": ["runs list", "runs list --json"],
    "runs show": ["runs show latest", "runs show latest --why", "runs show latest --json"],
    "runs watch": ["runs watch latest"],
    "runs compare": ["runs compare latest", "runs compare latest --json"],
    "runs metrics": ["runs metrics latest", "runs metrics latest --json", "runs metrics latest --csv"],
    "runs model": ["runs model latest --out {out}/m.safetensors --json"],
    "privacy ledger": ["privacy ledger", "privacy ledger --json"],
    "privacy report": ["privacy report latest --json", "privacy report latest --html"],
    "devices list": ["devices list --json", "devices list --log"],
    "devices show": [f"devices show {CLIENT}"],
    "aggregator status": ["aggregator status"],
    "aggregator doctor": ["aggregator doctor"],
    "aggregator logs": ["aggregator logs"],
    "aggregator backup": ["aggregator backup {out}/backup.tar"],
}
STREAMS = {"/api/v1/live", "/api/v1/runs/{run_id}/events/stream"}  # they have no end
BEGIN = {"run", "sim", "demo"}  # begin runs; `sim` has made those of this test, and its print is searched


@dataclass(frozen=True)
class Outputs:
    """A simulated run: what it printed, its state directory, and everything that it shows by name."""

    home: Path
    shown: dict[str, bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("outputs")
    shutil.copytree(ROOT / "examples" / "digits", made / "digits", ignore=shutil.ignore_patterns("__pycache__"))
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Outputs:
    """The clients of the private runs, with the same seed, in a run without privacy."""
    plan = folder / "digits" / "z-plain.toml"
    plan.write_text(PLAN.partition("[privacy]")[0])
    return made(plan, folder / "plain")


@pytest.fixture(scope="module")
def masked(folder: Path) -> Outputs:
    """The same clients and the same work in a run with secure aggregation and no privacy."""
    plan = folder / "digits" / "z-masked.toml"
    sums = '[secure]\nenabled = true\nmetrics = { "train/loss" = 10.0 }\n'
    plan.write_text(PLAN.partition("[uplink]")[0].replace("[cohort]", "[cohort]\nclients = 3") + sums)
    return made(plan, folder / "masked")


@pytest.fixture(scope="module", params=PLANS)
def private(folder: Path, request: pytest.FixtureRequest) -> Outputs:
    plan = folder / "digits" / f"z-{request.param}.toml"
    plan.write_text(PLANS[request.param])
    return made(plan, folder / request.param)


def made(plan: Path, home: Path) -> Outputs:
    shown = {"sim": said(f"sim {plan} --clients 3 --split iid --set run.rounds=2", home)}
    out = home.with_suffix(".out")
    out.mkdir()
    for commands in READING.values():
        for words in commands:
            shown[words] = said(words.format(out=out), home)
    with Store.open(home / "aggregator" / "store.sqlite3") as store:
        app = create_app(Settings(store.url, port=8080, lock=home / "aggregator" / "lock"), store)
        with TestClient(app, base_url=HOST) as client:
            client.post("/login", data={"code": store.logins.new_code()})
            for path in gets(app.app):
                if path not in STREAMS:
                    names = {"run_id": "digits-1", "number": 1, "name": CLIENT, "version": "last"}
                    shown[path] = client.get(path.format(**names)).content
    for file in sorted(home.rglob("*")):
        if file.is_file():
            shown[str(file.relative_to(home))] = file.read_bytes()
    with tarfile.open(out / "backup.tar") as archive:
        for member in archive:
            if (inside := archive.extractfile(member)) is not None:
                shown[f"backup: {member.name}"] = inside.read()
    shown["safetensors"] = (out / "m.safetensors").read_bytes()
    return Outputs(home, shown)


def said(words: str, home: Path) -> bytes:
    """What a command prints, on both streams."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        main([*words.split(), "--home", str(home)])
    return text.getvalue().encode()


def routes(app: object) -> Iterator[APIRoute]:
    """Every route of the application, of included routers too."""
    for route in getattr(app, "routes", ()):
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from routes(getattr(route, "original_router", None))


def gets(app: object) -> list[str]:
    return sorted({route.path for route in routes(app) if "GET" in (route.methods or ())})


def facts(outputs: Outputs) -> dict[str, re.Pattern[bytes]]:
    """What the first reply of one client of a run tells of its data, in each form in which it may be written.

    A rounded number counts only as a whole one: among thousands of times of 16 digits some begin with any five.
    """
    with Store.open(outputs.home / "aggregator" / "store.sqlite3") as store:
        (found,) = [one for one in store.updates("digits-1", 1) if one.device == CLIENT]
    assert found.norm is not None
    planted = {"metric": found.metrics["train/loss"], "norm": found.norm}
    return {name: re.compile(b"|".join(written(value)), re.DOTALL) for name, value in planted.items()}


def written(value: float) -> Iterator[bytes]:
    """The patterns of a number: with many digits, rounded, and packed."""
    yield re.escape(f"{value:.9g}"[:-1].encode())
    for rounded in (f"{value:.7g}", f"{value:.4f}"):
        yield rb"(?<![\d.])%s(?!\d)" % re.escape(rounded.encode())
    for form in ("<d", ">d"):
        yield re.escape(struct.pack(form, value))


def size_of_data(outputs: Outputs) -> re.Pattern[bytes]:
    with Store.open(outputs.home / "aggregator" / "store.sqlite3") as store:
        sizes = {str(one.examples) for one in store.updates("digits-1") if one.examples}
    assert sizes
    return re.compile(rb"examples[\"':, ]{1,4}(?:%s)\b" % "|".join(sorted(sizes)).encode())


TRAINED = re.compile(rb"train(?:_s)?\\?\"?: ?\d*\.?\d*[1-9]")  # a time of training in a document or an event


def test_no_output_of_a_private_run_has_a_fact_of_one_client_and_a_plain_run_shows_each(
    plain: Outputs, private: Outputs
) -> None:
    size = size_of_data(plain)
    for fact, pattern in facts(plain).items():
        assert [name for name, data in plain.shown.items() if pattern.search(data)], f"blind to {fact}"
        assert not [name for name, data in private.shown.items() if pattern.search(data)], fact
    for pattern in (size, TRAINED):
        assert {"/api/v1/runs/{run_id}/updates", "aggregator/store.sqlite3"} & {
            name for name, data in plain.shown.items() if pattern.search(data)
        }, "the search is blind"
        assert not [name for name, data in private.shown.items() if pattern.search(data)], pattern


def test_no_output_of_a_secure_run_has_a_fact_of_one_client(plain: Outputs, masked: Outputs) -> None:
    """The control is the plain run, in which the test above finds each of them."""
    for fact, pattern in {**facts(plain), "size": size_of_data(plain), "times": TRAINED}.items():
        assert not [name for name, data in masked.shown.items() if pattern.search(data)], fact
    rounds = json.loads(masked.shown["/api/v1/runs/{run_id}/rounds"])
    assert all(one["train_metrics"].keys() == {"loss"} for one in rounds), "only the sum is there"
    for one in json.loads(masked.shown["/api/v1/runs/{run_id}/updates"]):
        assert [one[name] for name in ("examples", "steps", "norm", "residual_norm")] == [None] * 4


def test_documents_of_a_private_run_have_no_metric_and_no_fact(private: Outputs) -> None:
    shown = private.shown
    updates = json.loads(shown["/api/v1/runs/{run_id}/updates"])
    assert len(updates) == 6
    for one in updates:
        assert [one[name] for name in ("examples", "steps", "norm", "residual_norm")] == [None] * 4
        assert one["metrics"] == {}
    assert all(not one["metrics"] and not one["spread"] for one in json.loads(shown["/api/v1/runs/{run_id}/rounds"]))


def test_the_routes_of_the_table_are_those_of_the_dashboard(private: Outputs) -> None:
    with Store.open(private.home / "aggregator" / "store.sqlite3") as store:
        found = set(gets(create_app(Settings(store.url, port=8080), store).app))
    listed = set(re.findall(r"`(/[^`]*)`", PAGE.partition("## Dashboard")[2].partition("## Commands")[0]))
    assert listed - {"/static", "/logout", "/api/v1/openapi.json"} == found
    assert {path for path in private.shown if path.startswith("/")} == found - STREAMS


def test_the_commands_of_the_page_are_all_there_are() -> None:
    found = {words for words, _ in words_of(typer.main.get_command(program()))}
    part = PAGE.partition("## Commands")[2].partition("## Files")[0]
    reading, _, others = part.partition("These print nothing")
    shown, silent = (
        set(re.findall(r"`thinwire ([^`]+)`", text)) for text in (reading, others.partition("The commands of")[0])
    )
    assert shown == READING.keys() | BEGIN | {"runs track"}  # it writes elsewhere: tests/cli/test_track.py
    assert {words for words in found if not words.startswith("client ")} == shown | silent
    assert not shown & silent


def test_every_file_of_a_state_directory_is_of_a_kind_on_the_page(private: Outputs) -> None:
    inside = {name.removeprefix("aggregator/") for name in private.shown if name.startswith("aggregator/")}
    assert {"store.sqlite3", "runs/digits-1/v000002.model"} <= inside
    assert unlisted(inside) == []
    assert unlisted(["x.txt", "runs/a/b.txt"]) == ["runs/a/b.txt", "x.txt"]
    assert not [name for name in private.shown if name.startswith(("aggregator/spool/", "backup: spool/"))]
