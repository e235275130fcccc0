"""The commands of `thinwire runs`: list, show, watch, compare and model; others have files of their own.

`show --why` explains where the time of a run and of each of its rounds went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import TAG_SETTINGS, Home, Json, RunId, require_new_file
from thinwire.cli.runs.compare import compare
from thinwire.cli.runs.render import list_, metrics, note_halted, standing
from thinwire.cli.runs.run_commands import archive, clone, delete, extend, pause, resume, stop, tag, unarchive
from thinwire.cli.runs.track import track
from thinwire.core import formatting
from thinwire.core.events import ENDED

if TYPE_CHECKING:
    from thinwire.store import RoundRow, RunRow, Store
    from thinwire.store.round_explanation import RoundExplanation


app = typer.Typer(
    name="runs",
    help="Runs: list, show, watch, compare, take the model, pause, resume, stop, tag, extend, delete.",
    no_args_is_help=True,
)

for command in (compare, metrics, stop, pause, resume, clone, archive, unarchive, delete, extend, track):
    app.command()(command)
app.command(name="list")(list_)
app.command(context_settings=TAG_SETTINGS)(tag)

EXPLAINED = 100  # newest rounds that `show --why` prints


@app.command()
def show(
    run_id: RunId = "latest",
    number: Annotated[int | None, typer.Option("--round", metavar="N", min=1, help="only this round")] = None,
    why: Annotated[bool, typer.Option("--why", help="explain the time of each round")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Show one run, round by round; with secure aggregation also the phases of its last round."""
    from thinwire.cli.local_state import command_line, end_abandoned, open_store
    from thinwire.cli.runs.render import run_document
    from thinwire.core.errors import NotFound
    from thinwire.store.explaining import explain_rounds, explain_run, totals_of

    end_abandoned(home)
    with open_store(home) as store:
        if (gone := store.deleted_run(run_id)) is not None:
            _show_deleted(gone, json)
            return
        row = store.run(run_id)
        last, _ = store.round_count(row.run_id)
        if number is not None and number > last:
            raise NotFound(
                f"{row.run_id} has no round {number}", why=f"it has opened {last}",
                hint=command_line(f"runs show {row.run_id}" + (f" --round {last}" if last else ""), home),
            )  # fmt: skip
        if json:
            more = explanations_document(store.explanations(row.run_id, number or 1, number)) if why else {}
            console.document(run_document(store, row.run_id, number) | more)
        elif why:
            _header(store, row, store.rounds(row.run_id, row.rounds_closed + 1))
            first = max(1, last - EXPLAINED + 1) if number is None else number
            found = store.explanations(row.run_id, first, number)
            print_explanations(found, explain_rounds(found) if number else explain_run(totals_of(store, row)))
            if first > 1 and number is None:
                earlier = f"rounds 1 to {first - 1}" if first > 2 else "round 1"
                console.note(f"not shown: {earlier}; --round N explains one, --json all of them")
        else:
            rounds = store.rounds(row.run_id)
            _show(store, row, rounds, [one for one in rounds if number in (None, one.round)])
        if not json:
            note_halted([row], home)


def _show_deleted(row: RunRow, json: bool) -> None:
    """Show what is left of a run that a person deleted."""
    from thinwire.core.plan import digest_of
    from thinwire.store.queries import deleted_text

    if json:
        left = {"run_id": row.run_id, "status": "deleted", "task": row.task, "plan_digest": digest_of(row.plan)}
        console.document(left | {"deleted_by": row.deleted_by, "deleted_at": row.deleted_at, "was": row.status})
        return
    after = f"{row.version} of {formatting.counted(row.rounds_total, 'round')}"
    console.line(f"{row.run_id} was {deleted_text(row)}; it was {row.status} after {after}")
    console.line(f"plan    digest {digest_of(row.plan)}")


def _ahead(row: RunRow, rounds: Sequence[RoundRow]) -> str:
    """Return the status of a run with several open rounds, by the one that takes replies; else ""."""
    open_ = [r.round for r in rounds if r.closed_at is None]
    if row.status != "running" or len(open_) < 2:
        return ""
    others = f"rounds {open_[1]} to {open_[-1]} were" if open_[2:] else f"round {open_[1]} was"
    return f"running: round {open_[0]}, step {row.version + 1} of {row.rounds_total}; {others} selected ahead"


def _header(store: Store, row: RunRow, rounds: Sequence[RoundRow]) -> None:
    """Print the id, status and notes of a run."""
    from thinwire.reports.alerting import divergence
    from thinwire.reports.reason_text import behind, sentence

    state = behind(row, store.run_queue()) or _ahead(row, rounds) or standing(row)
    if row.status in ENDED and (stepless := row.rounds_closed - row.version) > 0:
        state += f", and {stepless} without a step"
    console.sentence(state, begin=f"{row.run_id}  ")
    if warning := divergence(store, row):
        console.sentence(warning, begin="warning ")
    if row.name or row.tags or row.archived_at is not None:
        said = [row.name, " ".join(row.tags), "archived" if row.archived_at is not None else ""]
        console.sentence("; ".join(filter(None, said)), begin="        ")
    for note in row.notes:
        console.sentence(sentence(note), begin="note    ")


