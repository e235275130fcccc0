"""Selects the clients of a round, and gives the reason for every device that is not selected.

`mismatch` decides which devices can take part, and `missing` whether a round can open. `choose` selects the clients of
a round, and `who_could_answer` the idle devices that can still take part in an open one. `notes` warns of a plan that
does not fit the devices. Every random choice follows from the run's seed.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.formatting import counted, plain
from thinwire.core.layout import Layout, differences
from thinwire.core.plan import RunPlan
from thinwire.core.prng import Key, derive, seed63

MAX_REASON = 500  # letters from a device's own report: every round's journal repeats the reason

SHOWN = 5  # unable devices that a waiting sentence names


@dataclass(frozen=True)
class Cohort:
    """Holds the clients selected for a round, in the order of their assignments, and a reason for every other device.

    `target` replies are enough. `[cohort] min_replies` may be a share of the `wanted` ones. `able` counts the devices
    that could take part. Clients in `later` are selected too, and get their assignment once a concurrency slot is free.
    `drawn` says how clients were selected if their weights differed.
    """

    candidates: tuple[str, ...]
    asked: tuple[str, ...]
    target: int
    wanted: int
    able: int
    reasons: Mapping[str, str]
    later: tuple[str, ...] = ()
    drawn: str = ""


def mismatch(plan: RunPlan, wanted: TaskReport, hello: Hello, layout: Layout | None = None) -> str:
    """Return why a device cannot take part in this run, as a phrase about the device; "" if it can.

    `[run] task_match` says what has to agree. If the run's `layout` is given and the device has reported its own, the
    phrase names the tensors that differ.
    """
    name = plan.run.task
    own = {task.name: task for task in hello.tasks}.get(name)
    if own is None:
        return f"has no task {name!r} (type on it: thinwire client start --task {name}=MODULE)"
    if own.error:
        return f"has a task {name!r} that does not load: {own.error} (type on it: thinwire task check MODULE)"
    if own.layout_digest and own.layout_digest != wanted.layout_digest:
        differs = differing(own, layout) if layout is not None else ""
        hint = "install the run's task on it, then: thinwire client reload"
        return f"has another model in its task {name!r}{f': {differs}' if differs else ''} ({hint})"
    if plan.run.task_match == "version" and own.version != wanted.version:
        return f"has version {own.version or 'none'} of the task {name!r}, the run has {wanted.version or 'none'}"
    if plan.run.task_match == "digest" and own.source_digest != wanted.source_digest:
        return f"has another source of the task {name!r} than the run"
    return ""


@functools.lru_cache(maxsize=256)
def differing(own: TaskReport, layout: Layout) -> str:
    """Return the tensors by which a device's model differs from the run's; "" if the device has not reported them."""
    try:
        told = Layout.from_json(json.loads(own.tensors)) if own.tensors else None
        return (
            plain(differences(told, layout))[:MAX_REASON]
            if told is not None and told.digest == own.layout_digest
            else ""
        )
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return ""  # the report of a device may hold anything


def wanted_count(plan: RunPlan, there: int) -> int:
    """Return from how many of `there` devices a round wants replies."""
    clients = plan.cohort.clients
    if clients == "all":
        return there
    if isinstance(clients, float):
        return max(1, math.ceil(clients * there - 1e-9))
    return min(clients, there)


def with_excess(plan: RunPlan, wanted: int, there: int) -> int:
    """Return how many of `there` devices a round selects to get `wanted` replies, with over-selection."""
    excess = 0.0 if plan.cohort.clients == "all" else plan.cohort.over_select
    return min(there, math.ceil(wanted * (1 + excess)))


def alike(_candidates: Sequence[str]) -> SelectionWeights:
    """Return equal selection weights for all candidates."""
    return SelectionWeights()


def choose(
    plan: RunPlan,
    round_number: int,
    present: Sequence[str],
    unable: Mapping[str, str],
    busy: Mapping[str, int],
    odds_of: Callable[[Sequence[str]], SelectionWeights] = alike,
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
    target, limit = min(wanted_count(plan, len(present)), len(candidates)), plan.cohort.max_concurrency
    count = with_excess(plan, target, len(candidates))
    most = max(1, limit - at_work) if limit else len(candidates)
    if count == len(candidates) <= most:
        return Cohort(candidates, candidates, target, count, able, reasons)
    odds = odds_of(candidates) if count < len(candidates) else SelectionWeights()
    drawn = draw(plan.run.seed, round_number, candidates, count, odds)
    reasons |= {d: odds.why_not.get(d, "not drawn") for d in candidates if d not in drawn}
    if count <= most:
        return Cohort(candidates, drawn, target, count, able, reasons, drawn=odds.reason)
    order = in_drawn_order(drawn, plan.run.seed, round_number)
    asked, later = tuple(sorted(order[:most])), tuple(order[most:])
    full = f"no place is free: {at_work} at work on earlier rounds, and" if at_work >= limit else ""
    why = f"{full or 'asked when a place is free:'} at most {limit} devices may be at work at once"
    reasons |= dict.fromkeys(later, why)
    return Cohort(candidates, asked, target, count, able, reasons, later, odds.reason)


def choose_for_buffer(
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
    asked = draw(plan.run.seed, number, candidates, count, SelectionWeights())
    reasons |= {device: f"{limit} devices may be at work at once" for device in candidates if device not in asked}
    able = sum(device not in unable for device in present)
    return Cohort(candidates, asked, plan.cohort.buffer, min(plan.cohort.buffer, able), able, reasons)


def _idle(
    present: Sequence[str], unable: Mapping[str, str], busy: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the devices that can be selected, and the reasons of the others."""
    reasons = dict(unable)
    reasons |= {device: f"busy with round {number}" for device, number in busy.items() if device not in reasons}
    return tuple(sorted(set(present) - set(reasons))), reasons


