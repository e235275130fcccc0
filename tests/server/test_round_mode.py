"""A mode of rounds is one object: the plan decides which one, and nobody else looks at what decides it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import thinwire.server
from thinwire.core import RunPlan
from thinwire.server.buffered_round import BufferedMode
from thinwire.server.pipelining import PipelinedMode
from thinwire.server.round_mode import RoundMode
from thinwire.server.run import MODES, mode_of

PLAN = '[run]\ntask="t"\n[local]\nlr=1\n{local}\n[cohort]\n{cohort}'
PLANS = [
    (PLAN.format(local="", cohort=""), RoundMode),
    (PLAN.format(local="", cohort='mode="buffered"\nbuffer=4'), BufferedMode),
    (PLAN.format(local="overlap={max_delay=1}", cohort=""), PipelinedMode),
]


@pytest.mark.parametrize(("text", "mode"), PLANS)
def test_each_plan_has_exactly_one_mode(text: str, mode: type[RoundMode]) -> None:
    plan = RunPlan.parse(text)
    assert type(mode_of(plan)) is mode
    assert [each for each in MODES if each.is_for(plan)] == [mode]


def test_only_the_modes_look_at_the_plan_s_mode() -> None:
    folder = Path(thinwire.server.__file__).parent
    looks = {path.stem for path in folder.rglob("*.py") if re.search(r"cohort\.mode\b", path.read_text())}
    assert looks == {"round_mode", "buffered_round"}
