"""The privacy report of one run: a document for a data-protection officer, by the questions of NIST SP 800-226 (2025).

It answers: what is the unit and who are neighbours; epsilon and delta; which mechanism, with which numbers; who is
trusted with what; how often one client took part; what was released when; what was done before and after the noise;
which assumptions are enforced and which are not; what an audit has shown; and what epsilon means for one person.

Invariant: a figure without a bound is left out, and `left_out` has the reason. No client is named.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import thinwire
from thinwire.core.errors import DataLost, UsageError
from thinwire.core.formatting import counted, rounded_up
from thinwire.privacy.accounting import releases_of
from thinwire.reports import secure_rounds
from thinwire.reports.privacy import (
    SIMULATED,
    TREE,
    TRUSTED,
    sampling_text,
    spending_of_run,
    unit_text,
)
from thinwire.reports.privacy_history import meaning, right_guesses
from thinwire.store.read_models import population_of, privacy_section

if TYPE_CHECKING:
    from thinwire.core.plan_values import PrivacySection
    from thinwire.store import PrivacyRow, RunRow, Store

AUDIT: Final = Path(thinwire.__file__).parents[1] / "docs" / "evidence" / "privacy-audit.json"  # in a checkout only
ADJACENCY: Final[Mapping[str, str]] = {
    "central": "zero-out: two runs are neighbours if one client's clipped update is zero in one of them in every round",
    "distributed": "zero-out: two runs are neighbours if one client's clipped update is zero in one of them in every "
    "round; the noise counted is that of the fewest honest survivors",
    "local": "replace: two runs are neighbours if all data of one client are replaced by any other",
    "example": "add or remove: two runs are neighbours if one record of one device is in one of them only",
}
WHO: Final[Mapping[str, Mapping[str, str]]] = {
    "central": {
        "aggregator": "trusted with each single update in the clear, with adding the noise, and with the sampler's "
        "randomness; epsilon is its claim, which no device can check",
        "other clients": "not trusted: they see released models only",
        "readers of the models": "not trusted: epsilon bounds what they learn",
        "operator's backups": "trusted like the aggregator; they have no spool of a private run and no raw sum",
    },
    "distributed": {
        "aggregator": "not trusted with single updates: it sees noised sums, as secure aggregation assumes",
        "other clients": "trusted in part: at least the counted number of honest survivors adds its noise",
        "readers of the models": "not trusted: epsilon bounds what they learn",
    },
    "local": {"aggregator": "not trusted: each update is noised on the device", "readers of the models": "not trusted"},
    "example": {
        "aggregator": "not trusted with single records; a client's data as a whole are not protected from it",
        "readers of the models": "not trusted with single records",
    },
}
PIPELINE: Final[Mapping[str, str]] = {
    "central": "device: encode; aggregator: decode, clip, round to the grid, sum, add noise once, make the step; then "
    "the downlink codec. The uplink codec is before the clip and the noise, so it costs accuracy and no privacy. What "
    "comes after the noise only processes it further.",
    "distributed": "device: support, clip, rotate, round, add its noise; aggregator: sum under masks, decode",
    "local": "device: clip, round to the grid, add noise, encode. The uplink codec is after the noise.",
    "example": "device, at each step: sample records, clip each gradient, round to the grid, sum, add noise; then "
    "encode. The uplink codec is after the noise.",
}
LATTICE: Final = "integers on a grid, summed under masks"
ENFORCED: Final = (
    "A round is reserved in the ledger before an assignment leaves, and a reservation stays spent.",
    "A reply that tells more of its data than the update is refused; weights are equal; no metric is released.",
    "The budget and max_participations are checked for each client before each round.",
)
NOT_ENFORCED: Final = (
    "One person has one client: several devices of one person, or of one attacker (Sybils), count as different ones.",
    "Each aggregator and each population counts alone: what the same data spent elsewhere is not in this figure.",
    "Who took part, when, and how many bytes a device sent are recorded without noise.",
)
CLIPPED: Final = "The aggregator clips each decoded update, and checks the exact norm of the integers that it sums."
SERVER_HONEST: Final = "The aggregator is honest: it clips, adds noise, keeps the ledger, and deletes updates."
KEYS_KEPT: Final = "Nobody reads or copies the stored keys of the noise of a tree before they are deleted."
CLIENTS_CLIP: Final = "Each client clips by itself: the length of a lying client's update is not bounded."


def privacy_report(store: Store, run: RunRow, audit: Path = AUDIT) -> dict[str, Any]:
    """Return the report of a private run as JSON types; raise `UsageError` for a run without privacy."""
    spent = spending_of_run(store, run)
    if spent is None:
        raise UsageError(
            f"{run.run_id} has no differential privacy",
            why='its plan has [privacy] mode = "off": no epsilon bounds what its models tell of a client',
            hint="thinwire privacy ledger, for the runs that have",
        )
    privacy, mode = privacy_section(run), spent.mode
    own = [row for row in store.privacy.rows(population_of(run)) if row.run_id == run.run_id and row.release]
    secure = secure_rounds.protection(run, [len(one.selected) for one in store.rounds(run.run_id)])
    left_out, tree = list[str](), [TREE.format(privacy.min_separation)] if privacy.mechanism == "tree" else []
    unknown = store.privacy.unknown().get(spent.population, "")
    if unknown:
        left_out.append(f"epsilon in all runs of {spent.population}: {unknown}")
    if spent.epsilon_run is None:
        left_out.append("epsilon: the releases have no bound at this delta, or a newer version wrote them")
    return {
        "about": "privacy report, by the questions of NIST SP 800-226",
        "made_at": moment(time.time()),
        "made_by": f"thinwire {thinwire.__version__}",
        "run": {
            "id": run.run_id, "identity": run.identity, "task": run.task, "status": run.status, "source": run.source,
            "created_at": moment(run.created_at),
            "plan_sha256": hashlib.sha256(json.dumps(run.plan, sort_keys=True).encode()).hexdigest(),
        },
        "unit": unit_text(mode),
        "adjacency": ADJACENCY[mode],
        "guarantee": _guarantee(spent.epsilon_run, None if unknown else spent.epsilon, spent.delta),
        "mechanism": {
            "mode": mode,
            "clip": _clip(privacy),
            "amplification": sampling_text(mode, spent.rate),
            "kinds": list(_kinds(own)),
        },
        "trust": {"in_short": SIMULATED if run.source == "sim" else TRUSTED.get(mode, ""), **WHO[mode]},
        "participation": {
            "cap_of_the_plan": privacy.max_participations or run.plan["run"]["rounds"],
            "most_rounds_of_one_client": spent.participations, "clients": spent.clients, "population": spent.population,
            "budget": privacy.budget,
        },
        "releases": [_release(row) for row in own],
        "rounds_without_a_release": spent.reserved - spent.released,
        "codecs": {
            "uplink": LATTICE if secure else run.plan["uplink"]["codec"], "downlink": run.plan["downlink"]["codec"],
            "order": PIPELINE.get(mode, ""),
        },
        "assumptions": {
            "enforced": [*ENFORCED, *([CLIPPED] if mode == "central" else []), *tree],
            "not_enforced": [
                SERVER_HONEST if mode == "central" else CLIENTS_CLIP,
                *([KEYS_KEPT] if tree else ()),
                *(secure.assumes if secure else ()),
                *NOT_ENFORCED,
            ],
        },
        "audit": audit_text(audit),
        "meaning": meaning(spent.epsilon_run, spent.delta, mode),
        "left_out": left_out,
    }  # fmt: skip


def _clip(privacy: PrivacySection) -> str:
    """Return the clip, and how it follows the updates if it does."""
    said = f"{privacy.clip:g}" if privacy.clip is not None else "none"
    said += ", then the noised median of the norms" if privacy.adaptive else ""
    return said + (", divided among the tensors" if privacy.clipping == "per-layer" else "")


def _guarantee(of_run: float | None, of_all: float | None, delta: float) -> dict[str, Any]:
    """Return the claimed figures; one that has no bound is not in it."""
    found: dict[str, Any] = {"delta": delta, "accounting": "Rényi; delta includes what samplers may miss"}
    for name, value in (("epsilon", of_run), ("epsilon_all_runs", of_all)):
        if value is not None and math.isfinite(value):
            found[name] = float(rounded_up(value))
    if "epsilon" in found:
        found["right_guesses_at_most"] = right_guesses(found["epsilon"], delta)
    return found


def _kinds(rows: list[PrivacyRow]) -> Iterator[dict[str, Any]]:
    """Yield each kind of release with its numbers in grid steps, and how many rounds have it."""
    counts = Counter(row.release for row in rows)
    for text, count in counts.items():
        try:
            (release,) = releases_of({text: 1})
        except DataLost:
            yield {"rounds": count, "unreadable": True}
            continue
        yield {
            "rounds": count, "distribution": release.distribution, "sensitivity": release.sensitivity,
            "variance": release.variance, "dimensions": release.dimensions, "parties": release.parties,
            "rate": release.rate, "distance_of_a_draw": release.distance, "steps": release.steps, "unit": release.unit,
        }  # fmt: skip


def _release(row: PrivacyRow) -> dict[str, Any]:
    return {"round": row.round, "reserved_at": moment(row.at), "state": row.state, "model_sha256": row.digest or None}


def moment(at: float) -> str:
    """Return a wall-clock time as ISO 8601 in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def audit_text(path: Path) -> str:
    """Return what the committed audit of this version has shown; "not audited" without one."""
    try:
        found = json.loads(path.read_text())
        lower, claimed = (found["figures"][name] for name in ("audited_lower", "claimed_epsilon"))
        return (
            f"an attack on this code showed at least epsilon {lower:.3g} of the claimed {claimed:g} "
            f"(commit {found['commit'][:12]}); it audits the code, not this run"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "not audited"


def report_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the report as labels and texts; a label of "" goes on with the one before."""
    run, said, mechanism, part = (report[name] for name in ("run", "guarantee", "mechanism", "participation"))
    yield "run", f"{run['id']} of the task {run['task']}, {run['status']}, made {run['created_at']}"
    yield "unit", report["unit"]
    yield "adjacency", report["adjacency"]
    if "epsilon" in said:
        yield "epsilon", f"{said['epsilon']:g} in this run, at delta = {said['delta']:g} ({said['accounting']})"
    if "epsilon_all_runs" in said:
        yield "", f"{said['epsilon_all_runs']:g} in all runs of the population {part['population']}"
    yield "meaning", report["meaning"]
    for kind in mechanism["kinds"]:
        if "distribution" in kind:
            grid = f"standard deviation {math.sqrt(kind['variance']):.6g} and sensitivity {kind['sensitivity']:.6g}"
            grid += f" in grid steps, {kind['dimensions']} dimensions"
            grid += f", the noise of {kind['parties']} honest clients" if kind["parties"] > 1 else ""
            yield (
                "mechanism",
                f"{kind['distribution']}, {grid}, {counted(kind['rounds'], 'round')}; clip = {mechanism['clip']}",
            )
    yield "sampling", mechanism["amplification"]
    yield "trust", report["trust"]["in_short"]
    yield from (("trust", f"{who}: {what}") for who, what in sorted(report["trust"].items()) if who != "in_short")
    most = f"{part['most_rounds_of_one_client']} of at most {part['cap_of_the_plan']}"
    budget = "" if part["budget"] is None else f"; budget = {part['budget']:g}"
    yield "rounds", f"one client took part in {most}; {counted(part['clients'], 'client')}{budget}"
    released = [one for one in report["releases"] if one["state"] == "committed"]
    when = f", {released[0]['reserved_at']} to {released[-1]['reserved_at']}" if released else ""
    yield "releases", f"{counted(len(released), 'model')}{when}; {report['rounds_without_a_release']} spent without one"
    yield "codecs", f"uplink {report['codecs']['uplink']}, downlink {report['codecs']['downlink']}"
    yield "", report["codecs"]["order"]
    for name, label in (("enforced", "enforced"), ("not_enforced", "assumed")):
        yield from ((label, one) for one in report["assumptions"][name])
    yield "audit", report["audit"]
    yield from (("left out", one) for one in report["left_out"])
    yield "made", f"{report['made_at']} by {report['made_by']}"
