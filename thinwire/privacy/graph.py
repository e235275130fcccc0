"""The graph of secure aggregation: which clients share secrets and masks with each other, and how many reveal a secret.

In the complete graph each client is a neighbour of every other. In a k-regular graph it has k neighbours, so its work
and bytes grow with log n and not with n (Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead"). It is a Harary graph: the clients are on a ring in random order, each a neighbour of the k/2 on either side.

Three events must be improbable. The set of corrupt clients, of at most A, and the set of clients that leave, of at most
D, do not depend on the order, which is uniformly random.

    exposed        an honest client has t or more corrupt neighbours, which reveal its secrets
    disconnected   the honest survivors are not connected, so the sum of each component is revealed
    unrecoverable  a survivor or a drop-out has fewer than t surviving neighbours, so the round has no sum

Each probability is that of the event for any client in a round, or in `rounds` rounds together (union bounds over
rounds, and over n clients or all pairs of gaps). `exposed` and `disconnected` have at most 2^-41 each, so both together
at most 2^-40, and `unrecoverable` has at most 2^-20. A client also holds a share of its own secrets, which no bound
counts: an honest client's is not revealed, and a drop-out's is lost.

The parameters are those of Google's federated-compute for an honest but curious server. All tails are exact integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import comb, perm
from typing import TYPE_CHECKING, Literal, NamedTuple

from thinwire.core.errors import PlanError
from thinwire.core.plan_values import SecureSection
from thinwire.core.secure_numbers import check_numbers, share_of, threshold

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

EVENT_BITS = 41  # exposed, disconnected: 2^-41 each, 2^-40 together
SUM_BITS = 20  # unrecoverable
LARGEST_COHORT = 65_535  # clients: their indices travel in 16 bits
LARGEST_DEGREE = 1024  # neighbours: the search with exact tails ends within two seconds
LARGEST_COMPLETE = 4096  # clients of a complete graph: each of them computes with n t numbers for each of its secrets
COMPLETE_UP_TO = 128  # clients for which `auto` takes the complete graph, which survives more drop-outs
SHUFFLE = b"tw-secagg-1/graph"


class Parameters(NamedTuple):
    """Holds the degree k of a k-regular graph, and how many neighbours' shares reveal a client's secret (t)."""

    k: int
    t: int


@dataclass(frozen=True)
class Graph:
    """Holds the graph of a roster: its clients, the degree k, the threshold t, and the fewest clients in a sum.

    For the complete graph `min_survivors` is that of `Threshold`. For a k-regular graph it is n - D, because its bounds
    hold for at most D drop-outs: a device that signed for fewer survivors could reveal the sum of a component.
    """

    clients: int
    k: int
    t: int
    min_survivors: int

    @property
    def is_complete(self) -> bool:
        """Return True if every client is a neighbour of every other."""
        return self.k == self.clients - 1


def find_graph(
    selected: int, members: int, max_corrupt: float, max_dropout: float, adversary: str,
    kind: Literal["auto", "complete", "k-regular"] = "auto", rounds: int = 1,
) -> Graph:  # fmt: skip
    """Return the graph for a roster of `members` clients, in a round that selected `selected` clients.

    A = floor(max_corrupt * selected) clients may be corrupt, and all of them may be on the roster. The other selected
    clients count as drop-outs, so members - (selected - D) of the roster may still leave. `auto` is the
    complete graph up to COMPLETE_UP_TO clients, for a malicious aggregator, and where a k-regular graph would not halve
    the neighbours. `rounds` are those of the run, over which the bounds are added.

    Raise `PlanError` if no threshold or no k-regular graph meets the bounds, if too few clients are on the roster, or
    if more than LARGEST_COMPLETE are in a complete graph.
    """
    complete = threshold(selected, max_corrupt, max_dropout, adversary)
    least = selected - complete.dropout
    if not complete.min_survivors <= members <= selected:
        raise PlanError(
            f"a roster of {members} clients, of {selected} that were selected",
            f"a sum needs at least {complete.min_survivors} and has at most {selected}",
            "a round with more clients, or a longer [cohort] deadline_s",
        )
    whole = Graph(members, members - 1, complete.t, complete.min_survivors)
    if kind == "complete" or (kind == "auto" and (adversary == "malicious" or selected <= COMPLETE_UP_TO)):
        return _checked(whole)
    if adversary == "malicious":
        raise PlanError(
            '[secure] graph = "k-regular" with adversary = "malicious"',
            "the random order follows from all keys, and a malicious aggregator can try keys of corrupt clients",
            '[secure] graph = "complete"',
        )
    found = _smallest(members, complete.corrupt, members - least, rounds) if members >= least else None
    if kind == "auto" and (found is None or 2 * found.k > members):
        return _checked(whole)
    if found is not None:
        return Graph(members, found.k, found.t, least)
    raise _no_graph(members, max_corrupt, max_dropout)


def graph_of_plan(secure: SecureSection, selected: int, rounds: int) -> Graph:
    """Return the graph of a plan's round in which all `selected` clients are on the roster; `PlanError` if none fits.

    `rounds` are those of the run.
    """
    return find_graph(
        selected, selected, secure.max_corrupt, secure.max_dropout, secure.adversary, secure.graph, rounds
    )


def check_round(plan: RunPlan, selected: int, target: int) -> None:
    """Raise `PlanError` if no secure round of this plan can select so many clients and close with `target` updates."""
    check_numbers(plan.secure, selected, target)
    graph_of_plan(plan.secure, selected, plan.run.rounds)


def find_parameters(
    clients: int, max_corrupt: float, max_dropout: float, rounds: int = 1,
    event_bits: int = EVENT_BITS, sum_bits: int = SUM_BITS,
) -> Parameters:  # fmt: skip
    """Return the smallest even k, and for it the smallest t, for which the three events are improbable enough.

    Raise `PlanError` if no k-regular graph with fewer neighbours than the complete one meets the bounds.

    >>> find_parameters(100, 0.1, 0.1)
    Parameters(k=22, t=11)
    """
    corrupt, dropout = share_of(max_corrupt, clients), share_of(max_dropout, clients)
    found = _smallest(clients, corrupt, dropout, rounds, event_bits, sum_bits)
    if found is None:
        raise _no_graph(clients, max_corrupt, max_dropout)
    return found


def meets_bounds(
    clients: int, corrupt: int, dropout: int, parameters: Parameters, rounds: int = 1,
    event_bits: int = EVENT_BITS, sum_bits: int = SUM_BITS,
) -> bool:  # fmt: skip
    """Return True if each of the three events has at most its probability, in `rounds` rounds together.

    `corrupt` and `dropout` are the largest numbers A and D of clients. The bounds of this module's text:

    - exposed: n P[H(n - 1, A, k) >= t] <= 2^-event_bits. H is hypergeometric: the corrupt clients among k neighbours.
    - disconnected: n (n - k - 1) / 2 times the probability that k given places of the ring all hold corrupt clients or
      drop-outs. Two gaps of k/2 places must be empty to cut a ring in which each reaches k/2 to either side.
    - unrecoverable: n P[H(n - 1, D, k) > k - t] <= 2^-sum_bits.
    """
    k, t = parameters
    return (
        _is_connected(clients, corrupt + dropout, k, rounds, event_bits)
        and t >= _least_threshold(clients, corrupt, k, rounds, event_bits)
        and t <= k
        and _is_rare(clients, dropout, k, k - t + 1, rounds, sum_bits)
    )


def neighbours(count: int, k: int, seed: bytes) -> list[list[int]]:
    """Return for each of `count` clients (from 0) its neighbours, in rising order.

    `k` is even, or count - 1 for the complete graph. `seed` has 32 bytes, ctx1. The order of the ring is a Fisher-Yates
    shuffle of 0 to count - 1: for i from count - 1 down to 1 it swaps entry i with entry j, j uniform in [0, i]. The
    draws are 64-bit big-endian words w of SHA-256(b"tw-secagg-1/graph" + seed + block), four words a block, blocks
    counted from 0 in 8 bytes big-endian. A word of 2^64 - 2^64 mod (i + 1) or more is skipped; else j = w mod (i + 1).

    >>> neighbours(6, 2, bytes(32))[0]
    [1, 5]
    """
    if len(seed) != 32 or not 0 < k < count or (k % 2 and k != count - 1):
        raise ValueError(f"no Harary graph of {count} clients with {k} neighbours and a seed of {len(seed)} bytes")
    if k == count - 1:
        return [[other for other in range(count) if other != client] for client in range(count)]
    ring = _shuffled(count, seed)
    found: list[list[int]] = [[] for _ in range(count)]
    for place, client in enumerate(ring):
        steps = range(-(k // 2), k // 2 + 1)
        found[client] = sorted(ring[(place + step) % count] for step in steps if step)
    return found


def _shuffled(count: int, seed: bytes) -> list[int]:
    ring, words = list(range(count)), _words(seed)
    for last in range(count - 1, 0, -1):
        fair = (1 << 64) - (1 << 64) % (last + 1)
        other = next(word for word in words if word < fair) % (last + 1)
        ring[last], ring[other] = ring[other], ring[last]
    return ring


def _words(seed: bytes) -> Iterator[int]:
    block = 0
    while True:
        drawn = hashlib.sha256(SHUFFLE + seed + block.to_bytes(8, "big")).digest()
        yield from (int.from_bytes(drawn[at : at + 8], "big") for at in range(0, 32, 8))
        block += 1


@lru_cache(maxsize=64)
def _smallest(
    clients: int, corrupt: int, dropout: int, rounds: int, event_bits: int = EVENT_BITS, sum_bits: int = SUM_BITS
) -> Parameters | None:
    if clients > LARGEST_COHORT:
        raise PlanError(
            f"a k-regular graph of {clients} clients", f"at most {LARGEST_COHORT} are supported", "[cohort] clients"
        )
    for k in range(2, min(clients - 1, LARGEST_DEGREE + 1), 2):
        if not _is_connected(clients, corrupt + dropout, k, rounds, event_bits):
            continue
        t = max(2, _least_threshold(clients, corrupt, k, rounds, event_bits))
        if t <= k and _is_rare(clients, dropout, k, k - t + 1, rounds, sum_bits):
            return Parameters(k, t)
    return None


def _is_connected(clients: int, removed: int, k: int, rounds: int, bits: int) -> bool:
    if k > removed:
        return True
    pairs = clients * (clients - k - 1) // 2
    return rounds * pairs * perm(removed, k) << bits <= perm(clients, k)


def _least_threshold(clients: int, corrupt: int, k: int, rounds: int, bits: int) -> int:
    """Return the smallest t that an honest client's corrupt neighbours reach with at most this probability."""
    tail, limit = 0, comb(clients - 1, k)
    for marked, ways in _from_the_top(clients - 1, corrupt, k):
        tail += ways
        if rounds * clients * tail << bits > limit:
            return marked + 1
    return 0


