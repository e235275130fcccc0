"""Clients that are not equally fast, by a script: what a deadline ends does not depend on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.small_task import plan_of, task_of
from thinwire.core import RunPlan
from thinwire.core.errors import UsageError
from thinwire.core.events import Event, UpdateAccepted
from thinwire.core.serialization import reply_from_json
from thinwire.core.types import ReplyHeader
from thinwire.simulation import History, simulate
from thinwire.store import Store

PARTIAL = "steps = 20\npartial = true\n[cohort]\ndeadline_s = 10"


def plan(text: str = PARTIAL) -> RunPlan:
    return plan_of(text, run="rounds = 3\nseed = 5")


def steps_made(monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[History, list[set[int]]]:
    """A simulation of three clients, and of each the steps that it made in its rounds."""
    headers, keep = list[ReplyHeader](), Store.record

    def record(store: Store, run_id: str, events: Sequence[Event], *measured: Any, **more: Any) -> None:
        for event in events:
            if isinstance(event, UpdateAccepted):
                header = reply_from_json(event.header)
                assert isinstance(header, ReplyHeader)
                headers.append(header)
        keep(store, run_id, events, *measured, **more)

    monkeypatch.setattr(Store, "record", record)
    history = simulate(task_of(), plan(), clients=3, **given)
    names = sorted({header.update_id.device for header in headers})
    return history, [{header.steps for header in headers if header.update_id.device == name} for name in names]


def test_a_slow_client_makes_fewer_steps_and_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    history, made = steps_made(monkeypatch, step_s=[0.1, 1.0, 4.0])
    assert made == [{20}, {8, 9}, {2}]  # the first round's guess leaves a moment for the encode
    assert [(row.reason, row.late) for row in history.rounds] == [("all", 0)] * 3
    assert [row.seconds for row in history.rounds] == [8.0, 9.0, 9.0]
    again, _ = steps_made(monkeypatch, step_s=[0.1, 1.0, 4.0])
    assert again.run.model_digest == history.run.model_digest


def test_without_a_script_this_machines_speed_ends_nobodys_training(monkeypatch: pytest.MonkeyPatch) -> None:
    history, made = steps_made(monkeypatch)
    assert made == [{20}, {20}, {20}]
    monkeypatch.undo()
    off = simulate(task_of(), plan(PARTIAL.replace("true", "false")), clients=3)
    assert off.run.model_digest == history.run.model_digest


def test_a_script_is_for_every_client() -> None:
    with pytest.raises(UsageError, match="step_s has 2 values"):
        simulate(task_of(), plan(), clients=3, step_s=[1.0, 2.0])
