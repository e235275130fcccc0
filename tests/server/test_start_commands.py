"""A run that is started in the dashboard begins as one of `thinwire run`: without the task's code on the aggregator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.server.test_run_notices import serves
from tests.support.filled_store import new_run
from tests.support.server_bench import LAYOUT, REPORT, Bench, three
from thinwire.core import disk_reserve
from thinwire.core.errors import NotWritten, PlanError, Refused, TaskError, ThinwireError, Unreachable
from thinwire.core.events import RunStatusChanged
from thinwire.core.fleet import Hello
from thinwire.core.plan import RunPlan
from thinwire.reports.plan_check import check_values
from thinwire.reports.stored_models import stored_model
from thinwire.server import submit
from thinwire.server.run_end import close_undriven, end_abandoned, end_restored
from thinwire.server.submit import first_model, start
from thinwire.store import START_RUN, Store
from thinwire.store.task_layouts import known_task

PLAN: dict[str, Any] = {"run": {"task": "toy", "rounds": 2}, "local": {"lr": 0.5}}


def commanded(bench: Bench, **run: Any) -> int:
    plan = RunPlan.from_json({**PLAN, "run": {**PLAN["run"], **run}})
    return bench.store.commands.add(START_RUN, args={"plan": plan.to_json()})


def carried_out(bench: Bench, **run: Any) -> str:
    number = commanded(bench, **run)
    return start(bench.store, bench.home, next(one for one in bench.store.commands.pending() if one.id == number))


def test_a_commanded_run_begins_with_the_model_of_another_run_and_goes_to_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 2})
    number = commanded(bench, init=f"run:{bench.run_id}@0")
    serves(bench, 60.0)
    result = bench.store.commands.result(number)
    assert result == {"done": True, "run_id": "toy-2"}
    row = bench.store.run("toy-2")
    assert (row.status, row.rounds_closed, row.plan["run"]["init"]) == ("done", 2, f"run:{bench.run_id}@0")
    first = [bench.store.models(run_id)[0].digest for run_id in (bench.run_id, "toy-2")]
    assert first[0] == first[1]
    assert bench.store.commands.args_of(START_RUN, "toy-2")["plan"] == row.plan


def test_a_plan_without_an_origin_begins_with_the_model_of_a_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three())
    run_id = carried_out(bench)
    row = bench.store.run(run_id)
    assert (row.status, row.plan["run"]["init"], row.layout) == ("queued", "device", LAYOUT.to_json())
    assert bench.store.models(run_id) == []


SAME_WORK = {"evaluate": "off"}, {"clients": 3, "deadline_s": 60.0, "late": "drop"}, {"steps": 3, "buffers": "local"}
COVERED = ({"secure": {"enabled": True}}, {"privacy": {"mode": "central", "clip": 1.0, "noise_multiplier": 1.0}})


@pytest.mark.parametrize("covered", COVERED)
def test_a_plan_under_masks_or_with_privacy_names_its_first_model(tmp_path: Path, covered: dict[str, Any]) -> None:
    """No device makes one there: the check of the form says so, and the command says the same."""
    bench = Bench(tmp_path, three())
    run, cohort, local = SAME_WORK
    plan = {"run": {**PLAN["run"], **run}, "cohort": cohort, "local": {"lr": 0.5, **local}, **covered}
    (problem,) = check_values(plan, ()).problems
    assert (problem.place, problem.what) == (("run", "init"), "the plan has no [run] init")
    bench.store.commands.add(START_RUN, args={"plan": RunPlan.from_json(plan).to_json()})
    with pytest.raises(PlanError) as refused:
        start(bench.store, bench.home, bench.store.commands.pending()[-1])
    assert (refused.value.what, refused.value.why, refused.value.hint) == (problem.what, problem.why, problem.hint)
    named = {**plan, "run": {**plan["run"], "init": "upload:0a1b"}}
    assert check_values(named, ()).ok
    assert check_values(PLAN, ()).ok, "a device makes it"


def test_a_command_that_is_refused_says_why_and_leaves_no_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    other, missing = commanded(bench, task="nobody-has-it"), commanded(bench, init="run:toy-9")
    serves(bench, 30.0)
    answers = [bench.store.commands.result(number) or {} for number in (other, missing)]
    assert [answer["done"] for answer in answers] == [False, False]
    assert answers[0]["error"] == "nothing is known of the model of the task nobody-has-it"
    assert "thinwire run PLAN" in answers[0]["try"]
    assert answers[1]["error"] == "no run 'toy-9'"
    assert [row.run_id for row in bench.store.runs()] == [bench.run_id]


def test_a_run_is_not_made_if_its_first_model_would_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, three())
    monkeypatch.setattr(disk_reserve, "FREE_BYTES", 2**62)
    with pytest.raises(Refused, match="the disk has too little space"):
        carried_out(bench)
    assert [row.run_id for row in bench.store.runs()] == [bench.run_id]


def test_a_command_is_carried_out_once_also_if_the_aggregator_dies_before_the_run_is_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    number = commanded(bench, init=f"run:{bench.run_id}@0")
    command = bench.store.commands.pending()[0]

    def dies(run_id: str, events: object, command_id: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "record", dies)
        with pytest.raises(KeyboardInterrupt):
            start(bench.store, bench.home, command)
    assert (bench.store.commands.result(number), bench.store.run("toy-2").status) == (None, "preparing")
    end_abandoned(bench.store, bench.home)  # as each command line does that lists runs
    serves(bench, 30.0)
    assert bench.store.commands.result(number) == {"done": True, "run_id": "toy-2"}
    assert {row.run_id: row.status for row in bench.store.runs()} == {bench.run_id: "done", "toy-2": "done"}


def test_a_command_is_refused_after_a_person_stopped_its_run_before_it_was_in_the_queue(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three())
    number = commanded(bench)
    run_id = bench.store.create_run("toy", RunPlan.from_json(PLAN), LAYOUT, REPORT, command_id=number)
    close_undriven(bench.store, run_id, RunStatusChanged(1.0, "stopped", "stopped by a person", 10))
    with pytest.raises(Refused, match=f"{run_id} is stopped"):
        start(bench.store, bench.home, bench.store.commands.pending()[0])
    assert [row.run_id for row in bench.store.runs()] == [run_id, bench.run_id]


@pytest.mark.parametrize("allow", [[], ["/elsewhere/*"]])
def test_a_file_that_the_operator_does_not_allow_is_never_opened(tmp_path: Path, allow: list[str]) -> None:
    bench = Bench(tmp_path, three())
    (bench.home.root.parent / "aggregator.toml").write_text(f"allow = {json.dumps(allow)}\n")
    with pytest.raises(PlanError, match=r"\[run\] init names '/dev/zero/a.safetensors'"):
        carried_out(bench, init="/dev/zero/a.safetensors")


def test_an_allowed_file_is_checked_against_the_layout(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three())
    file = tmp_path / "models" / "first.safetensors"
    file.parent.mkdir()
    (bench.home.root.parent / "aggregator.toml").write_text(f'allow = ["{file.parent}/*"]\n')
    w, b = np.ones((30, 20), np.float32), np.zeros(20, np.float32)
    save_file({"w": w[:10], "b": b}, file)
    with pytest.raises(TaskError, match="is not a model of this task") as refused:
        carried_out(bench, init=str(file))
    assert refused.value.why == "missing or of another shape: w"
    save_file({"w": w * np.nan, "b": b}, file)
    with pytest.raises(TaskError, match="NaN"):
        carried_out(bench, init=str(file))
    save_file({"w": w, "b": b}, file)
    run_id = carried_out(bench, init=str(file))
    assert bench.store.run(run_id).status == "queued"
    made = first_model(bench.store, bench.home, RunPlan.from_json(bench.store.run(run_id).plan))
    assert made.params.tolist() == [1.0] * 600 + [0.0] * 20


def test_an_uploaded_model_is_checked_when_its_run_is_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three())
    bench.home.uploads.mkdir()
    save_file({"w": np.ones((30, 20), np.float32)}, bench.home.uploads / "0a1b.safetensors")
    with pytest.raises(TaskError, match="is not a model of this task"):
        carried_out(bench, init="upload:0a1b")
    for name in ("../0a1b", "", "0a1b.safetensors", "0a1c"):
        with pytest.raises(ThinwireError):
            carried_out(bench, init=f"upload:{name}")
    model = {"w": np.ones((30, 20), np.float32), "b": np.zeros(20, np.float32)}
    save_file(model, bench.home.uploads / "0a1b.safetensors")
    assert bench.store.run(carried_out(bench, init="upload:0a1b")).status == "queued"


def test_a_private_run_begins_with_no_upload_of_a_model_whose_cost_is_not_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three())
    bench.home.uploads.mkdir()
    model = {"w": np.ones((30, 20), np.float32), "b": np.zeros(20, np.float32)}
    about = stored_model(bench.store, bench.home, bench.run_id, "0").about()
    save_file(model, bench.home.uploads / "0a1b.safetensors", about)
    privacy = {"mode": "central", "clip": 1.0, "noise_multiplier": 1.0}
    plan = RunPlan.from_json({**PLAN, "run": {"task": "toy", "init": "upload:0a1b"}, "privacy": privacy})
    with pytest.raises(PlanError, match=f"begins with a file of the model of {bench.run_id}"):
        first_model(bench.store, bench.home, plan)


def test_the_layout_is_the_one_that_most_devices_report_and_else_that_of_the_newest_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three())
    assert known_task(bench.store, "other") is None
    found = known_task(bench.store, "toy")
    assert found is not None
    assert (found.run_id, found.devices, found.layout.digest) == (bench.run_id, (), LAYOUT.digest)
    told = replace(REPORT, tensors=LAYOUT.text, source_digest="f" * 64)
    for number, name in enumerate(("a", "b")):
        bench.store.roster.enrol(name, f"{number}" * 64, b"key", "loopback")
        bench.store.roster.seen(Hello(name, "p", (told,)), 1.0)
        found = known_task(bench.store, "toy")
        assert found is not None and found.devices == ("a", "b")[: number + 1]
    bench.store.roster.enrol("c", "c" * 64, b"key", "loopback")
    bench.store.roster.seen(Hello("c", "p", (replace(told, layout_digest="1" * 64),)), 1.0)  # it lies
    found = known_task(bench.store, "toy")
    assert found is not None
    assert (found.devices, found.report.source_digest, found.report.tensors) == (("a", "b"), "f" * 64, "")


def stepped(bench: Bench, steps: int) -> None:
    """Let a starter carry out the open commands so many times."""
    starter = submit.RunStarter(bench.store, bench.home)
    for _ in range(steps):
        starter.step(bench.store.commands.pending())
        starter._worker.submit(lambda: None).result(30)
    starter.close()


@pytest.mark.parametrize("kind", [NotWritten, Unreachable])
def test_a_start_that_the_disk_or_the_database_stopped_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ThinwireError]
) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    number, tries = commanded(bench, init=f"run:{bench.run_id}@0"), list[int]()

    def full(*given: Any) -> str:
        tries.append(1)
        if len(tries) == 1:
            raise kind("cannot write")
        return start(*given)

    monkeypatch.setattr(submit, "start", full)
    stepped(bench, 2)
    assert (len(tries), (bench.store.commands.result(number) or {}).get("done")) == (2, True)


@pytest.mark.parametrize("defect", [False, True])
def test_a_refusal_that_could_not_be_recorded_is_recorded_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: bool
) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    number, answer, tries = commanded(bench, init="run:nothing@0"), bench.store.commands.answer, list[int]()

    def failing(*given: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise Unreachable("cannot use the database")
        answer(*given)

    if defect:
        monkeypatch.setattr(submit, "start", lambda *given: 1 // 0)
    monkeypatch.setattr(bench.store.commands, "answer", failing)
    stepped(bench, 2)
    assert (bench.store.commands.result(number) or {}).get("done") is False


def test_a_restored_run_whose_devices_keep_a_state_with_it_is_ended(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.sqlite3") as store:
        both = new_run(store, more='[uplink]\ncodec = "topk(0.1)"\nfeedback = "ef21"\n')
        alone = new_run(store)
        for run in (both, alone):
            run.quiet_round()
        end_restored(store)
        ended = store.run(both.run_id)
        assert (ended.status, store.run(alone.run_id).status) == ("failed", "running")
        assert "restored from a backup" in ended.status_text
