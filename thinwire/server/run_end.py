"""End of a run: its last model is evaluated, its outcome and that of each assignment are recorded, its devices are
notified.

Devices may miss the notice because they, or the aggregator, were offline when the run ended. They learn it when they
register the next time: their hello names the runs that they keep, and the welcome those that are over.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from thinwire.core.errors import TRANSIENT, DataLost
from thinwire.core.events import ENDED, RunStatus, RunStatusChanged
from thinwire.core.fleet import Envelope, Fleet
from thinwire.core.formatting import counted
from thinwire.core.plan import RunPlan, digest_of
from thinwire.core.run_events import is_sampled
from thinwire.core.statedir import AggregatorHome, Held, dead_owner, lock_file
from thinwire.core.types import Assignment, Failure, ReplyHeader, UpdateOutcome, evaluation_id_of
from thinwire.server.context import POLL_S, RunContext
from thinwire.server.evaluation import evaluation, metrics_by_client, require_metrics
from thinwire.server.policy.assignment_terms import evaluation_deadline
from thinwire.server.policy.cohort import evaluators
from thinwire.server.state import snapshot
from thinwire.server.state.run_state import RunState
from thinwire.server.tree_noise import erase_ended
from thinwire.store import START_RUN, RunRow, Store

HOW_TO_RESUME = "the same call or command goes on with it"
UNOWNED_S = 60.0  # a run has its owner file within milliseconds of its row; runs of early versions have none


def end(running: RunContext) -> None:
    """Evaluate the last model and record the run's end; if the service closes meanwhile, the next start does it."""
    plan, run_state = running.plan, running.run_state
    if running.stopped == "run":
        after = f"{run_state.steps_made} of {counted(plan.run.rounds, 'round')}"
        close(running, "stopped", f"stopped by a person after {after}", 10)
        return
    last = run_state.version not in run_state.scores.evaluated and running.mode.evaluates_alone
    if running.stopped != "service" and plan.run.evaluate == "clients" and last:
        _evaluate_last(running)
    if running.stopped == "service":
        return
    require_metrics(running, over=True)
    said = counted(run_state.steps_made, "round")
    if target := plan.run.target:
        version = run_state.scores.reached
        how = "did not reach" if version is None else "reached"
        said += f", {target.metric} {how} {target.value:g}" + ("" if version is None else f" with version {version}")
        if run_state.scores.evaluated and not run_state.scores.by_enough:
            said += "; too few devices evaluated it in every round: fewer than half, and fewer than three"
    if run_state.scores.lost_patience(plan.run.patience) and run_state.steps_made < plan.run.rounds:
        best = run_state.scores.best
        found = f", version {best.version} stays the best" if best else ""
        why = f"{counted(plan.run.patience or 0, 'evaluation')} brought no better {plan.run.metric}"
        said += f" of {plan.run.rounds}, because {why}{found}"
    close(running, "done", said)


def close(running: RunContext, status: RunStatus, text: str, exit_code: int = 0) -> None:
    """Record the run's end together with the outcome of each assignment that has none, and cancel these assignments."""
    end = RunStatusChanged(running.clock.wall(), status, text, exit_code)
    in_vain = [assigned.assignment_id for assigned in running.run_state.ledger.unresolved]
    running.record(*running.run_state.ledger.with_end(end, running.elapsed, running.run_state.first.open))
    running.fleet.cancel(in_vain)


def close_undriven(store: Store, run_id: str, end: RunStatusChanged) -> None:
    """Record the end of a run, and the outcomes of its assignments, when its driver could not start or raised.

    Raise `Unreachable` if the database does not answer: the outcomes are in the journal, which can be read later.
    """
    try:
        run_state, later = snapshot.restore(store, run_id, RunState())
        for _, event in later:
            run_state.apply(event)
    except TRANSIENT:
        raise
    except Exception:  # the journal itself may be unreadable: then only the end of the run is recorded
        run_state = RunState()
    store.record(run_id, run_state.ledger.with_end(end, run_state.elapsed_s, run_state.first.open))


