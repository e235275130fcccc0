"""`thinwire sim --sweep` and `thinwire runs compare`: from a grid of plans to a table, a CSV and a drawing."""

from __future__ import annotations

import csv
from xml.etree import ElementTree as ET

import pytest
import typer

from tests.simulation.test_sweep import TASK
from tests.support.cli_story import PLAN as STORY
from tests.support.cli_story import told
from thinwire.cli.runs.compare import Curve, svg
from thinwire.cli.sim import axes

PLAN = '[run]\ntask = "tiny"\nrounds = 2\nmetric = "accuracy"\n[local]\nlr = 0.1\nsteps = 1\n'


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_a_group_is_made_compared_and_drawn(thinwire, plan, home, tmp_path):
    words = ["sim", plan, "--clients", 2, "--sweep", "uplink.codec=identity|topk(0.5) > int8", "--sweep",
             "local.lr=0.05,0.1", "--seeds", 2, "--name", "codecs", "--json", "--home", home]  # fmt: skip
    made = thinwire(*words)
    assert made.code == 0
    assert (made.document["runs"], made.document["made"]) == (8, 8)
    assert "8/8" in made.err
    assert "local.lr=0.05" in made.err
    again = thinwire(*words)
    assert (again.code, again.document["made"]) == (0, 0)
    assert again.document["cells"] == made.document["cells"]

    listed = thinwire("runs", "list", "--home", home)
    assert "codecs" in listed.out
    assert "8/8" in listed.out
    (row,) = thinwire("runs", "list", "--json", "--home", home).document
    assert row == {"run_id": None, "group": "codecs", "task": "tiny", "status": "done", "done": 8, "runs": 8}

    backup, restored = tmp_path / "b.tar", tmp_path / "restored"
    assert thinwire("aggregator", "backup", backup, "--home", home).code == 0
    assert thinwire("aggregator", "restore", backup, "--home", restored).code == 0
    assert "8/8" in thinwire("runs", "list", "--home", restored).out

    table, drawing = tmp_path / "codecs.csv", tmp_path / "codecs.svg"
    assignment = ["runs", "compare", "--group", "codecs", "--to", "accuracy=0.01", "--home", home]
    found = thinwire(*assignment, "--csv", table, "--plot", drawing, "--json").document
    settings = [(row["local.lr"], row["uplink.codec"], row["runs"]) for row in found["rows"]]
    assert settings == [(lr, codec, 2) for lr in ("0.05", "0.1") for codec in ("identity", "topk(0.5) > int8")]
    assert all(row["reached"] == 2 and row["rounds_to"] == 1 for row in found["rows"])
    assert [row["uplink.codec"] for row in csv.DictReader(table.open())] == [r["uplink.codec"] for r in found["rows"]]
    assert ET.fromstring(drawing.read_text()).tag.endswith("svg")
    assert drawing.read_text().count("<polyline") == 4
    assert "2/2" in thinwire(*assignment).out
    assert "never" in thinwire("runs", "compare", "--group", "codecs", "--to", "accuracy=2", "--home", home).out
    mistyped = thinwire("runs", "compare", "--group", "codecs", "--to", "accurcy=0.01", "--home", home)
    said = "error: no run has a metric 'accurcy'\nwhy:   there is accuracy, loss\n"
    assert (mistyped.code, said in mistyped.err) == (2, True)


def test_a_plan_need_not_have_the_key_that_is_swept(thinwire, plan, home):
    plan.write_text(PLAN.replace("lr = 0.1\n", ""))
    made = thinwire("sim", plan, "--clients", 2, "--sweep", "local.lr=0.1,0.2", "--home", home, "--json")
    assert (made.code, made.document["made"]) == (0, 2)


def test_a_sweep_shows_the_error_of_a_task(thinwire, plan, home):
    made = thinwire("sim", plan, "--clients", 2, "--seeds", 2, "--set", "run.seed=99", "--home", home, "--json")
    assert made.code == 6
    assert "first failure: round 1: sim-0 task-error: KeyError" in made.err
    assert "about" in made.err


