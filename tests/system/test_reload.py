"""`thinwire client reload` on real processes: new code, a new policy, and a run that goes on with both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.processes import EXAMPLE, Site


def told(site: Site) -> dict[str, Any]:
    """What the one device said of itself last."""
    with site.store() as store:
        (device,) = store.devices()
    (task,) = device.tasks
    return {**task, "policy": device.hello["versions"].get("policy", "")}


def test_a_running_client_takes_over_new_code_and_a_new_policy(site: Site, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text((EXAMPLE / "task.py").read_text() + "\nprint('the first one')\n")
    site.start_aggregator()
    client = site.start(
        "client", "start", "--aggregator", f"http://{site.listen}", "--task", f"digits={task}", "--name", "pi-a"
    )
    site.until(lambda: "idle" in site.log_of(client))
    first = told(site)
    task.write_text(task.read_text() + "\n__version__ = '2.0'\nprint('the second one')\n")
    (site.home / "clients" / "pi-a" / "client.toml").write_text('[policy]\nkinds = ["train", "evaluate"]\n')
    done = site.typed("client", "reload", "--name", "pi-a")
    assert done.returncode == 0, done.stderr
    site.until(lambda: told(site)["version"] == "2.0")
    assert told(site)["source_digest"] != first["source_digest"]
    assert (first["policy"], bool(told(site)["policy"])) == ("", True)
    row = site.until_done(site.begin("run.rounds=2", "cohort.wait_for=1", "local.steps=5"))
    assert row.status == "done", site.said()
    printed = site.typed("client", "logs", "--name", "pi-a", "--worker").stdout.split("\n")
    assert printed.index("the first one") < printed.index("the second one")
    assert "importing the tasks again" in site.typed("client", "logs", "--name", "pi-a").stdout


def test_a_client_that_does_not_run_cannot_reload(site: Site) -> None:
    folder = site.home / "clients" / "pi-a"
    folder.mkdir(parents=True)
    (folder / "client.toml").touch()  # of a client that was here
    done = site.typed("client", "reload", "--name", "pi-a")
    assert (done.returncode, "is not running" in done.stderr) == (9, True), done.stderr
    assert json.loads(site.typed("client", "status", "--json").stdout) == []
