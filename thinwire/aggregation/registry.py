"""All codecs and coders by name; registering one is one line, and parser and conformance suite pick it up."""

from __future__ import annotations

from thinwire.aggregation.codec import Codec, Step
from thinwire.aggregation.coders.delta import Delta
from thinwire.aggregation.coders.pack import Pack
from thinwire.aggregation.coders.rice import Rice
from thinwire.aggregation.coders.zstd import Zstd
from thinwire.aggregation.methods.bf16 import Bf16
from thinwire.aggregation.methods.eden import Drive, Eden
from thinwire.aggregation.methods.fp16 import Fp16
from thinwire.aggregation.methods.identity import Identity
from thinwire.aggregation.methods.int8 import Int8
from thinwire.aggregation.methods.natural import Natural
from thinwire.aggregation.methods.qsgd import Qsgd
from thinwire.aggregation.methods.randk import RandK
from thinwire.aggregation.methods.sign import Sign
from thinwire.aggregation.methods.ternary import Ternary
from thinwire.aggregation.methods.threshold import Threshold
from thinwire.aggregation.methods.topk import TopK
from thinwire.aggregation.methods.twobit import TwoBit
from thinwire.core.layout import Layout
from thinwire.core.registry import Registry


class Codecs(Registry[type[Step]]):
    """The registry as a plan's check wants it: it parses chains and knows which of them feedback may stand around."""

    def parse(self, spec: str) -> Codec:
        from thinwire.aggregation.parse import parse

        return parse(spec)

    def require_contraction(self, spec: str, feedback: str = "classic") -> None:
        """`CodecError` when this kind of feedback around this chain would diverge (design, section 4)."""
        from thinwire.aggregation.ef21 import ef21
        from thinwire.aggregation.feedback import feedback as classic

        around = ef21 if feedback == "ef21" else classic
        around(self.parse(spec)).bind(Layout.of({"w": (8, 8)}))


codecs = Codecs("codec")
STEPS: tuple[type[Step], ...] = (
    Identity, Fp16, Bf16, Int8, Qsgd, Natural, Ternary, Sign, TwoBit, Drive, Eden, Threshold, TopK, RandK,
    Pack, Delta, Rice, Zstd,
)  # fmt: skip
for step in STEPS:
    codecs.add(step.__name__.lower(), step)
