"""What is shown of a client that stands still: online while it was heard within two polls, then offline, then back."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.support.frozen import frozen
from tests.support.processes import Site
from tests.support.short_poll import POLL_S


@contextlib.contextmanager
def dashboard(site: Site) -> Iterator[httpx.Client]:
    """Somebody who has logged in."""
    login = json.loads(site.typed("aggregator", "status", "--login", "--json").stdout)["login"]
    with httpx.Client(base_url=f"http://{site.dashboard_at}", timeout=60, trust_env=False) as client:
        assert client.get(login).status_code < 400
        yield client


def listed(site: Site) -> dict[str, Any]:
    """What `thinwire devices list` says of the one device."""
    (device,) = json.loads(site.typed("devices", "list", "--json").stdout)
    return dict(device)


def test_a_client_that_is_stopped_is_shown_offline_after_two_polls_and_online_when_it_goes_on(site: Site) -> None:
    site.page, site.aggregator_program = ("--dashboard", site.dashboard_at), ("tests.support.short_poll",)
    site.start_aggregator()
    client = site.start_client("pi-a")
    with dashboard(site) as page:

        def shown() -> dict[str, Any]:
            (device,) = page.get("/api/v1/devices").raise_for_status().json()
            return dict(device)

        site.until(lambda: len(page.get("/api/v1/devices").json()) == 1, "the dashboard lists the device")
        site.until(lambda: listed(site)["online"] and shown()["online"], "the device is online")
        with frozen(client.pid):
            stopped_at = time.time()
            site.until(lambda: not listed(site)["online"] and not shown()["online"], "the device is offline")
            row, seen = listed(site), shown()
            assert row["last_seen_at"] < stopped_at + POLL_S / 2, "an answer that nobody read is no word of the device"
            assert abs(seen["last_seen_at"] - row["last_seen_at"]) < 0.1
            assert seen["disconnected_at"] >= seen["last_seen_at"] + 2 * POLL_S - 0.1
            silent_s = float(seen["disconnect_reason"].removeprefix("it has not called for ").removesuffix(" s"))
            assert silent_s >= 2 * POLL_S
            line = next(line for line in site.typed("devices", "list").stdout.splitlines() if line.startswith("pi-a"))
            assert " offline " in line
            assert " s ago" in line
        site.until(
            lambda: listed(site)["online"] and (back := shown())["online"] and back["disconnected_at"] is None,
            "the device is online again",
        )
        assert listed(site)["last_seen_at"] > stopped_at
