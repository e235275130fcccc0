"""DP-SGD on a device: what a round costs and is booked for, and that another plan leaves nothing in its gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.support.gated_client import Device
from tests.support.small_task import linear, task_of
from thinwire.client import execute, payload
from thinwire.client.booking import DataSet
from thinwire.client.policy import Policy
from thinwire.client.privacy_ledger import Account, DeviceLedger
from thinwire.client.private_noise import DeviceSecrets, NoisedGradients
from thinwire.client.run_state import ClientRunState
from thinwire.client.task import initial_model
from thinwire.client.train.private import ExampleGradients
from thinwire.client.train.protocol import PrivateSteps, Split
from thinwire.core import RunPlan
from thinwire.core.protocol import without_facts
from thinwire.core.records import replace
from thinwire.core.types import ReplyHeader, Work
from thinwire.privacy.accounting import Budget, Release, epsilon, unit_of
from thinwire.privacy.noise_plan import noise_plan, spending

TEXT = """
[run]
task = "small"
rounds = 4
evaluate = "off"
[cohort]
deadline_s = 60
[local]
lr = 1.0
steps = 3
batch = 8
buffers = "local"
[privacy]
mode = "example"
clip = 0.5
delta = 1e-3
records = 32
noise_multiplier = 1.0
"""
PLAN = RunPlan.parse(TEXT)
SIZE = 15


def test_the_cost_is_that_of_the_poisson_sampled_gaussian_over_all_steps_of_all_rounds() -> None:
    """dp-accounting's own event for the same z and rate, at the sensitivity after rounding."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    release = noise_plan(PLAN, SIZE, 1).release
    assert (release.rate, release.steps, release.unit) == (8 / 32, 3, "record")
    accountant = RdpAccountant(range(2, 65), NeighboringRelation.ADD_OR_REMOVE_ONE)
    noise = math.sqrt(release.variance) / release.sensitivity
    accountant.compose(PoissonSampledDpEvent(release.rate, GaussianDpEvent(noise)), 3 * 4)
    assert epsilon({release: 4}, 1e-3) == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-6)
    single = Release(**{**vars(release), "steps": 1})
    assert epsilon({single: 12}, 1e-3) == pytest.approx(epsilon({release: 4}, 1e-3), rel=1e-12)
    assert Release.from_json(release.to_json()) == release


def test_a_client_release_beside_one_of_a_record_counts_twice_its_sensitivity() -> None:
    """With another record the whole update may be another one, which moves a sum by up to two clips."""
    record, client = noise_plan(PLAN, SIZE, 1).release, Release("discrete-gaussian", 10.0, 1600.0, SIZE)
    double = Release("discrete-gaussian", 20.0, 1600.0, SIZE, unit="record")
    assert (unit_of({client: 3}), unit_of({client: 3, record: 1}), unit_of({client: 3, record: 0})) == (
        "client", "record", "client",
    )  # fmt: skip
    mixed = epsilon({client: 2, record: 1}, 1e-3)
    assert mixed == epsilon({double: 2, record: 1}, 1e-3)
    assert mixed > epsilon({client: 2}, 1e-3)
    assert Budget(mixed * 1.02, 1e-3).allows({client: 2}, record)
    assert not Budget(mixed * 0.98, 1e-3).allows({client: 2}, record)


class Sampled(Device):
    """A device with a ledger that computes what a release costs, as `thinwire client start` does."""

    def __init__(self, folder: Path, policy: Policy | None = None, text: str = "", **changed: Any) -> None:
        (folder / "device").mkdir(parents=True, exist_ok=True)
        self.ledger = DeviceLedger(folder / "device", "key")
        size = initial_model(task_of(linear), 0).layout.model_size
        account = Account(self.ledger, lambda task: DataSet("", "/data"), lambda assigned, plan: spending(plan, size))
        super().__init__(folder, policy or Policy(), account=account, **changed)
        self.aggregator.plan = RunPlan.parse(TEXT + text)

    def data(self, client: object) -> Split:
        self.lines_at_read = len(self.ledger.bookings)
        return super().data(client)


