"""This module reports the demo's result: document, table, what masks protected, and the epsilon that was spent."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import console
from thinwire.cli.local_state import command_line
from thinwire.cli.runs.render import total
from thinwire.core import formatting

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.store import Store


def protected(store: Store, run_id: str, plan: RunPlan) -> dict[str, Any]:
    """Return what secure aggregation protected in a run, and what it cost.

    `client_up_bytes` are all masked vectors, keys and shares that clients sent, for each update in a sum; None if the
    run has no sum. `dense_update_bytes` is the size of one update in float32. `phases_s` maps each phase to its seconds
    in all rounds.
    """
    from thinwire.core.events import RoundOpened
    from thinwire.core.layout import Layout
    from thinwire.core.run_events import PhaseClosed, SumUnmasked
    from thinwire.core.secure_numbers import protects

    told = [event for _, event in store.events(run_id)]
    received = sum(sum(one.received.values()) for one in told if isinstance(one, PhaseClosed))
    survivors = [one.survivors for one in told if isinstance(one, SumUnmasked)]
    phases_s = defaultdict[str, float](float)
    for row in store.phases(run_id):
        phases_s[row.phase] += row.seconds
    selected = min((len(one.assignments) for one in told if isinstance(one, RoundOpened)), default=0)
    return {
        "protection": protects(plan.secure, selected),
        "least_survivors": min(survivors, default=0),
        "client_up_bytes": received / sum(survivors) if survivors else None,
        "dense_update_bytes": 4 * Layout.from_json(store.run(run_id).layout).model_size,
        "phases_s": phases_s,
    }


def spent(store: Store, run_id: str, plan: RunPlan) -> dict[str, Any]:
    """Return what a private run spent, by the privacy ledger: `epsilon` at `delta` of the client that spent the most.

    `rounds` is the most rounds that were charged to one client, and `released` the number of released models.
    `epsilon` is None if the ledger has no bound.
    """
    from thinwire.aggregation.plan_codecs import noised_dimensions
    from thinwire.core.layout import Layout
    from thinwire.privacy.accounting import epsilon_of
    from thinwire.privacy.noise_plan import noise_plan

    privacy, population = plan.privacy, plan.privacy.population or plan.run.task
    by_client = list(store.privacy.spent_by_device(population).values())
    epsilon = max((epsilon_of(one, privacy.delta) for one in by_client), default=0.0)
    size, is_distributed = Layout.from_json(store.run(run_id).layout).model_size, privacy.mode == "distributed"
    clients = plan.cohort.clients if isinstance(plan.cohort.clients, int) else 1
    noise = noise_plan(plan, noised_dimensions(plan, size), clients)
    return {
        "mode": privacy.mode,
        "unit": "one client with all its data",
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": privacy.delta,
        "rounds": max((sum(one.values()) for one in by_client), default=0),
        "released": sum(row.state == "committed" for row in store.privacy.rows(population)),
        "clip": privacy.clip,
        "noise_multiplier": noise.noise_multiplier,
        "honest": noise.release.parties if is_distributed else None,
        "sees_updates": "nobody" if is_distributed else "the aggregator",
    }


KINDS = ("payload", "wire", "dense")


def document(store: Store, run_id: str) -> dict[str, Any]:
    """Return the run's part of `thinwire demo --json`; bytes are given for both directions and for each.

    `spent_s` maps the stages of all rounds to their seconds, which add up to `rounds_s`, as in `runs show --why`.
    """
    from thinwire.store.explaining import explain_rounds

    row = store.run(run_id)
    rounds = store.rounds(run_id)
    return {
        "run_id": run_id,
        "status": row.status,
        "rounds": row.rounds_closed,
        "closed_reasons": [one.reason for one in rounds if one.closed_at],
        "accuracy": row.metrics.get("accuracy"),
        "accuracy_uncompressed": None,
        "accuracy_centralised": None,
        **{f"{kind}_{way}_bytes": getattr(row, f"{kind}_{way}") for kind in KINDS for way in ("up", "down")},
        **{f"{kind}_bytes": total(getattr(row, f"{kind}_up"), getattr(row, f"{kind}_down")) for kind in KINDS},
        "uplink_ratio": row.dense_up / row.payload_up if row.payload_up else None,
        "late": row.late,
        "dropped": row.dropped,
        "failed": row.failed,
        "rounds_s": sum(one.seconds or 0.0 for one in rounds),
        "spent_s": {
            f"{name}_s": seconds for name, seconds in explain_rounds(store.explanations(run_id)).stages.items()
        },
    }


def uplink_text(ratio: float | None) -> str:
    """Return how much smaller the updates were than dense ones; masks and noise leave little of a ratio.

    >>> uplink_text(253.4), uplink_text(1.254)
    ('253 times fewer payload bytes than dense fp32', '1.3 times fewer payload bytes than dense fp32')
    >>> uplink_text(0.75)
    '1.3 times the payload bytes of dense fp32'
    """
    if ratio is None:
        return "no update was sent"
    times = f"{max(ratio, 1 / ratio):{'.0f' if ratio >= 9.5 else '.2g'}} times"
    return f"{times} fewer payload bytes than dense fp32" if ratio > 1 else f"{times} the payload bytes of dense fp32"


def tell_table(found: dict[str, Any]) -> None:
    """Print the table on stdout and the next commands on stderr."""
    console.line()
    # the clients of a secure round evaluate the model that they get, so its last version has no accuracy
    own = "under masks, before the last round" if "secure" in found else "over thin wires"
    if "privacy" in found:  # its clients do not evaluate
        own = "with differential privacy, measured by the demo, which has the data of all clients"
    for name in ("accuracy", "accuracy_uncompressed", "accuracy_centralised"):
        label = own if name == "accuracy" else name.removeprefix("accuracy_")
        label += ", without privacy" if "privacy" in found and name != "accuracy" else ""
        console.line(f"accuracy   {formatting.figure(found[name])}  {label}")
    console.line()
    ways = ("up", "down")
    rows = [(way, *(formatting.size(found[f"{kind}_{way}_bytes"]) for kind in KINDS)) for way in ways]
    console.table(("bytes", "payload", "wire", "dense fp32"), rows, right=("payload", "wire", "dense fp32"))
    console.line(f"uplink     {uplink_text(found['uplink_ratio'])}")
    console.line()
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(found["closed_reasons"]).items())
    clients = formatting.counted(found["clients"], "client")
    console.line(f"rounds     {found['rounds']}, with {clients}; closed for: {reasons}")
    console.line(f"updates    late {found['late']}, dropped {found['dropped']}, failed {found['failed']}")
    for text in time_lines(found):
        console.line(text)
    if "secure" in found:
        for text in sentences(found):
            console.line(text)
    if "privacy" in found:
        for text in spent_sentence(found["privacy"]):
            console.line(text)
    console.note("")
    home = found["home"]
    console.note("next")
    if (activate := activation()) is not None:
        console.note(f"  find thinwire here      {activate}")
    console.note(f"  every round of it       {command_line('runs show latest', home)}")
    console.note(f"  take the model          {command_line('runs model latest --out model.safetensors', home)}")
    console.note("  a model of your own     thinwire init mine")
    console.note(f"  remove all of this      rm -r {home}")


def time_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield where the command's seconds went, and below that those of the rounds; both lists add up as printed.

    What one client of a secure round did is not known, so its phases tell where the time went.
    """
    parts = {"until round 1": found["start_s"], "in rounds": found["rounds_s"], "for comparison": found["baselines_s"]}
    whole = {name: round(seconds) for name, seconds in parts.items() if seconds}
    if (left_s := round(found["wall_s"]) - sum(whole.values())) > 0:
        whole["in all else"] = left_s
    yield f"seconds    {found['wall_s']:.0f} in all: {', '.join(f'{value} {name}' for name, value in whole.items())}"
    stages = sorted(found["spent_s"].items(), key=lambda item: -item[1])
    shown = [(name.removesuffix("_s"), value) for name, value in stages if value > 0.05]
    left = found["rounds_s"] - sum(value for _, value in shown)
    shown += [("shorter stages", left)] if left > 0.05 else []
    along = "by phase" if "secure" in found else "along the slowest client"
    yield f"           in rounds, {along}: {', '.join(f'{name} {value:.1f}' for name, value in shown)}"


