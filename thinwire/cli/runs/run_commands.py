"""These commands stop, pause and resume a run, tag, archive, delete and extend it, and clone it.

A running aggregator stops, pauses, deletes and extends runs, because it may hold replies of them. Without one, this
process does. All are commands in the store first, so that a crash loses none.

The first model of a clone is that of the old run where the plan makes the same one, so the task's code is not needed
here. With another seed it is, and so it is with other personal layers. The model of another run (`[run] init =
"run:ID"`) is taken if its layout is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Anyway, Home, Json, RunId, Sets, Tags, Task, overrides, tag_changes
from thinwire.cli.runs.render import standing
from thinwire.core.events import ENDED
from thinwire.core.signals import until

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.store import CommandRow, RunCommand, RunRow, Store


WAIT_S = 30.0  # for the aggregator to carry out a command
ROUND_FIRST = "it will stop when its open round closes"


def stop(
    run_id: RunId,
    after_round: Annotated[bool, typer.Option("--after-round", help="let the open round end first")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Stop a run for good, now or after its open round; its models stay."""
    from thinwire.cli.local_state import aggregator_home, end_abandoned, open_store, operator
    from thinwire.core.statedir import holder

    end_abandoned(home)
    with open_store(home, read_only=False) as store:
        row = store.run(run_id)
        if not (was_over := row.status in ENDED):
            store.command_run("stop-after-round" if after_round else "stop", row.run_id, operator())
            is_over = _until(lambda: store.run(row.run_id).status in ENDED, row, home)
            dead = _nobody_serves(row) and holder(aggregator_home(home).owner(row.run_id)) is None
            if dead and not (is_over or after_round):
                _stop_here(store, row.run_id)
        row = store.run(row.run_id)
    if json:
        console.document({"run_id": row.run_id, "status": row.status, "was_over": was_over})
    elif row.status in ENDED:
        console.line(f"{row.run_id} {standing(row)}")
        if was_over:
            console.note("it was over already: nothing was stopped")
    else:
        sees = "the process that simulates it" if row.source == "sim" else "its aggregator runs and"
        when = f"{row.status}: {ROUND_FIRST}" if after_round else f"will stop as soon as {sees} sees the command"
        console.line(f"{row.run_id} {when}")
        _note_down(row, home)


