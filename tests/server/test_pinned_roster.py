"""A plan that withstands a malicious aggregator selects only devices whose name and key are on the installed roster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.server import test_secure_rounds as honest
from tests.support import crashes
from tests.support.crashes import LAYOUT, Fate, Outcome
from tests.support.reasons import sentences
from tests.support.secure_fleet import SecureBehavior, SecureDevice, SecureFleet, toy_plan
from thinwire.core import RunPlan
from thinwire.core.events import RoundOpened, RunStatusChanged
from thinwire.core.fleet import SECURE_PARTS, Hello
from thinwire.core.run_events import SumUnmasked
from thinwire.privacy.contexts import identity_of, simulated_key
from thinwire.privacy.pinned_roster import write_roster
from thinwire.simulation import ScriptedDevice

NAMES = "abcde"
KEYS = {name: identity_of(simulated_key(name)) for name in NAMES}


class PinnedFleet(SecureFleet):
    """Devices that say that they have pinned a roster."""

    def _hello(self, device: ScriptedDevice) -> Hello:
        return replace(super()._hello(device), secure=SECURE_PARTS)


class World(crashes.World):
    """Five devices, of which one to four are on the roster that each of them has pinned."""

    kind = PinnedFleet

    def __init__(self, folder: Path, pinned: dict[str, bytes], adversary: str = "malicious") -> None:
        secure = f'clip = 20.0\nadversary = "{adversary}"'
        plan = RunPlan.parse(toy_plan(secure, rounds=1, clients=4, cohort="wait_s = 30"))
        devices = [
            SecureDevice(
                name, None, lambda assignment: SecureBehavior(),  # type: ignore[arg-type]  # no Work
                plan=plan, layout=LAYOUT, pinned=pinned or None,
                change=lambda assignment: crashes.change("a", LAYOUT.size, assignment),
            )
            for name in NAMES
        ]  # fmt: skip
        super().__init__(folder, Fate(), plan, devices)
        self.folder = folder

    _drive = honest.World._drive

    def install(self, devices: dict[str, bytes]) -> None:
        (self.folder / "roster.json").write_bytes(write_roster(devices))


ON_IT = {name: KEYS[name] for name in "abcd"}


def waited(made: Outcome) -> str:
    return next(str(event.text) for event in made.of(RunStatusChanged) if event.status == "waiting")


def test_a_device_outside_the_roster_is_not_selected_and_the_others_get_their_sum(tmp_path: Path) -> None:
    world = World(tmp_path, ON_IT)
    world.install(ON_IT)
    made = world.live()
    (opened,) = made.of(RoundOpened)
    assert sorted(opened.assignments) == list("abcd")
    (told,) = sentences(opened.reasons).values()
    assert told.startswith("is not on the installed roster with its key (")
    assert [event.survivors for event in made.of(SumUnmasked)] == [4]


def test_a_device_with_another_key_than_on_the_roster_is_not_selected(tmp_path: Path) -> None:
    world = World(tmp_path, ON_IT)
    world.install({**ON_IT, "a": KEYS["e"]})
    assert "a, e: each is not on the installed roster with its key" in waited(world.live())


@pytest.mark.parametrize("installed", [b"", b"{}", b'{"a": "no key"}'])
def test_without_a_roster_the_run_waits_and_says_what_to_type(tmp_path: Path, installed: bytes) -> None:
    world = World(tmp_path, ON_IT)
    if installed:
        (tmp_path / "roster.json").write_bytes(installed)
    made = world.live()
    assert made.of(RoundOpened) == []
    text = "is not readable" if installed else "thinwire devices roster install SIGNED.json --key KEY.pem.pub"
    assert text in waited(made)


def test_a_roster_is_read_again_when_another_one_is_installed(tmp_path: Path) -> None:
    world = World(tmp_path, ON_IT)
    world.install({"a": KEYS["a"]})
    polled, looked = world.fleet.poll, list[float]()

    def poll(wait_s: float) -> object:
        looked.append(wait_s)
        if len(looked) == 3:
            world.install(ON_IT)
        return polled(wait_s)

    world.fleet.poll = poll  # type: ignore[method-assign,assignment]  # the operator, meanwhile
    made = world.live()
    assert "a is not" not in waited(made)
    assert [event.survivors for event in made.of(SumUnmasked)] == [4]


def test_a_curious_aggregator_needs_no_roster(tmp_path: Path) -> None:
    made = World(tmp_path, {}, "curious").live()
    assert [event.survivors for event in made.of(SumUnmasked)] == [4]
