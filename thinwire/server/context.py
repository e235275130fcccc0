"""All drivers of one run share its context: plan, state, model, and access to store, fleet and clock.

Every driver of the run (`run.py`, `round_runner.py`, `recovery.py` and others) works on the same `RunContext`. It
records events, sends assignments, polls arrivals, and keeps replies that no round accepts yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from thinwire.aggregation.control_variates import algorithm_of, carried
from thinwire.aggregation.plan_codecs import rungs
from thinwire.core.clock import Clock
from thinwire.core.errors import DataLost
from thinwire.core.events import OVER, AskedInFull, ClientFailed, Event, RoundTakenUp, RunStatus, RunStatusChanged
from thinwire.core.fleet import Arrival, Envelope, Fleet, Hello
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import ReplyHeader, asked_round
from thinwire.server.aggregator import Model
from thinwire.server.distribution import ModelDistributor, PlanCache
from thinwire.server.model_store import Versions
from thinwire.server.policy.cohort import mismatch
from thinwire.server.policy.device_profiles import DeviceProfiles
from thinwire.server.policy.eligibility import ConnectedDevices, lacking
from thinwire.server.state.backoff import BARRING
from thinwire.server.state.run_state import RunState
from thinwire.store import MeasureRow, Store

StopOrder = Literal["run", "service"] | None
RETURN_S = 30.0  # after a restart the run waits this long for devices to reconnect before it continues without them
POLL_S = 0.25  # how long a person's command or a deadline may go unnoticed
MAX_CODEC_LETTERS = 64  # in a reply that names a codec; the frames themselves decide whether they can be decoded


class RunContext:
    """Holds everything that the drivers of one run share.

    Invariant: it is built from the store alone, so a resumed run is built like a new one.
    """

    def __init__(
        self,
        run_id: str,
        store: Store,
        fleet: Fleet,
        home: AggregatorHome,
        clock: Clock,
        presence: ConnectedDevices,
        stop: Callable[[], StopOrder],
        on_event: Callable[[Event], None],
    ) -> None:
        self.run_id, self.store, self.fleet, self.clock, self.presence = run_id, store, fleet, clock, presence
        self.on_event, self._stop = on_event, stop
        self.stopped: StopOrder = None
        row = store.run(run_id)
        self.identity = row.identity
        self.simulated = row.source == "sim"  # its devices are not enrolled, and their speed is not kept
        self.plan, self.report = RunPlan.from_json(row.plan), row.task_report
        self.task_layout = Layout.from_json(row.layout)
        self.layout = carried(algorithm_of(self.plan), self.task_layout)  # of every vector that is sent
        self.holders = PlanCache(self.plan.to_json(), self.plan.digest, self.plan.local.delay + 1)
        self.codec = rungs(self.plan.uplink)[0]
        self.versions = Versions(home.run(run_id), self.layout, home.durable)
        self.past = RunState(self.plan.local.delay)
        for seq, event in store.events(run_id):
            self.past.apply(event)
            self._last_found = seq, event.at
        if self.past.bases.model is None and self.plan.run.init != "device":  # a device may make it
            raise DataLost(f"run {run_id} has no model", why="it was not handed over whole", hint="thinwire run PLAN")
        self.begin()
        self.known = DeviceProfiles(() if self.simulated else store.measures())
        self.measuring: dict[str, int] = {}  # ask_id -> bytes sent, of assignments that only evaluate
        self.deferred: dict[str, ReplyHeader] = {}  # ask_id -> a reply that a later round handles
        self.came_late: dict[str, bool] = {}  # ask_id of a deferred reply -> whether it was late when it arrived
        self._clock_base = self.past.elapsed_s - clock.now()
        self.return_by = self.elapsed + (RETURN_S if self.past.rounds_opened or self.past.first.times else 0.0)

    def begin(self) -> None:
        """Load the newest model version and prepare its distribution; without a version, assignments carry no model."""
        if (stored := self.past.bases.model) is not None:
            params, buffers = self.versions.read(stored)
            state = self.versions.read_state(stored)
            self.model = Model(self.layout, params, buffers, dict(stored.counters), state)
        else:
            self.model = Model(self.layout, np.zeros(self.layout.size, np.float32), np.zeros(0, np.float32), {})
        self.sending = ModelDistributor(self.plan, self.versions, self.past, self.model)

    @property
    def elapsed(self) -> float:
        """Return the seconds on the run's own clock, which stops while the aggregator is down."""
        return self._clock_base + self.clock.now()

    def record(self, *events: Event, measured: Sequence[MeasureRow] = ()) -> None:
        """Make events and measurements of devices durable in one transaction, then apply the events and
        publish them.
        """
        self.store.record(self.run_id, events, measured)
        for event in events:
            self.past.apply(event)
            self.on_event(event)

    def status(self, status: RunStatus, text: str, exit_code: int = 0) -> None:
        """Record the status of the run, once for each change."""
        if (self.past.status, self.past.status_text) != (status, text):
            self.record(RunStatusChanged(self.clock.wall(), status, text, exit_code))

    def goes_on(self, number: int) -> None:
        """Record that this round is resumed after a restart, with the downtime of the aggregator."""
        now, elapsed_s = self.clock.wall(), self.elapsed
        gone_at, set_by_s = self.store.gone(*self._last_found, now)
        missed_s = self.past.missed_s(gone_at, now, elapsed_s, set_by_s)
        self.record(RoundTakenUp(now, number, gone_at, elapsed_s, missed_s, set_by_s))
        self.status("running", f"round {number} goes on")

    def stop_ordered(self) -> bool:
        """Return True if a person stopped the run or the service is closing; once True it stays True."""
        self.stopped = self.stopped or self._stop()
        return self.stopped is not None

    def closing(self) -> bool:
        """Return True if the service is closing, even if a person stopped the run before."""
        order = self._stop()
        self.stopped = self.stopped or order
        return "service" in (self.stopped, order)

    def ask(self, envelopes: Sequence[Envelope]) -> None:
        """Send assignments, and remember them in case a device needs the plan or the whole model with one."""
        self.holders.asked(envelopes)
        self.sending.asked(envelopes)
        self.measuring |= {e.ask.ask_id: _length(e) for e in envelopes if e.ask.kind == "evaluate"}
        self.fleet.send(envelopes)

    def poll(self, wait_s: float) -> Iterable[Arrival]:
        """Return what arrived within `wait_s` seconds, after noting which devices are connected.

        A device may lack the plan, or the version that an assignment builds on. Then the assignment is sent again with
        the missing part, and the callers do not see this failure.
        """
        found = list[Arrival]()
        for arrival in self.fleet.poll(wait_s):
            anew = self.presence.take(arrival)
            if isinstance(arrival, ReplyHeader):
                self.sending.holds(arrival.update_id.device)
            if (again := self.holders.take(arrival, anew)) is not None:
                self.sending.asked([again])
                self.fleet.send([again])
            elif (again := self.sending.take(arrival)) is not None:
                self._again_in_full(again)
            else:
                found.append(arrival)
        return found

    def _again_in_full(self, envelope: Envelope) -> None:
        """Send the same assignment with the whole model, and count its bytes."""
        ask = envelope.ask
        if ask.kind == "evaluate":
            self.measuring[ask.ask_id] += _length(envelope)
        else:
            self.record(AskedInFull(self.clock.wall(), ask.round, envelope.device, ask.ask_id, _length(envelope)))
        self.holders.asked([envelope])
        self.sending.asked([envelope])
        self.fleet.send([envelope])

    def failed(self, number: int, device: str, ask_id: str, kind: str, text: str) -> ClientFailed:
        """Return the event that an assignment gets no reply.

        A device cannot report that the run is over: a failure of that kind becomes `protocol`.
        """
        if kind == OVER:
            kind, text = "protocol", f"it says that the run is over: {text}"
        if kind == "layout-mismatch" and (hello := self.presence.hellos.get(device)) is not None:
            text = mismatch(self.plan, self.report, hello, self.task_layout) or text
        said = self.presence.said(device) if kind in BARRING else ""
        return ClientFailed(self.clock.wall(), number, device, ask_id, kind, text, self.elapsed, said)

    def lose(self, device: str, kind: str, text: str, ask_id: str) -> None:
        """Give up an assignment of another round, so that its device can be selected again."""
        asked = self.past.owed.of(device)[ask_id]
        self.record(self.failed(asked, device, ask_id, kind, text))
        self.fleet.cancel([ask_id])

    def wrong(self, head: ReplyHeader) -> tuple[str, str] | None:
        """Return kind and text of the failure if a reply is not a valid update of this run, otherwise None.

        Headers come from devices and are not trusted. A reply is valid only if its assignment went to the same device.
        It must have frames, and start from the version that the assignment named.
        """
        if head.update_id.device in self.revoked():
            return "refused", "revoked"
        if not (asked := self.past.round_of(head.update_id.device, head.ask_id)):
            return "protocol", "it answers what it was not asked"
        if not head.parts:
            return "protocol", "an answer without frames"
        if head.base_version != (base := self.past.bases.asked_from[asked]):
            return "base-mismatch", f"trained from version {head.base_version}, asked from {base}"
        if len(head.codec) > max(MAX_CODEC_LETTERS, len(self.codec_of(head))):
            return "protocol", f"it names a codec in {len(head.codec)} letters, and was asked in a shorter one"
        return None

    def codec_of(self, head: ReplyHeader) -> str:
        """Return the codec that was assigned for this reply.

        The codec of a late reply, or of another device, may differ from the codec of most devices.
        """
        device = head.update_id.device
        return self.past.codecs.of(self.past.round_of(device, head.ask_id), device) or self.codec

    def steps_of(self, head: ReplyHeader) -> int:
        """Return the steps that were assigned for this reply; 0 if the plan counts epochs instead."""
        steps = self.plan.local.steps
        if steps == "auto":
            work = self.past.paces.work(head.update_id.device, head.ask_id)
            return work[0] if work else 0
        return steps or 0

    def revoked(self) -> frozenset[str]:
        """Return the revoked devices; of their updates only those that are aggregated already count."""
        return frozenset() if self.simulated else self.store.roster.revoked()

    def forget(self, device: str) -> None:
        """Drop the deferred replies of a revoked device."""
        gone = [head for head in self.deferred.values() if head.update_id.device == device]
        self.fleet.ack([self.deferred.pop(head.ask_id).update_id for head in gone])

    def defer(self, head: ReplyHeader) -> None:
        """Keep a reply for a later round: one for each assignment."""
        self.came_late.setdefault(head.ask_id, self.elapsed >= self.past.owed.due.get(head.update_id.device, math.inf))
        if self.deferred.setdefault(head.ask_id, head).update_id != head.update_id:
            self.fleet.ack([head.update_id])

    def still_due(self) -> dict[str, dict[str, int]]:
        """Return device -> `ask_id` -> round of unanswered assignments, in the order of selection.

        An assignment of a closed round counts as answered if its late reply is deferred to the next round. An
        assignment of a pipelined round counts as unanswered until that round is current, even if its reply arrived
        early. Otherwise a device could have more assignments at once than the delay allows.
        """
        late = self.kept_late()
        owed = {device: self.past.owed.of(device) for device in self.past.owed.busy}
        return {device: {id_: of for id_, of in asks.items() if id_ not in late} for device, asks in owed.items()}

    def kept_late(self) -> set[str]:
        """Return the assignments of closed rounds whose replies are deferred to the next round."""
        return {ask_id for ask_id in self.deferred if not self.past.line.of(asked_round(ask_id))}

    def returning(self) -> set[str]:
        """Return the devices that were connected before a restart, may reconnect, and still have time to."""
        if self.elapsed >= self.return_by:
            return set()
        away = self.past.here - set(self.presence.hellos)
        return away - self.revoked() if away else away

    def unable(self) -> dict[str, str]:
        """Return device -> reason for the connected devices that cannot take part now."""
        found = {name: self._unfit(hello) for name, hello in self.presence.hellos.items()}
        barred = self.past.barred.now(self.elapsed, self.presence.said)
        return {name: why for name, why in found.items() if why} | {
            name: why for name, why in barred.items() if name in self.presence.hellos
        }

    def able(self, device: str) -> bool:
        """Return True if the device is connected and can take part now."""
        hello = self.presence.hellos.get(device)
        if hello is None or self._unfit(hello):
            return False
        return not self.past.barred.bars(device, self.elapsed, self.presence.said)

    def _unfit(self, hello: Hello) -> str:
        """Return the reason why the device does not fit the plan; "" if it fits.

        A simulated client is not a machine, so the plan's requirements on machines do not apply to it.
        """
        why = mismatch(self.plan, self.report, hello, self.task_layout)
        return why if why or self.simulated else lacking(self.plan.cohort.requires, hello.has)


def _length(envelope: Envelope) -> int:
    """Return the bytes of the envelope's parts."""
    return sum(part.length for part in envelope.ask.parts)
