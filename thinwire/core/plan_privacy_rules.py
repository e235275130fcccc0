"""These rules refuse plans with differential privacy whose other keys would release something beside the noised sum.

A key is refused if a client could count twice in one sum, if one client could displace another, or if something else
that depends on data would be released: a metric, a data set's size, a time of training.

`sampled_rules` keep the amplification by `[privacy] sampling_rate`. With Poisson sampling a coin of its own decides for
each device whether it is in a round. A released model tells less of a client to those who do not know the coins. So the
cost of a round is smaller (`privacy.accounting`, `Release.rate`), under three conditions, of which each row keeps one:

- Nothing but the coins decides who is in a round: no number of clients, no speed, no link, no equipment, no bound.
- Nobody learns their result: not the clients, and not from what is shown of a round.
- Whatever the sample is, its round makes a step: a round without one would tell that the sample was small.
"""

from __future__ import annotations

import json

from thinwire.core.errors import CodecError
from thinwire.core.plan_codec_rules import CodecBook, Rule, ef21_rule, resolved_feedback, together
from thinwire.core.plan_schema import IDENTITY, Sections
from thinwire.core.plan_secure_rules import work_rules
from thinwire.core.privacy_numbers import CLIP_RANGE

PRIVATE = "[privacy] mode = {}"


def privacy_rules(plan: Sections, codecs: CodecBook) -> list[Rule]:
    """Return the rules of plans with differential privacy."""
    mode, records = plan.privacy.mode, plan.privacy.records
    form = f"{PRIVATE.format(json.dumps(mode))} with {{}}"
    parts = [*_privacy_noise(plan), *sampled_rules(plan), *_private_rounds(plan), *_private_work(plan), *_tree(plan)]
    parts.append(
        (mode != "example" and records is not None, f"records = {records}",
         "only steps of training sample records", 'leave records out, or [privacy] mode = "example"'),
    )  # fmt: skip
    if mode in ("local", "example"):
        parts += _on_the_device(plan, codecs) + (_private_steps(plan) if mode == "example" else [])
    else:
        parts += _private_sums(plan)
        parts += _distributed(plan) if mode == "distributed" else [*_central(plan), *_sizes(plan, codecs)]
    return together(mode != "off", form, parts)


