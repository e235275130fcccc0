"""What stands between a step's brackets, as exact numbers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from thinwire.core.errors import CodecError

DECIMALS = 9


def read_ratio(name: str, argument: str | None) -> Decimal:
    """A share over 0 and at most 1 as an exact decimal in its shortest form; else CodecError."""
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
        raise CodecError(f"{name}({said}) cannot be", why=why, hint=f"{name}({_as_percent(ratio):f})")
    return ratio


def _as_percent(number: Decimal) -> Decimal:
    """The share that somebody may have meant by it.

    >>> _as_percent(Decimal("2.5")), _as_percent(Decimal("nan"))
    (Decimal('0.025'), Decimal('0.01'))
    """
    meant = (number / 100).normalize() if number.is_finite() and 1 < number <= 100 else Decimal("0.01")
    return meant if meant == round(meant, DECIMALS) else Decimal("0.01")


def read_number(name: str, argument: str | None, most: Decimal, example: str) -> Decimal:
    """A number over 0 and at most `most` as an exact decimal in its shortest form; else CodecError."""
    said = (argument or "").strip()
    try:
        number = Decimal(said).normalize()
    except InvalidOperation:
        raise CodecError(f"{name}({said}) has no number", why="it takes one", hint=f"{name}({example})") from None
    exponent = number.as_tuple().exponent
    if not (isinstance(exponent, int) and exponent >= -DECIMALS and 0 < number <= most):
        why = f"its number is over 0 and at most {most}, of at most {DECIMALS} decimals"
        nearest = f"{most:f}" if number.is_finite() and number > most else example
        raise CodecError(f"{name}({said}) cannot be", why=why, hint=f"{name}({nearest})")
    return number


def read_whole(name: str, argument: str | None, least: int, most: int, example: int) -> int:
    """A whole number in least..most; else CodecError with the nearest one."""
    said = (argument or "").strip()
    if said.isascii() and said.isdigit() and len(said) < 9:
        if least <= int(said) <= most:
            return int(said)
        example = min(max(int(said), least), most)
    raise CodecError(f"{name}({said}) cannot be", why=f"it takes {least} to {most}", hint=f"{name}({example})")
