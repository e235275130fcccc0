"""Durations as they are typed: 90s, 15m, 24h, 7d."""

from __future__ import annotations

import re

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 24 * 3600.0}
_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


def parse_duration(text: str, option: str) -> float:
    """Seconds; `UsageError` names the option.

    >>> parse_duration("24h", "--expires"), parse_duration("1.5m", "--expires")
    (86400.0, 90.0)
    """
    from thinwire.core.errors import UsageError

    if (found := _TEXT.fullmatch(text.strip().lower())) is None:
        raise UsageError(f"{option} {text!r} is not a duration", hint=f"{option} 24h, or 90s, 15m, 7d")
    return float(found[1]) * UNITS[found[2]]
