"""These rules refuse plans whose codec, feedback, server optimizer or algorithm contradicts other keys.

Under SCAFFOLD and FedDyn both ends keep state about every update that a client sent, down to the last frame. The plan
must therefore not drop, discount or lose an update.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Protocol

from thinwire.core.errors import CodecError
from thinwire.core.plan_schema import DGC, Refusal, Sections, ServerSection, UplinkSection

FEDAVG = '[run] algorithm = "fedavg"'


def algorithm_refusals(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    """Yield the contradictions between the plan and its algorithm.

    For fedavg the only one is a key that belongs to another algorithm.
    """
    run = plan.run
    if run.algorithm != "feddyn" and run.alpha != type(run).model_fields["alpha"].default:
        yield Refusal(
            f"[run] alpha = {run.alpha:g} with algorithm = {run.algorithm!r}", "it is feddyn's",
            '[run] algorithm = "feddyn", or leave alpha out',
        )  # fmt: skip
    if run.algorithm == "fedavg":
        return
    yield from _never(plan)
    if run.algorithm == "scaffold":
        yield from _scaffold(plan, codecs)
    else:
        yield from _feddyn(plan)


def _never(plan: Sections) -> Iterator[Refusal]:
    cohort, local, uplink = plan.cohort, plan.local, plan.uplink
    for given, what, why, hint in (
        (local.overlap is not None, "[local] overlap",
         "a device would be corrected by what was true before the updates that are still on their way", FEDAVG),
        (cohort.mode == "buffered", '[cohort] mode = "buffered"',
         "the mean is over all devices, and in a buffer the quicker ones stand more often", '[cohort] mode = "sync"'),
        (plan.secure.enabled, "[secure] enabled = true",
         "masks hide which device's sum moved, and a lost one could not be taken back", FEDAVG),
        (plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"',
         "what is remembered of a device's data goes out again in every later round, and no ledger here counts that",
         FEDAVG),
        (uplink.feedback == "ef21", '[uplink] feedback = "ef21"',
         "both would remember what each device sent, and move the model by their own sum of it",
         '[uplink] feedback = "classic"'),
        (uplink.dgc or uplink.momentum > 0, "momentum correction in [uplink]",
         "it adds up gradients of one step, and correcting a device's drift is for many", "[local] momentum"),
        (local.durability == "exit", '[local] durability = "exit"',
         "a device that is killed would lose what the aggregator's mean goes on from", '[local] durability = "round"'),
        (cohort.late == "fold" and cohort.staleness_exponent > 0, "late updates that count less",
         "the aggregator's mean is right only while each update counts as much as the device took it to",
         '[cohort] late = "drop", or staleness_exponent = 0'),
    ):  # fmt: skip
        if given:
            yield Refusal(f"[run] algorithm = {plan.run.algorithm!r} with {what}", why, hint)


def _scaffold(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    if plan.local.optimizer != "sgd":
        yield Refusal(
            f"[run] algorithm = 'scaffold' with [local] optimizer = {plan.local.optimizer!r}",
            "a device's mean gradient is read from how far it went, which only sgd's steps tell",
            '[local] optimizer = "sgd", or [run] algorithm = "feddyn"',
        )
    for spec in dict.fromkeys([*plan.uplink.codecs, *plan.uplink.layers.values()]):
        try:
            codecs.parse(spec)
        except CodecError:
            continue  # `codec_refusals` refuses it
        try:
            codecs.require_contraction(spec, "ef21")
        except CodecError:
            yield Refusal(
                f"[run] algorithm = 'scaffold' with {spec!r}",
                "control variates travel as differences, and each has to bring the aggregator nearer: "
                "this codec promises nothing of one call",
                "[uplink] codec = 'topk(0.05) > int8'",
            )


def _feddyn(plan: Sections) -> Iterator[Refusal]:
    for given, what, why, hint in (
        (plan.local.prox > 0, f"[local] prox = {plan.local.prox:g}", "alpha holds a device to the model already",
         "[run] alpha, and leave prox out"),
        (plan.local.partial, "[local] partial = true",
         "a device is taken to have gone as far as its own loss leads it, and not as far as the time allowed",
         "leave partial out, or fewer [local] steps"),
        (plan.local.steps == "auto", '[local] steps = "auto"',
         "a device is taken to have gone as far as its own loss leads it, and not as far as its speed allowed",
         "[local] steps = a number"),
        (plan.server.optimizer != "fedavg" or plan.server.lr != 1, "a server optimizer",
         "the paper's own step takes its place", "leave [server] optimizer and lr out"),
    ):  # fmt: skip
        if given:
            yield Refusal(f"[run] algorithm = 'feddyn' with {what}", why, hint)


DGC_STEP = re.compile(rf"\b{DGC}\s*\(")


class CodecBook(Protocol):
    """Gives a plan's check what it needs to know about codecs and server optimizers (aggregation/plan_codecs.py).

    Invariant: every `require_` method raises CodecError, with the reason, for a value that is not valid.
    """

    def parse(self, spec: str) -> Any:
        """Return the codec of a spec; raise CodecError if the spec is not valid."""

    def require_contraction(self, spec: str, feedback: str) -> None:
        """Raise CodecError if the codec would diverge under this error feedback."""

    def require_alone(self, spec: str) -> None:
        """Raise CodecError if the codec needs error feedback."""

    def require_downlink(self, spec: str) -> None:
        """Raise CodecError if the codec cannot carry the model to the clients."""

    def require_optimizer(self, server: ServerSection) -> None:
        """Raise CodecError if the server optimizer is not valid."""

    def require_uplink(self, uplink: UplinkSection) -> None:
        """Raise CodecError if the rules by layer or the warm-up are not valid."""

    def require_ladder(self, uplink: UplinkSection) -> None:
        """Raise CodecError if a rung of the codec ladder is not smaller than the one before it."""


def codec_refusals(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    """Yield the contradictions of codecs, feedback and server optimizer, in the order of the plan's sections."""
    yield from _codecs(plan, codecs)
    yield from _ladder(plan, codecs)
    yield from _feedback(plan)
    yield from _server(plan, codecs)


