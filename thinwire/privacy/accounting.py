"""Rényi accounting of noised releases: epsilon at delta, the least noise, and a filter for a budget.

The unit of privacy is one client with all its data (in mode `example` one record of one device). The caller gives the
sensitivity and the noise in one unit, for the neighbours of its mode:

    mode         neighbouring inputs                      sensitivity  noise                             amplification
    central      one client's vector is zero, or is not   C            discrete-gaussian                 Poisson or none
    distributed  one client's vector is zero, or is not   C            skellam, discrete-gaussian-sum    none
    local        any vector of a client to any other      2 C          skellam or discrete-gaussian      none
    example      one record is added or removed           C            discrete-gaussian, at each step   Poisson or none

C is the clip, on a grid the exact integer bound. The count that an adaptive clip follows is a coordinate of the vector,
and it is zero with the others. The sum is divided by a number that no client's data decide: the plan's,
the number of selected clients, or the expected sample. Neighbours differ in one vector that is zero, not in who was
selected. Sampling of a fixed number of clients gives no amplification here. When one
client is removed, another takes its place, which is replace-one (2 C), and a sample that others see hides nobody.
Poisson sampling amplifies only if its coins are secret and independent, and every client of the population has one.

A release of a client hides one record of it too. With another record the client's vector is another one, which moves a
sum by up to 2 C. So where releases of both units compose, the claim is for a record, and those of a client count twice
their sensitivity. Nothing is claimed for a client: all its records together have no bound.

A cost is an array of Rényi divergences at ORDERS. Divergences add when releases compose. A conversion gives epsilon.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import DataLost, UsageError

ORDERS: tuple[int, ...] = (  # integers, because the bounds of Skellam and of sampling are for integers
    *range(2, 65), 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048,
)  # fmt: skip
SAMPLER_SHARE = 0.01  # of a budget's delta, kept for the distances of samplers: it costs -ln 0.99 / (order - 1) epsilon
LEAST_SIGMA = 0.5  # of one client's discrete Gaussian: the bound on their sum assumes it
TOLERANCE = 1e-4  # relative, of a noise multiplier that was searched
STEPS = 1000  # of the search for an epsilon that pays for distances

Distribution = Literal["discrete-gaussian", "skellam", "discrete-gaussian-sum", "gaussian"]
Unit = Literal["client", "record"]

_ALPHA = np.array(ORDERS, dtype=np.float64)
_LOG_FACTORIAL = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, ORDERS[-1] + 1)))])


@dataclass(frozen=True)
class Release:
    """Describes one noised release by the numbers from which its cost is computed, also years later.

    `sensitivity` is an L2 norm. `variance` is that of the noise in the released sum, in the square of the same unit;
    of a discrete Gaussian it is the parameter sigma^2. In mode `distributed` it counts the noise of `parties` honest
    survivors, who add a part each. `rate` is that of Poisson sampling. `distance` bounds the statistical distance of
    one draw of the sampler from its distribution; a release has steps * parties * dimensions draws. `steps` is the
    number of noised sums that are released together, at the same rate each. `unit` is what one neighbour has more.

    Invariant: `from_json(to_json())` is equal and has the same cost. Raise ValueError for a number without a sense.
    """

    distribution: Distribution
    sensitivity: float
    variance: float
    dimensions: int
    parties: int = 1
    rate: float = 1.0
    distance: float = 0.0
    steps: int = 1
    unit: Unit = "client"

    def __post_init__(self) -> None:
        if self.distribution not in get_args(Distribution):
            raise ValueError(f"distribution = {self.distribution!r} is none of {', '.join(get_args(Distribution))}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit = {self.unit!r} is none of {', '.join(get_args(Unit))}")
        for name in ("sensitivity", "variance", "rate", "distance"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value!r} is not a finite number from 0 on")
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are one release
        for name in ("dimensions", "parties", "steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r} is not a whole number from 1 on")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate = {self.rate!r} is not in (0, 1]")
        if self.rate < 1 and self.parties > 1:
            raise ValueError(f"rate = {self.rate!r} with {self.parties} parties: their noise has no amplification")
        if self.distance > 1:
            raise ValueError(f"distance = {self.distance!r} is not in [0, 1]")

    def rdp(self) -> NDArray[np.float64]:
        """Return upper bounds on the Rényi divergence at ORDERS, in both directions; read-only, computed once."""
        return _rdp(self)

    def total_distance(self) -> float:
        """Return a bound on the statistical distance of the whole release: that of one draw, times the draws."""
        return self.steps * self.parties * self.dimensions * self.distance if self.sensitivity else 0.0

    def to_json(self) -> str:
        """Return the numbers as one JSON object."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Release:
        """Return the release of `to_json`; raise ValueError for any other text."""
        found = json.loads(text)
        known = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or set(found) != known:
            raise ValueError(f"not the JSON of a release: {text[:200]!r}")
        return cls(**found)


