"""Holds the requests for the initial model of a run that a device makes, rebuilt from the journal.

`server/initial_model.py` sends the requests, one at a time, and records the outcome of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from thinwire.core.events import Event, ModelStored
from thinwire.core.formatting import Reason
from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed
from thinwire.server.policy.assignment_terms import UNMEASURED_DEADLINE_S, Deadline
from thinwire.server.policy.cohort import in_random_order
from thinwire.server.policy.eligibility import exclusion_s

RETRYABLE_FAILURES = ("offline", "stale")  # another request may succeed: the device was offline, slow or busy
PEOPLES_DECISIONS = ("declined", "refused")  # the owner's policy declined, or the operator revoked the device
MAX_FAILED_DEVICES = 10  # so many failures mean that the task is at fault, and trying thousands would take days
MAX_DEADLINE_FACTOR = 8  # times the first deadline: the last attempt has so long, and all other devices wait meanwhile
OFFLINE_WAIT_S = MAX_DEADLINE_FACTOR * UNMEASURED_DEADLINE_S  # an offline device is waited for as long as a silent one
ReportDigest = Callable[[str], str]  # device -> digest of its present report; "" before its first one


@dataclass
class InitialModelRequests:
    """Holds the requests for the initial model and their outcomes, rebuilt from the journal.

    `open` is the request whose reply is awaited; no other reply is accepted. `times` counts the requests to each
    device. A device that disconnected or timed out may get another request until it has used up its attempts, which the
    caller sets.
    A device that declined for now may get one after its back-off. Any other failed device may get one once it reports
    something else about itself. A restart resets none of this.
    """

    open: FirstModelAssigned | None = None
    failed: FirstModelFailed | None = None  # the last failure
    times: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)  # device -> requests that failed for one of RETRYABLE_FAILURES
    late: Counter[str] = field(default_factory=Counter)  # device -> those of them that timed out
    _failed: dict[str, FirstModelFailed] = field(default_factory=dict)  # device -> its last failure, oldest first

    def apply(self, event: Event) -> None:
        """Record an event if it concerns the initial model."""
        match event:
            case FirstModelAssigned():
                self.open, self.times[event.device] = event, self.times[event.device] + 1
            case FirstModelFailed(device=device):
                self.open, self.failed = None, event
                self._failed.pop(device, None)
                self._failed[device] = event
                if event.kind in RETRYABLE_FAILURES:
                    self.tried[device] += 1
                if event.kind == "stale":
                    self.late[device] += 1
            case ModelStored():
                self.open = None

    def excluded(self, elapsed_s: float, most: int, report_digest: ReportDigest) -> dict[str, str]:
        """Return {device: reason} of the devices that get no request at `elapsed_s`.

        Failed attempts count whatever the device has reported since. A device that crashes over the task would
        otherwise connect as a new one each time.
        """
        failures = self._failures_still_valid(report_digest)
        now = {device: _text(event) for device, event in failures.items() if elapsed_s < _until_s(event)}
        return now | self._out_of_attempts(most)

    def reasons(self, report_digest: ReportDigest) -> dict[str, str]:
        """Return {device: reason} of the failed devices that have reported nothing else about themselves since."""
        return {device: _text(event) for device, event in self._failures_still_valid(report_digest).items()}

    def may_recover(self, elapsed_s: float, most: int, report_digest: ReportDigest) -> set[str]:
        """Return the devices whose reason passes with time, or passed at most `OFFLINE_WAIT_S` seconds ago.

        A device that can get a request by then gets one. The others may have left for good.
        """
        untils = {device: _until_s(event) for device, event in self._failures_still_valid(report_digest).items()}
        passing = {d for d, until in untils.items() if math.isfinite(until) and elapsed_s < until + OFFLINE_WAIT_S}
        return passing - self._out_of_attempts(most).keys()

    def failed_permanently(self, most: int) -> dict[str, str]:
        """Return {device: reason} of the devices that failed permanently, the latest first.

        A device that has used up its `most` attempts is among them. A device that a person has kept back
        (`PEOPLES_DECISIONS`) is not.
        """
        out_of_attempts = self._out_of_attempts(most)
        return {
            device: out_of_attempts.get(device, _text(event))
            for device, event in reversed(self._failed.items())
            if device in out_of_attempts or (event.kind not in PEOPLES_DECISIONS and math.isinf(_backoff_s(event)))
        }

    def next_device(self, able: Sequence[str], seed: int) -> str:
        """Return the able device that got the fewest requests; the seed decides between equals.

        Once `MAX_FAILED_DEVICES` devices have been tried, an able one among them comes before all others.
        """
        tried = [device for device in able if self.tried[device]] if len(self.tried) >= MAX_FAILED_DEVICES else []
        return min(in_random_order(tried or able, seed, 0), key=lambda device: self.times[device])

    def _failures_still_valid(self, report_digest: ReportDigest) -> dict[str, FirstModelFailed]:
        """Return the last failure of each device that has reported nothing else about itself since."""
        return {
            device: event
            for device, event in self._failed.items()
            if report_digest(device) in ("", event.report_digest)
        }

    def _out_of_attempts(self, most: int) -> dict[str, str]:
        devices = [device for device, tried in self.tried.items() if tried >= most]
        return {device: f"{_text(self._failed[device])} (assignments: {self.times[device]})" for device in devices}


def lengthened_deadline(one: Deadline, late: int) -> Deadline:
    """Return the deadline of a device that was `late` so often: doubled each time, at most `MAX_DEADLINE_FACTOR` fold.

    >>> lengthened_deadline(Deadline(60.0, []), 2)
    Deadline(seconds=240.0, reasons=[Reason(code='late-before', numbers={'times': 4, 'each_s': 60.0})], usual_s=None)
    """
    if not late:
        return one
    times = min(2**late, MAX_DEADLINE_FACTOR)
    longer = Reason("late-before", {"times": times, "each_s": one.seconds})
    return Deadline(times * one.seconds, [longer, *one.reasons])


def _text(event: FirstModelFailed) -> str:
    return f"{event.kind}: {event.reason}"


def _until_s(event: FirstModelFailed) -> float:
    return event.elapsed_s + _backoff_s(event)


def _backoff_s(event: FirstModelFailed) -> float:
    return 0.0 if event.kind in RETRYABLE_FAILURES else exclusion_s(event.kind, event.reason)
