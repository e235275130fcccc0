"""`thinwire devices invite`: lines to paste, files for scripts, and what enrolls nobody."""

from __future__ import annotations

import csv
import json
import os

import pytest

from tests.support.cli_story import KEY
from thinwire.cli.devices import commands
from thinwire.cli.local_state import operator
from thinwire.core.fleet import Joining
from thinwire.core.invitation import COLUMNS
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.store import Store

PIN = "ab" * 32
URLS = ["https://agg.example:9090", "https://192.0.2.9:9090"]


@pytest.fixture
def api(home, store):
    """What a device API that others reach leaves when it starts."""
    folder = AggregatorHome.under(home).root / "tls"
    folder.mkdir()
    (folder / "invite.json").write_text(json.dumps({"pin": PIN, "urls": URLS}))


def secret_of(text: str) -> str:
    word, pin, secret = text.split(".")
    assert (word, pin, len(bytes.fromhex(secret))) == ("tw1", PIN, 16)
    return secret


def join(store: Store, text: str, name: str) -> str:
    return store.roster.join(Joining(secret_of(text), name, KEY, b"key", "192.0.2.7:40000")).state


def test_an_invitation_is_printed_with_the_lines_to_paste(thinwire, home, store, api):
    said = thinwire("devices", "invite", "--home", home)
    assert said.code == 0, said.err
    (text,) = {word for word in said.out.split() if word.startswith("tw1.")}
    assert f"    thinwire client join {URLS[0]} -\n" in said.out
    assert URLS[1] in said.err
    assert join(store, text, "pi-09") == "approved"


def test_invitations_as_a_document_hold_what_a_script_needs(thinwire, home, store, api):
    words = ["--count", 2, "--expires", "90s", "--approve-manually"]
    one, two = thinwire("devices", "invite", *words, "--json", "--home", home).document
    assert one["invitation"] != two["invitation"]
    assert one["command"] == f"thinwire client join {URLS[0]} -"
    assert (one["id"], two["id"], one["urls"], one["name"]) == (1, 2, URLS, "")
    assert join(store, two["invitation"], "pi-09") == "pending"
    rows = {row["id"]: row for row in thinwire("devices", "invite", "--list", "--json", "--home", home).document}
    assert (rows[1]["state"], rows[2]["state"], rows[2]["used_by"]) == ("open", "used", "pi-09")
    assert one["expires_at"] - rows[1]["created_at"] == pytest.approx(90, abs=1e-3)


def test_invitations_for_names_go_to_a_private_file_that_is_never_overwritten(thinwire, home, tmp_path, store, api):
    names, out = tmp_path / "names.txt", tmp_path / "invites.csv"
    names.write_text("# ward 3\npi-01\n\n  pi-02\n")
    said = thinwire("devices", "invite", "--names", names, "--out", out, "--home", home)
    assert said.code == 0, said.err
    assert "tw1." not in said.out + said.err
    assert out.stat().st_mode & 0o777 == 0o600
    with out.open() as file:
        one, two = csv.DictReader(file)
    assert tuple(one) == COLUMNS
    assert (one["id"], one["name"], one["url"], two["name"]) == ("1", "pi-01", URLS[0], "pi-02")
    assert two["command"] == f"thinwire client join {URLS[0]} - --name pi-02"
    assert join(store, two["invitation"], "pi-02") == "approved"
    before = out.read_bytes()
    again = thinwire("devices", "invite", "--out", out, "--home", home)
    assert (again.code, "is there already" in again.err) == (2, True)
    assert out.read_bytes() == before
    assert len(store.invitations.all()) == 2


def test_what_cannot_be_made_leaves_no_file(thinwire, home, tmp_path, store, api, device):
    (tmp_path / "names").write_text("pi-00\npi-01\n")
    said = thinwire("devices", "invite", "--names", tmp_path / "names", "--out", tmp_path / "out.csv", "--home", home)
    assert (said.code, "called pi-01" in said.err) == (5, True)
    assert not (tmp_path / "out.csv").exists()
    assert store.invitations.all() == []


