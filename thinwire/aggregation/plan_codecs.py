"""The codecs of a plan: which codec each round and each device uses, and the checks of a plan's codecs.

`encoder` makes a device's codec from the spec of its assignment and the plan's kind of error feedback. `rungs` is the
codec ladder from the least to the most compressed codec; each device's link decides which rung it gets. `codec_of` is
the codec of a round: a warm-up uses less compressed ratios in the first rounds (Lin et al. 2018, section 3.3).
`require_rules` refuses per-tensor rules that match no tensor. `lattice_of` is the lattice of a plan with secure
aggregation, which takes the place of a codec.
"""

from __future__ import annotations

import difflib
import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

from thinwire.aggregation.downlink import require_downlink
from thinwire.aggregation.lattice import Lattice, LatticeTerms
from thinwire.aggregation.lattice_window import SupportWalk
from thinwire.aggregation.private_lattice import PrivateLattice, PrivateTerms
from thinwire.aggregation.reductions import reduction_of, reductions
from thinwire.aggregation.server_optimizers import optimizers, server_optimizer
from thinwire.compression.base import BoundCodec, NoGuarantee, Step, Unbiased
from thinwire.compression.catalog import bits, steps
from thinwire.compression.chain import Chain
from thinwire.compression.codecs.powersgd import LowRank
from thinwire.compression.feedback import ef21, feedback
from thinwire.compression.feedback import feedback as classic
from thinwire.compression.spec import ALIASES, PerTensorCodec, chains, parse, with_layers
from thinwire.core.errors import CodecError
from thinwire.core.layout import Layout
from thinwire.core.plan_names import CODECS, OPTIMIZERS, REDUCTIONS, OwnNames
from thinwire.core.plan_schema import ServerSection, UplinkSection
from thinwire.core.privacy_numbers import padded_dimensions
from thinwire.core.prng import Key
from thinwire.core.secure_numbers import rotation_block

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import SecureWork

Feedback: TypeAlias = Literal["classic", "ef21", "none"]
LATTICE = "lattice"  # the codec of a masked update in an assignment, a reply and a report: [secure] has its numbers


def feedback_of(uplink: UplinkSection) -> Feedback:
    """Return the error feedback of a plan: "auto" is none if all its codecs are unbiased, else classic.

    >>> feedback_of(UplinkSection(codec="int8")), feedback_of(UplinkSection(ladder=["int8", "topk(0.01)"]))
    ('none', 'classic')
    """
    if uplink.feedback != "auto":
        return uplink.feedback
    found = [chain for spec in (*uplink.codecs, *uplink.layers.values()) for chain in chains(parse(spec))]
    return "none" if all(isinstance(chain.kind, Unbiased) for chain in found) else "classic"


def keeps_residual(plan: RunPlan) -> bool:
    """Return True if a device keeps what it did not send, and adds it to its next update.

    A plan with secure aggregation has a lattice in place of a codec. It keeps a residual unless `feedback = "none"`: a
    round sends one window of the coordinates, clipped and rounded. With privacy it keeps none: the clip of a private
    run is far below the norm of an update, so a residual would hold most of it, and grow from round to round. Nor
    against a malicious aggregator: a round with a clip near 0 leaves each update in its residual. The next one, with a
    model that has no gradient, would sum the residual of one client beside clients that have none.
    """
    if not plan.secure.enabled:
        return feedback_of(plan.uplink) != "none"
    never = plan.privacy.mode != "off" or plan.secure.adversary == "malicious"
    return not never and plan.uplink.feedback != "none"


def encoder(spec: str, uplink: UplinkSection, layout: Layout) -> BoundCodec:
    """Return the codec `spec` with the plan's error feedback; raise CodecError if its feedback would diverge."""
    return _encoder(spec, feedback_of(uplink), uplink.velocity, uplink.dgc, layout)


@lru_cache(maxsize=64)  # a bound codec is immutable, and all clients of a simulation have the same one
def _encoder(spec: str, kind: Feedback, velocity: float, masked: bool, layout: Layout) -> BoundCodec:
    codec = parse(spec)
    if kind == "none":
        return codec.bind(layout)
    if kind == "ef21":
        return ef21(codec).bind(layout)
    return feedback(codec, velocity, masked=masked).bind(layout)


def lattice_of(plan: RunPlan, size: int, work: SecureWork, identity: str) -> Lattice:
    """Return the lattice of a secure round over `size` parameters; `identity` is that of the run.

    The run's seed and identity fix the order in which the support visits the coordinates. ValueError if no lattice has
    these numbers.
    """
    secure, block = plan.secure, rotation_block(plan.secure)
    words = hashlib.sha256(f"thinwire support {plan.run.seed} {identity}".encode()).digest()
    key = Key(*struct.unpack("<QQ", words[:16]))
    if plan.privacy.mode == "distributed":
        from thinwire.privacy.noise_plan import noise_plan  # other runs need no accountant

        clip = work.clip if plan.privacy.adaptive else plan.privacy.clip  # any clip has the same noise in steps
        if (work.selected, work.clip) != (plan.cohort.clients, clip):
            raise ValueError(f"{work.selected} clients and clip = {work.clip:g} are not those of the plan")
        noise = noise_plan(plan, noised_dimensions(plan, size), work.selected)
        return PrivateLattice(PrivateTerms(size, secure.support, block, work.selected, work.clip, noise), key)
    terms = LatticeTerms(size, secure.bits, secure.support, block, work.selected, secure.weight_max, work.clip)
    return Lattice(terms, key)


