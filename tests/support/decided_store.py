"""Runs in which much was decided for single devices, for a look at what the dashboard says of it.

`python -m tests.support.decided_store DATABASE`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from tests.support.api_answers import DEVICES, REPORT, Told
from tests.support.filled_store import add_devices, new_run
from thinwire.core.equipment import GIB, Equipment
from thinwire.core.events import RoundBecameCurrent, RunNoted
from thinwire.core.fleet import Hello
from thinwire.core.formatting import Reason
from thinwire.store import Store

LADDER = '[uplink]\nladder = ["fp16", "int8", "topk(0.01) > int8"]'
BUFFERED = '[cohort]\nmode = "buffered"\nbuffer = 2'
NOTE = [Reason("large-buffer", {"buffer": 9, "devices": 8})]
SLOW = [
    Reason("fits", {"expected_s": 2.2, "left_s": 8.1}), Reason("too-slow", {"codec": "int8", "expected_s": 31.4}),
]  # fmt: skip
QUICK = [Reason("fits", {"expected_s": 3.0, "left_s": 8.1})]
DEADLINE = [
    Reason("expected", {"margin": 3.0, "expected_s": 3.0, "wanted": 6, "devices": 8}),
    Reason("slower", {"count": 1, "devices": "pi-07", "slowest_s": 31.0}),
]
DRAWN = [Reason("sampled", {"by": "link", "fastest_s": 2.0, "slowest_s": 31.0, "of": "exchange", "least": 0.125})]
WORK = [Reason("part-pass", {"steps": 31, "pass_steps": 100, "left_s": 8.1, "step_s": 0.26})]
REPLACES = [Reason("replaces", {"possible": 7, "target": 8, "left_s": 8.1})]
HAS = Equipment(4, int(4 * GIB), int(2.5 * GIB), mains=False, metered=True)


def laddered(store: Store) -> Told:
    """Its second round has a ladder, a device that failed and one that was selected in its place."""
    start = time.time() - 60
    add_devices(store, DEVICES, start)
    store.roster.enrol("pi-09", "99" * 32, b"key of pi-09", "loopback")
    store.roster.seen(replace(Hello("pi-09", "p1", (REPORT,), {"thinwire": "0.1.0"}), has=HAS), start)
    run = new_run(store, at=start, more=LADDER)
    run.say(RunNoted(run.now, NOTE))
    run.quiet_round()
    codecs = dict.fromkeys(DEVICES, "fp16") | {"pi-07": "topk(0.01) > int8"}
    reasons = dict.fromkeys(DEVICES, QUICK) | {"pi-07": SLOW}
    run.open(9.0, deadline_reason=DEADLINE, codecs=codecs, codec_reasons=reasons, sampling=DRAWN)
    run.fail("pi-03", 0.8, "offline", "connection lost")
    said = {"codec": "topk(0.01) > int8", "codec_reason": SLOW, "steps": 31, "batch": 32, "work_reason": WORK}
    run.assign("pi-09", 0.9, REPLACES, instead_of="pi-03", deadline_s=8.1, **said)
    run.devices.append("pi-09")
    for device in [name for name in run.assignments if name not in ("pi-03", "pi-05", "pi-09")]:
        run.answer(device, run.draw.uniform(1.2, 2.8))
    run.fold(replace(run.header("pi-05", 2.0), lost="older"), late=False, staleness=0)
    run.answer("pi-09", 4.0)
    run.close("all", 5.0)
    return run


def buffered(store: Store) -> Told:
    """Two buffers are full, with an answer of the first round in the second; the third holds one of two."""
    start = time.time() - 30
    add_devices(store, DEVICES[:4], start)
    run = new_run(store, at=start, more=BUFFERED)
    run.devices = DEVICES[:4]
    idle = [Reason("idle", {}), Reason("at-work", {"at_work": 2})]
    run.open(30.0, target_updates=2)
    run.answer("pi-01", 1.0)
    run.answer("pi-02", 1.7)
    run.close("buffer", 1.75)
    run.open(30.0, {"pi-03": "busy with round 1", "pi-04": "busy with round 1"}, target_updates=2)
    run.answer("pi-01", 1.1)
    run.late("pi-03", 1, 3.4)
    run.close("buffer", 1.7)
    run.open(30.0, {"pi-02": "busy with round 2", "pi-04": "busy with round 1"}, target_updates=2)
    run.assign("pi-05", 0.2, idle, deadline_s=30.0)
    run.answer("pi-03", 1.2)
    return run


def ahead(store: Store, waits: bool = False) -> Told:
    """Each round but the first was requested while the one before it was open; the third takes answers, or `waits`."""
    start = time.time() - 20
    add_devices(store, DEVICES, start)
    run = new_run(store, at=start, more="[local.overlap]\nmax_delay = 1")
    run.open()
    run.open()
    run.now = start + 3.0
    _came(run, 1, start, 2.9)
    run.close("all", 3.0)
    run.round = 2
    run.open()
    _came(run, 2, start + 3.0, 3.9)
    run.close("all", 1.0)
    if waits:
        run.status("waiting", "waiting: 4 of 8 devices")
    else:
        run.say(RoundBecameCurrent(run.now, 3, run.elapsed))
        run.round = 3
        run.open()
    return run


def _came(run: Told, number: int, turn_at: float, seconds: float) -> None:
    """The answers of a round, in at most so many seconds from being selected; it takes them from `turn_at` on."""
    run.say(RoundBecameCurrent(turn_at, number, run.elapsed))
    run.round, run.opened_at, run.aggregated = number, turn_at, []
    for device in DEVICES:
        run.fold(run.header(device, seconds - 0.05 * (device != "pi-07")), late=False, staleness=0)


def main() -> None:
    with Store.open(sys.argv[1]) as store:
        laddered(store)
        buffered(store)
        ahead(store)
        print(store.logins.new_code(86400), flush=True)


if __name__ == "__main__":
    main()
