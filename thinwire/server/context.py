"""All drivers of one run share its context: plan, state, model, and access to store, fleet and clock.

Every driver of the run (`run.py`, `round_runner.py`, `recovery.py` and others) works on the same `RunContext`. It
records events, sends assignments, polls arrivals, and keeps replies that no round accepts yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.plan_codecs import LATTICE, rungs
from thinwire.core.clock import Clock
from thinwire.core.errors import DataLost
from thinwire.core.events import (
    OVER,
    ClientFailed,
    Event,
    FullModelSent,
    RoundOpened,
    RoundResumed,
    RunStatus,
    RunStatusChanged,
)
from thinwire.core.fleet import Arrival, Envelope, Fleet
from thinwire.core.formatting import counted
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, AssignmentKind, Failure, ReplyHeader, assignment_round
from thinwire.server.aggregator import Model
from thinwire.server.leases import DeviceLeases, RunShare
from thinwire.server.model_store import ModelDistributor, PlanCache, SentAssignments, Versions
from thinwire.server.policy.assignment_terms import work_of
from thinwire.server.policy.cohort import device_shortage, wait_reason
from thinwire.server.policy.eligibility import EXCLUDING_FAILURES, ConnectedDevices, Eligibility, mismatch
from thinwire.server.state import snapshot
from thinwire.server.state.assignment_ledger import AssignmentRecord
from thinwire.server.state.run_state import empty_state
from thinwire.store import MeasureRow, Store
from thinwire.store.device_profiles import DeviceProfiles

if TYPE_CHECKING:
    from thinwire.server.round_mode import RoundMode

StopCommand = Literal["run", "after-round", "service"] | None
MIN_WAIT_S = 1e-6  # a shorter wait may not advance a clock
RECONNECT_S = 30.0  # after a restart the run waits this long for devices to reconnect before it continues without them
POLL_S = 0.25  # how long a person's command or a deadline may go unnoticed


@dataclass(frozen=True)
class RunCommands:
    """The commands of people about one run, which its drivers read often.

    `stop` returns "run" to end it for good, "after-round" to do so when the open round has closed, and "service" to
    leave it to the next start. While `paused` returns a text, no round opens, and the text ends the status.
    """

    stop: Callable[[], StopCommand] = lambda: None
    paused: Callable[[], str | None] = lambda: None


class RunContext:
    """Holds everything that the drivers of one run share.

    Invariant: it is built from the store alone, so a resumed run is built like a new one.
    """

    def __init__(
        self, run_id: str, store: Store, fleet: Fleet, home: AggregatorHome, clock: Clock,
        online: ConnectedDevices, leases: DeviceLeases, commands: RunCommands, on_event: Callable[[Event], None],
        mode_of: Callable[[RunPlan], RoundMode],
    ) -> None:  # fmt: skip
        self.run_id, self.store, self.fleet, self.clock, self.online = run_id, store, fleet, clock, online
        self.home, self.commands, self.on_event, self.leases = home, commands, on_event, leases
        self.stopped: StopCommand = None
        self.in_round = False  # a round is driven: a command to stop after the round waits for its close
        row = store.run(run_id)
        self.identity = row.identity
        self.simulated = row.source == "sim"  # its devices are not enrolled, and their speed is not kept
        self.plan, self.report = RunPlan.from_json(row.plan), row.task_report
        self.mode = mode_of(self.plan)
        self.task_layout = Layout.from_json(row.layout)
        self.layout = transmitted_layout(algorithm_of(self.plan), self.task_layout)  # of every vector that is sent
        self.plan_cache = PlanCache(self.plan.to_json(), self.plan.digest)
        self.sent = SentAssignments(self.mode.delay + 1, self.plan_cache)
        self.codec = LATTICE if self.plan.secure.enabled else rungs(self.plan.uplink)[0]
        self.versions = Versions(home.run(run_id), self.layout, home.durable, hides=self.plan.privacy.mode != "off")
        self.run_state, later = snapshot.restore(store, run_id, empty_state(self.plan))
        self._events_since_snapshot = 0
        for seq, event in later:
            self.run_state.apply(event)
            self._events_since_snapshot += 1
            self._last_event = seq, event.at
        if self.run_state.bases.model is None and self.plan.run.init != "device":  # a device may make it
            raise DataLost(f"run {run_id} has no model", why="it was not handed over whole", hint="thinwire run PLAN")
        self.on_poll: Callable[[], None] = lambda: None  # called before each poll
        self.mode.reveal(self, starts=True)
        self.begin()
        self.device_profiles = DeviceProfiles(() if self.simulated else store.measures())
        self.evaluation_bytes: dict[str, int] = {}  # assignment_id -> bytes sent, of assignments that only evaluate
        self.deferred: dict[str, ReplyHeader] = {}  # assignment_id -> a reply that a later round handles
        self.came_late: dict[str, bool] = {}  # assignment_id of a deferred reply -> whether it was late when it arrived
        self.unread = list[Arrival]()  # arrivals during a long step, which the next poll returns
        self._clock_base = self.run_state.elapsed_s - clock.now()
        self._paused_at_s: float | None = None  # what the run's clock shows while it is stopped
        self.eligibility = Eligibility(self.plan, self.report, self.task_layout, self.simulated, online, self._excluded)
        begun = self.run_state.rounds_opened or self.run_state.first.times
        self.reconnect_until_s = self.elapsed + (RECONNECT_S if begun else 0.0)
        self.resume()

    def begin(self) -> None:
        """Load the newest model version and prepare its distribution; without a version, assignments carry no model."""
        if (stored := self.run_state.bases.model) is not None:
            params, buffers = self.versions.read(stored)
            state = self.versions.read_state(stored)
            self.model = Model(self.layout, params, buffers, dict(stored.counters), state)
        else:
            self.model = Model(self.layout, np.zeros(self.layout.size, np.float32), np.zeros(0, np.float32), {})
        self.sent.models = self.distributor = ModelDistributor(self.plan, self.versions, self.run_state, self.model)

    @property
    def elapsed(self) -> float:
        """Return the seconds on the run's own clock, which stops while the aggregator is down or the run is paused."""
        return self._clock_base + self.clock.now() if self._paused_at_s is None else self._paused_at_s

    def pause(self) -> None:
        """Stop the run's clock, and leave the devices to other runs."""
        self._paused_at_s = self.elapsed
        self.leases.leave(self.run_id)

    def resume(self) -> None:
        """Start the run's clock again, and share the devices with other runs."""
        begins = not self.run_state.rounds_opened or self._paused_at_s is not None or self.run_state.status == "queued"
        if self._paused_at_s is not None:
            self._clock_base, self._paused_at_s = self._paused_at_s - self.clock.now(), None
        share = RunShare(
            self.run_id, self.plan.run.priority, self.run_state.ledger, lambda: self.elapsed, lambda: self.deferred,
            leases=self.mode.shares_devices, holds_until_close=self.plan.secure.enabled,
        )  # fmt: skip
        self.leases.join(share, begins)

    def record(self, *events: Event, measured: Sequence[MeasureRow] = ()) -> None:
        """Make events and measurements durable in one transaction, then apply and publish the events."""
        self.store.record(self.run_id, events, measured, self._snapshot(events))
        self._events_since_snapshot += len(events)
        for event in events:
            self.run_state.apply(event)
            self.on_event(event)

    def _snapshot(self, events: Sequence[Event]) -> str:
        """Return a snapshot if these events open a round, and it is time for one; "" otherwise."""
        opened = None if self.simulated else next((e for e in events if isinstance(e, RoundOpened)), None)
        if opened is None:
            return ""
        if opened.round % snapshot.SNAPSHOT_ROUNDS and self._events_since_snapshot < snapshot.SNAPSHOT_EVENTS:
            return ""
        self._events_since_snapshot = 0
        return snapshot.serialize(self.run_state)

    def status(self, status: RunStatus, text: str, exit_code: int = 0) -> None:
        """Record the status of the run, once for each change."""
        if (self.run_state.status, self.run_state.status_text) != (status, text):
            self.record(RunStatusChanged(self.clock.wall(), status, text, exit_code))

    def record_resumed(self, number: int) -> None:
        """Record that this round is resumed after a restart, with the downtime of the aggregator."""
        now, elapsed_s = self.clock.wall(), self.elapsed
        down_since = self.store.down_since(*self._last_event)
        missed_s = self.run_state.missed_s(down_since, now, elapsed_s)
        self.record(RoundResumed(now, number, down_since, elapsed_s, missed_s))
        self.status("running", f"round {number} goes on")

    def must_stop(self) -> bool:
        """Return True if a person stopped the run or the service is closing; once True it stays True."""
        self.stopped = self.stopped or self._stop_command()
        return self.stopped is not None

    def _stop_command(self) -> StopCommand:
        """Return how the run must stop now; the command "after-round" waits for the close of a driven round."""
        command = self.commands.stop()
        if command == "after-round":
            return None if self.in_round or self.run_state.steps_made >= self.plan.run.rounds else "run"
        return command

    def closing(self) -> bool:
        """Return True if the service is closing, even if a person stopped the run before."""
        command = self._stop_command()
        self.stopped = self.stopped or command
        return "service" in (self.stopped, command)

    def assign(self, envelopes: Sequence[Envelope]) -> None:
        """Send assignments, and remember them in case a device needs the plan or the whole model with one."""
        self.sent.remember(envelopes)
        evaluating = [one for one in envelopes if one.assignment.kind == "evaluate"]
        self.evaluation_bytes |= {one.assignment.assignment_id: _length(one) for one in evaluating}
        self.fleet.send(envelopes)

    def training_envelope(self, assignment_id: str) -> Envelope:
        """Return an assignment to train, on the newest model version.

        It carries the outcomes of the device's updates and the parts of the model that the device needs.
        """
        assigned = self.run_state.ledger.find(assignment_id)
        assert assigned is not None, "an assignment without a reply is not forgotten"
        return self._envelope(assigned.device, assignment_id, "train", assigned.round, assigned.deadline_s)

    def training_envelope_again(self, assignment_id: str) -> Envelope:
        """Return an outstanding assignment on the model version with which its round opened, which may be old."""
        made, assigned = self.training_envelope(assignment_id), self.run_state.ledger.find(assignment_id)
        assert assigned is not None
        base = self.run_state.bases.of(assigned.base_version)
        payload = self.distributor.full_payload(base)
        assignment = replace(made.assignment, base_version=base.version, base_digest=base.digest, parts=payload.parts)
        return Envelope(made.device, assignment, self.distributor.bundle(payload))

    def evaluation_envelope(self, device: str, assignment_id: str, deadline_s: float) -> Envelope:
        """Return an assignment to evaluate the newest model version."""
        return self._envelope(device, assignment_id, "evaluate", self.run_state.rounds_opened, deadline_s)

    def _envelope(
        self, device: str, assignment_id: str, kind: AssignmentKind, number: int, deadline_s: float
    ) -> Envelope:
        state, plan = self.run_state, self.plan
        base, payload = state.bases.newest, self.distributor.payload_for(device, but=assignment_id)
        assigned = state.ledger.find(assignment_id)
        together = self.mode.summed_together(self, number) if kind == "train" else 0
        assignment = Assignment(
            assignment_id=assignment_id,
            run=self.run_id,
            task=plan.run.task,
            kind=kind,
            plan=self.plan_cache.plan_for(device, self.online.hellos.get(device)),
            round=number,
            base_version=base.version,
            base_digest=base.digest,
            layout_digest=self.task_layout.digest,
            codec=(assigned.codec if assigned else "") or self.codec,
            work=work_of(plan, together, assigned.work if assigned else None),
            deadline_s=deadline_s,
            parts=payload.parts,
            references_from=state.references_from,
            outcomes=state.ledger.outcomes.of(device, state.kept, assigned if state.ledger.pipelined else None),
            is_follow_up=state.ledger.is_follow_up(assignment_id),
            identity=self.identity,
            secure=self.mode.secure_work(self, number) if kind == "train" else None,
            evaluates=assigned.evaluates if assigned else True,
        )
        return Envelope(device, assignment, self.distributor.bundle(payload))

    def poll(self, wait_s: float) -> Iterable[Arrival]:
        """Return what arrived within `wait_s` seconds, after noting which devices are connected.

        A device may lack the plan, or the version that an assignment builds on. Then the assignment is sent again with
        the missing part, and the callers do not see this failure.
        """
        self.on_poll()
        found, unread, self.unread = list[Arrival](), self.unread, []
        # The run's seconds are a sum of floats. A wait of 1e-15 s would not advance a clock, so it would never end.
        wait_s = max(wait_s, MIN_WAIT_S) if wait_s > 0 and not unread else 0.0
        for arrival in [*unread, *self.fleet.poll(wait_s)]:
            restarted = self.online.apply(arrival)
            if (again := self.sent.envelope_to_resend(arrival, restarted)) is None:
                found.append(arrival)
            else:
                if isinstance(arrival, Failure) and arrival.kind == "base-mismatch":
                    self._count_full_model(again)
                self.fleet.send([again])
        return found

    def _count_full_model(self, envelope: Envelope) -> None:
        """Count the bytes of an assignment that is sent again with the whole model."""
        assignment = envelope.assignment
        if assignment.kind == "evaluate":
            self.evaluation_bytes[assignment.assignment_id] += _length(envelope)
        else:
            self.record(
                FullModelSent(
                    self.clock.wall(), assignment.round, envelope.device, assignment.assignment_id, _length(envelope)
                )
            )

    def failure_event(self, number: int, device: str, assignment_id: str, kind: str, text: str) -> ClientFailed:
        """Return the event that an assignment gets no reply.

        A device cannot report that the run is over: a failure of that kind becomes `protocol`.
        """
        if kind == OVER:
            kind, text = "protocol", f"it says that the run is over: {text}"
        if kind == "layout-mismatch" and (hello := self.online.hellos.get(device)) is not None:
            text = mismatch(self.plan, self.report, hello, self.task_layout) or text
        digest = self.online.report_digest(device) if kind in EXCLUDING_FAILURES else ""
        return ClientFailed(self.clock.wall(), number, device, assignment_id, kind, text, self.elapsed, digest)

    def lose(self, device: str, kind: str, text: str, assignment_id: str) -> None:
        """Give up an assignment of another round, so that its device can be selected again."""
        assigned = self.run_state.ledger.find(assignment_id)
        assert assigned is not None, "an assignment without a reply is not forgotten"
        self.record(self.failure_event(assigned.round, device, assignment_id, kind, text))
        self.fleet.cancel([assignment_id])

    def revoked(self) -> frozenset[str]:
        """Return the revoked devices; of their updates only those that are aggregated already count."""
        return frozenset() if self.simulated else self.store.roster.revoked()

    def forget(self, device: str) -> None:
        """Drop the deferred replies of a revoked device."""
        gone = [header for header in self.deferred.values() if header.update_id.device == device]
        self.fleet.ack([self.deferred.pop(header.assignment_id).update_id for header in gone])

    def defer(self, header: ReplyHeader) -> None:
        """Keep a reply for a later round: one for each assignment."""
        assigned = self.run_state.ledger.find(header.assignment_id, header.update_id.device)
        self.came_late.setdefault(header.assignment_id, assigned is not None and self.elapsed >= assigned.due_s)
        if self.deferred.setdefault(header.assignment_id, header).update_id != header.update_id:
            self.fleet.ack([header.update_id])

    def take_deferred(self) -> Collection[ReplyHeader]:
        """Return the deferred replies, in the order of their arrival, for a round that handles each of them.

        A reply that the round defers again stays late or in time, as it was when it arrived.
        """
        deferred, self.deferred = self.deferred, {}
        self.came_late = {assignment_id: self.came_late[assignment_id] for assignment_id in deferred}
        return deferred.values()

    def outstanding(self) -> dict[str, list[AssignmentRecord]]:
        """Return device -> outstanding assignments, in the order of selection.

        An assignment of a closed round counts as answered if its late reply is deferred to the next round. An
        assignment of a pipelined round counts as outstanding until that round is current, even if its reply arrived
        early. Otherwise a device could have more assignments at once than the delay allows.
        """
        late, ledger = self.deferred_late(), self.run_state.ledger
        return {
            device: [one for one in ledger.outstanding(device) if one.assignment_id not in late]
            for device in ledger.busy
        }

    def deferred_late(self) -> set[str]:
        """Return the assignments of closed rounds whose replies are deferred to the next round."""
        open_rounds = self.run_state.open_rounds
        return {assignment_id for assignment_id in self.deferred if not open_rounds.of(assignment_round(assignment_id))}

    def may_reconnect(self) -> set[str]:
        """Return the devices that were connected before a restart and may still reconnect in time."""
        if self.elapsed >= self.reconnect_until_s:
            return set()
        away = self.mode.connected(self) - set(self.online.hellos)
        return away - self.revoked() if away else away

    def waits_for(self, blocked: str = "") -> str | None:
        """Return why the run waits: `blocked`, a reason of its mode, and the devices it lacks; None if it need not."""
        begun, devices, unable = self.run_state.rounds_opened > 0, self.online.names, self.eligibility.reasons()
        known, away = self.store.roster.count_known, self.may_reconnect() if begun else ()
        absent = reconnect_text(away) if away else wait_reason(self.plan, devices, unable, begun, known)
        if blocked or absent:
            self.leases.wait_for_offline(self.run_id)
            return "; ".join(filter(None, (blocked, absent)))
        if refusal := self.leases.begin(self.run_id):
            return refusal
        leased = self.leases.reasons(self.run_id, [device for device in devices if device not in unable])
        shortage = device_shortage(self.plan, devices, unable, leased) if leased else ""
        self.leases.want(self.run_id, set(devices) - unable.keys() if shortage else ())
        if shortage:
            users = self.leases.competing_runs(self.run_id)
            return f"waiting for devices that {' and '.join(users)} {'use' if users[1:] else 'uses'}: {shortage}"
        return None

    def is_free(self, device: str) -> bool:
        """Return True if the device can be selected now and has no outstanding assignment."""
        idle = device not in self.run_state.ledger.busy and not self.eligibility.reason(device)
        return idle and not self.leases.reason(self.run_id, device)

    def unable(self) -> dict[str, str]:
        """Return device -> reason for the connected devices that no round of this run may select now."""
        found = self.eligibility.reasons()
        return found | self.leases.reasons(self.run_id, [one for one in self.online.hellos if one not in found])

    def _excluded(self, device: str) -> str:
        why = self.run_state.backoff.reason(device, self.elapsed, self.online.report_digest)
        return why or self.mode.excluded(self, device)


def _length(envelope: Envelope) -> int:
    """Return the bytes of the envelope's parts."""
    return sum(part.length for part in envelope.assignment.parts)


def reconnect_text(away: Collection[str]) -> str:
    """Return the status text of a run that waits for these devices to reconnect."""
    return f"waiting for {counted(len(away), 'device')} to reconnect ({', '.join(sorted(away)[:5])})"
