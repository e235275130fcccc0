"""`make fuzz`, second half: the real service is restarted again and again under hostile messages, plain and by TLS.

Half of the restarts are kills. Hostile messages come before a run, in its rounds and between runs. After each restart
the service is up, and each run of the honest devices ends with the model of a run that nobody attacked.

    python -m tests.system.attacks.fuzz_service --restarts 100 --cases 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.callers import Caller
from tests.support.fleet_words import hello
from tests.support.processes import Site
from tests.system.attacks.hostile import Hostile
from thinwire.aggregation import BufferMean
from thinwire.core import Layout, RunPlan
from thinwire.core.errors import Refused, ThinwireError, Unreachable
from thinwire.core.fleet import TaskReport
from thinwire.core.invitation import Invitation
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, ReplyHeader, Vector
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, SyntheticUpdates
from thinwire.store import Store
from thinwire.store.spool import UNREADABLE
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.device.link import HttpsLink

LAYOUT = Layout.of({"w": (30, 20), "b": (20,)})
REPORT = TaskReport("toy", layout_digest=LAYOUT.digest)
HONEST, HOSTILE = ("pi-1", "pi-2"), ("evil-1", "evil-2", "evil-3")
OPTIONS = {False: (), True: ("--san", "localhost")}  # of `aggregator start`, plain and over TLS
ROUNDS, DEADLINE_S, SEED = 3, 120.0, 20_261_123


def change(name: str, assignment: Assignment) -> Vector:
    """It depends on the device and the round only. Whole numbers add up to the same bits in any order of arrival."""
    drawn = np.random.default_rng([HONEST.index(name), assignment.round]).integers(-64, 64, LAYOUT.size)
    return drawn.astype(np.float32)


@dataclass
class Pinned:
    """What a caller by hand needs of a device API's certificates."""

    trust: Trust

    def cas(self) -> tuple[str, ...]:
        return self.trust.cas

    def server_name(self) -> str:
        return self.trust.server_name


@dataclass
class ServedApi:
    """The device API of a service that is a process of its own."""

    url: str
    authority: Any = None


