"""Real processes on lines of 0.1 and 20 Mb/s up: each is selected in the codec that its line carries in time.

The kernel shapes them (tests/support/shaped.py). What is asserted stands in the journal, with room for a slow machine:
of the 81 s that an answer may take, int8 takes 98 s on the slow line by its bytes alone, and the update that is sent
instead 10; on the fast one int8 takes half a second.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.namespaces import AGGREGATOR, PORT
from tests.support.processes import EXAMPLE, Site
from tests.support.shaped import star, why_not
from thinwire.core.events import RoundClosed, RoundOpened

UP_MBIT = {"slow": 0.1, "fast": 20.0}
MILD, HARSH = "int8", "topk(0.05) > int8"
WIDE = "16384"  # hidden units: 1.2 M parameters
PLAN = (
    "run.rounds=500", "cohort.wait_for=2", "cohort.deadline_s=90", "local.steps=5",
    f'uplink.codec="{MILD}"', f'uplink.ladder=["{MILD}", "{HARSH}"]',
)  # fmt: skip


@pytest.mark.slow
def test_the_ladder_gives_a_slow_line_the_more_compressed_codec_and_every_round_closes_in_time(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with star(UP_MBIT) as net:
        site = Site(tmp_path / "home", ("ip", "netns", "exec", net.aggregator))
        site.example = wide_example(tmp_path / "wide")
        try:
            site.listen = f"0.0.0.0:{PORT}"
            site.start_aggregator()
            for part, (name, namespace) in enumerate(net.devices.items()):
                join_and_start(site, name, part, ("ip", "netns", "exec", namespace))
            run_id = site.begin(*PLAN)
            site.until(lambda: any(e.codecs.get("fast") == MILD for e in opened(site, run_id)))
            now = opened(site, run_id)[-1].round
            site.until_event(run_id, RoundClosed, round=now)
            assert {e.codecs["slow"] for e in opened(site, run_id)} == {HARSH}
            assert {e.reason for e in site.events(run_id) if isinstance(e, RoundClosed)} == {"all"}
            with site.store() as store:
                up = {row.device: 1e-6 * (row.p50 or math.inf) for row in store.measures() if row.kind == "up"}
            assert up["slow"] < 3 * UP_MBIT["slow"] < up["fast"], "what their lines are taken for"
            assert site.typed("runs", "stop", run_id).returncode == 0
        finally:
            site.close()


def test_a_line_is_shaped_down_too_where_a_rate_is_given_for_that() -> None:
    if reason := why_not():
        pytest.skip(reason)

    def rate(name: str, line: str) -> str:
        words = ["tc", "-n", name, "qdisc", "show", "dev", line]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return said.partition("rate ")[2].partition(" ")[0] if "tbf" in said else ""

    with star({"slow": 1.0, "fast": 20.0}, {"slow": 2.0}, queued="100ms") as net:
        assert {device: rate(name, "router") for device, name in net.devices.items()} == {
            "slow": "1Mbit", "fast": "20Mbit",
        }  # fmt: skip
        assert {device: rate(net.router, device) for device in net.devices} == {"slow": "2Mbit", "fast": ""}


def wide_example(folder: Path) -> Path:
    """The digits with a model whose bytes a line feels."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    task = folder / "task.py"
    task.write_text(task.read_text().replace("128", WIDE))
    return folder


def join_and_start(site: Site, name: str, part: int, there: tuple[str, ...]) -> None:
    (invited,) = json.loads(site.typed("devices", "invite", "--json").stdout)
    url = f"https://{AGGREGATOR}:{PORT}"
    joined = site.call("client", "join", url, invited["invitation"], "--name", name, inside=there)
    assert joined.returncode == 0, joined.stderr
    site.start(
        "client", "start", "--name", name, "--task", f"digits={site.example / 'task.py'}",
        "--partition", f"{part}/{len(UP_MBIT)}", inside=there,
    )  # fmt: skip


def opened(site: Site, run_id: str) -> list[RoundOpened]:
    return [e for e in site.events(run_id) if isinstance(e, RoundOpened)]
