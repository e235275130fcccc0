"""Read what this device has: processor, memory, power, and the price of its link.

Linux gives all of it but the link's price, which NetworkManager knows. The owner's policy overrides what is not
measurable (`client.toml`, `power` and `link`).

`DeviceInfoProbe` gives a hello its equipment, and skips small changes of free memory. `UplinkTimeEstimator` estimates
the time that encoding and uploading will take from the times that they took before, so that training ends early enough
(`[local] partial`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from thinwire.client.policy import Policy
from thinwire.compression.native import cores
from thinwire.core.equipment import Equipment
from thinwire.core.formatting import p90
from thinwire.core.types import ReplyHeader

NETWORK_MANAGER_TIMEOUT_S = 5.0  # NetworkManager responds within milliseconds, or is stuck
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
    return as_told(done.stdout.decode(errors="replace"))


def as_told(text: str) -> bool | None:
    """Return True if any connected device of nmcli's blocks is metered, False if none may be, else None.

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


AGAIN_S = 600.0  # between two measurements
NEWS = 0.25  # relative change of free memory that is reported
ROOT = Path("/")


class DeviceInfoProbe:
    """The equipment that a hello reports, measured every `AGAIN_S` and when the policy changes.

    Free memory is reported again only if it differs by a quarter. `mine` returns the processes of this client, whose
    memory is available to a task of its own.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        mine: Callable[[], Iterable[int]] = lambda: (os.getpid(),),
        root: Path = ROOT,
        now: Callable[[], float] = time.monotonic,
        link_is: Callable[..., bool | None] = metered,
    ) -> None:
        self._policy, self._mine, self._root, self._now, self._link_is = policy, mine, root, now, link_is
        self._told: Equipment | None = None
        self._looked_at, self._by = 0.0, Policy()

    def __call__(self) -> Equipment:
        """Return the equipment to report now."""
        policy = self._policy()
        if self._told is None or policy != self._by or self._now() - self._looked_at >= AGAIN_S:
            self._looked_at, self._by = self._now(), policy
            self._told = _worth_telling(self._told, self._look(policy))
        return self._told

    def _look(self, policy: Policy) -> Equipment:
        total, free = memory(self._root, self._mine())
        powered = on_mains(self._root) if policy.power == "auto" else policy.power == "mains"
        return Equipment(usable_cores(self._root), total, free, powered, self._link_is(policy.link))


def _worth_telling(told: Equipment | None, seen: Equipment) -> Equipment:
    """Return `told` with the new values, but with its free memory if that differs only a little."""
    if told is None or told.free_bytes is None or seen.free_bytes is None:
        return seen
    little = abs(seen.free_bytes - told.free_bytes) <= NEWS * told.free_bytes
    kept = Equipment(seen.cores, seen.memory_bytes, told.free_bytes, seen.mains, seen.metered)
    return kept if little else seen


def usable_cores(root: Path = ROOT) -> int:
    """Return the cores that this process may run on, or that its control groups give it time for; at least one."""
    given = [cores()]
    for group in _groups(root):
        quota, _, period = _text(group / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            given.append(int(quota) // int(period))
    return max(1, min(given))


def memory(root: Path = ROOT, mine: Iterable[int] = ()) -> tuple[int | None, int | None]:
    """Return all and free bytes of the machine, or of this process's control group if that has less.

    A value is None if it is not known. Memory of the processes `mine` counts as free.
    """
    fields = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    total, free = (_kilobytes(fields.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    if total is None or free is None:
        return total, None
    for limit, used in _limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    own = sum(_kilobytes(_field(_text(root / f"proc/{pid}/status"), "VmRSS")) or 0 for pid in mine)
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


KEPT = 20  # measured times kept of each codec
ENCODES = 50e6  # model bytes encoded per second: a guess until the first encode, far below what a small board does
SLOWER = 4.0  # the uplink is taken to be this much slower than the downlink until an upload was measured


def _kept() -> defaultdict[str, deque[float]]:
    return defaultdict(lambda: deque(maxlen=KEPT))


@dataclass
class UplinkTimeEstimator:
    """The times that encoding and uploading took in one run on this device.

    They are kept in memory, so a new process begins with a guess.
    """

    encoding: defaultdict[str, deque[float]] = field(default_factory=_kept)  # codec -> seconds
    sending: defaultdict[str, deque[float]] = field(default_factory=_kept)

    def encoded(self, header: ReplyHeader, commit_s: float) -> None:
        """Record one encode and its commit, which took `commit_s` more."""
        self.encoding[header.codec].append(header.timings.encode_s + commit_s)

    def sent(self, header: ReplyHeader, upload_s: float) -> None:
        """Record one upload in seconds."""
        self.sending[header.codec].append(upload_s)

    def least_s(self, codec: str) -> float:
        """Return the least seconds that both took with this codec; 0 if that is not known."""
        if codec not in self.encoding or codec not in self.sending:
            return 0.0
        return min(self.encoding[codec]) + min(self.sending[codec])

    def lasts_s(self, codec: str, dense_bytes: int, assigned_bytes: int, download_s: float) -> float:
        """Return the seconds to reserve after training: the p90 of both, or a guess that errs on the long side.

        The guess is for a whole model of `dense_bytes`, on an uplink that is `SLOWER` than the downlink. The downlink's
        speed is that of the assignment: `assigned_bytes` in `download_s`. The p90 of another codec is used if it is
        larger than the guess.
        """
        down_s = SLOWER * download_s * dense_bytes / assigned_bytes if assigned_bytes else 0.0
        return _expected(self.encoding, codec, dense_bytes / ENCODES) + _expected(self.sending, codec, down_s)


def _expected(known: defaultdict[str, deque[float]], codec: str, guess: float) -> float:
    if codec in known:
        return p90(known[codec])
    return max([guess, *(p90(seconds) for seconds in known.values())])
