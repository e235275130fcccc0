"""These rules refuse plans whose reduction or bound on norms contradicts other keys.

A reduction compares the updates of one round with each other: all of them, in the clear, and made from one model.
"""

from __future__ import annotations

import json
from typing import Protocol

from thinwire.core.errors import CodecError
from thinwire.core.plan_codec_rules import CodecBook, Rule, ef21_rule, privacy_rule, secure_rule, together
from thinwire.core.plan_schema import Sections

MEAN = '[server] reduce = "mean"'


class Reducing(Protocol):
    """Defines what a plan's check needs to know about a reduction."""

    fewest: int
    needs_dense: bool


def reduce_rules(plan: Sections, codecs: CodecBook) -> list[Rule]:
    """Return the rules on `[server] reduce` and `max_norm`."""
    if plan.server.reduce == "mean":
        return _bounded(plan)
    try:
        reduction = codecs.reduction_of(plan.server.reduce)
    except CodecError as error:
        return [(True, f"[server] reduce = {plan.server.reduce!r}: {error.what}", error.why, error.hint)]
    return [*_bounded(plan), *_reduced(plan), *_dense(plan, reduction, codecs), *_enough(plan, reduction)]


def _bounded(plan: Sections) -> list[Rule]:
    form = f"[server] max_norm = {json.dumps(plan.server.max_norm)} with {{}}"
    without = "leave max_norm out"
    return together(plan.server.max_norm is not None, form, [
        secure_rule(plan, "the aggregator sees no update alone", "[secure] clip bounds each update on its device"),
        privacy_rule(plan, "[privacy] clip bounds each update already", without),
        ef21_rule(plan, "what is sent is a difference, whose norm tells nothing of the update"),
        (plan.run.algorithm != "fedavg", f'[run] algorithm = "{plan.run.algorithm}"',
         "both ends keep sums of what each device sent, and would not scale it alike", without),
    ])  # fmt: skip


def _reduced(plan: Sections) -> list[Rule]:
    cohort, form = plan.cohort, f'[server] reduce = "{plan.server.reduce}" with {{}}'
    sync = cohort.mode == "sync"
    return together(True, form, [
        (cohort.mode == "buffered", 'mode = "buffered"',
         "a buffer holds updates of several model versions, and only updates of one can be compared",
         '[cohort] mode = "sync"'),
        (sync and cohort.late == "aggregate", '[cohort] late = "aggregate"',
         "a late update was made from another model, and only updates of one can be compared",
         '[cohort] late = "drop"'),
        (plan.local.overlap is not None, "[local] overlap",
         "each device trains from a model of its own, and only updates of one can be compared",
         "leave [local] overlap out"),
        ef21_rule(plan, "a device's sum goes on from an update that may not have been chosen"),
        (plan.run.algorithm != "fedavg", f'[run] algorithm = "{plan.run.algorithm}"',
         "the state of each device goes on from an update that may not have been chosen",
         '[run] algorithm = "fedavg"'),
    ])  # fmt: skip


def _dense(plan: Sections, reduction: Reducing, codecs: CodecBook) -> list[Rule]:
    uplink = plan.uplink
    specs = dict.fromkeys([*uplink.codecs, *uplink.layers.values()]) if reduction.needs_dense else {}
    return [
        (codecs.leaves_zeros(spec), f'[server] reduce = "{plan.server.reduce}" with [uplink] codec = {spec!r}',
         "most decoded values of a coordinate are 0, so their median is 0 although the updates are not",
         "[uplink] codec = 'eden(1)', or a reduction of whole updates: \"geometric-median\"")
        for spec in specs
    ]  # fmt: skip


def _enough(plan: Sections, reduction: Reducing) -> list[Rule]:
    cohort, fewest, spec = plan.cohort, reduction.fewest, plan.server.reduce
    why = f"it needs {fewest} updates, so that the honest ones are in the majority"
    if spec.partition("(")[0].strip() in ("krum", "multi-krum"):
        why = f"it needs n >= {fewest} updates: 2 f + 3, and m + f + 2"
    return [
        (isinstance(cohort.clients, int) and cohort.clients < fewest,
         f'[server] reduce = "{spec}" with [cohort] clients = {cohort.clients}', why, f"[cohort] clients = {fewest}"),
        (1 <= cohort.min_updates < fewest and cohort.min_updates != 1,
         f'[server] reduce = "{spec}" with [cohort] min_updates = {cohort.min_updates:g}', why,
         f"[cohort] min_updates = {fewest}, or a share"),
    ]  # fmt: skip
