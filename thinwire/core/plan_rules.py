"""These rules refuse plans whose keys contradict each other, with the reason, before anything starts.

A rule is a row of a table: when it refuses, what, why, and what to try. `plan_codec_rules` has the rows of codecs,
feedback, server optimizer and algorithm, `plan_secure_rules` and `plan_privacy_rules` those of protected runs.
A row that refuses becomes a `Refusal`.

Invariant: a contradiction is refused, never only warned about while the run goes on.

A key whose value has no effect is refused too (`_unused`), so that nobody believes that it had one. A key at its
default value is not checked for this. The table of `tests/core/test_unused.py` has for every key of a plan another plan
in which it would do nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.core.errors import PlanError, numbered
from thinwire.core.plan_codec_rules import (
    PARTIAL,
    CodecBook,
    Rule,
    algorithm_rules,
    codec_rules,
    ef21_rule,
    privacy_rule,
    reduce_rules,
    secure_rule,
    together,
)
from thinwire.core.plan_privacy_rules import privacy_rules, without_privacy
from thinwire.core.plan_schema import IDENTITY, Sections
from thinwire.core.plan_secure_rules import secure_rules, without_secure


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


@dataclass(frozen=True)
class Refusal:
    """Holds one contradiction in a plan, the reason, and a valid alternative."""

    what: str
    why: str
    hint: str

    def error(self) -> PlanError:
        """Return the refusal as an error to raise."""
        return PlanError(self.what, self.why, self.hint)


def as_error(refused: Sequence[Refusal], noun: str = "the plan") -> PlanError:
    """Return one error that names all contradictions of a plan, each with its reason and its alternative, in order.

    >>> as_error([Refusal("a with b", "they differ", "leave a out"), Refusal("c = 0", "it is a count", "c = 1")]).hint
    '1. leave a out\\n2. c = 1'
    """
    if len(refused) == 1:
        return refused[0].error()
    return PlanError(
        f"{noun} cannot run for {len(refused)} reasons",
        why=numbered([one.why for one in refused], [one.what for one in refused]),
        hint=numbered([one.hint for one in refused]),
    )


def refusals(plan: Sections, codecs: CodecBook, measured: Mapping[str, DeviceTimes]) -> list[Refusal]:
    """Return all contradictions of a plan, in the order of the rules below."""
    rules = [
        *_work(plan),
        *codec_rules(plan, codecs),
        *_buffered(plan),
        *_drawn(plan),
        *_in_groups(plan),
        *algorithm_rules(plan, codecs),
        *reduce_rules(plan, codecs),
        *_overlap(plan),
        *_personal(plan),
        *without_secure(plan),
        *secure_rules(plan),
        *without_privacy(plan),
        *privacy_rules(plan, codecs),
        *_unused(plan),
        *_deadline(plan, measured),
    ]
    return [Refusal(what, why, hint) for when, what, why, hint in rules if when]


def _work(plan: Sections) -> list[Rule]:
    run, local, cohort = plan.run, plan.local, plan.cohort
    clients, least = cohort.clients, cohort.min_updates
    assigned = math.ceil(clients * (1 + cohort.over_select)) if isinstance(clients, int) else math.inf
    unknown = set(run.keep.split(",")) - {"last", "best", "all"}
    init = not run.init or run.init == "device" or run.init.endswith(".safetensors")
    init = init or run.init.startswith(("run:", "upload:"))
    return [
        (local.steps is not None and local.epochs is not None, "[local] steps and epochs are both given",
         "each says how long a device trains", "leave one of them out"),
        (local.min_steps != 1 and not local.partial and local.steps != "auto",
         f"[local] min_steps = {local.min_steps} without partial work",
         "it is the fewest steps after which a deadline may end training, or that follow a device's speed",
         '[local] partial = true, or steps = "auto", or leave min_steps out'),
        (local.steps == "auto" and cohort.deadline_s == "auto", '[local] steps = "auto" with deadline_s = "auto"',
         "the steps are cut to fit the deadline, and it would follow how long the steps took: both would shrink",
         "[cohort] deadline_s = 60"),
        (isinstance(local.steps, int) and local.min_steps > local.steps,
         f"[local] min_steps = {local.min_steps} with steps = {local.steps}",
         "a device makes no more steps than its assignment has", f"[local] min_steps = {local.steps}"),
        (local.prox * local.lr >= 1, f"[local] prox = {local.prox:g} with lr = {local.lr:g}",
         "a step would pull the model past the round's model, to its other side", f"[local] prox = {0.5 / local.lr:g}"),
        *together(local.partial, "[local] partial = true with {}", [ef21_rule(plan, PARTIAL)]),
        *together(local.durability == "exit", '[local] durability = "exit" with {}', [
            ef21_rule(plan, "a device that is killed would lose the reference that the aggregator's sum goes on from",
                      '[local] durability = "round"'),
            secure_rule(plan, "what was masked must be on disk before it leaves the device",
                        '[local] durability = "round"'),
            privacy_rule(plan, "what was spent must be on disk before anything leaves the device",
                         '[local] durability = "round"'),
        ]),
        (run.target and run.evaluate == "off", '[run] target with evaluate = "off"',
         "nobody measures the model, so no version ever reaches it", '[run] evaluate = "clients"'),
        (run.patience is not None and run.evaluate == "off", '[run] patience with evaluate = "off"',
         "nobody measures the model, so no version is better than another", '[run] evaluate = "clients"'),
        (local.momentum and local.optimizer != "sgd", f"[local] momentum with optimizer = {local.optimizer!r}",
         "momentum is sgd's", '[local] optimizer = "sgd"'),
        *_schedule(plan, "local"), *_schedule(plan, "server"),
        (not init, f"[run] init = {run.init!r} is not valid",
         "a first model is a file, a run's (run:ID), or made by a device (device)", '[run] init = "model.safetensors"'),
        (unknown, f"[run] keep = {run.keep!r} is not valid", f"unknown: {', '.join(sorted(unknown))}",
         '[run] keep = "last,best"'),
        (least > 1 and least != int(least), f"[cohort] min_updates = {least} is not valid",
         "below 1 it is a share, from 1 on a count", "[cohort] min_updates = 2"),
        (least > max(assigned, 1), f"[cohort] min_updates = {least:g} with clients = {clients}",
         f"no round could make a step, since it selects {assigned} at most",
         f"[cohort] min_updates = {clients}, or a share of those selected"),
    ]  # fmt: skip


def _schedule(plan: Sections, section: Literal["local", "server"]) -> list[Rule]:
    """Return the rules on the schedule of a learning rate: that of the clients or of the server."""
    rates, rounds = getattr(plan, section), plan.run.rounds
    over = rates.schedule_rounds
    return [
        (rates.lr_end and rates.schedule == "constant",
         f'[{section}] lr_end = {rates.lr_end:g} with schedule = "constant"',
         "a constant learning rate does not fall", f'[{section}] schedule = "cosine", or leave lr_end out'),
        (over is not None and not rates.moves, f"[{section}] schedule_rounds = {over} with a constant learning rate",
         "there is no schedule that could run over so many rounds", f'[{section}] schedule = "cosine"'),
        (rates.schedule != "constant" and not rates.lr_end and (over or rounds) < rounds,
         f"[{section}] schedule_rounds = {over} with [run] rounds = {rounds} and lr_end = 0",
         f"the learning rate is 0 from round {(over or 0) + 1} on",
         f"[{section}] lr_end = 0.1, or schedule_rounds = {rounds}"),
    ]  # fmt: skip


def _buffered(plan: Sections) -> list[Rule]:
    cohort, sync = plan.cohort, '[cohort] mode = "sync"'
    unlike = cohort.buffer != type(cohort)().buffer
    return [
        (cohort.mode == "sync" and unlike, f'[cohort] buffer = {cohort.buffer} with mode = "sync"',
         "it is of buffered runs; a round selects as many as [cohort] clients says", '[cohort] mode = "buffered"'),
        *together(cohort.mode == "buffered", '{} with mode = "buffered"', [
            (cohort.clients != "all", f"[cohort] clients = {json.dumps(cohort.clients)}",
             "no cohort is sampled: every idle device is selected",
             "[cohort] max_concurrency says how many are at work at once"),
            (cohort.over_select, f"[cohort] over_select = {cohort.over_select:g}",
             "a round waits for no device, so it selects none in excess", "leave over_select out"),
            (cohort.late == "drop", '[cohort] late = "drop"',
             "most replies arrive after the buffer in which their assignments began",
             "[cohort] max_staleness bounds how stale an update may be"),
            (cohort.min_updates > max(1, cohort.buffer), f"[cohort] min_updates = {cohort.min_updates:g}",
             f"a buffer is full with {cohort.buffer}", f"[cohort] min_updates = {cohort.buffer}, or a share"),
            ef21_rule(plan, "its sum is of all devices, and a buffer is the mean of the updates in it"),
            secure_rule(
                plan, "masks cancel out in a cohort that is known in advance; a buffer takes what comes first",
                sync),
            privacy_rule(
                plan,
                "what a run spends is counted for cohorts that are sampled, and here the quicker devices are in more "
                "often", sync),
        ]),
    ]  # fmt: skip


def _drawn(plan: Sections) -> list[Rule]:
    cohort = plan.cohort
    return together(cohort.selection != "uniform", f'[cohort] selection = "{cohort.selection}" with {{}}', [
        (cohort.mode == "buffered", 'mode = "buffered"',
         "no cohort is sampled: every idle device is selected, and fast ones are so more often",
         '[cohort] mode = "sync"'),
        (cohort.mode == "sync" and cohort.clients == "all", 'clients = "all"',
         "nothing is sampled where all devices are selected", "[cohort] clients = 0.5"),
        privacy_rule(plan, "what a run spends is counted for cohorts that are sampled with equal weights",
                     '[cohort] selection = "uniform"'),
    ])  # fmt: skip


def _in_groups(plan: Sections) -> list[Rule]:
    """Return rules on keys that make clients use all time until the deadline.

    With `max_concurrency` they would leave no time to the clients that get a free concurrency slot later.
    """
    cohort, hint = plan.cohort, "leave one of them out"
    in_groups = cohort.mode != "buffered" and cohort.max_concurrency
    return together(in_groups, f"[cohort] max_concurrency = {cohort.max_concurrency} in rounds, with {{}}", [
        (cohort.over_select, f"over_select = {cohort.over_select:g}",
         "one selects more devices at once than the target, the other holds assignments back", hint),
        (plan.local.partial, "[local] partial = true", "the first ones would train until the deadline", hint),
        (plan.local.steps == "auto", '[local] steps = "auto"', "the first ones would train until the deadline", hint),
        (plan.uplink.ladder, "[uplink] ladder", "the first ones would send what takes until the deadline", hint),
    ])  # fmt: skip


def _deadline(plan: Sections, measured: Mapping[str, DeviceTimes]) -> list[Rule]:
    deadline, times = plan.cohort.deadline_s, [one.total_s for one in measured.values()]
    if deadline == "auto" or not times:
        return []
    quickest = min(times)
    return [
        (quickest > deadline, f"[cohort] deadline_s = {deadline:g} is under what every device needs",
         f"the quickest took {quickest:.1f} s at its best", f"[cohort] deadline_s = {quickest * 2:.0f}"),
    ]  # fmt: skip


def _overlap(plan: Sections) -> list[Rule]:
    """Return rules on keys beside `[local] overlap`: an update is still on its way when the next round trains.

    Scaffold and feddyn refuse overlap themselves.
    """
    without = "leave [local] overlap out"
    return together(plan.local.overlap, "{} with [local] overlap", [
        (plan.cohort.mode == "buffered", '[cohort] mode = "buffered"',
         "nobody waits for a round there, so there is nothing to train on through", without),
        (plan.cohort.max_concurrency > 0, f"[cohort] max_concurrency = {plan.cohort.max_concurrency}",
         ("a device that waits for a concurrency slot is selected in mid-round, and here a round's assignments are "
          "sent ahead of it"), "leave [cohort] max_concurrency out"),
        (plan.local.partial, "[local] partial = true",
         "how long sending takes is not known while an earlier update is still on its way", "[local] partial = false"),
        (plan.local.steps == "auto", '[local] steps = "auto"',
         "a device's pace is measured from assignment to reply, and here an assignment waits for the one before it",
         "[local] steps = 20"),
        ef21_rule(plan, "the next change is made before it is known whether the aggregator's sum holds the last one"),
        secure_rule(plan, "masks are agreed on for one round at a time, and here several are under way", without),
        privacy_rule(
            plan,
            "what a run spends is counted for cohorts sampled in each round; a client that trains on takes its last "
            "update with it", without),
    ])  # fmt: skip


def _personal(plan: Sections) -> list[Rule]:
    """Return rules on keys beside `[local] personal_layers`: a part of the model that no one but its client has."""
    without = "leave [local] personal_layers out"
    return together(plan.local.personal_layers, "{} with [local] personal_layers", [
        (plan.run.evaluate == "holdout", '[run] evaluate = "holdout"',
         "the operator's process has no client's personal layers, so it would measure a model that no client uses",
         '[run] evaluate = "clients"'),
        (plan.privacy.mode == "example", '[privacy] mode = "example"',
         "the gradient of a record is clipped and noised as a whole, and the noise is for the shared tensors", without),
    ])  # fmt: skip


def _unused(plan: Sections) -> list[Rule]:
    """Return rules on keys whose value has no effect in this plan, in the order of the plan's sections."""
    cohort, uplink, off, asked = plan.cohort, plan.uplink, plan.run.evaluate == "off", plan.run.evaluate == "clients"
    sync, whole, one_step = cohort.mode == "sync", not plan.downlink.compressed, plan.local.steps == 1
    uncoded = {*uplink.codecs, *uplink.layers.values()} == {IDENTITY}
    kept = set(plan.run.keep.split(","))
    found: list[Rule] = []
    for place, key, useless, where, why, hint in (
        ("run", "metric", off, '[run] evaluate = "off"',
         "nobody measures the model, so no version is the best", '[run] evaluate = "clients"'),
        ("run", "evaluate_every", off, '[run] evaluate = "off"',
         "nobody measures the model, so there is nothing between two evaluations", '[run] evaluate = "clients"'),
        ("run", "evaluate_wait_s", plan.run.evaluate != "holdout", f'[run] evaluate = "{plan.run.evaluate}"',
         "the clients evaluate in their rounds, or nobody does", '[run] evaluate = "holdout"'),
        ("run", "fraction_evaluate", not asked, f'[run] evaluate = "{plan.run.evaluate}"',
         "no client evaluates, so there is no share of them that does", '[run] evaluate = "clients"'),
        ("local", "momentum", one_step, "steps = 1",
         "each round begins with no velocity, so its first step is the gradient's alone", "[local] steps = 5"),
        ("local", "prox", one_step, "steps = 1",
         "it pulls toward the round's model, and the only step begins there", "[local] steps = 5"),
        ("cohort", "over_select", sync and cohort.clients == "all", 'clients = "all"',
         "all online devices are selected, so none is left to select in excess", "[cohort] clients = 0.5"),
        ("cohort", "staleness_exponent", sync and cohort.late == "drop", 'late = "drop"',
         "a late reply is dropped, so none counts less for being late", '[cohort] late = "aggregate"'),
        ("uplink", "feedback_decay", uncoded, f'codec = "{IDENTITY}"',
         "the whole update is sent, so no residual is left that could decay", "[uplink] codec = 'topk(0.05) > int8'"),
        ("downlink", "full_every", whole, f'codec = "{IDENTITY}"',
         "every model travels in full", "[downlink] codec = 'int8'"),
        ("downlink", "log_rounds", whole, f'codec = "{IDENTITY}"',
         "every model travels in full, so no changes are kept for devices that are behind",
         "[downlink] codec = 'int8'"),
    ):  # fmt: skip
        section = getattr(plan, place)
        given = getattr(section, key)
        unlike = given != type(section).model_fields[key].default
        what = f"[{place}] {key} = {json.dumps(given)} with {where}"
        found.append((useless and unlike, what, why, f"{hint}, or leave {key} out"))
    left_out = min({"last", "best"} - kept, default="")
    return [
        *found,
        (kept < {"last", "best"}, f"[run] keep = {plan.run.keep!r} leaves out {left_out!r}",
         "the last version and the best are kept in every run", '[run] keep = "last,best", or "all"'),
    ]  # fmt: skip
