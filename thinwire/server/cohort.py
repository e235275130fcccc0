"""Who is asked: which devices could be, why others could not, and which of them the seed picks."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.layout import Layout, differences
from thinwire.core.plan import RunPlan
from thinwire.core.texts import counted, plain
from thinwire.server.choices.selection import Odds, draw, floor_of
from thinwire.server.choices.spares import in_drawn_order

MAX_REASON = 500  # letters of what a device's own words make: a reason stands in the journal of every round

SHOWN = 5  # devices that a waiting sentence says something of


@dataclass(frozen=True)
class Cohort:
    """Those who are asked, in the order of asking, and of all others the reason.

    `target` answers are enough; `[cohort] min_replies` may be a share of those `wanted`. `able` could take part.
    `later` were drawn too, and are asked as places become free; `drawn` says how, where not all odds were alike.
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
    """Why a device cannot take part in this run, as what is said of it, or "" when it can (task_match).

    `layout` is the run's: tensors that differ are named where the device has told its own.
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
    """Name the tensors by which a device's model differs from the run's; "" where it has not told them."""
    try:
        told = Layout.from_json(json.loads(own.tensors)) if own.tensors else None
        return (
            plain(differences(told, layout))[:MAX_REASON]
            if told is not None and told.digest == own.layout_digest
            else ""
        )
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return ""  # a stranger's words


def wanted_count(plan: RunPlan, there: int) -> int:
    """How many of `there` devices a round wants."""
    clients = plan.cohort.clients
    if clients == "all":
        return there
    if isinstance(clients, float):
        return max(1, math.ceil(clients * there - 1e-9))
    return min(clients, there)


def with_excess(plan: RunPlan, wanted: int, there: int) -> int:
    """How many of `there` devices a round asks that wants so many."""
    excess = 0.0 if plan.cohort.clients == "all" else plan.cohort.over_select
    return min(there, math.ceil(wanted * (1 + excess)))


def alike(_candidates: Sequence[str]) -> Odds:
    """Every candidate has the same odds."""
    return Odds()


def choose(
    plan: RunPlan,
    round_number: int,
    present: Sequence[str],
    unable: Mapping[str, str],
    busy: Mapping[str, int],
    odds_of: Callable[[Sequence[str]], Odds] = alike,
    at_work: int = 0,
) -> Cohort:
    """Draw a round's cohort, by the run's seed, from those who are there, able and idle.

    `busy` maps a device to the round it is still answering. The draw depends on (seed, round, candidates, odds) only.
    With `max_concurrency` so many, less those `at_work` on earlier rounds, are asked at once, but always one, and the
    others of the cohort `later`.
    """
    candidates, reasons = _idle(present, unable, busy)
    able = sum(device not in unable for device in present)
    target, limit = min(wanted_count(plan, len(present)), len(candidates)), plan.cohort.max_concurrency
    count = with_excess(plan, target, len(candidates))
    most = max(1, limit - at_work) if limit else len(candidates)
    if count == len(candidates) <= most:
        return Cohort(candidates, candidates, target, count, able, reasons)
    odds = odds_of(candidates) if count < len(candidates) else Odds()
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
    """All who are idle are asked when a buffer opens, as long as fewer than `max_concurrency` are at work; the others
    when a place is free.
    """
    candidates, reasons = _idle(present, unable, busy)
    limit = plan.cohort.max_concurrency
    count = min(len(candidates), max(0, limit - at_work)) if limit else len(candidates)
    asked = draw(plan.run.seed, number, candidates, count, Odds())
    reasons |= {device: f"{limit} devices may be at work at once" for device in candidates if device not in asked}
    able = sum(device not in unable for device in present)
    return Cohort(candidates, asked, plan.cohort.buffer, min(plan.cohort.buffer, able), able, reasons)


def _idle(
    present: Sequence[str], unable: Mapping[str, str], busy: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """(who could be asked, why the others could not)."""
    reasons = dict(unable)
    reasons |= {device: f"busy with round {number}" for device, number in busy.items() if device not in reasons}
    return tuple(sorted(set(present) - set(reasons))), reasons


def missing(plan: RunPlan, present: Sequence[str], unable: Mapping[str, str], begun: bool = False) -> str | None:
    """One sentence on who is waited for, or None when a round can open.

    Once the run has begun, `wait_for` no longer holds it up: as many as a round's floor asks for are enough. A round
    that asks fewer devices than `min_replies` needs answers of could only end with too few, and is never opened.

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
    """What a person can do about a run whose plan lets it wait for ever."""
    return (
        f"start more clients, or end it: thinwire runs stop {run_id} "
        "(its plan sets no end to this: [cohort] wait_s, in seconds)"
    )
