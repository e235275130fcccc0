"""Client processes that add their own noise: what the ledgers of both ends count, and what is shown."""

from __future__ import annotations

import json
from typing import Any

from tests.support.processes import Site
from thinwire.core.events import UpdateAccepted
from thinwire.privacy.accounting import Release, epsilon

CLIENTS, ROUNDS = 2, 2
PRIVATE = (
    f"run.rounds={ROUNDS}", "run.evaluate='off'", "run.metric='loss'", f"cohort.wait_for={CLIENTS}",
    f"cohort.min_updates={CLIENTS}", "cohort.deadline_s=60", "local.buffers='local'", "local.steps=5",
    "uplink.codec='eden(4)'", "privacy.clip=0.5", "privacy.noise_multiplier=1.0", "privacy.delta=1e-3",
)  # fmt: skip
FACTS = ("examples", "steps", "a", "norm", "residual_norm", "metrics", "counters")


def ran(site: Site, mode: str, *more: str) -> str:
    """Return the id of a run in this mode that has ended."""
    site.start_aggregator()
    for part in range(CLIENTS):
        site.start_client(f"pi-{part}", part, CLIENTS)
    run_id = site.begin(*PRIVATE, f"privacy.mode='{mode}'", *more)
    assert site.until_done(run_id).status == "done", site.said()
    for event in site.events(run_id):
        if isinstance(event, UpdateAccepted):
            assert not any(event.header[name] for name in FACTS)
            assert not any(event.header["timings"].values())
    return run_id


def own_ledger(site: Site, part: int) -> dict[str, Any]:
    """Return a device's own ledger, as its owner gets it."""
    said = site.typed("client", "privacy", "--name", f"pi-{part}", "--json")
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def test_two_ledgers_count_the_same_rounds_of_devices_that_noise_their_updates(site: Site) -> None:
    run_id = ran(site, "local")
    with site.store() as store:
        entries = store.privacy.rows("digits")
    assert [(row.round, row.state, row.count) for row in entries] == [(1, "committed", 1), (2, "committed", 1)]
    (release,) = {row.release for row in entries}
    for part in range(CLIENTS):
        mine = own_ledger(site, part)
        assert [(one["run"], one["round"]) for one in mine["entries"]] == [(run_id, 1), (run_id, 2)]
        assert all(one["release"] == json.loads(release) for one in mine["entries"])
        (cost,) = mine["datasets"]
        assert cost["epsilon"] == epsilon({Release.from_json(release): ROUNDS}, cost["delta"])
    shown = site.typed("runs", "show", run_id).stdout
    assert "Nobody else is trusted: each device noises its own update before it sends it" in shown


def test_worker_processes_noise_their_steps_and_each_ledger_counts_them(site: Site) -> None:
    run_id = ran(site, "example", "privacy.records=400", "privacy.clip=1.0")
    with site.store() as store:
        (release,) = {row.release for row in store.privacy.rows("digits")}
    found = Release.from_json(release)
    assert (found.steps, found.unit, found.rate) == (5, "record", 32 / 400)
    for part in range(CLIENTS):
        mine = own_ledger(site, part)
        assert [one["release"] for one in mine["entries"]] == [json.loads(release)] * ROUNDS
        assert mine["datasets"][0]["unit"] == "record"
        assert "for one record" in site.typed("client", "privacy", "--name", f"pi-{part}").stdout
    shown = site.typed("runs", "show", run_id).stdout
    assert "Unit of privacy: one record of one device." in shown
    assert "All records of a device together are not protected" in shown
