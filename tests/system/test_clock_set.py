"""Somebody sets the wall clock while no aggregator is there: the next one knows by how much, and how long that was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE_S, Site, kill
from thinwire.core.clock import beside
from thinwire.core.events import AggregatorStarted
from thinwire.core.statedir import AggregatorHome

HOUR_S = 3600.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "home")
    yield made
    made.close()


@pytest.mark.skipif(beside() is None, reason="this system has no clock that nobody can set")
def test_a_clock_that_was_set_forward_by_an_hour_is_no_absence_of_an_hour(site: Site) -> None:
    """Nobody may set this machine's clock, so what the first one left is as if it had been an hour behind."""
    kill(site.start_aggregator())
    place = AggregatorHome(site.home / "aggregator")
    said = json.loads(place.clock.read_bytes())
    place.clock.write_text(json.dumps({**said, "ahead_s": said["ahead_s"] - HOUR_S}))
    beat = place.lock.stat().st_mtime - HOUR_S
    os.utime(place.lock, (beat, beat))
    site.start_aggregator()
    with site.store() as store:
        starts = [event for _, event in store.events(None) if isinstance(event, AggregatorStarted)]
    assert (starts[0].gone_at, starts[0].set_by_s) == (0.0, 0.0), "nobody was there before"
    assert starts[1].set_by_s == pytest.approx(HOUR_S, abs=1.0)
    assert 0.0 <= starts[1].at - starts[1].gone_at - starts[1].set_by_s < PATIENCE_S
