"""Secure rounds of real handlers: the sum is exact, and a client leaves before anything secret does."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.support.secure_clients import (
    SecureClients,
    changed_of,
    failure_of,
    message_of,
    name_of,
    secure_plan,
    trained_of,
)
from tests.support.small_task import RUN, cross_entropy, plan_of
from thinwire.client.execute import Begun
from thinwire.client.executor import InProcessExecutor
from thinwire.client.payload import least_kept_bytes
from thinwire.client.policy import Policy
from thinwire.client.train.errors import Cancelled
from thinwire.core import RunPlan
from thinwire.core.layout import Layout
from thinwire.core.secure_numbers import METRIC_BITS
from thinwire.core.types import Failure, ReplyHeader, SecureWork, Timings, UpdateId, UpdateOutcome, phase_id
from thinwire.privacy.keys import ML_KEM_CIPHERTEXT_BYTES

ONE, LAST = name_of(0), name_of(3)


def test_the_sum_is_that_of_the_points_and_the_rest_stays_in_the_residuals(tmp_path):
    clients = SecureClients(tmp_path)
    for number in (1, 2):
        kept = {name: clients.residual(name) if number > 1 else 0 for name in clients.handlers}
        clients.open()
        held = {name: changed_of(begun) + kept[name] for name, begun in clients.begun.items()}
        clients.run()
        mean, scalars = clients.sum()
        sent = [held[name] - clients.residual(name) for name in held]
        np.testing.assert_allclose(mean, np.mean(sent, axis=0), atol=1e-6)
        assert scalars == {"weight": 4}
        assert np.abs(mean).max() > 0


def test_a_small_support_sends_one_window_and_keeps_all_others(tmp_path):
    clients = SecureClients(tmp_path, secure_plan("support = 0.5\nrotate = 64"))
    clients.open()
    held = {name: changed_of(begun) for name, begun in clients.begun.items()}
    clients.run()
    mean, _ = clients.sum()
    sent = [held[name] - clients.residual(name) for name in held]
    np.testing.assert_allclose(mean, np.mean(sent, axis=0), atol=1e-6)


def test_without_feedback_nothing_is_kept(tmp_path):
    clients = SecureClients(tmp_path, secure_plan(uplink='feedback = "none"'))
    clients.open()
    clients.run()
    assert clients.residual(ONE) is None


@pytest.mark.parametrize("secure", ["weight_max = 20", "weight_max = 1000"])
def test_the_weight_is_the_number_of_examples_up_to_the_largest(tmp_path, secure):
    clients = SecureClients(tmp_path, secure_plan(secure))
    clients.open()
    clients.run()
    assert clients.sum()[1]["weight"] == 4 * min(24, clients.plan.secure.weight_max)


def test_metrics_are_summed_with_their_counts_in_units_of_their_bounds(tmp_path):
    """A mean above its bound counts as the bound, and the examples of a client as at most weight_max."""
    plan = secure_plan("weight_max = 8\nmetrics = { loss = 0.25, accuracy = 2.0 }", run='evaluate = "clients"')
    clients = SecureClients(tmp_path, plan)
    clients.open()
    metrics = [trained_of(begun).header.metrics for begun in clients.begun.values()]
    clients.run()
    found = clients.sum()[1]
    counts = [min(6 + number, 8) for number in range(4)]
    accuracies = [total / count / 2.0 for total, count in (one["eval/accuracy"] for one in metrics)]
    assert min(one["eval/loss"][0] / one["eval/loss"][1] for one in metrics) > 0.25
    assert found["loss"] == sum(counts) << METRIC_BITS
    assert (found["loss/count"], found["accuracy/count"]) == (sum(counts), sum(counts))
    wanted = sum(mean * count * 2**METRIC_BITS for mean, count in zip(accuracies, counts, strict=True))
    assert abs(found["accuracy"] - wanted) < len(counts)  # each is rounded at random


@pytest.mark.parametrize(("steps", "fits"), [(1, 4), (40, 0)])
def test_the_clients_tell_in_the_sum_alone_how_many_updates_fitted_the_clip(tmp_path, steps, fits):
    clients = SecureClients(tmp_path, secure_plan('clip = "auto"', local="momentum = 0.9").model_copy())
    clients.aggregator.steps = steps
    clients.clip = 0.5
    clients.open()
    clients.run()
    assert clients.sum()[1]["fits"] == fits


def test_a_masked_reply_tells_nothing_of_a_single_client(tmp_path):
    clients = SecureClients(tmp_path)
    clients.handlers[ONE].continue_sequences({RUN: 7})  # its state is lost, which no other client's reply would tell
    clients.open()
    clients.run()
    header = clients.replies[ONE]
    bare = ReplyHeader(
        f"{RUN}.1.{ONE}", UpdateId(RUN, ONE, 8), 0, 0, parts=header.parts, codec="lattice", identity="run-identity"
    )
    assert (header, header.timings.commit_s) == (bare, Timings().commit_s)
    assert [part.name for part in header.parts] == ["masked"], "a second part would be a request more"


def test_a_client_that_is_lost_before_its_vector_left_is_not_in_the_sum(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    held = {name: changed_of(begun) for name, begun in clients.begun.items()}
    clients.run({"masked": [LAST]})
    mean, scalars = clients.sum()
    assert (clients.server.dropped, scalars["weight"]) == ({LAST: "masked"}, 3)
    sent = [held[name] - clients.residual(name) for name in held if name != LAST]
    np.testing.assert_allclose(mean, np.mean(sent, axis=0), atol=1e-6)


def test_a_client_that_was_killed_after_its_vector_left_is_in_the_sum_and_answers_no_phase(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run(until="masked")
    sent = clients.replies[LAST]
    assert isinstance(sent, ReplyHeader)
    again = clients.handlers[LAST] = clients.handler(3)  # a new process: its secrets are gone
    assert [header for header, _ in again.unsent_replies()] == [sent]
    clients.resume("agree")
    assert failure_of(clients, LAST) == ("failed", "order")
    assert clients.sum()[1] == {"weight": 4}


@pytest.mark.parametrize("lost", [(), (LAST,)])
def test_a_round_whose_plan_says_post_quantum_sends_ciphertexts_of_ml_kem(tmp_path, lost):
    clients = SecureClients(tmp_path, secure_plan("post_quantum = true"))
    clients.open()
    clients.run({"masked": lost})
    shares = message_of(clients.answered["share"][ONE])
    assert len(shares) > 2 * ML_KEM_CIPHERTEXT_BYTES * (clients.clients - 1), "two for each other client"
    assert clients.sum()[1] == {"weight": 4 - len(lost)}


@pytest.mark.parametrize("phase", ["share", "masked", "agree", "unmask"])
def test_another_request_for_the_same_phase_ends_the_clients_part(tmp_path, phase):
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run(until=phase)
    asked = clients.requested[phase][ONE]
    assert clients.phase(ONE, phase, asked) == clients.answered[phase][ONE], "the same request has the same answer"
    reply = clients.phase(ONE, phase, asked[:-1] + bytes([asked[-1] ^ 1]))
    assert isinstance(reply, Failure)
    assert (reply.kind, reply.text, reply.assignment_id) == ("failed", "another-request", f"{RUN}.1.{ONE}")
    later = clients.phase(ONE, phase, asked)
    assert isinstance(later, Failure)
    assert later.text == "order", "its secrets are gone"


def test_a_client_that_was_told_another_model_is_found(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open(away=[ONE])
    clients.params = clients.params + np.float32(0.5)
    with pytest.raises(Exception, match="is not signed for this round"):
        clients.begin(ONE)


@pytest.mark.parametrize("parts", ["two", "name", "length", "damaged", "missing"])
def test_a_request_that_is_not_one_bounded_part_ends_the_clients_part(tmp_path, parts):
    clients = SecureClients(tmp_path)
    clients.open()
    ((name, request), *_) = clients.server.close().items()
    delivery = clients.request(name, "share", request)
    part = delivery.assignment.parts[0]
    wrong: dict[str, Any] = {
        "two": (part, replace(part, name="more")), "name": (replace(part, name="frame/0"),),
        "length": (replace(part, length=1 << 24),), "damaged": (replace(part, sha256="00" * 32),), "missing": (),
    }  # fmt: skip
    delivery = replace(delivery, assignment=replace(delivery.assignment, parts=wrong[parts]))
    reply = clients.handlers[name].handle_phase(delivery, clients.said.append)
    assert isinstance(reply, Failure)
    assert (reply.kind, reply.text) == ("failed", "message")


def test_an_assignment_that_is_withdrawn_before_the_mask_leaves_the_state_as_it_was(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    before = clients.handlers[ONE].runs[RUN][1]
    clients.open()
    clients.begun[ONE].job.cancelled = lambda: True
    with pytest.raises(Cancelled):
        clients.handlers[ONE].finish(clients.begun[ONE])
    after = clients.handlers[ONE].runs[RUN][1]
    assert (after.residual is before.residual, after.sequence, after.outbox) == (True, 1, before.outbox)
    assert clients.phase(ONE, "share", b"") == Failure(
        "failed", "order", f"{RUN}.2.{ONE}", ONE, identity="run-identity"
    )


@pytest.mark.parametrize("outcome", ["dropped", "aggregated"])
def test_a_masked_update_never_returns_to_the_residual(tmp_path, outcome):
    """It may have left the device, and the aggregator's word proves nothing: the others can unmask a sum with it."""
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    before = clients.residual(ONE).copy()
    clients.open(outcomes=(UpdateOutcome(UpdateId(RUN, ONE, 1), outcome, 1),))
    assert clients.residual(ONE).tobytes() == before.tobytes()
    assert clients.handlers[ONE].runs[RUN][1].outbox == ()
    told = "round 1: its update was dropped; a masked update is never sent again"
    assert (told in clients.said) == (outcome == "dropped")


