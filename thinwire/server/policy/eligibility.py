"""Holds the connected devices with their reports, and decides whether a device can be selected.

`Eligibility.reason` decides it: `mismatch` compares the device's task with the run's, and `lacking` its equipment with
what the plan requires. `DeviceBackoff` excludes a device whose failure would repeat. It follows from the journal alone,
so a resumed run excludes the same devices.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from thinwire.core.equipment import lacking
from thinwire.core.errors import PlanError
from thinwire.core.events import ClientFailed
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Hello, TaskReport
from thinwire.core.formatting import plain
from thinwire.core.layout import Layout, differences
from thinwire.core.personal_layers import shared_layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_values import SecureSection

MAX_REASON = 500  # letters from a device's own report: every round's journal repeats the reason
DIGITS = 16  # of a digest, in hex: enough to compare reports of one device


@dataclass
class ConnectedDevices:
    """Holds the connected devices, and what each one reports about itself.

    The service keeps it across runs. Each run has a copy, to which it applies the arrivals that it has polled.
    """

    hellos: dict[str, Hello] = field(default_factory=dict)
    joined: int = 0  # how often a device connected
    _last_reports: dict[str, Hello] = field(default_factory=dict)  # device -> last report, disconnected devices too
    _report_digests: dict[str, str] = field(default_factory=dict)  # device -> digest of it, computed on demand

    def copy(self) -> ConnectedDevices:
        """Return a copy, which later arrivals leave as it is."""
        return ConnectedDevices(dict(self.hellos), self.joined, dict(self._last_reports), dict(self._report_digests))

    def apply(self, arrival: Arrival) -> bool:
        """Record an arrival. Return True if a device connects with another report than last time.

        Only then may the device answer an assignment differently.
        """
        if isinstance(arrival, ClientDisconnected):
            self.hellos.pop(arrival.device, None)
        if not isinstance(arrival, ClientConnected):
            return False
        self.hellos[arrival.device] = arrival.hello
        self.joined += 1
        has = replace(arrival.hello.has, free_bytes=None)
        # The fields that are emptied say nothing about the device's abilities.
        abilities = replace(arrival.hello, link={}, trusted_pins=(), plans=(), has=has)
        if abilities == self._last_reports.get(arrival.device):
            return False
        self._last_reports[arrival.device] = abilities
        self._report_digests.pop(arrival.device, None)
        return True

    def report_digest(self, device: str) -> str:
        """Return a digest of a device's last report, as far as it concerns what the device can do; "" before its first
        report.

        The digest stays when the device disconnects.
        """
        if device not in self._report_digests and device in self._last_reports:
            report = json.dumps(asdict(self._last_reports[device]), sort_keys=True)
            self._report_digests[device] = hashlib.sha256(report.encode()).hexdigest()[:DIGITS]
        return self._report_digests.get(device, "")

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the connected devices, sorted."""
        return sorted(self.hellos)

    @property
    def ever_connected(self) -> Sequence[str]:
        """Return the names of the devices that have been connected since this process began, sorted."""
        return sorted(self._last_reports)


SHOWN = 5  # unable devices that a waiting sentence names


def unable_notes(unable: Mapping[str, str]) -> list[str]:
    """Return phrases on the devices that cannot take part: at most `SHOWN` are named, and a reason once.

    >>> unable_notes({"a": "has no task 't'", "b": "is old", "c": "has no task 't'"})
    ["a, c: each has no task 't'", 'b is old']
    """
    by_reason = dict[str, list[str]]()
    for device in sorted(unable)[:SHOWN]:
        by_reason.setdefault(unable[device], []).append(device)
    notes = [f"{', '.join(names)}{': each' if names[1:] else ''} {why}" for why, names in by_reason.items()]
    return [*notes, f"and {len(unable) - SHOWN} more"] if len(unable) > SHOWN else notes


