"""What each name of a chain is and costs, read from the code itself: role, kind, bits, paper."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from thinwire.aggregation.aliases import ALIASES
from thinwire.aggregation.codec import Contractive, Kind, Unbiased
from thinwire.aggregation.feedback import feedback
from thinwire.aggregation.parse import parse
from thinwire.aggregation.registry import steps
from thinwire.core.errors import CodecError
from thinwire.core.keys import Key
from thinwire.core.layout import Layout

ROLES = ("quantizer", "sparsifier", "lowrank", "coder")
SIDE = 256
SAMPLE = SIDE * SIDE  # normal values in a square matrix, on which the bits are counted
ALIAS_EXAMPLES = {"dgc": "dgc(0.001)", "stc": "stc(0.01)", "fedpaq": "fedpaq(4)"}
PAPER = re.compile(r"([A-Z][\w-]+(?: et al\.|,? [A-Z]\w+ and [A-Z]\w+| and [A-Z]\w+)?),? \(?(\d{4})\b")


@dataclass(frozen=True)
class Described:
    """One name. `bits` are those a parameter of `example`; `under_feedback` is its kind inside a residual, or why not.

    A coder loses nothing and is shown in its example, so `kind` and `bits` are those of the chain that stands there.
    """

    name: str
    role: str
    example: str
    kind: str
    under_feedback: str
    bits: float
    paper: str
    what: str
    stands_for: str = ""


def described() -> list[Described]:
    """All names that a chain may be made of: codecs and coders in the order of their roles, then aliases.

    What another package brings and does not hold hides nothing else: it is a row that says why.
    """
    rows, broken = list[Described](), list[Described]()
    for name in steps:
        try:
            step = steps[name]
            text = inspect.getdoc(step) or ""
            example = parse(step.examples[0]).spec
            rows.append(_row(name, step.role, example, papers(text), text.split("\n", maxsplit=1)[0]))
        except CodecError as error:
            broken.append(_broken(name, f"{error.what}: {error.why}"))
        except Exception as error:  # whatever its code raises
            broken.append(_broken(name, f"{type(error).__name__}: {error}"))
    rows.sort(key=lambda row: ROLES.index(row.role))
    rows += broken
    for name, (stands_for, text) in ALIASES.items():
        example = ALIAS_EXAMPLES.get(name, name)
        rows.append(_row(name, "alias", example, papers(text), text, stands_for.format("_")))
    return rows


def _broken(name: str, why: str) -> Described:
    return Described(name, "broken", "", "", "", 0.0, "", why)


def _row(name: str, role: str, example: str, paper: str, what: str, stands_for: str = "") -> Described:
    codec = parse(example)
    bound = codec.bind(Layout.of({"w": (SIDE, SIDE)}))
    try:
        inside = worded(feedback(codec).bind(Layout.of({"w": (SIDE, SIDE)})).inner.kind)
    except CodecError as error:
        inside = f"refused: {error.why}"
    return Described(name, role, example, worded(bound.kind), inside, round(bits(example), 4), paper, what, stands_for)


@lru_cache
def bits(spec: str) -> float:
    """Bits a parameter that a codec takes, on SAMPLE normal values; `CodecError` for one that cannot be.

    >>> round(bits("fp16"), 1)
    16.0
    """
    bound = parse(spec).bind(Layout.of({"w": (SIDE, SIDE)}))
    x = np.random.default_rng(0).standard_normal(SAMPLE).astype(np.float32)
    return 8 * len(bound.encode(x, bound.init(), Key(1)).payload) / SAMPLE


def worded(kind: Kind) -> str:
    """A kind as people say it.

    >>> worded(Contractive(0.01))
    'contractive, delta 0.01'
    """
    if isinstance(kind, Unbiased):
        return f"unbiased, omega {kind.omega:.3g}"
    return f"contractive, delta {kind.delta:.3g}" if isinstance(kind, Contractive) else "residual only"


def papers(text: str) -> str:
    """Who is named with a year in a docstring.

    >>> papers("QSGD (Alistarh et al. 2017) as in Strom (2015)")
    'Alistarh et al. 2017; Strom 2015'
    """
    return "; ".join(dict.fromkeys(f"{who} {year}" for who, year in PAPER.findall(text)))


def as_json(row: Described) -> dict[str, Any]:
    return dict(vars(row))
