"""Measurements of a closed round: the speed of its devices, the stages of its time, the metrics that it records.

They decide nothing in the round itself. Later rounds learn from them: `DeviceProfiles` gets the speed of each device,
and the round's event (`RoundClosed`) gets the rest, which reports and the dashboard explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from thinwire.core.score_histogram import MEASURED, TRAINED
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server.device_terms import assigned_steps
from thinwire.server.evaluation import names_in
from thinwire.server.round_events import RoundResult
from thinwire.store import MeasureRow
from thinwire.store.device_profiles import durations, epochs_of, max_believed_steps, with_own_work, work_key

if TYPE_CHECKING:
    from thinwire.server.round_runner import RoundRunner


def learn_speeds(runner: RoundRunner, now: float) -> list[MeasureRow]:
    """Teach the device profiles the speeds that this round's replies show, and return the rows to store.

    Replies are read in the order of the journal, so a resumed round learns the same.
    """
    running = runner.running
    if running.plan.is_protected:
        return []  # such an update tells no times
    work = work_key(running.plan, running.layout)
    for event in running.run_state.open_rounds.progress.accepted:
        header = runner.headers[UpdateId.parse(event.update_id)]
        hello = running.online.hellos.get(event.device)
        if hello is not None:
            running.device_profiles.learn_rtt(event.device, hello.link.get("rtt_s", 0.0))
        assigned = running.run_state.ledger.find(header.assignment_id)
        most = max_believed_steps(running.plan, header, assigned_steps(running, header))
        found = durations(header, assigned.sent_bytes if assigned else 0, epochs_of(running.plan), most)
        if running.plan.local.steps == "auto":
            found = with_own_work(found, header, running.plan.local, assigned.work if assigned else None)
        running.device_profiles.learn(event.device, work, found)
    return [] if running.simulated else running.device_profiles.changed_rows(now)


def time_spent(
    runner: RoundRunner, closed: RoundResult, counted: Sequence[ReplyHeader]
) -> tuple[str, dict[str, float]]:
    """Return the device whose reply came last, and the seconds by stage until its update was in the sum.

    In a buffered round an assignment of an earlier round may have filled the buffer. A simulation's clock does not
    count the aggregator's work, so there `aggregate_s` is that of all updates.
    """
    assigned = set(runner.machine.assignments.values())
    arrived = [
        (header.transfer.arrived_at, header)
        for header in counted
        if header.transfer and (closed.reason == "buffer" or header.assignment_id in assigned)
    ]
    if not arrived:
        return "", {"aggregate_s": runner.adding_s} if runner.running.simulated else {}
    _, last = max(arrived, key=lambda pair: pair[0])
    assert last.transfer is not None
    pulled_at = last.transfer.pulled_at  # 0 for a masked update: an advertisement has answered its assignment before
    return last.update_id.device, {
        **({"wait_s": max(0.0, pulled_at - runner.opened.at)} if pulled_at else {}),
        **({} if runner.plan.is_protected else asdict(last.timings)),  # such an update tells no times
        "upload_s": max(0.0, last.transfer.arrived_at - last.transfer.began_at),
        "receive_s": runner.receive_s.get(last.update_id, 0.0),
        "aggregate_s": runner.adding_s if runner.running.simulated else runner.aggregate_s.get(last.update_id, 0.0),
    }


def recorded_metrics(runner: RoundRunner) -> dict[str, Any]:
    """Return the fields of `RoundClosed` about metrics: the recorded names, and the number of other metrics."""
    accepted = runner.running.run_state.open_rounds.progress.accepted
    said = [event.header.get("metrics", {}) for event in accepted]
    names = [*names_in(said, MEASURED), *names_in(said, TRAINED)]
    others = sum(name not in names for metrics in said for name in metrics)
    return {"names": names, "ignored": others + sum(event.ignored for event in accepted)}
