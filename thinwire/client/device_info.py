"""Read the equipment of this device: processor, memory, power, and whether its link is metered.

Linux reports all of it except the metering, which NetworkManager knows. The owner's policy can set what is not
measurable (`client.toml`, `power` and `link`).

`DeviceInfoProbe` gives a hello its equipment, and skips small changes of free memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from thinwire.client.policy import Policy
from thinwire.compression.native import cores
from thinwire.core.equipment import Equipment

NETWORK_MANAGER_TIMEOUT_S = 5.0  # NetworkManager responds within milliseconds, or hangs
NMCLI = ("nmcli", "-t", "-f", "GENERAL.TYPE,GENERAL.STATE,GENERAL.METERED", "dev", "show")
VIRTUAL = frozenset({"loopback", "bridge", "dummy", "veth"})  # another device carries their traffic


def metered(link: Literal["auto", "metered", "unmetered"]) -> bool | None:
    """Return True if the link is paid by volume: the owner's value, else NetworkManager's; None if not known."""
    if link != "auto":
        return link == "metered"
    if (program := shutil.which(NMCLI[0])) is None:
        return None
    try:
        done = subprocess.run(
            (program, *NMCLI[1:]),
            capture_output=True,
            timeout=NETWORK_MANAGER_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_nmcli(done.stdout.decode(errors="replace"))


def parse_nmcli(text: str) -> bool | None:
    """Return True if any connected device of nmcli's blocks is metered, False if none may be, else None.

    >>> parse_nmcli("GENERAL.TYPE:wifi\\nGENERAL.STATE:100 (connected)\\nGENERAL.METERED:no (guessed)")
    False
    >>> parse_nmcli("GENERAL.TYPE:gsm\\nGENERAL.STATE:100 (connected)\\nGENERAL.METERED:yes")
    True
    >>> parse_nmcli("GENERAL.TYPE:wifi\\nGENERAL.STATE:30 (disconnected)\\nGENERAL.METERED:no") is None
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


MEASURE_EVERY_S = 600.0  # between two measurements
MIN_CHANGE = 0.25  # relative change of free memory that is reported
ROOT = Path("/")


class DeviceInfoProbe:
    """Returns the equipment that a hello reports, measured every `MEASURE_EVERY_S` and when the policy changes.

    Free memory is reported again only if it differs by a quarter. `own_pids` returns the processes of this client:
    their memory is available to its tasks.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        own_pids: Callable[[], Iterable[int]] = lambda: (os.getpid(),),
        root: Path = ROOT,
        now: Callable[[], float] = time.monotonic,
        is_metered: Callable[..., bool | None] = metered,
    ) -> None:
        self._policy, self._own_pids, self._root, self._now, self._is_metered = policy, own_pids, root, now, is_metered
        self._reported: Equipment | None = None
        self._measured_at, self._measured_by = 0.0, Policy()

    def __call__(self) -> Equipment:
        """Return the equipment to report now."""
        policy = self._policy()
        if self._reported is None or policy != self._measured_by or self._now() - self._measured_at >= MEASURE_EVERY_S:
            self._measured_at, self._measured_by = self._now(), policy
            self._reported = _without_small_change(self._reported, self._measure(policy))
        return self._reported

    def _measure(self, policy: Policy) -> Equipment:
        total, free = memory(self._root, self._own_pids())
        powered = on_mains(self._root) if policy.power == "auto" else policy.power == "mains"
        return Equipment(usable_cores(self._root), total, free, powered, self._is_metered(policy.link))


def _without_small_change(reported: Equipment | None, seen: Equipment) -> Equipment:
    """Return the equipment `seen`, but with the free memory that was `reported` if it differs only a little."""
    if reported is None or reported.free_bytes is None or seen.free_bytes is None:
        return seen
    little = abs(seen.free_bytes - reported.free_bytes) <= MIN_CHANGE * reported.free_bytes
    kept = Equipment(seen.cores, seen.memory_bytes, reported.free_bytes, seen.mains, seen.metered)
    return kept if little else seen


def usable_cores(root: Path = ROOT) -> int:
    """Return the cores that this process may run on, or that its control groups give it time for; at least one."""
    given = [cores()]
    for group in _groups(root):
        quota, _, period = _text(group / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            given.append(int(quota) // int(period))
    return max(1, min(given))


def memory(root: Path = ROOT, own_pids: Iterable[int] = ()) -> tuple[int | None, int | None]:
    """Return all and free bytes of the machine, or of this process's control group if that has less.

    A value is None if it is not known. Memory of the processes `own_pids` counts as free.
    """
    fields = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    total, free = (_kilobytes(fields.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    if total is None or free is None:
        return total, None
    for limit, used in _limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    own = sum(_kilobytes(_field(_text(root / f"proc/{pid}/status"), "VmRSS")) or 0 for pid in own_pids)
    return total, min(total, free + own)


def on_mains(root: Path = ROOT) -> bool | None:
    """Return True if power comes from the mains; None if no supply of this machine reports it.

    Mains power is a supply that is online. A supply that charges only a peripheral such as a mouse (scope Device) does
    not count. Machines without a battery often list no supply at all, so the result is None.
    """
    supplies = [
        {name: _text(path / name).strip() for name in ("type", "scope", "online", "status")}
        for path in sorted((root / "sys/class/power_supply").glob("*"))
    ]
    own = [one for one in supplies if one["scope"] != "Device"]
    walls = [one["online"] for one in own if one["type"] in ("Mains", "USB") and one["online"]]
    if any(online != "0" for online in walls):
        return True
    batteries = [one["status"] for one in own if one["type"] == "Battery"]
    if "Discharging" in batteries or (walls and batteries):
        return False
    return None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) bytes of every control group around this process that has a limit."""
    for group in _groups(root):
        most, used = (_text(group / f"memory.{name}").strip() for name in ("max", "current"))
        if most.isdigit() and used.isdigit():
            yield int(most), int(used)


def _groups(root: Path) -> tuple[Path, ...]:
    """Return the control groups around this process, its own first (version 2 only)."""
    path = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    if path is None:
        return ()
    base = root / "sys/fs/cgroup"
    here = base / path.strip().lstrip("/")
    return (here, *(up for up in here.parents if up == base or base in up.parents))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    return next((line.partition(":")[2] for line in text.splitlines() if line.startswith(f"{name}:")), "")


def _kilobytes(text: str) -> int | None:
    number = text.strip().removesuffix("kB").strip()
    return int(number) * 1024 if number.isdigit() else None
