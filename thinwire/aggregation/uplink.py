"""How a device encodes under a plan: the codec of the round's ask within what [uplink] says of feedback."""

from __future__ import annotations

from thinwire.aggregation.codec import BoundCodec
from thinwire.aggregation.ef21 import ef21
from thinwire.aggregation.feedback import feedback
from thinwire.aggregation.parse import parse
from thinwire.core.layout import Layout
from thinwire.core.sections import UplinkSection


def encoder(spec: str, uplink: UplinkSection, layout: Layout) -> BoundCodec:
    """The codec `spec` as this plan's devices encode with it; `CodecError` where its feedback would diverge."""
    codec = parse(spec)
    if uplink.feedback == "none":
        return codec.bind(layout)
    if uplink.feedback == "ef21":
        return ef21(codec).bind(layout)
    return feedback(codec, uplink.velocity, masked=uplink.dgc).bind(layout)
