"""A mode of rounds is one object that answers all questions in which synchronous and other rounds differ.

`RoundMode` is the synchronous mode, and the base of the others: `buffered_round.py` and `pipelining.py` override what
differs. A new mode is one file, and one line in `run.py`.

`open_round` decides a round: which devices are selected, until when, and on which terms (`device_terms.py`).

Invariant: `RoundOpened` and its `ClientSelected` events are recorded in one transaction before any assignment is sent,
with the reason of each decision. A resume reads these decisions and does not take them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from thinwire.core.events import ClientSelected, Evaluated, Event, RoundOpened, RunNoted, RunStatusChanged
from thinwire.core.fleet import Envelope
from thinwire.core.formatting import Reason, counted
from thinwire.core.plan import RunPlan
from thinwire.core.types import ReplyHeader, SecureWork, assignment_id_of
from thinwire.server.aggregator import RoundAggregator, SumConfig, WeightCaps, largest_norm
from thinwire.server.concurrency import at_work_before, slowest_s
from thinwire.server.context import RunContext
from thinwire.server.device_terms import (
    assigned_codec,
    assigned_steps,
    codecs_of,
    deadline_of,
    expected,
    most_common,
    own_work,
    rungs_of,
    weights_of,
)
from thinwire.server.evaluation import evaluation
from thinwire.server.policy.assignment_terms import Deadline, deadline_in_waves
from thinwire.server.policy.cohort import Cohort, evaluators, select_clients, updates_needed
from thinwire.server.reducing_aggregator import ReducingAggregator
from thinwire.server.round import Round, RoundMachine
from thinwire.server.round_events import RoundConfig


class RoundMode:
    """The synchronous mode: one round is open, and it selects its clients when it opens.

    >>> RoundMode.is_for(RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1'))
    True
    """

    replaces = True  # False: no device is selected after the opening
    shares_devices = True  # False: other runs may not learn which devices a round selected
    evaluates_alone = True  # False: no client tells a metric outside of a round
    counts_alike = False  # True: each update counts as a whole, however many examples it was made from

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.delay = plan.local.delay  # rounds that open ahead of the current one

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        """Return True if the plan's rounds are of this mode."""
        return plan.cohort.mode == "sync" and not plan.local.delay

    # A round opens.

    def open_next(self, running: RunContext) -> RoundOpened | None:
        """Return the opening event of the round that accepts replies next; None if no device can be selected now."""
        return open_round(running)

    def busy(self, running: RunContext) -> dict[str, int]:
        """Return device -> the round that it still works for, of the devices that no round can select."""
        return {assigned.device: assigned.round for assigned in running.run_state.ledger.oldest()}

    def select(self, running: RunContext, number: int) -> Cohort:
        """Return the selected devices, and the reasons why others are not selected."""
        work = at_work_before(running.run_state, number).values() if self.plan.cohort.max_concurrency else ()
        holding = sum(running.elapsed < lease.until_s for lease in work)
        present, unable = running.online.names, running.unable()
        weights = partial(weights_of, running, number)
        return select_clients(self.plan, number, present, unable, self.busy(running), weights, holding)

    def excluded(self, running: RunContext, device: str) -> str:
        """Return why no round of this mode may select a device, as a phrase about the device; "" if it may."""
        return ""

    def min_updates(self, wanted: int) -> int:
        """Return the fewest updates that make a step in a round that wants so many."""
        return updates_needed(self.plan, wanted)

    def may_open(self, running: RunContext, cohort: Cohort, min_updates: int) -> bool:
        """Return False if a round of these devices could make no step, because the others are busy."""
        return bool(cohort.selected) and min_updates <= cohort.wanted

    def expected_to_reply(self, running: RunContext, cohort: Cohort, min_updates: int) -> tuple[Sequence[str], int]:
        """Return the devices whose times decide the deadline, and the number of replies that the round needs."""
        return [*cohort.selected, *cohort.later], max(cohort.target_updates, min_updates)

    def deadline_in_waves(self, auto: Deadline, devices: int) -> Deadline:
        """Return the automatic deadline of a round in which `devices` reply, not all of them at once."""
        return deadline_in_waves(auto, devices, self.plan.cohort.max_concurrency)

    def notes(self, able: int) -> list[Reason]:
        """Return warnings for the user who starts a run while `able` devices can take part."""
        return []

    # A round runs.

    def machine(self, opened: RoundOpened, running: RunContext) -> RoundMachine:
        """Build the state machine of a round, which may have opened before a restart."""
        run_state, config = running.run_state, self.config(opened)
        since_s = max(config.opened_s, run_state.open_rounds.current_since_s)
        earlier = at_work_before(run_state, opened.round) if config.max_concurrency else {}
        return Round(replace(config, opened_s=since_s, earlier=earlier, slowest_s=partial(slowest_s, run_state)))

    def config(self, opened: RoundOpened) -> RoundConfig:
        """Return the configuration of a round that follows from its opening event and the plan."""
        cohort = self.plan.cohort
        return RoundConfig(
            number=opened.round,
            base_version=opened.base_version,
            assignments=opened.assignments,
            target_updates=opened.target_updates,
            min_updates=opened.min_updates,
            opened_s=opened.elapsed_s,
            deadline_s=opened.deadline_s,
            late=cohort.late,
            max_staleness=cohort.max_staleness,
            staleness_exponent=cohort.staleness_exponent,
            max_concurrency=cohort.max_concurrency,
        )

    def envelopes_at_start(self, running: RunContext, assignment_ids: Sequence[str]) -> list[Envelope]:
        """Return which outstanding assignments of a round are sent when it begins to accept replies, or is resumed.

        Invariant: only the open round makes a version, so the newest one is that with which the round opened. A resumed
        round therefore trains from the version that the journal names.
        """
        return [running.training_envelope(assignment_id) for assignment_id in assignment_ids]

    def assignment(self, running: RunContext, assignment_id: str) -> Envelope:
        """Return an assignment that is sent while its round accepts replies."""
        return running.training_envelope(assignment_id)

    def summed_together(self, running: RunContext, number: int) -> int:
        """Return how many updates of the round are aggregated together."""
        return running.run_state.ledger.selected(number)

    def secure_work(self, running: RunContext, number: int) -> SecureWork | None:
        """Return the work that all clients of a secure round share; None in other rounds."""
        return None

    def reveal(self, running: RunContext, starts: bool = False) -> None:
        """Give the models of a private run their names, after the event that names them was recorded."""

    def blocked(self, running: RunContext) -> str:
        """Return why no round may open before a person has acted, as a sentence; "" if one may."""
        return ""

    def require_budget(self, running: RunContext) -> None:
        """Raise `BudgetSpent` if too few clients may spend another round of a private run."""

    def reserved(self, running: RunContext, opened: RoundOpened) -> list[Event]:
        """Return what a round of a private run spends of the privacy budget; recorded with its opening."""
        return []

    def withheld(self, running: RunContext, number: int) -> str:
        """Return why the result of a round may not be released; "" if it may."""
        return ""

    def released(self, running: RunContext, number: int, stored: Event, aggregator: RoundAggregator) -> list[Event]:
        """Return that the model of a round is released, in a private run; recorded with the round's end."""
        return []

    def aggregator(self, running: RunContext, opened: RoundOpened, caps: WeightCaps | None = None) -> RoundAggregator:
        """Return an empty sum for the updates of a round, with these caps on weights."""
        config = SumConfig(
            weights=running.run_state.weights,
            codec_of=partial(assigned_codec, running),
            counters=running.model.counters,
            steps_of=partial(assigned_steps, running),
            caps=caps or WeightCaps(norm=largest_norm(self.plan, running.run_state.norms)),
            counts_alike=self.counts_alike,
        )
        if self.plan.server.reduce == "mean":
            return RoundAggregator(self.plan, running.layout, opened.codec, config)
        return ReducingAggregator(running.home.spool, self.plan, running.layout, opened.codec, config)

    def evaluate(
        self, running: RunContext, opened: RoundOpened, in_time: Sequence[ReplyHeader], now: float
    ) -> list[Evaluated]:
        """Return the evaluations that are final when the round closes: those of its base model."""
        base = opened.base_version
        if base in running.run_state.scores.evaluated:
            return []
        headers = [header for header in in_time if header.base_version == base]
        found = evaluation(running, base, headers, now)
        return [found] if found else []

    # Between two rounds, after a restart, at the end.

    def defer(self, running: RunContext, header: ReplyHeader) -> None:
        """Keep a reply that arrives between two rounds; its device can be selected again."""
        running.defer(header)
        running.run_state.ledger.release(header.update_id.device, header.assignment_id)

    def can_continue(self, running: RunContext) -> bool:
        """Return True if the run can go on although it should wait for devices."""
        return False

    def envelopes_to_resend(self, running: RunContext) -> list[Envelope]:
        """Return the outstanding assignments that a restart sends again, but for those that `RoundRunner.run` sends."""
        run_state = running.run_state
        number = run_state.open_rounds.current.round if run_state.open_rounds.current else 0
        others = [assigned.assignment_id for assigned in run_state.ledger.oldest() if assigned.round != number]
        return [running.training_envelope_again(assignment_id) for assignment_id in others]

    def abort(self, running: RunContext) -> None:
        """Close the rounds that are open although the run ends."""

    def cancel_remaining(self, running: RunContext) -> None:
        """Give up the assignments that remain after the last round."""

    def connected(self, running: RunContext) -> set[str]:
        """Return the devices that were connected before a restart, for whose return the run waits."""
        return running.run_state.connected


def open_round(running: RunContext) -> RoundOpened | None:
    """Decide a round, record it and return its opening event.

    Devices that have been silent for longer than the plan's staleness allows are given up first. Return None if no
    round can open now.
    """
    run_state, plan, mode = running.run_state, running.plan, running.mode
    number, base = run_state.rounds_opened + 1, run_state.bases.newest
    for device, assignments in running.outstanding().items():
        for selected in assignments:
            if (rounds := number - selected.round) > plan.cohort.max_staleness + mode.delay:
                running.lose(device, "stale", f"no answer for {counted(rounds, 'round')}", selected.assignment_id)
    cohort = mode.select(running, number)
    min_updates = mode.min_updates(cohort.wanted)
    if not mode.may_open(running, cohort, min_updates):
        return None
    devices, wanted = mode.expected_to_reply(running, cohort, min_updates)
    sizes = {device: running.distributor.payload_for(device).size for device in devices}
    codecs = codecs_of(running)
    decides = plan.cohort.deadline_s == "auto" or len(codecs) > 1
    times = expected(running, number, sizes, codecs) if decides else {}
    deadline = deadline_of(running, times, wanted, min_updates)
    chosen = rungs_of(running, times, codecs, deadline.fits_s)
    # Sums of EF21, SCAFFOLD and FedDyn hold all that a device has sent, and no part can be taken out. After a device
    # is revoked, all devices therefore start again from zero.
    start_again = plan.has_client_state and running.revoked() & run_state.weights.keys()
    considered = {*cohort.candidates, *cohort.reasons}
    opened = RoundOpened(
        at=running.clock.wall(),
        round=number,
        elapsed_s=running.elapsed,
        base_version=base.version,
        base_digest=base.digest,
        added=sorted(considered - run_state.considered),
        assignments={device: assignment_id_of(running.run_id, number, device) for device in cohort.selected},
        codec=most_common(chosen, codecs),
        deadline_s=deadline.seconds,
        target_updates=max(cohort.target_updates, min_updates),
        min_updates=min_updates,
        reasons=dict(cohort.reasons),
        references_from=number if start_again else run_state.references_from,
        deadline_reason=deadline.reasons,
        codecs={device: choice.position.codec for device, choice in chosen.items()},
        codec_reasons={device: choice.reasons for device, choice in chosen.items()},
        later=list(cohort.later),
        sampling=cohort.sampling,
        removed=sorted(run_state.considered - considered),
        considered=len(considered),
        device_s=run_state.ledger.device_s if mode.shares_devices else 0.0,
        standings={
            device: (choice.position.less_compressed, choice.position.rounds) for device, choice in chosen.items()
        },
    )
    evaluating = evaluators(plan, number, {*cohort.selected, *cohort.later})
    sent = [
        ClientSelected(
            opened.at, number, device, assignment_id, sizes[device], **own_work(running, device, opened.deadline_s),
            evaluates=device in evaluating,
        )
        for device, assignment_id in opened.assignments.items()
    ]  # fmt: skip
    said = f"round {number}, step {run_state.steps_made + len(run_state.open_rounds.rounds) + 1} of {plan.run.rounds}"
    noted = [RunNoted(opened.at, [note]) for note in mode.notes(cohort.able)] if number == 1 else []
    reserved = mode.reserved(running, opened)
    running.record(*noted, RunStatusChanged(opened.at, "running", said), opened, *sent, *reserved)
    return opened
