"""Rules by layer: which chain each tensor follows, `layers("*.bias"=fp16; *=topk(0.01) > int8)`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from thinwire.aggregation.bound import Bound
from thinwire.aggregation.chain import Chain
from thinwire.aggregation.group import Group
from thinwire.aggregation.lowrank import LowRank
from thinwire.core.layout import Layout, Segment, Slice


@dataclass(frozen=True)
class Rule:
    """Tensors whose names match `pattern` (as in a shell) follow `chain`."""

    pattern: str
    chain: Chain | LowRank

    @property
    def spec(self) -> str:
        return f"{self.pattern}={self.chain.spec}" if self.pattern == "*" else f'"{self.pattern}"={self.chain.spec}'


@dataclass(frozen=True)
class Layers:
    """The first rule that matches a tensor's name decides; tensors of one rule share budget, buckets and streams."""

    rules: tuple[Rule, ...]

    @property
    def spec(self) -> str:
        return "layers(" + "; ".join(rule.spec for rule in self.rules) + ")"

    def bind(self, layout: Layout) -> Bound:
        return Bound(self.spec, layout, [self._groups(segment) for segment in layout.segments])

    def _groups(self, segment: Segment) -> list[Group]:
        pieces: dict[int, list[Slice]] = {}
        for piece in segment.slices:
            rule = next(i for i, rule in enumerate(self.rules) if fnmatchcase(piece.tensor.name, rule.pattern))
            pieces.setdefault(rule, []).append(piece)
        return [_group(self.rules[rule].chain, found) for rule, found in sorted(pieces.items())]


def chains(codec: Chain | LowRank | Layers) -> list[Chain | LowRank]:
    """Those that a codec is made of: one, or one a rule."""
    return [rule.chain for rule in codec.rules] if isinstance(codec, Layers) else [codec]


def _group(chain: Chain | LowRank, pieces: list[Slice]) -> Group:
    return Group(chain.placed(pieces), tuple(slice(piece.at, piece.at + piece.size) for piece in pieces))
