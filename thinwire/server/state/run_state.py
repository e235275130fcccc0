"""Holds the state of a run, rebuilt from its journal.

The run applies each event here as it records it, and a resume applies the same events from the journal. So a resumed
run has the state of the run that was killed. This module decides nothing.

Each topic has a class of its own: open rounds (`OpenRounds`, below), model versions (`bases`), their evaluations
(`scores`), assignments and their outcomes (`ledger`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from thinwire.core.clock import downtime_s
from thinwire.core.events import (
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Event,
    RoundBecameCurrent,
    RoundClosed,
    RoundOpened,
    RoundResumed,
    RunStatus,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.plan import RunPlan
from thinwire.core.run_events import PhaseClosed, PrivacyCommitted, RunExtended, SumUnmasked
from thinwire.server.policy.assignment_terms import EVALUATION_ROUNDS, CodecHistory, DeviceSpeeds
from thinwire.server.policy.eligibility import DeviceBackoff
from thinwire.server.state.assignment_ledger import MAX_KEPT, AssignmentLedger
from thinwire.server.state.initial_model_requests import InitialModelRequests
from thinwire.server.state.model_history import EvaluationLog, ModelHistory, made_step

Since = ClientSelected | UpdateAccepted | UpdateDropped | ClientFailed | ClientReconnected | PhaseClosed


@dataclass
class RoundProgress:
    """Holds everything that has happened in the current round so far."""

    since: list[Since] = field(default_factory=list)  # all decisions since its opening, in the journal's order
    accepted: list[UpdateAccepted] = field(default_factory=list)  # the accepted updates, in the order of aggregation
    aggregated: set[str] = field(default_factory=set)  # ids of the updates that were aggregated
    slowest_s: float = 0.0  # duration of the slowest reply in time
    missed_s: float = 0.0  # seconds of the round that the run's clock does not count: until a restart


@dataclass
class OpenRounds:
    """Holds the open rounds, which close in the order in which they opened; only the current one aggregates updates.

    Without `is_pipelined`, at most one round is open. With it, rounds are pipelined: further rounds open before the
    current one closes.
    """

    is_pipelined: bool = False
    current: RoundOpened | None = None  # the current round
    current_since_s: float = 0.0  # when its deadline began to run, elapsed_s
    current_round: int = 0  # the last round that accepted replies
    progress: RoundProgress = field(default_factory=RoundProgress)
    ahead: list[RoundOpened] = field(default_factory=list)  # pipelined rounds, in the order of opening
    lost_ahead: dict[int, list[Since]] = field(default_factory=dict)  # pipelined round -> its failed assignments

    @property
    def rounds(self) -> list[RoundOpened]:
        """Return all open rounds, the current one first."""
        return [self.current, *self.ahead] if self.current else []

    @property
    def accepts_replies(self) -> bool:
        """Return True if the current round accepts replies; a pipelined one may wait for devices before it does."""
        return self.current is not None and (not self.is_pipelined or self.current.round == self.current_round)

    def of(self, number: int) -> RoundOpened | None:
        """Return the open round of this number; None if no such round is open."""
        return next((opened for opened in self.rounds if opened.round == number), None)

    def open(self, event: RoundOpened) -> None:
        """Add a round that has opened: as the current one if there is none, else after the rounds that wait."""
        if self.current is None:
            self.current, self.current_since_s = event, event.elapsed_s
        else:
            self.ahead.append(event)

    def make_current(self, event: RoundBecameCurrent) -> None:
        """Record that the current round accepts replies from now on; its deadline begins to run."""
        self.current_round, self.current_since_s = event.round, event.elapsed_s

    def accept(self, event: UpdateAccepted) -> None:
        """Record an update that the current round has accepted."""
        self.progress.accepted.append(event)
        self.progress.since.append(event)
        self.current_round = event.round  # journals from before RoundBecameCurrent say it only here

    def lose(self, event: ClientFailed, number: int) -> None:
        """Record a failed assignment of round `number`; it is ignored if that round is closed."""
        if self.current and number == self.current.round:
            self.progress.since.append(event)
        elif self.of(number):
            self.lost_ahead.setdefault(number, []).append(event)

    def close(self, event: RoundClosed) -> None:
        """Close the current round, so that the next pipelined round becomes the current one."""
        self.current, self.progress = None, RoundProgress()
        if self.ahead:
            self.current, self.current_since_s = self.ahead.pop(0), event.elapsed_s
            self.progress.since = self.lost_ahead.pop(self.current.round, [])


KEPT_NORM_ROUNDS = 10  # last rounds whose updates' norms are kept
KEPT_REPLIES = 3  # last replies of a device whose durations are kept


@dataclass
class RunState:
    """Holds the state of a run between two events.

    `delay` is the number of rounds that open ahead of the current one. A reply counts only if its model version is at
    most `kept` versions old. The downlink sends changes of the last `logged` versions. Invariant: the state does not
    grow with the number of rounds.
    """

    delay: int = 0
    kept: int = MAX_KEPT
    logged: int = 0
    status: RunStatus = "queued"
    status_text: str = ""
    first: InitialModelRequests = field(default_factory=InitialModelRequests)  # requests for the initial model
    bases: ModelHistory = field(default_factory=lambda: ModelHistory(MAX_KEPT))
    scores: EvaluationLog = field(default_factory=lambda: EvaluationLog(MAX_KEPT))
    open_rounds: OpenRounds = field(default_factory=OpenRounds)
    rounds_opened: int = 0
    steps_made: int = 0
    too_few_in_a_row: int = 0  # rounds without a step; those open when one of them closed count with it
    ledger: AssignmentLedger = field(default_factory=AssignmentLedger)  # every assignment, and the outcome of it
    reply_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # device -> last replies'
    speeds: DeviceSpeeds = field(default_factory=DeviceSpeeds)
    connected: set[str] = field(default_factory=set)  # devices that got an assignment and were not seen to disconnect
    considered: set[str] = field(default_factory=set)  # online or busy when the last round opened, selected or not
    backoff: DeviceBackoff = field(default_factory=DeviceBackoff)
    codecs: CodecHistory = field(default_factory=CodecHistory)
    weights: dict[str, int] = field(default_factory=dict)  # device -> its examples in the first round that counted them
    references_from: int = 0  # the round from which `weights` are collected
    clip: float = 0.0  # of the next secure round with an automatic clip; 0 before the first one
    slowest: list[float] = field(default_factory=list)  # of the last rounds: seconds of the slowest reply in time
    recent_norms: list[list[float]] = field(default_factory=list)  # of the last rounds' updates
    elapsed_s: float = 0.0
    elapsed_at: float = 0.0  # the wall clock at that time
    _rounds_at_last_failure: int = 0  # the last round that had opened when `too_few_in_a_row` last grew

    def __post_init__(self) -> None:
        self.ledger.kept, self.ledger.pipelined = self.kept, self.delay > 0
        self.ledger.outcomes.kept = min(MAX_KEPT, 2 * self.kept)
        self.bases.kept, self.scores.kept = min(MAX_KEPT, max(self.kept, self.logged)), min(MAX_KEPT, self.kept)
        self.open_rounds.is_pipelined = self.delay > 0

    @property
    def version(self) -> int:
        """Return the number of the latest model version."""
        return self.bases.version

    @property
    def norms(self) -> list[float]:
        """Return the norms of which a quantile bounds the next round's updates; none before the first step."""
        return [norm for norms in self.recent_norms for norm in norms]

    def version_at_delivery(self, device: str, but: str = "") -> int | None:
        """Return the model version that a device holds when its next assignment is delivered; None if it is not known.

        In a pipelined run it is the version of the last outstanding assignment, the next one (`but`) left out. In other
        runs, and without such an assignment, it is the version of the device's last reply.
        """
        if not self.ledger.pipelined:
            return self.bases.held.get(device)
        due = [assigned.base_version for assigned in self.ledger.outstanding(device) if assigned.assignment_id != but]
        return due[-1] if due else self.bases.held.get(device)

    def apply(self, event: Event) -> None:
        """Apply one event of the journal."""
        self._advance_clock(event)
        if isinstance(event, ClientSelected):
            self._assign(event)
        if self.bases.model is None:
            self.first.apply(event)
        self.ledger.apply(event)
        self.bases.apply(event)
        self.scores.apply(event)
        match event:
            case RunStatusChanged():
                self.status, self.status_text = event.status, event.text
            case RoundOpened():
                self._open(event)
            case RoundBecameCurrent():
                self.open_rounds.make_current(event)
            case UpdateAccepted():
                self._accept(event)
            case UpdateAggregated():
                self.open_rounds.progress.aggregated.add(event.update_id)
            case UpdateDropped() | PhaseClosed():
                self.open_rounds.progress.since.append(event)
            case ClientFailed():
                self._fail(event)
            case SumUnmasked() | PrivacyCommitted():
                self.clip = event.next_clip or self.clip
            case ClientReconnected():
                self.open_rounds.progress.since.append(event)
                self.connected.add(event.device)
            case RoundClosed():
                self._close(event)
            case RunExtended():
                self._extend(event)

    def _extend(self, event: RunExtended) -> None:
        """Continue a run that had ended: its devices have deleted their state, and no earlier assignment counts."""
        self.open_rounds = OpenRounds(self.open_rounds.is_pipelined, current_round=self.open_rounds.current_round)
        self.references_from, self.weights = event.first_round, {}
        self.connected, self.too_few_in_a_row = set(), 0

    def _advance_clock(self, event: Event) -> None:
        elapsed_s = getattr(event, "elapsed_s", -1.0)
        if isinstance(event, RoundResumed):
            self.open_rounds.progress.missed_s = self.missed_s(event.down_since, event.at, elapsed_s)
        if elapsed_s >= self.elapsed_s:
            self.elapsed_s, self.elapsed_at = elapsed_s, event.at

    def missed_s(self, down_since: float, at: float, elapsed_s: float) -> float:
        """Return how many seconds of the current round the run's clock does not count.

        The clock shows `elapsed_s` at the wall time `at`, after the aggregator was down since `down_since`. The result
        covers the time from the last event to `down_since`, and the downtime after it. A part whose length is not known
        counts as 0.
        """
        stood_s = (downtime_s(self.elapsed_at, down_since) or 0.0) + (downtime_s(down_since, at) or 0.0)
        return self.open_rounds.progress.missed_s + max(0.0, stood_s - (elapsed_s - self.elapsed_s))

    def _open(self, event: RoundOpened) -> None:
        self.rounds_opened = event.round
        self.open_rounds.open(event)
        self.connected |= event.assignments.keys()
        self.considered = (self.considered - set(event.removed)) | set(event.added)
        if event.references_from != self.references_from:
            self.references_from, self.weights = event.references_from, {}
        self.codecs.apply_opening(event)

    def _assign(self, event: ClientSelected) -> None:
        """Record an assignment that was made after its round opened."""
        if self.open_rounds.current and self.ledger.find(event.assignment_id) is None:
            self.open_rounds.progress.since.append(event)
            self.connected.add(event.device)

    def _accept(self, event: UpdateAccepted) -> None:
        self.open_rounds.accept(event)
        if (assigned := self.ledger.find(event.assignment_id)) is not None:
            self.speeds.apply_reply(event, assigned.work)
            self.codecs.apply_reply(event, assigned.codec)
        self._time(event)
        self.scores.measure(event, self.version)

    def _time(self, event: UpdateAccepted) -> None:
        """Record how long a reply took, if it answers the device's last assignment."""
        took_s = self.ledger.took_s(event.device, event.assignment_id, event.elapsed_s)
        if took_s is None:
            return
        took = self.reply_seconds[event.device]
        took.append(took_s)
        del took[:-KEPT_REPLIES]
        if not event.late:
            self.open_rounds.progress.slowest_s = max(self.open_rounds.progress.slowest_s, took[-1])

    def _fail(self, event: ClientFailed) -> None:
        assigned = self.ledger.find(event.assignment_id, event.device)
        self.open_rounds.lose(event, assigned.round if assigned else 0)
        if event.kind in ("offline", "refused"):
            self.connected.discard(event.device)
        self.backoff.failed(event)

    def _close(self, event: RoundClosed) -> None:
        stepped, aggregated = made_step(event), set(event.aggregated)
        for accepted in self.open_rounds.progress.accepted:
            if stepped and accepted.update_id in aggregated:
                capped = event.capped.get(accepted.update_id, {})
                counted = capped.get("counted", int(accepted.header.get("examples", 0)))
                self.weights.setdefault(accepted.device, counted)
        self.steps_made += stepped
        if stepped:
            self.too_few_in_a_row = 0
        elif event.round > self._rounds_at_last_failure:
            self.too_few_in_a_row, self._rounds_at_last_failure = self.too_few_in_a_row + 1, self.rounds_opened
        if self.open_rounds.progress.slowest_s:
            self.slowest = [*self.slowest, self.open_rounds.progress.slowest_s][-EVALUATION_ROUNDS:]
        if event.norms:
            self.recent_norms = [*self.recent_norms, event.norms][-KEPT_NORM_ROUNDS:]
        self.open_rounds.close(event)
        self.scores.close(event)


def empty_state(plan: RunPlan) -> RunState:
    """Return the state of a run of this plan before its first event."""
    delay = plan.local.delay
    return RunState(delay, plan.cohort.max_staleness + delay + 2, plan.downlink.log_rounds)
