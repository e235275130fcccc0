"""A restarted client knows its tasks as they are now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trained_elsewhere import TASK
from thinwire.client.executor import InProcessExecutor, Worker
from thinwire.client.task import load_task
from thinwire.client.worker_process import Interpreter
from thinwire.core.statedir import private_folder


def started(folder: Path) -> str:
    """The layout's digest that a start tells an aggregator of its task."""
    worker = Worker([f"small={folder / 'task.py'}"], Interpreter(None, private_folder(folder / "client")), device="cpu")
    try:
        worker.describe()
        return worker.manifests[0].report.layout_digest
    finally:
        worker.close()


def test_a_restart_sees_a_model_that_changed_though_no_code_beside_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package, a file or the environment may make it another one: here the number of classes is the environment's."""
    (tmp_path / "task.py").write_text(TASK.replace("nn.Linear(5, 3)", "nn.Linear(5, int(os.environ['CLASSES']))"))
    monkeypatch.setenv("CLASSES", "3")
    first = started(tmp_path)
    assert started(tmp_path) == first
    monkeypatch.setenv("CLASSES", "7")
    second = started(tmp_path)
    assert second == InProcessExecutor(load_task(f"small={tmp_path / 'task.py'}")).layout.digest != first