def _show(store: Store, row: RunRow, rounds: Sequence[RoundRow], shown: Sequence[RoundRow]) -> None:
    """Print a run and these of its rounds."""
    from thinwire.cli.runs.render import (
        capping,
        clipping,
        losses,
        measured_version,
        print_phases,
        without_sum,
    )
    from thinwire.reports.privacy import private_lines
    from thinwire.reports.secure_rounds import is_secure, not_evaluated, protection

    _header(store, row, rounds)
    if found := protection(row, {len(one.selected) for one in rounds}):
        console.sentence(found.sentence, begin="secure  ")
        for assumed in found.assumes:
            console.sentence(f"Assumption: {assumed}", begin="        ")
        console.sentence(found.not_protected, begin="        ")
    for place, said in enumerate(private_lines(store, row)):
        console.sentence(said, begin=" " * 8 if place else "privacy ")
    console.line(f"model   {row.size} parameters, version {row.version}, digest {row.model_digest[:16]}")
    figures = formatting.figures(row.decisive)
    unmeasured = "not measured" if row.status in ENDED else "not measured yet"
    console.line(f"metrics {f'{figures} of version {measured_version(row, rounds)}' if figures else unmeasured}")
    if trained := next((r for r in reversed(rounds) if r.train_metrics), None):
        console.line(f"train   {formatting.figures(trained.train_metrics)} in round {trained.round}")
    if said := not_evaluated(row, rounds):
        console.sentence(said, begin="        ")
    numbers = {one.round for one in shown}
    updates = [one for one in store.updates(row.run_id, with_reason=True) if one.round in numbers]
    for sentence in (*clipping(row, shown), *capping(updates, shown), *losses(updates), *without_sum(shown)):
        console.sentence(sentence, begin="        ")
    _traffic(store, row, rounds)
    if not rounds:
        return
    console.line()
    header = ("round", "closed", "replies", "late", "failed", "accuracy", "loss", "up", "down", "seconds", "slowest")
    waited_for = {one.round: one.device for one in store.explanations(row.run_id)} if is_secure(row) else {}
    cells = [_round(r, waited_for.get(r.round, r.slowest)) for r in shown]
    console.table(header, cells, right=header[:1] + header[2:10])
    last = next((r for r in shown if r.closed_at is None), shown[-1])
    for line in _decided(last, goes_on=row.status not in ENDED and last.closed_at is None):
        console.sentence(line)
    if is_secure(row):
        print_phases(store, last)


def _traffic(store: Store, row: RunRow, rounds: Sequence[RoundRow]) -> None:
    """Print the bytes of a run in both directions, and what of them is in none of its `rounds`, which are all."""
    from thinwire.cli.runs.render import on_the_wire
    from thinwire.core.run_events import is_sampled
    from thinwire.reports.secure_rounds import is_secure

    if is_sampled(row.plan):
        console.line("bytes   not shown: they would tell how many clients were sampled")
        return
    for way, payload, wire, dense in (
        ("up", row.payload_up, row.wire_up, row.dense_up),
        ("down", row.payload_down, row.wire_down, row.dense_down),
    ):
        said = f"{formatting.size(payload)} payload, {on_the_wire(wire, payload)}"
        console.line(f"{way:<7} {said}{_ratio(dense, payload)}")
        if way == "up" and payload and is_secure(row):
            keys = sum(one.received_bytes for one in store.phases(row.run_id) if one.phase != "masked")
            console.line(f"        {formatting.size(keys)} of it are keys, shares and signatures")
    last = row.payload_down - sum(one.payload_down for one in rounds)
    if row.status == "done" and last > 0:
        models = "the last model, once at each end of the run" if row.is_extended else "the last model"
        console.line(f"        {formatting.size(last)} of it evaluated {models}, and is in no round")


def _ratio(dense: int, sent: int) -> str:
    """Return how many times fewer bytes were sent than in float32, "" if not fewer."""
    return f", {dense / sent:.1f} times less than dense float32" if 0 < sent < dense else ""


NAMED = 5  # devices that are unable to take part


def _decided(r: RoundRow, goes_on: bool) -> Iterator[str]:
    """Yield what measurements decided about a round and why, and its deadline while it goes on."""
    from thinwire.reports.reason_text import deadline_sentence, sentence

    if r.sampling:
        yield f"round {r.round} was {sentence(r.sampling)}"
    unable = [one for one in sorted(r.not_selected.items()) if any(code == "unable" for code, _ in one[1])]
    for device, reasons in unable[:NAMED]:
        yield f"round {r.round} did not select {device}: {sentence(reasons)}"
    if r.deadline_reason and goes_on:
        yield f"round {r.round} may take {deadline_sentence(r.deadline_s, r.deadline_reason)}"
    for device, reasons in sorted(r.codec_reasons.items()):
        yield f"  {device} {'is' if goes_on else 'was'} assigned {r.codecs[device]}: {sentence(reasons)}"


