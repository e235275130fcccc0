"""The registry of stages: the built-in ones, which are the files of this folder, and those of other packages.

A file is named by the stages that it holds, joined by `_`; so a stage has no underscore in its name. `pack_zstd.py`
holds the stages `pack` and `zstd`. The class of a stage has the stage's name, whatever its capitals. Specs, laws,
documents and benchmarks read the registry. A file is imported on first use. Code that codecs share is in
`vector_ops.py`, or is imported from another codec's file.

`read_ratio`, `read_number` and `read_whole` parse the argument between the brackets of a stage, as exact numbers.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.compression.base import Compressor, Quantizer, Sparsifier, Step
from thinwire.core.errors import CodecError

if TYPE_CHECKING:
    from thinwire.core.registry import Registry


def stages_of(files: Iterable[str]) -> dict[str, str]:
    """Return the file of each stage; raise ValueError if two files hold stages of one name.

    >>> stages_of(["pack_zstd", "topk"])
    {'pack': 'pack_zstd', 'zstd': 'pack_zstd', 'topk': 'topk'}
    """
    found = dict[str, str]()
    for file in files:
        for stage in file.split("_"):
            if stage in found:
                raise ValueError(f"{found[stage]}.py and {file}.py both hold the stage {stage!r}, by their names")
            found[stage] = file
    return found


STAGES = stages_of(module.name for module in pkgutil.iter_modules(__path__))


def load(stage: str) -> type[Step]:
    """Import the class of a stage in `STAGES`; raise CodecError if its file has none of that name."""
    module = import_module(f"{__name__}.{STAGES[stage]}")
    for name, thing in vars(module).items():
        if isinstance(thing, type) and name.lower() == stage:
            return thing
    raise CodecError(f"{module.__name__} has no class for the stage {stage!r}", why="its name says that it holds one")


@functools.cache
def registry() -> Registry[type[Step]]:
    """Return the stages by name; those of other packages come by the entry-point group `thinwire.codecs`."""
    from thinwire.core.registry import Registry  # it reads what is installed: a spec of our own stages does not need it

    found: Registry[type[Step]] = Registry("codec", "thinwire.codecs", admit)
    for stage in STAGES:
        found.add_lazy(stage, functools.partial(load, stage))
    return found


def admit(name: str, thing: Any) -> type[Step]:
    """Return a stage of another package; raise CodecError if it is invalid.

    Valid are sparsifiers, quantizers, and compressors for the end of a chain, if each example holds the stage's name.
    """
    called = f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__name__', type(thing).__name__)}"
    why, hint = "", "thinwire/compression/base.py says what a Quantizer, a Sparsifier and a Compressor have"
    if not (isinstance(thing, type) and issubclass(thing, Quantizer | Sparsifier | Compressor)):
        why = f"{called} is no subclass of Quantizer, Sparsifier or Compressor"
    elif missing := [*sorted(thing.__abstractmethods__), *["examples"] * (not hasattr(thing, "examples"))]:
        why = f"{called} has no {', '.join(missing)}"
    elif not thing.examples or any(name not in example for example in thing.examples):
        why, hint = (
            f"{called} has the examples {list(thing.examples)}",
            f'examples = ("{name}",)',
        )
    if why:
        raise CodecError(f"{name!r} is no step of a chain", why=why, hint=hint)
    stage: type[Step] = thing
    return stage


DECIMALS = 9


def read_ratio(name: str, argument: str | None) -> Decimal:
    """Return a share over 0 and at most 1 as an exact decimal in its shortest form, or raise CodecError."""
    said = (argument or "").strip()
    try:
        ratio = Decimal(said).normalize()
    except InvalidOperation:
        raise CodecError(
            f"{name}({said}) has no ratio", why="it says which share is sent", hint=f"{name}(0.01)"
        ) from None
    exponent = ratio.as_tuple().exponent
    if not (isinstance(exponent, int) and exponent >= -DECIMALS and 0 < ratio <= 1):
        why = f"a ratio is a share over 0 and at most 1, of at most {DECIMALS} decimals"
        raise CodecError(f"{name}({said}) is not valid", why=why, hint=f"{name}({_as_percent(ratio):f})")
    return ratio


def _as_percent(number: Decimal) -> Decimal:
    """Return the share that the user may have meant by a percentage.

    >>> _as_percent(Decimal("2.5")), _as_percent(Decimal("nan"))
    (Decimal('0.025'), Decimal('0.01'))
    """
    meant = (number / 100).normalize() if number.is_finite() and 1 < number <= 100 else Decimal("0.01")
    return meant if meant == round(meant, DECIMALS) else Decimal("0.01")


def read_number(name: str, argument: str | None, most: Decimal, example: str) -> Decimal:
    """Return a number over 0 and at most `most` as an exact decimal in its shortest form, or raise CodecError."""
    said = (argument or "").strip()
    try:
        number = Decimal(said).normalize()
    except InvalidOperation:
        raise CodecError(f"{name}({said}) has no number", why="it takes one", hint=f"{name}({example})") from None
    exponent = number.as_tuple().exponent
    if not (isinstance(exponent, int) and exponent >= -DECIMALS and 0 < number <= most):
        why = f"its number is over 0 and at most {most}, of at most {DECIMALS} decimals"
        nearest = f"{most:f}" if number.is_finite() and number > most else example
        raise CodecError(f"{name}({said}) is not valid", why=why, hint=f"{name}({nearest})")
    return number


def read_whole(name: str, argument: str | None, least: int, most: int, example: int) -> int:
    """Return a whole number from `least` to `most`, or raise CodecError with the nearest one."""
    said = (argument or "").strip()
    if said.isascii() and said.isdigit() and len(said) < 9:
        if least <= int(said) <= most:
            return int(said)
        example = min(max(int(said), least), most)
    raise CodecError(f"{name}({said}) is not valid", why=f"it takes {least} to {most}", hint=f"{name}({example})")