def _privacy_noise(plan: Sections) -> list[Rule]:
    """Return rules on the amount of noise: it follows from one key, and a client's norm is bounded by another."""
    privacy, run = plan.privacy, plan.run
    given = (privacy.noise_multiplier is not None, privacy.target_epsilon is not None)
    most, clients = privacy.max_participations, plan.cohort.clients
    fewest = clients if isinstance(clients, int) else FEWEST
    return [
        (privacy.clip is None, "no [privacy] clip", "noise hides an update only if its norm has a bound",
         "[privacy] clip = 1.0"),
        (privacy.clip is not None and not CLIP_RANGE[0] <= privacy.clip <= CLIP_RANGE[1], f"clip = {privacy.clip}",
         "outside of 2^-60 to 2^60 float32 cannot bound a norm", "[privacy] clip = 1.0"),
        (given == (False, False), "neither noise_multiplier nor target_epsilon",
         "it is not known how much noise to add", "[privacy] noise_multiplier = 1.0"),
        (given == (True, True), "noise_multiplier and target_epsilon", "each of them says how much noise is added",
         "leave one of them out; budget stops a run at an epsilon"),
        (privacy.noise_multiplier is not None and privacy.noise_multiplier > MAX_NOISE,
         f"noise_multiplier = {privacy.noise_multiplier}",
         f"above {MAX_NOISE:g} nothing but noise is released", "[privacy] noise_multiplier = 1.0"),
        (privacy.noise_multiplier is not None and privacy.noise_multiplier < LEAST_NOISE,
         f"noise_multiplier = {privacy.noise_multiplier}",
         f"below {LEAST_NOISE:g} a round costs an epsilon in the thousands, which protects nobody",
         "[privacy] noise_multiplier = 1.0"),
        (privacy.mode != "example" and privacy.delta >= 1 / fewest, f"delta = {privacy.delta:g}",
         f"a release that publishes the data of one of {fewest} clients would satisfy it",
         f"[privacy] delta = {1 / (10 * fewest):.2g}"),
        (max(privacy.target_epsilon or 0, privacy.budget or 0) > MAX_EPSILON,
         f"an epsilon of {max(privacy.target_epsilon or 0, privacy.budget or 0):g}",
         f"above {MAX_EPSILON:g} it protects nobody", "[privacy] target_epsilon = 8.0, or budget = 8.0"),
        (privacy.target_epsilon is not None and privacy.budget is not None
         and privacy.budget < privacy.target_epsilon,
         f"target_epsilon = {privacy.target_epsilon} and budget = {privacy.budget}",
         "the run would stop before its last round", f"[privacy] budget = {privacy.target_epsilon}"),
        (privacy.adaptive and not isinstance(clients, int),
         f"adaptive = true and [cohort] clients = {json.dumps(clients)}",
         "the noise of the count that the clip follows is a share of the clients of a round", "[cohort] clients = 10"),
        (privacy.adaptive and privacy.clipping != "flat", f'adaptive = true and clipping = "{privacy.clipping}"',
         "one count does not tell in which tensor the updates were too long", "leave one of them out"),
        (most is not None and most > run.rounds, f"max_participations = {most} and [run] rounds = {run.rounds}",
         "no client takes part in more rounds than there are", "leave max_participations out"),
    ]  # fmt: skip


MAX_NOISE, LEAST_NOISE, MAX_EPSILON = 1000.0, 0.01, 100.0
FEWEST = 100  # clients for which delta must be small enough if the plan does not say how many there are


def _private_sums(plan: Sections) -> list[Rule]:
    """Return rules of noise in a sum: a client counts once in it, and no arrival displaces another client's."""
    cohort = plan.cohort
    return [
        (cohort.late == "aggregate", '[cohort] late = "aggregate"',
         "a client that is late counts twice in the sum of the next round, and the noise hides one update",
         '[cohort] late = "drop"'),
        (cohort.over_select, f"[cohort] over_select = {cohort.over_select:g}",
         "a round that closes with enough updates leaves out others for them, so one client changes two updates",
         "leave [cohort] over_select out"),
    ]  # fmt: skip


def _private_rounds(plan: Sections) -> list[Rule]:
    """Return rules on rounds: nothing that depends on data is released beside the noised updates."""
    cohort = plan.cohort
    return [
        (cohort.max_concurrency, f"[cohort] max_concurrency = {cohort.max_concurrency}",
         "who is selected later depends on how long others trained", "leave [cohort] max_concurrency out"),
        (cohort.deadline_s == "auto", '[cohort] deadline_s = "auto"',
         "it follows the times of training, and these may tell of the data", "[cohort] deadline_s = 600"),
        (cohort.max_weight != type(cohort)().max_weight, f"[cohort] max_weight = {json.dumps(cohort.max_weight)}",
         "all clients count the same", "leave [cohort] max_weight out"),
        (plan.downlink.compressed, f"[downlink] codec = {plan.downlink.codec!r}",
         "this version keeps no compressed change apart from the noised model that it was made of",
         f"[downlink] codec = '{IDENTITY}'"),
        (plan.run.evaluate == "clients", '[run] evaluate = "clients"',
         "metrics of the clients' data would be released beside the model, without noise", '[run] evaluate = "off"'),
        (plan.run.evaluate == "holdout", '[run] evaluate = "holdout"',
         "this version shows no metric of a private run, and hides its models until their noise is booked",
         '[run] evaluate = "off", and thinwire runs model to evaluate a released one'),
        (plan.run.init == "device", '[run] init = "device"',
         "the first model would be that of one device, without noise",
         '[run] init = "model.safetensors", or leave init out'),
    ]  # fmt: skip


