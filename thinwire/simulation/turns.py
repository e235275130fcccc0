"""What a scripted device does with an ask: how long each stage takes on the virtual clock, and what goes wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from thinwire.core.ask_ids import within_run
from thinwire.core.keys import Key, derive, seed63
from thinwire.core.types import Ask

Again = Literal["same", "new", "changed"]


@dataclass(frozen=True)
class Turn:
    """One ask on one device, in seconds; `upload_s` may follow from the bytes of the answer.

    `lost`: the ask does not get there, or the answer does not, until the device has been away and is back: then it
    begins anew, or sends the same bytes. `failure` (kind, text) is the answer instead of an update. `garbage`: frames
    that cannot be folded. `held` = n: the answer is sent when the asks of a round at least n later go
    out. `again`: what it sends once more: the same bytes, a second update for the same ask, or other bytes under the
    same id.
    """

    download_s: float = 0.0
    compute_s: float = 1.0
    encode_s: float = 0.0
    upload_s: float | Callable[[int], float] = 0.0
    lost: Literal["", "ask", "answer"] = ""
    failure: tuple[str, str] | None = None
    garbage: bool = False
    held: int = 0
    again: tuple[Again, ...] = ()

    def sending_s(self, size: int) -> float:
        """How long an answer of so many bytes is on its way."""
        return self.upload_s(size) if callable(self.upload_s) else self.upload_s


Script = Callable[[Ask], Turn]


@dataclass(frozen=True)
class LogNormal:
    """Seconds whose logarithm is normal: half of the draws are under `median_s`.

    >>> LogNormal(10.0, sigma=0.0).at(Key(1))
    10.0
    """

    median_s: float
    sigma: float

    def at(self, key: Key) -> float:
        return self.median_s * math.exp(self.sigma * random.Random(seed63(key)).gauss(0.0, 1.0))


Duration = float | LogNormal


@dataclass(frozen=True)
class Paced:
    """Draws a turn for each ask from the seed, the round and the device, whatever the run is called.

    Sizes of `down_bytes_s` and `up_bytes_s` (0: no limit) add to the time of the stages: the wire of the device.
    `lost_asks`, `lost_answers` and `failing` are probabilities.
    """

    seed: int = 0
    download: Duration = 0.0
    compute: Duration = 1.0
    encode: Duration = 0.0
    upload: Duration = 0.0
    down_bytes_s: float = 0.0
    up_bytes_s: float = 0.0
    lost_asks: float = 0.0
    lost_answers: float = 0.0
    failing: float = 0.0

    def __call__(self, ask: Ask) -> Turn:
        key = derive(Key(self.seed), "turn", within_run(ask.ask_id))
        upload_s = _drawn(self.upload, derive(key, "upload"))
        luck = random.Random(seed63(derive(key, "luck"))).random()
        return Turn(
            download_s=_drawn(self.download, derive(key, "download"))
            + over(self.down_bytes_s, sum(part.length for part in ask.parts)),
            compute_s=_drawn(self.compute, derive(key, "compute")),
            encode_s=_drawn(self.encode, derive(key, "encode")),
            upload_s=lambda size: upload_s + over(self.up_bytes_s, size),
            lost="ask" if luck < self.lost_asks else "answer" if luck < self.lost_asks + self.lost_answers else "",
            failure=("task-error", "scripted") if luck >= 1.0 - self.failing else None,
        )


def over(bytes_s: float, size: int) -> float:
    """Seconds for so many bytes on a wire of this speed; one of 0 is no limit."""
    return size / bytes_s if bytes_s else 0.0


def _drawn(duration: Duration, key: Key) -> float:
    return duration.at(key) if isinstance(duration, LogNormal) else duration
