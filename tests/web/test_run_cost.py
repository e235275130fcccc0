"""What a read of a run's page costs: statements, rows and their ways to them, whatever the number of rounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from benchmarks.page.recipe import Recipe, Teller, fill
from thinwire.reports.comparison import POINTS
from thinwire.store import Store, queries
from thinwire.store.database import Row, as_row
from thinwire.web.run_queries import SHOWN_ROUNDS, Reader

WHOLE = re.compile(r"(SCAN|SEARCH) (rounds|updates|journal)\b(?!.* AND )")  # by no more than the run
ENDS_SOON = re.compile(r"SELECT (coalesce\()?max\(|\bLIMIT \?")
FEW, MANY = 70, 420  # rounds: both more than a page has, and one six times the other


@contextmanager
def counting(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the statements and the rows of each kind that are read meanwhile; no statement may scan a table of events,
    rounds or assignments.
    """
    read, engine = Counter[str](), store._database.engine
    done = list[tuple[str, Any]]()

    def noted(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        read["statements"] += 1
        done.append((statement, parameters[0] if isinstance(parameters, list) else parameters))

    def counted(kind: type[Row], values: Mapping[str, Any]) -> Row:
        read[kind.__name__] += 1
        return as_row(kind, values)

    with monkeypatch.context() as patched:
        patched.setattr(queries, "as_row", counted)
        event.listen(engine, "before_cursor_execute", noted)
        try:
            yield read
        finally:
            event.remove(engine, "before_cursor_execute", noted)
    with engine.connect() as connection:
        for statement, parameters in done:
            if re.match("SELECT|UPDATE|DELETE", statement):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
                assert not [row for row in plan if WHOLE.match(row[-1])] or ENDS_SOON.search(statement), statement


def reads(folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int) -> list[Counter[str]]:
    """The cost of a page's first read, of one after a reply, of one after a round, and of an early round."""
    with Store.open(folder / f"{rounds}.sqlite3", durable=False) as store:
        run = fill(store, Recipe("counted", rounds, known=8, selected=4))
        reader = Reader(store)
        with counting(store, monkeypatch) as first:
            view = reader.view(run.run_id, first_client=0)
        assert (view.whole, view.opened, len(view.rounds)) == (True, rounds + 1, SHOWN_ROUNDS)
        assert POINTS / 2 <= len(view.points) <= POINTS + 2 or len(view.points) == rounds
        with counting(store, monkeypatch):
            run.answer(run.assigned[2:3])
        with counting(store, monkeypatch) as reply:
            view = reader.view(run.run_id, view.change, 0, rounds + 1)
        assert not view.whole and len(view.rounds) == 1 and view.round is not None and len(view.round.updates) <= 1
        with counting(store, monkeypatch):
            run.answer(run.assigned[3:])
            run.close()
            run.open()
        with counting(store, monkeypatch) as closed:
            view = reader.view(run.run_id, view.change, 0, rounds + 1)
        assert [line.round for line in view.rounds if line.reason][-1] == rounds + 1
        with counting(store, monkeypatch) as early:
            reader.view(run.run_id, view.change, 7, rounds + 1)
            reader.round_summaries(run.run_id, 1, 50)
            list_rows = reader.runs()
        assert len(list_rows) == 1
        return [first, reply, closed, early]


def test_a_read_of_the_page_costs_the_same_after_six_times_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for share in ("LATE_SHARE", "FAILED_SHARE"):  # they are drawn, and a late reply adds a row to its round's
        monkeypatch.setattr(f"benchmarks.page.recipe.{share}", 0.0)
    few, many = (reads(tmp_path, monkeypatch, rounds) for rounds in (FEW, MANY))
    first_few, first_many = few.pop(0), many.pop(0)
    assert few == many
    points = first_few.pop("PointRow"), first_many.pop("PointRow")
    assert first_few == first_many and max(points) <= POINTS + 2
    assert all(one["statements"] < 60 for one in (*many, first_many)), "a constant, and not a large one"


def test_a_page_that_follows_a_run_knows_what_a_new_one_reads(tmp_path: Path):
    """`merge` of static/view.js, in Python: lines, points and assignments by their keys, the slowest rounds whole."""
    with Store.open(tmp_path / "store.sqlite3", durable=False) as store:
        run = Teller.begin(store, Recipe("followed", 9, known=6, selected=4))
        reader, change, held = Reader(store), 0, 0
        lines, updates, worst = dict[int, Any](), dict[str, Any](), list[Any]()
        for _ in range(9):
            first, rest = (lambda: run.answer(run.assigned[:2])), (lambda: run.answer(run.assigned[2:]))
            for act in (run.open, first, rest, run.close):
                act()
                view = reader.view(run.run_id, change, 0, held)
                assert view.round is not None
                if view.whole:
                    lines.clear()
                if view.round.whole:
                    updates.clear()
                lines |= {line.round: line for line in view.rounds}
                updates |= {one.assignment_id: one for one in view.round.updates}
                change, held, worst = view.change, view.round.round, worst if view.worst is None else view.worst
                new = Reader(store).view(run.run_id)
                assert new.round is not None
                assert {line.round: line for line in new.rounds} == lines
                assert new.worst == worst
                assert {one.assignment_id: one for one in new.round.updates} == updates
                assert new.run.model_copy(update={"now": 0.0}) == view.run.model_copy(update={"now": 0.0})