def _private_work(plan: Sections) -> list[Rule]:
    """Return the rules on local training that secure aggregation has too: a client tells no fact of its data."""
    return [] if plan.secure.enabled else work_rules(plan)


def _sizes(plan: Sections, codecs: CodecBook) -> list[Rule]:
    """Return a rule for each codec whose frames tell something of the update by their size."""
    found = list[Rule]()
    for spec in sorted({plan.uplink.codec, *plan.uplink.ladder, *plan.uplink.layers.values()}):
        try:
            codecs.require_fixed_size(spec)
        except CodecError as error:
            found.append((True, f"[uplink] codec = {spec!r}", f"{error.what}: {error.why}", error.hint))
    return found


def _tree(plan: Sections) -> list[Rule]:
    """Return rules on tree aggregation: noise cancels between rounds only in sums that all rounds enter alike."""
    privacy, cohort, rounds = plan.privacy, plan.cohort, plan.run.rounds
    tree, apart, restart = privacy.mechanism == "tree", privacy.min_separation, privacy.restart_every
    clients = json.dumps(cohort.clients)
    return [
        (tree and privacy.mode != "central", 'mechanism = "tree"',
         "the noise of a prefix is taken off in a later round, by one party that has kept its keys",
         '[privacy] mode = "central"'),
        (not tree and restart is not None, f"restart_every = {restart}", "there is no tree to restart",
         '[privacy] mechanism = "tree"'),
        (not tree and apart > 1, f"min_separation = {apart}",
         "the cost of rounds with noise of their own does not depend on how far apart they are",
         '[privacy] mechanism = "tree"'),
        (tree and restart is not None and restart > rounds, f"restart_every = {restart} and [run] rounds = {rounds}",
         "no tree has more rounds than the run", "leave restart_every out"),
        (tree and apart > rounds, f"min_separation = {apart} and [run] rounds = {rounds}",
         "no client could take part twice", "[privacy] max_participations = 1"),
        (tree and not isinstance(cohort.clients, int), f'mechanism = "tree" and [cohort] clients = {clients}',
         "the sums of all rounds are divided by one number, or their noise would not cancel", "[cohort] clients = 10"),
        (tree and plan.server.optimizer not in LINEAR,
         f'mechanism = "tree" and [server] optimizer = "{plan.server.optimizer}"',
         "it divides each step by what it has seen, and noise cancels only where steps add up",
         '[server] optimizer = "fedavg" or "fedavgm"'),
        (tree and plan.server.moves, 'mechanism = "tree" and a [server] schedule',
         "the noise of a round cancels in the next one only where both count the same",
         "leave [server] schedule and lr_warmup out"),
        (tree and privacy.adaptive, 'mechanism = "tree" and adaptive = true',
         "integers of two clips are of two grids, and do not add up to the sum of a node",
         "leave [privacy] adaptive out"),
    ]  # fmt: skip


LINEAR = ("fedavg", "fedavgm")  # server optimizers whose step is a fixed combination of the changes so far


def _central(plan: Sections) -> list[Rule]:
    privacy = plan.privacy
    return [
        (plan.secure.enabled, "[secure] enabled = true",
         "the aggregator has to see each update to bound its norm", '[privacy] mode = "distributed"'),
        (privacy.mechanism == "skellam", 'mechanism = "skellam"',
         "one sum gets the noise of one source, for which the discrete Gaussian has the smaller epsilon",
         "leave [privacy] mechanism out"),
        (plan.server.reduce != "mean", f"[server] reduce = {plan.server.reduce!r}",
         "the noise fits the sum of clipped updates", '[server] reduce = "mean"'),
        ef21_rule(plan, "the aggregator would go on from the last update of each client, which has no noise"),
        (plan.run.algorithm != "fedavg", f'[run] algorithm = "{plan.run.algorithm}"',
         "it keeps sums over all rounds that are no part of what is noised", '[run] algorithm = "fedavg"'),
    ]  # fmt: skip