class Devices:
    """Honest devices in threads, which go on over restarts, and hostile callers."""

    def __init__(self, site: Site, folder: Path, tls: bool) -> None:
        self.site, self.folder, self.tls = site, folder, tls
        self.url = f"{'https' if tls else 'http'}://{site.listen}"
        self.over, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.api = ServedApi(self.url)
        self.broken: list[str] = []
        callers = []
        for name in HOSTILE:
            place = self._folder(name)
            trust = self._trust(name, place)
            self.api.authority = Pinned(trust) if trust else None
            callers.append(Caller(self.api, name, device_key(place)))
        self.callers = callers
        links = {name: self._link(name) for name in HONEST}
        self.threads = [threading.Thread(target=self._act, args=each) for each in links.items()]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _folder(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _trust(self, name: str, place: Path) -> Trust | None:
        if not self.tls:
            return None
        invited = json.loads(self.site.typed("devices", "invite", "--json").stdout)[0]["invitation"]
        return join(self.url, Invitation.parse(invited), device_key(place), name, {}).trust

    def _link(self, name: str) -> HttpsLink:
        place = self._folder(name)
        return HttpsLink(self.url, device_key(place), name, place, self._trust(name, place))

    def _act(self, name: str, link: HttpsLink) -> None:
        """Answer whatever comes; what is lost in a restart is answered again."""
        made = SyntheticUpdates(name, LAYOUT, lambda assignment: change(name, assignment), steps=5)
        said, greeted, replied = replace(hello(name), tasks=(REPORT,)), False, dict[str, tuple[Any, bytes]]()
        try:
            while not self.over.is_set():
                try:
                    if not greeted:
                        link.hello(said)
                        greeted = True
                    delivery = link.pull(0.2)
                    if delivery is None or delivery.assignment.kind not in ("train", "evaluate"):
                        continue
                    while delivery.assignment.round > 1 and not (self.may_answer.wait(0.1) or self.over.is_set()):
                        pass  # its round stays open
                    assignment_id = delivery.assignment.assignment_id
                    reply, body = replied.setdefault(
                        assignment_id, replied.get(assignment_id) or made.finish(delivery, Behavior())
                    )
                    bundle = self._folder(name) / "update"
                    bundle.write_bytes(body)
                    link.push(reply, bundle if isinstance(reply, ReplyHeader) and body else None)
                except Unreachable:
                    time.sleep(0.05)  # it is being started again
        except (ThinwireError, OSError, ValueError) as error:
            self.broken.append(f"{name}: {error!r}")
        finally:
            with contextlib.suppress(Refused, Unreachable):
                link.close()


def queued(site: Site) -> str:
    """A run in the queue of the service."""
    home = AggregatorHome.under(site.home)
    sections: dict[str, Any] = {
        "run": {"task": "toy", "rounds": ROUNDS}, "local": {"lr": 1.0},
        "cohort": {"wait_for": len(HONEST), "deadline_s": DEADLINE_S, "min_updates": len(HONEST)},
        "uplink": {"codec": "identity", "feedback": "none"},
    }  # fmt: skip
    params, buffers = np.zeros(LAYOUT.size, np.float32), np.zeros(BufferMean(LAYOUT).layout.size, np.float32)
    with Store.open(home.database) as store:
        return submit(store, home, RunPlan.from_json(sections), FirstModel(LAYOUT, REPORT, params, buffers))


@contextlib.contextmanager
def service(folder: Path, tls: bool) -> Iterator[tuple[Site, Devices]]:
    site = Site(folder / "home")
    try:
        site.start_aggregator(*OPTIONS[tls])
        devices = Devices(site, folder / "devices", tls)
        try:
            yield site, devices
        finally:
            devices.close()
    finally:
        site.close()


def restart(site: Site, number: int, tls: bool) -> None:
    """End the service, by turns as a person and as a power cut would, and wait until it serves again."""
    assert site.aggregator is not None
    assert site.aggregator.poll() is None, f"the service ended by itself\n{site.said()}"
    if number % 2:
        site.aggregator.kill()
    else:
        site.aggregator.send_signal(signal.SIGTERM)
    code = site.aggregator.wait(60)
    assert code == (-signal.SIGKILL if number % 2 else 0), f"exit {code}\n{site.said()}"
    site.aggregator = None
    site.start_aggregator(*OPTIONS[tls])


def attacked(folder: Path, restarts: int, cases: int, seed: int, *, tls: bool) -> str:
    """Attack and restart; one line of what came of it. AssertionError where anything differs from a quiet run."""
    with service(folder, tls) as (site, devices):
        first = queued(site)
        assert site.until_done(first).status == "done", site.said()
        expected, runs = site.run(first).model_digest, 0
        hostile = Hostile(
            devices.callers, seed, assignments=lambda: [f"{run_id}.1.pi-1", f"{run_id}.2.evil-1"], run=first
        )
        run_id = first
        try:
            for number in range(restarts):
                if in_a_round := number % 2 == 0:
                    devices.may_answer.clear()
                    hostile.run = run_id = queued(site)
                hostile.begin()
                hostile.send(cases)
                restart(site, number // 2, tls)
                hostile.begin()
                hostile.send(cases // 4)  # at a service that has just started
                devices.may_answer.set()
                if in_a_round:
                    row = site.until_done(run_id)
                    assert (row.status, row.model_digest) == ("done", expected), (seed, number, row.status_text)
                    runs += 1
                assert not devices.broken, devices.broken
        finally:
            hostile.close()
        aside = site.home / "aggregator" / "spool" / UNREADABLE
        assert not aside.exists(), sorted(aside.rglob("*"))
        logs = site.said()
        assert "Traceback" not in logs, logs
        return f"{restarts} restarts, {hostile.sent} messages, {runs} runs with the right bits"


def main() -> int:
    read = argparse.ArgumentParser(description=__doc__, prog="python -m tests.system.attacks.fuzz_service")
    read.add_argument("--restarts", type=int, default=100, help="of the service, half of them plain and half over TLS")
    read.add_argument("--cases", type=int, default=200, help="hostile messages before each restart")
    read.add_argument("--seed", type=int, default=SEED)
    options = read.parse_args()
    stood = True
    for tls in (False, True):
        name, began = "TLS" if tls else "plain", time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = attacked(Path(folder), options.restarts // 2, options.cases, options.seed + tls, tls=tls)
            except AssertionError as error:
                said, stood = f"BROKEN {error}", False
        print(f"service, {name}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    return not stood


if __name__ == "__main__":
    raise SystemExit(main())
