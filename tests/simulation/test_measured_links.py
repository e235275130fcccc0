"""Runs over scripted links on the virtual clock: what is found out about them, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import Event, RoundClosed, RoundOpened
from thinwire.core.fleet import TaskReport
from thinwire.core.statedir import AggregatorHome
from thinwire.reports.reason_text import sentence
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import LogNormal, RandomScript, ScriptedDevice, ScriptedFleet, SyntheticUpdates
from thinwire.store import FileSpool, MeasureRow, Store

LAYOUT = Layout.of({"w": (500, 400)})
REPORT = TaskReport("toy", layout_digest=LAYOUT.digest)
MBIT = {"dsl": 1, "lte": 5, "cable": 20, "fibre": 100}
LADDER = ["identity", "fp16", "int8", "topk(0.01) > int8"]


def links(slowest: float) -> list[ScriptedDevice]:
    """Four devices that compute alike, on links of their own whose delay wavers."""
    return [
        ScriptedDevice(
            name, SyntheticUpdates(name, LAYOUT, 0.01, steps=4),
            RandomScript(7, download=LogNormal(0.1, 0.2), compute=1.0, upload=LogNormal(0.1, 0.2),
                  down_bytes_s=mbit * 1e6 / 8, up_bytes_s=mbit * 1e6 / 8),
        )
        for name, mbit in {**MBIT, "dsl": slowest}.items()
    ]  # fmt: skip


def run(folder: Path, slowest: float = 1.0, **sections: Any) -> tuple[list[Event], list[MeasureRow]]:
    home, clock = AggregatorHome.under(folder), VirtualClock()
    raw = {"run": {"task": "toy", "rounds": 8}, "local": {"lr": 1.0, "steps": 4}, **sections}
    raw["uplink"] = {"ladder": LADDER, "feedback": "none"}
    with Store.open(home.database) as store:
        zeros = np.zeros(LAYOUT.size, np.float32)
        run_id = submit(store, home, RunPlan.from_json(raw), FirstModel(LAYOUT, REPORT, zeros, zeros[:0]))
        fleet = ScriptedFleet(FileSpool(home.spool), clock, REPORT, links(slowest))
        assert drive(run_id, store=store, fleet=fleet, home=home, clock=clock).status == "done"
        return [event for _, event in store.events(run_id)], store.measures()


def test_the_slow_link_alone_gets_the_more_compressed_codec_and_everybody_is_in_time(tmp_path: Path) -> None:
    """At 1 Mb/s the model comes down in 6.4 s, and 9 s are allowed."""
    events, measured = run(tmp_path, cohort={"wait_for": 4, "deadline_s": 10})
    opened = [event for event in events if isinstance(event, RoundOpened)]
    assert set(opened[0].codecs.values()) == {LADDER[-1]}, "nothing is known yet"
    assert {round_.codecs["dsl"] for round_ in opened} == {LADDER[-1]}
    assert {opened[-1].codecs[name] for name in ("lte", "cable", "fibre")} == {LADDER[0]}
    assert "s fit into 9.0 s; int8 would take" in sentence(opened[-1].codec_reasons["dsl"])
    assert [event.reason for event in events if isinstance(event, RoundClosed)] == ["all"] * 8
    rows = {(row.device, row.kind): row for row in measured}
    for name, mbit in MBIT.items():
        step = rows[name, "step"].p50
        assert step is not None and step == pytest.approx(0.25)
        if name != "dsl":  # of which only one size was seen
            up = rows[name, "up"]
            assert up.p50 is not None and up.p90 is not None
            assert 0.5 * mbit * 1e6 <= up.p50 <= 2 * mbit * 1e6 and up.p90 < up.p50


def test_whoever_is_slower_than_the_wanted_ones_does_not_hold_the_round_up(tmp_path: Path) -> None:
    """At 0.2 Mb/s the model comes down in 32 s; 3 of the 4 that are selected are wanted."""
    events, _ = run(tmp_path, 0.2, cohort={"wait_for": 4, "clients": 3, "over_select": 0.34})
    opened = [event for event in events if isinstance(event, RoundOpened)]
    assert (opened[0].deadline_s, sentence(opened[0].deadline_reason)) == (
        60.0,
        "no time of these devices is known yet",
    )
    assert all(event.deadline_s < 20 for event in opened[1:])
    seconds = [event.seconds for event in events if isinstance(event, RoundClosed)]
    assert max(seconds) < 20
    assert "3 of 3 replies are expected" in sentence(opened[1].deadline_reason)
