"""Each request once: the time window in which a signature counts, and the nonces that were spent in it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from thinwire.flower.wire.refusals import Refusal
from thinwire.flower.wire.signing import LATEST_S, MAX_AHEAD_S, Claim

MOST_OF_ONE = 8192  # nonces of one key within the window: 26 requests a second
MOST_OF_ALL = 1 << 20  # some 3 400 requests a second


class Window:
    """A timestamp of before this window was opened is refused: a restart forgets nonces, and must open no replay.

    Invariant: no request is served before the time that it is stamped with (`Door` waits for that). So each that was
    served is stamped earlier than the next start, which refuses it. A clock that is set back in between breaks this.
    Both refusals of a clock carry the aggregator's time: who has none of its own takes that and asks again.
    """

    def __init__(self, opened_at: float) -> None:
        self._opened_at = opened_at
        self._spent: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # in the order of their expiry
        self._of: defaultdict[str, int] = defaultdict(int)

    def require_now(self, claim: Claim, now: float) -> None:
        """`Refusal` 401 for a request that was signed outside of the window."""
        age_s = now - claim.signed_at()
        if not -MAX_AHEAD_S <= age_s < LATEST_S:
            raise Refusal(401, "clock", f"the device's clock is {age_s:+.1f} s behind the aggregator's", now=now)
        if claim.signed_at() < self._opened_at:
            raise Refusal(401, "clock", "the request was signed before the aggregator started", now=now)

    def spend(self, claim: Claim, now: float) -> None:
        """Note the nonce of a request that is let in; refuses one that was let in before."""
        while self._spent and next(iter(self._spent.values())) <= now:
            (key, _), _ = self._spent.popitem(last=False)
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]
        nonce = (claim.fingerprint, claim.nonce)
        if nonce in self._spent:
            raise Refusal(401, "replay", "this request was made before", now=now)
        if self._of.get(claim.fingerprint, 0) >= MOST_OF_ONE or len(self._spent) >= MOST_OF_ALL:
            raise Refusal(503, "busy", "too many requests in the last five minutes", retry_after_s=30.0)
        self._spent[nonce] = now + LATEST_S + MAX_AHEAD_S
        self._of[claim.fingerprint] += 1
