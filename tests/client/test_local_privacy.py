"""A device that noises its own update: the clip and the noise that its ledger claims, and nothing else in the reply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.support.gated_client import Device
from tests.support.scripted_rng import ScriptedRng
from tests.support.small_task import linear, task_of
from thinwire.client.booking import DataSet
from thinwire.client.policy import Policy
from thinwire.client.privacy_ledger import Account, DeviceLedger
from thinwire.client.private_noise import noised, without_divergence
from thinwire.client.task import initial_model
from thinwire.client.train.protocol import TrainResult
from thinwire.compression import parse
from thinwire.core import RunPlan
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.privacy_numbers import squared_sensitivity
from thinwire.core.protocol import without_facts
from thinwire.core.types import ReplyHeader
from thinwire.privacy.accounting import Release, epsilon
from thinwire.privacy.noise_plan import noise_plan, spending

CLIP, NOISE, SIZE = 0.5, 2.0, 1000
TEXT = f"""
[run]
task = "small"
rounds = 4
evaluate = "off"
[cohort]
deadline_s = 60
[local]
lr = 0.1
steps = 3
buffers = "local"
[privacy]
mode = "local"
clip = {CLIP}
noise_multiplier = {NOISE}
"""
PLAN = RunPlan.parse(TEXT)
LAYOUT = initial_model(task_of(linear), 0).layout


def no_noise(out: NDArray[np.int32]) -> None:
    out[:] = 0


@given(arrays(np.float32, SIZE, elements=st.floats(-(2.0**60), 2.0**60, width=32)))
def test_without_noise_an_update_has_at_most_the_clip_and_its_rounding(update: NDArray[np.float32]) -> None:
    found, scale = noised(update, PLAN, LAYOUT, ScriptedRng(1), no_noise), noise_plan(PLAN, SIZE, 1).scale
    points = np.rint(found.astype(np.float64) / CLIP * scale).astype(np.int64)
    assert int(points @ points) <= squared_sensitivity(scale, SIZE)


def test_the_noise_has_the_variance_that_the_release_claims_and_the_sensitivity_is_that_of_two_clips() -> None:
    """The mean square of 4 000 x 1000 draws is within 7 of its standard deviations, sqrt(2 / draws)."""
    noise, zero, rounds = noise_plan(PLAN, SIZE, 1), np.zeros(SIZE, np.float32), 4000
    unit = CLIP / noise.scale
    squares = sum(float(np.sum((noised(zero, PLAN, LAYOUT).astype(np.float64) / unit) ** 2)) for _ in range(rounds))
    claimed = noise.release.variance
    assert abs(squares / (rounds * SIZE) / claimed - 1) < 7 * math.sqrt(2 / (rounds * SIZE))
    assert claimed == (NOISE * 2 * noise.scale) ** 2
    assert noise.release.sensitivity == 2 * math.sqrt(squared_sensitivity(noise.scale, SIZE))
    assert 0.98 * NOISE < math.sqrt(claimed) / noise.release.sensitivity < NOISE


def test_local_costs_what_central_does_with_twice_the_noise() -> None:
    """Replacing an update by its negative moves it by two clips; half the noise multiplier would be a factor 2 off."""
    central = RunPlan.parse(TEXT.replace('mode = "local"', 'mode = "central"'))
    ours, theirs = noise_plan(PLAN, SIZE, 1), noise_plan(central, SIZE, 1)
    assert ours.variance == 4 * theirs.variance
    assert ours.epsilon(1e-5) == pytest.approx(theirs.epsilon(1e-5), rel=1e-9)
    skellam = noise_plan(RunPlan.parse(TEXT + 'mechanism = "skellam"'), SIZE, 1)
    assert (skellam.release.distribution, ours.release.distribution) == ("skellam", "discrete-gaussian")
    assert skellam.epsilon(1e-5) >= ours.epsilon(1e-5)


def test_each_tensor_gets_its_share_of_the_clip_where_the_plan_says_so() -> None:
    plan = RunPlan.parse(TEXT + 'clipping = "per-layer"')
    update = np.ones(LAYOUT.size, np.float32) * 1e6
    found = noised(update, plan, LAYOUT, ScriptedRng(1), no_noise)
    norms = [float(np.linalg.norm(found[span])) for span in LAYOUT.model_tensors]
    assert len(norms) > len(LAYOUT.model_segments), "small tensors share a segment, and no clip"
    assert norms == pytest.approx([CLIP / math.sqrt(len(norms))] * len(norms), rel=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_not_released(value: float) -> None:
    with pytest.raises(NonFiniteUpdate):
        noised(np.array([1.0, value], np.float32), PLAN, LAYOUT)


class Local(Device):
    """A device with a ledger that computes what a release costs, as `thinwire client start` does."""

    def __init__(self, folder: Path, policy: Policy | None = None, text: str = "", **changed: Any) -> None:
        def release(assignment: Any, plan: RunPlan) -> tuple[str, str]:
            return spending(plan, LAYOUT.model_size)

        (folder / "device").mkdir(parents=True, exist_ok=True)
        self.ledger = DeviceLedger(folder / "device", "key")
        account = Account(self.ledger, lambda task: DataSet("", "/data/ward"), release)
        super().__init__(folder, policy or Policy(), account=account, **changed)
        self.aggregator.plan = RunPlan.parse(TEXT + text)

    def data(self, client: object) -> Any:
        self.lines_at_read = len(self.ledger.bookings)
        return super().data(client)


@pytest.mark.parametrize("weight", [1.0, 3e38])
def test_a_model_that_some_record_drives_to_infinity_gets_a_noised_update_as_any_other_does(
    tmp_path: Path, weight: float
) -> None:
    """An aggregator chooses the model: whether training fails would tell it how large a record is, without noise."""
    device, params = Local(tmp_path), np.full(LAYOUT.size, weight, np.float32)
    reply, file = device.aggregator.answer(device.handler, device.aggregator.assign(1, codec="identity", params=params))
    assert isinstance(reply, ReplyHeader) and file is not None
    assert len(device.ledger.bookings) == 1
    sent = np.frombuffer(file.read_bytes()[-4 * LAYOUT.model_size :], np.float32)
    assert np.isfinite(sent).all() and len(np.unique(sent)) > 1, "noise, also where the update is zeros"


@pytest.mark.parametrize(
    ("value", "loss", "sent"), [(1.0, 2.0, 1.0), (math.inf, 2.0, 0.0), (1.0, math.nan, 0.0), (math.nan, math.inf, 0.0)]
)
def test_an_update_is_zeros_if_it_or_its_loss_alone_is_not_finite(value: float, loss: float, sent: float) -> None:
    change = np.array([1.0, value], np.float32)
    done = without_divergence(TrainResult(loss=(loss, 1.0)), change, None, None, lambda line: None)
    assert change.tolist() == [sent, sent]
    assert done.loss == ((loss, 1.0) if sent else (0.0, 0.0))


def test_a_reply_is_booked_before_the_data_are_read_and_has_nothing_but_the_noised_update(tmp_path: Path) -> None:
    device = Local(tmp_path)
    delivery = device.aggregator.assign(1, codec="identity")
    reply, file = device.aggregator.answer(device.handler, delivery)
    assert isinstance(reply, ReplyHeader)
    assert (device.lines_at_read, without_facts(reply)) == (1, reply)
    assert [part.name for part in reply.parts] == ["frame/0"]
    sent = np.zeros(LAYOUT.size, np.float32)
    parse("identity").bind(LAYOUT).decode_add(file.read_bytes(), 1.0, sent)
    noise = noise_plan(device.aggregator.plan, LAYOUT.model_size, 1)
    steps = sent.astype(np.float64) / CLIP * noise.scale
    assert np.abs(steps - np.rint(steps)).max() < 1e-2, "it lies on the grid"
    assert float(np.linalg.norm(sent)) > CLIP, "15 coordinates of noise, of 2 deviations each"
    (line,) = device.ledger.bookings
    assert Release.from_json(line.release) == noise.release
    assert (line.population, line.round) == ("small", 1)
    assert device.aggregator.answer(device.handler, delivery) == (reply, file), "the same bytes again"
    assert len(device.ledger.bookings) == 1


def test_no_number_of_the_update_before_its_noise_is_kept(tmp_path: Path) -> None:
    device = Local(tmp_path, text="[uplink]\ncodec = 'topk(0.5)'\nfeedback = 'none'")
    assert device.rule(1, codec="topk(0.5)") == ""
    _, state = device.handler.runs.open("small-1", print, "")
    assert (state.residual, state.momentum, state.codec_arrays, state.pending) == (None, None, {}, {})


def test_the_device_keeps_the_plans_participations_and_its_own_limits(tmp_path: Path) -> None:
    device = Local(tmp_path / "plan", text="max_participations = 2")
    assert [device.rule(number) for number in (1, 2, 3)] == ["", "", "privacy"]
    assert device.rule(4, identity="another run") == ""
    release = noise_plan(device.aggregator.plan, LAYOUT.model_size, 1).release
    strict = Local(tmp_path / "own", Policy(max_epsilon=1.001 * epsilon({release: 2}, 1e-5), privacy=["local"]))
    assert [strict.rule(number) for number in (1, 2, 3)] == ["", "", "max_epsilon"]
    assert (len(device.ledger.bookings), len(strict.ledger.bookings)) == (3, 2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("buffers = 'average'", 'buffers = "average"'),
        ("feedback = 'classic'", "feedback = 'classic'"),
        ("evaluate = 'clients'", 'evaluate = "clients"'),
    ],
)
def test_a_plan_that_an_honest_aggregator_refuses_is_declined_by_the_device(
    tmp_path: Path, text: str, what: str
) -> None:
    """Its statistics, residual or metrics would leave without noise, and nobody else is trusted in this mode."""
    key = text.partition(" = ")[0]
    plan = TEXT.replace('buffers = "local"', text) if key == "buffers" else TEXT
    plan = plan.replace('evaluate = "off"', text) if key == "evaluate" else plan
    device = Local(tmp_path)
    device.aggregator.plan = RunPlan.parse(plan + (f"[uplink]\n{text}" if key == "feedback" else ""))
    answer = device.assign(1)
    assert not isinstance(answer, ReplyHeader)
    assert (answer.kind, device.read, device.ledger.bookings) == ("declined", 0, ())  # type: ignore[union-attr]
    assert what in answer.text  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["evaluate", "init"])
def test_neither_metrics_nor_a_first_model_leave_a_device_that_trusts_nobody(tmp_path: Path, kind: str) -> None:
    device = Local(tmp_path)
    assert device.rule(1, kind) == "privacy"
    assert device.read == 0


def test_a_source_of_randomness_that_fails_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no entropy")

    device = Local(tmp_path)
    monkeypatch.setattr("thinwire.privacy.secret_rng.SystemRng.fill", broken)
    answer = device.assign(1)
    assert not isinstance(answer, ReplyHeader)
    assert len(device.ledger.bookings) == 1, "what was reserved stays spent"
