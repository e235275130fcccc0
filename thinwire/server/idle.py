"""Between two rounds, and before the end: who comes and goes is noted, and answers are kept."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.core.fleet import NodeLeft
from thinwire.core.formatting import counted
from thinwire.core.types import Failure, ReplyHead, measuring_id_of
from thinwire.server.context import POLL_S, Running


def listen(running: Running, wait_s: float) -> None:
    """Between rounds: who comes and goes is noted, answers are kept for the next round."""
    for arrival in running.poll(wait_s):
        if isinstance(arrival, ReplyHead):
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


def come_back(running: Running) -> None:
    """After a restart: wait for those who were there before, as long as they have to come back."""
    if away := running.returning():
        running.status("waiting", said_away(away))
    while running.returning() and not running.stop_ordered():
        listen(running, POLL_S)


def said_away(away: Collection[str]) -> str:
    """What a run says while it waits for devices that were there before a restart."""
    return f"waiting for {counted(len(away), 'device')} to come back ({', '.join(sorted(away)[:5])})"


def _keep(running: Running, head: ReplyHead) -> None:
    """Keep an answer for the next round to take; one that none may take is thrown away, and its ask has failed."""
    past, device = running.past, head.update_id.device
    if str(head.update_id) in past.decided or head.update_id.run != running.run_id:
        running.fleet.ack([head.update_id])  # it is decided already, or not of this run
    elif head.ask_id == measuring_id_of(running.run_id, past.version, device):
        running.defer(head)  # it came before a restart, and is not recorded yet
    elif wrong := running.wrong(head):
        _fail(running, device, *wrong, head.ask_id)
        running.fleet.ack([head.update_id])
    else:
        running.defer(head)
        if running.plan.cohort.mode == "sync" and not past.delay:  # else it stands in a buffer or round to come
            past.owed.release(device, head.ask_id)


def _fail(running: Running, device: str, kind: str, text: str, ask_id: str) -> None:
    """An ask has failed, unless an answer to it is kept: then that is what came of it."""
    if ask_id in running.past.owed.of(device) and ask_id not in running.deferred:
        running.lose(device, kind, text, ask_id)


def _gone(running: Running, device: str, why: str) -> None:
    """What it owes closed rounds is not waited for; open ones wait for it to come back, until it is their turn."""
    late = running.kept_late()
    for ask_id, asked in running.past.owed.of(device).items():
        if not running.past.line.of(asked) and ask_id not in late:
            running.lose(device, "left", why, ask_id)
