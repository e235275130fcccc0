"""These rules refuse plans with secure aggregation whose other keys would break it: the aggregator sees sums only.

A key is refused if it needs a single update or a fact about one client, if it lets one client's message differ in form
from another's, or if it adds or removes an update after the survivors are fixed. Overlap, buffered rounds,
`durability = "exit"`, SCAFFOLD and FedDyn have such rows of their own in `plan_rules` and `plan_codec_rules`.
"""

from __future__ import annotations

import json
import math

from thinwire.core.errors import PlanError
from thinwire.core.plan_codec_rules import CLASSIC, Rule, ef21_rule, together
from thinwire.core.plan_schema import Sections, UplinkSection
from thinwire.core.plan_values import SecureSection
from thinwire.core.score_histogram import MAX_LETTERS, MAX_METRIC_LETTERS, TRAINED, names_of
from thinwire.core.secure_numbers import check_numbers

FORM = "[secure] enabled = true with {}"
STEPS = "[local] steps = 20"


def secure_rules(plan: Sections) -> list[Rule]:
    """Return the rules of plans with secure aggregation."""
    parts = (_secure_rounds, work_rules, _secure_lattice, _secure_evaluation)
    rules = together(plan.secure.enabled, FORM, [rule for part in parts for rule in part(plan)])
    return [*rules, *together(plan.secure.enabled, "{}", _secure_numbers(plan))]  # their texts are whole


def _secure_rounds(plan: Sections) -> list[Rule]:
    """Return rules on who takes part in a round, and when: the roster is closed when the first secrets are shared."""
    cohort, secure = plan.cohort, plan.secure
    return [
        (cohort.late == "aggregate", '[cohort] late = "aggregate"',
         "the masks of an update cancel only in the sum of its own round; beside that sum it would reveal one update",
         '[cohort] late = "drop"'),
        (cohort.max_concurrency, f"[cohort] max_concurrency = {cohort.max_concurrency}",
         "all clients of a round stand on one roster, and a client that is selected later has no share of the others",
         "leave [cohort] max_concurrency out"),
        (cohort.selection != "uniform", f'[cohort] selection = "{cohort.selection}"',
         "it needs the times of training and sending of each client, and a masked reply has none",
         '[cohort] selection = "uniform"'),
        (cohort.deadline_s == "auto", '[cohort] deadline_s = "auto"',
         "it needs the times of training and sending of each client, and a masked reply has none",
         "[cohort] deadline_s = 600"),
        (cohort.max_weight != "none" and secure.weight_max > 1,
         f"[cohort] max_weight = {json.dumps(cohort.max_weight)}",
         "it is in medians of the clients' examples, and the aggregator sees only the sum of these",
         '[cohort] max_weight = "none"; [secure] weight_max bounds each client'),
        (plan.server.reduce != "mean", f"[server] reduce = {plan.server.reduce!r}",
         "it compares single updates, and the aggregator sees only their sum", '[server] reduce = "mean"'),
        (plan.run.init == "device", '[run] init = "device"',
         "the model that one device makes would leave it in the clear, and may depend on its data",
         '[run] init = "model.safetensors", or leave init out'),
        (secure.graph == "k-regular" and secure.adversary == "malicious",
         '[secure] graph = "k-regular" and adversary = "malicious"',
         "the random order of the graph follows from all keys, and a malicious aggregator can try keys of corrupt ones",
         '[secure] graph = "complete"'),
    ]  # fmt: skip


def work_rules(plan: Sections) -> list[Rule]:
    """Return rules on local training: all clients of a round have the same work, so that one divisor is right."""
    local = plan.local
    epochs = "[local] epochs" if local.epochs is not None else "one epoch a round ([local] steps is not given)"
    return [
        (local.steps is None, epochs,
         "the aggregator would have to know each client's steps, and they tell how many examples it has", STEPS),
        (local.steps == "auto", '[local] steps = "auto"',
         "the aggregator would have to know each client's steps, and they tell how fast it is", STEPS),
        (local.partial, "[local] partial = true",
         "a client that stops early makes other steps than the rest, and the aggregator would have to know how many",
         "[local] partial = false, or a longer [cohort] deadline_s"),
        (local.buffers == "average", '[local] buffers = "average"',
         "the statistics of each client would travel in the clear: the masks cover trained parameters",
         '[local] buffers = "local", or "frozen"'),
    ]  # fmt: skip


def _secure_lattice(plan: Sections) -> list[Rule]:
    """Return rules on the uplink: the lattice of [secure] is its codec, because only integers of one grid add up."""
    uplink, secure, rounds = plan.uplink, plan.secure, plan.run.rounds
    same = "masks cancel only where all clients send the same coordinates, rounded to the same grid"
    return [
        (uplink.codec != UplinkSection().codec, f"[uplink] codec = {uplink.codec!r}", same,
         "leave [uplink] codec out; [secure] bits and support say how an update is compressed"),
        (uplink.layers, "[uplink.layers]", same, "leave [uplink.layers] out"),
        (uplink.ladder, "[uplink] ladder", f"{same}; with a ladder each device has its own codec",
         "leave [uplink] ladder out; [secure] bits and support are for all"),
        (uplink.warmup is not None, "[uplink] warmup", f"{same}; [secure] support says how many, in every round",
         "leave [uplink] warmup out"),
        (uplink.momentum > 0, "momentum correction in [uplink]",
         "it clears the momentum where a client's own codec sent values, and here all send the same coordinates",
         "[local] momentum"),
        ef21_rule(plan, "the aggregator would go on from the last update of each client, which it never sees", CLASSIC),
        (secure.adversary == "malicious" and (uplink.feedback == "classic" or uplink.feedback_decay < 1),
         '[uplink] feedback and adversary = "malicious"',
         "a malicious aggregator can choose rounds and models in which one client's residual is all that is summed",
         "leave [uplink] feedback and feedback_decay out"),
        (secure.support * rounds < 1, f"[secure] support = {secure.support:g} and [run] rounds = {rounds}",
         "each round sums another window of the coordinates, and some would never be summed",
         f"[secure] support = {math.ceil(1000 / rounds) / 1000:g}"),
    ]  # fmt: skip


