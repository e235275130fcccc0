"""What a device says that it has: read where Linux keeps it, told by its owner, or said to be unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.client import device_info
from thinwire.client.device_info import MEASURE_EVERY_S, DeviceInfoProbe, memory, on_mains, usable_cores
from thinwire.client.policy import Policy
from thinwire.core.clock import VirtualClock

MEMINFO = "MemTotal:        4000000 kB\nMemFree:          100000 kB\nMemAvailable:    1000000 kB\n"
KB = 1024


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def supply(name: str, **fields: str) -> dict[str, str]:
    return {f"sys/class/power_supply/{name}/{field}": f"{value}\n" for field, value in fields.items()}


AC_ON, AC_OFF = supply("AC", type="Mains", online="1"), supply("AC", type="Mains", online="0")
FULL, EMPTYING = supply("BAT0", type="Battery", status="Full"), supply("BAT0", type="Battery", status="Discharging")
MOUSE = supply("mouse", type="Battery", scope="Device", status="Discharging")


@pytest.mark.parametrize(
    ("supplies", "mains"),
    [
        ({}, None),
        (MOUSE, None),
        (FULL, None),
        (AC_ON, True),
        (AC_ON | FULL, True),
        (AC_ON | MOUSE, True),
        (AC_OFF | EMPTYING, False),
        (AC_OFF | FULL, False),
        (EMPTYING, False),
        (supply("ucsi", type="USB", online="1") | EMPTYING, True),
    ],
)
def test_mains_is_what_a_supply_says_and_else_unknown(tmp_path, supplies, mains):
    assert on_mains(machine(tmp_path, supplies)) is mains


def test_free_memory_counts_what_this_client_itself_uses(tmp_path):
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/7/status": "VmRSS:\t  50000 kB\n"})
    assert memory(root) == (4_000_000 * KB, 1_000_000 * KB)
    assert memory(root, [7, 8]) == (4_000_000 * KB, 1_050_000 * KB)
    assert memory(tmp_path / "elsewhere") == (None, None)


def test_a_control_group_that_has_less_is_what_counts(tmp_path):
    groups = {
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/system.slice/thinwire.service\n",
        "sys/fs/cgroup/system.slice/memory.max": "1000000\n", "sys/fs/cgroup/system.slice/memory.current": "400000\n",
        "sys/fs/cgroup/system.slice/thinwire.service/memory.max": "max\n",
        "sys/fs/cgroup/system.slice/thinwire.service/memory.current": "300000\n",
    }  # fmt: skip
    assert memory(machine(tmp_path, groups)) == (1_000_000, 600_000)


@pytest.mark.parametrize(
    ("quota", "above", "cores"),
    [("max 100000", "max 100000", 8), ("250000 100000", "max 100000", 2), ("max 100000", "100000 100000", 1),
     ("50000 100000", "max 100000", 1), ("1600000 100000", "max 100000", 8), ("", "", 8), ("junk", "3 0", 8)],
)  # fmt: skip
def test_cores_that_a_control_group_gives_no_time_for_do_not_count(tmp_path, monkeypatch, quota, above, cores):
    monkeypatch.setattr(device_info, "cores", lambda: 8)
    groups = {
        "proc/self/cgroup": "0::/system.slice/thinwire.service\n", "sys/fs/cgroup/system.slice/cpu.max": f"{above}\n",
        "sys/fs/cgroup/system.slice/thinwire.service/cpu.max": f"{quota}\n",
    }  # fmt: skip
    assert usable_cores(machine(tmp_path, groups)) == cores
    assert usable_cores(tmp_path / "elsewhere") == 8


class Told:
    """A device of which a test decides what there is."""

    def __init__(self, root: Path, policy: Policy = Policy()) -> None:
        self.root, self.policy, self.clock, self.looks = root, policy, VirtualClock(), 0
        self.having = DeviceInfoProbe(lambda: self.policy, list, root, self.clock.now, self.link_is)

    def link_is(self, link: str) -> bool | None:
        self.looks += 1
        return None if link == "auto" else link == "metered"

    def free(self, kilobytes: int) -> None:
        machine(self.root, {"proc/meminfo": MEMINFO.replace("1000000", str(kilobytes))})


def test_what_nobody_can_measure_its_owner_says(tmp_path):
    unknown = Told(tmp_path).having()
    assert (unknown.mains, unknown.metered, unknown.free_bytes) == (None, None, None)
    said = Told(tmp_path, Policy(power="mains", link="metered")).having()
    assert (said.mains, said.metered) == (True, True)
    on_battery = Told(machine(tmp_path, AC_ON), Policy(power="battery")).having()
    assert on_battery.mains is False


def test_it_is_looked_at_again_after_a_while_and_a_little_memory_is_no_news(tmp_path):
    told = Told(tmp_path)
    told.free(1_000_000)
    first = told.having()
    told.free(700_000)
    assert told.having() == first
    assert told.looks == 1
    told.clock.advance(MEASURE_EVERY_S)
    assert told.having() == replace(first, free_bytes=700_000 * KB)
    told.free(800_000)
    told.clock.advance(MEASURE_EVERY_S)
    assert told.having().free_bytes == 700_000 * KB


def test_another_policy_is_looked_at_at_once(tmp_path):
    told = Told(tmp_path)
    assert told.having().metered is None
    told.policy = Policy(link="unmetered")
    assert told.having().metered is False
