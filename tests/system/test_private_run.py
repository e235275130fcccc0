"""Client processes in a run with central differential privacy whose aggregator is killed after its first release."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Site, kill
from thinwire.core.events import ModelStored, RoundOpened
from thinwire.core.run_events import PrivacyCommitted
from thinwire.reports.secure_rounds import PRIVATE
from thinwire.server.tree_noise import KEYS
from thinwire.web.run_queries import Reader

CLIENTS, ROUNDS = 3, 3
PRIVATE_PLAN = (
    f"run.rounds={ROUNDS}", "run.evaluate='off'", "run.metric='loss'", f"cohort.wait_for={CLIENTS}",
    f"cohort.min_updates={CLIENTS}", "cohort.late='drop'", "cohort.deadline_s=60", "local.buffers='local'",
    "run.keep='all'", "local.steps=10", "uplink.codec='identity'", "privacy.mode='central'", "privacy.clip=0.5",
    "privacy.noise_multiplier=1.0", "privacy.delta=1e-3",
)  # fmt: skip


TREE = ("privacy.mechanism='tree'", f"cohort.clients={CLIENTS}")


@pytest.mark.parametrize("more", [(), TREE], ids=["own", "tree"])
def test_a_killed_aggregator_releases_the_same_bytes_again_and_spends_nothing_twice(
    site: Site, more: tuple[str, ...]
) -> None:
    site.start_aggregator()
    for part in range(CLIENTS):
        site.start_client(f"pi-{part}", part, CLIENTS, step_s=0.03)  # so that no round is over before the kill
    run_id = site.begin(*PRIVATE_PLAN, *more)
    site.until_event(run_id, PrivacyCommitted, round=1)
    assert site.aggregator is not None
    kill(site.aggregator)
    assert site.run(run_id).status == "running"
    folder = site.home / "aggregator" / "runs" / run_id
    (released,) = folder.glob("v000001.model*")  # killed before it has its own name, or after
    before = released.read_bytes()
    assert [path.stat().st_mode & 0o777 for path in folder.glob(KEYS)] == ([0o600] if more else [])
    site.start_aggregator()
    assert site.until_done(run_id).status == "done", site.said()

    events = site.events(run_id)
    stored = {e.version: e.digest for e in events if isinstance(e, ModelStored)}
    assert (folder / "v000001.model").read_bytes() == before
    assert _hidden(folder) == []
    with site.store() as store:
        spent, page = store.privacy.rows(), Reader(store)
        assert [(row.round, row.state, row.count) for row in spent] == [(n, "committed", 1) for n in (1, 2, 3)]
        assert [row.digest for row in spent] == [stored[n] for n in (1, 2, 3)]
        opened = [tuple(sorted(e.assignments)) for e in events if isinstance(e, RoundOpened)]
        assert [row.devices for row in spent] == opened
        assert store.privacy.spent_by_device("digits").keys() == {f"pi-{part}" for part in range(CLIENTS)}
        shown, (updates, _) = page.run(run_id), page.updates(run_id, None)
    assert (shown.metrics, [client.examples for client in shown.clients]) == ({}, [None] * CLIENTS)
    assert {client.not_known for client in shown.clients} == {PRIVATE}
    assert len(updates) == sum(map(len, opened))
    for one in updates:
        assert (one.examples, one.steps, one.norm, one.residual_norm, one.metrics) == (None, None, None, None, {})
        assert one.not_known == PRIVATE


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "hidden" in path.name or path.name.startswith(".")]
