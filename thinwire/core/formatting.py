"""This module formats text and quantities for people, and makes text from others safe to store and show."""

from __future__ import annotations

import math
from collections.abc import Iterable


def plain(text: str) -> str:
    """Return the text as one line without characters that move a cursor, change the writing direction, or are not
    UTF-8.

    >>> plain("a\\x1b[2J\\n\\u202e\\ud800b")
    'a?[2J???b'
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def grouped(digits: str) -> str:
    """Return a fingerprint in groups of eight digits, for two people who read it to each other.

    >>> grouped("0123456789abcdef" * 2)
    '01234567 89abcdef 01234567 89abcdef'
    """
    return " ".join(digits[at : at + 8] for at in range(0, len(digits), 8))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "device"), counted(3, "device")
    ('1 device', '3 devices')
    """
    return f"{count} {noun}" + "s" * (count != 1)


def duration(count: float) -> str:
    """Return seconds in words; "unknown" if the count is not finite.

    >>> duration(0.0421), duration(4.13), duration(60), duration(130), duration(7200), duration(float("inf"))
    ('0.04 s', '4.1 s', '60 s', '2 min 10 s', '2 h', 'unknown')
    """
    if not math.isfinite(count):
        return "unknown"
    if count < 99.5:
        return f"{count:.2f} s" if count < 0.995 else f"{count:.1f} s" if count < 9.95 else f"{count:.0f} s"
    minutes, rest = divmod(round(count), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def trip(count: float) -> str:
    """Return the seconds of a round trip in words.

    >>> trip(0.0483), trip(0.00042), trip(1.4)
    ('48 ms', '0.42 ms', '1.4 s')
    """
    if count >= 0.9995:
        return duration(count)
    return f"{1000 * count:.0f} ms" if count >= 0.00995 else f"{1000 * count:.2g} ms"


def size(count: float) -> str:
    """Return bytes in decimal units with three figures.

    >>> size(9610 * 4), size(950), size(999_600)
    ('38.4 kB', '950 B', '1000 kB')
    """
    return _scaled(count, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def speed(bits_per_s: float) -> str:
    """Return a link's speed in words.

    >>> speed(2e6), speed(12_345)
    ('2 Mb/s', '12.3 kb/s')
    """
    return _scaled(bits_per_s, (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)), "b/s")


def _scaled(count: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, factor in units:
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count / factor < 999.5 else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} {smallest}"


SHARE = 0.9


def p90(values: Iterable[float]) -> float:
    """Return the smallest of the values that 9 of 10 values do not exceed.

    >>> p90([1.0, 9.0]), p90(range(1, 11))
    (9.0, 9)
    """
    ordered = sorted(values)
    return ordered[math.ceil(SHARE * len(ordered)) - 1]
