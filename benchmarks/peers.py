"""Compare one encode with what a user would take instead: torch's hooks, plain torch, plain numpy; by turns.

    python -m benchmarks.peers [--preset small|full] --json

A row is one method of ours or of somebody else on the same values, with what it sends (a plain sum of its tensors'
bytes) and what it loses, since both differ. `ratio SPEC` is the time of the fastest peer over ours; the row of that
peer says `fastest`. `ratio_as_good SPEC` is the same among peers that send and lose at most a twentieth more than ours,
where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import peers_in_numpy as in_numpy
from benchmarks.codecs import made
from benchmarks.document import document, note, show
from benchmarks.entry import arguments, timed_ms
from benchmarks.limited import limited
from benchmarks.peers_in_torch import casts, eight_bit, powersgd, rotated, rounded, signs, sparse
from benchmarks.peers_in_torch.peer import Parts, Peer, sent_bytes
from benchmarks.resnet50 import shapes
from thinwire.compression import native, parse
from thinwire.core import Key, Layout
from thinwire.core.layout import Segment
from thinwire.core.types import Vector

OURS = "thinwire"
AS_GOOD = 1.05
SLOW_MS, SLOW_TRIES = 1000, 2  # whoever takes so long is measured no more often
SPARSE = (*sparse.TOPK, *in_numpy.TOPK)
PEERS: dict[str, Callable[[Segment], Sequence[Peer]]] = {
    "fp16": lambda _: (*casts.FP16, *in_numpy.FP16),
    "bf16": lambda _: casts.BF16,
    "int8": lambda _: (*eight_bit.INT8, *rounded.QSGD8, *in_numpy.INT8),
    "qsgd(4)": lambda _: rounded.QSGD4,
    "natural": lambda _: rounded.NATURAL,
    "ternary": lambda _: rounded.TERNARY,
    "sign": lambda _: (*signs.SIGN, *in_numpy.SIGN),
    "topk(0.01)": lambda _: SPARSE,
    "topk(0.01) > int8 > rice": lambda _: SPARSE,
    f"threshold({sparse.THRESHOLD})": lambda _: sparse.OVER,
    "randk(0.01)": lambda _: sparse.RANDK,
    "drive": lambda _: rotated.DRIVE,
    "eden(2)": lambda _: rotated.EDEN2,
    "eden(4)": lambda _: rotated.EDEN4,
    "powersgd(4)": lambda segment: (powersgd.hook(segment.slices),),
}


@dataclass(frozen=True)
class Preset:
    """`share` of ResNet-50's tensors, from the first on."""

    share: float
    tries: int
    data: Sequence[str]
    threads: Sequence[int]


PRESETS = {
    "tiny": Preset(0.02, 1, ("normal",), (1,)),  # for the tests
    "small": Preset(1.0, 3, ("normal",), (1, 2)),
    "full": Preset(1.0, 9, ("normal",), (1, 2)),
}


@dataclass
class Runner:
    """Somebody's method, and its times; `encode` and `decode` are of a whole model, segment by segment."""

    name: str
    source: str
    encode: Callable[[], list[Any]]
    decode: Callable[[Any, int], Vector]  # of a segment
    size: Callable[[Any], int]
    ms: list[float] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)

    def turn(self) -> None:
        self.sent.clear()
        self.ms.append(timed_ms(lambda: self.sent.extend(self.encode())))


def ours(spec: str, layout: Layout, xs: Sequence[Vector]) -> Runner:
    bound = parse(spec).bind(layout)
    states = [bound.init(segment) for segment in range(len(xs))]  # powersgd's is warm from its last call, as the hook's

    def encode() -> list[bytes]:
        out = []
        for segment, x in enumerate(xs):
            done = bound.encode(x, states[segment], Key(1), segment)
            states[segment] = done.state
            out.append(done.payload)
        return out

    return Runner(OURS, "", encode, bound.decode, len)


def theirs(layout: Layout, spec: str, xs: Sequence[Vector]) -> list[Runner]:
    by_segment = [PEERS[spec](segment) for segment in layout.segments]
    tensors = [torch.from_numpy(x) for x in xs]
    return [_runner(peers, tensors) for peers in zip(*by_segment, strict=True)]


