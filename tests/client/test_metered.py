"""What a link costs: the owner knows best, then NetworkManager where it is installed."""

from __future__ import annotations

import os

import pytest

from thinwire.client.device_info import metered, parse_nmcli


def test_the_owner_knows_best_what_a_link_costs():
    assert (metered("metered"), metered("unmetered")) == (True, False)


@pytest.mark.parametrize(
    ("program", "price"),
    [
        ("echo GENERAL.TYPE:wifi; echo 'GENERAL.STATE:100 (connected)'; echo 'GENERAL.METERED:no (guessed)'", False),
        ("echo GENERAL.TYPE:wifi; echo 'GENERAL.STATE:100 (connected)'; echo 'GENERAL.METERED:yes (guessed)'", True),
        ("echo GENERAL.TYPE:wifi; echo 'GENERAL.STATE:100 (connected)'; echo 'GENERAL.METERED:unknown'", None),
        ("exit 8", None),
        ("true", None),
    ],
)
def test_networkmanager_is_selected_where_it_is_installed(tmp_path, monkeypatch, program, price):
    (tmp_path / "nmcli").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nmcli").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    assert metered("auto") is price


def test_without_networkmanager_nobody_knows(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metered("auto") is None


def test_one_metered_link_among_several_is_enough_and_bridges_do_not_count():
    wifi = "GENERAL.TYPE:wifi\nGENERAL.STATE:100 (connected)\nGENERAL.METERED:no (guessed)\n\n"
    bridge = "GENERAL.TYPE:bridge\nGENERAL.STATE:100 (connected (externally))\nGENERAL.METERED:unknown\n\n"
    modem = "GENERAL.TYPE:gsm\nGENERAL.STATE:100 (connected)\nGENERAL.METERED:yes\n\n"
    assert (parse_nmcli(wifi + bridge), parse_nmcli(wifi + bridge + modem), parse_nmcli(bridge)) == (False, True, None)