def test_what_fails_on_a_device_is_told_in_one_word(tmp_path):
    """An error in the data's code would be a fact of a single client."""

    def loss(model: Any, batch: Any) -> Any:
        raise ValueError("row 17 of the ward's table")

    clients = SecureClients(tmp_path, functions={"loss": loss})
    clients.open()
    assert {failure_of(clients, name) for name in clients.handlers} == {("failed", "work")}
    assert clients.handlers[ONE].rounds.is_ready(f"{RUN}.1.{ONE}")


def test_a_client_whose_training_diverges_is_in_the_sum_with_zeros_and_told_apart_by_nothing(tmp_path):
    """Else a model of the aggregator's choice would make those clients fail that have a record above some value."""
    clients = SecureClients(tmp_path, secure_plan("metrics = { loss = 10.0 }", run='evaluate = "clients"'))
    spoiled = {"loss": lambda model, batch: cross_entropy(model, batch) * float("nan")}
    clients.handlers[ONE].executor = InProcessExecutor(clients.task(1, **spoiled))
    clients.open()
    clients.run()
    assert {type(reply) for reply in clients.replies.values()} == {ReplyHeader}
    assert len({len(body) for body in clients.bodies.values()}) == 1
    update, scalars = clients.sum()
    assert scalars["weight"] == 4 and np.isfinite(update).all()
    assert "training diverged: an update of zeros is sent, which tells nothing of it" in clients.said


