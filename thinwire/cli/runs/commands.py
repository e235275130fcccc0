"""`thinwire runs`: what was run, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import say
from thinwire.cli.options import Home, Json, RunId
from thinwire.cli.runs.compare import compare

if TYPE_CHECKING:
    from thinwire.store import RoundRow, RunRow, Store
    from thinwire.store.groups import Group

app = typer.Typer(name="runs", help="Runs: list, show, watch, compare, take the model, stop.", no_args_is_help=True)

app.command()(compare)

STOP_WAIT_S = 30.0
OVER = ("done", "failed", "stopped")


@app.command(name="list")
def list_(json: Json = False, home: Home = None) -> None:
    """List all runs, the newest first, and the groups of simulated runs."""
    from thinwire.cli.places import again, aggregator_home, end_abandoned, has_database, opened
    from thinwire.cli.runs.shown import run_summary
    from thinwire.store.groups import groups

    end_abandoned(home)
    if not has_database(aggregator_home(home)):
        rows: list[RunRow] = []
    else:
        with opened(home) as store:
            rows = store.runs()
    swept = groups(aggregator_home(home).sweeps)
    if json:
        document = [{k: v for k, v in run_summary(row).items() if k != "plan"} for row in rows]
        say.document([*document, *({"run_id": None, **_group(group)} for group in swept)])
        return
    if rows:
        header = ("run", "status", "rounds", "accuracy", "loss", "payload up", "made")
        say.table(header, [_row(row) for row in rows], right=header[2:6])
    elif not swept:
        say.note(f"no runs yet; to make one: {again('run PLAN', home)}")
    _note_halted(rows, home)
    if rows and swept:
        say.line()
    if swept:
        lines = [(g.name, g.task or say.NOTHING, f"{g.done}/{g.runs}", say.ago(g.at)) for g in swept]
        say.table(("group", "task", "runs", "last"), lines, right=("runs",))


def _group(group: Group) -> dict[str, Any]:
    status = "done" if group.done == group.runs else "partial"
    return {"group": group.name, "task": group.task, "status": status, "done": group.done, "runs": group.runs}


def _row(row: RunRow) -> tuple[str, ...]:
    done = f"{row.rounds_closed}/{row.rounds_total}"
    accuracy, loss = say.figure(row.decisive.get("accuracy")), say.figure(row.decisive.get("loss"))
    return row.run_id, row.status, done, accuracy, loss, say.size(row.payload_up), say.ago(row.created_at)


@app.command()
def show(
    run_id: RunId = "latest",
    why: Annotated[
        bool, typer.Option("--why", help="where the time of each round went, and what it waited for")
    ] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Show one run, round by round."""
    from thinwire.cli.places import end_abandoned, opened
    from thinwire.cli.runs import why as reasons
    from thinwire.cli.runs.shown import run_document

    end_abandoned(home)
    with opened(home) as store:
        if json:
            more = reasons.document(reasons.whys(store, store.run(run_id))) if why else {}
            say.document(run_document(store, run_id) | more)
        elif why:
            _head(store, store.run(run_id), store.rounds(run_id))
            reasons.show(reasons.whys(store, store.run(run_id)))
        else:
            _show(store, store.run(run_id))
        if not json:
            _note_halted([store.run(run_id)], home)


def _note_halted(rows: Sequence[RunRow], home: Path | None) -> None:
    """Runs that stand still, since no aggregator is there to go on with them."""
    from thinwire.cli.places import alive, way_back

    halted = [row.run_id for row in rows if row.source == "devices" and row.status not in OVER]
    if halted and alive(home) is None:
        say.note(f"no aggregator is running; to go on with {', '.join(halted)}: {way_back(home)}")


def standing(row: RunRow) -> str:
    """How a run stands; its sentence may begin with the same word."""
    return row.status_text if row.status_text.startswith(row.status) else f"{row.status}: {row.status_text}"


def _ahead(row: RunRow, rounds: Sequence[RoundRow]) -> str:
    """How a run stands whose rounds are asked ahead: by the one whose answers are taken; else empty."""
    open_ = [r.round for r in rounds if r.closed_at is None]
    if row.status != "running" or len(open_) < 2:
        return ""
    others = f"rounds {open_[1]} to {open_[-1]} were" if open_[2:] else f"round {open_[1]} was"
    return f"running: round {open_[0]}, step {row.version + 1} of {row.rounds_total}; {others} asked ahead"


def _head(store: Store, row: RunRow, rounds: Sequence[RoundRow]) -> None:
    from thinwire.store.queue import behind

    say.sentence(behind(row, store.line()) or _ahead(row, rounds) or standing(row), begin=f"{row.run_id}  ")
    for note in row.notes:
        say.sentence(note, begin="note    ")


