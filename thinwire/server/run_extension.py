"""Gives a run that is over more rounds, as a person commanded.

Versions and round numbers go on, and so does the server optimizer with its stored state. The schedule of the learning
rate keeps the number of rounds that it had. Devices dropped their state of the run when it ended, so they begin with
residual 0; an update that a device made before does not count any more. Their personal layers go on. Everything is
checked before anything is recorded, and all that is recorded is one transaction. A run whose devices remember more than
a residual (SCAFFOLD, FedDyn, EF21) is refused, and so is one whose masks or noise were planned for its number of
rounds.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from thinwire.aggregation import codecs
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.core.errors import BudgetSpent, DataLost, Refused
from thinwire.core.events import ENDED, Event, RoundClosed, RunStatusChanged
from thinwire.core.formatting import counted, rounded_up
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import as_error
from thinwire.core.plan_text import plan_text
from thinwire.core.run_events import RunExtended
from thinwire.core.statedir import AggregatorHome
from thinwire.privacy.accounting import Budget, Release, epsilon
from thinwire.privacy.noise_plan import participations_of
from thinwire.server.model_store import Versions
from thinwire.server.state import snapshot
from thinwire.server.state.run_state import RunState, empty_state
from thinwire.server.submit import require_allowed
from thinwire.store import RunRow, Store
from thinwire.store.read_models import CommandRow

CHANGEABLE: Final = frozenset({  # keys that decide nothing about rounds that are closed
    "run.priority", "run.target", "run.evaluate_every", "cohort.clients", "cohort.wait_for",
    "cohort.wait_s", "cohort.min_updates", "cohort.over_select", "cohort.deadline_s", "cohort.retry_limit",
    "local.lr", "local.lr_end", "local.lr_warmup", "local.schedule", "local.schedule_rounds", "local.steps",
    "local.epochs", "local.batch", "server.lr", "server.lr_end", "server.lr_warmup", "server.schedule",
    "server.schedule_rounds", "run.fraction_evaluate",
})  # fmt: skip
MAX_EXTENSIONS = 10  # the newest ones: a command that was not answered can only have made one of them
SPENDING: Final = frozenset({  # of those, what the cost of a private round may follow from
    "cohort.clients", "cohort.min_updates", "cohort.over_select", "local.steps", "local.epochs", "local.batch",
})  # fmt: skip


def extend_run(
    store: Store, home: AggregatorHome, command: CommandRow, wall: Callable[[], float] = time.time
) -> RunRow:
    """Queue a run that is over for the `rounds` of a person's command, with its `sets`, and return the run's row.

    A command that was carried out before changes nothing.

    Raise `Refused`, `PlanError` or `BudgetSpent` with the reason if the run does not go on; nothing is changed then.
    """
    row = store.run(command.run_id)
    extensions = store.newest_events(row.run_id, MAX_EXTENSIONS, {RunExtended})
    if any(isinstance(one, RunExtended) and one.command_id == command.id for _, one in extensions):
        return row
    rounds, sets = int(command.args["rounds"]), dict[str, str](command.args.get("sets") or {})
    old = RunPlan.from_json(row.plan)
    _require_continuable(row, old, sets)
    require_allowed(store, home, row.run_id)
    run_state = _state(store, row, old)
    plan = _plan(row, old, run_state, rounds, sets)
    _require_budget(store, row, plan, run_state, rounds)
    _require_files(home, row, plan, run_state)
    now = wall()
    event = RunExtended(
        now, plan.run.rounds, row.rounds_total, run_state.version, run_state.rounds_opened + 1, plan.to_json(),
        sets, command.who, command.id, _changed(old, plan),
    )  # fmt: skip
    said = f"{counted(rounds, 'more round')}, to {plan.run.rounds} in all"
    store.record(row.run_id, [*_closed(run_state, now), event, RunStatusChanged(now, "queued", f"queued for {said}")])
    return store.run(row.run_id)


def _require_continuable(row: RunRow, plan: RunPlan, sets: Mapping[str, str]) -> None:
    """Raise `Refused` for a run that has no way to go on, and for keys that are not changeable."""
    clone = f'start another run with its model: thinwire runs clone {row.run_id} --set run.init="run:{row.run_id}"'
    remembers = "ef21" if plan.run.algorithm == "fedavg" else plan.run.algorithm
    rules = (
        (row.source != "devices", "it was simulated, and its clients are gone", f"thinwire runs clone {row.run_id}"),
        (row.status not in ENDED, f"it is {row.status}, and not over",
         f"thinwire runs clone {row.run_id} --set run.rounds={row.rounds_total * 2}"),
        (plan.has_client_state, f"devices and aggregator both keep a state for {remembers}, and devices dropped theirs",
         clone),
        (plan.secure.enabled, f"masks, graph and coordinates were planned for {counted(plan.run.rounds, 'round')}",
         clone),
        (plan.privacy.mechanism == "tree", "its tree of noise was planned for its number of rounds", clone),
        (plan.privacy.target_epsilon is not None,
         (f"its noise was chosen so that {counted(plan.run.rounds, 'round')} cost epsilon = "
         f"{plan.privacy.target_epsilon or 0:g}, and more rounds would cost more"), clone),
    )  # fmt: skip
    if found := next(((why, hint) for when, why, hint in rules if when), None):
        raise Refused(f"{row.run_id} gets no more rounds", why=found[0], hint=found[1])
    fixed = {key for key in sets if not any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE)}
    if plan.privacy.mode != "off":
        fixed |= set(sets) & SPENDING
    if fixed:
        raise Refused(
            f"{min(fixed)} stays as it is in {row.run_id}",
            why="closed rounds were decided by it" if min(fixed) not in SPENDING else "what a round spends follows it",
            hint=f"a new run with other keys: thinwire runs clone {row.run_id} --set {min(fixed)}=...",
        )


def _state(store: Store, row: RunRow, plan: RunPlan) -> RunState:
    """Return the state at the run's end, by its journal."""
    run_state, later = snapshot.restore(store, row.run_id, empty_state(plan))
    for _, event in later:
        run_state.apply(event)
    if run_state.bases.model is None:
        raise Refused(
            f"{row.run_id} gets no more rounds", why="it never had a model", hint=f"thinwire runs clone {row.run_id}"
        )
    return run_state


