"""`runs tag`, `archive`, `delete`, `clone` and `stop --after-round`: what is printed, asked and refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.cli_story import PLAN, told
from thinwire.cli import local_state
from thinwire.cli.runs import run_commands
from thinwire.core import RunPlan
from thinwire.core.events import RunStatusChanged
from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.statedir import AggregatorHome, hold, lock_file
from thinwire.server.run_extension import extend_run
from thinwire.store import Store
from thinwire.store.read_models import CommandRow
from thinwire.store.work_queue import Commands


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_commands, "WAIT_S", 0.0)
    monkeypatch.setattr(run_commands, "CARRIED_OUT_S", 0.0)


@pytest.fixture
def folder(home: Path) -> Path:
    """The folder of the run toy-1, which is done."""
    told(home)
    return AggregatorHome.under(home).run("toy-1")


def test_tags_are_set_shown_and_listed(thinwire, home: Path, folder: Path):
    said = thinwire("runs", "tag", "latest", "+paper", "+best", "--home", home)
    assert (said.code, said.out.strip()) == (0, "toy-1  best paper")
    assert thinwire("runs", "tag", "toy-1", "-best", "--json", "--home", home).document["tags"] == ["paper"]
    assert thinwire("runs", "tag", "toy-1", "--home", home).out.strip() == "toy-1  paper"
    assert "TAGS" in thinwire("runs", "list", "--home", home).out
    assert "toy-1" in thinwire("runs", "list", "--tag", "paper", "--home", home).out
    none = thinwire("runs", "list", "--tag", "old", "--home", home)
    assert (none.code, none.out, f"thinwire runs list --home {home}" in none.err) == (0, "", True)


def test_a_tag_without_a_sign_and_one_of_other_letters_are_refused(thinwire, home: Path, folder: Path):
    said = thinwire("runs", "tag", "toy-1", "paper", "--home", home)
    assert (said.code, "'paper' says neither to add nor to remove" in said.err) == (2, True)
    said = thinwire("runs", "tag", "toy-1", "+Paper", "--home", home)
    assert (said.code, "the tag 'Paper' is not valid" in said.err) == (2, True)


def test_an_archived_run_is_hidden_and_still_read(thinwire, home: Path, folder: Path):
    thinwire("runs", "archive", "toy-1", "--home", home)
    assert thinwire("runs", "list", "--json", "--home", home).document == []
    assert [row["run_id"] for row in thinwire("runs", "list", "--archived", "--json", "--home", home).document] == [
        "toy-1"
    ]
    assert "archived" in thinwire("runs", "show", "toy-1", "--home", home).out
    thinwire("runs", "unarchive", "toy-1", "--home", home)
    assert "toy-1" in thinwire("runs", "list", "--home", home).out


def test_a_run_is_not_deleted_without_a_terminal_or_yes(thinwire, home: Path, folder: Path):
    said = thinwire("runs", "delete", "toy-1", "--home", home)
    assert (said.code, "toy-1 is not deleted without --yes" in said.err) == (2, True)
    assert folder.exists()


def test_at_a_terminal_it_asks(thinwire, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    asked: list[str] = []

    def confirmed(text: str) -> bool:
        asked.append(text)
        return len(asked) > 1

    monkeypatch.setattr(typer, "confirm", confirmed)
    said = thinwire("runs", "delete", "toy-1", "--home", home)
    assert (said.code, said.out.strip()) == (1, "toy-1 stays")
    assert asked == ["Delete toy-1 (done): its models, 2 rounds and events; nothing brings them back?"]
    assert thinwire("runs", "delete", "toy-1", "--home", home).code == 0
    assert not folder.exists()


def test_without_an_aggregator_this_process_deletes_it(thinwire, home: Path, folder: Path, store: Store):
    said = thinwire("runs", "delete", "toy-1", "--yes", "--home", home)
    assert (said.code, said.out.strip()) == (0, "toy-1 is deleted")
    assert not folder.exists()
    assert not store.commands.pending()
    shown = thinwire("runs", "show", "toy-1", "--home", home)
    assert (shown.code, f"toy-1 was deleted by {local_state.operator()} on " in shown.out) == (0, True)
    document = thinwire("runs", "show", "toy-1", "--json", "--home", home).document
    assert (document["status"], len(document["plan_digest"])) == ("deleted", 64)
    assert thinwire("runs", "list", "--json", "--home", home).document == []
    assert "toy-1" in thinwire("runs", "list", "--deleted", "--home", home).out
    for words in (("model", "toy-1", "--out", home / "m.safetensors"), ("watch", "toy-1"), ("clone", "toy-1")):
        said = thinwire("runs", *words, "--home", home)
        assert (said.code, "toy-1 was deleted" in said.err) == (9, True), words
    assert thinwire("runs", "delete", "toy-1", "--yes", "--home", home).code == 0, "once more changes nothing"


def test_with_an_aggregator_the_command_is_left_to_it(
    thinwire, home: Path, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_state, "alive", lambda home: {"pid": 1})
    said = thinwire("runs", "delete", "toy-1", "--yes", "--home", home)
    assert (said.code, said.out.strip()) == (0, "toy-1: its aggregator is still deleting it")
    (command,) = store.commands.pending()
    assert (command.kind, command.run_id, command.who) == ("delete-run", "toy-1", local_state.operator())
    thinwire("runs", "delete", "toy-1", "--yes", "--home", home)
    assert len(store.commands.pending()) == 1, "the command that is left is waited for"
    assert folder.exists()


@pytest.mark.parametrize(
    ("words", "said"), [(("delete", "--yes"), "is deleted"), (("extend", "--rounds", "3"), "is queued for 3 more")]
)
def test_an_aggregator_that_has_answered_before_the_first_look_is_not_waited_for(
    thinwire, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
):
    answers: list[dict[str, Any]] = [{"done": True}, {"done": False, "error": "it may not", "why": "so"}]
    leave = Commands.add

    def add(commands: Commands, *given: Any) -> int:
        commands.answer(number := leave(commands, *given), answers.pop(0))
        return number

    monkeypatch.setattr(Commands, "add", add)
    monkeypatch.setattr(local_state, "alive", lambda home: {"pid": 1})
    monkeypatch.setattr(run_commands, "until", lambda *given: pytest.fail("the answer is here"))
    done, refused = (thinwire("runs", words[0], "toy-1", *words[1:], "--home", home) for _ in range(2))
    assert (done.code, said in done.out) == (0, True), done.err
    assert (refused.code != 0, "it may not" in refused.err) == (True, True)


def test_an_aggregator_that_does_not_respond_is_named_at_once(thinwire, home: Path, folder: Path, store: Store):
    lock = AggregatorHome.under(home).lock
    with hold(lock, {}):
        os.utime(lock, (0, 0))  # its heartbeat
        said = thinwire("runs", "delete", "toy-1", "--yes", "--home", home)
    assert (said.code, "the aggregator does not respond" in said.err) == (4, True)
    assert f"kill -9 {os.getpid()}" in said.err
    assert store.commands.pending() == []


def test_nothing_is_deleted_while_an_aggregator_starts(thinwire, home: Path, folder: Path):
    with lock_file(AggregatorHome.under(home).lock):
        said = thinwire("runs", "delete", "toy-1", "--yes", "--home", home)
    assert "is in use by process" in said.err
    assert folder.exists()


def test_a_run_that_goes_on_is_refused(thinwire, home: Path):
    told(home, status="running")
    said = thinwire("runs", "delete", "toy-1", "--yes", "--home", home)
    assert (said.code, "toy-1 is running\nwhy:   only a run that is over can be deleted" in said.err) == (5, True)
    said = thinwire("runs", "archive", "toy-1", "--home", home)
    assert (said.code, "toy-1 is running" in said.err) == (5, True)


def test_a_stop_after_the_round_is_left_for_the_aggregator(thinwire, home: Path, store: Store):
    told(home, status="running")
    said = thinwire("runs", "stop", "toy-1", "--after-round", "--home", home)
    assert said.out.strip() == "toy-1 running: it will stop when its open round closes"
    assert [one.kind for one in store.commands.pending()] == ["stop-after-round"]


def test_the_plan_of_a_clone_is_printed_with_its_changes(thinwire, home: Path, folder: Path, store: Store):
    said = thinwire("runs", "clone", "toy-1", "--print", "--set", "run.seed=7", "--home", home)
    assert said.code == 0
    read, old = RunPlan.parse(said.out), RunPlan.from_json(store.run("toy-1").plan)
    assert read.run.seed == 7
    assert read.model_copy(update={"run": read.run.model_copy(update={"seed": old.run.seed})}).digest == old.digest


def test_a_clone_has_the_plan_that_the_run_was_started_with(thinwire, home: Path, folder: Path, store: Store):
    begun = store.run("toy-1").plan
    wanted = {"rounds": 3, "sets": {"local.lr": "0.25"}}
    extend_run(store, AggregatorHome.under(home), CommandRow(1, "extend-run", "toy-1", wanted, "ann", 0.0))
    assert store.run("toy-1").plan["local"]["lr"] == 0.25
    said = thinwire("runs", "clone", "toy-1", "--print", "--home", home)
    assert RunPlan.parse(said.out).digest == RunPlan.from_json(begun).digest
    assert "toy-1 was extended: its clone has the plan of the start" in said.err


def test_a_clone_begins_with_the_first_model_of_the_old_run(
    thinwire, home: Path, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_state, "require_alive", lambda home: {"pid": 1})
    store.record("toy-1", [RunStatusChanged(9.0, "done", "2 rounds")])
    said = thinwire(
        "runs", "clone", "toy-1", "--set", "run.rounds=9", "--name", "longer", "--json", "--home", home
    )  # fmt: skip
    assert said.document == {"run_id": "toy-2", "cloned_from": "toy-1"}, said.err
    made = store.run("toy-2")
    assert (made.status, made.rounds_total, made.name) == ("queued", 9, "longer")
    assert made.model_digest == store.models("toy-1")[0].digest
    assert "longer" in thinwire("runs", "list", "--home", home).out


def test_a_clone_with_another_seed_needs_the_code_of_the_task(
    thinwire, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_state, "require_alive", lambda home: {"pid": 1})
    said = thinwire("runs", "clone", "toy-1", "--set", "run.seed=7", "--home", home)
    assert (said.code, "[run] seed differs" in said.err, "--task toy=MODULE" in said.err) == (3, True, True), said.err


def test_a_clone_keeps_the_personal_layers_and_with_others_it_needs_the_code_of_the_task(
    thinwire, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_state, "require_alive", lambda home: {"pid": 1})
    told(home, plan=f'{PLAN}\npersonal_layers = ["head.*"]')
    assert thinwire("runs", "clone", "toy-1", "--home", home).out.strip() == "toy-2"
    assert dict(store.run("toy-2").plan["local"])["personal_layers"] == ["head.*"]
    for words in ((), ("--set", 'run.init="run:toy-1"')):
        said = thinwire("runs", "clone", "toy-1", "--set", 'local.personal_layers=["body.*"]', *words, "--home", home)
        assert (said.code, "[local] personal_layers differs" in said.err) == (3, True)


def test_a_run_names_the_one_with_whose_model_it_begins_by_its_whole_id(
    thinwire, home: Path, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_state, "require_alive", lambda home: {"pid": 1})
    for number, (typed, kept) in enumerate((("run:latest", "run:toy-1"), ("run:toy-1@1", "run:toy-1@1")), 2):
        said = thinwire("runs", "clone", "toy-1", "--set", f'run.init="{typed}"', "--home", home)
        assert said.out.strip() == f"toy-{number}", said.err
        assert dict(store.run(f"toy-{number}").plan["run"])["init"] == kept


def test_a_clone_that_no_device_could_work_for_is_refused(
    thinwire, home: Path, folder: Path, store: Store, device: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_state, "require_alive", lambda home: {"pid": 1})
    said = thinwire("runs", "clone", "toy-1", "--set", "cohort.clients=3", "--home", home)
    assert (said.code, "the plan selects 3 devices a round, and 1 is known" in said.err) == (6, True), said.err
    store.roster.seen(Hello("pi-01", "p1", (TaskReport("digits"),)), 1.0)
    said = thinwire("runs", "clone", "toy-1", "--home", home)
    assert (said.code, "the plan trains the task toy, which no known device has\n" in said.err) == (6, True), said.err
    assert "thinwire client start --task toy=MODULE on a device" in said.err
    assert thinwire("runs", "clone", "toy-1", "--yes", "--home", home).out.strip() == "toy-2"
    store.roster.seen(Hello("pi-01", "p1", (TaskReport("toy"),)), 2.0)
    assert thinwire("runs", "clone", "toy-1", "--home", home).out.strip() == "toy-3"
    store.roster.enrol("pi-02", "e" * 64, b"other", "loopback")
    store.roster.seen(Hello("pi-02", "p1", (TaskReport("digits"),)), 3.0)
    said = thinwire("runs", "clone", "toy-1", "--set", "cohort.wait_for=2", "--home", home)
    assert (said.code, "waits for 2 devices, and 1 is known with this task" in said.err) == (6, True), said.err


@pytest.mark.parametrize(("init", "code"), [("", 0), ("first.safetensors", 3), ("upload:0a1b", 3)])
def test_a_private_clone_begins_with_no_first_model_whose_cost_is_not_counted(
    thinwire, home: Path, monkeypatch: pytest.MonkeyPatch, init: str, code: int
):
    """The file that the old run began with may be the model of another run: nobody looks at it again."""
    monkeypatch.setattr(local_state, "require_alive", lambda home: {"pid": 1})
    work = 'evaluate = "off"\n[cohort]\ndeadline_s = 60\nlate = "drop"\n[local]\nlr = 0.5\nsteps = 3\nbuffers = "local"'
    told(home, plan=f'[run]\ntask = "toy"\nrounds = 2\ninit = "{init}"\n{work}')
    private = ("privacy.mode=central", "privacy.clip=1.0", "privacy.noise_multiplier=1.0")
    sets = [word for one in private for word in ("--set", one)]
    said = thinwire("runs", "clone", "toy-1", *sets, "--home", home)
    assert said.code == code, said.err
    assert code == 0 or "a private run that begins with the model of toy-1" in said.err
    assert thinwire("runs", "clone", "toy-1", "--home", home).code == 0, "without privacy"


def test_a_clone_needs_an_aggregator(thinwire, home: Path, folder: Path):
    assert run_commands.__doc__
    assert thinwire("runs", "clone", "toy-1", "--home", home).code == 4


def test_a_device_that_never_worked_is_removed(thinwire, home: Path, device: None):
    said = thinwire("devices", "remove", "pi-01", "--home", home)
    assert (said.code, said.out.strip()) == (0, "pi-01 is removed; it may join again like a new device")
    assert thinwire("devices", "remove", "pi-01", "--home", home).code == 9