def missing(plan: RunPlan, present: Sequence[str], unable: Mapping[str, str], begun: bool = False) -> str | None:
    """Return a sentence about the devices that the run waits for, or None when a round can open.

    Once the run has begun, `wait_for` no longer delays it: as many devices as the minimum of a round are enough. A
    round that selects fewer devices than `min_replies` requires could only end with too few replies, so it never opens.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[cohort]\\nwait_for=["a","b"]')
    >>> missing(plan, ["a"], {})
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
    asks = with_excess(plan, min(wanted_count(plan, len(present)), len(able)), len(able))
    needs = floor_of(plan.cohort.min_replies, asks)
    notes = [f"missing {', '.join(absent)}"] if absent else []
    notes += [f"{device} {unable[device]}" for device in sorted(unable)[:SHOWN]]
    notes += [f"and {len(unable) - SHOWN} more"] if len(unable) > SHOWN else []
    noted = f" ({'; '.join(notes)})" if notes else ""
    if have < (min(want, floor_of(plan.cohort.min_replies, want)) if begun else want):
        return f"waiting: {have} of {want} devices{noted}"
    if asks < needs:
        there = counted(len(able), "device")
        lacks = f"of {there} a round asks {asks}, and [cohort] min_replies = {needs}: more have to come or to be free"
        return f"waiting: {lacks}{noted}"
    return None


def way_out(run_id: str) -> str:
    """Return what the user can do about a run whose plan lets it wait for ever."""
    return (
        f"start more clients, or end it: thinwire runs stop {run_id} "
        "(its plan sets no end to this: [cohort] wait_s, in seconds)"
    )


LEAST = 1 / 8  # of the fastest device's weight
TINY_S = 1e-9  # shortest time assumed, since weights divide by it


@dataclass(frozen=True)
class SelectionWeights:
    """Holds the selection weight of each candidate, 1 for the fastest, and the reason for the weights.

    An empty `each` means equal weights. `why_not` holds for each candidate the sentence that is shown if the candidate
    is not selected.
    """

    each: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    why_not: Mapping[str, str] = field(default_factory=dict)


def odds(selection: str, seconds: Mapping[str, float | None], of: str) -> SelectionWeights:
    """Return selection weights inverse to each device's seconds `of` something (a step, an exchange).

    The fastest device has weight 1. No weight is below LEAST, an eighth, so no device is left out for ever. A device
    that is not measured yet has weight 1, so that it is measured soon. A device that is selected more often changes the
    model more often, so the model leans towards the data of fast devices.

    >>> found = odds("link", {"a": 2.0, "b": 4.0, "c": 90.0, "d": None}, "an exchange")
    >>> found.reason
    'drawn by link: 2.00 s to 90.00 s an exchange, odds from 1 to 0.12; 1 not measured yet counts as the quickest'
    >>> found.why_not["b"]
    "not drawn: its odds are 0.50 of the quickest's, with 4.00 s an exchange"
    """
    known = [max(taken, TINY_S) for taken in seconds.values() if taken is not None]
    if not known:
        return SelectionWeights(reason=f"drawn by {selection}: nobody is measured yet, so all have the same odds")
    quickest = min(known)
    each = {d: 1.0 if s is None else max(LEAST, quickest / max(s, TINY_S)) for d, s in seconds.items()}
    said = f"drawn by {selection}: {quickest:.2f} s to {max(known):.2f} s {of}, odds from 1 to {min(each.values()):.2f}"
    if unknown := len(seconds) - len(known):
        said += f"; {unknown} not measured yet count{'s' if unknown == 1 else ''} as the quickest"
    return SelectionWeights(each, said, {d: _why_not(each[d], s, of) for d, s in seconds.items()})


def _why_not(odds: float, seconds: float | None, of: str) -> str:
    if seconds is None:
        return "not drawn: it is not measured yet, and has the odds of the quickest"
    return f"not drawn: its odds are {odds:.2f} of the quickest's, with {seconds:.2f} s {of}"


def draw(seed: int, number: int, candidates: Sequence[str], count: int, found: SelectionWeights) -> tuple[str, ...]:
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


def floor_of(min_replies: float, asked: int) -> int:
    """Return the fewest replies that make a step: a share of the selected clients (rounded up), or from 1 on a number.

    >>> floor_of(0.5, 7), floor_of(1.0, 7), floor_of(3, 7)
    (4, 1, 3)
    """
    return max(1, math.ceil(min_replies * asked - 1e-9) if min_replies < 1 else int(min_replies))


def notes(plan: RunPlan, able: int) -> list[str]:
    """Return warnings for the user who starts a run while `able` devices can take part.

    They describe what the plan does with these devices where the user may not expect it. Such a plan is never refused.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[cohort]\\nmode="buffered"\\nbuffer=4')
    >>> notes(plan, 3)
    ['[cohort] buffer = 4 is more than the 3 devices that are there: each buffer closes with what all of them sent']
    >>> notes(plan, 9)
    []
    """
    cohort = plan.cohort
    if cohort.mode != "buffered":
        return []
    at_work = min(able, cohort.max_concurrency or able)
    behind = at_work // cohort.buffer  # buffers that fill while one device works, if all are equally fast
    if able < cohort.buffer:
        there = "device that is" if able == 1 else f"{able} devices that are"
        said = f"is more than the {there} there: each buffer closes with what all of them sent"
        return [f"[cohort] buffer = {cohort.buffer} {said}"]
    if behind > cohort.max_staleness:
        said = f"with {at_work} devices at work and [cohort] buffer = {cohort.buffer} most answers are about {behind} "
        said += f"versions behind, and [cohort] max_staleness = {cohort.max_staleness} drops them: a larger buffer, or "
        return [said + f"max_concurrency = {cohort.buffer * cohort.max_staleness}"]
    if cohort.buffer < at_work == able <= 2 * cohort.buffer:
        said = f"all {able} devices are at work at once and [cohort] buffer = {cohort.buffer}: quick ones train again "
        said += "from a version that they have just trained from, which costs accuracy where data differ; with "
        return [said + f"max_concurrency = {cohort.buffer} they take turns"]
    return []


UNKNOWN = 0.5  # share of the round's deadline expected of a device while nothing is measured


def who_could_answer(
    idle: Iterable[str], left_s: float, took: Mapping[str, Sequence[float]], deadline_s: float, seed: int, number: int
) -> list[str]:
    """Return the idle devices that should reply within `left_s` seconds, in the order of the run's seed.

    `took` maps a device to the seconds that its last replies took.

    >>> who_could_answer(["a", "b", "c"], 9.0, {"a": [5.0, 8.0], "b": [10.0]}, 60.0, seed=1, number=4)
    ['c', 'a']
    """
    return in_drawn_order(in_time(idle, left_s, took, deadline_s), seed, number)


def in_time(
    devices: Iterable[str], left_s: float, took: Mapping[str, Sequence[float]], deadline_s: float
) -> Iterator[str]:
    """Yield the devices that should reply within `left_s` seconds; examine only as many as the caller consumes."""
    others_s = cache(lambda: expected_s("", took, deadline_s))
    for device in devices:
        seconds = expected_s(device, took, deadline_s) if took.get(device) else others_s()
        if seconds <= left_s:
            yield device


def in_drawn_order(devices: Iterable[str], seed: int, number: int) -> list[str]:
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
