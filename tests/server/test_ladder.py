"""The ladder: more compressed at once, less compressed with patience, decoded by what each was selected in, and the
same after a resume.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.server_bench import FAILS, Bench, drive_through, killed, scripted
from thinwire.aggregation import codecs
from thinwire.core import RunPlan
from thinwire.core.events import ClientSelected, RoundOpened, UpdateAccepted, UpdateDropped
from thinwire.core.types import Assignment
from thinwire.reports.reason_text import deadline_sentence, sentence
from thinwire.server.policy.assignment_terms import (
    DEADLINE_SHARE,
    FITTING_ROUNDS,
    LadderState,
    auto_deadline,
    choose_rung,
    fixed,
)
from thinwire.simulation import Behavior, Script

LADDER = ["identity", "int8", "topk(0.05) > int8"]
LEAST, MIDDLE, MOST = LADDER


@pytest.mark.parametrize(
    ("expected", "before", "after", "reason"),
    [
        ([None, None, None], None, LadderState(MOST), "its link is not known yet"),
        ([None, None, None], LadderState(MIDDLE, LEAST, 1), LadderState(MIDDLE, LEAST, 1), "its link is not known yet"),
        ([9.0, 3.0, 1.0], None, LadderState(LEAST), "9.0 s fit into 9.0 s"),
        ([9.1, 3.0, 1.0], None, LadderState(MIDDLE), "3.0 s fit into 9.0 s; identity would take 9.1 s"),
        ([50.0, 20.0, 9.5], None, LadderState(MOST), "even that takes 9.5 s, 9.0 s are left"),
        ([5.0, 2.0, 1.0], LadderState(MOST), LadderState(MIDDLE), "2.0 s fit into 9.0 s; identity may be next"),
        ([5.0, 2.0, 1.0], LadderState(MIDDLE), LadderState(LEAST), "5.0 s fit into 9.0 s"),
        ([50.0, 20.0, 5.0], LadderState(LEAST), LadderState(MOST, "", 0), "5.0 s fit into 9.0 s"),
        ([50.0, 20.0, 15.0], LadderState(LEAST), LadderState(MOST, "", 0), "even that takes 15.0 s"),
        (
            [5.0, 2.0, 1.0],
            LadderState(MOST, "", 0),
            LadderState(MOST, LEAST, 1),
            "(5.0 s of 9.0 s), and did for 0 of 3",
        ),
        ([10.0, 2.0, 1.0], LadderState(MOST, LEAST, 2), LadderState(MOST, MIDDLE, 3), "int8 would fit"),
        ([5.0, 2.0, 1.0], LadderState(MOST, MIDDLE, 3), LadderState(MIDDLE), "2.0 s fit into 9.0 s"),
        (
            [5.0, 2.0, 1.0],
            LadderState(MOST, LEAST, 3),
            LadderState(MIDDLE),
            "2.0 s fit into 9.0 s; identity may be next",
        ),
        ([50.0, 20.0, 5.0], LadderState(MOST, MIDDLE, 2), LadderState(MOST, "", 0), "int8 would take 20.0 s"),
        ([50.0, 20.0, 5.0], LadderState(MOST), LadderState(MOST), "int8 would take 20.0 s"),
    ],
)
def test_a_choice_and_its_reason(
    expected: list[float | None], before: LadderState | None, after: LadderState, reason: str
) -> None:
    choice = choose_rung(LADDER, expected, 9.0, before)
    assert choice.position == after
    assert reason in sentence(choice.reasons)


falling = st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3).map(lambda times: sorted(times, reverse=True))


@settings(deadline=None)
@given(st.lists(falling, min_size=1, max_size=20), st.floats(1.0, 100.0))
def test_nobody_is_selected_in_what_does_not_fit_while_something_does(
    rounds: list[list[float]], deadline: float
) -> None:
    position: LadderState | None = None
    fitted: list[int] | None = None  # since it was made more compressed
    for expected in rounds:
        fits = next((i for i, seconds in enumerate(expected) if seconds <= DEADLINE_SHARE * deadline), len(LADDER) - 1)
        before, position = position, choose_rung(LADDER, expected, DEADLINE_SHARE * deadline, position).position
        now, was = LADDER.index(position.codec), LADDER.index(before.codec) if before else len(LADDER)
        assert now >= fits, "never less compressed than what fits"
        if now > was:
            fitted = []
        elif now < was and fitted is not None:
            assert len(fitted) >= FITTING_ROUNDS and max(fitted[-FITTING_ROUNDS:]) <= now, "only after rounds that fit"
            fitted = None
        elif fitted is not None:
            fitted.append(fits)


def test_a_ladder_under_an_automatic_deadline_makes_a_round_half_a_second_longer_at_the_most() -> None:
    times = {"thin": [90.0, 40.0, 12.0], "broad": [11.0, 5.0, 2.0]}
    deadline = auto_deadline({device: own[-1] for device, own in times.items()}, wanted=2)
    assert (deadline.seconds, deadline.fits_s, fixed(30.0).fits_s) == (36.0, 12.5, 27.0)
    chosen = {device: choose_rung(LADDER, own, deadline.fits_s, None).position.codec for device, own in times.items()}
    assert chosen == {"thin": MOST, "broad": LEAST}


def seconds(**of: float) -> dict[str, float]:
    return dict(zip(LADDER, (of["mild"], of["middle"], of["harsh"]), strict=True))


SLOW = seconds(mild=150.0, middle=38.0, harsh=5.0)


def sending(seconds: float) -> Behavior:
    return Behavior(compute_s=0.0, upload_s=seconds)


def by_codec(assignment: Assignment) -> Behavior:
    return sending(SLOW[assignment.codec])


def bench(folder: Path, slow: Script, rounds: int = 7) -> Bench:
    uplink, cohort = {"ladder": LADDER}, {"deadline_s": 30, "min_updates": 2}
    quick = [scripted(name, lambda assignment: sending(0.1)) for name in "ab"]
    return Bench(folder, [*quick, scripted("slow", slow)], run={"rounds": rounds}, uplink=uplink, cohort=cohort)


def test_a_slow_client_alone_is_selected_in_the_more_compressed_codec_and_the_reason_is_told(tmp_path: Path) -> None:
    made = bench(tmp_path, by_codec)
    assert made.drive().status == "done"
    opened = made.events(RoundOpened)
    assert set(opened[0].codecs.values()) == {MOST}
    assert sentence(opened[0].codec_reasons["a"]) == "its link is not known yet"
    assert opened[1].codecs == {"a": MIDDLE, "b": MIDDLE, "slow": MOST}, "less compressed by one a round"
    assert all(round_.codecs == {"a": LEAST, "b": LEAST, "slow": MOST} for round_ in opened[2:5])
    assert all(round_.codec == LEAST for round_ in opened[2:5]), "what most were selected in"
    assert "s fit into 27.0 s; int8 would take" in sentence(opened[2].codec_reasons["slow"])
    assert made.reasons() == ["all"] * 7, "nobody was late"
    assert made.events(UpdateDropped) == [], "each was decoded by its own codec"
    row = made.store.rounds(made.run_id)[1]
    assert row.codecs["slow"] == MOST and row.codec_reasons == opened[1].codec_reasons
    assert deadline_sentence(row.deadline_s, row.deadline_reason) == "30 s: set by the plan"


def test_who_was_too_slow_is_selected_less_compressed_again_only_after_three_rounds_that_would_have_fitted(
    tmp_path: Path,
) -> None:
    made = bench(tmp_path, lambda assignment: sending(28.0 if assignment.round in (4, 5) else 0.1), rounds=26)
    made.drive()
    assigned = [round_.codecs["slow"] for round_ in made.events(RoundOpened)]
    told = [sentence(round_.codec_reasons["slow"]) for round_ in made.events(RoundOpened)]
    assert assigned[:5] == [MOST, MIDDLE, LEAST, LEAST, LEAST], "one answer that hung is passed over"
    assert assigned[5] != LEAST, "two are believed"
    rungs = [LADDER.index(codec) for codec in assigned]
    less_compressed = next(i for i in range(6, len(rungs)) if rungs[i] < rungs[i - 1])
    assert [f"did for {n} of 3 rounds" in told[less_compressed - 3 + n] for n in range(3)] == [True] * 3
    assert assigned[-1] == LEAST


def test_a_late_answer_is_decoded_by_the_codec_of_its_assignment_and_so_after_a_kill(tmp_path: Path) -> None:
    def script(assignment: Assignment) -> Behavior:
        return sending(30.05 if assignment.round == 2 else 0.1)

    undisturbed = bench(tmp_path / "undisturbed", script)
    places = drive_through(undisturbed)
    late = [event for event in undisturbed.events(UpdateAccepted) if event.late]
    opened = {round_.round: round_ for round_ in undisturbed.events(RoundOpened)}
    assert [(event.assignment_round, event.round) for event in late] == [(2, 3)]
    assert opened[2].codecs["slow"] == MIDDLE and undisturbed.events(UpdateDropped) == []

    def check(made: Bench, where: str) -> None:
        assert made.events(UpdateDropped) == [], where

    killed(lambda folder: bench(folder, script), tmp_path, places, check, slice(4, None, 4))


def test_a_resumed_run_decides_as_one_that_nobody_killed(tmp_path: Path) -> None:
    def decided(made: Bench) -> list[object]:
        return [
            (e.codecs, e.codec_reasons, {d: tuple(s) for d, s in e.standings.items()}, e.deadline_s, e.deadline_reason)
            for e in made.events(RoundOpened)
        ]

    def script(assignment: Assignment) -> Behavior:
        return sending(SLOW[assignment.codec] / (1 if assignment.round < 4 else 20))

    undisturbed = bench(tmp_path / "undisturbed", script)
    places = drive_through(undisturbed)

    def check(made: Bench, where: str) -> None:
        assert decided(made) == decided(undisturbed), where

    killed(lambda folder: bench(folder, script), tmp_path, places, check, slice(3, None, 4))


def test_a_device_selected_in_the_place_of_another_is_selected_in_its_own_codec(tmp_path: Path) -> None:
    def fails(assignment: Assignment) -> Behavior:
        return FAILS if assignment.round == 4 else by_codec(assignment)

    made = Bench(
        tmp_path, [scripted("a", fails), scripted("b", fails), scripted("c", by_codec)],
        run={"rounds": 5}, uplink={"ladder": LADDER}, cohort={"clients": 2, "deadline_s": 30, "min_updates": 1},
    )  # fmt: skip
    made.drive()
    replacements = {event.assignment_id: event.codec for event in made.events(ClientSelected) if event.why}
    assert replacements and set(replacements.values()) == {MOST}
    assert all(event.codec_reason for event in made.events(ClientSelected) if event.why)
    assert {e.assignment.codec for e in made.fleet.sent if e.assignment.assignment_id in replacements} == {MOST}
    row = made.store.rounds(made.run_id)[3]
    assert row.codecs.keys() == row.codec_reasons.keys() == set(row.selected)


OVERHEAD_S = 0.1  # of any upload: what little is sent is no sign of a thin link


def over(bits_s: float) -> Script:
    """A device whose uploads take what their bytes take, and some time that any of them does."""
    return lambda assignment: sending(OVERHEAD_S + 8 * made_bytes(assignment.codec) / bits_s)


def made_bytes(codec: str) -> float:
    return {LEAST: 2500.0, MIDDLE: 650.0, MOST: 100.0}[codec]


def under_auto(folder: Path, *scripts: Script, **cohort: object) -> Bench:
    devices = [scripted(name, script) for name, script in zip("abc", scripts, strict=True)]
    return Bench(folder, devices, run={"rounds": 12}, uplink={"ladder": LADDER}, cohort={"min_updates": 1, **cohort})


def test_equal_devices_on_good_links_are_selected_in_the_least_compressed_codec_under_an_automatic_deadline(
    tmp_path: Path,
) -> None:
    made = under_auto(tmp_path, *[over(1e8)] * 3)
    made.drive()
    assigned = [set(opened.codecs.values()) for opened in made.events(RoundOpened)]
    assert assigned == [{MOST}, {MIDDLE}, *[{LEAST}] * 10]


def test_who_is_selected_in_the_place_of_another_makes_the_round_no_longer_than_others_would(tmp_path: Path) -> None:
    """c was never too slow for a less compressed codec, so that no patience keeps it in its own."""

    def fails(assignment: Assignment) -> Behavior:
        return FAILS if assignment.round >= 8 else over(1e8)(assignment)

    made = under_auto(tmp_path, fails, fails, over(570), clients=2)
    made.drive()
    assigned = [event for event in made.events(ClientSelected) if event.why and event.device == "c"]
    assert assigned and {event.codec for event in assigned} == {MOST}, "in the others 9 s and more would be left to it"


PLAN = '[run]\ntask = "d"\n[local]\nlr = 1\nsteps = 1\nclip_grad = 1.0\n[uplink]\n{}\n[cohort]\n{}'


@pytest.mark.parametrize(
    ("uplink", "cohort", "what"),
    [
        ('ladder = ["int8"]', "", "has one codec"),
        ('ladder = ["topk(0.01)", "int8"]', "", "'int8' behind 'topk(0.01)'"),
        ('ladder = ["int8", "int8"]', "", "'int8' behind 'int8'"),
        ('ladder = ["fp16", "nothing(3)"]', "", "nothing"),
        ('ladder = ["fp16", "topk(0.01)"]\nwarmup = {rounds = 2, ratios = [0.5]}', "", "ladder with a warmup"),
        ('codec = "sign"\nladder = ["fp16", "topk(0.01)"]', "", "beside a ladder"),
        ('ladder = ["fp16", "dgc(0.01)"]', "", "dgc in a ladder"),
        ('ladder = ["fp16", "topk(0.01)"]', 'mode = "buffered"', "ladder with mode"),
    ],
)  # fmt: skip
def test_what_cannot_hold_with_a_ladder_is_refused(uplink: str, cohort: str, what: str) -> None:
    found = RunPlan.parse(PLAN.format(uplink, cohort)).check(codecs)
    assert any(what in refusal.what for refusal in found), found
    assert all(refusal.why or refusal.hint for refusal in found)


def test_a_plan_with_a_ladder_holds() -> None:
    assert (
        RunPlan.parse(PLAN.format('ladder = ["fp16", "topk(0.1) > int8", "topk(0.01) > sign"]', "")).check(codecs) == []
    )
