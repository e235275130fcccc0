"""The ladder: codecs from the mildest to the harshest, of which each device is asked in the one that its link takes."""

from __future__ import annotations

from itertools import pairwise

from thinwire.aggregation.described import bits
from thinwire.aggregation.parse import parse, with_layers
from thinwire.core.errors import CodecError
from thinwire.core.sections import UplinkSection


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
