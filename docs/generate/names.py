"""How chains and numbers of a measurement are written on pages."""

from __future__ import annotations

import re

from benchmarks.accuracy_bytes.trials import FP32
from thinwire.aggregation.plan_codecs import feedback_of
from thinwire.core.plan_schema import UplinkSection

NAMES = {FP32.name: "fp32"}
BETWEEN_OPTIONS = re.compile(r", (?![^()]*\))")  # a comma that is not between the parameters of a codec


def key(name: str) -> str:
    return f"best_ratio_within_half_point_{name}"


def name_of(chain: str) -> str:
    return NAMES.get(chain, chain)


def code(chain: str, down: bool = False) -> str:
    """A chain by its name as a plan has it.

    >>> code("topk(0.02) > sign > rice, ef21"), code("stc(0.04), decay 0.9")
    ('`topk(0.02) > sign > rice`, `feedback = "ef21"`', '`stc(0.04)`, `decay = 0.9`')
    >>> code("randk(0.1, unbiased) > eden(1), none")
    '`randk(0.1, unbiased) > eden(1)`'
    """
    spec, *options = BETWEEN_OPTIONS.split(name_of(chain))
    if chain == FP32.name:
        return spec
    if down:
        return f"`{spec}`"
    usual = feedback_of(UplinkSection(codec=spec))
    if usual in options:
        options.remove(usual)
    elif usual == "none" and "ef21" not in options:
        options.insert(0, "classic")
    typed = [word.replace(" ", " = ") if word.startswith("decay ") else f'feedback = "{word}"' for word in options]
    return ", ".join(f"`{one}`" for one in (spec, *typed))


def signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def or_never(value: float | None, form: str) -> str:
    return "never" if value is None else format(value, form)


def count(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def size(value: float) -> str:
    return f"{value / 1e6:.2f} MB" if value >= 1e6 else f"{value / 1e3:.2f} kB"
