"""Training is plain torch, no more: the same bits as a loop written by hand over the same batches."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.support.small_task import cross_entropy, examples, linear, local_of, normed, plan_of, task_of
from thinwire.client.task_check import rehearse
from thinwire.client.train import data as batches
from thinwire.client.train import module as tensors
from thinwire.client.train.errors import BadTask, NotFinite
from thinwire.client.train.layout import Key, derive, seed63
from thinwire.client.train.protocol import ClientInfo, Local, Split, Work
from thinwire.client.train.schedule import Normaliser, Schedule
from thinwire.client.train.trainer import LossMeter, TorchTrainer, freeze_statistics
from thinwire.core.errors import TaskError

KEY = Key(7)


def fresh(model=linear):
    torch.manual_seed(0)
    return model()


def bits(module: nn.Module) -> np.ndarray:
    return tensors.read(module, tensors.layout_of(module))


def trained(text: str = "", work: Work = Work(5, 8), model=linear, data=None, key: Key = KEY, **functions):
    module = fresh(model)
    trainer = TorchTrainer(task_of(model, **functions), local_of(plan_of(text)))
    return module, trainer.train(module, examples() if data is None else data, work, key)


@pytest.mark.parametrize(
    ("text", "optimizer", "clip"),
    [
        ("", lambda p: torch.optim.SGD(p, 0.1), None),
        ("momentum = 0.9\nweight_decay = 0.01", lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01), None),
        ("clip_grad = 0.05", lambda p: torch.optim.SGD(p, 0.1), 0.05),
        ('optimizer = "adam"', lambda p: torch.optim.Adam(p, 0.1), None),
        ('optimizer = "adamw"\nweight_decay = 0.1', lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1), None),
    ],
)
def test_training_gives_the_bits_of_a_loop_by_hand(text, optimizer, clip):
    module, done = trained(text)
    by_hand = fresh()
    steps = optimizer(by_hand.parameters())
    drawn = batches.shuffled(examples(), 8, derive(KEY, "data"))
    for _ in range(5):
        steps.zero_grad()
        cross_entropy(by_hand, next(drawn)).backward()
        if clip:
            nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
        steps.step()
    assert bits(module).tobytes() == bits(by_hand).tobytes()
    assert (done.steps, done.examples) == (5, 24)


def test_the_proximal_term_is_a_part_of_the_loss():
    module, _ = trained("prox = 0.3\nmomentum = 0.5")
    by_hand, begun = fresh(), [p.detach().clone() for p in fresh().parameters()]
    steps = torch.optim.SGD(by_hand.parameters(), 0.1, 0.5)
    drawn = batches.shuffled(examples(), 8, derive(KEY, "data"))
    for _ in range(5):
        steps.zero_grad()
        far = sum(((p - b) ** 2).sum() for p, b in zip(by_hand.parameters(), begun, strict=True))
        (cross_entropy(by_hand, next(drawn)) + 0.3 / 2 * far).backward()
        steps.step()
    np.testing.assert_allclose(bits(module), bits(by_hand), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_schedule_moves_the_learning_rate_at_every_step(optimizer):
    schedule = Schedule("cosine", warmup=0.25, end=0.1, begin=0.2, until=0.4)
    module = fresh()
    trainer = TorchTrainer(task_of(linear), local_of(plan_of(f'optimizer = "{optimizer}"')), schedule=schedule)
    done = trainer.train(module, examples(), Work(5, 8), KEY)
    by_hand = fresh()
    steps = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam)(by_hand.parameters(), 0.1)
    drawn = batches.shuffled(examples(), 8, derive(KEY, "data"))
    factors = [schedule.factor(step, 5) for step in range(5)]
    for factor in factors:
        steps.param_groups[0]["lr"] = 0.1 * factor
        steps.zero_grad()
        cross_entropy(by_hand, next(drawn)).backward()
        steps.step()
    assert bits(module).tobytes() == bits(by_hand).tobytes()
    assert done.a == pytest.approx(sum(factors))


def test_accumulated_batches_make_the_step_of_one_large_batch():
    small, done = trained("accumulate = 3", Work(1, 8))
    large, _ = trained("", Work(1, 24))
    np.testing.assert_allclose(bits(small), bits(large), rtol=1e-6)
    assert done.steps == 1


@given(size=st.integers(1, 50), batch=st.integers(1, 60), drawn=st.integers(1, 200))
def test_steps_go_through_one_permutation_after_the_other_however_many_are_drawn_at_once(size, batch, drawn):
    data = TensorDataset(torch.arange(size))
    with mock.patch.object(batches, "DRAWN", drawn):
        found = [one for (one,) in itertools.islice(batches.shuffled(data, batch, KEY), 20)]
    assert {len(one) for one in found} == {min(batch, size)}
    flat = torch.cat(found).tolist()
    for epoch, start in enumerate(range(0, len(flat), size)):
        one_by_one = torch.Generator().manual_seed(seed63(derive(KEY, "order", epoch)))
        expected = torch.randperm(size, generator=one_by_one).tolist()
        assert flat[start : start + size] == expected[: len(flat) - start]


@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.integers(1, 1000)), max_size=600))
def test_losses_are_added_up_as_if_one_at_a_time(batches_seen):
    losses, summed = LossMeter(), torch.zeros(())
    for loss, count in batches_seen:
        losses.add(torch.tensor(loss), count)
        summed += torch.tensor(loss) * count
    total, seen = losses.total()
    assert np.float64(total).tobytes() == np.float64(float(summed)).tobytes()
    assert seen == sum(count for _, count in batches_seen)


def test_epochs_see_each_example_once_a_pass():
    seen: list[int] = []

    def loss(model, batch):
        seen.extend(batch[0][:, 0].tolist())
        return cross_entropy(model, batch)

    _, done = trained("epochs = 2", Work(0, 10), loss=loss)
    assert done.steps == 2 * 3
    assert sorted(seen) == sorted(examples().tensors[0][:, 0].tolist() * 2)


FEW = TensorDataset(*(column[:5] for column in examples().tensors))


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("data", [DataLoader(FEW, batch_size=8, drop_last=True), Nothing()])
def test_epochs_over_data_without_a_batch_are_an_error_and_not_endless(data):
    with pytest.raises(BadTask, match="without a batch"):
        trained("epochs = 1", Work(0, 8), data=data)


def test_the_same_key_gives_the_same_bits_even_with_dropout_and_another_key_does_not():
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    first, _ = trained(model=dropping)
    torch.rand(17)  # whatever was drawn in between
    second, _ = trained(model=dropping)
    third, _ = trained(model=dropping, key=Key(8))
    assert bits(first).tobytes() == bits(second).tobytes() != bits(third).tobytes()


def test_training_leaves_the_generators_of_the_process_as_they_were():
    module = fresh()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    TorchTrainer(task_of(), local_of(plan_of())).train(module, examples(), Work(2, 8), KEY)
    assert torch.equal(torch.rand(3), expected)


def test_a_loader_of_the_task_keeps_its_own_batches_and_its_order_depends_on_the_key():
    sizes: list[int] = []

    def loss(model, batch):
        sizes.append(len(batch[0]))
        return cross_entropy(model, batch)

    def loader():
        return DataLoader(examples(), batch_size=6, shuffle=True)

    first, second = fresh(), fresh()
    for module in (first, second):
        TorchTrainer(task_of(loss=loss), Local(lr=0.1)).train(module, loader(), Work(6, 32), KEY)
    assert set(sizes) == {6}
    assert bits(first).tobytes() == bits(second).tobytes()


def of_weights(generator: torch.Generator) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * 24, 24, generator=generator)


@pytest.mark.parametrize(
    "loader",
    [
        lambda data, own: DataLoader(data, 5, sampler=of_weights(own)),
        lambda data, own: DataLoader(data, batch_sampler=BatchSampler(of_weights(own), 5, drop_last=False)),
        lambda data, own: DataLoader(data, 5, shuffle=True, generator=own),
    ],
    ids=["sampler", "batch sampler", "loader"],
)
@pytest.mark.parametrize("work", [Work(0, 32), Work(7, 32)], ids=["passes", "steps"])
def test_a_generator_of_the_tasks_own_goes_by_the_key_too(loader, work):
    def once(key):
        module = fresh()
        TorchTrainer(task_of(), Local(lr=0.1, epochs=2)).train(module, data, work, key)
        return bits(module)

    data = loader(examples(), torch.Generator().manual_seed(1))
    first, again, other = once(KEY), once(KEY), once(Key(8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(examples())


@pytest.mark.parametrize("data", [Endless(), DataLoader(Endless(), 8)], ids=["data set", "loader"])
@pytest.mark.parametrize("epochs", [0.5, 1.5])
def test_a_part_of_a_pass_over_data_without_a_length_is_refused(data, epochs):
    with pytest.raises(BadTask, match=f"epochs = {epochs}, and data.client. gave data without a length"):
        trained(f"epochs = {epochs}", Work(0, 8), data=data)
    plan = plan_of(f"epochs = {epochs}")
    with pytest.raises(TaskError, match="without a length"):
        rehearse(task_of(data=lambda client: Split(data, examples())), ClientInfo(), plan)
    assert trained("epochs = 2.0", Work(0, 8), data=data)[1].steps == 6


def test_a_batch_that_the_plan_requests_and_the_loader_of_the_task_does_not_have_is_refused():
    with pytest.raises(BadTask, match=r"batch = 8, and data\(client\) gave a DataLoader with batch_size 6"):
        trained("", Work(6, 8), data=DataLoader(examples(), batch_size=6))
    trained("", Work(6, 8), data=DataLoader(examples(), batch_size=8))


def test_a_task_may_bring_its_optimizer_or_its_whole_loop():
    def optimizer(params, local):
        return torch.optim.RMSprop(params, local.lr)

    _, own = trained('optimizer = "task"', optimizer=optimizer)
    assert own.a == own.steps == 5
    with pytest.raises(BadTask, match="no optimizer"):
        trained('optimizer = "task"')

    def train(model, data, context):
        with torch.no_grad():
            model.bias += 1
        return len(data)

    module, whole = trained(train=train)
    assert (whole.examples, whole.steps, whole.a) == (24, 0, 1.0)
    assert torch.equal(torch.as_tensor(module.bias), torch.as_tensor(fresh().bias) + 1)


@pytest.mark.parametrize(
    "wrong", [lambda m, b: torch.ones(()), lambda m, b: m(b[0]), lambda m, b: 1.0, lambda m, b: None]
)
def test_a_loss_that_cannot_be_trained_on_is_the_tasks_error(wrong):
    with pytest.raises(BadTask):
        trained(loss=wrong)


def test_a_loss_that_becomes_nan_is_refused():
    with pytest.raises(NotFinite, match="loss"):
        trained(loss=lambda model, batch: cross_entropy(model, batch) * torch.nan)


def test_frozen_statistics_are_used_in_training_and_do_not_move():
    module, _ = trained('buffers = "frozen"', model=normed)
    assert torch.equal(module[1].running_mean, torch.zeros(5))
    moving, _ = trained(model=normed)
    assert not torch.equal(moving[1].running_mean, torch.zeros(5))


@given(momentum=st.floats(0, 0.99), steps=st.integers(1, 200))
def test_the_normaliser_is_its_closed_form(momentum, steps):
    counted = Normaliser(momentum)
    for _ in range(steps):
        counted.step()
    m, t = momentum, steps
    assert counted.a == pytest.approx((t - m * (1 - m**t) / (1 - m)) / (1 - m))


@given(
    momentum=st.floats(0, 0.95),
    mu=st.floats(0, 2),
    factors=st.lists(st.floats(0.01, 1), min_size=1, max_size=30),
)
def test_a_constant_gradient_moves_the_model_by_lr_times_a(momentum, mu, factors):
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer, counted = torch.optim.SGD([weight], 0.1, momentum), Normaliser(momentum, mu, lr=0.1)
    for factor in factors:
        weight.grad = 1 + mu * weight.detach()
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        optimizer.step()
        counted.step(0.1 * factor)
    assert -weight.item() == pytest.approx(0.1 * counted.a)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_clipped_gradient_and_a_control_variate_move_the_model_by_lr_times_a_beside_prox(momentum):
    """The clip is of the loss's gradient alone, and the proximal term pulls what only the control variate moves."""
    task = task_of(linear, loss=lambda model, batch: 100 * model.bias.sum())  # it does not reach the weight
    local = local_of(plan_of(f"clip_grad = 1.0\nprox = 2.0\nmomentum = {momentum}"))
    module, size = fresh(), bits(fresh()).size
    shift = np.full(size, 0.5, np.float32)
    done = TorchTrainer(task, local, shift=shift).train(module, examples(), Work(5, 8), KEY)
    gradients = [
        torch.full_like(p, p.numel() ** -0.5 if name == "bias" else 0) for name, p in fresh().named_parameters()
    ]
    for before, after, gradient in zip(fresh().parameters(), module.parameters(), gradients, strict=True):
        np.testing.assert_allclose((after - before).detach(), (gradient + 0.5) * -0.1 * done.a, rtol=1e-4)


def test_statistics_are_held_in_the_layers_that_have_them_and_nowhere_else() -> None:
    normed, plain, dropped = nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout()
    freeze_statistics(nn.Sequential(normed, plain, dropped).train())
    assert (normed.training, plain.training, dropped.training) == (False, True, True)


def test_a_test_split_without_examples_counts_as_none():
    """One batch of nothing would fail each assignment that evaluates."""
    assert batches.as_split(Split(examples(), [])).test is None
    assert batches.as_split(Split(examples(), FEW)).test is FEW