def _is_rare(clients: int, dropout: int, k: int, least: int, rounds: int, bits: int) -> bool:
    """Return True if for no client `least` or more of its k neighbours drop out, but with this probability."""
    tail, limit = 0, comb(clients - 1, k)
    for marked, ways in _from_the_top(clients - 1, dropout, k):
        if marked < least:
            break
        tail += ways
    return rounds * clients * tail << bits <= limit


def _from_the_top(population: int, marked: int, drawn: int) -> Iterator[tuple[int, int]]:
    """Yield (x, number of ways to draw x marked ones among `drawn`), from the largest x down, exactly."""
    found = min(marked, drawn)
    ways = comb(marked, found) * comb(population - marked, drawn - found)
    while ways:
        yield found, ways
        missed = population - marked - drawn + found
        ways = ways * found * missed // ((marked - found + 1) * (drawn - found + 1)) if missed > 0 else 0
        found -= 1


def _checked(whole: Graph) -> Graph:
    """Return a complete graph, unless it has so many clients that a device would compute for minutes."""
    if whole.clients > LARGEST_COMPLETE:
        raise PlanError(
            f"a complete graph of {whole.clients} clients",
            f"at most {LARGEST_COMPLETE} are supported",
            '[secure] graph = "k-regular", or fewer [cohort] clients',
        )
    return whole


def _no_graph(clients: int, max_corrupt: float, max_dropout: float) -> PlanError:
    return PlanError(
        f"no k-regular graph of {clients} clients withstands [secure] max_corrupt = {max_corrupt:g} and "
        f"max_dropout = {max_dropout:g}",
        "the bounds on exposed, disconnected and unrecoverable clients need more neighbours than it may have",
        '[secure] graph = "complete", or smaller shares',
    )