def _codecs(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    specs = {"[uplink] codec": plan.uplink.codec, "[downlink] codec": plan.downlink.codec}
    specs |= {f"[uplink] ladder: {spec}": spec for spec in plan.uplink.ladder}
    specs |= {f'[uplink.layers] "{pattern}"': spec for pattern, spec in plan.uplink.layers.items()}
    for place, spec in specs.items():
        try:
            codecs.parse(spec)
            if place.startswith("[downlink"):
                codecs.require_downlink(spec)
            elif plan.uplink.feedback == "none":
                codecs.require_alone(spec)
            else:
                codecs.require_contraction(spec, plan.uplink.feedback)
        except CodecError as error:
            yield Refusal(f"{place} = {spec!r}: {error.what}", error.why, error.hint)


def _ladder(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    uplink = plan.uplink
    if not uplink.ladder:
        return
    if uplink.warmup is not None:
        yield Refusal(
            "[uplink] ladder with a warmup", "both say which codec a round is asked in",
            "leave [uplink] warmup out, or the ladder",
        )  # fmt: skip
    if plan.cohort.mode == "buffered":
        yield Refusal(
            '[uplink] ladder with mode = "buffered"', "it goes by a round's deadline, and a buffer has none",
            "[uplink] codec = one of them",
        )  # fmt: skip
    if plan.local.steps == "auto":
        yield Refusal(
            '[uplink] ladder with steps = "auto"', "each would fill the time that the other leaves",
            "[local] epochs, or one [uplink] codec",
        )  # fmt: skip
    if uplink.codec not in (UplinkSection().codec, *uplink.ladder):
        yield Refusal(
            f"[uplink] codec = {uplink.codec!r} beside a ladder without it",
            "each device is asked in a codec of the ladder, so nobody would be asked in this one",
            "leave [uplink] codec out, or put it into the ladder",
        )
    if any(DGC_STEP.search(spec) for spec in uplink.ladder):
        yield Refusal(
            "dgc in a ladder", "it brings its own warm-up, momentum and mask, which are of the whole run",
            "the topk chain in its place: topk(0.01) > int8",
        )  # fmt: skip
    with contextlib.suppress(CodecError):
        for spec in uplink.ladder:
            codecs.parse(spec)
        try:
            codecs.require_ladder(uplink)
        except CodecError as error:
            yield Refusal(error.what, error.why, error.hint)


def _feedback(plan: Sections) -> Iterator[Refusal]:
    uplink = plan.uplink
    if uplink.dgc and plan.local.steps != 1:
        yield Refusal(
            f"{uplink.codec} with several local steps",
            "momentum correction adds up gradients of one step each; a change of many steps holds the device's own",
            "[local] steps = 1, or [uplink] codec = " + uplink.codec.strip().replace("dgc", "topk", 1),
        )
    elif uplink.dgc and plan.local.clip_grad is None:
        yield Refusal(
            f"{uplink.codec} without a clip",
            "dgc clips each gradient before it is added to what waits",
            "[local] clip_grad = 1.0",
        )
    if uplink.dgc and uplink.feedback != "classic":
        yield Refusal(
            f"{uplink.codec} with feedback = {uplink.feedback!r}", "its momentum is of the residual",
            '[uplink] feedback = "classic"',
        )  # fmt: skip
    if any(DGC_STEP.search(spec) for spec in (*uplink.layers.values(), "" if uplink.dgc else uplink.codec)):
        yield Refusal(
            "dgc in a rule by layer",
            "its momentum and its mask are of the whole update",
            "[uplink] codec = the dgc chain, and the other rules in [uplink.layers]; or topk in place of dgc",
        )
    if DGC_STEP.search(plan.downlink.codec):
        yield Refusal(
            f"[downlink] codec = {plan.downlink.codec!r}",
            "dgc's momentum, mask, clip and warm-up are of gradients on their way up",
            f"[downlink] codec = {DGC_STEP.sub('topk(', plan.downlink.codec)!r}",
        )
    if uplink.momentum and not uplink.dgc and plan.local.steps != 1:
        yield Refusal(
            f"[uplink] momentum = {uplink.momentum:g} with several local steps",
            "momentum correction adds up gradients of one step each; a change of many steps holds the device's own",
            "[local] steps = 1, or [local] momentum",
        )
    if uplink.feedback == "ef21" and plan.cohort.late == "fold" and plan.cohort.staleness_exponent:
        yield Refusal(
            '[uplink] feedback = "ef21" with late updates that count less',
            "the server's sum is right only while each update counts as much as the device took it to",
            '[cohort] late = "drop", or staleness_exponent = 0',
        )
    if uplink.feedback != "classic":
        for key, value, default in (("momentum", uplink.momentum, 0), ("feedback_decay", uplink.feedback_decay, 1)):
            if value != default:
                yield Refusal(
                    f"[uplink] {key} = {value:g} with feedback = {uplink.feedback!r}",
                    "it is of the residual, and only classic feedback has one",
                    f'[uplink] feedback = "classic", or leave {key} out',
                )


def _server(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    try:
        codecs.require_optimizer(plan.server)
        codecs.require_uplink(plan.uplink)
    except CodecError as error:
        yield Refusal(error.what, error.why, error.hint)
