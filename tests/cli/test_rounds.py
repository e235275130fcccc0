"""A run as lines: one a round, when its model was measured or will not be."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from tests.support.cli_story import T, evaluated, round_events
from tests.support.reasons import noted
from thinwire.cli.runs.progress import Teller, screen
from thinwire.core.events import (
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Event,
    RoundClosed,
    RunNoted,
    RunStatusChanged,
    StateLost,
)


def told(*events: Event) -> tuple[Teller, list[str]]:
    teller = Teller(headed=True)
    return teller, [line for event in events for line in teller.hear(event)]


def test_a_round_is_told_when_its_model_was_measured():
    teller, lines = told(*round_events("toy-1", 1))
    assert lines == []
    (line,) = teller.hear(evaluated(1))
    assert line.split() == ["1", "deadline", "1/2", "0.6000", "1.0000", "42", "B", "1.50", "waits", "for", "pi-02"]


def test_the_header_stands_over_the_first_round_and_below_what_came_before_it():
    teller = Teller()
    assert teller.hear(RunNoted(T, noted("a note"))) == ["a note"]
    teller.hear(RunStatusChanged(T, "waiting", "waiting: 1 of 2 devices"))
    assert [line for event in round_events("toy-1", 1) for line in teller.hear(event)] == []
    header, row = teller.hear(evaluated(1))
    assert (header.split()[:2], row.split()[:2]) == (["round", "closed"], ["1", "deadline"])
    lines = [line for event in round_events("toy-1", 2) for line in teller.hear(event)] + teller.hear(evaluated(2))
    assert [line.split()[0] for line in lines] == ["2"]


def test_what_happens_after_a_round_has_closed_is_told_behind_its_line():
    teller, lines = told(*round_events("toy-1", 1), round_events("toy-1", 2)[1])
    lines += [*teller.then(["pi-02 is killed"]), *teller.then([])]
    assert lines == []
    assert [line.split()[0] for line in teller.hear(evaluated(1))] == ["1", "pi-02"]
    assert teller.then(["pi-02 is started again"]) == ["pi-02 is started again"], "no line waits any more"


def test_a_round_that_is_not_measured_is_told_when_the_next_one_closes():
    _, lines = told(*round_events("toy-1", 1), *round_events("toy-1", 2))
    assert [line.split()[:5] for line in lines] == [["1", "deadline", "1/2", "-", "-"]]


def test_the_line_of_a_buffer_waits_for_the_answers_that_measure_its_model():
    teller, lines = told(*(replace_reason(event) for number in (1, 2, 3) for event in round_events("toy-1", number)))
    assert lines == []
    lines = [*teller.hear(evaluated(1)), *teller.hear(evaluated(2))]
    assert [line.split()[:4] for line in lines] == [["1", "buffer", "1/2", "0.6000"], ["2", "buffer", "1/2", "0.7000"]]


def test_the_line_of_a_round_with_one_ahead_waits_for_the_round_that_measures_its_model():
    one, two, three = (round_events("toy-1", number) for number in (1, 2, 3))
    teller, lines = told(*one[:-1], two[1], one[-1], three[1], *two[2:])
    assert lines == []
    assert [line.split()[:4] for line in teller.hear(evaluated(1))] == [["1", "deadline", "1/2", "0.6000"]]
    last = [line for event in three[2:] for line in teller.hear(event)]
    assert [line.split()[:4] for line in last] == [["2", "deadline", "1/2", "-"]], "nobody begins from its model"


def test_a_note_is_told_as_it_is():
    assert told(RunNoted(T, noted("fewer devices than the buffer holds")))[1] == ["fewer devices than the buffer holds"]


def replace_reason(event: Event) -> Event:
    return replace(event, reason="buffer") if isinstance(event, RoundClosed) else event


def test_the_end_of_a_run_tells_what_was_left():
    teller, lines = told(*round_events("toy-1", 1), RunStatusChanged(T, "stopped", "stopped by a person", 10))
    assert len(lines) == 1
    assert (teller.over, teller.exit_code) == (True, 10)


def test_failures_stand_beside_their_round():
    failed = ClientFailed(T, 1, "pi-02", "assignment", "task-error", "ValueError at task.py:7", 1.0)
    events = round_events("toy-1", 1)
    _, lines = told(*events[:-1], failed, replace(failed, device="pi-03"), events[-1], evaluated(1))
    assert lines[0] == "pi-02 task-error: ValueError at task.py:7", "once for all that say so"
    assert lines[1].endswith("pi-02 task-error; pi-03 task-error")
    assert len(lines) == 2


def test_who_was_at_work_when_the_run_ended_is_not_said_to_have_failed():
    over = ClientFailed(T, 1, "pi-02", "assignment", "over", "no answer was taken before the run's end", 1.0)
    _, lines = told(*round_events("toy-1", 1), over, RunStatusChanged(T, "done", "1 round"))
    assert lines[0].endswith("waits for pi-02")


def test_a_device_that_left_and_came_back_was_away():
    left = ClientFailed(T, 1, "pi-02", "assignment", "offline", "its connection is closed", 1.0)
    events = round_events("toy-1", 1)
    _, lines = told(*events[:-1], left, ClientReconnected(T, 1, "pi-02", "assignment", 1.2), events[-1], evaluated(1))
    assert lines[0].endswith("pi-02 was offline")


def test_a_device_that_began_again_stands_beside_its_round():
    events = round_events("toy-1", 1)
    _, lines = told(*events[:-1], StateLost(T, 1, "pi-02", "toy-1/pi-02/9", "older"), events[-1], evaluated(1))
    assert lines[0].endswith("pi-02 began again: its state was older")


def test_while_a_round_is_open_its_replies_are_counted():
    teller, _ = told(*round_events("toy-1", 1)[:3])
    assert teller.now == "round 1: 1 of 2 replies"


def test_where_rounds_are_quick_the_one_before_says_that_devices_reply():
    teller, _ = told(*round_events("toy-1", 1), *round_events("toy-1", 2)[:2])
    assert teller.now == "round 2: 0 of 2 replies (round 1: 1 of 2 in 1.5 s)"


@pytest.mark.parametrize("text", ["waiting: 3 of 8 devices (missing pi-04; pi-07 has no task 'ecg')"])
def test_a_waiting_run_says_for_whom(text):
    teller, _ = told(RunStatusChanged(T, "waiting", text))
    assert teller.now == text


def test_a_live_sentence_loses_no_word_that_looks_like_markup(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with screen() as (_, show):
        show("assignments 2, and [cohort] min_updates = 3")
    assert "assignments 2, and [cohort] min_updates = 3" in terminal.getvalue()


def test_who_was_selected_instead_of_whom_stands_beside_the_round():
    since = ClientSelected(T, 1, "pi-03", "assignment", 42, 1.0, 0, 30.0, noted("why"), "pi-02")
    events = round_events("toy-1", 1)
    _, lines = told(*events[:-1], since, events[-1], evaluated(1))
    assert "1/3" in lines[0]
    assert lines[0].endswith("pi-03 instead of pi-02")
