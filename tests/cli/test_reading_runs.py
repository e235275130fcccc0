"""`thinwire runs` and `devices` over what an aggregator left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cli_story import PLAN, T, evaluated, round_events, told
from tests.support.reasons import noted
from tests.support.store_story import dropped, header, opened
from thinwire.cli.runs.render import on_the_wire
from thinwire.core.events import (
    ClientFailed,
    ClientSelected,
    DropReason,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunNoted,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
)
from thinwire.core.formatting import Reason
from thinwire.core.statedir import AggregatorHome
from thinwire.store import MeasureRow, Store


def test_before_anything_was_run_there_is_an_empty_list(thinwire, home):
    home.mkdir()
    assert thinwire("runs", "list", "--home", home).code == 0
    assert thinwire("runs", "list", "--json", "--home", home).document == []
    assert thinwire("devices", "list", "--json", "--home", home).document == []


@pytest.mark.parametrize("noun", ["runs", "devices"])
def test_a_home_that_does_not_exist_has_no_list(thinwire, tmp_path, noun):
    said = thinwire(noun, "list", "--home", tmp_path / "typo")
    assert (said.code, said.out, f"there is no folder {tmp_path / 'typo'}" in said.err) == (9, "", True)


def test_runs_are_listed(thinwire, home):
    told(home)
    (row,) = thinwire("runs", "list", "--json", "--home", home).document
    assert (row["run_id"], row["status"], row["rounds_closed"]) == ("toy-1", "done", 2)
    assert "toy-1  done" in thinwire("runs", "list", "--home", home).out


def test_that_nobody_goes_on_with_a_run_is_said(thinwire, home):
    told(home, status="running")
    for words in (("list",), ("show", "toy"), ("show", "toy", "--why")):
        said = thinwire("runs", *words, "--home", home).err
        assert f"no aggregator is running; to go on with toy-1: thinwire aggregator start --home {home}" in said


def test_nothing_is_said_of_an_aggregator_where_no_run_waits_for_one(thinwire, home):
    told(home)
    assert "aggregator" not in thinwire("runs", "list", "--home", home).err


def test_a_run_is_shown_round_by_round(thinwire, home):
    told(home)
    found = thinwire("runs", "show", "latest", "--json", "--home", home).document
    assert (found["run_id"], found["task"], found["status"]) == ("toy-1", "toy", "done")
    assert len(found["model_digest"]) == 64
    first = found["rounds"][0]
    assert (first["round"], first["reason"], first["selected"]) == (1, "deadline", ["pi-01", "pi-02"])
    assert first["aggregated"] == ["toy-1/pi-01/1"]
    assert (first["late"], first["failed"], first["seconds"]) == (0, 0, 1.5)
    assert first["payload_bytes"] == 42
    assert first["wire_bytes"] is None
    assert first["metrics"] == {"accuracy": 0.6, "loss": 1.0}
    assert "deadline" in thinwire("runs", "show", "toy", "--home", home).out


def test_an_open_round_shows_who_has_answered_so_far(thinwire, home):
    run_id = told(home, status="running")
    with Store.open(AggregatorHome.under(home).database) as store:
        events = round_events(run_id, 3)
        store.record(run_id, [event for event in events if not isinstance(event, RoundClosed | UpdateAggregated)])
        (line,) = (line for line in thinwire("runs", "show", "--home", home).out.splitlines() if " open " in line)
        assert line.split()[:3] == ["3", "open", "1/2"], "it waits for its turn to be aggregated"
        store.record(run_id, [event for event in events if isinstance(event, UpdateAggregated)])
    (line,) = (line for line in thinwire("runs", "show", "--home", home).out.splitlines() if " open " in line)
    assert line.split()[:3] == ["3", "open", "1/2"]


def test_dropped_updates_and_failed_assignments_are_counted_by_client_with_the_last_reason(thinwire, home):
    run_id = told(home, status="running")
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record(run_id, [
            *opened(run_id, 3, ("pi-01", "pi-02")), dropped(header(run_id, 3, "pi-01"), 3, "late"),
            ClientFailed(T + 5, 3, "pi-02", f"{run_id}.3.pi-02", "memory", "needs 2 GB", 5.0),
        ])  # fmt: skip
    said = " ".join(thinwire("runs", "show", "--home", home).out.split())
    assert "pi-01: updates dropped: 1, the last of round 3: late: it came after its round's deadline or close" in said
    assert "pi-02: assignments failed:" in said
    assert "of round 3: memory: needs 2 GB" in said


def test_drops_are_counted_for_each_reason(thinwire, home):
    run_id = told(home, status="running")
    with Store.open(AggregatorHome.under(home).database) as store:
        reasons: tuple[DropReason, ...] = ("late", "stale", "late")
        for number, reason in enumerate(reasons, 3):
            store.record(run_id, [*opened(run_id, number), dropped(header(run_id, number, "pi-01"), number, reason)])
    said = " ".join(thinwire("runs", "show", "--home", home).out.split())
    assert "pi-01: updates dropped: 3 (2 late, 1 stale), the last of round 5: late" in said


def test_of_rounds_that_are_selected_ahead_the_one_whose_answers_are_taken_is_told(thinwire, home):
    run_id = told(home, status="running", plan=PLAN.replace("rounds = 2", "rounds = 6"))
    with Store.open(AggregatorHome.under(home).database) as store:
        for number in (3, 4):
            (opened,) = (event for event in round_events(run_id, number) if isinstance(event, RoundOpened))
            store.record(run_id, [replace(opened, deadline_s=10.0 * number, deadline_reason=noted("as long as ever"))])
    shown = thinwire("runs", "show", "--home", home).out
    assert shown.startswith("toy-1  running: round 3, step 3 of 6; round 4 was selected ahead\n")
    assert "round 3 may take 30 s" in shown
    assert "round 4 may take" not in shown


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (None, "- on the wire"),
        (1_250_000, "1.25 MB on the wire"),
        (1_090_000, "1.09 MB counted on the wire (an assignment is counted with its update)"),
    ],
)
def test_fewer_bytes_on_the_wire_than_in_frames_are_said_to_be_a_part(wire, said):
    assert on_the_wire(wire, 1_150_000) == said


def test_rounds_without_a_step_are_counted_beside_those_of_the_plan(thinwire, home):
    told(home, "failed", steps=False)
    assert thinwire("runs", "show", "--home", home).out.startswith("toy-1  failed: 2 rounds, and 2 without a step\n")


def test_bytes_stand_beside_dense_ones_only_where_they_are_fewer(thinwire, home):
    run_id = told(home)
    row = thinwire("runs", "show", "toy", "--json", "--home", home).document
    assert row["payload_up"] > row["dense_up"] > 0, "a frame has a header, and this model has nine numbers"
    assert "times less" not in thinwire("runs", "show", "toy", "--home", home).out
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record(run_id, [ClientSelected(T, 2, "pi-03", f"{run_id}.2.pi-03", 12)])
    lines = thinwire("runs", "show", "toy", "--home", home).out.splitlines()
    assert [line for line in lines if "times less" in line] == [
        "down    12 B payload, - on the wire, 3.0 times less than dense float32"
    ]


def test_what_a_run_has_to_say_stands_below_its_name(thinwire, home):
    run_id = told(home)
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record(run_id, [RunNoted(T, noted("fewer devices than the buffer holds"))])
    assert "note    fewer devices than the buffer holds" in thinwire("runs", "show", "toy", "--home", home).out
    assert thinwire("runs", "show", "toy", "--json", "--home", home).document["notes"] == [
        "fewer devices than the buffer holds"
    ]


def test_bytes_that_evaluated_the_model_of_an_end_are_in_no_round(thinwire, home):
    run_id = told(home)
    extended = Reason("extended", {"who": "ann", "was": 1, "rounds": 2, "first": 2, "before": "the same"})
    for event, models in (
        (replace(evaluated(2), payload_bytes=12), "the last model"),
        (RunNoted(T, [extended]), "the last model, once at each end of the run"),
    ):
        with Store.open(AggregatorHome.under(home).database) as store:
            store.record(run_id, [event])
        shown = thinwire("runs", "show", "toy", "--home", home).out
        assert f"        12 B of it evaluated {models}, and is in no round\n" in shown


def test_how_a_round_was_drawn_is_said(thinwire, home):
    run_id = told(home)
    with Store.open(AggregatorHome.under(home).database) as store:
        (opened,) = (event for event in round_events(run_id, 3) if isinstance(event, RoundOpened))
        drawn = noted("sampled by speed")
        store.record(run_id, [replace(opened, sampling=drawn)])
    assert "round 3 was sampled by speed\n" in thinwire("runs", "show", "toy", "--home", home).out
    rounds = thinwire("runs", "show", "toy", "--json", "--home", home).document["rounds"]
    assert [one["sampling"][:5] for one in rounds] == ["", "", "sampl"]


def test_metrics_stand_beside_the_version_that_they_are_of(thinwire, home):
    run_id = told(home)
    assert "metrics accuracy 0.7000, loss 0.5000 of version 2\n" in thinwire("runs", "show", "--home", home).out
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record(run_id, [*round_events(run_id, 3), ModelStored(T + 3, 3, "d" * 64, "v000003.model", [], {})])
    shown = thinwire("runs", "show", "--home", home).out
    assert "version 3, digest dddd" in shown
    assert "metrics accuracy 0.7000, loss 0.5000 of version 2\n" in shown
    found = thinwire("runs", "show", "--json", "--home", home).document
    assert (found["version"], found["measured_version"]) == (3, 2)


def test_how_long_a_round_may_take_is_said_as_long_as_it_goes_on(thinwire, home):
    run_id = told(home, "running")

    def said(*events):
        with Store.open(AggregatorHome.under(home).database) as store:
            store.record(run_id, events)
        return thinwire("runs", "show", "--home", home).out.splitlines()[-2:]

    opened, *_, closed = round_events(run_id, 3)[1:]
    assert isinstance(opened, RoundOpened)
    opened = replace(opened, codecs={"pi-01": "int8"}, codec_reasons={"pi-01": noted("its link carries it")})
    opened = replace(opened, deadline_s=10.0, deadline_reason=noted("the plan says so"))
    assert said(opened) == [
        "round 3 may take 10 s: the plan says so",
        "  pi-01 is assigned int8: its link carries it",
    ]
    assert said(closed)[1] == "  pi-01 was assigned int8: its link carries it"
    assert "may take" not in "".join(said())
    assert "may take" in said(replace(opened, round=4))[0]
    assert "may take" not in "".join(said(RunStatusChanged(T + 9, "stopped", "stopped by a person", 10)))


def test_a_run_that_waits_for_its_turn_says_behind_which(thinwire, home):
    told(home, "running")
    second = told(home, "queued")
    assert (
        f"{second}  waiting in the queue behind toy-1, which is running\n"
        in thinwire("runs", "show", second, "--home", home).out
    )
    with Store.open(AggregatorHome.under(home).database) as store:
        waits = RunStatusChanged(T + 10, "waiting", "waiting: 1 of 2 devices (missing pi-02)")
        store.record("toy-1", [waits])
    shown = thinwire("runs", "show", second, "--home", home).out
    assert "behind toy-1, which is waiting: 1 of 2 devices (missing pi-02)\n" in shown
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record("toy-1", [RunStatusChanged(T + 11, "done", "2 rounds")])
    assert f"{second}  queued: 2 rounds\n" in thinwire("runs", "show", second, "--home", home).out


def test_who_waits_behind_several_runs_hears_of_the_others_too(thinwire, home):
    told(home, "running")
    ids = [told(home, "queued") for _ in range(3)]

    def said(run_id: str) -> str:
        return str(thinwire("runs", "show", run_id, "--home", home).out.splitlines()[0])

    assert said(ids[1]) == "toy-3  waiting in the queue behind toy-1 and toy-2; toy-1 is running"
    assert said(ids[2]) == "toy-4  waiting in the queue behind toy-1 and 2 more; toy-1 is running"


def test_a_simulation_that_was_killed_before_it_began_waits_behind_no_run(thinwire, home):
    told(home, "running")
    simulated = told(home, "queued", source="sim")
    assert f"{simulated}  queued: 2 rounds\n" in thinwire("runs", "show", simulated, "--home", home).out


def test_long_sentences_are_no_wider_than_the_terminal(thinwire, home, monkeypatch):
    run_id = told(home)
    with Store.open(AggregatorHome.under(home).database) as store:
        store.record(run_id, [RunNoted(T, noted("a note of many words " * 5))])
    monkeypatch.setattr("thinwire.cli.console.terminal_columns", lambda: 60)
    for more in ((), ("--why",)):
        lines = thinwire("runs", "show", *more, "--home", home).out.splitlines()
        assert max(map(len, lines)) <= 60
        at = next(i for i, line in enumerate(lines) if line.startswith("note    a note"))
        assert lines[at + 1].startswith("        ")


def test_a_run_says_where_its_time_went(thinwire, home):
    told(home)
    shown = thinwire("runs", "show", "toy", "--why", "--home", home).out
    assert "2 rounds took 3.0 s" in shown
    assert "Round 1 took 1.5 s: 1 of 2 had not replied when its deadline of" in shown
    found = thinwire("runs", "show", "toy", "--why", "--json", "--home", home).document
    assert [one["round"] for one in found["rounds_why"]] == [1, 2]
    assert found["why"]["seconds"] == 3.0
    assert "why" not in thinwire("runs", "show", "toy", "--json", "--home", home).document


def test_the_requests_of_a_run_stand_beside_their_round_trip(thinwire, home):
    run_id = told(home)
    with Store.open(AggregatorHome.under(home).database) as store:
        events = [event for event in round_events(run_id, 3) if not isinstance(event, RoundClosed)]
        closed = RoundClosed(
            T + 9, 3, "all", 3, [f"{run_id}/pi-01/3"], [], [], 2.0, 6.0, {}, {"aggregate_s": 0.1}, "pi-01"
        )
        assigned = [ClientSelected(T + 3, 3, device, f"{run_id}.3.{device}", 42) for device in ("pi-01", "pi-02")]
        (accepted,) = (event for event in events if isinstance(event, UpdateAccepted))
        moments = {"pulled_at": T + 3, "began_at": T + 5, "arrived_at": T + 5.5, "requests": 4}
        lost = ClientFailed(T + 9, 3, "pi-02", f"{run_id}.3.pi-02", "offline", "no request for 3 s", 2.0)
        store.record(
            run_id,
            [*(one for one in events if one is not accepted), *assigned,
             replace(accepted, header={**accepted.header, "transfer": moments}), lost, closed],
            [MeasureRow("pi-01", "rtt", "", [[1.0, 0.3]], 0.3, 0.4, T)],
        )  # fmt: skip
    shown = thinwire("runs", "show", "toy", "--why", "--home", home).out
    (row,) = (line for line in shown.splitlines() if line.strip().startswith("3 ") and " x " in line)
    assert row.rstrip().endswith("pi-01    4 x 300 ms = 1.2 s  pi-02")
    assert "Round 3 took 6.0 s: waited 3.4 s for pi-02, which was lost." in shown
    found = thinwire("runs", "show", "toy", "--why", "--json", "--home", home).document["rounds_why"][2]
    assert (found["requests"], found["rtt_s"], found["trips_s"], found["waited_for"]) == (4, 0.3, 1.2, ["pi-02"])


def test_watching_a_run_that_is_over_ends_with_its_exit_code(thinwire, home):
    told(home, "stopped", 10)
    assert thinwire("runs", "watch", "latest", "--home", home).code == 10


def test_stopping_a_run_that_is_over_changes_nothing(thinwire, home):
    told(home)
    said = thinwire("runs", "stop", "toy-1", "--json", "--home", home)
    assert said.document == {"run_id": "toy-1", "status": "done", "was_over": True}
    said = thinwire("runs", "stop", "toy-1", "--home", home)
    assert "toy-1 done: " in said.out
    assert "it was over already: nothing was stopped" in said.err


def test_a_stop_without_an_aggregator_is_kept_as_a_command(thinwire, home, monkeypatch):
    monkeypatch.setattr("thinwire.cli.runs.run_commands.WAIT_S", 0.0)
    told(home, "running")
    assert "as soon as" in thinwire("runs", "stop", "toy-1", "--home", home).out
    with Store.open(AggregatorHome.under(home).database) as store:
        assert [(command.kind, command.run_id) for command in store.commands.pending()] == [("stop-run", "toy-1")]
