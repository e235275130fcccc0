"""After a restart the open round is rebuilt: its state machine replays the events that the journal holds.

The replayed round continues as if the aggregator had never stopped. It aggregates the accepted updates again from the
spool, in the order of the journal, so the model is the same to the bit. An assignment with an accepted reply is not
sent again. If its device repeats the reply, the round ignores the copy and acknowledges the reply when it closes.

Recovery sends nothing. The run sends the outstanding assignments of other rounds again, in a pipelined run those of all
rounds (`RoundMode.envelopes_to_resend`). `RoundRunner.run` sends those of the open round, in a pipelined run none.
docs/explain/a-round.md, "When a part fails", describes the recovery from each failure.
"""

from __future__ import annotations

from thinwire.core.events import (
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.run_events import PhaseClosed
from thinwire.core.serialization import reply_from_json
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server import round_events
from thinwire.server.round_runner import RoundRunner
from thinwire.server.secure_round_runner import SecureRoundRunner
from thinwire.server.state.run_state import RoundProgress


def rebuild_round(runner: RoundRunner) -> RoundRunner:
    """Rebuild the current round, after a restart or when it is the next pipelined round, and return its driver.

    Accepted updates are aggregated again in the order of the journal.
    """
    running, now = runner.running, runner.running.run_state.open_rounds.progress
    runner.resumed = True
    runner.headers |= {header.update_id: header for header in map(header_of, now.accepted)}
    runner.reply_counts.update(event.assignment_id for event in now.accepted)
    runner.machine.dropped += not_accepted(now)
    runner.machine.replay(replayed(now, runner))
    _add_again(runner, now)
    for device in sorted(running.online.hellos.keys() & runner.machine.lost.keys()):
        runner.on(round_events.DeviceConnected(device))  # it reconnected before its round was rebuilt
    return runner


def _add_again(runner: RoundRunner, now: RoundProgress) -> None:
    """Aggregate again the accepted updates that were not dropped, in their order.

    An update is rejected instead if its device was revoked meanwhile and the journal does not say that it was
    aggregated.
    """
    revoked, aggregating = runner.running.revoked(), runner.machine.aggregating
    for event in now.accepted:
        update_id = UpdateId.parse(event.update_id)
        if event.device in revoked and event.update_id not in now.aggregated and update_id in aggregating:
            runner.on(round_events.AggregationRejected(update_id, "revoked"))
    for event in now.accepted:
        if (update_id := UpdateId.parse(event.update_id)) in aggregating:
            runner.begin(runner.headers[update_id], event.discount)


def replayed(now: RoundProgress, runner: RoundRunner) -> round_events.PastEvents:
    """Yield the events of the current round since its opening, each with its time, in the order of the journal."""
    accepted = {event.update_id for event in now.accepted}
    if isinstance(runner, SecureRoundRunner):
        yield from runner.abort_inputs()
    for event in now.since:
        match event:
            case ClientSelected(device=device, assignment_id=assignment_id):
                yield round_events.ReplacementSelected(device, assignment_id, event.instead_of), event.elapsed_s
            case UpdateAccepted():
                header = header_of(event)
                seen = round_events.UpdateArrived(
                    header.update_id, header.assignment_id, event.device, header.base_version, again=True
                )
                yield seen, event.elapsed_s
            case UpdateDropped(update_id=update_id) if update_id in accepted:
                rejected = round_events.AggregationRejected(UpdateId.parse(update_id), event.reason, event.detail)
                yield rejected, event.elapsed_s
            case ClientFailed(device=device, assignment_id=assignment_id):
                yield round_events.AssignmentFailed(device, assignment_id, event.kind, event.text), event.elapsed_s
            case ClientReconnected(device=device):
                yield round_events.DeviceConnected(device), event.elapsed_s
            case PhaseClosed() if isinstance(runner, SecureRoundRunner):
                yield from runner.phase_inputs(event)


def not_accepted(now: RoundProgress) -> list[UpdateId]:
    """Return the updates that were dropped on arrival, without being accepted first."""
    accepted = {event.update_id for event in now.accepted}
    dropped = [event.update_id for event in now.since if isinstance(event, UpdateDropped)]
    return [UpdateId.parse(update_id) for update_id in dropped if update_id not in accepted]


def header_of(event: UpdateAccepted) -> ReplyHeader:
    """Return the header of the reply that was accepted with this event."""
    header = reply_from_json(event.header)
    assert isinstance(header, ReplyHeader)
    return header


def disconnected_assignments(now: RoundProgress) -> dict[str, list[str]]:
    """Return device -> its assignment in the current round, of the devices that have not reconnected."""
    gone = dict[str, list[str]]()
    for event in now.since:
        if isinstance(event, ClientFailed) and event.kind == "offline":
            gone[event.device] = [event.assignment_id]
        elif isinstance(event, (ClientReconnected, UpdateAccepted)) and event.assignment_id in gone.get(
            event.device, ()
        ):
            del gone[event.device]
    return gone
