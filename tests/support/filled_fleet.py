"""A store with devices of every kind: `python -m tests.support.filled_fleet DATABASE [COUNT]` makes one to look at."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from dataclasses import replace

from tests.support.api_answers import REPORT
from tests.support.filled_store import twelve_rounds
from tests.support.reasons import noted
from thinwire.core.events import DeviceOffline, DeviceOnline, RunNoted
from thinwire.core.fleet import Hello, Joining
from thinwire.store import Invited, MeasureRow, Store

VERSIONS = {"thinwire": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "machine": "aarch64", "system": "Linux"}
LINK = {"rtt_s": 0.048, "skew_s": 0.2}


def fingerprint(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def come(store: Store, name: str, invited: Invited, address: str = "192.0.2.7:40000") -> None:
    store.roster.join(Joining(invited.secret, name, fingerprint(name), b"key of " + name.encode(), address))


def measured(name: str, at: float) -> list[MeasureRow]:
    """Its link as the aggregator has measured it, but for a downlink that is too fast for that."""
    of: dict[str, tuple[float | None, float | None]] = {
        "up": (2.1e6, 1.4e6), "down": (None, None), "rtt": (0.048, 0.061),
    }  # fmt: skip
    return [MeasureRow(name, kind, "", [[40_000.0, 0.05]] * 3, p50, p90, at) for kind, (p50, p90) in of.items()]


def hello(name: str, **said: object) -> Hello:
    return replace(Hello(name, "p1", (REPORT,), VERSIONS, link=LINK), **said)  # type: ignore[arg-type]  # tests say words


def there(store: Store, hello_: Hello, at: float) -> None:
    """A device says hello and is online."""
    store.roster.seen(hello_, at)
    store.record_device(DeviceOnline(at, hello_.name))


def a_fleet(store: Store, at: float) -> None:
    """Two that wait, one online with other code, one unreachable, one that declines, two revoked; refusals."""
    by_hand = store.invitations.invite(2, approve_manually=True, expires_s=3600, who="ann")
    for name, invited in zip(("ward-4", "ward-7"), by_hand, strict=True):
        come(store, name, invited, "198.51.100.23:51514")
    straight = store.invitations.invite(6, expires_s=7 * 86400, who="ann")
    for name, invited in zip(("cam-01", "cam-02", "jetson-1", "old-box"), straight, strict=False):
        come(store, name, invited)
    store.invitations.withdraw(straight[4].id, who="ann")
    store.invitations.invite(1, names=["ward-9"], expires_s=1e-6, who="ann")
    other = replace(REPORT, version="2", source_digest="c4" * 32)
    there(store, hello("cam-01", tasks=(other,), link={"rtt_s": 0.212, "skew_s": -94.0}), at)
    there(store, hello("cam-02", link={"rtt_s": 1.4, "skew_s": 3.1}), at - 4000)
    store.record_device(DeviceOffline(at - 1260, "cam-02", "no request for 360 s"))
    broken = replace(REPORT, error="ModuleNotFoundError at task.py:3", layout_digest="")
    there(store, hello("jetson-1", versions={**VERSIONS, "policy": "5e" * 32}, tasks=(broken,)), at)
    there(store, hello("old-box"), at - 90_000)
    store.record_device(DeviceOffline(at - 80_000, "old-box", "revoked"))
    store.roster.revoke("old-box", who="ann")
    store.roster.enrol("bench", fingerprint("bench"), b"key of bench", "loopback")
    store.roster.leave("bench")
    store.roster.note("join", "203.0.113.99:1022", "used by cam-01 (invitation 3)", "cam-01")
    store.roster.note("join", "203.0.113.99:1024", "unknown", "<img src=x onerror=alert(1)>")
    store.roster.note("name", "198.51.100.23:51002", "the name ward-4 belongs to another key", "ward-4")


def many(store: Store, count: int, at: float) -> None:
    """`count` devices, a third of them unreachable."""
    draw = random.Random(3)
    invited = store.invitations.invite(count, who="ann")
    for number, one in enumerate(invited, 1):
        name = f"meter-{number:03d}"
        come(store, name, one)
        link = {"rtt_s": draw.uniform(0.01, 0.9), "skew_s": draw.gauss(0, 1.5)}
        there(store, hello(name, link=link), at - draw.uniform(0, 9000))
        if number % 3 == 0:
            store.record_device(DeviceOffline(at - draw.uniform(0, 900), name, "no request for 360 s"))


def main() -> None:
    with Store.open(sys.argv[1]) as store:
        run, now = twelve_rounds(store), time.time()
        store.record(
            run.run_id,
            [RunNoted(now, noted("filled by hand"))],
            [row for name in run.devices[:6] for row in measured(name, now)],
        )
        a_fleet(store, now)
        run.fail("pi-08", 1.0, "declined", "rounds_a_day: 24 of 24 rounds of today are made")
        many(store, int(sys.argv[2]) if len(sys.argv) > 2 else 0, now) if len(sys.argv) > 2 else None
        print(store.logins.new_code(86400), flush=True)


if __name__ == "__main__":
    main()
