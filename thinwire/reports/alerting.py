"""This module finds the conditions of runs and of the aggregator about which an operator gets an alert.

Each condition is a pure function of rows of the store and of the numbers in `aggregator.toml`. It has a sentence, and a
hint with the next thing to try. `conditions` returns the conditions that hold, and the kinds that are unknown now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thinwire.core.formatting import counted, duration, figure, size
from thinwire.core.owner_file import AlertSettings
from thinwire.store import Condition, Store

if TYPE_CHECKING:
    from thinwire.store import RoundRow, RunRow

LATEST_ROUNDS: Final = 3  # closed rounds of a run whose updates and losses count
LATEST_MEASURED: Final = 32  # rounds among which the last measured ones are: pipelined rounds are measured later
MINUTE_S, DAY_S, MB = 60.0, 86_400.0, 10**6
NO_PROGRESS, TOO_FEW, DIVERGED = "no-progress", "too-few-clients", "not-finite"
DISK, CERTIFICATE, OFFLINE = "disk", "certificate", "aggregator-offline"
OF_RUNS: Final = (NO_PROGRESS, TOO_FEW, DIVERGED)
SMALLER_STEPS: Final = "a smaller [local] lr, or [local] clip_grad"
LOSS: Final = "loss"
HIGHER_LOSS_SHARE: Final = 0.1  # of the first loss, by which a later one is clearly higher
NON_FINITE: Final = "non-finite"  # kind of a failure (docs/reference/failures.md)


@dataclass(frozen=True)
class AlertContext:
    """Holds facts about the aggregator that the store does not have: times are wall-clock seconds, None is unknown.

    `down_since` is the moment at which the aggregator was last alive, None while it runs. `certificate_until` is the
    end of the certificate that devices see. `start` is the command that starts the aggregator as it was started last.
    """

    now: float
    down_since: float | None = None
    free_bytes: int | None = None
    certificate_until: float | None = None
    start: str = "thinwire aggregator start"


def conditions(store: Store, context: AlertContext, wanted: AlertSettings) -> tuple[list[Condition], frozenset[str]]:
    """Return the conditions that hold, and the kinds that are unknown: those of runs while no aggregator runs."""
    found = list(_aggregator_conditions(context, wanted))
    if context.down_since is not None:
        return found, frozenset(OF_RUNS)
    for run in store.run_queue():
        latest = store.rounds(run.run_id, max(1, run.rounds_closed - LATEST_ROUNDS + 1))
        closed = [one for one in latest if one.closed_at is not None]
        found += run_conditions(run, latest, _count_non_finite(store, run, closed), context.now, wanted)
    return found, frozenset()


def divergence(store: Store, run: RunRow) -> str:
    """Return a sentence with a hint if the training of a run diverges, or if it diverged and the run failed; else "".

    It diverges if updates of the latest rounds were not finite, or if their models have a higher loss than the first.
    """
    if run.status not in ("running", "failed"):
        return ""
    latest = store.rounds(run.run_id, max(1, run.rounds_closed - LATEST_MEASURED), run.rounds_closed)
    latest = [one for one in latest if one.closed_at is not None]
    rounds = latest[-LATEST_ROUNDS:]
    count = _count_non_finite(store, run, rounds)
    said = _not_finite(count, rounds) if count else _higher_loss(store, run, latest)
    verb = "diverges" if run.status == "running" else "diverged"
    return f"Training {verb}: {said}; try {SMALLER_STEPS}." if said else ""


def _not_finite(count: int, rounds: list[RoundRow]) -> str:
    latest = f"{len(rounds)} rounds" if rounds[1:] else "round"
    return f"{counted(count, 'update')} of the last {latest} held NaN or infinity"


def _higher_loss(store: Store, run: RunRow, latest: list[RoundRow]) -> str:
    """Return a phrase if each of the latest models has a clearly higher loss than the first one; else ""."""
    measured = [one for one in latest if LOSS in one.metrics][-LATEST_ROUNDS:]
    if run.rounds_closed <= 2 * LATEST_ROUNDS or len(measured) < LATEST_ROUNDS:
        return ""
    begin = next((one for one in store.rounds(run.run_id, 1, LATEST_ROUNDS) if LOSS in one.metrics), None)
    if begin is None:
        return ""
    first, last = begin.metrics[LOSS], measured[-1]
    if min(one.metrics[LOSS] for one in measured) <= first + HIGHER_LOSS_SHARE * abs(first):
        return ""
    after = f"{figure(last.metrics[LOSS])} after round {last.round}"
    return f"the loss was {figure(first)} after round {begin.round}, and is {after}"


def run_conditions(
    run: RunRow, latest: list[RoundRow], diverged: int, now: float, wanted: AlertSettings
) -> Iterator[Condition]:
    """Yield the conditions of one run; `latest` are its last rounds, `diverged` the failures as not finite.

    A run that was paused, or whose aggregator was down, is quiet since it went on.
    """
    id_, rounds = run.run_id, [one for one in latest if one.closed_at is not None][-LATEST_ROUNDS:]
    went_on = [one.opened_at for one in latest] + [until for one in latest for _, until in one.downtimes]
    quiet_s = now - max([run.started_at or run.created_at, *went_on, *(one.closed_at or 0.0 for one in rounds)])
    few = bool(len(rounds) == LATEST_ROUNDS and all(one.reason == "too-few" for one in rounds))
    if few or (run.status == "waiting" and quiet_s >= wanted.too_few_min * MINUTE_S):
        said = (
            f"its last {LATEST_ROUNDS} rounds had too few updates" if few else run.status_text or "it waits for devices"
        )
        hint = f"thinwire devices list; thinwire runs show {id_} --why; a smaller [cohort] min_updates in the next plan"
        yield Condition(TOO_FEW, id_, f"{id_}: {said}", hint)
    elif run.status == "running" and quiet_s >= wanted.no_progress_min * MINUTE_S:
        deadline = f"; its rounds have a deadline of {duration(rounds[-1].deadline_s)}" if rounds else ""
        said = f"{id_}: no round has closed for {duration(quiet_s)}{deadline}"
        yield Condition(NO_PROGRESS, id_, said, f"thinwire runs show {id_} --why; thinwire aggregator logs")
    if diverged:
        yield Condition(DIVERGED, id_, f"{id_}: {_not_finite(diverged, rounds)}", SMALLER_STEPS)


def _count_non_finite(store: Store, run: RunRow, rounds: list[RoundRow]) -> int:
    """Return how many clients of the latest closed rounds failed as `non-finite`; 0 where nobody may count clients."""
    if not rounds or any(one.hides_sample for one in rounds):
        return 0
    failed = store.updates(run.run_id, rounds[0].round, rounds[-1].round, outcomes=("failed",), with_reason=True)
    return sum(one.reason.partition(":")[0] == NON_FINITE for one in failed)


def _aggregator_conditions(context: AlertContext, wanted: AlertSettings) -> Iterator[Condition]:
    down_s = None if context.down_since is None else context.now - context.down_since
    if down_s is not None and down_s >= wanted.offline_min * MINUTE_S:
        yield Condition(OFFLINE, "", "the aggregator is not running", f"{context.start}; runs go on then")
    free = context.free_bytes
    if free is not None and free < wanted.min_free_disk_mb * MB:
        said = f"the disk of the state directory has {size(free)} free"
        yield Condition(DISK, "", said, "free some space, or delete runs: thinwire runs delete RUN")
    left_s = None if context.certificate_until is None else context.certificate_until - context.now
    if left_s is not None and left_s < wanted.certificate_days * DAY_S:
        said = f"the certificate of the device API ends in {duration(left_s)}" if left_s > 0 else (
            "the certificate of the device API has ended"
        )  # fmt: skip
        yield Condition(CERTIFICATE, "", said, f"{context.start} makes it again; yours: replace its files")
