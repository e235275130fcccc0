"""More rounds for a run that is over: what goes on, what begins again, and which runs are refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_private_rounds import Silent
from tests.support.crashes import Fate, each_death, unequal
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.server_bench import LAYOUT, REPORT, change, every
from tests.support.several_runs import Site, steady
from thinwire.aggregation.server_optimizers import server_rate
from thinwire.core import RunPlan
from thinwire.core.errors import BudgetSpent, PlanError, Refused
from thinwire.core.events import Event, ModelStored, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.core.run_events import RunExtended
from thinwire.server import command_queue
from thinwire.server.run_extension import extend_run
from thinwire.server.state import snapshot
from thinwire.server.state.run_state import empty_state
from thinwire.store import Store
from thinwire.store.read_models import CommandRow

SPEEDS = {"a": 1.0, "b": 1.4, "c": 2.3}


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read at each poll, because the virtual clock does not wait for real seconds."""
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)


def extended(site: Site, run_id: str, rounds: int = 2, **sets: str) -> Any:
    changes = {key.replace("__", "."): value for key, value in sets.items()}
    number = 1000 + site.store.run(run_id).rounds_total  # another for each extension
    command = CommandRow(number, "extend-run", run_id, {"rounds": rounds, "sets": changes}, "ann", 0.0)
    return extend_run(site.store, site.home, command, site.clock.wall)


def story(folder: Path, fate: Fate | None = None, **sections: Any) -> tuple[Site, str]:
    """A run of three rounds that is over, extended by two; a service may die once in what follows."""
    site = Site(folder, steady(SPEEDS))
    run_id = site.submit(**sections)
    site.serve()
    extended(site, run_id)
    site.fate = fate or Fate()
    site.serve()
    return site, run_id


def models(site: Site, run_id: str) -> list[tuple[int, str]]:
    return [(event.version, event.digest) for event in site.events(run_id, ModelStored)]


def test_versions_and_round_numbers_go_on_and_it_is_recorded(tmp_path: Path) -> None:
    site, run_id = story(tmp_path)
    row = site.store.run(run_id)
    assert (row.status, row.rounds_total, row.rounds_closed, row.version) == ("done", 5, 5, 5)
    assert [event.round for event in site.events(run_id, RoundOpened)] == [1, 2, 3, 4, 5]
    assert [version for version, _ in models(site, run_id)] == [0, 1, 2, 3, 4, 5]
    (event,) = site.events(run_id, RunExtended)
    assert (event.was, event.rounds, event.version, event.first_round, event.who) == (3, 5, 3, 4, "ann")
    assert [note[0][0] for note in row.notes] == ["extended"]
    ends = [event.at for event in site.events(run_id, RunStatusChanged) if event.status == "done"]
    assert row.finished_at == ends[-1] > ends[0]
    site.result(run_id)


def test_devices_begin_with_residual_0(tmp_path: Path) -> None:
    site, run_id = story(tmp_path)
    opened = site.events(run_id, RoundOpened)
    assert [event.references_from for event in opened] == [0, 0, 0, 4, 4]
    sent = [one.assignment for one in site.fleet.sent if one.assignment.kind == "train"]
    assert {one.references_from for one in sent if one.round >= 4} == {4}
    first = [one for one in sent if one.round == 4]
    assert all(any(part.name.startswith("full/") for part in one.parts) for one in first), "the whole model"


