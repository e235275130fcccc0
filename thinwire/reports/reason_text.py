"""Puts reasons into words: one sentence for each code of a decision.

The aggregator's decisions return reasons (`thinwire.core.formatting.Reason`), which the journal and the tables hold.
The command line and the dashboard show them with `sentence`. Law: `SENTENCES` has a sentence for each code that the
program makes, and its fields are the numbers of that code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.core.events import ClientSelected, Event, RoundClosed, RoundOpened, RunNoted, UpdateDropped
from thinwire.core.formatting import Reasons
from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed, RunExtended
from thinwire.store.read_models import MEMORY_TEXT, RunRow

SENTENCES: Mapping[str, str] = {
    # deadline
    "planned": "set by the plan",
    "unmeasured": "no time of these devices is known yet",
    "expected": "{margin:g} times the {expected_s:.1f} s in which {wanted} of {devices} replies are expected",
    "least": "the shortest allowed deadline; {wanted} of {devices} replies are expected in {expected_s:.1f} s",
    "outlying": "at most {factor:g} times the deadline of the fastest {fastest} of the {wanted} wanted devices",
    "slower": "slower devices: {count} ({devices}), up to {slowest_s:.1f} s",
    "unknown": "not measured yet: {count}, each counted as {assumed_s:.1f} s",
    "groups": "{groups} times {each_s:g} s, since at most {most} of {devices} devices work at once",
    "upload": "{make_s:g} s to make the model, and {margin:g} times the {upload_s:.1f} s to upload its {bytes:,} bytes",
    "thin-link": "its link is not measured yet and counts as {mbit_s:g} Mb/s",
    "late-before": "{times} times {each_s:g} s, since the device missed its deadline before",
    # rung of the codec ladder
    "link-unknown": "its link is not known yet",
    "fits": "{expected_s:.1f} s fit into {left_s:.1f} s",
    "none-fits": "even that takes {expected_s:.1f} s, {left_s:.1f} s are left",
    "next-rung": "{codec} may be next",
    "too-slow": "{codec} would take {expected_s:.1f} s",
    "would-fit": "{codec} would fit ({expected_s:.1f} s of {left_s:.1f} s), and did for {rounds} of {patience} rounds",
    # local work
    "speed-unknown": "{steps} steps, since nothing is known of its speed yet",
    "whole-pass": "a whole pass of {steps} steps fits into {left_s:.1f} s",
    "part-pass": "{steps} of the {pass_steps} steps of a pass fit into {left_s:.1f} s, at {step_s:.2f} s each",
    "small-batch": "each step has {batch} examples",
    "least-work": "even {steps} steps of {batch} examples take longer than the {left_s:.1f} s that it has",
    "earlier-runs": "estimated from earlier runs",
    # sampling
    "sampled": "sampled by {by}: {fastest_s:.2f} s to {slowest_s:.2f} s for each {of}, weights from 1 to {least:.2f}",
    "sampled-alike": "sampled by {by}: no device is measured yet, so all have the same weight",
    "as-fastest": "not measured yet: {count}, with the weight of the fastest",
    "poisson": (
        "each of the {population} devices that were enrolled when the run began is in a round with probability "
        "{rate:g}, by secret coins: {expected:g} of them on average, by which the sum is divided; who and how many "
        "were sampled is not shown"
    ),
    # not selected
    "unable": "{text}",
    "busy": "busy with round {round}",
    "slots": "at most {most} devices work at once",
    "no-slot": "no concurrency slot is free: {at_work} devices work on earlier rounds, and at most {most} work at once",
    "when-free": "selected when a concurrency slot is free: at most {most} devices work at once",
    "sampled-out": "not sampled: its weight is {weight:.2f} of the fastest's, with {seconds:.2f} s for each {of}",
    "sampled-out-unmeasured": "not sampled: it is not measured yet, and has the weight of the fastest",
    # selected during a round
    "replaces": "{possible} of {target} replies could still come, {left_s:.0f} s were left",
    "silent": "too long without a reply to hold a concurrency slot: {count} ({devices})",
    "none-at-work": "no concurrency slot is free, but no device works on this round",
    "idle": "it was idle",
    "buffered": "the buffer has its update",
    "at-work": "devices at work: {at_work}",
    "slots-taken": "devices at work: {at_work} of at most {most}",
    # first model
    "first-model": "{device} makes the first model",
    "seed": "the seed selected it from {devices}",
    "selected-again": "it is selected again",
    "instead-of": "it replaces {device} ({kind})",
    "within": "it may take {seconds:g} s",
    "first-model-failed": "{device}, which makes the first model: {kind}: {text}",
    "first-model-of": "the first model is {device}'s",
    "extended": (
        "{who} extended the run from {was} to {rounds} rounds: from round {first} on the devices began with residual "
        "0; values of the plan until then: {before}"
    ),
    # notes on the plan
    "memory": (
        "it needs about {needs} of memory, and memory_mb of aggregator.toml allows {limit}: it begins because no other "
        "run goes on, and may take more memory than there is"
    ),
    "large-buffer": (
        "[cohort] buffer = {buffer} is more than the {devices} devices online: each buffer closes with the updates of "
        "all of them"
    ),
    "stale-buffer": (
        "with {at_work} devices at work and [cohort] buffer = {buffer} most replies are about {staleness} versions "
        "behind, and [cohort] max_staleness = {most} drops them: a larger buffer, or max_concurrency = {concurrency}"
    ),
    "same-buffer": (
        "all {devices} devices work at once and [cohort] buffer = {buffer}: fast ones train again from a version that "
        "they have just trained from, which costs accuracy where data differ; with max_concurrency = {buffer} they "
        "take turns"
    ),
}

DROPS: Mapping[str, str] = {  # of each `DropReason`, what the update was or what its round did
    "late": 'it came after its round\'s deadline or close, and the plan has `late = "drop"`',
    "stale": "it was trained from a model more than `[cohort] max_staleness` versions old, or before the state of all "
    "devices was reset (`ef21`, `scaffold`, `feddyn`)",
    "bad-payload": "its bytes differ from its header, or no model can hold its numbers; nothing of it counts",
    "too-few": "its round had too few updates to make a step",
    "duplicate": "its assignment had a reply already",
    "revoked": "its device was revoked before the update was aggregated",
    "stopped": "the run was stopped before the round's step",
    "aborted": "its round ended without a sum: masks do not cancel, or the privacy ledger has no reservation for it",
}
DROP_TEXTS = {code: text.replace("`", "") for code, text in DROPS.items()}
LEFT: Mapping[str, str] = {  # of the one word that a client under masks or noise tells of a failure, what it did
    "terms": "the plan withstands a malicious aggregator, and the client has pinned no roster",
    "message": "the client could not read a request of the aggregator",
    "roster": "the client does not accept the roster of the round: its pinned one lacks a device, or two have a key",
    "signature": "a signature does not fit: clients were told different things, or a message was altered",
    "too-few": "fewer clients are left than the plan or the device's owner demands",
    "shares": "what other clients sent does not fit what they had committed to",
    "survivors": "the client, or one without shares, is wrongly on or off the list of survivors",
    "another-request": "the aggregator requested two different things in one phase",
    "order": "the client has left the round before, or began it in another process",
    "lattice": "the update could not be rounded within the bound that the noise hides",
    "work": "its task, its training or its disk failed; nothing more of it leaves the device",
}
OUTCOME_TEXTS = DROP_TEXTS | {
    f"failed: {word}": f"{text}; thinwire client logs on the device has more" for word, text in LEFT.items()
}
CLOSED: Mapping[str, str] = {  # of each `CloseReason`, why a round closed
    "all": "every selected device has replied",
    "enough": "the target of updates is aggregated, or no other device could reply in time",
    "deadline": "the deadline passed while devices were outstanding",
    "too-few": "fewer updates than [cohort] min_updates came, so the model stays as it was",
    "buffer": "the buffer is full",
    "stopped": "a person stopped the run",
    "aborted": "there is no sum, so the model stays as it was",
}


def sentence(reasons: Reasons) -> str:
    """Return the reasons of one decision as one sentence; "" if there are none.

    A code of a later version of this program stands for itself, and so does one with other numbers.

    >>> sentence([["fits", {"expected_s": 25.0, "left_s": 27.0}], ["next-rung", {"codec": "fp16"}]])
    '25.0 s fit into 27.0 s; fp16 may be next'
    """
    return "; ".join(_reason(code, numbers) for code, numbers in reasons)


def _reason(code: str, numbers: Mapping[str, object]) -> str:
    try:
        return SENTENCES[code].format(**numbers)
    except (KeyError, TypeError, ValueError):
        return code


def drop_sentence(reason: str) -> str:
    """Return the reason of a drop or a failure with its sentence; one of a later version stands for itself, as any
    text does.

    >>> drop_sentence("duplicate"), drop_sentence("bad-payload: NaN")
    ('duplicate: its assignment had a reply already', 'bad-payload: NaN')
    """
    return f"{reason}: {OUTCOME_TEXTS[reason]}" if reason in OUTCOME_TEXTS else reason


def event_sentence(event: Event) -> str:
    """Return what the codes in an event of the journal mean, as one sentence; "" for an event without a code.

    >>> event_sentence(RunNoted(0.0, [["planned", {}]]))
    'set by the plan'
    """
    match event:
        case UpdateDropped():
            return DROP_TEXTS.get(event.reason, "")
        case RoundClosed():
            return CLOSED.get(event.reason, "")
        case RoundOpened():
            said = [deadline_sentence(event.deadline_s, event.deadline_reason), sentence(event.sampling)]
            return "; ".join(filter(None, said))
        case ClientSelected():
            return sentence([*event.why, *event.work_reason, *event.codec_reason])
        case RunNoted() | FirstModelAssigned() | FirstModelFailed() | RunExtended():
            return sentence(event.note)
    return ""


def deadline_sentence(seconds: float, reasons: Reasons) -> str:
    """Return a deadline with its reasons; "" if no reason is known.

    >>> deadline_sentence(60.0, [["planned", {}]])
    '60 s: set by the plan'
    """
    return f"{seconds:g} s: {sentence(reasons)}" if reasons else ""


def behind(row: RunRow, queue: Sequence[RunRow]) -> str:
    """Return a phrase about the runs that a queued run waits for; `queue` is the result of `Store.run_queue()`.

    Return "" for a run that is served now, has ended, or is simulated and so waits for no other.
    """
    if row.status == "queued" and row.status_text.startswith(MEMORY_TEXT):
        return row.status_text
    ids = [one.run_id for one in queue]
    if row.status != "queued" or row.run_id not in ids[1:]:
        return ""
    first = queue[0]
    does = first.status_text if first.status == "waiting" else first.status
    between = ids[1 : ids.index(row.run_id)]
    if not between:
        return f"waiting in the queue behind {first.run_id}, which is {does}"
    others = between[0] if len(between) == 1 else f"{len(between)} more"
    return f"waiting in the queue behind {first.run_id} and {others}; {first.run_id} is {does}"
