"""Reports of runs with secure aggregation: what the plan protects, the phases of a round, and the phase it waited for.

The command line and the dashboard show the same sentences. They follow from the plan, from the number of selected
clients, and from the journalled phases. The threat model is in docs/explain/secure-aggregation.md.

`round_cost` gives what a secure round of a plan costs a client: thresholds, bytes and noise. The number of selected
clients decides most of it. It follows from the plan if `[cohort] clients` is a count, else from the devices online.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from thinwire.core.errors import PlanError
from thinwire.core.events import ENDED, NO_STEP
from thinwire.core.formatting import counted, duration, size
from thinwire.core.plan_values import SecureSection
from thinwire.core.score_histogram import TRAINED
from thinwire.core.secure_numbers import check_numbers, fewest_survivors, protects, selected_of, share_of
from thinwire.privacy.graph import EVENT_BITS, graph_of_plan
from thinwire.store.read_models import RoundRow, RunRow

if TYPE_CHECKING:
    from thinwire.core import RunPlan


MASKED: Final = "not known: summed under masks"  # the reason of "-" where a table would show a fact of one client
PRIVATE: Final = "not told: the run has differential privacy"  # the same in a run with noise
BY_NEXT_SUM: Final = "evaluated by the next round's sum"  # the reason of a missing metric of the latest version
NO_NEXT_SUM: Final = "only a next round's sum would evaluate it"  # the same where no round follows
NOT_PROTECTED: Final = (
    "Not protected: poisoned updates, a model made to leak inputs, the difference of two sums of almost the same "
    "clients, and who took part (docs/explain/secure-aggregation.md)."
)


@dataclass(frozen=True)
class Protection:
    """Holds what secure aggregation protects in a run, under which assumptions, and what it does not, as sentences.

    `min_survivors` is the fewest clients in a sum, 0 if no sum is possible.
    """

    sentence: str
    min_survivors: int
    assumes: tuple[str, ...]
    not_protected: str = NOT_PROTECTED


def secure_section(run: RunRow) -> SecureSection:
    """Return the table [secure] of the run's plan."""
    return SecureSection.model_validate(run.plan.get("secure") or {})


def is_secure(run: RunRow) -> bool:
    """Return True if the run's updates are summed under masks."""
    return secure_section(run).enabled


def why_not_known(run: RunRow) -> str:
    """Return why the facts of single clients are not known; "" if their replies tell them."""
    private = dict(run.plan.get("privacy") or {}).get("mode", "off") != "off"
    return MASKED if is_secure(run) else PRIVATE if private else ""


def protection(run: RunRow, selected: Collection[int]) -> Protection | None:
    """Return what the run protects in each of its rounds; None without secure aggregation or without a round.

    `selected` are the numbers of clients that its rounds selected. The smallest one decides: a round with more clients
    withstands at least as many corrupt ones.
    """
    secure = secure_section(run)
    if not secure.enabled or not selected:
        return None
    fewest, most = min(selected), max(selected)
    try:
        graph = graph_of_plan(secure, fewest, run.plan["run"]["rounds"])
    except PlanError as error:  # no k-regular graph, which the plan demands, has so few clients
        return Protection(f"A round of {counted(fewest, 'client')} has no sum: {error.what}.", 0, ())
    noised = dict(run.plan.get("privacy") or {}).get("mode") == "distributed"
    least = max(graph.min_survivors, fewest_survivors(secure, fewest, noised))
    said = f"{protects(secure, fewest)}; a sum holds at least {least} clients"
    if fewest < most:
        said += f"; the rounds selected {fewest} to {most} clients"
    if run.source == "sim":
        begin = "A simulation protects nothing, because one process has the data of all clients; on devices this plan"
    else:
        begin = "Secure aggregation"
    assumes = _assumptions(secure, share_of(secure.max_corrupt, fewest))
    if not graph.is_complete:
        graph_text = (
            f"Each client shares its secrets with {graph.k} others. Corrupt clients and drop-outs do not depend on "
            f"this graph; then it exposes a client in a run with a probability of at most 2^-{EVENT_BITS - 1}."
        )
        assumes = (*assumes, graph_text)
    return Protection(f"{begin} {said}.", least, assumes)


def _assumptions(secure: SecureSection, corrupt: int) -> tuple[str, ...]:
    """Return what must hold for the sentence of `protection` to be true, apart from the graph."""
    if secure.adversary == "curious":
        return (
            "The aggregator follows the protocol: it sends all clients of a round the same, and invents no client.",
        )
    of_all = f"at most {counted(corrupt, 'device')} of it {'is' if corrupt == 1 else 'are'}" if corrupt else "none is"
    return (
        f"Each client has pinned the roster of identity keys, which an offline key has signed, and {of_all} corrupt.",
        "The aggregator chooses how many clients a round selects; only an owner's [policy] min_cohort is a bound.",
    )


def not_evaluated(run: RunRow, rounds: Sequence[RoundRow]) -> str:
    """Return why the latest version of a secure run has no metrics; "" if it has, or if none of evaluation is summed.

    `rounds` are the last rounds of the run.
    """
    secure = secure_section(run)
    measured = [*secure.histograms, *(name for name in secure.metrics if not name.startswith(TRAINED))]
    if not is_secure(run) or not measured:
        return ""
    made = [one for one in rounds if one.reason and one.reason not in NO_STEP]
    if not made or made[-1].metrics:
        return ""
    version = f"version {made[-1].version}"
    return f"{version} has no metrics{f': {NO_NEXT_SUM}' if run.status in ENDED else f' yet: {BY_NEXT_SUM}'}"


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
        "least": max(graph.min_survivors, fewest_survivors(secure, selected, plan.privacy.mode == "distributed")),
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
        f"each coordinate is sent {counted(visits, 'time')} in {counted(plan.run.rounds, 'round')}, fewer than "
        f"{MIN_VISITS}: [run] rounds = {MIN_VISITS * walk.windows}, or more [secure] support"
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