def end_restored(store: Store) -> None:
    """Record the end of each run of a restored store whose aggregator and devices both keep a state of every client.

    The devices went on from updates that this aggregator does not have, and their states would never fit again.
    """
    said = "restored from a backup: its devices went on from updates that this aggregator does not have; "
    for row in store.runs():
        if row.status not in ENDED and row.rounds_closed and RunPlan.from_json(dict(row.plan)).has_client_state:
            hint = f"try: a new run with [run] init = 'run:{row.run_id}'"
            close_undriven(store, row.run_id, RunStatusChanged(time.time(), "failed", said + hint, DataLost.exit_code))


def delete_messages(store: Store, home: AggregatorHome) -> None:
    """Delete the messages of secure rounds of all runs that are over, or that no row names."""
    found = list(home.root.glob("runs/*/secure"))
    over = {row.run_id: row.status in ENDED for row in store.runs()} if found else {}
    for path in found:
        if over.get(path.parent.name, True):
            shutil.rmtree(path, ignore_errors=True)


def end_abandoned(store: Store, home: AggregatorHome) -> None:
    """Record the end of runs whose process has died: simulations, and runs whose submission was not completed.

    No process resumes these runs, while an aggregator resumes a run on devices, and completes the submission of a run
    that a command started. A simulation that was to outlive its process waits, with that reason, until the same call
    goes on with it or a person stops it: there is no other process that carries out the command to stop it.

    A run's lock is held while its end is recorded, so that no process goes on with the run meanwhile, and no other one
    records its end as well.
    """
    commands = store.commands.pending()
    commanded = {one.run_id for one in commands if one.kind == START_RUN}
    stopped = {one.run_id for one in commands if one.kind in ("stop-run", "stop-after-round")}
    for row in store.owned():
        if row.run_id in commanded:
            continue
        with _lock_if_dead(row, home) as process:
            if process and store.run(row.run_id).status == row.status:
                _record_death(store, home, row, process, row.run_id in stopped)
    erase_ended(store, home)


def _record_death(store: Store, home: AggregatorHome, row: RunRow, process: str, is_stopped: bool) -> None:
    """Record the end of a run whose process has died, or that it waits to be resumed; `process` names the process."""
    did, now = "simulated it" if row.source == "sim" else "was handing it over", time.time()
    if row.status == "preparing" or not home.simulation(row.run_id).exists():
        said = f"{process}, which {did}, ended first: nobody goes on with it"
        close_undriven(store, row.run_id, RunStatusChanged(now, "failed", said, 1))
    elif is_stopped:  # the process that would have carried it out has died
        end = RunStatusChanged(now, "stopped", "stopped by a person after its process ended", 10)
        close_undriven(store, row.run_id, end)
    elif row.status_text != (said := f"{process}, which {did}, ended; {HOW_TO_RESUME}"):
        store.record(row.run_id, [RunStatusChanged(now, "waiting", said)])


@contextlib.contextmanager
def _lock_if_dead(row: RunRow, home: AggregatorHome) -> Iterator[str | None]:
    """Yield a name of the process that owned the run if it has died, otherwise None; hold the run's lock meanwhile."""
    path = home.owner(row.run_id)
    if not path.exists():
        yield "the process" if time.time() - row.created_at > UNOWNED_S else None
        return
    process = dead_owner(path)
    with contextlib.ExitStack() as lock:
        if process:
            try:
                lock.enter_context(lock_file(path))
            except Held:  # another process goes on with the run, or is recording its end
                process = None
        yield process