def test_invitations_that_a_full_disk_swallowed_are_withdrawn(thinwire, home, tmp_path, store, api, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = thinwire("devices", "invite", "--out", tmp_path / "out.csv", "--home", home)
    monkeypatch.undo()
    assert (said.code, "No space" in said.err) == (1, True)
    assert not (tmp_path / "out.csv").exists()
    assert [row.state for row in store.invitations.all()] == ["withdrawn"]


def test_an_invitation_is_withdrawn_by_its_number(thinwire, home, store, api):
    (one,) = thinwire("devices", "invite", "--json", "--home", home).document
    assert thinwire("devices", "invite", "--withdraw", one["id"], "--home", home).code == 0
    assert "withdrawn" in thinwire("devices", "invite", "--list", "--home", home).out
    assert thinwire("devices", "invite", "--withdraw", 99, "--home", home).code == 9
    assert [action.what for action in store.audit.actions()] == ["withdraw", "invite"]
    assert {action.who for action in store.audit.actions()} == {operator()}


def test_a_file_of_names_that_is_not_there_is_said_to_be_so(thinwire, home, tmp_path, store, api):
    said = thinwire("devices", "invite", "--names", tmp_path / "none", "--home", home)
    assert (said.code, "why:   No such file or directory\n" in said.err) == (2, True)


def test_without_a_device_api_that_others_reach_nobody_is_invited(thinwire, home, store):
    said = thinwire("devices", "invite", "--home", home)
    assert (said.code, f"aggregator start --home {home} --listen 0.0.0.0:9090" in said.err) == (9, True)
    place = AggregatorHome.under(home).root
    StartOptions({"listen": "127.0.0.1:0", "san": ["agg one"]}).save(place)
    again = f"aggregator start --home {home} --listen 0.0.0.0:9090 --san 'agg one'"
    assert f"try:   thinwire {again}\n" in thinwire("devices", "invite", "--home", home).err
    with hold(AggregatorHome(place).lock, {"listen": "127.0.0.1:9090"}):
        said = thinwire("devices", "invite", "--home", home).err
    assert f"try:   thinwire aggregator stop --home {home} && thinwire {again}\n" in said
    path = place / "tls" / "invite.json"
    path.parent.mkdir()
    for torn in ("", "{}", "[]", '{"pin": "ab", "urls": ["https://x"]}', json.dumps({"pin": PIN, "urls": []})):
        path.write_text(torn)
        assert thinwire("devices", "invite", "--home", home).code == 9
    assert store.invitations.all() == []


def test_an_aggregator_that_is_starting_is_waited_for(thinwire, home, store, monkeypatch):
    folder, looks = AggregatorHome.under(home).root / "tls", [7, 7, 7]

    def still_starting(_):
        if not looks and not folder.exists():
            folder.mkdir()
            (folder / "invite.json").write_text(json.dumps({"pin": PIN, "urls": URLS}))
        return looks.pop() if looks else None

    monkeypatch.setattr(commands, "starting", still_starting)
    said = thinwire("devices", "invite", "--home", home)
    assert said.code == 0, said.err
    assert "an aggregator is starting (process 7) ..." in said.err


def test_a_certificate_of_ones_own_is_named_by_the_system_in_the_invitation(thinwire, home, store, api):
    path = AggregatorHome.under(home).root / "tls" / "invite.json"
    path.write_text(json.dumps({"pin": "system", "urls": URLS}))
    (one,) = thinwire("devices", "invite", "--json", "--home", home).document
    assert one["invitation"].startswith("tw1.system.")


@pytest.mark.parametrize(
    "words",
    [
        ["--expires", "soon"],
        ["--expires", "0s"],
        ["--expires", "400d"],
        ["--count", "0"],
        ["--list", "--withdraw", "1"],
        ["--list", "--count", "2"],
        ["--names", "nowhere"],
    ],
)
def test_an_invitation_that_cannot_be_understood_is_2(thinwire, home, store, api, words):
    said = thinwire("devices", "invite", *words, "--home", home)
    assert (said.code, said.out) == (2, "")
    assert words != ["--expires", "soon"] or "why:   it reads a number and s, m, h or d\n" in said.err
    assert store.invitations.all() == []