def _runner(peers: Sequence[Peer], tensors: Sequence[torch.Tensor]) -> Runner:
    def decode(parts: Parts, segment: int) -> Vector:
        values: Vector = peers[segment].decode(parts, tensors[segment].numel()).numpy()
        return values

    return Runner(
        peers[0].name, peers[0].source,
        lambda: [peer.encode(x) for peer, x in zip(peers, tensors, strict=True)], decode, sent_bytes,
    )  # fmt: skip


def measured(spec: str, layout: Layout, xs: Sequence[Vector], tries: int) -> list[dict[str, Any]]:
    """Rows of one method: a copy, ours, and each peer, one after the other, again and again; medians."""
    runners = [ours(spec, layout, xs), *theirs(layout, spec, xs)]
    whole, copy_ms = np.concatenate(xs), list[float]()
    copied = whole.copy()
    with torch.no_grad():
        for turn in range(tries + 1):  # the first one warms up
            copy_ms.append(timed_ms(lambda: np.copyto(copied, whole)))
            for runner in runners:
                if turn <= SLOW_TRIES or runner.ms[0] < SLOW_MS:
                    runner.turn()
        memcpy = median(copy_ms[1:])
        rows = [{
            "method": spec, "who": runner.name, "source": runner.source,
            "encode_ms": median(runner.ms[1:]), "memcpy_ms": memcpy, "encode_ratio": median(runner.ms[1:]) / memcpy,
            "bits_per_param": 8 * sum(map(runner.size, runner.sent)) / whole.size,
            "relative_error": error(runner, xs), "fastest": False,
        } for runner in runners]  # fmt: skip
    times = [median(runner.ms[1:]) for runner in runners[1:]]
    rows[1 + times.index(min(times))]["fastest"] = True
    return rows


def error(runner: Runner, xs: Sequence[Vector]) -> float:
    lost = whole = 0.0
    for segment, (x, sent) in enumerate(zip(xs, runner.sent, strict=True)):
        away = runner.decode(sent, segment) - x
        lost, whole = lost + float(np.dot(away, away)), whole + float(np.dot(x, x))
    return float(np.sqrt(lost / whole))


def rows(preset: Preset, specs: Sequence[str]) -> list[dict[str, Any]]:
    layout, found = Layout.of(shapes(preset.share)), []
    for data in preset.data:
        x = made(data, layout.size)
        xs = [x[segment.span] for segment in layout.segments]
        for spec in specs:
            for threads in preset.threads:
                torch.set_num_threads(threads)
                torch.manual_seed(1)
                with limited(threads):
                    own, *others = measured(spec, layout, xs, preset.tries)
                common = {"data": data, "threads": threads, "path": native.chosen()}
                found += [{**row, **common} for row in (own, *others)]
                (best,) = (row for row in others if row["fastest"])
                note(f"{spec}, {data}, {threads}: {best['encode_ms'] / own['encode_ms']:.1f} over {best['who']}")
    return found


def figures(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of normal values; with " 2" behind the name on two threads."""
    out: dict[str, float] = {}
    for own in found:
        if own["who"] != OURS or own["data"] != "normal":
            continue
        others = [
            row for row in found
            if row["who"] != OURS and all(row[name] == own[name] for name in ("method", "data", "threads"))
        ]  # fmt: skip
        good = [
            row for row in others
            if all(row[name] <= AS_GOOD * own[name] for name in ("bits_per_param", "relative_error"))
        ]  # fmt: skip
        name = own["method"] + (f" {own['threads']}" if own["threads"] > 1 else "")
        for prefix, among in (("ratio", others), ("ratio_as_good", good)):
            if among:
                out[f"{prefix} {name}"] = min(row["encode_ms"] for row in among) / own["encode_ms"]
    return out


def main() -> int:
    parser = arguments("peers", __doc__, PRESETS)
    parser.add_argument("--method", choices=sorted(PEERS), action="append", help="only these (again and again)")
    given = parser.parse_args()
    found = rows(PRESETS[given.preset], given.method or list(PEERS))
    show(document("peers", given.preset, found, figures(found)), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
