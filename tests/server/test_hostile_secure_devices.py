"""A device of a secure round that breaks the rules: what becomes of the round, of the others, and of the journal."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.server import test_secure_rounds as honest
from tests.support.crashes import Fate, Outcome
from tests.support.secure_fleet import SecureBehavior, SecureDevice, SecureFleet
from thinwire.core.events import ClientFailed, RoundClosed, UpdateAccepted
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.core.types import Assignment, PhaseReply, ReplyHeader, Timings
from thinwire.simulation.scripted_device import OutboxEntry

LIAR, OTHERS = "e", list("abcd")
ROUND = 2  # in which the liar lies
TELLS: dict[str, dict[str, Any]] = {
    "metrics": {"metrics": {"eval/loss": (271.828, 100.0)}},
    "norm": {"norm": 271.828},
    "examples": {"examples": 271_828},
    "steps": {"steps": 271_828},
    "residual norm": {"residual_norm": 271.828},
    "timings": {"timings": Timings(train_s=271.828)},
    "counters": {"counters": {"batches": 271_828}},
    "lost": {"lost": "271828"},
}


@dataclass
class Lie:
    """What the liar does in round 2: `sent(fleet, device, assignment, phase, message)` in place of its message."""

    phase: str
    sent: Callable[[Any, SecureDevice, Assignment, bytes], None]


class LyingFleet(SecureFleet):
    """A fleet whose device `LIAR` sends what a test gives it, in place of its message of one phase."""

    lie: Lie | None = None
    tells: dict[str, Any] | None = None
    revoked_in: str = ""  # the phase in which the liar is revoked, after its message
    earlier: bytes = b""  # the liar's advertisement of round 1

    def reply(self, device: SecureDevice, assignment_id: str, text: str) -> None:
        assert device.link is not None
        self.receive(device.link, PhaseReply(assignment_id, text, identity="5e" * 16), None)

    def _say(self, device: SecureDevice, assignment: Assignment, phase: str, make: Callable[[], bytes]) -> None:
        lies = device.name == LIAR and assignment.round == ROUND and self.lie is not None and self.lie.phase == phase
        if device.name == LIAR and phase == "advertise" and assignment.round < ROUND:
            LyingFleet.earlier = make()
        if lies:
            assert self.lie is not None
            self.lie.sent(self, device, assignment, make())
        else:
            super()._say(device, assignment, phase, make)
        self._revoke(device, assignment.round, phase)

    def _deliver(self, link: Any, kept: OutboxEntry) -> None:
        if link.name == LIAR and kept.delivery.assignment.round == ROUND and self.tells is not None:
            assert isinstance(kept.header, ReplyHeader)
            kept = replace(kept, header=replace(kept.header, **self.tells))
        super()._deliver(link, kept)

    def _revoke(self, device: SecureDevice, number: int, phase: str) -> None:
        if (device.name, number, phase) == (LIAR, ROUND, self.revoked_in):
            self.revoke_access([LIAR])


class World(honest.World):
    kind = LyingFleet

    def behavior_of(self, name: str) -> Any:
        return lambda assignment: SecureBehavior(compute_s=2.0)


def lived(folder: Path, **lies: Any) -> Outcome:
    world = World(folder, Fate())
    for key, value in lies.items():
        setattr(world.fleet, key, value)
    return world.live()


def of_round(made: Outcome, kind: type[Any], number: int = ROUND) -> list[Any]:
    return [event for event in made.of(kind) if event.round == number]


def survivors(made: Outcome, number: int = ROUND) -> int:
    (summed,) = of_round(made, SumUnmasked, number)
    return int(summed.survivors)


def text(message: bytes) -> str:
    return base64.b64encode(message).decode()


def replay(fleet: Any, device: SecureDevice, assignment: Assignment, message: bytes) -> None:
    fleet.reply(device, assignment.assignment_id, text(fleet.earlier))


WRONG: dict[str, tuple[str, Callable[..., None]]] = {
    "too long": ("share", lambda f, d, a, m: f.reply(d, a.assignment_id, "A" * 4_000_000)),
    "no base64": ("share", lambda f, d, a, m: f.reply(d, a.assignment_id, "\u00e9" * 40)),
    "cut": ("share", lambda f, d, a, m: f.reply(d, a.assignment_id, text(m[:-1]))),
    "of the round before": ("advertise", replay),
    "damaged": ("advertise", lambda f, d, a, m: f.reply(d, a.assignment_id, text(bytes([m[0] ^ 1]) + m[1:]))),
    "of another phase": ("agree", lambda f, d, a, m: f.reply(d, a.assignment_id, text(m[:8]))),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_device_whose_message_is_wrong_drops_out_alone(tmp_path: Path, what: str) -> None:
    phase, sent = WRONG[what]
    made = lived(tmp_path, lie=Lie(phase, sent))
    dropped = {event.phase: event.dropped for event in of_round(made, PhaseClosed) if event.dropped}
    assert dropped == {phase: [LIAR]}
    assert survivors(made) == (5 if phase == "agree" else 4)
    assert survivors(made, ROUND + 1) >= 4, "the run goes on"


def others(fleet: Any, device: SecureDevice, assignment: Assignment, message: bytes) -> None:
    """Messages in the name of another device, and its own twice."""
    fleet.reply(device, assignment.assignment_id[: -len(LIAR)] + "a", text(message))
    fleet.reply(device, assignment.assignment_id, text(message))
    fleet.reply(device, assignment.assignment_id, text(message[:-1]))


@pytest.mark.parametrize("phase", ["advertise", "share", "agree", "unmask"])
def test_a_message_in_the_name_of_another_device_or_a_second_one_is_not_read(tmp_path: Path, phase: str) -> None:
    made = lived(tmp_path, lie=Lie(phase, others))
    assert [event.dropped for event in of_round(made, PhaseClosed)] == [[]] * 5
    assert survivors(made) == 5


@pytest.mark.parametrize("what", TELLS)
def test_a_masked_update_with_facts_about_its_client_is_refused_and_the_facts_are_not_kept(
    tmp_path: Path, what: str
) -> None:
    made = lived(tmp_path, tells=TELLS[what])
    assert [(e.device, e.kind) for e in of_round(made, ClientFailed)] == [(LIAR, "protocol")]
    assert survivors(made) == 4
    assert LIAR not in {e.device for e in of_round(made, UpdateAccepted)}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]  # the store, the spool, the run
    assert not any(said in data for data in files for said in (b"271.828", b"271828"))


def test_a_device_that_is_revoked_before_the_survivors_are_shown_is_in_no_sum(tmp_path: Path) -> None:
    made = lived(tmp_path, revoked_in="share")
    assert survivors(made) == 4
    (closed,) = of_round(made, RoundClosed)
    assert LIAR not in {update_id.split("/")[1] for update_id in closed.aggregated}


def test_a_survivor_that_is_revoked_ends_the_round_and_the_model_stays(tmp_path: Path) -> None:
    made = lived(tmp_path, revoked_in="agree")
    before, closed = (of_round(made, RoundClosed, number)[0] for number in (ROUND - 1, ROUND))
    assert (closed.reason, closed.version, closed.aggregated) == ("aborted", before.version, [])
    assert (before.detail, closed.detail) == ("", f"{LIAR} was revoked after the survivors were shown")
    assert of_round(made, SumUnmasked) == []
