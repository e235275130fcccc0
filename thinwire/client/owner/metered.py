"""Whether this device's link is paid by volume, as far as that can be known."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Literal

PATIENCE_S = 5.0  # NetworkManager answers within milliseconds, or is stuck
NMCLI = ("nmcli", "-t", "-f", "GENERAL.TYPE,GENERAL.STATE,GENERAL.METERED", "dev", "show")
VIRTUAL = frozenset({"loopback", "bridge", "dummy", "veth"})  # they carry what another device sends


def metered(link: Literal["auto", "metered", "unmetered"]) -> bool | None:
    """As the owner says, else as NetworkManager does; None: nobody knows."""
    if link != "auto":
        return link == "metered"
    if (program := shutil.which(NMCLI[0])) is None:
        return None
    try:
        done = subprocess.run(
            (program, *NMCLI[1:]),
            capture_output=True,
            timeout=PATIENCE_S,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return as_told(done.stdout.decode(errors="replace"))


def as_told(text: str) -> bool | None:
    """What nmcli's blocks, one a device, come to: True where any connected one is metered, False where none may be.

    >>> as_told("GENERAL.TYPE:wifi\\nGENERAL.STATE:100 (connected)\\nGENERAL.METERED:no (guessed)")
    False
    >>> as_told("GENERAL.TYPE:gsm\\nGENERAL.STATE:100 (connected)\\nGENERAL.METERED:yes")
    True
    >>> as_told("GENERAL.TYPE:wifi\\nGENERAL.STATE:30 (disconnected)\\nGENERAL.METERED:no") is None
    True
    """
    found: list[bool | None] = []
    for block in text.split("GENERAL.TYPE:")[1:]:
        kind, _, rest = block.partition("\n")
        fields = dict(line.split(":", 1) for line in rest.splitlines() if ":" in line)
        if kind.strip() not in VIRTUAL and fields.get("GENERAL.STATE", "").startswith("100"):
            found.append({"yes": True, "no": False}.get(fields.get("GENERAL.METERED", "").partition(" ")[0]))
    if True in found:
        return True
    return False if found and None not in found else None
