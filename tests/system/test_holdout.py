"""Evaluation on the operator's data with real processes: the evaluator is killed and started again."""

from __future__ import annotations

from tests.support.processes import EXAMPLE, Site, kill
from thinwire.core.events import Evaluated, UpdateAccepted

TASK = ("--task", f"digits={EXAMPLE / 'task.py'}")
ROUNDS = 3


def test_an_evaluator_that_is_killed_leaves_no_version_without_metrics(site: Site) -> None:
    """With `patience` each round waits for the newest version, so the run waits until the evaluator is back."""
    site.start_aggregator()
    evaluator = site.start("aggregator", "evaluate", *TASK)
    for part, name in enumerate(("pi-a", "pi-b")):
        site.start_client(name, part, 2)
    run_id = site.begin(
        f"run.rounds={ROUNDS}", "run.evaluate='holdout'", "run.patience=5", "cohort.wait_for=2", "local.steps=5",
    )  # fmt: skip
    site.until_event(run_id, Evaluated)
    kill(evaluator)
    second = site.start("aggregator", "evaluate", *TASK)
    row = site.until_done(run_id)
    assert row.status == "done", site.said()
    assert f"{run_id} version {ROUNDS}: " in site.log_of(second)
    found = [event for event in site.events(run_id) if isinstance(event, Evaluated)]
    assert [(event.version, event.clients) for event in found] == [(version, 0) for version in range(ROUNDS + 1)]
    assert row.metrics == found[-1].metrics
    assert row.metrics["accuracy"] > found[0].metrics["accuracy"]
    updates = [event for event in site.events(run_id) if isinstance(event, UpdateAccepted)]
    assert len(updates) == 2 * ROUNDS
    assert not any(name.startswith("eval/") for event in updates for name in event.header["metrics"])
