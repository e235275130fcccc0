"""A client put together: its name held, its key found, its tasks imported, then the service."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.cli import say
from thinwire.cli.client.joined import trusted
from thinwire.cli.service.typed import Typed


@dataclass(frozen=True)
class Device:
    """What was asked for on the command line."""

    aggregator: str | None
    tasks: tuple[str, ...]
    data: Path | None
    name: str
    partition: str | None
    split: str
    seed: int
    device: str
    threads: int
    once: bool
    home: Path | None
    slow_step_s: float = 0.0
    policy: Path | None = None
    python: Path | None = None


def begin(device: Device) -> int:
    """Serve until told to stop; everything that can be wrong is found before the first call to the aggregator."""
    from thinwire.client import Site
    from thinwire.client.disk.logbook import Logbook
    from thinwire.client.link.standing import Watched
    from thinwire.client.owner.equipment import Having
    from thinwire.client.owner.gate import Gate
    from thinwire.client.partitions import parse_split
    from thinwire.client.policy import FILE, Policy, load_policy
    from thinwire.client.service import reloads, serve, wanted
    from thinwire.client.task import installed_tasks
    from thinwire.client.training.interpreter import Interpreter
    from thinwire.client.training.worker import Worker
    from thinwire.core.errors import UsageError
    from thinwire.core.home import client_home, find_home, hold
    from thinwire.flower import FlowerLink, device_key
    from thinwire.flower.device.clockwork import Clockwork

    part, parts = part_of(device.partition)
    parse_split(device.split)
    home = find_home(device.home)
    url, trust = trusted(device.aggregator, home / "clients" / device.name)
    folder = client_home(home, device.name)
    rules = (device.policy or folder / FILE).absolute()

    def policy() -> Policy:
        return load_policy(rules, must_exist=device.policy is not None)

    first = policy()
    specs = device.tasks or tuple(f"{name}={module}" for name, module in installed_tasks().items())
    if not specs:
        raise UsageError(
            "this client has no task",
            why="no --task, and nothing is installed under the entry point thinwire.tasks",
            hint="--task NAME=path/to/task.py",
        )
    about: dict[str, Any] = {"aggregator": url, "tasks": list(specs), "name": device.name}
    python = device.python.absolute() if device.python and device.python.absolute() != Path(sys.executable) else None
    with reloads() as reload, hold(folder / "lock", about), contextlib.ExitStack() as stack:
        worker = Worker(specs, Interpreter(python, folder), device=device.device, threads=device.threads)
        stack.callback(worker.close)
        for line in worker.describe():
            say.note(line)
        for task in worker.described:
            if task.left_out:
                say.note(f"warning: the task {task.name}: {task.left_out}")
        data = device.data.absolute() if device.data else None
        site = Site(device.name, data, part, parts, device.split, device.seed, device.device)
        Typed.now().remember(folder)
        clock = Clockwork()
        gate = Gate(first, folder, skew_s=lambda: clock.skew_s)
        benches = worker.benches()
        link = FlowerLink(
            url, device_key(folder), device.name, folder, trust, clock=clock, is_wanted=wanted(gate, benches),
            min_free=lambda: gate.min_free_bytes,
        )  # fmt: skip
        return serve(
            Watched(link, folder),
            benches,
            folder,
            device.name,
            site=site,
            say=Logbook(folder, say.line),
            once=device.once,
            slow_step_s=device.slow_step_s,
            gate=gate,
            worker=worker,
            reload=reload,
            reread=policy,
            has=Having(lambda: gate.policy, lambda: [pid for pid in (os.getpid(), worker.pid) if pid is not None]),
        )


def part_of(text: str | None) -> tuple[int, int]:
    """(I, N) of `--partition I/N`; 0 of 1 where it is not given.

    >>> part_of("2/8"), part_of(None)
    ((2, 8), (0, 1))
    """
    from thinwire.core.errors import UsageError

    if text is None:
        return 0, 1
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise UsageError(
            f"--partition {text!r} cannot be", why="it reads I/N: part I of N, counted from 0", hint=_parts_of(parts)
        )
    return int(part), int(parts)


def _parts_of(parts: str) -> str:
    """Which parts there are of so many, or of three where that is no number of parts."""
    count = int(parts) if parts.isdecimal() and int(parts) > 0 else 3
    if count == 1:
        return "--partition 0/1, which is all of it, or none"
    return f"--partition 0/{count} for the first{' to' if count > 2 else ' or'} {count - 1}/{count} for the last"
