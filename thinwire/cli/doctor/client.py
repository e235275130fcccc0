"""`thinwire client doctor`: check a device from the aggregator's host name to the free disk space.

Every finding comes with a hint. The connection is checked in steps that build on each other: name, TCP, certificate
pin, clock, and the device's row at the aggregator. After the first failed step the others are reported as unchecked.
Nothing is changed.
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.doctor.checks import LEAST_BYTES, Finding, found, kernels, private, room, unseen
from thinwire.cli.local_state import trusted
from thinwire.client.policy import FILE
from thinwire.core import formatting
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import MB

if TYPE_CHECKING:
    from thinwire.client.policy import Policy
    from thinwire.core.fleet import TaskReport
    from thinwire.core.layout import Layout
    from thinwire.transport.device.connect import Address
    from thinwire.transport.device.identity import Trust


BYTES_A_PARAMETER = 4 * 3  # float32 of the received model, the residual, and the reply that is kept


def examine(folder: Path, aggregator: str | None, tasks: Sequence[str]) -> list[Finding]:
    """Run all checks of one client and return the findings.

    `folder` is the client's state directory. `aggregator` and `tasks` are the options of the doctor. Without them those
    of the last start count, then the joined aggregator and the installed tasks.
    """
    from thinwire.client.task import installed_tasks
    from thinwire.core.errors import ThinwireError
    from thinwire.core.statedir import holder

    saved = StartOptions.load(folder)
    last = saved or StartOptions()
    begins = (None if saved else holder(folder / "lock")) or {}  # a start writes its lock before start.json
    try:
        url, trust = trusted(aggregator or last.options.get("aggregator") or begins.get("aggregator"), folder)
    except ThinwireError as error:
        way = [Finding("joined", False, str(error), error.hint), *(unseen(what, "not joined") for what in STEPS)]
    else:
        way = walk(url, trust, folder)
    python = last.path("python")
    size, looked = 0, list[Finding]()
    with contextlib.chdir(last.folder if not tasks and last.folder.is_dir() else "."):
        installed = (f"{name}={module}" for name, module in installed_tasks().items())
        for spec in tasks or last.options.get("task") or installed:
            finding, parameters = _task(spec, python)
            looked, size = [*looked, finding], max(size, parameters)
    if not looked and begins:
        looked = [Finding("task", None, f"process {begins.get('pid', '?')} is still starting", "try again in a moment")]
    elif not looked:
        looked = [Finding("task", False, "no task is known here", "give one: --task NAME=path/to/task.py")]
    rules, policy = _policy(last.path("policy") or folder / FILE, folder)
    disk = _disk(folder, max(LEAST_BYTES, BYTES_A_PARAMETER * size), policy.min_free_disk_mb)
    return [*way, *looked, found("kernels", kernels), rules, disk]


def _policy(file: Path, folder: Path) -> tuple[Finding, Policy]:
    """Return the finding on the policy file and on the counts in `folder`, and the policy itself.

    The policy is the default one if the file is invalid.
    """
    from thinwire.client.admission import QuotaFile
    from thinwire.client.policy import Policy, load_policy
    from thinwire.core.errors import ThinwireError

    policy = Policy()
    try:
        policy = load_policy(file)
        QuotaFile(folder).read()
    except ThinwireError as error:
        return Finding("policy", False, str(error), error.hint), policy
    said = f"max_assignment_minutes = {policy.max_assignment_minutes:g}, min_free_disk_mb = {policy.min_free_disk_mb}"
    if policy.hours:
        said += f', hours = "{policy.hours}", hours_end_work = {str(policy.hours_end_work).lower()}'
    return Finding("policy", True, f"{said}; {file if file.exists() else f'no {file.name}: the defaults'}"), policy


def _task(spec: str, python: Path | None) -> tuple[Finding, int]:
    """Return the finding on one task and its number of parameters."""
    size = 0

    def look() -> Finding | str:
        nonlocal size
        try:
            report, layout = _here(spec) if python is None else _elsewhere(spec, python)
        except ModuleNotFoundError as error:
            hint = "torch's build is the device's choice: README, torch" if error.name == "torch" else ""
            return Finding("task", False, f"{spec}: no module {error.name!r} in this environment", hint)
        if report.error:
            return Finding("task", False, f"{report.name}: {report.error}", "thinwire task check MODULE --data PATH")
        if layout is not None:
            size = layout.size
        version, where = (f" {report.version}" if report.version else ""), (f", trained by {python}" if python else "")
        return f"{report.name}{version}, {size:,} parameters, layout {report.layout_digest[:12]}{where}"

    return found("task", look), size


def _here(spec: str) -> tuple[TaskReport, Layout | None]:
    """Import the task in this process and return its report with its layout."""
    from thinwire.client.executor import InProcessExecutor
    from thinwire.client.task import load_task

    task = InProcessExecutor(load_task(spec))
    report = task.report()
    return report, None if report.error else task.layout


def _elsewhere(spec: str, python: Path) -> tuple[TaskReport, Layout | None]:
    """Import the task with another interpreter and return its report with its layout.

    The worker gets a temporary state directory, so that it leaves nothing in the client's.
    """
    from thinwire.client.executor import Worker
    from thinwire.client.worker_process import Interpreter

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        worker = Worker([spec], Interpreter(python, Path(folder)))
        stack.callback(worker.close)
        worker.describe()
        (task,) = worker.manifests
    return task.report, task.parsed


def _disk(folder: Path, least: int, min_free_mb: int) -> Finding:
    """Check that a client's state directory is private and writable, with `least` bytes above the policy's reserve."""
    if not folder.exists():
        above = next(path for path in folder.parents if path.exists())
        return Finding(
            "disk",
            True,
            f"{formatting.size(shutil.disk_usage(above).free)} free; {folder} is made by the first start or join",
        )
    closed = private("disk", folder)
    if closed.ok is False:
        return closed
    kept = room("disk", folder, least + min_free_mb * MB)
    return replace(kept, said=f"{kept.said}; min_free_disk_mb = {min_free_mb} MB stay free") if min_free_mb else kept


SKEW_S = 5.0  # a smaller clock skew causes no failure and is not reported
STEPS = ("name", "tcp", "pin", "clock", "row")


def walk(url: str, trust: Trust | None, folder: Path) -> list[Finding]:
    """Check the connection step by step and return the findings; those after a failure are unchecked."""
    from thinwire.transport.device.connect import Address

    address = Address.parse(url)
    findings: list[Finding] = []
    for what, look in (
        ("name", lambda: _name(address)),
        ("tcp", lambda: _tcp(address)),
        ("pin", lambda: _pin(address, url, trust)),
    ):
        findings.append(found(what, look))
        if findings[-1].ok is False:
            break
    else:
        findings += _standing(url, trust, folder)
    return [*findings, *(unseen(what, f"{findings[-1].what} failed") for what in STEPS[len(findings) :])]


def _name(address: Address) -> Finding | str:
    """Check that the host name, or that of the proxy, resolves."""
    from thinwire.transport.device.connect import Proxy

    proxy = Proxy.towards(address)
    host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
    try:
        places = {str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        hint = "HTTPS_PROXY names it; NO_PROXY is for a direct way" if proxy else "is it right? Does DNS work here?"
        return Finding("name", False, f"{host} is not known here: {error}", hint)
    said = host if host in places else f"{host} is {', '.join(sorted(places))}"
    return f"{said}, the proxy of HTTPS_PROXY; it looks {address.host} up" if proxy else said


def _tcp(address: Address) -> Finding | str:
    """Check that a TCP connection opens, and report its round trip."""
    from thinwire.transport.device.connect import Proxy, reach

    by = f" by the proxy {proxy.host}:{proxy.port}" if (proxy := Proxy.towards(address)) else ""
    try:
        sock, rtt_s = reach(address)
    except OSError as error:
        hint = "is it started (thinwire aggregator start), is the port right, does a firewall let it pass?"
        return Finding("tcp", False, f"{address} does not answer{by}: {error.strerror or error}", hint)
    sock.close()
    return f"{address} answers{by} in {formatting.duration(rtt_s)}"


def _pin(address: Address, url: str, trust: Trust | None) -> Finding | str:
    """Check that the certificate of the aggregator is valid for the joined CA or the system's CAs."""
    from thinwire.transport.device.connect import dial
    from thinwire.transport.device.session import no_answer_error

    if trust is None:
        return "a device API without TLS, for this machine only"
    try:
        line = dial(address, trust)
    except (OSError, http.client.HTTPException) as error:
        raise no_answer_error(error, url, tls=True) from error
    line.sock.close()
    by = "a CA of this system" if trust.system else f"the CA that was joined (pin {trust.pins[0][:16]}..)"
    ends = datetime.fromtimestamp(line.dates[1], UTC) if line.dates else None
    assert isinstance(line.sock, ssl.SSLSocket)
    return f"{by} vouches for it, {line.sock.version() or 'TLS'}" + (f", until {ends:%Y-%m-%d}" if ends else "")