def _plan(row: RunRow, old: RunPlan, run_state: RunState, rounds: int, sets: Mapping[str, str]) -> RunPlan:
    """Return the plan with more rounds; raise `PlanError` for a contradiction, `Refused` for a target that is met."""
    target_is_same = not any(key.startswith("run.target") for key in sets)
    if run_state.scores.reached is not None and old.run.target and target_is_same:
        raise Refused(
            f"{row.run_id} gets no more rounds",
            why=f"it has reached its target, {old.run.target.metric} {old.run.target.value:g}",
            hint=f"another target: --set run.target.value={old.run.target.value:g}",
        )
    text, name = plan_text(old), f"the plan of {row.run_id}"
    overrides = {"run.rounds": str(run_state.steps_made + rounds), **sets}
    plan = RunPlan.parse(text, name, overrides)
    for section, rates, new in (("local", old.local, plan.local), ("server", old.server, plan.server)):
        if rates.moves and new.moves and f"{section}.schedule_rounds" not in sets:
            overrides[f"{section}.schedule_rounds"] = str(rates.schedule_rounds or old.run.rounds)
    plan = RunPlan.parse(text, name, overrides)
    if refused := plan.check(codecs):
        raise as_error(refused)
    return plan


def _changed(old: RunPlan, plan: RunPlan) -> dict[str, Any]:
    """Return the keys of the old plan that have another value in the new one, as `section.key`."""
    now = plan.to_json()
    return {
        f"{section}.{key}": value
        for section, table in old.to_json().items()
        if isinstance(table, Mapping)
        for key, value in table.items()
        if now[section][key] != value
    }


