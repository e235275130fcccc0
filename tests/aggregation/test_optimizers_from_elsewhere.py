"""A server optimizer of another package works as docs/how/your-own-optimizer.md has it; anything else is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.codecs_elsewhere import install
from tests.support.fork_server import run_forked
from tests.support.processes import environment
from thinwire.aggregation.server_optimizers import apply_optimizer, optimizers, server_optimizer
from thinwire.core.errors import CodecError
from thinwire.core.plan_schema import ServerSection
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store

ROOT = Path(__file__).parents[2]
LION = (ROOT / "docs" / "how" / "your-own-optimizer.md").read_text()
LION = LION.split("```python\n")[1].split("```")[0]
PLAN = """
[run]
task = "digits"
rounds = 2
[local]
epochs = 1
lr = 0.1
[cohort]
clients = 2
[server]
optimizer = "lion"
lr = 0.01
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a package is installed that brings the optimizer `lion` by entry point, beside a plan that names it."""
    (tmp_path / "plan.toml").write_text(PLAN)
    install(tmp_path, LION, "thinwire.optimizers", "lion = mypkg:Lion")
    return tmp_path


def sim(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two rounds of the digits example; the optimizer is found by its entry point."""
    call = [sys.executable, "-m", "thinwire.cli", "sim", "plan.toml", "--clients", "2", "--home", str(folder / "home")]
    call += ["--task", f"digits={ROOT / 'examples' / 'digits' / 'task.py'}"]
    return run_forked(call, 240.0, cwd=folder, env=environment())  # which looks for modules in its folder


def test_the_optimizer_of_the_how_to_makes_the_steps_of_a_run_and_its_error_names_its_package(
    folder: Path,
) -> None:
    given = "def step(self, params, change, state):"
    (folder / "mypkg.py").write_text(
        LION.replace(given, f'{given}\n        if state:\n            raise RuntimeError("not yet")')
    )
    done = sim(folder)
    with Store.open(AggregatorHome.under(folder / "home").database) as store:
        row = store.run("latest")
    assert (row.rounds_closed, row.version) == (1, 1), "its first step was made"
    assert done.returncode == 3, done.stderr
    assert "the server optimizer 'lion' of mypkg raised RuntimeError: not yet" in done.stderr
    assert "mypkg.py:" in done.stderr
    assert "defect of Thinwire" not in done.stderr


def lion(before: str, after: str) -> Any:
    """The class of docs/how/your-own-optimizer.md with a part of it changed."""
    assert before in LION
    named: dict[str, Any] = {}
    exec(LION.replace("@dataclass(frozen=True)", "@dataclass").replace(before, after), named)
    return named["Lion"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("float = 0.9\n", "float\n", "is not made with lr alone"),
        ("    lr: float\n", "", "is not made with lr alone"),
        ("def step(", "def stride(", "has no step"),
        ("Lion(ServerOptimizer)", "Lion", "is no subclass of ServerOptimizer"),
    ],
)
def test_a_class_that_cannot_be_one_is_refused_with_what_it_lacks(before: str, after: str, said: str) -> None:
    with pytest.raises(CodecError, match="'lion' is no server optimizer") as refused:
        optimizers.admit("lion", lion(before, after))
    assert said in refused.value.why
    assert "docs/how/your-own-optimizer.md" in refused.value.hint


def test_what_is_no_class_is_refused() -> None:
    for thing in (None, "lion", lambda lr: None):
        with pytest.raises(CodecError, match="'lion' is no server optimizer"):
            optimizers.admit("lion", thing)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("return params, {", "return {", "it gave dict, not (params, state)"),
        ("return params, {", "return params[1:], {", "no float32 vector of 3"),
        ("return params, {", "return params + 1.0 * np.ones(3), {", "no float32 vector of 3"),
        ('{"mean": (', '{"mean": 1, "second": (', "no dictionary of numpy arrays"),
    ],
)
def test_a_step_that_gives_no_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    monkeypatch.setitem(optimizers._named, "lion", lion(before, after))
    with pytest.raises(CodecError, match="the step of the server optimizer 'lion'") as refused:
        apply_optimizer(ServerSection(optimizer="lion"), np.ones(3, np.float32), np.ones(3, np.float32), {})
    assert said in refused.value.why


def test_it_gets_the_keys_of_the_plan_that_its_constructor_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizers._named, "lion", lion("lr: float", "lr: float"))
    given = server_optimizer(ServerSection(optimizer="lion", lr=0.5, momentum=0.25))
    assert (given.lr, given.momentum, given.beta2) == (0.5, 0.25, 0.99)  # type: ignore[attr-defined]  # of lion
    with pytest.raises(CodecError, match="tau with optimizer = 'lion'"):
        server_optimizer(ServerSection(optimizer="lion", tau=0.1))