def _show(store: Store, row: RunRow) -> None:
    from thinwire.cli.runs.shown import capping, clipping, measured_version, on_the_wire

    rounds = store.rounds(row.run_id)
    _head(store, row, rounds)
    say.line(f"model   {row.size} parameters, version {row.version}, digest {row.model_digest[:16]}")
    figures = ", ".join(f"{name} {value:.4f}" for name, value in row.decisive.items())
    say.line(f"metrics {figures} of version {measured_version(row, rounds)}" if figures else "metrics not measured yet")
    for sentence in (*clipping(row, rounds), *capping(store.updates(row.run_id), rounds)):
        say.sentence(sentence, begin="        ")
    for way, payload, wire, dense in (
        ("up", row.payload_up, row.wire_up, row.dense_up),
        ("down", row.payload_down, row.wire_down, row.dense_down),
    ):
        ratio = f", {dense / payload:.1f} times less than dense float32" if 0 < payload < dense else ""
        say.line(f"{way:<7} {say.size(payload)} payload, {on_the_wire(wire, payload)}{ratio}")
    if not rounds:
        return
    say.line()
    header = ("round", "closed", "replies", "late", "failed", "accuracy", "loss", "up", "down", "seconds", "slowest")
    say.table(header, [_round(r) for r in rounds], right=header[:1] + header[2:10])
    last = next((r for r in rounds if r.closed_at is None), rounds[-1])
    for line in _decided(last, goes_on=row.status not in OVER and last.closed_at is None):
        say.sentence(line)


def _decided(r: RoundRow, goes_on: bool) -> Iterator[str]:
    """What was decided of a round by what was measured, and why; for how long it may go on, as long as it does."""
    if r.drawn:
        yield f"round {r.round} was {r.drawn}"
    if r.deadline_reason and goes_on:
        yield f"round {r.round} may take {r.deadline_reason}"
    for device, reason in sorted(r.codec_reasons.items()):
        yield f"  {device} {'is' if goes_on else 'was'} asked in {reason}"


def _round(r: RoundRow) -> tuple[str, ...]:
    came, of = len(r.folded) if r.reason else r.answered, r.target if r.reason == "buffer" else len(r.asked)
    return (
        str(r.round), r.reason or "open", f"{came}/{of}", str(r.late), str(r.failed),
        say.figure(r.decisive.get("accuracy")), say.figure(r.decisive.get("loss")), say.size(r.payload_up),
        say.size(r.payload_down), say.NOTHING if r.seconds is None else f"{r.seconds:.2f}", r.slowest,
    )  # fmt: skip


@app.command()
def watch(run_id: RunId = "latest", home: Home = None) -> None:
    """Follow a run to its end; the exit code is the run's. Ctrl-C ends the watching, not the run."""
    from thinwire.cli.places import end_abandoned, opened
    from thinwire.cli.runs.follow import follow

    end_abandoned(home)
    with opened(home) as store:
        row = store.run(run_id)
        raise typer.Exit(follow(store, row.run_id, home, watch_aggregator=row.source == "devices"))


@app.command()
def model(
    run_id: RunId,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="the .safetensors file to write")],
    which: Annotated[str, typer.Option("--round", metavar="N|best|last", help="the model after this round")] = "last",
    json: Json = False,
    home: Home = None,
) -> None:
    """Write a run's model as .safetensors: weights, buffers, and in its metadata where it comes from."""
    from thinwire.cli.places import opened
    from thinwire.cli.runs.stored_model import stored_model
    from thinwire.core.errors import UsageError

    if not out.absolute().parent.is_dir():
        raise UsageError(
            f"there is no folder {out.parent}", why=f"{out} goes into it", hint="--out in one that is there"
        )
    if out.exists():
        raise UsageError(
            f"{out} is there already", why="nothing is overwritten", hint="another name, or remove it first"
        )
    with opened(home) as store:
        found = stored_model(store, home, run_id, which)
    names = found.export(out)
    if json:
        document = {"run_id": found.run.run_id, "version": found.row.version, "digest": found.row.digest}
        document |= {"metrics": dict(found.metrics), "file": str(out), "tensors": names}
        say.document(document | {"buffers": found.statistics, "frozen": found.frozen})
    else:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in found.metrics.items()) or "not measured"
        say.line(f"{out}: {found.run.run_id} version {found.row.version}, {len(names)} tensors, {figures}")
        if found.statistics:
            say.line(f"its buffers (BatchNorm statistics and the like) are {found.statistics}")
        if found.frozen:
            say.line(f"not in it: {len(found.frozen)} frozen tensors, which are those of the task's model()")


@app.command()
def stop(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Stop a run for good; its models stay."""
    from thinwire.cli.places import end_abandoned, known
    from thinwire.cli.waiting import until

    end_abandoned(home)
    with known(home, read_only=False, what="runs") as store:
        row = store.run(run_id)
        if row.status not in OVER:
            store.order("stop-run", row.run_id)
            if not until(lambda: store.run(row.run_id).status in OVER, STOP_WAIT_S) and _nobody_serves(row):
                _stop_here(store, row.run_id)
        row = store.run(row.run_id)
    if json:
        say.document({"run_id": row.run_id, "status": row.status})
    elif row.status in OVER:
        say.line(f"{row.run_id} {standing(row)}")
    else:
        say.line(f"{row.run_id} will stop as soon as its aggregator runs and sees the order")


def _nobody_serves(row: RunRow) -> bool:
    """Whether no aggregator, now or later, carries an order about this run out."""
    return row.source == "sim" or row.status == "preparing"


def _stop_here(store: Store, run_id: str) -> None:
    """Close a run whose own process does not answer: it may have died on another machine. A person says so."""
    import time

    from thinwire.core.events import RunStatusChanged
    from thinwire.server.driving.ending import close_undriven
    from thinwire.server.orders import Orders

    said = "stopped by a person; the process that simulated it or handed it over did not answer"
    close_undriven(store, run_id, RunStatusChanged(time.time(), "stopped", said, 10))
    Orders(store).stop_run(run_id)
