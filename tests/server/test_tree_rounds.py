"""Runs with tree aggregation on a virtual clock: a crash repeats no noise, and loses none that is to be taken off."""

from __future__ import annotations

import itertools
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from tests.server.test_private_rounds import TEXT, require_accounted
from tests.server.test_private_rounds import World as PrivateWorld
from tests.support.backups import restore_and_settle
from tests.support.crashes import LAYOUT, Fate, Killed, Outcome, Whole, killed, undisturbed_once
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored, RoundClosed, RunStatusChanged
from thinwire.core.run_events import PrivacyReserved
from thinwire.core.statedir import AggregatorHome
from thinwire.privacy.noise_plan import noise_plan
from thinwire.privacy.secret_rng import StoredKey
from thinwire.privacy.tree_aggregation import nodes
from thinwire.server.context import RunContext
from thinwire.server.model_store import Versions
from thinwire.server.private_mode import CentralMode
from thinwire.server.run_end import close_undriven, end_abandoned
from thinwire.server.submit import submit
from thinwire.server.tree_noise import KEYS, StoredTree, TreeNoise
from thinwire.simulation import task_report
from thinwire.store import Store

TREE = TEXT.replace("rounds = 3", "rounds = 4") + 'mechanism = "tree"\nrestart_every = 3\nnoise_multiplier = 100.0\n'
PLAN = RunPlan.parse(TREE)
APART = RunPlan.parse(
    TREE.replace("clients = 5", "clients = 2").replace("restart_every = 3", "restart_every = 4\nmin_separation = 2")
)


class World(PrivateWorld):
    """Records the keys that are stored, in the order in which they are."""

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan = PLAN) -> None:
        super().__init__(folder, fate, plan)
        self.keys: dict[tuple[int, int], StoredKey] = {}  # first round of a tree, place -> the latest key

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        write = TreeNoise._write

        def written(noise: TreeNoise, tree: StoredTree) -> None:
            self.keys |= {(tree.first, place): key for place, key in tree.keys.items()}
            write(noise, tree)

        with patch.object(TreeNoise, "_write", written):
            super()._drive(run_id, store, agreed)

    def live(self) -> Outcome:
        made = super().live()
        made.keys = self.keys  # type: ignore[attr-defined]
        return made


class ApartWorld(World):
    def __init__(self, folder: Path, fate: Fate) -> None:
        super().__init__(folder, fate, APART)


undisturbed = undisturbed_once(World)


def require_prefix(made: Outcome, plan: RunPlan = PLAN) -> None:
    """The last model is the sum of clipped updates, of at most 2 clips / clients a round, and the noise of its trees.

    Nodes have a hundred times that noise. So one that is wrong, or counted twice, is noticed.
    """
    keys, noise = made.keys, noise_plan(plan, LAYOUT.model_size, 1)  # type: ignore[attr-defined]
    steps = [event.round for event in made.of(RoundClosed) if event.aggregated]
    found, firsts = np.zeros(LAYOUT.model_size, np.int64), sorted({first for first, _ in keys})
    for first, behind in itertools.zip_longest(firsts, firsts[1:]):
        of_tree = [number for number in steps if first <= number < (behind or number + 1)]
        for place in nodes(of_tree[-1] - first + 1) if of_tree else ():
            one = np.empty(LAYOUT.model_size, np.int32)
            noise.sampler.fill(one, keys[first, place].stream())
            found += one
    clip, clients = plan.privacy.clip or 0.0, plan.cohort.clients
    assert isinstance(clients, int)
    params, _ = Versions(made.folder, LAYOUT, durable=False).read(made.of(ModelStored)[-1])
    left = params - found * (clip / noise.scale / clients)
    assert float(np.linalg.norm(params)) > 20 * clip
    assert float(np.linalg.norm(left)) <= len(steps) * clip + 0.1


def require_erased(made: Outcome) -> None:
    assert not [path.name for path in made.folder.iterdir() if KEYS in path.name]


def test_the_model_is_the_sum_of_clipped_updates_and_the_noise_of_its_prefixes(undisturbed: Whole) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    assert [event.round for event in made.of(RoundClosed)] == [1, 2, 3, 4]
    require_accounted(made, PLAN)
    require_prefix(made)
    require_erased(made)
    assert sorted(made.keys) == [(1, 1), (1, 2), (1, 3), (4, 1)]  # type: ignore[attr-defined]


