"""A simulated run with its lines, on the store of this machine's aggregator."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import say
from thinwire.cli.interrupts import remembered
from thinwire.cli.runs.follow import screen
from thinwire.cli.runs.rounds import Teller

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.core.events import Event

INTERRUPTED = 130
TASK_RAISED = 3


def simulated(
    plan: RunPlan,
    file: Path,
    task: str | None,
    *,
    clients: int,
    split: str,
    data: Path | None,
    debug: bool,
    home: Path | None,
    processes: int = 1,
) -> tuple[dict[str, Any], int]:
    """Run it and tell it; gives its document and exit code. Ctrl-C stops it for good: nobody would go on with it."""
    from thinwire.cli.first_model import first_model
    from thinwire.cli.places import aggregator_home, opened
    from thinwire.cli.runs.shown import run_document
    from thinwire.cli.task_code import task_spec
    from thinwire.client import Site
    from thinwire.client.initial import Initial, initial_model
    from thinwire.client.task import load_task
    from thinwire.simulation import run_sim
    from thinwire.simulation.run import require_processes

    spec = task_spec(plan.run.task, file, task)
    code = load_task(spec)
    require_processes(processes, spec, debug)
    made = initial_model(code, plan.run.seed)
    if made.left_out:
        say.note(f"warning: {made.left_out}")
    site = Site(data=data.absolute() if data else None, split=split, seed=plan.run.seed)
    teller, begun = Teller(), list[str]()
    with opened(home, read_only=False) as store, screen() as (tell, show), remembered() as look:
        params, buffers, counters = first_model(store, home, plan, file, made)

        def on_event(event: Event) -> None:
            look()
            for line in teller.hear(event):
                tell(line)
            show(f"{begun[0]}: {teller.now}")

        try:
            run_sim(
                plan, code, store=store, home=aggregator_home(home), clients=clients, site=site, debug=debug,
                first=Initial(made.layout, params, buffers, dict(counters), made.fixed), on_event=on_event,
                on_begin=begun.append, processes=processes, spec=spec,
            )  # fmt: skip
        except KeyboardInterrupt:
            _end(store, begun, "stopped", "stopped with Ctrl-C", 10)
            return run_document(store, begun[0]), INTERRUPTED
        except Exception as error:
            if not (debug and begun):
                raise
            traceback.print_exc()
            if hint := getattr(error, "hint", ""):
                say.note(f"try:   {hint}")
            _end(store, begun, "failed", f"the task raised {type(error).__name__}", TASK_RAISED)
            return run_document(store, begun[0]), TASK_RAISED
        tell(f"{begun[0]} {teller.status}: {teller.text}")
        if any(kind == "task-error" for kind, _ in teller.faults):
            tell("where in the task that was: the same command with --debug")
        return run_document(store, begun[0]), store.run(begun[0]).exit_code


def _end(store: Any, begun: list[str], status: Any, text: str, code: int) -> None:
    from thinwire.core.events import RunStatusChanged
    from thinwire.server.driving.ending import close_undriven

    if not begun:
        raise KeyboardInterrupt
    close_undriven(store, begun[0], RunStatusChanged(time.time(), status, text, code))
    say.note(f"{begun[0]} {status}: {text}")
