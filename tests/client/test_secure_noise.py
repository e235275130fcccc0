"""A device that noises its update under masks: clipped by tensors, and silent where the entropy source fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.secure_clients import SecureClients, changed_of, name_of, secure_identity
from thinwire.aggregation.plan_codecs import noised_dimensions
from thinwire.aggregation.private_lattice import clip_layers
from thinwire.client.admission import AdmissionController
from thinwire.client.booking import DataSet
from thinwire.client.errors import FAILED, WORK
from thinwire.client.handler import AssignmentHandler
from thinwire.client.privacy_ledger import Account, DeviceLedger
from thinwire.client.private_noise import release_of
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import private_folder
from thinwire.core.types import Failure
from thinwire.privacy.noise_plan import noise_plan, spending
from thinwire.privacy.secret_rng import SystemRng

CLIP = 0.01  # below the norm of each update
LAST = 3
TEXT = f"""
[run]
task = "small"
rounds = 4
evaluate = "off"
[cohort]
clients = 4
deadline_s = 60
late = "drop"
[local]
lr = 0.1
batch = 8
steps = 3
buffers = "local"
[secure]
enabled = true
max_corrupt = 0.25
max_dropout = 0.25
[privacy]
mode = "distributed"
clip = {CLIP}
noise_multiplier = 0.01
delta = 1e-3
"""
PLAN = RunPlan.parse(TEXT)


class Entropy(SystemRng):
    """The entropy of the system, until it fails."""

    fails = False

    def fill(self, out: Any) -> None:
        if Entropy.fails:
            raise OSError("no entropy")
        super().fill(out)


@dataclass
class NoisyClients(SecureClients):
    """Four devices, each with a ledger of its own; the entropy source of the last one can fail."""

    plan: RunPlan = PLAN
    clip: float = CLIP
    ledgers: dict[int, DeviceLedger] = field(default_factory=dict)

    def handler(self, number: int, **options: Any) -> AssignmentHandler:
        folder = private_folder(self.folder / name_of(number))
        identity = secure_identity(number, **({"rng": Entropy} if number == LAST else {}))
        self.ledgers[number] = ledger = DeviceLedger(folder, str(number))

        def release(assignment: object, plan: RunPlan) -> tuple[str, str]:
            return spending(plan, self.noised(plan), self.clients)

        account = Account(ledger, lambda task: DataSet("", "/d"), release)
        admission = AdmissionController(self.owner, folder, carries=identity.carries, account=account)
        return super().handler(number, secure=identity, admission=admission, **options)

    def noised(self, plan: RunPlan) -> int:
        return noised_dimensions(plan, self.aggregator.first.layout.size)

    @property
    def booked(self) -> list[int]:
        return [len(self.ledgers[number].bookings) for number in range(self.clients)]


@pytest.fixture(autouse=True)
def entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entropy, "fails", False)


def test_a_clip_by_tensors_is_that_of_the_masked_update(tmp_path: Path) -> None:
    clients = NoisyClients(tmp_path, RunPlan.parse(f'{TEXT}clipping = "per-layer"\n'))
    clients.open()
    spans = clients.aggregator.first.layout.model_tensors
    assert len(spans) == 2
    raw = [changed_of(begun) for begun in clients.begun.values()]
    flat = np.mean([one * (CLIP / np.linalg.norm(one)) for one in raw], axis=0)
    by_tensor = [one.copy() for one in raw]
    for one in by_tensor:
        clip_layers(one, spans, CLIP)
    clients.run()
    mean, _ = clients.sum()
    noise = noise_plan(clients.plan, clients.noised(clients.plan), 4)
    # The noise and the rounding of 4 clients, in 15 coordinates: three times the root of their mean square is passed
    # with the probability of a chi-square above 135, which is 1e-21.
    most = 3 * np.sqrt(mean.size * 4 * (noise.variance + 0.25)) * CLIP / noise.scale / 4
    assert np.linalg.norm(mean - np.mean(by_tensor, axis=0)) < most
    assert np.linalg.norm(flat - np.mean(by_tensor, axis=0)) > 3 * most, "the test sees a clip of the whole update"


def test_a_client_without_entropy_fails_and_sends_nothing_and_has_spent(tmp_path: Path) -> None:
    clients = NoisyClients(tmp_path)
    clients.open()
    clients.run(until="share")
    assert clients.booked == [1, 1, 1, 1]
    last = name_of(LAST)
    assert clients.phase(last, "masked", clients.requests[last]) is None
    Entropy.fails = True
    failure, body = clients.handlers[last].finish(clients.begun[last])
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.text, body) == (FAILED, WORK, None)
    clients.resume("masked", lost={"masked": [last]})
    assert clients.sum()[1] == {"weight": 3}
    assert clients.booked == [1, 1, 1, 1]


def test_personal_layers_are_no_dimensions_of_what_a_device_books() -> None:
    """They get no noise. On the grid of the whole model the same noise would cost another epsilon."""
    plan = RunPlan.parse(TEXT.replace("batch = 8", 'batch = 8\npersonal_layers = ["head*"]'))
    whole = Layout.of({"body": (129,), "head": (16_256,)})
    booked = release_of(plan, whole, 4)
    assert booked == spending(plan, noised_dimensions(plan, 129), 4)
    assert booked != release_of(PLAN, whole, 4)
