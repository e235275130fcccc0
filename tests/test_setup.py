"""`make setup` shows that it works: what it is about to install, and at a terminal the progress of pip."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = """#!/bin/sh
echo "pip: $*" >&2
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A folder that is a virtual environment to make, with a Python that only prints what it is called with."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    return tmp_path / "venv"


def setup(venv: Path, stderr: int, *given: str) -> subprocess.Popen[bytes]:
    command: Sequence[str] = ["make", "setup", f"VENV={venv}", *given]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr)


def at_a_terminal(venv: Path, *given: str) -> list[str]:
    """What a person at a terminal sees of it on stderr."""
    ours, theirs = pty.openpty()
    process = setup(venv, theirs, *given)
    os.close(theirs)
    seen = b""
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # Linux reports the end of a terminal so
            break
        if not more:
            break
        seen += more
    os.close(ours)
    assert process.communicate(timeout=60)[0]
    assert process.returncode == 0, seen
    return seen.decode().splitlines()


def test_a_person_sees_what_is_installed_how_large_it_is_and_the_progress_of_pip(venv: Path) -> None:
    said, *calls = at_a_terminal(venv)
    assert said == f"installing Thinwire and torch into {venv}: 300 MB to load, 1.3 GB on the disk, one to five minutes"
    assert [line for line in calls if line.startswith("pip: -m pip install")]
    assert not [line for line in calls if "-q" in line.split()]


def test_a_log_gets_the_same_line_and_no_bars_of_progress(venv: Path) -> None:
    process = setup(venv, subprocess.PIPE, "TORCH_INDEX=https://index.example/cpu")
    out, err = (text.decode() for text in process.communicate(timeout=60))
    said, *calls = err.splitlines()
    assert process.returncode == 0
    assert said.startswith(f"installing Thinwire and torch into {venv}: 300 MB")
    assert len(calls) == 2, "torch from its index, and all else"
    assert all(line.startswith("pip: -m pip install -q ") for line in calls)
    assert out.endswith("(then: thinwire demo, or thinwire init mine)\n")


def test_a_second_call_installs_nothing_and_names_what_is_next(venv: Path) -> None:
    at_a_terminal(venv)
    process = setup(venv, subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.decode().startswith(f"{venv} is ready; next, in this shell: . {venv}/bin/activate")