def pause(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Pause a run when its open round closes: no device gets an assignment of it until it is resumed."""
    _command("pause", run_id, json, home)


def resume(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Let a paused run go on."""
    _command("resume", run_id, json, home)


def _command(verb: RunCommand, run_id: str, json: bool, home: Path | None) -> None:
    """Leave a command about a run for the aggregator, and wait until it has carried the command out."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        row = store.run(run_id)
        run_id, number = row.run_id, store.command_run(verb, row.run_id, operator())
        _until(lambda: _is_done(store.run(run_id), verb) or store.commands.result(number) is not None, row, home)
        require_done(store.commands.result(number))
        row = store.run(run_id)
    if json:
        console.document({"run_id": row.run_id, "status": row.status})
    elif _is_done(row, verb):
        console.line(f"{row.run_id} {standing(row)}")
    else:
        when = " when its open round closes" if verb == "pause" else ""
        console.line(f"{row.run_id} {row.status}: its aggregator will {verb} it{when}")
        _note_down(row, home)


def _until(done: Callable[[], bool], row: RunRow, home: Path | None) -> bool:
    """Wait until a command is carried out, and return True if it is; do not wait for an aggregator that is down."""
    from thinwire.cli.local_state import alive, starting

    return until(lambda: done() or not (_nobody_serves(row) or alive(home) or starting(home)), WAIT_S) and done()


def _note_down(row: RunRow, home: Path | None) -> None:
    """Print how to start the aggregator again if the command waits for it."""
    from thinwire.cli.local_state import absence_text, alive, start_hint

    if not _nobody_serves(row) and not alive(home):
        console.note(f"{absence_text(home)}: {start_hint(home)}")


def _is_done(row: RunRow, verb: RunCommand) -> bool:
    """Return True if a run is paused, or goes on, as was commanded."""
    return (row.status == "paused") == (verb == "pause")


def require_done(result: Mapping[str, Any] | None) -> None:
    """Raise `Refused` with the aggregator's reason if it did not carry a command out; None: it has not answered yet."""
    from thinwire.core.errors import Refused

    if result is not None and not result.get("done"):
        raise Refused(str(result.get("error")), why=str(result.get("why")), hint=str(result.get("try")))


def _nobody_serves(row: RunRow) -> bool:
    """Return True if no aggregator will ever carry out a command about this run."""
    return row.source == "sim" or row.status == "preparing"


def _stop_here(store: Store, run_id: str) -> None:
    """Close a run by the command of a person: its own process does not respond and may have died elsewhere."""
    import time

    from thinwire.core.events import RunStatusChanged
    from thinwire.server.command_queue import CommandQueue
    from thinwire.server.run_end import close_undriven

    said = "stopped by a person; the process that simulated it or handed it over did not answer"
    close_undriven(store, run_id, RunStatusChanged(time.time(), "stopped", said, 10))
    CommandQueue(store.commands).answer_all("stop-run", run_id)


CARRIED_OUT_S = 60.0  # for the aggregator to carry a command out
Yes = Annotated[bool, typer.Option("--yes", help="confirm the deletion; also take a queued run out of the queue")]


def tag(run_id: RunId, tags: Tags = None, json: Json = False, home: Home = None) -> None:
    """Add tags to a run and remove them; without tags, show those that it has."""
    from thinwire.cli.local_state import open_store, operator

    add, remove = tag_changes(tags, f"thinwire runs tag {run_id}")
    with open_store(home, read_only=not (add or remove)) as store:
        row = store.run(run_id)
        found = store.tag_run(row.run_id, add, remove, operator()) if add or remove else row.tags
    if json:
        console.document({"run_id": row.run_id, "tags": found})
    else:
        console.line(f"{row.run_id}  {' '.join(found) or 'no tags'}")


def archive(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Hide a run that is over from lists; it can still be read."""
    _archive(run_id, True, json, home)


def unarchive(run_id: RunId, json: Json = False, home: Home = None) -> None:
    """Show an archived run in lists again."""
    _archive(run_id, False, json, home)


def _archive(run_id: str, is_archived: bool, json: bool, home: Path | None) -> None:
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        row = store.run(run_id)
        store.archive_run(row.run_id, is_archived, operator())
    if json:
        console.document({"run_id": row.run_id, "archived": is_archived})
    elif is_archived:
        console.line(f"{row.run_id} is archived")
        console.note("it is in: thinwire runs list --archived")
    else:
        console.line(f"{row.run_id} is in the lists again")


def delete(run_id: RunId, yes: Yes = False, json: Json = False, home: Home = None) -> None:
    """Delete a run that is over: its models, rounds, updates and events.

    Its row, the audit log and all entries of the privacy ledger stay, and its id is never given again.
    """
    from thinwire.cli.local_state import aggregator_home, end_abandoned, open_store
    from thinwire.server.run_deletion import delete_run, require_deletable

    end_abandoned(home)
    with open_store(home, read_only=False) as store:
        row = store.deleted_run(run_id) or store.run(run_id)
        require_deletable(row, with_queued=yes or sys.stdin.isatty())
        if not yes and row.deleted_at is None:
            _confirm(row)
        place = aggregator_home(home)
        result = carried_out(
            store, home, "delete-run", row.run_id, {}, lambda command: delete_run(store, place, row.run_id, command.who)
        )
    if json:
        console.document({"run_id": row.run_id, "deleted": result is not None})
    elif result is not None:
        console.line(f"{row.run_id} is deleted")
        console.note("its row, the audit log and its entries in the privacy ledger stay")
    else:
        console.line(f"{row.run_id}: its aggregator is still deleting it")


def extend(
    run_id: RunId,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="number of more rounds")],
    sets: Sets = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Give a run that is over more rounds: versions and round numbers go on.

    Devices begin with residual 0; the schedule of the learning rate keeps its number of rounds unless --set.
    """
    from thinwire.cli.local_state import aggregator_home, alive, end_abandoned, open_store, start_again
    from thinwire.core.formatting import counted
    from thinwire.server.run_extension import extend_run

    end_abandoned(home)
    args = {"rounds": rounds, "sets": overrides(sets)}
    with open_store(home, read_only=False) as store:
        row, place = store.run(run_id), aggregator_home(home)
        here = partial(extend_run, store, place)
        result = carried_out(store, home, "extend-run", row.run_id, args, here)
        row = store.run(row.run_id)
    if json:
        console.document({"run_id": row.run_id, "status": row.status, "rounds_total": row.rounds_total})
    elif result is None:
        console.line(f"{row.run_id}: its aggregator has not seen the command yet")
    else:
        console.line(f"{row.run_id} is queued for {counted(rounds, 'more round')}, to {row.rounds_total} in all")
        console.note("its devices begin with residual 0")
        if alive(home) is None:
            console.note(f"no aggregator is running: {start_again(home)}")


def carried_out(
    store: Store,
    home: Path | None,
    kind: str,
    run_id: str,
    args: Mapping[str, Any],
    here: Callable[[CommandRow], object],
) -> dict[str, Any] | None:
    """Leave a command for the running aggregator, wait for its result, and return it; None if it takes too long.

    Without an aggregator `here` carries the command out, while none can start on the state directory. The same command
    of an earlier call is completed. Raises its refusal, and `Unreachable` if the aggregator does not respond.
    """
    from thinwire.cli.local_state import aggregator_home, alive, operator, require_responding
    from thinwire.core.errors import NotWritten, ThinwireError
    from thinwire.core.statedir import lock_file

    require_responding(home)
    known = store.commands.pending_of(kind, run_id)
    if known is None or known.args != args:
        number = store.commands.add(kind, run_id, args, operator())
        known = next((one for one in store.commands.pending() if one.id == number), None)
        if known is None:  # a running aggregator was quick
            require_done(result := store.commands.result(number))
            return result
    command = known
    until(lambda: store.commands.result(command.id) is not None or not alive(home), CARRIED_OUT_S)
    if store.commands.result(command.id) is None and not alive(home):
        with lock_file(aggregator_home(home).lock):
            try:
                here(command)
            except NotWritten:
                raise  # the command stays, and the next aggregator tries again
            except ThinwireError as error:
                store.commands.answer(command.id, error.as_result())
                raise
            store.commands.answer(command.id, {"done": True})
    result = store.commands.result(command.id)
    require_done(result)
    return result


def _confirm(row: RunRow) -> None:
    """Let a person confirm at a terminal that a run is deleted, else exit; raise `UsageError` without a terminal."""
    from thinwire.core.errors import UsageError
    from thinwire.core.formatting import counted

    if not sys.stdin.isatty():
        raise UsageError(
            f"{row.run_id} is not deleted without --yes",
            why="nothing brings its models and events back, and there is no terminal to confirm it at",
            hint=f"thinwire runs delete {row.run_id} --yes",
        )
    what = f"its models, {counted(row.rounds_closed, 'round')} and events; nothing brings them back"
    if not typer.confirm(f"Delete {row.run_id} ({row.status}): {what}?"):
        console.line(f"{row.run_id} stays")
        raise typer.Exit(1)


def clone(
    run_id: RunId,
    sets: Sets = None,
    name: Annotated[str, typer.Option("--name", help="name of the new run, for people")] = "",
    task: Task = None,
    show: Annotated[bool, typer.Option("--print", help="print the plan as TOML, start nothing")] = False,
    yes: Anyway = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Start a new run with the plan that an old one was started with, with changes; print its id."""
    from thinwire.aggregation import codecs
    from thinwire.cli.local_state import command_line, open_store, require_alive
    from thinwire.cli.run import require_known
    from thinwire.core import RunPlan
    from thinwire.core.plan_rules import as_error
    from thinwire.core.plan_text import plan_text

    with open_store(home, read_only=show) as store:
        row = store.run(run_id)
        old = RunPlan.from_json(row.first_plan)
        if row.is_extended:
            console.note(f"{row.run_id} was extended: its clone has the plan of the start, without later changes")
        plan = RunPlan.parse(plan_text(old), f"the plan of {row.run_id}", overrides(sets), codecs=codecs)
        if show:
            console.line(plan_text(plan).rstrip())
            return
        if refused := plan.check(codecs):
            raise as_error(refused)
        require_alive(home)
        if not yes and row.source == "devices":
            require_known(store, plan, home)
        made = _submit(store, home, row, old, plan, name, task)
    if json:
        console.document({"run_id": made, "cloned_from": row.run_id})
    else:
        console.line(made)
        console.note(f"watch it: {command_line(f'runs watch {made}', home)}")


def _submit(
    store: Store, home: Path | None, row: RunRow, old: RunPlan, plan: RunPlan, name: str, task: str | None
) -> str:
    """Queue the clone with its first model, and return its id."""
    from thinwire.cli.local_state import aggregator_home
    from thinwire.cli.run import hand_over
    from thinwire.core import Layout
    from thinwire.core.errors import Refused
    from thinwire.core.plan_names import named_model
    from thinwire.reports.stored_models import stored_model
    from thinwire.server.model_files import require_counted
    from thinwire.server.submit import FirstModel, first_model_of, submit

    if row.source != "devices":
        raise Refused(
            f"{row.run_id} was simulated",
            why="a clone runs on the devices of the aggregator",
            hint=f"thinwire runs clone {row.run_id} --print > plan.toml, then thinwire sim or thinwire run plan.toml",
        )
    place, layout = aggregator_home(home), Layout.from_json(row.layout)
    named = named_model(plan.run.init)
    other = store.run(named[0]) if named else None
    if named is not None and other is not None:
        require_counted(plan, other, named[1], store.run)
    elif plan.run.init == old.run.init:
        require_counted(plan, row, "0", store.run)
    shares = old.local.personal_layers == plan.local.personal_layers
    takes = shares and other is not None and Layout.from_json(other.layout).digest == layout.digest
    if task or not (takes or _begins_alike(row, old, plan)):
        return hand_over(store, home, plan, Path.cwd() / "plan.toml", task, name)
    if plan.run.init == "device":
        params, buffers = first_model_of(layout)
        return submit(store, place, plan, FirstModel(layout, row.task_report, params, buffers), name=name)
    named = None if plan.run.init == old.run.init else named
    found = stored_model(store, place, *(named or (row.run_id, "0")))
    counters, fixed = found.row.counters, found.fixed
    first = FirstModel(layout, row.task_report, found.params, found.buffers, counters, fixed)
    return submit(store, place, plan, first, name=name)


def _begins_alike(row: RunRow, old: RunPlan, plan: RunPlan) -> bool:
    """Return True if the clone begins with the first model of the old run; raise `TaskError` if not."""
    from thinwire.core.errors import TaskError

    keys = ["[local] personal_layers"] if old.local.personal_layers != plan.local.personal_layers else []
    keys += [f"[run] {key}" for key in ("task", "init") if getattr(old.run, key) != getattr(plan.run, key)]
    keys += ["[run] seed"] if not plan.run.init and old.run.seed != plan.run.seed else []
    if not keys:
        return True
    raise TaskError(
        f"the first model of this clone is not that of {row.run_id}",
        why=f"{keys[0]} differs, so the code of the task has to make it",
        hint=f"--task {plan.run.task}=MODULE",
    )
