"""This module refuses plans that stock Flower nodes, or the ServerApp that sends assignments to them, do not carry out.

That app makes plain synchronous rounds of all nodes, keeps no state of a node but its last outcome, and measures
nothing. Invariant: no key of a plan is ignored over stock nodes, except for `[local] overlap`: a node that gets one
round at a time trains the same model without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from thinwire.aggregation import codecs
from thinwire.core.errors import PlanError, UsageError
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import as_error

OURS = "our own client: thinwire run"
NO_STORE = "this app begins with a node's model, makes all rounds, and writes the last model"
ALL_NODES = "each round sends to all nodes that are there, and waits for their replies for a fixed time"
UNSUPPORTED = {  # (section, key) -> why this app has no other value than the default
    ("run", "priority"): "this app knows no other run that uses its nodes",
    ("run", "init"): NO_STORE, ("run", "keep"): NO_STORE, ("run", "target"): NO_STORE, ("run", "patience"): NO_STORE,
    ("run", "fraction_evaluate"): "all nodes evaluate the model of a round",
    ("run", "task_match"): "a node reports no version and no source of its task",
    ("cohort", "wait_for"): "nodes in Flower's run config is the number of nodes for which a round waits",
    ("cohort", "wait_s"): "the app waits for its nodes for a fixed time",
    ("cohort", "min_updates"): "a round makes a step from the updates that arrived, from one on",
    ("cohort", "retry_limit"): "a round without an update ends the run",
    **dict.fromkeys(
        [("cohort", key) for key in (
            "clients", "over_select", "deadline_s", "mode", "buffer", "max_concurrency", "selection", "requires",
            "staleness_exponent", "max_staleness",
        )], ALL_NODES,
    ),
    ("uplink", "ladder"): "this app measures no links, and assigns all nodes one codec",
    ("server", "reduce"): "this app keeps a running mean",
    ("server", "max_norm"): "this app journals no norm",
    ("local", "personal_layers"): "a stock node keeps no state of ours between rounds",
}  # fmt: skip


def require_possible(plan: RunPlan) -> RunPlan:
    """Return the plan; raise `PlanError` if it is invalid, or needs more than this app and stock nodes have."""
    for what, why, hint in _refused(plan):
        raise PlanError(f"{what} over stock nodes", why, hint)
    if refused := plan.check(codecs):
        raise as_error(refused)
    return plan


def _refused(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    """Yield what is refused, each with its reason and the next thing to do."""
    run, local = plan.run, plan.local
    if plan.downlink.compressed:
        why = "this app keeps no log of changes, no note of what a node holds: each message has the whole model"
        yield f'[downlink] codec = "{plan.downlink.codec}"', why, f'[downlink] codec = "identity", or {OURS}'
    if run.algorithm != "fedavg":
        why = "each update must count exactly once there"
        yield f'[run] algorithm = "{run.algorithm}"', why, f'[run] algorithm = "fedavg", or {OURS}'
    if plan.uplink.feedback == "ef21":
        why = "each update must count exactly once there, and a lost one would shift the model for good"
        yield '[uplink] feedback = "ef21"', why, f'[uplink] feedback = "classic", or {OURS}'
    if plan.secure.enabled:
        why = "a stock node makes no masks and answers no phase, so this app would see each update alone"
        yield "[secure] enabled = true", why, f"[secure] enabled = false, or {OURS}"
    if plan.privacy.mode != "off":
        why = "nobody here keeps a ledger of what was spent"
        yield f'[privacy] mode = "{plan.privacy.mode}"', why, f"leave [privacy] out, or {OURS}"
    if run.evaluate == "holdout":
        why = "the nodes evaluate the model, on their own data"
        yield '[run] evaluate = "holdout"', why, f'[run] evaluate = "clients", or {OURS}'
    if local.steps == "auto":
        yield '[local] steps = "auto"', "this app measures no speed of a node", f"a number of steps, or {OURS}"
    for (section, key), why in UNSUPPORTED.items():
        table = getattr(plan, section)
        if getattr(table, key) != type(table).model_fields[key].default:
            yield f"[{section}] {key}", why, f"leave [{section}] {key} out, or {OURS}"


def model_file(out: str) -> Path | None:
    """Return the path of the file for the model, None if there is none; raise `UsageError` if its folder is missing."""
    path = Path(out).expanduser().absolute()
    if out and not path.parent.is_dir():
        raise UsageError(
            f"out = {out!r}: there is no folder {path.parent}",
            why="the app runs on the aggregator's machine, and a relative path begins where that was started",
            hint='an absolute path of that machine: out="/FOLDER/model.safetensors"',
        )
    return path if out else None
