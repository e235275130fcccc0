"""These rules refuse plans whose keys contradict each other, with the reason, before anything starts.

Invariant: a contradiction is refused, never only warned about while the run goes on.

Overlap has rules of its own (`overlap_refusals`), because an update is still on its way when the next round trains.

A key whose value has no effect is refused too (`unused_refusals`), so that nobody believes that it had one. A key at
its default value is not checked for this. The table of `tests/core/test_unused.py` lists every key of a plan, what it
needs to have an effect, and the check that refuses it otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from thinwire.core.plan_codec_rules import CodecBook, algorithm_refusals, codec_refusals
from thinwire.core.plan_schema import Refusal, Section, Sections, unbuilt


@dataclass(frozen=True)
class DeviceTimes:
    """Holds the shortest times that a device has reached, in seconds; a fixed deadline must leave room for them."""

    download_s: float
    train_s: float
    upload_s: float

    @property
    def total_s(self) -> float:
        """Return the sum of the three times, in seconds."""
        return self.download_s + self.train_s + self.upload_s


def refusals(plan: Sections, codecs: CodecBook, measured: Mapping[str, DeviceTimes]) -> list[Refusal]:
    """Return all contradictions of a plan, in the order of its sections."""
    return [
        *unbuilt(plan),
        *_work(plan),
        *codec_refusals(plan, codecs),
        *_buffered(plan),
        *_drawn(plan),
        *_in_groups(plan),
        *algorithm_refusals(plan, codecs),
        *overlap_refusals(plan),
        *unused_refusals(plan),
        *_deadline(plan, measured),
    ]


def _work(plan: Sections) -> Iterator[Refusal]:
    if plan.local.steps is not None and plan.local.epochs is not None:
        yield Refusal(
            "[local] steps and epochs are both given", "each says how long a device trains", "leave one of them out"
        )
    yield from _partial(plan)
    yield from _durability(plan)
    if plan.run.target and plan.run.evaluate == "off":
        yield Refusal(
            '[run] target with evaluate = "off"', "nobody measures the model, so no version ever reaches it",
            '[run] evaluate = "clients"',
        )  # fmt: skip
    if plan.local.momentum and plan.local.optimizer != "sgd":
        yield Refusal(
            f"[local] momentum with optimizer = {plan.local.optimizer!r}",
            "momentum is sgd's",
            '[local] optimizer = "sgd"',
        )
    if plan.local.lr_end and plan.local.schedule == "constant":
        yield Refusal(
            f'[local] lr_end = {plan.local.lr_end:g} with schedule = "constant"',
            "a constant learning rate does not fall",
            '[local] schedule = "cosine", or leave lr_end out',
        )
    if (
        plan.run.init
        and not (plan.run.init.endswith(".safetensors") or plan.run.init.startswith("run:"))
        and plan.run.init != "device"
    ):
        yield Refusal(
            f"[run] init = {plan.run.init!r} cannot be",
            "a first model is a file, a run's (run:ID), or made by a device (device)",
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
    clients = plan.cohort.clients
    asked = math.ceil(clients * (1 + plan.cohort.over_select)) if isinstance(clients, int) else math.inf
    if plan.cohort.min_replies > max(asked, 1):
        yield Refusal(
            f"[cohort] min_replies = {plan.cohort.min_replies:g} with clients = {clients}",
            f"no round could make a step, since it asks {asked} at most",
            f"[cohort] min_replies = {clients}, or a share of those asked",
        )


def _partial(plan: Sections) -> Iterator[Refusal]:
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


def _durability(plan: Sections) -> Iterator[Refusal]:
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


def _buffered(plan: Sections) -> Iterator[Refusal]:
    cohort, default = plan.cohort, type(plan.cohort)()
    if cohort.mode == "sync":
        if cohort.buffer != default.buffer:
            yield Refusal(
                f'[cohort] buffer = {cohort.buffer} with mode = "sync"',
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


def _drawn(plan: Sections) -> Iterator[Refusal]:
    cohort = plan.cohort
    if cohort.selection == "uniform":
        return
    for given, what, why, hint in (
        (cohort.mode == "buffered", 'mode = "buffered"',
         "no cohort is drawn: whoever is idle is asked, and the quick are so more often", '[cohort] mode = "sync"'),
        (cohort.mode == "sync" and cohort.clients == "all", 'clients = "all"',
         "nothing is drawn where all are asked", "[cohort] clients = 0.5"),
        (plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"',
         "what a run spends is counted for cohorts that are drawn with equal odds", '[cohort] selection = "uniform"'),
    ):  # fmt: skip
        if given:
            yield Refusal(f'[cohort] selection = "{cohort.selection}" with {what}', why, hint)


def _in_groups(plan: Sections) -> Iterator[Refusal]:
    """Yield keys that make clients use all time until the deadline.

    With `max_concurrency` they would leave no time to the clients that get a free concurrency slot later.
    """
    cohort = plan.cohort
    if cohort.mode == "buffered" or not cohort.max_concurrency:
        return
    for given, what, why in (
        (cohort.over_select, f"over_select = {cohort.over_select:g}",
         "one asks more than are wanted at once, the other holds asks back"),
        (plan.local.partial, "[local] partial = true", "the first ones would train until the deadline"),
        (plan.local.steps == "auto", '[local] steps = "auto"', "the first ones would train until the deadline"),
        (plan.uplink.ladder, "[uplink] ladder", "the first ones would send what takes until the deadline"),
    ):  # fmt: skip
        if given:
            yield Refusal(
                f"[cohort] max_concurrency = {cohort.max_concurrency} in rounds, with {what}", why,
                "leave one of them out",
            )  # fmt: skip


def _deadline(plan: Sections, measured: Mapping[str, DeviceTimes]) -> Iterator[Refusal]:
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


WITHOUT = "leave [local] overlap out"


def overlap_refusals(plan: Sections) -> Iterator[Refusal]:
    """Yield the contradictions between `[local] overlap` and other keys; scaffold and feddyn refuse overlap
    themselves.
    """
    if not plan.local.overlap:
        return
    for given, what, why, hint in (
        (plan.cohort.mode == "buffered", '[cohort] mode = "buffered"',
         "nobody waits for a round there, so there is nothing to train on through", WITHOUT),
        (plan.cohort.max_concurrency > 0, f"[cohort] max_concurrency = {plan.cohort.max_concurrency}",
         "who waits for a place is asked in the middle of a round, and here a round's asks are sent ahead of it",
         "leave [cohort] max_concurrency out"),
        (plan.local.partial, "[local] partial = true",
         "how long sending takes is not known while an earlier update is still on its way", "[local] partial = false"),
        (plan.local.steps == "auto", '[local] steps = "auto"',
         "a device's pace is measured from ask to answer, and here an ask waits for the one before it",
         "[local] steps = 20"),
        (plan.uplink.feedback == "ef21", '[uplink] feedback = "ef21"',
         "the next change is made before it is known whether the aggregator's sum holds the last one",
         '[uplink] feedback = "classic"'),
        (plan.secure.enabled, "[secure] enabled = true",
         "masks are agreed on for one round at a time, and here several are under way", WITHOUT),
        (plan.privacy.mode != "off", f'[privacy] mode = "{plan.privacy.mode}"',
         "what a run spends is counted for cohorts drawn anew each round; who trains on takes its last change with it",
         WITHOUT),
    ):  # fmt: skip
        if given:
            yield Refusal(f"{what} with [local] overlap", why, hint)


IDENTITY = "identity"


def unused_refusals(plan: Sections) -> Iterator[Refusal]:
    """Yield keys whose value has no effect in this plan, in the order of the plan's sections."""
    run, cohort, uplink, downlink = plan.run, plan.cohort, plan.uplink, plan.downlink
    unmeasured, uncoded = run.evaluate == "off", {*uplink.codecs, *uplink.layers.values()} == {IDENTITY}
    for section, key, there, where, why, hint in (
        (run, "metric", unmeasured, '[run] evaluate = "off"',
         "nobody measures the model, so no version is the best", '[run] evaluate = "clients"'),
        (run, "evaluate_every", unmeasured, '[run] evaluate = "off"',
         "nobody measures the model, so there is nothing between two evaluations", '[run] evaluate = "clients"'),
        (cohort, "over_select", cohort.mode == "sync" and cohort.clients == "all", 'clients = "all"',
         "all who are there are asked, so nobody is left to be asked in excess", "[cohort] clients = 0.5"),
        (cohort, "staleness_exponent", cohort.mode == "sync" and cohort.late == "drop", 'late = "drop"',
         "a late reply is dropped, so none counts less for being late", '[cohort] late = "fold"'),
        (uplink, "feedback_decay", uncoded, f'codec = "{IDENTITY}"',
         "the whole update is sent, so no residual is left that could decay", "[uplink] codec = 'topk(0.05) > int8'"),
        (downlink, "full_every", not downlink.compressed, f'codec = "{IDENTITY}"',
         "every model travels in full", "[downlink] codec = 'int8'"),
        (downlink, "log_rounds", not downlink.compressed, f'codec = "{IDENTITY}"',
         "every model travels in full, so no changes are kept for devices that are behind",
         "[downlink] codec = 'int8'"),
    ):  # fmt: skip
        if there and (given := getattr(section, key)) != type(section).model_fields[key].default:
            yield Refusal(
                f"[{_name(plan, section)}] {key} = {json.dumps(given)} with {where}", why, f"{hint}, or leave {key} out"
            )
    yield from _kept(plan)


def _kept(plan: Sections) -> Iterator[Refusal]:
    kept = set(plan.run.keep.split(","))
    if kept < {"last", "best"}:
        left_out = min({"last", "best"} - kept)
        yield Refusal(
            f"[run] keep = {plan.run.keep!r} leaves out {left_out!r}",
            "the last version and the best are kept in every run",
            '[run] keep = "last,best", or "all"',
        )


def _name(plan: Sections, section: Section) -> str:
    return next(name for name in Sections.model_fields if getattr(plan, name) is section)
