"""What is learned of devices from their answers, kept over runs, and what it says of the time an assignment takes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.crashes import Killed
from tests.support.server_bench import LAYOUT, REPORT, Bench, killing, scripted
from tests.support.small_task import plan_of, task_of
from thinwire.client import ClientInfo
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.events import DeviceOnline, UpdateAccepted
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Part, ReplyHeader, Timings, Transfer, UpdateId
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, ScriptedDevice, run_sim
from thinwire.store import MeasureRow, Store
from thinwire.store.device_profiles import MAX_SAMPLES, START_S, DeviceProfiles, Workload, durations, max_believed_steps

WORK = "model/32"
TIMINGS = Timings(download_s=2.0, queue_s=0.5, evaluate_s=1.0, train_s=5.0, encode_s=0.5)
HEAD = ReplyHeader(
    "run.1.a", UpdateId("run", "a", 1), 0, 100, steps=10, metrics={"eval/loss": (1.0, 2.0)}, timings=TIMINGS,
    parts=(Part("frame/0", 1000, "ff"),), transfer=Transfer(pulled_at=100.0, began_at=109.5, arrived_at=110.0),
)  # fmt: skip


def test_the_parts_of_an_answer_add_up_to_what_was_waited_for() -> None:
    found = durations(HEAD, 5000, epochs=2.0)
    assert found == {
        "up": (1000, 1.0), "encode": (1, 0.5), "down": (5000, 2.0), "step": (10, 5.0), "pass": (2.0, 10),
        "evaluate": (1, 1.0),
    }  # fmt: skip
    waited = sum(found[kind][1] for kind in ("up", "encode", "down", "step", "evaluate"))
    assert waited + TIMINGS.queue_s == 10.0


@pytest.mark.parametrize(
    "header",
    [
        replace(HEAD, timings=replace(TIMINGS, train_s=1e9)),  # longer than it was out
        replace(HEAD, transfer=None),
        replace(HEAD, transfer=Transfer(0.0, 109.5, 110.0)),  # handed out before a restart
        replace(HEAD, transfer=Transfer(100.0, 90.0, 90.0)),  # the wall clock was set back
        replace(HEAD, parts=()),
    ],
)
def test_what_cannot_be_teaches_nothing(header: ReplyHeader) -> None:
    assert durations(header, 5000, 0.0) == {}


@pytest.mark.parametrize(
    ("local", "assigned", "believed"),
    [
        ("batch = 10", 0, 20),  # two passes over 100 examples
        ("batch = 10\naccumulate = 3", 0, 8),
        ("steps = 40", 40, 40),
        ("steps = 40", 0, 9000),  # the assignment is forgotten
    ],
)
def test_a_count_of_steps_makes_no_device_look_faster_than_its_work(local: str, assigned: int, believed: int) -> None:
    epochs = "" if "steps" in local else "\nepochs = 2"
    plan = RunPlan.parse(f'[run]\ntask = "toy"\n[local]\nlr = 1.0\n{local}{epochs}')
    lying = replace(HEAD, steps=9000)
    found = durations(lying, 5000, 0.0 if assigned else 2.0, max_believed_steps(plan, lying, assigned))
    assert found["step"] == (believed, 5.0)


def learned(*found: dict[str, tuple[float, float]]) -> DeviceProfiles:
    known = DeviceProfiles()
    for each in found:
        known.learn("a", WORK, each)
    return known


ONE = durations(HEAD, 5000, 2.0)


def test_an_assignment_takes_what_its_parts_took() -> None:
    device = learned(ONE, ONE, ONE, ONE).device("a", WORK)
    taken = device.seconds(Workload(5000, 1000, steps=10, evaluates=True))
    assert taken is not None and taken.p50 == pytest.approx(9.5)
    twice = device.seconds(Workload(5000, 1000, steps=20))
    assert twice is not None and twice.p50 == pytest.approx(2.0 + 10.0 + 0.5 + 1.0)
    epoch = device.seconds(Workload(0, 1000, epochs=1.0))
    assert epoch is not None and epoch.p50 == pytest.approx(2.5 + 0.5 + 1.0), "an epoch has 5 steps"


def test_of_what_was_never_seen_nothing_is_said() -> None:
    known = learned({"up": (1000, 1.0), "step": (10, 5.0)})
    assert known.device("b", WORK).seconds(Workload(0, 1, steps=1)) is None
    assert known.device("a", "another model/32").seconds(Workload(0, 1, steps=1)) is None
    assert known.device("a", WORK).seconds(Workload(1, 1, steps=1)) is None, "it never took a model"
    assert known.device("a", WORK).seconds(Workload(0, 1, epochs=1.0)) is None, "how many steps an epoch has"
    assert known.device("a", WORK).seconds(Workload(0, 1, steps=1)) is not None


def test_a_link_is_known_whatever_the_work_is() -> None:
    known = learned(ONE)
    other = known.device("a", "another")
    assert other.up is not None and other.down is not None and other.step is None


samples = st.tuples(st.floats(1, 1e9), st.floats(0, 1e6))
found = st.dictionaries(st.sampled_from(["up", "down", "step", "evaluate", "encode"]), samples)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), found), max_size=40))
def test_what_is_read_back_decides_as_what_wrote_it(answers: list[tuple[str, dict[str, tuple[float, float]]]]) -> None:
    known, rows = DeviceProfiles(), dict[tuple[str, str, str], MeasureRow]()
    for device, each in answers:
        known.learn(device, WORK, each)
        rows |= {(row.device, row.kind, row.work): row for row in known.changed_rows(1.0)}
    assert known.changed_rows(2.0) == []
    again = DeviceProfiles(MeasureRow(**json.loads(json.dumps(asdict(row)))) for row in rows.values())
    assert all(len(row.samples) <= MAX_SAMPLES for row in rows.values())
    for device in "abc":
        assert again.device(device, WORK) == known.device(device, WORK)


def test_a_row_says_bits_a_second_of_a_link_and_seconds_of_the_rest() -> None:
    rows = {row.kind: row for row in learned(*[ONE] * MAX_SAMPLES).changed_rows(7.0)}
    assert rows["down"].p50 == pytest.approx(8 * 5000 / (2.0 - START_S)) and rows["down"].work == ""
    assert rows["step"].p50 == 0.5 and rows["step"].work == WORK and rows["step"].at == 7.0
    assert rows["pass"].p50 == 5.0


def test_a_round_trip_told_again_is_one_sample() -> None:
    known = DeviceProfiles()
    for rtt_s in (0.02, 0.02, 0.03, 0.02, 0.0):
        known.learn_rtt("a", rtt_s)
    assert [row.samples for row in known.changed_rows(0.0)] == [[[1.0, 0.02], [1.0, 0.03]]]


def test_of_what_was_seen_the_last_ones_count() -> None:
    known = DeviceProfiles()
    for seconds in range(3 * MAX_SAMPLES):
        known.learn("a", WORK, {"encode": (1.0, float(seconds))})
    assert [row.samples for row in known.changed_rows(0.0)] == [
        [[1.0, float(s)] for s in range(2 * MAX_SAMPLES, 3 * MAX_SAMPLES)]
    ]


def test_while_all_transfers_have_one_size_a_round_trip_is_what_they_begin_with() -> None:
    known = DeviceProfiles()
    known.learn_rtt("a", 0.2)
    known.learn("a", WORK, {"up": (1e6, 1.0)})
    up = known.device("a", WORK).up
    assert up is not None and up.start_s == 0.2


def sending(name: str, upload_s: float) -> ScriptedDevice:
    return scripted(name, lambda assignment: Behavior(compute_s=0.0, upload_s=upload_s))


def test_a_run_keeps_what_its_answers_showed_and_the_next_one_knows_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a"), sending("b", 4.0)], run={"rounds": 3})
    bench.drive()
    rows = {(row.device, row.kind): row for row in bench.store.measures()}
    assert rows["b", "up"].samples == [[n, pytest.approx(4.0)] for n, _ in rows["b", "up"].samples]
    assert len(rows["b", "up"].samples) == 3
    assert len(rows["a", "down"].samples) == 3, "the model's bytes are known of each assignment"


def test_a_resumed_run_learns_each_answer_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a"), scripted("b", 4.0)], run={"rounds": 3})
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda e: isinstance(e, UpdateAccepted) and e.round == 2 and e.device == "a"))
    bench.restart()
    bench.drive()
    assert {(row.device, len(row.samples)) for row in bench.store.measures() if row.kind == "step"} == {
        ("a", 3), ("b", 3),
    }  # fmt: skip


def test_simulated_devices_teach_nothing_about_real_ones(tmp_path: Path) -> None:
    home = AggregatorHome.under(tmp_path)
    with Store.open(home.database) as store:
        plan = plan_of("steps = 2", run="rounds = 1")
        run_sim(plan, task_of(), store=store, home=home, clients=2, client=ClientInfo())
        assert store.measures() == []


def test_a_deadline_that_no_device_there_can_meet_is_refused_when_the_run_is_handed_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [sending("a", 40.0), sending("b", 50.0)], run={"rounds": 2})
    bench.drive()

    def hand_over(deadline_s: float) -> str:
        plan = RunPlan.from_json({**bench.store.run(bench.run_id).plan, "cohort": {"deadline_s": deadline_s}})
        params = np.zeros(LAYOUT.size, np.float32)
        return submit(bench.store, bench.home, plan, FirstModel(LAYOUT, REPORT, params, np.zeros(0, np.float32)))

    assert hand_over(5), "nobody is there: who comes may be quick"
    for name in "ab":
        bench.store.roster.enrol(name, name, b"key", "loopback")
        bench.store.record_device(DeviceOnline(1.0, name))
    with pytest.raises(PlanError, match="under what every device needs") as refused:
        hand_over(5)
    assert "the quickest took 3" in refused.value.why, "40 s, of an update that is a little smaller by the codec"
    assert hand_over(60)
    bench.store.roster.enrol("c", "c", b"key", "loopback")
    bench.store.record_device(DeviceOnline(2.0, "c"))
    assert hand_over(5), "nothing is known of c"
