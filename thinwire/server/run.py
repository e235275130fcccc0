"""One run from its first round, or from where it was, to its end."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import NotWritten, ThinwireError, TooFewClients
from thinwire.core.events import Event
from thinwire.core.fleet import Fleet
from thinwire.core.statedir import AggregatorHome
from thinwire.server.context import POLL_S, Running, StopOrder
from thinwire.server.dispatch import envelope_again
from thinwire.server.evaluation import require_metrics
from thinwire.server.idle import listen, said_away
from thinwire.server.initial_model import take_first_model
from thinwire.server.pipelining import answered, asked_before, dissolve, line_up, take_head
from thinwire.server.policy.cohort import missing, way_out
from thinwire.server.policy.eligibility import Presence
from thinwire.server.recovery import take_up
from thinwire.server.round_close import finish
from thinwire.server.round_runner import OneRound
from thinwire.server.run_end import close, dismiss, end, version_that_reached
from thinwire.store import RunRow, Store

PATIENCE_S = 60.0  # after so long a run that may wait for ever says what can be done


def drive(
    run_id: str,
    *,
    store: Store,
    fleet: Fleet,
    home: AggregatorHome,
    clock: Clock | None = None,
    presence: Presence | None = None,
    stop: Callable[[], StopOrder] = lambda: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> RunRow:
    """Make or go on with a run until it is done, failed or stopped; gives its row.

    `stop` is asked often: "run" ends the run for good, "service" leaves it as it is, to go on at the next start. A
    ThinwireError ends the run as failed, with the reason in its status; anything else is raised. On a full disk
    NotWritten is raised and the run is left unchanged; the next start continues it. Of a simulated run nobody can be
    shut out, nothing waits while an update is folded, and nobody resumes it.
    """
    running = Running(run_id, store, fleet, home, clock or RealClock(), presence or Presence(), stop, on_event)
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


def _rounds(running: Running) -> None:
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


def _next(running: Running) -> OneRound | None:
    """The round whose answers are taken now; None when nobody can be asked."""
    if not running.past.delay:
        return OneRound.open(running)
    if _missing(running) is None:
        line_up(running)
    return take_up(running) if take_head(running) else None


def _ask_again(running: Running) -> None:
    """After a restart: send the unanswered asks of earlier rounds again; with asks that went ahead, all of them."""
    past = running.past
    if past.delay:
        running.ask(asked_before(running))
        return
    number = past.line.head.round if past.line.head else 0
    owed = past.owed.busy.items()
    running.ask([envelope_again(running, device, ask_id) for device, (ask_id, asked) in owed if asked != number])


def _one(running: Running, one: OneRound) -> None:
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


def _gather(running: Running) -> bool:
    """Wait until enough devices are there, or the head of a line needs nobody any more; False when a person stopped
    the run meanwhile.
    """
    began = running.elapsed
    wait_s = running.plan.cohort.wait_s
    listen(running, 0.0)  # who came before the run began is there
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


def _wait_for_busy(running: Running) -> None:
    """All who are there work on earlier rounds: as long as the plan's staleness allows, then they are asked anew."""
    past = running.past
    running.status("running", f"waiting for {len(past.owed.busy)} devices that are busy with earlier rounds")
    listen(running, POLL_S)
    waited = running.elapsed - past.elapsed_s
    if waited > past.deadlines.get(past.rounds_opened, 0.0) * (running.plan.cohort.max_staleness + 1):
        for device, asks in running.still_due().items():
            for ask_id in list(asks)[:1]:
                running.lose(device, "stale", f"no answer for {waited:.0f} s after its round", ask_id)


def _missing(running: Running) -> str | None:
    begun = running.past.rounds_opened > 0
    if begun and (away := running.returning()):
        return said_away(away)
    return missing(running.plan, running.presence.devices, running.unable(), begun)
