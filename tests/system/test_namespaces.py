"""A device in a network of its own, behind a router: it joins, outlives a cut link, and comes from another address.

Real processes of `thinwire` on machines that are network namespaces: nothing here goes over loopback.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.namespaces import AGGREGATOR, DEVICE, PORT, Network, network, why_not
from tests.support.processes import EXAMPLE, Site
from thinwire.core.events import RoundClosed, UpdateAccepted

ELSEWHERE = "10.77.2.77"


@dataclass
class There:
    """An aggregator on one machine and a device on another one, which has joined and is being served."""

    net: Network
    site: Site
    aggregator: subprocess.Popen[bytes]

    def peers(self) -> set[str]:
        return self.net.peers(self.aggregator.pid)

    def said(self) -> str:
        """By the device's client."""
        return self.site.log_of(self.site.processes[-1])

    def rounds(self, run_id: str) -> list[str]:
        return [event.reason for event in self.site.events(run_id) if isinstance(event, RoundClosed)]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    if reason := why_not():
        pytest.skip(reason)
    with network() as net:
        here, on_the_device = net.inside(net.aggregator), net.inside(net.device)
        site = Site(tmp_path_factory.mktemp("there") / "home", here)
        try:
            site.listen = f"0.0.0.0:{PORT}"
            aggregator = site.start_aggregator()
            (invited,) = json.loads(site.typed("devices", "invite", "--json").stdout)
            url = f"https://{AGGREGATOR}:{PORT}"
            joined = site.call("client", "join", url, invited["invitation"], "--name", "pi-01", inside=on_the_device)
            assert joined.returncode == 0, joined.stderr
            site.start(
                "client", "start", "--name", "pi-01", "--task", f"digits={EXAMPLE / 'task.py'}", step_s=0.05,
                inside=on_the_device,
            )  # fmt: skip
            made = There(net, site, aggregator)
            site.until(lambda: made.peers() == {DEVICE})
            yield made
        finally:
            site.close()


def test_a_device_behind_a_router_trains(there: There) -> None:
    run_id = there.site.begin("run.rounds=2", "local.steps=20")
    assert there.site.until_done(run_id).status == "done", there.site.said()
    assert there.rounds(run_id) == ["all", "all"]
    assert there.peers() == {DEVICE}


def test_a_link_that_is_cut_in_a_round_and_comes_back_costs_no_round(there: There) -> None:
    before = len(there.said())
    run_id = there.site.begin("run.rounds=3", "local.steps=40", "cohort.deadline_s=60")
    there.site.until(lambda: "round 2: train" in there.said()[before:])
    there.net.link("down")
    there.site.until(lambda: "round 2: train 40/40" in there.said()[before:])
    assert there.rounds(run_id) == ["all"], "what was trained cannot have arrived"
    there.net.link("up")
    assert there.site.until_done(run_id).status == "done", there.site.said()
    assert there.rounds(run_id) == ["all"] * 3
    accepted = [e.update_id for e in there.site.events(run_id) if isinstance(e, UpdateAccepted)]
    assert len(accepted) == len(set(accepted)) == 3


def test_a_device_whose_address_changes_polls_from_the_new_one_of_its_own_accord(there: There) -> None:
    """It looks whether it moved. A poll that ends otherwise, by its time or by TCP's probes, is a call that failed, and
    the client says so.
    """
    before = len(there.said())
    there.net.readdress(ELSEWHERE)
    there.site.until(lambda: ELSEWHERE in there.peers())
    assert "trying again" not in there.said()[before:]
    run_id = there.site.begin("run.rounds=1", "local.steps=20")
    assert there.site.until_done(run_id).status == "done", there.site.said()
    assert there.rounds(run_id) == ["all"]
