"""A device behind TLS: what ends it and what it waits out, with a clock or without, while CAs change and it moves."""

from __future__ import annotations

import datetime as dt
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleet_laws import (
    PATIENCE_S,
    FleetLaws,
    Setting,
    answer,
    envelope,
    hello,
    join,
    polled,
    pulled,
    until,
    written,
)  # fmt: skip
from tests.flower.doubles import Place, place
from tests.flower.test_flower_fleet import on_the_store
from tests.system.proxy import proxy
from thinwire.core.errors import Refused, ThinwireError, Unreachable
from thinwire.core.fleet import Delivery
from thinwire.core.texts import grouped
from thinwire.core.types import Failure, ReplyHead
from thinwire.flower import FlowerLink
from thinwire.flower.device.clockwork import Clockwork
from thinwire.flower.device.line import moved
from thinwire.flower.device.meaning import meaning
from thinwire.flower.device.trust import Trust
from thinwire.flower.door.authority import PrivateAuthority
from thinwire.flower.wire.refusals import Refusal

DAY_S = 86_400.0


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, tls=True) as made:
        yield made


class TestFlowerFleetOverTls(FleetLaws):
    def make(self, folder: Path):
        return on_the_store(folder, tls=True)

    def test_a_second_live_process_of_one_name_is_refused(self, setting: Setting) -> None:
        """Over TLS it may try again: the other one may end without anybody coming to this device."""
        join(setting, "pi-1").pull(0.05)
        with pytest.raises(Unreachable, match="another process"):
            setting.link("pi-1").hello(hello("pi-1"))


# What ends a client


