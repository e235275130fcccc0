"""The end of a run: its last model is measured, what it and each ask came to is recorded, and its devices are told."""

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
from thinwire.core.types import Ask, Failure, ReplyHead, Verdict, measuring_id_of
from thinwire.server.context import POLL_S, Running
from thinwire.server.dispatch import envelope, verdicts_of
from thinwire.server.evaluation import evaluation, reached, require_metrics, settled
from thinwire.server.idle import come_back
from thinwire.server.pipelining import dissolve
from thinwire.server.policy.deadlines import evaluation_deadline
from thinwire.server.state.assignment_ledger import Outcomes
from thinwire.store import RunRow, Store

UNOWNED_S = 60.0  # a run has its owner within milliseconds of its row; one of before Thinwire knew owners has none


def version_that_reached(running: Running) -> int | None:
    """The first version that met the target: one that is measured after it, and is worse, takes nothing back."""
    if (target := running.plan.run.target) is None:
        return None
    scores = running.past.scores
    counted = ((version, found) for version, found in scores.evaluated.items() if version not in scores.by_few)
    return min((version for version, found in counted if reached(found, target.metric, target.value)), default=None)


def end(running: Running) -> None:
    """Measure the last model and record what the run came to; where the service closes meanwhile, the next does."""
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


def close(running: Running, status: RunStatus, text: str, exit_code: int = 0) -> None:
    """Record the run's end and with it the outcome of each ask that has none; who still works on one need not."""
    end = RunStatusChanged(running.clock.wall(), status, text, exit_code)
    in_vain = list(running.past.outcomes.missing)
    running.record(*running.past.outcomes.with_end(end, running.elapsed))
    running.fleet.cancel(in_vain)


def close_undriven(store: Store, run_id: str, end: RunStatusChanged) -> None:
    """The same where the run's driver could not do it: it could not begin, or raised."""
    outcomes, elapsed_s = Outcomes(), 0.0
    try:
        for _, event in store.events(run_id):
            outcomes.apply(event)
            elapsed_s = max(elapsed_s, getattr(event, "elapsed_s", 0.0))
    except Exception:  # a journal that cannot be read may be why: of such a run the end alone is recorded
        outcomes = Outcomes()
    store.record(run_id, outcomes.with_end(end, elapsed_s))


def end_abandoned(store: Store, home: AggregatorHome) -> None:
    """Close the runs whose process has died: simulations, and runs that were never handed over. Nobody goes on with
    them, where an aggregator goes on with a run on devices.
    """
    for row in store.owned():
        if (process := _dead(row, home)) and store.run(row.run_id).status not in ("done", "failed", "stopped"):
            did = "simulated it" if row.source == "sim" else "was handing it over"
            said = f"{process}, which {did}, ended first: nobody goes on with it"
            close_undriven(store, row.run_id, RunStatusChanged(time.time(), "failed", said, 1))


def _dead(row: RunRow, home: AggregatorHome) -> str | None:
    path = home.owner(row.run_id)
    if path.exists():
        return dead_owner(path)
    return "the process" if time.time() - row.created_at > UNOWNED_S else None


def _let_go(running: Running) -> None:
    """The last buffer is closed: nobody need finish what it works on, and no version is measured any more."""
    running.fleet.cancel([ask_id for ask_id, _ in running.past.owed.busy.values()])
    running.record(*settled(running, running.clock.wall(), over=True))


