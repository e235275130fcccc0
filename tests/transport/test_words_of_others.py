"""What whoever answers a device may say to it: words that no terminal obeys, and numbers that it can live with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.certificates import Authority
from tests.support.transport_doubles import drawn_invitation, place
from tests.transport.test_joining import joined, listening
from thinwire.core.equipment import Equipment
from thinwire.core.errors import BadPayload, Refused, ThinwireError, Unreachable
from thinwire.core.fleet import Hello, Welcome
from thinwire.core.serialization import assignment_from_bytes, assignment_to_bytes
from thinwire.core.types import Assignment
from thinwire.transport.device import enroll, transfers
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import ServerClock, device_key
from thinwire.transport.device.session import InFlightAssignments, refusal_error
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import ApiError
from thinwire.transport.server.registration import JoinRoute

BAD = "a\x1b]0;gone\x07\x1b[2J\r\n\u202eb"


def test_who_answers_a_join_unverified_moves_no_cursor(tmp_path: Path) -> None:
    """An engineer reads what is said here; whoever stands in between can say it."""
    authority = Authority()
    shows: dict[str, Any] = {"cas": [BAD], "server_name": BAD}
    with listening(authority.chain(tmp_path), shows) as (url, _), pytest.raises(ThinwireError) as refused:
        join(url, drawn_invitation(authority.pin), device_key(tmp_path), "pi-1", {})
    assert all(line.isprintable() for line in refused.value.text().split("\n"))


@pytest.mark.parametrize("status", [403, 503])
def test_a_refusal_is_read_plain(status: int) -> None:
    said = ApiError.read(status, json.dumps({"error": BAD, "why": BAD * 1000}).encode())
    assert said.kind.isprintable() and said.why.isprintable() and len(said.why) <= 1000


@pytest.mark.parametrize("status", [400, 404, 405, 501])
def test_a_server_that_is_no_device_api_is_called_so(status: int) -> None:
    refusal = ApiError.read(status, b"<html>Unsupported method ('POST')</html>")
    said = refusal_error(refusal, "http://127.0.0.1:8000", tls=False)
    assert isinstance(said, Refused) and said.what == "http://127.0.0.1:8000 is no aggregator's device API"


def test_a_proxy_whose_device_api_is_away_is_tried_again() -> None:
    said = refusal_error(ApiError.read(502, b"<html>Bad Gateway</html>"), "http://127.0.0.1:8000", tls=False)
    assert isinstance(said, Unreachable) and "cannot answer now" in said.what


def test_a_refusal_with_deep_json_is_one_all_the_same() -> None:
    assert ApiError.read(503, b'{"error":' + b"[" * 60_000).kind == "http"


@pytest.mark.parametrize("now", ["NaN", "Infinity", "-1e300", "1e300", "1" * 400, "[]", '"soon"', "null"])
def test_no_time_of_day_breaks_a_device_s_clock(now: str) -> None:
    clock = ServerClock()
    clock.learn(ApiError.read(401, b'{"error":"clock","why":"","now":%s}' % now.encode()).now)
    assert 1969 <= clock.now().year <= 9999


@pytest.mark.parametrize("after", ["1e300", "9" * 400, "-5", "nan", "inf", "soon"])
def test_nobody_sends_a_device_away_for_longer_than_an_hour(after: str) -> None:
    assert 0 <= ApiError.read(503, b"{}", {"retry-after": after}).retry_after_s <= 3600


@pytest.mark.parametrize(
    "field",
    [
        {"poll_s": 1e300}, {"poll_s": -1.0}, {"spread_s": 1e300}, {"spread_s": -1.0}, {"server_time": 1e300},
        {"name": "../x"}, {"name": BAD}, {"sequences": {"digits-1": 2**80}}, {"sequences": {"digits-1": -1}},
        {"runs": 5}, {"runs": ["digits-1"]},
        {"poll_s": 10**400}, {"protocol": None},
    ],
)  # fmt: skip
def test_a_welcome_that_a_device_cannot_live_with_is_not_read(field: dict[str, Any]) -> None:
    raw = {**dataclasses.asdict(Welcome("pi-1", server_time=1.8e9)), **field}
    with pytest.raises(BadPayload):
        registration.welcome_from_bytes(json.dumps(raw).encode())


@pytest.mark.parametrize("field", ["assignment_id", "run", "task", "kind", "base_digest", "layout_digest", "codec"])
def test_an_assignment_names_nothing_by_what_moves_a_cursor(field: str) -> None:
    assignment = Assignment("digits-1.1.pi-1", "digits-1", "digits", "train", "0" * 64)
    assert assignment_from_bytes(assignment_to_bytes(assignment)) == assignment
    with pytest.raises(BadPayload):
        assignment_from_bytes(assignment_to_bytes(dataclasses.replace(assignment, **cast(Any, {field: BAD}))))


def test_an_assignment_may_have_a_long_codec() -> None:
    rules = "; ".join(f'"block{i}.weight"=int8' for i in range(200))
    assignment = Assignment(
        "digits-1.1.pi-1", "digits-1", "digits", "train", "0" * 64, codec=f"layers({rules}; *=int8)"
    )
    assert assignment_from_bytes(assignment_to_bytes(assignment)) == assignment


@pytest.mark.parametrize("field", [{"fingerprint": "0" * 64}, {"name": BAD}, {"state": BAD}])
def test_the_answer_to_a_join_is_about_this_very_key(
    tmp_path: Path, field: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both ends print is compared by people: the device prints its own."""
    said = JoinRoute._said
    monkeypatch.setattr(
        JoinRoute, "_said", lambda self, row: json.dumps({**json.loads(said(self, row)), **field}).encode()
    )
    with place(tmp_path, tls=True) as here, pytest.raises(Unreachable, match="cannot read the answer"):
        joined(here, "pi-1")


