"""Exit codes, failure kinds and closing reasons: their names are the code's, what each means stands here.

A name that the code has and this file lacks, or the other way round, stops the writing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import thinwire
from docs.generate.table import table
from thinwire.core import errors
from thinwire.core.errors import ThinwireError
from thinwire.core.events import CloseReason, DropReason
from thinwire.core.types import AGGREGATOR_KINDS, Failure

EXIT_CODES = {
    0: "done",
    1: "failed",
    2: "the command line cannot be understood",
    3: "the plan or the task is wrong",
    4: "the other end does not answer, or an address cannot be listened on",
    5: "the other end answers, and refuses",
    6: "too few clients",
    7: "the privacy budget is spent (nothing spends one yet)",
    8: "data lost, damaged, or newer than this program",
    9: "no such run, device or round",
    10: "stopped by a person",
    124: "timed out",
    130: "interrupted (Ctrl-C); a run that was followed goes on",
}

CLOSING = {
    "all": "every device that was asked has answered, and all that counts is folded.",
    "enough": "as many answers as were wanted are folded, or nobody is outstanding any more, at least one device that "
    "was asked had failed or gone, and nobody could be asked in its place in time; or no time was left to ask those "
    "for whom no place was free before (`[cohort] max_concurrency`). Of a buffer: every device that could answer "
    "stands in it.",
    "deadline": "the deadline passed while somebody was outstanding; at least the fewest replies that make a step were "
    "folded (`[cohort] min_replies`).",
    "too-few": "fewer answers than make a step. The model stays as it was, and what had been folded goes back to its "
    "senders. After `[cohort] retry_limit` such rounds in a row the run fails with exit code 6.",
    "buffer": "the buffer was full (`[cohort] buffer`): of runs whose `mode` is `buffered`. Others are at work all the "
    "same, and their updates go into the next one.",
    "stopped": "a person stopped the run. No step is made.",
}

FAILURES = {
    "task-error": "the task's code raised. The kind of exception and its place in the task are sent; its text and the "
    "traceback stay on the device: `thinwire client logs --last-error`",
    "task-missing": "nothing of the task's name is installed on the device: start its client with `--task NAME=MODULE`",
    "task-mismatch": "the device's task differs from the run's in what `[run] task_match` compares",
    "layout-mismatch": "the device's model has other tensors than the run's",
    "base-mismatch": "the model as it arrived does not have the digest that the ask names",
    "non-finite": "the local training came out with NaN or infinity; nothing was sent, the residual is as it was",
    "need-plan": "the device does not hold the plan of which it was sent the digest; it is sent again",
    "declined": "the device's own policy refuses the plan",
    "state-lost": "the device used a sequence number again for other bytes, or what it has to remember with "
    "`ef21`, `scaffold` or `feddyn` is not on its disk any more: its state folder was lost or copied back",
    "protocol": "the two ends speak protocols that are too far apart: update the older one",
    "worker": "the process that trains has died, was killed, hung or ran out of memory",
    "disk": "the device cannot write its state",
    "refused": "said by the aggregator: the device was shut out while it was asked (the text says `revoked`); "
    "nothing that is not folded yet counts",
    "stale": "said by the aggregator: no answer for more than `[cohort] max_staleness` rounds, with `[local] "
    "overlap` `max_staleness` + `max_delay`; where nobody else is left to ask, for `max_staleness` + 1 deadlines. "
    "It is asked anew. Of a first model ([run] init): its time was over",
    "left": "said by the aggregator: the device has not been heard of, or the person there stopped it",
    "over": "said by the aggregator: the run ended before an answer to this ask was taken. It is no failure of the "
    "device: `failed` does not count it, and the ask's outcome is called `over`",
}

DROPS = {
    "late": 'its round was over, and the plan says `late = "drop"`',
    "stale": "it was made from a model more than `[cohort] max_staleness` versions old; with `ef21`, `scaffold` "
    "or `feddyn` also: it was asked for before all devices began anew, and is a difference to what counts no more",
    "bad-payload": "its bytes are not what its head says, or no model can hold its numbers; nothing of it counts",
    "too-few": "its round had too few replies to make a step",
    "duplicate": "its ask had been answered already",
    "revoked": "its device was shut out before it was folded",
    "stopped": "the run was stopped before the round's step",
}


def _same(what: str, code: set[str], here: Mapping[str, str]) -> None:
    if code != set(here):
        raise ValueError(
            f"docs/generate/meanings.py: {what} that differ between the code and here: {sorted(code ^ set(here))}"
        )


def exit_codes_page() -> str:
    kinds: dict[int, list[str]] = {}
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, ThinwireError):
            kinds.setdefault(kind.exit_code, []).append(f"`{name}`")
    if strange := set(kinds) - set(EXIT_CODES):
        raise ValueError(f"docs/generate/meanings.py: exit codes without a meaning here: {sorted(strange)}")
    rows = [(str(code), meaning, ", ".join(kinds.get(code, []))) for code, meaning in EXIT_CODES.items()]
    said = "Errors are printed to stderr in three lines: `error:` what went wrong, `why:` and `try:`."
    return "\n\n".join(["# Exit codes", said, table(("code", "meaning", "raised as"), rows)])


def failures_page() -> str:
    _same("failure kinds", _told(Failure, "Kinds: ") | {*AGGREGATOR_KINDS} | _raised(), FAILURES)
    _same("reasons of drops", set(get_args(DropReason)) | _dropping(), DROPS)
    failed = (
        "Why a device did not answer an ask. A failure says its kind and a text that holds no data of the device: for "
        "an error in the task, the class of the exception and its place in the task's code."
    )
    dropped = "Why an update that arrived did not count. Its sender puts the change back into its residual."
    rows = [(f"`{kind}`", meaning) for kind, meaning in FAILURES.items()]
    drops = [(f"`{reason}`", meaning) for reason, meaning in DROPS.items()]
    return "\n\n".join(
        ["# Failure kinds", failed, table(("kind", "meaning"), rows),
         "## Dropped updates", dropped, table(("reason", "meaning"), drops)]
    )  # fmt: skip


def _told(thing: type, before: str) -> set[str]:
    """The names that a docstring lists after `before`, up to the full stop."""
    text = " ".join((inspect.getdoc(thing) or "").split())
    listed = re.sub(r"\(.*?\)", "", text.partition(before)[2]).partition(".")[0]
    return {name.strip() for name in listed.split(",")}


def _raised() -> set[str]:
    """The kinds that stand as words where a failure is made."""
    made = re.compile(r'(?:Failure|CannotAnswer)\(\s*"([a-z-]+)"|\.lose\([^,]+, "([a-z-]+)"')
    texts = [path.read_text() for path in Path(thinwire.__file__).parent.rglob("*.py")]
    return {one or other for text in texts for one, other in made.findall(text)}


def _dropping() -> set[str]:
    """The reasons that stand as words where an answer is dropped: what they say after a colon is more than the name."""
    made = re.compile(r'(?:drop|round_events\.FoldRejected)\([^"\n]*"([a-z-]+)|refused=f?"([a-z-]+)')
    texts = [path.read_text() for path in (Path(thinwire.__file__).parent / "server").glob("*.py")]
    return {one or other for text in texts for one, other in made.findall(text)}


def closing_page() -> str:
    _same("closing reasons", set(get_args(CloseReason)), CLOSING)
    said = (
        "A round closes for exactly one reason. It is in the journal, on the page and in `thinwire runs show`. See "
        "also [a round](../explain/a-round.md)."
    )
    return "\n\n".join(
        ["# Closing reasons", said, table(("reason", "meaning"), [(f"`{k}`", v) for k, v in CLOSING.items()])]
    )
