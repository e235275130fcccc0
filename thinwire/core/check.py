"""What a plan may not combine, and why: refused before anything starts, never warned about while it runs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.core.errors import CodecError, PlanError
from thinwire.core.sections import DGC, UplinkSection

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan
    from thinwire.core.sections import ServerSection

DGC_STEP = re.compile(rf"\b{DGC}\s*\(")


@dataclass(frozen=True)
class Refusal:
    """One thing that cannot be, why, and what would do instead."""

    what: str
    why: str
    hint: str

    def error(self) -> PlanError:
        return PlanError(self.what, self.why, self.hint)


@dataclass(frozen=True)
class DeviceTimes:
    """The best that a device has been seen to do, in seconds: what a fixed deadline must leave room for."""

    download_s: float
    train_s: float
    upload_s: float

    @property
    def total_s(self) -> float:
        return self.download_s + self.train_s + self.upload_s


class CodecBook(Protocol):
    """What a check needs to know of codecs and server optimizers; `aggregation.codecs` is one."""

    def parse(self, spec: str) -> Any: ...  # CodecError when it cannot be
    def require_contraction(self, spec: str, feedback: str) -> None: ...  # CodecError when it would diverge around it
    def require_downlink(self, spec: str) -> None: ...  # CodecError when it cannot carry the model to the devices
    def require_optimizer(self, server: ServerSection) -> None: ...  # CodecError for one that cannot be
    def require_uplink(self, uplink: UplinkSection) -> None: ...  # CodecError for rules or a warm-up that cannot be
    def require_ladder(self, uplink: UplinkSection) -> None: ...  # CodecError for one that does not get smaller


def refusals(plan: RunPlan, codecs: CodecBook, measured: Mapping[str, DeviceTimes]) -> list[Refusal]:
    """All refusals of a plan, in the order of its sections."""
    return [
        *_unbuilt(plan),
        *_work(plan),
        *_codecs(plan, codecs),
        *_ladder(plan, codecs),
        *_feedback(plan),
        *_buffered(plan),
        *_server(plan, codecs),
        *_deadline(plan, measured),
    ]


# What the plan's format has and this version does not: such a key must keep its default, and is never ignored.
UNBUILT = {
    "run": ("eval_cohort",),
    "cohort": ("selection",),
    "local": ("overlap",),
    "server": ("reduce",),
    "secure": ("enabled", "adversary", "max_corrupt", "max_dropout", "min_survivors", "bits", "support", "rotate",
               "post_quantum"),
    "privacy": ("mode", "clip", "adaptive", "noise_multiplier", "target_epsilon", "delta", "budget"),
}  # fmt: skip
UNBUILT_VALUES = {
    ("run", "init"): "device",
    ("run", "evaluate"): "holdout",
}


def _unbuilt(plan: RunPlan) -> Iterator[Refusal]:
    """Keys and values that this version cannot honour."""
    for section, keys in UNBUILT.items():
        given = getattr(plan, section)
        for key in keys:
            default = type(given).model_fields[key].get_default(call_default_factory=True)
            if getattr(given, key) != default:
                yield _refused(section, key, getattr(given, key), default)
    for (section, key), value in UNBUILT_VALUES.items():
        if getattr(getattr(plan, section), key) == value:
            yield _refused(section, key, value, None)


def _refused(section: str, key: str, value: object, default: object) -> Refusal:
    plain = isinstance(default, (str, int, float)) and default != ""
    shown = str(default).lower() if isinstance(default, bool) else json.dumps(default, default=str)
    said = json.dumps(value) if isinstance(value, (str, bool, int, float)) else "..."
    return Refusal(
        f"[{section}] {key} = {said} cannot be honoured",
        "this version of Thinwire does not have it yet",
        f"[{section}] {key} = {shown}" if plain else f"leave [{section}] {key} out, or give another value",
    )


def _work(plan: RunPlan) -> Iterator[Refusal]:
    if plan.local.steps is not None and plan.local.epochs is not None:
        yield Refusal(
            "[local] steps and epochs are both given", "each says how long a device trains", "leave one of them out"
        )
    yield from _partial(plan)
    yield from _durability(plan)
    if plan.local.momentum and plan.local.optimizer != "sgd":
        yield Refusal(
            f"[local] momentum with optimizer = {plan.local.optimizer!r}",
            "momentum is sgd's",
            '[local] optimizer = "sgd"',
        )
    if (
        plan.run.init
        and not (plan.run.init.endswith(".safetensors") or plan.run.init.startswith("run:"))
        and plan.run.init != "device"
    ):
        yield Refusal(
            f"[run] init = {plan.run.init!r} cannot be",
            "a first model is a file or a run's",
            '[run] init = "model.safetensors"',
        )
    if unknown := set(plan.run.keep.split(",")) - {"last", "best", "all"}:
        yield Refusal(
            f"[run] keep = {plan.run.keep!r} cannot be",
            f"unknown: {', '.join(sorted(unknown))}",
            '[run] keep = "last,best"',
        )
    if plan.cohort.min_replies > 1 and plan.cohort.min_replies != int(plan.cohort.min_replies):
        yield Refusal(
            f"[cohort] min_replies = {plan.cohort.min_replies} cannot be",
            "up to 1 it is a share, above it a count",
            "[cohort] min_replies = 2",
        )


def _partial(plan: RunPlan) -> Iterator[Refusal]:
    local = plan.local
    if local.min_steps != 1 and not local.partial and local.steps != "auto":
        yield Refusal(
            f"[local] min_steps = {local.min_steps} without partial work",
            "it is the fewest steps after which a deadline may end training, or that follow a device's speed",
            '[local] partial = true, or steps = "auto", or leave min_steps out',
        )
    if local.steps == "auto" and plan.cohort.deadline_s == "auto":
        yield Refusal(
            '[local] steps = "auto" with deadline_s = "auto"',
            "the steps are cut to fit the deadline, and it would follow how long the steps took: both would shrink",
            "[cohort] deadline_s = 60",
        )
    if isinstance(local.steps, int) and local.min_steps > local.steps:
        yield Refusal(
            f"[local] min_steps = {local.min_steps} with steps = {local.steps}",
            "a device makes no more steps than it is asked for",
            f"[local] min_steps = {local.steps}",
        )


def _durability(plan: RunPlan) -> Iterator[Refusal]:
    if plan.local.durability != "exit":
        return
    whys = {
        '[uplink] feedback = "ef21"': (
            plan.uplink.feedback == "ef21",
            "a device that is killed would lose the reference that the aggregator's sum goes on from",
        ),
        "[secure] enabled = true": (plan.secure.enabled, "what was masked must be on disk before it leaves the device"),
        f'[privacy] mode = "{plan.privacy.mode}"': (
            plan.privacy.mode != "off",
            "what was spent must be on disk before anything leaves the device",
        ),
    }
    for other, (given, why) in whys.items():
        if given:
            yield Refusal(f'[local] durability = "exit" with {other}', why, '[local] durability = "round"')


def _codecs(plan: RunPlan, codecs: CodecBook) -> Iterator[Refusal]:
    specs = {"[uplink] codec": plan.uplink.codec, "[downlink] codec": plan.downlink.codec}
    specs |= {f"[uplink] ladder: {spec}": spec for spec in plan.uplink.ladder}
    specs |= {f'[uplink.layers] "{pattern}"': spec for pattern, spec in plan.uplink.layers.items()}
    for place, spec in specs.items():
        try:
            codecs.parse(spec)
            if place.startswith("[uplink") and plan.uplink.feedback != "none":
                codecs.require_contraction(spec, plan.uplink.feedback)
            elif place.startswith("[downlink"):
                codecs.require_downlink(spec)
        except CodecError as error:
            yield Refusal(f"{place} = {spec!r}: {error.what}", error.why, error.hint)


def _ladder(plan: RunPlan, codecs: CodecBook) -> Iterator[Refusal]:
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


def _feedback(plan: RunPlan) -> Iterator[Refusal]:
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


def _buffered(plan: RunPlan) -> Iterator[Refusal]:
    cohort, default = plan.cohort, type(plan.cohort)()
    if cohort.mode == "sync":
        for key in ("buffer", "max_concurrency"):
            if getattr(cohort, key) != getattr(default, key):
                yield Refusal(
                    f'[cohort] {key} = {getattr(cohort, key)} with mode = "sync"',
                    "it is of buffered runs; a round asks as many as [cohort] clients says",
                    '[cohort] mode = "buffered"',
                )
        return
    for given, what, why, hint in (
        (cohort.clients != "all", f"[cohort] clients = {json.dumps(cohort.clients)}",
         "no cohort is drawn: whoever is idle is asked", "[cohort] max_concurrency says how many are at work at once"),
        (cohort.over_select, f"[cohort] over_select = {cohort.over_select:g}",
         "nobody is waited for, so nobody is asked in excess", "leave over_select out"),
        (cohort.late == "drop", '[cohort] late = "drop"',
         "most answers come after the buffer in which they were asked for",
         "[cohort] max_staleness bounds how late an answer may be"),
        (cohort.min_replies > max(1, cohort.buffer), f"[cohort] min_replies = {cohort.min_replies:g}",
         f"a buffer is full with {cohort.buffer}", f"[cohort] min_replies = {cohort.buffer}, or a share"),
        (plan.uplink.feedback == "ef21", '[uplink] feedback = "ef21"',
         "its sum is of all devices, and a buffer is the mean of those that stand in it",
         '[uplink] feedback = "classic"'),
        (plan.secure.enabled, "[secure] enabled = true",
         "masks cancel out in a cohort that is known before, and nobody knows who will stand in a buffer",
         '[cohort] mode = "sync"'),
        (plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"',
         "what a run spends is counted for cohorts that are drawn, and here the quicker devices are in more often",
         '[cohort] mode = "sync"'),
    ):  # fmt: skip
        if given:
            yield Refusal(f'{what} with mode = "buffered"', why, hint)


def _server(plan: RunPlan, codecs: CodecBook) -> Iterator[Refusal]:
    try:
        codecs.require_optimizer(plan.server)
        codecs.require_uplink(plan.uplink)
    except CodecError as error:
        yield Refusal(error.what, error.why, error.hint)


def _deadline(plan: RunPlan, measured: Mapping[str, DeviceTimes]) -> Iterator[Refusal]:
    deadline = plan.cohort.deadline_s
    if deadline == "auto":
        return
    slow = {name: times.total_s for name, times in measured.items() if times.total_s > deadline}
    if slow and len(slow) == len(measured):
        quickest = min(slow.values())
        yield Refusal(
            f"[cohort] deadline_s = {deadline:g} is under what every device needs",
            f"the quickest took {quickest:.1f} s at its best",
            f"[cohort] deadline_s = {quickest * 2:.0f}",
        )