def _standing(url: str, trust: Trust | None, folder: Path) -> Sequence[Finding]:
    """Return the findings on the clock and on the device's row at the aggregator, from one signed request."""
    from thinwire.core.errors import ThinwireError
    from thinwire.transport.device.enroll import check_enrollment
    from thinwire.transport.device.identity import KEY_FILE, device_key

    if not (folder / KEY_FILE).exists():
        return unseen("clock", "this client has no key yet"), Finding(
            "row", None, "this client has no key yet: its first start makes one"
        )
    try:
        stood = check_enrollment(url, trust, device_key(folder), folder.name)
    except ThinwireError as error:
        return unseen("clock", "nobody answered"), Finding("row", False, str(error), error.hint)
    key = f"key {formatting.grouped(stood.fingerprint)}"
    if stood.error is not None:
        row = Finding("row", False, f"{stood.error}\n{key}", stood.error.hint)
    elif stood.kind == "hello":
        row = Finding("row", True, f"not known yet: the first start makes it so\n{key}")
    else:
        row = Finding("row", True, f"approved\n{key}")
    return _clock(stood.skew_s, trust), row


def _clock(skew_s: float | None, trust: Trust | None) -> Finding:
    """Return the finding on a clock that is `skew_s` seconds behind the aggregator's; None means unknown."""
    if skew_s is None:
        return unseen("clock", "the aggregator did not say its time")
    if abs(skew_s) < SKEW_S:
        return Finding("clock", True, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, as at the aggregator")
    said = f"{formatting.duration(abs(skew_s))} {'behind' if skew_s > 0 else 'ahead of'} the aggregator's"
    if trust is not None and trust.system:
        return Finding("clock", False, said, "timedatectl set-ntp true: certificates of the system's CAs have dates")
    return Finding("clock", True, f"{said}: requests are signed by that one", "timedatectl set-ntp true")
