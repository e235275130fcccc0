"""Several runs share the devices of one aggregator: each device works for one run at a time, and all runs go on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.several_runs import Site, devices, steady
from thinwire.core.events import ClientSelected, Event, RoundClosed, RoundOpened, UpdateAccepted
from thinwire.server import command_queue


@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read at each poll, because the virtual clock does not wait for real seconds."""
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)


EIGHT = dict(zip("abcdefgh", (1.0, 1.2, 0.8, 1.5, 2.0, 0.7, 1.1, 10.0), strict=True))


def statuses(site: Site) -> set[str]:
    return {site.store.run(run_id).status for run_id in site.runs}


def test_runs_go_on_at_once_and_no_device_works_for_two(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(EIGHT))
    for seed in range(3):
        site.submit(run={"seed": seed, "rounds": 4}, cohort={"clients": 3})
    site.serve()
    assert statuses(site) == {"done"}
    ends = {run_id: [e.at for e in site.events(run_id, RoundClosed)] for run_id in site.runs}
    begins = {run_id: site.events(run_id, RoundOpened)[0].at for run_id in site.runs}
    assert max(begins.values()) < min(end[-1] for end in ends.values()), "one waited for another one's end"
    for device in EIGHT:
        work = sorted(one for run_id in site.runs for one in site.work_of(run_id, device))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(work)), f"{device} worked for two runs at once"


def test_a_run_gets_as_much_of_the_devices_as_its_priority_says(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("abcd", 1.0)))
    for priority in (1.0, 3.0):
        site.submit(run={"rounds": 1000, "priority": priority})
    site.serve(seconds=40.0)
    slow, quick = (len(site.events(run_id, RoundClosed)) for run_id in site.runs)
    assert quick / slow == pytest.approx(3.0, rel=0.1)


def test_buffered_runs_share_devices_by_priority_also_while_their_replies_wait_for_the_next_buffer(
    tmp_path: Path,
) -> None:
    """More replies than a buffer takes arrive while its run waits for its turn; their devices work for the others."""
    site = Site(tmp_path, steady(dict(zip("abcd", (4.0, 5.0, 6.0, 20.0), strict=True))))
    for priority in (1.0, 3.0):
        site.submit(
            run={"rounds": 1000, "priority": priority},
            cohort={"clients": "all", "mode": "buffered", "buffer": 2, "deadline_s": 300},
        )
    site.serve(seconds=160.0)
    shares = []
    for run_id in site.runs:
        begins = {e.assignment_id: e.at for e in site.events(run_id, ClientSelected)}
        ends = {e.assignment_id: e.header["transfer"]["arrived_at"] for e in site.events(run_id, UpdateAccepted)}
        shares.append(sum(at - begins[assignment_id] for assignment_id, at in ends.items()))
    assert shares[1] / shares[0] == pytest.approx(3.0, rel=0.2)
    assert sum(shares) > 0.8 * 160 * 4, "devices were idle although both runs wanted them"


def test_the_reason_for_waiting_names_the_other_run(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("ab", 5.0)))
    first, second = site.submit(), site.submit(run={"seed": 1})
    said = set()
    site.on_event = lambda run_id, event: said.add((run_id, getattr(event, "text", "")))
    site.serve()
    assert (second, f"waiting for devices that {first} uses: a round needs 1 free device") in said
    assert statuses(site) == {"done"}


def test_no_more_runs_than_allowed_have_rounds_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(EIGHT))
    for seed in range(3):
        site.submit(run={"seed": seed}, cohort={"clients": 2})
    site.serve(max_runs=1)
    opened = [(event.at, run_id) for run_id in site.runs for event in site.events(run_id, RoundOpened)]
    assert opened == sorted(opened), "a round of a later run opened before the earlier run was over"
    assert statuses(site) == {"done"}


def test_a_run_whose_devices_are_not_there_keeps_no_other_run_from_its_place(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("ab", 1.0)))
    absent, other = site.submit(cohort={"wait_for": ["nobody"]}), site.submit(run={"seed": 1})
    site.serve(seconds=200.0, max_runs=1)
    assert [site.store.run(run_id).status for run_id in (absent, other)] == ["waiting", "done"]


