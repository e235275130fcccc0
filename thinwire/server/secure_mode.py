"""A round with secure aggregation: one deadline drives the phases of `privacy/secure_round.py`, without I/O.

A device enters the round with its assignment to train. Its first reply is its advertisement. It answers the phase
`share` while it trains, sends its masked vector as the round's update, and answers `agree` and `unmask`. A device that
misses a phase drops out of the round, and no later phase waits for it.

All phases share the round's deadline. The last share `RESERVE` of its time is for `agree` and `unmask`. The time before
it is for training and the masked vectors. `advertise` may take half of that time, because a device advertises when it
has the whole model, and `share` may take a quarter more. A phase ends earlier once no device is outstanding in it.

Invariant: no vector leaves the sum after the survivors were shown. A reply that comes after its phase is never read.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from thinwire.aggregation.plan_codecs import lattice_of
from thinwire.core.errors import DataLost, PlanError
from thinwire.core.events import ROUND_OVER, CloseReason
from thinwire.core.types import Phase, SecureWork, UpdateId
from thinwire.privacy.contexts import context_of_assignment, identity_of, model_digest, simulated_key
from thinwire.privacy.graph import check_round
from thinwire.privacy.messages import BadMessage
from thinwire.privacy.pinned_roster import read_roster
from thinwire.privacy.secure_round import Aborted, SecureRound, TooFew
from thinwire.server.round import RoundMachine
from thinwire.server.round_events import (
    Action,
    AggregateUpdate,
    AggregationDone,
    ClosePhase,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    Input,
    MarkLost,
    MasksRemoved,
    PhaseEnded,
    PhaseMessage,
    Reinstate,
    RemoveMasks,
    RemoveVector,
    ReplacementSource,
    RoundResult,
    UpdateArrived,
)
from thinwire.server.round_mode import RoundMode
from thinwire.server.secure_sum import FIRST_CLIP, SecureAggregator

if TYPE_CHECKING:
    from thinwire.core.events import RoundOpened
    from thinwire.core.fleet import DeviceRow
    from thinwire.core.plan import RunPlan
    from thinwire.server.aggregator import WeightCaps
    from thinwire.server.context import RunContext
    from thinwire.server.policy.cohort import Cohort

RESERVE = 0.2  # share of the deadline that is kept for agree and unmask: two small messages each way
# The latest end of each phase: for agree and unmask as a share of the reserve, else of the time before the reserve.
PHASE_ENDS: Mapping[Phase, float] = {"advertise": 0.5, "share": 0.75, "masked": 1.0, "agree": 0.5, "unmask": 1.0}
NO_MESSAGE = "no message in time for the phase"


class SecureMode(RoundMode):
    """Rounds with secure aggregation: one round is open, whose clients are selected when it opens.

    Its roster is fixed when the phase `share` opens. All clients of a round get the same `SecureWork`, which follows
    from the journal alone.
    """

    replaces = False  # a client that is selected later would have no shares of the others
    evaluates_alone = False

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        return plan.secure.enabled

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(plan)
        self._roster = InstalledRoster()

    def excluded(self, running: RunContext, device: str) -> str:
        """Return why a device is not on the roster that `adversary = "malicious"` needs.

        One device outside of it would make every client of its round withdraw.
        """
        if self.plan.secure.adversary != "malicious" or running.simulated:
            return ""
        return self._roster.refusal(running.home.roster, device, running.store.roster.by_fingerprint)

    def may_open(self, running: RunContext, cohort: Cohort, min_updates: int) -> bool:
        """Return False if no threshold or no graph exists for so many clients, because others are busy."""
        try:
            check_round(self.plan, len(cohort.selected), cohort.target_updates)
        except PlanError:
            return False
        return super().may_open(running, cohort, min_updates)

    def abort(self, running: RunContext) -> None:
        """Delete the messages of a round that a crash left behind: the run is over."""
        shutil.rmtree(running.home.messages(running.run_id), ignore_errors=True)

    def secure_work(self, running: RunContext, number: int) -> SecureWork:
        run_state = running.run_state
        work = SecureWork(run_state.ledger.selected(number), 0, self.clip(running))
        windows = lattice_of(self.plan, running.layout.model_size, work, running.identity).walk.windows
        return replace(work, window=run_state.steps_made % windows)  # a round without a step repeats its window

    def clip(self, running: RunContext) -> float:
        """Return the largest L2 norm of a client's weighted update in the next round."""
        given = self.plan.secure.clip
        return given if given != "auto" else running.run_state.clip or FIRST_CLIP

    def aggregator(self, running: RunContext, opened: RoundOpened, caps: WeightCaps | None = None) -> SecureAggregator:
        del caps
        return SecureAggregator(self.plan, running.layout, self.secure_work(running, opened.round), running.identity)

    def machine(self, opened: RoundOpened, running: RunContext) -> SecureRoundMachine:
        aggregator = self.aggregator(running, opened)
        any_id = next(iter(opened.assignments.values()))  # ctx0 covers only what all assignments share
        assignment = running.training_envelope(any_id).assignment
        model = model_digest(assignment.base_digest, running.model.buffers)
        context0 = context_of_assignment(assignment, model, aggregator.terms)
        selected = identities(running, opened.assignments)
        return SecureRoundMachine(self.config(opened), secure=SecureRound(aggregator.terms, context0, selected))


