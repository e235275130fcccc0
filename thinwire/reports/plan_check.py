"""Check a plan as a person types it, and estimate what its run would cost, without a task's code.

Check: every problem at its key, the plan without its defaults, and as TOML. The checks are those of `thinwire plan
check`: values, keys that contradict each other, the numbers of a secure round. A plan from the API may in addition name
no code and no file that `aggregator.toml` does not allow. Such names are found first, and nothing is imported for them.

Estimate: bytes of a client and round, and seconds by the measured links of its devices. Bytes follow from the plan and
the layout of the task's model; those of a codec are the estimate for normally distributed values. Seconds follow from
what earlier rounds measured on each device. What was never measured is not guessed: it is None, and `missing` says why.

Nothing is written, and nothing is kept.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from thinwire.compression.catalog import frame_bytes
from thinwire.core.errors import CodecError, PlanError, ThinwireError
from thinwire.core.formatting import counted
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_errors import Problem, wrong_values
from thinwire.core.plan_names import installed, origin_problems, refused_names
from thinwire.core.plan_text import plan_keys, require_small, sparse, toml_text
from thinwire.core.secure_numbers import selected_of
from thinwire.store.device_profiles import DeviceProfile, DeviceProfiles, Workload, work_key, workload
from thinwire.store.read_models import DeviceInfo, MeasureRow
from thinwire.store.task_layouts import KnownTask

MAX_DOTS = 200  # in a key: the time in which Python reads one rises with their square
MAX_TEXT = 48 * 1024  # characters of a plan; the longest of our examples has 700
_KEY = re.compile(r"\[(\w+)(?:\.\w+)?\] (\w+)")


@dataclass(frozen=True)
class PlanCheck:
    """Holds what was found of a plan; `plan` is None if a value is not valid, `given` are the keys not at a default."""

    plan: RunPlan | None
    given: Mapping[str, Mapping[str, Any]]
    toml: str
    problems: Sequence[Problem]

    @property
    def ok(self) -> bool:
        """Return True if the plan can run."""
        return not self.problems


def check_text(text: str, allow: Sequence[str]) -> PlanCheck:
    """Check a plan in TOML; its text stays as it is."""
    if len(text) > MAX_TEXT:
        why = f"at most {MAX_TEXT} characters are read"
        return PlanCheck(None, {}, text, [Problem((), f"the plan has {len(text)} characters", why, "a shorter one")])
    if any(part.count(".") > MAX_DOTS for part in re.split("[=\n]", text)):
        why = f"at most {MAX_DOTS} are read in a key or a value"
        return PlanCheck(None, {}, text, [Problem((), "a line of the plan has too many dots", why, "a shorter one")])
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problem = Problem((), "the plan is not TOML", str(error), 'a line reads: key = "value"')
        return PlanCheck(None, {}, text, [problem])
    return check_values(raw, allow, text=text)


def check_values(
    raw: Mapping[str, Any], allow: Sequence[str], layout: Layout | None = None, text: str | None = None
) -> PlanCheck:
    """Check a plan given as values; `layout` is that of its task's model, if it is known."""
    try:
        require_small(raw, "the plan")
    except PlanError as error:  # nothing of it is written again: that would take as long
        return PlanCheck(None, {}, text or "", [Problem((), error.what, error.why, error.hint)])
    written = toml_text(_tables(raw)) if text is None else text
    try:
        plan = RunPlan.from_json(raw)
    except PlanError as error:
        wrong = error.__cause__
        single = [Problem((), error.what, error.why, error.hint)]
        found = wrong_values(RunPlan, wrong) if isinstance(wrong, ValidationError) else single
        return PlanCheck(None, _tables(raw), written, found)
    given = sparse(plan.to_json())
    problems = problems_of(plan, allow, layout)
    return PlanCheck(plan, given, toml_text(given) if text is None else text, problems)


