"""These rules refuse plans whose codec, feedback, server optimizer, algorithm, reduction or bound on norms contradicts
other keys.

A `Rule` is a row: when it refuses, what, why, and what to try.

Under SCAFFOLD and FedDyn both ends keep state about every update that a client sent, down to the last frame. The plan
must therefore not drop, discount or lose an update. A reduction compares the updates of one round with each other: all
of them, in the clear, and made from one model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from thinwire.core.errors import CodecError
from thinwire.core.plan_schema import DGC, Sections, ServerSection, UplinkSection

Rule: TypeAlias = tuple[object, str, str, str]  # when it refuses, what, why, try
FEDAVG = '[run] algorithm = "fedavg"'
CLASSIC = '[uplink] feedback = "classic"'
PARTIAL = "a device keeps the weight of its first update, which is a smaller one if a deadline cut that update short"


def together(applies: object, form: str, rules: Iterable[Rule]) -> list[Rule]:
    """Return rules on keys that do not go together with another one: `form` names both, with the key in its braces."""
    return [(applies and when, form.format(what), why, hint) for when, what, why, hint in rules]


def ef21_rule(plan: Sections, why: str, hint: str = CLASSIC) -> Rule:
    """Return the rule that refuses EF21."""
    return plan.uplink.feedback == "ef21", '[uplink] feedback = "ef21"', why, hint


def secure_rule(plan: Sections, why: str, hint: str) -> Rule:
    """Return the rule that refuses secure aggregation."""
    return plan.secure.enabled, "[secure] enabled = true", why, hint


def privacy_rule(plan: Sections, why: str, hint: str) -> Rule:
    """Return the rule that refuses differential privacy."""
    return plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"', why, hint


def algorithm_rules(plan: Sections, codecs: CodecBook) -> list[Rule]:
    """Return the rules of the plan's algorithm.

    For fedavg the only one is on a key that belongs to another algorithm.
    """
    run, cohort, local, uplink = plan.run, plan.cohort, plan.local, plan.uplink
    alpha = run.alpha != type(run).model_fields["alpha"].default
    form = f"[run] algorithm = {run.algorithm!r} with {{}}"
    return [
        (run.algorithm != "feddyn" and alpha, f"[run] alpha = {run.alpha:g} with algorithm = {run.algorithm!r}",
         "it is feddyn's", '[run] algorithm = "feddyn", or leave alpha out'),
        *together(run.algorithm != "fedavg", form, [
            (local.overlap is not None, "[local] overlap",
             "a device would be corrected by what was true before the updates that are still on their way", FEDAVG),
            (cohort.mode == "buffered", '[cohort] mode = "buffered"',
             "the mean is over all devices, and in a buffer the quicker ones stand more often",
             '[cohort] mode = "sync"'),
            secure_rule(plan, "masks hide which device's sum moved, and a lost one could not be taken back", FEDAVG),
            privacy_rule(
                plan,
                "what is remembered of a device's data goes out again in every later round, and no ledger here counts "
                "that", FEDAVG),
            ef21_rule(plan, "both would remember what each device sent, and move the model by their own sum of it"),
            (uplink.dgc or uplink.momentum > 0, "momentum correction in [uplink]",
             "it adds up gradients of one step, and correcting a device's drift is for many", "[local] momentum"),
            (local.durability == "exit", '[local] durability = "exit"',
             "a device that is killed would lose what the aggregator's mean goes on from",
             '[local] durability = "round"'),
            (cohort.late == "aggregate" and cohort.staleness_exponent > 0, "late updates that count less",
             "the aggregator's mean is right only while each update counts as much as the device took it to",
             '[cohort] late = "drop", or staleness_exponent = 0'),
        ]),
        *together(run.algorithm == "scaffold", form, [
            (local.optimizer != "sgd", f"[local] optimizer = {local.optimizer!r}",
             "a device's mean gradient is read from how far it went, which only sgd's steps tell",
             '[local] optimizer = "sgd", or [run] algorithm = "feddyn"'),
            (local.partial, "[local] partial = true", PARTIAL, "leave partial out, or fewer [local] steps"),
            *((run.algorithm == "scaffold" and why, repr(spec), f"control variates are sent as differences: {why}",
               "[uplink] codec = 'topk(0.05) > int8'")
              for spec in dict.fromkeys([*uplink.codecs, *uplink.layers.values()])
              for why in [_no_differences(spec, codecs)]),
        ]),
        *together(run.algorithm == "feddyn", form, [
            (local.prox > 0, f"[local] prox = {local.prox:g}", "alpha holds a device to the model already",
             "[run] alpha, and leave prox out"),
            (local.partial, "[local] partial = true",
             "a device is taken to have gone as far as its own loss leads it, and not as far as the time allowed",
             "leave partial out, or fewer [local] steps"),
            (local.steps == "auto", '[local] steps = "auto"',
             "a device is taken to have gone as far as its own loss leads it, and not as far as its speed allowed",
             "[local] steps = a number"),
            (plan.server.optimizer != "fedavg" or plan.server.lr != 1 or plan.server.moves, "a server optimizer",
             "the paper's own step takes its place", "leave [server] optimizer, lr and schedule out"),
        ]),
    ]  # fmt: skip


def _no_differences(spec: str, codecs: CodecBook) -> str:
    """Return why a codec cannot send differences; "" if it can, or if it is not valid, which `_codecs` refuses."""
    try:
        codecs.parse(spec)
    except CodecError:
        return ""
    try:
        codecs.require_contraction(spec, "ef21")
    except CodecError as error:
        return error.why
    return ""


DGC_STEP = re.compile(rf"\b{DGC}\s*\(")


class CodecBook(Protocol):
    """Gives a plan's check what it needs to know about codecs and server optimizers (aggregation/plan_codecs.py).

    Invariant: every `require_` method raises CodecError, with the reason, for a value that is not valid.
    """

    def parse(self, spec: str) -> Any:
        """Return the codec of a spec; raise CodecError if the spec is not valid."""

    def feedback_of(self, uplink: UplinkSection) -> str:
        """Return the kind of error feedback that updates have: "auto" is "none" if all codecs are unbiased."""

    def require_contraction(self, spec: str, feedback: str) -> None:
        """Raise CodecError if the codec would diverge under this error feedback."""

    def require_alone(self, spec: str) -> None:
        """Raise CodecError if the codec needs error feedback."""

    def require_fixed_size(self, spec: str) -> None:
        """Raise CodecError if the number of bytes of an update depends on its values."""

    def require_downlink(self, spec: str) -> None:
        """Raise CodecError if the codec cannot carry the model to the clients."""

    def leaves_zeros(self, spec: str) -> bool:
        """Return True if most decoded values are 0 whatever the update is; False if the spec is not valid."""

    def reduction_of(self, spec: str) -> Any:
        """Return the reduction of `[server] reduce`; raise CodecError if it is not valid."""

    def require_optimizer(self, server: ServerSection) -> None:
        """Raise CodecError if the server optimizer is not valid."""

    def require_uplink(self, uplink: UplinkSection) -> None:
        """Raise CodecError if the rules by layer or the warm-up are not valid."""

    def require_ladder(self, uplink: UplinkSection) -> None:
        """Raise CodecError if a rung of the codec ladder is not smaller than the one before it."""


def codec_rules(plan: Sections, codecs: CodecBook) -> list[Rule]:
    """Return the rules on codecs, feedback and server optimizer, in the order of the plan's sections."""
    return [*_codecs(plan, codecs), *_ladder(plan, codecs), *_feedback(plan, codecs), *_server(plan, codecs)]


