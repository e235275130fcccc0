"""A hello's claims are kept small and finite: one hello must not fill the journal, nor break what people are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_words import hello
from tests.support.transport_doubles import Place
from tests.system.attacks.acting import acted
from tests.system.attacks.places import attacked, device_of
from thinwire.core import Layout, RunPlan
from thinwire.core.events import ClientFailed, RoundOpened, UpdateAccepted
from thinwire.core.fleet import TaskReport
from thinwire.core.types import ReplyHeader
from thinwire.server.policy.eligibility import mismatch
from thinwire.simulation import Behavior, SyntheticUpdates
from thinwire.store.device_profiles import DeviceProfiles, line
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, pack

LAYOUT = Layout.of({"w": (3,)})
PLAIN_AND_TLS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


def test_dimensions_that_are_no_counts_are_not_told() -> None:
    """1e308 has five letters on the wire and 309 digits as an integer."""
    many = ",".join(["1e308"] * 10_000)
    for shape in (many, "1.0", "true", "-1", str(2**64)):
        text = f'{{"tensors":[["w",[{shape}],"float32","trained"]],"aliases":[],"frozen":""}}'
        with pytest.raises(ValueError, match="whole numbers"):
            Layout.from_json(json.loads(text))


@pytest.mark.parametrize(
    "tensors",
    [
        [["w", [1] * 9_000, "float32", "trained"]],
        [["w", [3], "f" * 50_000, "trained"]],
        [[f"{'n' * 70}{at}", [2**53] * 60, "d" * 70, "buffer"] for at in range(50)],
    ],
)
def test_a_reason_that_a_device_s_layout_makes_is_short(tensors: list[Any]) -> None:
    raw = {"tensors": tensors, "aliases": [], "frozen": ""}
    own = Layout.from_json(raw)
    report = TaskReport("toy", layout_digest=own.digest, tensors=json.dumps(raw))
    wanted, plan = TaskReport("toy", layout_digest=LAYOUT.digest), {"run": {"task": "toy"}, "local": {"lr": 1}}
    why = mismatch(RunPlan.from_json(plan), wanted, replace(hello("a"), tasks=(report,)), LAYOUT)
    assert "has another model" in why
    assert len(why) < 700


@PLAIN_AND_TLS
def test_a_hello_with_measures_that_no_sum_can_hold_is_refused(tmp_path: Path, tls: bool) -> None:
    with attacked(tmp_path, tls=tls) as here:
        device = device_of(here)
        for name, value in (("rtt_s", 1.7e308), ("skew_s", -1e300)):
            said = replace(hello("pi-1"), link={name: value})
            assert device.call("POST", HELLO, pack(registration.to_bytes(said))).status == 409
        assert device.hello().status == 200


def test_figures_of_a_link_are_finite() -> None:
    known = DeviceProfiles()
    known.learn_rtt("a", 1e9)
    assert known.device("a", "w").rtt is None
    known.learn("a", "w", {"down": (1e6, 1e-310), "up": (1e6, 1.0)})
    down = known.device("a", "w").down
    assert down is not None
    assert down.bits_s is None
    usual = line([(1e6, 1.0)])
    assert usual is not None
    assert usual.bits_s is not None


class Naming(SyntheticUpdates):
    """Names the codec of its update at great length."""

    def finish(self, delivery: Any, behavior: Behavior) -> Any:
        reply, body = super().finish(delivery, behavior)
        return (replace(reply, codec="c" * 90_000) if isinstance(reply, ReplyHeader) else reply), body


@PLAIN_AND_TLS
def test_what_one_device_claims_stands_in_no_event_at_length(tmp_path: Path, tls: bool) -> None:
    raw = {"tensors": [["w", [7] * 20_000, "float32", "trained"]], "aliases": [], "frozen": ""}
    other = Layout.from_json(raw)
    report = TaskReport("toy", layout_digest=other.digest, tensors=json.dumps(raw, separators=(",", ":")))

    def greet(here: Place) -> None:
        link = here.link("amplifier")
        link.hello(replace(hello("amplifier"), tasks=(report,)))

    devices = {
        "a": SyntheticUpdates("a", LAYOUT, 1.0),
        "b": SyntheticUpdates("b", LAYOUT, 1.0),
        "naming": Naming("naming", LAYOUT, 1.0),
    }
    made = acted(tmp_path, LAYOUT, devices, tls=tls, begun=greet, run={"rounds": 2}, local={"lr": 1.0, "steps": 1})
    assert made.row.status == "done", made.row.status_text
    assert all(len(repr(event)) < 3_000 for event in made.events)
    assert {event.device for event in made.of(UpdateAccepted)} == {"a", "b"}
    assert {(event.device, event.kind) for event in made.of(ClientFailed)} >= {("naming", "protocol")}
    assert any("amplifier" in repr(event.reasons) for event in made.of(RoundOpened))
