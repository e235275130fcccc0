"""The messages of registration and enrollment: `Hello` and `Welcome` as JSON.

Whatever a stranger sends is bounded before it is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from thinwire.core.equipment import Equipment
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import (
    KEY_LETTERS,
    MAX_EARLIER_KEYS,
    MAX_POPULATIONS,
    MAX_RELEASES,
    MAX_TENSORS,
    SECURE_PARTS,
    Hello,
    TaskReport,
    Welcome,
)
from thinwire.core.formatting import plain
from thinwire.core.protocol import read_json
from thinwire.core.types import DEVICE_NAME
from thinwire.transport.protocol.http import LATEST

WIRE_NAMES = {"trusted_pins": "holds"}  # field -> its name on the wire, where the two differ
MAX_BYTES = 256 * 2**10  # of a `Hello`
MAX_WELCOME_BYTES = 2**20  # of a `Welcome`: a sequence of each run that continues, and the CAs
MAX_VERSION = 2**31
MAX_TASKS = 256
MAX_PLANS = 64
MAX_RUNS = 64  # that a device names in a hello, and a welcome as ended
MAX_TEXT = 4096
MAX_POLL_S, MAX_SPREAD_S = 3600.0, 86_400.0
LONGEST_SPREAD_S = 3600.0  # that a device stores: it waits as long at its next start and after each outage
MAX_SEQUENCE = 2**62
MAX_HAD = 2.0**60  # of cores or bytes
MAX_MEASURED = 1e12  # seconds of a round trip or a clock's skew: sums of them can still be shown


class TooMuchReported(BadPayload):
    """A hello has more of the device's privacy ledger than the aggregator stores; nothing of it is cut off."""


def to_bytes(said: Hello | Welcome) -> bytes:
    """Return a message as JSON, without empty optional fields."""
    raw = {WIRE_NAMES.get(name, name): value for name, value in dataclasses.asdict(said).items()}
    if isinstance(said, Hello):
        raw["has"] = {name: value for name, value in raw["has"].items() if value is not None}
        if not raw["has"]:
            del raw["has"]
        for name in ("open_runs", "secure", "booked", "booked_head", "booked_keys"):
            if not raw[name]:
                del raw[name]
        for task in [task for task in raw["tasks"] if not task["tensors"]]:
            del task["tensors"]
    elif not raw["ended"]:
        del raw["ended"]
    return json.dumps(raw, separators=(",", ":")).encode()


def hello_from_bytes(data: bytes) -> Hello:
    """Read a stranger's `Hello`; raise `BadPayload` if it is invalid.

    Texts and lists are bounded, texts are plain, and the name is one that a device may have.
    """
    try:
        raw: Any = read_json(data, MAX_BYTES)
        protocol = _version(raw["protocol"])
        name, process = str(raw["name"]), str(raw["process"])
        if not DEVICE_NAME.fullmatch(name):
            raise BadPayload(f"{name[:80]!r} is no valid name of a device", why="a-z, 0-9 and -, at most 63")
        if not (1 <= len(process) <= 64 and process.isprintable()):
            raise BadPayload("a process is named by 1 to 64 characters")
        tasks = tuple(_task(task) for task in raw["tasks"][:MAX_TASKS])
        versions = {_text(k, 64): _text(v, 64) for k, v in list(raw["versions"].items())[:64]}
        oldest = _version(raw.get("oldest", protocol))
        link = {_text(k, 64): _measured(v) for k, v in list(raw.get("link", {}).items())[:16]}
        pins = tuple(_text(pin, 64) for pin in raw.get("holds", ())[:8])
        plans = tuple(_text(digest, 64) for digest in raw.get("plans", ())[:MAX_PLANS])
        has = _equipment(raw.get("has", {}))
        open_runs = {_text(k, 128): _text(v, 64) for k, v in list(raw.get("open_runs", {}).items())[:MAX_RUNS]}
        secure = tuple(part for part in SECURE_PARTS if part in list(raw.get("secure", ()))[:16])
        reported = _at_most(MAX_POPULATIONS, raw.get("booked", {}), "populations")
        booked = {_text(key, KEY_LETTERS): int(_within(count, MAX_RELEASES)) for key, count in reported.items()}
        head = _text(raw.get("booked_head", ""), 64)
        earlier = _at_most(MAX_EARLIER_KEYS, raw.get("booked_keys", ()), "earlier keys")
        keys = tuple(_text(key, 64) for key in earlier)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise BadPayload("cannot read the hello", why=f"{type(error).__name__}: {error}") from error
    return Hello(
        name, process, tasks, versions, protocol, oldest, link, pins, plans, has, open_runs, secure, booked, head, keys
    )


