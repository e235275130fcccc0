"""Tree aggregation, the noise of DP-FTRL: not each round gets noise of its own, but each sum of all rounds so far.

Kairouz, McMahan, Song, Thakkar, Thakurta and Xu (2021), "Practical and Private (Deep) Learning without Sampling or
Shuffling". The rounds of a tree are its positions 1, 2, .., n. A node is a block of 2^l positions that ends at a
multiple of 2^l. Of the blocks that end at position e only one is used: the block of lsb(e) positions, where lsb(e) is
the lowest set bit of e. Its noise z(e) is drawn once. The positions 1 .. t are the disjoint blocks `nodes(t)`:

    S(t) = x(1) + .. + x(t)           the sum of the clipped updates of these rounds, in integers
    N(t) = sum of z(e), e in nodes(t)     at most log2(t) + 1 of them; N(0) = 0

Round t adds x(t) + N(t) - N(s) to the model, where s is the last round before it that made a step (x = 0 in a round
without a step). All these increments up to round t sum to S(t) + N(t), exactly, because N(s) cancels. So:

1. An increment is the difference of two noised prefixes S + N, and a noised prefix is the sum of noised nodes. Whatever
   is released is computed from noised nodes. Noise of the increments is correlated, and no cost is counted for it.
2. To resume, the aggregator needs nothing but the model and the noise of the nodes in `nodes(s)`. It keeps no sum
   without noise, and of the noise the keys from which it is drawn again (`server/tree_noise.py`).

Cost of a client with p participations. Its vector has a norm of at most D in each. A node is released when its last
place is over or later, so its other inputs follow from what was released before. Given that, its sum moves by at most
m D if the client took part m times in the block. So its Rényi divergence at order alpha is at most m^2 times that of
one participation, alpha D^2 / (2 sigma^2), and those of all nodes add (adaptive composition).

A participation is in at most one block of each length 2^l <= n. If two participations of a client are at least b rounds
apart, and there are at most k, a block has m <= c(l) = min(k, ceil(2^l / b)) of them. So the blocks of one length cost
at most sum m^2 <= c(l) sum m <= c(l) p, and all blocks at most p times the sum of c(l) over the lengths. Each
participation is booked with this factor when its round opens. What is booked is never too little, whenever the run ends
and wherever trees begin, because nothing but the length of a tree, b, k and p enters.

The factor is exact for b >= n, where it is the number of lengths: p trees, and the client in place 1 of each. For b < n
and n / b participations it is what the worst pattern costs if all blocks are released (n and b powers of two). Those
that begin after an odd multiple of their length are not: the worst pattern of the others costs 0.59 to 0.95 of it (n up
to 512, n / 8 <= b < n). So the estimator of Honaker (2015), which uses all blocks for less noise, would cost no more.

No accepted bound is tighter by more than a few percent. dp-accounting 0.6 has one participation in each tree
(`SingleEpochTreeAggregationDpEvent`), which is the case b >= n. The authors' program counts the worst pattern exactly
(appendix D.2), of all blocks too. A participation is booked before it is known when the run ends, so it has to be
booked as the largest cost per participation of any pattern: that is 0.95 to 1 of the factor (tests, n up to 10). To
count the used blocks alone would save up to a third of the cost, by a proof that nobody but us has read.
"""

from __future__ import annotations

import math
from dataclasses import replace

from thinwire.core.plan_values import PrivacySection
from thinwire.privacy.accounting import Release


def nodes(place: int) -> tuple[int, ...]:
    """Return the last places of the disjoint blocks of which the places 1 .. `place` consist, the latest first.

    >>> nodes(7), nodes(8), nodes(0)
    ((7, 6, 4), (8,), ())
    """
    found = list[int]()
    while place:
        found.append(place)
        place &= place - 1  # without its lowest set bit
    return tuple(found)


def levels(length: int) -> int:
    """Return how many lengths of blocks a tree of so many places has: 1, 2, 4, .. up to its own.

    >>> levels(1), levels(7), levels(8)
    (1, 3, 4)
    """
    return length.bit_length()


def cost_factor(length: int, separation: int, participations: int) -> int:
    """Return the cost of one participation in a whole tree, as a multiple of its cost in one node.

    The cost is a squared sensitivity, the figure that composes over the nodes of a tree.

    `length` is the most rounds of a tree, `separation` the fewest rounds from one participation of a client to its
    next, and `participations` the most of a client.

    >>> cost_factor(length=8, separation=8, participations=4), cost_factor(length=8, separation=1, participations=8)
    (4, 15)
    """
    return sum(min(participations, -(-(1 << level) // separation)) for level in range(levels(length)))


def length_of(privacy: PrivacySection, rounds: int) -> int:
    """Return the most rounds of one tree in a run of so many rounds."""
    return privacy.restart_every or rounds


def nodes_in_model(length: int, rounds: int) -> int:
    """Return of how many nodes a model has the noise after so many rounds, in trees of `length` rounds.

    >>> nodes_in_model(1024, 1024), nodes_in_model(1000, 1000), nodes_in_model(5, 20)
    (1, 6, 8)
    """
    whole, rest = divmod(rounds, length)
    return whole * len(nodes(length)) + len(nodes(rest))


def booked(node: Release, length: int, separation: int, participations: int) -> Release:
    """Return what a participation in a tree is booked as, from what it costs in one node.

    It is one release whose squared sensitivity is `cost_factor` times that of the node. The samplers' distance is that
    of all draws that may depend on the participation: those of one node of each length.
    """
    grown = math.sqrt(cost_factor(length, separation, participations))
    return replace(node, sensitivity=node.sensitivity * grown, distance=node.distance * levels(length))
