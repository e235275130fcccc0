"""A disk that is full, at the aggregator or at a device: said, survived, and gone on from when there is room again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Site
from tests.support.run_outcome import double_aggregations, lost_updates
from tests.support.small_disk import small_disk, why_not
from thinwire.core.disk_reserve import disk_full_text
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, UpdateAccepted


@pytest.fixture(autouse=True)
def _mounts(tmp_path: Path) -> Iterator[None]:
    if reason := why_not(tmp_path / "try"):
        pytest.skip(reason)
    yield


def rounds(site: Site, run_id: str) -> int:
    return len([e for e in site.events(run_id) if isinstance(e, RoundClosed)])


def test_a_device_whose_disk_is_full_fails_its_assignments_at_once_and_takes_part_again_when_there_is_room(
    site: Site,
) -> None:
    with small_disk(site.home / "clients" / "pi-b") as disk:
        site.start_aggregator()
        site.start_client("pi-a", 0, 2)
        (site.home / "clients" / "pi-b" / "client.toml").write_text(
            "[policy]\nmin_free_disk_mb = 0"
        )  # it is to be full
        full = site.start_client("pi-b", 1, 2)
        run_id = site.begin("run.rounds=500", "cohort.wait_for=2", "cohort.deadline_s=600", "local.steps=20")
        site.until_event(run_id, RoundClosed, count=2)
        disk.fill()
        site.until_event(run_id, ClientFailed, device="pi-b", kind="disk")
        before = rounds(site, run_id)
        site.until_event(run_id, RoundClosed, count=before + 2)  # nobody waits for its deadline of ten minutes
        assert "No space left" in site.log_of(full)
        disk.free()
        now = len([e for e in site.events(run_id) if isinstance(e, RoundOpened)])
        site.until(
            lambda: any(
                e.device == "pi-b" and e.assignment_round > now
                for e in site.events(run_id)
                if isinstance(e, UpdateAccepted)
            )
        )
        assert full.poll() is None
        assert site.typed("runs", "stop", run_id).returncode == 0
        assert site.until_done(run_id).status == "stopped"
        events = site.events(run_id)
        assert (double_aggregations(events), lost_updates(events)) == (0, 0)
        site.close()


def test_an_aggregator_whose_disk_is_full_ends_no_run_and_goes_on_when_there_is_room(site: Site) -> None:
    """It pauses the run and stays up, whichever of its writes failed first; a device sends its upload again."""
    with small_disk(site.home / "aggregator") as disk:
        first = site.start_aggregator()
        clients = [site.start_client(name, part, 2) for part, name in enumerate(("pi-a", "pi-b"))]
        run_id = site.begin("run.rounds=500", "cohort.wait_for=2", "cohort.deadline_s=600", "local.steps=20")
        site.until_event(run_id, RoundClosed, count=2)
        disk.fill()
        home = site.home / "aggregator"
        site.until(lambda: disk_full_text(home) or any("cannot write its state" in site.log_of(c) for c in clients))
        if said := disk_full_text(home):
            assert said in site.typed("aggregator", "status").stdout
        disk.free()
        site.until(lambda: not disk_full_text(home))
        assert first.poll() is None
        now = len([e for e in site.events(run_id) if isinstance(e, RoundOpened)])
        site.until_event(run_id, RoundClosed, round=now + 2)
        assert site.typed("runs", "stop", run_id).returncode == 0
        assert site.until_done(run_id).status == "stopped", site.said()
        events = site.events(run_id)
        closed = [e.round for e in events if isinstance(e, RoundClosed)]
        assert closed == list(range(1, len(closed) + 1)), "no round was begun again"
        assert {e.reason for e in events if isinstance(e, RoundClosed)} <= {"all", "stopped"}
        assert (double_aggregations(events), lost_updates(events)) == (0, 0)
        site.close()
