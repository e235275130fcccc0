"""`thinwire aggregator evaluate`: evaluate the models of runs with `[run] evaluate = "holdout"` on this machine's data.

The process follows the runs in the store and leaves each result there as a command, which the service records. The task
runs in a worker, so the aggregator imports neither its code nor torch. After a crash or a stop the process goes on with
the oldest due version after the last one that was evaluated; the runs go on without it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import console
from thinwire.cli.params import Data, Home

if TYPE_CHECKING:
    from thinwire.client.executor import SubprocessExecutor
    from thinwire.client.train.protocol import ClientInfo
    from thinwire.core.statedir import AggregatorHome
    from thinwire.store import RunRow, Store

VERSIONS_READ_S = 0.5  # between two reads of the versions that wait for an evaluation
FOLDER = "evaluate"  # below the aggregator's directory: log and lock of the worker


def evaluate(
    task: Annotated[str, typer.Option("--task", metavar="NAME=MODULE", help="the task's code on this machine")],
    run_id: Annotated[str, typer.Option("--run", metavar="ID", help="only this run, until it is over")] = "",
    data: Data = None,
    device: Annotated[str, typer.Option("--device", help="torch device: auto, cpu, cuda:0")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="threads of torch; 0: its default")] = 0,
    once: Annotated[bool, typer.Option("--once", help="evaluate what is due now, then end")] = False,
    home: Home = None,
) -> None:
    """Evaluate the models of runs on data of this machine, as [run] evaluate = "holdout" wants."""
    from thinwire.cli.local_state import aggregator_home, open_store, require_home
    from thinwire.client.executor import Worker
    from thinwire.client.train.protocol import ClientInfo
    from thinwire.client.worker_process import Interpreter
    from thinwire.core.events import ENDED
    from thinwire.core.signals import interruptible
    from thinwire.core.statedir import hold, private_folder

    require_home(home)
    where = aggregator_home(home)
    folder = private_folder(private_folder(where.root / FOLDER) / task.partition("=")[0])
    with hold(folder / "lock", {"task": task}), open_store(home, read_only=False) as store, interruptible() as look:
        worker = Worker([task], Interpreter(None, folder), device=device, threads=threads)
        try:
            worker.describe()
            (executor,) = worker.executors()
            client = ClientInfo(data=data.absolute() if data else None, device=device)
            following = Following(store, where, executor, client)
            only = required(store.run(run_id), executor.name).run_id if run_id else ""
            made = False
            while True:
                look()
                found = following.step(only)
                made = made or found
                if not found and (once or (only and store.run(only).status in ENDED)):
                    if not made:
                        console.note(f"no version of a run of {executor.name} is due")
                    return
                if not found:
                    worker.stop_if_idle()
                    time.sleep(VERSIONS_READ_S)
        finally:
            worker.close()


def required(run: RunRow, task: str) -> RunRow:
    """Return the run; raise `UsageError` if its plan has no holdout evaluation, or trains another task."""
    from thinwire.core.errors import UsageError

    if run.plan["run"]["evaluate"] != "holdout":
        raise UsageError(
            f"{run.run_id} has [run] evaluate = {run.plan['run']['evaluate']!r}",
            why="only a run whose plan says so is evaluated here",
            hint='[run] evaluate = "holdout" in the plan of the next run',
        )
    if run.task != task:
        raise UsageError(
            f"{run.run_id} trains the task {run.task}", why=f"--task names {task}", hint=f"--task {run.task}=MODULE"
        )
    return run


class Following:
    """Follows the runs of one task and evaluates their versions."""

    def __init__(self, store: Store, home: AggregatorHome, executor: SubprocessExecutor, client: ClientInfo) -> None:
        self._store, self._home, self._executor, self._client = store, home, executor, client
        self._newest: dict[str, int] = {}  # run -> the newest version that was evaluated or cannot be

    def step(self, only: str = "") -> bool:
        """Evaluate one version of each run that has one which is due; return False if no run has."""
        mine = [run for run in self._store.runs() if only in ("", run.run_id) and self._mine(run)]
        return sum(self._evaluate(run) for run in mine) > 0

    def _mine(self, run: RunRow) -> bool:
        from thinwire.core.events import ENDED

        open_ = run.status not in (*ENDED, "preparing") and run.deleted_at is None and run.source == "devices"
        return open_ and run.task == self._executor.name and run.plan["run"]["evaluate"] == "holdout"

    def _evaluate(self, run: RunRow) -> bool:
        """Evaluate the oldest version of a run that is due, and leave the result for the service."""
        from thinwire.client.errors import CannotReply
        from thinwire.client.holdout import evaluate_model
        from thinwire.core import formatting
        from thinwire.core.errors import DataLost, NotFound
        from thinwire.core.plan import RunPlan
        from thinwire.reports.stored_models import stored_version
        from thinwire.server.holdout import EVALUATED, HoldoutResult, is_due

        plan = RunPlan.from_json(run.plan)
        if run.run_id not in self._newest:
            self._newest[run.run_id] = evaluated_until(self._store, run.run_id)
        newest = self._newest[run.run_id]
        if run.version <= newest:
            return False
        models = (row.version for row in self._store.models(run.run_id))
        due = [version for version in models if version > newest and is_due(plan, version)]
        for version in sorted(due):
            self._newest[run.run_id] = version
            try:
                model = stored_version(self._store, self._home, run, version)
            except (NotFound, DataLost):
                continue  # it is not kept any more
            try:
                metrics, histograms = evaluate_model(
                    self._executor, plan, self._client, model.params, model.buffers, model.row.counters
                )
            except CannotReply as error:
                console.note(f"{run.run_id} version {version}: {error.kind}: {error}")
                return True
            result = HoldoutResult(version, metrics, histograms)
            self._store.commands.add(EVALUATED, run.run_id, result.to_json(), "evaluate")
            console.line(f"{run.run_id} version {version}: {formatting.figures(result.means)}")
            return True
        return False


def evaluated_until(store: Store, run_id: str) -> int:
    """Return the newest version of a run whose evaluation is in the journal, or waits for the service; -1 if none."""
    from thinwire.core.events import Evaluated
    from thinwire.server.holdout import EVALUATED

    done = [event.version for _, event in store.events(run_id) if isinstance(event, Evaluated)]
    waiting = [one.args["version"] for one in store.commands.pending() if (one.kind, one.run_id) == (EVALUATED, run_id)]
    return max([*done, *waiting], default=-1)