def test_an_update_that_overflows_with_its_residual_is_in_the_sum_with_zeros(tmp_path):
    """Training stays finite, and what a client keeps of each round drives the two to infinity for some data alone."""

    def steep(model: Any, batch: Any) -> Any:
        return 4e20 * cross_entropy(model, batch)

    base = secure_plan().to_json()
    plan = RunPlan.from_json({**base, "local": {**base["local"], "lr": 1e18, "steps": 1}})
    clients = SecureClients(tmp_path, plan, functions={"loss": steep})
    clients.aggregator.steps = 1
    clients.params = np.zeros_like(clients.params)
    largest = list[float]()
    for _ in range(4):
        clients.open()
        clients.run()
        assert {type(reply) for reply in clients.replies.values()} == {ReplyHeader}
        assert np.isfinite(clients.sum()[0]).all()
        largest.append(float(np.abs(clients.residual(ONE)).max()))
    assert any(before > 1e37 and after < 1 for before, after in pairwise(largest)), largest


@pytest.mark.parametrize(
    "changed", [{"secure": None}, {"kind": "evaluate"}, {"kind": "init"}, {"plan": "0" * 64}, {"layout_digest": "00"}]
)
def test_kinds_that_say_what_to_send_stay_as_they_are(tmp_path, changed):
    clients = SecureClients(tmp_path)
    clients.open(**changed)
    kind = "declined" if "kind" in changed else "need-plan" if "plan" in changed else "protocol"
    kind = "layout-mismatch" if "layout_digest" in changed else kind
    assert {failure_of(clients, name)[0] for name in clients.handlers} == {kind}


@pytest.mark.parametrize(
    "terms", [SecureWork(4, 1, 1.0), SecureWork(4, -1, 1.0), SecureWork(4, 0, 0.0), SecureWork(1 << 62, 0, 1.0)]
)
def test_terms_that_no_round_has_are_refused_before_training(tmp_path, terms):
    clients = SecureClients(tmp_path)
    clients.open(secure=terms)
    assert {failure_of(clients, name)[0] for name in clients.handlers} <= {"protocol", "declined"}
    assert not [line for line in clients.said if "steps" in line]


@pytest.mark.parametrize("number", [1, 2])
def test_a_round_is_summed_once_whatever_it_is_called(tmp_path, number):
    """An aggregator that lost what it did since a backup, or pretends to, gets no second sum with this client."""
    clients = SecureClients(tmp_path)
    for _ in (1, 2):
        clients.open()
        clients.run()
    clients.handlers[ONE] = clients.handler(0)
    clients.begin(ONE, round=number, assignment_id=f"{RUN}.{number}+.{ONE}")
    found = clients.replies[ONE]
    assert isinstance(found, Failure)
    assert (found.kind, found.text) == ("failed", "order")
    clients.open(away=[name for name in clients.handlers if name != ONE])
    assert ONE in clients.begun, "the next round is one"


