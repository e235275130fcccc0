"""These rules refuse plans whose other keys would end the amplification by `[privacy] sampling_rate`.

With Poisson sampling a coin of its own decides for each device whether it is in a round. A released model tells less of
a client to those who do not know the coins. So the cost of a round is smaller (`privacy.accounting`, `Release.rate`),
under three conditions, of which each row here keeps one:

- Nothing but the coins decides who is in a round: no number of clients, no speed, no link, no equipment, no bound.
- Nobody learns their result: not the clients, and not from what is shown of a round.
- Whatever the sample is, its round makes a step: a round without one would tell that the sample was small.

Over-selection, replacements, buffered rounds and concurrency slots have rows for all private plans
(`plan_protection_rules`). What the aggregator does for these conditions: `server/sampled_mode.py`.
"""

from __future__ import annotations

import json

from thinwire.core.plan_codec_rules import Rule
from thinwire.core.plan_schema import Sections


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
