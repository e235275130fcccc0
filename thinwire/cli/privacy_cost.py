"""Compute and print what a private run of a plan costs a client, for `thinwire privacy plan` and `plan explain`.

The noise follows from the plan, the number of parameters and, in distributed mode, the number of selected clients
(`privacy.noise_plan`). No store is read, so what earlier runs of the population have spent is not in these figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinwire.aggregation.plan_codecs import noised_dimensions
from thinwire.cli import console
from thinwire.core.errors import PlanError
from thinwire.core.formatting import counted, rounded_up
from thinwire.core.plan_privacy_rules import LEAST_NOISE, MAX_NOISE
from thinwire.core.secure_numbers import selected_of, share_of
from thinwire.privacy.accounting import Budget, epsilon
from thinwire.privacy.meaning import unit_text
from thinwire.privacy.noise_plan import NoisePlan, honest_survivors, noise_plan, share_of_participation
from thinwire.privacy.tree_aggregation import length_of, nodes_in_model
from thinwire.reports.privacy import TRUSTED, sampling_text
from thinwire.reports.secure_rounds import thresholds

if TYPE_CHECKING:
    from thinwire.core import RunPlan

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the plan's noise multiplier, a row of the table each


@dataclass(frozen=True)
class PrivateRun:
    """Holds a plan with its noise, the number of clients of a round, and how many parties' noise its cost counts."""

    plan: RunPlan
    parameters: int
    dimensions: int
    selected: int
    honest: int
    noise: NoisePlan
    online: int | None = None

    @property
    def rate(self) -> float:
        """Return the rate at which clients are sampled; 1 without sampling."""
        return self.plan.privacy.sampling_rate or 1.0

    def unamplified(self) -> float:
        """Return epsilon of a client that is in every round and knows it."""
        privacy = self.plan.privacy
        if privacy.sampling_rate is None:
            return self.epsilon()
        return epsilon({replace(self.noise.release, rate=1.0): self.noise.participations}, privacy.delta)

    def epsilon(self, participations: int | None = None) -> float:
        """Return epsilon of a client after so many rounds, by default after the most."""
        return self.noise.epsilon(self.plan.privacy.delta, participations)

    def with_noise(self, **keys: float) -> PrivateRun:
        """Return this run with another noise_multiplier or target_epsilon."""
        privacy = self.plan.privacy.model_copy(update={"noise_multiplier": None, "target_epsilon": None, **keys})
        plan = self.plan.model_copy(update={"privacy": privacy})
        noise = noise_plan(plan, self.dimensions, self.selected)
        return PrivateRun(plan, self.parameters, self.dimensions, self.selected, self.honest, noise, self.online)

    @property
    def mean_noise(self) -> float:
        """Return the noise of a coordinate of the mean of all selected clients, in multiples of clip / clients."""
        sources = self.selected if self.plan.privacy.mode in ("distributed", "local") else 1
        return math.sqrt(sources * self.noise.variance) / self.noise.scale

    def clients_for(self, noise_multiplier: float) -> int:
        """Return how many clients a round needs so that the mean has as much noise as now.

        One source adds noise to a sum once, and in local mode each client does.
        """
        factor = noise_multiplier / self.noise.noise_multiplier
        return math.ceil(self.selected * (factor**2 if self.plan.privacy.mode == "local" else factor))

    def most_rounds(self, fits: Callable[[int], bool]) -> int:
        """Return the most participations, up to the planned ones, for which `fits` is true; it is false from there."""
        low, high = 0, self.noise.participations
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def rounds_in_budget(self) -> int | None:
        """Return how many planned participations [privacy] budget allows a client; None without a budget."""
        privacy, release = self.plan.privacy, self.noise.release
        if privacy.budget is None:
            return None
        budget = Budget(privacy.budget, privacy.delta, release if self.rate < 1 else None)
        return self.most_rounds(lambda count: budget.allows({release: count - 1}, release))


