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

from collections.abc import Sequence

from thinwire.core.events import RoundBecameCurrent, RoundClosed, RoundOpened
from thinwire.core.fleet import Envelope
from thinwire.core.plan import RunPlan
from thinwire.core.types import ReplyHeader
from thinwire.server.context import RunContext
from thinwire.server.recovery import disconnected_assignments
from thinwire.server.round_mode import RoundMode, open_round


class PipelinedMode(RoundMode):
    """The pipelined mode: synchronous rounds, of which `delay` + 1 are open and one is current."""

    replaces = False  # the devices that are online work on later rounds already, from a newer version

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        """Return True if the plan's rounds are pipelined."""
        return plan.local.delay > 0

    def open_next(self, running: RunContext) -> RoundOpened | None:
        """Open as many rounds as the delay allows, unless the run waits for devices; then make the oldest current."""
        if running.waits_for() is None:
            self._fill(running)
        opened = running.run_state.open_rounds.current
        if opened is None:
            return None
        if running.run_state.status != "running":
            running.status("running", f"round {opened.round} goes on")
        running.record(RoundBecameCurrent(running.clock.wall(), opened.round, running.elapsed))
        return opened

    def _fill(self, running: RunContext) -> None:
        """Open rounds until as many are open as the delay allows or the run still needs, and send their assignments."""
        run_state = running.run_state
        while (
            len(run_state.open_rounds.rounds) <= self.delay
            and run_state.steps_made + len(run_state.open_rounds.rounds) < self.plan.run.rounds
        ):
            if (opened := open_round(running)) is None:
                return
            running.assign([running.training_envelope(assignment_id) for assignment_id in opened.assignments.values()])

    def busy(self, running: RunContext) -> dict[str, int]:
        """Return device -> its oldest open round, of the devices that have as many assignments as the delay allows."""
        due = running.outstanding().items()
        return {device: min(one.round for one in assigned) for device, assigned in due if len(assigned) > self.delay}

    def envelopes_at_start(self, running: RunContext, assignment_ids: Sequence[str]) -> list[Envelope]:
        """Return no assignments: they were sent when the round opened, before it became current."""
        return []

    def assignment(self, running: RunContext, assignment_id: str) -> Envelope:
        """Return an assignment on the model version with which its round opened."""
        return running.training_envelope_again(assignment_id)

    def defer(self, running: RunContext, header: ReplyHeader) -> None:
        """Keep a reply until its round is current; until then its device counts as busy."""
        running.defer(header)

    def can_continue(self, running: RunContext) -> bool:
        """Return True if the current round has enough replies, and no connected device still has to reply.

        The run need not wait for disconnected devices then, since they may never return. Until `reconnect_until_s`
        every selected device counts as connected.
        """
        opened = running.run_state.open_rounds.current
        if opened is None:
            return False
        ledger, selected, present = running.run_state.ledger, opened.assignments.keys(), running.online.hellos.keys()
        online = selected if running.elapsed < running.reconnect_until_s else present
        replied = running.deferred.keys() & set(opened.assignments.values())
        outstanding = [
            assignment_id
            for device, assignment_id in opened.assignments.items()
            if device in online and ledger.is_outstanding(device, assignment_id)
        ]
        return len(replied) >= opened.min_updates and replied.issuperset(outstanding)

    def envelopes_to_resend(self, running: RunContext) -> list[Envelope]:
        """Return the outstanding assignments of all rounds, the oldest of each device first.

        This includes the assignments of disconnected devices, which may reconnect.
        """
        ledger, lost = running.run_state.ledger, disconnected_assignments(running.run_state.open_rounds.progress)
        return [
            running.training_envelope_again(assignment_id)
            for device in dict.fromkeys((*ledger.busy, *lost))
            for assignment_id in (*lost.get(device, ()), *(one.assignment_id for one in ledger.outstanding(device)))
        ]

    def abort(self, running: RunContext) -> None:
        """Close the rounds that are open when the run ends, without a step; none of their updates counts."""
        run_state, open_rounds = running.run_state, running.run_state.open_rounds
        while (opened := open_rounds.current) is not None:
            elapsed, seconds = running.elapsed, 0.0
            if open_rounds.accepts_replies:
                seconds = elapsed - open_rounds.current_since_s + open_rounds.progress.missed_s
            outstanding = [
                device
                for device, assignment_id in opened.assignments.items()
                if run_state.ledger.is_outstanding(device, assignment_id)
            ]
            running.fleet.cancel([opened.assignments[device] for device in outstanding])
            running.record(
                RoundClosed(
                    at=running.clock.wall(),
                    round=opened.round,
                    reason="stopped",
                    version=run_state.version,
                    aggregated=[],
                    dropped=[event.update_id for event in open_rounds.progress.accepted],
                    outstanding=outstanding,
                    elapsed_s=elapsed,
                    seconds=seconds,
                    metrics={},
                )
            )