def _secure_evaluation(plan: Sections) -> list[Rule]:
    """Return rules on metrics: those that [secure] names are summed under masks, the others never leave a device."""
    run, metrics, histograms = plan.run, plan.secure.metrics, plan.secure.histograms
    measured = {*(name for name in metrics if not name.startswith(TRAINED)), *names_of(histograms)}
    needed = [] if run.evaluate != "clients" else [run.metric, *([run.target.metric] if run.target else [])]
    missing = sorted({metric for metric in needed if metric not in measured})
    odd = _odd_names(plan.secure)
    example = ", ".join(f"{metric} = {10.0 if metric == 'loss' else 1.0}" for metric in missing)
    return [
        (missing, f'[run] evaluate = "clients" and no {" or ".join(missing)} in [secure] metrics',
         "the metrics of one client would tell what the sum of its update hides",
         f'[secure] metrics = {{ {example} }}, each with its bound, or [run] evaluate = "off"'),
        (run.fraction_evaluate < 1 and run.evaluate == "clients",
         f"[run] fraction_evaluate = {run.fraction_evaluate:g}",
         "each survivor's metrics are in the sum of its round, and a client without any would be a sum short",
         "leave [run] fraction_evaluate out"),
        (measured and run.evaluate != "clients",
         f'[secure] {"histograms" if histograms else "metrics"} and [run] evaluate = "{run.evaluate}"',
         "no client evaluates, so there is nothing to sum",
         '[run] evaluate = "clients", or only metrics of training: train/NAME'),
        (odd, f"[secure] with a metric or a histogram of the name {odd[0][:80]!r}" if odd else "",
         "each name is there once, is printable, has at most 64 letters, and is not that of another number in the sum",
         'metrics = { loss = 10.0, "train/loss" = 10.0 } and histograms = ["sick"], which is sick_auc and sick_f1'),
    ]  # fmt: skip


def _odd_names(secure: SecureSection) -> list[str]:
    """Return the names of metrics and histograms that two numbers of a sum would have, or that no metric has."""
    own, made = {"weight", "fits"}, set(names_of(secure.histograms))
    bins = tuple(f"{name}/{label}/" for name in secure.histograms for label in (0, 1))
    odd = [name for name in secure.metrics if name in own | made or name.endswith("/count") or name.startswith(bins)]
    odd += [name for name in secure.histograms if "/" in name or secure.histograms.count(name) > 1]
    names = [*secure.metrics, *secure.histograms]
    most = {**dict.fromkeys(secure.metrics, MAX_METRIC_LETTERS), **dict.fromkeys(secure.histograms, MAX_LETTERS)}
    return odd + [name for name in names if not (0 < len(name) <= most[name] and name.isprintable())]


def _secure_numbers(plan: Sections) -> list[Rule]:
    """Return the rules on shares, and those on numbers if the plan says how many clients a round selects.

    Otherwise the aggregator and each client check the numbers (`check_numbers`) when they know how many are selected.
    """
    cohort, secure = plan.cohort, plan.secure
    if isinstance(cohort.clients, int):
        selected = math.ceil(cohort.clients * (1 + cohort.over_select))
        try:
            check_numbers(secure, selected, cohort.clients)
        except PlanError as error:
            return [(True, error.what, error.why, error.hint)]
        return []
    cut = 0.0 if cohort.clients == "all" else cohort.over_select / (1 + cohort.over_select)
    times = 2 if secure.adversary == "malicious" else 1
    shares = f"max_corrupt = {secure.max_corrupt:g} and max_dropout = {secure.max_dropout:g}"
    return [
        (secure.max_corrupt + times * secure.max_dropout >= 1, f"[secure] {shares}",
         f'adversary = "{secure.adversary}" needs max_corrupt + {times} max_dropout below 1'.replace(" 1 max", " max"),
         f"[secure] max_dropout = {(1 - secure.max_corrupt) / (2 * times):.2g}"),
        (cut > secure.max_dropout,
         f"[cohort] over_select = {cohort.over_select:g} and max_dropout = {secure.max_dropout:g}",
         f"a round closes when its target is met, and counts the other {cut:.0%} of the selected clients as drop-outs",
         f"[secure] max_dropout = {math.ceil(100 * cut) / 100:g} and more for real drop-outs, or less over_select"),
    ]  # fmt: skip


def without_secure(plan: Sections) -> list[Rule]:
    """Return the rules on keys of [secure], which have no effect without secure aggregation."""
    secure = plan.secure
    return [
        (not secure.enabled and getattr(secure, key) != field.get_default(call_default_factory=True),
         f"[secure] {key} = {json.dumps(getattr(secure, key))} without enabled = true",
         "it is of secure aggregation, and the plan sums updates in the clear",
         f"[secure] enabled = true, or leave {key} out")
        for key, field in type(secure).model_fields.items() if key != "enabled"
    ]  # fmt: skip