def mismatch(plan: RunPlan, wanted: TaskReport, hello: Hello, layout: Layout | None = None) -> str:
    """Return why a device cannot take part in this run, as a phrase about the device; "" if it can.

    `[run] task_match` says what has to agree. If the run's `layout` is given and the device has reported its own, the
    phrase names the tensors that differ.
    """
    name = plan.run.task
    own = {task.name: task for task in hello.tasks}.get(name)
    if own is None:
        return f"has no task {name!r} (type on it: thinwire client start --task {name}=MODULE)"
    if own.error:
        return f"has a task {name!r} that does not load: {own.error} (type on it: thinwire task check MODULE)"
    personal = tuple(plan.local.personal_layers)
    if (
        own.layout_digest
        and own.layout_digest != wanted.layout_digest
        and not _has_shared_tensors(own, layout, personal)
    ):
        differs = differing_tensors(own, layout, personal) if layout is not None else ""
        hint = "install the run's task on it, then: thinwire client reload"
        return f"has another model in its task {name!r}{f': {differs}' if differs else ''} ({hint})"
    if plan.run.task_match == "version" and own.version != wanted.version:
        return f"has version {own.version or 'none'} of the task {name!r}, the run has {wanted.version or 'none'}"
    if plan.run.task_match == "digest" and own.source_digest != wanted.source_digest:
        return f"has another source of the task {name!r} than the run"
    return ""


def lacking_secure(secure: SecureSection, has: Container[str]) -> str:
    """Return which part of secure aggregation a plan needs and a device lacks, as a phrase; "" if it lacks none.

    `has` are the parts that the device reports (`Hello.secure`).

    >>> lacking_secure(SecureSection(enabled=True, post_quantum=True), ("secure",))
    'has no ML-KEM for [secure] post_quantum (a later release of the package cryptography has it)'
    """
    if not secure.enabled:
        return ""
    if "secure" not in has:
        return "cannot sum under masks: it is no Thinwire client of this version (install the latest on it)"
    if secure.post_quantum and "secure.post_quantum" not in has:
        return "has no ML-KEM for [secure] post_quantum (a later release of the package cryptography has it)"
    if secure.adversary == "malicious" and "secure.malicious" not in has:
        return (
            'has pinned no roster for [secure] adversary = "malicious" (type on it: thinwire client start --roster '
            "SIGNED.json --roster-key KEY.pem.pub)"
        )
    return ""


@functools.lru_cache(maxsize=256)
def differing_tensors(own: TaskReport, layout: Layout, personal: tuple[str, ...] = ()) -> str:
    """Return the tensors by which a device's model differs from the run's; "" if the device has not reported them.

    Tensors that the globs `personal` match stay on the device and are not compared.
    """
    try:
        told = Layout.from_json(json.loads(own.tensors)) if own.tensors else None
        return (
            plain(differences(shared_layout(told, personal), layout))[:MAX_REASON]
            if told is not None and told.digest == own.layout_digest
            else ""
        )
    except PlanError as error:
        return f"{error.what}: {error.why}"[:MAX_REASON]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return ""  # the report of a device may hold anything


