"""Groups of simulated runs: files that are whole or not there, and what they come to side by side."""

from __future__ import annotations

import dataclasses

import pytest

from thinwire.core import RunPlan
from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.reports.comparison import Link, compare, curve, figures, reached
from thinwire.reports.sweep_results import CellRound, Trial, TrialSpec, TrialStore, groups


def cell(codec: str = "int8", seed: int = 1, values: tuple[float, ...] = (0.5, 0.8, 0.9), up: int = 100) -> Trial:
    plan = RunPlan.parse(f'[run]\ntask="toy"\nseed={seed}\n[local]\nlr=1\n[uplink]\ncodec="{codec}"')
    made = TrialSpec(plan.to_json(), 4, "iid", "", "digest")
    rounds = [CellRound("all", 4, 2.0, up, 1000, {"accuracy": value, "loss": 1 - value}) for value in values]
    return Trial(made, "done", "", 0, 10, rounds[-1].metrics, {}, 4000, 4000, rounds)


def test_a_cell_comes_back_as_it_was_kept(tmp_path):
    cells, one = TrialStore.named(tmp_path, "codecs"), cell()
    cells.keep(one)
    cells.keep(one)
    assert cells.found() == {one.made.digest: one}


def test_bytes_down_are_those_of_the_whole_run_with_its_last_measuring(tmp_path):
    whole = dataclasses.replace(cell(), payload_down=3500)
    TrialStore.named(tmp_path, "codecs").keep(whole)
    (found,) = TrialStore.named(tmp_path, "codecs").found().values()
    (row,) = compare([found], "accuracy", None)
    assert figures(row)["payload_down"] == 3500
    (older,) = compare([cell()], "accuracy", None)
    assert figures(older)["payload_down"] == 3000


def test_groups_say_how_many_of_all_that_was_requested_are_over(tmp_path):
    assert groups(tmp_path / "none") == []
    first, second, third = (cell(seed=seed) for seed in (1, 2, 3))
    codecs, rates = TrialStore.named(tmp_path, "codecs"), TrialStore.named(tmp_path, "rates")
    codecs.request([first.made.digest, second.made.digest])
    codecs.request([second.made.digest, third.made.digest])
    codecs.keep(first)
    rates.keep(first)
    rates.keep(second)
    found = {group.name: (group.task, group.done, group.runs) for group in groups(tmp_path)}
    assert found == {"codecs": ("toy", 1, 3), "rates": ("toy", 2, 2)}
    assert codecs.found().keys() == {first.made.digest}, "what was requested is no cell"


def test_what_a_run_is_made_of_names_it():
    one = cell().made
    others = [cell(seed=2).made, cell("fp16").made, *(
        dataclasses.replace(one, **change)
        for change in (
            {"clients": 5}, {"split": "by(label)"}, {"data": "x"}, {"task_digest": "y"}, {"code_digest": "y"},
        )
    )]  # fmt: skip
    assert len({one.digest, *(other.digest for other in others)}) == 8
    assert cell().made.digest == one.digest


def test_a_group_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    TrialStore.named(tmp_path, "codecs").keep(cell())
    with pytest.raises(NotFound) as caught:
        TrialStore.named(tmp_path, "codec").found()
    assert "codecs" in caught.value.why


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "x" * 64])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(UsageError):
        TrialStore.named(tmp_path, name)


@pytest.mark.parametrize("spoil", [lambda text: text[:-20], lambda text: text.replace("iid", "x"), lambda _: "[]"])
def test_a_file_that_is_no_cell_is_named(tmp_path, spoil):
    cells, one = TrialStore.named(tmp_path, "codecs"), cell()
    cells.keep(one)
    path = cells.folder / f"{one.made.digest}.json"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(DataLost, match=path.name):
        cells.all()


