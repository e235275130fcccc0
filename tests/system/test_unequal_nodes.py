"""Three real clients, one slow and on a battery: who is selected, for how long, for how much work, and in whose place.

What is measured is this machine's, so what is asserted of it is which measurement decided, and never how many seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from tests.support.frozen import frozen
from tests.support.processes import Site, kill
from tests.support.run_outcome import double_aggregations, lost_updates
from thinwire.core.events import ClientFailed, ClientSelected, Event, RoundClosed, RoundOpened, UpdateAccepted
from thinwire.reports.reason_text import sentence

T = TypeVar("T", bound=Event)
NAMES = ("pi-a", "pi-b", "slow")


def of(site: Site, run_id: str, kind: type[T]) -> list[T]:
    return [event for event in site.events(run_id) if isinstance(event, kind)]


def test_rounds_take_the_fast_and_the_late_and_another_in_the_place_of_one_that_is_killed(
    site: Site, tmp_path: Path
) -> None:
    site.start_aggregator()
    clients = {}
    for part, name in enumerate(NAMES):
        policy = tmp_path / f"{name}.toml"
        policy.write_text(f'[policy]\npower = "{"battery" if name == "slow" else "mains"}"\n')
        step_s = 0.3 if name == "slow" else 0.0
        clients[name] = site.start_client(name, part, len(NAMES), "--policy", str(policy), step_s=step_s)
    more_than_wanted(site)
    with frozen(clients["pi-a"].pid), frozen(clients["pi-b"].pid):  # so that who is selected does not answer before
        run_id = site.begin(
            "run.rounds=2", "cohort.clients=1", "cohort.wait_for=2", "cohort.deadline_s=60", "local.steps='auto'",
            "cohort.requires={mains=true}",
        )  # fmt: skip
        site.until_event(run_id, RoundOpened)
        (lost,) = of(site, run_id, RoundOpened)[0].assignments
        kill(clients[lost])
    another_instead(site, run_id, lost)


def more_than_wanted(site: Site) -> None:
    """Over-selection and a deadline by what was measured: the round closes without the slow one, which counts later."""
    run_id = site.begin(
        "run.rounds=500", "cohort.clients=2", "cohort.over_select=0.5", "cohort.wait_for=3", "local.steps=20",
        "cohort.max_staleness=400",
    )  # fmt: skip
    site.until_event(run_id, UpdateAccepted, device="slow", late=True)
    site.until_event(run_id, RoundClosed, count=2)
    assert site.typed("runs", "stop", run_id).returncode == 0
    assert site.until_done(run_id).status == "stopped", site.said()
    first, *others = of(site, run_id, RoundOpened)
    assert (set(first.assignments), first.target_updates) == (set(NAMES), 2)
    assert (first.deadline_s, "is known yet" in sentence(first.deadline_reason)) == (60.0, True)
    assert "2 of 2 replies are expected" in sentence(others[0].deadline_reason)
    assert "slow" not in others[0].assignments, "it is busy"
    closed = of(site, run_id, RoundClosed)[0]
    assert (closed.reason, closed.outstanding, len(closed.aggregated)) == ("enough", ["slow"], 2)
    late = next(event for event in of(site, run_id, UpdateAccepted) if event.device == "slow")
    assert (late.assignment_round, late.discount) == (1, (1 + late.staleness) ** -0.5)
    events = site.events(run_id)
    assert (double_aggregations(events), lost_updates(events)) == (0, 0)


def another_instead(site: Site, run_id: str, lost: str) -> None:
    """The round makes its step by the other one, whose work follows its speed as soon as that is measured."""
    assert site.until_done(run_id).status == "done", site.said()
    (other,) = {"pi-a", "pi-b"} - {lost}
    assert [(e.device, e.kind) for e in of(site, run_id, ClientFailed)] == [(lost, "offline")]
    gone, instead, again = of(site, run_id, ClientSelected)
    assert [e.device for e in (gone, instead, again)] == [lost, other, other]
    assert (instead.round, instead.instead_of, instead.deadline_s < 60) == (1, lost, True), "it has what is left"
    assert "nothing is known" in sentence(instead.work_reason)
    assert "pass" in sentence(again.work_reason)
    accepted = of(site, run_id, UpdateAccepted)
    assert [(e.device, e.header["steps"]) for e in accepted] == [(other, instead.steps), (other, again.steps)]
    assert [e.reason for e in of(site, run_id, RoundClosed)] == ["enough", "all"]
    reasons = [sentence(event.reasons["slow"]) for event in of(site, run_id, RoundOpened)]
    assert set(reasons) == {"lacks mains power (it runs on a battery)"}
