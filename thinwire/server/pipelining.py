"""Pipelined rounds: devices train on while their updates travel (`[local] overlap`, delayed averaging).

With a delay of D rounds, D + 1 rounds are open. Only the current round, which is the oldest, handles replies. Replies
to later rounds wait until the current round is closed. Thus rounds close in order, and each step is made from a whole
round.

When round t closes, round t + D + 1 opens. Its assignments carry the model version that round t made and the outcomes
of that round's updates. A device goes from one assignment to the next without waiting, and has at most D + 1 of them.
Only then does the next round become current.

While the run waits for devices, no round opens or becomes current. The devices keep their assignments, and the time of
no round runs.
"""

from __future__ import annotations

from thinwire.core.events import HeadTaken, RoundClosed
from thinwire.core.fleet import Envelope
from thinwire.server.context import RunContext
from thinwire.server.dispatch import envelope, envelope_again
from thinwire.server.recovery import gone_of
from thinwire.server.round_open import open_round


def line_up(running: RunContext) -> None:
    """Open rounds until as many are open as the delay allows or the run still needs, and send their assignments."""
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


def take_head(running: RunContext) -> bool:
    """Make the oldest open round the current one, so that its time runs from now on; return False if none is open."""
    opened = running.past.line.head
    if opened is None:
        return False
    if running.past.status != "running":
        running.status("running", f"round {opened.round} goes on")
    running.record(HeadTaken(running.clock.wall(), opened.round, running.elapsed))
    return True


def answered(running: RunContext) -> bool:
    """Return True if the current round has enough replies, and no connected device still has to reply.

    The run need not wait for disconnected devices then, since they may never return. Until `return_by` every selected
    device counts as connected.
    """
    past, opened = running.past, running.past.line.head
    if opened is None or not past.delay:
        return False
    here = running.deferred.keys() & set(opened.asks.values())
    there = opened.asks.keys() if running.elapsed < running.return_by else running.presence.hellos.keys()
    still = [ask_id for device, ask_id in opened.asks.items() if device in there and ask_id in past.owed.of(device)]
    return len(here) >= opened.floor and here.issuperset(still)


def asked_before(running: RunContext) -> list[Envelope]:
    """Return the unanswered assignments after a restart, the oldest of each device first.

    This includes the assignments of disconnected devices, which may reconnect.
    """
    owed, gone = running.past.owed, gone_of(running.past.line.now)
    asks = {device: [*gone.get(device, ()), *owed.of(device)] for device in (*owed.busy, *gone)}
    return [envelope_again(running, device, ask_id) for device, ask_ids in asks.items() for ask_id in ask_ids]


def dissolve(running: RunContext) -> None:
    """Close the rounds that are still open when the run ends, without a step; updates that came for them do
    not count.
    """
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
