"""A run as one JSON document, as `runs show --json` and `run --json` print it, and sentences about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.core import formatting

if TYPE_CHECKING:
    from thinwire.store import RoundRow, RunRow, Store, UpdateRow


def total(up: int | None, down: int | None) -> int | None:
    """Return the bytes of both directions; None if there is no network."""
    return None if up is None or down is None else up + down


def run_document(store: Store, run_id: str, number: int | None = None) -> dict[str, Any]:
    """Return a run with its rounds, or with the round of this number, as JSON types."""
    row = store.run(run_id)
    rounds = store.rounds(row.run_id)
    found = [_round(r) for r in rounds if number in (None, r.round)]
    document = run_summary(row) | {"measured_version": measured_version(row, rounds), "rounds": found}
    return document | _secure(store, row, rounds, found) | _private(store, row)


def _secure(store: Store, row: RunRow, rounds: Sequence[RoundRow], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run with secure aggregation has besides, and add the phases to its rounds; {} for other runs."""
    from thinwire.reports.secure_rounds import is_secure, not_evaluated, protection
    from thinwire.store.round_timing import phases_of

    if not is_secure(row):
        return {}
    closed, updates = store.phases(row.run_id), store.updates(row.run_id)
    by_number = {one.round: one for one in rounds}
    for document in found:
        number = document["round"]
        of_round = [one for one in closed if one.round == number]
        own = [one for one in updates if one.round == number]
        phases = phases_of(by_number[number], of_round, own)
        document |= {"phases": [asdict(one) for one in phases], "secure_sum": by_number[number].secure_sum}
    protected = protection(row, {len(one.selected) for one in rounds})
    return {"protection": protected and asdict(protected), "not_evaluated": not_evaluated(row, rounds)}


def _private(store: Store, row: RunRow) -> dict[str, Any]:
    """Return what a private run has spent, with its unit and assumptions; {} for other runs."""
    from thinwire.reports.privacy import assumptions, spending_of_run, unit_text

    if (spent := spending_of_run(store, row)) is None:
        return {}
    return {
        "privacy": asdict(spent)
        | {"unit": unit_text(spent.mode), "assumptions": assumptions(spent, row.source == "sim")}
    }


def measured_version(row: RunRow, rounds: Sequence[RoundRow]) -> int | None:
    """Return the model version that the run's metrics belong to; None if none was evaluated.

    The latest version may not be evaluated yet.
    """
    if not row.metrics:
        return None
    return max((r.version for r in rounds if r.metrics and r.version is not None), default=0)


RUN_KEYS = (
    "run_id", "task", "source", "status", "status_text", "exit_code", "rounds_total", "rounds_closed", "version",
    "model_digest", "notes", "metrics", "clipped", "best_version", "best_value", "late", "dropped", "failed",
    "payload_up", "payload_down", "wire_up", "wire_down", "dense_up", "dense_down", "created_at", "started_at",
    "finished_at", "name", "tags", "archived_at", "plan",
)  # fmt: skip
ROUND_KEYS = (
    "round", "reason", "detail", "selected", "aggregated", "late", "failed", "dropped", "seconds", "payload_up",
    "payload_down", "wire_up", "wire_down", "version", "codec", "deadline_s", "deadline_reason", "sampling", "codecs",
    "codec_reasons", "metrics", "clipped", "train_metrics", "ignored", "spent",
)  # fmt: skip


def run_summary(row: RunRow) -> dict[str, Any]:
    """Return a run without its rounds as JSON types."""
    from thinwire.reports.reason_text import sentence

    of_run = {name: getattr(row, name) for name in RUN_KEYS}
    return of_run | {"notes": [sentence(note) for note in row.notes], "parameters": row.size}


def clipping(row: RunRow, rounds: Sequence[RoundRow]) -> Iterator[str]:
    """Yield sentences on clipped metrics by client, and on metrics that were not recorded."""
    if means := row.clipped.get("means"):
        said = formatting.figures({name: row.metrics[name] for name in means})
        yield f"values of clients were clipped, as for best and target; the plain mean is {said}"
    if row.best_version is None and row.plan["run"]["metric"] in row.metrics:
        yield "no version is best or meets a target: fewer than half of those who answer measure, and fewer than three"
    of = Counter(
        (device, name) for r in rounds for device, names in r.clipped.get("clients", {}).items() for name in names
    )
    for device in sorted({device for device, _ in of}):
        named = ", ".join(f"{name} after {of[device, name]}" for name in sorted(n for d, n in of if d == device))
        yield f"{device}: clipped {named} of {len(rounds)} rounds"
    if ignored := sum(r.ignored for r in rounds):
        yield f"{ignored} metrics were ignored: fewer than half of a round's updates carried them"


