"""The task and the plan of docs/how/from-flower.md train as they stand."""

from __future__ import annotations

import json
import re
import sys

from tests.support.fork_server import run_forked
from tests.support.processes import environment
from tests.support.shell_blocks import ROOT

PAGE = ROOT / "docs" / "how" / "from-flower.md"


def block(language: str, holding: str) -> str:
    """Return the one fenced block of a language that contains a text."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (one,) = (text for text in found if holding in text)
    return str(one)


def test_the_task_and_the_plan_of_the_how_to_train(tmp_path):
    (tmp_path / "task.py").write_text(block("python", "def model()"))
    (tmp_path / "plan.toml").write_text(block("toml", "[run]"))
    command = [sys.executable, "-m", "thinwire.cli", "sim", "plan.toml", "--task", "digits=task.py", "--clients", "4"]
    command += ["--set", "run.rounds=1", "--home", str(tmp_path / "home"), "--json"]
    ended = run_forked(command, 120, cwd=tmp_path, env=environment())
    assert ended.returncode == 0, ended.stderr
    (one,) = json.loads(ended.stdout)["rounds"]
    assert one["reason"] == "all" and one["metrics"]["accuracy"] > 0
