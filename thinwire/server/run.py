"""This module executes one run, from its first round, or from where the journal ends, to its end.

A run waits until enough devices are online, opens a round, drives it and closes it. It repeats this until the plan's
rounds are done, a target metric is reached, or a person stops the run. Between rounds it notes which devices connect
and disconnect, and keeps replies. After a restart it first sends again the outstanding assignments of other rounds
(pipelined: of all rounds), then resumes the open round, which sends its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.core.clock import Clock
from thinwire.core.errors import TRANSIENT, ThinwireError, TooFewClients, TooLittleSpace
from thinwire.core.events import ENDED, Event, RoundOpened
from thinwire.core.fleet import ClientDisconnected, Fleet
from thinwire.core.formatting import counted
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Failure, ReplyHeader, evaluation_id_of
from thinwire.server.buffered_round import BufferedMode
from thinwire.server.context import POLL_S, RunCommands, RunContext, reconnect_text
from thinwire.server.device_terms import invalid_reply
from thinwire.server.evaluation import require_metrics
from thinwire.server.holdout import Holdout, HoldoutWatch, due_versions
from thinwire.server.initial_model import take_first_model
from thinwire.server.leases import DeviceLeases
from thinwire.server.pipelining import PipelinedMode
from thinwire.server.policy.cohort import stop_hint
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.private_mode import CentralMode, DeviceMode, DistributedMode, SampledMode
from thinwire.server.recovery import rebuild_round
from thinwire.server.round_close import finish
from thinwire.server.round_mode import RoundMode
from thinwire.server.round_runner import RoundRunner
from thinwire.server.run_end import close, end, notify_connected
from thinwire.server.secure_mode import SecureMode
from thinwire.server.secure_round_runner import SecureRoundRunner
from thinwire.store import RunRow, Store

HINT_AFTER_S = 60.0  # of waiting; then a run without `wait_s` adds to its status what a person can do
MODES = (DistributedMode, SecureMode, SampledMode, CentralMode, DeviceMode, PipelinedMode, BufferedMode, RoundMode)


def mode_of(plan: RunPlan) -> RoundMode:
    """Return the mode of a plan's rounds."""
    return next(mode for mode in MODES if mode.is_for(plan))(plan)


def drive(
    run_id: str,
    *,
    store: Store,
    fleet: Fleet,
    home: AggregatorHome,
    clock: Clock,
    online: ConnectedDevices | None = None,
    commands: RunCommands = RunCommands(),
    leases: DeviceLeases | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    holdout: Holdout | None = None,
) -> RunRow:
    """Execute or resume a run until it is done, failed or stopped, and return its row.

    `online` has the devices that are connected when the run begins, `leases` are those of all runs that share the
    devices. `holdout` has the evaluations of a plan with `[run] evaluate = "holdout"`.

    A `ThinwireError` ends the run as failed, with the reason in its status; any other exception is raised. On a full
    disk `NotWritten` is raised, and `Unreachable` if the database does not answer; the run is left unchanged, and the
    next driver resumes it.

    A simulated run differs: no device can be revoked, nothing waits during an aggregation, and no aggregator resumes
    it. Therefore these two end it as failed, unless it outlives its process.
    """
    online, leases = online or ConnectedDevices(), leases or DeviceLeases()
    running = RunContext(run_id, store, fleet, home, clock, online, leases, commands, on_event, mode_of)
    watch = HoldoutWatch(running, holdout) if running.plan.run.evaluate == "holdout" else None
    if watch is not None:
        running.on_poll = watch.record
    try:
        try:
            _rounds(running, watch)
        finally:
            running.leases.leave(run_id)
        if running.stopped != "service":
            _finish_rounds(running)
            _await_holdout(running, watch, over=True)
            end(running)
            if running.run_state.status in ENDED:  # only the last evaluation decides which version is the best
                _prune_versions(running)
    except ThinwireError as error:
        if isinstance(error, TRANSIENT) and (not running.simulated or home.simulation(run_id).exists()):
            raise
        running.mode.abort(running)
        close(running, "failed", f"{error}; try: {error.hint}" if error.hint else str(error), error.exit_code)
    if running.run_state.status in ENDED:
        notify_connected(running)
    return store.run(run_id)