def capping(updates: Iterable[UpdateRow], rounds: Sequence[RoundRow]) -> Iterator[str]:
    """Yield a sentence for each client whose weights were capped by the plan, and each that a reduction chose."""
    from thinwire.core.formatting import CAPPED, CHOSEN

    capped, chosen = dict[str, list[str]](), Counter[str]()
    for update in updates:
        chosen[update.device] += update.weight_reason.startswith(CHOSEN)
        if said := update.weight_reason.partition(f"{CAPPED}: ")[2]:
            capped.setdefault(update.device, []).append(said)
    for device, reasons in sorted(capped.items()):
        yield f"{device}: {CAPPED} in {len(reasons)} of {len(rounds)} rounds, lastly {reasons[-1]}"
    for device, often in sorted(chosen.items()):
        if often:
            yield f"{device}: {CHOSEN} in {often} of {len(rounds)} rounds"


def losses(updates: Iterable[UpdateRow]) -> Iterator[str]:
    """Yield a sentence for each client with dropped updates or failed assignments: how many for each reason, and the
    last one.
    """
    of: dict[tuple[str, str], list[UpdateRow]] = {}
    for update in updates:
        if update.outcome in ("dropped", "failed"):
            of.setdefault((update.device, update.outcome), []).append(update)
    for (device, outcome), lost in sorted(of.items()):
        noun = "update" if outcome == "dropped" else "assignment"
        kinds = Counter(one.reason.partition(":")[0] for one in lost).most_common()
        of_each = f" ({', '.join(f'{count} {kind}' for kind, count in kinds)})" if kinds[1:] else ""
        last = lost[-1]
        yield f"{device}: {noun}s {outcome}: {len(lost)}{of_each}, the last of round {last.round}: {last.reason}"


def without_sum(rounds: Sequence[RoundRow]) -> Iterator[str]:
    """Yield a sentence for each reason for which secure rounds have no sum: how many they are, and the last case."""
    of: dict[str, list[RoundRow]] = {}
    for one in rounds:
        if one.detail:
            of.setdefault(one.reason, []).append(one)
    for reason, ended in of.items():
        yield f"rounds closed as {reason}: {len(ended)}, the last was round {ended[-1].round}: {ended[-1].detail}"


def _round(row: RoundRow) -> dict[str, Any]:
    """Return one round as JSON types, with its reasons as sentences."""
    from thinwire.reports.reason_text import deadline_sentence, sentence

    sums = {"payload_bytes": total(row.payload_up, row.payload_down), "wire_bytes": total(row.wire_up, row.wire_down)}
    reasons = {
        "deadline_reason": deadline_sentence(row.deadline_s, row.deadline_reason), "sampling": sentence(row.sampling),
        "codec_reasons": {device: sentence(reasons) for device, reasons in row.codec_reasons.items()},
    }  # fmt: skip
    return {name: getattr(row, name) for name in ROUND_KEYS} | reasons | sums


def on_the_wire(wire: int | None, payload: int) -> str:
    """Format the bytes on the wire; a number below the payload is marked as incomplete.

    >>> on_the_wire(1_090_000, 1_150_000)
    '1.09 MB counted on the wire so far (an assignment is counted with its reply)'
    """
    if wire is None or wire >= payload:
        return f"{formatting.size(wire)} on the wire"
    return f"{formatting.size(wire)} counted on the wire so far (an assignment is counted with its reply)"


def print_phases(store: Store, found: RoundRow) -> None:
    """Print the phases of a secure round, and the numbers of its sum."""
    from thinwire.store.round_timing import phases_of

    phases = phases_of(found, store.phases(found.run_id, found.round), store.updates(found.run_id, found.round))
    console.line()
    console.line(f"phases of round {found.round}")
    header = ("phase", "clients", "dropped out", "bytes", "seconds")
    rows = [
        (
            one.phase,
            formatting.NOTHING if one.received is None else str(one.received),
            ", ".join(f"{device} ({why})" if why else device for device, why in one.dropped.items()),
            formatting.size(one.received_bytes),
            "open" if one.seconds is None else f"{one.seconds:.2f}",
        )
        for one in phases
    ]
    console.table(header, rows, right=("clients", "bytes", "seconds"))
    if total := found.secure_sum:
        clips = f"clip {total['clip']:.3g}, {total['next_clip']:.3g} in the next round"
        console.line(
            f"sum of {total['survivors']} clients, weight {total['weight']}, norm {total['norm']:.3g}; {clips}"
        )


def standing(row: RunRow) -> str:
    """Return the status of a run as a sentence, without repeating a word with which the sentence begins."""
    return row.status_text if row.status_text.startswith(row.status) else f"{row.status}: {row.status_text}"
