"""Selects the clients of a round, and gives the reason for every device that is not selected.

`wait_reason` decides whether a round can open. `select_clients` selects the clients of a round, and
`replacement_candidates` the idle devices that can still take part in an open one. `evaluators` selects those of a round
that evaluate the model, if the plan lets only a share of them do so. Every random choice follows from the run's seed,
but for `poisson_sample`: the coins of a sampled private round are secret.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

import numpy as np

from thinwire.aggregation.reductions import reduction_of
from thinwire.core.errors import PlanError
from thinwire.core.formatting import Reason, Reasons, counted
from thinwire.core.plan import RunPlan
from thinwire.core.prng import Key, SecretRng, derive, seed63
from thinwire.core.secure_numbers import fewest_devices
from thinwire.privacy.graph import check_round
from thinwire.server.policy.eligibility import unable_notes

MAX_CLIENTS_TRIED = 256  # devices, in the search for the fewest with which a run begins


@dataclass(frozen=True)
class Cohort:
    """Holds the clients selected for a round, in the order of their assignments, and a reason for every other device.

    `target_updates` are enough. `[cohort] min_updates` may be a share of the `wanted` ones. `able` counts the devices
    that could take part. Clients in `later` are selected too, and get their assignment once a concurrency slot is free.
    `sampling` says how clients were selected if their weights differed.
    """

    candidates: tuple[str, ...]
    selected: tuple[str, ...]
    target_updates: int
    wanted: int
    able: int
    reasons: Mapping[str, Reasons]
    later: tuple[str, ...] = ()
    sampling: Reasons = ()


def select_clients(
    plan: RunPlan,
    round_number: int,
    present: Sequence[str],
    unable: Mapping[str, str],
    busy: Mapping[str, int],
    weights_of: Callable[[Sequence[str]], SelectionWeights] = lambda candidates: SelectionWeights(),  # all alike
    at_work: int = 0,
) -> Cohort:
    """Select the clients of a round from the devices that are online, able and idle.

    `unable` maps a device to the reason why it cannot take part. `busy` maps a device to the round that it still works
    for. With `max_concurrency`, the free concurrency slots limit how many clients get their assignment at once, but one
    always does. The slots are `max_concurrency` less the `at_work` devices of earlier rounds. The rest of the cohort is
    in `later`.

    Invariant: the selection depends on the seed, the round, the candidates and their weights alone.
    """
    candidates, reasons = _idle(present, unable, busy)
    able = sum(device not in unable for device in present)
    target, limit = min(plan.cohort.target_updates(len(present)), len(candidates)), plan.cohort.max_concurrency
    count = plan.cohort.over_selected(target, len(candidates))
    most = max(1, limit - at_work) if limit else len(candidates)
    if count == len(candidates) <= most:
        return Cohort(candidates, candidates, target, count, able, reasons)
    weights = weights_of(candidates) if count < len(candidates) else SelectionWeights()
    sampled = sample(plan.run.seed, round_number, candidates, count, weights)
    others = set(candidates).difference(sampled)
    reasons |= {device: why for device, why in weights.why_not.items() if device in others}
    if count <= most:
        return Cohort(candidates, sampled, target, count, able, reasons, sampling=weights.reasons)
    order = in_random_order(sampled, plan.run.seed, round_number)
    selected, later = tuple(sorted(order[:most])), tuple(order[most:])
    waits = [Reason("when-free", {"most": limit})]
    if at_work >= limit:
        waits = [Reason("no-slot", {"at_work": at_work, "most": limit})]
    reasons |= dict.fromkeys(later, waits)
    return Cohort(candidates, selected, target, count, able, reasons, later, weights.reasons)


def select_for_buffer(
    plan: RunPlan,
    number: int,
    present: Sequence[str],
    unable: Mapping[str, str],
    busy: Mapping[str, int],
    at_work: int,
) -> Cohort:
    """Select the clients with which a buffered round opens: all idle devices, as far as concurrency slots are free.

    Other idle devices get an assignment once a slot is free.
    """
    candidates, reasons = _idle(present, unable, busy)
    limit = plan.cohort.max_concurrency
    count = min(len(candidates), max(0, limit - at_work)) if limit else len(candidates)
    selected = sample(plan.run.seed, number, candidates, count, SelectionWeights())
    others = set(candidates).difference(selected)
    reasons |= {device: [Reason("slots", {"most": limit})] for device in candidates if device in others}
    able = sum(device not in unable for device in present)
    return Cohort(candidates, selected, plan.cohort.buffer, min(plan.cohort.buffer, able), able, reasons)


def _idle(
    present: Sequence[str], unable: Mapping[str, str], busy: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[str, Reasons]]:
    """Return the devices that can be selected, and the reasons of the others."""
    reasons: dict[str, Reasons] = {device: [Reason("unable", {"text": why})] for device, why in unable.items()}
    reasons |= {device: [Reason("busy", {"round": number})] for device, number in busy.items() if device not in unable}
    return tuple(sorted(set(present) - set(reasons))), reasons


def wait_reason(
    plan: RunPlan,
    present: Sequence[str],
    unable: Mapping[str, str],
    begun: bool = False,
    known: Callable[[], int] = lambda: 0,
) -> str | None:
    """Return a sentence about the devices that the run waits for, or None when a round can open.

    `known` counts the devices that the aggregator knows: with too few of them, more have to join.

    Once the run has begun, `wait_for` no longer delays it: as many devices as the minimum of a round are enough. A
    round that selects fewer devices than `min_updates` requires could only end with too few replies, so it never opens.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[cohort]\\nwait_for=["a","b"]')
    >>> wait_reason(plan, ["a"], {})
    'waiting: 1 of 2 devices (missing b)'
    """
    able = [device for device in present if device not in unable]
    wait_for = plan.cohort.wait_for
    absent: list[str] = []
    if isinstance(wait_for, int):
        have, want = len(able), max(wait_for, plan.cohort.clients if isinstance(plan.cohort.clients, int) else 1)
    else:
        absent = [device for device in wait_for if device not in present]
        have, want = sum(device in able for device in wait_for), len(wait_for)
    target = min(plan.cohort.target_updates(len(present)), len(able))
    assignments = plan.cohort.over_selected(target, len(able))
    needs = updates_needed(plan, assignments)
    notes = [f"missing {', '.join(absent)}"] if absent else []
    notes += unable_notes(unable)
    least = min(want, updates_needed(plan, want)) if begun else want
    if have < least and not absent and len(present) <= (count := known()) < least:
        notes.insert(0, f"only {count} known: more have to join" if count else "none has joined yet")
    noted = f" ({'; '.join(notes)})" if notes else ""
    if have < least:
        return f"waiting: {have} of {counted(want, 'device')}{noted}"
    if assignments < needs:
        there = counted(len(able), "device")
        own = needs == min_updates_of(plan.cohort.min_updates, assignments)
        rule = f"[cohort] min_updates = {needs}" if own else f'[server] reduce = "{plan.server.reduce}" needs {needs}'
        lacks = f"of {there} a round selects {assignments}, and {rule}: more devices have to connect, or to be free"
        return f"waiting: {lacks}{noted}"
    if plan.secure.enabled:
        try:
            check_round(plan, assignments, target)
        except PlanError as error:
            needed = fewest_devices(plan)
            devices = f"{len(able)} of {needed}" if needed > len(able) else "more"
            return f"waiting: {devices} devices ({'; '.join([f'{error.what}: {error.why}', *notes])})"
    return None


def fewest_to_begin(plan: RunPlan) -> int:
    """Return with how many able devices a run begins; 0 if it waits for names, or if MAX_CLIENTS_TRIED are too few.

    >>> fewest_to_begin(RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[secure]\\nenabled=true'))
    3
    """
    wait_for, least = plan.cohort.wait_for, fewest_devices(plan) if plan.secure.enabled else 1
    counts = range(max(wait_for, least), MAX_CLIENTS_TRIED + 1) if isinstance(wait_for, int) and least else range(0)
    return next((count for count in counts if wait_reason(plan, list(map(str, range(count))), {}) is None), 0)


def device_shortage(plan: RunPlan, present: Sequence[str], unable: Mapping[str, str], leased: Collection[str]) -> str:
    """Return what a round lacks while other runs have the devices `leased`, as a phrase; "" if it lacks nothing.

    A round needs as many free devices as it would need updates if all able devices were free.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1')
    >>> device_shortage(plan, ["a", "b", "c"], {}, ["a", "b"])
    'a round needs 2 free devices'
    """
    able = [device for device in present if device not in unable]
    target, free = min(plan.cohort.target_updates(len(present)), len(able)), len(able) - len(leased)
    needs = updates_needed(plan, plan.cohort.over_selected(target, len(able)))
    needs = target if plan.privacy.mode == "distributed" else needs  # its noise follows from the number of clients
    if free < needs:
        return f"a round needs {counted(needs, 'free device')}"
    if plan.secure.enabled:
        try:
            check_round(plan, plan.cohort.over_selected(min(target, free), free), min(target, free))
        except PlanError as error:
            return str(error)
    return ""


def stop_hint(run_id: str) -> str:
    """Return what the user can do about a run whose plan lets it wait for ever."""
    return (
        f"start more clients, or end it: thinwire runs stop {run_id} "
        "(its plan sets no end to this: [cohort] wait_s, in seconds)"
    )


LEAST = 1 / 8  # of the fastest device's weight
TINY_S = 1e-9  # shortest time assumed, since weights divide by it


@dataclass(frozen=True)
class SelectionWeights:
    """Holds the selection weight of each candidate, 1 for the fastest, and the reasons for the weights.

    An empty `each` means equal weights. `why_not` holds for each candidate the reason if it is not selected.
    """

    each: Mapping[str, float] = field(default_factory=dict)
    reasons: Reasons = ()
    why_not: Mapping[str, Reasons] = field(default_factory=dict)


def weights(selection: str, seconds: Mapping[str, float | None], of: str) -> SelectionWeights:
    """Return selection weights inverse to each device's seconds of one thing, `of` ("step", "exchange").

    The fastest device has weight 1. No weight is below LEAST, an eighth, so no device is left out for ever. A device
    that is not measured yet has weight 1, so that it is measured soon. A device that is selected more often changes the
    model more often, so the model leans towards the data of fast devices.

    >>> found = weights("link", {"a": 2.0, "b": 4.0, "c": 90.0, "d": None}, "exchange")
    >>> found.each
    {'a': 1.0, 'b': 0.5, 'c': 0.125, 'd': 1.0}
    >>> found.why_not["b"]
    [Reason(code='sampled-out', numbers={'weight': 0.5, 'seconds': 4.0, 'of': 'exchange'})]
    """
    known = [max(taken, TINY_S) for taken in seconds.values() if taken is not None]
    if not known:
        return SelectionWeights(reasons=[Reason("sampled-alike", {"by": selection})])
    fastest = min(known)
    each = {d: 1.0 if s is None else max(LEAST, fastest / max(s, TINY_S)) for d, s in seconds.items()}
    least = min(each.values())
    slowest = max(known)
    reasons = [
        Reason("sampled", {"by": selection, "fastest_s": fastest, "slowest_s": slowest, "of": of, "least": least})
    ]
    if unknown := len(seconds) - len(known):
        reasons.append(Reason("as-fastest", {"count": unknown}))
    return SelectionWeights(each, reasons, {d: [_why_not(each[d], s, of)] for d, s in seconds.items()})


def _why_not(weight: float, seconds: float | None, of: str) -> Reason:
    if seconds is None:
        return Reason("sampled-out-unmeasured", {})
    return Reason("sampled-out", {"weight": weight, "seconds": seconds, "of": of})


def sample(seed: int, number: int, candidates: Sequence[str], count: int, found: SelectionWeights) -> tuple[str, ...]:
    """Select `count` of the candidates, and return them sorted by name.

    With weights, each candidate gets a random waiting time at the rate of its weight, and the shortest ones are
    selected (Efraimidis and Spirakis 2006).

    Invariant: the selection depends on the seed, the round, the candidates and their weights alone.
    """
    key = derive(Key(seed), "cohort", number)
    if not found.each:
        return tuple(sorted(random.Random(seed63(key)).sample(candidates, count)))

    def waits(device: str) -> float:
        uniform = (seed63(derive(key, device)) + 1) / 2**63
        return -math.log(uniform) / found.each[device]

    return tuple(sorted(sorted(candidates, key=waits)[:count]))


COIN_BITS = 64


def poisson_sample(population: Sequence[str], rate: float, rng: SecretRng) -> tuple[str, ...]:
    """Return a Poisson sample: each device is in it by a coin of its own, in the order of the population.

    The probability is `rate` to 2^-64, and never above it. The result may be empty. Invariant: nothing but the secret
    coins decides, so neither presence nor speed nor an earlier sample changes it.
    """
    words = np.frombuffer(rng.random_bytes(len(population) * COIN_BITS // 8), np.uint64)
    below = np.uint64(min(math.floor(rate * 2**COIN_BITS), 2**COIN_BITS - 1))  # at 1 the last word is left out
    return tuple(device for device, word in zip(population, words, strict=True) if word < below)


def min_updates_of(min_updates: float, selected: int) -> int:
    """Return the fewest replies that make a step: a share of the selected clients (rounded up), or from 1 on a number.

    >>> min_updates_of(0.5, 7), min_updates_of(1.0, 7), min_updates_of(3, 7)
    (4, 1, 3)
    """
    return max(1, math.ceil(min_updates * selected - 1e-9) if min_updates < 1 else int(min_updates))


def updates_needed(plan: RunPlan, selected: int) -> int:
    """Return the fewest updates that make a step in a round of so many clients; a reduction may need more.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[server]\\nreduce="krum(1)"')
    >>> updates_needed(plan, 4), updates_needed(plan, 20)
    (5, 10)
    """
    fewest = min_updates_of(plan.cohort.min_updates, selected)
    return fewest if plan.server.reduce == "mean" else max(fewest, reduction_of(plan.server.reduce).fewest)


UNKNOWN = 0.5  # share of the round's deadline expected of a device while nothing is measured


def replacement_candidates(
    idle: Iterable[str], left_s: float, took: Mapping[str, Sequence[float]], deadline_s: float, seed: int, number: int
) -> list[str]:
    """Return the idle devices that should reply within `left_s` seconds, in the order of the run's seed.

    `took` maps a device to the seconds that its last replies took.

    >>> replacement_candidates(["a", "b", "c"], 9.0, {"a": [5.0, 8.0], "b": [10.0]}, 60.0, seed=1, number=4)
    ['c', 'a']
    """
    return in_random_order(in_time(idle, left_s, took, deadline_s), seed, number)


def in_time(
    devices: Iterable[str], left_s: float, took: Mapping[str, Sequence[float]], deadline_s: float
) -> Iterator[str]:
    """Yield the devices that should reply within `left_s` seconds; examine only as many as the caller consumes."""
    others_s = cache(lambda: expected_s("", took, deadline_s))
    for device in devices:
        seconds = expected_s(device, took, deadline_s) if took.get(device) else others_s()
        if seconds <= left_s:
            yield device


def in_random_order(devices: Iterable[str], seed: int, number: int) -> list[str]:
    """Return the devices in the random order of the seed and the round.

    Invariant: a device's position depends on the seed, the round and the device alone, so other devices do not change
    it.
    """
    return sorted(devices, key=lambda device: derive(Key(seed), "spare", number, device).to_bytes())


def expected_s(device: str, took: Mapping[str, Sequence[float]], deadline_s: float) -> float:
    """Return how many seconds a device is expected to take.

    This is its slowest recent reply, else the median of the other devices' slowest ones, else a share of the deadline.

    >>> expected_s("a", {"a": [5.0, 8.0]}, 60.0), expected_s("a", {"b": [4.0], "c": [6.0]}, 60.0)
    (8.0, 5.0)
    >>> expected_s("a", {}, 60.0)
    30.0
    """
    if took.get(device):
        return max(took[device])
    others = [max(seconds) for seconds in took.values() if seconds]
    return median(others) if others else UNKNOWN * deadline_s


def evaluators_of(plan: RunPlan, clients: int) -> int:
    """Return how many of so many clients the plan lets evaluate.

    >>> plan = RunPlan.from_json({"run": {"task": "t", "fraction_evaluate": 0.1}, "local": {"lr": 1}})
    >>> evaluators_of(plan, 30), evaluators_of(plan, 31), evaluators_of(plan, 0)
    (3, 4, 0)
    """
    return math.ceil(round(plan.run.fraction_evaluate * clients, 9))  # 0.1 * 30 is 3.0000000000000004 in floats


def evaluators(plan: RunPlan, number: int, selected: Collection[str]) -> frozenset[str]:
    """Return the clients that evaluate, of those that round `number` selects when it opens.

    Invariant: they depend on the seed, the round and the selected clients alone.
    """
    if plan.run.fraction_evaluate == 1:
        return frozenset(selected)
    order = sorted(selected, key=lambda device: _evaluation_number(plan, number, device))
    return frozenset(order[: evaluators_of(plan, len(order))])


def evaluates(plan: RunPlan, number: int, device: str) -> bool:
    """Return True if a client evaluates that round `number` selects after its opening."""
    return plan.run.fraction_evaluate == 1 or _evaluation_number(plan, number, device) < plan.run.fraction_evaluate


def _evaluation_number(plan: RunPlan, number: int, device: str) -> float:
    """Return a number in [0, 1) of the seed, the round and the device."""
    return seed63(derive(Key(plan.run.seed), "evaluate", number, device)) / 2**63