INSTALL_COMMAND = "thinwire devices roster install SIGNED.json --key KEY.pem.pub"


class InstalledRoster:
    """The roster that the operator installed (`AggregatorHome.roster`), read again whenever its file changes.

    It decides who is selected, and protects nobody: each client checks the round against its own pinned roster.
    """

    def __init__(self) -> None:
        self._file_version: tuple[int, int, int] | None = None  # inode, time and size of the file
        self._devices: Mapping[str, str] = {}  # name -> fingerprint
        self._unreadable = ""

    def refusal(self, path: Path, device: str, registered: Callable[[str], DeviceRow | None]) -> str:
        """Return why a device may not be selected, as a phrase about it; "" if its name and key are on the roster.

        `registered` returns the device with a fingerprint.
        """
        try:
            found = path.stat()
            if self._file_version != (now := (found.st_ino, found.st_mtime_ns, found.st_size)):
                self._file_version, self._unreadable, self._devices = now, "", fingerprints(path)
        except FileNotFoundError:
            return f"is not selected before a roster is installed on the aggregator (type there: {INSTALL_COMMAND})"
        except (OSError, DataLost) as error:
            self._unreadable, self._devices = f"is not selected: {path} is not readable: {error}", {}
        row = registered(self._devices.get(device, ""))
        if row is not None and row.name == device:
            return ""
        missing = f"is not on the installed roster with its key (sign one with it, then: {INSTALL_COMMAND})"
        return self._unreadable or missing


def fingerprints(path: Path) -> dict[str, str]:
    """Return name -> fingerprint of the devices on an installed roster; raise `DataLost` if it is none."""
    return {name: hashlib.sha256(key).hexdigest() for name, key in read_roster(path.read_bytes()).items()}


def identities(running: RunContext, devices: Iterable[str]) -> dict[str, bytes]:
    """Return device -> its identity key (DER), of the registry; that of a simulated device follows from its name."""
    if running.simulated:
        return {device: identity_of(simulated_key(device)) for device in devices}
    keys = {row.name: row.public_key for row in running.store.roster.rows()}
    return {device: keys[device] for device in devices}


MAX_DETAIL = 300  # characters


