"""All codecs and coders by name; registering one is one line, and parser and conformance suite pick it up."""

from __future__ import annotations

from thinwire.aggregation.cast import Fp16, Identity
from thinwire.aggregation.codec import Codec, Step
from thinwire.aggregation.coders import Delta, Pack, Zstd
from thinwire.aggregation.quantize import Int8
from thinwire.aggregation.sparsify import TopK
from thinwire.core.layout import Layout
from thinwire.core.registry import Registry


class Codecs(Registry[type[Step]]):
    """The registry as a plan's check wants it: it parses chains and knows which of them feedback may stand around."""

    def parse(self, spec: str) -> Codec:
        from thinwire.aggregation.parse import parse

        return parse(spec)

    def require_contraction(self, spec: str) -> None:
        """`CodecError` when error feedback around this chain would diverge (design, section 4)."""
        from thinwire.aggregation.feedback import feedback

        feedback(self.parse(spec)).bind(Layout.of({"w": (8, 8)}))


codecs = Codecs("codec")
codecs.add("identity", Identity)
codecs.add("fp16", Fp16)
codecs.add("int8", Int8)
codecs.add("topk", TopK)
codecs.add("pack", Pack)
codecs.add("delta", Delta)
codecs.add("zstd", Zstd)
