"""The same secure plan by client processes over the device API and in a simulation: the same bits.

Masks cancel, so they change no bit. Rotation and rounding follow from the clients' secrets and from the contexts of a
round, so here both runs draw the same ones, and the simulated run has the identity of the other one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.support import scripted_secrets
from tests.support.secure_site import MASKED, SECURE, SecureSite
from thinwire.aggregation import codecs
from thinwire.cli.params import overrides
from thinwire.core import RunPlan
from thinwire.core.events import Event, ModelStored
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.simulation import simulate
from thinwire.store import Store
from thinwire.store.tables import Run

pytestmark = pytest.mark.slow
DEVICES = tuple(f"sim-{number}" for number in range(6))
ROUNDS = 4
SETS = (
    *SECURE, f"run.rounds={ROUNDS}", "run.seed=0", "run.keep='all'", "local.steps=6", "secure.max_dropout=0.34",
    f"cohort.clients={len(DEVICES)}", f"cohort.wait_for={len(DEVICES)}", "cohort.min_updates=3",
    "secure.support=0.5",
)  # fmt: skip
LEAVES = {"sim-1": {"2": "masked"}, "sim-2": {"2": "share"}, "sim-3": {"3": "agree"}, "sim-5": {"3": "unmask"}}
DIES = {"sim-0": {"4": "masked"}}  # as a process; the simulated client leaves there


def facts(events: list[Event]) -> dict[str, Any]:
    """What two runs have in common if they are the same: models, sums, and who dropped out in which phase."""
    sums = [asdict(event) for event in events if isinstance(event, SumUnmasked)]
    closed = [event for event in events if isinstance(event, PhaseClosed)]
    times = ("at", "elapsed_s", "unmask_s")
    return {
        "models": {event.version: event.digest for event in events if isinstance(event, ModelStored)},
        "sums": [{key: value for key, value in one.items() if key not in times} for one in sums],
        "dropped": [(one.round, one.phase, one.dropped) for one in closed if one.phase != "unmask"],
    }  # fmt: skip  # `unmask` ends with enough shares, so whether a client left before that depends on the time


def of_processes(folder: Path, leaves: Mapping[str, Any], dies: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The identity of a run of client processes, and its facts."""
    site = SecureSite(folder / "home", DEVICES)
    site.client_program = ("tests.support.scripted_secrets",)
    try:
        site.serve()
        for name in DEVICES:
            scripted_secrets.put_key(site.home / "clients" / name, name)
        site.more |= {"LEAVES": json.dumps(leaves)}
        site.join()
        for name, when in dies.items():
            site.end([site.clients[name]])
            site.more |= {"LEAVES": json.dumps({name: when}), "DIES": "1"}
            site.start_device(name)
        run_id = site.begin(*SETS)
        assert site.until_done(run_id).status == "done", site.said()
        with site.store() as store:
            return store.run(run_id).identity, facts(site.events(run_id))
    finally:
        site.close()


def simulated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, identity: str, leaves: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts of a simulated run with an identity."""
    create = Store.create_run

    def alike(self: Store, *given: Any, **named: Any) -> str:
        run_id = create(self, *given, **named)
        with self._database.writing() as connection:
            connection.execute(update(Run).where(Run.c.run_id == run_id).values(identity=identity))
        return run_id

    monkeypatch.setattr(Store, "create_run", alike)
    monkeypatch.setattr("thinwire.simulation.client_pool.simulated_identity", scripted_secrets.scripted_identity)
    file = MASKED / "plan.toml"
    plan = RunPlan.load(file, overrides(list(SETS)))
    assert plan.check(codecs) == []
    with scripted_secrets.leaving(leaves):
        made = simulate(f"digits={MASKED / 'task.py'}", plan, clients=len(DEVICES), home=folder / "sim")
    with Store.open(folder / "sim" / "aggregator" / "store.sqlite3") as store:
        return facts([event for _, event in store.events(made.run.run_id)])


@pytest.mark.parametrize("lost", [False, True], ids=["all", "drop-outs"])
def test_processes_and_a_simulation_with_the_same_secrets_make_the_same_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    leaves: Mapping[str, Any] = LEAVES if lost else {}
    dies: Mapping[str, Any] = DIES if lost else {}
    identity, real = of_processes(tmp_path, leaves, dies)
    found = simulated(tmp_path, monkeypatch, identity, {**leaves, **dies})
    assert len({*real["models"].values()}) == ROUNDS + 1
    assert found == real
    survivors = [one["survivors"] for one in real["sums"]]
    assert survivors == ([6, 4, 6, 5] if lost else [6] * ROUNDS)
