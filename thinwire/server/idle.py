"""Polling while no round is driven: the run notes which devices connect and disconnect, and keeps replies.

This happens between two rounds, while the run waits for devices, and before its end.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.core.fleet import NodeLeft
from thinwire.core.formatting import counted
from thinwire.core.types import Failure, ReplyHeader, measuring_id_of
from thinwire.server.context import POLL_S, RunContext


def listen(running: RunContext, wait_s: float) -> None:
    """Handle the arrivals of one poll while no round is driven, and keep replies for the next round."""
    for arrival in running.poll(wait_s):
        if isinstance(arrival, ReplyHeader):
            _keep(running, arrival)
        elif isinstance(arrival, Failure):
            _fail(running, arrival.device, arrival.kind, arrival.text, arrival.ask_id)
        elif isinstance(arrival, NodeLeft):
            if arrival.why == "revoked":
                running.forget(arrival.device)
            _gone(running, arrival.device, arrival.why)
    if running.elapsed >= running.return_by:
        for device in running.past.owed.busy.keys() - running.presence.hellos.keys():
            _gone(running, device, "did not come back")


def come_back(running: RunContext) -> None:
    """Wait after a restart for the devices that were connected before it, until `return_by` or until the
    run is stopped.
    """
    if away := running.returning():
        running.status("waiting", said_away(away))
    while running.returning() and not running.stop_ordered():
        listen(running, POLL_S)


def said_away(away: Collection[str]) -> str:
    """Return the status text of a run that waits for these devices to reconnect."""
    return f"waiting for {counted(len(away), 'device')} to come back ({', '.join(sorted(away)[:5])})"


def _keep(running: RunContext, head: ReplyHeader) -> None:
    """Defer a reply to the next round; reject it and record the failure if no round may accept it."""
    past, device = running.past, head.update_id.device
    if str(head.update_id) in past.decided or head.update_id.run != running.run_id:
        running.fleet.ack([head.update_id])  # its outcome is recorded already, or it belongs to another run
    elif head.ask_id == measuring_id_of(running.run_id, past.version, device):
        running.defer(head)  # an evaluation that came before a restart and is not recorded yet
    elif wrong := running.wrong(head):
        _fail(running, device, *wrong, head.ask_id)
        running.fleet.ack([head.update_id])
    else:
        running.defer(head)
        if running.plan.cohort.mode == "sync" and not past.delay:  # else a later buffer or round needs it
            past.owed.release(device, head.ask_id)


def _fail(running: RunContext, device: str, kind: str, text: str, ask_id: str) -> None:
    """Record that an assignment failed, unless a reply to it is deferred: then the reply is its outcome."""
    if ask_id in running.past.owed.of(device) and ask_id not in running.deferred:
        running.lose(device, kind, text, ask_id)


def _gone(running: RunContext, device: str, why: str) -> None:
    """Give up a disconnected device's assignments of closed rounds, unless their late replies are already here.

    Its assignments of open rounds stay outstanding, because the device may reconnect before those rounds become
    current.
    """
    late = running.kept_late()
    for ask_id, asked in running.past.owed.of(device).items():
        if not running.past.line.of(asked) and ask_id not in late:
            running.lose(device, "left", why, ask_id)
