"""Codec specs: parses `topk(0.01) > int8 > zstd` into a chain, per-tensor rules into `PerTensorCodec`, and aliases of
papers.

    chain  = [sparsifier ">"] [quantizer] {">" coder} | lowrank [">" cast] [">" compressor]
    layers = "layers(" PATTERN "=" chain {";" PATTERN "=" chain} ")"

The spec that a codec carries is canonical: exact decimals, one space around ">", and patterns in double quotes. It
leaves out the coders that are always present (`delta` on indices, `pack` on symbols; `rans` on the symbols of a
quantizer that is `entropy_coded`).

Per-tensor rules assign a chain to each tensor by its name: `layers("*.bias"=fp16; *=topk(0.01) > int8)`.

Aliases are names of the literature for chains of stages: `stc(0.01)` is `topk(0.01) > sign > rice`. `ALIASES` names the
paper and says where this implementation differs from it.

Invariant: `parse(parse(s).spec) == parse(s)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from thinwire.compression.base import Compressor, Quantizer, Sparsifier, Step
from thinwire.compression.chain import PLAIN, Chain, SegmentedCodec, TensorGroup
from thinwire.compression.codecs import STAGES, load, registry
from thinwire.compression.frame import NumberCoder, StreamCoders
from thinwire.core.errors import CodecError

if TYPE_CHECKING:
    from thinwire.compression.codecs.powersgd import LowRank, PowerSgd
    from thinwire.core.layout import Layout, Segment, Slice


@dataclass(frozen=True)
class TensorRule:
    """A per-tensor rule: tensors whose names match `pattern`, a shell pattern, use `chain`."""

    pattern: str
    chain: Chain | LowRank

    @property
    def spec(self) -> str:
        """Return the rule as it is written in a spec."""
        return f"{self.pattern}={self.chain.spec}" if self.pattern == "*" else f'"{self.pattern}"={self.chain.spec}'


@dataclass(frozen=True)
class PerTensorCodec:
    """A codec of per-tensor rules: the first rule that matches a tensor's name decides.

    All tensors of one rule in a segment are encoded together: they share the budget of a sparsifier, buckets and
    streams.
    """

    rules: tuple[TensorRule, ...]

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        return "layers(" + "; ".join(rule.spec for rule in self.rules) + ")"

    def bind(self, layout: Layout) -> SegmentedCodec:
        """Return this codec for the segments of a layout, with one group for each rule that matches a tensor."""
        return SegmentedCodec(self.spec, layout, [self._groups(segment) for segment in layout.segments])

    def _groups(self, segment: Segment) -> list[TensorGroup]:
        pieces: dict[int, list[Slice]] = {}
        for piece in segment.slices:
            rule = next(i for i, rule in enumerate(self.rules) if fnmatchcase(piece.tensor.name, rule.pattern))
            pieces.setdefault(rule, []).append(piece)
        return [_group(self.rules[rule].chain, found) for rule, found in sorted(pieces.items())]


def chains(codec: Chain | LowRank | PerTensorCodec) -> list[Chain | LowRank]:
    """Return the chains of a codec: the codec itself, or one for each rule."""
    return [rule.chain for rule in codec.rules] if isinstance(codec, PerTensorCodec) else [codec]


def _group(chain: Chain | LowRank, pieces: list[Slice]) -> TensorGroup:
    return TensorGroup(chain.placed(pieces), tuple(slice(piece.at, piece.at + piece.size) for piece in pieces))


# Every assignment carries a spec, so it is untrusted: possessive repetitions keep the match linear in its length.
STAGE = re.compile(r"\s*+([A-Za-z][A-Za-z0-9_]*+)\s*+(?:\(([^()]*+)\)\s*+)?")
LAYERS = re.compile(r"layers\s*+\((.*)\)", re.DOTALL)
RULE = re.compile(r"""\s*+(?:"([^"]++)"\s*+|'([^'"]++)'\s*+|([^"'=;\s][^"'=;]*+))=([^"=;]++)(?:;|$)""")
DELTA, RICE, RANS = "delta", "rice", "rans"  # coders of the frame, which a chain names by itself
ORDER = {"sparsifier": 0, "lowrank": 0, "quantizer": 1, "coder": 2}
LONGEST = 4096  # characters of a spec, which every assignment carries
EXAMPLE, RULES = "topk(0.01) > int8 > zstd", 'layers("*.bias"=fp16; *=topk(0.01) > int8)'


@lru_cache(maxsize=64)  # a codec is immutable, and every assignment carries a spec
def parse(spec: str) -> Chain | LowRank | PerTensorCodec:
    """Return the codec of a spec, or raise CodecError with the nearest valid spec.

    >>> parse("topk(0.010)>int8 > delta > zstd").spec
    'topk(0.01) > int8 > zstd'
    """
    text = spec.strip()
    if len(text) > LONGEST:
        raise CodecError(f"a codec of {len(text)} characters", why=f"at most {LONGEST} are read")
    if rules := LAYERS.fullmatch(text):
        return _layers(rules[1])
    return _chain(text)


def _chain(spec: str) -> Chain | LowRank:
    steps = [step for written in spec.split(">") for step in _steps(written, spec)]
    ranks = [ORDER[step.role] for step in steps]
    coders = [step for step in steps if step.role == "coder"]
    codes = [step.spec for step in coders]
    if (
        ranks != sorted(ranks)
        or max(map(ranks.count, (0, 1))) > 1
        or len(set(codes)) < len(codes)
        or any(isinstance(step, Compressor) for step in coders[:-1])
    ):
        raise CodecError(
            f"the steps of {spec!r} stand in no sensible order",
            why="a chain picks coordinates or takes a low rank, makes symbols, then codes those: each at most once, a "
            "compressor last",
            hint=_nearest(steps).spec,
        )
    chain = _gathered(steps)
    low = next((step for step in steps if step.role == "lowrank"), None)
    if low is not None:
        return _low_rank(spec, cast("PowerSgd", low), chain, codes)
    _require_work(spec, chain, codes)
    return chain


def _gathered(steps: Sequence[Step]) -> Chain:
    """Return a chain of the first stage of each role; of quantizers, the first one other than identity."""
    sparsifier = next((step for step in steps if step.role == "sparsifier"), None)
    quantizer = next((step for step in steps if step.role == "quantizer" and step.spec != PLAIN), None) or load(PLAIN)()
    last = next((step for step in steps if isinstance(step, Compressor)), None)
    names = {step.spec for step in steps}
    named: NumberCoder | None = "rans" if RANS in names else "rice" if RICE in names else None
    return Chain(cast("Quantizer", quantizer), cast("Sparsifier | None", sparsifier), StreamCoders(named, last))


def _nearest(steps: Sequence[Step]) -> Chain | LowRank:
    """Return a valid chain near these stages, whose order is invalid."""
    chain = _gathered(steps)
    low = next((step for step in steps if step.role == "lowrank"), None)
    if low is not None:
        from thinwire.compression.codecs.powersgd import LowRank

        return LowRank(cast("PowerSgd", low), _cast(replace(chain, sparsifier=None)))
    return _without_idle_coder(chain)


def _low_rank(spec: str, step: PowerSgd, inner: Chain, codes: list[str]) -> LowRank:
    """Return the low-rank codec; raise CodecError if its factors pass through more than a cast and a compressor.

    Factors are multiplied, and so are their errors.
    """
    from thinwire.compression.codecs.powersgd import LowRank

    last = inner.coded.last
    if not inner.quantizer.is_cast or set(codes) - ({last.spec} if last else set()):
        raise CodecError(
            f"{spec!r} is not valid",
            why="the factors of a low rank may be cast, and pass through a compressor, but no more",
            hint=LowRank(step, _cast(inner)).spec,
        )
    return LowRank(step, inner)


def _cast(inner: Chain) -> Chain:
    """Return the part of a chain that factors of a low rank may pass through."""
    from thinwire.compression.codecs.identity_fp16_bf16 import Fp16

    quantizer = inner.quantizer if inner.quantizer.is_cast else Fp16()
    return replace(inner, quantizer=quantizer, coded=StreamCoders(last=inner.coded.last))


def _sends_places(chain: Chain) -> bool:
    return chain.sparsifier is not None and not chain.sparsifier.seeded


def _coder_works(chain: Chain) -> bool:
    """Return True if the chain has something for `rice` or `rans` to code, or names neither."""
    quantizer = chain.quantizer
    return not chain.coded.named or _sends_places(chain) or (quantizer.bits <= 8 and not quantizer.entropy_coded)


def _without_idle_coder(chain: Chain) -> Chain:
    return chain if _coder_works(chain) else replace(chain, coded=replace(chain.coded, named=None))


def _require_work(spec: str, chain: Chain, codes: list[str]) -> None:
    """Raise CodecError if a coder has nothing to code."""
    places, named, hint = _sends_places(chain), chain.coded.named, _without_idle_coder(chain).spec
    if RICE in codes and RANS in codes:
        why = "rans codes the same numbers, nearer to their entropy"
        raise CodecError(f"rice in {spec!r} has nothing to code", why=why, hint=hint)
    if DELTA in codes and (named or not places):
        why = f"{named} codes the places already" if places else "it codes the places that a sparsifier sends"
        raise CodecError(f"delta in {spec!r} has nothing to code", why=why, hint=hint)
    if not _coder_works(chain):
        why = "it codes places that a sparsifier sends, and symbols of at most 8 bits"
        if chain.quantizer.entropy_coded:
            why = f"the symbols of {chain.quantizer.spec} pass through rans already"
        raise CodecError(f"{named} in {spec!r} has nothing to code", why=why, hint=hint)


def _steps(written: str, spec: str) -> list[Step]:
    """Return the stage that was written, or the stages of an alias."""
    match = STAGE.fullmatch(written)
    if match is None:
        why = f"a chain is names with > between them, as in {EXAMPLE}"
        raise CodecError(f"cannot read {written.strip()!r} in the codec {spec!r}", why=why, hint=EXAMPLE)
    name, argument = match.groups()
    if name not in ALIASES:
        return [_step(name, argument)]
    parts = [STAGE.fullmatch(stage) for stage in expanded(name, argument).split(">")]
    try:
        return [_step(*part.groups()) for part in parts if part]
    except CodecError as error:
        raise said_of(name, argument, error) from None


def _step(name: str, argument: str | None) -> Step:
    if name == "layers":
        raise CodecError("layers within a chain", why="rules by layer are of a whole update", hint=RULES)
    kind = load(name) if name in STAGES else registry().find(name, also=ALIASES)
    if argument is not None and not any(re.search(rf"\b{name}\(", example) for example in kind.examples):
        raise CodecError(f"{name} takes no argument", why=f"it was given ({argument})", hint=name)
    return kind.read(argument)


def _layers(inside: str) -> PerTensorCodec:
    rules, at = list[TensorRule](), 0
    while at < len(inside) or not rules:
        match = RULE.match(inside, at)
        if match is None:
            raise CodecError(
                f"cannot read the rule {inside[at:].strip()!r}",
                why="a rule is PATTERN = CODEC, and rules stand apart by ;",
                hint=RULES,
            )
        rules.append(TensorRule(match[1] or match[2] or match[3].rstrip(), _chain(match[4].strip())))
        at = match.end()
    patterns = [rule.pattern for rule in rules]
    if patterns[-1] != "*":
        raise CodecError("the last rule must be for *", why="every tensor needs a codec", hint="; *=topk(0.01) > int8")
    if twice := {pattern for pattern in patterns if patterns.count(pattern) > 1}:
        why, hint = "the first one that names a tensor decides", "leave one of them out"
        raise CodecError(f"two rules for {twice.pop()}", why=why, hint=hint)
    return PerTensorCodec(tuple(rules))


def with_layers(spec: str, layers: Mapping[str, str]) -> str:
    """Return a plan's codec and its per-tensor rules as one canonical spec.

    >>> with_layers("int8", {"*.bias": "fp16"})
    'layers("*.bias"=fp16; *=int8)'
    """
    if not layers:
        return parse(spec).spec
    if any(LAYERS.fullmatch(chain.strip()) for chain in (spec, *layers.values())):
        why, hint = "each rule is a chain", f"all of them in one place: [uplink] codec = '{RULES}'"
        raise CodecError("rules by layer within rules by layer", why=why, hint=hint)
    rules = [f'"{pattern}"={chain}' for pattern, chain in layers.items()]
    return parse(f"layers({'; '.join([*rules, f'*={spec}'])})").spec


@dataclass(frozen=True)
class Alias:
    """A name of the literature for a chain, in which `{}` is the place of its argument.

    `what` names the method, its paper and the differences from it.
    """

    chain: str
    example: str
    paper: str
    what: str


ALIASES = {
    "stc": Alias(
        "topk({}) > sign > rice", "stc(0.01)", "Sattler et al. 2019",
        "sparse ternary compression (Sattler et al. 2019), but each sign of 4096 values sent has a mean of its own",
    ),
    "dgc": Alias(
        "topk({})", "dgc(0.001)", "Lin et al. 2018",
        "deep gradient compression (Lin et al. 2018): as a plan's [uplink] codec with all its four parts, else top-k",
    ),
    "fedpaq": Alias(
        "qsgd({})", "fedpaq(4)", "Reisizadeh et al. 2020",
        "FedPAQ (Reisizadeh et al. 2020) with [uplink] feedback = none; in a residual it rounds to nearest",
    ),
    "signsgd": Alias(
        "sign(scaled)", "signsgd", "Karimireddy et al. 2019; Bernstein et al. 2018",
        "EF-signSGD (Karimireddy et al. 2019), a scale for each 4096; no majority vote as in Bernstein et al. 2018",
    ),
}  # fmt: skip


NAME = re.compile(rf"\b({'|'.join(ALIASES)})\b")


def expanded(name: str, argument: str | None) -> str:
    """Return the chain of an alias; raise CodecError for an argument if the alias takes none.

    >>> expanded("stc", "0.01")
    'topk(0.01) > sign > rice'
    """
    chain = ALIASES[name].chain
    if "{}" not in chain and argument is not None:
        raise CodecError(f"{name} takes no argument", why=f"it was given ({argument})", hint=name)
    return chain.format(argument or "")


def standing_for(spec: str) -> dict[str, str]:
    """Return the aliases in a spec, each with its chain, its method and its paper.

    >>> standing_for("dgc(0.01) > int8")["dgc"][:37]
    'topk(_): deep gradient compression (L'
    """
    return {name: f"{ALIASES[name].chain.format('_')}: {ALIASES[name].what}" for name in NAME.findall(spec)}


def said_of(name: str, argument: str | None, refused: CodecError) -> CodecError:
    """Return the same error in terms of the alias that the user wrote instead of its chain."""
    written = name if argument is None else f"{name}({argument})"
    _, bracket, nearest = refused.hint.partition("(")
    return CodecError(
        f"{written} is not valid",
        why=f"it stands for {expanded(name, '_')}: {refused.why}",
        hint=f"{name}({nearest}" if bracket else refused.hint,
    )
