"""`thinwire client join`, `start` and `leave` against a real device API with TLS."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.support.fleet_words import hello
from tests.support.transport_doubles import Place, drawn_invitation, place
from thinwire.client.booking import Booking
from thinwire.client.privacy_ledger import FILE, DeviceLedger
from thinwire.core.fleet import population_key
from thinwire.core.invitation import Invitation
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome, client_home, hold
from thinwire.transport.device.identity import device_key
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.device.session import refusal_error
from thinwire.transport.protocol.http import ApiError

TASK = ["--task", "digits=examples/digits/task.py"]


@pytest.fixture
def api(tmp_path):
    with place(tmp_path / "api", tls=True) as made:
        yield made


def join(thinwire, api: Place, home: Path, name: str, invitation: Invitation | None = None, *more: str):
    return thinwire(
        "client", "join", api.url, (invitation or api.invite()).text(), "--name", name, "--home", home, *more
    )


def nobody() -> str:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return f"https://127.0.0.1:{there.getsockname()[1]}"


def test_joining_prints_the_key_and_the_lines_to_paste_next(thinwire, home, api):
    said = join(thinwire, api, home, "pi-03")
    assert said.code == 0, said.err
    row = api.roster.devices["pi-03"]
    grouped = " ".join(row.fingerprint[at : at + 8] for at in range(0, 64, 8))
    assert grouped in said.out
    assert f"pi-03 has joined: {api.url}" in said.out
    assert "thinwire client start --task NAME=MODULE --name pi-03" in said.out
    assert "thinwire client service install --name pi-03" in said.out
    for file in ("key.pem", "aggregator.json"):
        assert (home / "clients" / "pi-03" / file).stat().st_mode & 0o777 == 0o600


def test_who_waits_for_approval_is_told_what_both_ends_compare(thinwire, home, api):
    invitation = api.invite()
    first = join(thinwire, api, home, "pi-03", invitation, "--json").document
    api.roster.put("pi-03", "pending")
    (home / "clients" / "pi-03" / "aggregator.json").unlink()  # as if the reply had been lost
    said = join(thinwire, api, home, "pi-03", invitation)
    assert "thinwire devices approve pi-03" in said.out
    assert first["fingerprint"] == api.roster.devices["pi-03"].fingerprint


def test_joining_again_is_told_and_uses_nothing_up(thinwire, home, api):
    join(thinwire, api, home, "pi-03")
    fresh = api.invite()
    said = join(thinwire, api, home, "pi-03", fresh)
    assert (said.code, f"pi-03 has joined already: {api.url}" in said.out) == (0, True)
    assert "state    approved" in said.out
    api.roster.put("pi-03", "revoked")
    assert "state    revoked" in join(thinwire, api, home, "pi-03", fresh).out
    assert api.roster.invitations[fresh.secret] == ""
    other = join(thinwire, api, home, "pi-03", drawn_invitation("0" * 64))
    assert (other.code, "another aggregator" in other.err) == (1, True)


def test_an_invitation_need_not_stand_in_the_command(thinwire, home, api, monkeypatch):
    monkeypatch.setenv("THINWIRE_INVITE", api.invite().text())
    assert thinwire("client", "join", api.url, "--name", "pi-1", "--home", home).code == 0
    monkeypatch.setenv("THINWIRE_INVITE", api.invite().text())
    assert thinwire("client", "join", api.url, "-", "--name", "pi-2", "--home", home).code == 0
    monkeypatch.delenv("THINWIRE_INVITE")
    monkeypatch.setattr("sys.stdin", io.StringIO(api.invite().text() + "\nmore"))
    assert thinwire("client", "join", api.url, "-", "--name", "pi-3", "--home", home).code == 0
    assert set(api.roster.devices) == {"pi-1", "pi-2", "pi-3"}


@pytest.mark.parametrize("invite", [["tw1.nothing"], [], ["-"]])
def test_what_is_no_invitation_is_2_and_not_repeated(thinwire, home, api, invite, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("secret words\n"))
    said = thinwire("client", "join", api.url, *invite, "--name", "pi-03", "--home", home)
    assert said.code == 2
    assert "secret words" not in said.err
    assert not (home / "clients").exists()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9090", "http://agg.example:9090", "https://", "ftp://x", "agg:x"])
def test_an_address_that_cannot_be_joined_is_2(thinwire, home, api, url):
    assert thinwire("client", "join", url, api.invite().text(), "--name", "pi-03", "--home", home).code == 2


def test_a_device_api_that_is_not_there_is_4_and_one_that_refuses_is_5(thinwire, home, api, monkeypatch):
    monkeypatch.setattr("thinwire.transport.device.enroll.RETRY_S", 0.0)
    text = api.invite().text()
    assert thinwire("client", "join", nobody(), text, "--name", "pi-03", "--home", home).code == 4
    assert join(thinwire, api, home, "pi-03", drawn_invitation(api.authority.pin)).code == 5
    wrong = join(thinwire, api, home, "pi-03", drawn_invitation("0" * 64))
    assert (wrong.code, "nothing was sent" in wrong.err) == (5, True)
    taken = api.invite()
    assert join(thinwire, api, home.parent / "other", "pi-03").code == 0
    assert join(thinwire, api, home, "pi-03", taken).code == 5
    assert join(thinwire, api, home, "pi-04", taken).code == 0  # a taken name uses nothing up


def test_a_start_takes_the_aggregator_that_was_joined(thinwire, home, api, monkeypatch):
    join(thinwire, api, home, "pi-03")
    started = []

    def serve(link, *args, **options):
        started.append(link)
        return 0

    monkeypatch.setattr("thinwire.client.agent.serve", serve)
    assert thinwire("client", "start", *TASK, "--home", home).code == 0
    remembered = json.loads((home / "clients" / "pi-03" / "start.json").read_text())
    assert remembered["options"] == {"task": [TASK[1]]}
    printed = thinwire("client", "service", "install", "--print", "--home", home)
    assert (printed.code, "client start" in printed.out) == (0, True)
    join(thinwire, api, home, "pi-04")
    said = thinwire("client", "start", *TASK, "--home", home)
    assert (said.code, "--name pi-03" in said.err) == (2, True)
    assert len(started) == 1


@pytest.mark.parametrize("more", [[], ["--aggregator", "https://agg.example:9090"]])
def test_who_has_not_joined_is_told_to_join_first(thinwire, home, more):
    said = thinwire("client", "start", *TASK, "--name", "pi-03", *more, "--home", home)
    assert (said.code, "thinwire client join" in said.err, home.exists()) == (2, True, False)
    assert thinwire("client", "service", "install", *TASK, "--name", "pi-03", *more, "--home", home).code == 2


def test_who_starts_without_an_address_beside_an_aggregator_is_told_its_address(thinwire, home):
    with hold(AggregatorHome.under(home).lock, {"listen": "127.0.0.1:9191"}):
        said = thinwire("client", "start", *TASK, "--name", "pi-03", "--home", home)
    assert (said.code, "own machine: --aggregator http://127.0.0.1:9191\n" in said.err) == (2, True)


def test_leaving_marks_the_row_and_then_deletes_the_key(thinwire, home, api):
    join(thinwire, api, home, "pi-03")
    folder = home / "clients" / "pi-03"
    for file in ("runs/digits-1/state.json", "runs/digits-1/1.parts", "downloads/a", "plans/b", "client.toml",
                 "client.log", "client.log.1", "worker.log", "last-error.txt"):  # fmt: skip
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_text("kept")
    (home / "data").mkdir()
    (home / "data" / "patients").write_text("local")
    (folder / "plans" / "b").unlink()
    (folder / "plans").rmdir()
    (folder / "plans").symlink_to(home / "data")
    said = thinwire("client", "leave", "--home", home)
    assert said.code == 0, said.err
    assert api.roster.devices["pi-03"].state == "revoked"
    assert sorted(path.name for path in folder.iterdir()) == ["client.toml", "lock"], "what it learned is deleted"
    assert (home / "data" / "patients").read_text() == "local"
    assert "pi-03 has left" in said.out
    assert "updates, residuals, models, plans and logs" in said.out
    assert f"its settings stay in {folder}" in said.out
    assert not (folder / "key.pem").exists()
    assert not (folder / "aggregator.json").exists()
    assert thinwire("client", "leave", "--name", "pi-03", "--home", home).code == 9


def test_a_device_whose_disk_deletes_nothing_keeps_its_key_and_may_leave_again(thinwire, home, api, monkeypatch):
    join(thinwire, api, home, "pi-03")
    folder = home / "clients" / "pi-03"
    (folder / "runs").mkdir()

    def refused(path):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refused)
        said = thinwire("client", "leave", "--home", home)
    assert (said.code, f"cannot delete {folder / 'runs'}" in said.err) == (8, True), said.err
    assert (folder / "key.pem").exists()
    assert thinwire("client", "leave", "--home", home).code == 0
    assert not (folder / "runs").exists()


def test_who_was_revoked_may_delete_its_key_too(thinwire, home, api):
    join(thinwire, api, home, "pi-03")
    api.roster.put("pi-03", "revoked")
    said = thinwire("client", "leave", "--home", home)
    assert (said.code, "was revoked" in said.out) == (0, True)
    assert not (home / "clients" / "pi-03" / "key.pem").exists()


def test_a_key_is_kept_while_nobody_could_be_told_unless_it_is_forced(thinwire, home, api):
    join(thinwire, api, home, "pi-03")
    api.fleet.close()
    key = home / "clients" / "pi-03" / "key.pem"
    said = thinwire("client", "leave", "--home", home)
    assert (said.code, key.exists(), "--force" in said.err) == (4, True, True)
    said = thinwire("client", "leave", "--force", "--home", home)
    assert (said.code, key.exists(), "thinwire devices revoke pi-03" in said.out) == (0, False, True)
    assert said.err.startswith("cannot reach the aggregator at "), "which is no error of this command"


def test_a_key_is_kept_if_what_answers_is_no_aggregator(thinwire, home, monkeypatch):
    folder = client_home(home, "pi-03")
    device_key(folder)
    StartOptions({"aggregator": "http://127.0.0.1:1"}).save(folder)

    def other(link):
        refusal = ApiError(404, "http", "not found")
        raise refusal_error(refusal, link.url, tls=False) from refusal

    monkeypatch.setattr(HttpsLink, "leave", other)
    said = thinwire("client", "leave", "--name", "pi-03", "--home", home)
    assert (said.code, (folder / "key.pem").exists()) == (4, True), said.err


def test_a_client_whose_join_had_no_response_may_leave_by_force(thinwire, home):
    folder = client_home(home, "pi-03")
    device_key(folder)
    said = thinwire("client", "leave", "--name", "pi-03", "--home", home)
    assert (said.code, "not known where pi-03 has joined" in said.err) == (4, True), said.err
    said = thinwire("client", "leave", "--name", "pi-03", "--force", "--home", home)
    assert (said.code, (folder / "key.pem").exists(), "None" in said.out) == (0, False, False)


def test_a_client_that_runs_does_not_lose_its_key_under_its_hands(thinwire, home, api):
    join(thinwire, api, home, "pi-03")
    with hold(client_home(home, "pi-03") / "lock", {}):
        said = thinwire("client", "leave", "--home", home)
    assert (said.code, f"pi-03 is running: process {os.getpid()}\n" in said.err) == (1, True), said.err
    assert f"kill {os.getpid()}), then: thinwire client leave --name pi-03 --home {home}\n" in said.err
    assert "FOLDER" not in said.err
    assert (home / "clients" / "pi-03" / "key.pem").exists()


def test_a_join_that_was_refused_leaves_no_client_behind(thinwire, home, api, monkeypatch):
    monkeypatch.setattr("thinwire.transport.device.enroll.RETRY_S", 0.0)
    assert join(thinwire, api, home, "pi-03", drawn_invitation(api.authority.pin)).code == 5
    assert not (home / "clients" / "pi-03" / "key.pem").exists()
    text = api.invite().text()
    assert thinwire("client", "join", nobody(), text, "--name", "pi-04", "--home", home).code == 4
    assert (home / "clients" / "pi-04" / "key.pem").exists(), "after silence nobody knows whether it was taken"
    assert thinwire("client", "status", "--json", "--home", home).document == []
    one = thinwire("client", "status", "--name", "pi-03", "--home", home)
    assert (one.code, "no client 'pi-03' here" in one.err) == (9, True)


def test_a_device_api_is_joined_without_saying_https(thinwire, home, api):
    said = thinwire(
        "client", "join", api.url.removeprefix("https://"), api.invite().text(), "--name", "pi-03", "--home", home
    )
    assert (said.code, f"has joined: {api.url}" in said.out) == (0, True)


def spend(folder: Path, number: int, key: str) -> DeviceLedger:
    ledger = DeviceLedger(folder, key)
    ledger.book(Booking(1.0, "", "/data", "ward", "{}", "digits-1", "ab", number, f"digits-1.{number}.pi", number))
    return ledger


def test_a_device_that_joins_again_under_another_name_goes_on_with_its_privacy_ledger(thinwire, home, api):
    """Its key is new and its data are the same: it reports the earlier key, by which the aggregator charges it."""
    assert join(thinwire, api, home, "pi-03").code == 0
    first = api.roster.devices["pi-03"].fingerprint
    spend(client_home(home, "pi-03"), 1, first)
    assert thinwire("client", "leave", "--name", "pi-03", "--home", home).code == 0
    said = join(thinwire, api, home, "ward-1")
    assert "the privacy ledger of a client that left this state directory goes on here" in said.err
    second = api.roster.devices["ward-1"].fingerprint
    found = spend(client_home(home, "ward-1"), 2, second)
    assert (len(found.bookings), found.report()[2]) == (2, (first,))
    assert thinwire("client", "leave", "--name", "ward-1", "--home", home).code == 0
    assert join(thinwire, api, home, "ward-2").code == 0, "the older of the two ledgers is a part of the newer one"
    third = DeviceLedger(client_home(home, "ward-2"), api.roster.devices["ward-2"].fingerprint)
    assert (len(third.bookings), third.report()[2]) == (2, (second, first))


def test_a_start_takes_over_the_ledger_that_an_earlier_key_left_and_reports_that_key(
    thinwire, home, tmp_path, monkeypatch
):
    """Over loopback a client registers without joining: `start` itself makes its key."""
    monkeypatch.setattr("thinwire.client.agent.serve", lambda link, *args, **options: link.hello(hello("ward-1")) and 0)
    left = client_home(home, "pi-03")
    spend(left, 1, "ab" * 32)  # its key was deleted, as `leave` does
    with place(tmp_path / "api") as plain:
        start = ("client", "start", "--aggregator", plain.url, *TASK, "--name", "ward-1", "--home", home)
        first = thinwire(*start)
        assert first.code == 0, first.err
        assert "the privacy ledger of a client that left this state directory goes on here" in first.err
        said = plain.roster.hellos[-1]
        assert (said.booked, said.booked_keys) == ({population_key("ward"): 1}, ("ab" * 32,))
    found = DeviceLedger(client_home(home, "ward-1"), row_key := plain.roster.devices["ward-1"].fingerprint)
    assert (len(found.bookings), found.report()[2], row_key == "ab" * 32) == (1, ("ab" * 32,), False)


def test_a_client_of_its_own_data_does_not_get_the_ledger_of_one_that_still_trains(thinwire, home, api):
    assert join(thinwire, api, home, "pi-03").code == 0
    spend(client_home(home, "pi-03"), 1, "ab")
    assert join(thinwire, api, home, "pi-04").code == 0
    assert not (client_home(home, "pi-04") / FILE).exists()


def test_several_ledgers_that_were_left_are_not_chosen_from(thinwire, home, api):
    for name in ("pi-01", "pi-02"):
        assert join(thinwire, api, home, name).code == 0
        spend(client_home(home, name), 1, name)
    for name in ("pi-01", "pi-02"):
        assert thinwire("client", "leave", "--name", name, "--home", home).code == 0
    said = join(thinwire, api, home, "pi-03")
    assert (said.code, "2 clients have left" in said.err) == (2, True)
    assert "pi-03" not in api.roster.devices
    here = home / "clients"
    assert f"cp -p {here / 'pi-01' / FILE} {here / 'pi-03' / FILE}" in said.err
    shutil.copy(here / "pi-02" / FILE, client_home(home, "pi-03") / FILE)
    assert join(thinwire, api, home, "pi-03").code == 0
