"""A buffer that is fed a script of events, and who is idle meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tests.server.test_round import update
from thinwire.server.buffered_round import BufferedRound
from thinwire.server.round_events import (
    Action,
    AggregateUpdate,
    AggregationDone,
    Replacement,
    RoundConfig,
    SelectReplacement,
    UpdateArrived,
)


class Idle:
    """Who is idle, as the driver would find it: selected again only when its answer has come or its assignment was
    lost.
    """

    def __init__(self, devices: str) -> None:
        self.devices = list(devices)

    def __call__(self, left_s: float) -> Iterable[Replacement]:
        assert left_s == math.inf
        return [Replacement(device, f"assignment-{device}") for device in self.devices]


def new_buffer(devices: str = "abc", target_updates: int = 2, **terms: object) -> BufferedRound:
    given = {"min_updates": 1, "opened_s": 100.0, "deadline_s": 10.0, **terms}
    return BufferedRound(RoundConfig(7, 6, {d: f"assignment-{d}" for d in devices}, target_updates, **given))  # type: ignore[arg-type]  # tests vary them


def header(device: str, assignment: str | None = None, base: int = 6, sequence: int = 1) -> UpdateArrived:
    return UpdateArrived(update(device, sequence), assignment or f"assignment-{device}", device, base)


def play(buffer: BufferedRound, *script: tuple[float, object], idle: str = "") -> list[Action]:
    """Feed (seconds after opening, event); additions succeed at once where an answer is accepted."""
    actions: list[Action] = []
    for after, event in script:
        done = buffer.on(event, 100.0 + after, Idle(idle))  # type: ignore[arg-type]  # the script holds inputs
        for action in list(done):
            if isinstance(action, AggregateUpdate):
                done += buffer.on(AggregationDone(action.update_id), 100.0 + after, Idle(idle))
        actions += done
    return actions


def assigned(actions: Sequence[Action]) -> list[str]:
    return [action.device for action in actions if isinstance(action, SelectReplacement)]