EVERY_REFUSAL = [
    Refusal(401, "signature", "x"), Refusal(401, "clock", "x"), Refusal(401, "replay", "x"), Refusal(401, "hello", "x"),
    Refusal(401, "unknown", "x"), Refusal(403, "pending", "x"), Refusal(403, "device", "x"),
    Refusal(403, "invitation", "x"), Refusal(403, "protocol", "x"), Refusal(404, "http", "x"),
    Refusal(409, "name", "x"), Refusal(409, "process", "x"), Refusal(409, "protocol", "x"),
    Refusal(413, "too-large", "x"),
    Refusal(429, "joins", "x"), Refusal(503, "busy", "x"), Refusal(503, "disk", "x"), Refusal(500, "http", "x"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", EVERY_REFUSAL, ids=lambda r: f"{r.status}-{r.kind}")
def test_over_tls_nothing_but_a_revocation_ends_a_client(refusal: Refusal) -> None:
    error = meaning(refusal, "https://agg.example", tls=True)
    assert isinstance(error, Unreachable)
    assert error.what
    assert error.why
    assert error.hint
    assert isinstance(meaning(Refusal(403, "revoked", "x"), "https://agg.example", tls=True), Refused)


def test_a_revoked_device_ends_with_five(here: Place) -> None:
    link = join(here, "pi-1")
    here.roster.put("pi-1", "revoked")
    with pytest.raises(Refused, match="shut this device out") as refused:
        link.pull(0.1)
    assert refused.value.exit_code == 5


def test_a_pending_device_says_its_fingerprint_and_waits(here: Place) -> None:
    link = here.link("pi-1")
    here.roster.put("pi-1", "pending")
    with pytest.raises(Unreachable) as refused:
        link.hello(hello("pi-1"))
    assert grouped(here.roster.devices["pi-1"].fingerprint) in refused.value.why
    assert "thinwire devices approve" in refused.value.hint
    here.roster.put("pi-1", "approved")
    assert link.hello(hello("pi-1")).name == "pi-1"


def test_an_aggregator_that_was_set_up_anew_is_not_believed_and_hears_nothing(tmp_path: Path) -> None:
    with place(tmp_path / "old", tls=True) as old:
        folder = tmp_path / "old" / "clients" / "pi-1"
        old.link("pi-1")
    with place(tmp_path / "new", tls=True) as new:
        from thinwire.flower import device_key

        link = FlowerLink(new.url, device_key(folder), "pi-1", folder, Trust.load(folder))
        with pytest.raises(Unreachable, match="does not trust") as refused:
            link.hello(hello("pi-1"))
        link.close()
        assert "join" in refused.value.hint
        assert new.fleet.stats()["requests"]["hello"] == 0


def test_a_device_that_leaves_is_out(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    link.leave()
    assert here.roster.devices["pi-1"].state == "revoked"
    with pytest.raises(Refused):
        link.hello(hello("pi-1"))


def test_a_renamed_device_learns_its_name(here: Place) -> None:
    link = here.link("pi-1")
    here.roster.devices["lab-1"] = replace(here.roster.devices.pop("pi-1"), name="lab-1")
    assert link.hello(hello("pi-1")).name == "lab-1"
    link.push(answer("lab-1", "ask-1"))
    held = Trust.load(here.folder / "clients" / "pi-1")
    assert held is not None
    assert held.name == "lab-1"


def test_who_is_told_when_to_come_again_passes_it_on() -> None:
    error = meaning(Refusal(429, "joins", "x", retry_after_s=17.0), "https://a", tls=True, within_s=3.0)
    assert isinstance(error, Unreachable)
    assert (error.after_s, error.within_s) == (17.0, 3.0)


def test_a_closing_aggregator_says_when_to_come_again(here: Place) -> None:
    link, ended = here.link("pi-1"), list[ThinwireError]()
    link.hello(hello("pi-1"))

    def wait() -> None:
        try:
            link.pull(30.0)
        except ThinwireError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"])
    here.fleet.close()
    thread.join(PATIENCE_S)
    assert isinstance(ended[0], Unreachable)
    assert ended[0].after_s >= 1.0


# Time


@pytest.mark.parametrize(
    "wall", [20.0, time.time() + DAY_S, time.time() - DAY_S, 4e9], ids=["1970", "+1", "-1", "2096"]
)
def test_a_wrong_clock_is_corrected_by_one_answer_and_shown(here: Place, wall: float) -> None:
    link = here.link("pi-1", clock=Clockwork(lambda: wall))
    link.hello(hello("pi-1"))
    assert here.roster.hellos[-1].link["skew_s"] == pytest.approx(time.time() - wall, abs=5.0)
    assert here.fleet.stats()["refused"] == {"/tw/v1/hello 401": 1}
    link.pull(0.0)
    link.push(Failure("task-error", "x", "ask-1"))
    assert sum(here.fleet.stats()["refused"].values()) == 1


def test_a_right_clock_is_not_worth_a_word(here: Place) -> None:
    here.link("pi-1").hello(hello("pi-1"))
    assert [said.link["skew_s"] for said in here.roster.hellos] == [0.0]


def test_a_skew_that_the_door_takes_is_shown_too(here: Place) -> None:
    here.link("pi-1", clock=Clockwork(lambda: time.time() - 100)).hello(hello("pi-1"))
    assert here.roster.hellos[-1].link["skew_s"] == pytest.approx(100, abs=2)


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S, -50 * 365 * DAY_S])
def test_a_clock_that_is_stepped_in_a_round_disturbs_nothing(here: Place, tmp_path: Path, step_s: float) -> None:
    wall = [0.0]
    link = here.link("pi-1", clock=Clockwork(lambda: time.time() + wall[0]))
    link.hello(hello("pi-1"))
    here.fleet.send([envelope("pi-1", "ask-1", tmp_path, b"model")])
    assert pulled(link).ask.ask_id == "ask-1"
    wall[0] = step_s
    link.push(answer("pi-1", "ask-1", 1, b"abc"), written(tmp_path, b"abc"))
    assert polled(here.fleet, ReplyHead).ask_id == "ask-1"
    assert not here.fleet.stats()["refused"]
    assert link.clock.skew_s == pytest.approx(-step_s, abs=5)


def test_what_was_signed_before_the_aggregator_began_is_signed_anew(here: Place) -> None:
    """The device's clock is within the window, and behind the restart."""
    link = here.link("pi-1", clock=Clockwork(lambda: time.time() - 60))
    link.hello(hello("pi-1"))
    assert here.fleet.stats()["refused"] == {"/tw/v1/hello 401": 1}


@pytest.mark.parametrize("wall", [None, 20.0], ids=["with a clock", "without one"])
@pytest.mark.parametrize("days", [-200, 200], ids=["ended", "begins"])
def test_a_certificate_outside_its_dates_is_refused_once_the_time_is_known(
    tmp_path: Path, wall: float | None, days: int
) -> None:
    def now() -> dt.datetime:
        return dt.datetime.now(dt.UTC) + dt.timedelta(days=days)

    with place(tmp_path, tls=True) as made:
        folder = made.folder
        made.link("pi-1")
        roster = made.roster
    for path in (folder / "ca").glob("*"):
        if path.suffix in (".pem", ".key") and ".ca" not in path.name:
            path.unlink()
    with place(folder, roster=roster, authority=PrivateAuthority(folder / "ca", now=now)) as again:
        again.authority = again.options["authority"]
        link = again.link("pi-1", clock=Clockwork(lambda: wall if wall is not None else time.time()))
        with pytest.raises(Unreachable, match="is not valid now"):
            link.hello(hello("pi-1"))
        with pytest.raises(Unreachable):
            link.push(answer("pi-1", "ask-1"))


# CAs that are rotated


def test_a_device_takes_a_new_ca_and_says_so_and_the_old_one_is_laid_down(here: Place) -> None:
    assert here.authority is not None
    link, old = join(here, "pi-1"), here.authority.pin
    new = here.authority.rotate()
    here.restart()  # as the service learns of it
    link.pull(0.0)
    held = Trust.load(here.folder / "clients" / "pi-1")
    assert held is not None
    assert held.pins == (new, old)
    assert here.roster.hellos[-1].holds == (new, old)
    here.authority.confirmed([here.roster.hellos[-1].holds])
    here.restart()
    link.pull(0.0)
    assert here.roster.hellos[-1].holds == (new,)
    here.link("pi-1")  # a new process, from the file
    here.links[-1].push(answer("pi-1", "ask-1"))


def test_a_device_that_holds_the_old_ca_is_shown_the_chain_that_it_can_verify(here: Place) -> None:
    assert here.authority is not None
    link = here.link("pi-1")
    here.authority.rotate()
    here.restart()
    assert link.hello(hello("pi-1")).name == "pi-1"


# Waiting


def test_pulls_draw_their_wait_anew_from_within_a_tenth(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    waited: list[float] = []
    monkeypatch.setattr(link, "_pull", waited.append)
    for _ in range(200):
        link.pull(240.0)
    assert 216 <= min(waited) < 222
    assert 258 < max(waited) <= 264
    assert len(set(waited)) > 190


def test_one_idle_day_costs_less_than_a_megabyte(here: Place) -> None:
    """Measured on the wire for one poll; around it TCP/IP of six packets, and two keepalive packets a minute."""
    header, polls, probes = 66, DAY_S / 240, DAY_S / 60
    with proxy(here.fleet.address) as line:
        here.link("pi-1").close()
        here.door = line.address
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        link.pull(0.0)
        before = line.up.given + line.down.given
        for _ in range(10):
            link.pull(0.0)
        each = (line.up.given + line.down.given - before) / 10
    assert polls * (each + 6 * header) + probes * 2 * header < 1_000_000, each


def test_a_device_that_moved_polls_anew_at_once(here: Place) -> None:
    away = threading.Event()

    def is_moved(line: object) -> bool:
        was = away.is_set()
        away.clear()
        return was

    link, got = here.link("pi-1", look_s=0.02, is_moved=is_moved), list[Delivery | None]()
    link.hello(hello("pi-1"))
    thread = threading.Thread(target=lambda: got.append(link.pull(60.0)))
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] == 1)
    away.set()
    until(lambda: here.fleet.stats()["requests"]["pull"] == 2)
    here.fleet.send([envelope("pi-1", "ask-1")])
    thread.join(PATIENCE_S)
    assert [delivery.ask.ask_id for delivery in got if delivery] == ["ask-1"]