def noised_dimensions(plan: RunPlan, size: int) -> int:
    """Return how many coordinates of a round get noise in a private run of `size` parameters."""
    if plan.privacy.mode != "distributed":
        return size
    window = SupportWalk(size, plan.secure.support, Key(0)).largest
    return padded_dimensions(window, rotation_block(plan.secure))[0]


def rotation_key(seed: bytes) -> Key:
    """Return the key of a round's rotation from the seed (32 bytes) that all its clients made together."""
    return Key(*struct.unpack("<QQ", seed[:16]))


def rungs(uplink: UplinkSection) -> list[str]:
    """Return the codecs of the ladder, least compressed first; one codec without a ladder.

    >>> rungs(UplinkSection(ladder=["fp16", "topk(0.01) > int8"], layers={"*.bias": "fp16"}))
    ['layers("*.bias"=fp16; *=fp16)', 'layers("*.bias"=fp16; *=topk(0.01) > int8)']
    """
    return [with_layers(spec, uplink.layers) for spec in uplink.codecs]


def require_ladder(uplink: UplinkSection) -> None:
    """Raise CodecError unless each codec of a ladder is smaller than the one before and fits the per-tensor rules."""
    rungs(uplink)
    if len(uplink.ladder) == 1:
        raise CodecError(
            f"[uplink] ladder = [{uplink.ladder[0]!r}] has one codec",
            why="there is nothing to choose from",
            hint=f"[uplink] codec = {uplink.ladder[0]!r}, or a more compressed one behind it",
        )
    for less_compressed, more_compressed in pairwise(uplink.ladder):
        if bits(more_compressed) >= bits(less_compressed):
            raise CodecError(
                f"[uplink] ladder has {more_compressed!r} behind {less_compressed!r}",
                why=(
                    f"it sends {bits(more_compressed):.3g} bits a parameter, the one before it "
                    f"{bits(less_compressed):.3g}"
                ),
                hint="least compressed first: [uplink] ladder = ["
                + ", ".join(f"'{parse(spec).spec}'" for spec in sorted(set(uplink.ladder), key=bits, reverse=True))
                + "]",
            )