def _rounds(running: RunContext, watch: HoldoutWatch | None) -> None:
    """Make the run's rounds: first the initial model if a device makes it, then the open round, then new ones."""
    plan, run_state = running.plan, running.run_state
    if run_state.bases.model is None:
        ready = run_state.first.open or _wait_for_devices(running)
        if not (ready and take_first_model(running)):
            return
    running.assign(running.mode.envelopes_to_resend(running))
    if run_state.open_rounds.current and run_state.open_rounds.accepts_replies:
        running.record_resumed(run_state.open_rounds.current.round)
        if (runner := _ready_runner(running, run_state.open_rounds.current)) is None:
            return
        _drive_round(running, rebuild_round(runner), watch)
    _await_holdout(running, watch)
    while run_state.steps_made < plan.run.rounds and run_state.scores.reached is None:
        if run_state.scores.lost_patience(plan.run.patience) or running.must_stop():
            return
        if run_state.too_few_in_a_row > plan.cohort.retry_limit:
            raise TooFewClients(
                f"{counted(run_state.too_few_in_a_row, 'round')} in a row made no step",
                why=f"[cohort] retry_limit = {plan.cohort.retry_limit}; they had too few replies, or were aborted",
                hint=f"the reason of each round: thinwire runs show {running.run_id}",
            )
        if not running.mode.blocked(running):
            running.mode.require_budget(running)
        if not _wait_for_devices(running):
            return
        if (opened := running.mode.open_next(running)) is None:
            _wait_for_busy(running)
            continue
        current = run_state.open_rounds.current or opened
        if (runner := _ready_runner(running, current)) is None:
            return
        _drive_round(running, rebuild_round(runner) if run_state.open_rounds.progress.since else runner, watch)
        _await_holdout(running, watch)


def _await_holdout(running: RunContext, watch: HoldoutWatch | None, over: bool = False) -> None:
    """Wait for the holdout evaluation of the newest version that is due, if the plan wants that."""
    if watch is None:
        return
    watch.record()
    began, wait_s = running.elapsed, running.plan.run.evaluate_wait_s
    while (version := watch.waits_for(over)) is not None and not running.must_stop():
        if running.elapsed - began >= wait_s:
            watch.missed = True
            return
        running.status("running", f"waiting for the evaluation of version {version}: thinwire aggregator evaluate")
        listen(running, POLL_S)


def _ready_runner(running: RunContext, opened: RoundOpened) -> RoundRunner | None:
    """Return the driver of a round, once the disk has space for its updates; None if the run is stopped before.

    Meanwhile the run's clock stands still, other runs go on, and a person may pause this one. Nothing makes space for a
    simulation: it fails.
    """
    kind, waited = SecureRoundRunner if running.plan.secure.enabled else RoundRunner, False
    while True:
        try:
            runner = kind(running, opened)
        except TooLittleSpace as error:
            if running.simulated:
                raise
            waited = True
            running.pause()
            running.status("waiting", f"{error}; it goes on when there is space")
        else:
            if waited:
                running.resume()
                running.status("running", f"round {opened.round} goes on")
            return runner
        if running.commands.paused() is not None:
            _wait_while_paused(running)
        if running.must_stop():
            return None
        listen(running, POLL_S)


def _drive_round(running: RunContext, runner: RoundRunner, watch: HoldoutWatch | None) -> None:
    """Drive one round to its close, then delete the model versions that nothing needs any more."""
    running.in_round = True
    try:
        runner.run()
        running.in_round = False
        if runner.machine.closed:
            finish(runner)
            require_metrics(running)
    finally:
        runner.aggregator.close()
    scores = running.run_state.scores
    due = due_versions(running) if watch else ()
    _prune_versions(running, {running.run_state.version - 1, *scores.measured, *due})


def _prune_versions(running: RunContext, others: Collection[int] = ()) -> None:
    """Delete the model versions but the first, last and best one, those that are sent, and `others`."""
    run_state = running.run_state
    newest, best, met = run_state.version, run_state.scores.best, run_state.scores.reached
    sent = {
        newest,
        *(
            assigned.base_version
            for device in run_state.ledger.busy
            for assigned in run_state.ledger.outstanding(device)
        ),
    }
    needed = {0, newest, best.version if best else 0, met or 0, *others}
    keep = None if "all" in running.plan.run.keep else needed
    running.versions.prune(keep, sent, range(newest - running.plan.downlink.log_rounds + 1, newest + 1))


def _finish_rounds(running: RunContext) -> None:
    """Close what is still open after the last round, and wait for devices that may reconnect after a restart."""
    running.mode.abort(running)
    if running.stopped:
        return
    running.mode.cancel_remaining(running)
    if away := running.may_reconnect():
        running.status("waiting", reconnect_text(away))
    while running.may_reconnect() and not running.must_stop():
        listen(running, POLL_S)