@functools.lru_cache(maxsize=256)
def _has_shared_tensors(own: TaskReport, layout: Layout | None, personal: tuple[str, ...]) -> bool:
    """Return True if a device's model has the shared tensors of a run with personal layers, whatever those are."""
    if not personal or layout is None or not own.tensors:
        return False
    try:
        told = Layout.from_json(json.loads(own.tensors))
        return told.digest == own.layout_digest and shared_layout(told, personal).digest == layout.digest
    except (PlanError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return False


TIME_DEPENDENT_RULES = ("hours", "rounds_a_day", "metered")  # of a device's policy: their decision changes with time
MIN_EXCLUSION_S, MAX_EXCLUSION_S = 600.0, 90_000.0  # of a device after one of these rules declined
RETRY_AFTER = re.compile(r"\(again in (\d{1,6}) s\)$")
TASK_MISSING = "task-missing"
EXCLUDING_FAILURES = (
    TASK_MISSING,
    "task-mismatch",
    "layout-mismatch",
    "declined",
    "protocol",
)  # these failures would repeat


def exclusion_s(kind: str, text: str) -> float:
    """Return for how many seconds a device gets no assignment after this failure.

    Time alone ends the exclusion only if one of the `TIME_DEPENDENT_RULES` declined. The device then says when it may
    be assigned again; the result is at least `MIN_EXCLUSION_S` and at most `MAX_EXCLUSION_S`. Any other exclusion ends
    only when the device reports something else about itself, and the result is infinite.

    >>> exclusion_s("declined", "hours: at night (again in 7200 s)"), exclusion_s("declined", "tasks: not this one")
    (7200.0, inf)
    """
    if kind != "declined" or text.partition(":")[0] not in TIME_DEPENDENT_RULES:
        return math.inf
    told = RETRY_AFTER.search(text)
    return min(max(float(told[1]) if told else 0.0, MIN_EXCLUSION_S), MAX_EXCLUSION_S)


@dataclass
class DeviceBackoff:
    """Holds the devices whose failure would repeat, and until when each of them is excluded.

    An exclusion holds while the device reports the same about itself as when it failed. The callable `report_digest`
    returns a digest of the device's present report. The journal has the digest at the failure
    (`ClientFailed.report_digest`), so a restart changes nothing.
    """

    _failed: dict[str, tuple[ClientFailed, float]] = field(default_factory=dict)  # and its end, elapsed_s

    def failed(self, event: ClientFailed) -> None:
        """Exclude the device of this event if its failure would repeat."""
        if event.kind in EXCLUDING_FAILURES:
            until_s = event.elapsed_s + exclusion_s(event.kind, event.text)
            self._failed[event.device] = event, until_s

    def reason(self, device: str, elapsed_s: float, report_digest: Callable[[str], str]) -> str:
        """Return why the device gets no assignment at `elapsed_s`; "" if it may get one."""
        if device not in self._failed:
            return ""
        event, until_s = self._failed[device]
        if elapsed_s >= until_s or event.report_digest != report_digest(device):
            return ""
        failed = plain(f"{event.kind}: {event.text}")[:MAX_REASON]
        return "reported that it has no such task" if event.kind == TASK_MISSING else failed

    def next_expiry_s(self, elapsed_s: float) -> float:
        """Return when the next exclusion ends by time alone, in seconds of the run's clock; infinite if none does."""
        return min((until_s for _, until_s in self._failed.values() if elapsed_s < until_s), default=math.inf)


@dataclass(frozen=True)
class Eligibility:
    """Decides which devices can be selected in a run.

    A simulated client is not a machine, so the plan's requirements on machines do not apply to it. `excluded` returns
    why a device gets no assignment for a while after a failure; "" if it may get one.
    """

    plan: RunPlan
    report: TaskReport
    layout: Layout
    simulated: bool
    online: ConnectedDevices
    excluded: Callable[[str], str]
    _mismatches: dict[str, tuple[Hello, str]] = field(default_factory=dict)  # device -> its report, and what it lacks

    def reason(self, device: str) -> str:
        """Return why a device may not be selected now, as a phrase about the device; "" if it may."""
        hello = self.online.hellos.get(device)
        if hello is None:
            return "is offline"
        if why := self.excluded(device):
            return why
        known = self._mismatches.get(device)
        if known is None or known[0] is not hello:  # cached: every round examines every connected device
            known = self._mismatches[device] = hello, self._mismatch(hello)
        return known[1]

    def _mismatch(self, hello: Hello) -> str:
        """Return why a device with this report cannot take part in the run; "" if it can."""
        why = mismatch(self.plan, self.report, hello, self.layout) or lacking_secure(self.plan.secure, hello.secure)
        if why or self.simulated:
            return why
        return lacking(self.plan.cohort.requires, hello.has)

    def able(self) -> list[str]:
        """Return the connected devices that may be selected now, sorted."""
        return [device for device in self.online.names if not self.reason(device)]

    def reasons(self) -> dict[str, str]:
        """Return device -> reason for the connected devices that may not be selected now."""
        return {device: why for device in self.online.hellos if (why := self.reason(device))}


class AbleDevices:
    """Connected and able devices, without those that are assigned, cached between calls.

    While replies are missing, a round looks for replacements at each event. All connected devices are examined again
    only if a device joined since, or may be selected again since. Otherwise the cost of a round would grow with the
    square of its devices.
    """

    def __init__(self, eligibility: Eligibility, backoff: DeviceBackoff) -> None:
        self._eligibility, self._backoff, self._able = eligibility, backoff, list[str]()
        self._joined, self._until_s = -1, -math.inf  # `_able` is complete for this count and until this time

    def now(self, assigned: Container[str], elapsed_s: float) -> Sequence[str]:
        """Return the able devices that are not in `assigned`; some of them may be busy or disconnected by now.

        `assigned` may only grow from call to call.
        """
        online = self._eligibility.online
        if self._joined != online.joined or elapsed_s >= self._until_s:
            self._joined, self._until_s = online.joined, self._backoff.next_expiry_s(elapsed_s)
            self._able = [device for device in online.hellos if not self._eligibility.reason(device)]
        self._able = [device for device in self._able if device not in assigned]
        return self._able
