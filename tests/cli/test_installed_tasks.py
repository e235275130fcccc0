"""Tasks that are installed under the entry-point group need no --task, on a device or where a run is typed."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from thinwire.cli.client.start import ClientOptions, begin
from thinwire.cli.task import task_spec
from thinwire.client import task as tasks
from thinwire.core.errors import TaskError, UsageError


def installed(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    monkeypatch.setattr(tasks, "entry_points", lambda group: EntryPoints(entries).select(group=group))


def device(home: Path) -> ClientOptions:
    return ClientOptions("http://127.0.0.1:9", (), None, "pi-01", None, "iid", 0, "cpu", 1, True, home)


def test_an_installed_task_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, EntryPoint("ecg", "hospital.ecg", "thinwire.tasks"))
    assert task_spec("ecg", tmp_path / "plan.toml", None) == "ecg=hospital.ecg"


def test_two_files_that_may_be_the_task_of_a_plan_are_refused_until_one_is_named(tmp_path: Path) -> None:
    """Else the one that was not meant would train, and nothing would say so."""
    plan = tmp_path / "plan.toml"
    for name in ("task.py", "ecg.py"):
        (tmp_path / name).touch()
    plan.write_text('[run]\ntask = "ecg"\n')
    with pytest.raises(TaskError, match="two files beside"):
        task_spec("ecg", plan, None)
    assert task_spec("ecg", plan, str(tmp_path / "ecg.py")) == f"ecg={tmp_path / 'ecg.py'}"


def test_a_client_without_any_task_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch)
    with pytest.raises(UsageError, match="no task"):
        begin(device(tmp_path))


def test_a_client_takes_what_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = Path(__file__).parents[2] / "examples" / "digits" / "task.py"
    installed(monkeypatch, EntryPoint("digits", str(code), "thinwire.tasks"))
    assert begin(device(tmp_path)) == 4  # it got as far as the aggregator, which is not there
