"""Asks that are sent ahead, where devices train on while their updates travel: `[local] overlap`.

With a delay of D rounds D + 1 are open. Only the head of the line takes answers; those to the rounds behind it wait
until it is closed, so that rounds close in order and each step is made from whole rounds. When round t closes, round
t + D + 1 opens, and its asks carry the version that round t made and the verdicts of it: a device goes from one ask to
the next without waiting, and holds at most D + 1. Only then is the next head taken. While the run waits for devices,
neither happens: their asks stay theirs, and no round's time runs.
"""

from __future__ import annotations

from thinwire.core.events import HeadTaken, RoundClosed
from thinwire.core.fleet import Envelope
from thinwire.server.context import Running
from thinwire.server.dispatch import envelope, envelope_again
from thinwire.server.recovery import gone_of
from thinwire.server.round_open import open_round


def line_up(running: Running) -> None:
    """Open rounds until as many are open as the delay allows or the run still needs, and send each round's asks."""
    past = running.past
    while len(past.line.rounds) <= past.delay and past.steps_made + len(past.line.rounds) < running.plan.run.rounds:
        if (opened := open_round(running)) is None:
            return
        running.ask(
            [
                envelope(running, device, ask_id, "train", opened.round, opened.deadline_s)
                for device, ask_id in opened.asks.items()
            ]
        )


def take_head(running: Running) -> bool:
    """The time of the first round in the line runs from now on; False where none is open."""
    opened = running.past.line.head
    if opened is None:
        return False
    if running.past.status != "running":
        running.status("running", f"round {opened.round} goes on")
    running.record(HeadTaken(running.clock.wall(), opened.round, running.elapsed))
    return True


def answered(running: Running) -> bool:
    """Whether the head of the line has enough answers, and all that those who are there may give: then it waits for
    nobody who is away, since one that left may have left for good.
    """
    past, opened = running.past, running.past.line.head
    if opened is None or not past.delay:
        return False
    here = running.deferred.keys() & set(opened.asks.values())
    there = opened.asks.keys() if running.elapsed < running.return_by else running.presence.hellos.keys()
    still = [ask_id for device, ask_id in opened.asks.items() if device in there and ask_id in past.owed.of(device)]
    return len(here) >= opened.floor and here.issuperset(still)


def asked_before(running: Running) -> list[Envelope]:
    """After a restart: all that was asked and not answered, each device's oldest first; also of who may come back."""
    owed, gone = running.past.owed, gone_of(running.past.line.now)
    asks = {device: [*gone.get(device, ()), *owed.of(device)] for device in (*owed.busy, *gone)}
    return [envelope_again(running, device, ask_id) for device, ask_ids in asks.items() for ask_id in ask_ids]


def dissolve(running: Running) -> None:
    """The run is over: the rounds that are still open close without a step, and what came for them counts nowhere."""
    past = running.past
    while past.delay and (opened := past.line.head) is not None:
        waited = [device for device, ask_id in opened.asks.items() if ask_id in past.owed.of(device)]
        running.fleet.cancel([opened.asks[device] for device in waited])
        running.record(
            RoundClosed(
                at=running.clock.wall(),
                round=opened.round,
                reason="stopped",
                version=past.version,
                folded=[],
                dropped=[event.update_id for event in past.line.now.accepted],
                outstanding=waited,
                elapsed_s=running.elapsed,
                seconds=running.elapsed - past.line.head_since_s + past.line.now.missed_s if past.line.taken else 0.0,
                metrics={},
            )
        )
