"""This module shows runs: `thinwire runs list`, `thinwire runs metrics`, a JSON document of a run, and sentences.

The list is a table, narrowed by tags, the archive and deletion. Metrics are what each client measured, as a table, JSON
or CSV. The document is what `runs show --json` and `run --json` print.
"""

from __future__ import annotations

import csv as csv_file
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId
from thinwire.core import formatting
from thinwire.core.events import ENDED
from thinwire.core.run_events import FIGURES_OF_SAMPLE, is_sampled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thinwire.reports.sweep_results import Group
    from thinwire.store import RoundRow, RunRow, Store, UpdateRow


def total(up: int | None, down: int | None) -> int | None:
    """Return the bytes of both directions; None if there is no network."""
    return None if up is None or down is None else up + down


def run_document(store: Store, run_id: str, number: int | None = None) -> dict[str, Any]:
    """Return a run with its rounds, or with the round of this number, as JSON types."""
    row = store.run(run_id)
    rounds = store.rounds(row.run_id)
    found = [_round(r, is_sampled(row.plan)) for r in rounds if number in (None, r.round)]
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
    from thinwire.privacy.meaning import unit_text
    from thinwire.reports.privacy import assumptions, spending_of_run

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

    of_run = _shown(row, RUN_KEYS, is_sampled(row.plan))
    return of_run | {"notes": [sentence(note) for note in row.notes], "parameters": row.size}


def _shown(row: RunRow | RoundRow, keys: Sequence[str], hides_sample: bool) -> dict[str, Any]:
    """Return the values of a row; None for those that would tell how many clients Poisson sampling selected."""
    hidden = FIGURES_OF_SAMPLE if hides_sample else ()
    return {name: None if name in hidden else getattr(row, name) for name in keys}


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
        yield f"{device}: clipped {named} of {formatting.counted(len(rounds), 'round')}"
    if ignored := sum(r.ignored for r in rounds):
        said = "metric was" if ignored == 1 else "metrics were"
        yield f"{ignored} {said} ignored: fewer than half of a round's updates carried them"


def capping(updates: Iterable[UpdateRow], rounds: Sequence[RoundRow]) -> Iterator[str]:
    """Yield a sentence for each client whose weights were capped by the plan, and each that a reduction chose."""
    from thinwire.core.formatting import CAPPED, CHOSEN

    capped, chosen, of = dict[str, list[str]](), Counter[str](), formatting.counted(len(rounds), "round")
    for update in updates:
        chosen[update.device] += update.weight_reason.startswith(CHOSEN)
        if said := update.weight_reason.partition(f"{CAPPED}: ")[2]:
            capped.setdefault(update.device, []).append(said)
    for device, reasons in sorted(capped.items()):
        yield f"{device}: {CAPPED} in {len(reasons)} of {of}, lastly {reasons[-1]}"
    for device, often in sorted(chosen.items()):
        if often:
            yield f"{device}: {CHOSEN} in {often} of {of}"


def losses(updates: Iterable[UpdateRow]) -> Iterator[str]:
    """Yield a sentence for each client with dropped updates or failed assignments: how many for each reason, and the
    last one.
    """
    from thinwire.reports.reason_text import drop_sentence

    of: dict[tuple[str, str], list[UpdateRow]] = {}
    for update in updates:
        if update.outcome in ("dropped", "failed"):
            of.setdefault((update.device, update.outcome), []).append(update)
    for (device, outcome), lost in sorted(of.items()):
        noun = "update" if outcome == "dropped" else "assignment"
        kinds = Counter(one.reason.partition(":")[0] for one in lost).most_common()
        of_each = f" ({', '.join(f'{count} {kind}' for kind, count in kinds)})" if kinds[1:] else ""
        last = lost[-1]
        why = drop_sentence(last.reason)
        yield f"{device}: {noun}s {outcome}: {len(lost)}{of_each}, the last of round {last.round}: {why}"


