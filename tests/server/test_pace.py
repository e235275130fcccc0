"""Steps and batch that follow each device's speed: they fit the deadline, and the reason stands in the journal."""

from __future__ import annotations

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from tests.support.reasons import noted
from tests.support.server_bench import LAYOUT, Bench, scripted, work
from thinwire.core import RunPlan
from thinwire.core.events import ClientSelected, RunNoted
from thinwire.core.plan_schema import LocalSection
from thinwire.reports.reason_text import sentence
from thinwire.server.policy.assignment_terms import (
    DEADLINE_SHARE,
    MAX_HALVINGS,
    UNMEASURED_STEPS,
    DeviceSpeed,
    choose_work,
)
from thinwire.simulation import Behavior, ScriptedDevice, SyntheticUpdates
from thinwire.store import LINK_KINDS, MeasureRow
from thinwire.store.device_profiles import work_key


def local(**more: object) -> LocalSection:
    return LocalSection(lr=1.0, steps="auto", **{"batch": 32, **more})


@drawn(
    example_s=st.floats(0.0, 10.0), rest_s=st.floats(0.0, 100.0), examples=st.integers(1, 10_000),
    deadline_s=st.floats(1.0, 1000.0), batch=st.integers(1, 256), least=st.integers(1, 9), accumulate=st.integers(1, 4),
)  # fmt: skip
def test_what_is_requested_fits_or_is_the_least_there_is(
    example_s, rest_s, examples, deadline_s, batch, least, accumulate
):
    section = local(batch=batch, min_steps=least, accumulate=accumulate)
    work = choose_work(section, DeviceSpeed(example_s, rest_s, examples), deadline_s)
    left_s, took_s = DEADLINE_SHARE * deadline_s - rest_s, work.steps * work.batch * example_s
    assert work.steps >= least
    assert min(2, batch) <= work.batch <= batch
    if took_s > max(0.0, left_s) * (1 + 1e-9):
        assert (work.steps, work.batch) == (least, max(min(2, batch), batch >> MAX_HALVINGS))
    if work.steps > least:
        assert (work.steps - 1) * work.batch * accumulate < examples, "no more than a pass"


@pytest.mark.parametrize(
    ("speed", "steps", "batch", "why"),
    [
        (None, UNMEASURED_STEPS, 32, "8 steps, since nothing is known of its speed yet"),
        (DeviceSpeed(0.001, 4.0, 320), 10, 32, "a whole pass of 10 steps fits into 50.0 s"),
        (DeviceSpeed(0.5, 4.0, 3200), 3, 32, "3 of the 100 steps of a pass fit into 50.0 s, at 16.00 s each"),
        (
            DeviceSpeed(2.5, 4.0, 3200),
            2,
            8,
            "2 of the 400 steps of a pass fit into 50.0 s, at 20.00 s each; each step has 8 examples",
        ),
        (DeviceSpeed(2.0, 59.0, 3200), 2, 4, "even 2 steps of 4 examples take longer than the 0.0 s that it has"),
    ],
)
def test_the_reason_says_what_it_came_from(speed, steps, batch, why):
    work = choose_work(local(min_steps=2), speed, 60.0)
    assert (work.steps, work.batch, sentence(work.reasons)) == (steps, batch, why)


class Timed(SyntheticUpdates):
    """Makes as many steps as it is requested."""

    def finish(self, delivery, behavior):
        self.steps = delivery.assignment.work.steps
        return super().finish(delivery, behavior)


def timed(name: str, example_s: float) -> ScriptedDevice:
    """A device with 640 examples that takes so many seconds for one of a step, and two more for its upload."""

    def script(assignment):
        return Behavior(compute_s=assignment.work.steps * assignment.work.batch * example_s, upload_s=2.0)

    return scripted(name, script, work(name, Timed, examples=640))


def assigned(bench: Bench, name: str) -> list[tuple[int, int]]:
    return [(event.steps, event.batch) for event in bench.events(ClientSelected) if event.device == name]