@lru_cache(maxsize=4096)
def _rdp(release: Release) -> NDArray[np.float64]:
    if release.sensitivity == 0:
        found = np.zeros(len(ORDERS))
    elif release.variance == 0:
        found = np.full(len(ORDERS), np.inf)
    elif release.distribution == "gaussian" and release.rate < 1:
        found = _sampled_gaussian(math.sqrt(release.variance) / release.sensitivity, release.rate)
    else:
        found = _unsampled(release, _ALPHA)
        if release.rate < 1:
            every = np.arange(2, ORDERS[-1] + 1, dtype=np.float64)
            sampled = _poisson(_unsampled(release, every), release.rate)
            found = np.minimum(found, sampled)  # divergences are quasi-convex: sampling never costs more
    found = release.steps * found
    found.setflags(write=False)
    return found


def _unsampled(release: Release, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return bounds at integer orders above 1, by the theorem of its noise.

    Gaussian and discrete Gaussian: alpha D^2 / (2 sigma^2) (Canonne, Kamath, Steinke 2020, in each coordinate).

    Skellam: Agarwal, Kairouz, Liu 2021, Thm 3.5. mu is the variance. D1 <= D2^2, because the coordinates are integers.

    Sum of h discrete Gaussians with sigma_c >= 1/2: Kairouz, Liu, Steinke 2021. Its first bound has two forms: Thm 1
    adds alpha tau d / 4, and the authors' program, naming Prop. 14, adds tau d. The larger of the two is used. The
    second bound is one in both. From sigma_c = 2 on, tau is below 1e-16.
    """
    d2, variance, d = release.sensitivity, release.variance, release.dimensions
    gaussian = alpha * (d2 * d2 / (2 * variance))
    if release.distribution == "skellam":
        d1 = min(d2 * d2, math.sqrt(d) * d2)
        return gaussian + np.minimum(
            ((2 * alpha - 1) * d2 * d2 + 6 * d1) / (4 * variance * variance), 3 * d1 / (2 * variance)
        )
    if release.distribution == "discrete-gaussian-sum":
        each = variance / release.parties
        if each < LEAST_SIGMA**2:
            return np.full(len(alpha), np.inf)
        k = np.arange(1, release.parties, dtype=np.float64)
        tau = 10 * float(np.sum(np.exp(-2 * math.pi**2 * each * (k / (k + 1)))))
        first = gaussian + tau * d * np.maximum(1.0, alpha / 4)
        second = alpha / 2 * (d2 / math.sqrt(variance) + tau * math.sqrt(d)) ** 2
        return np.minimum(first, second)
    return gaussian


def _poisson(rdp: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    """Return bounds at ORDERS under Poisson sampling, from bounds at all orders 2, 3, ... without it.

    P is the noise around the client's vector v, Q the noise around 0, M = (1 - q) Q + q P. The binomial theorem gives
    E_Q[(M / Q)^alpha] = sum_k C(alpha, k) (1 - q)^(alpha - k) q^k E_Q[(P / Q)^k], in which E_Q[(P / Q)^k] is at most
    exp((k - 1) rdp(k)); terms k = 0 and 1 are exact. Zhu and Wang 2019 (Thm 5) multiply the terms from k = 3 on by 3,
    because of the other direction D(Q || M). The noise here is symmetric: x -> v - x swaps P and Q. Then D(Q || M) is
    at most D(M || Q) (Mironov, Talwar, Zhang 2019, Thm 5), so the factor is 1, and a Gaussian has its exact value. With
    the factor 3, 1000 releases of z = 10 and q = 0.1 would cost epsilon 5.8 at delta 1e-5 instead of 1.3.

    The sum is 1 + sum_{k >= 2} C(alpha, k) (1 - q)^(alpha - k) q^k (exp((k - 1) rdp(k)) - 1), without a cancellation.
    """
    k = np.arange(2, 2 + len(rdp), dtype=np.float64)
    powers = (k - 1) * rdp
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(np.isinf(powers), powers, powers + np.log(-np.expm1(-powers)))  # ln(e^x - 1)
    terms += k * math.log(rate) - _LOG_FACTORIAL[2:]
    found = np.empty(len(ORDERS))
    for place, alpha in enumerate(ORDERS):
        one = terms[: alpha - 1] - _LOG_FACTORIAL[alpha - 2 :: -1] + (alpha - k[: alpha - 1]) * math.log1p(-rate)
        largest = np.max(one)
        if np.isfinite(largest):
            largest += math.log(np.sum(np.exp(one - largest)))
        found[place] = np.logaddexp(0.0, largest + _LOG_FACTORIAL[alpha]) / (alpha - 1)
    return found


def _sampled_gaussian(noise_multiplier: float, rate: float) -> NDArray[np.float64]:
    """Return the divergences of the Poisson sampled Gaussian by dp-accounting, under adding or removing one record."""
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the cost of a sampled Gaussian needs dp-accounting: there is no {error.name}",
            "its accountant has the exact divergences",
            "pip install 'thinwire[privacy]'",
        ) from error
    accountant = RdpAccountant(ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)))
    return np.array(accountant.rdp, dtype=np.float64)


def epsilon(spent: Mapping[Release, int], delta: float) -> float:
    """Return the least epsilon at `delta` of these releases together, each with its count; inf if there is none.

    The real outputs are within a statistical distance E of those of exact samplers, over all draws. So the epsilon
    fulfils delta_exact(epsilon) + (1 + e^epsilon) E <= delta, of which the least solution is returned.

    The releases are fixed in advance. Where outputs decide on the next one, `Budget` has the right claim. Raise
    ValueError if `delta` is not in (0, 1) or a count is negative.
    """
    _check_delta(delta)
    rdp, distance = _compose(spent)
    found = _convert(rdp, delta - 2 * distance)
    if distance == 0 or math.isinf(found):
        return found
    for _ in range(STEPS):  # from below: each step stays under the least solution, so the first that fits is next to it
        safe = found * (1 + 1e-9) + 1e-12
        needed = _convert(rdp, _rest(delta, safe, distance))
        if needed <= safe:
            return safe
        found = needed
    return math.inf


def _rest(delta: float, at: float, distance: float) -> float:
    """Return what distances leave of delta at this epsilon."""
    return delta - (1 + math.exp(at)) * distance if at < 700 else -math.inf


def _compose(spent: Mapping[Release, int]) -> tuple[NDArray[np.float64], float]:
    rdp, distance = np.zeros(len(ORDERS)), 0.0
    of_records = unit_of(spent) == "record"
    for release, count in spent.items():
        if count < 0:
            raise ValueError(f"count = {count!r} of a release is negative")
        if of_records and release.unit == "client":
            release = replace(release, sensitivity=2 * release.sensitivity, rate=1.0)
        if count:
            rdp += count * release.rdp()
            distance += count * release.total_distance()
    return rdp, distance


def unit_of(spent: Mapping[Release, int]) -> Unit:
    """Return whose epsilon these releases have together: "record" as soon as one of them is of a record."""
    return "record" if any(count and release.unit == "record" for release, count in spent.items()) else "client"


def _offsets(delta: float) -> NDArray[np.float64]:
    """Return epsilon - rdp at ORDERS: Canonne, Kamath, Steinke 2020, Prop. 12, solved for epsilon."""
    return np.asarray(np.log1p(-1 / _ALPHA) - (math.log(delta) + np.log(_ALPHA)) / (_ALPHA - 1), dtype=np.float64)


def _convert(rdp: NDArray[np.float64], delta: float) -> float:
    if delta <= 0:
        return math.inf
    if -math.expm1(-float(np.min(rdp))) <= delta * delta:
        return 0.0  # the statistical distance is at most sqrt(1 - e^-KL) <= delta (Bretagnolle and Huber 1979)
    return max(0.0, float(np.min(rdp + _offsets(delta))))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta!r} is not in (0, 1)")


@dataclass(frozen=True)
class Budget:
    """Decides whether the next release fits into (epsilon, delta), also when outputs decide on it.

    The minimum over all orders holds for releases fixed in advance. If a run adapts (stops on a metric, changes the
    clip), the order that is best at the end depends on the outputs. At one order fixed in advance divergences do add
    up under adaptive choices, as long as their sum is stopped at a fixed limit (Feldman and Zrnic 2021, a Rényi
    filter). So one order decides: the best one for `planned`, or for a Gaussian mechanism that meets the budget
    exactly. A fixed SAMPLER_SHARE of delta pays for samplers, since a share that follows the outputs is not proven.

    `planned` says what most releases will be, and is fixed before the first one; kept with the ledger. Without it a
    Gaussian loses 0.1 %, a sampled one with little noise up to nearly all of its rounds (tests: rate 0.01, z = 1,
    epsilon = 2: 28 rounds of 879).

    Invariant: while each release was allowed, all together are (epsilon, delta)-private, and `epsilon()` is not above.
    """

    epsilon: float
    delta: float
    planned: Release | None = None

    def __post_init__(self) -> None:
        _check_delta(self.delta)
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon = {self.epsilon!r} is not a finite number above 0")

    def order(self) -> int:
        """Return the order at which this budget counts; nothing but the budget's fields decides it."""
        return ORDERS[self._limit()[0]]

    def allows(self, spent: Mapping[Release, int], release: Release) -> bool:
        """Return whether `release` may follow what is spent, reserved releases included."""
        return self.reached({**spent, release: spent.get(release, 0) + 1}) <= self.epsilon

    def reached(self, spent: Mapping[Release, int]) -> float:
        """Return the epsilon of these releases at this budget's order; infinite if samplers take over their share."""
        (place, limit), (rdp, distance) = self._limit(), _compose(spent)
        if _rest(SAMPLER_SHARE * self.delta, self.epsilon, distance) < 0:
            return math.inf
        return max(0.0, self.epsilon + float(rdp[place]) - limit) if sum(spent.values()) else 0.0

    def _limit(self) -> tuple[int, float]:
        limits = self.epsilon - _offsets(self.delta * (1 - SAMPLER_SHARE))
        with np.errstate(divide="ignore", invalid="ignore"):
            rounds = np.nan_to_num(limits / (_ALPHA if self.planned is None else self.planned.rdp()), nan=-np.inf)
        place = int(np.argmax(rounds))
        return place, float(limits[place])


def noise_for(target_epsilon: float, delta: float, release_of: Callable[[float], Release], count: int) -> float:
    """Return the least noise multiplier with which `count` releases cost at most `target_epsilon`.

    `release_of` maps a noise multiplier to the release that it gives. The result is at most 0.01 % above the least one,
    and never below: its own epsilon was computed. Raise ValueError if no noise is enough.
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon = {target_epsilon!r} is not a finite number above 0")
    if count < 1:
        raise ValueError(f"count = {count!r} is below 1")

    def fits(noise: float) -> bool:
        return epsilon({release_of(noise): count}, delta) <= target_epsilon

    low = high = 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > 2.0**40:
            raise ValueError(f"target_epsilon = {target_epsilon!r} at delta = {delta!r} is out of reach of any noise")
    while low == high and low > 2.0**-20:
        low /= 2
        if fits(low):
            high = low
    while high > low * (1 + TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def releases_of(spent: Mapping[str, int]) -> dict[Release, int]:
    """Return the counts by release; raise `DataLost` for a text that is no release, because its cost is not known."""
    found = Counter[Release]()
    for text, count in spent.items():
        try:
            found[Release.from_json(text)] += count
        except (ValueError, TypeError) as error:
            raise DataLost(
                "a release in the privacy ledger is not readable",
                why=str(error),
                hint="install the version of thinwire that wrote it",
            ) from error
    return dict(found)


def epsilon_of(spent: Mapping[str, int], delta: float) -> float:
    """Return the epsilon at `delta` of all these releases together; 0 if there is none.

    >>> epsilon_of({}, 1e-5)
    0.0
    """
    releases = {release: count for release, count in releases_of(spent).items() if count}
    return epsilon(releases, delta) if releases else 0.0


def filtered_epsilon(spent: Mapping[str, int], most: float, delta: float) -> float:
    """Return the epsilon of releases, the first one first, by a filter: none above `most` may be made (`Budget`)."""
    releases = releases_of(spent)
    first = next(iter(releases), None)
    return Budget(most, delta, first if first is not None and first.rate < 1 else None).reached(releases)


def unit_of_all(spent: Mapping[str, int]) -> Unit:
    """Return whose epsilon `epsilon_of` gives for these releases, by their JSON."""
    return unit_of(releases_of(spent))


def costliest(kinds: Iterable[str], spent: Mapping[str, int], count: int, delta: float) -> str:
    """Return the release of which `count` more would cost the most behind what is `spent`; "" if there is no kind."""
    more = {kind: epsilon_of(Counter(spent) + Counter({kind: count}), delta) for kind in sorted(set(kinds))}
    return max(more, key=lambda kind: more[kind], default="")
