"""What a plan may not combine, and why: refused before anything starts, never warned about while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.core.errors import CodecError, PlanError

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan


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
    """What a check needs to know of codecs; `aggregation.codecs` is one."""

    def parse(self, spec: str) -> Any: ...  # CodecError when it cannot be
    def require_contraction(self, spec: str) -> None: ...  # CodecError when feedback around it would diverge


def refusals(plan: RunPlan, codecs: CodecBook, measured: Mapping[str, DeviceTimes]) -> list[Refusal]:
    """All refusals of a plan, in the order of its sections."""
    return [*_unbuilt(plan), *_work(plan), *_codecs(plan, codecs), *_deadline(plan, measured)]


def _unbuilt(plan: RunPlan) -> Iterator[Refusal]:
    """Keys that the plan's format has and this version cannot honour: refused, never ignored."""
    run, cohort, local, up, down = plan.run, plan.cohort, plan.local, plan.uplink, plan.downlink
    wanted = {
        ('[run] init = "device"', '[run] init = ""'): run.init == "device",
        ('[run] evaluate = "holdout"', '[run] evaluate = "clients"'): run.evaluate == "holdout",
        ('[cohort] mode = "buffered"', '[cohort] mode = "sync"'): cohort.mode != "sync",
        (f'[cohort] selection = "{cohort.selection}"', '[cohort] selection = "uniform"'): cohort.selection != "uniform",
        ("[cohort] requires", "leave it out"): cohort.requires != type(cohort.requires)(),
        ("[cohort] max_concurrency", "leave it out"): cohort.max_concurrency != 0,
        ('[local] steps = "auto"', "a number of steps"): local.steps == "auto",
        ("[local] prox", "[local] prox = 0"): local.prox != 0,
        ("[local] partial", "[local] partial = false"): local.partial,
        ("[local] overlap", "leave it out"): local.overlap is not None,
        ('[local] durability = "exit"', '[local] durability = "round"'): local.durability != "round",
        ("[local] min_steps", "leave it out"): local.min_steps != 1,
        ("[local] codec_threads", "leave it out"): local.codec_threads != 0,
        ('[uplink] feedback = "ef21"', '[uplink] feedback = "classic"'): up.feedback == "ef21",
        ("[uplink] feedback_decay", "[uplink] feedback_decay = 1"): up.feedback_decay != 1.0,
        ("[uplink] momentum", "[uplink] momentum = 0"): up.momentum != 0,
        ("[uplink] warmup", "leave it out"): up.warmup is not None,
        ("[uplink] ladder", "[uplink] codec"): bool(up.ladder),
        (f'[downlink] codec = "{down.codec}"', '[downlink] codec = "identity"'): down.codec != "identity",
        ("[downlink] full_every", "leave it out"): down.full_every != 0,
        (f'[server] optimizer = "{plan.server.optimizer}"', '[server] optimizer = "fedavg"'): plan.server.optimizer
        != "fedavg",
        (f'[server] reduce = "{plan.server.reduce}"', '[server] reduce = "mean"'): plan.server.reduce != "mean",
        ("[server] threads", "leave it out"): plan.server.threads != 0,
        ("[secure] enabled = true", "[secure] enabled = false"): plan.secure.enabled,
        (f'[privacy] mode = "{plan.privacy.mode}"', '[privacy] mode = "off"'): plan.privacy.mode != "off",
    }
    for (what, instead), asked in wanted.items():
        if asked:
            yield Refusal(f"{what} cannot be honoured", "this version of Thinwire does not have it yet", instead)


def _work(plan: RunPlan) -> Iterator[Refusal]:
    if plan.local.steps is not None and plan.local.epochs is not None:
        yield Refusal(
            "[local] steps and epochs are both given", "each says how long a device trains", "leave one of them out"
        )
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


def _codecs(plan: RunPlan, codecs: CodecBook) -> Iterator[Refusal]:
    specs = {"[uplink] codec": plan.uplink.codec, "[downlink] codec": plan.downlink.codec}
    specs |= {f'[uplink.layers] "{pattern}"': spec for pattern, spec in plan.uplink.layers.items()}
    for place, spec in specs.items():
        try:
            codecs.parse(spec)
            if place.startswith("[uplink") and plan.uplink.feedback != "none":
                codecs.require_contraction(spec)
        except CodecError as error:
            yield Refusal(f"{place} = {spec!r}: {error.what}", error.why, error.hint)


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