def test_the_end_of_the_service_opens_no_round_of_a_run_that_waits_for_another_one_s_devices(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("ab", 100.0)))
    cohort = {"deadline_s": 600}
    first, second = (site.submit(run={"rounds": 1, "seed": seed}, cohort=cohort) for seed in range(2))
    site.serve(seconds=30.0)
    assert len(site.events(first, RoundOpened)) == 1
    assert not site.events(second, RoundOpened)
    site.serve()
    assert statuses(site) == {"done"}


def test_a_run_does_not_fail_by_its_patience_while_others_have_the_devices(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("ab", 50.0)))
    site.submit(run={"rounds": 4})
    patient = site.submit(run={"rounds": 2, "seed": 1}, cohort={"wait_s": 20})
    site.serve()
    assert statuses(site) == {"done"}, site.store.run(patient).status_text


@pytest.mark.usefixtures("looks_each_time")
def test_a_paused_run_takes_no_place_and_saves_up_no_time(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("ab", 1.0)))
    paused, other = (site.submit(run={"rounds": 400, "seed": seed}) for seed in range(2))
    site.store.commands.add("pause-run", paused)
    site.serve(seconds=25.0, max_runs=1)
    before = len(site.events(other, RoundClosed))
    assert (site.store.run(paused).status, before > 20) == ("paused", True)
    site.store.commands.add("resume-run", paused)
    site.serve(seconds=15.0)
    ours, theirs = len(site.events(paused, RoundClosed)), len(site.events(other, RoundClosed)) - before
    assert abs(ours - theirs) <= 2, "it caught up at the other run's expense"


@pytest.mark.usefixtures("looks_each_time")
def test_a_run_that_was_left_without_a_driver_is_stopped_by_a_command(tmp_path: Path) -> None:
    site = Site(tmp_path, steady(dict.fromkeys("abcd", 5.0)))
    runs = [site.submit(run={"rounds": 100, "seed": seed}, cohort={"clients": 2}) for seed in range(2)]
    site.serve(seconds=40.0)
    site.store.commands.add("stop-run", runs[1])
    site.serve(seconds=20.0, max_runs=1)
    assert [site.store.run(run_id).status for run_id in runs] == ["running", "stopped"]
    assert not site.store.commands.pending()


def test_a_defect_ends_its_own_run_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, steady(EIGHT))
    failing, other = (site.submit(run={"seed": seed, "rounds": 4}, cohort={"clients": 3}) for seed in range(2))

    def on_event(run_id: str, event: Event) -> None:
        if run_id == failing and isinstance(event, RoundClosed) and event.round == 2:
            raise RuntimeError("a defect")

    site.on_event = on_event
    site.serve()
    assert [site.store.run(run_id).status for run_id in (failing, other)] == ["failed", "done"]
    assert "RuntimeError: a defect" in site.store.run(failing).status_text
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("looks_each_time")
def test_a_revocation_is_answered_when_all_runs_have_recorded_it(tmp_path: Path) -> None:
    site, number, answered = Site(tmp_path, steady(dict.fromkeys("abcd", 1.0))), list[int](), list[int]()
    runs = [site.submit(run={"seed": seed, "rounds": 6}, cohort={"clients": 2}) for seed in range(2)]
    for name in "abcd":
        site.store.roster.enrol(name, name * 64, name.encode(), "loopback")

    def on_event(run_id: str, event: Event) -> None:
        if not number and isinstance(event, RoundClosed) and event.round == 2:
            number.append(site.store.revoke_device("a", "ann", "", lambda: True) or 0)
        if number and not answered and site.store.commands.result(number[0]) is not None:
            answered.append(site.store.last_seq())

    site.on_event = on_event
    site.serve()
    assert statuses(site) == {"done"}
    result = site.store.commands.result(number[0])
    assert result is not None
    rounds = {
        run_id: [e.round for e in site.events(run_id, RoundClosed) if "a" in devices(e.aggregated)] for run_id in runs
    }
    assert result == {"done": True, "rounds": {run_id: found for run_id, found in rounds.items() if found}}
    selected = [
        seq for run_id in runs for seq, event in site.store.events(run_id)
        if isinstance(event, RoundOpened) and "a" in event.assignments
    ]  # fmt: skip
    assert answered
    assert max(selected) < answered[0], "no run selects it after the answer"
