"""Which codecs, feedback and server optimizers a plan may combine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Protocol

from thinwire.core.all_sections import Sections
from thinwire.core.errors import CodecError
from thinwire.core.refusal import Refusal
from thinwire.core.sections import DGC, ServerSection, UplinkSection

DGC_STEP = re.compile(rf"\b{DGC}\s*\(")


class CodecBook(Protocol):
    """What a check needs to know of codecs and server optimizers; `aggregation.codecs` is one."""

    def parse(self, spec: str) -> Any: ...  # CodecError when it cannot be
    def require_contraction(self, spec: str, feedback: str) -> None: ...  # CodecError when it would diverge around it
    def require_alone(self, spec: str) -> None: ...  # CodecError when it needs feedback around it
    def require_downlink(self, spec: str) -> None: ...  # CodecError when it cannot carry the model to the devices
    def require_optimizer(self, server: ServerSection) -> None: ...  # CodecError for one that cannot be
    def require_uplink(self, uplink: UplinkSection) -> None: ...  # CodecError for rules or a warm-up that cannot be
    def require_ladder(self, uplink: UplinkSection) -> None: ...  # CodecError for one that does not get smaller


def codec_refusals(plan: Sections, codecs: CodecBook) -> Iterator[Refusal]:
    """In the order of the plan's sections."""
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
