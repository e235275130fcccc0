"""Each fault of docs/explain/faults.md as something that is broken in a run behind the gate, and mended.

The machinery is that of the tests (tests/system): what is measured here is what is tested there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import descendants
from tests.system.gated import KILLED, Fault, World
from tests.system.small_disk import Disk, small_disk, why_not
from thinwire.core.events import ClientFailed, UpdateAccepted

DEVICE = "pi-b"
WAITS = ("cohort.retry_limit=10000",)  # rounds without the device that breaks are made again until it is back


@dataclass(frozen=True)
class Case:
    """`identical`: the same answers come in the same order, so the bits must be those of the undisturbed run. `who` is
    started again, and how soon it is back is held to a goal. `disk`: the folder under the home with a disk of its own.
    """

    fault: Fault
    who: str = ""
    identical: bool = False
    strikes: bool = True
    page: bool = False
    disk: str = ""


def _tree(pid: int) -> list[int]:
    return sorted(descendants(pid))


def _signal(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(world: World) -> None:
    client = world.clients[DEVICE]
    client.kill()
    client.wait()


def _answers_again(world: World) -> Callable[[], bool]:
    """Whether a process of the device has come since now, and an answer of that one was taken."""
    journal, before = world.journal, len(world.journal.joined_at(DEVICE))

    def answers() -> bool:
        came = journal.joined_at(DEVICE)[before:]
        mine = (e for e in journal.look() if isinstance(e, UpdateAccepted) and e.device == DEVICE)
        return bool(came) and any(event.at >= came[0] for event in mine)

    return answers


def _answered(world: World) -> Callable[[], bool]:
    before = world.answers(DEVICE)
    return lambda: world.answers(DEVICE) > before


def _lose_state(world: World) -> None:
    _end(world)
    shutil.rmtree(world.site.home / "clients" / DEVICE / "runs", ignore_errors=True)


def _older_state_path(world: World) -> Path:
    return world.site.home.parent / "older"


def _put_back(world: World) -> None:
    """The state of the first time is put in the place of the newest; the first time it is only kept."""
    _end(world)
    mine, copy = world.site.home / "clients" / DEVICE / "runs", _older_state_path(world)
    if copy.exists():
        shutil.rmtree(mine)
        shutil.copytree(copy, mine)
    else:
        shutil.copytree(mine, copy)


def _second(world: World) -> None:
    """Another process of the device, from a copy of its folder, until it is refused."""
    other = world.site.home.parent / f"other-{len(world.site.processes)}"
    shutil.copytree(world.site.home / "clients", other / "clients", ignore=shutil.ignore_patterns("downloads"))
    task = f"digits={world.site.example / 'task.py'}"
    url = f"http://{world.way.address}"
    second = world.site.start(
        "client", "start", "--aggregator", url, "--task", task, "--name", DEVICE, "--partition", "1/2", home=other
    )
    world.site.until(lambda: "another process" in world.site.log_of(second) or world.over())
    second.kill()
    second.wait()


def _kill_worker(world: World) -> None:
    pid = world.clients[DEVICE].pid
    _signal(signal.SIGKILL, [each for each in _tree(pid) if each != pid])


def _pages(world: World) -> set[int]:
    """The page's processes: children of the aggregator."""
    assert world.site.aggregator is not None
    return set(descendants(world.site.aggregator.pid)) - {world.site.aggregator.pid}


def _new_page(world: World) -> Callable[[], bool]:
    before = _pages(world)
    return lambda: bool(_pages(world) - before)


def _fill(folder: str) -> Callable[[World], None]:
    return lambda world: Disk(world.site.home / folder).fill()


@dataclass
class FullDisk:
    """A device's, which has room again once an ask has failed of it."""

    before: int = 0

    def fill(self, world: World) -> None:
        self.before = self._failed(world)
        _fill(f"clients/{DEVICE}")(world)

    def free(self, world: World) -> None:
        world.site.until(lambda: self._failed(world) > self.before or world.over())
        Disk(world.site.home / "clients" / DEVICE).free()

    def _failed(self, world: World) -> int:
        return sum(isinstance(e, ClientFailed) and e.kind == "disk" for e in world.journal.look())


def _free_aggregator(world: World) -> None:
    site, first = world.site, world.site.aggregator
    assert first is not None
    site.until(
        lambda: (
            first.poll() is not None
            or any("cannot write its state" in site.log_of(client) for client in world.clients.values())
            or world.over()
        )
    )
    Disk(site.home / "aggregator").free()
    if first.poll() is not None:
        site.start_aggregator()


def _restart(world: World) -> None:
    world.start_client(DEVICE)


def cases() -> Mapping[str, Case]:
    frozen, full = Frozen(), FullDisk()
    return {
        "aggregator killed": Case(KILLED, "aggregator", identical=True),
        "upload cut": Case(Fault(lambda world: world.way.cut()), identical=True),
        "device frozen": Case(Fault(frozen.stop, frozen.wake, _answered), identical=True),
        "device killed": Case(Fault(_end, _restart, _answers_again, WAITS), "device"),
        "device without its state": Case(Fault(_lose_state, _restart, _answers_again, WAITS), "device"),
        "device with an older state": Case(Fault(_put_back, _restart, _answers_again, WAITS), "device"),
        "device twice": Case(Fault(lambda world: None, _second, shut=True), identical=True),
        "answers twice": Case(_lying("twice"), strikes=False, identical=True),
        "answers garbage": Case(_lying("garbage", "cohort.min_replies=1"), strikes=False),
        "worker killed": Case(Fault(_kill_worker, back=_answered, sets=WAITS)),
        "page killed": Case(
            Fault(lambda world: _signal(signal.SIGKILL, sorted(_pages(world))), back=_new_page, shut=True),
            identical=True,
            page=True,
        ),
        "device's disk full": Case(Fault(full.fill, full.free, _answered, WAITS), disk=f"clients/{DEVICE}"),
        "aggregator's disk full": Case(Fault(_fill("aggregator"), _free_aggregator), identical=True, disk="aggregator"),
    }


def _lying(how: str, *sets: str) -> Fault:
    return Fault(lambda world: None, sets=sets, programs={DEVICE: ("tests.system.liar", how)})


@dataclass
class Frozen:
    """A device's processes that stand still."""

    pids: list[int] = field(default_factory=list)

    def stop(self, world: World) -> None:
        self.pids = _tree(world.clients[DEVICE].pid)
        _signal(signal.SIGSTOP, self.pids)

    def wake(self, world: World) -> None:
        _signal(signal.SIGCONT, self.pids)


@contextlib.contextmanager
def on_a_small_disk(home: Path, folder: str) -> Iterator[str]:
    """Why not, or "" while the folder has a disk of its own; nothing is done where none is wanted."""
    if not folder:
        yield ""
    elif reason := why_not(home.parent / "try"):
        yield reason
    else:
        with small_disk(home / folder):
            yield ""
