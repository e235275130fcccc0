"""The reads behind a run's page, on both databases: what they return of a recorded run."""

from __future__ import annotations

from benchmarks.page.recipe import Recipe, fill
from tests.support.store_agreement import assert_explanations_agree
from thinwire.store import Store

ROUNDS = 40


def test_the_reads_of_a_page_return_what_all_rows_say(store: Store):
    run = fill(store, Recipe("read", ROUNDS, known=12, selected=8))
    run_id = run.run_id
    assert_explanations_agree(store, run_id)
    rounds, updates, clients = store.rounds(run_id), store.updates(run_id), store.clients(run_id)
    assert store.round_count(run_id) == (ROUNDS + 1, max(row.changed for row in rounds))
    assert store.open_rounds(run_id, 1, ROUNDS + 1) == [ROUNDS + 1]
    assert [one.round for one in store.points(run_id, 10)] == [1, *range(4, ROUNDS, 4), ROUNDS]
    assert [one.round for one in store.points(run_id, ROUNDS)] == list(range(1, ROUNDS + 1))
    late = [one for one in updates if one.aggregated_round not in (None, one.round)]
    assert late
    for number in range(1, ROUNDS + 2):
        into = {one.update_id for one in late if one.aggregated_round == number}
        assert {one.update_id for one in store.updates_into(run_id, number, 0)} == into
    working = {one.assignment_id for one in updates if one.outcome == "selected" and one.round < ROUNDS + 1}
    found = store.updates_into(run_id, ROUNDS + 1, 0, ("selected",))
    assert working <= {one.assignment_id for one in found}
    names = [one.device for one in clients]
    assert store.client_count(run_id) == (len(names), sum(one.selected > 0 for one in clients))
    assert [one.device for one in store.clients(run_id, 3, 4)] == names[3:7]
    assert store.not_in_run(run_id, [names[0], "pi-9999"]) == ["pi-9999"]
    assert [info.row.name for info in store.devices(names[:2])] == sorted(names[:2])
    assert store.online_since() == {}
    latest = store.latest_work(run_id, ROUNDS, names[:3])
    assert {(one.round, one.device) for one in latest} == {
        (one.round, one.device) for one in updates if one.round >= ROUNDS and one.device in names[:3]
    }
    reasoned = store.updates(run_id, with_reason=True)
    assert {one.assignment_id for one in reasoned} == {one.assignment_id for one in updates if one.reason}
    since = sorted(row.changed for row in rounds)[-3]
    assert {row.round for row in store.rounds(run_id, changed_after=since)} == {
        row.round for row in rounds if row.changed > since
    }