def test_each_device_is_requested_what_it_can_do_in_time(tmp_path):
    devices = [timed("fast", 0.001), timed("slow", 0.1), timed("tiny", 1.0)]
    bench = Bench(
        tmp_path, devices, run={"rounds": 8}, local={"lr": 1.0, "steps": "auto", "min_steps": 2},
        cohort={"deadline_s": 60},
    )  # fmt: skip
    assert bench.drive().status == "done"
    assert assigned(bench, "fast") == [(8, 32)] + [(20, 32)] * 7
    assert assigned(bench, "slow") == [(8, 32)] + [(16, 32)] * 7
    assert assigned(bench, "tiny")[0] == (8, 32)
    assert assigned(bench, "tiny")[-1] == (3, 16), "its first answer was late; then a smaller batch lets it take part"
    assert [(assignment.work.steps, assignment.work.batch) for assignment in bench.assignments("slow")] == assigned(
        bench, "slow"
    )
    assert bench.reasons()[-2:] == ["all", "all"]


def test_a_new_run_begins_with_what_earlier_ones_measured_of_a_device(tmp_path):
    devices = [timed("fast", 0.001), timed("slow", 0.1), timed("new", 0.1)]
    bench = Bench(
        tmp_path, devices, run={"rounds": 1}, local={"lr": 1.0, "steps": "auto"}, cohort={"deadline_s": 60}
    )  # fmt: skip
    plan = RunPlan.from_json(bench.store.run(bench.run_id).plan)
    rows = [
        MeasureRow(
            name, kind, "" if kind in LINK_KINDS else work_key(plan, LAYOUT), [list(sample)] * 16, None, None, 0.0
        )
        for name, step_s in (("fast", 0.032), ("slow", 3.2))
        for kind, sample in {
            "up": (1000.0, 2.0), "down": (1000.0, 0.5), "encode": (1.0, 0.0), "step": (8.0, 8 * step_s),
            "pass": (1.0, 20.0),
        }.items()
    ]  # fmt: skip
    bench.store.record(bench.run_id, [RunNoted(0.0, noted("measured before"))], rows)
    bench.drive()
    first = {event.device: event for event in bench.events(ClientSelected) if event.round == 1}
    assert first["fast"].steps == 20 and "a whole pass" in sentence(first["fast"].work_reason)
    assert 8 < first["slow"].steps < 20
    assert sentence(first["slow"].work_reason).endswith("; estimated from earlier runs")
    assert (first["new"].steps, sentence(first["new"].work_reason)) == (
        8,
        "8 steps, since nothing is known of its speed yet",
    )


def test_a_run_teaches_how_long_a_pass_is(tmp_path):
    bench = Bench(
        tmp_path, [timed("a", 0.1)], run={"rounds": 2}, local={"lr": 1.0, "steps": "auto"}, cohort={"deadline_s": 60}
    )  # fmt: skip
    bench.drive()
    taught = {row.kind: row.samples[-1] for row in bench.store.measures() if row.device == "a"}
    assert taught["pass"] == [1.0, 20.0]
    assert taught["step"][1] / taught["step"][0] == pytest.approx(3.2)


def test_a_resumed_run_goes_by_what_the_journal_says(tmp_path):
    section = {"lr": 1.0, "steps": "auto"}
    bench = Bench(tmp_path, [timed("a", 0.1)], run={"rounds": 4}, local=section, cohort={"deadline_s": 60})
    rounds = iter(range(100))
    bench.drive(stop=lambda: "service" if bench.events(ClientSelected)[1:] and next(rounds) > 3 else None)
    assert len(assigned(bench, "a")) < 4
    bench.restart()
    assert bench.drive().status == "done"
    assert assigned(bench, "a")[0] == (8, 32)
    assert set(assigned(bench, "a")[1:]) == {(16, 32)}


def test_a_plan_that_says_how_much_leaves_nothing_to_speed(tmp_path):
    bench = Bench(tmp_path, [scripted("a")], run={"rounds": 1})
    bench.drive()
    assert [(event.steps, event.batch, sentence(event.work_reason)) for event in bench.events(ClientSelected)] == [
        (0, 0, "")
    ]