def test_a_crash_anywhere_spends_each_round_once_and_no_noise_is_lost(undisturbed: Whole, tmp_path: Path) -> None:
    _, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.status == "done", where
        assert [event.round for event in again.of(RoundClosed)] == [1, 2, 3, 4], where
        require_accounted(again, PLAN)
        require_prefix(again)
        require_erased(again)

    killed(World, tmp_path, places, check, writers=True)


def rounds_of_devices(made: Outcome) -> Iterator[list[int]]:
    found = defaultdict[str, list[int]](list)
    for event in made.of(PrivacyReserved):
        for device in event.devices:
            found[device].append(event.round)
    yield from found.values()


def test_a_client_takes_part_again_after_the_separation_and_not_before_also_after_a_crash(tmp_path: Path) -> None:
    fate = Fate()
    whole = ApartWorld(tmp_path / "whole", fate).live()
    assert whole.status == "done"

    def check(made: Outcome, where: str) -> None:
        rounds = list(rounds_of_devices(made))
        assert all(b - a >= 2 for one in rounds for a, b in itertools.pairwise(one)), where
        assert max(map(len, rounds)) == 2, where
        require_prefix(made, APART)

    check(whole, "whole")
    killed(ApartWorld, tmp_path, fate.places, check, slice(0, None, 5))
    (release,) = {event.release for event in whole.of(PrivacyReserved)}
    assert release == noise_plan(APART, LAYOUT.model_size, 1).release.to_json()


def test_a_run_waits_for_clients_that_the_separation_excludes_and_its_status_says_so(tmp_path: Path) -> None:
    plan = RunPlan.parse(
        TREE.replace("[cohort]", "[cohort]\nwait_s = 60").replace("every = 3", "every = 3\nmin_separation = 2")
    )
    made = World(tmp_path, Fate(), plan).live()
    assert len(made.of(RoundClosed)) == 1
    end = made.of(RunStatusChanged)[-1]
    assert end.status == "failed"
    assert "took part in round 1, and [privacy] min_separation = 2 lets it take part again from round 3 on" in end.text
    require_erased(made)


def test_a_simulation_without_another_client_ends_in_place_of_waiting(tmp_path: Path) -> None:
    plan = RunPlan.parse(TREE.replace("every = 3", "every = 3\nmin_separation = 2"))
    with patch("tests.support.crashes.submit", partial(submit, source="sim")):
        made = World(tmp_path, Fate(), plan).live()
    assert len(made.of(RoundClosed)) == 1
    end = made.of(RunStatusChanged)[-1]
    assert (end.status, end.exit_code) == ("failed", 6)
    assert "0 of 5 may take part now" in end.text


class Restored(World):
    """Dies when round 2 is closed; its folder comes back from a backup of that moment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Fate())
        self.file, self.had_keys, self.closed = folder / "backup.tar", False, 0

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        reveal = CentralMode.reveal

        def revealed(mode: CentralMode, running: RunContext, starts: bool = False) -> None:
            reveal(mode, running, starts)
            self.closed += not starts
            if self.closed == 2 and not starts:
                raise Killed

        try:
            with patch.object(CentralMode, "reveal", revealed):
                super()._drive(run_id, store, agreed)
        except Killed:
            self.had_keys = (self.home.run(run_id) / KEYS).exists()
            restore_and_settle(self.home, self.file, store)
            raise


def test_a_backup_has_no_keys_and_a_restored_run_begins_a_new_tree(tmp_path: Path) -> None:
    world = Restored(tmp_path)
    made = world.live()
    assert world.had_keys
    with tarfile.open(world.file) as tar:
        names = tar.getnames()
    assert [name for name in names if name.endswith(".model")]
    assert not [name for name in names if KEYS in name]
    assert made.status == "done"
    assert sorted(first for first, _ in world.keys) == [1, 1, 3, 3]
    require_prefix(made)
    require_erased(made)


def test_the_keys_of_a_run_whose_process_is_gone_are_deleted_when_it_is_ended(tmp_path: Path) -> None:
    home = AggregatorHome.under(tmp_path)
    with Store.open(home.database, durable=False) as store:
        runs = [store.create_run("toy", PLAN, LAYOUT, task_report(PLAN, LAYOUT), source="sim") for _ in range(2)]
        for run_id in runs:
            TreeNoise(home.run(run_id), noise_plan(PLAN, LAYOUT.model_size, 1), 3).draw(1, 0, np.empty(28, np.int32))
        close_undriven(store, runs[0], RunStatusChanged(0.0, "stopped", "by a person", 10))
        end_abandoned(store, home)
    assert [(home.run(run_id) / KEYS).exists() for run_id in runs] == [False, True]