def _require_budget(store: Store, row: RunRow, plan: RunPlan, run_state: RunState, rounds: int) -> None:
    """Raise `BudgetSpent` if the clients that are known have not enough left for so many rounds.

    Each round takes as many of them as the plan selects, each at most once. That is possible if all of them together
    have that many participations left, none counted more often than there are rounds. With Poisson sampling each device
    of the population pays for each round. No table has these devices, so they come from the journal.
    """
    privacy = plan.privacy
    population = privacy.population or plan.run.task
    own = [one for one in store.privacy.rows(population) if one.run_id == row.run_id and one.release]
    if privacy.mode == "off" or privacy.budget is None or not own:
        return
    release = Release.from_json(own[-1].release)
    first = next((Release.from_json(one.release) for one in store.privacy.rows(population) if one.release), release)
    budget = Budget(privacy.budget, privacy.delta, first if first.rate < 1 else None)
    here, left = Counter(device for one in own for device in one.devices), dict[str, int]()
    found = dict[tuple[frozenset[tuple[str, int]], int], int]()  # most devices have spent the same
    sampled = privacy.sampling_rate is not None
    known = sorted(run_state.considered) if sampled else [client.device for client in store.clients(row.run_id)]
    spent = store.privacy.spent_by_device(population, known)
    for device in known:
        most, participations = rounds, privacy.max_participations
        if participations is not None:
            most = min(most, max(0, participations_of(plan) - here[device]))
        if (same := (frozenset(spent[device].items()), most)) not in found:
            cost = Counter({Release.from_json(text): count for text, count in spent[device].items()})
            found[same] = _fitting(budget, cost, release, most)
        left[device] = found[same]
    selected = plan.cohort.clients
    of_each = len(known) if selected == "all" or sampled else (
        selected if isinstance(selected, int) else max(1, math.ceil(float(selected) * len(known)))
    )  # fmt: skip
    fits = bisect.bisect_left(  # rounds that do not fit do not fit into a longer extension either
        range(1, rounds + 1), True, key=lambda n: sum(min(n, one) for one in left.values()) < n * of_each
    )
    if fits < rounds:
        least = min(left, key=lambda device: left[device])
        cost = Counter({Release.from_json(text): count for text, count in spent[least].items()})
        raise BudgetSpent(
            f"{counted(rounds, 'more round')} of {row.run_id} would pass [privacy] budget = {privacy.budget:g}",
            f"{counted(fits, 'more round')} would fit: {least} has spent {rounded_up(epsilon(cost, privacy.delta))} at "
            f"delta = {privacy.delta:g}",
            f"--rounds {fits}" if fits else "what is spent stays spent: other clients, in another population",
        )


def _fitting(budget: Budget, spent: Counter[Release], release: Release, most: int) -> int:
    """Return how many more of a release the budget allows after what is spent, `most` at most.

    A person may want a million rounds, and all runs wait for the answer: so it takes 20 steps, not a million.
    """
    return bisect.bisect_left(
        range(most), True, key=lambda count: not budget.allows(spent + Counter({release: count}), release)
    )


def _require_files(home: AggregatorHome, row: RunRow, plan: RunPlan, run_state: RunState) -> None:
    """Raise `Refused` if the last model, its replica or the server optimizer's state is not whole on the disk."""
    versions = Versions(
        home.run(row.run_id), transmitted_layout(algorithm_of(plan), Layout.from_json(row.layout)), home.durable
    )
    try:
        assert run_state.bases.model is not None, "`_state` has looked"
        versions.read(run_state.bases.model)
        versions.read_state(run_state.bases.model)
        if run_state.bases.replica is not None:
            versions.read(run_state.bases.replica)
    except DataLost as error:
        hint = f'restore a backup, or another run: thinwire runs clone {row.run_id} --set run.init="run:{row.run_id}"'
        raise Refused(f"{row.run_id} gets no more rounds", why=str(error), hint=hint) from error


def _closed(run_state: RunState, now: float) -> list[Event]:
    """Return a RoundClosed for each round that was open when the run ended without its driver."""
    opened, progress = run_state.open_rounds.rounds, run_state.open_rounds.progress
    accepted = [event.update_id for event in progress.accepted]
    return [
        RoundClosed(
            now, one.round, "stopped", run_state.version, [], dropped, [], run_state.elapsed_s, now - one.at, {}
        )
        for one, dropped in zip(opened, itertools.chain([accepted], itertools.repeat([])), strict=False)
    ]