def test_a_round_is_booked_before_the_data_are_read_with_the_steps_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PrivateSteps] = []
    sum_of = DeviceSecrets.sum_of

    def noted(secrets: DeviceSecrets, work: PrivateSteps) -> NoisedGradients:
        made.append(work)
        return sum_of(secrets, work)

    monkeypatch.setattr(DeviceSecrets, "sum_of", noted)
    device = Sampled(tmp_path)
    reply = device.assign(1, work=Work(1000, 2), codec="identity")  # as a dishonest aggregator would
    assert isinstance(reply, ReplyHeader)
    assert without_facts(reply) == reply
    assert (device.lines_at_read, len(made), made[0].batch) == (1, 3, 8)
    (line,) = device.ledger.bookings
    assert Release.from_json(line.release) == noise_plan(device.aggregator.plan, SIZE, 1).release
    most = 1.001 * epsilon({Release.from_json(line.release): 2}, 1e-5)
    strict = Sampled(tmp_path / "strict", Policy(max_epsilon=most))
    assert [strict.rule(number) for number in (1, 2, 3)] == ["", "", "max_epsilon"]


@pytest.mark.parametrize("gone", ["records = 32", "noise_multiplier = 1.0", "steps = 3"])
def test_a_plan_whose_cost_cannot_be_computed_is_declined_before_anything_is_fetched(tmp_path: Path, gone: str) -> None:
    device = Sampled(tmp_path)
    device.aggregator.plan = RunPlan.parse(TEXT.replace(gone, ""))
    assert not device.admission.is_wanted(device.aggregator.assign(1).assignment)
    assert (device.rule(1), device.read, device.ledger.bookings) == ("privacy", 0, ())


class Averaging(nn.Module):
    """A model with a buffer of its own that follows what it sees in training, and that its output depends on."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not torch._C._functorch.is_batchedtensor(x):
            self.seen.add_(x.detach().abs().mean())
        found: torch.Tensor = self.inner(x) * (1 + self.seen)
        return found


def test_what_another_plan_left_of_the_records_is_in_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that a device keeps has all its records in it, and the noise of a step hides one gradient of each."""
    found: list[float] = []
    of = ExampleGradients.of

    def noted(gradients: ExampleGradients, fetch: Any, indices: torch.Tensor) -> Any:
        found.extend(float(buffer) for buffer in gradients.buffers.values())
        return of(gradients, fetch, indices)

    monkeypatch.setattr(ExampleGradients, "of", noted)
    device = Sampled(tmp_path)
    device.aggregator.task = task_of(Averaging, data=device.data)
    device.aggregator.first = initial_model(device.aggregator.task, 0)
    device.start()
    device.aggregator.plan = RunPlan.parse(TEXT.replace('"example"', '"local"').replace("records = 32\n", ""))
    assert device.rule(1, codec="identity") == ""
    (_, state) = device.handler.runs["small-1"]
    assert state.buffers is not None
    assert state.buffers[0] > 0, "the first plan left something"
    device.aggregator.plan = PLAN
    assert device.rule(2, codec="identity") == ""
    assert len(found) == 3
    assert set(found) == {0.0}


WHOLE = TEXT.replace('"example"', '"central"').replace("records = 32\n", "")
CENTRAL = WHOLE.replace("[local]", 'late = "drop"\n[local]')
CLASSIC = '[uplink]\ncodec = "randk(0.2)"\nfeedback = "classic"\n'


def test_what_another_plan_has_not_sent_is_in_no_noised_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual of central mode holds most of an update without noise, and no aggregator has seen it."""
    found: list[bool] = []
    encode = payload.encode

    def noted(update: NDArray[Any], state: ClientRunState, *args: Any) -> Any:
        found.append(state.residual is not None)
        return encode(update, state, *args)

    monkeypatch.setattr(execute, "encode", noted)
    device = Sampled(tmp_path)
    for number, text in enumerate([CENTRAL, TEXT, TEXT, CENTRAL, TEXT], 1):
        device.aggregator.plan = RunPlan.parse(text.replace("rounds = 4", "rounds = 9") + CLASSIC)
        assert device.rule(number, codec="randk(0.2)") == ""
        assert device.handler.runs["small-1"][1].residual is not None
        device.start()
    assert found == [False, False, True, True, False], "what followed the noise may wait for the next noised update"


def test_no_step_begins_at_an_update_of_another_plan(tmp_path: Path) -> None:
    """With overlap training begins at the device's own last update, which would be in each gradient without noise."""
    device = Sampled(tmp_path)
    delivery = device.aggregator.assign(1)
    folder, state = device.handler.runs.open("small-1", print)
    started = replace(state, sequence=1, pending={"1": np.full(SIZE, 1e6, np.float32)})
    device.handler.runs.commit(delivery.assignment, folder, started)
    header, _ = device.aggregator.answer(device.handler, device.aggregator.assign(2))
    assert isinstance(header, ReplyHeader)
    assert dict(device.handler.runs["small-1"][1].pending) == {}
