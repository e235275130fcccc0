"""The demo's plan on lossy lines of 1 Mb/s and 200 ms: a mobile network on a bad day. Every byte of it over TLS."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import THE_DEMOS, Site
from tests.support.proxy import proxy
from thinwire.core.events import ClientFailed, RoundClosed

BYTES_PER_S, LOSS = 1_000_000 / 8, 0.02
LATENCY_S = 0.2  # in each direction: an answer comes after twice that
ROUNDS, DEVICES = 20, ("pi-a", "pi-b")
CONNECTIONS = 2 + 2  # of a device: for the CA and for the join, and one to wait for assignments and one to push


@pytest.mark.slow  # half a minute, most of it the line's
def test_join_and_twenty_rounds_of_the_demo_over_a_thin_line_without_a_time_out(site: Site) -> None:
    site.start_aggregator("--san", "localhost")
    invited = json.loads(site.typed("devices", "invite", "--count", str(len(DEVICES)), "--json").stdout)
    with proxy(site.listen, bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S, loss=LOSS) as line:
        for name, one in zip(DEVICES, invited, strict=True):
            joined = site.typed("client", "join", f"https://{line.address}", one["invitation"], "--name", name)
            assert joined.returncode == 0, joined.stderr
        for part, name in enumerate(DEVICES):
            site.start(
                "client", "start", "--name", name, "--task", f"digits={THE_DEMOS / 'task.py'}",
                "--partition", f"{part}/{len(DEVICES)}",
            )  # fmt: skip
        site.example = THE_DEMOS
        run_id = site.begin(f"run.rounds={ROUNDS}", f"cohort.wait_for={len(DEVICES)}")
        row = site.until_done(run_id)
        assert (row.status, row.version, row.exit_code) == ("done", ROUNDS, 0), site.said()
        events = site.events(run_id)
        assert [e.reason for e in events if isinstance(e, RoundClosed)] == ["all"] * ROUNDS
        assert [e for e in events if isinstance(e, ClientFailed)] == []
        assert line.up.lost + line.down.lost >= 1
        assert line.connections == CONNECTIONS * len(DEVICES), "a line that was given up was dialled again"
        assert "cannot reach" not in site.said()
