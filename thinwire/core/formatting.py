"""This module formats text and quantities for people, and makes text from others safe to store and show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Literal, NamedTuple, TypedDict

NOTHING = "-"  # an absent value, in tables too
_THREE = Context(prec=3, rounding=ROUND_CEILING)


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


def rounded_up(value: float | None) -> str:
    """Format an epsilon or a noise multiplier with three digits, never below its value.

    >>> rounded_up(4.7911), rounded_up(3.0), rounded_up(1234.5), rounded_up(math.inf)
    ('4.8', '3', '1240', 'without a bound')
    """
    if value is None or math.isinf(value):
        return "without a bound"
    return f"{float(_THREE.create_decimal(repr(float(value)))):g}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun; `plural` is for a noun that gets no -s.

    >>> counted(1, "device"), counted(3, "device"), counted(2, "reply", "replies")
    ('1 device', '3 devices', '2 replies')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def duration(count: float | None) -> str:
    """Return seconds in words; "-" for None, "unknown" if the count is not finite.

    >>> duration(0.0042), duration(0.0483), duration(0.42), duration(4.13), duration(60), duration(130), duration(7200)
    ('4.2 ms', '48 ms', '420 ms', '4.1 s', '60 s', '2 min 10 s', '2 h')
    """
    if count is None:
        return NOTHING
    if not math.isfinite(count):
        return "unknown"
    if count < 0.9995:
        return f"{1000 * count:.0f} ms" if count >= 0.00995 else f"{1000 * count:.2g} ms"
    if count < 99.5:
        return f"{count:.1f} s" if count < 9.95 else f"{count:.0f} s"
    minutes, rest = divmod(round(count), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def size(count: float | None) -> str:
    """Return bytes in decimal units with three figures; "-" for None.

    >>> size(9610 * 4), size(950), size(999_600), size(None)
    ('38.4 kB', '950 B', '1000 kB', '-')
    """
    return NOTHING if count is None else _scaled(count, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def speed(bits_per_s: float) -> str:
    """Return a link's speed in words.

    >>> speed(2e6), speed(12_345)
    ('2 Mb/s', '12.3 kb/s')
    """
    return _scaled(bits_per_s, (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)), "b/s")


def figure(value: float | None) -> str:
    """Return a metric with four digits after the point, as every table and sentence shows it; "-" for None.

    >>> figure(0.8875), figure(None)
    ('0.8875', '-')
    """
    return NOTHING if value is None else f"{value:.4f}"


def figures(metrics: Mapping[str, float]) -> str:
    """Return metrics with their names.

    >>> figures({"accuracy": 0.8875, "loss": 0.2})
    'accuracy 0.8875, loss 0.2000'
    """
    return ", ".join(f"{name} {figure(value)}" for name, value in metrics.items())


def _scaled(count: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, factor in units:
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count / factor < 999.5 else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} {smallest}"


def p90_rank(count: int) -> int:
    """Return the nearest rank, from 1, of the value that 9 of 10 of `count` sorted values do not exceed."""
    return math.ceil(0.9 * count)


def p90(values: Iterable[float]) -> float:
    """Return the smallest of the values that 9 of 10 values do not exceed.

    >>> p90([1.0, 9.0]), p90(range(1, 11))
    (9.0, 9)
    """
    ordered = sorted(values)
    return ordered[p90_rank(len(ordered)) - 1]


class Reason(NamedTuple):
    """Holds a reason of a decision: a code, and the numbers and names that belong into its sentence.

    `thinwire/reports/reason_text.py` has the sentences. The journal and the tables hold a reason as a list of its two
    fields.
    """

    code: str
    numbers: Mapping[str, float | str]


Reasons = Sequence[Reason]  # of one decision: together they are one sentence


class Capped(TypedDict, total=False):
    """Holds the reason why an update has less weight than its reply's header says.

    A reply's `examples` or its normaliser `a` were over the cap. `counted` of its examples count, and `median` is the
    median of the round's updates. `a_counted` and `a_median` are the same two values for the normaliser. A value that
    was not over its cap is left out. `norm` is that of the update's decoded values, and `norm_counted` the bound that
    it was scaled to.
    """

    examples: int
    counted: int
    median: float
    a: float
    a_counted: float
    a_median: float
    norm: float
    norm_counted: float


CAPPED = "weight capped"
CHOSEN = "chosen by the reduction"


def capped_text(capped: Capped) -> str:
    """Return one line about a capped update, which begins with `CAPPED`.

    >>> capped_text({"examples": 5000, "counted": 1000, "median": 100})
    'weight capped: 1000 of its 5000 examples count, 10 times the median of 100'
    """
    said = list[str]()
    if "examples" in capped:
        times, median = capped["counted"] / capped["median"], capped["median"]
        counted = f"{capped['counted']} of its {capped['examples']} examples count"
        said.append(f"{counted}, {times:.4g} times the median of {median:g}")
    if "a" in capped:
        times, median = capped["a_counted"] / capped["a_median"], capped["a_median"]
        said.append(
            f"its normaliser counts as {capped['a_counted']:.4g}, not {capped['a']:.4g}, "
            f"{times:.4g} times the median of {median:.4g}"
        )
    if "norm" in capped:
        said.append(f"its norm of {capped['norm']:.4g} counts as {capped['norm_counted']:.4g}, by [server] max_norm")
    return f"{CAPPED}: {'; '.join(said)}"


FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes a cell for that begins so


def csv_cell(value: object) -> object:
    """Return the value of a CSV cell; text that a spreadsheet would run as a formula is marked as text.

    >>> csv_cell("=1+1"), csv_cell(-3), csv_cell(None)
    ("'=1+1", -3, '')
    """
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


COMMANDS = (
    "run", "sim", "plan explain",
    "aggregator start", "aggregator evaluate", "aggregator status", "aggregator stop", "aggregator doctor",
    "aggregator backup", "aggregator config", "aggregator logs", "aggregator dashboard", "aggregator restore",
    "aggregator service install", "aggregator ca show", "aggregator ca rotate",
    "aggregator users add", "aggregator users reset", "aggregator users list", "aggregator users disable",
    "aggregator users enable", "aggregator users logout",
    "aggregator tokens add", "aggregator tokens list", "aggregator tokens revoke",
    "runs compare", "runs list", "runs show", "runs watch", "runs model", "runs stop", "runs pause", "runs resume",
    "runs tag", "runs archive", "runs unarchive", "runs delete", "runs clone", "runs extend", "runs track",
    "runs metrics",
    "devices remove", "devices list", "devices show", "devices invite", "devices approve", "devices revoke",
    "devices rename", "devices forget", "devices tag", "privacy report",
    "devices roster export", "devices roster install", "privacy ledger settle", "privacy ledger",
)  # fmt: skip
"""Those with `--home` that are typed on the aggregator's machine; `thinwire client` has a state of its own."""
_WITHOUT_HOME = r"(?<![\w/-])thinwire (?:{})(?![-\w])(?![^;,()]* --home )"
_ON_AGGREGATOR = re.compile(_WITHOUT_HOME.format("|".join(COMMANDS)))
_ON_CLIENT = re.compile(_WITHOUT_HOME.format(r"client (?:service |runs )?[a-z]+"))


def with_home(sentence: str, option: str, at: Literal["aggregator", "client"] = "aggregator") -> str:
    """Insert `option` (" --home FOLDER" or "") behind the words of each command in a sentence that lacks it.

    The sentences were recorded, or written by the store, without the state directory. A command for the other end is
    typed on another machine, and stays as it is.

    >>> with_home("end it: thinwire runs stop digits-1 (or wait)", " --home /srv/fl")
    'end it: thinwire runs stop --home /srv/fl digits-1 (or wait)'
    >>> with_home("type on it: thinwire client reload", " --home /srv/fl")
    'type on it: thinwire client reload'
    """
    if not option or "thinwire" not in sentence:
        return sentence
    command = _ON_AGGREGATOR if at == "aggregator" else _ON_CLIENT
    return command.sub(lambda found: found[0] + option, sentence)
