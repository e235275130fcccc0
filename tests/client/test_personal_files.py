"""What a device keeps of runs with personal layers: the whole model, after the run too, until its owner deletes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.small_task import RUN, Aggregator, normed, plan_of, task_of
from thinwire.client import personal_files
from thinwire.client.admission import AdmissionController
from thinwire.client.handler import AssignmentHandler
from thinwire.client.personal_files import SharedModels, delete_run, kept_runs, save_values, values_of, whole_model
from thinwire.client.run_state import ClientRunState
from thinwire.core.errors import NotFound
from thinwire.core.statedir import MB

FEDPER = 'personal_layers = ["3.*"]'


class Tied(nn.Module):
    """A shared body, and a personal embedding that is also the head; a frozen layer that never travels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.ice = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False)
        self.head, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.head.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.relu(self.head(self.ice(self.norm(self.body(inputs))))))
        return found


class Device(Aggregator):
    """A device that keeps the shared part, as `serve` makes it."""

    def __init__(self, folder: Path, local: str = FEDPER, min_free: int = 0, **task: Any) -> None:
        super().__init__(folder, task_of(**{"model": normed, **task}), plan_of(local))
        self.home, self.min_free = folder / "device", min_free

    def handler(
        self, home: Path | None = None, admission: AdmissionController | None = None, **environment: Any
    ) -> AssignmentHandler:
        models = SharedModels(self.home, lambda task: made.executor.layout, lambda: self.min_free)
        made = super().handler(home, admission, keep_shared=models.keep, **environment)
        return made

    def train(self, *rounds: int, **changed: Any) -> AssignmentHandler:
        for number in rounds:
            self.answer(handler := self.handler(), self.assign(number, **changed))
        return handler

    def end(self, run: str = RUN) -> None:
        self.handler().stop(self.assign(99, kind="stop", run=run).assignment, self.said.append)


def exported(device: Device, run: str = RUN) -> dict[str, torch.Tensor]:
    file = device.home / "whole.safetensors"
    whole_model(device.home, run).export(file)
    return dict(load_file(file))


@pytest.mark.parametrize("is_over", [False, True])
def test_the_whole_model_is_the_last_base_with_the_devices_own_layers(tmp_path: Path, is_over: bool) -> None:
    device = Device(tmp_path)
    later = device.first.vector + 1
    device.train(1)
    state = device.train(2, params=later).runs[RUN][1]
    if is_over:
        device.end()
    found, model = exported(device), normed()
    assert model.load_state_dict(found).missing_keys == []
    assert found["0.weight"].flatten().tolist() == later[:20].tolist()
    assert found["3.bias"].tolist() == state.personal["3.bias"].tolist()
    assert found["1.num_batches_tracked"] == 6
    assert whole_model(device.home, RUN).version == "1"
    assert whole_model(device.home, RUN).personal == ["3.weight", "3.bias"]


def test_tied_weights_are_there_under_each_name_and_what_model_makes_is_named(tmp_path: Path) -> None:
    device = Device(tmp_path, 'personal_layers = ["head.*", "out.*"]', model=Tied)
    device.train(1)
    found = whole_model(device.home, RUN)
    assert found.missing == ["ice.weight", "ice.bias"]
    assert found.tensors["out.weight"].tolist() == found.tensors["head.weight"].tolist()
    assert set(found.tensors) | set(found.missing) == set(Tied().state_dict())


@pytest.mark.parametrize("is_over", [False, True])
def test_local_buffers_are_part_of_it(tmp_path: Path, is_over: bool) -> None:
    device = Device(tmp_path, f'{FEDPER}\nbuffers = "local"')
    own = device.train(1).runs[RUN][1].buffers
    assert own is not None
    if is_over:
        device.end()
    found = exported(device)
    assert [*found["1.running_mean"].tolist(), *found["1.running_var"].tolist()] == own.tolist()
    values = values_of(device.home, RUN)
    assert values is not None
    assert set(values.arrays) == {"3.weight", "3.bias"}, "local buffers are no personal layers"


def test_what_a_power_cut_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.train(1)
    device.end()
    left = [device.home / "personal" / name for name in (f".{RUN}.safetensors.x1", f"shared/.{RUN}.safetensors.x2")]
    for path in left:
        path.write_bytes(b"half a model")
    device.handler()
    assert [path.exists() for path in left] == [False, False]
    assert whole_model(device.home, RUN).version == "0"