def problems_of(plan: RunPlan, allow: Sequence[str], layout: Layout | None = None) -> list[Problem]:
    """Return everything that keeps a plan of the API from running; none if it can run."""
    from thinwire.aggregation import codecs
    from thinwire.aggregation.plan_codecs import require_rules
    from thinwire.reports.secure_rounds import thresholds

    if refused := refused_names(plan, codecs.own_names(), allow, installed()):
        return refused  # before the check, which would import what is named
    found = [Problem(_place(one.what, one.hint), one.what, one.why, one.hint) for one in plan.check(codecs)]
    if found or (found := origin_problems(plan)):
        return found
    try:
        if plan.secure.enabled and isinstance(plan.cohort.clients, int):
            thresholds(plan, None)
        if layout is not None:
            require_rules(plan, layout)
    except PlanError as error:
        place = ("uplink", "layers") if isinstance(error, CodecError) else _place(error.what, error.hint)
        return [Problem(place, error.what, error.why, error.hint)]
    return []


_SCHEMA = {(section, name) for section, name, _ in plan_keys()}


def _place(*texts: str) -> tuple[str, ...]:
    """Return the first key of a plan that one of the texts names; () if none does.

    >>> _place("dgc in a ladder", "[uplink] codec = the topk chain")
    ('uplink', 'codec')
    """
    for text in texts:
        for section, key in _KEY.findall(text):
            if (section, key) in _SCHEMA:
                return section, key
        if found := re.search(r"\[(\w+)\.(\w+)\]", text):
            return found[1], found[2]
    return ()