def _round(r: RoundRow, slowest: str) -> tuple[str, ...]:
    """Return the cells of one round; a secure one waited for the `slowest` of its longest phase, as --why tells."""
    came, of = (
        len(r.aggregated) if r.reason else r.answered,
        r.target_updates if r.reason == "buffer" else len(r.selected),
    )
    counts = (f"{came}/{of}", str(r.late), str(r.failed))
    sums = (formatting.size(r.payload_up), formatting.size(r.payload_down))
    if r.hides_sample:
        counts, sums = (formatting.NOTHING,) * 3, (formatting.NOTHING,) * 2
    return (
        str(r.round), r.reason or "open", *counts,
        formatting.figure(r.decisive.get("accuracy")), formatting.figure(r.decisive.get("loss")), *sums,
        formatting.NOTHING if r.seconds is None else f"{r.seconds:.2f}", slowest,
    )  # fmt: skip


@app.command()
def watch(run_id: RunId = "latest", home: Home = None) -> None:
    """Follow a run to its end; the exit code is the run's. Ctrl-C ends this command, not the run."""
    from thinwire.cli.local_state import end_abandoned, open_store
    from thinwire.cli.runs.progress import follow

    end_abandoned(home)
    with open_store(home) as store:
        row = store.run(run_id)
        raise typer.Exit(follow(store, row.run_id, home, watch_aggregator=row.source == "devices"))


@app.command()
def model(
    run_id: RunId,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help=".safetensors file to write")],
    which: Annotated[str, typer.Option("--round", metavar="N|best|last", help="round of the model")] = "last",
    json: Json = False,
    home: Home = None,
) -> None:
    """Write a run's model as .safetensors: weights, buffers, and in its metadata where it comes from."""
    from thinwire.cli.local_state import aggregator_home, open_store
    from thinwire.reports.stored_models import stored_model

    require_new_file(out)
    with open_store(home) as store:
        found = stored_model(store, aggregator_home(home), run_id, which)
    names = found.export(out)
    if json:
        document = {"run_id": found.run.run_id, "version": found.row.version, "digest": found.row.digest}
        document |= {"metrics": dict(found.metrics), "file": str(out), "tensors": names}
        console.document(
            document | {"buffers": found.statistics, "frozen": found.frozen, "personal_layers": found.personal_layers}
        )
    else:
        figures = formatting.figures(found.metrics) or "not measured"
        console.line(f"{out}: {found.run.run_id} version {found.row.version}, {len(names)} tensors, {figures}")
        if found.statistics:
            console.line(f"its buffers (BatchNorm statistics and the like) are {found.statistics}")
        if found.personal_layers:
            globs = ", ".join(found.personal_layers)
            console.line(f"not in it: the personal layers {globs}, which each client keeps ([local] personal_layers)")
        if found.frozen:
            console.line(f"not in it: {len(found.frozen)} frozen tensors, which are those of the task's model()")


def explanations_document(found: list[RoundExplanation]) -> dict[str, Any]:
    """Return the part of the run's document that `--why` adds."""
    from thinwire.store.explaining import explain_rounds

    return {
        "why": _explanation_document(explain_rounds(found)),
        "rounds_why": [{"round": one.round, **_explanation_document(one)} for one in found],
    }


def print_explanations(found: list[RoundExplanation], all_of_it: RoundExplanation) -> None:
    """Print a sentence for the run, a table of seconds by round and stage, and a sentence for each round."""
    from thinwire.store.round_timing import STAGES

    if not found:
        console.line("no round of it has closed yet")
        return
    console.sentence(all_of_it.sentence)
    console.line()
    there = tuple(
        name for name in STAGES if any(name in {**one.stages, **one.uncounted} for one in (*found, all_of_it))
    )
    wired = any(one.requests for one in found)
    header = ("round", "seconds", *there, "slowest", *(("requests",) if wired else ()), "not in time")
    rows = [(str(one.round), *_explanation_row(one, there, wired)) for one in found]
    console.table(header, [*rows, ("all", *_explanation_row(all_of_it, there, wired))], right=header[: 2 + len(there)])
    console.line()
    for one in found:
        console.sentence(one.sentence)


def _explanation_row(one: RoundExplanation, stages: tuple[str, ...], wired: bool) -> tuple[str, ...]:
    """Return the cells of one explanation."""
    from thinwire.core.formatting import duration

    seconds = {**one.stages, **one.uncounted}
    spent = (formatting.NOTHING if name not in seconds else f"{seconds[name]:.2f}" for name in stages)
    made = str(one.requests or "")
    if one.rtt_s and one.trips_s:
        made += f" x {duration(one.rtt_s)} = {duration(one.trips_s)}"
    return f"{one.seconds:.2f}", *spent, one.device, *((made,) if wired else ()), ", ".join(one.waited_for)


def _explanation_document(one: RoundExplanation) -> dict[str, Any]:
    """Return one explanation as JSON types."""
    return {
        "sentence": one.sentence, "seconds": one.seconds, "slowest": one.device, "stages": dict(one.stages),
        "uncounted": dict(one.uncounted), "waited_for": list(one.waited_for), "requests": one.requests,
        "rtt_s": one.rtt_s, "trips_s": one.trips_s,
    }  # fmt: skip
