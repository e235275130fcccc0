"""End of a run: its last model is evaluated, its outcome and that of each assignment are recorded, its devices are
notified.

Devices may miss the notice because they, or the aggregator, were offline when the run ended. They get it when they
connect the next time. A device that gets the notice twice does the same as after the first one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from thinwire.core.clock import Clock
from thinwire.core.events import RunStatus, RunStatusChanged
from thinwire.core.fleet import Envelope, Fleet
from thinwire.core.plan import digest_of
from thinwire.core.statedir import AggregatorHome, dead_owner
from thinwire.core.types import Ask, Failure, ReplyHeader, Verdict, measuring_id_of
from thinwire.server.context import POLL_S, RunContext
from thinwire.server.dispatch import envelope, verdicts_of
from thinwire.server.evaluation import evaluation, reached, require_metrics, settled
from thinwire.server.idle import come_back
from thinwire.server.pipelining import dissolve
from thinwire.server.policy.deadlines import evaluation_deadline
from thinwire.server.state.assignment_ledger import UnresolvedAssignments
from thinwire.store import RunRow, Store

UNOWNED_S = 60.0  # a run has its owner file within milliseconds of its row; runs of early versions have none


def version_that_reached(running: RunContext) -> int | None:
    """Return the first version that met the target, or None; a worse evaluation of a later version changes nothing."""
    if (target := running.plan.run.target) is None:
        return None
    scores = running.past.scores
    counted = ((version, found) for version, found in scores.evaluated.items() if version not in scores.by_few)
    return min((version for version, found in counted if reached(found, target.metric, target.value)), default=None)


def end(running: RunContext) -> None:
    """Evaluate the last model and record the run's end; if the service closes meanwhile, the next start does it."""
    plan, past = running.plan, running.past
    dissolve(running)
    if not running.stopped:
        if plan.cohort.mode == "buffered":
            _let_go(running)
        come_back(running)
    if running.stopped == "run":
        close(running, "stopped", f"stopped by a person after {past.steps_made} of {plan.run.rounds} rounds", 10)
        return
    if running.stopped != "service" and plan.run.evaluate == "clients" and past.version not in past.scores.evaluated:
        _evaluate_last(running)
    if running.stopped == "service":
        return
    require_metrics(running, over=True)
    said = f"{past.steps_made} rounds"
    if target := plan.run.target:
        version = version_that_reached(running)
        how = "did not reach" if version is None else "reached"
        said += f", {target.metric} {how} {target.value:g}" + ("" if version is None else f" with version {version}")
        if past.scores.evaluated and past.scores.evaluated.keys() <= past.scores.by_few:
            said += "; too few devices measured it in every round: fewer than half, and fewer than three"
    close(running, "done", said)


def close(running: RunContext, status: RunStatus, text: str, exit_code: int = 0) -> None:
    """Record the run's end together with the outcome of each assignment that has none, and cancel these assignments."""
    end = RunStatusChanged(running.clock.wall(), status, text, exit_code)
    in_vain = list(running.past.outcomes.missing)
    running.record(*running.past.outcomes.with_end(end, running.elapsed))
    running.fleet.cancel(in_vain)


def close_undriven(store: Store, run_id: str, end: RunStatusChanged) -> None:
    """Record the end of a run, and the outcomes of its assignments, when its driver could not start or raised."""
    outcomes, elapsed_s = UnresolvedAssignments(), 0.0
    try:
        for _, event in store.events(run_id):
            outcomes.apply(event)
            elapsed_s = max(elapsed_s, getattr(event, "elapsed_s", 0.0))
    except Exception:  # the journal itself may be unreadable: then only the end of the run is recorded
        outcomes = UnresolvedAssignments()
    store.record(run_id, outcomes.with_end(end, elapsed_s))


def end_abandoned(store: Store, home: AggregatorHome) -> None:
    """Record the end of runs whose process has died: simulations, and runs whose submission was not completed.

    No process resumes these runs, while an aggregator resumes a run on devices.
    """
    for row in store.owned():
        if (process := _dead(row, home)) and store.run(row.run_id).status not in ("done", "failed", "stopped"):
            did = "simulated it" if row.source == "sim" else "was handing it over"
            said = f"{process}, which {did}, ended first: nobody goes on with it"
            close_undriven(store, row.run_id, RunStatusChanged(time.time(), "failed", said, 1))


def _dead(row: RunRow, home: AggregatorHome) -> str | None:
    """Return words for the process that owned the run if it has died, otherwise None."""
    path = home.owner(row.run_id)
    if path.exists():
        return dead_owner(path)
    return "the process" if time.time() - row.created_at > UNOWNED_S else None


def _let_go(running: RunContext) -> None:
    """Cancel all assignments after the last buffered round, and record the evaluations that are final now."""
    running.fleet.cancel([ask_id for ask_id, _ in running.past.owed.busy.values()])
    running.record(*settled(running, running.clock.wall(), over=True))