def without_sum(rounds: Sequence[RoundRow]) -> Iterator[str]:
    """Yield a sentence for each reason for which secure rounds have no sum: how many they are, and the last case."""
    of: dict[str, list[RoundRow]] = {}
    for one in rounds:
        if one.detail:
            of.setdefault(one.reason, []).append(one)
    for reason, ended in of.items():
        yield f"rounds closed as {reason}: {len(ended)}, the last was round {ended[-1].round}: {ended[-1].detail}"


def _round(row: RoundRow, hides_sample: bool) -> dict[str, Any]:
    """Return one round as JSON types, with its reasons as sentences."""
    from thinwire.reports.reason_text import deadline_sentence, sentence

    shown = _shown(row, ROUND_KEYS, hides_sample)
    sums = {f"{kind}_bytes": total(shown[f"{kind}_up"], shown[f"{kind}_down"]) for kind in ("payload", "wire")}
    reasons = {
        "deadline_reason": deadline_sentence(row.deadline_s, row.deadline_reason), "sampling": sentence(row.sampling),
        "codec_reasons": {device: sentence(reasons) for device, reasons in row.codec_reasons.items()},
    }  # fmt: skip
    return shown | reasons | sums


def on_the_wire(wire: int | None, payload: int) -> str:
    """Format the bytes on the wire; a number below the payload is marked as incomplete.

    >>> on_the_wire(1_090_000, 1_150_000)
    '1.09 MB counted on the wire (an assignment is counted with its update)'
    """
    if wire is None or wire >= payload:
        return f"{formatting.size(wire)} on the wire"
    return f"{formatting.size(wire)} counted on the wire (an assignment is counted with its update)"


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
        clips = f"clip {total['clip']:.3g}"
        clips += "" if total["next_clip"] == total["clip"] else f", {total['next_clip']:.3g} in the next round"
        console.line(
            f"sum of {total['survivors']} clients, weight {total['weight']}, norm {total['norm']:.3g}; {clips}"
        )


def standing(row: RunRow) -> str:
    """Return the status of a run as a sentence, without repeating a word with which the sentence begins."""
    return row.status_text if row.status_text.startswith(row.status) else f"{row.status}: {row.status_text}"


def list_(
    tag: Annotated[list[str] | None, typer.Option("--tag", help="only runs with this tag; repeatable")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="only archived runs")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="only what is left of deleted runs")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """List all runs, the newest first, and the groups of simulated runs; archived and deleted runs are left out."""
    from thinwire.cli.local_state import aggregator_home, command_line, end_abandoned, has_database, open_store
    from thinwire.reports.sweep_results import groups
    from thinwire.store.read_models import MEMORY_TEXT

    end_abandoned(home)
    if not has_database(aggregator_home(home)):
        rows: list[RunRow] = []
    else:
        with open_store(home) as store:
            rows = [row for row in store.runs(with_deleted=deleted) if (row.deleted_at is not None) == deleted]
    if not deleted:
        rows = [row for row in rows if (row.archived_at is not None) == archived and set(tag or ()) <= {*row.tags}]
    narrowed = bool(tag or archived or deleted)
    swept = [] if narrowed else groups(aggregator_home(home).sweeps)
    if json:
        document = [{k: v for k, v in run_summary(row).items() if k != "plan"} for row in rows]
        console.document([*document, *({"run_id": None, **_group(group)} for group in swept)])
        return
    if rows and deleted:
        console.table(("run", "rounds", "deleted"), [_deleted_row(row) for row in rows], right=("rounds",))
    elif rows:
        _table(rows)
    elif narrowed:
        console.note(f"no such runs; all others: {command_line('runs list', home)}")
    elif not swept:
        console.note(f"no runs yet; to make one: {command_line('run PLAN', home)}")
    note_halted([] if deleted else rows, home)
    for row in rows:
        if row.status == "queued" and row.status_text.startswith(MEMORY_TEXT):
            console.note(f"{row.run_id} is {row.status_text}")
    if rows and swept:
        console.line()
    if swept:
        lines = [(g.name, g.task or formatting.NOTHING, f"{g.done}/{g.runs}", console.ago(g.at)) for g in swept]
        console.table(("group", "task", "runs", "last"), lines, right=("runs",))


