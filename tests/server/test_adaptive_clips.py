"""Adaptive clips follow a noised count, also after a crash; clips of single layers bound each tensor."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_distributed_rounds import TEXT as DISTRIBUTED
from tests.server.test_distributed_rounds import World as DistributedWorld
from tests.server.test_private_rounds import TEXT, World, change, require_accounted
from tests.support.crashes import LAYOUT, Fate, Outcome, Whole, killed, undisturbed_once
from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation.private_lattice import PrivateSum, clip_layers
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored, RoundClosed, RoundOpened
from thinwire.core.run_events import PrivacyCommitted, SumUnmasked
from thinwire.core.types import Assignment
from thinwire.privacy.noise_plan import noise_plan
from thinwire.server.model_store import Versions

KEPT = TEXT.replace('evaluate = "off"', 'evaluate = "off"\nkeep = "all"')
ADAPTIVE = KEPT.replace("rounds = 3", "rounds = 4") + "noise_multiplier = 0.05\nadaptive = true"
PLAN = RunPlan.parse(ADAPTIVE)
EVERY = 2  # of them is tried


class Adaptive(World):
    """Five devices of a run whose clip follows the norms."""

    def __init__(self, folder: Path, fate: Fate) -> None:
        super().__init__(folder, fate, PLAN)


undisturbed = undisturbed_once(Adaptive)


def clips(made: Outcome) -> list[float | None]:
    return [event.next_clip for event in made.of(PrivacyCommitted)]


def test_a_clip_that_is_too_small_grows_by_the_noised_count(undisturbed: Whole) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    found, clip = clips(made), 2.0
    for following in found:
        assert following is not None
        assert abs(math.log(following / clip)) <= 0.1 + 1e-9
        clip = following
    assert clip > 2.0, "all updates of this run are longer than the first clip"
    require_accounted(made, PLAN)


def test_a_crash_anywhere_goes_on_with_the_clip_of_the_journal(undisturbed: Whole, tmp_path: Path) -> None:
    _, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.status == "done", where
        assert len(clips(again)) == 4, where
        require_accounted(again, PLAN)

    killed(Adaptive, tmp_path, places, check, slice(0, None, EVERY))


def test_the_step_of_a_round_is_the_mean_of_updates_with_the_clip_of_that_round(undisturbed: Whole) -> None:
    made, _ = undisturbed
    versions, clip = Versions(made.folder, LAYOUT, durable=False), 2.0
    models = [versions.read(event)[0] for event in made.of(ModelStored)]
    for closed, selected, following in zip(made.of(RoundClosed), made.of(RoundOpened), clips(made), strict=True):
        assignment, mean = cast(Assignment, SimpleNamespace(round=closed.round)), np.zeros(LAYOUT.size)
        for update in (change(update_id.split("/")[1], assignment) for update_id in closed.aggregated):
            mean += update * clip / max(float(np.linalg.norm(update)), clip) / len(selected.assignments)
        noise = 0.06 * clip / len(selected.assignments) * math.sqrt(LAYOUT.size)
        moved = models[closed.round] - models[closed.round - 1]
        assert np.linalg.norm(moved - mean) <= 2 * noise, closed.round
        clip = following or clip


def test_the_count_is_noised_and_centred() -> None:
    noise = noise_plan(PLAN, 1000, 1)
    made = PrivateSum(1000, 2.0, noise.scale, 5, ScriptedRng(1), noise.count)
    for length in (1.0, 1.5, 9.0):
        x = np.zeros(1000, np.float32)
        x[0] = length
        made.add(x)
    made.release(lambda out: out.fill(0))
    assert made.share == pytest.approx(0.5 + 1 / (2 * 5)), "two within the clip, one beyond, two not there"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(0.01, 100), st.integers(0, 100))
def test_each_layer_is_scaled_to_its_part_of_the_clip(norms: list[float], clip: float, seed: int) -> None:
    rng, x, spans = np.random.default_rng(seed), np.zeros(7 * len(norms), np.float32), list[slice]()
    for i, norm in enumerate(norms):
        span = slice(7 * i, 7 * i + 7)
        part = rng.standard_normal(7)
        x[span] = part / np.linalg.norm(part) * norm
        spans.append(span)
    before = x.copy()
    clip_layers(x, spans, clip)
    most = clip / math.sqrt(len(norms))
    for span, norm in zip(spans, norms, strict=True):
        assert np.linalg.norm(x[span]) == pytest.approx(min(norm, most), rel=1e-3, abs=1e-9)
        assert norm > most * 1.001 or (norm < most * 1.001 and np.allclose(x[span], before[span], rtol=1e-2))
    assert np.linalg.norm(x) <= clip * (1 + 1e-5)


class PerLayer(World):
    """One round in which the clip is shared by the tensors."""

    def __init__(self, folder: Path, fate: Fate) -> None:
        plan = KEPT.replace("rounds = 3", "rounds = 1") + 'noise_multiplier = 0.01\nclipping = "per-layer"'
        super().__init__(folder, fate, RunPlan.parse(plan))


def test_a_run_with_clips_of_layers_moves_each_tensor_by_at_most_its_share(tmp_path: Path) -> None:
    made = PerLayer(tmp_path, Fate()).live()
    versions = Versions(made.folder, LAYOUT, durable=False)
    moved = versions.read(made.of(ModelStored)[-1])[0] - versions.read(made.of(ModelStored)[0])[0]
    most = 2.0 / math.sqrt(len(LAYOUT.trained))
    for span in LAYOUT.model_tensors:
        noise = 0.01 * 2.0 / 5 * math.sqrt(span.stop - span.start)
        assert np.linalg.norm(moved[span]) <= most + 6 * noise


class DistributedAdaptive(DistributedWorld):
    """Five devices that add their noise to the count too."""

    rounds = RunPlan.parse(DISTRIBUTED.replace("noise_multiplier = 1.0", "noise_multiplier = 0.05\nadaptive = true"))


def test_the_clip_of_a_distributed_run_follows_a_count_that_only_its_sum_tells(tmp_path: Path) -> None:
    made = DistributedAdaptive(tmp_path, Fate()).live()
    assert made.status == "done"
    clip = 2.0
    for event in made.of(SumUnmasked):
        assert event.clip == clip
        assert abs(math.log(event.next_clip / clip)) <= 0.1 + 1e-9
        clip = event.next_clip
    assert clip != 2.0
    assert clips(made) == [None] * 3
