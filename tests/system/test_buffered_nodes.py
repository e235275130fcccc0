"""Buffered rounds with real processes: a slow device holds nobody up, its work counts, and a kill changes nothing."""

from __future__ import annotations

from tests.support.processes import Site, kill
from tests.support.run_outcome import double_aggregations, lost_updates
from thinwire.core.events import RoundClosed, UpdateAccepted

DEVICES = ("pi-a", "pi-b", "slow")


def accepted(site: Site, run_id: str, device: str) -> list[UpdateAccepted]:
    return [e for e in site.events(run_id) if isinstance(e, UpdateAccepted) and e.device == device]


def test_a_buffer_waits_for_nobody_and_outlives_its_aggregator(site: Site) -> None:
    first = site.start_aggregator()
    for part, name in enumerate(DEVICES):
        site.start_client(name, part, 3, step_s=0.2 if name == "slow" else 0.0)
    run_id = site.begin(
        "run.rounds=500", "cohort.mode='buffered'", "cohort.buffer=2", "cohort.wait_for=3", "cohort.deadline_s=600",
        "cohort.max_staleness=400", "local.steps=10",
    )  # fmt: skip
    site.until(lambda: any(e.staleness > 0 for e in accepted(site, run_id, "slow")))
    kill(first)
    before = {name: len(accepted(site, run_id, name)) for name in DEVICES}
    site.start_aggregator()
    for name in DEVICES:
        site.until(lambda name=name: len(accepted(site, run_id, name)) > before[name])  # type: ignore[misc]  # mypy cannot type a default
    assert site.typed("runs", "stop", run_id).returncode == 0
    row = site.until_done(run_id)
    assert (row.status, row.version > 2) == ("stopped", True), site.said()
    events = site.events(run_id)
    closed = [e for e in events if isinstance(e, RoundClosed) and e.reason != "stopped"]
    assert {e.reason for e in closed} <= {"buffer", "enough"}
    assert any("slow" not in {u.split("/")[1] for u in e.aggregated} for e in closed), "nobody waited for it"
    assert (double_aggregations(events), lost_updates(events)) == (0, 0)
