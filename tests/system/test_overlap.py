"""Delayed averaging over real processes: both ends are killed in the middle, and nothing counts twice or is lost."""

from __future__ import annotations

from tests.support.processes import Site, kill
from tests.system.test_real_nodes import aggregated_once
from thinwire.core.events import RoundClosed, RoundOpened, UpdateAccepted

OVERLAP = ("cohort.wait_for=2", "local.steps=20", "local.overlap={max_delay=1}")


def test_devices_train_ahead_and_either_end_may_be_killed(site: Site) -> None:
    first = site.start_aggregator()
    site.start_client("pi-a", 0, 2)
    dying = site.start_client("pi-b", 1, 2, step_s=0.05)
    run_id = site.begin("run.rounds=6", *OVERLAP)
    site.until_event(run_id, UpdateAccepted, round=2)
    kill(first)
    site.start_aggregator()
    site.until_event(run_id, RoundClosed, round=3)
    kill(dying)
    site.start_client("pi-b", 1, 2)
    row = site.until_done(run_id)
    assert (row.status, row.version) == ("done", 6), site.said()
    events = site.events(run_id)
    opened = [(e.round, e.base_version) for e in events if isinstance(e, RoundOpened)]
    assert opened[:2] == [(1, 0), (2, 0)]
    # A round opens one version ahead, or later where a device was still reconnecting when it could have opened.
    assert all(number - 2 <= base < number for number, base in opened)
    assert [e.round for e in events if isinstance(e, RoundClosed)] == [1, 2, 3, 4, 5, 6]
    aggregated_once(site, run_id)
