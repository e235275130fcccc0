"""Secure runs as `runs show` prints them, and as their progress is told."""

from __future__ import annotations

from tests.support.secure_story import ABORTED, DEVICES, SecureStory, four_rounds
from thinwire.cli.runs.progress import Teller
from thinwire.core.events import RoundOpened, RunStatusChanged
from thinwire.core.run_events import PhaseClosed


def test_the_phases_of_the_open_round_and_the_protection_are_shown(thinwire, home, store):
    four_rounds(store)
    said = thinwire("runs", "show", "--home", home).out
    assert "up to 3 of 10 clients colluding; a sum holds at least 6 clients" in said
    assert "Not protected: " in said
    assert "149 kB of it are keys, shares and signatures" in said
    assert "version 2 has no metrics yet: evaluated by the next round's sum" in said
    lines = [line.split() for line in said.partition("phases of round 4\n")[2].splitlines()]
    assert lines[0] == ["PHASE", "CLIENTS", "DROPPED", "OUT", "BYTES", "SECONDS"]
    assert lines[1][:3] == ["advertise", "9", "pi-02"]
    assert lines[1][-3:] == ["3.74", "kB", "0.40"]
    assert lines[3] == ["masked", "-", "-", "-", "open"]


def test_one_round_is_shown_with_who_dropped_out_in_which_phase_and_its_sum(thinwire, home, store):
    four_rounds(store)
    said = thinwire("runs", "show", "digits", "--round", 2, "--home", home).out
    phases = {line.split()[0]: line for line in said.partition("phases of round 2\n")[2].splitlines()}
    assert "pi-03 (withdrew: policy)" in phases["share"]
    assert "pi-07 (its round ended before its update was there)" in phases["masked"]
    assert phases["agree"].split()[:3] == ["agree", "7", "pi-09"]
    assert "sum of 8 clients, weight 8, norm 0.75; clip 2, 1.5 in the next round" in said
    assert [line.split()[0] for line in said.partition("ROUND")[2].splitlines()[1:2]] == ["2"]
    why = thinwire("runs", "show", "--round", 3, "--why", "--home", home).out
    assert "waiting for masked vectors of pi-01 and 4 more until its deadline" in why
    assert "Round 2" not in why


def test_the_slowest_is_the_one_that_why_names(thinwire, home, store):
    four_rounds(store)
    said = thinwire("runs", "show", "--home", home).out
    assert [line.split()[-1] for line in said.splitlines() if line.startswith(("    1 ", "    2 "))] == ["pi-10"] * 2
    assert "the last came from pi-10" in thinwire("runs", "show", "--why", "--home", home).out


def test_the_reason_of_an_aborted_round_is_shown(thinwire, home, store):
    story = four_rounds(store)
    story.play(reason="aborted")
    said = " ".join(thinwire("runs", "show", "--home", home).out.split())
    assert f"rounds closed as aborted: 1, the last was round 5: {ABORTED}" in said
    details = [one["detail"] for one in thinwire("runs", "show", "--json", "--home", home).document["rounds"]]
    assert details == ["", "", "", "", ABORTED]


def test_a_device_that_is_unable_to_take_part_is_shown_with_the_reason(thinwire, home, store):
    old = "cannot sum under masks: it is no Thinwire client of this version (install the latest on it)"
    SecureStory(store, unable={"old-1": old}).play()
    said = " ".join(thinwire("runs", "show", "--home", home).out.split())
    assert f"round 1 did not select old-1: {old}" in said


def test_a_round_that_was_not_opened_is_refused(thinwire, home, store):
    four_rounds(store)
    refused = thinwire("runs", "show", "--round", 9, "--home", home)
    assert refused.code != 0
    assert refused.err.startswith("error: digits-1 has no round 9\nwhy:   it has opened 4\n")
    assert refused.err.endswith("try:   thinwire runs show digits-1 --round 4 --home " + f"{home}\n")


def test_the_document_has_phases_sums_and_the_protection_and_no_time_of_a_device(thinwire, home, store):
    four_rounds(store)
    found = thinwire("runs", "show", "--json", "--home", home).document
    assert found["protection"]["min_survivors"] == 6
    assert found["not_evaluated"].endswith("evaluated by the next round's sum")
    second = found["rounds"][1]
    assert [(one["phase"], one["received"]) for one in second["phases"]] == [
        ("advertise", 10), ("share", 9), ("masked", 8), ("agree", 7), ("unmask", 7),
    ]  # fmt: skip
    assert second["phases"][3]["dropped"] == {"pi-09": ""}
    assert second["secure_sum"]["survivors"] == 8
    (only,) = thinwire("runs", "show", "--round", 1, "--json", "--home", home).document["rounds"]
    assert only["round"] == 1


def test_the_smallest_round_decides_the_protection_that_is_shown(thinwire, home, store):
    story = SecureStory(store, devices=DEVICES[:6])
    story.play(least=4)
    story.devices = DEVICES
    story.play()
    assert "up to 1 of 6 clients colluding" in thinwire("runs", "show", "--home", home).out
    assert thinwire("runs", "show", "--json", "--home", home).document["protection"]["min_survivors"] == 4


def test_the_progress_names_the_open_phase_and_why_the_last_line_has_no_metrics(store):
    story = SecureStory(store)
    story.play()
    story.play()
    teller, lines, now = Teller(), list[str](), list[str]()
    for _, event in store.events(story.run_id):
        lines += teller.hear(event)
        if isinstance(event, RoundOpened | PhaseClosed) and event.round == 1:
            now.append(teller.now)
    lines += teller.hear(RunStatusChanged(story.at, "done", "2 rounds"))
    assert now[:3] == [
        "round 1: 0 of 10 replies", "round 1: 0 of 10 replies, phase share", "round 1: 0 of 10 replies, phase masked",
    ]  # fmt: skip
    assert now[3:5] == ["round 1: 10 of 10 replies, phase agree", "round 1: 10 of 10 replies, phase unmask"]
    first, second = (line for line in lines if line.strip()[0].isdigit())
    assert first.split() == ["1", "all", "10/10", "0.6000", "1.0000", "1.26", "MB", "6.80"]
    assert second.split()[:5] == ["2", "all", "10/10", "-", "-"]
    assert second.endswith("only a next round's sum would evaluate it")
