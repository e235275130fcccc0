"""Refuse a simulation whose plan, task, options and clients do not fit together, before its run begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.client.errors import as_thinwire_error
from thinwire.client.task import LoadedTask
from thinwire.client.task_check import metrics_of
from thinwire.client.train.errors import BadSplit, BadUsage, task_code
from thinwire.client.train.module import keep_generators
from thinwire.core.errors import PlanError, Refused, TaskError, TooFewClients, UsageError
from thinwire.core.formatting import counted
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome, dead_owner, holder
from thinwire.server.policy.cohort import fewest_to_begin, wait_reason

if TYPE_CHECKING:
    from thinwire.simulation.client_pool import ClientPopulation


def require_own_start(plan: RunPlan) -> None:
    """Raise `PlanError` if the plan begins with another model than the task's, because there is no store to read it
    from.
    """
    if plan.run.init not in ("", "device"):
        raise PlanError(
            f"[run] init = {plan.run.init!r} is not supported here",
            why="such a simulation begins with the model that the task makes from the seed",
            hint="thinwire sim PLAN without --sweep and --seeds; or leave [run] init out",
        )


def require_one_process_for_secrets(plan: RunPlan, processes: int) -> None:
    """Raise `UsageError` for a secure run in several processes."""
    if plan.secure.enabled and processes > 1:
        raise UsageError(
            f"secure rounds in {processes} processes",
            why="the secrets of a client stay in the memory of one process",
            hint="leave --processes out",
        )


def require_dead_owner(home: AggregatorHome, run_id: str) -> None:
    """Raise `Refused` unless the process that simulated the run has died: two would write over each other."""
    owner = home.owner(run_id)
    if dead_owner(owner) is not None:
        return
    if holder(owner) is not None:
        raise Refused(
            f"another process runs {run_id} in {home.root.parent}",
            why="two cannot go on with one run",
            hint="wait for it, or give this one another home",
        )
    raise Refused(
        f"nobody knows whether another machine still runs {run_id} in {home.root.parent}",
        why="its lock may not be visible on this one, and two cannot go on with one run",
        hint=f"the same command on that machine; or give the run up: thinwire runs stop {run_id}",
    )


def require_step_seconds(step_s: Sequence[float], clients: int) -> None:
    """Raise `UsageError` unless there is a number for each client and none is negative; no numbers at all are valid."""
    if step_s and (len(step_s) != clients or min(step_s) < 0):
        raise UsageError(
            f"step_s has {len(step_s)} values, or a negative one",
            why=f"it holds the seconds of a step for each of {clients} clients",
            hint=f"[0.1] * {clients}",
        )


def require_same(plan: RunPlan, task: LoadedTask) -> None:
    """Raise `TaskError` if the plan trains another task than this one: no client would have it, so the run would
    wait.
    """
    if task.name != plan.run.task:
        raise TaskError(
            f"the plan trains {plan.run.task!r}, and this is the code of {task.name!r}",
            why="a client trains what it has code for, by its name",
            hint=f"{plan.run.task}=MODULE, or [run] task = {task.name!r}",
        )


def require_enough(plan: RunPlan, population: ClientPopulation) -> None:
    """Raise `TooFewClients` if a run would wait for more clients than there are, because no other client ever
    connects.
    """
    if said := wait_reason(plan, [population.name(index) for index in range(population.count)], {}):
        least = fewest_to_begin(plan)
        other = "" if plan.server.reduce == "mean" else "another [server] reduce, or "
        other += "fewer in [cohort] wait_for, clients and min_updates"
        other = "[secure] enabled = false" if plan.secure.enabled else other
        raise TooFewClients(
            f"the run would wait for ever with {counted(population.count, 'simulated client')}",
            why=said,
            hint=f"--clients {least}, or {other}" if least > population.count else f"more --clients, or {other}",
        )


def require_data(task: LoadedTask, population: ClientPopulation) -> None:
    """Raise the error of a split that the task's data do not allow, because then each client fails.

    Any other error of the task's code is a failure of the client that runs it.
    """
    try:
        with keep_generators(), task_code():
            task.module.data(population.client_info(0))
    except (BadSplit, BadUsage) as wrong:
        raise as_thinwire_error(wrong) from wrong
    except Exception:
        return


def require_metrics(plan: RunPlan, task: LoadedTask, population: ClientPopulation) -> None:
    """Raise `PlanError` if the plan needs a metric that the first client does not report, because then no client
    reports it.
    """
    if plan.unknown_metrics(()) and plan.run.evaluate == "clients":
        known = metrics_of(task, population.client_info(0), plan)
        if known is not None:
            plan.require_metrics(known)