def private_run(plan: RunPlan, parameters: int, online: int | None) -> PrivateRun:
    """Return the noise of a plan that `RunPlan.check` does not refuse, for a model with so many trained parameters.

    `online` is the number of devices, as for `core.secure_numbers.selected_of`. PlanError if no noise reaches the
    target, if the sum does not fit, or if delta is not below 1 / clients.
    """
    selected, _ = selected_of(plan, online)
    delta, is_distributed = plan.privacy.delta, plan.privacy.mode == "distributed"
    if online is not None and plan.privacy.mode != "example" and delta >= 1 / selected:
        raise PlanError(
            f"[privacy] delta = {delta:g} with {counted(selected, 'client')}",
            f"a release that publishes the data of one of {selected} clients would satisfy it",
            f"[privacy] delta = {1 / (10 * selected):.2g}",
        )
    if (rate := plan.privacy.sampling_rate) is not None:
        selected = max(1, round(rate * selected))
    dimensions, honest = parameters, 1
    if is_distributed:
        thresholds(plan, online)  # refuses numbers of clients that have no sum
        dimensions, honest = noised_dimensions(plan, parameters), honest_survivors(plan.secure, selected)
    try:
        noise = noise_plan(plan, dimensions, selected)
    except ValueError as error:
        what = f"target_epsilon = {plan.privacy.target_epsilon:g}" if plan.privacy.target_epsilon else "this noise"
        hint = "a larger [privacy] target_epsilon, fewer rounds, or a larger delta"
        if plan.privacy.target_epsilon is None:
            hint = "a smaller [privacy] noise_multiplier, or fewer clients a round"
        raise PlanError(f"[privacy] {what} has no noise that fits", str(error), hint) from error
    if noise.noise_multiplier > MAX_NOISE:
        raise PlanError(
            f"[privacy] target_epsilon = {plan.privacy.target_epsilon:g} needs noise_multiplier = "
            f"{rounded_up(noise.noise_multiplier)}",
            f"above {MAX_NOISE:g} nothing but noise is released",
            "a larger [privacy] target_epsilon, or fewer rounds",
        )
    return PrivateRun(plan, parameters, dimensions, selected, honest, noise, online)


