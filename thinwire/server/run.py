"""One run from its first round, or from where it was, to its end."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import NotWritten, ThinwireError, TooFewClients
from thinwire.core.events import Event
from thinwire.core.fleet import Fleet, NodeLeft
from thinwire.core.home import AggregatorHome
from thinwire.core.types import Failure, ReplyHead
from thinwire.server.ahead import answered, asked_before, dissolve, line_up, take_head
from thinwire.server.beginning import take_first_model
from thinwire.server.cohort import missing
from thinwire.server.deadline import evaluation_deadline
from thinwire.server.envelopes import envelope, envelope_again
from thinwire.server.evaluation import evaluation, settled
from thinwire.server.measured import reached
from thinwire.server.one_round import OneRound
from thinwire.server.presence import Presence
from thinwire.server.running import POLL_S, Running, StopOrder
from thinwire.store import RunRow, Store


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
            _end(running)
    except ThinwireError as error:
        if isinstance(error, NotWritten) and not running.simulated:
            raise
        dissolve(running)
        running.status("failed", str(error), error.exit_code)
    if running.past.status in ("done", "failed", "stopped"):
        _dismiss(running)
    return store.run(run_id)


def _rounds(running: Running) -> None:
    plan, past = running.plan, running.past
    if past.model is None and not ((past.first.open or _gather(running)) and take_first_model(running)):
        return
    _ask_again(running)
    if past.open_round and past.taken:
        running.status("running", f"round {past.open_round.round} goes on")
        _one(running, OneRound.take_up(running))
    while past.steps_made < plan.run.rounds and _reached(running) is None:
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
    return OneRound.take_up(running) if take_head(running) else None


def _ask_again(running: Running) -> None:
    """After a restart: send the unanswered asks of earlier rounds, or of all open ones in a line, again."""
    past = running.past
    if past.delay:
        running.ask(asked_before(running))
        return
    number = past.open_round.round if past.open_round else 0
    owed = past.owed.busy.items()
    running.ask([envelope_again(running, device) for device, (_, asked) in owed if asked != number])


def _one(running: Running, one: OneRound) -> None:
    one.run()
    past, newest, met = running.past, running.past.version, _reached(running)
    sent = {newest, *(past.bases[asked] for device in past.owed.busy for asked in past.owed.of(device).values())}
    keep = {0, newest, newest - 1, past.best.version if past.best else 0, met or 0, *past.measured}
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
    _listen(running, 0.0)  # who came before the run began is there
    while (sentence := _missing(running)) is not None and not answered(running):
        running.status("waiting", sentence)
        if running.stop_ordered():
            return False
        if wait_s and running.elapsed - began > wait_s:
            raise TooFewClients(
                sentence, why=f"the plan waits {wait_s:g} s", hint="start more clients, or raise [cohort] wait_s"
            )
        _listen(running, POLL_S)
    return True


def _wait_for_busy(running: Running) -> None:
    """All who are there work on earlier rounds: as long as the plan's staleness allows, then they are asked anew."""
    past = running.past
    running.status("running", f"waiting for {len(past.owed.busy)} devices that are busy with earlier rounds")
    _listen(running, POLL_S)
    waited = running.elapsed - past.elapsed_s
    if waited > past.deadline_s * (running.plan.cohort.max_staleness + 1):
        for device, asks in running.still_due().items():
            for ask_id in list(asks)[:1]:
                running.lose(device, "stale", f"no answer for {waited:.0f} s after its round", ask_id)


def _missing(running: Running) -> str | None:
    begun = running.past.rounds_opened > 0
    if begun and (away := running.returning()):
        return f"waiting for {len(away)} devices to come back ({', '.join(sorted(away)[:5])})"
    return missing(running.plan, running.presence.devices, running.unable(), begun)


def _listen(running: Running, wait_s: float) -> None:
    """Between rounds: who comes and goes is noted, answers are kept for the next round."""
    for arrival in running.poll(wait_s):
        if isinstance(arrival, ReplyHead):
            _keep(running, arrival)
        elif isinstance(arrival, Failure) and arrival.ask_id in running.past.owed.of(arrival.device):
            running.lose(arrival.device, arrival.kind, arrival.text, arrival.ask_id)
        elif isinstance(arrival, NodeLeft):
            if arrival.why == "revoked":
                running.forget(arrival.device)
            _gone(running, arrival.device, arrival.why)
    if running.elapsed >= running.return_by:
        for device in running.past.owed.busy.keys() - running.presence.hellos.keys():
            _gone(running, device, "did not come back")


