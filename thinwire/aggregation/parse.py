"""From a spec to a codec: `parse("topk(0.01) > int8 > zstd")`.

    chain  = [sparsifier ">"] [quantizer] {">" coder}
    layers = "layers(" PATTERN "=" chain {";" PATTERN "=" chain} ")"

The spec that a codec carries is canonical: exact decimals, one space around ">", coders that are always there left
out (`delta` on indices, `pack` on symbols). `parse(parse(s).spec) == parse(s)`.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from thinwire.aggregation.cast import Fp16, Identity
from thinwire.aggregation.chain import Chain
from thinwire.aggregation.codec import Quantizer, Sparsifier
from thinwire.aggregation.layers import Layers, Rule
from thinwire.aggregation.quantize import Int8
from thinwire.aggregation.registry import codecs
from thinwire.aggregation.sparsify import TopK
from thinwire.core.errors import CodecError

STAGE = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(?:\(([^()]*)\))?\s*")
ORDER = {"sparsifier": 0, "quantizer": 1, "coder": 2}
ROLES = {"topk": "sparsifier", "identity": "quantizer", "fp16": "quantizer", "int8": "quantizer"}
PLAIN: dict[str, Quantizer] = {"identity": Identity(), "fp16": Fp16(), "int8": Int8()}


def parse(spec: str) -> Chain | Layers:
    """The codec of a spec; `CodecError` says what is wrong and names the nearest right one.

    >>> parse("topk(0.010)>int8 > delta > zstd").spec
    'topk(0.01) > int8 > zstd'
    """
    text = spec.strip()
    if text.startswith("layers(") and text.endswith(")"):
        return _layers(text[len("layers(") : -1])
    sparsifier: Sparsifier | None = None
    quantizer: Quantizer = Identity()
    stages, coders, last = list[str](), set[str](), -1
    for stage in text.split(">"):
        match = STAGE.fullmatch(stage)
        if match is None:
            raise CodecError(f"cannot read {stage.strip()!r} in the codec {spec!r}", hint="topk(0.01) > int8 > zstd")
        name, argument = match.groups()
        codecs.find(name)
        role = ROLES.get(name, "coder")
        if ORDER[role] < last or (ORDER[role] == last and role != "coder"):
            raise _senseless(spec, name)
        last = ORDER[role]
        if role == "sparsifier":
            ratio = _ratio(name, argument)
            sparsifier = TopK(Fraction(ratio))
            stages.append(f"{name}({_decimal(ratio)})")
            continue
        if argument is not None:
            raise CodecError(f"{name} takes no argument", why=f"it was given ({argument})", hint=name)
        if role == "quantizer":
            quantizer = PLAIN[name]
            stages += [name] if name != "identity" or sparsifier is None else []
        else:
            coders.add(name)
    if "delta" in coders and sparsifier is None:
        raise CodecError(
            f"delta in {spec!r} has nothing to code", why="it codes the indices of a sparsifier", hint="pack"
        )
    if not stages:
        stages = ["identity"]
    zstd = "zstd" in coders
    return Chain(" > ".join([*stages, *(["zstd"] if zstd else [])]), sparsifier, quantizer, zstd)


def _senseless(spec: str, name: str) -> CodecError:
    names = [stage.strip() for stage in spec.split(">")]
    in_order = sorted(names, key=lambda s: ORDER[ROLES.get(s.split("(")[0].strip(), "coder")])
    once = [s for i, s in enumerate(in_order) if _role(s) == "coder" or _role(s) not in map(_role, in_order[:i])]
    return CodecError(
        f"{name} cannot stand there in {spec!r}",
        why="a chain picks coordinates, then makes symbols of them, then codes those: each at most once",
        hint=" > ".join(once),
    )


def _role(stage: str) -> str:
    return ROLES.get(stage.split("(", maxsplit=1)[0].strip(), "coder")


def _ratio(name: str, argument: str | None) -> Decimal:
    try:
        ratio = Decimal((argument or "").strip())
    except InvalidOperation:
        raise CodecError(
            f"{name}({argument or ''}) has no ratio", why="it says which share is sent", hint=f"{name}(0.01)"
        ) from None
    if not (ratio.is_finite() and 0 < ratio <= 1 and -ratio.normalize().as_tuple().exponent <= 9):  # type: ignore[operator]  # finite
        why = "a ratio is a share between 0 and 1, of at most 9 decimals"
        raise CodecError(f"{name}({argument}) cannot be", why=why, hint=f"{name}(0.01)")
    return ratio


def _decimal(ratio: Decimal) -> str:
    return f"{ratio.normalize():f}"


def _layers(inside: str) -> Layers:
    rules = []
    for part in inside.split(";"):
        pattern, equals, chain = part.partition("=")
        pattern = pattern.strip().strip("\"'")
        if not equals or not pattern:
            raise CodecError(
                f"cannot read the rule {part.strip()!r}", why="a rule is PATTERN = CODEC", hint="*.bias = fp16"
            )
        inner = parse(chain)
        if isinstance(inner, Layers):
            raise CodecError(
                "layers within layers", why="a tensor follows the first rule that names it", hint="one list of rules"
            )
        rules.append(Rule(pattern, inner))
    if rules[-1].pattern != "*":
        raise CodecError("the last rule must be for *", why="every tensor needs a codec", hint="; *=topk(0.01) > int8")
    return Layers(tuple(rules))


def with_layers(spec: str, layers: dict[str, str] | Any) -> str:
    """A plan's codec and its rules by layer as one canonical spec."""
    if not layers:
        return parse(spec).spec
    return parse("layers(" + "; ".join([*(f"{p}={s}" for p, s in layers.items()), f"*={spec}"]) + ")").spec
