"""What is written as JSON is what `dataclasses.asdict` gives, whatever stands in the fields."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from tests.support.reasons import noted
from thinwire.core.events import ClientSelected, RoundClosed, RoundOpened
from thinwire.core.serialization import plainly
from thinwire.core.types import Part, ReplyHeader, Transfer, UpdateId


class Pair(NamedTuple):
    a: int
    b: Part


@dataclasses.dataclass
class Anything:
    value: object


def test_it_is_what_asdict_gives() -> None:
    part = Part("frame/0", 3, "ab")
    header = ReplyHeader("assignment", UpdateId("run", "pi", 1), 0, 3, metrics={"loss": (1.5, 2.0)}, parts=(part,),
                     transfer=Transfer(1.0))  # fmt: skip
    values = [
        header, [part, (1, part)], {"a": {"b": [part]}}, Pair(1, part), None, 1.5, True,
        np.float32(2.5), {1, 2},
    ]  # fmt: skip
    for value in values:
        assert plainly(Anything(value)) == dataclasses.asdict(Anything(value))
        assert type(plainly(Anything(value))["value"]) is type(dataclasses.asdict(Anything(value))["value"])


def test_an_event_is_too() -> None:
    opened = RoundOpened(1.0, 1, 0.0, 0, "d", ["a", "b"], {"a": "assignment"}, "int8", 60.0, 1, 1, {"b": noted("busy")})
    for event in (
        opened,
        ClientSelected(1.0, 1, "a", "assignment", 10),
        RoundClosed(1.0, 1, "all", 1, ["u"], [], [], 1.0, 1.0, {}),
    ):
        assert plainly(event) == dataclasses.asdict(event)


def test_what_it_gives_is_nobody_elses() -> None:
    inner = {"a": [1]}
    plainly(Anything(inner))["value"]["a"].append(2)
    assert inner == {"a": [1]}