def _keep(running: Running, head: ReplyHead) -> None:
    """Keep an answer for the next round to take; one that none may take is thrown away, and its ask has failed."""
    past, device = running.past, head.update_id.device
    if str(head.update_id) in past.decided or head.update_id.run != running.run_id:
        running.fleet.ack([head.update_id])  # of a round whose answers are taken nothing is here: it goes on first
    elif wrong := running.wrong(head):
        if head.ask_id in past.owed.of(device):
            running.lose(device, *wrong, head.ask_id)
        running.fleet.ack([head.update_id])
    else:
        running.defer(head)
        if running.plan.cohort.mode == "sync" and not past.delay:  # else it stands in a buffer or round to come
            past.owed.release(device, head.ask_id)


def _gone(running: Running, device: str, why: str) -> None:
    """What it owes closed rounds is not waited for; open ones wait for it to come back, until it is their turn."""
    in_line = [opened.round for opened in running.past.line]
    late = running.kept_late()
    for ask_id, asked in running.past.owed.of(device).items():
        if asked not in in_line and ask_id not in late:
            running.lose(device, "left", why, ask_id)


def _reached(running: Running) -> int | None:
    """The first version that met the target: one that is measured after it, and is worse, takes nothing back."""
    if (target := running.plan.run.target) is None:
        return None
    measured = running.past.evaluated.items()
    return min((version for version, found in measured if reached(found, target.metric, target.value)), default=None)


def _end(running: Running) -> None:
    plan, past = running.plan, running.past
    if running.stopped != "service":
        dissolve(running)
    if running.stopped == "run":
        running.status("stopped", f"stopped by a person after {past.steps_made} of {plan.run.rounds} rounds", 10)
        return
    if plan.cohort.mode == "buffered":
        _let_go(running)
    if plan.run.evaluate == "clients" and past.version not in past.evaluated:
        _evaluate_last(running)
    if running.stopped == "service":
        return
    said = f"{past.steps_made} rounds"
    if target := plan.run.target:
        version = _reached(running)
        how = "did not reach" if version is None else "reached"
        said += f", {target.metric} {how} {target.value:g}" + ("" if version is None else f" with version {version}")
    running.status("done", said)


def _let_go(running: Running) -> None:
    """The last buffer is closed: nobody need finish what it works on, and no version is measured any more."""
    running.fleet.cancel([ask_id for ask_id, _ in running.past.owed.busy.values()])
    running.record(*settled(running, running.clock.wall(), over=True))


def _evaluate_last(running: Running) -> None:
    """Have the last model measured: every other one was measured by the round after it."""
    version = running.past.version
    deadline = evaluation_deadline(running.past.slowest)
    asks = {d: f"{running.run_id}.eval{version}.{d}" for d in running.presence.devices if d not in running.unable()}
    running.status("running", f"measuring the last model on {len(asks)} devices")
    running.ask([envelope(running, d, a, "evaluate", running.past.rounds_opened, deadline) for d, a in asks.items()])
    until, open_asks, heads = running.elapsed + deadline, dict(asks), list[ReplyHead]()
    while open_asks and running.elapsed < until and not running.stop_ordered():
        for arrival in running.poll(min(POLL_S, max(0.0, until - running.elapsed))):
            if isinstance(arrival, ReplyHead):
                running.fleet.ack([arrival.update_id])
                if open_asks.get(arrival.update_id.device) == arrival.ask_id:
                    del open_asks[arrival.update_id.device]
                    heads.append(arrival)
            elif isinstance(arrival, Failure) and open_asks.get(arrival.device) == arrival.ask_id:
                del open_asks[arrival.device]
        for device in set(open_asks) - set(running.presence.hellos):
            del open_asks[device]
    running.fleet.cancel(list(open_asks.values()))
    if evaluated := evaluation(running, version, heads, running.clock.wall()):
        running.record(evaluated)


def _dismiss(running: Running) -> None:
    """Tell all devices that the run is over, with their last verdicts."""
    running.fleet.cancel([ask_id for device in running.past.owed.busy for ask_id in running.past.owed.of(device)])
    running.fleet.ack([head.update_id for head in running.deferred.values()])
    if running.past.model is None:
        return  # nothing has begun that could be over
    stops = {device: f"{running.run_id}.stop.{device}" for device in running.presence.devices}
    running.ask([envelope(running, d, a, "stop", running.past.rounds_opened, 0.0) for d, a in stops.items()])