def test_runs_that_differ_in_the_seed_are_one_row():
    rows = compare([cell(seed=1), cell(seed=2, values=(0.5, 0.7, 0.8)), cell("fp16", up=200)], "accuracy", 0.8)
    assert [row.settings for row in rows] == [{"uplink.codec": "fp16"}, {"uplink.codec": "int8"}]
    wide, thin = rows
    assert (thin.runs, thin.reached, wide.runs) == (2, 2, 1)
    assert thin.value is not None
    assert thin.value.mean == pytest.approx(0.85)
    assert thin.value.sd == pytest.approx(0.0707, abs=1e-4)
    assert thin.rounds_to is not None
    assert thin.rounds_to.mean == 2.5
    assert thin.up_to is not None
    assert thin.up_to.mean == 250
    assert wide.value is not None
    assert (wide.value.sd, figures(wide)["value_sd"]) == (None, None), "one run says nothing of a spread"
    assert wide.ratio_up == pytest.approx(4000 / 600)
    assert figures(wide)["seconds_to"] == 4.0
    assert [point[0] for point in curve(thin, "accuracy")] == [100, 200, 300]


def test_the_figures_of_a_setting_are_those_of_its_runs_that_are_done():
    failed = dataclasses.replace(cell(seed=3, values=(0.8,), up=900), status="failed")
    stopped = dataclasses.replace(cell(seed=4, values=(0.1, 0.1)), status="stopped")
    whole = [cell(seed=1), cell(seed=2)]
    (row,), (of_whole,) = (compare(cells, "accuracy", 0.8) for cells in ([*whole, failed, stopped], whole))
    assert (row.runs, row.failed, row.stopped, row.reached) == (4, 1, 1, 3)
    for name in ("value", "payload_up", "payload_down", "ratio_up", "seconds"):
        assert getattr(row, name) == getattr(of_whole, name), name
    assert curve(row, "accuracy") == curve(of_whole, "accuracy") != []
    (none_done,) = compare([failed], "accuracy", 0.8)
    assert (none_done.runs, none_done.value, none_done.payload_up, none_done.ratio_up) == (1, None, None, None)
    assert (none_done.seconds, none_done.reached, curve(none_done, "accuracy")) == (None, 1, [])


def test_runs_with_poisson_sampling_have_a_row_without_bytes():
    """The store has 0 for them: it keeps nothing that would tell how many clients were sampled."""
    private = {"privacy": {"mode": "central", "sampling_rate": 0.5}}
    sampled = [
        dataclasses.replace(one, made=dataclasses.replace(one.made, plan=one.made.plan | private), dense_up=0)
        for one in (cell(seed=1, up=0), cell(seed=2, up=0))
    ]
    (row,) = compare(sampled, "accuracy", 0.8)
    flat = figures(row)
    assert {flat[name] for name in ("payload_up", "payload_down", "ratio_up", "up_to", "down_to")} == {None}
    assert (flat["value"], flat["reached"], flat["seconds"], flat["seconds_to"]) == (0.9, 2, 6.0, 4.0)
    (on_link,) = compare(sampled, "accuracy", 0.8, Link(mbps=1.0))
    assert (on_link.seconds, on_link.seconds_to) == (None, None), "the time of bytes that are not shown"


def test_runs_before_and_after_a_change_of_the_code_are_two_rows():
    one = cell()
    changed = dataclasses.replace(one, made=dataclasses.replace(one.made, code_digest="y"))
    assert [row.settings for row in compare([one, changed], "accuracy", None)] == [
        {"code_digest": ""}, {"code_digest": "y"},
    ]  # fmt: skip


def test_the_number_of_clients_of_a_run_on_devices_varies():
    one = cell()
    on_devices = dataclasses.replace(one, made=dataclasses.replace(one.made, clients=0))
    assert [row.settings for row in compare([one, on_devices], "accuracy", None)] == [
        {"clients": "4"}, {"clients": "varies"},
    ]  # fmt: skip


def test_a_target_that_is_never_reached_has_no_figures():
    (row,) = compare([cell()], "accuracy", 0.95)
    assert (row.reached, row.up_to, row.seconds_to, figures(row)["rounds_to"]) == (0, None, None, None)


def test_a_loss_is_reached_from_above():
    found = reached(cell(), "loss", 0.2)
    assert found is not None
    assert (found.round, found.payload_up, found.payload_down) == (2, 200, 2000)


def test_a_link_adds_what_the_bytes_of_one_client_and_two_round_trips_take():
    found = reached(cell(), "accuracy", 0.8, Link(mbps=0.008, rtt_ms=500))
    assert found is not None
    assert found.seconds == pytest.approx(2 * (2.0 + 1100 / 4 / 1000 + 1.0))
