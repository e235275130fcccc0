"""`thinwire client runs` and `thinwire client model`: what a device's owner sees, exports and deletes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from safetensors.numpy import load_file

from tests.client.test_personal_files import FEDPER, Device
from tests.support.small_task import RUN
from thinwire.core.statedir import client_home, hold


@pytest.fixture
def device(home: Path) -> Device:
    """A device that has trained in one run, which is over, and in another one."""
    made = Device(home / "aggregator-side", FEDPER)
    made.home = client_home(home, "pi-01")
    for run in (RUN, "small-2"):
        made.answer(made.handler(made.home), made.assign(1, run=run))
        if run == RUN:
            made.handler(made.home).stop(made.assign(2, kind="stop", run=run).assignment, made.said.append)
    return made


@pytest.fixture
def client(thinwire, home: Path, device: Device):
    return lambda *words: thinwire("client", *words, "--name", "pi-01", "--home", home)


def test_runs_are_listed_with_what_is_kept_of_them(client) -> None:
    rows = {row["run"]: row for row in client("runs", "list", "--json").document}
    assert [rows[run]["is_open"] for run in (RUN, "small-2")] == [False, True]
    assert {(row["personal"], row["version"]) for row in rows.values()} == {(2, "0")}
    said = client("runs", "list").out
    assert all(word in said for word in (RUN, "small-2", "open", "over", "version 0"))


def test_the_whole_model_is_written_and_nothing_is_overwritten(client, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    said = client("model", RUN, "--out", out)
    assert said.code == 0, said.err
    assert "shared layers of model version 0, 2 personal tensors" in said.out
    assert {"0.weight", "3.weight", "1.num_batches_tracked"} <= set(load_file(out))
    assert out.stat().st_mode & 0o077 == 0, "it derives from the local data"
    said = client("model", RUN, "--out", out)
    assert (said.code, "is there already" in said.err) == (2, True)
    found = client("model", "small-2", "--out", tmp_path / "other.safetensors", "--json").document
    assert (found["run"], found["version"], found["personal"]) == ("small-2", 0, ["3.weight", "3.bias"])


def test_a_run_that_is_not_here_is_refused_with_the_command_that_lists_them(client, home: Path, thinwire) -> None:
    said = client("model", "digits-1", "--out", home / "m.safetensors")
    assert (said.code, "pi-01 keeps no run 'digits-1'" in said.err) == (9, True)
    assert f"thinwire client runs list --name pi-01 --home {home}" in said.err
    said = client("runs", "delete", "small-", "--yes")
    assert (said.code, "several runs begin with 'small-'" in said.err, f"{RUN}, small-2" in said.err) == (9, True, True)
    assert thinwire("client", "runs", "list", "--name", "nobody", "--home", home).code == 9


def test_a_run_is_deleted_by_its_owner_alone(client, monkeypatch: pytest.MonkeyPatch) -> None:
    said = client("runs", "delete", RUN)
    assert (said.code, f"{RUN} is not deleted without --yes" in said.err) == (2, True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", lambda text: False)
    assert client("runs", "delete", RUN).out.strip() == f"{RUN} stays"
    assert client("runs", "delete", RUN, "--yes").out.strip() == f"{RUN} is deleted on pi-01"
    assert [row["run"] for row in client("runs", "list", "--json").document] == ["small-2"]


def test_a_run_that_is_not_over_is_deleted_while_its_client_is_stopped(client, device: Device) -> None:
    with hold(device.home / "lock", {}):
        said = client("runs", "delete", "small-2", "--yes")
        assert (said.code, "small-2 is not over on pi-01" in said.err) == (5, True)
        assert client("runs", "delete", RUN, "--yes").code == 0, "nothing of it is in memory"
    assert client("runs", "delete", "small-2", "--yes", "--json").document == {"run": "small-2", "deleted": True}
    said = client("runs", "list")
    assert (said.out, "pi-01 keeps nothing of any run" in said.err) == ("", True)
