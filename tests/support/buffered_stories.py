"""A buffer that is fed a script of events, and who is idle meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tests.server.test_round import update
from thinwire.server.buffered_round import BufferedRound
from thinwire.server.round_events import (
    Action,
    FoldDone,
    FoldUpdate,
    Replacement,
    RoundConfig,
    SelectReplacement,
    UpdateArrived,
)


class Idle:
    """Who is idle, as the driver would find it: asked again only when its answer has come or its ask was lost."""

    def __init__(self, devices: str) -> None:
        self.devices = list(devices)

    def __call__(self, left_s: float) -> Iterable[Replacement]:
        assert left_s == math.inf
        return [Replacement(device, f"ask-{device}") for device in self.devices]


def new_buffer(devices: str = "abc", target: int = 2, **terms: object) -> BufferedRound:
    given = {"floor": 1, "opened_s": 100.0, "deadline_s": 10.0, **terms}
    return BufferedRound(RoundConfig(7, 6, {d: f"ask-{d}" for d in devices}, target, **given))  # type: ignore[arg-type]  # tests vary them


def head(device: str, ask: str | None = None, base: int = 6, sequence: int = 1) -> UpdateArrived:
    return UpdateArrived(update(device, sequence), ask or f"ask-{device}", device, base)


def play(buffer: BufferedRound, *script: tuple[float, object], idle: str = "") -> list[Action]:
    """Feed (seconds after opening, event); folds succeed at once where an answer is accepted."""
    actions: list[Action] = []
    for after, event in script:
        done = buffer.on(event, 100.0 + after, Idle(idle))  # type: ignore[arg-type]  # the script holds inputs
        for action in list(done):
            if isinstance(action, FoldUpdate):
                done += buffer.on(FoldDone(action.update_id), 100.0 + after, Idle(idle))
        actions += done
    return actions


def asked(actions: Sequence[Action]) -> list[str]:
    return [action.device for action in actions if isinstance(action, SelectReplacement)]