def test_this_machine_has_moved_when_it_would_come_from_another_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for source, expected in (("127.0.0.1", False), ("127.0.0.2", True)):
            with socket.create_connection(server.getsockname(), source_address=(source, 0)) as made:
                assert moved(made) is expected
                server.accept()[0].close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP user time-out")
def test_a_dead_line_is_noticed_by_the_system(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    line = link._pulling._line
    assert line is not None
    assert line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_round_trip_is_measured_and_told(here: Place) -> None:
    with proxy(here.fleet.address) as line:
        here.link("pi-1").close()
        here.door = line.address
        here.link("pi-1").hello(hello("pi-1"))
    assert 0 < here.roster.hellos[-1].link["rtt_s"] < 5


def test_after_a_lost_aggregator_a_device_is_told_within_what_time_to_come_back(tmp_path: Path) -> None:
    """Also in its next process: the power may have gone at the devices as well."""
    with place(tmp_path, tls=True) as here:
        link = here.link("pi-1")
        for at in range(300):
            here.roster.enrol(f"other-{at}", f"{at:064x}", b"", "invitation")
        link.hello(hello("pi-1"))
        paused: list[bool] = []
        link._pause = lambda: paused.append(True)  # type: ignore[method-assign]  # a spy
        here.fleet.close()
        with pytest.raises(Unreachable) as lost:
            link.pull(1.0)
        assert lost.value.within_s == pytest.approx(3.01)
        second = here.link("pi-1")
        second._pause = lambda: paused.append(True)  # type: ignore[method-assign]  # a spy
        with pytest.raises(Unreachable):
            second.hello(hello("pi-1"))
        assert paused == [True]
