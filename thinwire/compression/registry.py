"""The registry of all codecs and coders by name; registering one is one line.

Parser and conformance suite read the registry. Stages of other packages come by the entry-point group `thinwire.codecs`
and work in a chain like the built-in ones.
"""

from __future__ import annotations

from typing import Any

from thinwire.compression.base import Step
from thinwire.compression.codecs.bitpack import Pack
from thinwire.compression.codecs.byte_codecs import Zstd
from thinwire.compression.codecs.casts import Bf16, Fp16, Identity
from thinwire.compression.codecs.eden import Drive, Eden
from thinwire.compression.codecs.integers import Delta, Rice
from thinwire.compression.codecs.low_bit import Sign, Ternary, TwoBit
from thinwire.compression.codecs.natural import Natural
from thinwire.compression.codecs.sparsify import RandK, Threshold, TopK
from thinwire.compression.codecs.uniform import Int8, Qsgd
from thinwire.compression.lowrank import PowerSgd
from thinwire.core.errors import CodecError
from thinwire.core.registry import Registry


class Steps(Registry[type[Step]]):
    """The stages that a chain can be made of."""

    def admit(self, name: str, thing: Any) -> type[Step]:
        """Return a stage of another package; raise CodecError if it is invalid.

        Valid are sparsifiers, quantizers, and compressors for the end of a chain, if each example holds the stage's
        name.
        """
        self._require(name, thing, NEEDED)
        last = thing.role == "coder" and all(hasattr(thing, part) for part in ("shrink", "grow"))
        if thing.role not in ("quantizer", "sparsifier") and not last:
            why = f"{_called(thing)} is a {thing.role}: how indices and symbols are coded is part of the frame"
            hint = 'role = "quantizer"; or a coder of whole streams: thinwire/compression/codecs/byte_codecs.py'
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
                hint="thinwire/compression/base.py says what a Quantizer and a Sparsifier have",
            )


NEEDED = ("role", "examples", "read")
PARTS = {
    "quantizer": (
        "kind", "bits", "seeded", "symbols_dtype", "scales_dtype", "scales_count", "under_feedback", "over", "quantize",
        "dequantize", "check",
    ),
    "sparsifier": ("kind", "fixed", "seeded", "looks", "count", "select"),
}  # fmt: skip


def _has(thing: Any, part: str) -> bool:
    """Return True if the class has this attribute, or its instances will have it as a field."""
    return hasattr(thing, part) or part in getattr(thing, "__dataclass_fields__", {})


def _called(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__name__', type(thing).__name__)}"


steps = Steps("codec", group="thinwire.codecs")
OWN: tuple[type[Step], ...] = (
    Identity, Fp16, Bf16, Int8, Qsgd, Natural, Ternary, Sign, TwoBit, Drive, Eden, Threshold, TopK, RandK,
    PowerSgd, Pack, Delta, Rice, Zstd,
)  # fmt: skip
for step in OWN:
    steps.add(step.__name__.lower(), step)
