"""`thinwire runs show --why` of a run with more rounds than it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.page.recipe import Recipe, fill
from thinwire.cli.main import main
from thinwire.cli.runs.commands import EXPLAINED
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store

ROUNDS = EXPLAINED + 5


def show(capsys: pytest.CaptureFixture[str], home: Path, *more: str) -> tuple[str, str]:
    assert main(["runs", "show", "--why", "--home", str(home), *more]) in (0, None)
    said = capsys.readouterr()
    return said.out, said.err


def test_it_explains_the_newest_rounds_one_round_or_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = AggregatorHome.under(tmp_path)
    with Store.open(home.database, durable=False) as store:
        fill(store, Recipe("long", ROUNDS, known=6, selected=4))
    text, said = show(capsys, tmp_path)
    assert f"{ROUNDS} rounds took " in text, "the sums are of all rounds"
    assert text.count("\nRound ") == EXPLAINED - 1, "and one is open"
    assert "Round 6 took " not in text and "Round 7 took " in text
    assert "not shown: rounds 1 to 6; --round N explains one, --json all of them" in said
    text, _ = show(capsys, tmp_path, "--round", "3")
    assert "1 round took " in text and text.count("\nRound 3 took ") == 1
    made = json.loads(show(capsys, tmp_path, "--json")[0])
    assert [one["round"] for one in made["rounds_why"]] == list(range(1, ROUNDS + 1))
    assert made["why"]["sentence"].startswith(f"{ROUNDS} rounds took ")
