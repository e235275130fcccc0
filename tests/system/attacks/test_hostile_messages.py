"""Two thousand hostile messages before, in and between rounds: the service is up, starts again, and no bit differs."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fleet_words import answers_now
from tests.support.transport_doubles import Place
from tests.system.attacks import fuzz_service
from tests.system.attacks.acting import Acted, acted
from tests.system.attacks.hostile import HUNG_UP, Hostile
from tests.system.attacks.places import attacked, device_of
from thinwire.core import Layout
from thinwire.core.events import RoundClosed
from thinwire.core.types import Assignment, Vector
from thinwire.simulation import SyntheticUpdates
from thinwire.store.spool import UNREADABLE

LAYOUT = Layout.of({"w": (30, 20), "b": (20,)})
ROUNDS, DEVICES = 5, ("pi-1", "pi-2", "pi-3")
CASES = {False: 1400, True: 600}  # plain and over TLS; `make fuzz` sends many more


def change(name: str, assignment: Assignment) -> Vector:
    """It depends on the device and the round only. Whole numbers add up to the same bits in any order of arrival."""
    drawn = np.random.default_rng([DEVICES.index(name), assignment.round]).integers(-64, 64, LAYOUT.size)
    return drawn.astype(np.float32)


def devices(before: Any = None) -> dict[str, SyntheticUpdates]:
    """The honest ones; the first does `before(assignment)` before each of its updates."""

    def made(name: str) -> Any:
        def of(assignment: Assignment) -> Vector:
            if before is not None and name == DEVICES[0]:
                before(assignment)
            return change(name, assignment)

        return of

    return {name: SyntheticUpdates(name, LAYOUT, made(name), steps=5) for name in DEVICES}


def closed(run: Acted) -> list[tuple[list[str], list[str], str]]:
    """What counted in each round, in no order of arrival."""
    return [(sorted(e.aggregated), sorted(e.dropped), e.reason) for e in run.of(RoundClosed)]


def all_strict(database: Path) -> None:
    """Every JSON in the store is one that any database and any browser takes."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the store")

    with contextlib.closing(sqlite3.connect(database)) as copy:
        for (table,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [(row[1], row[2]) for row in copy.execute(f"PRAGMA table_info({table})")]
            for row in copy.execute(f"SELECT * FROM {table}"):  # a name of its own tables
                for (_, kind), cell in zip(columns, row, strict=True):
                    if isinstance(cell, str):
                        found = json.loads(cell, parse_constant=refuse) if kind == "JSON" else cell
                        text = json.dumps(found, ensure_ascii=False)
                        text.encode()  # no half of a pair
                        assert "\\u0000" not in text


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_hostile_messages_of_every_kind_stop_nothing_and_change_no_bit(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "thinwire.transport.server.registration.WITHIN_S", 0.0
    )  # else most would be told to wait, and not be read
    monkeypatch.setattr("thinwire.transport.server.registration.SETTLE_S", 0.02)
    monkeypatch.setattr("thinwire.transport.server.auth.FAILED_WITHIN_S", 0.0)
    quiet = acted(tmp_path / "quiet", LAYOUT, devices(), tls=tls, run={"rounds": ROUNDS}, cohort={"deadline_s": 120.0})
    hostile: list[Hostile] = []

    def begin(here: Place) -> None:
        callers = [device_of(here, f"evil-{nth}") for nth in range(4)]
        hostile.append(Hostile(callers, seed=17, assignments=lambda: list(here.fleet._state.in_flight())))
        hostile[0].begin()
        hostile[0].send(CASES[tls] // (ROUNDS + 1))

    def meanwhile(assignment: Assignment) -> None:
        hostile[0].begin()
        hostile[0].send(CASES[tls] // (ROUNDS + 1))

    try:
        loud = acted(
            tmp_path / "loud",
            LAYOUT,
            devices(meanwhile),
            tls=tls,
            begun=begin,
            run={"rounds": ROUNDS},
            cohort={"deadline_s": 120.0},
        )
    finally:
        for attack in hostile:
            attack.close()
    print(attack.sent, dict(attack.seen.most_common()))
    assert (loud.row.status, quiet.row.status) == ("done", "done")
    assert closed(loud) == closed(quiet)
    assert loud.row.model_digest == quiet.row.model_digest
    assert "defect" not in caplog.text
    assert sum(count for said, count in attack.seen.items() if HUNG_UP in said) < attack.sent / 50
    assert sum(count for said, count in attack.seen.items() if said.endswith(" 200")) > attack.sent / 20
    all_strict(loud.home.database)
    with attacked(loud.home.root, tls=tls) as here:  # it starts again
        answers_now(here.fleet)
        assert here.roster.rows()
    assert not (loud.home.spool / UNREADABLE).exists()


@pytest.mark.slow
def test_the_service_itself_is_restarted_under_hostile_messages(tmp_path: Path) -> None:
    """`make fuzz` has a hundred of them, also without TLS."""
    assert fuzz_service.attacked(tmp_path, 2, 80, seed=17, tls=True)