def test_the_schedule_keeps_its_number_of_rounds_unless_it_is_set(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    falls = {"lr": 1.0, "schedule": "cosine", "lr_end": 0.1}
    run_id = site.submit(local=falls)
    other = site.submit(run={"seed": 1}, local=falls)
    constant = site.submit(run={"seed": 2})
    site.serve()
    extended(site, run_id)
    extended(site, other, local__schedule_rounds="5", local__lr="0.5")
    extended(site, constant)
    plans = [RunPlan.from_json(site.store.run(one).plan).local for one in (run_id, other, constant)]
    assert [(plan.schedule_rounds, plan.lr) for plan in plans] == [(3, 1.0), (5, 0.5), (None, 1.0)]
    extended_again = site.store.run(run_id)
    assert extended_again.status == "queued"


def test_the_servers_schedule_keeps_its_number_of_rounds_too(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    falls = {"schedule": "cosine", "lr_end": 0.1}
    run_id, other, constant = (site.submit(run={"seed": seed}, server=falls) for seed in range(3))
    site.serve()
    extended(site, run_id)
    extended(site, other, server__schedule_rounds="5")
    extended(site, constant, server__schedule='"constant"', server__lr_end="0")
    plans = [RunPlan.from_json(site.store.run(one).plan) for one in (run_id, other, constant)]
    assert [plan.server.schedule_rounds for plan in plans] == [3, 5, None]
    assert [plan.local.schedule_rounds for plan in plans] == [None, None, None]
    assert server_rate(plans[0], 3) == pytest.approx(0.1), "it stays where it ended"


def test_the_plan_of_the_start_is_found_behind_two_extensions(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id = site.submit(local={"lr": 1.0, "schedule": "cosine", "lr_end": 0.1})
    begun = site.store.run(run_id)
    assert (begun.is_extended, begun.first_plan) == (False, begun.plan)
    site.serve()
    extended(site, run_id, local__lr="0.5", run__target='{ metric = "loss", value = 0.001 }')
    site.serve()
    extended(site, run_id, local__lr="0.25")
    row = site.store.run(run_id)
    assert (row.plan["local"]["lr"], row.plan["run"]["rounds"], row.is_extended) == (0.25, 7, True)
    assert row.first_plan == begun.plan
    assert RunPlan.from_json(row.first_plan).digest == RunPlan.from_json(begun.plan).digest


def test_a_schedule_that_has_ended_at_0_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id = site.submit(local={"lr": 1.0, "schedule": "linear"})
    site.serve()
    with pytest.raises(PlanError) as refused:
        extended(site, run_id)
    assert "the learning rate is 0 from round 4 on" in refused.value.why
    assert site.store.run(run_id).status == "done"


def test_a_service_carries_the_command_out_and_once_only(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id = site.submit()
    site.serve()
    command = site.store.commands.add("extend-run", run_id, {"rounds": 2, "sets": {}}, "ann")
    extend_run(site.store, site.home, site.store.commands.pending()[0])  # and died before it answered
    site.serve()
    assert site.store.commands.result(command) == {"done": True, "rounds": 5}
    assert site.store.run(run_id).rounds_closed == 5
    assert len(site.events(run_id, RunExtended)) == 1


def test_a_refusal_reads_no_journal_and_an_extension_reads_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id = site.submit()
    site.serve()
    stream, begins = Store.stream, list[int]()

    def streamed(store: Store, one: str, after: int = 0) -> Iterator[tuple[int, Event]]:
        begins.append(after)
        return stream(store, one, after)

    monkeypatch.setattr(Store, "stream", streamed)
    with pytest.raises(Refused):
        extended(site, run_id, run__seed="2")
    assert begins == []
    extended(site, run_id)
    assert begins == [0]


def test_a_refusal_is_the_result_of_the_command(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id, going = site.submit(), site.submit(run={"seed": 1, "rounds": 4})
    site.serve()
    command = site.store.commands.add("extend-run", run_id, {"rounds": 2, "sets": {"run.seed": "2"}}, "ann")
    site.serve(seconds=5.0)
    result = site.store.commands.result(command)
    assert result is not None
    assert (result["done"], result["error"]) == (False, f"run.seed stays as it is in {run_id}")
    assert site.store.run(going).status == "done"


def test_a_defect_ends_the_command_and_not_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would else stay, and end each next start of the service too."""
    site = Site(tmp_path, steady(SPEEDS))
    run_id, going = site.submit(), site.submit(run={"seed": 1, "rounds": 4})
    site.serve()
    monkeypatch.setattr("thinwire.server.recording_fleet.extend_run", lambda *given: 1 // 0)
    command = site.store.commands.add("extend-run", run_id, {"rounds": 2, "sets": {}}, "ann")
    site.serve(seconds=5.0)
    result = site.store.commands.result(command)
    assert result is not None and not result["done"] and "ZeroDivisionError" in result["error"]
    assert (site.store.run(run_id).rounds_closed, site.store.run(going).status) == (3, "done")


@pytest.mark.parametrize(
    "sections",
    [{"cohort": {"clients": 2}}, {"server": {"optimizer": "fedadam"}, "downlink": {"codec": "int8"}}],
    ids=["sampled", "with a state and a replica"],
)
def test_a_crash_anywhere_after_the_extension_changes_no_bit(tmp_path: Path, sections: dict[str, Any]) -> None:
    fate = Fate()
    site, run_id = story(tmp_path / "whole", fate, **sections)
    expected, whole = site.result(run_id), models(site, run_id)
    assert len(whole) == 6
    site.store.close()

    def check(lived: tuple[Site, str], where: str) -> None:
        assert lived[0].result(lived[1]) == expected, where
        assert models(*lived) == whole

    each_death(tmp_path, unequal(fate.places)[::2], partial(story, **sections), check)


def test_the_server_optimizer_goes_on_with_its_state(tmp_path: Path) -> None:
    straight = Site(tmp_path / "straight", steady(SPEEDS))
    plan: dict[str, Any] = {"server": {"optimizer": "fedadam"}, "uplink": {"codec": "identity"}}
    one = straight.submit(run={"rounds": 5}, **plan)
    straight.serve()
    site, two = story(tmp_path / "extended", **plan)
    assert models(site, two) == models(straight, one), "without a residual it is as if it had never ended"


def test_an_update_of_before_the_end_does_not_count(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 1.4, "c": 25.0}))
    run_id = site.submit(cohort={"deadline_s": 2.0, "min_updates": 1})
    site.serve()
    extended(site, run_id, cohort__deadline_s="100")
    site.serve()
    aggregated = [name for event in site.events(run_id, RoundClosed)[3:] for name in event.aggregated]
    assert len(aggregated) == len(set(aggregated))
    site.result(run_id)


def test_a_run_that_was_stopped_in_a_paused_round_goes_on(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0, "b": 50.0}))
    run_id = site.submit(cohort={"deadline_s": 100, "min_updates": 1.0})
    site.serve(seconds=10.0)
    site.store.command_run("stop", run_id)
    site.serve(seconds=10.0, max_runs=1)
    assert site.store.run(run_id).status == "stopped"
    extended(site, run_id, 2)
    assert site.store.run(run_id).rounds_total == 2, "no round had made a step"
    site.serve()
    assert site.store.run(run_id).status == "done"
    assert not site.store.open_rounds(run_id, 1, 100)


def test_a_snapshot_of_an_extended_run_is_its_state(tmp_path: Path) -> None:
    site, run_id = story(tmp_path)
    whole = empty_state(RunPlan.from_json(site.store.run(run_id).plan))
    for _, event in site.store.events(run_id):
        whole.apply(event)
    assert whole.references_from == 4
    assert snapshot.parse(snapshot.serialize(whole)) == whole


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"run": {"algorithm": "scaffold"}, "uplink": {"codec": "identity"}}, "keep a state for scaffold"),
        ({"run": {"algorithm": "feddyn"}, "uplink": {"codec": "identity"}}, "keep a state for feddyn"),
        ({"uplink": {"codec": "topk(0.1) > int8", "feedback": "ef21"}}, "keep a state for ef21"),
    ],
)
def test_a_run_whose_devices_remember_more_is_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    plan = RunPlan.from_json({"local": {"lr": 1.0}, **sections, "run": {"task": "toy", **sections.get("run", {})}})
    run_id = site.store.create_run("toy", plan, LAYOUT, REPORT)
    site.store.record(run_id, [RunStatusChanged(1.0, "stopped", "", 10)])
    with pytest.raises(Refused) as refused:
        extended(site, run_id)
    assert why in refused.value.why
    assert f"thinwire runs clone {run_id} --set run.init=" in refused.value.hint


PRIVATE = {
    "run": {"evaluate": "off"}, "cohort": {"clients": 2, "late": "drop", "min_updates": 1},
    "local": {"lr": 1.0, "steps": 5, "buffers": "local"}, "uplink": {"codec": "eden(4)"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"secure": {"enabled": True}, "cohort": {"clients": 3}}, "were planned for 3 rounds"),
        ({**PRIVATE, "privacy": {"mode": "central", "clip": 1.0, "target_epsilon": 8.0}}, "cost epsilon = 8"),
        (
            {**PRIVATE, "privacy": {"mode": "central", "clip": 1.0, "noise_multiplier": 2.0, "mechanism": "tree"}},
            "its tree of noise",
        ),
    ],
)
def test_a_run_whose_masks_or_noise_were_planned_is_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    plan = RunPlan.from_json({"local": {"lr": 1.0}, **sections, "run": {"task": "toy", "rounds": 3, "evaluate": "off"}})
    run_id = site.store.create_run("toy", plan, LAYOUT, REPORT)
    site.store.record(run_id, [RunStatusChanged(1.0, "stopped", "", 10)])
    with pytest.raises(Refused) as refused:
        extended(site, run_id)
    assert why in refused.value.why


def test_a_private_run_gets_as_many_rounds_as_its_budget_allows(tmp_path: Path) -> None:
    devices = [AttentiveDevice(name, Silent(name, LAYOUT, partial(change, name)), every(1.0)) for name in ("a", "b")]
    site = Site(tmp_path, devices)
    spends = {"mode": "central", "clip": 2.0, "noise_multiplier": 4.0, "delta": 1e-3, "budget": 2.2}
    plan = {**PRIVATE, "local": {"lr": 1.0, "steps": 1, "buffers": "local"}, "uplink": {"codec": "identity"}}
    run_id = site.submit(**plan, privacy=spends)
    site.serve(seconds=200.0)
    assert site.store.run(run_id).status == "done"
    with pytest.raises(BudgetSpent) as refused:
        extended(site, run_id, 1000)
    assert "would pass [privacy] budget = 2.2" in refused.value.what
    fits = int(refused.value.hint.removeprefix("--rounds "))
    assert 0 < fits < 1000
    assert site.store.run(run_id).status == "done", "nothing was changed"
    with pytest.raises(Refused, match=r"cohort\.clients stays as it is"):
        extended(site, run_id, 1, cohort__clients="1")
    extended(site, run_id, fits)
    site.serve(seconds=50.0 * fits)
    row = site.store.run(run_id)
    assert (row.status, row.rounds_closed) == ("done", 3 + fits)
    with pytest.raises(BudgetSpent, match="1 more round of"):
        extended(site, run_id, 1)


def test_a_sampled_run_goes_on_and_each_device_of_its_population_pays_for_each_round(tmp_path: Path) -> None:
    devices = [AttentiveDevice(name, Silent(name, LAYOUT, partial(change, name)), every(1.0)) for name in ("a", "b")]
    site = Site(tmp_path, devices)
    spends = {"mode": "central", "clip": 2.0, "noise_multiplier": 4.0, "delta": 1e-3, "budget": 2.2}
    plan = {**PRIVATE, "cohort": {"late": "drop", "deadline_s": 5.0}, "uplink": {"codec": "identity"}}
    run_id = site.submit(**plan, privacy={**spends, "sampling_rate": 0.5})
    site.serve(seconds=200.0)
    assert site.store.run(run_id).rounds_closed == 3
    with pytest.raises(BudgetSpent) as refused:
        extended(site, run_id, 1000)
    fits = int(refused.value.hint.removeprefix("--rounds "))
    row = extended(site, run_id, fits)
    assert (row.rounds_total, row.plan["run"]["rounds"]) == (3 + fits, 3 + fits), "readers see it too"
    site.serve(seconds=20.0 * fits)
    row = site.store.run(run_id)
    assert (row.status, row.rounds_closed) == ("done", 3 + fits)
    with pytest.raises(BudgetSpent, match="1 more round of"):
        extended(site, run_id, 1)


def test_a_run_that_has_reached_its_target_needs_another_one(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id = site.submit(run={"rounds": 6, "target": {"metric": "loss", "value": 0.5}})
    site.serve()
    assert site.store.run(run_id).rounds_closed < 6
    with pytest.raises(Refused, match="gets no more rounds"):
        extended(site, run_id)
    row = extended(site, run_id, run__target__value="-1")
    assert row.status == "queued"


def test_a_run_without_its_model_files_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(SPEEDS))
    run_id = site.submit(server={"optimizer": "fedadam"})
    site.serve()
    (site.home.run(run_id) / "v000003.state").unlink()
    with pytest.raises(Refused) as refused:
        extended(site, run_id)
    assert "what the server optimizer remembers" in refused.value.why
