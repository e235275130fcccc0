"""Break things at a device: how it is broken, what that has cost the run, how it is fixed, and when it is back."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.frozen import children, frozen, signal_all
from tests.support.gated_task import World
from tests.support.small_disk import Disk
from thinwire.core.events import ClientFailed, RoundClosed, UpdateAccepted

DEVICE = "pi-b"


def end_device(world: World) -> None:
    client = world.clients[DEVICE]
    client.kill()
    client.wait()


def was_ended(world: World) -> bool:
    """Return True if the kill met a process that was there, in a run that went on."""
    return world.clients[DEVICE].returncode == -signal.SIGKILL and not world.over()


def start_device(world: World) -> None:
    """Start the device, and wait until it has joined: no round goes on meanwhile, because the gate is shut."""
    before = len(world.journal.joined_at(DEVICE))
    world.start_client(DEVICE)
    world.seen(lambda: len(world.journal.joined_at(DEVICE)) > before, "the new process has come")


def answers_again(world: World) -> Callable[[], bool]:
    """Return a test whether a process of the device has joined since now and a reply of it was accepted."""
    journal, before = world.journal, len(world.journal.joined_at(DEVICE))

    def answers() -> bool:
        came = journal.joined_at(DEVICE)[before:]
        mine = (e for e in journal.look() if isinstance(e, UpdateAccepted) and e.device == DEVICE)
        return bool(came) and any(event.at >= came[0] for event in mine)

    return answers


def answered(world: World) -> Callable[[], bool]:
    before = world.answers(DEVICE)
    return lambda: world.answers(DEVICE) > before


def state_of(world: World) -> Path:
    return world.site.home / "clients" / DEVICE / "runs"


def lose_state(world: World) -> None:
    end_device(world)
    shutil.rmtree(state_of(world), ignore_errors=True)


@dataclass
class Older:
    """The state of the moment, which is put in the place of a newer one when two more answers were taken."""

    answers: int = 0

    def keep(self, world: World) -> None:
        with frozen(world.clients[DEVICE].pid):  # it writes and renames files all the time
            shutil.rmtree(self._copy(world), ignore_errors=True)
            shutil.copytree(state_of(world), self._copy(world))
        self.answers = world.answers(DEVICE)

    def put_back(self, world: World) -> bool:
        world.way.hold_from(world.moment.round + 3)
        newer = world.seen(lambda: world.answers(DEVICE) >= self.answers + 2, "two more answers are taken")
        world.way.shut(True)
        lose_state(world)
        shutil.copytree(self._copy(world), state_of(world))
        return newer

    def _copy(self, world: World) -> Path:
        return world.site.home.parent / "older"


def begin_another(world: World) -> bool:
    """Another process of the device, from a copy of its folder, until it is refused."""
    other = world.site.home.parent / f"other-{len(world.site.processes)}"
    with frozen(world.clients[DEVICE].pid):
        shutil.copytree(world.site.home / "clients", other / "clients", ignore=shutil.ignore_patterns("downloads"))
    task = f"digits={world.site.example / 'task.py'}"
    url = f"http://{world.way.address}"
    second = world.site.start(
        "client", "start", "--aggregator", url, "--task", task, "--name", DEVICE, "--partition", "1/2", home=other
    )
    return world.seen(lambda: "another process" in world.site.log_of(second), "the second process is refused")


def end_another(world: World) -> None:
    second = world.site.processes[-1]
    second.kill()
    second.wait()


def kill_worker(world: World) -> None:
    signal_all(signal.SIGKILL, children(world.clients[DEVICE].pid))


def failed(world: World, kind: str) -> bool:
    """Return True if the assignment of the moment's round has failed by it."""
    fails = (e for e in world.journal.look() if isinstance(e, ClientFailed) and e.device == DEVICE)
    return any((e.round, e.kind) == (world.moment.round, kind) for e in fails)


def fails_by_worker(world: World) -> bool:
    return world.seen(lambda: failed(world, "worker"), "the training that was killed has failed")


@dataclass
class Frozen:
    """A device's processes that stand still until its round was closed without it."""

    pids: set[int] = field(default_factory=set)

    def stop(self, world: World) -> None:
        pid = world.clients[DEVICE].pid
        self.pids = {pid} | children(pid)
        signal_all(signal.SIGSTOP, self.pids)

    def misses_deadline(self, world: World) -> bool:
        world.way.shut(False)
        return world.seen(lambda: self._closed_without(world), "its round is closed without it")

    def _closed_without(self, world: World) -> bool:
        ends = (e for e in world.journal.look() if isinstance(e, RoundClosed) and e.round == world.moment.round)
        return any(e.reason == "deadline" and DEVICE in e.outstanding for e in ends)

    def wake(self, world: World) -> None:
        signal_all(signal.SIGCONT, self.pids)

    def late(self, world: World) -> Callable[[], bool]:
        """Return a test whether the reply on which it worked when it froze has arrived and counts."""
        number, journal = world.moment.round, world.journal
        return lambda: any(
            isinstance(e, UpdateAccepted) and (e.device, e.assignment_round) == (DEVICE, number) for e in journal.look()
        )


class FullDevice:
    """A device's disk, which has room again once its assignment has failed of it."""

    def fill(self, world: World) -> None:
        self._disk(world).fill()

    def fails(self, world: World) -> bool:
        return world.seen(lambda: failed(world, "disk"), "the assignment that met the full disk has failed")

    def free(self, world: World) -> None:
        self._disk(world).free()

    def _disk(self, world: World) -> Disk:
        return Disk(world.site.home / "clients" / DEVICE)
