"""What comes after training: how long encoding and sending will take, by what they took before."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from thinwire.core.quantile import p90
from thinwire.core.types import ReplyHead

KEPT = 20  # the last ones of each codec
ENCODES = 50e6  # bytes of the model a second: the guess before anything was encoded, far under what a small board does
SLOWER = 4.0  # a way up is taken to be this much slower than the way down until it was gone


def _kept() -> defaultdict[str, deque[float]]:
    return defaultdict(lambda: deque(maxlen=KEPT))


@dataclass
class Afterwards:
    """How long encoding and sending took in one run on this device.

    Kept in memory: a new process begins with the guess.
    """

    encoding: defaultdict[str, deque[float]] = field(default_factory=_kept)  # codec -> seconds
    sending: defaultdict[str, deque[float]] = field(default_factory=_kept)

    def encoded(self, head: ReplyHead, commit_s: float) -> None:
        """An answer was made, and was on disk so long after."""
        self.encoding[head.codec].append(head.timings.encode_s + commit_s)

    def sent(self, head: ReplyHead, upload_s: float) -> None:
        self.sending[head.codec].append(upload_s)

    def least_s(self, codec: str) -> float:
        """The least that both took with this codec; 0 where that is not known."""
        if codec not in self.encoding or codec not in self.sending:
            return 0.0
        return min(self.encoding[codec]) + min(self.sending[codec])

    def lasts_s(self, codec: str, dense_bytes: int, asked_bytes: int, download_s: float) -> float:
        """What must be left when training ends: the p90 of what both took, or a guess that errs on the long side.

        The guess is for a whole model of `dense_bytes`, on a way up that is `SLOWER` than the ask of `asked_bytes` came
        down in `download_s`. What another codec took counts where it is more.
        """
        down_s = SLOWER * download_s * dense_bytes / asked_bytes if asked_bytes else 0.0
        return _expected(self.encoding, codec, dense_bytes / ENCODES) + _expected(self.sending, codec, down_s)


def _expected(known: defaultdict[str, deque[float]], codec: str, guess: float) -> float:
    if codec in known:
        return p90(known[codec])
    return max([guess, *(p90(seconds) for seconds in known.values())])