def codec_of(uplink: UplinkSection, steps_made: int) -> str:
    """Return the codec of the round after `steps_made` steps: the plan's, less compressed during a warm-up.

    >>> uplink = UplinkSection(codec="dgc(0.001)", warmup={"rounds": 4, "ratios": [0.25, 0.0625]})
    >>> [codec_of(uplink, step) for step in (0, 1, 2, 4)]
    ['topk(0.25)', 'topk(0.25)', 'topk(0.0625)', 'topk(0.001)']
    """
    spec = rungs(uplink)[0]
    warmup = uplink.warming
    if warmup is None or steps_made >= warmup.rounds:
        return spec
    ratio = Decimal(str(warmup.ratios[steps_made * len(warmup.ratios) // warmup.rounds]))
    return less_compressed(spec, ratio)


def less_compressed(spec: str, ratio: Decimal) -> str:
    """Return a codec that sends at least the share `ratio` wherever it sends a share.

    Raise CodecError if it sends a share nowhere.
    """
    codec = parse(spec)
    raised = [_with_ratio(chain, ratio) for chain in chains(codec)]
    if not any(raised):
        raise CodecError(f"a warm-up of {spec!r}", why="it has no ratio that could be larger", hint="topk(0.01) > int8")
    made = [new or old for new, old in zip(raised, chains(codec), strict=True)]
    if isinstance(codec, PerTensorCodec):
        rules = zip(codec.rules, made, strict=True)
        return PerTensorCodec(tuple(replace(rule, chain=chain) for rule, chain in rules)).spec
    return made[0].spec


def _with_ratio(chain: Chain | LowRank, least: Decimal) -> Chain | None:
    """Return the chain that sends at least the share `least`; None if it has no ratio."""
    if isinstance(chain, LowRank) or chain.sparsifier is None:
        return None
    sparsifier = chain.sparsifier.with_ratio(least)
    return replace(chain, sparsifier=sparsifier) if sparsifier else None


NAMED = 12  # tensors listed in an error


def require_rules(plan: RunPlan, layout: Layout) -> None:
    """Raise CodecError if a per-tensor rule of the plan decides for no tensor of `layout`.

    Such a rule matches no tensor, or only tensors of rules before it. A misspelt pattern would otherwise go unnoticed,
    and its tensors would use another rule. The last rule, `*`, is for the rest, which may be empty.
    """
    for place, spec in _specs(plan):
        codec = parse(spec)
        if isinstance(codec, PerTensorCodec):
            pieces = (piece for segment in layout.segments for piece in segment.slices)
            _require(place, codec, list(dict.fromkeys(piece.tensor.name for piece in pieces)))


def _specs(plan: RunPlan) -> Iterator[tuple[str, str]]:
    for spec in rungs(plan.uplink):
        yield "[uplink]", spec
    yield "[downlink]", plan.downlink.codec


def _require(place: str, codec: PerTensorCodec, names: list[str]) -> None:
    left = names
    for rule in codec.rules[:-1]:
        mine = [name for name in left if fnmatchcase(name, rule.pattern)]
        left = [name for name in left if name not in mine]
        if mine:
            continue
        taken = [name for name in names if fnmatchcase(name, rule.pattern)]
        near = difflib.get_close_matches(rule.pattern, names, n=1, cutoff=0.5)
        why = f"no trained tensor of this model is called like that; there are {_listed(names)}"
        hint = f"a pattern for {near[0]}, or leave the rule out" if near else "leave the rule out"
        if taken:
            why, hint = f"rules before it decide for {_listed(taken)}", "put it before them, or leave it out"
        raise CodecError(f"{place} the rule {rule.spec} is for nothing", why=why, hint=hint)


def _listed(names: list[str]) -> str:
    """Return the names as a short list.

    >>> _listed(["a", "b"]), _listed([])
    ('a, b', 'none')
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"


class CodecCatalog(Mapping[str, type[Step]]):
    """The stages by name, those of installed packages included, and the checks of a plan's codecs."""

    parse, feedback_of = staticmethod(parse), staticmethod(feedback_of)
    require_downlink, require_ladder = staticmethod(require_downlink), staticmethod(require_ladder)
    reduction_of = staticmethod(reduction_of)

    def __getitem__(self, name: str) -> type[Step]:
        return steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(steps)

    def __len__(self) -> int:
        return len(steps)

    def own_names(self) -> OwnNames:
        """Return the names of codecs with their aliases, optimizers and reductions that no other package brings."""
        return {CODECS: {*steps.own, *ALIASES}, OPTIMIZERS: optimizers.own, REDUCTIONS: {"mean", *reductions.own}}

    def require_contraction(self, spec: str, feedback: str = "classic") -> None:
        """Raise CodecError if this kind of feedback around this chain would diverge."""
        around = ef21 if feedback == "ef21" else classic
        around(parse(spec)).bind(Layout.of({"w": (8, 8)}))

    def require_alone(self, spec: str) -> None:
        """Raise CodecError if a chain has no bound for a single call and therefore needs error feedback.

        A chain that has a form of its own for error feedback may be used without it. In ternary, which is TernGrad,
        only the clip moves the mean.
        """
        for chain in chains(parse(spec)):
            if isinstance(chain.under_feedback().kind, NoGuarantee):
                why = "nothing is promised of one update: what it does not send has to wait in a residual, or is lost"
                hint = '[uplink] feedback = "classic", or a chain that is right by itself: int8'
                raise CodecError(f"{chain.spec!r} without feedback", why=why, hint=hint)

    def require_fixed_size(self, spec: str) -> None:
        """Raise CodecError if the number of bytes of an update depends on its values.

        Indices are coded by their gaps, a threshold sends as many values as pass it, and coders make streams shorter.
        """
        for chain in chains(parse(spec)):
            whole = chain.inner if isinstance(chain, LowRank) else chain
            sent = whole.sparsifier
            coded = whole.coded.specs or whole.quantizer.entropy_coded
            if coded or (sent is not None and not (sent.seeded and sent.fixed)):
                raise CodecError(
                    f"the size of {chain.spec!r} depends on the update",
                    why="the bytes that each client sent are recorded and shown without noise",
                    hint="[uplink] codec = 'eden(1)', or another quantizer alone or behind randk",
                )

    def leaves_zeros(self, spec: str) -> bool:
        """Return True if most decoded values are 0 whatever the update is, as its stages declare."""
        try:
            found = chains(parse(spec))
        except CodecError:
            return False  # another check refuses an invalid spec
        stages = [stage for c in found if isinstance(c, Chain) for stage in (c.sparsifier, c.quantizer)]
        return any(stage.leaves_zeros for stage in stages if stage is not None)

    def require_optimizer(self, server: ServerSection) -> None:
        """Raise CodecError if there is no such server optimizer, or if it does not know a key of the plan."""
        server_optimizer(server)

    def require_uplink(self, uplink: UplinkSection) -> None:
        """Raise CodecError if per-tensor rules do not fit the codec, or if a warm-up finds no ratio."""
        try:
            for spec in (uplink.codec, *uplink.ladder, *uplink.layers.values()):
                parse(spec)
        except CodecError:
            return  # another check refuses an invalid spec
        codec_of(uplink, 0)


codecs = CodecCatalog()