def _evaluate_last(running: RunContext) -> None:
    """Evaluate the last model on the share of the able devices that evaluates.

    The round after it evaluated each earlier version.

    All replies are recorded together and acknowledged only then. Replies from before a restart are therefore here
    again, and count.
    """
    version = running.run_state.version
    deadline = evaluation_deadline(running.run_state.slowest) + running.leases.others_busy_s(running.run_id)
    headers = _evaluations_before_restart(running)
    answered = {header.update_id.device for header in headers}
    could = {*answered, *running.eligibility.able()}
    able = sorted(evaluators(running.plan, running.run_state.rounds_opened + 1, could) - answered)
    assignments = {device: evaluation_id_of(running.run_id, version, device) for device in able}
    running.status("running", f"evaluating the last model on {counted(len(assignments) + len(headers), 'device')}")
    running.assign([running.evaluation_envelope(d, a, deadline) for d, a in assignments.items()])
    until, open_assignments, assigned = running.elapsed + deadline, dict(assignments), len(assignments) + len(headers)
    while open_assignments and running.elapsed < until and not running.must_stop():
        for arrival in running.poll(min(POLL_S, max(0.0, until - running.elapsed))):
            if isinstance(arrival, ReplyHeader):
                if open_assignments.get(arrival.update_id.device) == arrival.assignment_id:
                    del open_assignments[arrival.update_id.device]
                    headers.append(arrival)
                else:
                    running.defer(arrival)  # it is acknowledged once the run's end has recorded its outcome
            elif isinstance(arrival, Failure) and open_assignments.get(arrival.device) == arrival.assignment_id:
                del open_assignments[arrival.device]
        for device in set(open_assignments) - set(running.online.hellos):
            del open_assignments[device]
    if running.stopped == "service":
        return  # the next start assigns the evaluation again to devices that have not replied
    running.fleet.cancel(list(open_assignments.values()))
    headers.sort(key=lambda header: header.update_id.device)
    if evaluated := evaluation(running, version, headers, running.clock.wall(), assigned):
        running.record(replace(evaluated, by_client=metrics_by_client(evaluated, headers)))
    running.fleet.ack([header.update_id for header in headers])


def _evaluations_before_restart(running: RunContext) -> list[ReplyHeader]:
    """Return the replies from before a restart to assignments that evaluate the last version."""
    found, revoked = list[ReplyHeader](), running.revoked()
    for assignment_id, header in list(running.deferred.items()):
        device = header.update_id.device
        if (
            assignment_id == evaluation_id_of(running.run_id, running.run_state.version, device)
            and device not in revoked
        ):
            found.append(running.deferred.pop(assignment_id))
            running.evaluation_bytes[assignment_id] = running.distributor.payload_for(device).size
    return found


def notify_connected(running: RunContext) -> None:
    """Drop the run's replies, and notify all connected devices that it is over, with their last updates' outcomes.

    After a restart this includes the devices that reconnect in time. If the run never had a model, only the devices
    that were selected for the initial model are notified.
    """
    running.fleet.drop_replies(running.run_id)  # the end has recorded their outcomes
    wait_s = 0.0  # devices that registered before the end was recorded are in the first poll
    while True:
        running.fleet.ack([a.update_id for a in running.poll(wait_s) if isinstance(a, ReplyHeader)])
        if not running.may_reconnect() or running.closing():
            break
        wait_s = POLL_S
    online, begun = running.online.names, running.run_state.bases.model is not None
    notified = online if begun else [device for device in online if device in running.run_state.first.times]
    outcomes = {device: running.run_state.ledger.outcomes.of(device, running.run_state.kept) for device in notified}
    notify(running.fleet, running.store.run(running.run_id), outcomes)


def notify(fleet: Fleet, row: RunRow, outcomes: Mapping[str, Sequence[UpdateOutcome]]) -> None:
    """Send devices the notice that a run is over, each with the outcomes of its last updates.

    The run's end decides these, even if no device is notified.
    """
    digest = digest_of(row.plan)
    stops = {
        device: Assignment(
            f"{row.run_id}.stop.{device}", row.run_id, row.task, "stop", digest,
            outcomes=tuple(outcomes), identity=row.identity,
        )
        for device, outcomes in outcomes.items()
    }  # fmt: skip
    fleet.send([Envelope(device, stop) for device, stop in stops.items()])


def notify_undriven(fleet: Fleet, store: Store, row: RunRow, connected: Collection[str]) -> None:
    """Drop the replies of a run without a driver, and notify its connected devices that it is over.

    No table has the devices of a run with Poisson sampling. Once it has begun, all connected devices are notified, as
    in `notify_connected`. So the notices do not tell who was sampled.
    """
    fleet.drop_replies(row.run_id)
    if is_sampled(row.plan):
        opened, _ = store.round_count(row.run_id)
        concerned = {*connected} if opened else set[str]()
    else:
        concerned = {*connected} & {client.device for client in store.clients(row.run_id)}
    notify(fleet, row, dict.fromkeys(sorted(concerned), ()))
