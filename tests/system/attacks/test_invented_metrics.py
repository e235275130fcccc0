"""A device whose metrics are invented: they decide neither `best` nor `target`, and fill no journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_words import answer
from tests.support.server_bench import LAYOUT
from tests.system.attacks.acting import acted
from tests.system.attacks.places import attacked, device_of
from thinwire.cli.runs.render import clipping
from thinwire.core.events import Evaluated, RoundClosed, RoundOpened, UpdateAccepted
from thinwire.core.fleet import Delivery
from thinwire.core.types import Assignment, Metrics, Reply, ReplyHeader
from thinwire.simulation import Behavior, SyntheticUpdates
from thinwire.store import Store
from thinwire.store.journal import to_json

HONEST = 7
FIRST_SEED = 12  # of a run of one client a round: it draws the liar first
RIGHT = (3, 5, 6, 4)  # of ten, of the versions 0 to 3: version 2 is the best


@dataclass
class Saying(SyntheticUpdates):
    """Says of each assignment the metrics that a test gives it."""

    says: Callable[[Assignment], Metrics] = lambda assignment: {}

    def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
        header, body = super().finish(delivery, behavior)
        assert isinstance(header, ReplyHeader)
        header.metrics.update(self.says(delivery.assignment))  # type: ignore[attr-defined]  # MadeUp's is a dict
        return header, body


def truth(assignment: Assignment) -> Metrics:
    right = float(RIGHT[assignment.base_version])
    return {"eval/loss": (10 * (1 - right / 10), 10.0), "eval/accuracy": (right, 10.0)}


LIES: dict[str, Callable[[Assignment], Metrics]] = {
    "low-loss": lambda assignment: {"eval/loss": (-1e90 if assignment.base_version == 0 else 1.0, 1.0)},
    "high-loss": lambda assignment: {"eval/loss": (1e90 * (1 + assignment.base_version), 1.0)},
    "all-right": lambda assignment: {"eval/accuracy": (10.0, 10.0), "eval/loss": (0.0, 10.0)},
    "many-examples": lambda assignment: {"eval/accuracy": (9e99, 9e99), "eval/loss": (0.0, 9e99)},
}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("lie", LIES)
def test_one_devices_metrics_decide_neither_best_nor_target(tmp_path: Path, lie: str, tls: bool) -> None:
    devices: dict[str, SyntheticUpdates] = {f"pi-{n}": Saying(f"pi-{n}", LAYOUT, says=truth) for n in range(HONEST)}
    devices["liar"] = Saying("liar", LAYOUT, says=lambda assignment: {**truth(assignment), **LIES[lie](assignment)})
    target = {"metric": "accuracy", "value": 0.62}
    made = acted(tmp_path, LAYOUT, devices, tls=tls, run={"rounds": 3, "target": target, "metric": "loss"})
    assert (made.row.status, made.row.version) == ("done", 3), made.row.status_text
    assert made.row.best_version == 2
    assert made.row.best_value == pytest.approx(0.4, abs=0.05 * 0.7)  # the width of version 0, whose loss is 0.7
    assert "did not reach" in made.row.status_text
    for event in made.of(Evaluated):
        assert {update_id.split("/")[1] for update_id in event.clipped} == {"liar"}
    with Store.open(made.home.database) as store:
        (shown,) = [u for u in store.updates(made.row.run_id, 1) if u.device == "liar"]
        assert shown.clipped
        assert set(store.rounds(made.row.run_id)[0].clipped["clients"]) == {"liar"}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("accuracy", [(1e90, 1.0), (11.0, 10.0), (-1.0, 10.0)])
def test_an_impossible_accuracy_is_refused_as_it_comes(
    tmp_path: Path, accuracy: tuple[float, float], tls: bool
) -> None:
    with attacked(tmp_path, tls=tls) as here:
        said = replace(answer("pi-1", "digits-1.1.pi-1"), metrics={"eval/accuracy": accuracy})
        assert device_of(here).push(said).short == (409, "protocol")
        assert here.spool.headers() == []


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_metrics_that_one_device_invents_are_counted_and_not_kept(tmp_path: Path, tls: bool) -> None:
    def invent(assignment: Assignment) -> Metrics:
        return {**truth(assignment), **{f"eval/{assignment.round}-{n}-{'x' * 40}": (1.0, 1.0) for n in range(50)}}

    devices: dict[str, SyntheticUpdates] = {f"pi-{n}": Saying(f"pi-{n}", LAYOUT, says=truth) for n in range(3)}
    devices["liar"] = Saying("liar", LAYOUT, says=invent)
    made = acted(tmp_path, LAYOUT, devices, tls=tls, run={"rounds": 3})
    assert made.row.status == "done", made.row.status_text
    assert [event.ignored for event in made.of(RoundClosed)] == [50, 50, 50]
    assert {name for event in made.of(Evaluated) for name in (*event.metrics, *event.spread)} == {"loss", "accuracy"}
    later = [event for event in made.of(UpdateAccepted) if event.round > 1]
    assert {name for event in later for name in event.header["metrics"]} == {"eval/loss", "eval/accuracy"}
    sizes = [len(json.dumps(to_json(event))) for event in made.events if not isinstance(event, UpdateAccepted)]
    assert max(sizes) < 4096
    with Store.open(made.home.database) as store:
        shown = store.updates(made.row.run_id)
        assert {name for update in shown for name in update.metrics} == {"eval/loss", "eval/accuracy"}


@dataclass
class Only(Saying):
    """Says these metrics and no others, of the last model too; without any it has no test data."""

    def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
        header, body = SyntheticUpdates.finish(self, delivery, behavior)
        assert isinstance(header, ReplyHeader)
        return replace(header, metrics=self.says(delivery.assignment)), body


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_device_that_measures_the_first_version_alone_ends_no_run(tmp_path: Path, tls: bool) -> None:
    """This seed selects the liar first: its metric is the only one that the run has heard of by then."""
    devices: dict[str, SyntheticUpdates] = {f"pi-{n}": Only(f"pi-{n}", LAYOUT, says=truth) for n in range(HONEST)}
    devices["liar"] = Only("liar", LAYOUT, says=lambda assignment: {"eval/zzz": (1.0, 1.0)})
    run = {"rounds": 3, "metric": "accuracy", "seed": FIRST_SEED}
    made = acted(tmp_path, LAYOUT, devices, tls=tls, run=run, cohort={"clients": 1})
    assert made.of(RoundOpened)[0].assignments.keys() == {"liar"}
    assert (made.row.status, made.row.version) == ("done", 3), made.row.status_text


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("cohort", [{}, {"mode": "buffered", "buffer": 4}], ids=["sync", "buffered"])
def test_a_device_that_measures_alone_decides_neither_best_nor_target(
    tmp_path: Path, cohort: dict[str, Any], tls: bool
) -> None:
    devices: dict[str, SyntheticUpdates] = {f"pi-{n}": Only(f"pi-{n}", LAYOUT) for n in range(4)}
    lie: Metrics = {"eval/accuracy": (9e99, 9e99), "eval/loss": (0.0, 9e99)}
    devices["liar"] = Only("liar", LAYOUT, says=lambda assignment: lie)
    run = {"rounds": 3, "target": {"metric": "accuracy", "value": 0.9}}
    made = acted(tmp_path, LAYOUT, devices, tls=tls, run=run, cohort=cohort)
    assert (made.row.status, made.row.version) == ("done", 3), made.row.status_text
    assert made.row.best_version is None
    assert "accuracy did not reach 0.9" in made.row.status_text
    assert "too few devices evaluated it" in made.row.status_text
    with Store.open(made.home.database) as store:
        shown = list(clipping(made.row, store.rounds(made.row.run_id)))
    assert shown[0].startswith("no version is best")
    assert all(event.few and event.examples <= 2**53 for event in made.of(Evaluated))