def _evaluate_last(running: Running) -> None:
    """Have the last model measured: every other one was measured by the round after it.

    Answers are acked when they are recorded together: those that came before a restart are here again, and count.
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
            if isinstance(arrival, ReplyHead):
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
        return  # at the next start those who have not answered are asked again
    running.fleet.cancel(list(open_asks.values()))
    heads.sort(key=lambda head: head.update_id.device)
    if evaluated := evaluation(running, version, heads, running.clock.wall(), asked):
        running.record(evaluated)
    running.fleet.ack([head.update_id for head in heads])


def _measured_before(running: Running) -> list[ReplyHead]:
    """Answers of before a restart to the asks that measure the last version."""
    found, revoked = list[ReplyHead](), running.revoked()
    for ask_id, head in list(running.deferred.items()):
        device = head.update_id.device
        if ask_id == measuring_id_of(running.run_id, running.past.version, device) and device not in revoked:
            found.append(running.deferred.pop(ask_id))
            running.measuring[ask_id] = running.sending.parcel(device).size
    return found


def dismiss(running: Running) -> None:
    """Tell all devices that the run is over, with their last verdicts; after a restart also those that come back.

    Of a run that never had a model only those hear that were asked for the first one.
    """
    running.fleet.ack([head.update_id for head in running.deferred.values()])
    while running.returning() and not running.closing():
        running.fleet.ack([a.update_id for a in running.poll(POLL_S) if isinstance(a, ReplyHead)])
    over = Over(running.run_id, running.plan.run.task, running.holders.digest, running.identity)
    here, begun = running.presence.devices, running.past.bases.model is not None
    heard_of_it = here if begun else [device for device in here if device in running.past.first.times]
    told = {device: verdicts_of(running, device) for device in heard_of_it}
    running.fleet.send([stop_of(over, device, verdicts) for device, verdicts in told.items()])


# Devices that may not have heard that a run is over, since they or the aggregator were away: told when they come.
#
# What a device does with it twice is what it does with it once.


UNTOLD_S = 86_400.0  # who has not come back by then is told no more


class Over(NamedTuple):
    """A run that is over. `digest`: of its plan; `at` is wall-clock."""

    run_id: str
    task: str
    digest: str
    identity: str
    at: float = 0.0


def stop_of(over: Over, device: str, verdicts: Sequence[Verdict] = (), farewell: bool = False) -> Envelope:
    """Tell a device that a run is over. `verdicts`: the last on its updates, which are settled with the run whether
    they are told or not; `farewell`: to one that was away at the end.
    """
    ask = Ask(
        f"{over.run_id}.stop.{device}", over.run_id, over.task, "stop", over.digest,
        verdicts=tuple(verdicts), farewell=farewell, identity=over.identity,
    )  # fmt: skip
    return Envelope(device, ask)


class Farewells:
    """Of the runs that ended in the last UNTOLD_S seconds: who is to be told."""

    def __init__(self, fleet: Fleet, store: Store, clock: Clock) -> None:
        self._fleet, self._store, self._clock = fleet, store, clock
        self._due: defaultdict[str, list[Over]] = defaultdict(list)  # device -> what it is told of when it comes
        self._renames = store.roster.renames()
        self._look()

    def over(self, run_id: str, sent: Collection[str]) -> None:
        """A run has ended here, and these devices were sent a stop; who else was asked in it hears it when it comes."""
        row = self._store.run(run_id)
        if row.status in ("done", "failed", "stopped"):
            self._add(row, sent)

    def tell(self, device: str) -> None:
        """It is there: it is sent what it may not have heard, once in this aggregator's life."""
        if (renames := self._store.roster.renames()) != self._renames:
            self._renames = renames
            self._look()  # by today's names, also for who was sent a stop by another, which it cannot take any more
        since = self._clock.wall() - UNTOLD_S
        due = [over for over in self._due.pop(device, ()) if over.at >= since]
        self._fleet.send([stop_of(over, device, farewell=True) for over in due])

    def _look(self) -> None:
        self._due.clear()
        for row in self._store.ended_since(self._clock.wall() - UNTOLD_S):
            self._add(row, ())

    def _add(self, row: RunRow, sent: Collection[str]) -> None:
        over = Over(row.run_id, row.task, digest_of(row.plan), row.identity, row.finished_at or self._clock.wall())
        for device in self._store.untold(row.run_id):
            if device not in sent:
                self._due[device].append(over)
