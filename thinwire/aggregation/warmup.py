"""Warm-up: milder ratios for the first rounds, written into each round's ask (Lin et al. 2018, section 3.3)."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from thinwire.aggregation.chain import Chain
from thinwire.aggregation.layers import Layers, chains
from thinwire.aggregation.lowrank import LowRank
from thinwire.aggregation.methods.randk import RandK
from thinwire.aggregation.methods.topk import TopK
from thinwire.aggregation.parse import parse
from thinwire.aggregation.rungs import rungs
from thinwire.core.errors import CodecError
from thinwire.core.sections import UplinkSection, Warmup


def codec_of(uplink: UplinkSection, steps_made: int) -> str:
    """The codec of the round after so many steps: the plan's, or in its warm-up the same with a milder ratio.

    >>> uplink = UplinkSection(codec="dgc(0.001)", warmup=Warmup(rounds=4, ratios=[0.25, 0.0625]))
    >>> [codec_of(uplink, step) for step in (0, 1, 2, 4)]
    ['topk(0.25)', 'topk(0.25)', 'topk(0.0625)', 'topk(0.001)']
    """
    spec = rungs(uplink)[0]
    warmup = uplink.warming
    if warmup is None or steps_made >= warmup.rounds:
        return spec
    ratio = Decimal(str(warmup.ratios[steps_made * len(warmup.ratios) // warmup.rounds]))
    return milder(spec, ratio)


def milder(spec: str, ratio: Decimal) -> str:
    """A codec that sends at least this share wherever it sends a share; `CodecError` where it sends none."""
    codec = parse(spec)
    if isinstance(codec, Layers):
        made: Layers | Chain = Layers(tuple(replace(rule, chain=_milder(rule.chain, ratio)) for rule in codec.rules))
    else:
        made = _milder(codec, ratio)  # type: ignore[assignment]  # of a chain it is one
    if not _has_ratio(codec):
        raise CodecError(f"a warm-up of {spec!r}", why="it has no ratio that could be milder", hint="topk(0.01) > int8")
    return made.spec


def _milder(chain: Chain | LowRank, ratio: Decimal) -> Chain | LowRank:
    if isinstance(chain, LowRank) or not isinstance(chain.sparsifier, TopK | RandK):
        return chain
    own = chain.sparsifier.ratio
    return replace(chain, sparsifier=replace(chain.sparsifier, ratio=max(own, ratio, key=Fraction).normalize()))


def _has_ratio(codec: Chain | LowRank | Layers) -> bool:
    return any(isinstance(chain, Chain) and isinstance(chain.sparsifier, TopK | RandK) for chain in chains(codec))


__all__ = ["Warmup", "codec_of", "milder"]
