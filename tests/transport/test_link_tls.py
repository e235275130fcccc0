"""A device behind TLS: what ends it and what it waits out, while CAs change."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.flower.test_flower_fleet import on_the_store
from tests.support.fleet_laws import FleetLaws
from tests.support.fleet_words import PATIENCE_S, Setting, answer, hello, join, until  # fmt: skip
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import Refused, ThinwireError, Unreachable
from thinwire.core.formatting import grouped
from thinwire.transport.device.identity import Trust
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.device.session import no_answer_error, refusal_error
from thinwire.transport.protocol.http import ApiError


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
    ApiError(401, "signature", "x"), ApiError(401, "clock", "x"), ApiError(401, "replay", "x"),
    ApiError(401, "hello", "x"),
    ApiError(401, "unknown", "x"), ApiError(403, "pending", "x"), ApiError(403, "device", "x"),
    ApiError(403, "invitation", "x"), ApiError(403, "protocol", "x"), ApiError(404, "http", "x"),
    ApiError(409, "name", "x"), ApiError(409, "process", "x"), ApiError(409, "protocol", "x"),
    ApiError(413, "too-large", "x"),
    ApiError(429, "joins", "x"), ApiError(503, "busy", "x"), ApiError(503, "disk", "x"), ApiError(500, "http", "x"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", EVERY_REFUSAL, ids=lambda r: f"{r.status}-{r.kind}")
def test_over_tls_nothing_but_a_revocation_ends_a_client(refusal: ApiError) -> None:
    error = refusal_error(refusal, "https://agg.example", tls=True)
    assert isinstance(error, Unreachable)
    assert error.what
    assert error.why
    assert error.hint
    assert isinstance(refusal_error(ApiError(403, "revoked", "x"), "https://agg.example", tls=True), Refused)


def test_who_hangs_up_on_plain_http_may_speak_tls_at_the_same_address() -> None:
    error = no_answer_error(http.client.RemoteDisconnected("x"), "http://agg.example:9090", tls=False)
    assert error.hint.endswith("does it speak TLS? https://agg.example:9090")


@pytest.mark.parametrize("code", [9, 10])
def test_a_certificate_that_is_not_valid_now_may_be_the_clocks_fault(code: int) -> None:
    error = ssl.SSLCertVerificationError("certificate is not yet valid")
    error.verify_code, error.verify_message = code, "certificate is not yet valid"
    assert no_answer_error(error, "https://agg.example", tls=True).hint.startswith("set this machine's clock")


def test_a_revoked_device_ends_with_five(here: Place) -> None:
    link = join(here, "pi-1")
    here.roster.put("pi-1", "revoked")
    with pytest.raises(Refused, match="revoked this device") as refused:
        link.pull(0.1)
    assert refused.value.exit_code == 5
    assert refused.value.hint == "contact its operator: thinwire devices approve pi-1 approves it again"


def test_a_pending_device_says_its_fingerprint_and_waits(here: Place) -> None:
    link = here.link("pi-1")
    here.roster.put("pi-1", "pending")
    with pytest.raises(Unreachable) as refused:
        link.hello(hello("pi-1"))
    assert grouped(here.roster.devices["pi-1"].fingerprint) in refused.value.why
    assert refused.value.hint.endswith("thinwire devices approve pi-1")
    here.roster.put("pi-1", "approved")
    assert link.hello(hello("pi-1")).name == "pi-1"


def test_an_aggregator_that_was_set_up_again_is_not_believed_and_hears_nothing(tmp_path: Path) -> None:
    with place(tmp_path / "old", tls=True) as old:
        folder = tmp_path / "old" / "clients" / "pi-1"
        old.link("pi-1")
    with place(tmp_path / "new", tls=True) as new:
        from thinwire.transport.device.identity import device_key

        link = HttpsLink(new.url, device_key(folder), "pi-1", folder, Trust.load(folder))
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
    link.push(answer("lab-1", "assignment-1"))
    held = Trust.load(here.folder / "clients" / "pi-1")
    assert held is not None
    assert held.name == "lab-1"


def test_who_is_told_when_to_come_again_passes_it_on() -> None:
    error = refusal_error(ApiError(429, "joins", "x", retry_after_s=17.0), "https://a", tls=True, within_s=3.0)
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
    assert here.roster.hellos[-1].trusted_pins == (new, old)
    here.authority.confirmed([here.roster.hellos[-1].trusted_pins])
    here.restart()
    link.pull(0.0)
    assert here.roster.hellos[-1].trusted_pins == (new,)
    here.link("pi-1")  # a new process, from the file
    here.links[-1].push(answer("pi-1", "assignment-1"))


def test_a_device_that_holds_the_old_ca_is_shown_the_chain_that_it_can_verify(here: Place) -> None:
    assert here.authority is not None
    link = here.link("pi-1")
    here.authority.rotate()
    here.restart()
    assert link.hello(hello("pi-1")).name == "pi-1"
