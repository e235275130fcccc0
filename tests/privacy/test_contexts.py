"""Both ends compute the terms and the context of a round from the plan and the assignment, and every fact counts."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.aggregation.plan_codecs import lattice_of
from thinwire.core.plan import RunPlan, digest_of
from thinwire.core.types import Assignment, SecureWork, Work
from thinwire.privacy import contexts
from thinwire.privacy.contexts import SecureTerms, context_of_assignment, holders_of, terms_of

PLAN = RunPlan.parse('[run]\ntask="t"\nrounds=7\n[local]\nlr=1')
SECURE = PLAN.secure.model_copy(update={"enabled": True, "metrics": {"loss": 10.0, "accuracy": 1.0}, "bits": 8})
PLAN = PLAN.model_copy(update={"secure": SECURE})
WORK = SecureWork(selected=10, window=0, clip=2.0)
GIVEN = Assignment(
    "t-1.3.pi-1", "t-1", "t", "train", "digest", 3, base_version=2, layout_digest="layout", work=Work(5, 32, 0.5),
    deadline_s=60.0, references_from=1, identity="abc", secure=WORK,
)  # fmt: skip


def terms(plan: RunPlan = PLAN, work: SecureWork = WORK) -> SecureTerms:
    lattice = lattice_of(plan, 5000, work, "abc")
    return terms_of(plan, work, lattice.lanes, lattice.width)


def test_the_terms_follow_from_plan_and_work():
    found = terms()
    assert found.scalars == ("weight", "fits", "accuracy", "accuracy/count", "loss", "loss/count")
    assert (found.selected, found.rounds, found.graph_of(10).t) == (10, 7, 6)
    assert found.width == 12


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("post_quantum", True), ("graph", "k-regular"), ("adversary", "malicious"), ("min_survivors", 5),
        ("max_corrupt", 0.3), ("max_dropout", 0.2),
    ],
)  # fmt: skip
def test_each_key_of_the_plan_that_decides_who_learns_what_is_in_the_terms(key: str, value: Any):
    usual = getattr(terms(), key)
    changed = PLAN.model_copy(update={"secure": SECURE.model_copy(update={key: value})})
    assert getattr(terms(changed), key) == value != usual
    assert terms(changed).bound(bytes(32)) != terms().bound(bytes(32))


@pytest.mark.parametrize(
    "changed",
    [
        {"run": "t-2"}, {"identity": "abd"}, {"round": 4}, {"base_version": 3}, {"layout_digest": "other"},
        {"references_from": 0}, {"deadline_s": 61.0}, {"plan": "other"}, {"work": Work(6, 32, 0.5)},
        {"work": Work(5, 16, 0.5)}, {"work": Work(5, 32, 1e-30)}, {"secure": replace(WORK, selected=11)},
        {"secure": replace(WORK, window=1)}, {"secure": replace(WORK, clip=2.5)},
        {"task": "other"}, {"codec": "topk"}, {"is_follow_up": True}, {"evaluates": False},
    ],
)  # fmt: skip
def test_a_client_that_was_told_something_else_has_another_context(changed: dict[str, Any]):
    model = b"m" * 32
    assert context_of_assignment(GIVEN, model, terms()) != context_of_assignment(
        replace(GIVEN, **changed), model, terms()
    )


def test_another_model_plan_or_suite_gives_another_context():
    other = PLAN.model_copy(update={"run": PLAN.run.model_copy(update={"rounds": 8})})
    found = {
        context_of_assignment(replace(GIVEN, plan=plan.to_json()), model, made)
        for plan in (PLAN, other)
        for model in (b"m" * 32, b"n" * 32)
        for made in (terms(), replace(terms(), post_quantum=True), replace(terms(), scalars=("weight",)))
    }
    assert len(found) == 12


def test_what_only_one_client_is_told_is_not_in_the_context():
    own = replace(GIVEN, assignment_id="t-1.3.pi-2", protocol=2, outcomes=(), parts=())
    assert context_of_assignment(own, b"m" * 32, terms()) == context_of_assignment(GIVEN, b"m" * 32, terms())


def test_clients_of_two_versions_are_in_one_round():
    """A plan with a key that only the newer one knows is sent to both; one client has its digest alone."""
    sent = PLAN.to_json()
    del sent["local"]["weight_decay"]  # as by a version that did not know it yet
    by_digest, whole = (replace(GIVEN, plan=plan) for plan in (digest_of(sent), sent))
    assert RunPlan.from_json(sent).digest != digest_of(sent)
    assert context_of_assignment(by_digest, b"m" * 32, terms()) == context_of_assignment(whole, b"m" * 32, terms())
    ours, theirs = (lattice_of(plan, 5000, WORK, "abc").walk.indices(0) for plan in (PLAN, RunPlan.from_json(sent)))
    assert np.array_equal(ours, theirs)


def test_the_support_of_a_run_depends_on_its_seed_and_identity_alone():
    plan = PLAN.model_copy(update={"secure": SECURE.model_copy(update={"support": 0.1})})
    first, second, other = (lattice_of(plan, 50_000, WORK, identity).walk.indices(0) for identity in ("a", "a", "b"))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    seeded = plan.model_copy(update={"run": PLAN.run.model_copy(update={"seed": 1})})
    assert not np.array_equal(first, lattice_of(seeded, 50_000, WORK, "a").walk.indices(0)), (
        "simulations have no identity"
    )


def test_the_holders_of_a_complete_graph_take_no_quadratic_memory():
    found = holders_of(SecureTerms(4000, 0.1, 0.1, 1, 8, graph="complete").graph_of(4000), bytes(32))
    assert found[1] == list(range(1, 4001))
    assert len({id(row) for row in found.values()}) == 1


def test_a_lattice_with_another_step_or_other_noise_has_another_context():
    grids = ("", "215.0 40.0 0 skellam", "215.0 41.0 0 skellam", "216.0 40.0 0 skellam")
    assert len({replace(terms(), grid=grid).bound(bytes(32)) for grid in grids}) == len(grids)


def test_no_code_of_a_secure_round_reads_a_clock() -> None:
    """So a device whose clock is wrong computes the same masks (docs/explain/secure-aggregation.md, Clocks)."""
    root = Path(contexts.__file__).parents[1]
    files = [
        *sorted((root / "privacy").glob("*.py")),
        root / "client" / "secure.py",
        root / "aggregation" / "lattice.py",
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"time", "datetime", "thinwire.core.clock"} & set(names), file.name