def _codecs(plan: Sections, codecs: CodecBook) -> list[Rule]:
    specs = {"[uplink] codec": plan.uplink.codec, "[downlink] codec": plan.downlink.codec}
    specs |= {f"[uplink] ladder: {spec}": spec for spec in plan.uplink.ladder}
    specs |= {f'[uplink.layers] "{pattern}"': spec for pattern, spec in plan.uplink.layers.items()}
    feedback, found = resolved_feedback(plan.uplink, codecs), list[Rule]()
    for place, spec in specs.items():
        try:
            codecs.parse(spec)
            if place.startswith("[downlink"):
                codecs.require_downlink(spec)
            elif feedback == "none":
                codecs.require_alone(spec)
            else:
                codecs.require_contraction(spec, feedback)
        except CodecError as error:
            found.append((True, f"{place} = {spec!r}: {error.what}", error.why, error.hint))
    return found


def _ladder(plan: Sections, codecs: CodecBook) -> list[Rule]:
    uplink = plan.uplink
    if not uplink.ladder:
        return []
    rules: list[Rule] = [
        (uplink.warmup is not None, "[uplink] ladder with a warmup", "both say which codec a round's assignments have",
         "leave [uplink] warmup out, or the ladder"),
        (plan.cohort.mode == "buffered", '[uplink] ladder with mode = "buffered"',
         "it goes by a round's deadline, and a buffer has none", "[uplink] codec = one of them"),
        (plan.local.steps == "auto", '[uplink] ladder with steps = "auto"',
         "each would fill the time that the other leaves", "[local] epochs, or one [uplink] codec"),
        (uplink.codec not in (UplinkSection().codec, *uplink.ladder),
         f"[uplink] codec = {uplink.codec!r} beside a ladder without it",
         "each device gets a codec of the ladder, so no device would get this one",
         "leave [uplink] codec out, or put it into the ladder"),
        (any(DGC_STEP.search(spec) for spec in uplink.ladder), "dgc in a ladder",
         "it brings its own warm-up, momentum and mask, which are of the whole run",
         "the topk chain in its place: topk(0.01) > int8"),
    ]  # fmt: skip
    try:
        for spec in uplink.ladder:
            codecs.parse(spec)
    except CodecError:
        return rules  # `_codecs` refuses it
    return [*rules, *_required(lambda: codecs.require_ladder(uplink))]