def _wait_for_devices(running: RunContext) -> bool:
    """Wait until enough devices are online and the run is neither paused nor blocked; return False if it is stopped.

    A pipelined run waits no longer than until its current round can close. Raise `TooFewClients` after the plan's
    `wait_s`, unless that is 0.
    """
    began, checked, blocked = running.elapsed, frozenset[str](), ""
    wait_s = running.plan.cohort.wait_s
    listen(running, 0.0)  # note the devices that connected before the run began
    while True:
        if running.commands.paused() is not None:
            _wait_while_paused(running)
            if running.must_stop():
                return False
        if not blocked:
            _take_turn(running)
        if running.must_stop():
            return False
        blocked = running.mode.blocked(running)
        sentence = running.waits_for(blocked)
        if sentence is None or (not blocked and running.mode.can_continue(running)):
            return True
        if not blocked and checked != (checked := frozenset(running.online.names)):
            running.mode.require_budget(running)  # devices that connected since may have nothing left to spend
        if blocked or not running.leases.waits_for_offline(running.run_id):
            began = running.elapsed  # more clients would not help: a person has to act, or other runs go on first
        for_ever = not wait_s and running.elapsed - began >= HINT_AFTER_S
        running.status("waiting", f"{sentence}; {stop_hint(running.run_id)}" if for_ever else sentence)
        if running.must_stop():
            return False
        if wait_s and running.elapsed - began > wait_s:
            raise TooFewClients(
                sentence, why=f"the plan waits {wait_s:g} s", hint="start more clients, or raise [cohort] wait_s"
            )
        listen(running, POLL_S)


def _take_turn(running: RunContext) -> None:
    """Wait until the run may select devices, if it shares them with other runs and there are any."""
    leases, run_id = running.leases, running.run_id
    while not (leases.may_decide(run_id) or leases.refusal(run_id)) and (able := running.eligibility.able()):
        leases.want(run_id, able)
        if running.must_stop():
            return
        listen(running, POLL_S)


def _wait_while_paused(running: RunContext) -> None:
    """Wait until a person resumes or stops the run, open no round, and defer replies to the next one."""
    made = f"{running.run_state.steps_made} of {counted(running.plan.run.rounds, 'round')}"
    running.pause()
    while (more := running.commands.paused()) is not None and not running.must_stop():
        running.status("paused", f"paused by a person after {made}{more}")
        listen(running, POLL_S)
    running.resume()


def _wait_for_busy(running: RunContext) -> None:
    """Wait while no round can open, because the connected devices work on earlier rounds or too few are connected.

    After the time that the plan's staleness allows, give up each device's oldest assignment, so that it can be selected
    again.
    """
    run_state = running.run_state
    what = "until more devices can be selected"
    if busy := len(run_state.ledger.busy):
        what = f"for {counted(busy, 'device')} still busy with earlier rounds"
    running.status("running", f"waiting {what}")
    listen(running, POLL_S)
    waited = running.elapsed - run_state.elapsed_s
    if waited > run_state.ledger.deadline_s * (running.plan.cohort.max_staleness + 1):
        for device, assignments in running.outstanding().items():
            for assigned in assignments[:1]:
                running.lose(device, "stale", f"no answer for {waited:.0f} s after its round", assigned.assignment_id)


def listen(running: RunContext, wait_s: float) -> None:
    """Handle the arrivals of one poll while no round is driven, and keep replies for the next round."""
    for arrival in running.poll(wait_s):
        if isinstance(arrival, ReplyHeader):
            _defer_reply(running, arrival)
        elif isinstance(arrival, Failure):
            _fail(running, arrival.device, arrival.kind, arrival.text, arrival.assignment_id)
        elif isinstance(arrival, ClientDisconnected):
            if arrival.why == "revoked":
                running.forget(arrival.device)
            _lose_disconnected(running, arrival.device, arrival.why)
    if running.elapsed >= running.reconnect_until_s:
        for device in running.run_state.ledger.busy - running.online.hellos.keys():
            _lose_disconnected(running, device, "did not come back")


def _defer_reply(running: RunContext, header: ReplyHeader) -> None:
    """Defer a reply to the next round; reject it and record the failure if no round may accept it."""
    run_state, device = running.run_state, header.update_id.device
    if header.update_id.run != running.run_id or run_state.ledger.is_decided(header.update_id):
        running.fleet.ack([header.update_id])  # its outcome is recorded already, or it belongs to another run
    elif header.assignment_id == evaluation_id_of(running.run_id, run_state.version, device):
        running.defer(header)  # an evaluation that came before a restart and is not recorded yet
    elif wrong := invalid_reply(running, header):
        _fail(running, device, *wrong, header.assignment_id)
        running.fleet.ack([header.update_id])
    else:
        running.mode.defer(running, header)


def _fail(running: RunContext, device: str, kind: str, text: str, assignment_id: str) -> None:
    """Record that an assignment failed, unless a reply to it is deferred: then the reply is its outcome."""
    if running.run_state.ledger.is_outstanding(device, assignment_id) and assignment_id not in running.deferred:
        running.lose(device, kind, text, assignment_id)


def _lose_disconnected(running: RunContext, device: str, why: str) -> None:
    """Give up a disconnected device's assignments of closed rounds, unless their late replies are already here.

    Its assignments of open rounds stay outstanding, because the device may reconnect before those rounds become
    current.
    """
    late = running.deferred_late()
    for assigned in running.run_state.ledger.outstanding(device):
        if not running.run_state.open_rounds.of(assigned.round) and assigned.assignment_id not in late:
            running.lose(device, "offline", why, assigned.assignment_id)