DEEP = b"[" * 60_000


def test_json_without_a_bottom_is_none_to_a_device(tmp_path: Path) -> None:
    """Python's reader gives up on it with an error of its own, at which a program ended."""
    answer = cast(Any, SimpleNamespace(length=len(DEEP), read=lambda: DEEP))
    with pytest.raises(BadPayload):
        InFlightAssignments().withdraw(DEEP)
    with pytest.raises(Unreachable):
        transfers._read(answer)
    with pytest.raises(BadPayload):
        registration.welcome_from_bytes(DEEP)


@pytest.mark.parametrize("said", [DEEP, b"[]", b'{"cas":5}', b"5", b"null", b'"x"', b'{"cas":{},"server_name":[]}'])
def test_what_is_no_answer_of_an_aggregator_ends_a_join_in_words(
    tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    monkeypatch.setattr(enroll, "read_all", lambda *_: said)
    shows: dict[str, Any] = {"cas": [authority.pem], "server_name": ""}
    refused = "not the aggregator of this invitation"
    with listening(authority.chain(tmp_path), shows) as (url, _), pytest.raises(Refused, match=refused):
        join(url, drawn_invitation(authority.pin), device_key(tmp_path), "pi-1", {})


@pytest.mark.parametrize("said", [DEEP, b"5", b"null", b"[1]"])
def test_an_answer_to_a_join_that_is_none_is_said_in_words(
    tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JoinRoute, "_said", lambda *_: said)
    with place(tmp_path, tls=True) as here, pytest.raises(Unreachable, match="cannot read the answer"):
        joined(here, "pi-1")


@pytest.mark.parametrize("has", [{}, {"cores": 4, "free_bytes": 0}, {"mains": True, "metered": False, "gpu": "?"}])
def test_a_hello_says_what_a_device_has_and_else_nothing(has: dict[str, Any]) -> None:
    raw = json.loads(registration.to_bytes(Hello("pi-1", "p")))
    assert "has" not in raw
    read = registration.hello_from_bytes(json.dumps({**raw, "has": has}).encode())
    assert read.has == Equipment(**{name: value for name, value in has.items() if name != "gpu"})
    assert registration.hello_from_bytes(registration.to_bytes(read)) == read


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (["secure.malicious", "secure"], ("secure", "secure.malicious")),
        (["a part of a later version", "secure"], ("secure",)),
        ([["secure"], 3, None], ()),
        ("secure", ()),
        ([], ()),
    ],
)
def test_a_hello_says_which_parts_of_secure_aggregation_a_device_has(said: Any, read: tuple[str, ...]) -> None:
    raw = json.loads(registration.to_bytes(Hello("pi-1", "p")))
    assert "secure" not in raw
    hello = registration.hello_from_bytes(json.dumps({**raw, "secure": said}).encode())
    assert hello.secure == read
    assert registration.hello_from_bytes(registration.to_bytes(hello)) == hello


@pytest.mark.parametrize("has", [{"cores": -1}, {"free_bytes": 1e300}, {"mains": "yes"}, {"metered": 1}, [], "x"])
def test_a_hello_with_what_does_not_belong_is_refused(has: Any) -> None:
    raw = json.loads(registration.to_bytes(Hello("pi-1", "p")))
    with pytest.raises(BadPayload):
        registration.hello_from_bytes(json.dumps({**raw, "has": has}).encode())
