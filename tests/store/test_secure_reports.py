"""What is said of secure runs: what they protect, and why a round took as long as it did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.explained import whys
from tests.support.secure_story import BYTES, DEVICES, SECURE, SecureStory, four_rounds
from thinwire.core.events import ROUND_OVER
from thinwire.privacy.graph import find_parameters
from thinwire.reports.secure_rounds import not_evaluated, protection
from thinwire.store import Store
from thinwire.store.explaining import explain_rounds
from thinwire.store.round_timing import open_text, phases_of, turns, waited_text


def said(store: Store, plan: str = SECURE, selected: int = 10) -> str:
    found = protection(store.run(SecureStory(store, plan=plan).run_id), [selected])
    assert found is not None
    return " ".join((found.sentence, *found.assumes, found.not_protected))


def test_the_protection_names_the_aggregator_the_colluding_clients_and_the_fewest_in_a_sum(store: Store) -> None:
    text = said(store)
    assert "an honest-but-curious aggregator with up to 3 of 10 clients colluding; a sum holds at least 6" in text
    assert "The aggregator follows the protocol" in text
    assert "Not protected: poisoned updates" in text
    assert "docs/explain/secure-aggregation.md" in text


def test_with_few_clients_no_collusion_is_withstood_and_that_is_said(store: Store) -> None:
    assert "with which no client colludes; a sum holds at least 3" in said(store, selected=3)


def test_the_round_with_the_fewest_clients_decides_what_a_run_protects(store: Store) -> None:
    found = protection(store.run(SecureStory(store).run_id), [10, 6, 8])
    assert found is not None
    assert found.sentence.endswith(
        "with up to 1 of 6 clients colluding; a sum holds at least 4 clients; the rounds selected 6 to 10 clients."
    )


def test_a_malicious_aggregator_is_withstood_by_clients_that_pin_the_roster(store: Store) -> None:
    plan = SECURE.replace("max_corrupt = 0.3", 'max_corrupt = 0.2\nadversary = "malicious"')
    text = said(store, plan)
    assert "against a malicious aggregator with up to 2 of 10 clients colluding, if each client" in text
    assert "has pinned the roster; a sum holds at least 7" in text
    assert "pinned the roster of identity keys, which an offline key has signed, and at most 2 devices" in text
    assert "follows the protocol" not in text
    assert "min_cohort" in text


def test_min_survivors_and_a_sparse_graph_are_part_of_what_is_said(store: Store) -> None:
    assert "a sum holds at least 8 clients" in said(store, f"{SECURE}min_survivors = 8\n")
    sparse = f'{SECURE.replace("max_corrupt = 0.3", "max_corrupt = 0.1")}graph = "k-regular"\n'
    text = said(store, sparse.replace("clients = 10", "clients = 200"), 200)
    assert "up to 20 of 200 clients colluding; a sum holds at least 160 clients" in text
    neighbours = find_parameters(200, 0.1, 0.2, rounds=6).k
    assert f"shares its secrets with {neighbours} others" in text
    assert "probability of at most 2^-40" in text


def test_a_round_with_too_few_clients_for_its_graph_has_no_sum_to_protect(store: Store) -> None:
    sparse = SECURE.replace("max_corrupt = 0.3\nmax_dropout = 0.2", "max_corrupt = 0.4\nmax_dropout = 0.4")
    sparse = f'{sparse}graph = "k-regular"\n'
    assert "A round of 10 clients has no sum: no k-regular graph of 10 clients" in said(store, sparse, 10)


def test_a_simulation_is_said_to_protect_nothing(store: Store) -> None:
    row = store.run(SecureStory(store).run_id)
    row = type(row)(**{**{name: getattr(row, name) for name in row.__dataclass_fields__}, "source": "sim"})
    found = protection(row, [10])
    assert found is not None
    assert found.sentence.startswith("A simulation protects nothing, because one process has the data of all clients")


def test_a_run_in_the_clear_and_a_run_without_a_round_have_no_protection(store: Store) -> None:
    plain = SecureStory(store, plan=SECURE.replace("enabled = true", "enabled = false"))
    assert protection(store.run(plain.run_id), [10]) is None
    assert protection(store.run(SecureStory(store).run_id), []) is None


def test_clients_whose_round_ended_without_them_did_not_drop_out(store: Store) -> None:
    run = store.run(four_rounds(store).run_id)
    found = store.rounds(run.run_id, 3, 3)[0]
    gone, *others = store.updates(run.run_id, 3)
    ended = [replace(one, outcome="over", reason=ROUND_OVER) for one in others]
    (advertise,) = phases_of(found, [], [replace(gone, outcome="failed", reason="offline: no request"), *ended])
    assert advertise.dropped == {gone.device: "offline: no request"}
    assert waited_text(advertise).endswith(f"; {gone.device} dropped out (offline)")


def test_a_round_is_explained_by_its_longest_phase_and_whom_that_waited_for(store: Store) -> None:
    run = store.run(four_rounds(store).run_id)
    rounds = store.rounds(run.run_id)
    phases, updates = store.phases(run.run_id), store.updates(run.run_id)
    first, second, third = whys(run, rounds, updates, turns(rounds), {}, phases)
    waits = "the phase masked lasted 5.2 s, waiting for masked vectors"
    assert first.sentence == f"Round 1 took 6.8 s: {waits}; the last came from pi-10."
    assert second.sentence == f"Round 2 took 6.8 s: {waits}; the last came from pi-10; pi-07 was not waited for."
    assert (second.device, second.waited_for) == ("pi-10", ())
    assert third.sentence == f"Round 3 took 6.3 s: {waits} of pi-01 and 4 more until its deadline."
    assert (third.device, third.waited_for) == ("", DEVICES[:5])
    in_phases = {"advertise": 0.4, "share": 0.7, "masked": 5.2, "agree": 0.2, "unmask": 0.3}
    assert {stage: took for stage, took in first.stages.items() if stage in in_phases} == pytest.approx(in_phases)
    assert "in the stage masked" in explain_rounds([first, second, third]).sentence


@pytest.mark.parametrize(("down_s", "said", "device"), [
    (3.0, ("the phase masked lasted 5.2 s, waiting for masked vectors; the last came from pi-10; the aggregator was "
           "offline for 3.0 s meanwhile"), "pi-10"),
    (60.0, "the aggregator was offline for 60 s", ""),
])  # fmt: skip
def test_a_round_that_was_mostly_without_an_aggregator_is_explained_by_that(
    store: Store, down_s: float, said: str, device: str
) -> None:
    story = SecureStory(store)
    story.play(down_s=down_s)
    run, rounds = store.run(story.run_id), store.rounds(story.run_id)
    (told,) = whys(run, rounds, store.updates(run.run_id), turns(rounds), {}, store.phases(run.run_id))
    assert told.sentence.endswith(f": {said}.")
    assert (told.device, told.stages["downtime"]) == (device, down_s)
    assert told.seconds == pytest.approx(6.8 + down_s)
    assert told.stages.get("unaccounted", 0.0) == pytest.approx(0.0)


def test_the_stages_of_a_secure_round_are_measured_and_make_up_its_time(store: Store) -> None:
    run = store.run(four_rounds(store).run_id)
    rounds = store.rounds(run.run_id)
    for told in whys(run, rounds, store.updates(run.run_id), turns(rounds), {}, store.phases(run.run_id)):
        assert sum(told.stages.values()) >= told.seconds - 1e-9
        assert told.stages.get("unaccounted", 0.0) == pytest.approx(0.0)
        assert not {"train", "encode", "evaluate", "waiting"} & set(told.stages)


def test_the_phase_in_which_a_round_ended_or_that_is_open_has_its_drop_outs_too(store: Store) -> None:
    run_id = four_rounds(store).run_id
    _, second, third, fourth = store.rounds(run_id)
    ended = phases_of(third, store.phases(run_id, 3), store.updates(run_id, 3))[-1]
    assert (ended.phase, ended.is_closed, ended.received) == ("masked", False, None)
    assert ended.seconds == pytest.approx(5.2)
    assert list(ended.dropped) == list(DEVICES[:5]), "and not the five whose vectors the round dropped"
    left = phases_of(second, store.phases(run_id, 2), store.updates(run_id, 2))
    assert left[1].dropped == {"pi-03": "withdrew: policy"}
    assert left[3].dropped == {"pi-09": ""}, "its vector is in the sum"
    assert waited_text(left[1]).endswith("; pi-03 dropped out (withdrew)")
    going = phases_of(fourth, store.phases(run_id, 4), store.updates(run_id, 4))
    assert [(one.phase, one.seconds is None) for one in going] == [
        ("advertise", False), ("share", False), ("masked", True),
    ]  # fmt: skip
    assert open_text(fourth, going) == (
        "Round 4 is open: the phase masked waits for masked vectors; 9 of 10 clients are in it."
    )


def test_the_latest_version_is_said_to_be_evaluated_by_the_next_sum(store: Store) -> None:
    story = four_rounds(store)
    rounds = store.rounds(story.run_id)
    assert not_evaluated(store.run(story.run_id), rounds) == (
        "version 2 has no metrics yet: evaluated by the next round's sum"
    )
    assert not_evaluated(replace(store.run(story.run_id), status="done"), rounds) == (
        "version 2 has no metrics: only a next round's sum would evaluate it"
    )
    assert not_evaluated(store.run(story.run_id), rounds[:1]) == ""
    for summed in ("", 'metrics = { "train/loss" = 10.0 }'):
        silent = SecureStory(store, plan=SECURE.replace("metrics = { accuracy = 1.0, loss = 10.0 }", summed))
        silent.play()
        assert not_evaluated(store.run(silent.run_id), store.rounds(silent.run_id)) == "", "no model is evaluated"


def test_what_a_masked_update_does_not_tell_is_not_stored_as_zero(store: Store) -> None:
    run_id = four_rounds(store).run_id
    for row in store.updates(run_id, 1):
        assert (row.norm, row.residual_norm, row.residual_ratio, row.metrics) == (None, None, None, {})
        assert (row.train_s, row.encode_s, row.evaluate_s, row.download_s, row.queue_s) == (None,) * 5
        place = DEVICES.index(row.device)
        assert row.payload_up == sum(BYTES.values()) + place * (len(BYTES) - 1), "the story adds the place to messages"
        assert row.arrived_at is not None
