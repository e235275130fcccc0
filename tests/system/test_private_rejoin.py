"""A real client leaves a private run's aggregator and joins again: its data go on where they were."""

from __future__ import annotations

import pytest

from tests.support.processes import Site, kill
from tests.system.test_private_run import PRIVATE_PLAN
from thinwire.core.events import RoundOpened

pytestmark = pytest.mark.slow
PLAN = (
    *(one for one in PRIVATE_PLAN if not one.startswith(("run.rounds", "cohort.wait_for", "cohort.min_updates"))),
    "run.rounds=2", "cohort.min_updates=1", "local.steps=1",
)  # fmt: skip


def test_a_client_that_joins_again_is_charged_for_both_and_a_forgotten_one_waits_for_a_person(site: Site) -> None:
    site.start_aggregator()
    first = site.start_client("pi-0", 0, 2)
    site.start_client("pi-1", 1, 2)
    assert site.until_done(site.begin(*PLAN, "cohort.wait_for=2")).status == "done", site.said()
    kill(first)
    assert site.typed("client", "leave", "--name", "pi-0").returncode == 0
    second = site.start_client("ward-0", 0, 2)  # another name, and so another folder and another key
    assert site.until_done(site.begin(*PLAN, "cohort.wait_for=2")).status == "done", site.said()
    with site.store() as store:
        spent = {name: sum(of.values()) for name, of in store.privacy.spent_by_device("digits").items()}
        assert spent == {"pi-1": 4, "ward-0": 4}
        assert store.audit.actions("ward-0")[0].what == "carry"

    kill(second)
    assert site.typed("client", "leave", "--name", "ward-0").returncode == 0
    refused = site.typed("devices", "forget", "ward-0")
    assert (refused.returncode, "--yes" in refused.stderr) == (5, True), "another name of it goes, too"
    assert site.typed("devices", "forget", "ward-0", "--yes").returncode == 0
    site.start_client("ward-1", 0, 2)
    site.until(lambda: "ward-1" in site.online(), "the client is online")
    run_id = site.begin(*PLAN, "cohort.wait_for=1")
    ended = site.until_done(run_id)
    assert ended.status == "done", ended.status_text
    opened = [event for event in site.events(run_id) if isinstance(event, RoundOpened)]
    assert [set(event.assignments) for event in opened] == [{"pi-1"}] * 2, "the other device goes on"
    said = site.typed("privacy", "ledger").stderr
    assert "ward-1 takes part in no private round: it has 4 releases of digits in its own ledger" in said
    settled = site.typed("privacy", "ledger", "settle", "digits", "--device", "ward-1", "--rounds", "4")
    assert settled.returncode == 0, settled.stderr
    assert site.until_done(site.begin(*PLAN, "cohort.wait_for=2")).status == "done", site.said()
    with site.store() as store:
        spent = {name: sum(of.values()) for name, of in store.privacy.spent_by_device("digits").items()}
    (pseudonym,) = spent.keys() - {"pi-1", "ward-1"}
    assert spent == {"pi-1": 8, "ward-1": 6, pseudonym: 4}
