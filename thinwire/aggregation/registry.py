"""All codecs and coders by name; registering one is one line, and parser and conformance suite pick it up.

Those of other packages come by the entry-point group `thinwire.codecs` and are steps of a chain like ours.
"""

from __future__ import annotations

from typing import Any

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
from thinwire.aggregation.methods.powersgd import PowerSgd
from thinwire.aggregation.methods.qsgd import Qsgd
from thinwire.aggregation.methods.randk import RandK
from thinwire.aggregation.methods.sign import Sign
from thinwire.aggregation.methods.ternary import Ternary
from thinwire.aggregation.methods.threshold import Threshold
from thinwire.aggregation.methods.topk import TopK
from thinwire.aggregation.methods.twobit import TwoBit
from thinwire.core.errors import CodecError
from thinwire.core.layout import Layout
from thinwire.core.registry import Registry
from thinwire.core.sections import ServerSection, UplinkSection


class Codecs(Registry[type[Step]]):
    """The registry as a plan's check wants it: it parses chains and knows which of them feedback may stand around."""

    def admit(self, name: str, thing: Any) -> type[Step]:
        """A sparsifier, a quantizer, or a compressor that stands last; its own name stands in its examples."""
        self._require(name, thing, NEEDED)
        last = thing.role == "coder" and all(hasattr(thing, part) for part in ("shrink", "grow"))
        if thing.role not in ("quantizer", "sparsifier") and not last:
            why = f"{_called(thing)} is a {thing.role}: how indices and symbols are coded is part of the frame"
            hint = 'role = "quantizer"; or a coder of whole streams: thinwire/aggregation/coders/compressor.py'
            raise CodecError(f"{name!r} cannot be a step", why=why, hint=hint)
        if not thing.examples or any(name not in example for example in thing.examples):
            why = f"{_called(thing)} has the examples {list(thing.examples)}"
            raise CodecError(f"{name!r} stands in none of its examples", why=why, hint=f'examples = ("{name}",)')
        self._require(name, thing, ("spec", *PARTS.get(thing.role, ())))
        step: type[Step] = thing
        return step

    def _require(self, name: str, thing: Any, parts: tuple[str, ...]) -> None:
        missing = [part for part in parts if not _has(thing, part)]
        if missing := missing + sorted(set(getattr(thing, "__abstractmethods__", ())) - set(missing)):
            raise CodecError(
                f"{name!r} is no step of a chain",
                why=f"{_called(thing)} has no {', '.join(missing)}",
                hint="thinwire/aggregation/codec.py says what a Quantizer and a Sparsifier have",
            )

    def parse(self, spec: str) -> Codec:
        from thinwire.aggregation.parse import parse

        return parse(spec)

    def require_contraction(self, spec: str, feedback: str = "classic") -> None:
        """`CodecError` when this kind of feedback around this chain would diverge (design, section 4)."""
        from thinwire.aggregation.ef21 import ef21
        from thinwire.aggregation.feedback import feedback as classic

        around = ef21 if feedback == "ef21" else classic
        around(self.parse(spec)).bind(Layout.of({"w": (8, 8)}))

    def require_downlink(self, spec: str) -> None:
        """`CodecError` when this chain cannot carry the model to the devices (design, section 6)."""
        from thinwire.aggregation.downlink import require_downlink

        require_downlink(spec)

    def require_optimizer(self, server: ServerSection) -> None:
        """`CodecError` when there is no such server optimizer, or it does not know a key that is given."""
        from thinwire.aggregation.optimizers import server_optimizer

        server_optimizer(server)

    def require_uplink(self, uplink: UplinkSection) -> None:
        """`CodecError` when rules by layer cannot stand beside the codec, or a warm-up finds no ratio."""
        from thinwire.aggregation.warmup import codec_of

        try:
            for spec in (uplink.codec, *uplink.layers.values()):
                self.parse(spec)
        except CodecError:
            return  # it is refused by itself
        codec_of(uplink, 0)


NEEDED = ("role", "examples", "read")
PARTS = {
    "quantizer": (
        "kind", "bits", "seeded", "symbols_dtype", "scales_dtype", "scales_count", "under_feedback", "over", "quantize",
        "dequantize", "check",
    ),
    "sparsifier": ("kind", "fixed", "seeded", "looks", "count", "select"),
}  # fmt: skip


def _has(thing: Any, part: str) -> bool:
    """Whether a class has it, or its instances will."""
    return hasattr(thing, part) or part in getattr(thing, "__dataclass_fields__", {})


def _called(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__name__', type(thing).__name__)}"


codecs = Codecs("codec", group="thinwire.codecs")
STEPS: tuple[type[Step], ...] = (
    Identity, Fp16, Bf16, Int8, Qsgd, Natural, Ternary, Sign, TwoBit, Drive, Eden, Threshold, TopK, RandK,
    PowerSgd, Pack, Delta, Rice, Zstd,
)  # fmt: skip
for step in STEPS:
    codecs.add(step.__name__.lower(), step)
