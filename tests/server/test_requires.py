"""What a plan requires of a device: who lacks it or does not say is not selected, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.reasons import sentences
from tests.support.server_bench import Bench, scripted
from thinwire.core import RunPlan
from thinwire.core.equipment import GIB, Equipment, lacking
from thinwire.core.errors import PlanError
from thinwire.core.events import RoundOpened
from thinwire.core.fleet import ClientConnected, Hello
from thinwire.core.plan_values import Requires
from thinwire.server.policy.eligibility import ConnectedDevices

ALL = Requires(cores=4, memory_gb=2, mains=True, unmetered=True)
RICH = Equipment(4, int(8 * GIB), int(3 * GIB), mains=True, metered=False)


@pytest.mark.parametrize(
    ("has", "lacks"),
    [
        (RICH, ""),
        (replace(RICH, cores=8), ""),
        (replace(RICH, cores=2), "lacks 4 cores (it has 2)"),
        (replace(RICH, cores=None, mains=False),
         "lacks 4 cores (it does not say) and mains power (it runs on a battery)"),
        (replace(RICH, free_bytes=int(1.5 * GIB)), "lacks 2 GiB of free memory (it has 1.5)"),
        (replace(RICH, mains=False), "lacks mains power (it runs on a battery)"),
        (replace(RICH, metered=True), "lacks an unmetered link (its link is metered)"),
        (replace(RICH, mains=None, metered=None),
         "lacks mains power (it does not say) and an unmetered link (it does not say)"),
        (replace(RICH, free_bytes=None), "lacks 2 GiB of free memory (it does not say)"),
    ],
)  # fmt: skip
def test_what_a_device_does_not_say_it_does_not_have(has, lacks):
    assert lacking(ALL, has) == lacks
    assert lacking(Requires(), has) == ""


def test_who_lacks_it_is_not_selected_and_the_reason_stands_in_the_round(tmp_path):
    cohort = {"wait_for": 1, "requires": {"mains": True}}
    bench = Bench(tmp_path, [scripted(name) for name in "abc"], run={"rounds": 1}, cohort=cohort)
    bench.fleet.poll(0.0)
    for name, has in {"a": replace(RICH, mains=False), "b": Equipment(), "c": RICH}.items():
        bench.hears(name, has=has)
    assert bench.drive().status == "done"
    (opened,) = bench.events(RoundOpened)
    assert list(opened.assignments) == ["c"]
    assert sentences(opened.reasons) == {
        "a": "lacks mains power (it runs on a battery)", "b": "lacks mains power (it does not say)",
    }  # fmt: skip


def test_a_run_whose_devices_have_too_few_cores_waits_and_says_so(tmp_path):
    cohort = {"wait_for": 2, "wait_s": 5, "requires": {"cores": 8}}
    bench = Bench(tmp_path, [scripted(name) for name in "ab"], run={"rounds": 1}, cohort=cohort)
    bench.fleet.poll(0.0)
    bench.hears("a", has=replace(RICH, cores=1))
    bench.hears("b", has=replace(RICH, cores=8))
    row = bench.drive()
    assert (row.status, row.exit_code) == ("failed", 6)
    assert "a lacks 8 cores (it has 1)" in row.status_text


@pytest.mark.parametrize("cores", [-1, 2.5, "many"])
def test_a_number_of_cores_that_cannot_be_is_refused(cores):
    with pytest.raises(PlanError, match=r"\[cohort\] requires\.cores"):
        RunPlan.from_json({"run": {"task": "toy"}, "local": {"lr": 1.0}, "cohort": {"requires": {"cores": cores}}})


def test_memory_that_comes_and_goes_lets_nobody_in_who_was_revoked_for_what_it_is():
    online = ConnectedDevices()
    assert online.apply(ClientConnected("a", Hello("a", "p", has=RICH)))
    assert not online.apply(ClientConnected("a", Hello("a", "p", has=replace(RICH, free_bytes=7))))
    assert online.hellos["a"].has.free_bytes == 7
    assert online.apply(ClientConnected("a", Hello("a", "p", has=replace(RICH, metered=True))))
