"""This module executes one run, from its first round, or from where the journal ends, to its end.

A run waits until enough devices are online, opens a round, drives it and closes it. It repeats this until the plan's
rounds are done, a target metric is reached, or a person stops the run. After a restart it first sends the unanswered
assignments again, then resumes the open round.
"""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import NotWritten, ThinwireError, TooFewClients
from thinwire.core.events import Event
from thinwire.core.fleet import Fleet
from thinwire.core.statedir import AggregatorHome
from thinwire.server.context import POLL_S, RunContext, StopOrder
from thinwire.server.dispatch import envelope_again
from thinwire.server.evaluation import require_metrics
from thinwire.server.idle import listen, said_away
from thinwire.server.initial_model import take_first_model
from thinwire.server.pipelining import answered, asked_before, dissolve, line_up, take_head
from thinwire.server.policy.cohort import missing, way_out
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.recovery import take_up
from thinwire.server.round_close import finish
from thinwire.server.round_runner import RoundRunner
from thinwire.server.run_end import close, dismiss, end, version_that_reached
from thinwire.store import RunRow, Store

PATIENCE_S = 60.0  # a run without `wait_s` then adds to its status what a person can do


def drive(
    run_id: str,
    *,
    store: Store,
    fleet: Fleet,
    home: AggregatorHome,
    clock: Clock | None = None,
    presence: ConnectedDevices | None = None,
    stop: Callable[[], StopOrder] = lambda: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> RunRow:
    """Execute or resume a run until it is done, failed or stopped, and return its row.

    `stop` is called often: "run" ends the run for good; "service" leaves it unchanged, and the next start resumes it.

    A `ThinwireError` ends the run as failed, with the reason in its status; any other exception is raised. On a full
    disk `NotWritten` is raised and the run is left unchanged; the next start resumes it.

    A simulated run differs: no device can be revoked, nothing waits during an aggregation, and no later process resumes
    it. Therefore `NotWritten` ends it as failed.
    """
    running = RunContext(
        run_id, store, fleet, home, clock or RealClock(), presence or ConnectedDevices(), stop, on_event
    )
    try:
        _rounds(running)
        if running.stopped != "service":
            end(running)
    except ThinwireError as error:
        if isinstance(error, NotWritten) and not running.simulated:
            raise
        dissolve(running)
        close(running, "failed", str(error), error.exit_code)
    if running.past.status in ("done", "failed", "stopped"):
        dismiss(running)
    return store.run(run_id)


def _rounds(running: RunContext) -> None:
    """Make the run's rounds: first the initial model if a device makes it, then the open round, then new ones."""
    plan, past = running.plan, running.past
    if past.bases.model is None and not ((past.first.open or _gather(running)) and take_first_model(running)):
        return
    _ask_again(running)
    if past.line.head and past.line.taken:
        running.goes_on(past.line.head.round)
        _one(running, take_up(running))
    while past.steps_made < plan.run.rounds and version_that_reached(running) is None:
        if running.stop_ordered():
            return
        if past.too_few_in_a_row > plan.cohort.retry_limit:
            raise TooFewClients(
                f"{past.too_few_in_a_row} rounds in a row had too few replies",
                why=f"the plan allows {plan.cohort.retry_limit}",
                hint="look at the clients' failures: thinwire runs show latest; or lower [cohort] min_replies",
            )
        if not _gather(running):
            return
        if (one := _next(running)) is None:
            _wait_for_busy(running)
            continue
        _one(running, one)


def _next(running: RunContext) -> RoundRunner | None:
    """Return the round that accepts replies next; None if no device can be selected."""
    if not running.past.delay:
        return RoundRunner.open(running)
    if _missing(running) is None:
        line_up(running)
    return take_up(running) if take_head(running) else None


def _ask_again(running: RunContext) -> None:
    """Send the unanswered assignments of earlier rounds again after a restart; in a pipelined run those of
    all rounds.
    """
    past = running.past
    if past.delay:
        running.ask(asked_before(running))
        return
    number = past.line.head.round if past.line.head else 0
    owed = past.owed.busy.items()
    running.ask([envelope_again(running, device, ask_id) for device, (ask_id, asked) in owed if asked != number])


def _one(running: RunContext, one: RoundRunner) -> None:
    """Drive one round to its close, then delete the model versions that nothing needs any more."""
    one.run()
    if one.machine.closed:
        finish(one)
        require_metrics(running)
    past, newest, met = running.past, running.past.version, version_that_reached(running)
    due = [asked for device in past.owed.busy for asked in past.owed.of(device).values()]
    sent = {newest, *(past.bases.asked_from[asked] for asked in due)}
    keep = {0, newest, newest - 1, past.scores.best.version if past.scores.best else 0, met or 0, *past.scores.measured}
    if "all" in running.plan.run.keep:
        if not running.plan.downlink.compressed:
            return
        keep |= set(range(newest))
    running.versions.prune(keep, sent, range(newest - running.plan.downlink.log_rounds + 1, newest + 1))


def _gather(running: RunContext) -> bool:
    """Wait until enough devices are online, or the current pipelined round can close; return False if the run is
    stopped.

    Raise `TooFewClients` after the plan's `wait_s`, unless that is 0.
    """
    began = running.elapsed
    wait_s = running.plan.cohort.wait_s
    listen(running, 0.0)  # note the devices that connected before the run began
    while (sentence := _missing(running)) is not None and not answered(running):
        for_ever = not wait_s and running.elapsed - began >= PATIENCE_S
        running.status("waiting", f"{sentence}; {way_out(running.run_id)}" if for_ever else sentence)
        if running.stop_ordered():
            return False
        if wait_s and running.elapsed - began > wait_s:
            raise TooFewClients(
                sentence, why=f"the plan waits {wait_s:g} s", hint="start more clients, or raise [cohort] wait_s"
            )
        listen(running, POLL_S)
    return True


def _wait_for_busy(running: RunContext) -> None:
    """Wait while all connected devices work on earlier rounds.

    After the time that the plan's staleness allows, give up each device's oldest assignment, so that it can be selected
    again.
    """
    past = running.past
    running.status("running", f"waiting for {len(past.owed.busy)} devices that are busy with earlier rounds")
    listen(running, POLL_S)
    waited = running.elapsed - past.elapsed_s
    if waited > past.deadlines.get(past.rounds_opened, 0.0) * (running.plan.cohort.max_staleness + 1):
        for device, asks in running.still_due().items():
            for ask_id in list(asks)[:1]:
                running.lose(device, "stale", f"no answer for {waited:.0f} s after its round", ask_id)


def _missing(running: RunContext) -> str | None:
    """Return the reason why the run waits for devices, or None if it does not."""
    begun = running.past.rounds_opened > 0
    if begun and (away := running.returning()):
        return said_away(away)
    return missing(running.plan, running.presence.devices, running.unable(), begun)
