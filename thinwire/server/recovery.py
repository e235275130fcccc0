"""What the journal says of the round that is open, as its machine was told it: after a restart it is told again, and
the round goes on as if it had never been cut off.
"""

from __future__ import annotations

from thinwire.core.events import ClientAsked, ClientBack, ClientFailed, UpdateAccepted, UpdateDropped
from thinwire.core.serialization import reply_from_json
from thinwire.core.types import ReplyHead, UpdateId
from thinwire.server import round_events
from thinwire.server.context import Running
from thinwire.server.round_runner import OneRound
from thinwire.server.state.open_rounds import OpenNow


def take_up(running: Running) -> OneRound:
    """The round that is open: the first in a line, or the one in which the aggregator ended. What it had accepted is
    folded again, in its order.
    """
    opened, now = running.past.line.head, running.past.line.now
    assert opened is not None
    one = OneRound(running, opened)
    one.deadlines |= {event.ask_id: event.deadline_s for event in now.since if isinstance(event, ClientAsked)}
    one.heads |= {head.update_id: head for head in map(head_of, now.accepted)}
    one.heads_of.update(event.ask_id for event in now.accepted)
    one.machine.dropped += not_taken(now)
    one.machine.replay(told(now))
    _refold(one, now)
    for device in sorted(running.presence.hellos.keys() & one.machine.lost.keys()):
        one.on(round_events.Joined(device))  # it came before there was anything to come back to
    return one


def _refold(one: OneRound, now: OpenNow) -> None:
    """Fold again what was accepted and not dropped, in its order; not what those sent who were shut out meanwhile."""
    revoked, folding = one.running.revoked(), one.machine.folding
    for event in now.accepted:
        update_id = UpdateId.parse(event.update_id)
        if event.device in revoked and event.update_id not in now.folded and update_id in folding:
            one.on(round_events.Refused(update_id, "revoked"))
    for event in now.accepted:
        if (update_id := UpdateId.parse(event.update_id)) in folding:
            one.begin(one.heads[update_id], event.discount)


def told(now: OpenNow) -> round_events.Told:
    """All that was decided since the round opened, in the journal's order."""
    accepted = {event.update_id for event in now.accepted}
    for event in now.since:
        match event:
            case ClientAsked(device=device, ask_id=ask_id):
                yield round_events.Asked(device, ask_id, event.instead_of), event.elapsed_s
            case UpdateAccepted():
                head = head_of(event)
                seen = round_events.Head(head.update_id, head.ask_id, event.device, head.base_version, again=True)
                yield seen, event.elapsed_s
            case UpdateDropped(update_id=update_id) if update_id in accepted:
                yield round_events.Refused(UpdateId.parse(update_id), event.reason), event.elapsed_s
            case ClientFailed(device=device, ask_id=ask_id):
                yield round_events.Failed(device, ask_id, event.kind, event.text), event.elapsed_s
            case ClientBack(device=device):
                yield round_events.Joined(device), event.elapsed_s


def not_taken(now: OpenNow) -> list[UpdateId]:
    """What was dropped as it came."""
    accepted = {event.update_id for event in now.accepted}
    dropped = [event.update_id for event in now.since if isinstance(event, UpdateDropped)]
    return [UpdateId.parse(update_id) for update_id in dropped if update_id not in accepted]


def head_of(event: UpdateAccepted) -> ReplyHead:
    """The head that was accepted."""
    head = reply_from_json(event.head)
    assert isinstance(head, ReplyHead)
    return head


def gone_of(now: OpenNow) -> dict[str, list[str]]:
    """The asks of devices that left and are not back."""
    gone = dict[str, list[str]]()
    for event in now.since:
        if isinstance(event, ClientFailed) and event.kind == "left":
            gone[event.device] = [event.ask_id]
        elif isinstance(event, (ClientBack, UpdateAccepted)) and event.ask_id in gone.get(event.device, ()):
            del gone[event.device]
    return gone
