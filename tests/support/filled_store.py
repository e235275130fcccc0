"""A store with a believable run in it, recorded as the aggregator would: each closed round in one transaction.

`python -m tests.support.filled_store DATABASE [--live]` fills a database for a look at the dashboard;
`--live` goes on with a run in real time.
"""

from __future__ import annotations

import sys
import time
from hashlib import sha256

from tests.support.api_answers import DEVICES, LAYOUT, REPORT, Told
from thinwire.core.events import (
    DeviceOffline,
    DeviceOnline,
)
from thinwire.core.fleet import Hello
from thinwire.core.plan import RunPlan
from thinwire.store import Store


def new_run(
    store: Store, *, rounds: int = 12, at: float | None = None, source: str = "devices", more: str = "", name: str = ""
) -> Told:
    """A queued run of the digits task on eight devices; `more` is added to its plan."""
    plan = RunPlan.parse(f'[run]\ntask = "digits"\nrounds = {rounds}\n[local]\nlr = 0.5\nsteps = 50\n{more}')
    run_id = store.create_run("digits", plan, LAYOUT, REPORT, source=source, name=name)  # type: ignore[arg-type]  # "sim"
    told = Told(store, run_id, at or time.time(), rounds, list(DEVICES), wire=source == "devices")
    told.begin()
    return told


def add_devices(store: Store, names: list[str], at: float) -> None:
    for name in names:
        store.roster.enrol(name, sha256(name.encode()).hexdigest(), b"key of " + name.encode(), "loopback")
        store.roster.seen(
            Hello(name, "p1", (REPORT,), {"thinwire": "0.1.0", "python": "3.11.2", "torch": "2.13.0"}), at
        )
        store.record_device(DeviceOnline(at, name))


def twelve_rounds(store: Store, at: float | None = None, rounds: int = 12) -> Told:
    """Rounds of every kind: quiet, a late one, a failed one, a deadline, too few; the last is open, five answered."""
    start = at or time.time() - 75
    add_devices(store, DEVICES, start)
    run = new_run(store, rounds=rounds, at=start)
    for _ in range(3):
        run.quiet_round(run.draw.uniform(2.6, 3.4))
    for odd_round in (_deadline_round, _late_round, _failed_round, _too_few_round):
        with run.at_once():
            odd_round(run)
    store.record_device(DeviceOnline(run.now, "pi-04"))
    run.quiet_round(3.1)
    with run.at_once():
        _dropped_round(run)
    while run.round < rounds - 1:
        run.quiet_round(run.draw.uniform(2.7, 3.3))
    run.open()
    for device in DEVICES[:5]:
        run.answer(device, run.draw.uniform(0.6, 1.2))
    return run


def _deadline_round(run: Told) -> None:
    run.open(deadline_s=4.0)
    for device in [name for name in run.assignments if name != "pi-07"]:
        run.answer(device, run.draw.uniform(1.2, 2.9))
    run.close("deadline", 4.02, ["pi-07"])


def _late_round(run: Told) -> None:
    run.open(without={"pi-07": "busy with round 4"})
    run.late("pi-07", 4, 5.6)
    for device in run.assignments:
        run.answer(device, run.draw.uniform(1.2, 2.6))
    run.close("all", 2.7)


def _failed_round(run: Told) -> None:
    run.open()
    run.fail("pi-03", 1.4, "task-error", "RuntimeError at task.py:41")
    for device in [name for name in run.assignments if name != "pi-03"]:
        run.answer(device, run.draw.uniform(1.2, 2.8))
    run.close("enough", 2.9)


def _dropped_round(run: Told) -> None:
    run.open()
    run.drop("pi-02", 1.9, "bad-payload")
    for device in [name for name in run.assignments if name != "pi-02"]:
        run.answer(device, run.draw.uniform(1.3, 2.7))
    run.close("enough", 2.8)


def _too_few_round(run: Told) -> None:
    """Five devices have gone and three answer, of whom at least four were needed."""
    run.open(without={"pi-08": "task-mismatch: layout 41ab… is not the run's"})
    for device in ("pi-01", "pi-02", "pi-05"):
        run.answer(device, run.draw.uniform(1.3, 2.4))
    for device in ("pi-03", "pi-04", "pi-06", "pi-07"):
        run.fail(device, run.draw.uniform(0.8, 2.2), "offline", "no request for 60 s")
    run.store.record_device(DeviceOffline(run.now + 1, "pi-04", "connection lost"))
    run.close("too-few", 2.6)


def finish(run: Told) -> None:
    """The open round's other answers, the last measurement and the end."""
    for device in DEVICES[5:]:
        run.answer(device, run.draw.uniform(1.3, 2.8))
    run.close("all", 2.9)
    run.say(run.measured(run.round))
    run.status("done", f"{run.version} rounds")


def main() -> None:
    with Store.open(sys.argv[1]) as store:
        run = twelve_rounds(store, rounds=13)
        run.rounds = 40
        print(store.logins.new_code(86400), flush=True)
        while "--live" in sys.argv and run.round < run.rounds:
            run.now = time.time()
            run.open()
            for device, seconds in sorted(
                ((d, run.draw.uniform(1.0, 3.0)) for d in run.assignments), key=lambda p: p[1]
            ):
                time.sleep(max(0.0, run.opened_at + seconds - time.time()))
                run.answer(device, seconds)
            run.close("all", time.time() - run.opened_at)


if __name__ == "__main__":
    main()
