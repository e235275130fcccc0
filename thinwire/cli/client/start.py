"""The client's process: check all options, lock the state directory, import the tasks, then serve the aggregator."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.cli.local_state import options_of_this_command, trusted

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Assignment
    from thinwire.privacy.participant import SecureIdentity


@dataclass(frozen=True)
class ClientOptions:
    """The options of `thinwire client start`."""

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
    policy: Path | None = None
    python: Path | None = None
    roster: Path | None = None
    roster_key: Path | None = None
    dataset: str = ""


def begin(given: ClientOptions) -> int:
    """Serve the aggregator until a signal stops the client, and return the exit code.

    Invariant: every error that this machine can find is raised before the first request to the aggregator.
    """
    from thinwire.cli.client.enrol import left_ledger, take_over
    from thinwire.client import ClientInfo
    from thinwire.client.admission import AdmissionController
    from thinwire.client.agent import Device, reloads, serve, wanted
    from thinwire.client.booking import DataSets
    from thinwire.client.calls import StatusReporter
    from thinwire.client.device_info import DeviceInfoProbe
    from thinwire.client.executor import Worker
    from thinwire.client.policy import FILE, Policy, load_policy
    from thinwire.client.privacy_ledger import Account, DeviceLedger
    from thinwire.client.private_noise import release_of
    from thinwire.client.reloader import Reloader
    from thinwire.client.task import installed_tasks, parse_split
    from thinwire.client.worker_process import Interpreter
    from thinwire.core.errors import NotWritten, UsageError
    from thinwire.core.log_file import Logbook
    from thinwire.core.signals import ended_by_signals
    from thinwire.core.statedir import client_home, find_home, hold
    from thinwire.transport.device.identity import KEY_FILE, ServerClock, device_key
    from thinwire.transport.device.link import HttpsLink, LinkOptions

    part, parts = part_of(given.partition)
    parse_split(given.split)
    home = find_home(given.home)
    url, trust = trusted(given.aggregator, home / "clients" / given.name)
    folder = client_home(home, given.name)
    rules = (given.policy or folder / FILE).absolute()

    def policy() -> Policy:
        return load_policy(rules, must_exist=given.policy is not None)

    first, pinned = policy(), pinned_roster(given.roster, given.roster_key)
    specs = given.tasks or tuple(f"{name}={module}" for name, module in installed_tasks().items())
    if not specs:
        raise UsageError(
            "this client has no task",
            why="no --task, and nothing is installed under the entry point thinwire.tasks",
            hint="--task NAME=path/to/task.py",
        )
    about: dict[str, Any] = {"aggregator": url, "tasks": list(specs), "name": given.name}
    python = given.python.absolute() if given.python and given.python.absolute() != Path(sys.executable) else None
    with reloads() as reload, hold(folder / "lock", about), contextlib.ExitStack() as stack:
        worker = Worker(specs, Interpreter(python, folder), device=given.device, threads=given.threads)
        stack.callback(worker.close)
        worker.describe()
        for task in worker.manifests:
            if task.left_out:
                console.note(f"warning: the task {task.name}: {task.left_out}")
        data = given.data.absolute() if given.data else None
        client = ClientInfo(given.name, data, part, parts, given.split, given.seed, given.device)
        try:
            options_of_this_command().save(folder)
        except NotWritten as error:  # a full disk: only other commands read them
            console.note(f"warning: {error}: a service and the doctor use the options of the start before")
            console.note(f"try:   {error.hint}")
        clock = ServerClock()
        if not (folder / KEY_FILE).exists():
            take_over(folder, left_ledger(folder))
        key = device_key(folder)
        secure = secure_identity(key, pinned)
        ledger = DeviceLedger(folder, hashlib.sha256(secure.public_key).hexdigest())
        executors = worker.executors()
        datasets = DataSets(given.dataset, data, [executor.name for executor in executors])
        for dataset in datasets:
            ledger.note_dataset(dataset)

        def release(assignment: Assignment, plan: RunPlan) -> tuple[str, str]:
            layout = next(b.layout for b in executors if b.name == assignment.task)
            return release_of(plan, layout, assignment.secure.selected if assignment.secure else 1)

        account = Account(ledger, datasets, release)
        admission = AdmissionController(
            first, folder, skew_s=lambda: clock.skew_s, carries=secure.carries, account=account
        )
        options = LinkOptions(clock, wanted(admission, executors), lambda: admission.min_free_bytes, ledger.report)
        link = HttpsLink(url, key, given.name, folder, trust, options)
        probe = DeviceInfoProbe(
            lambda: admission.policy, lambda: [pid for pid in (os.getpid(), worker.pid) if pid is not None]
        )
        with ended_by_signals(threading.Event()) as ending:
            return serve(
                StatusReporter(link, folder),
                executors,
                Device(client, folder, admission, secure, probe),
                ending,
                reloader=Reloader(admission, worker, reload, policy),
                say=Logbook(folder, console.line),
                once=given.once,
            )


def pinned_roster(roster: Path | None, key: Path | None) -> dict[str, bytes] | None:
    """Return the devices that the owner trusts in secure rounds: name to public key; None without a roster.

    `UsageError` if one of the two files is missing, `DataLost` if the key did not sign the roster.
    """
    from thinwire.cli.devices.roster import signed_devices
    from thinwire.core.errors import UsageError

    if roster is not None and key is not None:
        return signed_devices(roster, key)
    if roster is None and key is None:
        return None
    raise UsageError(
        "a pinned roster takes two options",
        why="--roster names the devices, and --roster-key shows who signed them",
        hint="--roster SIGNED.json --roster-key KEY.pem.pub",
    )


def secure_identity(key: EllipticCurvePrivateKey, pinned: dict[str, bytes] | None) -> SecureIdentity:
    """Return what this device needs for secure rounds: its key signs their messages."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from thinwire.privacy.participant import SecureIdentity

    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return SecureIdentity(public, lambda data: key.sign(data, ECDSA(SHA256())), pinned)


def part_of(text: str | None) -> tuple[int, int]:
    """Parse `--partition I/N` into (I, N); without it the result is (0, 1).

    >>> part_of("2/8"), part_of(None)
    ((2, 8), (0, 1))
    """
    from thinwire.core.errors import UsageError

    if text is None:
        return 0, 1
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise UsageError(
            f"--partition {text!r} is not valid", why="it reads I/N: part I of N, counted from 0", hint=_parts_of(parts)
        )
    return int(part), int(parts)


def _parts_of(parts: str) -> str:
    """Return the hint with valid values of `--partition` for N parts, or for three if N is invalid."""
    count = int(parts) if parts.isdecimal() and int(parts) > 0 else 3
    if count == 1:
        return "--partition 0/1, which is all of it, or none"
    return f"--partition 0/{count} for the first{' to' if count > 2 else ' or'} {count - 1}/{count} for the last"
