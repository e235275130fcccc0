"""From a spec to a codec: `parse("topk(0.01) > int8 > zstd")`.

    chain  = [sparsifier ">"] [quantizer] {">" coder} | lowrank [">" cast] [">" compressor]
    layers = "layers(" PATTERN "=" chain {";" PATTERN "=" chain} ")"

The spec that a codec carries is canonical: exact decimals, one space around ">", patterns in double quotes, coders
that are always there left out (`delta` on indices, `pack` on symbols). `parse(parse(s).spec) == parse(s)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import cast

from thinwire.aggregation.chain import PLAIN, Chain
from thinwire.aggregation.codec import Quantizer, Sparsifier, Step
from thinwire.aggregation.coded import Coded
from thinwire.aggregation.coders.compressor import Last
from thinwire.aggregation.coders.delta import Delta
from thinwire.aggregation.coders.rice import Rice
from thinwire.aggregation.layers import Layers, Rule
from thinwire.aggregation.lowrank import LowRank
from thinwire.aggregation.methods.fp16 import Fp16
from thinwire.aggregation.methods.powersgd import PowerSgd
from thinwire.aggregation.registry import codecs
from thinwire.core.errors import CodecError

STAGE = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*(?:\(([^()]*)\))?\s*")
RULE = re.compile(r'\s*(?:"([^"]+)"|([^"=;]+?))\s*=([^"=;]+)(?:;|$)')
ALIASES = {
    "stc": ("topk({}) > sign > rice", "sparse ternary compression (Sattler et al. 2019)"),
    "dgc": ("topk({})", "deep gradient compression; in a plan with all its four parts (Lin et al. 2018)"),
    "fedpaq": ("qsgd({})", "FedPAQ (Reisizadeh et al. 2020)"),
    "signsgd": ("sign(scaled)", "signSGD with a scale (Bernstein et al. 2018; Karimireddy et al. 2019)"),
}
ORDER = {"sparsifier": 0, "lowrank": 0, "quantizer": 1, "coder": 2}
CASTS = ("identity", "fp16", "bf16")
LONGEST = 4096  # characters of a spec: one comes with every ask


@lru_cache(maxsize=64)  # a codec never changes, and one comes with every ask
def parse(spec: str) -> Chain | LowRank | Layers:
    """The codec of a spec; `CodecError` says what is wrong and names the nearest right one.

    >>> parse("topk(0.010)>int8 > delta > zstd").spec
    'topk(0.01) > int8 > zstd'
    """
    text = spec.strip()
    if len(text) > LONGEST:
        raise CodecError(f"a codec of {len(text)} characters", why=f"at most {LONGEST} are read")
    if text.startswith("layers(") and text.endswith(")"):
        return _layers(text[len("layers(") : -1])
    return _chain(text)


def _chain(spec: str) -> Chain | LowRank:
    steps = [_step(stage, spec) for written in spec.split(">") for stage in _expanded(written).split(">")]
    ranks = [ORDER[step.role] for step in steps]
    coders = [step for step in steps if step.role == "coder"]
    codes = [step.spec for step in coders]
    last = next((step for step in coders if isinstance(step, Last)), None)
    if (
        ranks != sorted(ranks)
        or max(map(ranks.count, (0, 1))) > 1
        or len(set(codes)) < len(codes)
        or any(isinstance(step, Last) for step in coders[:-1])
    ):
        raise _senseless(spec, steps)
    sparsifier = next((step for step in steps if step.role == "sparsifier"), None)
    quantizer = next((step for step in steps if step.role == "quantizer"), PLAIN)
    coded = Coded(Rice.spec in codes, last)
    chain = Chain(cast("Sparsifier | None", sparsifier), cast("Quantizer", quantizer), coded)
    low = next((step for step in steps if step.role == "lowrank"), None)
    if low is not None:
        return _low_rank(spec, cast("PowerSgd", low), chain, codes)
    _require_work(spec, chain, codes)
    return chain


def _low_rank(spec: str, step: PowerSgd, inner: Chain, codes: list[str]) -> LowRank:
    """CodecError unless factors are cast at most: they multiply, and so do their errors."""
    last = inner.coded.last
    if inner.quantizer.spec not in CASTS or set(codes) - ({last.spec} if last else set()):
        inner = replace(inner, quantizer=Fp16(), coded=Coded(last=last))
        raise CodecError(
            f"{spec!r} cannot be",
            why="the factors of a low rank may be cast, and pass through a compressor, but no more",
            hint=LowRank(step, inner).spec,
        )
    return LowRank(step, inner)


def _require_work(spec: str, chain: Chain, codes: list[str]) -> None:
    """CodecError where a coder has nothing to code."""
    places = chain.sparsifier is not None and not chain.sparsifier.seeded
    if Delta.spec in codes and (chain.coded.rice or not places):
        why = "rice codes the places already" if places else "it codes the places that a sparsifier sends"
        raise CodecError(f"delta in {spec!r} has nothing to code", why=why, hint=chain.spec)
    if chain.coded.rice and not places and chain.quantizer.bits > 8:
        why = "it codes places that a sparsifier sends, and symbols of at most 8 bits"
        plain = replace(chain, coded=replace(chain.coded, rice=False))
        raise CodecError(f"rice in {spec!r} has nothing to code", why=why, hint=plain.spec)


def _expanded(stage: str) -> str:
    """What an alias stands for; everything else as it is.

    >>> _expanded("stc(0.01)")
    'topk(0.01) > sign > rice'
    """
    match = STAGE.fullmatch(stage)
    return ALIASES[match[1]][0].format(match[2] or "") if match and match[1] in ALIASES else stage


def _step(stage: str, spec: str) -> Step:
    match = STAGE.fullmatch(stage)
    if match is None:
        raise CodecError(f"cannot read {stage.strip()!r} in the codec {spec!r}", hint="topk(0.01) > int8 > zstd")
    name, argument = match.groups()
    kind = codecs.find(name)
    if argument is not None and not any(re.search(rf"\b{name}\(", example) for example in kind.examples):
        raise CodecError(f"{name} takes no argument", why=f"it was given ({argument})", hint=name)
    return kind.read(argument)


def _senseless(spec: str, steps: list[Step]) -> CodecError:
    found: dict[str, Step] = {}
    for step in steps:
        found.setdefault(step.spec if step.role == "coder" else step.role, step)
    if "lowrank" in found:
        found.pop("sparsifier", None)
    in_order = sorted(found.values(), key=lambda step: (ORDER[step.role], isinstance(step, Last)))
    return CodecError(
        f"the steps of {spec!r} stand in no sensible order",
        why="a chain picks coordinates, makes symbols of them, then codes those: each at most once, a compressor last",
        hint=" > ".join(step.spec for step in in_order),
    )


def _layers(inside: str) -> Layers:
    rules, at = list[Rule](), 0
    while at < len(inside) or not rules:
        match = RULE.match(inside, at)
        if match is None:
            raise CodecError(
                f"cannot read the rule {inside[at:].strip()!r}",
                why="a rule is PATTERN = CODEC, and rules stand apart by ;",
                hint='layers("*.bias"=fp16; *=topk(0.01) > int8)',
            )
        rules.append(Rule(match[1] or match[2], _chain(match[3].strip())))
        at = match.end()
    patterns = [rule.pattern for rule in rules]
    if patterns[-1] != "*":
        raise CodecError("the last rule must be for *", why="every tensor needs a codec", hint="; *=topk(0.01) > int8")
    if twice := {pattern for pattern in patterns if patterns.count(pattern) > 1}:
        raise CodecError(f"two rules for {twice.pop()}", why="the first one that names a tensor decides")
    return Layers(tuple(rules))


def with_layers(spec: str, layers: Mapping[str, str]) -> str:
    """A plan's codec and its rules by layer as one canonical spec.

    >>> with_layers("int8", {"*.bias": "fp16"})
    'layers("*.bias"=fp16; *=int8)'
    """
    if not layers:
        return parse(spec).spec
    rules = [f'"{pattern}"={chain}' for pattern, chain in layers.items()]
    return parse(f"layers({'; '.join([*rules, f'*={spec}'])})").spec