def activation() -> str | None:
    """Return the command that puts this environment's `thinwire` on the PATH; None if the shell finds one already."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("thinwire") is not None or not script.is_file():
        return None
    here = Path.cwd()
    return f". {shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))}"


def sentences(found: dict[str, Any]) -> Iterator[str]:
    """Yield what a secure run protected, at which price, and what it did not protect."""
    secure = found["secure"]
    if secure["client_up_bytes"] is None:
        yield "secure     No round had a sum, so the aggregator saw no update at all."
        return
    dense, took = formatting.size(secure["dense_update_bytes"]), formatting.size(round(secure["client_up_bytes"]))
    yield f"secure     The aggregator saw sums of {secure['least_survivors']} or more updates and no single one,"
    yield f"           for {took} a client and round with keys and shares, where dense fp32 takes {dense}."
    yield f"           That {secure['protection']},"
    yield "           and neither against poisoned updates nor against a model that was made to leak."


def spent_sentence(privacy: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one sentence on what a private run spent, for whom, and who is trusted."""
    if not privacy["rounds"]:
        yield "privacy    No round was opened, so nothing was spent."
        return
    bound = (
        "no bound on epsilon" if privacy["epsilon"] is None else f"epsilon {formatting.rounded_up(privacy['epsilon'])}"
    )
    rounds = formatting.counted(privacy["rounds"], "round")
    yield f"privacy    {rounds} spent {bound} at delta {privacy['delta']:g} of {privacy['unit']},"
    if privacy["honest"] is None:
        yield "           towards those who see the released models; the aggregator saw every update in the clear"
        yield "           and is trusted to add the noise."
        return
    yield "           towards all who see the released models, the aggregator included: it saw sums with noise only,"
    yield f"           and the cost counts on the noise of {privacy['honest']} honest clients in each of them."
