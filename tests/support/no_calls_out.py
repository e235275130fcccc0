"""What is put before every process of a test as `sitecustomize`: only this machine is reached, and all tries are kept.

An audit hook (PEP 578) sees every connect and look-up that Python makes, whoever requests it; it cannot be taken away.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOG = "THINWIRE_TEST_CALLS"
CALLS = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1}  # and where the address stands
LOOK_UPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"}


def is_here(host: Any) -> bool:
    """Whether an address is this machine's own, and needs nobody to be looked up."""
    if host in (None, "", b"", "localhost"):
        return True
    try:
        found = ipaddress.ip_address(host.decode() if isinstance(host, bytes) else str(host))
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def deny(event: str, args: tuple[Any, ...]) -> None:
    """Write down and refuse what would leave this machine."""
    if event in CALLS:
        where = args[CALLS[event]]
        inside = not isinstance(where, tuple) or not where or is_here(where[0])
    elif event in LOOK_UPS:
        where = args[0][0] if event == "socket.getnameinfo" else args[0]
        inside = is_here(where)
    else:
        return
    with open(os.environ[LOG], "a") as file:
        file.write(f"{'in' if inside else 'OUT'} {event} {where!r} {' '.join(sys.argv[:4])}\n")
    if not inside:
        raise PermissionError(f"a test allows no call to {where!r}")


def environment(folder: Path) -> Mapping[str, str]:
    """What a process needs to be denied; its calls are in `folder`/calls.txt."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from tests.support.no_calls_out import deny\nsys.path.pop()\nsys.addaudithook(deny)\n"
    )
    (folder / "calls.txt").touch()
    return {"PYTHONPATH": str(folder / "path"), LOG: str(folder / "calls.txt")}


def calls(folder: Path) -> list[str]:
    return (folder / "calls.txt").read_text().splitlines()
