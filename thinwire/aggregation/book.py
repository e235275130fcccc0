"""All codecs as a plan's check wants them: what can be parsed, and what may stand where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thinwire.aggregation.codec import Codec, ResidualOnly, Step
from thinwire.aggregation.downlink import require_downlink
from thinwire.aggregation.ef21 import ef21
from thinwire.aggregation.feedback import feedback as classic
from thinwire.aggregation.layers import chains
from thinwire.aggregation.optimizers import server_optimizer
from thinwire.aggregation.parse import parse
from thinwire.aggregation.registry import steps
from thinwire.aggregation.rungs import require_ladder
from thinwire.aggregation.warmup import codec_of
from thinwire.core.errors import CodecError
from thinwire.core.layout import Layout
from thinwire.core.sections import ServerSection, UplinkSection


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
