"""Run a client as a service: build the handlers, and run client/loop.py until it ends.

`serve` is the entry point. One thread keeps a pull open and answers phases of secure rounds, another one trains and
pushes, until the service is told to stop.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire import __version__
from thinwire.client import payload
from thinwire.client.admission import AdmissionController
from thinwire.client.assignment_context import HandlerEnvironment
from thinwire.client.calls import Retrier, Say
from thinwire.client.errors import CannotReply
from thinwire.client.executor import Executor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.loop import DeviceFacts, Loop
from thinwire.client.personal import executor_for
from thinwire.client.personal_files import SharedModels
from thinwire.client.policy import Policy
from thinwire.client.reloader import Reloader
from thinwire.client.secure import MAX_REQUEST_BYTES
from thinwire.client.train.protocol import ClientInfo
from thinwire.client.train.task import LoadedTask
from thinwire.client.worker_process import installed
from thinwire.core.equipment import NOTHING_SAID, Equipment
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import Link
from thinwire.core.plan import RunPlan
from thinwire.core.signals import handled
from thinwire.core.types import Assignment
from thinwire.privacy.participant import SecureIdentity


@dataclass(frozen=True)
class Device:
    """Holds what the handlers of all tasks share on one device.

    `client` has its name and its data, and `admission` the owner's policy. `folder` is the client's own directory
    (`core.statedir.client_home`). `secure` is what the device needs for secure rounds; `admission` knows what that
    carries. `has` returns what the aggregator learns of its equipment.
    """

    client: ClientInfo
    folder: Path
    admission: AdmissionController
    secure: SecureIdentity | None = None
    has: Callable[[], Equipment] = lambda: NOTHING_SAID


def serve(
    link: Link,
    tasks: Sequence[LoadedTask | Executor],
    device: Device,
    ending: threading.Event,
    *,
    reloader: Reloader | None = None,
    say: Say = print,
    once: bool = False,
) -> int:
    """Work on assignments until `ending` is set, and return the exit code.

    While the aggregator does not respond, the client tries again and prints that once a minute. With `once` it returns
    4 instead after a while (another error's exit code if calls fail by that), and 0 after a run. A client that the
    aggregator refuses returns 5.

    The worker of the `reloader` executes the tasks in a process of its own; without one they run in this process.
    """
    admission, secure, reloader = device.admission, device.secure, reloader or Reloader(device.admission)
    shared = SharedModels(device.folder, lambda task: handlers[task].executor.layout, lambda: admission.min_free_bytes)
    environment = HandlerEnvironment(keep_shared=shared.keep)
    handlers = {
        task.name: AssignmentHandler(task, device.folder, device.client, admission, secure, environment)
        for task in tasks
    }
    worker = reloader.worker
    here = installed() if worker is None else {}

    def said() -> Mapping[str, str]:
        return versions(admission.policy, worker.versions if worker is not None else here)

    carries = tuple(sorted(secure.carries)) if secure is not None else ()
    facts = DeviceFacts(device.client.name, said, device.has, admission.plans.digests, carries)
    with _without_repeats(say) as say_once:
        loop = Loop(link, handlers, facts, Retrier(ending, say_once, give_up=once), reloader)
        if worker is not None:
            worker.stopping, worker.say = ending.is_set, say_once
        try:
            return loop.run()
        except ThinwireError as error:
            say_once(error.text())
            return error.exit_code
        finally:
            ending.set()
            link.close()
            loop.end_background_sender()
            loop.save()
            loop.join()
            if worker is not None:
                worker.close()


def wanted(admission: AdmissionController, executors: Sequence[Executor]) -> Callable[[Assignment], bool]:
    """Return a function that decides if an assignment's parts are worth fetching.

    They are if its task is here, the policy admits it, and no part is larger than the task's model can need.
    """
    tasks = {executor.name: executor for executor in executors}

    def is_wanted(assignment: Assignment) -> bool:
        if assignment.kind == "secure":  # the handler's open round bounds it again before it is read
            return sum(part.length for part in assignment.parts) <= MAX_REQUEST_BYTES
        executor, plan = tasks.get(assignment.task), admission.plans.known(assignment)
        if executor is None or plan is None or not admission.is_wanted(assignment):
            return False
        try:
            parsed = RunPlan.from_json(plan)
            executor = executor_for(executor, parsed) if parsed.local.personal_layers else executor
            payload.require_parts(assignment, parsed, executor.layout)
        except (CannotReply, ThinwireError):  # the handler's reply reports it
            return False
        return True

    return is_wanted


def versions(policy: Policy | None = None, training: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return the versions that a hello reports to the operator: Thinwire, Python, packages, machine and system.

    `training` holds the versions of the Python that trains, and of its packages. Of the policy only a digest is
    reported, by which a change is seen.
    """
    said = {"policy": policy.digest} if policy and policy != Policy() else {}
    return {
        "thinwire": __version__, **(installed() if training is None else training), "machine": platform.machine(),
        "system": platform.system(), **said,
    }  # fmt: skip


@contextlib.contextmanager
def reloads() -> Iterator[threading.Event]:
    """Set the yielded event at SIGUSR1, which `thinwire client reload` sends.

    SIGHUP is not used: it ends a client whose terminal is closed.
    """
    wished = threading.Event()
    with handled([signal.SIGUSR1], lambda number, frame: wished.set()):
        yield wished


@contextlib.contextmanager
def _without_repeats(say: Say) -> Iterator[Say]:
    """Yield a thread-safe `say` that skips a line equal to the last one."""
    lock, last = threading.Lock(), [""]

    def say_once(line: str) -> None:
        with lock:
            if line != last[0]:
                last[0] = line
                say(line)

    yield say_once
