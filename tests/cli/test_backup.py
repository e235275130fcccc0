"""`thinwire aggregator backup` and `restore`: there and back, and what they refuse."""

from __future__ import annotations

import pytest

from tests.support.cli_story import LAYOUT, PLAN, told
from thinwire.core import RunPlan
from thinwire.core.fleet import TaskReport
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.store import Store

PRIVACY = '\n[privacy]\nmode = "central"\nclip = 1.0\nnoise_multiplier = 1.0\nsampling_rate = 0.5\n'


def test_a_backup_becomes_another_home(thinwire, home, tmp_path):
    run_id, file, there = told(home), tmp_path / "b.tar", tmp_path / "there"
    said = thinwire("aggregator", "backup", file, "--json", "--home", home)
    assert (said.document["file"], said.document["bytes"]) == (str(file), file.stat().st_size)
    assert said.document["files"] > 1
    said = thinwire("aggregator", "restore", file, "--home", there)
    assert (said.code, f"aggregator start --home {there}" in said.out) == (0, True), said.err
    shown = [thinwire("runs", "show", run_id, "--json", "--home", place).document for place in (home, there)]
    assert shown[0] == shown[1]
    model = tmp_path / "model.safetensors"
    assert thinwire("runs", "model", run_id, "--out", model, "--home", there).code == 0


def test_a_backup_names_the_certificate_and_key_that_are_not_in_it(thinwire, home, tmp_path):
    told(home)
    options = {"listen": "0.0.0.0:9090", "cert": "tls/agg.pem", "key": "/etc/agg.key"}
    StartOptions(options, tmp_path).save(AggregatorHome.under(home).root)
    said = thinwire("aggregator", "backup", tmp_path / "a.tar", "--home", home)
    assert said.code == 0
    assert f"not in it, since they are yours (--cert, --key, --ca): {tmp_path}/tls/agg.pem, /etc/agg.key;" in said.err
    said = thinwire("aggregator", "backup", tmp_path / "b.tar", "--json", "--home", home)
    assert said.document["not_in_it"] == [f"{tmp_path}/tls/agg.pem", "/etc/agg.key"]


@pytest.mark.parametrize("options", [{"listen": "0.0.0.0:9090", "san": ["agg"]}, {"of_another_version": True}])
def test_a_backup_that_lacks_nothing_says_nothing_of_it(thinwire, home, tmp_path, options):
    told(home)
    StartOptions(options, tmp_path).save(AggregatorHome.under(home).root)
    said = thinwire("aggregator", "backup", tmp_path / "a.tar", "--home", home)
    assert (said.code, "not in it" in said.err) == (0, False)


def test_what_is_there_is_moved_aside_only_by_force(thinwire, home, tmp_path):
    told(home)
    file = tmp_path / "b.tar"
    assert thinwire("aggregator", "backup", file, "--home", home).code == 0
    assert thinwire("aggregator", "backup", file, "--home", home).code == 2
    said = thinwire("aggregator", "restore", file, "--home", home)
    assert (said.code, "--force" in said.err) == (2, True)
    said = thinwire("aggregator", "restore", file, "--force", "--json", "--home", home)
    replaced = said.document["replaced"]
    assert replaced.startswith(f"{home / 'aggregator'}.before-restore-")
    StartOptions({"listen": "10.0.0.7:9090", "san": ["agg"]}).save(AggregatorHome.under(home).root)
    said = thinwire("aggregator", "restore", file, "--force", "--home", home)
    assert f"go on: thinwire aggregator start --listen 10.0.0.7:9090 --san agg --home {home}\n" in said.out
    assert AggregatorHome(home / "aggregator").database.exists()


@pytest.mark.parametrize(
    ("privacy", "source", "is_said"),
    [(PRIVACY, "devices", True), (PRIVACY, "sim", False), ("", "devices", False)],
    ids=["private", "private simulation", "without privacy"],
)
def test_a_restore_says_that_private_rounds_wait_also_before_the_first_one(
    thinwire, home, tmp_path, privacy, source, is_said
):
    """Rounds that were made since the backup are in no ledger then."""
    with Store.open(AggregatorHome.under(home).database) as store:
        store.create_run("toy", RunPlan.parse(PLAN + privacy), LAYOUT, TaskReport("toy"), source=source)
    thinwire("aggregator", "backup", tmp_path / "b.tar", "--home", home)
    said = thinwire("aggregator", "restore", tmp_path / "b.tar", "--force", "--home", home)
    note = f"private rounds wait until a person has settled what was spent since: thinwire privacy ledger --home {home}"
    assert (said.code, note in said.err) == (0, is_said)


def test_nothing_is_restored_under_a_running_aggregator(thinwire, home, tmp_path):
    told(home)
    thinwire("aggregator", "backup", tmp_path / "b.tar", "--home", home)
    with hold(AggregatorHome.under(home).lock, {}):
        said = thinwire("aggregator", "restore", tmp_path / "b.tar", "--force", "--home", home)
    assert (said.code, "in use by process" in said.err) == (1, True)


def test_a_damaged_backup_is_8_and_a_missing_one_9(thinwire, home, tmp_path):
    told(home)
    file = tmp_path / "b.tar"
    thinwire("aggregator", "backup", file, "--home", home)
    file.write_bytes(file.read_bytes()[:5000])
    assert thinwire("aggregator", "restore", file, "--home", tmp_path / "there").code == 8
    assert thinwire("aggregator", "restore", tmp_path / "none", "--home", tmp_path / "there").code == 9
    assert thinwire("aggregator", "backup", tmp_path / "c.tar", "--home", tmp_path / "there").code == 9
    assert thinwire("aggregator", "backup", tmp_path / "none" / "c.tar", "--home", home).code == 2