@dataclass
class SecureRoundMachine(RoundMachine):
    """A secure round as a state machine without I/O.

    `requests` are the requests of the open phase by device; it is empty in `advertise`, which the training assignments
    themselves request. `vectors` are the devices whose masked vector is in the sum.
    """

    secure: SecureRound = field(kw_only=True)
    requests: Mapping[str, bytes] = field(default_factory=dict)
    vectors: dict[str, UpdateId] = field(default_factory=dict)
    left_early: dict[str, tuple[str, str]] = field(default_factory=dict)  # device gone after its message -> kind, text
    is_unmasking: bool = False  # the masks are being removed
    masked_close_reason: CloseReason = "all"  # of the phase masked; it becomes the reason of the round
    detail: str = ""  # why the round has no sum

    @property
    def deadline_at(self) -> float:
        """Return the time at which the open phase ends, in seconds on the run's clock."""
        begins_s, lasts_s = self.config.opened_s, self.config.deadline_s * (1 - RESERVE)
        if self.secure.phase in ("agree", "unmask"):
            begins_s, lasts_s = begins_s + lasts_s, self.config.deadline_s * RESERVE
        return begins_s + PHASE_ENDS[self.secure.phase] * lasts_s

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Return the devices whose message of the open phase may still come, in the order of selection."""
        return tuple(device for device in self.assignments if device in self.secure.outstanding)

    def _decide(self, event: Input, now: float, replacements: ReplacementSource) -> list[Action]:
        del event, replacements  # the roster of a secure round is fixed when `share` opens
        actions = list[Action]()
        while not self.shut and self._may_close(now):
            actions += self._close_phase()
            for device in self.left_early.keys() & self.secure.outstanding:
                actions += self._drop_out(device, *self.left_early[device])
        if self.shut and self.shut != "stopped":  # no client goes on, so each of them is free for the next round
            actions += [
                found for device in self._reported_outstanding for found in self._mark_lost(device, "stale", ROUND_OVER)
            ]
        return actions

    def _may_close(self, now: float) -> bool:
        """Return True if the open phase ends now."""
        if self.is_unmasking or self.aggregating:
            return False
        if self.secure.phase == "unmask" and self.secure.can_unmask:
            return True
        if self.secure.phase == "masked":
            found = self._masked_phase_ends(now)
            self.masked_close_reason = found or self.masked_close_reason
            return found is not None
        return not self.secure.outstanding or now >= self.deadline_at

    def _closing_reason(self, now: float) -> CloseReason | None:
        del now  # a phase that is full or late is closed by `_decide`, also after a restart: the masks are still on
        return self.shut

    def _masked_phase_ends(self, now: float) -> CloseReason | None:
        """Return the reason to accept no more masked vectors, or None while the phase `masked` stays open."""
        if not self.secure.outstanding:
            return "enough" if self.secure.dropped else "all"
        if len(self.aggregated) >= self.config.target_updates:
            return "enough"
        return "deadline" if now >= self.deadline_at else None

    def _close_phase(self) -> list[Action]:
        """Close the open phase, and remove the masks after the last one."""
        phase = self.secure.phase
        silent = () if self.secure.can_unmask else self.outstanding
        is_enough = phase == "masked" and self.masked_close_reason == "enough"
        text = ROUND_OVER if is_enough else f"{NO_MESSAGE} {phase}"
        actions = [found for device in silent for found in self._drop_out(device, "stale", text)]
        try:
            self.requests = self.secure.close()
            if phase != "unmask":
                return [*actions, ClosePhase(phase, self.requests)]
            self.is_unmasking = True
            return [*actions, RemoveMasks(self.secure.unmasking_keys())]
        except TooFew as error:
            self._end_without_sum("too-few", str(error))
        except Aborted as error:
            self._end_without_sum("aborted", str(error))
        return actions

    def _end_without_sum(self, reason: CloseReason, detail: str) -> None:
        """End the round without a sum, unless it has ended already."""
        if not self.shut:
            self.shut, self.detail = reason, detail[:MAX_DETAIL]

    def _close(self) -> RoundResult:
        self.closed = replace(super()._close(), detail=self.detail)
        return self.closed

    def _apply(self, event: Input, now: float) -> list[Action]:
        match event:
            case PhaseMessage(device, phase, message):
                return self._message(device, phase, message)
            case PhaseEnded(reason):
                self.masked_close_reason = cast(CloseReason, reason) if reason else self.masked_close_reason
                try:
                    self.requests = self.secure.close()
                except (TooFew, Aborted) as error:  # its stored messages are not those with which it was closed
                    self._end_without_sum("aborted", f"the replay of a closed phase failed: {error}")
                return []
            case MasksRemoved(error):
                if error:
                    self._end_without_sum("aborted", error)
                self.shut = self.shut or self.masked_close_reason
                return []
            case AggregationDone(update_id) if update_id in self.dropped:
                self.aggregating.discard(update_id)  # its file was damaged after it was added
                return []
            case AggregationDone(update_id) if update_id.device not in self.vectors:
                self.aggregating.discard(update_id)  # its device was revoked while it was added
                return [RemoveVector(update_id), *self._drop(update_id, "revoked")]
            case DeviceConnected(device):
                return self._readmit(device)
            case DeviceDisconnected(device, "revoked") if device in self.vectors:
                return self._revoke(device)
        return super()._apply(event, now)

    def _message(self, device: str, phase: str, message: bytes) -> list[Action]:
        if phase != self.secure.phase or device not in self.secure.outstanding:
            return []  # a second message, or a late one, is not read
        try:
            if phase == "masked":
                raise BadMessage("a small message in place of masked vectors")
            self.secure.receive(device, message)
        except BadMessage as error:
            self.secure.drop(device)
            return self._mark_lost(device, "protocol", str(error))
        return []

    def _on_reply(self, header: UpdateArrived, now: float) -> list[Action]:
        del now
        device = header.device
        is_due = self.secure.phase == "masked" and device in self.secure.outstanding and not self.shut
        if not is_due or self.assignments.get(device) != header.assignment_id:
            return self._drop(header.update_id, "late")
        self.secure.receive(device)
        self.vectors[device] = self.replied[header.assignment_id] = header.update_id
        self.in_time.add(header.update_id)
        self.aggregating.add(header.update_id)
        return [AggregateUpdate(header.update_id, 0, 1.0, late=False)]

    def _reject(self, update_id: UpdateId, now: float) -> None:
        del now
        if self.vectors.pop(update_id.device, None) is None:
            return
        if update_id in self.aggregated:  # its file was damaged before the sum was built again
            self.aggregated.remove(update_id)
        if self.secure.phase == "masked":
            self.secure.withdraw_vector(update_id.device)
        else:
            why = f"the masked vector of {update_id.device} was damaged after its survivors were shown"
            self._end_without_sum("aborted", why)

    def _revoke(self, device: str) -> list[Action]:
        """Take the vector of a revoked device out of the sum, or end the round if the survivors were shown."""
        if self.secure.phase != "masked":
            self._end_without_sum("aborted", f"{device} was revoked after the survivors were shown")
            return []
        update_id = self.vectors.pop(device)
        self.secure.withdraw_vector(device)
        if update_id not in self.aggregated:
            return []  # the driver has withdrawn it before it was added
        self.aggregated.remove(update_id)
        self.dropped.append(update_id)
        return [RemoveVector(update_id), DropUpdate(update_id, "revoked")]

    def _disconnect(self, device: str, why: str) -> list[Action]:
        return self._lose(device, self.assignments.get(device, ""), "offline", why)

    def _lose(self, device: str, assignment_id: str, kind: str, text: str) -> list[Action]:
        is_known = assignment_id != "" and self.assignments.get(device) == assignment_id
        return self._drop_out(device, kind, text) if is_known and device not in self.lost else []

    def _drop_out(self, device: str, kind: str, text: str) -> list[Action]:
        """Drop a device out of the open phase, or of the next one if it has sent its message of the open phase."""
        if device not in self.secure.outstanding:
            self.left_early[device] = kind, text
            return []
        self.secure.drop(device)
        return self._mark_lost(device, kind, text)

    def _mark_lost(self, device: str, kind: str, text: str) -> list[Action]:
        """Record that a device dropped out; its assignment fails, unless its masked vector is in the sum."""
        self.lost[device] = kind
        if self.assignments[device] in self.replied:
            return []
        return [MarkLost(device, self.assignments[device], kind, text)]

    def _readmit(self, device: str) -> list[Action]:
        """Wait again for a device that reconnected before its phase was closed."""
        if self.left_early.get(device, ("",))[0] == "offline":
            del self.left_early[device]
        if self.lost.get(device) != "offline" or not self.secure.readmit(device):
            return []
        del self.lost[device]
        return [] if self.assignments[device] in self.replied else [Reinstate(device, self.assignments[device])]

    def _stop(self) -> None:
        self.shut = self.shut or "stopped"

    def _begin(self, device: str, assignment_id: str, now: float) -> None:
        del now
        self.assignments[device] = assignment_id

    @property
    def _reported_outstanding(self) -> tuple[str, ...]:
        """Return the devices whose masked vector never came, without a failure of their own."""
        return tuple(
            device
            for device, assignment_id in self.assignments.items()
            if assignment_id not in self.replied and device not in self.lost
        )
