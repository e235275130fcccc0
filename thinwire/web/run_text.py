"""Sentences that the dashboard shows of a run and its rounds."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.formatting import counted, duration, figure
from thinwire.reports import secure_rounds
from thinwire.store import RoundRow, RunRow, UpdateRow
from thinwire.store.round_explanation import downtime_text

NOT_MEASURED = 'the plan measures no model: [run] evaluate = "off"'


def measures_nothing(run: RunRow) -> bool:
    """Return True if no version of the run gets metrics, by its plan."""
    return dict(run.plan.get("run") or {}).get("evaluate") == "off" and not run.metrics


def not_evaluated(run: RunRow, rounds: Sequence[RoundRow]) -> str:
    """Return why the latest version has no metrics; "" if it has, or if they are still to come."""
    return NOT_MEASURED if measures_nothing(run) else secure_rounds.not_evaluated(run, rounds)


def run_sentence(run: RunRow, open_round: RoundRow | None = None, waits: str = "") -> str:
    """Return the run's state as a sentence: what it does, or how it ended.

    `waits` names the runs before a queued one.
    """
    match run.status:
        case "preparing":
            return "Preparing: the first model is being made."
        case "queued":
            return _stop(_capital(waits or "queued: it has not begun yet"))
        case "waiting":
            return _stop(_capital(run.status_text or "waiting for devices"))
        case "paused":
            return _stop(_capital(run.status_text or "paused by a person"))
        case "running":
            return _running(run, open_round)
        case "done":
            return _stop("Done: " + ", ".join([_made(run), *_quality(run), *_smaller(run)]))
        case "failed":
            made = f"after {run.version} of {_rounds(run.rounds_total)}"
            when = made if run.rounds_closed else "before the first round"
            return _stop(f"Failed {when}: {run.status_text}")
        case "stopped":
            return _stop(_capital(run.status_text or f"stopped after {run.version} of {_rounds(run.rounds_total)}"))


def _running(run: RunRow, open_round: RoundRow | None) -> str:
    """Return the sentence of a running run."""
    nothing = NOT_MEASURED if measures_nothing(run) else "nothing measured yet"
    quality = "; ".join(_quality(run)) + " so far" if run.metrics else nothing
    if open_round is None:
        return _stop(f"{_capital(run.status_text or 'running')}: {quality}")
    if buffered(run):
        return _stop(
            f"Step {run.version + 1} of {run.rounds_total} waits for a buffer of {open_round.target_updates}; {quality}"
        )
    lost = run.rounds_closed - run.version
    note = f" ({_rounds(lost)} made no step)" if lost > 0 else ""
    step = f"Round {open_round.round} of {run.rounds_total + max(0, lost)}{note}"
    if open_round.hides_sample:
        return _stop(f"{step} ends at its deadline of {duration(open_round.deadline_s)}; {quality}")
    selected = len(open_round.selected)
    came = f"{open_round.answered} of {counted(selected, 'device')} {'has' if selected == 1 else 'have'} answered"
    return _stop(f"{step}: {came}{_failed(open_round)}; {quality}")


def buffered(run: RunRow) -> bool:
    """Return True if the run has buffered rounds."""
    return dict(run.plan.get("cohort") or {}).get("mode") == "buffered"


def overlaps(run: RunRow) -> bool:
    """Return True if the run's clients train while their update travels."""
    return bool(dict(run.plan.get("local") or {}).get("overlap"))


def open_round(
    round_: RoundRow, own: Sequence[UpdateRow], earlier: Sequence[UpdateRow], buffer: bool, ahead: Sequence[int] = (),
    taken: bool = True,
) -> str:  # fmt: skip
    """Return the state of an open round as a sentence; with `buffer` it counts all updates that the buffer holds.

    `ahead` are the open rounds before it. `taken` is False while a pipelined round does not take replies yet.
    """
    if not taken:
        until = f"round {ahead[-1]} has closed" if ahead else "enough devices are there"
        said = f"{len(round_.selected)} were selected ahead, and it takes answers when {until}"
        return f"Round {round_.round} waits for its turn: {said}."
    if round_.hides_sample:
        return f"Round {round_.round} is open, until its deadline of {duration(round_.deadline_s)}{_downtime(round_)}."
    if not buffer:
        came = f"{round_.answered} of {len(round_.selected)} have answered{_failed(round_)}"
        said = (
            f"{came}; {round_.target_updates} are enough"
            if round_.failed
            else f"{came}, {round_.target_updates} are enough"
        )
        return f"Round {round_.round} is open: {said}{_downtime(round_)}."
    holds = sum(one.outcome == "accepted" or one.aggregated_round == round_.round for one in (*own, *earlier))
    work = sum(one.outcome == "selected" for one in (*own, *earlier))
    at_work = f"{work} {'device is' if work == 1 else 'devices are'} at work"
    holding = f"its buffer holds {holds} of {counted(round_.target_updates, 'update')}, and {at_work}"
    return f"Round {round_.round} is open: {holding}{_downtime(round_)}."


