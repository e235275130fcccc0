"""All codecs as a plan's check wants them: what can be parsed, and what may stand where."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from thinwire.aggregation.downlink import require_downlink
from thinwire.aggregation.server_optimizers import server_optimizer
from thinwire.compression.base import BoundCodec, Codec, ResidualOnly, Step
from thinwire.compression.catalog import bits
from thinwire.compression.chain import Chain
from thinwire.compression.codecs.sparsify import RandK, TopK
from thinwire.compression.feedback import ef21, feedback
from thinwire.compression.feedback import feedback as classic
from thinwire.compression.lowrank import LowRank
from thinwire.compression.registry import steps
from thinwire.compression.spec import Layers, chains, parse, with_layers
from thinwire.core.errors import CodecError
from thinwire.core.layout import Layout
from thinwire.core.plan_schema import ServerSection, UplinkSection, Warmup

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

__all__ = [
    "Warmup",
    "codec_of",
    "milder",
]


class Book(Mapping[str, type[Step]]):
    """Steps by name, those of installed packages among them, and the rules of chains."""

    def __getitem__(self, name: str) -> type[Step]:
        return steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(steps)

    def __len__(self) -> int:
        return len(steps)

    def parse(self, spec: str) -> Codec:
        """`CodecError` says what is wrong with a spec, and names the nearest right one."""
        return parse(spec)

    def require_contraction(self, spec: str, feedback: str = "classic") -> None:
        """`CodecError` when this kind of feedback around this chain would diverge (design, section 4)."""
        around = ef21 if feedback == "ef21" else classic
        around(parse(spec)).bind(Layout.of({"w": (8, 8)}))

    def require_alone(self, spec: str) -> None:
        """`CodecError` for a chain of whose updates only feedback makes a sum that is right (design, section 4).

        What has a way of its own inside a residual may stand alone: of ternary, which is TernGrad, the clip is all
        that moves the mean.
        """
        for chain in chains(parse(spec)):
            if isinstance(chain.under_feedback().kind, ResidualOnly):
                why = "nothing is promised of one update: what it does not send has to wait in a residual, or is lost"
                hint = '[uplink] feedback = "classic", or a chain that is right by itself: int8'
                raise CodecError(f"{chain.spec!r} without feedback", why=why, hint=hint)

    def require_downlink(self, spec: str) -> None:
        """`CodecError` when this chain cannot carry the model to the devices (design, section 6)."""
        require_downlink(spec)

    def require_optimizer(self, server: ServerSection) -> None:
        """`CodecError` when there is no such server optimizer, or it does not know a key that is given."""
        server_optimizer(server)

    def require_ladder(self, uplink: UplinkSection) -> None:
        """`CodecError` where a ladder does not get smaller from codec to codec, or rules by layer do not fit one."""
        require_ladder(uplink)

    def require_uplink(self, uplink: UplinkSection) -> None:
        """`CodecError` when rules by layer cannot stand beside the codec, or a warm-up finds no ratio."""
        try:
            for spec in (uplink.codec, *uplink.ladder, *uplink.layers.values()):
                parse(spec)
        except CodecError:
            return  # it is refused by itself
        codec_of(uplink, 0)


codecs = Book()


# How a device encodes under a plan: the codec of the round's ask within what [uplink] says of feedback.


def encoder(spec: str, uplink: UplinkSection, layout: Layout) -> BoundCodec:
    """The codec `spec` as this plan's devices encode with it; `CodecError` where its feedback would diverge."""
    codec = parse(spec)
    if uplink.feedback == "none":
        return codec.bind(layout)
    if uplink.feedback == "ef21":
        return ef21(codec).bind(layout)
    return feedback(codec, uplink.velocity, masked=uplink.dgc).bind(layout)


# The ladder: codecs from the mildest to the harshest, of which each device is asked in the one that its link takes.


def rungs(uplink: UplinkSection) -> list[str]:
    """The codecs in which a device may be asked, mildest first; one where there is no ladder.

    >>> rungs(UplinkSection(ladder=["fp16", "topk(0.01) > int8"], layers={"*.bias": "fp16"}))
    ['layers("*.bias"=fp16; *=fp16)', 'layers("*.bias"=fp16; *=topk(0.01) > int8)']
    """
    return [with_layers(spec, uplink.layers) for spec in uplink.codecs]


def require_ladder(uplink: UplinkSection) -> None:
    """`CodecError` where a ladder does not get smaller from codec to codec, or rules by layer do not fit one."""
    rungs(uplink)
    if len(uplink.ladder) == 1:
        raise CodecError(
            f"[uplink] ladder = [{uplink.ladder[0]!r}] has one codec",
            why="there is nothing to choose from",
            hint=f"[uplink] codec = {uplink.ladder[0]!r}, or a harsher one behind it",
        )
    for milder, harsher in pairwise(uplink.ladder):
        if bits(harsher) >= bits(milder):
            raise CodecError(
                f"[uplink] ladder has {harsher!r} behind {milder!r}",
                why=f"it sends {bits(harsher):.3g} bits a parameter, the one before it {bits(milder):.3g}",
                hint="mildest first: [uplink] ladder = ["
                + ", ".join(f"'{parse(spec).spec}'" for spec in sorted(set(uplink.ladder), key=bits, reverse=True))
                + "]",
            )


# Warm-up: milder ratios for the first rounds, written into each round's ask (Lin et al. 2018, section 3.3).


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


# Rules by layer that decide nothing, looked for once the model is known.
#
# A misspelt pattern would be followed by nobody: its tensors would go the way of all others, and no one would see it.


NAMED = 12  # tensors in a sentence


def require_rules(plan: RunPlan, layout: Layout) -> None:
    """`CodecError` where a rule of the plan is for none of what travels in `layout`, or for tensors of rules before it.

    The last one, `*`, is for what is left, and that may be nothing.
    """
    for place, spec in _specs(plan):
        codec = parse(spec)
        if isinstance(codec, Layers):
            pieces = (piece for segment in layout.segments for piece in segment.slices)
            _require(place, codec, list(dict.fromkeys(piece.tensor.name for piece in pieces)))


def _specs(plan: RunPlan) -> Iterator[tuple[str, str]]:
    for spec in rungs(plan.uplink):
        yield "[uplink]", spec
    yield "[downlink]", plan.downlink.codec


def _require(place: str, codec: Layers, names: list[str]) -> None:
    left = names
    for rule in codec.rules[:-1]:
        mine = [name for name in left if fnmatchcase(name, rule.pattern)]
        left = [name for name in left if name not in mine]
        if mine:
            continue
        taken = [name for name in names if fnmatchcase(name, rule.pattern)]
        near = difflib.get_close_matches(rule.pattern, names, n=1, cutoff=0.5)
        why = f"no trained tensor of this model is called like that; there are {_listed(names)}"
        hint = f"a pattern for {near[0]}, or leave the rule out" if near else "leave the rule out"
        if taken:
            why, hint = f"rules before it decide for {_listed(taken)}", "put it before them, or leave it out"
        raise CodecError(f"{place} the rule {rule.spec} is for nothing", why=why, hint=hint)


def _listed(names: list[str]) -> str:
    """So many names as a person reads.

    >>> _listed(["a", "b"]), _listed([])
    ('a, b', 'none')
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"