def table(run: PrivateRun) -> list[dict[str, Any]]:
    """Return how noise, participations and clients trade: a row for each noise multiplier around the plan's.

    `noise_of_mean` is in multiples of clip / clients, and `noise_norm` is the norm of the noise of the whole mean in
    multiples of the clip. `clients` is how many a round needs for the same noise of the mean as the plan's. In mode
    example the mean is that of one step, over its batch, and `clients` is None. `bits` are those of a masked value,
    with the plan's clients; None without masks.
    """
    batch = run.plan.local.batch if run.plan.privacy.mode == "example" else None
    most, planned = run.noise.participations, run.noise.noise_multiplier
    rows = list[dict[str, Any]]()
    for factor in FACTORS:
        if not LEAST_NOISE <= planned * factor <= MAX_NOISE:
            continue
        try:
            other = run if factor == 1 else run.with_noise(noise_multiplier=planned * factor)
        except ValueError:  # the sum and so much noise do not fit into 32 bits
            continue
        rows.append({
            "noise_multiplier": other.noise.noise_multiplier,
            "epsilon": {str(count): _finite(other.epsilon(count)) for count in sorted({1, -(-most // 2), most})},
            "noise_of_mean": other.mean_noise,
            "noise_norm": other.mean_noise * math.sqrt(run.dimensions) / (batch or run.selected),
            "clients": None if batch else run.clients_for(planned * factor),
            "bits": other.noise.width or None,
        })  # fmt: skip
    return rows


def to_json(run: PrivateRun) -> dict[str, Any]:
    """Return all figures as JSON types; an epsilon without a bound is null."""
    privacy, noise = run.plan.privacy, run.noise
    return {
        "unit": unit_text(privacy.mode),
        "mode": privacy.mode,
        "clip": privacy.clip,
        "distribution": noise.release.distribution,
        "noise_multiplier": noise.noise_multiplier,
        "noise_found_for": privacy.target_epsilon,
        "delta": privacy.delta,
        "epsilon_of_a_round": _finite(run.epsilon(1)),
        "epsilon": _finite(run.epsilon()),
        "participations": noise.participations,
        "budget": privacy.budget,
        "rounds_in_budget": run.rounds_in_budget(),
        "clients": run.selected,
        "sampling_rate": run.plan.privacy.sampling_rate,
        "epsilon_without_sampling": _finite(run.unamplified()),
        "parameters": run.parameters,
        "steps_of_clip": noise.scale,
        "bits": noise.width or None,
        "tree": tree_text(run) if privacy.mechanism == "tree" else None,
        "honest": run.honest if privacy.mode == "distributed" else None,
        "trusted": TRUSTED[privacy.mode],
        "table": table(run),
        "for_less": for_less(run),
        "warnings": list(warnings(run)),
    }


def sentence(run: PrivateRun) -> str:
    """Return the epsilon of a private run in one sentence."""
    rounds = counted(run.noise.participations, "round")
    return (
        f"epsilon {rounded_up(run.epsilon())} at delta = {run.plan.privacy.delta:g} for "
        f"{unit_text(run.plan.privacy.mode)} after {rounds}, "
        f"{rounded_up(run.epsilon(1))} after one. {TRUSTED[run.plan.privacy.mode]}"
    )


def for_less(run: PrivateRun) -> str:
    """Return which keys to change for a smaller epsilon: that of the budget if the plan passes it, else half."""
    privacy = run.plan.privacy
    now = run.epsilon()
    wanted = privacy.budget if privacy.budget is not None and now > privacy.budget else now / 2
    if math.isinf(now) or wanted <= 0:
        return "For an epsilon with a bound: a larger [privacy] noise_multiplier."
    target, ways = float(f"{wanted:.3g}"), list[str]()
    try:
        needed = run.with_noise(target_epsilon=target).noise.noise_multiplier
    except ValueError:
        needed = math.inf
    if needed <= MAX_NOISE:
        is_target = privacy.target_epsilon is not None
        key = f"target_epsilon = {target:g}" if is_target else f"noise_multiplier = {rounded_up(needed)}"
        same = f" (with {run.clients_for(needed)} clients a round the mean has as much noise as now)"
        ways.append(f"[privacy] {key}{'' if privacy.mode == 'example' else same}")
    if count := run.most_rounds(lambda count: run.epsilon(count) <= target):
        same = f"noise_multiplier = {rounded_up(run.noise.noise_multiplier)} and " if privacy.target_epsilon else ""
        clients = math.ceil(run.plan.run.rounds * run.selected / count)
        if run.rate < 1:  # each client pays for each round
            ways.append(f"{same and '[privacy] '}{same}[run] rounds = {count}; or a smaller [privacy] sampling_rate")
        else:
            ways.append(f"[privacy] {same}max_participations = {count} (all rounds then take {clients} clients)")
    if not ways:
        return f"Neither noise nor fewer participations reach epsilon {target:g} at delta = {privacy.delta:g}."
    return f"For epsilon {target:g} in place of {rounded_up(now)}, change {'; or '.join(ways)}."


def warnings(run: PrivateRun) -> Iterator[str]:
    """Yield why the run would end before its last round, and why a client that reads the models sees less noise."""
    secure = run.plan.secure
    if run.plan.privacy.mode == "distributed" and not share_of(secure.max_corrupt, run.selected):
        yield (
            f"[secure] max_corrupt = {secure.max_corrupt:g} of {counted(run.selected, 'client')} is no client: epsilon "
            "does not hold against a client that reads the models, because it can take its own noise off "
            f"([secure] max_corrupt = {math.ceil(100 / run.selected) / 100:g})"
        )
    fits, most, rounds = run.rounds_in_budget(), run.noise.participations, run.plan.run.rounds
    if fits is not None and fits < most:
        yield (
            f"[privacy] budget = {run.plan.privacy.budget:g} allows a client {fits} of "
            f"{counted(most, 'participation')}; a run whose clients may not spend more ends with exit code 7"
        )
    spendable = min(most, most if fits is None else fits)
    apart = run.plan.privacy.min_separation
    if run.online is not None and run.online < apart * run.selected:
        yield (
            f"{counted(run.online, 'client')} are fewer than {apart * run.selected}, which rounds of {run.selected} "
            f"need with min_separation = {apart}: the run would wait for others"
        )
    if run.online is not None and run.online * spendable < rounds * run.selected:
        yield (
            f"{counted(run.online, 'client')} with {counted(spendable, 'participation')} each are enough for "
            f"{run.online * spendable // run.selected} of {counted(rounds, 'round')} of {run.selected}"
        )


def print_plan(run: PrivateRun) -> None:
    """Print what a private run costs, the table of the trade, and which keys to change."""
    for line in _lines(run):
        console.sentence(line[1], begin=f"{line[0]:<9}")
    console.line()
    rows = table(run)
    counts = list(rows[0]["epsilon"])
    heads = [f"epsilon, {counted(int(count), 'round')}" for count in counts]
    is_step = run.plan.privacy.mode == "example"
    mean, of = ("a step", "batch") if is_step else ("the mean", "clients")
    last = {} if is_step else {"clients": "clients for equal noise"}
    last |= {"bits": "bits a value"} if run.noise.width else {}
    header = ("noise multiplier", *heads, f"noise of {mean}", "norm in clips", *last.values())
    cells = [
        (
            f"{row['noise_multiplier']:.3g}",
            *(rounded_up(math.inf if row["epsilon"][count] is None else row["epsilon"][count]) for count in counts),
            f"{row['noise_of_mean']:.3g}",
            f"{row['noise_norm']:.3g}",
            *(str(row[name]) for name in last),
        )
        for row in rows
    ]
    console.table(header, cells, right=header)
    node = ", of one node" if run.plan.privacy.mechanism == "tree" else ""
    console.line(f"noise of {mean}: standard deviation of one coordinate{node}, in multiples of clip / {of}")
    console.line()
    console.sentence(for_less(run))
    for warning in warnings(run):
        console.note(f"warning: {warning}")


def _lines(run: PrivateRun) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of the figures of a plan."""
    privacy, noise = run.plan.privacy, run.noise
    found = "given" if privacy.target_epsilon is None else f"found for target_epsilon = {privacy.target_epsilon:g}"
    about = "" if run.rate == 1 else "about "
    clients, rounds = counted(run.selected, "client"), counted(run.plan.run.rounds, "round")
    yield "run", f"{rounds} of {about}{clients}, {run.parameters} parameters"
    if run.rate < 1:
        said = f"each device is in a round with probability {run.rate:g} (Poisson); without that, epsilon would be "
        yield "sampling", f"{said}{rounded_up(run.unamplified())}"
    yield "unit", unit_text(privacy.mode)
    yield "mode", privacy.mode
    per_layer = "; each of L tensors has clip / sqrt(L)" if privacy.clipping == "per-layer" else ""
    follows = " in the first round; then it follows the median of the norms" if privacy.adaptive else per_layer
    what = "the gradient of one record" if privacy.mode == "example" else "one client's update"
    yield "clip", f"{privacy.clip:g}, the largest L2 norm of {what}{follows}"
    if privacy.mode == "example":
        steps, rate = counted(noise.release.steps, "step"), noise.release.rate
        yield "sampling", f"{steps} a round, each with a record with the probability {rate:.3g}: batch / records"
    multiplier = f"{noise.noise_multiplier:.4g} ({found})"
    places = {
        "local": "in each update, in multiples of 2 clip",
        "example": "in the sum of a batch, in multiples of clip",
    }
    node = "the sum of each node" if privacy.mechanism == "tree" else "the sum"
    place = places.get(privacy.mode, f"in {node}, in multiples of clip")
    yield "noise", f"{noise.release.distribution}, noise_multiplier = {multiplier}: {place}"
    last = f"{rounded_up(run.epsilon())} after {counted(noise.participations, 'round')} of one client"
    yield "epsilon", f"{rounded_up(run.epsilon(1))} after 1 round, {last}"
    yield "delta", f"{privacy.delta:g}"
    if privacy.mechanism == "tree":
        yield "tree", tree_text(run)
    if (fits := run.rounds_in_budget()) is not None:
        of_one = f"{counted(noise.participations, 'round')} of one client"
        yield "budget", f"{privacy.budget:g}; {fits} of {of_one} fit into it"
    grid = f"{noise.scale:.0f} steps a clip"
    if privacy.mode == "distributed":
        grid += f", {noise.width} bits a value; the cost counts the noise of {run.honest} of {run.selected} clients"
    yield "grid", grid
    yield "trusted", TRUSTED[privacy.mode]
    assumes = sampling_text(privacy.mode, run.rate)
    yield "assumes", f"{assumes} Earlier runs of the population are not counted here: thinwire privacy ledger"


def tree_text(run: PrivateRun) -> str:
    """Return how tree aggregation adds noise, and how it compares with noise of each round's own, as sentences."""
    privacy, rounds, z = run.plan.privacy, run.plan.run.rounds, run.noise.noise_multiplier
    length = length_of(privacy, rounds)
    times, left = share_of_participation(run.plan), nodes_in_model(length, rounds)
    trees = f"a new tree every {length} rounds" if length < rounds else "one tree for all rounds"
    return (
        f"{trees}. A participation costs as much as {counted(times, 'node')}. After {counted(rounds, 'round')} the "
        f"model has the noise of {counted(left, 'node')}: {z * math.sqrt(left):.3g} in multiples of clip / clients. "
        f"If each round had noise of its own (leave mechanism out), it would be {z * math.sqrt(rounds / times):.3g} "
        "for the same epsilon."
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
