"""A reader of the dashboard looks for the devices that called when a round opened: those were sampled."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fleet_words import PATIENCE_S, envelope, join, until
from tests.support.store_story import LAYOUT, PLAN, status
from tests.support.transport_doubles import Place, place
from thinwire.core import RunPlan
from thinwire.core.clock import heard_by
from thinwire.core.errors import Unreachable
from thinwire.core.events import DeviceOnline
from thinwire.core.fleet import Link, TaskReport
from thinwire.core.link_state import SUSPECT_S
from thinwire.reports.privacy import last_contacts
from thinwire.store import Store
from thinwire.web.device_queries import Devices

NAMES = ("pi-1", "pi-2", "pi-3")
SAMPLED = RunPlan.parse(
    '[run]\ntask = "digits"\nevaluate = "off"\n[cohort]\ndeadline_s = 60\n[local]\nlr = 0.1\nsteps = 3\n'
    '[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\nsampling_rate = 0.5\n'
)
POLL_S = 4.0


def pull(link: Link) -> None:
    """Wait for work until there is some, or the test is over."""
    with contextlib.suppress(Unreachable):
        link.pull(POLL_S)


def rounds_of(here: Place, sampled: set[str], lock: Path) -> float:
    """Let all devices wait for work, give it to those that are sampled, and return when their round opened."""
    links = [join(here, name) for name in NAMES]
    waiting = [threading.Thread(target=pull, args=(link,)) for link in links]
    for thread in waiting:
        thread.start()
    until(lambda: all((one := here.fleet._presence.of(name)) and one.calls for name in NAMES))
    time.sleep(0.4)
    opened = time.time() - 0.1  # the record has tenths of a second
    here.fleet.send([envelope(name, f"digits-1.1.{name}") for name in sampled])
    for thread, name in zip(waiting, NAMES, strict=True):
        if name in sampled:
            thread.join(PATIENCE_S)
            threading.Thread(target=pull, args=(links[NAMES.index(name)],)).start()
    until(lambda: all(heard_by(lock).get(name, 0.0) >= opened for name in sampled))
    return opened


@pytest.mark.parametrize("hides", [False, True])
def test_the_time_of_a_call_does_not_tell_who_was_sampled(tmp_path: Path, hides: bool) -> None:
    lock = tmp_path / "lock"
    with place(tmp_path, grace_s=4.0, poll_s=POLL_S, directory=tmp_path) as here, Store.open(tmp_path / "db") as store:
        for name in NAMES:
            store.roster.enrol(name, name, b"key", "loopback")
            store.record_device(DeviceOnline(1000.0, name))
        run_id = store.create_run("digits", SAMPLED if hides else PLAN, LAYOUT, TaskReport("digits"))
        store.record(run_id, [status("running")])
        opened = rounds_of(here, {"pi-2"}, lock)
        shown = {device.device: device.last_seen_at or 0.0 for device in Devices(store, lock).page()}
        called = {name for name, at in shown.items() if opened <= at}
        assert called == (set(NAMES) if hides else {"pi-2"}), "without samples, the search finds it"
        if hides:
            assert len(set(shown.values())) == 1
            for ended_s in (0.0, 3 * SUSPECT_S):
                over = [replace(row, status="done", finished_at=time.time() - ended_s) for row in store.runs()]
                found = last_contacts(over, lock)
                assert len({*found.values()}) == 1 if not ended_s else found == heard_by(lock)
