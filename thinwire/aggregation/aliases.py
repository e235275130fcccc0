"""Names of the literature for chains of ours: `stc(0.01)` is `topk(0.01) > sign > rice`."""

from __future__ import annotations

import re

from thinwire.core.errors import CodecError

STC = "sparse ternary compression (Sattler et al. 2019), but each sign of 4096 values sent has a mean of its own"
DGC = "deep gradient compression (Lin et al. 2018): as a plan's [uplink] codec with all its four parts, else top-k"
FEDPAQ = "FedPAQ (Reisizadeh et al. 2020) with [uplink] feedback = none; in a residual it rounds to nearest"
SIGNSGD = "EF-signSGD (Karimireddy et al. 2019), a scale for each 4096; no majority vote as in Bernstein et al. 2018"

# A name, the chain with a place for its argument, and whose method it is: where ours is not the paper's, how.
ALIASES = {
    "stc": ("topk({}) > sign > rice", STC),
    "dgc": ("topk({})", DGC),
    "fedpaq": ("qsgd({})", FEDPAQ),
    "signsgd": ("sign(scaled)", SIGNSGD),
}


NAME = re.compile(rf"\b({'|'.join(ALIASES)})\b")


def expanded(name: str, argument: str | None) -> str:
    """What an alias stands for; CodecError for an argument where it takes none.

    >>> expanded("stc", "0.01")
    'topk(0.01) > sign > rice'
    """
    chain, _ = ALIASES[name]
    if "{}" not in chain and argument is not None:
        raise CodecError(f"{name} takes no argument", why=f"it was given ({argument})", hint=name)
    return chain.format(argument or "")


def standing_for(spec: str) -> dict[str, str]:
    """The aliases in a spec, each with the chain that it stands for and whose method it is.

    >>> standing_for("dgc(0.01) > int8")["dgc"][:37]
    'topk(_): deep gradient compression (L'
    """
    return {name: f"{ALIASES[name][0].format('_')}: {ALIASES[name][1]}" for name in NAME.findall(spec)}


def said_of(name: str, argument: str | None, refused: CodecError) -> CodecError:
    """The same refusal in the words that were written: of the alias, and not of the chain that it stands for."""
    written = name if argument is None else f"{name}({argument})"
    _, bracket, nearest = refused.hint.partition("(")
    return CodecError(
        f"{written} cannot be",
        why=f"it stands for {expanded(name, '_')}: {refused.why}",
        hint=f"{name}({nearest}" if bracket else refused.hint,
    )