def _tables(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables among values that are no valid plan."""
    return {str(name): dict(table) for name, table in raw.items() if isinstance(table, Mapping)}


FEW_S = 0.001  # seconds: a device that is faster in all is not waited for

KEPT = ("parameters", "clients", "rounds", "up_bytes", "up_least", "down_bytes", "dense_bytes", "round_s", "run_s")


@dataclass(frozen=True)
class DeviceSeconds:
    """Holds a device's usual seconds in a round, None if never measured; 9 of 10 rounds take less than `slow_s`."""

    device: str
    online: bool
    down_s: float | None
    train_s: float | None
    up_s: float | None
    round_s: float | None
    slow_s: float | None
    missing: str


@dataclass(frozen=True)
class Estimate:
    """Holds the estimated cost of a run. Bytes are those of one client in one round; None where something is not known.

    `up_least` is less than `up_bytes` if a codec ladder gives slow links a more compressed codec. `round_s` is the time
    of the slowest device that was measured, `run_s` that of all rounds. `clients` is 0 if it follows from the devices
    that have the task, and there are none.
    """

    task: str
    parameters: int | None
    layout_from: str
    clients: int
    rounds: int
    up_bytes: int | None
    up_least: int | None
    down_bytes: int | None
    dense_bytes: int | None
    round_s: float | None
    run_s: float | None
    slowest: str
    measured: int
    unknown: str
    devices: tuple[DeviceSeconds, ...]

    def summary(self) -> dict[str, Any]:
        """Return the figures that are kept with a run: no names of devices are among them."""
        return {name: getattr(self, name) for name in KEPT}


def estimate(
    plan: RunPlan, known: KnownTask | None, hosts: Sequence[DeviceInfo], measures: Sequence[MeasureRow]
) -> Estimate:
    """Return what a run would cost; `hosts` are the approved devices that have its task, `known` is its layout."""
    online = [info.row.name for info in hosts if info.online]
    selected, _ = selected_of(plan, len(online) or len(hosts) or None)
    clients = selected if hosts or isinstance(plan.cohort.clients, int) else 0
    if known is None:
        why = f"no device has reported the task {plan.run.task}, and no run had it: its model's layout is not known"
        return _unknown(plan, clients, why)
    try:
        up, least, down = client_bytes(plan, known.layout, selected)
    except ThinwireError as error:
        return _unknown(plan, clients, f"{error.what}: {error.why}")
    profiles, work = DeviceProfiles(measures), workload(plan, 1, down, up)
    key = work_key(plan, known.layout)
    rows = tuple(_seconds(profiles.device(i.row.name, key), i, work, plan) for i in hosts)
    there = [row for row in rows if row.online or not online]
    timed = [row for row in there if row.round_s is not None]
    slowest = max(timed, key=lambda row: row.round_s or 0.0, default=None)
    round_s = _round_s(plan, timed)
    unmeasured = [row.device for row in there if row.round_s is None]
    return Estimate(
        plan.run.task, known.layout.size, _source(known), clients, plan.run.rounds, up, least, down,
        known.layout.size * FLOAT_BYTES, round_s, None if round_s is None else round_s * plan.run.rounds,
        slowest.device if slowest else "", len(timed), _why(plan, there, unmeasured), rows,
    )  # fmt: skip


def client_bytes(plan: RunPlan, layout: Layout, clients: int) -> tuple[int, int, int]:
    """Return the payload bytes of one client in one round: up, up at the most compressed rung, and down."""
    from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
    from thinwire.aggregation.mean import buffer_layout
    from thinwire.aggregation.plan_codecs import rungs
    from thinwire.reports.secure_rounds import round_cost

    travels = transmitted_layout(algorithm_of(plan), layout)
    buffers = FLOAT_BYTES * buffer_layout(layout).size if plan.local.buffers == "average" else 0
    down = travels.size * FLOAT_BYTES
    if plan.downlink.compressed:
        down = frame_bytes(plan.downlink.codec, travels)
    if plan.secure.enabled:
        cost = round_cost(plan, layout.size, clients)
        return cost["up_bytes"], cost["up_bytes"], down + buffers + cost["down_bytes"]
    sizes = [frame_bytes(codec, travels) + buffers for codec in rungs(plan.uplink)]
    return sizes[0], min(sizes), down + buffers


def _seconds(profile: DeviceProfile, info: DeviceInfo, work: Workload, plan: RunPlan) -> DeviceSeconds:
    steps = profile.steps(work)
    down = profile.down.seconds(work.down_bytes).p50 if profile.down else None
    up = profile.up.seconds(work.up_bytes).p50 if profile.up else None
    train = profile.step.p50 * steps if profile.step and steps is not None and plan.local.steps != "auto" else None
    whole = profile.seconds(work) if train is not None else None
    parts = (("its link", up is None or down is None), ("its speed with this model and batch", train is None))
    missing = " and ".join(name for name, is_missing in parts if is_missing)
    return DeviceSeconds(
        info.row.name, info.online, down, train, up, whole.p50 if whole else None, whole.p90 if whole else None, missing
    )


def _round_s(plan: RunPlan, timed: Sequence[DeviceSeconds]) -> float | None:
    """Return the usual length of a round; None if no device was measured."""
    each = [max(row.round_s or 0.0, FEW_S) for row in timed]
    if not each:
        return None
    if plan.cohort.mode == "buffered":  # all devices are at work: the buffer fills at the sum of their rates
        return plan.cohort.buffer / math.fsum(1 / seconds for seconds in each)
    longest = max(each)
    return min(longest, plan.cohort.deadline_s) if isinstance(plan.cohort.deadline_s, float) else longest


def _why(plan: RunPlan, there: Sequence[DeviceSeconds], unmeasured: Sequence[str]) -> str:
    """Return why times are not known, or not of all devices; "" if they are."""
    if not there:
        return "no approved device has this task"
    if not unmeasured:
        return ""
    named = ", ".join(unmeasured[:3]) + (f" and {len(unmeasured) - 3} more" if len(unmeasured) > 3 else "")
    plain = "; no run under masks or with privacy measures a device, and one plain run with this model does"
    return f"never measured with this model: {named}" + (plain if plan.is_protected else "")


def _source(known: KnownTask) -> str:
    return f"reported by {counted(len(known.devices), 'device')}" if known.devices else f"of the run {known.run_id}"


def _unknown(plan: RunPlan, clients: int, why: str) -> Estimate:
    return Estimate(
        plan.run.task, None, "", clients, plan.run.rounds, None, None, None, None, None, None, "", 0, why, ()
    )
