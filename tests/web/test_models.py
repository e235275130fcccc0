"""Model versions of a run on the dashboard: which are kept, and the file that `thinwire runs model` writes, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from safetensors.numpy import load
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from tests.support.browsing import Open, axe
from tests.support.cli_story import PARAMS, told
from tests.support.serving import showing
from tests.web.test_roles import HOST, Visitors
from thinwire.cli.main import main
from thinwire.core.errors import Refused
from thinwire.core.statedir import AggregatorHome
from thinwire.store import ROLES, Store
from thinwire.web.app import create_app
from thinwire.web.model_routes import MAX_AT_ONCE, ModelFiles
from thinwire.web.settings import Settings

SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}
MODELS = "/api/v1/runs/toy-1/models"


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    """The state directory of a run whose two rounds have made a version each."""
    told(tmp_path)
    return AggregatorHome.under(tmp_path)


@pytest.fixture
def store(home: AggregatorHome) -> Iterator[Store]:
    with Store.open(home.database) as opened:
        yield opened


def settings(store: Store, home: AggregatorHome) -> Settings:
    return Settings(store.url, port=8080, lock=home.lock)


@pytest.fixture
def read(store: Store, home: AggregatorHome) -> Iterator[Callable[..., Any]]:
    """Reads an address as a person with a role."""
    with TestClient(create_app(settings(store, home), store), base_url=HOST) as client:
        visitors = Visitors(store, client)
        yield lambda path, role="operator": client.get(path, headers=visitors.session(role))


def test_the_kept_versions_are_listed_newest_first(read: Callable[..., Any], home: AggregatorHome):
    (home.run("toy-1") / "v000003.model.hidden").write_bytes(b"not released")
    (home.run("toy-1") / "v000001.model").unlink()
    latest, first = read(MODELS, "viewer").json()
    assert (latest["version"], latest["round"], latest["best"], latest["latest"]) == (2, 2, True, True)
    assert latest["metrics"] == {"accuracy": 0.7, "loss": 0.5}
    assert latest["size"] > PARAMS.nbytes
    assert (first["version"], first["round"], first["best"], first["latest"]) == (0, 0, False, False)


@pytest.mark.parametrize(("version", "which"), [("2", "last"), ("0", "0"), ("best", "best")])
def test_a_downloaded_version_is_the_file_that_runs_model_writes(
    read: Callable[..., Any], home: AggregatorHome, tmp_path: Path, version: str, which: str
):
    out = tmp_path / "model.safetensors"
    words = ["runs", "model", "toy-1", "--round", which, "--out", str(out), "--home", str(home.root.parent)]
    assert main(words) == 0
    answer = read(f"{MODELS}/{version}")
    assert answer.status_code == 200
    assert answer.content == out.read_bytes()
    assert answer.headers["content-length"] == str(len(answer.content)), "it is not compressed"
    number = 2 if version == "best" else version
    assert answer.headers["content-disposition"] == f'attachment; filename="toy-1-v{number}.safetensors"'


def test_operators_download_a_model_and_viewers_do_not(read: Callable[..., Any]):
    given = {role: read(f"{MODELS}/last", role).status_code for role in ROLES}
    assert given == {"viewer": 403, "operator": 200, "admin": 200}


def test_the_audit_log_has_who_took_which_version_of_which_run(read: Callable[..., Any], store: Store):
    before = store.audit.rows()[0]
    assert [read(f"{MODELS}/{version}").status_code for version in ("best", "0", "7")] == [200, 200, 404]
    assert read(f"{MODELS}/last", "viewer").status_code == 403
    total, rows = store.audit.rows()
    assert total == before + 2, "who got no file took none"
    newest = [(one.what, one.detail) for one in rows[:2]]
    assert newest == [("download model", "toy-1, version 0"), ("download model", "toy-1, version 2")]
    assert {one.who for one in rows[:2]} == {"anna"}


def test_a_version_that_is_not_kept_is_refused_with_those_that_are(read: Callable[..., Any]):
    answer = read(f"{MODELS}/7")
    said = answer.json()
    assert answer.status_code == 404
    assert (said["detail"], said["why"]) == ("toy-1 does not keep the model version 7", "it keeps 0, 1, 2")
    assert said["try"].startswith(f"{MODELS} lists them")
    assert [read(f"{MODELS}/{name}").status_code for name in ("newest", "..%2Fv000001")] == [422, 404]


def test_a_few_models_are_sent_at_once_and_a_broken_connection_frees_its_place(store: Store, home: AggregatorHome):
    files, pieces = ModelFiles(store, settings(store, home)), list[bytes]()

    async def broken(_: object) -> None:
        raise OSError("the browser is gone")

    async def taken(message: MutableMapping[str, Any]) -> None:
        pieces.append(message.get("body", b""))

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def try_all() -> None:
        sent = [await files.send("toy-1", "last", "anna") for _ in range(MAX_AT_ONCE)]
        with pytest.raises(Refused, match="other models are being downloaded"):
            await files.send("toy-1", "last", "anna")
        for one in sent:
            with pytest.raises(ClientDisconnect):
                await one(SCOPE, receive, broken)
        again = await files.send("toy-1", "last", "anna")
        await again(SCOPE, receive, taken)
        assert sum(map(len, pieces)) == int(again.headers["content-length"])

    asyncio.run(try_all())


def test_the_page_of_a_run_offers_its_versions(store: Store, home: AggregatorHome, look: Open):
    with showing(store.url, home.lock) as served:
        page = look(served.url, "runs/toy-1")
        rows = page.locator("#models tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.first).to_contain_text("best")
        assert axe(page) == []
        with page.expect_download() as download:
            rows.first.get_by_role("link", name="safetensors of model version 2").click()
        assert download.value.suggested_filename == "toy-1-v2.safetensors"
        assert load(download.value.path().read_bytes())["first.bias"][0] == PARAMS[6] + 2
        page.locator("#plan summary").click()
        expect(page.locator("#plan .keys")).to_contain_text("rounds2plan")
        expect(page.locator("#plan .keys")).to_contain_text("keeplast,bestdefault")