def test_what_a_device_does_not_have_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tmp_path, loss=lambda model, batch: 1 / 0)
    device.train(1)
    with pytest.raises(NotFound, match="no training of it has ended here yet"):
        whole_model(device.home, RUN)
    with pytest.raises(NotFound, match="its plan has none, or nothing was trained here"):
        whole_model(device.home, "small-7")
    device = Device(tmp_path)
    device.train(1, run="small-2")
    device.end("small-2")
    monkeypatch.setattr(personal_files, "MAX_MODELS", 1)
    device.train(4, run="small-3")
    with pytest.raises(NotFound, match="were trained with model version 0") as lost:
        whole_model(device.home, "small-2")
    assert "thinwire runs model small-2 --out FILE" in lost.value.text()
    assert whole_model(device.home, "small-3").version == "3"


def test_with_durability_exit_the_values_are_there_when_the_client_has_saved_them(tmp_path: Path) -> None:
    device = Device(tmp_path, f'{FEDPER}\ndurability = "exit"')
    handler = device.train(1)
    with pytest.raises(NotFound, match="its client has them in memory"):
        whole_model(device.home, RUN)
    handler.save(device.said.append)
    assert whole_model(device.home, RUN).version == "0"


def test_a_full_disk_keeps_the_shared_layers_before_and_fails_no_assignment(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.train(1)
    device.min_free = 10**12 * MB
    device.train(2)
    assert not [line for line in device.said if "failed" in line]
    assert whole_model(device.home, RUN).version == "0"


def test_an_assignment_without_personal_layers_stores_no_model(tmp_path: Path) -> None:
    device = Device(tmp_path, "")
    device.train(1)
    assert not (device.home / "personal").exists()
    assert [(one.run, one.is_open, one.personal) for one in kept_runs(device.home)] == [(RUN, True, 0)]


def test_ended_runs_are_listed_until_they_are_deleted(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.train(1)
    device.end()
    device.train(1, run="small-2")
    rows = {one.run: one for one in kept_runs(device.home)}
    assert {run: (one.is_open, one.personal, one.version) for run, one in rows.items()} == {
        RUN: (False, 2, "0"), "small-2": (True, 2, "0"),
    }  # fmt: skip
    assert rows["small-2"].size_bytes > rows[RUN].size_bytes > 1000
    own = device.home / "personal" / f"{RUN}.safetensors"
    shutil.copy(own, own.with_name(f"{RUN}.1.safetensors"))  # of another run that had this id
    assert sorted(one.run for one in kept_runs(device.home)) == [RUN, "small-2"]
    delete_run(device.home, RUN)
    assert [one.run for one in kept_runs(device.home)] == ["small-2"]
    assert device.handler().runs.open(RUN, device.said.append)[1].sequence == 1, "no id is used twice"


def test_a_run_that_is_deleted_before_its_end_begins_again_and_reports_it(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.train(1)
    delete_run(device.home, RUN)
    assert kept_runs(device.home) == []
    reply, _ = device.answer(device.handler(), device.assign(2))
    assert (reply.lost, reply.update_id.sequence, reply.metrics["eval/personal"]) == ("given-up", 2, (0.0, 6.0))


def test_of_many_ended_runs_the_last_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal_files, "MAX_RUNS", 2)
    device = Device(tmp_path)
    for number in range(1, 5):
        device.train(1, run=f"small-{number}")
        device.end(f"small-{number}")
    assert {path.stem for path in (device.home / "personal").glob("*.safetensors")} == {"small-3", "small-4"}


def test_what_was_just_written_stays_also_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(personal_files, "MAX_RUNS", 2)
    device = Device(tmp_path)
    for number in range(1, 4):
        device.train(1, run=f"small-{number}")
        device.end(f"small-{number}")
        for path in (device.home / "personal").glob("*.safetensors"):
            os.utime(path, (4e9, 4e9))
    kept = {path.stem for path in (device.home / "personal").glob("*.safetensors")}
    assert (len(kept), "small-3" in kept) == (2, True)


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.train(1)
    device.end()
    path = device.home / "personal" / f"{RUN}.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert values_of(device.home, RUN) is None
    save_values(device.home, "small-9", ClientRunState())
    assert not (device.home / "personal" / "small-9.safetensors").exists()
