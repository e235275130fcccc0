"""Devices of rounds of other modes: leased to one run for as long as its round needs them, and named to the others."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.test_private_rounds import Silent
from tests.support.crashes import LAYOUT, change
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.secure_fleet import SecureBehavior, SecureDevice, SecureFleet, toy_plan
from tests.support.server_bench import LAYOUT as TOY
from tests.support.server_bench import change as change_of
from tests.support.server_bench import work
from tests.support.several_runs import Site, steady
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import ENDED, Event, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.core.run_events import PhaseClosed
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import PHASES
from thinwire.privacy.accounting import epsilon
from thinwire.privacy.contexts import identity_of, simulated_key
from thinwire.privacy.noise_plan import noise_plan
from thinwire.reports.reason_text import sentence
from thinwire.server.service import serve
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, task_report
from thinwire.store import FileSpool, Store

NAMES = "abcde"
ROUNDS = 5  # of each device that its budget allows
SECURE = RunPlan.parse(toy_plan("bits = 12\nclip = 20.0\nmax_dropout = 0.4"))


def rounds_of(store: Store, run_id: str) -> list[tuple[float, float]]:
    """When each round of a run opened and closed."""
    events = [event for _, event in store.events(run_id)]
    ends = {event.round: event.at for event in events if isinstance(event, RoundClosed)}
    return [(event.at, ends[event.round]) for event in events if isinstance(event, RoundOpened)]


def test_a_secure_round_has_its_cohort_from_advertise_to_unmask(tmp_path: Path) -> None:
    """Two runs want the same devices, which keep the secrets of one round: another one would end the first."""
    home, clock = AggregatorHome.under(tmp_path, durable=False), VirtualClock()
    devices = [
        SecureDevice(name, None, lambda _: SecureBehavior(compute_s=2.0), plan=SECURE, layout=LAYOUT,  # type: ignore[arg-type]  # no Work
                     change=partial(change, name, LAYOUT.size)) for name in NAMES
    ]  # fmt: skip
    report, nothing = task_report(SECURE, LAYOUT), np.zeros(0, np.float32)
    fleet, ending = SecureFleet(FileSpool(home.spool), clock, report, devices), threading.Event()
    with Store.open(home.database, durable=False, clock=clock) as store:
        for name in NAMES:
            key = identity_of(simulated_key(name))
            store.roster.enrol(name, hashlib.sha256(key).hexdigest(), key, "loopback")
        model = FirstModel(LAYOUT, report, np.zeros(LAYOUT.size, np.float32), nothing)
        going = {submit(store, home, SECURE, model) for _ in range(2)}
        runs = sorted(going)

        def heard(run_id: str, event: Event) -> None:
            if isinstance(event, RunStatusChanged) and event.status in ENDED:
                going.discard(run_id)
            if not going:
                ending.set()

        serve(fleet, store, home, clock=clock, ending=ending, on_event=heard)
        for run_id in runs:
            row, events = store.run(run_id), [event for _, event in store.events(run_id)]
            assert (row.status, row.version, row.failed) == ("done", 3, 0)
            phases = [(event.round, event.phase) for event in events if isinstance(event, PhaseClosed)]
            assert phases == [(number, phase) for number in (1, 2, 3) for phase in PHASES]
        spans = sorted((begin, end, run_id) for run_id in runs for begin, end in rounds_of(store, run_id))
        assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(spans)), "each round has all devices"
        assert len({run_id for *_, run_id in spans[:3]}) == 2, "the runs go on at once"


def test_a_device_that_overlaps_is_leased_for_all_its_assignments(tmp_path: Path) -> None:
    script = Behavior(compute_s=2.0, upload_s=3.0)
    site = Site(tmp_path, [AttentiveDevice(name, work(name), lambda _: script, overlaps=True) for name in NAMES])
    ahead = site.submit(run={"rounds": 6}, local={"lr": 1.0, "overlap": {"max_delay": 1}}, cohort={"clients": 3})
    other = site.submit(run={"rounds": 6, "seed": 1}, cohort={"clients": 3})
    site.serve()
    assert [site.store.run(run_id).status for run_id in (ahead, other)] == ["done", "done"]
    begins = {run_id: site.events(run_id, RoundOpened)[0].at for run_id in (ahead, other)}
    ends = {run_id: site.events(run_id, RoundClosed)[-1].at for run_id in (ahead, other)}
    assert max(begins.values()) < min(ends.values()), "the runs go on at once"
    twice = 0
    for device in NAMES:
        ours, theirs = sorted(site.work_of(ahead, device)), site.work_of(other, device)
        twice += sum(later < end for (_, end), (later, _) in pairwise(ours))
        for begin, end in ours:
            assert all(until <= begin or since >= end for since, until in theirs), f"{device} worked for both"
    assert twice > 3, "its next assignment came while it sent the last update"


def test_a_round_names_the_run_for_which_a_device_works(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("abcd", 50.0)))
    first, second = (site.submit(run={"seed": seed}, cohort={"clients": 2}) for seed in range(2))
    site.serve()
    opened = site.events(second, RoundOpened)[0]
    selected = set(site.events(first, RoundOpened)[0].assignments)
    told = {device: sentence(why) for device, why in opened.reasons.items() if device in selected}
    assert told == dict.fromkeys(selected, f"works for {first}")


def test_two_private_runs_spend_no_more_than_their_budget_together(tmp_path: Path) -> None:
    """Each round reserves in the transaction that opens it, and no other run decides between the look and that."""
    private: dict[str, Any] = {"mode": "central", "clip": 2.0, "delta": 1e-3, "noise_multiplier": 1.0}
    sections: dict[str, Any] = {
        "cohort": {"clients": 3, "min_updates": 1, "late": "drop"}, "uplink": {"codec": "identity"},
        "local": {"lr": 1.0, "steps": 1, "buffers": "local"},
    }  # fmt: skip
    plan = RunPlan.from_json({"run": {"task": "toy", "evaluate": "off"}, **sections, "privacy": private})
    release = noise_plan(plan, TOY.model_size, 1).release
    private["budget"] = epsilon(Counter({release: ROUNDS}), 1e-3) * 1.01
    works = {name: Silent(name, TOY, partial(change_of, name)) for name in NAMES}
    site = Site(
        tmp_path, [AttentiveDevice(name, one, lambda _: Behavior(compute_s=1.0)) for name, one in works.items()]
    )
    runs = [
        site.submit(run={"rounds": 20, "evaluate": "off", "seed": seed}, privacy=private, **sections)
        for seed in range(2)
    ]
    site.serve()
    spent = {device: sum(of.values()) for device, of in site.store.privacy.spent_by_device("toy").items()}
    assert max(spent.values()) == ROUNDS, "one more release would pass the budget"
    took = {run_id: [one for one in site.store.privacy.rows("toy") if one.run_id == run_id] for run_id in runs}
    assert all(took.values()), "both runs spent of it"
    assert sum(len(one.devices) for rows in took.values() for one in rows) == sum(spent.values())
