"""What a person wants to know about a run or a round, in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.store import RoundRow, RunRow

STAGES = ("wait", "download", "queue", "evaluate", "train", "encode", "upload")
STAGE_WORDS = {"wait": "before it took the ask up", "queue": "queue behind other work"}
OWN = {"fold": "fold", "step": "step", "store": "make durable"}
OWN_SHARE = 0.2  # of a round's time, from which on the aggregator's part is worth a word


def run_sentence(run: RunRow, open_round: RoundRow | None = None) -> str:
    """The run's state: what it does, or how it ended."""
    match run.status:
        case "preparing":
            return "Preparing: the first model is being made."
        case "queued":
            return "Queued: it begins when the runs before it are over."
        case "waiting":
            return _stop(_capital(run.status_text or "waiting for devices"))
        case "running":
            return _running(run, open_round)
        case "done":
            return _stop("Done: " + ", ".join([_made(run), *_quality(run), *_smaller(run)]))
        case "failed":
            when = f"after {_rounds(run.rounds_closed)}" if run.rounds_closed else "before the first round"
            return _stop(f"Failed {when}: {run.status_text}")
        case "stopped":
            return _stop(_capital(run.status_text or f"stopped after {_rounds(run.rounds_closed)}"))


def _running(run: RunRow, open_round: RoundRow | None) -> str:
    quality = "; ".join(_quality(run)) + " so far" if run.metrics else "nothing measured yet"
    if open_round is None:
        return _stop(f"{_capital(run.status_text or 'running')}: {quality}")
    answered = open_round.folded_count + open_round.dropped + open_round.failed
    lost = run.rounds_closed - run.version
    note = f" ({_rounds(lost)} made no step)" if lost > 0 else ""
    step = f"Round {open_round.round} of {run.rounds_total + max(0, lost)}{note}"
    return _stop(f"{step}: {answered} of {len(open_round.asked)} devices have answered; {quality}")


def closing(round_: RoundRow) -> str:
    """Why the round closed, in words; empty while it is open."""
    asked, silent = len(round_.asked), unanswered(round_)
    said = {
        "": "",
        "all": "everybody asked has answered",
        "enough": _enough(round_, silent),
        "deadline": f"the deadline passed: {silent} of {asked} devices had not answered",
        "too-few": f"too few answered: {_came(round_)} of at least {round_.floor}; the model stays as it was",
        "buffer": "the buffer was full",
        "stopped": "a person stopped the run",
    }
    return said.get(round_.reason, round_.reason)


def unanswered(round_: RoundRow) -> int:
    """Devices that had not answered when the round closed; late answers came after it."""
    return max(0, len(round_.asked) - round_.folded_count - round_.dropped - round_.failed)


def why(round_: RoundRow) -> str:
    """Why the round took as long as it did.

    "Round 12 took 4.1 s: waited 3.2 s for pi-07 (train 2.9 s)."
    """
    if round_.seconds is None:
        return ""
    took = f"Round {round_.round} took {seconds(round_.seconds)}"
    if round_.reason == "deadline":
        silent = f"{unanswered(round_)} of {len(round_.asked)} had not answered"
        return f"{took}: {silent} when its deadline of {seconds(round_.deadline_s)} passed."
    spent = {name.removesuffix("_s"): value for name, value in round_.spent.items()}
    device = {name: spent[name] for name in STAGES if name in spent}
    if not round_.slowest or not device:
        return f"{took}: no update came to wait for." if not round_.folded else f"{took}."
    waited = f"waited {seconds(sum(device.values()))} for {round_.slowest} ({_most(device, STAGE_WORDS)})"
    return f"{took}: {waited}{_own_part(round_.seconds, spent)}."


def _own_part(total: float, spent: Mapping[str, float]) -> str:
    own = {name: spent[name] for name in OWN if name in spent}
    if not own or sum(own.values()) < OWN_SHARE * total:
        return ""
    return f"; the aggregator took {seconds(sum(own.values()))} ({_most(own, OWN)})"


def _most(stages: Mapping[str, float], words: Mapping[str, str]) -> str:
    name = max(stages, key=lambda stage: stages[stage])
    return f"{words.get(name, name)} {seconds(stages[name])}"


def _enough(round_: RoundRow, silent: int) -> str:
    if silent:
        return f"enough answered ({round_.target}); {silent} more were still at work"
    lost = round_.failed
    return (
        f"all that could answer did; {lost} {'device' if lost == 1 else 'devices'} failed"
        if lost
        else "enough answered"
    )


def _came(round_: RoundRow) -> int:
    return max(0, len(round_.asked) - round_.failed - unanswered(round_))


def seconds(count: float) -> str:
    """A duration as people say it.

    >>> seconds(0.0421), seconds(4.13), seconds(60), seconds(130), seconds(7200)
    ('0.04 s', '4.1 s', '60 s', '2 min 10 s', '2 h')
    """
    if count < 99.5:
        return f"{count:.2f} s" if count < 0.995 else f"{count:.1f} s" if count < 9.95 else f"{count:.0f} s"
    minutes, rest = divmod(round(count), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def _made(run: RunRow) -> str:
    """The status of a run that is over, with its time before the first comma: "20 rounds in 61 s, ..."."""
    made, comma, more = (run.status_text or _rounds(run.version)).partition(",")
    if run.started_at is not None and run.finished_at is not None:
        made += f" in {seconds(run.finished_at - run.started_at)}"
    return made + comma + more


def _smaller(run: RunRow) -> list[str]:
    if not run.payload_up or run.dense_up < 2 * run.payload_up:
        return []
    return [f"{run.dense_up / run.payload_up:.0f} times less sent up than dense float32"]


def _quality(run: RunRow) -> list[str]:
    """Accuracy where there is one, else the first metric."""
    for name in ("accuracy", "loss", *run.metrics):
        if name in run.metrics and run.metrics[name] is not None:
            return [f"{name} {run.metrics[name]:.3f}"]
    return []


def _rounds(count: int) -> str:
    return f"{count} {'round' if count == 1 else 'rounds'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
