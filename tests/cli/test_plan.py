"""`thinwire plan`: write a plan, check it, explain it, and show in which keys two plans differ."""

from __future__ import annotations


def test_a_plan_that_was_written_is_valid_and_is_not_overwritten(thinwire, tmp_path):
    file = tmp_path / "plan.toml"
    assert thinwire("plan", "new", file, "--task", "digits", "--lr", "0.5").code == 0
    assert file.read_text() == '[run]\ntask = "digits"\n\n[local]\nlr = 0.5\n'
    assert thinwire("plan", "check", file).code == 0
    again = thinwire("plan", "new", file)
    assert (again.code, f"{file} exists" in again.err) == (2, True)
    assert thinwire("plan", "new").out == '[run]\ntask = "mine"\n\n[local]\nlr = 0.1\n'


def test_two_plans_are_compared_by_their_keys_also_where_one_names_a_default(thinwire, tmp_path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('[run]\ntask = "digits"\n[local]\nlr = 0.5\n')
    other.write_text('[run]\ntask = "digits"\nrounds = 7\n[local]\nlr = 0.5\nmomentum = 0.0\n')
    assert thinwire("plan", "diff", one, other, "--json").document == {"[run] rounds": [20, 7]}
    assert "[run] rounds" in thinwire("plan", "diff", one, other).out
    assert "the plans are equal" in thinwire("plan", "diff", one, one).err


def test_a_run_in_place_of_a_plan_is_told_where_its_plan_is(thinwire):
    said = thinwire("plan", "explain", "digits-1")
    assert said.code == 3
    assert said.err.splitlines() == [
        "error: cannot read the plan digits-1",
        "why:   a plan is a TOML file, and there is no such file",
        "try:   thinwire init DIR writes one; the plan of a run: thinwire runs show ID --json",
    ]
