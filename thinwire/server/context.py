"""What one run needs while it goes on: its plan, its past, its model, and the ways to store, fleet and clock."""

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
from thinwire.core.types import ReplyHead, asked_round
from thinwire.server.aggregator import Model
from thinwire.server.distribution import Holders, Sending
from thinwire.server.model_store import Versions
from thinwire.server.policy.cohort import mismatch
from thinwire.server.policy.device_profiles import Known
from thinwire.server.policy.eligibility import Presence, lacking
from thinwire.server.state.backoff import BARRING
from thinwire.server.state.run_state import Past
from thinwire.store import MeasureRow, Store

StopOrder = Literal["run", "service"] | None
RETURN_S = 30.0  # after a restart devices get this long to come back before anything goes on without them
POLL_S = 0.25  # how long an order of a person or the deadline may go unnoticed
MAX_CODEC_LETTERS = 64  # in a reply that names one; the frames themselves decide whether they can be decoded


class Running:
    """A run in the driver's hands. Built from the store alone, so a resumed run is built like a new one."""

    def __init__(
        self,
        run_id: str,
        store: Store,
        fleet: Fleet,
        home: AggregatorHome,
        clock: Clock,
        presence: Presence,
        stop: Callable[[], StopOrder],
        on_event: Callable[[Event], None],
    ) -> None:
        self.run_id, self.store, self.fleet, self.clock, self.presence = run_id, store, fleet, clock, presence
        self.on_event, self._stop = on_event, stop
        self.stopped: StopOrder = None
        row = store.run(run_id)
        self.identity = row.identity
        self.simulated = row.source == "sim"  # its devices are in nobody's roster, and say nothing of others'
        self.plan, self.report = RunPlan.from_json(row.plan), row.task_report
        self.task_layout = Layout.from_json(row.layout)
        self.layout = carried(algorithm_of(self.plan), self.task_layout)  # of all that travels
        self.holders = Holders(self.plan.to_json(), self.plan.digest, self.plan.local.delay + 1)
        self.codec = rungs(self.plan.uplink)[0]
        self.versions = Versions(home.run(run_id), self.layout, home.durable)
        self.past = Past(self.plan.local.delay)
        for seq, event in store.events(run_id):
            self.past.apply(event)
            self._last_found = seq, event.at
        if self.past.bases.model is None and self.plan.run.init != "device":  # which is asked for it first
            raise DataLost(f"run {run_id} has no model", why="it was not handed over whole", hint="thinwire run PLAN")
        self.begin()
        self.known = Known(() if self.simulated else store.measures())
        self.measuring: dict[str, int] = {}  # ask_id -> bytes sent, of asks that only measure
        self.deferred: dict[str, ReplyHead] = {}  # ask_id -> an answer that a round to come takes
        self.came_late: dict[str, bool] = {}  # ask_id of what was deferred -> whether its time was over when it came
        self._clock_base = self.past.elapsed_s - clock.now()
        self.return_by = self.elapsed + (RETURN_S if self.past.rounds_opened or self.past.first.times else 0.0)

    def begin(self) -> None:
        """Go on from the newest version; while there is none, nothing that is sent holds a model."""
        if (stored := self.past.bases.model) is not None:
            params, buffers = self.versions.read(stored)
            state = self.versions.read_state(stored)
            self.model = Model(self.layout, params, buffers, dict(stored.counters), state)
        else:
            self.model = Model(self.layout, np.zeros(self.layout.size, np.float32), np.zeros(0, np.float32), {})
        self.sending = Sending(self.plan, self.versions, self.past, self.model)

    @property
    def elapsed(self) -> float:
        """Seconds on the run's own clock, which stands still while the aggregator is down."""
        return self._clock_base + self.clock.now()

    def record(self, *events: Event, measured: Sequence[MeasureRow] = ()) -> None:
        """Make events durable together, with what was measured of devices; then let them be known."""
        self.store.record(self.run_id, events, measured)
        for event in events:
            self.past.apply(event)
            self.on_event(event)

    def status(self, status: RunStatus, text: str, exit_code: int = 0) -> None:
        """Record what the run is doing, once for each change."""
        if (self.past.status, self.past.status_text) != (status, text):
            self.record(RunStatusChanged(self.clock.wall(), status, text, exit_code))

    def goes_on(self, number: int) -> None:
        """Record that a round which was open when the aggregator ended is taken up, and since when it had been gone."""
        now, elapsed_s = self.clock.wall(), self.elapsed
        gone_at, set_by_s = self.store.gone(*self._last_found, now)
        missed_s = self.past.missed_s(gone_at, now, elapsed_s, set_by_s)
        self.record(RoundTakenUp(now, number, gone_at, elapsed_s, missed_s, set_by_s))
        self.status("running", f"round {number} goes on")

    def stop_ordered(self) -> bool:
        """Whether a person stopped the run or the service is closing; once true it stays true."""
        self.stopped = self.stopped or self._stop()
        return self.stopped is not None

    def closing(self) -> bool:
        """Whether the service is closing, whatever became of the run before."""
        order = self._stop()
        self.stopped = self.stopped or order
        return "service" in (self.stopped, order)

    def ask(self, envelopes: Sequence[Envelope]) -> None:
        """Send asks, and remember whose plan may have to follow."""
        self.holders.asked(envelopes)
        self.sending.asked(envelopes)
        self.measuring |= {e.ask.ask_id: _length(e) for e in envelopes if e.ask.kind == "evaluate"}
        self.fleet.send(envelopes)

    def poll(self, wait_s: float) -> Iterable[Arrival]:
        """What came in, presence already noted.

        An ask whose plan was not there any more is sent again with it: nobody else hears of that.
        """
        found = list[Arrival]()
        for arrival in self.fleet.poll(wait_s):
            anew = self.presence.take(arrival)
            if isinstance(arrival, ReplyHead):
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
        """The same ask with the whole model, and the bytes of that counted."""
        ask = envelope.ask
        if ask.kind == "evaluate":
            self.measuring[ask.ask_id] += _length(envelope)
        else:
            self.record(AskedInFull(self.clock.wall(), ask.round, envelope.device, ask.ask_id, _length(envelope)))
        self.holders.asked([envelope])
        self.sending.asked([envelope])
        self.fleet.send([envelope])

    def failed(self, number: int, device: str, ask_id: str, kind: str, text: str) -> ClientFailed:
        """The fact that a round's ask is not answered; that the run is over is not for a device to say."""
        if kind == OVER:
            kind, text = "protocol", f"it says that the run is over: {text}"
        if kind == "layout-mismatch" and (hello := self.presence.hellos.get(device)) is not None:
            text = mismatch(self.plan, self.report, hello, self.task_layout) or text
        said = self.presence.said(device) if kind in BARRING else ""
        return ClientFailed(self.clock.wall(), number, device, ask_id, kind, text, self.elapsed, said)

    def lose(self, device: str, kind: str, text: str, ask_id: str) -> None:
        """Give up on an answer to another round's ask, so that the device can be asked again."""
        asked = self.past.owed.of(device)[ask_id]
        self.record(self.failed(asked, device, ask_id, kind, text))
        self.fleet.cancel([ask_id])

    def wrong(self, head: ReplyHead) -> tuple[str, str] | None:
        """Why this cannot be an update of this run, as a failure's kind and text: heads come from strangers.

        Only an ask that went to this very device can be answered, with frames, and from the model that it named.
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

    def codec_of(self, head: ReplyHead) -> str:
        """The codec that this was asked in: a late answer's, and another device's, may be another than most have."""
        device = head.update_id.device
        return self.past.codecs.of(self.past.round_of(device, head.ask_id), device) or self.codec

    def steps_of(self, head: ReplyHead) -> int:
        """The steps that were assigned with what this answers; 0 where the plan counts passes over a device's data."""
        steps = self.plan.local.steps
        if steps == "auto":
            work = self.past.paces.work(head.update_id.device, head.ask_id)
            return work[0] if work else 0
        return steps or 0

    def revoked(self) -> frozenset[str]:
        """Devices that were shut out: of theirs only what is folded counts."""
        return frozenset() if self.simulated else self.store.roster.revoked()

    def forget(self, device: str) -> None:
        """Drop what a device that was shut out had sent for a later round."""
        gone = [head for head in self.deferred.values() if head.update_id.device == device]
        self.fleet.ack([self.deferred.pop(head.ask_id).update_id for head in gone])

    def defer(self, head: ReplyHead) -> None:
        """Keep an answer for the next round: one for each ask."""
        self.came_late.setdefault(head.ask_id, self.elapsed >= self.past.owed.due.get(head.update_id.device, math.inf))
        if self.deferred.setdefault(head.ask_id, head).update_id != head.update_id:
            self.fleet.ack([head.update_id])

    def still_due(self) -> dict[str, dict[str, int]]:
        """What has not been answered, in the order asked: ask_id -> round of each device.

        What came too late for its round, and is kept for the next to open, is answered. What came too early counts as
        due until its round's turn comes: a device is not to have more under way than the delay allows.
        """
        late = self.kept_late()
        owed = {device: self.past.owed.of(device) for device in self.past.owed.busy}
        return {device: {id_: of for id_, of in asks.items() if id_ not in late} for device, asks in owed.items()}

    def kept_late(self) -> set[str]:
        """The asks of closed rounds whose answers are kept for the next round to open."""
        return {ask_id for ask_id in self.deferred if not self.past.line.of(asked_round(ask_id))}

    def returning(self) -> set[str]:
        """Devices that were there before the aggregator was started again, may come and still have time to."""
        if self.elapsed >= self.return_by:
            return set()
        away = self.past.here - set(self.presence.hellos)
        return away - self.revoked() if away else away

    def unable(self) -> dict[str, str]:
        """Devices that are there and cannot take part, with the reason."""
        found = {name: self._unfit(hello) for name, hello in self.presence.hellos.items()}
        barred = self.past.barred.now(self.elapsed, self.presence.said)
        return {name: why for name, why in found.items() if why} | {
            name: why for name, why in barred.items() if name in self.presence.hellos
        }

    def able(self, device: str) -> bool:
        """Whether it is there and can take part."""
        hello = self.presence.hellos.get(device)
        if hello is None or self._unfit(hello):
            return False
        return not self.past.barred.bars(device, self.elapsed, self.presence.said)

    def _unfit(self, hello: Hello) -> str:
        """Why the plan's work is not for this device; a simulated client is no machine, and lacks nothing."""
        why = mismatch(self.plan, self.report, hello, self.task_layout)
        return why if why or self.simulated else lacking(self.plan.cohort.requires, hello.has)


def _length(envelope: Envelope) -> int:
    return sum(part.length for part in envelope.ask.parts)
