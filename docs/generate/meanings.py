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
from thinwire.reports.reason_text import DROPS

EXIT_CODES = {
    0: "done",
    1: "failed",
    2: "the command line is not valid",
    3: "the plan or the task is wrong",
    4: "the other end or the database does not answer, or an address is not available to listen on",
    5: "the other end answers, and refuses",
    6: "too few clients",
    7: "the privacy budget of the clients is spent",
    8: "data lost, damaged, or newer than this program",
    9: "no such run, device or round",
    10: "stopped by a person",
    124: "timed out",
    130: "interrupted (Ctrl-C); a run that was followed goes on",
}

CLOSING = {
    "all": "every selected device has replied, and every update that counts is aggregated.",
    "enough": "the target of updates is aggregated. Or nobody is outstanding, at least one selected device failed or "
    "went offline, and no replacement could reply in time. Or no time is left for the devices that wait for a slot "
    "(`[cohort] max_concurrency`). In a buffered run: every device that could reply has an update in the buffer.",
    "deadline": (
        "the deadline passed while devices were outstanding, and at least `[cohort] min_updates` are aggregated."
    ),
    "too-few": "fewer updates than `[cohort] min_updates`. The model does not change, and the round's updates are "
    "dropped. After `[cohort] retry_limit` such rounds in a row the run fails with exit code 6.",
    "buffer": 'the buffer is full (`[cohort] buffer`), in runs with `mode = "buffered"`. Devices at work '
    "continue, and their "
    "updates go into the next buffer.",
    "stopped": "a person stopped the run. No step is made.",
    "aborted": "the masks of a round with secure aggregation do not cancel: a client dealt wrong shares, a vector is "
    "damaged, or a survivor was revoked. Or the round of a private run was open in a restored backup, so the privacy "
    "ledger has no reservation for it. No step is made. If the round ended before `unmask`, nothing is revealed; after "
    "that, assume that the aggregator has the sum. After `[cohort] retry_limit` such rounds in a row the run fails "
    "with exit code 6.",
}

FAILURES = {
    "task-error": "the task's code raised an exception. The device sends its class and its place in the task. "
    "The text and the "
    "traceback stay on the device: `thinwire client logs --last-error`",
    "task-missing": "the device has no task of this name: start its client with `--task NAME=MODULE`",
    "task-mismatch": "the device's task differs from the run's in what `[run] task_match` compares",
    "layout-mismatch": "the device's model has other tensors than the run's",
    "base-mismatch": "the received model does not have the digest that the assignment names",
    "non-finite": "the local training produced NaN or infinity. The device sent nothing, and its residual stays. "
    "Under masks or with privacy there is no such failure, which would tell of the data: the update is zeros then",
    "need-plan": "the device does not have the plan with this digest; the aggregator sends it again",
    "declined": "the policy of the device's owner refuses the plan",
    "state-lost": "the device's state directory was lost or copied back. It used a sequence number again for "
    "other bytes, or it "
    "lacks the state that `ef21`, `scaffold` or `feddyn` needs",
    "protocol": "the two ends have protocols that are too far apart: update the older one",
    "worker": "the worker died, was killed, hung or ran out of memory",
    "disk": "the device is not able to write its state",
    "failed": "the device left a round with secure aggregation. The text is one word, so that it tells nothing of the "
    "device's data: `work` for an error of its task, its worker or its disk; `lattice` for an update that could not be "
    "rounded; else the check that failed: `terms`, `message`, `roster`, `signature`, `too-few`, `shares`, `survivors`, "
    "`another-request` or `order`. The device's own log has the sentence",
    "refused": "the aggregator reports: the device was revoked while its assignment was open (the text is "
    "`revoked`). Its "
    "updates that were not aggregated are dropped",
    "stale": "the aggregator reports: no reply for more than `[cohort] max_staleness` rounds, with `[local] overlap` "
    "`max_staleness` + `max_delay`. Where no other device is left to select, for `max_staleness` + 1 deadlines. "
    "In a round with secure aggregation: no message in time for a phase. The device "
    "is selected again. For a first model ([run] init): its time is over",
    "offline": "the aggregator reports: the device is offline, or a person stopped its client",
    "over": "the aggregator reports: the run, or a round under masks, ended before a reply to this assignment. It is "
    "no failure of the device: "
    "`failed` does not count it, and the assignment's outcome is `over`",
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
        "Why a device did not answer an assignment. A failure says its kind and a text that holds no data of "
        "the device: for "
        "an error in the task, the class of the exception and its place in the task's code."
    )
    dropped = (
        "Why the aggregator dropped an update that arrived. With error feedback its device adds the update to its "
        "residual again, so that a later update carries the work; without feedback, and under masks, the work is lost. "
        "`stale` and `revoked` are also told of assignments above: there nothing had arrived. A reply that is not "
        "valid, for instance one without frames, is no drop: its assignment fails, with a kind above. The third reply "
        "to one assignment, and each later one, is acknowledged without a record."
    )
    rows = [(f"`{kind}`", meaning) for kind, meaning in FAILURES.items()]
    drops = [(f"`{reason}`", meaning) for reason, meaning in DROPS.items()]
    return "\n\n".join(
        ["# Failures and dropped updates", failed, table(("kind", "meaning"), rows),
         "## Dropped updates", dropped, table(("reason", "meaning"), drops)]
    )  # fmt: skip


def _told(thing: type, before: str) -> set[str]:
    """The names that a docstring lists after `before`, up to the full stop."""
    text = " ".join((inspect.getdoc(thing) or "").split())
    listed = re.sub(r"\(.*?\)", "", text.partition(before)[2]).partition(".")[0]
    return {name.strip() for name in listed.split(",")}


def _raised() -> set[str]:
    """The kinds that stand as words where a failure is made."""
    made = re.compile(r'(?:Failure|CannotReply)\(\s*"([a-z-]+)"|\.lose\([^,]+, "([a-z-]+)"')
    texts = [path.read_text() for path in Path(thinwire.__file__).parent.rglob("*.py")]
    return {one or other for text in texts for one, other in made.findall(text)}


def _dropping() -> set[str]:
    """The reasons that stand as words where an answer is dropped: what they say after a colon is more than the name."""
    made = re.compile(r'(?:_drop|_unseen|round_events\.AggregationRejected)\([^"\n]*"([a-z-]+)|rejected=f?"([a-z-]+)')
    texts = [path.read_text() for path in (Path(thinwire.__file__).parent / "server").glob("*.py")]
    return {one or other for text in texts for one, other in made.findall(text)}


def closing_page() -> str:
    _same("closing reasons", set(get_args(CloseReason)), CLOSING)
    said = (
        "A round closes for exactly one reason. It is in the journal, on the dashboard and in `thinwire runs "
        "show`. See "
        "also [a round](../explain/a-round.md)."
    )
    return "\n\n".join(
        ["# Closing reasons", said, table(("reason", "meaning"), [(f"`{k}`", v) for k, v in CLOSING.items()])]
    )
