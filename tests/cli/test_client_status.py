"""`thinwire client status` and `logs`: what a device's owner is told."""

from __future__ import annotations

import json
import time

from thinwire.client.calls import ClientStatus
from thinwire.core.statedir import client_home, hold


def test_a_client_that_runs_says_since_when_and_what_it_keeps(thinwire, home):
    folder, now = client_home(home, "pi-03"), time.time()
    ClientStatus("working", now, now - 7200, "digits-7", 4, 3, "cannot reach it", now - 100, 86_400.0).save(folder)
    (folder / "runs" / "digits-7").mkdir(parents=True)
    (folder / "runs" / "digits-7" / "state.json").write_text(json.dumps({"outbox": [{}, {}]}))
    with hold(folder / "lock", {"aggregator": "https://agg.example:9090"}):
        (row,) = thinwire("client", "status", "--json", "--home", home).document
        said = thinwire("client", "status", "--home", home).out
    told = {"name": "pi-03", "running": True, "state": "working", "run": "digits-7", "round": 4, "pending": 2}
    assert told.items() <= row.items()
    assert (row["skew_s"], row["last_error"], row["aggregator"]) == (
        86_400,
        "cannot reach it",
        "https://agg.example:9090",
    )
    for word in ("2 h", "digits-7", "cannot reach it", "24 h behind the aggregator's"):
        assert word in said


def test_what_a_client_was_doing_when_it_was_killed_is_not_taken_for_now(thinwire, home):
    folder = client_home(home, "pi-03")
    ClientStatus("working", 1.0, 1.0, "digits-7", 4).save(folder)
    with hold(folder / "lock", {}):
        pass
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert (row["state"], row["connected_at"], row["run"]) == ("stopped", None, "digits-7")


def test_logs_of_a_client_that_said_nothing_are_empty(thinwire, home):
    client_home(home, "pi-03")
    said = thinwire("client", "logs", "--name", "pi-03", "--home", home)
    assert (said.code, said.out, "client.log" in said.err) == (0, "", True)
