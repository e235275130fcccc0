"""`plainly` gives what `dataclasses.asdict` gives, and `replace` what `dataclasses.replace` gives."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.reasons import noted
from thinwire.core.events import ClientSelected, RoundClosed, RoundOpened
from thinwire.core.records import plainly, replace
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


@dataclasses.dataclass(frozen=True)
class Checked:
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError(self.value)

    @cached_property
    def double(self) -> int:
        return 2 * self.value


def test_a_changed_copy_is_what_dataclasses_replace_gives() -> None:
    header = ReplyHeader("assignment", UpdateId("run", "pi", 1), 0, 3, parts=(Part("frame/0", 3, "ab"),))
    for changes in ({}, {"steps": 4}, {"transfer": Transfer(1.0), "metrics": {"loss": (1.0, 2.0)}}):
        copy = replace(header, **changes)
        assert copy == dataclasses.replace(header, **changes)
        assert list(vars(copy)) == list(vars(header)), "fields keep their order"
    assert header == ReplyHeader("assignment", UpdateId("run", "pi", 1), 0, 3, parts=(Part("frame/0", 3, "ab"),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(header, steps=4).steps = 5  # type: ignore[misc]  # that it is frozen is the test


def test_a_record_that_checks_or_caches_is_made_again() -> None:
    one = Checked(2)
    assert one.double == 4
    assert replace(one, value=3).double == 6
    with pytest.raises(ValueError, match="-1"):
        replace(one, value=-1)
