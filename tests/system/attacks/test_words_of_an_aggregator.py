"""What an aggregator's plan says is quoted to the device's owner: as words, in one line, in whatever terminal."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_task import Aggregator, plan_of, task_of
from thinwire.cli.main import main
from thinwire.client.errors import LAST_ERROR
from thinwire.core.log_file import LOG_FILE, Logbook

EVIL = "\x1b[2J\x1b]0;owned\x07\nerror: look at http://evil"
TWICE = f'layers("{EVIL}"=int8; "{EVIL}"=int8; *=int8)'


@pytest.mark.parametrize("changed", [{EVIL: 1}, {"run": {EVIL: 1}}, {"downlink": {"codec": TWICE}}], ids=str)
def test_a_plan_moves_no_cursor_and_forges_no_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    aggregator, lines = Aggregator(tmp_path / "far", task_of(), plan_of()), list[str]()
    delivery, handler = aggregator.assign(), aggregator.handler(tmp_path / "device")
    raw = aggregator.plan.to_json()
    for name, value in changed.items():
        raw[name] = {**raw[name], **value} if name in raw else value
    bad = dataclasses.replace(delivery, assignment=dataclasses.replace(delivery.assignment, plan=raw), bundle=None)
    reply, _ = handler.handle(bad, lambda: False, Logbook(tmp_path, lines.append))
    assert type(reply).__name__ == "Failure"
    kept = (tmp_path / LOG_FILE).read_text()
    last = tmp_path / "device" / LAST_ERROR
    for text in ("\n".join(lines), kept, last.read_text() if last.exists() else ""):
        assert all(line.isprintable() for line in text.split("\n")), ascii(text)
    if "downlink" not in changed:  # of a defect the whole traceback is said, which has lines of its own
        assert len(lines) == 1 and "\n" not in lines[0]


def test_letters_that_a_terminal_does_not_have_end_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that could not print what its aggregator calls a run would end there."""
    folder = tmp_path / "clients" / "pi-1"
    folder.mkdir(parents=True)
    (folder / LOG_FILE).write_text("2026-01-01T00:00:00Z \u6f22-1: assignment for the task '\u6f22'\n")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="latin-1", write_through=True))
    assert main(["client", "logs", "--name", "pi-1", "--home", str(tmp_path)]) == 0
    assert b"\\u6f22-1: assignment" in out.getvalue()