def _required(*checks: Callable[[], None]) -> list[Rule]:
    """Return the rule of the first check that raises CodecError."""
    try:
        for check in checks:
            check()
    except CodecError as error:
        return [(True, error.what, error.why, error.hint)]
    return []


def resolved_feedback(uplink: UplinkSection, codecs: CodecBook) -> str:
    """Return the kind of error feedback; classic if a codec of the plan is not valid, which `_codecs` refuses."""
    try:
        return codecs.feedback_of(uplink)
    except CodecError:
        return "classic"


def _feedback(plan: Sections, codecs: CodecBook) -> list[Rule]:
    uplink, local, feedback = plan.uplink, plan.local, resolved_feedback(plan.uplink, codecs)
    several, down = local.steps != 1, plan.downlink.codec
    by_layer = (*uplink.layers.values(), "" if uplink.dgc else uplink.codec)
    one_step = "momentum correction adds up gradients of one step each; a change of many steps holds the device's own"
    return [
        (uplink.dgc and several, f"{uplink.codec} with several local steps", one_step,
         "[local] steps = 1, or [uplink] codec = " + DGC_STEP.sub("topk(", uplink.codec.strip())),
        (uplink.dgc and not several and local.clip_grad is None, f"{uplink.codec} without a clip",
         "dgc clips each gradient before it is added to what waits", "[local] clip_grad = 1.0"),
        (uplink.dgc and feedback != "classic", f"{uplink.codec} with feedback = {feedback!r}",
         "its momentum is of the residual", CLASSIC),
        (any(map(DGC_STEP.search, by_layer)), "dgc in a rule by layer",
         "its momentum and its mask are of the whole update",
         "[uplink] codec = the dgc chain, and the other rules in [uplink.layers]; or topk in place of dgc"),
        (DGC_STEP.search(down), f"[downlink] codec = {down!r}",
         "dgc's momentum, mask, clip and warm-up are of gradients in the uplink",
         f"[downlink] codec = {DGC_STEP.sub('topk(', down)!r}"),
        (uplink.momentum and not uplink.dgc and several,
         f"[uplink] momentum = {uplink.momentum:g} with several local steps", one_step,
         "[local] steps = 1, or [local] momentum"),
        (uplink.feedback == "ef21" and plan.cohort.late == "aggregate" and plan.cohort.staleness_exponent,
         '[uplink] feedback = "ef21" with late updates that count less',
         "the server's sum is right only while each update counts as much as the device took it to",
         '[cohort] late = "drop", or staleness_exponent = 0'),
        *((feedback != "classic" and value != default, f"[uplink] {key} = {value:g} with feedback = {feedback!r}",
           "it is of the residual, and only classic feedback has one", f"{CLASSIC}, or leave {key} out")
          for key, value, default in (("momentum", uplink.momentum, 0), ("feedback_decay", uplink.feedback_decay, 1))),
    ]  # fmt: skip


def _server(plan: Sections, codecs: CodecBook) -> list[Rule]:
    return _required(lambda: codecs.require_optimizer(plan.server), lambda: codecs.require_uplink(plan.uplink))


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