def test_an_aggregator_that_lets_all_begin_again_gets_no_second_sum_of_a_round(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run()
    for number in (2, 1):  # the assignment of round 2 is never finished
        given = clients.assignment(ONE, round=number, assignment_id=f"{RUN}.{number}+.{ONE}", references_from=2)
        found = clients.handlers[ONE].begin(given, lambda: False, print, send=lambda message: None)
    assert isinstance(found, tuple), "the client trains for a second sum"
    assert isinstance(found[0], Failure)
    assert (found[0].kind, found[0].text) == ("failed", "order")


@pytest.mark.parametrize("owner", [Policy(), Policy(secure="required"), Policy(min_cohort=3)])
def test_an_assignment_in_the_clear_sets_the_masked_round_back_unless_the_owner_demands_masks(tmp_path, owner):
    """The limit that docs/explain/secure-aggregation.md tells of: this device would send an update in the clear too."""
    clients = SecureClients(tmp_path, owner=owner)
    clients.open()
    clients.run()
    sent = clients.assignment(ONE, references_from=2, assignment_id=f"{RUN}.2.{ONE}", plan=plan_of().to_json())
    clear = replace(sent, assignment=replace(sent.assignment, kind="evaluate", round=2, secure=None, codec="identity"))
    reply = clients.handlers[ONE].begin(clear, lambda: False, print)
    assert isinstance(reply, tuple)
    is_set_back = isinstance(reply[0], ReplyHeader)
    again = clients.assignment(ONE, round=1, assignment_id=f"{RUN}.1+.{ONE}")
    found = clients.handlers[ONE].begin(again, lambda: False, print, send=lambda message: None)
    assert is_set_back == (owner == Policy()) == isinstance(found, Begun)
    if isinstance(found, tuple):
        assert isinstance(found[0], Failure)
        assert found[0].text == "order"


def test_an_advertisement_that_is_asked_for_again_is_the_same(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    again = message_of(clients.phase(ONE, "advertise", b""))
    assert again == message_of(clients.phase(ONE, "advertise", b""))
    clients.handlers[ONE].rounds.forget_run(RUN)
    assert clients.phase(ONE, "advertise", b"") is None, "it comes with the training assignment"


@pytest.mark.parametrize("phase", ["", "describe"])
def test_a_phase_that_no_round_has_ends_the_clients_part(tmp_path, phase):
    clients = SecureClients(tmp_path)
    clients.open()
    reply = clients.phase(ONE, phase, b"")
    assert isinstance(reply, Failure)
    assert reply.text == "order"


def test_the_next_assignment_of_the_run_drops_the_round_before(tmp_path):
    clients = SecureClients(tmp_path)
    clients.open()
    clients.run(until="masked")
    first = clients.request(ONE, "agree", clients.requests[ONE])
    clients.open()
    reply = clients.handlers[ONE].handle_phase(first, clients.said.append)
    assert isinstance(reply, Failure)
    assert (reply.text, reply.assignment_id) == ("order", f"{RUN}.1.{ONE}")
    assert phase_id(reply.assignment_id, "agree") == first.assignment.assignment_id


def test_the_room_for_a_residual_is_needed_before_training_unless_nothing_is_kept():
    layout = Layout.of({"w": (1000,)})
    assert least_kept_bytes(secure_plan(), layout) == 4 * 1000
    assert least_kept_bytes(secure_plan(uplink='feedback = "none"'), layout) == 0
    assert least_kept_bytes(secure_plan(), layout) > least_kept_bytes(plan_of(codec="eden(1)", feedback="auto"), layout)


@pytest.mark.parametrize("bits", [4, 16])
def test_no_step_of_a_masked_update_holds_more_than_four_models(tmp_path, bits):
    """The update that becomes the residual, the residual before it, lanes or a file's bytes, and the masked bytes."""
    clients = SecureClients(tmp_path, secure_plan(f"bits = {bits}"), functions={"model": lambda: nn.Linear(4, 200_000)})
    for measured in (False, True):
        clients.open()
        clients.run(until="share")
        clients.phase(ONE, "masked", clients.requests[ONE])
        if measured:
            tracemalloc.start()  # from here on: the update and the old residual are here, two models
        clients.finish(ONE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2 + peak / (4 * clients.aggregator.first.layout.size) <= 4