def _downtime(round_: RoundRow) -> str:
    """Return the clause on the time without an aggregator, or ""."""
    return f"; {said}" if (said := downtime_text(round_)) else ""


def _failed(round_: RoundRow) -> str:
    """Return the clause on failed clients, or ""."""
    return f", {round_.failed} failed" if round_.failed else ""


def closing(round_: RoundRow, least: int = 0) -> str:
    """Return the reason why the round closed as a sentence; "" while it is open. Later replies do not change it.

    `least` is the fewest clients in a sum under masks, 0 without secure aggregation.
    """
    selected, silent = len(round_.selected), round_.unanswered
    if round_.hides_sample and round_.reason == "deadline":
        return "its deadline passed; who was sampled is not shown"
    said = {
        "": "",
        "all": "everybody selected has answered",
        "enough": _enough(round_),
        "deadline": f"the deadline passed: {silent} of {counted(selected, 'device')} had not replied",
        "too-few": f"{_too_few(round_, least)}; the model stays as it was",
        "buffer": f"the buffer was full: {counted(len(round_.aggregated), 'update')}",
        "stopped": "a person stopped the run",
        "aborted": f"there is no sum{_detail(round_)}; the model stays as it was",
    }
    return said.get(round_.reason, round_.reason)


def _detail(round_: RoundRow) -> str:
    """Return why an aborted round has no sum, or ""."""
    return f": {round_.detail}" if round_.detail else ""


def _too_few(round_: RoundRow, least: int) -> str:
    """Return how many replies were missing."""
    if least:
        needs = max(least, round_.min_updates)
        return f"too few clients were left for a sum, which needs {needs}{_detail(round_)}"
    return f"too few answered: {round_.replied} of at least {round_.min_updates}"


def _enough(round_: RoundRow) -> str:
    """Return the reason of a round that closed with enough replies."""
    if round_.unanswered and len(round_.aggregated) >= round_.target_updates:
        return f"enough answered ({round_.target_updates}); {round_.unanswered} more were still at work"
    lost = max(0, len(round_.selected) - round_.replied - round_.unanswered)  # whether or not they replied later
    return (
        f"all that could answer did; {lost} {'device' if lost == 1 else 'devices'} failed"
        if lost
        else "enough answered"
        if len(round_.aggregated) >= round_.target_updates
        else "all that could answer did"
    )


def _made(run: RunRow) -> str:
    """Return the status of a run that is over, with its time: "20 rounds, 61 s from start to end, ...".

    That time has waits and pauses too, which are in no round: the explanation of the run tells the time of its rounds.
    """
    made, comma, more = (run.status_text or _rounds(run.version)).partition(",")
    span = "its first start to its last end" if run.is_extended else "start to end"
    if run.started_at is not None and run.finished_at is not None:
        made += f", {duration(run.finished_at - run.started_at)} from {span}"
    return made + comma + more


def _smaller(run: RunRow) -> list[str]:
    """Return the compression ratio of the uplink if it is at least two."""
    if not run.payload_up or run.dense_up < 2 * run.payload_up:
        return []
    return [f"{run.dense_up / run.payload_up:.0f} times less sent up than dense float32"]


def _quality(run: RunRow) -> list[str]:
    """Return the accuracy if there is one, else the first metric."""
    for name in ("accuracy", "loss", *run.metrics):
        if run.decisive.get(name) is not None:
            return [f"{name} {figure(run.decisive[name])}"]
    return []


def _rounds(count: int) -> str:
    """Format a number of rounds."""
    return f"{count} {'round' if count == 1 else 'rounds'}"


def _capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def _stop(text: str) -> str:
    """Return a text that ends with a punctuation mark."""
    return text if text.endswith((".", "!", "?")) else text + "."