def _evaluate_last(running: RunContext) -> None:
    """Evaluate the last model on all able devices; every earlier version was evaluated by the round after it.

    All replies are recorded together and acknowledged only then. Replies from before a restart are therefore here
    again, and count.
    """
    version = running.past.version
    deadline = evaluation_deadline(running.past.slowest)
    heads = _measured_before(running)
    unable, answered = running.unable(), [head.update_id.device for head in heads]
    able = [device for device in running.presence.devices if device not in unable and device not in answered]
    asks = {device: measuring_id_of(running.run_id, version, device) for device in able}
    running.status("running", f"measuring the last model on {len(asks) + len(heads)} devices")
    running.ask([envelope(running, d, a, "evaluate", running.past.rounds_opened, deadline) for d, a in asks.items()])
    until, open_asks, asked = running.elapsed + deadline, dict(asks), len(asks) + len(heads)
    while open_asks and running.elapsed < until and not running.stop_ordered():
        for arrival in running.poll(min(POLL_S, max(0.0, until - running.elapsed))):
            if isinstance(arrival, ReplyHeader):
                if open_asks.get(arrival.update_id.device) == arrival.ask_id:
                    del open_asks[arrival.update_id.device]
                    heads.append(arrival)
                else:
                    running.fleet.ack([arrival.update_id])
            elif isinstance(arrival, Failure) and open_asks.get(arrival.device) == arrival.ask_id:
                del open_asks[arrival.device]
        for device in set(open_asks) - set(running.presence.hellos):
            del open_asks[device]
    if running.stopped == "service":
        return  # the next start assigns the evaluation again to devices that have not replied
    running.fleet.cancel(list(open_asks.values()))
    heads.sort(key=lambda head: head.update_id.device)
    if evaluated := evaluation(running, version, heads, running.clock.wall(), asked):
        running.record(evaluated)
    running.fleet.ack([head.update_id for head in heads])


def _measured_before(running: RunContext) -> list[ReplyHeader]:
    """Return the replies from before a restart to assignments that evaluate the last version."""
    found, revoked = list[ReplyHeader](), running.revoked()
    for ask_id, head in list(running.deferred.items()):
        device = head.update_id.device
        if ask_id == measuring_id_of(running.run_id, running.past.version, device) and device not in revoked:
            found.append(running.deferred.pop(ask_id))
            running.measuring[ask_id] = running.sending.parcel(device).size
    return found


def dismiss(running: RunContext) -> None:
    """Notify all connected devices that the run is over, with the outcomes of their last updates.

    After a restart this includes the devices that reconnect in time. If the run never had a model, only the devices
    that were selected for the initial model are notified.
    """
    running.fleet.ack([head.update_id for head in running.deferred.values()])
    while running.returning() and not running.closing():
        running.fleet.ack([a.update_id for a in running.poll(POLL_S) if isinstance(a, ReplyHeader)])
    over = Over(running.run_id, running.plan.run.task, running.holders.digest, running.identity)
    here, begun = running.presence.devices, running.past.bases.model is not None
    heard_of_it = here if begun else [device for device in here if device in running.past.first.times]
    told = {device: verdicts_of(running, device) for device in heard_of_it}
    running.fleet.send([stop_of(over, device, verdicts) for device, verdicts in told.items()])


UNTOLD_S = 86_400.0  # a device that connects later than this after a run's end gets no notice


class Over(NamedTuple):
    """A run that is over: `digest` is its plan's, `at` the wall-clock time of its end."""

    run_id: str
    task: str
    digest: str
    identity: str
    at: float = 0.0


def stop_of(over: Over, device: str, verdicts: Sequence[Verdict] = (), farewell: bool = False) -> Envelope:
    """Return the notice to a device that a run is over.

    `verdicts`: the outcomes of its last updates, which the run's end decides even if no device is notified. `farewell`:
    True for a device that was offline at the end.
    """
    ask = Ask(
        f"{over.run_id}.stop.{device}", over.run_id, over.task, "stop", over.digest,
        verdicts=tuple(verdicts), farewell=farewell, identity=over.identity,
    )  # fmt: skip
    return Envelope(device, ask)


class RunEndNotices:
    """Holds which devices still have to be notified of runs that ended in the last UNTOLD_S seconds."""

    def __init__(self, fleet: Fleet, store: Store, clock: Clock) -> None:
        self._fleet, self._store, self._clock = fleet, store, clock
        self._due: defaultdict[str, list[Over]] = defaultdict(list)  # device -> notices for its next connection
        self._renames = store.roster.renames()
        self._look()

    def over(self, run_id: str, sent: Collection[str]) -> None:
        """Note that a run has ended here and these devices were notified; the others are notified when they connect."""
        row = self._store.run(run_id)
        if row.status in ("done", "failed", "stopped"):
            self._add(row, sent)

    def tell(self, device: str) -> None:
        """Send a newly connected device the notices it may have missed, at most once per aggregator process."""
        if (renames := self._store.roster.renames()) != self._renames:
            self._renames = renames
            self._look()  # a device was renamed: a notice addressed to its old name can no longer be delivered
        since = self._clock.wall() - UNTOLD_S
        due = [over for over in self._due.pop(device, ()) if over.at >= since]
        self._fleet.send([stop_of(over, device, farewell=True) for over in due])

    def _look(self) -> None:
        """Read from the store which devices have not acknowledged the end of a recent run."""
        self._due.clear()
        for row in self._store.ended_since(self._clock.wall() - UNTOLD_S):
            self._add(row, ())

    def _add(self, row: RunRow, sent: Collection[str]) -> None:
        """Note which devices have not acknowledged the end of this run."""
        over = Over(row.run_id, row.task, digest_of(row.plan), row.identity, row.finished_at or self._clock.wall())
        for device in self._store.untold(row.run_id):
            if device not in sent:
                self._due[device].append(over)
