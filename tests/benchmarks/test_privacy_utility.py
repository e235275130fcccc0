"""`benchmarks.privacy_utility` trains as a client does, and adds the noise that each mechanism claims."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import many_files, privacy_utility
from benchmarks.many_clients import PIXELS, SIZE, accuracy, digits_of, first_model, updates_of
from benchmarks.many_files import CONTEXT, HIDDEN, WIDTH, WINDOW, code_of
from benchmarks.privacy_utility import (
    AMPLIFIED,
    CENTRAL,
    DISTRIBUTED,
    FLOWER,
    NONE,
    PRESETS,
    SAMPLING_RATE,
    SPARSE,
    TASKS,
    Preset,
    central,
    distributed,
    figures,
    flower,
    gaussian_multiplier,
    measure,
    plan_of,
    sample,
)
from examples.code_lm.task import SYMBOLS
from thinwire.aggregation import codecs
from thinwire.privacy.secret_rng import SystemRng

CLIENTS, EPSILON = 50, 8.0


def test_all_clients_at_once_learn_what_one_learns_with_torch() -> None:
    data, start = digits_of(3, clients=4, examples=20), first_model(3)
    found = updates_of(start, data, steps=5, rate=0.3)
    for client in range(4):
        module = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 10))
        nn.utils.vector_to_parameters(torch.from_numpy(start.copy()), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), 0.3)
        for _ in range(5):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(module(data.pixels[client]), data.digits[client]))
            optimizer.step()
        end = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
        assert found[client] == pytest.approx(end - start, abs=1e-5)
        right = (module(data.measured_pixels).argmax(1) == data.measured_digits).float().mean()
        assert accuracy(start + found[client], data) == pytest.approx(float(right), abs=1e-6)
    assert updates_of(start, data.of([]), steps=5, rate=0.3).shape == (0, len(start)), "a sample may be empty"


def test_each_client_has_twenty_examples_and_no_image_is_both_learned_and_measured() -> None:
    data = digits_of(1)
    assert data.digits.shape == (200, 24)
    learned = {row.tobytes() for row in data.pixels.reshape(-1, PIXELS).numpy()}
    assert len(learned) == 200 * 24
    assert not learned & {row.tobytes() for row in data.measured_pixels.numpy()}
    with pytest.raises(ValueError, match="examples each"):
        digits_of(1, clients=200, examples=40)


@pytest.mark.parametrize("arm", [CENTRAL, DISTRIBUTED, SPARSE, FLOWER])
def test_the_noise_of_a_mean_is_what_the_arm_claims(arm: str) -> None:
    plan, none = plan_of(arm, EPSILON, CLIENTS), np.full((CLIENTS, SIZE), 1e-9, np.float32)
    exact, more = gaussian_multiplier(plan, SIZE), 1.0
    if arm == FLOWER:
        step, multiplier = flower(plan, CLIENTS, exact, 1), exact
    else:
        step, noise = (central if arm == CENTRAL else distributed)(plan, CLIENTS, SIZE)
        multiplier = noise.noise_multiplier
        assert noise.epsilon(plan.privacy.delta or 0.0) == pytest.approx(EPSILON, rel=1e-3)
        assert exact <= multiplier <= 1.06 * exact, "rounding costs a few percent of the noise, and never lowers it"
        if arm != CENTRAL:
            more = math.sqrt(CLIENTS / noise.release.parties)
    moved = step(np.zeros(SIZE, np.float32), none, 0)
    moved = moved[moved != 0]
    assert moved.size == pytest.approx(SIZE / 4 if arm == SPARSE else SIZE, rel=0.02)
    spread = math.sqrt(1 / (2 * moved.size))
    claimed = multiplier * more * (plan.privacy.clip or 0.0) * plan.server.lr / CLIENTS
    assert moved.std() == pytest.approx(claimed, rel=5 * spread)


def test_a_sampled_round_has_the_noise_of_an_amplified_claim_for_the_sample_that_is_expected() -> None:
    plan = plan_of(AMPLIFIED, EPSILON, CLIENTS)
    assert plan.check(codecs) == []
    step, noise = central(plan, CLIENTS, SIZE)
    assert noise.epsilon(plan.privacy.delta or 0.0) == pytest.approx(EPSILON, rel=1e-3)
    assert noise.noise_multiplier < gaussian_multiplier(plan, SIZE) / 2, "without amplification it needs twice as much"
    moved = step(np.zeros(SIZE, np.float32), np.zeros((0, SIZE), np.float32), 0)
    claimed = noise.noise_multiplier * (plan.privacy.clip or 0.0) / (SAMPLING_RATE * CLIENTS)
    assert moved.std() == pytest.approx(claimed, rel=0.05), "an empty sample is released as noise"
    sizes = [len(sample(1000, SystemRng())) for _ in range(20)]
    assert np.mean(sizes) == pytest.approx(250, abs=5 * math.sqrt(1000 * 0.25 * 0.75 / 20))
    data = digits_of(3, clients=4, examples=20)
    found = updates_of(first_model(3), data, steps=2, rate=0.3)
    assert np.allclose(updates_of(first_model(3), data.of([2, 0]), steps=2, rate=0.3), found[[2, 0]], atol=1e-6)


def test_figures_are_of_the_rows_and_gaps_of_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(privacy_utility.DIGITS, work={EPSILON: (2, 0.8, 4)})  # rounds: none of its accuracies is read
    monkeypatch.setattr(privacy_utility, "DIGITS", short)
    monkeypatch.setitem(TASKS, short.name, short)
    rows, _ = measure(Preset((EPSILON,), seeds=1, draws=2, clients=20), None)  # type: ignore[arg-type]  # no folder is used
    assert [row["arm"] for row in rows] == [NONE, *[CENTRAL, AMPLIFIED, DISTRIBUTED, FLOWER, SPARSE] * 2]
    for place, row in enumerate(rows):
        row["accuracy"] = 0.5 + place / 100
    again = [{**row, "seed": 2, "accuracy": row["accuracy"] + 0.1 * (row["arm"] == CENTRAL)} for row in rows]
    found = figures([*rows, *again])
    assert found["accuracy central, 8"] == pytest.approx(0.5 + 0.035 + 0.05)
    assert found["distributed_gap"] == found["distributed_gap 8"] == pytest.approx(-0.02 + 0.05)
    assert found["distributed_gap_error 8"] == pytest.approx(0.05)
    assert found["peer_gap"] == pytest.approx(0.03 - 0.05)
    assert found["support_gap"] == pytest.approx(-0.02)
    assert found["amplification_gain"] == pytest.approx(0.01 - 0.05)


def test_each_epsilon_of_a_preset_has_its_work() -> None:
    assert all(epsilon in TASKS[preset.task].work for preset in PRESETS.values() for epsilon in preset.epsilons)


def test_all_files_at_once_learn_what_one_learns_with_torch() -> None:
    data, start = code_of(3, clients=3, examples=20), many_files.first_model(3)
    assert data.windows.shape == (3, 20, WINDOW)
    found = many_files.updates_of(start, data, steps=3, rate=2.0)
    for client in range(3):
        layers = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.Linear(HIDDEN, SYMBOLS)
        module = nn.ModuleList(layers)
        nn.utils.vector_to_parameters(torch.from_numpy(start.copy()), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), 2.0)

        def logits(windows: torch.Tensor, layers: tuple[nn.Module, ...] = layers) -> torch.Tensor:
            before = torch.stack([windows[:, at : at + CONTEXT] for at in range(WINDOW - CONTEXT)], 1)
            vectors, first, second = layers
            found: torch.Tensor = second(first(vectors(before).flatten(2)).tanh())
            return found

        for _ in range(3):
            optimizer.zero_grad()
            lost = nn.functional.cross_entropy(
                logits(data.windows[client]).flatten(0, 1), data.windows[client, :, CONTEXT:].flatten()
            )
            torch.autograd.backward(lost)
            optimizer.step()
        end = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
        assert found[client] == pytest.approx(end - start, abs=1e-5)
        right = (logits(data.measured).argmax(2) == data.measured[:, CONTEXT:]).float().mean()
        assert many_files.accuracy(start + found[client], data) == pytest.approx(float(right), abs=1e-6)
    assert many_files.updates_of(start, data.of([]), steps=3, rate=2.0).shape == (0, len(start))


def test_each_client_has_twenty_windows_of_a_file_and_others_are_measured() -> None:
    data = code_of(1)
    assert data.windows.shape == (200, 24, WINDOW)
    assert data.measured.shape == (200 * many_files.MEASURED, WINDOW)
    files = many_files.long_files()
    assert len({file.tobytes() for file in files}) == len(files) >= 200
    with pytest.raises(ValueError, match="with a file each"):
        code_of(1, clients=10_000)
