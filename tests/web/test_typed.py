"""Commands inside recorded sentences name the state directory that the dashboard shows."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.browsing import Open
from tests.support.filled_store import new_run
from tests.support.reasons import noted
from tests.support.serving import showing
from thinwire.cli.main import program
from thinwire.core.events import RunNoted
from thinwire.core.formatting import COMMANDS, with_home
from thinwire.store import Store

HOME = " --home '/srv/state of mine'"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("thinwire run PLAN", f"thinwire run{HOME} PLAN"),
        ("(thinwire aggregator start); is it", f"(thinwire aggregator start{HOME}); is it"),
        ("thinwire runs show x; or thinwire runs list", f"thinwire runs show{HOME} x; or thinwire runs list{HOME}"),
        ("thinwire aggregator ca rotate --san a", f"thinwire aggregator ca rotate{HOME} --san a"),
        ("thinwire runs stop a --home here", "thinwire runs stop a --home here"),
        ("on it: thinwire client start --task a=M", "on it: thinwire client start --task a=M"),
        ("the thinwire runs of today, a thinwire run-time", "the thinwire runs of today, a thinwire run-time"),
    ],
)  # fmt: skip
def test_a_command_that_would_look_elsewhere_names_the_state_directory(said: str, shown: str) -> None:
    assert with_home(said, HOME) == shown
    assert with_home(said, "") == said


def words_of(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, bool]]:
    for name, one in getattr(command, "commands", {}).items():
        yield from words_of(one, (*words, name))
    has_home = any("--home" in option.opts for option in command.params)
    if has_home or not getattr(command, "commands", None):  # `privacy ledger` is a command and has one below it
        yield " ".join(words), has_home


def test_every_command_with_a_home_is_known_but_those_of_a_device() -> None:
    found = {words for words, has_home in words_of(typer.main.get_command(program())) if has_home}
    assert {words for words in found if not words.startswith("client ")} == set(COMMANDS)


def test_what_a_run_says_and_what_the_store_refuses_can_be_typed(
    store: Store, visit: Callable[..., TestClient], tmp_path: Path
):
    lock = tmp_path / "state of mine" / "aggregator" / "lock"
    option = f"--home {shlex.quote(str(lock.parent.parent))}"
    page = visit(lock=lock)
    code = store.logins.new_code()
    page.post("/login", data={"code": code})
    assert page.get("/api/v1/runs/none").json()["try"] == f"thinwire run {option} PLAN"
    run = new_run(store)
    run.status("waiting", f"waiting: 0 of 2 devices; end it: thinwire runs stop {run.run_id}")
    store.record(run.run_id, [RunNoted(run.now, noted("look: thinwire runs show latest"))])
    found: dict[str, Any] = page.get(f"/api/v1/runs/{run.run_id}").json()
    stop = f"thinwire runs stop {option} {run.run_id}"
    assert found["status_text"].endswith(stop)
    assert found["sentence"].endswith(f"{stop}.")
    assert found["notes"] == [f"look: thinwire runs show {option} latest"]
    assert option not in store.run(run.run_id).status_text, "it stays as it was recorded"


def test_the_line_that_starts_a_client_on_this_machine_has_a_name_and_the_state_directory(
    store: Store, look: Open, tmp_path: Path
):
    lock = tmp_path / "state of mine" / "aggregator" / "lock"
    with showing(store.url, lock) as served:
        page = look(served.url)
        option = shlex.quote(str(lock.parent.parent))
        line = f"thinwire client start --aggregator URL --task NAME=MODULE --name client-1 --home {option}"
        expect(page.locator(".nothing")).to_contain_text(line)