def welcome_from_bytes(data: bytes) -> Welcome:
    """Read an aggregator's `Welcome`; raise `BadPayload` if its times and numbers are not usable on a device."""
    try:
        raw: Any = read_json(data, MAX_WELCOME_BYTES)
        if not DEVICE_NAME.fullmatch(name := str(raw["name"])):
            raise ValueError("it is no device's name")
        sequences = {str(run): int(sequence) for run, sequence in raw["sequences"].items()}
        if any(not 0 <= sequence <= MAX_SEQUENCE for sequence in sequences.values()):
            raise ValueError("no answer has such a number")
        cas = tuple(str(pem) for pem in raw.get("cas", ())[:8])
        runs = {str(run): str(identity) for run, identity in raw.get("runs", {}).items()}
        ended = tuple(str(run) for run in raw.get("ended", ())[:MAX_RUNS])
        spread_s = min(_within(raw.get("spread_s", 0.0), MAX_SPREAD_S), LONGEST_SPREAD_S)
        return Welcome(
            name, sequences, _within(raw["poll_s"], MAX_POLL_S), _within(raw["server_time"], LATEST),
            int(raw["protocol"]), spread_s, cas, runs, ended,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise BadPayload("cannot read the welcome", why=f"{type(error).__name__}: {error}") from error


def _at_most(most: int, reported: Any, what: str) -> Any:
    """Return what a device reports of its privacy ledger; raise `TooMuchReported` if it is more than `most`."""
    if len(reported) > most:
        raise TooMuchReported(
            f"the hello reports {len(reported)} {what} of the device's privacy ledger, and may report {most}",
            why="without all of them the aggregator would count too little privacy as spent",
            hint="enroll another device for further populations: this one takes part in no private run",
        )
    return reported


def _equipment(raw: Any) -> Equipment:
    """Return the device's reported resources; fields that this version does not know are omitted."""
    cores, memory, free = (_count(raw.get(name)) for name in ("cores", "memory_bytes", "free_bytes"))
    mains, metered = (_flag(raw.get(name)) for name in ("mains", "metered"))
    return Equipment(cores, memory, free, mains, metered)


def _version(raw: Any) -> int:
    return int(_within(raw, MAX_VERSION))


def _count(raw: Any) -> int | None:
    return None if raw is None else int(_within(raw, MAX_HAD))


def _flag(raw: Any) -> bool | None:
    if not isinstance(raw, bool | None):
        raise ValueError(f"{str(raw)[:80]!r} is neither yes nor no")
    return raw


def _finite(raw: Any) -> float:
    found = float(raw)
    if not math.isfinite(found):
        raise ValueError(f"{raw!r} is no number")
    return found


def _measured(raw: Any) -> float:
    if abs(found := _finite(raw)) > MAX_MEASURED:
        raise ValueError(f"a measure of {found:g} s: at most {MAX_MEASURED:g} is read")
    return found


def _within(raw: Any, most: float) -> float:
    if not 0 <= (found := _finite(raw)) <= most:
        raise ValueError(f"{found:g} is not from 0 to {most:g}")
    return found


def _text(raw: Any, most: int) -> str:
    return plain(str(raw)[:most])


def _task(raw: Any) -> TaskReport:
    texts = {
        name: _text(raw[name], MAX_TEXT) for name in ("name", "version", "source_digest", "layout_digest", "error")
    }
    codecs, tensors = raw["codecs"][:MAX_TASKS], str(raw.get("tensors", ""))
    if len(tensors) > MAX_TENSORS or not tensors.isprintable():
        tensors = ""
    return TaskReport(**texts, codecs=tuple(_text(codec, MAX_TEXT) for codec in codecs), tensors=tensors)