def _group(group: Group) -> dict[str, Any]:
    """Return a group of simulated runs as JSON types."""
    status = "done" if group.done == group.runs else "partial"
    return {"group": group.name, "task": group.task, "status": status, "done": group.done, "runs": group.runs}


def _table(rows: Sequence[RunRow]) -> None:
    """Print the list of runs; it has the columns for names and tags only if a run has some."""
    header = ["run", "status", "rounds", "accuracy", "loss", "payload up", "made"]
    cells = [list(_row(row)) for row in rows]
    for title, words in (("name", [row.name for row in rows]), ("tags", [" ".join(row.tags) for row in rows])):
        if any(words):
            header.append(title)
            cells = [[*known, word] for known, word in zip(cells, words, strict=True)]
    console.table(header, cells, right=header[2:6])


def _made(row: RunRow) -> str:
    """Format how many rounds made a step, of those of the plan; a round that closed without one does not count."""
    return f"{row.version}/{row.rounds_total}"


def _deleted_row(row: RunRow) -> tuple[str, ...]:
    """Return the cells of what is left of a deleted run."""
    from thinwire.store.queries import deleted_text

    return row.run_id, _made(row), deleted_text(row)


def _row(row: RunRow) -> tuple[str, ...]:
    """Return the cells of a run in the list."""
    accuracy, loss = formatting.figure(row.decisive.get("accuracy")), formatting.figure(row.decisive.get("loss"))
    sent = formatting.size(None if is_sampled(row.plan) else row.payload_up)
    begun = console.ago(row.created_at)
    return row.run_id, row.status, _made(row), accuracy, loss, sent, begun


def note_halted(rows: Sequence[RunRow], home: Path | None) -> None:
    """Note the runs that make no progress because no aggregator is running, or its disk is full."""
    from thinwire.cli.local_state import aggregator_home, alive, start_hint
    from thinwire.core.disk_reserve import disk_full_text

    if (said := disk_full_text(aggregator_home(home).root)) and alive(home) is not None:
        console.note(said)
    halted = [row.run_id for row in rows if row.source == "devices" and row.status not in ENDED]
    if halted and alive(home) is None:
        console.note(f"no aggregator is running; to go on with {', '.join(halted)}: {start_hint(home)}")


def metrics(
    run_id: RunId = "latest",
    number: Annotated[int | None, typer.Option("--round", metavar="N", min=1, help="only this round")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Show the metrics of each client: of the model that it got, and of its training."""
    from thinwire.cli.local_state import open_store
    from thinwire.core.errors import NotFound, UsageError
    from thinwire.reports.client_metrics import client_metrics, columns

    if csv and json:
        raise UsageError("--csv and --json are both given", why="each is a form of the same rows", hint="one of them")
    with open_store(home) as store:
        run = store.run(run_id)
        try:
            rows, why = client_metrics(store, run, number), ""
        except NotFound as error:
            rows, why = list[dict[str, Any]](), str(error.why)
    if json:
        console.document({"run_id": run.run_id, "clients": rows, "why": why})
    elif csv:
        _print_csv(rows)
    elif rows:
        header = columns(rows)
        told = [[_cell(row.get(name)) for name in header] for row in rows]
        console.table(header, told, right=[name for name in header if name not in ("client", "clipped")])
    if not rows and not json:
        console.note(f"{run.run_id} has no metrics of single clients" + (f": {why}" if why else " yet"))


def _cell(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    from thinwire.core.formatting import csv_cell
    from thinwire.reports.client_metrics import columns

    writer = csv_file.DictWriter(sys.stdout, columns(rows), restval="")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