def _on_the_device(plan: Sections, codecs: CodecBook) -> list[Rule]:
    """Return rules on noise that each client adds to what it learned: what follows it needs no protection.

    What a codec leaves out of a noised update has noise too, so a residual of it breaks no guarantee.
    """
    feedback = resolved_feedback(plan.uplink, codecs)
    own = "[uplink] feedback = 'none', with a codec that needs no feedback"
    return [
        (plan.secure.enabled, "[secure] enabled = true",
         "the noise is in an update before it leaves its client; under masks less noise is enough",
         'leave [secure] out, or [privacy] mode = "distributed"'),
        (plan.server.reduce != "mean", f"[server] reduce = {plan.server.reduce!r}",
         "all noised updates count the same", '[server] reduce = "mean"'),
        ef21_rule(plan, "its sum counts a client by its number of examples, which no client tells here", own),
        (plan.privacy.adaptive, "adaptive = true",
         "no noised count of the norms leaves a device beside its update", "leave adaptive out"),
        (plan.privacy.mode == "local" and feedback == "classic", f"[uplink] feedback = {plan.uplink.feedback!r}",
         "what a codec leaves out of a noised update is nearly all noise, and would be sent on top of the next noise",
         own),
    ]  # fmt: skip


def _private_steps(plan: Sections) -> list[Rule]:
    """Return rules on training in which each step is noised: what one record changes is one clipped gradient."""
    local, privacy, batch = plan.local, plan.privacy, plan.local.batch
    records = privacy.records or 0
    return [
        (not records, "no [privacy] records", "a record is in a batch with a probability that no data may decide",
         f"[privacy] records = {100 * batch}, about as many as a device has"),
        (0 < records < batch, f"records = {records} and [local] batch = {batch}",
         "a record is in a batch with the probability batch / records, which is at most 1",
         f"[privacy] records = {batch}, or a smaller batch"),
        (records and privacy.delta >= 1 / records, f"delta = {privacy.delta:g} and records = {records}",
         f"a release that publishes one of {records} records would satisfy it",
         f"[privacy] delta = {1 / (10 * max(records, 1)):.2g}"),
        (privacy.mechanism == "skellam", 'mechanism = "skellam"',
         "a step gets the noise of one source, for which the discrete Gaussian has the smaller epsilon",
         "leave [privacy] mechanism out"),
        (privacy.clipping != "flat", f'clipping = "{privacy.clipping}"',
         "the gradient of each record is clipped as a whole", "leave clipping out"),
        (local.accumulate > 1, f"[local] accumulate = {local.accumulate}",
         "the batch of a step is sampled and noised at once", "[local] batch = the product of both"),
        (local.clip_grad is not None, f"[local] clip_grad = {local.clip_grad}",
         "the gradient of each record is clipped before the noise", "leave clip_grad out; [privacy] clip is its bound"),
    ]  # fmt: skip


