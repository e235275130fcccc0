"""Compute what a secure round of a plan costs a client: thresholds, bytes and noise, as numbers.

The number of selected clients decides the thresholds and most of the bytes. It follows from the plan if `[cohort]
clients` is a count, else from the number of devices that are online.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thinwire.core.formatting import counted, duration, size
from thinwire.core.secure_numbers import check_numbers, fewest_survivors, protects, selected_of, share_of

if TYPE_CHECKING:
    from thinwire.core import RunPlan

LINKS_MBIT = (1, 10, 100)


def thresholds(plan: RunPlan, online: int | None) -> dict[str, Any]:
    """Return the numbers of clients of a secure round, and its protection in words.

    `PlanError` if the plan's shares do not fit so many clients.
    """
    from thinwire.privacy.graph import graph_of_plan

    secure = plan.secure
    selected, target = selected_of(plan, online)
    check_numbers(secure, selected, target)
    graph = graph_of_plan(secure, selected, plan.run.rounds)
    return {
        "selected": selected,
        "corrupt": share_of(secure.max_corrupt, selected),
        "dropout": share_of(secure.max_dropout, selected),
        "threshold": graph.t,
        "neighbours": graph.k,
        "least": max(graph.least, fewest_survivors(secure, selected, plan.privacy.mode == "distributed")),
        "protection": protects(secure, selected),
    }


def few_visits(plan: RunPlan) -> str:
    """Return a warning if the run visits a coordinate too rarely; "" if it does not."""
    from thinwire.aggregation.lattice_window import LARGEST_SIZE, MIN_VISITS, SupportWalk
    from thinwire.core.prng import Key

    walk = SupportWalk(LARGEST_SIZE, plan.secure.support, Key(0))  # how many windows there are depends on no model
    visits = walk.visits(plan.run.rounds)
    if visits >= MIN_VISITS or walk.windows == 1:
        return ""
    return (
        f"each coordinate is sent {visits} times in {plan.run.rounds} rounds, fewer than {MIN_VISITS}: "
        f"[run] rounds = {MIN_VISITS * walk.windows}, or more [secure] support"
    )


def round_cost(plan: RunPlan, parameters: int, online: int | None) -> dict[str, Any]:
    """Return what a secure round costs one client of a model with so many trained parameters.

    Bytes are those of `privacy.round_cost`; times are in seconds for all bytes up, by the link's rate in Mb/s. `noise`
    is the squared error that one client's rounding adds, in units of clip^2.
    """
    from thinwire.aggregation.plan_codecs import LATTICE, lattice_of
    from thinwire.core.types import SecureWork
    from thinwire.privacy.contexts import terms_of
    from thinwire.privacy.round_cost import phase_bytes

    found = thresholds(plan, online)
    clip = plan.privacy.clip or 1.0
    work = SecureWork(found["selected"], 0, clip)
    lattice = lattice_of(plan, parameters, work, "")
    phases = phase_bytes(terms_of(plan, work, lattice.lanes, lattice.width))
    up, dense = sum(one.up for one in phases), 4 * parameters
    noise = lattice.coordinates * lattice.mean_squared_error(1, plan.secure.weight_max) / clip**2
    warnings = [few_visits(plan)]
    if noise > 1:
        warnings.append(
            f"rounding adds {noise:.1f} times the squared norm of an update: "
            + ("more [secure] bits" if plan.secure.rotate else "[secure] rotate = true, or more bits")
        )
    return found | {
        "parameters": parameters,
        "codec": LATTICE,
        "width": lattice.width,
        "phases": {one.phase: {"up": one.up, "down": one.down} for one in phases},
        "up_bytes": up,
        "down_bytes": sum(one.down for one in phases),
        "dense_bytes": dense,
        "uplink_ratio": dense / up,
        "upload_s_at_mbit": upload_s(up),
        "noise": noise,
        "warnings": [warning for warning in warnings if warning],
    }


def upload_s(count: int) -> dict[str, float]:
    """Return in how many seconds so many bytes are sent, by the link's rate in Mb/s."""
    return {f"{rate}": count * 8 / (rate * 1e6) for rate in LINKS_MBIT}


def uplink_text(plan: RunPlan) -> str:
    """Return what a client sends of its update, in words."""
    if plan.privacy.mode == "distributed":
        return "integers with noise under masks"
    return f"{plan.secure.bits} bits a value under masks"


def cost_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the ratio, the times, the thresholds and the protection as lines for a person."""
    times = ", ".join(f"{duration(value)} at {rate} Mb/s" for rate, value in found["upload_s_at_mbit"].items())
    yield f"uplink      {found['uplink_ratio']:.1f} times fewer bytes than dense float32 ({size(found['dense_bytes'])})"
    yield f"upload      {times}"
    if "devices" in found:
        yield f"devices     {devices_text(found['devices'])}"
    yield f"numbers     {numbers_text(found)}"
    yield f"protection  {found['protection']}"
    yield f"rounding    adds {found['noise']:.2g} times the squared norm of an update; {found['width']} bits a value"


def devices_text(found: dict[str, Any]) -> str:
    """Return in words how long a round and the run take, by an `Estimate` for the devices that have the task."""
    count = counted(len(found["devices"]), "device")
    if found["round_s"] is None:
        return f"their times are not known: {found['unknown']}"
    ups = sorted((row["up_s"], row["device"]) for row in found["devices"] if row["up_s"] is not None)
    return (
        f"upload {duration(ups[0][0])} ({ups[0][1]}) to {duration(ups[-1][0])} ({ups[-1][1]}); a round "
        f"{duration(found['round_s'])} by {found['slowest']}, {counted(found['rounds'], 'round')} "
        f"{duration(found['run_s'])}; {found['measured']} of {count} measured"
        + (f" ({found['unknown']})" if found["unknown"] else "")
    )


def numbers_text(found: dict[str, Any]) -> str:
    """Return the thresholds in words, with the letters of docs/explain/secure-aggregation.md."""
    return (
        f"of n = {found['selected']} clients, A = {found['corrupt']} may be corrupt and D = {found['dropout']} may "
        f"leave; t = {found['threshold']} reveal a secret; a sum has at least {found['least']}"
    )