def test_stored_runs_are_compared_too(thinwire, plan, home):
    for codec in ("identity", "fp16"):
        thinwire("sim", plan, "--clients", 2, "--set", f"uplink.codec={codec}", "--home", home)
    found = thinwire("runs", "compare", "tiny-1", "tiny-2", "--json", "--home", home).document
    assert [row["uplink.codec"] for row in found["rows"]] == ["identity", "fp16"], "as they were named"
    assert found["rows"][1]["payload_up"] < found["rows"][0]["payload_up"]
    assert found["differs"]["uplink.codec"] == {"tiny-1": "identity", "tiny-2": "fp16"}
    assert found["metric"] == "accuracy", "it was measured, and the plan names nothing else"
    shown = thinwire("runs", "compare", "tiny-1", "tiny-2", "--home", home).out
    assert "±" not in shown
    header = shown.splitlines()[0].lower()
    assert header.index("accuracy") < header.index("payload up") < header.index("uplink.codec")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--sweep", "uplink.codec=identity|int8 > topk(0.1)"], 3, "topk(0.1) > int8"),
        (["--sweep", "uplink.codecs=identity"], 3, "codecs"),
        (["--sweep", "codec"], 2, "error: 'codec' has no values\nwhy:   --sweep section.key=A|B"),
        (["--sweep", "lr=0.1,0.2"], 3, "--sweep local.lr=0.1, or --sweep server.lr=0.1"),
        (["--sweep", "local.lr=0.1", "--sweep", "local.lr=0.2"], 2, "twice"),
        (["--sweep", "run.seed=1,2"], 2, "--seeds"),
        (["--sweep", "run.task=tiny|other"], 2, "tasks are not swept"),
        (["--sweep", "local.lr=0.1", "--set", "local.lr=0.2"], 2, "local.lr has a --set and a --sweep"),
        (["--sweep", "local.lr=0.1", "--set", "local.steps=0"], 3, "--set local.steps=0"),
        (["--seeds", "2", "--name", "../x"], 2, "group"),
        (["--seeds", "2", "--debug"], 2, "--debug"),
        (["--workers", "2"], 2, "--workers"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_run(thinwire, plan, home, words, code, said):
    answer = thinwire("sim", plan, "--clients", 2, *words, "--home", home)
    assert answer.code == code
    assert said in answer.err
    assert not list(home.rglob("*.json"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--group", "none"], 9),
        ([], 2),
        (["tiny-1", "--group", "codecs"], 2),
        (["--group", "codecs", "--to", "accuracy"], 2),
        (["--group", "codecs", "--to", "accuracy=nan"], 2),
        (["--group", "codecs", "--plot", "x.png"], 2),
    ],
)
def test_what_cannot_be_compared_is_refused(thinwire, home, words, code):
    assert thinwire("runs", "compare", *words, "--home", home).code == code


def test_values_stand_apart_by_bars_or_by_commas_outside_of_brackets():
    assert axes(["uplink.codec=qsgd(4, l2),int8"]) == {"uplink.codec": ["qsgd(4, l2)", "int8"]}
    assert axes(['uplink.ladder=["fp16", "qsgd(4, l2)"], []']) == {"uplink.ladder": ['["fp16", "qsgd(4, l2)"]', "[]"]}
    assert axes(["a.b=1|2,3"]) == {"a.b": ["1", "2,3"]}
    with pytest.raises(typer.BadParameter):
        axes(["a.b=1,,2"])


def test_a_drawing_of_nothing_is_still_a_drawing():
    for curves in ([], [Curve("<never>", [])], [Curve("one", [(10.0, 0.5, 0.0)])]):
        assert ET.fromstring(svg(curves, "bytes", "accuracy", 0.9)).tag.endswith("svg")


def test_stored_runs_have_a_row_each_and_those_that_were_stopped_stand_apart(thinwire, home):
    def found(*ids):
        return thinwire("runs", "compare", *ids, "--json", "--home", home).document

    one, other, stopped = (
        told(home),
        told(home, plan=STORY.replace("rounds = 2", "rounds = 2\nseed = 2")),
        told(home, "stopped", 10),
    )
    both = found(one, other)["rows"]
    assert [(row["run"], row["run.seed"], row["status"]) for row in both] == [(one, "0", "done"), (other, "2", "done")]
    with_stopped = found(one, stopped)
    assert [row["run"] for row in with_stopped["rows"]] == [one]
    assert [(row["run"], row["status"], row["stopped"]) for row in with_stopped["apart"]] == [(stopped, "stopped", 1)]
    assert [row["run"] for row in found(one, told(home))["rows"]] == ["toy-1", "toy-4"]
    assert [row["run"] for row in found(one, one)["rows"]] == [one]
    for run_id, row in zip((one, other), both, strict=True):
        whole = thinwire("runs", "show", run_id, "--json", "--home", home).document
        assert {key: row[key] for key in (*BYTES, "metrics")} == {key: whole[key] for key in (*BYTES, "metrics")}
        assert row["seconds"] == pytest.approx(sum(one["seconds"] for one in whole["rounds"]))
    shown = thinwire("runs", "compare", one, stopped, "--home", home)
    before, after = shown.out.split(stopped)
    assert one in before
    assert "stopped" in after
    assert "stopped or failed: " in shown.err


BYTES = ("payload_up", "payload_down", "wire_up", "wire_down")


@pytest.mark.parametrize("option", ["--mbps", "--rtt-ms"])
def test_no_link_is_added_to_a_run_on_devices_whose_seconds_have_the_time_on_theirs(thinwire, home, option):
    simulated, run_id = told(home, source="sim"), told(home)
    assert thinwire("runs", "compare", simulated, option, 5, "--home", home).code == 0
    refused = thinwire("runs", "compare", simulated, run_id, option, 5, "--home", home)
    assert refused.code == 2
    assert f"error: the time on a link is not added to {run_id}\nwhy:   a run on devices" in refused.err
    assert "try:   leave out --mbps and --rtt-ms" in refused.err


def test_stored_simulations_of_other_seeds_have_a_row_each(thinwire, plan, home):
    for clients, seed, split in ((2, 1, "iid"), (3, 2, "iid"), (2, 3, "shards(1)")):
        words = ("--clients", clients, "--split", split, "--set", f"run.seed={seed}")
        thinwire("sim", plan, *words, "--home", home)
    assignment = ("runs", "compare", "tiny-1", "tiny-2", "tiny-3", "--home", home)
    rows = thinwire(*assignment, "--json").document["rows"]
    assert {row["run"]: (row["clients"], row["runs"]) for row in rows} == {
        "tiny-1": ("2", 1), "tiny-2": ("3", 1), "tiny-3": ("2", 1)
    }  # fmt: skip
    assert "±" not in thinwire(*assignment).out


SAMPLED = """
[run]
task = "toy"
rounds = 2
evaluate = "off"
[local]
lr = 0.5
steps = 1
buffers = "local"
[cohort]
deadline_s = 60
late = "drop"
[privacy]
mode = "central"
clip = 1.0
noise_multiplier = 1.0
sampling_rate = 0.5
"""


def test_a_run_with_poisson_sampling_shows_no_bytes_instead_of_none_sent(thinwire, home, tmp_path):
    run_id = told(home, plan=SAMPLED)
    compared = thinwire("runs", "compare", run_id, "--csv", table := tmp_path / "t.csv", "--home", home)
    listed, shown = (thinwire("runs", verb, "--home", home) for verb in ("list", "show"))
    for said in (compared, listed, shown):
        assert (said.code, " 0 B" in said.out) == (0, False), said.out + said.err
    (row,) = csv.DictReader(table.open())
    assert (row["payload_up"], row["payload_down"], row["ratio_up"]) == ("", "", "")
    names = [*BYTES, "dense_up", "dense_down"]
    (row,) = thinwire("runs", "compare", run_id, "--json", "--home", home).document["rows"]
    assert {row[name] for name in names} == {None}
    (row,) = thinwire("runs", "list", "--json", "--home", home).document
    assert {row[name] for name in (*names, "late", "dropped", "failed")} == {None}
    whole = thinwire("runs", "show", "--json", "--home", home).document
    assert {whole[name] for name in names} == {None}
    assert {one[name] for one in whole["rounds"] for name in (*BYTES, "payload_bytes", "late", "failed")} == {None}


def test_the_ticks_of_a_drawing_span_its_values_and_the_curve_lies_where_they_say() -> None:
    drawn = ET.fromstring(svg([Curve("one", [(10.0, 0.2, 0.0), (1000.0, 0.8, 0.0)])], "bytes", "accuracy", 0.5))
    space = "{http://www.w3.org/2000/svg}"
    texts = [one for one in drawn.iter(f"{space}text") if one.get("text-anchor") == "end"]
    ticks = [(float(one.text or "nan"), float(one.get("y", "nan")) - 4) for one in texts]
    values = [value for value, _ in ticks]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.17, 0.83), "five percent of room on either side"

    def height(value: float) -> float:
        (low, bottom), (high, top) = ticks[0], ticks[-1]
        return bottom + (value - low) / (high - low) * (top - bottom)

    [line] = drawn.iter(f"{space}polyline")
    found = [float(point.split(",")[1]) for point in (line.get("points") or "").split()]
    assert found == pytest.approx([height(0.2), height(0.8)], abs=0.5)
    target = next(one for one in drawn.iter(f"{space}line") if one.get("stroke-dasharray") == "5 4")
    assert float(target.get("y1", "nan")) == pytest.approx(height(0.5), abs=0.5)