def _distributed(plan: Sections) -> list[Rule]:
    """Return rules on noise that clients add: how much each adds follows from numbers that all know before."""
    secure, cohort = plan.secure, plan.cohort
    return [
        (not secure.enabled, "[secure] enabled = false",
         "the noise of one client alone hides nothing: it has to be in a sum before anyone sees it",
         '[secure] enabled = true, or [privacy] mode = "central"'),
        (not isinstance(cohort.clients, int), f"[cohort] clients = {json.dumps(cohort.clients)}",
         "how much noise a client adds follows from the number of clients in a sum", "[cohort] clients = 10"),
        (not secure.rotate, "[secure] rotate = false",
         "without a rotation one coordinate may be as large as the clip, and a sum would need twice the bits",
         "leave [secure] rotate out"),
        (secure.clip != "auto", f"[secure] clip = {secure.clip}", "[privacy] clip is the bound of a client's update",
         "leave [secure] clip out"),
        (secure.bits != type(secure)().bits, f"[secure] bits = {secure.bits}",
         "the grid and its bits follow from the noise (thinwire privacy plan)", "leave [secure] bits out"),
        (secure.weight_max > 1, f"[secure] weight_max = {secure.weight_max}",
         "all clients count the same: a weight tells how many examples a client has", "leave weight_max out"),
        (plan.uplink.feedback not in ("auto", "none"), f'[uplink] feedback = "{plan.uplink.feedback}"',
         "the clip is far below the norm of an update, so a residual would hold most of each and grow",
         "leave [uplink] feedback out"),
        (bool(secure.metrics), "[secure] metrics", "their sums would be released without noise", "leave metrics out"),
        (bool(secure.histograms), "[secure] histograms", "their sums would be released without noise",
         "leave histograms out"),
    ]  # fmt: skip


def without_privacy(plan: Sections) -> list[Rule]:
    """Return the rules on keys of [privacy], which have no effect without a mode."""
    privacy = plan.privacy
    return [
        (privacy.mode == "off" and getattr(privacy, key) != field.get_default(call_default_factory=True),
         f"[privacy] {key} = {json.dumps(getattr(privacy, key))} without a mode",
         "it is of differential privacy, and nothing is noised", f'[privacy] mode = "central", or leave {key} out')
        for key, field in type(privacy).model_fields.items() if key != "mode"
    ]  # fmt: skip


def sampled_rules(plan: Sections) -> list[Rule]:
    """Return the rules of plans with Poisson sampling of clients; none without it."""
    privacy, cohort, first = plan.privacy, plan.cohort, type(plan.cohort)()
    if (rate := privacy.sampling_rate) is None:
        return []
    form = f"sampling_rate = {rate:g} and {{}}"
    coins = "the coins alone decide who is in a round: any other reason to be in it would end the amplification"
    return [
        (privacy.mode != "central", f"sampling_rate = {rate:g}",
         "a smaller epsilon holds only if nobody learns who was sampled, and here the clients learn it",
         '[privacy] mode = "central", or leave sampling_rate out'),
        (cohort.clients != first.clients, form.format(f"[cohort] clients = {json.dumps(cohort.clients)}"), coins,
         "leave [cohort] clients out"),
        (cohort.min_updates != first.min_updates, form.format(f"[cohort] min_updates = {cohort.min_updates:g}"),
         "a small or empty sample is released as noise: a round without a step would tell that its sample was small",
         "leave [cohort] min_updates out"),
        (cohort.selection != first.selection, form.format(f'[cohort] selection = "{cohort.selection}"'), coins,
         "leave [cohort] selection out"),
        (cohort.requires != first.requires, form.format("[cohort.requires]"), coins, "leave [cohort.requires] out"),
        (plan.run.priority != type(plan.run).model_fields["priority"].default,
         form.format(f"[run] priority = {plan.run.priority:g}"), coins, "leave [run] priority out"),
        (privacy.max_participations, form.format(f"max_participations = {privacy.max_participations}"),
         "each client pays for every round, sampled or not, and one at its bound would have no coin any more",
         "leave max_participations out"),
        (privacy.mechanism == "tree", form.format('mechanism = "tree"'),
         "the cost of a tree counts on rounds of one client that are far apart, and coins keep none apart",
         "leave mechanism out"),
        (privacy.adaptive, form.format("adaptive = true"),
         "how many updates are within the clip is counted among a number of clients, and a sample has none",
         "leave adaptive out"),
        (bool(plan.uplink.ladder), form.format("[uplink] ladder"),
         "the codec of most clients of a round is shown, and it would tell who they are", "leave [uplink] ladder out"),
    ]  # fmt: skip
