"""A run that is commanded to stop while it waits for its turn ends at once, and never begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.server.test_run_notices import serves
from tests.support.server_bench import LAYOUT, REPORT, Bench, three
from thinwire.core import RunPlan
from thinwire.core.events import Event, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.server.submit import FirstModel, submit


def test_a_queued_run_is_stopped_while_another_one_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 5})
    plan, nothing = RunPlan.from_json(bench.store.run(bench.run_id).plan), np.zeros(0, np.float32)
    second, third = (
        submit(bench.store, bench.home, plan, FirstModel(LAYOUT, REPORT, np.zeros(LAYOUT.size, np.float32), nothing))
        for _ in range(2)
    )
    bench.store.commands.add("stop-run", second)
    meanwhile = list[str]()

    def look(event: Event) -> bool:
        if isinstance(event, RoundClosed):
            meanwhile.append(bench.store.run(second).status)
        return False

    serves(bench, 60.0, kill=look, max_runs=1)
    assert meanwhile[0] == "stopped", "it waited until the run before it was over"
    events = [event for _, event in bench.store.events(second)]
    assert not [event for event in events if isinstance(event, RoundOpened)]
    last = events[-1]
    assert isinstance(last, RunStatusChanged)
    assert (last.status, last.text, last.exit_code) == ("stopped", "stopped by a person before it began", 10)
    assert not bench.store.commands.pending()
    assert len(bench.events(RoundClosed)) == 5
    assert bench.store.run(third).status == "done"
