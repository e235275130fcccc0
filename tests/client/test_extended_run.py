"""A run that was over and got more rounds: the device begins with residual 0, and its sequence goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.small_task import Aggregator, plan_of, task_of

FROM = 3  # the first round of the extension


@pytest.mark.parametrize("told", [True, False], ids=["it was told the end", "it was offline at the end"])
def test_the_device_begins_with_residual_0_and_goes_on_with_its_sequence(tmp_path: Path, told: bool) -> None:
    site = Aggregator(tmp_path / "site", task_of(), plan_of(codec="topk(0.2) > int8", feedback="classic"))
    alone = Aggregator(tmp_path / "alone", site.task, site.plan)

    def train(aggregator: Aggregator, handler: Any, number: int, **more: Any) -> tuple[Any, bytes]:
        header, bundle = aggregator.answer(handler, aggregator.assign(number, **more))
        return header, bundle.read_bytes()

    handler = site.handler()
    first, _ = train(site, handler, 1)
    if told:
        handler.stop(site.assign(1, "stop", outcomes=[(1, "aggregated")]).assignment, site.said.append)
        handler = site.handler()
    later, sent = train(site, handler, FROM, references_from=FROM)
    fresh, as_new = train(alone, alone.handler(), FROM, references_from=FROM)
    assert (first.update_id.sequence, later.update_id.sequence) == (1, 2)
    assert (later.lost, fresh.lost) == ("", "")
    assert later.residual_norm == fresh.residual_norm
    assert sent == as_new, "the same bytes as of a device that has never worked in the run"
